//! A device in virtual time: memory that several processes share, a driver per process that fails
//! on a script, bytes that can be told apart, and the work that is launched on them.
//!
//! A driver's calls cost time, which its process spends: [`SimDriver::take_cost_ns`]. Work is done
//! in the order in which it was launched; it is caught up with whenever somebody looks
//! ([`SimDriver::catch_up`]), which nobody can tell from doing it when it is due, since nothing
//! else touches the device in between.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use kvcached_mapper::{Epoch, Epochs};
use kvcached_vmm::{
    Access, AddressRange, Bytes, DeviceMemory, Driver, Fence, Properties, VmmError,
};

use crate::clock::Clock;
use crate::script::DriverCall;

/// Bytes of a granule, and of a page in one extent.
pub(crate) const GRANULE: u64 = 64;

/// Bytes of what a request writes into each of its places: its name, and which of its writes it
/// was.
pub(crate) const TAG_BYTES: usize = 16;

/// The memory of one device. Whoever has a process on it takes from the same.
#[derive(Debug)]
pub(crate) struct Device {
    total: u64,
    used: AtomicU64,
    /// Taken by strangers.
    strangers: AtomicU64,
}

/// The driver of one process.
pub(crate) struct SimDriver {
    device: Arc<Device>,
    clock: Arc<Clock>,
    epochs: Arc<Epochs>,
    properties: Properties,
    state: Mutex<State>,
    /// The last epoch all of whose work has been done here.
    done: Arc<AtomicU64>,
}

#[derive(Debug)]
pub(crate) struct SimRange {
    base: u64,
    len: u64,
}

#[derive(Debug)]
pub(crate) struct SimChunk {
    id: u64,
    len: u64,
}

#[derive(Default)]
struct State {
    dead: bool,
    used: u64,
    next: u64,
    ranges: BTreeMap<u64, Range>,
    chunks: BTreeMap<u64, ChunkState>,
    faults: Vec<Planned>,
    faults_met: u64,
    slow: u64,
    cost_ns: u64,
    arriving: VecDeque<Work>,
    queue: VecDeque<Work>,
    /// Until when the device is busy with the last of it.
    busy_until_ns: u64,
    broken: Option<String>,
}

#[derive(Default)]
struct Range {
    mapped: BTreeMap<u64, Mapping>,
}

#[derive(Clone, Copy)]
struct Mapping {
    chunk: u64,
    len: u64,
    writable: bool,
}

struct ChunkState {
    bytes: Vec<u8>,
    mappings: u32,
}

struct Planned {
    call: DriverCall,
    skip: u64,
    times: u64,
}

/// Something that was launched: all of it writes or all of it reads one tag.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    pub(crate) epoch: Epoch,
    /// When the device hears of it.
    pub(crate) arrives_ns: u64,
    pub(crate) takes_ns: u64,
    /// When it is done; set once it has arrived.
    pub(crate) ends_ns: u64,
    pub(crate) writes: bool,
    /// The request whose bytes they are.
    pub(crate) serial: u64,
    /// Addresses of the pieces, each with the number of the write that it holds.
    pub(crate) at: Vec<(u64, u64)>,
    /// Label of the request, for messages.
    pub(crate) who: u32,
    /// Is it the last of its epoch?
    pub(crate) last: bool,
}

#[derive(Debug)]
struct EpochFence {
    epoch: u64,
    done: Arc<AtomicU64>,
}

