//! What the thread does behind the callers, and what it leaves to go first.

use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, ThreadId};

use kvcached_manager::LimitStatus;
use kvcached_mapper::testing::{Call, RecordingMapper};
use kvcached_mapper::{Cause, MapError, Rank, Stage};

use super::tests::{ON, PER_PAGE, mapped, only, reserve, run_pages, start};
use super::*;
use crate::testing::eventually;

/// Far beyond anything that happens here: a bound for the day it fails.
const BOUND: Duration = Duration::from_secs(20);

#[test]
fn no_free_waits_for_memory_to_go_above_a_limit() {
    let mapper = Arc::new(RecordingMapper::new(64));
    let scheduler = start(64, reserve(0, 0), &mapper, ON).unwrap();
    let pool = only(&scheduler);
    let blocks = pool.alloc(20 * PER_PAGE).unwrap();
    let limit = Limit {
        bytes: 5 * pool.geometry().bundle_bytes(),
        revision: 1,
    };
    assert!(matches!(
        pool.set_limit(limit),
        Ok(LimitStatus::Deferred { .. })
    ));
    let callers: Arc<Mutex<Vec<(Call, ThreadId)>>> = Arc::default();
    let seen = Arc::clone(&callers);
    mapper.set_before(move |call, _| {
        seen.lock().unwrap().push((call, thread::current().id()));
        Ok(())
    });
    pool.free(&blocks).unwrap();
    eventually(|| pool.limit_status() == LimitStatus::Applied);
    let me = thread::current().id();
    let callers = callers.lock().unwrap().clone();
    assert!(!callers.is_empty());
    assert!(
        callers
            .iter()
            .all(|&(call, thread)| call == Call::Unmap && thread != me),
        "{callers:?}"
    );
    // Without a reserve, what is within the limit stays.
    assert_eq!(mapper.mapped_pages(), 5);
    drop(scheduler);
    assert_eq!(mapper.violations(), []);
}

#[test]
fn an_engine_that_stands_idle_gives_its_reserve_back() {
    let mapper = Arc::new(RecordingMapper::new(64));
    let background = Background::On {
        every: Duration::from_millis(1),
    };
    let scheduler = start(64, reserve(0, 16), &mapper, background).unwrap();
    let pool = only(&scheduler);
    assert_eq!(mapper.mapped_pages(), 1, "the null block's page");
    let blocks = pool.alloc(8 * PER_PAGE).unwrap();
    eventually(|| pool.usage().pages.mapped_total > 10);
    let idle = || {
        let pages = pool.usage().pages;
        (pages.warm, pages.reserve_target) == (0, 0)
    };
    eventually(idle);
    pool.free(&blocks).unwrap();
    eventually(idle);
    assert_eq!(mapper.mapped_pages(), 1);
}

#[test]
fn a_demand_of_one_pool_goes_before_the_next_step_for_another() {
    let (came, comes) = mpsc::channel();
    let (go, hold) = mpsc::channel::<()>();
    let hold: Arc<Mutex<Receiver<()>>> = Arc::new(Mutex::new(hold));
    // The device does one call at a time; who comes says so first.
    let device: Arc<Mutex<Vec<(u16, usize)>>> = Arc::default();
    let mappers = [0_u16, 1].map(|id| {
        let mapper = Arc::new(RecordingMapper::new(64));
        let (came, device, hold) = (came.clone(), Arc::clone(&device), Arc::clone(&hold));
        mapper.set_before(move |call, runs| {
            if call == Call::Unmap {
                return Ok(());
            }
            let who = (id, runs.len());
            // Nobody may listen any more.
            let _ = came.send(who);
            let mut log = device.lock().unwrap();
            if runs.len() > 1 && log.iter().all(|&(_, runs)| runs == 1) {
                hold.lock().unwrap().recv_timeout(BOUND).unwrap();
            }
            log.push(who);
            Ok(())
        });
        mapper
    });
    // Four extents a page: a step of 16 chunks has 4 runs.
    let pools = vec![
        mapped(0, 64, reserve(12, 12), &mappers[0]),
        mapped(1, 64, reserve(0, 0), &mappers[1]),
    ];
    let scheduler = Scheduler::with_mappers(pools, run_pages(1), ON).unwrap();
    let next = || comes.recv_timeout(BOUND).unwrap();
    assert_eq!([next(), next(), next()], [(0, 1), (1, 1), (0, 4)]);
    thread::scope(|scope| {
        let other = scheduler.pool(PoolId(1)).unwrap();
        let demand = scope.spawn(|| other.alloc(PER_PAGE).unwrap());
        assert_eq!(next(), (1, 1));
        go.send(()).unwrap();
        demand.join().unwrap();
    });
    eventually(|| scheduler.pools()[0].usage().pages.warm == 12);
    let log = device.lock().unwrap().clone();
    assert_eq!(log[2..], [(0, 4), (1, 1), (0, 4), (0, 4)]);
}

