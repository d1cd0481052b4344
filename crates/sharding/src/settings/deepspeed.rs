//! DeepSpeed's configuration, as Accelerate passes it on.

mod auto;
mod json;
mod keys;

use brigade_checkpoint::Dtype;
use serde_json::{Map, Value, json};

use super::fsdp::mixed;
use super::given::{Given, Values};
use super::parallelism::copies;
use super::reader::{AUTO, Reader};
use super::{
    Facts, LossScale, Note, Precision, ScheduleSettings, Settings, SettingsError, optimizer,
    schedule,
};
use crate::{
    Axis, ContextMethod, MixedPrecision, Offload, ReduceGradients, Reshard, Sharding, ShardingError,
};

/// DeepSpeed configuration, with the arguments of `accelerate launch` that complete it.
///
/// ```
/// use brigade_sharding::settings::{DeepSpeedConfig, Facts};
/// use brigade_sharding::Strategy;
///
/// let text = r#"{
///     "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": "auto",
///     "bf16": {"enabled": true}, "zero_optimization": {"stage": 2, "overlap_comm": false}
/// }"#;
/// let facts = Facts { gradient_accumulation_steps: 4, ..Facts::new(2) };
/// let (settings, notes) = DeepSpeedConfig::from_json("ds.json", text)?.resolve(&facts)?;
/// assert_eq!(settings.sharding.unwrap().strategy, Strategy::Zero2);
/// assert_eq!(settings.train_batch_size, Some(64));
/// assert!(notes.iter().any(|note| note.key == "zero_optimization.overlap_comm"));
///
/// let text = r#"{"train_batch_size": 60, "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}}"#;
/// let error = DeepSpeedConfig::from_json("ds.json", text)?.resolve(&Facts::new(2)).unwrap_err();
/// assert!(error.to_string().starts_with("ds.json: train_batch_size 60 is not train_micro_batch_size_per_gpu 8 x"));
/// # Ok::<(), brigade_sharding::settings::SettingsError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct DeepSpeedConfig {
    origin: String,
    root: Map<String, Value>,
    arguments: Arguments,
}

/// Values from the arguments of `accelerate launch`, which replace `auto`.
#[derive(Debug, Clone, PartialEq)]
struct Arguments {
    steps: Option<u64>,
    clipping: Option<f64>,
    stage: u64,
    offload_optimizer: String,
    offload_param: String,
    gathers_on_save: bool,
    notes: Vec<Note>,
}

impl DeepSpeedConfig {
    /// Reads a configuration from JSON, or from base64 of JSON, as Accelerate does. `origin` is its source, for
    /// messages.
    ///
    /// # Errors
    /// [`SettingsError::Syntax`] for a text that is not a JSON object, [`SettingsError::Duplicate`] for a key that
    /// occurs twice, and [`SettingsError::Missing`] if there is no `zero_optimization`.
    pub fn from_json(origin: &str, text: &str) -> Result<Self, SettingsError> {
        let root = json::read(origin, text)?;
        if !root.get("zero_optimization").is_some_and(Value::is_object) {
            return Err(SettingsError::Missing {
                origin: origin.to_owned(),
                key: "zero_optimization",
                remedy: "write { \"stage\": 0 } to 3",
            });
        }
        Ok(Self { origin: origin.to_owned(), root, arguments: Arguments::default() })
    }

