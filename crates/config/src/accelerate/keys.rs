//! Outcome of each key of Accelerate's `ClusterConfig`.

use std::path::Path;

use super::{Entry, KeyOutcome};
use crate::error::ConfigError;
use crate::layer::{ENV_PREFIX, PLUGIN_PREFIX};
use crate::plugin_arguments::{
    ARGUMENTS, FIELDS, Kind, Plugin, PluginArgument, STEPS, python_bool, python_float,
};
use crate::source::Source;
use crate::suggest;
use crate::value::{Backend, DynamoBackend, Precision, Raw, Value};
use crate::variables::BIND_OF_AFFINITY;

/// All keys of a file: the outcome of one may depend on others.
pub(super) struct Keys<'a> {
    path: &'a Path,
    entries: &'a [Entry],
}

impl<'a> Keys<'a> {
    pub(super) fn new(path: &'a Path, entries: &'a [Entry]) -> Self {
        Self { path, entries }
    }

    /// Returns every known key, with dashes for underscores.
    pub(super) fn dashed() -> impl Iterator<Item = &'static str> {
        KNOWN.split_whitespace()
    }

    pub(super) fn entry(&self, key: &str) -> Option<&'a Entry> {
        self.entries.iter().rfind(|it| it.key == key)
    }

    pub(super) fn source(&self, entry: &Entry) -> Source {
        entry.source(self.path)
    }

    /// Returns the outcome of a key; `None` if Accelerate has no such key.
    pub(super) fn outcome(&self, entry: &Entry) -> Result<Option<KeyOutcome>, ConfigError> {
        if let Some(last) = self.entry(&entry.key)
            && last.line > entry.line
        {
            let reason = format!("line {} sets it again, and the last value is used", last.line);
            return Ok(Some(KeyOutcome::Idle(reason)));
        }
        if self.is_sagemaker() && entry.key != ENVIRONMENT {
            // The file's other keys are for Amazon SageMaker: one refusal is enough.
            return Ok(Some(KeyOutcome::Nothing));
        }
        let outcome = match entry.key.as_str() {
            ENVIRONMENT => self.environment(entry)?,
            KIND => self.kind(entry)?,
            "mixed_precision" => self.precision(entry)?,
            "fp16" => self.legacy_fp16(entry)?,
            "use_cpu" => self.switch(entry, "cpu")?,
            "debug" => self.switch(entry, "debug-collectives")?,
            PROCESSES => self.processes(entry)?,
            MACHINES => self.machines()?,
            "machine_rank" => self.machine_rank(entry)?,
            "main_process_ip" | "main_process_port" => self.address(entry)?,
            "rdzv_backend" => self.rendezvous(entry)?,
            "same_network" => self.same_network(entry)?,
            "gpu_ids" => self.devices(entry)?,
            "enable_cpu_affinity" => {
                if self.truth(entry)? {
                    becomes("bind", BIND_OF_AFFINITY)
                } else {
                    KeyOutcome::Nothing
                }
            }
            "dynamo_config" => self.compile(entry)?,
            "dynamo_backend" => self.compile_backend(entry, &entry.value)?,
            "mpirun_config" => self.mpirun(entry)?,
            "main_training_function" => match &entry.value {
                Raw::Null => KeyOutcome::Nothing,
                Raw::Text(name) if name == "main" || name.is_empty() => KeyOutcome::Nothing,
                _ if self.is_for_tpus() => {
                    KeyOutcome::LeftOut("each rank runs the whole program, as a script".to_owned())
                }
                _ => KeyOutcome::Idle(
                    "it is for TPUs; elsewhere the whole program is run".to_owned(),
                ),
            },
            "downcast_bf16" | "tpu_name" | "tpu_zone" | "tpu_use_cluster" | "tpu_use_sudo"
            | "command_file" | "commands" | "tpu_vm" | "tpu_env" | "tpu_cluster" => {
                self.of_tpus(entry)?
            }
            "fsdp_config" => self.plugin(entry, Plugin::Fsdp, "fsdp-")?,
            "deepspeed_config" => self.plugin(entry, Plugin::DeepSpeed, "")?,
            "megatron_lm_config" => self.plugin(entry, Plugin::Megatron, "")?,
            "fp8_config" => self.plugin(entry, Plugin::Fp8, "fp8-")?,
            "parallelism_config" => self.plugin(entry, Plugin::Parallelism, "")?,
            "ipex_config" => self.unless_empty(entry, || {
                KeyOutcome::LeftOut("Brigade does not use Intel's extension for PyTorch".to_owned())
            }),
            _ => return Ok(None),
        };
        Ok(Some(outcome))
    }

    fn of_tpus(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        if is_empty(&entry.value) {
            return Ok(KeyOutcome::Nothing);
        }
        if !self.is_for_tpus() {
            return Ok(KeyOutcome::Idle("it is for TPUs only".to_owned()));
        }
        Ok(match entry.key.as_str() {
            "downcast_bf16" => {
                if self.truth(entry)? {
                    becomes(DOWNCAST, "True")
                } else {
                    KeyOutcome::Nothing
                }
            }
            "tpu_env" => self.variables(entry)?,
            "tpu_use_cluster" | "tpu_cluster" => KeyOutcome::Refused(
                "Brigade does not start jobs by gcloud: set it to false, and name the hosts with --hosts"
                    .to_owned(),
            ),
            "command_file" | "commands" => {
                KeyOutcome::Idle("it is for `accelerate tpu-config`".to_owned())
            }
            _ => KeyOutcome::Idle("hosts are reached over ssh, not by gcloud".to_owned()),
        })
    }

    /// Reads a list of variables, each as `NAME=VALUE`.
    fn variables(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        let expected = "a list of NAME=VALUE";
        let Raw::List(items) = &entry.value else {
            return Err(self.wrong(entry, &entry.value.shown(), expected));
        };
        let mut settings = Vec::new();
        for item in items {
            let pair = match item {
                Raw::Text(text) => text.split_once('='),
                _ => None,
            };
            let Some((name, value)) = pair else {
                return Err(self.wrong(entry, &item.shown(), expected));
            };
            settings.push((format!("{ENV_PREFIX}{name}"), value.to_owned()));
        }
        Ok(KeyOutcome::Becomes(settings))
    }

    fn is_for_tpus(&self) -> bool {
        self.is_kind("XLA") || self.is_kind("TPU")
    }

    fn environment(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        match self.word(entry)?.as_str() {
            "LOCAL_MACHINE" => Ok(KeyOutcome::Nothing),
            SAGEMAKER => Ok(KeyOutcome::Refused(
                "Brigade does not start jobs on Amazon SageMaker: use `accelerate launch` for this \
                 file, or `brigade config` to write one for other hosts"
                    .to_owned(),
            )),
            other => Err(self.wrong(entry, other, "LOCAL_MACHINE")),
        }
    }

    fn kind(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        let kind = self.word(entry)?;
        Ok(match kind.as_str() {
            "NO" | "MULTI_CPU" | "MULTI_GPU" | "XLA" | "TPU" => KeyOutcome::Nothing,
            "FSDP" => turns_on(Plugin::Fsdp),
            "DEEPSPEED" => turns_on(Plugin::DeepSpeed),
            "MEGATRON_LM" => turns_on(Plugin::Megatron),
            "MPS" | "MULTI_NPU" | "MULTI_MLU" | "MULTI_SDAA" | "MULTI_MUSA" | "MULTI_XPU"
            | "MULTI_HPU" | "MULTI_NEURON" => KeyOutcome::LeftOut(
                "Brigade supports CPUs, the GPUs of NVIDIA and AMD, and TPUs: the ranks are started, and the \
                 program chooses its devices"
                    .to_owned(),
            ),
            other => return Err(self.wrong(entry, other, "one of NO, MULTI_CPU or MULTI_GPU")),
        })
    }

    fn precision(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        // Without quotation marks, `no` is `false` in YAML.
        let precision = match &entry.value {
            Raw::Null | Raw::Bool(false) => Precision::No,
            Raw::Text(word) => Precision::parse(word)
                .ok_or_else(|| self.wrong(entry, word, Precision::EXPECTED))?,
            other => return Err(self.wrong(entry, &other.shown(), Precision::EXPECTED)),
        };
        Ok(becomes("mixed-precision", precision.word()))
    }

    /// Older name of `mixed_precision`, which takes precedence.
    fn legacy_fp16(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        Ok(match self.truth(entry)? {
            _ if self.entry("mixed_precision").is_some() => {
                KeyOutcome::Idle("mixed_precision goes before it".to_owned())
            }
            true => becomes("mixed-precision", Precision::Fp16.word()),
            false => KeyOutcome::Nothing,
        })
    }

    fn switch(&self, entry: &Entry, name: &'static str) -> Result<KeyOutcome, ConfigError> {
        Ok(becomes(name, &self.truth(entry)?.to_string()))
    }

    /// Divides the number of ranks on all machines by the number of machines.
    fn processes(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        let total = match &entry.value {
            // Accelerate's value for "not set".
            Raw::Integer(-1) | Raw::Null => return Ok(KeyOutcome::Nothing),
            value => self.count(entry, value)?,
        };
        let machines = self.number_of_machines()?;
        if total % machines != 0 {
            let expected = format!(
                "a multiple of {MACHINES}, which is {machines}: it counts the ranks of all \
                 machines, and each of them has the same number"
            );
            return Err(self.wrong(entry, &total.to_string(), &expected));
        }
        Ok(becomes("nproc", &(total / machines).to_string()))
    }

    fn machines(&self) -> Result<KeyOutcome, ConfigError> {
        let machines = self.number_of_machines()?;
        if self.hostfile().is_some() {
            return Ok(KeyOutcome::Idle(
                "the hostfile of mpirun_config counts the machines".to_owned(),
            ));
        }
        Ok(if machines == 1 {
            KeyOutcome::Nothing
        } else {
            becomes("nnodes", &machines.to_string())
        })
    }

    fn machine_rank(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        let rank = match &entry.value {
            Raw::Null => return Ok(KeyOutcome::Nothing),
            value => self.number(entry, value)?,
        };
        Ok(if self.hostfile().is_some() {
            KeyOutcome::Idle("the hostfile of mpirun_config numbers the machines".to_owned())
        } else if self.number_of_machines()? == 1 && rank == 0 {
            KeyOutcome::Nothing
        } else {
            becomes("node-rank", &rank.to_string())
        })
    }

    /// Joins the address and port of the main machine into the endpoint of a rendezvous.
    fn address(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        if entry.value == Raw::Null {
            return Ok(KeyOutcome::Nothing);
        }
        let is_port = entry.key == "main_process_port";
        let text = if is_port {
            let expected = u16::EXPECTED;
            let text = self.scalar(entry)?;
            u16::parse(&text).ok_or_else(|| self.wrong(entry, &text, expected))?.to_string()
        } else {
            self.scalar(entry)?
        };
        if self.hostfile().is_some() {
            let reason = "the hosts of mpirun_config are connected by ssh";
            return Ok(KeyOutcome::Idle(reason.to_owned()));
        }
        if self.number_of_machines()? == 1 {
            return Ok(if is_port {
                becomes("master-port", &text)
            } else {
                KeyOutcome::Idle("it is for several machines".to_owned())
            });
        }
        Ok(match (self.meets_by_rendezvous(), is_port) {
            (false, true) => becomes("master-port", &text),
            (false, false) => becomes("master-addr", &text),
            (true, true) => KeyOutcome::Nothing,
            (true, false) => {
                let port = self.entry("main_process_port").map(|it| self.scalar(it)).transpose()?;
                let port = port.map_or_else(String::new, |port| format!(":{port}"));
                becomes("rdzv-endpoint", &format!("{text}{port}"))
            }
        })
    }

    fn rendezvous(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        let word = match &entry.value {
            Raw::Null => return Ok(KeyOutcome::Nothing),
            Raw::Text(word) if word.is_empty() => return Ok(KeyOutcome::Nothing),
            Raw::Text(word) => word,
            other => return Err(self.wrong(entry, &other.shown(), Backend::EXPECTED)),
        };
        let backend =
            Backend::parse(word).ok_or_else(|| self.wrong(entry, word, "c10d, static or etcd"))?;
        Ok(if self.number_of_machines()? == 1 || self.hostfile().is_some() {
            KeyOutcome::Nothing
        } else {
            becomes("rdzv-backend", backend.word())
        })
    }

    /// Selects `--master_addr` or `--rdzv_endpoint` for the address in Accelerate; torchrun's static rendezvous treats
    /// both alike.
    fn same_network(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        self.truth(entry).map(|_| KeyOutcome::Nothing)
    }

    fn devices(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        Ok(match &entry.value {
            Raw::Null => KeyOutcome::Nothing,
            Raw::Text(text) if text == "all" || text.is_empty() => KeyOutcome::Nothing,
            Raw::Text(text) => becomes("devices", text),
            Raw::Integer(number) => becomes("devices", &number.to_string()),
            other => return Err(self.wrong(entry, &other.shown(), "all, or a list such as 0,2")),
        })
    }

    fn compile(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        let table = match &entry.value {
            Raw::Null => return Ok(KeyOutcome::Nothing),
            Raw::Table(table) => table,
            other => return Err(self.wrong(entry, &other.shown(), "keys and values")),
        };
        let mut settings = Vec::new();
        for (key, value) in table {
            // Accelerate's questionnaire writes the prefix; files written by hand may lack it.
            let key = key.strip_prefix("dynamo_").unwrap_or(key);
            let nested = Entry { key: format!("dynamo_{key}"), value: value.clone(), ..*entry };
            let outcome = match key {
                "backend" => self.compile_backend(&nested, value)?,
                "mode" => becomes("dynamo-mode", &self.scalar(&nested)?),
                "use_fullgraph" => self.switch(&nested, "dynamo-use-fullgraph")?,
                "use_dynamic" => self.switch(&nested, "dynamo-use-dynamic")?,
                "use_regional_compilation" => {
                    self.switch(&nested, "dynamo-use-regional-compilation")?
                }
                _ => {
                    let at = self.source(entry);
                    let hint = " in dynamo_config".to_owned();
                    return Err(ConfigError::UnknownKey { at, key: nested.key, hint });
                }
            };
            if let KeyOutcome::Becomes(more) = outcome {
                settings.extend(more);
            }
        }
        Ok(if settings.is_empty() { KeyOutcome::Nothing } else { KeyOutcome::Becomes(settings) })
    }

    fn compile_backend(&self, entry: &Entry, value: &Raw) -> Result<KeyOutcome, ConfigError> {
        let backend = match value {
            Raw::Null | Raw::Bool(false) => DynamoBackend::No,
            Raw::Text(word) => DynamoBackend::parse(word)
                .ok_or_else(|| self.wrong(entry, word, DynamoBackend::EXPECTED))?,
            other => return Err(self.wrong(entry, &other.shown(), DynamoBackend::EXPECTED)),
        };
        Ok(becomes("dynamo-backend", backend.word()))
    }

    fn mpirun(&self, entry: &Entry) -> Result<KeyOutcome, ConfigError> {
        let table = match &entry.value {
            Raw::Null => return Ok(KeyOutcome::Nothing),
            Raw::Table(table) => table,
            other => return Err(self.wrong(entry, &other.shown(), "keys and values")),
        };
        if let Some(key) = table.keys().find(|key| !MPIRUN.contains(&key.as_str())) {
            let (at, hint) = (self.source(entry), " in mpirun_config".to_owned());
            return Err(ConfigError::UnknownKey { at, key: key.clone(), hint });
        }
        let mut settings = Vec::new();
        settings.extend(self.hostfile().map(|file| ("hostfile".to_owned(), file)));
        match table.get("mpirun_ccl") {
            Some(Raw::Integer(count)) if *count != 0 => {
                settings.push((CCL.to_owned(), count.to_string()));
            }
            Some(Raw::Text(count)) if count != "0" && !count.is_empty() => {
                settings.push((CCL.to_owned(), count.clone()));
            }
            _ => {}
        }
        Ok(if settings.is_empty() { KeyOutcome::Nothing } else { KeyOutcome::Becomes(settings) })
    }

    /// Reads the arguments of a plugin. They are kept even if the plugin is off, as a flag may turn it on. Accelerate
    /// accepts keys of `fsdp_config` with and without their prefix.
    fn plugin(
        &self,
        entry: &Entry,
        plugin: Plugin,
        prefix: &str,
    ) -> Result<KeyOutcome, ConfigError> {
        let table = match &entry.value {
            Raw::Null => return Ok(KeyOutcome::Nothing),
            Raw::Table(table) => table,
            other => return Err(self.wrong(entry, &other.shown(), "keys and values")),
        };
        let mut settings = Vec::new();
        // Any axis turns the plugin on, even one of a single rank; but Accelerate's launcher for CPUs and for one
        // process has no such plugin.
        if plugin == Plugin::Parallelism
            && !table.is_empty()
            && !self.is_kind("NO")
            && !self.is_kind("MULTI_CPU")
            && let KeyOutcome::Becomes(on) = turns_on(plugin)
        {
            settings.extend(on);
        }
        for (key, value) in table.iter().filter(|(_, value)| **value != Raw::Null) {
            let name = key.replace('_', "-");
            let name = if name.starts_with(prefix) { name } else { format!("{prefix}{name}") };
            if let Some(name) = OF_THE_LAUNCHER.iter().find(|it| it.0 == name).map(|it| it.1) {
                let nested = Entry { key: key.clone(), value: value.clone(), ..*entry };
                let text = self.scalar(&nested)?;
                if !text.is_empty() && text != "none" {
                    settings.push((name.to_owned(), text));
                }
                continue;
            }
            let name = if name == "gradient-accumulation-steps" { STEPS } else { &name };
            let Some(argument) = PluginArgument::named(name).filter(|it| it.plugin == plugin)
            else {
                let names = ARGUMENTS.iter().filter(|it| it.plugin == plugin).map(|it| it.name);
                let hint = suggest::closest(name, names).map_or_else(String::new, |closest| {
                    format!(": did you mean `{}`?", closest.replace('-', "_"))
                });
                let (at, hint) = (self.source(entry), format!(" in {}{hint}", entry.key));
                return Err(ConfigError::UnknownKey { at, key: key.clone(), hint });
            };
            let text = match value {
                Raw::Bool(value) => python_bool(*value).to_owned(),
                Raw::Text(text) => text.clone(),
                Raw::Integer(number) => number.to_string(),
                Raw::Float(number) => python_float(*number),
                Raw::List(items) if argument.kind == Kind::ThreeOnesOrZeros => {
                    items.iter().map(Raw::shown).collect::<Vec<_>>().join(",")
                }
                other => return Err(self.wrong(entry, &other.shown(), "texts and numbers")),
            };
            let text = argument.of_file(text);
            if argument.kind == Kind::ThreeOnesOrZeros {
                argument
                    .parse(&text)
                    .map_err(|_| self.wrong(entry, &text, &argument.kind.expected()))?;
            }
            settings.push((format!("{PLUGIN_PREFIX}{}", argument.name), text));
        }
        if plugin == Plugin::DeepSpeed && !table.is_empty() {
            let keys: Vec<&str> = table.keys().map(String::as_str).collect();
            settings.push((format!("{PLUGIN_PREFIX}{FIELDS}"), keys.join(",")));
        }
        Ok(if settings.is_empty() { KeyOutcome::Nothing } else { KeyOutcome::Becomes(settings) })
    }

    fn is_kind(&self, kind: &str) -> bool {
        self.entry(KIND).is_some_and(|it| self.word(it).is_ok_and(|word| word == kind))
    }

    fn unless_empty(&self, entry: &Entry, outcome: impl Fn() -> KeyOutcome) -> KeyOutcome {
        if is_empty(&entry.value) { KeyOutcome::Nothing } else { outcome() }
    }

    fn is_sagemaker(&self) -> bool {
        self.entry(ENVIRONMENT).is_some_and(|it| it.value == Raw::Text(SAGEMAKER.to_owned()))
    }

    fn meets_by_rendezvous(&self) -> bool {
        let backend = self.entry("rdzv_backend").map(|it| &it.value);
        let parsed = match backend {
            Some(Raw::Text(word)) => Backend::parse(word),
            _ => None,
        };
        matches!(parsed, Some(Backend::Builtin | Backend::Etcd))
    }

    fn hostfile(&self) -> Option<String> {
        let Raw::Table(table) = &self.entry("mpirun_config")?.value else { return None };
        match table.get("mpirun_hostfile") {
            Some(Raw::Text(file)) if !file.is_empty() => Some(file.clone()),
            _ => None,
        }
    }

    fn number_of_machines(&self) -> Result<usize, ConfigError> {
        match self.entry(MACHINES) {
            None => Ok(1),
            Some(entry) if entry.value == Raw::Null => Ok(1),
            Some(entry) => self.count(entry, &entry.value),
        }
    }

    fn count(&self, entry: &Entry, value: &Raw) -> Result<usize, ConfigError> {
        match self.number(entry, value)? {
            0 => Err(self.wrong(entry, "0", "a whole number from 1")),
            count => Ok(count),
        }
    }

    fn number(&self, entry: &Entry, value: &Raw) -> Result<usize, ConfigError> {
        let number = match value {
            Raw::Integer(number) => usize::try_from(*number).ok(),
            Raw::Text(text) => text.parse().ok(),
            _ => None,
        };
        number.ok_or_else(|| self.wrong(entry, &value.shown(), usize::EXPECTED))
    }

    fn truth(&self, entry: &Entry) -> Result<bool, ConfigError> {
        let truth = match &entry.value {
            Raw::Null => Some(false),
            Raw::Bool(truth) => Some(*truth),
            Raw::Text(word) => bool::parse(word),
            _ => None,
        };
        truth.ok_or_else(|| self.wrong(entry, &entry.value.shown(), bool::EXPECTED))
    }

    fn word(&self, entry: &Entry) -> Result<String, ConfigError> {
        match &entry.value {
            Raw::Text(word) => Ok(word.clone()),
            // An unquoted `distributed_type: NO` is `false` in YAML.
            Raw::Bool(false) => Ok("NO".to_owned()),
            other => Err(self.wrong(entry, &other.shown(), "a word")),
        }
    }

    fn scalar(&self, entry: &Entry) -> Result<String, ConfigError> {
        match &entry.value {
            Raw::Text(text) if !text.is_empty() => Ok(text.clone()),
            Raw::Integer(number) => Ok(number.to_string()),
            other => Err(self.wrong(entry, &other.shown(), "a text")),
        }
    }

    fn wrong(&self, entry: &Entry, found: &str, expected: &str) -> ConfigError {
        ConfigError::wrong(self.source(entry), &entry.key, found.to_owned(), expected)
    }
}

