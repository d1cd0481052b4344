//! `brigade explain mesh`: places of a job's ranks on the axes of parallelism, and the groups that communicate.

use std::io::{self, Write};
use std::iter;
use std::ops::Range;

use anyhow::ensure;
use brigade_rank_env::text::counted;
use brigade_sharding::{Axis, Mesh};
use clap::Args;
use serde_json::{Value, json};

use super::table::{Index, ends, runs, shown};

/// The question of `brigade explain mesh`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct MeshArgs {
    /// Number of processes on all hosts
    #[arg(long, value_name = "N", value_parser = super::ranks, allow_negative_numbers = true)]
    nproc: usize,

    /// Number of hosts, with equal numbers of ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::count)]
    nnodes: usize,

    /// Stages of the pipeline (pp)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::count)]
    pipeline: usize,

    /// Copies of the sharded model (dp_replicate)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::count)]
    replicate: usize,

    /// Ranks that share one copy (dp_shard) [default: the remaining ones]
    #[arg(long, value_name = "N", value_parser = super::count)]
    shard: Option<usize>,

    /// Parts of the sequence, with ring or gathered attention (cp)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::count)]
    context: usize,

    /// Parts of the sequence, exchanged for heads (sp)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::count)]
    sequence: usize,

    /// Parts of each layer (tp)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::count)]
    tensor: usize,

    /// Ranks over which experts are spread (ep), within dp_shard to tp
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::count)]
    expert: usize,

    /// Print ranks, groups and warnings as JSON
    #[arg(long)]
    json: bool,

    /// Show all ranks and groups
    #[arg(long, conflicts_with = "json")]
    all: bool,
}

/// Groups of ranks along the same axes.
struct AxisGroups {
    axes: Vec<Axis>,
    groups: Vec<Vec<usize>>,
}

/// Mesh with its hosts.
struct Layout {
    mesh: Mesh,
    ranks_per_host: usize,
}

pub(super) fn run(args: &MeshArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let hosts = args.nnodes;
    ensure!(
        args.nproc.is_multiple_of(hosts),
        "{} cannot be shared out evenly among {hosts} hosts: change --nproc or --nnodes",
        counted(args.nproc, "rank"),
    );
    let layout = Layout { mesh: args.mesh()?, ranks_per_host: args.nproc / hosts };
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &layout.as_json()?).map_err(io::Error::from)?;
        return Ok(out.write_all(b"\n")?);
    }
    writeln!(
        out,
        "{}: {} on {}\n",
        layout.mesh,
        counted(args.nproc, "rank"),
        counted(hosts, "host")
    )?;
    let picked =
        |len, limit| if args.all { iter::once(0..len).collect() } else { ends(len, limit, None) };
    layout.ranks(&picked(args.nproc, MOST_RANKS), out)?;
    let of_axes = layout.groups();
    let width = of_axes.iter().map(|it| it.title().len()).max().unwrap_or(0);
    writeln!(out)?;
    for of_axis in &of_axes {
        let (count, size) = (of_axis.groups.len(), of_axis.groups[0].len());
        let groups = list(&of_axis.groups, &picked(count, MOST_GROUPS));
        let title = of_axis.title();
        writeln!(out, "{title:<width$}  {} of {size}: {groups}", counted(count, "group"))?;
    }
    if !of_axes.is_empty() {
        writeln!(out)?;
    }
    let readers = layout.readers()?;
    let sets = list(&readers, &picked(readers.len(), MOST_GROUPS));
    match (readers.len(), args.nproc) {
        (sets, ranks) if sets == ranks => writeln!(out, "each rank reads different samples")?,
        (1, _) => writeln!(out, "all ranks read the same samples")?,
        _ => writeln!(out, "the same samples are read by: {sets}")?,
    }
    if args.context > 1 || args.sequence > 1 {
        writeln!(out, "along cp and sp each rank has a part of their sequences")?;
    }
    super::write_formulas(&layout.mesh, out)?;
    for warning in layout.warnings() {
        writeln!(out, "warning: {warning}")?;
    }
    Ok(())
}

impl MeshArgs {
    fn mesh(&self) -> anyhow::Result<Mesh> {
        let others = [self.pipeline, self.replicate, self.context, self.sequence, self.tensor];
        let others = others.into_iter().try_fold(1usize, usize::checked_mul);
        let left = others.filter(|&others| self.nproc.is_multiple_of(others));
        let shard = self.shard.or_else(|| left.map(|others| self.nproc / others)).unwrap_or(1);
        let builder = Mesh::builder()
            .pipeline(self.pipeline)
            .replicate(self.replicate)
            .shard(shard)
            .context(self.context)
            .sequence(self.sequence)
            .tensor(self.tensor)
            .expert(self.expert);
        Ok(builder.build(self.nproc)?)
    }
}

impl Layout {
    fn host(&self, rank: usize) -> usize {
        rank / self.ranks_per_host
    }

    fn hosts(&self, group: &[usize]) -> Vec<usize> {
        let mut hosts: Vec<_> = group.iter().map(|&rank| self.host(rank)).collect();
        hosts.dedup();
        hosts
    }

