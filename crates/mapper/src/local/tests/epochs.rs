//! Memory is taken away only after the work that may read it: here the order of the driver's
//! calls and of the work's end, with fences that a test works by hand.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvcached_vmm::Fence;
use proptest::prelude::*;

use super::*;
use crate::Epoch;

const PAGES: u32 = 8;

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct Work {
    ended: AtomicBool,
    asked: AtomicU64,
}

impl Work {
    fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }
}

impl Fence for Work {
    fn is_over(&self) -> Result<bool, VmmError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        Ok(self.has_ended())
    }
}

fn with_epochs(
    mock: &Arc<Mock>,
    geometry: &Geometry,
    cold: Cold,
    epochs: &Arc<Epochs>,
) -> LocalMapper<Mock> {
    local(mock, geometry, cold).with_epochs(Arc::clone(epochs))
}

#[test]
fn work_in_flight_is_a_refusal_that_changes_nothing_and_is_over_once_it_retires() {
    for geometry in all_geometries(PAGES) {
        for cold in BOTH {
            for by_fence in [true, false] {
                let mock = mock(1 << 30);
                let epochs = Arc::new(Epochs::new(Duration::ZERO));
                let mapper = with_epochs(&mock, &geometry, cold, &epochs);
                let runs = [run(0, 2), run(4, 1)];
                mapper.map(&runs).unwrap();
                let before = (seen(&mock, &mapper), mapper.mapped(), mock.live_chunks());
                let work = Arc::new(Work::default());
                epochs.launched(Epoch(3), Arc::<Work>::clone(&work));

                let asked_before = mock.calls(Call::Unmap);
                // The device is not waited for either, if the epoch has not come.
                let both = After::epoch(Epoch(3)).join(After::DEVICE);
                for after in [After::epoch(Epoch(3)), After::epoch(Epoch(9)), both] {
                    let epoch = after.epoch.unwrap();
                    let in_flight = Err(MapError::clean(Cause::InFlight { epoch }));
                    assert_eq!(mapper.unmap_after(&runs, after), in_flight);
                    assert_eq!(mapper.prepare_unmap(&runs, after), in_flight);
                }
                let asked = mock.calls(Call::Unmap) - asked_before;
                assert_eq!((asked, mock.calls(Call::Synchronize)), (0, 0));
                let after = (seen(&mock, &mapper), mapper.mapped(), mock.live_chunks());
                assert_eq!(after, before);
                assert_eq!(mapper.health(), Health::Healthy);

                if by_fence {
                    work.end();
                } else {
                    epochs.retire(Epoch(3));
                }
                mapper
                    .unmap_after(&runs[..1], After::epoch(Epoch(2)))
                    .unwrap();
                mapper
                    .unmap_after(&runs[1..], After::epoch(Epoch(3)))
                    .unwrap();
                assert_eq!(mapper.mapped(), []);
                assert_eq!(mock.calls(Call::Synchronize), 0, "the epoch said enough");
            }
        }
    }
}

#[test]
fn without_anyone_who_counts_no_epoch_ever_retires() {
    let mapper = local(&mock(1 << 30), &simple(PAGES), Cold::Unbacked);
    mapper.map(&[run(0, 1)]).unwrap();
    let epoch = Epoch(0);
    assert_eq!(
        mapper.unmap_after(&[run(0, 1)], After::epoch(epoch)),
        Err(MapError::clean(Cause::InFlight { epoch }))
    );
    mapper.unmap_after(&[run(0, 1)], After::NOTHING).unwrap();
}

#[test]
fn a_mistake_is_answered_before_any_wait() {
    let epochs = Arc::new(Epochs::new(LONG));
    let work = Arc::new(Work::default());
    epochs.launched(Epoch(1), Arc::<Work>::clone(&work));
    let mock = mock(1 << 30);
    let mapper = with_epochs(&mock, &simple(PAGES), Cold::Unbacked, &epochs);
    let asked = work.asked.load(Ordering::SeqCst);
    assert!(state_error(
        mapper.unmap_after(&[run(0, 1)], After::epoch(Epoch(1)))
    ));
    mapper.unmap_after(&[], After::epoch(Epoch(1))).unwrap();
    assert_eq!(work.asked.load(Ordering::SeqCst), asked);
}

