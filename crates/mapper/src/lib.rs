//! From pages to bytes: the seam [`Mapper`] between who decides about pages and who backs them,
//! the layouts of a KV cache as pure arithmetic, and `LocalMapper`, which does the work in this
//! process.
//!
//! ```text
//! page 7 ──Layout──▶ one extent per tensor (or two) ──LocalMapper──▶ one chunk per extent
//! ```
//!
//! This is the only place that knows a layout. Who owns a page is not known here (that is
//! `kvcached-page-alloc`), and what a block means to an engine neither.

mod error;
mod geometry;
mod ids;
mod layout;
#[cfg(any(test, feature = "testing"))]
mod runs;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

use std::fmt;

pub use error::{Cause, MapError, NotReady, PeerCause, Readiness};
pub use geometry::{Extent, Geometry, View};
pub use ids::{PageId, PageRun, PoolId, Rank, Stage};
pub use layout::{KvBuffers, Layout, LayoutError, PageSize, ParseLayoutError, PoolSpec};

/// Backs the pages of one pool with memory, wherever that pool has a part: in this process, on
/// every rank of an engine, or nowhere at all in a test.
///
/// One value serves one pool. It is called from several threads at once, but never about the same
/// page at the same time: who calls holds the pages (page state *busy*).
///
/// # What the caller owes
///
/// - Runs of one call do not overlap and lie inside the pool.
/// - [`map`](Self::map) names cold pages only; [`unmap`](Self::unmap) names runs exactly as they
///   were mapped, never a part of one, never two joined.
/// - No lock that another thread needs is held across a call: it may wait for the driver or for
///   other processes, though never without a bound.
///
/// # What the implementer owes
///
/// - All or nothing: on `Err` every run of the batch is as it was before the call, on every rank,
///   except those listed in [`MapError::uncertain`], whose pages must not be used until they are
///   reconciled.
/// - [`Cause::OutOfMemory`] means full right now; everything else is broken until something is
///   mended.
/// - Memory behind a freshly mapped run reads as zero.
pub trait Mapper: fmt::Debug + Send + Sync {
    /// Backs every page of `runs`, each run with one chunk per extent.
    ///
    /// # Errors
    /// See the trait: nothing is backed, or the error names what is uncertain.
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError>;

    /// Takes the memory of `runs` away, and returns when the device can no longer touch it.
    ///
    /// # Errors
    /// See the trait: every run is backed as before, or the error names what is uncertain.
    fn unmap(&self, runs: &[PageRun]) -> Result<(), MapError>;

    /// How many more pages memory could back just now: a hint, never an admission, since other
    /// processes use the same device. `None` where it cannot be told.
    fn headroom(&self) -> Option<u32>;

    /// Is every place that must be mapped able to map?
    ///
    /// # Errors
    /// Only for what waiting cannot mend, such as a rank with another geometry; a rank that cannot
    /// be reached yet is [`Readiness::NotReady`].
    fn ready(&self) -> Result<Readiness, MapError>;
}

impl<M: Mapper + ?Sized> Mapper for std::sync::Arc<M> {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        (**self).map(runs)
    }

    fn unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
        (**self).unmap(runs)
    }

    fn headroom(&self) -> Option<u32> {
        (**self).headroom()
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        (**self).ready()
    }
}
