//! Numbers with types: a page, a pool and a rank never mix by accident.

use std::fmt;

/// A page of one pool: the unit of bookkeeping, one number for all tensors of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

/// One KV-cache group of an instance: geometry, page space, tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u16);

/// Place in tensor parallelism, as the engine numbers it; never a device index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u16);

/// Place in pipeline parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stage(pub u16);

impl PageId {
    /// The page as an index into a table with one entry per page.
    #[must_use]
    pub const fn index(self) -> usize {
        // A u32 always fits: the workspace does not build for 16-bit targets.
        self.0 as usize
    }

    /// How many pages at the start of `pages` lie one after the other in their pool, if that makes
    /// a long stretch, which is worth treating as one; else, of any, the first alone.
    ///
    /// Engines mostly take and free blocks in stretches, and what is done once for a stretch costs
    /// next to nothing a page. To look for short ones would cost those more who do not.
    #[inline]
    #[must_use]
    pub fn stretch(pages: &[Self]) -> usize {
        match *pages {
            [] => 0,
            [first, _, _, _, _, _, _, eighth, ..] if eighth.0.wrapping_sub(first.0) == 7 => {
                Self::adjacent(first.0, pages)
            }
            _ => 1,
        }
    }

    /// How many of `pages`, which begin at `first`, are adjacent.
    fn adjacent(first: u32, pages: &[Self]) -> usize {
        /// So many are compared at once, which compilers turn into vectors.
        const STEP: usize = 16;
        // No stretch goes on at page 0.
        let most = (u32::MAX - first) as usize;
        let pages = &pages[..pages.len().min(most.saturating_add(1))];
        let mut next = first;
        let mut done = 0;
        for step in pages.chunks_exact(STEP) {
            let fits = (0..).zip(step).fold(true, |fits, (offset, page)| {
                fits & (page.0 == next.wrapping_add(offset))
            });
            if !fits {
                break;
            }
            done += STEP;
            next = next.wrapping_add(16);
        }
        // No more than a step, and less than that before the slice ends or the stretch does.
        let rest = (0..).zip(&pages[done..]);
        let fitting = rest.take_while(|(offset, page)| page.0 == next.wrapping_add(*offset));
        done + fitting.count()
    }
}

impl fmt::Display for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {}", self.0)
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pool {}", self.0)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {}", self.0)
    }
}

/// Adjacent pages that are backed together, by one chunk per extent, and taken away together.
/// Never empty, never past the last page id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRun {
    first: PageId,
    count: u32,
}

impl PageRun {
    /// `count` pages from `first` on; `None` if that is no page at all or runs past the last id.
    #[must_use]
    pub const fn new(first: PageId, count: u32) -> Option<Self> {
        if count == 0 || first.0.checked_add(count).is_none() {
            return None;
        }
        Some(Self { first, count })
    }

    /// The run of one page. `None` only for the id `u32::MAX`, which no pool has.
    #[must_use]
    pub const fn single(page: PageId) -> Option<Self> {
        Self::new(page, 1)
    }

    /// The first page.
    #[must_use]
    pub const fn first(self) -> PageId {
        self.first
    }

    /// How many pages; at least one.
    #[must_use]
    pub const fn count(self) -> u32 {
        self.count
    }

    /// The page after the last one.
    #[must_use]
    pub const fn end(self) -> PageId {
        PageId(self.first.0 + self.count)
    }

    /// Is `page` one of the run's?
    #[must_use]
    pub const fn contains(self, page: PageId) -> bool {
        self.first.0 <= page.0 && page.0 < self.first.0 + self.count
    }

    /// Do the two runs share a page?
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.first.0 < other.end().0 && other.first.0 < self.end().0
    }

    /// The pages in order.
    pub fn pages(self) -> impl ExactSizeIterator<Item = PageId> + DoubleEndedIterator {
        (self.first.0..self.first.0 + self.count).map(PageId)
    }
}

impl fmt::Display for PageRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pages {}..{}", self.first.0, self.first.0 + self.count)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_stretch_is_of_adjacent_pages_and_a_long_one_is_found_whole(
            first in prop_oneof![0_u32..100, u32::MAX - 60..=u32::MAX],
            len in 0_u32..100,
            elsewhere in 0_usize..100,
            page: u32,
        ) {
            let mut pages: Vec<PageId> = (0..len).map(|at| PageId(first.wrapping_add(at))).collect();
            if let Some(there) = pages.get_mut(elsewhere) {
                *there = PageId(page);
            }
            let follows = |pair: &&[PageId]| pair[0].0.checked_add(1) == Some(pair[1].0);
            let adjacent = match pages.len() {
                0 => 0,
                _ => pages.windows(2).take_while(follows).count() + 1,
            };
            let stretch = PageId::stretch(&pages);
            prop_assert!(stretch == adjacent || adjacent < 8 && stretch == 1);
        }
    }
}
