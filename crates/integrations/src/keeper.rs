//! The one thread of a scheduler: it keeps the reserve of warm pages of all its pools, and brings
//! ranks back that do not count.
//!
//! Woken by whoever takes the reserve out of its bounds or meets a rank that is lost, and now and
//! then by itself, since memory may have become free elsewhere and a rank may be gone without
//! anybody asking it. It holds no lock while it maps, and ends with its scheduler.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvcached_mapper::{Health, PoolId};
use kvcached_page_alloc::{PageAllocator, Repaired};

/// The running thread; dropping it stops and joins it.
#[derive(Debug)]
pub(crate) struct Keeper {
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
    /// Somebody met a rank that is lost, and it has not been looked at since.
    alarm: AtomicBool,
    stop: AtomicBool,
}

/// Shortest time between two looks that nobody asked for.
const MIN_EVERY: Duration = Duration::from_millis(1);

/// Longest such time, which any clock can add.
const MAX_EVERY: Duration = Duration::from_secs(24 * 60 * 60);

/// Pause after the first vain attempt to bring a rank back; it doubles with every further one.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// Longest pause between two attempts. A rank that listens again waits so long at most.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// A pool that is looked after.
#[derive(Debug)]
pub(crate) struct Kept {
    pool: PoolId,
    pages: Arc<PageAllocator>,
    keeps_reserve: bool,
    /// The last attempt to keep the reserve failed, and that was logged.
    failed: bool,
    /// When the ranks are looked at next.
    look_at: Option<Instant>,
    /// How long after a vain attempt to bring a rank back; zero while all count.
    pause: Duration,
}

impl Kept {
    pub(crate) const fn new(pool: PoolId, pages: Arc<PageAllocator>, keeps_reserve: bool) -> Self {
        Self {
            pool,
            pages,
            keeps_reserve,
            failed: false,
            look_at: None,
            pause: Duration::ZERO,
        }
    }
}

impl Keeper {
    /// Starts the thread. It looks at the pools once at once, and then whenever it is woken, or
    /// `every` so often.
    #[expect(
        clippy::disallowed_methods,
        reason = "the composition root starts the threads"
    )]
    pub(crate) fn start(mut pools: Vec<Kept>, every: Duration) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(1);
        let flags = Arc::new(Flags::default());
        let wake = Wake {
            flags: Arc::clone(&flags),
            sender,
        };
        wake.nudge();
        let thread = std::thread::Builder::new()
            .name("kvcached-keeper".to_owned())
            .spawn(move || {
                let every = every.clamp(MIN_EVERY, MAX_EVERY);
                run(&mut pools, &flags, &receiver, every);
            })?;
        Ok(Self {
            wake,
            thread: Some(thread),
        })
    }

    pub(crate) fn wake(&self) -> Wake {
        self.wake.clone()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.wake.flags.stop.store(true, Ordering::Release);
        // If there is no room, it is about to wake up, and sees the flag.
        let _ = self.wake.sender.try_send(());
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("the thread that keeps the pools panicked");
        }
    }
}

impl Wake {
    /// Makes the thread look at the reserves soon.
    pub(crate) fn nudge(&self) {
        if !self.flags.pending.swap(true, Ordering::AcqRel) {
            // If there is no room, it is about to wake up anyway.
            let _ = self.sender.try_send(());
        }
    }

    /// Makes the thread look at the ranks soon; once, until it has.
    pub(crate) fn alarm(&self) {
        if !self.flags.alarm.swap(true, Ordering::AcqRel) {
            let _ = self.sender.try_send(());
        }
    }
}

