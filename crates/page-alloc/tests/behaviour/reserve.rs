//! The warm reserve, and the first page.

use std::num::NonZeroU32;
use std::sync::Arc;

use kvcached_mapper::PageId;
use kvcached_mapper::testing::Call;
use kvcached_page_alloc::{
    AllocError, FullReason, MAX_RUN, PageAllocatorConfig, PageState, Replenished, Reserve,
    RunPolicy, Turns,
};

use crate::support::{BUNDLE, Pool, doubtful, full, ids, refused, run};

fn replenish(pool: &Pool) -> Replenished {
    pool.pages.replenish().expect("no faults")
}

#[test]
fn without_a_reserve_nothing_is_mapped_ahead() {
    let pool = Pool::with_reserve(10, 0, 0);
    assert_eq!(replenish(&pool), Replenished::default());
    let calls = pool.mapper.calls();
    assert_eq!((calls.map, calls.unmap, calls.headroom), (0, 0, 0));
    assert_eq!(pool.usage().cold, 10);
}

#[test]
fn a_reserve_is_handed_out_without_a_call() {
    let pool = Pool::with_reserve(100, 5, 10);
    let done = replenish(&pool);
    assert_eq!((done.mapped, done.full, done.more), (5, None, false));
    let calls = pool.mapper.calls();
    assert_eq!(
        (calls.map, calls.runs_mapped),
        (1, 1),
        "five adjacent pages are one run"
    );
    let mine = pool.take(5);
    assert_eq!(pool.mapper.calls().map, 1);
    assert_eq!(replenish(&pool).mapped, 5, "and it is made up for");
    pool.free(&mine);
    assert_eq!(
        replenish(&pool),
        Replenished::default(),
        "ten is not above the upper bound"
    );
}

#[test]
fn after_a_burst_the_reserve_shrinks_to_its_upper_bound() {
    let pool = Pool::with_reserve(1000, 5, 10);
    let burst: Vec<_> = (0..500).flat_map(|_| pool.take(1)).collect();
    pool.free(&burst);
    assert_eq!(pool.usage().warm, 500);
    let mut steps = 0;
    while replenish(&pool).more {
        steps += 1;
        assert!(steps < 100, "it comes to an end");
    }
    assert_eq!((pool.usage().warm, pool.mapped()), (10, 10));
}

#[test]
fn a_long_run_goes_as_a_whole_and_the_lower_bound_is_made_up_for() {
    let pool = Pool::with_reserve(100, 4, 8);
    let burst = pool.take(16);
    pool.free(&burst);
    assert_eq!(replenish(&pool).unmapped, 16);
    assert_eq!(replenish(&pool).mapped, 4);
    assert_eq!(
        replenish(&pool),
        Replenished::default(),
        "and that is where it stays"
    );
}

#[test]
fn a_step_is_bounded() {
    let pool = Pool::with_reserve(10_000, 5_000, 6_000);
    let first = replenish(&pool);
    assert_eq!((first.mapped, first.more), (16 * MAX_RUN, true));
    let mut steps = 1;
    while replenish(&pool).more {
        steps += 1;
        assert!(steps < 100, "it comes to an end");
    }
    assert_eq!(pool.usage().warm, 5_000);
}

#[test]
fn a_reserve_keeps_to_the_limit() {
    let pool = Pool::with_reserve(100, 10, 20);
    pool.limit(7, 1);
    let mine = pool.take(4);
    let done = replenish(&pool);
    assert_eq!(
        (done.mapped, done.full, done.more),
        (3, Some(FullReason::Limit), false)
    );
    assert_eq!(pool.mapped(), 7);
    pool.free(&mine);
    assert_eq!(pool.usage().warm, 7);
}

#[test]
fn a_full_device_is_an_answer_to_replenish() {
    let pool = Pool::with_reserve(100, 10, 20);
    pool.mapper.set_memory_pages(Some(4));
    let done = replenish(&pool);
    assert_eq!(
        (done.mapped, done.full),
        (4, Some(FullReason::DeviceMemory))
    );
    let done = replenish(&pool);
    assert_eq!(
        (done.mapped, done.full),
        (0, Some(FullReason::DeviceMemory))
    );
    assert_eq!(
        pool.mapper.calls().map,
        1,
        "where there is no headroom nothing is tried"
    );
    // The headroom is a hint: somebody else may be faster.
    pool.mapper.set_memory_pages(None);
    pool.mapper.fail(Call::Map, 0, full());
    let done = replenish(&pool);
    assert_eq!(
        (done.mapped, done.full),
        (0, Some(FullReason::DeviceMemory))
    );
    pool.assert_books_agree();
}

