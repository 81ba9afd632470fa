//! The elastic pool as pure bookkeeping: pages come out of memory that several models share, and
//! go back when their last block is returned. No mapper, no ranks, no bytes.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use kvcached_mapper::{PageId, PoolId};

use super::{BlockId, Broken, CacheError, KvCache, Return, Want, pool_index};

/// Memory of one rank that several models share.
#[derive(Debug, Clone)]
pub struct SharedMemory {
    total_bytes: u64,
    free_bytes: Arc<AtomicU64>,
}

/// A pool of an [`ElasticModel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElasticPool {
    /// Bytes of a block, padding not counted.
    pub block_bytes: u64,
    /// Bytes of a page over all its extents.
    pub page_bytes: u64,
    /// Blocks in a page; never zero.
    pub blocks_per_page: u32,
}

/// KV memory of one model that takes pages from shared memory and gives them back.
#[derive(Debug)]
pub struct ElasticModel {
    memory: SharedMemory,
    pools: Vec<Pool>,
    /// Idle pages that each pool keeps for its next request.
    keep_idle_pages: usize,
}

#[derive(Debug)]
struct Pool {
    shape: ElasticPool,
    /// Free slots of each page; of a page that is not mapped, all.
    free_slots: Vec<Vec<u32>>,
    /// Mapped pages with used and free blocks: number of free ones, then page. The fullest come
    /// first, so that the others get a chance to become idle.
    partial: BTreeSet<(usize, usize)>,
    idle: BTreeSet<usize>,
    unmapped: BTreeSet<usize>,
    used_blocks: u64,
}

impl SharedMemory {
    /// `total_bytes` of memory, all of it free.
    #[must_use]
    pub fn new(total_bytes: u64) -> Self {
        Self {
            total_bytes,
            free_bytes: Arc::new(AtomicU64::new(total_bytes)),
        }
    }

    /// What no model has mapped.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: u64) -> bool {
        let take = |free: u64| free.checked_sub(bytes);
        self.free_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.free_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl ElasticModel {
    /// A model without any page yet. Each pool keeps up to `keep_idle_pages` idle ones.
    #[must_use]
    pub fn new(memory: SharedMemory, pools: &[ElasticPool], keep_idle_pages: u32) -> Self {
        Self {
            memory,
            pools: pools.iter().map(|&shape| Pool::new(shape)).collect(),
            keep_idle_pages: keep_idle_pages as usize,
        }
    }

    /// Pages that each pool lacks to hand out `blocks`, and their bytes in all.
    fn lacking(&self, blocks: &[u64]) -> (Vec<usize>, u64) {
        let pages: Vec<usize> = blocks
            .iter()
            .zip(&self.pools)
            .map(|(&blocks, pool)| pool.lacking(blocks))
            .collect();
        let bytes = pages
            .iter()
            .zip(&self.pools)
            .map(|(&pages, pool)| pool.shape.page_bytes.saturating_mul(pages as u64))
            .fold(0, u64::saturating_add);
        (pages, bytes)
    }
}

impl KvCache for ElasticModel {
    fn alloc(&mut self, wants: &[Want], out: &mut Vec<BlockId>) -> Result<(), CacheError> {
        let mut blocks = vec![0; self.pools.len()];
        for want in wants {
            blocks[pool_index(want.pool)] += u64::from(want.blocks);
        }
        let (pages, bytes) = self.lacking(&blocks);
        if !self.memory.take(bytes) {
            return Err(CacheError::Full);
        }
        for (pool, pages) in self.pools.iter_mut().zip(pages) {
            pool.map(pages);
        }
        for want in wants {
            let pool = &mut self.pools[pool_index(want.pool)];
            for _ in 0..want.blocks {
                out.push(pool.hand_out());
            }
        }
        Ok(())
    }

    fn free(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        for Return { pool, blocks, .. } in returns {
            let pool = &mut self.pools[pool_index(*pool)];
            for &block in *blocks {
                pool.take_back(block);
            }
            self.memory.give_back(pool.unmap_idle(self.keep_idle_pages));
        }
        Ok(())
    }

    fn fits(&self, blocks: &[u32]) -> bool {
        let bytes: u128 = blocks
            .iter()
            .zip(&self.pools)
            .map(|(&blocks, pool)| {
                let pages = blocks.div_ceil(pool.shape.blocks_per_page);
                u128::from(pages) * u128::from(pool.shape.page_bytes)
            })
            .sum();
        bytes <= u128::from(self.memory.total_bytes)
    }

    fn trim(&mut self) -> Result<(), Broken> {
        for pool in &mut self.pools {
            self.memory.give_back(pool.unmap_idle(0));
        }
        Ok(())
    }

    fn step_end(&mut self) -> Result<(), Broken> {
        Ok(())
    }

    fn mapped_bytes(&self) -> u64 {
        self.pools.iter().map(Pool::mapped_bytes).sum()
    }

    fn goes_with(&self, pool: PoolId, block: BlockId) -> PageId {
        PageId(block.0 / self.pools[pool_index(pool)].shape.blocks_per_page)
    }

    fn held_bytes(&self) -> u64 {
        self.pools
            .iter()
            .map(|pool| pool.used_blocks * pool.shape.block_bytes)
            .sum()
    }
}

impl Pool {
    fn new(shape: ElasticPool) -> Self {
        assert!(shape.blocks_per_page > 0, "a page holds at least one block");
        Self {
            shape,
            free_slots: Vec::new(),
            partial: BTreeSet::new(),
            idle: BTreeSet::new(),
            unmapped: BTreeSet::new(),
            used_blocks: 0,
        }
    }

