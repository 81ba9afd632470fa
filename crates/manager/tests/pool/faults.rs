//! Kinds of fault that users of such systems have met, each with its numbers.

use std::num::NonZeroU32;
use std::sync::Arc;

use kvcached_manager::{
    AllocError, BlockId, BlockManager, FreeError, FullReason, HoldError, Limit, LimitStatus,
    NULL_BLOCK, NewError,
};
use kvcached_mapper::testing::{Call, RecordingMapper};
use kvcached_mapper::{Cause, MapError, PageId, PageRun, Rank, Stage};
use kvcached_page_alloc::{PageAllocator, PageAllocatorConfig, PageState, Reserve, RunPolicy};
use proptest::prelude::*;

use crate::support::{PAGE, Pool, Shape, beneath, blocks, space};

fn full(requested: u32, available: u32, reason: FullReason) -> AllocError {
    AllocError::Full {
        requested,
        available,
        reason,
    }
}

fn broken() -> MapError {
    MapError::clean(Cause::Diverged {
        stage: Stage(0),
        rank: Rank(1),
    })
}

proptest! {
    #[test]
    fn null_block_is_block_zero_whatever_the_reserve_did(
        pages in 1_u32..40,
        per_page in 1_u64..20,
        max_run in 1_u32..8,
        min in 0_u32..12,
        steps in 0_usize..4,
        others in 0_u32..8,
    ) {
        let reserve = Reserve { min, max: min + 3 };
        let shape = Shape { max_run, reserve, ..Shape::uniform(pages, per_page) };
        let (allocator, mapper) = beneath(shape);
        for _ in 0..steps {
            allocator.replenish().unwrap();
        }
        // Pages that come and go before there is a manager, all but the last.
        let mut early = Vec::new();
        allocator.alloc(others.min(pages), &mut early).unwrap();
        allocator.free(&early).unwrap();
        let mut pool = BlockManager::new(space(shape), Arc::clone(&allocator)).unwrap();
        prop_assert_eq!(allocator.state(PageId(0)), Some(PageState::Used));
        prop_assert!(mapper.mapped().iter().any(|run| run.contains(PageId(0))));
        let rest = pool.available();
        prop_assert!(!pool.alloc(rest).unwrap().contains(&NULL_BLOCK));
        prop_assert_eq!(pool.free(&[NULL_BLOCK]), Err(FreeError::Null));
    }

    /// Two pools that are asked for the same, except that one holds what the other hands out.
    #[test]
    fn holds_keep_their_order_and_their_owner(
        sizes in prop::collection::vec((0_u32..30, 1_u32..7), 1..6),
        gaps in any::<u64>(),
    ) {
        let shape = Shape::uniform(20, 12);
        let (mut pool, mut twin) = (Pool::new(shape).blocks, Pool::new(shape).blocks);
        let scattered: Vec<BlockId> =
            pool.alloc(60).unwrap().into_iter().filter(|b| gaps >> (b.0 % 64) & 1 == 1).collect();
        twin.alloc(60).unwrap();
        pool.free(&scattered).unwrap();
        twin.free(&scattered).unwrap();

        let mut kept = Vec::new();
        for &(n, step) in &sizes {
            kept.push((pool.hold(n).unwrap(), step, twin.alloc(n).unwrap()));
        }
        // Taken bit by bit and in turns, with requests that cannot be met in between.
        while !kept.is_empty() {
            for (hold, step, expected) in &mut kept {
                let n = (*step).min(pool.held(*hold).unwrap());
                let too_many = pool.available() + 1;
                prop_assert!(pool.alloc(too_many).is_err());
                let rest = expected.split_off(usize::try_from(n).unwrap());
                let taken = pool.take_held(*hold, n).unwrap();
                prop_assert_eq!(&taken, &*expected);
                *expected = rest;
            }
            kept.retain(|(_, _, expected)| !expected.is_empty());
        }
    }
}

#[test]
fn uneven_pages_count_only_whole_blocks() {
    const MIB: u64 = 1 << 20;
    // Six pages hold four whole blocks, a seventh one more; the null block is one of them.
    for (pages, usable) in [(6, 3), (7, 4)] {
        let mut pool = Pool::new(Shape::of_bytes(pages, 2 * MIB, 3 * MIB / 2));
        assert_eq!(pool.blocks.available(), usable);
        for _ in 0..usable {
            pool.blocks.alloc(1).unwrap();
        }
        assert_eq!(pool.blocks.alloc(1), Err(full(1, 0, FullReason::Capacity)));
        let without_block = [PageId(1), PageId(4)];
        let mapped = pool.mapper.mapped();
        assert!(
            !mapped
                .iter()
                .any(|run| without_block.iter().any(|&page| run.contains(page)))
        );
        assert_eq!(pool.mapper.mapped_pages(), usable + 1);

        let straddler = FreeError::Straddles { block: BlockId(1) };
        assert_eq!(pool.blocks.free(&[BlockId(3), BlockId(1)]), Err(straddler));
        assert_eq!(pool.blocks.usage().blocks_used, usable);
    }
}

