//! Properties that hold for all events in any order.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::Assignment;

/// One event. There are few agents, so that events often concern the same one.
#[derive(Clone, Debug)]
enum Happens {
    Joins {
        id: u64,
        node_rank: Option<usize>,
        nproc: usize,
        last: Option<u32>,
        remote: bool,
    },
    Fails {
        id: u64,
        back: u32,
        code: i32,
        at: u64,
    },
    Finishes {
        id: u64,
        back: u32,
    },
    Stops {
        id: u64,
        back: u32,
        killed: bool,
    },
    Closes {
        id: u64,
    },
    Interrupts {
        id: Option<u64>,
        signal: i32,
    },
    Beats {
        id: u64,
        sent: u64,
    },
    JoinsAgain {
        id: u64,
    },
    /// The connection breaks, with or without a notice. The agent continues.
    Cut {
        id: u64,
        seen: Option<bool>,
    },
    /// An agent reconnects.
    Resumes {
        id: u64,
    },
    Leaves {
        id: u64,
    },
    Cannot {
        id: u64,
    },
    Passes {
        millis: u64,
    },
}

fn happens() -> impl Strategy<Value = Happens> {
    let id = 0..6_u64;
    let back = prop_oneof![8 => Just(0_u32), 1 => 1..3_u32];
    prop_oneof![
        6 => (
            id.clone(),
            prop::option::weighted(0.3, 0..4_usize),
            0..4_usize,
            prop::option::weighted(0.2, 0..9_u32),
            any::<bool>(),
        )
            .prop_map(|(id, node_rank, nproc, last, remote)| {
                Happens::Joins { id, node_rank, nproc, last, remote }
            }),
        2 => (id.clone(), back.clone(), 0..300, any::<u64>())
            .prop_map(|(id, back, code, at)| Happens::Fails { id, back, code, at }),
        3 => (id.clone(), back.clone()).prop_map(|(id, back)| Happens::Finishes { id, back }),
        9 => (id.clone(), back, any::<bool>())
            .prop_map(|(id, back, killed)| Happens::Stops { id, back, killed }),
        2 => id.clone().prop_map(|id| Happens::Closes { id }),
        1 => (prop::option::of(id.clone()), prop_oneof![Just(2), Just(15), any::<i32>()])
            .prop_map(|(id, signal)| Happens::Interrupts { id, signal }),
        4 => (id.clone(), any::<u64>()).prop_map(|(id, sent)| Happens::Beats { id, sent }),
        1 => id.clone().prop_map(|id| Happens::JoinsAgain { id }),
        3 => (id.clone(), prop::option::of(any::<bool>()))
            .prop_map(|(id, seen)| Happens::Cut { id, seen }),
        4 => id.clone().prop_map(|id| Happens::Resumes { id }),
        1 => id.clone().prop_map(|id| Happens::Leaves { id }),
        1 => id.prop_map(|id| Happens::Cannot { id }),
        4 => (0..6_000_u64).prop_map(|millis| Happens::Passes { millis }),
    ]
}

/// Actual state of an agent.
#[derive(Debug, Default)]
struct Agent {
    is_remote: bool,
    /// Messages to and from the agent are lost.
    is_cut: bool,
    running: Option<Assignment>,
    /// Last attempt for which the agent received a start.
    last: Option<u32>,
    requests: u32,
    resumes: u32,
}

/// Actual state of the hosts, to which the state machine's decisions are compared.
struct World {
    formation: Formation,
    rules: Rules,
    now: Duration,
    /// Living agents, by their numbers.
    agents: BTreeMap<u64, Agent>,
    /// Agents whose ranks have all finished in the current attempt.
    finished: BTreeSet<u64>,
    /// Current agent of each host.
    connection: [u64; 6],
    connections: u64,
    last: Option<u32>,
    over: bool,
}

impl World {
    fn new(rules: Rules) -> Self {
        Self {
            formation: Formation::new(rules.clone()),
            rules,
            now: Duration::ZERO,
            agents: BTreeMap::new(),
            finished: BTreeSet::new(),
            connection: [0; 6],
            connections: 0,
            last: None,
            over: false,
        }
    }

