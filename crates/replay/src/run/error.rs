//! Why a replay has no result.

use std::io;
use std::path::PathBuf;

use kvcached_integrations::{ByteSize, StartError};
use kvcached_mapper::LayoutError;
use kvcached_tp_ipc::{NameError, RuntimeDirError};
use kvcached_vmm::BudgetError;
use thiserror::Error;

use crate::{Broken, CrewError, PlacementError, RankError};

/// Why a replay has no result.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// A plan that makes no sense.
    #[error("{0}")]
    Plan(&'static str),
    /// A model that cannot be laid out like that.
    #[error("{model}: {source}")]
    Placement {
        /// Its label.
        model: String,
        /// Why.
        source: PlacementError,
    },
    /// A model whose pages do not fit.
    #[error("{model}: {source}")]
    Layout {
        /// Its label.
        model: String,
        /// Why.
        source: LayoutError,
    },
    /// Pools that cannot be started.
    #[error("{model}: {source}")]
    Start {
        /// Label of the model.
        model: String,
        /// Why.
        source: Box<StartError>,
    },
    /// The rank in this process.
    #[error("rank 0, in this process: {0}")]
    Own(#[from] RankError),
    /// A rank in another process.
    #[error(transparent)]
    Crew(#[from] CrewError),
    /// A cache that could not go on.
    #[error("after {done} of {requests} requests: {source}")]
    Broken {
        /// Requests done by then.
        done: u32,
        /// Requests of the trace.
        requests: u32,
        /// What broke.
        source: Broken,
    },
    /// Pages of one model's null blocks alone fill the memory.
    #[error(
        "{} per rank is too little: the first pages of all pools alone need {}",
        ByteSize(*memory_bytes),
        ByteSize(*needed_bytes)
    )]
    TooLittleMemory {
        /// What each rank has.
        memory_bytes: u64,
        /// What it needs before the first request.
        needed_bytes: u64,
    },
    /// No folder for the sockets.
    #[error("cannot make a folder for the ranks in {path}: {source}", path = path.display())]
    Folder {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No folder that nobody else can reach into.
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    /// No budget.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// A name that is none.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Somebody asked it to stop.
    #[error("interrupted after {done} of {requests} requests")]
    Interrupted {
        /// Requests done by then.
        done: u32,
        /// Requests of the trace.
        requests: u32,
    },
}
