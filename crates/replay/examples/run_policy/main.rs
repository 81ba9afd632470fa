//! How long should runs be? What several policies make of several workloads: time to map, and memory
//! that survivors pin.
//!
//! ```text
//! cargo run --release -p kvcached-replay --example run_policy -- [--azure FILE] [--mooncake FILE]
//!     [--requests N] [--only WORDS]
//! ```
//!
//! `--only "azure contiguous 4"` leaves out what does not begin like that.
//!
//! Blocks, pages and runs are the real ones. The device only counts: calls cost what they took on an
//! H200, so no GPU is needed, and the figures are the same everywhere. `docs/run-policy.md` says what
//! follows from them.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example talks to a person"
)]

mod cache;
mod cost;

use std::{error::Error, fs, num::NonZeroU32, process::ExitCode};

use kvcached_integrations::{RunChoice, RunLength};
use kvcached_mapper::{KvBuffers, Layout, PageSize, PoolSpec};

use kvcached_replay::{
    Assign, BlockId, Engine, KvCache, ModelChoice, Placement, ServedModel, Trace, bursts, staggered,
};

use crate::cache::Cache;
use crate::cost::Device;

const BLOCK_TOKENS: NonZeroU32 = NonZeroU32::new(16).expect("not zero");
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Requests of the built-in workloads.
const STAGGERED: u32 = 3000;
const BURSTS: u32 = 1600;

/// The policies that are compared, by name.
fn policies() -> Vec<(&'static str, RunChoice)> {
    let up_to = |mib: u64| RunChoice::up_to(RunLength::Bytes(mib * MIB));
    let number = |runs| NonZeroU32::new(runs).unwrap_or(NonZeroU32::MIN);
    let in_pieces = |pieces| RunChoice {
        growth_chunks: number(pieces),
        ..up_to(32)
    };
    let short = |runs, calm_bytes| RunChoice {
        short_runs: number(runs),
        calm_bytes,
        ..in_pieces(8)
    };
    vec![
        (
            "single pages",
            RunChoice::up_to(RunLength::Pages(number(1))),
        ),
        ("up to 8 MiB", up_to(8)),
        ("up to 32 MiB", up_to(32)),
        ("up to 128 MiB", up_to(128)),
        ("32 MiB, halves", in_pieces(2)),
        ("32 MiB, quarters", in_pieces(4)),
        ("32 MiB, eighths", in_pieces(8)),
        ("eighths, 16 runs for 1 GiB if short", short(16, GIB)),
        ("eighths, 16 runs for 4 GiB if short", short(16, 4 * GIB)),
        ("eighths, 16 runs for 16 GiB if short", short(16, 16 * GIB)),
        ("eighths, 64 runs for 4 GiB if short", short(64, 4 * GIB)),
        ("**the default**", RunChoice::default()),
    ]
}

