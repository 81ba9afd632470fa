//! What it costs to put memory under a KV cache on this machine's GPU, row by row, beside raw
//! driver calls for the same memory in the same run: `cargo xtask bench-gpu`.
//!
//! One binary that can be carried to a machine without Rust. It prints a table and writes every
//! sample as JSON; with `--beside` another system's rows stand next to ours. The model is that of
//! an 8B: 32 layers, K and V of 32 KiB each a layer and block of 16 tokens, 2 MiB a block in all.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that reports to who runs it"
)]

mod clock;
mod metered;
#[path = "../../nothing.rs"]
mod nothing;
mod rank;
mod raw;
mod report;
mod rows;
mod shape;
mod table;

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use kvcached_vmm::{Cuda, Driver, Host, HostConfig};

use crate::report::{Document, Machine, Row};
use crate::rows::{Bench, Selection};

/// Whatever went wrong, for a person to read.
type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Memory of the device that the host driver pretends to be.
const HOST_BYTES: u64 = 140 << 30;

/// Memory under a KV cache on this machine's GPU, beside raw driver calls for the same memory.
#[derive(Debug, Parser)]
#[command(name = "kvcached-bench-gpu", version, about, max_term_width = 100)]
struct Arguments {
    /// Write every sample to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Only rows whose names begin so
    #[arg(long, value_name = "ROW,…", value_delimiter = ',')]
    only: Vec<String>,

    /// Rows of another system, in the format of --json, to stand beside ours
    #[arg(long, value_name = "FILE")]
    beside: Option<PathBuf>,

    /// Measure nothing, but print the table of a file that --json wrote
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "only", "quick"])]
    show: Option<PathBuf>,

    /// Where the memory is; with `host` the figures mean nothing, the program is only tried
    #[arg(long, value_enum, default_value_t = Place::Cuda)]
    driver: Place,

    /// Number of the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,

    /// Few samples and little memory: does it work at all?
    #[arg(long)]
    quick: bool,

    /// What was built, for the JSON
    #[arg(long, value_name = "REVISION", default_value = "unknown")]
    revision: String,

    /// When it is run, for the JSON
    #[arg(long, value_name = "DATE", default_value = "unknown")]
    date: String,

    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Place {
    Cuda,
    Host,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Serve as one rank of a broadcast; started by the benchmark itself
    #[command(hide = true)]
    Rank(rank::RankArguments),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Tells whether every row came about.
fn run(arguments: &Arguments) -> Outcome<bool> {
    if let Some(file) = &arguments.show {
        print!(
            "{}",
            table::table(&Document::read(file)?, &beside(arguments)?)
        );
        return Ok(true);
    }
    match arguments.driver {
        Place::Cuda => {
            let cuda = Cuda::new(arguments.device)?;
            let name = cuda.name().to_owned();
            run_on(arguments, cuda, &name)
        }
        Place::Host => {
            let host = Host::new(HostConfig::new(HOST_BYTES))?;
            run_on(arguments, host, "host memory: these figures mean nothing")
        }
    }
}

fn run_on<D: Driver>(arguments: &Arguments, driver: D, device: &str) -> Outcome<bool> {
    if let Some(Role::Rank(rank)) = &arguments.role {
        rank::serve(rank, driver)?;
        return Ok(true);
    }
    let beside = beside(arguments)?;
    let memory_bytes = driver.memory()?.total;
    let bench = Bench::new(driver, arguments.quick, rank_arguments(arguments));
    let rows = rows::measure(&bench, &Selection::new(&arguments.only));
    let document = Document {
        machine: Machine::of_this(device, memory_bytes, &arguments.revision, &arguments.date),
        rows,
    };
    if let Some(file) = &arguments.json {
        fs::write(file, document.to_json()?)?;
    }
    print!("{}", table::table(&document, &beside));
    Ok(document.rows.iter().all(|row| row.error.is_none()))
}

/// The rows of another system, if there are any.
fn beside(arguments: &Arguments) -> Outcome<Vec<Row>> {
    match &arguments.beside {
        Some(file) => Ok(Document::read(file)?.rows),
        None => Ok(Vec::new()),
    }
}

/// How this program is started again as a rank on the same device.
fn rank_arguments(arguments: &Arguments) -> Vec<String> {
    let driver = match arguments.driver {
        Place::Cuda => "cuda",
        Place::Host => "host",
    };
    let device = arguments.device.to_string();
    ["--driver", driver, "--device", &device, "rank"]
        .map(str::to_owned)
        .to_vec()
}
