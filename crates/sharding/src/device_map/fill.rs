//! Placement of layers with as few unused bytes as possible on each device in turn.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::Place;
use super::limits::Limits;
use super::sizes::Sizes;
use super::tree::{Item, ModuleTree};

/// Layers that share tied weights, and so have the same place.
struct Group {
    layers: Vec<Item>,
    bytes: u64,
    /// Bytes of the largest layer of the group.
    largest: u64,
}

/// Places the layers of a model. If the GPUs cannot hold all of them, the first GPU keeps room for the largest layer
/// that is elsewhere. So does the host's memory if layers are on disk.
pub(super) fn fill(tree: &ModuleTree, sizes: &Sizes, limits: &Limits) -> Vec<(Item, Place)> {
    let layers = tree.layer_items();
    let devices = &limits.devices;
    let first_gpu = Some(devices[0].place).filter(|place| place.is_gpu());
    let mut places = HashMap::new();
    let mut left = groups(tree, sizes, &layers);
    for gpu in devices.iter().filter(|device| device.place.is_gpu()) {
        take(&mut left, gpu.budget(), gpu.place, &mut places);
    }
    if !left.is_empty() {
        places.clear();
        left = groups(tree, sizes, &layers);
        for device in devices {
            let keeps_room = device.place == Place::Cpu || Some(device.place) == first_gpu;
            if keeps_room {
                take_with_room(&mut left, device.budget(), device.place, &mut places);
            } else {
                take(&mut left, device.budget(), device.place, &mut places);
            }
        }
    }
    layers.into_iter().filter_map(|layer| Some((layer, *places.get(&layer)?))).collect()
}

fn groups(tree: &ModuleTree, sizes: &Sizes, layers: &[Item]) -> Vec<Group> {
    let group = |layer: &Item| {
        let bytes = sizes.of_item(*layer);
        Group { layers: vec![*layer], bytes, largest: bytes }
    };
    let mut groups: Vec<_> = layers.iter().map(group).collect();
    for tie in &tree.ties {
        let has_name = |layer: &Item| tie.iter().any(|tensor| tree.contains(*layer, *tensor));
        let is_tied = |group: &mut Group| group.layers.iter().any(has_name);
        let mut tied = groups.extract_if(.., is_tied);
        let Some(mut joined) = tied.next() else { continue };
        for group in tied {
            joined.layers.extend(group.layers);
            joined.bytes = joined.bytes.saturating_add(group.bytes);
            joined.largest = joined.largest.max(group.largest);
        }
        groups.push(joined);
    }
    groups
}

/// Moves groups to a device, with as many bytes in total as its budget allows.
fn take(
    left: &mut Vec<Group>,
    budget: Option<u64>,
    place: Place,
    places: &mut HashMap<Item, Place>,
) {
    let all = || (0..left.len()).collect();
    let chosen = budget.map_or_else(all, |budget| {
        let bytes = left.iter().enumerate().map(|(group, it)| (group, it.bytes));
        most(bytes, budget)
    });
    move_to(left, &chosen, place, places);
}

/// Moves groups to a device, with as many bytes in total as its budget allows beside room for the largest remaining
/// layer.
fn take_with_room(
    left: &mut Vec<Group>,
    budget: Option<u64>,
    place: Place,
    places: &mut HashMap<Item, Place>,
) {
    let Some(budget) = budget else { return take(left, None, place, places) };
    let mut best = (0, Vec::new());
    let rooms: BTreeSet<u64> = left.iter().map(|group| group.largest).chain([0]).collect();
    for room in rooms {
        // More room leaves less for layers.
        if budget.saturating_sub(room) <= best.0 {
            break;
        }
        // All layers that are larger than the room have to be on this device.
        let numbered = || left.iter().enumerate();
        let larger = || numbered().filter(|(_, group)| group.largest > room);
        let needed = larger().map(|(_, group)| group.bytes).fold(room, u64::saturating_add);
        let Some(budget) = budget.checked_sub(needed) else { continue };
        let smaller = numbered().filter(|(_, group)| group.largest <= room);
        let mut chosen = most(smaller.map(|(group, it)| (group, it.bytes)), budget);
        chosen.extend(larger().map(|(group, _)| group));
        let bytes: u64 = chosen.iter().map(|group| left[*group].bytes).sum();
        if bytes > best.0 || best.1.is_empty() {
            best = (bytes, chosen);
        }
    }
    move_to(left, &best.1, place, places);
}

fn move_to(
    left: &mut Vec<Group>,
    chosen: &[usize],
    place: Place,
    places: &mut HashMap<Item, Place>,
) {
    let chosen: HashSet<_> = chosen.iter().copied().collect();
    let mut numbers = 0..;
    let moved = left.extract_if(.., |_| numbers.next().is_some_and(|it| chosen.contains(&it)));
    for group in moved {
        places.extend(group.layers.into_iter().map(|layer| (layer, place)));
    }
}

/// Returns the groups with the largest total number of bytes within a budget. Of groups with the same size the first
/// ones are taken.
fn most(groups: impl Iterator<Item = (usize, u64)>, budget: u64) -> Vec<usize> {
    // Layers of a model have few different sizes, so there are few sums. Beyond this number the smallest sums are
    // dropped.
    const MOST_SUMS: usize = 1 << 12;
    let mut sizes: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (group, bytes) in groups {
        sizes.entry(bytes).or_default().push(group);
    }
    let sizes: Vec<_> = sizes.into_iter().rev().collect();
    // For each size, the sums that can be reached with groups of at least this size, and the number of groups of this
    // size in each sum.
    let mut reached: Vec<BTreeMap<u64, usize>> = Vec::new();
    let mut sums = vec![0];
    for (size, members) in &sizes {
        let mut next = BTreeMap::new();
        for sum in &sums {
            for count in 0..=members.len() {
                let added =
                    size.checked_mul(count as u64).and_then(|bytes| bytes.checked_add(*sum));
                let Some(with) = added.filter(|with| *with <= budget) else { break };
                // Groups without bytes always fit.
                if *size == 0 {
                    next.insert(with, members.len());
                } else {
                    next.entry(with).or_insert(count);
                }
            }
        }
        while next.len() > MOST_SUMS {
            next.pop_first();
        }
        sums = next.keys().copied().collect();
        reached.push(next);
    }
    let mut sum = sums.last().copied().unwrap_or(0);
    let mut chosen = Vec::new();
    for ((size, members), reached) in sizes.iter().zip(&reached).rev() {
        let count = reached.get(&sum).copied().unwrap_or(0);
        chosen.extend(&members[..count]);
        sum -= size * count as u64;
    }
    chosen
}
