//! Real processes over real sockets, on memory of this machine.

#[path = "../ranks.rs"]
mod ranks;

mod processes;
