//! What must hold over any set of ranks. The three behaviours each have a file, and are tried
//! against simulated ranks with faults at any point; the rest goes over real sockets, between
//! threads or processes.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod broadcast_targets;
mod local_first;
mod processes;
mod readiness_is_and;
mod served;
mod simulated;
mod sockets;
