//! Epochs alone: what retires, when, and how long anybody waits for it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;

use kvcached_vmm::VmmError;
use proptest::prelude::*;

use super::*;

/// Longer than any test takes: whoever waits this long was not woken.
const LONG: Duration = Duration::from_secs(60);

/// A fence that a test works by hand.
#[derive(Debug, Default)]
struct Switch {
    state: AtomicU32,
    asked: AtomicU32,
}

const RUNNING: u32 = 0;
const OVER: u32 = 1;
const BROKEN: u32 = 2;

impl Switch {
    fn new() -> Arc<Self> {
        Arc::default()
    }

    fn set(&self, state: u32) {
        self.state.store(state, Ordering::SeqCst);
    }
}

impl Fence for Switch {
    fn is_over(&self) -> Result<bool, VmmError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        match self.state.load(Ordering::SeqCst) {
            RUNNING => Ok(false),
            OVER => Ok(true),
            _ => Err(VmmError::Driver {
                call: "scripted",
                code: 1,
                name: "SCRIPTED".to_owned(),
            }),
        }
    }
}

fn in_flight(epoch: u64) -> Result<(), MapError> {
    let epoch = Epoch(epoch);
    Err(MapError::clean(Cause::InFlight { epoch }))
}

/// What `ask` answers, in far less than `LONG`.
fn at_once<T: Send>(ask: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let (answer, answered) = mpsc::channel();
        scope.spawn(move || answer.send(ask()));
        let patience = LONG / 6;
        answered.recv_timeout(patience).expect("it does not wait")
    })
}

#[test]
fn waiting_for_two_is_waiting_for_the_later_and_for_the_device_if_either_does() {
    let all = [
        After::NOTHING,
        After::DEVICE,
        After::epoch(Epoch(0)),
        After::epoch(Epoch(3)),
        After::epoch(Epoch(9)).join(After::DEVICE),
    ];
    for one in all {
        assert_eq!(one.join(one), one);
        assert_eq!(one.join(After::NOTHING), one);
        for two in all {
            let both = one.join(two);
            assert_eq!(both, two.join(one));
            assert_eq!(both.device, one.device || two.device);
            for retired in [None, Some(Epoch(0)), Some(Epoch(5)), Some(Epoch(9))] {
                assert_eq!(
                    both.since(retired),
                    one.since(retired).join(two.since(retired)),
                    "what is left of both is what is left of each"
                );
            }
        }
    }
}

#[test]
fn a_retired_epoch_is_not_waited_for_any_more_and_the_device_still_is() {
    let after = After::epoch(Epoch(4)).join(After::DEVICE);
    assert_eq!(after.since(None), after);
    assert_eq!(after.since(Some(Epoch(3))), after);
    assert_eq!(after.since(Some(Epoch(4))), After::DEVICE);
    assert_eq!(after.since(Some(Epoch(5))), After::DEVICE);
    // Epoch 0 is an epoch like any other: that nothing has retired is not that it has.
    let first = After::epoch(Epoch(0));
    assert_eq!(first.since(None), first);
    assert_eq!(first.since(Some(Epoch(0))), After::NOTHING);
}

#[test]
fn where_nobody_counts_nobody_waits() {
    let epochs = Epochs::new(LONG);
    assert_eq!(at_once(|| epochs.wait(Epoch(0))), in_flight(0));
    assert_eq!(epochs.retired(), None);
}

#[test]
fn a_retired_epoch_is_answered_at_once_whatever_still_flies() {
    let epochs = Epochs::new(LONG);
    epochs.launched(Epoch(8), Switch::new());
    epochs.retire(Epoch(5));
    for epoch in [0, 4, 5] {
        assert_eq!(at_once(|| epochs.wait(Epoch(epoch))), Ok(()));
    }
    assert_eq!(epochs.retired(), Some(Epoch(5)));
}

#[test]
fn a_wait_ends_with_its_patience() {
    let epochs = Epochs::new(Duration::from_millis(2));
    let fence = Switch::new();
    epochs.launched(Epoch(1), Arc::<Switch>::clone(&fence));
    assert_eq!(epochs.wait(Epoch(1)), in_flight(1));
    assert!(fence.asked.load(Ordering::SeqCst) > 1, "it was waited for");
    // Not even launched, and none flies: only a word of the engine could end the wait.
    fence.set(OVER);
    assert_eq!(epochs.wait(Epoch(2)), in_flight(2));
    assert_eq!(epochs.wait(Epoch(1)), Ok(()));
}

