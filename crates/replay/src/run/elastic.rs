//! The elastic side of a replay: one cache for each model, whoever decides.

use kvcached_mapper::{PageId, PoolId, Rank};

use crate::chaos::Fault;
use crate::ranks::{AutonomousCache, RankedCache, Timed};
use crate::{BlockId, Broken, CacheError, KvCache, ReplayError, Return, Want};

use super::Comparison;

/// A model's cache on real ranks, whoever decides.
#[derive(Debug)]
pub(super) enum ElasticCache {
    Led(Box<RankedCache>),
    Autonomous(Box<AutonomousCache>),
}

impl ElasticCache {
    fn cache(&self) -> &dyn KvCache {
        match self {
            Self::Led(cache) => &**cache,
            Self::Autonomous(cache) => &**cache,
        }
    }

    fn cache_mut(&mut self) -> &mut dyn KvCache {
        match self {
            Self::Led(cache) => &mut **cache,
            Self::Autonomous(cache) => &mut **cache,
        }
    }

    /// Bytes of the pages that would do for what is handed out.
    pub(super) fn packed_bytes(&self) -> u64 {
        match self {
            Self::Led(cache) => cache.packed_bytes(),
            Self::Autonomous(cache) => cache.packed_bytes(),
        }
    }

    /// Every measured call since this was last asked.
    pub(super) fn take_calls(&mut self) -> Vec<Timed> {
        match self {
            Self::Led(cache) => cache.take_calls(),
            Self::Autonomous(cache) => cache.take_calls(),
        }
    }

    /// Ranks in processes of their own, and the ids of those.
    pub(super) fn processes(&self) -> Vec<(Rank, u32)> {
        let crew = match self {
            Self::Led(cache) => cache.crew(),
            Self::Autonomous(cache) => cache.crew(),
        };
        let id = |id: i32| u32::try_from(id).unwrap_or_default();
        crew.processes()
            .map(|(rank, process)| (rank, id(process.as_raw())))
            .collect()
    }

    /// A fault befalls this model.
    pub(super) fn befall(&self, fault: Fault) {
        match self {
            Self::Led(cache) => cache.befall(fault),
            // Nobody plans one: a rank that dies takes its scheduler with it.
            Self::Autonomous(_) => {}
        }
    }

    /// Adds what this model's ranks came to, and ends them.
    pub(super) fn conclude(self, comparison: &mut Comparison) -> Result<(), ReplayError> {
        let divergent = match self {
            Self::Led(mut cache) => {
                cache
                    .compare_ranks()
                    .map_err(|source| ReplayError::Broken {
                        done: comparison.elastic.total.completed,
                        requests: comparison.elastic.total.requests,
                        source,
                    })?;
                if let (Some(all), Some(mine)) = (&mut comparison.faults, cache.take_faults()) {
                    all.add(mine);
                }
                comparison.pages.add(cache.page_totals());
                comparison.calls.add(&cache.take_calls());
                comparison.checked.merge(cache.checked().clone());
                cache.divergent().len()
            }
            Self::Autonomous(mut cache) => {
                let (finished, divergent) = cache.finish()?;
                comparison.calls.add(&cache.take_calls());
                if let Some(first) = finished.first() {
                    comparison.pages.add(first.pages);
                }
                for rank in finished {
                    comparison.checked.merge(rank.checked);
                }
                divergent
            }
        };
        comparison.ranks_divergent += u32::try_from(divergent).unwrap_or(u32::MAX);
        Ok(())
    }
}

impl KvCache for ElasticCache {
    fn alloc(&mut self, wants: &[Want], out: &mut Vec<BlockId>) -> Result<(), CacheError> {
        self.cache_mut().alloc(wants, out)
    }

    fn free(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        self.cache_mut().free(returns)
    }

    fn losses(&mut self) -> Result<u64, Broken> {
        self.cache_mut().losses()
    }

    fn drop_lost(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        self.cache_mut().drop_lost(returns)
    }

    fn fits(&self, blocks: &[u32]) -> bool {
        self.cache().fits(blocks)
    }

    fn trim(&mut self) -> Result<(), Broken> {
        self.cache_mut().trim()
    }

    fn step_end(&mut self) -> Result<(), Broken> {
        self.cache_mut().step_end()
    }

    fn mapped_bytes(&self) -> u64 {
        self.cache().mapped_bytes()
    }

    fn held_bytes(&self) -> u64 {
        self.cache().held_bytes()
    }

    fn goes_with(&self, pool: PoolId, block: BlockId) -> PageId {
        self.cache().goes_with(pool, block)
    }
}
