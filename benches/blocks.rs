//! Blocks through `BlockManager` over a mapper that does nothing and pages that are warm: what
//! an engine pays for bookkeeping, step by step. Nothing here may depend on the size of the pool.
//!
//! Two geometries of the same 8B model with blocks of 16 tokens: `64_a_page` is its per-layer
//! layout (32 KiB in pages of 2 MiB), `1_a_page` its contiguous one (every block a page).

mod nothing;

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
};
use kvcached_manager::{BlockId, BlockManager, BlockSpace};
use kvcached_page_alloc::{PageAllocator, PageAllocatorConfig};

use crate::nothing::Nothing;

const PAGE_BYTES: u64 = 2 << 20;
const PER_PAGE: [u32; 2] = [64, 1];
const POOLS: [u32; 3] = [1_000, 100_000, 1_000_000];
const DEMANDS: [u32; 7] = [1, 16, 64, 256, 1024, 4096, 16384];

/// A pool of about `blocks` blocks, nothing of it backed but the null block's page.
fn pool(blocks: u32, per_page: u32) -> BlockManager {
    let pages = blocks.div_ceil(per_page);
    let space = BlockSpace::new(pages, PAGE_BYTES, PAGE_BYTES / u64::from(per_page));
    let config = PageAllocatorConfig::new(pages, PAGE_BYTES);
    let allocator = PageAllocator::new(config, Arc::new(Nothing)).expect("a good config");
    let space = space.expect("a page has blocks");
    BlockManager::new(space, Arc::new(allocator)).expect("the same pool")
}

/// The same with pages warm for `blocks` blocks more.
fn warm_pool(blocks: u32, per_page: u32, warm: u32) -> BlockManager {
    let mut pool = pool(blocks, per_page);
    let warmed = pool.alloc(warm).expect("the mapper does nothing");
    pool.free(&warmed).expect("handed out");
    pool
}

/// The same blocks in an order without pattern.
fn shuffled(mut blocks: Vec<BlockId>) -> Vec<BlockId> {
    let mut random = 1_u64;
    for last in (1..blocks.len()).rev() {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let other = usize::try_from(random >> 33).expect("31 bits") % (last + 1);
        blocks.swap(last, other);
    }
    blocks
}

/// Allocates and frees `n` blocks over and over, into the same buffer.
fn alloc_and_free(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: String,
    pool: &mut BlockManager,
    n: u32,
) {
    group.throughput(Throughput::Elements(u64::from(n)));
    group.bench_function(BenchmarkId::new(name, n), |b| {
        let mut mine = Vec::new();
        b.iter(|| {
            pool.alloc_into(n, &mut mine).expect("there is room");
            pool.free(black_box(&mine)).expect("handed out");
            mine.clear();
        });
    });
}

/// The hot path: warm pages, none of them partly used but the null block's.
fn alloc_free(c: &mut Criterion) {
    let mut group = c.benchmark_group("alloc_free");
    for per_page in PER_PAGE {
        for blocks in POOLS {
            for n in DEMANDS.into_iter().filter(|&n| n < blocks) {
                let mut pool = warm_pool(blocks, per_page, n);
                let name = format!("{per_page}_a_page/pool_{blocks}");
                alloc_and_free(&mut group, name, &mut pool, n);
            }
        }
    }
    group.finish();
}

/// The same, for callers that take a new `Vec` each time.
fn alloc_free_vec(c: &mut Criterion) {
    let mut group = c.benchmark_group("alloc_free_vec");
    for per_page in PER_PAGE {
        for n in [1, 64, 1024] {
            let mut pool = warm_pool(POOLS[1], per_page, n);
            group.throughput(Throughput::Elements(u64::from(n)));
            group.bench_function(BenchmarkId::new(format!("{per_page}_a_page"), n), |b| {
                b.iter(|| {
                    let mine = pool.alloc(n).expect("there is room");
                    pool.free(black_box(&mine)).expect("handed out");
                });
            });
        }
    }
    group.finish();
}

/// Every page partly used: one in 2 or one in 16 blocks of the whole pool is kept.
fn fragmented(c: &mut Criterion) {
    let mut group = c.benchmark_group("fragmented");
    for blocks in [POOLS[1], POOLS[2]] {
        for kept in [2, 16] {
            let mut pool = pool(blocks, 64);
            let all = pool
                .alloc(pool.available())
                .expect("the mapper does nothing");
            let freed: Vec<BlockId> = all.into_iter().filter(|b| b.0 % kept != 0).collect();
            pool.free(&freed).expect("handed out");
            for n in [1, 64, 256, 1024, 16384] {
                let name = format!("one_in_{kept}_kept/pool_{blocks}");
                alloc_and_free(&mut group, name, &mut pool, n);
            }
        }
    }
    group.finish();
}

/// Requests of `n` blocks that come and go in turn, in a pool three quarters full whose blocks
/// were freed in no order: no block and no page is near the last one in memory.
fn churn(c: &mut Criterion) {
    let mut group = c.benchmark_group("churn");
    for per_page in PER_PAGE {
        for blocks in [POOLS[1], POOLS[2]] {
            let mut pool = pool(blocks, per_page);
            let all = pool
                .alloc(pool.available())
                .expect("the mapper does nothing");
            let mut all = VecDeque::from(shuffled(all));
            let quarter: Vec<BlockId> = all.drain(..all.len() / 4).collect();
            pool.free(&quarter).expect("handed out");
            for n in [1_usize, 64, 1024] {
                let demand = u32::try_from(n).expect("a small number");
                group.throughput(Throughput::Elements(u64::from(demand)));
                let name = format!("{per_page}_a_page/pool_{blocks}");
                group.bench_function(BenchmarkId::new(name, n), |b| {
                    let mut moving = Vec::new();
                    b.iter(|| {
                        moving.extend(all.drain(..n));
                        pool.free(&moving).expect("handed out");
                        moving.clear();
                        pool.alloc_into(demand, &mut moving)
                            .expect("as many were freed");
                        all.extend(moving.drain(..));
                    });
                });
            }
        }
    }
    group.finish();
}

/// What an engine asks before every step.
fn available(c: &mut Criterion) {
    let mut group = c.benchmark_group("available");
    for blocks in POOLS {
        let mut pool = warm_pool(blocks, 64, 500);
        let _mine = pool.alloc(321).expect("there is room");
        group.bench_function(BenchmarkId::from_parameter(format!("pool_{blocks}")), |b| {
            b.iter(|| black_box(&pool).available());
        });
    }
    group.finish();
}

fn config() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(50)
}

criterion_group! {
    name = blocks;
    config = config();
    targets = alloc_free, alloc_free_vec, fragmented, churn, available
}
criterion_main!(blocks);
