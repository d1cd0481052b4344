//! `brigade estimate`: memory of a training run, before it is started.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, bail};
use brigade_checkpoint::{TensorInfo, hub_cache};
use brigade_rank_env::text::{counted, escaped};
use brigade_sharding::Parameter;
use brigade_sharding::byte_size::in_bytes;
use brigade_sharding::device_map::ModuleTree;
use clap::{Args, ValueEnum};
use serde_json::json;

use crate::config::Usage;
use crate::output::is_broken_pipe;

mod divided;
mod inference;
mod known;
mod memory;
mod strategies;
pub(crate) mod weights_file;

pub(crate) use inference::{format, limit};
pub(crate) use strategies::Mixed;

use memory::{Memory, MicroBatch, ModelSize, OptimizerState, Precision, Shape};

/// Estimate the memory of a training run
///
/// The sizes of weights, gradients and optimizer states are exact. Activations depend on the model's code, and are
/// estimated from its shape. Without sharding every rank holds the whole model. With --inference the command estimates
/// text generation instead, with --nproc every sharding strategy, and with --tensor, --context, --expert and --pipeline
/// ranks that divide layers, sequences, experts and stages.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct EstimateArgs {
    /// Weights file, number of parameters (350M, 7B), or name of a model
    ///
    /// A weights file is a safetensors file, one of torch.save (.pth, .bin, .ckpt), torch.jit.save or
    /// torch.export.save, or a folder or an index of several. A model of the Hugging Face hub
    /// (google-bert/bert-base-uncased) is found in the local cache
    #[arg(value_name = "MODEL|FILE")]
    model: String,

    /// State dictionary of a file of torch.save, if it has several
    ///
    /// Keys of nested dictionaries are separated by dots (model_ema, model.state_dict)
    #[arg(long, value_name = "KEY")]
    key: Option<String>,

    /// Number of samples per rank and step
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive)]
    batch_size: u64,

    /// Number of tokens per sample
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = positive)]
    seq_len: u64,

    /// Pixels per side of an image [default: that of the model]
    #[arg(long, value_name = "N", value_parser = positive)]
    image_size: Option<u64>,

    /// Optimizer
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    optimizer: OptimizerArg,

    /// Attention uses a fused kernel, which keeps no matrix of scores
    #[arg(long)]
    fused_attention: bool,

    /// Mixed precision uses Brigade's kernels on a GPU
    ///
    /// Brigade's transformers then keep fewer activations, no matrices of scores, and at most 512 MiB of logits
    #[arg(long)]
    kernels: bool,

    /// Show every sharding strategy, for these numbers of ranks
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = ranks)]
    nproc: Vec<usize>,

    #[command(flatten)]
    sharded: strategies::Options,

    #[command(flatten)]
    divided: divided::Options,

    #[command(flatten)]
    inference: inference::InferenceOptions,

    /// Print the bytes as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum OptimizerArg {
    /// Two states: Adam, AdamW, LAMB
    #[default]
    #[value(alias = "adamw", alias = "lamb")]
    Adam,
    /// One state: SGD with momentum, RMSprop, Adagrad
    #[value(alias = "rmsprop", alias = "adagrad")]
    Momentum,
    /// No state
    Sgd,
}

/// Model whose memory is estimated, and its origin.
struct Subject {
    size: ModelSize,
    title: String,
    /// Description of the model's weights file, in lines.
    read: Vec<String>,
    notes: Vec<String>,
    parameters: Vec<Parameter>,
    /// Total size of the model's buffers in bytes.
    buffers: u64,
    tree: ModuleTree,
}

impl Subject {
    /// Creates a model from its sizes alone.
    fn of_size(title: &str, size: ModelSize, notes: Vec<String>) -> anyhow::Result<Self> {
        let parameters = size.parameters_by_unit();
        let info = |it: &Parameter| {
            (it.name().to_owned(), TensorInfo { dtype: it.dtype, shape: it.shape.clone() })
        };
        let tensors: Vec<_> = parameters.iter().map(info).collect();
        let tree = weights_file::module_tree(&tensors, Some(false))?;
        let title = title.to_owned();
        Ok(Self { title, size, read: Vec::new(), notes, parameters, buffers: 0, tree })
    }
}

