//! What is done behind the callers: a reserve that follows the demand, memory that goes later, and
//! demands that go first.

use std::num::NonZeroU32;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use kvcached_mapper::testing::{Call, Calls};
use kvcached_mapper::{After, Epoch};
use kvcached_page_alloc::{
    Limit, LimitStatus, PageAllocatorConfig, Reserve, RunPolicy, Turns, Unmapping,
};
use proptest::prelude::*;

use crate::drive::{Drive, Op, Outcome, config, steps, steps_without_faults};
use crate::support::{BUNDLE, Pool};

/// Far beyond anything that happens here: a bound for the day it fails.
const BOUND: Duration = Duration::from_secs(20);

/// Ticks after which a pool with a reserve of up to so many pages has forgotten everything.
const fn forgotten(max: u32) -> u32 {
    17 + 32 - max.leading_zeros()
}

/// Steps until there is nothing to do; answers how many pages were mapped and unmapped.
fn replenish(pool: &Pool) -> (u32, u32) {
    let (mut mapped, mut unmapped) = (0, 0);
    let mut steps = 0;
    loop {
        let done = pool.pages.replenish().expect("no faults");
        mapped += done.mapped;
        unmapped += done.unmapped;
        if !done.more {
            return (mapped, unmapped);
        }
        steps += 1;
        assert!(steps < 10_000, "it comes to rest");
    }
}

fn map_calls(calls: Calls) -> (u64, u64) {
    (calls.map, calls.unmap)
}

/// A pool whose limit of `limit` pages came while all of its `pages` pages were in use.
fn beyond_its_limit(pages: u32, limit: u32, reserve: Reserve) -> Pool {
    let pool = Pool::with(PageAllocatorConfig {
        unmapping: Unmapping::Behind,
        reserve,
        runs: RunPolicy::up_to(NonZeroU32::MIN),
        ..PageAllocatorConfig::new(pages, BUNDLE)
    });
    let mine = pool.take(pages);
    pool.limit(limit, 1);
    pool.free(&mine);
    pool
}

#[test]
fn an_empty_pool_has_no_reserve_and_a_first_page_is_no_demand() {
    let pool = Pool::with_reserve(100, 0, 64);
    pool.pages.alloc_first().expect("it is cold");
    assert!(!pool.pages.is_due());
    assert_eq!(replenish(&pool), (0, 0));
    assert_eq!((pool.mapped(), pool.usage().reserve_target), (1, 0));
}

#[test]
fn a_reserve_grows_with_the_demand_at_once_and_goes_back_when_it_ends() {
    let pool = Pool::with_reserve(1000, 0, 64);
    let mut mine: Vec<_> = (0..10).flat_map(|_| pool.take(1)).collect();
    assert!(pool.pages.is_due());
    replenish(&pool);
    assert_eq!((pool.usage().warm, pool.usage().reserve_target), (10, 10));
    // So ten more cost no call, nor do the next.
    for _ in 0..5 {
        pool.pages.tick();
        let calls = pool.mapper.calls().map;
        mine.extend(pool.take(10));
        assert_eq!(pool.mapper.calls().map, calls);
        replenish(&pool);
    }
    for _ in 0..forgotten(64) {
        pool.pages.tick();
        replenish(&pool);
    }
    let usage = pool.usage();
    assert_eq!((usage.warm, usage.reserve_target), (0, 0));
    assert_eq!(pool.mapped(), 60);
    pool.assert_books_agree();
}

#[test]
fn trimming_ends_the_reserve_until_there_is_demand_again() {
    let pool = Pool::with_reserve(1000, 0, 64);
    let mine = pool.take(20);
    replenish(&pool);
    assert_eq!(pool.usage().warm, 20);
    assert_eq!(pool.pages.trim(), Ok(20));
    assert!(!pool.pages.is_due());
    assert_eq!(replenish(&pool), (0, 0));
    pool.take(3);
    replenish(&pool);
    assert_eq!(pool.usage().reserve_target, 3);
    pool.free(&mine);
}

