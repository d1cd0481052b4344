//! Lists of numbers, and schedules, as charts.

use brigade_plot::{Chart, Grid};
use brigade_schedule::LrSchedule;

/// Values that [`curve`] plots: a list, or one for each rank as `notebook_launcher` returns them.
pub trait Curves {
    /// Returns the values of each line.
    #[must_use]
    fn lines(&self) -> Vec<Vec<f64>>;
}

impl Curves for [f64] {
    fn lines(&self) -> Vec<Vec<f64>> {
        vec![self.to_vec()]
    }
}

impl Curves for [f32] {
    fn lines(&self) -> Vec<Vec<f64>> {
        vec![self.iter().map(|it| f64::from(*it)).collect()]
    }
}

impl<T> Curves for [Vec<T>]
where
    [T]: Curves,
{
    fn lines(&self) -> Vec<Vec<f64>> {
        self.iter().flat_map(|list| list.as_slice().lines()).collect()
    }
}

impl<T> Curves for Vec<T>
where
    [T]: Curves,
{
    fn lines(&self) -> Vec<Vec<f64>> {
        self.as_slice().lines()
    }
}

impl<T, const N: usize> Curves for [T; N]
where
    [T]: Curves,
{
    fn lines(&self) -> Vec<Vec<f64>> {
        self.as_slice().lines()
    }
}

/// Plots values by their index, from 0: a line for a list, or one for each rank for the result of a launch.
///
/// ```
/// use brigade_notebook::display::curve;
///
/// let losses = vec![vec![2.3, 1.1, 0.6], vec![2.2, 1.2, 0.5]]; // notebook_launcher(train, args, 2)?
/// let chart = curve("Loss", &losses).log_y();
/// assert_eq!(chart.series[1].name, "rank 1");
/// ```
#[must_use]
pub fn curve<C: Curves + ?Sized>(title: &str, values: &C) -> Chart {
    let lines = values.lines();
    let is_one = lines.len() == 1;
    let mut chart = Chart::new(title).x("step").y(title.to_lowercase());
    for (rank, values) in lines.into_iter().enumerate() {
        let name = if is_one { title.to_lowercase() } else { format!("rank {rank}") };
        chart = chart.line(name, values.into_iter().enumerate().map(|(at, it)| (at as f64, it)));
    }
    chart
}

/// Plots learning rate and momentum of the first `steps` steps of a schedule.
///
/// ```
/// use brigade_notebook::display::schedule_plot;
/// use brigade_schedule::{OneCycle, Schedule};
///
/// let schedule = Schedule::one_cycle(OneCycle::new(0.1, 100))?;
/// let plot = schedule_plot(&schedule, 100);
/// assert_eq!(plot.panels.len(), 2); // The momentum goes the other way.
/// # Ok::<(), brigade_schedule::ScheduleError>(())
/// ```
#[must_use]
pub fn schedule_plot(schedule: &(impl LrSchedule + ?Sized), steps: u64) -> Grid {
    let rates = (0..steps).map(|step| (step as f64, schedule.lr(step)));
    let rate = Chart::new("Learning rate").x("step").y("rate").line("rate", rates);
    let momenta: Vec<(f64, f64)> =
        (0..steps).filter_map(|step| Some((step as f64, schedule.momentum(step)?))).collect();
    let grid = Grid::new("Schedule").panel(rate);
    if momenta.is_empty() {
        grid
    } else {
        let momentum = Chart::new("Momentum").x("step").y("momentum");
        grid.panel(momentum.line("momentum", momenta))
    }
}

#[cfg(test)]
mod tests {
    use brigade_plot::Panel;

    use super::*;

    #[test]
    fn lists_are_lines_by_their_places() {
        let chart = curve("Loss", &[0.5f32, 0.25]);
        assert_eq!(chart.series.len(), 1);
        assert_eq!(chart.series[0].points, [(0.0, 0.5), (1.0, 0.25)]);
        let ranks = curve("Loss", &vec![vec![1.0, 2.0], vec![3.0]]);
        let names: Vec<&str> = ranks.series.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["rank 0", "rank 1"]);
        assert_eq!(ranks.series[1].points, [(0.0, 3.0)]);
    }

    #[test]
    fn a_schedule_without_momentum_has_one_panel() {
        let plot = schedule_plot(&|step: u64| 1.0 / (step + 1) as f64, 3);
        assert_eq!(plot.panels.len(), 1);
        let Panel::Chart(chart) = &plot.panels[0] else { panic!("{plot:?}") };
        assert_eq!(chart.series[0].points, [(0.0, 1.0), (1.0, 0.5), (2.0, 1.0 / 3.0)]);
    }
}
