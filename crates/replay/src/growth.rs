//! Whether the processes of a replay grow while it goes on: memory, descriptors and mappings, as the
//! system counts them.
//!
//! What a pool has mapped comes and goes with the requests, so it is told apart from the rest by what
//! the system says of each mapping. The rest has no reason to change.

use std::fs;
use std::io;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What the system counts of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProcessFigures {
    /// Memory of its own: heap and stacks. Pages of a pool are shared with a file or a device, and
    /// are not in here.
    pub anonymous_bytes: u64,
    /// All memory that is resident, a pool's pages on the host driver with it.
    pub resident_bytes: u64,
    /// Open descriptors.
    pub descriptors: u64,
    /// Mappings other than those of pools.
    pub mappings: u64,
    /// Mappings of pools: memory, and addresses that are reserved and have none. They follow what is
    /// mapped.
    pub pool_mappings: u64,
}

/// One process over a replay by the clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessGrowth {
    /// Which: `replay`, or a rank of a model.
    pub process: String,
    /// Means over the first quarter of the samples.
    pub first: ProcessFigures,
    /// Means over the last quarter.
    pub last: ProcessFigures,
}

/// All processes over a replay by the clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    /// Seconds between two samples.
    pub every_s: f64,
    /// Seconds at the start that count for nothing: a tenth of the run.
    pub warm_up_s: f64,
    /// Samples after that.
    pub samples: u32,
    /// Bytes mapped on one rank, all models together: mean of the first quarter, and of the last.
    pub mapped_bytes: [u64; 2],
    /// Each process.
    pub processes: Vec<ProcessGrowth>,
}

/// Looks at processes now and then.
#[derive(Debug)]
pub(crate) struct Growing {
    every: Duration,
    next_at: Duration,
    names: Vec<String>,
    samples: Vec<Look>,
}

#[derive(Debug)]
struct Look {
    at: Duration,
    mapped_bytes: u64,
    processes: Vec<ProcessFigures>,
}

impl ProcessFigures {
    /// Those of process `id`.
    ///
    /// # Errors
    /// It is gone, or belongs to somebody else.
    pub fn of(id: u32) -> io::Result<Self> {
        let read = |what| fs::read_to_string(format!("/proc/{id}/{what}"));
        let descriptors = fs::read_dir(format!("/proc/{id}/fd"))?.count() as u64;
        let memory = read("smaps_rollup")?;
        let (pool_mappings, mappings) = count_mappings(&read("maps")?);
        Ok(Self {
            anonymous_bytes: kibibytes(&memory, "Anonymous:"),
            resident_bytes: kibibytes(&memory, "Rss:"),
            descriptors,
            mappings,
            pool_mappings,
        })
    }

    fn mean<'f>(figures: impl Iterator<Item = &'f Self>) -> Self {
        let mut sum = Self::default();
        let mut count = 0;
        for one in figures {
            let mut one = *one;
            count += 1;
            for (sum, add) in sum.each().into_iter().zip(one.each()) {
                *sum += *add;
            }
        }
        for sum in sum.each() {
            *sum = sum.checked_div(count).unwrap_or(0);
        }
        sum
    }

    fn each(&mut self) -> [&mut u64; 5] {
        [
            &mut self.anonymous_bytes,
            &mut self.resident_bytes,
            &mut self.descriptors,
            &mut self.mappings,
            &mut self.pool_mappings,
        ]
    }
}

impl Growing {
    /// Looks every `every`.
    pub(crate) const fn new(every: Duration) -> Self {
        Self {
            every,
            next_at: Duration::ZERO,
            names: Vec::new(),
            samples: Vec::new(),
        }
    }

    /// Is it time to look?
    pub(crate) fn is_due(&self, now: Duration) -> bool {
        now >= self.next_at
    }

    /// A look at these processes, by name and id. One that is gone, for another to take its place,
    /// spoils the look, not the run.
    pub(crate) fn look(&mut self, now: Duration, mapped_bytes: u64, processes: Vec<(String, u32)>) {
        self.next_at = now + self.every;
        let (names, ids): (Vec<_>, Vec<_>) = processes.into_iter().unzip();
        match ids.into_iter().map(ProcessFigures::of).collect() {
            Ok(processes) => {
                self.names = names;
                self.samples.push(Look {
                    at: now,
                    mapped_bytes,
                    processes,
                });
            }
            Err(error) => tracing::debug!(%error, "no look at the processes"),
        }
    }

    /// What came of it up to `end`, when the last request arrived: from then on all only shrinks.
    /// `None` with less than four samples, of which there are no quarters.
    pub(crate) fn conclude(self, end: Duration) -> Option<Growth> {
        let warm_up = end / 10;
        let looks: Vec<&Look> = self
            .samples
            .iter()
            .filter(|look| look.at >= warm_up && look.at <= end)
            .collect();
        let quarter = looks.len() / 4;
        if quarter == 0 {
            return None;
        }
        let (first, last) = (&looks[..quarter], &looks[looks.len() - quarter..]);
        let mapped = |looks: &[&Look]| {
            let sum: u64 = looks.iter().map(|look| look.mapped_bytes).sum();
            sum / looks.len() as u64
        };
        let mean = |looks: &[&Look], process: usize| {
            ProcessFigures::mean(looks.iter().filter_map(|look| look.processes.get(process)))
        };
        let processes = self
            .names
            .iter()
            .enumerate()
            .map(|(index, name)| ProcessGrowth {
                process: name.clone(),
                first: mean(first, index),
                last: mean(last, index),
            });
        Some(Growth {
            every_s: self.every.as_secs_f64(),
            warm_up_s: warm_up.as_secs_f64(),
            samples: u32::try_from(looks.len()).unwrap_or(u32::MAX),
            mapped_bytes: [mapped(first), mapped(last)],
            processes: processes.collect(),
        })
    }
}

