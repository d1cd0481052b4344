//! Axes: their ranges and ticks.

use serde::Serialize;

/// Horizontal or vertical axis of a [`Chart`](crate::Chart).
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
#[non_exhaustive]
pub struct Axis {
    /// Label of the axis: the quantity with its unit.
    pub label: String,
    /// Scale of the axis: linear or logarithmic.
    pub scale: Scale,
    /// Range of the axis, from its first value to its last. Points outside are cut off. Defaults to the range of all
    /// finite points.
    pub range: Option<(f64, f64)>,
}

/// Scale of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Scale {
    /// Linear scale: equal differences have equal distances.
    #[default]
    Linear,
    /// Logarithmic scale: equal ratios have equal distances. Values that are not above zero are not drawn.
    Log10,
}

/// Range of an axis after it is resolved. Both ends are finite and in order, and above zero on a logarithmic scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Span {
    low: f64,
    high: f64,
    scale: Scale,
    /// `true` if all values are whole numbers, so that ticks between them would mislead.
    whole: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tick {
    pub(crate) value: f64,
    pub(crate) label: String,
}

impl Axis {
    /// Computes the range for these values, with a margin around them.
    pub(crate) fn span(&self, values: impl Iterator<Item = f64>) -> Span {
        let scale = self.scale;
        if let Some((first, last)) = self.range
            && let (Some(first), Some(last)) = (scale.usable(first), scale.usable(last))
        {
            return Span::new(first.min(last), first.max(last), scale, false, 0.0);
        }
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        let mut whole = true;
        for value in values.filter_map(|value| scale.usable(value)) {
            (low, high) = (low.min(value), high.max(value));
            whole &= value.fract() == 0.0;
        }
        match scale {
            _ if low <= high => Span::new(low, high, scale, whole, ROOM),
            Scale::Linear => Span::new(0.0, 1.0, scale, false, 0.0),
            Scale::Log10 => Span::new(0.1, 1.0, scale, false, 0.0),
        }
    }
}

impl Scale {
    /// Returns the value if an axis can show it.
    fn usable(self, value: f64) -> Option<f64> {
        let shown = value.is_finite() && (self == Self::Linear || value > 0.0);
        shown.then(|| value.clamp(-LARGEST, LARGEST))
    }

    fn forward(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Log10 => value.log10(),
        }
    }

    fn back(self, place: f64) -> f64 {
        match self {
            Self::Linear => place,
            Self::Log10 => 10f64.powf(place),
        }
    }
}

impl Span {
    /// Widens a range that is empty or too short: a single number, or several that a float can hardly distinguish.
    fn new(low: f64, high: f64, scale: Scale, whole: bool, room: f64) -> Self {
        let (mut first, mut last) = (scale.forward(low), scale.forward(high));
        let size = first.abs().max(last.abs());
        let margin = match scale {
            _ if last - first > size * 1e-9 => (last - first) * room,
            Scale::Linear if size == 0.0 => 1.0,
            Scale::Linear => size * 0.1,
            Scale::Log10 => 0.5,
        };
        (first, last) = (first - margin, last + margin);
        Self { low: first, high: last, scale, whole }
    }

    /// Returns the position of a value: 0 at the lower end, 1 at the upper one, and less or more outside.
    pub(crate) fn place(&self, value: f64) -> Option<f64> {
        let value = self.scale.usable(value)?;
        Some((self.scale.forward(value) - self.low) / (self.high - self.low))
    }

    /// Returns at most this many ticks with their labels, from the lower end.
    pub(crate) fn ticks(&self, most: usize) -> Vec<Tick> {
        let most = most.max(1);
        if self.scale == Scale::Log10 {
            let decades = (self.high - self.low).max(0.0);
            if decades >= 1.0 {
                return self.decades(most);
            }
            // Less than a decade: round numbers, whose distances differ.
            let (low, high) = (self.scale.back(self.low), self.scale.back(self.high));
            let linear = Self { low, high, scale: Scale::Linear, whole: self.whole };
            return linear.ticks(most);
        }
        let mut step = round_step((self.high - self.low) / most as f64);
        if self.whole {
            step = step.max(1.0);
        }
        let first = (self.low / step).ceil();
        let count = ((self.high / step).floor() - first).clamp(-1.0, 2.0 * most as f64) as i64;
        let values = (0..=count).map(|index| (first + index as f64) * step);
        let size = self.low.abs().max(self.high.abs());
        values.map(|value| Tick { value, label: label(value, step, size) }).collect()
    }

