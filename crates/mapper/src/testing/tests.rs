//! The recording mapper is itself a mapper, and notices what it is there to notice.

use std::sync::mpsc;

use super::*;
use crate::{NotReady, PageId, Rank, Stage};

fn run(first: u32, count: u32) -> PageRun {
    PageRun::new(PageId(first), count).expect("a run of a test")
}

fn full() -> MapError {
    MapError::clean(Cause::OutOfMemory { at: None })
}

#[test]
fn it_passes_the_contract_and_notices_each_mistake_in_it() {
    let mapper = RecordingMapper::new(9);
    contract(&mapper, 9);
    assert_eq!(mapper.mapped(), []);
    let calls = mapper.calls();
    assert_eq!(calls.runs_mapped, calls.runs_unmapped);
    // The suite makes mistakes on purpose; each was refused and is remembered.
    assert_eq!(mapper.violations().len(), 12 + 16 + 3 + 6);
}

#[test]
fn it_passes_the_contract_of_a_rank() {
    let mapper = RecordingMapper::new(9);
    rank_contract(&mapper, 9);
    assert_eq!((mapper.mapped(), mapper.prepared()), (vec![], vec![]));
}

#[test]
fn faults_come_when_they_are_due_and_change_nothing() {
    let mapper = RecordingMapper::new(8);
    mapper.fail(Call::Map, 1, full());
    mapper.fail(
        Call::Map,
        2,
        MapError::clean(Cause::Diverged {
            stage: Stage(0),
            rank: Rank(3),
        }),
    );
    mapper.fail(Call::Unmap, 0, full());
    mapper.map(&[run(0, 1)]).unwrap();
    assert!(mapper.map(&[run(1, 1), run(2, 1)]).unwrap_err().is_full());
    assert!(!mapper.map(&[run(1, 1)]).unwrap_err().is_full());
    mapper.map(&[run(1, 1)]).unwrap();
    mapper.unmap(&[run(1, 1)]).unwrap_err();
    assert_eq!(mapper.mapped(), [run(0, 1), run(1, 1)]);
    assert_eq!(mapper.violations(), []);
}

#[test]
fn what_a_fault_names_uncertain_is_neither_mapped_nor_cold() {
    let mapper = RecordingMapper::new(8);
    mapper.map(&[run(0, 1), run(1, 1)]).unwrap();
    mapper.fail(
        Call::Unmap,
        0,
        MapError {
            uncertain: vec![run(1, 1)],
            ..full()
        },
    );
    mapper.unmap(&[run(0, 1), run(1, 1)]).unwrap_err();
    assert_eq!(
        (mapper.mapped(), mapper.in_doubt()),
        (vec![run(0, 1)], vec![run(1, 1)])
    );
    mapper.map(&[run(1, 1)]).unwrap_err();
    mapper.unmap(&[run(1, 1)]).unwrap_err();
    assert_eq!(mapper.violations().len(), 2);
}

#[test]
fn each_call_of_a_rank_fails_on_the_script() {
    let mapper = RecordingMapper::new(8);
    let (one, two) = (run(0, 1), run(1, 1));
    let naming = |runs: &[PageRun]| MapError {
        uncertain: runs.to_vec(),
        ..full()
    };
    mapper.map(&[one, two]).unwrap();

    mapper.fail(Call::Unmap, 0, full());
    mapper
        .prepare_unmap(&[one, two], After::epoch(crate::Epoch(3)))
        .unwrap_err();
    assert_eq!(mapper.last_after(), Some(After::epoch(crate::Epoch(3))));
    assert_eq!(mapper.mapped(), [one, two], "refused whole");

    mapper.prepare_unmap(&[one, two], After::NOTHING).unwrap();
    assert_eq!(mapper.prepared(), [one, two]);
    mapper.fail(Call::Abort, 0, naming(&[two]));
    mapper.abort_unmap(&[one, two]).unwrap_err();
    assert_eq!(
        (mapper.mapped(), mapper.prepared(), mapper.in_doubt()),
        (vec![one], vec![], vec![two]),
        "all are restored but those that the answer names"
    );

    mapper.fail(Call::Resync, 0, full());
    mapper.resync(&[two]).unwrap_err();
    assert_eq!((mapper.mapped(), mapper.in_doubt()), (vec![one], vec![two]));
    mapper.resync(&[two]).unwrap();
    assert_eq!((mapper.mapped(), mapper.in_doubt()), (vec![two], vec![]));
    assert_eq!(mapper.violations(), []);
    let calls = mapper.calls();
    assert_eq!((calls.unmap, calls.abort, calls.resync), (2, 1, 2));
}

