//! `cargo xtask test`: runs everything that needs no GPU and says how many tests ran.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::process;

/// How many tests had which outcome.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Counts {
    /// Adds what one test binary reported, if `line` is its closing line.
    fn add(&mut self, line: &str) {
        let Some(result) = line.trim().strip_prefix("test result: ") else {
            return;
        };
        let Some((_, counts)) = result.split_once(". ") else {
            return;
        };
        for count in counts.split(';') {
            let Some((number, what)) = count.trim().split_once(' ') else {
                continue;
            };
            let Ok(number) = number.parse::<u64>() else {
                continue;
            };
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }
}

/// The one test binary that needs a feature under which the others cannot run.
const INTERLEAVINGS: [&str; 6] = [
    "-p",
    "kvcached-page-alloc",
    "--features",
    "shuttle",
    "--test",
    "interleavings",
];

/// Runs all tests, documentation tests included, passing `arguments` on to cargo. Those with the
/// locks of a scheduler that tries interleavings run last, and not if only some tests are wanted.
pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    let mut counts = Counts::default();
    let mut outcome = cargo_test(&["--workspace", "--no-fail-fast"], arguments, &mut counts);
    if arguments.iter().all(|argument| argument == "--locked") {
        // Also if the others failed, so that one run shows all there is to mend.
        let interleavings = cargo_test(&INTERLEAVINGS, arguments, &mut counts);
        outcome = outcome.and(interleavings);
    }
    println!(
        "\n{} passed, {} failed, {} skipped",
        counts.passed, counts.failed, counts.ignored
    );
    outcome?;
    if counts.passed == 0 {
        return Err("no test ran".to_owned());
    }
    Ok(())
}

/// One `cargo test`, whose output is shown and counted.
fn cargo_test(own: &[&str], arguments: &[String], counts: &mut Counts) -> Result<(), String> {
    let mut command = process::cargo();
    command.arg("test").args(own).args(arguments);
    println!("$ {}", process::words(&command));
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cargo test did not start: {error}"))?;
    let output = child
        .stdout
        .take()
        .expect("the output was asked for as a pipe");
    for line in BufReader::new(output).lines() {
        let line = line.map_err(|error| format!("reading the output of cargo test: {error}"))?;
        counts.add(&line);
        println!("{line}");
    }
    let status = child
        .wait()
        .map_err(|error| format!("cargo test: {error}"))?;
    if !status.success() {
        return Err(format!("cargo test: {status}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_added_up_and_nothing_else_is() {
        let mut counts = Counts::default();
        counts.add("test result: ok. 12 passed; 0 failed; 3 ignored; 0 measured; 1 filtered out");
        counts.add("test some::test ... ok");
        counts
            .add("test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!(
            counts,
            Counts {
                passed: 13,
                failed: 2,
                ignored: 3
            }
        );
    }
}
