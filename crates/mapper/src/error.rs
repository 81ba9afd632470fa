//! What a mapper answers when it did not do what was asked.

use kvcached_vmm::VmmError;
use thiserror::Error;

use crate::{PageRun, Rank, Stage};

/// A batch that was not mapped or unmapped: why, and which of its runs are now in doubt.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{cause}{}", describe_uncertain(.uncertain))]
pub struct MapError {
    /// Why.
    #[source]
    pub cause: Cause,
    /// Runs of the batch whose state is unknown on some rank. All others are as before the call.
    pub uncertain: Vec<PageRun>,
}

/// Why a batch was not mapped or unmapped.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Cause {
    /// Full right now: ask again when something was freed. On which rank, if not this one, is
    /// known from `at`.
    #[error("{}out of device memory", describe_place(.at))]
    OutOfMemory {
        /// The rank that is full; `None` is this process.
        at: Option<(Stage, Rank)>,
    },
    /// A run that is not as the call takes it to be: mapped already, not mapped, mapped with
    /// other bounds, or outside the pool. A bookkeeping mistake above the mapper.
    #[error("{run} cannot be {call}ped: {found}")]
    State {
        /// `"map"` or `"unmap"`.
        call: &'static str,
        /// The run that was asked for.
        run: PageRun,
        /// What is there instead.
        found: &'static str,
    },
    /// Another rank did not do it.
    #[error("{stage}, {rank} did not {call}: {cause}")]
    Peer {
        /// Stage of the rank.
        stage: Stage,
        /// The rank itself, as the engine numbers it.
        rank: Rank,
        /// The command it was given.
        call: &'static str,
        /// Its answer, or why there was none.
        cause: PeerCause,
    },
    /// A rank whose set of mapped pages is not known to equal the others'. It serves nothing until
    /// it is resynchronised.
    #[error("{stage}, {rank} may have other pages mapped than the rest")]
    Diverged {
        /// Stage of the rank.
        stage: Stage,
        /// The rank itself.
        rank: Rank,
    },
    /// The driver of this process.
    #[error(transparent)]
    Vmm(#[from] VmmError),
}

/// Why another rank did not do what it was told.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PeerCause {
    /// It answered that it cannot, and that nothing changed there.
    #[error("{reason}")]
    Refused {
        /// Its words.
        reason: String,
    },
    /// No answer within the bound: it may or may not have done it.
    #[error("no answer within {timeout_ms} ms")]
    TimedOut {
        /// The bound, in milliseconds.
        timeout_ms: u64,
    },
    /// The connection ended: it may or may not have done it.
    #[error("the connection ended: {reason}")]
    Disconnected {
        /// What ended it.
        reason: String,
    },
    /// It said something that makes no sense at this point.
    #[error("protocol violation: {reason}")]
    Protocol {
        /// What it said.
        reason: String,
    },
    /// It could not be reached at all.
    #[error("cannot reach {endpoint}: {reason}")]
    Unreachable {
        /// Where it should listen.
        endpoint: String,
        /// What the attempt ended with.
        reason: String,
    },
}

/// Whether every place that must be mapped can map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    /// All of them can.
    Ready,
    /// These cannot yet; never empty.
    NotReady(Vec<NotReady>),
}

/// A rank that cannot map yet.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{stage}, {rank} is not ready: {reason}")]
pub struct NotReady {
    /// Stage of the rank.
    pub stage: Stage,
    /// The rank itself.
    pub rank: Rank,
    /// Why, with the endpoint where there is one.
    pub reason: String,
}

impl MapError {
    /// An error after which every run is as before the call.
    #[must_use]
    pub const fn clean(cause: Cause) -> Self {
        Self {
            cause,
            uncertain: Vec::new(),
        }
    }

    /// Is this the normal answer *full right now*, with nothing in doubt?
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self.cause, Cause::OutOfMemory { .. }) && self.uncertain.is_empty()
    }
}

impl From<VmmError> for MapError {
    /// Running out of memory becomes [`Cause::OutOfMemory`]; nothing is in doubt.
    fn from(error: VmmError) -> Self {
        match error {
            VmmError::OutOfMemory { .. } => Self::clean(Cause::OutOfMemory { at: None }),
            other => Self::clean(Cause::Vmm(other)),
        }
    }
}

fn describe_place(at: &Option<(Stage, Rank)>) -> String {
    at.map(|(stage, rank)| format!("{stage}, {rank}: "))
        .unwrap_or_default()
}

fn describe_uncertain(runs: &[PageRun]) -> String {
    if runs.is_empty() {
        return String::new();
    }
    let names: Vec<String> = runs.iter().map(ToString::to_string).collect();
    format!(" (in doubt: {})", names.join(", "))
}
