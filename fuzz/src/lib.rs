//! What must hold of bytes that come from outside: from another process, or from a trace file.
//!
//! One function for each kind of input. It takes any bytes and panics if something does not hold.
//! The fuzz targets call it with whatever bytes reach new code; `tests/fuzz/main.rs`, which
//! includes this file by its path, calls it with the bytes kept in `corpus` and `regressions`.

mod conversation;
mod frame;
mod seeds;
mod trace;
mod wire;

pub use conversation::conversation;
pub use frame::frame;
pub use seeds::seeds;
pub use trace::{azure, burst, mooncake};
pub use wire::{greeting, message, request};