/// Writes the answer to `out`. A reader that closes the pipe ends the answer without an error.
pub(crate) fn run(args: &EstimateArgs, out: impl Write) -> anyhow::Result<()> {
    let subject = args.subject()?;
    let mut out = io::BufWriter::new(out);
    if args.inference.inference {
        return match inference::write(args, &subject, &mut out).and_then(|()| Ok(out.flush()?)) {
            Err(error) if is_broken_pipe(&error) => Ok(()),
            written => written,
        };
    }
    let written = if args.nproc.is_empty() {
        let rows = args.rows(&subject.size)?;
        if args.json {
            args.json(&subject, &rows, &mut out)
        } else {
            args.text(&subject, &rows, &mut out)
        }
    } else {
        let tables = strategies::tables(args, &subject)?;
        if args.json {
            strategies::json(args, &subject, &tables, &mut out)
        } else {
            strategies::text(args, &subject, &tables, &mut out)
        }
    };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

impl EstimateArgs {
    fn subject(&self) -> anyhow::Result<Subject> {
        let name = self.model.as_str();
        if let Some(size) = known::find(name, self.image_size) {
            return Subject::of_size(name, size, Vec::new());
        }
        let path = Path::new(name);
        if path.exists() {
            return self.of_weights(path, None);
        }
        if let Some(parameters) = count_of(name) {
            let notes = vec![
                "activations and the largest layer as in a transformer of this size without an \
                 embedding"
                    .to_owned(),
            ];
            return Subject::of_size(name, usual(parameters), notes);
        }
        if let Some(snapshot) = hub_cache::model(name) {
            let note = format!("weights in {}", snapshot.display());
            return self.of_weights(&snapshot, Some(note));
        }
        let names: Vec<_> = known::names().collect();
        let cache = hub_cache::folder();
        let cache = cache.map_or_else(String::new, |folder| format!(" ({})", folder.display()));
        bail!(Usage(format!(
            "{name} is not a file, a number of parameters (350M, 7B) or a known model ({}), and Hugging Face's \
             cache{cache} has no model of this name: `hf download {name}` puts one of the hub there",
            names.join(", "),
        )))
    }

    /// Reads a model from a weights file, or from a folder of the hub's cache.
    fn of_weights(&self, path: &Path, note: Option<String>) -> anyhow::Result<Subject> {
        let weights = weights_file::read(path, self.key.as_deref(), self.image_size)?;
        let types: Vec<_> = weights
            .types
            .iter()
            .map(|(dtype, count)| format!("{} {dtype}", short(*count)))
            .collect();
        let mut notes: Vec<String> = note.into_iter().collect();
        notes.extend(weights.read.iter().map(|line| format!("read {line}")));
        notes.push(format!("{}: {}", counted(weights.tensors, "tensor"), types.join(", ")));
        if weights.size.shape.is_none() {
            notes.push(UNKNOWN_SHAPE.to_owned());
        }
        Ok(Subject {
            title: self.model.clone(),
            size: weights.size,
            read: weights.read,
            notes,
            parameters: weights.parameters,
            buffers: weights.buffers,
            tree: weights.tree,
        })
    }

    fn rows(&self, size: &ModelSize) -> anyhow::Result<Vec<(&'static str, Memory)>> {
        let state = match self.optimizer {
            OptimizerArg::Adam => OptimizerState::Two,
            OptimizerArg::Momentum => OptimizerState::One,
            OptimizerArg::Sgd => OptimizerState::None,
        };
        let batch = self.batch(self.batch_size);
        PRECISIONS
            .into_iter()
            .map(|(name, precision)| {
                let memory = Memory::new(size, precision, state, batch)
                    .context("the run needs more bytes than 64 bits can count: check the sizes")?;
                Ok((name, memory))
            })
            .collect()
    }

    fn batch(&self, samples: u64) -> MicroBatch {
        let keeps_scores = !self.fused_attention;
        MicroBatch { samples, tokens: self.seq_len, keeps_scores, kernels: self.kernels }
    }

    /// Writes the model's description and the definition of a step.
    fn heading(&self, subject: &Subject, out: &mut impl Write) -> io::Result<()> {
        let size = &subject.size;
        writeln!(
            out,
            "{}: {} parameters, the largest tensor {}",
            escaped(&subject.title),
            short(size.parameters),
            short(size.largest)
        )?;
        for note in &subject.notes {
            writeln!(out, "{}", escaped(note))?;
        }
        let batch = match size.shape {
            Some(Shape::Transformer { .. }) => {
                format!("{} x {} tokens", self.batch_size, self.seq_len)
            }
            _ => counted(self.batch_size, "sample"),
        };
        writeln!(out, "a step of one rank: {batch}, states of {}\n", self.optimizer.name())
    }

    fn text(
        &self,
        subject: &Subject,
        rows: &[(&str, Memory)],
        out: &mut impl Write,
    ) -> io::Result<()> {
        self.heading(subject, out)?;
        writeln!(
            out,
            "{:<20}{:>10}{:>11}{:>11}{:>13}{:>10}",
            "precision", "weights", "gradients", "optimizer", "activations", "in all"
        )?;
        for (name, memory) in rows {
            let cell = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), in_bytes);
            let activations = match (memory.gradients, memory.activations) {
                (Some(_), None) => "unknown".to_owned(),
                (_, bytes) => cell(bytes),
            };
            writeln!(
                out,
                "{name:<20}{:>10}{:>11}{:>11}{activations:>13}{:>10}",
                in_bytes(memory.weights),
                cell(memory.gradients),
                cell(memory.optimizer),
                in_bytes(memory.total()),
            )?;
        }
        writeln!(
            out,
            "\n{:<8}{:>16}{:>22}{:>22}",
            "ranks", "samples a step", "fp32 on all ranks", "mixed on all ranks"
        )?;
        for ranks in RANKS_SHOWN {
            let all = |row: usize| in_bytes(rows[row].1.total().saturating_mul(ranks));
            let samples = ranks.saturating_mul(self.batch_size);
            writeln!(out, "{ranks:<8}{samples:>16}{:>22}{:>22}", all(0), all(1))?;
        }
        Ok(())
    }

    fn json(
        &self,
        subject: &Subject,
        rows: &[(&str, Memory)],
        out: &mut impl Write,
    ) -> io::Result<()> {
        let precisions: serde_json::Map<_, _> = rows
            .iter()
            .map(|(name, memory)| {
                let bytes = json!({
                    "weights": memory.weights,
                    "gradients": memory.gradients,
                    "optimizer": memory.optimizer,
                    "activations": memory.activations,
                    "total": memory.total(),
                });
                ((*name).to_owned(), bytes)
            })
            .collect();
        let answer = json!({
            "model": subject.title,
            "read": subject.read,
            "parameters": subject.size.parameters,
            "largest": subject.size.largest,
            "batch_size": self.batch_size,
            "bytes_per_rank": precisions,
        });
        serde_json::to_writer_pretty(&mut *out, &answer)?;
        out.write_all(b"\n")
    }
}