/// The number on the line of a `smaps_rollup` that begins with `name`, in bytes.
fn kibibytes(text: &str, name: &str) -> u64 {
    let rest = text.lines().find_map(|line| line.strip_prefix(name));
    let number = rest.and_then(|rest| rest.trim().strip_suffix("kB"));
    let number = number.and_then(|number| number.trim().parse::<u64>().ok());
    number.unwrap_or(0) * 1024
}

/// Of the lines of a `maps`, those of pools, and the others. A pool's memory is a file without a name
/// in a folder, or a device; its addresses without memory are anonymous and closed to everybody.
fn count_mappings(maps: &str) -> (u64, u64) {
    let (mut pools, mut others) = (0, 0);
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let access = words.nth(1).unwrap_or_default();
        let path = words.nth(3).unwrap_or_default();
        let is_memory = path.starts_with("/memfd:") || path.starts_with("/dev/nvidia");
        let is_reserved = access == "---p" && path.is_empty();
        if is_memory || is_reserved {
            pools += 1;
        } else {
            others += 1;
        }
    }
    (pools, others)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_pools_are_told_from_others() {
        let maps = "\
7f00-7f01 r-xp 00000000 fe:00 12 /usr/lib/libc.so.6
7f01-7f02 ---p 00001000 fe:00 12 /usr/lib/libc.so.6
7f02-7f03 rw-p 00000000 00:00 0
7f03-7f04 ---p 00000000 00:00 0
7f04-7f05 rw-s 00200000 00:01 99 /memfd:kvcached-host (deleted)
7f05-7f06 rw-s 00000000 00:05 7 /dev/nvidiactl
7ffc-7ffd rw-p 00000000 00:00 0 [stack]
";
        assert_eq!(count_mappings(maps), (3, 4));
        assert_eq!(count_mappings(""), (0, 0));
    }

    #[test]
    fn memory_is_read_in_kibibytes() {
        let rollup = "5600-7ffd ---p 00000000 00:00 0 [rollup]\n\
                      Rss:                2048 kB\nPss: 1 kB\nAnonymous:           512 kB\n";
        assert_eq!(kibibytes(rollup, "Rss:"), 2 << 20);
        assert_eq!(kibibytes(rollup, "Anonymous:"), 512 << 10);
        assert_eq!(kibibytes(rollup, "Swap:"), 0);
    }

    #[test]
    fn what_this_process_takes_is_seen() {
        let id = std::process::id();
        let before = ProcessFigures::of(id).expect("this process is there");
        assert!(before.resident_bytes >= before.anonymous_bytes && before.anonymous_bytes > 0);
        let files: Vec<_> = (0..40)
            .map(|_| fs::File::open("/proc/self/maps").expect("readable"))
            .collect();
        let memory = vec![1_u8; 64 << 20];
        let after = ProcessFigures::of(id).expect("this process is there");
        // Other tests in this process open and close some too.
        assert!(
            after.descriptors >= before.descriptors + 20,
            "{before:?} {after:?}"
        );
        assert!(
            after.anonymous_bytes >= before.anonymous_bytes + (32 << 20),
            "{before:?} {after:?}"
        );
        drop((files, memory));
        assert!(ProcessFigures::of(u32::MAX).is_err(), "no such process");
    }

    #[test]
    fn quarters_leave_the_start_and_the_end_out() {
        let second = Duration::from_secs;
        let mut growing = Growing::new(second(5));
        let figures = |descriptors| ProcessFigures {
            descriptors,
            ..ProcessFigures::default()
        };
        for at in (0..=120).step_by(5) {
            growing.names = vec!["replay".to_owned()];
            growing.samples.push(Look {
                at: second(at),
                mapped_bytes: at,
                processes: vec![figures(100 + at)],
            });
        }
        let growth = growing.conclude(second(100)).expect("enough samples");
        // 10, 15, … 100: nineteen samples, quarters of four.
        assert_eq!((growth.samples, growth.warm_up_s), (19, 10.0));
        assert_eq!(
            growth.processes[0].first.descriptors,
            100 + (10 + 15 + 20 + 25) / 4
        );
        assert_eq!(
            growth.processes[0].last.descriptors,
            100 + (85 + 90 + 95 + 100) / 4
        );
        assert_eq!(growth.mapped_bytes, [17, 92]);
        assert_eq!(Growing::new(second(5)).conclude(second(100)), None);
    }

    #[test]
    fn a_process_that_is_gone_spoils_one_look_only() {
        let mut growing = Growing::new(Duration::from_secs(5));
        let own = ("replay".to_owned(), std::process::id());
        growing.look(
            Duration::ZERO,
            0,
            vec![own.clone(), ("gone".to_owned(), u32::MAX)],
        );
        assert!(growing.samples.is_empty() && !growing.is_due(Duration::from_secs(4)));
        growing.look(Duration::from_secs(5), 0, vec![own]);
        assert_eq!(growing.samples.len(), 1);
    }
}
