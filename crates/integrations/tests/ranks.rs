//! Schedulers and workers together: real memory, real sockets in a directory of their own, threads
//! in the place of processes.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test file: whatever fails, fails the test"
)]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvcached_integrations::{
    Arrangement, Background, Change, ComposeError, Config, EngineProcess, MappedPool, Mode,
    PoolPolicy, PoolSetup, ProcessIds, RankReport, Role, Scheduler, SchedulerConfig, StartError,
    Worker, WorkerConfig, WorkerError, compose, compose_over, vllm,
};
use kvcached_manager::{AllocError, FullReason};
use kvcached_mapper::testing::RecordingMapper;
use kvcached_mapper::{
    Cause, Epoch, Epochs, Health, KvBuffers, Layout, LocalMapper, Mapper, PageId, PageRun,
    PageSize, PoolId, PoolSpec, Rank, RankMapper, Stage,
};
use kvcached_page_alloc::Reserve;
use kvcached_tp_ipc::{BindError, Deadline, RuntimeDir};
use kvcached_vmm::{Call, Chunk, Driver, Host, HostConfig, Mock, MockConfig, Recycler};
use proptest::prelude::*;
use tempfile::TempDir;

const GRANULE: u64 = 16 << 10;

/// Pages of a pool, bytes of one of them over its two tensors, and blocks on it.
const PAGES: u32 = 64;
const BUNDLE: u64 = 2 * GRANULE;
const PER_PAGE: u32 = 4;

const POOL: PoolId = PoolId(0);

/// Long enough never to be met by a test that passes.
const LONG: &str = "60";

fn spec() -> PoolSpec {
    PoolSpec {
        layout: Layout::Unified,
        layers: 2,
        kv_buffers: KvBuffers::Two,
        block_bytes: 2048,
        page_size: PageSize::Auto,
        capacity_bytes: u64::from(PAGES) * BUNDLE,
    }
}

fn setup(pool: PoolId) -> PoolSetup {
    PoolSetup {
        id: pool,
        spec: spec(),
        policy: PoolPolicy::default(),
    }
}

fn device(pages: u64) -> Arc<Host> {
    let config = HostConfig {
        granularity: GRANULE,
        ..HostConfig::new(pages * BUNDLE)
    };
    Arc::new(Host::new(config).expect("a pretended device"))
}

fn used_pages(device: &Host) -> u64 {
    let memory = device.memory().unwrap();
    (memory.total - memory.free) / BUNDLE
}

/// One engine in a directory of its own.
struct Engine {
    config: Config,
    _directory: TempDir,
}

impl Engine {
    fn new(instance: &str, ready_timeout: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let runtime_dir = directory.path().join("run");
        let lookup = |name: &str| match name {
            "KVCACHED_RUNTIME_DIR" => Some(runtime_dir.clone().into()),
            "KVCACHED_INSTANCE" => Some(instance.into()),
            "KVCACHED_IPC_TIMEOUT" => Some(LONG.into()),
            "KVCACHED_READY_TIMEOUT" => Some(ready_timeout.into()),
            "KVCACHED_MAX_RUN_PAGES" => Some("4".into()),
            _ => None,
        };
        let ids = ProcessIds {
            uid: 1,
            process_group: 1,
        };
        Self {
            config: Config::from_lookup(lookup, ids).unwrap(),
            _directory: directory,
        }
    }

    fn worker(&self, stage: u16, rank: u16, pools: &[PoolId], device: &Arc<Host>) -> Worker<Host> {
        self.try_worker(
            stage,
            rank,
            pools.iter().map(|&pool| (pool, spec())).collect(),
            device,
        )
        .unwrap_or_else(|e| panic!("stage {stage}, rank {rank}: {e}"))
    }

    fn try_worker(
        &self,
        stage: u16,
        rank: u16,
        pools: Vec<(PoolId, PoolSpec)>,
        device: &Arc<Host>,
    ) -> Result<Worker<Host>, WorkerError> {
        let instance = self.config.instance.clone();
        let place = (Stage(stage), Rank(rank));
        let config = WorkerConfig {
            // Nobody waits here to be told why a worker cannot begin.
            ready_timeout: Duration::ZERO,
            ..WorkerConfig::new(&self.config, instance, place, pools)
        };
        Worker::start(config, device)
    }

    fn scheduler_config(&self, arrangement: Arrangement, pools: Vec<PoolSetup>) -> SchedulerConfig {
        let instance = self.config.instance.clone();
        let topology = arrangement
            .topology(&self.config.runtime_dir, &instance)
            .unwrap();
        SchedulerConfig {
            granularity: GRANULE,
            background: Background::Off,
            ..SchedulerConfig::new(&self.config, instance, topology, pools)
        }
    }

