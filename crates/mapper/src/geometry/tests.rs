//! Properties of the arithmetic over random pools, and the sizes that other systems fell over.

use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::PageSize;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A pool of a handful of pages, so that every pair of them can be looked at, with its
/// granularity.
fn pools() -> impl Strategy<Value = (Geometry, u64)> {
    let block_bytes = prop_oneof![
        (0u32..16).prop_map(|log2| 256 << log2),
        (1u64..200).prop_map(|tokens| tokens * 576 * 2),
        1u64..(4 * MIB),
    ];
    let shape = (
        proptest::sample::select(Layout::ALL.to_vec()),
        1u32..=12,
        proptest::sample::select(vec![KvBuffers::One, KvBuffers::Two]),
        block_bytes,
        proptest::sample::select(vec![4096u64, 64 << 10, 2 * MIB]),
    );
    (shape, proptest::option::of(1u64..8), 1u64..14, 0u64..MIB).prop_filter_map(
        "no page size fits the block",
        |((layout, layers, kv_buffers, block_bytes, granularity), granules, pages, rest)| {
            let page_size = granules.map_or(PageSize::Auto, |n| PageSize::Bytes(n * granularity));
            let capacity_bytes = 0;
            let mut spec = PoolSpec {
                layout,
                layers,
                kv_buffers,
                block_bytes,
                page_size,
                capacity_bytes,
            };
            let regions = match layout {
                Layout::Contiguous => 1,
                Layout::Unified => layers,
                Layout::PerLayer => layers * kv_buffers.count(),
            };
            let bundle = spec.page(granularity).ok()?.page_bytes * u64::from(regions);
            // Any odd rest is rounded down to whole pages.
            spec.capacity_bytes = bundle * pages + rest.min(bundle - 1);
            let geometry = spec.resolve(granularity).expect("page and capacity fit");
            assert_eq!(u64::from(geometry.pages()), pages);
            Some((geometry, granularity))
        },
    )
}

fn single(page: u32) -> PageRun {
    PageRun::single(PageId(page)).expect("a page of the pool")
}

fn bytes(extent: Extent) -> Range<u64> {
    extent.offset..extent.offset + extent.len
}

/// All of `extents` are apart from each other.
fn disjoint(mut extents: Vec<Extent>) -> bool {
    extents.sort_unstable();
    extents
        .windows(2)
        .all(|pair| pair[0].tensor < pair[1].tensor || bytes(pair[0]).end <= bytes(pair[1]).start)
}

fn within(inner: Extent, outer: Extent) -> bool {
    inner.tensor == outer.tensor
        && bytes(outer).start <= bytes(inner).start
        && bytes(inner).end <= bytes(outer).end
}

fn all_pieces(geometry: &Geometry) -> Vec<Extent> {
    (0..geometry.blocks())
        .filter_map(|block| geometry.block_pieces(block))
        .flatten()
        .collect()
}

