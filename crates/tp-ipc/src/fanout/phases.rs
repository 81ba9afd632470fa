//! From one part of an operation to the next.

use std::mem;
use std::time::Instant;

use kvcached_mapper::{After, Cause, MapError, PageRun, Readiness, Reconciled};

use super::{Fanout, LocalCommit, Phase};
use crate::Answer;
use crate::doubt::Doubts;
use crate::operation::Kind;
use crate::peer::{Link, LocalRank, Peer, Turn};
use crate::wire::{self, Verb};

impl Fanout {
    /// The answer that needs nobody, if there is one.
    pub(super) fn foregone(&mut self, kind: Kind) -> Option<Answer> {
        match kind {
            Kind::Map | Kind::Unmap(_) if self.runs.is_empty() => Some(Answer::Batch(Ok(()))),
            Kind::Map | Kind::Unmap(_) => {
                let obstacle = self.obstacle(kind).map(MapError::clean);
                let error = obstacle.or_else(|| self.mistake(kind))?;
                Some(kind.failed(error))
            }
            Kind::Ready | Kind::Headroom => self.obstacle(kind).map(|cause| kind.refused(cause)),
            Kind::Trim => None,
            Kind::Reconcile if self.is_healthy() => Some(Answer::Reconciled(Ok(self.tell()))),
            Kind::Reconcile => None,
        }
    }

    /// Why there is no point in asking anybody.
    pub(super) fn obstacle(&self, kind: Kind) -> Option<Cause> {
        if let Kind::Unmap(_) | Kind::Trim | Kind::Reconcile = kind {
            return None;
        }
        let suspect = self.local.as_ref().filter(|local| local.suspect.is_some());
        if let Some(&LocalRank { stage, rank, .. }) = suspect {
            return Some(Cause::Diverged { stage, rank });
        }
        if kind.joins() {
            return None;
        }
        if let Some(&(stage, rank)) = self.lost.first()
            && kind == Kind::Map
        {
            // Whoever maps may think that all others hold what they held.
            return Some(Cause::Diverged { stage, rank });
        }
        self.peers
            .iter()
            .find_map(|peer| peer.obstacle(kind.name()))
    }

    /// Why the batch under way contradicts what is agreed on, if it does. Runs that some rank has in
    /// doubt are uncertain, so that the caller does not come back with the same ones.
    pub(super) fn mistake(&self, kind: Kind) -> Option<MapError> {
        let call = kind.name();
        let in_doubt: Vec<&Doubts> = self.doubts().map(|(_, runs)| runs).collect();
        let doubted = |run: &PageRun| in_doubt.iter().any(|doubts| doubts.overlaps(*run));
        let uncertain: Vec<PageRun> = self.runs.iter().copied().filter(doubted).collect();
        if let Some(&run) = uncertain.first() {
            let found = "it is in doubt on some rank, at least in part";
            let cause = Cause::State { call, run, found };
            return Some(MapError { cause, uncertain });
        }
        self.runs.iter().find_map(|&run| {
            let found = match kind {
                Kind::Map if self.agreed.overlapping(run).is_some() => {
                    "it is mapped already, at least in part"
                }
                Kind::Unmap(_) if !self.agreed.contains(run) => "it was not mapped so",
                _ => return None,
            };
            Some(MapError::clean(Cause::State { call, run, found }))
        })
    }

    /// Somebody is to be told all agreed runs.
    pub(super) fn prepare_resync(&mut self) {
        self.wanted.clear();
        self.wanted.extend(self.agreed.iter());
        self.sequence += 1;
        let local = self.local.iter().map(|local| local.owed);
        let owed = local.chain(self.peers.iter().map(|peer| peer.owed));
        let work = self.work.as_mut().expect("an operation is under way");
        work.resync = self.sequence;
        work.resync_after = owed.fold(After::DEVICE, After::join);
        self.resync_frames.clear();
        let verb = Verb::Resync(&self.wanted, work.resync_after);
        let session = self.hello.session;
        wire::push_request(&mut self.resync_frames, session, self.sequence, verb);
    }

    /// The local rank, if there is one, has done its part: now all others at once.
    pub(super) fn ask_peers(&mut self, now: Instant) {
        let work = self.work.as_mut().expect("an operation is under way");
        work.phase = Phase::Remote;
        let kind = work.kind;
        let verb = match kind {
            Kind::Map => Verb::Map(&self.runs),
            Kind::Unmap(after) => Verb::Prepare(&self.runs, after),
            Kind::Ready => Verb::Ready,
            Kind::Headroom => Verb::Headroom,
            Kind::Trim => Verb::Trim,
            Kind::Reconcile => return self.address(now, |_| Turn::Resync),
        };
        self.sequence += 1;
        self.frames.clear();
        wire::push_request(&mut self.frames, self.hello.session, self.sequence, verb);
        // A connection may have ended meanwhile. Then nobody is asked, and local is undone.
        match self.obstacle(kind) {
            Some(cause) if kind.is_batch() => {
                let work = self.work.as_mut().expect("an operation is under way");
                work.blame(0, cause);
                self.settle(now);
            }
            Some(cause) => self.finish(kind.refused(cause)),
            None => self.address(now, |_| Turn::Ask),
        }
    }

