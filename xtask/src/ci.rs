//! `cargo xtask ci`: what has to pass, cheapest first.

use crate::{process, test, tidy};

/// Formatting, the repository's own rules, lints, documentation, tests.
pub(crate) fn run() -> Result<(), String> {
    process::run(process::cargo().args(["fmt", "--all", "--check"]))?;
    tidy::run()?;
    for which in [
        &["--workspace"][..],
        &["-p", "kvcached-page-alloc", "--features", "shuttle"],
    ] {
        let mut lints = process::cargo();
        lints.arg("clippy").args(which);
        lints.args(["--all-targets", "--locked", "--", "-D", "warnings"]);
        process::run(&mut lints)?;
    }
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
