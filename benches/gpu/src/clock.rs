//! The clock of the benchmark, in one place.

use std::time::{Duration, Instant};

use nix::poll::{PollTimeout, poll};

use crate::Outcome;

/// Now.
#[expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Microseconds of a duration.
pub(crate) fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Does `work`, and tells how many microseconds it took.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let begun = now();
    let result = work();
    (result, micros(begun.elapsed()))
}

/// Rests for a while, for whoever works in the background.
pub(crate) fn rest(pause: Duration) -> Outcome {
    let millis = u16::try_from(pause.as_millis().max(1))?;
    poll(&mut [], PollTimeout::from(millis))?;
    Ok(())
}
