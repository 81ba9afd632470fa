//! What only a GPU can show. Every test is ignored where none is asked for: `cargo xtask test-gpu`
//! runs them, here or packed for a machine that has one.

mod in_flight;
#[path = "../ranks.rs"]
mod ranks;
mod watch;

use std::sync::Arc;

use kvcached_manager::{AllocError, BlockManager, BlockSpace};
use kvcached_mapper::{
    Cold, Extent, KvBuffers, Layout, LocalMapper, Mapper, PageId, PageRun, PageSize, PoolSpec,
};
use kvcached_page_alloc::{FullReason, PageAllocator, PageAllocatorConfig};
use kvcached_vmm::{Budget, Capped, Cuda, Driver, Recycler, RecyclerConfig, VmmError, conformance};

use crate::ranks::{POOL, Place, WorkerProcess, scheduler};

fn gpu() -> Arc<Cuda> {
    Arc::new(Cuda::new(0).expect("a GPU, since these tests were asked for"))
}

#[test]
#[ignore = "needs a GPU"]
fn the_driver_passes_the_conformance_suite() {
    let cuda = gpu();
    println!("{cuda:?} {:?}", cuda.properties());
    conformance::contract(&cuda);
    conformance::content(&cuda);
}

#[test]
#[ignore = "needs a GPU"]
fn the_driver_under_a_budget_passes_the_conformance_suite() {
    let cuda = Cuda::new(0).expect("a GPU");
    let capped = Arc::new(Capped::new(cuda, Budget::private(1 << 30)));
    conformance::contract(&capped);
    conformance::content(&capped);
}

#[test]
#[ignore = "needs a GPU"]
fn a_gpu_that_is_not_there_is_an_error() {
    let error = Cuda::new(4096).expect_err("no machine has so many");
    assert!(matches!(error, VmmError::Unavailable { .. }), "{error}");
}

