//! `brigade explain sharding`: division of a weights file's parameters among ranks, and the messages for it; meaning of
//! Accelerate's and DeepSpeed's settings.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use brigade_checkpoint::convert::{WeightsOptions, find_weights};
use brigade_checkpoint::pth::TensorData;
use brigade_rank_env::text::{counted, escaped};
use brigade_sharding::{
    Axis, Mesh, Message, Parameter, Peers, ReduceGradients, Reshard, Sharding, ShardingPlan,
    Strategy, Unit, UnitParameter, Units,
};
use clap::Args;
use serde_json::{Value, json};

use crate::estimate::{Mixed, weights_file};
use brigade_sharding::byte_size::in_bytes;
use settings::{Described, SettingsFiles};

mod settings;

/// The question of `brigade explain sharding`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ShardingArgs {
    /// Weights file, its index, or a folder with either
    #[arg(required_unless_present_any = ["config", "deepspeed_config_file"])]
    file: Option<PathBuf>,

    /// State dictionary of a file of torch.save, if it has several
    #[arg(long, value_name = "KEY", requires = "file")]
    key: Option<String>,

    /// Number of processes [default: that of --config]
    #[arg(long, value_name = "N", value_parser = super::ranks, allow_negative_numbers = true)]
    #[arg(required_unless_present = "config")]
    nproc: Option<usize>,

    #[command(flatten)]
    settings: SettingsFiles,

    /// zero1, zero2, zero3, or hybrid=N
    #[arg(long, value_name = "STRATEGY", default_value = "zero3")]
    strategy: Strategy,

    /// Modules that are units (h.*) [default: h.0, layers.0, ...]
    ///
    /// Defaults to the modules up to the first number in a name. In a pattern, * and ? match within one component
    #[arg(long, value_name = "PATTERN,..", value_delimiter = ',')]
    units: Vec<String>,

    /// Join neighbouring units until each has at least N parameters
    #[arg(long, value_name = "N", conflicts_with = "units")]
    at_least: Option<u64>,

    /// Free units after forward, or shard over N ranks
    #[arg(long, value_name = "yes|no|N", default_value = "yes", value_parser = reshard)]
    reshard: Reshard,

    /// Type of the computation
    ///
    /// Shards, their gradients and the optimizer's states have 32 bits
    #[arg(long, value_name = "TYPE", value_enum)]
    mixed: Option<Mixed>,

    /// Number of batches that are accumulated for a step
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = steps)]
    micro_batches: u64,

    /// Reduce gradients once per step, not once per batch
    #[arg(long)]
    reduce_once: bool,

    /// Show each parameter and each message
    #[arg(long, conflicts_with = "json", requires = "file")]
    all: bool,

    /// Print the units, their parameters and the messages as JSON
    #[arg(long, requires = "file")]
    json: bool,
}

/// Sharding by the options or the settings files.
struct Choice {
    /// Sharding strategy. `None`: each rank has the whole model.
    sharding: Option<Sharding>,
    mesh: Mesh,
    batches: u64,
    /// Description of the settings files.
    text: String,
}

pub(super) fn run(args: &ShardingArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let parameters = args.file.as_deref().map(|file| args.parameters(file)).transpose()?;
    let choice = args.choose(parameters.as_deref())?;
    if !args.json {
        out.write_all(choice.text.as_bytes())?;
    }
    let (parameters, sharding) = match (parameters, choice.sharding) {
        (Some(parameters), Some(sharding)) => (parameters, sharding),
        (Some(_), None) if args.json => {
            bail!("the settings divide nothing: each rank has a whole model")
        }
        _ => return Ok(()),
    };
    let plan = ShardingPlan::new(&parameters, &sharding, &choice.mesh)?;
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &as_json(&plan, choice.batches))
            .map_err(io::Error::from)?;
        return Ok(out.write_all(b"\n")?);
    }
    if !choice.text.is_empty() {
        writeln!(out)?;
    }
    Ok(args.text(&plan, choice.batches, out)?)
}

