//! What a static split and an elastic pool make of a trace, for several memory sizes: how the
//! service times in the table of models were chosen.
//!
//! ```text
//! cargo run --release -p kvcached-replay --example service_times -- TRACE MODEL TP GIB... \
//!     [prefill=TOKENS_PER_S] [budget=TOKENS] [base=MICROSECONDS] [each=MICROSECONDS] [run=PAGES]
//! ```
//!
//! `run` joins so many pages into one that comes and goes whole, as long runs do in a real pool.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example talks to a person"
)]

use std::{error::Error, fs, num::NonZeroU32, process::ExitCode, time::Duration};

use kvcached_mapper::{Layout, PageSize};
use kvcached_replay::{
    Assign, ElasticModel, ElasticPool, Engine, FixedSplit, KvCache, ModelChoice, Outcome,
    Placement, ServedModel, SharedMemory, Trace, bytes_per_block,
};

const GRANULARITY: u64 = 2 << 20;
const BLOCK_TOKENS: NonZeroU32 = NonZeroU32::new(16).expect("not zero");

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [trace, choice, tp, sizes @ ..] = arguments.as_slice() else {
        eprintln!("service_times TRACE MODEL[*COUNT] TP GIB...");
        return ExitCode::FAILURE;
    };
    match compare(trace, choice, tp, sizes) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn compare(file: &str, choice: &str, tp: &str, sizes: &[String]) -> Result<(), Box<dyn Error>> {
    let trace = Trace::parse(file, &fs::read(file)?)?;
    let ModelChoice { mut model, count } = choice.parse()?;
    let mut pages_per_run = 1_u32;
    let (changes, sizes): (Vec<&String>, Vec<&String>) =
        sizes.iter().partition(|size| size.contains('='));
    for change in changes {
        let service = &mut model.service;
        match change.split_once('=').unwrap_or_default() {
            ("prefill", value) => service.prefill_tokens_per_s = value.parse()?,
            ("budget", value) => service.prefill_budget_tokens = value.parse()?,
            ("base", value) => service.decode_base = Duration::from_micros(value.parse()?),
            ("each", value) => service.decode_per_sequence = Duration::from_micros(value.parse()?),
            ("run", value) => pages_per_run = value.parse()?,
            (key, _) => return Err(format!("nothing is called {key}").into()),
        }
    }
    let labels: Vec<String> = (0..count)
        .map(|nth| format!("{}#{nth}", model.name))
        .collect();
    let names: Vec<&str> = labels.iter().map(|_| model.name.as_str()).collect();
    let model_of = Assign::default().models_of(&trace.requests, &names, 0);
    println!(
        "GiB       kind    mean ms    p50 ms    p99 ms  waited rejected preempt  peak GiB mean held  ms/token"
    );
    for size in sizes {
        let gib: f64 = size.parse()?;
        let memory_bytes = (gib * f64::from(1 << 30))
            .to_string()
            .parse::<f64>()?
            .round();
        let memory_bytes: u64 = format!("{memory_bytes:.0}").parse()?;
        let placement = Placement {
            tp: tp.parse()?,
            layout: Layout::Contiguous,
            block_tokens: BLOCK_TOKENS.get(),
            page_size: PageSize::Auto,
            capacity_bytes: memory_bytes,
        };
        let specs = model.pool_specs(&placement)?;
        let block_bytes: Vec<u64> = specs.iter().map(bytes_per_block).collect();
        let mut pools = Vec::new();
        for spec in &specs {
            let geometry = spec.resolve(GRANULARITY)?;
            pools.push(ElasticPool {
                block_bytes: bytes_per_block(spec),
                page_bytes: geometry.bundle_bytes() * u64::from(pages_per_run),
                blocks_per_page: geometry.max_blocks_per_page() * pages_per_run,
            });
        }
        let memory = SharedMemory::new(memory_bytes);
        let served = |label: &String| ServedModel::new(label.clone(), &model, BLOCK_TOKENS);
        let served: Vec<ServedModel> = labels.iter().map(served).collect();

        let split = labels
            .iter()
            .map(|_| FixedSplit::new(memory_bytes / labels.len() as u64, &block_bytes));
        let mut fixed = run(&trace, &model_of, &served, split.collect())?;
        let elastic = labels
            .iter()
            .map(|_| ElasticModel::new(memory.clone(), &pools, 2));
        let mut elastic = run(&trace, &model_of, &served, elastic.collect())?;
        let end = fixed.end.max(elastic.end);
        for (kind, outcome) in [("static", &mut fixed), ("elastic", &mut elastic)] {
            outcome.observe_until(end, trace.requests.iter().map(|request| request.arrival));
            show(size, kind, outcome);
        }
    }
    Ok(())
}

fn run<C: KvCache>(
    trace: &Trace,
    model_of: &[usize],
    served: &[ServedModel],
    caches: Vec<C>,
) -> Result<Outcome, Box<dyn Error>> {
    let mut engine = Engine::new(&trace.requests, model_of, served.to_vec(), caches);
    engine.run()?;
    Ok(engine.finish().0)
}

fn show(size: &str, kind: &str, outcome: &Outcome) {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let served = &outcome.total;
    println!(
        "{size:<6} {kind:>7} {:>10.1} {:>9.1} {:>9.1} {:>7} {:>8} {:>7} {:>9.2} {:>9.2} {:>9.1}  end {:.0} s, prefilled {} reused {}",
        ms(served.ttft.mean),
        ms(served.ttft.p50),
        ms(served.ttft.p99),
        served.waited,
        served.rejected,
        served.preemptions,
        gib(outcome.memory.peak_mapped_bytes),
        gib(outcome.memory.mean_held_bytes),
        ms(served.mean_time_per_token),
        outcome.end.as_secs_f64(),
        served.prefilled_tokens,
        served.reused_tokens,
    );
}
