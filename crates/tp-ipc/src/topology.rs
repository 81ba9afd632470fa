//! Where each rank of each stage is: in this process, or behind an endpoint.
//!
//! A topology is a value that somebody states. It cannot be derived from the number of ranks:
//! a group of one may sit in another process, and of two engines with the same number of ranks one
//! has a scheduler of its own and the other a scheduler inside every rank.

use std::collections::{BTreeMap, BTreeSet};

use kvcached_mapper::{Rank, Stage};
use thiserror::Error;

use crate::{Endpoint, EndpointDir};

/// Where one rank is, seen from the process that decides about pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In this process.
    Local,
    /// In another one, which listens here.
    Remote(Endpoint),
}

/// All ranks that one process drives; never empty, at most one of them in this process.
///
/// ```
/// use kvcached_mapper::{Rank, Stage};
/// use kvcached_tp_ipc::{Place, Topology};
///
/// let alone = Topology::autonomous(Stage(0), Rank(3));
/// assert_eq!(alone.local(), Some((Stage(0), Rank(3))));
/// assert_eq!(alone.remotes().count(), 0);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    places: BTreeMap<(Stage, Rank), Place>,
}

/// Why a set of places is no topology.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// There is nothing to drive.
    #[error("a topology without any rank")]
    Empty,
    /// One rank in two places.
    #[error("{stage}, {rank} has two places")]
    Twice {
        /// Stage of the rank.
        stage: Stage,
        /// The rank.
        rank: Rank,
    },
    /// A process is one rank at most.
    #[error("{stage}, {rank} is a second rank in this process")]
    TwoLocal {
        /// Stage of the second one.
        stage: Stage,
        /// The second one.
        rank: Rank,
    },
    /// Two ranks behind one endpoint.
    #[error("{stage}, {rank} shares {endpoint} with another rank")]
    SharedEndpoint {
        /// Stage of the second one.
        stage: Stage,
        /// The second one.
        rank: Rank,
        /// The endpoint.
        endpoint: Endpoint,
    },
}

impl Topology {
    /// One rank, in this process.
    #[must_use]
    pub fn single() -> Self {
        Self::autonomous(Stage(0), Rank(0))
    }

    /// Every rank runs its own scheduler: this process is `rank` and drives nobody else, however
    /// many ranks there are.
    #[must_use]
    pub fn autonomous(stage: Stage, rank: Rank) -> Self {
        Self {
            places: BTreeMap::from([((stage, rank), Place::Local)]),
        }
    }

    /// The scheduler lives inside rank 0, the ranks `1..tp` listen. A group of one or fewer is
    /// rank 0 alone.
    #[must_use]
    pub fn rank0_coordinates(tp: u16, endpoints: &EndpointDir) -> Self {
        let remotes = (1..tp).map(|rank| remote(endpoints, Stage(0), Rank(rank)));
        let local = ((Stage(0), Rank(0)), Place::Local);
        Self {
            places: std::iter::once(local).chain(remotes).collect(),
        }
    }

    /// The scheduler has a process of its own, and each of `tp` ranks of each of `stages` stages
    /// listens, rank 0 like all others. There is at least one rank and one stage: also a group of
    /// one is in another process.
    #[must_use]
    pub fn separate_coordinator(tp: u16, stages: u16, endpoints: &EndpointDir) -> Self {
        let stages = (0..stages.max(1)).map(Stage);
        let ranks = stages.flat_map(|stage| (0..tp.max(1)).map(move |rank| (stage, Rank(rank))));
        Self {
            places: ranks
                .map(|(stage, rank)| remote(endpoints, stage, rank))
                .collect(),
        }
    }

    /// Any other arrangement.
    ///
    /// # Errors
    /// [`TopologyError`] if the places contradict each other.
    pub fn from_places(
        places: impl IntoIterator<Item = ((Stage, Rank), Place)>,
    ) -> Result<Self, TopologyError> {
        let mut known = BTreeMap::new();
        let mut endpoints = BTreeSet::new();
        let mut local = false;
        for ((stage, rank), place) in places {
            match &place {
                Place::Local if local => return Err(TopologyError::TwoLocal { stage, rank }),
                Place::Local => local = true,
                Place::Remote(endpoint) if !endpoints.insert(endpoint.clone()) => {
                    let endpoint = endpoint.clone();
                    return Err(TopologyError::SharedEndpoint {
                        stage,
                        rank,
                        endpoint,
                    });
                }
                Place::Remote(_) => {}
            }
            if known.insert((stage, rank), place).is_some() {
                return Err(TopologyError::Twice { stage, rank });
            }
        }
        if known.is_empty() {
            return Err(TopologyError::Empty);
        }
        Ok(Self { places: known })
    }

    /// Every rank with its place, in order.
    pub fn places(&self) -> impl Iterator<Item = (Stage, Rank, &Place)> {
        self.places
            .iter()
            .map(|((stage, rank), place)| (*stage, *rank, place))
    }

