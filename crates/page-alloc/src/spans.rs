//! A set of pages kept as spans of adjacent ones, for pages without memory.
//!
//! Mapping costs per run, not per page, so what matters is to find adjacent pages for a whole
//! demand. A run has at most [`MAX_RUN`] pages; spans are shelved by length up to that, and
//! everything longer shares the last shelf, since it fits any demand.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::MAX_RUN;

/// Disjoint spans of pages, no two of them adjacent.
#[derive(Debug)]
pub(crate) struct Spans {
    /// End of each span by its start.
    ends: BTreeMap<u32, u32>,
    /// Starts by length: shelf `i` has the spans of `i + 1` pages, the last one longer ones too.
    shelves: Vec<BTreeSet<u32>>,
}

impl Spans {
    pub(crate) fn new() -> Self {
        Self {
            ends: BTreeMap::new(),
            shelves: vec![BTreeSet::new(); MAX_RUN as usize],
        }
    }

    /// Adds pages that are not in the set, joining them with their neighbours.
    pub(crate) fn insert(&mut self, pages: Range<u32>) {
        let mut joined = pages;
        if let Some((&start, &end)) = self.ends.range(..joined.start).next_back() {
            debug_assert!(end <= joined.start, "pages are inserted once");
            if end == joined.start {
                self.remove_span(start, end);
                joined.start = start;
            }
        }
        if let Some(&end) = self.ends.get(&joined.end) {
            self.remove_span(joined.end, end);
            joined.end = end;
        }
        self.insert_span(joined);
    }

    /// Takes up to `demand` adjacent pages: the lowest that are enough, else the longest span.
    ///
    /// `demand` is at least 1 and at most [`MAX_RUN`].
    pub(crate) fn take_run(&mut self, demand: u32) -> Option<Range<u32>> {
        debug_assert!((1..=MAX_RUN).contains(&demand), "a demand fits one run");
        // Looking at each shelf costs less than a hundredth of the mapping that follows.
        let (short, enough) = self.shelves.split_at(demand as usize - 1);
        let start = match enough.iter().filter_map(BTreeSet::first).min() {
            Some(&lowest) => lowest,
            None => *short.iter().rev().find_map(BTreeSet::first)?,
        };
        let end = self.ends[&start];
        let taken = start..end.min(start + demand);
        self.cut(start..end, taken.clone());
        Some(taken)
    }

    /// Takes the lowest span, `most` pages of it at most.
    pub(crate) fn take_lowest(&mut self, most: u32) -> Option<Range<u32>> {
        let (&start, &end) = self.ends.first_key_value()?;
        let taken = start..end.min(start.saturating_add(most));
        self.cut(start..end, taken.clone());
        Some(taken)
    }

    /// Takes the highest span, `most` pages of it at most.
    pub(crate) fn take_highest(&mut self, most: u32) -> Option<Range<u32>> {
        let (&start, &end) = self.ends.last_key_value()?;
        let taken = start.max(end.saturating_sub(most))..end;
        self.cut(start..end, taken.clone());
        Some(taken)
    }

    /// Takes exactly this page, if it is in the set.
    pub(crate) fn take_page(&mut self, page: u32) -> bool {
        match self.ends.range(..=page).next_back() {
            Some((&start, &end)) if page < end => {
                self.cut(start..end, page..page + 1);
                true
            }
            _ => false,
        }
    }

    /// Takes `part` out of the span `whole`.
    fn cut(&mut self, whole: Range<u32>, part: Range<u32>) {
        self.remove_span(whole.start, whole.end);
        for rest in [whole.start..part.start, part.end..whole.end] {
            if !rest.is_empty() {
                self.insert_span(rest);
            }
        }
    }

    fn insert_span(&mut self, span: Range<u32>) {
        self.shelves[shelf(&span)].insert(span.start);
        self.ends.insert(span.start, span.end);
    }

    fn remove_span(&mut self, start: u32, end: u32) {
        self.shelves[shelf(&(start..end))].remove(&start);
        self.ends.remove(&start);
    }
}

fn shelf(span: &Range<u32>) -> usize {
    (span.end - span.start).min(MAX_RUN) as usize - 1
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Insert(u32, u32),
        TakeRun(u32),
        TakeLowest(u32),
        TakeHighest(u32),
        TakePage(u32),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            3 => (0u32..300, 1u32..100).prop_map(|(start, len)| Op::Insert(start, len)),
            3 => (1u32..=MAX_RUN).prop_map(Op::TakeRun),
            1 => (1u32..80).prop_map(Op::TakeLowest),
            1 => (1u32..80).prop_map(Op::TakeHighest),
            2 => (0u32..400).prop_map(Op::TakePage),
        ]
    }

    /// Maximal stretches of adjacent pages in the model.
    fn stretches(model: &BTreeSet<u32>) -> Vec<Range<u32>> {
        let mut found: Vec<Range<u32>> = Vec::new();
        for &page in model {
            match found.last_mut() {
                Some(last) if last.end == page => last.end += 1,
                _ => found.push(page..page + 1),
            }
        }
        found
    }

    proptest! {
        #[test]
        fn a_run_is_the_lowest_that_is_enough_else_the_longest(
            ops in prop::collection::vec(op(), 1..60),
        ) {
            let mut spans = Spans::new();
            let mut model = BTreeSet::new();
            for op in ops {
                let before = stretches(&model);
                match op {
                    Op::Insert(start, len) => {
                        for page in start..start + len {
                            if model.insert(page) {
                                spans.insert(page..page + 1);
                            }
                        }
                    }
                    Op::TakeRun(demand) => {
                        let enough = before.iter().find(|s| s.len() >= demand as usize);
                        let longest = before.iter().rev().max_by_key(|s| s.len());
                        let expected = enough
                            .map(|s| s.start..s.start + demand)
                            .or_else(|| longest.cloned());
                        let taken = spans.take_run(demand);
                        prop_assert_eq!(&taken, &expected);
                        model.retain(|page| !taken.iter().any(|t| t.contains(page)));
                    }
                    Op::TakeLowest(most) => {
                        let expected = before.first().map(|s| s.start..s.end.min(s.start + most));
                        let taken = spans.take_lowest(most);
                        prop_assert_eq!(&taken, &expected);
                        model.retain(|page| !taken.iter().any(|t| t.contains(page)));
                    }
                    Op::TakeHighest(most) => {
                        let expected = before
                            .last()
                            .map(|s| s.start.max(s.end.saturating_sub(most))..s.end);
                        let taken = spans.take_highest(most);
                        prop_assert_eq!(&taken, &expected);
                        model.retain(|page| !taken.iter().any(|t| t.contains(page)));
                    }
                    Op::TakePage(page) => {
                        prop_assert_eq!(spans.take_page(page), model.remove(&page));
                    }
                }
                let kept: Vec<Range<u32>> = spans.ends.iter().map(|(&s, &e)| s..e).collect();
                prop_assert_eq!(kept, stretches(&model));
                let shelved: usize = spans.shelves.iter().map(BTreeSet::len).sum();
                prop_assert_eq!(shelved, spans.ends.len());
            }
        }
    }
}
