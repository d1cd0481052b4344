//! Accelerators that the ranks of this host see.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use brigade_hardware::Vendor;

pub use brigade_hardware::Device;

use super::NprocSpec;
use crate::ValueError;

/// GPUs of this host, all and visible ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Devices {
    /// Vendor of the GPUs. NVIDIA if none can be seen.
    pub kind: &'static dyn Vendor,
    /// All GPUs that programs could open, by number.
    pub present: Vec<Device>,
    /// GPUs that programs see, in their order.
    pub visible: Vec<Device>,
    /// Environment variable that hides other GPUs, if one is set.
    pub mask: Option<Mask>,
}

/// Environment variable that restricts the GPUs that programs see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    /// Name of the variable.
    pub variable: &'static str,
    /// Value of the variable.
    pub value: String,
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.variable, self.value)
    }
}

impl Devices {
    /// Finds the GPUs of this host, by its files and environment.
    #[must_use]
    pub fn of_this_host() -> Self {
        Self::read(&brigade_hardware::host_root(), environment(&[]))
    }

    /// Finds the GPUs by the files under `root`, which stands for `/`. `var` returns environment variables.
    #[must_use]
    pub fn read(root: &Path, var: impl Fn(&str) -> Option<String>) -> Self {
        let (found, devices) = brigade_hardware::find(root);
        let present: Vec<Device> = devices.into_iter().filter(|it| it.is_usable).collect();
        // Where nothing can be seen, the variable that is set determines the vendor of the devices.
        let is_set = |kind: &&dyn Vendor| {
            kind.visibility().iter().flat_map(|it| *it).any(|it| var(it).is_some())
        };
        let kind = if present.is_empty() {
            brigade_hardware::VENDORS.iter().copied().find(is_set).unwrap_or(found)
        } else {
            found
        };
        let (mut visible, mut mask) = (present.clone(), None);
        for layer in kind.visibility() {
            let set =
                layer.iter().find_map(|name| Some(Mask { variable: name, value: var(name)? }));
            let Some(set) = set else { continue };
            if mask.is_some() {
                // Each layer renumbers the devices that the one before it leaves.
                let renumber =
                    |(number, it): (usize, Device)| Device { id: number.to_string(), ..it };
                visible = visible.into_iter().enumerate().map(renumber).collect();
            }
            visible = seen_through(&set.value, &visible, kind, present.is_empty());
            mask = Some(set);
        }
        Self { kind, present, visible, mask }
    }

    /// Returns the devices that ranks see, in the order in which ranks number them.
    ///
    /// # Errors
    /// One of `wanted` does not exist, or a variable hides it: schedulers assign devices with such variables.
    pub fn choose(&self, wanted: Option<&DeviceList>) -> Result<Vec<Device>, DeviceError> {
        let Some(DeviceList::Ids(ids)) = wanted else { return Ok(self.visible.clone()) };
        let mut chosen: Vec<Device> = Vec::new();
        for id in ids {
            let mut named = self.visible.iter().filter(|device| is_named(device, id, self.kind));
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

    /// Returns the number of ranks that `nproc` means on a host where this process may use `cores` cores.
    ///
    /// # Errors
    /// GPUs are to be counted, and none can be used, or `wanted` cannot be chosen.
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
                0 => {
                    let mask = self.mask.as_ref().map(ToString::to_string).unwrap_or_default();
                    Err(DeviceError::Hidden { mask })
                }
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
            Some(mask) => DeviceError::NotAllowed { id, mask: mask.to_string() },
            None => {
                let (last, word) = (self.present.len() - 1, self.kind.device_word());
                let there = if last == 0 {
                    format!("this host has only {word} 0")
                } else {
                    format!("this host has {word}s 0 to {last}")
                };
                DeviceError::NoSuchDevice { id, there }
            }
        }
    }
}

/// Selection of devices by number or UUID.
///
/// ```
/// use brigade_launch::DeviceList;
/// assert_eq!("all".parse(), Ok(DeviceList::All));
/// assert_eq!("0,2".parse(), Ok(DeviceList::Ids(vec!["0".into(), "2".into()])));
/// assert!("1,1".parse::<DeviceList>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceList {
    /// All devices that are visible.
    All,
    /// The listed devices, in this order: numbers, or UUIDs or unique beginnings of them.
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
                // As CUDA parses it: 01 is 1.
                Ok(number) if !part.starts_with('+') => number.to_string(),
                _ if brigade_hardware::VENDORS.iter().any(|kind| is_uuid(part, *kind)) => {
                    part.to_owned()
                }
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

