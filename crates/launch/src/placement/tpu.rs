//! Variables by which libtpu gives each rank a chip of its own.
//!
//! The ranks of a job that has one host and all of its chips form one slice: libtpu connects their chips, for programs
//! that exchange data between chips (`torch_xla`). In all other jobs each rank is a slice of one chip.

use brigade_hardware::Device;

use super::Devices;

/// Ranks of a host, and the chips that they get.
pub(super) struct Chips<'a> {
    /// Chip of each rank.
    chosen: &'a [Device],
    /// Number of ranks of the slice in each direction; `None` where each rank is a slice of its own.
    slice: Option<&'static str>,
}

impl<'a> Chips<'a> {
    /// Assigns the first of the chosen chips to the ranks of this host. `is_alone` is `true` for a job on one host.
    pub(super) fn assign(
        devices: &Devices,
        chosen: &'a [Device],
        nproc: usize,
        is_alone: bool,
    ) -> Self {
        let chosen = &chosen[..nproc.min(chosen.len())];
        // libtpu derives a chip's place in the slice from the task's number, so the order matters.
        let is_all = is_alone && chosen == devices.present;
        let bounds = BOUNDS.iter().find(|(chips, _)| *chips == chosen.len());
        Self { chosen, slice: bounds.filter(|_| is_all).map(|it| it.1) }
    }

    /// Returns the variables of a rank. `is_free` tells which variables the user has not set: where the user has set one
    /// that describes the slice, all of them are the user's.
    pub(super) fn variables(
        &self,
        rank: usize,
        is_free: impl Fn(&str) -> bool,
    ) -> Vec<(&'static str, String)> {
        let mut variables = Vec::new();
        if is_free(PJRT_DEVICE) {
            variables.push((PJRT_DEVICE, "TPU".to_owned()));
        }
        let Some(chip) = self.chosen.get(rank).filter(|_| SLICE.iter().all(|name| is_free(name)))
        else {
            return variables;
        };
        let address = |rank: usize| format!("localhost:{}", FIRST_PORT + rank);
        let (bounds, addresses, task) = match self.slice {
            Some(bounds) => {
                let all: Vec<String> = (0..self.chosen.len()).map(address).collect();
                (bounds, all.join(","), rank)
            }
            None => ("1,1,1", address(rank), 0),
        };
        variables.extend([
            (TPU_VISIBLE_CHIPS, chip.id.clone()),
            (TPU_CHIPS_PER_PROCESS_BOUNDS, "1,1,1".to_owned()),
            (TPU_PROCESS_BOUNDS, bounds.to_owned()),
            (TPU_PROCESS_ADDRESSES, addresses),
            (TPU_PROCESS_PORT, (FIRST_PORT + rank).to_string()),
            (CLOUD_TPU_TASK_ID, task.to_string()),
        ]);
        // The older name must not contradict the newer one.
        if !is_free(TPU_VISIBLE_DEVICES) {
            variables.push((TPU_VISIBLE_DEVICES, chip.id.clone()));
        }
        variables
    }
}

/// Variables that the launcher sets, for [`HostFacts`](crate::HostFacts).
pub(crate) const TPU_VARIABLES: [&str; 7] = [
    PJRT_DEVICE,
    TPU_VISIBLE_DEVICES,
    TPU_CHIPS_PER_PROCESS_BOUNDS,
    TPU_PROCESS_BOUNDS,
    TPU_PROCESS_ADDRESSES,
    TPU_PROCESS_PORT,
    CLOUD_TPU_TASK_ID,
];
/// Variables that describe a slice, and the place of a process in it.
const SLICE: [&str; 5] = [
    TPU_CHIPS_PER_PROCESS_BOUNDS,
    TPU_PROCESS_BOUNDS,
    TPU_PROCESS_ADDRESSES,
    TPU_PROCESS_PORT,
    CLOUD_TPU_TASK_ID,
];
const PJRT_DEVICE: &str = "PJRT_DEVICE";
const TPU_VISIBLE_CHIPS: &str = "TPU_VISIBLE_CHIPS";
const TPU_VISIBLE_DEVICES: &str = "TPU_VISIBLE_DEVICES";
const TPU_CHIPS_PER_PROCESS_BOUNDS: &str = "TPU_CHIPS_PER_PROCESS_BOUNDS";
const TPU_PROCESS_BOUNDS: &str = "TPU_PROCESS_BOUNDS";
const TPU_PROCESS_ADDRESSES: &str = "TPU_PROCESS_ADDRESSES";
const TPU_PROCESS_PORT: &str = "TPU_PROCESS_PORT";
const CLOUD_TPU_TASK_ID: &str = "CLOUD_TPU_TASK_ID";
/// First of the ports on which the ranks' libtpu listens: torch_xla's.
const FIRST_PORT: usize = 8476;
/// Shape of the slice of a host, by its number of chips: of TPU v2 to v4 and v5p with four, v5e and v6e with one, four or
/// eight.
const BOUNDS: [(usize, &str); 3] = [(1, "1,1,1"), (4, "2,2,1"), (8, "2,4,1")];

