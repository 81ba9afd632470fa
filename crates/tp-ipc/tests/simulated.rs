//! An engine in one thread: the real fan-out, the real worker side, mappers that remember, and a
//! network that does what a test tells it. Time passes only when nothing else can happen.

use std::collections::{BTreeSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvcached_mapper::{
    After, Cause, Epoch, Health, MapError, Mapper, NotReady, PageId, PageRun, PoolId, Rank,
    RankMapper, Readiness, Resynced, Stage,
};
use kvcached_tp_ipc::wire::{self, Command, Failure, Part, Reply, WorkerMessage};
use kvcached_tp_ipc::{
    Answer, Conversation, Endpoint, Fanout, FrameDecoder, GeometryDigest, Hello, Operation,
    PeerIndex, Place, ServedPool, ServedRank, SessionId, Step, Topology,
};
use kvcached_vmm::VmmError;
use proptest::prelude::*;
use proptest::sample::Index;

/// Where a rank is in the engine.
pub(crate) type At = (Stage, Rank);

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

const SESSION: SessionId = SessionId(11);

/// Something that was done, in the order in which it was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// The mapper of a rank was called.
    Called {
        at: At,
        call: Call,
        runs: Vec<PageRun>,
    },
    /// A request left for a rank.
    Sent {
        to: At,
        call: Call,
        runs: Vec<PageRun>,
    },
    /// A hello left for a rank.
    Greeted { to: At },
    /// Something was waited for, and came from a rank.
    Arrived,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Map,
    Prepare,
    Commit,
    /// Of whatever the transaction did.
    Undo,
    Resync,
    Ready,
    Headroom,
    Trim,
}

/// What a mapper does instead of what it is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusing {
    /// Full right now.
    Full,
    /// Its driver fails, and nothing changes.
    Driver,
    /// Its driver fails half-way: the first run is in doubt, and done or not.
    Doubt { done: bool },
}

/// What goes wrong between the fan-out and one rank, for one request or hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Fine,
    /// A late reply to an earlier request precedes the reply.
    LateReplyFirst,
    ReplyTwice,
    /// The rank's mapper refuses.
    Refuses(Refusing),
    RequestLost,
    /// The request cannot even be given to the socket.
    SendFails,
    /// The request is done; so in all that follow.
    ReplyLost,
    /// The connection ends before the request arrives.
    CutBefore,
    CutAfter,
    /// The reply arrives, and then the connection ends.
    CutAfterReply,
    /// The reply is no message.
    Garbage,
    /// The reply is no frame.
    BrokenFrame,
    /// The reply is to a request that was never made.
    FutureReply,
    /// The reply answers another question.
    WrongKind,
    /// The rank says that the protocol was broken.
    Violation,
}

/// What a rank says about its readiness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Says {
    Ready,
    NotReady,
    Broken,
}

/// A mapper that remembers, checks what it is told, and refuses on demand.
#[derive(Debug)]
pub(crate) struct Recorder {
    at: At,
    log: Arc<Mutex<Vec<Event>>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    mapped: BTreeSet<PageRun>,
    prepared: BTreeSet<PageRun>,
    forgets: bool,
    resynced_after: Option<After>,
    doubts: Vec<PageRun>,
    refusing: VecDeque<Option<Refusing>>,
    says: Says,
    headroom: Option<u32>,
}

/// A remote rank: the real worker side behind a simulated connection.
#[derive(Debug)]
struct RemoteRank {
    at: At,
    mapper: Arc<Recorder>,
    served: ServedRank,
    conversation: Conversation,
    reachable: bool,
    /// On its way back.
    back: VecDeque<Arrival>,
}

#[derive(Debug)]
enum Arrival {
    Frame(Vec<u8>),
    Broken,
    End,
}

