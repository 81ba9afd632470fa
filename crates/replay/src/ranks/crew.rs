//! The rank processes of one model, as the replaying process sees them.

use std::ffi::OsString;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kvcached_mapper::Rank;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use thiserror::Error;

use super::channel::{Channel, ChannelError};
use super::message::{Answer, MappedSet, Order, STAMPS_PER_MESSAGE, Setup};
use super::oracle::{Checked, Stamp};
use super::trigger::Struck;
use crate::chaos::FaultKind;

/// How long a rank may take to end in good order.
const END_BOUND: Duration = Duration::from_secs(5);

/// How a rank process is started: a program that calls [`serve_rank`](super::serve_rank).
#[derive(Debug, Clone)]
pub struct RankProgram {
    /// The program.
    pub program: PathBuf,
    /// What makes it a rank.
    pub arguments: Vec<OsString>,
}

/// The rank processes of one model. Dropped, they end, in good order or by force.
#[derive(Debug, Default)]
pub(crate) struct Crew {
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    rank: Rank,
    origin: Origin,
    child: Child,
    channel: Channel,
    /// A second hold on the socket, to end the conversation with.
    socket: UnixStream,
    /// It was killed and waited for.
    has_ended: bool,
}

/// What a member is started from, and its successor.
#[derive(Debug, Clone)]
struct Origin {
    program: RankProgram,
    setup: Setup,
    bound: Duration,
}

/// Why a rank process did not do its part.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CrewError {
    /// It was not there to begin with.
    #[error("{rank} of {instance} cannot be started from {program}: {source}")]
    Start {
        /// The rank.
        rank: Rank,
        /// The instance it belongs to.
        instance: String,
        /// The program.
        program: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It said that it cannot go on.
    #[error("{rank} failed: {reason}")]
    Failed {
        /// The rank.
        rank: Rank,
        /// Its words.
        reason: String,
    },
    /// It ended, or the line did.
    #[error("{rank} is gone ({status}): {reason}")]
    Gone {
        /// The rank.
        rank: Rank,
        /// How the process ended, if it did.
        status: String,
        /// What the line said.
        reason: String,
    },
    /// It answered something else than was asked.
    #[error("{rank} answered out of turn")]
    OutOfTurn {
        /// The rank.
        rank: Rank,
    },
    /// Ranks that run schedulers of their own and decided differently.
    #[error("{rank} decided differently from the first rank: {what}")]
    Diverged {
        /// The rank.
        rank: Rank,
        /// What about.
        what: &'static str,
    },
}

impl Crew {
    /// Starts one process for each setup, and waits until all of them are set up.
    pub(crate) fn start(
        program: &RankProgram,
        setups: Vec<Setup>,
        ready_timeout: Duration,
    ) -> Result<Self, CrewError> {
        let mut crew = Self::default();
        for setup in setups {
            crew.members.push(Member::start(Origin {
                program: program.clone(),
                setup,
                bound: ready_timeout,
            })?);
        }
        crew.members.iter_mut().try_for_each(Member::await_ready)?;
        Ok(crew)
    }

    /// The process of a rank, to send signals to.
    pub(crate) fn process(&self, rank: Rank) -> Option<Pid> {
        let member = self.members.iter().find(|member| member.rank == rank)?;
        Some(member.process())
    }

    /// Every rank and its process.
    pub(crate) fn processes(&self) -> impl Iterator<Item = (Rank, Pid)> {
        self.members
            .iter()
            .map(|member| (member.rank, member.process()))
    }

    /// Has every rank that was struck take part again: a killed one as another process, which
    /// listens; a stopped one when its time has come. When the last of them was back.
    #[expect(
        clippy::disallowed_methods,
        reason = "a stall has a length, and recovery is measured from its end"
    )]
    pub(crate) fn bring_back(&mut self, struck: &[Struck]) -> Result<Instant, CrewError> {
        for Struck {
            rank, kind, since, ..
        } in struck
        {
            let Some(member) = self.members.iter_mut().find(|member| member.rank == *rank) else {
                continue;
            };
            match kind {
                FaultKind::Kill => member.replace()?,
                FaultKind::Stall(length) => {
                    thread::sleep(length.saturating_sub(since.elapsed()));
                    member.go_on();
                }
            }
        }
        Ok(Instant::now())
    }

    /// Has every rank stamp these blocks; does not wait for it.
    pub(crate) fn stamp(&mut self, pool: u16, stamps: &[Stamp]) -> Result<(), CrewError> {
        for part in stamps.chunks(STAMPS_PER_MESSAGE) {
            self.tell(&Order::Stamp {
                pool,
                stamps: part.to_vec(),
            })?;
        }
        Ok(())
    }

    /// Has every rank look at these blocks, all at once, and this process look at its own
    /// meanwhile; adds what they found.
    pub(crate) fn check(
        &mut self,
        pool: u16,
        stamps: &[Stamp],
        checked: &mut Checked,
        own: impl Fn(&[Stamp]) -> Checked,
    ) -> Result<(), CrewError> {
        for part in stamps.chunks(STAMPS_PER_MESSAGE) {
            self.tell(&Order::Check {
                pool,
                stamps: part.to_vec(),
            })?;
            checked.merge(own(part));
            for (rank, answer) in self.answers()? {
                let Answer::Checked(found) = answer else {
                    return Err(CrewError::OutOfTurn { rank });
                };
                checked.merge(found.at(rank));
            }
        }
        Ok(())
    }

    /// A rank that ended though nobody struck it, with its last words.
    pub(crate) fn look_after(&mut self, struck: &[Struck]) -> Result<(), CrewError> {
        for member in &mut self.members {
            if struck.iter().any(|struck| struck.rank == member.rank) {
                continue;
            }
            if let Ok(Some(_)) = member.child.try_wait() {
                while !matches!(member.receive()?, Answer::Failed(_)) {}
            }
        }
        Ok(())
    }

    /// Continues the ranks among `struck` that were stopped; the others are not brought back.
    pub(crate) fn go_on(&self, struck: &[Struck]) {
        for Struck { rank, kind, .. } in struck {
            if let FaultKind::Stall(_) = kind {
                self.members
                    .iter()
                    .filter(|member| member.rank == *rank)
                    .for_each(Member::go_on);
            }
        }
    }

    /// What each rank has mapped, by pool.
    pub(crate) fn mapped(&mut self) -> Result<Vec<(Rank, Vec<MappedSet>)>, CrewError> {
        let answers = self.ask(&Order::Mapped)?;
        let sets = answers.into_iter().map(|(rank, answer)| match answer {
            Answer::Mapped(sets) => Ok((rank, sets)),
            _ => Err(CrewError::OutOfTurn { rank }),
        });
        sets.collect()
    }

    /// Gives every rank the same order and collects the answers.
    pub(crate) fn ask(&mut self, order: &Order) -> Result<Vec<(Rank, Answer)>, CrewError> {
        self.tell(order)?;
        self.answers()
    }

    fn tell(&mut self, order: &Order) -> Result<(), CrewError> {
        self.members
            .iter_mut()
            .try_for_each(|member| member.send(order))
    }

    fn answers(&mut self) -> Result<Vec<(Rank, Answer)>, CrewError> {
        self.members
            .iter_mut()
            .map(|member| Ok((member.rank, member.receive()?)))
            .collect()
    }
}

