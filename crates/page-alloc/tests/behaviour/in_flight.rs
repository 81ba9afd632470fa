//! Memory that something launched may still touch: it goes last, and after that has ended.

use kvcached_mapper::testing::Call;
use kvcached_mapper::{After, Epoch, PageId};
use kvcached_page_alloc::{Limit, LimitStatus, PageAllocatorConfig, Reserve};
use proptest::prelude::*;

use crate::support::{BUNDLE, Pool, doubtful, run};

const fn epoch(number: u64) -> After {
    After::epoch(Epoch(number))
}

fn free_in(pool: &Pool, pages: &[PageId], number: u64) {
    pool.pages
        .free_after(pages, epoch(number))
        .expect("pages in use");
}

/// What the unmaps since the last time waited for.
fn waited(pool: &Pool) -> Vec<After> {
    let unmaps = pool.mapper.unmaps();
    unmaps.into_iter().map(|unmap| unmap.after).collect()
}

#[test]
fn a_run_waits_for_all_that_its_pages_were_freed_after() {
    let pool = Pool::new(8);
    let pages = pool.take(4);
    free_in(&pool, &pages[..2], 7);
    free_in(&pool, &pages[2..], 5);
    assert_eq!(pool.pages.trim(), Ok(4));
    assert_eq!(waited(&pool), [epoch(7)]);

    // Without a word about epochs it is the device that is waited for.
    let pages = pool.take(4);
    free_in(&pool, &pages[..1], 9);
    pool.free(&pages[1..]);
    assert_eq!(pool.pages.trim(), Ok(4));
    assert_eq!(waited(&pool), [epoch(9).join(After::DEVICE)]);
    pool.assert_books_agree();
}

#[test]
fn a_run_of_the_reserve_that_nobody_had_waits_for_nothing() {
    let pool = Pool::with_reserve(20, 4, 8);
    pool.pages.replenish().expect("no faults");
    assert_eq!(pool.pages.trim(), Ok(4));
    assert_eq!(waited(&pool), [After::NOTHING]);
}

#[test]
fn pages_of_a_failed_alloc_were_seen_by_nobody() {
    let pool = Pool::with_reserve(20, 4, 8);
    pool.pages.replenish().expect("no faults");
    pool.mapper.fail(Call::Map, 0, crate::support::refused());
    pool.alloc(10).expect_err("warm pages do not suffice");
    assert_eq!(pool.pages.trim(), Ok(4));
    assert_eq!(waited(&pool), [After::NOTHING]);
}

#[test]
fn what_has_retired_is_not_waited_for() {
    let pool = Pool::new(8);
    let pages = pool.take(4);
    free_in(&pool, &pages, 7);
    pool.pages.retire(Epoch(7));
    pool.pages.retire(Epoch(3));
    assert_eq!(pool.pages.trim(), Ok(4));
    assert_eq!(waited(&pool), [After::NOTHING]);
}

#[test]
fn retired_runs_go_first_and_the_others_in_a_call_of_their_own() {
    let pool = Pool::new(20);
    let (a, b, c) = (pool.take(2), pool.take(2), pool.take(2));
    free_in(&pool, &c, 3);
    free_in(&pool, &b, 1);
    free_in(&pool, &a, 2);
    pool.pages.retire(Epoch(1));
    assert_eq!(pool.pages.trim(), Ok(6));
    let unmaps = pool.mapper.unmaps();
    let calls: Vec<_> = unmaps.iter().map(|u| (&u.runs[..], u.after)).collect();
    assert_eq!(
        calls,
        [
            (&[run(2, 2)][..], After::NOTHING),
            // The oldest epoch first.
            (&[run(0, 2), run(4, 2)][..], epoch(3)),
        ]
    );
    pool.assert_books_agree();
}

#[test]
fn the_background_leaves_alone_what_is_in_flight() {
    let pool = Pool::with_reserve(100, 0, 0);
    let (a, b) = (pool.take(4), pool.take(4));
    free_in(&pool, &a, 1);
    free_in(&pool, &b, 2);
    assert_eq!(pool.pages.replenish().map(|done| done.unmapped), Ok(0));
    pool.pages.retire(Epoch(1));
    assert_eq!(pool.pages.replenish().map(|done| done.unmapped), Ok(4));
    assert_eq!(pool.pages.replenish().map(|done| done.unmapped), Ok(0));
    pool.pages.retire(Epoch(2));
    assert_eq!(pool.pages.replenish().map(|done| done.unmapped), Ok(4));
    assert_eq!(waited(&pool), [After::NOTHING; 2]);
    pool.assert_books_agree();
}

