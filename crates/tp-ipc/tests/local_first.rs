//! Local first, and all or nothing: the local rank has done its part, and it was checked, before
//! anything is sent. If it fails, nothing is sent and nothing has changed. If another rank fails,
//! everything is undone on exactly the ranks that did it, the local one included; what cannot be
//! known is named, and its rank is suspect, or degraded where it can still be spoken to. One
//! reconciliation then makes all ranks equal.

use std::collections::BTreeSet;

use kvcached_mapper::{
    After, Cause, Epoch, Health, MapError, Mapper, PageRun, PeerCause, Rank, Readiness, Reconciled,
    Stage,
};
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
    /// A rank that is replaced by another process before.
    replaced: Option<Index>,
    /// Is everything mended afterwards?
    reconciled: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let cut = prop_oneof![12 => Just(None), 1 => any::<Index>().prop_map(Some)];
    let replaced = cut.clone();
    let step = (
        any::<bool>(),
        any::<u8>(),
        faults(),
        cut,
        replaced,
        any::<bool>(),
    )
        .prop_map(|(unmap, mask, faults, cut, replaced, reconciled)| Step {
            unmap,
            mask,
            faults,
            cut,
            replaced,
            reconciled,
        });
    prop::collection::vec(step, 1..8)
}

/// One reconciliation in which nothing goes wrong.
fn reconcile(engine: &mut Engine, doubtful: &[PageRun]) -> Reconciled {
    match engine.perform(Operation::Reconcile(doubtful), &Faults::default()) {
        Answer::Reconciled(Ok(reconciled)) => reconciled,
        other => panic!("{other:?}"),
    }
}

