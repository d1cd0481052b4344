//! Settings of Accelerate's and DeepSpeed's as the source of a strategy: what a file means for a Rust program.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use brigade_config::plugin_arguments::Plugin;
use brigade_config::{ChosenBy, Layer, SettingsPath, plugins, read_layer, read_text};
use brigade_rank_env::text::escaped;
use brigade_sharding::settings::{DeepSpeedConfig, Facts, Given, Settings, describe, resolve};
use clap::Args;

/// Files with settings.
#[derive(Debug, Args)]
pub(super) struct SettingsFiles {
    /// Show what a settings file of Accelerate's means
    ///
    /// Its fsdp_config, deepspeed_config and parallelism_config, and a line for each key that is not
    /// honoured as it stands. Brigade's own settings may have them, too, in `[accelerate]`
    #[arg(long, value_name = "FILE", conflicts_with_all = STRATEGY)]
    config: Option<PathBuf>,

    /// Show what a DeepSpeed configuration means
    #[arg(long, value_name = "FILE", conflicts_with_all = STRATEGY)]
    deepspeed_config_file: Option<PathBuf>,
}

/// What the files say instead.
const STRATEGY: [&str; 7] =
    ["strategy", "units", "at_least", "reshard", "mixed", "micro_batches", "reduce_once"];

impl SettingsFiles {
    pub(super) fn is_given(&self) -> bool {
        self.config.is_some() || self.deepspeed_config_file.is_some()
    }

    /// Resolves the files for a job of `ranks`, or of as many as the settings file says, and a model of `parameters`.
    pub(super) fn resolve(
        &self,
        ranks: Option<usize>,
        parameters: Option<u64>,
    ) -> Result<Described> {
        let mut layer = match &self.config {
            Some(path) => {
                let place = SettingsPath { path: path.clone(), chosen_by: ChosenBy::Flag };
                read_layer(path, &read_text(&place)?)?
            }
            None => Layer::default(),
        };
        let plugins = plugins::resolve(&mut layer)?;
        let is_on = |plugin: Plugin| plugins.iter().flat_map(|it| &it.on).any(|it| it.0 == plugin);
        if is_on(Plugin::Megatron) {
            bail!("Megatron-LM is not supported: use FSDP or DeepSpeed");
        }
        let given = given(&layer, is_on);
        let named = given.iter().find(|it| it.name == DEEPSPEED_FILE && is_on(Plugin::DeepSpeed));
        let deepspeed = match (&self.deepspeed_config_file, named) {
            (Some(path), _) => Some(read_deepspeed(path, "flag --deepspeed-config-file")?),
            (None, Some(named)) => Some(read_deepspeed(Path::new(&named.value), &named.origin)?),
            (None, None) => None,
        };
        let facts = facts(&layer, ranks, parameters)?;
        let (settings, notes) = resolve(&given, deepspeed.as_ref(), &facts)?;
        let mut text = describe(&settings, &notes);
        for note in &layer.notes {
            let _ = writeln!(text, "note: {}", escaped(note));
        }
        Ok(Described { settings, text })
    }
}

/// Settings, and what they mean in words.
pub(super) struct Described {
    pub(super) settings: Settings,
    pub(super) text: String,
}

const DEEPSPEED_FILE: &str = "deepspeed_config_file";

fn read_deepspeed(path: &Path, asked_by: &str) -> Result<DeepSpeedConfig> {
    let text = fs::read_to_string(path);
    let unreadable = || format!("cannot read {} ({})", escaped(path.display()), escaped(asked_by));
    let text = text.with_context(unreadable)?;
    Ok(DeepSpeedConfig::from_json(&path.display().to_string(), &text)?)
}

/// The arguments of plug-ins that are on, and the switches of both that may shard.
fn given(layer: &Layer, is_on: impl Fn(Plugin) -> bool) -> Vec<Given> {
    let source = |name: &str| layer.source(name).map_or_else(String::new, ToString::to_string);
    let arguments =
        plugins::given(layer).into_iter().filter(|(argument, _)| is_on(argument.plugin));
    let mut given: Vec<Given> = arguments
        .map(|(argument, value)| {
            Given::new(argument.name, value, source(&format!("accelerate.{}", argument.name)))
        })
        .collect();
    for (plugin, name) in [(Plugin::Fsdp, "use_fsdp"), (Plugin::DeepSpeed, "use_deepspeed")] {
        if !is_on(plugin) {
            given.push(Given::new(name, "false", ""));
        }
    }
    if let Some(precision) = layer.settings.text("mixed-precision") {
        given.push(Given::new("mixed_precision", precision, source("mixed-precision")));
    }
    given
}

fn facts(layer: &Layer, ranks: Option<usize>, parameters: Option<u64>) -> Result<Facts> {
    let hosts = layer.settings.nnodes.unwrap_or_default().max.max(1);
    // `gpu` and its kin are known on the hosts alone.
    let of_host: Option<usize> = layer.settings.text("nproc").and_then(|text| text.parse().ok());
    let world_size = ranks.or_else(|| of_host.map(|ranks| ranks.saturating_mul(hosts)));
    let world_size = world_size.context("the number of ranks is not known: give --nproc")?;
    let steps = layer.settings.gradient_accumulation_steps.map(|it| it.get() as u64);
    let known = Facts::new(world_size);
    Ok(Facts {
        local_world_size: world_size / hosts,
        parameters,
        gradient_accumulation_steps: steps.unwrap_or(known.gradient_accumulation_steps),
        ..known
    })
}
