//! Property test: several agents and their coordinator, over connections that break or become silent at any time.

use std::collections::BTreeSet;

use brigade_rendezvous::{Action as Order, AgentId, Event as News, Formation, Join, Rules};
use proptest::prelude::*;

use super::any_order::{Wish, World};
use super::*;

/// An event at a host. Host 0 has the coordinator in its agent's process.
#[derive(Clone, Debug)]
enum Happens {
    /// The next message over the host's connection arrives at the coordinator.
    Up(usize),
    /// The next message arrives at the agent.
    Down(usize),
    /// The connection is silent for a while; messages in transit arrive later.
    Cut {
        host: usize,
        millis: u64,
    },
    /// The connection is reset: messages in transit are lost.
    Breaks {
        host: usize,
        reset: bool,
    },
    Signals {
        host: usize,
        signal: Signal,
    },
    StartFails(usize),
    Exits {
        host: usize,
        local_rank: usize,
        code: i32,
    },
    /// Time passes, and messages arrive if they can.
    Passes {
        millis: u64,
    },
}

/// Connection, with the number by which the coordinator identifies it.
#[derive(Debug, Default)]
struct Connection {
    host: usize,
    /// Messages to the coordinator. `None`: the agent has closed the connection.
    up: VecDeque<Option<FromAgent>>,
    /// Messages to the agent. `None`: the coordinator has closed the connection.
    down: VecDeque<Option<ToAgent>>,
    /// The coordinator's number of the agent at the other end, once that has joined.
    member: Option<AgentId>,
    /// `true` if the coordinator does not read from it any more.
    is_over: bool,
}

/// State of reconnecting to a seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seeking {
    No,
    /// A first connection is being made.
    First,
    Seat,
    /// A request was sent over this connection, at this time.
    Asked(usize, Duration),
}

struct Site {
    world: World,
    link: Option<usize>,
    seeking: Seeking,
    /// Number of requests for the seat.
    asked: u32,
    /// Time until which the connection is silent.
    cut_until: Duration,
    /// Last time at which the agent has received anything from the coordinator.
    heard: Duration,
    quiet: bool,
}

struct Job {
    formation: Formation,
    limits: TimeLimits,
    /// Start of the agent's clock, on the coordinator's clock.
    began: Duration,
    now: Duration,
    sites: Vec<Site>,
    connections: Vec<Connection>,
    elastic: bool,
}

const STEP: Duration = Duration::from_millis(100);

impl Job {
    fn new(hosts: usize, max_restarts: u32, elastic: bool) -> Self {
        let limits = TimeLimits::new(Duration::from_secs(4), Duration::from_secs(30));
        let second = Duration::from_secs(1);
        let rules = Rules {
            min_nodes: if elastic { 1 } else { hosts },
            max_nodes: hosts,
            max_restarts,
            limits,
            join_timeout: 20 * second,
            last_call: second,
            join_interval: second,
            ..Rules::default()
        };
        let site = |host| {
            let host = format!("h{host}");
            let facts =
                Facts { host, limits, max_restarts, may_leave: elastic, ..facts(Kind::Peers) };
            let mut world = World::new(facts);
            world.answer_all();
            let (link, seeking, asked) = (None, Seeking::No, 0);
            let (cut_until, heard, quiet) = (Duration::ZERO, Duration::ZERO, false);
            Site { world, link, seeking, asked, cut_until, heard, quiet }
        };
        let sites: Vec<Site> = (0..hosts).map(site).collect();
        let now = sites[0].world.host.now;
        let (formation, connections) = (Formation::new(rules), Vec::new());
        Self { formation, limits, began: now, now, sites, connections, elastic }
    }

    fn is_cut(&self, host: usize) -> bool {
        self.now < self.sites[host].cut_until
    }

