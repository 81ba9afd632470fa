//! A GPU, through the virtual-memory calls of the CUDA driver.
//!
//! Three tiers: the calls of `cudarc::driver::sys`; one function each that turns a status into a
//! `Result` (bottom of this file); and [`Cuda`], which keeps the rules of [`Driver`], with
//! [`CudaFence`], which keeps those of [`Fence`].
//!
//! # Safety
//!
//! - libcuda is opened at run time. Whether it and every call used here exist is asked once, in
//!   [`Cuda::new`]: a call that is missing would otherwise panic inside `cudarc`.
//! - Every method makes the device's primary context current and restores what was before, so
//!   that the device is chosen by the value, never by the thread.
//! - Device addresses are numbers here; no reference to device memory is ever made. Copies check a
//!   table of what is mapped first, because an access that faults *on the device* ends the context
//!   for the whole process.

#![expect(unsafe_code, reason = "calls into libcuda")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUevent_flags,
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUresult, CUstream,
};

mod granules;

use self::granules::{Granules, READABLE, UNMAPPED, WRITABLE};
use crate::span::{check_inside, check_len, check_place};
use crate::{Access, AddressRange, Bytes, DeviceMemory, Driver, Fence, Properties, VmmError};

/// A GPU of this machine.
///
/// ```no_run
/// use std::sync::Arc;
/// use kvcached_vmm::{Access, Chunk, Cuda, Driver, Reservation, VmmError};
///
/// # fn main() -> Result<(), VmmError> {
/// let gpu = Arc::new(Cuda::new(0)?);
/// let granule = gpu.properties().granularity;
/// let mut range = Reservation::new(Arc::clone(&gpu), 1 << 40)?;
/// range.map(0, Arc::new(Chunk::create(&gpu, granule)?), Access::ReadWrite)?;
/// range.write(0, b"key and value")?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Cuda {
    device: CUdevice,
    context: Arc<Context>,
    properties: Properties,
    name: String,
    uuid: [u8; 16],
}

/// Addresses that a [`Cuda`] reserved.
#[derive(Debug)]
pub struct CudaRange {
    base: CUdeviceptr,
    len: u64,
    granules: Granules,
}

/// Memory that a [`Cuda`] handed out.
#[derive(Debug)]
pub struct CudaChunk {
    handle: CUmemGenericAllocationHandle,
    len: u64,
    device: CUdevice,
}

/// A stream of work on a device, by the handle that the driver gave to whoever made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CudaStream(u64);

/// The end of what was launched on a stream up to the moment when this was made.
///
/// ```no_run
/// use kvcached_vmm::{Cuda, CudaStream, Fence, VmmError};
///
/// # fn main() -> Result<(), VmmError> {
/// let gpu = Cuda::new(0)?;
/// // … launch work on the default stream, then:
/// let fence = gpu.fence(CudaStream::DEFAULT)?;
/// while !fence.is_over()? {
///     // … do something else.
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct CudaFence {
    event: Event,
    context: Arc<Context>,
}

impl Cuda {
    /// The device with this number, as the driver counts them (`CUDA_VISIBLE_DEVICES` included).
    ///
    /// # Errors
    /// [`VmmError::Unavailable`] if the driver library is missing or too old, there is no such
    /// device, it has no virtual memory management, or it gives no context (it may be full);
    /// [`VmmError::Driver`] for anything else that the driver refuses.
    pub fn new(ordinal: u32) -> Result<Self, VmmError> {
        find_library()?;
        init().map_err(|failure| match failure.status {
            CUresult::CUDA_ERROR_NO_DEVICE => {
                unavailable("the CUDA driver is installed but sees no device".into())
            }
            _ => unavailable(format!("the CUDA driver does not start: {failure}")),
        })?;
        let count = device_count()?;
        let number = c_int::try_from(ordinal)
            .ok()
            .filter(|number| *number < count);
        let number = number.ok_or_else(|| {
            unavailable(format!(
                "device {ordinal} was asked for, the driver sees {count}"
            ))
        })?;
        let device = device_get(number)?;
        let name = device_name(device)?;
        let supported =
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
        if device_attribute(device, supported)? == 0 {
            let reason = format!("device {ordinal} ({name}) has no virtual memory management");
            return Err(unavailable(reason));
        }
        let granularity = allocation_granularity(&allocation_properties(device))?;
        let mut properties = Properties::new(granularity);
        properties.alias = true;
        properties.read_only = true;
        let uuid = device_uuid(device)?;
        let context = primary_context_retain(device).map_err(|failure| {
            unavailable(format!(
                "device {ordinal} ({name}) gives no context: {failure}"
            ))
        })?;
        // From here on the value exists, and gives the context back when it is dropped.
        let mut cuda = Self {
            device,
            context: Arc::new(context),
            properties,
            name,
            uuid,
        };
        cuda.properties.read_only = cuda.takes_read_only();
        Ok(cuda)
    }

