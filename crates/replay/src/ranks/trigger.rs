//! Faults on their way to rank processes: between two batches, or in the midst of one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kvcached_mapper::{After, Health, MapError, Mapper, PageRun, Rank, Readiness, Reconciled};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::chaos::{Fault, FaultKind, Moment};

/// Strikes the ranks of one model when the time has come.
#[derive(Debug, Default)]
pub(crate) struct Trigger {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Waits for a batch.
    armed: Option<(Fault, Pid)>,
    /// What happened since somebody last asked.
    struck: Vec<Struck>,
}

/// A rank that was struck and is not back yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Struck {
    pub(crate) rank: Rank,
    pub(crate) kind: FaultKind,
    /// When the signal was sent.
    pub(crate) since: Instant,
    /// Virtual time of the fault.
    pub(crate) at: Duration,
}

/// A mapper under whose batches the ranks are struck.
#[derive(Debug)]
pub(crate) struct Harmed {
    pub(crate) inner: Arc<dyn Mapper>,
    pub(crate) trigger: Arc<Trigger>,
}

impl Trigger {
    /// `fault` befalls the process `victim`: now, or in the next batch. One that still waits for a
    /// batch happens now instead: nobody asked anything of the rank all the time.
    pub(crate) fn arm(&self, fault: Fault, victim: Pid) {
        let overdue = self.state().armed.take();
        if let Some((overdue, victim)) = overdue {
            self.strike(overdue, victim);
        }
        if self.has_struck(fault.rank) {
            // It cannot be harmed twice at a time.
            return;
        }
        match fault.moment {
            Moment::Idle => self.strike(fault, victim),
            Moment::InBatch(_) => self.state().armed = Some((fault, victim)),
        }
    }

    /// Nothing more happens, unless what waited for a batch is armed again.
    pub(crate) fn disarm(&self) -> Option<(Fault, Pid)> {
        self.state().armed.take()
    }

    /// Has a fault wait again that was called off meanwhile.
    pub(crate) fn rearm(&self, waiting: Option<(Fault, Pid)>) {
        self.state().armed = waiting;
    }

    /// Nobody was struck since somebody last asked.
    pub(crate) fn is_quiet(&self) -> bool {
        self.state().struck.is_empty()
    }

    /// Who was struck since this was last asked.
    pub(crate) fn take(&self) -> Vec<Struck> {
        std::mem::take(&mut self.state().struck)
    }

    fn has_struck(&self, rank: Rank) -> bool {
        self.state().struck.iter().any(|struck| struck.rank == rank)
    }

