//! How many warm pages the near past asks for, as a value: no lock, no clock.
//!
//! What counts is not how many pages are handed out, since most of them were freed a moment ago,
//! but how far the pages in use rise above where they were: so many an allocation can want at once
//! beyond what frees have left warm. How far they fall says how many come back by themselves, which
//! is how much more than the target may lie about without being worth a call.
//!
//! ```text
//!   warm pages   0 ─────── map ───────┤ low ──── let be ──── high ├─────── unmap ─────── all
//!                                            ▲ target, where mapping ends
//! ```

use crate::Reserve;

/// Ticks for which the largest demand is remembered in full; then it halves with each.
const WINDOW: usize = 16;

/// The recent demand for pages of one pool.
#[derive(Debug, Clone)]
pub(crate) struct Demand {
    reserve: Reserve,
    /// Pages in use at the last look, and the fewest and the most since the last tick.
    used: u32,
    fewest: u32,
    most: u32,
    rise: Peak,
    fall: Peak,
    band: Band,
}

/// Between which numbers of warm pages nothing is done, and how many are aimed at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Band {
    /// Below this, pages are mapped, up to the target: some at a time, not one by one.
    pub(crate) low: u32,
    pub(crate) target: u32,
    /// Above this, runs that leave the target are unmapped.
    pub(crate) high: u32,
}

/// The largest of recent values: grows at once, shrinks slowly.
#[derive(Debug, Clone, Default)]
struct Peak {
    /// Since the last tick.
    now: u32,
    /// Of the last ticks.
    recent: [u32; WINDOW],
    /// The oldest of them.
    oldest: usize,
    level: u32,
}

impl Demand {
    /// Of a pool without a page in use, which keeps to these bounds.
    pub(crate) fn new(reserve: Reserve) -> Self {
        let mut demand = Self {
            reserve,
            used: 0,
            fewest: 0,
            most: 0,
            rise: Peak::default(),
            fall: Peak::default(),
            band: Band {
                low: 0,
                target: 0,
                high: 0,
            },
        };
        demand.settle();
        demand
    }

    /// So many pages are in use now. On the path of every allocation, so that nothing is done while
    /// they stay between what they were since the last tick.
    #[inline]
    pub(crate) fn observe(&mut self, used: u32) {
        self.used = used;
        self.fewest = self.fewest.min(used);
        self.most = self.most.max(used);
        let (rise, fall) = (used - self.fewest, self.most - used);
        if rise > self.rise.now || fall > self.fall.now {
            self.rise.now = self.rise.now.max(rise);
            self.fall.now = self.fall.now.max(fall);
            self.settle();
        }
    }

    /// Some time has passed, always about as much.
    pub(crate) fn tick(&mut self) {
        // No reserve makes up for more than its upper bound, so more need not be forgotten either.
        self.rise.tick(self.reserve.max);
        self.fall.tick(self.reserve.max);
        self.fewest = self.used;
        self.most = self.used;
        self.settle();
    }

    /// Begins anew with what is in use now: the past says nothing about the future.
    pub(crate) fn forget(&mut self, used: u32) {
        self.used = used;
        self.fewest = used;
        self.most = used;
        self.rise = Peak::default();
        self.fall = Peak::default();
        self.settle();
    }

    pub(crate) const fn reserve(&self) -> Reserve {
        self.reserve
    }

    pub(crate) const fn band(&self) -> Band {
        self.band
    }

    fn settle(&mut self) {
        let Reserve { min, max } = self.reserve;
        let rise = self.rise.value().min(max);
        // So many come and go: they are warm in between, and mapping them while they are in use
        // would mean unmapping them when they are back.
        let swing = rise.min(self.fall.value());
        let mut target = rise.max(min);
        if target > max - swing {
            // Half of the demand is kept all the same, since it may come before what comes back.
            target = (max - swing).max(rise.div_ceil(2)).max(min);
        }
        self.band = Band {
            low: target.div_ceil(2).max(min),
            target,
            high: target.saturating_add(swing.max(target / 4)).min(max),
        };
    }
}

impl Peak {
    fn tick(&mut self, bound: u32) {
        self.recent[self.oldest] = self.now.min(bound);
        self.oldest = (self.oldest + 1) % WINDOW;
        self.now = 0;
        let largest = self.recent.iter().copied().max().unwrap_or(0);
        self.level = largest.max(self.level / 2);
    }

    const fn value(&self) -> u32 {
        if self.now > self.level {
            self.now
        } else {
            self.level
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Observe(u32),
        Tick,
        Forget(u32),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => (0u32..300).prop_map(Op::Observe),
            1 => any::<u32>().prop_map(Op::Observe),
            4 => Just(Op::Tick),
            1 => (0u32..300).prop_map(Op::Forget),
        ]
    }

