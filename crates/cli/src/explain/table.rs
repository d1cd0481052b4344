//! Table of shards: one column per rank if the ranks fit a line, otherwise one row per rank.

use std::io::{self, Write};
use std::iter;
use std::ops::Range;

use brigade_sampling::Shards;

/// Table of the samples in the batch of each rank and round.
#[derive(Debug)]
pub(super) struct Table<'a> {
    shards: &'a Shards,
    /// `true` if rows are ranks and columns are rounds.
    turned: bool,
    /// Lines that are shown. Lines between them are left out.
    lines: Vec<Range<usize>>,
    columns: Vec<Range<usize>>,
}

impl<'a> Table<'a> {
    /// Creates a table. With `all`, nothing is left out, and columns that do not fit continue below.
    pub(super) fn new(shards: &'a Shards, all: bool) -> Self {
        let (ranks, rounds) = (shards.world(), shards.rounds());
        let whole = |len| iter::once(0..len).collect();
        let pick = |len, limit| if all { whole(len) } else { ends(len, limit, None) };

        let upright =
            Self { shards, turned: false, lines: pick(rounds, MAX_LINES), columns: whole(ranks) };
        if ranks <= MAX_COLUMNS && upright.width() <= WIDTH {
            return upright;
        }
        let lines = if all {
            whole(ranks)
        } else {
            ends(
                ranks,
                4 * MAX_LINES,
                rounds.checked_sub(1).and_then(|last| boundary(shards, last)),
            )
        };
        let mut turned = Self { shards, turned: true, lines, columns: whole(rounds) };
        if !all {
            // As many rounds as fit, and at least the first and the last.
            for columns in (2..=MAX_COLUMNS).rev() {
                turned.columns = ends(rounds, columns, None);
                if turned.width() <= WIDTH {
                    break;
                }
            }
        }
        turned
    }

    /// Returns the number of rounds.
    pub(super) fn rows(&self) -> usize {
        self.shards.rounds()
    }

    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        if self.rows() == 0 {
            return Ok(());
        }
        let columns = self.measured();
        let corner = self.corner_width();
        let mut rest = &columns[..];
        while !rest.is_empty() {
            // As many columns as fit, and at least one.
            let mut width = corner;
            let fitting = rest
                .iter()
                .take_while(|(_, column)| {
                    width += GAP.len() + column;
                    width <= WIDTH
                })
                .count()
                .max(1);
            let (block, below) = rest.split_at(fitting);
            self.write_block(block, corner, out)?;
            rest = below;
            if !rest.is_empty() {
                writeln!(out)?;
            }
        }
        Ok(())
    }

    fn write_block(
        &self,
        columns: &[(Index, usize)],
        corner: usize,
        out: &mut impl Write,
    ) -> io::Result<()> {
        let mut line = |head: &str, cell: &dyn Fn(Index) -> String| {
            let mut text = format!("{head:<corner$}");
            for &(column, width) in columns {
                text += GAP;
                text += &format!("{:<width$}", cell(column));
            }
            writeln!(out, "{}", text.trim_end())
        };
        line(self.line_name(), &|column| self.column_head(column))?;
        for index in shown(&self.lines) {
            match index {
                Index::At(at) => line(&at.to_string(), &|column| self.cell(at, column))?,
                Index::Omitted(count) => {
                    let what = if self.turned { "ranks" } else { "rounds" };
                    line(&format!("... {count} more {what}"), &|_| String::new())?;
                }
            }
        }
        Ok(())
    }

    fn line_name(&self) -> &'static str {
        if self.turned { "rank" } else { "round" }
    }

    fn column_head(&self, column: Index) -> String {
        match column {
            Index::At(at) if self.turned => format!("round {at}"),
            Index::At(at) => format!("rank {at}"),
            Index::Omitted(count) => format!("... {count} more"),
        }
    }

    fn cell(&self, line: usize, column: Index) -> String {
        let Index::At(column) = column else { return "...".to_owned() };
        let (rank, round) = if self.turned { (line, column) } else { (column, line) };
        let Some(batch) = self.shards.batch(rank, round) else { return "-".to_owned() };
        match (batch.valid_indices(), batch.duplicates()) {
            (valid, []) => runs(valid),
            ([], duplicates) => format!("({})", runs(duplicates)),
            (valid, duplicates) => format!("{} ({})", runs(valid), runs(duplicates)),
        }
    }

    /// Returns the columns with the width of their widest cell.
    fn measured(&self) -> Vec<(Index, usize)> {
        shown(&self.columns)
            .map(|column| {
                let cells = shown(&self.lines).filter_map(|line| match line {
                    Index::At(line) => Some(self.cell(line, column).len()),
                    Index::Omitted(_) => None,
                });
                (column, cells.chain([self.column_head(column).len()]).max().unwrap_or(0))
            })
            .collect()
    }

    /// Returns the width of the first column. The line with the number of lines left out may be longer.
    fn corner_width(&self) -> usize {
        let last = self.lines.last().map_or(0, |lines| lines.end.saturating_sub(1));
        self.line_name().len().max(last.to_string().len())
    }

    fn width(&self) -> usize {
        let columns = self.measured().into_iter().map(|(_, width)| GAP.len() + width);
        self.corner_width() + columns.sum::<usize>()
    }
}

