//! Placement of layers and devices in their order, as by Accelerate's `infer_auto_device_map`.

use std::collections::{HashSet, VecDeque};

use super::Place;
use super::limits::Device;
use super::sizes::Sizes;
use super::tree::{Item, ModuleTree, ROOT};
use crate::byte_size::in_bytes;

/// Placement by Accelerate's rules.
pub(super) struct Inferred {
    pub(super) entries: Vec<(Item, Place)>,
    /// Devices that are left empty, with the limits in bytes that would have sufficed.
    empty: Vec<(Place, u64)>,
}

impl Inferred {
    pub(super) fn notes(&self) -> impl Iterator<Item = String> {
        self.empty.iter().map(|(place, bytes)| {
            let (size, bytes) = (in_bytes(*bytes), bytes);
            format!("{place} is left empty: its next layer needs a limit of {size} ({bytes} bytes)")
        })
    }
}

/// Places the modules of a model. The last device must have no limit.
pub(super) fn infer(
    tree: &ModuleTree,
    sizes: &Sizes,
    devices: &[Device],
    fallback: bool,
) -> Inferred {
    let root = Item::Module(ROOT);
    let left = tree.parts(root).into_iter().chain(tree.own_buffers(root)).collect();
    let mut queue = Queue { tree, sizes, left, largest: 0, largest_layers: Vec::new() };
    queue.find_largest(true);
    // Devices that have to keep room for a layer which is copied from another place.
    let first_gpu = devices.first().map(|device| device.place).filter(|place| place.is_gpu());
    let keeps_room = |place| place == Place::Cpu || Some(place) == first_gpu;

    let mut inferred = Inferred { entries: Vec::new(), empty: Vec::new() };
    let mut devices = devices.iter();
    let mut device = devices.next();
    let mut used = 0;
    while let Some(item) = queue.pop() {
        let Some(now) = device else { break };
        let size = i128::from(sizes.of_item(item));
        let (tied, tied_bytes) = queue.tied_to(item);
        let with_ties = size + tied_bytes;
        let room = if keeps_room(now.place) { queue.largest.into() } else { 0 };
        let limit = now.budget().map_or(i128::MAX, i128::from);
        // As in Accelerate, an exact fit is accepted here, while the comparison below splits a module of the same size.
        if used + with_ties <= limit.saturating_sub(room) {
            used += with_ties;
            inferred.entries.push((item, now.place));
            for partner in tied {
                if queue.remove(partner) {
                    inferred.entries.push((partner, now.place));
                }
            }
            continue;
        }
        if used + size <= limit - room
            && let Some(partner) = tied.iter().find(|partner| tree.can_split(**partner))
        {
            queue.split(*partner);
            queue.left.push_front(item);
            queue.find_largest(false);
            continue;
        }
        if used + size >= limit - room && tree.can_split(item) {
            queue.left.push_front(item);
            queue.split(item);
            queue.find_largest(false);
            continue;
        }
        if used == 0 && fallback {
            let room = limit - i128::from(queue.largest).max(with_ties);
            if let Some(found) = queue.take_first_that_fits(room) {
                queue.left.push_front(item);
                queue.left.push_front(found);
                continue;
            }
        }
        if used == 0 {
            let bytes = with_ties + room + i128::from(now.reserve);
            inferred.empty.push((now.place, u64::try_from(bytes).unwrap_or(u64::MAX)));
        }
        device = devices.next();
        used = 0;
        queue.left.push_front(item);
    }
    inferred
}

/// Modules and tensors that have no place, in their order.
struct Queue<'a> {
    tree: &'a ModuleTree,
    sizes: &'a Sizes,
    left: VecDeque<Item>,
    /// Bytes of the largest layer without a place.
    largest: u64,
    /// Layers without a place that have this size.
    largest_layers: Vec<Item>,
}

