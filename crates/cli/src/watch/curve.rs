//! Logged value over a run, in bounded memory.

/// Values of one name. Beyond [`Curve::MOST`] points, neighbours are merged in pairs: a point keeps the lowest, the
/// highest and the mean of its values, so that a spike stays visible in a run of millions of lines.
#[derive(Debug, Clone, Default)]
pub(super) struct Curve {
    points: Vec<Point>,
    /// Number of values per point.
    stride: u32,
    last: Option<f64>,
    count: u64,
    non_finite: u64,
}

/// Summary of consecutive values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    /// Step of the first value.
    pub(super) step: f64,
    /// Time of the first value in seconds since 1970; NaN if its line had none.
    pub(super) time: f64,
    /// Lowest finite value, or infinity if none is finite.
    pub(super) low: f64,
    /// Highest finite value, or minus infinity.
    pub(super) high: f64,
    sum: f64,
    finite: u32,
    values: u32,
}

impl Point {
    /// Returns the mean of the finite values; `None` if none is finite.
    pub(super) fn mean(&self) -> Option<f64> {
        (self.finite > 0).then(|| self.sum / f64::from(self.finite))
    }

    fn merge(&mut self, next: Self) {
        self.low = self.low.min(next.low);
        self.high = self.high.max(next.high);
        self.sum += next.sum;
        self.finite += next.finite;
        self.values += next.values;
    }
}

impl Curve {
    /// Maximum number of points per curve: twice the dots of a chart on a very wide terminal.
    pub(super) const MOST: usize = 2048;

    pub(super) fn push(&mut self, step: f64, time: f64, value: f64) {
        self.last = Some(value);
        self.count += 1;
        let is_finite = value.is_finite();
        self.non_finite += u64::from(!is_finite);
        let point = Point {
            step,
            time,
            low: if is_finite { value } else { f64::INFINITY },
            high: if is_finite { value } else { f64::NEG_INFINITY },
            sum: if is_finite { value } else { 0.0 },
            finite: u32::from(is_finite),
            values: 1,
        };
        match self.points.last_mut().filter(|last| last.values < self.stride) {
            Some(last) => last.merge(point),
            None => self.points.push(point),
        }
        if self.points.len() > Self::MOST {
            self.halve();
        }
    }

    fn halve(&mut self) {
        self.stride = self.stride.max(1).saturating_mul(2);
        let merged = self.points.chunks(2).map(|pair| {
            let mut point = pair[0];
            pair[1..].iter().for_each(|next| point.merge(*next));
            point
        });
        self.points = merged.collect();
    }

    /// Removes the values of this step and later ones: a run that is resumed from a checkpoint logs its steps again.
    pub(super) fn rewind(&mut self, step: f64) {
        while let Some(last) = self.points.pop_if(|last| last.step >= step) {
            self.count -= u64::from(last.values);
            self.non_finite -= u64::from(last.values - last.finite);
        }
        self.last = self.last.filter(|_| !self.points.is_empty());
    }

    pub(super) fn points(&self) -> &[Point] {
        &self.points
    }

    /// Returns the value that was logged last.
    pub(super) fn last(&self) -> Option<f64> {
        self.last
    }

    /// Returns the number of values.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the number of values that are NaN or infinite.
    pub(super) fn non_finite(&self) -> u64 {
        self.non_finite
    }

    /// Returns the exponential moving average at each point, with TensorBoard's correction of the initial bias.
    /// `weight` is 0 to 1. A point of several values counts as that many of their mean. `None` for a point without a
    /// finite value.
    pub(super) fn smoothed(&self, weight: f64) -> Vec<Option<f64>> {
        let (mut average, mut bias) = (0.0, 1.0);
        let smooth = |point: &Point| {
            let mean = point.mean()?;
            let kept = weight.powf(f64::from(point.finite));
            average = kept * average + (1.0 - kept) * mean;
            bias *= kept;
            Some(average / (1.0 - bias))
        };
        self.points.iter().map(smooth).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(values: impl IntoIterator<Item = f64>) -> Curve {
        let mut curve = Curve::default();
        for (step, value) in values.into_iter().enumerate() {
            curve.push(step as f64, 1000.0 + step as f64, value);
        }
        curve
    }

    #[test]
    fn a_spike_among_a_million_values_stays() {
        let spike = 777_777;
        let curve =
            curve((0..1_000_000).map(|it| if it == spike { 50.0 } else { f64::from(it % 7) }));
        assert!(curve.points().len() <= Curve::MOST, "{}", curve.points().len());
        assert!(curve.points().len() > Curve::MOST / 4);
        assert_eq!((curve.count(), curve.last()), (1_000_000, Some(f64::from(999_999 % 7))));
        let high = curve.points().iter().position(|point| point.high == 50.0).unwrap();
        let (before, after) = (curve.points()[high].step, curve.points()[high + 1].step);
        assert!((before..after).contains(&f64::from(spike)), "{before} {after}");
        assert!(curve.points().iter().all(|point| point.low == 0.0));
        let values: u32 = curve.points().iter().map(|point| point.values).sum();
        assert_eq!(values, 1_000_000);
        let total: f64 = curve.points().iter().map(|point| point.sum).sum();
        let expected: f64 = (0..1_000_000).map(|it| f64::from(it % 7)).sum();
        assert!((total - expected - (50.0 - f64::from(spike % 7))).abs() < 1e-6);
    }

    #[test]
    fn smoothing_is_that_of_tensorboard() {
        // Results of TensorBoard's own Python function, for [1, 2, 3, 10] with a weight of 0.6.
        let expected = [1.0, 1.625, 2.326_530_612_244_898, 5.852_941_176_470_588];
        for (found, expected) in curve([1.0, 2.0, 3.0, 10.0]).smoothed(0.6).iter().zip(expected) {
            assert!((found.unwrap() - expected).abs() < 1e-12, "{found:?} {expected}");
        }
        let constant = curve([0.25; 9]).smoothed(0.99);
        assert!(constant.iter().all(|it| (it.unwrap() - 0.25).abs() < 1e-12), "{constant:?}");
        let raw = curve([1.0, 2.0, 3.0]).smoothed(0.0);
        assert_eq!(raw, [Some(1.0), Some(2.0), Some(3.0)]);
    }

    #[test]
    fn what_is_not_finite_is_counted_and_leaves_a_gap() {
        let curve = curve([1.0, f64::NAN, f64::INFINITY, 3.0]);
        assert_eq!((curve.count(), curve.non_finite()), (4, 2));
        let smoothed = curve.smoothed(0.5);
        assert_eq!((smoothed[1], smoothed[2]), (None, None));
        assert!((smoothed[3].unwrap() - (0.25 + 1.5) / 0.75).abs() < 1e-12);
    }

    #[test]
    fn a_run_that_goes_on_logs_steps_again() {
        let mut curve = curve([0.0, 1.0, 2.0, f64::NAN, 4.0]);
        curve.rewind(2.0);
        assert_eq!((curve.count(), curve.non_finite()), (2, 0));
        curve.push(2.0, 2000.0, 20.0);
        let means: Vec<_> = curve.points().iter().map(Point::mean).collect();
        assert_eq!(means, [Some(0.0), Some(1.0), Some(20.0)]);
    }
}
