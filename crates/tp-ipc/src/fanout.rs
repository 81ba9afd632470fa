//! One operation over all ranks: local first, then every remote rank at once, undone everywhere if
//! one of them cannot. No socket, no clock, no thread: what happened goes in, what to do comes out.
//!
//! ```text
//! begin ─▶ local ─▶ remote ranks ─────────────────────────▶ all did it: Ok
//!            │          └─ one refused, one got lost ─▶ undo local ─▶ undo remote ─▶ Err
//!            └─ failed: Err, nothing was sent
//! ```
//!
//! A rank is *suspect* once it is not known which pages it has: it did not answer, it broke the
//! protocol, it could not undo. From then on no batch is begun at all.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvcached_mapper::{Cause, MapError, NotReady, PageRun, PeerCause, Rank, Readiness, Stage};

use crate::operation::Kind;
use crate::peer::{Link, Peer, Turn};
use crate::wire::{self, Doubt, Hello, Refusal, Reply, WireError, WorkerMessage};
use crate::{Answer, Endpoint, Operation, PROTOCOL_VERSION, Topology};

/// A remote rank, by its position in the fan-out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerIndex(usize);

impl PeerIndex {
    /// The position as an index into a table with one entry per peer.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0
    }
}

/// What the caller is to do next for the operation under way. Each thing is given once.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// Do this with the local mapper; the answer goes to [`Fanout::handle_local`].
    Local(Operation<'a>),
    /// Connect to a rank; then [`Fanout::handle_connected`] or [`Fanout::handle_unreachable`].
    Connect(PeerIndex),
    /// Send a rank these bytes, one whole frame or several.
    Send {
        /// The rank.
        peer: PeerIndex,
        /// The bytes.
        frames: &'a [u8],
    },
    /// Wait for whatever [`Fanout::awaits`] says, no longer than until then; after that
    /// [`Fanout::handle_timeout`]. Everything that can be sent has been.
    Wait(Instant),
    /// It is over, and this is the outcome. Another operation may begin.
    Done(Answer),
}

/// Drives one [`Operation`] at a time over the ranks of a [`Topology`].
///
/// - [`begin`](Self::begin) starts one;
/// - [`poll`](Self::poll) gives what to do next, until it is done;
/// - `handle_*` tells what came of it, and whatever else happened.
///
/// An operation ends within twice its time-out of remote waiting: once for the ranks to do it, once
/// for them to undo it.
#[derive(Debug)]
pub struct Fanout {
    /// To whom it belongs; stage and rank are those of the peer that is greeted.
    hello: Hello,
    local: Option<LocalRank>,
    peers: Vec<Peer>,
    /// Of the last request.
    sequence: u64,
    work: Option<Work>,
    /// The batch of the operation under way.
    runs: Vec<PageRun>,
    /// The request under way, the same for every rank; and the last hello. Both are reused.
    frames: Vec<u8>,
    greeting: Vec<u8>,
}

#[derive(Debug)]
struct LocalRank {
    stage: Stage,
    rank: Rank,
    suspect: bool,
}

/// The operation under way.
#[derive(Debug)]
struct Work {
    kind: Kind,
    phase: Phase,
    timeout: Duration,
    /// Of the phase, if it waits for other ranks.
    deadline: Instant,
    /// Has the local rank done the batch?
    local_did: bool,
    /// The gravest failure so far: broken before full, then by rank.
    failure: Option<(bool, PeerIndex, Cause)>,
    uncertain: BTreeSet<PageRun>,
    missing: Vec<NotReady>,
    headroom: Option<u32>,
    /// Is there a rank whose headroom is not known?
    headroom_unknown: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    Local { polled: bool },
    Remote,
    UndoLocal { polled: bool },
    UndoRemote,
    Over(Answer),
}

