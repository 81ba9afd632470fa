//! A device without memory that checks every duty of its caller and fails on demand.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::span::{check_len, check_place};
use crate::{Access, AddressRange, DeviceMemory, Driver, Properties, VmmError};

/// What a [`Mock`] pretends to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MockConfig {
    /// Memory of the pretended device.
    pub total_bytes: u64,
    /// Addresses of the pretended device.
    pub address_bytes: u64,
    /// See [`Properties::granularity`].
    pub granularity: u64,
    /// See [`Properties::alias`].
    pub alias: bool,
    /// See [`Properties::read_only`].
    pub read_only: bool,
}

impl MockConfig {
    /// `total_bytes` in granules of 2 MiB, with plenty of addresses and every capability.
    #[must_use]
    pub const fn new(total_bytes: u64) -> Self {
        Self {
            total_bytes,
            address_bytes: 1 << 46,
            granularity: 2 << 20,
            alias: true,
            read_only: true,
        }
    }
}

/// A primitive of [`Driver`] that can be counted and made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// [`Driver::reserve`].
    Reserve,
    /// [`Driver::release`].
    Release,
    /// [`Driver::create`].
    Create,
    /// [`Driver::destroy`].
    Destroy,
    /// [`Driver::map`].
    Map,
    /// [`Driver::unmap`].
    Unmap,
    /// [`Driver::memory`].
    Memory,
    /// [`Driver::synchronize`].
    Synchronize,
}

impl Call {
    /// Every primitive, in the order of the trait.
    pub const ALL: [Self; 8] = [
        Self::Reserve,
        Self::Release,
        Self::Create,
        Self::Destroy,
        Self::Map,
        Self::Unmap,
        Self::Memory,
        Self::Synchronize,
    ];
}

/// A duty that a caller did not meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The primitive that was called.
    pub call: Call,
    /// What it answered.
    pub error: VmmError,
}

/// A device without memory.
///
/// Every call is checked against the duties listed at [`Driver`]; one that breaks a duty is
/// refused, changes nothing, and is kept as a [`Violation`]. A test asserts at its end that there
/// is none, and that nothing is left:
///
/// ```
/// use std::sync::Arc;
/// use kvcached_vmm::{Call, Chunk, Mock, MockConfig, VmmError};
///
/// let mock = Arc::new(Mock::new(MockConfig::new(8 << 20)));
/// mock.fail(Call::Create, 1, VmmError::OutOfMemory { requested: 2 << 20 });
///
/// let first = Chunk::create(&mock, 2 << 20);
/// assert!(first.is_ok());
/// assert!(Chunk::create(&mock, 2 << 20).is_err());
///
/// drop(first);
/// assert_eq!(mock.live_chunks(), 0);
/// assert!(mock.violations().is_empty());
/// ```
#[derive(Debug)]
pub struct Mock {
    id: u64,
    config: MockConfig,
    properties: Properties,
    state: Mutex<State>,
}

/// Addresses that a [`Mock`] reserved.
#[derive(Debug)]
pub struct MockRange {
    mock: u64,
    base: u64,
    len: u64,
}

/// Memory that a [`Mock`] handed out.
#[derive(Debug)]
pub struct MockChunk {
    mock: u64,
    id: u64,
    len: u64,
}

#[derive(Debug, Default)]
struct State {
    /// By base address.
    ranges: HashMap<u64, RangeState>,
    /// By id.
    chunks: HashMap<u64, ChunkState>,
    next_chunk: u64,
    next_base: u64,
    used_bytes: u64,
    address_bytes: u64,
    lost_chunks: usize,
    lost_ranges: usize,
    calls: HashMap<Call, u64>,
    script: Script,
    violations: Vec<Violation>,
}

#[derive(Debug, Default)]
struct RangeState {
    /// By offset.
    mapped: BTreeMap<u64, MappingState>,
}

#[derive(Debug)]
struct MappingState {
    chunk: u64,
    len: u64,
    access: Access,
}

#[derive(Debug, Default)]
struct ChunkState {
    mappings: u32,
}

type Fault = Box<dyn FnMut(Call) -> Option<VmmError> + Send>;

/// Failures to come.
#[derive(Default)]
struct Script {
    counted: Vec<(Call, u32, VmmError)>,
    decided: Vec<Fault>,
}

