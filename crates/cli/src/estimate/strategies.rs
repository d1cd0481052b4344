//! Comparison of all sharding strategies: memory of a rank by kind, messages, and whether it fits.

use std::io::{self, Write};

use anyhow::Context;
use brigade_rank_env::text::counted;
use brigade_sharding::byte_size::{self, in_bytes};
use brigade_sharding::{
    Memory, MixedPrecision, Offload, Sharding, ShardingPlan, Strategy, Volume, Workload,
};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::divided::Division;
use super::memory::{Kept, Precision};
use super::{EstimateArgs, OptimizerArg, Subject, positive};

/// What is asked of strategies.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// Type of the computation
    ///
    /// Shards, their gradients and the optimizer's states have 32 bits
    #[arg(long, value_name = "TYPE", value_enum, requires = "nproc")]
    mixed: Option<Mixed>,

    /// Number of batches whose gradients are accumulated for a step
    ///
    /// Defaults to 1, and to 4 for each rank of a pipeline
    #[arg(long, value_name = "N", value_parser = positive, requires = "nproc")]
    micro_batches: Option<u64>,

    /// Memory of a device (80G); marks strategies that fit
    ///
    /// Also prints the smallest change with which the run fits. G and GiB are powers of 1024, GB of 1000
    #[arg(long, value_name = "BYTES", value_parser = byte_size::parse, requires = "nproc")]
    memory: Option<u64>,

    /// Bytes per second that a rank sends (25G); shows times
    #[arg(long, value_name = "BYTES", value_parser = byte_size::parse, requires = "nproc")]
    bandwidth: Option<u64>,
}

impl Options {
    pub(super) fn precision(&self) -> Precision {
        if self.mixed.is_some() { Precision::Mixed16 } else { Precision::Fp32 }
    }
}

/// Type of the computation.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Mixed {
    /// bfloat16
    Bf16,
    /// float16
    Fp16,
}

impl Mixed {
    pub(crate) fn precision(mixed: Option<Self>) -> MixedPrecision {
        match mixed {
            None => MixedPrecision::default(),
            Some(Self::Bf16) => MixedPrecision::bf16(),
            Some(Self::Fp16) => MixedPrecision::fp16(),
        }
    }
}

/// Strategies for one number of ranks.
pub(super) struct Table {
    ranks: usize,
    columns: Vec<Column>,
    /// Division of the model among ranks, if there is one.
    division: Option<Division>,
    /// Advice for the given device memory.
    change: Option<String>,
}

struct Column {
    strategy: Choice,
    memory: Memory,
    volume: Volume,
    /// Rank of the pipeline that needs the most memory.
    rank: usize,
}

/// Sharding of a job, if any.
struct Choice(Option<Sharding>);

pub(super) fn tables(args: &EstimateArgs, subject: &Subject) -> anyhow::Result<Vec<Table>> {
    args.nproc.iter().map(|ranks| Question { args, subject }.table(*ranks)).collect()
}

/// Inputs of the computation other than the strategy.
#[derive(Clone, Copy)]
struct Question<'a> {
    args: &'a EstimateArgs,
    subject: &'a Subject,
}

