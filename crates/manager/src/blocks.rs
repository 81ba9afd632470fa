//! [`BlockManager`]: who has which block of one pool.
//!
//! It owns what it decides about and needs no lock: `&mut self`, no thread, no clock. Pages come
//! from a [`PageAllocator`] that others (a reserve, a controller) use at the same time.

use std::sync::Arc;

use kvcached_mapper::{After, Epoch, Health, MapError, PageId};
use kvcached_page_alloc::{
    AllocError as PageAllocError, FullReason, Limit, LimitError, LimitStatus, PageAllocator,
    PageState, Repaired,
};

use crate::hold::Holds;
use crate::page::{PageBlocks, Release};
use crate::{
    AllocError, BlockId, BlockSpace, FreeError, HoldError, HoldId, NULL_BLOCK, NewError,
    PageOccupancy, PoolUsage,
};

/// Hands out the blocks of one pool, packed on as few pages as possible.
///
/// Blocks come from the page that fits best, so that sparse pages drain and can be given back; a
/// page without a taken block goes back to the page allocator at once. Every operation does all
/// that it was asked for, or nothing.
#[derive(Debug)]
pub struct BlockManager {
    pages: Arc<PageAllocator>,
    blocks: PageBlocks,
    holds: Holds,
    /// Blocks that lie wholly on a page, the null block among them.
    whole: u32,
    /// Joins all that blocks were ever freed after. A page may hold blocks of several epochs, and
    /// goes when the last is freed, which need not be the one of the latest epoch. To remember it
    /// by page would cost more than it spares: what all of it waits for is at most as late as the
    /// latest block freed anywhere.
    freed_after: After,
    /// Kept between calls for their memory.
    fetched: Vec<PageId>,
    release: Release,
}

impl BlockManager {
    /// A manager of `blocks` on the pages of `pages`, with nothing handed out but the null block.
    ///
    /// # Errors
    /// The two are not of the same pool, or page 0 cannot be had; nothing changed.
    pub fn new(blocks: BlockSpace, pages: Arc<PageAllocator>) -> Result<Self, NewError> {
        check_same_pool(&blocks, &pages)?;
        let whole = blocks.whole_blocks();
        let holds = Holds::new(blocks.blocks());
        let mut blocks = PageBlocks::new(blocks);
        let mut null = Vec::new();
        blocks.take_new(&[pages.alloc_first()?], 1, &mut null);
        assert_eq!(null, [NULL_BLOCK], "the lowest block of page 0 is block 0");
        let (fetched, release) = (Vec::new(), Release::default());
        Ok(Self {
            pages,
            blocks,
            holds,
            whole,
            freed_after: After::NOTHING,
            fetched,
            release,
        })
    }

    /// Hands out `n` blocks, in ascending order within a page.
    ///
    /// # Errors
    /// See [`alloc_into`](Self::alloc_into).
    pub fn alloc(&mut self, n: u32) -> Result<Vec<BlockId>, AllocError> {
        let mut blocks = Vec::new();
        self.alloc_into(n, &mut blocks)?;
        Ok(blocks)
    }

    /// Hands out `n` blocks, appended to `out`, for callers that use a buffer again and again.
    ///
    /// Free blocks of pages in use come first: of the page where they fit best, or, if none has
    /// enough, of the fullest and then on. New pages are asked for in one call, and only when all
    /// free blocks together do not suffice.
    ///
    /// # Errors
    /// No block is handed out, and `out` and all holds are as before. [`AllocError::Full`] is a
    /// normal answer, [`AllocError::Broken`] and [`AllocError::Fenced`] are not.
    pub fn alloc_into(&mut self, n: u32, out: &mut Vec<BlockId>) -> Result<(), AllocError> {
        if self.pages.is_fenced() {
            let ranks = self.pages.fenced();
            // Else the fence has just fallen.
            if !ranks.is_empty() {
                return Err(AllocError::Fenced { ranks });
            }
        }
        self.fetched.clear();
        if n > self.blocks.free() {
            self.fetch(n)?;
        }
        // Nothing can fail from here on: that is why new pages are fetched first.
        out.reserve(crate::index(n));
        let mut missing = n;
        while missing > 0
            && let Some(page) = self.blocks.best_fit(missing)
        {
            missing -= self.blocks.take(page, missing, out);
        }
        self.blocks.take_new(&self.fetched, missing, out);
        Ok(())
    }

