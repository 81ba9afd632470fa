//! Virtual time: a number that passes when the simulation says so, and the instants that real code
//! is told instead.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time of one run.
#[derive(Debug)]
pub(crate) struct Clock {
    /// Only differences to it mean anything.
    base: Instant,
    ns: AtomicU64,
}

impl Clock {
    pub(crate) fn new() -> Self {
        #[expect(
            clippy::disallowed_methods,
            reason = "an instant can be had nowhere else; which one it is makes no difference"
        )]
        let base = Instant::now();
        Self {
            base,
            ns: AtomicU64::new(0),
        }
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.ns.load(Ordering::Relaxed)
    }

    pub(crate) fn now(&self) -> Instant {
        self.at(self.now_ns())
    }

    pub(crate) fn at(&self, ns: u64) -> Instant {
        self.base + Duration::from_nanos(ns)
    }

    /// The inverse of [`at`](Self::at).
    pub(crate) fn ns_of(&self, instant: Instant) -> u64 {
        let since = instant.saturating_duration_since(self.base);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Time never goes back.
    pub(crate) fn advance_to(&self, ns: u64) {
        self.ns.fetch_max(ns, Ordering::Relaxed);
    }
}
