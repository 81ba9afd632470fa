//! From a seed to a script: which engine, what it does, and what goes wrong meanwhile.

use crate::random::Random;
use crate::script::{
    Config, DriverCall, EpochsKept, FrameFault, Process, Script, Step, Timed, Way,
};

/// How much goes wrong.
#[derive(Debug, Clone, Copy)]
struct Weather {
    /// Steps in a hundred that are faults.
    faults: u64,
    /// Faults in a hundred that end a process.
    deaths: u64,
}

/// The script of `seed`, with `steps` steps.
#[must_use]
pub fn generate(seed: u64, steps: usize) -> Script {
    let mut random = Random::new(seed ^ 0x6b76_6361_6368_6564);
    let config = config(&mut random);
    let weather = Weather {
        faults: random.pick(&[3, 6, 12, 25]),
        deaths: random.pick(&[2, 5, 10]),
    };
    let mut taken = Taken::new(config.pools);
    let mut drawn: Vec<Timed> = Vec::with_capacity(steps);
    while drawn.len() < steps {
        let struck = random.chance(weather.faults);
        let step = if struck {
            fault(&mut random, &config, weather)
        } else {
            work(&mut random, &config, &mut taken)
        };
        drawn.push((pause(&mut random), step));
        // Troubles do not come alone: what mends one of them is met by the next.
        if let Step::Die { who, .. } | Step::Stall { who, .. } = step
            && random.chance(50)
        {
            drawn.push((random.below(100), another(&mut random, &config, who)));
        }
    }
    drawn.truncate(steps);
    Script {
        config,
        steps: drawn,
    }
}

fn config(random: &mut Random) -> Config {
    let local = random.chance(50);
    let (ranks, stages) = if local {
        (random.below(4) + 1, 1)
    } else {
        random.pick(&[(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2)])
    };
    let pools = random.pick(&[1, 1, 2, 3]);
    let pages = random.small(8, 32);
    let reserve_min = random.pick(&[0, 0, 1, 3]);
    // Longer than the longest batch takes a rank that nothing slows down: a shorter one would be
    // missed again and again.
    let timeout_us = random.pick(&[20_000, 50_000]);
    // Of its own, so that what is drawn next does not depend on it.
    let kept = random.clone().pick(&[0, 0, 4, 1_000]);
    Config {
        ranks: u16::try_from(ranks).expect("four at most"),
        stages,
        local,
        pools,
        pages,
        blocks: random.pick(&[1, 2, 3, 4]),
        extents: random.pick(&[1, 1, 2, 4]),
        zero: random.chance(25),
        max_run: random.pick(&[1, 2, 4, 8, 64]),
        reserve: (reserve_min, reserve_min + random.small(0, 4)),
        memory: match random.below(3) {
            // Never the limit, at times the limit, often the limit.
            0 => pages * u32::from(pools) + 8,
            1 => pages * u32::from(pools) * 3 / 4,
            _ => (pages * u32::from(pools) / 2).max(u32::from(pools) + 2),
        },
        kept,
        epochs: random.pick(&[
            EpochsKept::ByRanks,
            EpochsKept::ByCoordinator,
            EpochsKept::ByNobody,
        ]),
        timeout_us,
        // Longer than the longest pause between two repairs, or what was remade for an attempt that
        // came too late would be gone before the next.
        orphan_us: random.between(300_000, 900_000),
        delays: random.next(),
    }
}

/// Mostly so short that operations overlap, at times long enough for all to come to rest.
fn pause(random: &mut Random) -> u64 {
    match random.below(20) {
        0..=7 => random.below(50),
        8..=17 => random.below(1_500),
        18 => random.below(10_000),
        _ => random.below(40_000),
    }
}

/// What was taken and not given back, as far as a script can know: taking may fail.
#[derive(Debug, Default)]
struct Taken {
    next: u32,
    /// By pool.
    requests: Vec<Vec<u32>>,
    holds: Vec<Vec<u32>>,
    pages: Vec<Vec<u32>>,
}

impl Taken {
    fn new(pools: u16) -> Self {
        let none = vec![Vec::new(); usize::from(pools)];
        Self {
            next: 0,
            requests: none.clone(),
            holds: none.clone(),
            pages: none,
        }
    }
}

/// One of `labels`, most of the time taken out of them; a label of nothing if there is none.
fn one_of(random: &mut Random, labels: &mut Vec<u32>, keep: bool) -> u32 {
    if labels.is_empty() {
        return 0;
    }
    let at = usize::try_from(random.below(labels.len() as u64)).expect("it is below a length");
    match keep {
        true => labels[at],
        false => labels.swap_remove(at),
    }
}