#[test]
fn a_pool_without_memory_keeps_no_other_from_its_reserve() {
    let full = Arc::new(RecordingMapper::new(64));
    full.set_memory_pages(Some(1));
    let well = Arc::new(RecordingMapper::new(64));
    let pools = vec![
        mapped(0, 64, reserve(8, 8), &full),
        mapped(1, 64, reserve(4, 4), &well),
    ];
    let scheduler = Scheduler::with_mappers(pools, run_pages(4), ON).unwrap();
    let pool = scheduler.pool(PoolId(1)).unwrap();
    for _ in 0..10 {
        eventually(|| pool.usage().pages.warm >= 4);
        let blocks = pool.alloc(4 * PER_PAGE).unwrap();
        eventually(|| pool.usage().pages.warm >= 4);
        pool.free(&blocks).unwrap();
    }
    assert_eq!(full.mapped_pages(), 1);
}

/// Above a limit, too, memory goes although a look at the pool would come in an hour, and the pool
/// rests since its reserve found the device full.
#[test]
fn a_full_device_keeps_no_pool_from_its_limit() {
    let mapper = Arc::new(RecordingMapper::new(64));
    let scheduler = start(64, reserve(8, 8), &mapper, ON).unwrap();
    let pool = only(&scheduler);
    eventually(|| pool.usage().pages.warm == 8);
    mapper.set_memory_pages(Some(20));
    let blocks = pool.alloc(16 * PER_PAGE).unwrap();
    eventually(|| mapper.calls().headroom > 1 && pool.usage().pages.warm == 3);
    let limit = Limit {
        bytes: 10 * pool.geometry().bundle_bytes(),
        revision: 1,
    };
    assert!(matches!(
        pool.set_limit(limit),
        Ok(LimitStatus::Deferred { .. })
    ));
    pool.free(&blocks).unwrap();
    eventually(|| pool.limit_status() == LimitStatus::Applied);
    assert_eq!(mapper.violations(), []);
}

#[test]
fn a_pool_with_much_to_do_does_not_keep_the_thread_from_another_that_is_lost() {
    let busy = Arc::new(RecordingMapper::new(512));
    let lost = Arc::new(RecordingMapper::new(64));
    let (came, comes) = mpsc::channel();
    let (go, hold) = mpsc::channel::<()>();
    let hold = Mutex::new(hold);
    // How often the other pool had been repaired by each step of the one with much to do.
    let repaired: Arc<Mutex<Vec<u64>>> = Arc::default();
    let (seen, other) = (Arc::clone(&repaired), Arc::clone(&lost));
    busy.set_before(move |call, runs| {
        if call == Call::Map && runs.len() > 1 {
            let mut seen = seen.lock().unwrap();
            if seen.is_empty() {
                came.send(()).unwrap();
                hold.lock().unwrap().recv_timeout(BOUND).unwrap();
            }
            seen.push(other.calls().reconcile);
        }
        Ok(())
    });
    // Four extents a page: a step of 16 chunks has 4 runs.
    let pools = vec![
        mapped(0, 512, reserve(400, 400), &busy),
        mapped(1, 64, reserve(0, 0), &lost),
    ];
    let scheduler = Scheduler::with_mappers(pools, run_pages(1), ON).unwrap();
    comes.recv_timeout(BOUND).unwrap();
    let broken = Cause::Diverged {
        stage: Stage(0),
        rank: Rank(1),
    };
    lost.fail(Call::Map, 0, MapError::clean(broken));
    assert!(scheduler.pools()[1].alloc(4 * PER_PAGE).is_err());
    go.send(()).unwrap();
    eventually(|| scheduler.pools()[0].usage().pages.warm == 400);
    let repaired = repaired.lock().unwrap().clone();
    assert_eq!(repaired.len(), 100);
    assert!(repaired[2] > repaired[0], "{repaired:?}");
}

/// Nobody looks at the pools for an hour unless the refusal wakes the thread.
#[test]
fn a_demand_gets_the_memory_that_another_pool_only_keeps_ready() {
    let mappers = [0, 1].map(|_| Arc::new(RecordingMapper::new(102)));
    for (mapper, other) in [(0, 1), (1, 0)] {
        let other = Arc::clone(&mappers[other]);
        let own = Arc::downgrade(&mappers[mapper]);
        mappers[mapper].set_before(move |call, runs| {
            let wanted: u32 = runs.iter().map(|run| run.count()).sum();
            let mapped = other.mapped_pages() + own.upgrade().unwrap().mapped_pages();
            match call == Call::Map && mapped + wanted > 102 {
                true => Err(MapError::clean(Cause::OutOfMemory { at: None })),
                false => Ok(()),
            }
        });
    }
    let reserves = [(0, reserve(0, 100)), (1, reserve(0, 0))];
    let pools = reserves.map(|(id, kept)| mapped(id, 102, kept, &mappers[usize::from(id)]));
    let scheduler = Scheduler::with_mappers(pools.into(), run_pages(1), ON).unwrap();
    let [one, other] = [0, 1].map(|id| scheduler.pool(PoolId(id)).unwrap());
    let blocks = one.alloc(40 * PER_PAGE).unwrap();
    eventually(|| one.usage().pages.warm == 20);
    one.free(&blocks).unwrap();
    assert_eq!(
        (one.usage().pages.warm, mappers[0].mapped_pages()),
        (60, 61)
    );
    assert!(other.alloc(60 * PER_PAGE).is_err(), "it is warm");
    eventually(|| mappers[0].mapped_pages() <= 41);
    other.alloc(60 * PER_PAGE).unwrap();
}
