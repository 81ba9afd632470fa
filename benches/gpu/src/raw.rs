//! The floor: the same memory at the same places of addresses of its own, by driver calls alone.

use std::sync::Arc;

use kvcached_mapper::Geometry;
use kvcached_vmm::{Access, Driver};

use crate::Outcome;
use crate::clock::timed;
use crate::metered::{Asked, Calls, Metered};

/// Addresses like those of a pool, for driver calls without a pool.
#[derive(Debug)]
pub(crate) struct Raw<D: Driver> {
    driver: Arc<Metered<D>>,
    tensors: Vec<D::Range>,
    /// Chunks that came free, with their lengths, if they are kept.
    kept: Vec<(u64, D::Chunk)>,
    keeps: bool,
}

/// Where a chunk lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    tensor: usize,
    offset: u64,
    /// Bytes.
    len: u64,
}

/// What a pool asked of the driver, to be asked again.
#[derive(Debug, Clone, Default)]
pub(crate) struct Plan {
    places: Vec<Place>,
    /// How many chunks were created for it; the others the pool had kept.
    creates: usize,
}

/// Memory behind some places.
#[derive(Debug)]
pub(crate) struct Backed<C>(Vec<(Place, C)>);

impl Plan {
    /// The maps among `calls`, of a pool with these addresses of its tensors.
    pub(crate) fn of(calls: &Calls, tensor_bases: &[u64]) -> Self {
        let places = calls.of(Asked::Map).filter_map(|call| {
            let tensor = tensor_bases.iter().position(|&base| base == call.base)?;
            Some(Place {
                tensor,
                offset: call.offset,
                len: call.len,
            })
        });
        Self {
            places: places.collect(),
            creates: calls.of(Asked::Create).count(),
        }
    }

    /// How many chunks.
    pub(crate) const fn chunks(&self) -> usize {
        self.places.len()
    }
}

impl<D: Driver> Raw<D> {
    /// Reserves addresses like those of `geometry`.
    pub(crate) fn new(driver: &Arc<Metered<D>>, geometry: &Geometry) -> Outcome<Self> {
        let mut raw = Self {
            driver: Arc::clone(driver),
            tensors: Vec::new(),
            kept: Vec::new(),
            keeps: false,
        };
        for _ in 0..geometry.tensors() {
            let range = driver.inner().reserve(geometry.tensor_bytes())?;
            raw.tensors.push(range);
        }
        Ok(raw)
    }

    /// The same, which keeps chunks that come free, as a pool does.
    pub(crate) fn keeping(mut self) -> Self {
        self.keeps = true;
        self
    }

    /// Maps what the plan says, and tells how many microseconds that took: creates as many chunks
    /// as the pool did, the others being there, and then maps all.
    pub(crate) fn back(&mut self, plan: &Plan) -> Outcome<(Backed<D::Chunk>, f64)> {
        let there = plan.places.len().saturating_sub(plan.creates);
        let mut chunks = Vec::with_capacity(plan.places.len());
        for &place in &plan.places[..there] {
            let chunk = match self.kept.iter().position(|&(len, _)| len == place.len) {
                Some(found) => self.kept.remove(found).1,
                None => self.driver.inner().create(place.len)?,
            };
            chunks.push((place, chunk));
        }
        let driver = self.driver.inner();
        let (result, micros) = timed(|| -> Outcome {
            for &place in &plan.places[there..] {
                chunks.push((place, driver.create(place.len)?));
            }
            for (place, chunk) in &chunks {
                let range = &self.tensors[place.tensor];
                driver.map(range, place.offset, chunk, Access::ReadWrite)?;
            }
            Ok(())
        });
        result.map(|()| (Backed(chunks), micros))
    }

    /// Unmaps it all, destroys what is not kept, and tells how many microseconds that took.
    pub(crate) fn release(&mut self, backed: Backed<D::Chunk>) -> Outcome<f64> {
        let driver = self.driver.inner();
        let mut freed = Vec::with_capacity(backed.0.len());
        let (result, micros) = timed(|| -> Outcome {
            for (place, _) in &backed.0 {
                driver.unmap(&self.tensors[place.tensor], place.offset, place.len)?;
            }
            for (place, chunk) in backed.0 {
                if self.keeps {
                    freed.push((place.len, chunk));
                } else {
                    driver.destroy(chunk)?;
                }
            }
            Ok(())
        });
        self.kept.append(&mut freed);
        result.map(|()| micros)
    }
}

impl<D: Driver> Drop for Raw<D> {
    fn drop(&mut self) {
        for (_, chunk) in self.kept.drain(..) {
            if let Err(error) = self.driver.inner().destroy(chunk) {
                eprintln!("a chunk of the floor is lost until the end: {error}");
            }
        }
        for range in self.tensors.drain(..) {
            if let Err(error) = self.driver.inner().release(range) {
                eprintln!("addresses of the floor are lost until the end: {error}");
            }
        }
    }
}
