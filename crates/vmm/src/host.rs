//! Real memory of this machine (Linux), standing in for a device.
//!
//! ```text
//! addresses   [ no access │ chunk 7 │ no access │ chunk 2 │ … ]   one anonymous mapping per range
//!                              │                     │
//! one memfd   [ … chunk 2 …│… chunk 7 …│ holes where chunks were destroyed ]
//! ```
//!
//! All chunks live in one sparse file, so their number is not bounded by file descriptors. The
//! number of *mappings* is bounded by the system (`vm.max_map_count`, usually 65 530); beyond it
//! [`Driver::map`] answers [`VmmError::OutOfMemory`].

#![expect(
    unsafe_code,
    reason = "mmap and munmap of addresses that this driver reserved"
)]

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::{Pid, SysconfVar, ftruncate, sysconf};

use crate::span::{check_inside, check_len, check_place};
use crate::{Access, AddressRange, Bytes, DeviceMemory, Driver, Properties, VmmError};

/// The granularity of today's GPUs: 2 MiB.
const GPU_GRANULARITY: u64 = 2 << 20;

/// What a [`Host`] pretends to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostConfig {
    /// Memory of the pretended device. It is counted; the machine gives it page by page at the
    /// first touch.
    pub total_bytes: u64,
    /// See [`Properties::granularity`]; a multiple of the machine's page size.
    pub granularity: u64,
    /// See [`Properties::alias`].
    pub alias: bool,
    /// See [`Properties::read_only`]; if false, [`Access::Read`] allows writing too.
    pub read_only: bool,
}

impl HostConfig {
    /// `total_bytes` in granules of 2 MiB, with every capability.
    #[must_use]
    pub const fn new(total_bytes: u64) -> Self {
        Self {
            total_bytes,
            granularity: GPU_GRANULARITY,
            alias: true,
            read_only: true,
        }
    }
}

/// Memory of this machine as a device: real bytes, real faults.
///
/// It does not remember what is mapped where; [`Mock`](crate::Mock) does, and checks it.
#[derive(Debug)]
pub struct Host {
    properties: Properties,
    total_bytes: u64,
    /// Chunks carry a clone, which tells those of another `Host`.
    file: Arc<OwnedFd>,
    store: Mutex<Store>,
    /// A mapping to give up when the system allows no more; see [`Host::hide`].
    spare: Mutex<Option<HostRange>>,
}

/// Addresses that a [`Host`] reserved.
#[derive(Debug)]
pub struct HostRange {
    base: NonZeroUsize,
    len: usize,
}

/// Memory that a [`Host`] handed out.
#[derive(Debug)]
pub struct HostChunk {
    file: Arc<OwnedFd>,
    /// Where it begins in the file.
    start: u64,
    len: u64,
}

/// Which parts of the file are whose.
///
/// A stretch keeps its length for ever and is reused only for that length, so creating never
/// searches and nothing fragments; the file is sparse, so its length costs nothing.
#[derive(Debug, Default)]
struct Store {
    free: HashMap<u64, Vec<u64>>,
    end: u64,
    file_len: u64,
    used_bytes: u64,
}

impl Host {
    /// A device as `config` describes it.
    ///
    /// # Errors
    /// [`VmmError::Contract`] for a granularity that is no power of two or no multiple of the
    /// machine's page size; [`VmmError::Unavailable`] if the machine gives no memory file.
    pub fn new(config: HostConfig) -> Result<Self, VmmError> {
        let page = system_page_bytes()?;
        if !config.granularity.is_power_of_two() || !config.granularity.is_multiple_of(page) {
            let broken = "the granularity is a power of two and a multiple of the system's page";
            return Err(VmmError::Contract {
                call: "Host::new",
                broken,
            });
        }
        let file = memfd_create(c"kvcached-host", MFdFlags::MFD_CLOEXEC).map_err(|errno| {
            VmmError::Unavailable {
                reason: format!("memfd_create: {errno}"),
            }
        })?;
        let spare = HostRange::spare(&file).ok();
        let mut properties = Properties::new(config.granularity);
        properties.alias = config.alias;
        properties.read_only = config.read_only;
        Ok(Self {
            properties,
            total_bytes: config.total_bytes,
            file: Arc::new(file),
            store: Mutex::new(Store::default()),
            spare: Mutex::new(spare),
        })
    }

