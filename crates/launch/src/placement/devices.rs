//! Which accelerators the ranks of this host see.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{NprocSpec, gpus};
use crate::ValueError;

/// The GPUs of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// All that can be seen in the file system, by number.
    pub present: Vec<Device>,
    /// Those that CUDA programs see, in their order.
    pub visible: Vec<Device>,
    /// The value of `CUDA_VISIBLE_DEVICES`, where it is set.
    pub mask: Option<String>,
}

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Its name in `CUDA_VISIBLE_DEVICES`: a number, or a UUID.
    pub id: String,
    /// Its UUID, where the driver tells it.
    pub uuid: Option<String>,
    /// The NUMA node that it is attached to, where that is known.
    pub numa_node: Option<usize>,
}

impl Devices {
    /// Looks under `root`, where the file system begins. `mask` is `CUDA_VISIBLE_DEVICES`.
    ///
    /// Numbers follow the PCI addresses. CUDA's own order is the same on hosts with GPUs of one
    /// kind, and everywhere under `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    #[must_use]
    pub fn read(root: &Path, mask: Option<&str>) -> Self {
        let present = gpus::present(root);
        let visible = match mask {
            None => present.clone(),
            Some(mask) => seen_through(mask, &present),
        };
        Self { present, visible, mask: mask.map(str::to_owned) }
    }

    /// The devices that ranks see, in the order of their numbers there.
    ///
    /// Errors when one of `wanted` is not there, or `CUDA_VISIBLE_DEVICES` hides it: that variable
    /// is how schedulers assign devices.
    pub fn choose(&self, wanted: Option<&DeviceList>) -> Result<Vec<Device>, DeviceError> {
        let Some(DeviceList::Ids(ids)) = wanted else { return Ok(self.visible.clone()) };
        let mut chosen: Vec<Device> = Vec::new();
        for id in ids {
            let mut named = self.visible.iter().filter(|device| is_named(device, id));
            let device = match (named.next(), named.next()) {
                (None, _) => return Err(self.missing(id)),
                (Some(device), None) => device,
                (Some(_), Some(_)) => return Err(DeviceError::Ambiguous { id: id.clone() }),
            };
            if chosen.contains(device) {
                return Err(DeviceError::Twice { id: id.clone() });
            }
            chosen.push(device.clone());
        }
        Ok(chosen)
    }

    /// How many ranks `nproc` means on a host where this process may use so many `cores`.
    pub fn count(
        &self,
        nproc: NprocSpec,
        wanted: Option<&DeviceList>,
        cores: usize,
    ) -> Result<usize, DeviceError> {
        match nproc {
            NprocSpec::Count(count) => Ok(count),
            NprocSpec::Cpu => Ok(cores),
            NprocSpec::Auto => match self.choose(wanted)?.len() {
                0 => Ok(cores),
                gpus => Ok(gpus),
            },
            NprocSpec::Gpu => match self.choose(wanted)?.len() {
                0 if self.present.is_empty() => Err(DeviceError::NoGpu),
                0 => Err(DeviceError::Hidden { mask: self.mask.clone().unwrap_or_default() }),
                gpus => Ok(gpus),
            },
        }
    }

    fn missing(&self, id: &str) -> DeviceError {
        let id = id.to_owned();
        match &self.mask {
            _ if self.present.is_empty() && self.visible.is_empty() => {
                DeviceError::NoSuchDevice { id, there: "no GPU found on this host".to_owned() }
            }
            Some(mask) => DeviceError::NotAllowed { id, mask: mask.clone() },
            None => {
                let last = self.present.len() - 1;
                let there = if last == 0 {
                    "this host has only GPU 0".to_owned()
                } else {
                    format!("this host has GPUs 0 to {last}")
                };
                DeviceError::NoSuchDevice { id, there }
            }
        }
    }
}

/// Devices by name.
///
/// ```
/// use brigade_launch::DeviceList;
/// assert_eq!("all".parse(), Ok(DeviceList::All));
/// assert_eq!("0,2".parse(), Ok(DeviceList::Ids(vec!["0".into(), "2".into()])));
/// assert!("1,1".parse::<DeviceList>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceList {
    /// All that there are.
    All,
    /// These, in this order: numbers, or UUIDs or unique beginnings of them.
    Ids(Vec<String>),
}