/// What goes wrong in one operation. Faults of remote ranks are by their order, over and over.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults {
    pub(crate) local: Option<Refusing>,
    pub(crate) local_undo: Option<Refusing>,
    /// While the local rank is at work, the connection to the first remote one ends.
    pub(crate) cut_meanwhile: bool,
    pub(crate) hello: Vec<Fault>,
    pub(crate) resync: Vec<Fault>,
    pub(crate) remote: Vec<Fault>,
    /// In what a rank is told to go on with: commit or undo.
    pub(crate) remote_then: Vec<Fault>,
    /// Which of the ranks that have something to say is heard next, over and over.
    pub(crate) order: Vec<Index>,
}

#[derive(Debug)]
pub(crate) struct Engine {
    fanout: Fanout,
    local: Option<Arc<Recorder>>,
    remotes: Vec<RemoteRank>,
    now: Instant,
    log: Arc<Mutex<Vec<Event>>>,
}

impl Fault {
    /// Does the operation succeed all the same?
    pub(crate) fn is_harmless(self) -> bool {
        matches!(self, Self::Fine | Self::LateReplyFirst | Self::ReplyTwice)
    }
}

impl State {
    /// Of a rank that was never told anything.
    fn new() -> Self {
        Self {
            mapped: BTreeSet::new(),
            prepared: BTreeSet::new(),
            forgets: false,
            resynced_after: None,
            doubts: Vec::new(),
            refusing: VecDeque::new(),
            says: Says::Ready,
            headroom: Some(100),
        }
    }
}

impl Recorder {
    fn new(at: At, log: &Arc<Mutex<Vec<Event>>>) -> Arc<Self> {
        Arc::new(Self {
            at,
            log: Arc::clone(log),
            state: Mutex::new(State::new()),
        })
    }

    pub(crate) fn mapped(&self) -> BTreeSet<PageRun> {
        self.state.lock().unwrap().mapped.clone()
    }

    pub(crate) fn say(&self, says: Says) {
        self.state.lock().unwrap().says = says;
    }

    pub(crate) fn set_headroom(&self, headroom: Option<u32>) {
        self.state.lock().unwrap().headroom = headroom;
    }

    /// The next resynchronisation leaves these in doubt.
    pub(crate) fn doubt_on_resync(&self, runs: Vec<PageRun>) {
        self.state.lock().unwrap().doubts = runs;
    }

    /// What the last resynchronisation waited for.
    pub(crate) fn resynced_after(&self) -> Option<After> {
        self.state.lock().unwrap().resynced_after
    }

    /// The next resynchronisation leaves out the first run, and nobody says so.
    pub(crate) fn forget_on_resync(&self) {
        self.state.lock().unwrap().forgets = true;
    }

    /// What the next batches come to, one entry each.
    fn refuse(&self, refusing: impl IntoIterator<Item = Option<Refusing>>) {
        self.state.lock().unwrap().refusing = refusing.into_iter().collect();
    }

    fn called(&self, call: Call, runs: &[PageRun]) {
        let event = Event::Called {
            at: self.at,
            call,
            runs: runs.to_vec(),
        };
        self.log.lock().unwrap().push(event);
    }

    /// Moves runs from one set to the other, as far as it does not refuse.
    fn batch(&self, call: Call, runs: &[PageRun]) -> Result<(), MapError> {
        self.called(call, runs);
        let mut state = self.state.lock().unwrap();
        for &run in runs {
            let wrong = match call {
                Call::Map => state.mapped.contains(&run) || state.prepared.contains(&run),
                _ => !state.mapped.contains(&run),
            };
            if wrong {
                let call = if call == Call::Map { "map" } else { "unmap" };
                return Err(MapError::clean(Cause::State {
                    call,
                    run,
                    found: "the contrary",
                }));
            }
        }
        let refusing = state.refusing.pop_front().flatten();
        let done = match refusing {
            None => runs,
            Some(Refusing::Doubt { done: true }) => &runs[..1],
            Some(_) => &[],
        };
        match call {
            Call::Map => state.mapped.extend(done),
            _ => state.mapped.retain(|run| !done.contains(run)),
        }
        if call == Call::Prepare && refusing.is_none() {
            state.prepared.extend(done);
        }
        refuse(refusing, runs)
    }
}

