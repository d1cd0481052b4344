//! Asks every host, lets hosts probe_ports at each other's addresses, and writes down what comes of it.
//!
//! Hosts are asked at the same time and each question has a time limit, so a host that hangs costs
//! its own limit and nothing else. Only bandwidths are measured one after the other.

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use sessions::Sessions;

use crate::cluster::{AddressSource, Attempt, Cluster, HostReport, Outcome, Route};
use crate::facts::Question;
use crate::interface_choice;
use crate::session::Session;

mod sessions;

/// A host to be examined.
#[derive(Debug)]
pub struct Host {
    /// Its name, as the job would use it.
    pub name: String,
    /// It is the host that we run on.
    pub here: bool,
    /// How many ranks it is to start, where that is known.
    pub ranks: Option<usize>,
    /// What starts [`serve`](crate::serve) there, and carries its input and output.
    pub command: Command,
}

/// What to look at.
#[derive(Clone, Debug)]
pub struct Examination {
    /// What hosts are asked about; the names of all of them are added.
    pub question: Question,
    /// The port that the job's hosts are to meet at, on the first of them.
    pub master_port: Option<u16>,
    /// Ports to try between hosts; where empty, three that the system chooses.
    pub ports: Vec<u16>,
    /// Measure round-trip times and bandwidths.
    pub measure: bool,
    /// The SSH login timeout of a host, up to its first nonce.
    pub timeout: Duration,
}

/// Only what can be seen without a second host; 20 s to answer.
impl Default for Examination {
    fn default() -> Self {
        Self {
            question: Question::default(),
            master_port: None,
            ports: Vec::new(),
            measure: false,
            timeout: Duration::from_secs(20),
        }
    }
}

/// The user has had cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Examines all hosts, and the ways between them. `said` hears what is being done.
///
/// # Errors
/// `cancelled` was set meanwhile. Nothing is left running then, here or elsewhere.
pub fn examine(
    hosts: Vec<Host>,
    what: &Examination,
    cancelled: &AtomicBool,
    said: &mut dyn FnMut(&str),
) -> Result<Cluster, Interrupted> {
    let mut question = what.question.clone();
    question.names = hosts.iter().map(|host| host.name.clone()).collect();
    let mut sessions = Sessions { sessions: Vec::new(), hosts: Vec::new(), cancelled };
    said("reaching the hosts");
    for host in hosts {
        let session = Session::start(host.command, &host.name);
        let Host { name, here, ranks, .. } = host;
        let report = HostReport { name, here, ranks, ..HostReport::default() };
        match session {
            Ok(session) => {
                sessions.hosts.push(report);
                sessions.sessions.push(Some(session));
            }
            Err(lost) => {
                sessions.hosts.push(HostReport { lost: Some(lost), ..report });
                sessions.sessions.push(None);
            }
        }
    }
    sessions.meet(what.timeout)?;
    said("looking at each host");
    sessions.read_clocks()?;
    sessions.gather_facts(&question)?;
    sessions.look_for_a_shared_folder()?;

    let nonce = new_nonce();
    let addresses = sessions.open_ports(&nonce, what)?;
    let mut cluster = Cluster {
        question,
        master_port: what.master_port,
        measured: what.measure,
        hosts: std::mem::take(&mut sessions.hosts),
        routes: Vec::new(),
    };
    said("connecting to ports");
    cluster.routes = plan_routes(&cluster, &addresses);
    sessions.hosts = std::mem::take(&mut cluster.hosts);
    sessions.probe_ports(&nonce, &mut cluster.routes)?;
    if what.measure {
        sessions.measure(&nonce, &mut cluster.routes, said)?;
    }
    for (host, session) in sessions.hosts.iter_mut().zip(&sessions.sessions) {
        host.login_banner =
            session.as_ref().map(|it| it.login_banner().to_vec()).unwrap_or_default();
    }
    cluster.hosts = std::mem::take(&mut sessions.hosts);
    Ok(cluster)
}

/// Plans which host connects where. Outcomes are those of hosts that do not answer, until they do.
fn plan_routes(cluster: &Cluster, addresses: &[Vec<u16>]) -> Vec<Route> {
    let mut routes = Vec::new();
    for (from, _, facts) in cluster.examined() {
        for (to, host, theirs) in cluster.examined() {
            if from == to || host.lost.is_some() {
                continue;
            }
            let named = facts.names.iter().find(|it| it.name == host.name);
            let mut known: Vec<IpAddr> = named
                .into_iter()
                .flat_map(|interface| interface.addresses.iter().copied())
                .filter(|address| !address.is_loopback())
                .take(MAX_ADDRESSES)
                .collect();
            let by = if known.is_empty() { AddressSource::Reached } else { AddressSource::Name };
            if known.is_empty() {
                known.extend(cluster.rendezvous_address(to));
            }
            let mut attempts: Vec<(AddressSource, SocketAddr)> = Vec::new();
            for address in &known {
                attempts.extend(addresses[to].iter().map(|port| (by, (*address, *port).into())));
            }
            let nccl = if theirs.devices.use_nccl() {
                interface_choice::nccl(theirs).address()
            } else {
                None
            };
            for (by, pick) in [
                (AddressSource::Gloo, interface_choice::gloo(theirs).address()),
                (AddressSource::Nccl, nccl),
            ] {
                let new = pick.filter(|address| !address.is_loopback() && !is_link_local(address));
                let new = new.filter(|it| !known.contains(it));
                let address = addresses[to].first().zip(new);
                attempts.extend(address.map(|(port, address)| (by, (address, *port).into())));
            }
            let attempts = attempts.into_iter().map(|(by, address)| Attempt {
                by,
                address,
                outcome: Outcome::Silent,
            });
            routes.push(Route { from, to, attempts: attempts.collect(), measured: None });
        }
    }
    routes
}

/// Such an address needs the name of an interface besides.
fn is_link_local(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(it) if it.is_unicast_link_local())
}

/// 128 random bits, as letters: what a host must say to be answered by another one's open port.
fn new_nonce() -> String {
    let mut random = [0; 16];
    // Fails on a system that is just starting. What such a nonce would guard is the doctor's own few
    // ports, open for seconds, which say nothing and store nothing: better a known nonce than no answer.
    let _ = getrandom::fill(&mut random);
    random.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A name with both kinds of address.
const MAX_ADDRESSES: usize = 2;
/// With more hosts than that, not every pair is measured: 0.5 s each.
pub(crate) const ALL_PAIRS: usize = 8;
