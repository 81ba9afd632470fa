//! What a failing mapper leaves behind, and what a caller may do next.

use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kvcached_mapper::PageId;
use kvcached_mapper::testing::{Call, RecordingMapper};
use kvcached_page_alloc::{
    AllocError, ConfigError, FreeError, FullReason, MAX_RUN, PageAllocator, PageAllocatorConfig,
    PageState, Reserve, RunPolicy,
};

use crate::support::{BUNDLE, Pool, doubtful, full, ids, refused, run};

#[test]
fn a_failed_map_returns_its_pages_to_cold_and_the_next_alloc_has_them() {
    let pool = Pool::new(8);
    pool.mapper.fail(Call::Map, 0, refused());
    assert_eq!(pool.alloc(3), Err(AllocError::Broken(refused())));
    let usage = pool.usage();
    assert_eq!((usage.cold, usage.map_failed_total), (8, 1));
    assert_eq!(pool.take(3), ids(0..3));
    pool.assert_books_agree();
}

#[test]
fn a_full_device_is_an_answer_and_takes_nothing() {
    let pool = Pool::new(8);
    pool.mapper.set_memory_pages(Some(6));
    let kept = pool.take(4);
    pool.free(&kept[2..]);
    let mut out = vec![PageId(77)];
    let asked = pool.pages.alloc(5, &mut out);
    assert_eq!(asked, Err(AllocError::Full(FullReason::DeviceMemory)));
    assert_eq!(out, ids([77]), "what the caller had is untouched");
    let usage = pool.usage();
    assert_eq!(
        (usage.used, usage.warm, usage.cold),
        (2, 2, 4),
        "the warm pages are warm again"
    );
    assert_eq!((usage.map_full_total, usage.map_failed_total), (1, 0));
    assert_eq!(
        pool.take(4).len(),
        4,
        "what memory allows is had right away"
    );
    pool.assert_books_agree();
}

#[test]
fn only_the_uncertain_runs_of_a_failed_map_are_quarantined() {
    let config = PageAllocatorConfig {
        runs: RunPolicy::up_to(NonZeroU32::new(2).expect("two")),
        ..PageAllocatorConfig::new(10, BUNDLE)
    };
    let pool = Pool::with(config);
    pool.mapper.fail(Call::Map, 0, doubtful(vec![run(2, 2)]));
    let error = pool.alloc(6);
    assert_eq!(error, Err(AllocError::Broken(doubtful(vec![run(2, 2)]))));
    assert_eq!(pool.pages.quarantined(), [run(2, 2)]);
    // Never handed out again, by whatever is asked.
    assert_eq!(pool.pages.available(), 8);
    let mut all = pool.take(8);
    all.sort();
    assert_eq!(all, ids([0, 1, 4, 5, 6, 7, 8, 9]));
    assert_eq!(pool.alloc(1), Err(AllocError::Full(FullReason::Capacity)));
    pool.free(&all);
    pool.pages.trim().expect("the mapper is well again");
    assert_eq!(pool.pages.state(PageId(2)), Some(PageState::Quarantined));
    assert_eq!(
        pool.usage().mapped_bytes,
        2 * BUNDLE,
        "they may have memory, so they count"
    );
    pool.assert_books_agree();
}

#[test]
fn doubt_about_a_part_of_a_run_is_doubt_about_all_of_it() {
    let pool = Pool::new(10);
    pool.mapper
        .fail(Call::Map, 0, doubtful(vec![run(3, 1), run(8, 1)]));
    assert!(pool.alloc(6).is_err());
    assert_eq!(
        pool.pages.quarantined(),
        [run(0, 6)],
        "and about nothing outside of the batch"
    );
    assert_eq!(pool.take(4), ids(6..10));
}

#[test]
fn a_full_device_with_doubts_is_not_a_normal_answer() {
    let pool = Pool::new(4);
    let mut error = full();
    error.uncertain = vec![run(0, 4)];
    pool.mapper.fail(Call::Map, 0, error.clone());
    assert_eq!(pool.alloc(4), Err(AllocError::Broken(error)));
    assert_eq!(pool.usage().quarantined, 4);
}

