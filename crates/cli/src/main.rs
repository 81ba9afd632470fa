//! `kvcached`: what an operator runs to see how many models fit on a GPU.
//!
//! ```text
//! kvcached replay --trace trace.csv --model 'llama-3.1-8b*3' --tp 2 --memory 8GiB
//! ```
//!
//! Exit status: 0 all went well, 1 the replay failed or found something wrong, 2 wrong usage or
//! bad input, 130 interrupted.

mod replay;
mod watch;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Elastic KV-cache memory for serving engines.
#[derive(Debug, Parser)]
#[command(name = "kvcached", version, about, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Replay a serving trace against elastic KV memory and against the same memory split
    /// statically
    Replay(Box<replay::ReplayArguments>),
    /// Serve as one rank of a replay; started by `replay`, never by hand
    #[command(hide = true)]
    Rank,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Standard output is for results. RUST_LOG chooses what else is said.
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    match arguments.command {
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Rank => replay::run_rank(),
    }
}
