//! Serving traces replayed against elastic KV memory on real ranks, beside the same memory split
//! statically: how many models fit on a GPU, and proof that every block kept its content.
//!
//! ```text
//! Trace ─ Assign ─▶ Engine (virtual time, sans-IO) ─▶ dyn KvCache ─┬─ FixedSplit: the static split
//! Model ─▶ PoolSpec, ServiceTimes ─┘                               └─ real ranks: Scheduler, oracle
//!                                                                        │
//! Report ◀─ Comparison ◀──────────────────── replay(Plan) ◀──────────────┘
//! ```
//!
//! Traces, models, the engine and reports are pure. Only [`replay`] starts processes, opens sockets
//! and reads the clock, and only to measure and to pace.
//!
//! # Example
//!
//! What two models make of a built-in workload, in bookkeeping alone:
//!
//! ```
//! use std::num::NonZeroU32;
//! use kvcached_replay::{Assign, Engine, FixedSplit, ServedModel, Workload, model};
//!
//! let trace = Workload::new(200, 7).trace();
//! let llama = model("llama-3.1-8b").expect("it is in the table");
//! let block_tokens = NonZeroU32::new(16).expect("not zero");
//! let served = ["one", "two"].map(|name| ServedModel::new(name.to_owned(), &llama, block_tokens));
//! let model_of = Assign::RoundRobin.models_of(&trace.requests, &["one", "two"], 0);
//!
//! // 2 GiB each; a block of 16 tokens takes 2 MiB.
//! let share = || FixedSplit::new(2 << 30, &[2 << 20]);
//! let mut engine = Engine::new(&trace.requests, &model_of, served.to_vec(), vec![share(), share()]);
//! engine.run()?;
//! let (outcome, _) = engine.finish();
//! assert_eq!(outcome.total.completed, 200);
//! assert!(outcome.memory.peak_held_bytes <= 4 << 30);
//! # Ok::<(), kvcached_replay::Broken>(())
//! ```

mod assign;
mod cache;
mod chaos;
mod engine;
mod footprint;
mod growth;
mod latency;
mod model;
mod outcome;
mod plot;
mod ranks;
mod report;
mod run;
mod series;
mod service;
mod trace;
mod workload;

pub use assign::{Assign, ParseAssignError};
pub use cache::{
    Broken, CacheError, ElasticModel, ElasticPool, FixedSplit, Holder, KvCache, Owner, Return,
    SharedMemory, Want,
};
pub use chaos::{Chaos, Faults};
pub use engine::{Demand, Engine, Progress, ServedModel};
pub use footprint::{Footprint, IdleFootprint};
pub use growth::{Growth, ProcessFigures, ProcessGrowth};
pub use kvcached_manager::BlockId;
pub use latency::{Latencies, Latency};
pub use model::{
    Dtype, MAX_INSTANCES, Model, ModelChoice, ParseModelError, Placement, PlacementError, PoolKind,
    bytes_per_block, known_models, model,
};
pub use outcome::{MemoryUse, ModelOutcome, Outcome, RequestOutcome, Served, Stats};
pub use plot::plot;
pub use ranks::{
    Checked, CrewError, Device, PageTotals, ParseDeviceError, RankError, RankProgram, serve_rank,
    with_causes,
};
pub use report::{
    ChaosReport, ConfigReport, IdleReport, LatencyReport, ModelReport, RecoveryReport, Report,
    SCHEMA, SideReport, TtftReport, VerifyReport,
};
pub use run::{
    CallTimes, Comparison, IdleUse, Pace, Plan, ReplayError, ReplayTopology, Side, replay,
};
pub use series::{MAX_POINTS, Sample, Series};
pub use service::ServiceTimes;
pub use trace::{
    Column, Format, MAX_REQUEST_TOKENS, PREFIX_TOKENS, Problem, Request, Trace, TraceError,
};
pub use workload::{
    BuiltIn, Bursts, LogNormal, ParseBuiltInError, Staggered, Workload, bursts, staggered,
};