impl Fanout {
    /// A fan-out over `topology`, nothing connected yet. `hello` says to whom it belongs; its stage
    /// and rank are replaced by those of each peer.
    #[must_use]
    pub fn new(hello: Hello, topology: &Topology) -> Self {
        let local = topology.local();
        let peers = topology.remotes();
        let peers = peers.map(|(stage, rank, at)| Peer::new(stage, rank, at.clone()));
        Self {
            hello,
            local: local.map(|(stage, rank)| LocalRank {
                stage,
                rank,
                suspect: false,
            }),
            peers: peers.collect(),
            sequence: 0,
            work: None,
            runs: Vec::new(),
            frames: Vec::new(),
            greeting: Vec::new(),
        }
    }

    /// The remote ranks.
    pub fn peers(&self) -> impl Iterator<Item = PeerIndex> + use<> {
        (0..self.peers.len()).map(PeerIndex)
    }

    /// Where a rank listens.
    #[must_use]
    pub fn endpoint(&self, peer: PeerIndex) -> &Endpoint {
        &self.peers[peer.0].endpoint
    }

    /// Is the connection of this rank still of use?
    #[must_use]
    pub fn keeps(&self, peer: PeerIndex) -> bool {
        let Peer { link, turn, .. } = &self.peers[peer.0];
        *link == Link::Up || matches!(turn, Turn::Greet | Turn::Greeting)
    }

    /// Is something expected from this rank?
    #[must_use]
    pub fn awaits(&self, peer: PeerIndex) -> bool {
        matches!(self.peers[peer.0].turn, Turn::Greeting | Turn::Asked)
    }

    /// Ranks of which it is not known which pages they have, the local one first.
    pub fn suspects(&self) -> impl Iterator<Item = (Stage, Rank)> {
        let local = self.local.iter().filter(|local| local.suspect);
        let peers = self.peers.iter().filter(|peer| peer.link == Link::Suspect);
        local
            .map(|local| (local.stage, local.rank))
            .chain(peers.map(|peer| (peer.stage, peer.rank)))
    }

    /// Starts `operation`; every wait for other ranks is bounded by `timeout`.
    ///
    /// # Panics
    /// If one is under way.
    pub fn begin(&mut self, operation: Operation<'_>, now: Instant, timeout: Duration) {
        assert!(self.work.is_none(), "one operation at a time");
        let (kind, runs) = operation.into_parts();
        self.runs.clear();
        self.runs.extend_from_slice(runs);
        for peer in &mut self.peers {
            peer.did = false;
        }
        let nothing_to_do = kind.is_batch() && self.runs.is_empty();
        let phase = if nothing_to_do {
            Phase::Over(Answer::Batch(Ok(())))
        } else if let Some(cause) = self.obstacle(kind) {
            Phase::Over(kind.failed(cause))
        } else {
            Phase::Local { polled: false }
        };
        self.work = Some(Work {
            kind,
            phase,
            timeout,
            deadline: now + timeout,
            local_did: false,
            failure: None,
            uncertain: BTreeSet::new(),
            missing: Vec::new(),
            headroom: None,
            headroom_unknown: false,
        });
        if self.local.is_none() && self.in_phase(&Phase::Local { polled: false }) {
            self.ask_peers(now);
        }
    }

