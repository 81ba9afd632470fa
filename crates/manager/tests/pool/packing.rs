//! Which page a block comes from, and what that is worth: memory comes back page by page.

use kvcached_manager::BlockId;
use kvcached_mapper::PageId;

use crate::support::{Pool, Shape, blocks};

/// A pool of `pages` pages of 16 blocks, all of them handed out.
fn full_pool(pages: u32) -> Pool {
    let mut pool = Pool::new(Shape::uniform(pages, 16));
    let all = pool.blocks.available();
    pool.blocks.alloc(all).unwrap();
    pool
}

/// Frees all blocks of `page` that are not among its first `kept`; page 0 counts the null block.
fn thin(pool: &mut Pool, page: u32, kept: u32) {
    pool.blocks
        .free(&blocks(page * 16 + kept..(page + 1) * 16))
        .unwrap();
}

#[test]
fn a_page_where_all_fit_is_taken_and_of_those_the_fullest() {
    let mut pool = full_pool(4);
    thin(&mut pool, 1, 7);
    thin(&mut pool, 2, 14);
    thin(&mut pool, 3, 11);
    assert_eq!(
        pool.blocks.alloc(4).unwrap(),
        blocks(59..63),
        "five free, nearest to four"
    );
    assert_eq!(
        pool.blocks.alloc(9).unwrap(),
        blocks(23..32),
        "nine free, exactly"
    );
    assert_eq!(
        pool.blocks.alloc(1).unwrap(),
        blocks([63]),
        "the fullest of all"
    );
    assert_eq!(pool.blocks.alloc(2).unwrap(), blocks([46, 47]));
    assert_eq!(pool.blocks.available(), 0);
}

#[test]
fn when_no_page_has_room_for_all_the_fullest_are_filled_first() {
    let mut pool = full_pool(4);
    thin(&mut pool, 1, 8);
    thin(&mut pool, 2, 14);
    thin(&mut pool, 3, 11);
    let mapped = pool.mapper.calls().map;
    let got = pool.blocks.alloc(12).unwrap();
    assert_eq!(
        got,
        blocks([46, 47].into_iter().chain(59..64).chain(24..29))
    );
    assert_eq!(pool.mapper.calls().map, mapped, "no page was asked for");
}

#[test]
fn refill_goes_to_the_fullest_pages_and_sparse_ones_drain() {
    let mut pool = full_pool(16);
    // One in two blocks stays on the first eight pages, one in sixteen on the others.
    for page in 0..8 {
        thin(&mut pool, page, 8);
    }
    for page in 8..16 {
        thin(&mut pool, page, 1);
    }
    let refill = pool.blocks.alloc(64).unwrap();
    assert!(refill.iter().all(|block| block.0 < 8 * 16), "{refill:?}");

    let sparse = (8..16).map(|page| page * 16);
    pool.blocks.free(&blocks(sparse)).unwrap();
    assert_eq!(pool.blocks.usage().pages.used, 8);
    assert_eq!(pool.blocks.trim(), Ok(8));
    assert_eq!(pool.mapper.mapped_pages(), 8);
}

#[test]
fn eviction_by_occupancy_leaves_at_most_1_4_times_the_pages_that_are_needed() {
    let mut pool = full_pool(256);
    // What a prefix cache looks like after a while: one block in three is gone, anywhere.
    let cached = 256 * 16 - 1;
    let holes = (1..=cached).filter(|block| block * 7919 % 3 == 0);
    pool.blocks.free(&blocks(holes)).unwrap();

    let keep = pool.blocks.usage().blocks_used / 10;
    while pool.blocks.usage().blocks_used > keep {
        let emptiest = pool
            .blocks
            .occupancy()
            .filter(|page| page.page != PageId(0));
        let page = emptiest.min_by_key(|page| page.used).unwrap().page;
        let victims = pool.blocks.space().blocks_in(page).map(BlockId);
        for victim in victims {
            // Free already, or evicted.
            let _ = pool.blocks.free(&[victim]);
        }
    }
    pool.blocks.trim().unwrap();
    let usage = pool.blocks.usage();
    let floor = (usage.blocks_used + 1).div_ceil(16);
    let mapped = pool.mapper.mapped_pages();
    assert!(
        mapped * 10 <= floor * 14 + 10,
        "{mapped} pages for what fits on {floor}"
    );
}

#[test]
fn growth_is_one_call_with_the_longest_runs() {
    let mut pool = Pool::new(Shape {
        max_run: 64,
        ..Shape::uniform(129, 4)
    });
    let before = pool.mapper.calls();
    let got = pool.blocks.alloc(3 + 128 * 4).unwrap();
    assert_eq!(
        got,
        blocks(1..129 * 4),
        "in order, since nothing was taken before"
    );
    let after = pool.mapper.calls();
    assert_eq!(
        (
            after.map - before.map,
            after.runs_mapped - before.runs_mapped
        ),
        (1, 2)
    );
}

#[test]
fn an_empty_page_is_given_back_and_serves_again_without_the_mapper() {
    let mut pool = Pool::new(Shape::uniform(4, 8));
    let first = pool.blocks.alloc(7).unwrap();
    let second = pool.blocks.alloc(8).unwrap();
    let before = pool.mapper.calls();
    // In any order, and both pages in one call.
    let mut all: Vec<BlockId> = second.iter().chain(&first).rev().copied().collect();
    all.swap(0, 14);
    pool.blocks.free(&all).unwrap();
    let usage = pool.blocks.usage().pages;
    assert_eq!(
        (usage.used, usage.warm),
        (1, 1),
        "the null block keeps its page"
    );
    assert_eq!(pool.blocks.alloc(15).unwrap().len(), 15);
    assert_eq!(pool.mapper.calls(), before);
}

#[test]
fn occupancy_tells_used_and_total_of_pages_in_use() {
    // Whole blocks per page: 2, 1, 2, 2 of 7/3 bytes.
    let mut pool = Pool::new(Shape::of_bytes(4, 7, 3));
    assert_eq!(pool.blocks.alloc(2).unwrap(), blocks([1, 3]));
    let seen: Vec<_> = pool
        .blocks
        .occupancy()
        .map(|page| (page.page.0, page.used, page.total))
        .collect();
    assert_eq!(seen, [(0, 2, 2), (1, 1, 1)]);
    let idle = pool.blocks.occupancy_of(PageId(2)).unwrap();
    assert_eq!((idle.used, idle.total), (0, 2));
    assert_eq!(pool.blocks.occupancy_of(PageId(4)), None);
    assert_eq!(pool.blocks.page_of(BlockId(3)), Some(PageId(1)));
    assert_eq!(
        pool.blocks.page_of(BlockId(2)),
        None,
        "it straddles pages 0 and 1"
    );
    assert_eq!(pool.blocks.page_of(BlockId(9)), None);
}
