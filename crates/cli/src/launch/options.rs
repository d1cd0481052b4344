//! Options of the launcher, from the settings.

use brigade_config::plugin_arguments::Plugin;
use brigade_config::plugins::{self, Plugins};
use brigade_config::value::{Precision, Value as _};
use brigade_config::{
    ConfigError, Layer, Source, Variables, is_accelerates_default, of_the_launcher,
};
use brigade_launch::hosts::HostsOptions;
use brigade_launch::{
    ChosenPorts, ForOthers, ForPython, GuardSources, LaunchOptions, NprocSpec, OutputOptions,
    PlacementFacts, PlacementOptions, PortRange, Program, RendezvousMode, Secret, SecretError,
};
use brigade_rank_env::env::{
    ACCELERATE_MIXED_PRECISION, BRIGADE_CONTEXT, BRIGADE_CONTEXT_METHOD, BRIGADE_EXPERT,
    BRIGADE_MICRO_BATCHES, BRIGADE_PIPELINE, BRIGADE_PIPELINE_CHUNKS, BRIGADE_PIPELINE_SCHEDULE,
    BRIGADE_SEQUENCE_PARALLEL, BRIGADE_SHARDING, BRIGADE_TENSOR,
};

use super::hosts;
use super::program::ProgramArgs;
use super::rendezvous::{self, Decided, Route};
use super::sharding::{self, FromPlugins, Ranks};

/// Options that result from the settings.
pub(super) struct Resolved {
    /// Options of the launcher.
    pub(super) options: LaunchOptions,
    /// List of hosts, if there is one.
    pub(super) hosts: Option<HostsOptions>,
    /// Plugins of Accelerate's default file that are ignored because the program is not a Python program.
    pub(super) unused: Option<String>,
    /// Meaning of FSDP or DeepSpeed for a Rust program.
    pub(super) sharding: Option<FromPlugins>,
}

/// Plugins that are on.
pub(super) struct PluginChoice {
    pub(super) plugins: Plugins,
    for_python: ForPython,
}

/// Resolves the settings to options of the launcher.
///
/// # Errors
/// Fails if settings contradict each other, or ask for missing resources.
pub(super) fn options(
    layers: &mut Layer,
    program: &ProgramArgs,
    variables: &Variables,
) -> anyhow::Result<Resolved> {
    let Decided { way, waits, heartbeat_timeout } = rendezvous::decide(layers)?;
    let is_on_hosts = way == Route::Hosts;
    if is_on_hosts && layers.settings.raw == Some(true) {
        let source = layers.source("raw").map(ToString::to_string).unwrap_or_default();
        let reason = format!(
            "raw ({source}) with a list of hosts: the terminal is here and the ranks are there; start \
             brigade on each host"
        );
        return Err(ConfigError::Contradiction(reason).into());
    }
    let rendezvous = match way {
        Route::Here(rendezvous) => rendezvous,
        Route::Hosts => RendezvousMode::OneHost,
    };
    let placement = PlacementOptions {
        devices: layers.settings.devices.clone(),
        bind: layers.settings.bind.unwrap_or_default(),
        virtual_local_rank: layers.settings.virtual_local_rank.unwrap_or_default(),
        on_cpu: layers.settings.cpu == Some(true),
    };
    let nproc = match layers.settings.nproc {
        Some(nproc) => nproc,
        // The list of hosts contains the number of ranks of each host, or the devices decide.
        None if is_on_hosts => NprocSpec::Gpu,
        None => count(layers, &placement),
    };
    let program_args = program;
    let program = program_args.program(variables)?;
    sharding::settle(layers, &program)?;
    sharding::settle_axes(layers, &program)?;
    let (chosen, unused) = plugins(layers, &program, variables)?;
    // An explicit setting takes precedence over one that another setting implies.
    let training = training(layers);
    let mut env = training.clone();
    if let Some(PluginChoice { for_python: ForPython { variables, .. }, .. }) = &chosen {
        // They have the same meaning, in Accelerate's own spelling.
        env.retain(|(name, _)| variables.iter().all(|it| it.0 != *name));
    }
    env.retain(|(name, _)| !layers.settings.env.contains_key(name));
    env.extend(layers.settings.env.clone());

    let secret = secret(layers, &rendezvous, variables)?;
    let etcd = rendezvous::etcd_access(layers, &rendezvous, variables)?;
    let store_port = store_port(layers, &rendezvous, is_on_hosts);
    let settings = &layers.settings;
    let default = LaunchOptions::default();
    let mut options = LaunchOptions {
        nproc,
        program,
        args: program_args.arguments().to_vec(),
        threads_per_rank: settings.threads_per_rank,
        max_restarts: settings.max_restarts.unwrap_or(default.max_restarts),
        nodes: settings.nnodes.unwrap_or_default(),
        rendezvous,
        run_id: settings.rdzv_id.clone(),
        secret,
        etcd,
        local_addr: settings.local_addr.clone(),
        timeouts: waits,
        role: settings.role.clone().unwrap_or(default.role),
        shutdown_timeout: settings.shutdown_timeout.unwrap_or(default.shutdown_timeout),
        heartbeat_timeout,
        output: OutputOptions {
            log_dir: settings.log_dir.clone(),
            redirects: settings.redirects.clone(),
            tee: settings.tee.clone(),
            local_ranks_filter: settings.local_ranks_filter.clone(),
            duplicate_stdout: settings.duplicate_stdout_filters.clone(),
            duplicate_stderr: settings.duplicate_stderr_filters.clone(),
            prefix: settings.prefix.clone(),
            color: settings.color.unwrap_or_default(),
            quiet: settings.quiet.unwrap_or_default(),
            raw: settings.raw,
        },
        events: settings.events.clone(),
        placement,
        env,
        withheld: of_the_launcher(),
        for_python: None,
        store_port,
    };
    let hosts = hosts::options(layers)?;
    let axes = ["sharding", "tensor", "sequence-parallel", "context", "expert", "pipeline"];
    let divides = axes.iter().any(|name| layers.is_given(name));
    let ranks =
        if chosen.is_some() || divides { Ranks::count(&options, hosts.as_ref())? } else { None };
    sharding::check(layers, ranks)?;
    let mut from_plugins = None;
    if let Some(PluginChoice { mut for_python, plugins }) = chosen {
        let is_rust = match options.program.is_python_here() {
            Some(is_python) => !is_python,
            None => !options.program.is_named_as_python(),
        };
        if is_rust && plugins.only_for_python().is_empty() {
            let read = FromPlugins::read(layers, &plugins, ranks)?;
            let of_plugins = read.variables(layers);
            for_python.others =
                ForOthers::Variables(training.into_iter().chain(of_plugins).collect());
            from_plugins = Some(read);
        }
        options.for_python = Some(for_python);
    }
    Ok(Resolved { options, hosts, unused, sharding: from_plugins })
}

