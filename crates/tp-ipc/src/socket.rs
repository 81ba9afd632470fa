//! Unix stream sockets that carry frames, never block longer than asked, and talk to nobody but
//! this user. The only place of the crate that opens one, and the clock behind every bound.

use std::fs::{self, File, Permissions, TryLockError};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::kill;
use nix::sys::socket::{
    AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr, connect, getsockopt, listen,
    send, socket, sockopt,
};
use nix::unistd::{Pid, geteuid};
use thiserror::Error;

use crate::{Endpoint, FrameDecoder, FrameError, MAX_FRAME_BYTES, push_frame};

/// Longest wait that can be asked for: for ever, in the life of a process.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// How long `bind` waits for another process that binds in the same directory.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// First and longest pause between attempts to reach what is not there yet.
const PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// Connections that may wait to be accepted; further ones are told at once that they must come
/// again.
const BACKLOG: i32 = 128;

/// Most bytes taken from a socket at once.
const CHUNK_BYTES: usize = 16 << 10;

/// A moment on the monotonic clock until which something may be waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

/// A connection that carries frames both ways.
#[derive(Debug)]
pub struct FramedStream {
    stream: UnixStream,
    decoder: FrameDecoder,
    /// What the socket did not take yet, from `sent` on.
    unsent: Vec<u8>,
    sent: usize,
    chunk: Vec<u8>,
}

/// A socket that listens at an endpoint, and takes it away when it is dropped.
#[derive(Debug)]
pub struct FramedListener {
    listener: UnixListener,
    endpoint: Endpoint,
    /// Device and inode of the socket, to remove no other one.
    identity: (u64, u64),
}

/// Pauses between attempts, each twice as long as the one before.
#[derive(Debug)]
pub(crate) struct Backoff(Duration);

/// What a look at a socket brought.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    Bytes,
    Nothing,
    Ended,
}

/// Why nothing was sent or received.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StreamError {
    /// Not by the deadline.
    #[error("not within the time given")]
    TimedOut,
    /// Nobody is there by the deadline.
    #[error("cannot reach {endpoint}: {source}")]
    Unreachable {
        /// Where somebody should listen.
        endpoint: Endpoint,
        /// What the last attempt ended with.
        source: io::Error,
    },
    /// The other side is gone.
    #[error("the connection ended")]
    Ended,
    /// What arrived, or should be sent, is no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The system's answer.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Why nobody listens at an endpoint now.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// Another process does already.
    #[error("{endpoint} is already served by another process")]
    AlreadyServed {
        /// Where.
        endpoint: Endpoint,
    },
    /// There is a file that is no socket; it is left alone.
    #[error("{endpoint} is there and is no socket")]
    NotASocket {
        /// Where.
        endpoint: Endpoint,
    },
    /// Other processes keep the directory locked.
    #[error("the directory of {endpoint} is locked by another process")]
    Locked {
        /// Where.
        endpoint: Endpoint,
    },
    /// The system's answer.
    #[error("cannot listen at {endpoint}: {source}")]
    Io {
        /// Where.
        endpoint: Endpoint,
        /// The answer.
        source: io::Error,
    },
}

impl Deadline {
    /// `wait` from now on.
    #[must_use]
    pub fn after(wait: Duration) -> Self {
        Self(now() + wait.min(LONGEST_WAIT))
    }

    /// How long it is until then; zero once it is past.
    #[must_use]
    pub fn remaining(self) -> Duration {
        self.0.saturating_duration_since(now())
    }

    pub(crate) const fn instant(self) -> Instant {
        self.0
    }

    /// Is it past?
    #[must_use]
    pub fn is_over(self) -> bool {
        self.remaining().is_zero()
    }
}

