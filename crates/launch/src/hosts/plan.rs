//! Which hosts a job is started on, and how: everything that is decided before any of them is asked.

use std::ffi::OsString;
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use brigade_rendezvous::TimeLimits;

use super::environment::{self, Chosen, VariableFile};
use super::here::Here;
use super::hostfile::HostSpec;
use super::remote_line;
use super::session::Way;
use super::ssh::{SSH_VARIABLE, SessionTimes, SshClient};
use super::{HostsError, HostsOptions};
use crate::{LaunchOptions, NprocSpec};

/// What the plan must know about this machine, gathered once.
#[derive(Clone, Debug, Default)]
pub struct HostsFacts {
    /// Its name.
    pub name: String,
    /// Its addresses, the loopback's included.
    pub addresses: Vec<IpAddr>,
    /// The folder in which this process works, as the user names it.
    pub working_folder: PathBuf,
    /// This process's environment.
    pub variables: Vec<(OsString, OsString)>,
    /// DeepSpeed's files of variables, with their contents.
    pub deepspeed_files: Vec<(PathBuf, String)>,
    /// This executable.
    pub brigade: PathBuf,
}

impl HostsFacts {
    /// Looks at this machine and this process.
    ///
    /// # Errors
    /// The system does not name the working folder or this executable.
    pub fn gather() -> Result<Self, HostsError> {
        let Here { name, addresses } = Here::look();
        let files = environment::deepspeed_files().into_iter();
        Ok(Self {
            name,
            addresses,
            working_folder: working_folder()
                .map_err(HostsError::system("find the working folder"))?,
            variables: std::env::vars_os().collect(),
            deepspeed_files: files
                .filter_map(|path| Some((path.clone(), fs::read_to_string(&path).ok()?)))
                .collect(),
            brigade: std::env::current_exe().map_err(HostsError::system("find this executable"))?,
        })
    }
}

/// A job on several hosts, decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostsPlan {
    /// The hosts, in the order of their ranks.
    pub hosts: Vec<PlannedHost>,
    /// The folder in which the ranks run, on every host.
    pub workdir: PathBuf,
    /// What the hosts get of this environment and of DeepSpeed's files.
    pub variables: Vec<(OsString, OsString)>,
    /// Those files of DeepSpeed's.
    pub variable_files: Vec<VariableFile>,
    /// Name or address under which the others reach the first host, where the user has said so.
    pub master_addr: Option<String>,
    /// The job goes on while it has so many hosts left.
    pub min_hosts: usize,
    /// Programs and libraries are copied where they are missing.
    pub sync: bool,
    pub(crate) here: Here,
    pub(crate) client: SshClient,
    pub(crate) connect_timeout: Duration,
    pub(crate) limits: TimeLimits,
    pub(crate) brigade: PathBuf,
}

/// One host of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedHost {
    /// As the list of hosts has it.
    pub spec: HostSpec,
    /// How many ranks it starts.
    pub nproc: NprocSpec,
    /// Number of its first rank, where the hosts before it have fixed numbers of ranks.
    pub first_rank: Option<usize>,
    /// It is this machine, and needs no ssh.
    pub is_here: bool,
}

