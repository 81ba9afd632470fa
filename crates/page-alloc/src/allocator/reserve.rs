//! What is done behind the callers: memory goes back that nobody is likely to ask for, and pages get
//! some before somebody does.

use kvcached_mapper::MapError;

use super::unmap::Unmapped;
use super::{Books, PageAllocator};
use crate::demand::Band;
use crate::runs::Idle;
use crate::sync::Ordering;
use crate::table::{Purpose, Wanted};
use crate::{AllocError, FullReason, PageState};

/// Ticks for which nothing is mapped ahead after a demand of another pool was refused: one whole
/// time between two, in which it can ask again.
const YIELDED_TICKS: u32 = 2;

/// What one [`PageAllocator::replenish`] did, or one [`PageAllocator::keep_to_limit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Replenished {
    /// Pages that are warm now and were cold.
    pub mapped: u32,
    /// Pages that are cold or withheld now and were warm.
    pub unmapped: u32,
    /// Why the reserve stays short of its target, if it does: a normal answer.
    pub full: Option<FullReason>,
    /// There is more to do: another call right away makes sense.
    pub more: bool,
}

impl PageAllocator {
    /// One bounded step towards a pool that keeps to its limit, and whose warm pages are as many as
    /// the recent demand asks for, within its [`Reserve`](crate::Reserve). Somebody calls this when
    /// the pool [is due](Self::is_due) and now and then, from a thread of its own; while
    /// [`Replenished::more`], at once again. Maps nothing while a rank is fenced. Runs whose epoch has
    /// not retired, as far as is known here, are asked for only above the limit, and, if a rank then
    /// refuses, not again before another epoch has retired or a [`repair`](Self::repair) came by.
    ///
    /// A step is one call of the mapper about few chunks, which a demand that meets it has to wait
    /// for; [`Turns::give_way`](crate::Turns::give_way) before each step lets that demand go next. A
    /// step that maps first asks how much memory the device has left; no other does.
    ///
    /// What is above the lower bound goes first if another pool that shares the turns was refused a
    /// demand since the last step, whatever the demand here.
    ///
    /// # Errors
    /// What the mapper answered, except that it is full, which is in [`Replenished::full`]; or that a
    /// rank was fenced meanwhile.
    pub fn replenish(&self) -> Result<Replenished, MapError> {
        let done = self.shed()?;
        if done.unmapped > 0 {
            return Ok(done);
        }
        self.grow_reserve()
    }

    /// The part of [`replenish`](Self::replenish) that unmaps, which never asks how much memory there
    /// is: for a pool whose reserve cannot grow for the time being.
    ///
    /// # Errors
    /// What the mapper answered.
    pub fn shed(&self) -> Result<Replenished, MapError> {
        self.with_books(|books| books.heed(self.turns.refused()));
        let mut step = self.shed_step(Books::above)?;
        if step.pages == 0 {
            step = self.unmap_step(Idle::Retired, Books::surplus)?;
        }
        Ok(self.unmapped(step))
    }

    /// The part of [`replenish`](Self::replenish) that unmaps what is above the limit: for pools
    /// without a reserve, whose idle pages otherwise stay warm.
    ///
    /// # Errors
    /// What the mapper answered.
    pub fn keep_to_limit(&self) -> Result<Replenished, MapError> {
        self.shed_step(Books::excess)
            .map(|step| self.unmapped(step))
    }

    /// Is there something for [`replenish`](Self::replenish) to do, or for
    /// [`keep_to_limit`](Self::keep_to_limit) if the pool has no reserve? Reads one flag, without a
    /// lock.
    #[inline]
    pub fn is_due(&self) -> bool {
        self.due.load(Ordering::Relaxed)
    }

    /// Tells that some time has passed, always about as much: the demand before the last such times
    /// counts no more. See [`Reserve`](crate::Reserve).
    pub fn tick(&self) {
        self.with_books(|books| {
            books.demand.tick();
            books.yields = books.yields.saturating_sub(1);
        });
    }

    /// Unmaps retired runs of what is above a bound, or else, if it is above the limit, others.
    fn shed_step(&self, above: fn(&Books) -> Wanted) -> Result<Unmapped, MapError> {
        let step = self.unmap_step(Idle::Retired, above)?;
        if step.pages == 0 && self.with_books(|books| books.may_ask()) {
            return self.unmap_step(Idle::InFlight, Books::excess);
        }
        Ok(step)
    }

    fn unmapped(&self, step: Unmapped) -> Replenished {
        Replenished {
            unmapped: step.pages,
            more: step.pages > 0 && self.is_due(),
            ..Replenished::default()
        }
    }

