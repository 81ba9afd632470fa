//! The state of every page of a pool, as a value: no lock, no memory, no clock.
//!
//! ```text
//!              begin_map          finish_map            put_back
//!       cold ────────────▶ busy ─────────────▶ used ─────────────▶ warm
//!        ▲ │                │ ▲                  ▲                  │ │
//!  limit │ │ limit          │ └──────────────────┼── begin_unmap ───┼─┘
//!        │ ▼                ▼                    └───── take ───────┘ ▲
//!     withheld ◀────── quarantined ───────────────────────────────────┘
//!             lift_cold                         lift_warm
//! ```
//!
//! A decision that needs a mapper is taken in two halves: `begin_…` makes pages busy and names
//! runs, `finish_…` records what became of them. Between the two no other decision touches them.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;

use kvcached_mapper::{After, Epoch, PageId, PageRun};

use crate::error::{FreeError, FullReason};
use crate::runs::{Idle, Runs};
use crate::spans::Spans;

/// What is the case with a page; exactly one of these at any time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum PageState {
    /// Holds no whole block; never backed, never handed out.
    Void,
    /// No memory, and may be backed.
    Cold,
    /// Memory, but idle.
    Warm,
    /// Handed out.
    Used,
    /// A call to the mapper about it is under way.
    Busy,
    /// No memory, and above the limit.
    Withheld,
    /// State unknown after a failure; not used again until a repair settles it.
    Quarantined,
}

/// How many pages are to lose their memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// So many, or some more if runs are longer.
    pub(crate) pages: u32,
    /// Never more than so many, of those that have retired.
    pub(crate) most: u32,
}

/// How many states there are.
const STATES: usize = 7;

impl Wanted {
    /// At least so many, if runs of them are idle.
    pub(crate) const fn at_least(pages: u32) -> Self {
        Self {
            pages,
            most: u32::MAX,
        }
    }
}

/// Why pages get memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Somebody waits for them: they are used at once.
    Demand,
    /// They are set aside warm.
    Reserve,
}

/// A run whose state is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Doubt {
    /// Exactly as it was to be mapped or unmapped.
    pub(crate) run: PageRun,
    /// What may still touch it, if it has memory.
    after: After,
    /// No other doubt has it, not even a later one about the same run.
    number: u64,
}

/// The states of all pages of one pool, and the sets that answer "which page next" in constant
/// time.
#[derive(Debug)]
pub(crate) struct PageTable {
    /// The truth; everything below is derived from it, in [`set_state`](Self::set_state) or beside
    /// a call of it.
    states: Vec<PageState>,
    counts: [u32; STATES],
    cold: Spans,
    withheld: Spans,
    runs: Runs,
    /// By first page.
    quarantined: BTreeMap<PageId, Doubt>,
    /// How often a run was quarantined so far.
    doubts: u64,
    /// Busy pages that are on their way to lose their memory.
    leaving: u32,
    /// Pages that may be backed; at most the capacity.
    limit: u32,
}

impl PageTable {
    /// A table of `pages` cold pages, except the `void` ones, without a limit.
    ///
    /// All `void` pages are below `pages`.
    pub(crate) fn new(pages: u32, void: &[PageId]) -> Self {
        let mut table = Self {
            states: vec![PageState::Cold; PageId(pages).index()],
            counts: [0; STATES],
            cold: Spans::new(),
            withheld: Spans::new(),
            runs: Runs::new(pages),
            quarantined: BTreeMap::new(),
            doubts: 0,
            leaving: 0,
            limit: 0,
        };
        table.counts[PageState::Cold as usize] = pages;
        if pages > 0 {
            table.cold.insert(0..pages);
        }
        for &page in void {
            if table.cold.take_page(page.0) {
                table.set_state(page.0..page.0 + 1, PageState::Cold, PageState::Void);
            }
        }
        table.limit = table.capacity();
        table
    }

    pub(crate) fn state(&self, page: PageId) -> Option<PageState> {
        self.states.get(page.index()).copied()
    }

    pub(crate) const fn count(&self, state: PageState) -> u32 {
        self.counts[state as usize]
    }

    /// Pages that can ever be backed.
    pub(crate) fn capacity(&self) -> u32 {
        self.total() - self.count(PageState::Void)
    }

    pub(crate) fn total(&self) -> u32 {
        u32::try_from(self.states.len()).expect("the constructor took the number as u32")
    }

    /// Pages that have memory or may have: everything a limit counts.
    pub(crate) const fn backed(&self) -> u32 {
        self.count(PageState::Warm)
            + self.count(PageState::Used)
            + self.count(PageState::Busy)
            + self.count(PageState::Quarantined)
    }

