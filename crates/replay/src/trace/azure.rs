//! Azure LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens`, the time as a civil date
//! (`2023-11-16 18:15:46.6805900`, in the release of 2024 followed by `+00:00`).

use std::time::Duration;

use super::{
    Fault, Request, Timed, lines,
    table::{Field, Header, Place, Row},
};

const EXPECTED_TIME: &str = "a time as \"YYYY-MM-DD HH:MM:SS.ffffff\", years 1970 to 9999";

pub(super) fn is_header(line: &str) -> bool {
    columns(line).is_some()
}

pub(super) fn parse(text: &str) -> Result<Vec<Timed>, Fault> {
    let mut lines = lines(text);
    let Some([time, input, output]) = lines.next().and_then(|header| columns(header.text)) else {
        return Ok(Vec::new());
    };
    lines
        .map(|line| {
            let row = Row::parse(line);
            let at = timestamp(time.field(&row)?)?;
            let request = Request {
                arrival: Duration::ZERO,
                input_tokens: input.field(&row)?.tokens()?,
                output_tokens: output.field(&row)?.tokens()?,
                prefix: Vec::new(),
                model: None,
            };
            Ok(Timed { at, request })
        })
        .collect()
}

fn columns(line: &str) -> Option<[Place; 3]> {
    let header = Header::parse(line);
    Some([
        header.find("TIMESTAMP")?,
        header.find("ContextTokens")?,
        header.find("GeneratedTokens")?,
    ])
}

fn timestamp(field: Field<'_>) -> Result<Duration, Fault> {
    since_1970(field.text).ok_or_else(|| field.fault(EXPECTED_TIME))
}

/// Time since 1970-01-01 00:00 UTC. A trace may run over midnight, the end of a month or a leap
/// day, so the date counts and not only the time of day.
fn since_1970(text: &str) -> Option<Duration> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let mut date = date.split('-');
    let year = number(date.next()?, 4)?;
    let month = number(date.next()?, 2)?;
    let day = number(date.next()?, 2)?;
    if date.next().is_some() || !(1970..=9999).contains(&year) {
        return None;
    }
    if !(1..=12).contains(&month) || !(1..=days_in(year, month)).contains(&day) {
        return None;
    }

    let (time, east_minutes) = split_zone(time)?;
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let mut clock = clock.split(':');
    let hour = number(clock.next()?, 2)?;
    let minute = number(clock.next()?, 2)?;
    let second = number(clock.next()?, 2)?;
    if clock.next().is_some() || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    if fraction.is_empty() || fraction.len() > 9 {
        return None;
    }
    let nanos =
        number(fraction, fraction.len())? * 10_u32.pow(9 - u32::try_from(fraction.len()).ok()?);

    let local_seconds = i64::from(days_since_1970(year, month, day)) * 86_400
        + i64::from(hour * 3_600 + minute * 60 + second);
    let seconds = u64::try_from(local_seconds - i64::from(east_minutes) * 60).ok()?;
    Some(Duration::new(seconds, nanos))
}

/// The time of day, and how many minutes its clock is ahead of UTC.
fn split_zone(time: &str) -> Option<(&str, i32)> {
    if let Some(time) = time.strip_suffix('Z') {
        return Some((time, 0));
    }
    let Some(at) = time.find(['+', '-']) else {
        return Some((time, 0));
    };
    let (time, zone) = time.split_at(at);
    let (hours, minutes) = zone.get(1..)?.split_once(':')?;
    let (hours, minutes) = (number(hours, 2)?, number(minutes, 2)?);
    if hours > 23 || minutes > 59 {
        return None;
    }
    let minutes = i32::try_from(hours * 60 + minutes).ok()?;
    Some((
        time,
        if zone.starts_with('-') {
            -minutes
        } else {
            minutes
        },
    ))
}

/// Exactly `digits` decimal digits; at most nine, so it fits.
fn number(text: &str, digits: usize) -> Option<u32> {
    if text.len() != digits || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

fn is_leap(year: u32) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

fn days_in(year: u32, month: u32) -> u32 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if is_leap(year) => 29,
        2 => 28,
        _ => 31,
    }
}

