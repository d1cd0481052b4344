//! Connection to one host, on the launcher's side, up to the start of the job.

mod upload;

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use brigade_rank_env::text::{printable, printable_within};
use brigade_ssh::remote_command::{self, AGENT, GREETING, IS_MISSING, IS_UNSAFE, IS_WANTED};
use brigade_ssh::wire::{self, WireError};
use brigade_ssh::{Child, HostSpec, ssh};

use super::agent_side;
use super::bundle::Bundle;
use super::error::HostFailure;
use super::message::{FileMark, FromHost, Hello, HostJob, PROTOCOL, ToHost};
use super::plan::{HostsPlan, PlannedHost};
use crate::open_files::OpenFiles;
use crate::{DeviceList, LaunchOptions, RendezvousMode};
use upload::Copied;

/// Part of the request that is the same for all hosts.
pub(crate) struct LaunchRequest {
    pub(crate) options: LaunchOptions,
    pub(crate) plan: HostsPlan,
    /// This executable, if it is to be copied.
    pub(crate) brigade_mark: Option<FileMark>,
    pub(crate) bundle: Option<Bundle>,
    /// Additional folders in which the program's libraries may be.
    pub(crate) library_folders: Vec<PathBuf>,
    /// Raised limit of open files: each session takes a few descriptors of this process.
    pub(crate) open_files: OpenFiles,
}

/// Session of a host that is ready or being prepared.
pub(crate) struct Session {
    pub(crate) host: HostSpec,
    /// Position of the host in the list of hosts.
    pub(crate) number: usize,
    /// `true` if the host is this machine.
    is_here: bool,
    pub(crate) child: Child,
    to: File,
    from: File,
    /// Content of the agent's greeting.
    hello: Option<Hello>,
}

impl Session {
    /// Starts the agent's process on the host.
    pub(crate) fn start(
        request: &LaunchRequest,
        number: usize,
        planned: &PlannedHost,
    ) -> Result<Self, HostFailure> {
        let (host, plan) = (planned.spec.clone(), &request.plan);
        let failed = |reason: String, code| HostFailure { host: host.to_string(), reason, code };
        let access = &plan.access;
        let command = match &request.brigade_mark {
            _ if planned.is_here => Ok(agent_side::agent_command()),
            None => access.command(&host, AGENT),
            Some(FileMark { digest, size, .. }) => {
                let line = remote_command::start_exactly(&access.brigade, digest, *size);
                access.ssh_command(&host, &line)
            }
        };
        let command = command.map_err(|error| failed(error.to_string(), error.exit_code()))?;
        let (child, to, from) = Child::start(command, &host.to_string())
            .map_err(|error| failed(format!("cannot start a session: {error}"), 1))?;
        request.open_files.lower_for(child.pid().as_raw().cast_unsigned());
        Ok(Self {
            host,
            number,
            is_here: planned.is_here,
            child,
            to: to.into(),
            from: from.into(),
            hello: None,
        })
    }

    /// Prepares the host until it could start its ranks at once.
    pub(crate) fn prepare(
        &mut self,
        request: &LaunchRequest,
        say: &dyn Fn(&str),
    ) -> Result<(), HostFailure> {
        self.greet(request, say)?;
        let copied = match (&request.bundle, self.is_here) {
            (Some(bundle), false) => self.copy(bundle, say)?,
            _ => Copied::default(),
        };
        let mut library_folders = copied.library_folders;
        library_folders.extend(request.library_folders.iter().map(|it| it.clone().into()));
        self.send(&ToHost::Enter {
            folder: request.plan.workdir.clone().into(),
            variables: request.plan.variables.clone(),
            library_folders,
        })?;
        let FromHost::Entered = self.receive()? else { return Err(self.out_of_order()) };

        let mut options = request.options.clone();
        if let Some(slots) = self.host.slots {
            options.nproc = slots.into();
        }
        if let Some(devices) = &self.host.devices {
            let numbers = devices.iter().map(ToString::to_string).collect();
            options.placement.devices = Some(DeviceList::Ids(numbers));
        }
        if let Some(program) = copied.program {
            options.program = program;
        }
        options.rendezvous = RendezvousMode::Launcher { node_rank: self.number };
        let said = request.plan.master_addr.clone().filter(|_| self.number == 0);
        options.local_addr = said.or_else(|| self.address());
        let host = self.host.destination();
        let log_dir = options.output.log_dir.clone().map(Into::into);
        let secret = options.secret.as_ref().map(|secret| secret.expose().to_vec());
        self.send(&ToHost::Job(Box::new(HostJob { host, options, secret, log_dir })))?;
        let FromHost::Ready = self.receive()? else { return Err(self.out_of_order()) };
        Ok(())
    }

