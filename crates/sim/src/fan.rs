//! The shell around a real [`Fanout`]: what `Broadcast` is over sockets, this is over the simulated
//! network. It keeps its own account of what was agreed on, to hold the ranks against.

use std::collections::{BTreeMap, BTreeSet};

use kvcached_mapper::{PageRun, PoolId, Rank, Stage};
use kvcached_tp_ipc::wire::{self, Command, Reply, Request, WorkerMessage};
use kvcached_tp_ipc::{
    Answer, Fanout, FrameDecoder, Hello, Operation, PeerIndex, SessionId, Topology,
};

use crate::Sabotage;
use crate::network::ConnId;
use crate::rank::{digest, geometry, instance};
use crate::script::Config;

/// One pool's fan-out and its connections.
#[derive(Debug)]
pub(crate) struct Fan {
    pub(crate) fanout: Fanout,
    pub(crate) links: Vec<PeerLink>,
    /// The operation under way.
    pub(crate) active: Option<Active>,
    /// Is the local mapper at work for it?
    pub(crate) local_busy: bool,
    /// What the fan-out waits for.
    pub(crate) wait_until_ns: Option<u64>,
    /// Answers that nobody has fetched yet, by ticket.
    pub(crate) answers: BTreeMap<u64, Answer>,
    next_ticket: u64,
    /// What every rank must have, by the answers given so far.
    pub(crate) agreed: BTreeSet<PageRun>,
    /// What answers have left in doubt and no answer has cleared up.
    pub(crate) doubtful: BTreeSet<PageRun>,
}

/// The coordinator's end of a connection to one rank.
#[derive(Debug, Default)]
pub(crate) struct PeerLink {
    /// The rank, in the order of the topology.
    pub(crate) rank: usize,
    pub(crate) conn: Option<ConnId>,
    pub(crate) decoder: FrameDecoder,
    /// The last request that went there.
    pub(crate) asked: Option<Asked>,
}

/// A request, as far as an answer to it can be made up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) sequence: u64,
    pub(crate) verb: AskedVerb,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AskedVerb {
    Map,
    Prepare,
    Commit,
    Undo,
    Other,
}

/// An operation under way.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) ticket: u64,
    pub(crate) kind: ActiveKind,
    pub(crate) runs: Vec<PageRun>,
    pub(crate) began_ns: u64,
    /// What the local mapper took of the time.
    pub(crate) local_ns: u64,
    /// For how long the coordinator was stalled before.
    pub(crate) stalled_ns: u64,
    /// How many faults there were before.
    pub(crate) trouble: u64,
    /// Was anything done for it?
    pub(crate) worked: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ActiveKind {
    Map,
    Unmap,
    Ready,
    Headroom,
    Trim,
    Reconcile,
}

impl Fan {
    pub(crate) fn new(
        config: &Config,
        topology: &Topology,
        places: &[(Stage, Rank)],
        pool: u16,
        life: u64,
    ) -> Self {
        let hello = Hello {
            instance: instance(),
            stage: Stage(0),
            rank: Rank(0),
            pool: PoolId(pool),
            geometry: digest(&geometry(config)),
            session: SessionId(life),
        };
        let position = |at: (Stage, Rank)| {
            let found = places.iter().position(|place| *place == at);
            found.expect("every rank of the topology has its place")
        };
        let links = topology.remotes().map(|(stage, rank, _)| PeerLink {
            rank: position((stage, rank)),
            ..PeerLink::default()
        });
        Self {
            fanout: Fanout::new(hello, topology),
            links: links.collect(),
            active: None,
            local_busy: false,
            wait_until_ns: None,
            answers: BTreeMap::new(),
            next_ticket: 0,
            agreed: BTreeSet::new(),
            doubtful: BTreeSet::new(),
        }
    }

    /// A number for the next operation.
    pub(crate) fn ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    pub(crate) fn peer(&self, index: usize) -> PeerIndex {
        let mut peers = self.fanout.peers();
        peers.nth(index).expect("there are as many links as peers")
    }

