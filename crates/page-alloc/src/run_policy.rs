//! [`RunPolicy`]: how many adjacent pages are backed together.
//!
//! A run costs one chunk per extent whatever its length, so long runs make growth cheap. But its
//! memory goes back as a whole, so a single survivor pins all of it: what saves time when memory is
//! plenty is what others wait for when it is not. Demand therefore decides the length, up to bounds
//! that shrink as memory gets short. Everything here is a pure function of what it is told.

use std::num::NonZeroU32;

use crate::{ConfigError, MAX_RUN};

/// Room under a limit is shared out in at least so many runs, so that what is left stays in pieces
/// that can be given up.
const RUNS_OF_ROOM: u32 = 8;

/// How long runs are, as a value.
///
/// Growth by one page takes a run of one page, growth by many takes long ones, and the total is
/// never more than was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RunPolicy {
    /// Pages of the longest run of ordinary growth, at most [`MAX_RUN`].
    pub longest: NonZeroU32,
    /// Pages of the longest run when growth is by [`bulk_from`](Self::bulk_from) pages or more: at
    /// least [`longest`](Self::longest), at most [`MAX_RUN`].
    pub bulk: NonZeroU32,
    /// Growth by so many pages at once is bulk.
    pub bulk_from: NonZeroU32,
    /// Growth is by at least so many runs, if it is by so many pages: no run is more than this
    /// share of it. With 1, a run may be all of it.
    pub share: NonZeroU32,
    /// The same while memory is short: growth by less than twice as many pages is by single ones.
    pub share_when_short: NonZeroU32,
    /// After the device was found full, memory is short until so many pages have been mapped without
    /// finding it full again. With 0, it never is.
    pub calm: u32,
}

/// What is known about the memory that is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Room {
    /// Pages that a limit leaves, if there is one.
    pub limited_to: Option<u32>,
    /// The device was full a short while ago.
    pub is_short: bool,
}

impl RunPolicy {
    /// Runs as long as the demand, up to so many pages, however short the device is of memory.
    #[must_use]
    pub const fn up_to(pages: NonZeroU32) -> Self {
        Self {
            longest: pages,
            bulk: pages,
            bulk_from: NonZeroU32::MIN,
            share: NonZeroU32::MIN,
            share_when_short: NonZeroU32::MIN,
            calm: 0,
        }
    }

    /// Pages of the longest run for a demand of so many cold pages: at least 1, never more for a
    /// smaller demand or for less room.
    #[must_use]
    pub fn length(&self, demand: u32, room: Room) -> NonZeroU32 {
        let longest = match demand >= self.bulk_from.get() {
            true => self.bulk.max(self.longest),
            false => self.longest,
        };
        let share = match room.is_short {
            true => self.share.max(self.share_when_short),
            false => self.share,
        };
        let by_room = room.limited_to.map_or(u32::MAX, |left| left / RUNS_OF_ROOM);
        let pages = longest.get().min(demand / share).min(by_room);
        NonZeroU32::new(pages).unwrap_or(NonZeroU32::MIN)
    }

    /// Are the numbers ones that a table can keep?
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let longest = self.longest.max(self.bulk).get();
        if longest > MAX_RUN {
            return Err(ConfigError::RunTooLong {
                max_run: longest,
                most: MAX_RUN,
            });
        }
        if self.bulk < self.longest {
            return Err(ConfigError::BulkRunTooShort {
                bulk: self.bulk.get(),
                longest: self.longest.get(),
            });
        }
        Ok(())
    }
}

/// Was the device full a short while ago? Counts pages instead of time, so that it needs no clock
/// and a pool at rest forgets nothing.
#[derive(Debug, Default)]
pub(crate) struct Pressure {
    /// Pages still to be mapped before runs are long again.
    left: u32,
}

impl Pressure {
    pub(crate) const fn is_on(&self) -> bool {
        self.left > 0
    }

    /// The device had no memory for what was asked.
    pub(crate) const fn met_full(&mut self, policy: &RunPolicy) {
        self.left = policy.calm;
    }

