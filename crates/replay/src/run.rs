//! A replay from beginning to end: the static split in bookkeeping, the elastic pool on real ranks,
//! and the comparison.

mod elastic;
mod error;
mod folder;

use std::fmt;
use std::iter::Peekable;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvcached_integrations::{MapperConfig, ReserveBounds, RunChoice};
use kvcached_mapper::{Cold, Epochs, Layout, PageSize, Rank};
use kvcached_tp_ipc::{InstanceName, RuntimeDir, Topology};
use kvcached_vmm::{Budget, RecyclerConfig};

use self::elastic::ElasticCache;
pub use self::error::ReplayError;
use self::folder::Folder;
use crate::chaos::Schedule;
use crate::growth::Growing;
use crate::ranks::{
    AutonomousCache, Call, Checked, Crew, ModelPlan, OwnPool, PageTotals, PoolMessage, PoolPlan,
    RankedCache, Setup, Timed, open_pools, pool_id, pool_tag,
};
use crate::{
    Assign, Chaos, Device, Engine, Faults, FixedSplit, Growth, KvCache, Latencies, Model, Outcome,
    Placement, Progress, RankProgram, ServedModel, Trace,
};

/// Everything that decides what a replay does.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The requests.
    pub trace: Trace,
    /// The models, one entry per instance.
    pub models: Vec<Model>,
    /// How they share the requests.
    pub assign: Assign,
    /// Decides which request a hot model gets.
    pub seed: u64,
    /// Ranks of each model.
    pub tp: u16,
    /// Where their scheduler is.
    pub topology: ReplayTopology,
    /// Layout of the tensors.
    pub layout: Layout,
    /// Page size of the token pools.
    pub page_size: PageSize,
    /// Tokens of a block.
    pub block_tokens: NonZeroU32,
    /// What the device of each rank has for all models together.
    pub memory_bytes: u64,
    /// Where the memory is.
    pub device: Device,
    /// What lies behind a page without memory.
    pub cold: Cold,
    /// How many pages are backed together.
    pub runs: RunChoice,
    /// Blocks of shared prefixes that each model keeps when nobody uses them, for later requests.
    pub cached_blocks: u32,
    /// Between which bounds the warm pages of each pool follow the demand.
    pub reserve: ReserveBounds,
    /// Does the oracle stamp and check every block?
    pub verify: bool,
    /// How time passes.
    pub pace: Pace,
    /// Are rank processes to be killed and stopped on the way?
    pub chaos: Option<Chaos>,
    /// Where the sockets are; a folder of the replay's own is made in it, and removed.
    pub runtime_dir: PathBuf,
    /// How long a rank may take to answer.
    pub ipc_timeout: Duration,
    /// How long all ranks may take to be there.
    pub ready_timeout: Duration,
    /// How a rank process is started.
    pub program: RankProgram,
}

/// Where the scheduler of a model is, as seen from its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReplayTopology {
    /// Inside rank 0, which is the replaying process.
    Rank0,
    /// In a process of its own, the replaying one: every rank is elsewhere.
    Separate,
    /// In every rank, none of which drives another.
    Autonomous,
}

/// How time passes in a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pace {
    /// As the service times say, without waiting.
    Virtual,
    /// By the clock.
    Real,
}

/// Which side of the comparison is being run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The same memory split evenly among the models.
    Static,
    /// The elastic pool.
    Elastic,
}

/// What both sides came to.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// The elastic pool.
    pub elastic: Outcome,
    /// The static split.
    pub fixed: Outcome,
    /// Bytes of one model's static share, on each rank.
    pub share_bytes: u64,
    /// Pages and runs of all models' pools, on one rank.
    pub pages: PageTotals,
    /// Every measured call.
    pub calls: CallTimes,
    /// What the oracle found, on all ranks.
    pub checked: Checked,
    /// How many ranks, over all models, were ever found to have other pages mapped than they should.
    pub ranks_divergent: u32,
    /// What the faults of [`Plan::chaos`] came to.
    pub faults: Option<Faults>,
    /// What was left when the last request was done, if prefixes are kept.
    pub idle: Option<IdleUse>,
    /// How the processes of the elastic side grew, if it ran by the clock for long enough.
    pub growth: Option<Growth>,
}

