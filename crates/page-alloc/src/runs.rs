//! Runs that are backed by memory: which pages of each are idle, and which run to draw from.
//!
//! Taking and putting back one page touches one slot and at most two shelves, whatever the size
//! of the pool. The fullest run is drawn from first, so that the others drain and become wholly
//! idle: only then can their memory go back.

use std::ops::Range;

use kvcached_mapper::{PageId, PageRun};

use crate::MAX_RUN;

/// No slot.
const NONE: u32 = u32::MAX;
/// Shelves for partly used runs, then as many for wholly idle ones.
const SHELVES: usize = 2 * MAX_RUN as usize;

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
}

#[derive(Debug)]
struct Slot {
    /// Bit `i`: page `first + i` is idle.
    idle: u64,
    first: u32,
    count: u32,
    /// Where the run is, or [`NONE`]: it has no idle page, or a call about it is under way.
    shelf: u32,
    previous: u32,
    next: u32,
}

impl Slot {
    /// Where the run belongs.
    const fn home(&self) -> u32 {
        match self.idle.count_ones() {
            0 => NONE,
            all if all == self.count => MAX_RUN + all - 1,
            some => some - 1,
        }
    }
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
        }
    }

    /// How many runs are backed.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.slots.len() - self.vacant.len()).expect("no more runs than pages")
    }

    /// Adds a run that is now backed, all of it idle or all of it used.
    pub(crate) fn insert(&mut self, run: PageRun, idle: bool) {
        let idle = if idle { low_bits(run.count()) } else { 0 };
        let (first, count) = (run.first().0, run.count());
        let new = Slot {
            idle,
            first,
            count,
            shelf: NONE,
            previous: NONE,
            next: NONE,
        };
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

    /// Takes a wholly idle run out of circulation: the longest of up to `pages` pages, else the
    /// shortest, so that as little as possible is taken beyond `pages`.
    pub(crate) fn take_idle_run(&mut self, pages: u32) -> Option<PageRun> {
        let fitting = self.wholly & low_bits(pages.min(MAX_RUN));
        let bit = match (fitting, self.wholly) {
            (_, 0) => return None,
            (0, any) => any.trailing_zeros(),
            (fitting, _) => 63 - fitting.leading_zeros(),
        };
        let slot = self.heads[(MAX_RUN + bit) as usize];
        self.unshelve(slot);
        let Slot { first, count, .. } = self.slots[slot as usize];
        PageRun::new(PageId(first), count)
    }

    /// Marks up to `want` idle pages used, all of one run, and names them in stretches of adjacent
    /// pages; answers how many. The fullest partly used run comes first, then the shortest idle
    /// run that is enough, then the longest.
    pub(crate) fn take_pages(&mut self, want: u32, mut each: impl FnMut(Range<u32>)) -> u32 {
        let enough = self.wholly & !low_bits(want.clamp(1, MAX_RUN) - 1);
        let shelf = match (self.partly, enough, self.wholly) {
            (0, 0, 0) => return 0,
            (0, 0, wholly) => MAX_RUN + 63 - wholly.leading_zeros(),
            (0, enough, _) => MAX_RUN + enough.trailing_zeros(),
            (partly, _, _) => partly.trailing_zeros(),
        };
        let slot = self.heads[shelf as usize];
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

    /// Marks used pages idle. Neighbours in `pages` that belong to one run cost one move between
    /// shelves.
    pub(crate) fn put_pages(&mut self, pages: &[PageId]) {
        let mut pages = pages.iter();
        let Some(page) = pages.next() else { return };
        let mut slot = self.slot_of[page.index()];
        let mut first = self.slots[slot as usize].first;
        let mut idle = 1_u64 << (page.0 - first);
        for page in pages {
            let next = self.slot_of[page.index()];
            if next != slot {
                self.set_idle(slot, self.slots[slot as usize].idle | idle);
                slot = next;
                first = self.slots[slot as usize].first;
                idle = 0;
            }
            idle |= 1 << (page.0 - first);
        }
        self.set_idle(slot, self.slots[slot as usize].idle | idle);
    }

    fn set_idle(&mut self, slot: u32, idle: u64) {
        self.slots[slot as usize].idle = idle;
        self.unshelve(slot);
        self.shelve(slot);
    }

    fn shelve(&mut self, slot: u32) {
        let shelf = self.slots[slot as usize].home();
        if shelf == NONE {
            return;
        }
        let next = self.heads[shelf as usize];
        self.heads[shelf as usize] = slot;
        match self.slots.get_mut(next as usize) {
            Some(neighbour) => neighbour.previous = slot,
            None => *self.filled(shelf) |= 1 << (shelf % MAX_RUN),
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
            ..
        } = *entry;
        if shelf == NONE {
            return;
        }
        entry.shelf = NONE;
        if let Some(neighbour) = self.slots.get_mut(next as usize) {
            neighbour.previous = previous;
        }
        if let Some(neighbour) = self.slots.get_mut(previous as usize) {
            neighbour.next = next;
            return;
        }
        self.heads[shelf as usize] = next;
        if next == NONE {
            *self.filled(shelf) &= !(1 << (shelf % MAX_RUN));
        }
    }

    const fn filled(&mut self, shelf: u32) -> &mut u64 {
        if shelf < MAX_RUN {
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
        Insert { count: u32, idle: bool },
        TakePages(u32),
        TakePage(Index),
        PutPages(Vec<Index>),
        TakeIdleRun { pages: u32, back: bool },
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => (1..=MAX_RUN, any::<bool>()).prop_map(|(count, idle)| Op::Insert { count, idle }),
            4 => (1u32..100).prop_map(Op::TakePages),
            1 => any::<Index>().prop_map(Op::TakePage),
            4 => prop::collection::vec(any::<Index>(), 0..100).prop_map(Op::PutPages),
            2 => (1u32..100, any::<bool>())
                .prop_map(|(pages, back)| Op::TakeIdleRun { pages, back }),
        ]
    }

    /// Idle pages of each run, by the run.
    type Model = BTreeMap<PageRun, BTreeSet<PageId>>;

    /// Idle or used pages of all runs, in order.
    fn pages(model: &Model, idle: bool) -> Vec<PageId> {
        let of_run = |(run, pages): (&PageRun, &BTreeSet<PageId>)| -> Vec<PageId> {
            run.pages()
                .filter(|page| pages.contains(page) == idle)
                .collect()
        };
        model.iter().flat_map(of_run).collect()
    }

    fn partly(run: PageRun, idle: &BTreeSet<PageId>) -> bool {
        !idle.is_empty() && idle.len() < PageId(run.count()).index()
    }

    /// Lengths of the wholly idle runs.
    fn wholly(model: &Model) -> impl DoubleEndedIterator<Item = u32> {
        let lens = model
            .iter()
            .filter(|(run, idle)| idle.len() == PageId(run.count()).index());
        let sorted: BTreeSet<u32> = lens.map(|(run, _)| run.count()).collect();
        sorted.into_iter()
    }

    proptest! {
        #[test]
        fn the_run_drawn_from_is_the_fullest_and_the_one_given_back_fits_best(
            ops in prop::collection::vec(op(), 1..80),
        ) {
            const PAGES: u32 = 6000;
            let mut runs = Runs::new(PAGES);
            let mut model = Model::new();
            let mut end = 0;
            for op in ops {
                match op {
                    Op::Insert { count, idle } => {
                        let run = PageRun::new(PageId(end), count).expect("pages");
                        end += count;
                        runs.insert(run, idle);
                        model.insert(run, run.pages().filter(|_| idle).collect());
                    }
                    Op::TakePages(want) => {
                        let fullest =
                            model.iter().filter(|(run, idle)| partly(**run, idle)).map(|(_, i)| i.len()).min();
                        let opened = wholly(&model)
                            .find(|&count| count >= want)
                            .or_else(|| wholly(&model).next_back());
                        let mut named = Vec::new();
                        let taken = runs.take_pages(want, |stretch| named.extend(stretch.map(PageId)));
                        prop_assert_eq!(PageId(taken).index(), named.len());
                        let Some(&page) = named.first() else {
                            prop_assert_eq!(pages(&model, true), []);
                            continue;
                        };
                        let (run, idle) =
                            model.iter_mut().find(|(run, _)| run.contains(page)).expect("a run");
                        match fullest {
                            Some(len) => {
                                prop_assert!(partly(*run, idle));
                                prop_assert_eq!(idle.len(), len);
                            }
                            None => prop_assert_eq!(Some(run.count()), opened),
                        }
                        prop_assert_eq!(taken, want.min(u32::try_from(idle.len()).expect("small")));
                        // The lowest ones, each of them idle before.
                        prop_assert!(named.iter().eq(idle.iter().take(named.len())));
                        idle.retain(|page| !named.contains(page));
                    }
                    Op::TakePage(which) => {
                        let idle = pages(&model, true);
                        if !idle.is_empty() {
                            let page = *which.get(&idle);
                            runs.take_page(page);
                            model.values_mut().for_each(|idle| { idle.remove(&page); });
                        }
                    }
                    Op::PutPages(which) => {
                        let mut used = pages(&model, false);
                        let mut back = Vec::new();
                        for index in which {
                            if !used.is_empty() {
                                back.push(used.swap_remove(index.index(used.len())));
                            }
                        }
                        runs.put_pages(&back);
                        for (run, idle) in &mut model {
                            idle.extend(back.iter().filter(|page| run.contains(**page)));
                        }
                    }
                    Op::TakeIdleRun { pages, back } => {
                        let fits = wholly(&model)
                            .rfind(|&count| count <= pages)
                            .or_else(|| wholly(&model).next());
                        let taken = runs.take_idle_run(pages);
                        prop_assert_eq!(taken.map(PageRun::count), fits);
                        let Some(run) = taken else { continue };
                        prop_assert_eq!(model[&run].len(), PageId(run.count()).index());
                        if back {
                            runs.restore(run);
                        } else {
                            runs.remove(run);
                            model.remove(&run);
                        }
                    }
                }
                prop_assert_eq!(runs.len() as usize, model.len());
            }
            // Every idle page is found, and no other.
            let mut left = pages(&model, true);
            let mut found = Vec::new();
            while runs.take_pages(MAX_RUN, |stretch| found.extend(stretch.map(PageId))) > 0 {}
            found.sort_unstable();
            left.sort_unstable();
            prop_assert_eq!(found, left);
        }
    }
}
