//! The process that decides: every pool of one engine, and the thread that keeps their reserves.
//!
//! A scheduler exists only when all of its ranks can map and every pool has its null block; there
//! is no half-started one to call. Dropping it stops the thread, gives every page back on every
//! rank, and lets go of connections, addresses and memory.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvcached_manager::{Limit, LimitError, NewError};
use kvcached_mapper::{
    Epoch, Epochs, Geometry, LayoutError, LocalMapper, MapError, Mapper, NotReady, PoolId,
    PoolSpec, Readiness,
};
use kvcached_page_alloc::{Turns, Unmapping};
use kvcached_tp_ipc::{Deadline, InstanceName, Topology};
use kvcached_vmm::{Driver, Recycler};
use thiserror::Error;

use crate::compose::{ComposeError, MapperConfig, compose, list};
use crate::config::{Config, ReserveBounds, RunChoice};
use crate::keeper::{Keeper, Kept};
use crate::pool::Pool;

/// Granularity that GPUs have, for a coordinator that has none of its own to ask.
pub const DEFAULT_GRANULARITY: u64 = 2 << 20;

/// How often the pools are looked at when nobody wakes their thread: memory that a neighbour gave
/// back does not announce itself. The reserve then covers what was asked for within such a time.
const DEFAULT_EVERY: Duration = Duration::from_millis(200);

/// The pools of one engine, ready for use.
#[derive(Debug)]
pub struct Scheduler {
    /// First, so that it is stopped before the pools go.
    keeper: Option<Keeper>,
    pools: Vec<Pool>,
    epochs: Arc<Epochs>,
}

/// What a [`Scheduler`] is made from.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Where the ranks are and how to talk to them.
    pub mapper: MapperConfig,
    /// The pools; at least one.
    pub pools: Vec<PoolSetup>,
    /// How many pages are backed together.
    pub runs: RunChoice,
    /// How long to wait for every rank of every pool to be there and able to map.
    pub ready_timeout: Duration,
    /// Granularity of the workers' devices, in bytes, where this process has none of its own.
    pub granularity: u64,
    /// Who keeps the reserves and brings ranks back.
    pub background: Background,
}

/// One pool to be.
#[derive(Debug, Clone)]
pub struct PoolSetup {
    /// Its number, the same on every rank.
    pub id: PoolId,
    /// What it looks like on one rank.
    pub spec: PoolSpec,
    /// How it is kept.
    pub policy: PoolPolicy,
}

/// How a pool is kept. By default without a limit, a floor or a reserve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolPolicy {
    /// Idle pages kept backed.
    pub reserve: ReserveBounds,
    /// A limit to start with.
    pub limit: Option<Limit>,
    /// Bytes that the pool is promised: a limit below is refused.
    pub floor_bytes: u64,
}

/// A pool whose mapper exists already.
#[derive(Debug, Clone)]
pub struct MappedPool {
    /// Its number.
    pub id: PoolId,
    /// The resolved layout that the mapper was made with.
    pub geometry: Geometry,
    /// How it is kept.
    pub policy: PoolPolicy,
    /// Maps its pages.
    pub mapper: Arc<dyn Mapper>,
    /// First address of each tensor on this process's own rank; empty if it has none.
    pub tensor_bases: Vec<u64>,
}

/// Who keeps the reserve of warm pages, unmaps what is freed above a limit, and brings ranks back that
/// do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Background {
    /// A thread, woken when there is something to do or a rank is lost, and at least `every` so often.
    /// No free then waits for the device.
    On {
        /// Longest time between two looks, and how often time passes for the demand that the reserves
        /// follow.
        every: Duration,
    },
    /// The caller, by [`Pool::replenish`], [`Pool::tick`], [`Pool::tend`] and [`Pool::repair`]:
    /// everything then happens in the caller's order, and what is freed above a limit is unmapped in
    /// the call that frees it. The rank in this process keeps memory to use it again, as
    /// [`MapperConfig::recycler`] says, until the caller tends the pool.
    Off,
}

