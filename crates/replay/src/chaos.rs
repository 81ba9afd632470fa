//! Faults that a replay inflicts on its own rank processes, and what they came to.
//!
//! When, on whom and how is a pure function of a seed, in virtual time: [`Schedule`]. Only how far a
//! batch has got when a signal arrives in its midst is up to the machine.

use std::ops::Range;
use std::time::Duration;

use kvcached_mapper::Rank;
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};

/// Rank processes are to be killed and stopped while the trace is replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chaos {
    /// Decides when, on whom and how.
    pub seed: u64,
    /// Virtual time from one fault to the next, on average.
    pub every: Duration,
}

/// One fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    /// From which virtual time on.
    pub(crate) at: Duration,
    /// Which model.
    pub(crate) model: usize,
    /// Which of its ranks.
    pub(crate) rank: Rank,
    pub(crate) kind: FaultKind,
    pub(crate) moment: Moment,
}

/// What is done to a rank process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// SIGKILL; another process takes its place.
    Kill,
    /// SIGSTOP, and SIGCONT after so long: longer than a coordinator waits.
    Stall(Duration),
}

/// When exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// While nobody asks anything of the rank.
    Idle,
    /// So long after a batch of the model, a map or an unmap, has begun: the next one there is.
    InBatch(Duration),
}

/// The faults of one replay, one after another without end.
#[derive(Debug)]
pub(crate) struct Schedule {
    rng: ChaCha8Rng,
    every: Duration,
    models: u32,
    ranks: Range<u16>,
    ipc_timeout: Duration,
    at: Duration,
}

/// What the faults of a replay came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// Rank processes killed.
    pub kills: u32,
    /// Rank processes stopped for longer than a coordinator waits, and continued.
    pub stalls: u32,
    /// Rank processes started in the place of others.
    pub restarts: u32,
    /// How often a pool was fenced, whether by one of these faults or not.
    pub fenced: u32,
    /// How often the content of a model was lost: with each kill, or with two at once.
    pub losses: u32,
    /// Blocks that were dropped because their content was lost, once whatever the number of ranks.
    pub blocks_lost: u64,
    /// For each fault that fenced a pool or lost content, how long it took from the moment the rank
    /// was back until every rank was known to have what it should.
    pub recoveries: Vec<Duration>,
    /// Virtual times of the faults.
    pub at: Vec<Duration>,
}

impl Schedule {
    /// Faults for so many models with these ranks in processes of their own.
    ///
    /// # Panics
    /// Without models or ranks.
    pub(crate) fn new(
        chaos: Chaos,
        models: usize,
        ranks: Range<u16>,
        ipc_timeout: Duration,
    ) -> Self {
        let models = u32::try_from(models).expect("the number of models is limited to hundreds");
        assert!(models > 0 && !ranks.is_empty(), "somebody to harm");
        let mut key = [0; 32];
        key[..8].copy_from_slice(&chaos.seed.to_le_bytes());
        let mut rng = ChaCha8Rng::from_seed(key);
        // Apart from the streams of the workload, which may have the same seed.
        rng.set_stream(2);
        Self {
            rng,
            every: chaos.every,
            models,
            ranks,
            ipc_timeout,
            at: Duration::ZERO,
        }
    }

    /// Less than `end`, evenly enough for small numbers.
    fn below(&mut self, end: u32) -> u32 {
        self.rng.next_u32() % end
    }

    /// A share of `whole`: from nothing to all of it.
    fn part(&mut self, whole: Duration) -> Duration {
        whole.saturating_mul(self.below(1_001)) / 1_000
    }
}

impl Iterator for Schedule {
    type Item = Fault;

    fn next(&mut self) -> Option<Fault> {
        let gap = self.every / 2 + self.part(self.every);
        // Never twice at one time, however short the gap.
        self.at = self.at.saturating_add(gap.max(Duration::from_nanos(1)));
        let model = self.below(self.models) as usize;
        let ranks = u32::from(self.ranks.end - self.ranks.start);
        let nth = u16::try_from(self.below(ranks)).expect("fewer than a 16-bit number of ranks");
        let kind = if self.below(2) == 0 {
            FaultKind::Kill
        } else {
            FaultKind::Stall(self.ipc_timeout * 6 / 5 + self.part(self.ipc_timeout))
        };
        let moment = match self.below(8) {
            0 | 1 => Moment::Idle,
            // Before anything is sent: the batch finds out.
            2 => Moment::InBatch(Duration::ZERO),
            // Batches take a few hundred microseconds; the exponent puts as many faults into their
            // first steps as into their last.
            _ => {
                let limit_us = 2 << self.below(10);
                Moment::InBatch(Duration::from_micros(u64::from(self.below(limit_us))))
            }
        };
        Some(Fault {
            at: self.at,
            model,
            rank: Rank(self.ranks.start + nth),
            kind,
            moment,
        })
    }
}

impl Faults {
    /// Adds another model's.
    pub(crate) fn add(&mut self, other: Self) {
        self.kills += other.kills;
        self.stalls += other.stalls;
        self.restarts += other.restarts;
        self.fenced += other.fenced;
        self.losses += other.losses;
        self.blocks_lost += other.blocks_lost;
        self.recoveries.extend(other.recoveries);
        self.at.extend(other.at);
        self.at.sort_unstable();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(300);
    const EVERY: Duration = Duration::from_secs(10);
    const COUNT: usize = 2_000;

    fn faults(seed: u64) -> Vec<Fault> {
        let chaos = Chaos { seed, every: EVERY };
        Schedule::new(chaos, 3, 1..4, TIMEOUT).take(COUNT).collect()
    }

    #[test]
    fn a_seed_means_the_same_faults_and_another_seed_others() {
        assert_eq!(faults(1), faults(1));
        assert_ne!(faults(1), faults(2));
    }

    #[test]
    fn every_rank_of_every_model_meets_every_kind_of_fault_at_every_kind_of_moment() {
        let met: BTreeSet<_> = faults(7)
            .iter()
            .map(|fault| {
                let moment = match fault.moment {
                    Moment::Idle => "idle",
                    Moment::InBatch(Duration::ZERO) => "before a batch",
                    Moment::InBatch(_) => "in a batch",
                };
                let is_kill = fault.kind == FaultKind::Kill;
                (fault.model, fault.rank, is_kill, moment)
            })
            .collect();
        assert_eq!(met.len(), 3 * 3 * 2 * 3);
        assert!(met.iter().all(|(_, rank, ..)| (1..4).contains(&rank.0)));
    }

    #[test]
    fn faults_come_one_after_another_as_often_as_asked() {
        for seed in 0..20 {
            let faults = faults(seed);
            assert!(faults.windows(2).all(|pair| pair[0].at < pair[1].at));
            let mean = faults[COUNT - 1].at / u32::try_from(COUNT).expect("small");
            assert!(mean > EVERY * 9 / 10 && mean < EVERY * 11 / 10, "{mean:?}");
        }
    }

    #[test]
    fn a_stalled_rank_is_silent_for_longer_than_anybody_waits() {
        let stalls = faults(3).into_iter().filter_map(|fault| match fault.kind {
            FaultKind::Stall(length) => Some(length),
            FaultKind::Kill => None,
        });
        for length in stalls {
            assert!(length > TIMEOUT && length < 3 * TIMEOUT, "{length:?}");
        }
    }
}
