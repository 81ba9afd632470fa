//! Pages through `PageAllocator` over a mapper that does nothing, so that only the books are
//! measured. Nothing here may depend on the size of the pool.

mod nothing;

use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvcached_mapper::{After, Epoch, PageId};
use kvcached_page_alloc::{PageAllocator, PageAllocatorConfig, RunPolicy};

use crate::nothing::Nothing;

const POOLS: [u32; 2] = [1_000, 1_000_000];
const DEMANDS: [u32; 3] = [1, 16, 256];

fn pool(pages: u32, max_run: u32) -> PageAllocator {
    let config = PageAllocatorConfig {
        runs: RunPolicy::up_to(NonZeroU32::new(max_run).expect("a run has pages")),
        ..PageAllocatorConfig::new(pages, 2 << 20)
    };
    PageAllocator::new(config, Arc::new(Nothing)).expect("a good config")
}

/// All pages of the pool, which are backed from then on.
fn take_all(pool: &PageAllocator) -> Vec<PageId> {
    let mut all = Vec::new();
    pool.alloc(pool.available(), &mut all)
        .expect("the mapper does nothing");
    all
}

/// The same pages in an order without pattern.
fn shuffled(mut pages: Vec<PageId>) -> Vec<PageId> {
    let mut random = 1_u64;
    for last in (1..pages.len()).rev() {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let other = usize::try_from(random >> 33).expect("31 bits") % (last + 1);
        pages.swap(last, other);
    }
    pages
}

/// Allocates and frees `n` pages over and over.
fn alloc_free(c: &mut Criterion, name: &str, prepare: impl Fn(u32) -> PageAllocator) {
    let mut group = c.benchmark_group(name);
    for pages in POOLS {
        let pool = prepare(pages);
        for n in DEMANDS {
            group.throughput(Throughput::Elements(u64::from(n)));
            group.bench_function(BenchmarkId::new(format!("pool_{pages}"), n), |b| {
                let mut mine = Vec::new();
                b.iter(|| {
                    pool.alloc(n, &mut mine).expect("there are warm pages");
                    pool.free(black_box(&mine)).expect("pages in use");
                    mine.clear();
                });
            });
        }
    }
    group.finish();
}

/// The hot path: every page of the pool is warm, in runs of 64.
fn warm(c: &mut Criterion) {
    alloc_free(c, "warm", |pages| {
        let pool = pool(pages, 64);
        let all = take_all(&pool);
        pool.free(&all).expect("pages in use");
        pool
    });
}

/// The hot path of an engine that counts what it launches, with one epoch in flight.
fn warm_epochs(c: &mut Criterion) {
    let mut group = c.benchmark_group("warm_epochs");
    for pages in POOLS {
        let pool = pool(pages, 64);
        let all = take_all(&pool);
        pool.free_after(&all, After::NOTHING).expect("pages in use");
        for n in DEMANDS {
            group.throughput(Throughput::Elements(u64::from(n)));
            group.bench_function(BenchmarkId::new(format!("pool_{pages}"), n), |b| {
                let mut mine = Vec::new();
                let mut epoch = 0;
                b.iter(|| {
                    pool.alloc(n, &mut mine).expect("there are warm pages");
                    pool.free_after(black_box(&mine), After::epoch(Epoch(epoch + 1)))
                        .expect("pages in use");
                    mine.clear();
                    pool.retire(Epoch(epoch));
                    epoch += 1;
                });
            });
        }
    }
    group.finish();
}

/// Warm pages scattered over partly used runs: half of the pool is in use, at random.
fn warm_scattered(c: &mut Criterion) {
    alloc_free(c, "warm_scattered", |pages| {
        let pool = pool(pages, 64);
        let all = shuffled(take_all(&pool));
        pool.free(&all[..all.len() / 2]).expect("pages in use");
        pool
    });
}

/// A working set that turns over: what is freed is a random part of what is in use.
fn warm_churn(c: &mut Criterion) {
    let mut group = c.benchmark_group("warm_churn");
    for pages in POOLS {
        let pool = pool(pages, 64);
        let mut mine = std::collections::VecDeque::from(shuffled(take_all(&pool)));
        let quarter = mine.len() / 4;
        pool.free(&mine.drain(..quarter).collect::<Vec<_>>())
            .expect("pages in use");
        for n in DEMANDS {
            if n as usize > quarter {
                continue;
            }
            group.throughput(Throughput::Elements(u64::from(n)));
            group.bench_function(BenchmarkId::new(format!("pool_{pages}"), n), |b| {
                let mut moving = Vec::new();
                b.iter(|| {
                    moving.extend(mine.drain(..n as usize));
                    pool.free(&moving).expect("pages in use");
                    moving.clear();
                    pool.alloc(n, &mut moving).expect("there are warm pages");
                    mine.extend(moving.drain(..));
                });
            });
        }
    }
    group.finish();
}

/// Growth and return: cold pages are mapped, freed and unmapped again.
fn cold(c: &mut Criterion, name: &str, prepare: impl Fn(u32) -> PageAllocator) {
    let mut group = c.benchmark_group(name);
    for pages in POOLS {
        let pool = prepare(pages);
        for n in DEMANDS {
            group.throughput(Throughput::Elements(u64::from(n)));
            group.bench_function(BenchmarkId::new(format!("pool_{pages}"), n), |b| {
                let mut mine = Vec::new();
                b.iter(|| {
                    pool.alloc(n, &mut mine).expect("there are cold pages");
                    pool.free(&mine).expect("pages in use");
                    mine.clear();
                    pool.trim().expect("the mapper does nothing")
                });
            });
        }
    }
    group.finish();
}

/// Cold pages side by side: long runs.
fn cold_contiguous(c: &mut Criterion) {
    cold(c, "cold_contiguous", |pages| pool(pages, 64));
}

/// No two cold pages side by side, the worst there is: every page is a run of its own.
fn cold_fragmented(c: &mut Criterion) {
    cold(c, "cold_fragmented", |pages| {
        let pool = pool(pages, 1);
        let all = take_all(&pool);
        let odd: Vec<PageId> = all.into_iter().filter(|page| page.0 % 2 == 1).collect();
        pool.free(&odd).expect("pages in use");
        pool.trim().expect("the mapper does nothing");
        pool
    });
}

/// What callers look at often.
fn looks(c: &mut Criterion) {
    let pool = pool(1_000_000, 64);
    c.bench_function("available", |b| b.iter(|| black_box(&pool).available()));
    c.bench_function("usage", |b| b.iter(|| black_box(&pool).usage()));
}

criterion_group!(
    benches,
    warm,
    warm_epochs,
    warm_scattered,
    warm_churn,
    cold_contiguous,
    cold_fragmented,
    looks
);
criterion_main!(benches);
