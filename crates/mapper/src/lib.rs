//! From pages to bytes: the seam [`Mapper`] between who decides about pages and who backs them,
//! the layouts of a KV cache as pure arithmetic, and [`LocalMapper`], which does the work in this
//! process.
//!
//! ```text
//! page 7 ──Layout──▶ one extent per tensor (or two) ──LocalMapper──▶ one chunk per extent
//! ```
//!
//! This is the only place that knows a layout. Who owns a page is not known here (that is
//! `kvcached-page-alloc`), and what a block means to an engine neither.
//!
//! ```
//! use std::sync::Arc;
//! use kvcached_mapper::{
//!     Cold, KvBuffers, Layout, LocalMapper, Mapper, PageId, PageRun, PageSize, PoolSpec,
//! };
//! use kvcached_vmm::{Driver, Host, HostConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A device with 1 GiB of memory, a pool with 64 GiB of addresses: 32 layers of K and V, blocks
//! // of 16 tokens × 8 heads × 128 values × 2 bytes.
//! let device = Arc::new(Host::new(HostConfig::new(1 << 30))?);
//! let spec = PoolSpec {
//!     layout: Layout::Contiguous,
//!     layers: 32,
//!     kv_buffers: KvBuffers::Two,
//!     block_bytes: 16 * 8 * 128 * 2,
//!     page_size: PageSize::Auto,
//!     capacity_bytes: 64 << 30,
//! };
//! let geometry = spec.resolve(device.properties().granularity)?;
//! let mapper = LocalMapper::new(device, geometry, Cold::Unbacked)?;
//!
//! // Three adjacent pages are backed together, by one chunk: this layout has one extent a run.
//! let run = PageRun::new(PageId(7), 3).ok_or("no page")?;
//! mapper.map(&[run])?;
//! assert_eq!(mapper.mapped_bytes(), 3 * mapper.geometry().bundle_bytes());
//!
//! // K of layer 0 of the first block in page 8, as an engine would write it.
//! let block = mapper.geometry().blocks_in(PageId(8)).start;
//! let piece = mapper.geometry().block_pieces(block).and_then(|mut p| p.next()).ok_or("none")?;
//! mapper.write(piece, b"key")?;
//!
//! // Once it is taken away, a stray access faults instead of reading what was there.
//! mapper.unmap(&[run])?;
//! assert!(mapper.read(piece, &mut [0; 3]).is_err());
//! # Ok(())
//! # }
//! ```

mod backing;
mod epoch;
mod error;
mod geometry;
mod ids;
mod layout;
mod local;
mod runs;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

use std::fmt;
use std::time::Instant;

pub use backing::Cold;
pub use epoch::{After, Epoch, Epochs};
pub use error::{
    Cause, Health, MapError, NotReady, PeerCause, Readiness, Reconciled, Resynced, Suspect,
};
pub use geometry::{Extent, Geometry, View};
pub use ids::{PageId, PageRun, PoolId, Rank, Stage};
pub use layout::{KvBuffers, Layout, LayoutError, PageSize, ParseLayoutError, PoolSpec};
pub use local::LocalMapper;
pub use runs::RunSet;

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
/// - Memory behind a freshly mapped run holds nothing of another pool: it reads as zero, or as what
///   this pool once wrote, on whatever page. Nobody may rely on either.
pub trait Mapper: fmt::Debug + Send + Sync {
    /// Backs every page of `runs`, each run with one chunk per extent.
    ///
    /// # Errors
    /// See the trait: nothing is backed, or the error names what is uncertain.
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError>;

    /// Takes the memory of `runs` away once what `after` names has ended, and returns when the
    /// device can no longer touch it.
    ///
    /// # Errors
    /// See the trait: every run is backed as before, or the error names what is uncertain.
    /// [`Cause::InFlight`] if what `after` names has not ended within a bound.
    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError>;