impl FromStr for DeviceList {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        if text == "all" {
            return Ok(Self::All);
        }
        let mut ids: Vec<String> = Vec::new();
        for part in text.split(',').map(str::trim) {
            let id = match part.parse::<u16>() {
                // As CUDA knows it: 01 is 1.
                Ok(number) if !part.starts_with('+') => number.to_string(),
                _ if is_uuid(part) => part.to_owned(),
                _ => return Err(ValueError::expected(LIST, part)),
            };
            if ids.contains(&id) {
                return Err(ValueError::twice("device", id));
            }
            ids.push(id);
        }
        Ok(Self::Ids(ids))
    }
}

impl fmt::Display for DeviceList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Ids(ids) => f.write_str(&ids.join(",")),
        }
    }
}

/// Why devices cannot be used as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// GPUs were to be counted, and there are none.
    #[error("--nproc gpu: no GPU found on this host; use --nproc cpu or a number")]
    NoGpu,
    /// GPUs were to be counted, and the environment hides them all.
    #[error(
        "--nproc gpu: CUDA_VISIBLE_DEVICES={mask} hides the GPUs of this host; change or unset it"
    )]
    Hidden {
        /// Its value.
        mask: String,
    },
    /// There is no such device.
    #[error("there is no device {id}: {there}")]
    NoSuchDevice {
        /// Its name.
        id: String,
        /// What is there instead.
        there: String,
    },
    /// The environment does not leave the device to us.
    #[error("device {id} is not among CUDA_VISIBLE_DEVICES={mask}; change or unset it")]
    NotAllowed {
        /// Its name.
        id: String,
        /// The value of the variable.
        mask: String,
    },
    /// The beginning of a UUID is that of several devices.
    #[error("several devices begin with {id}: write more of the one that is meant")]
    Ambiguous {
        /// The beginning.
        id: String,
    },
    /// A device is named in two ways.
    #[error("device {id} is given twice, under two names")]
    Twice {
        /// The second name.
        id: String,
    },
    /// There are fewer devices than ranks.
    #[error(
        "--virtual-local-rank gives every rank a GPU of its own: {ranks} ranks need {ranks}, but \
         there are {devices}"
    )]
    TooFew {
        /// Ranks of this host.
        ranks: usize,
        /// Devices for them.
        devices: usize,
    },
}

/// As CUDA reads the variable: up to the first name that means nothing.
fn seen_through(mask: &str, present: &[Device]) -> Vec<Device> {
    let device = |name: &str| -> Option<Device> {
        let unknown = || Device { id: name.to_owned(), ..Device::default() };
        if let Ok(number) = name.parse::<usize>() {
            // Where nothing can be seen, as in some virtual machines, the variable is believed.
            return if present.is_empty() { Some(unknown()) } else { present.get(number).cloned() };
        }
        if !is_uuid(name) {
            return None;
        }
        let named = present.iter().find(|device| is_named(device, name)).cloned();
        let can_tell = !name.starts_with(MIG) && present.iter().any(|device| device.uuid.is_some());
        match named {
            Some(device) => Some(Device { id: name.to_owned(), ..device }),
            None if can_tell => None,
            None => Some(unknown()),
        }
    };
    mask.split(',').map(str::trim).map_while(device).collect()
}

fn is_named(device: &Device, name: &str) -> bool {
    let begins = |uuid: &String| is_uuid(name) && uuid.starts_with(name);
    device.id == name || device.uuid.as_ref().is_some_and(begins)
}

fn is_uuid(name: &str) -> bool {
    ["GPU-", MIG].iter().any(|kind| name.len() > kind.len() && name.starts_with(kind))
}

pub(super) const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
const MIG: &str = "MIG-";
const LIST: &str = "all, or numbers or UUIDs of GPUs such as 0,2";

#[cfg(test)]
mod tests {
    use super::gpus::tests::{four, tree};
    use super::*;

    fn ids(devices: &[Device]) -> Vec<&str> {
        devices.iter().map(|device| device.id.as_str()).collect()
    }

    #[test]
    fn the_environment_masks() {
        let root = four();
        let table: [(&str, &[&str]); 14] = [
            ("", &[]),
            ("-1", &[]),
            ("NoDevFiles", &[]),
            ("2", &["2"]),
            ("3,1", &["3", "1"]),
            (" 1 , 0 ", &["1", "0"]),
            ("0,1,-1,2", &["0", "1"]),
            ("0,7,1", &["0"]),
            ("0,,1", &["0"]),
            ("GPU-ab", &["GPU-ab"]),
            ("GPU-aaaa,2", &["GPU-aaaa", "2"]),
            ("GPU-cccc,0", &[]),
            ("MIG-1234", &["MIG-1234"]),
            ("MIG-GPU-aaaa/1/0,MIG-GPU-aaaa/2/0", &["MIG-GPU-aaaa/1/0", "MIG-GPU-aaaa/2/0"]),
        ];
        for (mask, expected) in table {
            let devices = Devices::read(root.path(), Some(mask));
            assert_eq!(ids(&devices.visible), expected, "{mask:?}");
            assert_eq!(devices.present.len(), 4);
        }
        let by_uuid = Devices::read(root.path(), Some("GPU-ab"));
        assert_eq!(by_uuid.visible[0].numa_node, Some(0), "it is known where that one is");
        // Where nothing can be seen the variable is believed.
        let believed = Devices::read(tree(&[]).path(), Some("0,GPU-cccc"));
        assert_eq!(ids(&believed.visible), ["0", "GPU-cccc"]);
    }