    fn blocks_per_page(&self) -> usize {
        self.shape.blocks_per_page as usize
    }

    fn mapped_pages(&self) -> usize {
        self.free_slots.len() - self.unmapped.len()
    }

    fn mapped_bytes(&self) -> u64 {
        self.shape.page_bytes * self.mapped_pages() as u64
    }

    fn lacking(&self, blocks: u64) -> usize {
        let mapped = self.mapped_pages() as u64 * u64::from(self.shape.blocks_per_page);
        let missing = blocks.saturating_sub(mapped - self.used_blocks);
        let pages = missing.div_ceil(u64::from(self.shape.blocks_per_page));
        usize::try_from(pages).expect("less than a u64 of blocks, so less than a usize of pages")
    }

    fn map(&mut self, pages: usize) {
        for _ in 0..pages {
            let page = self.unmapped.pop_first().unwrap_or_else(|| {
                // The last slot is handed out first.
                self.free_slots
                    .push((0..self.shape.blocks_per_page).rev().collect());
                self.free_slots.len() - 1
            });
            self.idle.insert(page);
        }
    }

    /// A block of the fullest page; there is one, since `map` was called for what was lacking.
    fn hand_out(&mut self) -> BlockId {
        let page = match self.partial.pop_first() {
            Some((_, page)) => page,
            None => self.idle.pop_first().expect("lacking pages were mapped"),
        };
        let slot = self.free_slots[page]
            .pop()
            .expect("a page here has a free block");
        let free = self.free_slots[page].len();
        if free > 0 {
            self.partial.insert((free, page));
        }
        self.used_blocks += 1;
        let first = u32::try_from(page).expect("as many pages as blocks at most")
            * self.shape.blocks_per_page;
        BlockId(first + slot)
    }

    fn take_back(&mut self, block: BlockId) {
        let page = (block.0 / self.shape.blocks_per_page) as usize;
        let free = self.free_slots[page].len();
        self.partial.remove(&(free, page));
        self.free_slots[page].push(block.0 % self.shape.blocks_per_page);
        if free + 1 == self.blocks_per_page() {
            self.idle.insert(page);
        } else {
            self.partial.insert((free + 1, page));
        }
        self.used_blocks -= 1;
    }

    /// Unmaps idle pages, the last ones first, until `keep` are left; returns their bytes.
    fn unmap_idle(&mut self, keep: usize) -> u64 {
        let mut bytes = 0;
        while self.idle.len() > keep {
            if let Some(page) = self.idle.pop_last() {
                self.unmapped.insert(page);
                bytes += self.shape.page_bytes;
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::tests::want;

    const POOL: ElasticPool = ElasticPool {
        block_bytes: 64,
        page_bytes: 256,
        blocks_per_page: 4,
    };

    fn give_back(cache: &mut ElasticModel, request: u32, blocks: &[BlockId]) {
        let Want { pool, owner, .. } = want(0, request, 0);
        cache
            .free(&[Return {
                pool,
                owner,
                blocks,
            }])
            .expect("never broken");
    }

    #[test]
    fn what_one_model_returns_another_can_take() {
        let memory = SharedMemory::new(1_024);
        let mut one = ElasticModel::new(memory.clone(), &[POOL], 0);
        let mut other = ElasticModel::new(memory, &[POOL], 0);
        let mut out = Vec::new();
        one.alloc(&[want(0, 1, 16)], &mut out).expect("all of it");
        assert!(matches!(
            other.alloc(&[want(0, 2, 1)], &mut Vec::new()),
            Err(CacheError::Full)
        ));
        give_back(&mut one, 1, &out[..3]);
        assert!(
            matches!(
                other.alloc(&[want(0, 2, 1)], &mut Vec::new()),
                Err(CacheError::Full)
            ),
            "the page still holds a block"
        );
        give_back(&mut one, 1, &out[3..4]);
        other
            .alloc(&[want(0, 2, 4)], &mut Vec::new())
            .expect("the page is free now");
        assert_eq!((one.mapped_bytes(), other.mapped_bytes()), (768, 256));
    }

    #[test]
    fn idle_pages_are_kept_until_another_model_needs_them() {
        let memory = SharedMemory::new(1_024);
        let mut cache = ElasticModel::new(memory.clone(), &[POOL], 1);
        let mut out = Vec::new();
        cache.alloc(&[want(0, 1, 8)], &mut out).expect("room");
        give_back(&mut cache, 1, &out);
        assert_eq!(cache.mapped_bytes(), 256);
        cache.trim().expect("never broken");
        assert_eq!((cache.mapped_bytes(), memory.free_bytes()), (0, 1_024));
    }

    #[test]
    fn the_fullest_page_is_used_first() {
        let mut cache = ElasticModel::new(SharedMemory::new(1_024), &[POOL], 0);
        let mut out = Vec::new();
        cache.alloc(&[want(0, 1, 8)], &mut out).expect("room");
        give_back(&mut cache, 1, &[out[0], out[1], out[2], out[4]]);
        let mut more = Vec::new();
        cache.alloc(&[want(0, 2, 1)], &mut more).expect("room");
        assert_eq!(
            more,
            [out[4]],
            "page 1 has one free block, page 0 has three"
        );
    }
}