/// Error for devices that cannot be used as requested.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The number of GPUs was requested as the number of ranks, and the host has none.
    #[error("--nproc gpu: no GPU found on this host; use --nproc cpu or a number")]
    NoGpu,
    /// The number of GPUs was requested as the number of ranks, and the environment hides them all.
    #[error("--nproc gpu: {mask} hides the devices of this host; change or unset it")]
    Hidden {
        /// Variable that hides the devices, with its value.
        mask: String,
    },
    /// The device does not exist on this host.
    #[error("there is no device {id}: {there}")]
    NoSuchDevice {
        /// Number or UUID of the device.
        id: String,
        /// Description of the devices that exist.
        there: String,
    },
    /// The environment hides the device.
    #[error("device {id} is not among {mask}; change or unset it")]
    NotAllowed {
        /// Number or UUID of the device.
        id: String,
        /// Variable that hides the device, with its value.
        mask: String,
    },
    /// Several devices have a UUID with this beginning.
    #[error("several devices begin with {id}: write more of the UUID")]
    Ambiguous {
        /// Beginning of the UUID.
        id: String,
    },
    /// A device is selected twice, under two names.
    #[error("device {id} is given twice, under two names")]
    Twice {
        /// Second name of the device.
        id: String,
    },
    /// The host has fewer devices than ranks.
    #[error(
        "--virtual-local-rank needs a {word} for each rank: {ranks} ranks need {ranks}, but there are \
         {devices}"
    )]
    TooFew {
        /// Number of ranks on this host.
        ranks: usize,
        /// Number of devices for the ranks.
        devices: usize,
        /// Word for a device, such as `GPU`.
        word: &'static str,
    },
    /// The host has fewer devices than ranks, and each device can be used by one process only.
    #[error(
        "{ranks} ranks for {devices} {word}s, and only one process can use a {word}: use --nproc {devices}, or --cpu \
         for a program that uses no {word}"
    )]
    ForOneProcess {
        /// Number of ranks on this host.
        ranks: usize,
        /// Number of devices for the ranks.
        devices: usize,
        /// Word for a device, such as `TPU`.
        word: &'static str,
    },
}

