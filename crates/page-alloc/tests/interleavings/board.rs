//! What is true of every page, beside what the allocator believes: who has it, whether it has
//! memory, and what may still touch it.
//!
//! The board is asked and changed between the steps of the scheduler, never across one, so that it
//! neither hides interleavings nor adds any.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard};

use kvcached_mapper::{
    After, Cause, Epoch, Health, MapError, Mapper, PageId, PageRun, Rank, Readiness, Reconciled,
    Stage, Suspect,
};
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread::yield_now;

/// One in so many calls of the mapper fails in each of the ways there are; never if `None`.
pub(crate) type Faults = Option<u32>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    Cold,
    /// As part of this run.
    Mapped(PageRun),
    /// A call about it is under way.
    Called,
    /// As part of this run.
    Doubt(PageRun),
}

struct State {
    memory: Vec<Memory>,
    owned: Vec<bool>,
    freed: BTreeMap<PageId, After>,
    retired: Option<Epoch>,
    health: Health,
    /// Raised and looked at by somebody who has not lowered it again; counts every time.
    fence: (bool, u64),
    faults: Faults,
}

/// The mapper of the tests, with the truth in it.
pub(crate) struct Board(Mutex<State>);

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Board")
    }
}

fn rank_one(reason: &str) -> Suspect {
    Suspect {
        stage: Stage(0),
        rank: Rank(1),
        reason: reason.to_owned(),
    }
}

fn fenced() -> Health {
    Health::Fenced {
        ranks: vec![rank_one("no answer")],
        pages: 0,
    }
}

