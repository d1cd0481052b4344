//! `brigade checkpoint`: inspects, verifies and converts checkpoints and weights files.

use std::io::{self, Write};
use std::path::PathBuf;

use brigade_checkpoint::convert::{
    AccelerateRun, QuantizeOptions, Report, StateKind, Target, WeightsOptions, convert_like,
    convert_with, quantize,
};
use brigade_checkpoint::{
    Dtype, FORMATS, QuantizeError, QuantizedFormat, WeightsFormat, format_named,
};
use brigade_rank_env::text::escaped;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueEnum};

mod inspect;
mod merge;
mod split;
mod verify;

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Checkpoint {
    Inspect(InspectArgs),
    Verify(VerifyArgs),
    Convert(ConvertArgs),
    Merge(merge::MergeArgs),
    Split(split::SplitArgs),
}

/// Show the contents of a checkpoint or weights file
///
/// Reads a folder that a run has saved, a safetensors file or an index of several, a file of torch.save, torch.jit.save
/// or torch.export.save, a folder that DeepSpeed has saved, or the weights in a folder of torch.distributed.checkpoint.
/// For a project's folder, shows the newest checkpoint. Does not read tensors, and never executes code of a file.
#[derive(Debug, Args)]
#[command(after_help = INSPECT_EXAMPLES)]
pub(crate) struct InspectArgs {
    /// The folder or file
    path: PathBuf,

    /// Print only the name and size of each object, not its tensors
    #[arg(long, conflicts_with = "json")]
    short: bool,

    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

/// Compare a checkpoint's files with the checksums that were written with them
///
/// Exits with 1 and a description if a file is missing, truncated or changed.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// The checkpoint's folder
    path: PathBuf,
}

/// Convert a checkpoint or weights to another layout
///
/// The target is created atomically, and must not exist. Contents that cannot be converted are listed.
///
/// To resume a run of PyTorch (also of FSDP), Accelerate, DeepSpeed, Lightning or Hugging Face's Trainer in your
/// program, save a
/// checkpoint right after `prepare` and pass it as --like; it defines the layout.
#[derive(Debug, Args)]
#[command(after_help = CONVERT_EXAMPLES)]
pub(crate) struct ConvertArgs {
    /// Checkpoint, weights file, or folder or index of weights
    ///
    /// With --like a folder of Accelerate's save_state, of Trainer, of DeepSpeed or of torch.distributed.checkpoint, a
    /// .ckpt of Lightning, or a dictionary of torch.save with `model`, `optimizer`, `scheduler`
    from: PathBuf,

    /// File or folder to create
    to: PathBuf,

    /// Layout of TO
    #[arg(long = "to", value_parser = layouts(), value_name = "LAYOUT", long_help = layout_help())]
    layout: Option<Layout>,

    /// Make a checkpoint for load_state, with the layout of this one
    ///
    /// CHECKPOINT is one that the program has saved right after `prepare`. Its states are replaced by those of FROM
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "layout")]
    like: Option<PathBuf>,

    /// States that may come from --like if FROM has none
    ///
    /// Comma-separated: model, optimizer, scheduler, scaler, loader (the position in the data), random (the states of
    /// random generators), custom, files. Without this option, a state that FROM lacks is an error
    #[arg(long, value_name = "KIND", value_delimiter = ',', requires = "like")]
    #[arg(value_parser = state_kinds(), hide_possible_values = true)]
    keep_state: Vec<StateKind>,

    /// Processes of the Accelerate run that loads TO
    ///
    /// Accelerate steps a scheduler once per process. Defaults to the number of ranks of the checkpoint
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(conflicts_with = "like")]
    num_processes: Option<u32>,

    /// The Accelerate run steps its schedulers once per optimizer step
    ///
    /// With split_batches=True or step_scheduler_with_optimizer=False
    #[arg(long, conflicts_with = "like")]
    split_batches: bool,

    /// State dictionary of FROM, if it has several
    ///
    /// Keys of nested dictionaries are separated by dots (model_ema, model.state_dict). For a checkpoint, the name of
    /// the model. Defaults to the only one
    #[arg(long, value_name = "KEY", conflicts_with = "like")]
    key: Option<String>,

    /// Prefix to remove from all names
    ///
    /// Tensors whose names do not begin with it are left out. By default `module.` and `_orig_mod.` are removed, if all
    /// names have them
    #[arg(long, value_name = "PREFIX", conflicts_with = "like")]
    prefix: Option<String>,

    /// Type of floats
    ///
    /// Other tensors are not converted. By default each tensor keeps its type
    #[arg(long, value_enum, value_name = "TYPE", conflicts_with = "like")]
    dtype: Option<Float>,

    /// Store the weights of linear layers in 8 or 4 bits
    ///
    /// int8, int4, int4:GROUP (input features with one scale; 128 by default) or fp8. TO is a folder with
    /// model.safetensors and the files beside FROM's weights, which `from_pretrained` reads unchanged. Embeddings,
    /// norms and the head are not quantised
    #[arg(long, value_name = "FORMAT", value_parser = quantized_format)]
    #[arg(conflicts_with_all = ["layout", "like", "num_processes", "split_batches", "key", "prefix", "dtype"])]
    weights: Option<QuantizedFormat>,

    /// Choose scales by the squared error
    ///
    /// Also tries smaller ranges, and takes the one with the least error. By default the range is that of the largest
    /// values
    #[arg(long, requires = "weights")]
    calibrated: bool,

    /// Quantise these layers, too, such as lm_head
    ///
    /// A layer's whole name, in which * stands for any characters; may be given several times
    #[arg(long, value_name = "LAYER", requires = "weights")]
    also: Vec<String>,

    /// Do not quantise these layers
    ///
    /// A layer's whole name, in which * stands for any characters; may be given several times
    #[arg(long, value_name = "LAYER", requires = "weights")]
    skip: Vec<String>,
}