    /// A scheduler of one pool, with the mapper of its own rank to look at.
    fn watched(
        &self,
        arrangement: Arrangement,
        device: Option<&Arc<Host>>,
    ) -> (Scheduler, Option<Arc<LocalMapper<Host>>>) {
        let SchedulerConfig {
            mapper,
            runs,
            ready_timeout,
            ..
        } = self.scheduler_config(arrangement, vec![setup(POOL)]);
        let geometry = spec().resolve(GRANULE).unwrap();
        let ready_by = Deadline::after(ready_timeout);
        let memory = device.map(|it| Arc::new(Recycler::new(Arc::clone(it), mapper.recycler)));
        let composed = compose(&mapper, POOL, &geometry, memory.as_ref(), ready_by).unwrap();
        let pool = MappedPool {
            id: POOL,
            geometry,
            policy: PoolPolicy::default(),
            mapper: composed.mapper,
            tensor_bases: Vec::new(),
        };
        let scheduler = Scheduler::with_mappers(vec![pool], runs, Background::Off).unwrap();
        (scheduler, composed.local)
    }

    /// What the instance has in the runtime directory; `None` if it is not there at all.
    fn sockets(&self) -> Option<Vec<String>> {
        let directory = self.config.runtime_dir.join(self.config.instance.as_str());
        let mut names: Vec<String> = std::fs::read_dir(directory)
            .ok()?
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        Some(names)
    }
}

fn mapped(worker: &Worker<Host>, pool: PoolId) -> Vec<PageRun> {
    worker.mapper(pool).expect("a pool of the worker").mapped()
}

#[expect(clippy::disallowed_methods, reason = "a test that hangs must end")]
fn eventually(condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < end, "it did not happen");
        std::thread::yield_now();
    }
}