#[test]
fn growth_over_uneven_pages_asks_again_and_gives_all_back_if_it_fails() {
    // Whole blocks per page: 2, 1, 2, 2, 1, 2 of 7/3 bytes; one is the null block.
    let mut pool = Pool::new(Shape::of_bytes(6, 7, 3));
    assert_eq!(pool.blocks.available(), 9);
    let before = pool.look();
    pool.mapper.set_memory_pages(Some(3));
    assert_eq!(
        pool.blocks.alloc(5),
        Err(full(5, 9, FullReason::DeviceMemory))
    );
    assert_eq!(pool.look().of_blocks(), before.of_blocks());
    pool.mapper.set_memory_pages(None);
    assert_eq!(pool.blocks.alloc(9).unwrap().len(), 9);
    assert_eq!(pool.blocks.alloc(1), Err(full(1, 0, FullReason::Capacity)));
}

#[test]
fn exhaustion_is_an_answer_and_blocks_come_again_when_some_are_freed() {
    let mut pool = Pool::new(Shape::uniform(8, 4));
    pool.mapper.set_memory_pages(Some(3));
    let mine = pool.blocks.alloc(11).unwrap();
    let before = pool.look();
    for _ in 0..3 {
        assert_eq!(
            pool.blocks.alloc(1),
            Err(full(1, 20, FullReason::DeviceMemory))
        );
    }
    assert_eq!(
        pool.blocks.alloc(21),
        Err(full(21, 20, FullReason::Capacity))
    );
    pool.limit_pages(4);
    assert_eq!(pool.blocks.alloc(5), Err(full(5, 4, FullReason::Limit)));
    pool.limit_pages(8);
    assert_eq!(pool.look().of_blocks(), before.of_blocks());

    pool.blocks.free(&mine[4..6]).unwrap();
    assert_eq!(pool.blocks.alloc(2).unwrap(), mine[4..6]);
}

#[test]
fn a_broken_mapper_is_not_a_full_pool() {
    let mut pool = Pool::new(Shape::uniform(8, 4));
    let before = pool.look();
    pool.mapper.fail(Call::Map, 0, broken());
    assert_eq!(pool.blocks.alloc(12), Err(AllocError::Broken(broken())));
    assert_eq!(pool.look().of_blocks(), before.of_blocks());
    assert_eq!(
        pool.blocks.available(),
        31,
        "nothing is in doubt, so nothing is lost"
    );

    let doubtful = PageRun::new(PageId(1), 1).unwrap();
    let lost = MapError {
        uncertain: vec![doubtful],
        ..broken()
    };
    pool.mapper.fail(Call::Map, 0, lost.clone());
    assert_eq!(pool.blocks.alloc(12), Err(AllocError::Broken(lost)));
    assert_eq!(
        pool.blocks.available(),
        27,
        "a page in doubt is not available"
    );
    let rest = pool.blocks.alloc(27).unwrap();
    assert!(
        rest.iter()
            .all(|&block| pool.blocks.page_of(block) != Some(PageId(1)))
    );
}

#[test]
fn a_failed_unmap_does_not_fail_the_free_and_nothing_hangs() {
    let mut pool = Pool::new(Shape::uniform(4, 4));
    let mine = pool.blocks.alloc(15).unwrap();
    assert_eq!(
        pool.limit_pages(2),
        LimitStatus::Deferred {
            excess_bytes: 2 * PAGE
        }
    );
    let run = PageRun::new(PageId(3), 1).unwrap();
    pool.mapper.fail(
        Call::Unmap,
        0,
        MapError {
            uncertain: vec![run],
            ..broken()
        },
    );
    pool.blocks.free(&mine[11..]).unwrap();
    let usage = pool.blocks.usage();
    assert_eq!((usage.blocks_used, usage.pages.quarantined), (11, 1));
    assert_eq!(
        usage.pages.limit_status,
        LimitStatus::Deferred {
            excess_bytes: 2 * PAGE
        }
    );
    pool.blocks.free(&mine[..4]).unwrap();
    assert_eq!(
        pool.blocks.alloc(4).unwrap().len(),
        4,
        "free blocks are still had"
    );
}