    /// Name of the device's model.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Identity of the device, the same in every process and under every numbering.
    #[must_use]
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Marks the end of what was launched on `stream` so far. Costs a few microseconds and waits for
    /// nothing.
    ///
    /// # Errors
    /// [`VmmError::Driver`], also for a stream of another device or one that is being captured.
    pub fn fence(&self, stream: CudaStream) -> Result<CudaFence, VmmError> {
        let _current = self.enter()?;
        // From here on the value exists, and destroys the event when it is dropped.
        let fence = CudaFence {
            event: event_create()?,
            context: Arc::clone(&self.context),
        };
        event_record(&fence.event, stream)?;
        Ok(fence)
    }

    /// Does the device accept a read-only mapping? No document promises it, so one is tried.
    fn takes_read_only(&self) -> bool {
        let attempt = || -> Result<bool, VmmError> {
            let granule = self.properties.granularity;
            let range = self.reserve(granule)?;
            let chunk = self.create(granule)?;
            let accepted = self.map(&range, 0, &chunk, Access::Read).is_ok();
            if accepted {
                self.unmap(&range, 0, granule)?;
            }
            self.release(range)?;
            self.destroy(chunk)?;
            Ok(accepted)
        };
        attempt().unwrap_or_else(|error| {
            tracing::warn!(%error, "device was not asked for read-only mappings: it gets none");
            false
        })
    }

    fn enter(&self) -> Result<Current<'_>, Failure> {
        self.context.enter()
    }

    fn check_own(&self, chunk: &CudaChunk, call: &'static str) -> Result<(), VmmError> {
        if chunk.device == self.device {
            return Ok(());
        }
        Err(VmmError::Contract {
            call,
            broken: "a chunk goes back to the driver that made it",
        })
    }
}

impl CudaStream {
    /// The stream that work goes to for which none is named.
    pub const DEFAULT: Self = Self(0);

    /// The stream with this handle, a `CUstream` or `cudaStream_t` as a number.
    ///
    /// # Safety
    /// The stream exists for as long as the value is passed to [`Cuda::fence`]. The driver does not
    /// promise to recognise one that was destroyed.
    #[must_use]
    pub const unsafe fn from_raw(handle: u64) -> Self {
        Self(handle)
    }
}

impl Fence for CudaFence {
    fn is_over(&self) -> Result<bool, VmmError> {
        let _current = self.context.enter()?;
        match event_query(&self.event) {
            Ok(()) => Ok(true),
            Err(failure) if failure.status == CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            Err(failure) => Err(failure.into()),
        }
    }
}

impl Drop for CudaFence {
    fn drop(&mut self) {
        let destroyed = self
            .context
            .enter()
            .and_then(|_current| event_destroy(&self.event));
        if let Err(failure) = destroyed {
            tracing::error!(%failure, "event kept until the process ends");
        }
    }
}

impl Driver for Cuda {
    type Range = CudaRange;
    type Chunk = CudaChunk;

    fn properties(&self) -> Properties {
        self.properties
    }

    fn reserve(&self, len: u64) -> Result<CudaRange, VmmError> {
        let granularity = self.properties.granularity;
        check_len(len, granularity)?;
        let size = size(len).ok_or(VmmError::OutOfAddresses { requested: len })?;
        let _current = self.enter()?;
        let base = address_reserve(size, size_of(granularity)).map_err(|failure| match failure
            .status
        {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => VmmError::OutOfAddresses { requested: len },
            _ => failure.into(),
        })?;
        Ok(CudaRange {
            base,
            len,
            granules: Granules::new(len, granularity),
        })
    }

