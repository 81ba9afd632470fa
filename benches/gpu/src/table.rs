//! The rows as a table, also fit for a Markdown file.

use std::fmt::Write;

use crate::report::{Document, Row, Summary};

const HEAD: [&str; 9] = [
    "row",
    "unit",
    "n",
    "median",
    "p99",
    "floor",
    "ours/floor",
    "other",
    "other/ours",
];

/// Every row of `document`, with the row of the same work of another system, if there is one.
pub(crate) fn table(document: &Document, beside: &[Row]) -> String {
    let mut lines = vec![HEAD.map(str::to_owned)];
    let mut failures = String::new();
    for row in &document.rows {
        if let Some(error) = &row.error {
            let _ = writeln!(failures, "{}: {error}", row.name);
            continue;
        }
        lines.push(line(row, other(row, beside)));
    }
    let widths: Vec<usize> = (0..HEAD.len())
        .map(|column| {
            lines
                .iter()
                .map(|line| line[column].len())
                .fold(3, usize::max)
        })
        .collect();
    let mut out = document.machine.describe();
    out.push('\n');
    for (index, line) in lines.iter().enumerate() {
        push_line(&mut out, line, &widths);
        if index == 0 {
            let rule: Vec<String> = widths
                .iter()
                .enumerate()
                .map(|(column, &width)| match column {
                    0 | 1 => "-".repeat(width),
                    _ => format!("{}:", "-".repeat(width - 1)),
                })
                .collect();
            push_line(&mut out, &rule, &widths);
        }
    }
    if !failures.is_empty() {
        let _ = write!(out, "\nNot measured:\n{failures}");
    }
    out
}

/// The row of another system that does the same work as `row`.
fn other<'a>(row: &Row, beside: &'a [Row]) -> Option<&'a Row> {
    let name = row.beside.as_ref().unwrap_or(&row.name);
    beside
        .iter()
        .find(|other| other.name == *name && other.unit == row.unit)
}

fn line(row: &Row, other: Option<&Row>) -> [String; 9] {
    let none = || "-".to_owned();
    let ours = Summary::of(&row.samples);
    let floor = Summary::of(&row.floor);
    let other = other.and_then(|other| Summary::of(&other.samples));
    let median = |of: Option<Summary>| of.map_or_else(none, |s| figure(s.median));
    let ratio = |of: Option<Summary>, to: Option<Summary>| match (of, to) {
        (Some(of), Some(to)) if to.median > 0.0 => ratio(of.median / to.median),
        _ => none(),
    };
    [
        row.name.clone(),
        row.unit.clone(),
        row.samples.len().to_string(),
        median(ours),
        ours.map_or_else(none, |s| figure(s.p99)),
        median(floor),
        ratio(ours, floor),
        median(other),
        ratio(other, ours),
    ]
}

fn push_line(out: &mut String, cells: &[String], widths: &[usize]) {
    for (column, (cell, &width)) in cells.iter().zip(widths).enumerate() {
        let _ = match column {
            0 | 1 => write!(out, "| {cell:<width$} "),
            _ => write!(out, "| {cell:>width$} "),
        };
    }
    out.push_str("|\n");
}

/// Three digits or so, and whole numbers from a hundred on.
fn figure(value: f64) -> String {
    match value {
        v if v.fract() == 0.0 || v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 1.0 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}

fn ratio(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Machine;

    #[test]
    fn a_row_stands_beside_its_floor_and_the_other_systems_row_of_the_same_unit() {
        let mut ours = Row::micros("grow-1-wide", "").beside("grow-1");
        ours.push_pair(60.0, 50.0);
        let mut lonely = Row::new("grow-1", "bytes", "");
        lonely.push(0.0);
        let failed = Row {
            error: Some("the device is full".to_owned()),
            ..Row::micros("cold", "")
        };
        let document = Document {
            machine: Machine::default(),
            rows: vec![ours, lonely, failed],
        };
        let mut other = Row::micros("grow-1", "");
        other.push(180.0);

        let text = table(&document, &[other]);

        let cells = |name: &str| -> Vec<String> {
            let start = format!("| {name} ");
            let line = text.lines().find(|line| line.starts_with(&start)).unwrap();
            line.split('|').map(|cell| cell.trim().to_owned()).collect()
        };
        assert_eq!(
            cells("grow-1-wide")[2..10],
            ["us", "1", "60", "60", "50", "1.20", "180", "3.00"]
        );
        assert_eq!(
            cells("grow-1")[2..10],
            ["bytes", "1", "0", "0", "-", "-", "-", "-"]
        );
        assert!(
            text.ends_with("Not measured:\ncold: the device is full\n"),
            "{text}"
        );
    }
}
