//! [`Server`]: one rank that listens and does what its coordinator tells it. One thread, one
//! `poll` loop; the conversation itself is [`Conversation`]'s.

use std::io;
use std::mem;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcached_mapper::{Epochs, Rank, Stage};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::socket::{self, LONGEST_WAIT, Received};
use crate::{
    BindError, Conversation, ConversationEnd, Deadline, Endpoint, FramedListener, FramedStream,
    InstanceName, Refusal, ServedPool, ServedRank,
};

/// Connections served at once; further ones wait to be accepted.
const MAX_CONNECTIONS: usize = 128;

/// How long a server that has run out of descriptors accepts nobody.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a [`Server`] needs to know.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The engine.
    pub instance: InstanceName,
    /// Stage of the rank.
    pub stage: Stage,
    /// The rank.
    pub rank: Rank,
    /// Its pools.
    pub pools: Vec<ServedPool>,
    /// How long a client may take to finish what it began: a hello, a frame, a batch in parts, the
    /// reading of a reply. Between requests it may be silent for ever.
    pub timeout: Duration,
    /// How long what is mapped outlives the connection of the coordinator that had it mapped.
    pub orphan_timeout: Duration,
    /// What the mappers of the pools wait for, if the rank counts epochs.
    pub epochs: Option<Arc<Epochs>>,
}

/// A rank that listens at an endpoint. Dropped, it takes its socket away.
///
/// When a coordinator disconnects, what it has mapped stays mapped, for it to come back or for the
/// next one to decide about; once nobody has come for the orphan time-out, it is released.
#[derive(Debug)]
pub struct Server {
    listener: FramedListener,
    rank: ServedRank,
    connections: Vec<Connection>,
    stop: Arc<EventFd>,
    timeout: Duration,
    /// Until when nobody is accepted, after accepting has failed.
    paused: Option<Instant>,
    /// Has a coordinator been told that this rank could not begin?
    told: bool,
    /// When memory that is kept to be used again has been kept for too long.
    tend_at: Option<Instant>,
    /// When what a coordinator left has been waiting for it for too long, as of the last wait.
    orphaned_at: Option<Instant>,
}

/// Ends a [`Server`] from any thread.
#[derive(Debug, Clone)]
pub struct StopHandle(Arc<EventFd>);

#[derive(Debug)]
struct Connection {
    stream: FramedStream,
    conversation: Conversation,
    replies: Vec<u8>,
    /// The conversation is over; the connection ends once the last words are sent.
    over: bool,
    /// The last words were that the rank could not begin.
    told: bool,
    /// The last words were that another coordinator is connected.
    taken: bool,
    /// By when the client must have finished what it began.
    deadline: Option<Instant>,
}

impl Server {
    /// Listens at `endpoint`.
    ///
    /// # Errors
    /// [`BindError`]; a socket left by a dead process is replaced, that of a live one is not.
    pub fn bind(endpoint: &Endpoint, config: ServerConfig) -> Result<Self, BindError> {
        let ServerConfig {
            instance,
            stage,
            rank,
            pools,
            timeout,
            orphan_timeout,
            epochs,
        } = config;
        let rank =
            ServedRank::new(instance, stage, rank, pools).with_orphan_timeout(orphan_timeout);
        let rank = match epochs {
            Some(epochs) => rank.with_epochs(epochs),
            None => rank,
        };
        Self::serve(endpoint, rank, timeout)
    }

    /// Listens at `endpoint` for a rank that could not begin: whoever connects is told why. The
    /// other arguments are as in [`ServerConfig`].
    ///
    /// # Errors
    /// As for [`bind`](Self::bind).
    pub fn bind_unable(
        endpoint: &Endpoint,
        instance: InstanceName,
        (stage, rank): (Stage, Rank),
        reason: String,
        timeout: Duration,
    ) -> Result<Self, BindError> {
        let rank = ServedRank::unable(instance, stage, rank, reason);
        Self::serve(endpoint, rank, timeout)
    }

