//! Frames: however a stream is cut, the same frames come out of it, and nothing else is kept.

use kvcached_tp_ipc::{FrameDecoder, FrameError, MAX_FRAME_BYTES, push_frame};

const PREFIX_BYTES: usize = 4;

/// What came out of a stream.
#[derive(Debug, PartialEq, Eq)]
struct Decoded {
    frames: Vec<Vec<u8>>,
    end: Result<Rest, FrameError>,
}

/// Bytes of a frame that was begun.
#[derive(Debug, PartialEq, Eq)]
struct Rest(usize);

/// Reads a stream of frames whole and in pieces.
///
/// The first byte says how: the low half is how many bytes after it are sizes of pieces, used in
/// turn; with the high bit, the stream goes on with as many bytes as fit into the longest frame,
/// and pieces are 4096 times as long.
pub fn frame(input: &[u8]) {
    let Some((&how, rest)) = input.split_first() else {
        return;
    };
    let (sizes, stream) = rest.split_at(usize::from(how & 0x0f).min(rest.len()));
    let mut stream = stream.to_vec();
    let mut unit = 1;
    if how & 0x80 != 0 {
        stream.resize(stream.len() + MAX_FRAME_BYTES, 7);
        unit = 4096;
    }

    let whole = decoded([&stream[..]]);
    let mut pieces = Vec::new();
    let mut rest = &stream[..];
    for size in sizes.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (piece, later) = rest.split_at((unit * (1 + usize::from(*size))).min(rest.len()));
        pieces.push(piece);
        rest = later;
    }
    pieces.push(rest);
    assert_eq!(whole, decoded(pieces), "cutting changes nothing");

    let mut again = Vec::new();
    for frame in &whole.frames {
        assert!(!frame.is_empty() && frame.len() <= MAX_FRAME_BYTES);
        push_frame(&mut again, |payload| payload.extend_from_slice(frame));
    }
    let rest = stream.strip_prefix(&again[..]);
    let rest = rest.expect("frames are written as they were read");
    let announced = rest
        .first_chunk::<PREFIX_BYTES>()
        .map(|prefix| u32::from_le_bytes(*prefix) as usize);
    match whole.end {
        Ok(Rest(bytes)) => {
            assert_eq!(bytes, rest.len(), "what was begun is kept");
            assert!(announced.is_none_or(|len| bytes < PREFIX_BYTES + len));
        }
        Err(FrameError::Empty) => assert_eq!(announced, Some(0)),
        Err(FrameError::TooLong { len }) => {
            assert!(announced == Some(len) && len > MAX_FRAME_BYTES);
        }
        Err(error) => panic!("an unknown error, {error}"),
    }
}

fn decoded<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Decoded {
    let mut decoder = FrameDecoder::default();
    let mut frames = Vec::new();
    let mut refused = None;
    for piece in pieces {
        decoder.feed(piece);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => frames.push(frame.to_vec()),
                Ok(None) => break,
                Err(error) => {
                    let first = *refused.get_or_insert(error);
                    assert_eq!(first, error, "one error, from then on");
                    break;
                }
            }
            assert_eq!(refused, None, "no frame after an error");
        }
        let bytes = decoder.buffered_bytes();
        assert!(bytes < PREFIX_BYTES + MAX_FRAME_BYTES, "{bytes} bytes kept");
        assert!(refused.is_none() || bytes == 0, "kept after an error");
        assert_eq!(decoder.is_partial(), bytes > 0);
    }
    Decoded {
        frames,
        end: refused.map_or_else(|| Ok(Rest(decoder.buffered_bytes())), Err),
    }
}
