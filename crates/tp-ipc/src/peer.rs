//! What the fan-out knows of one rank.

use kvcached_mapper::{After, Cause, Epoch, PeerCause, Rank, Stage};

use crate::Endpoint;
use crate::doubt::Doubts;
use crate::wire::{Failure, Hello};

/// A remote rank, between operations and within one.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) stage: Stage,
    pub(crate) rank: Rank,
    pub(crate) endpoint: Endpoint,
    pub(crate) link: Link,
    pub(crate) turn: Turn,
    /// Did it ever count? If not, it is late rather than suspect.
    pub(crate) joined: bool,
    /// Number of the request that it is to answer.
    pub(crate) asked: u64,
    /// Has it done the batch under way?
    pub(crate) did: bool,
    /// Runs of which the rank, alive and honest, does not know whether it has them.
    pub(crate) in_doubt: Doubts,
    /// What must have ended on it before it gives up what the others gave up while it was away.
    pub(crate) owed: After,
}

/// The rank in this process.
#[derive(Debug)]
pub(crate) struct LocalRank {
    pub(crate) stage: Stage,
    pub(crate) rank: Rank,
    /// Why it is not known which runs it has.
    pub(crate) suspect: Option<String>,
    /// As for a [`Peer`].
    pub(crate) in_doubt: Doubts,
    /// As for a [`Peer`].
    pub(crate) owed: After,
}

/// What is known about a rank between operations.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// It does not count, for the reason given: nothing is known of what it has. Leaving this
    /// state takes a resynchronisation.
    Away(String),
    /// Connected, and it has what it should.
    Up,
}

/// What the operation under way wants of a rank next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing, or nothing more.
    Rest,
    /// To be connected by the caller.
    Connect,
    /// The caller was told to.
    Connecting,
    /// To be sent the hello.
    Greet,
    /// To say its hello.
    Greeting,
    /// To be sent the runs that it must have.
    Resync,
    /// To say that it has them.
    Resyncing,
    /// To be sent the request.
    Ask,
    /// To reply.
    Asked,
}

impl Peer {
    pub(crate) fn new(stage: Stage, rank: Rank, endpoint: Endpoint) -> Self {
        Self {
            stage,
            rank,
            endpoint,
            link: Link::Away("not connected yet".to_owned()),
            turn: Turn::Rest,
            joined: false,
            asked: 0,
            did: false,
            in_doubt: Doubts::default(),
            owed: After::NOTHING,
        }
    }

    /// The hello for this rank, given one for any.
    pub(crate) fn hello(&self, hello: &Hello) -> Hello {
        Hello {
            stage: self.stage,
            rank: self.rank,
            ..hello.clone()
        }
    }

    /// Why nothing can be asked of it, if so; `call` is what was to be.
    pub(crate) fn obstacle(&self, call: &'static str) -> Option<Cause> {
        match &self.link {
            Link::Up => None,
            Link::Away(_) if self.joined => Some(Cause::Diverged {
                stage: self.stage,
                rank: self.rank,
            }),
            Link::Away(reason) => Some(self.unreachable(call, reason.clone())),
        }
    }

    pub(crate) fn unreachable(&self, call: &'static str, reason: String) -> Cause {
        let endpoint = self.endpoint.to_string();
        self.failure(call, PeerCause::Unreachable { endpoint, reason })
    }

    pub(crate) fn failure(&self, call: &'static str, cause: PeerCause) -> Cause {
        Cause::Peer {
            stage: self.stage,
            rank: self.rank,
            call,
            cause,
        }
    }

    /// The rank's own words.
    pub(crate) fn refusal(&self, call: &'static str, failure: Failure) -> Cause {
        match failure {
            Failure::OutOfMemory => Cause::OutOfMemory {
                at: Some((self.stage, self.rank)),
            },
            Failure::InFlight { epoch } => Cause::InFlight {
                epoch: Epoch(epoch),
            },
            Failure::State { reason } | Failure::Vmm { reason } => {
                self.failure(call, PeerCause::Refused { reason })
            }
        }
    }

    /// Must it be told which runs to have?
    pub(crate) fn needs_resync(&self) -> bool {
        self.link != Link::Up || !self.in_doubt.is_empty()
    }
}

impl LocalRank {
    pub(crate) fn new(stage: Stage, rank: Rank) -> Self {
        Self {
            stage,
            rank,
            suspect: None,
            in_doubt: Doubts::default(),
            owed: After::NOTHING,
        }
    }

    pub(crate) fn needs_resync(&self) -> bool {
        self.suspect.is_some() || !self.in_doubt.is_empty()
    }
}