impl Board {
    pub(crate) fn new(pages: u32, faults: Faults) -> Self {
        let pages = PageId(pages).index();
        Self(Mutex::new(State {
            memory: vec![Memory::Cold; pages],
            owned: vec![false; pages],
            freed: BTreeMap::new(),
            retired: None,
            health: Health::Healthy,
            fence: (false, 0),
            faults,
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("a failed iteration ends the test")
    }

    /// The pages have this owner from now on, and had none.
    pub(crate) fn own(&self, pages: &[PageId]) {
        let mut state = self.state();
        for page in pages {
            let index = page.index();
            let owned = std::mem::replace(&mut state.owned[index], true);
            assert!(!owned, "{page} has two owners");
            let memory = state.memory[index];
            let mapped = matches!(memory, Memory::Mapped(_));
            assert!(mapped, "{page} was handed out, and is {memory:?}");
        }
    }

    /// Their owner gives them up, and what `after` names may still touch them.
    pub(crate) fn disown(&self, pages: &[PageId], after: After) {
        let mut state = self.state();
        for page in pages {
            let owned = std::mem::replace(&mut state.owned[page.index()], false);
            assert!(owned, "{page} is given back by its owner");
            let freed = state.freed.entry(*page).or_insert(After::NOTHING);
            *freed = freed.join(after);
        }
    }

    /// About to be told to the allocator.
    pub(crate) fn has_retired(&self, epoch: Epoch) {
        let mut state = self.state();
        state.retired = state.retired.max(Some(epoch));
    }

    /// A rank is suspect from now on.
    pub(crate) fn suspect(&self) {
        self.state().health = fenced();
    }

    /// The allocator knows.
    pub(crate) fn raised(&self) {
        let mut state = self.state();
        state.fence = (true, state.fence.1 + 1);
    }

    /// Every rank is known again, and no other becomes suspect.
    pub(crate) fn mended(&self) {
        let mut state = self.state();
        state.fence.0 = false;
        state.health = Health::Healthy;
    }

    /// Is the fence up, and which one is it?
    pub(crate) fn fence(&self) -> (bool, u64) {
        self.state().fence
    }

    pub(crate) fn end_faults(&self) {
        self.state().faults = None;
    }

    pub(crate) fn is_mapped(&self, page: PageId) -> bool {
        matches!(self.state().memory[page.index()], Memory::Mapped(_))
    }

    pub(crate) fn is_cold(&self, page: PageId) -> bool {
        self.state().memory[page.index()] == Memory::Cold
    }

    /// How the call about `runs` ends, if not well. The others are to be as before.
    fn fault(&self, runs: &[PageRun]) -> Option<MapError> {
        let one_in = self.state().faults?;
        let cause = Cause::Diverged {
            stage: Stage(0),
            rank: Rank(1),
        };
        match thread_rng().gen_range(0..one_in) {
            0 => Some(MapError::clean(Cause::OutOfMemory { at: None })),
            1 => Some(MapError::clean(cause)),
            2 => Some(MapError {
                cause,
                uncertain: vec![runs[0]],
            }),
            _ => None,
        }
    }

    fn call(
        &self,
        runs: &[PageRun],
        from: fn(PageRun) -> Memory,
        to: fn(PageRun) -> Memory,
    ) -> Result<(), MapError> {
        self.state().change(runs, from, |_| Memory::Called);
        yield_now();
        let fault = self.fault(runs);
        let mut state = self.state();
        match fault {
            None => {
                state.change(runs, |_| Memory::Called, to);
                Ok(())
            }
            Some(error) => {
                let (doubted, others): (Vec<_>, Vec<_>) =
                    runs.iter().partition(|run| error.uncertain.contains(run));
                state.change(&doubted, |_| Memory::Called, Memory::Doubt);
                state.change(&others, |_| Memory::Called, from);
                Err(error)
            }
        }
    }
}

impl State {
    /// Changes pages that are `from`; that they are is what their caller owes.
    fn change(
        &mut self,
        runs: &[PageRun],
        from: impl Fn(PageRun) -> Memory,
        to: impl Fn(PageRun) -> Memory,
    ) {
        for &run in runs {
            for page in run.pages() {
                let memory = &mut self.memory[page.index()];
                assert_eq!(*memory, from(run), "{page} of {run}");
                *memory = to(run);
                if *memory == Memory::Cold {
                    self.freed.remove(&page);
                }
            }
        }
    }

    /// What the memory of `runs` has to wait for.
    fn after(&self, runs: &[PageRun]) -> After {
        let pages = runs.iter().flat_map(|run| run.pages());
        let freed = pages.filter_map(|page| self.freed.get(&page).copied());
        freed.fold(After::NOTHING, After::join).since(self.retired)
    }
}

impl Mapper for Board {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.call(runs, |_| Memory::Cold, Memory::Mapped)
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        {
            let state = self.state();
            let needed = state.after(runs);
            assert_eq!(
                after.join(needed),
                after,
                "{runs:?} are freed after {needed:?}"
            );
            for page in runs.iter().flat_map(|run| run.pages()) {
                assert!(!state.owned[page.index()], "{page} has an owner");
            }
        }
        if let Some(epoch) = after.epoch
            && thread_rng().gen_range(0..2) == 0
        {
            return Err(MapError::clean(Cause::InFlight { epoch }));
        }
        self.call(runs, Memory::Mapped, |_| Memory::Cold)
    }

    fn headroom(&self) -> Option<u32> {
        yield_now();
        None
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        Ok(Readiness::Ready)
    }

    fn health(&self) -> Health {
        let health = self.state().health.clone();
        // By the time somebody hears it, it may be old.
        yield_now();
        health
    }

    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        yield_now();
        let mut reconciled = Reconciled::default();
        for &run in doubtful {
            // A run of which another repair has found out already is told as it is.
            let mapped = thread_rng().gen_range(0..2) == 0;
            let mut state = self.state();
            let memory = state.memory[run.first().index()];
            match memory {
                Memory::Doubt(doubt) if doubt == run && mapped => {
                    state.change(&[run], Memory::Doubt, Memory::Mapped);
                    reconciled.mapped.push(run);
                }
                Memory::Doubt(doubt) if doubt == run => {
                    state.change(&[run], Memory::Doubt, |_| Memory::Cold);
                    reconciled.cold.push(run);
                }
                Memory::Mapped(whole) if whole == run => reconciled.mapped.push(run),
                Memory::Cold => reconciled.cold.push(run),
                Memory::Mapped(_) | Memory::Called | Memory::Doubt(_) => {}
            }
        }
        yield_now();
        Ok(reconciled)
    }
}