impl HostsPlan {
    /// Decides. Pure: the same options and facts give the same plan.
    ///
    /// ```
    /// use brigade_launch::LaunchOptions;
    /// use brigade_launch::hosts::{HostSpec, HostsFacts, HostsOptions, HostsPlan};
    ///
    /// let hosts = HostsOptions {
    ///     hosts: HostSpec::parse_list("node1:4,node2:2")?,
    ///     ..HostsOptions::default()
    /// };
    /// let facts = HostsFacts { working_folder: "/work".into(), ..HostsFacts::default() };
    /// let plan = HostsPlan::resolve(&LaunchOptions::default(), &hosts, &facts)?;
    /// assert_eq!(plan.hosts[1].first_rank, Some(4));
    /// assert_eq!(plan.command(&plan.hosts[1])[0], "ssh");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// There is no host, no working folder to give, no command for ssh, or no such variable.
    pub fn resolve(
        options: &LaunchOptions,
        hosts: &HostsOptions,
        facts: &HostsFacts,
    ) -> Result<Self, HostsError> {
        if hosts.hosts.is_empty() {
            return Err(HostsError::NoHost);
        }
        let variable = facts.variables.iter().find(|it| it.0 == SSH_VARIABLE);
        let client =
            SshClient::new(hosts.ssh_command.as_deref(), variable.map(|it| it.1.as_os_str()))?;
        let workdir = hosts.workdir.clone().unwrap_or_else(|| facts.working_folder.clone());
        // On another host it would be relative to the home folder there.
        if !workdir.is_absolute() {
            return Err(HostsError::Workdir { path: workdir });
        }
        let Chosen { variables, files } =
            environment::choose(&hosts.env, &facts.variables, &facts.deepspeed_files)?;
        let here = Here { name: facts.name.clone(), addresses: facts.addresses.clone() };
        let mut next = Some(0_usize);
        let planned = hosts.hosts.iter().map(|spec| {
            let nproc = spec.slots.map_or(options.nproc, NprocSpec::Count);
            let first_rank = next;
            next = match nproc {
                NprocSpec::Count(count) => next.and_then(|it| it.checked_add(count)),
                _ => None,
            };
            let is_here = here.way_to(spec) == Way::Here;
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
            here,
            client,
            connect_timeout: hosts.connect_timeout,
            limits: TimeLimits::new(options.heartbeat_timeout, options.shutdown_timeout),
            brigade: facts.brigade.clone(),
        })
    }

    /// How long ssh waits.
    pub(crate) fn session_times(&self) -> SessionTimes {
        let (alive_interval, alive_count) = self.limits.ssh_keepalive();
        SessionTimes { connect: self.connect_timeout, alive_interval, alive_count }
    }

    /// The command by which a host is reached, in words; the agent itself, where it is this machine.
    #[must_use]
    pub fn command(&self, host: &PlannedHost) -> Vec<String> {
        if host.is_here {
            return vec![self.brigade.display().to_string(), super::ROLE.to_owned()];
        }
        let line = remote_line::start(&self.brigade);
        let mut words = vec![self.client.program().to_owned()];
        words.extend(self.client.arguments(&host.spec, self.session_times(), &line));
        words
    }
}

/// As a shell says it, links included: on another host the link may be the only name.
fn working_folder() -> std::io::Result<PathBuf> {
    let real = std::env::current_dir()?;
    let said = std::env::var_os("PWD").map(PathBuf::from).filter(|it| it.is_absolute());
    let same = |it: &PathBuf| it.canonicalize().is_ok_and(|it| it == real);
    Ok(said.filter(same).unwrap_or(real))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn plan(list: &str, options: HostsOptions) -> Result<HostsPlan, String> {
        let hosts = HostsOptions { hosts: HostSpec::parse_list(list).unwrap(), ..options };
        let facts = HostsFacts {
            name: "node1".to_owned(),
            working_folder: "/work".into(),
            variables: vec![
                ("NCCL_DEBUG".into(), "INFO".into()),
                ("BRIGADE_SSH".into(), "ssh -p 2222".into()),
                ("HOME".into(), "/root".into()),
            ],
            brigade: "/opt/brigade".into(),
            ..HostsFacts::default()
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
            .map(|it| (it.spec.to_string(), it.nproc, it.first_rank, it.is_here))
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
        assert_eq!(words[words.len() - 1], remote_line::start("/opt/brigade".as_ref()));
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
        assert!(error.starts_with("the working folder here is no absolute path"), "{error}");
        let options = HostsOptions { ssh_command: Some(" ".to_owned()), ..HostsOptions::default() };
        assert!(plan("a", options).unwrap_err().starts_with("--ssh-command ` `: expected"));
        let none = HostsPlan::resolve(
            &LaunchOptions::default(),
            &HostsOptions::default(),
            &HostsFacts::default(),
        );
        assert_eq!(none.unwrap_err().to_string(), "the list of hosts is empty");
    }
}
