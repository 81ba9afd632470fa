//! When a process of a test is to strike, and what it does then, as words for its arguments.

use std::fmt;
use std::str::FromStr;

/// A call of the seam that changes something. Undoing a map is an unmap in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Map,
    Undo,
    Prepare,
    Commit,
    Abort,
    Resync,
}

/// The moment before a call does anything, or after it has done everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Point {
    Before(Call),
    After(Call),
}

/// What happens then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stroke {
    /// This process is killed.
    Die,
    /// That process is killed, and this one goes on.
    Kill(i32),
    /// First that process, then this one.
    Both(i32),
    /// This process is stopped until somebody lets it go on.
    Stop,
    /// First that process is killed, then this one stopped.
    KillAndStop(i32),
    /// The call fails and does nothing; only before a call that can fail.
    Refuse,
}

const CALLS: [(Call, &str); 6] = [
    (Call::Map, "map"),
    (Call::Undo, "undo"),
    (Call::Prepare, "prepare"),
    (Call::Commit, "commit"),
    (Call::Abort, "abort"),
    (Call::Resync, "resync"),
];

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (when, call) = match self {
            Self::Before(call) => ("before", call),
            Self::After(call) => ("after", call),
        };
        let (_, name) = CALLS
            .iter()
            .find(|(known, _)| known == call)
            .expect("every call has a name");
        write!(f, "{when}-{name}")
    }
}

impl FromStr for Point {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("no such point: {text}");
        let (when, name) = text.split_once('-').ok_or_else(unknown)?;
        let (call, _) = CALLS
            .iter()
            .find(|(_, known)| *known == name)
            .ok_or_else(unknown)?;
        match when {
            "before" => Ok(Self::Before(*call)),
            "after" => Ok(Self::After(*call)),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for Stroke {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Die => f.write_str("die"),
            Self::Kill(process) => write!(f, "kill:{process}"),
            Self::Both(process) => write!(f, "both:{process}"),
            Self::Stop => f.write_str("stop"),
            Self::KillAndStop(process) => write!(f, "kill-and-stop:{process}"),
            Self::Refuse => f.write_str("refuse"),
        }
    }
}

impl FromStr for Stroke {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("no such stroke: {text}");
        match text.split_once(':') {
            Some((what, process)) => {
                let process = process.parse().map_err(|_| unknown())?;
                match what {
                    "kill" => Ok(Self::Kill(process)),
                    "both" => Ok(Self::Both(process)),
                    "kill-and-stop" => Ok(Self::KillAndStop(process)),
                    _ => Err(unknown()),
                }
            }
            None => match text {
                "die" => Ok(Self::Die),
                "stop" => Ok(Self::Stop),
                "refuse" => Ok(Self::Refuse),
                _ => Err(unknown()),
            },
        }
    }
}
