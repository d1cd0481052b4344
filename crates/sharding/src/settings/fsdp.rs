//! FSDP settings: Accelerate's keys of versions 1 and 2.

use brigade_checkpoint::Dtype;

use super::given::{Given, Values, closest};
use super::parallelism::copies;
use super::{Facts, Note, ParallelismConfig, Precision, Settings, SettingsError};
use crate::{Axis, Mesh, MixedPrecision, Offload, Reshard, Sharding, Units};

/// FSDP configuration of Accelerate: the keys of `fsdp_config`, the variables `FSDP_*` and the flags `--fsdp-*`, with
/// the meaning that `FullyShardedDataParallelPlugin` gives them.
#[derive(Debug, Clone, PartialEq)]
pub struct FsdpConfig {
    version: Version,
    /// Ranks that share one copy of the model, without `parallelism_config`.
    shape: Shape,
    reshard: bool,
    units: Units,
    offload: bool,
    recompute: bool,
    notes: Vec<Note>,
    /// Source of the version, or else of the first key.
    origin: String,
    /// Source of `mixed_precision`. Defaults to `origin`.
    precision_origin: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// Ranks that share one copy of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    AllRanks,
    RanksOfAHost,
    Copies,
}

impl FsdpConfig {
    /// Reads the arguments that begin with `fsdp_`, and skips all others.
    ///
    /// # Errors
    /// [`SettingsError`] for an unknown key, an invalid value, and a feature that the version of FSDP does not have.
    pub fn read(given: &[Given]) -> Result<Self, SettingsError> {
        let values = Values::new(given);
        for given in values.with_prefix("fsdp_") {
            if !KEYS.contains(&given.name.as_str()) {
                return Err(SettingsError::UnknownKey {
                    origin: given.origin.clone(),
                    key: given.name.clone(),
                    hint: closest(&given.name, KEYS.into_iter()),
                });
            }
        }
        let version = match values.find("fsdp_version") {
            None => Version::One,
            Some(given) => match given.value.trim() {
                "1" => Version::One,
                "2" => Version::Two,
                _ => return Err(given.wrong("1 or 2")),
            },
        };
        let first = values
            .find("fsdp_version")
            .or_else(|| values.with_prefix("fsdp_").next())
            .or_else(|| values.find("use_fsdp"));
        let origin = first.map_or_else(|| "FSDP".to_owned(), |it| it.origin.clone());
        let precision = values.find("mixed_precision");
        let precision_origin = precision.map_or_else(|| origin.clone(), |it| it.origin.clone());
        let mut notes = Vec::new();
        let (shape, reshard) = match version {
            Version::One => strategy(values, &mut notes)?,
            Version::Two => (Shape::AllRanks, reshard(values, &mut notes)?),
        };
        let config = Self {
            version,
            shape,
            reshard,
            units: units(values, &origin, &mut notes)?,
            offload: values.switch("fsdp_offload_params")?,
            recompute: recompute(values, version, &mut notes)?,
            notes: Vec::new(),
            origin,
            precision_origin,
        };
        prefetch(values, version, &mut notes)?;
        state_dict(values, version, &mut notes)?;
        loading(values, version, &mut notes)?;
        Ok(Self { notes, ..config })
    }