    /// Pages that [`take`](Self::take) and [`begin_map`](Self::begin_map) may give.
    ///
    /// As long as no more is backed than the limit allows, cold pages keep to it already. Beyond
    /// it, idle pages of partly used runs are warm but count only up to the limit, or a deferred
    /// shrink might be fed for ever.
    pub(crate) fn available(&self) -> u32 {
        let warm = self.count(PageState::Warm);
        let taken = self.backed() - self.leaving - warm;
        (warm + self.count(PageState::Cold)).min(self.limit.saturating_sub(taken))
    }

    /// What the limit leaves for more pages, if it is below the capacity.
    pub(crate) fn limited_to(&self) -> Option<u32> {
        let is_limited = self.limit < self.capacity();
        is_limited.then(|| self.limit.saturating_sub(self.backed()))
    }

    /// Backed pages above the limit that no call under way is about to take the memory of.
    pub(crate) const fn excess(&self) -> u32 {
        (self.backed() - self.leaving).saturating_sub(self.limit)
    }

    /// See [`PageAllocator::run_of`](crate::PageAllocator::run_of).
    pub(crate) fn run_of(&self, page: PageId) -> Option<PageRun> {
        let is_backed = matches!(self.state(page)?, PageState::Used | PageState::Warm);
        self.runs.run_of(page).filter(|_| is_backed)
    }

    /// Backed runs, those on their way to lose their memory included.
    pub(crate) fn runs(&self) -> u32 {
        self.runs.len()
    }

    /// Warm pages of runs that are partly used.
    pub(crate) fn pinned(&self) -> u32 {
        self.count(PageState::Warm) - self.runs.wholly_idle_pages()
    }

    /// The quarantined runs in order.
    pub(crate) fn quarantined(&self) -> impl Iterator<Item = Doubt> {
        self.quarantined.values().copied()
    }

    /// Why `n` pages, more than are available, cannot be had.
    pub(crate) fn full_reason(&self, n: u32) -> FullReason {
        let soon = self.available().saturating_add(self.count(PageState::Busy));
        if n <= soon && self.backed() <= self.limit {
            return FullReason::Busy;
        }
        if self.limit < self.capacity() && n <= self.capacity() {
            return FullReason::Limit;
        }
        FullReason::Capacity
    }

    /// Hands out up to `n` warm pages, of the fullest runs first; answers how many.
    pub(crate) fn take(&mut self, n: u32, out: &mut Vec<PageId>) -> u32 {
        let Self {
            states,
            counts,
            runs,
            ..
        } = self;
        let mut missing = n;
        while missing > 0 {
            let taken = runs.take_pages(missing, |pages| {
                out.extend(pages.clone().map(PageId));
                set_state(states, counts, pages, PageState::Warm, PageState::Used);
            });
            if taken == 0 {
                break;
            }
            missing -= taken;
        }
        n - missing
    }

    /// Hands out exactly this page, which is warm.
    pub(crate) fn take_page(&mut self, page: PageId) {
        self.set_state(page.0..page.0 + 1, PageState::Warm, PageState::Used);
        self.runs.take_page(page);
    }

    /// Takes used pages back, which what `after` names may still touch; their memory stays.
    ///
    /// # Errors
    /// A page that is not used or is named twice; nothing is changed then.
    pub(crate) fn put_back(&mut self, pages: &[PageId], after: After) -> Result<(), FreeError> {
        let mut left = pages;
        while let Some(first) = left.first() {
            let (stretch, rest) = left.split_at(PageId::stretch(left));
            let done = pages.len() - left.len();
            let used = match stretch {
                [page] => self.is_used(*page),
                _ => self.are_used(stretch),
            };
            if !used {
                let page = *stretch
                    .iter()
                    .find(|&&page| !self.is_used(page))
                    .expect("not all of them are used");
                // A page named twice is warm by now, and its first mention is undone here too.
                for page in &pages[..done] {
                    self.set_state(page.0..page.0 + 1, PageState::Warm, PageState::Used);
                }
                return Err(match self.state(page) {
                    Some(PageState::Used) => FreeError::NamedTwice { page },
                    found => FreeError::NotUsed { page, found },
                });
            }
            let last = stretch[stretch.len() - 1].0;
            self.set_state(first.0..last + 1, PageState::Used, PageState::Warm);
            if stretch.len() == pages.len() {
                self.runs.put_stretch(first.0..last + 1, after);
                return Ok(());
            }
            left = rest;
        }
        self.runs.put_pages(pages, after);
        Ok(())
    }