    fn release(&self, range: CudaRange) -> Result<(), VmmError> {
        let _current = self.enter()?;
        Ok(address_free(range.base, size_of(range.len))?)
    }

    fn create(&self, len: u64) -> Result<CudaChunk, VmmError> {
        check_len(len, self.properties.granularity)?;
        let size = size(len).ok_or(VmmError::OutOfMemory { requested: len })?;
        let _current = self.enter()?;
        let handle = memory_create(size, &allocation_properties(self.device))
            .map_err(|failure| failure.or_full(len))?;
        Ok(CudaChunk {
            handle,
            len,
            device: self.device,
        })
    }

    fn destroy(&self, chunk: CudaChunk) -> Result<(), VmmError> {
        self.check_own(&chunk, "destroy")?;
        let _current = self.enter()?;
        Ok(memory_release(chunk.handle)?)
    }

    fn map(
        &self,
        range: &CudaRange,
        offset: u64,
        chunk: &CudaChunk,
        access: Access,
    ) -> Result<(), VmmError> {
        self.check_own(chunk, "map")?;
        check_place(offset, chunk.len, range.len, self.properties.granularity)?;
        let (address, size) = (range.base + offset, size_of(chunk.len));
        let (flags, allowed) = match access {
            Access::Read if self.properties.read_only => {
                (CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ, READABLE)
            }
            Access::Read | Access::ReadWrite => (
                CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                WRITABLE,
            ),
        };
        let _current = self.enter()?;
        memory_map(address, size, chunk.handle).map_err(|failure| failure.or_full(chunk.len))?;
        let access = CUmemAccessDesc {
            location: location(self.device),
            flags,
        };
        if let Err(failure) = set_access(address, size, &access) {
            // A mapping that nobody may touch is not "nothing is mapped".
            memory_unmap(address, size)?;
            return Err(failure.or_full(chunk.len));
        }
        range.granules.set(offset, chunk.len, allowed);
        Ok(())
    }

    fn unmap(&self, range: &CudaRange, offset: u64, len: u64) -> Result<(), VmmError> {
        check_place(offset, len, range.len, self.properties.granularity)?;
        let _current = self.enter()?;
        memory_unmap(range.base + offset, size_of(len))?;
        range.granules.set(offset, len, UNMAPPED);
        Ok(())
    }

    fn memory(&self) -> Result<DeviceMemory, VmmError> {
        let _current = self.enter()?;
        let (free, total) = memory_info()?;
        Ok(DeviceMemory {
            free: free as u64,
            total: total as u64,
        })
    }

    fn synchronize(&self) -> Result<(), VmmError> {
        let _current = self.enter()?;
        Ok(context_synchronize()?)
    }
}

impl Bytes for Cuda {
    fn write(&self, range: &CudaRange, offset: u64, bytes: &[u8]) -> Result<(), VmmError> {
        range.check_access(offset, bytes.len(), WRITABLE)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let _current = self.enter()?;
        copy_to_device(range.base + offset, bytes)?;
        // The copy may have returned when the bytes were merely staged; a caller may unmap now.
        Ok(default_stream_synchronize()?)
    }

    fn read(&self, range: &CudaRange, offset: u64, buffer: &mut [u8]) -> Result<(), VmmError> {
        range.check_access(offset, buffer.len(), READABLE)?;
        if buffer.is_empty() {
            return Ok(());
        }
        let _current = self.enter()?;
        Ok(copy_from_device(buffer, range.base + offset)?)
    }
}

impl AddressRange for CudaRange {
    fn base(&self) -> u64 {
        self.base
    }

    fn byte_len(&self) -> u64 {
        self.len
    }
}

impl CudaRange {
    fn check_access(&self, offset: u64, len: usize, need: u8) -> Result<(), VmmError> {
        let len = len as u64;
        check_inside(offset, len, self.len)?;
        match self.granules.first_below(offset, len, need) {
            Some(stop) => Err(VmmError::Fault {
                address: self.base + stop,
            }),
            None => Ok(()),
        }
    }
}

/// The primary context of a device, given back when the value is dropped.
#[derive(Debug)]
struct Context {
    device: CUdevice,
    handle: CUcontext,
}

