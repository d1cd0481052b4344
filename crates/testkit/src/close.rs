//! Comparison of numbers that were summed in different orders.

/// Panics unless `|actual - expected| <= atol + rtol · |expected|` for every element and the lengths are equal, as
/// numpy's `allclose`. Two NaNs are close, as are two equal infinities.
///
/// The message names the element that is furthest beyond its bound.
///
/// ```
/// use brigade_testkit::assert_close;
/// assert_close(&[1.0, 2.0 + 1e-9], &[1.0, 2.0], 1e-6, 0.0);
/// ```
///
/// # Panics
///
/// Panics when the numbers are not close.
#[track_caller]
pub fn assert_close(actual: &[f64], expected: &[f64], rtol: f64, atol: f64) {
    assert!(
        actual.len() == expected.len(),
        "{} numbers where {} were expected",
        actual.len(),
        expected.len()
    );
    let excess = |(a, e): (f64, f64)| {
        let bound = atol + rtol * e.abs();
        match (a - e).abs() - bound {
            _ if a == e || (a.is_nan() && e.is_nan()) => f64::NEG_INFINITY,
            excess if excess.is_nan() => f64::INFINITY,
            excess => excess,
        }
    };
    let pairs = || actual.iter().copied().zip(expected.iter().copied());
    let far = pairs().filter(|&pair| excess(pair) > 0.0).count();
    let worst = pairs().enumerate().max_by(|a, b| excess(a.1).total_cmp(&excess(b.1)));
    if let Some((index, (a, e))) = worst.filter(|_| far > 0) {
        panic!(
            "{far} of {} numbers are not close; the worst is [{index}]: {a:?} where {e:?} was \
             expected, off by {:e}, allowed {:e} (rtol {rtol:e}, atol {atol:e})",
            actual.len(),
            (a - e).abs(),
            atol + rtol * e.abs(),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    fn refusal(actual: &[f64], expected: &[f64], rtol: f64, atol: f64) -> String {
        let panic = catch_unwind(|| assert_close(actual, expected, rtol, atol)).unwrap_err();
        panic.downcast_ref::<String>().unwrap().clone()
    }

    #[test]
    fn accepts() {
        assert_close(&[], &[], 0.0, 0.0);
        assert_close(&[1.0, -2.0], &[1.0, -2.0], 0.0, 0.0);
        assert_close(&[1.001], &[1.0], 0.0, 0.01);
        assert_close(&[-100.1], &[-100.0], 0.01, 0.0);
        assert_close(&[f64::NAN, f64::INFINITY], &[f64::NAN, f64::INFINITY], 0.0, 0.0);
    }

    #[test]
    fn refuses_and_names_the_worst() {
        let message = refusal(&[1.0, 2.5, 9.0, 4.0], &[1.0, 2.0, 3.0, 4.0], 0.0, 0.1);
        assert!(
            message.starts_with("2 of 4 numbers are not close; the worst is [2]: 9.0 where 3.0")
        );
        assert!(refusal(&[f64::NAN], &[1.0], 1.0, 1.0).contains("the worst is [0]: NaN where 1.0"));
        assert!(refusal(&[1.0], &[f64::NAN], 1.0, 1.0).contains("[0]: 1.0 where NaN"));
        assert!(refusal(&[1.0], &[f64::INFINITY], 1.0, 1.0).contains("[0]: 1.0 where inf"));
        assert!(refusal(&[f64::INFINITY], &[-f64::INFINITY], 1.0, 1.0).contains("[0]"));
        assert_eq!(refusal(&[1.0], &[], 1.0, 1.0), "1 numbers where 0 were expected");
    }
}
