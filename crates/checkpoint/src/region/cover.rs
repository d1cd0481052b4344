//! Check that chunks cover a tensor exactly once.

use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Checks that chunks, each given by offset and shape within the whole, cover a tensor of this shape exactly once.
///
/// A set of boxes covers a box exactly once if and only if the signed counts of their corners are equal: the corners
/// are the mixed difference of how often each element is covered. The time is proportional to the number of chunks,
/// unlike a comparison of all pairs.
pub(crate) fn check_cover<'c>(
    whole: &[u64],
    chunks: impl Iterator<Item = (&'c [u64], &'c [u64])> + Clone,
) -> Result<(), String> {
    // A dimension that all chunks span needs no comparison.
    let cut: Vec<usize> = (0..whole.len())
        .filter(|&dim| chunks.clone().any(|(_, shape)| shape[dim] != whole[dim]))
        .collect();
    if cut.len() > MAX_CUT_DIMS {
        return Err(format!(
            "it is cut along {} dimensions, at most {MAX_CUT_DIMS} are supported",
            cut.len()
        ));
    }
    let mut corners: BTreeMap<Vec<u64>, i64> = BTreeMap::new();
    let mut count = |offset: &dyn Fn(usize) -> u64, shape: &[u64], sign: i64| {
        if shape.contains(&0) {
            return;
        }
        for corner in 0..1u32 << cut.len() {
            let far = |place: usize| corner >> place & 1 == 1;
            let at = cut
                .iter()
                .enumerate()
                .map(|(place, &dim)| offset(dim) + if far(place) { shape[dim] } else { 0 });
            let sign = if corner.count_ones() % 2 == 0 { sign } else { -sign };
            *corners.entry(at.collect()).or_default() += sign;
        }
    };
    count(&|_| 0, whole, 1);
    for (offset, shape) in chunks.clone() {
        count(&|dim| offset[dim], shape, -1);
    }
    if corners.values().all(|&count| count == 0) {
        return Ok(());
    }
    let elements = |shape: &[u64]| {
        shape.iter().fold(1u128, |product, &size| product.saturating_mul(size.into()))
    };
    let stored = chunks.fold(0u128, |sum, (_, shape)| sum.saturating_add(elements(shape)));
    let whole = elements(whole);
    let fault = match stored.cmp(&whole) {
        Ordering::Less => "leave a gap",
        Ordering::Greater => "overlap",
        Ordering::Equal => "overlap and leave a gap",
    };
    Err(format!("its chunks {fault}: {stored} elements are stored of {whole}"))
}

/// Maximum number of cut dimensions. Each doubles the corners of a chunk. Data, tensor and expert parallelism together
/// cut along three.
const MAX_CUT_DIMS: usize = 4;