    /// Writes one line per rank, with its host and its index on each axis.
    fn ranks(&self, picked: &[Range<usize>], out: &mut impl Write) -> anyhow::Result<()> {
        let axes: Vec<_> = self.axes().collect();
        let mut head = format!("{:<6}{:<8}", "host", "rank");
        for axis in &axes {
            head += &format!("{:<14}", axis.name());
        }
        writeln!(out, "{}", head.trim_end())?;
        let mut before = None;
        for rank in shown(picked) {
            let rank = match rank {
                Index::At(rank) => rank,
                Index::Omitted(count) => {
                    writeln!(out, "... {count} more ranks")?;
                    continue;
                }
            };
            let host = self.host(rank);
            let shown_host = if before == Some(host) { String::new() } else { host.to_string() };
            before = Some(host);
            let mut line = format!("{shown_host:<6}{rank:<8}");
            for axis in &axes {
                line += &format!("{:<14}", self.mesh.coordinate(rank, *axis)?);
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }

    /// Returns the axes with several ranks.
    fn axes(&self) -> impl Iterator<Item = Axis> + '_ {
        let axes = Axis::GRID.into_iter().chain([Axis::Expert]);
        axes.filter(|axis| self.mesh.size(*axis) > 1)
    }

    /// Returns the groups of ranks by their axes; groups of experts only if there are any.
    fn groups(&self) -> Vec<AxisGroups> {
        let has_experts = self.mesh.size(Axis::Expert) > 1;
        let is_shown = |axis: &Axis| has_experts || *axis != Axis::ExpertShard;
        let mut of_axes: Vec<AxisGroups> = Vec::new();
        for group in self.mesh.process_groups() {
            let axes: Vec<_> = group.axes.into_iter().filter(is_shown).collect();
            match of_axes.last_mut() {
                _ if axes.is_empty() => {}
                Some(last) if last.axes == axes => last.groups.push(group.ranks),
                _ => of_axes.push(AxisGroups { axes, groups: vec![group.ranks] }),
            }
        }
        of_axes
    }

    /// Returns the ranks that read the same samples, by their index along `dp`.
    fn readers(&self) -> anyhow::Result<Vec<Vec<usize>>> {
        let mut readers = vec![Vec::new(); self.mesh.size(Axis::Data)];
        for rank in 0..self.mesh.world_size() {
            readers[self.mesh.coordinate(rank, Axis::Data)?].push(rank);
        }
        Ok(readers)
    }

    fn warnings(&self) -> Vec<String> {
        let warning = |(axis, cost): (Axis, &str)| {
            let groups = self.mesh.groups(axis);
            let mut across = groups.iter().filter(|group| self.hosts(group).len() > 1);
            let first = across.next()?;
            Some(format!(
                "{axis}: {} of {} cross hosts (ranks {} are on hosts {}), so {cost} over the network: make {axis} a \
                 number that divides the {} of a host",
                across.count() + 1,
                counted(groups.len(), "group"),
                runs(first),
                runs(&self.hosts(first)),
                counted(self.ranks_per_host, "rank"),
            ))
        };
        let watched = [
            (Axis::Tensor, "each layer reduces its output"),
            (Axis::Expert, "each layer of experts exchanges its tokens"),
        ];
        watched.into_iter().filter_map(warning).collect()
    }

    fn as_json(&self) -> anyhow::Result<Value> {
        let mut ranks = Vec::new();
        for rank in 0..self.mesh.world_size() {
            let mut coordinates = serde_json::Map::new();
            for axis in self.axes() {
                coordinates
                    .insert(axis.name().to_owned(), self.mesh.coordinate(rank, axis)?.into());
            }
            ranks
                .push(json!({ "rank": rank, "host": self.host(rank), "coordinates": coordinates }));
        }
        let groups = self.groups();
        let groups: Vec<_> =
            groups.iter().map(|it| json!({ "axes": it.names(), "groups": it.groups })).collect();
        Ok(json!({
            "mesh": self.mesh.axes(),
            "ranks": ranks,
            "groups": groups,
            "same_samples": self.readers()?,
            "warnings": self.warnings(),
        }))
    }
}

impl AxisGroups {
    /// Returns the title of the groups: `dp_shard = dp = dp_cp`.
    fn title(&self) -> String {
        self.names().join(" = ")
    }

    fn names(&self) -> Vec<&'static str> {
        self.axes.iter().map(|axis| axis.name()).collect()
    }
}

/// Lists groups in short: `0-3  4-7  ... 6 more`.
fn list(groups: &[Vec<usize>], picked: &[Range<usize>]) -> String {
    let texts = shown(picked).map(|index| match index {
        Index::At(at) => runs(&groups[at]),
        Index::Omitted(count) => format!("... {count} more ..."),
    });
    texts.collect::<Vec<_>>().join("  ")
}

const MOST_RANKS: usize = 32;
const MOST_GROUPS: usize = 8;

const EXAMPLES: &str = "\
Examples:
  brigade explain mesh --nproc 8 --pipeline 2 --tensor 2
  brigade explain mesh --nproc 16 --nnodes 4 --replicate 2 --tensor 8
  brigade explain mesh --nproc 16 --nnodes 2 --expert 8";
