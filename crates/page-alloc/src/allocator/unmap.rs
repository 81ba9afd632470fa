//! Memory goes back: runs whose epoch has retired first, and only what is idle as a whole.

use kvcached_mapper::{Cause, MapError};

use super::{Books, PageAllocator, pages_in};
use crate::Unmapping;
use crate::runs::Idle;
use crate::table::{PageTable, Wanted};

/// What one call of the mapper took away.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unmapped {
    pub(super) pages: u32,
    /// Another call would find more.
    pub(super) more: bool,
}

impl PageAllocator {
    /// Unmaps wholly idle runs of as many pages as `wanted` says, in one call. That work is in
    /// flight is no failure: nothing was unmapped. A fence is none in the way: a rank that is away
    /// has only the less to have when it comes back, and memory that it lacks may be found so.
    ///
    /// # Errors
    /// What the mapper answered otherwise.
    pub(super) fn unmap_step(
        &self,
        which: Idle,
        wanted: impl Fn(&Books) -> Wanted,
    ) -> Result<Unmapped, MapError> {
        let mut runs = Vec::new();
        let after = self.with_books(|books| {
            let wanted = wanted(books);
            let table = &mut books.table;
            table.begin_unmap(wanted, self.step_runs, which, &mut runs)
        });
        if runs.is_empty() {
            return Ok(Unmapped::default());
        }
        let result = self.call(&runs, PageTable::fail_unmap, || {
            let result = self.mapper.unmap_after(&runs, after);
            if result.is_err() {
                self.look();
            }
            result
        });
        self.with_books(|books| match &result {
            Ok(()) => {
                books.table.finish_unmap(&runs);
                books.totals.unmapped += u64::from(pages_in(&runs));
                // A rank may know by itself what has ended.
                books.in_flight &= which == Idle::Retired;
            }
            Err(error) => {
                books.table.fail_unmap(&runs, &error.uncertain);
                match is_in_flight(error) {
                    true => books.in_flight = true,
                    false => books.totals.unmap_failed += 1,
                }
            }
        });
        match result {
            Ok(()) => Ok(Unmapped {
                pages: pages_in(&runs),
                more: runs.len() == self.step_runs,
            }),
            Err(error) if is_in_flight(&error) => Ok(Unmapped::default()),
            Err(error) => Err(error),
        }
    }

    /// Unmaps retired runs above the limit if that is not left to somebody else. So many pages are.
    pub(super) fn shrink_in_call(&self, excess: u32) {
        if excess > 0 && self.unmapping == Unmapping::InCall {
            self.shrink_and_log(&[Idle::Retired], || {});
        }
    }

    /// Unmaps wholly idle runs of these kinds until the limit is kept or there are none, and lets
    /// demands of others go first in between.
    pub(super) fn shrink_by_turns(&self, kinds: &[Idle]) {
        self.shrink_and_log(kinds, || self.turns.give_way());
    }

    /// For callers whose own work succeeded whatever becomes of it.
    fn shrink_and_log(&self, kinds: &[Idle], between: impl Fn()) {
        let shrink = || -> Result<(), MapError> {
            for &which in kinds {
                while self.unmap_step(which, Books::excess)?.pages > 0 {
                    between();
                }
            }
            Ok(())
        };
        if let Err(error) = shrink() {
            tracing::warn!(%error, "idle pages above the limit were not unmapped");
        }
    }
}

/// Is this the normal answer that work may still touch the memory, with nothing in doubt?
const fn is_in_flight(error: &MapError) -> bool {
    matches!(error.cause, Cause::InFlight { .. }) && error.uncertain.is_empty()
}
