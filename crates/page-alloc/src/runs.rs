//! Runs that are backed by memory: which pages of each are idle, and which run to draw from.
//!
//! Taking and putting back one page touches one slot and at most two shelves, whatever the size
//! of the pool. The fullest run is drawn from first, so that the others drain and become wholly
//! idle: only then can their memory go back.
//!
//! A run remembers what its pages were freed after. Wholly idle runs of an epoch that has not
//! retired wait apart, by epoch: they are drawn from last, and are the last whose memory goes back.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use kvcached_mapper::{After, Epoch, PageId, PageRun};

use crate::MAX_RUN;

/// No slot.
const NONE: u32 = u32::MAX;
/// Shelves for partly used runs, then as many for wholly idle ones.
const SHELVES: usize = 2 * MAX_RUN as usize;
/// Not a shelf but the place of its epoch in [`Runs::waiting`].
const WAITING: u8 = 128;
/// On no shelf: the run has no idle page, or a call about it is under way.
const NOWHERE: u8 = WAITING + 1;

/// Wholly idle runs, by whether something that was launched may still touch them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Idle {
    /// No epoch that was named with a page of the run is in flight.
    Retired,
    /// One is.
    InFlight,
}

/// The backed runs of a pool.
#[derive(Debug)]
pub(crate) struct Runs {
    slots: Vec<Slot>,
    /// Slots to use again.
    vacant: Vec<u32>,
    /// Slot of each page that is part of a backed run.
    slot_of: Vec<u32>,
    /// First slot of each shelf.
    heads: [u32; SHELVES],
    /// Shelves of partly used runs that have any: bit `i` for `i + 1` idle pages.
    partly: u64,
    /// Shelves of wholly idle runs that have any: bit `i` for runs of `i + 1` pages.
    wholly: u64,
    /// First slot of the wholly idle runs that wait for each epoch. Few epochs are in flight at a
    /// time, so finding one costs next to nothing.
    waiting: BTreeMap<Epoch, u32>,
    /// Pages of all wholly idle runs.
    wholly_idle_pages: u32,
    /// This epoch and all before it have ended.
    retired: Option<Epoch>,
}

/// Two to a cache line: frees in no order touch many.
#[derive(Debug)]
struct Slot {
    /// Bit `i`: page `first + i` is idle.
    idle: u64,
    /// Part of what the pages were freed after, if `has_epoch`.
    epoch: Epoch,
    first: u32,
    previous: u32,
    next: u32,
    count: u8,
    /// Where the run is.
    shelf: u8,
    has_epoch: bool,
    /// The other part of what the pages were freed after.
    device: bool,
}

const _: () = assert!(WAITING as usize == SHELVES && size_of::<Slot>() == 32);

impl Slot {
    fn new(run: PageRun, idle: u64, after: After) -> Self {
        Self {
            idle,
            epoch: after.epoch.unwrap_or(Epoch(0)),
            first: run.first().0,
            previous: NONE,
            next: NONE,
            count: u8::try_from(run.count()).expect("no run is longer than the longest"),
            shelf: NOWHERE,
            has_epoch: after.epoch.is_some(),
            device: after.device,
        }
    }

    /// What the pages were freed after since the run was mapped.
    fn after(&self) -> After {
        After {
            epoch: self.has_epoch.then_some(self.epoch),
            device: self.device,
        }
    }

    fn freed(&mut self, after: After) {
        self.device |= after.device;
        if let Some(epoch) = after.epoch {
            self.epoch = self.epoch.max(epoch);
            self.has_epoch = true;
        }
    }

    /// Where the run belongs.
    fn home(&self, retired: Option<Epoch>) -> u8 {
        let idle = low_byte(self.idle.count_ones());
        match idle {
            0 => NOWHERE,
            all if all == self.count => {
                if self.has_epoch && Some(self.epoch) > retired {
                    WAITING
                } else {
                    low_byte(MAX_RUN) + all - 1
                }
            }
            some => some - 1,
        }
    }

    fn run(&self) -> Option<PageRun> {
        PageRun::new(PageId(self.first), u32::from(self.count))
    }
}

/// A number of pages of one run, or of a shelf.
fn low_byte(number: u32) -> u8 {
    u8::try_from(number).expect("a run has at most 64 pages, and there are 128 shelves")
}

/// Are the runs of this place wholly idle?
const fn is_wholly_idle(shelf: u8) -> bool {
    shelf as u32 >= MAX_RUN
}

/// The lowest `count` bits; `count` is at most 64.
const fn low_bits(count: u32) -> u64 {
    match count {
        0 => 0,
        _ => u64::MAX >> (64 - count),
    }
}