#[test]
fn a_hold_is_counted_once() {
    let mut pool = Pool::new(Shape::uniform(25, 4));
    pool.blocks.alloc(10).unwrap();
    let hold = pool.blocks.hold(5).unwrap();
    let usage = pool.blocks.usage();
    let counts = (
        usage.blocks_total,
        usage.blocks_used,
        usage.blocks_held,
        usage.blocks_available,
    );
    assert_eq!(counts, (99, 10, 5, 84));
    assert_eq!(
        (usage.used_bytes, usage.held_bytes),
        (10 * PAGE / 4, 5 * PAGE / 4)
    );
    pool.blocks.take_held(hold, 2).unwrap();
    let usage = pool.blocks.usage();
    assert_eq!(
        (usage.blocks_used, usage.blocks_held, usage.blocks_available),
        (12, 3, 84)
    );
}

#[test]
fn a_failed_alloc_leaves_holds_in_order_and_pages_as_they_were() {
    let mut pool = Pool::new(Shape::uniform(3, 4));
    let hold = pool.blocks.hold(2).unwrap();
    pool.mapper.set_memory_pages(Some(2));
    let before = (pool.look().of_blocks().3.to_vec(), pool.mapper.mapped());
    assert_eq!(
        pool.blocks.alloc(10),
        Err(full(10, 9, FullReason::Capacity))
    );
    assert_eq!(
        pool.blocks.alloc(9),
        Err(full(9, 9, FullReason::DeviceMemory))
    );
    assert_eq!(
        pool.blocks.hold(9),
        Err(full(9, 9, FullReason::DeviceMemory))
    );
    assert_eq!(
        (pool.look().of_blocks().3.to_vec(), pool.mapper.mapped()),
        before
    );
    assert_eq!(pool.blocks.take_held(hold, 1).unwrap(), blocks([1]));
    assert_eq!(pool.blocks.take_held(hold, 1).unwrap(), blocks([2]));
}

#[test]
fn a_hold_is_released_whole_and_ends() {
    let mut pool = Pool::new(Shape::uniform(5, 4));
    let hold = pool.blocks.hold(17).unwrap();
    pool.blocks.take_held(hold, 3).unwrap();
    let too_few = HoldError::TooFew {
        hold,
        requested: 15,
        held: 14,
    };
    assert_eq!(pool.blocks.take_held(hold, 15), Err(too_few));
    assert_eq!(pool.blocks.release_hold(hold), Ok(14));
    assert_eq!(
        pool.blocks.usage().pages.used,
        1,
        "emptied pages are given back"
    );
    assert_eq!(pool.blocks.held(hold), None);
    assert_eq!(
        pool.blocks.take_held(hold, 0),
        Err(HoldError::Unknown { hold })
    );
    let next = pool.blocks.hold(0).unwrap();
    assert_ne!(next, hold, "a name is not used again");
}

#[test]
fn nobody_else_gets_or_frees_held_blocks() {
    let mut pool = Pool::new(Shape::uniform(2, 4));
    let hold = pool.blocks.hold(4).unwrap();
    assert_eq!(pool.blocks.alloc(4), Err(full(4, 3, FullReason::Capacity)));
    let mine = pool.blocks.alloc(3).unwrap();
    assert_eq!(pool.blocks.alloc(1), Err(full(1, 0, FullReason::Capacity)));
    let held = FreeError::Held { block: BlockId(2) };
    assert_eq!(pool.blocks.free(&[mine[0], BlockId(2), mine[1]]), Err(held));
    assert_eq!(pool.blocks.usage().blocks_used, 3);
    assert_eq!(pool.blocks.take_held(hold, 4).unwrap(), blocks(1..5));
    pool.blocks.free(&blocks(1..5)).unwrap();
}

#[test]
fn a_block_freed_twice_is_refused_and_changes_nothing() {
    let mut pool = Pool::new(Shape::uniform(4, 16));
    pool.blocks.alloc(20).unwrap();
    let before = pool.look();
    let seven = BlockId(7);
    assert_eq!(
        pool.blocks.free(&[seven, seven]),
        Err(FreeError::NamedTwice { block: seven })
    );
    assert_eq!(pool.look(), before);
    pool.blocks.free(&[seven]).unwrap();
    let after = pool.look();
    let twice = FreeError::NotTaken { block: seven };
    assert_eq!(
        pool.blocks.free(&[BlockId(3), seven, BlockId(18)]),
        Err(twice)
    );
    assert_eq!(pool.look(), after);
    let outside = FreeError::OutOfRange {
        block: BlockId(64),
        blocks: 64,
    };
    assert_eq!(pool.blocks.free(&[BlockId(3), BlockId(64)]), Err(outside));
    assert_eq!(
        pool.blocks.free(&[BlockId(3), NULL_BLOCK]),
        Err(FreeError::Null)
    );
    assert_eq!(pool.look(), after);
    // Each is given once more, and page 0 still becomes empty but for the null block.
    assert_eq!(pool.blocks.alloc(1).unwrap(), [seven]);
    assert_eq!(pool.blocks.clear(), Ok(20));
    assert_eq!(pool.blocks.usage().pages.used, 1);
}

