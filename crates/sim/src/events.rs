//! What happens at its time: arrivals, the end of work and of faults; and the loops that the
//! coordinator and the ranks are around the real code.

use kvcached_tp_ipc::{FrameDecoder, Step};

use crate::Sabotage;
use crate::engine::{Life, Op};
use crate::fan::Asked;
use crate::network::{Arrival, ConnId, Delivery, Ends};
use crate::rank::Link;
use crate::report::Guarantee;
use crate::script::Way;
use crate::world::{LocalDone, World, lock};

/// Something that happens later.
#[derive(Debug)]
pub(crate) enum Event {
    /// Something reaches an end of a connection.
    Arrives {
        conn: ConnId,
        way: Way,
        what: Arrival,
    },
    /// A rank's work is done, and this is what it says.
    Says {
        rank: usize,
        generation: u64,
        conn: ConnId,
        frames: Vec<u8>,
        close: bool,
    },
    /// A rank that was at work, or stalled, looks around.
    Wakes(usize),
    /// A stalled coordinator looks around.
    CoordinatorWakes,
    /// The local mapper of a coordinator is done.
    Local(LocalDone),
    /// A process comes back.
    RankStarts(usize),
    CoordinatorStarts,
    /// The background of a life: repairs, and what has retired.
    Tick {
        life: u64,
        pool: usize,
    },
    /// An operation is due.
    Due(u64, Op),
    /// A device is no longer full, or slow.
    Unfull(usize),
    Unslow {
        rank: usize,
        generation: u64,
    },
}

impl World {
    pub(crate) fn handle(&self, event: Event) {
        match event {
            Event::Arrives {
                conn,
                way: Way::ToRank,
                what,
            } => self.reaches_rank(conn, what),
            Event::Arrives { conn, what, .. } => {
                if self.is_stalled() {
                    lock(&self.state).inbox.push_back((conn, what));
                } else {
                    self.reaches_coordinator(conn, what);
                }
            }
            Event::Says {
                rank,
                generation,
                conn,
                frames,
                close,
            } => {
                if self
                    .memory(rank)
                    .is_some_and(|memory| memory.generation == generation)
                {
                    self.send(conn, Way::ToCoordinator, &frames);
                    if close {
                        self.end(conn);
                    }
                }
            }
            Event::Wakes(rank) => self.run_rank(rank),
            Event::CoordinatorWakes => {
                if self.is_stalled() {
                    return;
                }
                let inbox = std::mem::take(&mut lock(&self.state).inbox);
                for (conn, what) in inbox {
                    self.reaches_coordinator(conn, what);
                }
            }
            Event::Local(done) => self.local_done(done),
            Event::RankStarts(rank) => self.start_rank(rank),
            Event::CoordinatorStarts => self.start_coordinator(),
            Event::Tick { life, pool } => self.tick(life, pool),
            Event::Due(life, op) => {
                if self.is_current(life) {
                    self.submit(op);
                }
            }
            Event::Unfull(rank) => self.devices[rank].unfill(),
            Event::Unslow { rank, generation } => {
                if let Some(memory) = self.memory(rank).filter(|it| it.generation == generation) {
                    memory.driver.set_slow(1);
                }
            }
        }
    }

    /// Does what the fan-outs want done; did one of them come to an end?
    pub(crate) fn drive_fans(&self) -> bool {
        if self.is_stalled() {
            return false;
        }
        let Some(life) = self.current() else {
            return false;
        };
        let mut ended = false;
        for pool in 0..life.pools.len() {
            ended |= self.drive(&life, pool);
        }
        ended
    }

