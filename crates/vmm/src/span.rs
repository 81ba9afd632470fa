//! Checks of offsets and lengths that every driver makes the same way.

use crate::VmmError;

/// A length that a primitive takes: positive and a multiple of the granularity.
pub(crate) fn check_len(len: u64, granularity: u64) -> Result<(), VmmError> {
    if len == 0 || !len.is_multiple_of(granularity) {
        return Err(VmmError::Misaligned {
            value: len,
            granularity,
        });
    }
    Ok(())
}

/// A place of a mapping: aligned, and inside its range.
pub(crate) fn check_place(
    offset: u64,
    len: u64,
    range_len: u64,
    granularity: u64,
) -> Result<(), VmmError> {
    check_len(len, granularity)?;
    if !offset.is_multiple_of(granularity) {
        return Err(VmmError::Misaligned {
            value: offset,
            granularity,
        });
    }
    check_inside(offset, len, range_len)
}

/// Any stretch of a range, aligned or not.
pub(crate) fn check_inside(offset: u64, len: u64, range_len: u64) -> Result<(), VmmError> {
    match offset.checked_add(len) {
        Some(end) if end <= range_len => Ok(()),
        _ => Err(VmmError::OutOfRange {
            offset,
            len,
            range_len,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_at_the_very_end_is_inside_and_one_beyond_is_not() {
        assert_eq!(check_place(12288, 4096, 16384, 4096), Ok(()));
        assert!(matches!(
            check_place(12288, 8192, 16384, 4096),
            Err(VmmError::OutOfRange {
                offset: 12288,
                len: 8192,
                range_len: 16384
            })
        ));
    }

    #[test]
    fn an_end_beyond_the_largest_number_is_outside_not_a_wrap() {
        assert!(matches!(
            check_inside(u64::MAX - 1, 4096, 16384),
            Err(VmmError::OutOfRange { .. })
        ));
    }

    #[test]
    fn zero_and_odd_lengths_are_misaligned_but_offset_zero_is_fine() {
        assert!(matches!(
            check_len(0, 4096),
            Err(VmmError::Misaligned { value: 0, .. })
        ));
        assert!(matches!(
            check_len(4097, 4096),
            Err(VmmError::Misaligned { .. })
        ));
        assert_eq!(check_place(0, 4096, 4096, 4096), Ok(()));
        assert!(matches!(
            check_place(1, 4096, 16384, 4096),
            Err(VmmError::Misaligned { value: 1, .. })
        ));
    }
}