impl Question<'_> {
    fn table(self, ranks: usize) -> anyhow::Result<Table> {
        let columns: Vec<Column> = self
            .choices(ranks)
            .into_iter()
            .map(|choice| self.column(&choice, ranks, self.args.batch_size))
            .collect::<anyhow::Result<_>>()?;
        let memory = self.args.sharded.memory;
        let change = memory.map(|memory| self.change(&columns, ranks, memory)).transpose()?;
        let divides = self.args.divided.divides();
        let division = divides.then(|| self.division(ranks, self.args.batch_size)).transpose()?;
        Ok(Table { ranks, columns, division, change })
    }

    /// Returns the strategies, from the one that changes least to the one that needs the least memory.
    fn choices(self, ranks: usize) -> Vec<Choice> {
        let mixed = Mixed::precision(self.args.sharded.mixed);
        let mut shardings = Vec::new();
        let ranks = self.args.divided.averaged(ranks);
        if ranks > 1 {
            shardings.extend([Sharding::zero1(), Sharding::zero2()]);
            // Experts are spread within a shard group.
            let experts = self.args.divided.averaged_experts();
            let host = host_of(ranks).filter(|ranks| ranks.is_multiple_of(experts));
            shardings.extend(host.map(Sharding::hybrid));
            shardings.push(Sharding::zero3());
        }
        shardings.push(Sharding::zero3().offload(Offload::Cpu { pin: true }));
        let shardings = shardings.into_iter().map(|sharding| Some(sharding.mixed(mixed)));
        std::iter::once(None).chain(shardings).map(Choice).collect()
    }

    fn division(self, ranks: usize, samples: u64) -> anyhow::Result<Division> {
        self.args.divided.division(self.args, self.subject, ranks, samples, self.micro_batches())
    }

    fn micro_batches(self) -> u64 {
        let Self { args, .. } = self;
        args.sharded.micro_batches.unwrap_or_else(|| args.divided.usual_micro_batches())
    }

    /// Computes a strategy on the rank that needs the most memory.
    fn column(self, strategy: &Choice, ranks: usize, samples: u64) -> anyhow::Result<Column> {
        let division = self.division(ranks, samples)?;
        let of_rank = |rank| self.rank_column(Choice(strategy.0.clone()), &division, rank);
        let first = of_rank(0)?;
        (1..division.pipeline_ranks()).try_fold(first, |most: Column, rank| {
            let column = of_rank(rank)?;
            Ok(if column.memory.total() > most.memory.total() { column } else { most })
        })
    }

    fn rank_column(
        self,
        strategy: Choice,
        division: &Division,
        rank: usize,
    ) -> anyhow::Result<Column> {
        let workload = self.workload(division, rank)?;
        let parameters = &*division.parameters(&self.subject.parameters, rank);
        let (options, ranks) = (&self.args.sharded, division.averaged());
        let Some(sharding) = &strategy.0 else {
            let memory = Memory::replicated(parameters, Mixed::precision(options.mixed), workload);
            let volume = self.args.divided.replicated(parameters, ranks);
            return Ok(Column { strategy, memory, volume, rank });
        };
        let mesh = self.args.divided.sharding_mesh(sharding, ranks)?;
        let plan = ShardingPlan::new(parameters, sharding, &mesh)?;
        let memory = plan.memory(workload);
        let volume = plan.volume(self.micro_batches());
        Ok(Column { strategy, memory, volume, rank })
    }

    fn workload(self, division: &Division, rank: usize) -> anyhow::Result<Workload> {
        let (precision, batch) = (self.args.sharded.precision(), self.args.batch(division.samples));
        let kept = match &self.subject.size.shape {
            None => Some(Kept::default()),
            Some(shape) if !self.args.divided.divides() => shape.kept(precision, batch),
            Some(_) => division.kept(rank),
        };
        let Kept { activations, logits } =
            kept.context("the run needs more bytes than 64 bits can count: check the sizes")?;
        let states = match self.args.optimizer {
            OptimizerArg::Adam => 2,
            OptimizerArg::Momentum => 1,
            OptimizerArg::Sgd => 0,
        };
        Ok(Workload { states, buffers: self.subject.buffers, activations, logits })
    }

    /// Returns the smallest changes with which the run fits.
    fn change(self, columns: &[Column], ranks: usize, memory: u64) -> anyhow::Result<String> {
        let first = columns.iter().find(|column| column.fits(memory)).map(|it| &it.strategy);
        let mut changes = match first {
            Some(Choice(None)) => return Ok("it fits without sharding".to_owned()),
            Some(choice) => vec![choice.setting()],
            None => Vec::new(),
        };
        if first.is_none() {
            let halves = std::iter::successors(Some(self.args.batch_size / 2), |it| Some(it / 2));
            for samples in halves.take_while(|samples| *samples > 0) {
                if let Some(choice) = self.fitting(ranks, samples, memory, Choice::is_zero3)? {
                    changes.push(format!("{} with --batch-size {samples}", choice.setting()));
                    break;
                }
            }
        }
        if first.is_none_or(Choice::is_offloaded) {
            let doubles = std::iter::successors(ranks.checked_mul(2), |it| it.checked_mul(2));
            let on_device = |choice: &Choice| choice.is_zero3() && !choice.is_offloaded();
            for more in doubles.take_while(|ranks| *ranks <= MOST_RANKS) {
                if let Some(choice) = self.fitting(more, self.args.batch_size, memory, on_device)? {
                    changes.push(format!("{} on {more} ranks", choice.setting()));
                    break;
                }
            }
        }
        Ok(match &*changes {
            [] => "nothing fits, nor does a batch of one sample, nor more ranks: recompute activations \
                   (`Recompute`), or take a smaller model"
                .to_owned(),
            changes => format!("the smallest change that fits: {}", changes.join(", or ")),
        })
    }

    /// Returns the first of the given strategies that fits.
    fn fitting(
        self,
        ranks: usize,
        samples: u64,
        memory: u64,
        is_wanted: impl Fn(&Choice) -> bool,
    ) -> anyhow::Result<Option<Choice>> {
        for choice in self.choices(ranks).into_iter().filter(is_wanted) {
            let column = self.column(&choice, ranks, samples)?;
            if column.fits(memory) {
                return Ok(Some(column.strategy));
            }
        }
        Ok(None)
    }
}

