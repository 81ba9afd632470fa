//! A worker's conversation: whoever talks to it, it answers in whole frames, its memory stays that
//! of one pool, and what it refuses changed nothing.

use std::sync::Arc;
use std::time::Instant;

use kvcached_mapper::{
    After, Cold, Epoch, KvBuffers, Layout, LocalMapper, PageId, PageRun, PageSize, PoolId,
    PoolSpec, Rank, Stage,
};
use kvcached_tp_ipc::wire::{self, Command, Reply, Verb, WorkerMessage, push_hello, push_request};
use kvcached_tp_ipc::{
    Conversation, ConversationEnd, FrameDecoder, FrameError, GeometryDigest, Hello, ServedPool,
    ServedRank, SessionId,
};
use kvcached_vmm::{Mock, MockConfig};

use super::wire::payloads;

const PAGES: u32 = 16;
const PAGE_BYTES: u64 = 2 << 20;
const BLOCK_BYTES: u64 = 64 << 10;
/// The device is full before the pool is.
const MEMORY_BYTES: u64 = 12 * PAGE_BYTES;

/// A coordinator's bytes after the beginning of a good conversation.
///
/// The first byte says how many payloads of [`good`] come before the rest; the second how long the
/// pieces are in which the rest arrives.
pub fn conversation(input: &[u8]) {
    let Some(([before, piece], rest)) = input.split_first_chunk::<2>() else {
        return;
    };
    let mut worker = Worker::new();
    for payload in good().iter().take(usize::from(*before)) {
        let served = worker.hear(Ok(payload));
        assert!(served, "a good coordinator is served");
    }
    let mut decoder = FrameDecoder::default();
    let mut served = true;
    for piece in rest.chunks(1 + usize::from(*piece)) {
        decoder.feed(piece);
        while served && let Some(frame) = decoder.next_frame().transpose() {
            served = worker.hear(frame);
        }
    }
    worker.end();
}

/// What a coordinator says that breaks no rule, frame by frame: a batch that is done, one that
/// does not fit, one of pages that are not mapped.
pub(super) fn good() -> Vec<Vec<u8>> {
    let run = |first, count| PageRun::new(PageId(first), count).expect("a run");
    let (head, tail) = (run(0, 4), run(8, 2));
    let requests = [
        (1, Verb::Resync(&[run(7, 1)], After::DEVICE)),
        (2, Verb::Ready),
        (3, Verb::Headroom),
        (4, Verb::Map(&[head, tail])),
        (5, Verb::Map(&[run(4, 1)])),
        (6, Verb::Prepare(&[head], After::DEVICE)),
        (6, Verb::Commit),
        (7, Verb::Map(&[run(0, 4), run(10, 6)])),
        (8, Verb::Prepare(&[run(5, 1)], After::NOTHING)),
        (9, Verb::Prepare(&[tail, run(4, 1)], After::epoch(Epoch(3)))),
        (10, Verb::Prepare(&[tail, run(4, 1)], After::NOTHING)),
        (10, Verb::Undo),
        (11, Verb::Map(&[run(0, 1)])),
        (11, Verb::Map(&[run(0, 1)])),
        (11, Verb::Undo),
        (12, Verb::Resync(&[tail, run(12, 1)], After::DEVICE)),
        (13, Verb::Trim),
    ];
    payloads(|out| {
        push_hello(out, &hello(SESSION));
        for (sequence, verb) in requests {
            push_request(out, SESSION, sequence, verb);
        }
    })
}

const SESSION: SessionId = SessionId(5);

fn hello(session: SessionId) -> Hello {
    Hello {
        instance: "llama".parse().expect("a name"),
        stage: Stage(0),
        rank: Rank(1),
        pool: PoolId(0),
        geometry: GeometryDigest::new(PAGES, PAGE_BYTES, BLOCK_BYTES),
        session,
    }
}

#[expect(clippy::disallowed_methods, reason = "any moment will do")]
fn now() -> Instant {
    Instant::now()
}

/// A rank with one pool, on a device that only counts.
#[derive(Debug)]
struct Worker {
    device: Arc<Mock>,
    mapper: Arc<LocalMapper<Mock>>,
    rank: ServedRank,
    conversation: Conversation,
    /// Of the coordinator that was welcomed.
    session: Option<SessionId>,
}

impl Worker {
    fn new() -> Self {
        let device = Arc::new(Mock::new(MockConfig::new(MEMORY_BYTES)));
        let spec = PoolSpec {
            layout: Layout::Contiguous,
            layers: 1,
            kv_buffers: KvBuffers::One,
            block_bytes: BLOCK_BYTES,
            page_size: PageSize::Auto,
            capacity_bytes: u64::from(PAGES) * PAGE_BYTES,
        };
        let geometry = spec.resolve(PAGE_BYTES).expect("a geometry");
        assert_eq!(geometry.pages(), PAGES);
        let mapper = LocalMapper::new(device.clone(), geometry, Cold::Unbacked);
        let mapper = Arc::new(mapper.expect("addresses are plenty"));
        let Hello {
            instance,
            stage,
            rank,
            pool,
            geometry,
            ..
        } = hello(SESSION);
        let served = ServedPool {
            pool,
            geometry,
            mapper: mapper.clone(),
        };
        Self {
            device,
            mapper,
            rank: ServedRank::new(instance, stage, rank, [served]),
            conversation: Conversation::default(),
            session: None,
        }
    }

