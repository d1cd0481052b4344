//! Network adapters, and their distances from a device.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::pci::{Distance, Place};
use super::{Device, entries, numbered, read};

/// A network adapter, or a port of one that is a PCI device of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nic {
    /// Name of the RDMA device, such as `mlx5_0`. `None` for an adapter without RDMA.
    pub rdma: Option<String>,
    /// Network interfaces of the adapter.
    pub interfaces: Vec<String>,
    /// `true` if a port is active. For an adapter without RDMA: if an interface is up.
    pub is_up: bool,
    /// PCI and NUMA location of the adapter.
    pub place: Place,
}

/// A network adapter, with its distance from one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NearNic {
    /// Name of the RDMA device. `None` for an adapter without RDMA.
    pub rdma: Option<String>,
    /// Network interfaces of the adapter.
    pub interfaces: Vec<String>,
    /// `true` if the adapter can carry data.
    pub is_up: bool,
    /// Distance between the adapter and the device on the PCI bus.
    pub distance: Distance,
}

impl NearNic {
    /// Returns the name by which NCCL's settings select the adapter: the RDMA device or the first interface, or `?`
    /// without either.
    #[must_use]
    pub fn name(&self) -> &str {
        self.rdma.as_deref().or_else(|| self.interfaces.first().map(String::as_str)).unwrap_or("?")
    }

    /// Returns `true` if `name` is the adapter's RDMA device or one of its interfaces.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        self.rdma.as_deref() == Some(name) || self.interfaces.iter().any(|it| it == name)
    }
}

/// Returns the network adapters of the host whose file system begins at `root`. Virtual interfaces (bridges, tunnels,
/// bonds) are left out.
#[must_use]
pub fn nics(root: &Path) -> Vec<Nic> {
    let mut found: Vec<Nic> = Vec::new();
    let (rdma, net) = (root.join("sys/class/infiniband"), root.join("sys/class/net"));
    for name in entries(&rdma) {
        let folder = rdma.join(&name);
        let Some(place) = Place::of_folder(root, &folder.join("device")) else { continue };
        let is_active = |(_, port): (usize, std::path::PathBuf)| {
            read(&port.join("state")).is_some_and(|state| state.contains("ACTIVE"))
        };
        let is_up = numbered(&folder.join("ports"), "").into_iter().any(is_active);
        found.push(Nic { rdma: Some(name), interfaces: Vec::new(), is_up, place });
    }
    for name in entries(&net) {
        let folder = net.join(&name);
        let Some(place) = Place::of_folder(root, &folder.join("device")) else { continue };
        let is_up = read(&folder.join("operstate")).is_some_and(|state| state == "up");
        match found.iter_mut().find(|nic| nic.place == place) {
            // The port decides for an RDMA adapter: the interface on it may be unused.
            Some(nic) => {
                nic.interfaces.push(name);
                nic.is_up |= is_up && nic.rdma.is_none();
            }
            None => found.push(Nic { rdma: None, interfaces: vec![name], is_up, place }),
        }
    }
    found
}

/// Returns all network adapters with their distances from a device, the nearest first. Empty if the device's location
/// is unknown.
#[must_use]
pub fn of_device(root: &Path, device: &Device, nics: &[Nic]) -> Vec<NearNic> {
    let place = device.pci.as_deref().and_then(|address| Place::of_address(root, address));
    let Some(place) = place else { return Vec::new() };
    let near = |nic: &Nic| NearNic {
        rdma: nic.rdma.clone(),
        interfaces: nic.interfaces.clone(),
        is_up: nic.is_up,
        distance: nic.place.distance(&place),
    };
    let mut all: Vec<NearNic> = nics.iter().map(near).collect();
    all.sort_by_key(|nic| nic.distance);
    all
}

/// Returns the adapters that NCCL would prefer for the device: of those that are up, the ones with RDMA if any have it,
/// and of these the nearest.
#[must_use]
pub fn nearest(nics: &[NearNic]) -> Vec<&NearNic> {
    let up = || nics.iter().filter(|nic| nic.is_up);
    let with_rdma = up().any(|nic| nic.rdma.is_some());
    let usable = || up().filter(|nic| nic.rdma.is_some() || !with_rdma);
    let least = usable().map(|nic| nic.distance).min();
    usable().filter(|nic| Some(nic.distance) == least).collect()
}
