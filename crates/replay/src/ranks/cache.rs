//! A model's cache on real ranks: the scheduler that decides, and the oracle that looks whether
//! what it decided is so.

mod recovery;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kvcached_integrations::{
    Background, ComposeError, DEFAULT_GRANULARITY, MappedPool, MapperConfig, Pool, PoolPolicy,
    ReserveBounds, RunChoice, Scheduler, StartError, compose_over,
};
use kvcached_manager::AllocError;
use kvcached_mapper::{
    Geometry, LayoutError, MapError, Mapper, PageId, PoolId, PoolSpec, Rank, RankMapper,
};
use kvcached_page_alloc::Reserve;
use kvcached_tp_ipc::Deadline;

use self::recovery::Turmoil;
use super::crew::Crew;
use super::device::OwnPool;
use super::message::{MappedSet, PageTotals, Setup};
use super::meters::{Meters, Timed};
use super::oracle::{Checked, RankPool, Stamp};
use super::trigger::Harmed;
use crate::{BlockId, Broken, CacheError, FixedSplit, KvCache, Return, Want, bytes_per_block};

/// How often the mapped sets of all ranks are compared, in steps of the model.
const COMPARE_EVERY: u64 = 512;

/// How often time passes for the demand that a reserve follows, in steps of the model: about ten
/// times a second. With every step, prompts that come once a second find no reserve any more.
const TICK_EVERY: u64 = 4;

/// How often, in turmoil, blocks are asked for again after every rank was said to be whole.
const ATTEMPTS: u32 = 5;

/// A model and what one rank of it needs.
#[derive(Debug, Clone)]
pub(crate) struct ModelPlan {
    pub(crate) pools: Vec<PoolPlan>,
    pub(crate) runs: RunChoice,
    pub(crate) verify: bool,
    /// What the rank's device has.
    pub(crate) memory_bytes: u64,
    /// What other models keep of it whatever happens.
    pub(crate) others_bytes: u64,
}

/// A pool of a model on one rank.
#[derive(Debug, Clone)]
pub(crate) struct PoolPlan {
    pub(crate) spec: PoolSpec,
    pub(crate) geometry: Geometry,
    pub(crate) reserve: Reserve,
    /// Bytes of a block over all layers and buffers, padding not counted.
    block_bytes: u64,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct RankedCache {
    /// Before the crew: it gives everything back on all ranks while they still are there.
    scheduler: Scheduler,
    crew: Crew,
    /// The pools of the rank in this process, if there is one.
    own: Vec<Arc<dyn RankPool>>,
    plan: ModelPlan,
    meters: Arc<Meters>,
    /// Stamps not yet sent, by pool.
    unsent: Vec<Vec<Stamp>>,
    held_bytes: u64,
    steps: u64,
    checked: Checked,
    divergent: BTreeSet<Rank>,
    /// Losses of content that the engine was told of.
    losses_told: u64,
    /// If ranks are to be struck.
    turmoil: Option<Turmoil>,
}

impl ModelPlan {
    /// The part of a plan that a rank process is told.
    pub(crate) fn of_setup(setup: &Setup) -> Result<Self, StartError> {
        let pools = setup.pools.iter().enumerate().map(|(index, pool)| {
            let (min, max) = pool.reserve;
            PoolPlan::new(pool.spec(), Reserve { min, max }.into()).map_err(|source| {
                StartError::Layout {
                    pool: pool_id(index),
                    source,
                }
            })
        });
        Ok(Self {
            pools: pools.collect::<Result<_, _>>()?,
            runs: setup.runs.into(),
            verify: setup.verify,
            memory_bytes: setup.memory_bytes,
            others_bytes: 0,
        })
    }

    /// See [`KvCache::fits`]: each pool has its null block besides, and other models have theirs.
    pub(crate) fn fits(&self, blocks: &[u32]) -> bool {
        let bytes: u128 = blocks
            .iter()
            .zip(&self.pools)
            .map(|(&blocks, pool)| {
                let geometry = &pool.geometry;
                // Uneven pages hold at least so many on average; the engine meets the rest.
                let per_page = geometry.max_blocks_per_page();
                u128::from((u64::from(blocks) + 1).div_ceil(u64::from(per_page)))
                    * u128::from(geometry.bundle_bytes())
            })
            .sum();
        bytes + u128::from(self.others_bytes) <= u128::from(self.memory_bytes)
    }

    /// What the model keeps of the device whatever happens: the pages of its null blocks.
    pub(crate) fn least_bytes(&self) -> u64 {
        self.pools
            .iter()
            .map(|pool| pool.geometry.bundle_bytes())
            .sum()
    }

