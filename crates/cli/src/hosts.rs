//! The flags of `brigade launch` for several hosts with one command.

use std::ffi::OsString;
use std::path::PathBuf;

use brigade_launch::hosts::{EnvRequest, HostSpec, HostsOptions};
use brigade_launch::{LaunchError, NodeRange, hosts::HostsError};
use clap::Args;

/// Hosts and how they are reached.
#[derive(Debug, Args)]
#[command(next_help_heading = "Several hosts, over ssh")]
pub(crate) struct HostsArgs {
    /// Hosts, each with its number of ranks (else --nproc): node1:4,user@node2:4
    #[arg(long, value_name = "HOST[:N],...", conflicts_with = "hostfile")]
    hosts: Option<String>,

    /// A file of hosts, as DeepSpeed and MPI have them: `node1 slots=4`, one on each line
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,

    /// Pass a variable of this environment on, or set one: NAME, NAME=VALUE or PREFIX_*; NCCL_*,
    /// OMP_*, TORCH_*, PYTHON* and their kin are passed anyway
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<OsString>,

    /// The folder in which the ranks run, on every host [default: the current one]
    #[arg(long, value_name = "FOLDER")]
    workdir: Option<PathBuf>,

    /// Copy the program, its libraries and brigade to hosts where they are missing or differ
    #[arg(long)]
    sync: bool,

    /// Another client of ssh, or options for it, as in 'ssh -p 2222' [env: BRIGADE_SSH]
    #[arg(long, value_name = "COMMAND")]
    ssh_command: Option<String>,
}

impl HostsArgs {
    /// What was asked for; `None` when no hosts were named.
    pub(crate) fn options(
        &self,
        has_nproc: bool,
        nodes: NodeRange,
    ) -> anyhow::Result<Option<HostsOptions>> {
        let hosts = match (&self.hosts, &self.hostfile) {
            (Some(list), _) => HostSpec::parse_list(list),
            (None, Some(file)) => HostSpec::read_file(file),
            (None, None) => return Ok(None),
        };
        let hosts = hosts.map_err(|error| LaunchError::from(HostsError::from(error)))?;
        if let Some(host) = hosts.iter().find(|host| host.slots.is_none() && !has_nproc) {
            let host = host.to_string();
            return Err(LaunchError::from(HostsError::NoSlots { host }).into());
        }
        if nodes != NodeRange::default() && nodes.max != hosts.len() {
            let (nodes, named) = (nodes.to_string(), hosts.len());
            return Err(LaunchError::from(HostsError::OtherNumber { nodes, named }).into());
        }
        let env = self.env.iter().map(|text| {
            EnvRequest::parse(text).map_err(|expected| {
                let text = text.to_string_lossy().into_owned();
                LaunchError::from(HostsError::EnvRequest { text, expected })
            })
        });
        Ok(Some(HostsOptions {
            hosts,
            ssh_command: self.ssh_command.clone(),
            workdir: self.workdir.clone(),
            env: env.collect::<Result<_, _>>()?,
            min_hosts: (nodes != NodeRange::default()).then_some(nodes.min),
            sync: self.sync,
            ..HostsOptions::default()
        }))
    }
}
