//! Readiness is AND: the local rank is asked first, every rank must agree, a rank that cannot be
//! reached is not ready, with its reason; and whoever is named is named by stage and rank.

use std::collections::BTreeSet;

use kvcached_mapper::{Cause, PeerCause, Readiness};
use kvcached_tp_ipc::{Answer, Operation, Topology};
use proptest::prelude::*;

use crate::simulated::{At, Call, Engine, Event, Fault, Faults, Says, topologies};

/// How one remote rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Condition {
    Ready,
    SaysNotReady,
    /// Nobody listens.
    Absent,
    /// Accepts, and never says hello.
    Mute,
    /// Says hello, and never answers.
    Silent,
    /// Is gone once it was asked.
    Dies,
    /// Believes in another geometry.
    Stranger,
    /// Its mapper is broken for good.
    Broken,
}

fn conditions() -> impl Strategy<Value = Vec<Condition>> {
    let condition = prop_oneof![
        12 => Just(Condition::Ready),
        4 => prop_oneof![
            Just(Condition::SaysNotReady),
            Just(Condition::Absent),
            Just(Condition::Mute),
            Just(Condition::Silent),
            Just(Condition::Dies),
        ],
        1 => prop_oneof![Just(Condition::Stranger), Just(Condition::Broken)],
    ];
    prop::collection::vec(condition, 7)
}

fn says() -> impl Strategy<Value = Says> {
    prop_oneof![6 => Just(Says::Ready), 2 => Just(Says::NotReady), 1 => Just(Says::Broken)]
}

fn ready(engine: &mut Engine, faults: &Faults) -> Result<Readiness, kvcached_mapper::MapError> {
    match engine.perform(Operation::Ready, faults) {
        Answer::Ready(readiness) => readiness,
        other => panic!("{other:?}"),
    }
}

/// Puts the remote ranks into their conditions.
fn arrange(engine: &mut Engine, conditions: &[Condition]) -> Faults {
    let mappers = engine.mappers();
    let mut faults = Faults::default();
    for (index, at) in engine.remotes().into_iter().enumerate() {
        let (_, mapper) = mappers.iter().find(|(rank, _)| *rank == at).unwrap();
        let (mut hello, mut request) = (Fault::Fine, Fault::Fine);
        engine.set_reachable(index, conditions[index] != Condition::Absent);
        mapper.say(Says::Ready);
        match conditions[index] {
            Condition::Ready | Condition::Absent => {}
            Condition::SaysNotReady => mapper.say(Says::NotReady),
            Condition::Mute => hello = Fault::ReplyLost,
            Condition::Silent => request = Fault::ReplyLost,
            Condition::Dies => request = Fault::CutBefore,
            Condition::Stranger => engine.make_stranger(index),
            Condition::Broken => mapper.say(Says::Broken),
        }
        faults.hello.push(hello);
        faults.remote.push(request);
    }
    faults
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn ready_means_that_every_rank_says_so(
        topology in topologies(),
        local in says(),
        conditions in conditions(),
    ) {
        let mut engine = Engine::new(&topology);
        let remotes = engine.remotes();
        let faults = arrange(&mut engine, &conditions);
        if let Some(mapper) = engine.local() {
            mapper.say(local);
        }
        let answer = ready(&mut engine, &faults);
        let log = engine.take_log();
        let with = |wanted: &[Condition]| -> BTreeSet<At> {
            let is = |index: &usize| wanted.contains(&conditions[*index]);
            (0..remotes.len()).filter(is).map(|index| remotes[index]).collect()
        };

        // Local is asked first, and what waiting cannot mend there ends it.
        if let Some(at) = topology.local() {
            prop_assert_eq!(&log[0], &Event::Called { at, call: Call::Ready, runs: vec![] });
            if local == Says::Broken {
                prop_assert!(answer.is_err());
                prop_assert_eq!(log.len(), 1);
                return Ok(());
            }
        }
        // What waiting cannot mend on another rank is an error that names it.
        let hopeless = with(&[Condition::Stranger, Condition::Broken]);
        if !hopeless.is_empty() {
            let error = answer.expect_err("waiting does not mend it");
            match error.cause {
                Cause::Peer { stage, rank, cause: PeerCause::Refused { .. }, .. } => {
                    prop_assert!(hopeless.contains(&(stage, rank)));
                }
                other => prop_assert!(false, "{}", other),
            }
            return Ok(());
        }
        // Everybody else who is not ready is named, once, with a reason.
        let mut expected = with(&[
            Condition::SaysNotReady,
            Condition::Absent,
            Condition::Mute,
            Condition::Silent,
            Condition::Dies,
        ]);
        if let (Some(at), Says::NotReady) = (topology.local(), local) {
            expected.insert(at);
        }
        let missing = match answer.expect("waiting may mend it") {
            Readiness::Ready => Vec::new(),
            Readiness::NotReady(missing) => {
                prop_assert!(!missing.is_empty());
                missing
            }
        };
        let named: Vec<At> = missing.iter().map(|missing| (missing.stage, missing.rank)).collect();
        prop_assert_eq!(named, expected.into_iter().collect::<Vec<_>>());
        for missing in &missing {
            let at = (missing.stage, missing.rank);
            let endpoint = topology.remotes().find(|(s, r, _)| (*s, *r) == at);
            if let Some((_, _, endpoint)) = endpoint {
                let index = remotes.iter().position(|remote| *remote == at).unwrap();
                let words = match conditions[index] {
                    Condition::Absent => "nobody is there",
                    Condition::SaysNotReady => "its tensors are not there",
                    Condition::Dies => "the connection ended: cut",
                    _ => "no answer within 60000 ms",
                };
                prop_assert_eq!(&missing.reason, &format!("{endpoint}: {words}"));
            }
        }

        // Once all of them are well, they are ready: nothing of this is held against anybody.
        let well = arrange(&mut engine, &[Condition::Ready; 7]);
        if let Some(mapper) = engine.local() {
            mapper.say(Says::Ready);
        }
        prop_assert_eq!(ready(&mut engine, &well), Ok(Readiness::Ready));
    }

    /// The headroom of all is that of the least; unknown anywhere is unknown.
    #[test]
    fn headroom_is_that_of_the_rank_with_the_least(
        topology in topologies(),
        headrooms in prop::collection::vec(prop_oneof![8 => (0u32..50).prop_map(Some), 1 => Just(None)], 7),
    ) {
        let mut engine = Engine::connected(&topology);
        let mut expected = Some(u32::MAX);
        for ((_, mapper), headroom) in engine.mappers().into_iter().zip(headrooms) {
            mapper.set_headroom(headroom);
            expected = expected.zip(headroom).map(|(least, pages)| least.min(pages));
        }
        let answer = engine.perform(Operation::Headroom, &Faults::default());
        prop_assert_eq!(answer, Answer::Headroom(expected));
    }
}

