//! Whose turn it is at the device: what somebody waits for goes before what nobody does.
//!
//! A driver does one call at a time, and a lock that is let go and taken again at once mostly goes
//! to who had it before. So who works ahead asks between its steps whether somebody waits, and lets
//! them go first.

use std::sync::Arc;
use std::time::Duration;

use crate::sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering};

/// How long anybody gives way to one demand: far longer than a demand for some pages takes, and short
/// for an operator whose pool has nothing to do with a rank that hangs.
const LONGEST_WAIT: Duration = Duration::from_millis(20);

/// Shared by all pools of one device and by whoever keeps their reserves; a clone is the same one.
/// They also tell each other when a demand was refused for want of memory.
///
/// An allocation that has to map does so on its own thread: handing the call over to another would
/// cost two wake-ups, of 5 to 10 µs each, beside the 50 µs of the call.
#[derive(Debug, Clone)]
pub struct Turns(Option<Arc<Shared>>);

#[derive(Debug, Default)]
struct Shared {
    counts: Mutex<Counts>,
    /// Told when a demand has ended and somebody gives way.
    ended: Condvar,
    /// Demands for which the device had no memory.
    refused: AtomicU64,
}

#[derive(Debug, Default)]
struct Counts {
    /// Demands that went to the mapper so far; each has the next number.
    begun: u64,
    /// The numbers of those that are not back.
    at_mapper: Vec<u64>,
    /// Up to this number they were waited for in vain, and are not again.
    overdue: u64,
    /// Threads that give way right now.
    giving_way: u32,
}

/// A demand that is at the mapper, or waits there for its turn.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    shared: Option<&'a Shared>,
    number: u64,
}

impl Turns {
    /// Nobody counts and nobody gives way: for a pool that nobody looks after from another thread.
    #[must_use]
    pub const fn off() -> Self {
        Self(None)
    }

    /// Turns that whoever has a clone of shares.
    #[must_use]
    pub fn shared() -> Self {
        Self(Some(Arc::default()))
    }

    /// Waits until all demands are back from the mapper that had gone there by now, and not for those
    /// that come later, so that work behind the callers gets on under any load. A demand that takes
    /// longer than 20 ms is not waited for any longer, nor by anybody a second time: its rank may hang,
    /// and others have work, too. Returns at once if there are none.
    ///
    /// Not to be called from inside a mapper's call, which may be the demand that is waited for; nor
    /// are [`trim`](crate::PageAllocator::trim) and [`set_limit`](crate::PageAllocator::set_limit),
    /// which give way between their steps.
    pub fn give_way(&self) {
        let Some(shared) = &self.0 else { return };
        let mut counts = shared.counts();
        let begun = counts.begun;
        if !counts.awaits(begun) {
            return;
        }
        counts.giving_way += 1;
        let (mut counts, _) = shared
            .ended
            .wait_timeout_while(counts, LONGEST_WAIT, |counts| counts.awaits(begun))
            .expect("nobody panics while counting");
        counts.giving_way -= 1;
        if counts.awaits(begun) {
            counts.overdue = begun;
        }
    }

    /// A demand goes to the mapper.
    pub(crate) fn demand(&self) -> Turn<'_> {
        let shared = self.0.as_deref();
        let number = shared.map_or(0, |shared| {
            let mut counts = shared.counts();
            counts.begun += 1;
            let number = counts.begun;
            counts.at_mapper.push(number);
            number
        });
        Turn { shared, number }
    }

    /// A demand was refused for want of memory.
    pub(crate) fn refuse(&self) {
        if let Some(shared) = &self.0 {
            shared.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many demands of all who share these were.
    pub(crate) fn refused(&self) -> u64 {
        let shared = self.0.as_ref();
        shared.map_or(0, |shared| shared.refused.load(Ordering::Relaxed))
    }
}

impl Counts {
    /// Is a demand at the mapper, up to that one, that is not overdue?
    fn awaits(&self, begun: u64) -> bool {
        let awaited = self.overdue + 1..=begun;
        self.at_mapper.iter().any(|demand| awaited.contains(demand))
    }
}

impl Shared {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().expect("nobody panics while counting")
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(shared) = self.shared else { return };
        let mut counts = shared.counts();
        counts.at_mapper.retain(|&number| number != self.number);
        if counts.giving_way > 0 {
            shared.ended.notify_all();
        }
    }
}