#[test]
fn a_reserve_leaves_others_as_much_as_it_has_itself() {
    let pool = Pool::with_reserve(150, 0, 60);
    pool.mapper.set_memory_pages(Some(90));
    let mine = pool.take(50);
    let mut done = replenish(&pool);
    while done.more {
        done = replenish(&pool);
    }
    assert_eq!(pool.usage().reserve_target, 50);
    assert_eq!(
        (pool.usage().warm, done.full),
        (20, Some(FullReason::DeviceMemory))
    );
    assert_eq!(replenish(&pool).mapped, 0);
    pool.mapper.set_memory_pages(Some(150));
    assert_eq!(replenish(&pool).mapped, 30, "with enough left it is filled");
    pool.free(&mine);
}

#[test]
fn a_reserve_is_given_up_for_a_demand_of_another_pool_that_was_refused() {
    let turns = Turns::shared();
    let [pool, other] = [2, 0].map(|min| {
        Pool::with(PageAllocatorConfig {
            reserve: Reserve { min, max: 60 },
            runs: RunPolicy::up_to(NonZeroU32::MIN),
            turns: turns.clone(),
            ..PageAllocatorConfig::new(200, BUNDLE)
        })
    });
    for pool in [&pool, &other] {
        let mine = pool.take(20);
        pool.free(&mine);
        assert_eq!(
            pool.pages.shed().expect("no faults"),
            Replenished::default()
        );
    }
    other.mapper.set_memory_pages(Some(20));
    assert!(other.alloc(21).is_err());
    let shed = |pool: &Pool| {
        while pool.pages.shed().expect("no faults").unmapped > 0 {}
        pool.usage().warm
    };
    assert_eq!(
        (shed(&pool), shed(&other)),
        (2, 20),
        "its own it still needs"
    );
    // Who was refused has a whole time between two ticks before anything is mapped ahead again.
    let mine = pool.take(12);
    for mapped in [2, 0, 10] {
        assert_eq!(replenish(&pool).mapped, mapped);
        pool.pages.tick();
    }
    // That is said once.
    pool.free(&mine);
    assert_eq!(shed(&pool), 24);
    pool.assert_books_agree();
}

#[test]
fn a_reserve_of_any_size_is_one_of_the_capacity() {
    for min in [u32::MAX - 1, u32::MAX] {
        let pool = Pool::with_reserve(100, min, u32::MAX);
        pool.take(40);
        while replenish(&pool).more {}
        assert_eq!((pool.usage().warm, pool.usage().reserve_target), (60, 100));
        let done = replenish(&pool);
        assert_eq!((done.mapped, done.full), (0, Some(FullReason::Capacity)));
        pool.assert_books_agree();
    }
}

#[test]
fn where_no_page_may_be_mapped_the_memory_that_is_left_is_not_asked_for() {
    let pool = Pool::with_reserve(100, 4, 8);
    pool.limit(10, 1);
    pool.take(10);
    let done = replenish(&pool);
    assert_eq!((done.mapped, done.full), (0, Some(FullReason::Limit)));
    assert_eq!(pool.mapper.calls().headroom, 0);
}

#[test]
fn a_broken_mapper_is_an_error_to_replenish() {
    let pool = Pool::with_reserve(100, 10, 20);
    pool.mapper.fail(Call::Map, 0, doubtful(vec![run(0, 10)]));
    assert_eq!(pool.pages.replenish(), Err(doubtful(vec![run(0, 10)])));
    assert_eq!(replenish(&pool).mapped, 10);
    let mine = pool.take(40);
    pool.free(&mine);
    pool.mapper.fail(Call::Unmap, 0, refused());
    assert_eq!(pool.pages.replenish(), Err(refused()));
    assert_eq!(pool.usage().quarantined, 10);
    pool.assert_books_agree();
}

