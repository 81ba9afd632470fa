//! The processes of one engine, told over pipes what to do. Every wait is bounded, and ends in a
//! panic that says which process did not answer.
#![expect(clippy::panic, reason = "so ends the test that asked")]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

use kvcached_tp_ipc::Deadline;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::ranks::folder;

/// The engine of these tests.
pub(crate) const NAME: &str = "engine";

/// Memory of every rank's device.
pub(crate) const DEVICE_BYTES: u64 = 256 << 20;

/// One page on one rank: four layers of K and V.
pub(crate) const PAGE_BYTES: u64 = 2 << 20;

/// In which an engine is whole again once a new process has taken the dead one's place. A machine
/// that does nothing else needs a fiftieth of it.
pub(crate) const RECOVERY: Duration = Duration::from_secs(5);

/// In which every answer comes, on a machine however busy.
const PATIENCE: Duration = Duration::from_secs(30);

/// A rank or a coordinator in a process of its own. Dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Process {
    /// Who it is, for messages.
    pub(crate) name: String,
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// How the processes of an engine are started.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) folder: TempDir,
    /// How long one process waits for another.
    pub(crate) ipc_timeout: Duration,
    /// How long a rank keeps what it has without a coordinator.
    pub(crate) orphan_timeout: Duration,
    /// Does the coordinator have rank 0?
    pub(crate) rank0: bool,
    /// Ranks of its one stage.
    pub(crate) tp: u16,
}

impl Engine {
    /// Two ranks and a coordinator without one, patient with each other.
    pub(crate) fn new() -> Self {
        Self {
            folder: folder(),
            ipc_timeout: Duration::from_secs(20),
            orphan_timeout: Duration::from_secs(60),
            rank0: false,
            tp: 2,
        }
    }

    /// The ranks that have a process of their own.
    pub(crate) fn ranks(&self) -> Vec<Process> {
        let first = u16::from(self.rank0);
        (first..self.tp).map(|rank| self.rank(rank)).collect()
    }

    /// A rank that listens.
    pub(crate) fn rank(&self, rank: u16) -> Process {
        self.rank_that_strikes(rank, &[])
    }

    /// A rank that listens, and does `stroke` when it gets to the point; both as words.
    pub(crate) fn rank_that_strikes(&self, rank: u16, stroke: &[String]) -> Process {
        let words = ["rank", "0", &rank.to_string()];
        let process = self.start(words, DEVICE_BYTES, stroke);
        process.ready().expect("a rank needs only its socket")
    }

    /// What listens where a rank should; see the manners of impostors.
    pub(crate) fn impostor(&self, rank: u16, manner: &str) -> Process {
        let words = ["impostor", "0", &rank.to_string()];
        let process = self.start(words, 0, &[manner.to_owned()]);
        process.ready().expect("an impostor needs only its socket")
    }

    /// A coordinator all of whose ranks are there.
    pub(crate) fn coordinator(&self) -> Process {
        self.try_coordinator().expect("every rank listens")
    }

    /// A coordinator, or what it says instead of being ready.
    pub(crate) fn try_coordinator(&self) -> Result<Process, String> {
        self.start_coordinator(&[]).ready()
    }

    /// A process that becomes a coordinator once it is told anything.
    pub(crate) fn gated_coordinator(&self) -> Process {
        self.start_coordinator(&["gated".to_owned()])
    }

    fn start_coordinator(&self, more: &[String]) -> Process {
        let device_bytes = if self.rank0 { DEVICE_BYTES } else { 0 };
        let words = ["coordinator", "1", &self.tp.to_string()];
        self.start(words, device_bytes, more)
    }

    /// Where a rank listens.
    pub(crate) fn endpoint(&self, rank: u16) -> std::path::PathBuf {
        self.directory().join(format!("s0-r{rank}.sock"))
    }

    /// Where all sockets are.
    pub(crate) fn directory(&self) -> std::path::PathBuf {
        self.folder.path().join(NAME)
    }

    fn start(&self, [role, stage, rank]: [&str; 3], device_bytes: u64, more: &[String]) -> Process {
        let millis = |time: Duration| time.as_millis().to_string();
        let mut arguments = vec![role.to_owned(), path(self.folder.path()), NAME.to_owned()];
        arguments.extend([stage.to_owned(), rank.to_owned(), device_bytes.to_string()]);
        arguments.extend([millis(self.ipc_timeout), millis(self.orphan_timeout)]);
        arguments.extend_from_slice(more);
        Process::spawn(&arguments)
    }
}

