//! Rows of bits: which blocks are taken, and which buckets are filled.
//!
//! Neither knows what its bits mean. [`Bits`] is dense, so the bits of one page are adjacent
//! whatever a page holds: a million one-block pages need 125 kB, which stays in the cache.

use std::ops::Range;

use crate::index;

const WIDTH: u32 = u64::BITS;

/// One bit per number of a fixed row.
#[derive(Debug, Clone)]
pub(crate) struct Bits(Vec<u64>);

impl Bits {
    pub(crate) fn new(len: u32) -> Self {
        Self(vec![0; index(len.div_ceil(WIDTH))])
    }

    /// Is the bit set? A number past the end is not.
    pub(crate) fn test(&self, at: u32) -> bool {
        self.0
            .get(index(at / WIDTH))
            .is_some_and(|word| word & bit(at) != 0)
    }

    pub(crate) fn set(&mut self, at: u32) {
        self.0[index(at / WIDTH)] |= bit(at);
    }

    /// Clears the bit and says whether it was set. A number past the end never was.
    pub(crate) fn clear(&mut self, at: u32) -> bool {
        let Some(word) = self.0.get_mut(index(at / WIDTH)) else {
            return false;
        };
        let was_set = *word & bit(at) != 0;
        *word &= !bit(at);
        was_set
    }

    /// Clears `count` bits from `first` on, if all of them are set; else none of them.
    ///
    /// # Errors
    /// The first bit that is not set. A number past the end never was.
    pub(crate) fn clear_stretch(&mut self, first: u32, count: u32) -> Result<(), u32> {
        if count == 1 {
            return if self.clear(first) {
                Ok(())
            } else {
                Err(first)
            };
        }
        let bits = u32::try_from(self.0.len())
            .ok()
            .and_then(|words| words.checked_mul(WIDTH))
            .unwrap_or(u32::MAX);
        let end = match first.checked_add(count) {
            Some(end) if end <= bits => end,
            _ => {
                let inside = first.min(bits)..bits;
                return Err(self.first_clear(inside).unwrap_or_else(|| first.max(bits)));
            }
        };
        if let Some(clear) = self.first_clear(first..end) {
            return Err(clear);
        }
        for (word, mask) in words(first..end) {
            self.0[word] &= !mask;
        }
        Ok(())
    }

    /// The lowest clear bit of `range`, which lies inside the row.
    fn first_clear(&self, range: Range<u32>) -> Option<u32> {
        let base = range.start / WIDTH * WIDTH;
        words(range)
            .zip((base..).step_by(64))
            .find_map(|((word, mask), base)| {
                let clear = !self.0[word] & mask;
                (clear != 0).then(|| base + clear.trailing_zeros())
            })
    }

    pub(crate) fn set_range(&mut self, range: Range<u32>) {
        if range.len() == 1 {
            return self.set(range.start);
        }
        for (word, mask) in words(range) {
            self.0[word] |= mask;
        }
    }

    /// Sets the lowest `n` clear bits of `range`, which has that many, and tells each of them.
    pub(crate) fn claim(&mut self, range: Range<u32>, mut n: u32, mut tell: impl FnMut(u32)) {
        let mut base = range.start / WIDTH * WIDTH;
        for (word, mask) in words(range) {
            let mut clear = !self.0[word] & mask;
            while clear != 0 && n > 0 {
                self.0[word] |= clear & clear.wrapping_neg();
                tell(base + clear.trailing_zeros());
                clear &= clear - 1;
                n -= 1;
            }
            if n == 0 {
                return;
            }
            base += WIDTH;
        }
        assert!(n == 0, "a page has as many clear bits as free blocks");
    }

    /// The set bits of `range`, ascending.
    pub(crate) fn ones(&self, range: Range<u32>) -> impl Iterator<Item = u32> {
        let base = range.start / WIDTH * WIDTH;
        words(range)
            .zip((base..).step_by(64))
            .flat_map(|((word, mask), base)| {
                let mut set = self.0[word] & mask;
                std::iter::from_fn(move || {
                    let lowest = set.trailing_zeros();
                    if set == 0 {
                        return None;
                    }
                    set &= set - 1;
                    Some(base + lowest)
                })
            })
    }
}

/// A set of small numbers that finds the next member at or above a given one in a few steps: each
/// level says which words of the level below hold anything.
#[derive(Debug, Clone)]
pub(crate) struct Ladder {
    levels: Vec<Vec<u64>>,
}

impl Ladder {
    pub(crate) fn new(len: u32) -> Self {
        let mut levels = Vec::new();
        let mut words = len.div_ceil(WIDTH).max(1);
        loop {
            levels.push(vec![0; index(words)]);
            if words == 1 {
                return Self { levels };
            }
            words = words.div_ceil(WIDTH);
        }
    }

    pub(crate) fn insert(&mut self, mut at: u32) {
        for level in &mut self.levels {
            level[index(at / WIDTH)] |= bit(at);
            at /= WIDTH;
        }
    }

