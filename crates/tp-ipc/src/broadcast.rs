//! [`Broadcast`]: the [`Mapper`] of a pool whose ranks are in several processes. Drives a
//! [`Fanout`] over persistent sockets and decides nothing itself.

use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvcached_mapper::{
    After, Epoch, Health, MapError, Mapper, NotReady, PageRun, PoolId, Rank, RankMapper, Readiness,
    Reconciled, Stage, Suspect,
};
use nix::poll::{PollFd, PollFlags};
use nix::time::{ClockId, clock_gettime};
use thiserror::Error;

use crate::socket::{self, Backoff, LONGEST_WAIT, Received};
use crate::wire::Hello;
use crate::{
    Answer, Deadline, Fanout, FramedStream, GeometryDigest, InstanceName, Operation, PeerIndex,
    SessionId, Step, Topology,
};

/// One pool over all ranks of an engine. Its calls are serial: each of them is a transaction.
///
/// A call waits for other ranks at most twice the time-out, once for them to do what they are told
/// and once for them to undo or to commit it; and for the local mapper as long as that takes.
///
/// Once a rank is suspect, batches are refused with [`Cause::Diverged`](kvcached_mapper::Cause)
/// until [`reconcile`](Mapper::reconcile) has brought it back. Nothing does that by itself: who
/// owns the value calls it now and then.
#[derive(Debug)]
pub struct Broadcast {
    wires: Mutex<Wires>,
    local: Option<Arc<dyn RankMapper>>,
    timeout: Duration,
    /// As of the last call, so that whoever asks need not wait for one under way.
    health: Mutex<Health>,
    /// The epochs below this number have retired on every rank, as the engine says.
    retired_below: AtomicU64,
}

/// What a [`Broadcast`] needs to know.
#[derive(Debug, Clone)]
pub struct BroadcastConfig {
    /// The engine.
    pub instance: InstanceName,
    /// The pool.
    pub pool: PoolId,
    /// What its page numbers mean; every rank must agree.
    pub geometry: GeometryDigest,
    /// Where the ranks are.
    pub topology: Topology,
    /// Longest wait for another rank to answer one request.
    pub timeout: Duration,
}

/// Why a [`Broadcast`] does not serve.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Some ranks were not ready by the deadline.
    #[error("{}", describe(.missing))]
    NotReady {
        /// Each of them with its endpoint and its reason.
        missing: Vec<NotReady>,
    },
    /// Something that waiting does not mend, such as a rank with another geometry.
    #[error(transparent)]
    Broken(#[from] MapError),
    /// The topology has a rank in this process, and no mapper was given for it.
    #[error("{stage}, {rank} is in this process, but has no mapper")]
    NoLocalMapper {
        /// Stage of the rank.
        stage: Stage,
        /// The rank.
        rank: Rank,
    },
    /// A mapper was given for a rank in this process, and the topology has none.
    #[error("a mapper was given for this process, but no rank is here")]
    NoLocalRank,
}

/// Longest wait for a rank that is to come back. Another one may be waiting for its turn, and would
/// give up what it holds once it has been alone for too long.
const LONGEST_RECONCILE: Duration = Duration::from_secs(10);

/// Longest wait for a hint, for which others who have something to do wait, too.
const LONGEST_HINT: Duration = Duration::from_secs(1);

/// The fan-out and the connections that it speaks of.
#[derive(Debug)]
struct Wires {
    fanout: Fanout,
    /// One per peer of the fan-out, in its order.
    streams: Vec<Option<FramedStream>>,
}