impl Choice {
    /// Returns the column's name: `zero3+cpu`.
    fn name(&self) -> String {
        match &self.0 {
            None => "none".to_owned(),
            Some(sharding) if self.is_offloaded() => format!("{}+cpu", sharding.strategy),
            Some(sharding) => sharding.strategy.to_string(),
        }
    }

    /// Returns the setting that a user writes.
    fn setting(&self) -> String {
        match &self.0 {
            None => "--sharding none".to_owned(),
            Some(sharding) if self.is_offloaded() => {
                format!("--sharding {} (offloaded to the CPU)", sharding.strategy)
            }
            Some(sharding) => format!("--sharding {}", sharding.strategy),
        }
    }

    fn is_zero3(&self) -> bool {
        self.0.as_ref().is_some_and(|it| it.strategy == Strategy::Zero3)
    }

    fn is_offloaded(&self) -> bool {
        self.0.as_ref().is_some_and(|it| it.offload != Offload::None)
    }
}

/// Returns the number of ranks per host: most hosts have 8 or fewer. On a single host, half of its ranks.
fn host_of(ranks: usize) -> Option<usize> {
    (2..=8.min(ranks / 2)).rev().find(|size| ranks.is_multiple_of(*size))
}

pub(super) fn text(
    args: &EstimateArgs,
    subject: &Subject,
    tables: &[Table],
    out: &mut impl Write,
) -> io::Result<()> {
    args.heading(subject, out)?;
    for (place, table) in tables.iter().enumerate() {
        if place > 0 {
            writeln!(out)?;
        }
        table.write(args, subject, out)?;
    }
    Ok(())
}

impl Table {
    fn write(
        &self,
        args: &EstimateArgs,
        subject: &Subject,
        out: &mut impl Write,
    ) -> io::Result<()> {
        let mut line = |label: &str, cell: &dyn Fn(&Column) -> String| {
            let cells = self.columns.iter().map(|column| format!("{:>12}", cell(column)));
            writeln!(out, "{label:<16}{}", cells.collect::<String>())
        };
        line(&counted(self.ranks, "rank"), &|column| column.strategy.name())?;
        for (label, bytes) in KINDS {
            if label == "activations" && subject.size.shape.is_none() {
                line(label, &|_| "unknown".to_owned())?;
            } else if self.columns.iter().any(|column| bytes(&column.memory) > 0) {
                line(label, &|column| in_bytes(bytes(&column.memory)))?;
            }
        }
        line("in all", &|column| in_bytes(column.memory.total()))?;
        line("offloaded", &|column| in_bytes(column.memory.offloaded))?;
        line("sent in a step", &|column| in_bytes(column.volume.bytes()))?;
        if let Some(bandwidth) = args.sharded.bandwidth {
            let label = format!("at {}/s", in_bytes(bandwidth));
            line(&label, &|column| seconds(column.volume.seconds(bandwidth as f64)))?;
        }
        if let Some(memory) = args.sharded.memory {
            let label = format!("fits {}", in_bytes(memory));
            let fits = |column: &Column| if column.fits(memory) { "yes" } else { "no" };
            line(&label, &|column| fits(column).to_owned())?;
        }
        if let (Some(division), Some(last)) = (&self.division, self.columns.last()) {
            division.text(last.rank, out)?;
        }
        match &self.change {
            Some(change) => writeln!(out, "{change}"),
            None => Ok(()),
        }
    }
}

