//! Chores of the workspace, run as `cargo xtask <chore>`; the standard library only.
//!
//! Each chore is one module, prints what it runs, and ends with a non-zero status if anything in
//! it failed.
#![expect(
    clippy::print_stdout,
    reason = "a chore reports on its standard output"
)]

mod bench;
mod bench_gpu;
mod ci;
mod gpu;
mod process;
mod sim;
mod test;
mod tidy;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask <chore> [arguments]

  test [cargo test arguments]     everything that needs no GPU, documentation tests included;
                                  prints how many tests ran
  test-gpu [--package DIR]        the GPU tests on this machine's device; with --package, build
                                  them and a run script into DIR, to be carried to a GPU machine
  bench [cargo bench arguments]   the criterion benchmarks, e.g. `bench --bench blocks -- warm`
  bench-ab REV [--bench NAME]     the benchmarks of revision REV and of the working tree, one
                                  after the other on this machine, compared by criterion
  bench-gpu [--package DIR]       what memory under a KV cache costs on this machine's GPU, beside
                                  raw driver calls; other arguments go to the program, which
                                  --help lists. With --package, build it and a run script into DIR
  sim [--seeds N] [--script FILE] the engine in virtual time, over N seeds, with everything that
                                  can fail failing; `sim --help` says more. A violation is shrunk
                                  to a script, which --script replays
  tidy                            rules of the repository that no compiler checks
  ci                              format, lints, documentation, tidy, test: what has to pass
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((chore, rest)) = arguments.split_first() else {
        print!("{USAGE}");
        return ExitCode::from(2);
    };
    let result = match chore.as_str() {
        "test" => test::run(rest),
        "test-gpu" => gpu::run(rest),
        "bench" => bench::run(rest),
        "bench-ab" => bench::compare(rest),
        "bench-gpu" => bench_gpu::run(rest),
        "sim" => sim::run(rest),
        "tidy" => tidy::run(),
        "ci" => ci::run(),
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        unknown => {
            print!("no chore is called {unknown:?}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            println!("xtask {chore}: {failure}");
            ExitCode::FAILURE
        }
    }
}
