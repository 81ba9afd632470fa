//! Chunks that came free and stay a while, so that steady traffic need not ask the device for
//! memory and give it back over and over.
//!
//! ```text
//!            of 2 MiB             of 32 MiB
//! tenant 1   [oldest … newest]    [oldest … newest]    create takes the newest of exactly that length
//! tenant 2   [oldest … newest]                         tend lets go of the oldest
//! ```
//!
//! A chunk that is kept keeps its content, too. So it serves its own tenant only: to anybody else,
//! in this process or another, memory goes through the device, which clears it.
//!
//! What is kept counts against the device. It is bounded in bytes over all tenants and in time, and
//! goes at once when the device says that it is full.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::{Chunk, Driver, VmmError};

/// How many chunks one look lets go of: each takes the device some ten microseconds and more, and
/// whoever looks has others to serve.
const RELEASES_PER_LOOK: usize = 4;

/// How much is kept, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecyclerConfig {
    /// Bytes kept at most, over all tenants; 0 keeps nothing.
    pub limit_bytes: u64,
    /// How long a chunk is kept that nobody asks for.
    pub idle: Duration,
}

impl RecyclerConfig {
    /// Keeps nothing.
    pub const OFF: Self = Self {
        limit_bytes: 0,
        idle: Duration::ZERO,
    };
}

impl Default for RecyclerConfig {
    /// 256 MiB, half a second: what a neighbour on the device cannot get at for so long.
    fn default() -> Self {
        Self {
            limit_bytes: 256 << 20,
            idle: Duration::from_millis(500),
        }
    }
}

/// Keeps chunks of one device for the tenants of one process, and gives them back to the device when
/// it is dropped.
///
/// Time is told by who calls [`Tenant::tend`], and passes by no other way: without, chunks stay
/// until the device is full or somebody clears them away. No lock is held while the device is asked.
#[derive(Debug)]
pub struct Recycler<D: Driver> {
    driver: Arc<D>,
    config: RecyclerConfig,
    shelves: Mutex<Shelves<D>>,
}

/// One who gets back only what it has given: a pool, say. Dropped, it lets go of what is kept for
/// it.
#[derive(Debug)]
pub struct Tenant<D: Driver> {
    recycler: Arc<Recycler<D>>,
    number: u64,
}

#[derive(Debug)]
struct Shelves<D: Driver> {
    /// By tenant and length, oldest first; none is empty.
    by_length: BTreeMap<(u64, u64), VecDeque<Kept<D>>>,
    kept_bytes: u64,
    /// Number of the latest tenant.
    tenants: u64,
}

#[derive(Debug)]
struct Kept<D: Driver> {
    chunk: Arc<Chunk<D>>,
    /// The first look that found it here.
    since: Option<Instant>,
}

impl<D: Driver> Recycler<D> {
    /// Keeps chunks of `driver`, none so far.
    #[must_use]
    pub const fn new(driver: Arc<D>, config: RecyclerConfig) -> Self {
        Self {
            driver,
            config,
            shelves: Mutex::new(Shelves {
                by_length: BTreeMap::new(),
                kept_bytes: 0,
                tenants: 0,
            }),
        }
    }

    /// Where the memory comes from.
    #[must_use]
    pub const fn driver(&self) -> &Arc<D> {
        &self.driver
    }

    /// Somebody new, for whom nothing is kept yet.
    #[must_use]
    pub fn tenant(self: &Arc<Self>) -> Tenant<D> {
        let mut shelves = self.shelves();
        shelves.tenants += 1;
        Tenant {
            recycler: Arc::clone(self),
            number: shelves.tenants,
        }
    }

