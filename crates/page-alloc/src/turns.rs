//! Whose turn it is at the device: what somebody waits for goes before what nobody does.
//!
//! A driver does one call at a time, and a lock that is let go and taken again at once mostly goes
//! to who had it before. So who works ahead asks between its steps whether somebody waits, and lets
//! them go first.

use std::sync::Arc;

use crate::sync::{Condvar, Mutex, MutexGuard};

/// Shared by all pools of one device and by whoever keeps their reserves; a clone is the same one.
/// By default nobody counts and nobody gives way, which is right for a pool that nobody looks after
/// from another thread.
///
/// An allocation that has to map does so on its own thread: handing the call over to another would
/// cost two wake-ups, of 5 to 10 µs each, beside the 50 µs of the call.
#[derive(Debug, Clone, Default)]
pub struct Turns(Option<Arc<Shared>>);

#[derive(Debug, Default)]
struct Shared {
    counts: Mutex<Counts>,
    /// Told when a demand has ended and somebody gives way.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Counts {
    /// Demands that went to the mapper, and those that are back.
    begun: u64,
    ended: u64,
    /// Threads that give way right now.
    giving_way: u32,
}

/// A demand that is at the mapper, or waits there for its turn.
#[derive(Debug)]
pub(crate) struct Turn<'a>(Option<&'a Shared>);

impl Turns {
    /// Turns that nobody shares yet.
    #[must_use]
    pub fn new() -> Self {
        Self(Some(Arc::default()))
    }

    /// Waits until as many demands are back from the mapper as had gone there by now: for as long as
    /// their calls take, and not for those that come later, so that work behind the callers gets on
    /// under any load. Returns at once if there are none.
    ///
    /// Not to be called from inside a mapper's call, which may be the demand that is waited for; nor
    /// are [`trim`](crate::PageAllocator::trim) and [`set_limit`](crate::PageAllocator::set_limit),
    /// which give way between their steps.
    pub fn give_way(&self) {
        let Some(shared) = &self.0 else { return };
        let mut counts = shared.counts();
        let begun = counts.begun;
        if counts.ended >= begun {
            return;
        }
        counts.giving_way += 1;
        while counts.ended < begun {
            counts = shared
                .ended
                .wait(counts)
                .expect("nobody panics while counting");
        }
        counts.giving_way -= 1;
    }

    /// How many demands are at the mapper right now.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        let Some(shared) = &self.0 else { return 0 };
        let counts = shared.counts();
        counts.begun - counts.ended
    }

    /// A demand goes to the mapper.
    pub(crate) fn demand(&self) -> Turn<'_> {
        if let Some(shared) = &self.0 {
            shared.counts().begun += 1;
        }
        Turn(self.0.as_deref())
    }
}

impl Shared {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().expect("nobody panics while counting")
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(shared) = self.0 else { return };
        let mut counts = shared.counts();
        counts.ended += 1;
        if counts.giving_way > 0 {
            shared.ended.notify_all();
        }
    }
}