impl OptimizerArg {
    fn name(self) -> &'static str {
        match self {
            Self::Adam => "Adam",
            Self::Momentum => "SGD with momentum",
            Self::Sgd => "plain SGD",
        }
    }
}

/// Parses a number of parameters: `350M`, `7B`, `1.5b`, `124439808`.
fn count_of(text: &str) -> Option<u64> {
    let plain = text.replace('_', "");
    let (digits, factor) = match plain.char_indices().next_back()? {
        (end, 'k' | 'K') => (&plain[..end], 1e3),
        (end, 'm' | 'M') => (&plain[..end], 1e6),
        (end, 'b' | 'B' | 'g' | 'G') => (&plain[..end], 1e9),
        (end, 't' | 'T') => (&plain[..end], 1e12),
        _ => return plain.parse().ok().filter(|count| *count > 0),
    };
    let count = digits.parse::<f64>().ok()? * factor;
    (1.0..1e18).contains(&count).then(|| count.round() as u64)
}

/// Returns a transformer with that many parameters, 128 times as wide as deep: between GPT-2's 64 and the 128 to 200 of
/// larger models.
fn usual(parameters: u64) -> ModelSize {
    let hidden = ((parameters as f64 * 128.0 / 12.0).cbrt().round() as u64).max(1);
    let layers = (hidden / 128).max(1);
    let heads = (hidden / 64).max(1);
    let keys = hidden;
    let shape = Shape::Transformer {
        layers,
        hidden,
        heads,
        keys,
        vocabulary: 0,
        mixture: None,
        intermediate: 4 * hidden,
        gated: false,
    };
    ModelSize { parameters, largest: (4 * hidden * hidden).min(parameters), shape: Some(shape) }
}

