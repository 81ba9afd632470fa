//! The local mapper over a driver that checks every duty, one situation at a time. Random
//! situations are in `faults` and `rank` (the books) and in `content` and `rank_content` (the bytes).

mod content;
mod epochs;
mod faults;
mod rank;
mod rank_content;
mod recycled;

use kvcached_vmm::{Access, Call, Host, HostConfig, Mock, MockConfig, RecyclerConfig};

use super::*;
use crate::{
    Cause, KvBuffers, Layout, PageId, PageSize, PoolSpec,
    testing::{contract, rank_contract},
};

/// Granularity of the devices under test.
const G: u64 = 64 << 10;

const BOTH: [Cold; 2] = [Cold::Unbacked, Cold::Zero];

/// Two layers, blocks of an eighth of a granule, pages of two granules.
fn geometry(layout: Layout, kv_buffers: KvBuffers, pages: u32) -> Geometry {
    let mut spec = PoolSpec {
        layout,
        layers: 2,
        kv_buffers,
        block_bytes: G / 8,
        page_size: PageSize::Bytes(2 * G),
        capacity_bytes: 1 << 30,
    };
    let bundle_bytes = spec.resolve(G).expect("a pool").bundle_bytes();
    spec.capacity_bytes = bundle_bytes * u64::from(pages);
    spec.resolve(G).expect("the same pool of another size")
}

fn all_geometries(pages: u32) -> impl Iterator<Item = Geometry> {
    Layout::ALL.into_iter().flat_map(move |layout| {
        [KvBuffers::One, KvBuffers::Two].map(|kv_buffers| geometry(layout, kv_buffers, pages))
    })
}

/// One extent per page, which keeps the arithmetic of a test short.
fn simple(pages: u32) -> Geometry {
    geometry(Layout::Contiguous, KvBuffers::Two, pages)
}

fn mock(total_bytes: u64) -> Arc<Mock> {
    Arc::new(Mock::new(MockConfig {
        granularity: G,
        ..MockConfig::new(total_bytes)
    }))
}

fn host(total_bytes: u64) -> Arc<Host> {
    let config = HostConfig {
        granularity: G,
        ..HostConfig::new(total_bytes)
    };
    Arc::new(Host::new(config).expect("this machine has memory files"))
}

fn local<D: Driver>(driver: &Arc<D>, geometry: &Geometry, cold: Cold) -> LocalMapper<D> {
    LocalMapper::new(Arc::clone(driver), geometry.clone(), cold).expect("addresses are plenty")
}

/// Keeps whatever comes free, in small tests.
fn recycler<D: Driver>(driver: &Arc<D>) -> Arc<Recycler<D>> {
    let config = RecyclerConfig {
        limit_bytes: 16 << 20,
        idle: Duration::from_secs(1),
    };
    Arc::new(Recycler::new(Arc::clone(driver), config))
}

fn run(first: u32, count: u32) -> PageRun {
    PageRun::new(PageId(first), count).expect("a run of a test")
}

fn broken() -> VmmError {
    VmmError::Driver {
        call: "scripted",
        code: 1,
        name: "SCRIPTED".to_owned(),
    }
}

fn state_error(outcome: Result<(), MapError>) -> bool {
    let error = outcome.expect_err("a mistake is refused");
    assert_eq!(error.uncertain, []);
    matches!(error.cause, Cause::State { .. })
}

/// Everything that is mapped, tensor by tensor: what the device would see.
fn seen(mock: &Mock, mapper: &LocalMapper<Mock>) -> Vec<Vec<(u64, u64, Access)>> {
    mapper
        .tensor_bases()
        .into_iter()
        .map(|base| mock.mapped(base))
        .collect()
}

/// Nothing of a dropped mapper is left, and it met every duty.
fn assert_nothing_left(mock: &Mock) {
    assert_eq!(mock.violations(), []);
    assert_eq!((mock.live_ranges(), mock.live_mappings()), (0, 0));
    assert_eq!(mock.live_chunks(), mock.lost_chunks());
}

#[test]
fn it_passes_the_contract_in_every_layout_with_both_choices_for_cold_pages() {
    for geometry in all_geometries(9) {
        for cold in BOTH {
            let mock = mock(1 << 30);
            let mapper = local(&mock, &geometry, cold);
            contract(&mapper, 9);
            rank_contract(&mapper, 9);
            assert_eq!((mapper.mapped(), mapper.in_doubt()), (vec![], vec![]));
            drop(mapper);
            assert_nothing_left(&mock);

            let mapper = local(&host(1 << 30), &geometry, cold);
            contract(&mapper, 9);
            rank_contract(&mapper, 9);
        }
    }
}

