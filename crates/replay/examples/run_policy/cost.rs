//! What the driver takes for a chunk, by its size, and a device that adds it up instead of mapping.
//!
//! The table is that of one H200, one thread, medians: create, map and set access together, then
//! unmap and release. Between the sizes that were measured it is taken as linear.

use std::sync::{Arc, Mutex, MutexGuard};

use kvcached_mapper::{After, Cause, Geometry, MapError, Mapper, PageRun, Readiness};

/// Bytes of a chunk, and nanoseconds to map and to unmap it.
const MEASURED: [(u64, u64, u64); 4] = [
    (2 << 20, 48_500, 37_000),
    (32 << 20, 50_500, 37_300),
    (128 << 20, 67_000, 103_000),
    (1 << 30, 191_500, 575_000),
];

/// Nanoseconds to map and to unmap a chunk.
fn of_chunk(bytes: u64) -> (u64, u64) {
    let bytes = bytes.clamp(MEASURED[0].0, MEASURED[3].0);
    let above = MEASURED
        .iter()
        .position(|&(size, ..)| size >= bytes)
        .unwrap_or(3)
        .max(1);
    let (low, high) = (MEASURED[above - 1], MEASURED[above]);
    let between = |from: u64, to: u64| from + (to - from) * (bytes - low.0) / (high.0 - low.0);
    (between(low.1, high.1), between(low.2, high.2))
}

/// What all calls came to.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Spent {
    pub(crate) chunks: u64,
    pub(crate) map_ns: u64,
    pub(crate) unmap_ns: u64,
    /// The longest call that mapped.
    pub(crate) longest_ns: u64,
}

/// Memory that several pools share.
#[derive(Debug)]
pub(crate) struct Device {
    free_bytes: u64,
    pub(crate) spent: Spent,
}

/// The device as one pool sees it.
#[derive(Debug)]
pub(crate) struct Counted {
    device: Arc<Mutex<Device>>,
    bundle_bytes: u64,
    page_bytes: u64,
    extents: u64,
}

impl Device {
    pub(crate) fn new(bytes: u64) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self {
            free_bytes: bytes,
            spent: Spent::default(),
        }))
    }
}

impl Counted {
    pub(crate) fn new(device: &Arc<Mutex<Device>>, geometry: &Geometry) -> Self {
        Self {
            device: Arc::clone(device),
            bundle_bytes: geometry.bundle_bytes(),
            page_bytes: geometry.page_bytes(),
            extents: u64::from(geometry.extents_per_page()),
        }
    }

    fn device(&self) -> MutexGuard<'_, Device> {
        self.device.lock().expect("nobody panics while adding up")
    }

    fn bytes(&self, runs: &[PageRun]) -> u64 {
        let pages: u64 = runs.iter().map(|run| u64::from(run.count())).sum();
        pages * self.bundle_bytes
    }

    fn chunks(&self, runs: &[PageRun], pick: impl Fn((u64, u64)) -> u64) -> u64 {
        let of_run = |run: &PageRun| pick(of_chunk(u64::from(run.count()) * self.page_bytes));
        runs.iter().map(of_run).sum::<u64>() * self.extents
    }
}

impl Mapper for Counted {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        let bytes = self.bytes(runs);
        let ns = self.chunks(runs, |(map, _)| map);
        let mut device = self.device();
        if bytes > device.free_bytes {
            return Err(MapError::clean(Cause::OutOfMemory { at: None }));
        }
        device.free_bytes -= bytes;
        let spent = &mut device.spent;
        spent.chunks += runs.len() as u64 * self.extents;
        spent.map_ns += ns;
        spent.longest_ns = spent.longest_ns.max(ns);
        Ok(())
    }

    fn unmap_after(&self, runs: &[PageRun], _: After) -> Result<(), MapError> {
        let mut device = self.device();
        device.free_bytes += self.bytes(runs);
        device.spent.unmap_ns += self.chunks(runs, |(_, unmap)| unmap);
        Ok(())
    }

    fn headroom(&self) -> Option<u32> {
        let pages = self.device().free_bytes / self.bundle_bytes;
        Some(u32::try_from(pages).unwrap_or(u32::MAX))
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        Ok(Readiness::Ready)
    }
}