fn becomes(name: &str, value: &str) -> KeyOutcome {
    KeyOutcome::Becomes(vec![(name.to_owned(), value.to_owned())])
}

fn turns_on(plugin: Plugin) -> KeyOutcome {
    let on = |switch| becomes(&format!("{PLUGIN_PREFIX}{switch}"), "true");
    plugin.switch().map_or(KeyOutcome::Nothing, on)
}

/// Returns `true` for null, false, an empty value, or the word `no` or `none`.
fn is_empty(value: &Raw) -> bool {
    match value {
        Raw::Null | Raw::Bool(false) => true,
        Raw::Text(word) => matches!(word.as_str(), "" | "no" | "none" | "false"),
        Raw::List(items) => items.is_empty(),
        Raw::Table(table) => table.values().all(is_empty),
        _ => false,
    }
}

/// Keys of `deepspeed_config` that are settings of any launch.
const OF_THE_LAUNCHER: [(&str, &str); 3] = [
    ("deepspeed-hostfile", "hostfile"),
    ("deepspeed-inclusion-filter", "include"),
    ("deepspeed-exclusion-filter", "exclude"),
];
pub(super) const KIND: &str = "distributed_type";
const ENVIRONMENT: &str = "compute_environment";
const SAGEMAKER: &str = "AMAZON_SAGEMAKER";
const PROCESSES: &str = "num_processes";
const MACHINES: &str = "num_machines";
const MPIRUN: [&str; 2] = ["mpirun_hostfile", "mpirun_ccl"];
/// Setting that `mpirun_ccl` becomes.
const CCL: &str = "env.CCL_WORKER_COUNT";
/// Setting that `downcast_bf16` becomes: Accelerate's variable for programs that use torch_xla.
const DOWNCAST: &str = "env.ACCELERATE_DOWNCAST_BF16";
/// Known keys, for suggestions. The tests compare the list with the keys that have an outcome.
const KNOWN: &str = "compute-environment distributed-type mixed-precision use-cpu debug \
    num-processes num-machines machine-rank gpu-ids main-process-ip main-process-port rdzv-backend \
    same-network main-training-function enable-cpu-affinity fp8-config deepspeed-config \
    fsdp-config parallelism-config megatron-lm-config mpirun-config downcast-bf16 tpu-name \
    tpu-zone tpu-use-cluster tpu-use-sudo command-file commands tpu-vm tpu-env dynamo-config";
