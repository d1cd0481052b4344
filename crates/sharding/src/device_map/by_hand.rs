//! Device maps that a user writes by hand.

use std::collections::HashMap;

use serde_json::Value;
use wildmatch::WildMatch;

use super::tree::Item;
use super::{DeviceMapError, FreeMemory, ModuleTree, Place};

/// Reads names and places from Accelerate's JSON.
pub(super) fn from_json(text: &str) -> Result<Vec<(String, String)>, DeviceMapError> {
    let wrong = |message: String| DeviceMapError::Json { message };
    let value: Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
    let Value::Object(places) = value else { return Err(wrong("not an object".to_owned())) };
    let read = |(name, place): (String, Value)| match place {
        Value::String(place) => Ok((name, place)),
        Value::Number(place) => Ok((name, place.to_string())),
        place => Err(wrong(format!("the place of {name} is {place}"))),
    };
    places.into_iter().map(read).collect()
}

/// Returns the modules and tensors that names and patterns match, with their places, in the order of the model.
pub(super) fn entries(
    tree: &ModuleTree,
    places: &[(String, String)],
    free: &FreeMemory,
) -> Result<Vec<(Item, Place)>, DeviceMapError> {
    let modules = (0..tree.modules.len()).map(Item::Module);
    let items: Vec<_> = modules.chain((0..tree.tensors.len()).map(Item::Tensor)).collect();
    let by_name: HashMap<_, _> = items.iter().map(|item| (tree.name(*item), *item)).collect();
    // The entry of the map that decides for each item. Names take precedence over patterns.
    let mut chosen: HashMap<Item, (bool, usize, Place)> = HashMap::new();
    for (written, (name, place)) in places.iter().enumerate() {
        let place: Place = place.parse()?;
        free.check(place)?;
        let is_pattern = name.contains(['*', '?']);
        let named: Vec<Item> = if is_pattern {
            let pattern: Vec<_> = name.split('.').map(WildMatch::new).collect();
            items.iter().copied().filter(|item| matches(&pattern, tree.name(*item))).collect()
        } else {
            by_name.get(name.as_str()).copied().into_iter().collect()
        };
        if named.is_empty() {
            return Err(unknown(name, by_name.keys()));
        }
        for item in named {
            let overlap = |first: usize| DeviceMapError::Overlap {
                first: places[first].0.clone(),
                second: name.clone(),
                name: tree.name(item).to_owned(),
            };
            match chosen.get(&item) {
                Some((false, ..)) if is_pattern => {}
                Some((kind, first, other)) if *kind == is_pattern && *other != place => {
                    return Err(overlap(*first));
                }
                _ => {
                    chosen.insert(item, (is_pattern, written, place));
                }
            }
        }
    }
    let entries = items.into_iter().filter_map(|item| Some((item, chosen.get(&item)?.2))).collect();
    check(tree, &chosen)?;
    Ok(entries)
}

fn matches(pattern: &[WildMatch], name: &str) -> bool {
    let components = name.split('.');
    components.clone().count() == pattern.len()
        && components.zip(pattern).all(|(component, pattern)| pattern.matches(component))
}

/// Checks that each tensor has a place, and that all names of a tied weight have the same place.
fn check(
    tree: &ModuleTree,
    chosen: &HashMap<Item, (bool, usize, Place)>,
) -> Result<(), DeviceMapError> {
    let of = |item| chosen.get(&item).map(|(.., place)| *place);
    let place_of = |tensor: usize| {
        let mut outer = tree.around(tensor).map(Item::Module);
        of(Item::Tensor(tensor)).or_else(|| outer.find_map(of))
    };
    let uncovered = (0..tree.tensors.len()).filter(|tensor| place_of(*tensor).is_none());
    let names: Vec<_> = uncovered.map(|tensor| tree.tensors[tensor].name.clone()).collect();
    if !names.is_empty() {
        return Err(DeviceMapError::Uncovered { names });
    }
    for tie in &tree.ties {
        let placed =
            |tensor: &usize| Some((tree.tensors[*tensor].name.clone(), place_of(*tensor)?));
        let mut names = tie.iter().filter_map(placed);
        let Some((first, first_place)) = names.next() else { continue };
        if let Some((second, second_place)) = names.find(|(_, place)| *place != first_place) {
            return Err(DeviceMapError::TiedApart { first, first_place, second, second_place });
        }
    }
    Ok(())
}

fn unknown<'a>(name: &str, known: impl Iterator<Item = &'a &'a str>) -> DeviceMapError {
    const SHOWN: usize = 3;
    let mut near: Vec<_> = known.filter(|known| !known.is_empty()).copied().collect();
    near.sort_unstable();
    near.sort_by_cached_key(|known| strsim::damerau_levenshtein(known, name));
    let near = near.into_iter().take(SHOWN).map(str::to_owned).collect();
    DeviceMapError::UnknownName { name: name.to_owned(), near }
}
