//! The user's ssh client: its command line, and what its stderr means.
//!
//! The program itself and not a library, so that the user's settings, agent, keys and jump hosts
//! work as they do by hand.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::{ExecutableError, HostSpec, RemoteError, executable, reexec};

/// The ssh client with its options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SshClient {
    program: String,
    options: Vec<String>,
}

/// The time limits of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionTimes {
    /// Time limit for the connection.
    pub(crate) connect: Duration,
    /// ssh's `ServerAliveInterval`: seconds without a message until one is asked for.
    pub(crate) alive_interval: u64,
    /// ssh's `ServerAliveCountMax`: how many of these may go unanswered.
    pub(crate) alive_count: u64,
}

impl SshClient {
    /// Creates the client from the option, else from `BRIGADE_SSH`, else `ssh`.
    ///
    /// # Errors
    /// Its quotes do not match, or it is empty.
    pub(crate) fn new(option: Option<&str>, variable: Option<&OsStr>) -> Result<Self, RemoteError> {
        let (origin, text) = match (option, variable) {
            (Some(text), _) => ("--ssh-command", text.to_owned()),
            (None, Some(text)) if !text.is_empty() => {
                (SSH_VARIABLE, text.to_string_lossy().into_owned())
            }
            (None, _) => ("", "ssh".to_owned()),
        };
        let wrong = |expected| RemoteError::SshCommand { origin, text: text.clone(), expected };
        let words = shlex::split(&text).ok_or_else(|| wrong("its quotes do not match"))?;
        let mut words = words.into_iter();
        let program =
            words.next().ok_or_else(|| wrong("expected a program, as in `ssh -F file`"))?;
        Ok(Self { program, options: words.collect() })
    }

    /// Makes the command that runs a line of the shell on a host. It ends with this process.
    ///
    /// # Errors
    /// There is no such client.
    pub(crate) fn command(
        &self,
        host: &HostSpec,
        times: SessionTimes,
        line: &str,
    ) -> Result<Command, ExecutableError> {
        let path = std::env::var_os("PATH");
        let file = executable::find(self.program.as_ref(), path.as_deref())?;
        let mut command = reexec::session_command(&file);
        command.args(self.arguments(host, times, line));
        Ok(command)
    }

    /// Returns the arguments. OpenSSH's client gets options for a session without a terminal and without
    /// questions to a user. The user's own come first: of two, ssh takes the first. Any other client is
    /// called as `rsh` is, with the host and the line.
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
                // A host that falls silent is noticed in the middle of a copy, too. Once the job runs, both sides
                // detect it earlier, and report it.
                &format!("ServerAliveInterval={alive_interval}"),
                &format!("ServerAliveCountMax={alive_count}"),
                // One that serves others, too, would be left behind. One that is there is used.
                "ControlMaster=no",
                // As scp does: what the user's settings add to an interactive session.
                "ClearAllForwardings=yes",
                "PermitLocalCommand=no",
                "RemoteCommand=none",
                // With a lower level, ssh does not print why a connection was closed.
                "LogLevel=INFO",
            ] {
                arguments.extend(["-o".to_owned(), option.to_owned()]);
            }
            arguments.push("--".to_owned());
        }
        arguments.extend([host.destination(), line.to_owned()]);
        arguments
    }

    /// Returns the program.
    pub(crate) fn program(&self) -> &str {
        &self.program
    }

    fn is_openssh(&self) -> bool {
        Path::new(&self.program).file_name().is_some_and(|name| name == "ssh")
    }
}

/// Explains why a session failed or ended: the last lines of ssh's stderr, and a remedy where one is known.
///
/// Returns `None` if the stderr is empty.
#[must_use]
pub fn reason(stderr: &str, host: &HostSpec) -> Option<String> {
    let mut lines: Vec<&str> = stderr.lines().map(str::trim).filter(|it| !it.is_empty()).collect();
    // The last two: "No ED25519 host key is known …" and "Host key verification failed."
    lines.drain(..lines.len().saturating_sub(2));
    if lines.is_empty() {
        return None;
    }
    // A line of its own is a sentence of its own.
    let parts: Vec<&str> = lines.iter().map(|line| line.trim_end_matches('.')).collect();
    let message = parts.join("; ");
    let hint = HINTS.iter().find(|(sign, _)| message.contains(sign)).map(|(_, hint)| *hint);
    Some(match hint {
        Some(hint) => format!("{message}: {}", hint.replace("HOST", &host.destination())),
        None => message,
    })
}

/// Returns `true` if the server closed the connection before the key exchange, so that another attempt may succeed: an
/// sshd with too many logins under way (`MaxStartups`) drops others, and with a jump host all connections of a job go
/// to the same sshd.
#[must_use]
pub fn is_early_close(stderr: &str) -> bool {
    let early = ["kex_exchange_identification", "ssh_exchange_identification", "banner exchange:"];
    stderr.lines().any(|line| early.iter().any(|it| line.contains(it)))
}

const HINTS: [(&str, &str); 5] = [
    ("has changed", "if that is right, remove its old key with `ssh-keygen -R HOST`"),
    ("Host key verification failed", "connect once by hand, `ssh HOST`, and accept its key"),
    ("Permission denied", "set up a key or an ssh agent: brigade cannot ask for a password"),
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
    fn malformed_commands() {
        let error = |text| SshClient::new(Some(text), None).unwrap_err().to_string();
        assert_eq!(error(""), "--ssh-command ``: expected a program, as in `ssh -F file`");
        assert_eq!(error("ssh -F 'a"), "--ssh-command `ssh -F 'a`: its quotes do not match");
    }

    #[test]
    fn connections_that_may_be_tried_again() {
        let away = "kex_exchange_identification: Connection closed by remote host\r\n\
                    Connection closed by UNKNOWN port 65535\r\n";
        assert!(is_early_close(away));
        assert!(!is_early_close("root@node2: Permission denied (publickey).\n"));
        assert!(!is_early_close("Connection to node2 closed by remote host.\n"));
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
                    "root@node7: Permission denied (publickey): set up a key or an ssh agent: brigade \
                     cannot ask for a password",
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
