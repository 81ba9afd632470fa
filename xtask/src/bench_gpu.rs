//! `cargo xtask bench-gpu`: what memory under a KV cache costs on a GPU, here or packed for a
//! machine that has one and perhaps no Rust.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::process;

const PACKAGE: &str = "kvcached-bench-gpu";

/// Runs the benchmark with `arguments`, or with `--package DIR` builds it into a folder.
pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    let revision = said_by(process::git().args(["describe", "--always", "--dirty", "--abbrev=12"]));
    let date = said_by(Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ"]));
    match arguments {
        [flag, folder] if flag == "--package" => package(Path::new(folder), &revision),
        [flag, ..] if flag == "--package" => Err("expected a folder after --package".to_owned()),
        arguments => process::run(
            process::cargo()
                .args(["run", "--release", "--package", PACKAGE, "--"])
                .args(["--revision", &revision, "--date", &date])
                .args(arguments),
        ),
    }
}

fn package(folder: &Path, revision: &str) -> Result<(), String> {
    let io = |error: std::io::Error| format!("{}: {error}", folder.display());
    process::run(process::cargo().args(["build", "--release", "--package", PACKAGE]))?;
    fs::create_dir_all(folder).map_err(io)?;
    let binary = process::target().join("release").join(PACKAGE);
    fs::copy(&binary, folder.join(PACKAGE))
        .map_err(|error| format!("{}: {error}", binary.display()))?;
    let script = format!(
        "#!/bin/sh\n# Runs the GPU benchmark of kvcached that lies beside this script.\n\
         exec \"$(dirname \"$0\")/{PACKAGE}\" --revision {revision} \
         --date \"$(date -u +%Y-%m-%dT%H:%M:%SZ)\" \"$@\"\n"
    );
    fs::write(folder.join("run.sh"), script).map_err(io)?;
    println!(
        "carry {} to the GPU machine and run: sh {0}/run.sh --json FILE",
        folder.display()
    );
    Ok(())
}

/// The first line that a command prints, if it succeeds.
fn said_by(command: &mut Command) -> String {
    match command.output() {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        }
        _ => "unknown".to_owned(),
    }
}