#[test]
fn a_patience_without_end_is_no_overflow() {
    let epochs = Epochs::new(Duration::MAX);
    epochs.retire(Epoch(1));
    assert_eq!(epochs.wait(Epoch(1)), Ok(()));
}

#[test]
fn going_back_does_nothing() {
    let epochs = Epochs::new(Duration::ZERO);
    epochs.retire(Epoch(7));
    epochs.retire(Epoch(3));
    assert_eq!(epochs.retired(), Some(Epoch(7)));
}

#[test]
fn a_fence_that_ends_before_an_earlier_one_retires_nothing_yet() {
    let epochs = Epochs::new(Duration::ZERO);
    let fences = [(); 3].map(|()| Switch::new());
    for (epoch, fence) in (1..).zip(&fences) {
        epochs.launched(Epoch(epoch), Arc::<Switch>::clone(fence));
    }
    fences[2].set(OVER);
    fences[1].set(OVER);
    assert_eq!(
        (epochs.retired(), epochs.wait(Epoch(2))),
        (None, in_flight(2))
    );
    fences[0].set(OVER);
    assert_eq!(epochs.retired(), Some(Epoch(3)));
}

#[test]
fn epochs_that_two_threads_announce_out_of_order_retire_in_order() {
    let epochs = Epochs::new(Duration::ZERO);
    let fences = [(); 2].map(|()| Switch::new());
    epochs.launched(Epoch(2), Arc::<Switch>::clone(&fences[1]));
    epochs.launched(Epoch(1), Arc::<Switch>::clone(&fences[0]));
    fences[1].set(OVER);
    assert_eq!(epochs.retired(), None);
    fences[0].set(OVER);
    assert_eq!(epochs.retired(), Some(Epoch(2)));
}

#[test]
fn an_epoch_on_two_streams_retires_when_both_have_ended() {
    for ends_first in [0, 1] {
        let fences = [(); 2].map(|()| Switch::new());
        let joint = Epochs::new(Duration::ZERO);
        joint.launched(Epoch(1), Arc::new(fences.to_vec()));
        // Or one by one, as long as the first has not ended.
        let apart = Epochs::new(Duration::ZERO);
        for fence in &fences {
            apart.launched(Epoch(1), Arc::<Switch>::clone(fence));
        }
        fences[ends_first].set(OVER);
        assert_eq!(apart.retired(), None);
        assert_eq!(joint.retired(), None);
        fences[1 - ends_first].set(OVER);
        assert_eq!(joint.retired(), Some(Epoch(1)));
        assert_eq!(apart.retired(), Some(Epoch(1)));
    }
}

#[test]
fn a_fence_that_fails_has_not_ended_and_the_engine_may_say_that_it_has() {
    let epochs = Epochs::new(Duration::from_millis(2));
    let fences = [(); 2].map(|()| Switch::new());
    for (epoch, fence) in (1..).zip(&fences) {
        epochs.launched(Epoch(epoch), Arc::<Switch>::clone(fence));
    }
    fences[0].set(BROKEN);
    fences[1].set(OVER);
    assert_eq!(epochs.wait(Epoch(1)), in_flight(1));
    assert_eq!(epochs.retired(), None, "nor has what came after it");
    epochs.retire(Epoch(1));
    assert_eq!(epochs.retired(), Some(Epoch(2)));
    // One that fails for a while only holds up for a while.
    let fence = Switch::new();
    fence.set(BROKEN);
    epochs.launched(Epoch(3), Arc::<Switch>::clone(&fence));
    assert_eq!(epochs.wait(Epoch(3)), in_flight(3));
    fence.set(OVER);
    assert_eq!(epochs.wait(Epoch(3)), Ok(()));
}

#[test]
fn what_has_ended_does_not_pile_up_where_nobody_asks() {
    let epochs = Epochs::new(Duration::ZERO);
    let fence = Switch::new();
    fence.set(OVER);
    for epoch in 0..100 {
        epochs.launched(Epoch(epoch), Arc::<Switch>::clone(&fence));
    }
    assert_eq!(Arc::strong_count(&fence), 1);
}

