//! Comparison with the maps that Accelerate 1.15 makes of the same models and limits.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::super::clean::clean;
use super::super::limits::Limits;
use super::super::sizes::Sizes;
use super::super::{
    DeviceMap, DeviceMapError, FreeMemory, MappedTensor, ModuleTree, Place, TensorKind,
};
use brigade_checkpoint::Dtype;

/// A case that `tests/device_maps/make.py` writes.
#[derive(Debug, Deserialize)]
struct Case {
    tensors: Vec<Vec<Value>>,
    units: Vec<String>,
    rule: String,
    limits: BTreeMap<String, u64>,
    map: BTreeMap<String, Value>,
    #[serde(default)]
    fallback: bool,
    dtype: Option<String>,
    #[serde(default)]
    special_dtypes: BTreeMap<String, String>,
}

fn dtype(name: &str) -> Dtype {
    let known = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::I64, Dtype::U8];
    known.into_iter().find(|dtype| dtype.name() == name).unwrap()
}

/// Reads a tensor from its name, shape and type. A fourth field is the first name of a tied weight, or for a buffer 1
/// if the model's files do not have it.
fn tensor(fields: &[Value]) -> MappedTensor {
    let shape: Vec<_> =
        fields[1].as_array().unwrap().iter().map(|it| it.as_u64().unwrap()).collect();
    let name = fields[0].as_str().unwrap();
    let plain = MappedTensor::parameter(name, &shape, dtype(fields[2].as_str().unwrap()));
    match fields.get(3) {
        None => plain,
        Some(Value::String(first)) => plain.tied_to(first),
        Some(transient) => {
            MappedTensor { kind: TensorKind::Buffer { persistent: transient == 0 }, ..plain }
        }
    }
}

fn place(value: &Value) -> Place {
    value.to_string().trim_matches('"').parse().unwrap()
}

impl Case {
    fn tree(&self) -> ModuleTree {
        ModuleTree::new(self.tensors.iter().map(|fields| tensor(fields)), self.units.clone())
            .unwrap()
    }

    fn device_map(&self) -> DeviceMap {
        let rule = match self.rule.as_str() {
            "sequential" => DeviceMap::sequential(),
            "balanced" => DeviceMap::balanced(),
            _ => DeviceMap::balanced_low_0(),
        };
        let limits = self.limits.iter().map(|(place, bytes)| (place.clone(), bytes.to_string()));
        let special = self.special_dtypes.iter();
        let map = rule.max_memory(limits).fallback(self.fallback);
        let map = DeviceMap { dtype: self.dtype.as_deref().map(dtype), ..map };
        special.fold(map, |map, (name, special)| map.special_dtype(name, dtype(special)))
    }
}

#[test]
fn maps_are_those_of_accelerate() {
    let text = include_str!("../../../tests/device_maps/accelerate-1.15.0.json");
    let cases: Vec<Case> = serde_json::from_str(text).unwrap();
    assert!(cases.len() >= 300);
    let mut resolved = 0;
    for (number, case) in cases.iter().enumerate() {
        let (tree, map) = (case.tree(), case.device_map());
        let sizes = Sizes::of(&tree, &map).unwrap();
        let limits = Limits::new(&map.max_memory, &FreeMemory::unknown()).unwrap();
        let entries = clean(&tree, map.infer(&tree, &sizes, &limits).entries);
        let named = entries.iter().map(|(item, place)| (tree.name(*item).to_owned(), *place));
        let found: BTreeMap<_, _> = named.collect();
        let expected: BTreeMap<_, _> =
            case.map.iter().map(|(name, value)| (name.clone(), place(value))).collect();
        assert_eq!(found, expected, "case {number}: {case:?}");

        // The differences: own buffers of split modules, and an error for layers that could not be computed.
        match map.resolve(&tree, &FreeMemory::unknown()) {
            Ok(placement) => {
                resolved += 1;
                for (name, place) in placement.entries() {
                    let own = expected.get(name);
                    let is_buffer =
                        tree.tensors().iter().any(|it| it.name == *name && !it.is_parameter());
                    assert!(
                        own == Some(place) || (own.is_none() && is_buffer),
                        "case {number}: {name}"
                    );
                }
            }
            Err(DeviceMapError::UnitTooLarge { place, limit, needed, .. }) => {
                assert!(limit < needed && case.limits.values().any(|it| *it == limit), "{place}");
            }
            Err(error) => panic!("case {number}: {error}"),
        }
    }
    assert!(resolved > 150, "{resolved}");
}