    #[test]
    fn a_choice() {
        let root = four();
        let all = Devices::read(root.path(), None);
        let masked = Devices::read(root.path(), Some("2,0"));
        let none = Devices::default();
        let list = |text: &str| text.parse::<DeviceList>().unwrap();
        let choose = |devices: &Devices, text: &str| devices.choose(Some(&list(text)));
        assert_eq!(ids(&choose(&all, "2,GPU-aa").unwrap()), ["2", "0"]);
        assert_eq!(ids(&choose(&all, "all").unwrap()), ["0", "1", "2", "3"]);
        assert_eq!(ids(&choose(&masked, "all").unwrap()), ["2", "0"]);
        assert_eq!(ids(&choose(&masked, "0").unwrap()), ["0"]);
        assert_eq!(ids(&masked.choose(None).unwrap()), ["2", "0"]);
        for (devices, text, message) in [
            (&all, "4", "there is no device 4: this host has GPUs 0 to 3"),
            (&all, "GPU-cc", "there is no device GPU-cc: this host has GPUs 0 to 3"),
            (&masked, "1", "device 1 is not among CUDA_VISIBLE_DEVICES=2,0; change or unset it"),
            (&none, "0", "there is no device 0: no GPU found on this host"),
            (
                &all,
                "GPU-a",
                "several devices begin with GPU-a: write more of the one that is meant",
            ),
            (&all, "0,GPU-aaa", "device GPU-aaa is given twice, under two names"),
        ] {
            assert_eq!(choose(devices, text).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn numbers_of_ranks() {
        let root = four();
        let all = Devices::read(root.path(), None);
        let hidden = Devices::read(root.path(), Some(""));
        let none = Devices::default();
        let two: DeviceList = "0,2".parse().unwrap();
        let count = |devices: &Devices, nproc: &str, wanted: Option<&DeviceList>| {
            let count = devices.count(nproc.parse().unwrap(), wanted, 64);
            count.map_err(|error| error.to_string())
        };
        let no_gpu = "--nproc gpu: no GPU found on this host; use --nproc cpu or a number";
        let hides =
            "--nproc gpu: CUDA_VISIBLE_DEVICES= hides the GPUs of this host; change or unset it";
        for (devices, nproc, wanted, expected) in [
            (&all, "auto", None, Ok(4)),
            (&all, "gpu", None, Ok(4)),
            (&all, "cpu", None, Ok(64)),
            (&all, "7", None, Ok(7)),
            (&all, "auto", Some(&two), Ok(2)),
            (&all, "gpu", Some(&two), Ok(2)),
            (&all, "7", Some(&two), Ok(7)),
            (&none, "auto", None, Ok(64)),
            (&hidden, "auto", None, Ok(64)),
            (&none, "gpu", None, Err(no_gpu.to_owned())),
            (&hidden, "gpu", None, Err(hides.to_owned())),
        ] {
            assert_eq!(count(devices, nproc, wanted), expected, "{nproc}");
        }
    }

    #[test]
    fn lists() {
        for text in ["all", "0", "0,2", "3,0", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,1"] {
            assert_eq!(text.parse::<DeviceList>().unwrap().to_string(), text);
        }
        assert_eq!("01, 2".parse::<DeviceList>().unwrap().to_string(), "1,2");
        for (text, message) in [
            ("", "expected all, or numbers or UUIDs of GPUs such as 0,2, found \"\""),
            ("0,", "expected all, or numbers or UUIDs of GPUs such as 0,2, found \"\""),
            ("-1", "expected all, or numbers or UUIDs of GPUs such as 0,2, found \"-1\""),
            ("cuda:0", "expected all, or numbers or UUIDs of GPUs such as 0,2, found \"cuda:0\""),
            ("1,01", "device 1 is given twice"),
        ] {
            assert_eq!(text.parse::<DeviceList>().unwrap_err().to_string(), message);
        }
    }
}
