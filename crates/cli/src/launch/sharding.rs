//! Sharding of a Rust program's model: by `--sharding`, or by the settings of FSDP and DeepSpeed.

use std::num::NonZeroUsize;

use brigade_config::plugin_arguments::Plugin;
use brigade_config::plugins::Plugins;
use brigade_config::{ConfigError, Layer, Source};
use brigade_launch::hosts::HostsOptions;
use brigade_launch::{HostFacts, LaunchError, LaunchOptions, NprocSpec, Program};
use brigade_rank_env::env;
use brigade_sharding::pipeline::{PipelineError, Schedule};
use brigade_sharding::settings::{Facts, Note, Precision, Settings, describe};
use brigade_sharding::{Axis, Sharding};

/// Removes the settings of tensor, context, expert and pipeline parallelism for a Python program.
///
/// # Errors
/// Fails if flags set them for a Python program.
pub(super) fn settle_axes(layers: &mut Layer, program: &Program) -> Result<(), ConfigError> {
    if !program.is_named_as_python() || program.is_python_here() == Some(false) {
        return Ok(());
    }
    let parallelism = "--use-parallelism-config with --parallelism-config";
    let megatron = "--use-megatron-lm with --megatron-lm";
    for (name, instead) in [
        (TENSOR, format!("{parallelism}-tp-size")),
        (REGIONS, "--use-megatron-lm with --megatron-lm-sequence-parallelism".to_owned()),
        (CONTEXT, format!("{parallelism}-cp-size")),
        (CONTEXT_METHOD, format!("{parallelism}-cp-comm-strategy")),
        (EXPERT, format!("{megatron}-expert-model-parallel-size")),
        (PIPELINE, format!("{megatron}-pp-degree")),
        (MICRO_BATCHES, format!("{megatron}-num-micro-batches")),
        (PIPELINE_SCHEDULE, PLUGIN_OF_STAGES.to_owned()),
        (PIPELINE_CHUNKS, PLUGIN_OF_STAGES.to_owned()),
    ] {
        let Some(source) = layers.source(name).filter(|it| **it != Source::Default).cloned() else {
            continue;
        };
        let value = layers.settings.text(name).unwrap_or_default();
        if let Source::Flag(_) = source {
            let instead = match (name, value.as_str()) {
                (CONTEXT_METHOD, "ring") => format!("{instead} alltoall"),
                (CONTEXT_METHOD, "ulysses") => format!("{parallelism}-sp-size"),
                (CONTEXT_METHOD, _) => format!("{instead} allgather"),
                (PIPELINE_SCHEDULE | PIPELINE_CHUNKS, _) => instead,
                _ => format!("{instead} {value}"),
            };
            return Err(ConfigError::Contradiction(format!(
                "--{name} {value} is for Rust programs: use {instead} for a Python program"
            )));
        }
        layers.reset(name);
        if !["1", "gather", "false", "1f1b"].contains(&value.as_str()) {
            layers.warn(source, format!("{name} {value} is for Rust programs and not used"));
        }
    }
    Ok(())
}

/// Decides between the setting `sharding` and the plugins that shard: the upper layer wins, and the other is reset.
/// `sharding` is not for Python programs.
///
/// # Errors
/// Fails if both are set in one layer, or for `--sharding` with a Python program.
pub(super) fn settle(layers: &mut Layer, program: &Program) -> Result<(), ConfigError> {
    let Some(source) = layers.source(SHARDING).filter(|it| **it != Source::Default).cloned() else {
        return Ok(());
    };
    let text = layers.settings.text(SHARDING).unwrap_or_default();
    if program.is_named_as_python() && program.is_python_here() != Some(false) {
        if let Source::Flag(_) = source {
            return Err(ConfigError::Contradiction(format!(
                "--sharding {text} is for Rust programs: use --use-fsdp or --use-deepspeed for a Python program"
            )));
        }
        layers.reset(SHARDING);
        if text != NONE {
            layers.warn(source, format!("sharding {text} is for Rust programs and not used"));
        }
        return Ok(());
    }
    let switches = Plugin::ALL.into_iter().filter(|it| it.shards());
    let switches: Vec<(Plugin, &str)> =
        switches.filter_map(|it| Some((it, it.switch()?))).collect();
    for (plugin, switch) in switches {
        let of_plugin = layers.source(&format!("accelerate.{switch}")).cloned();
        let is_on = layers.settings.accelerate.get(switch).is_some_and(|it| it == "true");
        let Some(of_plugin) = of_plugin.filter(|_| is_on) else { continue };
        let name = plugin.name();
        if of_plugin.layer() == source.layer() {
            return Err(ConfigError::Contradiction(format!(
                "sharding {text} ({source}) and {name} ({of_plugin}) exclude each other: leave out one of them"
            )));
        }
        if of_plugin.layer() > source.layer() {
            layers.reset(SHARDING);
            layers.note(source, format!("sharding {text} is overridden by {name} ({of_plugin})"));
            return Ok(());
        }
        layers.set_plugin(switch, "false", source.clone())?;
        layers.note(of_plugin, format!("{name} is overridden by sharding {text} ({source})"));
    }
    Ok(())
}

