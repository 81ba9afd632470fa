//! What the fan-out knows of one remote rank.

use kvcached_mapper::{Cause, PeerCause, Rank, Stage};

use crate::Endpoint;
use crate::wire::{Failure, Hello};

/// A remote rank, between operations and within one.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) stage: Stage,
    pub(crate) rank: Rank,
    pub(crate) endpoint: Endpoint,
    pub(crate) link: Link,
    pub(crate) turn: Turn,
    /// Was it ever told to map or unmap? If not, it has nothing to differ in.
    pub(crate) touched: bool,
    /// Has it done the batch under way?
    pub(crate) did: bool,
}

/// What is known about a rank between operations.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// Not connected, for the reason given.
    Down(String),
    /// Connected and welcomed.
    Up,
    /// Its pages are unknown. Leaving this state takes a resynchronisation.
    Suspect,
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
    /// To be sent the request.
    Ask,
    /// To reply.
    Asked,
}

impl Peer {
    pub(crate) fn new(stage: Stage, rank: Rank, endpoint: Endpoint) -> Self {
        let link = Link::Down("not connected yet".to_owned());
        Self {
            stage,
            rank,
            endpoint,
            link,
            turn: Turn::Rest,
            touched: false,
            did: false,
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
            Failure::State { reason } | Failure::Vmm { reason } => {
                self.failure(call, PeerCause::Refused { reason })
            }
        }
    }
}
