//! A rank as it answers for itself, whoever talks to it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcached_mapper::{Epochs, PoolId, Rank, RankMapper, Stage};

use super::transaction::PoolState;
use crate::InstanceName;
use crate::wire::{self, GeometryDigest, Hello, Refusal};

/// One pool as a rank serves it.
#[derive(Debug, Clone)]
pub struct ServedPool {
    /// Its number.
    pub pool: PoolId,
    /// What a page number means here.
    pub geometry: GeometryDigest,
    /// Does the work.
    pub mapper: Arc<dyn RankMapper>,
}

/// A rank as it answers for itself: who it is, what it has, who talks to it, and what was last done
/// about it.
#[derive(Debug)]
pub struct ServedRank {
    instance: InstanceName,
    stage: Stage,
    rank: Rank,
    pub(super) pools: BTreeMap<PoolId, PoolState>,
    /// Number of the last conversation that was welcomed.
    pub(super) conversations: u64,
    /// How long what is mapped outlives the last conversation.
    orphan_timeout: Option<Duration>,
    /// Those of the rank's work, which another coordinator numbers anew.
    pub(super) epochs: Option<Arc<Epochs>>,
    /// Why it serves nobody.
    unable: Option<String>,
}

impl ServedRank {
    /// The rank with its pools; of two with the same number the later one counts.
    #[must_use]
    pub fn new(
        instance: InstanceName,
        stage: Stage,
        rank: Rank,
        pools: impl IntoIterator<Item = ServedPool>,
    ) -> Self {
        let state = |served: ServedPool| (served.pool, PoolState::new(served));
        Self {
            instance,
            stage,
            rank,
            pools: pools.into_iter().map(state).collect(),
            conversations: 0,
            orphan_timeout: None,
            epochs: None,
            unable: None,
        }
    }

    /// The same, releasing what is mapped once no coordinator has been connected for so long.
    /// Without, it is kept for ever.
    #[must_use]
    pub fn with_orphan_timeout(self, timeout: Duration) -> Self {
        Self {
            orphan_timeout: Some(timeout),
            ..self
        }
    }

    /// The same, whose mappers wait for these epochs: they begin anew with every coordinator.
    #[must_use]
    pub fn with_epochs(self, epochs: Arc<Epochs>) -> Self {
        Self {
            epochs: Some(epochs),
            ..self
        }
    }

    /// A rank that could not begin: it refuses every coordinator with the reason.
    #[must_use]
    pub fn unable(instance: InstanceName, stage: Stage, rank: Rank, reason: String) -> Self {
        Self {
            unable: Some(wire::shortened(reason)),
            ..Self::new(instance, stage, rank, [])
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) has something to do, if nothing else happens.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let timeout = self.orphan_timeout?;
        self.pools
            .values()
            .filter_map(|pool| pool.orphaned?.checked_add(timeout))
            .min()
    }

    /// Releases what belongs to coordinators that are gone for too long.
    pub fn handle_timeout(&mut self, now: Instant) {
        let Some(timeout) = self.orphan_timeout else {
            return;
        };
        for state in self.pools.values_mut() {
            let due = |since: &Instant| now.saturating_duration_since(*since) >= timeout;
            if state.orphaned.filter(due).is_none() {
                continue;
            }
            let pool = state.served.pool;
            match state.served.mapper.resync(&[]) {
                Ok(resynced) if resynced.in_doubt.is_empty() => {
                    tracing::warn!(%pool, ?timeout, "released a pool whose coordinator is gone");
                    state.orphaned = None;
                }
                Ok(_) => {
                    tracing::warn!(%pool, "a pool whose coordinator is gone is in doubt");
                    state.orphaned = Some(now);
                }
                Err(error) => {
                    tracing::warn!(%pool, %error, "a pool whose coordinator is gone stays");
                    state.orphaned = Some(now);
                }
            }
        }
    }

    /// Lets go of memory that was kept too long to be used again; answers when to ask again, if any is
    /// left.
    pub fn tend(&self, now: Instant) -> Option<Instant> {
        let pools = self.pools.values();
        pools
            .filter_map(|state| state.served.mapper.tend(now))
            .min()
    }

    /// Does this rank serve the coordinator that said `hello`?
    pub(super) fn admit(&self, hello: &Hello) -> Result<(), Refusal> {
        if hello.instance != self.instance {
            return Err(Refusal::Instance {
                coordinator: hello.instance.to_string(),
                worker: self.instance.to_string(),
            });
        }
        if (hello.stage, hello.rank) != (self.stage, self.rank) {
            return Err(Refusal::Place {
                wanted: (hello.stage.0, hello.rank.0),
                worker: (self.stage.0, self.rank.0),
            });
        }
        if let Some(reason) = self.unable.clone() {
            return Err(Refusal::Unable { reason });
        }
        let Some(state) = self.pools.get(&hello.pool) else {
            let worker = self.pools.keys().map(|pool| pool.0).collect();
            return Err(Refusal::Pool {
                wanted: hello.pool.0,
                worker,
            });
        };
        if hello.geometry != state.served.geometry {
            return Err(Refusal::Geometry {
                pool: hello.pool.0,
                coordinator: hello.geometry,
                worker: state.served.geometry,
            });
        }
        let pool = hello.pool.0;
        match state.session {
            Some(session) if session > hello.session => Err(Refusal::Superseded { pool }),
            Some(session) if session < hello.session && state.speaker.is_some() => {
                Err(Refusal::Taken { pool })
            }
            _ => Ok(()),
        }
    }
}
