//! Settings of Accelerate and DeepSpeed as read for a Rust program.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use brigade_config::plugin_arguments::Plugin;
use brigade_config::{Layer, plugins};
use brigade_rank_env::text::escaped;
use brigade_sharding::settings::{DeepSpeedConfig, Facts, Given, Note, Settings, resolve};

/// Resolves the arguments of the plugins that are on. DeepSpeed's configuration is `deepspeed`, or else the file that
/// the arguments name, or else the arguments.
///
/// # Errors
/// Fails for a file that cannot be read, and with the errors of [`resolve`].
pub(crate) fn read(
    layer: &Layer,
    deepspeed: Option<DeepSpeedConfig>,
    is_on: impl Fn(Plugin) -> bool,
    facts: &Facts,
) -> Result<(Settings, Vec<Note>)> {
    let given = given(layer, &is_on);
    let named = given.iter().find(|it| it.name == DEEPSPEED_FILE && is_on(Plugin::DeepSpeed));
    let deepspeed = match (deepspeed, named) {
        (Some(config), _) => Some(config),
        (None, Some(named)) => Some(read_deepspeed(Path::new(&named.value), &named.origin)?),
        (None, None) => None,
    };
    let steps = layer.settings.gradient_accumulation_steps.map(|it| it.get() as u64);
    let steps = steps.unwrap_or(facts.gradient_accumulation_steps);
    let facts = Facts { gradient_accumulation_steps: steps, ..facts.clone() };
    Ok(resolve(&given, deepspeed.as_ref(), &facts)?)
}

/// Reads DeepSpeed's file; `asked_by` is the setting that named it.
pub(crate) fn read_deepspeed(path: &Path, asked_by: &str) -> Result<DeepSpeedConfig> {
    let text = fs::read_to_string(path);
    let unreadable = || format!("cannot read {} ({})", escaped(path.display()), escaped(asked_by));
    let text = text.with_context(unreadable)?;
    Ok(DeepSpeedConfig::from_json(&path.display().to_string(), &text)?)
}

/// Returns the arguments of plugins that are on, and the switches of both plugins that may shard.
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
    // The setting takes precedence over the field of a file's `deepspeed_config`, as for Python programs.
    for (setting, name) in [
        ("mixed-precision", "mixed_precision"),
        ("gradient-accumulation-steps", "deepspeed_gradient_accumulation_steps"),
    ] {
        if let Some(text) = layer.settings.text(setting).filter(|_| layer.is_given(setting)) {
            given.push(Given::new(name, text, source(setting)));
        }
    }
    given
}

const DEEPSPEED_FILE: &str = "deepspeed_config_file";
