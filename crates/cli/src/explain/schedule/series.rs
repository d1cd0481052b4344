//! Columns of numbers to show, with one row per step.

use std::io::{self, Write};

use anyhow::{Result, bail};
use brigade_rank_env::text::counted;

use super::ScheduleArgs;
use super::named::BuiltSchedule;

/// Rows and names of the columns.
#[derive(Debug)]
pub(super) struct Series {
    name: &'static str,
    /// Meaning of a row, such as a step.
    pub(super) row: &'static str,
    pub(super) columns: Vec<Column>,
}

/// Values of one curve.
#[derive(Debug)]
pub(super) struct Column {
    pub(super) name: &'static str,
    pub(super) values: Vec<f64>,
}

impl Series {
    pub(super) fn of(args: &ScheduleArgs) -> Result<Self> {
        let name = args.named.name();
        match args.named.make(&args.modifiers)? {
            BuiltSchedule::Steps { schedule, steps } => {
                let stride = args.accelerate_nproc.unwrap_or(1);
                let count = args.show.unwrap_or_else(|| steps.div_ceil(stride));
                let steps = || (0..count).map(|row| row * stride);
                let lr = steps().map(|step| schedule.lr(step)).collect();
                let mut columns = vec![Column { name: "lr", values: lr }];
                if steps().any(|step| schedule.momentum(step).is_some()) {
                    // Parts of a sequence may set no momentum: there is no value to show.
                    let value = |step| schedule.momentum(step).unwrap_or(f64::NAN);
                    columns.push(Column { name: "momentum", values: steps().map(value).collect() });
                }
                Ok(Self { name, row: "step", columns })
            }
            BuiltSchedule::Metrics { plateau, metrics } => {
                if args.accelerate_nproc.is_some() || args.show.is_some() {
                    bail!(
                        "on-plateau has one row per metric: leave out --show and --accelerate-nproc"
                    );
                }
                let mut state = plateau.start();
                let mut rate = |metric: &f64| {
                    state = plateau.after(&state, *metric);
                    state.lr
                };
                let lr = metrics.iter().map(&mut rate).collect();
                let columns = vec![
                    Column { name: "lr", values: lr },
                    Column { name: "metric", values: metrics },
                ];
                Ok(Self { name, row: "evaluation", columns })
            }
        }
    }

    /// Returns the name and the number of rows.
    pub(super) fn title(&self) -> String {
        format!("{}, {}", self.name, counted(self.rows(), self.row))
    }

    pub(super) fn rows(&self) -> usize {
        self.columns.first().map_or(0, |column| column.values.len())
    }

    /// Writes JSON, with every digit.
    pub(super) fn json(&self, out: &mut impl Write) -> io::Result<()> {
        write!(out, "{{\"schedule\": \"{}\"", self.name)?;
        for column in &self.columns {
            write!(out, ", \"{}\": ", column.name)?;
            serde_json::to_writer(&mut *out, &column.values)?;
        }
        out.write_all(b"}\n")
    }

    /// Writes a table. A long one is thinned out evenly to one page, unless `all` is set.
    pub(super) fn text(&self, all: bool, out: &mut impl Write) -> io::Result<()> {
        let rows = self.rows();
        let stride = if all { 1 } else { rows.div_ceil(PAGE).max(1) };
        let mut shown: Vec<usize> = (0..rows).step_by(stride).collect();
        if stride > 1 && shown.last() != Some(&(rows - 1)) {
            shown.push(rows - 1);
        }
        let width = self.row.len().max((rows - 1).to_string().len());
        write!(out, "{:width$}", self.row)?;
        for (place, column) in self.columns.iter().enumerate() {
            self.cell(place, column.name, out)?;
        }
        writeln!(out)?;
        for row in shown {
            write!(out, "{row:<width$}")?;
            for (place, column) in self.columns.iter().enumerate() {
                self.cell(place, &number(column.values[row]), out)?;
            }
            writeln!(out)?;
        }
        writeln!(out)?;
        if stride > 1 {
            writeln!(out, "one {} in {stride}, and the last; --all shows all {rows}", self.row)?;
        }
        writeln!(out, "{}: {}", self.title(), self.extremes())
    }

    /// Pads a cell, except in the last column.
    fn cell(&self, place: usize, text: &str, out: &mut impl Write) -> io::Result<()> {
        let width = if place + 1 == self.columns.len() { 0 } else { NUMBER };
        write!(out, "  {text:width$}")
    }

    fn extremes(&self) -> String {
        let values = &self.columns[0].values;
        let first_of = |better: fn(f64, f64) -> bool| {
            (1..values.len())
                .fold(0, |best, row| if better(values[row], values[best]) { row } else { best })
        };
        let (low, high) = (first_of(|a, b| a < b), first_of(|a, b| a > b));
        if values[low] == values[high] {
            return format!("the rate is {} throughout", number(values[low]));
        }
        format!(
            "highest rate {} at {row} {high}, lowest {} at {row} {low}",
            number(values[high]),
            number(values[low]),
            row = self.row,
        )
    }
}

/// Formats a number with six significant digits, as short as possible.
pub(crate) fn number(value: f64) -> String {
    if value.is_nan() {
        return "-".to_owned();
    }
    if value == 0.0 {
        return "0".to_owned();
    }
    let exponent = value.abs().log10().floor() as i32;
    if !(-4..=6).contains(&exponent) {
        let text = format!("{value:.5e}");
        return match text.split_once('e') {
            Some((digits, power)) => format!("{}e{power}", trimmed(digits)),
            None => text,
        };
    }
    trimmed(&format!("{value:.*}", usize::try_from(5 - exponent).unwrap_or(0))).to_owned()
}

fn trimmed(digits: &str) -> &str {
    if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits }
}

/// Maximum number of rows of a page.
const PAGE: usize = 50;
/// Width of a number: `-1.23456e-12`.
const NUMBER: usize = 12;

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn numbers_are_short() {
        let table = [
            (0.1, "0.1"),
            (0.012_000_000_000_000_01, "0.012"),
            (0.017_529_377, "0.0175294"),
            (4.8e-7, "4.8e-7"),
            (1.234_567_89e-5, "1.23457e-5"),
            (1.0, "1"),
            (999_999.5, "1000000"),
            (12_345_678.0, "1.23457e7"),
            (0.0, "0"),
            (-0.25, "-0.25"),
            (100.0, "100"),
            (f64::NAN, "-"),
        ];
        for (value, text) in table {
            assert_eq!(number(value), text);
        }
    }
}