/// Where the coordinator is, and who listens for it.
fn arrangements() -> Vec<(Arrangement, Vec<(u16, u16)>)> {
    vec![
        (Arrangement::Single, vec![]),
        (Arrangement::Rank0 { tp: 1 }, vec![]),
        (Arrangement::Rank0 { tp: 3 }, vec![(0, 1), (0, 2)]),
        (Arrangement::Separate { tp: 1, stages: 1 }, vec![(0, 0)]),
        (
            Arrangement::Separate { tp: 2, stages: 1 },
            vec![(0, 0), (0, 1)],
        ),
        (
            Arrangement::Separate { tp: 2, stages: 2 },
            vec![(0, 0), (0, 1), (1, 0), (1, 1)],
        ),
        (
            Arrangement::Autonomous {
                stage: Stage(1),
                rank: Rank(3),
            },
            vec![],
        ),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    #[test]
    fn every_rank_has_the_same_pages_at_any_time(
        steps in prop::collection::vec((any::<bool>(), 1u32..30, any::<usize>()), 1..40),
        reserve in 0u32..3,
    ) {
        for (arrangement, places) in arrangements() {
            let engine = Engine::new("equal", LONG);
            let devices: Vec<_> = places.iter().map(|_| device(48)).collect();
            let workers: Vec<_> = places
                .iter()
                .zip(&devices)
                .map(|(&(stage, rank), device)| engine.worker(stage, rank, &[POOL], device))
                .collect();
            let own = device(48);
            let (scheduler, local) = engine.watched(arrangement, Some(&own));
            let pool = scheduler.pool(POOL).unwrap();
            let mut mine = Vec::new();
            for &(alloc, n, which) in &steps {
                if alloc {
                    match pool.alloc(n) {
                        Ok(blocks) => mine.push(blocks),
                        Err(AllocError::Full { .. }) => {}
                        Err(broken) => panic!("{broken}"),
                    }
                } else if !mine.is_empty() {
                    let blocks = mine.swap_remove(which % mine.len());
                    pool.free(&blocks).unwrap();
                }
                if reserve > 0 && which % 4 == 0 {
                    pool.trim().unwrap();
                }
                let bytes = pool.usage().pages.mapped_bytes;
                let mut sets: Vec<_> = workers.iter().map(|worker| mapped(worker, POOL)).collect();
                sets.extend(local.as_ref().map(|local| local.mapped()));
                for set in &sets {
                    let pages: u64 = set.iter().map(|run| u64::from(run.count())).sum();
                    prop_assert_eq!(pages * BUNDLE, bytes, "{:?}", arrangement);
                    prop_assert_eq!(set, &sets[0], "{:?}", arrangement);
                }
                for device in &devices {
                    prop_assert_eq!(used_pages(device) * BUNDLE, bytes, "each rank on its device");
                }
            }
            drop(scheduler);
            for (worker, device) in workers.iter().zip(&devices) {
                prop_assert_eq!(mapped(worker, POOL), vec![]);
                prop_assert_eq!(used_pages(device), 0);
            }
        }
    }
}

#[test]
fn a_full_rank_makes_all_undo_and_is_asked_again() {
    for (arrangement, places) in arrangements()
        .into_iter()
        .filter(|(_, places)| places.len() > 1)
    {
        let engine = Engine::new("full", LONG);
        let small = device(8);
        let workers: Vec<_> = places
            .iter()
            .enumerate()
            .map(|(at, &(stage, rank))| {
                // The last rank has the least memory: the others have mapped by the time it is full.
                let device = if at + 1 == places.len() {
                    small.clone()
                } else {
                    device(48)
                };
                engine.worker(stage, rank, &[POOL], &device)
            })
            .collect();
        let own = device(48);
        let (scheduler, local) = engine.watched(arrangement, Some(&own));
        let pool = scheduler.pool(POOL).unwrap();
        let everywhere = || {
            let mut sets: Vec<_> = workers.iter().map(|worker| mapped(worker, POOL)).collect();
            sets.extend(local.as_ref().map(|local| local.mapped()));
            sets
        };
        let first = pool.alloc(3 * PER_PAGE).unwrap();
        let (before, usage) = (everywhere(), pool.usage());
        let refused = pool.alloc(8 * PER_PAGE);
        assert!(
            matches!(
                refused,
                Err(AllocError::Full {
                    reason: FullReason::DeviceMemory,
                    ..
                })
            ),
            "{arrangement:?}: {refused:?}"
        );
        assert_eq!(everywhere(), before, "{arrangement:?}");
        assert_eq!(pool.usage().pages.used, usage.pages.used);
        assert_eq!(pool.usage().pages.quarantined, 0);
        assert_eq!(used_pages(&small), 4);

        // A neighbour takes what is left there, and gives it back.
        let neighbour = Chunk::create(&small, 4 * BUNDLE).unwrap();
        assert!(matches!(
            pool.alloc(2 * PER_PAGE),
            Err(AllocError::Full { .. })
        ));
        drop(neighbour);
        let second = pool.alloc(2 * PER_PAGE).expect("there is room again");
        pool.free(&first).unwrap();
        pool.free(&second).unwrap();
        drop(scheduler);
        assert_eq!(used_pages(&small), 0);
    }
}

#[test]
fn a_full_local_rank_is_told_before_anything_is_sent() {
    let engine = Engine::new("local-full", LONG);
    let (own, other) = (device(4), device(48));
    let worker = engine.worker(0, 1, &[POOL], &other);
    let (scheduler, _) = engine.watched(Arrangement::Rank0 { tp: 2 }, Some(&own));
    let before = mapped(&worker, POOL);
    let refused = scheduler.pool(POOL).unwrap().alloc(8 * PER_PAGE);
    assert!(matches!(
        refused,
        Err(AllocError::Full {
            reason: FullReason::DeviceMemory,
            ..
        })
    ));
    assert_eq!(mapped(&worker, POOL), before);
}

#[test]
fn missing_ranks_are_all_named_in_one_error() {
    let engine = Engine::new("missing", "0.2");
    let device = device(48);
    let _first = engine.worker(0, 0, &[POOL], &device);
    let _last = engine.worker(1, 1, &[POOL], &device);
    let config = engine.scheduler_config(
        Arrangement::Separate { tp: 2, stages: 2 },
        vec![setup(POOL)],
    );
    let error = Scheduler::start(config, None::<Arc<Host>>).unwrap_err();
    let StartError::Mapper {
        pool: POOL,
        source: ComposeError::NotReady { missing },
    } = &error
    else {
        panic!("{error}");
    };
    let places: Vec<_> = missing.iter().map(|rank| (rank.stage, rank.rank)).collect();
    assert_eq!(places, [(Stage(0), Rank(1)), (Stage(1), Rank(0))]);
    let text = error.to_string();
    for part in [
        "stage 0, rank 1",
        "stage 1, rank 0",
        "s0-r1.sock",
        "s1-r0.sock",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(used_pages(&device), 0);
}

#[test]
fn ranks_may_come_late() {
    let engine = Engine::new("late", LONG);
    let config = engine.scheduler_config(Arrangement::Rank0 { tp: 3 }, vec![setup(POOL)]);
    let (own, other) = (device(48), device(96));
    std::thread::scope(|scope| {
        let starting = scope.spawn(|| Scheduler::start(config, Some(own)));
        let _workers = [
            engine.worker(0, 2, &[POOL], &other),
            engine.worker(0, 1, &[POOL], &other),
        ];
        let scheduler = starting.join().unwrap().unwrap();
        let pool = scheduler.pool(POOL).unwrap();
        assert_eq!(pool.tensor_bases().len(), 2);
        pool.alloc(9).unwrap();
        assert_eq!(used_pages(&other), 2 * 3);
    });
}

/// What waiting cannot mend is not waited for: the bound of this test is a minute.
#[test]
fn a_rank_with_another_layout_ends_the_start_and_leaves_nothing() {
    let engine = Engine::new("layout", LONG);
    let (first, second) = (device(48), device(48));
    let other = PoolSpec {
        capacity_bytes: 32 * BUNDLE,
        ..spec()
    };
    let right = engine
        .try_worker(0, 0, vec![(POOL, spec()), (PoolId(1), spec())], &first)
        .unwrap();
    let _wrong = engine.try_worker(0, 1, vec![(POOL, spec()), (PoolId(1), other)], &second);
    let pools = vec![setup(POOL), setup(PoolId(1))];
    let config = engine.scheduler_config(Arrangement::Separate { tp: 2, stages: 1 }, pools);
    let error = Scheduler::start(config, None::<Arc<Host>>).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("pool 1") && text.contains("rank 1"), "{text}");
    assert_eq!((used_pages(&first), used_pages(&second)), (0, 0));

    // The connections are closed: another coordinator is served.
    let config = engine.scheduler_config(
        Arrangement::Separate { tp: 2, stages: 1 },
        vec![setup(POOL)],
    );
    let scheduler = Scheduler::start(config, None::<Arc<Host>>).unwrap();
    assert_eq!(mapped(&right, POOL).len(), 1);
    drop(scheduler);
}

/// Another pool's pages once went to the first pool, or to the first stage.
#[test]
fn pages_go_to_their_own_pool_on_every_stage() {
    let engine = Engine::new("pools", LONG);
    let pools = [PoolId(0), PoolId(1)];
    let devices = [device(96), device(96)];
    let workers = [
        engine.worker(0, 0, &pools, &devices[0]),
        engine.worker(1, 0, &pools, &devices[1]),
    ];
    let config = engine.scheduler_config(
        Arrangement::Separate { tp: 1, stages: 2 },
        pools.map(setup).into(),
    );
    let scheduler = Scheduler::start(config, None::<Arc<Host>>).unwrap();
    let pages = |pool| {
        workers.each_ref().map(|worker| {
            mapped(worker, pool)
                .iter()
                .map(|run| run.count())
                .sum::<u32>()
        })
    };
    assert_eq!((pages(pools[0]), pages(pools[1])), ([1, 1], [1, 1]));
    let second = scheduler.pool(pools[1]).unwrap();
    let blocks = second.alloc(5 * PER_PAGE).unwrap();
    assert_eq!((pages(pools[0]), pages(pools[1])), ([1, 1], [6, 6]));
    second.free(&blocks).unwrap();
    second.trim().unwrap();
    assert_eq!((pages(pools[0]), pages(pools[1])), ([1, 1], [1, 1]));
}

/// A start once failed, or gave a tiny pool, because a neighbour held most of the device.
#[test]
fn a_neighbours_memory_does_not_shrink_a_pool() {
    let engine = Engine::new("neighbour", LONG);
    let own = device(48);
    let neighbour = Chunk::create(&own, 46 * BUNDLE).unwrap();
    let config = engine.scheduler_config(Arrangement::Single, vec![setup(POOL)]);
    let scheduler = Scheduler::start(config, Some(own)).unwrap();
    let pool = scheduler.pool(POOL).unwrap();
    assert_eq!(pool.available(), PAGES * PER_PAGE - 1);
    assert!(matches!(
        pool.alloc(3 * PER_PAGE),
        Err(AllocError::Full { .. })
    ));
    drop(neighbour);
    assert!(pool.alloc(3 * PER_PAGE).is_ok());
}

/// The device whose work may read a page is the rank's, and so is the wait; the scheduler here has
/// no device at all.
#[test]
fn a_rank_waits_for_its_own_device_before_it_unmaps() {
    let engine = Engine::new("wait", LONG);
    let device = Arc::new(Mock::new(MockConfig {
        granularity: GRANULE,
        ..MockConfig::new(16 * BUNDLE)
    }));
    let instance = engine.config.instance.clone();
    let place = (Stage(0), Rank(0));
    let pools = vec![(POOL, spec())];
    let config = WorkerConfig::new(&engine.config, instance, place, pools);
    let _worker = Worker::start(config, &device).unwrap();
    let separate = Arrangement::Separate { tp: 1, stages: 1 };
    let config = engine.scheduler_config(separate, vec![setup(POOL)]);
    let scheduler = Scheduler::start(config, None::<Arc<Host>>).unwrap();
    let pool = scheduler.pool(POOL).unwrap();
    let blocks = pool.alloc(5 * PER_PAGE).unwrap();
    assert_eq!(device.calls(Call::Synchronize), 0);

    let calls = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&calls);
    device.fail_with(move |call| {
        seen.lock().unwrap().push(call);
        None
    });
    pool.free(&blocks).unwrap();
    pool.trim().unwrap();
    let calls = calls.lock().unwrap();
    let first = |wanted| calls.iter().position(|&call| call == wanted);
    let (wait, unmap) = (first(Call::Synchronize), first(Call::Unmap));
    assert!(wait.is_some() && wait < unmap, "{calls:?}");
    assert_eq!(device.violations(), []);
}