    /// The model with a share of the memory for itself, in bookkeeping.
    pub(crate) fn static_share(&self, share_bytes: u64) -> FixedSplit {
        let block_bytes: Vec<u64> = self.pools.iter().map(|pool| pool.block_bytes).collect();
        FixedSplit::new(share_bytes, &block_bytes)
    }

    /// The page that a block lies on.
    pub(crate) fn page_of(&self, pool: PoolId, block: BlockId) -> PageId {
        let page = self.pools[usize::from(pool.0)].geometry.page_of(block.0);
        page.expect("a block that is handed out lies on a page")
    }

    /// Bytes of the pages that would do for blocks of so many bytes and the null blocks, if they
    /// were packed. Of models with several pools only the null blocks', since what their requests
    /// hold is not kept for others.
    pub(crate) fn packed_bytes(&self, held_bytes: u64) -> u64 {
        let [pool] = self.pools.as_slice() else {
            return self.least_bytes();
        };
        let blocks = held_bytes / pool.block_bytes + 1;
        let pages = blocks.div_ceil(u64::from(pool.geometry.max_blocks_per_page()));
        pages * pool.geometry.bundle_bytes()
    }

    pub(crate) fn block_bytes(&self, pool: PoolId, blocks: u64) -> u64 {
        self.pools[usize::from(pool.0)].block_bytes * blocks
    }
}

impl PoolPlan {
    /// A pool with bounds of its reserve.
    pub(crate) fn new(spec: PoolSpec, reserve: ReserveBounds) -> Result<Self, LayoutError> {
        let geometry = spec.resolve(DEFAULT_GRANULARITY)?;
        let reserve = reserve.pages(&geometry);
        let block_bytes = bytes_per_block(&spec);
        Ok(Self {
            spec,
            geometry,
            reserve,
            block_bytes,
        })
    }
}

impl RankedCache {
    /// A cache of one rank that nobody else has a part in.
    pub(crate) fn alone(plan: &ModelPlan, own: Vec<OwnPool>) -> Result<Self, StartError> {
        let meters = Arc::new(Meters::default());
        let mappers = own
            .iter()
            .map(|pool| meters.whole(Arc::<dyn RankMapper>::clone(&pool.mapper), false));
        let mappers = mappers.collect();
        Self::over(plan, mappers, own, Crew::default(), meters, None)
    }

    /// A cache of all the ranks of a topology: `own` is the one in this process, `crew` the others,
    /// which may be struck if there is to be `chaos`.
    pub(crate) fn led(
        plan: &ModelPlan,
        config: &MapperConfig,
        own: Vec<OwnPool>,
        crew: Crew,
        ready_timeout: Duration,
        chaos: bool,
    ) -> Result<Self, StartError> {
        let turmoil = chaos.then(Turmoil::default);
        let meters = Arc::new(Meters::default());
        let ready_by = Deadline::after(ready_timeout);
        let has_remotes = config.topology.remotes().next().is_some();
        let mappers = plan.pools.iter().enumerate().map(|(index, pool)| {
            let id = pool_id(index);
            let local = own
                .get(index)
                .map(|own| meters.local(Arc::clone(&own.mapper)));
            let mut mapper = compose_over(config, id, &pool.geometry, local, ready_by)
                .map_err(|source: ComposeError| StartError::Mapper { pool: id, source })?;
            if let Some(Turmoil { trigger, .. }) = &turmoil {
                let trigger = Arc::clone(trigger);
                mapper = Arc::new(Harmed {
                    inner: mapper,
                    trigger,
                });
            }
            Ok(meters.whole(mapper, has_remotes))
        });
        let mappers = mappers.collect::<Result<_, StartError>>()?;
        Self::over(plan, mappers, own, crew, meters, turmoil)
    }

    fn over(
        plan: &ModelPlan,
        mappers: Vec<Arc<dyn Mapper>>,
        own: Vec<OwnPool>,
        crew: Crew,
        meters: Arc<Meters>,
        turmoil: Option<Turmoil>,
    ) -> Result<Self, StartError> {
        let pools = plan
            .pools
            .iter()
            .zip(mappers)
            .enumerate()
            .map(|(index, (pool, mapper))| MappedPool {
                id: pool_id(index),
                geometry: pool.geometry.clone(),
                policy: PoolPolicy {
                    reserve: pool.reserve.into(),
                    ..PoolPolicy::default()
                },
                mapper,
                tensor_bases: Vec::new(),
            });
        // The same input is to give the same result, so nothing happens behind the engine's back.
        let scheduler = Scheduler::with_mappers(pools.collect(), plan.runs, Background::Off)?;
        Ok(Self {
            scheduler,
            crew,
            own: own.into_iter().map(|pool| pool.memory).collect(),
            plan: plan.clone(),
            meters,
            unsent: vec![Vec::new(); plan.pools.len()],
            held_bytes: 0,
            steps: 0,
            checked: Checked::default(),
            divergent: BTreeSet::new(),
            losses_told: 0,
            turmoil,
        })
    }

