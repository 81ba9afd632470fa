//! What travels between the process that decides about pages and a rank, and its bytes.
//!
//! ```text
//! coordinator                                   worker (one rank, several pools)
//!   hello    magic version {instance, stage, rank, pool, geometry, session} ──▶
//!   ◀── welcome  magic version {the same, as the worker knows it}   or  refused {both sides}
//!   request  {session, sequence, resync all its runs}  ──▶          first on every connection
//!   ◀── reply    {sequence, resynced {digest, remade, in doubt} | failed}
//!   request  {session, sequence, map runs | prepare runs | commit | undo | ready | headroom}  ──▶
//!   ◀── reply    {sequence, done | prepared | committed | undone | …| failed}   or  violation
//! ```
//!
//! A transaction has one sequence number. It begins with map or prepare (the first half of an
//! unmap), and may go on with undo, or commit after prepare. A rank remembers its last transaction:
//! the same request again is answered from memory, an earlier number changes nothing.
//!
//! Magic and version lead both hellos and never change their place, so that any two versions can
//! tell each other apart. Pages travel, never byte offsets. What is received is checked whole
//! before any of it is believed.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::hash::Hasher;

use fnv::FnvHasher;
use kvcached_mapper::{
    After, Cause, Epoch, MapError, PageId, PageRun, PoolId, Rank, Readiness, Resynced, Stage,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

use crate::InstanceName;
use crate::frame::{MAX_FRAME_BYTES, push_frame};

/// Version of everything after magic and version themselves.
pub const PROTOCOL_VERSION: u16 = 2;

/// First bytes of either side.
const MAGIC: [u8; 4] = *b"KVtp";

/// Runs in one frame: ten bytes each at worst, and room for what stands around them.
const MAX_RUNS_PER_FRAME: usize = (MAX_FRAME_BYTES - 64) / 10;

/// Longest reason that a worker sends, in bytes.
const MAX_REASON_BYTES: usize = 1024;

/// One life of a coordinator. A worker answers requests only of the one that greeted it, and never
/// again one that began before: the later life has the greater number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionId(pub u64);

/// What two processes must agree about for the same page number to mean the same blocks: how many
/// pages there are, and how many blocks fill one. Bytes may differ: a stage with fewer layers has
/// smaller pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GeometryDigest {
    pages: u32,
    /// Blocks in a page as a reduced fraction: an explicit page size need not hold whole blocks.
    page_bytes: u64,
    block_bytes: u64,
}

/// The first message: who is wanted, by whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The engine.
    pub instance: InstanceName,
    /// Stage of the rank.
    pub stage: Stage,
    /// The rank.
    pub rank: Rank,
    /// The pool that this connection is about.
    pub pool: PoolId,
    /// Its geometry.
    pub geometry: GeometryDigest,
    /// The coordinator's life.
    pub session: SessionId,
}

/// Why a worker does not serve a coordinator. Names both sides.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// Programs of different ages.
    #[error("the coordinator speaks protocol version {coordinator}, the worker version {worker}")]
    Version {
        /// The coordinator's.
        coordinator: u16,
        /// The worker's.
        worker: u16,
    },
    /// Another engine.
    #[error("the coordinator belongs to instance {coordinator}, the worker to {worker}")]
    Instance {
        /// The coordinator's.
        coordinator: String,
        /// The worker's.
        worker: String,
    },
    /// Another rank than the one that should be there.
    #[error(
        "the coordinator wants stage {}, rank {}, the worker is stage {}, rank {}",
        .wanted.0, .wanted.1, .worker.0, .worker.1
    )]
    Place {
        /// Stage and rank that the coordinator wants.
        wanted: (u16, u16),
        /// Stage and rank of the worker.
        worker: (u16, u16),
    },
    /// A pool that the worker does not have.
    #[error("the coordinator wants pool {wanted}, the worker has pools {worker:?}")]
    Pool {
        /// The pool that the coordinator wants.
        wanted: u16,
        /// Those that the worker has.
        worker: Vec<u16>,
    },
    /// The same page number would mean other blocks.
    #[error("the coordinator has {coordinator} in pool {pool}, the worker {worker}")]
    Geometry {
        /// The pool.
        pool: u16,
        /// The coordinator's.
        coordinator: GeometryDigest,
        /// The worker's.
        worker: GeometryDigest,
    },
    /// A coordinator that began later was served already.
    #[error("a later coordinator has taken pool {pool} of the worker over")]
    Superseded {
        /// The pool.
        pool: u16,
    },
    /// The worker could not begin, and ends.
    #[error("the worker cannot serve: {reason}")]
    Unable {
        /// Its words.
        reason: String,
    },
    /// Another coordinator is connected. The only refusal that waiting can mend.
    #[error("another coordinator is connected to pool {pool} of the worker")]
    Taken {
        /// The pool.
        pool: u16,
    },
    /// No hello at all.
    #[error("the coordinator did not say hello: {reason}")]
    NoHello {
        /// What is wrong with what it said.
        reason: String,
    },
}

