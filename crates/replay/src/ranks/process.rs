//! A rank process, from its first order to the end of its line.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use kvcached_integrations::{StartError, WorkerConfig, WorkerError};
use kvcached_mapper::{Cold, MapError, PageRun, PoolId, Stage};
use kvcached_tp_ipc::NameError;
use kvcached_vmm::{BudgetError, RecyclerConfig, VmmError};
use thiserror::Error;

use super::cache::{ModelPlan, RankedCache, pool_id};
use super::channel::{Channel, ChannelError};
use super::device::{open_pools, serve_pools};
use super::message::{Answer, Finished, MappedSet, Order, Setup, State};
use super::oracle::RankPool;
use crate::{BlockId, Broken, CacheError, KvCache, Want};

/// Why a rank could not be set up, or did not go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RankError {
    /// Its standard input is not the line that a replay gives it.
    #[error("a rank is started by a replay, with its orders on standard input: {0}")]
    Line(String),
    /// The driver.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// The shared budget.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// A build without the feature `cuda`.
    #[error("this build has no CUDA driver: build with the feature `cuda`")]
    NoCuda,
    /// A pool that cannot be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A rank that cannot serve.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// A scheduler that cannot start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A name that is none.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A cache that cannot go on.
    #[error(transparent)]
    Broken(#[from] Broken),
}

impl From<ChannelError> for RankError {
    fn from(error: ChannelError) -> Self {
        Self::Line(error.to_string())
    }
}

/// Serves as one rank of a replay: orders come over standard input, which is a socket. Returns
/// when the replay has ended, however it ended; everything is given back by then.
///
/// # Errors
/// [`RankError`]; the replay was told, if it was still there.
pub fn serve_rank() -> Result<(), RankError> {
    let line = |error: std::io::Error| RankError::Line(error.to_string());
    let socket = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(line)?;
    let mut channel = Channel::new(UnixStream::from(socket), None)?;
    let Order::Setup(setup) = channel.receive()? else {
        return Err(RankError::Line("the first order is to set up".to_owned()));
    };
    let result = if setup.autonomous {
        run_alone(&setup, &mut channel)
    } else {
        serve(&setup, &mut channel)
    };
    if let Err(error) = &result {
        // The replay may be gone; then there is nobody to tell.
        drop(channel.send(&Answer::Failed(with_causes(error))));
    }
    result
}

/// How long a rank keeps its memory without a coordinator: it ends with the replay anyway.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(60);

/// A rank that a coordinator drives; this line is for the oracle.
fn serve(setup: &Setup, channel: &mut Channel) -> Result<(), RankError> {
    let config = WorkerConfig {
        instance: setup.instance.parse()?,
        runtime_dir: setup.runtime_dir.clone(),
        stage: Stage(0),
        rank: setup.rank(),
        pools: (0..)
            .map(PoolId)
            .zip(setup.pools.iter().map(|pool| pool.spec()))
            .collect(),
        cold: cold(setup),
        // The same input is to give the same result: time here is not the time that passes.
        recycler: RecyclerConfig::OFF,
        ipc_timeout: setup.ipc_timeout,
        orphan_timeout: ORPHAN_TIMEOUT,
        retire_timeout: setup.ipc_timeout,
        // The channel tells the replay what went wrong.
        ready_timeout: Duration::ZERO,
    };
    let tags = (0..setup.pools.len())
        .map(|index| setup.tag(pool_id(index)))
        .collect();
    let served = serve_pools(
        setup.device,
        setup.memory_bytes,
        &setup.budget,
        config,
        tags,
    )?;
    channel.send(&Answer::Ready)?;
    loop {
        let order = match channel.receive() {
            // Finished, or the replay died.
            Err(ChannelError::Closed) | Ok(Order::Finish) => return Ok(()),
            order => order?,
        };
        if let Some(answer) = look(order, &served.pools)? {
            channel.send(&answer)?;
        }
    }
}

