//! Blocks inside pages: which are taken, and which page the next ones come from.
//!
//! One bit per block, one small entry per page. A partly taken page hangs in the bucket of its
//! number of free blocks, a doubly linked list through the entries, and a ladder of bits finds the
//! next bucket that is not empty: the best fitting page costs a few steps, whatever the pool's
//! size. Pages wholly taken and pages without a taken block hang nowhere; the latter belong to the
//! page allocator.
//!
//! Where every page is one block, as in the contiguous layout of most models, a page is never
//! partly taken: the bit says it all, and there are no entries.

use std::ops::Range;

use kvcached_mapper::PageId;

use crate::bits::{Bits, Ladder};
use crate::{BlockId, BlockSpace, NULL_BLOCK, index};

/// What is taken, and what is free on pages that are in use.
#[derive(Debug)]
pub(crate) struct PageBlocks {
    space: BlockSpace,
    taken: Bits,
    /// By page; empty if every page is one block.
    entries: Vec<Entry>,
    /// First page of each bucket, by number of free blocks; bucket 0 is none.
    heads: Vec<Link>,
    filled: Ladder,
    /// Blocks of pages with a taken one.
    claimed: u32,
    /// Those of them that are free: the sum over the buckets.
    free: u32,
}

/// The page's number plus one, so that zero is no page.
type Link = u32;

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    /// Blocks taken.
    used: u32,
    /// The bucket it hangs in, that is its number of free blocks; 0 if in none.
    bucket: u32,
    next: Link,
    prev: Link,
}

/// Blocks on their way out: what it takes to finish a release, or to undo it.
#[derive(Debug, Default)]
pub(crate) struct Release {
    /// Pages without a taken block from now on.
    pub(crate) emptied: Vec<PageId>,
    /// Blocks of those.
    emptied_blocks: u32,
    /// Pages that hang in a bucket, or will; maybe several times.
    moved: Vec<PageId>,
}

impl PageBlocks {
    pub(crate) fn new(space: BlockSpace) -> Self {
        let buckets = space.max_blocks_per_page();
        let entries = if space.pages_are_blocks() {
            0
        } else {
            space.pages()
        };
        Self {
            taken: Bits::new(space.blocks()),
            entries: vec![Entry::default(); index(entries)],
            heads: vec![0; index(buckets)],
            filled: Ladder::new(buckets),
            claimed: 0,
            free: 0,
            space,
        }
    }

    pub(crate) const fn space(&self) -> &BlockSpace {
        &self.space
    }

    /// Free blocks on pages that have taken ones.
    pub(crate) const fn free(&self) -> u32 {
        self.free
    }

    /// Taken blocks of the pool.
    pub(crate) const fn taken(&self) -> u32 {
        self.claimed - self.free
    }

    /// Blocks of pages that have taken ones.
    pub(crate) const fn claimed(&self) -> u32 {
        self.claimed
    }

    /// Taken blocks of `page`.
    pub(crate) fn used(&self, page: PageId) -> u32 {
        if self.space.pages_are_blocks() {
            return u32::from(self.taken.test(page.0));
        }
        self.entries.get(page.index()).map_or(0, |entry| entry.used)
    }

    /// The page to take `n` blocks from: of those with enough free blocks the one with the fewest,
    /// or the fullest, if none has enough. `None` if no page in use has a free block.
    pub(crate) fn best_fit(&self, n: u32) -> Option<PageId> {
        let bucket = self
            .filled
            .next_from(n)
            .or_else(|| self.filled.next_from(1))?;
        Some(PageId(self.heads[index(bucket)] - 1))
    }

    /// Takes `n` blocks of `pages`, which have no taken one: all, but of the last page only what
    /// is missing.
    pub(crate) fn take_new(&mut self, pages: &[PageId], n: u32, out: &mut Vec<BlockId>) {
        if self.space.pages_are_blocks() {
            assert_eq!(pages.len(), index(n), "as many pages as blocks");
            let mut left = pages;
            while let Some(first) = left.first() {
                let (stretch, rest) = left.split_at(PageId::stretch(left));
                match stretch.len() {
                    1 => self.taken.set(first.0),
                    _ => self.taken.set_range(first.0..first.0 + count(stretch)),
                }
                left = rest;
            }
            out.extend(pages.iter().map(|page| BlockId(page.0)));
            self.claimed += n;
            return;
        }
        let mut missing = n;
        for &page in pages {
            missing -= self.take(page, missing, out);
        }
        assert_eq!(missing, 0, "pages hold as many blocks as were counted");
    }

