//! One error for the crate: every primitive can meet the same few conditions.

use nix::errno::Errno;
use thiserror::Error;

/// What a driver or a reservation answers instead of doing what was asked.
///
/// [`OutOfMemory`](Self::OutOfMemory) is a normal answer: the device is full right now, ask again
/// when something was freed. `Misaligned`, `OutOfRange`, `AlreadyMapped`, `NotMapped` and
/// `Contract` tell the caller of a mistake of its own, and changed nothing. `Unavailable` and
/// `Driver` tell of the device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum VmmError {
    /// The device is full right now.
    #[error("out of device memory: {requested} bytes were asked for")]
    OutOfMemory {
        /// Bytes asked for.
        requested: u64,
    },
    /// No stretch of addresses of that length is free.
    #[error("out of device addresses: {requested} bytes were asked for")]
    OutOfAddresses {
        /// Bytes asked for.
        requested: u64,
    },
    /// The driver library or the device is not there, or cannot do virtual memory management.
    #[error("no usable device: {reason}")]
    Unavailable {
        /// What is missing, in words.
        reason: String,
    },
    /// An offset or length that is zero or no multiple of the granularity.
    #[error("{value} is not a positive multiple of the granularity {granularity}")]
    Misaligned {
        /// The offset or length, in bytes.
        value: u64,
        /// The device's granularity, in bytes.
        granularity: u64,
    },
    /// Outside the reserved range.
    #[error("offset {offset} with length {len} is outside the range of {range_len} bytes")]
    OutOfRange {
        /// Offset from the start of the range, in bytes.
        offset: u64,
        /// Length, in bytes.
        len: u64,
        /// Length of the range, in bytes.
        range_len: u64,
    },
    /// Something is mapped there already.
    #[error("offset {offset} is mapped already")]
    AlreadyMapped {
        /// Offset from the start of the range, in bytes.
        offset: u64,
    },
    /// Nothing that begins there is mapped.
    #[error("no mapping begins at offset {offset}")]
    NotMapped {
        /// Offset from the start of the range, in bytes.
        offset: u64,
    },
    /// Host access to an address with no memory behind it.
    #[error("no accessible memory at address {address:#x}")]
    Fault {
        /// The first address of the access that faulted.
        address: u64,
    },
    /// A duty of the caller was not met; a mistake in the program that a checking driver found.
    #[error("{call}: {broken}")]
    Contract {
        /// Primitive that was called.
        call: &'static str,
        /// The duty that was not met.
        broken: &'static str,
    },
    /// The device's own answer.
    #[error("{call} failed with status {code} ({name})")]
    Driver {
        /// The call into the device's library, or the system call.
        call: &'static str,
        /// Its status code or errno.
        code: i64,
        /// The status by name.
        name: String,
    },
}

impl VmmError {
    /// The system's answer to `call`.
    pub(crate) fn from_errno(call: &'static str, errno: Errno) -> Self {
        Self::Driver {
            call,
            code: i64::from(errno as i32),
            name: format!("{errno:?}"),
        }
    }
}
