//! Random scripts of map, unmap and faults against a model: what a reservation says, what the
//! device has, and what was asked for are always the same.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvcached_vmm::{
    Access, AddressRange, Call, Chunk, Driver, Mock, MockConfig, Reservation, VmmError,
};
use proptest::prelude::*;

const G: u64 = 4096;
const GRANULES: u64 = 12;

#[derive(Debug, Clone)]
enum Op {
    Create {
        granules: u64,
    },
    Forget {
        chunk: usize,
    },
    /// The granule may lie outside the range.
    Map {
        range: usize,
        granule: u64,
        chunk: usize,
        access: Access,
    },
    Unmap {
        range: usize,
        granule: u64,
    },
    /// The next call of this kind fails.
    Fault {
        call: Call,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let access = prop_oneof![Just(Access::Read), Just(Access::ReadWrite)];
    prop_oneof![
        3 => (1..4_u64).prop_map(|granules| Op::Create { granules }),
        1 => any::<usize>().prop_map(|chunk| Op::Forget { chunk }),
        6 => (0..2_usize, 0..GRANULES + 2, any::<usize>(), access).prop_map(
            |(range, granule, chunk, access)| Op::Map { range, granule, chunk, access }
        ),
        4 => (0..2_usize, 0..GRANULES).prop_map(|(range, granule)| Op::Unmap { range, granule }),
        1 => prop_oneof![
            Just(Call::Create), Just(Call::Destroy), Just(Call::Map), Just(Call::Unmap),
        ].prop_map(|call| Op::Fault { call }),
    ]
}

fn broken() -> VmmError {
    VmmError::Driver {
        call: "scripted",
        code: 1,
        name: "SCRIPTED".into(),
    }
}

/// Two reservations over one device, the chunks a caller still holds, and what must be mapped.
struct World {
    mock: Arc<Mock>,
    ranges: Vec<Reservation<Mock>>,
    held: Vec<Arc<Chunk<Mock>>>,
    model: [BTreeMap<u64, (u64, Access)>; 2],
}

impl World {
    fn new(alias: bool) -> Self {
        let config = MockConfig {
            granularity: G,
            alias,
            ..MockConfig::new(20 * G)
        };
        let mock = Arc::new(Mock::new(config));
        let ranges = (0..2)
            .map(|_| Reservation::new(Arc::clone(&mock), GRANULES * G).expect("addresses suffice"))
            .collect();
        Self {
            mock,
            ranges,
            held: Vec::new(),
            model: Default::default(),
        }
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Create { granules } => {
                if let Ok(chunk) = Chunk::create(&self.mock, granules * G) {
                    self.held.push(Arc::new(chunk));
                }
            }
            Op::Forget { chunk } if !self.held.is_empty() => {
                let chunk = chunk % self.held.len();
                self.held.swap_remove(chunk);
            }
            Op::Map {
                range,
                granule,
                chunk,
                access,
            } if !self.held.is_empty() => {
                let chunk = Arc::clone(&self.held[chunk % self.held.len()]);
                let len = chunk.byte_len();
                if self.ranges[range].map(granule * G, chunk, access).is_ok() {
                    self.model[range].insert(granule * G, (len, access));
                }
            }
            Op::Unmap { range, granule } => {
                if let Ok(chunk) = self.ranges[range].unmap(granule * G) {
                    let (len, _) = self.model[range]
                        .remove(&(granule * G))
                        .expect("was mapped");
                    assert_eq!(chunk.byte_len(), len);
                }
            }
            Op::Fault { call } => self.mock.fail(call, 0, broken()),
            Op::Forget { .. } | Op::Map { .. } => {}
        }
    }

    fn check(&self) {
        assert_eq!(self.mock.violations(), []);
        for (range, model) in self.ranges.iter().zip(&self.model) {
            let said: Vec<_> = range.mappings().collect();
            let expected: Vec<_> = model.iter().map(|(&at, &(len, _))| (at, len)).collect();
            assert_eq!(said, expected);
            let expected: Vec<_> = model
                .iter()
                .map(|(&at, &(len, access))| (at, len, access))
                .collect();
            assert_eq!(self.mock.mapped(range.base()), expected);
            let mut end = 0;
            for (offset, len) in range.mappings() {
                assert!(offset >= end, "mappings overlap");
                end = offset + len;
            }
            assert!(end <= range.byte_len());
        }
    }
}

