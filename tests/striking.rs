//! A rank's mapper that strikes at a named moment: just before or after a call of the seam.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use kvcached_mapper::{
    After, Cause, Epoch, Health, MapError, Mapper, PageRun, RankMapper, Readiness, Resynced,
};
use nix::sys::signal::{Signal, kill, raise};
use nix::unistd::Pid;

use crate::strike::{Call, Point, Stroke};

/// See the module.
#[derive(Debug)]
pub(crate) struct Striking {
    inner: Arc<dyn RankMapper>,
    /// What is to come, once.
    due: Mutex<Option<(Point, Stroke)>>,
}

impl Striking {
    pub(crate) fn new(inner: Arc<dyn RankMapper>) -> Self {
        let due = Mutex::default();
        Self { inner, due }
    }

    /// Strikes at the next such point, once.
    pub(crate) fn arm(&self, point: Point, stroke: Stroke) {
        *self.due.lock().unwrap_or_else(PoisonError::into_inner) = Some((point, stroke));
    }

    /// Is a stroke still to come?
    pub(crate) fn is_armed(&self) -> bool {
        let due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        due.is_some()
    }

    fn reach(&self, point: Point) -> Result<(), MapError> {
        let due = self
            .due
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take_if(|(at, _)| *at == point);
        let Some((_, stroke)) = due else {
            return Ok(());
        };
        let end = |process: i32| {
            kill(Pid::from_raw(process), Signal::SIGKILL).expect("a process of this user");
        };
        // To this thread, which so does nothing more: another one would be stopped a little before it.
        let raise = |signal| raise(signal).expect("a signal to this thread");
        match stroke {
            Stroke::Die => raise(Signal::SIGKILL),
            Stroke::Kill(other) => end(other),
            Stroke::Both(other) => {
                end(other);
                raise(Signal::SIGKILL);
            }
            Stroke::Stop => raise(Signal::SIGSTOP),
            Stroke::KillAndStop(other) => {
                end(other);
                raise(Signal::SIGSTOP);
            }
            Stroke::Refuse => {
                let epoch = Epoch(0);
                return Err(MapError::clean(match point {
                    Point::Before(Call::Map) => Cause::OutOfMemory { at: None },
                    _ => Cause::InFlight { epoch },
                }));
            }
        }
        Ok(())
    }

    fn around<T>(
        &self,
        call: Call,
        inner: impl FnOnce() -> Result<T, MapError>,
    ) -> Result<T, MapError> {
        self.reach(Point::Before(call))?;
        let answer = inner();
        // Nothing is left to refuse.
        let _ = self.reach(Point::After(call));
        answer
    }
}

impl Mapper for Striking {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.around(Call::Map, || self.inner.map(runs))
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.around(Call::Undo, || self.inner.unmap_after(runs, after))
    }

    fn headroom(&self) -> Option<u32> {
        self.inner.headroom()
    }

    fn trim(&self) {
        self.inner.trim();
    }

    fn tend(&self, now: Instant) -> Option<Instant> {
        self.inner.tend(now)
    }

    fn kept_bytes(&self) -> u64 {
        self.inner.kept_bytes()
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        self.inner.ready()
    }

    fn health(&self) -> Health {
        self.inner.health()
    }
}

impl RankMapper for Striking {
    fn prepare_unmap(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.around(Call::Prepare, || self.inner.prepare_unmap(runs, after))
    }

    fn commit_unmap(&self, runs: &[PageRun]) {
        // It cannot fail, so there is nothing to hand on.
        let _ = self.around(Call::Commit, || {
            self.inner.commit_unmap(runs);
            Ok(())
        });
    }

    fn abort_unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.around(Call::Abort, || self.inner.abort_unmap(runs))
    }

    fn resync_after(&self, wanted: &[PageRun], after: After) -> Result<Resynced, MapError> {
        self.around(Call::Resync, || self.inner.resync_after(wanted, after))
    }

    fn mapped(&self) -> Vec<PageRun> {
        self.inner.mapped()
    }
}