#[test]
fn a_long_run_that_would_have_to_be_mapped_again_stays() {
    let pool = Pool::with_reserve(1000, 4, 64);
    let burst = pool.take(32);
    pool.free(&burst);
    for _ in 0..forgotten(64) {
        pool.pages.tick();
    }
    assert_eq!(pool.usage().reserve_target, 4);
    assert_eq!(
        replenish(&pool),
        (0, 0),
        "without the run there would be none"
    );
    assert_eq!(pool.usage().warm, 32);
}

#[test]
fn a_step_is_bounded_in_chunks_and_has_at_least_a_run() {
    let steps = |run_chunks| {
        let pool = Pool::with(PageAllocatorConfig {
            runs: RunPolicy::up_to(NonZeroU32::MIN),
            run_chunks: NonZeroU32::new(run_chunks).expect("some"),
            reserve: Reserve { min: 32, max: 32 },
            ..PageAllocatorConfig::new(100, BUNDLE)
        });
        replenish(&pool);
        let mapped = pool.mapper.calls().map;
        pool.pages.trim().expect("no faults");
        (mapped, pool.mapper.calls().unmap)
    };
    assert_eq!(steps(1), (2, 2));
    assert_eq!(steps(4), (8, 8));
    assert_eq!(steps(64), (32, 32));
}

#[test]
fn no_free_and_no_retiring_waits_for_memory_to_go() {
    let pool = beyond_its_limit(20, 5, Reserve { min: 0, max: 0 });
    assert_eq!(pool.mapper.calls().unmap, 0);
    assert_eq!(
        pool.pages.limit_status(),
        LimitStatus::Deferred {
            excess_bytes: 15 * BUNDLE
        }
    );
    // Nobody gets more than the limit allows meanwhile, and that much costs no call.
    assert_eq!(pool.pages.available(), 5);
    let calls = map_calls(pool.mapper.calls());
    let mine = pool.take(5);
    let after = After::epoch(Epoch(3));
    pool.pages.free_after(&mine, after).expect("pages in use");
    pool.pages.retire(Epoch(3));
    assert_eq!(map_calls(pool.mapper.calls()), calls);
    assert!(pool.pages.is_due());
    while pool.pages.keep_to_limit().expect("no faults").more {}
    assert!(!pool.pages.is_due(), "without a reserve, idle pages stay");
    assert_eq!(pool.pages.limit_status(), LimitStatus::Applied);
    assert_eq!((pool.mapped(), pool.usage().warm), (5, 5));
    pool.assert_books_agree();
}

#[test]
fn a_limit_that_comes_while_a_demand_maps_is_left_to_who_works_behind() {
    let pool = Pool::with(PageAllocatorConfig {
        unmapping: Unmapping::Behind,
        ..PageAllocatorConfig::new(20, BUNDLE)
    });
    let idle = pool.take(4);
    pool.free(&idle);
    pool.during_calls(|pages, call, _| {
        if call == Call::Map {
            let limit = Limit {
                bytes: 6 * BUNDLE,
                revision: 1,
            };
            // What is idle goes in this call, whose caller waits for just that.
            pages.set_limit(limit).expect("there is no floor");
        }
        Ok(())
    });
    let mine = pool.take(10);
    let unmaps = pool.mapper.calls().unmap;
    pool.free(&mine);
    assert_eq!(pool.mapper.calls().unmap, unmaps);
    while pool.pages.keep_to_limit().expect("no faults").more {}
    assert_eq!(pool.pages.limit_status(), LimitStatus::Applied);
    pool.assert_books_agree();
}

