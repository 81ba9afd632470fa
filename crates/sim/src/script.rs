//! A run as text: what is simulated, and what happens when. One step a line, so that a person can
//! read it and a shrinker can leave lines out.
//!
//! ```text
//! config ranks=2 stages=1 local=1 pools=1 pages=24 …
//! +120 alloc pool=0 as=7 blocks=5
//! +40 lose rank=1 pool=0 to=coordinator skip=0
//! +900 free pool=0 as=7
//! ```
//!
//! Before each step passes the virtual time in front of it, in microseconds. Everything that was
//! drawn at random is in the text; what a step refers to may be missing, and then it does nothing.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

/// What is simulated, from the first moment on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Ranks of each stage.
    pub ranks: u16,
    /// Stages.
    pub stages: u16,
    /// Does the coordinator live inside rank 0? Then there is one stage.
    pub local: bool,
    /// Pools.
    pub pools: u16,
    /// Pages of each pool.
    pub pages: u32,
    /// Blocks of a page.
    pub blocks: u32,
    /// Extents of a page.
    pub extents: u32,
    /// Do cold pages read as zero, instead of faulting?
    pub zero: bool,
    /// Pages of the longest run.
    pub max_run: u32,
    /// Lower and upper bound of the reserve, in pages.
    pub reserve: (u32, u32),
    /// Pages of memory of each device, for all pools together.
    pub memory: u32,
    /// Pages' worth of chunks that came free and each rank keeps to use them again.
    pub kept: u32,
    /// Who knows when work has ended.
    pub epochs: EpochsKept,
    /// Longest wait for another rank, in microseconds.
    pub timeout_us: u64,
    /// After how long a rank without a coordinator empties itself, in microseconds.
    pub orphan_us: u64,
    /// Where delays on the network come from.
    pub delays: u64,
}

/// Who tells when the work that may touch memory has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EpochsKept {
    /// Every rank, by the fences of what was launched there.
    ByRanks,
    /// The coordinator, which hears of it.
    ByCoordinator,
    /// Nobody: the device is synchronised.
    ByNobody,
}

/// A process of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Process {
    /// The coordinator, and the rank in it if there is one.
    Coordinator,
    /// A rank that listens, by its position in the topology.
    Rank(usize),
}

/// Which way a frame travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// From the coordinator.
    ToRank,
    /// From a rank.
    ToCoordinator,
}

/// What becomes of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameFault {
    /// It never arrives.
    Lose,
    /// It arrives twice.
    Twice,
    /// So many bytes of it arrive, and then the connection ends.
    Cut(u64),
    /// It takes so many microseconds longer.
    Late(u64),
}

/// A call of the driver that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverCall {
    /// Memory is not to be had.
    Create,
    /// Fails, and nothing is mapped.
    Map,
    /// Fails, and it stays mapped.
    Unmap,
    /// The device does not answer.
    Synchronize,
}

/// Something that happens. Labels (`as`) name what later steps refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are the words of the format")]
pub enum Step {
    /// A request takes blocks and works on them.
    Alloc { pool: u16, label: u32, blocks: u32 },
    /// It gives all of them back.
    Free { pool: u16, label: u32 },
    /// It gives the last ones back.
    FreeSome { pool: u16, label: u32, blocks: u32 },
    /// It works on its blocks again.
    Touch { pool: u16, label: u32 },
    /// Blocks are set aside.
    Hold { pool: u16, label: u32, blocks: u32 },
    /// What is set aside goes to a request of the same label.
    TakeHeld { pool: u16, label: u32, blocks: u32 },
    /// What is left of it is given back.
    ReleaseHold { pool: u16, label: u32 },
    /// Somebody else takes whole pages of the same pool, beside the block manager.
    TakePages { pool: u16, label: u32, pages: u32 },
    /// And gives them back.
    FreePages { pool: u16, label: u32 },
    /// A limit, in pages.
    Limit { pool: u16, pages: u32 },
    /// Idle memory goes back.
    Trim { pool: u16 },
    /// The reserve is looked after.
    Replenish { pool: u16 },
    /// Doubts are looked after, beside the regular attempts.
    Repair { pool: u16 },
    /// A frame between the coordinator and a rank meets a fault, after `skip` others.
    Frame {
        rank: usize,
        pool: u16,
        way: Way,
        skip: u64,
        fault: FrameFault,
    },
    /// Nothing gets through between the coordinator and a rank for so long.
    Partition { rank: usize, for_us: u64 },
    /// A connection ends.
    Reset { rank: usize, pool: u16 },
    /// A process does nothing for so long.
    Stall { who: Process, for_us: u64 },
    /// A process dies and comes back after so long.
    Die { who: Process, for_us: u64 },
    /// Calls of a rank's driver fail, `times` of them after `skip` others.
    Driver {
        rank: usize,
        call: DriverCall,
        skip: u64,
        times: u64,
    },
    /// Somebody else takes the rest of a device's memory for so long.
    Full { rank: usize, for_us: u64 },
    /// A device takes so many times longer for everything, for so long.
    Slow {
        rank: usize,
        factor: u64,
        for_us: u64,
    },
}