#[test]
fn clear_on_a_half_full_pool_gives_everything_back_but_the_null_block() {
    let mut pool = Pool::new(Shape::uniform(10, 4));
    let initial = pool.blocks.available();
    pool.blocks.alloc(initial / 2).unwrap();
    assert_eq!(pool.blocks.clear(), Ok(initial / 2));
    assert_eq!(pool.blocks.available(), initial);
    assert_eq!(pool.blocks.free(&[NULL_BLOCK]), Err(FreeError::Null));
    let mut all = pool.blocks.alloc(initial).unwrap();
    all.sort();
    assert_eq!(all, blocks(1..40));
}

#[test]
fn clear_keeps_holds() {
    let mut pool = Pool::new(Shape::uniform(10, 4));
    pool.blocks.alloc(5).unwrap();
    let hold = pool.blocks.hold(3).unwrap();
    pool.blocks.alloc(9).unwrap();
    assert_eq!(pool.blocks.clear(), Ok(14));
    assert_eq!(
        pool.blocks.usage().pages.used,
        3,
        "null block, and holds on pages 1 and 2"
    );
    assert_eq!(pool.blocks.take_held(hold, 3).unwrap(), blocks([6, 7, 8]));
}

#[test]
fn clear_ends_where_nothing_can_be_mapped() {
    let mut pool = Pool::new(Shape::uniform(4, 4));
    pool.blocks.alloc(15).unwrap();
    pool.limit_pages(0);
    pool.mapper.set_memory_pages(Some(0));
    pool.mapper.set_before(|_, _| Err(broken()));
    assert_eq!(pool.blocks.clear(), Ok(15));
    assert_eq!(pool.blocks.clear(), Ok(0));
    assert_eq!(
        pool.blocks.alloc(3).unwrap(),
        blocks(1..4),
        "what the null block's page has"
    );
    // The failed unmap left the pages warm, so they are used again as soon as they may be.
    pool.limit_pages(4);
    assert_eq!(pool.blocks.alloc(12).unwrap().len(), 12);
}

#[test]
fn a_deferred_limit_is_applied_when_the_last_excess_page_is_empty_and_not_before() {
    let mut pool = Pool::new(Shape::uniform(10, 4));
    pool.blocks.alloc(39).unwrap();
    assert_eq!(
        pool.limit_pages(7),
        LimitStatus::Deferred {
            excess_bytes: 3 * PAGE
        }
    );
    for (freed, excess) in [(36..39, 3), (39..40, 2), (32..36, 1), (28..31, 1)] {
        pool.blocks.free(&blocks(freed)).unwrap();
        let excess_bytes = excess * PAGE;
        assert_eq!(
            pool.blocks.limit_status(),
            LimitStatus::Deferred { excess_bytes }
        );
    }
    pool.blocks.free(&blocks([31])).unwrap();
    assert_eq!(pool.blocks.limit_status(), LimitStatus::Applied);
    assert_eq!(pool.mapper.mapped_pages(), 7);
    assert_eq!(pool.blocks.available(), 0);
    // And the limit of the start is as good as any other.
    assert_eq!(pool.limit_pages(10), LimitStatus::Applied);
    assert_eq!(pool.blocks.alloc(12).unwrap(), blocks(28..40));
}

#[test]
fn a_limit_of_nothing_stops_growth_and_takes_nothing_away() {
    let mut pool = Pool::new(Shape::uniform(10, 4));
    let mine = pool.blocks.alloc(6).unwrap();
    assert_eq!(
        pool.limit_pages(0),
        LimitStatus::Deferred {
            excess_bytes: 2 * PAGE
        }
    );
    assert_eq!(pool.blocks.available(), 1, "free on a page in use");
    assert_eq!(pool.blocks.alloc(2), Err(full(2, 1, FullReason::Limit)));
    pool.blocks.free(&mine).unwrap();
    assert_eq!(
        pool.blocks.limit_status(),
        LimitStatus::Deferred { excess_bytes: PAGE }
    );
    assert_eq!(pool.blocks.available(), 3, "the null block's page stays");
}

