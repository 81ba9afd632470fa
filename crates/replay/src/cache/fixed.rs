//! The static split: each model has its share of the memory from the start to the end.

use super::{BlockId, Broken, CacheError, KvCache, Return, Want, pool_index};

/// A share of the memory that belongs to one model for good.
///
/// Counts bytes and nothing else: blocks of all pools come out of the one share in any mixture,
/// without padding and without pages. No real engine splits memory better, so a comparison with
/// it is fair to the split.
#[derive(Debug)]
pub struct FixedSplit {
    share_bytes: u64,
    used_bytes: u64,
    pools: Vec<Pool>,
}

#[derive(Debug)]
struct Pool {
    block_bytes: u64,
    /// Ids that were handed out before and are free now.
    returned: Vec<BlockId>,
    /// Ids from here on were never handed out.
    fresh: u32,
}

impl FixedSplit {
    /// A share of `share_bytes` on each rank; `block_bytes` is what a block of each pool takes
    /// there, over all layers and buffers.
    #[must_use]
    pub fn new(share_bytes: u64, block_bytes: &[u64]) -> Self {
        let pool = |&block_bytes| Pool {
            block_bytes,
            returned: Vec::new(),
            fresh: 0,
        };
        Self {
            share_bytes,
            used_bytes: 0,
            pools: block_bytes.iter().map(pool).collect(),
        }
    }
}

impl KvCache for FixedSplit {
    fn alloc(&mut self, wants: &[Want], out: &mut Vec<BlockId>) -> Result<(), CacheError> {
        let bytes = wants.iter().try_fold(0_u64, |sum, want| {
            let block_bytes = self.pools[pool_index(want.pool)].block_bytes;
            sum.checked_add(block_bytes.checked_mul(u64::from(want.blocks))?)
        });
        let used_bytes = bytes.and_then(|bytes| self.used_bytes.checked_add(bytes));
        let Some(used_bytes) = used_bytes.filter(|&used| used <= self.share_bytes) else {
            return Err(CacheError::Full);
        };
        self.used_bytes = used_bytes;
        for want in wants {
            let pool = &mut self.pools[pool_index(want.pool)];
            for _ in 0..want.blocks {
                out.push(pool.returned.pop().unwrap_or_else(|| {
                    pool.fresh += 1;
                    BlockId(pool.fresh - 1)
                }));
            }
        }
        Ok(())
    }

    fn free(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        for Return { pool, blocks, .. } in returns {
            let pool = &mut self.pools[pool_index(*pool)];
            pool.returned.extend_from_slice(blocks);
            self.used_bytes -= pool.block_bytes * blocks.len() as u64;
        }
        Ok(())
    }

    fn fits(&self, blocks: &[u32]) -> bool {
        let bytes: u128 = blocks
            .iter()
            .zip(&self.pools)
            .map(|(&blocks, pool)| u128::from(blocks) * u128::from(pool.block_bytes))
            .sum();
        bytes <= u128::from(self.share_bytes)
    }

    fn trim(&mut self) -> Result<(), Broken> {
        Ok(())
    }

    fn step_end(&mut self) -> Result<(), Broken> {
        Ok(())
    }

    fn mapped_bytes(&self) -> u64 {
        self.share_bytes
    }

    fn held_bytes(&self) -> u64 {
        self.used_bytes
    }

    fn shares_memory(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::tests::want;

    #[test]
    fn a_share_is_handed_out_to_the_last_block() {
        let mut cache = FixedSplit::new(10 * 64 + 63, &[64]);
        let mut out = Vec::new();
        assert!(cache.fits(&[10]) && !cache.fits(&[11]));
        cache
            .alloc(&[want(0, 1, 7), want(0, 2, 3)], &mut out)
            .expect("room for ten");
        assert_eq!(cache.held_bytes(), 640);
        let full = cache.alloc(&[want(0, 3, 1)], &mut out);
        assert!(matches!(full, Err(CacheError::Full)));

        let back = Return {
            pool: want(0, 1, 0).pool,
            owner: want(0, 1, 0).owner,
            blocks: &out[..2],
        };
        cache.free(&[back]).expect("never broken");
        cache
            .alloc(&[want(0, 3, 2)], &mut out)
            .expect("room for two");
        assert_eq!(cache.mapped_bytes(), 703);
    }

    #[test]
    fn a_want_beyond_64_bits_is_full_not_a_panic() {
        let mut cache = FixedSplit::new(u64::MAX, &[u64::MAX]);
        let full = cache.alloc(&[want(0, 1, 2)], &mut Vec::new());
        assert!(matches!(full, Err(CacheError::Full)));
        assert!(!cache.fits(&[2]));
    }
}