#[test]
fn one_buffer_pages_share_nothing_and_are_mapped_once() {
    let mock = mock(1 << 30);
    let geometry = geometry(Layout::PerLayer, KvBuffers::One, 4);
    let mapper = local(&mock, &geometry, Cold::Unbacked);
    mapper.map(&[run(0, 1)]).unwrap();
    mapper.map(&[run(2, 1)]).unwrap();
    mapper.unmap(&[run(0, 1)]).unwrap();
    let page = (2 * 2 * G, 2 * G, Access::ReadWrite);
    assert_eq!(
        seen(&mock, &mapper),
        [vec![page], vec![page]],
        "page 2 is backed in both layers"
    );

    mapper.map(&[run(0, 1), run(1, 1), run(3, 1)]).unwrap();
    assert_eq!((mock.live_chunks(), mock.live_mappings()), (8, 8));
    assert_eq!(
        mock.used_bytes(),
        geometry.virtual_bytes(),
        "no chunk is longer than its page"
    );
}

#[test]
fn a_run_costs_one_chunk_per_extent_however_long_it_is() {
    for geometry in all_geometries(64) {
        let mock = mock(1 << 30);
        let mapper = local(&mock, &geometry, Cold::Unbacked);
        mapper.map(&[run(0, 1), run(3, 60)]).unwrap();
        let extents = 2 * u64::from(geometry.extents_per_page());
        assert_eq!(
            (mock.calls(Call::Create), mock.calls(Call::Map)),
            (extents, extents)
        );
        mapper.unmap(&[run(3, 60), run(0, 1)]).unwrap();
        assert_eq!(
            (mock.calls(Call::Unmap), mock.calls(Call::Destroy)),
            (extents, extents)
        );
        assert_eq!(
            mock.calls(Call::Synchronize),
            1,
            "one wait for the whole batch"
        );
        assert_eq!((mock.calls(Call::Memory), mapper.mapped_bytes()), (0, 0));
    }
}

#[test]
fn pages_past_the_end_are_refused_before_the_driver_is_asked() {
    let mock = mock(1 << 30);
    for cold in BOTH {
        let mapper = local(&mock, &simple(4), cold);
        let before = (seen(&mock, &mapper), mock.calls(Call::Create));
        for outside in [
            run(4, 1),
            run(3, 2),
            run(0, 5),
            run(u32::MAX - 1, 1),
            run(1, u32::MAX - 1),
        ] {
            assert!(state_error(mapper.map(&[outside])));
            assert!(state_error(mapper.map(&[run(0, 1), outside])));
            assert!(state_error(mapper.unmap(&[outside])));
        }
        assert_eq!((seen(&mock, &mapper), mock.calls(Call::Create)), before);
        assert_eq!(mock.calls(Call::Synchronize), 0);
    }
}

#[test]
fn a_second_map_of_a_page_is_refused_and_changes_nothing() {
    let mock = mock(1 << 30);
    let mapper = local(&mock, &simple(8), Cold::Unbacked);
    mapper.map(&[run(2, 2)]).unwrap();
    let before = seen(&mock, &mapper);
    for again in [run(2, 2), run(3, 1), run(1, 2), run(0, 8)] {
        assert!(state_error(mapper.map(&[run(6, 1), again])));
    }
    assert_eq!(
        (seen(&mock, &mapper), mapper.mapped()),
        (before, vec![run(2, 2)])
    );
}

#[test]
fn a_failed_create_in_the_middle_of_a_batch_backs_nothing() {
    for cold in BOTH {
        let mock = mock(1 << 30);
        let mapper = local(&mock, &geometry(Layout::PerLayer, KvBuffers::Two, 8), cold);
        let before = (
            seen(&mock, &mapper),
            mock.live_chunks(),
            mock.calls(Call::Unmap),
        );
        mock.fail(Call::Create, 2, broken());
        let error = mapper.map(&[run(0, 1), run(4, 2)]).unwrap_err();
        assert_eq!(error, MapError::clean(Cause::Vmm(broken())));
        // Nothing was touched, the zeros of cold pages included; what was created is given back.
        assert_eq!(
            (
                seen(&mock, &mapper),
                mock.live_chunks(),
                mock.calls(Call::Unmap)
            ),
            before
        );
        assert_eq!(mapper.mapped(), []);
        mapper.map(&[run(0, 1), run(4, 2)]).unwrap();
    }
}

#[test]
fn a_full_device_is_the_answer_full_and_the_mapper_goes_on() {
    let geometry = geometry(Layout::Unified, KvBuffers::Two, 8);
    let mock = mock(3 * geometry.bundle_bytes() + G);
    let mapper = local(&mock, &geometry, Cold::Zero);
    mapper.map(&[run(0, 2)]).unwrap();
    let before = seen(&mock, &mapper);
    assert!(mapper.map(&[run(4, 2)]).unwrap_err().is_full());
    assert!(mapper.map(&[run(4, 1), run(6, 1)]).unwrap_err().is_full());
    assert_eq!(seen(&mock, &mapper), before);
    mapper.map(&[run(4, 1)]).unwrap();
    assert_eq!(mapper.headroom(), Some(0));
    mapper.unmap(&[run(0, 2)]).unwrap();
    assert_eq!(mapper.headroom(), Some(2));
    mapper.map(&[run(6, 2)]).unwrap();
}