    fn event(&mut self, event: Event) {
        let actions = self.formation.handle(self.now, event);
        let mut starts: Vec<Assignment> = Vec::new();
        let mut in_vain = 0;
        for action in actions {
            match action {
                Action::Adopt { agent: AgentId(id), connection: AgentId(connection) } => {
                    let new = self.agents.remove(&connection).expect("a connection that is there");
                    let agent = self.agents.get_mut(&id).expect("a living agent");
                    assert_eq!((new.last, new.requests), (agent.last, agent.requests), "its own");
                    agent.is_cut = false;
                }
                Action::Send(AgentId(id), message) => {
                    let agent = self.agents.get_mut(&id).expect("a living agent");
                    if let ToAgent::Start(part) = &message {
                        in_vain += usize::from(agent.is_cut);
                        if part.attempt > self.last.unwrap_or(0) || self.last.is_none() {
                            starts.push(part.clone());
                        }
                    }
                    if agent.is_cut {
                        continue;
                    }
                    let running = &mut agent.running;
                    match message {
                        ToAgent::Start(part) => {
                            assert!(running.is_none(), "two attempts at a time on one host");
                            assert_ne!(agent.last, Some(part.attempt), "an attempt starts once");
                            agent.last = Some(part.attempt);
                            *running = Some(part);
                        }
                        ToAgent::Stop { attempt, .. } => {
                            assert_eq!(Some(attempt), self.last, "a stop of the present attempt");
                        }
                        ToAgent::End(_) => {
                            let done = running.is_none() || self.finished.contains(&id);
                            assert!(done, "ended while it runs");
                        }
                        _ => {}
                    }
                }
                Action::Close(AgentId(id)) => {
                    self.agents.remove(&id);
                }
                Action::Say(line) => assert!(!line.is_empty()),
                Action::Record(_) => {}
                Action::Finish(job_result) => {
                    assert!(!self.over, "a job ends once");
                    self.over = true;
                    assert_eq!(self.formation.job_result(), Some(&job_result));
                    assert!(job_result.cause.is_some() || job_result.code == 0);
                }
            }
        }
        if !starts.is_empty() {
            self.check(&starts, in_vain);
        }
        if let Some(deadline) = self.formation.deadline() {
            assert!(deadline > self.now, "nothing is due twice");
        }
    }

    fn check(&mut self, starts: &[Assignment], in_vain: usize) {
        assert!(!self.over);
        self.finished.clear();
        let first = &starts[0];
        assert!(self.last.is_none_or(|last| first.attempt > last), "attempts go up");
        self.last = Some(first.attempt);
        assert!(starts.len() >= self.rules.min_nodes && starts.len() <= self.rules.max_nodes);
        assert!(first.restarts <= self.rules.max_restarts);
        let running = self.agents.values().filter(|agent| agent.running.is_some());
        assert_eq!(running.count() + in_vain, starts.len(), "one attempt in the whole job");
        let mut next = 0;
        for (node_rank, part) in starts.iter().enumerate() {
            assert_eq!((part.node_rank, part.num_nodes), (node_rank, starts.len()));
            assert_eq!(part.first_rank, next);
            next += part.nproc;
            let common = |part: &Assignment| {
                (part.attempt, part.world_size, part.master_addr.clone(), part.master_port)
            };
            assert_eq!(common(part), common(first));
        }
        assert_eq!(next, first.world_size);
    }

    fn is_cut(&self, agent: AgentId) -> bool {
        self.agents.get(&agent.0).is_some_and(|agent| agent.is_cut)
    }

    /// Passes on a message of an agent, unless it is lost.
    fn says(&mut self, agent: AgentId, message: FromAgent) {
        if !self.is_cut(agent) {
            self.event(Event::Message { agent, message });
        }
    }

    fn resumes(&mut self, id: u64) {
        let AgentId(number) = AgentId(self.connection[id as usize]);
        let agent = self.agents.get_mut(&number).filter(|agent| agent.is_remote);
        let Some(agent) = agent else { return };
        agent.resumes += 1;
        let (last, requests, resume) = (agent.last, agent.requests, agent.resumes);
        self.connections += 1;
        let connection = self.connections;
        let new = Agent { last, requests, ..Agent::default() };
        self.agents.insert(connection, new);
        let name = format!("agent-{number}");
        let join = Join { resume, agent: name, last_attempt: last, ..join(id) };
        let agent = AgentId(connection);
        self.event(Event::Joined { agent, join, seen: None, remote: true });
        // The agent was refused: an agent that has lost its seat ends.
        if self.is_cut(AgentId(number)) {
            self.agents.remove(&number);
        }
    }