fn run(pools: &mut [Kept], flags: &Flags, receiver: &Receiver<()>, every: Duration) {
    loop {
        let next = pools.iter().filter_map(|kept| kept.look_at).min();
        let mut pause = next.map_or(every, |at| at.saturating_duration_since(now()));
        if flags.alarm.load(Ordering::Acquire) && pools.iter().all(|kept| kept.pause.is_zero()) {
            // Its wake-up may have been thrown away below.
            pause = Duration::ZERO;
        }
        match receiver.recv_timeout(pause.min(every)) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        // Cleared before the work, so that whoever changes a pool meanwhile is not missed.
        flags.pending.store(false, Ordering::Release);
        let alarmed = flags.alarm.load(Ordering::Acquire);
        let mut content = true;
        let mut healthy = true;
        for kept in &mut *pools {
            if flags.stop.load(Ordering::Acquire) {
                return;
            }
            healthy &= kept.look(alarmed, every);
            content &= kept.replenish(&flags.stop);
        }
        if healthy {
            flags.alarm.store(false, Ordering::Release);
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

#[expect(
    clippy::disallowed_methods,
    reason = "the composition root's thread has the clock of its pauses"
)]
fn now() -> Instant {
    Instant::now()
}

impl Kept {
    /// Looks at the ranks if it is time to, and makes one attempt to bring those back that do not
    /// count; tells whether all do, as far as is known.
    fn look(&mut self, alarmed: bool, every: Duration) -> bool {
        let due = self.look_at.is_none_or(|at| at <= now());
        if !(due || alarmed && self.pause.is_zero()) {
            return self.pause.is_zero();
        }
        let pool = self.pool;
        let health = match self.pages.repair() {
            Ok(Repaired { lost, health, .. }) => {
                for (stage, rank) in lost {
                    tracing::warn!(%pool, %stage, %rank, "a rank lost what its pages held");
                }
                health
            }
            Err(error) => {
                tracing::debug!(%pool, %error, "a rank could not be brought back");
                self.pages.health()
            }
        };
        self.pause = match health {
            Health::Healthy => Duration::ZERO,
            _ => (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE),
        };
        let wait = match self.pause {
            Duration::ZERO => every,
            pause => pause,
        };
        self.look_at = Some(now() + wait);
        self.pause.is_zero()
    }

    /// Brings the pool within its bounds; tells whether it got there.
    fn replenish(&mut self, stop: &AtomicBool) -> bool {
        if !self.keeps_reserve {
            return true;
        }
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

#[cfg(test)]
mod tests {
    use kvcached_mapper::testing::RecordingMapper;
    use kvcached_mapper::{Cause, MapError, Rank, Stage, Suspect};
    use kvcached_page_alloc::PageAllocatorConfig;

    use super::*;

    #[test]
    fn attempts_in_vain_come_ever_later_up_to_a_bound_and_nobody_hastens_them() {
        let mapper = Arc::new(RecordingMapper::new(8));
        let config = PageAllocatorConfig::new(8, 2 << 20);
        let pages = PageAllocator::new(config, Arc::<RecordingMapper>::clone(&mapper)).unwrap();
        let mut kept = Kept::new(PoolId(0), Arc::new(pages), false);
        let every = Duration::from_millis(200);
        assert!(kept.look(false, every));
        let (stage, rank) = (Stage(0), Rank(1));
        let reason = "no answer".to_owned();
        let ranks = vec![Suspect {
            stage,
            rank,
            reason,
        }];
        mapper.set_health(Health::Fenced { ranks, pages: 0 });
        let error = MapError::clean(Cause::Diverged { stage, rank });
        mapper.fail_reconcile(Some(error));
        // Whoever meets the rank first need not wait for the next look.
        assert!(!kept.look(true, every));
        let mut pauses = vec![kept.pause.as_millis()];
        for _ in 0..8 {
            kept.look_at = None;
            assert!(!kept.look(false, every));
            pauses.push(kept.pause.as_millis());
        }
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 250, 250, 250]);
        mapper.set_health(Health::Healthy);
        mapper.fail_reconcile(None);
        kept.look_at = Some(now() + Duration::from_secs(600));
        assert!(!kept.look(true, every), "a pause is kept to");
        kept.look_at = None;
        assert!(kept.look(false, every));
        assert!(kept.pause.is_zero());
    }
}
