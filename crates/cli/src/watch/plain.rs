//! Run as plain lines, for files, pipes and scripts.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use super::feed::{Feed, FeedUpdate};
use super::model::{Model, Row, State};
use super::text;
use super::view::shown;

/// Prints lines until the run or the input ends. Returns the exit code, 1 if the run failed.
pub(super) fn follow(feed: &mut Feed, out: &mut impl Write) -> anyhow::Result<u8> {
    let mut model = Model::default();
    let mut lines = Lines::default();
    loop {
        let found = feed.poll(&mut model)?;
        lines.print(&model, &feed.name(), &found, out)?;
        out.flush()?;
        if found.more {
            continue;
        }
        let is_over = matches!(model.state, State::Finished | State::Failed);
        if is_over || found.ended {
            return Ok(u8::from(model.state == State::Failed));
        }
        std::thread::sleep(POLL);
    }
}

/// Prints the current state of the run. The standard input is read to its end.
pub(super) fn once(feed: &mut Feed, out: &mut impl Write) -> anyhow::Result<()> {
    let mut model = Model::default();
    loop {
        let found = feed.poll(&mut model)?;
        match feed {
            Feed::File(_) if found.more => {}
            Feed::File(file) => {
                file.finish(&mut model);
                break;
            }
            Feed::Input(_) if found.ended => break,
            Feed::Input(_) if found.more => {}
            Feed::Input(_) => std::thread::sleep(POLL),
        }
    }
    out.write_all(snapshot(&model, &feed.name()).as_bytes())?;
    Ok(())
}

/// Returns the run's state, its last values and its tables.
pub(super) fn snapshot(model: &Model, name: &str) -> String {
    let mut text = headline(model, name);
    let mut line = |line: &str| {
        text.push_str(line);
        text.push('\n');
    };
    line("");
    for part in text::progress(model).into_iter().chain(Some(text::rates(model).join(", "))) {
        if !part.is_empty() {
            line(&part);
        }
    }
    let mut part = |title: &str, rows: &[Vec<String>]| {
        if rows.len() > 1 {
            line("");
            line(title);
            text::aligned(rows).iter().for_each(|row| line(&format!("  {row}")));
        }
    };
    let head = ["name", "last", "lowest", "highest", "values"].map(str::to_owned).to_vec();
    let values = model.curves.iter().filter(|(_, curve)| curve.count() > 0);
    let values = values.map(|(name, curve)| {
        let points = curve.points().iter();
        let (low, high) = points.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), point| {
            (low.min(point.low), high.max(point.high))
        });
        let numbers = [curve.last().unwrap_or(f64::NAN), low, high].map(|number| {
            if curve.count() == curve.non_finite() {
                "NaN".to_owned()
            } else {
                text::number(number)
            }
        });
        let [last, low, high] = numbers;
        vec![name.clone(), last, low, high, curve.count().to_string()]
    });
    part("values", &std::iter::once(head).chain(values).collect::<Vec<_>>());
    part("epochs", &text::epoch_rows(model, 0, usize::MAX));
    for (name, table) in &model.tables {
        if let Some(table) = table {
            part(name, &text::table_rows(table));
        }
    }
    text
}

fn headline(model: &Model, name: &str) -> String {
    let name = model.project.as_deref().unwrap_or(name);
    let parts = std::iter::once(text::state(model).to_owned()).chain(text::place(model));
    format!("{name}: {}", parts.collect::<Vec<_>>().join(", "))
}

/// State of the output.
#[derive(Debug, Default)]
struct Lines {
    starts: u32,
    state: State,
    notice: Option<String>,
    /// Last epoch that was printed, with the start that logged it.
    epoch: Option<(u32, f64)>,
    columns: Vec<String>,
    /// Time and step of the last printed values, if there are no epochs.
    values: Option<(Instant, f64)>,
}

