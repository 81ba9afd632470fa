//! For tests of what stands above a mapper: one that backs nothing and remembers everything, and
//! the suite that every mapper has to pass.
//!
//! Behind the feature `testing`; a panic here is a failed test.
//!
//! ```
//! use kvcached_mapper::{Cause, MapError, Mapper, PageId, PageRun, testing::{Call, RecordingMapper}};
//!
//! let mapper = RecordingMapper::new(8);
//! let run = PageRun::new(PageId(2), 3).expect("three pages");
//! mapper.fail(Call::Map, 1, MapError::clean(Cause::OutOfMemory { at: None }));
//!
//! mapper.map(&[run]).expect("the fault is for the next but one");
//! let other = PageRun::single(PageId(7)).expect("a page");
//! assert!(mapper.map(&[other]).unwrap_err().is_full());
//! assert_eq!(mapper.mapped(), [run]);
//!
//! // A duty of the caller that was not met is refused, and remembered.
//! assert!(mapper.violations().is_empty());
//! mapper.unmap(&[other]).unwrap_err();
//! assert_eq!(mapper.violations().len(), 1);
//! ```

mod contract;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard},
};

pub use contract::{contract, rank_contract};

use crate::{
    After, Cause, Health, MapError, Mapper, PageId, PageRun, Rank, RankMapper, Readiness,
    Reconciled, Resynced, Stage,
    runs::{Record, RunSet},
};

/// Which method of a mapper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// [`Mapper::map`].
    Map,
    /// [`Mapper::unmap_after`] and [`RankMapper::prepare_unmap`].
    Unmap,
    /// [`RankMapper::abort_unmap`].
    Abort,
    /// [`RankMapper::resync`].
    Resync,
}

/// How often each method was called, refused calls included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Calls {
    /// Calls of [`Mapper::map`].
    pub map: u64,
    /// Calls of [`Mapper::unmap_after`] and [`RankMapper::prepare_unmap`].
    pub unmap: u64,
    /// Calls of [`RankMapper::commit_unmap`].
    pub commit: u64,
    /// Calls of [`RankMapper::abort_unmap`].
    pub abort: u64,
    /// Calls of [`RankMapper::resync`].
    pub resync: u64,
    /// Calls of [`Mapper::headroom`].
    pub headroom: u64,
    /// Calls of [`Mapper::trim`].
    pub trim: u64,
    /// Calls of [`Mapper::ready`].
    pub ready: u64,
    /// Calls of [`Mapper::reconcile`].
    pub reconcile: u64,
    /// Runs that [`Mapper::map`] backed.
    pub runs_mapped: u64,
    /// Runs that [`Mapper::unmap_after`] or [`RankMapper::commit_unmap`] took away.
    pub runs_unmapped: u64,
}

/// A mapper without memory: it remembers what is mapped, checks every duty of its caller, and
/// fails on a script.
///
/// Calls about the same page at the same time are violations too, so a test that shares it between
/// threads finds out whether its subject holds the pages it asks about.
pub struct RecordingMapper {
    state: Mutex<State>,
}

type Before = Arc<dyn Fn(Call, &[PageRun]) -> Result<(), MapError> + Send + Sync>;

struct State {
    record: Record,
    /// Runs that a call is about at this moment.
    under_way: RunSet,
    memory_pages: Option<u32>,
    readiness: Readiness,
    health: Health,
    repair_error: Option<MapError>,
    lost: Vec<(Stage, Rank)>,
    last_after: Option<After>,
    faults: Vec<Fault>,
    before: Option<Before>,
    calls: Calls,
    violations: Vec<Cause>,
}

/// An answer to a call still to come.
struct Fault {
    call: Call,
    /// Calls of that kind that go before.
    after: u32,
    error: MapError,
}

