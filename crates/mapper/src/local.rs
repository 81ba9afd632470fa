//! The mapper of one process: pages of one pool, backed by chunks of one driver.
//!
//! A batch is mapped in two parts. First every chunk is created: a device that is full says so
//! here, before anything was touched. Then extent after extent is backed; if one fails, those
//! before it are taken back in reverse. Unmapping, too, has two parts: the first takes every extent
//! away and keeps the chunks, so that a failure half-way, here or on another rank, puts each back
//! with its content; the second lets go of the chunks, or leaves them with a
//! [`Recycler`] for the next batch. A resynchronisation leaves none: it may be for another engine.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kvcached_vmm::{Bytes, Chunk, Driver, Recycler, Tenant, VmmError};

use crate::{
    After, Cold, Epoch, Epochs, Extent, Geometry, Health, MapError, Mapper, PageRun, RankMapper,
    Readiness, Reconciled, Resynced, RunSet, backing::Backing, runs::Record,
};

#[cfg(test)]
mod tests;

/// Backs the pages of one pool in this process.
///
/// The lock inside is held while the driver maps and unmaps, which a device does one at a time
/// anyway; not while waiting for the device's work, and not while memory is given back, but by a
/// resynchronisation.
///
/// A page that is mapped anew reads as zero, unless the mapper has a [recycler](Self::with_recycler):
/// then it may hold what this pool has written since it was last [resynchronised](RankMapper::resync),
/// there or on another page. Never what another pool has, nor another engine before it.
pub struct LocalMapper<D: Driver> {
    driver: Arc<D>,
    geometry: Geometry,
    cold: Cold,
    tensor_bases: Vec<u64>,
    epochs: Arc<Epochs>,
    pool: Mutex<Pool<D>>,
    /// Where chunks come from that came free before, if they are kept.
    tenant: Option<Tenant<D>>,
}

struct Pool<D: Driver> {
    backing: Backing<D>,
    record: Record,
    /// Chunks of the prepared runs.
    prepared: BTreeMap<PageRun, Vec<Step<D>>>,
}

/// One extent of a batch, and the chunk that is to be, or was, behind it.
struct Step<D: Driver> {
    run: PageRun,
    extent: Extent,
    chunk: Arc<Chunk<D>>,
}

impl<D: Driver> LocalMapper<D> {
    /// Reserves the addresses of a pool; all of its pages are cold.
    ///
    /// # Errors
    /// [`VmmError::Misaligned`] for a geometry that was resolved for a finer granularity than the
    /// driver's, [`VmmError::Unavailable`] for [`Cold::Zero`] on a device that cannot alias, and
    /// what the driver answers, all as [`Cause::Vmm`](crate::Cause::Vmm); or
    /// [`Cause::OutOfMemory`](crate::Cause::OutOfMemory).
    pub fn new(driver: Arc<D>, geometry: Geometry, cold: Cold) -> Result<Self, MapError> {
        let (value, granularity) = (geometry.page_bytes(), driver.properties().granularity);
        if !value.is_multiple_of(granularity) {
            return Err(VmmError::Misaligned { value, granularity }.into());
        }
        let backing = Backing::new(&driver, &geometry, cold)?;
        let tensor_bases = backing.bases().collect();
        let pool = Mutex::new(Pool {
            backing,
            record: Record::new(geometry.pages()),
            prepared: BTreeMap::new(),
        });
        Ok(Self {
            driver,
            geometry,
            cold,
            tensor_bases,
            epochs: Arc::new(Epochs::new(Duration::ZERO)),
            pool,
            tenant: None,
        })
    }