    /// Creates the configuration that Accelerate creates from its own arguments alone: `zero_stage`,
    /// `offload_optimizer_device` and others.
    ///
    /// # Errors
    /// [`SettingsError::Value`] for an invalid value, and [`SettingsError::Unsupported`] for offload to NVMe drives.
    pub fn from_arguments(given: &[Given]) -> Result<Self, SettingsError> {
        let arguments = Arguments::read(given)?;
        let said = Values::new(given);
        let first = said.find("zero_stage").or_else(|| said.find("use_deepspeed"));
        let auto = || json!(AUTO);
        let offload = |device: &str| json!({"device": device, "nvme_path": null});
        let mut root = json!({
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": arguments.steps.map_or_else(auto, Value::from),
            "zero_optimization": {
                "stage": arguments.stage,
                "offload_optimizer": offload(&arguments.offload_optimizer),
                "offload_param": offload(&arguments.offload_param),
                "stage3_gather_16bit_weights_on_model_save": AUTO,
            },
        });
        // 0 would turn clipping off; Accelerate leaves it out, and DeepSpeed clips at 1.
        match arguments.clipping {
            Some(0.0) => {}
            norm => root["gradient_clipping"] = norm.map_or_else(auto, Value::from),
        }
        let Value::Object(root) = root else { unreachable!("an object was written") };
        let origin = first.map_or_else(|| "DeepSpeed".to_owned(), |it| it.origin.clone());
        Ok(Self { origin, root, arguments })
    }

    /// Adds the arguments of `accelerate launch`, which replace `auto` in a DeepSpeed file.
    ///
    /// # Errors
    /// Returns the errors of [`DeepSpeedConfig::from_arguments`], and [`SettingsError::Contradiction`] for fields of a
    /// settings file (`deepspeed_fields_from_accelerate_config`) that have to be in the DeepSpeed file, as in
    /// Accelerate.
    pub fn with_arguments(self, given: &[Given]) -> Result<Self, SettingsError> {
        if let Some(fields) = Values::new(given).find("deepspeed_fields_from_accelerate_config")
            && let Some(field) = fields.value.split(',').find(|it| SAID_BY_THE_FILE.contains(it))
        {
            return Err(SettingsError::Contradiction {
                first: format!("{field} ({})", fields.origin),
                second: self.origin,
                remedy: "leave it out of Accelerate's settings, and write it into the DeepSpeed file",
            });
        }
        Ok(Self { arguments: Arguments::read(given)?, ..self })
    }

    /// Returns the configuration with a value for each `auto`, as Accelerate 1.15 passes it to DeepSpeed. Keys that
    /// depend on unknown facts stay `auto`.
    ///
    /// # Errors
    /// [`SettingsError::Auto`] for an `auto` without a value, [`SettingsError::Missing`] for an optimizer or a schedule
    /// that the program takes from the settings, and [`SettingsError::Contradiction`] for a precision other than the
    /// launch's, or an optimizer or a schedule both here and in the program.
    pub fn filled(&self, facts: &Facts) -> Result<Map<String, Value>, SettingsError> {
        auto::fill(self, facts)
    }

