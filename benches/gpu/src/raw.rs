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
    /// Were chunks created for it, or had the pool kept them?
    creates: bool,
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
            creates: calls.of(Asked::Create).next().is_some(),
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
        };
        for _ in 0..geometry.tensors() {
            let range = driver.inner().reserve(geometry.tensor_bytes())?;
            raw.tensors.push(range);
        }
        Ok(raw)
    }

    /// Creates, if the pool did, and maps what the plan says, all chunks first; and how many
    /// microseconds that took.
    pub(crate) fn back(&self, plan: &Plan) -> Outcome<(Backed<D::Chunk>, f64)> {
        let driver = self.driver.inner();
        let (chunks, creating) = timed(|| {
            plan.places
                .iter()
                .map(|&place| Ok((place, driver.create(place.len)?)))
                .collect::<Outcome<Vec<_>>>()
        });
        let chunks = chunks?;
        let (mapped, mapping) = timed(|| {
            chunks.iter().try_for_each(|(place, chunk)| {
                let range = &self.tensors[place.tensor];
                driver.map(range, place.offset, chunk, Access::ReadWrite)
            })
        });
        mapped?;
        let creating = if plan.creates { creating } else { 0.0 };
        Ok((Backed(chunks), creating + mapping))
    }

    /// Unmaps and destroys it all, and tells how many microseconds that took.
    pub(crate) fn release(&self, backed: Backed<D::Chunk>) -> Outcome<f64> {
        let driver = self.driver.inner();
        let (result, micros) = timed(|| -> Outcome {
            for (place, _) in &backed.0 {
                driver.unmap(&self.tensors[place.tensor], place.offset, place.len)?;
            }
            for (_, chunk) in backed.0 {
                driver.destroy(chunk)?;
            }
            Ok(())
        });
        result.map(|()| micros)
    }
}

impl<D: Driver> Drop for Raw<D> {
    fn drop(&mut self) {
        for range in self.tensors.drain(..) {
            if let Err(error) = self.driver.inner().release(range) {
                eprintln!("addresses of the floor are lost until the end: {error}");
            }
        }
    }
}