#[cfg(test)]
mod tests {
    use super::*;

    fn host(chips: usize) -> Devices {
        let chip =
            |number: usize| Device { id: number.to_string(), is_usable: true, ..Device::default() };
        let present: Vec<Device> = (0..chips).map(chip).collect();
        Devices { visible: present.clone(), present, ..Devices::default() }
    }

    fn variables(chips: &Chips<'_>, rank: usize, set: &[&str]) -> Vec<String> {
        let all = chips.variables(rank, |name| !set.contains(&name));
        all.into_iter().map(|(name, value)| format!("{name}={value}")).collect()
    }

    #[test]
    fn all_chips_of_a_host_are_one_slice() {
        let host = host(4);
        let chips = Chips::assign(&host, &host.visible, 4, true);
        assert_eq!(
            variables(&chips, 2, &[]),
            [
                "PJRT_DEVICE=TPU",
                "TPU_VISIBLE_CHIPS=2",
                "TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1",
                "TPU_PROCESS_BOUNDS=2,2,1",
                "TPU_PROCESS_ADDRESSES=localhost:8476,localhost:8477,localhost:8478,localhost:8479",
                "TPU_PROCESS_PORT=8478",
                "CLOUD_TPU_TASK_ID=2",
            ]
        );
    }

    #[test]
    fn other_ranks_are_slices_of_one_chip() {
        let alone = [
            "PJRT_DEVICE=TPU",
            "TPU_VISIBLE_CHIPS=1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1",
            "TPU_PROCESS_BOUNDS=1,1,1",
            "TPU_PROCESS_ADDRESSES=localhost:8477",
            "TPU_PROCESS_PORT=8477",
            "CLOUD_TPU_TASK_ID=0",
        ];
        // Some chips, several hosts, and a number of chips whose shape is not known.
        for (chips, nproc, is_alone) in [(4, 2, true), (4, 4, false), (3, 3, true)] {
            let host = host(chips);
            let chips = Chips::assign(&host, &host.visible, nproc, is_alone);
            assert_eq!(variables(&chips, 1, &[]), alone);
        }
        // In another order, a chip's place would not be that of its task.
        let host = host(4);
        let turned: Vec<Device> = host.visible.iter().rev().cloned().collect();
        let chips = Chips::assign(&host, &turned, 4, true);
        assert!(variables(&chips, 0, &[]).contains(&"TPU_PROCESS_BOUNDS=1,1,1".to_owned()));
    }

    #[test]
    fn a_slice_of_the_user_stays() {
        let host = host(4);
        let chips = Chips::assign(&host, &host.visible, 1, true);
        assert_eq!(variables(&chips, 0, &[TPU_PROCESS_BOUNDS]), ["PJRT_DEVICE=TPU"]);
        assert_eq!(variables(&chips, 0, &[PJRT_DEVICE, CLOUD_TPU_TASK_ID]), [""; 0]);
        let older = variables(&chips, 0, &[TPU_VISIBLE_DEVICES]);
        assert!(older.contains(&"TPU_VISIBLE_DEVICES=0".to_owned()), "{older:?}");
    }
}
