//! `cargo xtask ci`: what has to pass, cheapest first.

use crate::{process, test, tidy};

/// Formatting, the repository's own rules, lints, documentation, tests.
pub(crate) fn run() -> Result<(), String> {
    process::run(process::cargo().args(["fmt", "--all", "--check"]))?;
    tidy::run()?;
    process::run(process::cargo().args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--",
        "-D",
        "warnings",
    ]))?;
    process::run(
        process::cargo()
            .args([
                "doc",
                "--workspace",
                "--no-deps",
                "--document-private-items",
                "--locked",
            ])
            .env("RUSTDOCFLAGS", "-D warnings"),
    )?;
    test::run(&["--locked".to_owned()])
}