    fn drive(&self, life: &Life, pool: usize) -> bool {
        loop {
            let mut guard = lock(&life.pools[pool].fan);
            let fan = &mut *guard;
            let Some(active) = fan.active.as_mut().filter(|_| !fan.local_busy) else {
                return false;
            };
            match fan.fanout.poll() {
                Step::Local(call) => {
                    active.worked = true;
                    let rank = self
                        .local
                        .expect("only a topology with a local rank asks it");
                    let memory = self
                        .memory(rank)
                        .expect("it lives as long as its coordinator");
                    memory.driver.catch_up();
                    memory.driver.take_cost_ns();
                    let answer = call.perform(&*memory.rank_mapper(pool, self.sabotage));
                    let cost_ns = memory.driver.take_cost_ns();
                    active.local_ns += cost_ns;
                    fan.local_busy = true;
                    drop(guard);
                    self.look_at(rank);
                    let done = LocalDone {
                        life: life.number,
                        pool,
                        answer,
                    };
                    self.schedule(self.clock.now_ns() + cost_ns, Event::Local(done));
                    return false;
                }
                Step::Connect(peer) => {
                    active.worked = true;
                    let link = &mut fan.links[peer.index()];
                    let ends = Ends {
                        life: life.number,
                        pool,
                        rank: link.rank,
                        generation: 0,
                    };
                    if let Some(conn) = self.connect(ends) {
                        link.conn = Some(conn);
                        link.decoder = FrameDecoder::default();
                        fan.fanout.handle_connected(peer);
                    } else {
                        let reason = "nobody listens".to_owned();
                        fan.fanout
                            .handle_unreachable(peer, reason, self.clock.now());
                    }
                }
                Step::Send { peer, frames } => {
                    active.worked = true;
                    let frames = frames.to_vec();
                    let link = &mut fan.links[peer.index()];
                    let conn = link.conn;
                    link.asked = Asked::last_of(&frames);
                    let swallowed = link
                        .asked
                        .filter(|asked| asked.is_swallowed(self.sabotage, peer.index()));
                    if let (Some(conn), Some(frame)) = (conn, swallowed.and_then(Asked::made_up)) {
                        drop(guard);
                        let what = Arrival::Bytes(frame);
                        let at_ns = self.clock.now_ns() + 50_000;
                        let way = Way::ToCoordinator;
                        self.schedule(at_ns, Event::Arrives { conn, way, what });
                        continue;
                    }
                    let sent = conn.is_some_and(|conn| self.send(conn, Way::ToRank, &frames));
                    if !sent {
                        fan.links[peer.index()].conn = None;
                        let reason = "broken pipe".to_owned();
                        fan.fanout.handle_disconnect(peer, reason, self.clock.now());
                    }
                }
                Step::Wait(until) => {
                    fan.wait_until_ns = Some(self.clock.ns_of(until));
                    return false;
                }
                Step::Done(answer) => {
                    fan.wait_until_ns = None;
                    let active = fan.active.take().expect("it was under way");
                    fan.learn(&active, &answer);
                    let given_up = fan.given_up();
                    drop(guard);
                    given_up.into_iter().for_each(|conn| self.end(conn));
                    self.check_operation(life, pool, &active, &answer);
                    lock(&life.pools[pool].fan)
                        .answers
                        .insert(active.ticket, answer);
                    return true;
                }
            }
            let given_up = guard.given_up();
            drop(guard);
            given_up.into_iter().for_each(|conn| self.end(conn));
        }
    }

    /// What the fan-out of a pool waited for has not happened.
    pub(crate) fn time_out(&self, pool: usize) {
        let Some(life) = self.current() else { return };
        let mut guard = lock(&life.pools[pool].fan);
        let fan = &mut *guard;
        fan.wait_until_ns = None;
        if self.sabotage == Some(Sabotage::TrustLostReply) {
            let peers: Vec<_> = fan.fanout.peers().collect();
            for peer in peers {
                let asked = fan.links[peer.index()].asked;
                if let Some(frame) = asked
                    .and_then(Asked::made_up)
                    .filter(|_| fan.fanout.awaits(peer))
                {
                    fan.fanout.handle_frame(peer, &frame[4..], self.clock.now());
                }
            }
        }
        fan.fanout.handle_timeout(self.clock.now());
        let given_up = fan.given_up();
        drop(guard);
        given_up.into_iter().for_each(|conn| self.end(conn));
    }

    fn local_done(&self, done: LocalDone) {
        let Some(life) = self.current().filter(|life| life.number == done.life) else {
            return;
        };
        let stalled_until_ns = lock(&self.state).stalled_until_ns;
        if stalled_until_ns > self.clock.now_ns() {
            self.schedule(stalled_until_ns, Event::Local(done));
            return;
        }
        let mut fan = lock(&life.pools[done.pool].fan);
        fan.local_busy = false;
        fan.fanout.handle_local(done.answer, self.clock.now());
    }

    fn reaches_coordinator(&self, conn: ConnId, what: Arrival) {
        let Some(ends) = lock(&self.network).ends(conn) else {
            return;
        };
        let Some(life) = self.current().filter(|life| life.number == ends.life) else {
            return;
        };
        let mut guard = lock(&life.pools[ends.pool].fan);
        let fan = &mut *guard;
        let Some(index) = fan.peer_of(conn) else {
            return;
        };
        let now = self.clock.now();
        let peer = fan.peer(index);
        let link = &mut fan.links[index];
        match what {
            Arrival::End => {
                link.conn = None;
                fan.fanout
                    .handle_disconnect(peer, "it ended".to_owned(), now);
            }
            Arrival::Bytes(bytes) => {
                link.decoder.feed(&bytes);
                loop {
                    match link.decoder.next_frame() {
                        Ok(Some(payload)) => fan.fanout.handle_frame(peer, payload, now),
                        Ok(None) => break,
                        Err(error) => {
                            fan.fanout.handle_broken_frame(peer, error.to_string(), now);
                            break;
                        }
                    }
                }
            }
        }
        let given_up = fan.given_up();
        drop(guard);
        given_up.into_iter().for_each(|conn| self.end(conn));
    }

    fn reaches_rank(&self, conn: ConnId, what: Arrival) {
        let Some(ends) = lock(&self.network).ends(conn) else {
            return;
        };
        let mut guard = lock(&self.served[ends.rank]);
        let Some(served) = guard
            .as_mut()
            .filter(|served| served.links.contains_key(&conn))
        else {
            return;
        };
        served.inbox.push_back((conn, what));
        drop(guard);
        self.run_rank(ends.rank);
    }

