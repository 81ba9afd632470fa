//! Which runs of a pool are mapped, and whether a batch may be mapped or unmapped: what every
//! mapper that keeps its own record has to check, without any memory in it.

use std::collections::BTreeMap;

use crate::{Cause, MapError, PageId, PageRun};

/// Runs that share no page, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunSet {
    by_first: BTreeMap<PageId, PageRun>,
}

/// The record of one pool: runs mapped, runs in doubt. A page is in one of the sets at most; if in
/// none, it is cold.
#[derive(Debug)]
pub(crate) struct Record {
    pages: u32,
    pub(crate) mapped: RunSet,
    /// Runs between the two halves of an unmap.
    pub(crate) prepared: RunSet,
    /// Runs whose state a failure left unknown. Nothing is done to them any more.
    pub(crate) in_doubt: RunSet,
    /// Mapped runs that a resync made, empty, and did not come to tell of because it failed later.
    remade: RunSet,
}

impl RunSet {
    /// Adds a run that shares no page with the others.
    pub fn insert(&mut self, run: PageRun) {
        debug_assert_eq!(self.overlapping(run), None, "runs of a set share no page");
        self.by_first.insert(run.first(), run);
    }

    /// Takes a run out that is in the set exactly so.
    pub fn remove(&mut self, run: PageRun) {
        let removed = self.by_first.remove(&run.first());
        debug_assert_eq!(removed, Some(run), "runs leave a set as they entered it");
    }

    /// Is it in the set exactly so?
    #[must_use]
    pub fn contains(&self, run: PageRun) -> bool {
        self.by_first.get(&run.first()) == Some(&run)
    }

    /// One of the runs that share a page with `run`.
    #[must_use]
    pub fn overlapping(&self, run: PageRun) -> Option<PageRun> {
        // The runs are apart, so if any overlaps, then the last that begins before the end.
        let (_, &last) = self.by_first.range(..run.end()).next_back()?;
        last.overlaps(run).then_some(last)
    }

    /// The runs in order.
    pub fn iter(&self) -> impl Iterator<Item = PageRun> {
        self.by_first.values().copied()
    }

    /// How many pages the runs have.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.iter().map(PageRun::count).sum()
    }
}

impl Record {
    pub(crate) fn new(pages: u32) -> Self {
        Self {
            pages,
            mapped: RunSet::default(),
            prepared: RunSet::default(),
            in_doubt: RunSet::default(),
            remade: RunSet::default(),
        }
    }

