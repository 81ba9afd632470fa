//! The worker's side of one connection, without the connection: frames in, frames out.
//!
//! ```text
//! hello ──▶ greeting (welcome, or refused and over) ──▶ request ▶ reply ▶ request ▶ reply …
//! ```
//!
//! A frame is checked whole before anything is done about it. What breaks the protocol is answered
//! with a violation, changes nothing, and ends the conversation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvcached_mapper::{Mapper, PageRun, PoolId, Rank, Stage};
use thiserror::Error;

use crate::wire::{
    self, Command, GeometryDigest, Hello, Refusal, Request, SessionId, WireError, WorkerMessage,
};
use crate::{FrameError, InstanceName, Operation, PROTOCOL_VERSION};

/// One pool as a rank serves it.
#[derive(Debug, Clone)]
pub struct ServedPool {
    /// Its number.
    pub pool: PoolId,
    /// What a page number means here.
    pub geometry: GeometryDigest,
    /// Does the work.
    pub mapper: Arc<dyn Mapper>,
}

/// A rank as it answers for itself: who it is, what it has, and who talks to it.
#[derive(Debug)]
pub struct ServedRank {
    instance: InstanceName,
    stage: Stage,
    rank: Rank,
    pools: BTreeMap<PoolId, ServedPool>,
    /// Pools with a coordinator connected: there is one at a time.
    taken: BTreeSet<PoolId>,
}

/// One coordinator's connection to a [`ServedRank`].
#[derive(Debug, Default)]
pub struct Conversation {
    partner: Option<Partner>,
}

/// Why a conversation is over. What the other side is told about it was appended to the output.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConversationEnd {
    /// The coordinator is not served.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// The coordinator broke the protocol.
    #[error("protocol violation: {reason}")]
    Violation {
        /// How.
        reason: String,
    },
}

/// A coordinator that was welcomed.
#[derive(Debug)]
struct Partner {
    pool: PoolId,
    session: SessionId,
    /// Of the last request that was begun.
    sequence: u64,
    /// The parts so far of a batch that is not whole yet.
    parts: Option<Parts>,
}

#[derive(Debug)]
struct Parts {
    unmap: bool,
    runs: Vec<PageRun>,
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
        let pools = pools.into_iter().map(|pool| (pool.pool, pool)).collect();
        Self {
            instance,
            stage,
            rank,
            pools,
            taken: BTreeSet::new(),
        }
    }

    /// Does this rank serve the coordinator that said `hello`?
    fn admit(&self, hello: &Hello) -> Result<(), Refusal> {
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
        let Some(served) = self.pools.get(&hello.pool) else {
            let worker = self.pools.keys().map(|pool| pool.0).collect();
            return Err(Refusal::Pool {
                wanted: hello.pool.0,
                worker,
            });
        };
        if hello.geometry != served.geometry {
            return Err(Refusal::Geometry {
                pool: hello.pool.0,
                coordinator: hello.geometry,
                worker: served.geometry,
            });
        }
        if self.taken.contains(&hello.pool) {
            return Err(Refusal::Taken { pool: hello.pool.0 });
        }
        Ok(())
    }
}

impl Conversation {
    /// Deals with one frame and appends the answer, framed, to `out`.
    ///
    /// # Errors
    /// [`ConversationEnd`]: once `out` is sent the connection is to be closed, after
    /// [`end`](Self::end).
    pub fn handle_frame(
        &mut self,
        rank: &mut ServedRank,
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), ConversationEnd> {
        let Some(partner) = &mut self.partner else {
            return match Self::greet(rank, payload) {
                Ok((hello, partner)) => {
                    wire::push_welcome(out, &hello);
                    self.partner = Some(partner);
                    Ok(())
                }
                Err(refusal) => {
                    wire::push_refusal(out, &refusal);
                    Err(ConversationEnd::Refused(refusal))
                }
            };
        };
        let served = &rank.pools[&partner.pool];
        match partner.request(served, payload) {
            Ok(message) => {
                if let Some(message) = message {
                    wire::push_message(out, &message);
                }
                Ok(())
            }
            Err(reason) => Err(violation(reason, out)),
        }
    }

