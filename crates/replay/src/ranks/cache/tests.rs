//! The cache of one rank, with and without losses.

use std::sync::atomic::{AtomicU32, Ordering};

use kvcached_mapper::{
    After, Cold, KvBuffers, Layout, LocalMapper, PageId, PageRun, PageSize, Readiness, Reconciled,
    Stage,
};
use kvcached_vmm::{Host, HostConfig};

use super::*;
use crate::ranks::oracle::Readable;
use crate::{Holder, Owner};

/// A cache of one rank, and that rank's mapper.
fn cache() -> (RankedCache, Arc<LocalMapper<Host>>) {
    let (plan, mapper, own) = parts();
    (RankedCache::alone(&plan, vec![own]).expect("ready"), mapper)
}

fn parts() -> (ModelPlan, Arc<LocalMapper<Host>>, OwnPool) {
    let spec = PoolSpec {
        layout: Layout::Contiguous,
        layers: 4,
        kv_buffers: KvBuffers::Two,
        block_bytes: 128 << 10,
        page_size: PageSize::Auto,
        capacity_bytes: 64 << 20,
    };
    let plan = ModelPlan {
        pools: vec![PoolPlan::new(spec, Reserve { min: 4, max: 16 }.into()).expect("a layout")],
        runs: RunChoice::default(),
        verify: true,
        memory_bytes: 64 << 20,
        others_bytes: 0,
    };
    let device = Arc::new(Host::new(HostConfig::new(64 << 20)).expect("a device"));
    let geometry = plan.pools[0].geometry.clone();
    let mapper = LocalMapper::new(device, geometry, Cold::Unbacked).expect("addresses");
    let mapper = Arc::new(mapper);
    let own = OwnPool {
        mapper: Arc::<LocalMapper<Host>>::clone(&mapper),
        memory: Arc::new(Readable {
            mapper: Arc::clone(&mapper),
            pool: 0,
        }),
    };
    (plan, mapper, own)
}

fn want(blocks: u32) -> Want {
    let owner = Owner {
        holder: Holder::Request(1),
        generation: 0,
    };
    Want {
        pool: PoolId(0),
        owner,
        blocks,
    }
}

#[test]
fn a_rank_with_a_page_too_many_or_too_few_is_found() {
    let (mut cache, mapper) = cache();
    cache.compare_ranks().expect("nobody to ask");
    assert!(cache.divergent().is_empty());
    let stray = PageRun::new(PageId(30), 1).expect("a page");
    mapper.map(&[stray]).expect("room");
    cache.compare_ranks().expect("nobody to ask");
    assert_eq!(cache.divergent().iter().collect::<Vec<_>>(), [&Rank(0)]);
    mapper.unmap(&[stray]).expect("mapped");
}

#[test]
fn memory_that_is_taken_away_under_a_block_is_found_when_it_is_freed() {
    let (mut cache, mapper) = cache();
    let mut blocks = Vec::new();
    cache.alloc(&[want(8)], &mut blocks).expect("room");
    cache.step_end().expect("not broken");
    let page = mapper.geometry().page_of(blocks[7].0).expect("on a page");
    let mut runs = mapper.mapped().into_iter();
    let run = runs.find(|run| run.contains(page)).expect("it is mapped");
    mapper.unmap(&[run]).expect("mapped");
    mapper.map(&[run]).expect("room");
    let returned = Return {
        pool: PoolId(0),
        owner: want(8).owner,
        blocks: &blocks,
    };
    cache.free(&[returned]).expect("a finding is no failure");
    assert_eq!(cache.checked().blocks, 8);
    assert!(cache.checked().corrupted > 0);
    assert_eq!(cache.held_bytes(), 0);
}

/// A rank that loses its memory when it is looked at for the `at`th time.
#[derive(Debug)]
struct Forgetful {
    mapper: Arc<LocalMapper<Host>>,
    looks: AtomicU32,
    at: u32,
}

