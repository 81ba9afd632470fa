//! What travels between the process that decides about pages and a rank, and its bytes.
//!
//! ```text
//! coordinator                                   worker (one rank, several pools)
//!   hello    magic version {instance, stage, rank, pool, geometry, session} ──▶
//!   ◀── welcome  magic version {the same, as the worker knows it}   or  refused {both sides}
//!   request  {session, sequence, resync all its runs}  ──▶          first on every connection
//!   ◀── reply    {sequence, resynced {digest, remade, in doubt} | failed}
//!   request  {session, sequence, map runs | prepare runs | commit | undo | ready | …}  ──▶
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

mod convert;

use std::borrow::Cow;
use std::fmt;

use kvcached_mapper::{After, PageId, PageRun, PoolId, Rank, Stage};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

use crate::InstanceName;
use crate::frame::{MAX_FRAME_BYTES, push_frame};

/// Version of everything after magic and version themselves.
pub const PROTOCOL_VERSION: u16 = 3;

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
    /// Let go of memory that is behind no page.
    Trim,
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
    /// [`Command::Trim`].
    Trim,
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
    /// The runs are mapped; or what was to go, and is behind no page, is gone.
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
        Verb::Trim => push(Command::Trim),
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
mod tests;