impl ShardingArgs {
    fn parameters(&self, file: &Path) -> anyhow::Result<Vec<Parameter>> {
        let options = WeightsOptions { key: self.key.clone(), ..WeightsOptions::default() };
        let found = find_weights(file, &options)?;
        let tensors = found.tensors.into_iter().map(|(name, tensor)| (name, tensor.info()));
        Ok(weights_file::parameters(tensors).0)
    }

    fn choose(&self, parameters: Option<&[Parameter]>) -> anyhow::Result<Choice> {
        if self.settings.is_given() {
            let elements = |parameter: &Parameter| parameter.shape.iter().product::<u64>();
            let parameters = parameters.map(|it| it.iter().map(elements).sum());
            let Described { settings, text } = self.settings.resolve(self.nproc, parameters)?;
            let batches = settings.gradient_accumulation_steps;
            ensure!(
                batches <= MAX_STEPS as u64,
                "gradient_accumulation_steps {batches} is above {MAX_STEPS}"
            );
            return Ok(Choice { sharding: settings.sharding, mesh: settings.mesh, batches, text });
        }
        let units = match (self.at_least, &*self.units) {
            (Some(elements), _) => Units::AtLeast(elements),
            (None, []) => Units::Blocks,
            (None, patterns) => Units::Matching(patterns.to_vec()),
        };
        let reduce =
            if self.reduce_once { ReduceGradients::Window } else { ReduceGradients::EachBatch };
        let sharding = Sharding::from(self.strategy)
            .units(units)
            .mixed(Mixed::precision(self.mixed))
            .reshard_after_forward(self.reshard)
            .reduce(reduce);
        let ranks = self.nproc.context("the number of ranks is not known: give --nproc")?;
        let mesh = sharding.mesh(ranks)?;
        Ok(Choice {
            sharding: Some(sharding),
            mesh,
            batches: self.micro_batches,
            text: String::new(),
        })
    }

    fn text(&self, plan: &ShardingPlan, batches: u64, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "{plan}")?;
        for note in plan.notes() {
            writeln!(out, "{note}")?;
        }
        writeln!(out)?;
        units(plan, self.all, out)?;
        writeln!(out)?;
        self.messages(plan, batches, out)
    }

    fn messages(&self, plan: &ShardingPlan, batches: u64, out: &mut impl Write) -> io::Result<()> {
        let of_batches = match batches {
            1 => String::new(),
            batches => format!(" of {}", counted(batches, "batch")),
        };
        if plan.messages(batches).next().is_none() {
            return writeln!(out, "no messages in a step{of_batches}");
        }
        writeln!(out, "messages of a step{of_batches}, in the order in which they start:")?;
        let heads =
            ["phase", "operation", "ranks", "messages", "bytes", "sent by a rank", "of unit"];
        let mut line = |cells: [String; 7]| {
            let [phase, operation, ranks, messages, bytes, sent, units] = cells;
            writeln!(
                out,
                "{phase:<10}{operation:<16}{ranks:<20}{messages:>8}{bytes:>12}{sent:>16}  {units}"
            )
        };
        line(heads.map(str::to_owned))?;
        let mut kinds: Vec<Kind> = Vec::new();
        for message in plan.messages(batches) {
            let is_kind = |kind: &&mut Kind| !self.all && kind.is_of(&message);
            match kinds.iter_mut().find(is_kind) {
                Some(kind) => kind.add(&message),
                None => kinds.push(Kind::new(message)),
            }
        }
        for kind in kinds {
            let title = |unit: usize| escaped(plan.units()[unit].title()).to_string();
            let units = if kind.first.unit == kind.last {
                title(kind.last)
            } else {
                format!("{} to {}", title(kind.first.unit), title(kind.last))
            };
            line([
                kind.first.phase.to_string(),
                kind.first.operation.to_string(),
                peers(plan, &kind.first),
                kind.messages.to_string(),
                in_bytes(kind.bytes),
                in_bytes(kind.sent),
                units,
            ])?;
        }
        let sent = plan.volume(batches).bytes();
        writeln!(out, "a rank sends {} in a step", in_bytes(sent))
    }
}