/// Returns the variables of Accelerate's plugins for Python programs, with the plugins. A file that was not named turns
/// them on for Python programs only: otherwise the names of the ignored plugins are returned.
///
/// Errors when plugins exclude each other.
pub(super) fn plugins(
    layers: &mut Layer,
    program: &Program,
    variables: &Variables,
) -> anyhow::Result<(Option<PluginChoice>, Option<String>)> {
    let Some(plugins) = plugins::resolve(layers)? else { return Ok((None, None)) };
    let is_asked_for = plugins.on.iter().any(|it| !is_accelerates_default(&it.1, variables));
    if !is_asked_for && program.is_python_here() == Some(false) {
        let names = plugins.names();
        for (plugin, source) in plugins.on {
            layers.note(source, format!("{} is for Python programs and not used", plugin.name()));
            if plugin == Plugin::Fp8 {
                layers.reset("mixed-precision");
            }
        }
        return Ok((None, Some(names)));
    }
    // Plugins that exist for Python only are named first.
    let what = Some(plugins.only_for_python()).filter(|it| !it.is_empty());
    let what = what.unwrap_or_else(|| plugins.what());
    let others = ForOthers::Refused { what, remedy: plugins.remedy().to_owned() };
    let mut values = plugins.variables.clone();
    if plugins.adds_python_path {
        let folder = layers.settings.workdir.clone().map_or_else(std::env::current_dir, Ok)?;
        let before = variables.value(PYTHONPATH).into_iter().flat_map(std::env::split_paths);
        let before = before.filter(|it| !it.as_os_str().is_empty());
        let paths = std::env::join_paths(before.chain([folder]))?;
        values.push((PYTHONPATH.to_owned(), paths.to_string_lossy().into_owned()));
    }
    let for_python = ForPython { variables: values, others };
    Ok((Some(PluginChoice { for_python, plugins }), None))
}

/// Returns the port of the ranks' store if the user has set it: by its own setting, or on one host by torchrun's. Port
/// 0 is any free one.
fn store_port(
    layers: &Layer,
    rendezvous: &RendezvousMode,
    is_on_hosts: bool,
) -> Option<ChosenPorts> {
    let source = |name| layers.source(name).map(ToString::to_string).unwrap_or_default();
    if let Some(ports) = layers.settings.store_port {
        return Some(ChosenPorts { ports, source: source("store-port") });
    }
    let is_one_host = *rendezvous == RendezvousMode::OneHost && !is_on_hosts;
    let port = layers.settings.master_port.filter(|port| is_one_host && *port != 0)?;
    let ports = PortRange { first: port, last: port };
    Some(ChosenPorts { ports, source: source("master-port") })
}

