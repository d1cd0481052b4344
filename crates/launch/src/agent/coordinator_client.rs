//! Client of the coordinator: finds it, sends and receives messages, and reconnects, whichever process it runs in.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant, SystemTime};

use brigade_rank_env::is_loopback;
use brigade_rendezvous::{
    Coordinator, DiscoveryMethod, FromAgent, JobEvent, Join, Link, LinkError, Listener, OutputSink,
    Piece, Rendezvous as Search, RendezvousNotice, RendezvousPlan, Rules, ToAgent, wake,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::state::{Event, Facts, JoinRequest, Kind};
use crate::events::{EventLog, EventSender};
use crate::{Endpoint, LaunchError, LaunchPlan, RendezvousMode};

/// Everything on the agent's side that concerns the coordinator.
pub(super) struct CoordinatorClient<'p> {
    plan: &'p LaunchPlan,
    /// Start of the agent's clock.
    start: Instant,
    /// Looks for a coordinator.
    search: Option<Search>,
    /// Coordinator, if it runs in this process.
    coordinator: Option<Coordinator>,
    others_notified: bool,
    link: Option<Link>,
    /// `true` if the link has been reported as quiet.
    quiet: bool,
    /// Address at which the coordinator was found.
    address: Option<SocketAddr>,
    resuming: Option<Resuming>,
    /// Number of requests to keep the seat.
    asked: u32,
    /// `true` after an unanswered request for the seat: messages over the old link are ignored, because later ones
    /// would come over the new link.
    void: bool,
    /// Connections over which requests were not answered. They stay open until there is an answer: the coordinator may
    /// accept one late, and would take its end for the end of this agent.
    stale: Vec<Link>,
    /// Lines for the user from a coordinator in this process.
    lines: wake::Receiver<String>,
    /// Event log of a coordinator in this process.
    recording: Option<(EventLog, EventSender)>,
    events: VecDeque<Event>,
}

/// Attempt to connect to the same coordinator again.
struct Resuming {
    /// `true` if the coordinator may run although nothing listens.
    patient: bool,
    search: Option<Search>,
    /// Connection, once it is established.
    link: Option<Link>,
    /// `true` if the request was sent over it.
    asked: bool,
}

impl<'p> CoordinatorClient<'p> {
    /// Creates a client that does not search for a coordinator yet.
    pub(super) fn new(plan: &'p LaunchPlan, start: Instant) -> Result<Self, LaunchError> {
        let lines = wake::Receiver::new().map_err(LaunchError::system("make an eventfd"))?;
        Ok(Self {
            plan,
            start,
            search: None,
            coordinator: None,
            others_notified: false,
            link: None,
            quiet: false,
            address: None,
            resuming: None,
            asked: 0,
            void: false,
            stale: Vec::new(),
            lines,
            recording: (plan.options.events.as_ref())
                .map(|target| EventLog::start(target, &plan.run_id))
                .transpose()?,
            events: VecDeque::new(),
        })
    }

    /// Returns the facts of the plan that the state machine depends on.
    pub(super) fn facts(plan: &LaunchPlan, forwards_output: bool) -> Facts {
        let (kind, near, coordinator) = match &plan.options.rendezvous {
            RendezvousMode::OneHost if !forwards_output => {
                (Kind::OneHost, true, "the launcher".into())
            }
            RendezvousMode::OneHost | RendezvousMode::Launcher { .. } => {
                (Kind::Launcher, false, "the launcher".into())
            }
            RendezvousMode::Static { master_addr, master_port, .. } => {
                let endpoint = Endpoint { host: master_addr.clone(), port: *master_port };
                (Kind::Peers, is_loopback(master_addr), endpoint.to_string())
            }
            RendezvousMode::Elastic { endpoint, .. } => {
                (Kind::Peers, is_loopback(&endpoint.host), endpoint.to_string())
            }
            RendezvousMode::Etcd { .. } => (Kind::Elected, true, "the main host".into()),
        };
        let elastic = matches!(
            plan.options.rendezvous,
            RendezvousMode::Elastic { .. } | RendezvousMode::Etcd { .. }
        );
        Facts {
            host: plan.host.clone(),
            nproc: plan.local_world_size.as_usize(),
            max_restarts: plan.options.max_restarts,
            limits: plan.limits,
            kind,
            may_leave: elastic && plan.options.nodes.min < plan.options.nodes.max,
            near,
            coordinator,
            forwards_output,
        }
    }

    /// Starts the search for the coordinator, also after the last one was lost.
    pub(super) fn connect(&mut self) {
        self.drop_links();
        (self.coordinator, self.others_notified) = (None, false);
        let begun = match discovery_method(self.plan) {
            None => self.serve(None, LOOPBACK.to_owned()),
            Some(method) => self.search(method).map(|search| self.search = Some(search)),
        };
        begun.unwrap_or_else(|error| self.events.push_back(Event::Failed(error)));
    }

