//! Data of an examination, before it is checked.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::facts::{Facts, Question};

/// Hosts of a job and the routes between them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cluster {
    /// Hosts in the order in which they were named. The first one would serve the job's store.
    pub hosts: Vec<HostReport>,
    /// Routes from every host to every other.
    pub routes: Vec<Route>,
    /// Subjects of the examination, as requested.
    pub question: Question,
    /// Rendezvous port, if one was given.
    pub master_port: Option<u16>,
    /// `true` if round-trip times and bandwidths were to be measured.
    pub measured: bool,
}

/// Results of one host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostReport {
    /// Name of the host, as the user gave it.
    pub name: String,
    /// `true` for the host on which the doctor runs.
    pub here: bool,
    /// Number of ranks to start on the host, if known.
    pub ranks: Option<usize>,
    /// Facts of the host, if it could be examined.
    pub facts: Option<Facts>,
    /// Reason why the host could not be examined.
    pub lost: Option<Lost>,
    /// Offset of the host's clock from this host's.
    pub clock: Option<ClockReading>,
    /// `true` if the host sees the file that the first host created in the working folder: the folder is shared.
    pub sees_our_file: Option<bool>,
    /// Ports on which the host could not listen, with the reason.
    pub closed_ports: Vec<(u16, String)>,
    /// Lines that the login printed before the doctor's own output.
    pub login_banner: Vec<String>,
}

/// Reason why a host could not be examined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lost {
    /// The command that connects to the host could not be started.
    NotStarted {
        /// Error of the operating system.
        reason: String,
    },
    /// The command exited.
    Ended {
        /// Exit code, or `None` if it was killed by a signal.
        code: Option<i32>,
        /// Last lines of its stderr.
        stderr: Vec<String>,
    },
    /// The host did not answer in time.
    Silent {
        /// Request that was not answered.
        asked: String,
        /// Time waited, in seconds.
        seconds: u64,
        /// Last lines of its stderr.
        stderr: Vec<String>,
    },
    /// The doctor process on that host has a different protocol version.
    Foreign {
        /// Version of Brigade on that host.
        version: String,
    },
}

/// Offset of a host's clock from this host's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClockReading {
    /// Offset in seconds, positive if the host's clock is ahead.
    pub ahead_seconds: f64,
    /// Maximum error of the offset in seconds.
    pub error_seconds: f64,
}

/// Route from one host to another, which are indices into [`Cluster::hosts`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Route {
    /// Index of the connecting host.
    pub from: usize,
    /// Index of the listening host.
    pub to: usize,
    /// Connection attempts with their outcomes.
    pub attempts: Vec<Attempt>,
    /// Measurements of the route, if there are any.
    pub measured: Option<Measured>,
}

/// Attempt to connect to a port of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// Reason why this address was tried.
    pub by: AddressSource,
    /// Address and port.
    pub address: SocketAddr,
    /// Outcome of the attempt.
    pub outcome: Outcome,
}

/// Reason why an address is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AddressSource {
    /// The connecting host resolves the other host's name to it.
    Name,
    /// The host is reached at it by other means: its name has no address, or a wrong one.
    Reached,
    /// Gloo would announce it.
    Gloo,
    /// NCCL would announce it.
    Nccl,
}

/// Outcome of a connection attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The doctor on the other host answered.
    Open,
    /// The connection was refused.
    Refused,
    /// No packet came back before the time limit.
    Silent,
    /// No route to the address exists.
    NoRoute,
    /// Another program answered.
    Stranger,
    /// Another error. Contains the message of the operating system.
    Failed(String),
}

/// Round-trip time and bandwidth of a route.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Measured {
    /// Median round-trip time of a single byte, in seconds.
    pub round_trip: f64,
    /// Longest round-trip time, in seconds.
    pub slowest: f64,
    /// Number of bytes that arrived in the bulk transfer.
    pub bytes: u64,
    /// Duration of the bulk transfer in seconds.
    pub seconds: f64,
    /// Number of TCP segments that this host sent during the transfer.
    pub segments: u64,
    /// Number of those segments that were retransmitted.
    pub sent_again: u64,
    /// `true` if no bulk data arrived.
    pub stalled: bool,
    /// Packet size in bytes, without headers, with which data arrived after a stalled transfer.
    pub passes: Option<u32>,
    /// Reason why measurements are missing.
    pub error: Option<String>,
}

impl Route {
    /// Returns an address that was open by the host's own name or address.
    #[must_use]
    pub fn open_address(&self) -> Option<SocketAddr> {
        let mut open = self.attempts.iter().filter(|attempt| attempt.outcome == Outcome::Open);
        open.find(|attempt| matches!(attempt.by, AddressSource::Name | AddressSource::Reached))
            .map(|candidate| candidate.address)
    }
}

impl Measured {
    /// Returns the bandwidth in bits per second; `None` unless a bulk transfer succeeded.
    #[must_use]
    pub fn bandwidth(&self) -> Option<f64> {
        let whole = self.bytes > 0 && self.seconds > 0.0 && !self.stalled;
        whole.then(|| self.bytes as f64 * 8.0 / self.seconds)
    }
}

impl Cluster {
    /// Iterates over the hosts that could be examined, with their indices and facts.
    pub fn examined(&self) -> impl Iterator<Item = (usize, &HostReport, &Facts)> + Clone {
        let hosts = self.hosts.iter().enumerate();
        hosts.filter_map(|(place, host)| Some((place, host, host.facts.as_ref()?)))
    }

    /// Returns the address at which other hosts reach this one, as far as it can be determined.
    #[must_use]
    pub fn rendezvous_address(&self, place: usize) -> Option<IpAddr> {
        let host = self.hosts.get(place)?;
        let facts = host.facts.as_ref()?;
        let network = &facts.network;
        // A login on this host came from elsewhere, and does not show how the other hosts reach it.
        let by_ssh = network.reached_at.filter(|address| !host.here && !address.is_loopback());
        by_ssh
            .or_else(|| {
                let of_name = self.examined().filter(|(other, ..)| *other != place);
                let known = of_name.flat_map(|(_, _, facts)| facts.names.iter());
                let known = known.filter(|it| it.name == host.name).flat_map(|it| &it.addresses);
                let ours = |it: &&IpAddr| !it.is_loopback() && network.interface_of(**it).is_some();
                known.copied().find(|it| ours(&it))
            })
            .or_else(|| {
                let others = self.examined().filter(|(other, ..)| *other != place);
                let others: Vec<IpAddr> =
                    others.filter_map(|(_, _, facts)| facts.network.reached_at).collect();
                let own = network
                    .interfaces
                    .iter()
                    .filter(|interface| interface.up && !interface.loopback);
                let mut own = own.flat_map(|it| &it.addresses);
                own.find(|it| others.iter().any(|other| it.is_near(*other))).map(|it| it.address)
            })
            .or_else(|| {
                let name = network.default_interface.as_deref()?;
                let interface = network.interfaces.iter().find(|it| it.name == name)?;
                interface.addresses.first().map(|it| it.address)
            })
    }

    /// Returns the route between two hosts, by their indices.
    #[must_use]
    pub fn route(&self, from: usize, to: usize) -> Option<&Route> {
        self.routes.iter().find(|route| route.from == from && route.to == to)
    }
}
