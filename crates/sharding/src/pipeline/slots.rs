//! The text form of a table: a row for each rank, a column for each time slot.

use std::fmt;

use super::clock::Costs;
use super::{Action, PipelineTable, RankTimeline};

impl PipelineTable {
    /// Returns the passes of each rank by time slot: a row for each rank, an element for each slot. A pass takes one
    /// slot, a whole backward pass two, and a message none. All rows have the same length.
    #[must_use]
    pub fn slots(&self) -> Vec<Vec<Slot>> {
        let timeline = self.run(&Costs::equal(self.stages()));
        let row = |rank: &RankTimeline| {
            let mut row = vec![Slot::Idle; timeline.total as usize];
            for span in rank.spans.iter().filter(|span| span.action.kind.computes()) {
                let slots = span.start as usize..span.end as usize;
                for (at, slot) in row[slots].iter_mut().enumerate() {
                    *slot = if at == 0 { Slot::Pass(span.action) } else { Slot::Continued };
                }
            }
            row
        };
        timeline.ranks.iter().map(row).collect()
    }

    /// Returns the text of a slot, as [`Display`](fmt::Display) writes it: `F3`, or `1F3` if ranks have several stages;
    /// `-` for a pass that continues, and `.` for an idle slot.
    #[must_use]
    pub fn slot_text(&self, slot: Slot) -> String {
        match slot {
            Slot::Idle => ".".to_owned(),
            Slot::Continued => "-".to_owned(),
            Slot::Pass(Action { kind, stage, micro_batch }) => {
                let stage =
                    if self.stages() > self.ranks() { stage.to_string() } else { String::new() };
                format!("{stage}{}{}", kind.letter(), micro_batch.unwrap_or(0))
            }
        }
    }
}

/// State of a rank in one time slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Slot {
    /// The rank is idle.
    Idle,
    /// A pass begins in this slot.
    Pass(Action),
    /// The pass of the previous slot continues.
    Continued,
}

impl fmt::Display for PipelineTable {
    /// Writes a line for each rank, with a column for each time slot.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.slots();
        let rows: Vec<Vec<_>> = rows
            .into_iter()
            .map(|row| row.into_iter().map(|slot| self.slot_text(slot)).collect())
            .collect();
        let width = rows.iter().flatten().map(String::len).max().unwrap_or(0);
        let head = self.ranks().saturating_sub(1).to_string().len();
        for (rank, row) in rows.iter().enumerate() {
            write!(f, "{rank:<head$} ")?;
            for cell in row {
                write!(f, " {cell:<width$}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
