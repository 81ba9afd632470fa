//! How a model goes on after a rank was struck: the rank comes back, and the pools are repaired
//! until every rank is known to have what it should.
//!
//! The repair does not know when the rank is back. Like the thread that does it in an engine, it
//! tries again and again, with pauses that grow; so what is measured is what an engine would see.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use kvcached_integrations::{Pool, Scheduler};
use kvcached_mapper::Health;
use thiserror::Error;

use super::RankedCache;
use crate::Broken;
use crate::chaos::{Fault, FaultKind, Faults};
use crate::ranks::crew::{Crew, CrewError};
use crate::ranks::trigger::{Struck, Trigger};

/// Pause after the first attempt that failed; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// No pause is longer.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// A model that is not whole again after so long never will be.
const PATIENCE: Duration = Duration::from_secs(60);

/// Faults of one model: those to come, and those that were.
#[derive(Debug, Default)]
pub(crate) struct Turmoil {
    pub(crate) trigger: Arc<Trigger>,
    pub(crate) faults: Faults,
}

/// Why a model does not go on.
#[derive(Debug, Error)]
enum NotMended {
    #[error("a pool is still not whole after {} s: {health}", PATIENCE.as_secs())]
    TooLong { health: Health },
    #[error(transparent)]
    Crew(#[from] CrewError),
    #[error("no thread to bring ranks back: {0}")]
    Thread(#[source] std::io::Error),
}

impl RankedCache {
    /// A fault befalls this model, now or in its next batch.
    pub(crate) fn befall(&self, fault: Fault) {
        let victim = self.crew.process(fault.rank);
        if let (Some(turmoil), Some(victim)) = (&self.turmoil, victim) {
            turmoil.trigger.arm(fault, victim);
        }
    }

    /// What the faults of this model came to.
    pub(crate) fn take_faults(&mut self) -> Option<Faults> {
        let turmoil = self.turmoil.as_mut()?;
        Some(std::mem::take(&mut turmoil.faults))
    }

    /// Goes on, if a rank was struck: see [`recover`](Self::recover).
    pub(super) fn recover_if_struck(&mut self) -> Result<(), Broken> {
        match &self.turmoil {
            Some(turmoil) if !turmoil.trigger.is_quiet() => self.recover(),
            _ => Ok(()),
        }
    }

    /// Goes on, if a rank was struck or a pool is not whole.
    pub(super) fn settle(&mut self) -> Result<(), Broken> {
        if self.turmoil.is_some() && !is_whole(&self.scheduler) {
            return self.recover();
        }
        self.recover_if_struck()
    }

    /// Waits until every rank that was struck is back and every pool is whole; then looks whether all
    /// ranks have the same pages indeed.
    pub(super) fn recover(&mut self) -> Result<(), Broken> {
        let lost_before = self.contents_lost();
        let Some(turmoil) = &mut self.turmoil else {
            return Ok(());
        };
        // A repair may take memory away, and is not to be struck for it.
        let waiting = turmoil.trigger.disarm();
        let struck = turmoil.trigger.take();
        let faults = &mut turmoil.faults;
        self.crew.look_after(&struck).map_err(Broken::new)?;
        let mended = mend(&mut self.crew, &self.scheduler, &struck).map_err(Broken::new)?;
        turmoil.trigger.rearm(waiting);
        faults.fenced += u32::from(mended.was_fenced);
        let was_lost = contents_lost(&self.scheduler) > lost_before;
        faults.losses += u32::from(was_lost);
        // A stall that nobody noticed is nothing to recover from.
        let was_harmed = mended.was_fenced || was_lost;
        for Struck { kind, at, .. } in struck {
            match kind {
                FaultKind::Kill => {
                    faults.kills += 1;
                    faults.restarts += 1;
                }
                FaultKind::Stall(_) => faults.stalls += 1,
            }
            faults.at.push(at);
            if was_harmed {
                faults.recoveries.push(mended.took);
            }
        }
        // Whole is what the coordinator believes.
        self.compare()
    }

    /// How often a repair found that a rank had lost what it held.
    pub(super) fn contents_lost(&self) -> u64 {
        contents_lost(&self.scheduler)
    }
}

impl Drop for RankedCache {
    fn drop(&mut self) {
        if let Some(Turmoil { trigger, .. }) = &self.turmoil {
            // What is given back from here on is the end, and no batch to be met.
            let _ = trigger.disarm();
            // A replay that ends early may leave ranks stopped; they are to end, too.
            self.crew.go_on(&trigger.take());
        }
    }
}

struct Mended {
    was_fenced: bool,
    /// From the moment the last rank was back.
    took: Duration,
}

#[expect(
    clippy::disallowed_methods,
    reason = "recovery is measured, and its attempts are spaced, by the clock"
)]
fn mend(crew: &mut Crew, scheduler: &Scheduler, struck: &[Struck]) -> Result<Mended, NotMended> {
    let start = Instant::now();
    let mut was_fenced = is_fenced(scheduler);
    thread::scope(|scope| {
        let (tell, told) = mpsc::sync_channel(1);
        thread::Builder::new()
            // Somebody waits for this message as long as the scope lasts, or does not care.
            .spawn_scoped(scope, move || drop(tell.send(crew.bring_back(struck))))
            .map_err(NotMended::Thread)?;
        let mut back: Option<Instant> = None;
        let mut pause = FIRST_PAUSE;
        loop {
            // An attempt counts only if every rank was back when it began.
            let is_back = back.is_some();
            let is_whole = repair(scheduler);
            was_fenced |= is_fenced(scheduler);
            if let (true, true, Some(back)) = (is_back, is_whole, back) {
                let took = back.elapsed();
                return Ok(Mended { was_fenced, took });
            }
            if start.elapsed() > PATIENCE {
                let health = health(scheduler);
                return Err(NotMended::TooLong { health });
            }
            if is_whole && !is_back {
                // All is well as far as the coordinator can see.
                match told.recv_timeout(PATIENCE) {
                    Ok(outcome) => back = Some(outcome?),
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
                }
                continue;
            }
            thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
            if back.is_none()
                && let Ok(outcome) = told.try_recv()
            {
                back = Some(outcome?);
            }
        }
    })
}

fn contents_lost(scheduler: &Scheduler) -> u64 {
    scheduler.pools().iter().map(Pool::contents_lost).sum()
}

/// One attempt on every pool. `true`: all of them are whole.
fn repair(scheduler: &Scheduler) -> bool {
    for pool in scheduler.pools() {
        if let Err(error) = pool.repair() {
            tracing::debug!(pool = %pool.id(), %error, "not repaired yet");
            return false;
        }
    }
    is_whole(scheduler)
}

fn is_whole(scheduler: &Scheduler) -> bool {
    health(scheduler) == Health::Healthy
}

fn is_fenced(scheduler: &Scheduler) -> bool {
    let mut pools = scheduler.pools().iter();
    pools.any(|pool| pool.health().is_fenced())
}

/// The worst of all pools.
fn health(scheduler: &Scheduler) -> Health {
    let ranks = scheduler.pools().iter().map(Pool::health);
    ranks
        .max_by_key(|health| match health {
            Health::Healthy => 0,
            Health::Degraded { .. } => 1,
            Health::Fenced { .. } => 2,
        })
        .unwrap_or_default()
}
