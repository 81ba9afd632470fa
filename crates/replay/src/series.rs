//! What happened over time, in a bounded number of points however long the run.

use std::time::Duration;

/// A series has at most this many points.
pub const MAX_POINTS: usize = 2_000;

/// What was going on in each model over time: each point stands for a span of time of the same
/// length and holds the greatest value within it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Series {
    models: usize,
    span: Duration,
    /// The points one after the other, each with one sample for each model.
    samples: Vec<Sample>,
}

/// One model in one span of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sample {
    /// Bytes on each rank that it kept from others.
    pub mapped_bytes: u64,
    /// Bytes on each rank in blocks that were handed out.
    pub held_bytes: u64,
    /// Requests that had arrived and were not being served.
    pub waiting: u32,
}

impl Series {
    /// An empty series of `models` models.
    #[must_use]
    pub const fn new(models: usize) -> Self {
        Self {
            models,
            span: Duration::from_millis(1),
            samples: Vec::new(),
        }
    }

    /// From `from` to `to` everything was as `now` says, one sample for each model.
    pub(crate) fn record(&mut self, from: Duration, to: Duration, now: &[Sample]) {
        debug_assert_eq!(now.len(), self.models, "one sample for each model");
        while self.index(to) >= MAX_POINTS {
            self.halve();
        }
        let (first, last) = (self.index(from), self.index(to));
        if self.samples.len() < (last + 1) * self.models {
            self.samples
                .resize((last + 1) * self.models, Sample::default());
        }
        for point in first..=last {
            let point = &mut self.samples[point * self.models..][..self.models];
            for (old, new) in point.iter_mut().zip(now) {
                *old = old.max(*new);
            }
        }
    }

    /// The points in order: when each begins, and one sample for each model.
    pub fn points(&self) -> impl Iterator<Item = (Duration, &[Sample])> {
        let span = self.span;
        self.samples
            .chunks_exact(self.models.max(1))
            .zip(0_u32..)
            .map(move |(point, nth)| (span.saturating_mul(nth), point))
    }

    /// Length of the span of time that each point stands for.
    #[must_use]
    pub const fn span(&self) -> Duration {
        self.span
    }

    fn index(&self, at: Duration) -> usize {
        usize::try_from(at.as_nanos() / self.span.as_nanos()).unwrap_or(usize::MAX)
    }

    /// Joins neighbouring points, which then stand for twice the time.
    fn halve(&mut self) {
        self.span = self.span.saturating_mul(2);
        let points: Vec<&[Sample]> = self.samples.chunks_exact(self.models.max(1)).collect();
        let joined = points.chunks(2).flat_map(|pair| {
            let (one, other) = (pair[0], pair[pair.len() - 1]);
            one.iter().zip(other).map(|(one, other)| one.max(*other))
        });
        self.samples = joined.collect();
    }
}

impl Sample {
    fn max(self, other: Self) -> Self {
        Self {
            mapped_bytes: self.mapped_bytes.max(other.mapped_bytes),
            held_bytes: self.held_bytes.max(other.held_bytes),
            waiting: self.waiting.max(other.waiting),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn sample(waiting: u32) -> Sample {
        Sample {
            mapped_bytes: 10 * waiting as u64,
            held_bytes: waiting as u64,
            waiting,
        }
    }

    #[test]
    fn what_lasts_is_in_every_point_of_its_time() {
        let ms = Duration::from_millis;
        let mut series = Series::new(1);
        series.record(ms(0), ms(2), &[sample(5)]);
        series.record(ms(2), ms(4), &[sample(3)]);
        let seen: Vec<_> = series
            .points()
            .map(|(at, point)| (at, point[0].waiting))
            .collect();
        assert_eq!(
            seen,
            [(ms(0), 5), (ms(1), 5), (ms(2), 5), (ms(3), 3), (ms(4), 3)]
        );
    }

    #[test]
    fn a_run_of_a_year_is_bounded_too() {
        let mut series = Series::new(2);
        let year = Duration::from_secs(365 * 86_400);
        series.record(Duration::ZERO, year, &[sample(1), sample(2)]);
        let count = series.points().count();
        assert!((MAX_POINTS / 2..=MAX_POINTS).contains(&count), "{count}");
        assert!(
            series
                .points()
                .all(|(_, point)| point == [sample(1), sample(2)])
        );
    }

    proptest! {
        /// Whatever was recorded is found in the point of its time, and nothing greater is.
        #[test]
        fn no_peak_is_lost_or_made_up(spans in prop::collection::vec((0_u64..40_000, 0_u32..9), 1..60)) {
            let mut series = Series::new(1);
            let mut at = Duration::ZERO;
            let mut recorded = Vec::new();
            for (length, waiting) in spans {
                let to = at + Duration::from_millis(length);
                series.record(at, to, &[sample(waiting)]);
                recorded.push((at, to, waiting));
                at = to;
            }
            prop_assert!(series.points().count() <= MAX_POINTS);
            for (begin, point) in series.points() {
                let end = begin + series.span();
                let greatest = recorded
                    .iter()
                    .filter(|(from, to, _)| *from < end && *to >= begin)
                    .map(|(_, _, waiting)| *waiting)
                    .max();
                prop_assert_eq!(Some(point[0].waiting), greatest);
            }
        }
    }
}