    /// Hides a place, at the system's limit on the number of mappings too.
    ///
    /// There it refuses even a mapping that would put an end to another; without a spare one a full
    /// host would stay full for ever.
    fn hide(&self, place: &Place<'_>) -> Result<(), Errno> {
        match place.hide() {
            Err(Errno::ENOMEM) => {}
            done => return done,
        }
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(spare) = spare.take() {
            spare.release()?;
        }
        let done = place.hide();
        *spare = HostRange::spare(&self.file).ok();
        done
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        // Nothing in a critical section panics half-way through a change.
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_own(&self, chunk: &HostChunk, call: &'static str) -> Result<(), VmmError> {
        if Arc::ptr_eq(&chunk.file, &self.file) {
            return Ok(());
        }
        Err(VmmError::Contract {
            call,
            broken: "a chunk goes back to the driver that made it",
        })
    }
}

impl Driver for Host {
    type Range = HostRange;
    type Chunk = HostChunk;

    fn properties(&self) -> Properties {
        self.properties
    }

    fn reserve(&self, len: u64) -> Result<HostRange, VmmError> {
        check_len(len, self.properties.granularity)?;
        HostRange::reserve(len, self.properties.granularity).map_err(|errno| match errno {
            Errno::ENOMEM => VmmError::OutOfAddresses { requested: len },
            _ => VmmError::from_errno("mmap", errno),
        })
    }

    fn release(&self, range: HostRange) -> Result<(), VmmError> {
        range
            .release()
            .map_err(|errno| VmmError::from_errno("munmap", errno))
    }

    fn create(&self, len: u64) -> Result<HostChunk, VmmError> {
        check_len(len, self.properties.granularity)?;
        let full = VmmError::OutOfMemory { requested: len };
        let mut store = self.store();
        if len > self.total_bytes.saturating_sub(store.used_bytes) {
            return Err(full);
        }
        let start = match store.free.get_mut(&len).and_then(Vec::pop) {
            Some(start) => start,
            None => store
                .lengthen(&self.file, len)
                .map_err(|errno| match errno {
                    Errno::ENOMEM | Errno::ENOSPC | Errno::EFBIG | Errno::EDQUOT => full,
                    _ => VmmError::from_errno("ftruncate", errno),
                })?,
        };
        store.used_bytes += len;
        Ok(HostChunk {
            file: Arc::clone(&self.file),
            start,
            len,
        })
    }

    fn destroy(&self, chunk: HostChunk) -> Result<(), VmmError> {
        self.check_own(&chunk, "destroy")?;
        // The hole gives the memory back now, and makes the next owner's bytes zero.
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&*self.file, mode, in_file(chunk.start), in_file(chunk.len))
            .map_err(|errno| VmmError::from_errno("fallocate", errno))?;
        let mut store = self.store();
        store.used_bytes -= chunk.len;
        store.free.entry(chunk.len).or_default().push(chunk.start);
        Ok(())
    }

    fn map(
        &self,
        range: &HostRange,
        offset: u64,
        chunk: &HostChunk,
        access: Access,
    ) -> Result<(), VmmError> {
        self.check_own(chunk, "map")?;
        check_place(
            offset,
            chunk.len,
            range.byte_len(),
            self.properties.granularity,
        )?;
        let protection = match access {
            Access::Read if self.properties.read_only => ProtFlags::PROT_READ,
            Access::Read | Access::ReadWrite => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
        };
        let place = range.place(offset, chunk.len);
        place
            .show(protection, &chunk.file, in_file(chunk.start))
            .map_err(|errno| match errno {
                // Also what the system says at its limit on the number of mappings.
                Errno::ENOMEM => VmmError::OutOfMemory {
                    requested: chunk.len,
                },
                _ => VmmError::from_errno("mmap", errno),
            })
    }

    fn unmap(&self, range: &HostRange, offset: u64, len: u64) -> Result<(), VmmError> {
        check_place(offset, len, range.byte_len(), self.properties.granularity)?;
        self.hide(&range.place(offset, len))
            .map_err(|errno| VmmError::from_errno("mmap", errno))
    }

    fn memory(&self) -> Result<DeviceMemory, VmmError> {
        let free = self.total_bytes.saturating_sub(self.store().used_bytes);
        Ok(DeviceMemory {
            free,
            total: self.total_bytes,
        })
    }

    fn synchronize(&self) -> Result<(), VmmError> {
        // A processor finishes its accesses before it makes the next call.
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let spare = self
            .spare
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(Err(errno)) = spare.map(HostRange::release) {
            tracing::error!(%errno, "spare mapping lost until the process ends");
        }
    }
}