#[test]
fn autonomous_ranks_send_nothing() {
    let engine = Engine::new("autonomous", LONG);
    let devices = [device(48), device(48)];
    let schedulers = [0, 1].map(|rank| {
        let arrangement = Arrangement::Autonomous {
            stage: Stage(0),
            rank: Rank(rank),
        };
        let config = engine.scheduler_config(arrangement, vec![setup(POOL)]);
        Scheduler::start(config, Some(devices[usize::from(rank)].clone())).unwrap()
    });
    schedulers[0].pool(POOL).unwrap().alloc(9).unwrap();
    assert_eq!(devices.each_ref().map(|device| used_pages(device)), [3, 1]);
    assert_eq!(engine.sockets(), None, "not even a directory");
    assert!(!engine.config.runtime_dir.exists());
}

#[test]
fn a_coordinator_needs_no_device_and_a_rank_does() {
    let engine = Engine::new("device", LONG);
    let device = device(48);
    let _worker = engine.worker(0, 0, &[POOL], &device);
    let separate = Arrangement::Separate { tp: 1, stages: 1 };
    let config = engine.scheduler_config(separate, vec![setup(POOL)]);
    let scheduler = Scheduler::start(config, None::<Arc<Host>>).unwrap();
    let pool = scheduler.pool(POOL).unwrap();
    assert_eq!(pool.tensor_bases(), []);
    assert_eq!(pool.available(), PAGES * PER_PAGE - 1);

    for arrangement in [Arrangement::Single, Arrangement::Rank0 { tp: 2 }] {
        let config = engine.scheduler_config(arrangement, vec![setup(POOL)]);
        let error = Scheduler::start(config, None::<Arc<Host>>).unwrap_err();
        assert!(
            matches!(
                error,
                StartError::Mapper {
                    source: ComposeError::NoDriver {
                        stage: Stage(0),
                        rank: Rank(0)
                    },
                    ..
                }
            ),
            "{error}"
        );
    }
}