    /// [`new`](Self::new) over the memory of `recycler`, which keeps the mapper's chunks [from then
    /// on](Self::with_recycler). A device that is full is asked once more after everything that is
    /// kept has gone back to it.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn over(
        recycler: &Arc<Recycler<D>>,
        geometry: &Geometry,
        cold: Cold,
    ) -> Result<Self, MapError> {
        let make = || Self::new(Arc::clone(recycler.driver()), geometry.clone(), cold);
        let made = recycler.with_room(MapError::is_full, make)?;
        Ok(made.with_recycler(recycler))
    }

    /// The same, with `epochs` to wait for; without, no epoch ever retires.
    #[must_use]
    pub fn with_epochs(self, epochs: Arc<Epochs>) -> Self {
        Self { epochs, ..self }
    }

    /// The same, whose chunks `recycler` keeps for it for a while when they come free; without, they
    /// go back to the device at once. The mapper is a tenant of its own there, whoever else is.
    ///
    /// # Panics
    /// If it keeps chunks of another driver value.
    #[must_use]
    pub fn with_recycler(self, recycler: &Arc<Recycler<D>>) -> Self {
        assert!(
            Arc::ptr_eq(&self.driver, recycler.driver()),
            "chunks are mapped by the driver value that made them"
        );
        Self {
            tenant: Some(recycler.tenant()),
            ..self
        }
    }

    /// Where every page and block lies.
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// First address of each tensor, as the device sees it; constant for the mapper's life.
    #[must_use]
    pub fn tensor_bases(&self) -> Vec<u64> {
        self.tensor_bases.clone()
    }

    /// The mapped runs in order, exactly as they were mapped.
    #[must_use]
    pub fn mapped(&self) -> Vec<PageRun> {
        self.pool().record.mapped.iter().collect()
    }

    /// Bytes behind the mapped runs. What prepared runs and runs in doubt still hold is not
    /// counted.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        u64::from(self.pool().record.mapped.pages()) * self.geometry.bundle_bytes()
    }

    /// Bytes behind no page that are kept for this pool's next ones.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.tenant.as_ref().map_or(0, Tenant::kept_bytes)
    }

    /// Runs that a failure left neither mapped nor cold, in order. They are not touched before they
    /// are [reconciled](Mapper::reconcile), and given back at the latest when the mapper is
    /// dropped.
    #[must_use]
    pub fn in_doubt(&self) -> Vec<PageRun> {
        self.pool().record.in_doubt.iter().collect()
    }

    fn pool(&self) -> MutexGuard<'_, Pool<D>> {
        // Should a driver panic in a call, the reservations still know what is mapped, and refuse
        // what does not fit; nothing is gained by panicking again in everyone else.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A chunk for each extent of `runs`, none of them mapped.
    fn create_chunks(&self, runs: &[PageRun]) -> Result<Vec<Step<D>>, VmmError> {
        let mut steps = Vec::with_capacity(runs.len() * self.geometry.extents_per_page() as usize);
        for (run, extent) in self.extents(runs) {
            let chunk = match &self.tenant {
                Some(tenant) => tenant.create(extent.len)?,
                None => Arc::new(Chunk::create(&self.driver, extent.len)?),
            };
            steps.push(Step { run, extent, chunk });
        }
        Ok(steps)
    }

    /// Chunks that came free: to be kept, as far as they may be.
    fn give_back(&self, steps: impl IntoIterator<Item = Step<D>>) {
        let chunks = steps.into_iter().map(|step| step.chunk);
        match &self.tenant {
            Some(tenant) => tenant.keep(chunks),
            None => chunks.for_each(drop),
        }
    }

    /// Backs `runs`, which may be mapped; that they are is the caller's to record.
    fn back(&self, pool: &mut Pool<D>, runs: &[PageRun]) -> Result<(), MapError> {
        let steps = self.create_chunks(runs)?;
        let backed = self.with_room(|| pool.put_behind(&steps));
        if backed.is_err() {
            self.give_back(steps);
        }
        backed
    }

    /// What `attempt` answers; if a full device, then what it answers once that has everything back
    /// that is kept, of other pools too. Mapping takes memory for the device's own tables.
    fn with_room<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, MapError>,
    ) -> Result<T, MapError> {
        match &self.tenant {
            Some(tenant) => tenant.recycler().with_room(MapError::is_full, attempt),
            None => attempt(),
        }
    }

    fn extents(&self, runs: &[PageRun]) -> impl Iterator<Item = (PageRun, Extent)> {
        runs.iter()
            .flat_map(|&run| self.geometry.extents(run).map(move |extent| (run, extent)))
    }
}

impl<D: Bytes> LocalMapper<D> {
    /// Copies `bytes`, at most `at.len` of them, to the start of `at`.
    ///
    /// # Errors
    /// [`VmmError::Fault`] where nothing writable is mapped, [`VmmError::OutOfRange`] where the
    /// pool has no such bytes.
    pub fn write(&self, at: Extent, bytes: &[u8]) -> Result<(), VmmError> {
        self.pool().backing.write(at, bytes)
    }

    /// Fills `buffer`, at most `at.len` long, from the start of `at`.
    ///
    /// # Errors
    /// [`VmmError::Fault`] where nothing is mapped, [`VmmError::OutOfRange`] where the pool has no
    /// such bytes.
    pub fn read(&self, at: Extent, buffer: &mut [u8]) -> Result<(), VmmError> {
        self.pool().backing.read(at, buffer)
    }
}