impl Queue<'_> {
    fn pop(&mut self) -> Option<Item> {
        let item = self.left.pop_front()?;
        let tree = self.tree;
        let is_inside = |layer: &Item| match item {
            Item::Module(module) => *layer == item || tree.outside(*layer).any(|it| it == module),
            Item::Tensor(_) => *layer == item,
        };
        self.largest_layers.retain(|layer| !is_inside(layer));
        if self.largest_layers.is_empty() {
            self.find_largest(false);
        }
        Some(item)
    }

    /// Finds the largest layers: units, modules without modules, and, if `with_tensors` is set, tensors of the root.
    fn find_largest(&mut self, with_tensors: bool) {
        (self.largest, self.largest_layers) = (0, Vec::new());
        let is_asked_for = |item: &&Item| with_tensors || matches!(item, Item::Module(_));
        let mut left: Vec<Item> = self.left.iter().filter(is_asked_for).rev().copied().collect();
        while let Some(item) = left.pop() {
            if self.tree.can_split(item) {
                left.extend(self.tree.modules_of(item).rev());
                continue;
            }
            let size = self.sizes.of_item(item);
            if size > self.largest {
                (self.largest, self.largest_layers) = (size, Vec::new());
            }
            if size == self.largest {
                self.largest_layers.push(item);
            }
        }
    }

    /// Returns the items that have other names of an item's weights, and the bytes that they add. An item with several
    /// such names occurs as many times.
    fn tied_to(&self, item: Item) -> (Vec<Item>, i128) {
        let (mut tied, mut bytes) = (Vec::new(), 0);
        let mut others: Vec<_> = self.other_names(item).collect();
        // Accelerate subtracts these bytes, which it assumes to be counted with the item.
        let twice = others.iter().map(|other| i128::from(self.sizes.tensors[*other])).sum::<i128>();
        let mut seen = HashSet::from([item]);
        // Tied items can have further ties. Accelerate fails in this case.
        while !others.is_empty() {
            let mut next = Vec::new();
            for other in others {
                let has_other = |partner: &&Item| self.tree.contains(**partner, other);
                let Some(partner) = self.left.iter().find(has_other) else { continue };
                tied.push(*partner);
                bytes += i128::from(self.sizes.of_item(*partner));
                if seen.insert(*partner) {
                    let names = self.other_names(*partner);
                    next.extend(names.filter(|name| {
                        !seen.iter().any(|known| self.tree.contains(*known, *name))
                    }));
                }
            }
            others = next;
        }
        (tied, bytes - twice)
    }

    /// Returns tensors outside of an item that are tied to one in it.
    fn other_names(&self, item: Item) -> impl Iterator<Item = usize> {
        let is_inside = move |tensor: &usize| self.tree.contains(item, *tensor);
        let ties = self.tree.ties.iter().filter(move |tie| tie.iter().any(is_inside));
        ties.flat_map(move |tie| tie.iter().copied().filter(move |tensor| !is_inside(tensor)))
    }

    fn remove(&mut self, item: Item) -> bool {
        let place = self.left.iter().position(|left| *left == item);
        place.is_some_and(|place| self.left.remove(place).is_some())
    }

    /// Replaces a module by its own parameters and modules.
    fn split(&mut self, item: Item) {
        let Some(place) = self.left.iter().position(|left| *left == item) else { return };
        let behind = self.left.split_off(place + 1);
        self.left.pop_back();
        self.left.extend(self.tree.parts(item));
        self.left.extend(behind);
    }

    /// Removes the first module that fits with its ties, and splits the modules around it.
    fn take_first_that_fits(&mut self, room: i128) -> Option<Item> {
        let mut search = Queue { left: self.left.clone(), largest_layers: Vec::new(), ..*self };
        let found = loop {
            let item = search.left.pop_front()?;
            let (_, bytes) = search.tied_to(item);
            // All tied partners must come later in the queue, to be placed together with the item.
            let is_behind = |other| search.left.iter().any(|it| self.tree.contains(*it, other));
            if search.other_names(item).all(is_behind)
                && i128::from(self.sizes.of_item(item)) + bytes <= room
            {
                break item;
            }
            if self.tree.can_split(item) {
                search.left.push_front(item);
                search.split(item);
            }
        };
        let mut outer: Vec<_> = self.tree.outside(found).collect();
        outer.reverse();
        for module in outer {
            self.split(Item::Module(module));
        }
        self.remove(found).then_some(found)
    }
}
