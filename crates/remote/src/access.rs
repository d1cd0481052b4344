//! Another role of this executable on the hosts of a job: reached, found and given its environment
//! as the agents are.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use super::error::HostsError;
use super::hostfile::HostSpec;
use super::plan::{HostsFacts, HostsPlan, PlannedHost};
use super::{HostsOptions, remote_line};
use crate::{LaunchError, LaunchOptions, role};

/// What starts a role on a host. Its standard streams are for the caller to set.
#[derive(Debug)]
pub struct RoleCommand {
    /// The host.
    pub host: HostSpec,
    /// It is this machine, and needs no ssh.
    pub here: bool,
    /// The command. It ends with exit code 127 where there is no `brigade`.
    pub command: Command,
}

impl HostsOptions {
    /// The commands that start a role, such as `__doctor`, on each of the hosts.
    ///
    /// # Errors
    /// The client of ssh cannot be told from the options, or is not there.
    pub fn role_commands(&self, role: &str) -> Result<Vec<RoleCommand>, LaunchError> {
        let plan = self.plan()?;
        let line = remote_line::start_role(&plan.brigade, role);
        let command_to = |host: &PlannedHost| {
            let (spec, here) = (host.spec.clone(), host.is_here);
            let command = if here {
                role::command(role)
            } else {
                let command = plan.client.command(&spec, plan.session_times(), &line);
                command.map_err(HostsError::Client)?
            };
            Ok(RoleCommand { host: spec, here, command })
        };
        plan.hosts.iter().map(command_to).collect()
    }

    /// The variables of this environment that the hosts get.
    ///
    /// # Errors
    /// The user asks for a variable that is not there, or a file has a line that is no variable.
    pub fn variables(&self) -> Result<Vec<(OsString, OsString)>, HostsError> {
        Ok(self.plan()?.variables)
    }

    /// The folder in which the ranks run.
    ///
    /// # Errors
    /// It is not given as an absolute path: on another host it would be relative to the home folder
    /// there. Or the current one cannot be found.
    pub fn working_folder(&self) -> Result<PathBuf, HostsError> {
        Ok(self.plan()?.workdir)
    }

    fn plan(&self) -> Result<HostsPlan, HostsError> {
        HostsPlan::resolve(&LaunchOptions::default(), self, &HostsFacts::gather()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_needs_no_ssh() {
        let options = HostsOptions {
            hosts: HostSpec::parse_list("localhost,ada@node2:4").unwrap(),
            // A client that every system has.
            ssh_command: Some("sh -x".to_owned()),
            ..HostsOptions::default()
        };
        let commands = options.role_commands("__role").unwrap();
        assert!(commands[0].here && !commands[1].here);
        let words = |command: &Command| {
            let words = command.get_args().map(|it| it.to_string_lossy().into_owned());
            words.collect::<Vec<_>>()
        };
        assert_eq!(words(&commands[0].command), ["__role"]);
        let remote = words(&commands[1].command);
        assert_eq!(remote[remote.len() - 3..][..2], ["-x", "ada@node2"]);
        let line = remote.last().unwrap();
        assert!(line.contains("exec brigade __role") && !line.contains("__agent"), "{line}");
    }
}