#[test]
fn of_two_pools_that_race_for_the_last_page_exactly_one_gets_it() {
    let geometry = simple(4);
    for _ in 0..50 {
        let mock = mock(geometry.bundle_bytes());
        // Each sees room for one page beforehand: a hint, and no promise.
        let pools = [(); 2].map(|()| local(&mock, &geometry, Cold::Unbacked));
        assert!(pools.iter().all(|pool| pool.headroom() == Some(1)));
        let outcomes = std::thread::scope(|scope| {
            let threads = pools
                .each_ref()
                .map(|pool| scope.spawn(|| pool.map(&[run(1, 1)])));
            threads.map(|thread| thread.join().expect("neither panics"))
        });
        let mapped = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        let full = outcomes
            .iter()
            .filter(|outcome| outcome.as_ref().is_err_and(MapError::is_full))
            .count();
        assert_eq!((mapped, full), (1, 1), "{outcomes:?}");
        assert_eq!(mock.live_chunks(), 1);
    }
}

#[test]
fn unmap_waits_for_the_device_first_and_a_failed_wait_changes_nothing() {
    let mock = mock(1 << 30);
    let mapper = local(&mock, &simple(8), Cold::Unbacked);
    mapper.map(&[run(0, 2), run(4, 1)]).unwrap();
    let before = seen(&mock, &mapper);
    mock.fail(Call::Synchronize, 0, broken());
    let error = mapper.unmap(&[run(0, 2)]).unwrap_err();
    assert_eq!(error, MapError::clean(Cause::Vmm(broken())));
    assert_eq!((seen(&mock, &mapper), mock.calls(Call::Unmap)), (before, 0));

    let order = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&order);
    mock.fail_with(move |call| {
        noted.lock().expect("no panic").push(call);
        None
    });
    mapper.unmap(&[run(4, 1), run(0, 2)]).unwrap();
    let order = order.lock().expect("no panic").clone();
    let [wait, unmaps @ .., _, _] = &order[..] else {
        panic!("{order:?}")
    };
    assert_eq!((*wait, unmaps), (Call::Synchronize, &[Call::Unmap; 2][..]));
}

#[test]
fn what_cannot_be_undone_is_in_doubt_and_everything_else_usable() {
    let mock = mock(1 << 30);
    let mapper = local(&mock, &simple(8), Cold::Unbacked);
    // The second run cannot be mapped, the first cannot be taken back.
    mock.fail(Call::Map, 1, broken());
    mock.fail(Call::Unmap, 0, broken());
    let error = mapper.map(&[run(0, 1), run(2, 1)]).unwrap_err();
    assert_eq!(
        (error.cause, error.uncertain),
        (Cause::Vmm(broken()), vec![run(0, 1)])
    );
    assert_eq!(
        (mapper.mapped(), mapper.in_doubt()),
        (vec![], vec![run(0, 1)])
    );
    assert!(state_error(mapper.map(&[run(0, 1)])));
    assert!(state_error(mapper.map(&[run(0, 4)])));
    assert!(state_error(mapper.unmap(&[run(0, 1)])));
    mapper.map(&[run(2, 1), run(1, 1)]).unwrap();
    mapper.unmap(&[run(1, 1), run(2, 1)]).unwrap();
    drop(mapper);
    assert_nothing_left(&mock);
}

#[test]
fn dropping_a_mapper_with_pages_mapped_gives_everything_back() {
    for geometry in all_geometries(8) {
        for cold in BOTH {
            let mock = mock(1 << 30);
            let mapper = local(&mock, &geometry, cold);
            mapper.map(&[run(1, 3), run(6, 1)]).unwrap();
            drop(mapper);
            assert_nothing_left(&mock);
        }
    }
}

#[test]
fn cold_pages_read_as_zero_through_one_granule_for_the_whole_pool() {
    for geometry in all_geometries(8) {
        let mock = mock(1 << 30);
        let mapper = local(&mock, &geometry, Cold::Zero);
        assert_eq!((mock.live_chunks(), mock.used_bytes()), (1, G));
        let granules = geometry.virtual_bytes() / G;
        assert_eq!(
            mock.live_mappings() as u64,
            granules,
            "every granule is covered"
        );
        let protected = |m: &(u64, u64, Access)| (m.1, m.2) == (G, Access::Read);
        assert!(seen(&mock, &mapper).iter().flatten().all(protected));
        let cold = seen(&mock, &mapper);
        mapper.map(&[run(2, 3)]).unwrap();
        assert_eq!(mock.used_bytes(), G + 3 * geometry.bundle_bytes());
        mapper.unmap(&[run(2, 3)]).unwrap();
        assert_eq!(seen(&mock, &mapper), cold);
    }
}

