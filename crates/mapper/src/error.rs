//! What a mapper answers when it did not do what was asked.

use std::fmt;

use kvcached_vmm::VmmError;
use thiserror::Error;

use crate::{Epoch, PageRun, Rank, Stage};

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
    /// Work that may still touch the memory has not ended within the bound; nothing changed.
    #[error("{epoch} has not retired")]
    InFlight {
        /// The epoch that was waited for.
        epoch: Epoch,
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

/// How far every place is known to have the pages it should.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Health {
    /// Every rank has exactly the runs that it should have.
    #[default]
    Healthy,
    /// Some pages are out of use until they are reconciled; every rank counts, and everything else
    /// goes on.
    Degraded {
        /// Ranks that do not know what they have, and why; empty if that is this process without
        /// others.
        ranks: Vec<Suspect>,
        /// Pages in doubt.
        pages: u32,
    },
    /// Of some rank it is not known what it has: it is not promised anything, and so nothing is
    /// begun at all until it has been resynchronised.
    Fenced {
        /// These ranks, and why, never none; then those that are in doubt only.
        ranks: Vec<Suspect>,
        /// Pages in doubt.
        pages: u32,
    },
}

/// A rank of which it is not known which pages it has.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{stage}, {rank}: {reason}")]
pub struct Suspect {
    /// Stage of the rank.
    pub stage: Stage,
    /// The rank itself.
    pub rank: Rank,
    /// What made it suspect, or what the last attempt to mend it ended with.
    pub reason: String,
}

/// What [`Mapper::reconcile`](crate::Mapper::reconcile) found out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reconciled {
    /// Of the runs asked about, those that are backed nowhere now.
    pub cold: Vec<PageRun>,
    /// Of the runs asked about, those that are backed everywhere now. What they hold is unknown.
    pub mapped: Vec<PageRun>,
    /// Ranks that had lost memory they should have had, and have it again, empty: whatever was
    /// written to the pool's mapped pages before is not to be read any more. Each loss is told
    /// once.
    pub lost: Vec<(Stage, Rank)>,
}

/// What [`RankMapper::resync`](crate::RankMapper::resync) did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resynced {
    /// Wanted runs that were not there, and are now, empty; those that an attempt which failed had
    /// made already among them. Each is told once.
    pub remade: Vec<PageRun>,
    /// Runs that are neither mapped nor cold, for all that was tried.
    pub in_doubt: Vec<PageRun>,
}

impl Health {
    /// Is new work refused?
    #[must_use]
    pub const fn is_fenced(&self) -> bool {
        matches!(self, Self::Fenced { .. })
    }

    /// The ranks concerned.
    #[must_use]
    pub fn ranks(&self) -> &[Suspect] {
        match self {
            Self::Healthy => &[],
            Self::Degraded { ranks, .. } | Self::Fenced { ranks, .. } => ranks,
        }
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, ranks, pages) = match self {
            Self::Healthy => return f.write_str("healthy"),
            Self::Degraded { ranks, pages } => ("degraded", ranks, pages),
            Self::Fenced { ranks, pages } => ("fenced", ranks, pages),
        };
        write!(f, "{word}, {pages} pages in doubt")?;
        ranks
            .iter()
            .try_for_each(|suspect| write!(f, "; {suspect}"))
    }
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
