//! Memory of text generation: weights in each format, the key-value cache, and the speed limit of weights that are
//! moved.

use std::io::{self, Write};

use brigade_checkpoint::QuantizedFormat;
use brigade_rank_env::text::escaped;
use brigade_sharding::byte_size::{self, in_bytes};
use brigade_sharding::device_map::{
    DeviceMap, DeviceMapError, FreeMemory, Place, PlacedLayer, Placement,
};
use brigade_sharding::{Inference, WeightFormat, WeightTransfer};
use clap::Args;
use serde_json::{Value, json};

use super::memory::Shape;
use super::{EstimateArgs, Subject, short};

#[derive(Debug, Args)]
pub(super) struct InferenceOptions {
    /// Estimate inference instead of training
    ///
    /// Shows the size of the weights in each format, the size of the key-value cache, and the maximum number of tokens
    /// per second if weights are copied to a GPU for each token
    #[arg(long, conflicts_with_all = ["nproc", "optimizer", "fused_attention", "kernels", "image_size"])]
    pub(super) inference: bool,

    /// Format of the weights
    ///
    /// bf16, fp16, fp32, int8, int4, int4:GROUP, nf4 or fp8. Quantised formats apply to the matrices of blocks only
    #[arg(long, value_name = "FORMAT", default_value = "bf16", value_parser = format)]
    #[arg(requires = "inference")]
    weights: WeightFormat,

    /// Memory of each device for weights and caches (cuda:0=20G)
    #[arg(long, value_name = "LIMIT,..", value_delimiter = ',', requires = "inference")]
    #[arg(value_parser = limit)]
    max_memory: Vec<(String, String)>,

    /// Bytes per second from the host's memory to a GPU
    #[arg(long, value_name = "BYTES", default_value = "25G", value_parser = byte_size::parse)]
    #[arg(requires = "inference")]
    pcie: u64,

    /// Bytes per second from the disk
    #[arg(long, value_name = "BYTES", default_value = "3G", value_parser = byte_size::parse)]
    #[arg(requires = "inference")]
    disk: u64,
}

/// Bytes of one format of the weights, and their placement.
struct Row {
    format: WeightFormat,
    weights: u64,
    largest: PlacedLayer,
    cache: Option<Inference>,
    /// Placement, if memory limits are given.
    placement: Option<Result<Placement, DeviceMapError>>,
}

impl Row {
    fn new(args: &EstimateArgs, subject: &Subject, format: WeightFormat) -> anyhow::Result<Self> {
        let unknown = FreeMemory::unknown();
        let whole = DeviceMap::by_hand([("", "cpu")]).format(format);
        let layers = whole.resolve(&subject.tree, &unknown)?.layers().to_vec();
        let cache = match subject.size.shape {
            Some(Shape::Transformer { layers, keys, vocabulary, .. }) => Some(Inference {
                layers,
                key_width: keys,
                vocabulary,
                samples: args.batch_size,
                tokens: args.seq_len,
                dtype: format.float(),
            }),
            _ => None,
        };
        let placement = if args.inference.max_memory.is_empty() {
            None
        } else {
            let reserve = cache.map(|cache| cache.reserve()).unwrap_or_default();
            let map = DeviceMap::auto().format(format).reserve(reserve);
            let map = map.max_memory(args.inference.max_memory.iter().cloned());
            match map.resolve(&subject.tree, &unknown) {
                Err(error) if !matches!(error, DeviceMapError::UnitTooLarge { .. }) => {
                    return Err(error.into());
                }
                resolved => Some(resolved),
            }
        };
        let weights = layers.iter().map(|layer| layer.bytes).sum();
        // The first of several equal ones.
        let largest = layers.into_iter().rev().max_by_key(|layer| layer.bytes);
        let largest = largest.ok_or(DeviceMapError::Empty)?;
        Ok(Self { format, weights, largest, cache, placement })
    }

    fn total(&self) -> u64 {
        let cache = self.cache.map_or(0, |it| it.cache().saturating_add(it.logits()));
        self.weights.saturating_add(cache)
    }

    /// Returns the maximum tokens per second with weights in host memory, and with weights on disk.
    fn bounds(&self, args: &EstimateArgs) -> [Option<f64>; 2] {
        let InferenceOptions { pcie: link, disk: read, .. } = args.inference;
        let transfer = |host, disk| WeightTransfer { host, disk, link, read };
        [transfer(self.weights, 0), transfer(0, self.weights)].map(|it| tokens(args, it))
    }
}

/// Returns the tokens per second of all texts of the batch.
fn tokens(args: &EstimateArgs, transfer: WeightTransfer) -> Option<f64> {
    transfer.forwards_per_second().map(|forwards| forwards * args.batch_size as f64)
}

fn transfer(args: &EstimateArgs, placement: &Placement) -> WeightTransfer {
    let InferenceOptions { pcie, disk: read, .. } = args.inference;
    let link = if placement.compute_place().is_gpu() { pcie } else { 0 };
    let [host, disk] = [Place::Cpu, Place::Disk].map(|place| placement.bytes_moved_from(place));
    WeightTransfer { host, disk, link, read }
}

pub(super) fn write(
    args: &EstimateArgs,
    subject: &Subject,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let chosen = Row::new(args, subject, args.inference.weights)?;
    let others = FORMATS.into_iter().filter(|format| *format != chosen.format);
    let rows: anyhow::Result<Vec<_>> =
        others.map(|format| Row::new(args, subject, format)).collect();
    let mut rows = rows?;
    rows.insert(0, chosen);
    if args.json {
        json(args, subject, &rows, out)?;
    } else {
        text(args, subject, &rows, out)?;
    }
    Ok(())
}

