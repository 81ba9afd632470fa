//! Real memory on real ranks: the processes of a replay, what is said between them, and the cache
//! that they make up together.
//!
//! ```text
//! replaying process: Engine ▶ RankedCache ▶ Scheduler ▶ mapper ═ unix sockets ═▶ Worker  one rank
//!                                    └──── oracle: stamp, check ═ its standard input ═▶  process
//! ```
//!
//! Each rank of each model is a process of its own, as engines are; the ranks of one number share
//! one pretended device, a [`Budget`](kvcached_vmm::Budget). With autonomous ranks every process
//! has a whole [`RankedCache`] of its own, and [`AutonomousCache`] asks all of them the same.

mod autonomous;
mod cache;
mod channel;
mod crew;
mod device;
mod message;
mod meters;
mod oracle;
mod process;
mod trigger;

pub(crate) use autonomous::AutonomousCache;
pub(crate) use cache::{ModelPlan, PoolPlan, RankedCache, pool_id};
pub(crate) use crew::Crew;
pub(crate) use device::{OwnPool, open_pools};
pub(crate) use message::{PoolMessage, Setup, pool_tag};
pub(crate) use meters::{Call, Timed};

pub use crew::{CrewError, RankProgram};
pub use device::{Device, ParseDeviceError};
pub use message::PageTotals;
pub use oracle::Checked;
pub use process::{RankError, serve_rank, with_causes};
