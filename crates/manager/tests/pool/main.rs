//! The block manager over a page allocator over a mapper that backs nothing, remembers everything
//! and fails on a script.
//!
//! `model` runs random operations and faults against a model of sets; the others each hold one
//! promise, with the numbers of a fault that users of such systems have met.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking, and so do the helpers here"
)]

mod doubt;
mod faults;
mod model;
mod packing;
mod support;
