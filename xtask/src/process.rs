//! Running cargo and git, and finding the workspace.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask is a folder of the workspace")
        .to_path_buf()
}

/// The cargo that runs this chore, started in the root of the workspace.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root());
    command
}

/// Git, in the root of the workspace.
pub(crate) fn git() -> Command {
    let mut command = Command::new("git");
    command.current_dir(root());
    command
}

/// Where cargo puts what it builds.
#[expect(
    clippy::disallowed_methods,
    reason = "cargo is told so in its environment"
)]
pub(crate) fn target() -> PathBuf {
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// Says what is run, runs it, and fails if it fails.
pub(crate) fn run(command: &mut Command) -> Result<(), String> {
    println!("$ {}", words(command));
    let status = command
        .status()
        .map_err(|error| format!("{}: {error}", words(command)))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{}: {status}", words(command)))
    }
}

/// The command as one would type it.
pub(crate) fn words(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut line = program
        .file_name()
        .unwrap_or_else(|| command.get_program())
        .to_string_lossy()
        .into_owned();
    for argument in command.get_args() {
        line.push(' ');
        line.push_str(&argument.to_string_lossy());
    }
    line
}
