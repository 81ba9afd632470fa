//! Broadcast targets: each remote rank exactly once, no local rank, nothing for a group of one.

use kvcached_mapper::{After, PageRun, Rank, Readiness, Stage};
use kvcached_tp_ipc::{Answer, Operation, Topology};
use proptest::prelude::*;

use crate::simulated::{At, Call, Engine, Event, Fault, Faults, faults, runs, topologies};

/// To whom each request was sent, in order.
fn sent(log: &[Event], wanted: Call) -> Vec<(At, Vec<PageRun>)> {
    let to = |event: &Event| match event {
        Event::Sent { to, call, runs } if *call == wanted => Some((*to, runs.clone())),
        _ => None,
    };
    log.iter().filter_map(to).collect()
}

/// Whose mapper was called, in order.
fn called(log: &[Event], wanted: Call) -> Vec<At> {
    let by = |event: &Event| match event {
        Event::Called { at, call, .. } if *call == wanted => Some(*at),
        _ => None,
    };
    log.iter().filter_map(by).collect()
}

fn harmless() -> impl Strategy<Value = Faults> {
    let fault = prop_oneof![
        Just(Fault::Fine),
        Just(Fault::LateReplyFirst),
        Just(Fault::ReplyTwice)
    ];
    (
        prop::collection::vec(fault, 1..8),
        prop::collection::vec(any::<prop::sample::Index>(), 1..8),
    )
        .prop_map(|(remote, order)| Faults {
            remote,
            order,
            ..Faults::default()
        })
}

