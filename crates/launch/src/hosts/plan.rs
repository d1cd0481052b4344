//! Launch plan of a job on several hosts: everything that is decided before any of them is connected to.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use brigade_rendezvous::TimeLimits;
use brigade_ssh::remote_command::AGENT;
use brigade_ssh::{
    ForwardedVariables, HostAccess, HostSpec, LocalFacts, VariableFile, forwarded_variables,
};

use super::{HostsError, HostsOptions};
use crate::{LaunchOptions, NprocSpec};

/// Launch plan of a job on several hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostsPlan {
    /// Hosts of the job, in the order of their ranks.
    pub hosts: Vec<PlannedHost>,
    /// Working folder of the ranks, on every host.
    pub workdir: PathBuf,
    /// Environment variables that the hosts get from this environment and from DeepSpeed's files.
    pub variables: Vec<(OsString, OsString)>,
    /// DeepSpeed's files that have set any of the variables.
    pub variable_files: Vec<VariableFile>,
    /// Name or address under which the others reach the first host, if the user has set it.
    pub master_addr: Option<String>,
    /// Minimum number of hosts: the job continues while it has this many hosts left.
    pub min_hosts: usize,
    /// `true` if programs and libraries are copied to hosts where they are missing.
    pub sync: bool,
    pub(crate) access: HostAccess,
    pub(crate) connect_timeout: Duration,
    pub(crate) limits: TimeLimits,
}

/// Plan of one host in a job on several hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedHost {
    /// Host as given in the list of hosts.
    pub spec: HostSpec,
    /// Number of ranks that the host starts.
    pub nproc: NprocSpec,
    /// Rank in the job of the host's first rank, if the hosts before it have fixed numbers of ranks.
    pub first_rank: Option<usize>,
    /// `true` if the host is this machine, which needs no ssh.
    pub is_here: bool,
}

impl HostsPlan {
    /// Makes the plan. A pure function: the same options and facts give the same plan.
    ///
    /// ```
    /// use brigade_launch::LaunchOptions;
    /// use brigade_launch::hosts::{HostsOptions, HostsPlan};
    /// use brigade_ssh::{HostSpec, LocalFacts};
    ///
    /// let hosts = HostsOptions {
    ///     hosts: HostSpec::parse_list("node1:4,node2:2")?,
    ///     ..HostsOptions::default()
    /// };
    /// let facts = LocalFacts { working_folder: "/work".into(), ..LocalFacts::default() };
    /// let plan = HostsPlan::resolve(&LaunchOptions::default(), &hosts, &facts)?;
    /// assert_eq!(plan.hosts[1].first_rank, Some(4));
    /// assert_eq!(plan.command(&plan.hosts[1])[0], "ssh");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The list of hosts is empty, the working folder or the command for ssh is not valid, or a requested variable is
    /// not set.
    pub fn resolve(
        options: &LaunchOptions,
        hosts: &HostsOptions,
        facts: &LocalFacts,
    ) -> Result<Self, HostsError> {
        if hosts.hosts.is_empty() {
            return Err(HostsError::NoHost);
        }
        let limits = TimeLimits::new(options.heartbeat_timeout, options.shutdown_timeout);
        let (client, connect_timeout) = (hosts.ssh_command.as_deref(), hosts.connect_timeout);
        let access = HostAccess::resolve(client, connect_timeout, limits, facts)?;
        let workdir = facts.workdir(hosts.workdir.clone())?;
        let ForwardedVariables { variables, files } = forwarded_variables(&hosts.env, facts)?;
        let mut next = Some(0_usize);
        let planned = hosts.hosts.iter().map(|spec| {
            let nproc = spec.slots.map_or(options.nproc, NprocSpec::Count);
            let first_rank = next;
            next = match nproc {
                NprocSpec::Count(count) => next.and_then(|it| it.checked_add(count)),
                _ => None,
            };
            let is_here = access.local.is(spec);
            PlannedHost { spec: spec.clone(), nproc, first_rank, is_here }
        });
        let all = hosts.hosts.len();
        Ok(Self {
            hosts: planned.collect(),
            workdir,
            variables,
            variable_files: files,
            master_addr: hosts.master_addr.clone(),
            min_hosts: hosts.min_hosts.unwrap_or(all).clamp(1, all),
            sync: hosts.sync,
            access,
            connect_timeout,
            limits,
        })
    }

