//! Whatever fails at whatever driver call: the batch happened whole or not at all, and what is in
//! doubt is exactly what could not be undone.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const PAGES: u32 = 10;

/// One call of the mapper, and the driver calls that fail while it lasts.
#[derive(Debug, Clone)]
struct Op {
    what: What,
    faults: Vec<(Call, u32, bool)>,
}

#[derive(Debug, Clone)]
enum What {
    /// Those of these runs that are cold.
    Map(Vec<(u32, u32)>),
    /// The mapped runs of these indices.
    Unmap(Vec<usize>),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let what = prop_oneof![
        3 => proptest::collection::vec((0..PAGES, 1u32..4), 1..4).prop_map(What::Map),
        2 => proptest::collection::vec(0usize..8, 1..4).prop_map(What::Unmap),
    ];
    let call = proptest::sample::select(vec![
        Call::Create,
        Call::Map,
        Call::Map,
        Call::Unmap,
        Call::Unmap,
        Call::Destroy,
        Call::Synchronize,
    ]);
    let faults = proptest::collection::vec((call, 0u32..12, any::<bool>()), 0..4);
    let op = (what, faults).prop_map(|(what, faults)| Op { what, faults });
    proptest::collection::vec(op, 1..25)
}

fn pool() -> impl Strategy<Value = (Geometry, Cold)> {
    let geometries: Vec<Geometry> = all_geometries(PAGES).collect();
    (
        proptest::sample::select(geometries),
        proptest::sample::select(BOTH.to_vec()),
    )
}

/// The batch that an operation stands for in this state.
fn batch(what: &What, mapped: &BTreeSet<PageRun>, in_doubt: &BTreeSet<PageRun>) -> Vec<PageRun> {
    let mut runs: Vec<PageRun> = Vec::new();
    match what {
        What::Map(wanted) => {
            for &(first, count) in wanted {
                let run = run(first, count.min(PAGES - first));
                if !mapped
                    .iter()
                    .chain(in_doubt)
                    .chain(&runs)
                    .any(|other| other.overlaps(run))
                {
                    runs.push(run);
                }
            }
        }
        What::Unmap(indices) => {
            for run in indices.iter().filter_map(|&index| mapped.iter().nth(index)) {
                if !runs.contains(run) {
                    runs.push(*run);
                }
            }
        }
    }
    runs
}

fn inside(extents: &[Extent], tensor: u32, offset: u64) -> bool {
    extents
        .iter()
        .any(|e| e.tensor == tensor && (e.offset..e.offset + e.len).contains(&offset))
}

/// What the device sees in the extents of one run.
fn seen_of(mock: &Mock, mapper: &LocalMapper<Mock>, run: PageRun) -> Vec<(u64, u64, Access)> {
    let extents: Vec<Extent> = mapper.geometry().extents(run).collect();
    let tensors = (0..).zip(seen(mock, mapper));
    tensors
        .flat_map(|(tensor, maps)| maps.into_iter().map(move |map| (tensor, map)))
        .filter_map(|(tensor, map)| inside(&extents, tensor, map.0).then_some(map))
        .collect()
}

/// The device sees `mapped` backed by a chunk per extent and every other page cold, those in doubt
/// aside.
#[track_caller]
pub(super) fn assert_seen_is(
    mock: &Mock,
    mapper: &LocalMapper<Mock>,
    cold: Cold,
    mapped: &[PageRun],
) {
    let geometry = mapper.geometry();
    let extents = |runs: &[PageRun]| -> Vec<Extent> {
        runs.iter().flat_map(|&run| geometry.extents(run)).collect()
    };
    let backed = extents(mapped);
    let in_doubt = extents(&mapper.in_doubt());
    for (tensor, mut seen) in (0..).zip(seen(mock, mapper)) {
        seen.retain(|map| !inside(&in_doubt, tensor, map.0));
        let mut expected: Vec<_> = backed
            .iter()
            .filter(|extent| extent.tensor == tensor)
            .map(|extent| (extent.offset, extent.len, Access::ReadWrite))
            .collect();
        if cold == Cold::Zero {
            let granules = (0..geometry.tensor_bytes() / G).map(|granule| granule * G);
            let zeros = granules
                .filter(|&at| !inside(&backed, tensor, at) && !inside(&in_doubt, tensor, at));
            expected.extend(zeros.map(|at| (at, G, Access::Read)));
        }
        expected.sort_unstable_by_key(|map| map.0);
        assert_eq!(seen, expected, "tensor {tensor}");
    }
}