    /// Takes up to `n` free blocks of `page`, lowest first, and says how many.
    pub(crate) fn take(&mut self, page: PageId, n: u32, out: &mut Vec<BlockId>) -> u32 {
        let blocks = self.space.blocks_in(page);
        let total = blocks.end - blocks.start;
        let entry = &mut self.entries[page.index()];
        let taken = n.min(total - entry.used);
        if entry.used == 0 {
            self.claimed += total;
            entry.used = taken;
            let lowest = blocks.start..blocks.start + taken;
            self.taken.set_range(lowest.clone());
            out.extend(lowest.map(BlockId));
            if taken == total {
                // From empty to full without ever hanging anywhere.
                return taken;
            }
        } else {
            entry.used += taken;
            self.taken
                .claim(blocks, taken, |block| out.push(BlockId(block)));
        }
        self.rehang(page, total);
        taken
    }

    /// Marks `blocks` free and works out what that means for their pages, without yet hanging them
    /// elsewhere: [`finish`](Self::finish) or [`undo`](Self::undo) must follow.
    ///
    /// On `Err`, with the position of the first block that is not taken (or no longer, since it is
    /// named before), nothing has changed.
    pub(crate) fn begin_release(
        &mut self,
        blocks: &[BlockId],
        release: &mut Release,
    ) -> Result<(), usize> {
        release.emptied.clear();
        release.emptied_blocks = 0;
        release.moved.clear();
        if self.space.pages_are_blocks() {
            release
                .emptied
                .extend(blocks.iter().map(|block| PageId(block.0)));
            if let Err(position) = self.clear_taken(&release.emptied) {
                self.undo(&blocks[..position], release);
                return Err(position);
            }
            release.emptied_blocks = count(blocks);
            return Ok(());
        }
        // Blocks of one page mostly come one after the other, so a page is settled once for all.
        let mut on_page = 0..0;
        let (mut page, mut share) = (PageId(0), 0);
        for (position, block) in blocks.iter().enumerate() {
            if *block == NULL_BLOCK || !self.taken.clear(block.0) {
                self.settle(page, share, &on_page, release);
                self.undo(&blocks[..position], release);
                return Err(position);
            }
            if !on_page.contains(&block.0) {
                self.settle(page, share, &on_page, release);
                page = self
                    .space
                    .page_of(block.0)
                    .expect("a taken block lies on a page");
                on_page = self.space.blocks_in(page);
                share = 0;
            }
            share += 1;
        }
        self.settle(page, share, &on_page, release);
        Ok(())
    }

    /// Marks the blocks of `pages` free, each of which is one, up to the first that is not taken:
    /// on `Err` its position.
    fn clear_taken(&mut self, pages: &[PageId]) -> Result<(), usize> {
        let mut left = pages;
        while let Some(&PageId(first)) = left.first() {
            let position = pages.len() - left.len();
            let (stretch, rest) = left.split_at(PageId::stretch(left));
            // A stretch never goes on at 0.
            if first == NULL_BLOCK.0 {
                return Err(position);
            }
            if stretch.len() == 1 {
                // Not worth more, and common: blocks that were freed in no order come back so.
                if !self.taken.clear(first) {
                    return Err(position);
                }
            } else {
                self.taken
                    .clear_stretch(first, count(stretch))
                    .map_err(|clear| position + index(clear - first))?;
            }
            left = rest;
        }
        Ok(())
    }

    /// Takes `share` blocks off what `page`, with blocks `on_page`, has taken.
    fn settle(&mut self, page: PageId, share: u32, on_page: &Range<u32>, release: &mut Release) {
        if share == 0 {
            return;
        }
        let entry = &mut self.entries[page.index()];
        entry.used -= share;
        if entry.used > 0 || entry.bucket > 0 {
            release.moved.push(page);
        }
        if entry.used == 0 {
            release.emptied.push(page);
            release.emptied_blocks += on_page.end - on_page.start;
        }
    }

    /// Hangs the pages of a release where they now belong.
    pub(crate) fn finish(&mut self, release: &Release) {
        self.claimed -= release.emptied_blocks;
        for &page in &release.moved {
            self.rehang(page, self.space.count_in(page));
        }
    }

    /// Takes back what [`begin_release`](Self::begin_release) did.
    #[cold]
    pub(crate) fn undo(&mut self, blocks: &[BlockId], release: &Release) {
        for block in blocks {
            self.taken.set(block.0);
        }
        if self.space.pages_are_blocks() {
            return;
        }
        for &page in release.moved.iter().chain(&release.emptied) {
            let used = self.taken.ones(self.space.blocks_in(page)).count();
            self.entries[page.index()].used =
                u32::try_from(used).expect("no more than blocks of the page");
        }
    }

