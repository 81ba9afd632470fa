//! The rows: each group of them is one function, which failing spoils no other.

mod broadcast;
mod cold;
mod create;
mod grow;
mod pinned;
mod staggered;
mod warm;

pub(crate) use self::broadcast::spec as broadcast_spec;

use std::sync::Arc;
use std::time::Duration;

use kvcached_integrations::Pool;
use kvcached_manager::{BlockManager, BlockSpace};
use kvcached_mapper::{Cold, Layout, LocalMapper, PageSize, PoolSpec};
use kvcached_page_alloc::{PageAllocator, PageAllocatorConfig};
use kvcached_vmm::Driver;

use crate::Outcome;
use crate::clock::{micros, now, rest};
use crate::metered::Metered;
use crate::report::Row;
use crate::rows::cold::Prefill;
use crate::rows::grow::Growth;
use crate::shape::{self, NO_RESERVE, NOTHING_READY, Settings};

/// What every group needs.
#[derive(Debug)]
pub(crate) struct Bench<D: Driver> {
    pub(crate) driver: Arc<Metered<D>>,
    quick: bool,
    rank: Vec<String>,
}

/// Which rows are wanted.
#[derive(Debug)]
pub(crate) struct Selection(Vec<String>);

/// The rows of one group so far, to which it adds.
type Rows<'a> = &'a mut Vec<Row>;

/// Runs that read as fast as any, however much is asked for.
const RUNS_OF_32_MIB: Settings<'_> = &[("KVCACHED_BULK_RUN_BYTES", "32MiB")];
/// Runs of which survivors pin little.
const RUNS_OF_8_MIB: Settings<'_> = &[
    ("KVCACHED_MAX_RUN_BYTES", "8MiB"),
    ("KVCACHED_BULK_RUN_BYTES", "8MiB"),
];
/// A page of the earlier system: 64 blocks, 128 MiB.
const WIDE_PAGE: PageSize = PageSize::Bytes(128 << 20);

impl<D: Driver> Bench<D> {
    /// `rank` is how this program is started again as a rank on the same device.
    pub(crate) fn new(driver: D, quick: bool, rank: Vec<String>) -> Self {
        Self {
            driver: Arc::new(Metered::new(driver)),
            quick,
            rank,
        }
    }

    /// So many samples, or next to none if it is only tried.
    fn samples(&self, count: usize) -> usize {
        if self.quick { count.min(2) } else { count }
    }

    /// A block manager over memory of the device, without an engine around it.
    fn blocks_of(&self, spec: PoolSpec, settings: Settings<'_>) -> Outcome<BlockManager> {
        let geometry = spec.resolve(self.driver.properties().granularity)?;
        let driver = Arc::clone(&self.driver);
        let mapper = LocalMapper::new(driver, geometry.clone(), Cold::Unbacked)?;
        let config = PageAllocatorConfig {
            runs: shape::config(settings)?.runs.policy(&geometry),
            ..PageAllocatorConfig::new(geometry.pages(), geometry.bundle_bytes())
        };
        let pages = PageAllocator::new(config, Arc::new(mapper))?;
        let space = BlockSpace::from(&geometry);
        Ok(BlockManager::new(space, Arc::new(pages))?)
    }

    /// So many blocks, or fewer if it is only tried.
    fn blocks(&self, count: u32) -> u32 {
        if self.quick { count / 16 } else { count }
    }
}

impl Selection {
    /// Rows whose names begin with one of `prefixes`; all, if there are none.
    pub(crate) fn new(prefixes: &[String]) -> Self {
        Self(prefixes.to_vec())
    }

    /// May a group whose rows begin with `stem` have a row that is wanted?
    fn concerns(&self, stem: &str) -> bool {
        let concerned = |prefix: &String| stem.starts_with(prefix) || prefix.starts_with(stem);
        self.0.is_empty() || self.0.iter().any(concerned)
    }

    fn wants(&self, row: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|prefix| row.starts_with(prefix))
    }
}

/// Measures what is selected, group after group.
pub(crate) fn measure<D: Driver>(bench: &Bench<D>, selection: &Selection) -> Vec<Row> {
    let mut all = Vec::new();
    for (stem, group) in groups::<D>() {
        if !selection.concerns(stem) {
            continue;
        }
        let begun = now();
        let mut rows = Vec::new();
        if let Err(error) = group(bench, &mut rows) {
            rows.push(Row {
                error: Some(error.to_string()),
                ..Row::micros(stem, "")
            });
        }
        eprintln!("{stem}: {:.1} s", micros(begun.elapsed()) / 1e6);
        rows.retain(|row| selection.wants(&row.name) || row.error.is_some());
        all.append(&mut rows);
    }
    all
}

/// A group of rows by what their names begin with.
type Group<D> = (&'static str, fn(&Bench<D>, Rows<'_>) -> Outcome);

