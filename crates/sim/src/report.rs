//! What a run came to.

use std::fmt;

/// What must hold whatever goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Guarantee {
    /// No page, and no block, has two owners.
    OneOwner,
    /// No page is handed out that is handed out already.
    NoPageTwice,
    /// In every snapshot the states of the pages add up to the total.
    StatesAddUp,
    /// After an operation every rank that counts has the agreed runs, and the others are named.
    AllOrNone,
    /// Memory is there, with its content, as long as work that uses it has not ended.
    NothingTakenEarly,
    /// Every wait ends within its bound.
    Bounded,
    /// Once nothing fails any more, everything is mended within a bound.
    Mended,
    /// Nothing panics.
    NoPanic,
}

/// A guarantee that did not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Which.
    pub guarantee: Guarantee,
    /// When, in virtual microseconds since the start.
    pub at_us: u64,
    /// How.
    pub what: String,
}

/// What a run, or several, consisted of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Steps of the script.
    pub steps: u64,
    /// Operations over all ranks that were begun: maps, unmaps, resynchronisations.
    pub transactions: u64,
    /// Those of them during which something was failing.
    pub troubled: u64,
    /// Processes that died.
    pub crashes: u64,
    /// Processes that came back.
    pub restarts: u64,
    /// Operations that brought ranks back to the agreed runs.
    pub resyncs: u64,
    /// Times that an engine was told of lost content.
    pub losses: u64,
    /// Virtual time, in microseconds.
    pub virtual_us: u64,
}

impl Counts {
    /// Adds those of another run.
    pub fn add(&mut self, other: &Self) {
        let Self {
            steps,
            transactions,
            troubled,
            crashes,
            restarts,
            resyncs,
            losses,
            virtual_us,
        } = other;
        self.steps += steps;
        self.transactions += transactions;
        self.troubled += troubled;
        self.crashes += crashes;
        self.restarts += restarts;
        self.resyncs += resyncs;
        self.losses += losses;
        self.virtual_us += virtual_us;
    }
}

impl Guarantee {
    const fn words(self) -> &'static str {
        match self {
            Self::OneOwner => "no page has two owners",
            Self::NoPageTwice => "no page is handed out twice",
            Self::StatesAddUp => "page states add up to the total",
            Self::AllOrNone => "all counting ranks have the agreed runs",
            Self::NothingTakenEarly => "memory stays as long as work uses it",
            Self::Bounded => "every wait is bounded",
            Self::Mended => "everything is mended once nothing fails",
            Self::NoPanic => "nothing panics",
        }
    }
}

impl fmt::Display for Guarantee {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: at {} µs, {}", self.guarantee, self.at_us, self.what)
    }
}