impl Mapper for Forgetful {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.mapper.map(runs)
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.mapper.unmap_after(runs, after)
    }

    fn headroom(&self) -> Option<u32> {
        self.mapper.headroom()
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        self.mapper.ready()
    }

    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        let mut reconciled = self.mapper.reconcile(doubtful)?;
        if self.looks.fetch_add(1, Ordering::Relaxed) + 1 == self.at {
            let runs = self.mapper.mapped();
            self.mapper.unmap(&runs)?;
            self.mapper.map(&runs)?;
            reconciled.lost.push((Stage(0), Rank(1)));
        }
        Ok(reconciled)
    }
}

/// A cache with eight blocks handed out, whose content is lost when that is next looked for.
fn forgetful() -> (RankedCache, Vec<BlockId>) {
    let (plan, mapper, own) = parts();
    let mapper = Arc::new(Forgetful {
        mapper,
        looks: AtomicU32::new(0),
        at: 1,
    });
    let mut cache = RankedCache::over(
        &plan,
        vec![mapper],
        vec![own],
        Crew::default(),
        Arc::default(),
        Some(Turmoil::default()),
    )
    .expect("ready");
    let mut blocks = Vec::new();
    cache.alloc(&[want(8)], &mut blocks).expect("room");
    cache.step_end().expect("not broken");
    assert_eq!(cache.losses().expect("not broken"), 0);
    (cache, blocks)
}

fn returned(blocks: &[BlockId]) -> Return<'_> {
    Return {
        pool: PoolId(0),
        owner: want(8).owner,
        blocks,
    }
}

#[test]
fn blocks_that_are_not_dropped_after_a_loss_are_found_corrupted() {
    let (mut cache, blocks) = forgetful();
    cache.recover().expect("mended");
    assert_eq!(cache.losses().expect("not broken"), 1);
    cache
        .free(&[returned(&blocks)])
        .expect("a finding is no failure");
    assert_eq!((cache.checked().blocks, cache.checked().corrupted), (8, 8));
}

#[test]
fn blocks_that_are_dropped_after_a_loss_are_counted_and_not_taken_for_corrupted() {
    let (mut cache, blocks) = forgetful();
    cache.recover().expect("mended");
    assert_eq!(cache.losses().expect("not broken"), 1);
    cache.drop_lost(&[returned(&blocks)]).expect("not broken");
    assert_eq!((cache.checked().corrupted, cache.held_bytes()), (0, 0));
    let faults = cache.take_faults().expect("there is turmoil");
    assert_eq!(faults.blocks_lost, 8);

    let mut again = Vec::new();
    cache.alloc(&[want(8)], &mut again).expect("room");
    cache.step_end().expect("not broken");
    cache.free(&[returned(&again)]).expect("not broken");
    assert_eq!((cache.checked().blocks, cache.checked().corrupted), (8, 0));
}

#[test]
fn nothing_is_handed_out_after_a_loss_before_the_engine_knows_of_it() {
    let (mut cache, blocks) = forgetful();
    cache.recover().expect("mended");
    let held = cache.held_bytes();
    let mut out = Vec::new();
    let result = cache.alloc(&[want(1)], &mut out);
    assert!(matches!(result, Err(CacheError::Lost)));
    assert_eq!((out.len(), cache.held_bytes()), (0, held));
    assert_eq!(cache.losses().expect("not broken"), 1);
    cache.drop_lost(&[returned(&blocks)]).expect("not broken");
    cache.alloc(&[want(1)], &mut out).expect("it knows");
}

#[test]
fn blocks_of_a_batch_that_does_not_fit_are_all_given_back() {
    let (mut cache, _) = cache();
    let held = cache.held_bytes();
    let mut out = Vec::new();
    let result = cache.alloc(&[want(3), want(1000)], &mut out);
    assert!(matches!(result, Err(CacheError::Full)));
    assert_eq!((out.len(), cache.held_bytes()), (0, held));
    assert!(!cache.fits(&[1000]) && cache.fits(&[8]));
    cache.alloc(&[want(8)], &mut out).expect("nothing was kept");
}

#[test]
fn a_pool_that_is_not_asked_is_not_measured() {
    let (mut cache, _) = cache();
    drop(cache.take_calls());
    cache.alloc(&[want(0)], &mut Vec::new()).expect("nothing");
    assert_eq!(cache.take_calls(), []);
    cache.alloc(&[want(1)], &mut Vec::new()).expect("room");
    assert!(!cache.take_calls().is_empty());
}