#[test]
fn runs_in_flight_stay_warm_if_they_do_not_retire_in_time() {
    let pool = Pool::new(8);
    pool.mapper.set_in_flight(true);
    let (a, b) = (pool.take(3), pool.take(3));
    free_in(&pool, &a, 1);
    pool.free(&b);
    assert_eq!(pool.pages.trim(), Ok(3), "the others go");
    assert_eq!(waited(&pool), [After::DEVICE, epoch(1)]);
    let usage = pool.usage();
    assert_eq!((usage.warm, usage.unmap_failed_total), (3, 0));
    assert_eq!(pool.take(3), a, "and serve as before");
    pool.assert_books_agree();
}

#[test]
fn a_free_never_asks_for_what_is_in_flight_and_the_background_not_in_vain() {
    let pool = Pool::new(8);
    pool.mapper.set_in_flight(true);
    let pages: Vec<PageId> = (0..4).flat_map(|_| pool.take(1)).collect();
    pool.limit(0, 1);
    for page in &pages {
        free_in(&pool, &[*page], 1);
    }
    assert_eq!(waited(&pool), [], "who frees is who would retire it");
    for _ in 0..3 {
        pool.pages.replenish().expect("in flight is no failure");
    }
    assert_eq!(waited(&pool), [epoch(1)], "once, since it was refused");
    pool.pages.repair().expect("nothing is in doubt");
    pool.pages.replenish().expect("in flight is no failure");
    assert_eq!(
        waited(&pool),
        [epoch(1)],
        "a rank may know by itself by now"
    );
    let again = Limit {
        bytes: 0,
        revision: 1,
    };
    let excess_bytes = 4 * BUNDLE;
    assert_eq!(
        pool.pages.set_limit(again),
        Ok(LimitStatus::Deferred { excess_bytes })
    );
    assert_eq!(waited(&pool), [epoch(1)], "who asks for it, gets it");
    pool.pages.retire(Epoch(1));
    assert_eq!(pool.pages.set_limit(again), Ok(LimitStatus::Applied));
    assert_eq!(waited(&pool), [After::NOTHING]);
    pool.assert_books_agree();
}

#[test]
fn a_limit_takes_what_is_in_flight_if_the_rest_does_not_do() {
    let pool = Pool::new(8);
    let (a, b) = (pool.take(4), pool.take(4));
    free_in(&pool, &a, 1);
    free_in(&pool, &b, 2);
    pool.pages.retire(Epoch(1));
    pool.limit(4, 1);
    assert_eq!(waited(&pool), [After::NOTHING]);
    pool.limit(3, 2);
    assert_eq!(waited(&pool), [epoch(2)]);
    assert_eq!(pool.mapped(), 0);
    pool.assert_books_agree();
}

#[test]
fn a_run_keeps_what_it_waits_for_while_it_is_in_doubt() {
    let pool = Pool::new(8);
    let pages = pool.take(4);
    free_in(&pool, &pages, 5);
    pool.mapper.fail(Call::Unmap, 0, doubtful(vec![run(0, 4)]));
    pool.pages.trim().expect_err("it fails");
    pool.mapper.set_found(|_| crate::ranks::Found::Mapped);
    pool.pages.repair().expect("all is found");
    waited(&pool);
    assert_eq!(pool.pages.trim(), Ok(4));
    assert_eq!(waited(&pool), [epoch(5)]);
    pool.assert_books_agree();
}

proptest! {
    #[test]
    fn warm_pages_are_had_whether_or_not_their_epoch_has_retired(
        frees in prop::collection::vec((1u32..9, 0u64..6), 1..12),
        retired in 0u64..6,
    ) {
        let reserve = Reserve { min: 0, max: 0 };
        let pool = Pool::with(PageAllocatorConfig { reserve, ..PageAllocatorConfig::new(200, BUNDLE) });
        let runs: Vec<_> = frees.iter().map(|&(n, number)| (pool.take(n), number)).collect();
        for (pages, number) in &runs {
            free_in(&pool, pages, *number);
        }
        pool.pages.retire(Epoch(retired));
        let warm = pool.usage().warm;
        let calls = pool.mapper.calls();
        let pages = pool.take(warm);
        prop_assert_eq!(pool.mapper.calls(), calls, "nothing is mapped for that");
        pool.free(&pages);
        pool.assert_books_agree();
    }
}
