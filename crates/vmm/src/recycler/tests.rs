use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::{Access, Call, Host, HostConfig, Mock, MockConfig, Reservation};

const G: u64 = 4096;
const TOTAL: u64 = 24 * G;
const IDLE: Duration = Duration::from_secs(1);

fn mock() -> Arc<Mock> {
    Arc::new(Mock::new(MockConfig {
        granularity: G,
        ..MockConfig::new(TOTAL)
    }))
}

fn recycler(mock: &Arc<Mock>, limit_bytes: u64) -> Arc<Recycler<Mock>> {
    let idle = IDLE;
    let config = RecyclerConfig { limit_bytes, idle };
    Arc::new(Recycler::new(Arc::clone(mock), config))
}

fn start() -> Instant {
    #[expect(
        clippy::disallowed_methods,
        reason = "some moment, from which a test counts"
    )]
    Instant::now()
}

/// A chunk by the number that the device gave it, which no other ever has.
fn identity(chunk: &Chunk<Mock>) -> String {
    format!("{:?}", chunk.raw())
}

#[test]
fn steady_traffic_needs_no_create_and_no_release() {
    let mock = mock();
    let tenant = recycler(&mock, 4 * G).tenant();
    for _ in 0..10 {
        let chunks: Vec<_> = (0..2).map(|_| tenant.create(2 * G).unwrap()).collect();
        tenant.keep(chunks);
    }
    assert_eq!(
        (mock.calls(Call::Create), mock.calls(Call::Destroy)),
        (2, 0)
    );
    assert_eq!(tenant.kept_bytes(), 4 * G);

    drop(tenant);
    assert_eq!((mock.live_chunks(), mock.used_bytes()), (0, 0));
}

#[test]
fn memory_reaches_another_tenant_only_through_the_device() {
    let host = Arc::new(Host::new(HostConfig::new(64 << 20)).unwrap());
    let len = host.properties().granularity;
    let recycler = Arc::new(Recycler::new(Arc::clone(&host), RecyclerConfig::default()));
    let (one, two) = (recycler.tenant(), recycler.tenant());
    let mut range = Reservation::new(host, len).unwrap();
    let mut word_of = |chunk: Arc<Chunk<Host>>, write: Option<&[u8]>| {
        range.map(0, chunk, Access::ReadWrite).unwrap();
        let mut found = [0; 6];
        range.read(0, &mut found).unwrap();
        if let Some(word) = write {
            range.write(0, word).unwrap();
        }
        (range.unmap(0).unwrap(), found)
    };

    let (chunk, _) = word_of(one.create(len).unwrap(), Some(b"secret"));
    one.keep([chunk]);

    let (chunk, found) = word_of(two.create(len).unwrap(), None);
    assert_eq!(found, [0; 6]);
    two.keep([chunk]);
    assert_eq!(recycler.kept_bytes(), 2 * len);
    let (_, found) = word_of(one.create(len).unwrap(), None);
    assert_eq!(&found, b"secret", "its own");
}

#[test]
fn what_is_in_use_elsewhere_or_of_another_tenant_is_never_kept() {
    let mock = mock();
    let recycler = recycler(&mock, TOTAL);
    let (one, two) = (recycler.tenant(), recycler.tenant());
    let mut range = Reservation::new(Arc::clone(&mock), 4 * G).unwrap();

    let shared = one.create(G).unwrap();
    one.keep([Arc::clone(&shared)]);
    let mapped = one.create(G).unwrap();
    range.map(0, mapped, Access::ReadWrite).unwrap();
    two.keep([one.create(G).unwrap()]);
    one.keep([Arc::new(Chunk::create(&mock, G).unwrap())]);

    assert_eq!((recycler.kept_bytes(), mock.live_chunks()), (0, 2));
    one.keep([range.unmap(0).unwrap(), shared]);
    assert_eq!((recycler.kept_bytes(), mock.live_chunks()), (2 * G, 2));
}

#[test]
fn a_full_device_gets_everything_back_and_is_asked_once_more() {
    let mock = mock();
    let recycler = recycler(&mock, TOTAL);
    let (one, two) = (recycler.tenant(), recycler.tenant());
    one.keep([one.create(TOTAL - G).unwrap()]);

    let all = two.create(TOTAL).unwrap();
    assert_eq!(recycler.kept_bytes(), 0);

    // Nothing is kept any more that could help.
    let asked = mock.calls(Call::Create);
    let full = VmmError::OutOfMemory { requested: G };
    assert_eq!(one.create(G).unwrap_err(), full);
    assert_eq!(mock.calls(Call::Create), asked + 1);
    drop(all);
    assert!(one.create(G).is_ok());
}

#[test]
fn a_recycler_that_is_off_keeps_nothing() {
    let mock = mock();
    let tenant = Arc::new(Recycler::new(Arc::clone(&mock), RecyclerConfig::OFF)).tenant();
    tenant.keep([tenant.create(G).unwrap()]);
    assert_eq!((mock.live_chunks(), tenant.tend(start())), (0, None));
}

#[test]
fn a_look_lets_go_of_a_few_and_says_when_to_look_again() {
    let mock = mock();
    let tenant = recycler(&mock, TOTAL).tenant();
    let chunks: Vec<_> = (0..6).map(|_| tenant.create(G).unwrap()).collect();
    tenant.keep(chunks);
    let begin = start();
    assert_eq!(tenant.tend(begin), Some(begin + IDLE), "it saw them first");
    let later = begin + IDLE / 2;
    assert_eq!(tenant.tend(later), Some(begin + IDLE));
    assert_eq!(mock.live_chunks(), 6);

    let due = begin + IDLE;
    assert_eq!(tenant.tend(due), Some(due), "at once");
    assert_eq!(mock.live_chunks(), 6 - RELEASES_PER_LOOK);
    assert_eq!(tenant.tend(due), None);
    assert_eq!(mock.live_chunks(), 0);
}