    /// Takes `blocks` back; pages that become empty go to the page allocator, in one call. Their
    /// memory goes no sooner than all that was launched so far has ended, as the device says.
    ///
    /// # Errors
    /// See [`free_in`](Self::free_in).
    pub fn free(&mut self, blocks: &[BlockId]) -> Result<(), FreeError> {
        self.free_after(blocks, After::DEVICE)
    }

    /// The same, by an engine that counts what it launches: nothing launched after `epoch` touches
    /// `blocks`, so their memory may go once that has retired on every rank.
    ///
    /// A page that becomes empty waits for the latest epoch that was ever named here, since it may
    /// have had blocks of that; and for the device too, from the first [`free`](Self::free) or
    /// [`clear`](Self::clear) on. So a pool is best freed in one way or the other.
    ///
    /// # Errors
    /// The first block that cannot be freed, and why; then none is, and nothing has changed.
    pub fn free_in(&mut self, blocks: &[BlockId], epoch: Epoch) -> Result<(), FreeError> {
        self.free_after(blocks, After::epoch(epoch))
    }

    /// This epoch and all before it have ended on every rank; see [`PageAllocator::retire`].
    pub fn retire(&mut self, epoch: Epoch) {
        self.pages.retire(epoch);
    }

    /// Takes everything back that is handed out; answers how many blocks. Holds stay, being
    /// promised to somebody, and so does the null block.
    ///
    /// Needs no memory and waits for nothing, so it works in a pool that cannot grow.
    ///
    /// # Errors
    /// [`FreeError::Pages`] only; then nothing has changed.
    pub fn clear(&mut self) -> Result<u32, FreeError> {
        let before = self.blocks.taken();
        let handed_out: Vec<BlockId> = self
            .blocks
            .taken_blocks()
            .filter(|&block| block != NULL_BLOCK && !self.holds.contains(block))
            .collect();
        self.give_back(&handed_out, After::DEVICE)?;
        Ok(before - self.blocks.taken())
    }

    /// Sets `n` blocks aside, for a request that is to come. They are backed, and nobody but the
    /// owner of the answer gets them.
    ///
    /// # Errors
    /// See [`alloc_into`](Self::alloc_into).
    pub fn hold(&mut self, n: u32) -> Result<HoldId, AllocError> {
        let blocks = self.alloc(n)?;
        Ok(self.holds.open(blocks))
    }

    /// Hands out the `n` blocks that are in the hold for longest. The hold stays, even if empty,
    /// until it is released.
    ///
    /// # Errors
    /// No such hold, or not so many blocks in it; nothing changed.
    pub fn take_held(&mut self, hold: HoldId, n: u32) -> Result<Vec<BlockId>, HoldError> {
        self.holds.take(hold, n)
    }

    /// Ends a hold; what is left in it is free again. Answers how many blocks that were.
    ///
    /// # Errors
    /// No such hold, or [`FreeError::Pages`]; nothing changed.
    pub fn release_hold(&mut self, hold: HoldId) -> Result<u32, HoldError> {
        // Detached first: as long as they are listed here, they are not free to be given back.
        let mut blocks = self.holds.close(hold)?;
        let released = blocks.len();
        // Nobody was told their numbers, so nothing was launched that touches them.
        if let Err(error) = self.give_back(blocks.make_contiguous(), After::NOTHING) {
            self.holds.reopen(hold, blocks);
            return Err(error.into());
        }
        Ok(u32::try_from(released).expect("distinct blocks have distinct 32-bit numbers"))
    }

    /// Blocks left in a hold; `None` if there is no such hold.
    #[must_use]
    pub fn held(&self, hold: HoldId) -> Option<u32> {
        self.holds.len(hold)
    }

    /// Every hold with the blocks left in it, oldest first.
    pub fn holds(&self) -> impl Iterator<Item = (HoldId, u32)> {
        self.holds.iter()
    }

