//! What the tests of several files share.

use std::io;
use std::sync::{Arc, Mutex};

/// The log lines that `work` writes on this thread, down to debug.
pub(crate) fn logged<T>(work: impl FnOnce() -> T) -> (T, Vec<String>) {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::DEBUG)
        .with_ansi(false)
        .without_time()
        .with_writer(move || writer.clone())
        .finish();
    let result = tracing::subscriber::with_default(subscriber, work);
    let bytes = lines.0.lock().unwrap().clone();
    (
        result,
        String::from_utf8(bytes)
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect(),
    )
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits for what another thread is about to do. A test that waits in vain fails, late.
#[expect(clippy::disallowed_methods, reason = "a test that hangs must end")]
pub(crate) fn eventually(condition: impl Fn() -> bool) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !condition() {
        assert!(std::time::Instant::now() < end, "it did not happen");
        std::thread::yield_now();
    }
}
