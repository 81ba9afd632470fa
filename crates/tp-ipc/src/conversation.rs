//! The worker's side of one connection, without the connection: frames in, frames out.
//!
//! ```text
//! hello ──▶ greeting (welcome, or refused and over) ──▶ resync ▶ reply ──▶ request ▶ reply …
//! ```
//!
//! A frame is checked whole before anything is done about it. What breaks the protocol is answered
//! with a violation, changes nothing, and ends the conversation.
//!
//! What a rank knows of its coordinator outlives the conversation: the session, and the last
//! transaction with its outcome. So a request that comes again is answered and not done again, a
//! late one changes nothing, and a coordinator that began before the present one is refused. Of two
//! conversations in one session only the later one is listened to.

mod rank;
mod transaction;

use std::time::Instant;

use kvcached_mapper::PoolId;
use thiserror::Error;

use crate::wire::{
    self, Command, Hello, Refusal, Reply, Request, SessionId, WireError, WorkerMessage,
};
use crate::{FrameError, PROTOCOL_VERSION, RankCall};
pub use rank::{ServedPool, ServedRank};
use transaction::{Batch, BatchKind, PoolState, Transaction};

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
    /// The same coordinator has a newer connection; nobody listens to this one any more.
    #[error("replaced by a newer connection of the same coordinator")]
    Replaced,
}

/// A coordinator that was welcomed.
#[derive(Debug)]
struct Partner {
    pool: PoolId,
    session: SessionId,
    number: u64,
    /// Was the rank told what it must have?
    synced: bool,
    /// The parts so far of a batch that is not whole yet, and its number.
    parts: Option<(u64, Batch)>,
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
        let state = rank
            .pools
            .get_mut(&partner.pool)
            .expect("a coordinator was welcomed for a pool that there is");
        if state.speaker != Some(partner.number) {
            return Err(ConversationEnd::Replaced);
        }
        match partner.request(state, payload) {
            Ok(Some((sequence, reply))) => {
                wire::push_message(out, &WorkerMessage::Reply { sequence, reply });
                Ok(())
            }
            Ok(None) => Ok(()),
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

    /// Has the coordinator been welcomed?
    #[must_use]
    pub const fn is_greeted(&self) -> bool {
        self.partner.is_some()
    }

    /// Has something begun that the coordinator must finish within a bound: a hello not said, a
    /// batch not whole?
    #[must_use]
    pub fn is_unfinished(&self) -> bool {
        self.partner
            .as_ref()
            .is_none_or(|partner| partner.parts.is_some())
    }

    /// The connection is gone: another coordinator may come. What was mapped stays mapped until it
    /// says otherwise, or the rank's orphan time-out has passed.
    pub fn end(self, rank: &mut ServedRank, now: Instant) {
        let Some(partner) = self.partner else { return };
        if let Some(state) = rank.pools.get_mut(&partner.pool)
            && state.speaker == Some(partner.number)
        {
            state.speaker = None;
            state.orphaned = Some(now);
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
        rank.conversations += 1;
        let number = rank.conversations;
        let Hello { pool, session, .. } = hello;
        let state = rank
            .pools
            .get_mut(&pool)
            .expect("who is admitted named a pool that there is");
        if state.session != Some(session) {
            state.session = Some(session);
            if let Some(epochs) = &rank.epochs {
                // What it gives up first, it gives up after the device has ended all work.
                epochs.begin(session.0);
            }
            state.untold.clear();
            state.last = Transaction::default();
        }
        state.speaker = Some(number);
        state.orphaned = None;
        let partner = Partner {
            pool,
            session,
            number,
            synced: false,
            parts: None,
        };
        Ok((hello, partner))
    }
}

impl Partner {
    /// Does what the request says, if it is whole, and answers with its number; `Err` says how it
    /// breaks the protocol.
    fn request(
        &mut self,
        state: &mut PoolState,
        payload: &[u8],
    ) -> Result<Option<(u64, Reply)>, String> {
        let Request {
            session,
            sequence,
            command,
        } = wire::read_request(payload).map_err(|error| error.to_string())?;
        if session != self.session {
            return Err("a request of another session".to_owned());
        }
        let (kind, runs, more) = match command {
            Command::Map { runs, more } => (BatchKind::Map, runs, more),
            Command::Prepare { runs, after, more } => {
                (BatchKind::Prepare(after.into()), runs, more)
            }
            Command::Resync { runs, after, more } => (BatchKind::Resync(after.into()), runs, more),
            other if self.parts.is_some() => {
                return Err(format!("{other:?} amid a batch"));
            }
            _ if sequence < state.last.sequence => return Ok(None),
            _ if !self.synced => return Err("a request before the first resync".to_owned()),
            Command::Commit => return state.commit(sequence).map(Some),
            Command::Undo => return Ok(Some(state.undo(sequence))),
            Command::Ready => return state.ask(sequence, RankCall::Ready).map(Some),
            Command::Headroom => return state.ask(sequence, RankCall::Headroom).map(Some),
            Command::Trim => return state.ask(sequence, RankCall::Trim).map(Some),
        };
        let mut batch = match self.parts.take() {
            Some((number, batch)) if number != sequence || batch.kind != kind => {
                return Err("another request amid a batch".to_owned());
            }
            Some((_, batch)) => batch,
            None => Batch {
                kind,
                runs: Vec::new(),
            },
        };
        if batch.runs.is_empty() {
            batch.runs = runs.0.into_owned();
        } else {
            batch.runs.extend_from_slice(&runs.0);
        }
        // No two runs share a page, so that a good batch has a natural bound.
        let geometry = state.served.geometry;
        if batch.runs.len() > geometry.pages() {
            return Err(format!("a batch of more runs than pages, {geometry}"));
        }
        if more {
            self.parts = Some((sequence, batch));
            return Ok(None);
        }
        if sequence < state.last.sequence {
            // Late, or sent twice on its way: what came after it counts.
            return Ok(None);
        }
        match kind {
            BatchKind::Resync(_) => self.synced = true,
            _ if !self.synced => return Err("a batch before the first resync".to_owned()),
            _ => {}
        }
        state.batch(sequence, batch).map(Some)
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

#[cfg(test)]
mod tests;