    /// The most that [`alloc`](Self::alloc) can give now, if the device has the memory: free
    /// blocks on pages in use, and those of the pages that the page allocator could give.
    ///
    /// None while a rank is fenced. Exact otherwise, with one exception: of pages that hold different numbers of blocks while a limit, or
    /// a failure, keeps some of them back, it takes the larger ones to be available. Asks neither
    /// driver nor lock.
    #[must_use]
    pub fn available(&self) -> u32 {
        if self.pages.is_fenced() {
            return 0;
        }
        let most = u64::from(self.blocks.space().max_blocks_per_page());
        let on_new_pages = u64::from(self.pages.available()) * most;
        // Fits, being at most what is beside it.
        let on_new_pages = u32::try_from(on_new_pages)
            .unwrap_or(u32::MAX)
            .min(self.unclaimed());
        self.blocks.free() + on_new_pages
    }

    /// How full each page in use is, by page.
    pub fn occupancy(&self) -> impl Iterator<Item = PageOccupancy> {
        (0..self.blocks.space().pages())
            .filter_map(|page| self.occupancy_of(PageId(page)))
            .filter(|occupancy| occupancy.used > 0)
    }

    /// How full a page is; `None` if the pool has no such page.
    #[must_use]
    pub fn occupancy_of(&self, page: PageId) -> Option<PageOccupancy> {
        let space = self.blocks.space();
        (page.0 < space.pages()).then(|| PageOccupancy {
            page,
            used: self.blocks.used(page),
            total: space.count_in(page),
        })
    }

    /// The page that a block lies on; `None` if it straddles two or the pool does not have it.
    #[must_use]
    pub fn page_of(&self, block: BlockId) -> Option<PageId> {
        self.blocks.space().page_of(block.0)
    }

    /// The first page of the run that a block's memory belongs to, and goes back with: what to clear
    /// for memory to go, see [`EvictionQueue`](crate::EvictionQueue). `None` if the block has none.
    #[must_use]
    pub fn run_of(&self, block: BlockId) -> Option<PageId> {
        let run = self.pages.run_of(self.page_of(block)?)?;
        Some(run.first())
    }

    /// Which blocks lie on which page.
    #[must_use]
    pub const fn space(&self) -> &BlockSpace {
        self.blocks.space()
    }

    /// Puts a limit in force; see [`PageAllocator::set_limit`]. Blocks are never taken from their
    /// owners: what is in use above the limit defers it, and each [`free`](Self::free) that
    /// empties pages brings it nearer.
    ///
    /// # Errors
    /// Below the floor; the limit in force stays.
    pub fn set_limit(&mut self, limit: Limit) -> Result<LimitStatus, LimitError> {
        self.pages.set_limit(limit)
    }

    /// Does the pool keep to its limit by now? Worked out from what is backed, never remembered.
    #[must_use]
    pub fn limit_status(&self) -> LimitStatus {
        self.pages.limit_status()
    }

    /// Gives the memory of idle pages back; answers how many. See [`PageAllocator::trim`].
    ///
    /// # Errors
    /// What the mapper answered.
    pub fn trim(&mut self) -> Result<u32, MapError> {
        self.pages.trim()
    }

    /// How far the pool can be relied on; see [`PageAllocator::health`].
    #[must_use]
    pub fn health(&self) -> Health {
        self.pages.health()
    }

    /// Mends what is in doubt, in one attempt; see [`PageAllocator::repair`]. Waits for other
    /// processes, so it is better done beside the engine, on the page allocator itself.
    ///
    /// # Errors
    /// The first place that could not be mended.
    pub fn repair(&mut self) -> Result<Repaired, MapError> {
        self.pages.repair()
    }

    /// How many repairs so far found that some rank had lost what its pages held; see
    /// [`PageAllocator::contents_lost`].
    #[must_use]
    pub fn contents_lost(&self) -> u64 {
        self.pages.contents_lost()
    }

    /// Blocks and pages at this moment.
    #[must_use]
    pub fn usage(&self) -> PoolUsage {
        let blocks_held = self.holds.count();
        let blocks_used = self.blocks.taken() - blocks_held - 1;
        let block_bytes = self.blocks.space().block_bytes();
        PoolUsage {
            pages: self.pages.usage(),
            blocks_total: self.whole - 1,
            blocks_used,
            blocks_held,
            blocks_available: self.available(),
            used_bytes: u64::from(blocks_used) * block_bytes,
            held_bytes: u64::from(blocks_held) * block_bytes,
        }
    }

