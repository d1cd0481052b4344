//! Accelerate's plugins for sharded training and fp8: arguments of `accelerate launch` that become environment
//! variables for Python programs.
//!
//! A Python program that uses Accelerate reads them from its environment, under the names and with the defaults of
//! `accelerate launch`: [`ARGUMENTS`]. For a Rust program, the arguments of FSDP, DeepSpeed and the parallelism config
//! become a `Sharding`.

use crate::error::ConfigError;
use crate::layer::{Layer, PLUGIN_PREFIX};
use crate::plugin_arguments::{
    ARGUMENTS, FIELDS, Kind, Plugin, PluginArgument, STEPS, python_bool,
};
use crate::source::Source;
use crate::value::{DynamoBackend, DynamoMode, Precision, Value as _};

/// Plugins of a launch that are on, and their variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plugins {
    /// Plugins that are on, each with the source that turned it on.
    pub on: Vec<(Plugin, Source)>,
    /// Environment variables of the plugins, by name and value.
    pub variables: Vec<(String, String)>,
    /// `true` if the folder of the launch is appended to `PYTHONPATH`, as for DeepSpeed.
    pub adds_python_path: bool,
}

impl Plugins {
    /// Returns the names of the plugins that are on, for a message.
    #[must_use]
    pub fn names(&self) -> String {
        let names: Vec<&str> = self.on.iter().map(|it| it.0.name()).collect();
        names.join(" and ")
    }

    /// Returns the plugins that are on with their sources, for a message: `FSDP (flag --use-fsdp)`.
    #[must_use]
    pub fn what(&self) -> String {
        self.with_sources(|_| true)
    }

    /// Returns the plugins that only Python programs support, with their sources: `fp8 (flag --mixed-precision)`. Empty
    /// if all plugins become a sharding of a Rust program.
    #[must_use]
    pub fn only_for_python(&self) -> String {
        self.with_sources(|plugin| !plugin.shards())
    }

    fn with_sources(&self, is_named: impl Fn(Plugin) -> bool) -> String {
        let named = |(plugin, source): &(Plugin, Source)| format!("{} ({source})", plugin.name());
        let names = self.on.iter().filter(|it| is_named(it.0)).map(named);
        names.collect::<Vec<_>>().join(" and ")
    }

    /// Returns advice for a program that is not a Python program.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        if self.on.iter().all(|it| it.0.shards()) {
            "start the same program on all hosts"
        } else {
            "use --mixed-precision bf16: Brigade has no kernels for fp8"
        }
    }
}

impl Plugin {
    fn is_on(self, layer: &Layer) -> bool {
        match self.switch() {
            Some(switch) => value(layer, switch) == Some("true"),
            None => layer.settings.mixed_precision == Some(Precision::Fp8),
        }
    }

    /// Returns the source that turned the plugin on or off.
    fn source(self, layer: &Layer) -> Source {
        match self.switch() {
            Some(switch) => source(layer, switch),
            None => layer.source("mixed-precision").cloned().unwrap_or(Source::Default),
        }
    }
}

