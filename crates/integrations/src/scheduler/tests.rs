use std::sync::mpsc;

use kvcached_manager::{AllocError, BlockId, FreeError, FullReason, LimitStatus};
use kvcached_mapper::testing::{Call, RecordingMapper};
use kvcached_mapper::{Cause, KvBuffers, Layout, PageSize, Rank, Stage};
use proptest::prelude::*;

use super::*;
use crate::RunLength;
use crate::testing::eventually;

/// Blocks on one page of the pools here.
pub(super) const PER_PAGE: u32 = 4;

pub(super) const ON: Background = Background::On {
    every: Duration::from_secs(3600),
};

fn spec(pages: u32) -> PoolSpec {
    PoolSpec {
        layout: Layout::PerLayer,
        layers: 2,
        kv_buffers: KvBuffers::Two,
        block_bytes: 1024,
        page_size: PageSize::Bytes(4096),
        capacity_bytes: u64::from(pages) * 4 * 4096,
    }
}

/// A reserve of `min` to `max` pages and nothing else.
pub(super) const fn reserve(min: u32, max: u32) -> PoolPolicy {
    PoolPolicy {
        reserve: ReserveBounds {
            min,
            max: Some(max),
        },
        limit: None,
        floor_bytes: 0,
    }
}

pub(super) fn mapped(
    pool: u16,
    pages: u32,
    policy: PoolPolicy,
    mapper: &Arc<RecordingMapper>,
) -> MappedPool {
    MappedPool {
        id: PoolId(pool),
        geometry: spec(pages).resolve(4096).unwrap(),
        policy,
        mapper: Arc::<RecordingMapper>::clone(mapper),
        tensor_bases: Vec::new(),
    }
}

pub(super) fn run_pages(pages: u32) -> RunChoice {
    RunChoice::up_to(RunLength::Pages(pages.try_into().unwrap()))
}

pub(super) fn start(
    pages: u32,
    policy: PoolPolicy,
    mapper: &Arc<RecordingMapper>,
    background: Background,
) -> Result<Scheduler, StartError> {
    Scheduler::with_mappers(
        vec![mapped(0, pages, policy, mapper)],
        run_pages(4),
        background,
    )
}

pub(super) fn only(scheduler: &Scheduler) -> &Pool {
    scheduler.pool(PoolId(0)).expect("the pool that was set up")
}

#[test]
fn the_null_block_is_block_0_in_every_start() {
    for _ in 0..200 {
        let mapper = Arc::new(RecordingMapper::new(64));
        let scheduler = start(64, reserve(5, 10), &mapper, ON).unwrap();
        let pool = only(&scheduler);
        // The rest of the null block's own page comes first: nobody else got page 0.
        assert_eq!(pool.alloc(3).unwrap(), [1, 2, 3].map(BlockId));
        assert_eq!(pool.free(&[BlockId(0)]), Err(FreeError::Null));
        drop(scheduler);
        assert_eq!(mapper.mapped(), []);
        assert_eq!(mapper.violations(), []);
    }
}

#[test]
fn the_thread_fills_the_reserve_and_takes_back_what_is_beyond() {
    let mapper = Arc::new(RecordingMapper::new(64));
    let scheduler = start(64, reserve(4, 8), &mapper, ON).unwrap();
    assert!(scheduler.keeps_reserves());
    let pool = only(&scheduler);
    eventually(|| pool.usage().pages.warm == 4);
    // A burst, and then idle: the reserve does not keep what the burst needed.
    let burst = pool.alloc(32 * PER_PAGE).unwrap();
    eventually(|| pool.usage().pages.warm >= 4);
    pool.free(&burst).unwrap();
    eventually(|| (4..=8).contains(&pool.usage().pages.warm));
    assert_eq!(mapper.violations(), []);
}

