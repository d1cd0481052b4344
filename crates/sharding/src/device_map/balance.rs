//! Memory limits with which GPUs get about the same number of bytes.

use super::limits::Device;
use super::sizes::Sizes;
use super::tree::{Item, ModuleTree, ROOT};

/// Lowers the limit of a single GPU to nine tenths, as Accelerate does if no limits are given.
pub(super) fn keep_tenth(devices: &mut [Device]) {
    let mut gpus = devices.iter_mut().filter(|device| device.place.is_gpu());
    if let (Some(gpu), None) = (gpus.next(), gpus.next()) {
        gpu.limit = gpu.limit.map(|limit| (u128::from(limit) * 9 / 10) as u64);
    }
}

/// Lowers the limits of all GPUs but the last to their share of the model plus [`surplus`].
pub(super) fn balance(tree: &ModuleTree, sizes: &Sizes, devices: &mut [Device], low_zero: bool) {
    let mut gpus: Vec<&mut Device> =
        devices.iter_mut().filter(|device| device.place.is_gpu()).collect();
    let count = gpus.len() as u64;
    let low_zero = low_zero && count > 1;
    let Some((last, first)) = gpus.split_last_mut().filter(|_| count > 1) else { return };
    let share = sizes.total() / (count - u64::from(low_zero)) + surplus(tree, sizes);
    for (place, gpu) in first.iter_mut().enumerate() {
        if place > 0 || !low_zero {
            lower(gpu, share);
        }
    }
    if low_zero {
        let budgets = first.iter().skip(1).chain([&*last]).filter_map(|gpu| gpu.budget());
        let others = budgets.fold(0, u64::saturating_add);
        lower(first[0], sizes.total().saturating_sub(others));
    }
}

/// Lowers the bytes for weights and leaves the reserve unchanged.
fn lower(gpu: &mut Device, share: u64) {
    let limit = share.saturating_add(gpu.reserve);
    gpu.limit = Some(gpu.limit.map_or(limit, |own| own.min(limit)));
}

/// Returns 1.25 times the larger of the largest unit and the mean of the innermost modules. Without this surplus the
/// last layers would not fit on any GPU.
fn surplus(tree: &ModuleTree, sizes: &Sizes) -> u64 {
    // A module that only has later names of tied weights does not count.
    let mut counts = vec![false; tree.modules.len()];
    for tensor in (0..tree.tensors.len()).filter(|tensor| tree.tensors[*tensor].tied_to.is_none()) {
        for module in tree.around(tensor) {
            counts[module] = true;
        }
    }
    let size = |module: &usize| sizes.of_item(Item::Module(*module));
    let counted = || (0..tree.modules.len()).filter(|module| *module != ROOT && counts[*module]);
    let units = counted().filter(|module| tree.modules[*module].is_unit);
    let largest = units.map(|module| size(&module)).max().unwrap_or(0);
    let has_modules = |module: &usize| tree.modules[*module].children.iter().any(|it| counts[*it]);
    let innermost: Vec<_> =
        counted().filter(|module| !has_modules(module)).map(|it| size(&it)).collect();
    let sum: u128 = innermost.iter().map(|size| u128::from(*size)).sum();
    let mean = (sum / innermost.len().max(1) as u128) as u64;
    (u128::from(largest.max(mean)) * 5 / 4) as u64
}