    /// Bytes that are kept, over all tenants.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.shelves().kept_bytes
    }

    /// Lets go of everything, whoever it is kept for; answers how many bytes.
    pub fn clear(&self) -> u64 {
        let mut shelves = self.shelves();
        let gone = std::mem::take(&mut shelves.by_length);
        let bytes = std::mem::take(&mut shelves.kept_bytes);
        drop(shelves);
        drop(gone);
        bytes
    }

    /// What `attempt` answers; if that the device is full, then what it answers once that has
    /// everything back that is kept, whoever it is for.
    ///
    /// # Errors
    /// Those of the last attempt.
    pub fn with_room<T, E>(
        &self,
        is_full: impl FnOnce(&E) -> bool,
        mut attempt: impl FnMut() -> Result<T, E>,
    ) -> Result<T, E> {
        match attempt() {
            Err(error) if is_full(&error) && self.clear() > 0 => attempt(),
            other => other,
        }
    }

    fn shelves(&self) -> MutexGuard<'_, Shelves<D>> {
        // Nothing that is done under the lock can panic half-way.
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Driver> Tenant<D> {
    /// Who keeps its chunks.
    #[must_use]
    pub const fn recycler(&self) -> &Arc<Recycler<D>> {
        &self.recycler
    }

    /// A chunk of exactly `len` bytes: one that was kept, with what this tenant left in it, or a
    /// fresh one of zeros.
    ///
    /// A device that is full is asked once more after everything that is kept has gone back to it,
    /// of other tenants too.
    ///
    /// # Errors
    /// As [`Chunk::create`].
    pub fn create(&self, len: u64) -> Result<Arc<Chunk<D>>, VmmError> {
        let kept = self.recycler.shelves().take(self.number, len);
        if let Some(chunk) = kept {
            return Ok(chunk);
        }
        let is_full = |error: &VmmError| matches!(error, VmmError::OutOfMemory { .. });
        let fresh = || Chunk::create_for(&self.recycler.driver, len, self.number);
        self.recycler.with_room(is_full, fresh).map(Arc::new)
    }

    /// Keeps chunks, as far as the bound allows, and lets go of the others.
    ///
    /// A chunk that somebody else holds too, that is mapped, or that this tenant did not create is
    /// never kept.
    pub fn keep(&self, chunks: impl IntoIterator<Item = Arc<Chunk<D>>>) {
        let Recycler { driver, config, .. } = &*self.recycler;
        let mut gone = Vec::new();
        let mut shelves = self.recycler.shelves();
        for mut chunk in chunks {
            let len = chunk.byte_len();
            let own = chunk.tenant() == self.number && chunk.belongs_to(driver);
            let idle = Arc::get_mut(&mut chunk).is_some_and(|chunk| !chunk.is_mapped());
            let room = config.limit_bytes.saturating_sub(shelves.kept_bytes);
            if own && idle && len <= room {
                shelves.put(self.number, chunk);
            } else {
                gone.push(chunk);
            }
        }
        drop(shelves);
        drop(gone);
    }

    /// Lets go of chunks that were kept for longer than the idle time, the oldest first, and answers
    /// when to look again; `None` while nothing is kept. It lets go of a few at a time, so that may
    /// be at once.
    ///
    /// The idle time of a chunk begins with the first look after it came.
    pub fn tend(&self, now: Instant) -> Option<Instant> {
        let mut shelves = self.recycler.shelves();
        let (gone, next) = shelves.expire(self.number, now, self.recycler.config.idle);
        drop(shelves);
        drop(gone);
        next
    }

    /// Lets go of everything that is kept for this tenant; answers how many bytes.
    pub fn clear(&self) -> u64 {
        let gone = self.recycler.shelves().remove(self.number);
        gone.iter().map(|kept| kept.chunk.byte_len()).sum()
    }

    /// Bytes that are kept for this tenant.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.recycler.shelves().kept_bytes_of(self.number)
    }
}

impl<D: Driver> Drop for Tenant<D> {
    fn drop(&mut self) {
        self.clear();
    }
}

impl<D: Driver> Shelves<D> {
    /// The newest, since whatever the tenant has most of is what it needs least often.
    fn take(&mut self, tenant: u64, len: u64) -> Option<Arc<Chunk<D>>> {
        let shelf = self.by_length.get_mut(&(tenant, len))?;
        let kept = shelf.pop_back()?;
        self.left(tenant, len);
        Some(kept.chunk)
    }

    fn put(&mut self, tenant: u64, chunk: Arc<Chunk<D>>) {
        let len = chunk.byte_len();
        let shelf = self.by_length.entry((tenant, len)).or_default();
        shelf.push_back(Kept { chunk, since: None });
        self.kept_bytes += len;
    }

    /// A chunk of that length has left its shelf.
    fn left(&mut self, tenant: u64, len: u64) {
        self.kept_bytes -= len;
        let shelf = (tenant, len);
        if self.by_length.get(&shelf).is_some_and(VecDeque::is_empty) {
            self.by_length.remove(&shelf);
        }
    }

    fn remove(&mut self, tenant: u64) -> Vec<Kept<D>> {
        let shelves = self.by_length.extract_if(every_length(tenant), |_, _| true);
        let gone: Vec<Kept<D>> = shelves.flat_map(|(_, shelf)| shelf).collect();
        let bytes: u64 = gone.iter().map(|kept| kept.chunk.byte_len()).sum();
        self.kept_bytes -= bytes;
        gone
    }

    fn expire(
        &mut self,
        tenant: u64,
        now: Instant,
        idle: Duration,
    ) -> (Vec<Kept<D>>, Option<Instant>) {
        for (_, shelf) in self.by_length.range_mut(every_length(tenant)) {
            let new = shelf.iter_mut().rev();
            new.take_while(|kept| kept.since.is_none())
                .for_each(|kept| kept.since = Some(now));
        }
        let mut gone = Vec::new();
        loop {
            let oldest = self.oldest(tenant);
            let due = oldest.filter(|_| gone.len() < RELEASES_PER_LOOK);
            match due.filter(|(since, _)| now.saturating_duration_since(*since) >= idle) {
                Some((_, len)) => {
                    let shelf = self.by_length.get_mut(&(tenant, len));
                    gone.extend(shelf.and_then(VecDeque::pop_front));
                    self.left(tenant, len);
                }
                // A time that no clock reaches is none.
                None => return (gone, oldest.and_then(|(since, _)| since.checked_add(idle))),
            }
        }
    }

    /// Since when the oldest chunk of a tenant is kept, and its length.
    fn oldest(&self, tenant: u64) -> Option<(Instant, u64)> {
        let shelves = self.by_length.range(every_length(tenant));
        shelves
            .filter_map(|((_, len), shelf)| Some((shelf.front()?.since?, *len)))
            .min()
    }

    fn kept_bytes_of(&self, tenant: u64) -> u64 {
        let shelves = self.by_length.range(every_length(tenant));
        let bytes = |((_, len), shelf): (&(u64, u64), &VecDeque<_>)| len * shelf.len() as u64;
        shelves.map(bytes).sum()
    }
}

const fn every_length(tenant: u64) -> std::ops::RangeInclusive<(u64, u64)> {
    (tenant, 0)..=(tenant, u64::MAX)
}

#[cfg(test)]
mod tests;