impl Member {
    fn start(origin: Origin) -> Result<Self, CrewError> {
        let Origin {
            program,
            setup,
            bound,
        } = &origin;
        let rank = setup.rank();
        let failed = |source| CrewError::Start {
            rank,
            instance: setup.instance.clone(),
            program: program.program.clone(),
            source,
        };
        let (here, there) = UnixStream::pair().map_err(failed)?;
        let socket = here.try_clone().map_err(failed)?;
        let channel = match Channel::new(here, Some(*bound)) {
            Ok(channel) => channel,
            Err(error) => {
                return Err(CrewError::Failed {
                    rank,
                    reason: error.to_string(),
                });
            }
        };
        // Last: from here on nothing fails before the process has an owner that ends it.
        let child = Command::new(&program.program)
            .args(&program.arguments)
            .stdin(Stdio::from(OwnedFd::from(there)))
            .stdout(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let mut member = Self {
            rank,
            origin,
            child,
            channel,
            socket,
            has_ended: false,
        };
        let setup = Box::new(member.origin.setup.clone());
        member.send(&Order::Setup(setup))?;
        Ok(member)
    }

    fn await_ready(&mut self) -> Result<(), CrewError> {
        match self.receive()? {
            Answer::Ready => Ok(()),
            _ => Err(CrewError::OutOfTurn { rank: self.rank }),
        }
    }

    fn process(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).expect("the system's process ids are 32 bit"))
    }

    /// Puts another process in the place of one that was killed.
    fn replace(&mut self) -> Result<(), CrewError> {
        let origin = self.origin.clone();
        // First it is gone for good, and its share of every budget with it.
        let ended = self.child.kill().and_then(|()| self.child.wait());
        ended.map_err(|source| CrewError::Start {
            rank: self.rank,
            instance: origin.setup.instance.clone(),
            program: origin.program.program.clone(),
            source,
        })?;
        self.has_ended = true;
        *self = Self::start(origin)?;
        self.await_ready()
    }

    /// Continues the process, if it is stopped.
    fn go_on(&self) {
        if let Err(error) = kill(self.process(), Signal::SIGCONT) {
            tracing::warn!(rank = %self.rank, %error, "a rank could not be continued");
        }
    }

    fn send(&mut self, order: &Order) -> Result<(), CrewError> {
        match self.channel.send(order) {
            Ok(()) => Ok(()),
            // It may have said why before it closed the line.
            Err(error) => match self.channel.receive() {
                Ok(Answer::Failed(reason)) => Err(CrewError::Failed {
                    rank: self.rank,
                    reason,
                }),
                _ => Err(self.gone(&error)),
            },
        }
    }

    fn receive(&mut self) -> Result<Answer, CrewError> {
        match self.channel.receive() {
            Ok(Answer::Failed(reason)) => Err(CrewError::Failed {
                rank: self.rank,
                reason,
            }),
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.gone(&error)),
        }
    }

    fn gone(&mut self, error: &ChannelError) -> CrewError {
        let status = match self.child.try_wait() {
            Ok(Some(status)) => status.to_string(),
            Ok(None) => "still running".to_owned(),
            Err(error) => error.to_string(),
        };
        CrewError::Gone {
            rank: self.rank,
            status,
            reason: error.to_string(),
        }
    }

    /// Tells it that nothing more will come. It may be gone already.
    fn dismiss(&self) {
        drop(self.socket.shutdown(Shutdown::Write));
    }

    /// Waits for the process to end by itself: its socket closes when it does.
    fn wait(&mut self) -> std::io::Result<ExitStatus> {
        self.channel.wait_closed(END_BOUND);
        // Without effect on a process that has ended.
        self.child.kill()?;
        self.child.wait()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        self.dismiss();
        let rank = self.rank.0;
        match self.wait() {
            Ok(status) if status.success() => {}
            Ok(status) => tracing::warn!(rank, %status, "a rank ended badly"),
            Err(error) => tracing::warn!(rank, %error, "a rank did not end"),
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        // All at once; then each member waits for its own process.
        for member in &self.members {
            member.dismiss();
        }
    }
}