    /// Makes `n` cold pages busy, at most the cold ones, in runs as long as `n`, `longest` and the
    /// neighbourhood allow, `most_runs` of them; answers how many pages. `longest` is at most
    /// [`MAX_RUN`](crate::MAX_RUN).
    pub(crate) fn begin_map(
        &mut self,
        n: u32,
        longest: NonZeroU32,
        most_runs: usize,
        runs: &mut Vec<PageRun>,
    ) -> u32 {
        let mut missing = n;
        while missing > 0 && runs.len() < most_runs {
            let Some(pages) = self.cold.take_run(missing.min(longest.get())) else {
                break;
            };
            missing -= pages.end - pages.start;
            self.set_state(pages.clone(), PageState::Cold, PageState::Busy);
            runs.push(run_of(pages));
        }
        n - missing
    }

    /// Makes exactly this page busy, which is cold.
    pub(crate) fn begin_map_page(&mut self, page: PageId) -> PageRun {
        let pages = page.0..page.0 + 1;
        assert!(self.cold.take_page(page.0), "the page is cold");
        self.set_state(pages.clone(), PageState::Cold, PageState::Busy);
        run_of(pages)
    }

    /// The runs of a [`begin_map`](Self::begin_map) have memory now.
    pub(crate) fn finish_map(&mut self, runs: &[PageRun], purpose: Purpose) {
        let to = match purpose {
            Purpose::Demand => PageState::Used,
            Purpose::Reserve => PageState::Warm,
        };
        for &run in runs {
            self.set_state(pages_of(run), PageState::Busy, to);
            self.runs
                .insert(run, purpose == Purpose::Reserve, After::NOTHING);
        }
    }

    /// The runs of a [`begin_map`](Self::begin_map) have no memory, except that nobody knows about
    /// the `uncertain` ones.
    pub(crate) fn fail_map(&mut self, runs: &[PageRun], uncertain: &[PageRun]) {
        let uncertain = Uncertain::new(uncertain);
        for &run in runs {
            if uncertain.touches(run) {
                self.quarantine(run, After::NOTHING);
            } else {
                self.set_state(pages_of(run), PageState::Busy, PageState::Withheld);
                self.withheld.insert(pages_of(run));
            }
        }
        self.keep_to_limit();
    }

    /// Is there a wholly idle run, of up to `pages` pages if it is a retired one?
    pub(crate) fn has_idle_run(&self, pages: u32, which: Idle) -> bool {
        self.runs.has_idle_run(pages, which)
    }

    /// Makes wholly idle runs busy until they have as many pages as are wanted or are `most_runs`;
    /// answers what must have ended before their memory may go.
    pub(crate) fn begin_unmap(
        &mut self,
        wanted: Wanted,
        most_runs: usize,
        which: Idle,
        runs: &mut Vec<PageRun>,
    ) -> After {
        let mut after = After::NOTHING;
        let Wanted {
            pages: mut wanted,
            mut most,
        } = wanted;
        while wanted > 0 && runs.len() < most_runs && self.has_idle_run(most, which) {
            // The shortest one at most, if that is longer than is wanted.
            let Some(run) = self.runs.take_idle_run(wanted.min(most), which) else {
                break;
            };
            wanted = wanted.saturating_sub(run.count());
            most = most.saturating_sub(run.count());
            after = after.join(self.runs.after(run));
            self.set_state(pages_of(run), PageState::Warm, PageState::Busy);
            self.leaving += run.count();
            runs.push(run);
        }
        after
    }

    /// The runs of a [`begin_unmap`](Self::begin_unmap) have no memory any more.
    pub(crate) fn finish_unmap(&mut self, runs: &[PageRun]) {
        for &run in runs {
            self.leaving -= run.count();
            self.runs.remove(run);
            self.set_state(pages_of(run), PageState::Busy, PageState::Withheld);
            self.withheld.insert(pages_of(run));
        }
        self.keep_to_limit();
    }

    /// The runs of a [`begin_unmap`](Self::begin_unmap) are as they were, except that nobody knows
    /// about the `uncertain` ones.
    pub(crate) fn fail_unmap(&mut self, runs: &[PageRun], uncertain: &[PageRun]) {
        let uncertain = Uncertain::new(uncertain);
        for &run in runs {
            self.leaving -= run.count();
            if uncertain.touches(run) {
                let after = self.runs.after(run);
                self.runs.remove(run);
                self.quarantine(run, after);
            } else {
                self.set_state(pages_of(run), PageState::Busy, PageState::Warm);
                self.runs.restore(run);
            }
        }
    }

    /// Ends a doubt that is settled: the run has no memory. Answers how many pages that are: none if
    /// the doubt has ended already, even if there is another about the same run by now.
    pub(crate) fn lift_cold(&mut self, doubt: Doubt) -> u32 {
        if !self.settle(doubt) {
            return 0;
        }
        let pages = pages_of(doubt.run);
        self.set_state(pages.clone(), PageState::Quarantined, PageState::Withheld);
        self.withheld.insert(pages);
        self.keep_to_limit();
        doubt.run.count()
    }

