//! One operation over all ranks: local first, then every remote rank at once, undone everywhere if
//! one of them cannot. No socket, no clock, no thread: what happened goes in, what to do comes out.
//!
//! ```text
//! map    local ─▶ remote ranks ──────────▶ all did it: Ok
//!          │          └─ one did not ─▶ undo local ─▶ undo remote ─▶ Err
//!          └─ failed: Err, nothing was sent
//!
//! unmap  prepare local ─▶ prepare remote ─▶ all did: commit remote, and meanwhile local ─▶ Ok
//!                             └─ one did not ─▶ abort local ─▶ undo remote ─▶ Err
//! ```
//!
//! The local rank is first in all that may fail, so that its failure costs nobody else anything. A
//! commit cannot fail any more, and is the slow part, since memory goes: so all do it at once.
//!
//! The fan-out knows the runs that every rank must have: those *agreed* on. A rank that did not
//! answer, broke the protocol, or turned out to have other runs does not count: it is *suspect*, and
//! nothing is mapped. It counts again once it was sent all agreed runs and its digest of what it
//! has is right; every connection begins so. Meanwhile an unmap goes on without it, since it only
//! has the more to give up then; else two pools that are short of memory on each other's ranks
//! would wait for ever. A prepared unmap that was decided is never taken back: a rank that does not
//! confirm its commit is suspect, and gets there by being resynchronised.

mod phases;
mod replies;

use std::collections::BTreeSet;
use std::mem;
use std::time::{Duration, Instant};

use kvcached_mapper::{
    After, Cause, Epoch, Health, NotReady, PageRun, PeerCause, Rank, Readiness, Resynced, RunSet,
    Stage, Suspect,
};

use crate::doubt::Doubts;
use crate::operation::Kind;
use crate::peer::{Link, LocalRank, Peer, Turn};
use crate::wire::{self, Hello};
use crate::{Answer, Endpoint, Operation, RankAnswer, RankCall, Topology};

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
    Local(RankCall<'a>),
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
/// for them to undo or to commit it.
#[derive(Debug)]
pub struct Fanout {
    /// To whom it belongs; stage and rank are those of the peer that is greeted.
    hello: Hello,
    local: Option<LocalRank>,
    peers: Vec<Peer>,
    /// What every rank has that counts.
    agreed: RunSet,
    /// Ranks that had lost memory, and that nobody was told of yet.
    lost: BTreeSet<(Stage, Rank)>,
    /// Of the last transaction.
    sequence: u64,
    work: Option<Work>,
    /// The batch of the operation under way, or the runs that it asks about.
    runs: Vec<PageRun>,
    /// The agreed runs, if somebody is to be told all of them.
    wanted: Vec<PageRun>,
    /// The request under way, the same for every rank; that to resynchronise; and the last hello.
    /// All are reused.
    frames: Vec<u8>,
    resync_frames: Vec<u8>,
    greeting: Vec<u8>,
}

/// How many stretches of pages in doubt are named.
const NAMED_STRETCHES: usize = 4;

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
    /// Number of the request to resynchronise.
    resync: u64,
    /// What must have ended before a rank gives up what it is not to have.
    resync_after: After,
    /// The gravest failure so far: broken before full, then by rank, the local one first.
    failure: Option<(bool, usize, Cause)>,
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
    Commit { local: LocalCommit },
    Over(Answer),
}

/// How far the local rank has given up what it had prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LocalCommit {
    /// It is to, once all others were told to.
    Due,
    UnderWay,
    /// It has, or had nothing to give up.
    Over,
}