    /// Returns the settings of a Rust program, and a note on each key that is not applied as it is written.
    ///
    /// # Errors
    /// Returns the errors of [`DeepSpeedConfig::filled`], and [`SettingsError`] for unknown keys, invalid values, batch
    /// sizes that contradict each other, and features that Brigade does not have (`nvme`, quantized messages, …).
    pub fn resolve(&self, facts: &Facts) -> Result<(Settings, Vec<Note>), SettingsError> {
        let mut root = self.filled(facts)?;
        rename(&mut root);
        let reader = Reader { origin: &self.origin, root: &root };
        let mut written = self.root.clone();
        rename(&mut written);
        let mut notes = keys::check(reader, &written)?;
        notes.extend(self.arguments.notes.iter().cloned());
        if reader.is_on("fp16.enabled")? && reader.is_on("bf16.enabled")? {
            return Err(SettingsError::Contradiction {
                first: format!("fp16.enabled ({})", self.origin),
                second: "bf16.enabled".to_owned(),
                remedy: "set one of them to false",
            });
        }
        let (precision, mixed) = precision(reader, &mut notes)?;
        if facts.mixed_precision == Some(Precision::Fp8) {
            notes.push(Note {
                key: "mixed_precision".to_owned(),
                value: "fp8".to_owned(),
                origin: self.origin.clone(),
                text: "products would be computed in 8 bits; they are computed in bf16".to_owned(),
            });
        }
        let sharding = sharding(reader, mixed, facts, &mut notes)?;
        let ranks = u64::try_from(facts.world_size).unwrap_or(u64::MAX);
        let batch = Batch::read(reader, ranks)?;
        let at_mesh = |source| SettingsError::Mesh { origin: self.origin.clone(), source };
        let mesh = match &sharding {
            Some(sharding) => sharding.mesh(facts.world_size).map_err(at_mesh)?,
            None => copies(facts.world_size, &self.origin)?,
        };
        if let Some(Sharding { reshard_after_forward: Reshard::To(size), .. }) = sharding {
            let shard_size = mesh.size(Axis::Shard);
            if !shard_size.is_multiple_of(size) {
                return Err(at_mesh(ShardingError::ReshardTo { size, shard_size }));
            }
        }
        let settings = Settings {
            mesh,
            context_method: ContextMethod::default(),
            sequence_regions: false,
            sharding,
            precision,
            loss_scale: loss_scale(reader, precision)?,
            micro_batch_size: batch.micro,
            gradient_accumulation_steps: batch.steps,
            pipeline_micro_batches: None,
            train_batch_size: batch.train,
            gradient_clipping: clipping(reader, &mut notes)?,
            recompute: false,
            optimizer: optimizer::read(reader)?,
            schedule: schedule::read(reader)?,
        };
        if let Some(ScheduleSettings::OneCycle { .. }) = settings.schedule
            && reader.truth("scheduler.params.cycle_momentum")?.unwrap_or(true)
        {
            let text =
                "the momentum would fall while the rate rises; it stays as the optimizer has it";
            notes.push(reader.note("scheduler.params.cycle_momentum", text));
        }
        Ok((settings, notes))
    }
}

/// Fields of Accelerate's settings that have to be in the DeepSpeed file, if there is one.
const SAID_BY_THE_FILE: [&str; 9] = [
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
    "mixed_precision",
];

impl Default for Arguments {
    fn default() -> Self {
        Self {
            steps: None,
            clipping: None,
            stage: 2,
            offload_optimizer: "none".to_owned(),
            offload_param: "none".to_owned(),
            gathers_on_save: false,
            notes: Vec::new(),
        }
    }
}

impl Arguments {
    fn read(given: &[Given]) -> Result<Self, SettingsError> {
        let values = Values::new(given);
        let said = |name: &str| values.find(name).filter(|it| it.value != AUTO);
        let mut arguments =
            Self { gathers_on_save: values.switch("zero3_save_16bit_model")?, ..Self::default() };
        if let Some(steps) = said("deepspeed_gradient_accumulation_steps") {
            arguments.steps = Some(steps.count()?);
        }
        if let Some(norm) = said("gradient_clipping") {
            let number =
                norm.value.trim().parse().ok().filter(|it: &f64| it.is_finite() && *it >= 0.0);
            arguments.clipping =
                Some(number.ok_or_else(|| norm.wrong("a number from 0, or auto"))?);
        }
        if let Some(stage) = said("zero_stage") {
            let number = stage.count()?;
            arguments.stage =
                Some(number).filter(|it| *it <= 3).ok_or_else(|| stage.wrong("0 to 3"))?;
        }
        for (name, to) in [
            ("offload_optimizer_device", &mut arguments.offload_optimizer),
            ("offload_param_device", &mut arguments.offload_param),
        ] {
            if let Some(device) = said(name) {
                match device.value.to_ascii_lowercase().as_str() {
                    word @ ("none" | "cpu") => word.clone_into(to),
                    "nvme" => return Err(device.unsupported(NO_NVME)),
                    _ => return Err(device.wrong("none or cpu")),
                }
            }
        }
        for (name, text) in [
            (
                "zero3_init_flag",
                "a model would be made in shards; write `Model::deferred` for that",
            ),
            (
                "deepspeed_moe_layer_cls_names",
                "names classes of a Python model; a Rust model names its units",
            ),
            ("deepspeed_multinode_launcher", "Brigade starts the hosts itself"),
        ] {
            arguments.notes.extend(values.find(name).map(|it| it.note(text)));
        }
        Ok(arguments)
    }
}