/// Determines which plugins are on and their variables; `None` if all are off. Adds notes about arguments without
/// effect because their plugin is off.
///
/// # Errors
/// [`ConfigError::Contradiction`] if two plugins, or a plugin and `--cpu`, exclude each other, or a plugin lacks
/// another one that it needs.
pub fn resolve(layer: &mut Layer) -> Result<Option<Plugins>, ConfigError> {
    let is_on = |layer: &Layer, plugin: Plugin| plugin.is_on(layer);
    let with_source =
        |layer: &Layer, plugin: Plugin| format!("{} ({})", plugin.name(), plugin.source(layer));
    let contradiction = |one: String, other: String| {
        ConfigError::Contradiction(format!(
            "{one} and {other} exclude each other, as in Accelerate"
        ))
    };
    if is_on(layer, Plugin::Fsdp) && is_on(layer, Plugin::DeepSpeed) {
        return Err(contradiction(
            with_source(layer, Plugin::Fsdp),
            with_source(layer, Plugin::DeepSpeed),
        ));
    }
    if is_on(layer, Plugin::Parallelism)
        && !is_on(layer, Plugin::Fsdp)
        && let flag @ Source::Flag(_) = Plugin::Parallelism.source(layer)
    {
        return Err(ConfigError::Contradiction(format!(
            "the parallelism config ({flag}) needs --use-fsdp and --fsdp-version 2, as in Accelerate"
        )));
    }
    if is_on(layer, Plugin::Megatron) && is_on(layer, Plugin::DeepSpeed) {
        let winner = format!("{}, as in Accelerate", with_source(layer, Plugin::DeepSpeed));
        turn_off(layer, Plugin::Megatron, &winner);
    }
    // `use_cpu` in a file is a default of Accelerate's; the flag is the user's choice.
    if let Some(cpu @ Source::Flag(_)) = layer.source("cpu").cloned()
        && layer.settings.cpu == Some(true)
    {
        for plugin in [Plugin::Fsdp, Plugin::DeepSpeed, Plugin::Megatron, Plugin::Parallelism] {
            // Accelerate refuses the first two with a CPU, and ignores the others.
            let is_refused = matches!(plugin, Plugin::Fsdp | Plugin::DeepSpeed);
            match plugin.source(layer) {
                _ if !is_on(layer, plugin) => {}
                Source::Flag(_) if is_refused => {
                    return Err(contradiction(with_source(layer, plugin), format!("cpu ({cpu})")));
                }
                _ => turn_off(layer, plugin, &cpu.to_string()),
            }
        }
    }
    let on: Vec<Plugin> = Plugin::ALL.into_iter().filter(|it| is_on(layer, *it)).collect();
    note_what_is_off(layer, &on);
    warn_of_what_is_lost(layer, &on);
    if on.is_empty() {
        return Ok(None);
    }
    Ok(Some(Plugins {
        variables: variables(layer, &on),
        adds_python_path: on.contains(&Plugin::DeepSpeed),
        on: on.into_iter().map(|plugin| (plugin, plugin.source(layer))).collect(),
    }))
}

fn turn_off(layer: &mut Layer, plugin: Plugin, winner: &str) {
    let Some(switch) = plugin.switch() else { return };
    let source = plugin.source(layer);
    layer.reset_plugin(switch);
    layer.note(source, format!("{} is overridden by {winner}", plugin.name()));
}

/// Returns the arguments that are set, with values in the form of flags, for a host that lacks the files of this one.
#[must_use]
pub fn given(layer: &Layer) -> Vec<(&'static PluginArgument, String)> {
    let of = |argument: &'static PluginArgument| {
        let text = match argument.name {
            FIELDS => Some(fields(layer)).filter(|it| !it.is_empty()),
            name => value(layer, name).map(str::to_owned),
        };
        text.map(|text| (argument, text))
    };
    ARGUMENTS.iter().filter_map(of).collect()
}

fn value<'a>(layer: &'a Layer, name: &str) -> Option<&'a str> {
    layer.settings.accelerate.get(name).map(String::as_str)
}

fn source(layer: &Layer, name: &str) -> Source {
    layer.source(&format!("{PLUGIN_PREFIX}{name}")).cloned().unwrap_or(Source::Default)
}

fn note_what_is_off(layer: &mut Layer, on: &[Plugin]) {
    let idle = |argument: &&PluginArgument| {
        argument.kind != Kind::Switch
            && !on.contains(&argument.plugin)
            && value(layer, argument.name).is_some()
    };
    let idle: Vec<&PluginArgument> = ARGUMENTS.iter().filter(idle).collect();
    for argument in idle {
        let text = format!("has no effect without {}", argument.plugin.flag());
        let text = match source(layer, argument.name) {
            Source::Flag(_) => text,
            _ => format!("{} {text}", argument.name),
        };
        layer.note(source(layer, argument.name), text);
    }
}

