//! Options for several hosts with one command, from the settings.

use std::ffi::OsStr;

use brigade_config::Layer;
use brigade_launch::hosts::{HostsError, HostsOptions};
use brigade_launch::{LaunchError, NodeRange};
use brigade_ssh::{EnvRequest, HostSpec, RemoteError, Selection};

/// Returns the hosts and the commands that reach them; `None` without a list of hosts.
///
/// # Errors
/// Fails if the list of hosts or the variables to pass are not valid.
pub(super) fn options(layers: &Layer) -> Result<Option<HostsOptions>, LaunchError> {
    let settings = &layers.settings;
    let hosts = match (&settings.hosts, &settings.hostfile) {
        (Some(list), _) => HostSpec::parse_list(&list.0.0.join(",")),
        (None, Some(file)) => HostSpec::read_file(file),
        (None, None) => return Ok(None),
    };
    let mut hosts = hosts.map_err(HostsError::from)?;
    // At most one of them is set.
    let include = settings.include.as_deref().map(Selection::Include);
    if let Some(selection) = include.or_else(|| settings.exclude.as_deref().map(Selection::Exclude))
    {
        hosts = selection.of(hosts).map_err(HostsError::from)?;
    }
    if settings.cpu == Some(true) {
        // Only their number counts.
        hosts.iter_mut().for_each(|host| host.devices = None);
    }
    let has_nproc = settings.nproc.is_some() || settings.devices.is_some();
    if let Some(host) = hosts.iter().find(|it| it.slots.is_none() && !has_nproc) {
        return Err(HostsError::NoSlots { host: host.to_string() }.into());
    }
    let nodes = settings.nnodes.unwrap_or_default();
    if nodes != NodeRange::default() && nodes.max != hosts.len() {
        let (nodes, named) = (nodes.to_string(), hosts.len());
        return Err(HostsError::OtherNumber { nodes, named }.into());
    }
    let names = settings.env_pass.iter().flat_map(|it| &it.0);
    let request = |text: &String| {
        EnvRequest::parse(OsStr::new(text))
            .map_err(|expected| RemoteError::EnvRequest { text: text.clone(), expected })
    };
    let default = HostsOptions::default();
    Ok(Some(HostsOptions {
        hosts,
        connect_timeout: settings.connect_timeout.unwrap_or(default.connect_timeout),
        ssh_command: settings.ssh_command.clone(),
        workdir: settings.workdir.clone(),
        master_addr: settings.master_addr.clone(),
        env: names.map(request).collect::<Result<_, _>>().map_err(HostsError::from)?,
        min_hosts: (nodes != NodeRange::default()).then_some(nodes.min),
        sync: settings.sync.unwrap_or_default(),
    }))
}