const NO_NVME: &str = "parameters or states would lie on NVMe drives; use cpu, or more ranks";

/// Renames keys with older or shorter names that DeepSpeed accepts to the names of its documentation.
fn rename(root: &mut Map<String, Value>) {
    let Some(Value::Object(zero)) = root.get_mut("zero_optimization") else { return };
    for name in [
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "gather_16bit_weights_on_model_save",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
    ] {
        if let Some(value) = zero.remove(name) {
            zero.entry(format!("stage3_{name}")).or_insert(value);
        }
    }
}

fn sharding(
    reader: Reader<'_>,
    mixed: MixedPrecision,
    facts: &Facts,
    notes: &mut Vec<Note>,
) -> Result<Option<Sharding>, SettingsError> {
    const STAGE: &str = "zero_optimization.stage";
    let stage = reader.count(STAGE)?.unwrap_or(0);
    let offload = offload(reader, stage, notes)?;
    let base = match stage {
        0 => return Ok(None),
        1 => Sharding::zero1().reduce(ReduceGradients::Window),
        2 => Sharding::zero2(),
        3 => match mics(reader)? {
            Some(shard_size) => Sharding::hybrid(shard_size),
            None => Sharding::zero3(),
        },
        _ => return Err(reader.wrong(STAGE, "0 to 3")),
    };
    let base = base.mixed(mixed).offload(offload);
    Ok(Some(if stage == 3 {
        base.reshard_after_forward(reshard(reader, facts, notes)?)
    } else {
        base
    }))
}

/// Reads the number of ranks that share one copy (MiCS, in DeepSpeed up to 0.18).
fn mics(reader: Reader<'_>) -> Result<Option<usize>, SettingsError> {
    const SIZE: &str = "zero_optimization.mics_shard_size";
    match reader.find(SIZE) {
        None => Ok(None),
        Some(value) if *value == -1 => Ok(None),
        Some(_) => match reader.count(SIZE)?.map(usize::try_from) {
            Some(Ok(size)) if size > 0 => Ok(Some(size)),
            _ => Err(reader.wrong(SIZE, "a whole number from 1, or -1")),
        },
    }
}

fn reshard(
    reader: Reader<'_>,
    facts: &Facts,
    notes: &mut Vec<Note>,
) -> Result<Reshard, SettingsError> {
    const PART: &str = "zero_optimization.zero_hpz_partition_size";
    const LIVE: &str = "zero_optimization.stage3_max_live_parameters";
    const REUSE: &str = "zero_optimization.stage3_max_reuse_distance";
    if let Some(size) = reader.count(PART)?.filter(|size| *size > 1) {
        let size = usize::try_from(size).map_err(|_| reader.wrong(PART, "a number of ranks"))?;
        return Ok(match size {
            // Each rank of the job has a part, as without this key.
            size if size == facts.world_size => Reshard::Yes,
            size => Reshard::To(size),
        });
    }
    let (live, reuse) = (reader.count(LIVE)?, reader.count(REUSE)?);
    if let (Some(live), Some(reuse), Some(parameters)) = (live, reuse, facts.parameters)
        && live >= parameters
        && reuse >= parameters.saturating_mul(2)
    {
        return Ok(Reshard::No);
    }
    for (path, value) in [(LIVE, live), (REUSE, reuse)] {
        if value.is_some_and(|value| value > 0) {
            let text = "parameters would stay whole after forward up to this limit; they do where the model is known \
                        and within both limits, and are freed otherwise";
            notes.push(reader.note(path, text));
        }
    }
    Ok(Reshard::Yes)
}

