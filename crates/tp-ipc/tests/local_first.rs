//! Local first, and all or nothing: the local rank has done its part, and it was checked, before
//! anything is sent. If it fails, nothing is sent and nothing has changed. If another rank fails,
//! everything is undone on exactly the ranks that did it, the local one included; what cannot be
//! known is named, and its rank is suspect.

use std::collections::BTreeSet;

use kvcached_mapper::{Cause, MapError, Mapper, PageRun, PeerCause, Rank, Stage};
use kvcached_tp_ipc::{Answer, Operation};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::simulated::{
    At, Call, Engine, Event, Fault, Faults, Refusing, TIMEOUT, faults, nth, runs, topologies,
};

/// One batch of a session: the bits of `mask` that can be mapped, or unmapped, are.
#[derive(Debug, Clone)]
struct Step {
    unmap: bool,
    mask: u8,
    faults: Faults,
    /// A connection that ends before.
    cut: Option<Index>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let cut = prop_oneof![12 => Just(None), 1 => any::<Index>().prop_map(Some)];
    let step =
        (any::<bool>(), any::<u8>(), faults(), cut).prop_map(|(unmap, mask, faults, cut)| Step {
            unmap,
            mask,
            faults,
            cut,
        });
    prop::collection::vec(step, 1..6)
}

/// Sends a batch through the engine and returns what it came to.
fn batch(
    engine: &mut Engine,
    unmap: bool,
    batch: &[PageRun],
    faults: &Faults,
) -> Result<(), MapError> {
    let operation = if unmap {
        Operation::Unmap(batch)
    } else {
        Operation::Map(batch)
    };
    match engine.perform(operation, faults) {
        Answer::Batch(result) => result,
        other => panic!("{other:?}"),
    }
}

fn messages(log: &[Event]) -> usize {
    log.iter()
        .filter(|event| matches!(event, Event::Sent { .. } | Event::Greeted { .. }))
        .count()
}

/// Ranks to which `call` was sent.
fn sent(log: &[Event], wanted: Call) -> BTreeSet<At> {
    let to = |event: &Event| match event {
        Event::Sent { to, call, .. } if *call == wanted => Some(*to),
        _ => None,
    };
    log.iter().filter_map(to).collect()
}

/// The rank that an error is about, if it is not the local one.
fn blamed(cause: &Cause) -> Option<At> {
    match cause {
        Cause::OutOfMemory { at } => *at,
        Cause::Peer { stage, rank, .. } | Cause::Diverged { stage, rank } => Some((*stage, *rank)),
        _ => None,
    }
}