    /// Returns the settings of a job, and notes on keys that are not applied as they are written. `axes` is the job's
    /// `parallelism_config`.
    ///
    /// # Errors
    /// [`SettingsError::Mesh`] for sizes of axes that do not fit the world size, or ranks per host that do not divide
    /// it, and [`SettingsError::Contradiction`] for `axes` with version 1 of FSDP, or without ranks to shard among.
    pub fn resolve(
        &self,
        axes: Option<&ParallelismConfig>,
        facts: &Facts,
    ) -> Result<(Settings, Vec<Note>), SettingsError> {
        let mut notes = self.notes.clone();
        let mesh = self.mesh(axes, facts)?;
        let sharding = (self.shape != Shape::Copies).then(|| {
            let base = match mesh.size(Axis::Replicate) {
                1 => Sharding::zero3(),
                _ => Sharding::hybrid(mesh.size(Axis::Shard)),
            };
            let reshard = if self.reshard { Reshard::Yes } else { Reshard::No };
            let offload = if self.offload { Offload::Cpu { pin: true } } else { Offload::None };
            let base = base.reshard_after_forward(reshard).units(self.units.clone());
            base.offload(offload).mixed(mixed(facts.mixed_precision.unwrap_or_default()))
        });
        let precision = facts.mixed_precision.unwrap_or_default();
        if precision == Precision::Fp8 {
            let text = "products would be computed in 8 bits; they are computed in bf16";
            notes.push(self.note(precision, text));
        }
        if sharding.is_some() && precision != Precision::No {
            let text = "gradients are summed in this precision, as in Accelerate; `MixedPrecision`'s own default is \
                        float32";
            notes.push(self.note(precision, text));
        }
        let context_method = axes.map(ParallelismConfig::context_method).unwrap_or_default();
        let settings = Settings {
            sharding,
            recompute: self.recompute,
            context_method,
            ..Settings::of_copies(mesh, facts)
        };
        Ok((settings, notes))
    }

    fn mesh(&self, axes: Option<&ParallelismConfig>, facts: &Facts) -> Result<Mesh, SettingsError> {
        let world_size = facts.world_size;
        if let Some(axes) = axes {
            if self.version == Version::One {
                return Err(SettingsError::Contradiction {
                    first: format!("parallelism_config ({})", axes.origin()),
                    second: format!("FSDP version 1 ({})", self.origin),
                    remedy: "set fsdp_version to 2, as in Accelerate",
                });
            }
            let mesh = axes.mesh(world_size)?;
            if mesh.size(Axis::ShardContext) == 1 && world_size > 1 {
                return Err(SettingsError::Contradiction {
                    first: format!("parallelism_config_dp_shard_size 1 ({})", axes.origin()),
                    second: format!("FSDP ({})", self.origin),
                    remedy: "FSDP has no ranks to shard among; set it above 1, or turn FSDP off",
                });
            }
            return Ok(mesh);
        }
        let mesh = match self.shape {
            Shape::AllRanks => Sharding::zero3().mesh(world_size),
            Shape::RanksOfAHost => Sharding::hybrid(facts.local_world_size).mesh(world_size),
            Shape::Copies => return copies(world_size, &self.origin),
        };
        mesh.map_err(|source| SettingsError::Mesh { origin: self.origin.clone(), source })
    }

    fn note(&self, precision: Precision, text: &str) -> Note {
        Note {
            key: "mixed_precision".to_owned(),
            value: precision.word().to_owned(),
            origin: self.precision_origin.clone(),
            text: text.to_owned(),
        }
    }
}

/// Returns the types that Accelerate sets for a value of `mixed_precision`: the same for parameters, sums and outputs.
pub(super) fn mixed(precision: Precision) -> MixedPrecision {
    let dtype = match precision {
        Precision::No => return MixedPrecision::default(),
        Precision::Fp16 => Dtype::F16,
        Precision::Bf16 | Precision::Fp8 => Dtype::BF16,
    };
    MixedPrecision { param: Some(dtype), reduce: Some(dtype), output: Some(dtype) }
}

/// Reads `sharding_strategy` of version 1, by name or number, and notes that `reshard_after_forward` has no effect.
fn strategy(values: Values<'_>, notes: &mut Vec<Note>) -> Result<(Shape, bool), SettingsError> {
    if let Some(given) = values.find("fsdp_reshard_after_forward")
        && !(values.find("fsdp_sharding_strategy").is_some() && given.is_true())
    {
        notes.push(given.note(
            "has no effect in version 1, as in Accelerate: fsdp_sharding_strategy sets it, and `SHARD_GRAD_OP` keeps \
             parameters until backward",
        ));
    }
    let Some(given) = values.find("fsdp_sharding_strategy") else {
        return Ok((Shape::AllRanks, true));
    };
    Ok(match given.value.trim().to_ascii_uppercase().as_str() {
        "FULL_SHARD" | "1" => (Shape::AllRanks, true),
        "SHARD_GRAD_OP" | "2" => (Shape::AllRanks, false),
        "NO_SHARD" | "3" => (Shape::Copies, false),
        "HYBRID_SHARD" | "4" => (Shape::RanksOfAHost, true),
        "HYBRID_SHARD_ZERO2" | "_HYBRID_SHARD_ZERO2" | "5" => (Shape::RanksOfAHost, false),
        _ => {
            return Err(given
                .wrong("FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2"));
        }
    })
}

