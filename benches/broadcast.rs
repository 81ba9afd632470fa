//! One map over 1, 2, 4 and 8 rank processes, beside its floor: the same bytes, fanned out over
//! raw sockets to as many processes that do nothing but answer as many bytes.
//!
//! The processes are this program again, with a first argument that says so.

mod nothing;

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion};
use kvcached_mapper::{Mapper, PageId, PageRun, PoolId, Rank, Stage};
use kvcached_tp_ipc::wire::{self, Reply, Verb, WorkerMessage};
use kvcached_tp_ipc::{
    Broadcast, BroadcastConfig, Deadline, EndpointDir, GeometryDigest, RuntimeDir, ServedPool,
    Server, ServerConfig, SessionId, Topology,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, send};

use crate::nothing::Nothing;

const PROCESSES: [u16; 4] = [1, 2, 4, 8];
const TIMEOUT: Duration = Duration::from_secs(20);

/// First argument of a process that serves a rank, and of one that only echoes.
const RANK: &str = "--rank-process";
const ECHO: &str = "--echo-process";

/// Another process of this program, killed at the end; it also ends by itself when its standard
/// input does.
struct Process(Child);

impl Process {
    fn start(role: &str, directory: &Path, rank: u16) -> Self {
        let program = std::env::current_exe().expect("this program is a file");
        let child = Command::new(program)
            .arg(role)
            .arg(directory)
            .arg(rank.to_string())
            .stdin(Stdio::piped())
            .spawn();
        Self(child.expect("this program can be started again"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().expect("it is our child");
        self.0.wait().expect("it is our child");
    }
}

fn geometry() -> GeometryDigest {
    GeometryDigest::new(u32::MAX, 2 << 20, 128 << 10)
}

fn endpoints(directory: &Path) -> EndpointDir {
    let runtime = RuntimeDir::open(directory).expect("the directory is ours");
    let name = "bench".parse().expect("it is a name");
    runtime.instance(&name).expect("the directory is ours")
}

fn run() -> PageRun {
    PageRun::new(PageId(500), 16).expect("sixteen pages are a run")
}

/// One run after the other: what is mapped cannot be mapped again.
fn runs() -> impl Iterator<Item = PageRun> {
    (0..u32::MAX / 16).filter_map(|index| PageRun::new(PageId(16 * index), 16))
}

/// The whole life of a rank process.
fn serve_rank(directory: &Path, rank: u16) {
    let endpoints = endpoints(directory);
    let pool = ServedPool {
        pool: PoolId(0),
        geometry: geometry(),
        mapper: Arc::new(Nothing),
    };
    let config = ServerConfig {
        instance: endpoints.instance().clone(),
        stage: Stage(0),
        rank: Rank(rank),
        pools: vec![pool],
        timeout: TIMEOUT,
        orphan_timeout: TIMEOUT,
        epochs: None,
    };
    let endpoint = endpoints.endpoint(Stage(0), Rank(rank));
    let mut server = Server::bind(&endpoint, config).expect("nobody else is there");
    let stop = server.stop_handle();
    thread::scope(|scope| {
        scope.spawn(move || {
            await_end_of_input();
            stop.stop();
        });
        server.run().expect("the system polls");
    });
}

/// The whole life of an echo process: as many bytes back as came.
fn echo(directory: &Path, rank: u16) {
    let listener = UnixListener::bind(echo_path(directory, rank)).expect("nobody else is there");
    let (mut stream, _) = listener.accept().expect("somebody connects");
    let (mut request, reply) = (request(), reply());
    while stream.read_exact(&mut request).is_ok() && stream.write_all(&reply).is_ok() {}
}

fn await_end_of_input() {
    let mut ignored = Vec::new();
    // An error ends it as well.
    let _ = std::io::stdin().read_to_end(&mut ignored);
}

fn echo_path(directory: &Path, rank: u16) -> PathBuf {
    directory.join(format!("echo-{rank}.sock"))
}

/// Exactly what a broadcast sends for one run, and what it gets.
fn request() -> Vec<u8> {
    let mut out = Vec::new();
    wire::push_request(&mut out, SessionId(u64::MAX), 1 << 20, Verb::Map(&[run()]));
    out
}

fn reply() -> Vec<u8> {
    let mut out = Vec::new();
    wire::push_message(
        &mut out,
        &WorkerMessage::Reply {
            sequence: 1 << 20,
            reply: Reply::Done,
        },
    );
    out
}

/// Sends to all, then polls until all have answered.
fn fan_out(streams: &mut [UnixStream], request: &[u8], reply: &mut [u8]) {
    for stream in streams.iter() {
        let sent = send(stream.as_raw_fd(), request, MsgFlags::MSG_NOSIGNAL);
        assert_eq!(sent, Ok(request.len()));
    }
    let mut answered = vec![false; streams.len()];
    while answered.contains(&false) {
        let waiting: Vec<usize> = (0..streams.len())
            .filter(|index| !answered[*index])
            .collect();
        let mut fds: Vec<PollFd<'_>> = waiting
            .iter()
            .map(|index| PollFd::new(streams[*index].as_fd(), PollFlags::POLLIN))
            .collect();
        poll(&mut fds, PollTimeout::NONE).expect("the system polls");
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        for (index, _) in waiting.into_iter().zip(ready).filter(|(_, ready)| *ready) {
            streams[index].read_exact(reply).expect("it answers");
            answered[index] = true;
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
fn broadcast(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("broadcast");
    for count in PROCESSES {
        let temp = tempfile::tempdir().expect("there is a place for files");
        let directory = temp.path().join("run");
        let endpoints = endpoints(&directory);
        let processes: Vec<Process> = (0..count)
            .map(|rank| Process::start(RANK, &directory, rank))
            .collect();
        let config = BroadcastConfig {
            instance: endpoints.instance().clone(),
            pool: PoolId(0),
            geometry: geometry(),
            topology: Topology::separate_coordinator(count, 1, &endpoints),
            timeout: TIMEOUT,
        };
        let ranks = Broadcast::connect(config, None, Deadline::after(TIMEOUT))
            .expect("every process serves its rank");
        let mut runs = runs();
        let mut next = || [runs.next().expect("there are more pages than iterations")];
        group.bench_function(BenchmarkId::new("map", count), |bencher| {
            bencher.iter(|| ranks.map(&next()).expect("nothing can fail"));
        });
        group.bench_function(BenchmarkId::new("unmap", count), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut spent = Duration::ZERO;
                for _ in 0..iterations {
                    let batch = next();
                    ranks.map(&batch).expect("nothing can fail");
                    let begun = Instant::now();
                    ranks.unmap(&batch).expect("nothing can fail");
                    spent += begun.elapsed();
                }
                spent
            });
        });
        drop((ranks, processes));

        let directory = temp.path().join("floor");
        fs::create_dir(&directory).expect("the directory is ours");
        let processes: Vec<Process> = (0..count)
            .map(|rank| Process::start(ECHO, &directory, rank))
            .collect();
        let mut streams: Vec<UnixStream> = (0..count)
            .map(|rank| await_listener(&echo_path(&directory, rank)))
            .collect();
        let (request, mut reply) = (request(), reply());
        group.bench_function(BenchmarkId::new("floor", count), |bencher| {
            bencher.iter(|| fan_out(&mut streams, &request, &mut reply));
        });
        drop((streams, processes));
    }
    group.finish();
}

fn await_listener(path: &Path) -> UnixStream {
    let deadline = Deadline::after(TIMEOUT);
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return stream,
            Err(error) => assert!(
                !deadline.is_over(),
                "cannot reach {}: {error}",
                path.display()
            ),
        }
        poll(&mut [], PollTimeout::from(10_u8)).expect("the system polls");
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, role, directory, rank] = arguments.as_slice()
        && let Ok(rank) = rank.parse()
    {
        match role.as_str() {
            RANK => return serve_rank(Path::new(directory), rank),
            ECHO => return echo(Path::new(directory), rank),
            _ => {}
        }
    }
    let mut criterion = Criterion::default().configure_from_args();
    broadcast(&mut criterion);
    criterion.final_summary();
}
