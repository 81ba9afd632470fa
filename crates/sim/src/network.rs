//! Connections between the coordinator and the ranks: frames are late, lost, doubled, cut in the
//! middle; ways are closed for a while. On one connection nothing overtakes anything; between
//! connections everything does.

use std::collections::BTreeMap;

use crate::random::mix;
use crate::script::{FrameFault, Way};

/// Names a connection for ever.
pub(crate) type ConnId = u64;

/// What reaches an end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Arrival {
    Bytes(Vec<u8>),
    End,
}

/// Something under way.
#[derive(Debug)]
pub(crate) struct Delivery {
    pub(crate) at_ns: u64,
    pub(crate) conn: ConnId,
    pub(crate) way: Way,
    pub(crate) what: Arrival,
}

/// Where a connection leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ends {
    /// Which life of the coordinator.
    pub(crate) life: u64,
    pub(crate) pool: usize,
    /// Which rank, in the order of the topology, and which life of it.
    pub(crate) rank: usize,
    pub(crate) generation: u64,
}

#[derive(Debug)]
struct Conn {
    ends: Ends,
    /// Has neither side ended it?
    open: bool,
    /// When the last thing arrives, each way.
    last_ns: [u64; 2],
    frames: u64,
}

#[derive(Debug)]
pub(crate) struct Network {
    conns: BTreeMap<ConnId, Conn>,
    next: ConnId,
    planned: Vec<(usize, usize, Way, u64, FrameFault)>,
    /// Until when nothing gets through to a rank.
    closed_until_ns: Vec<u64>,
    delays: u64,
    faults_met: u64,
}

impl Network {
    pub(crate) fn new(ranks: usize, delays: u64) -> Self {
        Self {
            conns: BTreeMap::new(),
            next: 1,
            planned: Vec::new(),
            closed_until_ns: vec![0; ranks],
            delays,
            faults_met: 0,
        }
    }

    pub(crate) fn connect(&mut self, ends: Ends) -> ConnId {
        let id = self.next;
        self.next += 1;
        let conn = Conn {
            ends,
            open: true,
            last_ns: [0; 2],
            frames: 0,
        };
        self.conns.insert(id, conn);
        id
    }

    pub(crate) fn ends(&self, conn: ConnId) -> Option<Ends> {
        self.conns.get(&conn).map(|conn| conn.ends)
    }

    pub(crate) fn is_open(&self, conn: ConnId) -> bool {
        self.conns.get(&conn).is_some_and(|conn| conn.open)
    }

    pub(crate) fn open_between(&self, rank: usize, pool: Option<usize>) -> Vec<ConnId> {
        let meant = |conn: &Conn| {
            conn.open && conn.ends.rank == rank && pool.is_none_or(|pool| conn.ends.pool == pool)
        };
        let found = self.conns.iter().filter(|(_, conn)| meant(conn));
        found.map(|(id, _)| *id).collect()
    }

    /// The faults that the next frames meet.
    pub(crate) fn plan(
        &mut self,
        rank: usize,
        pool: usize,
        way: Way,
        skip: u64,
        fault: FrameFault,
    ) {
        self.planned.push((rank, pool, way, skip, fault));
    }

    pub(crate) fn close_way(&mut self, rank: usize, until_ns: u64) {
        let closed = &mut self.closed_until_ns[rank];
        *closed = until_ns.max(*closed);
    }

    pub(crate) fn is_closed(&self, rank: usize, now_ns: u64) -> bool {
        self.closed_until_ns[rank] > now_ns
    }

    pub(crate) const fn faults_met(&self) -> u64 {
        self.faults_met
    }

    /// Nothing more goes wrong. What is lost stays lost.
    pub(crate) fn heal(&mut self, now_ns: u64) {
        self.planned.clear();
        for closed in &mut self.closed_until_ns {
            *closed = now_ns.min(*closed);
        }
    }