/// The rank in this process may be a mapper that somebody wrapped.
#[test]
fn a_ready_made_local_mapper_is_one_of_the_ranks() {
    let engine = Engine::new("ready-made", LONG);
    let device = device(48);
    let worker = engine.worker(0, 1, &[POOL], &device);
    let SchedulerConfig { mapper, .. } =
        engine.scheduler_config(Arrangement::Rank0 { tp: 2 }, vec![setup(POOL)]);
    let geometry = spec().resolve(GRANULE).unwrap();
    let ready_by = || Deadline::after(Duration::from_secs(60));
    assert!(matches!(
        compose_over(&mapper, POOL, &geometry, None, ready_by()),
        Err(ComposeError::NoDriver {
            stage: Stage(0),
            rank: Rank(0)
        })
    ));

    let own = Arc::new(RecordingMapper::new(PAGES));
    let local: Arc<dyn RankMapper> = Arc::<RecordingMapper>::clone(&own);
    let all = compose_over(&mapper, POOL, &geometry, Some(local), ready_by()).unwrap();
    let run = PageRun::new(PageId(3), 2).unwrap();
    all.map(&[run]).unwrap();
    assert_eq!(
        (own.mapped(), mapped(&worker, POOL)),
        (vec![run], vec![run])
    );
    all.unmap(&[run]).unwrap();
    assert_eq!((own.mapped(), mapped(&worker, POOL)), (vec![], vec![]));
    assert_eq!(own.violations(), []);
}

#[test]
fn a_scheduler_leaves_its_workers_as_it_found_them() {
    let engine = Engine::new("again", LONG);
    let devices = [device(48), device(48)];
    let workers = [0, 1].map(|rank| engine.worker(0, rank, &[POOL], &devices[usize::from(rank)]));
    for round in 1..4 {
        let config = engine.scheduler_config(
            Arrangement::Separate { tp: 2, stages: 1 },
            vec![setup(POOL)],
        );
        let scheduler = Scheduler::start(config, None::<Arc<Host>>).unwrap();
        scheduler.pool(POOL).unwrap().alloc(round * 7).unwrap();
        assert!(devices.iter().all(|device| used_pages(device) > 0));
        drop(scheduler);
        assert!(workers.iter().all(|worker| mapped(worker, POOL).is_empty()));
        assert!(devices.iter().all(|device| used_pages(device) == 0));
    }
    assert!(workers.iter().all(Worker::is_serving));
    assert_eq!(engine.sockets().unwrap(), ["s0-r0.sock", "s0-r1.sock"]);
    drop(workers);
    assert_eq!(
        engine.sockets(),
        None,
        "neither sockets nor their directory stay"
    );
}

#[test]
fn no_engine_reads_on_a_rank_what_the_engine_before_it_wrote() {
    let engine = Engine::new("after-another", LONG);
    let device = device(48);
    let worker = engine.worker(0, 0, &[POOL], &device);
    let rank = worker.mapper(POOL).unwrap();
    let geometry = spec().resolve(GRANULE).unwrap();
    let runs = [(0, 4), (7, 4), (20, 1)]
        .map(|(first, count)| PageRun::new(PageId(first), count).expect("a run of the pool"));
    let separate = Arrangement::Separate { tp: 1, stages: 1 };
    for life in 0..3 {
        let config = engine.scheduler_config(separate, vec![setup(POOL)]);
        let ready_by = Deadline::after(config.ready_timeout);
        let coordinator = compose::<Host>(&config.mapper, POOL, &geometry, None, ready_by).unwrap();
        coordinator.mapper.map(&runs).unwrap();
        for extent in runs.iter().flat_map(|&run| geometry.extents(run)) {
            let mut found = vec![1; usize::try_from(extent.len).unwrap()];
            rank.read(extent, &mut found).unwrap();
            assert!(found.iter().all(|&byte| byte == 0), "life {life}");
            found.fill(7);
            rank.write(extent, &found).unwrap();
        }
        // It goes without a word, while the rank keeps one run to use it again and has the others.
        coordinator.mapper.unmap(&runs[..1]).unwrap();
        assert_eq!(rank.kept_bytes(), 4 * BUNDLE);
    }
}