    /// The same of a run that has memory everywhere: it is warm.
    pub(crate) fn lift_warm(&mut self, doubt: Doubt) -> u32 {
        if !self.settle(doubt) {
            return 0;
        }
        self.set_state(pages_of(doubt.run), PageState::Quarantined, PageState::Warm);
        self.runs.insert(doubt.run, true, doubt.after);
        doubt.run.count()
    }

    /// This epoch and all before it have ended, on every rank. Is that news?
    pub(crate) fn retire(&mut self, epoch: Epoch) -> bool {
        self.runs.retire(epoch)
    }

    /// Lets at most `pages` pages be backed. Cold pages above it are withheld at once, the highest
    /// first; what is backed above it stays so until it is unmapped.
    pub(crate) fn set_limit(&mut self, pages: u32) {
        self.limit = pages.min(self.capacity());
        self.keep_to_limit();
    }

    /// Moves pages between cold and withheld so that exactly those below the limit are cold.
    /// Every cold page is below every withheld one, before and after.
    fn keep_to_limit(&mut self) {
        let room = self.limit.saturating_sub(self.backed());
        while let Some(above) = self.count(PageState::Cold).checked_sub(room)
            && above > 0
            && let Some(pages) = self.cold.take_highest(above)
        {
            self.set_state(pages.clone(), PageState::Cold, PageState::Withheld);
            self.withheld.insert(pages);
        }
        while let Some(below) = room.checked_sub(self.count(PageState::Cold))
            && below > 0
            && let Some(pages) = self.withheld.take_lowest(below)
        {
            self.set_state(pages.clone(), PageState::Withheld, PageState::Cold);
            self.cold.insert(pages);
        }
    }

    fn is_used(&self, page: PageId) -> bool {
        self.state(page) == Some(PageState::Used)
    }

    /// Are all pages of a stretch of adjacent ones used?
    fn are_used(&self, stretch: &[PageId]) -> bool {
        let first = stretch[0].index();
        let states = self.states.get(first..first + stretch.len());
        // Looks at all of them, so that it looks at many at a time.
        states.is_some_and(|states| {
            states
                .iter()
                .fold(true, |used, &state| used & (state == PageState::Used))
        })
    }

    fn quarantine(&mut self, run: PageRun, after: After) {
        self.set_state(pages_of(run), PageState::Busy, PageState::Quarantined);
        self.doubts += 1;
        let number = self.doubts;
        let doubt = Doubt { run, after, number };
        self.quarantined.insert(run.first(), doubt);
    }

    /// Forgets a doubt, if it is still there.
    fn settle(&mut self, doubt: Doubt) -> bool {
        let first = doubt.run.first();
        let there = self.quarantined.get(&first) == Some(&doubt);
        if there {
            self.quarantined.remove(&first);
        }
        there
    }

    fn set_state(&mut self, pages: Range<u32>, from: PageState, to: PageState) {
        set_state(&mut self.states, &mut self.counts, pages, from, to);
    }
}

/// The only place where a page changes its state, so that the counts cannot drift from the states.
/// All of `pages` are `from`.
#[inline]
fn set_state(
    states: &mut [PageState],
    counts: &mut [u32; STATES],
    pages: Range<u32>,
    from: PageState,
    to: PageState,
) {
    let count = pages.end - pages.start;
    let states = &mut states[pages.start as usize..pages.end as usize];
    debug_assert!(
        states.iter().all(|&state| state == from),
        "pages {pages:?} are {from:?}"
    );
    match states {
        // Not worth a call, and common: pages are freed one by one, or in no order.
        [state] => *state = to,
        states => states.fill(to),
    }
    counts[from as usize] -= count;
    counts[to as usize] += count;
}

/// Runs in doubt, to be asked about run by run: the first page of each, in order, and the greatest
/// end up to there. Other ranks name them, so they may be anything.
struct Uncertain(Vec<(PageId, PageId)>);

impl Uncertain {
    fn new(runs: &[PageRun]) -> Self {
        let mut sorted = runs.to_vec();
        sorted.sort_unstable();
        let mut reach = PageId(0);
        let stretches = sorted.iter().map(|run| {
            reach = reach.max(run.end());
            (run.first(), reach)
        });
        Self(stretches.collect())
    }

    /// A run is mapped as a whole: doubt about a part of it is doubt about all of it.
    fn touches(&self, run: PageRun) -> bool {
        let before = self.0.partition_point(|(first, _)| *first < run.end());
        before > 0 && self.0[before - 1].1 > run.first()
    }
}

const fn pages_of(run: PageRun) -> Range<u32> {
    run.first().0..run.end().0
}

fn run_of(pages: Range<u32>) -> PageRun {
    PageRun::new(PageId(pages.start), pages.end - pages.start)
        .expect("spans are not empty and end at a page id")
}
