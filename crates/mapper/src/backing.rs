//! The tensors of a pool, and what lies behind each extent: a chunk of its own while it is
//! backed, and what was chosen for cold pages while it is not.
//!
//! A step backs one extent or takes its chunk away. It happens whole, or is undone on the spot;
//! where even that fails, it says so, and the extent is in neither state.

use std::sync::Arc;

use kvcached_vmm::{Access, Bytes, Chunk, Driver, Reservation, VmmError};

use crate::{Extent, Geometry};

/// What lies behind a cold page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cold {
    /// Nothing: a stray access faults. The right choice where it can be made.
    Unbacked,
    /// One granule of zeros for the whole pool, mapped again and again over every cold extent: a
    /// stray read sees zeros. It costs a map and an unmap per granule of each run, and needs a
    /// device that can alias; a stray write faults only where the device can protect.
    Zero,
}

#[derive(Debug)]
pub(crate) struct Backing<D: Driver> {
    // Dropped first: a chunk outlives its mappings.
    tensors: Vec<Reservation<D>>,
    zero: Option<Zero<D>>,
}

#[derive(Debug)]
struct Zero<D: Driver> {
    granule: Arc<Chunk<D>>,
    access: Access,
}

/// Why a step did not happen.
#[derive(Debug)]
pub(crate) struct StepError {
    pub(crate) cause: VmmError,
    /// Is the extent as it was before the step?
    pub(crate) restored: bool,
}

impl<D: Driver> Backing<D> {
    /// Reserves addresses for every tensor of `geometry`; all of its pages are cold.
    pub(crate) fn new(driver: &Arc<D>, geometry: &Geometry, cold: Cold) -> Result<Self, VmmError> {
        let properties = driver.properties();
        let zero = match cold {
            Cold::Unbacked => None,
            Cold::Zero if properties.alias => {
                let granule = Arc::new(Chunk::create(driver, properties.granularity)?);
                let access = if properties.read_only {
                    Access::Read
                } else {
                    Access::ReadWrite
                };
                Some(Zero { granule, access })
            }
            Cold::Zero => {
                let reason = "it cannot map one chunk at several addresses, which cold pages that \
                              read as zero need";
                return Err(VmmError::Unavailable {
                    reason: reason.to_owned(),
                });
            }
        };
        let len = geometry.tensor_bytes();
        let tensors = (0..geometry.tensors())
            .map(|_| Reservation::new(Arc::clone(driver), len))
            .collect::<Result<_, _>>()?;
        let mut backing = Self { tensors, zero };
        for tensor in 0..geometry.tensors() {
            backing
                .cover(Extent {
                    tensor,
                    offset: 0,
                    len,
                })
                .map_err(|failed| failed.cause)?;
        }
        Ok(backing)
    }

    /// First address of each tensor.
    pub(crate) fn bases(&self) -> impl Iterator<Item = u64> {
        self.tensors.iter().map(Reservation::base)
    }

    /// Puts `chunk` behind a cold `extent` of its length.
    pub(crate) fn back(&mut self, extent: Extent, chunk: Arc<Chunk<D>>) -> Result<(), StepError> {
        self.uncover(extent)?;
        let mapped = self
            .tensor(extent)
            .map(extent.offset, chunk, Access::ReadWrite);
        mapped.map_err(|cause| StepError {
            cause,
            restored: self.cover(extent).is_ok(),
        })
    }

    /// Takes the chunk of a backed `extent` away: the extent is cold, the chunk is the caller's.
    pub(crate) fn unback(&mut self, extent: Extent) -> Result<Arc<Chunk<D>>, StepError> {
        let chunk = self
            .tensor(extent)
            .unmap(extent.offset)
            .map_err(|cause| StepError {
                cause,
                restored: true,
            })?;
        if let Err(StepError { cause, restored }) = self.cover(extent) {
            let again = || {
                self.tensor(extent)
                    .map(extent.offset, chunk, Access::ReadWrite)
            };
            return Err(StepError {
                cause,
                restored: restored && again().is_ok(),
            });
        }
        Ok(chunk)
    }

    /// Makes `extent` cold, whatever a failed step left behind it. On `Err` it is in no known state
    /// still, and this may be tried again.
    pub(crate) fn settle(&mut self, extent: Extent) -> Result<(), VmmError> {
        let tensor = &mut self.tensors[extent.tensor as usize];
        let left: Vec<u64> = tensor
            .mappings_within(extent.offset, extent.len)
            .map(|(offset, _)| offset)
            .collect();
        for offset in left {
            tensor.unmap(offset)?;
        }
        self.cover(extent).map_err(|failed| failed.cause)
    }

    /// Lays zeros over `extent`, behind which there is nothing.
    fn cover(&mut self, extent: Extent) -> Result<(), StepError> {
        let Some(Zero { granule, access }) = &self.zero else {
            return Ok(());
        };
        let tensor = &mut self.tensors[extent.tensor as usize];
        for offset in granules(extent, granule.byte_len()) {
            if let Err(cause) = tensor.map(offset, Arc::clone(granule), *access) {
                let done = Extent {
                    len: offset - extent.offset,
                    ..extent
                };
                let mut restored = true;
                for offset in granules(done, granule.byte_len()) {
                    restored &= tensor.unmap(offset).is_ok();
                }
                return Err(StepError { cause, restored });
            }
        }
        Ok(())
    }

    /// Takes the zeros of `extent` away, so that there is nothing behind it.
    fn uncover(&mut self, extent: Extent) -> Result<(), StepError> {
        let Some(Zero { granule, access }) = &self.zero else {
            return Ok(());
        };
        let tensor = &mut self.tensors[extent.tensor as usize];
        for offset in granules(extent, granule.byte_len()) {
            if let Err(cause) = tensor.unmap(offset) {
                let done = Extent {
                    len: offset - extent.offset,
                    ..extent
                };
                let mut restored = true;
                for offset in granules(done, granule.byte_len()) {
                    restored &= tensor.map(offset, Arc::clone(granule), *access).is_ok();
                }
                return Err(StepError { cause, restored });
            }
        }
        Ok(())
    }

    fn tensor(&mut self, extent: Extent) -> &mut Reservation<D> {
        &mut self.tensors[extent.tensor as usize]
    }
}

impl<D: Bytes> Backing<D> {
    /// Copies `bytes` to the start of `at`.
    pub(crate) fn write(&self, at: Extent, bytes: &[u8]) -> Result<(), VmmError> {
        self.place(at, bytes.len())?.write(at.offset, bytes)
    }

    /// Fills `buffer` from the start of `at`.
    pub(crate) fn read(&self, at: Extent, buffer: &mut [u8]) -> Result<(), VmmError> {
        self.place(at, buffer.len())?.read(at.offset, buffer)
    }

    /// The tensor of `at`, if there is one and `len` bytes fit into `at`.
    fn place(&self, at: Extent, len: usize) -> Result<&Reservation<D>, VmmError> {
        let (offset, len) = (at.offset, len as u64);
        // A tensor that is not there has no bytes.
        let refused = |range_len| VmmError::OutOfRange {
            offset,
            len,
            range_len,
        };
        let tensor = self
            .tensors
            .get(at.tensor as usize)
            .ok_or_else(|| refused(0))?;
        if len > at.len {
            return Err(refused(tensor.byte_len()));
        }
        Ok(tensor)
    }
}

fn granules(extent: Extent, granularity: u64) -> impl Iterator<Item = u64> {
    (0..extent.len / granularity).map(move |granule| extent.offset + granule * granularity)
}
