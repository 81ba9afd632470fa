//! The variables that [`Config`](crate::Config) reads: their documentation, and what to say about
//! others that look alike.

/// A variable that [`Config`](crate::Config) reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What may be written.
    pub allowed: &'static str,
    /// What holds if it is not set, or empty.
    pub default: &'static str,
    /// What it is for.
    pub meaning: &'static str,
}

/// Every variable, in the order in which help texts list them. All are optional.
///
/// | variable | allowed | default |
/// | --- | --- | --- |
/// | `KVCACHED_RUNTIME_DIR` | an absolute path | $XDG_RUNTIME_DIR/kvcached, else /tmp/kvcached-UID |
/// | `KVCACHED_INSTANCE` | a name of valid UTF-8 | one from the process group, which child processes share |
/// | `KVCACHED_TOPOLOGY` | rank0, separate, autonomous or single | as the engine is |
/// | `KVCACHED_LAYOUT` | contiguous, unified or per-layer | contiguous |
/// | `KVCACHED_PAGE_SIZE` | auto, or a size such as 2MiB or 4m | auto |
/// | `KVCACHED_COLD` | unbacked or zero | unbacked |
/// | `KVCACHED_MIN_RESERVED_PAGES` | a whole number of pages, at most KVCACHED_MAX_RESERVED_PAGES | 0 |
/// | `KVCACHED_MAX_RESERVED_PAGES` | a whole number of pages, at least KVCACHED_MIN_RESERVED_PAGES | those of 1GiB, or KVCACHED_MIN_RESERVED_PAGES if that is more |
/// | `KVCACHED_MAX_RUN_PAGES` | 1 to 64, and not together with KVCACHED_MAX_RUN_BYTES | what KVCACHED_MAX_RUN_BYTES comes to |
/// | `KVCACHED_MAX_RUN_BYTES` | a size such as 32MiB, and not together with KVCACHED_MAX_RUN_PAGES | 32MiB |
/// | `KVCACHED_BULK_RUN_BYTES` | a size such as 128MiB, at least KVCACHED_MAX_RUN_BYTES | 128MiB, or the longest run if that is set |
/// | `KVCACHED_BULK_FROM_BYTES` | a size such as 1GiB | 1GiB |
/// | `KVCACHED_GROWTH_CHUNKS` | 1 to 64 | 8 |
/// | `KVCACHED_CALM_BYTES` | a size such as 4GiB, or 0 | 4GiB |
/// | `KVCACHED_CHUNK_POOL_BYTES` | a size such as 256MiB, or 0 | 256MiB |
/// | `KVCACHED_CHUNK_POOL_IDLE` | a number of seconds from 0.001 to 86400 | 0.5 |
/// | `KVCACHED_IPC_TIMEOUT` | a number of seconds from 0.001 to 86400 | 60 |
/// | `KVCACHED_ORPHAN_TIMEOUT` | a number of seconds from 1 to 86400, more than twice KVCACHED_IPC_TIMEOUT | twice KVCACHED_IPC_TIMEOUT and 30 |
/// | `KVCACHED_RETIRE_TIMEOUT` | a number of seconds from 0.001 to 86400 | 0.05 |
/// | `KVCACHED_READY_TIMEOUT` | a number of seconds from 0.001 to 86400 | 60 |
/// | `KVCACHED_DEVICE` | host, cuda or cuda:N | cuda |
pub const VARIABLES: &[Variable] = &[
    Variable {
        name: "KVCACHED_RUNTIME_DIR",
        allowed: "an absolute path",
        default: "$XDG_RUNTIME_DIR/kvcached, else /tmp/kvcached-UID",
        meaning: "directory of the sockets; the same for all processes of an instance",
    },
    Variable {
        name: "KVCACHED_INSTANCE",
        allowed: "a name of valid UTF-8",
        default: "one from the process group, which child processes share",
        meaning: "name of the engine; the same for all its processes, another for each engine",
    },
    Variable {
        name: "KVCACHED_TOPOLOGY",
        allowed: "rank0, separate, autonomous or single",
        default: "as the engine is",
        meaning: "where the ranks are, as seen by the process that coordinates",
    },
    Variable {
        name: "KVCACHED_LAYOUT",
        allowed: "contiguous, unified or per-layer",
        default: "contiguous",
        meaning: "how layers, and K and V, share tensors",
    },
    Variable {
        name: "KVCACHED_PAGE_SIZE",
        allowed: "auto, or a size such as 2MiB or 4m",
        default: "auto",
        meaning: "bytes of a page in one extent; a multiple of the device's granularity",
    },
    Variable {
        name: "KVCACHED_COLD",
        allowed: "unbacked or zero",
        default: "unbacked",
        meaning: "what lies behind a page without memory: nothing, so that a stray access faults, \
                  or zeros",
    },
    Variable {
        name: "KVCACHED_MIN_RESERVED_PAGES",
        allowed: "a whole number of pages, at most KVCACHED_MAX_RESERVED_PAGES",
        default: "0",
        meaning: "idle pages kept backed whatever the demand, so that growth need not wait for the \
                  device",
    },
    Variable {
        name: "KVCACHED_MAX_RESERVED_PAGES",
        allowed: "a whole number of pages, at least KVCACHED_MIN_RESERVED_PAGES",
        default: "those of 1GiB, or KVCACHED_MIN_RESERVED_PAGES if that is more",
        meaning: "idle pages kept backed at most, however large the recent demand; 0 switches the \
                  reserve off",
    },
    Variable {
        name: "KVCACHED_MAX_RUN_PAGES",
        allowed: "1 to 64, and not together with KVCACHED_MAX_RUN_BYTES",
        default: "what KVCACHED_MAX_RUN_BYTES comes to",
        meaning: "pages that are backed together at most",
    },
    Variable {
        name: "KVCACHED_MAX_RUN_BYTES",
        allowed: "a size such as 32MiB, and not together with KVCACHED_MAX_RUN_PAGES",
        default: "32MiB",
        meaning: "bytes of one extent that are backed together at most, if that is 1 to 64 pages",
    },
    Variable {
        name: "KVCACHED_BULK_RUN_BYTES",
        allowed: "a size such as 128MiB, at least KVCACHED_MAX_RUN_BYTES",
        default: "128MiB, or the longest run if that is set",
        meaning: "bytes of one extent that are backed together at most when a pool grows by much at \
                  once: quicker to map, slower to read on some GPUs; less than what \
                  KVCACHED_MAX_RUN_PAGES comes to in a pool, or than its page, means that",
    },
    Variable {
        name: "KVCACHED_BULK_FROM_BYTES",
        allowed: "a size such as 1GiB",
        default: "1GiB",
        meaning: "bytes on each rank by which a pool must grow at once for that to be much",
    },
    Variable {
        name: "KVCACHED_GROWTH_CHUNKS",
        allowed: "1 to 64",
        default: "8",
        meaning: "chunks that growth takes at least, if it is by so many pages: more are slower to \
                  map, and what survives pins less memory",
    },
    Variable {
        name: "KVCACHED_CALM_BYTES",
        allowed: "a size such as 4GiB, or 0",
        default: "4GiB",
        meaning: "bytes on each rank that a pool must map, after it found its device full, without \
                  finding it so again before it grows in long runs again",
    },
    Variable {
        name: "KVCACHED_CHUNK_POOL_BYTES",
        allowed: "a size such as 256MiB, or 0",
        default: "256MiB",
        meaning: "memory that came free and each rank keeps at most to use it again, over all of its \
                  pools; 0 keeps none",
    },
    Variable {
        name: "KVCACHED_CHUNK_POOL_IDLE",
        allowed: "a number of seconds from 0.001 to 86400",
        default: "0.5",
        meaning: "how long it is kept if nobody uses it; neighbours on the device have to do without \
                  it for so long",
    },
    Variable {
        name: "KVCACHED_IPC_TIMEOUT",
        allowed: "a number of seconds from 0.001 to 86400",
        default: "60",
        meaning: "how long to wait for another rank's answer; longer than it takes to map or unmap \
                  the longest batch there, or the rank is given up each time",
    },
    Variable {
        name: "KVCACHED_ORPHAN_TIMEOUT",
        allowed: "a number of seconds from 1 to 86400, more than twice KVCACHED_IPC_TIMEOUT",
        default: "twice KVCACHED_IPC_TIMEOUT and 30",
        meaning: "how long a worker keeps its memory after its coordinator is gone, which may first \
                  have to wait for another rank, and for that to undo",
    },
    Variable {
        name: "KVCACHED_RETIRE_TIMEOUT",
        allowed: "a number of seconds from 0.001 to 86400",
        default: "0.05",
        meaning: "how long a rank waits for work in flight before it refuses to give memory back",
    },
    Variable {
        name: "KVCACHED_READY_TIMEOUT",
        allowed: "a number of seconds from 0.001 to 86400",
        default: "60",
        meaning: "how long a coordinator waits at start for every rank to be there, and a worker \
                  that cannot begin for its coordinator, to say so",
    },
    Variable {
        name: "KVCACHED_DEVICE",
        allowed: "host, cuda or cuda:N",
        default: "cuda",
        meaning: "where the memory is: this machine's, or that of GPU 0 or N",
    },
];

