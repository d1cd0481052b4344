//! Examination of all hosts and of the connections between them.
//!
//! Hosts are examined in parallel and each request has a time limit, so a host that hangs costs its own limit and no
//! more. Only bandwidths are measured one after another.

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

/// Host to be examined.
#[derive(Debug)]
pub struct Host {
    /// Name of the host, as the job would use it.
    pub name: String,
    /// `true` for the host on which the doctor runs.
    pub here: bool,
    /// Number of ranks to start on the host, if known.
    pub ranks: Option<usize>,
    /// Command that runs [`serve`](crate::serve) on the host with its input and output.
    pub command: Command,
}

/// Options of an examination.
#[derive(Clone, Debug)]
pub struct Examination {
    /// Subjects to examine. The names of all hosts are added.
    pub question: Question,
    /// Rendezvous port of the job, on the first host.
    pub master_port: Option<u16>,
    /// Ports to test between hosts. If empty, the system chooses three.
    pub ports: Vec<u16>,
    /// `true` to measure round-trip times and bandwidths.
    pub measure: bool,
    /// Time limit for the login to a host and its first message.
    pub timeout: Duration,
}

/// Examines what needs no second host. The time limit is 20 s.
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

/// Error of an examination that the user cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Examines all hosts and the routes between them. Progress messages are passed to `progress`.
///
/// # Errors
/// [`Interrupted`] if `cancelled` was set meanwhile. All processes, local and remote, are then ended.
pub fn examine(
    hosts: Vec<Host>,
    what: &Examination,
    cancelled: &AtomicBool,
    progress: &mut dyn FnMut(&str),
) -> Result<Cluster, Interrupted> {
    let mut question = what.question.clone();
    question.names = hosts.iter().map(|host| host.name.clone()).collect();
    let mut sessions = Sessions { sessions: Vec::new(), hosts: Vec::new(), cancelled };
    progress("reaching the hosts");
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
    progress("looking at each host");
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
    progress("connecting to ports");
    cluster.routes = plan_routes(&cluster, &addresses);
    sessions.hosts = std::mem::take(&mut cluster.hosts);
    sessions.probe_ports(&nonce, &mut cluster.routes)?;
    if what.measure {
        sessions.measure(&nonce, &mut cluster.routes, progress)?;
    }
    for (host, session) in sessions.hosts.iter_mut().zip(&sessions.sessions) {
        host.login_banner =
            session.as_ref().map(|it| it.login_banner().to_vec()).unwrap_or_default();
    }
    cluster.hosts = std::mem::take(&mut sessions.hosts);
    Ok(cluster)
}

/// Plans which host connects where. All outcomes are initially those of hosts that do not answer.
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

/// Returns `true` for a link-local address, which is incomplete without the name of an interface.
fn is_link_local(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(it) if it.is_unicast_link_local())
}

/// Creates 128 random bits as letters, which a host must send to get an answer from another host's open port.
fn new_nonce() -> String {
    let mut random = [0; 16];
    // Fails on a system that is just booting. The nonce only protects the doctor's own ports, which are open for
    // seconds and neither reveal nor store data: a known nonce is better than no answer.
    let _ = getrandom::fill(&mut random);
    random.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Maximum number of addresses per name: one IPv4 and one IPv6 address.
const MAX_ADDRESSES: usize = 2;
/// Number of hosts above which not every pair is measured: each takes 0.5 s.
pub(crate) const ALL_PAIRS: usize = 8;