#[test]
fn an_operator_waits_for_what_was_asked_for() {
    let pool = beyond_its_limit(20, 5, Reserve { min: 2, max: 8 });
    let limit = pool.limit(3, 2);
    assert_eq!((pool.pages.limit(), pool.mapped()), (limit, 3));
    assert_eq!(pool.pages.trim(), Ok(3));
    assert_eq!(pool.mapped(), 0);
}

#[test]
fn what_answers_from_the_books_never_asks_the_mapper() {
    let pool = Pool::with_reserve(20, 2, 8);
    let mine = pool.take(5);
    let calls = pool.mapper.calls();
    pool.during_calls(|_, call, _| panic!("{call:?}"));
    assert_eq!(pool.pages.available(), 15);
    pool.usage();
    pool.pages.limit();
    pool.pages.limit_status();
    pool.pages.is_due();
    pool.pages.is_fenced();
    pool.pages.fenced();
    pool.pages.contents_lost();
    pool.pages.quarantined();
    pool.pages.state(mine[0]);
    pool.pages.tick();
    pool.free(&mine);
    assert_eq!(pool.take(5).len(), 5, "they are warm");
    assert_eq!(pool.mapper.calls(), calls);
}

/// The device does one call at a time, and the first that is made waits until the test lets it go.
struct Device {
    /// How many runs each call is about that comes to the device.
    comes: Receiver<usize>,
    go: Sender<()>,
    /// The same in the order in which they had it.
    log: Arc<Mutex<Vec<usize>>>,
}

fn one_at_a_time(pools: &[&Pool]) -> Device {
    let ((came, comes), (go, hold)) = (channel(), channel());
    let (log, hold): (Arc<Mutex<Vec<usize>>>, _) = (Arc::default(), Arc::new(Mutex::new(hold)));
    for pool in pools {
        let (came, log, hold) = (came.clone(), Arc::clone(&log), Arc::clone(&hold));
        pool.during_calls(move |_, _, runs| {
            came.send(runs.len()).expect("the test is there");
            let mut log = log.lock().expect("no test panicked");
            if log.is_empty() {
                let hold: MutexGuard<'_, Receiver<()>> = hold.lock().expect("one at a time");
                hold.recv_timeout(BOUND).expect("the test lets it go");
            }
            log.push(runs.len());
            Ok(())
        });
    }
    Device { comes, go, log }
}

/// A demand for one page of another pool comes amid the first of three steps of `work`.
fn a_demand_goes_before_the_second_step(reserve: Reserve, idle: u32, work: fn(&Pool, &Turns)) {
    let turns = Turns::shared();
    let [pool, other] = [reserve, Reserve::default()].map(|reserve| {
        Pool::with(PageAllocatorConfig {
            runs: RunPolicy::up_to(NonZeroU32::MIN),
            reserve,
            turns: turns.clone(),
            ..PageAllocatorConfig::new(200, BUNDLE)
        })
    });
    let mine = pool.take(idle);
    pool.free(&mine);
    let device = one_at_a_time(&[&pool, &other]);
    thread::scope(|scope| {
        scope.spawn(|| work(&pool, &turns));
        assert_eq!(device.comes.recv_timeout(BOUND), Ok(16));
        let demand = scope.spawn(|| other.take(1));
        assert_eq!(device.comes.recv_timeout(BOUND), Ok(1));
        device.go.send(()).expect("the step is held");
        demand.join().expect("it does not panic");
    });
    let log = device.log.lock().expect("no test panicked").clone();
    assert_eq!(log, [16, 1, 16, 16]);
}

#[test]
fn a_demand_goes_before_the_next_step_behind_it() {
    let reserve = Reserve { min: 48, max: 48 };
    a_demand_goes_before_the_second_step(reserve, 0, |pool, turns| {
        loop {
            turns.give_way();
            if !pool.pages.replenish().expect("no faults").more {
                break;
            }
        }
    });
}