fn refuse(refusing: Option<Refusing>, runs: &[PageRun]) -> Result<(), MapError> {
    let cause = Cause::Vmm(VmmError::Unavailable {
        reason: "it fell off the bus".to_owned(),
    });
    match refusing {
        None => Ok(()),
        Some(Refusing::Full) => Err(MapError::clean(Cause::OutOfMemory { at: None })),
        Some(Refusing::Driver) => Err(MapError::clean(cause)),
        Some(Refusing::Doubt { .. }) => Err(MapError {
            cause,
            uncertain: vec![runs[0]],
        }),
    }
}

impl Mapper for Recorder {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.batch(Call::Map, runs)
    }

    /// Only ever what was mapped a moment ago.
    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        assert_eq!(after, After::NOTHING);
        self.batch(Call::Undo, runs)
    }

    fn headroom(&self) -> Option<u32> {
        self.called(Call::Headroom, &[]);
        self.state.lock().unwrap().headroom
    }

    fn trim(&self) {
        self.called(Call::Trim, &[]);
    }

    fn ready(&self) -> Result<Readiness, MapError> {
        self.called(Call::Ready, &[]);
        let (stage, rank) = self.at;
        match self.state.lock().unwrap().says {
            Says::Ready => Ok(Readiness::Ready),
            Says::NotReady => {
                let reason = "its tensors are not there".to_owned();
                Ok(Readiness::NotReady(vec![NotReady {
                    stage,
                    rank,
                    reason,
                }]))
            }
            Says::Broken => Err(MapError::clean(Cause::Vmm(VmmError::Unavailable {
                reason: "no device".to_owned(),
            }))),
        }
    }
}

impl RankMapper for Recorder {
    fn prepare_unmap(&self, runs: &[PageRun], _: After) -> Result<(), MapError> {
        self.batch(Call::Prepare, runs)
    }

    fn commit_unmap(&self, runs: &[PageRun]) {
        self.called(Call::Commit, runs);
        let mut state = self.state.lock().unwrap();
        state.prepared.retain(|run| !runs.contains(run));
    }

    fn abort_unmap(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.called(Call::Undo, runs);
        let mut state = self.state.lock().unwrap();
        let refusing = state.refusing.pop_front().flatten();
        let back: Vec<PageRun> = state
            .prepared
            .iter()
            .copied()
            .filter(|run| runs.contains(run))
            .collect();
        state.prepared.retain(|run| !back.contains(run));
        let Some(refusing) = refusing else {
            state.mapped.extend(back);
            return Ok(());
        };
        refuse(Some(refusing), runs).map_err(|error| MapError {
            uncertain: runs.to_vec(),
            ..error
        })
    }

    fn resync_after(&self, wanted: &[PageRun], after: After) -> Result<Resynced, MapError> {
        self.called(Call::Resync, wanted);
        let mut state = self.state.lock().unwrap();
        state.resynced_after = Some(after);
        let refusing = state.refusing.pop_front().flatten();
        refuse(refusing, wanted)?;
        let had = std::mem::take(&mut state.mapped);
        let prepared = std::mem::take(&mut state.prepared);
        let skipped = usize::from(std::mem::take(&mut state.forgets));
        let in_doubt = std::mem::take(&mut state.doubts);
        let known = wanted.iter().copied().filter(|run| !in_doubt.contains(run));
        state.mapped = known.clone().skip(skipped).collect();
        Ok(Resynced {
            remade: known
                .filter(|run| !had.contains(run) && !prepared.contains(run))
                .collect(),
            in_doubt,
        })
    }

    fn mapped(&self) -> Vec<PageRun> {
        self.state.lock().unwrap().mapped.iter().copied().collect()
    }
}