    /// The next step.
    ///
    /// # Panics
    /// If no operation is under way, or a step was given and not dealt with.
    pub fn poll(&mut self) -> Step<'_> {
        let over = |work: &mut Work| matches!(work.phase, Phase::Over(_));
        if let Some(Work {
            phase: Phase::Over(answer),
            ..
        }) = self.work.take_if(over)
        {
            return Step::Done(answer);
        }
        let work = self.work.as_mut().expect("an operation is under way");
        let batch = work.kind.is_batch();
        match &mut work.phase {
            Phase::Local { polled } | Phase::UndoLocal { polled } => {
                assert!(
                    !std::mem::replace(polled, true),
                    "the local mapper is at work"
                );
                let undo = matches!(work.phase, Phase::UndoLocal { .. });
                let kind = if undo { work.kind.undoing() } else { work.kind };
                return Step::Local(kind.operation(&self.runs));
            }
            Phase::Remote | Phase::UndoRemote | Phase::Over(_) => {}
        }
        let deadline = work.deadline;
        let due = |peer: &Peer| matches!(peer.turn, Turn::Connect | Turn::Greet | Turn::Ask);
        let Some(index) = self.peers.iter().position(due) else {
            return Step::Wait(deadline);
        };
        let peer = &mut self.peers[index];
        match peer.turn {
            Turn::Connect => {
                peer.turn = Turn::Connecting;
                Step::Connect(PeerIndex(index))
            }
            Turn::Greet => {
                peer.turn = Turn::Greeting;
                self.greeting.clear();
                wire::push_hello(&mut self.greeting, &peer.hello(&self.hello));
                Step::Send {
                    peer: PeerIndex(index),
                    frames: &self.greeting,
                }
            }
            _ => {
                peer.turn = Turn::Asked;
                peer.touched |= batch;
                Step::Send {
                    peer: PeerIndex(index),
                    frames: &self.frames,
                }
            }
        }
    }

    /// The local mapper did what [`Step::Local`] says.
    ///
    /// # Panics
    /// If nothing was given, or the answer belongs to another kind of operation.
    pub fn handle_local(&mut self, answer: Answer, now: Instant) {
        let alone = self.peers.is_empty();
        let work = self.work.as_mut().expect("an operation is under way");
        let local = self.local.as_mut().expect("there is a local rank");
        match (&work.phase, answer) {
            (Phase::Local { .. }, Answer::Batch(Ok(()))) => work.local_did = true,
            (Phase::Local { .. }, Answer::Batch(Err(error))) => {
                // With nobody to differ from, naming the runs is enough.
                local.suspect |= !alone && !error.uncertain.is_empty();
                return self.finish(Answer::Batch(Err(error)));
            }
            (Phase::Local { .. }, Answer::Ready(Ok(Readiness::Ready))) => {}
            (Phase::Local { .. }, Answer::Ready(Ok(Readiness::NotReady(missing)))) => {
                work.missing.extend(missing);
            }
            (Phase::Local { .. }, failed @ Answer::Ready(Err(_))) => return self.finish(failed),
            (Phase::Local { .. }, Answer::Headroom(pages)) => {
                if pages.is_none() {
                    return self.finish(Answer::Headroom(None));
                }
                work.headroom = pages;
            }
            (Phase::UndoLocal { .. }, Answer::Batch(undone)) => {
                if undone.is_err() {
                    local.suspect = true;
                    work.uncertain.extend(&self.runs);
                }
                return self.undo_peers(now);
            }
            (phase, answer) => unreachable!("{answer:?} in {phase:?}"),
        }
        self.ask_peers(now);
    }

    /// A connection to the rank is there.
    pub fn handle_connected(&mut self, peer: PeerIndex) {
        let peer = &mut self.peers[peer.0];
        if peer.turn == Turn::Connecting {
            peer.turn = Turn::Greet;
        }
    }

    /// There is no connection to be had.
    pub fn handle_unreachable(&mut self, peer: PeerIndex, reason: String, now: Instant) {
        if self.peers[peer.0].turn == Turn::Connecting {
            self.miss(peer, reason);
            self.settle(now);
        }
    }

    /// A frame arrived from a rank.
    pub fn handle_frame(&mut self, peer: PeerIndex, payload: &[u8], now: Instant) {
        let Peer { turn, link, .. } = &self.peers[peer.0];
        match (turn, link) {
            (Turn::Greeting, _) => self.greeted(peer, payload),
            (_, Link::Up) => self.heard(peer, payload),
            // Whatever a connection that was given up still delivers.
            _ => {}
        }
        self.settle(now);
    }

    /// Bytes arrived from a rank that are no frame.
    pub fn handle_broken_frame(&mut self, peer: PeerIndex, reason: String, now: Instant) {
        self.lose(peer, PeerCause::Protocol { reason });
        self.settle(now);
    }

    /// The connection to a rank ended; also between operations.
    pub fn handle_disconnect(&mut self, peer: PeerIndex, reason: String, now: Instant) {
        self.lose(peer, PeerCause::Disconnected { reason });
        self.settle(now);
    }

    /// Time has passed; does nothing before a bound is reached.
    pub fn handle_timeout(&mut self, now: Instant) {
        let Some(work) = &self.work else { return };
        if !matches!(work.phase, Phase::Remote | Phase::UndoRemote) || now < work.deadline {
            return;
        }
        let timeout_ms = u64::try_from(work.timeout.as_millis()).unwrap_or(u64::MAX);
        let cause = PeerCause::TimedOut { timeout_ms };
        for peer in self.peers() {
            let work = self
                .work
                .as_mut()
                .expect("a time-out belongs to an operation");
            match self.peers[peer.0].turn {
                Turn::Rest => {}
                // A question that changes nothing: the late answer is told by its number.
                Turn::Ask | Turn::Asked if work.kind == Kind::Ready => {
                    self.miss(peer, cause.to_string());
                }
                Turn::Ask | Turn::Asked if work.kind == Kind::Headroom => {
                    work.headroom_unknown = true;
                    self.peers[peer.0].turn = Turn::Rest;
                }
                _ => self.lose(peer, cause.clone()),
            }
        }
        self.settle(now);
    }

    /// Why there is no point in asking anybody.
    fn obstacle(&self, kind: Kind) -> Option<Cause> {
        if let Some((stage, rank)) = self.suspects().next() {
            return Some(Cause::Diverged { stage, rank });
        }
        // Only the question about readiness waits for connections to come.
        self.peers
            .iter()
            .filter(|_| kind != Kind::Ready)
            .find_map(|peer| match &peer.link {
                Link::Down(reason) => {
                    let (endpoint, reason) = (peer.endpoint.to_string(), reason.clone());
                    Some(peer.failure(kind.name(), PeerCause::Unreachable { endpoint, reason }))
                }
                Link::Up | Link::Suspect => None,
            })
    }

    fn in_phase(&self, phase: &Phase) -> bool {
        self.work.as_ref().is_some_and(|work| work.phase == *phase)
    }

    /// The local rank, if there is one, has done its part: now all others at once.
    fn ask_peers(&mut self, now: Instant) {
        let work = self.work.as_mut().expect("an operation is under way");
        work.phase = Phase::Remote;
        let kind = work.kind;
        // A connection may have ended meanwhile. Then nobody is asked, and local is undone.
        match self.obstacle(kind) {
            Some(cause) if kind.is_batch() => {
                let work = self.work.as_mut().expect("an operation is under way");
                work.blame(PeerIndex(0), cause);
                self.settle(now);
            }
            Some(cause) => self.finish(kind.failed(cause)),
            None => self.address(kind, now, |_| true),
        }
    }

    /// Sends `kind` to the peers that `chosen` names.
    fn address(&mut self, kind: Kind, now: Instant, chosen: impl Fn(&Peer) -> bool) {
        let work = self.work.as_mut().expect("an operation is under way");
        work.deadline = now + work.timeout;
        let mut anyone = false;
        for peer in self.peers.iter_mut().filter(|peer| chosen(peer)) {
            anyone = true;
            peer.turn = if peer.link == Link::Up {
                Turn::Ask
            } else {
                Turn::Connect
            };
        }
        if anyone {
            self.sequence += 1;
            self.frames.clear();
            let operation = kind.operation(&self.runs);
            wire::push_request(
                &mut self.frames,
                self.hello.session,
                self.sequence,
                operation,
            );
        }
        self.settle(now);
    }

    /// Goes on once no rank is waited for.
    fn settle(&mut self, now: Instant) {
        let Some(work) = &mut self.work else { return };
        if self.peers.iter().any(|peer| peer.turn != Turn::Rest) {
            return;
        }
        match work.phase {
            Phase::Remote if work.failure.is_some() && work.local_did => {
                work.phase = Phase::UndoLocal { polled: false };
            }
            Phase::Remote if work.failure.is_some() => self.undo_peers(now),
            Phase::Remote | Phase::UndoRemote => self.conclude(),
            Phase::Local { .. } | Phase::UndoLocal { .. } | Phase::Over(_) => {}
        }
    }

    /// Undoes the batch on exactly the remote ranks that did it.
    fn undo_peers(&mut self, now: Instant) {
        let work = self.work.as_mut().expect("an operation is under way");
        work.phase = Phase::UndoRemote;
        let kind = work.kind.undoing();
        if self
            .peers
            .iter()
            .any(|peer| peer.did && peer.link != Link::Up)
        {
            // Done, and gone since: it cannot be told any more.
            work.uncertain.extend(&self.runs);
        }
        self.address(kind, now, |peer| peer.did && peer.link == Link::Up);
    }

    fn conclude(&mut self) {
        let work = self.work.as_mut().expect("an operation is under way");
        let answer = match work.kind {
            Kind::Map | Kind::Unmap => Answer::Batch(match work.failure.take() {
                None => Ok(()),
                Some((_, _, cause)) => {
                    let uncertain = std::mem::take(&mut work.uncertain).into_iter().collect();
                    Err(MapError { cause, uncertain })
                }
            }),
            Kind::Ready if work.missing.is_empty() => Answer::Ready(Ok(Readiness::Ready)),
            Kind::Ready => {
                let mut missing = std::mem::take(&mut work.missing);
                missing.sort_by_key(|missing| (missing.stage, missing.rank));
                Answer::Ready(Ok(Readiness::NotReady(missing)))
            }
            Kind::Headroom if work.headroom_unknown => Answer::Headroom(None),
            Kind::Headroom => Answer::Headroom(work.headroom),
        };
        work.phase = Phase::Over(answer);
    }

    /// Ends the operation before all ranks have answered.
    fn finish(&mut self, answer: Answer) {
        for peer in &mut self.peers {
            peer.turn = Turn::Rest;
        }
        let work = self.work.as_mut().expect("an operation is under way");
        work.phase = Phase::Over(answer);
    }

    /// A worker's hello.
    fn greeted(&mut self, index: PeerIndex, payload: &[u8]) {
        let peer = &mut self.peers[index.0];
        let expected = peer.hello(&self.hello);
        let refusal = match wire::read_greeting(payload) {
            Ok(Ok(hello)) if hello == expected => {
                peer.link = Link::Up;
                peer.turn = Turn::Ask;
                return;
            }
            Ok(Err(taken @ Refusal::Taken { .. })) => return self.miss(index, taken.to_string()),
            Ok(Err(refusal)) => refusal.to_string(),
            Err(WireError::Version { theirs }) => Refusal::Version {
                coordinator: PROTOCOL_VERSION,
                worker: theirs,
            }
            .to_string(),
            Ok(Ok(_)) => "it welcomed somebody else".to_owned(),
            Err(error) => error.to_string(),
        };
        // Waiting does not mend it, so there is no point in waiting for the others.
        let reason = format!("{}: {refusal}", peer.endpoint);
        let cause = peer.failure("join", PeerCause::Refused { reason });
        peer.link = Link::Down(refusal);
        self.finish(Answer::Ready(Err(MapError::clean(cause))));
    }

    /// A worker's message after its hello.
    fn heard(&mut self, peer: PeerIndex, payload: &[u8]) {
        let (sequence, reply) = match wire::read_message(payload) {
            Ok(WorkerMessage::Reply { sequence, reply }) => (sequence, reply),
            Ok(WorkerMessage::Violation { reason }) => {
                return self.lose(peer, PeerCause::Protocol { reason });
            }
            Err(error) => {
                return self.lose(
                    peer,
                    PeerCause::Protocol {
                        reason: error.to_string(),
                    },
                );
            }
        };
        if sequence > self.sequence {
            let reason = format!("a reply to request {sequence}, which was not made");
            return self.lose(peer, PeerCause::Protocol { reason });
        }
        // A late reply to an earlier request says nothing about this one.
        if sequence == self.sequence && self.peers[peer.0].turn == Turn::Asked {
            self.replied(peer, reply);
        }
    }

    fn replied(&mut self, index: PeerIndex, reply: Reply) {
        let work = self
            .work
            .as_mut()
            .expect("a question belongs to an operation");
        let peer = &mut self.peers[index.0];
        let undoing = work.phase == Phase::UndoRemote;
        match (work.kind, reply) {
            (Kind::Map | Kind::Unmap, Reply::Done) => {
                peer.did = !undoing;
                peer.turn = Turn::Rest;
            }
            (Kind::Map | Kind::Unmap, Reply::Failed { .. }) if undoing => {
                // It still has what the others have given back, or the reverse.
                peer.turn = Turn::Rest;
                peer.link = Link::Suspect;
                work.uncertain.extend(&self.runs);
            }
            (Kind::Map | Kind::Unmap, Reply::Failed { failure, doubt }) => {
                peer.turn = Turn::Rest;
                if doubt != Doubt::Nothing {
                    peer.link = Link::Suspect;
                    work.uncertain.extend(doubt.of(&self.runs));
                }
                let cause = peer.refusal(work.kind.name(), failure);
                work.blame(index, cause);
            }
            (Kind::Ready, Reply::Ready) => peer.turn = Turn::Rest,
            (Kind::Ready, Reply::NotReady { reason }) => self.miss(index, reason),
            (Kind::Ready, Reply::Failed { failure, .. }) => {
                let error = MapError::clean(peer.refusal("become ready", failure));
                self.finish(Answer::Ready(Err(error)));
            }
            (Kind::Headroom, Reply::Headroom(Some(pages))) => {
                peer.turn = Turn::Rest;
                work.headroom = Some(work.headroom.map_or(pages, |least| least.min(pages)));
            }
            (Kind::Headroom, Reply::Headroom(None) | Reply::Failed { .. }) => {
                peer.turn = Turn::Rest;
                work.headroom_unknown = true;
            }
            (kind, reply) => {
                let reason = format!("{reply:?} is no answer to {}", kind.name());
                self.lose(index, PeerCause::Protocol { reason });
            }
        }
    }

    /// A rank cannot map yet; that is nothing to worry about.
    fn miss(&mut self, index: PeerIndex, reason: String) {
        let peer = &mut self.peers[index.0];
        if let Link::Down(known) = &mut peer.link {
            known.clone_from(&reason);
        }
        peer.turn = Turn::Rest;
        if let Some(work) = &mut self.work {
            let reason = format!("{}: {reason}", peer.endpoint);
            work.missing.push(NotReady {
                stage: peer.stage,
                rank: peer.rank,
                reason,
            });
        }
    }

    /// The connection to a rank is of no use any more, or it has not answered what must be
    /// answered.
    fn lose(&mut self, index: PeerIndex, cause: PeerCause) {
        let peer = &mut self.peers[index.0];
        if peer.link == Link::Suspect {
            return;
        }
        let turn = std::mem::replace(&mut peer.turn, Turn::Rest);
        peer.link = if peer.touched {
            Link::Suspect
        } else {
            Link::Down(cause.to_string())
        };
        let Some(work) = &mut self.work else { return };
        if turn == Turn::Rest {
            return;
        }
        match work.kind {
            Kind::Map | Kind::Unmap => {
                work.uncertain.extend(&self.runs);
                if work.phase == Phase::Remote {
                    let cause = peer.failure(work.kind.name(), cause);
                    work.blame(index, cause);
                }
            }
            Kind::Ready => {
                if let PeerCause::Protocol { .. } = cause {
                    let error = MapError::clean(peer.failure("become ready", cause));
                    self.finish(Answer::Ready(Err(error)));
                } else {
                    self.miss(index, cause.to_string());
                }
            }
            Kind::Headroom => work.headroom_unknown = true,
        }
    }
}

impl Work {
    fn blame(&mut self, peer: PeerIndex, cause: Cause) {
        let full = matches!(cause, Cause::OutOfMemory { .. });
        match &self.failure {
            Some((known_full, known, _)) if (*known_full, *known) <= (full, peer) => {}
            _ => self.failure = Some((full, peer, cause)),
        }
    }
}