    /// Uses an existing connection.
    pub(super) fn use_link(&mut self, link: Link) {
        self.met(link);
    }

    fn search(&self, method: DiscoveryMethod) -> Result<Search, LaunchError> {
        let plan = RendezvousPlan {
            method,
            secret: self.plan.options.secret.clone(),
            timeout: self.plan.options.timeouts.join,
            limits: self.plan.limits,
            run_id: self.plan.run_id.clone(),
            host: self.plan.host.clone(),
        };
        Search::start(plan).map_err(LaunchError::system("look for the other hosts"))
    }

    /// Starts the coordinator in this process.
    fn serve(&mut self, listener: Option<Listener>, address: String) -> Result<(), LaunchError> {
        let start = || LaunchError::system("start the coordinator");
        // On one host the agent itself prints all messages.
        let lines = listener.is_some().then(|| self.lines.sender());
        let events = self.recording.as_ref().map(|(_, sender)| sender.clone());
        let sink: Option<Box<dyn OutputSink>> = match (lines, events) {
            (None, None) => None,
            (lines, events) => Some(Box::new(Sink { lines, events })),
        };
        let coordinator =
            Coordinator::start(rules(self.plan, address), listener, sink).map_err(start())?;
        let link = coordinator.link().map_err(start())?;
        self.coordinator = Some(coordinator);
        self.met(link);
        Ok(())
    }

    fn met(&mut self, mut link: Link) {
        link.set_start(self.start);
        (self.search, self.quiet, self.address) = (None, false, link.peer());
        self.link = Some(link);
        self.events.push_back(Event::Connected { here: self.coordinator.is_some() });
    }

    /// Tries to connect to the earlier coordinator until [`Self::stop_reconnecting`] is called.
    pub(super) fn reconnect(&mut self, patient: bool) {
        // A request has been sent over this connection: the answer is expected soon.
        if let Some(resuming) = self.resuming.as_mut().filter(|resuming| resuming.asked) {
            resuming.patient = patient;
            return;
        }
        self.resume_after(Duration::ZERO, patient);
    }

    fn resume_after(&mut self, delay: Duration, patient: bool) {
        let search = self
            .address
            .map(|address| self.search(DiscoveryMethod::Resume { address, patient, delay }));
        match search {
            Some(Ok(search)) => {
                let search = Some(search);
                self.resuming = Some(Resuming { patient, search, link: None, asked: false });
            }
            Some(Err(error)) => self.gone(error.to_string()),
            None => self.gone("it was not met at an address".to_owned()),
        }
    }

    fn gone(&mut self, how: String) {
        self.resuming = None;
        self.events.push_back(Event::CoordinatorGone { how });
    }

    /// Stops reconnecting, because data has arrived over the existing connection.
    pub(super) fn stop_reconnecting(&mut self) {
        self.resuming.take_if(|resuming| !resuming.asked);
    }

    /// Returns the descriptors to poll.
    pub(super) fn fds(&self) -> Vec<PollFd<'_>> {
        let mut fds = vec![PollFd::new(self.lines.as_fd(), PollFlags::POLLIN)];
        let recording = self.recording.as_ref().map(|(log, _)| log.as_fd());
        fds.extend(recording.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        let coordinator = self.coordinator.as_ref().filter(|_| !self.others_notified);
        fds.extend(coordinator.map(|c| PollFd::new(c.over_fd(), PollFlags::POLLIN)));
        let resuming = self.resuming.as_ref();
        let searches = [self.search.as_ref(), resuming.and_then(|it| it.search.as_ref())];
        fds.extend(
            searches.into_iter().flatten().map(|it| PollFd::new(it.fd(), PollFlags::POLLIN)),
        );
        let old = self.link.as_ref().filter(|_| !self.void);
        for link in [old, resuming.and_then(|it| it.link.as_ref())].into_iter().flatten() {
            fds.push(PollFd::new(link.read_fd(), PollFlags::POLLIN));
            if link.needs_write() {
                fds.push(PollFd::new(link.write_fd(), PollFlags::POLLOUT));
            }
        }
        fds
    }