#[test]
fn what_a_failed_resync_remade_is_told_by_the_next() {
    let mapper = RecordingMapper::new(8);
    mapper.set_memory_pages(Some(3));
    assert!(
        mapper
            .resync(&[run(0, 2), run(4, 2)])
            .unwrap_err()
            .is_full()
    );
    assert_eq!(mapper.mapped(), [run(0, 2)]);
    mapper.set_memory_pages(None);
    let told = mapper.resync(&[run(0, 2), run(4, 2)]).unwrap();
    assert_eq!(told.remade, [run(0, 2), run(4, 2)]);
    assert_eq!(mapper.resync(&[run(0, 2)]).unwrap().remade, []);
}

#[test]
fn a_prepared_run_is_memory_in_use() {
    let mapper = RecordingMapper::new(8);
    mapper.set_memory_pages(Some(2));
    mapper.map(&[run(0, 2)]).unwrap();
    mapper.prepare_unmap(&[run(0, 2)], After::NOTHING).unwrap();
    assert!(mapper.map(&[run(4, 1)]).unwrap_err().is_full());
    mapper.commit_unmap(&[run(0, 2)]);
    mapper.map(&[run(4, 1)]).unwrap();
    assert_eq!(mapper.calls().runs_unmapped, 1);
}

#[test]
fn memory_has_a_bound_when_told() {
    let mapper = RecordingMapper::new(8);
    assert_eq!(mapper.headroom(), None);
    mapper.set_memory_pages(Some(3));
    mapper.map(&[run(0, 2)]).unwrap();
    assert_eq!(mapper.headroom(), Some(1));
    assert!(mapper.map(&[run(2, 2)]).unwrap_err().is_full());
    mapper.map(&[run(2, 1)]).unwrap();
    assert_eq!((mapper.headroom(), mapper.mapped_pages()), (Some(0), 3));
    assert_eq!(mapper.violations(), [], "full is no mistake of the caller");
}

#[test]
fn readiness_is_what_it_was_told() {
    let mapper = RecordingMapper::new(1);
    let reason = "still loading".to_owned();
    let not_yet = Readiness::NotReady(vec![NotReady {
        stage: Stage(1),
        rank: Rank(2),
        reason,
    }]);
    mapper.set_readiness(not_yet.clone());
    assert_eq!(mapper.ready(), Ok(not_yet));
}

#[test]
fn two_calls_about_one_page_at_once_are_a_violation() {
    let mapper = Arc::new(RecordingMapper::new(8));
    let (inside, entered) = mpsc::channel();
    let (go_on, waiting) = mpsc::channel();
    let waiting = Mutex::new(waiting);
    let slow = run(2, 2);
    mapper.set_before(move |_, runs| {
        if runs == [slow] {
            inside.send(()).unwrap();
            waiting.lock().unwrap().recv().unwrap();
        }
        Ok(())
    });
    let (first, meanwhile) = std::thread::scope(|scope| {
        // Owned here, so that a panic in here ends the first call's wait instead of the test's time.
        let go_on = go_on;
        let first = scope.spawn(|| mapper.map(&[slow]));
        entered.recv().unwrap();
        let meanwhile = [
            mapper.map(&[run(0, 2)]),
            mapper.map(&[run(3, 1)]),
            mapper.unmap(&[slow]),
        ];
        go_on.send(()).unwrap();
        (first.join(), meanwhile)
    });
    let [elsewhere, in_it, away] = meanwhile;
    elsewhere.expect("another page may be mapped meanwhile");
    in_it.expect_err("this one is under way");
    away.expect_err("and is not mapped yet");
    first.unwrap().expect("the others did not disturb it");
    assert_eq!(mapper.mapped(), [run(0, 2), slow]);
    assert_eq!(mapper.violations().len(), 2);
}
