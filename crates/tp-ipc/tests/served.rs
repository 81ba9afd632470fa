//! Ranks that are really served: a directory of endpoints, a mapper that remembers and can be made
//! to wait, a server in a thread.

use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use kvcached_mapper::{
    After, MapError, Mapper, PageId, PageRun, PoolId, Rank, RankMapper, Readiness, Resynced, Stage,
};
use kvcached_tp_ipc::{
    Broadcast, BroadcastConfig, ConnectError, Deadline, Endpoint, EndpointDir, GeometryDigest,
    RuntimeDir, ServedPool, Server, ServerConfig, StopHandle, Topology,
};
use tempfile::TempDir;

pub(crate) const POOL: PoolId = PoolId(0);

/// Longer than any test should take; a wait that lasts so long is a failure.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// As short as a wait that is meant to end may be.
pub(crate) const SHORT: Duration = Duration::from_millis(200);

/// How long a server waits that is meant to lose patience with some clients, but not with good
/// ones on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_millis(700);

/// An instance's directory, gone with the test.
#[derive(Debug)]
pub(crate) struct Home {
    temp: TempDir,
}

/// A mapper that remembers what is mapped.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    mapped: Mutex<Vec<PageRun>>,
    calls: Mutex<usize>,
    gate: Option<Gate>,
}

/// Where `map` waits: it tells that it has come, then waits to be let through.
#[derive(Debug)]
struct Gate {
    come: Sender<()>,
    go: Mutex<Receiver<()>>,
}

/// The test's side of a gate.
#[derive(Debug)]
pub(crate) struct Gatekeeper {
    pub(crate) come: Receiver<()>,
    #[expect(dead_code, reason = "the gate opens for good when this goes away")]
    go: Sender<()>,
}

/// A server in a thread, stopped at the end.
#[derive(Debug)]
pub(crate) struct Serving {
    stop: StopHandle,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl Home {
    pub(crate) fn new() -> Self {
        Self {
            temp: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn runtime(&self) -> RuntimeDir {
        RuntimeDir::open(&self.temp.path().join("run")).unwrap()
    }

    pub(crate) fn instance(&self, name: &str) -> EndpointDir {
        self.runtime().instance(&name.parse().unwrap()).unwrap()
    }
}

impl Recorder {
    pub(crate) fn gated() -> (Arc<Self>, Gatekeeper) {
        let (come, came) = mpsc::channel();
        let (open, go) = mpsc::channel();
        let gate = Some(Gate {
            come,
            go: Mutex::new(go),
        });
        let keeper = Gatekeeper {
            come: came,
            go: open,
        };
        (
            Arc::new(Self {
                gate,
                ..Self::default()
            }),
            keeper,
        )
    }

    pub(crate) fn mapped(&self) -> Vec<PageRun> {
        self.mapped.lock().unwrap().clone()
    }

    fn forget(&self, runs: &[PageRun]) {
        let mut mapped = self.mapped.lock().unwrap();
        mapped.retain(|run| !runs.contains(run));
    }

    /// How often it was told to map or unmap.
    pub(crate) fn calls(&self) -> usize {
        *self.calls.lock().unwrap()
    }
}

impl Mapper for Recorder {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        if let Some(gate) = &self.gate {
            // The keeper going away opens it for good.
            let _ = gate.come.send(());
            let _ = gate.go.lock().unwrap().recv();
        }
        *self.calls.lock().unwrap() += 1;
        self.mapped.lock().unwrap().extend_from_slice(runs);
        Ok(())
    }

    fn unmap_after(&self, runs: &[PageRun], _: After) -> Result<(), MapError> {
        *self.calls.lock().unwrap() += 1;
        self.forget(runs);
        Ok(())
    }

    fn headroom(&self) -> Option<u32> {
        Some(7)
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        Ok(Readiness::Ready)
    }
}

impl RankMapper for Recorder {
    fn prepare_unmap(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.unmap_after(runs, after)
    }

    fn commit_unmap(&self, _: &[PageRun]) {}

    fn abort_unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.mapped.lock().unwrap().extend_from_slice(runs);
        Ok(())
    }

    fn resync_after(&self, wanted: &[PageRun], _: After) -> Result<Resynced, MapError> {
        let mut mapped = self.mapped.lock().unwrap();
        let remade = wanted.iter().filter(|run| !mapped.contains(run));
        let remade = remade.copied().collect();
        *mapped = wanted.to_vec();
        Ok(Resynced {
            remade,
            in_doubt: Vec::new(),
        })
    }

    fn mapped(&self) -> Vec<PageRun> {
        let mut mapped = Self::mapped(self);
        mapped.sort_unstable();
        mapped
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            let served = thread.join();
            if !std::thread::panicking() {
                served.unwrap().unwrap();
            }
        }
    }
}

pub(crate) fn run(first: u32, count: u32) -> PageRun {
    PageRun::new(PageId(first), count).unwrap()
}

pub(crate) fn geometry() -> GeometryDigest {
    GeometryDigest::new(1 << 20, 2 << 20, 64 << 10)
}

pub(crate) fn server_config(
    dir: &EndpointDir,
    stage: Stage,
    rank: Rank,
    mapper: &Arc<Recorder>,
    timeout: Duration,
) -> ServerConfig {
    let mapper: Arc<dyn RankMapper> = mapper.clone();
    let pools = vec![ServedPool {
        pool: POOL,
        geometry: geometry(),
        mapper,
    }];
    ServerConfig {
        instance: dir.instance().clone(),
        stage,
        rank,
        pools,
        timeout,
        orphan_timeout: LONG,
        epochs: None,
    }
}

/// Serves a rank of an instance in a thread, where it belongs.
pub(crate) fn serve(
    dir: &EndpointDir,
    (stage, rank): (u16, u16),
    mapper: &Arc<Recorder>,
) -> Serving {
    serve_within(dir, (stage, rank), mapper, LONG)
}

pub(crate) fn serve_within(
    dir: &EndpointDir,
    (stage, rank): (u16, u16),
    mapper: &Arc<Recorder>,
    timeout: Duration,
) -> Serving {
    let (stage, rank) = (Stage(stage), Rank(rank));
    let config = server_config(dir, stage, rank, mapper, timeout);
    spawn(Server::bind(&dir.endpoint(stage, rank), config).unwrap())
}

#[expect(
    clippy::disallowed_methods,
    reason = "the other process of a test is a thread"
)]
pub(crate) fn spawn(mut server: Server) -> Serving {
    let stop = server.stop_handle();
    Serving {
        stop,
        thread: Some(std::thread::spawn(move || server.run())),
    }
}

pub(crate) fn config(dir: &EndpointDir, topology: &Topology, timeout: Duration) -> BroadcastConfig {
    BroadcastConfig {
        instance: dir.instance().clone(),
        pool: POOL,
        geometry: geometry(),
        topology: topology.clone(),
        timeout,
    }
}

/// A coordinator that waits for its ranks as long as it takes.
pub(crate) fn connect(
    dir: &EndpointDir,
    topology: &Topology,
    local: Option<&Arc<Recorder>>,
    timeout: Duration,
) -> Result<Broadcast, ConnectError> {
    let local = local.cloned().map(|local| local as Arc<dyn RankMapper>);
    Broadcast::connect(config(dir, topology, timeout), local, Deadline::after(LONG))
}

pub(crate) fn file_exists(endpoint: &Endpoint) -> bool {
    endpoint.path().symlink_metadata().is_ok()
}