    /// Returns the words of the command that connects to a host. For this machine, those of the agent itself.
    #[must_use]
    pub fn command(&self, host: &PlannedHost) -> Vec<String> {
        self.access.words(&host.spec, AGENT)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use brigade_ssh::{LocalHost, remote_command};

    use super::*;

    fn plan(list: &str, options: HostsOptions) -> Result<HostsPlan, String> {
        let hosts = HostsOptions { hosts: HostSpec::parse_list(list).unwrap(), ..options };
        let facts = LocalFacts {
            host: LocalHost { name: "node1".to_owned(), ..LocalHost::default() },
            working_folder: "/work".into(),
            variables: vec![
                ("NCCL_DEBUG".into(), "INFO".into()),
                ("BRIGADE_SSH".into(), "ssh -p 2222".into()),
                ("HOME".into(), "/root".into()),
            ],
            brigade: "/opt/brigade".into(),
            ..LocalFacts::default()
        };
        let launch = LaunchOptions { nproc: 3.into(), ..LaunchOptions::default() };
        HostsPlan::resolve(&launch, &hosts, &facts).map_err(|error| error.to_string())
    }

    #[test]
    fn hosts_and_their_ranks() {
        let made = plan("node1,ada@node2:4,node3", HostsOptions::default()).unwrap();
        let rows: Vec<_> = made
            .hosts
            .iter()
            .map(|host| (host.spec.to_string(), host.nproc, host.first_rank, host.is_here))
            .collect();
        let count = NprocSpec::Count;
        let expected = [
            ("node1".to_owned(), count(3), Some(0), true),
            ("ada@node2".to_owned(), count(4), Some(3), false),
            ("node3".to_owned(), count(3), Some(7), false),
        ];
        assert_eq!(rows, expected);
        assert_eq!((made.workdir.as_path(), made.min_hosts), (Path::new("/work"), 3));
        assert_eq!(made.variables.len(), 1, "{:?}", made.variables);
        assert_eq!(made.command(&made.hosts[0]), ["/opt/brigade", "__agent"]);
        let words = made.command(&made.hosts[1]);
        assert_eq!(words[..4], ["ssh", "-p", "2222", "-T"]);
        assert_eq!(words[words.len() - 2], "ada@node2");
        assert_eq!(words[words.len() - 1], remote_command::start("/opt/brigade".as_ref(), AGENT));
    }

    #[test]
    fn fewer_hosts() {
        let of = |min| {
            let options = HostsOptions { min_hosts: min, ..HostsOptions::default() };
            plan("a,b,c", options).unwrap().min_hosts
        };
        assert_eq!([of(None), of(Some(0)), of(Some(2)), of(Some(9))], [3, 1, 2, 3]);
    }

    #[test]
    fn what_cannot_be() {
        let options = HostsOptions { workdir: Some("here".into()), ..HostsOptions::default() };
        let error = plan("a", options).unwrap_err();
        assert!(error.starts_with("the working folder here is not an absolute path"), "{error}");
        let options = HostsOptions { ssh_command: Some(" ".to_owned()), ..HostsOptions::default() };
        assert!(plan("a", options).unwrap_err().starts_with("--ssh-command ` `: expected"));
        let none = HostsPlan::resolve(
            &LaunchOptions::default(),
            &HostsOptions::default(),
            &LocalFacts::default(),
        );
        assert_eq!(none.unwrap_err().to_string(), "the list of hosts is empty");
    }
}
