//! Election by etcd: the first host to create the job's key becomes its coordinator, for as long as its lease is kept
//! alive; the others connect to it.

use std::net::{IpAddr, UdpSocket};
use std::time::{Duration, Instant};

use brigade_rank_env::text::printable;
use serde::{Deserialize, Serialize};

use super::backoff::RetryPolicy;
use super::notices::Notices;
use super::tcp::{Endpoint, Failure};
use super::{RendezvousError, RendezvousNotice, RendezvousPlan};
use crate::etcd::{Client, ClientError, Created, EtcdAccess, Keys, LeaderLease};
use crate::listener::{BindAddress, Listener};

/// Record that the winner publishes.
#[derive(Debug, Serialize, Deserialize)]
struct Winner {
    address: String,
    port: u16,
    /// Process number of the coordinator: two coordinators on one host have the same address, and may have the same
    /// port.
    pid: u32,
}

/// Searches for the coordinator and runs for election, until one of the two succeeds.
pub(super) fn meet(
    plan: &RendezvousPlan,
    endpoints: &str,
    access: &EtcdAccess,
    address: Option<&str>,
    notices: &Notices,
) -> Result<RendezvousNotice, RendezvousError> {
    let client = Client::new(endpoints, access)?;
    let mut election = Election { plan, client, keys: Keys::new(&plan.run_id), address };
    let mut retry = RetryPolicy::new(plan, format!("etcd at {endpoints}"), MAX_PAUSE);
    loop {
        let last = match election.turn(notices) {
            Ok(done) => return Ok(done),
            Err(Failure::Now(error)) => return Err(error),
            Err(Failure::Later(text)) => text,
        };
        retry.pause(last, notices)?;
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Away(text) => Self::Later(text),
            ClientError::Unusable(error) => Self::Now(error.into()),
        }
    }
}

struct Election<'a> {
    plan: &'a RendezvousPlan,
    client: Client,
    keys: Keys,
    address: Option<&'a str>,
}

impl Election<'_> {
    fn turn(&mut self, notices: &Notices) -> Result<RendezvousNotice, Failure> {
        let [winner, over] = self.client.look(self.keys.both())?;
        match (winner, over) {
            (_, Some(code)) => {
                let code = printable(&String::from_utf8_lossy(&code));
                Err(Failure::Now(RendezvousError::Over { run_id: self.plan.run_id.clone(), code }))
            }
            (Some(winner), None) => self.follow(&winner, notices),
            (None, None) => self.campaign(),
        }
    }

    fn follow(&self, winner: &[u8], notices: &Notices) -> Result<RendezvousNotice, Failure> {
        let Some((address, port)) = coordinator_record(winner) else {
            let text = "the coordinator's record in etcd is malformed";
            return Err(Failure::Later(text.into()));
        };
        let endpoint = Endpoint::new(self.plan, &address, port);
        match endpoint.connect(notices) {
            Ok(link) => Ok(RendezvousNotice::Join(link)),
            // The key exists for a moment after its process has ended, and another process may have the port by then.
            Err(Failure::Now(RendezvousError::NotACoordinator { how, .. })) => {
                Err(Failure::Later(format!("the coordinator at {}: {how}", endpoint.name())))
            }
            Err(Failure::Later(how)) => {
                Err(Failure::Later(format!("the coordinator at {}: {how}", endpoint.name())))
            }
            Err(now) => Err(now),
        }
    }

    fn campaign(&mut self) -> Result<RendezvousNotice, Failure> {
        let address = match self.address {
            Some(address) => address.to_owned(),
            None => own_address(self.client.host()).map_err(Failure::Later)?,
        };
        let bind_address = match address.parse::<IpAddr>() {
            Ok(address) if address.is_loopback() => BindAddress::Loopback(address),
            _ => BindAddress::Unspecified,
        };
        let mut listener =
            Listener::bind(0, bind_address, &self.plan.run_id, self.plan.secret.clone()).map_err(
                |source| Failure::Now(RendezvousError::CannotListen { port: 0, source }),
            )?;
        let winner =
            Winner { address: address.clone(), port: listener.port(), pid: std::process::id() };
        let value =
            serde_json::to_vec(&winner).map_err(|error| Failure::Later(error.to_string()))?;
        let asked = Instant::now();
        let lease = self.client.grant(LEASE)?;
        match self.client.create(self.keys.both(), &value, &lease) {
            Ok(Created::Now) => {
                let (client, keys) = (self.client.clone(), self.keys.clone());
                let held = LeaderLease::hold(client, keys, value, lease, LEASE, asked)
                    .map_err(|error| Failure::Now(RendezvousError::System(error)))?;
                listener.lease = Some(held);
                Ok(RendezvousNotice::Serve { listener, address })
            }
            lost => {
                // The lease would also end by itself, a little later.
                let _ = self.client.revoke(&lease);
                lost?;
                Err(Failure::Later("another host is being elected".into()))
            }
        }
    }
}

/// Parses the record that the winner has published: its address and port.
pub(crate) fn coordinator_record(bytes: &[u8]) -> Option<(String, u16)> {
    let Winner { address, port, .. } = serde_json::from_slice(bytes).ok()?;
    Some((address, port))
}

/// Returns the local address with which this host reaches the one with this name and port. Nothing is sent.
fn own_address(other: &str) -> Result<String, String> {
    let ask = |any: &str| -> std::io::Result<IpAddr> {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(other)?;
        Ok(socket.local_addr()?.ip())
    };
    ask("0.0.0.0")
        .or_else(|_| ask("::"))
        .map(|address| address.to_string())
        .map_err(|error| format!("no address of this host leads to {other}: {error}"))
}

/// Lease time for which a lost host remains elected. etcd grants no shorter lease.
const LEASE: Duration = Duration::from_secs(2);
/// Maximum time to detect that the lease of a lost host has ended.
const MAX_PAUSE: Duration = Duration::from_millis(250);
