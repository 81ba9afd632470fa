//! The line between the replaying process and one of its rank processes.
//!
//! It is the rank's standard input: a socket that both ends see close when the other dies, and
//! that leaves nothing behind in any directory. Messages are postcard in the frames of `tp-ipc`.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use kvcached_tp_ipc::{FrameDecoder, FrameError, push_frame};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// One end of the line.
#[derive(Debug)]
pub(crate) struct Channel {
    stream: UnixStream,
    decoder: FrameDecoder,
    out: Vec<u8>,
    buffer: Vec<u8>,
}

/// Why nothing came through.
#[derive(Debug, Error)]
pub(crate) enum ChannelError {
    /// The other process is gone.
    #[error("the other process ended")]
    Closed,
    /// The socket itself failed, or the bound on waiting passed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A frame beyond the limit, or none at all.
    #[error("{0}")]
    Frame(#[from] FrameError),
    /// A frame that is no message of this version.
    #[error("not a message of this version: {0}")]
    Message(#[from] postcard::Error),
}

impl Channel {
    /// A line over `stream`. With a bound, no single wait takes longer.
    pub(crate) fn new(stream: UnixStream, bound: Option<Duration>) -> Result<Self, ChannelError> {
        stream.set_read_timeout(bound)?;
        stream.set_write_timeout(bound)?;
        Ok(Self {
            stream,
            decoder: FrameDecoder::default(),
            out: Vec::new(),
            buffer: vec![0; 1 << 16],
        })
    }

    /// Sends one message.
    pub(crate) fn send<M: Serialize>(&mut self, message: &M) -> Result<(), ChannelError> {
        let bytes = postcard::to_stdvec(message)?;
        self.out.clear();
        push_frame(&mut self.out, |out| out.extend_from_slice(&bytes));
        self.stream.write_all(&self.out)?;
        Ok(())
    }

    /// Waits for one message.
    pub(crate) fn receive<M: DeserializeOwned>(&mut self) -> Result<M, ChannelError> {
        loop {
            if let Some(frame) = self.decoder.next_frame()? {
                return Ok(postcard::from_bytes(frame)?);
            }
            match self.stream.read(&mut self.buffer) {
                Ok(0) => return Err(ChannelError::Closed),
                Ok(read) => self.decoder.feed(&self.buffer[..read]),
                // A signal is somebody else's business.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until the other process is gone, for so long at most; what it still says is dropped.
    pub(crate) fn wait_closed(&mut self, bound: Duration) {
        if self.stream.set_read_timeout(Some(bound)).is_ok() {
            while matches!(self.stream.read(&mut self.buffer), Ok(1..)) {}
        }
    }
}