/// Returns the environment of ranks: the variables that the user has set for them, and those of this process.
pub(crate) fn environment(own: &[(String, String)]) -> impl Fn(&str) -> Option<String> {
    move |name| {
        let own = own.iter().find(|it| it.0 == name).map(|it| it.1.clone());
        own.or_else(|| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
    }
}

/// Returns the devices that programs see through the variable: they read it up to the first invalid name. With
/// `is_blind`, the devices cannot be listed, as in some virtual machines, and the variable is trusted.
fn seen_through(
    value: &str,
    there: &[Device],
    kind: &'static dyn Vendor,
    is_blind: bool,
) -> Vec<Device> {
    let device = |name: &str| -> Option<Device> {
        let unknown = || Device { id: name.to_owned(), is_usable: true, ..Device::default() };
        if let Ok(number) = name.parse::<usize>() {
            return if is_blind { Some(unknown()) } else { there.get(number).cloned() };
        }
        if !is_uuid(name, kind) {
            return None;
        }
        let named = there.iter().find(|device| is_named(device, name, kind)).cloned();
        let can_tell = !kind.is_part(name) && there.iter().any(|device| device.uuid.is_some());
        match named {
            Some(device) => Some(Device { id: name.to_owned(), ..device }),
            None if can_tell => None,
            None => Some(unknown()),
        }
    };
    value.split(',').map(str::trim).map_while(device).collect()
}

fn is_named(device: &Device, name: &str, kind: &'static dyn Vendor) -> bool {
    let begins = |uuid: &String| is_uuid(name, kind) && uuid.starts_with(name);
    device.id == name || device.uuid.as_ref().is_some_and(begins)
}

fn is_uuid(name: &str, kind: &'static dyn Vendor) -> bool {
    kind.id_prefixes().iter().any(|prefix| name.len() > prefix.len() && name.starts_with(prefix))
}

const LIST: &str = "all, or numbers or UUIDs of GPUs such as 0,2";

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    /// Four GPUs, one of them without a UUID and one without any properties.
    fn four() -> tempfile::TempDir {
        let about = |minor: usize, uuid: &str| format!("GPU UUID: {uuid}\nDevice Minor: {minor}\n");
        tree(&[
            ("proc/driver/nvidia/gpus/0000:19:00.0/information", &about(1, "GPU-aaaa")),
            ("proc/driver/nvidia/gpus/0000:3b:00.0/information", &about(0, "GPU-abbb")),
            ("proc/driver/nvidia/gpus/0000:9b:00.0/information", &about(2, "GPU-????????")),
            ("proc/driver/nvidia/gpus/0001:00:00.0/information", ""),
            ("sys/bus/pci/devices/0000:3b:00.0/numa_node", "0\n"),
            ("dev/nvidia0", ""),
            ("dev/nvidia1", ""),
            ("dev/nvidia2", ""),
        ])
    }

    /// Reads the devices with this value of `CUDA_VISIBLE_DEVICES`.
    fn read(root: &Path, mask: Option<&str>) -> Devices {
        Devices::read(root, |name| {
            mask.filter(|_| name == "CUDA_VISIBLE_DEVICES").map(str::to_owned)
        })
    }

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
            let devices = read(root.path(), Some(mask));
            assert_eq!(ids(&devices.visible), expected, "{mask:?}");
            assert_eq!(devices.present.len(), 4);
        }
        let by_uuid = read(root.path(), Some("GPU-ab"));
        assert_eq!(by_uuid.visible[0].numa_node, Some(0), "it is known where that one is");
        // Without visible devices, the variable is trusted.
        let believed = read(tree(&[]).path(), Some("0,GPU-cccc"));
        assert_eq!(ids(&believed.visible), ["0", "GPU-cccc"]);
    }

    #[test]
    fn a_choice() {
        let root = four();
        let all = read(root.path(), None);
        let masked = read(root.path(), Some("2,0"));
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
            (&all, "GPU-a", "several devices begin with GPU-a: write more of the UUID"),
            (&all, "0,GPU-aaa", "device GPU-aaa is given twice, under two names"),
        ] {
            assert_eq!(choose(devices, text).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn numbers_of_ranks() {
        let root = four();
        let all = read(root.path(), None);
        let hidden = read(root.path(), Some(""));
        let none = Devices::default();
        let two: DeviceList = "0,2".parse().unwrap();
        let count = |devices: &Devices, nproc: &str, wanted: Option<&DeviceList>| {
            let count = devices.count(nproc.parse().unwrap(), wanted, 64);
            count.map_err(|error| error.to_string())
        };
        let no_gpu = "--nproc gpu: no GPU found on this host; use --nproc cpu or a number";
        let hides =
            "--nproc gpu: CUDA_VISIBLE_DEVICES= hides the devices of this host; change or unset it";
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

    #[test]
    fn devices_of_another_kind_have_two_layers() {
        let unique = |id: u64| format!("location_id 0\nunique_id {id}\n");
        let nodes = "sys/class/kfd/kfd/topology/nodes";
        let mut files = Vec::new();
        for number in 1..5 {
            files.push((format!("{nodes}/{number}/gpu_id"), "7\n".to_owned()));
            files.push((format!("{nodes}/{number}/properties"), unique(number)));
        }
        let files: Vec<(&str, &str)> =
            files.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let root = tree(&files);
        let with = |vars: &[(&str, &str)]| {
            let var = |name: &str| vars.iter().find(|it| it.0 == name).map(|it| it.1.to_owned());
            Devices::read(root.path(), var)
        };
        let uuids = |devices: &Devices| -> Vec<String> {
            let of = |it: &Device| it.uuid.as_deref().unwrap_or_default()[19..].to_owned();
            devices.visible.iter().map(of).collect()
        };
        assert_eq!(uuids(&with(&[])), ["1", "2", "3", "4"]);
        assert_eq!(uuids(&with(&[("CUDA_VISIBLE_DEVICES", "2,0")])), ["3", "1"]);
        // HIP's own variable takes precedence if both are set.
        let both = with(&[("HIP_VISIBLE_DEVICES", "1"), ("CUDA_VISIBLE_DEVICES", "2,0")]);
        assert_eq!(
            (uuids(&both), both.mask.unwrap().variable),
            (vec!["2".to_owned()], "HIP_VISIBLE_DEVICES")
        );
        let layers = with(&[("ROCR_VISIBLE_DEVICES", "3,1"), ("HIP_VISIBLE_DEVICES", "1,0")]);
        assert_eq!(
            (uuids(&layers), ids(&layers.visible)),
            (vec!["2".to_owned(), "4".to_owned()], vec!["1", "0"])
        );
        let by_uuid = with(&[("HIP_VISIBLE_DEVICES", "GPU-0000000000000002")]);
        assert_eq!(uuids(&by_uuid), ["2"]);
    }
}
