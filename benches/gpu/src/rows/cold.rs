//! Many blocks at once, none of whose memory is there: the prefill of a whole card.

use kvcached_integrations::Background;
use kvcached_mapper::{Layout, PageSize};
use kvcached_vmm::Driver;

use crate::Outcome;
use crate::clock::timed;
use crate::raw::{Plan, Raw};
use crate::report::Row;
use crate::rows::{Bench, Rows, settle};
use crate::shape::{self, CAPACITY_BYTES, POOL, Settings};

/// One such row.
#[derive(Debug)]
pub(crate) struct Prefill {
    layout: Layout,
    blocks: u32,
    samples: usize,
    suffix: &'static str,
    settings: Settings<'static>,
}

impl Prefill {
    pub(crate) const fn new(layout: Layout, blocks: u32, samples: usize) -> Self {
        Self {
            layout,
            blocks,
            samples,
            suffix: "",
            settings: &[],
        }
    }

    /// The same in an engine with these variables set.
    pub(crate) const fn with(self, suffix: &'static str, settings: Settings<'static>) -> Self {
        Self {
            suffix,
            settings,
            ..self
        }
    }

    /// Allocates and frees in an engine with its defaults, trimmed before each; unmapping goes on
    /// behind the caller, and is told apart.
    pub(crate) fn measure<D: Driver>(self, bench: &Bench<D>, rows: Rows<'_>) -> Outcome {
        let Self {
            layout,
            blocks,
            samples,
            suffix,
            settings,
        } = self;
        let spec = shape::spec(layout, PageSize::Auto, CAPACITY_BYTES);
        let engine = shape::engine(&bench.driver, spec, settings, Background::default())?;
        let pool = engine.pool(POOL).ok_or("no pool")?;
        let mut raw = Raw::new(&bench.driver, pool.geometry())?;
        let name = format!("cold-{blocks}-{layout}{suffix}");
        let row = |part: &str, note: &str| {
            let (name, note) = (format!("{name}{part}"), format!("{layout}; {note}"));
            Row::micros(name, note).beside(format!("cold-{blocks}-{layout}{part}"))
        };
        let floor = "floor: create and map of the same chunks at the same places";
        let mut both = row("", &format!("an engine's alloc and free, {floor}"));
        let mut alloc = row(":alloc", &format!("the alloc alone, {floor}"));
        let mut driver = row(":driver", "the part of the alloc in driver calls");
        let mut free = row(":free", "the free alone; no driver call");
        let mut back = row(
            ":back",
            "from the free until the memory is back, but for the reserve; floor: unmap and destroy",
        );
        let mut chunks = Row::new(format!("{name}:chunks"), "count", "chunks of the alloc");
        settle(pool)?;
        let mut last: Option<Plan> = None;
        for turn in 0..bench.samples(samples) {
            trim(pool)?;
            // Who comes first finds the device at rest, so each does every other time.
            let first = match last.take_if(|_| turn % 2 == 1) {
                Some(plan) => Some(floor_of(&mut raw, &plan)?),
                None => None,
            };
            drop(bench.driver.take());
            let (mine, alloc_micros) = timed(|| pool.alloc(bench.blocks(blocks)));
            let calls = bench.driver.take();
            let plan = Plan::of(&calls, pool.tensor_bases());
            let mine = mine?;
            let (freed, free_micros) = timed(|| pool.free(&mine));
            freed?;
            let back_micros = settle(pool)?;
            let (floor_micros, release_micros) = match first {
                Some(micros) => micros,
                None => floor_of(&mut raw, &plan)?,
            };
            both.push_pair(alloc_micros + free_micros, floor_micros);
            alloc.push_pair(alloc_micros, floor_micros);
            driver.push(calls.backing_micros());
            free.push(free_micros);
            back.push_pair(back_micros, release_micros);
            chunks.push(f64::from(u32::try_from(plan.chunks())?));
            last = Some(plan);
        }
        rows.extend([both, alloc, driver, free, back, chunks]);
        Ok(())
    }
}

/// Microseconds of the driver calls alone: to back what the plan says, and to release it.
fn floor_of<D: Driver>(raw: &mut Raw<D>, plan: &Plan) -> Outcome<(f64, f64)> {
    let (backed, micros) = raw.back(plan)?;
    Ok((micros, raw.release(backed)?))
}

/// Gives back what is idle, the reserve too.
fn trim(pool: &kvcached_integrations::Pool) -> Outcome {
    for _ in 0..100 {
        pool.trim()?;
        if pool.usage().pages.warm == 0 {
            return Ok(());
        }
        std::thread::yield_now();
    }
    Err("the reserve does not go".into())
}