fn work(random: &mut Random, config: &Config, taken: &mut Taken) -> Step {
    let pool = u16::try_from(random.below(u64::from(config.pools))).expect("three at most");
    let at = usize::from(pool);
    let most = (config.pages * config.blocks / 3).max(2);
    let full = taken.requests[at].len() > 6;
    let choice = random.below(100);
    if matches!(choice, 0..=25 | 58..=60 | 67..=72) {
        taken.next += 1;
    }
    let label = taken.next;
    match choice {
        // An engine that has much gives more back than it takes.
        0..=25 if !full => {
            taken.requests[at].push(label);
            Step::Alloc {
                pool,
                label,
                blocks: random.small(1, most),
            }
        }
        0..=46 => {
            let label = one_of(random, &mut taken.requests[at], false);
            Step::Free { pool, label }
        }
        47..=50 => {
            let label = one_of(random, &mut taken.requests[at], true);
            Step::FreeSome {
                pool,
                label,
                blocks: random.small(1, 6),
            }
        }
        51..=57 => {
            let label = one_of(random, &mut taken.requests[at], true);
            Step::Touch { pool, label }
        }
        58..=60 => {
            taken.holds[at].push(label);
            Step::Hold {
                pool,
                label,
                blocks: random.small(1, 6),
            }
        }
        61..=63 => {
            let label = one_of(random, &mut taken.holds[at], true);
            taken.requests[at].push(label);
            Step::TakeHeld {
                pool,
                label,
                blocks: random.small(1, 3),
            }
        }
        64..=66 => {
            let label = one_of(random, &mut taken.holds[at], false);
            Step::ReleaseHold { pool, label }
        }
        67..=72 => {
            taken.pages[at].push(label);
            let pages = random.small(1, (config.pages / 4).max(1));
            Step::TakePages { pool, label, pages }
        }
        73..=78 => {
            let label = one_of(random, &mut taken.pages[at], false);
            Step::FreePages { pool, label }
        }
        79..=80 => Step::Limit {
            pool,
            pages: random.small(1, config.pages),
        },
        81..=82 => Step::Limit {
            pool,
            pages: config.pages,
        },
        83..=92 => Step::Trim { pool },
        93..=98 => Step::Replenish { pool },
        _ => Step::Repair { pool },
    }
}

/// What the frames of a rank that comes back may meet.
fn another(random: &mut Random, config: &Config, who: Process) -> Step {
    let ranks = config.all_ranks() as u64;
    let rank = match who {
        Process::Rank(rank) => rank,
        Process::Coordinator => usize::try_from(random.below(ranks)).expect("a few ranks"),
    };
    let pool = u16::try_from(random.below(u64::from(config.pools))).expect("three at most");
    frame(random, config, rank, pool)
}

fn frame(random: &mut Random, config: &Config, rank: usize, pool: u16) -> Step {
    let way = random.pick(&[Way::ToRank, Way::ToCoordinator]);
    let skip = random.below(4);
    let fault = match random.below(10) {
        0..=2 => FrameFault::Lose,
        3..=5 => FrameFault::Twice,
        6..=7 => FrameFault::Cut(random.below(40)),
        _ => FrameFault::Late(random.between(500, 2 * config.timeout_us)),
    };
    Step::Frame {
        rank,
        pool,
        way,
        skip,
        fault,
    }
}

fn fault(random: &mut Random, config: &Config, weather: Weather) -> Step {
    let ranks = config.all_ranks() as u64;
    let rank = usize::try_from(random.below(ranks)).expect("a few ranks");
    let pool = u16::try_from(random.below(u64::from(config.pools))).expect("three at most");
    if random.chance(weather.deaths) {
        let who = match random.below(ranks + 1) {
            0 => Process::Coordinator,
            _ => Process::Rank(rank),
        };
        let for_us = match random.below(20) {
            0 => random.between(5_000, 1_200_000),
            _ => random.between(2_000, 20_000),
        };
        return Step::Die { who, for_us };
    }
    match random.below(100) {
        0..=39 => frame(random, config, rank, pool),
        40..=46 => Step::Partition {
            rank,
            for_us: random.between(500, 3 * config.timeout_us),
        },
        47..=52 => Step::Reset { rank, pool },
        53..=61 => {
            let who = match random.below(ranks + 1) {
                0 => Process::Coordinator,
                _ => Process::Rank(rank),
            };
            Step::Stall {
                who,
                for_us: random.between(500, 2 * config.timeout_us),
            }
        }
        62..=86 => Step::Driver {
            rank,
            call: random.pick(&[
                DriverCall::Create,
                DriverCall::Map,
                DriverCall::Map,
                DriverCall::Unmap,
                DriverCall::Unmap,
                DriverCall::Synchronize,
            ]),
            skip: random.below(6),
            times: random.between(1, 3),
        },
        87..=93 => Step::Full {
            rank,
            for_us: random.between(500, 30_000),
        },
        _ => Step::Slow {
            rank,
            factor: random.between(2, 50),
            for_us: random.between(500, 30_000),
        },
    }
}