    /// Returns the time at which to check for events even if nothing is readable.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.link.as_ref().and_then(Link::deadline)
    }

    /// Returns the next event, if there is one.
    pub(super) fn next(&mut self) -> Option<Event> {
        if self.events.is_empty() {
            self.look_for_others();
            self.look_for_seat();
        }
        if self.events.is_empty() {
            self.listen();
        }
        if !self.others_notified && self.coordinator.as_ref().is_some_and(is_over) {
            self.others_notified = true;
            self.events.push_back(Event::OthersNotified);
        }
        // Last, because most of these lines contain the reason of a message that was just received.
        let trouble = || self.recording.as_ref().and_then(|(log, _)| log.trouble());
        self.events.pop_front().or_else(|| self.lines.try_recv().or_else(trouble).map(Event::Line))
    }

    fn look_for_others(&mut self) {
        match self.search.as_mut().and_then(Search::next) {
            None => {}
            Some(RendezvousNotice::Say(line)) => self.events.push_back(Event::Line(line)),
            Some(RendezvousNotice::Join(link)) => self.met(link),
            Some(RendezvousNotice::Serve { listener, address }) => {
                if listener.is_unguarded() {
                    self.events.push_back(Event::Line(unguarded(listener.port())));
                }
                if let Err(error) = self.serve(Some(listener), address) {
                    self.events.push_back(Event::Failed(error));
                }
            }
            Some(RendezvousNotice::Failed(error)) => {
                self.search = None;
                self.events.push_back(Event::Failed(error.into()));
            }
            Some(RendezvousNotice::Gone { how }) => self.gone(how),
        }
    }

    /// Resumes a seat: makes a new connection and waits for the answer over it.
    fn look_for_seat(&mut self) {
        let Some(resuming) = &mut self.resuming else { return };
        if resuming.asked
            && let Some(link) = &mut resuming.link
        {
            link.flush();
            match link.receive() {
                Ok(None) if !link.is_quiet(Instant::now()) => {}
                Ok(Some(ToAgent::Resumed)) => {
                    let link = resuming.link.take();
                    self.drop_links();
                    self.link = link;
                    self.events.push_back(Event::Received(ToAgent::Resumed));
                }
                Ok(Some(ToAgent::Refused { reason })) => {
                    self.resuming = None;
                    self.events.push_back(Event::Received(ToAgent::Refused { reason }));
                }
                // The connection broke or is silent as well: try the next one.
                Ok(_) | Err(_) => {
                    let (patient, pause) = (resuming.patient, self.plan.limits.reconnect_pause());
                    self.stale.extend(resuming.link.take());
                    self.resume_after(pause, patient);
                }
            }
            return;
        }
        match resuming.search.as_mut().and_then(Search::next) {
            Some(RendezvousNotice::Join(mut link)) => {
                link.set_start(self.start);
                (resuming.link, resuming.search) = (Some(link), None);
                self.events.push_back(Event::Reconnected);
            }
            Some(RendezvousNotice::Gone { how }) => self.gone(how),
            Some(RendezvousNotice::Failed(error)) => self.gone(error.to_string()),
            Some(RendezvousNotice::Say(_) | RendezvousNotice::Serve { .. }) | None => {}
        }
    }

    fn listen(&mut self) {
        let now = Instant::now();
        let Some(link) = &mut self.link else { return };
        if !self.void {
            link.flush();
            match link.receive() {
                Ok(Some(message)) => return self.events.push_back(Event::Received(message)),
                Ok(None) => {}
                Err(error) => return self.lost(&error),
            }
        }
        // Received messages take precedence over silence.
        if let Err(error) = link.keep_up(now) {
            return self.lost(&error);
        }
        let is_quiet = link.is_quiet(now);
        if self.quiet != is_quiet && !self.void {
            self.quiet = is_quiet;
            self.events.push_back(Event::Quiet(is_quiet));
        }
    }

    /// Sends a request to take part, or to resume the seat.
    pub(super) fn join(&mut self, request: &JoinRequest, nproc: usize, port: u16) {
        let one_host =
            self.plan.options.rendezvous == RendezvousMode::OneHost && self.coordinator.is_some();
        let loopback = one_host.then(|| LOOPBACK.to_owned());
        let join = Join {
            run_id: self.plan.run_id.clone(),
            agent: self.plan.agent_id.clone(),
            resume: if request.resume { self.asked + 1 } else { 0 },
            nproc,
            node_rank: match self.plan.options.rendezvous {
                RendezvousMode::Launcher { node_rank }
                | RendezvousMode::Static { node_rank, .. } => Some(node_rank),
                _ => None,
            },
            address: self.plan.options.local_addr.clone().or(loopback),
            port,
            last_attempt: request.last.map(|last| last.attempt),
            last_node_rank: request.last.map(|last| last.node_rank),
            restarts: request.restarts,
            sent: u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX),
            ..Join::new(&self.plan.host)
        };
        let link = if request.resume {
            let resuming = self.resuming.as_mut().filter(|resuming| resuming.link.is_some());
            resuming.and_then(|resuming| {
                self.asked += 1;
                (self.void, resuming.asked) = (true, true);
                resuming.link.as_mut()
            })
        } else {
            self.link.as_mut()
        };
        if let Some(link) = link {
            link.send(&FromAgent::Join(join));
        }
    }

    /// Sends a message to the coordinator. Does nothing without a connection and while a request for the seat is open:
    /// necessary messages are repeated once the seat is resumed.
    pub(super) fn send(&mut self, message: &FromAgent) {
        if let Some(link) = self.link.as_mut().filter(|_| !self.void) {
            link.send(message);
        }
    }

    fn lost(&mut self, error: &LinkError) {
        let may_resume = self.address.is_some()
            && matches!(
                error,
                LinkError::Closed | LinkError::CutOff | LinkError::Reset | LinkError::Broken(_)
            );
        self.link = None;
        self.quiet = false;
        let (how, closed) = (error.to_string(), matches!(error, LinkError::Closed));
        self.events.push_back(Event::ConnectionLost { how, may_resume, closed });
    }

    /// Ends the connection. A coordinator in this process continues.
    pub(super) fn disconnect(&mut self) {
        self.drop_links();
        self.search = None;
        self.events.retain(|event| matches!(event, Event::OthersNotified | Event::Line(_)));
    }

    fn drop_links(&mut self) {
        (self.link, self.resuming) = (None, None);
        (self.quiet, self.void) = (false, false);
        self.stale.clear();
    }

    /// Waits until the last events are written, if events are written. Returns a line for the user about events that
    /// were not.
    pub(super) fn finish(self) -> Option<String> {
        let Self { recording, .. } = self;
        recording.and_then(|(log, _)| log.finish())
    }

    /// Returns `true` if the coordinator runs in this process.
    pub(super) fn serves(&self) -> bool {
        self.coordinator.is_some()
    }
}

