//! Preparation of the next attempt before its ranks start.

use crate::output::AttemptFiles;
use crate::store_port::Interfaces;
use crate::{LaunchError, LaunchPlan, RendezvousMode, StorePort};

/// Port and files of the next attempt.
pub(super) struct NextAttempt<'p> {
    plan: &'p LaunchPlan,
    interfaces: Interfaces,
    /// Reserved port, in case this is the first host.
    port: Option<StorePort>,
    /// Files of the attempt, once it is prepared.
    pub(super) files: Option<AttemptFiles>,
}

impl<'p> NextAttempt<'p> {
    /// Reserves a port for the first attempt.
    pub(super) fn new(plan: &'p LaunchPlan, interfaces: Interfaces) -> Result<Self, LaunchError> {
        let port = Some(reserve_port(plan, interfaces)?);
        Ok(Self { plan, interfaces, port, files: None })
    }

    /// Returns `true` if a port is reserved now.
    pub(super) fn has_port(&self) -> bool {
        self.port.is_some()
    }

    /// Takes the port of the ranks' store.
    pub(super) fn take_port(&mut self) -> Result<StorePort, LaunchError> {
        self.port.take().map_or_else(|| reserve_port(self.plan, self.interfaces), Ok)
    }

    /// Returns the number of the port, which is reserved if it is not yet.
    pub(super) fn port_number(&mut self) -> Result<u16, LaunchError> {
        let port = self.take_port()?;
        let number = port.number();
        self.port = Some(port);
        Ok(number)
    }
}

/// Reserves a port for the ranks' store, for the case that this is the first host.
///
/// Fails if no port is free, or none of those that the user has chosen.
fn reserve_port(plan: &LaunchPlan, interfaces: Interfaces) -> Result<StorePort, LaunchError> {
    // The other hosts do not use it, and a port that the user has chosen may be taken on them.
    let is_first = match plan.options.rendezvous {
        RendezvousMode::Static { node_rank, .. } | RendezvousMode::Launcher { node_rank } => {
            node_rank == 0
        }
        _ => true,
    };
    match plan.options.store_port.as_ref().filter(|_| is_first) {
        Some(chosen) => StorePort::reserve_in(interfaces, chosen.ports).map_err(|cause| {
            LaunchError::StorePort {
                ports: chosen.ports.to_string(),
                source_of: chosen.source.clone(),
                cause,
                needs_one: interfaces == Interfaces::All,
            }
        }),
        None => StorePort::reserve(interfaces).map_err(LaunchError::system("reserve a port")),
    }
}