// SAFETY: a context handle is a name; the driver lets any thread use it.
unsafe impl Send for Context {}
// SAFETY: as above; the driver's calls on it are thread-safe.
unsafe impl Sync for Context {}

impl Context {
    fn enter(&self) -> Result<Current<'_>, Failure> {
        context_push(self)?;
        Ok(Current { of: PhantomData })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Err(failure) = primary_context_release(self.device) {
            tracing::error!(%failure, "primary context kept until the process ends");
        }
    }
}

/// An event of a context.
#[derive(Debug)]
struct Event(CUevent);

// SAFETY: an event handle is a name; the driver lets any thread use it.
unsafe impl Send for Event {}
// SAFETY: as above; the driver's calls on it are thread-safe.
unsafe impl Sync for Event {}

/// The context is current on this thread until this is dropped.
struct Current<'a> {
    /// Not `Send`: what is current belongs to the thread.
    of: PhantomData<(&'a Context, *const ())>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Err(failure) = context_pop() {
            tracing::error!(%failure, "thread keeps the context of the device");
        }
    }
}

/// A status other than success.
#[derive(Debug)]
struct Failure {
    call: &'static str,
    status: CUresult,
}

impl Failure {
    /// The error for a call that needs `bytes` of device memory.
    fn or_full(self, bytes: u64) -> VmmError {
        match self.status {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => VmmError::OutOfMemory { requested: bytes },
            _ => self.into(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answered {:?}", self.call, self.status)
    }
}

impl From<Failure> for VmmError {
    fn from(failure: Failure) -> Self {
        Self::Driver {
            call: failure.call,
            code: i64::from(failure.status as u32),
            name: format!("{:?}", failure.status),
        }
    }
}

fn unavailable(reason: String) -> VmmError {
    VmmError::Unavailable { reason }
}

fn size(bytes: u64) -> Option<usize> {
    usize::try_from(bytes).ok()
}

fn size_of(bytes: u64) -> usize {
    size(bytes).expect("it lies inside something whose length is a usize")
}

fn location(device: CUdevice) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}

fn allocation_properties(device: CUdevice) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// Every call that this file makes, by the name that the library exports.
const CALLS: [&str; 27] = [
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemGetInfo_v2",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
];

/// Opens libcuda and looks for every call, so that none of them can panic later.
fn find_library() -> Result<(), VmmError> {
    // SAFETY: opening libcuda runs its initialisers, which is what a user of it wants.
    if !unsafe { sys::is_culib_present() } {
        let reason = "the CUDA driver library (libcuda.so.1) was not found; \
            it comes with the NVIDIA driver";
        return Err(unavailable(reason.into()));
    }
    // SAFETY: as above; that it can be opened was checked.
    let library = unsafe { sys::culib() };
    for call in CALLS {
        // SAFETY: the symbol is only looked for, not called, so its type does not matter.
        if unsafe { library.get::<*const c_void>(call.as_bytes()) }.is_err() {
            return Err(unavailable(format!(
                "the CUDA driver is too old: it has no {call}"
            )));
        }
    }
    Ok(())
}

fn check(call: &'static str, status: CUresult) -> Result<(), Failure> {
    match status {
        CUresult::CUDA_SUCCESS => Ok(()),
        _ => Err(Failure { call, status }),
    }
}

fn init() -> Result<(), Failure> {
    // SAFETY: the library is open (`find_library`); repeated calls are fine.
    let status = unsafe { sys::cuInit(0) };
    check("cuInit", status)
}

fn device_count() -> Result<c_int, Failure> {
    let mut count = 0;
    // SAFETY: the driver is started; `count` is a place for the answer.
    let status = unsafe { sys::cuDeviceGetCount(&raw mut count) };
    check("cuDeviceGetCount", status)?;
    Ok(count)
}

fn device_get(number: c_int) -> Result<CUdevice, Failure> {
    let mut device = 0;
    // SAFETY: the driver is started and checks `number`; `device` is a place for the answer.
    let status = unsafe { sys::cuDeviceGet(&raw mut device, number) };
    check("cuDeviceGet", status)?;
    Ok(device)
}

fn device_attribute(device: CUdevice, which: CUdevice_attribute) -> Result<c_int, Failure> {
    let mut value = 0;
    // SAFETY: `device` came from the driver; `value` is a place for the answer.
    let status = unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) };
    check("cuDeviceGetAttribute", status)?;
    Ok(value)
}