impl Fanout {
    /// A fan-out over `topology`, nothing connected yet, no run agreed on. `hello` says to whom it
    /// belongs; its stage and rank are replaced by those of each peer.
    #[must_use]
    pub fn new(hello: Hello, topology: &Topology) -> Self {
        let local = topology.local();
        let peers = topology.remotes();
        let peers = peers.map(|(stage, rank, at)| Peer::new(stage, rank, at.clone()));
        Self {
            hello,
            local: local.map(|(stage, rank)| LocalRank::new(stage, rank)),
            peers: peers.collect(),
            agreed: RunSet::default(),
            lost: BTreeSet::new(),
            sequence: 0,
            work: None,
            runs: Vec::new(),
            wanted: Vec::new(),
            frames: Vec::new(),
            resync_frames: Vec::new(),
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
        let joining = matches!(
            turn,
            Turn::Greet | Turn::Greeting | Turn::Resync | Turn::Resyncing
        );
        *link == Link::Up || joining
    }

    /// Is something expected from this rank?
    #[must_use]
    pub fn awaits(&self, peer: PeerIndex) -> bool {
        let turn = self.peers[peer.0].turn;
        matches!(turn, Turn::Greeting | Turn::Resyncing | Turn::Asked)
    }

    /// The runs that every rank has that counts, in order.
    pub fn agreed(&self) -> impl Iterator<Item = PageRun> {
        self.agreed.iter()
    }

    /// Ranks that do not count, the local one first: it is not known which runs they have, or nobody
    /// was told yet that they had lost what was in them.
    pub fn suspects(&self) -> impl Iterator<Item = Suspect> {
        let local = self.local.iter().filter_map(|local| {
            let lost = self.lost.contains(&(local.stage, local.rank));
            let reason = local.suspect.clone().or_else(|| lost.then(untold))?;
            Some((local.stage, local.rank, reason))
        });
        let peers = self.peers.iter().filter_map(|peer| match &peer.link {
            Link::Up if self.lost.contains(&(peer.stage, peer.rank)) => {
                Some((peer.stage, peer.rank, untold()))
            }
            Link::Up => None,
            Link::Away(reason) => Some((peer.stage, peer.rank, reason.clone())),
        });
        local.chain(peers).map(|(stage, rank, reason)| Suspect {
            stage,
            rank,
            reason,
        })
    }

    /// The pages that a rank has in doubt, as far as is known here, in stretches of adjacent ones.
    pub fn in_doubt(&self, stage: Stage, rank: Rank) -> impl Iterator<Item = PageRun> {
        let here = self.doubts().filter(move |(at, _)| *at == (stage, rank));
        here.flat_map(|(_, runs)| runs.iter())
    }

    /// What each rank has in doubt, where there is anything, the local one first.
    fn doubts(&self) -> impl Iterator<Item = ((Stage, Rank), &Doubts)> {
        let local = self.local.iter();
        let local = local.map(|it| ((it.stage, it.rank), &it.in_doubt));
        let peers = self.peers.iter();
        let peers = peers.map(|it| ((it.stage, it.rank), &it.in_doubt));
        local.chain(peers).filter(|(_, runs)| !runs.is_empty())
    }

    /// How far every rank is known to have the agreed runs.
    #[must_use]
    pub fn health(&self) -> Health {
        let fenced: Vec<Suspect> = self.suspects().collect();
        let mut all = Doubts::default();
        let mut ranks = Vec::new();
        for ((stage, rank), runs) in self.doubts() {
            runs.iter().for_each(|run| all.insert(run));
            let named: Vec<String> = runs
                .iter()
                .take(NAMED_STRETCHES)
                .map(|run| run.to_string())
                .collect();
            let others = match runs.iter().nth(NAMED_STRETCHES) {
                Some(_) => ", and others",
                None => "",
            };
            let reason = format!("in doubt: {}{others}", named.join(", "));
            ranks.push(Suspect {
                stage,
                rank,
                reason,
            });
        }
        let pages = all.iter().map(PageRun::count).sum();
        match (fenced.is_empty(), ranks.is_empty()) {
            (false, _) => Health::Fenced {
                ranks: fenced.into_iter().chain(ranks).collect(),
                pages,
            },
            (true, false) => Health::Degraded { ranks, pages },
            (true, true) => Health::Healthy,
        }
    }

    /// Is every rank up, and without doubt? The same as a healthy [`health`](Self::health).
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.lost.is_empty()
            && !self.local.as_ref().is_some_and(LocalRank::needs_resync)
            && !self.peers.iter().any(Peer::needs_resync)
    }

    /// This epoch and all before it have ended on every rank: nobody who comes back need wait for
    /// them. Between operations.
    pub fn retire(&mut self, epoch: Epoch) {
        let retired = Some(epoch);
        if let Some(local) = &mut self.local {
            local.owed = local.owed.since(retired);
        }
        for peer in &mut self.peers {
            peer.owed = peer.owed.since(retired);
        }
    }