impl Lines {
    fn print(
        &mut self,
        model: &Model,
        name: &str,
        found: &FeedUpdate,
        out: &mut impl Write,
    ) -> io::Result<()> {
        if found.replaced {
            writeln!(out, "{name}: the file was replaced")?;
            *self = Self::default();
        }
        // Before the state: the last epoch precedes the end.
        let is_over = matches!(model.state, State::Finished | State::Failed);
        let is_first = self.state == State::Empty && model.state != State::Empty;
        let notice = found.notice.as_ref().filter(|_| found.notice != self.notice && !found.more);
        if !is_over && (model.starts != self.starts || is_first) {
            writeln!(out, "{}", headline(model, name))?;
        } else if let Some(notice) = notice.filter(|_| !is_over) {
            writeln!(out, "{name}: {notice}")?;
        }
        if model.starts != self.starts {
            self.values = None;
        }
        self.epochs(model, is_over || found.ended || !found.is_new, out)?;
        self.values(model, (is_over || found.ended) && !found.more, out)?;
        if is_over && self.state != model.state && !found.more {
            writeln!(out, "{}", headline(model, name))?;
        }
        if !found.more || is_first {
            self.state = if found.more { State::Running } else { model.state };
        }
        self.starts = model.starts;
        self.notice.clone_from(&found.notice);
        Ok(())
    }

    /// Prints complete epochs: another line follows, or the run has ended. An epoch that is on each of its lines is
    /// complete when the next one begins.
    fn epochs(&mut self, model: &Model, is_quiet: bool, out: &mut impl Write) -> io::Result<()> {
        let rows = model.epochs.rows();
        let (start, epoch) = self.epoch.unwrap_or((0, f64::NEG_INFINITY));
        let is_printed = |row: &Row| row.start < start || row.start == start && row.epoch <= epoch;
        let from = rows.iter().rposition(is_printed).map_or(0, |at| at + 1);
        let is_over = matches!(model.state, State::Finished | State::Failed);
        let mut until = rows.len();
        if let Some(last) = rows
            .last()
            .filter(|last| !is_over && (!is_quiet && model.epochs.is_open || last.lines > 2))
        {
            until -= usize::from(last.lines > 0);
        }
        if from >= until {
            return Ok(());
        }
        let table = text::epoch_rows(model, rows.len() - until, until - from);
        let line = |cells: &[String]| {
            let cells = cells.iter().enumerate().map(|(at, cell)| {
                let room = text::width(&table[0][at]).max(if at == 0 { 5 } else { 10 });
                format!("{}{cell}", " ".repeat(room.saturating_sub(text::width(cell))))
            });
            cells.collect::<Vec<_>>().join("  ")
        };
        if self.columns != model.epochs.columns() {
            self.columns = model.epochs.columns().to_vec();
            writeln!(out, "{}", line(&table[0]))?;
        }
        for row in &table[1..] {
            writeln!(out, "{}", line(row))?;
        }
        self.epoch = Some((rows[until - 1].start, rows[until - 1].epoch));
        Ok(())
    }

    /// Prints the last values at intervals and at the end, if there are no epochs.
    fn values(&mut self, model: &Model, is_end: bool, out: &mut impl Write) -> io::Result<()> {
        let is_due = self
            .values
            .is_none_or(|(at, step)| model.step() != step && (is_end || at.elapsed() >= SELDOM));
        if !model.epochs.rows().is_empty() || !is_due || model.curves.is_empty() {
            return Ok(());
        }
        let what = if model.has_steps { "step" } else { "line" };
        let values = shown(model).take(VALUES).filter_map(|name| {
            Some(format!("  {name} {}", text::number(model.curves.get(name)?.last()?)))
        });
        writeln!(out, "{what} {}{}", model.step(), values.collect::<String>())?;
        self.values = Some((Instant::now(), model.step()));
        Ok(())
    }
}

/// Interval between polls of the file.
const POLL: Duration = Duration::from_millis(500);
/// Interval between two lines of values.
const SELDOM: Duration = Duration::from_secs(10);
/// Maximum number of values in one line.
const VALUES: usize = 8;

#[cfg(test)]
mod tests;