#[test]
fn without_a_reserve_there_is_no_thread() {
    for (min, max, background) in [(0, 0, ON), (2, 4, Background::Off)] {
        let mapper = Arc::new(RecordingMapper::new(64));
        let scheduler = start(64, reserve(min, max), &mapper, background).unwrap();
        assert!(!scheduler.keeps_reserves());
        assert_eq!(mapper.mapped_pages(), 1, "the null block's page");
        assert_eq!(only(&scheduler).usage().pages.warm, 0);
    }
}

#[test]
fn without_a_thread_the_caller_keeps_the_reserve() {
    let mapper = Arc::new(RecordingMapper::new(64));
    let scheduler = start(64, reserve(3, 5), &mapper, Background::Off).unwrap();
    let pool = only(&scheduler);
    let done = pool.replenish().unwrap();
    assert_eq!((done.mapped, pool.usage().pages.warm), (3, 3));
    assert_eq!(pool.trim(), Ok(3));
    assert_eq!(mapper.mapped_pages(), 1);
}

/// A limit once had an effect only while the reserve's thread ran.
#[test]
fn a_limit_is_obeyed_without_a_thread() {
    let mapper = Arc::new(RecordingMapper::new(64));
    let scheduler = start(64, reserve(0, 0), &mapper, ON).unwrap();
    let pool = only(&scheduler);
    let blocks = pool.alloc(20 * PER_PAGE).unwrap();
    pool.free(&blocks).unwrap();
    assert!(mapper.mapped_pages() > 4);
    let limit = Limit {
        bytes: 4 * pool.geometry().bundle_bytes(),
        revision: 1,
    };
    assert_eq!(pool.set_limit(limit), Ok(LimitStatus::Applied));
    assert!(mapper.mapped_pages() <= 4);
    assert_eq!(pool.limit(), limit);
    assert!(matches!(
        pool.alloc(5 * PER_PAGE),
        Err(AllocError::Full {
            reason: FullReason::Limit,
            ..
        })
    ));
}

#[test]
fn a_limit_to_start_with_is_in_force() {
    let mapper = Arc::new(RecordingMapper::new(64));
    let bundle = spec(64).resolve(4096).unwrap().bundle_bytes();
    let limit = Limit {
        bytes: 2 * bundle,
        revision: 1,
    };
    let with = |floor_bytes| PoolPolicy {
        limit: Some(limit),
        floor_bytes,
        ..PoolPolicy::default()
    };
    let scheduler = start(64, with(bundle), &mapper, ON).unwrap();
    assert_eq!(only(&scheduler).available(), 2 * PER_PAGE - 1);
    drop(scheduler);
    let refused = start(64, with(3 * bundle), &mapper, ON);
    assert!(matches!(
        refused,
        Err(StartError::Limit {
            pool: PoolId(0),
            ..
        })
    ));
}

/// Limits come from another thread than allocations.
#[test]
fn limits_while_others_allocate_lose_nothing() {
    let mapper = Arc::new(RecordingMapper::new(64));
    let scheduler = start(64, reserve(2, 6), &mapper, ON).unwrap();
    let pool = only(&scheduler);
    let bundle = pool.geometry().bundle_bytes();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for revision in 1..=500 {
                let bytes = (revision * 37 % 64) * bundle;
                let status = pool.set_limit(Limit { bytes, revision }).unwrap();
                assert!(matches!(
                    status,
                    LimitStatus::Applied | LimitStatus::Deferred { .. }
                ));
                let pages = pool.usage().pages;
                let states = pages.void + pages.cold + pages.warm + pages.used + pages.busy;
                assert_eq!(states + pages.withheld + pages.quarantined, pages.total);
            }
        });
        for seed in 0..2u32 {
            scope.spawn(move || {
                let mut mine = Vec::new();
                for step in 0..500u32 {
                    match pool.alloc(1 + (seed + step * 7) % 23) {
                        Ok(blocks) => mine.push(blocks),
                        Err(AllocError::Full { .. }) => {}
                        Err(broken) => panic!("{broken}"),
                    }
                    if step % 3 > 0
                        && let Some(blocks) = mine.pop()
                    {
                        pool.free(&blocks).unwrap();
                    }
                }
                for blocks in mine {
                    pool.free(&blocks).unwrap();
                }
            });
        }
    });
    let limit = Limit {
        bytes: 64 * bundle,
        revision: 501,
    };
    assert_eq!(pool.set_limit(limit), Ok(LimitStatus::Applied));
    assert_eq!(pool.available(), 64 * PER_PAGE - 1, "no block is lost");
    drop(scheduler);
    assert_eq!(mapper.violations(), []);
    assert_eq!(mapper.mapped(), []);
}