    /// The same after all that was launched so far.
    ///
    /// # Errors
    /// As [`unmap_after`](Self::unmap_after).
    fn unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.unmap_after(runs, After::DEVICE)
    }

    /// How many more pages memory could back just now: a hint, never an admission, since other
    /// processes use the same device. `None` where it cannot be told.
    fn headroom(&self) -> Option<u32>;

    /// Lets go of memory that is behind no page and was only kept to be used again, wherever this
    /// pool has a part; no page changes. Waits for others no longer than for a hint, and where
    /// somebody cannot be reached nothing is the worse for it. As given here, for a mapper that keeps
    /// nothing.
    fn trim(&self) {}

    /// Lets go, in this process, of what was kept so for too long at `now`, and answers when to ask
    /// again; `None` while nothing is kept. Waits for nobody. Whoever has a thread to do it with asks
    /// now and then, and at that moment. As given here, for a mapper that keeps nothing.
    fn tend(&self, now: Instant) -> Option<Instant> {
        let _ = now;
        None
    }

    /// Bytes of the rank in this process that are behind no page and kept so: memory that the pool
    /// still has beside what is mapped. Waits for nobody. As given here, for a mapper that keeps
    /// nothing, or has no part in this process.
    fn kept_bytes(&self) -> u64 {
        0
    }

    /// Is every place that must be mapped able to map?
    ///
    /// # Errors
    /// Only for what waiting cannot mend, such as a rank with another geometry; a rank that cannot
    /// be reached yet is [`Readiness::NotReady`].
    fn ready(&self) -> Result<Readiness, MapError>;

    /// This epoch and all before it have ended on every rank, as the engine says. Waits for nobody.
    /// As given here, for a mapper that does not count epochs.
    fn retire(&self, epoch: Epoch) {
        let _ = epoch;
    }

    /// How far every place is known to have the pages it should, as of the last call. Waits for
    /// nobody. As given here, for a mapper that never leaves anything in doubt.
    fn health(&self) -> Health {
        Health::Healthy
    }

    /// Looks whether every place is still there, brings those in doubt back to a known state, and
    /// tells what is now true of `doubtful` runs, which earlier calls named uncertain. One attempt:
    /// who wants more calls again. Costs little while all is well. As given here, for a mapper that
    /// never leaves anything in doubt.
    ///
    /// # Errors
    /// The first place that could not be mended; nothing is known about `doubtful` then.
    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        let _ = doubtful;
        Ok(Reconciled::default())
    }
}

/// One rank's part of a pool, as a transaction over several ranks needs it: a [`Mapper`] that takes
/// memory away in two steps, and that can be told the whole of what it must have.
///
/// A run is prepared between [`prepare_unmap`](Self::prepare_unmap) and either
/// [`commit_unmap`](Self::commit_unmap) or [`abort_unmap`](Self::abort_unmap). Meanwhile it is
/// neither mapped nor free to be mapped. [`Mapper::unmap_after`] is the first two in one.
pub trait RankMapper: Mapper {
    /// Once what `after` names has ended, makes `runs` unreachable for the device, and keeps their
    /// memory with its content.
    ///
    /// # Errors
    /// As for [`Mapper::unmap_after`].
    fn prepare_unmap(&self, runs: &[PageRun], after: After) -> Result<(), MapError>;

    /// Gives the memory of prepared runs back. Runs that are not prepared are passed over.
    fn commit_unmap(&self, runs: &[PageRun]);

    /// Maps prepared runs again, with their content. Runs that are not prepared are passed over.
    ///
    /// # Errors
    /// The runs that could not be mapped again are [`MapError::uncertain`]; all others are mapped.
    fn abort_unmap(&self, runs: &[PageRun]) -> Result<(), MapError>;

    /// Makes `wanted` exactly the runs that are mapped, whatever was mapped, prepared or in doubt
    /// before. What stays keeps its content; what goes, goes after [`After::DEVICE`] and what `after`
    /// names. If that has not ended within a bound, runs that were to go are in doubt, and stay.
    ///
    /// # Errors
    /// What stood in the way, such as memory for a run that is missing. Some of the work may be
    /// done; the next attempt does the rest.
    fn resync_after(&self, wanted: &[PageRun], after: After) -> Result<Resynced, MapError>;

    /// The same after all that was launched so far.
    ///
    /// # Errors
    /// As [`resync_after`](Self::resync_after).
    fn resync(&self, wanted: &[PageRun]) -> Result<Resynced, MapError> {
        self.resync_after(wanted, After::DEVICE)
    }

    /// The mapped runs in order, exactly as they were mapped.
    fn mapped(&self) -> Vec<PageRun>;
}

impl<M: Mapper + ?Sized> Mapper for std::sync::Arc<M> {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        (**self).map(runs)
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        (**self).unmap_after(runs, after)
    }

    fn headroom(&self) -> Option<u32> {
        (**self).headroom()
    }

    fn trim(&self) {
        (**self).trim();
    }

    fn tend(&self, now: Instant) -> Option<Instant> {
        (**self).tend(now)
    }

    fn kept_bytes(&self) -> u64 {
        (**self).kept_bytes()
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        (**self).ready()
    }

    fn retire(&self, epoch: Epoch) {
        (**self).retire(epoch);
    }

    fn health(&self) -> Health {
        (**self).health()
    }

    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        (**self).reconcile(doubtful)
    }
}
