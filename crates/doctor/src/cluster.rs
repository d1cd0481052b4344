//! All that an examination has found, before it is judged.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::facts::{Facts, Question};

/// The hosts of a job, and the ways between them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cluster {
    /// In the order in which they were named; the first would serve the job's store.
    pub hosts: Vec<HostReport>,
    /// From every host to every other.
    pub routes: Vec<Route>,
    /// What was asked for.
    pub question: Question,
    /// The port that hosts meet at, where one was given.
    pub master_port: Option<u16>,
    /// Whether round-trip times and bandwidths were to be measured.
    pub measured: bool,
}

/// A host and what is known about it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HostReport {
    /// Its name, as it was given to us.
    pub name: String,
    /// It is the host that we run on.
    pub here: bool,
    /// How many ranks it is to start, where that was said.
    pub ranks: Option<usize>,
    /// What it told about itself, if it could be examined.
    pub facts: Option<Facts>,
    /// Why it could not.
    pub lost: Option<Lost>,
    /// Its clock against ours.
    pub clock: Option<ClockReading>,
    /// Whether it sees the file that the first host has left in the working folder.
    pub sees_our_file: Option<bool>,
    /// Ports that it could not listen on, and why.
    pub closed_ports: Vec<(u16, String)>,
    /// What its login wrote before our program came to speak.
    pub login_banner: Vec<String>,
}

/// Why a host could not be examined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lost {
    /// The command that leads there could not be started.
    NotStarted {
        /// The system's words.
        reason: String,
    },
    /// The command ended.
    Ended {
        /// Its exit code, if it was not killed.
        code: Option<i32>,
        /// The last lines of its stderr.
        stderr: Vec<String>,
    },
    /// No answer came in time.
    Silent {
        /// What it was asked for.
        asked: String,
        /// For how many seconds we waited.
        seconds: u64,
        /// The last lines of its stderr.
        stderr: Vec<String>,
    },
    /// Our program there speaks another language.
    Foreign {
        /// Its version.
        version: String,
    },
}

/// A clock against ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClockReading {
    /// How many seconds it is ahead of ours.
    pub ahead_seconds: f64,
    /// By how many seconds that may be wrong.
    pub error_seconds: f64,
}

/// The way from one host to another, by their places in [`Cluster::hosts`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Route {
    /// The host that connects.
    pub from: usize,
    /// The host that listens.
    pub to: usize,
    /// What came of each attempt.
    pub attempts: Vec<Attempt>,
    /// How fast it is.
    pub measured: Option<Measured>,
}

/// An attempt to connect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    /// Why this address.
    pub by: AddressSource,
    /// Address and port.
    pub address: SocketAddr,
    /// What came of it.
    pub outcome: Outcome,
}

/// Why an address is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AddressSource {
    /// It is what the host's name means to the one that connects.
    Name,
    /// It is how the host is reached otherwise: its name means nothing there, or the wrong thing.
    Reached,
    /// Gloo would announce it.
    Gloo,
    /// NCCL would announce it.
    Nccl,
}

/// What came of an attempt to connect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The doctor on the other host answered.
    Open,
    /// The connection was refused.
    Refused,
    /// Nothing came back.
    Silent,
    /// There is no way to that address.
    NoRoute,
    /// Something else answered.
    Stranger,
    /// The system's words.
    Failed(String),
}

/// How fast a route is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Measured {
    /// Round trips of a single byte, in seconds: the median.
    pub round_trip: f64,
    /// The slowest of them.
    pub slowest: f64,
    /// Bytes that arrived in bulk.
    pub bytes: u64,
    /// In this time.
    pub seconds: f64,
    /// TCP segments that this host sent meanwhile.
    pub segments: u64,
    /// How many of them it had to send again.
    pub sent_again: u64,
    /// Bulk data did not arrive at all.
    pub stalled: bool,
    /// The size of packets, without their headers, that did arrive then.
    pub passes: Option<u32>,
    /// Why there is no measurement, or only a part of it.
    pub error: Option<String>,
}

impl Route {
    /// A address that was open by the host's own name or address.
    #[must_use]
    pub fn open_door(&self) -> Option<SocketAddr> {
        let mut open = self.attempts.iter().filter(|it| it.outcome == Outcome::Open);
        open.find(|it| matches!(it.by, AddressSource::Name | AddressSource::Reached))
            .map(|candidate| candidate.address)
    }
}

impl Measured {
    /// Bits per second, where a bulk transfer succeeded.
    #[must_use]
    pub fn bandwidth(&self) -> Option<f64> {
        let whole = self.bytes > 0 && self.seconds > 0.0 && !self.stalled;
        whole.then(|| self.bytes as f64 * 8.0 / self.seconds)
    }
}

impl Cluster {
    /// Hosts that could be examined, with their places and facts.
    pub fn examined(&self) -> impl Iterator<Item = (usize, &HostReport, &Facts)> + Clone {
        let hosts = self.hosts.iter().enumerate();
        hosts.filter_map(|(place, host)| Some((place, host, host.facts.as_ref()?)))
    }

    /// The address at which other hosts reach this one, as far as can be told.
    #[must_use]
    pub fn rendezvous_address(&self, place: usize) -> Option<IpAddr> {
        let host = self.hosts.get(place)?;
        let facts = host.facts.as_ref()?;
        let network = &facts.network;
        // A login on this host came from somewhere else: it says nothing about the other hosts.
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

    /// The route between two hosts.
    #[must_use]
    pub fn route(&self, from: usize, to: usize) -> Option<&Route> {
        self.routes.iter().find(|route| route.from == from && route.to == to)
    }
}