/// Shrinking and then restoring the first limit once did nothing.
#[test]
fn any_earlier_limit_can_be_restored() {
    let mapper = Arc::new(RecordingMapper::new(64));
    let scheduler = start(64, reserve(0, 0), &mapper, ON).unwrap();
    let pool = only(&scheduler);
    let first = pool.limit();
    pool.set_limit(Limit {
        bytes: first.bytes / 4,
        revision: 1,
    })
    .unwrap();
    assert_eq!(pool.available(), 16 * PER_PAGE - 1);
    pool.set_limit(Limit {
        bytes: first.bytes,
        revision: 2,
    })
    .unwrap();
    assert_eq!(pool.available(), 64 * PER_PAGE - 1);
}

#[test]
fn each_pool_maps_through_its_own_mapper() {
    let mappers: Vec<_> = (0..3).map(|_| Arc::new(RecordingMapper::new(16))).collect();
    let pools = mappers
        .iter()
        .zip([7, 0, 3])
        .map(|(mapper, id)| mapped(id, 16, reserve(0, 0), mapper));
    let scheduler = Scheduler::with_mappers(pools.collect(), run_pages(1), ON).unwrap();
    let third = scheduler.pool(PoolId(3)).unwrap();
    let blocks = third.alloc(5 * PER_PAGE).unwrap();
    let pages =
        |of: &[Arc<RecordingMapper>]| of.iter().map(|m| m.mapped_pages()).collect::<Vec<_>>();
    assert_eq!(pages(&mappers), [1, 1, 6]);
    third.free(&blocks).unwrap();
    assert_eq!(third.trim(), Ok(5));
    assert_eq!(pages(&mappers), [1, 1, 1]);
    assert!(scheduler.pool(PoolId(1)).is_none());
    assert_eq!(
        scheduler.pools().iter().map(Pool::id).collect::<Vec<_>>(),
        [7, 0, 3].map(PoolId)
    );
}

