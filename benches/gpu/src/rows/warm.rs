//! Blocks while memory is there: bookkeeping, and no driver call.

use std::hint::black_box;
use std::sync::Arc;

use kvcached_integrations::Background;
use kvcached_manager::{BlockManager, BlockSpace};
use kvcached_mapper::{Cold, Layout, LocalMapper, PageSize};
use kvcached_page_alloc::{PageAllocator, PageAllocatorConfig};
use kvcached_vmm::Driver;

use crate::Outcome;
use crate::clock::timed;
use crate::report::Row;
use crate::rows::{Bench, Rows, settle};
use crate::shape::{self, CAPACITY_BYTES, POOL};

/// Blocks of a call, and how often.
const DEMANDS: [(u32, usize); 3] = [(1, 2000), (64, 2000), (256, 1000)];
/// Calls that are not counted.
const BEFORE: usize = 100;
/// Questions of one sample, which alone would be shorter than a look at the clock.
const QUESTIONS: u32 = 1000;

/// Allocates and frees blocks whose memory stays: by the block manager, and by a pool of an engine
/// with its defaults.
pub(crate) fn alloc_and_free<D: Driver>(bench: &Bench<D>, rows: Rows<'_>) -> Outcome {
    let mut blocks = manager(bench)?;
    for (demand, count) in DEMANDS {
        let mut row = Row::micros(
            format!("warm-{demand}"),
            "contiguous; the block manager's alloc and free of one call, memory there",
        );
        for sample in 0..bench.samples(count) + BEFORE {
            let (result, micros) = timed(|| -> Outcome {
                let mine = blocks.alloc(demand)?;
                Ok(blocks.free(black_box(&mine))?)
            });
            result?;
            if sample >= BEFORE {
                row.push(micros);
            }
        }
        rows.push(row);
    }
    let spec = shape::spec(Layout::Contiguous, PageSize::Auto, CAPACITY_BYTES);
    let engine = shape::engine(&bench.driver, spec, &[], Background::default())?;
    let pool = engine.pool(POOL).ok_or("no pool")?;
    for (demand, count) in DEMANDS {
        let mut row = Row::micros(
            format!("warm-{demand}-pool"),
            "contiguous; the same by an engine's pool with its defaults: lock, reserve and thread",
        )
        .beside(format!("warm-{demand}"));
        for sample in 0..bench.samples(count) + BEFORE {
            let (result, micros) = timed(|| -> Outcome {
                let mine = pool.alloc(demand)?;
                Ok(pool.free(black_box(&mine))?)
            });
            result?;
            if sample == BEFORE {
                settle(pool)?;
            }
            if sample >= BEFORE {
                row.push(micros);
            }
        }
        rows.push(row);
    }
    Ok(())
}

/// How many blocks there are, as an engine asks before each step.
pub(crate) fn available<D: Driver>(bench: &Bench<D>, rows: Rows<'_>) -> Outcome {
    let mut blocks = manager(bench)?;
    let _mine = blocks.alloc(321)?;
    let mut row = Row::micros(
        "available",
        "the block manager's answer; each sample the mean of 1000",
    )
    .beside("available-size");
    for _ in 0..bench.samples(500) {
        let ((), micros) = timed(|| {
            for _ in 0..QUESTIONS {
                black_box(black_box(&blocks).available());
            }
        });
        row.push(micros / f64::from(QUESTIONS));
    }
    rows.push(row);
    Ok(())
}

/// A block manager over memory of the device.
fn manager<D: Driver>(bench: &Bench<D>) -> Outcome<BlockManager> {
    let spec = shape::spec(Layout::Contiguous, PageSize::Auto, CAPACITY_BYTES);
    let geometry = spec.resolve(bench.driver.properties().granularity)?;
    let mapper = LocalMapper::new(Arc::clone(&bench.driver), geometry.clone(), Cold::Unbacked)?;
    let config = PageAllocatorConfig::new(geometry.pages(), geometry.bundle_bytes());
    let pages = PageAllocator::new(config, Arc::new(mapper))?;
    Ok(BlockManager::new(
        BlockSpace::from(&geometry),
        Arc::new(pages),
    )?)
}