fn quantized_format(text: &str) -> Result<QuantizedFormat, QuantizeError> {
    text.parse()
}

fn state_kinds() -> impl TypedValueParser<Value = StateKind> {
    PossibleValuesParser::new(StateKind::ALL.map(StateKind::name)).try_map(|name| {
        StateKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or("no kind of state")
    })
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Float {
    #[value(alias = "f64")]
    Float64,
    #[value(alias = "f32", alias = "float")]
    Float32,
    #[value(alias = "f16", alias = "half", alias = "fp16")]
    Float16,
    #[value(alias = "bf16")]
    Bfloat16,
}

/// Target format of a conversion.
#[derive(Debug, Clone, Copy)]
enum Layout {
    Weights(&'static dyn WeightsFormat),
    /// Folder for Accelerate's load_state.
    Accelerate,
    /// Folder for torch.distributed.checkpoint.load.
    Dcp,
}

fn layout_help() -> String {
    let endings: Vec<_> = FORMATS
        .iter()
        .flat_map(|format| format.extensions())
        .map(|extension| format!(".{extension}"))
        .collect();
    format!(
        "Layout of TO\n\nBy default its ending decides: {}; a folder is Accelerate's",
        endings.join(", ")
    )
}

/// Returns the formats of weights files by name, with Accelerate's folder and that of torch.distributed.checkpoint.
fn layouts() -> impl TypedValueParser<Value = Layout> {
    let formats =
        FORMATS.iter().map(|format| PossibleValue::new(format.name()).help(format.written()));
    let accelerate = PossibleValue::new("accelerate").help("A folder for Accelerate's load_state");
    let dcp = PossibleValue::new("dcp").help("A folder for torch.distributed.checkpoint.load");
    PossibleValuesParser::new(formats.chain([accelerate, dcp])).map(|name| {
        let format = FORMATS.iter().find(|format| format.name() == name);
        match format {
            Some(format) => Layout::Weights(*format),
            None if name == "dcp" => Layout::Dcp,
            None => Layout::Accelerate,
        }
    })
}

/// Writes the answer to `out` and returns the exit code. A reader that closes the pipe ends the answer without an
/// error.
pub(crate) fn run(question: &Checkpoint, out: impl Write) -> anyhow::Result<u8> {
    let mut out = io::BufWriter::new(out);
    let (code, text) = match question {
        Checkpoint::Inspect(args) => (0, inspect::answer(&args.path, args.form())?),
        Checkpoint::Verify(args) => verify::answer(&args.path)?,
        Checkpoint::Convert(args) => (0, args.convert()?),
        Checkpoint::Merge(args) => (0, args.merge()?),
        Checkpoint::Split(args) => (0, args.split()?),
    };
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(code),
        written => Ok(written.map(|()| code)?),
    }
}

impl InspectArgs {
    fn form(&self) -> inspect::Form {
        match (self.json, self.short) {
            (true, _) => inspect::Form::Json,
            (false, true) => inspect::Form::Short,
            (false, false) => inspect::Form::Full,
        }
    }
}

impl ConvertArgs {
    fn convert(&self) -> anyhow::Result<String> {
        if let Some(format) = self.weights {
            let options = QuantizeOptions {
                format,
                is_calibrated: self.calibrated,
                also: self.also.clone(),
                skip: self.skip.clone(),
            };
            return Ok(report_lines(quantize(&self.from, &self.to, &options)?));
        }
        let report = match &self.like {
            Some(like) => convert_like(&self.from, &self.to, like, &self.keep_state)?,
            None => convert_with(&self.from, &self.to, self.target()?, &self.options())?,
        };
        Ok(report_lines(report))
    }

    fn options(&self) -> WeightsOptions {
        WeightsOptions {
            key: self.key.clone(),
            prefix: self.prefix.clone(),
            dtype: self.dtype.map(|dtype| match dtype {
                Float::Float64 => Dtype::F64,
                Float::Float32 => Dtype::F32,
                Float::Float16 => Dtype::F16,
                Float::Bfloat16 => Dtype::BF16,
            }),
        }
    }

    fn target(&self) -> anyhow::Result<Target> {
        let by_extension = || match self.to.extension() {
            None => Ok(Layout::Accelerate),
            Some(ending) => format_named(ending).map(Layout::Weights).ok_or_else(|| {
                let names: Vec<_> = FORMATS.iter().map(|format| format.name()).collect();
                anyhow::anyhow!(
                    "the ending .{} is not that of a layout: give --to {}, accelerate or dcp",
                    escaped(ending.display()),
                    names.join(", ")
                )
            }),
        };
        let target = match self.layout.map_or_else(by_extension, Ok)? {
            Layout::Weights(format) => Target::Weights(format),
            Layout::Dcp => Target::Dcp,
            Layout::Accelerate => Target::Accelerate(AccelerateRun {
                num_processes: self.num_processes.map(|processes| processes as usize),
                split_batches: self.split_batches,
            }),
        };
        if (self.num_processes.is_some() || self.split_batches)
            && !matches!(target, Target::Accelerate(_))
        {
            anyhow::bail!(
                "--num-processes and --split-batches apply only to --to accelerate: add it"
            );
        }
        Ok(target)
    }
}

/// Describes a conversion in lines.
fn report_lines(report: Report) -> String {
    let mut text = String::new();
    for line in report.read {
        text.push_str(&format!("read {}\n", escaped(line)));
    }
    for file in report.written {
        text.push_str(&format!("wrote {}\n", escaped(file.display())));
    }
    for line in report.changed {
        text.push_str(&format!("changed {}\n", escaped(line)));
    }
    for line in report.kept {
        text.push_str(&format!("kept {}\n", escaped(line)));
    }
    for line in report.left_out {
        text.push_str(&format!("left out {}\n", escaped(line)));
    }
    text
}

/// Formats a size in decimal units: `12.3 MB`.
fn bytes(bytes: u64) -> String {
    let mut size = bytes as f64;
    for unit in ["B", "kB", "MB", "GB"] {
        if size < 1000.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{size:.1} {unit}") };
        }
        size /= 1000.0;
    }
    format!("{size:.1} TB")
}

const INSPECT_EXAMPLES: &str = "\
Examples:
  brigade checkpoint inspect runs/first/checkpoints/checkpoint_3
  brigade checkpoint inspect runs/first --short
  brigade checkpoint inspect model.safetensors --json";
const CONVERT_EXAMPLES: &str = "\
Examples:
  brigade checkpoint convert checkpoint_3 model.pth
  brigade checkpoint convert checkpoint_3 for_accelerate --to accelerate
  brigade checkpoint convert checkpoint_3 for_fsdp --to dcp
  brigade checkpoint convert pytorch_model.bin model.safetensors
  brigade checkpoint convert dino.pth model.safetensors --key teacher --prefix backbone.
  brigade checkpoint convert lightning.ckpt model.safetensors --prefix model. --dtype bfloat16
  brigade checkpoint convert llama llama_int4 --weights int4:64 --calibrated
  brigade checkpoint convert accelerates_folder checkpoint_0 --like run/checkpoints/checkpoint_0";