fn groups<D: Driver>() -> Vec<Group<D>> {
    vec![
        ("warm", warm::alloc_and_free),
        ("available", warm::available),
        ("cold-16384-contiguous", |bench, rows| {
            Prefill::new(Layout::Contiguous, 16384, 12).measure(bench, rows)
        }),
        ("cold-16384-contiguous-32mib", |bench, rows| {
            Prefill::new(Layout::Contiguous, 16384, 5)
                .with("-32mib", RUNS_OF_32_MIB)
                .measure(bench, rows)
        }),
        ("cold-16384-contiguous-8mib", |bench, rows| {
            Prefill::new(Layout::Contiguous, 16384, 5)
                .with("-8mib", RUNS_OF_8_MIB)
                .measure(bench, rows)
        }),
        ("cold-4096-unified", |bench, rows| {
            Prefill::new(Layout::Unified, 4096, 8).measure(bench, rows)
        }),
        ("cold-4096-per-layer", |bench, rows| {
            Prefill::new(Layout::PerLayer, 4096, 8).measure(bench, rows)
        }),
        ("grow-1-contiguous", |bench, rows| {
            let growth = Growth::new("grow-1-contiguous", Layout::Contiguous, 1);
            growth.clone().measure(bench, NOTHING_READY, rows)?;
            growth.kept().measure(bench, NO_RESERVE, rows)
        }),
        ("grow-1-128mib-contiguous", |bench, rows| {
            Growth::new("grow-1-128mib-contiguous", Layout::Contiguous, 1)
                .of_pages(WIDE_PAGE)
                .beside("grow-1-contiguous")
                .measure(bench, NOTHING_READY, rows)
        }),
        ("grow-64-blocks-contiguous", |bench, rows| {
            Growth::new("grow-64-blocks-contiguous", Layout::Contiguous, 64)
                .beside("grow-1-contiguous")
                .measure(bench, NOTHING_READY, rows)
        }),
        ("grow-1-unified", |bench, rows| {
            Growth::new("grow-1-unified", Layout::Unified, 1).measure(bench, NOTHING_READY, rows)
        }),
        ("grow-1-per-layer", |bench, rows| {
            let growth = Growth::new("grow-1-per-layer", Layout::PerLayer, 1);
            growth.clone().measure(bench, NOTHING_READY, rows)?;
            growth.kept().measure(bench, NO_RESERVE, rows)
        }),
        ("grow-16-per-layer", |bench, rows| {
            Growth::new("grow-16-per-layer", Layout::PerLayer, 16).measure(
                bench,
                NOTHING_READY,
                rows,
            )
        }),
        ("create", create::pools),
        ("empty-pool-bytes", create::empty),
        ("broadcast-1", |bench, rows| broadcast::map(bench, 1, rows)),
        ("broadcast-4", |bench, rows| broadcast::map(bench, 4, rows)),
        ("broadcast-8", |bench, rows| broadcast::map(bench, 8, rows)),
        ("pinned", pinned::survivors),
        ("staggered-idle", staggered::idle),
    ]
}

/// How long a pool must have been left alone to be called quiet.
const QUIET: Duration = Duration::from_millis(300);
/// How long it may take to become so.
const NOT_QUIET: Duration = Duration::from_secs(20);

/// Waits until nothing is mapped or unmapped any more, and answers for how many microseconds that
/// went on.
fn settle(pool: &Pool) -> Outcome<f64> {
    let begun = now();
    let traffic = || {
        let pages = pool.usage().pages;
        (pages.mapped_total, pages.unmapped_total, pages.busy)
    };
    let (mut last, mut changed) = (traffic(), Duration::ZERO);
    loop {
        std::thread::yield_now();
        let (seen, elapsed) = (traffic(), begun.elapsed());
        if seen != last || seen.2 > 0 {
            (last, changed) = (seen, elapsed);
        }
        if elapsed - changed > QUIET {
            return Ok(micros(changed));
        }
        if elapsed > NOT_QUIET {
            return Err("the pool does not come to rest".into());
        }
        if elapsed - changed > Duration::from_millis(5) {
            rest(Duration::from_millis(1))?;
        }
    }
}

/// Unmaps what is idle beyond the reserve, as a scheduler's thread does.
fn unmap_idle(pool: &Pool) -> Outcome {
    loop {
        let done = pool.replenish()?;
        if done.unmapped == 0 && !done.more {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_is_by_how_names_begin() {
        let selection = |prefix: &str| Selection::new(&[prefix.to_owned()]);
        assert!(selection("warm-64").concerns("warm"));
        assert!(selection("grow").concerns("grow-1-contiguous"));
        assert!(!selection("cold").concerns("create"));
        assert!(selection("warm-64").wants("warm-64-pool"));
        assert!(!selection("warm-64").wants("warm-1"));
        assert!(Selection::new(&[]).wants("anything"));
    }
}