/// Bytes that are no message of this protocol.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// Something else listens, or speaks, there.
    #[error("does not begin as this protocol does")]
    Magic,
    /// A program of another age.
    #[error("protocol version {theirs}, this process speaks {PROTOCOL_VERSION}")]
    Version {
        /// The other side's version.
        theirs: u16,
    },
    /// The content of a message makes no sense.
    #[error("malformed {message}")]
    Malformed {
        /// Which message it should have been.
        message: &'static str,
    },
}

/// What a worker is told to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Whose request it is.
    pub session: SessionId,
    /// Grows from one transaction to the next; the parts of a long batch, and what a transaction
    /// goes on with, share it.
    pub sequence: u64,
    /// What to do.
    pub command: Command<'static>,
}

/// A command; `more` says that the same batch goes on in the next frame, and that nothing is to
/// be done before its last part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Command<'a> {
    /// Map these runs.
    Map {
        /// The runs of this part.
        runs: Runs<'a>,
        /// Is it not the last part?
        more: bool,
    },
    /// First half of an unmap: make these runs unreachable and keep their memory.
    Prepare {
        /// The runs of this part.
        runs: Runs<'a>,
        /// What must have ended before; of the last part.
        after: Waits,
        /// Is it not the last part?
        more: bool,
    },
    /// Second half of an unmap: give the memory back that this transaction prepared.
    Commit,
    /// Take back what this transaction has done, whatever that is.
    Undo,
    /// Have exactly these runs mapped.
    Resync {
        /// The runs of this part.
        runs: Runs<'a>,
        /// What must have ended before others go; of the last part.
        after: Waits,
        /// Is it not the last part?
        more: bool,
    },
    /// Can it map?
    Ready,
    /// How many more pages could it back?
    Headroom,
}

/// [`After`] on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    epoch: Option<u64>,
    device: bool,
}

/// A command as it is given, however many frames it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb<'a> {
    /// [`Command::Map`].
    Map(&'a [PageRun]),
    /// [`Command::Prepare`].
    Prepare(&'a [PageRun], After),
    /// [`Command::Commit`].
    Commit,
    /// [`Command::Undo`].
    Undo,
    /// [`Command::Resync`].
    Resync(&'a [PageRun], After),
    /// [`Command::Ready`].
    Ready,
    /// [`Command::Headroom`].
    Headroom,
}

/// What two processes compare to find out whether they mean the same runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunsDigest(u64);

/// Page runs on the wire: pairs of first page and count, checked when they arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runs<'a>(pub Cow<'a, [PageRun]>);

/// What a worker says once it has greeted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum WorkerMessage {
    /// The answer to the request with that sequence number.
    Reply {
        /// The request's.
        sequence: u64,
        /// The answer.
        reply: Reply,
    },
    /// The coordinator broke the protocol. Nothing was changed, and the connection ends.
    Violation {
        /// How.
        reason: String,
    },
}

/// What a request came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Reply {
    /// The runs are mapped.
    Done,
    /// The runs are unreachable, and could be restored.
    Prepared,
    /// The memory of what was prepared is given back.
    Committed,
    /// What the transaction had done is taken back.
    Undone,
    /// The rank has the runs that it must have, but for those in doubt.
    Resynced {
        /// Of the runs that are mapped now.
        digest: RunsDigest,
        /// Those of them that were not mapped before; they are empty.
        remade: Part,
        /// Runs that are neither mapped nor cold, for all that was tried.
        in_doubt: Runs<'static>,
    },
    /// This rank can map.
    Ready,
    /// It cannot map yet.
    NotReady {
        /// Why.
        reason: String,
    },
    /// How many more pages it could back.
    Headroom(Option<u32>),
    /// It was not done.
    Failed {
        /// Why.
        failure: Failure,
        /// What is now unknown.
        doubt: Part,
    },
}