impl FramedStream {
    /// Has the process ended that made the other end, though somebody may hold it open? A process
    /// that cannot be seen from here counts as alive.
    pub(crate) fn peer_is_dead(&self) -> bool {
        let peer = getsockopt(&self.stream, sockopt::PeerCredentials).map(|it| it.pid());
        peer.is_ok_and(|pid| pid > 0 && kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH))
    }

    /// Connects, waiting until the deadline for somebody to listen there.
    ///
    /// # Errors
    /// [`StreamError::Unreachable`] with the last reason.
    pub fn connect(endpoint: &Endpoint, deadline: Deadline) -> Result<Self, StreamError> {
        let mut backoff = Backoff::default();
        loop {
            let source = match Self::try_connect(endpoint) {
                Ok(stream) => return Ok(stream),
                Err(error) => error,
            };
            // Not there yet, not listening yet, or too many in front of us.
            let may_come = matches!(
                source.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::WouldBlock
            );
            if !may_come || !backoff.pause(deadline)? {
                return Err(StreamError::Unreachable {
                    endpoint: endpoint.clone(),
                    source,
                });
            }
        }
    }

    /// Connects now or not at all.
    ///
    /// # Errors
    /// The system's answer; [`ErrorKind::PermissionDenied`] if another user listens there.
    pub fn try_connect(endpoint: &Endpoint) -> io::Result<Self> {
        // Not through std: its connect waits without a bound when the listener's queue is full.
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        connect(fd.as_raw_fd(), &UnixAddr::new(endpoint.path())?)?;
        let stream = UnixStream::from(fd);
        match stranger(&stream)? {
            None => Self::new(stream),
            Some(uid) => {
                let reason = format!("{endpoint} is served by uid {uid}");
                Err(io::Error::new(ErrorKind::PermissionDenied, reason))
            }
        }
    }

    /// Carries frames over a connection that is there already, one half of a pair for example.
    ///
    /// # Errors
    /// The system's answer.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            decoder: FrameDecoder::default(),
            unsent: Vec::new(),
            sent: 0,
            chunk: vec![0; CHUNK_BYTES],
        })
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// [`StreamError`]. After [`TimedOut`](StreamError::TimedOut) the rest of the frame precedes
    /// the next one, so that the stream stays whole.
    pub fn send(&mut self, payload: &[u8], deadline: Deadline) -> Result<(), StreamError> {
        match payload.len() {
            0 => return Err(FrameError::Empty.into()),
            len if len > MAX_FRAME_BYTES => return Err(FrameError::TooLong { len }.into()),
            _ => {}
        }
        let mut frame = Vec::with_capacity(payload.len() + 4);
        push_frame(&mut frame, |out| out.extend_from_slice(payload));
        self.transmit(&frame)?;
        while self.wants_to_send() {
            self.await_event(PollFlags::POLLOUT, deadline)?;
            self.flush()?;
        }
        Ok(())
    }

    /// Receives one frame.
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn recv(&mut self, deadline: Deadline) -> Result<Vec<u8>, StreamError> {
        loop {
            if let Some(payload) = self.decoder.next_frame()? {
                return Ok(payload.to_vec());
            }
            match self.receive()? {
                Received::Bytes => {}
                Received::Ended => return Err(StreamError::Ended),
                Received::Nothing => self.await_event(PollFlags::POLLIN, deadline)?,
            }
        }
    }

    /// Gives `frames` to the socket, and keeps what it does not take now.
    pub(crate) fn transmit(&mut self, frames: &[u8]) -> io::Result<()> {
        if self.wants_to_send() {
            self.unsent.extend_from_slice(frames);
            return Ok(());
        }
        let taken = self.push(frames)?;
        self.unsent.extend_from_slice(&frames[taken..]);
        Ok(())
    }

    /// Gives the socket more of what it did not take.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.sent += self.push(&self.unsent[self.sent..])?;
        if self.sent == self.unsent.len() {
            self.unsent.clear();
            self.sent = 0;
        }
        Ok(())
    }

    /// Is there something left that the socket did not take?
    pub(crate) fn wants_to_send(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Takes what the socket has, at most one chunk.
    pub(crate) fn receive(&mut self) -> io::Result<Received> {
        match (&self.stream).read(&mut self.chunk) {
            Ok(0) => Ok(Received::Ended),
            Ok(len) => {
                self.decoder.feed(&self.chunk[..len]);
                Ok(Received::Bytes)
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                Ok(Received::Nothing)
            }
            Err(e) => Err(e),
        }
    }

    /// The next whole frame among what was received.
    pub(crate) fn next_frame(&mut self) -> Result<Option<&[u8]>, FrameError> {
        self.decoder.next_frame()
    }

    /// Has a frame begun to arrive that is not whole yet?
    pub(crate) fn is_partial(&self) -> bool {
        self.decoder.is_partial()
    }

    fn push(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut taken = 0;
        while taken < bytes.len() {
            // A peer that is gone is an error here, not a signal to the process.
            match send(
                self.stream.as_raw_fd(),
                &bytes[taken..],
                MsgFlags::MSG_NOSIGNAL,
            ) {
                Ok(len) => taken += len,
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(taken)
    }

    fn await_event(&self, event: PollFlags, deadline: Deadline) -> Result<(), StreamError> {
        if deadline.is_over() {
            return Err(StreamError::TimedOut);
        }
        wait(&mut [PollFd::new(self.as_fd(), event)], Some(deadline.0))?;
        Ok(())
    }
}

impl AsFd for FramedStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl FramedListener {
    /// Listens at `endpoint`. A socket that a dead process left there is replaced.
    ///
    /// # Errors
    /// [`BindError`]; a live process keeps its endpoint.
    pub fn bind(endpoint: &Endpoint) -> Result<Self, BindError> {
        let failed = |source| BindError::Io {
            endpoint: endpoint.clone(),
            source,
        };
        let deadline = Deadline::after(LOCK_WAIT);
        // Two processes that both find a dead socket must not remove each other's new one.
        let Some(_lock) = lock_directory(endpoint, deadline).map_err(failed)? else {
            return Err(BindError::Locked {
                endpoint: endpoint.clone(),
            });
        };
        match fs::symlink_metadata(endpoint.path()) {
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(failed(e)),
            Ok(found) if !found.file_type().is_socket() => {
                return Err(BindError::NotASocket {
                    endpoint: endpoint.clone(),
                });
            }
            Ok(_) => match FramedStream::try_connect(endpoint) {
                Ok(stream) if stream.peer_is_dead() => {
                    // A child that it forked still holds the descriptor, and will never accept.
                    fs::remove_file(endpoint.path()).map_err(failed)?;
                    tracing::info!(%endpoint, "replaced the socket of a dead process");
                }
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
                    fs::remove_file(endpoint.path()).map_err(failed)?;
                    tracing::info!(%endpoint, "replaced the socket of a dead process");
                }
                // Also with too long a queue, or of another kind or user: somebody is there.
                _ => {
                    return Err(BindError::AlreadyServed {
                        endpoint: endpoint.clone(),
                    });
                }
            },
        }
        let listener = UnixListener::bind(endpoint.path()).map_err(failed)?;
        let backlog = Backlog::new(BACKLOG).expect("the queue is not longer than the system's");
        listen(&listener, backlog).map_err(|e| failed(e.into()))?;
        listener.set_nonblocking(true).map_err(failed)?;
        fs::set_permissions(endpoint.path(), Permissions::from_mode(0o600)).map_err(failed)?;
        let identity = identity(endpoint).map_err(failed)?;
        Ok(Self {
            listener,
            endpoint: endpoint.clone(),
            identity,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Waits for a connection. Those of other users are refused, and logged.
    ///
    /// # Errors
    /// [`StreamError`].
    pub fn accept(&self, deadline: Deadline) -> Result<FramedStream, StreamError> {
        loop {
            if let Some(stream) = self.try_accept()? {
                return Ok(stream);
            }
            if deadline.is_over() {
                return Err(StreamError::TimedOut);
            }
            wait(
                &mut [PollFd::new(self.as_fd(), PollFlags::POLLIN)],
                Some(deadline.0),
            )?;
        }
    }

    /// The next connection of this user, if there is one.
    pub(crate) fn try_accept(&self) -> io::Result<Option<FramedStream>> {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                // It went away while it waited.
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                    ) =>
                {
                    continue;
                }
                Err(e) => return Err(e),
            };
            match stranger(&stream)? {
                None => return FramedStream::new(stream).map(Some),
                Some(uid) => {
                    tracing::warn!(uid, endpoint = %self.endpoint, "refused another user's process");
                }
            }
        }
    }
}

impl AsFd for FramedListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for FramedListener {
    fn drop(&mut self) {
        // While the listener is open its inode cannot be given to another socket.
        let removed = lock_directory(&self.endpoint, Deadline::after(LOCK_WAIT)).and_then(|lock| {
            if lock.is_some() && identity(&self.endpoint)? == self.identity {
                fs::remove_file(self.endpoint.path())?;
            }
            Ok(())
        });
        match removed {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                tracing::warn!(endpoint = %self.endpoint, error = %e, "cannot remove the socket");
            }
            _ => {}
        }
    }
}