impl Bytes for Host {
    fn write(&self, range: &HostRange, offset: u64, bytes: &[u8]) -> Result<(), VmmError> {
        check_inside(offset, bytes.len() as u64, range.byte_len())?;
        let address = range.address(offset);
        let mut done = 0;
        while done < bytes.len() {
            let there = RemoteIoVec {
                base: address + done,
                len: bytes.len() - done,
            };
            let copied = process_vm_writev(Pid::this(), &[IoSlice::new(&bytes[done..])], &[there]);
            done += transferred("process_vm_writev", copied, there.base)?;
        }
        Ok(())
    }

    fn read(&self, range: &HostRange, offset: u64, buffer: &mut [u8]) -> Result<(), VmmError> {
        check_inside(offset, buffer.len() as u64, range.byte_len())?;
        let address = range.address(offset);
        let mut done = 0;
        while done < buffer.len() {
            let there = RemoteIoVec {
                base: address + done,
                len: buffer.len() - done,
            };
            let here = &mut [IoSliceMut::new(&mut buffer[done..])];
            let copied = process_vm_readv(Pid::this(), here, &[there]);
            done += transferred("process_vm_readv", copied, there.base)?;
        }
        Ok(())
    }
}

impl Store {
    /// A stretch of `len` bytes that no chunk has had yet.
    fn lengthen(&mut self, file: &OwnedFd, len: u64) -> Result<u64, Errno> {
        /// The file grows by this much at least, so that most creates make no system call.
        const STEP: u64 = 1 << 30;
        let start = self.end;
        let end = start.checked_add(len).ok_or(Errno::EFBIG)?;
        if end > self.file_len {
            let file_len = end.checked_next_multiple_of(STEP).ok_or(Errno::EFBIG)?;
            ftruncate(file, i64::try_from(file_len).map_err(|_| Errno::EFBIG)?)?;
            self.file_len = file_len;
        }
        self.end = end;
        Ok(start)
    }
}

impl HostRange {
    fn reserve(len: u64, align: u64) -> Result<Self, Errno> {
        let len = usize::try_from(len).map_err(|_| Errno::ENOMEM)?;
        let align = usize::try_from(align).map_err(|_| Errno::ENOMEM)?;
        // The system aligns to its own page only: take one granule more, give the ends back.
        let whole = len
            .checked_add(align)
            .and_then(NonZeroUsize::new)
            .ok_or(Errno::ENOMEM)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: mmap without MAP_FIXED replaces nothing, and no reference to the result is made.
        let found = unsafe { mmap_anonymous(None, whole, ProtFlags::PROT_NONE, flags) }?.addr();
        let before = found.get().wrapping_neg() & (align - 1);
        let base = found
            .checked_add(before)
            .expect("one granule more holds an aligned address");
        let end = base
            .checked_add(len)
            .expect("the range lies in what was reserved");
        for (start, len) in [(found, before), (end, align - before)] {
            if len > 0 {
                // SAFETY: reserved above, outside the range that is kept, known to nobody else.
                unsafe { munmap(NonNull::without_provenance(start), len) }?;
            }
        }
        Ok(Self { base, len })
    }

    /// A mapping of its own: one of a file joins no neighbour, as reserved addresses do.
    fn spare(file: &OwnedFd) -> Result<Self, Errno> {
        let len = NonZeroUsize::MIN;
        // SAFETY: mmap without MAP_FIXED replaces nothing, and no reference to the result is made.
        let found = unsafe {
            mmap(
                None,
                len,
                ProtFlags::PROT_NONE,
                MapFlags::MAP_SHARED,
                file,
                0,
            )
        }?;
        Ok(Self {
            base: found.addr(),
            len: len.get(),
        })
    }

    fn release(self) -> Result<(), Errno> {
        // SAFETY: the range was reserved by `reserve` and is given up here; nobody holds a
        // reference into it, because this module makes none and hands out numbers only.
        unsafe { munmap(NonNull::without_provenance(self.base), self.len) }
    }

    /// Address of an offset that lies in the range or at its end.
    fn address(&self, offset: u64) -> usize {
        self.base.get() + inside(offset)
    }