    /// Returns powers of ten, or every second, third, … of them; 1, 2 and 5 times each where they are few.
    fn decades(&self, most: usize) -> Vec<Tick> {
        let (first, last) = (self.low.ceil() as i64, self.high.floor() as i64);
        let count = (last - first + 1).max(1);
        let every = (count as usize).div_ceil(most) as i64;
        let parts: &[f64] = if count as usize * 3 <= most { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let mut ticks = Vec::new();
        for exponent in (first - 1..=last).filter(|it| it.rem_euclid(every) == 0) {
            for part in parts {
                let value = part * power(exponent);
                if self.contains(value) {
                    ticks.push(Tick { value, label: plain_or_exponent(value) });
                }
            }
        }
        ticks
    }

    /// Returns the values of the unlabelled ticks of a logarithmic scale: 2 to 9 times each power of ten.
    pub(crate) fn minor(&self) -> Vec<f64> {
        if self.scale == Scale::Linear || self.high - self.low > 12.0 {
            return Vec::new();
        }
        let exponents = self.low.floor() as i64..=self.high.floor() as i64;
        let of = |exponent: i64| (2..10).map(move |part| f64::from(part) * power(exponent));
        exponents.flat_map(of).filter(|value| self.contains(*value)).collect()
    }

    fn contains(&self, value: f64) -> bool {
        self.place(value).is_some_and(|place| (0.0..=1.0).contains(&place))
    }
}

/// 10^exponent, correctly rounded: the result of `powi` is off by some bits.
fn power(exponent: i64) -> f64 {
    format!("1e{exponent}").parse().unwrap_or(f64::NAN)
}

/// Returns the smallest 1, 2 or 5 times a power of ten that is at least this.
fn round_step(least: f64) -> f64 {
    let exponent = least.max(f64::MIN_POSITIVE).log10().floor() as i64;
    let of = |part: f64, exponent| part * power(exponent);
    let steps = [of(1.0, exponent), of(2.0, exponent), of(5.0, exponent)];
    steps.into_iter().find(|step| *step >= least).unwrap_or_else(|| power(exponent + 1))
}

/// Formats a number with as many digits as the step between the ticks needs.
fn label(value: f64, step: f64, size: f64) -> String {
    let value = if value.abs() < step / 2.0 { 0.0 } else { value };
    let digit = |value: f64| value.log10().floor() as i64;
    let step_digit = digit(step * 1.000_001);
    if value == 0.0 {
        return "0".to_owned();
    }
    if (1e-3..1e6).contains(&size) {
        return format!("{value:.*}", (-step_digit).clamp(0, 12) as usize);
    }
    let digits = (digit(value.abs() * 1.000_001) - step_digit).clamp(0, 12);
    let text = format!("{value:.*e}", digits as usize);
    short_mantissa(&text)
}

/// Shortens `1.50e-4` to `1.5e-4`.
fn short_mantissa(text: &str) -> String {
    match text.split_once('e') {
        Some((mantissa, exponent)) if mantissa.contains('.') => {
            format!("{}e{exponent}", mantissa.trim_end_matches('0').trim_end_matches('.'))
        }
        _ => text.to_owned(),
    }
}

/// Formats a number with few digits, for a logarithmic tick, a cell or a marker.
pub(crate) fn plain_or_exponent(value: f64) -> String {
    if value == 0.0 || (1e-3..1e5).contains(&value.abs()) {
        let digits = (3 - value.abs().max(1e-3).log10().floor() as i64).clamp(0, 6);
        let text = format!("{value:.*}", digits as usize);
        return if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text
        };
    }
    if !value.is_finite() {
        return value.to_string();
    }
    short_mantissa(&format!("{value:.3e}"))
}