#[test]
fn limits_and_reserve_from_another_thread_leave_every_block_to_its_owner() {
    let shape = Shape {
        reserve: Reserve { min: 2, max: 4 },
        ..Shape::uniform(32, 4)
    };
    let mut pool = Pool::new(shape);
    let pages = Arc::clone(&pool.pages);
    std::thread::scope(|scope| {
        let other = scope.spawn(move || {
            for revision in 1..400 {
                let bytes = revision * 7 % 33 * PAGE;
                pages.set_limit(Limit { bytes, revision }).unwrap();
                pages.replenish().unwrap();
            }
        });
        let mut mine: Vec<BlockId> = Vec::new();
        for turn in 0.. {
            match pool.blocks.alloc_into(turn % 23, &mut mine) {
                Ok(()) | Err(AllocError::Full { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            let mapped = pool.mapper.mapped();
            for &block in &mine {
                let page = pool.blocks.page_of(block).unwrap();
                assert!(mapped.iter().any(|run| run.contains(page)));
            }
            if turn % 3 == 2 {
                pool.blocks.free(&mine).unwrap();
                mine.clear();
            }
            if other.is_finished() {
                break;
            }
        }
    });
    pool.blocks.clear().unwrap();
    let status = pool.blocks.set_limit(Limit {
        bytes: 32 * PAGE,
        revision: 400,
    });
    assert_eq!(status, Ok(LimitStatus::Applied));
    assert_eq!(pool.mapper.violations(), []);
    let usage = pool.blocks.usage();
    assert_eq!((usage.pages.used, usage.blocks_used), (1, 0));
}

#[test]
fn pages_given_back_behind_the_manager_are_an_error_and_change_nothing() {
    let mut pool = Pool::new(Shape::uniform(4, 4));
    let mine = pool.blocks.alloc(7).unwrap();
    let hold = pool.blocks.hold(4).unwrap();
    pool.pages.free(&[PageId(1), PageId(2)]).unwrap();
    let before = pool.look();
    assert!(matches!(pool.blocks.free(&mine), Err(FreeError::Pages(_))));
    assert!(matches!(pool.blocks.clear(), Err(FreeError::Pages(_))));
    let released = pool.blocks.release_hold(hold);
    assert!(matches!(
        released,
        Err(HoldError::Free(FreeError::Pages(_)))
    ));
    assert_eq!(pool.look(), before);
    pool.blocks.free(&mine[..3]).unwrap();
}

#[test]
fn blocks_and_pages_of_different_pools_make_no_manager() {
    let shape = Shape::uniform(4, 4);
    let (pages, _) = beneath(shape);
    let other = space(Shape::uniform(5, 4));
    let refused = BlockManager::new(other, Arc::clone(&pages)).unwrap_err();
    assert_eq!(
        refused,
        NewError::PageCount {
            blocks: 5,
            pages: 4
        }
    );
    let void = space(Shape::of_bytes(4, 4, 3));
    let refused = BlockManager::new(void, Arc::clone(&pages)).unwrap_err();
    assert_eq!(refused, NewError::Void { page: PageId(1) });

    let config = PageAllocatorConfig {
        void: vec![PageId(2)],
        runs: RunPolicy::up_to(NonZeroU32::MIN),
        ..PageAllocatorConfig::new(4, PAGE)
    };
    let pages_with_void =
        Arc::new(PageAllocator::new(config, Arc::new(RecordingMapper::new(4))).unwrap());
    let refused = BlockManager::new(space(shape), pages_with_void).unwrap_err();
    assert_eq!(refused, NewError::Void { page: PageId(2) });

    let first = BlockManager::new(space(shape), Arc::clone(&pages)).unwrap();
    let second = BlockManager::new(space(shape), pages).unwrap_err();
    assert!(
        matches!(second, NewError::NullBlock(_)),
        "page 0 has an owner"
    );
    assert_eq!(first.available(), 15);
}

#[test]
fn a_pool_without_memory_for_the_null_block_makes_no_manager_and_loses_nothing() {
    let shape = Shape::uniform(4, 4);
    let (pages, mapper) = beneath(shape);
    mapper.fail(Call::Map, 0, broken());
    let refused = BlockManager::new(space(shape), Arc::clone(&pages)).unwrap_err();
    assert!(matches!(refused, NewError::NullBlock(_)));
    let pool = BlockManager::new(space(shape), pages).unwrap();
    assert_eq!(pool.available(), 15);
}
