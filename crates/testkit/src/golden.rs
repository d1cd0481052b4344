//! Random numbers of golden files, whose field `fill` describes the generator: splitmix64 of an index and a stream.

/// Returns number `index` of a stream, uniform in `[0, 1)`.
///
/// ```
/// assert_eq!(brigade_testkit::golden_unit(0, 0), 0.8833108082136426);
/// ```
#[must_use]
pub fn golden_unit(index: u64, stream: u64) -> f64 {
    let mut z = (index + 1).wrapping_add(stream << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 11) as f64 * 2f64.powi(-53)
}

/// Returns the first `count` numbers of a stream in `[low, high)`, each rounded once.
#[must_use]
pub fn golden_uniform(low: f64, high: f64, stream: u64, count: usize) -> Vec<f32> {
    (0..count as u64)
        .map(|index| (low + (high - low) * golden_unit(index, stream)) as f32)
        .collect()
}