/// Does the cause tell what really happened?
fn explains(fault: Fault, cause: &Cause) -> bool {
    let peer = match cause {
        Cause::OutOfMemory { .. } => return fault == Fault::Refuses(Refusing::Full),
        Cause::Peer { cause, .. } => cause,
        _ => return false,
    };
    match fault {
        Fault::Refuses(_) => matches!(peer, PeerCause::Refused { .. }),
        Fault::RequestLost | Fault::ReplyLost => matches!(peer, PeerCause::TimedOut { .. }),
        Fault::SendFails | Fault::CutBefore | Fault::CutAfter => {
            matches!(peer, PeerCause::Disconnected { .. })
        }
        Fault::Garbage
        | Fault::BrokenFrame
        | Fault::FutureReply
        | Fault::WrongKind
        | Fault::Violation => matches!(peer, PeerCause::Protocol { .. }),
        Fault::Fine | Fault::LateReplyFirst | Fault::ReplyTwice | Fault::CutAfterReply => false,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    /// The whole of it: a session of batches with faults anywhere, held against a model that only
    /// knows the set of runs that every rank must have.
    #[test]
    fn a_batch_ends_on_all_ranks_or_on_none(topology in topologies(), steps in steps()) {
        let mut engine = Engine::connected(&topology);
        let remotes = engine.remotes();
        let alone = remotes.is_empty();
        let mut expected: BTreeSet<PageRun> = BTreeSet::new();
        let mut was_cut = false;

        for Step { unmap, mask, faults, cut } in steps {
            let chosen = runs(mask);
            let chosen: Vec<PageRun> =
                chosen.into_iter().filter(|run| expected.contains(run) == unmap).collect();
            let was_fenced = !engine.suspects().is_empty();
            if let (Some(index), false) = (cut, alone) {
                engine.cut(index.index(remotes.len()));
                was_cut = true;
            }
            let result = batch(&mut engine, unmap, &chosen, &faults);
            let log = engine.take_log();
            let suspects = engine.suspects();
            let (apply, undo) = if unmap { (Call::Unmap, Call::Map) } else { (Call::Map, Call::Unmap) };

            // Local first: before it was called, and unless it did it, nothing is sent.
            if let Some(first) = log.iter().position(|e| matches!(e, Event::Sent { .. }))
                && let Some(at) = topology.local()
            {
                let call = Event::Called { at, call: apply, runs: chosen.clone() };
                prop_assert_eq!(log.iter().position(|event| *event == call), Some(0));
                prop_assert!(first > 0);
                prop_assert_eq!(faults.local, None);
            }

            let Err(error) = result else {
                if unmap {
                    expected.retain(|run| !chosen.contains(run));
                } else {
                    expected.extend(chosen);
                }
                prop_assert!(suspects.is_empty() || log.is_empty());
                for (at, mapper) in engine.mappers() {
                    if log.is_empty() {
                        break;
                    }
                    prop_assert_eq!(mapper.mapped(), expected.clone(), "{:?}", at);
                }
                continue;
            };

            // Only runs of the batch are ever in doubt, and they are all that may differ.
            let doubt: BTreeSet<PageRun> = error.uncertain.iter().copied().collect();
            prop_assert!(doubt.iter().all(|run| chosen.contains(run)));
            if !was_fenced {
                for (at, mapper) in engine.mappers() {
                    let mapped = mapper.mapped();
                    prop_assert!(
                        mapped.symmetric_difference(&expected).all(|run| doubt.contains(run)),
                        "{:?} has {:?}, not {:?}, after {}", at, mapped, expected, error
                    );
                    if !alone && !suspects.contains(&at) {
                        prop_assert_eq!(mapped, expected.clone(), "{:?} after {}", at, error);
                    }
                }
            }

            if was_fenced {
                // Fenced: nothing is done anywhere.
                prop_assert_eq!(blamed(&error.cause), suspects.first().copied());
                let diverged = matches!(error.cause, Cause::Diverged { .. });
                prop_assert!(diverged && doubt.is_empty() && log.is_empty());
                continue;
            }
            if log.is_empty() {
                // A connection that was gone before: nothing was begun, nothing is in doubt.
                prop_assert!(doubt.is_empty());
                prop_assert!(was_cut);
                continue;
            }
            if topology.local().is_some() && faults.local.is_some() {
                // Local failure: the local mapper's own words, and nothing was sent.
                prop_assert_eq!(messages(&log), 0);
                prop_assert_eq!(blamed(&error.cause), None);
                let in_doubt = matches!(faults.local, Some(Refusing::Doubt { .. }));
                prop_assert_eq!(!doubt.is_empty(), in_doubt);
                prop_assert_eq!(!suspects.is_empty(), in_doubt && !alone);
                if in_doubt && alone {
                    // Nobody to differ from; what becomes of the run is decided above.
                    return Ok(());
                }
                continue;
            }
            // A remote failure: blamed on a rank that had one, by its real stage and rank.
            let at = blamed(&error.cause).expect("a remote rank is to blame");
            let index = remotes.iter().position(|remote| *remote == at).expect("it is a rank");
            let fault = nth(&faults.remote, index);
            prop_assert!(!fault.is_harmless());
            prop_assert!(explains(fault, &error.cause), "{:?} is no {}", fault, error.cause);
            // Undone on exactly those that did it, and were known to have.
            let did: BTreeSet<At> = (0..remotes.len())
                .filter(|index| nth(&faults.remote, *index).is_harmless())
                .map(|index| remotes[index])
                .collect();
            prop_assert_eq!(sent(&log, undo), did);
            let local_undone = topology.local().is_some_and(|at| {
                log.contains(&Event::Called { at, call: undo, runs: chosen.clone() })
            });
            prop_assert_eq!(local_undone, topology.local().is_some());
            // What is unknown is named, and its rank is suspect; otherwise nobody is.
            prop_assert_eq!(suspects.is_empty(), doubt.is_empty());
        }
    }
}

/// Two remote ranks, both connected, and a local one.
fn three_ranks() -> Engine {
    let temp = tempfile::tempdir().unwrap();
    let runtime = kvcached_tp_ipc::RuntimeDir::open(&temp.path().join("run")).unwrap();
    let dir = runtime.instance(&"three".parse().unwrap()).unwrap();
    Engine::connected(&kvcached_tp_ipc::Topology::rank0_coordinates(3, &dir))
}

fn mapped(engine: &Engine) -> Vec<Vec<PageRun>> {
    engine
        .mappers()
        .iter()
        .map(|(_, mapper)| mapper.mapped().into_iter().collect())
        .collect()
}

#[test]
fn a_local_failure_is_returned_and_nothing_is_sent() {
    let mut engine = three_ranks();
    let faults = Faults {
        local: Some(Refusing::Full),
        ..Faults::default()
    };
    let error = batch(&mut engine, false, &runs(1), &faults).unwrap_err();
    assert_eq!(error, MapError::clean(Cause::OutOfMemory { at: None }));
    assert_eq!(messages(&engine.take_log()), 0);
    assert!(mapped(&engine).iter().all(Vec::is_empty));
    // And the next one goes through.
    assert_eq!(
        batch(&mut engine, false, &runs(1), &Faults::default()),
        Ok(())
    );
}

/// A rank with less room than the others: a normal answer that says where, and no trace.
#[test]
fn one_full_rank_means_full_and_nothing_mapped_anywhere() {
    let mut engine = three_ranks();
    let remote = vec![Fault::Fine, Fault::Refuses(Refusing::Full)];
    let faults = Faults {
        remote,
        ..Faults::default()
    };
    let error = batch(&mut engine, false, &runs(0b101), &faults).unwrap_err();
    assert!(error.is_full());
    assert_eq!(
        error.cause,
        Cause::OutOfMemory {
            at: Some((Stage(0), Rank(2)))
        }
    );
    assert!(mapped(&engine).iter().all(Vec::is_empty));
    assert_eq!(
        batch(&mut engine, false, &runs(0b101), &Faults::default()),
        Ok(())
    );
}

/// Undoing takes back what this batch mapped, and nothing that was there before.
#[test]
fn undoing_leaves_what_was_mapped_before() {
    let mut engine = three_ranks();
    batch(&mut engine, false, &runs(0b1), &Faults::default()).unwrap();
    let remote = vec![Fault::Refuses(Refusing::Driver), Fault::Fine];
    let faults = Faults {
        remote,
        ..Faults::default()
    };
    let error = batch(&mut engine, false, &runs(0b10), &faults).unwrap_err();
    assert_eq!(
        error.to_string(),
        "stage 0, rank 1 did not map: no usable device: it fell off the bus"
    );
    assert_eq!(mapped(&engine), vec![runs(0b1); 3]);
    let error = batch(&mut engine, true, &runs(0b1), &faults).unwrap_err();
    assert!(error.uncertain.is_empty());
    assert_eq!(mapped(&engine), vec![runs(0b1); 3]);
}

/// A page that one rank has already is a mistake above, and shows; it is not hidden.
#[test]
fn a_duplicate_map_is_an_error_that_changes_nothing() {
    let mut engine = three_ranks();
    batch(&mut engine, false, &runs(0b1), &Faults::default()).unwrap();
    let error = batch(&mut engine, false, &runs(0b1), &Faults::default()).unwrap_err();
    assert!(
        matches!(error.cause, Cause::State { call: "map", .. }),
        "{error}"
    );
    assert_eq!(mapped(&engine), vec![runs(0b1); 3]);
}

/// The same where only one rank has the page: it refuses and is named, the others undo, and what
/// it had is not undone with them.
#[test]
fn a_page_that_another_rank_has_already_shows_and_stays_there() {
    let mut engine = three_ranks();
    let (at, ahead) = engine.mappers().pop().unwrap();
    ahead.map(&runs(0b1)).unwrap();
    let error = batch(&mut engine, false, &runs(0b11), &Faults::default()).unwrap_err();
    assert_eq!(blamed(&error.cause), Some(at));
    assert!(
        matches!(
            &error.cause,
            Cause::Peer {
                call: "map",
                cause: PeerCause::Refused { .. },
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(error.uncertain, []);
    assert_eq!(mapped(&engine), [vec![], vec![], runs(0b1)]);
}

#[test]
fn a_lost_reply_is_not_success_and_fences_the_rank() {
    let mut engine = three_ranks();
    let remote = vec![Fault::Fine, Fault::ReplyLost];
    let faults = Faults {
        remote,
        ..Faults::default()
    };
    let error = batch(&mut engine, false, &runs(0b11), &faults).unwrap_err();
    assert_eq!(error.uncertain, runs(0b11));
    let cause = PeerCause::TimedOut { timeout_ms: 60_000 };
    let (stage, rank) = (Stage(0), Rank(2));
    assert_eq!(
        error.cause,
        Cause::Peer {
            stage,
            rank,
            call: "map",
            cause
        }
    );
    // The others are as before; of rank 2 it is not known, and here it is mapped.
    assert_eq!(mapped(&engine), [vec![], vec![], runs(0b11)]);
    assert_eq!(engine.suspects(), [(stage, rank)]);
    engine.take_log();
    let error = batch(&mut engine, false, &runs(0b100), &Faults::default()).unwrap_err();
    assert_eq!(error, MapError::clean(Cause::Diverged { stage, rank }));
    assert_eq!(engine.take_log(), []);
}

#[test]
fn an_undo_that_fails_is_named_and_fences_its_rank() {
    let mut engine = three_ranks();
    let faults = Faults {
        remote: vec![Fault::Fine, Fault::Refuses(Refusing::Full)],
        remote_undo: vec![Fault::Refuses(Refusing::Driver)],
        ..Faults::default()
    };
    let error = batch(&mut engine, false, &runs(0b1), &faults).unwrap_err();
    assert!(
        !error.is_full(),
        "full is a normal answer only if nothing is in doubt"
    );
    assert_eq!(error.uncertain, runs(0b1));
    assert_eq!(engine.suspects(), [(Stage(0), Rank(1))]);
    assert_eq!(mapped(&engine), [vec![], runs(0b1), vec![]]);
}

#[test]
fn a_local_undo_that_fails_is_named_and_fences_this_process() {
    let mut engine = three_ranks();
    let faults = Faults {
        local_undo: Some(Refusing::Driver),
        remote: vec![Fault::Refuses(Refusing::Full), Fault::Fine],
        ..Faults::default()
    };
    let error = batch(&mut engine, false, &runs(0b1), &faults).unwrap_err();
    assert_eq!(error.uncertain, runs(0b1));
    assert_eq!(engine.suspects(), [(Stage(0), Rank(0))]);
    assert_eq!(mapped(&engine), [runs(0b1), vec![], vec![]]);
}

/// A rank that died while nothing was under way is noticed before anything is done.
#[test]
fn a_rank_that_is_gone_before_puts_no_page_in_doubt() {
    let mut engine = three_ranks();
    batch(&mut engine, false, &runs(0b1), &Faults::default()).unwrap();
    engine.take_log();
    engine.cut(0);
    let error = batch(&mut engine, false, &runs(0b10), &Faults::default()).unwrap_err();
    let (stage, rank) = (Stage(0), Rank(1));
    assert_eq!(error, MapError::clean(Cause::Diverged { stage, rank }));
    assert_eq!(engine.take_log(), []);
}

/// Once for the ranks to do it, once for those that did to undo it, each its full time.
#[test]
fn a_batch_waits_twice_its_bound_at_most() {
    let mut engine = three_ranks();
    let faults = Faults {
        remote: vec![Fault::Fine, Fault::RequestLost],
        remote_undo: vec![Fault::ReplyLost],
        ..Faults::default()
    };
    let begun = engine.now();
    let error = batch(&mut engine, false, &runs(0b1), &faults).unwrap_err();
    assert_eq!(engine.now() - begun, 2 * TIMEOUT);
    assert_eq!(error.uncertain, runs(0b1));
    assert_eq!(
        engine.suspects(),
        [(Stage(0), Rank(1)), (Stage(0), Rank(2))]
    );
}

/// It had done its part and said so; then it went, and cannot be told to undo it.
#[test]
fn a_rank_that_is_gone_when_others_fail_is_named_and_fenced() {
    let mut engine = three_ranks();
    let remote = vec![Fault::CutAfterReply, Fault::Refuses(Refusing::Full)];
    let faults = Faults {
        remote,
        ..Faults::default()
    };
    let error = batch(&mut engine, false, &runs(0b1), &faults).unwrap_err();
    assert_eq!(error.uncertain, runs(0b1));
    assert_eq!(engine.suspects(), [(Stage(0), Rank(1))]);
    assert_eq!(mapped(&engine), [vec![], runs(0b1), vec![]]);
}

/// The local rank did its part in vain: it undoes it, nobody else is told anything.
#[test]
fn a_rank_that_goes_while_the_local_one_is_at_work_stops_the_batch() {
    let mut engine = three_ranks();
    batch(&mut engine, false, &runs(0b1), &Faults::default()).unwrap();
    engine.take_log();
    let faults = Faults {
        cut_meanwhile: true,
        ..Faults::default()
    };
    let error = batch(&mut engine, false, &runs(0b10), &faults).unwrap_err();
    let (stage, rank) = (Stage(0), Rank(1));
    assert_eq!(error, MapError::clean(Cause::Diverged { stage, rank }));
    assert_eq!(messages(&engine.take_log()), 0);
    assert_eq!(mapped(&engine), vec![runs(0b1); 3]);
}

/// A graver failure hides a lesser one, not the reverse: who is told "full" tries again.
#[test]
fn broken_outweighs_full() {
    let mut engine = three_ranks();
    let remote = vec![
        Fault::Refuses(Refusing::Full),
        Fault::Refuses(Refusing::Driver),
    ];
    let faults = Faults {
        remote,
        ..Faults::default()
    };
    let error = batch(&mut engine, false, &runs(0b1), &faults).unwrap_err();
    assert_eq!(blamed(&error.cause), Some((Stage(0), Rank(2))));
    assert!(!error.is_full());
}
