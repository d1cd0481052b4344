//! The user's ssh: how it is called, and what its words mean.
//!
//! The program itself and not a library, so that the user's settings, agent, keys and jump hosts
//! work as they do by hand.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::error::HostsError;
use super::hostfile::HostSpec;
use crate::program::Search;
use crate::{Program, ProgramError, role};

/// A client of ssh with its options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SshClient {
    program: String,
    options: Vec<String>,
}

/// How long a session waits for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionTimes {
    /// To connect.
    pub(crate) connect: Duration,
    /// Seconds without a sign of the other side until it is asked for one.
    pub(crate) alive_interval: u64,
    /// How often it is asked in vain.
    pub(crate) alive_count: u64,
}

impl SshClient {
    /// What the option says, else what `BRIGADE_SSH` says, else `ssh`.
    ///
    /// # Errors
    /// The words cannot be told apart, or there are none.
    pub(crate) fn new(option: Option<&str>, variable: Option<&OsStr>) -> Result<Self, HostsError> {
        let (origin, text) = match (option, variable) {
            (Some(text), _) => ("--ssh-command", text.to_owned()),
            (None, Some(text)) if !text.is_empty() => {
                (SSH_VARIABLE, text.to_string_lossy().into_owned())
            }
            (None, _) => ("", "ssh".to_owned()),
        };
        let wrong = |expected| HostsError::SshCommand { origin, text: text.clone(), expected };
        let words = shlex::split(&text).ok_or_else(|| wrong("its quotes do not match"))?;
        let mut words = words.into_iter();
        let program =
            words.next().ok_or_else(|| wrong("expected a program, as in `ssh -F file`"))?;
        Ok(Self { program, options: words.collect() })
    }

    /// The command that runs a line of the shell on a host. It ends with this process.
    ///
    /// # Errors
    /// There is no such client.
    pub(crate) fn command(
        &self,
        host: &HostSpec,
        times: SessionTimes,
        line: &str,
    ) -> Result<Command, ProgramError> {
        let path = std::env::var_os("PATH");
        let search = Search { path: path.as_deref(), python: None };
        let found = Program::Executable((&self.program).into()).find(search)?;
        let mut command = role::session_command(&found.file);
        command.args(self.arguments(host, times, line));
        Ok(command)
    }

    /// OpenSSH's client gets options for a session without a terminal and without a question to a
    /// user who is not there. The user's own come first: of two, ssh takes the first. Any other
    /// client is called as `rsh` is, with the host and the line.
    pub(crate) fn arguments(
        &self,
        host: &HostSpec,
        times: SessionTimes,
        line: &str,
    ) -> Vec<String> {
        let mut arguments = self.options.clone();
        if self.is_openssh() {
            arguments.extend(["-T".to_owned(), "-x".to_owned()]);
            let seconds = times.connect.as_secs().max(1);
            let SessionTimes { alive_interval, alive_count, .. } = times;
            for option in [
                "BatchMode=yes",
                &format!("ConnectTimeout={seconds}"),
                // A host that falls silent is noticed in the middle of a copy, too. Once the job
                // runs, both sides notice it earlier, and say so.
                &format!("ServerAliveInterval={alive_interval}"),
                &format!("ServerAliveCountMax={alive_count}"),
                // One that serves others, too, would be left behind. One that is there is used.
                "ControlMaster=no",
                // As scp does: what the user's settings add to an interactive session.
                "ClearAllForwardings=yes",
                "PermitLocalCommand=no",
                "RemoteCommand=none",
                // With less, ssh does not say why a connection was closed.
                "LogLevel=INFO",
            ] {
                arguments.extend(["-o".to_owned(), option.to_owned()]);
            }
            arguments.push("--".to_owned());
        }
        arguments.extend([host.destination(), line.to_owned()]);
        arguments
    }

    /// The program.
    pub(crate) fn program(&self) -> &str {
        &self.program
    }

    fn is_openssh(&self) -> bool {
        Path::new(&self.program).file_name().is_some_and(|name| name == "ssh")
    }
}

/// Why a session did not come about or ended, in ssh's own words and with the next thing to do.
///
/// `words` is what came on its stderr. `None`: it has said nothing.
pub(crate) fn reason(words: &str, host: &HostSpec) -> Option<String> {
    let mut lines: Vec<&str> = words.lines().map(str::trim).filter(|it| !it.is_empty()).collect();
    // The last two: "No ED25519 host key is known …" and "Host key verification failed."
    lines.drain(..lines.len().saturating_sub(2));
    if lines.is_empty() {
        return None;
    }
    // A line of its own is a sentence of its own.
    let parts: Vec<&str> = lines.iter().map(|line| line.trim_end_matches('.')).collect();
    let said = parts.join("; ");
    let hint = HINTS.iter().find(|(sign, _)| said.contains(sign)).map(|(_, hint)| *hint);
    Some(match hint {
        Some(hint) => format!("{said}: {}", hint.replace("HOST", &host.destination())),
        None => said,
    })
}