/// A rank with a scheduler of its own, asked the same as all others.
fn run_alone(setup: &Setup, channel: &mut Channel) -> Result<(), RankError> {
    let plan = ModelPlan::of_setup(setup)?;
    let pools = plan.pools.iter().enumerate();
    let pools = pools
        .map(|(index, pool)| (setup.tag(pool_id(index)), pool.geometry.clone()))
        .collect();
    let own = open_pools(
        setup.device,
        setup.memory_bytes,
        &setup.budget,
        cold(setup),
        pools,
    )?;
    let memory: Vec<_> = own.iter().map(|pool| Arc::clone(&pool.memory)).collect();
    let mut cache = RankedCache::alone(&plan, own)?;
    channel.send(&Answer::Ready)?;
    loop {
        let order: Order = match channel.receive() {
            Err(ChannelError::Closed) => return Ok(()),
            order => order?,
        };
        let answer = match order {
            Order::Alloc(wants) => {
                let wants: Vec<Want> = wants.iter().map(|want| want.want()).collect();
                let mut blocks = Vec::new();
                match cache.alloc(&wants, &mut blocks) {
                    Ok(()) => {
                        let blocks = blocks.into_iter().map(|block| block.0).collect();
                        Answer::Allocated {
                            blocks,
                            state: state(&cache),
                        }
                    }
                    Err(CacheError::Full) => Answer::Full(state(&cache)),
                    Err(CacheError::Broken(broken)) => return Err(broken.into()),
                    // Not here: nobody else has a part in this cache.
                    Err(lost @ CacheError::Lost) => return Err(Broken::new(lost).into()),
                }
            }
            Order::Free(returns) => {
                let blocks: Vec<Vec<BlockId>> = returns
                    .iter()
                    .map(|returned| returned.blocks.iter().copied().map(BlockId).collect())
                    .collect();
                let returns: Vec<_> = returns
                    .iter()
                    .zip(&blocks)
                    .map(|(returned, blocks)| returned.returned(blocks))
                    .collect();
                cache.free(&returns)?;
                Answer::Done(state(&cache))
            }
            Order::Trim => {
                cache.trim()?;
                Answer::Done(state(&cache))
            }
            Order::StepEnd => {
                cache.step_end()?;
                Answer::Done(state(&cache))
            }
            Order::Finish => {
                cache.compare_ranks()?;
                Answer::Finished(Finished {
                    pages: cache.page_totals(),
                    checked: cache.checked().clone(),
                    divergent: !cache.divergent().is_empty(),
                })
            }
            other => match look(other, &memory)? {
                Some(answer) => answer,
                None => continue,
            },
        };
        channel.send(&answer)?;
    }
}

/// What the oracle asks of any rank.
fn look(order: Order, pools: &[Arc<dyn RankPool>]) -> Result<Option<Answer>, RankError> {
    let pool = |index: u16| {
        let unknown = || RankError::Line(format!("an order for pool {index}, which is not here"));
        pools.get(usize::from(index)).ok_or_else(unknown)
    };
    Ok(match order {
        Order::Stamp {
            pool: index,
            stamps,
        } => {
            pool(index)?.stamp(&stamps)?;
            None
        }
        Order::Check {
            pool: index,
            stamps,
        } => Some(Answer::Checked(pool(index)?.check(&stamps))),
        Order::Mapped => Some(Answer::Mapped(
            pools
                .iter()
                .map(|pool| MappedSet::of(&pool.mapped()))
                .collect(),
        )),
        other => {
            return Err(RankError::Line(format!(
                "an order that makes no sense here: {other:?}"
            )));
        }
    })
}

impl MappedSet {
    pub(crate) fn of(runs: &[PageRun]) -> Self {
        // FNV-1a: a few lines whose result is the same in every build and process.
        let mut digest = 0xcbf2_9ce4_8422_2325_u64;
        for run in runs {
            for word in [run.first().0, run.count()] {
                for byte in word.to_le_bytes() {
                    digest = (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
                }
            }
        }
        Self {
            pages: runs.iter().map(|run| u64::from(run.count())).sum(),
            digest,
        }
    }
}

fn state(cache: &RankedCache) -> State {
    State {
        mapped_bytes: cache.mapped_bytes(),
        calls: cache.take_calls(),
    }
}

pub(crate) fn cold(setup: &Setup) -> Cold {
    if setup.zero_cold {
        Cold::Zero
    } else {
        Cold::Unbacked
    }
}

/// An error with all that caused it, in one line.
#[must_use]
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // An error that quotes its source says it already.
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
