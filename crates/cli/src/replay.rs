//! `kvcached replay`: from the command line to a plan, and from its result to tables and files.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::num::{NonZeroU32, NonZeroU64};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kvcached_integrations::{ByteSize, Config};
use kvcached_mapper::{Layout, PageSize};
use kvcached_replay::{
    Assign, BuiltIn, Chaos, Device, Model, ModelChoice, Pace, Plan, RankError, RankProgram,
    ReplayError, ReplayTopology, Report, Trace, plot, replay, serve_rank, with_causes,
};
use thiserror::Error;

use crate::watch;

/// Exit status for wrong usage and bad input, as of clap itself.
const USAGE: u8 = 2;
/// Exit status after Ctrl-C, as shells give it.
const INTERRUPTED: u8 = 130;

/// Blocks kept for later requests where the workload is made for it.
const STAGGERED_CACHED_BLOCKS: u32 = 1_000;

/// How long a rank may take to answer at most, where ranks are stalled on purpose.
const CHAOS_IPC_TIMEOUT: Duration = Duration::from_millis(300);

/// What may be said on the command line of `kvcached replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArguments {
    /// Serving trace: Azure LLM CSV, Mooncake JSONL or BurstGPT CSV, told by its content. Without
    /// it a built-in workload is drawn
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Built-in workload: as public traces are distributed, sequences that start one after the other
    /// and grow token by token, or many long prompts at once
    #[arg(
        long,
        value_name = "drawn|staggered|bursts",
        default_value = "drawn",
        conflicts_with = "trace"
    )]
    workload: BuiltIn,

    /// Model from the table, with how many instances of it; may be repeated [default:
    /// llama-3.1-8b*3]
    #[arg(long, value_name = "NAME[*COUNT]")]
    model: Vec<ModelChoice>,

    /// A model by its KV geometry; may be repeated
    #[arg(long, value_name = "layers=N,kv-heads=N,head-dim=N,dtype=T[,buffers=N]", value_parser = ModelChoice::from_geometry)]
    kv: Vec<ModelChoice>,

    /// Ranks of each model
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    tp: u16,

    /// Where the scheduler of a model is: in rank 0, in a process of its own, or in every rank
    #[arg(
        long,
        value_name = "rank0|separate|autonomous",
        default_value = "rank0"
    )]
    topology: ReplayTopology,

    /// Layout of the KV tensors
    #[arg(
        long,
        value_name = "contiguous|unified|per-layer",
        default_value = "contiguous"
    )]
    layout: Layout,

    /// Bytes of a page in one extent, or auto
    #[arg(long, value_name = "SIZE", default_value = "auto", value_parser = parse_page_size)]
    page_size: PageSize,

    /// Tokens of a block
    #[arg(long, value_name = "N", default_value = "16")]
    block_tokens: NonZeroU32,

    /// What the device of each rank has for KV cache, all models together
    #[arg(long, value_name = "SIZE", default_value = "8GiB")]
    memory: ByteSize,

    /// Where the memory is
    #[arg(long, value_name = "host|mock|cuda[:N]", default_value = "host")]
    driver: Device,

    /// Only so many requests; of the built-in workload, 2000 if not given
    #[arg(long, value_name = "N")]
    max_requests: Option<NonZeroU32>,

    /// Only the requests of the first N minutes, so that a replay by the clock takes about as long
    #[arg(long, value_name = "N", value_parser = parse_minutes)]
    max_minutes: Option<Duration>,

    /// Blocks of shared prefixes that each model keeps for later requests when none runs that has
    /// them [default: 1000 with --workload staggered, else 0]
    #[arg(long, value_name = "N")]
    cached_blocks: Option<u32>,

    /// Seed of the built-in workload, and of the rule that assigns requests to models
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// How models share the requests
    #[arg(long, value_name = "rotating|round-robin", default_value = "rotating")]
    assign: Assign,

    /// Prompt tokens that each model processes per second, instead of the model's own number
    #[arg(long, value_name = "TOKENS/S")]
    prefill_rate: Option<NonZeroU64>,

    /// Milliseconds of a step before any sequence is counted, instead of the model's own number
    #[arg(long, value_name = "MS", value_parser = parse_ms)]
    decode_ms: Option<Duration>,

    /// How time passes: as the service times say, or by the clock
    #[arg(long, value_enum, default_value_t = Time::Virtual)]
    time: Time,

    /// Stamp every block with its owner on every rank, and look for the stamp when it is freed
    /// [default: on, except with the mock driver]
    #[arg(long, overrides_with = "no_verify")]
    verify: bool,

    /// Leave the contents of blocks alone, which is faster
    #[arg(long)]
    no_verify: bool,

    /// Kill and stop rank processes of the elastic side on the way, which must serve everything all
    /// the same; the seed decides when, which and how
    #[arg(long, value_name = "SEED")]
    chaos: Option<u64>,

    /// Seconds of the trace from one of these faults to the next, on average
    #[arg(long, value_name = "S", default_value = "30", requires = "chaos", value_parser = parse_every)]
    chaos_every: Duration,

    /// Write the result as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Draw memory and queues over time
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Time {
    Virtual,
    Real,
}