/// Every live chunk is the zero granule, behind an extent, or lost to a destroy that failed.
#[track_caller]
fn assert_no_chunk_leaks(mock: &Mock, mapper: &LocalMapper<Mock>, cold: Cold) {
    let seen = seen(mock, mapper);
    let own = seen
        .iter()
        .flatten()
        .filter(|map| map.2 == Access::ReadWrite)
        .count();
    let zero = usize::from(cold == Cold::Zero);
    assert_eq!(mock.live_chunks(), own + zero + mock.lost_chunks());
}

proptest! {
    #[test]
    fn after_any_failure_only_what_could_not_be_undone_is_in_doubt(
        (geometry, cold) in pool(),
        ops in ops(),
    ) {
        let mock = mock(1 << 30);
        let mapper = local(&mock, &geometry, cold);
        let (mut mapped, mut in_doubt) = (BTreeSet::new(), BTreeSet::new());
        for Op { what, faults } in ops {
            let runs = batch(&what, &mapped, &in_doubt);
            let before: Vec<_> = runs.iter().map(|&run| seen_of(&mock, &mapper, run)).collect();
            for (call, nth, full) in faults {
                let error = if full { VmmError::OutOfMemory { requested: 1 } } else { broken() };
                mock.fail(call, nth, error);
            }
            let outcome = match what {
                What::Map(_) => mapper.map(&runs),
                What::Unmap(_) => mapper.unmap(&runs),
            };
            mock.heal();
            match (outcome, what) {
                (Ok(()), What::Map(_)) => mapped.extend(runs),
                (Ok(()), What::Unmap(_)) => runs.iter().for_each(|run| {
                    mapped.remove(run);
                }),
                (Err(error), _) => {
                    let changed: Vec<PageRun> = runs
                        .iter()
                        .zip(before)
                        .filter(|(run, before)| seen_of(&mock, &mapper, **run) != *before)
                        .map(|(&run, _)| run)
                        .collect();
                    let named: BTreeSet<PageRun> = error.uncertain.iter().copied().collect();
                    prop_assert_eq!(named.len(), error.uncertain.len(), "each is named once");
                    prop_assert_eq!(&named, &changed.into_iter().collect());
                    let told = matches!(error.cause, Cause::Vmm(_) | Cause::OutOfMemory { .. });
                    prop_assert!(told, "{}", error);
                    mapped.retain(|run| !named.contains(run));
                    in_doubt.extend(named);
                }
            }
            let model: Vec<PageRun> = mapped.iter().copied().collect();
            prop_assert_eq!(mapper.mapped(), &model[..]);
            prop_assert_eq!(mapper.in_doubt(), in_doubt.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(mock.violations(), []);
            assert_seen_is(&mock, &mapper, cold, &model);
            assert_no_chunk_leaks(&mock, &mapper, cold);
        }
        drop(mapper);
        assert_nothing_left(&mock);
    }
}

/// Fails one driver call after the other, until the operation has none left that fails.
fn each_single_fault(call: Call, op: impl Fn(&LocalMapper<Mock>) -> Result<(), MapError>) {
    for geometry in all_geometries(PAGES) {
        for cold in BOTH {
            for nth in 0.. {
                let mock = mock(1 << 30);
                let mapper = local(&mock, &geometry, cold);
                mapper.map(&[run(0, 2), run(5, 1)]).expect("no fault yet");
                let before = (seen(&mock, &mapper), mapper.mapped(), mock.live_chunks());
                mock.fail(call, nth, broken());
                let Err(error) = op(&mapper) else { break };
                assert_eq!(
                    error,
                    MapError::clean(Cause::Vmm(broken())),
                    "{call:?} {nth}"
                );
                let after = (seen(&mock, &mapper), mapper.mapped(), mock.live_chunks());
                assert_eq!(after, before, "{call:?} {nth}");
                op(&mapper).expect("it works when nothing fails");
                assert_eq!(mock.violations(), []);
            }
        }
    }
}

#[test]
fn a_single_failed_call_never_leaves_anything_in_doubt() {
    for call in [Call::Create, Call::Map, Call::Unmap] {
        each_single_fault(call, |mapper| mapper.map(&[run(2, 2), run(8, 1)]));
    }
    for call in [Call::Synchronize, Call::Unmap, Call::Map] {
        each_single_fault(call, |mapper| mapper.unmap(&[run(5, 1), run(0, 2)]));
    }
}