    /// The device had memory for so many pages.
    pub(crate) const fn mapped(&mut self, pages: u32) {
        self.left = self.left.saturating_sub(pages);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn number(pages: u32) -> NonZeroU32 {
        NonZeroU32::new(pages).expect("not zero")
    }

    fn policy() -> impl Strategy<Value = RunPolicy> {
        let lengths = (1..=MAX_RUN, 1..=MAX_RUN);
        let shares = (1u32..20, 1u32..40);
        (lengths, 1u32..2000, shares, 0u32..100).prop_map(
            |((one, other), bulk_from, (share, short), calm)| RunPolicy {
                longest: number(one.min(other)),
                bulk: number(one.max(other)),
                bulk_from: number(bulk_from),
                share: number(share),
                share_when_short: number(short),
                calm,
            },
        )
    }

    fn room() -> impl Strategy<Value = Room> {
        let limited_to = prop::option::of(0u32..4000);
        (limited_to, any::<bool>()).prop_map(|(limited_to, is_short)| Room {
            limited_to,
            is_short,
        })
    }

    proptest! {
        #[test]
        fn a_length_is_at_least_one_page_and_within_every_bound(
            policy in policy(),
            demand in prop_oneof![0u32..200, any::<u32>()],
            room in room(),
        ) {
            prop_assert_eq!(policy.check(), Ok(()));
            let length = policy.length(demand, room).get();
            let bound = if demand < policy.bulk_from.get() { policy.longest } else { policy.bulk };
            prop_assert!(length <= bound.get());
            prop_assert!(length == 1 || length <= demand / policy.share);
            prop_assert!(length == 1 || !room.is_short || length <= demand / policy.share_when_short);
            if let Some(left) = room.limited_to {
                prop_assert!(length == 1 || length * 8 <= left);
            }
        }

        #[test]
        fn a_smaller_demand_never_takes_longer_runs(
            policy in policy(),
            demands in (0u32..4000, 0u32..4000),
            room in room(),
        ) {
            let (one, other) = demands;
            let less = policy.length(one.min(other), room);
            prop_assert!(less <= policy.length(one.max(other), room));
        }

        #[test]
        fn less_room_never_makes_runs_longer(
            policy in policy(),
            demand in 0u32..4000,
            left in (0u32..4000, 0u32..4000),
            is_short in any::<bool>(),
        ) {
            let (one, other) = left;
            let length = |limited_to, is_short| policy.length(demand, Room { limited_to, is_short });
            let most = length(None, is_short);
            let more = length(Some(one.max(other)), is_short);
            let less = length(Some(one.min(other)), is_short);
            prop_assert!(less <= more && more <= most);
            prop_assert!(length(Some(one), true) <= length(Some(one), false));
        }

        #[test]
        fn pressure_lasts_for_exactly_the_pages_that_the_policy_says(
            policy in policy(),
            steps in prop::collection::vec(prop::option::of(1u32..30), 0..40),
        ) {
            let mut pressure = Pressure::default();
            let mut since: Option<u32> = None;
            for step in steps {
                match step {
                    None => {
                        pressure.met_full(&policy);
                        since = Some(0);
                    }
                    Some(pages) => {
                        pressure.mapped(pages);
                        since = since.map(|mapped| mapped + pages);
                    }
                }
                prop_assert_eq!(pressure.is_on(), since.is_some_and(|mapped| mapped < policy.calm));
            }
        }
    }

    #[test]
    fn growth_by_one_takes_one_page_and_growth_by_very_many_takes_bulk_runs() {
        let whole = RunPolicy {
            longest: number(16),
            bulk: number(64),
            bulk_from: number(512),
            share: number(1),
            share_when_short: number(16),
            calm: 1,
        };
        let ample = Room::default();
        let length = |demand| whole.length(demand, ample).get();
        assert_eq!([0, 1, 2, 16, 511, 512].map(length), [1, 1, 2, 16, 16, 64]);
        let quarters = RunPolicy {
            share: number(4),
            ..whole
        };
        let length = |demand| quarters.length(demand, ample).get();
        assert_eq!([1, 7, 8, 16, 64, 512].map(length), [1, 1, 2, 4, 16, 64]);
        let short = Room {
            is_short: true,
            ..ample
        };
        let length = |demand| quarters.length(demand, short).get();
        assert_eq!([1, 16, 31, 32, 64, 512].map(length), [1, 1, 1, 2, 4, 32]);
    }
}
