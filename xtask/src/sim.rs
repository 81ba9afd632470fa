//! `cargo xtask sim`: the engine in virtual time, over many seeds or one script.

use crate::process;

/// Builds the simulation with optimisation and runs it with `arguments`.
pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    process::run(
        process::cargo()
            .args(["run", "--release", "--package", "kvcached-sim", "--"])
            .args(arguments),
    )
}
