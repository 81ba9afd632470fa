//! The KV memory of one model as the serving engine sees it: blocks handed out and returned.
//!
//! Here is the trait, and two implementations without any memory: [`FixedSplit`], the static
//! split that every replay is compared with, and [`ElasticModel`], the elastic pool as pure
//! bookkeeping, with which the engine is tested and service times are chosen. The elastic cache
//! that maps real memory on real ranks is another implementation.

mod elastic;
mod fixed;

use std::{error::Error, fmt};

use kvcached_manager::BlockId;
use kvcached_mapper::{PageId, PoolId};
use thiserror::Error;

pub use elastic::{ElasticModel, ElasticPool, SharedMemory};
pub use fixed::FixedSplit;

/// KV memory of one model: one value per model, over all its pools and ranks.
///
/// # What the caller owes
///
/// - Blocks come back exactly once, to the pool they are from, in the name of the owner they were
///   handed to.
/// - [`step_end`](Self::step_end) follows the hand-outs and returns of each step.
/// - [`losses`](Self::losses) is asked before anything is taken for computed. After a loss, all that
///   was handed out until then comes back through [`drop_lost`](Self::drop_lost).
///
/// # What the implementer owes
///
/// - A batch is handed out whole or not at all. [`CacheError::Full`] means full right now and is
///   a normal answer; [`Broken`] ends the replay.
/// - A block has one owner at a time.
/// - Work may be put off until `step_end`, so that stamping and verifying blocks costs one round
///   over the ranks a step: but `Full` is answered only after everything put off was done, and a
///   block is verified before it is handed out again.
pub trait KvCache: fmt::Debug {
    /// Hands out the blocks of all `wants`, appended to `out` in the order of `wants`.
    ///
    /// # Errors
    /// On `Err`, nothing was handed out and `out` is as before. [`CacheError::Lost`] if content was
    /// lost and [`losses`](Self::losses) has not told so yet.
    fn alloc(&mut self, wants: &[Want], out: &mut Vec<BlockId>) -> Result<(), CacheError>;

    /// Takes blocks back.
    ///
    /// # Errors
    /// If their content is not what it should be, or the cache is broken.
    fn free(&mut self, returns: &[Return<'_>]) -> Result<(), Broken>;

    /// How often so far content was lost, such as by the death of a rank: after each time, nothing
    /// that was written before can be relied on. Looks first whether everything is still there, and
    /// waits until it can go on. Zero for a cache that loses nothing.
    ///
    /// # Errors
    /// If the cache is broken, for good.
    fn losses(&mut self) -> Result<u64, Broken> {
        Ok(0)
    }

    /// Takes blocks back whose content was lost, and which are therefore not looked at.
    ///
    /// # Errors
    /// If the cache is broken.
    fn drop_lost(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        self.free(returns)
    }

    /// Could so many blocks, one number a pool, ever be handed out together, with nobody else
    /// asking? A request for which the answer is no is refused at once.
    fn fits(&self, blocks: &[u32]) -> bool;

    /// Lets go of memory that is backed but idle, because another model found none left.
    ///
    /// # Errors
    /// If the cache is broken.
    fn trim(&mut self) -> Result<(), Broken>;

    /// All hand-outs and returns of this step have been made.
    ///
    /// # Errors
    /// If the cache is broken, or a block's content is not what it should be.
    fn step_end(&mut self) -> Result<(), Broken>;

    /// Bytes on each rank that this model keeps from others, used or not.
    fn mapped_bytes(&self) -> u64;

    /// Bytes on each rank in blocks that are handed out, padding not counted.
    fn held_bytes(&self) -> u64;

    /// A name for the memory that can go only together with that of `block`, which is handed out:
    /// what to clear if blocks are evicted. By itself, every block is on its own.
    fn goes_with(&self, pool: PoolId, block: BlockId) -> PageId {
        let _ = pool;
        PageId(block.0)
    }

    /// Does what other models give back help this one?
    fn shares_memory(&self) -> bool {
        true
    }
}

/// Blocks that one owner needs from one pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want {
    /// The pool: its index in the model's list.
    pub pool: PoolId,
    /// Whose they will be.
    pub owner: Owner,
    /// How many.
    pub blocks: u32,
}

/// Blocks that one owner returns to one pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Return<'a> {
    /// The pool they are from.
    pub pool: PoolId,
    /// To whom they were handed out.
    pub owner: Owner,
    /// The blocks.
    pub blocks: &'a [BlockId],
}

/// To whom a block belongs; different at every hand-out, so that a content oracle can tell a block
/// from its own past.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// Who.
    pub holder: Holder,
    /// Which time: a request that gave up its blocks and is admitted again, or a prefix that was
    /// dropped and is needed again, is another owner.
    pub generation: u32,
}

/// Who holds blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holder {
    /// One request, by its index in the trace.
    Request(u32),
    /// All running requests of one model that share this prefix, by its hash id.
    Prefix(u64),
}