/// A step and the virtual time that passes before it, in microseconds.
pub type Timed = (u64, Step);

/// What is simulated and what happens to it. The whole run follows from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    /// What is simulated.
    pub config: Config,
    /// What happens.
    pub steps: Vec<Timed>,
}

impl Config {
    /// Ranks of all stages.
    #[must_use]
    pub fn all_ranks(&self) -> usize {
        usize::from(self.ranks) * usize::from(self.stages)
    }
}

impl Script {
    /// Reads what [`Display`](fmt::Display) wrote. Empty lines, and what follows a `#`, are
    /// passed over.
    ///
    /// # Errors
    /// The line that makes no sense, and why.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut config = None;
        let mut steps = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let read = match line.strip_prefix("config ") {
                Some(rest) => parse_config(rest).map(|read| config = Some(read)),
                None => parse_step(line).map(|step| steps.push(step)),
            };
            read.map_err(|reason| format!("line {}: {reason}", number + 1))?;
        }
        let config = config.ok_or_else(|| "there is no line with the config".to_owned())?;
        Ok(Self { config, steps })
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Config {
            ranks,
            stages,
            local,
            pools,
            pages,
            blocks,
            extents,
            zero,
            max_run,
            reserve: (reserve_min, reserve_max),
            memory,
            kept,
            epochs,
            timeout_us,
            orphan_us,
            delays,
        } = &self.config;
        let (local, zero) = (u8::from(*local), u8::from(*zero));
        let epochs = match epochs {
            EpochsKept::ByRanks => "ranks",
            EpochsKept::ByCoordinator => "coordinator",
            EpochsKept::ByNobody => "nobody",
        };
        writeln!(
            f,
            "config ranks={ranks} stages={stages} local={local} pools={pools} pages={pages} \
             blocks={blocks} extents={extents} zero={zero} max_run={max_run} reserve_min={reserve_min} \
             reserve_max={reserve_max} memory={memory} kept={kept} epochs={epochs} \
             timeout={timeout_us} orphan={orphan_us} delays={delays}"
        )?;
        for (after, step) in &self.steps {
            writeln!(f, "+{after} {step}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Coordinator => f.write_str("coordinator"),
            Self::Rank(rank) => write!(f, "{rank}"),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alloc {
                pool,
                label,
                blocks,
            } => {
                write!(f, "alloc pool={pool} as={label} blocks={blocks}")
            }
            Self::Free { pool, label } => write!(f, "free pool={pool} as={label}"),
            Self::FreeSome {
                pool,
                label,
                blocks,
            } => {
                write!(f, "free-some pool={pool} as={label} blocks={blocks}")
            }
            Self::Touch { pool, label } => write!(f, "touch pool={pool} as={label}"),
            Self::Hold {
                pool,
                label,
                blocks,
            } => {
                write!(f, "hold pool={pool} as={label} blocks={blocks}")
            }
            Self::TakeHeld {
                pool,
                label,
                blocks,
            } => {
                write!(f, "take-held pool={pool} as={label} blocks={blocks}")
            }
            Self::ReleaseHold { pool, label } => write!(f, "release-hold pool={pool} as={label}"),
            Self::TakePages { pool, label, pages } => {
                write!(f, "take-pages pool={pool} as={label} pages={pages}")
            }
            Self::FreePages { pool, label } => write!(f, "free-pages pool={pool} as={label}"),
            Self::Limit { pool, pages } => write!(f, "limit pool={pool} pages={pages}"),
            Self::Trim { pool } => write!(f, "trim pool={pool}"),
            Self::Replenish { pool } => write!(f, "replenish pool={pool}"),
            Self::Repair { pool } => write!(f, "repair pool={pool}"),
            Self::Frame {
                rank,
                pool,
                way,
                skip,
                fault,
            } => {
                let (word, amount) = match fault {
                    FrameFault::Lose => ("lose", None),
                    FrameFault::Twice => ("twice", None),
                    FrameFault::Cut(bytes) => ("cut", Some(("bytes", bytes))),
                    FrameFault::Late(by_us) => ("late", Some(("by", by_us))),
                };
                let to = match way {
                    Way::ToRank => "rank",
                    Way::ToCoordinator => "coordinator",
                };
                write!(f, "{word} rank={rank} pool={pool} to={to} skip={skip}")?;
                if let Some((name, value)) = amount {
                    write!(f, " {name}={value}")?;
                }
                Ok(())
            }
            Self::Partition { rank, for_us } => write!(f, "partition rank={rank} for={for_us}"),
            Self::Reset { rank, pool } => write!(f, "reset rank={rank} pool={pool}"),
            Self::Stall { who, for_us } => write!(f, "stall who={who} for={for_us}"),
            Self::Die { who, for_us } => write!(f, "die who={who} for={for_us}"),
            Self::Driver {
                rank,
                call,
                skip,
                times,
            } => {
                let call = match call {
                    DriverCall::Create => "create",
                    DriverCall::Map => "map",
                    DriverCall::Unmap => "unmap",
                    DriverCall::Synchronize => "synchronize",
                };
                write!(
                    f,
                    "driver rank={rank} call={call} skip={skip} times={times}"
                )
            }
            Self::Full { rank, for_us } => write!(f, "full rank={rank} for={for_us}"),
            Self::Slow {
                rank,
                factor,
                for_us,
            } => {
                write!(f, "slow rank={rank} factor={factor} for={for_us}")
            }
        }
    }
}