    /// Keeps the host waiting until all are ready, then returns the streams for the coordinator. Returns `None` if the
    /// job does not start.
    pub(crate) fn wait_for_go(
        mut self,
        request: &LaunchRequest,
        go: &Receiver<()>,
    ) -> Option<(Self, OwnedFd, OwnedFd)> {
        loop {
            let message = match go.recv_timeout(request.plan.limits.waiting_interval()) {
                Ok(()) => ToHost::Go,
                Err(RecvTimeoutError::Timeout) => ToHost::Wait,
                Err(RecvTimeoutError::Disconnected) => return None,
            };
            // The coordinator detects a host that was lost in the meantime.
            let _ = wire::send(&mut self.to, &message);
            if matches!(message, ToHost::Go) {
                let (from, to) = (self.from.try_clone().ok()?, self.to.try_clone().ok()?);
                return Some((self, from.into(), to.into()));
            }
        }
    }

    /// Returns the address of this machine as the host sees it. `None` if other hosts cannot use that address.
    pub(crate) fn launchers_address(&self) -> Option<IpAddr> {
        connection_address(self.hello.as_ref()?.ssh_connection.as_deref()?, 0)
    }

    /// Returns the name under which the other hosts reach this one: the address at which its sshd was reached, else the
    /// name that the user wrote. `None` for this machine.
    fn address(&self) -> Option<String> {
        if self.is_here {
            return None;
        }
        let connection = self.hello.as_ref().and_then(|it| it.ssh_connection.as_deref());
        let address = connection.and_then(|it| connection_address(it, 2));
        Some(address.map_or_else(|| self.host.name.clone(), |it| it.to_string()))
    }

    /// Returns `true` if the connection was closed before the first message.
    pub(crate) fn was_closed_early(&self) -> bool {
        self.hello.is_none() && ssh::is_early_close(&self.child.stderr())
    }

    /// Returns one line about the end of the session of a host that takes part.
    pub(crate) fn why_it_ended(&mut self) -> String {
        self.explain(&WireError::Closed).reason
    }

    fn greet(&mut self, request: &LaunchRequest, say: &dyn Fn(&str)) -> Result<(), HostFailure> {
        let found = wire::skip_to(&mut self.from, &GREETINGS, GREETING_LIMIT, &mut Vec::new());
        match found {
            Ok(0) => {}
            Ok(1) => {
                let reason = format!(
                    "brigade is neither at {} nor in PATH there: install it, or let --sync copy it",
                    request.plan.access.brigade.display()
                );
                return Err(self.failure(reason, 127));
            }
            Ok(2) => {
                let reason = format!(
                    "{} there was not started: {}; let --sync compare and copy it, or remove the write \
                     permission of other users with `chmod go-w`",
                    request.plan.access.brigade.display(),
                    self.child.last_stderr().trim(),
                );
                return Err(self.failure(reason, 126));
            }
            Ok(_) => self.send_brigade(request, say)?,
            Err(error) => return Err(self.explain(&error)),
        }
        let FromHost::Hello(hello) = self.receive()? else { return Err(self.out_of_order()) };
        if hello.protocol != PROTOCOL || hello.version != VERSION {
            let reason = format!(
                "{} there is brigade {}, this is {VERSION}: install the same, or let --sync copy it",
                printable(&hello.executable),
                printable(&hello.version),
            );
            return Err(self.failure(reason, 1));
        }
        self.hello = Some(hello);
        Ok(())
    }

    fn send(&mut self, message: &ToHost) -> Result<(), HostFailure> {
        wire::send(&mut self.to, message).map_err(|error| {
            // A host that refuses closes the connection; its reason may still be in transit.
            match wire::receive(&mut self.from, LAST_WORDS) {
                Ok(FromHost::Refused { reason, code }) => self.refused(&reason, code),
                _ => self.explain(&WireError::System(error)),
            }
        })
    }