    /// What the oracle found so far.
    pub(crate) const fn checked(&self) -> &Checked {
        &self.checked
    }

    /// Ranks that were ever found to have other pages mapped than they should.
    pub(crate) const fn divergent(&self) -> &BTreeSet<Rank> {
        &self.divergent
    }

    /// Bytes of the pages that would do for what is handed out.
    pub(crate) fn packed_bytes(&self) -> u64 {
        self.plan.packed_bytes(self.held_bytes)
    }

    /// The ranks in processes of their own.
    pub(crate) const fn crew(&self) -> &Crew {
        &self.crew
    }

    /// Every measured call since this was last asked.
    pub(crate) fn take_calls(&self) -> Vec<Timed> {
        self.meters.take()
    }

    /// Pages and runs since the start.
    pub(crate) fn page_totals(&self) -> PageTotals {
        let mut totals = PageTotals::default();
        for pool in self.scheduler.pools() {
            let usage = pool.usage().pages;
            totals.add(PageTotals {
                mapped: usage.mapped_total,
                unmapped: usage.unmapped_total,
                runs: usage.runs_mapped_total,
            });
        }
        totals
    }

    /// Compares what is mapped on all ranks with each other, and with what the scheduler believes.
    pub(crate) fn compare_ranks(&mut self) -> Result<(), Broken> {
        // While something is in doubt, ranks may differ.
        self.settle()?;
        self.compare()
    }

    fn compare(&mut self) -> Result<(), Broken> {
        let mut ranks = self.crew.mapped().map_err(Broken::new)?;
        if !self.own.is_empty() {
            let sets = self
                .own
                .iter()
                .map(|pool| MappedSet::of(&pool.mapped()))
                .collect();
            ranks.insert(0, (Rank(0), sets));
        }
        let Some((_, first)) = ranks.first().cloned() else {
            return Ok(());
        };
        for (rank, sets) in ranks {
            let pages_agree = sets.iter().zip(self.scheduler.pools()).all(|(set, pool)| {
                let usage = pool.usage().pages;
                set.pages * pool.geometry().bundle_bytes() == usage.mapped_bytes
            });
            if sets != first || !pages_agree {
                tracing::error!(%rank, "has other pages mapped than it should");
                self.divergent.insert(rank);
            }
        }
        Ok(())
    }

    /// What pools do besides handing out and taking back. In turmoil, a rank that was struck is a
    /// reason to put it off, until every rank is back.
    fn tend(&mut self, act: impl Fn(&Pool) -> Result<(), MapError>) -> Result<(), Broken> {
        let result = self.scheduler.pools().iter().try_for_each(act);
        match result {
            Err(error) if self.turmoil.is_some() => {
                tracing::debug!(%error, "put off");
                self.recover()
            }
            result => result.map_err(Broken::new),
        }
    }

    fn stamps(returned: &Return<'_>) -> Vec<Stamp> {
        let owner = returned.owner.stamp();
        let stamps = returned.blocks.iter().map(|block| Stamp {
            block: block.0,
            owner,
        });
        stamps.collect()
    }

    fn take_back(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        for returned in returns {
            pool_of(&self.scheduler, returned.pool)
                .free(returned.blocks)
                .map_err(Broken::new)?;
            self.held_bytes -= self
                .plan
                .block_bytes(returned.pool, returned.blocks.len() as u64);
        }
        self.recover_if_struck()
    }

    fn send_stamps(&mut self) -> Result<(), Broken> {
        for (pool, stamps) in (0..).zip(&mut self.unsent) {
            if stamps.is_empty() {
                continue;
            }
            self.crew.stamp(pool, stamps).map_err(Broken::new)?;
            if let Some(own) = self.own.get(usize::from(pool)) {
                own.stamp(stamps).map_err(Broken::new)?;
            }
            stamps.clear();
        }
        Ok(())
    }

    fn check(&mut self, pool: PoolId, stamps: &[Stamp]) -> Result<(), Broken> {
        let own = self.own.get(usize::from(pool.0));
        let look = |part: &[Stamp]| match own {
            Some(own) => own.check(part).at(Rank(0)),
            None => Checked::default(),
        };
        self.crew
            .check(pool.0, stamps, &mut self.checked, look)
            .map_err(Broken::new)
    }
}

impl RankedCache {
    /// One call a pool: all its blocks or none, its pages mapped together. By pool.
    fn hand_out(&self, wants: &[Want]) -> Result<Vec<Vec<BlockId>>, CacheError> {
        let mut handed_out: Vec<Vec<BlockId>> = Vec::with_capacity(self.plan.pools.len());
        for pool in self.scheduler.pools() {
            let mine = wants.iter().filter(|want| want.pool == pool.id());
            let blocks: u32 = mine.map(|want| want.blocks).sum();
            if blocks == 0 {
                // Nothing was asked, so there is nothing to measure.
                handed_out.push(Vec::new());
                continue;
            }
            match self.meters.alloc(|| pool.alloc(blocks)) {
                Ok(blocks) => handed_out.push(blocks),
                Err(error) => {
                    self.give_back(&handed_out)?;
                    return match error {
                        AllocError::Full { .. } => Err(CacheError::Full),
                        broken => Err(Broken::new(broken).into()),
                    };
                }
            }
        }
        Ok(handed_out)
    }

