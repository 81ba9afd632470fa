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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use kvcached_mapper::{After, MapError, PageId, Readiness};
    use proptest::prelude::*;

    use super::*;
    use crate::wire::{Reply, read_greeting, read_message};
    use crate::{FrameDecoder, push_frame};

    /// Remembers the batches that it was given.
    #[derive(Debug, Default)]
    struct Recorder(Mutex<Vec<(&'static str, Vec<PageRun>)>>);

    impl Mapper for Recorder {
        fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
            self.0.lock().unwrap().push(("map", runs.to_vec()));
            Ok(())
        }

        fn unmap_after(&self, runs: &[PageRun], _: After) -> Result<(), MapError> {
            self.0.lock().unwrap().push(("unmap", runs.to_vec()));
            Ok(())
        }

        fn headroom(&self) -> Option<u32> {
            None
        }

        fn ready(&self) -> Result<Readiness, MapError> {
            Ok(Readiness::Ready)
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

    /// A conversation that has greeted.
    fn greeted(rank: &mut ServedRank) -> Conversation {
        let mut conversation = Conversation::default();
        let payload = framed(|out| wire::push_hello(out, &hello()));
        let mut out = Vec::new();
        assert_eq!(conversation.handle_frame(rank, &payload, &mut out), Ok(()));
        assert_eq!(read_greeting(&payloads(&out)[0]), Ok(Ok(hello())));
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
            let payload = framed(|out| wire::push_hello(out, &hello));
            let mut out = Vec::new();
            let end = Conversation::default().handle_frame(&mut rank, &payload, &mut out);
            let Ok(Err(refusal)) = read_greeting(&payloads(&out)[0]) else {
                panic!("{words}")
            };
            assert_eq!(refusal.to_string(), words);
            assert_eq!(end, Err(ConversationEnd::Refused(refusal)));
        }
    }

    #[test]
    fn another_version_and_no_hello_at_all_are_refused() {
        let mut newer = framed(|out| wire::push_hello(out, &hello()));
        newer[4] = 77;
        let request = framed(|out| wire::push_request(out, SessionId(5), 1, Operation::Ready));
        for (payload, words) in [
            (
                &newer[..],
                "the coordinator speaks protocol version 77, the worker version 1",
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

    /// Two engines that meet by mistake: the one that runs is not disturbed.
    #[test]
    fn a_pool_has_one_coordinator_at_a_time() {
        let (mut rank, recorder) = rank();
        let mut first = greeted(&mut rank);
        let payload = framed(|out| wire::push_hello(out, &hello()));
        let mut out = Vec::new();
        let mut second = Conversation::default();
        let refused = second.handle_frame(&mut rank, &payload, &mut out);
        assert_eq!(
            refused,
            Err(ConversationEnd::Refused(Refusal::Taken { pool: 0 }))
        );
        second.end(&mut rank);

        let map = framed(|out| wire::push_request(out, SessionId(5), 1, Operation::Map(&runs(1))));
        assert_eq!(ask(&mut first, &mut rank, &map).0, Ok(()));
        assert_eq!(recorder.0.lock().unwrap().len(), 1);
        first.end(&mut rank);
        let _ = greeted(&mut rank);
    }

    #[test]
    fn a_batch_in_parts_is_done_once_and_whole() {
        let (mut rank, recorder) = rank();
        let mut conversation = greeted(&mut rank);
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
        assert!(recorder.0.lock().unwrap().is_empty());
        let (result, messages) = ask(&mut conversation, &mut rank, &part(&all[4..], false));
        assert_eq!(result, Ok(()));
        assert_eq!(
            messages,
            [WorkerMessage::Reply {
                sequence: 8,
                reply: Reply::Done
            }]
        );
        assert_eq!(*recorder.0.lock().unwrap(), [("map", all.clone())]);
        assert!(!conversation.is_unfinished());

        // Neither may another request come between its parts, nor may it have more than can be.
        let between = framed(|out| wire::push_request(out, SessionId(5), 9, Operation::Ready));
        let too_much: Vec<PageRun> = runs(101);
        for parts in [
            [part(&all, true), between],
            [part(&all, true), part(&too_much, true)],
        ] {
            let (mut rank, recorder) = self::rank();
            let mut conversation = greeted(&mut rank);
            assert_eq!(ask(&mut conversation, &mut rank, &parts[0]).0, Ok(()));
            let (result, messages) = ask(&mut conversation, &mut rank, &parts[1]);
            assert!(matches!(result, Err(ConversationEnd::Violation { .. })));
            assert!(matches!(messages[..], [WorkerMessage::Violation { .. }]));
            assert!(recorder.0.lock().unwrap().is_empty());
        }
    }

    #[test]
    fn a_request_out_of_turn_changes_nothing() {
        for (session, sequence) in [(SessionId(6), 3), (SessionId(5), 2), (SessionId(5), 1)] {
            let (mut rank, recorder) = rank();
            let mut conversation = greeted(&mut rank);
            let first = framed(|out| wire::push_request(out, SessionId(5), 2, Operation::Ready));
            assert_eq!(ask(&mut conversation, &mut rank, &first).0, Ok(()));
            let operation = Operation::Map(&runs(1));
            let next = framed(|out| wire::push_request(out, session, sequence, operation));
            let (result, _) = ask(&mut conversation, &mut rank, &next);
            assert!(matches!(result, Err(ConversationEnd::Violation { .. })));
            assert!(recorder.0.lock().unwrap().is_empty());
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
            let mut request =
                framed(|out| wire::push_request(out, SessionId(5), 1, Operation::Map(&runs(5))));
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
                    prop_assert!(recorder.0.lock().unwrap().is_empty() || good);
                    break;
                }
                prop_assert!(good);
            }
        }
    }
}