proptest! {
    /// Whatever is asked, every remote rank is asked it once, and every rank does it once.
    #[test]
    fn each_remote_rank_exactly_once(topology in topologies(), faults in harmless(), mask in 1u8..) {
        let mut engine = Engine::connected(&topology);
        let remotes = engine.remotes();
        let all: Vec<At> = engine.mappers().into_iter().map(|(at, _)| at).collect();
        let batch = runs(mask);
        let operations = [
            (Call::Map, Operation::Map(&batch), Answer::Batch(Ok(()))),
            (Call::Headroom, Operation::Headroom, Answer::Headroom(Some(100))),
            (Call::Ready, Operation::Ready, Answer::Ready(Ok(Readiness::Ready))),
            (Call::Trim, Operation::Trim, Answer::Trimmed),
            (Call::Prepare, Operation::Unmap(&batch, After::DEVICE), Answer::Batch(Ok(()))),
        ];
        for (call, operation, expected) in operations {
            prop_assert_eq!(engine.perform(operation, &faults), expected);
            let log = engine.take_log();
            let content = match operation {
                Operation::Ready | Operation::Headroom | Operation::Trim => Vec::new(),
                _ => batch.clone(),
            };
            let each_once: Vec<(At, Vec<PageRun>)> =
                remotes.iter().map(|at| (*at, content.clone())).collect();
            prop_assert_eq!(sent(&log, call), each_once);
            prop_assert_eq!(called(&log, call), all.clone());
            // Nothing else was sent, to nobody, but the second half of an unmap.
            let halves = if call == Call::Prepare { 2 } else { 1 };
            let messages =
                log.iter().filter(|e| matches!(e, Event::Sent { .. } | Event::Greeted { .. }));
            prop_assert_eq!(messages.count(), halves * remotes.len());
            if halves == 2 {
                // All are told to before the local rank begins.
                let here = all.iter().copied().filter(|at| topology.local() == Some(*at));
                let in_order: Vec<At> = remotes.iter().copied().chain(here).collect();
                prop_assert_eq!(called(&log, Call::Commit), in_order);
                let is_commit = |event: &Event| {
                    matches!(event, Event::Sent { call: Call::Commit, .. })
                };
                let last_sent = log.iter().rposition(is_commit);
                let here = |event: &Event| {
                    matches!(event, Event::Called { at, call: Call::Commit, .. }
                        if topology.local() == Some(*at))
                };
                if let Some(own) = log.iter().position(here) {
                    prop_assert!(last_sent < Some(own));
                    prop_assert!(!log[last_sent.unwrap_or(0)..own].contains(&Event::Arrived));
                }
            }
        }
    }

    /// Whatever goes wrong: a rank gets a batch at most once, its undoing at most once, and the
    /// local rank is never sent anything.
    #[test]
    fn no_fault_makes_a_message_go_twice_or_astray(
        topology in topologies(),
        faults in faults(),
        unmap: bool,
        mask in 1u8..,
    ) {
        let mut engine = Engine::connected(&topology);
        let batch = runs(mask);
        let mut operation = Operation::Map(&batch);
        if unmap {
            let _ = engine.perform(operation, &Faults::default());
            engine.take_log();
            operation = Operation::Unmap(&batch, After::DEVICE);
        }
        let _ = engine.perform(operation, &faults);
        let log = engine.take_log();
        let remotes = engine.remotes();
        for call in [Call::Map, Call::Prepare, Call::Commit, Call::Undo] {
            let mut targets: Vec<At> = sent(&log, call).into_iter().map(|(at, _)| at).collect();
            prop_assert!(targets.iter().all(|at| remotes.contains(at)));
            prop_assert!(targets.iter().all(|at| topology.local() != Some(*at)));
            let count = targets.len();
            targets.sort();
            targets.dedup();
            prop_assert_eq!(targets.len(), count);
        }
    }

    /// All requests of a round leave before the first answer is waited for.
    #[test]
    fn all_requests_leave_before_the_first_answer_is_awaited(
        topology in topologies(),
        faults in faults(),
        unmap: bool,
        mask in 1u8..,
    ) {
        let mut engine = Engine::connected(&topology);
        let batch = runs(mask);
        let mut operation = Operation::Map(&batch);
        if unmap {
            let _ = engine.perform(operation, &Faults::default());
            engine.take_log();
            operation = Operation::Unmap(&batch, After::DEVICE);
        }
        let _ = engine.perform(operation, &faults);
        let log = engine.take_log();
        for call in [Call::Map, Call::Prepare, Call::Commit, Call::Undo] {
            let is_sent = |event: &Event| matches!(event, Event::Sent { call: c, .. } if *c == call);
            let Some(first) = log.iter().position(is_sent) else { continue };
            let last = log.iter().rposition(is_sent).unwrap();
            prop_assert!(!log[first..last].contains(&Event::Arrived));
        }
    }

    /// A trim is for whoever is there, changes no page, and is over whatever goes wrong; a rank that
    /// only does not answer counts as before.
    #[test]
    fn a_trim_reaches_who_is_there_and_changes_no_page(
        topology in topologies(),
        faults in faults(),
        away: Option<prop::sample::Index>,
        mask in 1u8..,
    ) {
        let mut engine = Engine::connected(&topology);
        let batch = runs(mask);
        let _ = engine.perform(Operation::Map(&batch), &Faults::default());
        let mut there = engine.remotes();
        if let Some(away) = away.filter(|_| !there.is_empty()) {
            let away = away.index(there.len());
            engine.cut(away);
            there.remove(away);
        }
        let before = engine.agreed();
        let mappers = engine.mappers();
        let had: Vec<_> = mappers.iter().map(|(_, mapper)| mapper.mapped()).collect();
        engine.take_log();

        prop_assert_eq!(engine.perform(Operation::Trim, &faults), Answer::Trimmed);

        let log = engine.take_log();
        let targets: Vec<At> = sent(&log, Call::Trim).into_iter().map(|(at, _)| at).collect();
        if !faults.cut_meanwhile {
            prop_assert_eq!(targets, there.clone());
        }
        let here = topology.local().into_iter().all(|at| called(&log, Call::Trim).contains(&at));
        prop_assert!(here, "the local rank is one of them");
        prop_assert_eq!(engine.agreed(), before);
        let has: Vec<_> = mappers.iter().map(|(_, mapper)| mapper.mapped()).collect();
        prop_assert_eq!(has, had);
        let silent = |fault: &Fault| fault.is_harmless()
            || matches!(fault, Fault::RequestLost | Fault::ReplyLost | Fault::Refuses(_));
        if faults.remote.iter().all(silent) && !faults.cut_meanwhile && away.is_none() {
            prop_assert_eq!(engine.suspects(), vec![]);
        }
    }

    /// With one rank, here, nothing is sent, whatever its number.
    #[test]
    fn nothing_for_a_group_of_one(stage: u16, rank: u16, mask in 1u8..) {
        let mut engine = Engine::connected(&Topology::autonomous(Stage(stage), Rank(rank)));
        let batch = runs(mask);
        for operation in [
            Operation::Map(&batch),
            Operation::Ready,
            Operation::Headroom,
            Operation::Trim,
            Operation::Unmap(&batch, After::DEVICE),
            Operation::Reconcile(&batch),
        ] {
            let _ = engine.perform(operation, &Faults::default());
        }
        let log = engine.take_log();
        prop_assert_eq!(log.len(), 6);
        prop_assert!(log.iter().all(|event| matches!(event, Event::Called { .. })), "{:?}", log);
    }
}

#[test]
fn nothing_is_sent_for_an_empty_batch() {
    let topology = Topology::autonomous(Stage(0), Rank(0));
    let mut engine = Engine::connected(&topology);
    let answer = engine.perform(Operation::Map(&[]), &Faults::default());
    assert_eq!(answer, Answer::Batch(Ok(())));
    assert_eq!(engine.take_log(), []);
}

/// Ranks with a scheduler each: two coordinators, and not one message between them.
#[test]
fn autonomous_ranks_map_each_page_once_and_send_nothing() {
    let mut engines =
        [0, 1].map(|rank| Engine::connected(&Topology::autonomous(Stage(0), Rank(rank))));
    for engine in &mut engines {
        let answer = engine.perform(Operation::Map(&runs(0b11)), &Faults::default());
        assert_eq!(answer, Answer::Batch(Ok(())));
    }
    for (rank, engine) in (0..).zip(&mut engines) {
        let at = (Stage(0), Rank(rank));
        let event = Event::Called {
            at,
            call: Call::Map,
            runs: runs(0b11),
        };
        assert_eq!(engine.take_log(), [event]);
    }
}