impl Backoff {
    /// Pauses, and says whether there is time for another attempt.
    pub(crate) fn pause(&mut self, deadline: Deadline) -> io::Result<bool> {
        let remaining = deadline.remaining();
        if remaining.is_zero() {
            return Ok(false);
        }
        wait(&mut [], Some(now() + self.0.min(remaining)))?;
        self.0 = (self.0 * 2).min(LONGEST_PAUSE);
        Ok(!deadline.is_over())
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self(PAUSE)
    }
}

/// The clock of this crate's sockets.
#[expect(
    clippy::disallowed_methods,
    reason = "waits for other processes are bounded here"
)]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Waits for something to happen to `fds`, at most `until` then; returns early when interrupted.
pub(crate) fn wait(fds: &mut [PollFd<'_>], until: Option<Instant>) -> io::Result<()> {
    let timeout = match until {
        None => PollTimeout::NONE,
        Some(until) => {
            // Rounded up: a wait that ends too early would be asked for again and again.
            let micros = until.saturating_duration_since(now()).as_micros();
            PollTimeout::try_from(micros.div_ceil(1000)).unwrap_or(PollTimeout::MAX)
        }
    };
    wait_for(fds, timeout)
}

/// Looks what has happened to `fds`, without waiting.
pub(crate) fn look(fds: &mut [PollFd<'_>]) -> io::Result<()> {
    wait_for(fds, PollTimeout::ZERO)
}

fn wait_for(fds: &mut [PollFd<'_>], timeout: PollTimeout) -> io::Result<()> {
    match poll(fds, timeout) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// The user at the other end, if it is not this one.
fn stranger(stream: &UnixStream) -> io::Result<Option<u32>> {
    let uid = getsockopt(stream, sockopt::PeerCredentials)?.uid();
    Ok((uid != geteuid().as_raw()).then_some(uid))
}

fn identity(endpoint: &Endpoint) -> io::Result<(u64, u64)> {
    let found = fs::symlink_metadata(endpoint.path())?;
    Ok((found.dev(), found.ino()))
}

/// Locks the directory of an endpoint; `None` if that cannot be had by the deadline. The lock goes
/// with the handle, so also with its process, and leaves no file behind.
fn lock_directory(endpoint: &Endpoint, deadline: Deadline) -> io::Result<Option<File>> {
    let parent = endpoint
        .path()
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let directory = File::open(parent.unwrap_or_else(|| Path::new(".")))?;
    let mut backoff = Backoff::default();
    loop {
        match directory.try_lock() {
            Ok(()) => return Ok(Some(directory)),
            Err(TryLockError::Error(e)) if e.kind() != ErrorKind::Interrupted => return Err(e),
            Err(_) => {}
        }
        if !backoff.pause(deadline)? {
            return Ok(None);
        }
    }
}