impl Mock {
    /// A device as `config` describes it.
    ///
    /// # Panics
    /// If the granularity is not a power of two.
    #[must_use]
    pub fn new(config: MockConfig) -> Self {
        // Tells the handles of one mock from those of another; no other use is made of it.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut properties = Properties::new(config.granularity);
        properties.alias = config.alias;
        properties.read_only = config.read_only;
        // Not at zero, where a forgotten base would go unnoticed.
        let next_base = (1_u64 << 40).next_multiple_of(config.granularity);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            config,
            properties,
            state: Mutex::new(State {
                next_base,
                ..State::default()
            }),
        }
    }

    /// Makes one later `call` fail with `error`: the next for `nth` 0, the one after for 1, and
    /// so on. Calls that break a duty do not count.
    ///
    /// What is given back by a call that fails on the script is lost, as [`Driver`] says.
    pub fn fail(&self, call: Call, nth: u32, error: VmmError) {
        self.state().script.counted.push((call, nth, error));
    }

    /// Asks `fault` at every later call whether it fails, and how.
    ///
    /// It must not use the mock, which is locked at that moment.
    pub fn fail_with(&self, fault: impl FnMut(Call) -> Option<VmmError> + Send + 'static) {
        self.state().script.decided.push(Box::new(fault));
    }

    /// Forgets all failures to come.
    pub fn heal(&self) {
        self.state().script = Script::default();
    }

    /// How often `call` was made, failures and violations included.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.state().calls.get(&call).copied().unwrap_or(0)
    }

    /// Every duty that was not met so far, oldest first.
    #[must_use]
    pub fn violations(&self) -> Vec<Violation> {
        self.state().violations.clone()
    }

    /// Chunks not given back, those lost to a failed destroy included.
    #[must_use]
    pub fn live_chunks(&self) -> usize {
        self.state().chunks.len()
    }

    /// Ranges not given back, those lost to a failed release included.
    #[must_use]
    pub fn live_ranges(&self) -> usize {
        self.state().ranges.len()
    }

    /// Mappings over all ranges.
    #[must_use]
    pub fn live_mappings(&self) -> usize {
        self.state()
            .ranges
            .values()
            .map(|range| range.mapped.len())
            .sum()
    }

    /// Chunks whose destroy failed on the script.
    #[must_use]
    pub fn lost_chunks(&self) -> usize {
        self.state().lost_chunks
    }

    /// Ranges whose release failed on the script.
    #[must_use]
    pub fn lost_ranges(&self) -> usize {
        self.state().lost_ranges
    }

    /// Memory in live chunks.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.state().used_bytes
    }

    /// Offset, length and access of everything mapped in the range that begins at `base`, lowest
    /// first.
    #[must_use]
    pub fn mapped(&self, base: u64) -> Vec<(u64, u64, Access)> {
        let state = self.state();
        let Some(range) = state.ranges.get(&base) else {
            return Vec::new();
        };
        range
            .mapped
            .iter()
            .map(|(&offset, mapping)| (offset, mapping.len, mapping.access))
            .collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A fault closure that panics has changed nothing yet.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the call, checks its duties, then asks the script.
    fn enter(
        &self,
        call: Call,
        duties: impl FnOnce(&State) -> Result<(), VmmError>,
    ) -> Result<MutexGuard<'_, State>, VmmError> {
        let mut state = self.state();
        *state.calls.entry(call).or_default() += 1;
        if let Err(error) = duties(&state) {
            state.violations.push(Violation {
                call,
                error: error.clone(),
            });
            return Err(error);
        }
        if let Some(error) = state.script.next(call) {
            match call {
                Call::Release => state.lost_ranges += 1,
                Call::Destroy => state.lost_chunks += 1,
                _ => {}
            }
            return Err(error);
        }
        Ok(state)
    }
}

impl Driver for Mock {
    type Range = MockRange;
    type Chunk = MockChunk;

    fn properties(&self) -> Properties {
        self.properties
    }