/// Reads `reshard_after_forward` of version 2, which is a Boolean.
fn reshard(values: Values<'_>, notes: &mut Vec<Note>) -> Result<bool, SettingsError> {
    // Accelerate's launcher sets this value by default.
    if let Some(given) = values.find("fsdp_sharding_strategy").filter(|it| it.value != "FULL_SHARD")
    {
        notes.push(given.note(
            "has no effect in version 2, as in Accelerate: fsdp_reshard_after_forward and parallelism_config set it",
        ));
    }
    let Some(given) = values.find("fsdp_reshard_after_forward") else { return Ok(true) };
    given.truth().map_err(|_| {
        given.wrong(
            "true or false in version 2; true stands for FULL_SHARD, false for SHARD_GRAD_OP",
        )
    })
}

fn units(values: Values<'_>, origin: &str, notes: &mut Vec<Note>) -> Result<Units, SettingsError> {
    let Some(given) = values.find("fsdp_auto_wrap_policy") else {
        notes.push(Note {
            key: "fsdp_auto_wrap_policy".to_owned(),
            value: String::new(),
            origin: origin.to_owned(),
            text: "is not given: Accelerate would make one unit of the whole model; here each block of the model is \
                   a unit, with the same results and less memory"
                .to_owned(),
        });
        return Ok(Units::Blocks);
    };
    let whole = "the whole model is one unit: all its parameters are gathered at once; TRANSFORMER_BASED_WRAP makes a \
                 unit of each block";
    let units = match given.value.trim().to_ascii_uppercase().as_str() {
        "TRANSFORMER_BASED_WRAP" => Units::Blocks,
        "SIZE_BASED_WRAP" => {
            match values.find("fsdp_min_num_params").map(Given::count).transpose()? {
                Some(parameters) if parameters > 0 => Units::AtLeast(parameters),
                _ => {
                    notes.push(given.note(format!("without fsdp_min_num_params {whole}")));
                    Units::AtLeast(u64::MAX)
                }
            }
        }
        "NO_WRAP" => {
            notes.push(given.note(whole));
            Units::AtLeast(u64::MAX)
        }
        _ => return Err(given.wrong("TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP")),
    };
    if let Some(given) = values.find("fsdp_transformer_layer_cls_to_wrap") {
        notes.push(given.note(match units {
            Units::Blocks => {
                "names classes of a Python model; the units are the blocks that the Rust model names"
            }
            _ => "has no effect without TRANSFORMER_BASED_WRAP",
        }));
    }
    if let Some(given) = values.find("fsdp_ignored_modules") {
        notes.push(given.note(
            "these modules would stay whole on each rank, their gradients not reduced; they are sharded as the others",
        ));
    }
    Ok(units)
}

fn recompute(
    values: Values<'_>,
    version: Version,
    notes: &mut Vec<Note>,
) -> Result<bool, SettingsError> {
    let recompute = values.switch("fsdp_activation_checkpointing")?;
    if let Some(given) = values.find("fsdp_activation_checkpointing_offload")
        && given.truth()?
    {
        if !recompute {
            return Err(given.unsupported("it needs fsdp_activation_checkpointing: true"));
        }
        if version == Version::One {
            return Err(given.unsupported("it needs fsdp_version: 2"));
        }
        notes.push(given.note(
            "inputs of recomputed units would wait in the host's memory; they stay on the device",
        ));
    }
    Ok(recompute)
}

