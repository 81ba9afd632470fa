//! What must hold over any set of ranks. The three behaviours each have a file, and are tried
//! against simulated ranks with faults at any point; the rest goes over real sockets.

mod broadcast_targets;
mod local_first;
mod readiness_is_and;
mod simulated;
