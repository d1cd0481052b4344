//! `brigade explain device-map`: placement of a model's weights on GPUs, in memory and on disk.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use brigade_rank_env::text::escaped;
use brigade_sharding::WeightFormat;
use brigade_sharding::device_map::{DeviceMap, FreeMemory, Place, Placement};
use clap::{Args, ValueEnum};
use serde_json::json;

use crate::estimate::{format, limit, weights_file};

/// The question of `brigade explain device-map`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DeviceMapArgs {
    /// Weights file, its index, or a folder with either and config.json
    file: PathBuf,

    /// State dictionary of a file of torch.save, if it has several
    #[arg(long, value_name = "KEY")]
    key: Option<String>,

    /// Memory for weights on each device (cuda:0=20G,cpu=60G)
    ///
    /// The disk is always available, after the others
    #[arg(long, value_name = "LIMIT,..", value_delimiter = ',', value_parser = limit)]
    #[arg(required_unless_present = "map")]
    max_memory: Vec<(String, String)>,

    /// Format of the weights [default: types of the file]
    ///
    /// bf16, fp16, fp32, int8, int4, int4:GROUP, nf4 or fp8. Quantised formats apply to the matrices of blocks only
    #[arg(long, value_name = "FORMAT", value_parser = format)]
    dtype: Option<WeightFormat>,

    /// Rule that assigns layers to devices
    ///
    /// auto (the same as balanced), balanced, balanced_low_0, sequential or fill. balanced keeps the order and gives
    /// each GPU about the same number of bytes; balanced_low_0 gives the first GPU as little as possible; sequential
    /// fills one device after the other; fill leaves as few bytes unused as possible
    #[arg(long, value_name = "RULE", value_enum, default_value_t, hide_possible_values = true)]
    rule: RuleArg,

    /// Map in Accelerate's JSON format, in place of a rule
    #[arg(long, value_name = "FILE", conflicts_with = "rule")]
    map: Option<PathBuf>,

    /// Move the first module that fits to a device that is left empty
    #[arg(long)]
    fallback: bool,

    /// Print the map, layers and bytes as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum RuleArg {
    #[default]
    Auto,
    Balanced,
    #[value(name = "balanced_low_0")]
    BalancedLow0,
    Sequential,
    Fill,
}

pub(super) fn run(args: &DeviceMapArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let weights = weights_file::read(&args.file, args.key.as_deref(), None)?;
    let map = args.device_map()?;
    let placement = map.resolve(&weights.tree, &FreeMemory::unknown())?;
    if args.json {
        json(&placement, out)?;
    } else {
        text(&args.file, &placement, out)?;
    }
    Ok(())
}

impl DeviceMapArgs {
    fn device_map(&self) -> anyhow::Result<DeviceMap> {
        let map = match &self.map {
            Some(file) => {
                let text = std::fs::read_to_string(file);
                let text = text.with_context(|| format!("cannot read {}", file.display()))?;
                DeviceMap::from_json(&text).with_context(|| file.display().to_string())?
            }
            None => self.rule.device_map(),
        };
        let map = map.max_memory(self.max_memory.iter().cloned()).fallback(self.fallback);
        Ok(match self.dtype {
            Some(format) => map.format(format),
            None => map,
        })
    }
}

impl RuleArg {
    fn device_map(self) -> DeviceMap {
        match self {
            Self::Auto => DeviceMap::auto(),
            Self::Balanced => DeviceMap::balanced(),
            Self::BalancedLow0 => DeviceMap::balanced_low_0(),
            Self::Sequential => DeviceMap::sequential(),
            Self::Fill => DeviceMap::fill(),
        }
    }
}

fn text(file: &Path, placement: &Placement, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{}", escaped(file.display()))?;
    write!(out, "{placement}")
}

fn json(placement: &Placement, out: &mut impl Write) -> io::Result<()> {
    let name = |(place, bytes): (Place, u64)| (place.to_string(), bytes);
    let bytes: BTreeMap<_, _> = placement.bytes().into_iter().map(name).collect();
    let answer = json!({
        "map": placement,
        "layers": placement.runs(),
        "bytes": bytes,
        "bytes_moved_per_token": moved(placement),
        "notes": placement.notes(),
    });
    serde_json::to_writer_pretty(&mut *out, &answer)?;
    out.write_all(b"\n")
}

/// Returns the bytes that a forward pass moves from each place.
fn moved(placement: &Placement) -> BTreeMap<String, u64> {
    let from = |place| (place, placement.bytes_moved_from(place));
    let moved = [Place::Cpu, Place::Disk].map(from).into_iter().filter(|(_, bytes)| *bytes > 0);
    moved.map(|(place, bytes)| (place.to_string(), bytes)).collect()
}

const EXAMPLES: &str = "\
Examples:
  brigade explain device-map llama/ --max-memory cuda:0=20G,cpu=60G --dtype bf16
  brigade explain device-map llama/ --max-memory cuda:0=20G,cuda:1=20G --rule balanced_low_0
  brigade explain device-map llama/ --max-memory cpu=2G --dtype int4 --json";
