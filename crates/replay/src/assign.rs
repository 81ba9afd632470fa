//! Which model serves which request of a trace.

use std::{fmt, str::FromStr, time::Duration};

use thiserror::Error;

use crate::Request;

/// The rule by which models share a trace. A request that names one of the models is served by
/// that model, whatever the rule; among several instances of it the rule decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Assign {
    /// Request `i` goes to model `i` modulo the number of models: all are equally busy, always.
    /// A static split serves this well.
    RoundRobin,
    /// Models are busy in turn, as those of different users or time zones are. Time is cut into
    /// windows; in window `w`, model `w` modulo the number of models is hot and gets
    /// `hot_percent` of the requests; the rest is spread evenly over the others. Which request is
    /// in that share is decided by a hash of seed and request index, so it does not depend on
    /// what happened before.
    Rotating {
        /// Length of a window; never zero.
        window: Duration,
        /// Share of the hot model, at most 100.
        hot_percent: u8,
    },
}

/// A rule that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected \"round-robin\" or \"rotating\", found \"{found}\"")]
pub struct ParseAssignError {
    /// What was given.
    pub found: String,
}

impl Assign {
    /// The model of each request, as an index into `models`, which are the models' names.
    ///
    /// # Panics
    /// If there is no model, or a window has no length.
    #[must_use]
    pub fn models_of(self, requests: &[Request], models: &[&str], seed: u64) -> Vec<usize> {
        assert!(!models.is_empty(), "a trace needs at least one model");
        let all: Vec<usize> = (0..models.len()).collect();
        requests
            .iter()
            .enumerate()
            .map(|(index, request)| {
                let asks_for = |&model: &usize| {
                    request
                        .model
                        .as_ref()
                        .is_some_and(|name| models[model].eq_ignore_ascii_case(name))
                };
                let named: Vec<usize> = all.iter().copied().filter(asks_for).collect();
                let candidates = if named.is_empty() { &all } else { &named };
                candidates[self.pick(index, request.arrival, candidates.len(), seed)]
            })
            .collect()
    }

    /// One of `models` models.
    fn pick(self, index: usize, arrival: Duration, models: usize, seed: u64) -> usize {
        match self {
            Self::RoundRobin => index % models,
            Self::Rotating {
                window,
                hot_percent,
            } => {
                assert!(!window.is_zero(), "a window has a length");
                let nth_window = arrival.as_nanos() / window.as_nanos();
                let hot = index_below(nth_window, models);
                let draw = mix(seed.wrapping_add(mix(index as u64)));
                if models == 1 || draw % 100 < u64::from(hot_percent) {
                    return hot;
                }
                let other = index_below(u128::from(mix(draw)), models - 1);
                if other < hot { other } else { other + 1 }
            }
        }
    }
}

impl Default for Assign {
    /// Windows of five minutes, 60 % of the requests to the hot model.
    fn default() -> Self {
        Self::Rotating {
            window: Duration::from_secs(300),
            hot_percent: 60,
        }
    }
}

impl FromStr for Assign {
    type Err = ParseAssignError;

    fn from_str(text: &str) -> Result<Self, ParseAssignError> {
        match text {
            "round-robin" => Ok(Self::RoundRobin),
            "rotating" => Ok(Self::default()),
            _ => Err(ParseAssignError {
                found: text.to_owned(),
            }),
        }
    }
}

impl fmt::Display for Assign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RoundRobin => "round-robin",
            Self::Rotating { .. } => "rotating",
        })
    }
}

fn index_below(value: u128, bound: usize) -> usize {
    usize::try_from(value % bound as u128).expect("less than a usize")
}

/// The output function of SplitMix64: every bit of the result depends on every bit of `value`.
const fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workload;

    const MODELS: [&str; 3] = ["a", "b", "c"];

    fn counts(assigned: &[usize]) -> [usize; 3] {
        let mut counts = [0; 3];
        for &model in assigned {
            counts[model] += 1;
        }
        counts
    }

    #[test]
    fn round_robin_serves_all_alike() {
        let trace = Workload::new(300, 1).trace();
        let assigned = Assign::RoundRobin.models_of(&trace.requests, &MODELS, 0);
        assert_eq!(counts(&assigned), [100; 3]);
        assert_eq!(assigned[..4], [0, 1, 2, 0]);
    }

    #[test]
    fn the_hot_model_changes_from_window_to_window() {
        let trace = Workload::new(6_000, 1).trace();
        let assigned = Assign::default().models_of(&trace.requests, &MODELS, 9);
        for window in 0..3 {
            let inside: Vec<usize> = trace
                .requests
                .iter()
                .zip(&assigned)
                .filter(|(request, _)| request.arrival.as_secs() / 300 == window)
                .map(|(_, &model)| model)
                .collect();
            let counts = counts(&inside);
            for (model, &count) in counts.iter().enumerate() {
                let percent = count * 100 / inside.len();
                let expected = if u64::try_from(model) == Ok(window) {
                    60
                } else {
                    20
                };
                assert!(
                    percent.abs_diff(expected) <= 4,
                    "window {window}: {counts:?}"
                );
            }
        }
    }

    #[test]
    fn a_request_keeps_its_model_when_the_trace_is_cut_short() {
        let trace = Workload::new(500, 1).trace();
        let all = Assign::default().models_of(&trace.requests, &MODELS, 9);
        let some = Assign::default().models_of(&trace.requests[..120], &MODELS, 9);
        assert_eq!(all[..120], some[..]);
        assert_ne!(
            all,
            Assign::default().models_of(&trace.requests, &MODELS, 10)
        );
    }

    #[test]
    fn the_model_a_request_names_wins() {
        let mut trace = Workload::new(30, 1).trace();
        trace.requests[4].model = Some("C".to_owned());
        trace.requests[5].model = Some("unheard-of".to_owned());
        let assigned = Assign::RoundRobin.models_of(&trace.requests, &MODELS, 0);
        assert_eq!((assigned[4], assigned[5]), (2, 5 % 3));

        for request in &mut trace.requests {
            request.model = Some("b".to_owned());
        }
        for rule in [Assign::RoundRobin, Assign::default()] {
            let assigned = rule.models_of(&trace.requests, &["a", "b", "b"], 0);
            let counts = counts(&assigned);
            assert_eq!(counts[0], 0, "{rule}");
            assert!(
                counts[1] > 0 && counts[2] > 0,
                "instances share: {counts:?}"
            );
        }
    }

    #[test]
    fn one_model_gets_everything() {
        let trace = Workload::new(30, 1).trace();
        let assigned = Assign::default().models_of(&trace.requests, &["a"], 0);
        assert_eq!(assigned, vec![0; 30]);
    }

    #[test]
    fn rules_are_read_back_as_they_are_shown() {
        for rule in [Assign::RoundRobin, Assign::default()] {
            assert_eq!(rule.to_string().parse(), Ok(rule));
        }
        assert_eq!(
            "random"
                .parse::<Assign>()
                .expect_err("no such rule")
                .to_string(),
            "expected \"round-robin\" or \"rotating\", found \"random\""
        );
    }
}