#[test]
fn a_rank_that_cannot_be_reached_lets_nothing_be_mapped() {
    let temp = tempfile::tempdir().unwrap();
    let runtime = kvcached_tp_ipc::RuntimeDir::open(&temp.path().join("run")).unwrap();
    let dir = runtime.instance(&"absent".parse().unwrap()).unwrap();
    let mut engine = Engine::new(&Topology::rank0_coordinates(2, &dir));
    engine.set_reachable(0, false);
    let Ok(Readiness::NotReady(missing)) = ready(&mut engine, &Faults::default()) else {
        panic!("it is not ready");
    };
    assert_eq!(missing.len(), 1);
    engine.take_log();
    let answer = engine.perform(
        Operation::Map(&crate::simulated::runs(1)),
        &Faults::default(),
    );
    let Answer::Batch(Err(error)) = answer else {
        panic!("{answer:?}")
    };
    assert!(matches!(
        error.cause,
        Cause::Peer {
            cause: PeerCause::Unreachable { .. },
            ..
        }
    ));
    assert!(error.uncertain.is_empty());
    assert_eq!(engine.take_log(), []);
}

/// A question that was not answered in time says nothing about pages: the rank is not fenced, and
/// its late answer is not taken for the next one.
#[test]
fn a_late_answer_about_readiness_is_not_taken_for_another() {
    let temp = tempfile::tempdir().unwrap();
    let runtime = kvcached_tp_ipc::RuntimeDir::open(&temp.path().join("run")).unwrap();
    let dir = runtime.instance(&"late".parse().unwrap()).unwrap();
    let mut engine = Engine::connected(&Topology::rank0_coordinates(2, &dir));
    let silent = Faults {
        remote: vec![Fault::ReplyLost],
        ..Faults::default()
    };
    assert!(matches!(
        ready(&mut engine, &silent),
        Ok(Readiness::NotReady(_))
    ));
    assert_eq!(engine.suspects(), []);
    let late = Faults {
        remote: vec![Fault::LateReplyFirst],
        ..Faults::default()
    };
    let answer = engine.perform(Operation::Map(&crate::simulated::runs(1)), &late);
    assert_eq!(answer, Answer::Batch(Ok(())));
}