fn days_since_1970(year: u32, month: u32, day: u32) -> u32 {
    // Leap days of the years 1 to `year - 1`.
    let leap_days_before = |year: u32| (year - 1) / 4 - (year - 1) / 100 + (year - 1) / 400;
    let years = (year - 1970) * 365 + leap_days_before(year) - leap_days_before(1970);
    let months: u32 = (1..month).map(|month| days_in(year, month)).sum();
    years + months + day - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::trace::{Format, Trace};

    const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n";

    fn parse(rows: &str) -> Result<Trace, String> {
        Trace::parse("azure.csv", format!("{HEADER}{rows}").as_bytes()).map_err(|e| e.to_string())
    }

    #[test]
    fn the_published_form_is_read() {
        let trace = parse(
            "2023-11-16 18:15:46.6805900,374,44\r\n\r\n2023-11-16 18:15:50.9951690,396,109\r\n",
        )
        .expect("a good trace");
        assert_eq!(trace.format, Format::Azure);
        assert_eq!(trace.requests.len(), 2);
        assert_eq!(
            trace.requests[1].arrival,
            Duration::from_nanos(4_314_579_000)
        );
        assert_eq!(
            (
                trace.requests[1].input_tokens,
                trace.requests[1].output_tokens
            ),
            (396, 109)
        );
    }

    #[test]
    fn a_byte_order_mark_and_lf_make_no_difference() {
        let crlf = format!("{HEADER}2023-11-16 18:15:46.5,1,2\r\n");
        let lf = format!("\u{feff}{}", crlf.replace('\r', ""));
        let read = |text: &str| Trace::parse("t", text.as_bytes()).expect("a good trace");
        assert_eq!(read(&crlf), read(&lf));
    }

    #[test]
    fn time_goes_on_across_midnight_month_ends_and_leap_days() {
        for (before, after) in [
            ("2023-11-16 23:59:59.5", "2023-11-17 00:00:00.5"),
            ("2023-11-30 23:59:59.5", "2023-12-01 00:00:00.5"),
            ("2023-12-31 23:59:59.5", "2024-01-01 00:00:00.5"),
            ("2024-02-28 23:59:59.5", "2024-02-29 00:00:00.5"),
            ("2024-02-29 23:59:59.5", "2024-03-01 00:00:00.5"),
            ("2023-02-28 23:59:59.5", "2023-03-01 00:00:00.5"),
            ("2024-05-10 00:00:59.5+00:00", "2024-05-10 02:01:00.5+02:00"),
            ("2024-05-10 00:00:59.5Z", "2024-05-09T23:31:00.5-00:30"),
        ] {
            let trace = parse(&format!("{before},1,1\n{after},1,1\n")).expect("a good trace");
            assert_eq!(
                trace.requests[1].arrival,
                Duration::from_secs(1),
                "{before} to {after}"
            );
        }
        let epoch = since_1970("2023-11-16 00:00:00").expect("a date");
        assert_eq!(epoch, Duration::from_secs(1_700_092_800));
    }

    #[test]
    fn a_bad_value_is_named_with_line_and_column() {
        let good = "2023-11-16 18:15:46.68,374,44\n";
        for (row, column, found) in [
            (
                "2023-11-16 18:15:46.68,-3,44",
                "column 2 (ContextTokens)",
                "found \"-3\"",
            ),
            (
                "2023-11-16 18:15:46.68,+3,44",
                "column 2 (ContextTokens)",
                "found \"+3\"",
            ),
            (
                "2023-11-16 18:15:46.68,3,99999999999999999999",
                "column 3 (Gen",
                "found \"999",
            ),
            (
                "2023-11-16 18:15:46.68,3,16777217",
                "column 3 (Gen",
                "from 0 to 16777216",
            ),
            (
                "2023-11-16 18:15:46.68,3.5,1",
                "column 2 (ContextTokens)",
                "found \"3.5\"",
            ),
            (
                "2023-11-16 18:15:46.68,NaN,1",
                "column 2 (ContextTokens)",
                "found \"NaN\"",
            ),
            (
                "2023-11-16 18:15:46.68,,1",
                "column 2 (ContextTokens)",
                "found nothing",
            ),
            (
                "2023-11-16 18:15:46.68,374",
                "column 3 (GeneratedTokens)",
                "found the end of the",
            ),
            (
                "2023-11-16 18:15",
                "column 1 (TIMESTAMP)",
                "expected a time as",
            ),
            (
                "yesterday,1,1",
                "column 1 (TIMESTAMP)",
                "found \"yesterday\"",
            ),
            ("inf,1,1", "column 1 (TIMESTAMP)", "found \"inf\""),
            (
                "2023-02-29 18:15:46.68,1,1",
                "column 1 (TIMESTAMP)",
                "found \"2023-02-29",
            ),
            (
                "2023-13-01 18:15:46.68,1,1",
                "column 1 (TIMESTAMP)",
                "expected a time as",
            ),
            (
                "2023-11-16 24:00:00.0,1,1",
                "column 1 (TIMESTAMP)",
                "expected a time as",
            ),
            (
                "1969-12-31 24:00:00.0,1,1",
                "column 1 (TIMESTAMP)",
                "expected a time as",
            ),
            (
                "2023-11-16 18:15:46.0123456789,1,1",
                "column 1 (TIMESTAMP)",
                "expected a time as",
            ),
            (
                "1970-01-01 00:00:00+01:00,1,1",
                "column 1 (TIMESTAMP)",
                "expected a time as",
            ),
        ] {
            let message = parse(&format!("{good}{row}\n{good}")).expect_err(row);
            assert!(message.starts_with("azure.csv, line 3, "), "{message}");
            assert!(
                message.contains(column) && message.contains(found),
                "{row}: {message}"
            );
        }
    }

    #[test]
    fn a_header_alone_is_an_error() {
        assert_eq!(
            parse("").expect_err("no requests"),
            "azure.csv, line 1: expected requests after the header, found none"
        );
    }

    #[test]
    fn zero_tokens_are_kept_as_the_trace_says() {
        let trace = parse("2023-11-16 18:15:46.68,0,0\n").expect("a good trace");
        assert_eq!(
            (
                trace.requests[0].input_tokens,
                trace.requests[0].output_tokens
            ),
            (0, 0)
        );
    }

    proptest! {
        /// Counting days one by one and by formula agree: the next day is always one more.
        #[test]
        fn days_are_consecutive(year in 1970_u32..9999, month in 1_u32..=12, day in 1_u32..=31) {
            prop_assume!(day <= days_in(year, month));
            let (mut next_year, mut next_month, mut next_day) = (year, month, day + 1);
            if next_day > days_in(year, month) {
                (next_month, next_day) = (month + 1, 1);
            }
            if next_month > 12 {
                (next_year, next_month) = (year + 1, 1);
            }
            prop_assert_eq!(
                days_since_1970(year, month, day) + 1,
                days_since_1970(next_year, next_month, next_day)
            );
        }
    }
}
