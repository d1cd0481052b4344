//! Devices and their memory limits.

use super::tree::Item;
use super::{DeviceMapError, Place};
use crate::byte_size;
use crate::byte_size::in_bytes;

/// Free memory of the devices of a machine, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreeMemory {
    /// Free bytes per device, or `None` if the machine is not known.
    devices: Option<Vec<(Place, u64)>>,
}

impl FreeMemory {
    /// Creates the free memory of a machine from the free bytes of each GPU and of the host's memory. A device that is
    /// not among them does not exist, except for the disk.
    #[must_use]
    pub fn new(devices: impl IntoIterator<Item = (Place, u64)>) -> Self {
        Self { devices: Some(devices.into_iter().collect()) }
    }

    /// Returns the free memory of an unknown machine: each device is assumed to exist, and limits have to be given.
    #[must_use]
    pub fn unknown() -> Self {
        Self { devices: None }
    }

    /// Checks that a device exists.
    pub(super) fn check(&self, place: Place) -> Result<(), DeviceMapError> {
        let Some(devices) = &self.devices else { return Ok(()) };
        if place == Place::Disk || devices.iter().any(|(known, _)| *known == place) {
            return Ok(());
        }
        let mut known: Vec<_> = devices.iter().map(|(place, _)| *place).collect();
        known.push(Place::Disk);
        known.sort_unstable();
        known.dedup();
        Err(DeviceMapError::NoSuchDevice { place, known })
    }

    fn of(&self, place: Place) -> Option<u64> {
        self.devices.iter().flatten().find(|(known, _)| *known == place).map(|(_, bytes)| *bytes)
    }
}

/// Devices in the order in which they are filled. The disk is the last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) devices: Vec<Device>,
    pub(super) notes: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) place: Place,
    /// Maximum number of bytes. `None` without a limit.
    pub(super) limit: Option<u64>,
    /// Bytes of the limit that are reserved for activations, and for caches of layers whose weights are elsewhere.
    pub(super) reserve: u64,
}

/// Bytes of the caches of offloaded units that are elsewhere than the weights of their units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MovedCaches {
    /// Bytes on the device that computes offloaded layers.
    pub(super) main: u64,
    /// Bytes in the host's memory, beside a GPU that computes.
    pub(super) host: u64,
}

impl MovedCaches {
    pub(super) fn fits_in(self, other: Self) -> bool {
        self.main <= other.main && self.host <= other.host
    }

    pub(super) fn max(self, other: Self) -> Self {
        Self { main: self.main.max(other.main), host: self.host.max(other.host) }
    }
}

impl Device {
    /// Returns the number of bytes for weights and caches.
    pub(super) fn budget(self) -> Option<u64> {
        self.limit.map(|limit| limit.saturating_sub(self.reserve))
    }
}

impl Limits {
    pub(super) fn new(
        max_memory: &[(String, String)],
        free: &FreeMemory,
    ) -> Result<Self, DeviceMapError> {
        let mut limits = Self { devices: Vec::new(), notes: Vec::new() };
        if max_memory.is_empty() {
            let Some(devices) = &free.devices else { return Err(DeviceMapError::NoLimits) };
            for (place, bytes) in devices {
                limits.add(*place, Some(*bytes))?;
                limits.note_free(*place, *bytes);
            }
        }
        limits.read(max_memory, free)?;
        // A GPU with a limit of 0 does not compute layers either.
        limits.devices.retain(|device| !device.place.is_gpu() || device.limit != Some(0));
        if !limits.devices.iter().any(|device| device.place == Place::Disk) {
            limits.add(Place::Disk, None)?;
        }
        limits.devices.sort_by_key(|device| device.place);
        Ok(limits)
    }

    /// Reserves bytes on each device that computes, and further ones for the caches of offloaded units.
    pub(super) fn reserve(&mut self, each: u64, moved: MovedCaches) {
        let has_gpu = self.devices.iter().any(|device| device.place.is_gpu());
        let computes = |place: Place| place.is_gpu() || (place == Place::Cpu && !has_gpu);
        let mut main = Some(moved.main);
        for device in &mut self.devices {
            device.reserve = if computes(device.place) {
                each.saturating_add(main.take().unwrap_or(0))
            } else if device.place == Place::Cpu {
                moved.host
            } else {
                0
            };
        }
    }

    /// Reads the limits of a map by hand, and adds the devices that the map uses without a limit.
    pub(super) fn by_hand(
        max_memory: &[(String, String)],
        free: &FreeMemory,
        entries: &[(Item, Place)],
    ) -> Result<Self, DeviceMapError> {
        let mut limits = Self { devices: Vec::new(), notes: Vec::new() };
        limits.read(max_memory, free)?;
        for (_, place) in entries {
            if !limits.devices.iter().any(|device| device.place == *place) {
                limits.add(*place, None)?;
            }
        }
        limits.devices.sort_by_key(|device| device.place);
        Ok(limits)
    }

    fn read(
        &mut self,
        max_memory: &[(String, String)],
        free: &FreeMemory,
    ) -> Result<(), DeviceMapError> {
        for (device, text) in max_memory {
            let place: Place = device.trim().parse()?;
            free.check(place)?;
            let wrong =
                |reason: String| DeviceMapError::Limit { place, text: text.clone(), reason };
            let limit = match text.trim() {
                "" if place == Place::Disk => None,
                "" => {
                    let unknown = || wrong("empty, and free memory is not known here".to_owned());
                    let bytes = free.of(place).ok_or_else(unknown)?;
                    self.note_free(place, bytes);
                    Some(bytes)
                }
                "0" => Some(0),
                text => Some(byte_size::parse(text).map_err(wrong)?),
            };
            self.add(place, limit)?;
        }
        Ok(())
    }

    fn add(&mut self, place: Place, limit: Option<u64>) -> Result<(), DeviceMapError> {
        if self.devices.iter().any(|device| device.place == place) {
            return Err(DeviceMapError::TwoLimits { place });
        }
        self.devices.push(Device { place, limit, reserve: 0 });
        Ok(())
    }

    fn note_free(&mut self, place: Place, bytes: u64) {
        self.notes.push(format!("limit of {place}: {}, which is free", in_bytes(bytes)));
    }
}
