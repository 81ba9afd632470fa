//! How what is in doubt ends: the fence falls, the quarantine is lifted, and losses are told.

use std::sync::Arc;

use kvcached_mapper::testing::Call;
use kvcached_mapper::{Cause, Health, MapError, PageId, Rank, Stage};
use kvcached_page_alloc::{AllocError, FullReason, LimitStatus, PageState, Repaired};

use crate::ranks::Found;
use crate::support::{BUNDLE, Pool, doubtful, ids, refused, run, suspect};

fn repair(pool: &Pool) -> Repaired {
    pool.pages.repair().expect("the mapper is well again")
}

/// Four pages in doubt, as the first and the last half of the pool's first eight.
fn in_doubt(pool: &Pool) {
    let (a, b) = (pool.take(4), pool.take(4));
    pool.free(&[a, b].concat());
    let runs = vec![run(0, 4), run(4, 4)];
    pool.mapper.fail(Call::Unmap, 0, doubtful(runs.clone()));
    pool.pages.trim().expect_err("it is in doubt");
    assert_eq!(pool.pages.quarantined(), runs);
}

#[test]
fn a_repaired_page_is_handed_out_again_and_not_before() {
    let pool = Pool::new(8);
    in_doubt(&pool);
    assert_eq!(pool.alloc(1), Err(AllocError::Full(FullReason::Capacity)));
    let repaired = repair(&pool);
    assert_eq!(
        (repaired.cold, repaired.warm, repaired.health),
        (8, 0, Health::Healthy)
    );
    assert_eq!(pool.usage().repaired_total, 8);
    pool.assert_books_agree();
    assert_eq!(pool.take(8), ids(0..8));
}

#[test]
fn a_run_found_mapped_is_warm_and_one_that_is_not_known_yet_stays() {
    let pool = Pool::new(12);
    in_doubt(&pool);
    pool.mapper.set_found(|found| match found.first() {
        PageId(0) => Found::Mapped,
        _ => Found::Nothing,
    });
    let repaired = repair(&pool);
    let ranks = Vec::new();
    assert_eq!((repaired.cold, repaired.warm), (0, 4));
    assert_eq!(repaired.health, Health::Degraded { ranks, pages: 4 });
    pool.assert_books_agree();
    let maps = pool.mapper.calls().map;
    assert_eq!(pool.take(4), ids(0..4));
    assert_eq!(pool.mapper.calls().map, maps, "it had memory");
    pool.free(&ids(0..4));
    assert_eq!(pool.pages.trim(), Ok(4), "and gives it back as one run");
    pool.mapper.set_found(|_| Found::Cold);
    assert_eq!(repair(&pool).cold, 4);
    assert_eq!(pool.take(12), ids(0..12));
}

#[test]
fn a_failed_repair_lifts_nothing() {
    let pool = Pool::new(8);
    in_doubt(&pool);
    pool.mapper.fail_reconcile(Some(refused()));
    assert_eq!(pool.pages.repair(), Err(refused()));
    assert_eq!(pool.usage().quarantined, 8);
    assert_eq!(
        pool.pages.health(),
        Health::Degraded {
            ranks: Vec::new(),
            pages: 8
        }
    );
    pool.assert_books_agree();
}

#[test]
fn pages_come_back_under_the_limit_in_force() {
    let pool = Pool::new(8);
    in_doubt(&pool);
    pool.limit(3, 1);
    let excess_bytes = 5 * BUNDLE;
    assert_eq!(
        pool.pages.limit_status(),
        LimitStatus::Deferred { excess_bytes }
    );
    repair(&pool);
    let usage = pool.usage();
    assert_eq!((usage.cold, usage.withheld), (3, 5));
    assert_eq!(usage.limit_status, LimitStatus::Applied);

    // Those found mapped count as well, and go.
    let pool = Pool::new(8);
    in_doubt(&pool);
    pool.limit(3, 1);
    pool.mapper.set_found(|_| Found::Mapped);
    assert_eq!(repair(&pool).warm, 8);
    let usage = pool.usage();
    assert_eq!((usage.warm, usage.cold, usage.withheld), (0, 3, 5));
    pool.assert_books_agree();
}