fn positive(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("not a whole number from 1".to_owned()),
    }
}

fn ranks(text: &str) -> Result<usize, String> {
    positive(text).and_then(|ranks| ranks.try_into().map_err(|_| "too many ranks".to_owned()))
}

/// Formats a count: `124.4 M`.
fn short(count: u64) -> String {
    let units = [(1_000_000_000_000, "T"), (1_000_000_000, "B"), (1_000_000, "M"), (1000, "k")];
    match units.into_iter().find(|(unit, _)| count >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", count as f64 / unit as f64),
        None => count.to_string(),
    }
}

const RANKS_SHOWN: [u64; 4] = [1, 2, 4, 8];

const PRECISIONS: [(&str, Precision); 5] = [
    ("fp32", Precision::Fp32),
    ("bf16, fp16 mixed", Precision::Mixed16),
    ("bf16 throughout", Precision::Pure16),
    ("int8, inference", Precision::Int8),
    ("int4, inference", Precision::Int4),
];

const UNKNOWN_SHAPE: &str = "activations unknown: they cannot be derived from the tensors' names and \
                             shapes; for a model with convolutions give --image-size";

const EXAMPLES: &str = "\
Examples:
  brigade estimate model.safetensors --batch-size 8
  brigade estimate google-bert/bert-base-uncased --batch-size 32 --seq-len 128
  brigade estimate gpt2 --seq-len 512 --fused-attention
  brigade estimate resnet18 --image-size 32 --batch-size 128 --optimizer momentum
  brigade estimate 7B --nproc 8 --mixed bf16 --memory 80G --bandwidth 100G
  brigade estimate llama-7b --nproc 8 --tensor 2 --pipeline 2 --context 2 --seq-len 32768
  brigade estimate mixtral-8x7b --nproc 64 --expert 8 --mixed bf16 --memory 80G
  brigade estimate llama/ --inference --batch-size 4 --weights int4 --max-memory cuda:0=8G";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts() {
        let table = [
            ("7B", Some(7_000_000_000)),
            ("1.5b", Some(1_500_000_000)),
            ("350M", Some(350_000_000)),
            ("124_439_808", Some(124_439_808)),
            ("12k", Some(12_000)),
            ("0", None),
            ("-1M", None),
            ("M", None),
            ("", None),
            ("seven", None),
            ("1e99B", None),
            ("nanB", None),
        ];
        for (text, expected) in table {
            assert_eq!(count_of(text), expected, "{text}");
        }
    }

    #[test]
    fn amounts() {
        assert_eq!(short(124_439_808), "124.4 M");
        assert_eq!(short(12), "12");
    }
}
