//! A pool comes to be: how long that takes, and what it costs before anybody has a block.

use std::sync::Arc;

use kvcached_integrations::Background;
use kvcached_mapper::{Cold, Layout, LocalMapper, PageSize};
use kvcached_page_alloc::{PageAllocator, PageAllocatorConfig};
use kvcached_vmm::Driver;

use crate::Outcome;
use crate::clock::timed;
use crate::raw::Raw;
use crate::report::{Row, bytes};
use crate::rows::{Bench, Rows, settle};
use crate::shape::{self, POOL};

/// Layouts that are asked about here; that of one tensor a layer lies between the two.
const LAYOUTS: [Layout; 2] = [Layout::Contiguous, Layout::PerLayer];
/// Addresses of a pool whose cold pages read as zero, each granule of which costs a map.
const ZERO_BYTES: u64 = 8 << 30;

/// Creates the tensors of a pool with addresses for the whole card, beside the bare reservations.
pub(crate) fn pools<D: Driver>(bench: &Bench<D>, rows: Rows<'_>) -> Outcome {
    let card = bench.driver.memory()?.total;
    for (layout, count) in [
        (Layout::Contiguous, 100),
        (Layout::Unified, 50),
        (Layout::PerLayer, 50),
    ] {
        let spec = shape::spec(layout, PageSize::Auto, card);
        let geometry = spec.resolve(bench.driver.properties().granularity)?;
        let mut row = Row::micros(
            format!("create-{layout}"),
            "tensors with addresses for the whole card in a context that is there; floor: the bare \
             reservations",
        );
        for _ in 0..bench.samples(count) {
            let (driver, geometry) = (Arc::clone(&bench.driver), geometry.clone());
            let (mapper, micros) = timed(|| LocalMapper::new(driver, geometry, Cold::Unbacked));
            drop(mapper?);
            let geometry = spec.resolve(bench.driver.properties().granularity)?;
            let (raw, floor) = timed(|| Raw::new(&bench.driver, &geometry));
            drop(raw?);
            row.push_pair(micros, floor);
        }
        rows.push(row);
    }
    Ok(())
}

/// Memory of the device that an empty pool takes, as the device tells it.
pub(crate) fn empty<D: Driver>(bench: &Bench<D>, rows: Rows<'_>) -> Outcome {
    let driver = &bench.driver;
    let card = driver.memory()?.total;
    for layout in LAYOUTS {
        for (cold, name, capacity_bytes) in [
            (Cold::Unbacked, "", card),
            (Cold::Zero, "-zero", ZERO_BYTES),
        ] {
            let spec = shape::spec(layout, PageSize::Auto, capacity_bytes);
            let geometry = spec.resolve(driver.properties().granularity)?;
            let before = driver.memory()?.free;
            let config = PageAllocatorConfig::new(geometry.pages(), geometry.bundle_bytes());
            let mapper = LocalMapper::new(Arc::clone(driver), geometry, cold)?;
            let pool = PageAllocator::new(config, Arc::new(mapper))?;
            let after = driver.memory()?.free;
            drop(pool);
            let mut row = Row::new(
                format!("empty-pool-bytes-{layout}{name}"),
                "bytes",
                format!(
                    "a pool of {capacity_bytes} bytes of addresses without a block; cold pages: \
                     {cold:?}"
                ),
            )
            .beside(format!("empty-pool-bytes-{layout}"));
            row.push(bytes(before.saturating_sub(after)));
            rows.push(row);
        }
        let spec = shape::spec(layout, PageSize::Auto, card);
        let before = driver.memory()?.free;
        let engine = shape::engine(driver, spec, &[], Background::default())?;
        settle(engine.pool(POOL).ok_or("no pool")?)?;
        let after = driver.memory()?.free;
        drop(engine);
        let mut row = Row::new(
            format!("empty-pool-bytes-{layout}-engine"),
            "bytes",
            "an idle engine with its defaults: the page of the null block, and the reserve",
        )
        .beside(format!("empty-pool-bytes-{layout}-default"));
        row.push(bytes(before.saturating_sub(after)));
        rows.push(row);
    }
    Ok(())
}