#[test]
fn nothing_is_handed_out_while_a_rank_is_fenced_not_even_what_is_warm() {
    let pool = Pool::with_reserve(20, 4, 4);
    let mine = pool.take(6);
    pool.free(&mine[..2]);
    let ranks = pool.fence();
    assert!(!pool.pages.is_fenced(), "nobody has looked");
    let pages = 0;
    let fenced = Health::Fenced {
        ranks: ranks.clone(),
        pages,
    };
    assert_eq!(pool.pages.health(), fenced);
    assert!(pool.pages.is_fenced());
    assert_eq!(pool.pages.fenced(), ranks);
    assert_eq!(pool.pages.available(), 0);

    let (before, calls) = (pool.usage(), pool.mapper.calls());
    for n in [0, 1, 2, 3, 50] {
        let ranks = ranks.clone();
        assert_eq!(pool.alloc(n), Err(AllocError::Fenced { ranks }));
    }
    let first = pool.pages.alloc_first();
    assert_eq!(first, Err(AllocError::Fenced { ranks }));
    let done = pool.pages.replenish().expect("nothing is done");
    assert_eq!((done.mapped, done.unmapped, done.more), (0, 0, false));
    assert_eq!(pool.usage(), before);
    assert_eq!(pool.mapper.calls(), calls, "the mapper is left in peace");
    // Memory goes back all the same: whoever is away has the less to have.
    pool.limit(1, 1);
    pool.free(&mine[2..]);
    assert_eq!(pool.pages.limit_status(), LimitStatus::Applied);
    assert_eq!(pool.mapper.calls().map, calls.map);

    pool.mapper.set_health(Health::Healthy);
    assert_eq!(repair(&pool).health, Health::Healthy);
    assert!(!pool.pages.is_fenced());
    assert_eq!(pool.take(1).len(), 1);
    pool.assert_books_agree();
}

#[test]
fn the_first_error_of_a_suspect_rank_raises_the_fence() {
    let pool = Pool::new(8);
    let mine = pool.take(4);
    pool.free(&mine);
    pool.fence();
    pool.mapper.fail(Call::Map, 0, doubtful(vec![run(4, 4)]));
    let error = Err(AllocError::Broken(doubtful(vec![run(4, 4)])));
    assert_eq!(pool.alloc(8), error);
    assert!(pool.pages.is_fenced());
    let ranks = vec![suspect()];
    assert_eq!(pool.alloc(1), Err(AllocError::Fenced { ranks }));
    assert_eq!(pool.usage().warm, 4, "what it took came back");

    // And so does an unmap, after which the pages stay where they are.
    let pool = Pool::new(8);
    let mine = pool.take(4);
    pool.fence();
    pool.free(&mine);
    pool.mapper.fail(Call::Unmap, 0, refused());
    assert_eq!(pool.pages.trim(), Err(refused()));
    assert!(pool.pages.is_fenced() && pool.usage().warm == 4);
}

#[test]
fn a_repair_that_fails_leaves_the_fence_as_the_mapper_says() {
    let pool = Pool::new(8);
    pool.fence();
    pool.mapper.fail_reconcile(Some(refused()));
    assert_eq!(pool.pages.repair(), Err(refused()));
    assert!(pool.pages.is_fenced());
    // Another rank is still out of order, but none is suspect any more.
    pool.mapper.set_health(Health::Degraded {
        ranks: vec![suspect()],
        pages: 3,
    });
    assert_eq!(pool.pages.repair(), Err(refused()));
    assert!(!pool.pages.is_fenced());
    let ranks = vec![suspect()];
    assert_eq!(pool.pages.health(), Health::Degraded { ranks, pages: 0 });
    assert_eq!(pool.take(8).len(), 8);
}

