//! The coordinator's event loop: waits for events, passes them to the state machine, performs its actions.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use std::{io, mem};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::output::OutputSink;
use super::peer::{Ended, Origin, Peer, Stage};
use super::shared::{Command, Shared};
use crate::connection::Connection;
use crate::listener::{Limits, Listener, MAX_UNSENT};
use crate::wake::{self, Receiver};
use crate::{AgentId, Event, Formation, JobResult, Rules, TimeLimits, ToAgent};

/// State of the coordinator's thread.
pub(super) struct EventLoop {
    pub(super) formation: Formation,
    pub(super) start: Instant,
    pub(super) epoll: Epoll,
    pub(super) shared: Shared,
    commands: Receiver<Command>,
    pub(super) listener: Option<Listener>,
    pub(super) sink: Option<Box<dyn OutputSink>>,
    pub(super) peers: BTreeMap<AgentId, Peer>,
    /// Connections that are being closed, with the time limit of each.
    pub(super) closing: Vec<(Instant, AgentId)>,
    pub(super) ended: Vec<Ended>,
    /// Connections to be read once more: data is left, or nothing can be sent to them any more.
    pub(super) unread: Vec<AgentId>,
    /// Addresses whose refusal has been reported.
    pub(super) refused: Vec<IpAddr>,
    pub(super) job_result: Option<JobResult>,
    /// Connections that have not joined, with the times at which they were accepted, in order. Those that have joined
    /// or are closed are removed when the next one is accepted.
    strangers: VecDeque<(Instant, AgentId)>,
    stranger_limits: Limits,
    /// Time at which to accept again: the system had no descriptor left, or the maximum number of connections have not
    /// joined yet.
    deaf_until: Option<Instant>,
    /// `true` if connections that have not joined take all places: one that joins or closes makes room.
    is_full: bool,
    next_beat: Instant,
    pub(super) limits: TimeLimits,
    abandoned: bool,
}

