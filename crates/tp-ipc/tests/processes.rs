//! Over real sockets, ranks as processes: what happens when one is killed, and when another user
//! tries. The other process is this test binary again, told by its environment what to be.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;

use kvcached_mapper::{Cause, Mapper, PeerCause, Rank, Stage};
use kvcached_tp_ipc::wire::{self, Hello, SessionId};
use kvcached_tp_ipc::{
    Deadline, Endpoint, FramedListener, FramedStream, RuntimeDir, Server, Topology,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};

use crate::served::{
    Home, LONG, POOL, Recorder, connect, file_exists, geometry, run, serve, server_config,
};

const ROLE: &str = "KVCACHED_TEST_ROLE";
const DIRECTORY: &str = "KVCACHED_TEST_DIRECTORY";

/// The user that owns nothing.
const NOBODY: u32 = 65_534;

/// A process that another test started; killed at the end.
#[derive(Debug)]
struct Process(Child);

impl Process {
    fn start(program: &Path, role: &str, directory: &Path, uid: u32) -> Self {
        let child = Command::new(program)
            .args([
                "--exact",
                "processes::another_process",
                "--ignored",
                "--nocapture",
            ])
            .env(ROLE, role)
            .env(DIRECTORY, directory)
            .uid(uid)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child)
    }

    /// Waits for a line that begins so, and answers the rest of it.
    fn said_after(&mut self, words: &str) -> String {
        let stdout = self.0.stdout.as_mut().unwrap();
        let lines = BufReader::with_capacity(1, stdout).lines();
        let mut rests =
            lines.filter_map(|line| Some(line.unwrap().strip_prefix(words)?.to_owned()));
        rests.next().expect("it says so before it ends")
    }

    /// Waits until it has said `word`, on a line of its own.
    fn said(&mut self, word: &str) {
        let stdout = self.0.stdout.as_mut().unwrap();
        let mut lines = BufReader::with_capacity(1, stdout).lines();
        let said = lines.any(|line| line.unwrap() == word);
        assert!(said, "the process ended without saying {word:?}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test by itself: what the other process does.
#[test]
#[ignore = "the other process of the tests below"]
fn another_process() {
    #[expect(
        clippy::disallowed_methods,
        reason = "this process is told by its environment"
    )]
    let (Ok(role), Ok(directory)) = (std::env::var(ROLE), std::env::var(DIRECTORY)) else {
        return;
    };
    let directory = PathBuf::from(directory);
    match role.as_str() {
        // Serves rank 1; says when it begins to map, and stays there.
        "worker" => {
            let dir = RuntimeDir::open(&directory).unwrap();
            let dir = dir.instance(&"llama".parse().unwrap()).unwrap();
            let (mapper, keeper) = Recorder::gated();
            let config = server_config(&dir, Stage(0), Rank(1), &mapper, LONG);
            let mut server = Server::bind(&dir.endpoint(Stage(0), Rank(1)), config).unwrap();
            println!("\nserving");
            thread::scope(|scope| {
                scope.spawn(move || {
                    while keeper.come.recv().is_ok() {
                        println!("mapping");
                    }
                });
                server.run().unwrap();
            });
        }
        // Listens as rank 2 and coordinates rank 1; then a child of its own holds both open, as one
        // does that was forked.
        "parent" => {
            let dir = RuntimeDir::open(&directory).unwrap();
            let dir = dir.instance(&"llama".parse().unwrap()).unwrap();
            let listener = FramedListener::bind(&dir.endpoint(Stage(0), Rank(2))).unwrap();
            let deadline = Deadline::after(LONG);
            let endpoint = dir.endpoint(Stage(0), Rank(1));
            let mut stream = FramedStream::connect(&endpoint, deadline).unwrap();
            let hello = Hello {
                instance: dir.instance().clone(),
                stage: Stage(0),
                rank: Rank(1),
                pool: POOL,
                geometry: geometry(),
                session: SessionId::fresh(),
            };
            let mut frame = Vec::new();
            wire::push_hello(&mut frame, &hello);
            stream.send(&frame[4..], deadline).unwrap();
            let greeting = stream.recv(deadline).unwrap();
            assert_eq!(wire::read_greeting(&greeting), Ok(Ok(hello)));
            let mut child = Command::new("sleep")
                .arg("60")
                .stdin(listener.as_fd().try_clone_to_owned().unwrap())
                .stdout(stream.as_fd().try_clone_to_owned().unwrap())
                .spawn()
                .unwrap();
            println!("\nchild {}", child.id());
            println!("holding");
            child.wait().unwrap();
        }
        // Connects where it should not.
        "client" => {
            let mut stream = UnixStream::connect(directory.join("s0-r1.sock")).unwrap();
            let mut answer = Vec::new();
            // Closed, perhaps before it was looked at.
            let _ = stream.read_to_end(&mut answer);
            assert_eq!(answer, b"");
            println!("\nrefused");
        }
        // Listens where it should not.
        "listener" => {
            let endpoint = Endpoint::new(&directory.join("s0-r1.sock")).unwrap();
            let listener = FramedListener::bind(&endpoint).unwrap();
            fs::set_permissions(endpoint.path(), Permissions::from_mode(0o666)).unwrap();
            println!("\nlistening");
            let _ = listener.accept(Deadline::after(LONG));
        }
        other => panic!("no such role: {other}"),
    }
}

