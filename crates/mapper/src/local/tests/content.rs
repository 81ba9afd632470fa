//! The same by content, over real memory: nobody ever reads what another wrote, a fresh page is
//! zero, or of its own pool where chunks are used again, and a failed call loses no byte.

use std::collections::{BTreeMap, BTreeSet};

use kvcached_vmm::{DeviceMemory, HostChunk, HostRange, Properties};
use proptest::prelude::*;

use super::*;

const PAGES: u32 = 6;

/// The host, with calls that fail on demand.
#[derive(Debug)]
pub(super) struct Flaky {
    host: Host,
    /// Calls of a kind that still go well before one fails.
    faults: Mutex<Vec<(Call, u32)>>,
}

impl Flaky {
    pub(super) fn new() -> Arc<Self> {
        let config = HostConfig {
            granularity: G,
            ..HostConfig::new(1 << 30)
        };
        let host = Host::new(config).expect("this machine has memory files");
        Arc::new(Self {
            host,
            faults: Mutex::default(),
        })
    }

    pub(super) fn script(&self, faults: Vec<(Call, u32)>) {
        *self.faults.lock().expect("no panic") = faults;
    }

    fn enter(&self, call: Call) -> Result<(), VmmError> {
        let mut faults = self.faults.lock().expect("no panic");
        let due = faults.iter().position(|&fault| fault == (call, 0));
        if let Some(index) = due {
            faults.swap_remove(index);
        }
        for (_, left) in faults.iter_mut().filter(|fault| fault.0 == call) {
            *left = left.saturating_sub(1);
        }
        due.map_or(Ok(()), |_| Err(broken()))
    }
}

impl Driver for Flaky {
    type Range = HostRange;
    type Chunk = HostChunk;

    fn properties(&self) -> Properties {
        self.host.properties()
    }

    fn reserve(&self, len: u64) -> Result<HostRange, VmmError> {
        self.host.reserve(len)
    }

    fn release(&self, range: HostRange) -> Result<(), VmmError> {
        self.host.release(range)
    }

    fn create(&self, len: u64) -> Result<HostChunk, VmmError> {
        self.enter(Call::Create)?;
        self.host.create(len)
    }

    fn destroy(&self, chunk: HostChunk) -> Result<(), VmmError> {
        self.host.destroy(chunk)
    }

    fn map(
        &self,
        range: &HostRange,
        offset: u64,
        chunk: &HostChunk,
        access: Access,
    ) -> Result<(), VmmError> {
        self.enter(Call::Map)?;
        self.host.map(range, offset, chunk, access)
    }

    fn unmap(&self, range: &HostRange, offset: u64, len: u64) -> Result<(), VmmError> {
        self.enter(Call::Unmap)?;
        self.host.unmap(range, offset, len)
    }

    fn memory(&self) -> Result<DeviceMemory, VmmError> {
        self.host.memory()
    }

    fn synchronize(&self) -> Result<(), VmmError> {
        self.host.synchronize()
    }
}

impl Bytes for Flaky {
    fn write(&self, range: &HostRange, offset: u64, bytes: &[u8]) -> Result<(), VmmError> {
        self.host.write(range, offset, bytes)
    }

    fn read(&self, range: &HostRange, offset: u64, buffer: &mut [u8]) -> Result<(), VmmError> {
        self.host.read(range, offset, buffer)
    }
}

/// First and last word of each piece of every block in `page`.
pub(super) fn words(geometry: &Geometry, page: PageId) -> Vec<Extent> {
    let pieces = geometry
        .blocks_in(page)
        .filter_map(|block| geometry.block_pieces(block));
    let words = pieces.flatten().flat_map(|piece| {
        let last = Extent {
            offset: piece.offset + piece.len - 8,
            len: 8,
            ..piece
        };
        [Extent { len: 8, ..piece }, last]
    });
    words.collect()
}

pub(super) fn read_word<D: Bytes>(mapper: &LocalMapper<D>, at: Extent) -> Result<u64, VmmError> {
    let mut word = [0; 8];
    mapper
        .read(at, &mut word)
        .map(|()| u64::from_le_bytes(word))
}

/// A pool, and the stamp that each of its mapped runs was written full of.
struct Stamped<D: Driver> {
    mapper: LocalMapper<D>,
    stamps: BTreeMap<PageRun, u64>,
    /// What a page that is mapped anew may hold.
    fresh: BTreeSet<u64>,
    /// Are chunks used again, with what was written to them?
    recycles: bool,
}

