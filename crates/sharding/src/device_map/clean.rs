//! Simplification of device maps: joins entries with the same place.

use std::collections::{HashMap, HashSet};

use super::Place;
use super::tree::{Item, ModuleTree};

/// Replaces several entries below a module by the module if they have the same place. The outermost such module is
/// taken.
pub(super) fn clean(tree: &ModuleTree, entries: Vec<(Item, Place)>) -> Vec<(Item, Place)> {
    // The common place of the entries below each module, `None` if they differ, and the number of entries.
    let mut below: HashMap<usize, (Option<Place>, usize)> = HashMap::new();
    for (item, place) in &entries {
        for module in tree.outside(*item) {
            let (common, count) = below.entry(module).or_insert((Some(*place), 0));
            *common = common.filter(|common| common == place);
            *count += 1;
        }
    }
    let is_one = |module: &usize| matches!(below[module], (Some(_), 2..));
    let mut cleaned: Vec<(Item, Place)> = Vec::new();
    let mut seen = HashSet::new();
    for (item, place) in entries {
        let item = tree.outside(item).filter(is_one).last().map_or(item, Item::Module);
        if seen.insert(item) {
            cleaned.push((item, place));
        }
    }
    cleaned
}
