//! Frames: a length in four bytes, little endian, then so many bytes.
//!
//! ```text
//! | len: u32 | payload: len bytes, 1 ..= MAX_FRAME_BYTES | len | payload | …
//! ```
//!
//! A socket delivers bytes in whatever portions it likes. [`FrameDecoder`] takes them as they come
//! and gives whole frames; it reads no socket itself.

use thiserror::Error;

/// Longest payload of a frame. Bounds what a peer can make this process keep.
pub const MAX_FRAME_BYTES: usize = 1 << 20;

const PREFIX_BYTES: usize = 4;

/// Bytes that cannot be a frame; nothing after them can be trusted either.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Announced longer than any frame may be.
    #[error("a frame of {len} bytes, the maximum is {MAX_FRAME_BYTES}")]
    TooLong {
        /// The announced length.
        len: usize,
    },
    /// Announced without content.
    #[error("a frame without content")]
    Empty,
}

/// Appends one frame to `out`, whose payload `write` appends.
///
/// # Panics
/// If the payload is empty or longer than [`MAX_FRAME_BYTES`]: what is sent is made to fit.
pub fn push_frame(out: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; PREFIX_BYTES]);
    write(out);
    let len = out.len() - start - PREFIX_BYTES;
    assert!(
        0 < len && len <= MAX_FRAME_BYTES,
        "a payload of {len} bytes does not make a frame"
    );
    let prefix = u32::try_from(len)
        .expect("the maximum fits in 32 bits")
        .to_le_bytes();
    out[start..start + PREFIX_BYTES].copy_from_slice(&prefix);
}

/// Puts frames together from portions of any size.
///
/// ```
/// use kvcached_tp_ipc::{FrameDecoder, push_frame};
///
/// let mut bytes = Vec::new();
/// push_frame(&mut bytes, |payload| payload.extend_from_slice(b"hello"));
///
/// let mut decoder = FrameDecoder::default();
/// for byte in &bytes {
///     assert_eq!(decoder.next_frame()?, None);
///     decoder.feed(&[*byte]);
/// }
/// assert_eq!(decoder.next_frame()?, Some(&b"hello"[..]));
/// # Ok::<(), kvcached_tp_ipc::FrameError>(())
/// ```
#[derive(Debug, Default)]
pub struct FrameDecoder {
    bytes: Vec<u8>,
    /// What lies before was given out.
    start: usize,
    /// What was wrong; nothing is taken any more.
    refused: Option<FrameError>,
}

impl FrameDecoder {
    /// Takes what arrived; after an error, drops it.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.refused.is_some() {
            return;
        }
        // Whole frames usually leave nothing behind, so that this moves nothing.
        self.bytes.drain(..self.start);
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The payload of the next whole frame; `None` until more was fed.
    ///
    /// # Errors
    /// [`FrameError`] as soon as the length shows it, and from then on.
    pub fn next_frame(&mut self) -> Result<Option<&[u8]>, FrameError> {
        if let Some(error) = self.refused {
            return Err(error);
        }
        let rest = &self.bytes[self.start..];
        let Some((prefix, rest)) = rest.split_first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let len = usize::try_from(u32::from_le_bytes(*prefix)).unwrap_or(usize::MAX);
        match len {
            0 => Err(self.refuse(FrameError::Empty)),
            len if len > MAX_FRAME_BYTES => Err(self.refuse(FrameError::TooLong { len })),
            len if len > rest.len() => Ok(None),
            len => {
                let payload = self.start + PREFIX_BYTES;
                self.start = payload + len;
                Ok(Some(&self.bytes[payload..self.start]))
            }
        }
    }

    /// Has a frame begun that is not whole yet?
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.buffered_bytes() > 0
    }

    /// Bytes that were taken and not given out: of one frame that is not whole yet, once
    /// [`next_frame`](Self::next_frame) gave the others.
    #[must_use]
    pub fn buffered_bytes(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// Nothing more can come out of this stream, so nothing more of it is kept.
    fn refuse(&mut self, error: FrameError) -> FrameError {
        *self = Self {
            refused: Some(error),
            ..Self::default()
        };
        error
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn framed(payloads: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for payload in payloads {
            push_frame(&mut bytes, |out| out.extend_from_slice(payload));
        }
        bytes
    }

    #[test]
    fn a_frame_of_the_maximum_length_passes_and_one_more_byte_does_not() {
        let largest = vec![7; MAX_FRAME_BYTES];
        let mut decoder = FrameDecoder::default();
        decoder.feed(&framed(std::slice::from_ref(&largest)));
        assert_eq!(decoder.next_frame(), Ok(Some(&largest[..])));
        assert!(!decoder.is_partial());

        decoder.feed(&u32::try_from(MAX_FRAME_BYTES + 1).unwrap().to_le_bytes());
        let refused = Err(FrameError::TooLong {
            len: MAX_FRAME_BYTES + 1,
        });
        assert_eq!(decoder.next_frame(), refused);
        decoder.feed(&framed(&[vec![1]]));
        assert_eq!(decoder.next_frame(), refused);
    }

    #[test]
    fn an_empty_frame_is_an_error() {
        let mut decoder = FrameDecoder::default();
        decoder.feed(&[0; 4]);
        assert_eq!(decoder.next_frame(), Err(FrameError::Empty));
    }

    /// A peer that goes on after an error costs no memory.
    #[test]
    fn nothing_is_kept_after_an_error() {
        let mut decoder = FrameDecoder::default();
        decoder.feed(&[0; 4]);
        decoder.feed(&[7; 100]);
        assert_eq!(decoder.buffered_bytes(), 104);
        for _ in 0..2 {
            assert_eq!(decoder.next_frame(), Err(FrameError::Empty));
            assert_eq!(decoder.buffered_bytes(), 0);
            decoder.feed(&[7; 100]);
        }
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..8),
            cuts in prop::collection::vec(1usize..9, 1..40),
        ) {
            let bytes = framed(&payloads);
            let mut decoder = FrameDecoder::default();
            let mut seen: Vec<Vec<u8>> = Vec::new();
            let mut rest = &bytes[..];
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (portion, later) = rest.split_at((*cut).min(rest.len()));
                rest = later;
                decoder.feed(portion);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    seen.push(frame.to_vec());
                }
            }
            prop_assert_eq!(seen, payloads);
            prop_assert!(!decoder.is_partial());
        }

        #[test]
        fn garbage_never_panics_and_never_grows_without_bound(
            portions in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..32),
        ) {
            let mut decoder = FrameDecoder::default();
            for portion in &portions {
                decoder.feed(portion);
                while let Ok(Some(frame)) = decoder.next_frame() {
                    prop_assert!(!frame.is_empty() && frame.len() <= MAX_FRAME_BYTES);
                }
            }
        }
    }
}
