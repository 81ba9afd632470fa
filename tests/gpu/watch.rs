//! Work on the device that a test can see into: a kernel that reads a stretch of memory for as long
//! as the test likes and counts the words that are not what they should be.
//!
//! The kernel is text (`watch.ptx`) that the driver translates, so no CUDA compiler is needed.

#![expect(unsafe_code, reason = "calls into libcuda")]

use std::ffi::{CString, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cudarc::driver::sys::{self, CUfunction, CUmodule, CUresult, CUstream, CUstream_flags};
use kvcached_vmm::{Cuda, CudaFence, CudaStream, Fence};

/// Words of memory that host and kernel both see.
const WORDS: usize = 8;
const THREADS: u32 = 256;

const GO_ON: u32 = 0;
const PAUSE: u32 = 1;
const STOP: u32 = 2;

/// The kernel, on a stream of its own that waits for no other.
///
/// It belongs to the thread that made it.
pub(crate) struct Watcher {
    module: CUmodule,
    function: CUfunction,
    stream: CUstream,
    control: NonNull<AtomicU32>,
    control_address: u64,
}

/// One launch of it. Ends by itself after its limit at the latest.
pub(crate) struct Watch<'a> {
    watcher: &'a Watcher,
    cuda: &'a Cuda,
}

/// What the kernel read, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// As the owner wrote them.
    pub(crate) own: u32,
    pub(crate) zero: u32,
    /// Anything else: another's.
    pub(crate) foreign: u32,
}

#[track_caller]
fn check(status: CUresult) {
    assert_eq!(status, CUresult::CUDA_SUCCESS);
}

impl Watcher {
    /// A watcher on the device 0 of `_cuda`, whose making has started the driver.
    pub(crate) fn new(_cuda: &Cuda) -> Self {
        let mut context = ptr::null_mut();
        // SAFETY: the driver is started and there is a device 0; `context` is a place for the
        // answer. It is never given back: this is a test's process.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, 0) });
        // SAFETY: the context was retained a moment ago.
        check(unsafe { sys::cuCtxSetCurrent(context) });

        let text = CString::new(include_str!("watch.ptx")).expect("text without a zero byte");
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a context is current; the text ends in a zero byte and outlives the call.
        check(unsafe { sys::cuModuleLoadData(&raw mut module, text.as_ptr().cast()) });
        // SAFETY: the module is loaded; the name ends in a zero byte.
        check(unsafe { sys::cuModuleGetFunction(&raw mut function, module, c"watch".as_ptr()) });

        let mut stream = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; `stream` is a place for the answer.
        check(unsafe { sys::cuStreamCreate(&raw mut stream, flags) });

        let mut control = ptr::null_mut();
        let bytes = WORDS * size_of::<AtomicU32>();
        // SAFETY: a context is current; `control` is a place for the answer.
        check(unsafe {
            sys::cuMemHostAlloc(&raw mut control, bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP)
        });
        let mut control_address = 0;
        // SAFETY: memory of the host that was made for the device to see.
        check(unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut control_address, control, 0) });
        Self {
            module,
            function,
            stream,
            control: NonNull::new(control.cast()).expect("success gives memory"),
            control_address,
        }
    }

    /// Starts to read `len` bytes from `address` on, where `tag` should be in every word.
    pub(crate) fn launch<'a>(
        &'a self,
        cuda: &'a Cuda,
        (address, len): (u64, u64),
        tag: u32,
        limit: Duration,
    ) -> Watch<'a> {
        (0..WORDS).for_each(|index| self.word(index).store(GO_ON, Ordering::SeqCst));
        let nanoseconds = u64::try_from(limit.as_nanos()).expect("a limit is short");
        let (mut address, mut len, mut tag) = (address, len, tag);
        let (mut nanoseconds, mut control) = (nanoseconds, self.control_address);
        let mut parameters: [*mut c_void; 5] = [
            (&raw mut address).cast(),
            (&raw mut len).cast(),
            (&raw mut tag).cast(),
            (&raw mut nanoseconds).cast(),
            (&raw mut control).cast(),
        ];
        // SAFETY: the parameters are those that the kernel declares, and are copied by the call.
        // Its control words outlive it, since `Drop` waits for the stream; that what it reads is
        // mapped is what the test is about, and an error of the device if it is not.
        check(unsafe {
            sys::cuLaunchKernel(
                self.function,
                1,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        });
        Watch {
            watcher: self,
            cuda,
        }
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < WORDS, "there are {WORDS} words");
        // SAFETY: inside the words of `control`, checked a line above.
        let word = unsafe { self.control.add(index) };
        // SAFETY: live and aligned, as the words are until the watcher is dropped; what the device
        // does to them at the same time is as atomic as what another thread would.
        unsafe { word.as_ref() }
    }

    fn synchronize(&self) -> CUresult {
        // SAFETY: the stream is alive.
        unsafe { sys::cuStreamSynchronize(self.stream) }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.word(0).store(STOP, Ordering::SeqCst);
        let ended = self.synchronize();
        // SAFETY: nothing runs on the stream any more, and its handle is given up.
        let stream = unsafe { sys::cuStreamDestroy_v2(self.stream) };
        // SAFETY: the one kernel of the module has ended.
        let module = unsafe { sys::cuModuleUnload(self.module) };
        // SAFETY: as `cuMemHostAlloc` gave it; nobody uses it any more.
        let memory = unsafe { sys::cuMemFreeHost(self.control.as_ptr().cast()) };
        if !std::thread::panicking() {
            [ended, stream, module, memory].into_iter().for_each(check);
        }
    }
}

impl Watch<'_> {
    /// The end of this launch.
    pub(crate) fn fence(&self) -> CudaFence {
        let handle = self.watcher.stream.expose_provenance() as u64;
        // SAFETY: the stream lives as long as the watcher.
        let stream = unsafe { CudaStream::from_raw(handle) };
        self.cuda.fence(stream).expect("an event is cheap")
    }

    /// Waits until everything was read `more` times more than now.
    pub(crate) fn read_on(&self, more: u32) {
        let rounds = || self.watcher.word(2).load(Ordering::SeqCst);
        let enough = rounds() + more;
        self.wait_until(|| rounds() >= enough);
    }

    /// Returns when the kernel has paused: it reads nothing until it may go on.
    pub(crate) fn pause(&self) {
        self.watcher.word(0).store(PAUSE, Ordering::SeqCst);
        self.wait_until(|| self.watcher.word(1).load(Ordering::SeqCst) == 1);
    }

    pub(crate) fn go_on(&self) {
        self.watcher.word(0).store(GO_ON, Ordering::SeqCst);
    }

    pub(crate) fn stop(&self) {
        self.watcher.word(0).store(STOP, Ordering::SeqCst);
    }

    /// Waits for the end of the launch.
    pub(crate) fn counts(self) -> Counts {
        check(self.watcher.synchronize());
        let word = |index| self.watcher.word(index).load(Ordering::SeqCst);
        Counts {
            own: word(3),
            zero: word(4),
            foreign: word(5),
        }
    }

    /// The bound of the wait is the kernel's own.
    fn wait_until(&self, is_so: impl Fn() -> bool) {
        let end = self.fence();
        while !is_so() {
            let over = end.is_over().expect("the device is well");
            assert!(
                !over || is_so(),
                "the kernel ended before the test was done"
            );
            std::thread::yield_now();
        }
    }
}