impl Device {
    pub(crate) fn new(total: u64) -> Arc<Self> {
        Arc::new(Self {
            total,
            used: AtomicU64::new(0),
            strangers: AtomicU64::new(0),
        })
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    fn free(&self) -> u64 {
        let strangers = self.strangers.load(Ordering::Relaxed);
        self.total
            .saturating_sub(self.used())
            .saturating_sub(strangers)
    }

    /// Somebody else takes all that is free.
    pub(crate) fn fill(&self) {
        let free = self.free();
        self.strangers.fetch_add(free, Ordering::Relaxed);
    }

    pub(crate) fn unfill(&self) {
        self.strangers.store(0, Ordering::Relaxed);
    }
}

impl SimDriver {
    /// The driver of a fresh process on `device`, whose work `epochs` hears of, and which can map
    /// one chunk at many addresses and protect it, or not.
    pub(crate) fn new(
        device: &Arc<Device>,
        clock: &Arc<Clock>,
        epochs: &Arc<Epochs>,
        alias: bool,
    ) -> Arc<Self> {
        let mut properties = Properties::new(GRANULE);
        properties.alias = alias;
        properties.read_only = alias;
        Arc::new(Self {
            device: Arc::clone(device),
            clock: Arc::clone(clock),
            epochs: Arc::clone(epochs),
            properties,
            state: Mutex::new(State {
                next: 1 << 40,
                slow: 1,
                ..State::default()
            }),
            done: Arc::new(AtomicU64::new(0)),
        })
    }

    /// The process is dead: its memory goes back, its work ends, and nothing it still does counts.
    pub(crate) fn die(&self) {
        let mut state = self.state();
        state.dead = true;
        self.device.used.fetch_sub(state.used, Ordering::Relaxed);
        state.used = 0;
        state.ranges.clear();
        state.chunks.clear();
        state.arriving.clear();
        state.queue.clear();
    }

    /// Lets `times` calls fail, after `skip` others.
    pub(crate) fn plan(&self, call: DriverCall, skip: u64, times: u64) {
        self.state().faults.push(Planned { call, skip, times });
    }

    pub(crate) fn set_slow(&self, factor: u64) {
        self.state().slow = factor;
    }

    /// No more calls fail.
    pub(crate) fn heal(&self) {
        let mut state = self.state();
        state.faults.clear();
        state.slow = 1;
    }

    /// What the calls since the last time have cost, in nanoseconds.
    pub(crate) fn take_cost_ns(&self) -> u64 {
        std::mem::take(&mut self.state().cost_ns)
    }

    /// How many calls have failed on the script.
    pub(crate) fn faults_met(&self) -> u64 {
        self.state().faults_met
    }

    /// The last epoch all of whose work is done here.
    pub(crate) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// All work up to `epoch` was done before this process began.
    pub(crate) fn assume_done(&self, epoch: u64) {
        self.done.fetch_max(epoch, Ordering::Relaxed);
    }

    /// What was read, or broken, that should not have been.
    pub(crate) fn broken(&self) -> Option<String> {
        self.state().broken.clone()
    }

    /// Launches work; in the order of its arrival, with tells of the device's fences if wanted.
    pub(crate) fn launch(&self, work: Work) {
        self.state().arriving.push_back(work);
        self.catch_up();
    }

    /// Forgets launches that are on their way: who sent them is dead.
    pub(crate) fn forget_arriving(&self) {
        self.state().arriving.clear();
    }

    /// Does all work that is due by now.
    pub(crate) fn catch_up(&self) {
        let now = self.clock.now_ns();
        let mut state = self.state();
        let launched = state.arrive(now);
        state.work(now, &self.done);
        drop(state);
        // Fences are asked under a lock of their own, so ours is not held.
        for epoch in launched {
            let done = Arc::clone(&self.done);
            self.epochs
                .launched(Epoch(epoch), Arc::new(EpochFence { epoch, done }));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state
            .try_lock()
            .expect("one thread, and nobody calls back")
    }

    /// Counts the call, takes its time, and asks the script.
    fn enter(
        &self,
        call: Option<DriverCall>,
        cost_us: u64,
    ) -> Result<MutexGuard<'_, State>, VmmError> {
        let mut state = self.state();
        state.cost_ns += cost_us * 1_000 * state.slow;
        let Some(call) = call.filter(|_| !state.dead) else {
            return Ok(state);
        };
        for index in 0..state.faults.len() {
            let planned = &mut state.faults[index];
            if planned.call != call {
                continue;
            }
            if planned.skip > 0 {
                planned.skip -= 1;
                continue;
            }
            planned.times -= 1;
            if planned.times == 0 {
                state.faults.remove(index);
            }
            state.faults_met += 1;
            return Err(match call {
                DriverCall::Create => VmmError::OutOfMemory { requested: GRANULE },
                _ => VmmError::Driver {
                    call: "scripted",
                    code: 1,
                    name: "SCRIPTED".to_owned(),
                },
            });
        }
        Ok(state)
    }
}

impl State {
    /// Takes in what has arrived; answers the epochs that are whole now.
    fn arrive(&mut self, now: u64) -> Vec<u64> {
        let mut launched = Vec::new();
        while let Some(mut work) = self.arriving.pop_front_if(|work| work.arrives_ns <= now) {
            let begins = self.busy_until_ns.max(work.arrives_ns);
            work.ends_ns = begins + work.takes_ns * self.slow;
            self.busy_until_ns = work.ends_ns;
            if work.last {
                launched.push(work.epoch.0);
            }
            self.queue.push_back(work);
        }
        launched
    }

