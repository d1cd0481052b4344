//! Sizes of tensors and modules in bytes.

use std::collections::HashMap;

use brigade_checkpoint::Dtype;

use super::tree::{Item, ROOT};
use super::{DeviceMap, DeviceMapError, ModuleTree};
use crate::weight_format::{bytes_as, is_integer};

/// Sizes of tensors and modules in bytes. A tied weight counts under its first name.
pub(super) struct Sizes {
    /// Bytes of each tensor. 0 for later names of tied weights.
    pub(super) tensors: Vec<u64>,
    /// Bytes of the weights of each module, plus those reserved for units.
    modules: Vec<u64>,
    /// Bytes reserved for each unit.
    pub(super) unit_reserve: u64,
    /// `true` if what is reserved for offloaded units is in the host's memory.
    pub(super) offloads_caches: bool,
}

impl Sizes {
    pub(super) fn of(tree: &ModuleTree, map: &DeviceMap) -> Result<Self, DeviceMapError> {
        let special: HashMap<_, _> =
            map.special_dtypes.iter().map(|(name, dtype)| (name.as_str(), *dtype)).collect();
        let known: HashMap<_, _> =
            tree.tensors.iter().map(|tensor| (tensor.name.as_str(), ())).collect();
        if let Some(name) = special.keys().find(|name| !known.contains_key(*name)) {
            return Err(DeviceMapError::NoSuchTensor { name: (*name).to_owned() });
        }
        let mut tensors = Vec::with_capacity(tree.tensors.len());
        let mut modules = vec![0; tree.modules.len()];
        for (place, tensor) in tree.tensors.iter().enumerate() {
            let too_large = || DeviceMapError::TooLarge { name: tensor.name.clone() };
            let bytes = if tensor.tied_to.is_some() {
                0
            } else if let Some(dtype) = special.get(tensor.name.as_str()) {
                bytes_as(&tensor.shape, *dtype).ok_or_else(too_large)?
            } else if let Some(format) = map.format {
                let is_in_unit = tensor.is_parameter() && tree.is_in_unit(place);
                format
                    .tensor_bytes(&tensor.shape, tensor.dtype, is_in_unit)
                    .ok_or_else(too_large)?
            } else {
                bytes_as(&tensor.shape, narrowed(tensor.dtype, map.dtype)).ok_or_else(too_large)?
            };
            tensors.push(bytes);
            add(tree, &mut modules, tree.module_of[place], bytes).ok_or_else(too_large)?;
        }
        let unit_reserve = map.reserve.unit;
        for (module, unit) in tree.modules.iter().enumerate() {
            if unit.is_unit {
                let too_large = || DeviceMapError::TooLarge { name: unit.name.clone() };
                add(tree, &mut modules, module, unit_reserve).ok_or_else(too_large)?;
            }
        }
        Ok(Self { tensors, modules, unit_reserve, offloads_caches: map.offload_caches })
    }

    /// Returns the bytes of an item, with those reserved for its units.
    pub(super) fn of_item(&self, item: Item) -> u64 {
        match item {
            Item::Module(module) => self.modules[module],
            Item::Tensor(tensor) => self.tensors[tensor],
        }
    }

    pub(super) fn total(&self) -> u64 {
        self.modules[ROOT]
    }
}

/// Adds bytes to a module and to all modules around it. `None` if a sum is too large.
fn add(tree: &ModuleTree, modules: &mut [u64], mut module: usize, bytes: u64) -> Option<()> {
    // Sums of up to twice the bytes must not overflow either.
    const MOST: u64 = 1 << 60;
    loop {
        modules[module] = modules[module].checked_add(bytes).filter(|sum| *sum < MOST)?;
        if module == ROOT {
            return Some(());
        }
        module = tree.modules[module].parent;
    }
}

/// Returns the type in which a tensor is held: the map's type, unless the tensor has integers or fewer bits.
fn narrowed(own: Dtype, dtype: Option<Dtype>) -> Dtype {
    dtype.filter(|dtype| !is_integer(own) && dtype.bits() < own.bits()).unwrap_or(own)
}
