//! Work in flight and memory that changes hands: with epochs, work never reads a word of the next
//! owner; without them it does, on the same device by the same test.
//!
//! Cold pages read as zero here, so that a read too late is a wrong word and not a fault, which
//! would end the context of the whole process.

use std::sync::Arc;
use std::time::Duration;

use kvcached_mapper::{
    After, Cause, Cold, Epoch, Epochs, KvBuffers, Layout, LocalMapper, MapError, Mapper, PageId,
    PageRun, PageSize, PoolSpec,
};
use kvcached_vmm::{Cuda, CudaStream, Driver, Fence};

use crate::gpu;
use crate::watch::{Counts, Watcher};

const OWNER: u32 = 0x6b76_0001;
const NEXT: u32 = 0x6b76_0002;

/// Longer than anything takes; work that a test forgets ends then.
const LIMIT: Duration = Duration::from_secs(5);

fn pool(cuda: &Arc<Cuda>, epochs: &Arc<Epochs>) -> LocalMapper<Cuda> {
    let spec = PoolSpec {
        layout: Layout::Contiguous,
        layers: 1,
        kv_buffers: KvBuffers::Two,
        block_bytes: 128 << 10,
        page_size: PageSize::Auto,
        capacity_bytes: 64 << 20,
    };
    let geometry = spec
        .resolve(cuda.properties().granularity)
        .expect("a layout");
    let mapper = LocalMapper::new(Arc::clone(cuda), geometry, Cold::Zero).expect("addresses");
    mapper.with_epochs(Arc::clone(epochs))
}

fn run() -> PageRun {
    PageRun::new(PageId(3), 4).expect("pages")
}

/// Backs the run and writes `tag` everywhere in it.
fn hand_out(mapper: &LocalMapper<Cuda>, tag: u32) {
    mapper.map(&[run()]).expect("room");
    for extent in mapper.geometry().extents(run()) {
        let words = usize::try_from(extent.len / 4).expect("it fits into memory");
        let bytes = tag.to_le_bytes().repeat(words);
        mapper.write(extent, &bytes).expect("mapped");
    }
}

/// Address and length of the run, which this layout has in one piece.
fn place(mapper: &LocalMapper<Cuda>) -> (u64, u64) {
    let extent = mapper.geometry().extents(run()).next().expect("one extent");
    let base = mapper.tensor_bases()[extent.tensor as usize];
    (base + extent.offset, extent.len)
}

#[test]
#[ignore = "needs a GPU"]
fn a_fence_is_over_when_the_work_before_it_is_and_not_sooner() {
    let cuda = gpu();
    let epochs = Arc::new(Epochs::new(Duration::ZERO));
    let mapper = pool(&cuda, &epochs);
    let watcher = Watcher::new(&cuda);
    hand_out(&mapper, OWNER);

    let before = cuda.fence(CudaStream::DEFAULT).expect("an event");
    let watch = watcher.launch(&cuda, place(&mapper), OWNER, LIMIT);
    let after = watch.fence();
    watch.read_on(1);
    assert_eq!(
        before.is_over(),
        Ok(true),
        "another stream, and nothing on it"
    );
    watch.pause();
    for _ in 0..100 {
        assert_eq!(after.is_over(), Ok(false), "the kernel is only paused");
    }
    watch.stop();
    watch.counts();
    assert_eq!(after.is_over(), Ok(true));

    // A fence has its own hold on the device.
    drop((watcher, mapper, cuda));
    assert_eq!((before.is_over(), after.is_over()), (Ok(true), Ok(true)));
}

#[test]
#[ignore = "needs a GPU"]
fn with_epochs_work_in_flight_never_reads_a_word_of_the_next_owner() {
    const EPOCHS: u64 = 50;
    let cuda = gpu();
    let epochs = Arc::new(Epochs::new(LIMIT));
    let mapper = pool(&cuda, &epochs);
    let watcher = Watcher::new(&cuda);
    let (mut overlaps, mut words) = (0, 0);
    for epoch in (1..=EPOCHS).map(Epoch) {
        hand_out(&mapper, OWNER);
        let watch = watcher.launch(&cuda, place(&mapper), OWNER, Duration::from_millis(5));
        let end: Arc<dyn Fence> = Arc::new(watch.fence());
        epochs.launched(epoch, Arc::clone(&end));
        watch.read_on(1);

        overlaps += u32::from(end.is_over() == Ok(false));
        mapper
            .unmap_after(&[run()], After::epoch(epoch))
            .expect("the work ends by itself");
        hand_out(&mapper, NEXT);

        let counts = watch.counts();
        assert_eq!((counts.zero, counts.foreign), (0, 0), "{epoch}: {counts:?}");
        words += u64::from(counts.own);
        mapper
            .unmap_after(&[run()], After::NOTHING)
            .expect("mapped");
    }
    println!("{words} words read, {overlaps} of {EPOCHS} frees while the work was running");
    assert!(words > 0 && overlaps > 0, "nothing was in flight");
}

/// The kernel has read the run once and will again; meanwhile the run is freed, `after` so much,
/// and handed to the next owner if that is granted.
fn reuse_between_two_reads(after: After) -> (Result<(), MapError>, Counts) {
    let cuda = gpu();
    // As long as a background thread would wait before it turns to something else.
    let epochs = Arc::new(Epochs::new(Duration::from_millis(20)));
    let mapper = pool(&cuda, &epochs);
    let watcher = Watcher::new(&cuda);
    hand_out(&mapper, OWNER);
    let watch = watcher.launch(&cuda, place(&mapper), OWNER, LIMIT);
    epochs.launched(Epoch(1), Arc::new(watch.fence()));
    watch.read_on(1);
    watch.pause();

    let freed = mapper.unmap_after(&[run()], after);
    if freed.is_ok() {
        hand_out(&mapper, NEXT);
    } else {
        assert_eq!(mapper.mapped(), [run()], "refused, and nothing changed");
    }
    watch.go_on();
    watch.read_on(2);
    watch.stop();
    let counts = watch.counts();

    if freed.is_err() {
        mapper
            .unmap_after(&[run()], after)
            .expect("the work has ended now");
        hand_out(&mapper, NEXT);
    }
    (freed, counts)
}

#[test]
#[ignore = "needs a GPU"]
fn memory_that_work_in_flight_reads_is_refused_with_epochs_and_given_away_without() {
    let (freed, counts) = reuse_between_two_reads(After::epoch(Epoch(1)));
    println!("with epochs: {freed:?}, {counts:?}");
    let epoch = Epoch(1);
    assert_eq!(freed, Err(MapError::clean(Cause::InFlight { epoch })));
    assert_eq!((counts.zero, counts.foreign), (0, 0));
    assert!(counts.own > 0);

    let (freed, counts) = reuse_between_two_reads(After::NOTHING);
    println!("without: {freed:?}, {counts:?}");
    assert_eq!(freed, Ok(()), "nothing holds it back");
    assert!(counts.own > 0, "it read its own words at first");
    assert!(counts.foreign > 0, "and then those of the next owner");
}