impl SessionId {
    /// A number greater than that of every life of a coordinator that began before on this
    /// machine: the nanoseconds since it was started.
    #[must_use]
    pub fn fresh() -> Self {
        let since_boot = clock_gettime(ClockId::CLOCK_BOOTTIME);
        // The clock is there on every kernel that there is; without it, any number is as good.
        let since_boot = since_boot.map_or(Duration::ZERO, Duration::from);
        Self(u64::try_from(since_boot.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl Broadcast {
    /// A mapper over the ranks of the topology, which are all connected, agree about the pool, and
    /// can map. Waits for them until the deadline.
    ///
    /// # Errors
    /// [`ConnectError`]; a refusal ends the wait at once.
    pub fn connect(
        config: BroadcastConfig,
        local: Option<Arc<dyn RankMapper>>,
        deadline: Deadline,
    ) -> Result<Self, ConnectError> {
        let broadcast = Self::new(config, local)?;
        broadcast.wait_ready(deadline)?;
        Ok(broadcast)
    }

    /// A mapper over ranks that need not be there yet. Nothing is connected before
    /// [`wait_ready`](Self::wait_ready) or [`ready`](Mapper::ready) is called.
    ///
    /// # Errors
    /// [`ConnectError::NoLocalMapper`], [`ConnectError::NoLocalRank`].
    pub fn new(
        config: BroadcastConfig,
        local: Option<Arc<dyn RankMapper>>,
    ) -> Result<Self, ConnectError> {
        let BroadcastConfig {
            instance,
            pool,
            geometry,
            topology,
            timeout,
        } = config;
        match (topology.local(), &local) {
            (Some((stage, rank)), None) => {
                return Err(ConnectError::NoLocalMapper { stage, rank });
            }
            (None, Some(_)) => return Err(ConnectError::NoLocalRank),
            (Some(_), Some(_)) | (None, None) => {}
        }
        let (stage, rank) = (Stage(0), Rank(0));
        let fanout = Fanout::new(
            Hello {
                instance,
                stage,
                rank,
                pool,
                geometry,
                // Of this value and no other: its numbers begin anew.
                session: SessionId::fresh(),
            },
            &topology,
        );
        let streams = fanout.peers().map(|_| None).collect();
        let health = Mutex::new(fanout.health());
        let wires = Mutex::new(Wires { fanout, streams });
        Ok(Self {
            wires,
            local,
            timeout: timeout.min(LONGEST_WAIT),
            health,
            retired_below: AtomicU64::new(0),
        })
    }

    /// Waits until every rank is connected and can map.
    ///
    /// # Errors
    /// [`ConnectError::NotReady`] at the deadline, naming every rank that is missing;
    /// [`ConnectError::Broken`] at once.
    pub fn wait_ready(&self, deadline: Deadline) -> Result<(), ConnectError> {
        let mut backoff = Backoff::default();
        loop {
            let timeout = self
                .timeout
                .min(deadline.remaining())
                .max(Duration::from_millis(1));
            match self.ask_ready(timeout)? {
                Readiness::Ready => return Ok(()),
                Readiness::NotReady(missing) => {
                    if !backoff.pause(deadline).unwrap_or(false) {
                        return Err(ConnectError::NotReady { missing });
                    }
                }
            }
        }
    }

    /// The runs that every rank has that counts, in order. Waits for a call under way.
    #[must_use]
    pub fn agreed(&self) -> Vec<PageRun> {
        self.wires().fanout.agreed().collect()
    }

    fn ask_ready(&self, timeout: Duration) -> Result<Readiness, MapError> {
        match self.perform(Operation::Ready, timeout) {
            Answer::Ready(readiness) => readiness,
            other => unreachable!("{other:?} is no answer about readiness"),
        }
    }

    fn batch(&self, operation: Operation<'_>) -> Result<(), MapError> {
        match self.perform(operation, self.timeout) {
            Answer::Batch(result) => result,
            other => unreachable!("{other:?} is no answer to a batch"),
        }
    }

    fn perform(&self, operation: Operation<'_>, timeout: Duration) -> Answer {
        let mut wires = self.wires();
        if let Some(last) = self.retired_below.load(Ordering::Acquire).checked_sub(1) {
            wires.fanout.retire(Epoch(last));
        }
        let answer = wires.perform(self.local.as_deref(), operation, timeout);
        let healthy = wires.fanout.is_healthy();
        let mut known = self.known_health();
        if !healthy || *known != Health::Healthy {
            let health = wires.fanout.health();
            log_change(&known, &health);
            *known = health;
        }
        answer
    }

    fn known_health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wires(&self) -> MutexGuard<'_, Wires> {
        self.wires.lock().unwrap_or_else(|poisoned| {
            // The local mapper panicked amid a transaction: nobody knows how far it got.
            let mut wires = poisoned.into_inner();
            wires.fanout.abandon("a call ended in a panic");
            self.wires.clear_poison();
            wires
        })
    }
}

impl Mapper for Broadcast {
    fn map(&self, runs: &[PageRun]) -> Result<(), MapError> {
        self.batch(Operation::Map(runs))
    }

    fn unmap_after(&self, runs: &[PageRun], after: After) -> Result<(), MapError> {
        self.batch(Operation::Unmap(runs, after))
    }

    fn headroom(&self) -> Option<u32> {
        let timeout = self.timeout.min(LONGEST_HINT);
        match self.perform(Operation::Headroom, timeout) {
            Answer::Headroom(pages) => pages,
            other => unreachable!("{other:?} is no headroom"),
        }
    }

    fn trim(&self) {
        let timeout = self.timeout.min(LONGEST_HINT);
        match self.perform(Operation::Trim, timeout) {
            Answer::Trimmed => {}
            other => unreachable!("{other:?} is no answer to a trim"),
        }
    }

    /// Of the rank in this process; every other one has a loop of its own that does it.
    fn tend(&self, now: Instant) -> Option<Instant> {
        self.local.as_ref()?.tend(now)
    }

    fn kept_bytes(&self) -> u64 {
        self.local.as_ref().map_or(0, |local| local.kept_bytes())
    }

    /// Connects to ranks that are not connected yet, without waiting for any to come.
    fn ready(&self) -> Result<Readiness, MapError> {
        self.ask_ready(self.timeout)
    }

    fn retire(&self, epoch: Epoch) {
        // Not for the fan-out to hear at once, which may be waiting for a rank.
        let below = epoch.0.saturating_add(1);
        self.retired_below.fetch_max(below, Ordering::AcqRel);
        if let Some(local) = &self.local {
            local.retire(epoch);
        }
    }

    fn health(&self) -> Health {
        self.known_health().clone()
    }

    /// Connects again to ranks that do not count, and resynchronises them.
    fn reconcile(&self, doubtful: &[PageRun]) -> Result<Reconciled, MapError> {
        let timeout = self.timeout.min(LONGEST_RECONCILE);
        match self.perform(Operation::Reconcile(doubtful), timeout) {
            Answer::Reconciled(result) => result,
            other => unreachable!("{other:?} is no answer about doubt"),
        }
    }
}

impl Wires {
    fn perform(
        &mut self,
        local: Option<&dyn RankMapper>,
        operation: Operation<'_>,
        timeout: Duration,
    ) -> Answer {
        // A rank that died meanwhile is better noticed before anything is done anywhere.
        let now = match self.streams.iter().any(Option::is_some) {
            true => self.exchange(|_, _| true, None),
            false => socket::now(),
        };
        self.fanout.begin(operation, now, timeout);
        let answer = loop {
            match self.fanout.poll() {
                Step::Local(call) => {
                    let local = local.expect("a topology with a local rank comes with a mapper");
                    let answer = call.perform(local);
                    self.fanout.handle_local(answer, socket::now());
                }
                Step::Connect(peer) => self.connect(peer),
                Step::Send { peer, frames } => {
                    let stream = self.streams[peer.index()].as_mut();
                    let sent = stream.map_or_else(
                        || Err(ErrorKind::NotConnected.into()),
                        |stream| stream.transmit(frames),
                    );
                    if let Err(e) = sent {
                        self.fanout
                            .handle_disconnect(peer, e.to_string(), socket::now());
                    }
                }
                Step::Wait(until) => {
                    let now = self.exchange(Fanout::awaits, Some(until));
                    self.fanout.handle_timeout(now);
                }
                Step::Done(answer) => break answer,
            }
        };
        for peer in self.fanout.peers() {
            if !self.fanout.keeps(peer) {
                self.streams[peer.index()] = None;
            }
        }
        answer
    }

    fn connect(&mut self, peer: PeerIndex) {
        match FramedStream::try_connect(self.fanout.endpoint(peer)) {
            Ok(stream) => {
                self.streams[peer.index()] = Some(stream);
                self.fanout.handle_connected(peer);
            }
            Err(e) => self
                .fanout
                .handle_unreachable(peer, e.to_string(), socket::now()),
        }
    }

    /// Waits until one of the chosen peers has something to say or takes more, if it is to wait, and
    /// lets all do so that can; answers what time it was then.
    fn exchange(
        &mut self,
        chosen: impl Fn(&Fanout, PeerIndex) -> bool,
        until: Option<Instant>,
    ) -> Instant {
        let mut peers = Vec::with_capacity(self.streams.len());
        let mut fds = Vec::with_capacity(self.streams.len());
        for (peer, slot) in self.fanout.peers().zip(&self.streams) {
            let Some(stream) = slot.as_ref().filter(|_| chosen(&self.fanout, peer)) else {
                continue;
            };
            let mut events = PollFlags::POLLIN;
            events.set(PollFlags::POLLOUT, stream.wants_to_send());
            peers.push(peer);
            fds.push(PollFd::new(stream.as_fd(), events));
        }
        let waited = match until {
            Some(until) => socket::wait(&mut fds, Some(until)),
            None => socket::look(&mut fds),
        };
        let now = socket::now();
        let happened: Vec<PollFlags> = fds
            .iter()
            .map(|fd| fd.revents().unwrap_or(PollFlags::empty()))
            .collect();
        for (peer, events) in peers.into_iter().zip(happened) {
            if let Err(e) = &waited {
                // Without poll there is no telling when anybody answers.
                self.fanout.handle_disconnect(peer, e.to_string(), now);
            } else if !events.is_empty() {
                self.attend(peer, events, now);
            }
        }
        now
    }

    fn attend(&mut self, peer: PeerIndex, events: PollFlags, now: Instant) {
        let stream = self.streams[peer.index()]
            .as_mut()
            .expect("only connected peers are polled");
        let ended = match take_in(stream, events) {
            Ok(Received::Ended) => Some("closed by the worker".to_owned()),
            Ok(Received::Bytes | Received::Nothing) => None,
            Err(e) => Some(e.to_string()),
        };
        loop {
            match stream.next_frame() {
                Ok(Some(payload)) => self.fanout.handle_frame(peer, payload, now),
                Ok(None) => break,
                Err(e) => return self.fanout.handle_broken_frame(peer, e.to_string(), now),
            }
        }
        if let Some(reason) = ended {
            self.fanout.handle_disconnect(peer, reason, now);
        }
    }
}

fn take_in(stream: &mut FramedStream, events: PollFlags) -> io::Result<Received> {
    if events.contains(PollFlags::POLLOUT) {
        stream.flush()?;
    }
    if events.intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR) {
        return stream.receive();
    }
    Ok(Received::Nothing)
}

/// Says once of each rank that it is suspect, and that it is no longer.
fn log_change(before: &Health, after: &Health) {
    let names = |ranks: &[Suspect], suspect: &Suspect| {
        ranks
            .iter()
            .any(|other| (other.stage, other.rank) == (suspect.stage, suspect.rank))
    };
    for suspect in after.ranks() {
        if !names(before.ranks(), suspect) {
            tracing::warn!(%suspect, "it is unknown which pages a rank has");
        }
    }
    for suspect in before.ranks() {
        if !names(after.ranks(), suspect) {
            let Suspect { stage, rank, .. } = suspect;
            tracing::info!(%stage, %rank, "a rank has the pages that it should have");
        }
    }
}

fn describe(missing: &[NotReady]) -> String {
    let reasons: Vec<String> = missing.iter().map(ToString::to_string).collect();
    reasons.join("; ")
}
