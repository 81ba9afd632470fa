//! Growth by a page or a few, with no warm page to take: what a caller waits for when the reserve
//! has run dry.

use kvcached_integrations::Background;
use kvcached_mapper::{Layout, PageSize};
use kvcached_vmm::Driver;

use crate::Outcome;
use crate::clock::timed;
use crate::raw::{Plan, Raw};
use crate::report::Row;
use crate::rows::{Bench, Rows, unmap_idle};
use crate::shape::{self, CAPACITY_BYTES, POOL, Settings};

/// Bytes that grow before all of it is freed again.
const ROUND_BYTES: u64 = 24 << 30;
/// The same where chunks that came free are to be found again: no more than are kept.
const KEPT_ROUND_BYTES: u64 = 128 << 20;

/// One such row.
#[derive(Debug, Clone)]
pub(crate) struct Growth {
    name: String,
    layout: Layout,
    page_size: PageSize,
    /// Pages of one call.
    pages: u32,
    beside: Option<&'static str>,
    kept: bool,
}

impl Growth {
    pub(crate) fn new(name: &str, layout: Layout, pages: u32) -> Self {
        Self {
            name: name.to_owned(),
            layout,
            page_size: PageSize::Auto,
            pages,
            beside: None,
            kept: false,
        }
    }

    pub(crate) fn of_pages(self, page_size: PageSize) -> Self {
        Self { page_size, ..self }
    }

    pub(crate) fn beside(self, row: &'static str) -> Self {
        Self {
            beside: Some(row),
            ..self
        }
    }

    /// The same, with chunks that came free before kept for it.
    pub(crate) fn kept(self) -> Self {
        Self {
            name: format!("{}-kept", self.name),
            kept: true,
            ..self
        }
    }

    /// Grows page after page, each beside its floor, and unmaps all of them now and then.
    pub(crate) fn measure<D: Driver>(
        self,
        bench: &Bench<D>,
        settings: Settings<'_>,
        rows: Rows<'_>,
    ) -> Outcome {
        let spec = shape::spec(self.layout, self.page_size, CAPACITY_BYTES);
        let engine = shape::engine(&bench.driver, spec, settings, Background::Off)?;
        let pool = engine.pool(POOL).ok_or("no pool")?;
        let geometry = pool.geometry();
        let raw = Raw::new(&bench.driver, geometry)?;
        let mut raw = if self.kept { raw.keeping() } else { raw };
        let a_page = geometry.max_blocks_per_page();
        // The null block's page is there: without the rest of it the next block needs a new one.
        let _rest = pool.alloc(a_page - 1)?;

        let step_bytes = geometry.bundle_bytes() * u64::from(self.pages);
        let (round_bytes, steps) = match self.kept {
            true => (KEPT_ROUND_BYTES, usize::MAX),
            false => (ROUND_BYTES, 100),
        };
        let steps = steps.min(usize::try_from((round_bytes / step_bytes).max(1))?);
        let wanted = bench.samples(if step_bytes > 1 << 30 { 24 } else { 300 });
        let mut row = Row::micros(
            self.name.clone(),
            format!(
                "{}; alloc of {} blocks, {} pages of {} bytes in all, none warm; floor: the same \
                 chunks at the same places by driver calls",
                self.layout,
                a_page * self.pages,
                self.pages,
                geometry.bundle_bytes(),
            ),
        );
        row.beside = self.beside.map(str::to_owned);
        let mut driver = Row::micros(
            format!("{}:driver", self.name),
            "the part of it in driver calls",
        );
        let mut chunks = Row::new(format!("{}:chunks", self.name), "count", "chunks of it");
        // The first round is not counted: nothing is kept yet, and page tables are new.
        let mut round = 0;
        while row.samples.len() < wanted {
            let (mut mine, mut theirs) = (Vec::new(), Vec::new());
            for _ in 0..steps.min(wanted) {
                drop(bench.driver.take());
                let (grown, micros) = timed(|| pool.alloc(a_page * self.pages));
                let calls = bench.driver.take();
                mine.extend(grown?);
                let plan = Plan::of(&calls, pool.tensor_bases());
                let (backed, floor_micros) = raw.back(&plan)?;
                theirs.push(backed);
                if round > 0 {
                    row.push_pair(micros, floor_micros);
                    driver.push(calls.backing_micros());
                    chunks.push(f64::from(u32::try_from(plan.chunks())?));
                }
            }
            pool.free(&mine)?;
            unmap_idle(pool)?;
            for backed in theirs {
                raw.release(backed)?;
            }
            round += 1;
        }
        rows.extend([row, driver, chunks]);
        Ok(())
    }
}