#[test]
#[ignore = "needs a GPU"]
fn pages_hold_what_was_written_in_every_layout_and_come_back_zero() {
    for layout in [Layout::Contiguous, Layout::Unified, Layout::PerLayer] {
        for buffers in [KvBuffers::One, KvBuffers::Two] {
            for cold in [Cold::Unbacked, Cold::Zero] {
                pages_hold_what_was_written(layout, buffers, cold);
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn memory_that_is_used_again_is_zero_for_another_pool() {
    let cuda = gpu();
    let granularity = cuda.properties().granularity;
    let spec = PoolSpec {
        layout: Layout::PerLayer,
        layers: 2,
        kv_buffers: KvBuffers::Two,
        block_bytes: 128 << 10,
        page_size: PageSize::Auto,
        capacity_bytes: 1 << 30,
    };
    let geometry = spec.resolve(granularity).expect("a layout");
    let recycler = Arc::new(Recycler::new(Arc::clone(&cuda), RecyclerConfig::default()));
    let [one, other] = [(); 2].map(|()| {
        let mapper = LocalMapper::new(Arc::clone(&cuda), geometry.clone(), Cold::Unbacked);
        mapper.expect("addresses").with_recycler(&recycler)
    });
    let run = |first| PageRun::new(PageId(first), 2).expect("pages");
    let words = |first| -> Vec<Extent> {
        let extents = geometry.extents(run(first));
        extents.map(|extent| Extent { len: 8, ..extent }).collect()
    };
    let read = |mapper: &LocalMapper<Cuda>, at| {
        let mut found = [1; 8];
        mapper.read(at, &mut found).expect("mapped");
        u64::from_le_bytes(found)
    };
    one.map(&[run(0)]).expect("room");
    let stamp = 0x5ec4e7_u64;
    for at in words(0) {
        one.write(at, &stamp.to_le_bytes()).expect("mapped");
    }
    one.unmap(&[run(0)]).expect("mapped");
    let bytes = 2 * geometry.bundle_bytes();
    assert_eq!(one.kept_bytes(), bytes);

    other.map(&[run(0)]).expect("room");
    for at in words(0) {
        assert_eq!(read(&other, at), 0, "another pool");
    }
    // At another place of the same pool, with what was left in it.
    one.map(&[run(6)]).expect("it is there");
    assert_eq!(one.kept_bytes(), 0);
    for at in words(6) {
        assert_eq!(read(&one, at), stamp);
    }
    one.unmap(&[run(6)]).expect("mapped");
    one.trim();
    assert_eq!(recycler.kept_bytes(), 0);
}

fn pages_hold_what_was_written(layout: Layout, kv_buffers: KvBuffers, cold: Cold) {
    let cuda = gpu();
    let spec = PoolSpec {
        layout,
        layers: 3,
        kv_buffers,
        block_bytes: 128 << 10,
        page_size: PageSize::Auto,
        capacity_bytes: 1 << 30,
    };
    let geometry = spec
        .resolve(cuda.properties().granularity)
        .expect("a layout");
    let mapper = LocalMapper::new(cuda, geometry.clone(), cold).expect("addresses");
    let runs: Vec<PageRun> = [(0, 1), (2, 3), (9, 2)]
        .into_iter()
        .map(|(first, count)| PageRun::new(PageId(first), count).expect("pages"))
        .collect();
    mapper.map(&runs).expect("room");
    let blocks: Vec<u32> = runs
        .iter()
        .flat_map(|run| run.pages())
        .flat_map(|page| geometry.blocks_in(page))
        .collect();
    let each_piece = |act: &mut dyn FnMut(Extent, u64)| {
        for &block in &blocks {
            let pieces = geometry.block_pieces(block).expect("a block on a page");
            for (index, piece) in (0..).zip(pieces) {
                act(Extent { len: 8, ..piece }, u64::from(block) << 16 | index);
            }
        }
    };
    each_piece(&mut |at, _| {
        let mut found = [1; 8];
        mapper.read(at, &mut found).expect("mapped");
        assert_eq!(found, [0; 8], "fresh memory is zero");
    });
    each_piece(&mut |at, stamp| mapper.write(at, &stamp.to_le_bytes()).expect("mapped"));
    each_piece(&mut |at, stamp| {
        let mut found = [0; 8];
        mapper.read(at, &mut found).expect("mapped");
        assert_eq!(u64::from_le_bytes(found), stamp, "{layout} at {at:?}");
    });
    mapper.unmap(&runs).expect("mapped");
    let stray = geometry.extents(runs[1]).next().expect("an extent");
    let mut found = [1; 8];
    let result = mapper.read(Extent { len: 8, ..stray }, &mut found);
    if cold == Cold::Zero {
        assert_eq!((result, found), (Ok(()), [0; 8]));
    } else {
        assert!(matches!(result, Err(VmmError::Fault { .. })), "{result:?}");
    }
    mapper.map(&runs).expect("room");
    each_piece(&mut |at, _| {
        let mut found = [1; 8];
        mapper.read(at, &mut found).expect("mapped");
        assert_eq!(found, [0; 8], "what one owner wrote the next never reads");
    });
}

#[test]
#[ignore = "needs a GPU"]
fn a_full_device_is_a_normal_answer_and_the_process_goes_on() {
    let cuda = gpu();
    let total = cuda.memory().expect("a GPU").total;
    // Four times what the card has, in pages of 64 MiB.
    let spec = PoolSpec {
        layout: Layout::Contiguous,
        layers: 32,
        kv_buffers: KvBuffers::Two,
        block_bytes: 1 << 20,
        page_size: PageSize::Auto,
        capacity_bytes: total * 4,
    };
    let geometry = spec
        .resolve(cuda.properties().granularity)
        .expect("a layout");
    let mapper = LocalMapper::new(Arc::clone(&cuda), geometry.clone(), Cold::Unbacked);
    let mapper: Arc<dyn Mapper> = Arc::new(mapper.expect("addresses cost nothing"));
    let config = PageAllocatorConfig::new(geometry.pages(), geometry.bundle_bytes());
    let pages = Arc::new(PageAllocator::new(config, mapper).expect("a pool"));
    let mut blocks =
        BlockManager::new(BlockSpace::from(&geometry), Arc::clone(&pages)).expect("a null block");

    let mut held = Vec::new();
    let reason = loop {
        match blocks.alloc(16) {
            Ok(more) => held.push(more),
            Err(AllocError::Full { reason, .. }) => break reason,
            Err(broken) => panic!("{broken}"),
        }
    };
    assert_eq!(reason, FullReason::DeviceMemory);
    println!("full after {} GiB", pages.usage().mapped_bytes >> 30);
    let usage = pages.usage();
    for _ in 0..10 {
        assert!(matches!(blocks.alloc(16), Err(AllocError::Full { .. })));
    }
    assert_eq!(
        pages.usage().mapped_bytes,
        usage.mapped_bytes,
        "nothing is left half-way"
    );
    assert_eq!(pages.usage().quarantined, 0);
    for some in held.drain(..).step_by(2) {
        blocks.free(&some).expect("handed out before");
    }
    blocks.trim().expect("idle pages go back");
    blocks.alloc(16).expect("there is room again");
}

#[test]
#[ignore = "needs a GPU"]
fn ranks_in_processes_of_their_own_share_the_gpu_and_have_the_same_pages() {
    for layout in [Layout::Contiguous, Layout::PerLayer] {
        for (place, ranks) in [(Place::Rank0(2), 1..2), (Place::Separate(4, 1), 0..4)] {
            let folder = ranks::folder();
            let mut workers: Vec<_> = ranks
                .map(|rank| WorkerProcess::start(folder.path(), "e", (0, rank), "cuda", layout))
                .collect();
            let own = matches!(place, Place::Rank0(_)).then(gpu);
            let scheduler = scheduler(folder.path(), "e", place, layout, own).expect("ready");
            let pool = scheduler.pool(POOL).expect("the one pool");
            let mut held = Vec::new();
            for n in [1, 5, 17, 2, 9] {
                held.push(pool.alloc(n).expect("room"));
                if n % 2 == 0 {
                    pool.free(&held.remove(0)).expect("handed out before");
                    pool.trim().expect("every rank is there");
                }
                let first = workers[0].mapped();
                for worker in &mut workers[1..] {
                    assert_eq!(worker.mapped(), first, "{}, {}", worker.stage, worker.rank);
                }
            }
            let last = workers.last_mut().expect("at least one");
            assert!(
                last.free_bytes() > 0,
                "the device answers in the rank's own process"
            );
            last.kill();
            let error = pool.alloc(30).expect_err("one rank is gone");
            assert!(matches!(error, AllocError::Broken(_)), "{error}");
        }
    }
}