#[test]
fn what_the_rank_in_this_process_keeps_is_told_and_it_alone() {
    let engine = Engine::new("kept-here", LONG);
    let devices = [device(48), device(48)];
    let worker = engine.worker(0, 1, &[POOL], &devices[1]);
    let (scheduler, local) = engine.watched(Arrangement::Rank0 { tp: 2 }, Some(&devices[0]));
    let mapper = scheduler.pool(POOL).unwrap().mapper();
    let run = PageRun::new(PageId(8), 3).expect("a run of the pool");
    mapper.map(&[run]).unwrap();
    assert_eq!(mapper.kept_bytes(), 0);
    mapper.unmap(&[run]).unwrap();
    let kept = [local.as_ref().unwrap(), worker.mapper(POOL).unwrap()].map(|it| it.kept_bytes());
    assert_eq!((kept, mapper.kept_bytes()), ([3 * BUNDLE; 2], 3 * BUNDLE));
    mapper.trim();
    assert_eq!(mapper.kept_bytes(), 0);
}

#[test]
fn a_worker_gives_its_memory_back_whoever_goes_first() {
    let engine = Engine::new("order", LONG);
    let devices = [device(48), device(48)];
    let [stays, goes] =
        [0, 1].map(|rank| engine.worker(0, rank, &[POOL], &devices[usize::from(rank)]));
    let config = engine.scheduler_config(
        Arrangement::Separate { tp: 2, stages: 1 },
        vec![setup(POOL)],
    );
    let scheduler = Scheduler::start(config, None::<Arc<Host>>).unwrap();
    let pool = scheduler.pool(POOL).unwrap();
    pool.alloc(9).unwrap();
    let before = mapped(&stays, POOL);
    drop(goes);
    assert_eq!(used_pages(&devices[1]), 0);
    assert_eq!(engine.sockets().unwrap(), ["s0-r0.sock"]);

    let broken = pool.alloc(40).unwrap_err();
    let AllocError::Broken(error) = &broken else {
        panic!("{broken}")
    };
    match &error.cause {
        Cause::Peer { stage, rank, .. } | Cause::Diverged { stage, rank } => {
            assert_eq!((*stage, *rank), (Stage(0), Rank(1)));
        }
        other => panic!("{other}"),
    }
    assert_eq!(
        mapped(&stays, POOL),
        before,
        "nobody maps what the others cannot"
    );
    // Nor is a block handed out of pages that are there already: the rank that is gone cannot hold
    // what would be written.
    let fenced = pool.alloc(1).unwrap_err();
    assert!(matches!(fenced, AllocError::Fenced { .. }), "{fenced}");
    assert!(pool.health().is_fenced());
    drop(scheduler);
    drop(stays);
    assert_eq!(used_pages(&devices[0]), 0);
    assert_eq!(engine.sockets(), None);
}

#[test]
fn one_rank_listens_once() {
    let engine = Engine::new("once", LONG);
    let device = device(48);
    let first = engine.worker(0, 0, &[POOL], &device);
    let second = engine.try_worker(0, 0, vec![(POOL, spec())], &device);
    assert!(matches!(
        second,
        Err(WorkerError::Bind(BindError::AlreadyServed { .. }))
    ));
    assert!(first.is_serving());
    drop(first);
    engine.worker(0, 0, &[POOL], &device);

    let none = engine.try_worker(0, 0, vec![], &device);
    assert!(matches!(none, Err(WorkerError::NoPools)));
    let twice = engine.try_worker(0, 0, vec![(POOL, spec()), (POOL, spec())], &device);
    assert!(matches!(twice, Err(WorkerError::PoolTwice { pool: POOL })));
    let mut wrong = spec();
    wrong.layers = 0;
    let wrong = engine.try_worker(0, 0, vec![(POOL, wrong)], &device);
    assert!(matches!(wrong, Err(WorkerError::Layout { pool: POOL, .. })));
    assert_eq!(engine.sockets(), None);
}

/// The start of the whole instance ends with the reason of the worker that cannot begin, and the
/// worker's own start once it has told it.
#[test]
fn a_worker_that_cannot_begin_fails_the_start_and_is_named() {
    let engine = Engine::new("unable", LONG);
    let device = device(48);
    let _good = engine.worker(0, 0, &[POOL], &device);
    let separate = Arrangement::Separate { tp: 2, stages: 1 };
    let config = engine.scheduler_config(separate, vec![setup(POOL)]);
    let mut wrong = spec();
    wrong.layers = 0;
    let instance = engine.config.instance.clone();
    let place = (Stage(0), Rank(1));
    let unable = WorkerConfig::new(&engine.config, instance, place, vec![(POOL, wrong)]);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| Worker::start(unable, &device).map(drop));
        let error = Scheduler::start(config, None::<Arc<Host>>).unwrap_err();
        let words = error.to_string();
        assert!(
            words.contains("stage 0, rank 1") && words.contains("the worker cannot serve: pool 0"),
            "{words}"
        );
        let own = worker.join().unwrap();
        assert!(matches!(own, Err(WorkerError::Layout { pool: POOL, .. })));
    });
}

/// Waits for the thread that keeps the pools; no longer than a test may take.
fn await_health(pool: &kvcached_integrations::Pool, fenced: bool) {
    let deadline = Deadline::after(Duration::from_secs(60));
    while pool.health().is_fenced() != fenced || !fenced && pool.health() != Health::Healthy {
        assert!(!deadline.is_over(), "{}", pool.health());
        std::thread::yield_now();
    }
}