/// Why there is no scheduler. Whatever was begun is undone.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// Nothing to schedule.
    #[error("a scheduler without a pool")]
    NoPools,
    /// Two pools of one number.
    #[error("{pool} is there twice")]
    PoolTwice {
        /// The number.
        pool: PoolId,
    },
    /// A pool that cannot be laid out.
    #[error("{pool} cannot be laid out: {source}")]
    Layout {
        /// The pool.
        pool: PoolId,
        /// Why.
        source: LayoutError,
    },
    /// A pool that cannot be mapped, here or elsewhere.
    #[error("{pool}: {source}")]
    Mapper {
        /// The pool.
        pool: PoolId,
        /// Why, with every rank that is missing.
        source: ComposeError,
    },
    /// A ready-made mapper that is not ready.
    #[error("{pool}: not every rank is ready: {}", list(.missing))]
    NotReady {
        /// The pool.
        pool: PoolId,
        /// Every rank that is missing.
        missing: Vec<NotReady>,
    },
    /// A ready-made mapper that will not be ready.
    #[error("{pool} cannot be mapped: {source}")]
    Unready {
        /// The pool.
        pool: PoolId,
        /// Why.
        source: MapError,
    },
    /// Pages that contradict each other.
    #[error("{pool} has no page allocator: {source}")]
    Pages {
        /// The pool.
        pool: PoolId,
        /// Why.
        source: kvcached_page_alloc::ConfigError,
    },
    /// A limit to start with that is not allowed.
    #[error("{pool} cannot start with that limit: {source}")]
    Limit {
        /// The pool.
        pool: PoolId,
        /// Why.
        source: LimitError,
    },
    /// No null block, or blocks that do not fit the pages.
    #[error("{pool} has no blocks: {source}")]
    Blocks {
        /// The pool.
        pool: PoolId,
        /// Why.
        source: NewError,
    },
    /// The system gives no thread.
    #[error("cannot start the thread that keeps the pools: {0}")]
    Thread(#[source] io::Error),
}

impl SchedulerConfig {
    /// What the configuration says, for one engine and its pools.
    #[must_use]
    pub fn new(
        config: &Config,
        instance: InstanceName,
        topology: Topology,
        pools: Vec<PoolSetup>,
    ) -> Self {
        Self {
            mapper: MapperConfig::new(config, instance, topology),
            pools,
            runs: config.runs,
            ready_timeout: config.ready_timeout,
            granularity: DEFAULT_GRANULARITY,
            background: Background::default(),
        }
    }
}

impl Default for PoolPolicy {
    fn default() -> Self {
        Self {
            reserve: ReserveBounds::NONE,
            limit: None,
            floor_bytes: 0,
        }
    }
}

impl Default for Background {
    fn default() -> Self {
        Self::On {
            every: DEFAULT_EVERY,
        }
    }
}

