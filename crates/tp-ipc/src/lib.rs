//! A [`Mapper`](kvcached_mapper::Mapper) across the ranks of an engine.
//!
//! An engine may run as several processes, and every rank must have the same pages backed, always.
//! [`Topology`] says where each rank is, [`wire`] what travels, [`Fanout`] what to do when one of
//! them cannot; none of these does I/O or reads a clock.

mod conversation;
mod fanout;
mod frame;
mod name;
mod operation;
mod runtime_dir;
mod topology;
pub mod wire;

pub use conversation::{Conversation, ConversationEnd, ServedPool, ServedRank};
pub use fanout::{Fanout, PeerIndex, Transmit};
pub use frame::{FrameDecoder, FrameError, MAX_FRAME_BYTES, push_frame};
pub use name::{InstanceName, NameError};
pub use operation::{Answer, Operation};
pub use runtime_dir::{Endpoint, EndpointDir, EndpointError, RuntimeDir, RuntimeDirError};
pub use topology::{Place, Topology, TopologyError};
pub use wire::{GeometryDigest, Hello, PROTOCOL_VERSION, Refusal, SessionId, WireError};
