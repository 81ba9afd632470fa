//! Behaviour of [`PageAllocator`](kvcached_page_alloc::PageAllocator) over a mapper that backs
//! nothing, checks every duty of its caller, and fails where a test says so.
//!
//! `properties` drives random operations with faults against a model; the others are one story
//! each, most of them a kind of fault that users of earlier systems met.

mod behind;
mod drive;
mod failures;
mod in_flight;
mod limits;
mod pressure;
mod properties;
mod ranks;
mod repair;
mod reserve;
mod runs;
mod support;
mod threads;