    fn reserve(&self, len: u64) -> Result<MockRange, VmmError> {
        let granularity = self.properties.granularity;
        let mut state = self.enter(Call::Reserve, |_| check_len(len, granularity))?;
        if len
            > self
                .config
                .address_bytes
                .saturating_sub(state.address_bytes)
        {
            return Err(VmmError::OutOfAddresses { requested: len });
        }
        let base = state.next_base;
        // One granule between ranges, so that an access beyond the end hits nobody else.
        let Some(next_base) = base
            .checked_add(len)
            .and_then(|end| end.checked_add(granularity))
        else {
            return Err(VmmError::OutOfAddresses { requested: len });
        };
        state.next_base = next_base;
        state.address_bytes += len;
        state.ranges.insert(base, RangeState::default());
        Ok(MockRange {
            mock: self.id,
            base,
            len,
        })
    }

    fn release(&self, range: MockRange) -> Result<(), VmmError> {
        let mut state = self.enter(Call::Release, |state| {
            let known = state.range(self.id, &range, "release")?;
            contract(
                "release",
                known.mapped.is_empty(),
                "nothing is mapped in a released range",
            )
        })?;
        state.ranges.remove(&range.base);
        state.address_bytes -= range.len;
        Ok(())
    }

    fn create(&self, len: u64) -> Result<MockChunk, VmmError> {
        let mut state = self.enter(Call::Create, |_| {
            check_len(len, self.properties.granularity)
        })?;
        if len > self.config.total_bytes.saturating_sub(state.used_bytes) {
            return Err(VmmError::OutOfMemory { requested: len });
        }
        let id = state.next_chunk;
        state.next_chunk += 1;
        state.used_bytes += len;
        state.chunks.insert(id, ChunkState::default());
        Ok(MockChunk {
            mock: self.id,
            id,
            len,
        })
    }

    fn destroy(&self, chunk: MockChunk) -> Result<(), VmmError> {
        let mut state = self.enter(Call::Destroy, |state| {
            let known = state.chunk(self.id, &chunk, "destroy")?;
            contract(
                "destroy",
                known.mappings == 0,
                "a destroyed chunk is mapped nowhere",
            )
        })?;
        state.chunks.remove(&chunk.id);
        state.used_bytes -= chunk.len;
        Ok(())
    }

    fn map(
        &self,
        range: &MockRange,
        offset: u64,
        chunk: &MockChunk,
        access: Access,
    ) -> Result<(), VmmError> {
        let mut state = self.enter(Call::Map, |state| {
            let known_range = state.range(self.id, range, "map")?;
            let known_chunk = state.chunk(self.id, chunk, "map")?;
            check_place(offset, chunk.len, range.len, self.properties.granularity)?;
            if let Some(offset) = known_range.mapped_within(offset, chunk.len) {
                return Err(VmmError::AlreadyMapped { offset });
            }
            let alone = self.properties.alias || known_chunk.mappings == 0;
            contract(
                "map",
                alone,
                "without aliasing a chunk is mapped in one place at most",
            )
        })?;
        let mapping = MappingState {
            chunk: chunk.id,
            len: chunk.len,
            access,
        };
        let known_range = state
            .ranges
            .get_mut(&range.base)
            .expect("the range was checked");
        known_range.mapped.insert(offset, mapping);
        state
            .chunks
            .get_mut(&chunk.id)
            .expect("the chunk was checked")
            .mappings += 1;
        Ok(())
    }

    fn unmap(&self, range: &MockRange, offset: u64, len: u64) -> Result<(), VmmError> {
        let mut state = self.enter(Call::Unmap, |state| {
            let known = state.range(self.id, range, "unmap")?;
            check_place(offset, len, range.len, self.properties.granularity)?;
            let mapping = known
                .mapped
                .get(&offset)
                .ok_or(VmmError::NotMapped { offset })?;
            contract("unmap", mapping.len == len, "a mapping is unmapped whole")
        })?;
        let known = state
            .ranges
            .get_mut(&range.base)
            .expect("the range was checked");
        let mapping = known
            .mapped
            .remove(&offset)
            .expect("the mapping was checked");
        let chunk = state
            .chunks
            .get_mut(&mapping.chunk)
            .expect("a mapped chunk is alive");
        chunk.mappings -= 1;
        Ok(())
    }

    fn memory(&self) -> Result<DeviceMemory, VmmError> {
        let state = self.enter(Call::Memory, |_| Ok(()))?;
        let total = self.config.total_bytes;
        Ok(DeviceMemory {
            free: total.saturating_sub(state.used_bytes),
            total,
        })
    }

