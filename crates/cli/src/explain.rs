//! `brigade explain`: shows what a run would do, without starting one.

use std::io::{self, Write};

use brigade_rank_env::text::counted;
use brigade_sampling::{Order, Scheme, ShardOptions, Shards};
use brigade_sharding::{Mesh, message_formulas};
use clap::{Args, Subcommand, ValueEnum};

use crate::output::is_broken_pipe;
pub(crate) use schedule::number;
use table::Table;

mod device_map;
mod mesh;
mod pipeline;
mod schedule;
mod sharding;
mod table;

/// What to explain.
#[derive(Debug, Subcommand)]
pub(crate) enum Explain {
    /// Show which rank gets which samples
    Shards(ShardsArgs),
    /// Show a schedule's learning rate and momentum, step by step
    Schedule(Box<schedule::ScheduleArgs>),
    /// Show how ranks divide a model, and the messages of a step
    Sharding(sharding::ShardingArgs),
    /// Show the ranks' positions on the axes of parallelism, and their groups
    Mesh(mesh::MeshArgs),
    /// Show the order of actions on the ranks of a pipeline
    Pipeline(pipeline::PipelineArgs),
    /// Show which layers of a model are on which GPU, in host memory and on disk
    DeviceMap(device_map::DeviceMapArgs),
}

/// The question of `brigade explain shards`.
#[derive(Debug, Args)]
pub(crate) struct ShardsArgs {
    /// Number of samples in the epoch
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    samples: usize,

    /// Batch size: of one rank, or of all ranks together with --split-batches
    #[arg(long, value_name = "N", value_parser = rows, allow_negative_numbers = true)]
    batch_size: usize,

    /// Number of processes
    #[arg(long, value_name = "N", value_parser = ranks, allow_negative_numbers = true)]
    nproc: usize,

    /// Drop samples that do not fill a batch on every rank
    ///
    /// With torch's rules, drops the remainder of samples by ranks, as the sampler's drop_last
    #[arg(long)]
    drop_last: bool,

    /// Cut each batch into one piece per rank
    #[arg(long)]
    split_batches: bool,

    /// Allow smaller or missing last batches, instead of repeating samples
    #[arg(long)]
    no_even_batches: bool,

    /// Rules
    #[arg(long, value_name = "OF", value_enum, default_value_t)]
    scheme: SchemeArg,

    /// Print {"shards": [[[index, ...], ...], ...]}, by rank and batch
    #[arg(long)]
    json: bool,

    /// Show all rounds and ranks
    #[arg(long, conflicts_with = "json")]
    all: bool,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum SchemeArg {
    /// Accelerate's BatchSamplerShard
    #[default]
    Accelerate,
    /// torch's DistributedSampler
    Torch,
    /// fastai's DistributedDL
    Fastai,
}

/// Writes the answer to `out`. A reader that closes the pipe (`| head`) ends the answer without an error.
pub(crate) fn run(explain: &Explain, out: impl Write) -> anyhow::Result<()> {
    let mut out = io::BufWriter::new(out);
    let answered = match explain {
        Explain::Shards(args) => shards(args, &mut out),
        Explain::Schedule(args) => schedule::run(args, &mut out),
        Explain::Sharding(args) => sharding::run(args, &mut out),
        Explain::Mesh(args) => mesh::run(args, &mut out),
        Explain::Pipeline(args) => pipeline::run(args, &mut out),
        Explain::DeviceMap(args) => device_map::run(args, &mut out),
    };
    match answered.and_then(|()| Ok(out.flush()?)) {
        Err(error) if is_broken_pipe(&error) => Ok(()),
        answered => answered,
    }
}

/// Writes the formulas of the messages along the axes of a mesh, if there are any.
fn write_formulas(mesh: &Mesh, out: &mut impl Write) -> io::Result<()> {
    let formulas = message_formulas(mesh);
    if formulas.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\na rank of a transformer sends, for b texts of s tokens, width h, keys of width k:"
    )?;
    formulas.iter().try_for_each(|line| writeln!(out, "{line}"))
}

