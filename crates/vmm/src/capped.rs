//! A driver that takes every chunk out of a shared budget first.

use crate::{Access, Budget, Bytes, DeviceMemory, Driver, Properties, VmmError};

/// The driver `D` with the memory of a [`Budget`].
///
/// It is what lets several processes be neighbours on one pretended device, and what keeps an
/// engine within a stated part of a real one. Where the budget is exhausted the device is full:
/// [`VmmError::OutOfMemory`].
///
/// ```
/// use std::sync::Arc;
/// use kvcached_vmm::{Budget, Capped, Chunk, Host, HostConfig, VmmError};
///
/// # fn main() -> Result<(), VmmError> {
/// let budget = Budget::private(4 << 20);
/// let host = || Host::new(HostConfig::new(1 << 30));
/// let one = Arc::new(Capped::new(host()?, budget.clone()));
/// let two = Arc::new(Capped::new(host()?, budget));
///
/// let chunk = Chunk::create(&one, 4 << 20)?;
/// assert!(matches!(Chunk::create(&two, 2 << 20), Err(VmmError::OutOfMemory { .. })));
/// drop(chunk);
/// assert!(Chunk::create(&two, 2 << 20).is_ok());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Capped<D> {
    device: D,
    budget: Budget,
}

/// Memory that was taken out of a budget.
#[derive(Debug)]
pub struct CappedChunk<C> {
    chunk: C,
    len: u64,
}

impl<D: Driver> Capped<D> {
    /// `device`, as far as `budget` reaches.
    #[must_use]
    pub fn new(device: D, budget: Budget) -> Self {
        Self { device, budget }
    }

    /// The driver inside.
    #[must_use]
    pub fn device(&self) -> &D {
        &self.device
    }

    /// What its chunks are taken from.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }
}

impl<D: Driver> Driver for Capped<D> {
    type Range = D::Range;
    type Chunk = CappedChunk<D::Chunk>;

    fn properties(&self) -> Properties {
        self.device.properties()
    }

    fn reserve(&self, len: u64) -> Result<Self::Range, VmmError> {
        self.device.reserve(len)
    }

    fn release(&self, range: Self::Range) -> Result<(), VmmError> {
        self.device.release(range)
    }

    fn create(&self, len: u64) -> Result<Self::Chunk, VmmError> {
        self.budget.take(len)?;
        match self.device.create(len) {
            Ok(chunk) => Ok(CappedChunk { chunk, len }),
            Err(error) => {
                if let Err(error) = self.budget.give(len) {
                    tracing::error!(%error, bytes = len, "budget lost until the process ends");
                }
                Err(error)
            }
        }
    }

    fn destroy(&self, chunk: Self::Chunk) -> Result<(), VmmError> {
        // Memory that could not be destroyed is still there, and stays charged.
        self.device.destroy(chunk.chunk)?;
        self.budget.give(chunk.len)
    }

    fn map(
        &self,
        range: &Self::Range,
        offset: u64,
        chunk: &Self::Chunk,
        access: Access,
    ) -> Result<(), VmmError> {
        self.device.map(range, offset, &chunk.chunk, access)
    }

    fn unmap(&self, range: &Self::Range, offset: u64, len: u64) -> Result<(), VmmError> {
        self.device.unmap(range, offset, len)
    }

    fn memory(&self) -> Result<DeviceMemory, VmmError> {
        let device = self.device.memory()?;
        Ok(DeviceMemory {
            free: device.free.min(self.budget.free_bytes()?),
            total: device.total.min(self.budget.total_bytes()),
        })
    }

    fn synchronize(&self) -> Result<(), VmmError> {
        self.device.synchronize()
    }
}

impl<D: Bytes> Bytes for Capped<D> {
    fn write(&self, range: &D::Range, offset: u64, bytes: &[u8]) -> Result<(), VmmError> {
        self.device.write(range, offset, bytes)
    }

    fn read(&self, range: &D::Range, offset: u64, buffer: &mut [u8]) -> Result<(), VmmError> {
        self.device.read(range, offset, buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Call, Mock, MockConfig};

    const G: u64 = 4096;

    fn capped(budget: &Budget) -> Capped<Mock> {
        let config = MockConfig {
            granularity: G,
            ..MockConfig::new(16 * G)
        };
        Capped::new(Mock::new(config), budget.clone())
    }

    #[test]
    fn a_failed_create_costs_no_budget_and_a_failed_destroy_keeps_it() {
        let budget = Budget::private(8 * G);
        let device = capped(&budget);
        let broken = VmmError::Driver {
            call: "scripted",
            code: 1,
            name: "SCRIPTED".into(),
        };
        device.device().fail(Call::Create, 0, broken.clone());
        device.device().fail(Call::Destroy, 1, broken.clone());

        assert_eq!(device.create(3 * G).unwrap_err(), broken);
        assert_eq!(budget.free_bytes(), Ok(8 * G));
        let (one, two) = (device.create(3 * G).unwrap(), device.create(2 * G).unwrap());
        assert_eq!(device.destroy(one), Ok(()));
        assert_eq!(device.destroy(two), Err(broken));
        assert_eq!(budget.free_bytes(), Ok(6 * G));
    }

    #[test]
    fn an_exhausted_budget_is_a_full_device_that_is_not_even_asked() {
        let budget = Budget::private(4 * G);
        let (one, two) = (capped(&budget), capped(&budget));
        let chunk = one.create(3 * G).unwrap();

        assert_eq!(
            two.create(2 * G).unwrap_err(),
            VmmError::OutOfMemory { requested: 2 * G }
        );
        assert_eq!(two.device().calls(Call::Create), 0);
        assert_eq!(
            two.memory(),
            Ok(DeviceMemory {
                free: G,
                total: 4 * G
            })
        );

        one.destroy(chunk).unwrap();
        assert!(two.create(4 * G).is_ok());
    }

    #[test]
    fn memory_is_the_smaller_of_device_and_budget() {
        let device = capped(&Budget::private(1 << 40));
        assert_eq!(
            device.memory(),
            Ok(DeviceMemory {
                free: 16 * G,
                total: 16 * G
            })
        );
    }
}