    /// Sends whole frames; `false` if the connection has ended.
    pub(crate) fn send(
        &mut self,
        id: ConnId,
        way: Way,
        frames: &[u8],
        now_ns: u64,
        out: &mut Vec<Delivery>,
    ) -> bool {
        let mut rest = frames;
        while let Some((prefix, _)) = rest.split_first_chunk::<4>() {
            let len = usize::try_from(u32::from_le_bytes(*prefix)).expect("frames are short") + 4;
            let (frame, later) = rest.split_at(len.min(rest.len()));
            rest = later;
            let Some(conn) = self.conns.get(&id).filter(|conn| conn.open) else {
                return false;
            };
            let ends = conn.ends;
            let fault = self.next_fault(ends, way);
            self.faults_met += u64::from(fault.is_some());
            match fault {
                None => self.deliver(id, way, Arrival::Bytes(frame.to_vec()), now_ns, 0, out),
                Some(FrameFault::Lose) => {}
                Some(FrameFault::Twice) => {
                    for _ in 0..2 {
                        self.deliver(id, way, Arrival::Bytes(frame.to_vec()), now_ns, 0, out);
                    }
                }
                Some(FrameFault::Late(by_us)) => {
                    self.deliver(id, way, Arrival::Bytes(frame.to_vec()), now_ns, by_us, out);
                }
                Some(FrameFault::Cut(bytes)) => {
                    let kept = usize::try_from(bytes)
                        .unwrap_or(usize::MAX)
                        .min(frame.len() - 1);
                    if kept > 0 {
                        let part = Arrival::Bytes(frame[..kept].to_vec());
                        self.deliver(id, way, part, now_ns, 0, out);
                    }
                    self.end(id, now_ns, out);
                }
            }
        }
        true
    }

    /// Ends a connection; both sides hear of it. A closed way does not hide that: an end is the
    /// kernel's word, not a frame.
    pub(crate) fn end(&mut self, id: ConnId, now_ns: u64, out: &mut Vec<Delivery>) {
        let Some(conn) = self.conns.get_mut(&id).filter(|conn| conn.open) else {
            return;
        };
        conn.open = false;
        for way in [Way::ToRank, Way::ToCoordinator] {
            self.deliver(id, way, Arrival::End, now_ns, 0, out);
        }
    }

    fn next_fault(&mut self, ends: Ends, way: Way) -> Option<FrameFault> {
        let mut found = None;
        for (index, (rank, pool, planned_way, skip, fault)) in self.planned.iter_mut().enumerate() {
            if (*rank, *pool, *planned_way) != (ends.rank, ends.pool, way) {
                continue;
            }
            if *skip > 0 {
                *skip -= 1;
            } else if found.is_none() {
                found = Some((index, *fault));
            }
        }
        let (index, fault) = found?;
        self.planned.remove(index);
        Some(fault)
    }

    fn deliver(
        &mut self,
        id: ConnId,
        way: Way,
        what: Arrival,
        now_ns: u64,
        late_us: u64,
        out: &mut Vec<Delivery>,
    ) {
        let conn = self.conns.get_mut(&id).expect("it was there a moment ago");
        conn.frames += 1;
        // Short as a rule, and always shorter than a restart.
        let drawn = mix(self.delays ^ mix(id << 20 ^ conn.frames));
        let delay_ns = match drawn % 16 {
            0 => 20_000 + drawn / 16 % 400_000,
            _ => 5_000 + drawn / 16 % 40_000,
        };
        let mut at_ns = now_ns + delay_ns + late_us * 1_000;
        let closed_until_ns = self.closed_until_ns[conn.ends.rank];
        if closed_until_ns > now_ns && what != Arrival::End {
            at_ns = at_ns.max(closed_until_ns + delay_ns);
            self.faults_met += 1;
        }
        let last_ns = &mut conn.last_ns[way as usize];
        if what == Arrival::End {
            // What is still held back is lost with the connection.
            *last_ns = at_ns;
        } else {
            at_ns = at_ns.max(*last_ns);
            *last_ns = at_ns;
        }
        out.push(Delivery {
            at_ns,
            conn: id,
            way,
            what,
        });
    }
}