/// An sshd with too many logins under way closes the connection of another one. With a jump host,
/// all connections of a job come to the same one.
pub(crate) fn is_turned_away(words: &str) -> bool {
    let early = ["kex_exchange_identification", "ssh_exchange_identification", "banner exchange:"];
    words.lines().any(|line| early.iter().any(|it| line.contains(it)))
}

const HINTS: [(&str, &str); 5] = [
    ("has changed", "if that is right, remove its old key with `ssh-keygen -R HOST`"),
    ("Host key verification failed", "connect once by hand, `ssh HOST`, and accept its key"),
    (
        "Permission denied",
        "log in with a key or an agent, because nobody is asked for a password here",
    ),
    ("Could not resolve hostname", "check its name, or give it an address in ~/.ssh/config"),
    ("Connection refused", "is sshd running there, and on that port?"),
];

/// Another client, or options for it, where the command line names none.
pub(crate) const SSH_VARIABLE: &str = "BRIGADE_SSH";

#[cfg(test)]
mod tests {
    use super::*;

    fn host(text: &str) -> HostSpec {
        HostSpec::parse_list(text).unwrap().remove(0)
    }

    fn line(option: Option<&str>, variable: Option<&str>, to: &str) -> String {
        let client = SshClient::new(option, variable.map(OsStr::new)).unwrap();
        let times =
            SessionTimes { connect: Duration::from_secs(10), alive_interval: 2, alive_count: 23 };
        let arguments = client.arguments(&host(to), times, "LINE");
        format!("{} {}", client.program, arguments.join(" "))
    }

    #[test]
    fn command_lines() {
        let ours = "-T -x -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=2 \
                    -o ServerAliveCountMax=23 -o ControlMaster=no \
                    -o ClearAllForwardings=yes -o PermitLocalCommand=no -o RemoteCommand=none \
                    -o LogLevel=INFO --";
        assert_eq!(line(None, None, "node1:4"), format!("ssh {ours} node1 LINE"));
        assert_eq!(line(None, Some(""), "node1:4"), format!("ssh {ours} node1 LINE"));
        assert_eq!(
            line(Some("ssh -F 'my file' -p 2222"), Some("rsh"), "ada@[::1]:4"),
            format!("ssh -F my file -p 2222 {ours} ada@::1 LINE")
        );
        assert_eq!(
            line(None, Some("/opt/bin/ssh -v"), "n"),
            format!("/opt/bin/ssh -v {ours} n LINE")
        );
        assert_eq!(line(Some("rsh -n"), None, "ada@node1"), "rsh -n ada@node1 LINE");
    }

    #[test]
    fn commands_that_are_none() {
        let error = |text| SshClient::new(Some(text), None).unwrap_err().to_string();
        assert_eq!(error(""), "--ssh-command ``: expected a program, as in `ssh -F file`");
        assert_eq!(error("ssh -F 'a"), "--ssh-command `ssh -F 'a`: its quotes do not match");
    }

    #[test]
    fn who_may_be_tried_again() {
        let away = "kex_exchange_identification: Connection closed by remote host\r\n\
                    Connection closed by UNKNOWN port 65535\r\n";
        assert!(is_turned_away(away));
        assert!(!is_turned_away("root@node2: Permission denied (publickey).\n"));
        assert!(!is_turned_away("Connection to node2 closed by remote host.\n"));
    }

    #[test]
    fn reasons() {
        let table = [
            ("", None),
            ("\n \n", None),
            (
                "ssh: Could not resolve hostname node7: Name or service not known\r\n",
                Some(
                    "ssh: Could not resolve hostname node7: Name or service not known: check its \
                     name, or give it an address in ~/.ssh/config",
                ),
            ),
            (
                "ssh: connect to host node7 port 22: Connection refused\n",
                Some(
                    "ssh: connect to host node7 port 22: Connection refused: is sshd running \
                     there, and on that port?",
                ),
            ),
            (
                "root@node7: Permission denied (publickey).\n",
                Some(
                    "root@node7: Permission denied (publickey): log in with a key or an agent, \
                     because nobody is asked for a password here",
                ),
            ),
            (
                "No ED25519 host key is known for node7 and you have requested strict checking.\n\
                 Host key verification failed.\n",
                Some(
                    "No ED25519 host key is known for node7 and you have requested strict \
                     checking; Host key verification failed: connect once by hand, `ssh node7`, \
                     and accept its key",
                ),
            ),
            (
                "@@@@@\nWARNING\nHost key for node7 has changed and you have requested strict \
                 checking.\nHost key verification failed.\n",
                Some(
                    "Host key for node7 has changed and you have requested strict checking; Host \
                     key verification failed: if that is right, remove its old key with \
                     `ssh-keygen -R node7`",
                ),
            ),
            (
                "Timeout, server node7 not responding.\r\n",
                Some("Timeout, server node7 not responding"),
            ),
        ];
        for (words, expected) in table {
            assert_eq!(reason(words, &host("node7")).as_deref(), expected, "{words}");
        }
    }
}