/// Numbers of ranks of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ranks {
    /// Maximum number of ranks per host.
    pub(super) of_host: usize,
    pub(super) all: usize,
}

impl Ranks {
    /// Counts the ranks; `None` if the number is only known on the hosts. For a variable number of hosts it is the
    /// maximum.
    ///
    /// # Errors
    /// Fails if devices do not exist.
    pub(super) fn count(
        options: &LaunchOptions,
        hosts: Option<&HostsOptions>,
    ) -> Result<Option<Self>, LaunchError> {
        if let Some(hosts) = hosts {
            let of_host = |slots: Option<usize>| match (slots, options.nproc) {
                (Some(slots), _) | (None, NprocSpec::Count(slots)) => Some(slots),
                _ => None,
            };
            let counts: Option<Vec<usize>> =
                hosts.hosts.iter().map(|host| of_host(host.slots)).collect();
            return Ok(counts.map(|counts| Self {
                of_host: counts.iter().copied().max().unwrap_or_default(),
                all: counts.into_iter().fold(0, usize::saturating_add),
            }));
        }
        let of_host = if let NprocSpec::Count(count) = options.nproc {
            count
        } else {
            let facts = HostFacts::gather(options);
            let wanted = options.placement.devices.as_ref();
            facts.placement.devices.count(options.nproc, wanted, facts.cores)?
        };
        Ok(Some(Self { of_host, all: of_host.saturating_mul(options.nodes.max) }))
    }
}

/// Checks that the settings `tensor`, `context`, `expert`, `pipeline` and `sharding` fit the ranks of the job.
///
/// # Errors
/// Fails if a number of tensor, context, pipeline or expert ranks, or a shard size, does not divide them.
pub(super) fn check(layers: &Layer, ranks: Option<Ranks>) -> Result<(), ConfigError> {
    let Some(ranks) = ranks.filter(|it| it.all > 0) else { return Ok(()) };
    let mut left = ranks.all;
    let settings = &layers.settings;
    if settings.sequence_parallel == Some(true) && settings.tensor.is_none_or(|it| it.get() == 1) {
        let source = layers.source(REGIONS).map(ToString::to_string).unwrap_or_default();
        return Err(ConfigError::Contradiction(format!(
            "{source}: parts of the sequence are those of tensor ranks, of which there is 1: set tensor to 2 or more"
        )));
    }
    let mut before: Vec<&str> = Vec::new();
    for (name, size) in
        [(TENSOR, settings.tensor), (CONTEXT, settings.context), (PIPELINE, settings.pipeline)]
    {
        let size = size.map_or(1, NonZeroUsize::get);
        if !left.is_multiple_of(size) {
            let source = layers.source(name).map(ToString::to_string).unwrap_or_default();
            let others = ranks.all / left;
            let group = size.saturating_mul(others);
            let of = if others == 1 {
                format!("the {left} ranks of the job")
            } else {
                format!(
                    "the {left} groups of {others} {} ranks in the {} ranks of the job",
                    before.join(" and "),
                    ranks.all
                )
            };
            return Err(ConfigError::Contradiction(format!(
                "{source}: {size} {name} ranks do not divide {of}: start {} or {} ranks, or take other {name} ranks",
                (ranks.all / group).max(1) * group,
                (ranks.all / group + 1) * group
            )));
        }
        left /= size;
        if size > 1 {
            before.push(name);
        }
    }
    let stages = settings.pipeline.map_or(1, NonZeroUsize::get);
    let given = [MICRO_BATCHES, PIPELINE_SCHEDULE, PIPELINE_CHUNKS];
    let given =
        given.into_iter().find_map(|name| layers.source(name).filter(|_| layers.is_given(name)));
    if let (true, Some(source)) = (stages > 1, given) {
        check_pipeline(layers, stages, settings.micro_batches.map(NonZeroUsize::get))
            .map_err(|fault| ConfigError::Contradiction(format!("{source}: {fault}")))?;
    }
    check_experts(layers, ranks.all / stages, stages)?;
    let Some(Sharding { strategy, .. }) =
        layers.settings.sharding.as_ref().and_then(|it| it.0.as_ref())
    else {
        return Ok(());
    };
    match Sharding::from(*strategy).mesh(left) {
        Ok(_) => Ok(()),
        Err(fault) => {
            let source = layers.source(SHARDING).map(ToString::to_string).unwrap_or_default();
            Err(ConfigError::Contradiction(format!("{source}: {fault}")))
        }
    }
}