    /// Deals with bytes that are no frame. The conversation is over.
    pub fn handle_broken_frame(&mut self, error: FrameError, out: &mut Vec<u8>) -> ConversationEnd {
        if self.partner.is_some() {
            return violation(error.to_string(), out);
        }
        let refusal = Refusal::NoHello {
            reason: error.to_string(),
        };
        wire::push_refusal(out, &refusal);
        ConversationEnd::Refused(refusal)
    }

    /// Has something begun that the coordinator must finish within a bound: a hello not said, a
    /// batch not whole?
    #[must_use]
    pub fn is_unfinished(&self) -> bool {
        self.partner
            .as_ref()
            .is_none_or(|partner| partner.parts.is_some())
    }

    /// The connection is gone: another coordinator may come. What was mapped stays mapped.
    pub fn end(self, rank: &mut ServedRank) {
        if let Some(partner) = self.partner {
            rank.taken.remove(&partner.pool);
        }
    }

    fn greet(rank: &mut ServedRank, payload: &[u8]) -> Result<(Hello, Partner), Refusal> {
        let hello = wire::read_hello(payload).map_err(|error| match error {
            WireError::Version { theirs } => Refusal::Version {
                coordinator: theirs,
                worker: PROTOCOL_VERSION,
            },
            other => Refusal::NoHello {
                reason: other.to_string(),
            },
        })?;
        rank.admit(&hello)?;
        rank.taken.insert(hello.pool);
        let Hello { pool, session, .. } = hello;
        Ok((
            hello,
            Partner {
                pool,
                session,
                sequence: 0,
                parts: None,
            },
        ))
    }
}

impl Partner {
    /// Does what the request says, if it is whole; `Err` says how it breaks the protocol.
    fn request(
        &mut self,
        served: &ServedPool,
        payload: &[u8],
    ) -> Result<Option<WorkerMessage>, String> {
        let Request {
            session,
            sequence,
            command,
        } = wire::read_request(payload).map_err(|error| error.to_string())?;
        if session != self.session {
            return Err("a request of another session".to_owned());
        }
        let expected = match &self.parts {
            Some(_) => sequence == self.sequence,
            None => sequence > self.sequence,
        };
        if !expected {
            return Err(format!(
                "request {sequence} after request {}",
                self.sequence
            ));
        }
        let (unmap, runs, more) = match command {
            Command::Ready | Command::Headroom if self.parts.is_some() => {
                return Err("another request amid a batch".to_owned());
            }
            Command::Ready => {
                self.sequence = sequence;
                return Ok(Some(self.perform(served, Operation::Ready)));
            }
            Command::Headroom => {
                self.sequence = sequence;
                return Ok(Some(self.perform(served, Operation::Headroom)));
            }
            Command::Map { runs, more } => (false, runs.0, more),
            Command::Unmap { runs, more } => (true, runs.0, more),
        };
        let mut batch = match self.parts.take() {
            Some(parts) if parts.unmap != unmap => {
                return Err("another request amid a batch".to_owned());
            }
            Some(parts) => parts,
            None => Parts {
                unmap,
                runs: Vec::new(),
            },
        };
        if batch.runs.is_empty() {
            batch.runs = runs.into_owned();
        } else {
            batch.runs.extend_from_slice(&runs);
        }
        // No two runs share a page, so that a good batch has a natural bound.
        if batch.runs.len() > served.geometry.pages() {
            return Err(format!(
                "a batch of more runs than pages, {}",
                served.geometry
            ));
        }
        self.sequence = sequence;
        if more {
            self.parts = Some(batch);
            return Ok(None);
        }
        let operation = if unmap {
            Operation::Unmap(&batch.runs)
        } else {
            Operation::Map(&batch.runs)
        };
        Ok(Some(self.perform(served, operation)))
    }

    fn perform(&self, served: &ServedPool, operation: Operation<'_>) -> WorkerMessage {
        let answer = operation.perform(&*served.mapper);
        WorkerMessage::Reply {
            sequence: self.sequence,
            reply: answer.into(),
        }
    }
}

fn violation(reason: String, out: &mut Vec<u8>) -> ConversationEnd {
    let reason = wire::shortened(reason);
    wire::push_message(
        out,
        &WorkerMessage::Violation {
            reason: reason.clone(),
        },
    );
    ConversationEnd::Violation { reason }
}