/// Why a rank did not do what it was told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum Failure {
    /// Full right now.
    #[error("out of device memory")]
    OutOfMemory,
    /// Its pages are not as the request takes them to be.
    #[error("{reason}")]
    State {
        /// Its words.
        reason: String,
    },
    /// Work that may still touch the memory has not ended within the rank's bound.
    #[error("epoch {epoch} has not retired")]
    InFlight {
        /// The epoch waited for.
        epoch: u64,
    },
    /// Its driver, or whatever else it depends on.
    #[error("{reason}")]
    Vmm {
        /// Its words.
        reason: String,
    },
}

/// Some of the runs that a request was about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Part {
    /// None.
    Nothing,
    /// These.
    Runs(Runs<'static>),
    /// All.
    Whole,
}

/// The hello as it travels.
#[derive(Serialize, Deserialize)]
struct Introduction {
    instance: String,
    stage: u16,
    rank: u16,
    pool: u16,
    geometry: GeometryDigest,
    session: SessionId,
}

/// The worker's hello as it travels.
#[derive(Serialize, Deserialize)]
enum Greeting {
    Welcome(Introduction),
    Refused(Refusal),
}

/// A request as it travels.
#[derive(Serialize, Deserialize)]
struct Envelope<'a> {
    session: SessionId,
    sequence: u64,
    command: Command<'a>,
}

impl GeometryDigest {
    /// `pages` pages of `page_bytes` in each extent, with one block every `block_stride_bytes`.
    ///
    /// # Panics
    /// If a size is zero; no geometry has that.
    #[must_use]
    pub const fn new(pages: u32, page_bytes: u64, block_stride_bytes: u64) -> Self {
        assert!(
            page_bytes > 0 && block_stride_bytes > 0,
            "pages and blocks have bytes"
        );
        let common = greatest_common_divisor(page_bytes, block_stride_bytes);
        Self {
            pages,
            page_bytes: page_bytes / common,
            block_bytes: block_stride_bytes / common,
        }
    }

    /// How many pages there are, as an index into them.
    pub(crate) const fn pages(&self) -> usize {
        PageId(self.pages).index()
    }
}

impl fmt::Display for GeometryDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages of {}", self.pages, self.page_bytes)?;
        match self.block_bytes {
            1 => write!(f, " blocks"),
            divisor => write!(f, "/{divisor} blocks"),
        }
    }
}

/// Appends the coordinator's hello as a frame.
pub fn push_hello(out: &mut Vec<u8>, hello: &Hello) {
    push_greeting(out, &Introduction::from(hello));
}

/// Appends the worker's hello as a frame: what it is.
pub fn push_welcome(out: &mut Vec<u8>, hello: &Hello) {
    push_greeting(out, &Greeting::Welcome(hello.into()));
}

/// Appends the worker's hello as a frame: why it does not serve this coordinator.
pub fn push_refusal(out: &mut Vec<u8>, refusal: &Refusal) {
    push_greeting(out, &Greeting::Refused(refusal.clone()));
}

/// Reads a coordinator's hello.
///
/// # Errors
/// [`WireError`] if it is none, or of another version.
pub fn read_hello(payload: &[u8]) -> Result<Hello, WireError> {
    let introduction: Introduction = read_body(read_header(payload)?, "hello")?;
    introduction.try_into()
}