/// The same configuration, used again after a start that failed, or by the next coordinator in this
/// process: each is a life of its own, also for the epochs, which begin anew.
#[test]
fn a_configuration_serves_for_several_lives_of_a_coordinator() {
    let engine = Engine::new("again-and-again", "1");
    let devices = [device(48), device(48)];
    let first = engine.worker(0, 0, &[POOL], &devices[0]);
    let separate = Arrangement::Separate { tp: 2, stages: 1 };
    let config = engine.scheduler_config(separate, vec![setup(POOL)]);
    let missing = Scheduler::start(config.clone(), None::<Arc<Host>>);
    assert!(matches!(missing, Err(StartError::Mapper { .. })));
    let second = engine.worker(0, 1, &[POOL], &devices[1]);
    for life in 0..3 {
        let scheduler = Scheduler::start(config.clone(), None::<Arc<Host>>);
        let scheduler = scheduler.unwrap_or_else(|e| panic!("life {life}: {e}"));
        let pool = scheduler.pool(POOL).unwrap();
        let blocks = pool.alloc(5 * PER_PAGE).unwrap();
        pool.free_in(&blocks, Epoch(5)).unwrap();
        // That an earlier coordinator's epoch 5 has ended says nothing about this one's.
        assert_eq!(pool.trim(), Ok(0), "life {life}");
        for worker in [&first, &second] {
            worker.epochs().retire(Epoch(1000));
        }
        assert_eq!(pool.trim(), Ok(5), "life {life}");
    }
}

/// A rank's process ends, and another one takes its place: nobody does anything but the scheduler's
/// own thread, and what was in the pages is told to be lost.
#[test]
fn a_rank_that_comes_back_is_brought_to_the_same_pages() {
    let engine = Engine::new("back", LONG);
    let devices = [device(48), device(48)];
    let worker = |rank: u16| engine.worker(0, rank, &[POOL], &devices[usize::from(rank)]);
    let (stays, goes) = (worker(0), worker(1));
    let separate = Arrangement::Separate { tp: 2, stages: 1 };
    let config = SchedulerConfig {
        background: Background::On {
            every: Duration::from_millis(20),
        },
        ..engine.scheduler_config(separate, vec![setup(POOL)])
    };
    let scheduler = Scheduler::start(config, None::<Arc<Host>>).unwrap();
    let pool = scheduler.pool(POOL).unwrap();
    let blocks = pool.alloc(9).unwrap();
    drop(goes);
    // Nobody asks for anything meanwhile.
    await_health(pool, true);
    assert_eq!((pool.available(), pool.contents_lost()), (0, 0));

    let back = worker(1);
    await_health(pool, false);
    assert_eq!(pool.contents_lost(), 1);
    assert_eq!(mapped(&back, POOL), mapped(&stays, POOL));
    pool.free(&blocks).unwrap();
    pool.alloc(40).unwrap();
    assert_eq!(mapped(&back, POOL), mapped(&stays, POOL));
    drop(scheduler);
    assert_eq!(devices.each_ref().map(|device| used_pages(device)), [0, 0]);
}

/// Memory stays until the rank that launched the work says that it has ended.
#[test]
fn memory_is_kept_until_the_epoch_has_retired_on_every_rank() {
    let engine = Engine::new("epochs", LONG);
    let devices = [device(48), device(48)];
    let worker = engine.worker(0, 1, &[POOL], &devices[1]);
    let mut config = engine.scheduler_config(Arrangement::Rank0 { tp: 2 }, vec![setup(POOL)]);
    config.mapper.epochs = Arc::new(Epochs::new(Duration::from_millis(10)));
    let scheduler = Scheduler::start(config, Some(Arc::clone(&devices[0]))).unwrap();
    let pool = scheduler.pool(POOL).unwrap();
    let blocks = pool.alloc(5 * PER_PAGE).unwrap();
    let pages = || devices.each_ref().map(|device| used_pages(device));
    let before = pages();
    pool.free_in(&blocks, Epoch(7)).unwrap();
    scheduler.epochs().retire(Epoch(7));
    // Here it has ended, there it has not.
    worker.epochs().retire(Epoch(6));
    assert_eq!((pool.trim(), pages()), (Ok(0), before));
    assert_eq!(pool.health(), Health::Healthy);
    // They may be used again all the same.
    let again = pool.alloc(5 * PER_PAGE).unwrap();
    assert_eq!(pages(), before);
    pool.free_in(&again, Epoch(7)).unwrap();
    worker.epochs().retire(Epoch(7));
    pool.trim().unwrap();
    assert_eq!(pages(), [1, 1]);

    // Or the engine knows it of all ranks.
    let blocks = pool.alloc(5 * PER_PAGE).unwrap();
    pool.free_in(&blocks, Epoch(9)).unwrap();
    scheduler.retire(Epoch(9));
    pool.trim().unwrap();
    assert_eq!(pages(), [1, 1]);
}