    /// Returns `true` if the coordinator's process accepts no more connections.
    fn is_gone(&self) -> bool {
        let is_over = |it: &Connection| it.is_over || it.member.is_none();
        self.formation.job_result().is_some()
            && !self.formation.has_uninformed_members()
            && self.connections.iter().all(is_over)
    }

    fn tell_agent(&mut self, host: usize, event: Event) {
        if self.sites[host].world.exited {
            return;
        }
        self.sites[host].world.event(event);
        self.grant(host);
    }

    /// Fulfils the agent's requests about its connection.
    fn grant(&mut self, host: usize) {
        while let Some(wish) = self.sites[host].world.wishes.pop_front() {
            match wish {
                Wish::Connect => self.sites[host].seeking = Seeking::First,
                // A request has been sent: its answer is expected soon.
                Wish::Reconnect | Wish::StopReconnecting
                    if matches!(self.sites[host].seeking, Seeking::Asked(..)) => {}
                Wish::Reconnect => self.sites[host].seeking = Seeking::Seat,
                Wish::StopReconnecting => self.sites[host].seeking = Seeking::No,
                Wish::Disconnect => self.hang_up(host),
                Wish::Join(request) => self.join(host, &request),
                Wish::Send(message) => self.send(host, message),
            }
        }
        if self.sites[host].world.exited {
            self.hang_up(host);
        }
    }

    fn send(&mut self, host: usize, message: FromAgent) {
        let stops = matches!(message, FromAgent::Interrupted { .. });
        assert!(!(stops && self.elastic && host > 0), "it leaves, and stops the others");
        let site = &self.sites[host];
        if let (Some(link), false) = (site.link, matches!(site.seeking, Seeking::Asked(..))) {
            self.connections[link].up.push_back(Some(message));
        }
    }

    fn hang_up(&mut self, host: usize) {
        let site = &mut self.sites[host];
        (site.link, site.seeking, site.quiet) = (None, Seeking::No, false);
        for connection in self.connections.iter_mut().filter(|it| it.host == host) {
            connection.up.push_back(None);
        }
    }

    fn connect(&mut self, host: usize) -> usize {
        self.connections.push(Connection { host, ..Connection::default() });
        self.connections.len() - 1
    }

    fn join(&mut self, host: usize, request: &JoinRequest) {
        let now = self.now;
        let site = &mut self.sites[host];
        let over = match site.seeking {
            Seeking::Asked(over, _) if request.resume => Some(over),
            _ => site.link,
        };
        site.asked += u32::from(request.resume);
        let join = Join {
            agent: format!("agent-{host}"),
            resume: if request.resume { site.asked } else { 0 },
            nproc: 2,
            address: Some(format!("10.0.0.{host}")),
            last_attempt: request.last.map(|last| last.attempt),
            last_node_rank: request.last.map(|last| last.node_rank),
            restarts: request.restarts,
            sent: u64::try_from(now.as_millis()).unwrap(),
            ..Join::new(&format!("h{host}"))
        };
        if let Some(over) = over {
            self.connections[over].up.push_back(Some(FromAgent::Join(join)));
        }
    }

    fn tell_coordinator(&mut self, news: News) {
        let now = self.now - self.began;
        for order in self.formation.handle(now, news) {
            match order {
                Order::Send(agent, message) => {
                    if let Some(at) = self.connection_of(agent) {
                        self.connections[at].down.push_back(Some(message));
                    }
                }
                Order::Adopt { agent, connection } => {
                    if let Some(old) = self.connection_of(agent) {
                        self.close(old);
                    }
                    if let Some(new) = self.connection_of(connection) {
                        self.connections[new].member = Some(agent);
                    }
                }
                Order::Close(agent) => {
                    if let Some(at) = self.connection_of(agent) {
                        self.close(at);
                    }
                }
                Order::Say(_) | Order::Record(_) | Order::Finish(_) => {}
            }
        }
        let due = self.formation.deadline();
        assert!(due.is_none_or(|due| due > now), "due twice: {:?}", self.formation);
    }