    /// Taken blocks of the pool, ascending.
    pub(crate) fn taken_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.taken.ones(0..self.space.blocks()).map(BlockId)
    }

    /// Hangs `page`, which has `total` blocks, into the bucket of its number of free ones. The only
    /// place that changes a bucket, so that lists, ladder and sum agree.
    fn rehang(&mut self, page: PageId, total: u32) {
        let Entry {
            used,
            bucket,
            next,
            prev,
        } = self.entries[page.index()];
        let free = if used == 0 { 0 } else { total - used };
        if free == bucket {
            return;
        }
        if bucket > 0 {
            match prev {
                0 => self.heads[index(bucket)] = next,
                prev => self.entries[index(prev - 1)].next = next,
            }
            if next > 0 {
                self.entries[index(next - 1)].prev = prev;
            }
            if self.heads[index(bucket)] == 0 {
                self.filled.remove(bucket);
            }
        }
        let mut entry = Entry {
            used,
            bucket: free,
            next: 0,
            prev: 0,
        };
        if free > 0 {
            entry.next = std::mem::replace(&mut self.heads[index(free)], page.0 + 1);
            if entry.next > 0 {
                self.entries[index(entry.next - 1)].prev = page.0 + 1;
            }
            self.filled.insert(free);
        }
        self.entries[page.index()] = entry;
        self.free = self.free + free - bucket;
    }
}

/// How many distinct blocks or pages these are.
fn count<T>(distinct: &[T]) -> u32 {
    u32::try_from(distinct.len()).expect("distinct blocks have distinct 32-bit numbers")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Small pages, uneven ones, ones of several words of bits, and single blocks.
    fn spaces() -> impl Strategy<Value = BlockSpace> {
        prop::sample::select(vec![(12, 1), (7, 3), (7, 2), (150, 1), (1, 1)]).prop_map(
            |(page_bytes, unit_bytes)| BlockSpace::new(9, page_bytes, unit_bytes).unwrap(),
        )
    }

    /// Takes every page whole, then frees what `freed` picks.
    fn used(space: BlockSpace, freed: &[usize]) -> (PageBlocks, Vec<BlockId>) {
        let mut pages = PageBlocks::new(space);
        let mut taken = Vec::new();
        for page in (0..pages.space().pages()).map(PageId) {
            pages.take_new(&[page], pages.space().count_in(page), &mut taken);
        }
        let mut release = Release::default();
        for &at in freed {
            let block = taken[at % taken.len()];
            if block != NULL_BLOCK && pages.begin_release(&[block], &mut release).is_ok() {
                pages.finish(&release);
            }
        }
        taken.retain(|block| pages.taken.test(block.0));
        (pages, taken)
    }

    proptest! {
        #[test]
        fn best_fit_is_the_fullest_page_with_room_else_the_fullest(
            space in spaces(),
            freed in prop::collection::vec(any::<usize>(), 0..200),
            n in 1_u32..200,
        ) {
            let (pages, taken) = used(space, &freed);
            let free_on = |page: PageId| {
                let total = pages.space.count_in(page);
                let used = taken.iter().filter(|b| pages.space.page_of(b.0) == Some(page)).count();
                if used == 0 { 0 } else { total - u32::try_from(used).unwrap() }
            };
            let free: Vec<u32> =
                (0..9).map(|page| free_on(PageId(page))).filter(|&free| free > 0).collect();
            let expected = free.iter().filter(|&&free| free >= n).min().or_else(|| free.iter().min());
            prop_assert_eq!(pages.best_fit(n).map(free_on), expected.copied());
            prop_assert_eq!(pages.free(), free.iter().sum::<u32>());
            prop_assert_eq!(pages.taken(), u32::try_from(taken.len()).unwrap());
        }

        #[test]
        fn a_refused_or_undone_release_leaves_no_trace(
            space in spaces(),
            freed in prop::collection::vec(any::<usize>(), 0..40),
            released in prop::collection::vec(any::<prop::sample::Index>(), 1..40),
        ) {
            let (mut pages, taken) = used(space, &freed);
            let before = format!("{pages:?}");
            let mut release = Release::default();
            let picked: Vec<BlockId> = released.iter().map(|at| *at.get(&taken)).collect();
            let refused_at = picked.iter().enumerate().position(|(at, block)| {
                *block == NULL_BLOCK || picked[..at].contains(block)
            });
            let result = pages.begin_release(&picked, &mut release);
            prop_assert_eq!(result.err(), refused_at);
            if result.is_ok() {
                pages.undo(&picked, &release);
            }
            prop_assert_eq!(format!("{pages:?}"), before);
        }
    }
}