/// Margin at each end of an axis, as a part of its length.
const ROOM: f64 = 0.04;
/// Largest value. Differences of larger ones would be infinite.
const LARGEST: f64 = 1e300;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn labels(scale: Scale, values: &[f64], most: usize) -> Vec<String> {
        let axis = Axis { scale, ..Axis::default() };
        let ticks = axis.span(values.iter().copied()).ticks(most);
        ticks.into_iter().map(|tick| tick.label).collect()
    }

    #[test]
    fn ticks_are_round_numbers() {
        let linear = |values: &[f64], most| labels(Scale::Linear, values, most);
        assert_eq!(linear(&[0.13, 2.31], 6), ["0.5", "1.0", "1.5", "2.0"]);
        assert_eq!(linear(&[0.0, 1000.0], 5), ["0", "500", "1000"]);
        assert_eq!(linear(&[-1.1, 1.1], 5), ["-1.0", "-0.5", "0", "0.5", "1.0"]);
        assert_eq!(linear(&[1.0, 2.0, 3.0], 10), ["1", "2", "3"]);
        assert_eq!(linear(&[0.0, 3e-5], 4), ["0", "1e-5", "2e-5", "3e-5"]);
        assert_eq!(linear(&[1e6, 3.1e6], 5), ["1e6", "1.5e6", "2e6", "2.5e6", "3e6"]);
        assert_eq!(linear(&[0.993, 0.9951], 4), ["0.993", "0.994", "0.995"]);
        assert_eq!(linear(&[5.0], 3), ["5"]);
        assert_eq!(linear(&[0.0], 3), ["-1", "0", "1"]);
        assert_eq!(linear(&[], 4), ["0", "0.5", "1.0"]);
        assert_eq!(linear(&[f64::NAN, f64::INFINITY], 4), ["0", "0.5", "1.0"]);
        let huge = linear(&[-f64::MAX, f64::MAX], 4);
        assert_eq!(huge, ["-1e300", "0", "1e300"]);
    }

    #[test]
    fn a_logarithm_has_powers_of_ten() {
        let log = |values: &[f64], most| labels(Scale::Log10, values, most);
        assert_eq!(
            log(&[1e-7, 10.0], 10),
            ["1e-7", "1e-6", "1e-5", "1e-4", "0.001", "0.01", "0.1", "1", "10"]
        );
        assert_eq!(log(&[1e-7, 10.0], 5), ["1e-6", "1e-4", "0.01", "1"]);
        assert_eq!(log(&[1.0, 90.0], 9), ["1", "2", "5", "10", "20", "50", "100"]);
        assert_eq!(log(&[2.0, 4.0], 4), ["2", "3", "4"]);
        assert_eq!(log(&[0.0, -1.0], 4), ["0.1", "1"]);
        assert_eq!(log(&[0.0, 1e-3], 4), ["5e-4", "0.001", "0.002"]);
        let axis = Axis { scale: Scale::Log10, ..Axis::default() };
        let span = axis.span([1e-7, 10.0].into_iter());
        // 2 to 9 of eight powers, five below 1e-7 and one above 10.
        assert_eq!(span.minor().len(), 8 * 8 + 5 + 1);
        assert_eq!(span.place(0.0), None);
        assert!((span.place(1e-3).unwrap() - 0.5).abs() < 1e-9);
    }

    #[test]
    fn a_range_that_is_given_is_kept() {
        let axis = Axis { range: Some((10.0, 0.0)), ..Axis::default() };
        let span = axis.span([1e9].into_iter());
        assert_eq!((span.place(0.0), span.place(10.0)), (Some(0.0), Some(1.0)));
        let useless = Axis { range: Some((f64::NAN, 1.0)), ..Axis::default() };
        assert_eq!(useless.span([2.0].into_iter()), Axis::default().span([2.0].into_iter()));
    }

    #[test]
    fn numbers_are_written_short() {
        for (value, text) in [
            (0.0, "0"),
            (1.0, "1"),
            (0.25, "0.25"),
            (12345.678, "12346"),
            (1e-7, "1e-7"),
            (2.512e-3, "0.002512"),
            (-1.5e20, "-1.5e20"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(plain_or_exponent(value), text);
        }
    }

    proptest! {
        #[test]
        fn ticks_lie_within_and_differ(
            values in prop::collection::vec(any::<f64>(), 0..5), most in 1_usize..12, log in any::<bool>()
        ) {
            let scale = if log { Scale::Log10 } else { Scale::Linear };
            let axis = Axis { scale, ..Axis::default() };
            let span = axis.span(values.into_iter());
            let ticks = span.ticks(most);
            prop_assert!(ticks.len() <= most + 2, "{ticks:?}");
            for pair in ticks.windows(2) {
                prop_assert!(pair[0].value < pair[1].value && pair[0].label != pair[1].label, "{ticks:?}");
            }
            for tick in &ticks {
                let place = span.place(tick.value).unwrap();
                prop_assert!((-1e-9..=1.0 + 1e-9).contains(&place), "{ticks:?}");
            }
        }
    }
}
