//! Which of the blocks that are kept for their content goes next.
//!
//! An engine that keeps the blocks of finished requests evicts the one that was used longest ago.
//! Ages know nothing of pages: what is left after a while lies scattered, and a few blocks on every
//! page keep the memory of all. [`EvictionQueue`] clears the page that costs least to clear, and
//! holds to the order of use within a bound.

use std::collections::{BTreeMap, BTreeSet};

use kvcached_mapper::PageId;

use crate::BlockId;

/// The blocks that an engine has of one pool, and which of them to evict.
///
/// Somebody uses a block, or it is *idle*: kept for its content, and may be evicted. What it costs to
/// clear a page is the sum over its blocks: 1 for an idle one, 2 for an idle one that was used again
/// after it was idle before, since it may well be once more, and 4 for one in use, which nobody can
/// evict. The block that goes is the one on the cheapest page, the oldest of several; so pages are
/// cleared one after the other, and those that are full of blocks in use are left alone.
///
/// This is least recently used within a bound: no idle block sees more than `window` younger ones go
/// before it. With a window of 0 the oldest goes, always.
///
/// Where pages are mapped in runs, memory goes back run by run: `page` is then any name of the run,
/// such as [its first page](crate::BlockManager::run_of), which does not change as long as a block on
/// it is taken.
///
/// Pure bookkeeping: it neither hands out blocks nor frees them. Each operation takes time
/// logarithmic in the number of blocks.
///
/// ```
/// use kvcached_manager::{BlockId, EvictionQueue};
/// use kvcached_mapper::PageId;
///
/// let mut queue = EvictionQueue::new(100);
/// for (block, page) in [(1, 0), (2, 0), (3, 1), (4, 0)] {
///     queue.hold(BlockId(block), PageId(page));
/// }
/// for block in [1, 2, 3] {
///     queue.rest(BlockId(block));
/// }
/// // Block 1 is the oldest, but somebody uses a block of its page: 4 + 2 against 1.
/// assert_eq!(queue.evict(), Some(BlockId(3)));
/// queue.rest(BlockId(4));
/// assert_eq!(queue.evict(), Some(BlockId(1)));
/// assert_eq!(queue.idle(), 2);
/// ```
#[derive(Debug, Clone, Default)]
pub struct EvictionQueue {
    window: usize,
    blocks: BTreeMap<BlockId, Block>,
    pages: BTreeMap<PageId, Page>,
    /// Idle blocks by the order in which they came to rest.
    ages: BTreeMap<u64, BlockId>,
    next_age: u64,
    /// Pages with idle blocks: what it costs to clear them, and the age of their oldest idle block.
    cheapest: BTreeSet<(u64, u64, PageId)>,
    /// Ages of those that were evicted before the oldest, and are younger. The oldest saw all of
    /// them go; whoever is younger saw fewer.
    went_ahead: BTreeSet<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    page: PageId,
    /// `None` while somebody uses it.
    age: Option<u64>,
    was_reused: bool,
}

#[derive(Debug, Clone, Default)]
struct Page {
    held: u64,
    reused: u64,
    idle: BTreeSet<u64>,
}

const COST_HELD: u64 = 4;
/// Above the cost of an idle block.
const COST_REUSED: u64 = 1;

impl EvictionQueue {
    /// An engine without blocks. `window`: how many younger blocks may go before an older one.
    #[must_use]
    pub fn new(window: u32) -> Self {
        Self {
            window: crate::index(window),
            ..Self::default()
        }
    }

    /// Somebody uses `block`, which lies on `page`: it was just handed out, or was here and is used
    /// again.
    pub fn hold(&mut self, block: BlockId, page: PageId) {
        let before = self.take_out(block);
        let found = Block {
            page,
            age: None,
            was_reused: before.is_some_and(|before| before.was_reused || before.age.is_some()),
        };
        self.blocks.insert(block, found);
        self.change(page, |page| page.held += 1);
    }

    /// Somebody uses a block again that is here. `false`: it is not.
    pub fn hold_again(&mut self, block: BlockId) -> bool {
        let Some(&Block { page, .. }) = self.blocks.get(&block) else {
            return false;
        };
        self.hold(block, page);
        true
    }

    /// Nobody uses `block` any more: it is the youngest of the idle ones. Nothing, if it is not here
    /// or idle already.
    pub fn rest(&mut self, block: BlockId) {
        let Some(found) = self.blocks.get_mut(&block).filter(|b| b.age.is_none()) else {
            return;
        };
        let age = self.next_age;
        found.age = Some(age);
        let Block {
            page, was_reused, ..
        } = *found;
        self.next_age += 1;
        self.ages.insert(age, block);
        self.change(page, |page| {
            page.held -= 1;
            page.reused += u64::from(was_reused);
            page.idle.insert(age);
        });
    }

    /// `block` is freed for another reason than eviction. `false`: it was not here.
    pub fn forget(&mut self, block: BlockId) -> bool {
        self.take_out(block).is_some()
    }

    /// Takes out the idle block that goes, which the caller then frees. `None` if none is idle.
    pub fn evict(&mut self) -> Option<BlockId> {
        let (&oldest, _) = self.ages.first_key_value()?;
        let age = match self.cheapest.first() {
            Some(&(_, age, _)) if self.went_ahead.len() < self.window => age,
            _ => oldest,
        };
        let block = *self.ages.get(&age)?;
        if age != oldest {
            self.went_ahead.insert(age);
        }
        self.take_out(block);
        Some(block)
    }

    /// Blocks that may be evicted.
    #[must_use]
    pub fn idle(&self) -> usize {
        self.ages.len()
    }

