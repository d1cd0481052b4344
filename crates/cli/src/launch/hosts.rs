//! From settings to the hosts that are started from here.

use std::path::Path;

use brigade_config::value::Value as _;
use brigade_config::{ConfigError, Layer, Source};
use brigade_launch::hosts::{EnvRequest, HostSpec, HostsError, HostsOptions};
use brigade_launch::{LaunchError, NodeRange};

/// The hosts that the settings name; `None` when they name none.
///
/// Errors when the list cannot be read, a host has no number of ranks, or other settings say that
/// there are more or fewer hosts.
pub(super) fn options(layers: &mut Layer) -> anyhow::Result<Option<HostsOptions>> {
    let settings = &layers.settings;
    let hosts = match (&settings.hosts, &settings.hostfile) {
        (Some(list), _) => HostSpec::parse_list(&list.text()),
        (None, Some(file)) => HostSpec::read_file(file),
        (None, None) => return Ok(None),
    };
    let hosts = hosts.map_err(failed)?;
    let has_nproc = settings.nproc.is_some() || settings.devices.is_some();
    if let Some(host) = hosts.iter().find(|host| host.slots.is_none() && !has_nproc) {
        return Err(failed(HostsError::NoSlots { host: host.to_string() }));
    }
    let passed = settings.env_pass.as_ref().map(|list| list.0.as_slice()).unwrap_or_default();
    let env = passed.iter().map(|text| {
        let request = EnvRequest::parse(text.as_ref());
        request.map_err(|expected| HostsError::EnvRequest { text: text.clone(), expected })
    });
    let options = HostsOptions {
        ssh_command: settings.ssh_command.clone(),
        workdir: settings.workdir.as_deref().map(Path::to_owned),
        env: env.collect::<Result<_, _>>().map_err(failed)?,
        master_addr: settings.master_addr.clone(),
        sync: settings.sync.unwrap_or_default(),
        ..HostsOptions::default()
    };
    let min_hosts = fewest(layers, hosts.len())?;
    Ok(Some(HostsOptions { hosts, min_hosts, ..options }))
}

/// With how many hosts the job goes on: the lower end of `nnodes`. A number of hosts from a layer
/// below that of the list gives way to it.
fn fewest(layers: &mut Layer, named: usize) -> anyhow::Result<Option<usize>> {
    let source = layers.source("nnodes").filter(|it| **it != Source::Default).cloned();
    let (Some(nodes), Some(source)) = (layers.settings.nnodes, source) else { return Ok(None) };
    if nodes.max == named {
        return Ok(Some(nodes.min));
    }
    let list = ["hosts", "hostfile"]
        .iter()
        .find_map(|name| layers.source(name).filter(|it| **it != Source::Default).cloned());
    let above = list.filter(|it| it.layer() > source.layer());
    let nodes: NodeRange = nodes;
    match above {
        Some(list) => {
            layers.note(source, format!("nnodes {nodes} gives way to {list}"));
            Ok(None)
        }
        None => Err(failed(HostsError::OtherNumber { nodes: nodes.to_string(), named })),
    }
}

/// A variable that `--env` names without a value: for the hosts, as it is here.
pub(super) fn pass(flags: &mut Layer, name: &str) -> Result<(), ConfigError> {
    let mut names = flags.settings.env_pass.clone().unwrap_or_default();
    names.0.push(name.to_owned());
    flags.set("env-pass", &names.text(), Source::Flag("env".to_owned()))
}

fn failed(error: impl Into<HostsError>) -> anyhow::Error {
    LaunchError::from(error.into()).into()
}
