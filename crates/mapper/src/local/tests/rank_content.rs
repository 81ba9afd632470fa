//! A rank's part of transactions by content, over real memory: what stays mapped through an abort
//! or a resync keeps every byte, and what does not is told.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::content::{Flaky, read_word, words};
use super::rank::{Op, PAGES, Runs, What, ask, ops, pools};
use super::*;

/// Every word that is somewhere in `run`.
#[track_caller]
fn stamps_of(mapper: &LocalMapper<Flaky>, run: PageRun) -> BTreeSet<u64> {
    let words = run
        .pages()
        .flat_map(|page| words(mapper.geometry(), page))
        .map(|word| read_word(mapper, word).expect("it is mapped"));
    words.collect()
}

/// The word that is everywhere in `run`.
#[track_caller]
fn stamp_of(mapper: &LocalMapper<Flaky>, run: PageRun) -> u64 {
    let stamps = stamps_of(mapper, run);
    assert_eq!(stamps.len(), 1, "{run} is of one piece: {stamps:?}");
    stamps.into_iter().next().expect("one")
}

fn stamp(mapper: &LocalMapper<Flaky>, run: PageRun, stamp: u64) {
    for page in run.pages() {
        for word in words(mapper.geometry(), page) {
            let bytes = stamp.to_le_bytes();
            mapper.write(word, &bytes).expect("it is mapped");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn what_stays_keeps_every_byte_and_what_was_remade_is_told(
        (geometry, cold) in pools(),
        recycles in any::<bool>(),
        ops in ops(&[Call::Create, Call::Map, Call::Unmap], 25),
    ) {
        let device = Flaky::new();
        let mut mapper = local(&device, &geometry, cold);
        if recycles {
            mapper = mapper.with_recycler(&recycler(&device));
        }
        // What a page that is mapped anew may show: what was written since the last resync.
        let mut fresh = BTreeSet::from([0]);
        // What was written to each run, for as long as nobody was told that it is lost.
        let mut written: BTreeMap<PageRun, u64> = BTreeMap::new();
        // Runs that a failed resync remade: empty, and owed to the next that answers.
        let mut owed: BTreeSet<PageRun> = BTreeSet::new();
        for (next, Op { what, faults }) in (1..).zip(ops) {
            let runs = Runs::of(&mapper).named(&what);
            // `for_good` is said by several faults here.
            let script = faults.iter().flat_map(|fault| {
                let last = if fault.for_good { fault.nth + 20 } else { fault.nth };
                (fault.nth..=last).map(|nth| (fault.call, nth))
            });
            device.script(script.collect());
            let answer = ask(&mapper, &what, &runs);
            device.script(Vec::new());

            if matches!(what, What::Resync(..)) {
                fresh = BTreeSet::from([0]);
            }
            let after = Runs::of(&mapper);
            let is_known = |run: &PageRun| after.mapped.contains(run) || after.prepared.contains(run);
            written.retain(|run, _| is_known(run));
            owed.retain(is_known);
            match (&what, &answer.outcome) {
                (What::Map(_), Ok(())) => for &run in &runs {
                    let found = stamps_of(&mapper, run);
                    prop_assert!(found.is_subset(&fresh), "{:?} in fresh memory", found);
                    stamp(&mapper, run, next);
                    written.insert(run, next);
                },
                (What::Resync(..), Ok(())) => {
                    for &run in &answer.remade {
                        prop_assert_eq!(stamp_of(&mapper, run), 0, "remade memory is zero");
                        written.remove(&run);
                        owed.remove(&run);
                        // Whoever was told writes again.
                        stamp(&mapper, run, next);
                        written.insert(run, next);
                    }
                    prop_assert!(owed.is_empty(), "never told: {:?}", owed);
                }
                (What::Resync(..), Err(_)) => for &run in &after.mapped {
                    if stamp_of(&mapper, run) == 0 {
                        written.remove(&run);
                        owed.insert(run);
                    }
                },
                _ => {}
            }
            for &run in &after.mapped {
                let expected = written.get(&run).copied().unwrap_or(0);
                prop_assert_eq!(stamp_of(&mapper, run), expected, "{} after {:?}", run, what);
                prop_assert!(expected != 0 || owed.contains(&run), "{} lost its bytes", run);
            }
            if recycles {
                fresh.extend(written.values());
            }
        }

        // Also what is prepared at the end still has its bytes.
        let last = Runs::of(&mapper);
        let prepared: Vec<PageRun> = last.prepared.iter().copied().collect();
        mapper.abort_unmap(&prepared).unwrap();
        for run in prepared {
            prop_assert_eq!(stamp_of(&mapper, run), written.get(&run).copied().unwrap_or(0));
        }
        drop(mapper);
        let memory = device.memory().expect("the host knows");
        prop_assert_eq!(memory.free, memory.total);
    }
}

#[test]
fn an_abort_brings_every_byte_back() {
    for geometry in all_geometries(PAGES) {
        for cold in BOTH {
            let device = Flaky::new();
            let mapper = local(&device, &geometry, cold);
            let runs = [run(0, 3), run(5, 1)];
            mapper.map(&runs).unwrap();
            runs.iter()
                .zip(1..)
                .for_each(|(&run, with)| stamp(&mapper, run, with));
            for _ in 0..3 {
                mapper.prepare_unmap(&runs, After::NOTHING).unwrap();
                for run in runs {
                    let word = words(&geometry, run.first())[0];
                    let stray = read_word(&mapper, word);
                    match cold {
                        Cold::Zero => assert_eq!(stray, Ok(0), "it is out of reach"),
                        Cold::Unbacked => assert!(stray.is_err(), "it is out of reach"),
                    }
                }
                mapper.abort_unmap(&runs).unwrap();
                assert_eq!(runs.map(|run| stamp_of(&mapper, run)), [1, 2]);
            }
        }
    }
}

#[test]
fn a_resync_keeps_what_stays_restores_what_was_prepared_and_makes_the_rest() {
    for geometry in all_geometries(PAGES) {
        for cold in BOTH {
            let device = Flaky::new();
            let mapper = local(&device, &geometry, cold);
            let (stays, prepared, goes, comes) = (run(0, 2), run(2, 1), run(4, 2), run(5, 2));
            mapper.map(&[stays, prepared, goes]).unwrap();
            for (run, with) in [(stays, 1), (prepared, 2), (goes, 3)] {
                stamp(&mapper, run, with);
            }
            mapper.prepare_unmap(&[prepared], After::NOTHING).unwrap();
            let told = mapper.resync(&[stays, prepared, comes]).unwrap();
            assert_eq!((told.remade, told.in_doubt), (vec![comes], vec![]));
            let stamps = [stays, prepared, comes].map(|run| stamp_of(&mapper, run));
            assert_eq!(stamps, [1, 2, 0]);
        }
    }
}