proptest! {
    #[test]
    fn reservation_device_and_model_agree_after_every_step_and_nothing_is_left(
        alias: bool,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let mut world = World::new(alias);
        for op in ops {
            world.step(op);
            world.check();
        }
        let World { mock, ranges, held, .. } = world;
        mock.heal();
        drop(ranges);
        drop(held);
        prop_assert_eq!(mock.live_ranges(), 0);
        prop_assert_eq!(mock.live_mappings(), 0);
        prop_assert_eq!(mock.live_chunks(), mock.lost_chunks());
        prop_assert_eq!(mock.violations(), []);
    }

    #[test]
    fn no_fault_while_dropping_breaks_a_duty_or_loses_more_than_it_hit(
        ops in prop::collection::vec(op(), 1..60),
        faults in prop::collection::vec((prop::sample::select(&Call::ALL[..]), 0..6_u32), 0..6),
    ) {
        let mut world = World::new(true);
        for op in ops {
            world.step(op);
        }
        let World { mock, ranges, held, .. } = world;
        mock.heal();
        let chunks_lost_before = mock.lost_chunks();
        for (call, nth) in faults {
            mock.fail(call, nth, broken());
        }
        drop(held);
        drop(ranges);

        prop_assert_eq!(mock.violations(), []);
        // Ranges stay only if one of their mappings stuck, or their own release failed.
        prop_assert!(mock.live_ranges() <= mock.live_mappings() + mock.lost_ranges());
        // Chunks stay only if they are still mapped, or their own destroy failed.
        prop_assert!(mock.live_chunks() <= mock.live_mappings() + mock.lost_chunks());
        prop_assert!(mock.lost_chunks() >= chunks_lost_before);
    }
}

/// Addresses of two reservations differ, whatever else happens.
#[test]
fn reservations_never_share_an_address() {
    let mock = Arc::new(Mock::new(MockConfig {
        granularity: G,
        ..MockConfig::new(G)
    }));
    let mut ends: Vec<(u64, u64)> = Vec::new();
    for granules in [1, 7, 2, 30] {
        let range = mock.reserve(granules * G).expect("addresses suffice");
        ends.push((range.base(), range.base() + range.byte_len()));
    }
    ends.sort_unstable();
    assert!(ends.windows(2).all(|pair| pair[0].1 <= pair[1].0));
}

/// Eight threads on their own places of one range: each ends with what it left, nobody's is lost.
#[test]
fn threads_on_disjoint_places_end_with_exactly_what_each_left() {
    const THREADS: u64 = 8;
    const PLACES: u64 = 16;
    const STEPS: u64 = 10_000;
    let config = MockConfig {
        granularity: G,
        ..MockConfig::new(THREADS * PLACES * G)
    };
    let mock = Mock::new(config);
    let range = mock
        .reserve(THREADS * PLACES * G)
        .expect("addresses suffice");
    let left: BTreeMap<u64, _> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (mock, range) = (&mock, &range);
                scope.spawn(move || {
                    let mut left = BTreeMap::new();
                    for step in 0..STEPS {
                        // A walk over the own places that is different in every thread.
                        let place = (step * (2 * thread + 1) + step / 7) % PLACES;
                        let offset = (thread * PLACES + place) * G;
                        if let Some(chunk) = left.remove(&offset) {
                            mock.unmap(range, offset, G).expect("mapped by this thread");
                            mock.destroy(chunk).expect("mapped nowhere");
                        } else {
                            let chunk = mock.create(G).expect("there is room for all");
                            let map = mock.map(range, offset, &chunk, Access::ReadWrite);
                            map.expect("free in this thread's books");
                            left.insert(offset, chunk);
                        }
                    }
                    left
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().expect("no thread fails"))
            .collect()
    });
    let expected: Vec<_> = left.keys().map(|&at| (at, G, Access::ReadWrite)).collect();
    assert_eq!(mock.mapped(range.base()), expected);
    assert_eq!(mock.used_bytes(), left.len() as u64 * G);
    assert_eq!(mock.violations(), []);
}
