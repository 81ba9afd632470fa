//! The seam to a device: the primitives a virtual-memory driver offers, and what each side owes.

use std::fmt;
use std::sync::Arc;

use crate::VmmError;

/// Primitives of a device that separates addresses from memory.
///
/// Values of [`Driver::Range`] and [`Driver::Chunk`] are owned handles: whoever holds one holds
/// the addresses or the memory, and gives it back through [`Driver::release`] or
/// [`Driver::destroy`]. Dropping a handle without that leaks it; use
/// [`Reservation`](crate::Reservation) and [`Chunk`](crate::Chunk), which do not.
///
/// # What the caller owes
///
/// - Offsets and lengths are multiples of [`Properties::granularity`] and not zero in length.
/// - [`map`](Self::map) only where nothing is mapped; [`unmap`](Self::unmap) only exactly what one
///   `map` made, never a part of it.
/// - [`destroy`](Self::destroy) a chunk only when it is mapped nowhere; [`release`](Self::release)
///   a range only when nothing is mapped in it.
/// - Handles go back to the driver value that made them.
///
/// # What the implementer owes
///
/// - After `Err` nothing has changed, except that a handle passed by value is gone (its memory or
///   addresses are then lost until the process ends, and the error says so).
/// - Running out of memory is [`VmmError::OutOfMemory`], never a panic, never an abort.
/// - Every method may be called from any thread; a device is chosen by the value, never by the
///   calling thread.
/// - Fresh chunks read as zero: bytes of an earlier owner are never visible.
pub trait Driver: fmt::Debug + Send + Sync + 'static {
    /// Owned addresses.
    type Range: AddressRange;
    /// Owned physical memory; knows its length.
    type Chunk: fmt::Debug + Send + Sync + 'static;

    /// What this device can do; constant for the life of the value.
    fn properties(&self) -> Properties;

    /// Reserves `len` bytes of addresses without memory behind them.
    ///
    /// # Errors
    /// [`VmmError::OutOfAddresses`] if the device has no such stretch free.
    fn reserve(&self, len: u64) -> Result<Self::Range, VmmError>;

    /// Gives addresses back.
    ///
    /// # Errors
    /// [`VmmError::Driver`]; the addresses are then lost until the process ends.
    fn release(&self, range: Self::Range) -> Result<(), VmmError>;

    /// Obtains `len` bytes of zeroed physical memory.
    ///
    /// # Errors
    /// [`VmmError::OutOfMemory`] if the device is full right now.
    fn create(&self, len: u64) -> Result<Self::Chunk, VmmError>;

    /// Gives physical memory back to the device.
    ///
    /// # Errors
    /// [`VmmError::Driver`]; the memory is then lost until the process ends.
    fn destroy(&self, chunk: Self::Chunk) -> Result<(), VmmError>;

    /// Puts the whole of `chunk` at `offset` in `range` and makes it accessible.
    ///
    /// # Errors
    /// On any error nothing is mapped at `offset`.
    fn map(
        &self,
        range: &Self::Range,
        offset: u64,
        chunk: &Self::Chunk,
        access: Access,
    ) -> Result<(), VmmError>;

    /// Takes away what one `map` put at `offset`, `len` bytes long.
    ///
    /// # Errors
    /// On error the mapping is still there as before.
    fn unmap(&self, range: &Self::Range, offset: u64, len: u64) -> Result<(), VmmError>;

    /// Memory of the whole device, other processes included: a hint, never an admission.
    ///
    /// # Errors
    /// [`VmmError::Driver`] if the device does not answer.
    fn memory(&self) -> Result<DeviceMemory, VmmError>;

    /// Returns when all work queued on the device so far has ended, so that none of it can touch
    /// a mapping any more.
    ///
    /// # Errors
    /// [`VmmError::Driver`] if the device does not answer.
    fn synchronize(&self) -> Result<(), VmmError>;
}

/// Content access from the host, for drivers whose memory holds any.
///
/// Offsets need no alignment. An address with nothing mapped behind it is
/// [`VmmError::Fault`], not a crash: drivers go through calls that check.
pub trait Bytes: Driver {
    /// Copies `bytes` to `offset` in `range`.
    ///
    /// # Errors
    /// [`VmmError::Fault`] where nothing writable is mapped; a prefix may have been written.
    /// [`VmmError::OutOfRange`] if it does not lie inside the range.
    fn write(&self, range: &Self::Range, offset: u64, bytes: &[u8]) -> Result<(), VmmError>;

    /// Fills `buffer` from `offset` in `range`.
    ///
    /// # Errors
    /// [`VmmError::Fault`] where nothing is mapped; `buffer` is then unspecified.
    /// [`VmmError::OutOfRange`] if it does not lie inside the range.
    fn read(&self, range: &Self::Range, offset: u64, buffer: &mut [u8]) -> Result<(), VmmError>;
}

/// Tells when work that was launched on a device has ended; made where the work is launched.
pub trait Fence: fmt::Debug + Send + Sync {
    /// Has it ended, and all work before it in the same order? Does not wait.
    ///
    /// # Errors
    /// [`VmmError::Driver`] if the device does not answer.
    fn is_over(&self) -> Result<bool, VmmError>;
}

impl<F: Fence + ?Sized> Fence for Arc<F> {
    fn is_over(&self) -> Result<bool, VmmError> {
        (**self).is_over()
    }
}

/// Work in several orders, such as on several streams: over when all of it is.
impl<F: Fence> Fence for Vec<F> {
    fn is_over(&self) -> Result<bool, VmmError> {
        for fence in self {
            if !fence.is_over()? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Addresses that a driver reserved.
pub trait AddressRange: fmt::Debug + Send + Sync + 'static {
    /// First address, as the device sees it.
    fn base(&self) -> u64;

    /// Length in bytes; never zero.
    fn byte_len(&self) -> u64;
}

/// What a mapping allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Access {
    /// The device may read; a write faults where the device can tell.
    Read,
    /// The device may read and write.
    ReadWrite,
}

/// What a device can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Properties {
    /// Every offset and length of a mapping is a multiple of this, in bytes; a power of two.
    pub granularity: u64,
    /// May one chunk be mapped at several addresses at once? Some devices answer such a mapping
    /// with wrong data, so a shared zero chunk is used only where this is true.
    pub alias: bool,
    /// Can a mapping be made read-only, so that a stray write to a shared zero chunk faults?
    pub read_only: bool,
}

impl Properties {
    /// Properties of a device of `granularity` bytes that can alias and protect nothing; set the
    /// fields for what it can.
    ///
    /// # Panics
    /// If `granularity` is not a power of two.
    #[must_use]
    pub const fn new(granularity: u64) -> Self {
        assert!(
            granularity.is_power_of_two(),
            "a granularity is a power of two"
        );
        Self {
            granularity,
            alias: false,
            read_only: false,
        }
    }
}

/// Memory of a whole device, in bytes, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Free for anyone, just now.
    pub free: u64,
    /// In all.
    pub total: u64,
}
