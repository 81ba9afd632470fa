//! A whole engine in one thread: the real page allocator, block manager and fan-out of a
//! coordinator, and on each rank the real worker side and mapper, over a network and devices that
//! do what a [`Script`] says. Time is a number that passes when nothing else can happen.
//!
//! ```text
//! Script ─▶ world ─┬▶ coordinator: BlockManager ▶ PageAllocator ▶ Fanout ─┐ frames, late, lost,
//!                  ├▶ network ◀──────────────────────────────────────────┤ doubled, cut
//!                  └▶ ranks: ServedRank ▶ LocalMapper ▶ a driver ◀────────┘
//!                            that fails, and holds bytes; work that reads and writes them
//! ```
//!
//! After every operation the [`Guarantee`]s are checked; once the script is at its end all faults
//! are mended, and everything must come to rest. A run is a function of its script, so that what a
//! seed has shown is replayed, and made shorter, by leaving steps out.
//!
//! ```
//! use kvcached_sim::{generate, run};
//!
//! let script = generate(7, 200);
//! let (counts, violation) = run(&script, None);
//! assert_eq!(violation, None);
//! assert!(counts.transactions > 0);
//! ```

mod checks;
mod clock;
mod device;
mod engine;
mod events;
mod fan;
mod faults;
mod generate;
mod network;
mod random;
mod rank;
mod report;
mod script;
mod settle;
mod shrink;
mod work;
mod world;

pub use generate::generate;
pub use report::{Counts, Guarantee, Violation};
pub use script::{Config, DriverCall, EpochsKept, FrameFault, Process, Script, Step, Timed, Way};
pub use shrink::shrink;
pub use world::run;

/// A mistake that is made on purpose, to show that it would be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sabotage {
    /// What was begun on a rank is never taken back, and said to be.
    SkipUndo,
    /// One rank is not told to map, and said to have done it.
    ForgetARank,
    /// Memory is taken away without waiting for the work that may touch it.
    ReuseBeforeRetired,
    /// A rank that does not answer is said to have done what it was told.
    TrustLostReply,
}

impl Sabotage {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::SkipUndo,
        Self::ForgetARank,
        Self::ReuseBeforeRetired,
        Self::TrustLostReply,
    ];
}
