//! Owning tier over physical memory: a chunk that gives itself back.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{Driver, VmmError};

/// Physical memory of a device, given back when the value is dropped.
///
/// Shared as `Arc<Chunk<D>>` with each [`Reservation`](crate::Reservation) it is mapped in, so
/// that it outlives its mappings, and so that a refused map leaves the caller its clone.
pub struct Chunk<D: Driver> {
    driver: Arc<D>,
    raw: Option<D::Chunk>,
    len: u64,
    /// In how many places it is mapped, for devices where one is the most.
    mappings: AtomicU32,
    /// For whom it was created, of those who get chunks back from a [`Recycler`](crate::Recycler).
    tenant: u64,
}

/// Tenant of the chunks that are for nobody in particular.
const NO_TENANT: u64 = 0;

impl<D: Driver> Chunk<D> {
    /// Obtains `len` bytes of zeroed memory, a positive multiple of the granularity.
    ///
    /// # Errors
    /// [`VmmError::OutOfMemory`] if the device is full right now, or what else
    /// [`Driver::create`] answers.
    pub fn create(driver: &Arc<D>, len: u64) -> Result<Self, VmmError> {
        Self::create_for(driver, len, NO_TENANT)
    }

    /// The same for a tenant of a [`Recycler`](crate::Recycler), by its number, from 1 on.
    pub(crate) fn create_for(driver: &Arc<D>, len: u64, tenant: u64) -> Result<Self, VmmError> {
        let raw = driver.create(len)?;
        Ok(Self {
            driver: Arc::clone(driver),
            raw: Some(raw),
            len,
            mappings: AtomicU32::new(0),
            tenant,
        })
    }

    /// Length in bytes.
    #[must_use]
    pub fn byte_len(&self) -> u64 {
        self.len
    }

    /// Whether it is mapped anywhere just now.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.mappings.load(Ordering::Relaxed) > 0
    }

    pub(crate) const fn tenant(&self) -> u64 {
        self.tenant
    }

    pub(crate) fn raw(&self) -> &D::Chunk {
        self.raw
            .as_ref()
            .expect("a chunk holds its memory until it is dropped")
    }

    pub(crate) fn belongs_to(&self, driver: &Arc<D>) -> bool {
        Arc::ptr_eq(&self.driver, driver)
    }

    /// Counts one more mapping, unless there is one and one is the most.
    ///
    /// The count publishes no data, it only decides; hence relaxed ordering.
    pub(crate) fn begin_mapping(&self, alias: bool) -> bool {
        let before = self.mappings.fetch_add(1, Ordering::Relaxed);
        if before > 0 && !alias {
            self.end_mapping();
            return false;
        }
        true
    }

    pub(crate) fn end_mapping(&self) {
        self.mappings.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<D: Driver> fmt::Debug for Chunk<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chunk")
            .field("raw", &self.raw)
            .field("len", &self.len)
            .field("mappings", &self.mappings)
            .finish_non_exhaustive()
    }
}

impl<D: Driver> Drop for Chunk<D> {
    fn drop(&mut self) {
        if let Some(raw) = self.raw.take()
            && let Err(error) = self.driver.destroy(raw)
        {
            tracing::error!(%error, bytes = self.len, "chunk lost until the process ends");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Call, Mock, MockConfig};

    const G: u64 = 4096;

    fn mock() -> Arc<Mock> {
        Arc::new(Mock::new(MockConfig {
            granularity: G,
            ..MockConfig::new(4 * G)
        }))
    }

    #[test]
    fn memory_goes_back_when_the_last_owner_drops_it() {
        let mock = mock();
        let chunk = Arc::new(Chunk::create(&mock, 3 * G).unwrap());
        let clone = Arc::clone(&chunk);
        assert_eq!((chunk.byte_len(), mock.used_bytes()), (3 * G, 3 * G));

        drop(chunk);
        assert_eq!(mock.used_bytes(), 3 * G);
        drop(clone);
        assert_eq!(mock.used_bytes(), 0);
    }

    #[test]
    fn a_full_device_is_an_answer_and_takes_nothing() {
        let mock = mock();
        let first = Chunk::create(&mock, 3 * G).unwrap();
        assert_eq!(
            Chunk::create(&mock, 2 * G).unwrap_err(),
            VmmError::OutOfMemory { requested: 2 * G }
        );
        assert_eq!(mock.used_bytes(), 3 * G);
        drop(first);
        assert!(Chunk::create(&mock, 4 * G).is_ok());
    }

    #[test]
    fn a_destroy_that_fails_on_drop_is_logged_not_raised() {
        let mock = mock();
        let chunk = Chunk::create(&mock, G).unwrap();
        mock.fail(
            Call::Destroy,
            0,
            VmmError::Driver {
                call: "x",
                code: 1,
                name: "X".into(),
            },
        );

        let errors = crate::testlog::errors_during(|| drop(chunk));

        assert_eq!((errors, mock.lost_chunks()), (1, 1));
    }
}