fn device_name(device: CUdevice) -> Result<String, Failure> {
    const LEN: usize = 256;
    let mut name: [c_char; LEN] = [0; LEN];
    // One less than there is room for, so that it ends in a zero whatever the driver does.
    let room = c_int::try_from(LEN - 1).expect("a name is short");
    // SAFETY: `device` came from the driver, which writes at most `room` bytes to `name`.
    let status = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), room, device) };
    check("cuDeviceGetName", status)?;
    // SAFETY: `name` outlives the result, and its last byte was never written, hence zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    Ok(name.to_string_lossy().into_owned())
}

fn device_uuid(device: CUdevice) -> Result<[u8; 16], Failure> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `device` came from the driver; `uuid` is a place for the answer.
    let status = unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) };
    check("cuDeviceGetUuid_v2", status)?;
    Ok(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]))
}

fn primary_context_retain(device: CUdevice) -> Result<Context, Failure> {
    let mut handle = std::ptr::null_mut();
    // SAFETY: `device` came from the driver; `handle` is a place for the answer.
    let status = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut handle, device) };
    check("cuDevicePrimaryCtxRetain", status)?;
    Ok(Context { device, handle })
}

fn primary_context_release(device: CUdevice) -> Result<(), Failure> {
    // SAFETY: called once for the one retain of this value, when no handle is in use any more.
    let status = unsafe { sys::cuDevicePrimaryCtxRelease_v2(device) };
    check("cuDevicePrimaryCtxRelease", status)
}

fn context_push(context: &Context) -> Result<(), Failure> {
    // SAFETY: the context is retained as long as its owner lives.
    let status = unsafe { sys::cuCtxPushCurrent_v2(context.handle) };
    check("cuCtxPushCurrent", status)
}

fn context_pop() -> Result<(), Failure> {
    let mut popped = std::ptr::null_mut();
    // SAFETY: this thread pushed one (`Current`); `popped` is a place for the answer.
    let status = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
    check("cuCtxPopCurrent", status)
}

fn context_synchronize() -> Result<(), Failure> {
    // SAFETY: a context is current.
    let status = unsafe { sys::cuCtxSynchronize() };
    check("cuCtxSynchronize", status)
}

fn default_stream_synchronize() -> Result<(), Failure> {
    // SAFETY: a context is current, and null names its default stream.
    let status = unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) };
    check("cuStreamSynchronize", status)
}

fn event_create() -> Result<Event, Failure> {
    let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
    let mut event = std::ptr::null_mut();
    // SAFETY: a context is current; `event` is a place for the answer.
    let status = unsafe { sys::cuEventCreate(&raw mut event, flags) };
    check("cuEventCreate", status)?;
    Ok(Event(event))
}

fn event_record(event: &Event, stream: CudaStream) -> Result<(), Failure> {
    let stream: CUstream = std::ptr::with_exposed_provenance_mut(size_of(stream.0));
    // SAFETY: the event is alive; so is the stream, by `CudaStream::from_raw`; the context of the
    // event is current.
    let status = unsafe { sys::cuEventRecord(event.0, stream) };
    check("cuEventRecord", status)
}

fn event_query(event: &Event) -> Result<(), Failure> {
    // SAFETY: the event is alive, and its context is current.
    let status = unsafe { sys::cuEventQuery(event.0) };
    check("cuEventQuery", status)
}

fn event_destroy(event: &Event) -> Result<(), Failure> {
    // SAFETY: called once, by the drop of its owner. The driver frees it when it is over.
    let status = unsafe { sys::cuEventDestroy_v2(event.0) };
    check("cuEventDestroy", status)
}

fn allocation_granularity(properties: &CUmemAllocationProp) -> Result<u64, Failure> {
    let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let mut bytes = 0;
    // SAFETY: `properties` is complete; `bytes` is a place for the answer.
    let status = unsafe { sys::cuMemGetAllocationGranularity(&raw mut bytes, properties, minimum) };
    check("cuMemGetAllocationGranularity", status)?;
    Ok(bytes as u64)
}

