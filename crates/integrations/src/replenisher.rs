//! The one thread of a scheduler: it keeps the reserve of warm pages of all its pools.
//!
//! Woken by whoever takes the reserve out of its bounds, and now and then by itself, since memory
//! may have become free elsewhere. It holds no lock while it maps, and ends with its scheduler.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use kvcached_mapper::PoolId;
use kvcached_page_alloc::PageAllocator;

/// The running thread; dropping it stops and joins it.
#[derive(Debug)]
pub(crate) struct Replenisher {
    wake: Wake,
    thread: Option<JoinHandle<()>>,
}

/// Wakes the thread; costs next to nothing while it is awake.
#[derive(Debug, Clone)]
pub(crate) struct Wake {
    flags: Arc<Flags>,
    /// Room for one: more than one wake-up at a time means nothing.
    sender: SyncSender<()>,
}

#[derive(Debug, Default)]
struct Flags {
    /// It will look at the pools anyway.
    pending: AtomicBool,
    stop: AtomicBool,
}

/// Shortest time between two looks that nobody asked for.
const MIN_EVERY: Duration = Duration::from_millis(1);

/// A pool whose reserve is kept.
#[derive(Debug)]
struct Kept {
    pool: PoolId,
    pages: Arc<PageAllocator>,
    /// The last attempt failed, and that was logged.
    failed: bool,
}

impl Replenisher {
    /// Starts the thread. It looks at the pools once at once, and then whenever it is woken, or
    /// `every` so often.
    #[expect(
        clippy::disallowed_methods,
        reason = "the composition root starts the threads"
    )]
    pub(crate) fn start(
        pools: impl IntoIterator<Item = (PoolId, Arc<PageAllocator>)>,
        every: Duration,
    ) -> io::Result<Self> {
        let mut pools: Vec<Kept> = pools
            .into_iter()
            .map(|(pool, pages)| Kept {
                pool,
                pages,
                failed: false,
            })
            .collect();
        let (sender, receiver) = sync_channel(1);
        let flags = Arc::new(Flags::default());
        let wake = Wake {
            flags: Arc::clone(&flags),
            sender,
        };
        wake.nudge();
        let thread = std::thread::Builder::new()
            .name("kvcached-reserve".to_owned())
            .spawn(move || run(&mut pools, &flags, &receiver, every.max(MIN_EVERY)))?;
        Ok(Self {
            wake,
            thread: Some(thread),
        })
    }

    pub(crate) fn wake(&self) -> Wake {
        self.wake.clone()
    }
}

impl Drop for Replenisher {
    fn drop(&mut self) {
        self.wake.flags.stop.store(true, Ordering::Release);
        // If there is no room, it is about to wake up, and sees the flag.
        let _ = self.wake.sender.try_send(());
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("the thread that keeps the reserve panicked");
        }
    }
}

impl Wake {
    /// Makes the thread look at the pools soon.
    pub(crate) fn nudge(&self) {
        if !self.flags.pending.swap(true, Ordering::AcqRel) {
            // If there is no room, it is about to wake up anyway.
            let _ = self.sender.try_send(());
        }
    }
}

fn run(pools: &mut [Kept], flags: &Flags, receiver: &Receiver<()>, every: Duration) {
    loop {
        match receiver.recv_timeout(every) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        // Cleared before the work, so that whoever changes a pool meanwhile is not missed.
        flags.pending.store(false, Ordering::Release);
        let mut content = true;
        for kept in &mut *pools {
            content &= kept.replenish(&flags.stop);
        }
        if !content {
            // Full or broken, as it will still be a moment later: rest until the time is over
            // instead of being woken by every allocation.
            flags.pending.store(true, Ordering::Release);
            while receiver.try_recv().is_ok() {}
        }
        // Last, since a wake-up to stop may be among those just thrown away.
        if flags.stop.load(Ordering::Acquire) {
            return;
        }
    }
}

impl Kept {
    /// Brings the pool within its bounds; tells whether it got there.
    fn replenish(&mut self, stop: &AtomicBool) -> bool {
        while !stop.load(Ordering::Acquire) {
            match self.pages.replenish() {
                Ok(done) if done.full.is_some() => return false,
                Ok(done) => {
                    self.failed = false;
                    if !done.more {
                        return true;
                    }
                }
                Err(error) => {
                    // Once per failure, not once per attempt.
                    if !self.failed {
                        tracing::warn!(pool = %self.pool, %error, "the reserve cannot be kept");
                    }
                    self.failed = true;
                    return false;
                }
            }
        }
        true
    }
}
