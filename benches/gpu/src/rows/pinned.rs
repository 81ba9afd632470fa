//! Survivors: blocks that stay while all around them are freed, and the memory that they hold fast.

use kvcached_integrations::Background;
use kvcached_mapper::{Layout, PageSize};
use kvcached_vmm::Driver;

use crate::Outcome;
use crate::report::{Row, bytes};
use crate::rows::{Bench, Rows};
use crate::shape::{self, BUNDLE_BYTES, CAPACITY_BYTES, NO_RESERVE, POOL, Settings};

const BLOCKS: u32 = 16384;
const EVERY: [u32; 4] = [2, 4, 8, 16];

/// The settings that are compared, with what names of rows end in.
const POLICIES: [(&str, &str, Settings<'_>); 3] = [
    ("", "default lengths of runs", NO_RESERVE),
    (
        "-8mib",
        "runs of at most 8 MiB",
        &[
            ("KVCACHED_MIN_RESERVED_PAGES", "0"),
            ("KVCACHED_MAX_RESERVED_PAGES", "0"),
            ("KVCACHED_MAX_RUN_BYTES", "8MiB"),
            ("KVCACHED_BULK_RUN_BYTES", "8MiB"),
        ],
    ),
    (
        "-single",
        "runs of one page",
        &[
            ("KVCACHED_MIN_RESERVED_PAGES", "0"),
            ("KVCACHED_MAX_RESERVED_PAGES", "0"),
            ("KVCACHED_MAX_RUN_PAGES", "1"),
        ],
    ),
];

/// Allocates many blocks, keeps every so many'th, trims, and compares what is mapped with what is
/// held.
pub(crate) fn survivors<D: Driver>(bench: &Bench<D>, rows: Rows<'_>) -> Outcome {
    let blocks = bench.blocks(BLOCKS);
    for (suffix, policy, settings) in POLICIES {
        for every in EVERY {
            let spec = shape::spec(Layout::Contiguous, PageSize::Auto, CAPACITY_BYTES);
            let engine = shape::engine(&bench.driver, spec, settings, Background::Off)?;
            let pool = engine.pool(POOL).ok_or("no pool")?;
            let mut mine = pool.alloc(blocks)?;
            mine.sort_unstable();
            let (kept, freed): (Vec<_>, Vec<_>) = (0..)
                .zip(mine)
                .partition(|(index, _): &(u32, _)| index % every == 0);
            let freed: Vec<_> = freed.into_iter().map(|(_, block)| block).collect();
            pool.free(&freed)?;
            pool.trim()?;
            // The null block is held, too.
            let held = bytes(u64::from(u32::try_from(kept.len())? + 1) * BUNDLE_BYTES);
            let mapped = pool.usage().pages.mapped_bytes;
            let before = bench.driver.memory()?.free;
            drop(engine);
            let given_back = bench.driver.memory()?.free.saturating_sub(before);
            let name = format!("pinned-{every}{suffix}");
            let note = format!("{blocks} blocks, every {every}th kept, {policy}; pages");
            let mut row = Row::new(&name, "ratio", note).beside(format!("pinned-{every}"));
            row.push_pair(bytes(mapped) / held, 1.0);
            let note = "the same by what the device has more once the pool is gone";
            let mut card = Row::new(format!("{name}:device"), "ratio", note);
            card.push(bytes(given_back) / held);
            rows.extend([row, card]);
        }
    }
    Ok(())
}