    fn synchronize(&self) -> Result<(), VmmError> {
        self.enter(Call::Synchronize, |_| Ok(())).map(drop)
    }
}

impl AddressRange for MockRange {
    fn base(&self) -> u64 {
        self.base
    }

    fn byte_len(&self) -> u64 {
        self.len
    }
}

impl State {
    fn range(
        &self,
        mock: u64,
        range: &MockRange,
        call: &'static str,
    ) -> Result<&RangeState, VmmError> {
        let known = self.ranges.get(&range.base).filter(|_| range.mock == mock);
        known.ok_or(VmmError::Contract {
            call,
            broken: "a range goes back to the driver that made it",
        })
    }

    fn chunk(
        &self,
        mock: u64,
        chunk: &MockChunk,
        call: &'static str,
    ) -> Result<&ChunkState, VmmError> {
        let known = self.chunks.get(&chunk.id).filter(|_| chunk.mock == mock);
        known.ok_or(VmmError::Contract {
            call,
            broken: "a chunk goes back to the driver that made it",
        })
    }
}

impl RangeState {
    fn mapped_within(&self, offset: u64, len: u64) -> Option<u64> {
        let (&start, mapping) = self.mapped.range(..offset + len).next_back()?;
        (start + mapping.len > offset).then_some(start)
    }
}

impl Script {
    /// The error that `call`, which counts as made, fails with.
    fn next(&mut self, call: Call) -> Option<VmmError> {
        let mut due = None;
        self.counted.retain_mut(|(scripted, left, error)| {
            if *scripted != call {
                return true;
            }
            if *left == 0 {
                due.get_or_insert_with(|| error.clone());
                return false;
            }
            *left -= 1;
            true
        });
        for fault in &mut self.decided {
            if let Some(error) = fault(call) {
                due.get_or_insert(error);
            }
        }
        due
    }
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Script")
            .field("counted", &self.counted)
            .field("decided", &self.decided.len())
            .finish()
    }
}

