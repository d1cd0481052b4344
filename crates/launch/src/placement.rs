//! Placement: the processors and accelerators of each rank of this host.

mod affinity;
mod cpus;
mod devices;
mod nproc;
mod topology;
mod tpu;

use std::path::Path;

use serde::{Deserialize, Serialize};

pub use affinity::{BindError, BindMode};
pub use cpus::CpuSet;
pub(crate) use devices::environment;
pub use devices::{Device, DeviceError, DeviceList, Devices, Mask};
pub use nproc::NprocSpec;
pub use topology::{Cpu, Topology};
pub(crate) use tpu::TPU_VARIABLES;

use crate::LaunchError;
use tpu::Chips;

/// Options of placement. By default no rank is bound to processors, and every rank sees all devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementOptions {
    /// Devices that the ranks see. Defaults to those that the environment selects.
    pub devices: Option<DeviceList>,
    /// Binding of the ranks to processors.
    pub bind: BindMode,
    /// `true` if each rank sees one device only, as its number 0, and has the local rank 0.
    pub virtual_local_rank: bool,
    /// `true` if the ranks use no devices.
    pub on_cpu: bool,
}

/// Facts about this host on which the placement depends, as far as the options need them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlacementFacts {
    /// Processors that this process may use. Empty if no rank is to be bound.
    pub topology: Topology,
    /// Accelerators of this host. Empty if no option needs them.
    pub devices: Devices,
}

/// Placement of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankSetup {
    /// Processors that the rank may use. `None` means those of the launcher.
    pub cpus: Option<CpuSet>,
    /// Environment variables of this rank, besides those of all ranks.
    pub env: Vec<(&'static str, String)>,
}

impl PlacementFacts {
    /// Gathers the facts about this host that the options or `nproc` need. Reads nothing if they need none.
    #[must_use]
    pub fn gather(options: &PlacementOptions, nproc: NprocSpec) -> Self {
        let root = Path::new("/");
        let bound = options.bind != BindMode::None;
        let given_out = !options.on_cpu
            && brigade_hardware::may_have_devices_for_one_process(&brigade_hardware::host_root());
        let counted = matches!(nproc, NprocSpec::Auto | NprocSpec::Gpu);
        let mut facts = Self::default();
        if bound {
            facts.topology = Topology::read(root, &CpuSet::allowed(root));
        }
        if bound || counted || given_out || options.devices.is_some() || options.virtual_local_rank
        {
            facts.devices = Devices::of_this_host();
        }
        facts
    }
}

/// Returns every rank's processors and devices. Pure.
///
/// `is_alone` is `true` for a job on one host. `is_free` tells which environment variables the user has not set.
///
/// `threads` is set for ranks that are bound: `OMP_NUM_THREADS` of each, unless the user has a number. A set of
/// processors that several ranks share is divided evenly among them; `quota` is the limit that a control group sets per
/// rank, if that is less.
pub(crate) fn place(
    options: &PlacementOptions,
    facts: &PlacementFacts,
    nproc: usize,
    is_alone: bool,
    is_free: impl Fn(&str) -> bool,
) -> Result<Vec<RankSetup>, LaunchError> {
    let chosen = facts.devices.choose(options.devices.as_ref())?;
    let (kind, devices) = (facts.devices.kind, chosen.len());
    let is_one_each = kind.is_for_one_process() && !options.on_cpu && devices > 0;
    if devices > 0 && devices < nproc {
        let (ranks, word) = (nproc, kind.device_word());
        if options.virtual_local_rank {
            return Err(DeviceError::TooFew { ranks, devices, word }.into());
        }
        if is_one_each {
            return Err(DeviceError::ForOneProcess { ranks, devices, word }.into());
        }
    }
    let chips = is_one_each.then(|| Chips::assign(&facts.devices, &chosen, nproc, is_alone));
    let node_of = |rank: usize| chosen.get(rank).and_then(|device| device.numa_node);
    let nodes: Vec<_> = (0..nproc).map(node_of).collect();
    let sets = affinity::bind(options.bind, &facts.topology, &nodes)?;
    let all_ids: Vec<_> = chosen.iter().map(|device| device.id.clone()).collect();
    let setup = |rank: usize| {
        let cpus = sets.as_ref().map(|sets| sets[rank].clone());
        if let Some(chips) = &chips {
            return RankSetup { cpus, env: chips.variables(rank, &is_free) };
        }
        let visible = if options.virtual_local_rank {
            chosen.get(rank).map(|device| device.id.clone())
        } else {
            matches!(options.devices, Some(DeviceList::Ids(_))).then(|| all_ids.join(","))
        };
        let env = visible.map(|value| (kind.visibility_variable(), value));
        RankSetup { cpus, env: env.into_iter().collect() }
    };
    Ok((0..nproc).map(setup).collect())
}