    /// Every idle block, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = BlockId> {
        self.ages.values().copied()
    }

    fn take_out(&mut self, block: BlockId) -> Option<Block> {
        let found = self.blocks.remove(&block)?;
        self.change(found.page, |page| match found.age {
            None => page.held -= 1,
            Some(age) => {
                page.idle.remove(&age);
                page.reused -= u64::from(found.was_reused);
            }
        });
        if let Some(age) = found.age {
            self.ages.remove(&age);
            // Those that are older than the oldest now went before nobody.
            let oldest = self.ages.keys().next().copied().unwrap_or(u64::MAX);
            while self.went_ahead.first().is_some_and(|&age| age < oldest) {
                self.went_ahead.pop_first();
            }
        }
        Some(found)
    }

    /// Changes a page, and its place among the others with it.
    fn change(&mut self, page: PageId, change: impl FnOnce(&mut Page)) {
        let found = self.pages.entry(page).or_default();
        if let Some((cost, age)) = found.rank() {
            self.cheapest.remove(&(cost, age, page));
        }
        change(found);
        if let Some((cost, age)) = found.rank() {
            self.cheapest.insert((cost, age, page));
        } else if found.held == 0 {
            self.pages.remove(&page);
        }
    }
}

impl Page {
    /// What it costs to clear it, and the age of its oldest idle block, if it has one.
    fn rank(&self) -> Option<(u64, u64)> {
        let cost = self.held * COST_HELD + self.idle.len() as u64 + self.reused * COST_REUSED;
        self.idle.first().map(|&age| (cost, age))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, Copy)]
    enum Op {
        Hold(u32),
        Rest(u32),
        Forget(u32),
        Evict,
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let block = || 0_u32..60;
        let op = prop_oneof![
            3 => block().prop_map(Op::Hold),
            4 => block().prop_map(Op::Rest),
            1 => block().prop_map(Op::Forget),
            3 => Just(Op::Evict),
        ];
        prop::collection::vec(op, 0..500)
    }

    /// What a plain list knows of a block.
    #[derive(Debug, Clone, Copy)]
    struct Known {
        block: u32,
        is_idle: bool,
        was_reused: bool,
        passed: usize,
    }

    proptest! {
        /// Against a plain list, in the order in which blocks came to rest.
        #[test]
        fn eviction_clears_the_cheapest_page_and_is_lru_within_the_window(
            ops in ops(),
            window in 0_u32..20,
            per_page in 1_u32..9,
        ) {
            let mut queue = EvictionQueue::new(window);
            let mut model: Vec<Known> = Vec::new();
            let take = |model: &mut Vec<Known>, block| {
                model.iter().position(|k| k.block == block).map(|at| model.remove(at))
            };
            for op in ops {
                match op {
                    Op::Hold(block) => {
                        if !queue.hold_again(BlockId(block)) {
                            prop_assert!(model.iter().all(|k| k.block != block));
                            queue.hold(BlockId(block), PageId(block / per_page));
                        }
                        let was_reused =
                            take(&mut model, block).is_some_and(|k| k.was_reused || k.is_idle);
                        model.push(Known { block, is_idle: false, was_reused, passed: 0 });
                    }
                    Op::Rest(block) => {
                        queue.rest(BlockId(block));
                        if let Some(at) = model.iter().position(|k| k.block == block && !k.is_idle) {
                            let known = model.remove(at);
                            model.push(Known { is_idle: true, ..known });
                        }
                    }
                    Op::Forget(block) => {
                        let was_here = take(&mut model, block).is_some();
                        prop_assert_eq!(queue.forget(BlockId(block)), was_here);
                    }
                    Op::Evict => {
                        let gone = queue.evict();
                        let idle: Vec<Known> =
                            model.iter().copied().filter(|k| k.is_idle).collect();
                        prop_assert_eq!(gone.is_none(), idle.is_empty());
                        let Some(BlockId(gone)) = gone else { continue };
                        let rank = idle.iter().position(|k| k.block == gone);
                        prop_assert!(rank.is_some(), "what goes was idle");
                        let cost = |block: u32| {
                            let on_page = model.iter().filter(|k| {
                                k.block / per_page == block / per_page
                            });
                            on_page.map(|k| match (k.is_idle, k.was_reused) {
                                (false, _) => 4,
                                (true, true) => 2,
                                (true, false) => 1,
                            }).sum::<u32>()
                        };
                        if idle[0].passed < window as usize {
                            let best = idle.iter().min_by_key(|k| cost(k.block)).unwrap();
                            prop_assert_eq!(best.block, gone, "the oldest on the cheapest page");
                        }
                        for known in &idle[..rank.unwrap()] {
                            let older = model.iter_mut().find(|k| k.block == known.block).unwrap();
                            older.passed += 1;
                            prop_assert!(older.passed <= window as usize, "nobody waits for ever");
                        }
                        take(&mut model, gone);
                    }
                }
                let idle: Vec<u32> = model.iter().filter(|k| k.is_idle).map(|k| k.block).collect();
                prop_assert_eq!(queue.iter().map(|b| b.0).collect::<Vec<_>>(), idle.clone());
                prop_assert_eq!(queue.idle(), idle.len());
            }
        }

        #[test]
        fn a_window_of_nothing_is_plain_lru(blocks in prop::collection::vec(0_u32..40, 1..60)) {
            let mut queue = EvictionQueue::new(0);
            for &block in &blocks {
                queue.hold(BlockId(block), PageId(block / 4));
                queue.rest(BlockId(block));
            }
            let oldest: Vec<BlockId> = queue.iter().collect();
            let gone: Vec<BlockId> = std::iter::from_fn(|| queue.evict()).collect();
            prop_assert_eq!(gone, oldest);
            prop_assert_eq!(queue.pages.len() + queue.blocks.len() + queue.cheapest.len(), 0);
        }
    }
}
