//! Limits: what is applied, what waits, and what an old message may not undo.

use kvcached_mapper::testing::Call;
use kvcached_page_alloc::{
    AllocError, FullReason, Limit, LimitError, LimitStatus, PageAllocatorConfig,
};

use crate::support::{BUNDLE, Pool, doubtful, ids, refused, run};

fn set(pool: &Pool, pages: u64, revision: u64) -> LimitStatus {
    let limit = Limit {
        bytes: pages * BUNDLE,
        revision,
    };
    pool.pages.set_limit(limit).expect("not below a floor")
}

fn deferred(pages: u64) -> LimitStatus {
    LimitStatus::Deferred {
        excess_bytes: pages * BUNDLE,
    }
}

#[test]
fn restoring_the_limit_of_the_start_restores_the_capacity() {
    // 1536 MiB, 240 MiB, 1536 MiB.
    let pool = Pool::new(768);
    assert_eq!(set(&pool, 120, 1), LimitStatus::Applied);
    assert_eq!((pool.pages.available(), pool.usage().withheld), (120, 648));
    assert_eq!(set(&pool, 768, 2), LimitStatus::Applied);
    assert_eq!((pool.pages.available(), pool.usage().withheld), (768, 0));
    assert_eq!(pool.take(768).len(), 768);
}

#[test]
fn a_limit_in_use_is_deferred_until_enough_is_freed() {
    let pool = Pool::new(10);
    let pages: Vec<_> = (0..10).flat_map(|_| pool.take(1)).collect();
    assert_eq!(set(&pool, 4, 1), deferred(6));
    // Some are freed, but not enough: still deferred, and what was freed is gone already.
    pool.free(&pages[..3]);
    assert_eq!(pool.pages.limit_status(), deferred(3));
    assert_eq!(pool.mapped(), 7);
    assert_eq!(pool.alloc(1), Err(AllocError::Full(FullReason::Limit)));
    // Another limit in between is measured against what is backed, not against the one before.
    assert_eq!(set(&pool, 6, 2), deferred(1));
    assert_eq!(set(&pool, 5, 3), deferred(2));
    pool.free(&pages[3..5]);
    assert_eq!(pool.pages.limit_status(), LimitStatus::Applied);
    assert_eq!(pool.mapped(), 5);
    assert_eq!(pool.pages.available(), 0);
    pool.free(&pages[5..6]);
    assert_eq!(
        pool.pages.available(),
        1,
        "at the limit, freed memory stays warm"
    );
    assert_eq!(pool.usage().warm, 1);
    pool.assert_books_agree();
}

#[test]
fn lifting_a_deferred_limit_ends_the_shrink() {
    let pool = Pool::new(10);
    let pages = pool.take(8);
    assert_eq!(set(&pool, 2, 1), deferred(6));
    assert_eq!(set(&pool, 10, 2), LimitStatus::Applied);
    pool.free(&pages);
    assert_eq!(
        (pool.usage().warm, pool.mapped()),
        (8, 8),
        "nothing is unmapped any more"
    );
}

#[test]
fn a_limit_of_zero_lets_nothing_grow_and_takes_nothing_away() {
    let pool = Pool::new(10);
    let pages = pool.take(4);
    let idle = pool.take(3);
    pool.free(&idle);
    assert_eq!(set(&pool, 0, 1), deferred(4));
    assert_eq!((pool.mapped(), pool.usage().used), (4, 4));
    assert_eq!(pool.pages.available(), 0);
    assert_eq!(pool.alloc(1), Err(AllocError::Full(FullReason::Limit)));
    pool.free(&pages);
    assert_eq!(pool.pages.limit_status(), LimitStatus::Applied);
    assert_eq!(pool.usage().mapped_bytes, 0);
    assert_eq!(pool.alloc(1), Err(AllocError::Full(FullReason::Limit)));
    assert_eq!(set(&pool, 10, 2), LimitStatus::Applied);
    assert_eq!(pool.take(10).len(), 10);
}

#[test]
fn idle_pages_of_partly_used_runs_do_not_feed_a_deferred_shrink() {
    let pool = Pool::new(16);
    let pages = pool.take(16);
    pool.free(&pages[..8]);
    // One run of 16 pages, half of it idle: its memory cannot go yet.
    assert_eq!(set(&pool, 6, 1), deferred(10));
    assert_eq!(
        pool.pages.available(),
        0,
        "eight are in use, more than the limit"
    );
    pool.free(&pages[8..12]);
    assert_eq!(
        pool.pages.available(),
        2,
        "up to the limit what is warm may be used"
    );
    assert_eq!(pool.take(2).len(), 2);
    assert_eq!(pool.alloc(1), Err(AllocError::Full(FullReason::Limit)));
    assert_eq!(pool.pages.limit_status(), deferred(10));
}

#[test]
fn a_reserve_does_not_stand_in_the_way_of_a_limit() {
    let pool = Pool::with_reserve(20, 4, 8);
    let one = pool.take(1);
    assert_eq!(pool.pages.replenish().expect("no faults").mapped, 4);
    assert_eq!(
        set(&pool, 1, 1),
        LimitStatus::Applied,
        "the warm pages went"
    );
    assert_eq!((pool.usage().warm, pool.usage().used), (0, 1));
    let after = pool.pages.replenish().expect("no faults");
    assert_eq!((after.mapped, after.full), (0, Some(FullReason::Limit)));
    pool.free(&one);
    assert_eq!(pool.pages.limit_status(), LimitStatus::Applied);
}