/// Returns the number of threads for each rank: the cores of its processors, divided among the ranks that share them.
/// Returns `None` if ranks are not bound.
pub(crate) fn threads(setups: &[RankSetup], topology: &Topology) -> Option<Vec<usize>> {
    let sets: Vec<_> = setups.iter().map(|setup| setup.cpus.as_ref()).collect::<Option<_>>()?;
    let share = |set: &&CpuSet| {
        let sharing = sets.iter().filter(|other| *other == set).count();
        (topology.cores_of(set) / sharing).max(1)
    };
    Some(sets.iter().map(share).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(cpus: &[(usize, usize)], devices: &[(&str, Option<usize>)]) -> PlacementFacts {
        let cpu = |(number, &(core, node)): (usize, &(usize, usize))| Cpu {
            number,
            core,
            node,
            socket: node,
            cache: node,
        };
        let devices: Vec<_> = devices
            .iter()
            .map(|(id, numa_node)| Device {
                id: (*id).to_owned(),
                numa_node: *numa_node,
                ..Device::default()
            })
            .collect();
        PlacementFacts {
            topology: Topology { cpus: cpus.iter().enumerate().map(cpu).collect() },
            devices: Devices { present: devices.clone(), visible: devices, ..Devices::default() },
        }
    }

    /// Places the ranks of a job on one host whose user has set no variable.
    fn place(
        options: &PlacementOptions,
        facts: &PlacementFacts,
        nproc: usize,
    ) -> Result<Vec<RankSetup>, LaunchError> {
        super::place(options, facts, nproc, true, |_| true)
    }

    fn visible(setups: &[RankSetup]) -> Vec<Option<&str>> {
        setups.iter().map(|setup| setup.env.first().map(|(_, value)| value.as_str())).collect()
    }

    #[test]
    fn devices_that_ranks_see() {
        let facts = facts(&[], &[("0", None), ("1", None), ("2", None)]);
        let options = PlacementOptions::default();
        let setups = place(&options, &facts, 2).unwrap();
        assert_eq!(visible(&setups), [None, None]);

        let chosen = PlacementOptions { devices: "2,0".parse().ok(), ..Default::default() };
        assert_eq!(visible(&place(&chosen, &facts, 3).unwrap()), [Some("2,0"); 3]);

        let one_each = PlacementOptions { virtual_local_rank: true, ..chosen };
        assert_eq!(visible(&place(&one_each, &facts, 2).unwrap()), [Some("2"), Some("0")]);
        assert_eq!(
            place(&one_each, &facts, 3).unwrap_err().to_string(),
            "--virtual-local-rank needs a GPU for each rank: 3 ranks need 3, but there are 2"
        );
        let on_a_cpu = PlacementFacts::default();
        let virtual_only = PlacementOptions { virtual_local_rank: true, ..Default::default() };
        assert_eq!(visible(&place(&virtual_only, &on_a_cpu, 3).unwrap()), [None; 3]);
    }

    #[test]
    fn each_rank_has_a_tpu_of_its_own() {
        let mut facts = facts(&[], &[("0", None), ("1", None)]);
        facts.devices.kind = brigade_hardware::named("Google").unwrap();
        let chip = |options: &PlacementOptions, nproc: usize| -> Vec<Option<String>> {
            let setups = place(options, &facts, nproc).unwrap();
            let of = |setup: &RankSetup| {
                Some(setup.env.iter().find(|it| it.0 == "TPU_VISIBLE_CHIPS")?.1.clone())
            };
            setups.iter().map(of).collect()
        };
        let some = |chips: &[&str]| -> Vec<Option<String>> {
            chips.iter().map(|chip| Some((*chip).to_owned())).collect()
        };
        let options = PlacementOptions::default();
        assert_eq!(chip(&options, 2), some(&["0", "1"]));
        let turned = PlacementOptions { devices: "1,0".parse().ok(), ..Default::default() };
        assert_eq!(chip(&turned, 1), some(&["1"]));
        assert_eq!(
            place(&options, &facts, 3).unwrap_err().to_string(),
            "3 ranks for 2 TPUs, and only one process can use a TPU: use --nproc 2, or --cpu for a program that uses \
             no TPU"
        );
        let on_cpu = PlacementOptions { on_cpu: true, ..Default::default() };
        assert_eq!(chip(&on_cpu, 3), [None, None, None]);
    }

    #[test]
    fn a_rank_is_bound_near_its_device() {
        let cpus = [(0, 0), (1, 0), (2, 1), (3, 1)];
        let facts = facts(&cpus, &[("0", Some(1)), ("1", Some(0))]);
        let options = PlacementOptions { bind: BindMode::Numa, ..PlacementOptions::default() };
        let sets = |options: &PlacementOptions| -> Vec<String> {
            let setups = place(options, &facts, 2).unwrap();
            setups.iter().map(|setup| setup.cpus.as_ref().unwrap().to_string()).collect()
        };
        assert_eq!(sets(&options), ["2-3", "0-1"]);
        let turned = PlacementOptions { devices: "1,0".parse().ok(), ..options };
        assert_eq!(sets(&turned), ["0-1", "2-3"]);
    }

    #[test]
    fn threads_are_the_cores_of_a_set() {
        // 2 nodes of 2 cores of 2 threads.
        let cpus: Vec<_> = (0..8).map(|cpu| (cpu % 4, cpu % 4 / 2)).collect();
        let facts = facts(&cpus, &[]);
        let count = |bind, nproc| {
            let options = PlacementOptions { bind, ..PlacementOptions::default() };
            threads(&place(&options, &facts, nproc).unwrap(), &facts.topology)
        };
        assert_eq!(count(BindMode::None, 2), None);
        assert_eq!(count(BindMode::Numa, 2), Some(vec![2, 2]));
        assert_eq!(count(BindMode::Numa, 4), Some(vec![1; 4]));
        assert_eq!(count(BindMode::Numa, 3), Some(vec![1, 1, 2]));
        assert_eq!(count(BindMode::Numa, 16), Some(vec![1; 16]));
        assert_eq!(count(BindMode::Cores, 3), Some(vec![1, 1, 2]));
    }
}
