//! Agents, a coordinator and a network between them, in simulated time.
//!
//! The coordinator is the real decision. Agents do what the protocol asks of them; every link has a
//! latency of its own and keeps the order of messages. One seed gives one run.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use brigade_rendezvous::{
    Action, AgentId, Event, Formation, FromAgent, Join, Rules, TimeLimits, ToAgent, encode,
};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

/// How hosts are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// The kernel at the other end closes the connection: the agent's process has ended.
    Broken,
    /// Nothing comes any more: the host, or the way to it, is gone.
    Silent,
}

/// What disturbs a job for a while, and what it should survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disturbance {
    /// Nothing passes between some agents and the coordinator.
    Cut,
    /// Some agents stand still, as after SIGSTOP.
    PausedAgents,
    /// The coordinator stands still.
    PausedCoordinator,
}

/// What it took until the survivors ran again, or until all agents were connected again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Messages to and from the agent that had most of them. Beats are not counted.
    pub(crate) messages: usize,
    /// Bytes to and from the agent that had most of them.
    pub(crate) bytes: usize,
    /// Simulated time from the loss until the last survivor runs the next attempt, or from the end
    /// of a disturbance until the last agent was connected again.
    pub(crate) time: Duration,
    /// Attempts that were begun.
    pub(crate) attempts: u32,
    /// Agents that came back too late.
    pub(crate) refused: usize,
}

/// Starts a job of this many hosts, loses some of them at once, and lets it go on.
pub(crate) fn reform(agents: usize, lost: usize, loss: Loss, seed: u64) -> Cost {
    let mut world = World::new(agents, lost, seed);
    for agent in 0..agents {
        let at = world.random.random_range(Duration::ZERO..Duration::from_secs(1));
        world.later(at, Happens::Joins(agent));
    }
    world.run_until_all_run(0);
    world.cost = vec![(0, 0); agents];
    let now = world.now;
    // Some time into the attempt, so that heartbeats are spread.
    let quiet = world.random.random_range(Duration::from_secs(20)..Duration::from_secs(21));
    world.run_for(quiet);
    let mut victims = BTreeSet::new();
    while victims.len() < lost {
        victims.insert(world.random.random_range(0..agents));
    }
    let start = now + quiet;
    for victim in victims {
        world.agents[victim].lives = false;
        if loss == Loss::Broken {
            world.send_up(victim, Happens::Closed(victim));
        }
    }
    world.run_until_all_run(1);
    let most = |of: fn(&(usize, usize)) -> usize| world.cost.iter().map(of).max().unwrap_or(0);
    Cost {
        messages: most(|cost| cost.0),
        bytes: most(|cost| cost.1),
        time: world.now - start,
        attempts: world.attempts,
        refused: world.refused,
    }
}

/// Disturbs some agents of a job of this many hosts for that long.
pub(crate) fn disturb(
    agents: usize,
    disturbed: usize,
    disturbance: Disturbance,
    time: Duration,
    seed: u64,
) -> Cost {
    let mut world = World::new(agents, 0, seed);
    for agent in 0..agents {
        let at = world.random.random_range(Duration::ZERO..Duration::from_secs(1));
        world.later(at, Happens::Joins(agent));
    }
    world.run_until_all_run(0);
    let quiet = world.random.random_range(Duration::from_secs(20)..Duration::from_secs(21));
    world.run_for(quiet);
    world.cost = vec![(0, 0); agents];
    let mut victims = BTreeSet::new();
    while victims.len() < disturbed && disturbance != Disturbance::PausedCoordinator {
        victims.insert(world.random.random_range(0..agents));
    }
    for victim in &victims {
        match disturbance {
            Disturbance::Cut => world.cut(*victim),
            _ => world.agents[*victim].paused = true,
        }
    }
    world.paused = disturbance == Disturbance::PausedCoordinator;
    world.run_for(time);
    let mended = world.now;
    for victim in &victims {
        let victim = &mut world.agents[*victim];
        (victim.cut, victim.paused) = (false, false);
        victim.seeks &= victim.tries > 0;
    }
    world.paused = false;
    for (_, what) in std::mem::take(&mut world.held) {
        world.later(mended, what);
    }
    while world.agents.iter().any(|agent| agent.seeks) {
        world.step();
    }
    let took = world.now - mended;
    // The result comes soon, whatever it is.
    world.run_for(Duration::from_secs(60));
    let most = |of: fn(&(usize, usize)) -> usize| world.cost.iter().map(of).max().unwrap_or(0);
    Cost {
        messages: most(|cost| cost.0),
        bytes: most(|cost| cost.1),
        time: took,
        attempts: world.attempts,
        refused: world.refused,
    }
}

