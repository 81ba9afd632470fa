//! What is remembered of one pool: its coordinator, and the last transaction with its outcome, so that
//! it is applied once however often it is sent.

use std::collections::BTreeSet;
use std::time::Instant;

use kvcached_mapper::{After, PageRun, Resynced};

use super::rank::ServedPool;
use crate::doubt::Doubts;
use crate::wire::{self, Reply, SessionId};
use crate::{RankAnswer, RankCall};

/// A pool, and what is known of its coordinator.
#[derive(Debug)]
pub(super) struct PoolState {
    pub(super) served: ServedPool,
    /// The latest coordinator's.
    pub(super) session: Option<SessionId>,
    /// The conversation that speaks for it, if it is connected.
    pub(super) speaker: Option<u64>,
    /// Since when nobody is connected, if there is something to release for it.
    pub(super) orphaned: Option<Instant>,
    /// Runs that a resynchronisation has remade, empty, without the coordinator being known to have
    /// heard of it: the attempt failed half-way, or its reply got lost.
    pub(super) untold: BTreeSet<PageRun>,
    pub(super) last: Transaction,
}

/// The last transaction of a pool.
#[derive(Debug, Default)]
pub(super) struct Transaction {
    pub(super) sequence: u64,
    /// What it began with; nothing for questions.
    batch: Option<Batch>,
    state: TransactionState,
    /// The last reply.
    reply: Option<Reply>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum TransactionState {
    /// Nothing of it is in force.
    #[default]
    Nothing,
    /// Its runs are mapped.
    Mapped,
    /// Its runs are prepared.
    Prepared,
    /// It is over, and cannot be undone any more.
    Committed,
    /// It could not be undone; only a resynchronisation helps.
    Stuck,
}

/// A batch that a transaction begins with, or part of one that is not whole yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) kind: BatchKind,
    pub(super) runs: Vec<PageRun>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BatchKind {
    Map,
    Prepare(After),
    Resync(After),
}

impl PoolState {
    /// A pool that nobody has asked for anything.
    pub(super) fn new(served: ServedPool) -> Self {
        Self {
            served,
            session: None,
            speaker: None,
            orphaned: None,
            last: Transaction::default(),
            untold: BTreeSet::new(),
        }
    }

    /// A transaction that begins with `batch`.
    pub(super) fn batch(&mut self, sequence: u64, batch: Batch) -> Result<(u64, Reply), String> {
        if sequence == self.last.sequence {
            return match (&self.last.batch, &self.last.reply) {
                (Some(known), Some(reply)) if *known == batch => Ok((sequence, reply.clone())),
                _ => Err(format!("request {sequence} is there twice and differs")),
            };
        }
        if let BatchKind::Resync(after) = batch.kind {
            return Ok((sequence, self.resync(sequence, batch, after)));
        }
        self.last.is_over()?;
        self.heard();
        let mapper = &*self.served.mapper;
        let call = match batch.kind {
            BatchKind::Map => RankCall::Map(&batch.runs),
            BatchKind::Prepare(after) => RankCall::Prepare(&batch.runs, after),
            BatchKind::Resync(_) => unreachable!("a resynchronisation is no transaction"),
        };
        let answer = call.perform(mapper);
        let done = matches!(answer, RankAnswer::Batch(Ok(())));
        let (state, did) = match batch.kind {
            BatchKind::Prepare(_) => (TransactionState::Prepared, Reply::Prepared),
            _ => (TransactionState::Mapped, Reply::Done),
        };
        let reply = match answer {
            RankAnswer::Batch(Err(error)) => Reply::failed(error),
            _ => did,
        };
        self.last = Transaction {
            sequence,
            batch: Some(batch),
            state: if done {
                state
            } else {
                TransactionState::Nothing
            },
            reply: Some(reply.clone()),
        };
        Ok((sequence, reply))
    }