    pub(crate) fn remove(&mut self, mut at: u32) {
        for level in &mut self.levels {
            let word = &mut level[index(at / WIDTH)];
            *word &= !bit(at);
            if *word != 0 {
                return;
            }
            at /= WIDTH;
        }
    }

    /// The smallest member that is at least `from`.
    pub(crate) fn next_from(&self, from: u32) -> Option<u32> {
        let mut at = from;
        for (height, level) in self.levels.iter().enumerate() {
            let word = level.get(index(at / WIDTH))? & (u64::MAX << (at % WIDTH));
            if word != 0 {
                let mut found = at / WIDTH * WIDTH + word.trailing_zeros();
                for lower in self.levels[..height].iter().rev() {
                    found = found * WIDTH + lower[index(found)].trailing_zeros();
                }
                return Some(found);
            }
            at = at / WIDTH + 1;
        }
        None
    }
}

/// The words that `range` touches, each with the bits of it that lie in the range.
fn words(range: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    let Range { start, end } = range;
    let last = if start < end {
        (end - 1) / WIDTH + 1
    } else {
        start / WIDTH
    };
    (start / WIDTH..last).map(move |word| {
        let mut mask = u64::MAX;
        if word == start / WIDTH {
            mask &= u64::MAX << (start % WIDTH);
        }
        if word == end / WIDTH {
            mask &= bit(end) - 1;
        }
        (index(word), mask)
    })
}

const fn bit(at: u32) -> u64 {
    1 << (at % WIDTH)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_stretch_that_ends_past_all_numbers_was_never_set() {
        let mut bits = Bits::new(64);
        bits.set_range(0..64);
        for (first, count, clear) in [
            (u32::MAX, 1, u32::MAX),
            (u32::MAX - 1, 2, u32::MAX - 1),
            (63, 2, 64),
        ] {
            assert_eq!(bits.clear_stretch(first, count), Err(clear));
        }
        assert_eq!(bits.ones(0..64).count(), 64);
    }

    proptest! {
        #[test]
        fn claim_takes_the_lowest_clear_bits_of_the_range_only(
            taken in proptest::collection::btree_set(0_u32..300, 0..200),
            start in 0_u32..300,
            len in 0_u32..300,
            n in 0_usize..300,
        ) {
            let range = start..(start + len).min(300);
            let mut bits = Bits::new(300);
            for &at in &taken {
                bits.set(at);
            }
            let clear: Vec<u32> = range.clone().filter(|at| !taken.contains(at)).collect();
            let wanted = &clear[..n.min(clear.len())];
            let mut told = Vec::new();
            bits.claim(range, u32::try_from(wanted.len()).unwrap(), |at| told.push(at));
            prop_assert_eq!(&told, wanted);
            let now: BTreeSet<u32> = taken.iter().chain(wanted).copied().collect();
            prop_assert_eq!(bits.ones(0..300).collect::<BTreeSet<_>>(), now);
        }

        #[test]
        fn a_range_is_set_exactly(start in 0_u32..300, len in 0_u32..300) {
            let range = start..(start + len).min(300);
            let mut bits = Bits::new(300);
            bits.set_range(range.clone());
            for at in 0..300 {
                prop_assert_eq!(bits.test(at), range.contains(&at));
                prop_assert_eq!(bits.clear(at), range.contains(&at));
            }
            prop_assert!(!bits.test(300) && !bits.clear(u32::MAX));
        }

        #[test]
        fn a_stretch_is_cleared_whole_or_not_at_all(
            clear in proptest::collection::btree_set(0_u32..320, 0..4),
            first in 0_u32..340,
            count in 1_u32..340,
        ) {
            let mut bits = Bits::new(320);
            bits.set_range(0..320);
            for &at in &clear {
                bits.clear(at);
            }
            let before = bits.clone();
            let set = |at: u32| at < 320 && !clear.contains(&at);
            let expected = (first..first + count).find(|&at| !set(at));
            match bits.clear_stretch(first, count) {
                Ok(()) => {
                    prop_assert_eq!(expected, None);
                    for at in 0..320 {
                        prop_assert_eq!(bits.test(at), set(at) && !(first..first + count).contains(&at));
                    }
                }
                Err(at) => {
                    prop_assert_eq!(Some(at), expected);
                    prop_assert_eq!(bits.0, before.0);
                }
            }
        }

        #[test]
        fn ladder_finds_the_next_member(
            changes in proptest::collection::vec((0_u32..9000, any::<bool>()), 0..60),
            from in 0_u32..9100,
        ) {
            let mut ladder = Ladder::new(9000);
            let mut model = BTreeSet::new();
            for (at, insert) in changes {
                if insert {
                    ladder.insert(at);
                    model.insert(at);
                } else {
                    ladder.remove(at);
                    model.remove(&at);
                }
            }
            prop_assert_eq!(ladder.next_from(from), model.range(from..).next().copied());
        }
    }
}