fn this_program() -> PathBuf {
    std::env::current_exe().unwrap()
}

#[test]
fn a_worker_killed_amid_a_map_is_a_lost_rank_and_can_be_started_again() {
    let home = Home::new();
    let dir = home.instance("llama");
    let start = || {
        Process::start(
            &this_program(),
            "worker",
            home.runtime().path(),
            geteuid().as_raw(),
        )
    };
    let mut worker = start();
    worker.said("serving");
    let topology = Topology::rank0_coordinates(2, &dir);
    let local = Arc::new(Recorder::default());
    let ranks = connect(&dir, &topology, Some(&local), LONG).unwrap();
    let error = thread::scope(|scope| {
        let mapping = scope.spawn(|| ranks.map(&[run(0, 1)]));
        worker.said("mapping");
        worker.0.kill().unwrap();
        mapping.join().unwrap().unwrap_err()
    });
    match error.cause {
        Cause::Peer {
            rank: Rank(1),
            call: "map",
            cause: PeerCause::Disconnected { .. },
            ..
        } => {}
        other => panic!("{other}"),
    }
    assert_eq!(error.uncertain, [run(0, 1)]);
    assert_eq!(local.mapped(), []);
    worker.0.wait().unwrap();

    // It left its socket behind; its successor is not kept from listening there.
    assert!(file_exists(&dir.endpoint(Stage(0), Rank(1))));
    let mut worker = start();
    worker.said("serving");
    connect(&dir, &topology, Some(&local), LONG).unwrap();
}

/// A child that was forked keeps a dead process's sockets open: its name can be listened under all the
/// same, and its place as a coordinator is free.
#[test]
fn a_dead_process_is_not_kept_alive_by_its_children() {
    let home = Home::new();
    let dir = home.instance("llama");
    let mapper = Arc::new(Recorder::default());
    let _serving = serve(&dir, (0, 1), &mapper);
    let uid = geteuid().as_raw();
    let mut parent = Process::start(&this_program(), "parent", home.runtime().path(), uid);
    let child = parent.said_after("child ");
    parent.said("holding");
    parent.0.kill().unwrap();
    parent.0.wait().unwrap();

    FramedListener::bind(&dir.endpoint(Stage(0), Rank(2))).unwrap();
    let topology = Topology::rank0_coordinates(2, &dir);
    let local = Arc::new(Recorder::default());
    connect(&dir, &topology, Some(&local), LONG).unwrap();
    kill(Pid::from_raw(child.parse().unwrap()), Signal::SIGKILL).unwrap();
}

/// Needs two users, so it needs root; the rule for directories is tested without.
#[test]
fn the_process_of_another_user_is_refused_on_either_side() {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can start a process of another user");
        return;
    }
    // A place that both can reach, unlike any real one.
    let temp = tempfile::tempdir().unwrap();
    fs::set_permissions(temp.path(), Permissions::from_mode(0o755)).unwrap();
    let program = temp.path().join("program");
    // Not through `fs::copy`: a process that another test starts meanwhile would inherit the file
    // open for writing, and then it cannot be executed.
    assert!(
        Command::new("cp")
            .arg(this_program())
            .arg(&program)
            .status()
            .unwrap()
            .success()
    );
    fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();

    let endpoint = Endpoint::new(&temp.path().join("s0-r1.sock")).unwrap();
    let home = Home::new();
    let mapper = Arc::new(Recorder::default());
    let config = server_config(&home.instance("llama"), Stage(0), Rank(1), &mapper, LONG);
    let server = Server::bind(&endpoint, config).unwrap();
    fs::set_permissions(endpoint.path(), Permissions::from_mode(0o666)).unwrap();
    let serving = crate::served::spawn(server);
    let mut client = Process::start(&program, "client", temp.path(), NOBODY);
    client.said("refused");
    assert!(client.0.wait().unwrap().success());
    // The server goes on for its own user.
    FramedStream::connect(&endpoint, Deadline::after(LONG)).unwrap();
    drop(serving);

    let theirs = temp.path().join("theirs");
    fs::create_dir(&theirs).unwrap();
    chown(&theirs, Some(NOBODY), None).unwrap();
    let mut listener = Process::start(&program, "listener", &theirs, NOBODY);
    listener.said("listening");
    let endpoint = Endpoint::new(&theirs.join("s0-r1.sock")).unwrap();
    let refused = FramedStream::try_connect(&endpoint).unwrap_err();
    assert_eq!(
        refused.to_string(),
        format!("{endpoint} is served by uid {NOBODY}")
    );
}