fn as_json(plan: &ShardingPlan, batches: u64) -> Value {
    let parameter = |parameter: &UnitParameter| {
        let slot = &parameter.slot;
        json!({
            "names": parameter.parameter.names,
            "shape": parameter.parameter.shape,
            "dtype": parameter.parameter.dtype,
            "trained": parameter.parameter.trained,
            "placements": plan.placements(parameter),
            "state_placements": plan.state_placements(parameter),
            "offset": slot.offset,
            "rows_per_rank": slot.chunk(),
            "compute_dtype": parameter.compute_dtype,
            "reduce_dtype": parameter.reduce_dtype,
        })
    };
    let unit = |unit: &Unit| {
        json!({
            "name": unit.name,
            "modules": unit.modules,
            "elements": unit.elements(),
            "bytes": unit.storage_bytes(),
            "reshard_after_forward": unit.reshard,
            "parameters": unit.parameters.iter().map(parameter).collect::<Vec<_>>(),
        })
    };
    let message = |message: Message| {
        json!({
            "phase": message.phase.name(),
            "operation": message.operation.name(),
            "unit": plan.units()[message.unit].name,
            "peers": peers(plan, &message),
            "ranks": message.ranks,
            "elements": message.elements,
            "bytes": message.bytes,
            "sent_bytes": message.sent_bytes(),
        })
    };
    let volume = plan.volume(batches);
    json!({
        "strategy": plan.sharding().strategy,
        "mesh": plan.mesh().axes(),
        "notes": plan.notes().iter().map(ToString::to_string).collect::<Vec<_>>(),
        "units": plan.units().iter().map(unit).collect::<Vec<_>>(),
        "messages": plan.messages(batches).map(message).collect::<Vec<_>>(),
        "sent_elements": volume.elements(),
        "sent_bytes": volume.bytes(),
    })
}

fn units(plan: &ShardingPlan, all: bool, out: &mut impl Write) -> io::Result<()> {
    let mut line = |[unit, elements, bytes, part, reshard, placements]: [String; 6]| {
        let cells = format!("{elements:>12}{bytes:>12}{part:>14}  {reshard:<10}{placements}");
        writeln!(out, "{unit:<40}{}", cells.trim_end())
    };
    line(
        ["unit", "parameters", "whole", "rank 0 has", "reshard", "placements"].map(str::to_owned),
    )?;
    let mut rest = plan.units();
    while let [unit, ..] = rest {
        let alike = rest.iter().take_while(|other| !all && is_alike(unit, other)).count().max(1);
        let title = |unit: &Unit| escaped(unit.title()).to_string();
        let title = match &rest[..alike] {
            [first, .., last] => format!("{} to {}, each", title(first), title(last)),
            _ => title(unit),
        };
        line([
            title,
            unit.elements().to_string(),
            in_bytes(unit.storage_bytes()),
            in_bytes(unit.parameters.iter().map(|it| rank_0_bytes(plan, it)).sum()),
            if plan.sharding().strategy.keeps_parameters_whole() {
                "-".to_owned()
            } else {
                reshard_name(unit.reshard)
            },
            unit.parameters
                .iter()
                .find(|parameter| !parameter.slot.is_whole)
                .map_or_else(|| "R".to_owned(), |parameter| placements(plan, parameter)),
        ])?;
        if all {
            for parameter in &unit.parameters {
                let names: Vec<_> = parameter
                    .parameter
                    .names
                    .iter()
                    .map(|name| escaped(name).to_string())
                    .collect();
                line([
                    format!("  {} {:?}", names.join(" = "), parameter.parameter.shape),
                    parameter.slot.elements().to_string(),
                    in_bytes(parameter.slot.bytes()),
                    in_bytes(rank_0_bytes(plan, parameter)),
                    if parameter.parameter.trained { "" } else { "frozen" }.to_owned(),
                    placements(plan, parameter),
                ])?;
            }
        }
        rest = &rest[alike..];
    }
    Ok(())
}

