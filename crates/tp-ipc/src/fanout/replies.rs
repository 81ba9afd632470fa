//! What a rank said, or that it is gone.

use std::mem;

use kvcached_mapper::{After, Cause, MapError, NotReady, PeerCause};

use super::{Fanout, PeerIndex, Phase, in_use_in_doubt, relied_on};
use crate::doubt::Doubts;
use crate::operation::Kind;
use crate::peer::{Link, Peer, Turn};
use crate::wire::{self, Failure, Refusal, Reply, Runs, RunsDigest, WireError, WorkerMessage};
use crate::{Answer, PROTOCOL_VERSION};

impl Fanout {
    /// A worker's hello.
    pub(super) fn greeted(&mut self, index: PeerIndex, payload: &[u8]) {
        let peer = &mut self.peers[index.0];
        let expected = peer.hello(&self.hello);
        let refusal = match wire::read_greeting(payload) {
            Ok(Ok(hello)) if hello == expected => {
                peer.turn = Turn::Resync;
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
        let reason = format!("{}: {refusal}", peer.endpoint);
        let cause = peer.failure("join", PeerCause::Refused { reason });
        peer.link = Link::Away(refusal);
        peer.turn = Turn::Rest;
        let work = self
            .work
            .as_mut()
            .expect("a greeting belongs to an operation");
        if work.kind == Kind::Ready {
            // Waiting does not mend it, so there is no point in waiting for the others.
            self.finish(Answer::Ready(Err(MapError::clean(cause))));
        } else {
            work.blame(index.0 + 1, cause);
        }
    }

    /// A worker's message after its hello.
    pub(super) fn heard(&mut self, peer: PeerIndex, payload: &[u8]) {
        let (sequence, reply) = match wire::read_message(payload) {
            Ok(WorkerMessage::Reply { sequence, reply }) => (sequence, reply),
            Ok(WorkerMessage::Violation { reason }) => {
                return self.lose(peer, PeerCause::Protocol { reason });
            }
            Err(error) => {
                let reason = error.to_string();
                return self.lose(peer, PeerCause::Protocol { reason });
            }
        };
        if sequence > self.sequence {
            let reason = format!("a reply to request {sequence}, which was not made");
            return self.lose(peer, PeerCause::Protocol { reason });
        }
        // A late reply to an earlier request says nothing about this one.
        let Peer { turn, asked, .. } = self.peers[peer.0];
        match turn {
            Turn::Resyncing if sequence == asked => self.resynced(peer, reply),
            Turn::Asked if sequence == asked => self.replied(peer, reply),
            _ => {}
        }
    }

    /// The answer of a rank that was told all agreed runs.
    pub(super) fn resynced(&mut self, index: PeerIndex, reply: Reply) {
        let work = self
            .work
            .as_mut()
            .expect("a question belongs to an operation");
        let peer = &mut self.peers[index.0];
        match reply {
            Reply::Resynced {
                digest,
                remade,
                in_doubt: Runs(in_doubt),
            } => {
                let in_doubt: Doubts = in_doubt.iter().collect();
                let has = self.wanted.iter().copied();
                let has = has.filter(|&run| !in_doubt.overlaps(run));
                if digest != RunsDigest::new(has) {
                    let reason = "it has other runs than it was told to have".to_owned();
                    return self.lose(index, PeerCause::Protocol { reason });
                }
                peer.in_doubt = in_doubt;
                if relied_on(&remade.of(&self.wanted), &self.runs).is_some() {
                    self.lost.insert((peer.stage, peer.rank));
                }
                if let Some(run) = in_use_in_doubt(&self.wanted, &peer.in_doubt, &self.runs) {
                    let reason = format!("{run} is in doubt");
                    let cause = peer.failure("resynchronise", PeerCause::Refused { reason });
                    return self.keep_away(index, cause);
                }
                peer.link = Link::Up;
                peer.joined = true;
                peer.owed = After::NOTHING;
                peer.turn = match work.kind {
                    Kind::Ready => Turn::Ask,
                    _ => Turn::Rest,
                };
            }
            Reply::Failed { failure, .. } => {
                let cause = peer.refusal("resynchronise", failure);
                self.keep_away(index, cause);
            }
            reply => {
                let reason = format!("{reply:?} is no answer to resync");
                self.lose(index, PeerCause::Protocol { reason });
            }
        }
    }

    pub(super) fn replied(&mut self, index: PeerIndex, reply: Reply) {
        let work = self
            .work
            .as_mut()
            .expect("a question belongs to an operation");
        let peer = &mut self.peers[index.0];
        let name = work.kind.name();
        match (&work.phase, work.kind, reply) {
            (Phase::Remote, Kind::Map, Reply::Done)
            | (Phase::Remote, Kind::Unmap(_), Reply::Prepared) => {
                peer.did = true;
                peer.turn = Turn::Rest;
            }
            (Phase::Remote, Kind::Map | Kind::Unmap(_), Reply::Failed { failure, doubt }) => {
                let uncertain = match &failure {
                    Failure::State { reason } => {
                        // The agreed runs allow it, so this rank has others.
                        peer.link = Link::Away(reason.clone());
                        self.runs.clone()
                    }
                    _ => {
                        let uncertain = doubt.of(&self.runs);
                        peer.in_doubt.extend(&uncertain);
                        uncertain
                    }
                };
                work.uncertain.extend(uncertain);
                peer.turn = Turn::Rest;
                let cause = peer.refusal(name, failure);
                work.blame(index.0 + 1, cause);
            }
            (Phase::UndoRemote, _, Reply::Undone) => {
                peer.did = false;
                peer.turn = Turn::Rest;
            }
            (Phase::UndoRemote, _, Reply::Failed { .. }) => {
                // It still has what the others have given back, or the reverse.
                peer.turn = Turn::Rest;
                peer.in_doubt.extend(&self.runs);
                work.uncertain.extend(&self.runs);
            }
            (Phase::Commit { .. }, _, Reply::Committed) => peer.turn = Turn::Rest,
            (Phase::UndoRemote | Phase::Commit { .. }, _, Reply::Done | Reply::Prepared) => {
                // The first part's answer, once more.
            }
            (Phase::Remote, Kind::Ready, Reply::Ready) => peer.turn = Turn::Rest,
            (Phase::Remote, Kind::Ready, Reply::NotReady { reason }) => self.miss(index, reason),
            (Phase::Remote, Kind::Ready, Reply::Failed { failure, .. }) => {
                let error = MapError::clean(peer.refusal(name, failure));
                self.finish(Answer::Ready(Err(error)));
            }
            (Phase::Remote, Kind::Headroom, Reply::Headroom(Some(pages))) => {
                peer.turn = Turn::Rest;
                work.headroom = Some(work.headroom.map_or(pages, |least| least.min(pages)));
            }
            (Phase::Remote, Kind::Headroom, Reply::Headroom(None) | Reply::Failed { .. }) => {
                peer.turn = Turn::Rest;
                work.headroom_unknown = true;
            }
            (Phase::Remote, Kind::Trim, Reply::Done) => peer.turn = Turn::Rest,
            (_, _, reply) => {
                let reason = format!("{reply:?} is no answer to {name}");
                self.lose(index, PeerCause::Protocol { reason });
            }
        }
    }

    /// A rank that was told all agreed runs does not have them.
    fn keep_away(&mut self, index: PeerIndex, cause: Cause) {
        let peer = &mut self.peers[index.0];
        peer.link = Link::Away(cause.to_string());
        peer.turn = Turn::Rest;
        match &mut self.work {
            Some(work) if work.kind != Kind::Ready => work.blame(index.0 + 1, cause),
            _ => self.miss(index, cause.to_string()),
        }
    }

    /// A rank cannot be asked yet, or cannot map yet; that is nothing to worry about.
    pub(super) fn miss(&mut self, index: PeerIndex, reason: String) {
        let peer = &mut self.peers[index.0];
        if let Link::Away(known) = &mut peer.link {
            known.clone_from(&reason);
        }
        peer.turn = Turn::Rest;
        let Some(work) = &mut self.work else { return };
        match work.kind {
            Kind::Ready => work.missing.push(NotReady {
                stage: peer.stage,
                rank: peer.rank,
                reason: format!("{}: {reason}", peer.endpoint),
            }),
            kind => work.blame(index.0 + 1, peer.unreachable(kind.name(), reason)),
        }
    }

    /// The connection to a rank is of no use any more, or it has not answered what must be
    /// answered.
    pub(super) fn lose(&mut self, index: PeerIndex, cause: PeerCause) {
        let peer = &mut self.peers[index.0];
        let turn = mem::replace(&mut peer.turn, Turn::Rest);
        if turn == Turn::Rest && peer.link != Link::Up {
            return;
        }
        peer.link = Link::Away(cause.to_string());
        let Some(work) = &mut self.work else { return };
        if turn == Turn::Rest {
            return;
        }
        match work.kind {
            Kind::Map | Kind::Unmap(_) => match work.phase {
                Phase::Remote => {
                    work.uncertain.extend(&self.runs);
                    let cause = peer.failure(work.kind.name(), cause);
                    work.blame(index.0 + 1, cause);
                }
                Phase::UndoRemote => work.uncertain.extend(&self.runs),
                // It was decided; the rank gets there when it is resynchronised.
                _ => {}
            },
            Kind::Ready => {
                if let PeerCause::Protocol { reason } = cause {
                    let reason = format!("{}: {reason}", peer.endpoint);
                    let cause = peer.failure("become ready", PeerCause::Protocol { reason });
                    let error = MapError::clean(cause);
                    self.finish(Answer::Ready(Err(error)));
                } else {
                    self.miss(index, cause.to_string());
                }
            }
            Kind::Headroom => work.headroom_unknown = true,
            // Nobody has to; and who is gone keeps nothing.
            Kind::Trim => {}
            Kind::Reconcile => {
                let cause = peer.failure("resynchronise", cause);
                work.blame(index.0 + 1, cause);
            }
        }
    }
}