impl RecordingMapper {
    /// A mapper of a pool of `pages` pages, ready, with memory for all of them.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        let state = State {
            record: Record::new(pages),
            under_way: RunSet::default(),
            memory_pages: None,
            readiness: Readiness::Ready,
            health: Health::Healthy,
            repair_error: None,
            lost: Vec::new(),
            last_after: None,
            faults: Vec::new(),
            before: None,
            calls: Calls::default(),
            violations: Vec::new(),
        };
        Self {
            state: Mutex::new(state),
        }
    }

    /// From now on there is memory for this many pages of the pool: mapping more is
    /// [`Cause::OutOfMemory`]. `None` is without bound.
    pub fn set_memory_pages(&self, pages: Option<u32>) {
        self.state().memory_pages = pages;
    }

    /// From now on this is the answer to [`Mapper::ready`].
    pub fn set_readiness(&self, readiness: Readiness) {
        self.state().readiness = readiness;
    }

    /// From now on this is the answer to [`Mapper::health`].
    pub fn set_health(&self, health: Health) {
        self.state().health = health;
    }

    /// From now on [`Mapper::reconcile`] fails so; `None` lets it settle everything as cold that
    /// is in doubt.
    pub fn fail_reconcile(&self, error: Option<MapError>) {
        self.state().repair_error = error;
    }

    /// The next [`Mapper::reconcile`] tells that this rank has lost what its pages held.
    pub fn lose_content(&self, stage: Stage, rank: Rank) {
        self.state().lost.push((stage, rank));
    }

    /// What the last call of [`Mapper::unmap_after`] or [`RankMapper::prepare_unmap`] was told to
    /// wait for.
    #[must_use]
    pub fn last_after(&self) -> Option<After> {
        self.state().last_after
    }

    /// Answers the `nth` call of that kind from now on, 0 being the next, with `error`.
    ///
    /// Runs of that call which `error` names uncertain are in doubt from then on: naming one again
    /// is a violation.
    pub fn fail(&self, call: Call, nth: u32, error: MapError) {
        self.state().faults.push(Fault {
            call,
            after: nth,
            error,
        });
    }

    /// Forgets the faults that no call has met.
    pub fn clear_faults(&self) {
        self.state().faults.clear();
    }

    /// Runs `before` in every call of a kind listed at [`Call`] that met its duties, while its pages
    /// are under way (for a resync, all pages) and with no lock of this mapper held: to look at the
    /// subject from inside a call, to wait there for another thread, or to fail by a rule of one's
    /// own.
    pub fn set_before(
        &self,
        before: impl Fn(Call, &[PageRun]) -> Result<(), MapError> + Send + Sync + 'static,
    ) {
        self.state().before = Some(Arc::new(before));
    }

    /// The mapped runs in order, exactly as they were mapped.
    #[must_use]
    pub fn mapped(&self) -> Vec<PageRun> {
        self.state().record.mapped.iter().collect()
    }

    /// How many pages are mapped.
    #[must_use]
    pub fn mapped_pages(&self) -> u32 {
        self.state().record.mapped.pages()
    }

    /// Runs that were prepared, and neither committed nor aborted, in order.
    #[must_use]
    pub fn prepared(&self) -> Vec<PageRun> {
        self.state().record.prepared.iter().collect()
    }

    /// Runs whose state a fault left unknown.
    #[must_use]
    pub fn in_doubt(&self) -> Vec<PageRun> {
        self.state().record.in_doubt.iter().collect()
    }

    /// How often each method was called so far.
    #[must_use]
    pub fn calls(&self) -> Calls {
        self.state().calls
    }

    /// Duties that callers did not meet, in order; each was refused.
    #[must_use]
    pub fn violations(&self) -> Vec<Cause> {
        self.state().violations.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .expect("nothing panics while the record is locked")
    }

    /// Lets `act` do what was asked, once the caller's duties are checked, unless `before` or the
    /// script say otherwise.
    fn call<T>(
        &self,
        call: Call,
        runs: &[PageRun],
        act: impl FnOnce(&mut State) -> Result<T, MapError>,
    ) -> Result<T, MapError> {
        let (about, before) = self.state().begin(call, runs)?;
        let allowed = before.map_or(Ok(()), |before| before(call, runs));

        let mut state = self.state();
        about.iter().for_each(|&run| state.under_way.remove(run));
        let scripted = state.next_fault(call);
        let outcome = match allowed.and(scripted) {
            Ok(()) => act(&mut state),
            Err(error) => Err(error),
        };
        if let Err(error) = &outcome {
            let named = error.uncertain.iter().filter(|run| runs.contains(run));
            named.for_each(|&run| state.record.doubt(run));
        }
        outcome
    }
}

impl State {
    /// Checks the caller's duties and notes the runs that are under way from now on.
    fn begin(
        &mut self,
        call: Call,
        runs: &[PageRun],
    ) -> Result<(Vec<PageRun>, Option<Before>), MapError> {
        let (name, count, met) = match call {
            Call::Map => ("map", &mut self.calls.map, self.record.check_map(runs)),
            Call::Unmap => (
                "unmap",
                &mut self.calls.unmap,
                self.record.check_unmap(runs),
            ),
            Call::Abort => ("abort", &mut self.calls.abort, Ok(())),
            Call::Resync => (
                "resync",
                &mut self.calls.resync,
                self.record.check_set(runs),
            ),
        };
        *count += 1;
        let about = match call {
            Call::Resync => PageRun::new(PageId(0), self.record.pages())
                .into_iter()
                .collect(),
            Call::Abort => self.record.prepared_of(runs),
            Call::Map | Call::Unmap => runs.to_vec(),
        };
        let held = about
            .iter()
            .find(|&&run| self.under_way.overlapping(run).is_some());
        let met = match held {
            Some(&run) => Err(MapError::clean(Cause::State {
                call: name,
                run,
                found: "another call about it is under way",
            })),
            None => met,
        };
        match met {
            Ok(()) => {
                about.iter().for_each(|&run| self.under_way.insert(run));
                Ok((about, self.before.clone()))
            }
            Err(error) => {
                self.violations.push(error.cause.clone());
                Err(error)
            }
        }
    }