#[test]
fn limits_work_without_a_reserve() {
    let pool = Pool::with_reserve(8, 0, 0);
    let pages = pool.take(8);
    assert_eq!(set(&pool, 2, 1), deferred(6));
    pool.free(&pages);
    assert_eq!(
        (pool.pages.limit_status(), pool.mapped()),
        (LimitStatus::Applied, 0)
    );
    assert_eq!(pool.pages.available(), 2);
}

#[test]
fn old_and_contradicting_limits_change_nothing() {
    let pool = Pool::new(10);
    let pages = pool.take(8);
    let current = Limit {
        bytes: 6 * BUNDLE,
        revision: 7,
    };
    assert_eq!(set(&pool, 6, 7), deferred(2));
    let before = pool.usage();
    assert_eq!(set(&pool, 10, 6), LimitStatus::Stale { current });
    assert_eq!(set(&pool, 10, 7), LimitStatus::Conflict { current });
    assert_eq!((pool.usage(), pool.pages.limit()), (before, current));
    // The same again is answered with how things stand by now.
    assert_eq!(set(&pool, 6, 7), deferred(2));
    pool.free(&pages);
    assert_eq!(set(&pool, 6, 7), LimitStatus::Applied);
    assert_eq!(pool.pages.limit(), current);
}

#[test]
fn a_limit_never_drops_below_the_promised_floor() {
    let config = PageAllocatorConfig {
        floor_bytes: 3 * BUNDLE,
        ..PageAllocatorConfig::new(10, BUNDLE)
    };
    let pool = Pool::with(config);
    let below = Limit {
        bytes: 3 * BUNDLE - 1,
        revision: 1,
    };
    assert_eq!(
        pool.pages.set_limit(below),
        Err(LimitError::BelowFloor {
            requested_bytes: 3 * BUNDLE - 1,
            floor_bytes: 3 * BUNDLE
        })
    );
    assert_eq!(
        (pool.pages.available(), pool.pages.limit().revision),
        (10, 0)
    );
    assert_eq!(set(&pool, 3, 1), LimitStatus::Applied);
    assert_eq!(pool.take(3).len(), 3);
}

#[test]
fn a_limit_beyond_the_capacity_is_as_good_as_the_capacity() {
    let pool = Pool::new(10);
    let limit = Limit {
        bytes: u64::MAX,
        revision: 1,
    };
    assert_eq!(pool.pages.set_limit(limit), Ok(LimitStatus::Applied));
    assert_eq!((pool.pages.available(), pool.usage().limit), (10, limit));
    assert_eq!(pool.alloc(11), Err(AllocError::Full(FullReason::Capacity)));
}

#[test]
fn a_part_of_a_page_is_no_page() {
    let pool = Pool::new(10);
    let limit = Limit {
        bytes: 3 * BUNDLE + BUNDLE / 2,
        revision: 1,
    };
    pool.pages.set_limit(limit).expect("there is no floor");
    assert_eq!(pool.pages.available(), 3);
    let pages = pool.take(3);
    let less = Limit {
        bytes: 2 * BUNDLE + 1,
        revision: 2,
    };
    let excess_bytes = BUNDLE - 1;
    assert_eq!(
        pool.pages.set_limit(less),
        Ok(LimitStatus::Deferred { excess_bytes })
    );
    pool.free(&pages);
    assert_eq!(pool.pages.limit_status(), LimitStatus::Applied);
}

#[test]
fn a_shrink_that_failed_is_deferred_and_tried_again_at_the_next_free() {
    let pool = Pool::new(10);
    let (idle, kept) = (pool.take(4), pool.take(4));
    pool.free(&idle);
    pool.mapper.fail(Call::Unmap, 0, refused());
    assert_eq!(
        set(&pool, 2, 1),
        deferred(6),
        "the failure is not reported as applied"
    );
    assert_eq!(pool.usage().unmap_failed_total, 1);
    assert_eq!(
        pool.pages.available(),
        0,
        "idle or not, it is above the limit"
    );
    pool.free(&kept);
    assert_eq!(
        (pool.pages.limit_status(), pool.mapped()),
        (LimitStatus::Applied, 0)
    );
    pool.assert_books_agree();
}

#[test]
fn replenishing_also_tries_again() {
    let pool = Pool::new(10);
    let idle = pool.take(4);
    pool.free(&idle);
    pool.mapper.fail(Call::Unmap, 0, refused());
    assert_eq!(set(&pool, 0, 1), deferred(4));
    assert_eq!(pool.pages.replenish().expect("no more faults").unmapped, 4);
    assert_eq!(pool.pages.limit_status(), LimitStatus::Applied);
}

#[test]
fn quarantined_pages_count_as_backed() {
    let pool = Pool::new(10);
    pool.mapper.fail(Call::Map, 0, doubtful(vec![run(0, 4)]));
    assert!(pool.alloc(4).is_err());
    assert_eq!(
        set(&pool, 3, 1),
        deferred(1),
        "nobody can say that they hold no memory"
    );
    assert_eq!(set(&pool, 5, 2), LimitStatus::Applied);
    assert_eq!(pool.take(1), ids([4]));
    assert_eq!(pool.alloc(1), Err(AllocError::Full(FullReason::Limit)));
}

#[test]
fn as_little_as_possible_is_unmapped_beyond_the_limit() {
    let pool = Pool::new(100);
    let runs = [64, 16, 4, 3].map(|n| pool.take(n));
    pool.free(&runs.concat());
    assert_eq!(set(&pool, 80, 1), LimitStatus::Applied);
    // Seven pages have to go: the runs of 4 and of 3.
    assert_eq!(pool.mapper.mapped(), [run(0, 64), run(64, 16)]);
    assert_eq!(set(&pool, 79, 2), LimitStatus::Applied);
    assert_eq!(pool.mapper.mapped(), [run(0, 64)]);
}