    /// Maps pages towards the target of the reserve, in one call.
    fn grow_reserve(&self) -> Result<Replenished, MapError> {
        let nothing_to_ask = self.with_books(|books| {
            let missing = books.missing();
            let cold = books.table.count(PageState::Cold);
            (missing == 0 || cold == 0).then(|| Replenished {
                full: (missing > 0).then(|| books.reason_beyond(missing)),
                ..Replenished::default()
            })
        });
        if let Some(done) = nothing_to_ask {
            return Ok(done);
        }
        // A hint, but enough to spare a reserve that nobody waits for a vain attempt. Asking may
        // take long, so it is not done under the lock.
        let headroom = self.mapper.headroom().unwrap_or(u32::MAX);
        let mut done = Replenished::default();
        let mut runs = Vec::new();
        self.with_books(|books| {
            let missing = books.missing();
            let cold = books.table.count(PageState::Cold);
            let ahead = books.ahead(missing, headroom);
            done.full = match missing {
                _ if missing.min(cold) > ahead => Some(FullReason::DeviceMemory),
                _ if missing > cold => Some(books.reason_beyond(missing)),
                _ => None,
            };
            if missing.min(cold) > headroom {
                books.pressure.met_full(&books.runs);
            }
            done.mapped = books.begin_map(ahead, self.step_runs, &mut runs);
            done.more = done.mapped < ahead.min(cold);
        });
        if runs.is_empty() {
            return Ok(done);
        }
        match self.map(&runs, Purpose::Reserve) {
            Ok(()) => {
                done.more = (done.more || done.full.is_none()) && self.is_due();
                Ok(done)
            }
            Err(AllocError::Broken(error)) => Err(error),
            Err(_) => Ok(Replenished {
                full: Some(FullReason::DeviceMemory),
                ..Replenished::default()
            }),
        }
    }
}

impl Books {
    /// Is there something to do behind the callers? Exactly what a step finds, so that nobody is
    /// woken in vain again and again.
    pub(super) fn due(&self) -> bool {
        let idle = |wanted: Wanted| {
            wanted.pages > 0 && self.table.has_idle_run(wanted.most, Idle::Retired)
        };
        let excess = self.excess();
        if excess.pages > 0 {
            return idle(excess) || self.may_ask() && self.table.has_idle_run(0, Idle::InFlight);
        }
        let Band { low, high, .. } = self.demand.band();
        if self.demand.reserve().max == 0 || (low..=high).contains(&self.warm()) {
            // As on the path of most allocations.
            return false;
        }
        idle(self.above())
            || idle(self.surplus())
            || self.missing() > 0 && self.table.count(PageState::Cold) > 0
    }

    /// Pages above the limit.
    pub(super) fn excess(&self) -> Wanted {
        Wanted::at_least(self.table.excess())
    }

    /// Pages above the limit, or above what the reserve may ever have.
    fn above(&self) -> Wanted {
        let max = self.demand.reserve().max;
        Wanted::at_least(self.table.excess().max(self.warm().saturating_sub(max)))
    }

    /// Pages that the recent demand does not ask for. What would have to be mapped again does not
    /// count: a run that is long enough goes only when the reserve can do without all of it.
    fn surplus(&self) -> Wanted {
        let Band { target, high, .. } = self.demand.band();
        Wanted {
            pages: self.warm().saturating_sub(high),
            most: self.warm().saturating_sub(target),
        }
    }

    /// Pages to map ahead; none while a rank is fenced.
    fn missing(&self) -> u32 {
        let Band { low, target, .. } = self.demand.band();
        match self.fence {
            None if self.warm() < low => target - self.warm(),
            _ => 0,
        }
    }

    /// How many of the missing pages to map where there is room for so many: the lower bound in any
    /// case, and beyond it no more than leaves others as much as is warm here, nor any while another
    /// pool is to get what it was refused.
    fn ahead(&self, missing: u32, headroom: u32) -> u32 {
        let promised = self.demand.reserve().min.saturating_sub(self.warm());
        let shared = match self.yields {
            0 => headroom.saturating_sub(self.warm()) / 2,
            _ => 0,
        };
        missing.min(promised.min(headroom).max(shared))
    }

    /// Why so many pages, more than are cold, cannot be mapped.
    fn reason_beyond(&self, missing: u32) -> FullReason {
        let more = missing.saturating_sub(self.table.count(PageState::Cold));
        self.table
            .full_reason(self.table.available().saturating_add(more))
    }

    /// So many demands were refused for want of memory by now. If others' are among them, and new,
    /// the demand so far asks for nothing any more: who was refused needs it more.
    fn heed(&mut self, refused: u64) {
        let others = refused.saturating_sub(self.refused);
        if others > self.heeded {
            self.heeded = others;
            self.yields = YIELDED_TICKS;
            self.pressure.met_full(&self.runs);
            self.demand.forget(self.table.count(PageState::Used));
        }
    }

    /// May runs in flight be asked for, since they are above the limit and were not refused?
    fn may_ask(&self) -> bool {
        !self.in_flight && self.table.excess() > 0
    }

    fn warm(&self) -> u32 {
        self.table.count(PageState::Warm)
    }
}