fn address_reserve(len: usize, align: usize) -> Result<CUdeviceptr, Failure> {
    let mut base = 0;
    // SAFETY: reserving replaces nothing; `base` is a place for the answer.
    let status = unsafe { sys::cuMemAddressReserve(&raw mut base, len, align, 0, 0) };
    check("cuMemAddressReserve", status)?;
    Ok(base)
}

fn address_free(base: CUdeviceptr, len: usize) -> Result<(), Failure> {
    // SAFETY: a whole range that `address_reserve` gave, whose handle is given up.
    let status = unsafe { sys::cuMemAddressFree(base, len) };
    check("cuMemAddressFree", status)
}

fn memory_create(
    len: usize,
    properties: &CUmemAllocationProp,
) -> Result<CUmemGenericAllocationHandle, Failure> {
    let mut handle = 0;
    // SAFETY: `properties` is complete; `handle` is a place for the answer.
    let status = unsafe { sys::cuMemCreate(&raw mut handle, len, properties, 0) };
    check("cuMemCreate", status)?;
    Ok(handle)
}

fn memory_release(handle: CUmemGenericAllocationHandle) -> Result<(), Failure> {
    // SAFETY: a handle that `memory_create` gave, which is given up.
    let status = unsafe { sys::cuMemRelease(handle) };
    check("cuMemRelease", status)
}

fn memory_map(
    address: CUdeviceptr,
    len: usize,
    handle: CUmemGenericAllocationHandle,
) -> Result<(), Failure> {
    // SAFETY: the addresses lie in a reserved range, the handle is alive, and the driver refuses
    // what is mapped already.
    let status = unsafe { sys::cuMemMap(address, len, 0, handle, 0) };
    check("cuMemMap", status)
}

fn set_access(address: CUdeviceptr, len: usize, access: &CUmemAccessDesc) -> Result<(), Failure> {
    // SAFETY: the addresses were mapped a moment ago; one descriptor is passed.
    let status = unsafe { sys::cuMemSetAccess(address, len, access, 1) };
    check("cuMemSetAccess", status)
}

fn memory_unmap(address: CUdeviceptr, len: usize) -> Result<(), Failure> {
    // SAFETY: the addresses lie in a reserved range; the driver refuses all but whole mappings.
    let status = unsafe { sys::cuMemUnmap(address, len) };
    check("cuMemUnmap", status)
}

/// Free and total, of the device whose context is current.
fn memory_info() -> Result<(usize, usize), Failure> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: a context is current; `free` and `total` are places for the answer.
    let status = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
    check("cuMemGetInfo", status)?;
    Ok((free, total))
}

fn copy_to_device(address: CUdeviceptr, bytes: &[u8]) -> Result<(), Failure> {
    // SAFETY: `bytes` is readable for its length, the table says that the device's side is
    // writable, and a context is current.
    let status =
        unsafe { sys::cuMemcpyHtoD_v2(address, bytes.as_ptr().cast::<c_void>(), bytes.len()) };
    check("cuMemcpyHtoD", status)
}

fn copy_from_device(buffer: &mut [u8], address: CUdeviceptr) -> Result<(), Failure> {
    let (to, len) = (buffer.as_mut_ptr().cast::<c_void>(), buffer.len());
    // SAFETY: `buffer` is writable for its length, the table says that the device's side is
    // readable, and a context is current. The call returns after the copy.
    let status = unsafe { sys::cuMemcpyDtoH_v2(to, address, len) };
    check("cuMemcpyDtoH", status)
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 2 << 20;

    #[test]
    fn only_memory_calls_turn_a_full_device_into_out_of_memory() {
        let full = || Failure {
            call: "cuMemCreate",
            status: CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        };
        assert_eq!(full().or_full(G), VmmError::OutOfMemory { requested: G });
        let name = "CUDA_ERROR_OUT_OF_MEMORY".to_owned();
        let plain = VmmError::Driver {
            call: "cuMemCreate",
            code: 2,
            name,
        };
        assert_eq!(VmmError::from(full()), plain);
        let lost = Failure {
            call: "cuMemMap",
            status: CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        };
        assert!(matches!(
            lost.or_full(G),
            VmmError::Driver { code: 700, .. }
        ));
    }
}
