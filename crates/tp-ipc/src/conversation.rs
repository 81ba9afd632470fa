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

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcached_mapper::{After, PageRun, PoolId, Rank, RankMapper, Resynced, Stage};
use thiserror::Error;

use crate::wire::{
    self, Command, GeometryDigest, Hello, Refusal, Reply, Request, SessionId, WireError,
    WorkerMessage,
};
use crate::{FrameError, InstanceName, PROTOCOL_VERSION, RankAnswer, RankCall};

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
    pools: BTreeMap<PoolId, PoolState>,
    /// Number of the last conversation that was welcomed.
    conversations: u64,
    /// How long what is mapped outlives the last conversation.
    orphan_timeout: Option<Duration>,
    /// Why it serves nobody.
    unable: Option<String>,
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
    /// The same coordinator has a newer connection; nobody listens to this one any more.
    #[error("replaced by a newer connection of the same coordinator")]
    Replaced,
}

/// A pool, and what is known of its coordinator.
#[derive(Debug)]
struct PoolState {
    served: ServedPool,
    /// The latest coordinator's.
    session: Option<SessionId>,
    /// The conversation that speaks for it, if it is connected.
    speaker: Option<u64>,
    /// Since when nobody is connected, if there is something to release for it.
    orphaned: Option<Instant>,
    /// Runs that a resynchronisation has remade, empty, without the coordinator being known to have
    /// heard of it: the attempt failed half-way, or its reply got lost.
    untold: BTreeSet<PageRun>,
    last: Transaction,
}