fn prefetch(
    values: Values<'_>,
    version: Version,
    notes: &mut Vec<Note>,
) -> Result<(), SettingsError> {
    if let Some(given) = values.find("fsdp_forward_prefetch")
        && given.truth()?
    {
        if version == Version::Two {
            return Err(given.unsupported(
                "FSDP version 2 has no forward_prefetch; leave it out: the next unit is gathered beside the \
                 computation anyway",
            ));
        }
        notes.push(
            given.note("has no effect: the next unit is gathered beside the computation anyway"),
        );
    }
    let Some(given) = values.find("fsdp_backward_prefetch") else { return Ok(()) };
    let word = given.value.trim().to_ascii_uppercase();
    match word.as_str() {
        "NO_PREFETCH" | "NONE" | "3" | "BACKWARD_PRE" | "1" | "BACKWARD_POST" | "2" => {}
        _ => return Err(given.wrong("BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH")),
    }
    if version == Version::Two {
        notes.push(given.note("has no effect in version 2, as in Accelerate"));
    } else if !matches!(word.as_str(), "BACKWARD_PRE" | "1") {
        notes.push(given.note(
            "has no effect: backward gathers the next unit before the gradients of this one, as BACKWARD_PRE",
        ));
    }
    Ok(())
}

fn state_dict(
    values: Values<'_>,
    version: Version,
    notes: &mut Vec<Note>,
) -> Result<(), SettingsError> {
    let Some(given) = values.find("fsdp_state_dict_type") else { return Ok(()) };
    match given.value.trim().to_ascii_uppercase().as_str() {
        "SHARDED_STATE_DICT" | "3" => {}
        "FULL_STATE_DICT" | "1" => notes.push(given.note(
            "checkpoints would have whole weights; `save_state` writes shards that load on any number of ranks, and \
             `save_model` writes whole weights",
        )),
        "LOCAL_STATE_DICT" | "2" if version == Version::One => notes.push(given.note(
            "checkpoints would load on as many ranks only; `save_state` writes shards that load on any number",
        )),
        "LOCAL_STATE_DICT" | "2" => {
            return Err(given.unsupported(
                "FSDP version 2 has no LOCAL_STATE_DICT; write SHARDED_STATE_DICT",
            ));
        }
        _ => return Err(given.wrong("SHARDED_STATE_DICT, FULL_STATE_DICT or LOCAL_STATE_DICT")),
    }
    Ok(())
}

/// Reads the keys by which Python programs give all ranks the same initial values, and notes that they have no effect.
fn loading(
    values: Values<'_>,
    version: Version,
    notes: &mut Vec<Note>,
) -> Result<(), SettingsError> {
    let off = |name: &str| -> Result<Option<&Given>, SettingsError> {
        let given = values.find(name);
        let given = given.map(|it| it.truth().map(|is_on| (!is_on).then_some(it))).transpose()?;
        Ok(given.flatten())
    };
    let because = match version {
        Version::One => "",
        Version::Two => " (and version 2 has no such key)",
    };
    for (name, text) in [
        ("fsdp_use_orig_params", "an optimizer always sees the parameters under their own names"),
        ("fsdp_sync_module_states", "all ranks always begin with rank 0's values"),
        (
            "fsdp_cpu_ram_efficient_loading",
            "a deferred model is always read by each rank's own rows; without `Model::deferred` each rank holds it \
             whole until `prepare`",
        ),
    ] {
        if let Some(given) = off(name)? {
            notes.push(given.note(format!("has no effect{because}: {text}")));
        }
    }
    Ok(())
}

const KEYS: [&str; 16] = [
    "fsdp_version",
    "fsdp_sharding_strategy",
    "fsdp_reshard_after_forward",
    "fsdp_offload_params",
    "fsdp_min_num_params",
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_backward_prefetch",
    "fsdp_state_dict_type",
    "fsdp_forward_prefetch",
    "fsdp_use_orig_params",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_sync_module_states",
    "fsdp_activation_checkpointing",
    "fsdp_activation_checkpointing_offload",
    "fsdp_ignored_modules",
];