impl<D: Bytes> Stamped<D> {
    fn new(mapper: LocalMapper<D>) -> Self {
        Self {
            mapper,
            stamps: BTreeMap::new(),
            fresh: BTreeSet::from([0]),
            recycles: false,
        }
    }

    fn recycling(pool: Self, recycler: &Arc<Recycler<D>>) -> Self {
        Self {
            mapper: pool.mapper.with_recycler(recycler),
            recycles: true,
            ..pool
        }
    }

    fn words(&self, run: PageRun) -> Vec<Extent> {
        run.pages()
            .flat_map(|page| words(self.mapper.geometry(), page))
            .collect()
    }

    /// Maps `run` if it is free, finds nothing of anybody else in it and fills it with `stamp`.
    fn map(&mut self, run: PageRun, stamp: u64) {
        if self.mapper.map(&[run]).is_ok() {
            if self.recycles {
                self.fresh.insert(stamp);
            }
            for word in self.words(run) {
                let found = read_word(&self.mapper, word).expect("it is mapped");
                assert!(self.fresh.contains(&found), "{found} in a fresh page");
                self.mapper
                    .write(word, &stamp.to_le_bytes())
                    .expect("it is mapped");
            }
            self.stamps.insert(run, stamp);
        }
    }

    fn unmap(&mut self, nth: usize) {
        let Some(&run) = self.stamps.keys().nth(nth) else {
            return;
        };
        match self.mapper.unmap(&[run]) {
            Err(error) if error.uncertain.is_empty() => {}
            _ => drop(self.stamps.remove(&run)),
        }
    }