fn offload(
    reader: Reader<'_>,
    stage: u64,
    notes: &mut Vec<Note>,
) -> Result<Offload, SettingsError> {
    let device = |section: &str, old: &[&str]| -> Result<Option<String>, SettingsError> {
        let path = format!("zero_optimization.{section}.device");
        match reader.text(&path)?.map(str::to_ascii_lowercase).as_deref() {
            Some("cpu") => return Ok(Some(path)),
            Some("nvme") => return Err(reader.unsupported(&path, NO_NVME)),
            _ => {}
        }
        for old in old {
            let path = format!("zero_optimization.{old}");
            if reader.is_on(&path)? {
                return Ok(Some(path));
            }
        }
        Ok(None)
    };
    let states = device("offload_optimizer", &["cpu_offload"])?;
    let mut parameters = device("offload_param", &["cpu_offload_param", "cpu_offload_params"])?;
    if stage < 3
        && let Some(path) = parameters.take()
    {
        notes.push(reader.note(&path, "has no effect below stage 3, as in DeepSpeed"));
    }
    if stage == 0
        && let Some(path) = states
    {
        notes.push(reader.note(&path, "has no effect without a stage, as in DeepSpeed"));
        return Ok(Offload::None);
    }
    let (section, path, text) = match (states, parameters) {
        (None, None) => return Ok(Offload::None),
        (Some(_), Some(_)) => ("offload_param", None, ""),
        (Some(path), None) => (
            "offload_optimizer",
            Some(path).filter(|_| stage == 3),
            "the optimizer's state alone would lie in the host's memory; the shards of parameters do, too",
        ),
        (None, Some(path)) => (
            "offload_param",
            Some(path),
            "parameters alone would lie in the host's memory; the optimizer's state does, too",
        ),
    };
    notes.extend(path.map(|path| reader.note(&path, text)));
    let pin = reader.truth(&format!("zero_optimization.{section}.pin_memory"))?;
    let old = reader.truth("zero_optimization.cpu_offload_use_pin_memory")?;
    Ok(Offload::Cpu { pin: pin.or(old).unwrap_or(true) })
}

fn precision(
    reader: Reader<'_>,
    notes: &mut Vec<Note>,
) -> Result<(Precision, MixedPrecision), SettingsError> {
    const SUMS: &str = "communication_data_type";
    let reduce = reader.text(SUMS)?.map(|word| match word.to_ascii_lowercase().as_str() {
        "fp16" => Dtype::F16,
        "bf16" => Dtype::BF16,
        _ => Dtype::F32,
    });
    let is_autocast = reader.is_on("torch_autocast.enabled")?;
    let precision = if reader.is_on("fp16.enabled")? {
        Precision::Fp16
    } else if reader.is_on("bf16.enabled")? {
        Precision::Bf16
    } else if is_autocast {
        match reader.text("torch_autocast.dtype")? {
            Some("float16" | "fp16" | "half" | "torch.float16") => Precision::Fp16,
            Some("float32" | "fp32" | "float" | "torch.float32") => Precision::No,
            _ => Precision::Bf16,
        }
    } else {
        Precision::No
    };
    let mut mixed = mixed(precision);
    if is_autocast {
        // DeepSpeed keeps sums and outputs in float32 under autocast.
        mixed = MixedPrecision { param: mixed.param, ..MixedPrecision::default() };
    }
    mixed.reduce = reduce.or(mixed.reduce);
    if precision != Precision::No && reduce.is_none() && !is_autocast {
        notes.push(Note {
            key: SUMS.to_owned(),
            value: String::new(),
            origin: reader.origin.to_owned(),
            text: format!(
                "is not given: gradients are summed in {}, as in DeepSpeed; write \"fp32\" for float32",
                precision.word()
            ),
        });
    }
    Ok((precision, mixed))
}

