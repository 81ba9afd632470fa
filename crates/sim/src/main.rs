//! `kvcached-sim`: many seeds, or one script. See the library.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a report is this program's output"
)]

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use kvcached_sim::{Counts, Script, Violation, generate, run, shrink};

const USAGE: &str = "\
usage: kvcached-sim [arguments]

  --seeds N        how many seeds, 2000
  --first-seed S   the first of them, 1
  --seed S         this one alone
  --steps M        steps of each script, 5000
  --script FILE    replay this script instead
  --threads T      seeds at once, 2
  --print          print the script of the first seed, and do nothing
";

struct Arguments {
    seeds: u64,
    first_seed: u64,
    steps: usize,
    script: Option<String>,
    threads: usize,
    print: bool,
}

/// What all threads have found.
#[derive(Default)]
struct Found {
    counts: Counts,
    seeds: u64,
    violation: Option<(u64, Violation)>,
}

/// Runs of the shrinker; one is a few milliseconds.
const SHRINK_RUNS: usize = 3_000;

fn main() -> ExitCode {
    let arguments = match arguments(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(reason) => {
            eprint!("{reason}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    // A panic is a violation like others, and said once.
    std::panic::set_hook(Box::new(|_| {}));
    match arguments.script {
        Some(ref path) => replay(path),
        None if arguments.print => {
            print!("{}", generate(arguments.first_seed, arguments.steps));
            ExitCode::SUCCESS
        }
        None => explore(&arguments),
    }
}

fn arguments(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut found = Arguments {
        seeds: 2_000,
        first_seed: 1,
        steps: 5_000,
        script: None,
        threads: 2,
        print: false,
    };
    while let Some(word) = words.next() {
        if word == "--print" {
            found.print = true;
            continue;
        }
        if word == "--help" {
            return Err("many seeds, or one script".to_owned());
        }
        let value = words
            .next()
            .ok_or_else(|| format!("{word} needs a value"))?;
        let number = || {
            value
                .parse::<u64>()
                .map_err(|_| format!("{word} {value} is no number"))
        };
        let size = || {
            value
                .parse::<usize>()
                .map_err(|_| format!("{word} {value} is no number"))
        };
        match word.as_str() {
            "--seeds" => found.seeds = number()?,
            "--first-seed" => found.first_seed = number()?,
            "--seed" => (found.first_seed, found.seeds) = (number()?, 1),
            "--steps" => found.steps = size()?,
            "--threads" => found.threads = size()?.max(1),
            "--script" => found.script = Some(value),
            unknown => return Err(format!("no argument is called {unknown:?}")),
        }
    }
    Ok(found)
}

fn replay(path: &str) -> ExitCode {
    let script = std::fs::read_to_string(path)
        .map_err(|error| error.to_string())
        .and_then(|text| Script::parse(&text));
    let script = match script {
        Ok(script) => script,
        Err(reason) => {
            eprintln!("{path}: {reason}");
            return ExitCode::from(2);
        }
    };
    match run(&script, None).1 {
        None => {
            println!("{path}: every guarantee holds");
            ExitCode::SUCCESS
        }
        Some(violation) => {
            println!("{path}: violated: {violation}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the seeds on a few threads, each seed on one of them alone.
fn explore(arguments: &Arguments) -> ExitCode {
    #[expect(clippy::disallowed_methods, reason = "the rate is measured")]
    let began = Instant::now();
    let next = AtomicU64::new(arguments.first_seed);
    let stop = AtomicBool::new(false);
    let found = Mutex::new(Found::default());
    std::thread::scope(|scope| {
        for _ in 0..arguments.threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let end = arguments.first_seed.saturating_add(arguments.seeds);
                    if seed >= end || stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let (counts, violation) = run(&generate(seed, arguments.steps), None);
                    let mut found = found.lock().expect("nobody panics while adding up");
                    found.counts.add(&counts);
                    found.seeds += 1;
                    if let Some(violation) = violation {
                        stop.store(true, Ordering::Relaxed);
                        // The lowest seed counts, so that threads make no difference.
                        if found
                            .violation
                            .as_ref()
                            .is_none_or(|(known, _)| seed < *known)
                        {
                            found.violation = Some((seed, violation));
                        }
                    }
                }
            });
        }
    });
    let Found {
        counts,
        seeds,
        violation,
    } = found.into_inner().expect("nobody panics while adding up");
    report(&counts, seeds, began.elapsed().as_secs_f64());
    let Some((seed, violation)) = violation else {
        println!("every guarantee holds");
        return ExitCode::SUCCESS;
    };
    println!("\nseed {seed} violates: {violation}");
    println!("making its script shorter …");
    let (script, violation) = shrink(&generate(seed, arguments.steps), None, SHRINK_RUNS);
    println!(
        "{} steps are left, which violate: {violation}\n",
        script.steps.len()
    );
    println!("# seed {seed}, {} steps; {violation}", arguments.steps);
    print!("{script}");
    ExitCode::FAILURE
}

#[expect(clippy::cast_precision_loss, reason = "for people to read")]
fn report(counts: &Counts, seeds: u64, seconds: f64) {
    let Counts {
        steps,
        transactions,
        troubled,
        crashes,
        restarts,
        resyncs,
        losses,
        virtual_us,
    } = counts;
    let share = 100.0 * *troubled as f64 / (*transactions).max(1) as f64;
    println!("{seeds} seeds, {steps} steps, {transactions} transactions");
    println!("{troubled} of them met a fault ({share:.0} %)");
    println!("{crashes} crashes, {restarts} restarts, {resyncs} resyncs, {losses} losses told");
    println!(
        "{:.1} s of virtual time in {seconds:.1} s: {:.0} transactions a second",
        *virtual_us as f64 / 1e6,
        *transactions as f64 / seconds.max(1e-9),
    );
}