impl Column {
    fn fits(&self, memory: u64) -> bool {
        self.memory.total() <= memory
    }
}

pub(super) fn json(
    args: &EstimateArgs,
    subject: &Subject,
    tables: &[Table],
    out: &mut impl Write,
) -> io::Result<()> {
    let column = |column: &Column| {
        let mut bytes = json!(column.memory);
        bytes["total"] = json!(column.memory.total());
        if subject.size.shape.is_none() {
            bytes["activations"] = Value::Null;
        }
        let seconds = args.sharded.bandwidth.map(|it| column.volume.seconds(it as f64));
        json!({
            "strategy": column.strategy.0.as_ref().map(|sharding| sharding.strategy),
            "offload": column.strategy.is_offloaded(),
            "bytes_per_rank": bytes,
            "sent_bytes": column.volume.bytes(),
            "sent_elements": column.volume.elements(),
            "seconds": seconds,
            "fits": args.sharded.memory.map(|memory| column.fits(memory)),
        })
    };
    let table = |table: &Table| {
        json!({
            "nproc": table.ranks,
            "strategies": table.columns.iter().map(column).collect::<Vec<_>>(),
            "divided": table.division.as_ref().map(Division::json),
            "change": table.change,
        })
    };
    let answer = json!({
        "model": subject.title,
        "read": subject.read,
        "parameters": subject.size.parameters,
        "batch_size": args.batch_size,
        "ranks": tables.iter().map(table).collect::<Vec<_>>(),
    });
    serde_json::to_writer_pretty(&mut *out, &answer)?;
    out.write_all(b"\n")
}

/// Formats a duration: `1.2 s`.
fn seconds(seconds: f64) -> String {
    match seconds {
        seconds if seconds >= 1.0 => format!("{seconds:.1} s"),
        seconds if seconds >= 1e-3 => format!("{:.1} ms", seconds * 1e3),
        seconds => format!("{:.1} us", seconds * 1e6),
    }
}

/// Kind of memory: its label and its bytes.
type Kind = (&'static str, fn(&Memory) -> u64);

const KINDS: [Kind; 8] = [
    ("parameters", |memory| memory.parameters),
    ("gradients", |memory| memory.gradients),
    ("optimizer", |memory| memory.optimizer),
    ("gathered", |memory| memory.gathered),
    ("reduce", |memory| memory.reduce),
    ("buffers", |memory| memory.buffers),
    ("activations", |memory| memory.activations),
    ("logits", |memory| memory.logits),
];

/// Maximum number of ranks that is proposed.
const MOST_RANKS: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read() {
        let table = [
            ("80G", Some(80 << 30)),
            ("80GiB", Some(80 << 30)),
            ("80gb", Some(80_000_000_000)),
            ("1.5K", Some(1536)),
            ("512", Some(512)),
            ("512B", Some(512)),
            ("0", None),
            ("80X", None),
            ("80Gbit", None),
            ("G", None),
            ("-1G", None),
            ("", None),
            ("99999999T", None),
        ];
        for (text, expected) in table {
            assert_eq!(byte_size::parse(text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn hybrid_shares_within_a_host() {
        let hosts = [
            (1, None),
            (2, None),
            (4, Some(2)),
            (6, Some(3)),
            (8, Some(4)),
            (16, Some(8)),
            (7, None),
            (1024, Some(8)),
        ];
        for (ranks, host) in hosts {
            assert_eq!(host_of(ranks), host, "{ranks}");
        }
    }
}