    fn map(&mut self, runs: &[PageRun]) -> Result<(), MapError> {
        self.take_memory(runs)?;
        self.record.insert_all(runs);
        self.calls.runs_mapped += runs.len() as u64;
        Ok(())
    }

    fn commit(&mut self, runs: &[PageRun]) {
        for run in self.record.prepared_of(runs) {
            self.record.commit(run);
            self.calls.runs_unmapped += 1;
        }
    }

    fn resync(&mut self, wanted: &[PageRun]) -> Result<Resynced, MapError> {
        self.record.in_doubt = RunSet::default();
        let prepared: Vec<PageRun> = self.record.prepared.iter().collect();
        for run in prepared {
            if wanted.contains(&run) {
                self.record.restore(run);
            } else {
                self.record.commit(run);
            }
        }
        let mapped = self.record.mapped.iter();
        let extra: Vec<PageRun> = mapped.filter(|run| !wanted.contains(run)).collect();
        self.record.remove_all(&extra);
        for &run in wanted {
            if !self.record.mapped.contains(run) {
                self.take_memory(&[run])?;
                self.record.remake(run);
            }
        }
        Ok(Resynced {
            remade: self.record.take_remade(),
            in_doubt: Vec::new(),
        })
    }

    /// The fault that is due for this call, if any; every other comes one call nearer.
    fn next_fault(&mut self, call: Call) -> Result<(), MapError> {
        let due = self
            .faults
            .iter()
            .position(|fault| fault.call == call && fault.after == 0);
        let due = due.map(|index| self.faults.remove(index).error);
        for fault in self.faults.iter_mut().filter(|fault| fault.call == call) {
            fault.after = fault.after.saturating_sub(1);
        }
        due.map_or(Ok(()), Err)
    }

    /// Prepared runs are memory in use, and those in doubt too: that is the worst they can be.
    fn take_memory(&self, runs: &[PageRun]) -> Result<(), MapError> {
        let Some(memory_pages) = self.memory_pages else {
            return Ok(());
        };
        let asked: u32 = runs.iter().map(|run| run.count()).sum();
        if self.used_pages() + asked > memory_pages {
            return Err(MapError::clean(Cause::OutOfMemory { at: None }));
        }
        Ok(())
    }

    fn used_pages(&self) -> u32 {
        let sets = [
            &self.record.mapped,
            &self.record.prepared,
            &self.record.in_doubt,
        ];
        sets.iter().map(|set| set.pages()).sum()
    }
}

impl Mapper for RecordingMapper {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.call(Call::Map, runs, |state| state.map(runs))
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.state().last_after = Some(after);
        self.call(Call::Unmap, runs, |state| {
            state.record.remove_all(runs);
            state.calls.runs_unmapped += runs.len() as u64;
            Ok(())
        })
    }

    fn headroom(&self) -> Option<u32> {
        let mut state = self.state();
        state.calls.headroom += 1;
        state
            .memory_pages
            .map(|pages| pages.saturating_sub(state.used_pages()))
    }

    fn trim(&self) {
        self.state().calls.trim += 1;
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        let mut state = self.state();
        state.calls.ready += 1;
        Ok(state.readiness.clone())
    }

    fn health(&self) -> Health {
        self.state().health.clone()
    }

    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        let mut state = self.state();
        state.calls.reconcile += 1;
        if let Some(error) = state.repair_error.clone() {
            return Err(error);
        }
        state.record.in_doubt = RunSet::default();
        let (cold, mapped) = state.record.tell_apart(doubtful);
        Ok(Reconciled {
            cold,
            mapped,
            lost: std::mem::take(&mut state.lost),
        })
    }
}

impl RankMapper for RecordingMapper {
    fn prepare_unmap(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.state().last_after = Some(after);
        self.call(Call::Unmap, runs, |state| {
            state.record.prepare_all(runs);
            Ok(())
        })
    }

    fn commit_unmap(&self, runs: &[PageRun]) {
        let mut state = self.state();
        state.calls.commit += 1;
        state.commit(runs);
    }

    fn abort_unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
        let outcome = self.call(Call::Abort, runs, |_| Ok(()));
        let mut state = self.state();
        // Also after a fault: all are mapped again but those it named, which are in doubt.
        for run in state.record.prepared_of(runs) {
            state.record.restore(run);
        }
        outcome
    }

    fn resync_after(&self, wanted: &[PageRun], after: After) -> Result<Resynced, MapError> {
        self.state().last_after = Some(after);
        self.call(Call::Resync, wanted, |state| state.resync(wanted))
    }

    fn mapped(&self) -> Vec<PageRun> {
        Self::mapped(self)
    }
}

impl fmt::Debug for RecordingMapper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("RecordingMapper")
            .field("record", &state.record)
            .field("calls", &state.calls)
            .field("violations", &state.violations)
            .finish_non_exhaustive()
    }
}