    /// The peer at the other end of a connection, if it is still that connection.
    pub(crate) fn peer_of(&self, conn: ConnId) -> Option<usize> {
        self.links.iter().position(|link| link.conn == Some(conn))
    }

    /// Connections that the fan-out has given up; they are no longer ours.
    pub(crate) fn given_up(&mut self) -> Vec<ConnId> {
        let fanout = &self.fanout;
        let links = self.links.iter_mut().zip(fanout.peers());
        links
            .filter(|(link, peer)| link.conn.is_some() && !fanout.keeps(*peer))
            .filter_map(|(link, _)| link.conn.take())
            .collect()
    }

    /// What answers say is agreed on from now on.
    pub(crate) fn learn(&mut self, active: &Active, answer: &Answer) {
        match (active.kind, answer) {
            (ActiveKind::Map, Answer::Batch(Ok(()))) => self.agreed.extend(&active.runs),
            (ActiveKind::Unmap, Answer::Batch(Ok(()))) => {
                self.agreed.retain(|run| !active.runs.contains(run));
            }
            (_, Answer::Batch(Err(error))) => self.doubtful.extend(&error.uncertain),
            (_, Answer::Reconciled(Ok(done))) => {
                for run in done.cold.iter().chain(&done.mapped) {
                    self.doubtful.remove(run);
                }
            }
            _ => {}
        }
    }
}

impl Active {
    pub(crate) fn new(ticket: u64, operation: Operation<'_>) -> Self {
        let (kind, runs) = match operation {
            Operation::Map(runs) => (ActiveKind::Map, runs),
            Operation::Unmap(runs, _) => (ActiveKind::Unmap, runs),
            Operation::Ready => (ActiveKind::Ready, &[][..]),
            Operation::Headroom => (ActiveKind::Headroom, &[][..]),
            Operation::Trim => (ActiveKind::Trim, &[][..]),
            Operation::Reconcile(runs) => (ActiveKind::Reconcile, runs),
        };
        Self {
            ticket,
            kind,
            runs: runs.to_vec(),
            began_ns: 0,
            local_ns: 0,
            stalled_ns: 0,
            trouble: 0,
            worked: false,
        }
    }
}

impl Asked {
    /// What a frame asks for; `None` if it is a hello, or a part that is not the last.
    fn read(payload: &[u8]) -> Option<Self> {
        let Request {
            sequence, command, ..
        } = wire::read_request(payload).ok()?;
        let verb = match command {
            Command::Map { more: true, .. } | Command::Prepare { more: true, .. } => return None,
            Command::Map { .. } => AskedVerb::Map,
            Command::Prepare { .. } => AskedVerb::Prepare,
            Command::Commit => AskedVerb::Commit,
            Command::Undo => AskedVerb::Undo,
            _ => AskedVerb::Other,
        };
        Some(Self { sequence, verb })
    }

    /// The last question in whole frames.
    pub(crate) fn last_of(frames: &[u8]) -> Option<Self> {
        let mut decoder = FrameDecoder::default();
        decoder.feed(frames);
        let mut last = None;
        while let Ok(Some(payload)) = decoder.next_frame() {
            last = Self::read(payload);
        }
        last
    }

    /// The answer of a rank that did it, made up.
    pub(crate) fn made_up(self) -> Option<Vec<u8>> {
        let reply = match self.verb {
            AskedVerb::Map => Reply::Done,
            AskedVerb::Prepare => Reply::Prepared,
            AskedVerb::Commit => Reply::Committed,
            AskedVerb::Undo => Reply::Undone,
            AskedVerb::Other => return None,
        };
        let mut frame = Vec::new();
        let sequence = self.sequence;
        wire::push_message(&mut frame, &WorkerMessage::Reply { sequence, reply });
        Some(frame)
    }

    /// Is it one that a broken shell answers itself instead of asking?
    pub(crate) fn is_swallowed(self, sabotage: Option<Sabotage>, peer: usize) -> bool {
        match sabotage {
            Some(Sabotage::SkipUndo) => self.verb == AskedVerb::Undo,
            Some(Sabotage::ForgetARank) => peer == 0 && self.verb == AskedVerb::Map,
            _ => false,
        }
    }
}
