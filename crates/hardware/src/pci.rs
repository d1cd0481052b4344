//! Locations on the PCI bus, and distances between them.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Distance between two devices, the nearest first. The names in parentheses are NCCL's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distance {
    /// Functions of one card, or devices at one PCI switch (PIX).
    Switch,
    /// Several PCI switches, without the root of the bus (PXB).
    Switches,
    /// One PCI root, also called host bridge, which is part of a CPU (PHB).
    Root,
    /// Several PCI roots at one NUMA node (NODE).
    Node,
    /// Different NUMA nodes, or an unknown distance (SYS).
    System,
}

impl Distance {
    /// Returns the distance in words, such as "same PCI switch".
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Switch => "same PCI switch",
            Self::Switches => "several PCI switches",
            Self::Root => "same PCI root",
            Self::Node => "same NUMA node",
            Self::System => "another NUMA node",
        }
    }
}

/// PCI and NUMA location of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Path in `/sys/devices`: the PCI root, the bridges on the way, and the device's own address.
    pub path: Vec<String>,
    /// NUMA node of the device. `None` if unknown.
    pub numa_node: Option<usize>,
}

impl Place {
    /// Returns the location of the device with a PCI address, on the host whose file system begins at `root`. `None` if
    /// the device does not exist.
    #[must_use]
    pub fn of_address(root: &Path, address: &str) -> Option<Self> {
        Self::of_folder(root, &root.join("sys/bus/pci/devices").join(address))
    }

    /// Returns the location of the device that a folder in `/sys` describes, which may lie below the folder of its PCI
    /// device. `None` for a device that is not on a PCI bus.
    #[must_use]
    pub fn of_folder(root: &Path, folder: &Path) -> Option<Self> {
        let folder = folder.canonicalize().ok()?;
        let devices = root.join("sys/devices").canonicalize().ok()?;
        let below = folder.strip_prefix(&devices).ok()?;
        let mut path: Vec<String> =
            below.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        // Virtio devices, ports of a card and the like lie below their PCI device.
        let last = path.iter().rposition(|part| is_address(part))?;
        path.truncate(last + 1);
        // The value -1 (the firmware reports no node) does not parse as an index.
        let own = devices.join(path.iter().collect::<PathBuf>());
        let numa_node = super::read(&own.join("numa_node")).and_then(|node| node.parse().ok());
        Some(Self { path, numa_node })
    }

    /// Returns the PCI address of the device. Empty for a default `Place`.
    #[must_use]
    pub fn address(&self) -> &str {
        self.path.last().map_or("", String::as_str)
    }

    /// Returns the distance between two locations.
    #[must_use]
    pub fn distance(&self, other: &Self) -> Distance {
        let common = self.path.iter().zip(&other.path).take_while(|(a, b)| a == b).count();
        let rest = (self.path.len() - common).max(other.path.len() - common);
        let is_one_card = card(self.address()) == card(other.address());
        match common {
            _ if is_one_card => Distance::Switch,
            0 => match (self.numa_node, other.numa_node) {
                (Some(ours), Some(theirs)) if ours == theirs => Distance::Node,
                _ => Distance::System,
            },
            // Only the root is shared.
            1 => Distance::Root,
            // A switch is two bridges: a shared upstream one, and one for each port.
            _ if rest <= 2 => Distance::Switch,
            _ => Distance::Switches,
        }
    }
}

/// Returns a PCI address without its function, as drivers name a card: `0000:3b:00` for `0000:3B:00.0`. `None` if
/// `text` is not an address.
#[must_use]
pub fn prefix_of(text: &str) -> Option<String> {
    let text = text.to_ascii_lowercase();
    let card = card(&text);
    let function = &text[card.len()..];
    let is_function = function.is_empty()
        || function.strip_prefix('.').is_some_and(|digit| digit.len() == 1 && is_hex(digit));
    let parts: Vec<&str> = card.split(':').collect();
    let is_card = parts.len() == 3
        && parts
            .iter()
            .zip([4..=8, 2..=2, 2..=2])
            .all(|(it, len)| len.contains(&it.len()) && is_hex(it));
    (is_function && is_card).then(|| card.to_owned())
}

fn card(address: &str) -> &str {
    address.split('.').next().unwrap_or(address)
}

fn is_address(text: &str) -> bool {
    text.contains('.') && prefix_of(text).is_some()
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(path: &str, numa_node: Option<usize>) -> Place {
        Place { path: path.split('/').map(str::to_owned).collect(), numa_node }
    }

    #[test]
    fn distances() {
        let gpu = place("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:04.0/0000:3d:00.0", Some(0));
        for (path, node, distance) in [
            ("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:08.0/0000:3e:00.0", 0, Distance::Switch),
            (
                "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:0c.0/0000:40:00.0/0000:41:00.0/0000:42:00.0",
                0,
                Distance::Switches,
            ),
            ("pci0000:3a/0000:3a:02.0/0000:50:00.0", 0, Distance::Root),
            ("pci0000:17/0000:17:02.0/0000:18:00.0", 0, Distance::Node),
            ("pci0000:ae/0000:ae:00.0/0000:af:00.0", 1, Distance::System),
        ] {
            let nic = place(path, Some(node));
            assert_eq!((gpu.distance(&nic), nic.distance(&gpu)), (distance, distance), "{path}");
        }
        let unknown = place("pci0000:17/0000:17:02.0/0000:18:00.0", None);
        assert_eq!(gpu.distance(&unknown), Distance::System);
        // Two functions of one card.
        let (first, second) =
            (place("pci0000:00/0000:00:03.0", None), place("pci0000:00/0000:00:03.1", None));
        assert_eq!(first.distance(&second), Distance::Switch);
    }

    #[test]
    fn addresses() {
        for (text, expected) in [
            ("0000:3B:00.0", Some("0000:3b:00")),
            ("0000:3b:00", Some("0000:3b:00")),
            ("10000:e1:00.0", Some("10000:e1:00")),
            ("virtio2", None),
            ("0000:3b:00.00", None),
            ("0000:3b", None),
            ("0000:3g:00.0", None),
            ("0000:3b:00.\u{e9}", None),
            ("", None),
        ] {
            assert_eq!(prefix_of(text).as_deref(), expected, "{text}");
        }
    }
}