    /// Part of the range, which the caller has checked to lie inside and not to be empty.
    fn place(&self, offset: u64, len: u64) -> Place<'_> {
        let address = NonZeroUsize::new(self.address(offset)).expect("no range begins at zero");
        let len = NonZeroUsize::new(inside(len)).expect("a place is not empty");
        assert!(
            inside(offset) + len.get() <= self.len,
            "a place lies inside its range"
        );
        Place {
            address,
            len,
            range: PhantomData,
        }
    }
}

impl AddressRange for HostRange {
    fn base(&self) -> u64 {
        self.base.get() as u64
    }

    fn byte_len(&self) -> u64 {
        self.len as u64
    }
}

/// Addresses inside a range that is still reserved.
struct Place<'a> {
    address: NonZeroUsize,
    len: NonZeroUsize,
    range: PhantomData<&'a HostRange>,
}

impl Place<'_> {
    /// Lets the place show `file` from `start` on.
    fn show(&self, protection: ProtFlags, file: &OwnedFd, start: i64) -> Result<(), Errno> {
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: MAP_FIXED replaces what is at these addresses. They lie in a range that this
        // module reserved and still holds, into which nobody has a reference.
        unsafe { mmap(Some(self.address), self.len, protection, flags, file, start) }?;
        Ok(())
    }

    /// Makes the place inaccessible again, in one step, so that nobody else's mapping can slip in.
    fn hide(&self) -> Result<(), Errno> {
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
        // SAFETY: as in `show`.
        unsafe { mmap_anonymous(Some(self.address), self.len, ProtFlags::PROT_NONE, flags) }?;
        Ok(())
    }
}

/// Bytes moved by one call, or where it stopped.
fn transferred(
    call: &'static str,
    copied: Result<usize, Errno>,
    address: usize,
) -> Result<usize, VmmError> {
    match copied {
        Ok(0) | Err(Errno::EFAULT) => Err(VmmError::Fault {
            address: address as u64,
        }),
        Ok(moved) => Ok(moved),
        Err(errno) => Err(VmmError::from_errno(call, errno)),
    }
}

/// A number of bytes inside a range, whose length is a `usize`.
fn inside(bytes: u64) -> usize {
    usize::try_from(bytes).expect("it lies inside a range whose length is a usize")
}

/// A number of bytes inside the file, whose length is an `i64`.
fn in_file(bytes: u64) -> i64 {
    i64::try_from(bytes).expect("it lies inside a file whose length is an i64")
}