/// Why there is no result, or no good one.
#[derive(Debug, Error)]
enum Failure {
    /// What was given makes no sense.
    #[error("{0}")]
    Input(String),
    /// A replay that did not come to its end.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// A result that could not be written.
    #[error("cannot write {path}: {source}", path = path.display())]
    Write { path: PathBuf, source: io::Error },
    /// The system.
    #[error("{0}")]
    System(#[from] io::Error),
    /// A result that shows a fault of this program.
    #[error("{corrupted} of {blocks} blocks were corrupted, {divergent} ranks diverged{first}")]
    Wrong {
        corrupted: u64,
        blocks: u64,
        divergent: u32,
        first: String,
    },
}

/// Runs the replay and says how it went.
pub(crate) fn run(arguments: &ReplayArguments) -> ExitCode {
    let Err(failure) = run_to_end(arguments) else {
        return ExitCode::SUCCESS;
    };
    complain(&failure);
    match failure {
        Failure::Input(_) => ExitCode::from(USAGE),
        Failure::Replay(
            ReplayError::Plan(_)
            | ReplayError::Placement { .. }
            | ReplayError::Layout { .. }
            | ReplayError::TooLittleMemory { .. },
        ) => ExitCode::from(USAGE),
        Failure::Replay(ReplayError::Interrupted { .. }) => ExitCode::from(INTERRUPTED),
        _ => ExitCode::FAILURE,
    }
}

/// Serves as one rank.
pub(crate) fn run_rank() -> ExitCode {
    if let Err(error) = watch::ignore_interrupts() {
        complain(&error);
        return ExitCode::FAILURE;
    }
    match serve_rank() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error @ RankError::Line(_)) => {
            complain(&error);
            ExitCode::FAILURE
        }
        // The replay was told, and says it better.
        Err(error) => {
            tracing::debug!(%error, "this rank ends");
            ExitCode::FAILURE
        }
    }
}

fn run_to_end(arguments: &ReplayArguments) -> Result<(), Failure> {
    let config = Config::from_env().map_err(|error| Failure::Input(error.to_string()))?;
    config.log_resolved();
    let plan = plan(arguments, &config)?;
    // Found out now, not after minutes.
    for path in [&arguments.json, &arguments.plot].into_iter().flatten() {
        check_writable(path)?;
    }
    if arguments.json.is_some() && arguments.json == arguments.plot {
        return Err(Failure::Input(
            "--json and --plot name the same file".to_owned(),
        ));
    }
    let stop = watch::interrupted()?;
    let bar = watch::bar(plan.trace.requests.len() as u64);
    let result = replay(&plan, &stop, |side, progress| {
        watch::show(&bar, side, progress);
    });
    bar.finish_and_clear();
    let comparison = result?;
    let report = Report::new(&plan, &comparison);

    let mut out = io::stdout().lock();
    writeln!(out, "{}", report.table())?;
    if let Some(path) = &arguments.json {
        write(path, &report.json())?;
    }
    if let Some(path) = &arguments.plot {
        write(path, &plot(&comparison))?;
    }
    let verify = &report.verify;
    if verify.corrupted > 0 || report.ranks_divergent > 0 {
        return Err(Failure::Wrong {
            corrupted: verify.corrupted,
            blocks: verify.blocks_checked,
            divergent: report.ranks_divergent,
            first: comparison
                .checked
                .first
                .map(|first| format!(": {first}"))
                .unwrap_or_default(),
        });
    }
    Ok(())
}

