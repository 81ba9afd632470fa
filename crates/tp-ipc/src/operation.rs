//! What a rank can be asked, and what it answers: the methods of [`Mapper`] as values, so that
//! they can be sent, or done in this process, by the same code.

use kvcached_mapper::{Cause, MapError, Mapper, PageRun, Readiness};

/// One call of a [`Mapper`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation<'a> {
    /// [`Mapper::map`].
    Map(&'a [PageRun]),
    /// [`Mapper::unmap`].
    Unmap(&'a [PageRun]),
    /// [`Mapper::ready`].
    Ready,
    /// [`Mapper::headroom`].
    Headroom,
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
}

/// An [`Operation`] without its runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Map,
    Unmap,
    Ready,
    Headroom,
}

impl<'a> Operation<'a> {
    /// Does it.
    #[must_use]
    pub fn perform(self, mapper: &dyn Mapper) -> Answer {
        match self {
            Self::Map(runs) => Answer::Batch(mapper.map(runs)),
            Self::Unmap(runs) => Answer::Batch(mapper.unmap(runs)),
            Self::Ready => Answer::Ready(mapper.ready()),
            Self::Headroom => Answer::Headroom(mapper.headroom()),
        }
    }

    pub(crate) const fn into_parts(self) -> (Kind, &'a [PageRun]) {
        match self {
            Self::Map(runs) => (Kind::Map, runs),
            Self::Unmap(runs) => (Kind::Unmap, runs),
            Self::Ready => (Kind::Ready, &[]),
            Self::Headroom => (Kind::Headroom, &[]),
        }
    }
}

impl Kind {
    /// What a rank did not do, when it did not.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::Unmap => "unmap",
            Self::Ready => "become ready",
            Self::Headroom => "tell its headroom",
        }
    }

    /// The operation's answer when it cannot be done.
    pub(crate) fn failed(self, cause: Cause) -> Answer {
        match self {
            Self::Map | Self::Unmap => Answer::Batch(Err(MapError::clean(cause))),
            Self::Ready => Answer::Ready(Err(MapError::clean(cause))),
            Self::Headroom => Answer::Headroom(None),
        }
    }

    pub(crate) const fn is_batch(self) -> bool {
        matches!(self, Self::Map | Self::Unmap)
    }

    /// What takes this batch back. The content of unmapped pages does not matter.
    pub(crate) const fn undoing(self) -> Self {
        match self {
            Self::Map => Self::Unmap,
            Self::Unmap => Self::Map,
            other => other,
        }
    }

    /// The inverse of [`Operation::into_parts`].
    pub(crate) const fn operation(self, runs: &[PageRun]) -> Operation<'_> {
        match self {
            Self::Map => Operation::Map(runs),
            Self::Unmap => Operation::Unmap(runs),
            Self::Ready => Operation::Ready,
            Self::Headroom => Operation::Headroom,
        }
    }
}