/// Memory that the elastic pool backs while nothing runs, after a trim. Bytes of one rank, all models
/// together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdleUse {
    /// Backed.
    pub backed_bytes: u64,
    /// What would do: as many pages as the kept blocks and the null blocks need if they are packed.
    pub packed_bytes: u64,
    /// In blocks that are kept.
    pub cached_bytes: u64,
}

/// Times of calls, of all models.
#[derive(Debug, Clone, Default)]
pub struct CallTimes {
    /// Allocations of blocks.
    pub alloc: Latencies,
    /// Those of them that waited for pages to be mapped.
    pub alloc_mapped: Latencies,
    /// Backing pages on every rank.
    pub map: Latencies,
    /// Taking memory away on every rank.
    pub unmap: Latencies,
    /// The part of mapping and unmapping that was spent on ranks in other processes.
    pub broadcast: Latencies,
}

/// Runs both sides. `progress` is told now and then how far it is; `stop` ends it early.
///
/// However this returns, every rank process has ended and the folder of the sockets is gone.
///
/// # Errors
/// [`ReplayError`]. Corrupted contents and divergent ranks are no errors but results.
pub fn replay(
    plan: &Plan,
    stop: &AtomicBool,
    mut progress: impl FnMut(Side, Progress),
) -> Result<Comparison, ReplayError> {
    let served = served_models(plan)?;
    let mut faults = schedule(plan)?;
    let names: Vec<&str> = plan
        .models
        .iter()
        .map(|model| model.name.as_str())
        .collect();
    let model_of = plan
        .assign
        .models_of(&plan.trace.requests, &names, plan.seed);
    let plans = model_plans(plan, &served)?;

    let share_bytes = plan.memory_bytes / plan.models.len() as u64;
    let caches = plans
        .iter()
        .map(|model| model.static_share(share_bytes))
        .collect();
    let mut engine = Engine::new(&plan.trace.requests, &model_of, served.clone(), caches);
    engine.keep_prefixes(plan.cached_blocks);
    let undisturbed = |_: &mut Engine<'_, FixedSplit>, _| {};
    drive(&mut engine, Pace::Virtual, stop, undisturbed, |p| {
        progress(Side::Static, p);
    })?;
    let (mut fixed, _) = engine.finish();

    // Before the caches, so that it goes after them, when nobody uses it any more.
    let folder = Folder::make(&plan.runtime_dir)?;
    let caches = elastic_caches(plan, &served, plans, folder.path())?;
    let mut engine = Engine::new(&plan.trace.requests, &model_of, served, caches);
    engine.keep_prefixes(plan.cached_blocks);
    let mut growing = (plan.pace == Pace::Real).then(|| Growing::new(look_every(&plan.trace)));
    let mut calls = CallTimes::default();
    let befall = |engine: &mut Engine<'_, ElasticCache>, next| {
        // Told apart by now, so that what is kept of a call does not grow with the run.
        for cache in engine.caches_mut() {
            calls.add(&cache.take_calls());
        }
        if let Some(growing) = growing.as_mut().filter(|growing| growing.is_due(next)) {
            let mapped_bytes = engine.caches().iter().map(KvCache::mapped_bytes).sum();
            growing.look(next, mapped_bytes, processes(plan, engine.caches()));
        }
        while let Some(fault) = faults.as_mut().and_then(|f| f.next_if(|f| f.at <= next)) {
            engine.caches_mut()[fault.model].befall(fault);
        }
    };
    drive(&mut engine, plan.pace, stop, befall, |p| {
        progress(Side::Elastic, p);
    })?;
    let idle = match plan.cached_blocks {
        0 => None,
        _ => Some(idle_use(plan, &mut engine)?),
    };
    let (mut elastic, caches) = engine.finish();
    let end = fixed.end.max(elastic.end);
    for outcome in [&mut fixed, &mut elastic] {
        outcome.observe_until(
            end,
            plan.trace.requests.iter().map(|request| request.arrival),
        );
    }
    let mut comparison = Comparison {
        elastic,
        fixed,
        share_bytes,
        pages: PageTotals::default(),
        calls,
        checked: Checked::default(),
        ranks_divergent: 0,
        faults: plan.chaos.map(|_| Faults::default()),
        idle,
        growth: growing.and_then(|growing| growing.conclude(last_arrival(&plan.trace))),
    };
    for cache in caches {
        cache.conclude(&mut comparison)?;
    }
    Ok(comparison)
}