    /// Is the coordinator still served after this?
    fn hear(&mut self, frame: Result<&[u8], FrameError>) -> bool {
        let before = self.mapper.mapped();
        let mut out = Vec::new();
        let result = match frame {
            Ok(payload) => self
                .conversation
                .handle_frame(&mut self.rank, payload, &mut out),
            Err(error) => Err(self.conversation.handle_broken_frame(error, &mut out)),
        };
        let answers = payloads(|whole| whole.append(&mut out));
        let changed = self.mapper.mapped() != before;
        match self.session {
            None => {
                assert!(!changed, "nothing is done for a stranger");
                self.session = greeted(frame.unwrap_or_default(), &answers, &result);
            }
            Some(session) => {
                let request = frame.ok().and_then(|frame| wire::read_request(frame).ok());
                let request = request.filter(|request| request.session == session);
                let reply = answered(&answers, &result);
                assert!(
                    request.is_some() || result.is_err(),
                    "not a request of its session"
                );
                match (reply, request.map(|request| request.command)) {
                    (Some(Reply::Done), Some(Command::Trim)) => {
                        assert!(!changed, "a trim changes no page");
                    }
                    (Some(Reply::Done | Reply::Prepared), Some(command)) => {
                        self.check_done(&command);
                    }
                    (Some(Reply::Undone | Reply::Resynced { .. }), _) => {}
                    // It does what it can, and the next one does the rest.
                    (Some(Reply::Failed { .. }), Some(Command::Resync { .. })) => {}
                    (reply, _) => assert!(!changed, "{reply:?}, and something changed"),
                }
            }
        }
        self.check_memory();
        result.is_ok()
    }

    /// What was asked for last is so.
    fn check_done(&self, command: &Command<'_>) {
        let mapped = self.mapper.mapped();
        match command {
            Command::Map { runs, .. } => assert!(runs.0.iter().all(|run| mapped.contains(run))),
            Command::Prepare { runs, .. } => {
                assert!(!runs.0.iter().any(|run| mapped.contains(run)));
            }
            other => panic!("{other:?} is not done but answered"),
        }
    }

    /// Its memory is that of the mapped runs, which are runs of the pool.
    fn check_memory(&self) {
        let mapped = self.mapper.mapped();
        assert!(mapped.is_sorted_by(|one, next| one.end() <= next.first()));
        assert!(mapped.iter().all(|run| run.end().0 <= PAGES), "{mapped:?}");
        assert_eq!(self.mapper.in_doubt(), []);
        // What is prepared has memory, too.
        assert!(self.device.used_bytes() >= self.mapper.mapped_bytes());
        assert_eq!(self.device.violations(), []);
    }

    /// The connection is gone: the next coordinator is served, and nothing is left in the end.
    fn end(mut self) {
        std::mem::take(&mut self.conversation).end(&mut self.rank, now());
        self.session = None;
        let session = SessionId(u64::MAX);
        for payload in payloads(|out| {
            push_hello(out, &hello(session));
            push_request(out, session, u64::MAX, Verb::Resync(&[], After::DEVICE));
        }) {
            assert!(self.hear(Ok(&payload)), "the next coordinator is served");
        }
        let left = self.device.used_bytes();
        assert_eq!(left, 0, "the next coordinator starts from nothing");
        let device = self.device.clone();
        drop(self);
        assert_eq!(device.live_chunks(), 0, "memory is left");
    }
}

/// The session that was welcomed, if one was, as it was told.
fn greeted(
    hello: &[u8],
    answers: &[Vec<u8>],
    result: &Result<(), ConversationEnd>,
) -> Option<SessionId> {
    let [greeting] = answers else {
        panic!("a greeting is one frame, not {}", answers.len());
    };
    match wire::read_greeting(greeting).expect("a greeting") {
        Ok(welcome) => {
            assert_eq!(*result, Ok(()));
            assert_eq!(wire::read_hello(hello), Ok(welcome.clone()));
            Some(welcome.session)
        }
        Err(refusal) => {
            assert_eq!(*result, Err(ConversationEnd::Refused(refusal)));
            None
        }
    }
}

/// The reply to a request, if there is one yet: to a part of a batch there is none.
fn answered(answers: &[Vec<u8>], result: &Result<(), ConversationEnd>) -> Option<Reply> {
    assert!(answers.len() <= 1, "one request, one answer");
    let message = answers.first().map(|message| wire::read_message(message));
    let message = message.transpose().expect("a message");
    match (result, message) {
        (Ok(()), Some(WorkerMessage::Reply { reply, .. })) => Some(reply),
        (Ok(()), None) => None,
        (
            Err(ConversationEnd::Violation { reason }),
            Some(WorkerMessage::Violation { reason: told }),
        ) => {
            assert_eq!(*reason, told);
            None
        }
        (result, message) => panic!("{result:?} answered with {message:?}"),
    }
}