    fn work(&mut self, until: u64, done: &AtomicU64) {
        while let Some(work) = self.queue.pop_front_if(|work| work.ends_ns <= until) {
            for &(address, write) in &work.at {
                if let Err(found) = self.touch(&work, address, write)
                    && self.broken.is_none()
                {
                    let Work {
                        who, epoch, writes, ..
                    } = &work;
                    let verb = if *writes { "writes" } else { "reads" };
                    self.broken = Some(format!(
                        "request {who} {verb} {address:#x} in {epoch}: {found}"
                    ));
                }
            }
            if work.last {
                done.store(work.epoch.0, Ordering::Relaxed);
            }
        }
    }

    fn touch(&mut self, work: &Work, address: u64, write: u64) -> Result<(), String> {
        let mut tag = [0; TAG_BYTES];
        tag[..8].copy_from_slice(&work.serial.to_le_bytes());
        tag[8..].copy_from_slice(&write.to_le_bytes());
        let bytes = self
            .place(address, TAG_BYTES, work.writes)
            .ok_or_else(|| "nothing is mapped there".to_owned())?;
        if work.writes {
            bytes.copy_from_slice(&tag);
            return Ok(());
        }
        if *bytes == tag {
            return Ok(());
        }
        Err(match bytes.iter().all(|byte| *byte == 0) {
            true => "it is empty".to_owned(),
            false => format!("it holds {bytes:?} instead of {tag:?}"),
        })
    }

    /// The bytes at an address, if all of them are mapped for that.
    fn place(&mut self, address: u64, len: usize, writes: bool) -> Option<&mut [u8]> {
        let (base, range) = self.ranges.range(..=address).next_back()?;
        let offset = address - base;
        let (start, mapping) = range.mapped.range(..=offset).next_back()?;
        let inside = offset - start;
        if inside + len as u64 > mapping.len || (writes && !mapping.writable) {
            return None;
        }
        let first = usize::try_from(inside).expect("chunks are small");
        let chunk = self
            .chunks
            .get_mut(&mapping.chunk)
            .expect("what is mapped is there");
        Some(&mut chunk.bytes[first..first + len])
    }
}

impl Driver for SimDriver {
    type Range = SimRange;
    type Chunk = SimChunk;

    fn properties(&self) -> Properties {
        self.properties
    }

    fn reserve(&self, len: u64) -> Result<SimRange, VmmError> {
        let mut state = self.enter(None, 10)?;
        let base = state.next;
        state.next += len + GRANULE;
        state.ranges.insert(base, Range::default());
        Ok(SimRange { base, len })
    }

    fn release(&self, range: SimRange) -> Result<(), VmmError> {
        self.enter(None, 10)?.ranges.remove(&range.base);
        Ok(())
    }

    fn create(&self, len: u64) -> Result<SimChunk, VmmError> {
        let mut state = self.enter(Some(DriverCall::Create), 10)?;
        if !state.dead {
            if len > self.device.free() {
                if self.device.strangers.load(Ordering::Relaxed) > 0 {
                    state.faults_met += 1;
                }
                return Err(VmmError::OutOfMemory { requested: len });
            }
            self.device.used.fetch_add(len, Ordering::Relaxed);
            state.used += len;
        }
        let id = state.next;
        state.next += 1;
        let size = usize::try_from(len).expect("chunks are small");
        state.chunks.insert(
            id,
            ChunkState {
                bytes: vec![0; size],
                mappings: 0,
            },
        );
        Ok(SimChunk { id, len })
    }