fn main() -> ExitCode {
    match report(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn report(mut arguments: impl Iterator<Item = String>) -> Result<(), Box<dyn Error>> {
    let (mut azure, mut mooncake, mut requests) = (None, None, u32::MAX);
    let mut only = String::new();
    while let Some(argument) = arguments.next() {
        let mut value = || {
            let value = arguments.next();
            value.ok_or_else(|| format!("{argument} needs a value"))
        };
        match argument.as_str() {
            "--azure" => azure = Some(value()?),
            "--mooncake" => mooncake = Some(value()?),
            "--requests" => requests = value()?.parse()?,
            "--only" => only = value()?,
            other => return Err(format!("nothing is called {other}").into()),
        }
    }
    let from_file = |file: Option<String>, name: &str| -> Result<Option<Trace>, Box<dyn Error>> {
        let Some(file) = file else {
            println!("the {name} trace was not given (--{name} FILE), and is left out");
            return Ok(None);
        };
        let mut trace = Trace::parse(&file, &fs::read(&file)?)?;
        trace.requests.truncate(requests as usize);
        Ok(Some(trace))
    };
    let azure = from_file(azure, "azure")?;
    let mooncake = from_file(mooncake, "mooncake")?;
    let staggered = staggered(STAGGERED.min(requests), 7);
    let bursts = bursts(BURSTS.min(requests), 7);
    for (name, trace, sizes) in [
        ("azure", azure.as_ref(), [12, 6, 4]),
        ("mooncake", mooncake.as_ref(), [128, 64, 32]),
        ("staggered", Some(&staggered), [8, 3, 2]),
        ("bursts", Some(&bursts), [24, 12, 6]),
    ] {
        let Some(trace) = trace else { continue };
        for layout in [Layout::Contiguous, Layout::PerLayer] {
            for gib in sizes {
                if format!("{name} {layout} {gib}").starts_with(&only) {
                    println!("\n{name}, {layout}, {gib} GiB\n");
                    serve(trace, layout, gib * GIB)?;
                }
            }
        }
    }
    if "survivors".starts_with(&only) {
        survivors()?;
    }
    Ok(())
}

/// Three models of 8B, two ranks each, under every policy.
fn serve(trace: &Trace, layout: Layout, memory_bytes: u64) -> Result<(), Box<dyn Error>> {
    let ModelChoice { model, count } = "llama-3.1-8b*3".parse()?;
    let names: Vec<&str> = (0..count).map(|_| model.name.as_str()).collect();
    let model_of = Assign::default().models_of(&trace.requests, &names, 0);
    let placement = Placement {
        tp: 2,
        layout,
        block_tokens: BLOCK_TOKENS.get(),
        page_size: PageSize::Auto,
        capacity_bytes: memory_bytes,
    };
    let spec = &model.pool_specs(&placement)?[0];
    println!(
        "| runs | chunks | map, s | unmap, s | longest map, ms | pinned / held | at the peaks | waited | TTFT p99, s |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for (name, runs) in policies() {
        let device = Device::new(memory_bytes);
        let cache = |_| Cache::new(spec, memory_bytes, &device, runs, true);
        let caches = (0..count).map(cache).collect::<Result<Vec<_>, _>>()?;
        let served = |name: &&str| ServedModel::new((*name).to_owned(), &model, BLOCK_TOKENS);
        let served = names.iter().map(served).collect();
        let mut engine = Engine::new(&trace.requests, &model_of, served, caches);
        engine.run()?;
        let (outcome, caches) = engine.finish();
        drop(caches);
        let spent = device.lock().expect("nobody panicked").spent;
        let memory = outcome.memory;
        println!(
            "| {name} | {} | {:.2} | {:.2} | {:.2} | {:.3} | {:.3} | {} | {:.2} |",
            spent.chunks,
            spent.map_ns as f64 / 1e9,
            spent.unmap_ns as f64 / 1e9,
            spent.longest_ns as f64 / 1e6,
            memory.mean_mapped_bytes as f64 / memory.mean_held_bytes as f64,
            memory.peak_mapped_bytes as f64 / memory.peak_held_bytes as f64,
            outcome.total.waited,
            outcome.total.ttft.p99.as_secs_f64(),
        );
    }
    Ok(())
}

/// Of 16384 blocks of 64 KiB in 32 layers, taken at once, every 16th stays.
fn survivors() -> Result<(), Box<dyn Error>> {
    const BLOCKS: u32 = 16384;
    let spec = PoolSpec {
        layout: Layout::Contiguous,
        layers: 32,
        kv_buffers: KvBuffers::One,
        block_bytes: 64 << 10,
        page_size: PageSize::Auto,
        capacity_bytes: 40 * GIB,
    };
    for at_once in [BLOCKS, 64, 16, 1] {
        println!("\n{BLOCKS} blocks of 2 MiB, {at_once} a call; then every 16th stays\n");
        println!("| runs | chunks | map, ms | pinned / held |");
        println!("| --- | --- | --- | --- |");
        for (name, runs) in policies() {
            let device = Device::new(64 * GIB);
            let mut cache = Cache::new(&spec, 64 * GIB, &device, runs, false)?;
            let mut mine = Vec::new();
            for _ in 0..BLOCKS / at_once {
                mine.extend(cache.take(at_once)?);
            }
            let spent = device.lock().expect("nobody panicked").spent;
            let goes = |&(nth, _): &(usize, BlockId)| !nth.is_multiple_of(16);
            let others = mine.into_iter().enumerate().filter(goes);
            let others: Vec<BlockId> = others.map(|(_, block)| block).collect();
            cache.give(&others)?;
            println!(
                "| {name} | {} | {:.1} | {:.2} |",
                spent.chunks,
                spent.map_ns as f64 / 1e6,
                cache.mapped_bytes() as f64 / cache.held_bytes() as f64,
            );
        }
    }
    Ok(())
}