fn text(
    args: &EstimateArgs,
    subject: &Subject,
    rows: &[Row],
    out: &mut impl Write,
) -> io::Result<()> {
    let chosen = &rows[0];
    writeln!(
        out,
        "{}: {} parameters, in {}",
        escaped(&subject.title),
        short(subject.size.parameters),
        chosen.format
    )?;
    let layer = escaped(&chosen.largest.name).to_string();
    let largest = in_bytes(chosen.largest.bytes);
    let mut line = |name: &str, bytes: u64, of: &str| {
        let line = format!("{name:<18}{:>10}  {of}", in_bytes(bytes));
        writeln!(out, "{}", line.trim_end())
    };
    line("weights", chosen.weights, &format!("the largest layer {largest}: {layer}"))?;
    line("of them buffers", subject.buffers, "")?;
    if let Some(cache) = &chosen.cache {
        let token = in_bytes(cache.cache_per_token());
        let batch = format!("{token} a token, {} x {} tokens", args.batch_size, args.seq_len);
        line("key-value cache", cache.cache(), &batch)?;
        line("logits", cache.logits(), "")?;
    }
    line("in all", chosen.total(), "")?;
    if chosen.cache.is_none() {
        writeln!(
            out,
            "the size of the cache is unknown: the tensors' names and shapes show no blocks"
        )?;
    }

    let is_limited = chosen.placement.is_some();
    let last =
        if is_limited { "with these limits" } else { "tokens/s at most, all from cpu, disk" };
    writeln!(
        out,
        "\n{:<10}{:>10}{:>15}{:>10}  {last}",
        "format", "weights", "largest layer", "in all"
    )?;
    for row in rows {
        let fit = match &row.placement {
            Some(placement) => fit(args, placement),
            None => row.bounds(args).map(|bound| rate(bound.unwrap_or(0.0))).join(", "),
        };
        writeln!(
            out,
            "{:<10}{:>10}{:>15}{:>10}  {fit}",
            row.format,
            in_bytes(row.weights),
            in_bytes(row.largest.bytes),
            in_bytes(row.total()),
        )?;
    }
    if !is_limited {
        writeln!(out, "--max-memory cuda:0=20G,cpu=60G shows which of them fit")?;
    }
    Ok(())
}

/// Describes whether a format fits, and its cost.
fn fit(args: &EstimateArgs, placement: &Result<Placement, DeviceMapError>) -> String {
    let placement = match placement {
        Ok(placement) => placement,
        Err(error) => return format!("does not fit: {error}"),
    };
    let moved = [Place::Cpu, Place::Disk].map(|place| (place, placement.bytes_moved_from(place)));
    let moved: Vec<_> = moved
        .into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(place, bytes)| format!("{} from {place}", in_bytes(bytes)))
        .collect();
    match tokens(args, transfer(args, placement)) {
        Some(bound) => format!(
            "offloaded: {} for each token, at most {} tokens/s",
            moved.join(" and "),
            rate(bound)
        ),
        None => {
            let used = placement.bytes().into_iter().filter(|(_, bytes)| *bytes > 0);
            let places: Vec<_> = used.map(|(place, _)| place.to_string()).collect();
            format!("fits on {}", places.join(" and "))
        }
    }
}

fn rate(tokens: f64) -> String {
    if tokens >= 100.0 { format!("{tokens:.0}") } else { format!("{tokens:.2}") }
}

fn json(
    args: &EstimateArgs,
    subject: &Subject,
    rows: &[Row],
    out: &mut impl Write,
) -> io::Result<()> {
    let formats: Vec<Value> = rows.iter().map(|row| row_json(args, row)).collect();
    let answer = json!({
        "model": subject.title,
        "read": subject.read,
        "parameters": subject.size.parameters,
        "buffers": subject.buffers,
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "cache_per_token": rows[0].cache.map(|cache| cache.cache_per_token()),
        "formats": formats,
    });
    serde_json::to_writer_pretty(&mut *out, &answer)?;
    out.write_all(b"\n")
}

fn row_json(args: &EstimateArgs, row: &Row) -> Value {
    let [from_cpu, from_disk] = row.bounds(args);
    let mut answer = json!({
        "format": row.format.to_string(),
        "weights": row.weights,
        "largest_layer": row.largest.bytes,
        "cache": row.cache.map(|cache| cache.cache()),
        "total": row.total(),
        "tokens_per_second_all_from_cpu": from_cpu,
        "tokens_per_second_all_from_disk": from_disk,
    });
    match &row.placement {
        None => {}
        Some(Err(error)) => answer["error"] = error.to_string().into(),
        Some(Ok(placement)) => {
            let moved = transfer(args, placement);
            answer["map"] = json!(placement);
            answer["bytes_moved_per_token"] = json!({"cpu": moved.host, "disk": moved.disk});
            answer["tokens_per_second"] = tokens(args, moved).into();
        }
    }
    answer
}

/// Parses a memory limit of a device: `cuda:0=20G`, or `disk=` without a limit.
pub(crate) fn limit(text: &str) -> Result<(String, String), String> {
    let wrong = || "not a device and its bytes such as cuda:0=20G".to_owned();
    let (device, bytes) = text.split_once('=').ok_or_else(wrong)?;
    device.trim().parse::<Place>().map_err(|error| error.to_string())?;
    Ok((device.to_owned(), bytes.to_owned()))
}

pub(crate) fn format(text: &str) -> Result<WeightFormat, String> {
    text.parse()
}

const FORMATS: [WeightFormat; 5] = [
    WeightFormat::Bf16,
    WeightFormat::Quantized(QuantizedFormat::Fp8),
    WeightFormat::Quantized(QuantizedFormat::Int8),
    WeightFormat::Quantized(QuantizedFormat::Int4 { group: 128 }),
    WeightFormat::Nf4,
];
