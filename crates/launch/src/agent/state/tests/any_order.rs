//! Property test: invariants that hold for any order of events.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::output::Tail;

/// An event of the test.
#[derive(Clone, Debug)]
enum Happens {
    /// One of the pending answers arrives.
    Answer(usize),
    Connects,
    Breaks {
        may_resume: bool,
    },
    Gone,
    Reconnects,
    Quiet(bool),
    Starts {
        back: u32,
        nproc: usize,
    },
    Stops {
        back: u32,
        signal: i32,
    },
    Kills,
    Ends(u8),
    Refuses,
    Resumes,
    Line,
    /// A coordinator in this process has informed the others before this host's agent handles the end of the job.
    Tells,
    /// A rank ends by itself.
    Exits {
        local_rank: usize,
        code: i32,
    },
    /// A rank that was asked to stop stops.
    Obeys(usize),
    Signals(Signal),
    Closes,
    StartFails,
    Passes {
        millis: u64,
    },
}

fn happens() -> impl Strategy<Value = Happens> {
    let back = || prop_oneof![8 => Just(0_u32), 1 => 1..3_u32];
    prop_oneof![
        20 => (0..8_usize).prop_map(Happens::Answer),
        4 => Just(Happens::Connects),
        2 => any::<bool>().prop_map(|may_resume| Happens::Breaks { may_resume }),
        1 => Just(Happens::Gone),
        3 => Just(Happens::Reconnects),
        2 => any::<bool>().prop_map(Happens::Quiet),
        8 => (back(), prop_oneof![9 => Just(2_usize), 1 => Just(3)])
            .prop_map(|(back, nproc)| Happens::Starts { back, nproc }),
        4 => (back(), prop_oneof![Just(15), Just(2), Just(13), any::<i32>()])
            .prop_map(|(back, signal)| Happens::Stops { back, signal }),
        1 => Just(Happens::Kills),
        1 => any::<u8>().prop_map(Happens::Ends),
        1 => Just(Happens::Refuses),
        3 => Just(Happens::Resumes),
        1 => Just(Happens::Line),
        2 => Just(Happens::Tells),
        8 => (0..3_usize, prop_oneof![2 => Just(0), 1 => 0..255])
            .prop_map(|(local_rank, code)| Happens::Exits { local_rank, code }),
        6 => (0..3_usize).prop_map(Happens::Obeys),
        1 => prop_oneof![
            Just(Signal::SIGINT),
            Just(Signal::SIGTERM),
            Just(Signal::SIGUSR1),
            Just(Signal::SIGTSTP),
        ]
        .prop_map(Happens::Signals),
        1 => Just(Happens::Closes),
        1 => Just(Happens::StartFails),
        8 => (0..12_000_u64).prop_map(|millis| Happens::Passes { millis }),
    ]
}

/// Pending answer of the system.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Answer {
    FolderMade,
    Prepared(u32),
    Exiting,
    Tail(usize),
    FailureDetails(usize),
    Swept,
    Drained(u32),
    OthersNotified,
}

/// The processes of this host.
#[derive(Debug)]
struct Group {
    attempt: u32,
    /// Exit status of each rank that has ended.
    ranks: Vec<Option<ExitStatus>>,
    asked: Vec<Option<Signal>>,
}

/// Request of the agent about the connection to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Connect,
    Reconnect,
    StopReconnecting,
    Disconnect,
    Join(JoinRequest),
    Send(FromAgent),
}

impl Wish {
    fn of(action: &Action) -> Option<Self> {
        Some(match action {
            Action::Connect => Self::Connect,
            Action::Reconnect { .. } => Self::Reconnect,
            Action::StopReconnecting => Self::StopReconnecting,
            Action::Disconnect => Self::Disconnect,
            Action::Join(request) => Self::Join(request.clone()),
            Action::Send(message) => Self::Send(message.clone()),
            Action::SendStopped { attempt, killed, stuck } => {
                let (attempt, killed, stuck) = (*attempt, *killed, stuck.clone());
                Self::Send(FromAgent::Stopped { attempt, port: 1, killed, stuck })
            }
            _ => return None,
        })
    }
}