fn shards(args: &ShardsArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let shards = args.shards()?;
    let written = if args.json { json(&shards, out) } else { text(args, &shards, out) };
    Ok(written?)
}

impl ShardsArgs {
    fn shards(&self) -> anyhow::Result<Shards> {
        let (scheme, drop_tail) = match self.scheme {
            SchemeArg::Accelerate => (Scheme::Accelerate, false),
            SchemeArg::Torch => (Scheme::Torch, self.drop_last),
            SchemeArg::Fastai => (Scheme::Fastai, false),
        };
        let options = ShardOptions {
            scheme,
            split_batches: self.split_batches,
            even_batches: !self.no_even_batches,
            drop_last: self.drop_last && !drop_tail,
            drop_tail,
        };
        let order = Order::Sequential(self.samples);
        Ok(Shards::new(order, self.batch_size, self.nproc, options)?)
    }
}

/// Writes the batches one by one: all of them together may exceed the memory.
fn json(shards: &Shards, out: &mut impl Write) -> io::Result<()> {
    out.write_all(b"{\"shards\": [")?;
    for rank in 0..shards.world() {
        out.write_all(if rank == 0 { b"[" } else { b", [" })?;
        for (round, batch) in shards.rank(rank).enumerate() {
            if round > 0 {
                out.write_all(b", ")?;
            }
            serde_json::to_writer(&mut *out, &batch.indices)?;
        }
        out.write_all(b"]")?;
    }
    out.write_all(b"]}\n")
}

fn text(args: &ShardsArgs, shards: &Shards, out: &mut impl Write) -> io::Result<()> {
    let table = Table::new(shards, args.all);
    table.write(out)?;
    if table.rows() > 0 {
        writeln!(out)?;
    }
    let totals = shards.totals();
    if totals.duplicated > 0 {
        writeln!(out, "(...) repeats samples to fill the batch; metrics leave them out")?;
    }
    if shards.num_batches(0) != shards.num_batches(shards.world() - 1) {
        writeln!(
            out,
            "not every rank has the last batch: a collective in its step would wait for those that have none"
        )?;
    }
    writeln!(
        out,
        "{}: {} seen, {} repeated, {} dropped; {}",
        counted(args.samples, "sample"),
        totals.seen,
        totals.duplicated,
        totals.dropped,
        batches_per_rank(shards),
    )
}

/// Describes the number of batches per rank: equal, or one less from some rank on.
fn batches_per_rank(shards: &Shards) -> String {
    let (most, world) = (shards.num_batches(0), shards.world());
    let with_most = (0..world).take_while(|&rank| shards.num_batches(rank) == most).count();
    let batches = |count| counted(count, "batch");
    let ranks = |from: usize, to: usize| {
        if from == to { format!("rank {from}") } else { format!("ranks {from}-{to}") }
    };
    if world == 1 {
        format!("{} on the one rank", batches(most))
    } else if with_most == world {
        format!("{} on each of {world} ranks", batches(most))
    } else {
        format!(
            "{} on {}, {} on {}",
            batches(most),
            ranks(0, with_most - 1),
            batches(most - 1),
            ranks(with_most, world - 1),
        )
    }
}

fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".to_owned()),
        Ok(count) => Ok(count),
        Err(_) => Err(format!("it must be a whole number from 1 to {}", usize::MAX)),
    }
}

fn rows(text: &str) -> Result<usize, String> {
    at_most(MAX_ROWS, count(text)?)
}

fn ranks(text: &str) -> Result<usize, String> {
    at_most(MAX_RANKS, count(text)?)
}

fn at_most(limit: usize, count: usize) -> Result<usize, String> {
    if count <= limit { Ok(count) } else { Err(format!("it must be at most {limit}")) }
}

/// Maximum number of rows: a batch is written completely, so a mistyped size would only fill the memory.
const MAX_ROWS: usize = 1 << 24;
/// Maximum number of ranks of a round: more than any cluster has.
const MAX_RANKS: usize = 1 << 20;