proptest! {
    #[test]
    fn extents_of_distinct_pages_never_overlap((geometry, _) in pools()) {
        let all = (0..geometry.pages()).flat_map(|page| geometry.extents(single(page))).collect();
        prop_assert!(disjoint(all));
    }

    #[test]
    fn extents_lie_inside_their_tensor_and_cover_it((geometry, _) in pools()) {
        let mut covered = vec![0; geometry.tensors() as usize];
        for extent in (0..geometry.pages()).flat_map(|page| geometry.extents(single(page))) {
            prop_assert!(extent.tensor < geometry.tensors());
            prop_assert!(bytes(extent).end <= geometry.tensor_bytes());
            covered[extent.tensor as usize] += extent.len;
        }
        // Disjoint and of the tensor's length together: no byte is left without a page.
        prop_assert!(covered.iter().all(|&len| len == geometry.tensor_bytes()));
        let all = geometry.tensor_bytes() * u64::from(geometry.tensors());
        prop_assert_eq!(all, geometry.virtual_bytes());
    }

    #[test]
    fn every_base_and_extent_is_aligned_to_page_and_granularity((geometry, granularity) in pools()) {
        prop_assert!(geometry.page_bytes().is_multiple_of(granularity));
        for extent in (0..geometry.pages()).flat_map(|page| geometry.extents(single(page))) {
            prop_assert!(extent.offset.is_multiple_of(geometry.page_bytes()));
            prop_assert!(extent.len.is_multiple_of(geometry.page_bytes()));
        }
        if geometry.layout() == Layout::PerLayer {
            for view in geometry.views() {
                prop_assert!(view.offset.is_multiple_of(geometry.page_bytes()));
            }
        }
    }

    #[test]
    fn one_buffer_pools_have_one_extent_per_layer((geometry, _) in pools()) {
        let extents: Vec<Extent> = geometry.extents(single(0)).collect();
        prop_assert_eq!(extents.len(), geometry.extents_per_page() as usize);
        let per_tensor = match (geometry.layout(), geometry.kv_buffers()) {
            (Layout::Contiguous, _) => {
                prop_assert_eq!(geometry.tensors(), 1);
                1
            }
            (Layout::Unified, _) | (Layout::PerLayer, KvBuffers::One) => {
                prop_assert_eq!(geometry.tensors(), geometry.layers());
                1
            }
            (Layout::PerLayer, KvBuffers::Two) => 2,
        };
        for tensor in 0..geometry.tensors() {
            let here = extents.iter().filter(|extent| extent.tensor == tensor).count();
            prop_assert_eq!(here, per_tensor);
        }
        let sum: u64 = extents.iter().map(|extent| extent.len).sum();
        prop_assert_eq!(sum, geometry.bundle_bytes());
    }

    #[test]
    fn a_run_is_its_pages_joined((geometry, _) in pools(), first in 0u32..14, count in 1u32..14) {
        let run = PageRun::new(PageId(first), count).expect("not empty");
        if !geometry.contains(run) {
            prop_assert_eq!(geometry.extents(run).len(), 0);
            return Ok(());
        }
        let pages: Vec<Extent> =
            run.pages().flat_map(|page| geometry.extents(single(page.0))).collect();
        for extent in geometry.extents(run) {
            let inside = pages.iter().filter(|&&page| within(page, extent));
            prop_assert_eq!(inside.map(|page| page.len).sum::<u64>(), extent.len);
        }
    }

    #[test]
    fn a_block_lies_in_one_page_or_in_none((geometry, _) in pools()) {
        let mut owners = vec![None; geometry.blocks() as usize];
        for page in (0..geometry.pages()).map(PageId) {
            let blocks = geometry.blocks_in(page);
            prop_assert!(blocks.len() <= geometry.max_blocks_per_page() as usize);
            if let Some(n) = geometry.uniform_blocks_per_page() {
                prop_assert_eq!(blocks.clone(), page.0 * n..(page.0 + 1) * n);
            }
            for block in blocks {
                let before = owners[block as usize].replace(page);
                prop_assert_eq!(before, None);
            }
        }
        for (block, owner) in (0..).zip(owners) {
            prop_assert_eq!(geometry.page_of(block), owner);
            prop_assert_eq!(geometry.block_pieces(block).is_some(), owner.is_some());
            // Without an owner the block begins in one page and ends in the next.
            let start = u64::from(block) * geometry.block_stride_bytes();
            let last = start + geometry.block_stride_bytes() - 1;
            let straddles = start / geometry.page_bytes() != last / geometry.page_bytes();
            prop_assert_eq!(straddles, owner.is_none());
        }
        prop_assert_eq!(geometry.page_of(geometry.blocks()), None);
        prop_assert!(geometry.blocks_in(PageId(geometry.pages())).is_empty());
    }

    #[test]
    fn pieces_of_a_block_lie_in_its_page_and_apart_from_all_others((geometry, _) in pools()) {
        // Small blocks by the ten thousand prove nothing that the first thousands do not.
        prop_assume!(geometry.blocks() <= 4096);
        for block in 0..geometry.blocks() {
            let Some(page) = geometry.page_of(block) else { continue };
            let extents: Vec<Extent> = geometry.extents(single(page.0)).collect();
            let pieces = geometry.block_pieces(block).expect("it has a page");
            prop_assert_eq!(pieces.len(), geometry.views().len());
            for piece in pieces {
                prop_assert_eq!(piece.len, geometry.block_bytes());
                prop_assert!(extents.iter().any(|&extent| within(piece, extent)));
            }
        }
        prop_assert!(disjoint(all_pieces(&geometry)));
    }

    #[test]
    fn an_automatic_page_leaves_no_block_out((geometry, _) in pools()) {
        prop_assume!(geometry.uniform_blocks_per_page().is_some());
        let per_page = geometry.max_blocks_per_page();
        prop_assert_eq!(geometry.blocks(), geometry.pages() * per_page);
        prop_assert!((0..geometry.blocks()).all(|block| geometry.page_of(block).is_some()));
    }
}

fn per_layer(kv_buffers: KvBuffers, layers: u32, capacity_bytes: u64) -> Geometry {
    PoolSpec {
        layout: Layout::PerLayer,
        layers,
        kv_buffers,
        block_bytes: 16 * 576 * 2,
        page_size: PageSize::Auto,
        capacity_bytes,
    }
    .resolve(2 * MIB)
    .expect("a model that exists")
}

