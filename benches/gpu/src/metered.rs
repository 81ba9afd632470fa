//! A driver that remembers what it was asked and how long that took: which chunks a pool really
//! had mapped, so that the floor maps the same, and what part of a row is the driver's own.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvcached_vmm::{Access, AddressRange, DeviceMemory, Driver, Properties, VmmError};

use crate::clock::timed;

/// Wraps a driver. What it remembers costs tens of nanoseconds a call.
pub(crate) struct Metered<D> {
    inner: D,
    calls: Mutex<Vec<Call>>,
}

/// What was asked of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    Create,
    Destroy,
    Map,
    Unmap,
}

/// One call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) asked: Asked,
    /// First address of the range; of chunks, 0.
    pub(crate) base: u64,
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
    pub(crate) micros: f64,
}

/// The calls of a while, in order.
#[derive(Debug, Default)]
pub(crate) struct Calls(pub(crate) Vec<Call>);

impl<D> Metered<D> {
    pub(crate) const fn new(inner: D) -> Self {
        Self {
            inner,
            calls: Mutex::new(Vec::new()),
        }
    }

    /// The driver itself, whose calls are then not remembered.
    pub(crate) const fn inner(&self) -> &D {
        &self.inner
    }

    /// What was asked since this was last called.
    pub(crate) fn take(&self) -> Calls {
        Calls(std::mem::take(&mut *self.calls()))
    }

    fn calls(&self) -> MutexGuard<'_, Vec<Call>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note<T>(
        &self,
        asked: Asked,
        (base, offset): (u64, u64),
        len: u64,
        call: impl FnOnce(&D) -> Result<T, VmmError>,
    ) -> Result<T, VmmError> {
        let (result, micros) = timed(|| call(&self.inner));
        if result.is_ok() {
            self.calls().push(Call {
                asked,
                base,
                offset,
                len,
                micros,
            });
        }
        result
    }
}

impl Calls {
    /// Those that asked this.
    pub(crate) fn of(&self, asked: Asked) -> impl Iterator<Item = &Call> {
        self.0.iter().filter(move |call| call.asked == asked)
    }

    /// Microseconds in the driver to get memory there.
    pub(crate) fn backing_micros(&self) -> f64 {
        self.of(Asked::Create)
            .chain(self.of(Asked::Map))
            .map(|call| call.micros)
            .sum()
    }
}

impl<D> fmt::Debug for Metered<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metered").finish_non_exhaustive()
    }
}

impl<D: Driver> Driver for Metered<D> {
    type Range = D::Range;
    type Chunk = Measured<D::Chunk>;

    fn properties(&self) -> Properties {
        self.inner.properties()
    }

    fn reserve(&self, len: u64) -> Result<Self::Range, VmmError> {
        self.inner.reserve(len)
    }

    fn release(&self, range: Self::Range) -> Result<(), VmmError> {
        self.inner.release(range)
    }

    fn create(&self, len: u64) -> Result<Self::Chunk, VmmError> {
        let chunk = self.note(Asked::Create, (0, 0), len, |inner| inner.create(len))?;
        Ok(Measured { chunk, len })
    }

    fn destroy(&self, chunk: Self::Chunk) -> Result<(), VmmError> {
        let Measured { chunk, len } = chunk;
        self.note(Asked::Destroy, (0, 0), len, |inner| inner.destroy(chunk))
    }

    fn map(
        &self,
        range: &Self::Range,
        offset: u64,
        chunk: &Self::Chunk,
        access: Access,
    ) -> Result<(), VmmError> {
        self.note(Asked::Map, (range.base(), offset), chunk.len, |inner| {
            inner.map(range, offset, &chunk.chunk, access)
        })
    }

    fn unmap(&self, range: &Self::Range, offset: u64, len: u64) -> Result<(), VmmError> {
        self.note(Asked::Unmap, (range.base(), offset), len, |inner| {
            inner.unmap(range, offset, len)
        })
    }

    fn memory(&self) -> Result<DeviceMemory, VmmError> {
        self.inner.memory()
    }

    fn synchronize(&self) -> Result<(), VmmError> {
        self.inner.synchronize()
    }
}

/// A chunk that knows its length.
#[derive(Debug)]
pub(crate) struct Measured<C> {
    chunk: C,
    len: u64,
}
