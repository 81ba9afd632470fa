//! Staggered decode at the level of blocks, and what a pool still backs when it is over.
//!
//! The [engine](crate::Engine) keeps prompts in parts of 512 tokens; engines that are served keep
//! and evict single blocks, those of answers too. Here is that, against one pool, without time: a
//! number of sequences that run at once, each growing by a token a step, prefixes that half of them
//! share, and a bounded cache of what nobody uses any more.

use std::collections::BTreeMap;

use kvcached_manager::{AllocError, BlockManager, EvictionQueue};

use crate::BlockId;
use crate::workload::Draws;

/// How staggered decode against one pool goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleFootprint {
    /// Requests from beginning to end.
    pub requests: u32,
    /// How many run at once, as long as there are more.
    pub at_once: u32,
    /// The same seed gives the same run.
    pub seed: u64,
    /// Blocks kept of what nobody uses any more.
    pub cached_blocks: u32,
    /// How many younger blocks may be evicted before an older one, so that pages become empty: see
    /// [`EvictionQueue`]. 0 is plain LRU.
    pub window: u32,
}

/// What is left when the last sequence has ended and the pool was trimmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Pages that are still backed.
    pub backed_pages: u32,
    /// Pages that would do for the cached blocks and the null block, were they packed.
    pub floor_pages: u32,
    /// Blocks in the cache.
    pub cached_blocks: u32,
    /// Blocks of shared prefixes that were asked for.
    pub lookups: u64,
    /// Of these, found in the cache or with a running sequence.
    pub hits: u64,
}

const BLOCK_TOKENS: u32 = 16;
const HOT_PREFIXES: u32 = 16;
const HOT_BLOCKS: u32 = 8;

/// What a block holds: a block of a hot prefix, or one that nobody asks for again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Content {
    Hot { prefix: u32, nth: u32 },
    Own { request: u32, nth: u32 },
}

#[derive(Debug)]
struct Running {
    request: u32,
    /// What its blocks hold, in order.
    contents: Vec<Content>,
    tokens: u32,
    left_tokens: u32,
}

#[derive(Debug)]
struct Cache<'a> {
    pool: &'a mut BlockManager,
    blocks: BTreeMap<Content, Cached>,
    queue: EvictionQueue,
    contents: BTreeMap<BlockId, Content>,
    most: usize,
    lookups: u64,
    hits: u64,
}

#[derive(Debug, Clone, Copy)]
struct Cached {
    block: BlockId,
    users: u32,
}

impl IdleFootprint {
    /// 1200 requests, 16 at a time, 1000 blocks cached, and as much of a window.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self {
            requests: 1_200,
            at_once: 16,
            seed,
            cached_blocks: 1_000,
            window: 1_000,
        }
    }

    /// Runs it, and leaves the cached blocks in the pool. Half of the requests begin with one of 16
    /// prefixes of 8 blocks and have 64 tokens of their own, the others 192 to 1024 tokens of their
    /// own; each generates 16 to 256. Answers are cached like prompts, block by block; of a sequence
    /// that ends, the last block is the first to go.
    ///
    /// # Errors
    /// What the pool answered: it has to have room for the cache and 80 blocks of each sequence.
    pub fn run(&self, pool: &mut BlockManager) -> Result<Footprint, AllocError> {
        let mut draws = Draws::new(self.seed, 3);
        let mut cache = Cache::new(pool, self);
        let mut running: Vec<Running> = Vec::new();
        let mut started = 0;
        while started < self.requests || !running.is_empty() {
            while started < self.requests && running.len() < self.at_once as usize {
                running.push(Running::draw(&mut draws, started));
                started += 1;
                if let Some(begun) = running.last() {
                    cache.hold(&begun.contents)?;
                }
            }
            for sequence in &mut running {
                if let Some(content) = sequence.grow() {
                    cache.hold(&[content])?;
                }
            }
            for ended in running.extract_if(.., |sequence| sequence.left_tokens == 0) {
                cache.let_go(&ended);
            }
        }
        cache.conclude()
    }
}

impl Footprint {
    /// Backed pages over the packed floor.
    #[must_use]
    pub fn over_floor(&self) -> f64 {
        f64::from(self.backed_pages) / f64::from(self.floor_pages.max(1))
    }

    /// The part of the shared blocks that was found.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "some thousand lookups")]
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.lookups.max(1) as f64
    }
}

impl Running {
    fn draw(draws: &mut Draws, request: u32) -> Self {
        let is_hot = draws.below(2) == 0;
        let prefix = draws.below(HOT_PREFIXES);
        let cold_tokens = 192 + draws.below(833);
        let left_tokens = 16 + draws.below(241);
        let (shared, own_tokens) = match is_hot {
            true => (HOT_BLOCKS, 64),
            false => (0, cold_tokens),
        };
        let tokens = shared * BLOCK_TOKENS + own_tokens;
        let hot = (0..shared).map(|nth| Content::Hot { prefix, nth });
        let own = (shared..tokens.div_ceil(BLOCK_TOKENS)).map(|nth| Content::Own { request, nth });
        Self {
            request,
            contents: hot.chain(own).collect(),
            tokens,
            left_tokens,
        }
    }

    /// Generates a token; answers the block that it begins, if it begins one.
    fn grow(&mut self) -> Option<Content> {
        self.left_tokens -= 1;
        let nth = self.tokens / BLOCK_TOKENS;
        let begins = self.tokens.is_multiple_of(BLOCK_TOKENS);
        self.tokens += 1;
        let content = Content::Own {
            request: self.request,
            nth,
        };
        if begins {
            self.contents.push(content);
        }
        begins.then_some(content)
    }
}