/// Model of a host, with which the agent's state is compared.
pub(super) struct World {
    pub(super) host: Host,
    forwards: bool,
    /// Requests that the test has to fulfil, in order.
    pub(super) wishes: VecDeque<Wish>,
    group: Option<Group>,
    /// Attempt that is being prepared.
    preparing: Option<u32>,
    answers: Vec<Answer>,
    /// Attempts whose ranks have all ended with 0, and those whose output is written.
    succeeded: BTreeSet<u32>,
    drained: BTreeSet<u32>,
    /// Attempts of which nothing is left on this host.
    over: BTreeSet<u32>,
    next_attempt: u32,
    drains: usize,
    /// `true` if the next start of ranks fails.
    pub(super) start_fails: bool,
    /// `true` if the others have been informed that the job is over.
    told: bool,
    reported: bool,
    pub(super) exited: bool,
}

/// Number for the drain at the end, which belongs to no attempt.
const LAST: u32 = u32::MAX;

impl World {
    pub(super) fn new(facts: Facts) -> Self {
        let forwards = facts.forwards_output;
        let mut this = Self {
            host: Host::new(facts),
            forwards,
            wishes: VecDeque::new(),
            group: None,
            preparing: None,
            answers: vec![Answer::FolderMade],
            succeeded: BTreeSet::new(),
            drained: BTreeSet::new(),
            over: BTreeSet::new(),
            next_attempt: 0,
            drains: 0,
            start_fails: false,
            told: false,
            reported: false,
            exited: false,
        };
        this.host.done.clear();
        this
    }

    pub(super) fn event(&mut self, event: Event) {
        let actions = self.host.state.handle(self.host.now, event);
        assert!(!self.exited || actions.is_empty(), "after the end: {actions:?}");
        // Immediate answers of the system come before all other events.
        let mut follows = Vec::new();
        self.wishes.extend(actions.iter().filter_map(Wish::of));
        for action in actions {
            follows.extend(self.perform(action));
        }
        let now = self.host.now;
        let due = self.host.state.deadline();
        assert!(due.is_none_or(|due| due > now), "nothing is due twice: {:?}", self.host.state);
        follows.into_iter().for_each(|event| self.event(event));
    }

    fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Prepare { attempt } => {
                assert!(self.group.is_none(), "two groups");
                assert_eq!(self.drains, 0, "the output of the one before is written");
                self.preparing = Some(attempt);
                self.answers.push(Answer::Prepared(attempt));
            }
            Action::Start(part) => {
                assert!(self.group.is_none(), "two groups");
                assert_eq!(self.preparing.take(), Some(part.attempt));
                if mem::take(&mut self.start_fails) {
                    let error = LaunchError::Refused { reason: "no memory".to_owned() };
                    return Some(Event::StartFailed { attempt: part.attempt, error });
                }
                let none = vec![None; part.nproc];
                let (ranks, asked) = (none, vec![None; part.nproc]);
                self.group = Some(Group { attempt: part.attempt, ranks, asked });
                return Some(Event::Started(vec![1; part.nproc]));
            }
            Action::Ask { local_ranks, signal } => {
                let group = self.group.as_mut().expect("a group to ask");
                for rank in local_ranks {
                    let asked = &mut group.asked[rank];
                    // Later requests do not change that.
                    *asked = asked.filter(|it| *it == Signal::SIGKILL).or(Some(signal));
                }
            }
            Action::Forward(_) => assert!(self.group.is_some()),
            Action::FindErrors => self.answers.push(Answer::Exiting),
            Action::CollectFailure { local_rank, .. } => {
                self.answers.extend([Answer::Tail(local_rank), Answer::FailureDetails(local_rank)]);
            }
            Action::Inspect(ranks) => {
                let group = self.group.as_ref().expect("a group to inspect");
                assert!(ranks.iter().all(|rank| group.ranks[*rank].is_none()));
                assert!(ranks.iter().all(|rank| group.asked[*rank] == Some(Signal::SIGKILL)));
                let states = ranks.into_iter().map(|rank| (rank, 'D')).collect();
                return Some(Event::Inspected(states));
            }
            Action::Sweep => {
                let all = |group: &Group| group.ranks.iter().all(Option::is_some);
                assert!(self.group.as_ref().is_none_or(all), "a rank runs");
                self.answers.push(Answer::Swept);
            }
            Action::Release => {
                if let Some(group) = self.group.take() {
                    assert!(group.ranks.iter().all(Option::is_some), "a rank runs");
                    if group.ranks.iter().all(|it| *it == Some(ExitStatus::Code(0))) {
                        self.succeeded.insert(group.attempt);
                    }
                    self.over.insert(group.attempt);
                }
            }
            Action::LeaveToReaper => {
                let group = self.group.take().expect("ranks to leave");
                assert!(group.ranks.iter().any(Option::is_none), "they have ended");
                self.over.insert(group.attempt);
            }
            Action::Drain => {
                let attempt = if self.reported { LAST } else { *self.over.last().unwrap_or(&LAST) };
                self.drains += 1;
                self.answers.push(Answer::Drained(attempt));
            }
            Action::Send(FromAgent::Finished { attempt }) => {
                assert!(self.succeeded.contains(&attempt), "its ranks have not succeeded");
                let drained = self.drained.contains(&attempt) || !self.forwards;
                assert!(drained, "finished before the last byte");
            }
            Action::Send(FromAgent::Failed(failure)) => {
                assert_ne!(failure.exit_status, ExitStatus::Code(0));
            }
            Action::SendStopped { attempt, .. } => {
                let running = self.group.as_ref().map(|group| group.attempt);
                assert_ne!(running, Some(attempt), "stopped while it runs");
            }
            Action::Report(_) => {
                assert!(!self.reported, "reported twice");
                assert!(self.group.is_none(), "reported while ranks run");
                self.reported = true;
                if !self.told {
                    self.answers.push(Answer::OthersNotified);
                }
            }
            Action::Exit { written } => {
                assert!(self.reported && !self.exited);
                assert!(!written || self.drains == 0, "some output is not written");
                self.exited = true;
            }
            _ => {}
        }
        None
    }

    fn answer(&mut self, index: usize) {
        let event = match self.answers.swap_remove(index) {
            Answer::FolderMade => Event::FolderMade,
            Answer::Prepared(attempt) if mem::take(&mut self.start_fails) => {
                let error = LaunchError::Refused { reason: "no disk".to_owned() };
                Event::StartFailed { attempt, error }
            }
            Answer::Prepared(attempt) => Event::Prepared { attempt },
            Answer::Exiting => Event::Exiting(vec![0]),
            Answer::Tail(local_rank) => Event::Tail { local_rank, tail: Tail::default() },
            Answer::FailureDetails(local_rank) => {
                let error = Some(("error".to_owned(), Duration::from_millis(10)));
                Event::FailureDetails { local_rank, error, hint: None, device_faults: vec![] }
            }
            Answer::Swept => Event::Swept,
            Answer::Drained(attempt) => {
                self.drains -= 1;
                self.drained.insert(attempt);
                Event::Drained
            }
            Answer::OthersNotified => Event::OthersNotified,
        };
        self.event(event);
    }

    pub(super) fn exits(&mut self, local_rank: usize, exit_status: ExitStatus) {
        let Some(group) = &mut self.group else { return };
        let Some(rank @ None) = group.ranks.get_mut(local_rank) else { return };
        *rank = Some(exit_status);
        self.event(Event::Exited { local_rank, exit_status });
    }

    /// Delivers all pending answers of the system.
    pub(super) fn answer_all(&mut self) {
        while !self.answers.is_empty() {
            self.answer(0);
        }
    }

    pub(super) fn obeys(&mut self, local_rank: usize) {
        let asked = self.group.as_ref().and_then(|group| *group.asked.get(local_rank)?);
        if let Some(signal) = asked {
            self.exits(local_rank, ExitStatus::Signal(signal as i32));
        }
    }

    fn happen(&mut self, what: &Happens) {
        let connection = &self.host.state.connection;
        let up = matches!(connection, Connection::Up { .. });
        let is_possible = match what {
            Happens::Answer(_) => !self.answers.is_empty(),
            Happens::Connects => matches!(connection, Connection::Searching),
            Happens::Breaks { .. }
            | Happens::Quiet(_)
            | Happens::Starts { .. }
            | Happens::Stops { .. }
            | Happens::Kills
            | Happens::Ends(_)
            | Happens::Line => up,
            Happens::Tells => !self.told && !self.reported,
            Happens::Gone | Happens::Reconnects | Happens::Refuses | Happens::Resumes => {
                connection.is_up()
            }
            _ => true,
        };
        if !is_possible {
            return;
        }
        let hear = Event::Received;
        match *what {
            Happens::Answer(index) => self.answer(index % self.answers.len()),
            Happens::Connects => {
                self.told = false;
                self.event(Event::Connected { here: true });
            }
            Happens::Tells => {
                self.told = true;
                self.event(Event::OthersNotified);
            }
            Happens::Breaks { may_resume } => {
                let how = "it broke".to_owned();
                self.event(Event::ConnectionLost { how, may_resume, closed: !may_resume });
            }
            Happens::Gone => self.event(Event::CoordinatorGone { how: "gone".to_owned() }),
            Happens::Reconnects => self.event(Event::Reconnected),
            Happens::Quiet(quiet) => self.event(Event::Quiet(quiet)),
            Happens::Starts { back, nproc } => {
                let attempt = self.next_attempt.saturating_sub(back);
                self.next_attempt = self.next_attempt.max(attempt + 1);
                self.event(hear(ToAgent::Start(Assignment { nproc, ..part(attempt) })));
            }
            Happens::Stops { back, signal } => {
                let attempt = self.next_attempt.saturating_sub(1 + back);
                let reason = "enough".to_owned();
                self.event(hear(ToAgent::Stop { attempt, signal, reason }));
            }
            Happens::Kills => self.event(hear(ToAgent::Kill)),
            Happens::Ends(code) => {
                self.event(hear(ToAgent::End(JobResult { code, cause: None })));
            }
            Happens::Refuses => {
                self.event(hear(ToAgent::Refused { reason: "no".to_owned() }));
            }
            Happens::Resumes => self.event(hear(ToAgent::Resumed)),
            Happens::Line => self.event(Event::Line("line".to_owned())),
            Happens::Exits { local_rank, code } => {
                self.exits(local_rank, ExitStatus::Code(code));
            }
            Happens::Obeys(local_rank) => self.obeys(local_rank),
            Happens::Signals(signal) => self.event(Event::Signal(signal)),
            Happens::Closes => self.event(Event::OutputClosed),
            Happens::StartFails => self.start_fails = true,
            Happens::Passes { millis } => self.pass(Duration::from_millis(millis)),
        }
    }

    pub(super) fn pass(&mut self, time: Duration) {
        let end = self.host.now + time;
        while let Some(due) = self.host.state.deadline().filter(|due| *due <= end) {
            self.host.now = self.host.now.max(due);
            self.event(Event::Tick);
        }
        self.host.now = end;
    }

    /// From now on the system answers, and ranks follow requests, except for those that cannot.
    fn settle(&mut self, deaf: bool) {
        for _ in 0..20 {
            self.answer_all();
            if !deaf {
                (0..3).for_each(|local_rank| self.obeys(local_rank));
            }
            self.pass(Duration::from_secs(60));
        }
    }
}

