//! What can be asked of all ranks, and what one rank is told for it: calls as values, so that they
//! can be sent, or done in this process, by the same code.

use kvcached_mapper::{
    After, Cause, MapError, PageRun, RankMapper, Readiness, Reconciled, Resynced,
};

/// One call of a [`Mapper`](kvcached_mapper::Mapper) over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation<'a> {
    /// [`Mapper::map`](kvcached_mapper::Mapper::map).
    Map(&'a [PageRun]),
    /// [`Mapper::unmap_after`](kvcached_mapper::Mapper::unmap_after).
    Unmap(&'a [PageRun], After),
    /// [`Mapper::ready`](kvcached_mapper::Mapper::ready).
    Ready,
    /// [`Mapper::headroom`](kvcached_mapper::Mapper::headroom).
    Headroom,
    /// [`Mapper::trim`](kvcached_mapper::Mapper::trim).
    Trim,
    /// [`Mapper::reconcile`](kvcached_mapper::Mapper::reconcile).
    Reconcile(&'a [PageRun]),
}

/// What an [`Operation`] came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Of [`Operation::Map`] or [`Operation::Unmap`].
    Batch(Result<(), MapError>),
    /// Of [`Operation::Ready`].
    Ready(Result<Readiness, MapError>),
    /// Of [`Operation::Headroom`].
    Headroom(Option<u32>),
    /// Of [`Operation::Trim`], whoever did it.
    Trimmed,
    /// Of [`Operation::Reconcile`].
    Reconciled(Result<Reconciled, MapError>),
}

/// One step of an operation on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankCall<'a> {
    /// Map these runs.
    Map(&'a [PageRun]),
    /// Unmap runs that were mapped a moment ago, and never used.
    Undo(&'a [PageRun]),
    /// [`RankMapper::prepare_unmap`].
    Prepare(&'a [PageRun], After),
    /// [`RankMapper::commit_unmap`].
    Commit(&'a [PageRun]),
    /// [`RankMapper::abort_unmap`].
    Abort(&'a [PageRun]),
    /// [`RankMapper::resync_after`].
    Resync(&'a [PageRun], After),
    /// [`Mapper::ready`](kvcached_mapper::Mapper::ready).
    Ready,
    /// [`Mapper::headroom`](kvcached_mapper::Mapper::headroom).
    Headroom,
    /// [`Mapper::trim`](kvcached_mapper::Mapper::trim).
    Trim,
}

/// What a [`RankCall`] came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RankAnswer {
    /// Of every call that is about a batch of runs.
    Batch(Result<(), MapError>),
    /// Of [`RankCall::Resync`].
    Resynced(Result<Resynced, MapError>),
    /// Of [`RankCall::Ready`].
    Ready(Result<Readiness, MapError>),
    /// Of [`RankCall::Headroom`].
    Headroom(Option<u32>),
    /// Of [`RankCall::Trim`].
    Trimmed,
}

/// An [`Operation`] without its runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Map,
    Unmap(After),
    Ready,
    Headroom,
    Trim,
    Reconcile,
}

impl RankCall<'_> {
    /// Does it.
    #[must_use]
    pub fn perform(self, mapper: &dyn RankMapper) -> RankAnswer {
        match self {
            Self::Map(runs) => RankAnswer::Batch(mapper.map(runs)),
            Self::Undo(runs) => RankAnswer::Batch(mapper.unmap_after(runs, After::NOTHING)),
            Self::Prepare(runs, after) => RankAnswer::Batch(mapper.prepare_unmap(runs, after)),
            Self::Commit(runs) => {
                mapper.commit_unmap(runs);
                RankAnswer::Batch(Ok(()))
            }
            Self::Abort(runs) => RankAnswer::Batch(mapper.abort_unmap(runs)),
            Self::Resync(runs, after) => RankAnswer::Resynced(mapper.resync_after(runs, after)),
            Self::Ready => RankAnswer::Ready(mapper.ready()),
            Self::Headroom => RankAnswer::Headroom(mapper.headroom()),
            Self::Trim => {
                mapper.trim();
                RankAnswer::Trimmed
            }
        }
    }
}

impl<'a> Operation<'a> {
    pub(crate) const fn into_parts(self) -> (Kind, &'a [PageRun]) {
        match self {
            Self::Map(runs) => (Kind::Map, runs),
            Self::Unmap(runs, after) => (Kind::Unmap(after), runs),
            Self::Ready => (Kind::Ready, &[]),
            Self::Headroom => (Kind::Headroom, &[]),
            Self::Trim => (Kind::Trim, &[]),
            Self::Reconcile(runs) => (Kind::Reconcile, runs),
        }
    }
}

impl Kind {
    /// What a rank did not do, when it did not.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::Unmap(_) => "unmap",
            Self::Ready => "become ready",
            Self::Headroom => "tell its headroom",
            Self::Trim => "trim",
            Self::Reconcile => "resynchronise",
        }
    }

    /// The operation's answer when it cannot be done.
    pub(crate) fn failed(self, error: MapError) -> Answer {
        match self {
            Self::Map | Self::Unmap(_) => Answer::Batch(Err(error)),
            Self::Ready => Answer::Ready(Err(error)),
            Self::Headroom => Answer::Headroom(None),
            Self::Trim => Answer::Trimmed,
            Self::Reconcile => Answer::Reconciled(Err(error)),
        }
    }

    /// The same for a cause that leaves nothing in doubt.
    pub(crate) fn refused(self, cause: Cause) -> Answer {
        self.failed(MapError::clean(cause))
    }

    pub(crate) const fn is_batch(self) -> bool {
        matches!(self, Self::Map | Self::Unmap(_))
    }

    /// May it go to ranks that have to be joined first?
    pub(crate) const fn joins(self) -> bool {
        matches!(self, Self::Ready | Self::Reconcile)
    }
}
