//! Owning tier over addresses: a range, the chunks mapped into it, and an orderly end.
//!
//! ```text
//! offset   0        g        2g       3g       4g
//! range    ├────────┼────────┼────────┼────────┤
//! mapped   [ chunk A         ]        [ chunk B]
//! ```
//!
//! Written once for all drivers: what a caller owes a [`Driver`] is checked here, before the
//! driver is asked.

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::sync::Arc;

use crate::span::{check_inside, check_place};
use crate::{Access, AddressRange, Bytes, Chunk, Driver, Properties, VmmError};

/// A stretch of reserved addresses and what is mapped into it.
///
/// Dropping it waits for the device, unmaps everything, releases the addresses, and only then
/// lets go of the chunks. What fails on the way is logged and left to the process's end: a chunk
/// that could not be unmapped is never destroyed, and its addresses are never given back, because
/// the device may still reach one through the other.
pub struct Reservation<D: Driver> {
    driver: Arc<D>,
    properties: Properties,
    range: Option<D::Range>,
    mapped: BTreeMap<u64, Arc<Chunk<D>>>,
}

impl<D: Driver> Reservation<D> {
    /// Reserves `len` bytes of addresses, a positive multiple of the granularity.
    ///
    /// # Errors
    /// [`VmmError::Misaligned`], [`VmmError::OutOfAddresses`], or what else [`Driver::reserve`]
    /// answers.
    pub fn new(driver: Arc<D>, len: u64) -> Result<Self, VmmError> {
        let range = driver.reserve(len)?;
        let properties = driver.properties();
        Ok(Self {
            driver,
            properties,
            range: Some(range),
            mapped: BTreeMap::new(),
        })
    }

    /// First address, as the device sees it.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.range().base()
    }

    /// Length in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.range().byte_len()
    }

    /// The driver that the addresses belong to.
    #[must_use]
    pub fn driver(&self) -> &Arc<D> {
        &self.driver
    }

    /// Puts the whole of `chunk` at `offset`.
    ///
    /// Refused without asking the driver: a place that is misaligned, outside the range or
    /// (partly) mapped already, a chunk of another driver value, and a second mapping of one chunk
    /// where [`Properties::alias`] says no.
    ///
    /// # Errors
    /// On any error nothing has changed; a caller that keeps a clone of `chunk` still has it.
    pub fn map(
        &mut self,
        offset: u64,
        chunk: Arc<Chunk<D>>,
        access: Access,
    ) -> Result<(), VmmError> {
        let len = chunk.byte_len();
        check_place(offset, len, self.byte_len(), self.properties.granularity)?;
        if let Some(taken) = self.mapped_within(offset, len) {
            return Err(VmmError::AlreadyMapped { offset: taken });
        }
        if !chunk.belongs_to(&self.driver) {
            let broken = "a chunk is mapped by the driver value that made it";
            return Err(VmmError::Contract {
                call: "map",
                broken,
            });
        }
        if !chunk.begin_mapping(self.properties.alias) {
            let broken = "on this device a chunk is mapped in one place at most";
            return Err(VmmError::Contract {
                call: "map",
                broken,
            });
        }
        if let Err(error) = self.driver.map(self.range(), offset, chunk.raw(), access) {
            chunk.end_mapping();
            return Err(error);
        }
        self.mapped.insert(offset, chunk);
        Ok(())
    }

    /// Takes away what one [`map`](Self::map) put at exactly `offset`, and gives back its chunk.
    ///
    /// The device must have finished with it: see [`Driver::synchronize`].
    ///
    /// # Errors
    /// [`VmmError::NotMapped`] if no mapping begins there. On any error nothing has changed.
    pub fn unmap(&mut self, offset: u64) -> Result<Arc<Chunk<D>>, VmmError> {
        let chunk = self
            .mapped
            .get(&offset)
            .ok_or(VmmError::NotMapped { offset })?;
        self.driver.unmap(self.range(), offset, chunk.byte_len())?;
        let chunk = self
            .mapped
            .remove(&offset)
            .expect("the mapping was found a moment ago");
        chunk.end_mapping();
        Ok(chunk)
    }

    /// Offset and length of every mapping, lowest first.
    pub fn mappings(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.mapped
            .iter()
            .map(|(&offset, chunk)| (offset, chunk.byte_len()))
    }

    fn range(&self) -> &D::Range {
        self.range
            .as_ref()
            .expect("a reservation holds its range until it is dropped")
    }

    /// Offset of a mapping that shares a byte with `len` bytes at `offset`.
    fn mapped_within(&self, offset: u64, len: u64) -> Option<u64> {
        // Mappings do not overlap, so the last that begins before our end also ends last.
        let (&start, chunk) = self.mapped.range(..offset + len).next_back()?;
        (start + chunk.byte_len() > offset).then_some(start)
    }
}

impl<D: Bytes> Reservation<D> {
    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`VmmError::Fault`] where nothing writable is mapped; a prefix may have been written.
    /// [`VmmError::OutOfRange`] if it does not lie inside the range.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), VmmError> {
        check_inside(offset, bytes.len() as u64, self.byte_len())?;
        self.driver.write(self.range(), offset, bytes)
    }

    /// Fills `buffer` from `offset`.
    ///
    /// # Errors
    /// [`VmmError::Fault`] where nothing is mapped; `buffer` is then unspecified.
    /// [`VmmError::OutOfRange`] if it does not lie inside the range.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), VmmError> {
        check_inside(offset, buffer.len() as u64, self.byte_len())?;
        self.driver.read(self.range(), offset, buffer)
    }
}

impl<D: Driver> fmt::Debug for Reservation<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("range", &self.range)
            .field("mapped", &self.mapped)
            .finish_non_exhaustive()
    }
}

impl<D: Driver> Drop for Reservation<D> {
    fn drop(&mut self) {
        let Some(range) = self.range.take() else {
            return;
        };
        let mapped = mem::take(&mut self.mapped);
        if !mapped.is_empty()
            && let Err(error) = self.driver.synchronize()
        {
            tracing::error!(%error, "device did not confirm that its work has ended");
        }
        let mut chunks = Vec::with_capacity(mapped.len());
        let mut stuck = false;
        for (offset, chunk) in mapped {
            match self.driver.unmap(&range, offset, chunk.byte_len()) {
                Ok(()) => {
                    chunk.end_mapping();
                    chunks.push(chunk);
                }
                Err(error) => {
                    let bytes = chunk.byte_len();
                    tracing::error!(%error, offset, bytes, "mapping lost until the process ends");
                    stuck = true;
                    // One reference stays for ever, so that no clone's drop destroys memory that
                    // the device still reaches.
                    mem::forget(chunk);
                }
            }
        }
        let (base, len) = (range.base(), range.byte_len());
        if stuck {
            tracing::error!(base, bytes = len, "addresses lost until the process ends");
        } else if let Err(error) = self.driver.release(range) {
            tracing::error!(%error, base, bytes = len, "addresses lost until the process ends");
        }
        drop(chunks);
    }
}