/// Reads a worker's hello.
///
/// # Errors
/// [`WireError`] if it is none, or of another version.
pub fn read_greeting(payload: &[u8]) -> Result<Result<Hello, Refusal>, WireError> {
    match read_body(read_header(payload)?, "greeting")? {
        Greeting::Welcome(introduction) => introduction.try_into().map(Ok),
        Greeting::Refused(refusal) => Ok(Err(refusal)),
    }
}

/// Appends a request: one frame, or several if its batch does not fit into one.
pub fn push_request(out: &mut Vec<u8>, session: SessionId, sequence: u64, verb: Verb<'_>) {
    let mut push = |command: Command<'_>| {
        push_frame(out, |payload| {
            let envelope = Envelope {
                session,
                sequence,
                command,
            };
            write(payload, &envelope);
        });
    };
    match verb {
        Verb::Map(runs) => {
            for (runs, more) in parts(runs) {
                push(Command::Map { runs, more });
            }
        }
        Verb::Prepare(runs, after) => {
            let after = after.into();
            for (runs, more) in parts(runs) {
                push(Command::Prepare { runs, after, more });
            }
        }
        Verb::Resync(runs, after) => {
            let after = after.into();
            for (runs, more) in parts(runs) {
                push(Command::Resync { runs, after, more });
            }
        }
        Verb::Commit => push(Command::Commit),
        Verb::Undo => push(Command::Undo),
        Verb::Ready => push(Command::Ready),
        Verb::Headroom => push(Command::Headroom),
    }
}

/// The parts of a batch, each small enough for a frame; one empty part if there are no runs.
fn parts(runs: &[PageRun]) -> impl Iterator<Item = (Runs<'_>, bool)> {
    let count = runs.len().div_ceil(MAX_RUNS_PER_FRAME).max(1);
    (0..count).map(move |part| {
        let first = part * MAX_RUNS_PER_FRAME;
        let end = runs.len().min(first + MAX_RUNS_PER_FRAME);
        (Runs(runs[first..end].into()), part + 1 < count)
    })
}

/// Reads a request, or one part of it.
///
/// # Errors
/// [`WireError::Malformed`] if it is none.
pub fn read_request(payload: &[u8]) -> Result<Request, WireError> {
    let envelope: Envelope<'static> = read_body(payload, "request")?;
    let Envelope {
        session,
        sequence,
        command,
    } = envelope;
    Ok(Request {
        session,
        sequence,
        command,
    })
}

/// Appends what a worker says, as a frame.
pub fn push_message(out: &mut Vec<u8>, message: &WorkerMessage) {
    push_frame(out, |payload| write(payload, message));
}

/// Reads what a worker says.
///
/// # Errors
/// [`WireError::Malformed`] if it is nothing.
pub fn read_message(payload: &[u8]) -> Result<WorkerMessage, WireError> {
    read_body(payload, "reply")
}

impl Reply {
    /// What a rank says when it could not do what it was told.
    pub(crate) fn failed(error: MapError) -> Self {
        let failure = match error.cause {
            Cause::OutOfMemory { .. } => Failure::OutOfMemory,
            Cause::InFlight { epoch } => Failure::InFlight { epoch: epoch.0 },
            state @ Cause::State { .. } => Failure::State {
                reason: shortened(state.to_string()),
            },
            other => Failure::Vmm {
                reason: shortened(other.to_string()),
            },
        };
        Self::Failed {
            failure,
            doubt: Part::new(error.uncertain),
        }
    }

    pub(crate) fn readiness(answer: Result<Readiness, MapError>) -> Self {
        match answer {
            Ok(Readiness::Ready) => Self::Ready,
            Ok(Readiness::NotReady(missing)) => {
                // Who it is, is known where the answer arrives.
                let reasons: Vec<&str> = missing.iter().map(|m| m.reason.as_str()).collect();
                Self::NotReady {
                    reason: shortened(reasons.join("; ")),
                }
            }
            Err(error) => Self::failed(error),
        }
    }