#[test]
fn two_engines_do_not_meet() {
    let one = Engine::new("one", LONG);
    let mut other = Engine::new("other", LONG);
    other.config.runtime_dir.clone_from(&one.config.runtime_dir);
    let devices = [device(48), device(48)];
    let _workers = [
        one.worker(0, 0, &[POOL], &devices[0]),
        other.worker(0, 0, &[POOL], &devices[1]),
    ];
    let separate = Arrangement::Separate { tp: 1, stages: 1 };
    let schedulers = [&one, &other].map(|engine| {
        let config = engine.scheduler_config(separate, vec![setup(POOL)]);
        Scheduler::start(config, None::<Arc<Host>>).unwrap()
    });
    schedulers[1].pool(POOL).unwrap().alloc(9).unwrap();
    assert_eq!(devices.each_ref().map(|device| used_pages(device)), [1, 3]);
}

#[test]
fn a_reserve_is_kept_on_every_rank() {
    let engine = Engine::new("reserve", LONG);
    let devices = [device(48), device(48)];
    let _workers =
        [1, 2].map(|rank| engine.worker(0, rank, &[POOL], &devices[usize::from(rank) - 1]));
    let policy = PoolPolicy {
        reserve: Reserve { min: 5, max: 8 }.into(),
        ..PoolPolicy::default()
    };
    let setup = PoolSetup {
        policy,
        ..setup(POOL)
    };
    let config = SchedulerConfig {
        background: Background::default(),
        ..engine.scheduler_config(Arrangement::Rank0 { tp: 3 }, vec![setup])
    };
    let own = device(48);
    let scheduler = Scheduler::start(config, Some(own.clone())).unwrap();
    let pool = scheduler.pool(POOL).unwrap();
    let everywhere = |pages| {
        used_pages(&own) == pages && devices.iter().all(|device| used_pages(device) == pages)
    };
    eventually(|| everywhere(6));
    let blocks = pool.alloc(20 * PER_PAGE).unwrap();
    eventually(|| pool.usage().pages.warm >= 5);
    pool.free(&blocks).unwrap();
    eventually(|| (5..=8).contains(&pool.usage().pages.warm));
    eventually(|| (6..=9).any(everywhere));
    drop(scheduler);
    assert!(everywhere(0));
}

/// The whole way of a vLLM engine with one GPU: from what its processes report to memory.
#[test]
fn a_core_and_its_only_worker_find_together() {
    let report = |is_worker, tp_rank| vllm::VllmReport {
        ranks: RankReport {
            tp_size: Some(1),
            tp_rank,
            pp_size: Some(1),
            is_worker: Some(is_worker),
            ..RankReport::default()
        },
        ..vllm::VllmReport::default()
    };
    let core = vllm::detect(&report(false, None), None).unwrap();
    let worker = vllm::detect(&report(true, Some(0)), None).unwrap();

    // In one process: no socket, no message.
    let engine = Engine::new("uniproc", LONG);
    let mut process = EngineProcess::new();
    process.init(&core).unwrap();
    let Change::BecameLocal(Mode::Coordinator(arrangement)) = process.init(&worker).unwrap() else {
        panic!("rank 0 is here: {process:?}");
    };
    let own = device(48);
    let config = engine.scheduler_config(arrangement, vec![setup(POOL)]);
    let scheduler = Scheduler::start(config, Some(own.clone())).unwrap();
    scheduler.pool(POOL).unwrap().alloc(9).unwrap();
    assert_eq!((used_pages(&own), engine.sockets()), (3, None));
    drop(scheduler);
    process.shutdown();

    // In two: the one rank is remote.
    let engine = Engine::new("multiproc", LONG);
    let Role::Worker { stage, rank } = worker.role else {
        panic!("{worker:?}")
    };
    let device = device(48);
    let listening = engine.worker(stage.0, rank.0, &[POOL], &device);
    let Change::Started(Mode::Coordinator(arrangement)) = process.init(&core).unwrap() else {
        panic!("another engine starts: {process:?}");
    };
    let config = engine.scheduler_config(arrangement, vec![setup(POOL)]);
    let scheduler = Scheduler::start(config, None::<Arc<Host>>).unwrap();
    scheduler.pool(POOL).unwrap().alloc(9).unwrap();
    assert_eq!(used_pages(&device), 3);
    assert_eq!(engine.sockets().unwrap(), ["s0-r0.sock"]);
    drop(scheduler);
    drop(listening);
}

#[test]
fn endpoints_follow_from_the_rank() {
    let engine = Engine::new("endpoints", LONG);
    let instance = &engine.config.instance;
    let topology = |arrangement: Arrangement| {
        arrangement
            .topology(&engine.config.runtime_dir, instance)
            .unwrap()
    };
    for (arrangement, places) in arrangements() {
        let topology = topology(arrangement);
        let remotes: Vec<_> = topology
            .remotes()
            .map(|(stage, rank, _)| (stage.0, rank.0))
            .collect();
        assert_eq!(remotes, places, "{arrangement:?}");
        let separate = matches!(arrangement, Arrangement::Separate { .. });
        assert_eq!(topology.local().is_none(), separate, "{arrangement:?}");
        for (stage, rank, endpoint) in topology.remotes() {
            let directory = RuntimeDir::open(&engine.config.runtime_dir).unwrap();
            assert_eq!(
                *endpoint,
                directory.instance(instance).unwrap().endpoint(stage, rank)
            );
        }
    }
}