fn system_page_bytes() -> Result<u64, VmmError> {
    let page =
        sysconf(SysconfVar::PAGE_SIZE).map_err(|errno| VmmError::from_errno("sysconf", errno))?;
    page.and_then(|bytes| u64::try_from(bytes).ok())
        .ok_or_else(|| VmmError::Unavailable {
            reason: "the system's page size is unknown".into(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 65536;

    fn host(granules: u64) -> Host {
        Host::new(HostConfig {
            granularity: G,
            ..HostConfig::new(granules * G)
        })
        .unwrap()
    }

    #[test]
    fn what_is_written_is_there_and_nowhere_else() {
        let host = host(4);
        let range = host.reserve(8 * G).unwrap();
        let (a, b) = (host.create(G).unwrap(), host.create(2 * G).unwrap());
        host.map(&range, G, &a, Access::ReadWrite).unwrap();
        host.map(&range, 4 * G, &b, Access::ReadWrite).unwrap();
        let text = b"over the middle of a chunk";

        host.write(&range, 5 * G - 7, text).unwrap();

        let mut found = [0; 26];
        host.read(&range, 5 * G - 7, &mut found).unwrap();
        assert_eq!(&found, text);
        let mut other = vec![1; 65536];
        host.read(&range, G, &mut other).unwrap();
        assert!(other.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn an_unmapped_address_faults_as_a_value_and_says_where() {
        let host = host(4);
        let range = host.reserve(4 * G).unwrap();
        let chunk = host.create(G).unwrap();
        host.map(&range, G, &chunk, Access::ReadWrite).unwrap();

        // Begins inside the chunk, ends behind it.
        let answer = host.write(&range, 2 * G - 4, &[7; 8]);
        assert_eq!(
            answer,
            Err(VmmError::Fault {
                address: range.base() + 2 * G
            })
        );
        assert!(matches!(
            host.read(&range, 0, &mut [0]),
            Err(VmmError::Fault { .. })
        ));

        host.unmap(&range, G, G).unwrap();
        assert!(matches!(
            host.read(&range, G, &mut [0]),
            Err(VmmError::Fault { .. })
        ));
    }

    #[test]
    fn released_memory_is_zero_when_created_anew() {
        let host = host(2);
        let range = host.reserve(2 * G).unwrap();
        for _ in 0..3 {
            let chunk = host.create(2 * G).unwrap();
            host.map(&range, 0, &chunk, Access::ReadWrite).unwrap();
            let mut bytes = vec![1; 2 * 65536];
            host.read(&range, 0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&byte| byte == 0));
            host.write(&range, 0, &vec![0xaa; 2 * 65536]).unwrap();
            host.unmap(&range, 0, 2 * G).unwrap();
            host.destroy(chunk).unwrap();
        }
    }

    #[test]
    fn a_read_only_mapping_reads_and_refuses_writing() {
        let host = host(2);
        let range = host.reserve(2 * G).unwrap();
        let chunk = host.create(G).unwrap();
        host.map(&range, 0, &chunk, Access::Read).unwrap();
        host.map(&range, G, &chunk, Access::ReadWrite).unwrap();

        assert!(matches!(
            host.write(&range, 0, b"x"),
            Err(VmmError::Fault { .. })
        ));
        host.write(&range, G, b"shared").unwrap();
        let mut through_the_alias = [0; 6];
        host.read(&range, 0, &mut through_the_alias).unwrap();
        assert_eq!(&through_the_alias, b"shared");
    }

    #[test]
    fn the_stated_memory_is_the_most_that_is_given() {
        let host = host(4);
        let chunk = host.create(3 * G).unwrap();
        assert!(matches!(
            host.create(2 * G),
            Err(VmmError::OutOfMemory { .. })
        ));
        assert_eq!(
            host.memory(),
            Ok(DeviceMemory {
                free: G,
                total: 4 * G
            })
        );
        host.destroy(chunk).unwrap();
        assert!(host.create(4 * G).is_ok());
    }

    #[test]
    fn a_range_begins_at_a_multiple_of_the_granularity() {
        for granularity in [4096, G, 2 << 20, 1 << 30] {
            let config = HostConfig {
                granularity,
                ..HostConfig::new(1 << 30)
            };
            let host = Host::new(config).unwrap();
            let range = host.reserve(3 * granularity).unwrap();
            assert_eq!(range.base() % granularity, 0);
            assert_eq!(range.byte_len(), 3 * granularity);
            host.release(range).unwrap();
        }
    }

    #[test]
    fn too_many_addresses_are_refused_as_a_value() {
        let host = host(1);
        let answer = host.reserve(1 << 62);
        assert!(
            matches!(answer, Err(VmmError::OutOfAddresses { .. })),
            "{answer:?}"
        );
        let answer = host.reserve(u64::MAX - G + 1);
        assert!(
            matches!(answer, Err(VmmError::OutOfAddresses { .. })),
            "{answer:?}"
        );
    }

    #[test]
    fn a_place_outside_the_range_touches_nothing() {
        let host = host(2);
        let range = host.reserve(2 * G).unwrap();
        let chunk = host.create(2 * G).unwrap();
        assert!(matches!(
            host.map(&range, G, &chunk, Access::Read),
            Err(VmmError::OutOfRange { .. })
        ));
        assert!(matches!(
            host.unmap(&range, 2 * G, G),
            Err(VmmError::OutOfRange { .. })
        ));
        assert!(matches!(
            host.read(&range, 2 * G, &mut [0]),
            Err(VmmError::OutOfRange { .. })
        ));
        assert!(matches!(
            host.write(&range, u64::MAX, b"x"),
            Err(VmmError::OutOfRange { .. })
        ));
    }

    #[test]
    fn a_chunk_of_another_host_is_refused() {
        let (host, other) = (host(1), host(1));
        let range = host.reserve(G).unwrap();
        let chunk = other.create(G).unwrap();
        let answer = host.map(&range, 0, &chunk, Access::Read);
        assert!(matches!(
            answer,
            Err(VmmError::Contract { call: "map", .. })
        ));
        assert!(matches!(
            host.destroy(chunk),
            Err(VmmError::Contract {
                call: "destroy",
                ..
            })
        ));
    }

    #[test]
    fn a_granularity_that_the_machine_cannot_do_is_an_error() {
        for granularity in [0, 12288, 512] {
            let answer = Host::new(HostConfig {
                granularity,
                ..HostConfig::new(G)
            });
            assert!(
                matches!(answer, Err(VmmError::Contract { .. })),
                "{granularity}"
            );
        }
    }
}
