//! Faults of a job, and the expected outcomes.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;

/// Number of ranks on each host of a job.
pub(crate) const SIZES: [usize; 4] = [1, 2, 1, 2];
pub(crate) const RANKS: u64 = 6;

/// Way in which a job is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LaunchMode {
    /// One command, over ssh.
    Ssh,
    /// One command on each host, with a fixed node rank.
    Static,
    /// An elastic job, with the coordinator on the first host.
    Elastic,
    /// An elastic job, with the coordinator on any host.
    Etcd,
}

impl LaunchMode {
    /// Returns `true` if the job continues when a host is lost.
    pub(crate) fn is_elastic(self) -> bool {
        matches!(self, Self::Elastic | Self::Etcd)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A rank gets SIGKILL.
    KillRank,
    /// A rank is stopped for a while (SIGSTOP, SIGCONT).
    StopRank,
    /// The agent of a host is stopped for a while, or the launcher if that is the agent.
    StopAgent,
    /// Every process of a host is stopped for a while.
    StopHost,
    /// A host is disconnected for a while.
    Cut,
    /// The disk with the checkpoints is slow for a while.
    SlowDisk,
    /// The disk does not answer at all for a while.
    FreezeDisk,
    /// The agent of a host gets SIGKILL, or the launcher if that is the agent.
    KillAgent,
    /// The ssh session of a host gets SIGKILL at one of its ends; on the first host, any host's session.
    KillSession,
    /// A host is disconnected and all of its processes are killed, as in a power failure.
    Power,
    /// A host is disconnected for longer than the heartbeat timeout.
    LongCut,
    /// The agent of a host is stopped for longer than the heartbeat timeout.
    LongStop,
}

impl Kind {
    /// Returns `true` if the host leaves the job.
    pub(crate) fn takes_host(self) -> bool {
        matches!(
            self,
            Self::KillAgent | Self::KillSession | Self::Power | Self::LongCut | Self::LongStop
        )
    }

    /// Returns `true` if the fault ends by itself.
    pub(crate) fn is_short(self) -> bool {
        !self.takes_host() && self != Self::KillRank
    }

    fn random(random: &mut Rng, mode: LaunchMode) -> Self {
        match random.usize(..100) {
            0..30 => Self::KillRank,
            30..41 => Self::StopRank,
            41..52 => Self::StopAgent,
            52..61 => Self::StopHost,
            61..73 => Self::Cut,
            73..81 => Self::SlowDisk,
            81..89 => Self::FreezeDisk,
            89..92 if mode == LaunchMode::Ssh => Self::KillSession,
            89..96 => Self::KillAgent,
            96..98 => Self::Power,
            // A host that comes back to an elastic job joins again.
            _ if mode.is_elastic() => Self::KillAgent,
            98 => Self::LongCut,
            _ => Self::LongStop,
        }
    }
}

/// Fault of a host, of a process on it, or of the disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) host: usize,
    /// Index that selects one of several processes.
    pub(crate) choice: usize,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::SlowDisk | Kind::FreezeDisk => write!(f, "{:?}", self.kind),
            _ => write!(f, "{:?} on node{}", self.kind, self.host + 1),
        }
    }
}

/// Faults that occur together.
#[derive(Clone, Debug)]
pub(crate) struct Burst {
    pub(crate) faults: Vec<Fault>,
    /// Duration of the faults that end by themselves.
    pub(crate) lasts: Duration,
    /// Pause between the faults.
    pub(crate) pause: Duration,
}

impl Burst {
    /// Returns one to three faults. At most one of them is permanent, so that the outcome of the job is certain.
    pub(crate) fn random(random: &mut Rng, mode: LaunchMode) -> Self {
        let count = [1, 1, 1, 1, 2, 3][random.usize(..6)];
        let mut faults: Vec<Fault> = Vec::new();
        while faults.len() < count {
            let kind = Kind::random(random, mode);
            let (host, choice) = (random.usize(..SIZES.len()), random.usize(..1 << 16));
            let is_certain = kind.is_short() || faults.iter().all(|fault| fault.kind.is_short());
            // Of two faults with different durations on one host, the shorter one would end both.
            let is_new = faults.iter().all(|fault| fault.host != host && fault.kind != kind);
            let long = |kind| matches!(kind, Kind::LongCut | Kind::LongStop);
            let is_alone = !long(kind) || faults.is_empty();
            if is_certain && is_new && is_alone {
                faults.push(Fault { kind, host, choice });
                if long(kind) {
                    break;
                }
            }
        }
        let lasts = Duration::from_millis(random.u64(20..720));
        let pause = Duration::from_millis(random.u64(..40));
        Self { faults, lasts, pause }
    }

    /// Returns the fault by which a host leaves the job, if any.
    pub(crate) fn taken(&self) -> Option<Fault> {
        self.faults.iter().copied().find(|fault| fault.kind.takes_host())
    }

    pub(crate) fn kills_rank(&self) -> bool {
        self.faults.iter().any(|fault| fault.kind == Kind::KillRank)
    }
}

impl fmt::Display for Burst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let faults: Vec<String> = self.faults.iter().map(Fault::to_string).collect();
        write!(f, "{}", faults.join(" + "))?;
        if self.faults.iter().any(|fault| fault.kind.is_short()) {
            write!(f, " for {} ms", self.lasts.as_millis())?;
        }
        Ok(())
    }
}

/// Expected outcome of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Expected {
    /// The job continues without an effect.
    GoesOn,
    /// The job continues from its last checkpoint, after a restart.
    Restarts,
    /// The job restarts with one host less.
    LosesHost,
    /// The job fails, and reports that a rank was killed.
    NamesRank,
    /// The job fails, and reports that a host is lost.
    NamesHost,
}

impl Expected {
    /// Returns the outcome of a job with this many restarts left.
    pub(crate) fn of(burst: &Burst, mode: LaunchMode, restarts_left: u64) -> Self {
        match burst.taken() {
            // The hosts cannot find each other without the host of the endpoint.
            Some(fault) if mode == LaunchMode::Elastic && fault.host == 0 => Self::NamesHost,
            Some(_) if mode.is_elastic() && restarts_left > 0 => Self::LosesHost,
            Some(_) => Self::NamesHost,
            None if !burst.kills_rank() => Self::GoesOn,
            None if restarts_left > 0 => Self::Restarts,
            None => Self::NamesRank,
        }
    }
}