    /// What a rank says that has `mapped` now.
    pub(crate) fn resynced(answer: Result<Resynced, MapError>, mapped: &[PageRun]) -> Self {
        match answer {
            Ok(Resynced { remade, in_doubt }) if in_doubt.len() <= MAX_RUNS_PER_FRAME / 2 => {
                let remade = match remade.len() {
                    0..=LONG_PART => Part::new(remade),
                    _ => Part::Whole,
                };
                Self::Resynced {
                    digest: RunsDigest::new(mapped.iter().copied()),
                    remade,
                    in_doubt: Runs(in_doubt.into()),
                }
            }
            Ok(Resynced { in_doubt, .. }) => Self::Failed {
                failure: Failure::Vmm {
                    reason: format!("{} runs are in doubt", in_doubt.len()),
                },
                doubt: Part::Whole,
            },
            Err(error) => Self::failed(error),
        }
    }
}

/// Runs of a part beside another in one frame.
const LONG_PART: usize = MAX_RUNS_PER_FRAME / 2;

impl Part {
    fn new(runs: Vec<PageRun>) -> Self {
        match runs.len() {
            0 => Self::Nothing,
            1..=MAX_RUNS_PER_FRAME => Self::Runs(Runs(runs.into())),
            _ => Self::Whole,
        }
    }

    /// The runs of `batch` that are meant; all of them if the rank named anything else.
    pub(crate) fn of(&self, batch: &[PageRun]) -> Vec<PageRun> {
        match self {
            Self::Nothing => Vec::new(),
            Self::Whole => batch.to_vec(),
            Self::Runs(named) => {
                let named: BTreeSet<PageRun> = named.0.iter().copied().collect();
                let known = batch.iter().copied().filter(|run| named.contains(run));
                let known: Vec<PageRun> = known.collect();
                if known.len() == named.len() {
                    known
                } else {
                    batch.to_vec()
                }
            }
        }
    }
}

impl RunsDigest {
    /// Of runs in ascending order.
    #[must_use]
    pub fn new(runs: impl IntoIterator<Item = PageRun>) -> Self {
        let mut hasher = FnvHasher::default();
        for run in runs {
            hasher.write_u32(run.first().0);
            hasher.write_u32(run.count());
        }
        Self(hasher.finish())
    }
}

impl From<After> for Waits {
    fn from(after: After) -> Self {
        Self {
            epoch: after.epoch.map(|epoch| epoch.0),
            device: after.device,
        }
    }
}

impl From<Waits> for After {
    fn from(waits: Waits) -> Self {
        Self {
            epoch: waits.epoch.map(Epoch),
            device: waits.device,
        }
    }
}

impl From<&Hello> for Introduction {
    fn from(hello: &Hello) -> Self {
        Self {
            instance: hello.instance.as_str().to_owned(),
            stage: hello.stage.0,
            rank: hello.rank.0,
            pool: hello.pool.0,
            geometry: hello.geometry,
            session: hello.session,
        }
    }
}

impl TryFrom<Introduction> for Hello {
    type Error = WireError;

    fn try_from(introduction: Introduction) -> Result<Self, WireError> {
        let malformed = WireError::Malformed {
            message: "instance name",
        };
        let instance: InstanceName = introduction
            .instance
            .parse()
            .map_err(|_| malformed.clone())?;
        if instance.as_str() != introduction.instance {
            return Err(malformed);
        }
        Ok(Self {
            instance,
            stage: Stage(introduction.stage),
            rank: Rank(introduction.rank),
            pool: PoolId(introduction.pool),
            geometry: introduction.geometry,
            session: introduction.session,
        })
    }
}

impl Serialize for Runs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|run| (run.first().0, run.count())))
    }
}

impl<'de> Deserialize<'de> for Runs<'_> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let pairs: Vec<(u32, u32)> = Deserialize::deserialize(deserializer)?;
        let run = |(first, count)| PageRun::new(PageId(first), count);
        let runs: Option<Vec<PageRun>> = pairs.into_iter().map(run).collect();
        let runs = runs.ok_or_else(|| serde::de::Error::custom("not a run of pages"))?;
        Ok(Self(runs.into()))
    }
}

fn push_greeting(out: &mut Vec<u8>, body: &impl Serialize) {
    push_frame(out, |payload| {
        payload.extend_from_slice(&MAGIC);
        payload.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        write(payload, body);
    });
}