/// The `name=value` pairs of a line.
struct Fields<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Fields<'a> {
    fn read(words: impl Iterator<Item = &'a str>) -> Result<Self, String> {
        words
            .map(|word| {
                word.split_once('=')
                    .ok_or_else(|| format!("{word:?} is no name=value"))
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }

    fn word(&self, name: &str) -> Result<&'a str, String> {
        self.0
            .get(name)
            .copied()
            .ok_or_else(|| format!("{name} is missing"))
    }

    fn number<T: std::str::FromStr>(&self, name: &str) -> Result<T, String> {
        let word = self.word(name)?;
        word.parse()
            .map_err(|_| format!("{name}={word} is no such number"))
    }

    fn one_of<T: Copy>(&self, name: &str, values: &[(&str, T)]) -> Result<T, String> {
        let word = self.word(name)?;
        let found = values.iter().find(|(known, _)| *known == word);
        found.map(|(_, value)| *value).ok_or_else(|| {
            let mut reason = format!("{name}={word} is none of");
            for (known, _) in values {
                let _ = write!(reason, " {known}");
            }
            reason
        })
    }

    fn process(&self) -> Result<Process, String> {
        match self.word("who")? {
            "coordinator" => Ok(Process::Coordinator),
            _ => self.number("who").map(Process::Rank),
        }
    }
}

fn parse_config(rest: &str) -> Result<Config, String> {
    let fields = Fields::read(rest.split_whitespace())?;
    let epochs = [
        ("ranks", EpochsKept::ByRanks),
        ("coordinator", EpochsKept::ByCoordinator),
        ("nobody", EpochsKept::ByNobody),
    ];
    Ok(Config {
        ranks: fields.number("ranks")?,
        stages: fields.number("stages")?,
        local: fields.number::<u8>("local")? != 0,
        pools: fields.number("pools")?,
        pages: fields.number("pages")?,
        blocks: fields.number("blocks")?,
        extents: fields.number("extents")?,
        zero: fields.number::<u8>("zero")? != 0,
        max_run: fields.number("max_run")?,
        reserve: (fields.number("reserve_min")?, fields.number("reserve_max")?),
        memory: fields.number("memory")?,
        // Older scripts do not say, and kept nothing.
        kept: match fields.word("kept") {
            Ok(_) => fields.number("kept")?,
            Err(_) => 0,
        },
        epochs: fields.one_of("epochs", &epochs)?,
        timeout_us: fields.number("timeout")?,
        orphan_us: fields.number("orphan")?,
        delays: fields.number("delays")?,
    })
}