#[test]
fn a_demand_goes_before_the_next_step_of_an_operator() {
    let none = Reserve::default();
    a_demand_goes_before_the_second_step(none, 48, |pool, _| {
        assert_eq!(pool.pages.trim(), Ok(48));
    });
    a_demand_goes_before_the_second_step(none, 48, |pool, _| {
        pool.limit(0, 1);
        assert_eq!(pool.mapped(), 0);
    });
}

#[test]
fn a_limit_and_a_trim_of_one_pool_do_not_wait_for_a_demand_of_another_that_hangs() {
    let turns = Turns::shared();
    let [pool, other] = [(), ()].map(|()| {
        Pool::with(PageAllocatorConfig {
            runs: RunPolicy::up_to(NonZeroU32::MIN),
            turns: turns.clone(),
            ..PageAllocatorConfig::new(200, BUNDLE)
        })
    });
    let mine = pool.take(100);
    pool.free(&mine);
    let device = one_at_a_time(&[&other]);
    thread::scope(|scope| {
        let demand = scope.spawn(|| other.take(1));
        assert_eq!(device.comes.recv_timeout(BOUND), Ok(1));
        pool.limit(50, 1);
        assert_eq!(pool.mapped(), 50);
        assert_eq!(pool.pages.trim(), Ok(50));
        device.go.send(()).expect("the demand is held");
        demand.join().expect("it does not panic");
    });
}

#[test]
fn whoever_gives_way_waits_for_nobody_if_nobody_waits() {
    let turns = Turns::shared();
    turns.give_way();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the lengths of runs.
    #[test]
    fn a_constant_demand_ends_in_no_call_of_the_mapper(
        max in 3u32..100,
        part in 1u32..100,
        max_run in 1u32..=64,
        one_by_one in any::<bool>(),
    ) {
        let demand = (2 * max / 3 * part / 100).max(1);
        let pool = Pool::with(PageAllocatorConfig {
            runs: RunPolicy::up_to(NonZeroU32::new(max_run).expect("at least one")),
            reserve: Reserve { min: 0, max },
            ..PageAllocatorConfig::new(1000, BUNDLE)
        });
        let mut calls = None;
        for turn in 0..40 {
            let mine: Vec<_> = match one_by_one {
                true => (0..demand).flat_map(|_| pool.take(1)).collect(),
                false => pool.take(demand),
            };
            replenish(&pool);
            pool.free(&mine);
            replenish(&pool);
            pool.pages.tick();
            replenish(&pool);
            if turn == 20 {
                calls = Some(map_calls(pool.mapper.calls()));
            }
        }
        prop_assert_eq!(Some(map_calls(pool.mapper.calls())), calls);
        prop_assert!(pool.usage().warm <= max);
        pool.assert_books_agree();
    }

    #[test]
    fn a_pool_is_due_exactly_when_a_step_finds_something(
        config in config(), steps in steps_without_faults(),
    ) {
        let keeps_reserve = config.reserve.max > 0;
        let mut drive = Drive::new(config);
        for step in &steps {
            let due = drive.pool.pages.is_due();
            let seen = drive.step(step);
            if let Outcome::Replenish(Ok(done)) = seen.outcome
                && keeps_reserve && !step.in_flight
            {
                prop_assert_eq!(due, done.mapped + done.unmapped > 0, "{:?}", done);
                prop_assert!(!done.more || drive.pool.pages.is_due());
            }
        }
    }

    #[test]
    fn only_replenish_asks_what_memory_is_left_and_who_was_told_that_it_is_full(
        config in config(), steps in steps(),
    ) {
        let mut drive = Drive::new(config);
        for step in &steps {
            let before = drive.pool.mapper.calls().headroom;
            let seen = drive.step(step);
            let asked = drive.pool.mapper.calls().headroom - before;
            let may_ask = match step.op {
                Op::Replenish => true,
                Op::Alloc(_) => seen.after.map_full_total > seen.before.map_full_total,
                _ => false,
            };
            prop_assert!(asked <= u64::from(may_ask));
        }
    }
}