/// The last transaction of a pool.
#[derive(Debug, Default)]
struct Transaction {
    sequence: u64,
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
struct Batch {
    kind: BatchKind,
    runs: Vec<PageRun>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BatchKind {
    Map,
    Prepare(After),
    Resync(After),
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

impl ServedRank {
    /// The rank with its pools; of two with the same number the later one counts.
    #[must_use]
    pub fn new(
        instance: InstanceName,
        stage: Stage,
        rank: Rank,
        pools: impl IntoIterator<Item = ServedPool>,
    ) -> Self {
        let state = |served: ServedPool| {
            let state = PoolState {
                served,
                session: None,
                speaker: None,
                orphaned: None,
                untold: BTreeSet::new(),
                last: Transaction::default(),
            };
            (state.served.pool, state)
        };
        Self {
            instance,
            stage,
            rank,
            pools: pools.into_iter().map(state).collect(),
            conversations: 0,
            orphan_timeout: None,
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

impl PoolState {
    /// A transaction that begins with `batch`.
    fn batch(&mut self, sequence: u64, batch: Batch) -> Result<(u64, Reply), String> {
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
    fn commit(&mut self, sequence: u64) -> Result<(u64, Reply), String> {
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
    fn undo(&mut self, sequence: u64) -> (u64, Reply) {
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

    /// A question, which changes nothing and may be asked again.
    fn ask(&mut self, sequence: u64, call: RankCall<'_>) -> Result<(u64, Reply), String> {
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
mod tests {
    use std::sync::Mutex;

    use kvcached_mapper::{After, Cause, MapError, Mapper, PageId, Readiness};
    use proptest::prelude::*;

    use super::*;
    use crate::wire::{RunsDigest, Verb, read_greeting, read_message};
    use crate::{FrameDecoder, push_frame};

    /// Remembers the batches that it was given.
    #[derive(Debug, Default)]
    struct Recorder(Mutex<Vec<(&'static str, Vec<PageRun>)>>);

    impl Mapper for Recorder {
        fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
            self.called("map", runs);
            Ok(())
        }

        fn unmap_after(&self, runs: &[PageRun], _: After) -> Result<(), MapError> {
            self.called("unmap", runs);
            Ok(())
        }

        fn headroom(&self) -> Option<u32> {
            None
        }

        fn ready(&self) -> Result<Readiness, MapError> {
            Ok(Readiness::Ready)
        }
    }

    impl Recorder {
        fn called(&self, call: &'static str, runs: &[PageRun]) {
            self.0.lock().unwrap().push((call, runs.to_vec()));
        }

        /// What was called since this was last asked.
        fn calls(&self) -> Vec<(&'static str, Vec<PageRun>)> {
            std::mem::take(&mut *self.0.lock().unwrap())
        }
    }

    impl RankMapper for Recorder {
        fn prepare_unmap(&self, runs: &[PageRun], _: After) -> Result<(), MapError> {
            self.called("prepare", runs);
            Ok(())
        }

        fn commit_unmap(&self, runs: &[PageRun]) {
            self.called("commit", runs);
        }

        fn abort_unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
            self.called("abort", runs);
            Ok(())
        }

        fn resync_after(&self, wanted: &[PageRun], _: After) -> Result<Resynced, MapError> {
            self.called("resync", wanted);
            Ok(Resynced::default())
        }

        fn mapped(&self) -> Vec<PageRun> {
            Vec::new()
        }
    }

    fn hello() -> Hello {
        Hello {
            instance: "llama".parse().unwrap(),
            stage: Stage(0),
            rank: Rank(1),
            pool: PoolId(0),
            geometry: GeometryDigest::new(100, 4, 1),
            session: SessionId(5),
        }
    }

    fn rank() -> (ServedRank, Arc<Recorder>) {
        let recorder = Arc::new(Recorder::default());
        let Hello {
            instance,
            stage,
            rank,
            pool,
            geometry,
            ..
        } = hello();
        let served = ServedPool {
            pool,
            geometry,
            mapper: recorder.clone(),
        };
        (ServedRank::new(instance, stage, rank, [served]), recorder)
    }

    fn runs(count: u32) -> Vec<PageRun> {
        (0..count)
            .map(|page| PageRun::new(PageId(page), 1).unwrap())
            .collect()
    }

    fn payloads(bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut decoder = FrameDecoder::default();
        decoder.feed(bytes);
        let mut payloads = Vec::new();
        while let Some(payload) = decoder.next_frame().unwrap() {
            payloads.push(payload.to_vec());
        }
        payloads
    }

    fn framed(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes);
        payloads(&bytes).remove(0)
    }

    /// A conversation that has greeted, in this session.
    fn welcomed(rank: &mut ServedRank, session: u64) -> Conversation {
        let hello = Hello {
            session: SessionId(session),
            ..hello()
        };
        let mut conversation = Conversation::default();
        let payload = framed(|out| wire::push_hello(out, &hello));
        let mut out = Vec::new();
        assert_eq!(conversation.handle_frame(rank, &payload, &mut out), Ok(()));
        assert_eq!(read_greeting(&payloads(&out)[0]), Ok(Ok(hello)));
        conversation
    }

    /// The same, having been told under number 1 to have nothing.
    fn greeted(rank: &mut ServedRank) -> Conversation {
        let mut conversation = welcomed(rank, 5);
        let resynced = Reply::Resynced {
            digest: RunsDigest::new([]),
            remade: wire::Part::Nothing,
            in_doubt: wire::Runs(Vec::new().into()),
        };
        assert_eq!(
            told(&mut conversation, rank, 1, Verb::Resync(&[], After::DEVICE)),
            [resynced]
        );
        conversation
    }

    fn ask(
        conversation: &mut Conversation,
        rank: &mut ServedRank,
        payload: &[u8],
    ) -> (Result<(), ConversationEnd>, Vec<WorkerMessage>) {
        let mut out = Vec::new();
        let result = conversation.handle_frame(rank, payload, &mut out);
        (
            result,
            payloads(&out)
                .iter()
                .map(|payload| read_message(payload).unwrap())
                .collect(),
        )
    }

    fn request(session: u64, sequence: u64, verb: Verb<'_>) -> Vec<u8> {
        framed(|out| wire::push_request(out, SessionId(session), sequence, verb))
    }

    /// The replies to a good request of session 5.
    fn told(
        conversation: &mut Conversation,
        rank: &mut ServedRank,
        number: u64,
        verb: Verb<'_>,
    ) -> Vec<Reply> {
        let (result, messages) = ask(conversation, rank, &request(5, number, verb));
        assert_eq!(result, Ok(()));
        let reply = |message| match message {
            WorkerMessage::Reply { sequence, reply } => {
                assert_eq!(sequence, number);
                reply
            }
            other => panic!("{other:?}"),
        };
        messages.into_iter().map(reply).collect()
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "any moment will do as the first one"
    )]
    fn start() -> Instant {
        Instant::now()
    }

    #[test]
    fn a_hello_for_somebody_else_is_refused_and_both_sides_are_named() {
        type Change = fn(&mut Hello);
        let rows: [(Change, &str); 5] = [
            (
                |hello| hello.instance = "other".parse().unwrap(),
                "the coordinator belongs to instance other, the worker to llama",
            ),
            (
                |hello| hello.rank = Rank(2),
                "the coordinator wants stage 0, rank 2, the worker is stage 0, rank 1",
            ),
            (
                |hello| hello.stage = Stage(3),
                "the coordinator wants stage 3, rank 1, the worker is stage 0, rank 1",
            ),
            (
                |hello| hello.pool = PoolId(9),
                "the coordinator wants pool 9, the worker has pools [0]",
            ),
            (
                |hello| hello.geometry = GeometryDigest::new(100, 8, 1),
                "the coordinator has 100 pages of 8 blocks in pool 0, the worker 100 pages of 4 blocks",
            ),
        ];
        for (change, words) in rows {
            let (mut rank, _) = rank();
            let mut hello = hello();
            change(&mut hello);
            assert_eq!(refused(&mut rank, &hello).to_string(), words);
        }
    }

    /// What a rank answers to a hello that it does not welcome.
    fn refused(rank: &mut ServedRank, hello: &Hello) -> Refusal {
        let payload = framed(|out| wire::push_hello(out, hello));
        let mut out = Vec::new();
        let end = Conversation::default().handle_frame(rank, &payload, &mut out);
        let Ok(Err(refusal)) = read_greeting(&payloads(&out)[0]) else {
            panic!("{hello:?} was welcomed")
        };
        assert_eq!(end, Err(ConversationEnd::Refused(refusal.clone())));
        refusal
    }

    #[test]
    fn another_version_and_no_hello_at_all_are_refused() {
        let mut newer = framed(|out| wire::push_hello(out, &hello()));
        newer[4] = 77;
        let request = request(5, 1, Verb::Ready);
        for (payload, words) in [
            (
                &newer[..],
                "the coordinator speaks protocol version 77, the worker version 2",
            ),
            (
                b"GET / HTTP/1.1",
                "the coordinator did not say hello: does not begin as this protocol does",
            ),
            (
                &request,
                "the coordinator did not say hello: does not begin as this protocol does",
            ),
        ] {
            let (mut rank, _) = rank();
            let mut out = Vec::new();
            let end = Conversation::default().handle_frame(&mut rank, payload, &mut out);
            assert!(matches!(end, Err(ConversationEnd::Refused(_))));
            let Ok(Err(refusal)) = read_greeting(&payloads(&out)[0]) else {
                panic!("{words}")
            };
            assert_eq!(refusal.to_string(), words);
        }
    }

    /// Two engines that meet by mistake: the one that runs is not disturbed. One that is gone makes
    /// room for a later one, and is not let in again after it.
    #[test]
    fn a_pool_has_one_coordinator_and_never_an_earlier_one() {
        let (mut rank, recorder) = rank();
        let in_session = |session| Hello {
            session: SessionId(session),
            ..hello()
        };
        let mut first = greeted(&mut rank);
        let taken = Refusal::Taken { pool: 0 };
        assert_eq!(refused(&mut rank, &in_session(6)), taken);
        let superseded = Refusal::Superseded { pool: 0 };
        assert_eq!(refused(&mut rank, &in_session(4)), superseded);

        recorder.calls();
        let runs = runs(1);
        let done = told(&mut first, &mut rank, 2, Verb::Map(&runs));
        assert_eq!(done, [Reply::Done]);
        assert_eq!(recorder.calls(), [("map", runs)]);
        first.end(&mut rank, start());
        let second = welcomed(&mut rank, 6);
        second.end(&mut rank, start());
        assert_eq!(refused(&mut rank, &in_session(5)), superseded);
    }

    /// The same coordinator connects again while its old connection still has something to say.
    #[test]
    fn of_two_conversations_of_one_session_the_later_is_listened_to() {
        let (mut rank, recorder) = rank();
        let mut old = greeted(&mut rank);
        let mut new = greeted(&mut rank);
        recorder.calls();
        let late = request(5, 9, Verb::Map(&runs(1)));
        let (result, messages) = ask(&mut old, &mut rank, &late);
        assert_eq!(result, Err(ConversationEnd::Replaced));
        assert_eq!(messages, []);
        old.end(&mut rank, start());
        assert_eq!(recorder.calls(), []);
        let ready = told(&mut new, &mut rank, 2, Verb::Ready);
        assert_eq!(ready, [Reply::Ready]);
    }

    #[test]
    fn nothing_is_done_before_the_first_resync() {
        let runs = runs(2);
        for verb in [
            Verb::Map(&runs),
            Verb::Prepare(&runs, After::DEVICE),
            Verb::Commit,
            Verb::Undo,
            Verb::Ready,
            Verb::Headroom,
        ] {
            let (mut rank, recorder) = rank();
            let mut conversation = welcomed(&mut rank, 5);
            let (result, _) = ask(&mut conversation, &mut rank, &request(5, 1, verb));
            assert!(
                matches!(result, Err(ConversationEnd::Violation { .. })),
                "{verb:?}"
            );
            assert_eq!(recorder.calls(), []);
        }
    }

    /// A request that comes again is answered from memory; one that comes late is not answered.
    /// A rank that begins with nothing, and has room for so many runs, attempt after attempt.
    #[derive(Debug)]
    struct Cramped {
        mapped: Mutex<Vec<PageRun>>,
        room: Mutex<Vec<usize>>,
    }

    impl Mapper for Cramped {
        fn map(&self, _: &[PageRun]) -> Result<(), MapError> {
            Ok(())
        }

        fn unmap_after(&self, _: &[PageRun], _: After) -> Result<(), MapError> {
            Ok(())
        }

        fn headroom(&self) -> Option<u32> {
            None
        }

        fn ready(&self) -> Result<Readiness, MapError> {
            Ok(Readiness::Ready)
        }
    }

    impl RankMapper for Cramped {
        fn prepare_unmap(&self, _: &[PageRun], _: After) -> Result<(), MapError> {
            Ok(())
        }

        fn commit_unmap(&self, _: &[PageRun]) {}

        fn abort_unmap(&self, _: &[PageRun]) -> Result<(), MapError> {
            Ok(())
        }

        fn resync_after(&self, wanted: &[PageRun], _: After) -> Result<Resynced, MapError> {
            let room = self.room.lock().unwrap().remove(0);
            let mut mapped = self.mapped.lock().unwrap();
            let before = std::mem::take(&mut *mapped);
            mapped.extend(wanted.iter().take(room));
            if room < wanted.len() {
                return Err(MapError::clean(Cause::OutOfMemory { at: None }));
            }
            let remade = wanted.iter().filter(|run| !before.contains(run));
            Ok(Resynced {
                remade: remade.copied().collect(),
                in_doubt: Vec::new(),
            })
        }

        fn mapped(&self) -> Vec<PageRun> {
            self.mapped.lock().unwrap().clone()
        }
    }

    /// Else an engine would read what is empty, and not know.
    #[test]
    fn what_was_remade_is_told_until_the_coordinator_has_heard_it() {
        let hello = hello();
        let served = ServedPool {
            pool: hello.pool,
            geometry: hello.geometry,
            mapper: Arc::new(Cramped {
                mapped: Mutex::default(),
                room: Mutex::new(vec![2, 3, 3, 3]),
            }),
        };
        let mut rank = ServedRank::new(hello.instance, hello.stage, hello.rank, [served]);
        let wanted = runs(3);
        let resync = |rank: &mut ServedRank, number| {
            // Nobody hears the reply: the connection ends, and there is another.
            let mut conversation = welcomed(rank, 5);
            let replies = told(
                &mut conversation,
                rank,
                number,
                Verb::Resync(&wanted, After::DEVICE),
            );
            (conversation, replies)
        };
        let remade = |remade| Reply::Resynced {
            digest: RunsDigest::new(runs(3)),
            remade,
            in_doubt: wire::Runs(Vec::new().into()),
        };
        let all = || wire::Part::Runs(wire::Runs(runs(3).into()));
        let (_, replies) = resync(&mut rank, 1);
        assert!(matches!(replies[..], [Reply::Failed { .. }]), "no room");
        for number in [2, 3] {
            assert_eq!(resync(&mut rank, number).1, [remade(all())]);
        }
        let (mut conversation, _) = resync(&mut rank, 3);
        let ready = told(&mut conversation, &mut rank, 4, Verb::Ready);
        assert_eq!(ready, [Reply::Ready]);
        assert_eq!(resync(&mut rank, 5).1, [remade(wire::Part::Nothing)]);
    }

    #[test]
    fn a_transaction_is_applied_once() {
        let (mut rank, recorder) = rank();
        let mut it = greeted(&mut rank);
        let runs = runs(3);
        recorder.calls();
        for _ in 0..3 {
            let done = told(&mut it, &mut rank, 2, Verb::Map(&runs));
            assert_eq!(done, [Reply::Done]);
        }
        assert_eq!(recorder.calls(), [("map", runs.clone())]);
        for _ in 0..3 {
            assert_eq!(told(&mut it, &mut rank, 2, Verb::Undo), [Reply::Undone]);
        }
        assert_eq!(recorder.calls(), [("unmap", runs.clone())]);

        let prepare = Verb::Prepare(&runs, After::DEVICE);
        for _ in 0..3 {
            let prepared = told(&mut it, &mut rank, 3, prepare);
            assert_eq!(prepared, [Reply::Prepared]);
        }
        for _ in 0..3 {
            let committed = told(&mut it, &mut rank, 3, Verb::Commit);
            assert_eq!(committed, [Reply::Committed]);
        }
        let calls = [("prepare", runs.clone()), ("commit", runs.clone())];
        assert_eq!(recorder.calls(), calls);

        assert_eq!(told(&mut it, &mut rank, 4, prepare), [Reply::Prepared]);
        for _ in 0..3 {
            assert_eq!(told(&mut it, &mut rank, 4, Verb::Undo), [Reply::Undone]);
        }
        let calls = [("prepare", runs.clone()), ("abort", runs.clone())];
        assert_eq!(recorder.calls(), calls);

        // All of that once more, late.
        for (number, verb) in [
            (2, Verb::Map(&runs)),
            (2, Verb::Undo),
            (3, prepare),
            (3, Verb::Commit),
            (1, Verb::Resync(&[], After::DEVICE)),
        ] {
            assert_eq!(told(&mut it, &mut rank, number, verb), [], "{verb:?}");
        }
        // An undo that overtakes what it undoes makes that late, too.
        assert_eq!(told(&mut it, &mut rank, 7, Verb::Undo), [Reply::Undone]);
        assert_eq!(told(&mut it, &mut rank, 6, Verb::Map(&runs)), []);
        assert_eq!(recorder.calls(), []);
    }

    /// What no coordinator does that goes by the rules.
    #[test]
    fn a_transaction_that_contradicts_itself_is_a_violation() {
        let (all, fewer) = (runs(3), runs(2));
        let prepare = Verb::Prepare(&all, After::DEVICE);
        for (first, then) in [
            ((2, Verb::Map(&all)), (2, Verb::Map(&fewer))),
            ((2, Verb::Map(&all)), (2, prepare)),
            ((2, Verb::Map(&all)), (2, Verb::Ready)),
            ((2, Verb::Map(&all)), (2, Verb::Commit)),
            ((2, Verb::Ready), (3, Verb::Commit)),
            ((2, prepare), (3, Verb::Map(&all))),
            ((2, prepare), (3, Verb::Ready)),
        ] {
            let (mut rank, recorder) = rank();
            let mut it = greeted(&mut rank);
            assert_eq!(told(&mut it, &mut rank, first.0, first.1).len(), 1);
            recorder.calls();
            let (result, _) = ask(&mut it, &mut rank, &request(5, then.0, then.1));
            let violated = matches!(result, Err(ConversationEnd::Violation { .. }));
            assert!(violated, "{first:?} {then:?}");
            assert_eq!(recorder.calls(), []);
        }
    }

    #[test]
    fn what_nobody_comes_back_for_is_released_after_the_bound() {
        let (rank, recorder) = rank();
        let bound = Duration::from_secs(5);
        let mut rank = rank.with_orphan_timeout(bound);
        let now = start();
        assert_eq!(rank.poll_timeout(), None);
        let it = greeted(&mut rank);
        assert_eq!(rank.poll_timeout(), None);
        it.end(&mut rank, now);
        assert_eq!(rank.poll_timeout(), Some(now + bound));

        // Back in time: nothing is released, then or later.
        recorder.calls();
        let it = welcomed(&mut rank, 5);
        rank.handle_timeout(now + bound);
        assert_eq!((rank.poll_timeout(), recorder.calls()), (None, Vec::new()));

        it.end(&mut rank, now);
        rank.handle_timeout(now + bound - Duration::from_millis(1));
        assert_eq!(recorder.calls(), []);
        rank.handle_timeout(now + bound);
        assert_eq!(recorder.calls(), [("resync", Vec::new())]);
        assert_eq!(rank.poll_timeout(), None);
    }

    #[test]
    fn a_rank_that_could_not_begin_says_so() {
        let Hello {
            instance,
            stage,
            rank,
            ..
        } = hello();
        let mut rank = ServedRank::unable(instance, stage, rank, "no device".to_owned());
        assert_eq!(
            refused(&mut rank, &hello()).to_string(),
            "the worker cannot serve: no device"
        );
    }

    #[test]
    fn a_batch_in_parts_is_done_once_and_whole() {
        let (mut rank, recorder) = rank();
        let mut conversation = greeted(&mut rank);
        recorder.calls();
        let part = |runs: &[PageRun], more: bool| {
            // As `push_request` cuts a batch, only sooner.
            let command = Command::Map {
                runs: wire::Runs(runs.into()),
                more,
            };
            let envelope = (SessionId(5), 8u64, command);
            framed(|out| {
                push_frame(out, |payload| {
                    payload.extend(postcard::to_stdvec(&envelope).unwrap());
                });
            })
        };
        let all = runs(6);
        for (index, first) in [0, 2].into_iter().enumerate() {
            let asked = ask(
                &mut conversation,
                &mut rank,
                &part(&all[first..first + 2], true),
            );
            assert_eq!(asked, (Ok(()), Vec::new()), "part {index}");
            assert!(conversation.is_unfinished());
        }
        assert_eq!(recorder.calls(), []);
        let (result, messages) = ask(&mut conversation, &mut rank, &part(&all[4..], false));
        assert_eq!(result, Ok(()));
        assert_eq!(
            messages,
            [WorkerMessage::Reply {
                sequence: 8,
                reply: Reply::Done
            }]
        );
        assert_eq!(recorder.calls(), [("map", all.clone())]);
        assert!(!conversation.is_unfinished());

        // Neither may another request come between its parts, nor may it have more than can be.
        let between = request(5, 9, Verb::Ready);
        let too_much: Vec<PageRun> = runs(101);
        for parts in [
            [part(&all, true), between],
            [part(&all, true), part(&too_much, true)],
        ] {
            let (mut rank, recorder) = self::rank();
            let mut conversation = greeted(&mut rank);
            recorder.calls();
            assert_eq!(ask(&mut conversation, &mut rank, &parts[0]).0, Ok(()));
            let (result, messages) = ask(&mut conversation, &mut rank, &parts[1]);
            assert!(matches!(result, Err(ConversationEnd::Violation { .. })));
            assert!(matches!(messages[..], [WorkerMessage::Violation { .. }]));
            assert_eq!(recorder.calls(), []);
        }
    }

    #[test]
    fn a_request_of_another_session_changes_nothing() {
        for session in [4, 6] {
            let (mut rank, recorder) = rank();
            let mut conversation = greeted(&mut rank);
            recorder.calls();
            let map = request(session, 3, Verb::Map(&runs(1)));
            let (result, _) = ask(&mut conversation, &mut rank, &map);
            assert!(matches!(result, Err(ConversationEnd::Violation { .. })));
            assert_eq!(recorder.calls(), []);
        }
    }

    proptest! {
        /// Bytes that nobody meant: answered, and over, and nothing was done.
        #[test]
        fn a_malformed_frame_changes_nothing(
            garbage in prop::collection::vec(any::<u8>(), 1..100),
            flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..4),
        ) {
            let (mut rank, recorder) = rank();
            let mut conversation = greeted(&mut rank);
            recorder.calls();
            let mut request = request(5, 2, Verb::Map(&runs(5)));
            for (index, bits) in flips {
                let at = index.index(request.len());
                request[at] ^= bits;
            }
            for payload in [garbage, request] {
                let good = wire::read_request(&payload).is_ok_and(|r| r.session == SessionId(5));
                let (result, messages) = ask(&mut conversation, &mut rank, &payload);
                if result.is_err() {
                    let told = matches!(messages[..], [WorkerMessage::Violation { .. }]);
                    prop_assert!(told, "{:?}", messages);
                    prop_assert!(recorder.calls().is_empty() || good);
                    break;
                }
                prop_assert!(good);
            }
        }
    }
}