#[test]
fn what_is_not_ready_does_not_start() {
    let mapper = Arc::new(RecordingMapper::new(16));
    let missing: Vec<_> = [1, 3]
        .map(|rank| NotReady {
            stage: Stage(0),
            rank: Rank(rank),
            reason: format!("nobody listens at s0-r{rank}.sock"),
        })
        .into();
    mapper.set_readiness(Readiness::NotReady(missing.clone()));
    let error = start(16, reserve(2, 4), &mapper, ON).unwrap_err();
    let text = error.to_string();
    for part in ["pool 0", "rank 1", "rank 3", "s0-r1.sock", "s0-r3.sock"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(matches!(error, StartError::NotReady { missing: named, .. } if named == missing));
    assert_eq!(mapper.calls().map, 0, "nothing was mapped");
}

#[test]
fn a_pool_that_cannot_start_takes_the_others_down() {
    let good = Arc::new(RecordingMapper::new(16));
    let bad = Arc::new(RecordingMapper::new(16));
    bad.set_memory_pages(Some(0));
    let pools = vec![
        mapped(0, 16, reserve(2, 4), &good),
        mapped(1, 16, reserve(2, 4), &bad),
    ];
    let error = Scheduler::with_mappers(pools, run_pages(4), ON).unwrap_err();
    assert!(
        matches!(
            error,
            StartError::Blocks {
                pool: PoolId(1),
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(good.calls().runs_mapped, 1);
    assert_eq!(good.mapped(), [], "the null block's page was given back");
    assert_eq!(good.violations(), []);
}

#[test]
fn pools_need_numbers_of_their_own() {
    let mapper = Arc::new(RecordingMapper::new(16));
    assert!(matches!(
        Scheduler::with_mappers(Vec::new(), run_pages(4), ON),
        Err(StartError::NoPools)
    ));
    let twice = vec![
        mapped(2, 16, reserve(0, 0), &mapper),
        mapped(2, 16, reserve(0, 0), &mapper),
    ];
    assert!(matches!(
        Scheduler::with_mappers(twice, run_pages(4), ON),
        Err(StartError::PoolTwice { pool: PoolId(2) })
    ));
}

/// A thread that is full, or broken, rests; and one that can map again does.
#[test]
fn the_reserve_comes_back_when_memory_does() {
    let mapper = Arc::new(RecordingMapper::new(64));
    mapper.set_memory_pages(Some(3));
    let background = Background::On {
        every: Duration::from_millis(1),
    };
    let scheduler = start(64, reserve(8, 8), &mapper, background).unwrap();
    let pool = only(&scheduler);
    eventually(|| pool.usage().pages.warm == 2);
    mapper.set_memory_pages(None);
    eventually(|| pool.usage().pages.warm == 8);

    let broken = Cause::Diverged {
        stage: Stage(0),
        rank: Rank(1),
    };
    mapper.set_before(move |_, _| Err(MapError::clean(broken.clone())));
    let (calls, blocks) = (mapper.calls().map, pool.alloc(8 * PER_PAGE).unwrap());
    eventually(|| mapper.calls().map > calls + 3);
    mapper.set_before(|_, _| Ok(()));
    eventually(|| pool.usage().pages.warm == 8);
    pool.free(&blocks).unwrap();
    drop(scheduler);
    assert_eq!(mapper.violations(), []);
}

/// The thread asleep for an hour, and the thread amid a call: both end with their scheduler.
#[test]
fn dropping_a_scheduler_ends_its_thread() {
    let mapper = Arc::new(RecordingMapper::new(64));
    let scheduler = start(64, reserve(2, 2), &mapper, ON).unwrap();
    eventually(|| only(&scheduler).usage().pages.warm == 2);
    drop(scheduler);
    assert_eq!(mapper.mapped(), []);

    let (entered, inside) = mpsc::channel();
    let mapper = Arc::new(RecordingMapper::new(64));
    let scheduler = start(64, reserve(0, 4), &mapper, ON).unwrap();
    mapper.set_before(move |_, _| {
        // Nobody may listen any more by the time the pages are given back.
        let _ = entered.send(());
        Ok(())
    });
    let blocks = only(&scheduler).alloc(16 * PER_PAGE).unwrap();
    inside.recv().expect("the allocation mapped");
    only(&scheduler).free(&blocks).unwrap();
    inside
        .recv()
        .expect("the thread gives back what is beyond the reserve");
    drop(scheduler);
    assert_eq!(mapper.mapped(), []);
    assert_eq!(mapper.violations(), []);
}

/// While the thread is held up in the mapper, nobody else is.
#[test]
fn a_slow_reserve_holds_nobody_up() {
    let mapper = Arc::new(RecordingMapper::new(64));
    let (entered, inside) = mpsc::channel();
    let (let_go, held) = mpsc::channel::<()>();
    let held = std::sync::Mutex::new(held);
    let first = std::sync::atomic::AtomicBool::new(true);
    let scheduler = start(64, reserve(0, 2), &mapper, ON).unwrap();
    let pool = only(&scheduler);
    let blocks = pool.alloc(16 * PER_PAGE).unwrap();
    mapper.set_before(move |call, _| {
        if call == Call::Unmap && first.swap(false, std::sync::atomic::Ordering::Relaxed) {
            entered.send(()).unwrap();
            held.lock().unwrap().recv().unwrap();
        }
        Ok(())
    });
    pool.free(&blocks).unwrap();
    inside.recv().expect("the thread unmaps");
    assert!(pool.usage().pages.busy > 0);
    let more = pool.alloc(20 * PER_PAGE).expect("other pages are free");
    pool.free(&more[..PER_PAGE as usize]).unwrap();
    assert!(pool.available() > 0);
    let limit = Limit {
        bytes: pool.limit().bytes,
        revision: 1,
    };
    assert_eq!(pool.set_limit(limit), Ok(LimitStatus::Applied));
    let_go.send(()).unwrap();
}

#[test]
fn holds_belong_to_their_holder() {
    let mapper = Arc::new(RecordingMapper::new(16));
    let scheduler = start(16, reserve(0, 0), &mapper, Background::Off).unwrap();
    let pool = only(&scheduler);
    let hold = pool.hold(3).unwrap();
    assert_eq!(pool.held(hold), Some(3));
    assert_eq!(pool.alloc(1).unwrap(), [BlockId(4)]);
    assert_eq!(pool.take_held(hold, 2).unwrap(), [1, 2].map(BlockId));
    assert_eq!(pool.clear().unwrap(), 3, "what is held stays");
    assert_eq!(pool.release_hold(hold).unwrap(), 1);
    assert_eq!(pool.available(), 16 * PER_PAGE - 1);
    assert_eq!(pool.page_of(BlockId(7)).unwrap().0, 1);
    let occupancy = pool.occupancy();
    assert_eq!(occupancy.len(), 1);
    assert_eq!((occupancy[0].used, occupancy[0].total), (1, PER_PAGE));
}

#[derive(Debug, Clone)]
enum Step {
    Alloc(u32),
    Free(usize),
    Limit(u64),
    Trim,
    Replenish,
    Fail(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1u32..40).prop_map(Step::Alloc),
        3 => any::<usize>().prop_map(Step::Free),
        1 => (0u64..40).prop_map(Step::Limit),
        1 => Just(Step::Trim),
        1 => Just(Step::Replenish),
        1 => any::<bool>().prop_map(Step::Fail),
    ]
}

proptest! {
    /// What is mapped is what the pool believes is backed, and after a scheduler's life nothing
    /// is, through any faults that leave nothing in doubt.
    #[test]
    fn a_pool_and_its_mapper_agree(steps in prop::collection::vec(step(), 1..60)) {
        let mapper = Arc::new(RecordingMapper::new(32));
        let scheduler = start(32, reserve(2, 4), &mapper, Background::Off).unwrap();
        let pool = only(&scheduler);
        let bundle = pool.geometry().bundle_bytes();
        let (mut mine, mut revision) = (Vec::new(), 0);
        for step in steps {
            match step {
                Step::Alloc(n) => {
                    if let Ok(blocks) = pool.alloc(n) {
                        mine.push(blocks);
                    }
                }
                Step::Free(which) if !mine.is_empty() => {
                    let blocks = mine.swap_remove(which % mine.len());
                    prop_assert_eq!(pool.free(&blocks), Ok(()));
                }
                Step::Free(_) => {}
                Step::Limit(pages) => {
                    revision += 1;
                    pool.set_limit(Limit { bytes: pages * bundle, revision }).unwrap();
                }
                Step::Trim => {
                    let _ = pool.trim();
                }
                Step::Replenish => {
                    let _ = pool.replenish();
                }
                Step::Fail(map) => {
                    let call = if map { Call::Map } else { Call::Unmap };
                    let cause = Cause::Diverged { stage: Stage(0), rank: Rank(1) };
                    mapper.fail(call, 0, MapError::clean(cause));
                }
            }
            let usage = pool.usage();
            prop_assert_eq!(usage.pages.mapped_bytes, u64::from(mapper.mapped_pages()) * bundle);
            let taken: u32 = mine.iter().map(|blocks| u32::try_from(blocks.len()).unwrap()).sum();
            prop_assert_eq!(usage.blocks_used, taken);
        }
        mapper.clear_faults();
        drop(scheduler);
        prop_assert_eq!(mapper.mapped(), []);
        prop_assert_eq!(mapper.violations(), []);
    }
}