impl<D: Driver> Mapper for LocalMapper<D> {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        let mut pool = self.pool();
        pool.record.check_map(runs)?;
        self.back(&mut pool, runs)?;
        pool.record.insert_all(runs);
        Ok(())
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.prepare_unmap(runs, after)?;
        self.commit_unmap(runs);
        Ok(())
    }

    fn headroom(&self) -> Option<u32> {
        let free = self.driver.memory().ok()?.free;
        // A full device gets back what is kept, of all pools, before it is asked again.
        let kept = self.tenant.as_ref().map(Tenant::recycler);
        let free = free.saturating_add(kept.map_or(0, |recycler| recycler.kept_bytes()));
        let pages = free / self.geometry.bundle_bytes();
        Some(u32::try_from(pages).unwrap_or(u32::MAX))
    }

    fn trim(&self) {
        if let Some(tenant) = &self.tenant {
            tenant.clear();
        }
    }

    fn tend(&self, now: Instant) -> Option<Instant> {
        self.tenant.as_ref()?.tend(now)
    }

    fn kept_bytes(&self) -> u64 {
        Self::kept_bytes(self)
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        // Whoever has a value has the addresses, and nothing else is needed.
        Ok(Readiness::Ready)
    }

    fn retire(&self, epoch: Epoch) {
        self.epochs.retire(epoch);
    }

    fn health(&self) -> Health {
        match self.pool().record.in_doubt.pages() {
            0 => Health::Healthy,
            pages => Health::Degraded {
                ranks: Vec::new(),
                pages,
            },
        }
    }

    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        if self.pool().record.in_doubt.pages() > 0 {
            self.driver.synchronize()?;
        }
        let mut pool = self.pool();
        pool.settle(&self.geometry);
        let (cold, mapped) = pool.record.tell_apart(doubtful);
        Ok(Reconciled {
            cold,
            mapped,
            lost: Vec::new(),
        })
    }
}

impl<D: Driver> RankMapper for LocalMapper<D> {
    fn prepare_unmap(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        if runs.is_empty() {
            return Ok(());
        }
        // A mistake is answered before the wait, and checked for again after it.
        self.pool().record.check_unmap(runs)?;
        if let Some(epoch) = after.epoch {
            self.epochs.wait(epoch)?;
        }
        if after.device {
            self.driver.synchronize()?;
        }

        let mut pool = self.pool();
        pool.record.check_unmap(runs)?;
        let taken = self.with_room(|| pool.take_away(self.extents(runs)))?;
        pool.record.prepare_all(runs);
        for step in taken {
            pool.prepared.entry(step.run).or_default().push(step);
        }
        Ok(())
    }

    fn commit_unmap(&self, runs: &[PageRun]) {
        let mut pool = self.pool();
        let steps: Vec<_> = runs
            .iter()
            .flat_map(|&run| pool.forget_prepared(run))
            .collect();
        // Giving memory back takes the longer the larger the chunks: others need not wait for it.
        drop(pool);
        self.give_back(steps);
    }

    fn abort_unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
        let mut pool = self.pool();
        let mut failure: Option<MapError> = None;
        for &run in runs {
            if let Err(cause) = pool.restore_prepared(run) {
                let failure = failure.get_or_insert_with(|| cause.into());
                failure.uncertain.push(run);
            }
        }
        failure.map_or(Ok(()), Err)
    }

    fn resync_after(&self, wanted: &[PageRun], after: After) -> Result<Resynced, MapError> {
        let wanted_set: BTreeSet<PageRun> = wanted.iter().copied().collect();
        let (empty, leaving) = {
            let record = &self.pool().record;
            record.check_set(wanted)?;
            let leaving = record.mapped.iter().any(|run| !wanted_set.contains(&run));
            (record.is_empty(), leaving)
        };
        // Another engine may begin here. What an earlier one wrote and this one was not told of must
        // not come back behind a fresh page: neither what is kept, nor what goes below.
        self.trim();
        // Nothing mapped is nothing that work could touch.
        if !empty {
            self.driver.synchronize()?;
        }
        // Nobody waits for what is to go but its memory, so a rank need not stay away for it.
        let in_flight = match (leaving, after.epoch) {
            (true, Some(epoch)) => self.epochs.wait(epoch).is_err(),
            _ => false,
        };
        let mut pool = self.pool();

        let prepared: Vec<PageRun> = pool.record.prepared.iter().collect();
        for run in prepared {
            if wanted_set.contains(&run) {
                // What cannot be restored is in doubt, and settled with the others.
                let _ = pool.restore_prepared(run);
            } else {
                drop(pool.forget_prepared(run));
            }
        }
        pool.settle(&self.geometry);

        let mapped = pool.record.mapped.iter();
        let extra: Vec<PageRun> = mapped.filter(|run| !wanted_set.contains(run)).collect();
        let mut in_doubt: BTreeSet<PageRun> = pool.record.in_doubt.iter().collect();
        let mut staying = RunSet::default();
        if in_flight {
            in_doubt.extend(&extra);
            extra.iter().for_each(|&run| staying.insert(run));
        } else {
            let taken = self.with_room(|| pool.take_away(self.extents(&extra)))?;
            pool.record.remove_all(&extra);
            // At once, since what is missing may need the memory.
            drop(taken);
        }

        let mut missing = Vec::new();
        for &run in &wanted_set {
            let blocked = [&pool.record.in_doubt, &staying];
            if blocked.iter().any(|runs| runs.overlapping(run).is_some()) {
                in_doubt.insert(run);
            } else if !pool.record.mapped.contains(run) {
                missing.push(run);
            }
        }
        // One by one: what memory there is serves as many runs as it can, and the next attempt
        // needs the less, but tells of these too.
        for run in missing {
            self.back(&mut pool, &[run])?;
            pool.record.remake(run);
        }
        Ok(Resynced {
            remade: pool.record.take_remade(),
            in_doubt: in_doubt.into_iter().collect(),
        })
    }

    fn mapped(&self) -> Vec<PageRun> {
        Self::mapped(self)
    }
}

