//! A budget over real processes: this test binary starts itself again as the other process.
//!
//! What the processes do waits for a line on standard input, so nothing depends on time.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;

use kvcached_vmm::{Budget, Capped, Chunk, Driver, Host, HostConfig, VmmError};

const G: u64 = 4096;
/// Names the budget file, and makes this process the other one.
const PATH: &str = "VMM_TEST_BUDGET";

fn device(budget: Budget) -> Arc<Capped<Host>> {
    let config = HostConfig {
        granularity: G,
        ..HostConfig::new(1 << 30)
    };
    Arc::new(Capped::new(
        Host::new(config).expect("the granularity is the page"),
        budget,
    ))
}

#[expect(
    clippy::disallowed_methods,
    reason = "a test process is told by its parent what it is"
)]
fn path_from_parent() -> Option<PathBuf> {
    std::env::var_os(PATH).map(PathBuf::from)
}

/// The other process: opens the budget, and for each line "N" creates a chunk of N granules and
/// answers "ok" or "full". It holds all of them until its input ends, or it is killed.
fn be_the_other_process(path: &Path) {
    let device = device(Budget::open(path).expect("the parent made the budget"));
    let mut held = Vec::new();
    say("ready");
    for line in io::stdin().lines() {
        let granules: u64 = line.expect("a line").parse().expect("a number");
        match Chunk::create(&device, granules * G) {
            Ok(chunk) => {
                held.push(chunk);
                say("ok");
            }
            Err(VmmError::OutOfMemory { .. }) => say("full"),
            Err(error) => say(&error.to_string()),
        }
    }
}

fn say(word: &str) {
    let mut output = io::stdout();
    writeln!(output, "answer {word}").expect("the parent listens");
    output.flush().expect("the parent listens");
}

struct Other {
    process: Child,
    answers: BufReader<ChildStdout>,
}

impl Other {
    /// Starts the test `name` of this file again, as another process.
    fn start(name: &str, path: &Path) -> Self {
        let binary = std::env::current_exe().expect("this test is a program");
        let mut process = Command::new(binary)
            .args(["--exact", name, "--nocapture"])
            .env(PATH, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this test can be started again");
        let answers = BufReader::new(process.stdout.take().expect("it is piped"));
        let mut other = Self { process, answers };
        assert_eq!(other.answer(), "ready");
        other
    }

    fn ask(&mut self, granules: u64) {
        let input = self.process.stdin.as_mut().expect("it is piped");
        writeln!(input, "{granules}").expect("the other process listens");
    }

    fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            let read = self
                .answers
                .read_line(&mut line)
                .expect("the other process answers");
            assert!(read > 0, "the other process ended without an answer");
            // The test harness writes lines of its own, and may not end them.
            if let Some((_, answer)) = line.trim_end().split_once("answer ") {
                return answer.to_owned();
            }
        }
    }

    fn kill(mut self) {
        self.process.kill().expect("it runs");
        self.process.wait().expect("it was started here");
    }

    fn finish(mut self) {
        drop(self.process.stdin.take());
        io::copy(&mut self.answers, &mut io::sink()).expect("it ends");
        assert!(self.process.wait().expect("it was started here").success());
    }
}

#[test]
fn the_share_of_a_killed_process_is_reclaimed() {
    if let Some(path) = path_from_parent() {
        return be_the_other_process(&path);
    }
    let dir = tempfile::tempdir().expect("there is a place for files");
    let path = dir.path().join("budget");
    let device = device(Budget::create(&path, 8 * G).expect("the file is new"));
    let mut other = Other::start("the_share_of_a_killed_process_is_reclaimed", &path);
    other.ask(5);
    assert_eq!(other.answer(), "ok");
    let held = Chunk::create(&device, 3 * G).expect("so much is left");
    let full = Err(VmmError::OutOfMemory { requested: G });
    assert_eq!(Chunk::create(&device, G).map(drop), full);
    assert_eq!(device.memory().expect("it answers").free, 0);

    other.kill();

    let rest = Chunk::create(&device, 5 * G).expect("the dead need no memory");
    assert_eq!(Chunk::create(&device, G).map(drop), full);
    drop((held, rest));
    assert_eq!(device.memory().expect("it answers").free, 8 * G);
}

#[test]
fn two_processes_and_room_for_one_page_is_one_ok_and_one_full() {
    if let Some(path) = path_from_parent() {
        return be_the_other_process(&path);
    }
    let name = "two_processes_and_room_for_one_page_is_one_ok_and_one_full";
    let dir = tempfile::tempdir().expect("there is a place for files");
    for round in 0..5 {
        let path = dir.path().join(format!("budget-{round}"));
        let budget = Budget::create(&path, G).expect("the file is new");
        let mut one = Other::start(name, &path);
        let mut two = Other::start(name, &path);
        one.ask(1);
        two.ask(1);
        let mut answers = [one.answer(), two.answer()];
        answers.sort();
        assert_eq!(answers, ["full", "ok"]);
        one.finish();
        two.finish();
        assert_eq!(budget.free_bytes(), Ok(G));
    }
}

/// Whoever can write it could take everything, or nothing at all and be believed.
#[test]
fn the_file_is_for_this_user_alone() {
    let dir = tempfile::tempdir().expect("there is a place for files");
    let path = dir.path().join("budget");
    let _budget = Budget::create(&path, G).expect("the file is new");
    let mode = path.metadata().expect("it is there").permissions().mode();
    assert_eq!(mode & 0o077, 0, "{mode:o}");
}
