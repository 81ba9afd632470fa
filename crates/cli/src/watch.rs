//! Looking on: the progress bar, and the signals that end a replay early.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvcached_replay::{Progress, Side};
use signal_hook::consts::{SIGINT, SIGTERM};

/// A flag that Ctrl-C and SIGTERM raise. A second Ctrl-C ends the process at once.
pub(crate) fn interrupted() -> std::io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // First, so that it sees the flag as the first signal left it.
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&flag))?;
        signal_hook::flag::register(signal, Arc::clone(&flag))?;
    }
    Ok(flag)
}

/// Ctrl-C reaches every process of the terminal; the ranks leave it to the replay to end them.
pub(crate) fn ignore_interrupts() -> std::io::Result<()> {
    signal_hook::flag::register(SIGINT, Arc::new(AtomicBool::new(false)))?;
    Ok(())
}

/// A bar on standard error, if that is a terminal.
pub(crate) fn bar(requests: u64) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr_with_hz(10)
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template(
        "{msg:8} {wide_bar} {pos}/{len} requests  {prefix}  {elapsed}/{duration}",
    );
    let bar = ProgressBar::with_draw_target(Some(requests), target);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// Shows how far a side is.
pub(crate) fn show(bar: &ProgressBar, side: Side, progress: Progress) {
    // Events come by the million, requests by the thousand.
    let done = u64::from(progress.done);
    if bar.is_hidden() || (bar.position() == done && done != 0) {
        return;
    }
    bar.set_message(match side {
        Side::Static => "static",
        Side::Elastic => "elastic",
    });
    bar.set_prefix(format!(
        "{} running, {} waiting",
        progress.running, progress.waiting
    ));
    bar.set_position(done);
}