/// What every variable begins with.
const PREFIX: &str = "KVCACHED_";

/// A variable with the prefix that nothing reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownVariable {
    /// Its name.
    pub name: String,
    /// The variable that was probably meant.
    pub nearest: Option<&'static str>,
}

/// Variables with our prefix that nothing reads, each once, with the nearest that something does.
pub fn unknown_variables<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<UnknownVariable> {
    let mut unknown: Vec<UnknownVariable> = Vec::new();
    for name in names {
        let known = VARIABLES.iter().any(|variable| variable.name == name);
        if known || !name.starts_with(PREFIX) || unknown.iter().any(|found| found.name == name) {
            continue;
        }
        let nearest = VARIABLES
            .iter()
            .map(|variable| (edit_distance(name, variable.name), variable.name))
            .min()
            // Further away than that it is another word, and the hint would mislead.
            .filter(|&(distance, _)| distance <= 4)
            .map(|(_, name)| name);
        unknown.push(UnknownVariable {
            name: name.to_owned(),
            nearest,
        });
    }
    unknown
}

/// What may be written for a variable that is in the table.
pub(super) fn allowed(variable: &'static str) -> &'static str {
    VARIABLES
        .iter()
        .find(|known| known.name == variable)
        .map(|known| known.allowed)
        .expect("every variable that is read is in the table")
}

/// Letters to insert, delete or exchange to get from one word to the other.
fn edit_distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, letter) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, other) in to.iter().enumerate() {
            let exchanged = diagonal + usize::from(letter != *other);
            diagonal = row[j + 1];
            row[j + 1] = exchanged.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}