fn blocks_of(geometry: &Geometry) -> Vec<Range<u32>> {
    (0..geometry.pages())
        .map(|page| geometry.blocks_in(PageId(page)))
        .collect()
}

/// One region, blocks of `block_bytes` in pages of 2 MiB.
fn pages_of_2_mib(block_bytes: u64, pages: u64) -> Geometry {
    PoolSpec {
        layout: Layout::PerLayer,
        layers: 1,
        kv_buffers: KvBuffers::One,
        block_bytes,
        page_size: PageSize::Bytes(2 * MIB),
        capacity_bytes: pages * 2 * MIB,
    }
    .resolve(2 * MIB)
    .expect("the block fits the page")
}

#[test]
fn capacities_that_layers_do_not_divide_keep_every_base_page_aligned() {
    for kv_buffers in [KvBuffers::One, KvBuffers::Two] {
        for (capacity, layers) in [(20 * GIB, 48), (80 * GIB, 81), (20_000_000_000, 48)] {
            let geometry = per_layer(kv_buffers, layers, capacity);
            assert!(
                geometry
                    .tensor_bytes()
                    .is_multiple_of(geometry.page_bytes())
            );
            for view in geometry.views() {
                assert!(view.offset.is_multiple_of(geometry.page_bytes()));
            }
            // Rounded down to whole pages, and by less than one.
            assert!(capacity - geometry.virtual_bytes() < geometry.bundle_bytes());
        }
    }
}

#[test]
fn an_odd_number_of_pages_keeps_v_page_aligned() {
    let bundle_bytes = per_layer(KvBuffers::Two, 2, GIB).bundle_bytes();
    let geometry = per_layer(KvBuffers::Two, 2, 6 * bundle_bytes - 1);
    assert_eq!(geometry.pages(), 5);
    let v = geometry.views().nth(1).expect("V of layer 0");
    assert_eq!((v.layer, v.buffer), (0, 1));
    assert_eq!(
        v.offset,
        u64::from(geometry.pages()) * geometry.page_bytes()
    );
    assert_eq!(geometry.tensor_bytes(), 2 * v.offset);
}

#[test]
fn blocks_of_three_quarter_mib_are_two_to_a_page() {
    let geometry = pages_of_2_mib(MIB * 3 / 4, 3);
    assert_eq!(blocks_of(&geometry), [0..2, 3..5, 6..8]);
    assert_eq!(
        [2, 5].map(|straddling| geometry.page_of(straddling)),
        [None, None]
    );
    assert_eq!(geometry.uniform_blocks_per_page(), None);
    assert_eq!(geometry.max_blocks_per_page(), 2);
}

#[test]
fn a_page_between_two_straddling_blocks_holds_none() {
    let geometry = pages_of_2_mib(MIB * 3 / 2, 6);
    let blocks = blocks_of(&geometry);
    assert_eq!(
        blocks[1],
        2..2,
        "page 1 lies in blocks 1 and 2, which both straddle"
    );
    let usable: Vec<u32> = blocks.into_iter().flatten().collect();
    assert_eq!(usable, [0, 3, 4, 7]);
    assert_eq!(geometry.blocks(), 8);
}

#[test]
fn each_layout_places_the_same_block_where_its_drawing_says() {
    let at = |layout| {
        let spec = PoolSpec {
            layout,
            layers: 3,
            kv_buffers: KvBuffers::Two,
            block_bytes: 4096,
            page_size: PageSize::Bytes(1 << 15),
            capacity_bytes: 6 * (1 << 15) * 4,
        };
        let geometry = spec.resolve(1 << 15).expect("24 KiB fit 32 KiB");
        let piece = |v: View| (v.tensor, v.offset + 2 * v.block_stride);
        geometry.views().map(piece).collect::<Vec<_>>()
    };
    let k = 4096;
    assert_eq!(
        at(Layout::Contiguous),
        [
            (0, 12 * k),
            (0, 13 * k),
            (0, 14 * k),
            (0, 15 * k),
            (0, 16 * k),
            (0, 17 * k)
        ]
    );
    assert_eq!(
        at(Layout::Unified),
        [
            (0, 4 * k),
            (0, 5 * k),
            (1, 4 * k),
            (1, 5 * k),
            (2, 4 * k),
            (2, 5 * k)
        ]
    );
    // Four pages of K, then four of V.
    let v = 4 * 8 * k + 2 * k;
    assert_eq!(
        at(Layout::PerLayer),
        [(0, 2 * k), (0, v), (1, 2 * k), (1, v), (2, 2 * k), (2, v)]
    );
}
