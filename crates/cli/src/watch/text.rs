//! Numbers, times and tables as text, for the screen and the plain lines.

use std::time::Duration;

use brigade_rank_env::text::counted;
use brigade_track::{Table, Value};
use ratatui::text::Span;

use super::model::{Goal, Model, State};

/// Formats a number with six significant digits.
pub(super) fn number(value: f64) -> String {
    if value.is_finite() { crate::explain::number(value) } else { Value::from(value).text() }
}

/// Formats a logged value for a table.
pub(super) fn value(value: &Value) -> String {
    match value {
        Value::Float(value) => number(*value),
        other => other.text(),
    }
}

/// Formats a duration: "45 s", "12 min 3 s", "3 h 20 min", "2 days 4 h".
pub(super) fn duration(seconds: f64) -> String {
    let seconds = if seconds.is_finite() { seconds.max(0.0).round() as u64 } else { 0 };
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    match (hours, minutes) {
        (48.., _) => format!("{} days {} h", hours / 24, hours % 24),
        (1.., _) => format!("{hours} h {} min", minutes % 60),
        (0, 1..) => format!("{minutes} min {} s", seconds % 60),
        (0, 0) => format!("{seconds} s"),
    }
}

/// Returns the width on the terminal in columns.
pub(super) fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// Formats rows with columns as wide as their widest cell. Numbers are aligned right, a column of texts left.
pub(super) fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let column = |at: usize| rows.iter().filter_map(move |row| row.get(at));
    let widths: Vec<usize> =
        (0..columns).map(|at| column(at).map(|cell| width(cell)).max().unwrap_or(0)).collect();
    let is_text: Vec<bool> = (0..columns)
        .map(|at| {
            let is_number = |cell: &String| {
                cell.is_empty() || cell.starts_with(|it: char| it.is_ascii_digit() || it == '-')
            };
            // The first row has the names.
            !column(at).skip(1).all(|cell| is_number(cell) || ["NaN", "inf"].contains(&&**cell))
        })
        .collect();
    let line = |row: &Vec<String>| {
        let mut line = String::new();
        for (at, cell) in row.iter().enumerate() {
            let blanks = " ".repeat(widths[at] - width(cell));
            let (left, right) = if is_text[at] { ("", &*blanks) } else { (&*blanks, "") };
            line.push_str(&format!("{left}{cell}{right}  "));
        }
        line.trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Returns the names of the columns, then the last `most` epochs before the last `skipped`.
pub(super) fn epoch_rows(model: &Model, skipped: usize, most: usize) -> Vec<Vec<String>> {
    let columns = model.epochs.columns();
    let head = std::iter::once("epoch").chain(columns.iter().map(String::as_str));
    let rows = model.epochs.rows();
    let end = rows.len().saturating_sub(skipped);
    let shown = rows[end.saturating_sub(most)..end].iter().map(|row| {
        let cell = |name: &String| match row.values.get(name) {
            Some(time) if name == "time" => {
                time.number().map_or_else(|| value(time), |it| duration(it.round()))
            }
            Some(other) => value(other),
            None => String::new(),
        };
        std::iter::once(number(row.epoch)).chain(columns.iter().map(cell)).collect()
    });
    std::iter::once(head.map(str::to_owned).collect()).chain(shown).collect()
}

/// Returns the names of the columns and the rows of a logged table.
pub(super) fn table_rows(table: &Table) -> Vec<Vec<String>> {
    let rows = table.rows().iter().map(|row| row.iter().map(value).collect());
    std::iter::once(table.columns().to_vec()).chain(rows).collect()
}

pub(super) fn state(model: &Model) -> &'static str {
    match model.state {
        State::Empty => "nothing logged so far",
        State::Running => "running",
        State::Finished => "finished",
        State::Failed => "failed",
    }
}