    /// Makes a call in whose midst the armed fault happens. It has happened when this returns.
    #[expect(
        clippy::disallowed_methods,
        reason = "a fault comes at its own time, whatever the call is doing then"
    )]
    fn during<R>(&self, call: impl FnOnce() -> R) -> R {
        let Some((fault, victim)) = self.state().armed.take() else {
            return call();
        };
        let after = match fault.moment {
            Moment::InBatch(after) => after,
            Moment::Idle => Duration::ZERO,
        };
        if after.is_zero() {
            self.strike(fault, victim);
            return call();
        }
        thread::scope(|scope| {
            let late = move || {
                thread::sleep(after);
                self.strike(fault, victim);
            };
            let started = thread::Builder::new().spawn_scoped(scope, late);
            let result = call();
            if started.is_err() {
                // Without a thread it comes after the call.
                self.strike(fault, victim);
            }
            result
        })
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "a stall has a length, and it began just now"
    )]
    fn strike(&self, fault: Fault, victim: Pid) {
        let signal = match fault.kind {
            FaultKind::Kill => Signal::SIGKILL,
            FaultKind::Stall(_) => Signal::SIGSTOP,
        };
        let rank = fault.rank;
        // The process was not waited for, so its number is still its own.
        if let Err(error) = kill(victim, signal) {
            tracing::warn!(%rank, %signal, %error, "a rank could not be struck");
            return;
        }
        tracing::debug!(%rank, %signal, "struck a rank");
        self.state().struck.push(Struck {
            rank,
            kind: fault.kind,
            since: Instant::now(),
            at: fault.at,
        });
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mapper for Harmed {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.trigger.during(|| self.inner.map(runs))
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.trigger.during(|| self.inner.unmap_after(runs, after))
    }

    fn headroom(&self) -> Option<u32> {
        self.inner.headroom()
    }

    fn trim(&self) {
        self.inner.trim();
    }

    fn tend(&self, now: Instant) -> Option<Instant> {
        self.inner.tend(now)
    }

    fn kept_bytes(&self) -> u64 {
        self.inner.kept_bytes()
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        self.inner.ready()
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        self.inner.reconcile(doubtful)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that does nothing until it is ended.
    struct Victim(Child);

    impl Victim {
        fn new() -> Self {
            let child = Command::new("cat").stdin(Stdio::piped()).spawn();
            Self(child.expect("every system has it"))
        }

        fn process(&self) -> Pid {
            Pid::from_raw(i32::try_from(self.0.id()).expect("a process id"))
        }

        fn signal(&mut self) -> Option<i32> {
            self.0.wait().expect("a child").signal()
        }
    }

    impl Drop for Victim {
        fn drop(&mut self) {
            drop(self.0.kill());
            drop(self.0.wait());
        }
    }

    fn fault(rank: u16, moment: Moment) -> Fault {
        Fault {
            at: Duration::from_secs(1),
            model: 0,
            rank: Rank(rank),
            kind: FaultKind::Kill,
            moment,
        }
    }

    fn struck(trigger: &Trigger) -> Vec<u16> {
        let struck = trigger.take();
        struck.into_iter().map(|struck| struck.rank.0).collect()
    }

    #[test]
    fn a_fault_in_a_batch_has_happened_when_the_batch_returns() {
        for after_us in [0, 1, 100, 5_000] {
            let trigger = Trigger::default();
            let mut victim = Victim::new();
            let moment = Moment::InBatch(Duration::from_micros(after_us));
            trigger.arm(fault(1, moment), victim.process());
            assert!(trigger.is_quiet(), "it waits for a batch");
            assert_eq!(trigger.during(|| 7), 7);
            assert_eq!(struck(&trigger), [1]);
            assert_eq!(victim.signal(), Some(Signal::SIGKILL as i32));
            trigger.during(|| ());
            assert!(trigger.is_quiet(), "it happens once");
        }
    }

    #[test]
    fn a_fault_that_no_batch_came_for_happens_when_the_next_is_due() {
        let trigger = Trigger::default();
        let mut victims = [Victim::new(), Victim::new()];
        let moment = Moment::InBatch(Duration::ZERO);
        trigger.arm(fault(1, moment), victims[0].process());
        trigger.arm(fault(2, moment), victims[1].process());
        assert_eq!(struck(&trigger), [1]);
        trigger.during(|| ());
        assert_eq!(struck(&trigger), [2]);
        for victim in &mut victims {
            assert_eq!(victim.signal(), Some(Signal::SIGKILL as i32));
        }
    }

    #[test]
    fn a_fault_that_is_called_off_does_not_happen() {
        let trigger = Trigger::default();
        let mut victim = Victim::new();
        let moment = Moment::InBatch(Duration::ZERO);
        trigger.arm(fault(1, moment), victim.process());
        let waiting = trigger.disarm();
        trigger.during(|| ());
        assert!(trigger.is_quiet());
        let running = victim.0.try_wait().expect("a child");
        assert_eq!(running, None);
        trigger.rearm(waiting);
        trigger.during(|| ());
        assert_eq!(struck(&trigger), [1]);
    }

    #[test]
    fn a_rank_that_is_not_back_is_not_struck_again() {
        let trigger = Trigger::default();
        let victim = Victim::new();
        trigger.arm(fault(1, Moment::Idle), victim.process());
        trigger.arm(fault(1, Moment::Idle), victim.process());
        trigger.arm(fault(1, Moment::InBatch(Duration::ZERO)), victim.process());
        trigger.during(|| ());
        assert_eq!(struck(&trigger), [1]);
    }
}