/// What is backed now that nothing runs; then gives back what was kept.
fn idle_use(plan: &Plan, engine: &mut Engine<'_, ElasticCache>) -> Result<IdleUse, ReplayError> {
    let mut look = || {
        for cache in engine.caches_mut() {
            cache.trim()?;
        }
        let sum = |of: fn(&ElasticCache) -> u64| engine.caches().iter().map(of).sum();
        let idle = IdleUse {
            backed_bytes: sum(ElasticCache::mapped_bytes),
            packed_bytes: sum(ElasticCache::packed_bytes),
            cached_bytes: sum(ElasticCache::held_bytes),
        };
        engine.drop_prefixes()?;
        Ok(idle)
    };
    look().map_err(|source| ReplayError::Broken {
        done: u32::try_from(plan.trace.requests.len()).unwrap_or(u32::MAX),
        requests: u32::try_from(plan.trace.requests.len()).unwrap_or(u32::MAX),
        source,
    })
}

/// How often the processes of a replay by the clock are looked at: a hundred times, but no more
/// often than a look of about a millisecond a process is nothing beside, and every few seconds.
fn look_every(trace: &Trace) -> Duration {
    let end = last_arrival(trace);
    (end / 100).clamp(Duration::from_millis(50), Duration::from_secs(5))
}

fn last_arrival(trace: &Trace) -> Duration {
    let last = trace.requests.last();
    last.map_or(Duration::ZERO, |request| request.arrival)
}

/// Every process that takes part, by name and id.
fn processes(plan: &Plan, caches: &[ElasticCache]) -> Vec<(String, u32)> {
    let mut all = vec![("replay".to_owned(), std::process::id())];
    for (index, (model, cache)) in plan.models.iter().zip(caches).enumerate() {
        let named = |(rank, id)| (format!("{}#{index} {rank}", model.name), id);
        all.extend(cache.processes().into_iter().map(named));
    }
    all
}

/// The faults of a plan, if there are to be any.
fn schedule(plan: &Plan) -> Result<Option<Peekable<Schedule>>, ReplayError> {
    let Some(chaos) = plan.chaos else {
        return Ok(None);
    };
    let ranks = match plan.topology {
        ReplayTopology::Rank0 if plan.tp == 1 => {
            return Err(ReplayError::Plan(
                "chaos strikes ranks in processes of their own, and the only rank is in the \
                 replaying process: more ranks are needed, or a separate scheduler",
            ));
        }
        ReplayTopology::Rank0 => 1..plan.tp,
        ReplayTopology::Separate => 0..plan.tp,
        ReplayTopology::Autonomous => {
            return Err(ReplayError::Plan(
                "chaos needs ranks that somebody else drives: an autonomous rank that dies takes \
                 its scheduler with it",
            ));
        }
    };
    if !plan.verify {
        return Err(ReplayError::Plan(
            "chaos without verified contents shows nothing: it needs a driver with memory, and \
             blocks that are stamped",
        ));
    }
    let models = plan.models.len();
    Ok(Some(
        Schedule::new(chaos, models, ranks, plan.ipc_timeout).peekable(),
    ))
}

