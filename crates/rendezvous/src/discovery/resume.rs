//! Reconnecting to the same coordinator after the connection to it was lost or became silent.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::notices::Notices;
use super::tcp::{Endpoint, Failure};
use super::{RendezvousError, RendezvousNotice, RendezvousPlan};

/// Connects to the address until that succeeds, or until it is certain that the coordinator has ended: its host
/// responds, and nothing listens at the port. With `patient`, a closed port is not taken as a proof: a gateway may have
/// responded in place of the host.
pub(super) fn meet(
    plan: &RendezvousPlan,
    address: SocketAddr,
    patient: bool,
    mut delay: Duration,
    notices: &Notices,
) -> Result<RendezvousNotice, RendezvousError> {
    let name = address.ip().to_string();
    let endpoint = Endpoint::new(plan, &name, address.port());
    loop {
        if notices.wait(None, delay) {
            return Err(RendezvousError::System(io::ErrorKind::Interrupted.into()));
        }
        delay = plan.limits.reconnect_pause();
        let limit = plan.limits.reconnect_attempt();
        let gone = match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) => match endpoint.introduce(stream, limit, notices) {
                Ok(link) => return Ok(RendezvousNotice::Join(link.to(address))),
                Err(Failure::Now(RendezvousError::System(error))) => return Err(error.into()),
                Err(Failure::Now(error)) => Some(error.to_string()),
                Err(Failure::Later(_)) => None,
            },
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                Some(format!("{}: connection refused", endpoint.name()))
            }
            Err(_) => None,
        };
        if let Some(how) = gone.filter(|_| !patient) {
            return Ok(RendezvousNotice::Gone { how });
        }
    }
}
