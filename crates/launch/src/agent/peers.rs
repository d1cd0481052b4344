//! The way to the coordinator, found, used and lost, in whichever process the coordinator is.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Instant;

use brigade_rendezvous::{
    Coordinator, FromAgent, Link, LinkError, Listener, MeetNotice, MeetPlan, Millis, Rules, Secret,
    Timing, ToAgent, Way,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::lines::Lines;
use crate::{Endpoint, Meeting};
use crate::{LaunchError, LaunchPlan};

/// Something that came from the other side.
#[derive(Debug)]
pub(super) enum News {
    /// A line for the user.
    Say(String),
    /// There is a connection: the agent may join.
    Met,
    /// The coordinator's word.
    Message(ToAgent),
    /// The connection is gone.
    Lost {
        /// How that was seen.
        how: String,
    },
    /// There will be no connection.
    Failed(LaunchError),
}

pub(super) struct Peers<'p> {
    plan: &'p LaunchPlan,
    meeting: Option<brigade_rendezvous::Meeting>,
    /// Where the coordinator is in this process.
    coordinator: Option<Coordinator>,
    link: Option<Link>,
    lines: Lines,
    news: VecDeque<News>,
}

impl<'p> Peers<'p> {
    /// Begins to look for the others.
    pub(super) fn find(plan: &'p LaunchPlan) -> Result<Self, LaunchError> {
        let mut this = Self::none(plan)?;
        this.begin()?;
        Ok(this)
    }

    /// Over a connection that is there.
    pub(super) fn over(plan: &'p LaunchPlan, link: Link) -> Result<Self, LaunchError> {
        let mut this = Self::none(plan)?;
        this.met(link);
        Ok(this)
    }

    fn none(plan: &'p LaunchPlan) -> Result<Self, LaunchError> {
        let lines = Lines::new().map_err(LaunchError::system("make a socket pair"))?;
        Ok(Self {
            plan,
            meeting: None,
            coordinator: None,
            link: None,
            lines,
            news: VecDeque::new(),
        })
    }

    /// Begins to look for the others, again where the connection was lost.
    pub(super) fn begin(&mut self) -> Result<(), LaunchError> {
        self.link = None;
        self.coordinator = None;
        let Some(way) = way(self.plan) else {
            return self.serve(None, LOOPBACK.to_owned());
        };
        let plan = MeetPlan {
            way,
            secret: (self.plan.secret.clone())
                .unwrap_or_else(|| Secret::of_run_id(&self.plan.run_id)),
            timeout: self.plan.patience.join,
            timing: Timing::default(),
            run_id: self.plan.run_id.clone(),
            host: self.plan.host.clone(),
        };
        let meeting = brigade_rendezvous::Meeting::start(plan);
        self.meeting = Some(meeting.map_err(LaunchError::system("look for the other hosts"))?);
        Ok(())
    }

    /// Starts the coordinator in this process.
    fn serve(&mut self, listener: Option<Listener>, address: String) -> Result<(), LaunchError> {
        let start = || LaunchError::system("start the coordinator");
        let sink = listener.is_some().then(|| self.lines.sink()).transpose().map_err(start())?;
        let coordinator =
            Coordinator::start(rules(self.plan, address), listener, sink).map_err(start())?;
        let link = coordinator.link().map_err(start())?;
        self.coordinator = Some(coordinator);
        self.met(link);
        Ok(())
    }

    fn met(&mut self, link: Link) {
        self.meeting = None;
        self.link = Some(link);
        self.news.push_back(News::Met);
    }