fn loss_scale(
    reader: Reader<'_>,
    precision: Precision,
) -> Result<Option<LossScale>, SettingsError> {
    if precision != Precision::Fp16 {
        return Ok(None);
    }
    const SCALE: &str = "fp16.loss_scale";
    const POWER: &str = "fp16.initial_scale_power";
    const WINDOW: &str = "fp16.loss_scale_window";
    match reader.number(SCALE)? {
        Some(scale) if scale < 0.0 || !scale.is_finite() => {
            return Err(reader.wrong(SCALE, "a number from 0; 0 for a scale that adapts"));
        }
        Some(scale) if scale > 0.0 => return Ok(Some(LossScale::Static(scale))),
        _ => {}
    }
    let power = reader.count(POWER)?.unwrap_or(16);
    let power = i32::try_from(power).ok().filter(|power| *power <= 127);
    let power = power.ok_or_else(|| reader.wrong(POWER, "a power of 2 up to 127"))?;
    let growth_interval = reader.count(WINDOW)?.unwrap_or(1000);
    if growth_interval == 0 {
        return Err(reader.wrong(WINDOW, "a whole number from 1"));
    }
    Ok(Some(LossScale::Dynamic { initial: f64::from(power).exp2(), growth_interval }))
}

fn clipping(reader: Reader<'_>, notes: &mut Vec<Note>) -> Result<Option<f64>, SettingsError> {
    const NORM: &str = "gradient_clipping";
    match reader.number(NORM)? {
        Some(norm) if norm < 0.0 || !norm.is_finite() => Err(reader.wrong(NORM, "a number from 0")),
        Some(norm) => Ok((norm > 0.0).then_some(norm)),
        None => {
            notes.push(Note {
                key: NORM.to_owned(),
                value: String::new(),
                origin: reader.origin.to_owned(),
                text: "is not given: gradients are clipped at 1, as in DeepSpeed 0.19; older versions do not clip; \
                       write 0 for that"
                    .to_owned(),
            });
            Ok(Some(1.0))
        }
    }
}

/// Consistent batch sizes: train = micro x steps x ranks.
struct Batch {
    train: Option<u64>,
    micro: Option<u64>,
    steps: u64,
}

impl Batch {
    fn read(reader: Reader<'_>, ranks: u64) -> Result<Self, SettingsError> {
        const TRAIN: &str = "train_batch_size";
        const MICRO: &str = "train_micro_batch_size_per_gpu";
        const STEPS: &str = "gradient_accumulation_steps";
        let count = |path| match reader.count(path)? {
            Some(0) => Err(reader.wrong(path, "a whole number from 1")),
            count => Ok(count),
        };
        let (train, micro, steps) = (count(TRAIN)?, count(MICRO)?, count(STEPS)?.unwrap_or(1));
        let fault = |train, micro| SettingsError::Batch {
            origin: reader.origin.to_owned(),
            train,
            micro,
            steps,
            ranks,
        };
        let all = |micro: u64| micro.checked_mul(steps)?.checked_mul(ranks);
        Ok(match (train, micro) {
            (Some(train), Some(micro)) if all(micro) != Some(train) => {
                return Err(fault(train, micro));
            }
            (Some(train), None) if !reader.is_auto(MICRO) => {
                let micro = train.checked_div(ranks).unwrap_or(0) / steps;
                if micro == 0 || all(micro) != Some(train) {
                    return Err(fault(train, micro));
                }
                Self { train: Some(train), micro: Some(micro), steps }
            }
            (None, Some(micro)) => {
                let train = all(micro).ok_or_else(|| fault(u64::MAX, micro))?;
                Self { train: Some(train), micro: Some(micro), steps }
            }
            (None, None) if !reader.is_auto(MICRO) => {
                return Err(SettingsError::Missing {
                    origin: reader.origin.to_owned(),
                    key: "train_micro_batch_size_per_gpu",
                    remedy: "write it or train_batch_size; \"auto\" takes the loader's",
                });
            }
            (train, micro) => Self { train, micro, steps },
        })
    }
}