#[test]
fn others_go_on_while_one_waits() {
    let epochs = Arc::new(Epochs::new(LONG));
    let work = Arc::new(Work::default());
    epochs.launched(Epoch(1), Arc::<Work>::clone(&work));
    let mapper = with_epochs(&mock(1 << 30), &simple(PAGES), Cold::Unbacked, &epochs);
    mapper.map(&[run(0, 1)]).unwrap();
    let begun = work.asked.load(Ordering::SeqCst);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| mapper.unmap_after(&[run(0, 1)], After::epoch(Epoch(1))));
        while work.asked.load(Ordering::SeqCst) == begun {
            std::thread::yield_now();
        }
        // The waiter is in its wait. Should it hold the lock there, this would end with its error.
        mapper.map(&[run(2, 1)]).unwrap();
        mapper.unmap_after(&[run(2, 1)], After::NOTHING).unwrap();
        assert_eq!(mapper.mapped(), [run(0, 1)]);
        work.end();
        waiter.join().expect("no panic").unwrap();
    });
    assert_eq!(mapper.mapped(), []);
}

#[test]
fn a_resync_waits_for_the_device_before_it_takes_anything_away() {
    let mock = mock(1 << 30);
    let mapper = local(&mock, &simple(PAGES), Cold::Unbacked);
    mapper.map(&[run(0, 1), run(2, 1)]).unwrap();
    let before = seen(&mock, &mapper);
    mock.fail(Call::Synchronize, 0, broken());
    mapper.resync(&[run(0, 1)]).unwrap_err();
    assert_eq!((seen(&mock, &mapper), mock.calls(Call::Unmap)), (before, 0));

    let order = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&order);
    mock.fail_with(move |call| {
        noted.lock().expect("no panic").push(call);
        None
    });
    mapper.resync(&[run(0, 1)]).unwrap();
    let order = order.lock().expect("no panic").clone();
    assert_eq!(order, [Call::Synchronize, Call::Unmap, Call::Destroy]);
}

/// A rank that comes back need not stay away for work in flight: what others have given up meanwhile
/// stays there, in doubt, until its epoch has retired.
#[test]
fn a_resync_leaves_what_is_in_flight_in_doubt_and_the_next_one_takes_it() {
    let mock = mock(1 << 30);
    let epochs = Arc::new(Epochs::new(Duration::ZERO));
    let mapper = local(&mock, &simple(PAGES), Cold::Unbacked).with_epochs(Arc::clone(&epochs));
    let (stays, goes, comes) = (run(0, 1), run(2, 2), run(6, 1));
    mapper.map(&[stays, goes]).unwrap();
    let after = After::epoch(Epoch(5));
    let told = mapper.resync_after(&[stays, comes], after).unwrap();
    assert_eq!((told.remade, told.in_doubt), (vec![comes], vec![goes]));
    assert_eq!(mapper.mapped(), [stays, goes, comes]);
    // Nor is it given another chunk meanwhile.
    let again = mapper.resync_after(&[stays, run(3, 1)], after).unwrap();
    assert_eq!(again.in_doubt, [goes, run(3, 1), comes]);
    epochs.retire(Epoch(5));
    let told = mapper.resync_after(&[stays], after).unwrap();
    assert_eq!((told.remade, told.in_doubt), (vec![], vec![]));
    assert_eq!(mapper.mapped(), [stays]);
}

/// What a test does to a pool whose work it ends by hand.
#[derive(Debug, Clone)]
enum Op {
    Map(u32),
    /// Work that may touch every page that is mapped now.
    Launch,
    /// The work of this place ends.
    End(usize),
    /// The runs of these places are freed after the last work that was launched.
    Unmap(Vec<usize>, bool),
    Commit,
    Abort,
    Reconcile,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let places = || proptest::collection::vec(0usize..6, 1..4);
    proptest::collection::vec(
        prop_oneof![
            4 => (0..PAGES).prop_map(Op::Map),
            3 => Just(Op::Launch),
            4 => (0usize..10).prop_map(Op::End),
            4 => (places(), any::<bool>()).prop_map(|(places, whole)| Op::Unmap(places, whole)),
            1 => Just(Op::Commit),
            1 => Just(Op::Abort),
            1 => Just(Op::Reconcile),
        ],
        1..50,
    )
}

