//! How long runs are when memory is short: under a limit, and on a device that was full.

use std::num::NonZeroU32;

use kvcached_mapper::testing::Call;
use kvcached_mapper::{PageId, PageRun};
use kvcached_page_alloc::{
    AllocError, FullReason, MAX_RUN, PageAllocatorConfig, Reserve, RunPolicy,
};

use crate::support::{BUNDLE, Pool, full, refused};

const FULL: Result<Vec<PageId>, AllocError> = Err(AllocError::Full(FullReason::DeviceMemory));

/// A pool of runs of up to 16 pages, which takes `calm` pages to forget that the device was full.
fn pool(calm: u32) -> Pool {
    let sixteen = NonZeroU32::new(16).expect("sixteen");
    Pool::with(PageAllocatorConfig {
        runs: RunPolicy {
            share_when_short: sixteen,
            calm,
            ..RunPolicy::up_to(sixteen)
        },
        ..PageAllocatorConfig::new(400, BUNDLE)
    })
}

/// From now on the device has no piece of more than one page.
fn break_into_pieces(pool: &Pool) {
    pool.during_calls(|_, call, runs| {
        let long = runs.iter().any(|run| run.count() > 1);
        match call == Call::Map && long {
            true => Err(full()),
            false => Ok(()),
        }
    });
}

fn longest(runs: &[PageRun]) -> u32 {
    runs.iter().map(|run| run.count()).max().unwrap_or(0)
}

#[test]
fn a_nearly_full_device_still_serves_a_demand_in_single_pages() {
    let pool = pool(0);
    break_into_pieces(&pool);
    pool.mapper.set_memory_pages(Some(31));
    let mine = pool.take(31);
    assert_eq!(mine.len(), 31);
    assert_eq!(longest(&pool.mapper.mapped()), 1);
    let usage = pool.usage();
    assert_eq!(
        (usage.used, usage.runs, usage.runs_mapped_total),
        (31, 31, 31)
    );
    assert_eq!(usage.map_full_total, 1, "the first attempt counts");
    pool.assert_books_agree();
}

#[test]
fn a_second_attempt_is_in_runs_as_while_memory_is_short_and_in_halves_at_least() {
    let pool = pool(0);
    pool.mapper.set_memory_pages(Some(400));
    pool.mapper.fail(Call::Map, 0, full());
    pool.take(64);
    assert_eq!(longest(&pool.mapper.mapped()), 4);
    let pool = Pool::new(400);
    pool.mapper.set_memory_pages(Some(400));
    pool.mapper.fail(Call::Map, 0, full());
    pool.take(64);
    assert_eq!(longest(&pool.mapper.mapped()), 32);
}

#[test]
fn there_is_no_second_attempt_of_more_than_1024_chunks() {
    let calls = |pages| {
        let sixteen = NonZeroU32::new(16).expect("sixteen");
        let pool = Pool::with(PageAllocatorConfig {
            runs: RunPolicy {
                share_when_short: NonZeroU32::new(400).expect("all"),
                ..RunPolicy::up_to(sixteen)
            },
            run_chunks: NonZeroU32::new(64).expect("some"),
            ..PageAllocatorConfig::new(400, BUNDLE)
        });
        pool.mapper.set_memory_pages(Some(400));
        pool.mapper.fail(Call::Map, 0, full());
        let result = pool.alloc(pages).map(|pages| pages.len());
        (result.is_ok(), pool.mapper.calls().headroom)
    };
    assert_eq!(calls(16), (true, 1));
    assert_eq!(calls(17), (false, 0), "nor a question");
}

#[test]
fn a_device_without_room_is_not_asked_a_second_time() {
    let pool = pool(0);
    pool.mapper.set_memory_pages(Some(30));
    let warm = pool.take(4);
    pool.free(&warm);
    assert_eq!(pool.alloc(40), FULL);
    let usage = pool.usage();
    assert_eq!((usage.map_full_total, usage.used, usage.warm), (1, 0, 4));
    pool.assert_books_agree();
}

#[test]
fn a_second_attempt_that_fails_changes_nothing_either() {
    let pool = pool(0);
    let warm = pool.take(4);
    pool.free(&warm);
    pool.mapper.set_memory_pages(Some(400));
    pool.mapper.fail(Call::Map, 0, full());
    pool.mapper.fail(Call::Map, 1, full());
    assert_eq!(pool.alloc(40), FULL);
    pool.mapper.clear_faults();
    pool.mapper.fail(Call::Map, 0, full());
    pool.mapper.fail(Call::Map, 1, refused());
    assert_eq!(pool.alloc(40), Err(AllocError::Broken(refused())));
    let usage = pool.usage();
    assert_eq!((usage.map_full_total, usage.map_failed_total), (3, 1));
    assert_eq!((usage.used, usage.warm, usage.quarantined), (0, 4, 0));
    pool.assert_books_agree();
}

#[test]
fn once_the_device_was_full_runs_are_single_pages_until_enough_has_been_mapped() {
    let pool = pool(50);
    pool.take(16);
    assert_eq!(longest(&pool.mapper.mapped()), 16);
    pool.mapper.set_memory_pages(Some(100));
    assert_eq!(pool.alloc(200), FULL);
    let mapped = |n| {
        let before = pool.mapper.calls().runs_mapped;
        pool.take(n);
        pool.mapper.calls().runs_mapped - before
    };
    assert_eq!((mapped(20), mapped(29)), (20, 29));
    assert_eq!(mapped(16), 16, "one page of fifty was missing still");
    assert_eq!(mapped(16), 1, "pressure has ended");
    pool.assert_books_agree();
}

#[test]
fn pressure_begins_anew_whenever_the_device_is_full_again() {
    let pool = pool(50);
    for _ in 0..2 {
        pool.mapper.fail(Call::Map, 0, full());
        assert_eq!(pool.alloc(1), FULL);
        pool.take(49);
    }
    let before = pool.mapper.calls().runs_mapped;
    pool.take(16);
    assert_eq!(pool.mapper.calls().runs_mapped, before + 16);
}

#[test]
fn a_reserve_that_the_device_has_no_room_for_is_pressure_too() {
    let sixteen = NonZeroU32::new(16).expect("sixteen");
    let pool = Pool::with(PageAllocatorConfig {
        runs: RunPolicy {
            share_when_short: sixteen,
            calm: 1000,
            ..RunPolicy::up_to(sixteen)
        },
        reserve: Reserve { min: 32, max: 64 },
        ..PageAllocatorConfig::new(400, BUNDLE)
    });
    pool.mapper.set_memory_pages(Some(20));
    let done = pool.pages.replenish().expect("no faults");
    assert_eq!(done.full, Some(FullReason::DeviceMemory));
    assert_eq!(longest(&pool.mapper.mapped()), 1);
}

#[test]
fn a_run_takes_an_eighth_of_the_room_that_a_limit_leaves_at_most() {
    let pool = Pool::new(400);
    pool.limit(160, 1);
    pool.take(80);
    assert_eq!(longest(&pool.mapper.mapped()), 20);
    pool.take(40);
    pool.take(40);
    let counts = pool.mapper.mapped().into_iter().map(|run| run.count());
    let expected = [(20, 4), (10, 4), (5, 8)];
    let expected = expected
        .into_iter()
        .flat_map(|(count, times)| std::iter::repeat_n(count, times));
    assert!(counts.eq(expected), "{:?}", pool.mapper.mapped());
    pool.limit(400, 2);
    pool.take(200);
    assert_eq!(
        longest(&pool.mapper.mapped()),
        MAX_RUN,
        "no limit, no bound"
    );
}
