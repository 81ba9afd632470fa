//! Where an engine meets the pools: what engines say about themselves, in their own words, becomes
//! a topology, a role and a pool's layout.
//!
//! ```
//! use kvcached_integrations::{Arrangement, RankReport, Role, vllm};
//!
//! let core = vllm::VllmReport {
//!     ranks: RankReport { tp_size: Some(4), is_worker: Some(false), ..RankReport::default() },
//!     coordinator_separate: Some(true),
//!     external_launcher: None,
//! };
//! let detected = vllm::detect(&core, None)?;
//! assert_eq!(detected.role, Role::Coordinator(Arrangement::Separate { tp: 4, stages: 1 }));
//! # Ok::<(), kvcached_integrations::DetectError>(())
//! ```

mod detect;
mod kv;
mod role;
mod size;
#[cfg(test)]
mod testing;

pub mod sglang;
pub mod vllm;

pub use detect::{
    Arrangement, DetectError, Detected, Dimension, RankReport, Role, TopologyMode, UnknownTopology,
    World,
};
pub use kv::{
    Arrange, Attention, DType, Elements, EnginePool, KvError, KvView, UnknownDType,
    kv_heads_per_rank,
};
pub use role::{Change, EngineProcess, Mode, RoleError};
pub use size::{ByteSize, ParseSizeError};
