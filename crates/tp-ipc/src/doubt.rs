//! Pages in doubt: which of many runs share a page with them.

use std::collections::BTreeMap;

use kvcached_mapper::{PageId, PageRun};

/// Pages of runs that may come from anywhere, even overlapping.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Doubts {
    /// End of each stretch of pages by its first; stretches do not touch.
    ends: BTreeMap<PageId, PageId>,
}

impl Doubts {
    pub(crate) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Does `run` share a page with them?
    pub(crate) fn overlaps(&self, run: PageRun) -> bool {
        let before = self.ends.range(..run.end()).next_back();
        before.is_some_and(|(_, end)| *end > run.first())
    }

    pub(crate) fn insert(&mut self, run: PageRun) {
        let (mut first, mut end) = (run.first(), run.end());
        while let Some((&known_first, &known_end)) = self.ends.range(..=end).next_back()
            && known_end >= first
        {
            self.ends.remove(&known_first);
            first = first.min(known_first);
            end = end.max(known_end);
        }
        self.ends.insert(first, end);
    }

    /// The stretches, as runs.
    pub(crate) fn iter(&self) -> impl Iterator<Item = PageRun> {
        self.ends.iter().filter_map(|(&first, &end)| {
            // A stretch is not empty, and ends where a run does.
            PageRun::new(first, end.0 - first.0)
        })
    }
}

impl<'a> Extend<&'a PageRun> for Doubts {
    fn extend<I: IntoIterator<Item = &'a PageRun>>(&mut self, runs: I) {
        runs.into_iter().for_each(|&run| self.insert(run));
    }
}

impl<'a> FromIterator<&'a PageRun> for Doubts {
    fn from_iter<I: IntoIterator<Item = &'a PageRun>>(runs: I) -> Self {
        let mut doubts = Self::default();
        doubts.extend(runs);
        doubts
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn run() -> impl Strategy<Value = PageRun> {
        (0u32..40, 1u32..6).prop_map(|(first, count)| PageRun::new(PageId(first), count).unwrap())
    }

    proptest! {
        #[test]
        fn a_run_overlaps_exactly_when_it_shares_a_page(
            runs in prop::collection::vec(run(), 0..12),
            asked in run(),
        ) {
            let doubts: Doubts = runs.iter().collect();
            let pages: BTreeSet<PageId> = runs.iter().flat_map(|run| run.pages()).collect();
            prop_assert_eq!(doubts.is_empty(), pages.is_empty());
            prop_assert_eq!(doubts.overlaps(asked), asked.pages().any(|page| pages.contains(&page)));
            let named: Vec<PageId> = doubts.iter().flat_map(|run| run.pages()).collect();
            prop_assert!(named.iter().eq(pages.iter()));
        }
    }
}