impl Engine {
    /// The ranks of `topology`, nothing connected yet.
    pub(crate) fn new(topology: &Topology) -> Self {
        let log = Arc::new(Mutex::new(Vec::new()));
        let remotes = topology.remotes().map(|(stage, rank, _)| {
            let mapper = Recorder::new((stage, rank), &log);
            RemoteRank {
                at: (stage, rank),
                served: served((stage, rank), &mapper, geometry()),
                mapper,
                conversation: Conversation::default(),
                reachable: true,
                back: VecDeque::new(),
            }
        });
        let hello = Hello {
            instance: "simulated".parse().unwrap(),
            stage: Stage(0),
            rank: Rank(0),
            pool: PoolId(0),
            geometry: geometry(),
            session: SESSION,
        };
        Self {
            fanout: Fanout::new(hello, topology),
            local: topology.local().map(|at| Recorder::new(at, &log)),
            remotes: remotes.collect(),
            now: start(),
            log: Arc::clone(&log),
        }
    }

    /// The ranks of `topology`, connected and ready.
    pub(crate) fn connected(topology: &Topology) -> Self {
        let mut engine = Self::new(topology);
        let answer = engine.perform(Operation::Ready, &Faults::default());
        assert_eq!(answer, Answer::Ready(Ok(Readiness::Ready)));
        engine.take_log();
        engine
    }

    /// Every rank with its mapper, the local one first.
    pub(crate) fn mappers(&self) -> Vec<(At, Arc<Recorder>)> {
        let local = self.local.iter();
        let all = local.chain(self.remotes.iter().map(|remote| &remote.mapper));
        all.map(|mapper| (mapper.at, Arc::clone(mapper))).collect()
    }

    pub(crate) fn local(&self) -> Option<&Recorder> {
        self.local.as_deref()
    }

    pub(crate) fn remotes(&self) -> Vec<At> {
        self.remotes.iter().map(|remote| remote.at).collect()
    }

    pub(crate) fn suspects(&self) -> Vec<At> {
        let suspects = self.fanout.suspects();
        suspects.map(|it| (it.stage, it.rank)).collect()
    }

    pub(crate) fn health(&self) -> Health {
        self.fanout.health()
    }

    pub(crate) fn agreed(&self) -> BTreeSet<PageRun> {
        self.fanout.agreed().collect()
    }

    pub(crate) fn retire(&mut self, epoch: Epoch) {
        self.fanout.retire(epoch);
    }

    /// The local rank and all others are told to, and then nobody goes on.
    pub(crate) fn abandon_amid(&mut self, operation: Operation<'_>) {
        self.fanout.begin(operation, self.now, TIMEOUT);
        loop {
            match self.fanout.poll() {
                Step::Local(call) => {
                    let local = self.local.as_deref().expect("there is a local rank");
                    let answer = call.perform(local);
                    self.fanout.handle_local(answer, self.now);
                }
                Step::Send { .. } => {}
                _ => break,
            }
        }
        self.fanout.abandon("it was abandoned");
        self.hang_up();
    }

    /// The rank ends, and another takes its place: nothing of it is left but its name.
    pub(crate) fn replace(&mut self, remote: usize) {
        let RemoteRank { mapper, .. } = &self.remotes[remote];
        *mapper.state.lock().unwrap() = State::new();
        self.make(remote, geometry());
        self.cut(remote);
    }

    fn make(&mut self, remote: usize, geometry: GeometryDigest) {
        let RemoteRank { at, mapper, .. } = &self.remotes[remote];
        self.remotes[remote].served = served(*at, mapper, geometry);
        self.remotes[remote].conversation = Conversation::default();
    }