#[test]
fn a_limit_that_comes_during_replenish_sends_the_pages_back() {
    let pool = Pool::with_reserve(100, 10, 20);
    pool.during_calls(|pages, call, _| {
        if call == Call::Map {
            let limit = kvcached_page_alloc::Limit {
                bytes: 0,
                revision: 1,
            };
            pages.set_limit(limit).expect("there is no floor");
        }
        Ok(())
    });
    assert_eq!(replenish(&pool).mapped, 10);
    assert_eq!((pool.usage().warm, pool.mapped()), (0, 0));
    pool.assert_books_agree();
}

#[test]
fn the_first_page_is_page_0_whatever_replenish_did_before() {
    let first = |pool: &Pool| pool.pages.alloc_first();
    // Cold: a run of its own, since it is never freed.
    let pool = Pool::with_reserve(20, 5, 10);
    assert_eq!(first(&pool), Ok(PageId(0)));
    assert_eq!(pool.mapper.mapped(), [run(0, 1)]);
    assert_eq!(replenish(&pool).mapped, 5);
    // Warm, in the middle of what replenish made.
    let pool = Pool::with_reserve(20, 5, 10);
    replenish(&pool);
    assert_eq!(first(&pool), Ok(PageId(0)));
    assert_eq!(pool.take(4), ids(1..5));
    // Warm again, after it was lent to somebody.
    let pool = Pool::new(20);
    let lent = pool.take(3);
    pool.free(&lent);
    assert_eq!(first(&pool), Ok(PageId(0)));
    assert_eq!(pool.take(2), ids([1, 2]));
    pool.assert_books_agree();
}

#[test]
fn the_first_page_is_refused_where_it_cannot_be_had() {
    let taken = |state| Err(AllocError::FirstTaken { state });
    let pool = Pool::new(4);
    assert_eq!(pool.pages.alloc_first(), Ok(PageId(0)));
    assert_eq!(pool.pages.alloc_first(), taken(PageState::Used));

    let config = PageAllocatorConfig {
        void: ids([0]),
        ..PageAllocatorConfig::new(4, BUNDLE)
    };
    assert_eq!(
        Pool::with(config).pages.alloc_first(),
        taken(PageState::Void)
    );

    let pool = Pool::new(4);
    pool.mapper.fail(Call::Map, 0, full());
    pool.mapper.fail(Call::Map, 1, doubtful(vec![run(0, 1)]));
    let memory = Err(AllocError::Full(FullReason::DeviceMemory));
    assert_eq!(pool.pages.alloc_first(), memory);
    assert!(matches!(
        pool.pages.alloc_first(),
        Err(AllocError::Broken(_))
    ));
    assert_eq!(pool.pages.alloc_first(), taken(PageState::Quarantined));

    let pool = Pool::new(4);
    pool.limit(0, 1);
    let limit = Err(AllocError::Full(FullReason::Limit));
    assert_eq!(pool.pages.alloc_first(), limit);
    pool.limit(1, 2);
    assert_eq!(pool.pages.alloc_first(), Ok(PageId(0)));

    // Warm, but the limit is used up by its neighbours.
    let pool = Pool::new(4);
    let pages = pool.take(4);
    pool.limit(2, 1);
    pool.free(&pages[..1]);
    assert_eq!(pool.pages.state(PageId(0)), Some(PageState::Warm));
    assert_eq!(pool.pages.alloc_first(), limit);
}

#[test]
fn the_first_page_is_page_0_in_a_thousand_starts_beside_replenish() {
    for _ in 0..1000 {
        let pool = Pool::with_reserve(20, 5, 10);
        let pages = Arc::clone(&pool.pages);
        std::thread::scope(|scope| {
            scope.spawn(move || pages.replenish().expect("no faults"));
            // Busy is the only other answer, and it passes.
            let first = loop {
                match pool.pages.alloc_first() {
                    Err(AllocError::Full(FullReason::Busy)) => std::thread::yield_now(),
                    other => break other,
                }
            };
            assert_eq!(first, Ok(PageId(0)));
        });
        assert_eq!(pool.pages.state(PageId(0)), Some(PageState::Used));
    }
}