    /// Forgets the operation under way, which was not brought to its end: whoever was at it is
    /// suspect.
    pub fn abandon(&mut self, reason: &str) {
        let Some(work) = self.work.take() else { return };
        if let Some(local) = &mut self.local {
            local.suspect = Some(reason.to_owned());
        }
        if matches!(work.phase, Phase::Local { .. } | Phase::Over(_)) {
            return;
        }
        for peer in &mut self.peers {
            peer.turn = Turn::Rest;
            peer.link = Link::Away(reason.to_owned());
        }
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
        let phase = match self.foregone(kind) {
            Some(answer) => Phase::Over(answer),
            None => Phase::Local { polled: false },
        };
        let over = phase != Phase::Local { polled: false };
        self.work = Some(Work {
            kind,
            phase,
            timeout,
            deadline: now + timeout,
            local_did: false,
            resync: 0,
            resync_after: After::DEVICE,
            failure: None,
            uncertain: BTreeSet::new(),
            missing: Vec::new(),
            headroom: None,
            headroom_unknown: false,
        });
        if over {
            return;
        }
        if kind.joins() && !self.is_healthy() {
            self.prepare_resync();
        }
        let skips_local = match (&self.local, kind) {
            (None, _) => true,
            (Some(local), Kind::Reconcile) => !local.needs_resync(),
            (Some(local), Kind::Unmap(_)) => local.suspect.is_some(),
            (Some(_), _) => false,
        };
        if skips_local {
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
        match &mut work.phase {
            Phase::Local { polled } | Phase::UndoLocal { polled } => {
                assert!(!mem::replace(polled, true), "the local mapper is at work");
                let runs = &self.runs;
                return Step::Local(match (&work.phase, work.kind) {
                    (Phase::Local { .. }, Kind::Map) => RankCall::Map(runs),
                    (Phase::Local { .. }, Kind::Unmap(after)) => RankCall::Prepare(runs, after),
                    (Phase::Local { .. }, Kind::Ready) => RankCall::Ready,
                    (Phase::Local { .. }, Kind::Headroom) => RankCall::Headroom,
                    (Phase::Local { .. }, Kind::Trim) => RankCall::Trim,
                    (Phase::Local { .. }, Kind::Reconcile) => {
                        RankCall::Resync(&self.wanted, work.resync_after)
                    }
                    (_, Kind::Map) => RankCall::Undo(runs),
                    (_, _) => RankCall::Abort(runs),
                });
            }
            Phase::Remote | Phase::UndoRemote | Phase::Commit { .. } | Phase::Over(_) => {}
        }
        let deadline = work.deadline;
        let due = |peer: &Peer| {
            matches!(
                peer.turn,
                Turn::Connect | Turn::Greet | Turn::Resync | Turn::Ask
            )
        };
        let Some(index) = self.peers.iter().position(due) else {
            if let Phase::Commit { local } = &mut work.phase {
                assert_ne!(*local, LocalCommit::UnderWay, "the local mapper is at work");
                if *local == LocalCommit::Due {
                    *local = LocalCommit::UnderWay;
                    return Step::Local(RankCall::Commit(&self.runs));
                }
            }
            return Step::Wait(deadline);
        };
        let peer = &mut self.peers[index];
        let frames = match peer.turn {
            Turn::Connect => {
                peer.turn = Turn::Connecting;
                return Step::Connect(PeerIndex(index));
            }
            Turn::Greet => {
                peer.turn = Turn::Greeting;
                self.greeting.clear();
                wire::push_hello(&mut self.greeting, &peer.hello(&self.hello));
                &self.greeting
            }
            Turn::Resync => {
                peer.turn = Turn::Resyncing;
                peer.asked = work.resync;
                &self.resync_frames
            }
            _ => {
                peer.turn = Turn::Asked;
                peer.asked = self.sequence;
                &self.frames
            }
        };
        Step::Send {
            peer: PeerIndex(index),
            frames,
        }
    }

    /// The local mapper did what [`Step::Local`] says.
    ///
    /// # Panics
    /// If nothing was given, or the answer belongs to another kind of call.
    pub fn handle_local(&mut self, answer: RankAnswer, now: Instant) {
        let work = self.work.as_mut().expect("an operation is under way");
        let local = self.local.as_mut().expect("there is a local rank");
        match (&work.phase, answer) {
            (Phase::Local { .. }, RankAnswer::Batch(Ok(()))) => work.local_did = true,
            (Phase::Local { .. }, RankAnswer::Batch(Err(error))) => {
                if matches!(error.cause, Cause::State { .. }) {
                    // The agreed runs allow it, so this rank has others.
                    local.suspect = Some(error.cause.to_string());
                }
                local.in_doubt.extend(&error.uncertain);
                let answer = work.kind.failed(error);
                return self.finish(answer);
            }
            (Phase::Local { .. }, RankAnswer::Ready(Ok(Readiness::Ready))) => {}
            (Phase::Local { .. }, RankAnswer::Ready(Ok(Readiness::NotReady(missing)))) => {
                work.missing.extend(missing);
            }
            (Phase::Local { .. }, RankAnswer::Ready(Err(error))) => {
                return self.finish(Answer::Ready(Err(error)));
            }
            (Phase::Local { .. }, RankAnswer::Headroom(None)) => {
                return self.finish(Answer::Headroom(None));
            }
            (Phase::Local { .. }, RankAnswer::Headroom(pages)) => work.headroom = pages,
            (Phase::Local { .. }, RankAnswer::Trimmed) => {}
            (Phase::Local { .. }, RankAnswer::Resynced(Ok(Resynced { remade, in_doubt }))) => {
                local.in_doubt = in_doubt.iter().collect();
                local.owed = After::NOTHING;
                let (stage, rank) = (local.stage, local.rank);
                if relied_on(&remade, &self.runs).is_some() {
                    self.lost.insert((stage, rank));
                }
                local.suspect = None;
                if let Some(run) = in_use_in_doubt(&self.wanted, &local.in_doubt, &self.runs) {
                    local.suspect = Some(format!("{run} is in doubt"));
                    work.blame(0, Cause::Diverged { stage, rank });
                }
            }
            (Phase::Local { .. }, RankAnswer::Resynced(Err(error))) => {
                local.suspect = Some(error.to_string());
                work.blame(0, error.cause);
            }
            (Phase::UndoLocal { .. }, RankAnswer::Batch(undone)) => {
                if let Err(error) = undone {
                    // What could not be undone is still mapped, or in doubt: not as agreed.
                    local.in_doubt.extend(&self.runs);
                    work.uncertain.extend(&self.runs);
                    tracing::debug!(%error, "the local rank could not undo a batch");
                }
                return self.undo_peers(now);
            }
            (Phase::Commit { .. }, RankAnswer::Batch(_)) => {
                let local = LocalCommit::Over;
                work.phase = Phase::Commit { local };
                // What it took is not the others' time.
                work.deadline = now + work.timeout;
                return self.settle(now);
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
            (Turn::Resyncing, _) | (_, Link::Up) => self.heard(peer, payload),
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
        let local = LocalCommit::Over;
        let waits = [Phase::Remote, Phase::UndoRemote, Phase::Commit { local }];
        let waits = waits.contains(&work.phase);
        if !waits || now < work.deadline {
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
                Turn::Ask | Turn::Asked if work.kind == Kind::Trim => {
                    let Peer { stage, rank, .. } = self.peers[peer.0];
                    tracing::debug!(%stage, %rank, %cause, "a rank has not trimmed in time");
                    self.peers[peer.0].turn = Turn::Rest;
                }
                _ => self.lose(peer, cause.clone()),
            }
        }
        self.settle(now);
    }
}

impl Work {
    /// Counts the local rank as 0, the peers from 1.
    fn blame(&mut self, place: usize, cause: Cause) {
        let full = matches!(cause, Cause::OutOfMemory { .. });
        match &self.failure {
            Some((known_full, known, _)) if (*known_full, *known) <= (full, place) => {}
            _ => self.failure = Some((full, place, cause)),
        }
    }
}

/// Why a rank that is up does not count.
fn untold() -> String {
    "what its pages held is lost, and nobody was told yet".to_owned()
}

/// One of `runs` that somebody may rely on. On those that are asked about, for having been in doubt,
/// nobody does.
fn relied_on<'a>(
    runs: impl IntoIterator<Item = &'a PageRun>,
    asked: &[PageRun],
) -> Option<PageRun> {
    let asked: Doubts = asked.iter().collect();
    let mut runs = runs.into_iter().copied();
    runs.find(|run| !asked.overlaps(*run))
}

/// A run that a rank must have, that somebody may rely on, and of which the rank does not know
/// whether it has it. A rank may have any other run in doubt and count, but not such a one.
fn in_use_in_doubt(wanted: &[PageRun], in_doubt: &Doubts, asked: &[PageRun]) -> Option<PageRun> {
    relied_on(wanted.iter().filter(|run| in_doubt.overlaps(**run)), asked)
}