impl Runs {
    pub(crate) fn new(pages: u32) -> Self {
        Self {
            slots: Vec::new(),
            vacant: Vec::new(),
            slot_of: vec![NONE; PageId(pages).index()],
            heads: [NONE; SHELVES],
            partly: 0,
            wholly: 0,
            waiting: BTreeMap::new(),
            wholly_idle_pages: 0,
            retired: None,
        }
    }

    /// How many runs are backed.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.slots.len() - self.vacant.len()).expect("no more runs than pages")
    }

    /// Pages of the runs that no page of is used, and no call about is under way.
    pub(crate) const fn wholly_idle_pages(&self) -> u32 {
        self.wholly_idle_pages
    }

    /// The backed run that `page` is part of.
    pub(crate) fn run_of(&self, page: PageId) -> Option<PageRun> {
        let slot = *self.slot_of.get(page.index())?;
        self.slots.get(slot as usize)?.run()
    }

    /// Adds a run that is now backed, all of it idle or all of it used; `after` is what may still
    /// touch it.
    pub(crate) fn insert(&mut self, run: PageRun, idle: bool, after: After) {
        let idle = if idle { low_bits(run.count()) } else { 0 };
        let new = Slot::new(run, idle, after);
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot as usize] = new;
                slot
            }
            None => {
                self.slots.push(new);
                u32::try_from(self.slots.len() - 1).expect("no more runs than pages")
            }
        };
        self.slot_of[run.first().index()..run.end().index()].fill(slot);
        self.shelve(slot);
    }

    /// Forgets a run that was taken with [`take_idle_run`](Self::take_idle_run).
    pub(crate) fn remove(&mut self, run: PageRun) {
        self.vacant.push(self.slot_of[run.first().index()]);
    }

    /// Puts a run back that was taken with [`take_idle_run`](Self::take_idle_run).
    pub(crate) fn restore(&mut self, run: PageRun) {
        self.shelve(self.slot_of[run.first().index()]);
    }

    /// What the pages of a backed run were freed after since it was mapped, without what has
    /// retired.
    pub(crate) fn after(&self, run: PageRun) -> After {
        let slot = self.slot_of[run.first().index()];
        self.slots[slot as usize].after().since(self.retired)
    }

    /// This epoch and all before it have ended: the runs that waited for it wait no longer. Going
    /// back does nothing, and is no news.
    pub(crate) fn retire(&mut self, epoch: Epoch) -> bool {
        if self.retired >= Some(epoch) {
            return false;
        }
        self.retired = Some(epoch);
        while let Some(first) = self.waiting.first_entry()
            && Some(*first.key()) <= self.retired
        {
            let slot = *first.get();
            self.unshelve(slot);
            self.shelve(slot);
        }
        true
    }

    /// Is there a wholly idle run, of up to `pages` pages if it is a retired one?
    pub(crate) fn has_idle_run(&self, pages: u32, which: Idle) -> bool {
        match which {
            Idle::Retired => self.wholly & low_bits(pages.min(MAX_RUN)) != 0,
            Idle::InFlight => !self.waiting.is_empty(),
        }
    }

    /// Takes a wholly idle run out of circulation. Of the retired ones the longest of up to `pages`
    /// pages, else the shortest, so that as little as possible is taken beyond `pages`; of those in
    /// flight one of the oldest epoch, which retires first.
    pub(crate) fn take_idle_run(&mut self, pages: u32, which: Idle) -> Option<PageRun> {
        let slot = match which {
            Idle::Retired => {
                let fitting = self.wholly & low_bits(pages.min(MAX_RUN));
                let bit = match (fitting, self.wholly) {
                    (_, 0) => return None,
                    (0, any) => any.trailing_zeros(),
                    (fitting, _) => 63 - fitting.leading_zeros(),
                };
                self.heads[(MAX_RUN + bit) as usize]
            }
            Idle::InFlight => *self.waiting.first_key_value()?.1,
        };
        self.unshelve(slot);
        self.slots[slot as usize].run()
    }

    /// Marks up to `want` idle pages used, all of one run, and names them in stretches of adjacent
    /// pages; answers how many. The fullest partly used run comes first, then the shortest retired
    /// run that is enough, then the longest, then one of the latest epoch.
    pub(crate) fn take_pages(&mut self, want: u32, mut each: impl FnMut(Range<u32>)) -> u32 {
        let enough = self.wholly & !low_bits(want.clamp(1, MAX_RUN) - 1);
        let slot = match (self.partly, enough, self.wholly) {
            (0, 0, 0) => match self.waiting.last_key_value() {
                None => return 0,
                Some((_, &slot)) => slot,
            },
            (0, 0, wholly) => self.heads[(MAX_RUN + 63 - wholly.leading_zeros()) as usize],
            (0, enough, _) => self.heads[(MAX_RUN + enough.trailing_zeros()) as usize],
            (partly, _, _) => self.heads[partly.trailing_zeros() as usize],
        };
        let Slot { first, idle, .. } = self.slots[slot as usize];
        let mut left = idle;
        let mut taken = 0;
        while left != 0 && taken < want {
            let offset = left.trailing_zeros();
            let count = (left >> offset).trailing_ones().min(want - taken);
            left &= !(low_bits(count) << offset);
            taken += count;
            each(first + offset..first + offset + count);
        }
        self.set_idle(slot, left);
        taken
    }

    /// Marks one idle page used.
    pub(crate) fn take_page(&mut self, page: PageId) {
        let slot = self.slot_of[page.index()];
        let Slot { first, idle, .. } = self.slots[slot as usize];
        debug_assert!(idle & (1 << (page.0 - first)) != 0, "the page is idle");
        self.set_idle(slot, idle & !(1 << (page.0 - first)));
    }

    /// Marks used pages idle, freed after `after`. Neighbours in `pages` that belong to one run cost
    /// one move between shelves.
    pub(crate) fn put_pages(&mut self, pages: &[PageId], after: After) {
        let (mut slot, mut idle) = (NONE, 0);
        let mut left = pages;
        while let Some(page) = left.first() {
            let of = self.slot_of[page.index()];
            if of != slot {
                if idle != 0 {
                    self.put_back(slot, idle, after);
                }
                (slot, idle) = (of, 0);
            }
            let Slot { first, count, .. } = self.slots[slot as usize];
            let offset = page.0 - first;
            let stretch = PageId::stretch(&left[..left.len().min(MAX_RUN as usize)]);
            if stretch == 1 {
                // How far to go on does not depend on the slot here: of pages in no order, the slots
                // of several are waited for at once.
                idle |= 1 << offset;
                left = &left[1..];
            } else {
                let inside = stretch.min(usize::from(count) - offset as usize);
                idle |= (u64::MAX >> (64 - inside)) << offset;
                left = &left[inside..];
            }
        }
        if idle != 0 {
            self.put_back(slot, idle, after);
        }
    }

    /// The same for adjacent pages, at once.
    pub(crate) fn put_stretch(&mut self, pages: Range<u32>, after: After) {
        let mut at = pages.start;
        while at < pages.end {
            let slot = self.slot_of[at as usize];
            let Slot { first, count, .. } = self.slots[slot as usize];
            let end = pages.end.min(first + u32::from(count));
            self.put_back(slot, low_bits(end - at) << (at - first), after);
            at = end;
        }
    }

    fn put_back(&mut self, slot: u32, idle: u64, after: After) {
        // A run with a used page waits for no epoch, so this does not change where it is.
        let entry = &mut self.slots[slot as usize];
        entry.freed(after);
        let idle = entry.idle | idle;
        self.set_idle(slot, idle);
    }

    fn set_idle(&mut self, slot: u32, idle: u64) {
        self.slots[slot as usize].idle = idle;
        self.unshelve(slot);
        self.shelve(slot);
    }

    fn shelve(&mut self, slot: u32) {
        let entry = &self.slots[slot as usize];
        let shelf = entry.home(self.retired);
        let next = match shelf {
            NOWHERE => return,
            WAITING => self.waiting.insert(entry.epoch, slot).unwrap_or(NONE),
            shelf => std::mem::replace(&mut self.heads[usize::from(shelf)], slot),
        };
        if is_wholly_idle(shelf) {
            self.wholly_idle_pages += u32::from(entry.count);
        }
        match self.slots.get_mut(next as usize) {
            Some(neighbour) => neighbour.previous = slot,
            None if shelf == WAITING => {}
            None => *self.filled(shelf) |= 1 << (u32::from(shelf) % MAX_RUN),
        }
        let entry = &mut self.slots[slot as usize];
        entry.shelf = shelf;
        entry.previous = NONE;
        entry.next = next;
    }

    fn unshelve(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        let Slot {
            shelf,
            previous,
            next,
            epoch,
            count,
            ..
        } = *entry;
        if shelf == NOWHERE {
            return;
        }
        entry.shelf = NOWHERE;
        if is_wholly_idle(shelf) {
            self.wholly_idle_pages -= u32::from(count);
        }
        if let Some(neighbour) = self.slots.get_mut(next as usize) {
            neighbour.previous = previous;
        }
        if let Some(neighbour) = self.slots.get_mut(previous as usize) {
            neighbour.next = next;
            return;
        }
        if shelf == WAITING {
            self.set_waiting(epoch, next);
            return;
        }
        self.heads[usize::from(shelf)] = next;
        if next == NONE {
            *self.filled(shelf) &= !(1 << (u32::from(shelf) % MAX_RUN));
        }
    }

    /// The first run that waits for `epoch`, for which some do, is this one now.
    fn set_waiting(&mut self, epoch: Epoch, slot: u32) {
        if let Entry::Occupied(mut first) = self.waiting.entry(epoch) {
            if slot == NONE {
                first.remove();
            } else {
                first.insert(slot);
            }
        }
    }

    const fn filled(&mut self, shelf: u8) -> &mut u64 {
        if (shelf as u32) < MAX_RUN {
            &mut self.partly
        } else {
            &mut self.wholly
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Insert {
            count: u32,
            idle: bool,
        },
        TakePages(u32),
        TakePage(Index),
        PutPages(Vec<Index>, After),
        TakeIdleRun {
            pages: u32,
            in_flight: bool,
            back: bool,
        },
        Retire(Epoch),
    }

    fn op() -> impl Strategy<Value = Op> {
        let epoch = || (0u64..12).prop_map(Epoch);
        let after = prop_oneof![
            1 => Just(After::NOTHING),
            1 => Just(After::DEVICE),
            3 => epoch().prop_map(After::epoch),
        ];
        prop_oneof![
            3 => (1..=MAX_RUN, any::<bool>()).prop_map(|(count, idle)| Op::Insert { count, idle }),
            4 => (1u32..100).prop_map(Op::TakePages),
            1 => any::<Index>().prop_map(Op::TakePage),
            4 => (prop::collection::vec(any::<Index>(), 0..100), after)
                .prop_map(|(pages, after)| Op::PutPages(pages, after)),
            3 => (1u32..100, any::<bool>(), any::<bool>())
                .prop_map(|(pages, in_flight, back)| Op::TakeIdleRun { pages, in_flight, back }),
            1 => epoch().prop_map(Op::Retire),
        ]
    }

    /// Each run with its idle pages and what its pages were freed after.
    #[derive(Default)]
    struct Model {
        runs: BTreeMap<PageRun, (BTreeSet<PageId>, After)>,
        retired: Option<Epoch>,
    }

    impl Model {
        /// Idle or used pages of all runs, in order.
        fn pages(&self, idle: bool) -> Vec<PageId> {
            let of_run = |(run, (pages, _)): (&PageRun, &(BTreeSet<PageId>, After))| {
                let these = run.pages().filter(|page| pages.contains(page) == idle);
                these.collect::<Vec<_>>()
            };
            self.runs.iter().flat_map(of_run).collect()
        }

        /// Idle pages of the fullest run that has some and is not wholly idle.
        fn fullest(&self) -> Option<usize> {
            let lens = self
                .runs
                .iter()
                .map(|(run, (idle, _))| (run.count() as usize, idle.len()));
            lens.filter(|&(all, idle)| idle > 0 && idle < all)
                .map(|(_, idle)| idle)
                .min()
        }

        fn epoch(&self, run: PageRun) -> Option<Epoch> {
            self.runs[&run].1.since(self.retired).epoch
        }

        /// Wholly idle runs that wait for no epoch, or for one.
        fn wholly(&self, in_flight: bool) -> impl Iterator<Item = PageRun> {
            self.runs
                .iter()
                .map(|(&run, (idle, _))| (run, idle))
                .filter_map(move |(run, idle)| {
                    let whole = idle.len() == run.count() as usize;
                    (whole && self.epoch(run).is_some() == in_flight).then_some(run)
                })
        }

        /// Lengths of the wholly idle runs that wait for no epoch, in order.
        fn lengths(&self) -> Vec<u32> {
            let mut lengths: Vec<u32> = self.wholly(false).map(PageRun::count).collect();
            lengths.sort_unstable();
            lengths
        }
    }

    proptest! {
        #[test]
        fn the_run_drawn_from_is_the_fullest_and_the_one_given_back_has_retired_and_fits_best(
            ops in prop::collection::vec(op(), 1..80),
        ) {
            const PAGES: u32 = 6000;
            let mut runs = Runs::new(PAGES);
            let mut model = Model::default();
            let mut end = 0;
            for op in ops {
                match op {
                    Op::Insert { count, idle } => {
                        let run = PageRun::new(PageId(end), count).expect("pages");
                        end += count;
                        runs.insert(run, idle, After::NOTHING);
                        let pages = run.pages().filter(|_| idle).collect();
                        model.runs.insert(run, (pages, After::NOTHING));
                    }
                    Op::TakePages(want) => {
                        let (fullest, lengths) = (model.fullest(), model.lengths());
                        let opened = lengths.iter().find(|&&count| count >= want).or_else(|| lengths.last());
                        let latest = model.wholly(true).filter_map(|run| model.epoch(run)).max();
                        let mut named = Vec::new();
                        let taken = runs.take_pages(want, |stretch| named.extend(stretch.map(PageId)));
                        prop_assert_eq!(PageId(taken).index(), named.len());
                        let Some(&page) = named.first() else {
                            prop_assert_eq!(model.pages(true), []);
                            continue;
                        };
                        let run = *model.runs.keys().find(|run| run.contains(page)).expect("a run");
                        let epoch = model.epoch(run);
                        let (idle, _) = model.runs.get_mut(&run).expect("it is there");
                        match (fullest, opened) {
                            (Some(len), _) => prop_assert_eq!(idle.len(), len),
                            (None, Some(&count)) => {
                                prop_assert_eq!((run.count(), epoch), (count, None));
                            }
                            (None, None) => prop_assert_eq!(epoch, latest),
                        }
                        prop_assert_eq!(taken, want.min(u32::try_from(idle.len()).expect("small")));
                        // The lowest ones, each of them idle before.
                        prop_assert!(named.iter().eq(idle.iter().take(named.len())));
                        idle.retain(|page| !named.contains(page));
                    }
                    Op::TakePage(which) => {
                        let idle = model.pages(true);
                        if !idle.is_empty() {
                            let page = *which.get(&idle);
                            runs.take_page(page);
                            model.runs.values_mut().for_each(|(idle, _)| { idle.remove(&page); });
                        }
                    }
                    Op::PutPages(which, after) => {
                        let mut used = model.pages(false);
                        let mut back = Vec::new();
                        for index in which {
                            if !used.is_empty() {
                                back.push(used.swap_remove(index.index(used.len())));
                            }
                        }
                        // Every other time in order, so that there are stretches.
                        if back.len() % 2 == 0 {
                            back.sort_unstable();
                        }
                        match PageId::stretch(&back) {
                            many if many > 1 && many == back.len() => {
                                runs.put_stretch(back[0].0..back[many - 1].0 + 1, after);
                            }
                            _ => runs.put_pages(&back, after),
                        }
                        for (run, (idle, freed)) in &mut model.runs {
                            let mut own = back.iter().filter(|page| run.contains(**page)).peekable();
                            if own.peek().is_some() {
                                *freed = freed.join(after);
                            }
                            idle.extend(own);
                        }
                    }
                    Op::TakeIdleRun { pages, in_flight, back } => {
                        let lengths = model.lengths();
                        let fits = lengths.iter().rfind(|&&count| count <= pages).or_else(|| lengths.first());
                        let oldest = model.wholly(true).filter_map(|run| model.epoch(run)).min();
                        let which = if in_flight { Idle::InFlight } else { Idle::Retired };
                        let taken = runs.take_idle_run(pages, which);
                        match which {
                            Idle::Retired => prop_assert_eq!(taken.map(PageRun::count), fits.copied()),
                            Idle::InFlight => {
                                prop_assert_eq!(taken.and_then(|run| model.epoch(run)), oldest);
                            }
                        }
                        let Some(run) = taken else { continue };
                        prop_assert!(model.wholly(in_flight).any(|idle| idle == run));
                        prop_assert_eq!(runs.after(run), model.runs[&run].1.since(model.retired));
                        if back {
                            runs.restore(run);
                        } else {
                            runs.remove(run);
                            model.runs.remove(&run);
                        }
                    }
                    Op::Retire(epoch) => {
                        prop_assert_eq!(runs.retire(epoch), model.retired < Some(epoch));
                        model.retired = model.retired.max(Some(epoch));
                    }
                }
                prop_assert_eq!(runs.len() as usize, model.runs.len());
                let wholly = model.wholly(false).chain(model.wholly(true));
                prop_assert_eq!(runs.wholly_idle_pages(), wholly.map(PageRun::count).sum::<u32>());
            }
            // Every idle page is found, and no other.
            let mut left = model.pages(true);
            let mut found = Vec::new();
            while runs.take_pages(MAX_RUN, |stretch| found.extend(stretch.map(PageId))) > 0 {}
            found.sort_unstable();
            left.sort_unstable();
            prop_assert_eq!(found, left);
        }
    }
}
