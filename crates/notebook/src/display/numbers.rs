//! Numbers in tables, all of one in the same form.

/// Writes whole numbers with a point, others with four digits behind it, and very large or small ones with an exponent.
pub(super) fn reals(values: &[f64]) -> Vec<String> {
    let finite = || values.iter().filter(|value| value.is_finite());
    let greatest = finite().fold(0.0_f64, |greatest, value| greatest.max(value.abs()));
    let is_whole = finite().all(|value| value.fract() == 0.0);
    let write = |value: &f64| match () {
        () if !value.is_finite() => value.to_string(),
        () if greatest >= 1e6 || (greatest < 1e-2 && greatest > 0.0) => format!("{value:.4e}"),
        () if is_whole => format!("{value:.1}"),
        () => format!("{value:.4}"),
    };
    values.iter().map(write).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_numbers_have_one_form() {
        for (values, texts) in [
            ([1.0, -2.0, 0.0], ["1.0", "-2.0", "0.0"]),
            ([0.123_456, f64::NAN, -40.0], ["0.1235", "NaN", "-40.0000"]),
            ([2e-5, f64::NEG_INFINITY, 0.0], ["2.0000e-5", "-inf", "0.0000e0"]),
            ([2.5e7, 1.0, 0.0], ["2.5000e7", "1.0000e0", "0.0000e0"]),
        ] {
            assert_eq!(reals(&values), texts);
        }
    }
}