/// Checks that the `all` ranks of each of `stages` stages can divide the experts between them.
fn check_experts(layers: &Layer, all: usize, stages: usize) -> Result<(), ConfigError> {
    let of = |ranks: Option<NonZeroUsize>| ranks.map_or(1, NonZeroUsize::get);
    let settings = &layers.settings;
    let (experts, tensor) = (of(settings.expert), of(settings.tensor));
    if experts == 1 {
        return Ok(());
    }
    let source = layers.source(EXPERT).map(ToString::to_string).unwrap_or_default();
    if !experts.is_multiple_of(tensor) {
        return Err(ConfigError::Contradiction(format!(
            "{source}: {experts} expert ranks are not whole groups of {tensor} tensor ranks: take a multiple of {tensor}"
        )));
    }
    if all.is_multiple_of(experts) {
        return Ok(());
    }
    // Ranks that read the same samples are not separated.
    let same = tensor.saturating_mul(of(settings.context));
    let multiples = (1..=same).map(|count| experts.saturating_mul(count));
    let group = multiples.into_iter().find(|ranks| ranks.is_multiple_of(same)).unwrap_or(experts);
    Err(ConfigError::Contradiction(format!(
        "{source}: {experts} expert ranks do not divide the {all} ranks of {}: start {} or {} ranks, or take other expert \
         ranks",
        if stages > 1 { "a stage" } else { "the job" },
        (all / group).max(1) * group * stages,
        (all / group + 1) * group * stages
    )))
}

/// Checks that the schedule of a pipeline of `ranks` ranks can run this number of micro-batches.
fn check_pipeline(
    layers: &Layer,
    ranks: usize,
    micro_batches: Option<usize>,
) -> Result<(), PipelineError> {
    let schedule = layers.settings.pipeline_schedule.unwrap_or(Schedule::OneForwardOneBackward);
    let chunks =
        layers.settings.pipeline_chunks.map_or_else(|| schedule.least_chunks(), NonZeroUsize::get);
    let micro_batches = micro_batches.unwrap_or_else(|| Schedule::default_micro_batches(ranks));
    schedule.check(ranks, micro_batches, chunks)
}

/// Meaning of FSDP's or DeepSpeed's settings for a Rust program.
pub(super) struct FromPlugins {
    /// Source of the settings: `FSDP (flag --use-fsdp)`.
    pub(super) what: String,
    settings: Settings,
    /// Notes on the keys that are not used unchanged, one for each.
    pub(super) notes: Vec<Note>,
}

impl FromPlugins {
    /// Reads the settings of FSDP or DeepSpeed.
    ///
    /// # Errors
    /// Fails for an unknown number of ranks, a file that cannot be read, keys that are refused, and a precision or a
    /// number of accumulated batches other than that of the launch.
    pub(super) fn read(
        layers: &Layer,
        plugins: &Plugins,
        ranks: Option<Ranks>,
    ) -> anyhow::Result<Self> {
        let what = plugins.what();
        let Some(ranks) = ranks else {
            return Err(ConfigError::Contradiction(format!(
                "{what} needs the number of ranks: give --nproc, or a number for each host, as in node1:4"
            ))
            .into());
        };
        let facts = Facts { local_world_size: ranks.of_host, ..Facts::new(ranks.all) };
        let is_on = |plugin: Plugin| plugins.on.iter().any(|it| it.0 == plugin);
        let (settings, mut notes) = crate::sharding::read(layers, None, is_on, &facts)
            .map_err(|fault| ConfigError::Contradiction(format!("{fault:#}")))?;
        let same = |name: &str, value: &str| match layers.settings.text(name) {
            Some(given) if layers.is_given(name) && given != value => {
                let source = layers.source(name).map(ToString::to_string).unwrap_or_default();
                Err(ConfigError::Contradiction(format!(
                    "{name} is {given} ({source}), and {value} by {what}: leave out one of them"
                )))
            }
            _ => Ok(()),
        };
        same(PRECISION, settings.precision.word())?;
        same(STEPS, &settings.gradient_accumulation_steps.to_string())?;
        if let Some(count) = settings.pipeline_micro_batches {
            same(MICRO_BATCHES, &count.to_string())?;
            check_pipeline(layers, settings.mesh.size(Axis::Pipeline), Some(count))
                .map_err(|fault| ConfigError::Contradiction(format!("{what}: {fault}")))?;
        }
        notes.extend(of_the_program(&settings, &what));
        Ok(Self { what, settings, notes })
    }

