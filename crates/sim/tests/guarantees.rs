//! The guarantees over many seeds and over every script that once violated one; and that each of
//! them would be missed if it were broken.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use kvcached_sim::{Counts, Guarantee, Sabotage, Script, Violation, generate, run, shrink};

const SEEDS: u64 = 600;
const STEPS: usize = 1_200;

#[derive(Debug, Default)]
struct Found {
    counts: Counts,
    violation: Option<(u64, Violation)>,
}

/// Runs the seeds on two threads until one violates something.
fn explore(seeds: u64, steps: usize) -> Found {
    let next = AtomicU64::new(1);
    let found = Mutex::new(Found::default());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed > seeds {
                        return;
                    }
                    let (counts, violation) = run(&generate(seed, steps), None);
                    let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                    found.counts.add(&counts);
                    if let Some(violation) = violation {
                        found.violation = Some((seed, violation));
                        next.store(seeds + 1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn every_guarantee_holds_whatever_fails() {
    let Found { counts, violation } = explore(SEEDS, STEPS);
    if let Some((seed, violation)) = violation {
        panic!("{violation}: cargo xtask sim --seed {seed} --steps {STEPS}");
    }
    // That they hold says little if nothing failed, or nothing was done.
    let Counts {
        transactions,
        troubled,
        crashes,
        losses,
        ..
    } = counts;
    assert!(transactions > SEEDS * 50, "{counts:?}");
    assert!(troubled * 5 > transactions, "{counts:?}");
    assert!(crashes > SEEDS && losses > SEEDS, "{counts:?}");
}

#[test]
fn what_once_violated_a_guarantee_does_so_no_more() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions");
    let mut replayed = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_some_and(|extension| extension == "script")
        {
            let text = fs::read_to_string(&path).unwrap();
            let script = Script::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert_eq!(run(&script, None).1, None, "{}", path.display());
            replayed += 1;
        }
    }
    assert!(replayed > 0);
}

#[test]
fn a_run_is_a_function_of_its_script() {
    for seed in 1..20 {
        let script = generate(seed, 300);
        let again = Script::parse(&script.to_string()).unwrap();
        assert_eq!(run(&script, None), run(&again, None), "seed {seed}");
    }
}

/// The first of a hundred seeds that shows a mistake made on purpose.
fn first_caught(sabotage: Sabotage) -> (Script, Violation) {
    let mut scripts = (1..=100).map(|seed| generate(seed, 600));
    let caught = scripts.find_map(|script| {
        let (_, violation) = run(&script, Some(sabotage));
        violation.map(|violation| (script, violation))
    });
    caught.expect("a mistake is caught within a hundred seeds")
}

#[test]
fn a_shell_that_skips_undo_is_caught() {
    let (_, violation) = first_caught(Sabotage::SkipUndo);
    assert_eq!(violation.guarantee, Guarantee::AllOrNone);
}

#[test]
fn a_shell_that_forgets_a_rank_is_caught() {
    let (_, violation) = first_caught(Sabotage::ForgetARank);
    assert_eq!(violation.guarantee, Guarantee::AllOrNone);
}

#[test]
fn memory_taken_before_its_epoch_has_retired_is_caught() {
    let (_, violation) = first_caught(Sabotage::ReuseBeforeRetired);
    assert_eq!(violation.guarantee, Guarantee::NothingTakenEarly);
}

#[test]
fn a_shell_that_trusts_a_lost_reply_is_caught() {
    let (_, violation) = first_caught(Sabotage::TrustLostReply);
    assert_eq!(violation.guarantee, Guarantee::AllOrNone);
}

#[test]
fn a_shrunk_script_violates_the_same_guarantee_from_its_text() {
    let sabotage = Some(Sabotage::SkipUndo);
    let (script, violation) = first_caught(Sabotage::SkipUndo);
    let (shorter, again) = shrink(&script, sabotage, 500);
    assert_eq!(again.guarantee, violation.guarantee);
    assert!(shorter.steps.len() * 4 < script.steps.len(), "{shorter}");
    let read = Script::parse(&shorter.to_string()).unwrap();
    assert_eq!(run(&read, sabotage).1, Some(again));
}