fn contract(call: &'static str, met: bool, broken: &'static str) -> Result<(), VmmError> {
    if met {
        Ok(())
    } else {
        Err(VmmError::Contract { call, broken })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 4096;

    fn mock() -> Mock {
        Mock::new(MockConfig {
            granularity: G,
            ..MockConfig::new(16 * G)
        })
    }

    fn last(mock: &Mock) -> (Call, VmmError) {
        let violation = mock.violations().pop().expect("a duty was broken");
        (violation.call, violation.error)
    }

    #[test]
    fn a_double_map_is_refused_and_the_first_mapping_stays() {
        let mock = mock();
        let range = mock.reserve(4 * G).unwrap();
        let (wide, narrow) = (mock.create(2 * G).unwrap(), mock.create(G).unwrap());
        mock.map(&range, G, &wide, Access::ReadWrite).unwrap();

        let answer = mock.map(&range, 2 * G, &narrow, Access::ReadWrite);

        assert_eq!(answer, Err(VmmError::AlreadyMapped { offset: G }));
        assert_eq!(
            last(&mock),
            (Call::Map, VmmError::AlreadyMapped { offset: G })
        );
        assert_eq!(mock.mapped(range.base()), [(G, 2 * G, Access::ReadWrite)]);
    }

    #[test]
    fn an_unmap_in_part_is_refused() {
        let mock = mock();
        let range = mock.reserve(4 * G).unwrap();
        let chunk = mock.create(2 * G).unwrap();
        mock.map(&range, 0, &chunk, Access::ReadWrite).unwrap();

        assert!(mock.unmap(&range, 0, G).is_err());
        assert!(mock.unmap(&range, G, G).is_err());

        assert_eq!(mock.violations().len(), 2);
        assert_eq!(mock.live_mappings(), 1);
    }

    #[test]
    fn a_map_outside_the_range_is_refused() {
        let mock = mock();
        let range = mock.reserve(2 * G).unwrap();
        let chunk = mock.create(2 * G).unwrap();

        let answer = mock.map(&range, G, &chunk, Access::ReadWrite);

        assert!(matches!(answer, Err(VmmError::OutOfRange { .. })));
        assert_eq!(mock.violations().len(), 1);
    }

    #[test]
    fn release_and_destroy_while_mapped_are_refused_and_lose_nothing_in_the_books() {
        let mock = mock();
        let range = mock.reserve(2 * G).unwrap();
        let chunk = mock.create(G).unwrap();
        mock.map(&range, 0, &chunk, Access::ReadWrite).unwrap();

        assert!(matches!(
            mock.destroy(chunk),
            Err(VmmError::Contract {
                call: "destroy",
                ..
            })
        ));
        assert!(matches!(
            mock.release(range),
            Err(VmmError::Contract {
                call: "release",
                ..
            })
        ));

        assert_eq!(
            (mock.live_chunks(), mock.live_ranges(), mock.used_bytes()),
            (1, 1, G)
        );
        assert_eq!((mock.lost_chunks(), mock.lost_ranges()), (0, 0));
    }

    #[test]
    fn handles_of_another_mock_are_refused() {
        let (mock, other) = (mock(), mock());
        let (range, chunk) = (other.reserve(G).unwrap(), other.create(G).unwrap());
        let own = mock.reserve(G).unwrap();

        assert!(mock.map(&range, 0, &chunk, Access::Read).is_err());
        assert!(mock.map(&own, 0, &chunk, Access::Read).is_err());
        assert!(mock.release(range).is_err());
        assert!(mock.destroy(chunk).is_err());

        assert_eq!(mock.violations().len(), 4);
        assert!(other.violations().is_empty());
    }

    #[test]
    fn misaligned_lengths_and_offsets_are_refused() {
        let mock = mock();
        let range = mock.reserve(2 * G).unwrap();
        let chunk = mock.create(G).unwrap();

        for answer in [
            mock.reserve(G + 1).map(drop),
            mock.create(0).map(drop),
            mock.map(&range, 1, &chunk, Access::Read),
            mock.unmap(&range, 0, G / 2),
        ] {
            assert!(
                matches!(answer, Err(VmmError::Misaligned { .. })),
                "{answer:?}"
            );
        }
        assert_eq!(mock.violations().len(), 4);
    }

    #[test]
    fn a_second_mapping_is_a_violation_only_without_aliasing() {
        for alias in [true, false] {
            let config = MockConfig {
                alias,
                granularity: G,
                ..MockConfig::new(16 * G)
            };
            let mock = Mock::new(config);
            let range = mock.reserve(2 * G).unwrap();
            let chunk = mock.create(G).unwrap();
            mock.map(&range, 0, &chunk, Access::Read).unwrap();
            assert_eq!(mock.map(&range, G, &chunk, Access::Read).is_ok(), alias);
            assert_eq!(mock.violations().is_empty(), alias);
        }
    }

    #[test]
    fn the_script_fails_the_nth_call_of_its_kind_and_no_other() {
        let mock = mock();
        let broken = VmmError::Driver {
            call: "create",
            code: 7,
            name: "scripted".into(),
        };
        mock.fail(Call::Create, 2, broken.clone());

        let answers: Vec<bool> = (0..4).map(|_| mock.create(G).is_ok()).collect();

        assert_eq!(answers, [true, true, false, true]);
        assert!(mock.reserve(G).is_ok());
        assert_eq!((mock.calls(Call::Create), mock.live_chunks()), (4, 3));

        mock.fail_with(move |call| (call == Call::Reserve).then(|| broken.clone()));
        assert!(mock.reserve(G).is_err());
        assert!(mock.create(G).is_ok());
        mock.heal();
        assert!(mock.reserve(G).is_ok());
        assert!(mock.violations().is_empty());
    }

    #[test]
    fn memory_and_addresses_run_out_as_values() {
        let config = MockConfig {
            granularity: G,
            address_bytes: 4 * G,
            ..MockConfig::new(2 * G)
        };
        let mock = Mock::new(config);
        let chunk = mock.create(2 * G).unwrap();

        assert!(matches!(
            mock.create(G),
            Err(VmmError::OutOfMemory { requested: G })
        ));
        assert!(matches!(
            mock.reserve(8 * G),
            Err(VmmError::OutOfAddresses { .. })
        ));
        assert_eq!(
            mock.memory(),
            Ok(DeviceMemory {
                free: 0,
                total: 2 * G
            })
        );

        mock.destroy(chunk).unwrap();
        assert_eq!(
            mock.memory(),
            Ok(DeviceMemory {
                free: 2 * G,
                total: 2 * G
            })
        );
        assert!(mock.violations().is_empty());
    }
}