    fn close(&mut self, at: usize) {
        self.connections[at].is_over = true;
        self.connections[at].down.push_back(None);
    }

    fn connection_of(&self, agent: AgentId) -> Option<usize> {
        let is_it = |it: &Connection| it.member == Some(agent) && !it.is_over;
        self.connections.iter().position(is_it)
    }

    /// The next message over this connection arrives at the coordinator. Returns `false` when there is none.
    fn up(&mut self, at: usize) -> bool {
        let connection = &mut self.connections[at];
        let Some(message) = connection.up.pop_front() else { return false };
        let remote = connection.host > 0;
        match (connection.member, message) {
            _ if connection.is_over => {}
            (None, Some(FromAgent::Join(join))) => {
                let agent = AgentId(at as u64);
                connection.member = Some(agent);
                self.tell_coordinator(News::Joined { agent, join, seen: None, remote });
            }
            (None, _) => connection.is_over = true,
            (Some(agent), Some(message)) => self.tell_coordinator(News::Message { agent, message }),
            (Some(agent), None) => {
                connection.is_over = true;
                self.tell_coordinator(News::Closed { agent, how: "closed".to_owned() });
            }
        }
        true
    }

    /// Delivers the next message to the agent, over the connection from which it reads.
    fn down(&mut self, host: usize) -> bool {
        let site = &mut self.sites[host];
        if let Seeking::Asked(over, _) = site.seeking {
            let Some(message) = self.connections[over].down.pop_front() else { return false };
            match message {
                Some(ToAgent::Resumed) => {
                    self.hang_up_but(host, over);
                    let site = &mut self.sites[host];
                    (site.link, site.seeking, site.heard) = (Some(over), Seeking::No, self.now);
                    self.tell_agent(host, Event::Received(ToAgent::Resumed));
                }
                Some(ToAgent::Refused { reason }) => {
                    site.seeking = Seeking::No;
                    self.tell_agent(host, Event::Received(ToAgent::Refused { reason }));
                }
                _ => site.seeking = Seeking::Seat,
            }
            return true;
        }
        let Some(link) = site.link else { return false };
        let Some(message) = self.connections[link].down.pop_front() else { return false };
        match message {
            Some(message) => self.tell_agent(host, Event::Received(message)),
            None => {
                (site.link, site.quiet) = (None, false);
                let (how, may_resume) = ("closed".to_owned(), host > 0);
                self.tell_agent(host, Event::ConnectionLost { how, may_resume, closed: true });
            }
        }
        true
    }

    fn hang_up_but(&mut self, host: usize, kept: usize) {
        self.sites[host].quiet = false;
        for (at, connection) in self.connections.iter_mut().enumerate() {
            if connection.host == host && at != kept {
                connection.up.push_back(None);
            }
        }
    }

    fn breaks(&mut self, host: usize, reset: bool) {
        // The system delivers messages that an agent has sent before it ended.
        let ends = self.sites[host].world.host.state.ending.has_reported();
        if host == 0 || self.is_cut(host) || ends {
            return;
        }
        for at in 0..self.connections.len() {
            let connection = &mut self.connections[at];
            if connection.host != host || connection.is_over {
                continue;
            }
            (connection.up, connection.down) = Default::default();
            connection.is_over = true;
            if let Some(agent) = connection.member {
                let how = "reset".to_owned();
                self.tell_coordinator(News::Disconnected { agent, how, reset });
            }
        }
        let site = &mut self.sites[host];
        match site.seeking {
            Seeking::Asked(..) => site.seeking = Seeking::Seat,
            _ if site.link.take().is_some() => {
                site.quiet = false;
                let how = "reset".to_owned();
                self.tell_agent(
                    host,
                    Event::ConnectionLost { how, may_resume: true, closed: false },
                );
            }
            _ => {}
        }
    }