/// Event that ends a job if none has before.
#[derive(Clone, Copy, Debug)]
enum Last {
    /// The coordinator ends the job.
    JobResult,
    /// The user ends it, and does not wait.
    User,
    /// The coordinator is lost.
    Lost,
}

proptest! {
    #[test]
    fn what_always_holds(
        kind in prop_oneof![
            Just(Kind::OneHost), Just(Kind::Launcher), Just(Kind::Peers), Just(Kind::Elected),
        ],
        story in prop::collection::vec(happens(), 0..80),
        last in prop_oneof![Just(Last::JobResult), Just(Last::User), Just(Last::Lost)],
        deaf in any::<bool>(),
    ) {
        let mut world = World::new(facts(kind));
        for what in &story {
            world.happen(what);
        }
        match last {
            Last::JobResult => {
                world.settle(deaf);
                world.happen(&Happens::Connects);
                world.happen(&Happens::Ends(3));
                world.settle(deaf);
            }
            Last::User => for _ in 0..3 {
                world.happen(&Happens::Signals(Signal::SIGINT));
            },
            Last::Lost => {
                world.happen(&Happens::Breaks { may_resume: false });
                world.settle(deaf);
                // Another coordinator is searched for, but there is none.
                let error = LaunchError::Refused { reason: "nothing".to_owned() };
                world.event(Event::Failed(error));
                world.happen(&Happens::Breaks { may_resume: false });
            }
        }
        world.settle(deaf);
        prop_assert!(world.exited, "it waits for ever: {:?}", world.host.state);
    }
}