    /// Has exactly these runs mapped. There is no way back from it, and no need of one.
    fn resync(&mut self, sequence: u64, batch: Batch, after: After) -> Reply {
        let mapper = &*self.served.mapper;
        let before: BTreeSet<PageRun> = mapper.mapped().into_iter().collect();
        let answer = mapper.resync_after(&batch.runs, after);
        let mapped = mapper.mapped();
        match &answer {
            Ok(Resynced { remade, .. }) => self.untold.extend(remade),
            // It has done some of the work all the same.
            Err(_) => {
                let fresh = mapped.iter().filter(|run| !before.contains(run));
                self.untold.extend(fresh);
            }
        }
        let wanted: BTreeSet<PageRun> = batch.runs.iter().copied().collect();
        self.untold.retain(|run| wanted.contains(run));
        let doubts: Doubts = match &answer {
            Ok(Resynced { in_doubt, .. }) => in_doubt.iter().collect(),
            Err(_) => Doubts::default(),
        };
        // What is still in flight is mapped, and in doubt.
        let mapped: Vec<PageRun> = mapped
            .into_iter()
            .filter(|run| !doubts.overlaps(*run))
            .collect();
        let answer = answer.map(|Resynced { in_doubt, .. }| Resynced {
            remade: self.untold.iter().copied().collect(),
            in_doubt,
        });
        let reply = Reply::resynced(answer, &mapped);
        self.last = Transaction {
            sequence,
            batch: Some(batch),
            state: TransactionState::Nothing,
            reply: Some(reply.clone()),
        };
        reply
    }

    /// The coordinator goes on: it has had the reply to the resynchronisation before.
    fn heard(&mut self) {
        if let Some(Reply::Resynced { .. }) = self.last.reply {
            self.untold.clear();
        }
    }

    /// The second half of the last transaction.
    pub(super) fn commit(&mut self, sequence: u64) -> Result<(u64, Reply), String> {
        let last = &mut self.last;
        match last.state {
            TransactionState::Prepared if sequence == last.sequence => {
                let runs = last.batch.as_ref().map_or(&[][..], |batch| &batch.runs);
                self.served.mapper.commit_unmap(runs);
                last.state = TransactionState::Committed;
            }
            TransactionState::Committed if sequence == last.sequence => {}
            _ => return Err(format!("commit of {sequence}, which is not prepared")),
        }
        last.reply = Some(Reply::Committed);
        Ok((sequence, Reply::Committed))
    }

    /// Takes back what the transaction did, if it did anything; if it never came it comes too late
    /// from now on.
    pub(super) fn undo(&mut self, sequence: u64) -> (u64, Reply) {
        if sequence > self.last.sequence {
            self.last = Transaction {
                sequence,
                ..Transaction::default()
            };
        }
        let last = &mut self.last;
        let runs = last.batch.as_ref().map_or(&[][..], |batch| &batch.runs);
        let call = match last.state {
            TransactionState::Mapped => RankCall::Undo(runs),
            TransactionState::Prepared => RankCall::Abort(runs),
            TransactionState::Nothing => {
                last.reply = Some(Reply::Undone);
                return (sequence, Reply::Undone);
            }
            TransactionState::Stuck => {
                let reply = last.reply.clone();
                return (sequence, reply.expect("what is stuck was answered"));
            }
            TransactionState::Committed => {
                let reason = format!("request {sequence} is committed");
                let failure = wire::Failure::State { reason };
                let doubt = wire::Part::Nothing;
                return (sequence, Reply::Failed { failure, doubt });
            }
        };
        let reply = match call.perform(&*self.served.mapper) {
            RankAnswer::Batch(Err(error)) => {
                last.state = TransactionState::Stuck;
                Reply::failed(error)
            }
            _ => {
                last.state = TransactionState::Nothing;
                Reply::Undone
            }
        };
        last.reply = Some(reply.clone());
        (sequence, reply)
    }

    /// A question, or what changes no page either, and may be asked again.
    pub(super) fn ask(
        &mut self,
        sequence: u64,
        call: RankCall<'_>,
    ) -> Result<(u64, Reply), String> {
        if sequence > self.last.sequence {
            self.last.is_over()?;
            self.heard();
            self.last = Transaction {
                sequence,
                ..Transaction::default()
            };
        } else if self.last.batch.is_some() {
            return Err(format!("request {sequence} is there twice and differs"));
        }
        let reply = match call.perform(&*self.served.mapper) {
            RankAnswer::Ready(answer) => Reply::readiness(answer),
            RankAnswer::Headroom(pages) => Reply::Headroom(pages),
            RankAnswer::Trimmed => Reply::Done,
            other => unreachable!("{other:?} is no answer to a question"),
        };
        Ok((sequence, reply))
    }
}

impl Transaction {
    /// May another one begin?
    fn is_over(&self) -> Result<(), String> {
        match self.state {
            TransactionState::Prepared => Err(format!(
                "another request while {} is neither committed nor undone",
                self.sequence
            )),
            _ => Ok(()),
        }
    }
}