    /// The ranks in other processes, in order.
    pub fn remotes(&self) -> impl Iterator<Item = (Stage, Rank, &Endpoint)> {
        self.places()
            .filter_map(|(stage, rank, place)| match place {
                Place::Local => None,
                Place::Remote(endpoint) => Some((stage, rank, endpoint)),
            })
    }

    /// The rank that this process is, if it is one.
    #[must_use]
    pub fn local(&self) -> Option<(Stage, Rank)> {
        self.places()
            .find(|(_, _, place)| **place == Place::Local)
            .map(|(stage, rank, _)| (stage, rank))
    }
}

fn remote(endpoints: &EndpointDir, stage: Stage, rank: Rank) -> ((Stage, Rank), Place) {
    (
        (stage, rank),
        Place::Remote(endpoints.endpoint(stage, rank)),
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::RuntimeDir;

    fn endpoints(temp: &tempfile::TempDir, instance: &str) -> EndpointDir {
        let runtime = RuntimeDir::open(&temp.path().join("run")).unwrap();
        runtime.instance(&instance.parse().unwrap()).unwrap()
    }

    /// The ranks in order as stage and rank, the local one in brackets.
    fn shape(topology: &Topology) -> String {
        let names = topology.places().map(|(stage, rank, place)| match place {
            Place::Local => format!("[{}.{}]", stage.0, rank.0),
            Place::Remote(_) => format!("{}.{}", stage.0, rank.0),
        });
        names.collect::<Vec<_>>().join(" ")
    }

    /// The ways in which engines lay out their processes, one row each.
    #[test]
    fn each_way_to_lay_out_an_engine_has_its_topology() {
        let temp = tempfile::tempdir().unwrap();
        let dir = endpoints(&temp, "llama");
        let separate = |tp, stages| Topology::separate_coordinator(tp, stages, &dir);
        let rank0 = |tp| Topology::rank0_coordinates(tp, &dir);
        let rows = [
            ("one process does all", Topology::single(), "[0.0]"),
            ("group of one in another process", separate(1, 1), "0.0"),
            ("own scheduler process", separate(3, 1), "0.0 0.1 0.2"),
            ("with stages", separate(2, 2), "0.0 0.1 1.0 1.1"),
            (
                "scheduler in every rank",
                Topology::autonomous(Stage(0), Rank(1)),
                "[0.1]",
            ),
            (
                "scheduler in every stage",
                Topology::autonomous(Stage(2), Rank(0)),
                "[2.0]",
            ),
            ("scheduler in rank 0", rank0(3), "[0.0] 0.1 0.2"),
            ("rank 0 alone", rank0(1), "[0.0]"),
            ("fewer than one", rank0(0), "[0.0]"),
        ];
        for (name, topology, expected) in rows {
            assert_eq!(shape(&topology), expected, "{name}");
            let local = topology
                .places()
                .filter(|(.., place)| **place == Place::Local)
                .count();
            assert_eq!(
                topology.remotes().count() + local,
                topology.places().count(),
                "{name}"
            );
            assert_eq!(topology.local().is_some(), local == 1, "{name}");
        }
    }

    #[test]
    fn every_stage_and_rank_has_an_endpoint_of_its_own() {
        let temp = tempfile::tempdir().unwrap();
        let topology = Topology::separate_coordinator(2, 2, &endpoints(&temp, "llama"));
        let distinct: BTreeSet<&Endpoint> = topology.remotes().map(|(_, _, e)| e).collect();
        assert_eq!(distinct.len(), 4);
    }

    #[test]
    fn two_instances_share_no_endpoint() {
        let temp = tempfile::tempdir().unwrap();
        let one = Topology::separate_coordinator(4, 1, &endpoints(&temp, "a/b"));
        let two = Topology::separate_coordinator(4, 1, &endpoints(&temp, "a:b"));
        let all: BTreeSet<&Endpoint> = one
            .remotes()
            .chain(two.remotes())
            .map(|(.., e)| e)
            .collect();
        assert_eq!(all.len(), 8);
    }

    #[test]
    fn places_that_contradict_each_other_are_refused() {
        let at = |name: &str| Place::Remote(Endpoint::new(Path::new(name)).unwrap());
        let (first, second) = ((Stage(0), Rank(0)), (Stage(0), Rank(1)));
        let refused =
            |places: Vec<((Stage, Rank), Place)>| Topology::from_places(places).unwrap_err();
        assert_eq!(refused(vec![]), TopologyError::Empty);
        assert_eq!(
            refused(vec![(first, Place::Local), (second, Place::Local)]),
            TopologyError::TwoLocal {
                stage: Stage(0),
                rank: Rank(1)
            }
        );
        assert_eq!(
            refused(vec![(first, at("/a")), (first, at("/b"))]),
            TopologyError::Twice {
                stage: Stage(0),
                rank: Rank(0)
            }
        );
        assert!(matches!(
            refused(vec![(first, at("/a")), (second, at("/a"))]),
            TopologyError::SharedEndpoint { rank: Rank(1), .. }
        ));
    }
}