    /// Each mapped run holds its own stamp, each cold page what was chosen.
    #[track_caller]
    fn verify(&self) {
        for (&run, &stamp) in &self.stamps {
            for word in self.words(run) {
                assert_eq!(read_word(&self.mapper, word), Ok(stamp), "{run}");
            }
        }
        let taken: Vec<PageRun> = self
            .stamps
            .keys()
            .copied()
            .chain(self.mapper.in_doubt())
            .collect();
        for page in (0..PAGES).filter(|&page| !taken.iter().any(|r| r.contains(PageId(page)))) {
            for word in words(self.mapper.geometry(), PageId(page)) {
                let read = read_word(&self.mapper, word);
                match self.mapper.cold {
                    Cold::Zero => assert_eq!(read, Ok(0), "cold page {page}"),
                    Cold::Unbacked => {
                        assert!(matches!(read, Err(VmmError::Fault { .. })), "{read:?}");
                    }
                }
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Op {
    Map(u32, u32),
    Unmap(usize),
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn nobody_reads_what_another_wrote_and_no_failure_loses_a_byte(
        shapes in proptest::collection::vec(
            (proptest::sample::select(all_geometries(PAGES).collect::<Vec<_>>()),
             proptest::sample::select(BOTH.to_vec())), 2),
        recycles in any::<bool>(),
        ops in proptest::collection::vec((
            0usize..2,
            prop_oneof![
                3 => (0..PAGES, 1u32..4).prop_map(|(first, count)| Op::Map(first, count)),
                2 => (0usize..4).prop_map(Op::Unmap),
            ],
            proptest::collection::vec(
                (proptest::sample::select(vec![Call::Create, Call::Map, Call::Unmap]), 0u32..8),
                0..3),
        ), 1..25),
    ) {
        let device = Flaky::new();
        let recycler = recycler(&device);
        let pool = |(geometry, cold)| {
            let pool = Stamped::new(local(&device, &geometry, cold));
            if recycles { Stamped::recycling(pool, &recycler) } else { pool }
        };
        let mut pools: Vec<_> = shapes.into_iter().map(pool).collect();
        for (stamp, (which, op, faults)) in (1..).zip(ops) {
            device.script(faults);
            match op {
                Op::Map(first, count) => {
                    pools[which].map(run(first, count.min(PAGES - first)), stamp);
                }
                Op::Unmap(nth) => pools[which].unmap(nth),
            }
            device.script(Vec::new());
            pools.iter().for_each(Stamped::verify);
        }
        drop(pools);
        let memory = device.memory().expect("the host knows");
        prop_assert_eq!(memory.free, memory.total);
    }
}

#[test]
fn memory_that_one_pool_gave_back_is_zero_for_the_next() {
    let geometry = simple(PAGES);
    for recycles in [false, true] {
        // Room for two pages in all, so the second pool gets the very memory of the first.
        let device = host(2 * geometry.bundle_bytes());
        let recycler = recycler(&device);
        let [mut one, mut other] = [(); 2].map(|()| {
            let pool = Stamped::new(local(&device, &geometry, Cold::Unbacked));
            match recycles {
                true => Stamped::recycling(pool, &recycler),
                false => pool,
            }
        });
        for stamp in 1..10 {
            one.map(run(0, 2), stamp);
            one.verify();
            other.map(run(3, 2), u64::MAX);
            assert!(other.stamps.is_empty(), "the device is full");
            one.unmap(0);
            other.map(run(3, 2), stamp << 32);
            other.verify();
            other.unmap(0);
        }
    }
}

#[test]
fn a_failed_unmap_keeps_every_byte() {
    for cold in BOTH {
        for call in [Call::Unmap, Call::Map] {
            for nth in 0..4 {
                let device = Flaky::new();
                let geometry = geometry(Layout::PerLayer, KvBuffers::Two, PAGES);
                let mut pool = Stamped::new(local(&device, &geometry, cold));
                pool.map(run(1, 3), 42);
                device.script(vec![(call, nth)]);
                let outcome = pool.mapper.unmap(&[run(1, 3)]);
                // Without zeros to lay over cold pages, taking away maps nothing.
                if outcome.is_ok() {
                    assert_eq!((cold, call), (Cold::Unbacked, Call::Map));
                    continue;
                }
                assert_eq!(outcome.unwrap_err().uncertain, []);
                pool.verify();
                assert!(pool.stamps.contains_key(&run(1, 3)));
            }
        }
    }
}

#[test]
fn an_address_reads_as_before_after_a_failed_map() {
    let geometry = simple(PAGES);
    let page = Extent {
        len: 8,
        ..geometry.extents(run(2, 1)).next().expect("one extent")
    };
    let device = host(geometry.bundle_bytes() + G);
    let mapper = local(&device, &geometry, Cold::Zero);
    mapper.map(&[run(0, 1)]).unwrap();
    assert!(mapper.map(&[run(2, 1)]).unwrap_err().is_full());
    assert_eq!(read_word(&mapper, page), Ok(0));

    let device = Flaky::new();
    let mapper = local(&device, &geometry, Cold::Zero);
    device.script(vec![(Call::Map, 0)]);
    mapper.map(&[run(2, 1)]).unwrap_err();
    assert_eq!(read_word(&mapper, page), Ok(0));
}

#[test]
fn a_stray_write_to_a_cold_page_faults_and_the_zeros_stay_zero() {
    let geometry = simple(PAGES);
    let device = host(1 << 30);
    let extent = |page| geometry.extents(run(page, 1)).next().expect("one extent");
    for cold in BOTH {
        let mapper = local(&device, &geometry, cold);
        let stray = mapper.write(extent(1), &[7; 64]);
        assert!(matches!(stray, Err(VmmError::Fault { .. })), "{stray:?}");
        if cold == Cold::Zero {
            assert_eq!(
                read_word(
                    &mapper,
                    Extent {
                        len: 8,
                        ..extent(4)
                    }
                ),
                Ok(0)
            );
        }
        mapper.map(&[run(1, 1)]).unwrap();
        mapper.write(extent(1), &[7; 64]).unwrap();
    }
}

#[test]
fn bytes_outside_the_pool_are_refused() {
    let geometry = geometry(Layout::Unified, KvBuffers::Two, PAGES);
    let mapper = local(&host(1 << 30), &geometry, Cold::Zero);
    let end = geometry.tensor_bytes();
    for outside in [
        Extent {
            tensor: 2,
            offset: 0,
            len: 8,
        },
        Extent {
            tensor: 0,
            offset: end,
            len: 8,
        },
        Extent {
            tensor: 0,
            offset: end - 7,
            len: 8,
        },
        Extent {
            tensor: 0,
            offset: u64::MAX,
            len: 8,
        },
        // Eight bytes do not fit into seven.
        Extent {
            tensor: 0,
            offset: 0,
            len: 7,
        },
    ] {
        let read = read_word(&mapper, outside);
        assert!(matches!(read, Err(VmmError::OutOfRange { .. })), "{read:?}");
    }
}