    fn serve(endpoint: &Endpoint, rank: ServedRank, timeout: Duration) -> Result<Self, BindError> {
        let stop =
            EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).map_err(|e| {
                BindError::Io {
                    endpoint: endpoint.clone(),
                    source: e.into(),
                }
            })?;
        Ok(Self {
            listener: FramedListener::bind(endpoint)?,
            rank,
            connections: Vec::new(),
            stop: Arc::new(stop),
            timeout: timeout.min(LONGEST_WAIT),
            paused: None,
            told: false,
            tend_at: None,
            orphaned_at: None,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        self.listener.endpoint()
    }

    /// A handle that ends [`run`](Self::run), before or while it runs.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle(Arc::clone(&self.stop))
    }

    /// Serves until it is stopped. A request that is being done is finished first.
    ///
    /// # Errors
    /// Only if the system's `poll` fails; no client can end it.
    pub fn run(&mut self) -> io::Result<()> {
        while self.turn(None)? {}
        Ok(())
    }

    /// Serves until a coordinator has been told why this rank [could not
    /// begin](Self::bind_unable), or until the deadline; answers whether one has.
    ///
    /// # Errors
    /// Only if the system's `poll` fails.
    pub fn run_until_told(&mut self, deadline: Deadline) -> io::Result<bool> {
        while !self.told && !deadline.is_over() && self.turn(Some(deadline.instant()))? {}
        Ok(self.told)
    }

    /// Deals with whatever happens next, until then at the latest; `false` once the server is
    /// stopped.
    fn turn(&mut self, until: Option<Instant>) -> io::Result<bool> {
        let (stop, newcomers, events) = self.wait(until)?;
        if stop {
            return Ok(false);
        }
        let now = socket::now();
        let (rank, timeout) = (&mut self.rank, self.timeout);
        let mut events = events.into_iter();
        let mut taken = false;
        self.connections.retain_mut(|connection| {
            let events = events.next().unwrap_or(PollFlags::empty());
            let goes_on = connection.attend(rank, events, now, timeout);
            if !goes_on {
                self.told |= connection.told;
                taken |= connection.taken;
                mem::take(&mut connection.conversation).end(rank, now);
            }
            goes_on
        });
        if taken {
            self.drop_the_dead(now);
        }
        if newcomers {
            self.accept();
        } else if self.orphaned_at.is_some_and(|at| at <= now) && self.all_greeted() {
            // Else somebody may be back whose hello was not read yet.
            self.rank.handle_timeout(now);
        }
        self.tend_at = self.rank.tend(now);
        Ok(true)
    }

    /// A newcomer finds the place of a process taken that has ended: a child that it forked holds the
    /// connection open.
    fn drop_the_dead(&mut self, now: Instant) {
        let rank = &mut self.rank;
        self.connections.retain_mut(|connection| {
            let dead = connection.stream.peer_is_dead();
            if dead {
                tracing::info!("dropped the connection of a dead process");
                mem::take(&mut connection.conversation).end(rank, now);
            }
            !dead
        });
    }

    fn all_greeted(&self) -> bool {
        let mut conversations = self.connections.iter().map(|it| &it.conversation);
        conversations.all(Conversation::is_greeted)
    }

    /// Waits for something to happen: to the stop handle, the listener, each connection.
    fn wait(&mut self, until: Option<Instant>) -> io::Result<(bool, bool, Vec<PollFlags>)> {
        self.paused = self.paused.filter(|until| *until > socket::now());
        let accepting = self.paused.is_none() && self.connections.len() < MAX_CONNECTIONS;
        let mut fds = Vec::with_capacity(2 + self.connections.len());
        fds.push(PollFd::new(self.stop.as_fd(), PollFlags::POLLIN));
        let listening = if accepting {
            PollFlags::POLLIN
        } else {
            PollFlags::empty()
        };
        fds.push(PollFd::new(self.listener.as_fd(), listening));
        for connection in &self.connections {
            // Who does not read its reply is not read from either.
            let sending = connection.stream.wants_to_send();
            let interest = if sending {
                PollFlags::POLLOUT
            } else {
                PollFlags::POLLIN
            };
            fds.push(PollFd::new(connection.stream.as_fd(), interest));
        }
        let deadlines = self
            .connections
            .iter()
            .filter_map(|connection| connection.deadline);
        self.orphaned_at = self.rank.poll_timeout();
        let orphaned = self.orphaned_at.filter(|_| self.all_greeted());
        let deadlines = deadlines.chain(self.paused).chain(orphaned);
        let deadlines = deadlines.chain(self.tend_at);
        socket::wait(&mut fds, deadlines.chain(until).min())?;
        let mut happened = fds
            .iter()
            .map(|fd| fd.revents().unwrap_or(PollFlags::empty()));
        let mut next = || happened.next().unwrap_or(PollFlags::empty());
        let (stop, newcomers) = (!next().is_empty(), !next().is_empty());
        Ok((stop, newcomers, happened.collect()))
    }