/// Why a cache does not hand out what was asked.
#[derive(Debug, Error)]
pub enum CacheError {
    /// Not now: ask again when something was freed.
    #[error("the KV cache is full")]
    Full,
    /// Not before everything that was handed out has been dropped: its content was lost.
    #[error("the content of the KV cache was lost")]
    Lost,
    /// Never again.
    #[error(transparent)]
    Broken(#[from] Broken),
}

/// A cache that cannot go on: a rank that is gone or diverged, content that is not what was
/// written, bookkeeping that does not agree.
#[derive(Debug, Error)]
#[error("the KV cache is broken")]
pub struct Broken {
    /// What happened.
    #[source]
    pub source: Box<dyn Error + Send + Sync>,
}

impl Broken {
    /// What happened, as the cache's own error.
    pub fn new(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self {
            source: source.into(),
        }
    }
}

impl Owner {
    /// The owner as two words that differ from those of every other owner in the same model: what
    /// an oracle writes into a block.
    #[must_use]
    pub const fn stamp(self) -> [u64; 2] {
        let (kind, id) = match self.holder {
            Holder::Request(request) => (1, request as u64),
            Holder::Prefix(hash) => (2, hash),
        };
        [id, (kind << 32) | self.generation as u64]
    }
}

/// Index of a pool in its model's list.
fn pool_index(pool: PoolId) -> usize {
    usize::from(pool.0)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::{BTreeMap, HashSet};

    use proptest::prelude::*;

    use super::*;

    /// A cache that checks what the caller owes, and that no block has two owners.
    #[derive(Debug)]
    pub(crate) struct Checked<C> {
        pub(crate) inner: C,
        owners: BTreeMap<(PoolId, BlockId), Owner>,
        seen: HashSet<(PoolId, Owner)>,
        /// Greatest number of blocks that were handed out at once.
        pub(crate) peak_blocks: usize,
        /// `alloc` calls that were answered with `Full`.
        pub(crate) refused: u32,
        dirty: bool,
    }

    impl<C: KvCache> Checked<C> {
        pub(crate) fn new(inner: C) -> Self {
            Self {
                inner,
                owners: BTreeMap::new(),
                seen: HashSet::new(),
                peak_blocks: 0,
                refused: 0,
                dirty: false,
            }
        }

        pub(crate) fn blocks(&self) -> usize {
            self.owners.len()
        }

        pub(crate) fn owners(&self) -> impl Iterator<Item = Owner> {
            self.owners.values().copied()
        }

        pub(crate) fn is_settled(&self) -> bool {
            !self.dirty
        }

        fn forget(&mut self, returns: &[Return<'_>]) {
            for Return {
                pool,
                owner,
                blocks,
            } in returns
            {
                for block in *blocks {
                    let found = self.owners.remove(&(*pool, *block));
                    assert_eq!(found, Some(*owner), "{block:?} is returned by its owner");
                }
            }
            self.dirty = true;
        }
    }

    impl<C: KvCache> KvCache for Checked<C> {
        fn alloc(&mut self, wants: &[Want], out: &mut Vec<BlockId>) -> Result<(), CacheError> {
            let before = out.clone();
            match self.inner.alloc(wants, out) {
                Err(error) => {
                    assert_eq!(*out, before, "nothing is handed out on Err");
                    self.refused += 1;
                    return Err(error);
                }
                Ok(()) => assert_eq!(out[..before.len()], before, "appended"),
            }
            self.dirty = true;
            let mut blocks = out[before.len()..].iter();
            for want in wants {
                for _ in 0..want.blocks {
                    let block = *blocks.next().expect("as many blocks as wanted");
                    let old = self.owners.insert((want.pool, block), want.owner);
                    assert_eq!(old, None, "{block:?} has two owners");
                }
                self.seen.insert((want.pool, want.owner));
            }
            assert_eq!(blocks.next(), None, "no more blocks than wanted");
            self.peak_blocks = self.peak_blocks.max(self.owners.len());
            Ok(())
        }

        fn free(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
            self.forget(returns);
            self.inner.free(returns)
        }

        fn losses(&mut self) -> Result<u64, Broken> {
            self.inner.losses()
        }

        fn drop_lost(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
            self.forget(returns);
            self.inner.drop_lost(returns)
        }

        fn fits(&self, blocks: &[u32]) -> bool {
            self.inner.fits(blocks)
        }

        fn trim(&mut self) -> Result<(), Broken> {
            self.inner.trim()
        }

        fn step_end(&mut self) -> Result<(), Broken> {
            self.dirty = false;
            self.inner.step_end()
        }

        fn mapped_bytes(&self) -> u64 {
            self.inner.mapped_bytes()
        }

        fn held_bytes(&self) -> u64 {
            self.inner.held_bytes()
        }

        fn goes_with(&self, pool: PoolId, block: BlockId) -> PageId {
            assert!(self.owners.contains_key(&(pool, block)), "it is handed out");
            self.inner.goes_with(pool, block)
        }

        fn shares_memory(&self) -> bool {
            self.inner.shares_memory()
        }
    }

    pub(crate) fn want(pool: u16, request: u32, blocks: u32) -> Want {
        let owner = Owner {
            holder: Holder::Request(request),
            generation: 0,
        };
        Want {
            pool: PoolId(pool),
            owner,
            blocks,
        }
    }

    #[test]
    fn stamps_of_different_owners_differ() {
        let owners = [
            Owner {
                holder: Holder::Request(1),
                generation: 0,
            },
            Owner {
                holder: Holder::Request(1),
                generation: 1,
            },
            Owner {
                holder: Holder::Request(2),
                generation: 0,
            },
            Owner {
                holder: Holder::Prefix(1),
                generation: 0,
            },
            Owner {
                holder: Holder::Prefix(1 << 32 | 1),
                generation: 0,
            },
        ];
        let stamps: HashSet<_> = owners.iter().map(|owner| owner.stamp()).collect();
        assert_eq!(stamps.len(), owners.len());
    }

    /// Hand-outs and returns in any order, on two caches that share memory.
    #[derive(Debug, Clone)]
    enum Op {
        Alloc { cache: usize, counts: [u32; 2] },
        Free { nth: usize },
        Trim { cache: usize },
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            4 => (0_usize..2, 0_u32..9, 0_u32..3)
                .prop_map(|(cache, a, b)| Op::Alloc { cache, counts: [a, b] }),
            3 => any::<usize>().prop_map(|nth| Op::Free { nth }),
            1 => (0_usize..2).prop_map(|cache| Op::Trim { cache }),
        ];
        prop::collection::vec(op, 0..120)
    }

    fn run<C: KvCache>(
        mut caches: Vec<Checked<C>>,
        ops: Vec<Op>,
        after_each: impl Fn(&[Checked<C>]),
    ) -> Vec<Checked<C>> {
        let mut handed_out: Vec<(usize, Vec<Want>, Vec<BlockId>)> = Vec::new();
        let give_back =
            |caches: &mut [Checked<C>],
             (cache, wants, blocks): (usize, Vec<Want>, Vec<BlockId>)| {
                let mut rest = blocks.as_slice();
                let returns: Vec<_> = wants
                    .iter()
                    .map(|want| {
                        let (mine, others) = rest.split_at(want.blocks as usize);
                        rest = others;
                        Return {
                            pool: want.pool,
                            owner: want.owner,
                            blocks: mine,
                        }
                    })
                    .collect();
                caches[cache].free(&returns).expect("not broken");
            };
        for (nth, op) in (0..).zip(ops) {
            match op {
                Op::Alloc { cache, counts } => {
                    let wants = vec![want(0, nth, counts[0]), want(1, nth, counts[1])];
                    let mut out = Vec::new();
                    match caches[cache].alloc(&wants, &mut out) {
                        Ok(()) => {
                            assert!(caches[cache].fits(&counts), "what was handed out fits");
                            handed_out.push((cache, wants, out));
                        }
                        Err(CacheError::Full) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
                Op::Free { nth } if !handed_out.is_empty() => {
                    let entry = handed_out.swap_remove(nth % handed_out.len());
                    give_back(&mut caches, entry);
                }
                Op::Free { .. } => {}
                Op::Trim { cache } => caches[cache].trim().expect("not broken"),
            }
            after_each(&caches);
        }
        for entry in handed_out {
            give_back(&mut caches, entry);
        }
        caches
    }

    proptest! {
        #[test]
        fn a_static_share_is_never_exceeded_and_comes_back_whole(ops in ops()) {
            let share = |_| Checked::new(FixedSplit::new(1_000, &[64, 300]));
            let caches = run((0..2).map(share).collect(), ops, |caches| {
                for cache in caches {
                    assert!(cache.held_bytes() <= 1_000);
                    assert_eq!(cache.mapped_bytes(), 1_000, "all of it, always");
                }
            });
            for cache in caches {
                prop_assert_eq!((cache.blocks(), cache.held_bytes()), (0, 0));
            }
        }

        #[test]
        fn shared_memory_is_never_exceeded_and_comes_back_whole(
            ops in ops(),
            keep_idle_pages in 0_u32..3,
        ) {
            let memory = SharedMemory::new(1_500);
            let pools = [
                ElasticPool { block_bytes: 60, page_bytes: 256, blocks_per_page: 4 },
                ElasticPool { block_bytes: 300, page_bytes: 320, blocks_per_page: 1 },
            ];
            let cache =
                |_| Checked::new(ElasticModel::new(memory.clone(), &pools, keep_idle_pages));
            let caches = run((0..2).map(cache).collect(), ops, |caches| {
                let mapped: u64 = caches.iter().map(KvCache::mapped_bytes).sum();
                assert_eq!(mapped + memory.free_bytes(), 1_500, "no page is lost or shared");
                assert!(caches.iter().all(|c| c.held_bytes() <= c.mapped_bytes()));
            });
            for mut cache in caches {
                prop_assert_eq!((cache.blocks(), cache.held_bytes()), (0, 0));
                prop_assert!(cache.mapped_bytes() <= u64::from(keep_idle_pages) * (256 + 320));
                cache.trim().expect("not broken");
                prop_assert_eq!(cache.mapped_bytes(), 0);
            }
            prop_assert_eq!(memory.free_bytes(), 1_500);
        }
    }
}