    fn receive(&mut self) -> Result<FromHost, HostFailure> {
        self.receive_within(ANSWER_LIMIT)
    }

    fn receive_within(&mut self, limit: Duration) -> Result<FromHost, HostFailure> {
        match wire::receive(&mut self.from, limit) {
            Ok(FromHost::Refused { reason, code }) => Err(self.refused(&reason, code)),
            Ok(message) => Ok(message),
            Err(error) => Err(self.explain(&error)),
        }
    }

    /// Creates a failure with the agent's reason.
    fn refused(&self, reason: &str, code: u8) -> HostFailure {
        self.failure(printable_within(reason, MAX_REASON_LEN), code)
    }

    fn failure(&self, reason: String, code: u8) -> HostFailure {
        HostFailure { host: self.host.to_string(), reason, code }
    }

    fn out_of_order(&self) -> HostFailure {
        self.failure(
            "the agent there sent an unexpected message; install the same brigade on all hosts"
                .to_owned(),
            1,
        )
    }

    /// Returns the failure of a session, with ssh's own error message if there is one.
    fn explain(&mut self, error: &WireError) -> HostFailure {
        let silent = matches!(error, WireError::Silent(_));
        // A silent host has not ended, and is not waited for.
        let words = if silent { self.child.stderr() } else { self.child.last_stderr() };
        let said = ssh::reason(&words, &self.host);
        let exit_status = if silent { None } else { self.child.exit_status() };
        let reason = match (said, exit_status) {
            (said, _) if silent => match said {
                Some(said) => format!("{error}; {said}"),
                None => error.to_string(),
            },
            // The failure was on the host before an agent answered, and not in the connection.
            (Some(said), Some(exit_status))
                if self.hello.is_none() && exit_status.code() != Some(SSH_FAILED) =>
            {
                format!(
                    "no agent answers there: {said} ({exit_status}); check that it has brigade {VERSION}"
                )
            }
            (Some(said), Some(exit_status)) if exit_status.code() != Some(SSH_FAILED) => {
                format!("its agent has ended ({exit_status}): {said}")
            }
            (Some(said), _) => said,
            (None, Some(exit_status)) if exit_status.code() != Some(SSH_FAILED) => {
                format!("its agent has ended ({exit_status})")
            }
            (None, Some(exit_status)) => format!("{error} ({exit_status})"),
            (None, None) => error.to_string(),
        };
        self.failure(reason, 1)
    }
}

/// Returns one of the four words of `SSH_CONNECTION`, if it is an address that other hosts can use.
fn connection_address(connection: &str, word: usize) -> Option<IpAddr> {
    let address: IpAddr = connection.split(' ').nth(word)?.parse().ok()?;
    let local = match address {
        IpAddr::V4(address) => address.is_loopback() || address.is_link_local(),
        IpAddr::V6(address) => address.is_loopback() || address.is_unicast_link_local(),
    };
    (!local).then_some(address)
}

/// Maximum length of a reason, in characters: it may contain a path.
const MAX_REASON_LEN: usize = 1000;
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Possible first lines of an agent, or of the shell in its place.
const GREETINGS: [&str; 4] = [GREETING, IS_MISSING, IS_UNSAFE, IS_WANTED];
/// Exit code of ssh for its own errors. Any other exit code is that of the remote program.
const SSH_FAILED: i32 = 255;
/// Time limit from the start of ssh to the agent's first message: name resolution, connection, login, login shell.
const GREETING_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for an answer that takes a few system calls on the host, which may be busy or have a slow shared folder.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
const LAST_WORDS: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_a_connection() {
        let address = |text, word| connection_address(text, word).map(|it| it.to_string());
        let plain = "10.213.0.1 50000 10.213.0.2 22";
        assert_eq!(address(plain, 0).as_deref(), Some("10.213.0.1"));
        assert_eq!(address(plain, 2).as_deref(), Some("10.213.0.2"));
        assert_eq!(address("fd00::1 1 fd00::2 22", 2).as_deref(), Some("fd00::2"));
        for local in
            ["127.0.0.1 1 127.0.0.1 22", "::1 1 ::1 22", "fe80::1%eth0 1 fe80::2%eth0 22", "x", ""]
        {
            assert_eq!(address(local, 2), None, "{local}");
        }
    }
}