#[test]
fn after_an_unmap_failure_the_pages_are_quarantined_and_the_next_alloc_returns_at_once() {
    let pool = Pool::new(4);
    let pages = pool.take(2);
    pool.free(&pages);
    pool.mapper.fail(Call::Unmap, 0, doubtful(vec![run(0, 2)]));
    assert_eq!(pool.pages.trim(), Err(doubtful(vec![run(0, 2)])));
    let usage = pool.usage();
    assert_eq!(
        (usage.quarantined, usage.cold, usage.unmap_failed_total),
        (2, 2, 1)
    );
    assert_eq!(pool.take(2), ids([2, 3]));
    assert_eq!(pool.alloc(1), Err(AllocError::Full(FullReason::Capacity)));
    pool.assert_books_agree();
}

#[test]
fn a_failed_unmap_quarantines_only_the_uncertain_runs() {
    let pool = Pool::new(12);
    let (a, b, c) = (pool.take(3), pool.take(3), pool.take(3));
    pool.free(&[a, b, c].concat());
    pool.mapper.fail(Call::Unmap, 0, doubtful(vec![run(3, 3)]));
    assert!(pool.pages.trim().is_err());
    assert_eq!(
        pool.mapper.calls().trim,
        1,
        "what it keeps goes all the same"
    );
    let usage = pool.usage();
    assert_eq!(
        (usage.warm, usage.quarantined, usage.unmapped_total),
        (6, 3, 0)
    );
    assert_eq!(
        pool.pages.trim(),
        Ok(6),
        "the others are as they were, bounds included"
    );
    pool.assert_books_agree();
}

#[test]
fn a_free_that_cannot_unmap_frees_all_the_same() {
    let pool = Pool::new(8);
    let (a, b) = (pool.take(4), pool.take(4));
    pool.limit(0, 1);
    pool.mapper.fail(Call::Unmap, 0, doubtful(vec![run(0, 4)]));
    pool.mapper.fail(Call::Unmap, 1, refused());
    pool.free(&a);
    assert_eq!((pool.usage().quarantined, pool.usage().used), (4, 4));
    pool.free(&b);
    assert_eq!((pool.usage().warm, pool.usage().unmap_failed_total), (4, 2));
    assert_eq!(pool.pages.trim(), Ok(4));
    pool.assert_books_agree();
}

#[test]
fn pages_taken_back_by_a_failed_alloc_go_when_the_limit_says_so() {
    let pool = Pool::new(8);
    let warm = pool.take(4);
    pool.free(&warm);
    pool.during_calls(|pages, call, _| {
        if call == Call::Unmap {
            return Ok(());
        }
        // A limit comes while the alloc, which holds the warm pages already, waits for more.
        let limit = kvcached_page_alloc::Limit {
            bytes: 2 * BUNDLE,
            revision: 1,
        };
        pages.set_limit(limit).expect("there is no floor");
        Err(refused())
    });
    assert_eq!(pool.alloc(6), Err(AllocError::Broken(refused())));
    let usage = pool.usage();
    assert_eq!(
        (usage.warm, usage.used, usage.cold, usage.withheld),
        (0, 0, 2, 6)
    );
    pool.assert_books_agree();
}

#[test]
fn a_page_freed_twice_or_never_handed_out_is_refused_and_nothing_changes() {
    let pool = Pool::new(8);
    let pages = pool.take(4);
    let before = pool.usage();
    let free = |pages: &[u32]| pool.pages.free(&ids(pages.iter().copied()));
    let twice = FreeError::NamedTwice { page: PageId(1) };
    assert_eq!(free(&[0, 1, 2, 1]), Err(twice));
    let cold = FreeError::NotUsed {
        page: PageId(5),
        found: Some(PageState::Cold),
    };
    assert_eq!(free(&[0, 1, 5, 2]), Err(cold));
    let outside = FreeError::NotUsed {
        page: PageId(8),
        found: None,
    };
    assert_eq!(free(&[3, 8]), Err(outside));
    assert_eq!(free(&[u32::MAX]).map_err(|e| e.to_string()), {
        Err("page 4294967295 is not in use but outside the pool".to_owned())
    });
    assert_eq!(pool.usage(), before);
    pool.free(&pages);
    let warm = FreeError::NotUsed {
        page: PageId(0),
        found: Some(PageState::Warm),
    };
    assert_eq!(free(&[0]), Err(warm));
    pool.assert_books_agree();
}