    /// Gives every peer the turn that `turn` names, if it counts; others are joined first, where
    /// the operation does that.
    pub(super) fn address(&mut self, now: Instant, turn: impl Fn(&Peer) -> Turn) {
        let work = self.work.as_mut().expect("an operation is under way");
        work.deadline = now + work.timeout;
        for peer in &mut self.peers {
            peer.turn = match peer.link {
                Link::Up => turn(peer),
                Link::Away(_) if work.kind.joins() => Turn::Connect,
                Link::Away(_) => Turn::Rest,
            };
            if peer.turn == Turn::Resync && !peer.needs_resync() {
                peer.turn = Turn::Rest;
            }
        }
        self.settle(now);
    }

    /// Goes on once no rank is waited for.
    pub(super) fn settle(&mut self, now: Instant) {
        let Some(work) = &mut self.work else { return };
        if self.peers.iter().any(|peer| peer.turn != Turn::Rest) {
            return;
        }
        let failed = work.kind.is_batch() && work.failure.is_some();
        match work.phase {
            Phase::Remote if failed && work.local_did => {
                work.phase = Phase::UndoLocal { polled: false };
            }
            Phase::Remote if failed => self.undo_peers(now),
            Phase::Remote => self.decide(now),
            Phase::UndoRemote
            | Phase::Commit {
                local: LocalCommit::Over,
            } => self.conclude(),
            Phase::Local { .. }
            | Phase::UndoLocal { .. }
            | Phase::Commit { .. }
            | Phase::Over(_) => {}
        }
    }

    /// Every rank has done its part.
    pub(super) fn decide(&mut self, now: Instant) {
        let work = self.work.as_mut().expect("an operation is under way");
        match work.kind {
            Kind::Map => {
                self.runs.iter().for_each(|&run| self.agreed.insert(run));
                self.conclude();
            }
            Kind::Unmap(after) => {
                self.runs.iter().for_each(|&run| self.agreed.remove(run));
                // Who did not take part has it still, and gives it up when it comes back.
                for peer in self.peers.iter_mut().filter(|peer| !peer.did) {
                    peer.owed = peer.owed.join(after);
                }
                if let Some(local) = self.local.as_mut().filter(|_| !work.local_did) {
                    local.owed = local.owed.join(after);
                }
                let local = match work.local_did {
                    true => LocalCommit::Due,
                    false => LocalCommit::Over,
                };
                work.phase = Phase::Commit { local };
                self.go_on(Verb::Commit, now);
            }
            Kind::Ready | Kind::Headroom | Kind::Trim | Kind::Reconcile => self.conclude(),
        }
    }

    /// Undoes the batch on exactly the remote ranks that did it.
    pub(super) fn undo_peers(&mut self, now: Instant) {
        let work = self.work.as_mut().expect("an operation is under way");
        work.phase = Phase::UndoRemote;
        let gone = |peer: &Peer| peer.did && peer.link != Link::Up;
        if self.peers.iter().any(gone) {
            // Done, and gone since: it cannot be told any more.
            work.uncertain.extend(&self.runs);
        }
        self.go_on(Verb::Undo, now);
    }

    /// Goes on with the transaction on the ranks that did its first part.
    pub(super) fn go_on(&mut self, verb: Verb<'_>, now: Instant) {
        self.frames.clear();
        wire::push_request(&mut self.frames, self.hello.session, self.sequence, verb);
        self.address(now, |peer| match peer.did {
            true => Turn::Ask,
            false => Turn::Rest,
        });
    }

    pub(super) fn conclude(&mut self) {
        let work = self.work.as_mut().expect("an operation is under way");
        let failure = work.failure.take().map(|(_, _, cause)| MapError {
            cause,
            uncertain: mem::take(&mut work.uncertain).into_iter().collect(),
        });
        let answer = match (work.kind, failure) {
            (kind, Some(error)) => kind.failed(error),
            (Kind::Map | Kind::Unmap(_), None) => Answer::Batch(Ok(())),
            (Kind::Ready, None) if work.missing.is_empty() => Answer::Ready(Ok(Readiness::Ready)),
            (Kind::Ready, None) => {
                let mut missing = mem::take(&mut work.missing);
                missing.sort_by_key(|missing| (missing.stage, missing.rank));
                Answer::Ready(Ok(Readiness::NotReady(missing)))
            }
            (Kind::Headroom, None) if work.headroom_unknown => Answer::Headroom(None),
            (Kind::Headroom, None) => Answer::Headroom(work.headroom),
            (Kind::Trim, None) => Answer::Trimmed,
            (Kind::Reconcile, None) => Answer::Reconciled(Ok(self.tell())),
        };
        self.finish(answer);
    }

    /// Ends the operation, whoever has not answered yet.
    pub(super) fn finish(&mut self, answer: Answer) {
        for peer in &mut self.peers {
            peer.turn = Turn::Rest;
        }
        let work = self.work.as_mut().expect("an operation is under way");
        work.phase = Phase::Over(answer);
    }

    /// What is true of the runs that were asked about, now that every rank counts.
    pub(super) fn tell(&mut self) -> Reconciled {
        let in_doubt: Vec<&Doubts> = self.doubts().map(|(_, runs)| runs).collect();
        let known = |run: &&PageRun| !in_doubt.iter().any(|doubts| doubts.overlaps(**run));
        let (mapped, cold) = self
            .runs
            .iter()
            .filter(known)
            .partition(|&&run| self.agreed.contains(run));
        Reconciled {
            cold,
            mapped,
            lost: mem::take(&mut self.lost).into_iter().collect(),
        }
    }
}