    /// Returns the environment variables that pass the settings to the ranks, except for settings that the user has
    /// set.
    pub(super) fn variables(&self, layers: &Layer) -> Vec<(String, String)> {
        let Settings { sharding, precision, gradient_accumulation_steps: steps, .. } =
            &self.settings;
        let mut variables = vec![(env::BRIGADE_SHARDING, setting(sharding.as_ref()))];
        let tensor = self.settings.mesh.size(Axis::Tensor);
        if tensor > 1 {
            variables.push((env::BRIGADE_TENSOR, tensor.to_string()));
        }
        if self.settings.sequence_regions {
            variables.push((env::BRIGADE_SEQUENCE_PARALLEL, "true".to_owned()));
        }
        let stages = self.settings.mesh.size(Axis::Pipeline);
        if stages > 1 {
            variables.push((env::BRIGADE_PIPELINE, stages.to_string()));
        }
        if let Some(count) = self.settings.pipeline_micro_batches {
            variables.push((env::BRIGADE_MICRO_BATCHES, count.to_string()));
        }
        let experts = self.settings.mesh.size(Axis::Expert);
        if experts > 1 {
            variables.push((env::BRIGADE_EXPERT, experts.to_string()));
        }
        let context =
            self.settings.mesh.size(Axis::Context) * self.settings.mesh.size(Axis::Sequence);
        if context > 1 {
            variables.push((env::BRIGADE_CONTEXT, context.to_string()));
            variables.push((env::BRIGADE_CONTEXT_METHOD, self.settings.context_method.to_string()));
        }
        if *precision != Precision::No && !layers.is_given(PRECISION) {
            variables.push((env::ACCELERATE_MIXED_PRECISION, precision.word().to_owned()));
        }
        if *steps != 1 && !layers.is_given(STEPS) {
            variables.push((env::ACCELERATE_GRADIENT_ACCUMULATION_STEPS, steps.to_string()));
        }
        variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// Describes the settings, with one line for each part, and the notes.
    pub(super) fn text(&self) -> String {
        describe(&self.settings, &self.notes)
    }

    /// Returns the text of `BRIGADE_SHARDING`.
    pub(super) fn setting(&self) -> String {
        setting(self.settings.sharding.as_ref())
    }
}

fn setting(sharding: Option<&Sharding>) -> String {
    sharding.map_or_else(|| NONE.to_owned(), Sharding::to_setting)
}

/// Returns notes on settings that no variable passes to a Rust program.
fn of_the_program(settings: &Settings, what: &str) -> Vec<Note> {
    let mut notes = Vec::new();
    let mut note = |key: &str, value: String, text: &str| {
        let (key, origin, text) = (key.to_owned(), what.to_owned(), text.to_owned());
        notes.push(Note { key, value, origin, text });
    };
    if let Some(norm) = settings.gradient_clipping.filter(|norm| *norm > 0.0) {
        let text = "gradients would be clipped; the launcher does not pass this to a Rust program: clip them there";
        note("gradient_clipping", norm.to_string(), text);
    }
    if let Some(samples) = settings.micro_batch_size {
        let text = "each batch of a rank would have this number of samples; the loaders of a Rust program decide";
        note("train_micro_batch_size_per_gpu", samples.to_string(), text);
    }
    if settings.loss_scale.is_some() {
        let text = "the loss would have this scale; a Rust program chooses its own";
        note("fp16.loss_scale", String::new(), text);
    }
    if settings.recompute {
        let text = "activations would be recomputed in backward; the launcher does not pass this to a \
                    Rust program: turn it on there";
        let is_megatron = what.starts_with(Plugin::Megatron.name());
        let key = if is_megatron {
            "megatron_lm_recompute_granularity"
        } else {
            "fsdp_activation_checkpointing"
        };
        note(key, if is_megatron { "full" } else { "true" }.to_owned(), text);
    }
    if let Some(optimizer) = &settings.optimizer {
        let text = "this would be the optimizer; a Rust program creates its own";
        note("optimizer", optimizer.kind.name().to_owned(), text);
    }
    if let Some(schedule) = &settings.schedule {
        let text = "this would be the learning rate's schedule; a Rust program creates its own";
        note("scheduler", schedule.name().to_owned(), text);
    }
    notes
}

const SHARDING: &str = "sharding";
const TENSOR: &str = "tensor";
const REGIONS: &str = "sequence-parallel";
const CONTEXT: &str = "context";
const CONTEXT_METHOD: &str = "context-method";
const EXPERT: &str = "expert";
const PIPELINE: &str = "pipeline";
const MICRO_BATCHES: &str = "micro-batches";
const PIPELINE_SCHEDULE: &str = "pipeline-schedule";
const PIPELINE_CHUNKS: &str = "pipeline-chunks";
const PLUGIN_OF_STAGES: &str = "`num_layers_per_virtual_pipeline_stage` of `MegatronLMPlugin`";
const NONE: &str = "none";
const PRECISION: &str = "mixed-precision";
const STEPS: &str = "gradient-accumulation-steps";
