//! Which pages are handed out, and in which runs they are mapped.

use std::num::NonZeroU32;

use kvcached_mapper::PageId;
use kvcached_page_alloc::{PageAllocatorConfig, PageState, RunPolicy};

use crate::support::{BUNDLE, Pool, ids, run};

#[test]
fn a_run_is_as_long_as_the_demand_up_to_the_longest() {
    let pool = Pool::new(200);
    assert_eq!(pool.take(1), ids([0]));
    assert_eq!(pool.take(10), ids(1..11));
    assert_eq!(pool.take(150), ids(11..161));
    let expected = [
        run(0, 1),
        run(1, 10),
        run(11, 64),
        run(75, 64),
        run(139, 22),
    ];
    assert_eq!(pool.mapper.mapped(), expected);
    assert_eq!(
        pool.mapper.calls().map,
        3,
        "a call per demand, whatever the number of runs"
    );

    let runs = RunPolicy::up_to(NonZeroU32::new(4).expect("four"));
    let pool = Pool::with(PageAllocatorConfig {
        runs,
        ..PageAllocatorConfig::new(10, BUNDLE)
    });
    pool.take(10);
    assert_eq!(pool.mapper.mapped(), [run(0, 4), run(4, 4), run(8, 2)]);
}

#[test]
fn a_demand_takes_adjacent_pages_where_there_are_enough() {
    let pool = Pool::new(20);
    let singles: Vec<_> = (0..8).flat_map(|_| pool.take(1)).collect();
    let holes: Vec<PageId> = singles.iter().copied().step_by(2).collect();
    pool.free(&holes);
    pool.pages.trim().expect("no faults");
    // Cold are 0, 2, 4, 6 and 8..20: one run of twelve pages, not five runs from the bottom.
    assert_eq!(pool.take(12), ids(8..20));
    assert_eq!(pool.mapper.calls().runs_mapped, 9);
    // One page is enough for one page: the lowest.
    assert_eq!(pool.take(1), ids([0]));
    // None is long enough: as few runs as possible, and not fewer pages.
    assert_eq!(pool.take(3), ids([2, 4, 6]));
    pool.assert_books_agree();
}

#[test]
fn warm_pages_come_before_cold_ones_and_those_of_the_fullest_run_first() {
    let pool = Pool::new(40);
    let (a, b, c) = (pool.take(8), pool.take(8), pool.take(8));
    pool.free(&a[..6]);
    pool.free(&b[..2]);
    pool.free(&c);
    // b has two idle pages, a has six, c is wholly idle.
    assert_eq!(pool.take(2), ids([8, 9]));
    assert_eq!(pool.take(6), ids(0..6));
    assert_eq!(
        pool.take(9),
        ids((16..24).chain([24])),
        "and only then is anything mapped"
    );
    assert_eq!(pool.mapper.calls().map, 4);
}

#[test]
fn of_wholly_idle_runs_the_shortest_that_is_enough_is_opened() {
    let pool = Pool::new(100);
    let runs = [4, 16, 8].map(|n| pool.take(n));
    pool.free(&runs.concat());
    assert_eq!(pool.take(5), ids(20..25), "eight are enough for five");
    // What is left of the eight, then fourteen of the sixteen.
    assert_eq!(pool.take(17), ids((25..28).chain(4..18)));
    assert_eq!(pool.pages.trim(), Ok(4), "the shortest was not needed");
    assert_eq!(pool.usage().warm, 2);
}

#[test]
fn trim_gives_wholly_idle_runs_back_and_no_others() {
    let pool = Pool::new(40);
    let (a, b, c) = (pool.take(8), pool.take(8), pool.take(8));
    pool.free(&a);
    pool.free(&b[1..]);
    pool.free(&c);
    assert_eq!(pool.pages.trim(), Ok(16));
    assert_eq!(pool.mapper.mapped(), [run(8, 8)]);
    let usage = pool.usage();
    assert_eq!(
        (usage.warm, usage.used, usage.cold, usage.unmapped_total),
        (7, 1, 32, 16)
    );
    assert_eq!(pool.pages.state(PageId(9)), Some(PageState::Warm));
    pool.free(&b[..1]);
    assert_eq!(pool.pages.trim(), Ok(8));
    assert_eq!(pool.pages.trim(), Ok(0));
    assert_eq!((pool.usage().cold, pool.usage().runs), (40, 0));
    assert_eq!(pool.mapper.calls().trim, 3, "what it keeps goes each time");
}

#[test]
fn a_pool_that_shrinks_under_churn_gives_its_memory_back() {
    // A full pool in runs of sixteen loses nine in ten pages at random, and goes on with one page
    // in and one page out. Drawing from the fullest runs lets the others drain.
    let runs = RunPolicy::up_to(NonZeroU32::new(16).expect("sixteen"));
    let pool = Pool::with(PageAllocatorConfig {
        runs,
        ..PageAllocatorConfig::new(1600, BUNDLE)
    });
    let mut mine = pool.take(1600);
    let mut random = 1_u64;
    let mut pick = move |below: usize| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        usize::try_from(random >> 33).expect("31 bits") % below
    };
    while mine.len() > 160 {
        let page = mine.swap_remove(pick(mine.len()));
        pool.free(&[page]);
    }
    for _ in 0..1600 {
        let page = mine.swap_remove(pick(mine.len()));
        pool.free(&[page]);
        mine.extend(pool.take(1));
    }
    pool.pages.trim().expect("no faults");
    let floor = 160;
    assert!(
        pool.mapped() * 10 <= floor * 14,
        "{} pages for {floor}",
        pool.mapped()
    );
    pool.assert_books_agree();
}

#[test]
fn a_backed_page_knows_the_run_whose_memory_goes_with_it() {
    let pool = Pool::new(40);
    let (a, b) = (pool.take(3), pool.take(5));
    for (pages, whole) in [(&a, run(0, 3)), (&b, run(3, 5))] {
        for &page in pages {
            assert_eq!(pool.pages.run_of(page), Some(whole));
        }
    }
    pool.free(&a[..1]);
    assert_eq!(pool.pages.run_of(a[0]), Some(run(0, 3)), "warm");
    pool.free(&a[1..]);
    pool.pages.trim().expect("no faults");
    assert_eq!(pool.pages.run_of(a[0]), None, "its memory has gone");
    assert_eq!(pool.pages.run_of(PageId(40)), None, "there is no such page");
}