impl Scheduler {
    /// Starts an engine's pools, and waits until every rank of each can map.
    ///
    /// `driver` is for the rank in this process. A coordinator without one is given `None`, and
    /// opens no device.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running, mapped or connected.
    pub fn start<D: Driver>(
        config: SchedulerConfig,
        driver: Option<Arc<D>>,
    ) -> Result<Self, StartError> {
        let SchedulerConfig {
            mapper,
            pools,
            runs,
            ready_timeout,
            granularity,
            background,
        } = config;
        let ready_by = Deadline::after(ready_timeout);
        let granularity = driver
            .as_ref()
            .map_or(granularity, |d| d.properties().granularity);
        check_ids(pools.iter().map(|setup| setup.id))?;
        let geometries = pools
            .iter()
            .map(|PoolSetup { id: pool, spec, .. }| {
                spec.resolve(granularity)
                    .map_err(|source| StartError::Layout {
                        pool: *pool,
                        source,
                    })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let memory = driver.map(|driver| Arc::new(Recycler::new(driver, mapper.recycler)));
        // All mappers first: no pool maps anything before every rank of every pool is there.
        let mapped = pools
            .into_iter()
            .zip(geometries)
            .map(|(PoolSetup { id, policy, .. }, geometry)| {
                let composed = compose(&mapper, id, &geometry, memory.as_ref(), ready_by)
                    .map_err(|source| StartError::Mapper { pool: id, source })?;
                let tensor_bases = composed
                    .local
                    .as_deref()
                    .map(LocalMapper::tensor_bases)
                    .unwrap_or_default();
                Ok(MappedPool {
                    id,
                    geometry,
                    policy,
                    mapper: composed.mapper,
                    tensor_bases,
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        Self::run(mapped, runs, background, mapper.epochs)
    }

    /// Starts pools over mappers that exist and are ready, such as wrapped or recording ones.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running or mapped.
    pub fn with_mappers(
        pools: Vec<MappedPool>,
        runs: RunChoice,
        background: Background,
    ) -> Result<Self, StartError> {
        check_ids(pools.iter().map(|pool| pool.id))?;
        for pool in &pools {
            match pool.mapper.ready() {
                Ok(Readiness::Ready) => {}
                Ok(Readiness::NotReady(missing)) => {
                    return Err(StartError::NotReady {
                        pool: pool.id,
                        missing,
                    });
                }
                Err(source) => {
                    return Err(StartError::Unready {
                        pool: pool.id,
                        source,
                    });
                }
            }
        }
        let epochs = Arc::new(Epochs::new(Duration::ZERO));
        Self::run(pools, runs, background, epochs)
    }

    /// The pool of that number.
    #[must_use]
    pub fn pool(&self, id: PoolId) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.id() == id)
    }

    /// Every pool, in the order in which they were set up.
    #[must_use]
    pub fn pools(&self) -> &[Pool] {
        &self.pools
    }

    /// Which epochs have retired on the rank in this process: whoever launches its work says so
    /// there. Every other rank has [its own](crate::Worker::epochs).
    #[must_use]
    pub const fn epochs(&self) -> &Arc<Epochs> {
        &self.epochs
    }

    /// Tells that the work of this epoch, and of all before it, has ended on every rank: for engines
    /// that know it here, so that no rank need say it. See [`Pool::retire`].
    pub fn retire(&self, epoch: Epoch) {
        self.epochs.retire(epoch);
        self.pools.iter().for_each(|pool| pool.retire(epoch));
    }

    /// Does a thread keep the reserves? Not without one to keep, nor with [`Background::Off`].
    #[must_use]
    pub fn keeps_reserves(&self) -> bool {
        self.keeper.is_some() && self.pools.iter().any(|pool| pool.reserve().max > 0)
    }

    fn run(
        pools: Vec<MappedPool>,
        runs: RunChoice,
        background: Background,
        epochs: Arc<Epochs>,
    ) -> Result<Self, StartError> {
        let turns = Turns::shared();
        let unmapping = match background {
            Background::On { .. } => Unmapping::Behind,
            Background::Off => Unmapping::InCall,
        };
        let mut pools = pools
            .into_iter()
            .map(|pool| Pool::new(pool, runs, unmapping, &turns))
            .collect::<Result<Vec<_>, _>>()?;
        // Null blocks are taken by now: a reserve that is mapped from here on cannot get at them.
        let keeper = match background {
            Background::On { every } => {
                let kept: Vec<Kept> = pools.iter().map(kept).collect();
                let resting: Vec<_> = kept.iter().map(|kept| Arc::clone(kept.resting())).collect();
                let keeper = Keeper::start(kept, turns, every).map_err(StartError::Thread)?;
                for (pool, resting) in pools.iter_mut().zip(resting) {
                    pool.wake_by(keeper.wake(resting));
                }
                Some(keeper)
            }
            Background::Off => None,
        };
        Ok(Self {
            keeper,
            pools,
            epochs,
        })
    }
}

fn kept(pool: &Pool) -> Kept {
    let keeps_reserve = pool.reserve().max > 0;
    Kept::new(pool.id(), Arc::clone(pool.pages()), keeps_reserve)
}

fn check_ids(pools: impl Iterator<Item = PoolId>) -> Result<(), StartError> {
    let ids: Vec<PoolId> = pools.collect();
    if ids.is_empty() {
        return Err(StartError::NoPools);
    }
    match ids
        .iter()
        .enumerate()
        .find(|(at, id)| ids[..*at].contains(id))
    {
        Some((_, &pool)) => Err(StartError::PoolTwice { pool }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod behind;
#[cfg(test)]
mod tests;