#[derive(Debug, Clone)]
enum Op {
    Create { tenant: usize, granules: u64 },
    Keep { nth: usize, by: Option<usize> },
    Drop { nth: usize },
    Clear { tenant: usize },
    ClearAll,
    Tend { tenant: usize },
    Wait { ms: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..2_usize, 1..5_u64).prop_map(|(tenant, granules)| Op::Create { tenant, granules }),
        6 => (0..8_usize, prop::option::weighted(0.1, 0..2_usize))
            .prop_map(|(nth, by)| Op::Keep { nth, by }),
        1 => (0..8_usize).prop_map(|nth| Op::Drop { nth }),
        1 => (0..2_usize).prop_map(|tenant| Op::Clear { tenant }),
        1 => Just(Op::ClearAll),
        3 => (0..2_usize).prop_map(|tenant| Op::Tend { tenant }),
        3 => (0..900_u64).prop_map(|ms| Op::Wait { ms }),
    ]
}

/// What is kept, in the order in which it came.
#[derive(Debug)]
struct Known {
    tenant: usize,
    len: u64,
    identity: String,
    since: Option<Instant>,
}

proptest! {
    #[test]
    fn no_chunk_has_two_owners_or_another_tenant_and_none_is_lost(
        ops in prop::collection::vec(op(), 0..120),
    ) {
        let mock = mock();
        let limit = 8 * G;
        let recycler = recycler(&mock, limit);
        let tenants = [recycler.tenant(), recycler.tenant()];
        let mut held: Vec<(usize, Arc<Chunk<Mock>>)> = Vec::new();
        let mut known: Vec<Known> = Vec::new();
        let mut owners: HashMap<String, usize> = HashMap::new();
        let mut now = start();

        for op in ops {
            let in_hand: u64 = held.iter().map(|(_, chunk)| chunk.byte_len()).sum();
            let kept: u64 = known.iter().map(|one| one.len).sum();
            match op {
                Op::Create { tenant, granules } => {
                    let len = granules * G;
                    let own = |one: &Known| one.tenant == tenant && one.len == len;
                    match (known.iter().rposition(own), tenants[tenant].create(len)) {
                        (Some(newest), chunk) => {
                            let chunk = chunk.unwrap();
                            prop_assert_eq!(identity(&chunk), known.remove(newest).identity);
                            held.push((tenant, chunk));
                        }
                        (None, chunk) => {
                            if in_hand + kept + len > TOTAL {
                                known.clear();
                            }
                            prop_assert_eq!(chunk.is_ok(), in_hand + len <= TOTAL);
                            if let Ok(chunk) = chunk {
                                let before = owners.insert(identity(&chunk), tenant);
                                prop_assert_eq!(before, None, "it was somebody's before");
                                held.push((tenant, chunk));
                            }
                        }
                    }
                }
                Op::Keep { nth, by } if nth < held.len() => {
                    let (tenant, chunk) = held.swap_remove(nth);
                    let by = by.unwrap_or(tenant);
                    let (len, identity) = (chunk.byte_len(), identity(&chunk));
                    tenants[by].keep([chunk]);
                    if by == tenant && kept + len <= limit {
                        known.push(Known { tenant, len, identity, since: None });
                    }
                }
                Op::Drop { nth } if nth < held.len() => drop(held.swap_remove(nth)),
                Op::Keep { .. } | Op::Drop { .. } => {}
                Op::Clear { tenant } => {
                    tenants[tenant].clear();
                    known.retain(|one| one.tenant != tenant);
                }
                Op::ClearAll => {
                    prop_assert_eq!(recycler.clear(), kept);
                    known.clear();
                }
                Op::Tend { tenant } => {
                    let mut next = tenants[tenant].tend(now);
                    while next.is_some_and(|at| at <= now) {
                        next = tenants[tenant].tend(now);
                    }
                    for one in known.iter_mut().filter(|one| one.tenant == tenant) {
                        one.since.get_or_insert(now);
                    }
                    known.retain(|one| {
                        one.tenant != tenant || one.since.is_none_or(|since| now - since < IDLE)
                    });
                    let own = known.iter().filter(|one| one.tenant == tenant);
                    let oldest = own.filter_map(|one| one.since).min();
                    prop_assert_eq!(next, oldest.map(|since| since + IDLE));
                }
                Op::Wait { ms } => now += Duration::from_millis(ms),
            }
            let kept: u64 = known.iter().map(|one| one.len).sum();
            prop_assert_eq!(recycler.kept_bytes(), kept);
            prop_assert_eq!(tenants.iter().map(Tenant::kept_bytes).sum::<u64>(), kept);
            prop_assert!(kept <= limit);
            let in_hand: u64 = held.iter().map(|(_, chunk)| chunk.byte_len()).sum();
            prop_assert_eq!(mock.used_bytes(), in_hand + kept);
        }
        drop((held, tenants, recycler));
        prop_assert_eq!((mock.live_chunks(), mock.lost_chunks()), (0, 0));
        prop_assert!(mock.violations().is_empty());
    }
}
