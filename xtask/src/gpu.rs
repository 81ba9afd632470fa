//! `cargo xtask test-gpu`: the tests that need a device, here or packed for a machine that has one.
//!
//! A machine with a GPU often has no Rust. So the test binaries can be built elsewhere (they open
//! libcuda at run time and need no toolkit) and carried there with a script that runs them all.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::process;

/// Test targets that hold GPU tests, all of them marked ignored elsewhere.
const TARGETS: &[&str] = &["gpu"];
/// Binaries that those tests start as ranks of their own, found beside them.
const COMPANIONS: &[&str] = &["worker", "kvcached"];

/// Runs the GPU tests, or with `--package DIR` builds them into a folder.
pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    match arguments {
        [] => {
            let mut command = process::cargo();
            command.args(["test", "--release", "--package", "kvcached-tests"]);
            for target in TARGETS {
                command.args(["--test", target]);
            }
            process::run(command.args(["--", "--ignored", "--test-threads=1"]))
        }
        [flag, folder] if flag == "--package" => package(Path::new(folder)),
        _ => Err("expected no arguments, or --package DIR".to_owned()),
    }
}

fn package(folder: &Path) -> Result<(), String> {
    let io = |error: std::io::Error| format!("{}: {error}", folder.display());
    fs::create_dir_all(folder).map_err(io)?;
    process::run(process::cargo().args(["build", "--release", "--package", "kvcached-cli"]))?;
    let mut script = String::from(
        "#!/bin/sh\n# Runs the GPU tests of kvcached that lie beside this script.\n\
         cd \"$(dirname \"$0\")\" || exit 1\nstatus=0\n",
    );
    for target in TARGETS {
        let binary = test_binary(target)?;
        fs::copy(&binary, folder.join(target)).map_err(io)?;
        script.push_str(&format!(
            "KVCACHED_TEST_BIN_DIR=\"$PWD\" ./{target} --ignored --test-threads=1 \"$@\" || status=1\n"
        ));
        // Cargo puts a package's binaries one folder above its test binaries.
        let binaries = binary
            .parent()
            .and_then(Path::parent)
            .expect("target/release/deps/name");
        for companion in COMPANIONS {
            fs::copy(binaries.join(companion), folder.join(companion)).map_err(io)?;
        }
    }
    script.push_str("exit $status\n");
    let script_path = folder.join("run.sh");
    fs::write(&script_path, script).map_err(io)?;
    println!(
        "carry {} to the GPU machine and run: sh run.sh",
        folder.display()
    );
    Ok(())
}

/// Builds one test target in release mode and finds its executable in cargo's messages.
fn test_binary(target: &str) -> Result<PathBuf, String> {
    let mut command = process::cargo();
    command.args([
        "test",
        "--release",
        "--package",
        "kvcached-tests",
        "--test",
        target,
    ]);
    command
        .args(["--no-run", "--message-format=json"])
        .stderr(Stdio::inherit());
    println!("$ {}", process::words(&command));
    let output = command
        .output()
        .map_err(|error| format!("cargo test: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo test --no-run: {}", output.status));
    }
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    let marker = format!("\"name\":\"{target}\"");
    messages
        .lines()
        .filter(|line| line.contains(&marker) && line.contains("\"kind\":[\"test\"]"))
        .find_map(|line| {
            let rest = line.split_once("\"executable\":\"")?.1;
            Some(PathBuf::from(rest.split_once('"')?.0))
        })
        .ok_or_else(|| format!("cargo named no executable for the test target {target}"))
}
