//! Blocks while memory is there: bookkeeping, and no driver call.

use std::hint::black_box;
use std::time::Duration;

use kvcached_integrations::Background;
use kvcached_mapper::{Layout, PageSize, PoolSpec};
use kvcached_vmm::Driver;

use crate::Outcome;
use crate::clock::{now, timed};
use crate::report::Row;
use crate::rows::{Bench, Rows};
use crate::shape::{self, CAPACITY_BYTES, POOL};

/// The pool of these rows.
const WARM: PoolSpec = shape::spec(Layout::Contiguous, PageSize::Auto, CAPACITY_BYTES);
/// Blocks of a call, and how often.
const DEMANDS: [(u32, usize); 3] = [(1, 2000), (64, 2000), (256, 1000)];
/// Blocks whose memory is there from before, in the long runs of growth by so many.
const PREFILL: u32 = 2048;
/// Calls that are not counted.
const BEFORE: usize = 100;
/// For how long they go on at least: a processor that was idle takes a while to run at its speed.
const AWAKE: Duration = Duration::from_millis(50);
/// Questions of one sample, which alone would be shorter than a look at the clock.
const QUESTIONS: u32 = 1000;

/// Allocates and frees blocks whose memory stays: by the block manager, and by a pool of an engine
/// with its defaults.
pub(crate) fn alloc_and_free<D: Driver>(bench: &Bench<D>, rows: Rows<'_>) -> Outcome {
    let mut blocks = bench.blocks_of(WARM, &[])?;
    let prefill = blocks.alloc(PREFILL)?;
    blocks.free(&prefill)?;
    for (demand, count) in DEMANDS {
        let mut row = Row::micros(
            format!("warm-{demand}"),
            "contiguous; the block manager's alloc and free of one call into the same buffer, memory \
             of a prefill there",
        );
        let mut mine = Vec::new();
        sample(&mut row, bench.samples(count), || {
            blocks.alloc_into(demand, &mut mine)?;
            blocks.free(black_box(&mine))?;
            mine.clear();
            Ok(())
        })?;
        rows.push(row);
    }
    let engine = shape::engine(&bench.driver, WARM, &[], Background::default())?;
    let pool = engine.pool(POOL).ok_or("no pool")?;
    for (demand, count) in DEMANDS {
        let mut row = Row::micros(
            format!("warm-{demand}-pool"),
            "contiguous; by an engine's pool with its defaults (lock, reserve and thread), a new \
             list each time",
        )
        .beside(format!("warm-{demand}"));
        sample(&mut row, bench.samples(count), || {
            let mine = pool.alloc(demand)?;
            Ok(pool.free(black_box(&mine))?)
        })?;
        rows.push(row);
    }
    Ok(())
}

/// So many samples of `once`, after as many calls as wake the machine.
fn sample(row: &mut Row, count: usize, mut once: impl FnMut() -> Outcome) -> Outcome {
    let begun = now();
    let mut calls = 0;
    while row.samples.len() < count {
        let (result, micros) = timed(&mut once);
        result?;
        if calls >= BEFORE && begun.elapsed() > AWAKE {
            row.push(micros);
        }
        calls += 1;
    }
    Ok(())
}

/// How many blocks there are, as an engine asks before each step.
pub(crate) fn available<D: Driver>(bench: &Bench<D>, rows: Rows<'_>) -> Outcome {
    let mut blocks = bench.blocks_of(WARM, &[])?;
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
