//! `cargo xtask bench` and `bench-ab`: criterion, alone or over two revisions.
//!
//! Absolute times on a shared machine mean little; two revisions measured one after the other on
//! the same machine can be compared.

use std::process::Command;

use crate::process;

const BASELINE: &str = "bench-ab";

/// The benchmarks of the working tree; `arguments` go to `cargo bench`.
pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    process::run(
        process::cargo()
            .args(["bench", "--package", "kvcached-benches"])
            .args(arguments),
    )
}

/// The benchmarks of a revision, then those of the working tree against them.
pub(crate) fn compare(arguments: &[String]) -> Result<(), String> {
    let Some((revision, selection)) = arguments.split_first() else {
        return Err("bench-ab needs a revision to compare with".to_owned());
    };
    let folder = process::root().join("target/bench-ab");
    let tree = folder.join("tree");
    // A tree that an interrupted comparison left behind would refuse to be made anew.
    drop(git(&["worktree", "remove", "--force"]).arg(&tree).output());
    process::run(
        git(&["worktree", "add", "--detach"])
            .arg(&tree)
            .arg(revision),
    )?;
    let measure = |command: &mut Command, baseline: &str| {
        process::run(
            command
                .args(["bench", "--package", "kvcached-benches"])
                .args(selection)
                .args(["--", baseline, BASELINE])
                .env("CRITERION_HOME", folder.join("criterion")),
        )
    };
    let before = measure(
        process::cargo()
            .current_dir(&tree)
            .env("CARGO_TARGET_DIR", folder.join("target")),
        "--save-baseline",
    );
    let result = before.and_then(|()| measure(&mut process::cargo(), "--baseline"));
    process::run(git(&["worktree", "remove", "--force"]).arg(&tree))?;
    result
}

fn git(arguments: &[&str]) -> Command {
    let mut command = process::git();
    command.args(arguments);
    command
}
