//! Serving traces replayed against elastic and statically split KV memory.

mod assign;
mod model;
mod service;
mod trace;
mod workload;

pub use assign::{Assign, ParseAssignError};
pub use model::{
    Dtype, MAX_INSTANCES, Model, ModelChoice, ParseModelError, Placement, PlacementError, PoolKind,
    bytes_per_block, known_models, model,
};
pub use service::ServiceTimes;
pub use trace::{
    Column, Format, MAX_REQUEST_TOKENS, PREFIX_TOKENS, Problem, Request, Trace, TraceError,
};
pub use workload::{LogNormal, Workload};