    /// The time that only passes when nothing else can happen.
    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    pub(crate) fn take_log(&mut self) -> Vec<Event> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }

    pub(crate) fn set_reachable(&mut self, remote: usize, reachable: bool) {
        self.remotes[remote].reachable = reachable;
    }

    /// From now on the rank believes in other pages than everybody else.
    pub(crate) fn make_stranger(&mut self, remote: usize) {
        self.make(remote, GeometryDigest::new(7, 3, 1));
    }

    /// The connection to a rank ends while nothing is under way.
    pub(crate) fn cut(&mut self, remote: usize) {
        self.remotes[remote].back.push_back(Arrival::End);
    }

    /// Does what `Broadcast` does, over the simulated network.
    pub(crate) fn perform(&mut self, operation: Operation<'_>, faults: &Faults) -> Answer {
        while let Some(peer) = self.fanout.peers().find(|peer| self.has_news(*peer)) {
            self.arrive(peer);
        }
        if let Some(local) = &self.local {
            local.refuse([faults.local, faults.local_undo]);
        }
        let mut requests = vec![0; self.remotes.len()];
        let mut order = faults.order.iter().cycle();
        self.fanout.begin(operation, self.now, TIMEOUT);
        let answer = loop {
            match self.fanout.poll() {
                Step::Local(call) => {
                    let local = self.local.as_deref().expect("there is a local rank");
                    let answer = call.perform(local);
                    if faults.cut_meanwhile && requests.iter().all(|requests| *requests == 0) {
                        let peer = self.fanout.peers().next().expect("there is a remote rank");
                        self.fanout
                            .handle_disconnect(peer, "cut".to_owned(), self.now);
                        self.hang_up();
                    }
                    self.fanout.handle_local(answer, self.now);
                }
                Step::Connect(peer) => {
                    if self.remotes[peer.index()].reachable {
                        self.fanout.handle_connected(peer);
                    } else {
                        let reason = "nobody is there".to_owned();
                        self.fanout.handle_unreachable(peer, reason, self.now);
                    }
                }
                Step::Send { peer, frames } => {
                    let index = peer.index();
                    let remote = &mut self.remotes[index];
                    let log = Arc::clone(&self.log);
                    if !remote.receive(frames, faults, index, &mut requests[index], &log) {
                        self.fanout
                            .handle_disconnect(peer, "broken pipe".to_owned(), self.now);
                        self.hang_up();
                    }
                }
                Step::Wait(until) => {
                    let news: Vec<PeerIndex> = self
                        .fanout
                        .peers()
                        .filter(|peer| self.has_news(*peer))
                        .collect();
                    if news.is_empty() {
                        self.now = until;
                        self.fanout.handle_timeout(self.now);
                    } else {
                        self.log.lock().unwrap().push(Event::Arrived);
                        let next = order.next().map_or(0, |index| index.index(news.len()));
                        self.arrive(news[next]);
                    }
                }
                Step::Done(answer) => break answer,
            }
        };
        self.hang_up();
        answer
    }

    fn has_news(&self, peer: PeerIndex) -> bool {
        !self.remotes[peer.index()].back.is_empty()
    }

    fn arrive(&mut self, peer: PeerIndex) {
        let remote = &mut self.remotes[peer.index()];
        match remote.back.pop_front().expect("there is news") {
            Arrival::Frame(payload) => self.fanout.handle_frame(peer, &payload, self.now),
            Arrival::Broken => {
                self.fanout
                    .handle_broken_frame(peer, "too long".to_owned(), self.now);
            }
            Arrival::End => {
                remote.hang_up();
                self.fanout
                    .handle_disconnect(peer, "cut".to_owned(), self.now);
            }
        }
        self.hang_up();
    }

    /// Drops the connections that the fan-out has given up.
    fn hang_up(&mut self) {
        for peer in self.fanout.peers() {
            if !self.fanout.keeps(peer) {
                self.remotes[peer.index()].hang_up();
            }
        }
    }
}