impl EventLoop {
    pub(super) fn new(
        rules: Rules,
        listener: Option<Listener>,
        sink: Option<Box<dyn OutputSink>>,
        shared: Shared,
        commands: Receiver<Command>,
    ) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&commands, EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
        if let Some(listener) = &listener {
            epoll.add(listener, EpollEvent::new(EpollFlags::EPOLLIN, DOOR))?;
            if let Some(lease) = &listener.lease {
                epoll.add(lease.lost(), EpollEvent::new(EpollFlags::EPOLLIN, LEASE))?;
            }
        }
        let start = Instant::now();
        Ok(Self {
            limits: rules.limits,
            formation: Formation::new(rules),
            start,
            epoll,
            shared,
            commands,
            stranger_limits: (listener.as_ref())
                .map_or_else(Limits::default, |listener| listener.limits),
            listener,
            deaf_until: None,
            is_full: false,
            sink,
            peers: BTreeMap::new(),
            strangers: VecDeque::new(),
            closing: Vec::new(),
            ended: Vec::new(),
            unread: Vec::new(),
            refused: Vec::new(),
            next_beat: start,
            job_result: None,
            abandoned: false,
        })
    }

    /// Runs until the job is over and all agents have been informed. Returns `None` if nobody waits for the result.
    pub(super) fn run(mut self) -> Option<JobResult> {
        while !self.abandoned && !self.is_done() {
            self.wait();
            self.keep_time();
            for agent in mem::take(&mut self.unread) {
                self.read(agent);
            }
        }
        self.job_result.filter(|_| !self.abandoned)
    }

    /// Ends the loop without a result, so that all agents search for another coordinator.
    pub(super) fn abandon(&mut self) {
        self.abandoned = true;
    }

    fn is_done(&self) -> bool {
        self.job_result.is_some()
            && self.peers.values().all(Peer::is_stranger)
            && !self.formation.has_uninformed_members()
    }

    fn wait(&mut self) {
        let mut events = [EpollEvent::empty(); 64];
        let mut timeout = self.timeout();
        // All received data is read first: it takes precedence over time limits.
        for _ in 0..MAX_ROUNDS {
            let Ok(count) = self.epoll.wait(&mut events, timeout) else {
                // EINTR: this process was stopped and has continued. Data that was received in the meantime also takes
                // precedence over time limits.
                timeout = EpollTimeout::ZERO;
                continue;
            };
            for event in &events[..count] {
                match event.data() {
                    WAKE => self.take_commands(),
                    DOOR => self.accept(),
                    // Another process has been elected as the coordinator, and the agents must connect to it.
                    LEASE => self.abandoned = true,
                    number => self.ready(AgentId(number - FIRST), event.events()),
                }
            }
            if count < events.len() {
                return;
            }
            timeout = EpollTimeout::ZERO;
        }
    }

    fn timeout(&self) -> EpollTimeout {
        if !self.unread.is_empty() {
            return EpollTimeout::ZERO;
        }
        let due = self.formation.deadline().and_then(|due| self.start.checked_add(due));
        let beat = self.peers.values().any(Peer::is_remote).then_some(self.next_beat);
        let greeting = self.stranger_limits.greeting;
        let stranger = self.strangers.front().and_then(|it| it.0.checked_add(greeting));
        let next = stranger
            .into_iter()
            .chain(self.closing.iter().map(|(until, _)| *until))
            .chain(self.ended.iter().map(|ended| ended.until))
            .chain([due, beat, self.deaf_until].into_iter().flatten())
            .min();
        let Some(next) = next else { return EpollTimeout::NONE };
        wake::until(Some(next))
    }

    fn take_commands(&mut self) {
        while let Some(command) = self.commands.try_recv() {
            match command {
                Command::Shown(agent, bytes) => {
                    if let Some(peer) = self.peers.get_mut(&agent) {
                        peer.unshown = peer.unshown.saturating_sub(bytes);
                        self.send(agent, &ToAgent::Taken { bytes });
                    }
                }
                Command::Local(agent, socket) => {
                    let wire = Connection::new(socket, None, MAX_UNSENT);
                    self.enter(agent, wire, Stage::Joining, Origin::Local, "this host");
                }
                Command::Session { agent, reader, writer, host } => {
                    self.session(agent, reader, writer, host);
                }
                Command::Explain(agent, how) => self.explain(agent, how),
                Command::Interrupt(signal) => self.tell(Event::Interrupt { signal }),
                Command::Forward(signal) => self.send_all(&ToAgent::Signal { signal }, |_| true),
                Command::Abandon => self.abandoned = true,
            }
        }
    }

    /// Sends a message to all joined agents for which `wanted` is true.
    fn send_all(&mut self, message: &ToAgent, wanted: impl Fn(&Peer) -> bool) {
        let wanted = |peer: &Peer| matches!(peer.stage, Stage::Member) && wanted(peer);
        let members = self.peers.iter().filter(|(_, peer)| wanted(peer));
        for agent in members.map(|(agent, _)| *agent).collect::<Vec<_>>() {
            self.send(agent, message);
        }
    }

    fn session(&mut self, agent: AgentId, reader: OwnedFd, writer: OwnedFd, host: String) {
        let wire = Connection::new(reader, Some(writer), MAX_UNSENT);
        self.enter(agent, wire, Stage::Joining, Origin::Session, &host);
        self.tell(Event::Expected { agent, host });
        if !self.peers.contains_key(&agent) {
            let how = "its descriptors cannot be polled".into();
            self.tell(Event::Closed { agent, how });
        }
    }

    fn accept(&mut self) {
        let now = Instant::now();
        if let Some(until) = self.full_until(now) {
            // Connections that wait in the system's queue in the meantime are not lost.
            self.is_full = true;
            return self.stop_accepting(until);
        }
        let Some(listener) = &self.listener else { return };
        match listener.accept(self.limits) {
            Ok((mut wire, address)) => {
                wire.limit_frames(MAX_JOIN);
                let agent = self.shared.new_agent();
                let host = address.to_string();
                self.enter(agent, Ok(wire), Stage::Greeting, Origin::Tcp(address), &host);
                self.strangers.push_back((now, agent));
            }
            Err(error) if is_exhausted(&error) => {
                self.stop_accepting(now + DEAF);
                self.say("cannot accept connections: too many open files (see ulimit -n)");
            }
            // The connection was closed already, or there is none.
            Err(_) => {}
        }
    }

    /// Makes room for one more stranger; the time until then if there is none yet. The one that
    /// goes is the oldest of the address that has most of them, so that a host that opens many
    /// connections pushes out its own.
    fn full_until(&mut self, now: Instant) -> Option<Instant> {
        if self.strangers.len() < self.stranger_limits.strangers {
            return None;
        }
        self.forget_strangers();
        if self.strangers.len() < self.stranger_limits.strangers {
            return None;
        }
        let origin = |agent: &AgentId| self.peers.get(agent).map(|peer| peer.origin);
        let mut origins: Vec<Option<Origin>> =
            self.strangers.iter().map(|(_, agent)| origin(agent)).collect();
        origins.sort_unstable();
        let most = origins.chunk_by(|a, b| a == b).max_by_key(|same| same.len())?[0];
        let at = self.strangers.iter().position(|(_, agent)| origin(agent) == most)?;
        let until = self.strangers[at].0 + self.stranger_limits.grace;
        if until > now {
            return Some(until);
        }
        if let Some((_, agent)) = self.strangers.remove(at) {
            self.turn_away(agent);
        }
        None
    }

    /// Removes connections from the list of those that have not joined once they have joined or are closed.
    fn forget_strangers(&mut self) {
        let peers = &self.peers;
        self.strangers.retain(|(_, agent)| peers.get(agent).is_some_and(Peer::is_stranger));
    }

    fn stop_accepting(&mut self, until: Instant) {
        if let (None, Some(listener)) = (self.deaf_until, &self.listener) {
            // Fails only for a listener that is not polled. This one is.
            let _ = self.epoll.delete(listener);
        }
        self.deaf_until = Some(until);
    }

    pub(super) fn turn_away(&mut self, agent: AgentId) {
        if self.peers.get(&agent).is_some_and(Peer::is_stranger) {
            self.remove(agent);
        }
    }

    /// Performs the steps whose time has come.
    fn keep_time(&mut self) {
        let now = Instant::now();
        while let Some((since, agent)) = self.strangers.front().copied()
            && now.saturating_duration_since(since) >= self.stranger_limits.greeting
        {
            self.strangers.pop_front();
            self.turn_away(agent);
        }
        let due_now: Vec<_> = self.closing.extract_if(.., |(until, _)| *until <= now).collect();
        for (_, agent) in due_now {
            if self.peers.get(&agent).is_some_and(|peer| matches!(peer.stage, Stage::Closing)) {
                self.remove(agent);
            }
        }
        while let Some(at) = self.ended.iter().position(|ended| ended.until <= now) {
            let ended = self.ended.swap_remove(at);
            self.gone(ended);
        }
        if self.is_full {
            self.forget_strangers();
        }
        let has_room = self.is_full && self.strangers.len() < self.stranger_limits.strangers;
        if self.deaf_until.is_some_and(|until| until <= now || has_room)
            && let Some(listener) = &self.listener
        {
            (self.deaf_until, self.is_full) = (None, false);
            // If this fails, no further host can join. The job continues with its hosts.
            let _ = self.epoll.add(listener, EpollEvent::new(EpollFlags::EPOLLIN, DOOR));
        }
        if self.next_beat <= now {
            self.next_beat = now + self.limits.heartbeat_interval();
            self.send_all(&ToAgent::Beat, Peer::is_remote);
        }
        if self.formation.deadline().is_some_and(|due| due <= self.start.elapsed()) {
            self.tell(Event::Tick);
        }
    }
}

fn is_exhausted(error: &io::Error) -> bool {
    use nix::errno::Errno::{EMFILE, ENFILE, ENOBUFS, ENOMEM};
    let exhausted = [EMFILE, ENFILE, ENOBUFS, ENOMEM].map(|error| error as i32);
    error.raw_os_error().is_some_and(|error| exhausted.contains(&error))
}

const WAKE: u64 = 0;
const DOOR: u64 = 1;
const LEASE: u64 = 2;
/// First number of an agent in the poll.
pub(super) const FIRST: u64 = 3;
/// Maximum number of polls between two looks at the clock.
const MAX_ROUNDS: usize = 64;
/// Maximum length of the message with which an agent joins.
const MAX_JOIN: usize = 4 << 10;
const DEAF: Duration = Duration::from_secs(1);
