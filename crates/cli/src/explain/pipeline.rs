//! `brigade explain pipeline`: order of the work of each rank of a pipeline, and its idle time.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::iter;
use std::ops::Range;

use brigade_rank_env::text::counted;
use brigade_sharding::Mesh;
use brigade_sharding::pipeline::{
    Action, ActionKind, Costs, PipelineTable, Schedule, Slot, Span, Timeline,
};
use clap::Args;
use serde_json::{Value, json};

use super::table::{Index, WIDTH, ends, runs, shown};

/// The question of `brigade explain pipeline`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PipelineArgs {
    /// Number of ranks, each with one stage, or with --chunks stages
    #[arg(long, value_name = "N", value_parser = super::ranks, allow_negative_numbers = true)]
    stages: usize,

    /// Number of micro-batches per step
    #[arg(long, value_name = "N", value_parser = super::count, allow_negative_numbers = true)]
    micro_batches: usize,

    /// gpipe, 1f1b, interleaved, looped-bfs, zb-h1 or zbv
    #[arg(long, value_name = "SCHEDULE", default_value = "1f1b")]
    schedule: Schedule,

    /// Stages of each rank [default: the schedule's minimum]
    #[arg(long, value_name = "N", value_parser = super::count, allow_negative_numbers = true)]
    chunks: Option<usize>,

    /// Time of a message, if a forward pass takes 1
    #[arg(long, value_name = "TIME", default_value_t = 0.0, allow_negative_numbers = true)]
    message_time: f64,

    /// Print all actions with their times as JSON
    #[arg(long)]
    json: bool,

    /// Show all slots and ranks
    #[arg(long, conflicts_with = "json")]
    all: bool,
}

pub(super) fn run(args: &PipelineArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let table = PipelineTable::new(args.schedule, args.stages, args.micro_batches, args.chunks())?;
    let costs = Costs { message: args.message_time, ..Costs::equal(table.stages()) };
    let timeline = table.simulate(&costs)?;
    if args.json {
        serde_json::to_writer(&mut *out, &args.as_json(&table, &timeline))
            .map_err(io::Error::from)?;
        return Ok(out.write_all(b"\n")?);
    }
    Ok(args.text(&table, &timeline, out)?)
}

impl PipelineArgs {
    fn chunks(&self) -> usize {
        self.chunks.unwrap_or_else(|| self.schedule.least_chunks())
    }

    fn formula(&self) -> f64 {
        self.schedule.bubble_formula(self.stages, self.micro_batches, self.chunks())
    }

    fn text(
        &self,
        table: &PipelineTable,
        timeline: &Timeline,
        out: &mut impl Write,
    ) -> io::Result<()> {
        writeln!(
            out,
            "{}: {} on {}, {}\n",
            self.schedule,
            counted(table.stages(), "stage"),
            counted(table.ranks(), "rank"),
            match table.micro_batches() {
                1 => "1 micro-batch".to_owned(),
                several => format!("{several} micro-batches"),
            }
        )?;
        self.slots(table, out)?;
        self.ranks(table, timeline, out)?;
        let message = if self.message_time > 0.0 { " without messages" } else { "" };
        writeln!(
            out,
            "held: most activations of {} at a time\n\
             bubble: idle for {:.3} of the time that ranks compute; by the formula {:.3}{message}",
            if table.stages() > table.ranks() { "single stages" } else { "the stage" },
            timeline.bubble(),
            self.formula(),
        )?;
        // Cannot fail: the mesh has no other axis than the pipeline's.
        let mesh = Mesh::builder().pipeline(self.stages).build(self.stages);
        mesh.map_or(Ok(()), |mesh| super::write_formulas(&mesh, out))
    }

    /// Writes one row per rank and one column per slot; columns beyond the line's width continue below.
    fn slots(&self, table: &PipelineTable, out: &mut impl Write) -> io::Result<()> {
        let rows = table.slots();
        let slots = rows.first().map_or(0, Vec::len);
        let cell = |rank: usize, index: Index| match index {
            Index::At(slot) => table.slot_text(rows[rank][slot]),
            Index::Omitted(_) => "..".to_owned(),
        };
        let widest =
            Action::new(ActionKind::Forward, table.stages() - 1, table.micro_batches() - 1);
        let width = table.slot_text(Slot::Pass(widest)).len();
        let corner = (table.ranks() - 1).to_string().len();
        let each_line = ((WIDTH - corner) / (width + 1)).max(1);
        // One column less, for the number of columns that are left out.
        let columns: Vec<_> = shown(&self.picked(slots, MOST_LINES * each_line - 1)).collect();
        let lines = columns.len().div_ceil(each_line).max(1);
        for columns in columns.chunks(columns.len().div_ceil(lines).max(1)) {
            for rank in shown(&self.picked(table.ranks(), MOST_RANKS)) {
                match rank {
                    Index::At(rank) => {
                        let mut line = format!("{rank:<corner$}");
                        for column in columns {
                            line += &format!(" {:<width$}", cell(rank, *column));
                        }
                        writeln!(out, "{}", line.trim_end())?;
                    }
                    Index::Omitted(count) => writeln!(out, "... {count} more ranks")?,
                }
            }
            writeln!(out)?;
        }
        let backward = match self.schedule {
            Schedule::ZeroBubble | Schedule::ZeroBubbleV => {
                "I: gradients of the inputs; W: of the weights"
            }
            _ => "B: backward, two slots",
        };
        let of_stage = table.stages() > table.ranks();
        let forward = if of_stage { "1F0: forward of stage 1," } else { "F0: forward of" };
        let message = if self.message_time > 0.0 { "messages take no slot here\n" } else { "" };
        writeln!(out, "{forward} micro-batch 0; {backward}; -: continued; .: idle\n{message}")
    }

