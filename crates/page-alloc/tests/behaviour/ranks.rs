//! The mapper of these tests: the recording one, with repairs that end as a test says, with epochs,
//! and with a record of what each unmap was told to wait for.

use std::fmt;
use std::ops::Deref;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvcached_mapper::testing::{Call, RecordingMapper};
use kvcached_mapper::{After, Cause, Health, MapError, Mapper, PageRun, Readiness, Reconciled};

use crate::support::doubtful;

/// What a repair finds a run in doubt to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Cold,
    Mapped,
    /// Not known yet.
    Nothing,
}

/// A call of [`Mapper::unmap_after`].
#[derive(Debug)]
pub(crate) struct Unmap {
    pub(crate) runs: Vec<PageRun>,
    pub(crate) after: After,
    pub(crate) done: bool,
}

/// A [`RecordingMapper`] over ranks that may be in doubt.
pub(crate) struct Ranks {
    recording: RecordingMapper,
    found: Mutex<fn(PageRun) -> Found>,
    unmaps: Mutex<Vec<Unmap>>,
    /// Work of every epoch that an unmap waits for is still under way.
    in_flight: AtomicBool,
    /// A repair is at work in the recording mapper.
    repairing: AtomicBool,
    /// Runs that repairs mapped there.
    remade: AtomicU64,
    answered: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Ranks {
    pub(crate) fn new(pages: u32) -> Self {
        Self {
            recording: RecordingMapper::new(pages),
            found: Mutex::new(|_| Found::Cold),
            unmaps: Mutex::default(),
            in_flight: AtomicBool::new(false),
            repairing: AtomicBool::new(false),
            remade: AtomicU64::new(0),
            answered: Mutex::default(),
        }
    }

    /// From now on a repair finds this; [`Found::Cold`] of every run at first.
    pub(crate) fn set_found(&self, found: fn(PageRun) -> Found) {
        *self.found.lock().expect("no test panicked") = found;
    }

    /// From now on no epoch that an unmap waits for retires in time, or every one does.
    pub(crate) fn set_in_flight(&self, in_flight: bool) {
        self.in_flight.store(in_flight, Ordering::Relaxed);
    }

    /// The unmaps since the last time this was asked, those included that were refused.
    pub(crate) fn unmaps(&self) -> Vec<Unmap> {
        std::mem::take(&mut self.unmaps.lock().expect("no test panicked"))
    }

    /// Runs `then` when the answer of the next repair is known, and before it is given.
    pub(crate) fn once_answered(&self, then: impl FnOnce() + Send + 'static) {
        *self.answered.lock().expect("no test panicked") = Some(Box::new(then));
    }

    pub(crate) fn is_repairing(&self) -> bool {
        self.repairing.load(Ordering::Relaxed)
    }

    /// Runs that the allocator had mapped.
    pub(crate) fn runs_mapped(&self) -> u64 {
        self.calls().runs_mapped - self.remade.load(Ordering::Relaxed)
    }

    fn settle(&self, run: PageRun, found: Found) {
        match found {
            Found::Cold => {}
            Found::Mapped => {
                self.recording
                    .map(&[run])
                    .expect("a cold run can be mapped");
                self.remade.fetch_add(1, Ordering::Relaxed);
            }
            Found::Nothing => {
                self.recording.fail(Call::Map, 0, doubtful(vec![run]));
                self.recording
                    .map(&[run])
                    .expect_err("it is in doubt again");
            }
        }
    }
}

impl Deref for Ranks {
    type Target = RecordingMapper;

    fn deref(&self) -> &RecordingMapper {
        &self.recording
    }
}

impl Mapper for Ranks {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.recording.map(runs)
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        let result = match after.epoch {
            Some(epoch) if self.in_flight.load(Ordering::Relaxed) => {
                Err(MapError::clean(Cause::InFlight { epoch }))
            }
            _ => self.recording.unmap_after(runs, after),
        };
        self.unmaps.lock().expect("no test panicked").push(Unmap {
            runs: runs.to_vec(),
            after,
            done: result.is_ok(),
        });
        result
    }

    fn headroom(&self) -> Option<u32> {
        self.recording.headroom()
    }

    fn trim(&self) {
        self.recording.trim();
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        self.recording.ready()
    }

    fn health(&self) -> Health {
        self.recording.health()
    }

    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        let found = *self.found.lock().expect("no test panicked");
        let lost = self.recording.reconcile(doubtful)?.lost;
        self.repairing.store(true, Ordering::Relaxed);
        let mut settled = Reconciled {
            lost,
            ..Reconciled::default()
        };
        for &run in doubtful {
            self.settle(run, found(run));
            match found(run) {
                Found::Cold => settled.cold.push(run),
                Found::Mapped => settled.mapped.push(run),
                Found::Nothing => {}
            }
        }
        self.repairing.store(false, Ordering::Relaxed);
        let answered = self.answered.lock().expect("no test panicked").take();
        if let Some(then) = answered {
            then();
        }
        Ok(settled)
    }
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ranks")
            .field("recording", &self.recording)
            .finish_non_exhaustive()
    }
}
