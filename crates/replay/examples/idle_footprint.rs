//! What a pool still backs after staggered decode beside a bounded cache, over what would do:
//!
//! ```sh
//! cargo run --release -p kvcached-replay --example idle_footprint
//! ```
#![expect(clippy::print_stdout, reason = "the table is what this is for")]

use std::num::NonZeroU32;
use std::sync::Arc;

use kvcached_manager::{BlockManager, BlockSpace};
use kvcached_mapper::testing::RecordingMapper;
use kvcached_page_alloc::{PageAllocator, PageAllocatorConfig, RunPolicy};
use kvcached_replay::{Footprint, IdleFootprint};

/// Runs of up to `longest` pages, and of no more than `1 / share` of the demand.
fn run(blocks_per_page: u32, (longest, share): (u32, u32), seed: u64, window: u32) -> Footprint {
    let number = |number| NonZeroU32::new(number).expect("not zero");
    const PAGE: u64 = 2 << 20;
    let pages = 4_096 / blocks_per_page + 1;
    let config = PageAllocatorConfig {
        runs: RunPolicy {
            share: number(share),
            ..RunPolicy::up_to(number(longest))
        },
        ..PageAllocatorConfig::new(pages, PAGE)
    };
    let mapper = Arc::new(RecordingMapper::new(pages));
    let allocator = PageAllocator::new(config, mapper).expect("a good configuration");
    let space = BlockSpace::new(pages, PAGE, PAGE / u64::from(blocks_per_page)).expect("even");
    let mut pool = BlockManager::new(space, Arc::new(allocator)).expect("the same pages");
    let staggered = IdleFootprint {
        window,
        ..IdleFootprint::new(seed)
    };
    staggered.run(&mut pool).expect("room for all")
}

fn main() {
    println!(
        "blocks a page | pages a run | share | window | over floor, seeds 0 to 7 | mean | hit rate"
    );
    for blocks_per_page in [2, 16, 64] {
        // The third is what a contiguous pool of an 8B model has by default.
        for runs in [(1, 1), (16, 1), (16, 8)] {
            for window in [0, 1_000] {
                let all: Vec<Footprint> = (0..8)
                    .map(|seed| run(blocks_per_page, runs, seed, window))
                    .collect();
                let ratios: Vec<f64> = all.iter().map(Footprint::over_floor).collect();
                let list: Vec<String> = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
                let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / 8.0;
                println!(
                    "{blocks_per_page:13} | {:11} | 1/{:<3} | {window:6} | {} | {:.3} | {:.4}",
                    runs.0,
                    runs.1,
                    list.join(" "),
                    mean(&mut ratios.into_iter()),
                    mean(&mut all.iter().map(Footprint::hit_rate)),
                );
            }
        }
    }
}