#[test]
fn a_loss_is_counted_once_and_before_the_fence_falls() {
    let pool = Pool::new(8);
    pool.fence();
    pool.pages.health();
    pool.mapper.lose_content(Stage(0), Rank(1));
    pool.mapper.lose_content(Stage(1), Rank(0));
    pool.mapper.set_health(Health::Healthy);
    assert_eq!(pool.pages.contents_lost(), 0);
    let repaired = repair(&pool);
    assert_eq!(repaired.lost, [(Stage(0), Rank(1)), (Stage(1), Rank(0))]);
    assert_eq!(pool.pages.contents_lost(), 1, "one repair, one loss");
    assert_eq!(repair(&pool).lost, []);
    assert_eq!(pool.pages.contents_lost(), 1);
    assert_eq!(pool.usage().contents_lost_total, 1);
}

#[test]
fn a_look_in_the_middle_of_a_repair_lowers_no_fence_before_the_loss_is_counted() {
    let pool = Pool::new(8);
    pool.fence();
    pool.pages.health();
    pool.mapper.lose_content(Stage(0), Rank(1));
    pool.mapper.set_health(Health::Healthy);
    // The ranks are mended, and the repair has not heard of it yet: another thread looks, and a
    // third repairs.
    let other = Arc::clone(&pool.pages);
    pool.mapper.once_answered(move || {
        for _ in 0..2 {
            assert_eq!(other.health(), Health::Healthy);
            assert!(other.is_fenced(), "nobody was told of the loss yet");
            assert_eq!(other.repair().expect("all is well").lost, []);
        }
        assert_eq!(other.contents_lost(), 0);
    });
    assert_eq!(repair(&pool).lost, [(Stage(0), Rank(1))]);
    assert_eq!(pool.pages.contents_lost(), 1);
    assert!(!pool.pages.is_fenced());
}

/// A second repair might ask about runs that the first has lifted and that are in use again: a loss
/// of theirs would look like none.
#[test]
fn one_thread_repairs_at_a_time() {
    let pool = Pool::new(4);
    pool.mapper.fail(Call::Map, 0, doubtful(vec![run(0, 4)]));
    pool.alloc(4).expect_err("it is in doubt");
    let other = Arc::clone(&pool.pages);
    let before = pool.mapper.calls().reconcile;
    pool.mapper.once_answered(move || {
        let second = other.repair().expect("it leaves it to the first");
        assert_eq!((second.cold, second.warm), (0, 0));
        assert!(second.left_to_another);
        assert_eq!(other.state(PageId(0)), Some(PageState::Quarantined));
    });
    assert_eq!(repair(&pool).cold, 4);
    assert_eq!(pool.mapper.calls().reconcile, before + 1);
    pool.assert_books_agree();
}

/// A rank that has no memory for what it must have needs less once idle pages are given up.
#[test]
fn a_repair_that_finds_a_rank_full_gives_idle_pages_up_and_tries_again() {
    let pool = Pool::new(20);
    let mine = pool.take(6);
    let idle = pool.take(4);
    pool.free(&idle);
    let at = Some((Stage(0), Rank(1)));
    let full = MapError::clean(Cause::OutOfMemory { at });
    pool.mapper.fail_reconcile(Some(full.clone()));
    let before = pool.mapper.calls();
    assert_eq!(pool.pages.repair(), Err(full.clone()));
    let calls = pool.mapper.calls();
    assert_eq!(calls.reconcile - before.reconcile, 2);
    assert_eq!((pool.usage().warm, pool.usage().used), (0, 6));
    // With nothing left to give up it is tried once.
    assert_eq!(pool.pages.repair(), Err(full));
    assert_eq!(pool.mapper.calls().reconcile - calls.reconcile, 1);
    pool.free(&mine);
    pool.assert_books_agree();
}
