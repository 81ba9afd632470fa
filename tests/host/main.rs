//! Real processes over real sockets, on memory of this machine.

#[path = "../ranks.rs"]
mod ranks;
#[path = "../strike.rs"]
mod strike;

mod crew;
mod impostors;
mod lives;
mod places;
mod processes;
mod starts;
mod strikes;
