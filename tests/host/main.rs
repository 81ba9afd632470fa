//! Real processes over real sockets, on memory of this machine.

#[path = "../ranks.rs"]
mod ranks;
#[path = "../strike.rs"]
mod strike;

mod crew;
mod impostors;
mod processes;
mod strikes;