impl<D: Driver> Pool<D> {
    /// Puts the chunks of all `steps` behind their extents, or of none.
    fn put_behind(&mut self, steps: &[Step<D>]) -> Result<(), MapError> {
        for (index, step) in steps.iter().enumerate() {
            if let Err(failed) = self.backing.back(step.extent, Arc::clone(&step.chunk)) {
                let mut uncertain = BTreeSet::new();
                if !failed.restored {
                    uncertain.insert(step.run);
                }
                for done in steps[..index].iter().rev() {
                    if self.backing.unback(done.extent).is_err() {
                        uncertain.insert(done.run);
                    }
                }
                return Err(self.failed(failed.cause, uncertain));
            }
        }
        Ok(())
    }

    /// Takes the chunks of all `extents` away, or of none.
    fn take_away(
        &mut self,
        extents: impl Iterator<Item = (PageRun, Extent)>,
    ) -> Result<Vec<Step<D>>, MapError> {
        let mut taken: Vec<Step<D>> = Vec::with_capacity(extents.size_hint().0);
        for (run, extent) in extents {
            match self.backing.unback(extent) {
                Ok(chunk) => taken.push(Step { run, extent, chunk }),
                Err(failed) => {
                    let mut uncertain = BTreeSet::new();
                    if !failed.restored {
                        uncertain.insert(run);
                    }
                    for Step { run, extent, chunk } in taken.into_iter().rev() {
                        if self.backing.back(extent, chunk).is_err() {
                            uncertain.insert(run);
                        }
                    }
                    return Err(self.failed(failed.cause, uncertain));
                }
            }
        }
        Ok(taken)
    }

    /// Ends the preparation of `run`, if it is prepared; its chunks, not mapped anywhere.
    fn forget_prepared(&mut self, run: PageRun) -> Vec<Step<D>> {
        let steps = self.prepared.remove(&run);
        if steps.is_some() {
            self.record.commit(run);
        }
        steps.unwrap_or_default()
    }

    /// Maps `run` again, if it is prepared. On `Err` it is in doubt.
    fn restore_prepared(&mut self, run: PageRun) -> Result<(), VmmError> {
        let Some(steps) = self.prepared.remove(&run) else {
            return Ok(());
        };
        for Step { extent, chunk, .. } in steps {
            if let Err(failed) = self.backing.back(extent, chunk) {
                self.record.doubt(run);
                return Err(failed.cause);
            }
        }
        self.record.restore(run);
        Ok(())
    }

    /// Makes runs in doubt cold, as far as that can be done.
    fn settle(&mut self, geometry: &Geometry) {
        let in_doubt: Vec<PageRun> = self.record.in_doubt.iter().collect();
        for run in in_doubt {
            let settled = geometry
                .extents(run)
                .try_for_each(|extent| self.backing.settle(extent));
            match settled {
                Ok(()) => self.record.in_doubt.remove(run),
                Err(error) => tracing::warn!(%run, %error, "still in doubt"),
            }
        }
    }

    /// The answer to a batch that failed for `cause`, of which `uncertain` could not be undone.
    fn failed(&mut self, cause: VmmError, uncertain: BTreeSet<PageRun>) -> MapError {
        let uncertain: Vec<PageRun> = uncertain.into_iter().collect();
        uncertain.iter().for_each(|&run| self.record.doubt(run));
        MapError {
            uncertain,
            ..cause.into()
        }
    }
}

impl<D: Driver> fmt::Debug for LocalMapper<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalMapper")
            .field("geometry", &self.geometry)
            .field("cold", &self.cold)
            .field("tensor_bases", &self.tensor_bases)
            .finish_non_exhaustive()
    }
}
