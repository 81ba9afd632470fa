//! How long each call took, measured around the mappers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use kvcached_mapper::{
    After, Epoch, Health, MapError, Mapper, PageRun, RankMapper, Readiness, Reconciled, Resynced,
};
use serde::{Deserialize, Serialize};

/// What took time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Call {
    /// An allocation of blocks for which nothing had to be mapped.
    Alloc,
    /// One that waited for pages to be mapped.
    AllocMapped,
    /// Backing pages, on every rank.
    Map,
    /// Taking memory away, on every rank.
    Unmap,
    /// The part of `Map` or `Unmap` that was spent on ranks in other processes.
    Broadcast,
}

/// One call and its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Timed {
    pub(crate) call: Call,
    pub(crate) ns: u64,
}

/// The calls of one model since somebody last asked.
#[derive(Debug, Default)]
pub(crate) struct Meters {
    calls: Mutex<Vec<Timed>>,
    /// How long the part in this process took, of the call under way.
    local_ns: AtomicU64,
    /// Calls that map, since the start.
    maps: AtomicU64,
}

/// Measures whole calls, as the page allocator sees them, and the other ranks' part of them.
#[derive(Debug)]
struct Whole {
    inner: Arc<dyn Mapper>,
    meters: Arc<Meters>,
    has_remotes: bool,
}

/// Measures this process's part of a call.
#[derive(Debug)]
struct Local {
    inner: Arc<dyn RankMapper>,
    meters: Arc<Meters>,
}

impl Meters {
    /// `inner`, measured as the whole of a call.
    pub(crate) fn whole(
        self: &Arc<Self>,
        inner: Arc<dyn Mapper>,
        has_remotes: bool,
    ) -> Arc<dyn Mapper> {
        Arc::new(Whole {
            inner,
            meters: Arc::clone(self),
            has_remotes,
        })
    }

    /// `inner`, measured as the part of a call in this process.
    pub(crate) fn local(self: &Arc<Self>, inner: Arc<dyn RankMapper>) -> Arc<dyn RankMapper> {
        Arc::new(Local {
            inner,
            meters: Arc::clone(self),
        })
    }

    /// Measures one allocation.
    pub(crate) fn alloc<R>(&self, call: impl FnOnce() -> R) -> R {
        // One engine asks, and nothing maps behind its back.
        let before = self.maps.load(Ordering::Relaxed);
        let (result, ns) = timed(call);
        let has_mapped = self.maps.load(Ordering::Relaxed) > before;
        let call = match has_mapped {
            true => Call::AllocMapped,
            false => Call::Alloc,
        };
        self.record(call, ns);
        result
    }

    /// Every call since this was last asked, in order.
    pub(crate) fn take(&self) -> Vec<Timed> {
        std::mem::take(&mut *self.calls.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn record(&self, call: Call, ns: u64) {
        self.calls
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Timed { call, ns });
    }
}

impl Whole {
    fn measure(
        &self,
        call: Call,
        act: impl FnOnce() -> Result<(), MapError>,
    ) -> Result<(), MapError> {
        self.meters.local_ns.store(0, Ordering::Relaxed);
        let (result, ns) = timed(act);
        self.meters.record(call, ns);
        if self.has_remotes {
            let local_ns = self.meters.local_ns.load(Ordering::Relaxed);
            self.meters
                .record(Call::Broadcast, ns.saturating_sub(local_ns));
        }
        result
    }
}

impl Mapper for Whole {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.meters.maps.fetch_add(1, Ordering::Relaxed);
        self.measure(Call::Map, || self.inner.map(runs))
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.measure(Call::Unmap, || self.inner.unmap_after(runs, after))
    }

    fn headroom(&self) -> Option<u32> {
        self.inner.headroom()
    }

    fn trim(&self) {
        self.inner.trim();
    }

    fn tend(&self, now: Instant) -> Option<Instant> {
        self.inner.tend(now)
    }

    fn kept_bytes(&self) -> u64 {
        self.inner.kept_bytes()
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        self.inner.ready()
    }

    fn retire(&self, epoch: Epoch) {
        self.inner.retire(epoch);
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        self.inner.reconcile(doubtful)
    }
}

impl Local {
    fn measure<R>(&self, act: impl FnOnce() -> R) -> R {
        let (result, ns) = timed(act);
        self.meters.local_ns.fetch_add(ns, Ordering::Relaxed);
        result
    }
}

impl Mapper for Local {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.measure(|| self.inner.map(runs))
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.measure(|| self.inner.unmap_after(runs, after))
    }

    fn headroom(&self) -> Option<u32> {
        self.inner.headroom()
    }

    fn trim(&self) {
        self.inner.trim();
    }

    fn tend(&self, now: Instant) -> Option<Instant> {
        self.inner.tend(now)
    }

    fn kept_bytes(&self) -> u64 {
        self.inner.kept_bytes()
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        self.inner.ready()
    }

    fn retire(&self, epoch: Epoch) {
        self.inner.retire(epoch);
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        self.inner.reconcile(doubtful)
    }
}

impl RankMapper for Local {
    fn prepare_unmap(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.measure(|| self.inner.prepare_unmap(runs, after))
    }

    fn commit_unmap(&self, runs: &[PageRun]) {
        self.measure(|| self.inner.commit_unmap(runs));
    }

    fn abort_unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.measure(|| self.inner.abort_unmap(runs))
    }

    fn resync_after(&self, wanted: &[PageRun], after: After) -> Result<Resynced, MapError> {
        self.inner.resync_after(wanted, after)
    }

    fn mapped(&self) -> Vec<PageRun> {
        self.inner.mapped()
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "measuring is what this file is for"
)]
fn timed<R>(call: impl FnOnce() -> R) -> (R, u64) {
    let start = Instant::now();
    let result = call();
    (
        result,
        u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
    )
}