proptest! {
    #[test]
    fn no_memory_is_taken_away_before_the_work_it_waits_for_has_ended(
        geometry in proptest::sample::select(all_geometries(PAGES).collect::<Vec<_>>()),
        cold in proptest::sample::select(BOTH.to_vec()),
        ops in ops(),
        faults in proptest::collection::vec((any::<bool>(), 0u32..30), 0..3),
    ) {
        let mock = mock(1 << 30);
        let epochs = Arc::new(Epochs::new(Duration::ZERO));
        let mapper = with_epochs(&mock, &geometry, cold, &epochs);
        for (unmap, nth) in faults {
            mock.fail(if unmap { Call::Unmap } else { Call::Map }, nth, broken());
        }
        let mut launched: Vec<Arc<Work>> = Vec::new();
        // The work that must have ended when the driver is asked to unmap.
        let needed: Arc<Mutex<Vec<Arc<Work>>>> = Arc::default();
        let early = Arc::new(AtomicU64::new(0));
        let (watched, noted) = (Arc::clone(&needed), Arc::clone(&early));
        mock.fail_with(move |call| {
            let needed = watched.lock().expect("no panic");
            if call == Call::Unmap && !needed.iter().all(|work| work.has_ended()) {
                noted.fetch_add(1, Ordering::SeqCst);
            }
            None
        });
        let mut prepared: BTreeSet<PageRun> = BTreeSet::new();
        for op in ops {
            match op {
                Op::Map(page) => drop(mapper.map(&[run(page, 1)])),
                Op::Launch => {
                    let work = Arc::new(Work::default());
                    launched.push(Arc::clone(&work));
                    epochs.launched(Epoch(launched.len() as u64), work);
                }
                Op::End(nth) => if let Some(work) = launched.get(nth) { work.end() },
                Op::Unmap(places, whole) => {
                    let mapped = mapper.mapped();
                    let runs: BTreeSet<PageRun> =
                        places.iter().filter_map(|&place| mapped.get(place).copied()).collect();
                    let runs: Vec<PageRun> = runs.into_iter().collect();
                    *needed.lock().expect("no panic") = launched.clone();
                    let after = After::epoch(Epoch(launched.len() as u64));
                    let ended = launched.iter().all(|work| work.has_ended());
                    let outcome = if whole {
                        mapper.unmap_after(&runs, after)
                    } else {
                        mapper.prepare_unmap(&runs, after)
                    };
                    needed.lock().expect("no panic").clear();
                    if outcome.is_ok() && !whole {
                        prepared.extend(&runs);
                    }
                    let refused = outcome.is_err_and(|error| {
                        matches!(error.cause, Cause::InFlight { .. })
                    });
                    // Before the first work is launched nobody counts.
                    let must_wait = !runs.is_empty() && (!ended || launched.is_empty());
                    prop_assert_eq!(refused, must_wait);
                }
                Op::Commit => {
                    mapper.commit_unmap(&prepared.iter().copied().collect::<Vec<_>>());
                    prepared.clear();
                }
                Op::Abort => {
                    let _ = mapper.abort_unmap(&prepared.iter().copied().collect::<Vec<_>>());
                    prepared.clear();
                }
                Op::Reconcile => drop(mapper.reconcile(&[])),
            }
        }
        prop_assert_eq!(early.load(Ordering::SeqCst), 0);
        prop_assert_eq!(mock.violations(), []);
    }
}

#[test]
fn a_thread_that_waits_takes_away_only_after_the_work_of_another_has_ended() {
    let epochs = Arc::new(Epochs::new(LONG));
    let mock = mock(1 << 30);
    let mapper = with_epochs(&mock, &simple(PAGES), Cold::Zero, &epochs);
    let current = Arc::new(Mutex::new(Arc::new(Work::default())));
    let early = Arc::new(AtomicBool::new(false));
    let watched = Arc::clone(&current);
    let noted = Arc::clone(&early);
    let armed = Arc::new(AtomicBool::new(false));
    let is_armed = Arc::clone(&armed);
    mock.fail_with(move |call| {
        let ended = watched.lock().expect("no panic").has_ended();
        if call == Call::Unmap && is_armed.load(Ordering::SeqCst) && !ended {
            noted.store(true, Ordering::SeqCst);
        }
        None
    });
    for epoch in (1..200).map(Epoch) {
        armed.store(false, Ordering::SeqCst);
        mapper.map(&[run(0, 3)]).unwrap();
        let work = Arc::new(Work::default());
        *current.lock().expect("no panic") = Arc::clone(&work);
        epochs.launched(epoch, Arc::<Work>::clone(&work));
        armed.store(true, Ordering::SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(|| work.end());
            mapper
                .unmap_after(&[run(0, 3)], After::epoch(epoch))
                .unwrap();
            assert!(work.has_ended());
        });
    }
    assert!(!early.load(Ordering::SeqCst));
}