fn parse_step(line: &str) -> Result<Timed, String> {
    let mut words = line.split_whitespace();
    let after = words.next().and_then(|word| word.strip_prefix('+'));
    let after = after
        .and_then(|number| number.parse().ok())
        .ok_or_else(|| "a step begins with + and microseconds".to_owned())?;
    let verb = words.next().ok_or_else(|| "there is no step".to_owned())?;
    let fields = Fields::read(words)?;
    let pool = || fields.number("pool");
    let label = || fields.number("as");
    let blocks = || fields.number("blocks");
    let pages = || fields.number("pages");
    let rank = || fields.number("rank");
    let for_us = || fields.number("for");
    let step = match verb {
        "alloc" => Step::Alloc {
            pool: pool()?,
            label: label()?,
            blocks: blocks()?,
        },
        "free" => Step::Free {
            pool: pool()?,
            label: label()?,
        },
        "free-some" => Step::FreeSome {
            pool: pool()?,
            label: label()?,
            blocks: blocks()?,
        },
        "touch" => Step::Touch {
            pool: pool()?,
            label: label()?,
        },
        "hold" => Step::Hold {
            pool: pool()?,
            label: label()?,
            blocks: blocks()?,
        },
        "take-held" => Step::TakeHeld {
            pool: pool()?,
            label: label()?,
            blocks: blocks()?,
        },
        "release-hold" => Step::ReleaseHold {
            pool: pool()?,
            label: label()?,
        },
        "take-pages" => Step::TakePages {
            pool: pool()?,
            label: label()?,
            pages: pages()?,
        },
        "free-pages" => Step::FreePages {
            pool: pool()?,
            label: label()?,
        },
        "limit" => Step::Limit {
            pool: pool()?,
            pages: pages()?,
        },
        "trim" => Step::Trim { pool: pool()? },
        "replenish" => Step::Replenish { pool: pool()? },
        "repair" => Step::Repair { pool: pool()? },
        "lose" | "twice" | "cut" | "late" => Step::Frame {
            rank: rank()?,
            pool: pool()?,
            way: fields.one_of(
                "to",
                &[("rank", Way::ToRank), ("coordinator", Way::ToCoordinator)],
            )?,
            skip: fields.number("skip")?,
            fault: match verb {
                "lose" => FrameFault::Lose,
                "twice" => FrameFault::Twice,
                "cut" => FrameFault::Cut(fields.number("bytes")?),
                _ => FrameFault::Late(fields.number("by")?),
            },
        },
        "partition" => Step::Partition {
            rank: rank()?,
            for_us: for_us()?,
        },
        "reset" => Step::Reset {
            rank: rank()?,
            pool: pool()?,
        },
        "stall" => Step::Stall {
            who: fields.process()?,
            for_us: for_us()?,
        },
        "die" => Step::Die {
            who: fields.process()?,
            for_us: for_us()?,
        },
        "driver" => Step::Driver {
            rank: rank()?,
            call: fields.one_of(
                "call",
                &[
                    ("create", DriverCall::Create),
                    ("map", DriverCall::Map),
                    ("unmap", DriverCall::Unmap),
                    ("synchronize", DriverCall::Synchronize),
                ],
            )?,
            skip: fields.number("skip")?,
            times: fields.number("times")?,
        },
        "full" => Step::Full {
            rank: rank()?,
            for_us: for_us()?,
        },
        "slow" => Step::Slow {
            rank: rank()?,
            factor: fields.number("factor")?,
            for_us: for_us()?,
        },
        unknown => return Err(format!("no step is called {unknown:?}")),
    };
    Ok((after, step))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::generate;

    #[test]
    fn a_script_reads_what_it_prints() {
        for seed in 0..50 {
            let script = generate(seed, 300);
            assert_eq!(
                Script::parse(&script.to_string()),
                Ok(script),
                "seed {seed}"
            );
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_line() {
        let script = generate(1, 1).to_string();
        for (line, words) in [
            ("alloc pool=0", "a step begins with + and microseconds"),
            ("+1 fly", "no step is called \"fly\""),
            ("+1 trim pool=x", "pool=x is no such number"),
            ("+1 trim", "pool is missing"),
        ] {
            let refused = Script::parse(&format!("{script}{line}\n"));
            let lines = script.lines().count() + 1;
            assert_eq!(refused, Err(format!("line {lines}: {words}")));
        }
        assert!(Script::parse("+1 trim pool=0").is_err());
    }
}
