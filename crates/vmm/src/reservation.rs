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

    /// The same of those mappings that begin within `len` bytes from `offset` on.
    pub fn mappings_within(&self, offset: u64, len: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let within = offset..offset.saturating_add(len);
        self.mapped
            .range(within)
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{Call, Host, HostConfig, Mock, MockConfig};

    const G: u64 = 4096;

    fn mock(alias: bool) -> Arc<Mock> {
        Arc::new(Mock::new(MockConfig {
            granularity: G,
            alias,
            ..MockConfig::new(64 * G)
        }))
    }

    fn chunk(mock: &Arc<Mock>, granules: u64) -> Arc<Chunk<Mock>> {
        Arc::new(Chunk::create(mock, granules * G).unwrap())
    }

    fn broken() -> VmmError {
        VmmError::Driver {
            call: "scripted",
            code: 1,
            name: "SCRIPTED".into(),
        }
    }

    #[test]
    fn what_a_caller_gets_wrong_is_refused_before_the_driver_is_asked() {
        let (mock, other) = (mock(false), mock(false));
        let mut range = Reservation::new(Arc::clone(&mock), 8 * G).unwrap();
        let wide = chunk(&mock, 3);
        range
            .map(2 * G, Arc::clone(&wide), Access::ReadWrite)
            .unwrap();
        let asked = mock.calls(Call::Map);

        let mut refused = |offset, chunk: &Arc<Chunk<Mock>>| {
            range
                .map(offset, Arc::clone(chunk), Access::ReadWrite)
                .unwrap_err()
        };
        let three = chunk(&mock, 3);
        for offset in [0, 2 * G, 4 * G] {
            // Overlaps from below, exactly, and from above.
            assert_eq!(
                refused(offset, &three),
                VmmError::AlreadyMapped { offset: 2 * G }
            );
        }
        assert!(matches!(
            refused(1, &three),
            VmmError::Misaligned { value: 1, .. }
        ));
        assert!(matches!(
            refused(6 * G, &three),
            VmmError::OutOfRange { .. }
        ));
        assert!(matches!(
            refused(u64::MAX - G + 1, &three),
            VmmError::OutOfRange { .. }
        ));
        assert!(matches!(
            refused(5 * G, &wide),
            VmmError::Contract { call: "map", .. }
        ));
        assert!(matches!(
            refused(0, &chunk(&other, 1)),
            VmmError::Contract { call: "map", .. }
        ));
        assert_eq!(
            range.unmap(3 * G).unwrap_err(),
            VmmError::NotMapped { offset: 3 * G }
        );
        assert_eq!(
            range.unmap(0).unwrap_err(),
            VmmError::NotMapped { offset: 0 }
        );

        assert_eq!((mock.calls(Call::Map), mock.calls(Call::Unmap)), (asked, 0));
        assert_eq!(range.mappings().collect::<Vec<_>>(), [(2 * G, 3 * G)]);
        range.map(5 * G, three, Access::ReadWrite).unwrap();
    }

    #[test]
    fn a_chunk_is_mapped_at_two_places_only_where_the_device_can_alias() {
        for alias in [true, false] {
            let mock = mock(alias);
            let mut ranges: Vec<_> = (0..2)
                .map(|_| Reservation::new(Arc::clone(&mock), G).unwrap())
                .collect();
            let zero = chunk(&mock, 1);
            ranges[0].map(0, Arc::clone(&zero), Access::Read).unwrap();
            assert_eq!(
                ranges[1].map(0, Arc::clone(&zero), Access::Read).is_ok(),
                alias
            );

            // Once it is taken away it may go elsewhere.
            ranges[0].unmap(0).unwrap();
            assert_eq!(ranges[1].map(0, zero, Access::Read).is_ok(), !alias);
            drop(ranges);
            assert!(mock.violations().is_empty());
        }
    }

    #[test]
    fn a_failed_map_leaves_the_place_and_the_chunk_free() {
        let mock = mock(false);
        let mut range = Reservation::new(Arc::clone(&mock), 2 * G).unwrap();
        let held = chunk(&mock, 1);
        mock.fail(Call::Map, 0, broken());

        assert_eq!(
            range.map(0, Arc::clone(&held), Access::ReadWrite),
            Err(broken())
        );

        assert_eq!(range.mappings().count(), 0);
        assert!(!held.is_mapped());
        range.map(0, held, Access::ReadWrite).unwrap();
    }

    #[test]
    fn a_failed_unmap_leaves_the_mapping() {
        let mock = mock(true);
        let mut range = Reservation::new(Arc::clone(&mock), 2 * G).unwrap();
        range.map(G, chunk(&mock, 1), Access::ReadWrite).unwrap();
        mock.fail(Call::Unmap, 0, broken());

        assert_eq!(range.unmap(G).unwrap_err(), broken());

        assert_eq!(range.mappings().collect::<Vec<_>>(), [(G, G)]);
        assert_eq!(range.unmap(G).unwrap().byte_len(), G);
    }

    #[test]
    fn dropping_waits_then_unmaps_then_releases_addresses_then_destroys_chunks() {
        let mock = mock(true);
        let mut range = Reservation::new(Arc::clone(&mock), 8 * G).unwrap();
        for offset in [0, 2 * G, 6 * G] {
            range
                .map(offset, chunk(&mock, 2), Access::ReadWrite)
                .unwrap();
        }
        let order = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&order);
        mock.fail_with(move |call| {
            seen.lock().unwrap().push(call);
            None
        });

        drop(range);

        use Call::{Destroy, Release, Synchronize, Unmap};
        let expected = [
            Synchronize,
            Unmap,
            Unmap,
            Unmap,
            Release,
            Destroy,
            Destroy,
            Destroy,
        ];
        assert_eq!(*order.lock().unwrap(), expected);
        assert_eq!(
            (mock.live_ranges(), mock.live_chunks(), mock.used_bytes()),
            (0, 0, 0)
        );
        assert!(mock.violations().is_empty());
    }

    #[test]
    fn a_chunk_that_cannot_be_unmapped_on_drop_is_neither_destroyed_nor_its_addresses_reused() {
        let mock = mock(true);
        let mut range = Reservation::new(Arc::clone(&mock), 8 * G).unwrap();
        let clone = chunk(&mock, 1);
        range.map(0, chunk(&mock, 1), Access::ReadWrite).unwrap();
        range.map(G, Arc::clone(&clone), Access::ReadWrite).unwrap();
        range
            .map(2 * G, chunk(&mock, 1), Access::ReadWrite)
            .unwrap();
        mock.fail(Call::Unmap, 1, broken());
        mock.fail(Call::Synchronize, 0, broken());

        drop(range);
        drop(clone);

        assert_eq!(
            (mock.live_ranges(), mock.live_mappings(), mock.live_chunks()),
            (1, 1, 1)
        );
        assert_eq!(mock.calls(Call::Release), 0);
        assert!(mock.violations().is_empty());
    }

    #[test]
    fn failures_on_drop_are_logged_once_each_and_end_nothing() {
        let mock = mock(true);
        let mut range = Reservation::new(Arc::clone(&mock), 8 * G).unwrap();
        range.map(0, chunk(&mock, 1), Access::ReadWrite).unwrap();
        mock.fail(Call::Destroy, 0, broken());
        mock.fail(Call::Release, 0, broken());

        let errors = crate::testlog::errors_during(|| drop(range));

        assert_eq!(errors, 2);
        assert_eq!((mock.lost_ranges(), mock.lost_chunks()), (1, 1));
        assert!(mock.violations().is_empty());
    }

    #[test]
    fn content_goes_through_the_reservation_and_stops_at_its_end() {
        let config = HostConfig {
            granularity: G,
            ..HostConfig::new(4 * G)
        };
        let host = Arc::new(Host::new(config).unwrap());
        let mut range = Reservation::new(Arc::clone(&host), 4 * G).unwrap();
        range
            .map(
                3 * G,
                Arc::new(Chunk::create(&host, G).unwrap()),
                Access::ReadWrite,
            )
            .unwrap();

        range.write(4 * G - 2, &[1, 2]).unwrap();
        let mut found = [0; 2];
        range.read(4 * G - 2, &mut found).unwrap();

        assert_eq!(found, [1, 2]);
        assert!(matches!(
            range.write(4 * G - 1, &[1, 2]),
            Err(VmmError::OutOfRange { .. })
        ));
        assert!(matches!(
            range.read(0, &mut found),
            Err(VmmError::Fault { .. })
        ));
    }
}