/// Index on an axis of the table, or a number of indices that are left out.
#[derive(Debug, Clone, Copy)]
pub(super) enum Index {
    At(usize),
    Omitted(usize),
}

/// Returns the indices of `ranges`, with a mark for each gap.
pub(super) fn shown(ranges: &[Range<usize>]) -> impl Iterator<Item = Index> + '_ {
    ranges.iter().enumerate().flat_map(|(at, range)| {
        let before = at.checked_sub(1).map(|at| ranges[at].end);
        let gap = before.map(|end| Index::Omitted(range.start - end));
        gap.into_iter().chain(range.clone().map(Index::At))
    })
}

/// Returns the first and last indices of `0..len`, `limit` in all, and those around `mark`. Three quarters are from the
/// start; unusual batches are at the end. A single index is never left out: the line for it would be as long.
pub(super) fn ends(len: usize, limit: usize, mark: Option<usize>) -> Vec<Range<usize>> {
    if len <= limit + 1 {
        return iter::once(0..len).collect();
    }
    let tail = (limit / 4).max(1);
    let around = mark.map(|mark| mark.saturating_sub(1)..(mark + 2).min(len));
    let mut ranges = [0..limit - tail, len - tail..len].to_vec();
    ranges.extend(around);
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start <= last.end + 1 => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// Returns the first rank whose batch in `round` contains repeated samples or is smaller.
fn boundary(shards: &Shards, round: usize) -> Option<usize> {
    let round = shards.round(round);
    let full = round.rows[0];
    (0..shards.world()).find(|&rank| round.valid[rank] < full)
}

/// Abbreviates indices: `0-11`, `0,4..44` for steps, `3 x8` for repetitions of one index.
pub(super) fn runs(indices: &[usize]) -> String {
    let mut parts = Vec::new();
    let mut rest = indices;
    while let [first, ..] = *rest {
        if parts.len() == MAX_RUNS {
            parts.push(format!("... {} more", rest.len()));
            break;
        }
        let step = rest.get(1).and_then(|second| second.checked_sub(first));
        let steady = |pair: &[usize]| pair[1].checked_sub(pair[0]) == step;
        let len = 1 + step.map_or(0, |_| rest.windows(2).take_while(|pair| steady(pair)).count());
        let last = rest[len - 1];
        let (part, len) = match (step, len) {
            (Some(0), len) => (format!("{first} x{len}"), len),
            (Some(1), len) => (format!("{first}-{last}"), len),
            (Some(_), len) if len > 2 => (format!("{first},{}..{last}", rest[1]), len),
            _ => (first.to_string(), 1),
        };
        parts.push(part);
        rest = &rest[len..];
    }
    parts.join(",")
}

/// Width of a line in columns, which most terminals have.
pub(super) const WIDTH: usize = 100;
const GAP: &str = "  ";
/// More than fit: a column's title, "rank 0", needs this part of the width.
const MAX_COLUMNS: usize = WIDTH / 8;
/// Maximum number of rounds in a table.
const MAX_LINES: usize = 16;
/// Maximum number of runs in a cell: only a tiny data set, repeated, has more.
const MAX_RUNS: usize = 4;

#[cfg(test)]
mod tests {
    use brigade_sampling::{Order, ShardOptions};

    use super::*;

    #[test]
    fn indices_are_written_in_short() {
        assert_eq!(runs(&[0, 1, 2, 3]), "0-3");
        assert_eq!(runs(&[7]), "7");
        assert_eq!(runs(&[7, 8]), "7-8");
        assert_eq!(runs(&[7, 9]), "7,9");
        assert_eq!(runs(&[1, 5, 9]), "1,5..9");
        assert_eq!(runs(&[0, 0, 0]), "0 x3");
        assert_eq!(runs(&[8, 9, 0, 1]), "8-9,0-1");
        assert_eq!(runs(&[8, 4, 0]), "8,4,0");
        assert_eq!(runs(&[0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]), "0-1,0-1,0-1,0-1,... 3 more");
    }

    #[test]
    fn the_middle_is_left_out_and_the_mark_is_kept() {
        assert_eq!(ends(17, 16, None), std::slice::from_ref(&(0..17)));
        assert_eq!(ends(18, 16, None), [0..12, 14..18]);
        assert_eq!(ends(100, 16, Some(50)), [0..12, 49..52, 96..100]);
        assert_eq!(ends(100, 16, Some(12)), [0..14, 96..100]);
        assert_eq!(ends(100, 16, Some(99)), [0..12, 96..100]);
    }

    #[test]
    fn lines_stay_within_the_width() {
        for (samples, batch_size, world) in
            [(50, 12, 4), (100_000, 64, 8), (100_000, 3, 64), (1 << 40, 512, 700), (9, 1, 1)]
        {
            let shards =
                Shards::new(Order::Sequential(samples), batch_size, world, ShardOptions::default())
                    .unwrap();
            let mut text = Vec::new();
            Table::new(&shards, false).write(&mut text).unwrap();
            let text = String::from_utf8(text).unwrap();
            assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
            assert!(text.lines().count() <= 4 * MAX_LINES + 6, "{text}");
        }
    }
}
