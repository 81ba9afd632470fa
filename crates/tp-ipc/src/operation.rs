//! What a rank can be asked, and what it answers: the methods of [`Mapper`] as values, so that
//! they can be sent, or done in this process, by the same code.

use kvcached_mapper::{MapError, Mapper, PageRun, Readiness};

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

impl Operation<'_> {
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
}
