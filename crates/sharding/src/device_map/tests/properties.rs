//! Properties of device maps of random models.

use std::collections::HashMap;

use brigade_checkpoint::Dtype;
use proptest::prelude::*;

use super::super::{
    DeviceMap, DeviceMapError, FreeMemory, MappedTensor, ModuleTree, Place, Placement,
};

/// Generates modules with one to three modules inside, some of them units, with ties. Buffers are in innermost modules.
fn tree() -> impl Strategy<Value = ModuleTree> {
    let inner = (1u64..60, 0u64..20);
    let module = (prop::collection::vec(inner, 1..4), any::<bool>(), 0u64..9);
    let modules = prop::collection::vec(module, 1..6);
    let ties =
        prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..3);
    (modules, ties).prop_map(|(modules, ties)| {
        let (mut tensors, mut units) = (Vec::new(), Vec::new());
        for (outer, (inner, is_unit, own)) in modules.into_iter().enumerate() {
            if own > 0 {
                let name = format!("layers.{outer}.scale");
                tensors.push(MappedTensor::parameter(name, &[own], Dtype::F32));
            }
            for (number, (weight, buffer)) in inner.into_iter().enumerate() {
                let name = format!("layers.{outer}.{number}.weight");
                tensors.push(MappedTensor::parameter(name, &[weight], Dtype::BF16));
                if buffer > 0 {
                    let name = format!("layers.{outer}.{number}.buffer");
                    tensors.push(MappedTensor::buffer(name, &[buffer], Dtype::F32));
                }
            }
            if is_unit {
                units.push(format!("layers.{outer}"));
            }
        }
        for (first, second) in ties {
            let mut tie = [first.index(tensors.len()), second.index(tensors.len())];
            tie.sort_unstable();
            let [first, second] = tie;
            let name = tensors[first].name.clone();
            let is_tied =
                |tensor: &MappedTensor| tensor.tied_to.is_some() || !tensor.is_parameter();
            let is_first =
                tensors.iter().any(|it| it.tied_to.as_ref() == Some(&tensors[second].name));
            if first != second
                && !is_first
                && !is_tied(&tensors[first])
                && !is_tied(&tensors[second])
            {
                tensors[second].tied_to = Some(name);
            }
        }
        ModuleTree::new(tensors, units).unwrap()
    })
}

fn rule() -> impl Strategy<Value = DeviceMap> {
    let rules = [
        DeviceMap::balanced(),
        DeviceMap::balanced_low_0(),
        DeviceMap::sequential(),
        DeviceMap::fill(),
    ];
    (prop::sample::select(rules.to_vec()), any::<bool>())
        .prop_map(|(rule, fallback)| rule.fallback(fallback))
}

fn limits() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(1u64..1500, 1..4)
}

/// Sets the limits of GPUs, and with the last number that of the host's memory.
fn limited(map: DeviceMap, limits: &[u64]) -> DeviceMap {
    let gpus = limits.len() - 1;
    let device = |place| if place < gpus { format!("cuda:{place}") } else { "cpu".to_owned() };
    let limits = limits.iter().enumerate().map(|(place, limit)| (device(place), limit.to_string()));
    map.max_memory(limits.collect::<Vec<_>>())
}

fn resolved(map: &DeviceMap, tree: &ModuleTree) -> Result<Option<Placement>, TestCaseError> {
    match map.resolve(tree, &FreeMemory::unknown()) {
        Ok(placement) => Ok(Some(placement)),
        Err(DeviceMapError::UnitTooLarge { .. }) => Ok(None),
        Err(error) => Err(TestCaseError::fail(error.to_string())),
    }
}

fn places(placement: &Placement, tree: &ModuleTree) -> HashMap<String, Place> {
    let place = |name: &String| Some((name.clone(), placement.place_of(name)?));
    tree.tensors().iter().filter_map(|tensor| place(&tensor.name)).collect()
}

proptest! {
    #[test]
    fn every_tensor_has_a_place_within_the_limits_and_ties_and_units_are_together(
        tree in tree(),
        rule in rule(),
        limits in limits(),
    ) {
        let map = limited(rule, &limits);
        let Some(placement) = resolved(&map, &tree)? else { return Ok(()) };
        let places = places(&placement, &tree);
        prop_assert_eq!(places.len(), tree.tensors().len());
        for tensor in tree.tensors() {
            if let Some(first) = &tensor.tied_to {
                prop_assert_eq!(places[first], places[&tensor.name], "{:?}", &map);
            }
        }
        for layer in tree.layers() {
            prop_assert!(placement.place_of(layer).is_some(), "{} has several places", layer);
        }
        for (place, bytes) in placement.bytes() {
            prop_assert!(placement.limit(place).is_none_or(|limit| bytes <= limit), "{place}: {bytes}");
        }
        // Accelerate keeps no room for own parameters of modules that are split.
        let main = placement.compute_place();
        let is_module = |name: &str| !places.contains_key(name);
        let layers = placement.layers().iter().filter(|layer| is_module(&layer.name));
        let offloaded = layers.filter(|layer| placement.bytes_moved_from(layer.place) > 0);
        let largest = offloaded.map(|layer| layer.bytes).max().unwrap_or(0);
        let used: u64 = placement.bytes().iter().filter(|(place, _)| *place == main).map(|it| it.1).sum();
        prop_assert!(placement.limit(main).is_none_or(|limit| used + largest <= limit));
    }

    #[test]
    fn with_more_memory_fill_puts_no_less_on_the_first_device(
        tree in tree(),
        limit in 1u64..1500,
        more in 0u64..300,
        cpu in 1u64..1500,
        gpu in any::<bool>(),
    ) {
        let on_first = |limit: u64| {
            let limits = if gpu { vec![limit, cpu] } else { vec![limit] };
            let placement = resolved(&limited(DeviceMap::fill(), &limits), &tree)?;
            Ok::<_, TestCaseError>(placement.map(|placement| placement.bytes()[0].1))
        };
        if let Some(less) = on_first(limit)? {
            prop_assert!(on_first(limit + more)?.is_some_and(|bytes| bytes >= less));
        }
    }

    #[test]
    fn fill_puts_no_less_on_a_gpu_than_the_rules_in_order(
        tree in tree(),
        limit in 1u64..1500,
        cpu in 1u64..1500,
    ) {
        let on_gpu = |map: DeviceMap| resolved(&limited(map, &[limit, cpu]), &tree);
        let Some(in_order) = on_gpu(DeviceMap::sequential())? else { return Ok(()) };
        let filled = on_gpu(DeviceMap::fill())?;
        let used = in_order.bytes()[0].1;
        let offloaded = in_order.layers().iter().filter(|layer| !layer.place.is_gpu());
        // The rules keep no room for own parameters of modules that are split.
        prop_assume!(used + offloaded.map(|layer| layer.bytes).max().unwrap_or(0) <= limit);
        prop_assert!(filled.is_some_and(|filled| filled.bytes()[0].1 >= used), "{used}");
    }

    #[test]
    fn a_map_by_hand_of_what_was_resolved_is_the_same(tree in tree(), limits in limits()) {
        let map = limited(DeviceMap::balanced(), &limits);
        let Some(placement) = resolved(&map, &tree)? else { return Ok(()) };
        let json = serde_json::to_string(&placement).unwrap();
        let again = resolved(&DeviceMap::from_json(&json).unwrap(), &tree)?.unwrap();
        prop_assert_eq!(places(&again, &tree), places(&placement, &tree));
        prop_assert_eq!(again.layers(), placement.layers());
    }
}
