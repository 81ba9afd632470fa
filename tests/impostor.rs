//! What listens where a rank should, and is none.

use std::error::Error;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use kvcached_mapper::Rank;
use kvcached_tp_ipc::{Endpoint, FrameDecoder, wire};

/// More than a frame may have, whoever reads it as a length.
const GARBAGE: [u8; 64] = [0xff; 64];

/// Listens until it is killed. Manners: `silent` says nothing, `noisy` what is no frame, `stranger`
/// the hello of another rank, `mute` a good hello and then nothing, `babbling` a good hello and then
/// what is no frame.
pub(crate) fn listen(endpoint: &Endpoint, manner: &str) -> Result<(), Box<dyn Error>> {
    match fs::remove_file(endpoint.path()) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let listener = UnixListener::bind(endpoint.path())?;
    crate::ready();
    // Kept, so that none of them is closed.
    let mut connections = Vec::new();
    loop {
        let (mut stream, _) = listener.accept()?;
        // Whoever has had enough is gone; the next one is treated alike.
        let _ = treat(&mut stream, manner);
        connections.push(stream);
    }
}

fn treat(stream: &mut UnixStream, manner: &str) -> Result<(), Box<dyn Error>> {
    match manner {
        "silent" => {}
        "noisy" => stream.write_all(&GARBAGE)?,
        "stranger" => welcome(stream, |rank| Rank(rank.0 + 7))?,
        "mute" => welcome(stream, |rank| rank)?,
        "babbling" => {
            welcome(stream, |rank| rank)?;
            stream.write_all(&GARBAGE)?;
        }
        other => return Err(format!("no such manner: {other}").into()),
    }
    Ok(())
}

/// Answers the hello in the name of a rank.
fn welcome(stream: &mut UnixStream, name: impl FnOnce(Rank) -> Rank) -> Result<(), Box<dyn Error>> {
    let mut decoder = FrameDecoder::default();
    let mut bytes = [0; 512];
    let mut hello = loop {
        if let Some(payload) = decoder.next_frame()? {
            break wire::read_hello(payload)?;
        }
        match stream.read(&mut bytes)? {
            0 => return Ok(()),
            length => decoder.feed(&bytes[..length]),
        }
    };
    hello.rank = name(hello.rank);
    let mut answer = Vec::new();
    wire::push_welcome(&mut answer, &hello);
    Ok(stream.write_all(&answer)?)
}
