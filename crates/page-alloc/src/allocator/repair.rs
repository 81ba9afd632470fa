//! What is in doubt, and how it ends: the fence, the quarantine, and the losses.

use kvcached_mapper::{Health, MapError, PageRun, Rank, Reconciled, Stage, Suspect};

use super::{Books, PageAllocator};
use crate::PageState;
use crate::runs::Idle;
use crate::sync::Ordering;
use crate::table::Doubt;

/// What one [`PageAllocator::repair`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Repaired {
    /// Pages that are cold or withheld now and were quarantined.
    pub cold: u32,
    /// Pages that are warm now and were quarantined.
    pub warm: u32,
    /// Ranks that had lost memory they should have had, and have it again, empty. What any page of
    /// the pool holds is not to be read any more.
    pub lost: Vec<(Stage, Rank)>,
    /// What is the case now.
    pub health: Health,
    /// Another thread was at it, and nothing was done here: that it ended well says nothing.
    pub left_to_another: bool,
}

impl PageAllocator {
    /// Has the mapper mend what is in doubt, and takes pages whose state is known again out of
    /// quarantine. One attempt, which may wait for other processes: who wants more calls again, best
    /// from a thread of its own; while another thread is at it, nothing is done here. If a rank has no
    /// memory for what it must have, idle pages are given
    /// up first, so that it needs less.
    ///
    /// # Errors
    /// The first place that could not be mended. Nothing was taken out of quarantine; the fence is
    /// as the mapper says by now.
    pub fn repair(&self) -> Result<Repaired, MapError> {
        match self.try_repair() {
            Err(error) if error.is_full() && self.trim()? > 0 => self.try_repair(),
            result => result,
        }
    }

    fn try_repair(&self) -> Result<Repaired, MapError> {
        let begun = self.with_books(|books| {
            if books.repairs > 0 {
                return None;
            }
            books.repairs += 1;
            // A rank may know by itself what has ended; a repair comes by at a measured pace.
            books.in_flight = false;
            Some(books.table.quarantined().collect())
        });
        let Some(doubts): Option<Vec<Doubt>> = begun else {
            // Another thread is at it. What it asks about is what is in doubt now; a second one
            // might ask about runs that are in use again by then.
            return Ok(Repaired {
                cold: 0,
                warm: 0,
                lost: Vec::new(),
                health: self.health(),
                left_to_another: true,
            });
        };
        let runs: Vec<PageRun> = doubts.iter().map(|doubt| doubt.run).collect();
        let result = self.mapper.reconcile(&runs);
        let lost = result.as_ref().is_ok_and(|done| !done.lost.is_empty());
        self.with_books(|books| {
            // Before the fence may fall, and under the lock, so that who is handed pages again can
            // know.
            if lost {
                self.contents_lost.fetch_add(1, Ordering::Release);
            }
            books.repairs -= 1;
        });
        self.look();
        let Reconciled { cold, mapped, lost } = result?;
        let found = |run: &PageRun| {
            let index = doubts.binary_search_by_key(&run.first(), |doubt| doubt.run.first());
            index
                .ok()
                .map(|index| doubts[index])
                .filter(|doubt| doubt.run == *run)
        };
        let (cold, warm, excess) = self.with_books(|Books { table, totals, .. }| {
            // Somebody else may have settled a doubt, and the same run may be in doubt again since.
            let cold = cold.iter().filter_map(found);
            let cold: u32 = cold.map(|doubt| table.lift_cold(doubt)).sum();
            let warm = mapped.iter().filter_map(found);
            let warm: u32 = warm.map(|doubt| table.lift_warm(doubt)).sum();
            totals.repaired += u64::from(cold) + u64::from(warm);
            (cold, warm, table.excess())
        });
        if excess > 0 {
            self.shrink_by_turns(&[Idle::Retired]);
        }
        Ok(Repaired {
            cold,
            warm,
            lost,
            health: self.health(),
            left_to_another: false,
        })
    }

    /// How far the pool can be relied on, by a fresh look at the mapper: its health, with the pages
    /// that are quarantined here. A healthy mapper over quarantined pages is
    /// [`Health::Degraded`] without a rank.
    pub fn health(&self) -> Health {
        let health = self.look();
        let in_doubt = self.with_books(|books| books.table.count(PageState::Quarantined));
        with_pages(health, in_doubt)
    }

    /// Was a rank fenced at the last look? Reads one flag, without a lock.
    #[inline]
    pub fn is_fenced(&self) -> bool {
        self.fenced.load(Ordering::Acquire)
    }

    /// The ranks that were fenced at the last look, and why; empty if none was.
    pub fn fenced(&self) -> Vec<Suspect> {
        self.with_books(|books| books.fence.clone().unwrap_or_default())
    }

    /// How many repairs so far found that some rank had lost what its pages held. Whoever reads
    /// another number than before has to recompute what it kept in the pool. Reads one number,
    /// without a lock.
    #[inline]
    pub fn contents_lost(&self) -> u64 {
        self.contents_lost.load(Ordering::Acquire)
    }

    /// Looks at the mapper's health, and raises the fence, or lowers it if no repair is under way.
    pub(super) fn look(&self) -> Health {
        let mut looks = self.with_books(|books| books.looks);
        loop {
            let health = self.mapper.health();
            let seen = self.with_books(|books| {
                let mine = books.looks == looks;
                if mine {
                    books.looks += 1;
                    match &health {
                        Health::Fenced { ranks, .. } => books.fence = Some(ranks.clone()),
                        // It may be healthy thanks to a repair that has a loss to count first. The
                        // last repair looks again when it has.
                        Health::Healthy | Health::Degraded { .. } if books.repairs > 0 => {}
                        Health::Healthy | Health::Degraded { .. } => books.fence = None,
                    }
                    self.fenced.store(books.fence.is_some(), Ordering::Release);
                }
                looks = books.looks;
                mine
            });
            // Else another look, maybe a later one, was recorded meanwhile: an older answer must not
            // undo it, so this one looks again.
            if seen {
                return health;
            }
        }
    }
}

/// The mapper's health, with the pages that are quarantined here.
fn with_pages(health: Health, pages: u32) -> Health {
    match health {
        Health::Healthy if pages == 0 => Health::Healthy,
        Health::Healthy => Health::Degraded {
            ranks: Vec::new(),
            pages,
        },
        Health::Degraded { ranks, .. } => Health::Degraded { ranks, pages },
        Health::Fenced { ranks, .. } => Health::Fenced { ranks, pages },
    }
}