/// Returns `true` if two units differ only in their names.
fn is_alike(unit: &Unit, other: &Unit) -> bool {
    let slots = |unit: &Unit| {
        unit.parameters.iter().map(|it| (it.slot, it.parameter.trained)).collect::<Vec<_>>()
    };
    !unit.is_root() && unit.reshard == other.reshard && slots(unit) == slots(other)
}

/// Returns the bytes of a parameter that rank 0 keeps between steps.
fn rank_0_bytes(plan: &ShardingPlan, parameter: &UnitParameter) -> u64 {
    let slot = &parameter.slot;
    if plan.sharding().strategy.keeps_parameters_whole() {
        slot.elements() * slot.element_bytes
    } else {
        slot.elements_of(0) * parameter.parameter.dtype.bytes()
    }
}

/// Formats placements: `R, S(0)`.
fn placements(plan: &ShardingPlan, parameter: &UnitParameter) -> String {
    let placements = plan.placements(parameter);
    let placements = placements.iter().map(ToString::to_string);
    placements.collect::<Vec<_>>().join(", ")
}

/// Formats the peers of a message: `8 dp_shard`, `2 of dp_shard`.
fn peers(plan: &ShardingPlan, message: &Message) -> String {
    let name = |axis| plan.mesh().first_axis(axis);
    match message.peers {
        Peers::Axis(axis) => format!("{} {}", message.ranks, name(axis)),
        Peers::Part(size) => format!("{size} of {}", name(Axis::ShardContext)),
    }
}

/// Messages of one kind.
struct Kind {
    first: Message,
    last: usize,
    messages: u64,
    bytes: u64,
    sent: u64,
}

impl Kind {
    fn new(first: Message) -> Self {
        let (bytes, sent) = (first.bytes, first.sent_bytes());
        Self { first, last: first.unit, messages: 1, bytes, sent }
    }

    fn is_of(&self, message: &Message) -> bool {
        let key = |message: &Message| (message.phase, message.operation, message.peers);
        key(&self.first) == key(message)
    }

    fn add(&mut self, message: &Message) {
        self.last = message.unit;
        self.messages += 1;
        self.bytes = self.bytes.saturating_add(message.bytes);
        self.sent = self.sent.saturating_add(message.sent_bytes());
    }
}

fn reshard(text: &str) -> Result<Reshard, String> {
    match text {
        "yes" => Ok(Reshard::Yes),
        "no" => Ok(Reshard::No),
        parts => {
            parts.parse().map(Reshard::To).map_err(|_| "write yes, no, or a number".to_owned())
        }
    }
}

fn reshard_name(reshard: Reshard) -> String {
    match reshard {
        Reshard::Yes => "yes".to_owned(),
        Reshard::No => "no".to_owned(),
        Reshard::To(parts) => parts.to_string(),
    }
}

/// Parses a number of steps. It is limited: each message is simulated, so a mistyped number would only take time.
fn steps(text: &str) -> Result<u64, String> {
    match super::count(text)? {
        steps if steps <= MAX_STEPS => Ok(steps as u64),
        _ => Err(format!("it must be at most {MAX_STEPS}")),
    }
}

const MAX_STEPS: usize = 1 << 16;

const EXAMPLES: &str = "\
Examples:
  brigade explain sharding model.safetensors --nproc 8
  brigade explain sharding model.safetensors --nproc 16 --strategy hybrid=8 --mixed bf16
  brigade explain sharding model.safetensors --nproc 8 --units 'h.*,wte' --all
  brigade explain sharding --config accelerate.yaml
  brigade explain sharding model.safetensors --deepspeed-config-file ds.json --nproc 8";