    /// Fetches pages for `n` blocks, more than are free on the pages in use.
    fn fetch(&mut self, n: u32) -> Result<(), AllocError> {
        let mut missing = n - self.blocks.free();
        let mut answer = if missing > self.unclaimed() {
            Err(PageAllocError::Full(FullReason::Capacity))
        } else {
            Ok(())
        };
        // Once, unless a page held fewer blocks than another.
        while answer.is_ok() && missing > 0 {
            let before = self.fetched.len();
            let pages = missing.div_ceil(self.blocks.space().max_blocks_per_page());
            answer = self.pages.alloc(pages, &mut self.fetched);
            let fetched = self.blocks.space().count_on(&self.fetched[before..]);
            missing = missing.saturating_sub(fetched);
        }
        let Err(error) = answer else { return Ok(()) };
        if !self.fetched.is_empty() {
            // Nobody has seen them, so nothing can touch them.
            self.pages
                .free_after(&self.fetched, After::NOTHING)
                .expect("pages taken a moment ago are in use");
        }
        match error {
            PageAllocError::Full(reason) => Err(AllocError::Full {
                requested: n,
                available: self.available(),
                reason,
            }),
            PageAllocError::Broken(error) => Err(AllocError::Broken(error)),
            PageAllocError::Fenced { ranks } => Err(AllocError::Fenced { ranks }),
            other => unreachable!("only the null block's page is asked for by name: {other}"),
        }
    }

    fn free_after(&mut self, blocks: &[BlockId], after: After) -> Result<(), FreeError> {
        if self.holds.count() > 0
            && let Some(&block) = blocks.iter().find(|&&block| self.holds.contains(block))
        {
            return Err(FreeError::Held { block });
        }
        self.give_back(blocks, after)
    }

    fn give_back(&mut self, blocks: &[BlockId], after: After) -> Result<(), FreeError> {
        if let Err(position) = self.blocks.begin_release(blocks, &mut self.release) {
            return Err(self.refusal(blocks, position));
        }
        let freed_after = self.freed_after.join(after);
        if !self.release.emptied.is_empty()
            && let Err(error) = self.pages.free_after(&self.release.emptied, freed_after)
        {
            self.blocks.undo(blocks, &self.release);
            return Err(error.into());
        }
        self.freed_after = freed_after;
        self.blocks.finish(&self.release);
        Ok(())
    }

    /// Why the block at `position` cannot be freed, those before it being fine.
    #[cold]
    fn refusal(&self, blocks: &[BlockId], position: usize) -> FreeError {
        let block = blocks[position];
        let space = self.blocks.space();
        if block == NULL_BLOCK {
            FreeError::Null
        } else if block.0 >= space.blocks() {
            FreeError::OutOfRange {
                block,
                blocks: space.blocks(),
            }
        } else if space.page_of(block.0).is_none() {
            FreeError::Straddles { block }
        } else if blocks[..position].contains(&block) {
            FreeError::NamedTwice { block }
        } else {
            FreeError::NotTaken { block }
        }
    }

    /// Blocks on pages that this manager does not have.
    const fn unclaimed(&self) -> u32 {
        self.whole - self.blocks.claimed()
    }
}

/// Do blocks and allocator agree on the pages there are, and on those that hold nothing?
fn check_same_pool(blocks: &BlockSpace, pages: &PageAllocator) -> Result<(), NewError> {
    let usage = pages.usage();
    if usage.total != blocks.pages() {
        return Err(NewError::PageCount {
            blocks: blocks.pages(),
            pages: usage.total,
        });
    }
    // The usual case, in which a million pages need not be asked one by one.
    if usage.void == 0 && blocks.void_pages().next().is_none() {
        return Ok(());
    }
    let disagreed = |&page: &PageId| {
        blocks.blocks_in(page).is_empty() != (pages.state(page) == Some(PageState::Void))
    };
    match (0..blocks.pages()).map(PageId).find(disagreed) {
        Some(page) => Err(NewError::Void { page }),
        None => Ok(()),
    }
}