/// Runs an engine to its end. Before each event, `before` is told its time.
#[expect(
    clippy::disallowed_methods,
    reason = "pacing by the clock is what `Pace::Real` asks for"
)]
fn drive<C: KvCache>(
    engine: &mut Engine<'_, C>,
    pace: Pace,
    stop: &AtomicBool,
    mut before: impl FnMut(&mut Engine<'_, C>, Duration),
    mut progress: impl FnMut(Progress),
) -> Result<(), ReplayError> {
    /// How often a wait looks whether it is to stop.
    const GLANCE: Duration = Duration::from_millis(20);
    let start = Instant::now();
    while let Some(next) = engine.next_event_time() {
        while pace == Pace::Real && !stop.load(Ordering::Relaxed) {
            let left = next.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left.min(GLANCE));
        }
        let Progress { done, requests, .. } = engine.progress();
        if stop.load(Ordering::Relaxed) {
            return Err(ReplayError::Interrupted { done, requests });
        }
        before(engine, next);
        engine
            .advance()
            .map_err(|source| match stop.load(Ordering::Relaxed) {
                // What stopped this process may have stopped a rank a little earlier.
                true => ReplayError::Interrupted { done, requests },
                false => ReplayError::Broken {
                    done,
                    requests,
                    source,
                },
            })?;
        progress(engine.progress());
    }
    Ok(())
}

fn served_models(plan: &Plan) -> Result<Vec<ServedModel>, ReplayError> {
    if plan.models.is_empty() {
        return Err(ReplayError::Plan("a replay needs at least one model"));
    }
    if plan.tp == 0 {
        return Err(ReplayError::Plan("a model has at least one rank"));
    }
    let label = |index: usize, model: &Model| {
        let alone = plan
            .models
            .iter()
            .filter(|other| other.name == model.name)
            .count()
            == 1;
        if alone {
            model.name.clone()
        } else {
            format!("{}#{index}", model.name)
        }
    };
    Ok(plan
        .models
        .iter()
        .enumerate()
        .map(|(index, model)| ServedModel::new(label(index, model), model, plan.block_tokens))
        .collect())
}

/// What one rank of each model needs.
fn model_plans(plan: &Plan, served: &[ServedModel]) -> Result<Vec<ModelPlan>, ReplayError> {
    let placement = Placement {
        tp: plan.tp,
        layout: plan.layout,
        block_tokens: plan.block_tokens.get(),
        page_size: plan.page_size,
        capacity_bytes: plan.memory_bytes,
    };
    let mut plans = Vec::new();
    for (model, served) in plan.models.iter().zip(served) {
        let label = || served.label.clone();
        let specs = model
            .pool_specs(&placement)
            .map_err(|source| ReplayError::Placement {
                model: label(),
                source,
            })?;
        let pools = specs
            .into_iter()
            .map(|spec| PoolPlan::new(spec, plan.reserve))
            .collect::<Result<_, _>>()
            .map_err(|source| ReplayError::Layout {
                model: label(),
                source,
            })?;
        plans.push(ModelPlan {
            pools,
            runs: plan.runs,
            verify: plan.verify,
            memory_bytes: plan.memory_bytes,
            others_bytes: 0,
        });
    }
    let needed_bytes: u64 = plans.iter().map(ModelPlan::least_bytes).sum();
    if needed_bytes > plan.memory_bytes {
        let memory_bytes = plan.memory_bytes;
        return Err(ReplayError::TooLittleMemory {
            memory_bytes,
            needed_bytes,
        });
    }
    for model in &mut plans {
        model.others_bytes = needed_bytes - model.least_bytes();
    }
    Ok(plans)
}

fn model_number(index: usize) -> u16 {
    u16::try_from(index).expect("the number of models is limited to hundreds")
}