#[test]
fn a_device_that_cannot_alias_is_never_asked_to() {
    let config = MockConfig {
        granularity: G,
        alias: false,
        ..MockConfig::new(1 << 30)
    };
    let mock = Arc::new(Mock::new(config));
    let error = LocalMapper::new(Arc::clone(&mock), simple(8), Cold::Zero).unwrap_err();
    assert!(
        matches!(error.cause, Cause::Vmm(VmmError::Unavailable { .. })),
        "{error}"
    );
    assert_eq!((mock.live_chunks(), mock.live_ranges()), (0, 0));
    contract(&local(&mock, &simple(8), Cold::Unbacked), 8);
    assert_eq!(mock.violations(), []);
}

#[test]
fn a_mapper_that_cannot_be_made_leaves_nothing() {
    let geometry = geometry(Layout::PerLayer, KvBuffers::Two, 4);
    for call in [Call::Reserve, Call::Create, Call::Map] {
        for nth in 0.. {
            let mock = mock(1 << 30);
            mock.fail(call, nth, broken());
            let made = LocalMapper::new(Arc::clone(&mock), geometry.clone(), Cold::Zero);
            let failed = made.is_err();
            drop(made);
            assert_nothing_left(&mock);
            if !failed {
                assert!(nth > 0, "{call:?} is part of making one");
                break;
            }
        }
    }
    let coarse = Mock::new(MockConfig {
        granularity: 4 * G,
        ..MockConfig::new(1 << 30)
    });
    let error = LocalMapper::new(Arc::new(coarse), geometry, Cold::Unbacked).unwrap_err();
    let misaligned = VmmError::Misaligned {
        value: 2 * G,
        granularity: 4 * G,
    };
    assert_eq!(error.cause, Cause::Vmm(misaligned));
}

#[test]
fn headroom_is_whole_pages_never_below_zero_and_unknown_without_an_answer() {
    let geometry = simple(8);
    let bundle = geometry.bundle_bytes();
    let headroom = |bytes| local(&mock(bytes), &geometry, Cold::Unbacked).headroom();
    assert_eq!(headroom(0), Some(0));
    assert_eq!(headroom(bundle - 1), Some(0));
    assert_eq!(headroom(3 * bundle - 1), Some(2));
    assert_eq!(headroom(u64::MAX), Some(u32::MAX));
    let mock = mock(1 << 30);
    let mapper = local(&mock, &geometry, Cold::Unbacked);
    mock.fail(Call::Memory, 0, broken());
    assert_eq!(mapper.headroom(), None);
}

#[test]
fn threads_on_disjoint_pages_leave_what_each_of_them_mapped() {
    const THREADS: u32 = 8;
    const OWN: u32 = 6;
    for cold in BOTH {
        let mock = mock(1 << 30);
        let geometry = geometry(Layout::PerLayer, KvBuffers::Two, THREADS * OWN);
        let mapper = local(&mock, &geometry, cold);
        let mut expected: Vec<PageRun> = std::thread::scope(|scope| {
            let worker = |thread: u32| {
                let mapper = &mapper;
                scope.spawn(move || map_and_unmap(mapper, thread, thread * OWN, OWN))
            };
            let threads: Vec<_> = (0..THREADS).map(worker).collect();
            threads
                .into_iter()
                .flat_map(|t| t.join().expect("no call panics"))
                .collect()
        });
        expected.sort_unstable();
        assert_eq!(mapper.mapped(), expected);
        faults::assert_seen_is(&mock, &mapper, cold, &expected);
        drop(mapper);
        assert_nothing_left(&mock);
    }
}

/// A few thousand rounds on the `own` pages from `first`; what is mapped in the end.
fn map_and_unmap(mapper: &LocalMapper<Mock>, seed: u32, first: u32, own: u32) -> Vec<PageRun> {
    let mut mapped: Vec<PageRun> = Vec::new();
    let mut random = u64::from(seed) + 1;
    for _ in 0..2000 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let draw = |shift: u32, below: u32| {
            u32::try_from((random >> shift) % u64::from(below)).expect("below a u32")
        };
        let start = draw(33, own);
        let wanted = run(first + start, 1 + draw(40, own - start));
        match mapped.iter().position(|run| run.overlaps(wanted)) {
            Some(index) => mapper
                .unmap(&[mapped.swap_remove(index)])
                .expect("it is mapped"),
            None => {
                mapper.map(&[wanted]).expect("it is cold");
                mapped.push(wanted);
            }
        }
    }
    mapped
}