/// Sends a batch through the engine and returns what it came to.
fn batch(
    engine: &mut Engine,
    unmap: bool,
    batch: &[PageRun],
    faults: &Faults,
) -> Result<(), MapError> {
    let operation = if unmap {
        Operation::Unmap(batch, After::DEVICE)
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
        let mut quarantined: BTreeSet<PageRun> = BTreeSet::new();
        let mut content_lost: BTreeSet<At> = BTreeSet::new();

        for Step { unmap, mask, faults, cut, replaced, reconciled } in steps {
            let chosen: Vec<PageRun> = runs(mask)
                .into_iter()
                .filter(|run| expected.contains(run) == unmap && !quarantined.contains(run))
                .collect();
            let was_fenced = engine.health().is_fenced();
            if let (Some(index), false) = (cut, alone) {
                engine.cut(index.index(remotes.len()));
            }
            if let (Some(index), false) = (replaced, alone) {
                let index = index.index(remotes.len());
                engine.replace(index);
                if expected.iter().any(|run| !quarantined.contains(run)) {
                    content_lost.insert(remotes[index]);
                }
            }
            let broken = was_fenced || !alone && (cut.is_some() || replaced.is_some());
            let result = batch(&mut engine, unmap, &chosen, &faults);
            let log = engine.take_log();
            let suspects = engine.suspects();
            let begin = if unmap { Call::Prepare } else { Call::Map };

            // Local first: before it was called, and unless it did it, nothing is sent.
            if let Some(first) = log.iter().position(|e| matches!(e, Event::Sent { .. }))
                && let Some(at) = topology.local()
            {
                let call = Event::Called { at, call: begin, runs: chosen.clone() };
                prop_assert_eq!(log.iter().position(|event| *event == call), Some(0));
                prop_assert!(first > 0);
                prop_assert_eq!(faults.local, None);
            }

            match result {
                Ok(()) => {
                    // An unmap goes on without those that are away.
                    prop_assert!(!was_fenced || unmap || chosen.is_empty());
                    if unmap {
                        expected.retain(|run| !chosen.contains(run));
                    } else {
                        expected.extend(&chosen);
                    }
                }
                Err(error) => {
                    // Only runs of the batch are ever in doubt.
                    prop_assert!(error.uncertain.iter().all(|run| chosen.contains(run)));
                    quarantined.extend(&error.uncertain);
                    if log.is_empty() {
                        // Fenced, or a connection that was gone before: nothing was begun.
                        prop_assert!(broken);
                        prop_assert!(error.uncertain.is_empty());
                        prop_assert_eq!(blamed(&error.cause), suspects.first().copied());
                        let diverged = matches!(error.cause, Cause::Diverged { .. });
                        prop_assert!(diverged);
                    } else if topology.local().is_some() && faults.local.is_some() {
                        // Local failure: the local mapper's own words, and nothing was sent.
                        prop_assert_eq!(messages(&log), 0);
                        prop_assert_eq!(blamed(&error.cause), None);
                        let in_doubt = matches!(faults.local, Some(Refusing::Doubt { .. }));
                        prop_assert_eq!(!error.uncertain.is_empty(), in_doubt);
                    } else {
                        // A remote failure: blamed on a rank that had one, by its real stage and
                        // rank.
                        let at = blamed(&error.cause).expect("a remote rank is to blame");
                        let index = remotes.iter().position(|remote| *remote == at);
                        let fault = nth(&faults.remote, index.expect("it is a rank"));
                        prop_assert!(explains(fault, &error.cause), "{:?} is no {}", fault, error.cause);
                        // Undone on exactly those that did it, and were known to have.
                        let asked = sent(&log, begin);
                        let did: BTreeSet<At> = (0..remotes.len())
                            .filter(|index| nth(&faults.remote, *index).is_harmless())
                            .map(|index| remotes[index])
                            .filter(|at| asked.contains(at))
                            .collect();
                        prop_assert_eq!(sent(&log, Call::Undo), did);
                        if let Some(at) = topology.local() {
                            let undone = Event::Called { at, call: Call::Undo, runs: chosen.clone() };
                            prop_assert!(log.contains(&undone));
                        }
                        // Whoever cannot be relied on is suspect, and its pages are in doubt.
                        let degraded = matches!(engine.health(), Health::Degraded { .. });
                        prop_assert!(suspects.is_empty() || broken || !error.uncertain.is_empty());
                        prop_assert!(error.uncertain.is_empty() || degraded || !suspects.is_empty());
                    }
                }
            }
            prop_assert_eq!(engine.agreed(), expected.clone());
            // Whoever counts has what it should, but for what is in doubt.
            for (at, mapper) in engine.mappers() {
                if suspects.contains(&at) {
                    continue;
                }
                let mapped = mapper.mapped();
                let differs: Vec<_> = mapped.symmetric_difference(&expected).collect();
                let known = differs.iter().all(|run| quarantined.contains(run));
                // A rank that was replaced and not spoken to since looks as it did.
                prop_assert!(known || broken && chosen.is_empty(), "{:?} has {:?}", at, mapped);
            }

            if reconciled {
                let doubtful: Vec<PageRun> = quarantined.iter().copied().collect();
                let found = reconcile(&mut engine, &doubtful);
                engine.take_log();
                prop_assert_eq!(engine.health(), Health::Healthy);
                for (at, mapper) in engine.mappers() {
                    prop_assert_eq!(mapper.mapped(), expected.clone(), "{:?}", at);
                }
                let (mapped, cold): (Vec<PageRun>, Vec<PageRun>) =
                    doubtful.iter().partition(|run| expected.contains(run));
                prop_assert_eq!((found.mapped, found.cold), (mapped, cold));
                let lost: BTreeSet<At> = found.lost.iter().copied().collect();
                // Unless everything that there was to lose has been given up since.
                let kept = expected.iter().any(|run| !quarantined.contains(run));
                let told = content_lost.is_subset(&lost);
                prop_assert!(told || !kept, "{:?} {:?}", content_lost, lost);
                quarantined.clear();
                content_lost.clear();
            }
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
    // That it has other pages is known by now: it does not count until it has the same.
    assert_eq!(engine.suspects(), [at]);
    assert_eq!(mapped(&engine), [vec![], vec![], runs(0b1)]);
    let found = reconcile(&mut engine, &error.uncertain);
    assert_eq!(found.cold, error.uncertain);
    assert_eq!(mapped(&engine), vec![Vec::<PageRun>::new(); 3]);
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
fn an_undo_that_fails_is_named_and_degrades_its_rank() {
    let mut engine = three_ranks();
    let faults = Faults {
        remote: vec![Fault::Fine, Fault::Refuses(Refusing::Full)],
        remote_then: vec![Fault::Refuses(Refusing::Driver)],
        ..Faults::default()
    };
    let error = batch(&mut engine, false, &runs(0b1), &faults).unwrap_err();
    assert!(
        !error.is_full(),
        "full is a normal answer only if nothing is in doubt"
    );
    assert_eq!(error.uncertain, runs(0b1));
    assert_eq!(degraded(&engine), [(Stage(0), Rank(1))]);
    assert_eq!(mapped(&engine), [vec![], runs(0b1), vec![]]);
    // Everything else goes on meanwhile.
    let other = batch(&mut engine, false, &runs(0b10), &Faults::default());
    assert_eq!(other, Ok(()));
    assert_eq!(reconcile(&mut engine, &runs(0b1)).cold, runs(0b1));
    assert_eq!(mapped(&engine), vec![runs(0b10); 3]);
}

/// Ranks in doubt that can be spoken to.
fn degraded(engine: &Engine) -> Vec<At> {
    match engine.health() {
        Health::Degraded { ranks, .. } => ranks.iter().map(|it| (it.stage, it.rank)).collect(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_local_undo_that_fails_is_named_and_degrades_this_process() {
    let mut engine = three_ranks();
    let faults = Faults {
        local_undo: Some(Refusing::Driver),
        remote: vec![Fault::Refuses(Refusing::Full), Fault::Fine],
        ..Faults::default()
    };
    let error = batch(&mut engine, false, &runs(0b1), &faults).unwrap_err();
    assert_eq!(error.uncertain, runs(0b1));
    assert_eq!(degraded(&engine), [(Stage(0), Rank(0))]);
    assert_eq!(mapped(&engine), [runs(0b1), vec![], vec![]]);
    assert_eq!(reconcile(&mut engine, &runs(0b1)).cold, runs(0b1));
    assert_eq!(mapped(&engine), vec![Vec::<PageRun>::new(); 3]);
}

/// A commit is never taken back: a rank that does not confirm it is suspect, and gets there.
#[test]
fn an_unmap_that_was_decided_is_only_ever_finished() {
    for fault in [Fault::RequestLost, Fault::ReplyLost, Fault::CutBefore] {
        let mut engine = three_ranks();
        batch(&mut engine, false, &runs(0b11), &Faults::default()).unwrap();
        let faults = Faults {
            remote_then: vec![Fault::Fine, fault],
            ..Faults::default()
        };
        assert_eq!(batch(&mut engine, true, &runs(0b1), &faults), Ok(()));
        assert_eq!(engine.suspects(), [(Stage(0), Rank(2))]);
        assert_eq!(reconcile(&mut engine, &[]), Reconciled::default());
        assert_eq!(mapped(&engine), vec![runs(0b10); 3]);
    }
}

/// A rank that comes back as the same process has lost nothing; another process in its place has.
#[test]
fn a_rank_that_was_replaced_is_told_to_have_lost_its_content() {
    let mut engine = three_ranks();
    batch(&mut engine, false, &runs(0b11), &Faults::default()).unwrap();
    engine.cut(0);
    assert_eq!(reconcile(&mut engine, &[]), Reconciled::default());
    engine.replace(1);
    let lost = reconcile(&mut engine, &[]).lost;
    assert_eq!(lost, [(Stage(0), Rank(2))]);
    assert_eq!(mapped(&engine), vec![runs(0b11); 3]);
    // And that is told once.
    assert_eq!(reconcile(&mut engine, &[]), Reconciled::default());
}

/// In doubt it may be about runs that nobody uses, and no others: an engine goes on with those.
#[test]
fn a_rank_that_has_a_run_in_use_in_doubt_does_not_count() {
    for place in [0, 1] {
        let mut engine = three_ranks();
        batch(&mut engine, false, &runs(0b11), &Faults::default()).unwrap();
        let (at, mapper) = engine.mappers().remove(place);
        match place {
            // The local rank is asked only if it is in doubt already.
            0 => {
                let faults = Faults {
                    local: Some(Refusing::Doubt { done: true }),
                    ..Faults::default()
                };
                batch(&mut engine, false, &runs(0b100), &faults).unwrap_err();
            }
            _ => engine.cut(place - 1),
        }
        mapper.doubt_on_resync(runs(0b1));
        let answer = engine.perform(Operation::Reconcile(&[]), &Faults::default());
        assert!(matches!(answer, Answer::Reconciled(Err(_))), "{answer:?}");
        assert_eq!(engine.suspects(), [at]);
        // It lost what it had there, whenever it has it again.
        assert_eq!(reconcile(&mut engine, &[]).lost, [at]);
        assert_eq!(engine.health(), Health::Healthy);
        assert_eq!(mapped(&engine), vec![runs(0b11); 3]);
    }
    let mut engine = three_ranks();
    batch(&mut engine, false, &runs(0b11), &Faults::default()).unwrap();
    let (at, mapper) = engine.mappers().remove(1);
    engine.cut(0);
    mapper.doubt_on_resync(runs(0b1));
    // Who asks about a run keeps it from everybody.
    assert_eq!(
        reconcile(&mut engine, &runs(0b1)).mapped,
        Vec::<PageRun>::new()
    );
    assert_eq!(degraded(&engine), [at]);
}

/// What a rank claims to have is not believed: its digest must be right.
#[test]
fn a_rank_that_has_other_runs_than_it_was_told_stays_suspect() {
    let mut engine = three_ranks();
    batch(&mut engine, false, &runs(0b11), &Faults::default()).unwrap();
    engine.cut(0);
    let faults = Faults {
        resync: vec![Fault::Refuses(Refusing::Full)],
        ..Faults::default()
    };
    let answer = engine.perform(Operation::Reconcile(&[]), &faults);
    let full = Cause::OutOfMemory {
        at: Some((Stage(0), Rank(1))),
    };
    assert_eq!(answer, Answer::Reconciled(Err(MapError::clean(full))));
    assert_eq!(engine.suspects(), [(Stage(0), Rank(1))]);
    let (_, behind) = engine.mappers().remove(1);
    behind.forget_on_resync();
    let answer = engine.perform(Operation::Reconcile(&[]), &Faults::default());
    let Answer::Reconciled(Err(error)) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(
        error.to_string(),
        "stage 0, rank 1 did not resynchronise: protocol violation: it has other runs than it was \
         told to have"
    );
    assert_eq!(engine.suspects(), [(Stage(0), Rank(1))]);
    reconcile(&mut engine, &[]);
    assert_eq!(mapped(&engine), vec![runs(0b11); 3]);
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
        remote_then: vec![Fault::ReplyLost],
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

/// A loss is told by a reconciliation and by nothing else: until then nothing is mapped, whoever has
/// brought the rank back.
#[test]
fn a_loss_fences_until_it_is_told() {
    let mut engine = three_ranks();
    batch(&mut engine, false, &runs(0b11), &Faults::default()).unwrap();
    engine.replace(1);
    let answer = engine.perform(Operation::Ready, &Faults::default());
    assert_eq!(answer, Answer::Ready(Ok(Readiness::Ready)));
    let at = (Stage(0), Rank(2));
    assert_eq!(engine.suspects(), [at]);
    assert!(engine.health().is_fenced());
    let error = batch(&mut engine, false, &runs(0b100), &Faults::default()).unwrap_err();
    let (stage, rank) = at;
    assert_eq!(error, MapError::clean(Cause::Diverged { stage, rank }));
    assert_eq!(reconcile(&mut engine, &[]).lost, [at]);
    assert_eq!(engine.health(), Health::Healthy);
    batch(&mut engine, false, &runs(0b100), &Faults::default()).unwrap();
}

/// Whoever names a run that some rank has in doubt learns which it is, and can name others.
#[test]
fn runs_in_doubt_are_named_to_whoever_asks_for_them() {
    let mut engine = three_ranks();
    let faults = Faults {
        remote: vec![Fault::Fine, Fault::Refuses(Refusing::Full)],
        remote_then: vec![Fault::Refuses(Refusing::Driver)],
        ..Faults::default()
    };
    batch(&mut engine, false, &runs(0b1), &faults).unwrap_err();
    engine.take_log();
    let error = batch(&mut engine, false, &runs(0b111), &Faults::default()).unwrap_err();
    assert_eq!(error.uncertain, runs(0b1));
    assert_eq!(engine.take_log(), []);
    batch(&mut engine, false, &runs(0b110), &Faults::default()).unwrap();
}

/// What a rank gives up when it is back waits for the epochs of all that was given up while it was
/// away, but for those that have retired on every rank since.
#[test]
fn a_rank_that_was_away_gives_up_after_what_the_others_waited_for() {
    for (retired, after) in [
        (None, After::epoch(Epoch(7))),
        (Some(6), After::epoch(Epoch(7))),
        (Some(7), After::NOTHING),
    ] {
        let mut engine = three_ranks();
        batch(&mut engine, false, &runs(0b111), &Faults::default()).unwrap();
        engine.cut(0);
        for (mask, epoch) in [(0b1, 3), (0b10, 7)] {
            let runs = runs(mask);
            let unmap = Operation::Unmap(&runs, After::epoch(Epoch(epoch)));
            assert_eq!(
                engine.perform(unmap, &Faults::default()),
                Answer::Batch(Ok(()))
            );
        }
        if let Some(epoch) = retired {
            engine.retire(Epoch(epoch));
        }
        reconcile(&mut engine, &[]);
        let (_, back) = engine.mappers().remove(1);
        assert_eq!(back.resynced_after(), Some(after.join(After::DEVICE)));
        assert_eq!(mapped(&engine), vec![runs(0b100); 3]);
    }
}

/// A call that ended in a panic half-way leaves nobody trusted, and the next one is served.
#[test]
fn an_operation_that_is_abandoned_leaves_every_rank_suspect() {
    let mut engine = three_ranks();
    batch(&mut engine, false, &runs(0b1), &Faults::default()).unwrap();
    engine.abandon_amid(Operation::Map(&runs(0b10)));
    assert_eq!(engine.suspects().len(), 3);
    reconcile(&mut engine, &[]);
    assert_eq!(mapped(&engine), vec![runs(0b1); 3]);
    batch(&mut engine, false, &runs(0b10), &Faults::default()).unwrap();
}
