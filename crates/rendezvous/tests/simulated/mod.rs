//! Agents, a coordinator and a network between them, in simulated time.
//!
//! The coordinator is the real decision. Agents do what the protocol asks of them; every link has a
//! latency of its own and keeps the order of messages. One seed gives one run.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use brigade_rendezvous::{
    Action, AgentId, Event, Formation, FromAgent, Join, Rules, ToAgent, encode,
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

/// What it took until the survivors ran again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cost {
    /// Messages to and from the agent that had most of them. Beats are not counted.
    pub(crate) messages: usize,
    /// Bytes to and from the agent that had most of them.
    pub(crate) bytes: usize,
    /// Simulated time from the loss until the last survivor runs the next attempt.
    pub(crate) time: Duration,
    /// Attempts that were begun.
    pub(crate) attempts: u32,
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
    // Some time into the attempt, so that beats have spread.
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
    random: Pcg64,
}

struct Agent {
    latency: Duration,
    /// When the last message on its way arrives; no later one is earlier.
    arrives: [Duration; 2],
    lives: bool,
    runs: Option<u32>,
    clock: Duration,
}

enum Happens {
    Joins(usize),
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
        let rules = Rules {
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
            runs: None,
            clock: random.random_range(Duration::ZERO..Duration::from_secs(1_000_000)),
        };
        let agents: Vec<_> = (0..agents).map(agent).collect();
        Self {
            formation: Formation::new(rules),
            now: Duration::ZERO,
            queue: BTreeMap::new(),
            happened: 0,
            cost: vec![(0, 0); agents.len()],
            agents,
            attempts: 0,
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
        let ((at, _), what) = self.queue.pop_first().expect("beats go on for ever");
        self.now = at;
        match what {
            Happens::Joins(agent) => {
                let join = Join {
                    run_id: "simulated".into(),
                    nproc: 8,
                    sent: self.clock(agent),
                    ..Join::new(&format!("node{agent:04}"))
                };
                self.say(agent, FromAgent::Join(join));
                self.later(self.now + BEAT, Happens::Beats(agent));
            }
            Happens::Beats(agent) if self.agents[agent].lives => {
                let sent = self.clock(agent);
                self.say(agent, FromAgent::Beat { sent });
                self.later(self.now + BEAT, Happens::Beats(agent));
            }
            Happens::HasStopped(agent, attempt) if self.agents[agent].lives => {
                let port = 29_500;
                self.say(agent, FromAgent::Stopped { attempt, port, killed: false, stuck: None });
            }
            Happens::Told(agent, message) if self.agents[agent].lives => self.told(agent, message),
            Happens::Heard(agent, FromAgent::Join(join)) => {
                let (agent, seen) = (AgentId(agent as u64), Some("10.0.0.1".into()));
                self.event(Event::Joined { agent, join, seen, remote: true });
            }
            Happens::Heard(agent, message) => {
                self.event(Event::Said { agent: AgentId(agent as u64), message });
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
            ToAgent::Stop { attempt, .. } => {
                self.agents[agent].runs = None;
                let time = self.random.random_range(Duration::from_millis(1)..STOPPING);
                self.later(self.now + time, Happens::HasStopped(agent, attempt));
            }
            _ => {}
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
                    let agent = usize::try_from(agent).unwrap_or(usize::MAX);
                    self.cost[agent].0 += 1;
                    self.cost[agent].1 += encode(&message).len();
                    let at = self.arrival(agent, 1);
                    self.later(at, Happens::Told(agent, message));
                }
                Action::Finish(verdict) => panic!("the job ended: {verdict:?}"),
                Action::Close(_) | Action::Say(_) => {}
            }
        }
        self.attempts += u32::from(started);
        if let Some(due) = self.formation.deadline().filter(|due| before != Some(*due)) {
            self.later(due, Happens::Tick);
        }
    }
}

const BEAT: Duration = Duration::from_secs(1);
/// The longest that ranks take to stop.
const STOPPING: Duration = Duration::from_millis(100);