    /// What to poll.
    pub(super) fn fds(&self) -> Vec<PollFd<'_>> {
        let mut fds = vec![PollFd::new(self.lines.control(), PollFlags::POLLIN)];
        let coordinator = self.coordinator.as_ref().filter(|_| !self.is_over());
        fds.extend(coordinator.map(|c| PollFd::new(c.over_fd(), PollFlags::POLLIN)));
        if let Some(meeting) = &self.meeting {
            fds.push(PollFd::new(meeting.fd(), PollFlags::POLLIN));
        }
        if let Some(link) = &self.link {
            fds.push(PollFd::new(link.read_fd(), PollFlags::POLLIN));
            if link.wants_write() {
                fds.push(PollFd::new(link.write_fd(), PollFlags::POLLOUT));
            }
        }
        fds
    }

    /// When to ask for news even if nothing is readable.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.link.as_ref().and_then(Link::deadline)
    }

    /// The next piece of news, if there is one.
    pub(super) fn next(&mut self) -> Option<News> {
        if self.news.is_empty() {
            self.look_for_others();
        }
        if self.news.is_empty()
            && let Some(link) = &mut self.link
        {
            link.flush();
            match link.receive() {
                Ok(Some(message)) => return Some(News::Message(message)),
                // What has come counts before silence does.
                Ok(None) => {
                    if let Err(error) = link.keep_up(Instant::now()) {
                        self.lost(&error);
                    }
                }
                Err(error) => self.lost(&error),
            }
        }
        // Last: most of these lines give the reason of a message that has just been heard.
        self.news.pop_front().or_else(|| self.line().map(News::Say))
    }

    /// The next line of a coordinator in this process.
    pub(super) fn line(&self) -> Option<String> {
        self.lines.next()
    }

    fn look_for_others(&mut self) {
        let Some(notice) = self.meeting.as_mut().and_then(brigade_rendezvous::Meeting::next) else {
            return;
        };
        match notice {
            MeetNotice::Say(line) => self.news.push_back(News::Say(line)),
            MeetNotice::Join(link) => self.met(link),
            MeetNotice::Serve { listener, address } => {
                if let Err(error) = self.serve(Some(listener), address) {
                    self.news.push_back(News::Failed(error));
                }
            }
            MeetNotice::Failed(error) => {
                self.meeting = None;
                self.news.push_back(News::Failed(error.into()));
            }
        }
    }

    pub(super) fn send(&mut self, message: &FromAgent) {
        if let Some(link) = &mut self.link {
            link.send(message);
        }
    }

    fn lost(&mut self, error: &LinkError) {
        // What came before the end is still news.
        self.link = None;
        self.news.push_back(News::Lost { how: error.to_string() });
    }

    /// Ends a connection that makes no sense.
    pub(super) fn lose(&mut self, how: &str) {
        if self.link.take().is_some() {
            self.news.push_back(News::Lost { how: how.to_owned() });
        }
    }

    /// There is a connection.
    pub(super) fn are_met(&self) -> bool {
        self.link.is_some()
    }

    /// Everything has been sent.
    pub(super) fn is_flushed(&self) -> bool {
        self.link.as_ref().is_none_or(|link| !link.wants_write())
    }

    /// The coordinator is in this process.
    pub(super) fn are_served_here(&self) -> bool {
        self.coordinator.is_some()
    }

    /// A moment on the link's clock.
    pub(super) fn millis(&self, at: Instant) -> Millis {
        self.link.as_ref().map_or(0, |link| link.millis(at))
    }

    /// Ends the connection; a coordinator in this process goes on.
    pub(super) fn part(&mut self) {
        (self.link, self.meeting) = (None, None);
        self.news.clear();
    }

    /// No coordinator in this process has still to tell anyone that the job is over.
    pub(super) fn is_over(&self) -> bool {
        let Some(coordinator) = &self.coordinator else { return true };
        let mut fds = [PollFd::new(coordinator.over_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// The other hosts met this one on this host itself.
    pub(super) fn are_near(&self) -> bool {
        match &self.plan.meeting {
            Meeting::Static { master_addr, .. } => is_loopback(master_addr),
            Meeting::Elastic { endpoint, .. } => is_loopback(&endpoint.host),
            Meeting::Launcher { .. } => false,
            Meeting::OneHost | Meeting::Etcd { .. } => true,
        }
    }

    /// Where the coordinator is, for messages.
    pub(super) fn coordinator(&self) -> String {
        match &self.plan.meeting {
            Meeting::Static { master_addr, master_port, .. } => {
                Endpoint { host: master_addr.clone(), port: *master_port }.to_string()
            }
            Meeting::Elastic { endpoint, .. } => endpoint.to_string(),
            Meeting::OneHost | Meeting::Launcher { .. } => "the launcher".to_owned(),
            Meeting::Etcd { .. } => "the main host".to_owned(),
        }
    }
}

/// How this host finds the others; `None` when there are none.
fn way(plan: &LaunchPlan) -> Option<Way> {
    match &plan.meeting {
        Meeting::OneHost | Meeting::Launcher { .. } => None,
        Meeting::Static { node_rank, master_addr, master_port } => Some(Way::Static {
            node_rank: *node_rank,
            address: master_addr.clone(),
            port: *master_port,
        }),
        Meeting::Elastic { endpoint, serve } => Some(Way::Endpoint {
            address: endpoint.host.clone(),
            port: endpoint.port,
            serve: *serve,
        }),
        Meeting::Etcd { endpoints } => {
            let endpoints: Vec<String> = endpoints.iter().map(ToString::to_string).collect();
            Some(Way::Etcd { endpoints: endpoints.join(","), address: plan.local_addr.clone() })
        }
    }
}

/// What the coordinator holds the agents to.
///
/// `address` is where other hosts reach this one.
fn rules(plan: &LaunchPlan, address: String) -> Rules {
    Rules {
        run_id: plan.run_id.clone(),
        min_nodes: plan.nodes.min,
        max_nodes: plan.nodes.max,
        max_restarts: plan.max_restarts,
        join_timeout: plan.patience.join,
        last_call: plan.patience.last_call,
        join_interval: plan.patience.join_interval,
        shutdown_timeout: plan.shutdown_timeout,
        late_hosts: plan.meeting != Meeting::OneHost,
        address: Some(plan.local_addr.clone().unwrap_or(address)),
        ..Rules::default()
    }
}

/// An address that means this host and no other.
pub(super) fn is_loopback(address: &str) -> bool {
    address == "localhost" || address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Where the store of a job on one host is.
pub(super) const LOOPBACK: &str = "127.0.0.1";