impl RemoteRank {
    /// Takes what was sent; `false` if it could not be.
    fn receive(
        &mut self,
        frames: &[u8],
        faults: &Faults,
        index: usize,
        requests: &mut usize,
        log: &Mutex<Vec<Event>>,
    ) -> bool {
        let request = payloads(frames).pop().expect("whole frames are sent");
        let greeting = self.conversation.is_unfinished();
        let (list, sequence) = if greeting {
            log.lock().unwrap().push(Event::Greeted { to: self.at });
            (&faults.hello, 0)
        } else {
            let request = wire::read_request(&request).unwrap();
            let (call, runs) = match request.command {
                Command::Map { runs, .. } => (Call::Map, runs.0.into_owned()),
                Command::Prepare { runs, .. } => (Call::Prepare, runs.0.into_owned()),
                Command::Commit => (Call::Commit, Vec::new()),
                Command::Undo => (Call::Undo, Vec::new()),
                Command::Resync { runs, .. } => (Call::Resync, runs.0.into_owned()),
                Command::Ready => (Call::Ready, Vec::new()),
                Command::Headroom => (Call::Headroom, Vec::new()),
                Command::Trim => (Call::Trim, Vec::new()),
                other => panic!("{other:?}"),
            };
            assert_eq!(request.session, SESSION);
            log.lock().unwrap().push(Event::Sent {
                to: self.at,
                call,
                runs,
            });
            let list = if call == Call::Resync {
                &faults.resync
            } else {
                *requests += 1;
                match *requests {
                    1 => &faults.remote,
                    _ => &faults.remote_then,
                }
            };
            (list, request.sequence)
        };
        let fault = nth(list, index);
        match fault {
            Fault::RequestLost => return true,
            Fault::SendFails => return false,
            Fault::CutBefore => {
                self.back.push_back(Arrival::End);
                return true;
            }
            _ => {}
        }
        self.mapper.refuse(match fault {
            Fault::Refuses(refusing) => Some(Some(refusing)),
            _ => None,
        });
        let mut out = Vec::new();
        for payload in payloads(frames) {
            let _ = self
                .conversation
                .handle_frame(&mut self.served, &payload, &mut out);
        }
        let replies = payloads(&out);
        let mut reply = |payload: &[u8]| self.back.push_back(Arrival::Frame(payload.to_vec()));
        match fault {
            Fault::Fine | Fault::Refuses(_) => replies.iter().for_each(|it| reply(it)),
            Fault::LateReplyFirst => {
                if !greeting {
                    // As if an earlier request had failed after all.
                    let failed = Reply::Failed {
                        failure: Failure::OutOfMemory,
                        doubt: Part::Whole,
                    };
                    reply(&message(sequence - 1, failed));
                }
                replies.iter().for_each(|it| reply(it));
            }
            Fault::ReplyTwice => {
                replies.iter().for_each(|it| reply(it));
                if !greeting {
                    replies.iter().for_each(|it| reply(it));
                }
            }
            Fault::CutAfterReply => {
                replies.iter().for_each(|it| reply(it));
                self.back.push_back(Arrival::End);
            }
            Fault::CutAfter => self.back.push_back(Arrival::End),
            Fault::BrokenFrame => self.back.push_back(Arrival::Broken),
            Fault::Garbage => reply(&[0xff; 9]),
            Fault::FutureReply => reply(&message(sequence + 1, Reply::Done)),
            Fault::WrongKind => reply(&message(sequence, Reply::NotReady { reason: "?".into() })),
            Fault::Violation => {
                let mut out = Vec::new();
                let reason = "what was that?".to_owned();
                wire::push_message(&mut out, &WorkerMessage::Violation { reason });
                reply(&payloads(&out)[0]);
            }
            Fault::ReplyLost | Fault::RequestLost | Fault::SendFails | Fault::CutBefore => {}
        }
        true
    }

    fn hang_up(&mut self) {
        std::mem::take(&mut self.conversation).end(&mut self.served, start());
        self.back.clear();
    }
}

