//! From what a mapper answers to what travels, and back.

use std::collections::BTreeSet;
use std::hash::Hasher;

use fnv::FnvHasher;
use kvcached_mapper::{After, Cause, Epoch, MapError, PageRun, Readiness, Resynced};

use super::{Failure, MAX_RUNS_PER_FRAME, Part, Reply, Runs, RunsDigest, Waits, shortened};

impl Reply {
    /// What a rank says when it could not do what it was told.
    pub(crate) fn failed(error: MapError) -> Self {
        let failure = match error.cause {
            Cause::OutOfMemory { .. } => Failure::OutOfMemory,
            Cause::InFlight { epoch } => Failure::InFlight { epoch: epoch.0 },
            state @ Cause::State { .. } => Failure::State {
                reason: shortened(state.to_string()),
            },
            other => Failure::Vmm {
                reason: shortened(other.to_string()),
            },
        };
        Self::Failed {
            failure,
            doubt: Part::new(error.uncertain),
        }
    }

    pub(crate) fn readiness(answer: Result<Readiness, MapError>) -> Self {
        match answer {
            Ok(Readiness::Ready) => Self::Ready,
            Ok(Readiness::NotReady(missing)) => {
                // Who it is, is known where the answer arrives.
                let reasons: Vec<&str> = missing.iter().map(|m| m.reason.as_str()).collect();
                Self::NotReady {
                    reason: shortened(reasons.join("; ")),
                }
            }
            Err(error) => Self::failed(error),
        }
    }

    /// What a rank says that has `mapped` now.
    pub(crate) fn resynced(answer: Result<Resynced, MapError>, mapped: &[PageRun]) -> Self {
        match answer {
            Ok(Resynced { remade, in_doubt }) if in_doubt.len() <= MAX_RUNS_PER_FRAME / 2 => {
                let remade = match remade.len() {
                    0..=LONG_PART => Part::new(remade),
                    _ => Part::Whole,
                };
                Self::Resynced {
                    digest: RunsDigest::new(mapped.iter().copied()),
                    remade,
                    in_doubt: Runs(in_doubt.into()),
                }
            }
            Ok(Resynced { in_doubt, .. }) => Self::Failed {
                failure: Failure::Vmm {
                    reason: format!("{} runs are in doubt", in_doubt.len()),
                },
                doubt: Part::Whole,
            },
            Err(error) => Self::failed(error),
        }
    }
}

/// Runs of a part beside another in one frame.
pub(super) const LONG_PART: usize = MAX_RUNS_PER_FRAME / 2;

impl Part {
    fn new(runs: Vec<PageRun>) -> Self {
        match runs.len() {
            0 => Self::Nothing,
            1..=MAX_RUNS_PER_FRAME => Self::Runs(Runs(runs.into())),
            _ => Self::Whole,
        }
    }

    /// The runs of `batch` that are meant; all of them if the rank named anything else.
    pub(crate) fn of(&self, batch: &[PageRun]) -> Vec<PageRun> {
        match self {
            Self::Nothing => Vec::new(),
            Self::Whole => batch.to_vec(),
            Self::Runs(named) => {
                let named: BTreeSet<PageRun> = named.0.iter().copied().collect();
                let known = batch.iter().copied().filter(|run| named.contains(run));
                let known: Vec<PageRun> = known.collect();
                if known.len() == named.len() {
                    known
                } else {
                    batch.to_vec()
                }
            }
        }
    }
}

impl RunsDigest {
    /// Of runs in ascending order.
    #[must_use]
    pub fn new(runs: impl IntoIterator<Item = PageRun>) -> Self {
        let mut hasher = FnvHasher::default();
        for run in runs {
            hasher.write_u32(run.first().0);
            hasher.write_u32(run.count());
        }
        Self(hasher.finish())
    }
}

impl From<After> for Waits {
    fn from(after: After) -> Self {
        Self {
            epoch: after.epoch.map(|epoch| epoch.0),
            device: after.device,
        }
    }
}

impl From<Waits> for After {
    fn from(waits: Waits) -> Self {
        Self {
            epoch: waits.epoch.map(Epoch),
            device: waits.device,
        }
    }
}