/// Sink of a coordinator in this process: lines for the user, and events to be recorded.
struct Sink {
    lines: Option<wake::Sender<String>>,
    events: Option<EventSender>,
}

impl OutputSink for Sink {
    /// Does nothing: every agent shows its own ranks' output.
    fn output(&mut self, _piece: Piece) {}

    fn say(&mut self, line: &str) {
        if let Some(lines) = &self.lines {
            let _ = lines.send(line.to_owned());
        }
    }

    fn record(&mut self, at: SystemTime, event: JobEvent) {
        if let Some(events) = &self.events {
            events.record(at, event);
        }
    }
}

/// Returns `true` if the coordinator has informed all agents that the job is over.
fn is_over(coordinator: &Coordinator) -> bool {
    let mut fds = [PollFd::new(coordinator.over_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// Returns the method by which this host finds the others, or `None` for a job on one host.
fn discovery_method(plan: &LaunchPlan) -> Option<DiscoveryMethod> {
    match &plan.options.rendezvous {
        RendezvousMode::OneHost | RendezvousMode::Launcher { .. } => None,
        RendezvousMode::Static { node_rank, master_addr, master_port } => {
            Some(DiscoveryMethod::Static {
                node_rank: *node_rank,
                address: master_addr.clone(),
                port: *master_port,
            })
        }
        RendezvousMode::Elastic { endpoint, serve } => Some(DiscoveryMethod::Endpoint {
            address: endpoint.host.clone(),
            port: endpoint.port,
            serve: *serve,
        }),
        RendezvousMode::Etcd { endpoints } => {
            let endpoints: Vec<String> = endpoints.iter().map(ToString::to_string).collect();
            Some(DiscoveryMethod::Etcd {
                endpoints: endpoints.join(","),
                access: plan.options.etcd.clone(),
                address: plan.options.local_addr.clone(),
            })
        }
    }
}

/// Returns the warning for the user of a host that serves a rendezvous without a secret.
fn unguarded(port: u16) -> String {
    format!(
        "warning: this job has no secret: any host that reaches port {port} can join it; run `export \
         BRIGADE_RDZV_SECRET=$(openssl rand -hex 32)` and start all launchers with that value"
    )
}

/// Returns the settings that the coordinator enforces.
///
/// `address` is where other hosts reach this one.
fn rules(plan: &LaunchPlan, address: String) -> Rules {
    Rules {
        run_id: plan.run_id.clone(),
        min_nodes: plan.options.nodes.min,
        max_nodes: plan.options.nodes.max,
        max_restarts: plan.options.max_restarts,
        join_timeout: plan.options.timeouts.join,
        last_call: plan.options.timeouts.last_call,
        join_interval: plan.options.timeouts.join_interval,
        limits: plan.limits,
        late_hosts: plan.options.rendezvous != RendezvousMode::OneHost,
        address: Some(plan.options.local_addr.clone().unwrap_or(address)),
        recorded: plan.options.events.is_some(),
    }
}

/// Address of the store of a job on one host.
const LOOPBACK: &str = "127.0.0.1";
