//! The one thread of a scheduler: it maps the reserves of all its pools ahead, unmaps behind those
//! who free, and brings ranks back that do not count.
//!
//! Woken by whoever leaves a pool with something to do or meets a rank that is lost, and now and
//! then by itself, since time has passed for the demand, memory may have become free elsewhere, and a
//! rank may be gone without anybody asking it. It holds no lock while it maps, and ends with its
//! scheduler.
//!
//! All calls to the device that nobody waits for are made here, in small steps, the pools by turns;
//! before each step it lets allocations go first that wait for the device.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvcached_mapper::{Health, PoolId};
use kvcached_page_alloc::{FullReason, PageAllocator, Repaired, Turns};

/// The running thread; dropping it stops and joins it.
#[derive(Debug)]
pub(crate) struct Keeper {
    flags: Arc<Flags>,
    sender: SyncSender<()>,
    thread: Option<JoinHandle<()>>,
}

/// Wakes the thread for one pool; costs next to nothing while it is awake.
#[derive(Debug, Clone)]
pub(crate) struct Wake {
    flags: Arc<Flags>,
    /// The device is full or the pool is broken, as it will still be a moment later: that is tried
    /// again when the time is over, and not after every allocation.
    resting: Arc<AtomicBool>,
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

/// Longest time for which a pool rests that found the device full, or failed.
const LONGEST_REST: Duration = Duration::from_secs(1);

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
    /// The last step failed, and that was logged.
    failed: bool,
    /// Until when nothing is mapped, nor unmapped if the last step failed.
    rests_until: Option<Instant>,
    /// Whether that is in the future, for those who would wake the thread.
    resting: Arc<AtomicBool>,
    /// When the ranks are looked at next.
    look_at: Option<Instant>,
    /// How long after a vain attempt to bring a rank back; zero while all count.
    pause: Duration,
    /// When memory that is kept in this process for later has been kept for too long.
    tend_at: Option<Instant>,
}

impl Kept {
    pub(crate) fn new(pool: PoolId, pages: Arc<PageAllocator>, keeps_reserve: bool) -> Self {
        Self {
            pool,
            pages,
            keeps_reserve,
            failed: false,
            rests_until: None,
            resting: Arc::default(),
            look_at: None,
            pause: Duration::ZERO,
            tend_at: None,
        }
    }

    pub(crate) const fn resting(&self) -> &Arc<AtomicBool> {
        &self.resting
    }
}