    fn destroy(&self, chunk: SimChunk) -> Result<(), VmmError> {
        let mut state = self.enter(None, 10)?;
        if state.dead {
            return Ok(());
        }
        let known = state.chunks.remove(&chunk.id);
        if known.is_none_or(|known| known.mappings > 0) {
            state.broken = Some("a chunk is destroyed that is mapped, or not there".to_owned());
        }
        state.used -= chunk.len;
        self.device.used.fetch_sub(chunk.len, Ordering::Relaxed);
        Ok(())
    }

    fn map(
        &self,
        range: &SimRange,
        offset: u64,
        chunk: &SimChunk,
        access: Access,
    ) -> Result<(), VmmError> {
        let mut state = self.enter(Some(DriverCall::Map), 45)?;
        if state.dead {
            return Ok(());
        }
        if let Some(known) = state.chunks.get_mut(&chunk.id) {
            known.mappings += 1;
        }
        if let Some(known) = state.ranges.get_mut(&range.base) {
            let mapping = Mapping {
                chunk: chunk.id,
                len: chunk.len,
                writable: access == Access::ReadWrite,
            };
            known.mapped.insert(offset, mapping);
        }
        Ok(())
    }

    fn unmap(&self, range: &SimRange, offset: u64, len: u64) -> Result<(), VmmError> {
        let mut state = self.enter(Some(DriverCall::Unmap), 25)?;
        if state.dead {
            return Ok(());
        }
        let (first, end) = (range.base + offset, range.base + offset + len);
        // What has arrived may touch it; what comes later has to find it mapped.
        let touches = |work: &&Work| work.at.iter().any(|(at, _)| (first..end).contains(at));
        if let Some(Work { who, epoch, .. }) = state.queue.iter().find(touches) {
            let broken =
                format!("{first:#x} is unmapped while request {who} is at work on it in {epoch}");
            state.broken.get_or_insert(broken);
        }
        let known = state.ranges.get_mut(&range.base);
        let Some(Mapping { chunk, .. }) = known.and_then(|known| known.mapped.remove(&offset))
        else {
            state.broken = Some("something is unmapped that was not mapped".to_owned());
            return Ok(());
        };
        if let Some(known) = state.chunks.get_mut(&chunk) {
            known.mappings -= 1;
        }
        Ok(())
    }

    fn memory(&self) -> Result<DeviceMemory, VmmError> {
        drop(self.enter(None, 1)?);
        Ok(DeviceMemory {
            free: self.device.free(),
            total: self.device.total,
        })
    }

    /// Waits for what has arrived: the caller's time passes, and the work is done.
    fn synchronize(&self) -> Result<(), VmmError> {
        let mut state = self.enter(Some(DriverCall::Synchronize), 5)?;
        let now = self.clock.now_ns();
        state.cost_ns += state.busy_until_ns.saturating_sub(now + state.cost_ns);
        let until = state.busy_until_ns;
        state.work(until, &self.done);
        Ok(())
    }
}

impl Bytes for SimDriver {
    fn write(&self, range: &SimRange, offset: u64, bytes: &[u8]) -> Result<(), VmmError> {
        let address = range.base + offset;
        let mut state = self.state();
        let place = state.place(address, bytes.len(), true);
        place
            .ok_or(VmmError::Fault { address })?
            .copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, range: &SimRange, offset: u64, buffer: &mut [u8]) -> Result<(), VmmError> {
        let address = range.base + offset;
        let mut state = self.state();
        let place = state.place(address, buffer.len(), false);
        buffer.copy_from_slice(place.ok_or(VmmError::Fault { address })?);
        Ok(())
    }
}

impl AddressRange for SimRange {
    fn base(&self) -> u64 {
        self.base
    }

    fn byte_len(&self) -> u64 {
        self.len
    }
}

impl Fence for EpochFence {
    fn is_over(&self) -> Result<bool, VmmError> {
        Ok(self.done.load(Ordering::Relaxed) >= self.epoch)
    }
}

impl fmt::Debug for SimDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDriver")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}