/// Returns the secret that the launchers of all hosts share, if one command is started on each.
fn secret(
    layers: &mut Layer,
    rendezvous: &RendezvousMode,
    variables: &Variables,
) -> Result<Option<Secret>, SecretError> {
    if matches!(rendezvous, RendezvousMode::OneHost | RendezvousMode::Launcher { .. }) {
        return Ok(None);
    }
    let file = layers.settings.rdzv_secret_file.clone();
    let is_flag = matches!(layers.source("rdzv-secret-file"), Some(Source::Flag(_)));
    let sources = GuardSources {
        flag: file.as_deref().filter(|_| is_flag),
        variables: &|name| variables.value(name).cloned(),
        setting: file.as_deref(),
        scheduled: matches!(layers.source("node-rank"), Some(Source::Scheduler(_))),
    };
    let guard = sources.find()?;
    let text = match &guard {
        Some(guard) => format!("the launchers authenticate each other with {}", guard.source),
        None => {
            "the launchers have no secret: any host that reaches the port can take part".to_owned()
        }
    };
    layers.note(Source::Default, text);
    Ok(guard.map(|guard| guard.secret))
}

/// Returns the default number of ranks of a host: one per GPU, or one without GPUs.
fn count(layers: &mut Layer, placement: &PlacementOptions) -> NprocSpec {
    if layers.settings.devices.is_some() {
        layers.note(Source::Default, "nproc: one rank for each of the devices");
        return NprocSpec::Gpu;
    }
    let is_on_cpu = layers.settings.cpu == Some(true);
    if is_on_cpu {
        layers.note(Source::Default, "nproc 1: on the CPU, one rank uses all cores");
        return NprocSpec::Count(1);
    }
    let devices = PlacementFacts::gather(placement, NprocSpec::Gpu).devices;
    let word = devices.kind.device_word();
    let reason = match devices.visible.len() {
        0 => format!("nproc 1: no {word} was found, and one rank uses all cores"),
        devices => format!("nproc {devices}: one rank for each {word}"),
    };
    layers.note(Source::Default, reason);
    NprocSpec::Count(devices.visible.len().max(1))
}

/// Returns the variables that ranks read (Brigade programs, and Python programs with Accelerate), in the spelling of
/// `accelerate launch`. Only explicit settings are included: the defaults are the same in both.
pub(super) fn training(layers: &Layer) -> Vec<(String, String)> {
    let settings = &layers.settings;
    let python = |is_on: Option<bool>| is_on.map(|it| if it { "True" } else { "False" }.to_owned());
    let rows = [
        ("cpu", "ACCELERATE_USE_CPU", python(settings.cpu)),
        ("sharding", BRIGADE_SHARDING, settings.text("sharding")),
        ("tensor", BRIGADE_TENSOR, settings.text("tensor")),
        (
            "sequence-parallel",
            BRIGADE_SEQUENCE_PARALLEL,
            settings.sequence_parallel.map(|it| it.to_string()),
        ),
        ("context", BRIGADE_CONTEXT, settings.text("context")),
        ("context-method", BRIGADE_CONTEXT_METHOD, settings.text("context-method")),
        ("expert", BRIGADE_EXPERT, settings.text("expert")),
        ("pipeline", BRIGADE_PIPELINE, settings.text("pipeline")),
        ("micro-batches", BRIGADE_MICRO_BATCHES, settings.text("micro-batches")),
        ("pipeline-schedule", BRIGADE_PIPELINE_SCHEDULE, settings.text("pipeline-schedule")),
        ("pipeline-chunks", BRIGADE_PIPELINE_CHUNKS, settings.text("pipeline-chunks")),
        // fp8 is set by its plugin, only for Python programs.
        (
            "mixed-precision",
            ACCELERATE_MIXED_PRECISION,
            settings.mixed_precision.filter(|it| *it != Precision::Fp8).map(|it| it.text()),
        ),
        (
            "gradient-accumulation-steps",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            settings.text("gradient-accumulation-steps"),
        ),
        (
            "dynamo-backend",
            "ACCELERATE_DYNAMO_BACKEND",
            settings.dynamo_backend.map(|it| it.text().to_uppercase()),
        ),
        ("dynamo-mode", "ACCELERATE_DYNAMO_MODE", settings.text("dynamo-mode")),
        (
            "dynamo-use-fullgraph",
            "ACCELERATE_DYNAMO_USE_FULLGRAPH",
            python(settings.dynamo_use_fullgraph),
        ),
        (
            "dynamo-use-dynamic",
            "ACCELERATE_DYNAMO_USE_DYNAMIC",
            python(settings.dynamo_use_dynamic),
        ),
        (
            "dynamo-use-regional-compilation",
            "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
            python(settings.dynamo_use_regional_compilation),
        ),
        ("debug-collectives", "ACCELERATE_DEBUG_MODE", settings.text("debug-collectives")),
    ];
    let given = |(setting, variable, text): (&str, &str, Option<String>)| {
        Some((variable.to_owned(), text.filter(|_| layers.is_given(setting))?))
    };
    rows.into_iter().filter_map(given).collect()
}

const PYTHONPATH: &str = "PYTHONPATH";
