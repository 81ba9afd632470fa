//! A [`Mapper`](kvcached_mapper::Mapper) across the ranks of an engine, which may be processes of
//! their own. Every rank has the same pages backed, always.
//!
//! ```text
//! Topology ── says where each rank is: in this process, or behind an Endpoint
//! Broadcast ─▶ Fanout (decides) ─▶ frames ═ unix socket ═▶ Server ─▶ Conversation ─▶ dyn Mapper
//!     └──────▶ dyn Mapper of the local rank, first                      (one per rank)
//! ```
//!
//! - [`Broadcast`] is the mapper of the process that decides about pages; [`Server`] is a rank that
//!   listens. Both are thin shells around [`Fanout`] and [`Conversation`], which do no I/O and read
//!   no clock, and speak the language of [`wire`].
//! - One operation ends on all ranks or on none, and is applied once, however often it is sent. A
//!   rank of which that cannot be said is *suspect*, and nothing more is done until it has been
//!   resynchronised: it is sent every run that it must have, and proves that it has them.
//! - A coordinator that starts anew finds live workers and brings them to its own state. A worker
//!   whose coordinator is gone for too long gives back what it holds.
//! - Every wait for another process has a bound. A dead peer, a malformed frame, another user's
//!   process are error values, and change nothing.
//! - Nothing here knows what a page is made of.
//!
//! # Example
//!
//! Two ranks in one process: the second is served by a thread, over a real socket.
//!
//! ```
//! # use std::sync::Arc;
//! # use std::time::Duration;
//! use kvcached_mapper::{
//!     Cold, KvBuffers, Layout, LocalMapper, Mapper, PageId, PageRun, PageSize, PoolId, PoolSpec,
//!     Rank, Stage,
//! };
//! use kvcached_tp_ipc::{
//!     Broadcast, BroadcastConfig, Deadline, GeometryDigest, RuntimeDir, ServedPool, Server,
//!     ServerConfig, SessionId, Topology,
//! };
//! use kvcached_vmm::{Driver, Host, HostConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let temp = tempfile::tempdir()?;
//! # let path = temp.path().join("run");
//! # let spec = PoolSpec {
//! #     layout: Layout::Contiguous,
//! #     layers: 2,
//! #     kv_buffers: KvBuffers::Two,
//! #     block_bytes: 32 << 10,
//! #     page_size: PageSize::Auto,
//! #     capacity_bytes: 1 << 30,
//! # };
//! // Each rank has a device, and the same pool on it.
//! let device = Arc::new(Host::new(HostConfig::new(256 << 20))?);
//! let geometry = spec.resolve(device.properties().granularity)?;
//! let part = || LocalMapper::new(Arc::clone(&device), geometry.clone(), Cold::Unbacked);
//! let (here, there) = (Arc::new(part()?), Arc::new(part()?));
//! let (pages, page, block) =
//!     (geometry.pages(), geometry.page_bytes(), geometry.block_stride_bytes());
//! let (pool, geometry) = (PoolId(0), GeometryDigest::new(pages, page, block));
//! let endpoints = RuntimeDir::open(&path)?.instance(&"llama-8b".parse()?)?;
//! let timeout = Duration::from_secs(5);
//!
//! // Rank 1 listens.
//! let mut server = Server::bind(
//!     &endpoints.endpoint(Stage(0), Rank(1)),
//!     ServerConfig {
//!         instance: endpoints.instance().clone(),
//!         stage: Stage(0),
//!         rank: Rank(1),
//!         pools: vec![ServedPool { pool, geometry, mapper: there.clone() }],
//!         timeout,
//!         orphan_timeout: timeout,
//!         epochs: None,
//!     },
//! )?;
//! let stop = server.stop_handle();
//! let serving = std::thread::spawn(move || server.run());
//!
//! // Rank 0 decides.
//! let ranks = Broadcast::connect(
//!     BroadcastConfig {
//!         instance: endpoints.instance().clone(),
//!         pool,
//!         geometry,
//!         topology: Topology::rank0_coordinates(2, &endpoints),
//!         timeout,
//!     },
//!     Some(here.clone()),
//!     Deadline::after(timeout),
//! )?;
//! let run = PageRun::new(PageId(3), 4).expect("four pages are a run");
//! ranks.map(&[run])?;
//! assert_eq!((here.mapped(), there.mapped()), (vec![run], vec![run]));
//!
//! stop.stop();
//! serving.join().expect("the server does not panic")?;
//! # Ok(())
//! # }
//! ```

mod broadcast;
mod conversation;
mod doubt;
mod fanout;
mod frame;
mod name;
mod operation;
mod peer;
mod runtime_dir;
mod serve;
mod socket;
mod topology;
pub mod wire;

pub use broadcast::{Broadcast, BroadcastConfig, ConnectError};
pub use conversation::{Conversation, ConversationEnd, ServedPool, ServedRank};
pub use fanout::{Fanout, PeerIndex, Step};
pub use frame::{FrameDecoder, FrameError, MAX_FRAME_BYTES, push_frame};
pub use name::{InstanceName, NameError};
pub use operation::{Answer, Operation, RankAnswer, RankCall};
pub use runtime_dir::{Endpoint, EndpointDir, EndpointError, RuntimeDir, RuntimeDirError};
pub use serve::{Server, ServerConfig, StopHandle};
pub use socket::{BindError, Deadline, FramedListener, FramedStream, StreamError};
pub use topology::{Place, Topology, TopologyError};
pub use wire::{GeometryDigest, Hello, PROTOCOL_VERSION, Refusal, SessionId, WireError};
