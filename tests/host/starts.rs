//! The start of a scheduler whose reserve is kept by a thread from the first moment on.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvcached_integrations::{
    Background, MappedPool, MapperConfig, Pool, PoolPolicy, RunChoice, RunLength, Scheduler,
    compose_over,
};
use kvcached_manager::{AllocError, BlockId, FullReason};
use kvcached_mapper::{
    After, Cold, Epochs, Health, Layout, MapError, Mapper, PageId, PageRun, Readiness, Reconciled,
};
use kvcached_page_alloc::Reserve;
use kvcached_tp_ipc::{Deadline, InstanceName, RuntimeDir, Topology};
use kvcached_vmm::RecyclerConfig;

use crate::ranks::{POOL, WorkerProcess, folder, spec};

/// A mapper whose calls are delayed as a seed decides, and that looks at every page.
#[derive(Debug)]
struct Delayed {
    inner: Arc<dyn Mapper>,
    seed: AtomicU64,
    /// Delays that are left: a start is delayed, and not all that comes after it, since to yield
    /// on a busy machine takes long.
    delays: AtomicU32,
    mapped: Mutex<BTreeSet<PageId>>,
    /// Pages that were mapped twice, or unmapped without being mapped.
    wrong: Mutex<Vec<PageId>>,
}

impl Delayed {
    fn delay(&self) {
        let one_less = |left: u32| left.checked_sub(1);
        let left = self
            .delays
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        if left.is_err() {
            return;
        }
        let next = |seed: u64| Some(scramble(seed));
        let (Ok(seed) | Err(seed)) =
            self.seed
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        for _ in 0..(seed >> 33) % 4 {
            std::thread::yield_now();
        }
    }

    fn note(&self, runs: &[PageRun], change: impl Fn(&mut BTreeSet<PageId>, PageId) -> bool) {
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let mut wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        for page in runs.iter().flat_map(|run| run.pages()) {
            if !change(&mut mapped, page) {
                wrong.push(page);
            }
        }
    }
}

impl Mapper for Delayed {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.delay();
        self.note(runs, BTreeSet::insert);
        let answer = self.inner.map(runs);
        self.delay();
        answer
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.delay();
        let answer = self.inner.unmap_after(runs, after);
        self.note(runs, |mapped, page| mapped.remove(&page));
        self.delay();
        answer
    }

    fn headroom(&self) -> Option<u32> {
        self.inner.headroom()
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        self.inner.ready()
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        self.delay();
        self.inner.reconcile(doubtful)
    }
}

fn scramble(seed: u64) -> u64 {
    seed.wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407)
}

/// Everything that can be had, a few blocks at a time. Pages that are just being mapped for the
/// reserve are asked for again.
fn take_all(pool: &Pool) -> Vec<BlockId> {
    let mut all = Vec::new();
    let bound = Deadline::after(Duration::from_secs(20));
    for count in [7, 3, 1] {
        loop {
            match pool.alloc_into(count, &mut all) {
                Ok(()) => {}
                Err(AllocError::Full {
                    reason: FullReason::Busy,
                    ..
                }) => assert!(!bound.is_over(), "no page is busy for long"),
                Err(AllocError::Full { .. }) => break,
                Err(error) => unreachable!("all ranks are there: {error}"),
            }
        }
    }
    all
}

#[test]
fn the_null_block_is_block_0_and_no_page_is_given_twice_however_a_start_is_delayed() {
    let folder = folder();
    let layout = Layout::Contiguous;
    let device = "host:268435456";
    let mut workers: Vec<_> = (0..2)
        .map(|rank| WorkerProcess::start(folder.path(), "engine", (0, rank), device, layout))
        .collect();
    let instance: InstanceName = "engine".parse().expect("a name");
    let endpoints = RuntimeDir::open(folder.path())
        .and_then(|folder| folder.instance(&instance))
        .expect("a folder of this test");
    let geometry = spec(layout).resolve(2 << 20).expect("a layout");
    for seed in 0..200 {
        let config = MapperConfig {
            instance: instance.clone(),
            topology: Topology::separate_coordinator(2, 1, &endpoints),
            cold: Cold::Unbacked,
            recycler: RecyclerConfig::default(),
            ipc_timeout: Duration::from_secs(20),
            epochs: Arc::new(Epochs::new(Duration::from_secs(1))),
        };
        let ready_by = Deadline::after(Duration::from_secs(10));
        let ranks = compose_over(&config, POOL, &geometry, None, ready_by).expect("they listen");
        let delayed = Arc::new(Delayed {
            inner: ranks,
            seed: AtomicU64::new(scramble(seed)),
            delays: AtomicU32::new(12),
            mapped: Mutex::default(),
            wrong: Mutex::default(),
        });
        let pool = MappedPool {
            id: POOL,
            geometry: geometry.clone(),
            policy: PoolPolicy {
                reserve: Reserve { min: 3, max: 9 }.into(),
                ..PoolPolicy::default()
            },
            mapper: Arc::clone(&delayed) as Arc<dyn Mapper>,
            tensor_bases: Vec::new(),
        };
        let every = Duration::from_millis(1);
        let background = Background::On { every };
        let scheduler = Scheduler::with_mappers(
            vec![pool],
            RunChoice::up_to(RunLength::Bytes(8 << 20)),
            background,
        )
        .expect("all ranks are there");
        let pool = scheduler.pool(POOL).expect("the one pool");
        let mut taken = std::thread::scope(|scope| {
            let other = scope.spawn(|| take_all(pool));
            let mut taken = take_all(pool);
            taken.extend(other.join().expect("it only takes"));
            taken
        });
        taken.extend(take_all(pool));
        taken.sort_unstable();
        let all = (1..geometry.blocks()).map(BlockId);
        assert_eq!(taken, all.collect::<Vec<_>>(), "seed {seed}");
        assert_eq!(
            delayed.wrong.lock().expect("nobody panics").as_slice(),
            [],
            "seed {seed}"
        );
        let first = workers[0].mapped();
        assert_eq!(workers[1].mapped(), first, "seed {seed}");
        assert!(first.starts_with("0+"), "seed {seed}: {first}");
        pool.free(&taken).expect("handed out before");
        drop(scheduler);
        assert_eq!(workers[0].mapped(), "", "seed {seed}");
        assert_eq!(workers[1].mapped(), "", "seed {seed}");
    }
}