impl Keeper {
    /// Starts the thread. It looks at the pools once at once, and then whenever it is woken, or
    /// `every` so often, which is also how often time passes for the demand of the pools. `turns` are
    /// those of all the pools.
    #[expect(
        clippy::disallowed_methods,
        reason = "the composition root starts the threads"
    )]
    pub(crate) fn start(mut pools: Vec<Kept>, turns: Turns, every: Duration) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(1);
        // It has the first look before anybody wakes it.
        let flags = Arc::new(Flags::default());
        let seen = Arc::clone(&flags);
        let thread = std::thread::Builder::new()
            .name("kvcached-keeper".to_owned())
            .spawn(move || {
                let every = every.clamp(MIN_EVERY, MAX_EVERY);
                run(&mut pools, &turns, &seen, &receiver, every);
            })?;
        Ok(Self {
            flags,
            sender,
            thread: Some(thread),
        })
    }

    /// Wakes the thread for the pool that has this flag.
    pub(crate) fn wake(&self, resting: Arc<AtomicBool>) -> Wake {
        Wake {
            flags: Arc::clone(&self.flags),
            resting,
            sender: self.sender.clone(),
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.flags.stop.store(true, Ordering::Release);
        // If there is no room, it is about to wake up, and sees the flag.
        let _ = self.sender.try_send(());
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
    /// Makes the thread look at the pools soon, unless this one rests.
    pub(crate) fn nudge(&self) {
        if !self.resting.load(Ordering::Relaxed) {
            self.hasten();
        }
    }

    /// Makes the thread look at the pools soon, even if this one rests: there is something for another
    /// to do, or something to unmap.
    pub(crate) fn hasten(&self) {
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

fn run(pools: &mut [Kept], turns: &Turns, flags: &Flags, receiver: &Receiver<()>, every: Duration) {
    let mut tick_at = now() + every;
    loop {
        // Cleared before the work, so that whoever changes a pool meanwhile is not missed.
        flags.pending.store(false, Ordering::Release);
        let alarmed = flags.alarm.swap(false, Ordering::AcqRel);
        let ticks = now() >= tick_at;
        if ticks {
            tick_at = now() + every;
        }
        let mut healthy = true;
        for kept in &mut *pools {
            if flags.stop.load(Ordering::Acquire) {
                return;
            }
            if ticks {
                kept.pages.tick();
            }
            turns.give_way();
            healthy &= kept.look(alarmed, every);
        }
        if !healthy {
            // Attempts come at their own pace: nobody need wake this thread for them.
            flags.alarm.store(true, Ordering::Release);
        }
        // One step of each at a time, so that a pool with much to do holds up no other; and at least
        // one, but not so many that time does not pass, or that ranks and kept memory have to wait.
        let times = pools.iter().flat_map(|kept| [kept.look_at, kept.tend_at]);
        let until = times.flatten().fold(tick_at, Instant::min);
        let mut left: Vec<&mut Kept> = pools.iter_mut().collect();
        loop {
            left.retain_mut(|kept| {
                // A lock that is let go and taken again at once mostly stays with who has it, so
                // demands are looked for before each step and not left to meet it.
                turns.give_way();
                !flags.stop.load(Ordering::Acquire) && kept.step(every)
            });
            let alarmed = healthy && flags.alarm.load(Ordering::Acquire);
            if left.is_empty() || alarmed || now() >= until {
                break;
            }
        }
        let is_done = left.is_empty();
        if flags.stop.load(Ordering::Acquire) {
            return;
        }
        for kept in &mut *pools {
            turns.give_way();
            kept.tend_at = kept.pages.tend(now());
        }
        let times = pools
            .iter()
            .flat_map(|kept| [kept.look_at, kept.rests_until, kept.tend_at]);
        let next = times.flatten().fold(tick_at, Instant::min);
        let pause = match is_done {
            true => next.saturating_duration_since(now()),
            false => Duration::ZERO,
        };
        if let Err(RecvTimeoutError::Disconnected) = receiver.recv_timeout(pause) {
            return;
        }
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

    /// One step towards what the recent demand and the limit ask for; tells whether another one right
    /// away makes sense.
    fn step(&mut self, every: Duration) -> bool {
        let rests = self.rests_until.is_some_and(|until| until > now());
        if rests && self.failed {
            return false;
        }
        if !rests {
            self.rest(None);
        }
        let result = match self.keeps_reserve {
            false => self.pages.keep_to_limit(),
            // On a full device there is all the more reason to unmap.
            true if rests => self.pages.shed(),
            true => self.pages.replenish(),
        };
        match result {
            Ok(done) => {
                self.failed = false;
                // Of other reasons whoever makes room tells; a neighbour that frees memory does not.
                if done.full == Some(FullReason::DeviceMemory) && !done.more {
                    self.rest(Some(every));
                }
                done.more
            }
            Err(error) => {
                // Once per failure, not once per attempt.
                if !self.failed {
                    tracing::warn!(pool = %self.pool, %error, "the reserve or the limit cannot be kept");
                }
                self.failed = true;
                self.rest(Some(every));
                false
            }
        }
    }

    fn rest(&mut self, pause: Option<Duration>) {
        self.rests_until = pause.map(|pause| now() + pause.min(LONGEST_REST));
        self.resting.store(pause.is_some(), Ordering::Relaxed);
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