/// The entry for a rank; fine where nothing is stated.
pub(crate) fn nth(faults: &[Fault], index: usize) -> Fault {
    faults
        .get(index % faults.len().max(1))
        .copied()
        .unwrap_or(Fault::Fine)
}

/// Runs that tests move about, one per bit: run `i` lies inside the pages `8 * i .. 8 * i + 8`.
pub(crate) fn runs(mask: u8) -> Vec<PageRun> {
    let chosen = (0..8).filter(|bit| mask & (1 << bit) != 0);
    chosen
        .map(|bit| PageRun::new(PageId(8 * bit), 1 + bit).unwrap())
        .collect()
}

/// One to seven ranks in up to three stages, one of them local or none.
pub(crate) fn topologies() -> impl Strategy<Value = Topology> {
    let places = prop::collection::btree_set((0u16..3, 0u16..5), 1..8);
    (places, any::<Option<Index>>()).prop_map(|(places, local)| {
        let local = local.map(|local| local.index(places.len()));
        let places = places
            .into_iter()
            .enumerate()
            .map(|(index, (stage, rank))| {
                let path = format!("/run/s{stage}-r{rank}.sock");
                let remote = || Place::Remote(Endpoint::new(Path::new(&path)).unwrap());
                let place = if Some(index) == local {
                    Place::Local
                } else {
                    remote()
                };
                ((Stage(stage), Rank(rank)), place)
            });
        Topology::from_places(places).unwrap()
    })
}

/// Faults at any point, most ranks being fine.
pub(crate) fn faults() -> impl Strategy<Value = Faults> {
    let local = || prop_oneof![4 => Just(None), 1 => refusing().prop_map(Some)];
    let remote = || prop::collection::vec(fault(), 1..8);
    (
        local(),
        local(),
        remote(),
        remote(),
        prop::collection::vec(any::<Index>(), 1..8),
    )
        .prop_map(|(local, local_undo, remote, remote_then, order)| Faults {
            local,
            local_undo,
            cut_meanwhile: false,
            hello: Vec::new(),
            resync: Vec::new(),
            remote,
            remote_then,
            order,
        })
}

pub(crate) fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        12 => Just(Fault::Fine),
        1 => Just(Fault::LateReplyFirst),
        1 => Just(Fault::ReplyTwice),
        2 => refusing().prop_map(Fault::Refuses),
        2 => prop_oneof![
            Just(Fault::RequestLost),
            Just(Fault::SendFails),
            Just(Fault::ReplyLost),
            Just(Fault::CutBefore),
            Just(Fault::CutAfter),
            Just(Fault::Garbage),
            Just(Fault::BrokenFrame),
            Just(Fault::FutureReply),
            Just(Fault::WrongKind),
            Just(Fault::Violation),
        ],
    ]
}

fn refusing() -> impl Strategy<Value = Refusing> {
    prop_oneof![
        3 => Just(Refusing::Full),
        2 => Just(Refusing::Driver),
        1 => any::<bool>().prop_map(|done| Refusing::Doubt { done }),
    ]
}

fn geometry() -> GeometryDigest {
    GeometryDigest::new(64, 2, 1)
}

fn served(at: At, mapper: &Arc<Recorder>, geometry: GeometryDigest) -> ServedRank {
    let mapper: Arc<dyn RankMapper> = mapper.clone();
    let pool = ServedPool {
        pool: PoolId(0),
        geometry,
        mapper,
    };
    ServedRank::new("simulated".parse().unwrap(), at.0, at.1, [pool])
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

fn message(sequence: u64, reply: Reply) -> Vec<u8> {
    let mut out = Vec::new();
    wire::push_message(&mut out, &WorkerMessage::Reply { sequence, reply });
    payloads(&out).remove(0)
}

#[expect(
    clippy::disallowed_methods,
    reason = "any moment will do as the first one"
)]
fn start() -> Instant {
    Instant::now()
}