    /// Lets the agent detect silence, or the end of it.
    fn look(&mut self, host: usize) {
        let cut = self.is_cut(host);
        let gone = self.is_gone();
        let (now, limits) = (self.now, self.limits);
        let site = &mut self.sites[host];
        if site.world.exited {
            return;
        }
        let asked = match site.seeking {
            Seeking::Asked(_, since) => Some(since),
            _ => None,
        };
        if !cut && asked.is_none() {
            site.heard = now;
        }
        let silence = now - site.heard;
        if site.link.is_some() && silence >= limits.heartbeat_timeout() {
            (site.link, site.quiet) = (None, false);
            let how = "silent".to_owned();
            self.tell_agent(host, Event::ConnectionLost { how, may_resume: false, closed: false });
        } else if site.link.is_some() && asked.is_none() {
            let quiet = silence >= limits.quiet();
            if mem::replace(&mut site.quiet, quiet) != quiet {
                self.tell_agent(host, Event::Quiet(quiet));
            }
        } else if asked.is_some_and(|since| now - since >= limits.quiet()) {
            site.seeking = Seeking::Seat;
        }
        match self.sites[host].seeking {
            Seeking::First | Seeking::Seat if cut => {}
            Seeking::First => {
                let at = self.connect(host);
                let site = &mut self.sites[host];
                (site.link, site.seeking, site.heard) = (Some(at), Seeking::No, now);
                self.tell_agent(host, Event::Connected { here: host == 0 });
            }
            Seeking::Seat if gone => {
                self.sites[host].seeking = Seeking::No;
                self.tell_agent(host, Event::CoordinatorGone { how: "refused".to_owned() });
            }
            Seeking::Seat => {
                let at = self.connect(host);
                self.sites[host].seeking = Seeking::Asked(at, now);
                self.tell_agent(host, Event::Reconnected);
            }
            Seeking::No | Seeking::Asked(..) => {}
        }
    }

    /// Delivers all messages that can arrive.
    fn deliver(&mut self) {
        let mut moved = true;
        while moved {
            moved = false;
            for at in 0..self.connections.len() {
                moved |= !self.is_cut(self.connections[at].host) && self.up(at);
            }
            for host in 0..self.sites.len() {
                moved |= !self.is_cut(host) && self.down(host);
            }
        }
    }

    fn step(&mut self) {
        self.now += STEP;
        for host in 0..self.sites.len() {
            self.look(host);
            let world = &mut self.sites[host].world;
            world.answer_all();
            (0..2).for_each(|local_rank| world.obeys(local_rank));
            world.pass(STEP);
            self.grant(host);
        }
        self.deliver();
        for at in 0..self.connections.len() {
            let connection = &self.connections[at];
            let lives = !connection.is_over && !self.sites[connection.host].world.exited;
            if let Some(agent) =
                connection.member.filter(|_| lives && !self.is_cut(connection.host))
            {
                self.tell_coordinator(News::Alive { agent });
            }
        }
        self.tell_coordinator(News::Tick);
    }

    fn happen(&mut self, what: &Happens) {
        let hosts = self.sites.len();
        match *what {
            Happens::Up(host) if !self.is_cut(host % hosts) => {
                let is_its = |at: &usize| self.connections[*at].host == host % hosts;
                let waits = |at: &usize| !self.connections[*at].up.is_empty();
                let at = (0..self.connections.len()).find(|at| is_its(at) && waits(at));
                if let Some(at) = at {
                    self.up(at);
                }
            }
            Happens::Down(host) if !self.is_cut(host % hosts) => {
                self.down(host % hosts);
            }
            Happens::Up(_) | Happens::Down(_) => {}
            Happens::Cut { host, millis } => {
                let (site, host) = (&mut self.sites[host % hosts], host % hosts);
                // Something arrives between two cuts.
                if host > 0 && self.now > site.cut_until + 3 * STEP {
                    site.cut_until = self.now + Duration::from_millis(millis);
                }
            }
            Happens::Breaks { host, reset } => self.breaks(host % hosts, reset),
            Happens::Signals { host, signal } => {
                self.tell_agent(host % hosts, Event::Signal(signal));
            }
            Happens::StartFails(host) => self.sites[host % hosts].world.start_fails = true,
            Happens::Exits { host, local_rank, code } => {
                self.sites[host % hosts].world.exits(local_rank, ExitStatus::Code(code));
                self.grant(host % hosts);
            }
            Happens::Passes { millis } => {
                let end = self.now + Duration::from_millis(millis);
                while self.now < end {
                    self.step();
                }
            }
        }
    }