/// Warns of paths that are lost, as they are, without a message, in Accelerate's own launcher.
fn warn_of_what_is_lost(layer: &mut Layer, on: &[Plugin]) {
    if value(layer, "deepspeed-multinode-launcher").is_some() && on.contains(&Plugin::DeepSpeed) {
        let text = "deepspeed-multinode-launcher has no effect: Brigade starts the hosts itself";
        layer.note(source(layer, "deepspeed-multinode-launcher"), text);
    }
    for (name, variable) in [
        ("offload-optimizer-nvme-path", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"),
        ("offload-param-nvme-path", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"),
    ] {
        let path = value(layer, name).filter(|it| *it != "none").map(str::to_owned);
        if let (Some(path), true) = (path, on.contains(&Plugin::DeepSpeed)) {
            let text = format!(
                "{name} is not passed to the program (nor by `accelerate launch`): use --env \
                 {variable}={path}"
            );
            layer.warn(source(layer, name), text);
        }
    }
}

/// Returns the variables, in the order in which Accelerate sets them.
fn variables(layer: &Layer, on: &[Plugin]) -> Vec<(String, String)> {
    let mut variables = common(layer, on);
    for plugin in on {
        let arguments = ARGUMENTS.iter().filter(|it| it.plugin == *plugin);
        if *plugin == Plugin::DeepSpeed {
            variables.push(("ACCELERATE_CONFIG_DS_FIELDS".to_owned(), fields(layer)));
        }
        for argument in arguments {
            let text = value(layer, argument.name).or(argument.default);
            let (Some(variable), Some(text)) = (argument.variable, text) else { continue };
            if argument.kind == Kind::ThreeOnesOrZeros {
                // The value becomes one variable for each product of a linear layer.
                let products = ["FPROP", "DGRAD", "WGRAD"].into_iter().zip(text.split(','));
                variables.extend(
                    products
                        .map(|(product, text)| (format!("{variable}_{product}"), text.to_owned())),
                );
            } else if argument.kind == Kind::Switch || is_for_its_axis(layer, argument) {
                let text = if argument.is_lower { text.to_lowercase() } else { text.to_owned() };
                variables.push((variable.to_owned(), text));
            }
        }
    }
    variables
}

/// Returns the variables that Accelerate always sets with either plugin: a program may read them directly.
fn common(layer: &Layer, on: &[Plugin]) -> Vec<(String, String)> {
    let settings = &layer.settings;
    let precision = settings.mixed_precision.unwrap_or(Precision::No);
    let mut variables =
        vec![("ACCELERATE_MIXED_PRECISION".to_owned(), precision.word().to_owned())];
    if on.contains(&Plugin::DeepSpeed) {
        let steps = settings.gradient_accumulation_steps;
        let steps = steps.filter(|_| layer.is_given("gradient-accumulation-steps"));
        let of_file = || value(layer, STEPS).map(str::to_owned);
        if let Some(steps) = steps.map(|it| it.to_string()).or_else(of_file) {
            variables.push(("ACCELERATE_GRADIENT_ACCUMULATION_STEPS".to_owned(), steps));
        }
        return variables;
    }
    let switch = |is_on: Option<bool>| python_bool(is_on.unwrap_or_default()).to_owned();
    let backend = settings.dynamo_backend.unwrap_or(DynamoBackend::No);
    let mode = settings.dynamo_mode.as_ref().map_or_else(|| "default".to_owned(), DynamoMode::text);
    variables.extend([
        ("ACCELERATE_DYNAMO_BACKEND".to_owned(), backend.text().to_uppercase()),
        ("ACCELERATE_DYNAMO_MODE".to_owned(), mode),
        ("ACCELERATE_DYNAMO_USE_FULLGRAPH".to_owned(), switch(settings.dynamo_use_fullgraph)),
        ("ACCELERATE_DYNAMO_USE_DYNAMIC".to_owned(), switch(settings.dynamo_use_dynamic)),
        (
            "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION".to_owned(),
            switch(settings.dynamo_use_regional_compilation),
        ),
    ]);
    variables
}

/// Returns `true` unless the argument belongs to an axis of parallelism with only one rank.
fn is_for_its_axis(layer: &Layer, argument: &PluginArgument) -> bool {
    let axis = match argument.name {
        "parallelism-config-cp-comm-strategy" => "parallelism-config-cp-size",
        "parallelism-config-sp-seq-length"
        | "parallelism-config-sp-seq-length-is-variable"
        | "parallelism-config-sp-attn-implementation" => "parallelism-config-sp-size",
        _ => return true,
    };
    value(layer, axis).and_then(|it| it.parse().ok()).is_some_and(|size: i64| size > 1)
}

/// Returns the fields of DeepSpeed's own configuration that a file of Accelerate's has set: Accelerate reports an error
/// in the program if the two differ.
fn fields(layer: &Layer) -> String {
    let mut fields: Vec<&str> =
        value(layer, FIELDS).into_iter().filter(|it| !it.is_empty()).collect();
    if matches!(layer.source("mixed-precision"), Some(Source::File { .. })) {
        fields.push("mixed_precision");
    }
    fields.join(",").to_lowercase()
}
