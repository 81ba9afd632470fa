//! An engine of several processes, for the tests on the host and on a GPU alike.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kvcached_integrations::{
    Background, MapperConfig, PoolPolicy, PoolSetup, RunChoice, Scheduler, SchedulerConfig,
    StartError,
};
use kvcached_mapper::{Cold, Epochs, KvBuffers, Layout, PageSize, PoolId, PoolSpec, Rank, Stage};
use kvcached_tp_ipc::{InstanceName, RuntimeDir, Topology};
use kvcached_vmm::{Driver, RecyclerConfig};
use tempfile::TempDir;

/// The one pool of these engines.
pub(crate) const POOL: PoolId = PoolId(0);
/// Blocks of a page: four layers of K and V, 256 KiB each, are 2 MiB.
pub(crate) const CAPACITY_BYTES: u64 = 256 << 20;

/// How long the scheduler of such an engine waits for its ranks.
pub(crate) const READY_TIMEOUT: Duration = Duration::from_secs(2);

/// A folder for the sockets of one test, closed to everybody else.
pub(crate) fn folder() -> TempDir {
    let closed = Permissions::from_mode(0o700);
    tempfile::Builder::new()
        .permissions(closed)
        .tempdir()
        .expect("a folder")
}

/// A rank in a process of its own; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct WorkerProcess {
    pub(crate) stage: Stage,
    pub(crate) rank: Rank,
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl WorkerProcess {
    /// Starts a rank and waits until it listens.
    pub(crate) fn start(
        runtime_dir: &Path,
        instance: &str,
        (stage, rank): (u16, u16),
        device: &str,
        layout: Layout,
    ) -> Self {
        let mut child = Command::new(program())
            .arg(runtime_dir)
            .arg(instance)
            .args([stage.to_string(), rank.to_string()])
            .args([
                device.to_owned(),
                layout.to_string(),
                CAPACITY_BYTES.to_string(),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the worker program is built beside the tests");
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().expect("asked for as a pipe"));
        let mut worker = Self {
            stage: Stage(stage),
            rank: Rank(rank),
            child,
            orders,
            answers,
        };
        assert_eq!(
            worker.answer(),
            "ready",
            "the rank says why on standard error"
        );
        worker
    }

    /// The runs mapped on this rank, as `first+count`, sorted.
    pub(crate) fn mapped(&mut self) -> String {
        self.ask("mapped")
    }

    /// Free bytes of its device.
    pub(crate) fn free_bytes(&mut self) -> u64 {
        self.ask("memory").parse().expect("a number")
    }

    /// Ends it without a chance to clean up.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it is a child of this process");
        self.child.wait().expect("it is a child of this process");
    }

    fn ask(&mut self, order: &str) -> String {
        let orders = self.orders.as_mut().expect("only a drop takes it");
        writeln!(orders, "{order}").expect("the worker runs");
        self.answer()
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers
            .read_line(&mut line)
            .expect("the worker answers in lines");
        line.trim_end().to_owned()
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        drop(self.orders.take());
        self.child.wait().expect("it is a child of this process");
    }
}

/// Where the worker program is: beside the test, when it was carried to another machine.
pub(crate) fn program() -> PathBuf {
    #[expect(
        clippy::disallowed_methods,
        reason = "set by the script that runs carried tests"
    )]
    let carried = std::env::var_os("KVCACHED_TEST_BIN_DIR");
    match carried {
        Some(folder) => PathBuf::from(folder).join("worker"),
        None => PathBuf::from(env!("CARGO_BIN_EXE_worker")),
    }
}

/// The pool of every rank.
pub(crate) fn spec(layout: Layout) -> PoolSpec {
    PoolSpec {
        layout,
        layers: 4,
        kv_buffers: KvBuffers::Two,
        block_bytes: 256 << 10,
        page_size: PageSize::Auto,
        capacity_bytes: CAPACITY_BYTES,
    }
}

/// Where the scheduler is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In rank 0 of so many.
    Rank0(u16),
    /// In a process of its own, with so many ranks in so many stages elsewhere.
    Separate(u16, u16),
}

/// Starts the scheduler of an engine whose workers listen in `runtime_dir`.
pub(crate) fn scheduler<D: Driver>(
    runtime_dir: &Path,
    instance: &str,
    place: Place,
    layout: Layout,
    driver: Option<Arc<D>>,
) -> Result<Scheduler, StartError> {
    let instance: InstanceName = instance.parse().expect("a name");
    let endpoints = RuntimeDir::open(runtime_dir)
        .and_then(|folder| folder.instance(&instance))
        .expect("a folder of this test");
    let topology = match place {
        Place::Rank0(tp) => Topology::rank0_coordinates(tp, &endpoints),
        Place::Separate(tp, stages) => Topology::separate_coordinator(tp, stages, &endpoints),
    };
    let config = SchedulerConfig {
        mapper: MapperConfig {
            instance,
            topology,
            cold: Cold::Unbacked,
            recycler: RecyclerConfig::default(),
            ipc_timeout: Duration::from_secs(20),
            epochs: Arc::new(Epochs::new(Duration::from_secs(1))),
        },
        pools: vec![PoolSetup {
            id: POOL,
            spec: spec(layout),
            policy: PoolPolicy::default(),
        }],
        runs: RunChoice::default(),
        ready_timeout: READY_TIMEOUT,
        granularity: 2 << 20,
        background: Background::Off,
    };
    Scheduler::start(config, driver)
}