/// Starts every rank of every model.
fn elastic_caches(
    plan: &Plan,
    served: &[ServedModel],
    models: Vec<ModelPlan>,
    folder: &Path,
) -> Result<Vec<ElasticCache>, ReplayError> {
    let mut budgets = Vec::new();
    for rank in 0..plan.tp {
        let path = folder.join(format!("device-{rank}.budget"));
        // Held only while the ranks start: each of them opens it for itself.
        budgets.push((Budget::create(&path, plan.memory_bytes)?, path));
    }
    let own_rank = plan.topology == ReplayTopology::Rank0;
    let mut own = Vec::new();
    if own_rank {
        let pools = models.iter().enumerate().flat_map(|(model, plans)| {
            plans.pools.iter().enumerate().map(move |(pool, plan)| {
                let tag = pool_tag(model_number(model), Rank(0), pool_id(pool));
                (tag, plan.geometry.clone())
            })
        });
        let (device, memory) = (plan.device, plan.memory_bytes);
        own = open_pools(device, memory, &budgets[0].1, plan.cold, pools.collect())?;
    }
    let mut own = own.into_iter();
    let mut caches = Vec::new();
    for (index, (model, served)) in models.into_iter().zip(served).enumerate() {
        let own: Vec<OwnPool> = own
            .by_ref()
            .take(if own_rank { model.pools.len() } else { 0 })
            .collect();
        let instance: InstanceName = format!("model-{index}").parse()?;
        let ranks = u16::from(own_rank)..plan.tp;
        let setups = ranks.map(|rank| Setup {
            instance: instance.to_string(),
            runtime_dir: folder.to_path_buf(),
            rank,
            model: model_number(index),
            autonomous: plan.topology == ReplayTopology::Autonomous,
            device: plan.device,
            budget: budgets[usize::from(rank)].1.clone(),
            memory_bytes: plan.memory_bytes,
            pools: model
                .pools
                .iter()
                .map(|pool| PoolMessage::new(&pool.spec, (pool.reserve.min, pool.reserve.max)))
                .collect(),
            runs: plan.runs.into(),
            zero_cold: plan.cold == Cold::Zero,
            verify: plan.verify,
            ipc_timeout: plan.ipc_timeout,
        });
        let crew = Crew::start(&plan.program, setups.collect(), plan.ready_timeout)?;
        if plan.topology == ReplayTopology::Autonomous {
            caches.push(ElasticCache::Autonomous(Box::new(AutonomousCache::new(
                model, crew,
            ))));
            continue;
        }
        let endpoints = RuntimeDir::open(folder)?.instance(&instance)?;
        let topology = match plan.topology {
            ReplayTopology::Rank0 => Topology::rank0_coordinates(plan.tp, &endpoints),
            _ => Topology::separate_coordinator(plan.tp, 1, &endpoints),
        };
        let config = MapperConfig {
            instance,
            topology,
            cold: plan.cold,
            recycler: RecyclerConfig::OFF,
            ipc_timeout: plan.ipc_timeout,
            epochs: Arc::new(Epochs::new(plan.ipc_timeout)),
        };
        let cache = RankedCache::led(
            &model,
            &config,
            own,
            crew,
            plan.ready_timeout,
            plan.chaos.is_some(),
        )
        .map_err(|source| ReplayError::Start {
            model: served.label.clone(),
            source: Box::new(source),
        })?;
        caches.push(ElasticCache::Led(Box::new(cache)));
    }
    Ok(caches)
}

impl CallTimes {
    fn add(&mut self, calls: &[Timed]) {
        for timed in calls {
            let time = Duration::from_nanos(timed.ns);
            let times = match timed.call {
                Call::Alloc => &mut self.alloc,
                Call::AllocMapped => {
                    self.alloc_mapped.record(time);
                    &mut self.alloc
                }
                Call::Map => &mut self.map,
                Call::Unmap => &mut self.unmap,
                Call::Broadcast => &mut self.broadcast,
            };
            times.record(time);
        }
    }
}

impl FromStr for ReplayTopology {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        match text {
            "rank0" => Ok(Self::Rank0),
            "separate" => Ok(Self::Separate),
            "autonomous" => Ok(Self::Autonomous),
            _ => Err("a topology is rank0, separate or autonomous"),
        }
    }
}

impl fmt::Display for ReplayTopology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rank0 => "rank0",
            Self::Separate => "separate",
            Self::Autonomous => "autonomous",
        })
    }
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Virtual => "virtual",
            Self::Real => "real",
        })
    }
}