    fn ranks(
        &self,
        table: &PipelineTable,
        timeline: &Timeline,
        out: &mut impl Write,
    ) -> io::Result<()> {
        let mut line = |cells: [&str; 7]| {
            let [rank, stages, computes, idle, held, sends, receives] = cells;
            let text = format!(
                "{rank:<6}{stages:<12}{computes:>9}{idle:>8}{held:>6}  {sends:<20}  {receives}"
            );
            writeln!(out, "{}", text.trim_end())
        };
        line(["rank", "stages", "computes", "idle", "held", "sends", "receives"])?;
        for rank in shown(&self.picked(table.ranks(), MOST_RANKS)) {
            let Index::At(rank) = rank else {
                line(["...", "", "", "", "", "", ""])?;
                continue;
            };
            let times = &timeline.ranks[rank];
            line([
                &rank.to_string(),
                &runs(&table.stages_of(rank).collect::<Vec<_>>()),
                &super::number(times.busy),
                &super::number(times.idle),
                &table.held(rank).to_string(),
                &messages(table, rank, true),
                &messages(table, rank, false),
            ])?;
        }
        Ok(())
    }

    /// Returns all of `0..len`, or its first and last parts.
    fn picked(&self, len: usize, limit: usize) -> Vec<Range<usize>> {
        if self.all { iter::once(0..len).collect() } else { ends(len, limit, None) }
    }

    fn as_json(&self, table: &PipelineTable, timeline: &Timeline) -> Value {
        let rank = |rank: usize| {
            let times = &timeline.ranks[rank];
            let action = |span: &Span| {
                json!({
                    "kind": span.action.kind.name(),
                    "stage": span.action.stage,
                    "micro_batch": span.action.micro_batch,
                    "peer": table.peer(span.action),
                    "start": span.start,
                    "end": span.end,
                })
            };
            json!({
                "stages": table.stages_of(rank).collect::<Vec<_>>(),
                "busy": times.busy,
                "idle": times.idle,
                "held": table.held(rank),
                "held_limit": table.held_limit(rank),
                "actions": times.spans.iter().map(action).collect::<Vec<_>>(),
            })
        };
        json!({
            "schedule": self.schedule.name(),
            "micro_batches": table.micro_batches(),
            "chunks": self.chunks(),
            "total": timeline.total,
            "bubble": timeline.bubble(),
            "bubble_formula": self.formula(),
            "ranks": (0..table.ranks()).map(rank).collect::<Vec<_>>(),
        })
    }
}

/// Lists messages: `8 to 0, 8 to 2`.
fn messages(table: &PipelineTable, rank: usize, sent: bool) -> String {
    let is_asked = |kind: ActionKind| {
        let is_sent = matches!(kind, ActionKind::SendActivation | ActionKind::SendGradient);
        is_sent == sent
    };
    let mut peers: BTreeMap<usize, usize> = BTreeMap::new();
    for action in table.actions(rank).iter().filter(|action| is_asked(action.kind)) {
        if let Some(peer) = table.peer(*action) {
            *peers.entry(peer).or_default() += 1;
        }
    }
    let word = if sent { "to" } else { "from" };
    let peers: Vec<_> =
        peers.iter().map(|(peer, count)| format!("{count} {word} {peer}")).collect();
    if peers.is_empty() { "-".to_owned() } else { peers.join(", ") }
}

/// Maximum number of lines of slots per rank.
const MOST_LINES: usize = 3;
const MOST_RANKS: usize = 32;

const EXAMPLES: &str = "\
Examples:
  brigade explain pipeline --stages 4 --micro-batches 8
  brigade explain pipeline --stages 4 --micro-batches 8 --schedule interleaved --chunks 2
  brigade explain pipeline --stages 4 --micro-batches 8 --schedule zbv --message-time 0.1";