struct World {
    formation: Formation,
    now: Duration,
    queue: BTreeMap<(Duration, u64), Happens>,
    happened: u64,
    agents: Vec<Agent>,
    /// Messages and bytes of each agent.
    cost: Vec<(usize, usize)>,
    attempts: u32,
    /// The coordinator stands still.
    paused: bool,
    /// What waits for hosts that stand still.
    held: Vec<(Duration, Happens)>,
    /// Whose connection that is, by number.
    connections: Vec<usize>,
    refused: usize,
    limits: TimeLimits,
    random: Pcg64,
}

struct Agent {
    latency: Duration,
    /// When the last message on its way arrives; no later one is earlier.
    arrives: [Duration; 2],
    lives: bool,
    /// Nothing passes between it and the coordinator.
    cut: bool,
    paused: bool,
    /// It is without a connection.
    seeks: bool,
    /// How often it has tried to make a new one. TCP heals a cut that is over before that.
    tries: u32,
    resumes: u32,
    runs: Option<u32>,
    clock: Duration,
}

enum Happens {
    Joins(usize),
    /// It tries to connect again.
    Seeks(usize),
    Beats(usize),
    /// It has stopped its ranks.
    HasStopped(usize, u32),
    /// At the coordinator.
    Heard(usize, FromAgent),
    Closed(usize),
    /// At the agent.
    Told(usize, ToAgent),
    Tick,
}

impl World {
    fn new(agents: usize, lost: usize, seed: u64) -> Self {
        let limits = TimeLimits::default();
        let rules = Rules {
            limits,
            run_id: "simulated".into(),
            min_nodes: agents - lost,
            max_nodes: agents,
            max_restarts: 100,
            last_call: Duration::from_secs(60),
            ..Rules::default()
        };
        let mut random = Pcg64::seed_from_u64(seed);
        let agent = |_| Agent {
            latency: random.random_range(Duration::from_micros(50)..Duration::from_millis(5)),
            arrives: [Duration::ZERO; 2],
            lives: true,
            cut: false,
            paused: false,
            seeks: false,
            tries: 0,
            resumes: 0,
            runs: None,
            clock: random.random_range(Duration::ZERO..Duration::from_secs(1_000_000)),
        };
        let connections = (0..agents).collect();
        let agents: Vec<_> = (0..agents).map(agent).collect();
        Self {
            formation: Formation::new(rules),
            now: Duration::ZERO,
            queue: BTreeMap::new(),
            happened: 0,
            cost: vec![(0, 0); agents.len()],
            agents,
            attempts: 0,
            paused: false,
            held: Vec::new(),
            connections,
            refused: 0,
            limits,
            random,
        }
    }

    fn later(&mut self, at: Duration, what: Happens) {
        self.happened += 1;
        self.queue.insert((at, self.happened), what);
    }

    fn send_up(&mut self, agent: usize, what: Happens) {
        let at = self.arrival(agent, 0);
        self.later(at, what);
    }

    fn arrival(&mut self, agent: usize, way: usize) -> Duration {
        let agent = &mut self.agents[agent];
        let jitter = agent.latency.mul_f64(self.random.random_range(0.0..0.5));
        agent.arrives[way] = agent.arrives[way].max(self.now + agent.latency + jitter);
        agent.arrives[way]
    }

    /// Nothing passes any more: the agent finds its connection quiet some time after the last beat.
    fn cut(&mut self, victim: usize) {
        let beat = self.limits.heartbeat_interval();
        let since = self.random.random_range(Duration::ZERO..beat);
        self.agents[victim].cut = true;
        self.agents[victim].seeks = true;
        self.later(self.now + self.limits.quiet() - since, Happens::Seeks(victim));
    }

    /// It has to wait: what it is for stands still.
    fn is_held(&self, what: &Happens) -> bool {
        match what {
            Happens::Heard(..) | Happens::Closed(_) | Happens::Tick => self.paused,
            Happens::Beats(agent)
            | Happens::Told(agent, _)
            | Happens::HasStopped(agent, _)
            | Happens::Seeks(agent) => self.agents[*agent].paused,
            Happens::Joins(_) => false,
        }
    }

    /// It is on its way over a connection that is cut.
    fn is_lost(&self, what: &Happens) -> bool {
        match what {
            Happens::Heard(agent, _) | Happens::Told(agent, _) => self.agents[*agent].cut,
            _ => false,
        }
    }

    fn say(&mut self, agent: usize, message: FromAgent) {
        if !matches!(message, FromAgent::Beat { .. }) {
            self.cost[agent].0 += 1;
            self.cost[agent].1 += encode(&message).len();
        }
        self.send_up(agent, Happens::Heard(agent, message));
    }

    fn run_until_all_run(&mut self, attempt: u32) {
        let there = |agent: &Agent| !agent.lives || agent.runs.is_some_and(|runs| runs >= attempt);
        while !self.agents.iter().all(there) {
            self.step();
        }
    }

    fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.queue.first_key_value().is_some_and(|((at, _), _)| *at < end) {
            self.step();
        }
        self.now = end;
    }

    fn step(&mut self) {
        let ((at, _), what) = self.queue.pop_first().expect("heartbeats never end");
        self.now = at;
        if self.is_held(&what) {
            self.held.push((at, what));
            return;
        }
        if self.is_lost(&what) {
            return;
        }
        match what {
            Happens::Seeks(agent) if !self.agents[agent].seeks => {}
            Happens::Seeks(agent) if self.agents[agent].cut => {
                self.agents[agent].tries += 1;
                let pause = self.limits.reconnect_attempt() + self.limits.reconnect_pause();
                self.later(self.now + pause, Happens::Seeks(agent));
            }
            Happens::Seeks(agent) => {
                self.agents[agent].resumes += 1;
                let join = Join {
                    resume: self.agents[agent].resumes,
                    last_attempt: self.agents[agent].runs,
                    ..self.join_of(agent)
                };
                self.say(agent, FromAgent::Join(join));
            }
            Happens::Joins(agent) => {
                let join = self.join_of(agent);
                self.say(agent, FromAgent::Join(join));
                self.later(self.now + self.limits.heartbeat_interval(), Happens::Beats(agent));
            }
            Happens::Beats(agent) if self.agents[agent].lives => {
                let sent = self.clock(agent);
                self.say(agent, FromAgent::Beat { sent });
                self.later(self.now + self.limits.heartbeat_interval(), Happens::Beats(agent));
            }
            Happens::HasStopped(agent, attempt) if self.agents[agent].lives => {
                let port = 29_500;
                self.say(agent, FromAgent::Stopped { attempt, port, killed: false, stuck: None });
            }
            Happens::Told(agent, message) if self.agents[agent].lives => self.told(agent, message),
            Happens::Heard(agent, FromAgent::Join(join)) => {
                let seen = Some("10.0.0.1".into());
                let mut number = agent as u64;
                if join.resume > 0 {
                    number = self.connections.len() as u64;
                    self.connections.push(agent);
                }
                let agent = AgentId(number);
                self.event(Event::Joined { agent, join, seen, remote: true });
            }
            Happens::Heard(agent, message) => {
                self.event(Event::Message { agent: AgentId(agent as u64), message });
            }
            Happens::Closed(agent) => {
                let (agent, how) = (AgentId(agent as u64), "the connection was closed".into());
                self.event(Event::Closed { agent, how });
            }
            Happens::Tick => {
                if self.formation.deadline().is_some_and(|due| due <= self.now) {
                    self.event(Event::Tick);
                }
            }
            Happens::Beats(_) | Happens::HasStopped(..) | Happens::Told(..) => {}
        }
    }

    fn told(&mut self, agent: usize, message: ToAgent) {
        match message {
            ToAgent::Start(part) => {
                assert_eq!(self.agents[agent].runs, None, "two attempts at a time");
                self.agents[agent].runs = Some(part.attempt);
            }
            ToAgent::Resumed => self.agents[agent].seeks = false,
            ToAgent::Refused { .. } => {
                self.refused += 1;
                (self.agents[agent].seeks, self.agents[agent].lives) = (false, false);
            }
            ToAgent::Stop { attempt, .. } => {
                self.agents[agent].runs = None;
                let time = self.random.random_range(Duration::from_millis(1)..STOPPING);
                self.later(self.now + time, Happens::HasStopped(agent, attempt));
            }
            _ => {}
        }
    }

    fn join_of(&self, agent: usize) -> Join {
        Join {
            run_id: "simulated".into(),
            agent: format!("agent{agent:04}"),
            nproc: 8,
            sent: self.clock(agent),
            ..Join::new(&format!("node{agent:04}"))
        }
    }

    fn clock(&self, agent: usize) -> u64 {
        let millis = (self.now + self.agents[agent].clock).as_millis();
        u64::try_from(millis).unwrap_or(u64::MAX)
    }

    fn event(&mut self, event: Event) {
        let before = self.formation.deadline();
        let mut started = false;
        for action in self.formation.handle(self.now, event) {
            match action {
                Action::Send(AgentId(agent), message) => {
                    started |= matches!(message, ToAgent::Start(_));
                    let agent = self.connections[usize::try_from(agent).unwrap_or(usize::MAX)];
                    self.cost[agent].0 += 1;
                    self.cost[agent].1 += encode(&message).len();
                    let at = self.arrival(agent, 1);
                    self.later(at, Happens::Told(agent, message));
                }
                Action::Finish(job_result) => panic!("the job ended: {job_result:?}"),
                Action::Adopt { .. } | Action::Close(_) | Action::Say(_) | Action::Record(_) => {}
            }
        }
        self.attempts += u32::from(started);
        if let Some(due) = self.formation.deadline().filter(|due| before != Some(*due)) {
            self.later(due, Happens::Tick);
        }
    }
}

/// The longest that ranks take to stop.
const STOPPING: Duration = Duration::from_millis(100);