    fn reserve() -> impl Strategy<Value = Reserve> {
        let bound = || prop_oneof![4 => 0u32..200, 1 => any::<u32>()];
        (bound(), bound()).prop_map(|(one, other)| Reserve {
            min: one.min(other),
            max: one.max(other),
        })
    }

    fn apply(demand: &mut Demand, op: &Op) {
        match *op {
            Op::Observe(used) => demand.observe(used),
            Op::Tick => demand.tick(),
            Op::Forget(used) => demand.forget(used),
        }
    }

    /// Warm pages that are kept within the band, and what that took.
    struct Kept {
        warm: u32,
        moved: u32,
    }

    impl Kept {
        fn keep(&mut self, band: Band) {
            let before = self.warm;
            if self.warm < band.low {
                self.warm = band.target;
            } else if self.warm > band.high {
                self.warm = band.high;
            }
            self.moved += before.abs_diff(self.warm);
        }
    }

    proptest! {
        #[test]
        fn the_band_is_in_order_and_within_its_bounds(
            reserve in reserve(),
            ops in prop::collection::vec(op(), 0..100),
        ) {
            let mut demand = Demand::new(reserve);
            let Reserve { min, max } = reserve;
            prop_assert_eq!(demand.band().target, min);
            for op in &ops {
                apply(&mut demand, op);
                let Band { low, target, high } = demand.band();
                prop_assert!(min <= low && low <= target && target <= high && high <= max);
                prop_assert!(target == 0 || low > 0, "an empty reserve is filled");
            }
        }

        #[test]
        fn a_demand_is_met_from_its_first_moment_on_for_a_whole_window(
            max in 1u32..200,
            start in 0u32..200,
            grown in 1u32..300,
            ticks in 0..WINDOW,
        ) {
            let mut demand = Demand::new(Reserve { min: 0, max });
            demand.forget(start);
            demand.observe(start + grown);
            for _ in 0..=ticks {
                prop_assert_eq!(demand.band().target, grown.min(max));
                demand.tick();
            }
        }

        #[test]
        fn an_idle_pool_is_at_its_lower_bound_a_window_and_a_logarithm_of_ticks_later(
            reserve in reserve(),
            ops in prop::collection::vec(op(), 0..100),
        ) {
            let mut demand = Demand::new(reserve);
            ops.iter().for_each(|op| apply(&mut demand, op));
            let bits = 32 - reserve.max.leading_zeros() as usize;
            for _ in 0..=WINDOW + bits {
                demand.tick();
            }
            prop_assert_eq!(demand.band().target, reserve.min);
        }

        /// What comes and goes is served from what is warm already.
        #[test]
        fn a_constant_swing_ends_in_no_mapping_and_no_unmapping(
            (min, max, swing) in (1u32..200).prop_flat_map(|max| {
                (1..=(2 * max / 3).max(1)).prop_flat_map(move |swing| {
                    (0..=max - swing, Just(max), Just(swing))
                })
            }),
            start in 0u32..100,
            swings in 1u32..4,
        ) {
            prop_assume!(3 * swing <= 2 * max);
            let mut demand = Demand::new(Reserve { min, max });
            let mut kept = Kept { warm: 0, moved: 0 };
            let mut used = start;
            demand.forget(start);
            for tick in 0..60 {
                for _ in 0..swings {
                    // What is not warm is mapped for whoever asks.
                    kept.moved += swing.saturating_sub(kept.warm);
                    kept.warm = kept.warm.saturating_sub(swing);
                    used += swing;
                    demand.observe(used);
                    kept.keep(demand.band());
                    used -= swing;
                    kept.warm += swing;
                    demand.observe(used);
                    kept.keep(demand.band());
                }
                demand.tick();
                kept.keep(demand.band());
                if tick == 2 {
                    kept.moved = 0;
                }
            }
            prop_assert_eq!(kept.moved, 0);
        }

        /// What only grows is mapped ahead, each page once.
        #[test]
        fn constant_growth_never_waits_and_nothing_is_unmapped(
            max in 1u32..200,
            rate in 1u32..200,
        ) {
            prop_assume!(2 * rate <= max);
            let mut demand = Demand::new(Reserve { min: 0, max });
            let mut kept = Kept { warm: 0, moved: 0 };
            let (mut used, mut waited, mut unmapped) = (0, 0, 0);
            for tick in 0..50 {
                for _ in 0..rate {
                    waited += u32::from(kept.warm == 0 && tick > 0);
                    kept.warm = kept.warm.saturating_sub(1);
                    used += 1;
                    demand.observe(used);
                    unmapped += kept.warm.saturating_sub(demand.band().high);
                    kept.keep(demand.band());
                }
                demand.tick();
            }
            prop_assert_eq!((waited, unmapped), (0, 0));
        }
    }
}
