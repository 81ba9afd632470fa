//! What was measured, as values and as JSON: every sample, so that anybody can look again.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Outcome;

/// A run of the benchmark, or what another system's says in the same format.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Document {
    /// Where it ran.
    #[serde(default)]
    pub(crate) machine: Machine,
    /// What came of it.
    pub(crate) rows: Vec<Row>,
}

/// The machine and the build.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Machine {
    device: String,
    device_memory_bytes: u64,
    driver: String,
    cpu: String,
    cpus: usize,
    kernel: String,
    revision: String,
    date: String,
}

/// One kind of work, each sample of it once through us and once by the driver alone.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Its name.
    pub(crate) name: String,
    /// `us`, `bytes` or `ratio`.
    pub(crate) unit: String,
    /// What exactly was done.
    #[serde(default)]
    pub(crate) note: String,
    /// Ours.
    #[serde(default)]
    pub(crate) samples: Vec<f64>,
    /// The driver's calls for the same; empty where there are none.
    #[serde(default)]
    pub(crate) floor: Vec<f64>,
    /// The row of another system that does the same work, if it is called otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) beside: Option<String>,
    /// Why there is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
}

/// What a series of samples comes to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Summary {
    pub(crate) count: usize,
    pub(crate) median: f64,
    pub(crate) p99: f64,
}

impl Document {
    /// Reads what [`to_json`](Self::to_json) wrote, or another system's.
    pub(crate) fn read(file: &Path) -> Outcome<Self> {
        let text = fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
        Ok(serde_json::from_str(&text).map_err(|e| format!("{}: {e}", file.display()))?)
    }

    /// All of it, with times to the nanosecond.
    pub(crate) fn to_json(&self) -> Outcome<String> {
        Ok(serde_json::to_string(self)?)
    }
}

impl Machine {
    /// This machine, as far as the system tells.
    pub(crate) fn of_this(device: &str, memory_bytes: u64, revision: &str, date: &str) -> Self {
        let first_line = |path: &str, key: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            let line = text.lines().find(|line| line.contains(key));
            let value = line.unwrap_or("unknown").trim();
            match value.split_once(':') {
                Some((_, value)) => value.trim().to_owned(),
                None => value.to_owned(),
            }
        };
        Self {
            device: device.to_owned(),
            device_memory_bytes: memory_bytes,
            driver: first_line("/proc/driver/nvidia/version", "Module"),
            cpu: first_line("/proc/cpuinfo", "model name"),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: first_line("/proc/sys/kernel/osrelease", "."),
            revision: revision.to_owned(),
            date: date.to_owned(),
        }
    }

    /// In a few lines, for above a table.
    pub(crate) fn describe(&self) -> String {
        format!(
            "{}, {:.0} GiB, driver: {}\n{}, {} CPUs, Linux {}\nrevision {}, {}\n",
            self.device,
            bytes(self.device_memory_bytes) / bytes(1 << 30),
            self.driver,
            self.cpu,
            self.cpus,
            self.kernel,
            self.revision,
            self.date
        )
    }
}

impl Row {
    /// Times in microseconds.
    pub(crate) fn micros(name: impl Into<String>, note: impl Into<String>) -> Self {
        Self::new(name, "us", note)
    }

    /// A row that is still without samples.
    pub(crate) fn new(
        name: impl Into<String>,
        unit: impl Into<String>,
        note: impl Into<String>,
    ) -> Self {
        Self {
            name: name.into(),
            unit: unit.into(),
            note: note.into(),
            samples: Vec::new(),
            floor: Vec::new(),
            beside: None,
            error: None,
        }
    }

    /// The same, to stand beside that row of another system.
    pub(crate) fn beside(mut self, row: impl Into<String>) -> Self {
        self.beside = Some(row.into());
        self
    }

    /// Adds a sample, to the nanosecond.
    pub(crate) fn push(&mut self, sample: f64) {
        self.samples.push(rounded(sample));
    }

    /// Adds a sample and what its floor took.
    pub(crate) fn push_pair(&mut self, sample: f64, floor: f64) {
        self.push(sample);
        self.floor.push(rounded(floor));
    }
}

impl Summary {
    /// Median and 99th percentile (the smallest sample that 99 of 100 do not exceed); `None` of
    /// nothing.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let upper = *sorted.get(count / 2)?;
        let lower = sorted[(count - 1) / 2];
        Some(Self {
            count,
            median: f64::midpoint(lower, upper),
            p99: sorted[(99 * count).div_ceil(100) - 1],
        })
    }
}

fn rounded(sample: f64) -> f64 {
    (sample * 1e4).round() / 1e4
}

/// A number of bytes to calculate with; exact up to 8 PiB.
#[expect(clippy::cast_precision_loss, reason = "no device has 8 PiB of memory")]
pub(crate) fn bytes(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_median_and_99th_percentile() {
        let samples: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        let summary = Summary::of(&samples);
        let expected = Summary {
            count: 200,
            median: 100.5,
            p99: 198.0,
        };
        assert_eq!(summary, Some(expected));
        assert_eq!(
            Summary::of(&[7.0]).map(|s| (s.median, s.p99)),
            Some((7.0, 7.0))
        );
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn what_is_written_is_read_again_and_other_systems_may_say_more_or_less() {
        let mut row = Row::micros("grow-1-contiguous", "one page").beside("other");
        row.push_pair(1.23456, 1.0);
        let document = Document {
            machine: Machine::of_this("a card", 1 << 37, "abc", "today"),
            rows: vec![row],
        };
        let again: Document = serde_json::from_str(&document.to_json().unwrap()).unwrap();
        assert_eq!(again.rows[0].samples, [1.2346]);
        assert_eq!(again.rows[0].floor, [1.0]);
        assert_eq!(again.rows[0].beside.as_deref(), Some("other"));

        let other = r#"{"commit": "x", "rows": [{"name": "warm-1", "unit": "us", "pages": 3,
            "samples": [4]}, {"name": "warm-64", "unit": "us", "error": "no time left"}]}"#;
        let other: Document = serde_json::from_str(other).unwrap();
        assert_eq!(other.rows[0].samples, [4.0]);
        assert!(other.rows[1].samples.is_empty());
    }
}