    fn happen(&mut self, what: &Happens) {
        let connection = self.connection;
        let agent = |id: u64| AgentId(connection[id as usize]);
        let last = self.last;
        let of = |back: u32| last.unwrap_or(0).wrapping_sub(back);
        match *what {
            Happens::Joins { id, node_rank, nproc, last, remote } => {
                self.connections += 1;
                self.connection[id as usize] = self.connections;
                let own = Agent { is_remote: remote, ..Agent::default() };
                self.agents.insert(self.connections, own);
                let name = format!("agent-{}", self.connections);
                let join = Join { node_rank, nproc, last_attempt: last, agent: name, ..join(id) };
                let agent = AgentId(self.connections);
                self.event(Event::Joined { agent, join, seen: None, remote });
            }
            Happens::Fails { id, back, code, at } => {
                let failure = failure(id, of(back), at, ExitStatus::Code(code));
                self.says(agent(id), FromAgent::Failed(failure));
            }
            Happens::Finishes { id, back } => {
                if back == 0 && !self.is_cut(agent(id)) {
                    self.finished.insert(agent(id).0);
                }
                self.says(agent(id), FromAgent::Finished { attempt: of(back) });
            }
            Happens::Stops { id, back, killed } => {
                let message =
                    FromAgent::Stopped { attempt: of(back), port: 1, killed, stuck: None };
                // An agent that is cut off stops only an attempt whose start it has received.
                let is_of = |it: &Assignment| it.attempt == of(back);
                if let Some(agent) = self.agents.get_mut(&agent(id).0)
                    && (back == 0 && !agent.is_cut || agent.running.as_ref().is_some_and(is_of))
                {
                    agent.running = None;
                }
                self.says(agent(id), message);
            }
            Happens::Closes { id } => {
                let agent = agent(id);
                self.agents.remove(&agent.0);
                self.event(Event::Closed { agent, how: "gone".into() });
            }
            Happens::Cut { id, seen } => {
                let agent = agent(id);
                let remote = self.agents.get_mut(&agent.0).filter(|agent| agent.is_remote);
                let Some(its) = remote else { return };
                its.is_cut = true;
                if let Some(reset) = seen {
                    self.event(Event::Disconnected { agent, how: "broken".into(), reset });
                }
            }
            Happens::Resumes { id } => self.resumes(id),
            Happens::Interrupts { id, signal } => match id {
                Some(id) => {
                    let Some(its) = self.agents.get_mut(&agent(id).0) else { return };
                    its.requests += 1;
                    let count = its.requests;
                    self.says(agent(id), FromAgent::Interrupted { signal, count });
                }
                None => self.event(Event::Interrupt { signal }),
            },
            Happens::Beats { id, sent } => self.says(agent(id), FromAgent::Beat { sent }),
            Happens::Leaves { id } => self.says(agent(id), FromAgent::Leaving),
            Happens::Cannot { id } => {
                self.says(agent(id), FromAgent::Unable { reason: "no memory".into() });
            }
            Happens::JoinsAgain { id } => self.says(agent(id), FromAgent::Join(join(id))),
            Happens::Passes { millis } => {
                let end = self.now + Duration::from_millis(millis);
                while let Some(due) = self.formation.deadline().filter(|due| *due <= end) {
                    self.now = due;
                    self.event(Event::Tick);
                }
                self.now = end;
            }
        }
    }

    /// Lets time pass, without other events.
    fn wait(&mut self) {
        for _ in 0..1000 {
            let Some(deadline) = self.formation.deadline() else { return };
            self.now = deadline;
            self.event(Event::Tick);
        }
        panic!("it waits for ever, and wakes up all the time");
    }

    /// From now on all agents follow their messages, and their ranks finish.
    fn behave(&mut self) {
        for _ in 0..100 {
            for id in 0..6 {
                if self.is_cut(AgentId(self.connection[id as usize])) {
                    self.resumes(id);
                }
            }
            let running: Vec<_> = self
                .agents
                .iter()
                .filter_map(|(id, agent)| Some((*id, agent.running.as_ref()?.attempt)))
                .collect();
            if running.is_empty() {
                break;
            }
            for (id, attempt) in running {
                let agent = AgentId(id);
                self.finished.insert(id);
                self.event(Event::Message { agent, message: FromAgent::Finished { attempt } });
                if !self.over && matches!(self.formation.state, State::Stopping(_)) {
                    if let Some(agent) = self.agents.get_mut(&id) {
                        agent.running = None;
                    }
                    let message =
                        FromAgent::Stopped { attempt, port: 1, killed: false, stuck: None };
                    self.event(Event::Message { agent, message });
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn what_always_holds(
        (min, more, restarts, late_hosts) in (1..4_usize, 0..3_usize, 0..4_u32, any::<bool>()),
        story in prop::collection::vec(happens(), 0..60),
        well in any::<bool>(),
    ) {
        let mut world =
            World::new(Rules { late_hosts, ..rules(min, min + more, restarts) });
        for what in &story {
            world.happen(what);
        }
        if well {
            world.behave();
        }
        world.wait();
        // What remains is a job of agents without a connection that could become silent.
        let settled = world.over || matches!(world.formation.state, State::Running);
        prop_assert!(settled, "{:?}", world.formation.state);
    }
}