fn plan(arguments: &ReplayArguments, config: &Config) -> Result<Plan, Failure> {
    let mut trace = trace(arguments)?;
    if let Some(end) = arguments.max_minutes {
        trace.end_at(end);
    }
    let choices = arguments.model.iter().chain(&arguments.kv);
    let mut models: Vec<Model> = choices
        .flat_map(|choice| std::iter::repeat_n(choice.model.clone(), choice.count as usize))
        .collect();
    if models.is_empty() {
        let default: ModelChoice = "llama-3.1-8b*3".parse().expect("a model of the table");
        models = vec![default.model; default.count as usize];
    }
    for model in &mut models {
        if let Some(rate) = arguments.prefill_rate {
            model.service.prefill_tokens_per_s = rate;
        }
        if let Some(base) = arguments.decode_ms {
            model.service.decode_base = base;
        }
    }
    let verify = if arguments.verify && arguments.driver == Device::Mock {
        return Err(Failure::Input(
            "--verify needs memory, and the mock driver has none".to_owned(),
        ));
    } else {
        !arguments.no_verify && arguments.driver != Device::Mock
    };
    if arguments.chaos.is_some() && !verify {
        return Err(Failure::Input(
            match arguments.driver {
                Device::Mock => "--chaos needs memory to lose, and the mock driver has none",
                _ => "--chaos without verified contents would show nothing: leave --no-verify out",
            }
            .to_owned(),
        ));
    }
    Ok(Plan {
        trace,
        models,
        assign: arguments.assign,
        seed: arguments.seed,
        tp: arguments.tp,
        topology: arguments.topology,
        layout: arguments.layout,
        page_size: arguments.page_size,
        block_tokens: arguments.block_tokens,
        memory_bytes: arguments.memory.0,
        device: arguments.driver,
        cold: config.cold,
        runs: config.runs,
        cached_blocks: arguments.cached_blocks.unwrap_or(match arguments.workload {
            BuiltIn::Staggered => STAGGERED_CACHED_BLOCKS,
            _ => 0,
        }),
        reserve: config.reserve,
        verify,
        pace: match arguments.time {
            Time::Virtual => Pace::Virtual,
            Time::Real => Pace::Real,
        },
        chaos: arguments.chaos.map(|seed| Chaos {
            seed,
            every: arguments.chaos_every,
        }),
        runtime_dir: config.runtime_dir.clone(),
        ipc_timeout: match arguments.chaos {
            // A stall has to last longer than this, and each is waited for.
            Some(_) => config.ipc_timeout.min(CHAOS_IPC_TIMEOUT),
            None => config.ipc_timeout,
        },
        ready_timeout: config.ready_timeout,
        program: RankProgram {
            program: std::env::current_exe()?,
            arguments: vec![OsString::from("rank")],
        },
    })
}

fn trace(arguments: &ReplayArguments) -> Result<Trace, Failure> {
    /// Enough to see the pool breathe, in a few seconds.
    const BUILT_IN_REQUESTS: u32 = 2_000;
    let Some(path) = &arguments.trace else {
        let requests = arguments
            .max_requests
            .map_or(BUILT_IN_REQUESTS, NonZeroU32::get);
        return Ok(arguments.workload.trace(requests, arguments.seed));
    };
    let name = path.display().to_string();
    let bytes =
        fs::read(path).map_err(|error| Failure::Input(format!("cannot read {name}: {error}")))?;
    let mut trace =
        Trace::parse(&name, &bytes).map_err(|error| Failure::Input(error.to_string()))?;
    if let Some(most) = arguments.max_requests {
        trace
            .requests
            .truncate(usize::try_from(most.get()).unwrap_or(usize::MAX));
    }
    Ok(trace)
}

fn parse_page_size(text: &str) -> Result<PageSize, String> {
    if text == "auto" {
        return Ok(PageSize::Auto);
    }
    let ByteSize(bytes) = text.parse().map_err(|error| format!("{error}, or auto"))?;
    Ok(PageSize::Bytes(bytes))
}

fn parse_ms(text: &str) -> Result<Duration, String> {
    let ms: f64 = text
        .parse()
        .map_err(|_| "expected a number of milliseconds".to_owned())?;
    Duration::try_from_secs_f64(ms / 1e3).map_err(|error| error.to_string())
}

fn parse_minutes(text: &str) -> Result<Duration, String> {
    let expected = || "expected a number of minutes above 0".to_owned();
    let minutes: f64 = text.parse().map_err(|_| expected())?;
    match Duration::try_from_secs_f64(minutes * 60.0) {
        Ok(end) if !end.is_zero() => Ok(end),
        _ => Err(expected()),
    }
}

fn parse_every(text: &str) -> Result<Duration, String> {
    let expected = || "expected a number of seconds above 0".to_owned();
    let seconds: f64 = text.parse().map_err(|_| expected())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(every) if !every.is_zero() => Ok(every),
        _ => Err(expected()),
    }
}

/// Fails where the file could not be written at the end; writes nothing yet.
fn check_writable(path: &Path) -> Result<(), Failure> {
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    if path.is_dir() {
        return Err(Failure::Input(format!("{} is a folder", path.display())));
    }
    if !folder.is_dir() {
        return Err(Failure::Input(format!(
            "{}: there is no folder {}",
            path.display(),
            folder.display()
        )));
    }
    Ok(())
}

/// Writes a file whole or not at all.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let failed = |source| Failure::Write {
        path: path.to_path_buf(),
        source,
    };
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    let part = path.with_file_name(name);
    fs::write(&part, text).map_err(failed)?;
    fs::rename(&part, path).map_err(failed)
}

fn complain(error: &dyn std::error::Error) {
    // Nobody to complain to is no reason to panic.
    drop(writeln!(io::stderr(), "kvcached: {}", with_causes(error)));
}