    /// A rank deals with what has reached it, unless it is at work.
    fn run_rank(&self, rank: usize) {
        let Some(memory) = self.memory(rank) else {
            return;
        };
        let now_ns = self.clock.now_ns();
        let mut guard = lock(&self.served[rank]);
        let Some(served) = guard.as_mut() else { return };
        memory.driver.catch_up();
        while served.busy_until_ns <= now_ns {
            let Some((conn, what)) = served.inbox.pop_front() else {
                break;
            };
            let Some(mut link) = served.links.remove(&conn) else {
                continue;
            };
            memory.driver.take_cost_ns();
            let mut frames = Vec::new();
            let mut over = false;
            match what {
                Arrival::End => over = true,
                Arrival::Bytes(bytes) => {
                    link.decoder.feed(&bytes);
                    while !over {
                        let end = match link.decoder.next_frame() {
                            Ok(None) => break,
                            Ok(Some(payload)) => link
                                .conversation
                                .handle_frame(&mut served.rank, payload, &mut frames)
                                .err(),
                            Err(error) => {
                                Some(link.conversation.handle_broken_frame(error, &mut frames))
                            }
                        };
                        over = end.is_some();
                    }
                }
            }
            served.tend_at = served.rank.tend(self.clock.now());
            let cost_ns = memory.driver.take_cost_ns();
            served.busy_until_ns = now_ns + cost_ns;
            if over {
                link.conversation.end(&mut served.rank, self.clock.now());
            } else {
                served.links.insert(conn, link);
            }
            if over || !frames.is_empty() {
                let generation = memory.generation;
                let close = over;
                let says = Event::Says {
                    rank,
                    generation,
                    conn,
                    frames,
                    close,
                };
                self.schedule(now_ns + cost_ns, says);
            }
        }
        let busy_until_ns = served.busy_until_ns;
        let waits = !served.inbox.is_empty();
        drop(guard);
        if waits {
            self.schedule(busy_until_ns, Event::Wakes(rank));
        }
        self.look_at(rank);
    }

    /// A rank's time without a coordinator is up.
    pub(crate) fn orphan(&self, rank: usize) {
        let Some(memory) = self.memory(rank) else {
            return;
        };
        let mut guard = lock(&self.served[rank]);
        let Some(served) = guard.as_mut() else { return };
        let now = self.clock.now();
        memory.driver.catch_up();
        memory.driver.take_cost_ns();
        served.rank.handle_timeout(now);
        served.tend_at = served.rank.tend(now);
        served.busy_until_ns = self.clock.now_ns() + memory.driver.take_cost_ns();
        let stuck = served.rank.poll_timeout().is_some_and(|at| at <= now);
        drop(guard);
        if stuck {
            self.violate(
                Guarantee::Bounded,
                format!("rank {rank} is orphaned again and again"),
            );
        }
        self.look_at(rank);
        self.run_rank(rank);
    }

    /// Some of what a rank keeps has been kept for too long.
    pub(crate) fn tend(&self, rank: usize) {
        let Some(memory) = self.memory(rank) else {
            return;
        };
        let mut guard = lock(&self.served[rank]);
        let Some(served) = guard.as_mut() else { return };
        memory.driver.catch_up();
        memory.driver.take_cost_ns();
        served.tend_at = served.rank.tend(self.clock.now());
        served.busy_until_ns = self.clock.now_ns() + memory.driver.take_cost_ns();
        drop(guard);
        self.look_at(rank);
        self.run_rank(rank);
    }

    /// Has a rank's device met anything that must not be?
    pub(crate) fn look_at(&self, rank: usize) {
        if let Some(memory) = self.memory(rank)
            && let Some(broken) = memory.driver.broken()
        {
            let what = format!("on rank {rank}: {broken}");
            self.violate(Guarantee::NothingTakenEarly, what);
        }
    }

    /// A connection to a rank, if it is there; the rank has accepted it.
    fn connect(&self, ends: Ends) -> Option<ConnId> {
        let memory = self.memory(ends.rank)?;
        let mut guard = lock(&self.served[ends.rank]);
        let served = guard.as_mut()?;
        let generation = memory.generation;
        let conn = lock(&self.network).connect(Ends { generation, ..ends });
        served.links.insert(conn, Link::default());
        Some(conn)
    }

    pub(crate) fn send(&self, conn: ConnId, way: Way, frames: &[u8]) -> bool {
        let mut out = Vec::new();
        let now_ns = self.clock.now_ns();
        let sent = lock(&self.network).send(conn, way, frames, now_ns, &mut out);
        self.deliver(out);
        sent
    }

    pub(crate) fn end(&self, conn: ConnId) {
        let mut out = Vec::new();
        lock(&self.network).end(conn, self.clock.now_ns(), &mut out);
        self.deliver(out);
    }

    fn deliver(&self, deliveries: Vec<Delivery>) {
        for Delivery {
            at_ns,
            conn,
            way,
            what,
        } in deliveries
        {
            self.schedule(at_ns, Event::Arrives { conn, way, what });
        }
    }
}