impl Process {
    /// Starts one, and does not wait for it.
    fn spawn(arguments: &[String]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_process"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program is built beside the tests");
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().expect("asked for as a pipe"));
        let name = format!("{} {}", arguments[0], arguments[4]);
        Self {
            name,
            child,
            orders,
            answers,
        }
    }

    /// Waits until it is ready, or says why it is not.
    pub(crate) fn ready(mut self) -> Result<Self, String> {
        if self.answer().as_deref() == Some("ready") {
            return Ok(self);
        }
        let mut words = String::new();
        let error = self.child.stderr.as_mut().expect("asked for as a pipe");
        error.read_to_string(&mut words).expect("it has ended");
        Err(words)
    }

    /// Its number, as signals have it.
    pub(crate) fn id(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a process number")
    }

    /// Its answer; `None` if it ends instead.
    pub(crate) fn ask(&mut self, order: &str) -> Option<String> {
        self.tell(order);
        self.answer()
    }

    /// Does not wait for the answer.
    pub(crate) fn tell(&mut self, order: &str) {
        let orders = self.orders.as_mut().expect("only its end takes it");
        // Dead already, perhaps: then there is no answer either.
        let _ = writeln!(orders, "{order}");
    }

    /// Its answer, which a process that lives gives.
    pub(crate) fn told(&mut self, order: &str) -> String {
        let answer = self.ask(order);
        answer.unwrap_or_else(|| panic!("{} ended when it was told to {order}", self.name))
    }

    /// Free bytes of its device.
    pub(crate) fn memory(&mut self) -> u64 {
        self.told("memory").parse().expect("a number")
    }

    /// Blocks that the coordinator hands out.
    pub(crate) fn alloc(&mut self, count: u32) -> Vec<u32> {
        let answer = self.told(&format!("alloc {count}"));
        blocks(&answer).unwrap_or_else(|| panic!("{answer}"))
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("it is a child of this process");
    }

    /// Kills it, and waits for its end.
    pub(crate) fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        assert_eq!(self.ended().signal(), Some(9), "{}", self.name);
    }

    /// Kills it, whatever it was about to answer.
    pub(crate) fn murder(&mut self) {
        self.signal(Signal::SIGKILL);
        self.child.wait().expect("it is a child of this process");
    }

    /// Lets it end by itself.
    pub(crate) fn end(mut self) {
        drop(self.orders.take());
        let status = self.ended();
        assert!(status.success(), "{}: {status}", self.name);
    }

    /// Waits for its end, which has a reason already.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        assert_eq!(self.answer(), None, "{} still talks", self.name);
        self.child.wait().expect("it is a child of this process")
    }

    /// Waits until it is stopped.
    pub(crate) fn stopped(&self) {
        let flags = WaitPidFlag::WUNTRACED | WaitPidFlag::WNOHANG;
        within(PATIENCE, &self.name, || {
            let status = waitpid(self.pid(), Some(flags)).expect("a child of this process");
            matches!(status, WaitStatus::Stopped(..)).then_some(())
        });
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.id())
    }

    fn answer(&mut self) -> Option<String> {
        if self.answers.buffer().is_empty() {
            let mut fds = [PollFd::new(
                self.answers.get_ref().as_fd(),
                PollFlags::POLLIN,
            )];
            let bound = PollTimeout::try_from(PATIENCE).expect("less than a month");
            let came = poll(&mut fds, bound).expect("a pipe can be waited for");
            assert_eq!(came, 1, "{} says nothing", self.name);
        }
        let mut line = String::new();
        let length = self.answers.read_line(&mut line).expect("lines of text");
        (length > 0).then(|| line.trim_end().to_owned())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Gone already, perhaps.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The blocks of an answer, if it is not a refusal.
pub(crate) fn blocks(answer: &str) -> Option<Vec<u32>> {
    answer
        .split_whitespace()
        .map(|word| word.parse().ok())
        .collect()
}

/// An order about blocks.
pub(crate) fn order(word: &str, blocks: &[u32]) -> String {
    blocks
        .iter()
        .fold(word.to_owned(), |order, block| format!("{order} {block}"))
}

/// Pages of the runs that a rank has mapped.
pub(crate) fn pages(mapped: &str) -> u64 {
    let counts = mapped.split_whitespace().map(|run| {
        let (_, count) = run.split_once('+').expect("first+count");
        count.parse::<u64>().expect("a number")
    });
    counts.sum()
}

/// Asks again and again until there is an answer.
pub(crate) fn within<T>(bound: Duration, what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Deadline::after(bound);
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(!deadline.is_over(), "not within {bound:?}: {what}");
        // Whoever is waited for needs the processor.
        poll(&mut [], PollTimeout::from(1u8)).expect("nothing to wait for but time");
    }
}

/// Lets so much time go by.
pub(crate) fn pass(time: Duration) {
    let then = Deadline::after(time);
    within(time * 2 + RECOVERY, "time passes", || {
        then.is_over().then_some(())
    });
}

fn path(path: &Path) -> String {
    path.to_str().expect("a folder of this test").to_owned()
}
