//! What an engine that has become idle still holds: staggered decode beside a bounded cache of
//! blocks, and the memory that the cached blocks keep from going back.

use kvcached_mapper::{Layout, PageSize};
use kvcached_replay::IdleFootprint;
use kvcached_vmm::Driver;

use crate::Outcome;
use crate::report::Row;
use crate::rows::{Bench, Rows};
use crate::shape;

/// Addresses of the pool, a multiple of what runs at once and is cached.
const POOL_BYTES: u64 = 16 << 30;

/// Runs staggered decode to its end, trims, and compares the pages that are backed with the fewest
/// that would hold what is cached.
pub(crate) fn idle<D: Driver>(bench: &Bench<D>, rows: Rows<'_>) -> Outcome {
    for (layout, name) in [
        (Layout::PerLayer, "staggered-idle"),
        (Layout::Contiguous, "staggered-idle-contiguous"),
    ] {
        let mut blocks_a_page = 0;
        let mut row = Row::new(name, "ratio", "").beside("staggered-idle");
        let mut hits = Row::new(
            format!("{name}:hit-rate"),
            "ratio",
            "the part of the shared blocks that the cache had",
        );
        for seed in 0..3 {
            let spec = shape::spec(layout, PageSize::Auto, POOL_BYTES);
            let mut blocks = bench.blocks_of(spec, &[])?;
            blocks_a_page = blocks.space().max_blocks_per_page();
            let footprint = IdleFootprint::new(seed).run(&mut blocks)?;
            row.push_pair(footprint.over_floor(), 1.0);
            hits.push(footprint.hit_rate());
        }
        row.note = format!(
            "{layout}, {blocks_a_page} blocks a page; 1200 requests, 16 at once, 1000 blocks cached, \
             then idle and trimmed: backed pages over the fewest that hold the cached blocks"
        );
        rows.extend([row, hits]);
    }
    Ok(())
}
