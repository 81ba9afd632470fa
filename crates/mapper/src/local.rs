//! The mapper of one process: pages of one pool, backed by chunks of one driver.
//!
//! A batch is mapped in two parts. First every chunk is created: a device that is full says so
//! here, before anything was touched. Then extent after extent is backed; if one fails, those
//! before it are taken back in reverse. Unmapping keeps the chunks until the last extent is gone,
//! so that a failure half-way puts each back with its content.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kvcached_vmm::{Bytes, Chunk, Driver, VmmError};

use crate::{
    Cold, Extent, Geometry, MapError, Mapper, PageRun, Readiness, backing::Backing, runs::Record,
};

#[cfg(test)]
mod tests;

/// Backs the pages of one pool in this process.
///
/// The lock inside is held while the driver maps and unmaps, which a device does one at a time
/// anyway; not while waiting for the device's work, and not while memory is given back.
pub struct LocalMapper<D: Driver> {
    driver: Arc<D>,
    geometry: Geometry,
    cold: Cold,
    tensor_bases: Vec<u64>,
    pool: Mutex<Pool<D>>,
}

struct Pool<D: Driver> {
    backing: Backing<D>,
    record: Record,
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
        });
        Ok(Self {
            driver,
            geometry,
            cold,
            tensor_bases,
            pool,
        })
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

    /// Bytes behind the mapped runs; what runs in doubt still hold is not known, and not counted.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        u64::from(self.pool().record.mapped.pages()) * self.geometry.bundle_bytes()
    }

    /// Runs that a failure left neither mapped nor cold, in order. They are given back when the
    /// mapper is dropped, and not touched before.
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
        let mut steps = self.steps_for(runs);
        for (run, extent) in self.extents(runs) {
            let chunk = Arc::new(Chunk::create(&self.driver, extent.len)?);
            steps.push(Step { run, extent, chunk });
        }
        Ok(steps)
    }

    fn steps_for(&self, runs: &[PageRun]) -> Vec<Step<D>> {
        Vec::with_capacity(runs.len() * self.geometry.extents_per_page() as usize)
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
        let steps = self.create_chunks(runs)?;
        for (index, step) in steps.iter().enumerate() {
            if let Err(failed) = pool.backing.back(step.extent, Arc::clone(&step.chunk)) {
                let mut uncertain = BTreeSet::new();
                if !failed.restored {
                    uncertain.insert(step.run);
                }
                for done in steps[..index].iter().rev() {
                    if pool.backing.unback(done.extent).is_err() {
                        uncertain.insert(done.run);
                    }
                }
                return Err(pool.failed(failed.cause, uncertain));
            }
        }
        pool.record.insert_all(runs);
        Ok(())
    }

    fn unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
        if runs.is_empty() {
            return Ok(());
        }
        // A mistake is answered before the wait, and checked for again after it.
        self.pool().record.check_unmap(runs)?;
        self.driver.synchronize()?;

        let mut pool = self.pool();
        pool.record.check_unmap(runs)?;
        let mut taken = self.steps_for(runs);
        for (run, extent) in self.extents(runs) {
            match pool.backing.unback(extent) {
                Ok(chunk) => taken.push(Step { run, extent, chunk }),
                Err(failed) => {
                    let mut uncertain = BTreeSet::new();
                    if !failed.restored {
                        uncertain.insert(run);
                    }
                    for Step { run, extent, chunk } in taken.into_iter().rev() {
                        if pool.backing.back(extent, chunk).is_err() {
                            uncertain.insert(run);
                        }
                    }
                    return Err(pool.failed(failed.cause, uncertain));
                }
            }
        }
        pool.record.remove_all(runs);
        // Giving memory back takes the longer the larger the chunks: others need not wait for it.
        drop(pool);
        drop(taken);
        Ok(())
    }

    fn headroom(&self) -> Option<u32> {
        let pages = self.driver.memory().ok()?.free / self.geometry.bundle_bytes();
        Some(u32::try_from(pages).unwrap_or(u32::MAX))
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        // Whoever has a value has the addresses, and nothing else is needed.
        Ok(Readiness::Ready)
    }
}

impl<D: Driver> Pool<D> {
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