    fn give_back(&self, handed_out: &[Vec<BlockId>]) -> Result<(), Broken> {
        for (pool, blocks) in self.scheduler.pools().iter().zip(handed_out) {
            pool.free(blocks).map_err(Broken::new)?;
        }
        Ok(())
    }
}

impl KvCache for RankedCache {
    fn alloc(&mut self, wants: &[Want], out: &mut Vec<BlockId>) -> Result<(), CacheError> {
        let mut result = self.hand_out(wants);
        if self.turmoil.is_some() {
            let mut attempts = 0;
            while matches!(result, Err(CacheError::Broken(_))) && attempts < ATTEMPTS {
                attempts += 1;
                self.recover()?;
                result = self.hand_out(wants);
            }
            self.recover_if_struck()?;
        }
        if self.contents_lost() > self.losses_told {
            if let Ok(handed_out) = &result {
                self.give_back(handed_out)?;
            }
            return Err(CacheError::Lost);
        }
        let mut handed_out: Vec<_> = result?.into_iter().map(Vec::into_iter).collect();
        for want in wants {
            self.held_bytes += self.plan.block_bytes(want.pool, u64::from(want.blocks));
            let pool = usize::from(want.pool.0);
            let owner = want.owner.stamp();
            for block in handed_out[pool].by_ref().take(want.blocks as usize) {
                out.push(block);
                if self.plan.verify {
                    self.unsent[pool].push(Stamp {
                        block: block.0,
                        owner,
                    });
                }
            }
        }
        Ok(())
    }

    fn free(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        self.recover_if_struck()?;
        self.send_stamps()?;
        if self.plan.verify {
            for returned in returns {
                self.check(returned.pool, &Self::stamps(returned))?;
            }
        }
        self.take_back(returns)
    }

    fn losses(&mut self) -> Result<u64, Broken> {
        self.recover_if_struck()?;
        self.losses_told = self.contents_lost();
        Ok(self.losses_told)
    }

    fn drop_lost(&mut self, returns: &[Return<'_>]) -> Result<(), Broken> {
        self.recover_if_struck()?;
        self.send_stamps()?;
        // Nobody answers a stamp, and here no check follows: without any answer, memory could be
        // taken from under a stamp that is still on its way.
        self.compare()?;
        if let Some(turmoil) = &mut self.turmoil {
            let blocks: usize = returns.iter().map(|returned| returned.blocks.len()).sum();
            turmoil.faults.blocks_lost += blocks as u64;
        }
        self.take_back(returns)
    }

    fn fits(&self, blocks: &[u32]) -> bool {
        self.plan.fits(blocks)
    }

    fn trim(&mut self) -> Result<(), Broken> {
        self.recover_if_struck()?;
        self.send_stamps()?;
        self.tend(|pool| pool.trim().map(drop))?;
        self.recover_if_struck()
    }

    fn step_end(&mut self) -> Result<(), Broken> {
        self.recover_if_struck()?;
        self.send_stamps()?;
        let ticks = self.steps.is_multiple_of(TICK_EVERY);
        self.tend(|pool| {
            if ticks {
                pool.tick();
            }
            while pool.replenish()?.more {}
            Ok(())
        })?;
        self.recover_if_struck()?;
        self.steps += 1;
        if self.plan.verify && self.steps.is_multiple_of(COMPARE_EVERY) {
            self.compare_ranks()?;
        }
        Ok(())
    }

    fn mapped_bytes(&self) -> u64 {
        self.scheduler
            .pools()
            .iter()
            .map(|pool| pool.usage().pages.mapped_bytes)
            .sum()
    }

    fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    fn goes_with(&self, pool: PoolId, block: BlockId) -> PageId {
        let run = pool_of(&self.scheduler, pool).run_of(block);
        run.expect("a block that is handed out is backed")
    }
}

fn pool_of(scheduler: &Scheduler, pool: PoolId) -> &Pool {
    scheduler
        .pool(pool)
        .expect("the engine asks for the pools that the model has")
}

pub(crate) fn pool_id(index: usize) -> PoolId {
    PoolId(u16::try_from(index).expect("a model has one pool or two"))
}

#[cfg(test)]
mod tests;
