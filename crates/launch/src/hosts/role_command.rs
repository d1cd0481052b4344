//! Another role of this executable on the hosts of a job: reached, found and given its environment
//! as the agents are.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::error::HostsError;
use super::here::Here;
use super::hostfile::HostSpec;
use super::session::Way;
use super::ssh::{SSH_VARIABLE, SshClient};
use super::{HostsOptions, environment, remote_line};
use crate::LaunchError;

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
        let client = self.client()?;
        let brigade =
            std::env::current_exe().map_err(HostsError::system("find this executable"))?;
        let line = remote_line::start_role(&brigade, role);
        let here = Here::look();
        let command_to = |host: &HostSpec| {
            let here = here.way_to(host) == Way::Here;
            let command = if here {
                let mut command = Command::new("/proc/self/exe");
                command.arg(role);
                command
            } else {
                client.command(host, self.connect_timeout, &line).map_err(HostsError::Client)?
            };
            Ok(RoleCommand { host: host.clone(), here, command })
        };
        self.hosts.iter().map(command_to).collect()
    }

    /// The variables of this environment that the hosts get.
    ///
    /// # Errors
    /// The user asks for a variable that is not there, or a file has a line that is no variable.
    pub fn variables(&self) -> Result<Vec<(OsString, OsString)>, HostsError> {
        let here: Vec<_> = std::env::vars_os().collect();
        let files: Vec<_> = environment::deepspeed_files()
            .into_iter()
            .filter_map(|path| Some((path.clone(), fs::read_to_string(&path).ok()?)))
            .collect();
        environment::choose(&self.env, &here, &files)
    }

    /// The folder in which the ranks run.
    ///
    /// # Errors
    /// It is not given as an absolute path: on another host it would be relative to the home folder
    /// there. Or the current one cannot be found.
    pub fn working_folder(&self) -> Result<PathBuf, HostsError> {
        let folder = match &self.workdir {
            Some(folder) => folder.clone(),
            None => current_folder().map_err(HostsError::system("find the working folder"))?,
        };
        if folder.is_absolute() { Ok(folder) } else { Err(HostsError::Workdir { path: folder }) }
    }

    pub(super) fn client(&self) -> Result<SshClient, HostsError> {
        let variable = std::env::var_os(SSH_VARIABLE);
        SshClient::new(self.ssh_command.as_deref(), variable.as_deref().map(OsStr::new))
    }
}

/// As a shell says it, links included: on another host the link may be the only name.
fn current_folder() -> std::io::Result<PathBuf> {
    let real = std::env::current_dir()?;
    let said = std::env::var_os("PWD").map(PathBuf::from).filter(|it| it.is_absolute());
    let same = |it: &PathBuf| it.canonicalize().is_ok_and(|it| it == real);
    Ok(said.filter(same).unwrap_or(real))
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
