//! Grouping of a report's curves into charts.

use brigade_plot::Chart;
use indexmap::IndexMap;

use super::best::Best;
use super::record::Record;

/// Returns charts of the values by epoch: losses in one chart, each metric in its own.
pub(super) fn of_epochs(record: &Record, best: Option<&Best>) -> Vec<Chart> {
    let epochs = &record.epochs;
    if epochs.len() < 2 {
        return Vec::new();
    }
    let names = groups(epochs.metrics());
    let chart = |(group, names): (String, Vec<&str>)| {
        let mut chart = names
            .iter()
            .fold(chart(&group, "epoch"), |chart, name| chart.line(*name, epochs.points(name)));
        if let Some(best) = best.filter(|it| names.contains(&it.monitor.as_str()))
            && let Some(epoch) = best.epoch
        {
            chart = chart.point(epoch, best.value, "best");
        }
        with_axis(chart)
    };
    names.into_iter().map(chart).collect()
}

/// Returns charts of the values by step: those about training, and those about the machine.
pub(super) fn of_steps(record: &Record) -> (Vec<Chart>, Vec<Chart>) {
    // A single number is not a curve; the table of values contains it.
    let curves = record.series.iter().filter(|(_, series)| series.points.len() > 1);
    let (machine, training): (Vec<&str>, Vec<&str>) =
        curves.map(|(name, _)| name.as_str()).partition(|name| is_of_machine(name));
    let all = |names: Vec<&str>| {
        let groups = groups(names.into_iter()).into_iter();
        groups.map(|(group, names)| step_chart(record, &group, &names)).collect()
    };
    (all(training), all(machine))
}

fn step_chart(record: &Record, group: &str, names: &[&str]) -> Chart {
    let series = names.iter().filter_map(|name| Some((*name, record.series.get(*name)?)));
    let has_steps = series.clone().all(|(_, series)| series.has_steps);
    let axis = if has_steps { "step" } else { "line" };
    let mut chart = series.fold(chart(group, axis), |chart, (name, series)| {
        chart.line(name, series.points.iter().copied())
    });
    // Marks where the run was resumed; with many starts the labels would hide the curves.
    if has_steps && record.starts.len() <= MOST_STARTS {
        for (index, start) in record.starts.iter().enumerate().skip(1) {
            if let Some(step) = start.step {
                chart = chart.vertical(step as f64, format!("start {}", index + 1));
            }
        }
    }
    with_axis(chart)
}

fn chart(title: &str, axis: &str) -> Chart {
    Chart::new(title).x(axis).size(560, 320)
}

/// Chooses a logarithmic axis if the greatest value is far above most: otherwise one outlier would flatten the curve. A
/// single series with the chart's own title needs no name.
fn with_axis(mut chart: Chart) -> Chart {
    if let [series] = chart.series.as_mut_slice()
        && series.name == chart.title
    {
        series.name.clear();
    }
    let points = chart.series.iter().flat_map(|series| &series.points);
    let mut values: Vec<f64> = points.map(|point| point.1).filter(|it| it.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    if let (Some(least), Some(greatest)) = (values.first(), values.last())
        && *least > 0.0
        && *greatest > 1e4 * values[values.len() / 2]
    {
        return chart.log_y();
    }
    chart
}

/// Groups names that are comparable: `lr` and `lr_0`, `train/loss` and `valid/loss`, `train_loss` and `valid_loss`,
/// peak and current memory. Each group has a title, in the order of first occurrence.
fn groups<'a>(names: impl Iterator<Item = &'a str>) -> Vec<(String, Vec<&'a str>)> {
    let mut groups: IndexMap<String, Vec<&str>> = IndexMap::new();
    for name in names {
        groups.entry(group_of(name)).or_default().push(name);
    }
    // A group of one has its own name.
    let title = |(group, names): (String, Vec<&'a str>)| match names.as_slice() {
        [name] => ((*name).to_owned(), names),
        _ => (group, names),
    };
    groups.into_iter().map(title).collect()
}

fn group_of(name: &str) -> String {
    let name = name.rsplit('/').next().unwrap_or(name);
    let stem = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
    let name = if stem.len() < name.len() { stem.strip_suffix('_').unwrap_or(name) } else { name };
    let parts = ["train_", "valid_", "val_", "eval_", "test_", "slowest_", "resident_", "peak_"];
    let part = parts.iter().find_map(|part| name.strip_prefix(part));
    match part {
        Some("mib") => "memory (MiB)".to_owned(),
        part => part.unwrap_or(name).to_owned(),
    }
}

/// Returns `true` for rates, times and memory.
fn is_of_machine(name: &str) -> bool {
    let name = name.rsplit('/').next().unwrap_or(name);
    name.starts_with("gpu_")
        || name.starts_with("cpu_")
        || ["_per_second", "_ms", "_mib", "_gib", "_bytes", "_seconds"]
            .iter()
            .any(|end| name.ends_with(end))
}

const MOST_STARTS: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_compared_is_in_one_chart() {
        let names = [
            "loss",
            "lr_0",
            "lr_1",
            "train/loss",
            "f1",
            "train_loss",
            "resident_mib",
            "peak_mib",
            "step_ms",
            "slowest_step_ms",
            "layer3_norm",
        ];
        let found: Vec<(String, usize)> = groups(names.into_iter())
            .into_iter()
            .map(|(group, names)| (group, names.len()))
            .collect();
        let expected = [
            ("loss", 3),
            ("lr", 2),
            ("f1", 1),
            ("memory (MiB)", 2),
            ("step_ms", 2),
            ("layer3_norm", 1),
        ];
        assert_eq!(found, expected.map(|(group, count)| (group.to_owned(), count)));
        assert!(is_of_machine("samples_per_second") && is_of_machine("a/gpu_load"));
        assert!(!is_of_machine("loss") && !is_of_machine("momentum"));
    }

    #[test]
    fn an_outlier_makes_the_axis_logarithmic() {
        let points =
            |last: f64| (0..100).map(move |at| (f64::from(at), if at == 99 { last } else { 1.0 }));
        let scale = |last| with_axis(Chart::new("a").line("a", points(last))).y.scale;
        assert_eq!(scale(1e9), brigade_plot::Scale::Log10);
        assert_eq!(
            (scale(9.0), scale(-1e9)),
            (brigade_plot::Scale::Linear, brigade_plot::Scale::Linear)
        );
    }
}