    fn accept(&mut self) {
        while self.connections.len() < MAX_CONNECTIONS {
            match self.listener.try_accept() {
                Ok(Some(stream)) => self.connections.push(Connection {
                    stream,
                    conversation: Conversation::default(),
                    replies: Vec::new(),
                    over: false,
                    told: false,
                    taken: false,
                    deadline: Some(socket::now() + self.timeout),
                }),
                Ok(None) => return,
                Err(e) => {
                    // Out of descriptors, most likely: trying again at once would only burn time.
                    tracing::warn!(endpoint = %self.listener.endpoint(), error = %e, "cannot accept");
                    self.paused = Some(socket::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }
}

impl StopHandle {
    /// Ends the server; once is enough, more does no harm.
    pub fn stop(&self) {
        match self.0.write(1) {
            // A counter that is full has been written to before.
            Ok(_) | Err(Errno::EAGAIN) => {}
            Err(e) => tracing::warn!(error = %e, "cannot stop the server"),
        }
    }
}

impl Connection {
    /// Goes on with what happened; `false` once the connection is of no more use.
    fn attend(
        &mut self,
        rank: &mut ServedRank,
        events: PollFlags,
        now: Instant,
        timeout: Duration,
    ) -> bool {
        if events.is_empty() {
            let late = self.deadline.is_some_and(|deadline| deadline <= now);
            if late {
                tracing::warn!("dropped a client that did not finish what it began");
            }
            return !late;
        }
        match self.proceed(rank) {
            Ok(true) => {}
            Ok(false) => return false,
            Err(e) => {
                // It left before it had its reply; what it asked for is done all the same.
                tracing::debug!(error = %e, "a client is gone");
                return false;
            }
        }
        let unfinished = self.over
            || self.stream.wants_to_send()
            || self.stream.is_partial()
            || self.conversation.is_unfinished();
        // What was asked for may have taken long; that is not the client's time.
        self.deadline =
            unfinished.then(|| self.deadline.unwrap_or_else(|| socket::now() + timeout));
        true
    }

    fn proceed(&mut self, rank: &mut ServedRank) -> io::Result<bool> {
        if self.stream.wants_to_send() {
            self.stream.flush()?;
        } else if self.stream.receive()? == Received::Ended {
            return Ok(false);
        }
        // A client that sends much and reads nothing waits here, not in our memory.
        while !self.stream.wants_to_send() && !self.over {
            let end = match self.stream.next_frame() {
                Ok(None) => break,
                Ok(Some(payload)) => self
                    .conversation
                    .handle_frame(rank, payload, &mut self.replies)
                    .err(),
                Err(e) => Some(self.conversation.handle_broken_frame(e, &mut self.replies)),
            };
            if let Some(end) = end {
                tracing::warn!(%end, "ended a conversation");
                self.taken = matches!(end, ConversationEnd::Refused(Refusal::Taken { .. }));
                self.told = matches!(end, ConversationEnd::Refused(Refusal::Unable { .. }));
                self.over = true;
            }
            self.stream.transmit(&self.replies)?;
            self.replies.clear();
        }
        Ok(!self.over || self.stream.wants_to_send())
    }
}