/// Describes the progress of the run: epoch, step, elapsed time, number of starts.
pub(super) fn place(model: &Model) -> Vec<String> {
    let mut parts = Vec::new();
    let of = |all: f64| format!("/{}", number(all));
    let last = model.epochs.rows().last().map(|row| row.epoch);
    let done = model.epochs.clock().at(model.step());
    match (done, model.goal()) {
        (Some(done), Some(Goal::Epochs(all))) => parts.push(format!("epoch {done:.1}{}", of(all))),
        (Some(done), _) => parts.push(format!("epoch {done:.1}")),
        (None, _) => parts.extend(last.map(|epoch| format!("epoch {}", number(epoch)))),
    }
    if model.has_steps {
        let all = model.goal().and_then(|goal| match goal {
            Goal::Steps(all) => Some(of(all)),
            Goal::Epochs(_) => None,
        });
        parts.push(format!("step {}{}", model.step(), all.unwrap_or_default()));
    } else if model.step() > 0.0 {
        parts.push(counted(model.step(), "line"));
    }
    parts.extend(model.elapsed().filter(|seconds| *seconds > 0.0).map(duration));
    if model.starts > 1 {
        parts.push(format!("start {}", model.starts));
    }
    if model.broken > 0 {
        parts.push(format!("{} unreadable", counted(model.broken, "line")));
    }
    parts
}

/// Formats "34 %, 12 min left", if the settings contain the length of the run.
pub(super) fn progress(model: &Model) -> Option<String> {
    let percent = format!("{:.0} %", model.fraction()? * 100.0);
    let remaining = model.remaining().filter(|_| model.state == State::Running);
    Some(match remaining {
        Some(seconds) => format!("{percent}, {} left", duration(seconds)),
        None => percent,
    })
}

/// Returns the last rates, step times and memory sizes, by the suffixes of their names.
pub(super) fn rates(model: &Model) -> Vec<String> {
    let ending = |end: &'static str| {
        model.curves.iter().filter_map(move |(name, curve)| {
            Some((name.strip_suffix(end)?.replace('_', " "), curve.last()?))
        })
    };
    let mut parts: Vec<String> =
        ending("_per_second").map(|(name, last)| format!("{} {name}/s", number(last))).collect();
    if parts.is_empty() {
        parts.extend(model.steps_per_second().map(|it| format!("{} steps/s", number(it))));
    }
    parts.extend(ending("_ms").map(|(name, last)| format!("{name} {} ms", number(last))));
    parts.extend(ending("_mib").map(|(name, last)| {
        if last >= 1024.0 {
            format!("{name} {:.1} GiB", last / 1024.0)
        } else {
            format!("{name} {last:.0} MiB")
        }
    }));
    parts
}

/// Describes how long nothing was logged, if that is long. The time is rounded, so that the text changes rarely.
pub(super) fn silence(model: &Model, silent: Option<Duration>) -> Option<String> {
    let seconds = silent?.as_secs();
    let step = match seconds {
        0..120 => 10,
        120..7200 => 60,
        _ => 3600,
    };
    (model.state == State::Running && seconds >= SILENT.as_secs())
        .then(|| format!("silent for {}", duration((seconds / step * step) as f64)))
}

/// Time without a new line from which on the screen reports it.
const SILENT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        let table = [
            (0.4, "0 s"),
            (59.6, "1 min 0 s"),
            (3599.0, "59 min 59 s"),
            (3600.0, "1 h 0 min"),
            (172_800.0, "2 days 0 h"),
            (f64::NAN, "0 s"),
            (-1.0, "0 s"),
        ];
        for (seconds, text) in table {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [
            vec!["rank", "host", "ms"],
            vec!["0", "größer", "NaN"],
            vec!["10", "本", "-1.5"],
            vec!["2"],
        ];
        let rows = rows.map(|row| row.into_iter().map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(
            aligned(&rows),
            ["rank  host      ms", "   0  größer   NaN", "  10  本      -1.5", "   2"]
        );
        assert!(aligned(&[]).is_empty());
    }
}