impl<'a> Cache<'a> {
    fn new(pool: &'a mut BlockManager, run: &IdleFootprint) -> Self {
        Self {
            pool,
            blocks: BTreeMap::new(),
            queue: EvictionQueue::new(run.window),
            contents: BTreeMap::new(),
            most: run.cached_blocks as usize,
            lookups: 0,
            hits: 0,
        }
    }

    /// One more sequence uses a block of each of `contents`; those that are not here are handed out
    /// in one call.
    fn hold(&mut self, contents: &[Content]) -> Result<(), AllocError> {
        let mut missing = Vec::new();
        for content in contents {
            let is_shared = matches!(content, Content::Hot { .. });
            self.lookups += u64::from(is_shared);
            match self.blocks.get_mut(content) {
                Some(cached) => {
                    self.hits += u64::from(is_shared);
                    cached.users += 1;
                    let block = cached.block;
                    self.use_block(block);
                }
                None => missing.push(*content),
            }
        }
        let count = u32::try_from(missing.len()).unwrap_or(u32::MAX);
        let blocks = self.pool.alloc(count)?;
        for (content, block) in missing.into_iter().zip(blocks) {
            self.blocks.insert(content, Cached { block, users: 1 });
            self.contents.insert(block, content);
            self.use_block(block);
        }
        Ok(())
    }

    fn use_block(&mut self, block: BlockId) {
        let run = self.pool.run_of(block);
        self.queue
            .hold(block, run.expect("a block that is handed out is backed"));
    }

    /// A sequence has ended. What nobody else uses may be evicted, and is, as far as it is too much.
    fn let_go(&mut self, ended: &Running) {
        for content in ended.contents.iter().rev() {
            if let Some(cached) = self.blocks.get_mut(content) {
                cached.users -= 1;
                if cached.users == 0 {
                    self.queue.rest(cached.block);
                }
            }
        }
        while self.queue.idle() > self.most {
            let Some(block) = self.queue.evict() else {
                break;
            };
            if let Some(content) = self.contents.remove(&block) {
                self.blocks.remove(&content);
            }
            self.pool
                .free(&[block])
                .expect("a cached block is handed out");
        }
    }

    fn conclude(self) -> Result<Footprint, AllocError> {
        self.pool.trim()?;
        let pages = self.pool.usage().pages;
        let cached_blocks = u32::try_from(self.queue.idle()).unwrap_or(u32::MAX);
        Ok(Footprint {
            backed_pages: pages.used + pages.warm + pages.busy + pages.quarantined,
            floor_pages: (cached_blocks + 1).div_ceil(self.pool.space().max_blocks_per_page()),
            cached_blocks,
            lookups: self.lookups,
            hits: self.hits,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::sync::Arc;

    use kvcached_manager::BlockSpace;
    use kvcached_mapper::testing::RecordingMapper;
    use kvcached_page_alloc::{PageAllocator, PageAllocatorConfig, RunPolicy};

    use super::*;

    fn run(blocks_per_page: u32, staggered: &IdleFootprint) -> Footprint {
        const PAGE: u64 = 2 << 20;
        let pages = 4_096 / blocks_per_page;
        let config = PageAllocatorConfig {
            // As a contiguous pool of an 8B model has by default.
            runs: RunPolicy {
                share: NonZeroU32::new(8).unwrap(),
                ..RunPolicy::up_to(NonZeroU32::new(16).unwrap())
            },
            ..PageAllocatorConfig::new(pages, PAGE)
        };
        let allocator = PageAllocator::new(config, Arc::new(RecordingMapper::new(pages))).unwrap();
        let space = BlockSpace::new(pages, PAGE, PAGE / u64::from(blocks_per_page)).unwrap();
        let mut pool = BlockManager::new(space, Arc::new(allocator)).unwrap();
        let footprint = staggered.run(&mut pool).unwrap();
        assert_eq!(
            pool.usage().blocks_used,
            footprint.cached_blocks,
            "nothing else is left"
        );
        footprint
    }

    const SEEDS: std::ops::Range<u64> = 0..4;

    #[test]
    fn an_idle_pool_backs_at_most_a_tenth_more_than_its_cache_needs() {
        for blocks_per_page in [2, 16, 64] {
            let all: Vec<_> = SEEDS
                .map(|seed| run(blocks_per_page, &IdleFootprint::new(seed)))
                .collect();
            let mean = all.iter().map(Footprint::over_floor).sum::<f64>() / all.len() as f64;
            assert!(mean <= 1.1, "{blocks_per_page} blocks a page: {mean}");
            assert!(
                all.iter().all(|one| one.cached_blocks == 1_000),
                "the cache is full"
            );
        }
    }

    #[test]
    fn clearing_pages_costs_no_hits() {
        for seed in SEEDS {
            let page_aware = IdleFootprint::new(seed);
            let lru = IdleFootprint {
                window: 0,
                ..page_aware.clone()
            };
            let (page_aware, lru) = (run(64, &page_aware), run(64, &lru));
            assert!(
                page_aware.hit_rate() >= lru.hit_rate() - 0.01,
                "{} against {}",
                page_aware.hit_rate(),
                lru.hit_rate()
            );
            assert!(
                lru.over_floor() > 1.4,
                "what there is to gain: {}",
                lru.over_floor()
            );
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_footprint() {
        let short = IdleFootprint {
            requests: 100,
            ..IdleFootprint::new(9)
        };
        assert_eq!(run(16, &short), run(16, &short));
        assert_ne!(
            run(16, &short),
            run(16, &IdleFootprint { seed: 8, ..short })
        );
    }
}