    /// Pages of the pool.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) const fn pages(&self) -> u32 {
        self.pages
    }

    /// Those of `runs` that are prepared, each once.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn prepared_of(&self, runs: &[PageRun]) -> Vec<PageRun> {
        let prepared = self.prepared.iter();
        prepared.filter(|run| runs.contains(run)).collect()
    }

    /// Is every page cold?
    pub(crate) fn is_empty(&self) -> bool {
        let known = [&self.mapped, &self.prepared, &self.in_doubt];
        known.iter().all(|runs| runs.iter().next().is_none())
    }

    /// Are all of `runs` free to be mapped?
    pub(crate) fn check_map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.check("map", runs, |run| {
            if self.mapped.overlapping(run).is_some() {
                Some("it is mapped already, at least in part")
            } else if self.prepared.overlapping(run).is_some() {
                Some("it is being unmapped, at least in part")
            } else {
                None
            }
        })
    }

    /// Were all of `runs` mapped exactly so?
    pub(crate) fn check_unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.check("unmap", runs, |run| {
            if self.mapped.contains(run) {
                None
            } else if self.mapped.overlapping(run).is_some() {
                Some("it was mapped with other bounds")
            } else {
                Some("it is not mapped")
            }
        })
    }

    pub(crate) fn insert_all(&mut self, runs: &[PageRun]) {
        runs.iter().for_each(|&run| self.mapped.insert(run));
    }

    /// Mapped runs are no longer: they are cold.
    pub(crate) fn remove_all(&mut self, runs: &[PageRun]) {
        runs.iter().for_each(|&run| self.remove(run));
    }

    /// Mapped runs are between the two halves of an unmap now.
    pub(crate) fn prepare_all(&mut self, runs: &[PageRun]) {
        for &run in runs {
            self.mapped.remove(run);
            self.prepared.insert(run);
        }
    }

    /// A prepared run is mapped again.
    pub(crate) fn restore(&mut self, run: PageRun) {
        self.prepared.remove(run);
        self.mapped.insert(run);
    }

    /// A prepared run is cold.
    pub(crate) fn commit(&mut self, run: PageRun) {
        self.prepared.remove(run);
        self.forget_remade(run);
    }

    /// Nobody knows any more whether `run` is mapped.
    pub(crate) fn doubt(&mut self, run: PageRun) {
        for known in [&mut self.mapped, &mut self.prepared] {
            if known.contains(run) {
                known.remove(run);
            }
        }
        self.forget_remade(run);
        self.in_doubt.insert(run);
    }

    /// A cold run was mapped for a resync.
    pub(crate) fn remake(&mut self, run: PageRun) {
        self.mapped.insert(run);
        self.remade.insert(run);
    }

    /// The runs that were made and not told of yet. They count as told.
    pub(crate) fn take_remade(&mut self) -> Vec<PageRun> {
        std::mem::take(&mut self.remade).iter().collect()
    }

    fn remove(&mut self, run: PageRun) {
        self.mapped.remove(run);
        self.forget_remade(run);
    }

    fn forget_remade(&mut self, run: PageRun) {
        if self.remade.contains(run) {
            self.remade.remove(run);
        }
    }

    /// Are `runs` a set that could be mapped in an empty pool?
    pub(crate) fn check_set(&self, runs: &[PageRun]) -> Result<(), MapError> {
        Self::new(self.pages).check_map(runs)
    }

    /// What is true of `doubtful` runs by now: those that are nowhere, and those that are mapped. A
    /// run that is neither as a whole is left out.
    pub(crate) fn tell_apart(&self, doubtful: &[PageRun]) -> (Vec<PageRun>, Vec<PageRun>) {
        let is_cold = |run: &PageRun| {
            let sets = [&self.mapped, &self.prepared, &self.in_doubt];
            sets.iter().all(|set| set.overlapping(*run).is_none())
        };
        let is_mapped = |run: &PageRun| self.mapped.contains(*run);
        let runs = || doubtful.iter().copied();
        (
            runs().filter(is_cold).collect(),
            runs().filter(is_mapped).collect(),
        )
    }

    fn check(
        &self,
        call: &'static str,
        runs: &[PageRun],
        own: impl Fn(PageRun) -> Option<&'static str>,
    ) -> Result<(), MapError> {
        let refused = |run, found| Err(MapError::clean(Cause::State { call, run, found }));
        for &run in runs {
            if run.end().0 > self.pages {
                return refused(run, "it is outside the pool");
            }
            if self.in_doubt.overlapping(run).is_some() {
                return refused(run, "it is in doubt after a failure, at least in part");
            }
            if let Some(found) = own(run) {
                return refused(run, found);
            }
        }
        // Callers name runs in order as a rule; only others pay for a sorted copy.
        let shared = |runs: &[PageRun]| {
            let mut pairs = runs.windows(2);
            pairs
                .find(|pair| pair[0].end() > pair[1].first())
                .map(|pair| pair[1])
        };
        if shared(runs).is_some() {
            let mut sorted = runs.to_vec();
            sorted.sort_unstable();
            if let Some(run) = shared(&sorted) {
                return refused(run, "it shares pages with another run of the batch");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PAGES: u32 = 16;

    fn run(first: u32, count: u32) -> PageRun {
        PageRun::new(PageId(first), count).expect("a run of a test")
    }

    fn found(error: Result<(), MapError>) -> Option<&'static str> {
        match error {
            Ok(()) => None,
            Err(MapError {
                cause: Cause::State { found, .. },
                uncertain,
            }) => {
                assert_eq!(uncertain, []);
                Some(found)
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn each_mistake_is_told_apart() {
        let mut record = Record::new(PAGES);
        record.insert_all(&[run(2, 3), run(8, 1)]);
        record.doubt(run(8, 1));
        let in_doubt = Some("it is in doubt after a failure, at least in part");
        let outside = Some("it is outside the pool");
        let twice = Some("it shares pages with another run of the batch");

        let map = |runs: &[PageRun]| found(record.check_map(runs));
        assert_eq!(map(&[]), None);
        assert_eq!(map(&[run(0, 2), run(5, 3)]), None);
        assert_eq!(map(&[run(5, 3), run(0, 2)]), None, "in any order");
        assert_eq!(
            map(&[run(0, 1), run(4, 1)]),
            Some("it is mapped already, at least in part")
        );
        assert_eq!(map(&[run(7, 2)]), in_doubt);
        assert_eq!(map(&[run(15, 2)]), outside);
        assert_eq!(map(&[run(16, 1)]), outside);
        assert_eq!(map(&[run(11, 2), run(10, 2)]), twice);
        assert_eq!(map(&[run(10, 1), run(10, 1)]), twice);

        let unmap = |runs: &[PageRun]| found(record.check_unmap(runs));
        assert_eq!(unmap(&[run(2, 3)]), None);
        assert_eq!(unmap(&[run(2, 3), run(2, 3)]), twice);
        assert_eq!(unmap(&[run(2, 2)]), Some("it was mapped with other bounds"));
        assert_eq!(unmap(&[run(2, 3), run(0, 1)]), Some("it is not mapped"));
        assert_eq!(unmap(&[run(8, 1)]), in_doubt);
        assert_eq!(unmap(&[run(PAGES, 1)]), outside);
    }

    proptest! {
        #[test]
        fn a_batch_is_taken_exactly_when_its_pages_are_free(
            batches in proptest::collection::vec(
                proptest::collection::vec((0u32..PAGES + 2, 1u32..4), 0..4), 1..20),
        ) {
            let mut record = Record::new(PAGES);
            let mut taken = BTreeSet::new();
            for batch in batches {
                let runs: Vec<PageRun> = batch.iter().map(|&(f, c)| run(f, c)).collect();
                let pages: Vec<u32> = runs.iter().flat_map(|r| r.pages()).map(|p| p.0).collect();
                let distinct: BTreeSet<u32> = pages.iter().copied().collect();
                let free = distinct.len() == pages.len()
                    && pages.iter().all(|page| *page < PAGES && !taken.contains(page));
                prop_assert_eq!(record.check_map(&runs).is_ok(), free);
                if free {
                    record.insert_all(&runs);
                    taken.extend(pages);
                }
                prop_assert_eq!(record.mapped.pages() as usize, taken.len());
            }
        }
    }
}
