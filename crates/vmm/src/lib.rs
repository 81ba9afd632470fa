//! Bytes and addresses: reserve a range, back parts of it with physical memory, take the
//! memory away again.
//!
//! Four tiers, each useful without the next:
//!
//! ```text
//! Reservation<D>   owns a range and the chunks mapped into it; refuses overlap; undoes itself on drop
//! Recycler<D>      keeps chunks that came free for a while, each for the tenant that had it
//! Driver           nine primitives of a device; states what its caller owes
//! Host Mock Cuda   the drivers: real memory of this machine, no memory at all, a GPU
//! ```
//!
//! Nothing here knows what a page, a block or a tensor is: that is the crate `kvcached-mapper`.
//!
//! ```
//! use std::sync::Arc;
//! use kvcached_vmm::{Access, Chunk, Driver, Host, HostConfig, Reservation, VmmError};
//!
//! # fn main() -> Result<(), VmmError> {
//! let device = Arc::new(Host::new(HostConfig::new(64 << 20))?);
//! let granule = device.properties().granularity;
//!
//! // Addresses are plentiful, memory is not.
//! let mut range = Reservation::new(Arc::clone(&device), 1 << 40)?;
//! let chunk = Arc::new(Chunk::create(&device, granule)?);
//! range.map(5 * granule, chunk, Access::ReadWrite)?;
//!
//! range.write(5 * granule + 3, b"key and value")?;
//! let mut word = [0; 3];
//! range.read(5 * granule + 3, &mut word)?;
//! assert_eq!(&word, b"key");
//!
//! // Taking it away returns the chunk; its memory goes back when the last owner drops it.
//! drop(range.unmap(5 * granule)?);
//! assert!(matches!(range.read(5 * granule, &mut word), Err(VmmError::Fault { .. })));
//! assert_eq!(device.memory()?.free, 64 << 20);
//! # Ok(())
//! # }
//! ```
//!
//! # Units
//!
//! Addresses, offsets and lengths are bytes in `u64`. Offsets and lengths of mappings are
//! multiples of [`Properties::granularity`].

mod budget;
mod capped;
mod chunk;
#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(feature = "cuda")]
mod cuda;
mod driver;
mod error;
mod host;
mod mock;
mod recycler;
mod reservation;
mod span;
#[cfg(test)]
mod testlog;

pub use budget::{Budget, BudgetError};
pub use capped::{Capped, CappedChunk};
pub use chunk::Chunk;
#[cfg(feature = "cuda")]
pub use cuda::{Cuda, CudaChunk, CudaFence, CudaRange, CudaStream};
pub use driver::{Access, AddressRange, Bytes, DeviceMemory, Driver, Fence, Properties};
pub use error::VmmError;
pub use host::{Host, HostChunk, HostConfig, HostRange};
pub use mock::{Call, Mock, MockChunk, MockConfig, MockRange, Violation};
pub use recycler::{Recycler, RecyclerConfig, Tenant};
pub use reservation::Reservation;