#[test]
fn whoever_waits_is_woken_by_the_engine() {
    // In turns, so that nearly every wait begins before the word that ends it. No fence flies, so
    // nothing but the word can.
    const ROUNDS: u64 = 500;
    let epochs = Epochs::new(LONG);
    epochs.retire(Epoch(0));
    std::thread::scope(|scope| {
        let turns = |from: u64| {
            let epochs = &epochs;
            move || {
                for epoch in (from..ROUNDS).step_by(2) {
                    epochs.wait(Epoch(epoch)).expect("the other comes to it");
                    epochs.retire(Epoch(epoch + 1));
                }
            }
        };
        scope.spawn(turns(0));
        scope.spawn(turns(1));
    });
    assert_eq!(epochs.retired(), Some(Epoch(ROUNDS)));
}

#[test]
fn whoever_waits_notices_a_fence_that_nobody_announces() {
    let epochs = Epochs::new(LONG);
    let fence = Switch::new();
    epochs.launched(Epoch(1), Arc::<Switch>::clone(&fence));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| epochs.wait(Epoch(1)));
        while fence.asked.load(Ordering::SeqCst) < 3 {
            std::thread::yield_now();
        }
        fence.set(OVER);
        assert_eq!(waiter.join().expect("no panic"), Ok(()));
    });
}

#[derive(Debug, Clone)]
enum Op {
    /// The next epoch, this much later, on this many streams.
    Launch(u64, usize),
    /// The fence of this place ends, or cannot be asked any more.
    End(usize),
    Break(usize),
    /// The engine says so of this epoch, or of the last one launched if that is less.
    Retire(u64),
    Ask,
}

proptest! {
    #[test]
    fn an_epoch_retires_with_the_last_of_its_work_never_before_and_never_back(
        ops in proptest::collection::vec(prop_oneof![
            4 => (1u64..3, 1usize..4).prop_map(|(step, streams)| Op::Launch(step, streams)),
            6 => (0usize..12).prop_map(Op::End),
            1 => (0usize..12).prop_map(Op::Break),
            1 => (0u64..20).prop_map(Op::Retire),
            3 => Just(Op::Ask),
        ], 1..60),
    ) {
        let epochs = Epochs::new(Duration::ZERO);
        let mut fences: Vec<(Epoch, Arc<Switch>)> = Vec::new();
        let (mut last, mut said, mut before) = (0, None, None);
        for op in ops {
            match op {
                Op::Launch(step, streams) => {
                    last += step;
                    let own: Vec<_> = (0..streams).map(|_| Switch::new()).collect();
                    fences.extend(own.iter().map(|fence| (Epoch(last), Arc::clone(fence))));
                    epochs.launched(Epoch(last), Arc::new(own));
                }
                Op::End(nth) => if let Some((_, fence)) = fences.get(nth) { fence.set(OVER) },
                Op::Break(nth) => if let Some((_, fence)) = fences.get(nth) {
                    let _ = fence.state.compare_exchange(
                        RUNNING, BROKEN, Ordering::SeqCst, Ordering::SeqCst);
                },
                Op::Retire(epoch) => {
                    let epoch = Epoch(epoch.min(last));
                    epochs.retire(epoch);
                    said = said.max(Some(epoch));
                }
                Op::Ask => {}
            }
            let retired = epochs.retired();
            let runs = |fence: &Switch| fence.state.load(Ordering::SeqCst) != OVER;
            let first = fences.iter().find(|(epoch, fence)| Some(*epoch) > said && runs(fence));
            // Before the first that runs everything has ended, and it itself has not.
            let ended = fences.iter().map(|(epoch, _)| *epoch)
                .filter(|epoch| first.is_none_or(|(running, _)| epoch < running)).max();
            prop_assert_eq!(retired, said.max(ended));
            prop_assert!(retired >= before);
            before = retired;
            for epoch in 0..=last + 1 {
                prop_assert_eq!(epochs.wait(Epoch(epoch)).is_ok(), Some(Epoch(epoch)) <= retired);
            }
        }
    }
}

#[test]
fn epochs_of_an_earlier_coordinator_say_nothing_about_those_of_a_later() {
    let epochs = Epochs::new(Duration::ZERO);
    epochs.begin(7);
    epochs.retire(Epoch(1000));
    epochs.begin(7);
    epochs.begin(3);
    assert_eq!(epochs.retired(), Some(Epoch(1000)), "nobody new has come");
    epochs.begin(8);
    assert_eq!(epochs.retired(), None);
    epochs.wait(Epoch(5)).unwrap_err();
    epochs.retire(Epoch(5));
    epochs.wait(Epoch(5)).unwrap();
    epochs.wait(Epoch(6)).unwrap_err();
}