#[test]
fn pages_that_hold_no_block_are_never_mapped() {
    // Blocks of 1.5 MiB in pages of 2 MiB: pages 1, 4, 7, … hold no whole block.
    let void = ids((1..60).step_by(3));
    let config = PageAllocatorConfig {
        void: void.clone(),
        reserve: Reserve { min: 10, max: 20 },
        ..PageAllocatorConfig::new(60, BUNDLE)
    };
    let pool = Pool::with(config);
    assert_eq!((pool.usage().void, pool.pages.available()), (20, 40));
    pool.pages.replenish().expect("no faults");
    let pages = pool.take(40);
    assert!(pages.iter().all(|page| !void.contains(page)));
    assert!(
        pool.mapper
            .mapped()
            .iter()
            .all(|run| run.pages().all(|page| !void.contains(&page)))
    );
    assert_eq!(pool.alloc(1), Err(AllocError::Full(FullReason::Capacity)));
    pool.assert_books_agree();
}

#[test]
fn a_configuration_that_contradicts_itself_makes_no_allocator() {
    let new = |change: fn(&mut PageAllocatorConfig)| {
        let mut config = PageAllocatorConfig::new(10, BUNDLE);
        change(&mut config);
        PageAllocator::new(config, Arc::new(RecordingMapper::new(10)))
            .map(|_| ())
            .unwrap_err()
    };
    assert_eq!(new(|c| c.pages = 0), ConfigError::NoPages);
    assert_eq!(new(|c| c.void = ids(0..10)), ConfigError::NoPages);
    assert_eq!(new(|c| c.bundle_bytes = 0), ConfigError::NoBytes);
    let pages = u32::MAX;
    assert_eq!(
        new(|c| c.pages = u32::MAX),
        ConfigError::TooLarge {
            pages,
            bundle_bytes: BUNDLE
        },
    );
    assert_eq!(
        new(|c| c.bundle_bytes = u64::MAX / 9),
        ConfigError::TooLarge {
            pages: 10,
            bundle_bytes: u64::MAX / 9
        },
    );
    assert_eq!(
        new(|c| c.void = ids([3, 10])),
        ConfigError::VoidOutOfRange {
            page: PageId(10),
            pages: 10
        },
    );
    assert_eq!(
        new(|c| c.runs = RunPolicy::up_to(NonZeroU32::new(65).expect("65"))),
        ConfigError::RunTooLong {
            max_run: 65,
            most: MAX_RUN
        },
    );
    assert_eq!(
        new(|c| c.runs.bulk = NonZeroU32::MIN),
        ConfigError::BulkRunTooShort {
            bulk: 1,
            longest: MAX_RUN
        },
    );
    assert_eq!(
        new(|c| c.reserve = Reserve { min: 3, max: 2 }),
        ConfigError::Reserve { min: 3, max: 2 },
    );
    assert_eq!(
        new(|c| c.floor_bytes = 10 * BUNDLE + 1),
        ConfigError::Floor {
            floor_bytes: 10 * BUNDLE + 1,
            capacity_bytes: 10 * BUNDLE
        },
    );
}

#[test]
fn a_mapper_that_panics_leaves_pages_in_doubt_and_none_busy() {
    for which in [Call::Map, Call::Unmap] {
        let pool = Pool::new(10);
        let kept = pool.take(4);
        pool.free(&kept);
        pool.during_calls(move |_, call, _| {
            assert!(call != which, "as the test wants it");
            Ok(())
        });
        let panics = AssertUnwindSafe(|| match which {
            Call::Map => drop(pool.alloc(5)),
            _ => drop(pool.pages.trim()),
        });
        catch_unwind(panics).expect_err("the mapper panics");
        let usage = pool.usage();
        assert_eq!(usage.busy, 0);
        assert!(usage.quarantined > 0);
        assert!(!pool.pages.quarantined().is_empty());
    }
}