fn read_header(payload: &[u8]) -> Result<&[u8], WireError> {
    let (magic, rest) = payload.split_first_chunk::<4>().ok_or(WireError::Magic)?;
    if *magic != MAGIC {
        return Err(WireError::Magic);
    }
    let malformed = WireError::Malformed { message: "version" };
    let (version, body) = rest.split_first_chunk::<2>().ok_or(malformed)?;
    match u16::from_le_bytes(*version) {
        PROTOCOL_VERSION => Ok(body),
        theirs => Err(WireError::Version { theirs }),
    }
}

fn read_body<'a, T: Deserialize<'a>>(
    body: &'a [u8],
    message: &'static str,
) -> Result<T, WireError> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        _ => Err(WireError::Malformed { message }),
    }
}

fn write(payload: &mut Vec<u8>, value: &impl Serialize) {
    postcard::to_io(value, payload).expect("a vector takes any bytes");
}

/// A reason that fits into a frame whatever a driver had to say.
pub(crate) fn shortened(mut reason: String) -> String {
    if reason.len() > MAX_REASON_BYTES {
        reason.truncate(reason.floor_char_boundary(MAX_REASON_BYTES));
    }
    reason
}

const fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use kvcached_mapper::NotReady;
    use proptest::prelude::*;

    use super::*;
    use crate::FrameDecoder;

    fn hello() -> Hello {
        Hello {
            instance: "llama".parse().unwrap(),
            stage: Stage(1),
            rank: Rank(3),
            pool: PoolId(2),
            geometry: GeometryDigest::new(100, 2 << 20, 64 << 10),
            session: SessionId(7),
        }
    }

    fn run(first: u32, count: u32) -> PageRun {
        PageRun::new(PageId(first), count).unwrap()
    }

    fn a_frame_full() -> u32 {
        u32::try_from(MAX_RUNS_PER_FRAME).unwrap()
    }

    fn payloads(bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut decoder = FrameDecoder::default();
        decoder.feed(bytes);
        let mut payloads = Vec::new();
        while let Some(payload) = decoder.next_frame().unwrap() {
            payloads.push(payload.to_vec());
        }
        assert!(!decoder.is_partial());
        payloads
    }

    fn only_payload(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes);
        let mut payloads = payloads(&bytes);
        assert_eq!(payloads.len(), 1);
        payloads.remove(0)
    }

    #[test]
    fn hellos_arrive_as_they_were_sent() {
        let sent = only_payload(|out| push_hello(out, &hello()));
        assert_eq!(read_hello(&sent), Ok(hello()));
        let welcome = only_payload(|out| push_welcome(out, &hello()));
        assert_eq!(read_greeting(&welcome), Ok(Ok(hello())));
        let refusal = Refusal::Pool {
            wanted: 3,
            worker: vec![0, 1],
        };
        let refused = only_payload(|out| push_refusal(out, &refusal));
        assert_eq!(read_greeting(&refused), Ok(Err(refusal)));
    }

    #[test]
    fn another_version_is_told_from_the_first_bytes_whatever_follows() {
        let mut sent = only_payload(|out| push_hello(out, &hello()));
        sent[4..6].copy_from_slice(&9u16.to_le_bytes());
        sent.truncate(6);
        sent.extend_from_slice(b"whatever version nine says");
        assert_eq!(read_hello(&sent), Err(WireError::Version { theirs: 9 }));
        assert_eq!(read_greeting(&sent), Err(WireError::Version { theirs: 9 }));
        assert_eq!(read_hello(b"GET / HTTP/1.1"), Err(WireError::Magic));
        assert_eq!(read_hello(b"KV"), Err(WireError::Magic));
        assert_eq!(
            read_hello(b"KVtp"),
            Err(WireError::Malformed { message: "version" })
        );
    }

    #[test]
    fn geometries_agree_when_a_page_number_means_the_same_blocks() {
        let whole = GeometryDigest::new(100, 2 << 20, 64 << 10);
        // A stage with half the layers: half the bytes, the same blocks.
        assert_eq!(whole, GeometryDigest::new(100, 1 << 20, 32 << 10));
        assert_ne!(whole, GeometryDigest::new(101, 2 << 20, 64 << 10));
        assert_ne!(whole, GeometryDigest::new(100, 2 << 20, 32 << 10));
        assert_eq!(whole.to_string(), "100 pages of 32 blocks");
        let uneven = GeometryDigest::new(6, 2 << 20, 3 << 19);
        assert_eq!(uneven.to_string(), "6 pages of 4/3 blocks");
    }

    #[test]
    fn a_run_that_is_none_is_malformed() {
        // Zero pages; and a run past the last page id.
        for (first, count) in [(0u32, 0u32), (u32::MAX, 1), (5, u32::MAX)] {
            let command = (SessionId(1), 1u64, 0u8, vec![(first, count)], false);
            let payload = only_payload(|out| push_frame(out, |payload| write(payload, &command)));
            let refused = Err(WireError::Malformed { message: "request" });
            assert_eq!(read_request(&payload), refused, "{first} {count}");
        }
        // The same shape with a good run passes, so the test above tests what it says.
        let good = (SessionId(1), 1u64, 0u8, vec![(5u32, 1u32)], false);
        let payload = only_payload(|out| push_frame(out, |payload| write(payload, &good)));
        assert!(read_request(&payload).is_ok());
    }

    #[test]
    fn a_batch_too_long_for_a_frame_is_cut_into_parts_of_one_transaction() {
        let runs: Vec<PageRun> = (0..=2 * a_frame_full())
            .map(|i| run(u32::MAX - 2 - i, 1))
            .collect();
        let mut bytes = Vec::new();
        push_request(&mut bytes, SessionId(u64::MAX), u64::MAX, Verb::Map(&runs));
        let mut gathered = Vec::new();
        let mut mores = Vec::new();
        for payload in payloads(&bytes) {
            let request = read_request(&payload).unwrap();
            assert_eq!(request.sequence, u64::MAX);
            let Command::Map { runs, more } = request.command else {
                panic!("{request:?}")
            };
            gathered.extend_from_slice(&runs.0);
            mores.push(more);
        }
        assert_eq!(gathered, runs);
        assert_eq!(mores, [true, true, false]);
    }

    #[test]
    fn answers_become_replies_that_keep_what_the_caller_acts_on() {
        let doubt = vec![run(1, 2)];
        let uncertain = MapError {
            cause: Cause::Vmm(kvcached_vmm::VmmError::NotMapped { offset: 4 }),
            uncertain: doubt.clone(),
        };
        let reason = "no mapping begins at offset 4".to_owned();
        assert_eq!(
            Reply::failed(uncertain),
            Reply::Failed {
                failure: Failure::Vmm { reason },
                doubt: Part::Runs(Runs(doubt.into()))
            }
        );
        let in_flight = Cause::InFlight { epoch: Epoch(7) };
        for (cause, failure) in [
            (Cause::OutOfMemory { at: None }, Failure::OutOfMemory),
            (in_flight, Failure::InFlight { epoch: 7 }),
        ] {
            let doubt = Part::Nothing;
            let reply = Reply::failed(MapError::clean(cause));
            assert_eq!(reply, Reply::Failed { failure, doubt });
        }

        let missing = NotReady {
            stage: Stage(9),
            rank: Rank(9),
            reason: "tensors are not there".to_owned(),
        };
        let reply = Reply::readiness(Ok(Readiness::NotReady(vec![missing])));
        assert_eq!(
            reply,
            Reply::NotReady {
                reason: "tensors are not there".to_owned()
            }
        );
    }

    #[test]
    fn only_runs_of_the_batch_are_ever_meant() {
        let batch = [run(0, 2), run(4, 1), run(9, 3)];
        let runs = |runs: &[PageRun]| Part::Runs(Runs(runs.to_vec().into()));
        assert_eq!(Part::Nothing.of(&batch), []);
        assert_eq!(runs(&[run(4, 1)]).of(&batch), [run(4, 1)]);
        assert_eq!(Part::Whole.of(&batch), batch);
        // Whoever names something else may mean anything.
        assert_eq!(runs(&[run(4, 1), run(5, 1)]).of(&batch), batch);
    }

    #[test]
    fn a_digest_tells_sets_of_runs_apart() {
        let digest = |runs: &[PageRun]| RunsDigest::new(runs.iter().copied());
        let sets = [
            &[][..],
            &[run(0, 1)],
            &[run(0, 2)],
            &[run(1, 1)],
            &[run(0, 1), run(1, 1)],
        ];
        for (index, set) in sets.iter().enumerate() {
            for (other, other_set) in sets.iter().enumerate() {
                assert_eq!(digest(set) == digest(other_set), index == other);
            }
        }
        // The two sides may be built by different compilers, so the numbers are fixed: FNV-1a,
        // whose offset basis is published.
        assert_eq!(digest(&[]), RunsDigest(0xcbf2_9ce4_8422_2325));
        let bytes = [0, 0, 0, 0, 1, 0, 0, 0];
        let fnv = |hash: u64, byte: &u64| (hash ^ byte).wrapping_mul(0x0100_0000_01b3);
        let expected = bytes.iter().fold(0xcbf2_9ce4_8422_2325, fnv);
        assert_eq!(digest(&[run(0, 1)]), RunsDigest(expected));
    }

    #[test]
    fn a_reply_fits_a_frame_whatever_went_wrong() {
        let runs: Vec<PageRun> = (0..=a_frame_full()).map(|i| run(i, 1)).collect();
        let error = |uncertain: &[PageRun]| MapError {
            cause: Cause::Vmm(kvcached_vmm::VmmError::Unavailable {
                reason: "ü".repeat(4000),
            }),
            uncertain: uncertain.to_vec(),
        };
        let fits = |reply: Reply| {
            let message = WorkerMessage::Reply {
                sequence: u64::MAX,
                reply,
            };
            let payload = only_payload(|out| push_message(out, &message));
            assert_eq!(read_message(&payload), Ok(message));
        };
        for (uncertain, whole) in [(&runs[..], true), (&runs[1..], false)] {
            let reply = Reply::failed(error(uncertain));
            let Reply::Failed { doubt, .. } = &reply else {
                panic!("{reply:?}")
            };
            assert_eq!(*doubt == Part::Whole, whole);
            fits(reply);
        }
        let half = &runs[..LONG_PART];
        for (remade, in_doubt) in [(half, half), (&runs, half), (half, &runs)] {
            let resynced = Resynced {
                remade: remade.to_vec(),
                in_doubt: in_doubt.to_vec(),
            };
            fits(Reply::resynced(Ok(resynced), &runs));
        }
    }

    proptest! {
        #[test]
        fn requests_arrive_as_they_were_sent(
            pairs in prop::collection::vec((0u32..1000, 1u32..64), 1..20),
            unmap: bool,
            epoch: Option<u64>,
            device: bool,
            session: u64,
            sequence: u64,
        ) {
            let runs: Vec<PageRun> = pairs.into_iter().map(|(f, c)| run(f, c)).collect();
            let after = After { epoch: epoch.map(Epoch), device };
            let verb = if unmap { Verb::Prepare(&runs, after) } else { Verb::Map(&runs) };
            let payload =
                only_payload(|out| push_request(out, SessionId(session), sequence, verb));
            let runs = Runs(runs.clone().into());
            let command = if unmap {
                Command::Prepare { runs, after: after.into(), more: false }
            } else {
                Command::Map { runs, more: false }
            };
            let request = Request { session: SessionId(session), sequence, command };
            prop_assert_eq!(read_request(&payload), Ok(request));
        }

        #[test]
        fn garbage_is_an_error_and_never_a_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            cut in 0usize..100,
        ) {
            let _ = (read_hello(&bytes), read_greeting(&bytes), read_request(&bytes));
            let _ = read_message(&bytes);
            let mut hello_bytes = only_payload(|out| push_hello(out, &hello()));
            // Cut short or with something behind it, a good hello is none.
            if cut > 0 && cut < hello_bytes.len() {
                prop_assert!(read_hello(&hello_bytes[..cut]).is_err());
            }
            hello_bytes.push(0);
            prop_assert!(read_hello(&hello_bytes).is_err());
        }
    }
}
