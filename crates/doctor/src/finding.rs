//! What a check says: one line of the table.

use serde::{Deserialize, Serialize};

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Nothing wrong.
    Ok,
    /// Worth knowing.
    Note,
    /// A job may start, but be slow, or stop later.
    Warning,
    /// A job would not start, or would compute something else than it should.
    Fail,
}

impl Verdict {
    /// As the table writes it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Fail => "FAIL",
        }
    }
}

/// What a check looks at, in the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// Whether a host can be reached and examined.
    Ssh,
    /// Our own program on each host.
    Brigade,
    /// Clocks.
    Clock,
    /// Names of hosts.
    Names,
    /// Network interfaces, and those that Gloo and NCCL would take.
    Interfaces,
    /// Network cards, and which of them is near which GPU.
    Nics,
    /// Ports between hosts.
    Ports,
    /// Sizes of packets.
    Mtu,
    /// Round-trip times and bandwidths.
    Speed,
    /// The folder that the job starts in.
    Folder,
    /// The job's program.
    Program,
    /// libtorch.
    Libtorch,
    /// GPUs and their driver.
    Devices,
    /// Processors.
    Cpu,
    /// Memory.
    Memory,
    /// Room on disks.
    Disk,
    /// `/dev/shm`.
    SharedMemory,
    /// Limits of a process.
    Limits,
    /// Variables of the environment.
    Variables,
    /// The kernel.
    Kernel,
}

impl Subject {
    /// As the table writes it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ssh => "ssh",
            Self::Brigade => "brigade",
            Self::Clock => "clock",
            Self::Names => "names",
            Self::Interfaces => "interfaces",
            Self::Nics => "network cards",
            Self::Ports => "ports",
            Self::Mtu => "mtu",
            Self::Speed => "speed",
            Self::Folder => "folder",
            Self::Program => "program",
            Self::Libtorch => "libtorch",
            Self::Devices => "devices",
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::SharedMemory => "/dev/shm",
            Self::Limits => "limits",
            Self::Variables => "variables",
            Self::Kernel => "kernel",
        }
    }
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// How bad it is.
    pub verdict: Verdict,
    /// What was looked at.
    pub subject: Subject,
    /// On which hosts it is so; empty for all of them together.
    pub hosts: Vec<String>,
    /// For something between two hosts: the host at the other end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub towards: Option<String>,
    /// What was found.
    pub found: String,
    /// What that does to a job.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub means: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remedy: String,
    /// A command that does it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub command: String,
}

impl Finding {
    pub(crate) fn new(verdict: Verdict, subject: Subject, found: impl Into<String>) -> Self {
        Self {
            verdict,
            subject,
            hosts: Vec::new(),
            towards: None,
            found: found.into(),
            means: String::new(),
            remedy: String::new(),
            command: String::new(),
        }
    }

    pub(crate) fn ok(subject: Subject, found: impl Into<String>) -> Self {
        Self::new(Verdict::Ok, subject, found)
    }

    pub(crate) fn note(subject: Subject, found: impl Into<String>) -> Self {
        Self::new(Verdict::Note, subject, found)
    }

    pub(crate) fn warning(subject: Subject, found: impl Into<String>) -> Self {
        Self::new(Verdict::Warning, subject, found)
    }

    pub(crate) fn fail(subject: Subject, found: impl Into<String>) -> Self {
        Self::new(Verdict::Fail, subject, found)
    }

    pub(crate) fn on(mut self, host: &str) -> Self {
        self.hosts.push(host.to_owned());
        self
    }

    pub(crate) fn towards(mut self, host: &str) -> Self {
        self.towards = Some(host.to_owned());
        self
    }

    pub(crate) fn means(mut self, means: impl Into<String>) -> Self {
        self.means = means.into();
        self
    }

    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = remedy.into();
        self
    }

    pub(crate) fn command(mut self, command: impl Into<String>) -> Self {
        self.command = command.into();
        self
    }

    fn says_the_same_as(&self, other: &Self) -> bool {
        let text =
            |it: &Self| (it.found.clone(), it.means.clone(), it.remedy.clone(), it.command.clone());
        let place = |it: &Self| (it.verdict, it.subject, it.towards.clone());
        place(self) == place(other) && text(self) == text(other)
    }
}

/// The worst first; what several hosts share becomes one line, and that of all hosts names none.
#[must_use]
pub(crate) fn in_order(findings: Vec<Finding>, all_hosts: usize) -> Vec<Finding> {
    let mut merged: Vec<Finding> = Vec::new();
    for finding in findings {
        match merged.iter_mut().find(|it| it.says_the_same_as(&finding)) {
            Some(same) => {
                for host in finding.hosts {
                    if !same.hosts.contains(&host) {
                        same.hosts.push(host);
                    }
                }
            }
            None => merged.push(finding),
        }
    }
    for finding in &mut merged {
        if all_hosts > 1 && finding.hosts.len() == all_hosts && finding.towards.is_none() {
            finding.hosts.clear();
        }
    }
    merged.sort_by_key(|it| (std::cmp::Reverse(it.verdict), it.subject));
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hosts_share_is_one_line() {
        let findings = vec![
            Finding::ok(Subject::Clock, "fine"),
            Finding::warning(Subject::Disk, "nearly full").on("node1"),
            Finding::fail(Subject::Libtorch, "none").on("node1"),
            Finding::warning(Subject::Disk, "nearly full").on("node2"),
            Finding::fail(Subject::Ports, "closed").on("node1").towards("node2"),
            Finding::fail(Subject::Libtorch, "none").on("node2"),
            Finding::fail(Subject::Libtorch, "none").on("node3"),
        ];
        let lines: Vec<(Verdict, Subject, usize)> = in_order(findings, 3)
            .into_iter()
            .map(|finding| (finding.verdict, finding.subject, finding.hosts.len()))
            .collect();
        assert_eq!(
            lines,
            [
                (Verdict::Fail, Subject::Ports, 1),
                (Verdict::Fail, Subject::Libtorch, 0),
                (Verdict::Warning, Subject::Disk, 2),
                (Verdict::Ok, Subject::Clock, 0),
            ]
        );
    }
}
