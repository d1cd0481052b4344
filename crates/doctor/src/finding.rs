//! Findings of checks: the lines of the report's table.

use serde::{Deserialize, Serialize};

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// No problem was found.
    Ok,
    /// Information that is worth knowing.
    Note,
    /// A job may start, but may be slow, or stop later.
    Warning,
    /// A job would not start, or would compute a wrong result.
    Fail,
}

impl Verdict {
    /// Returns the word that the table shows.
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

/// Subject of a check, in the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// Connection to a host over ssh.
    Ssh,
    /// Brigade program on each host.
    Brigade,
    /// Clocks of the hosts.
    Clock,
    /// Resolution of host names.
    Names,
    /// Network interfaces, and those that Gloo and NCCL would choose.
    Interfaces,
    /// Network cards, and the nearest one of each GPU.
    Nics,
    /// Ports between hosts.
    Ports,
    /// Maximum packet sizes (MTU).
    Mtu,
    /// Round-trip times and bandwidths.
    Speed,
    /// Working folder of the job.
    Folder,
    /// Program of the job.
    Program,
    /// Installation of libtorch.
    Libtorch,
    /// GPUs and their driver.
    Devices,
    /// Processors and their load.
    Cpu,
    /// Memory of the hosts.
    Memory,
    /// Free space on disks.
    Disk,
    /// Shared memory in `/dev/shm`.
    SharedMemory,
    /// Limits of a process.
    Limits,
    /// Environment variables of libraries.
    Variables,
    /// Version of the kernel.
    Kernel,
}

impl Subject {
    /// Returns the word that the table shows.
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

/// Finding of a check: one line of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Severity of the finding.
    pub verdict: Verdict,
    /// Subject of the check.
    pub subject: Subject,
    /// Names of the hosts concerned. Empty if all are.
    pub hosts: Vec<String>,
    /// Host at the other end, for a finding about a route.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub towards: Option<String>,
    /// Description of what was found.
    pub found: String,
    /// Consequence for a job.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub means: String,
    /// Remedy for the user.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remedy: String,
    /// Command that carries out the remedy.
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

/// Sorts the findings, the worst first. Equal findings of several hosts are merged into one, and one of all hosts has
/// no host names.
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
