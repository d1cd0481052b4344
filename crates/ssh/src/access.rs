//! Commands that reach the hosts of a list from this machine and start a role on them.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use brigade_rendezvous::TimeLimits;

use crate::ssh::{SSH_VARIABLE, SessionTimes, SshClient};
use crate::{HostSpec, LocalFacts, LocalHost, RemoteError, reexec, remote_command};

/// Access to the hosts of a job: makes the commands that start this program on them, over ssh or directly on this
/// machine.
///
/// ```
/// use std::time::Duration;
///
/// use brigade_ssh::{HostAccess, HostSpec, LocalFacts, TimeLimits};
///
/// let facts = LocalFacts { brigade: "/opt/brigade".into(), ..LocalFacts::default() };
/// let limits = TimeLimits::default();
/// let access = HostAccess::resolve(Some("ssh -p 2222"), Duration::from_secs(10), limits, &facts)?;
/// let host = HostSpec::parse_list("ada@node2")?.remove(0);
/// let words = access.words(&host, "__agent");
/// assert_eq!(words[..4], ["ssh", "-p", "2222", "-T"]);
/// assert!(words.contains(&"ada@node2".to_owned()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAccess {
    /// Names and addresses of this machine.
    pub local: LocalHost,
    /// Path of this executable. The other hosts look for it at the same path.
    pub brigade: PathBuf,
    client: SshClient,
    times: SessionTimes,
}

impl HostAccess {
    /// Derives the access from the options and facts. A pure function.
    ///
    /// `ssh_command` is the client with its options as one line of the shell; without it the variable `BRIGADE_SSH` is
    /// read, and then `ssh` is used. ssh gets `connect_timeout` to connect, and sends keepalive messages at the
    /// interval of `limits`.
    ///
    /// # Errors
    /// The command for ssh cannot be parsed.
    pub fn resolve(
        ssh_command: Option<&str>,
        connect_timeout: Duration,
        limits: TimeLimits,
        facts: &LocalFacts,
    ) -> Result<Self, RemoteError> {
        let variable = facts.variables.iter().find(|it| it.0 == SSH_VARIABLE);
        let client = SshClient::new(ssh_command, variable.map(|it| it.1.as_os_str()))?;
        let (alive_interval, alive_count) = limits.ssh_keepalive();
        let times = SessionTimes { connect: connect_timeout, alive_interval, alive_count };
        Ok(Self { local: facts.host.clone(), brigade: facts.brigade.clone(), client, times })
    }

    /// Makes the command that starts a role, such as `__agent`, on a host. The command ends with exit code 127 where
    /// `brigade` is missing. On this machine the role starts without ssh.
    ///
    /// # Errors
    /// The ssh client does not exist or cannot be executed.
    pub fn command(&self, host: &HostSpec, role: &str) -> Result<Command, RemoteError> {
        if self.local.is(host) {
            return Ok(reexec::role_command(role));
        }
        self.ssh_command(host, &remote_command::start(&self.brigade, role))
    }

    /// Makes the command that runs a shell command line on another host.
    ///
    /// # Errors
    /// The ssh client does not exist or cannot be executed.
    pub fn ssh_command(&self, host: &HostSpec, line: &str) -> Result<Command, RemoteError> {
        Ok(self.client.command(host, self.times, line)?)
    }

    /// Returns the words of [`HostAccess::command`], to show them to a user.
    #[must_use]
    pub fn words(&self, host: &HostSpec, role: &str) -> Vec<String> {
        if self.local.is(host) {
            return vec![self.brigade.display().to_string(), role.to_owned()];
        }
        let line = remote_command::start(&self.brigade, role);
        let mut words = vec![self.client.program().to_owned()];
        words.extend(self.client.arguments(host, self.times, &line));
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_needs_no_ssh() {
        let facts = LocalFacts::gather().unwrap();
        // A client that every system has.
        let (client, limit) = (Some("sh -x"), Duration::from_secs(10));
        let access = HostAccess::resolve(client, limit, TimeLimits::default(), &facts).unwrap();
        let hosts = HostSpec::parse_list("localhost,ada@node2:4").unwrap();
        let commands = hosts.iter().map(|host| access.command(host, "__role").unwrap());
        let words = |command: Command| {
            let words = command.get_args().map(|it| it.to_string_lossy().into_owned());
            words.collect::<Vec<_>>()
        };
        let commands: Vec<_> = commands.map(words).collect();
        assert_eq!(commands[0], ["__role"]);
        let remote = &commands[1];
        assert_eq!(remote[remote.len() - 3..][..2], ["-x", "ada@node2"]);
        let line = remote.last().unwrap();
        assert!(line.contains("exec brigade __role") && !line.contains("__agent"), "{line}");
    }
}
