//! The composition root: an engine's own words go in, pools that map memory on every rank come out.
//!
//! ```text
//! environment ─▶ Config ─────────────────────┐
//! engine ─▶ vllm / sglang ─▶ Role, topology ─┼─▶ Scheduler ─▶ Pool ─▶ blocks, pages, mapper
//!                         └▶ PoolSpec, views ┘   Worker ────▶ listens, maps what it is told
//! ```
//!
//! Only here is the environment read, once, by [`Config::from_env`]; only here are threads started:
//! one for the reserves of a [`Scheduler`], one for each [`Worker`]. Both end when their owner is
//! dropped, and everything else goes with them. No crate below knows an engine by name.
//!
//! [`vllm`] and [`sglang`] are pure: what an engine reports about its ranks becomes a [`Role`], what
//! it says about its KV cache a pool's layout with the strides of its tensors. [`EngineProcess`]
//! keeps track of what a process is over several initialisations.
//!
//! # Example
//!
//! A vLLM engine with one GPU, on a machine without any: its core and its worker are one process.
//!
//! ```
//! use std::sync::Arc;
//!
//! use kvcached_integrations::vllm::{self, VllmPool, VllmReport};
//! use kvcached_integrations::{
//!     Attention, Background, Config, DType, Elements, EngineProcess, Mode, PoolPolicy, PoolSetup,
//!     ProcessIds, RankReport, Scheduler, SchedulerConfig,
//! };
//! use kvcached_mapper::PoolId;
//! use kvcached_vmm::{Driver, Host, HostConfig};
//!
//! // Of a real environment: `Config::from_env()`.
//! let ids = ProcessIds { uid: 1000, process_group: 4711 };
//! let config = Config::from_lookup(|name| (name == "KVCACHED_LAYOUT").then(|| "unified".into()), ids)?;
//!
//! let report = VllmReport {
//!     ranks: RankReport { tp_size: Some(1), is_worker: Some(false), ..RankReport::default() },
//!     coordinator_separate: Some(false),
//!     external_launcher: None,
//! };
//! let mut process = EngineProcess::new();
//! process.init(&vllm::detect(&report, config.topology)?)?;
//! let Some(Mode::Coordinator(arrangement)) = process.mode() else { unreachable!("it is one") };
//!
//! let device = Arc::new(Host::new(HostConfig::new(1 << 30))?);
//! let cache = VllmPool {
//!     layers: 4,
//!     attention: Attention::Gqa { kv_heads: 8, head_size: 128 },
//!     elements: Elements::plain(DType::Bf16),
//!     block_tokens: 16,
//!     kernel_block_tokens: None,
//!     tensor_bytes: 64 << 20,
//!     padded_block_bytes: None,
//!     shape: vec![2, 1024, 16, 8, 128],
//! };
//! let choice = config.layout_choice(device.properties().granularity);
//! let cache = vllm::pool_spec(&cache, &choice)?;
//! assert_eq!(cache.views[0].strides_elements(), [16384, 32768, 1024, 128, 1]);
//!
//! let id = PoolId(0);
//! let topology = arrangement.topology(&config.runtime_dir, &config.instance)?;
//! let pools = vec![PoolSetup { id, spec: cache.spec, policy: PoolPolicy::default() }];
//! let settings = SchedulerConfig {
//!     background: Background::Off,
//!     ..SchedulerConfig::new(&config, config.instance.clone(), topology, pools)
//! };
//! let scheduler = Scheduler::start(settings, Some(Arc::clone(&device)))?;
//!
//! let pool = scheduler.pool(id).expect("the pool that was set up");
//! assert_eq!(pool.available(), 1023, "all but the null block");
//! let prompt = pool.alloc(100)?;
//! assert_eq!(pool.usage().pages.used, 4, "32 blocks on each");
//! pool.free(&prompt)?;
//!
//! drop(scheduler);
//! assert_eq!(device.memory()?.free, 1 << 30);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

/// The README's example, compiled and run with the documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

mod compose;
mod config;
mod detect;
mod keeper;
mod kv;
mod pool;
mod role;
mod scheduler;
mod size;
#[cfg(test)]
mod testing;
mod worker;

pub mod sglang;
pub mod vllm;

pub use compose::{ComposeError, Composed, MapperConfig, compose, compose_over};
pub use config::{
    Config, ConfigError, Device, ProcessIds, ReserveBounds, RunChoice, RunLength, UnknownDevice,
    UnknownVariable, VARIABLES, Variable, unknown_variables,
};
pub use detect::{
    Arrangement, DetectError, Detected, Dimension, RankReport, Role, TopologyMode, UnknownTopology,
    World,
};
pub use kv::{
    Attention, DType, Elements, EnginePool, KvError, KvView, LayoutChoice, UnknownDType,
    kv_heads_per_rank,
};
pub use pool::Pool;
pub use role::{Change, EngineProcess, Mode, RoleError};
pub use scheduler::{
    Background, DEFAULT_GRANULARITY, MappedPool, PoolPolicy, PoolSetup, Scheduler, SchedulerConfig,
    StartError,
};
pub use size::{ByteSize, ParseSizeError};
pub use worker::{Worker, WorkerConfig, WorkerError, announce_failure};
