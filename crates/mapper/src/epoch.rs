//! Work in flight: memory that was freed may still be read by what was launched before.
//!
//! An engine numbers what it launches, and says in which epoch it freed a block and which epochs
//! have retired. A rank takes memory away only once nothing that was launched can touch it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvcached_vmm::Fence;

use crate::{Cause, MapError};

/// A piece of work that an engine launches on the device, such as one forward step, by its number.
/// Later work has greater numbers; an epoch retires once it and all before it have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// What must have ended on a rank before memory is taken away from it.
///
/// ```
/// use kvcached_mapper::{After, Epoch};
///
/// let batch = After::epoch(Epoch(7)).join(After::epoch(Epoch(9))).join(After::NOTHING);
/// assert_eq!(batch, After::epoch(Epoch(9)));
/// assert!(batch.join(After::DEVICE).device);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct After {
    /// This epoch and all before it, even if it is not launched yet.
    pub epoch: Option<Epoch>,
    /// Whatever was launched so far, in any epoch or none: the device is synchronised, by the
    /// process that owns it.
    pub device: bool,
}

/// Which epochs have retired on one rank: one value per process and engine, shared by the mappers
/// of all its pools and by whoever launches work.
///
/// Nothing is known at first, so nothing that waits for an epoch is taken away. Whoever numbers
/// epochs owes that
/// - a coordinator that is started anew over ranks that live is made known by
///   [`begin`](Self::begin), which the server of a rank does by itself;
/// - a rank's process that is started anew retires the last epoch of the one before, of which
///   nothing is in flight any more;
/// - nothing is launched on such a process before each pool has been repaired: until then it does
///   not have the pages.
pub struct Epochs {
    state: Mutex<State>,
    changed: Condvar,
    patience: Duration,
}

#[derive(Default)]
struct State {
    /// The coordinator that numbers the epochs, if there is more than one in time.
    life: Option<u64>,
    /// All of it, and all before, has ended.
    retired: Option<Epoch>,
    /// Launched, in the order of the epochs.
    flying: VecDeque<Flying>,
}

/// Work that was launched and is not known to have ended.
struct Flying {
    epoch: Epoch,
    fence: Arc<dyn Fence>,
    /// The fence failed once, and that was said.
    failed: bool,
}

/// How often the fences are asked while somebody waits.
const LOOK_EVERY: Duration = Duration::from_micros(50);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {}", self.0)
    }
}

impl After {
    /// No work can touch the memory: it was never handed out, or what used it has retired.
    pub const NOTHING: Self = Self {
        epoch: None,
        device: false,
    };

    /// Whatever was launched so far, for callers that do not count epochs.
    pub const DEVICE: Self = Self {
        epoch: None,
        device: true,
    };

    /// The work of this epoch and of all before it.
    #[must_use]
    pub const fn epoch(epoch: Epoch) -> Self {
        Self {
            epoch: Some(epoch),
            device: false,
        }
    }

    /// What both wait for.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        Self {
            epoch: self.epoch.max(other.epoch),
            device: self.device || other.device,
        }
    }

    /// What is left to wait for once `retired` and all before it have ended.
    #[must_use]
    pub fn since(self, retired: Option<Epoch>) -> Self {
        Self {
            epoch: self.epoch.filter(|&epoch| Some(epoch) > retired),
            ..self
        }
    }
}

impl Epochs {
    /// No epoch has retired. Whoever waits for one waits `patience` at most.
    #[must_use]
    pub fn new(patience: Duration) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            patience,
        }
    }

    /// Another coordinator numbers the epochs from now on: those of the one before mean nothing any
    /// more. `life` tells coordinators apart, later ones having greater numbers; the same again
    /// changes nothing.
    pub fn begin(&self, life: u64) {
        let mut state = self.state();
        if state.life < Some(life) {
            *state = State {
                life: Some(life),
                ..State::default()
            };
        }
    }

    /// This epoch and all before it have ended, as the caller knows. Going back does nothing.
    pub fn retire(&self, epoch: Epoch) {
        let mut state = self.state();
        state.retire(epoch);
        drop(state);
        self.changed.notify_all();
    }

    /// The work of `epoch` was launched, and has ended once `fence` says so.
    ///
    /// Epochs are launched in order, each with all of its work: where that runs on several streams,
    /// `fence` is a `Vec` of theirs. More work of the same epoch counts only while the epoch has not
    /// retired.
    pub fn launched(&self, epoch: Epoch, fence: Arc<dyn Fence>) {
        let mut state = self.state();
        let place = state.flying.partition_point(|one| one.epoch <= epoch);
        let failed = false;
        state.flying.insert(
            place,
            Flying {
                epoch,
                fence,
                failed,
            },
        );
        // What has ended is forgotten here, so that nothing piles up where nobody asks.
        state.look();
        drop(state);
        self.changed.notify_all();
    }

    /// The last epoch that has retired, if any.
    #[must_use]
    pub fn retired(&self) -> Option<Epoch> {
        let mut state = self.state();
        state.look();
        state.retired
    }

    /// Waits until `epoch` has retired, no longer than the patience; not at all where no epoch was
    /// ever retired or launched, since nobody would say so.
    ///
    /// # Errors
    /// [`Cause::InFlight`].
    pub fn wait(&self, epoch: Epoch) -> Result<(), MapError> {
        #[expect(
            clippy::disallowed_methods,
            reason = "the bound of a wait for work on the device"
        )]
        let now = Instant::now;
        let begun = now();
        let mut state = self.state();
        loop {
            state.look();
            if state.retired >= Some(epoch) {
                return Ok(());
            }
            let left = self.patience.saturating_sub(now() - begun);
            let counts = state.retired.is_some() || !state.flying.is_empty();
            if left.is_zero() || !counts {
                return Err(MapError::clean(Cause::InFlight { epoch }));
            }
            // Fences do not announce themselves; a word of the engine does.
            let pause = if state.flying.is_empty() {
                left
            } else {
                left.min(LOOK_EVERY)
            };
            state = self
                .changed
                .wait_timeout(state, pause)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn retire(&mut self, epoch: Epoch) {
        self.retired = self.retired.max(Some(epoch));
        let retired = self.retired;
        self.flying.retain(|one| Some(one.epoch) > retired);
    }

    /// Retires what the fences say has ended, in order.
    fn look(&mut self) {
        while let Some(first) = self.flying.front_mut() {
            let epoch = first.epoch;
            match first.fence.is_over() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    // It cannot be told, so it has not ended; the wait for it has a bound.
                    if !first.failed {
                        tracing::warn!(%epoch, %error, "cannot tell whether work has ended");
                    }
                    first.failed = true;
                    return;
                }
            }
            self.flying.pop_front();
            // The last of its fences speaks for the epoch.
            if self.flying.front().is_none_or(|next| next.epoch > epoch) {
                self.retire(epoch);
            }
        }
    }
}

impl fmt::Debug for Epochs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Epochs")
            .field("retired", &state.retired)
            .field("flying", &state.flying.len())
            .field("patience", &self.patience)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