    /// From now on nothing breaks, and ranks end normally.
    fn settle(&mut self) {
        for _ in 0..3000 {
            if self.sites.iter().all(|site| site.world.exited) {
                return;
            }
            self.step();
            for host in 0..self.sites.len() {
                let world = &mut self.sites[host].world;
                (0..2).for_each(|local_rank| world.exits(local_rank, ExitStatus::Code(0)));
                self.grant(host);
            }
        }
        let states = self.sites.iter().map(|site| (&site.world.host.state, site.seeking));
        panic!("it waits for ever: {:?}\n{:?}", states.collect::<Vec<_>>(), self.formation);
    }
}

fn on_its_way() -> impl Strategy<Value = Happens> {
    let host = || 0..4_usize;
    prop_oneof![
        6 => host().prop_map(Happens::Up),
        6 => host().prop_map(Happens::Down),
        4 => (50..3000_u64).prop_map(|millis| Happens::Passes { millis }),
    ]
}

fn anything() -> impl Strategy<Value = Happens> {
    let host = || 0..4_usize;
    let signal = prop_oneof![3 => Just(Signal::SIGTERM), 1 => Just(Signal::SIGINT)];
    prop_oneof![
        16 => on_its_way(),
        3 => (host(), 0..9000_u64).prop_map(|(host, millis)| Happens::Cut { host, millis }),
        3 => (host(), any::<bool>()).prop_map(|(host, reset)| Happens::Breaks { host, reset }),
        2 => (host(), signal).prop_map(|(host, signal)| Happens::Signals { host, signal }),
        1 => host().prop_map(Happens::StartFails),
        2 => (host(), 0..2_usize, prop_oneof![Just(0), Just(7)])
            .prop_map(|(host, local_rank, code)| Happens::Exits { host, local_rank, code }),
    ]
}

/// Returns events in which hosts leave, and no cut is so long that a host is considered lost.
fn departures() -> impl Strategy<Value = Happens> {
    let guest = || 1..4_usize;
    prop_oneof![
        8 => on_its_way(),
        2 => (guest(), 0..2500_u64).prop_map(|(host, millis)| Happens::Cut { host, millis }),
        2 => guest().prop_map(|host| Happens::Breaks { host, reset: false }),
        2 => guest().prop_map(|host| Happens::Signals { host, signal: Signal::SIGTERM }),
    ]
}

proptest! {
    #[test]
    fn all_agents_end(
        hosts in 2..4_usize,
        max_restarts in 0..3_u32,
        elastic in any::<bool>(),
        story in prop::collection::vec(anything(), 0..60),
    ) {
        let mut job = Job::new(hosts, max_restarts, elastic);
        for what in &story {
            job.happen(what);
        }
        job.settle();
    }

    #[test]
    fn a_host_that_leaves_costs_the_others_nothing(
        story in prop::collection::vec(departures(), 0..60),
    ) {
        let mut job = Job::new(4, 0, true);
        let mut leaving = BTreeSet::new();
        for what in &story {
            // A user who repeats a request does not wait for a connection.
            if let Happens::Signals { host, .. } = what && !leaving.insert(*host) {
                continue;
            }
            job.happen(what);
        }
        job.settle();
        let job_result = job.formation.job_result().unwrap();
        prop_assert!(job_result.code == 0 && job_result.cause.is_none(), "{:?}", job_result);
    }
}
