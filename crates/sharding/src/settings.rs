//! Existing settings, read into a [`Sharding`] and a [`Mesh`]: Accelerate's `fsdp_config`, DeepSpeed's JSON,
//! `megatron_lm_config`, and the axes of `parallelism_config`.
//!
//! All of it is pure functions: the caller reads files and variables, and passes them as [`Given`]s, each with its
//! source. Each key is applied, or explained in a [`Note`], or refused with an error that names it.
//!
//! ```
//! use brigade_sharding::settings::{Facts, Given, resolve};
//! use brigade_sharding::{Offload, Reshard, Strategy};
//!
//! let given = [("fsdp_version", "2"), ("fsdp_reshard_after_forward", "false"), ("fsdp_offload_params", "true")]
//!     .map(|(name, value)| Given::new(name, value, "accelerate.yaml"));
//! let (settings, notes) = resolve(&given, None, &Facts::new(4))?;
//! let sharding = settings.sharding.unwrap();
//! assert_eq!(sharding.strategy, Strategy::Zero3);
//! assert_eq!(sharding.reshard_after_forward, Reshard::No);
//! assert_eq!(sharding.offload, Offload::Cpu { pin: true });
//! assert_eq!(notes[0].key, "fsdp_auto_wrap_policy");
//! # Ok::<(), brigade_sharding::settings::SettingsError>(())
//! ```

mod deepspeed;
mod error;
mod facts;
mod fsdp;
mod given;
mod megatron;
mod optimizer;
mod parallelism;
mod reader;
mod report;
mod schedule;

use std::fmt;

use brigade_rank_env::text::escaped;

pub use deepspeed::DeepSpeedConfig;
pub use error::SettingsError;
pub use facts::{Facts, ProgramOptimizer, ProgramSchedule};
pub use fsdp::FsdpConfig;
pub use given::Given;
pub use megatron::MegatronConfig;
pub use optimizer::{OptimizerKind, OptimizerSettings};
pub use parallelism::ParallelismConfig;
pub use report::describe;
pub use schedule::{ScheduleSettings, Warmup};

use given::Values;

use crate::{ContextMethod, Mesh, Sharding};

/// Settings of a Rust program that follow from settings of Accelerate, DeepSpeed or Megatron-LM.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Sharding of the model. `None` if each rank has the whole model.
    pub sharding: Option<Sharding>,
    /// Mesh in which the ranks are arranged.
    pub mesh: Mesh,
    /// Method by which attention gets the keys and values of other ranks' tokens, if ranks have parts of each sequence.
    pub context_method: ContextMethod,
    /// `true` if tensor ranks have parts of the sequence between divided layers (Megatron-LM's sequence parallelism).
    pub sequence_regions: bool,
    /// Precision of the computation, from `mixed_precision` or DeepSpeed's keys.
    pub precision: Precision,
    /// Scale of the loss with [`Precision::Fp16`]. `None` if the program decides.
    pub loss_scale: Option<LossScale>,
    /// Number of samples of one rank per forward pass. `None` if the program's loaders decide.
    pub micro_batch_size: Option<u64>,
    /// Number of batches per optimizer step.
    pub gradient_accumulation_steps: u64,
    /// Number of micro-batches into which a pipeline cuts each batch. `None` without a pipeline, and if the program
    /// decides.
    pub pipeline_micro_batches: Option<usize>,
    /// Number of samples of all ranks per optimizer step. `None` if the program's loaders decide.
    pub train_batch_size: Option<u64>,
    /// Maximum norm of the gradients. `None` if they are not clipped, or if the program clips them.
    pub gradient_clipping: Option<f64>,
    /// `true` if the activations of each unit are computed again in the backward pass (gradient checkpointing).
    pub recompute: bool,
    /// Settings of the optimizer. `None` if the program creates it.
    pub optimizer: Option<OptimizerSettings>,
    /// Learning rate schedule. `None` if the program creates it.
    pub schedule: Option<ScheduleSettings>,
}

/// Note on a key that is not applied as it is written: its meaning, and what happens instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Path of the key, such as `zero_optimization.overlap_comm`.
    pub key: String,
    /// Value of the key. Empty if the key is missing.
    pub value: String,
    /// Source of the value: a file, an environment variable or a flag.
    pub origin: String,
    /// Explanation of the value's meaning, and of what happens instead.
    pub text: String,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, value, origin, text } = self;
        write!(f, "{}: {}", escaped(origin), escaped(key))?;
        if !value.is_empty() {
            write!(f, " = {}", escaped(value))?;
        }
        write!(f, ": {}", escaped(text))
    }
}

/// Precision of the computation: the values of Accelerate's `mixed_precision`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Precision {
    /// The type of the parameters, without mixed precision.
    #[default]
    No,
    /// float16, with loss scaling.
    Fp16,
    /// bfloat16, without loss scaling.
    Bf16,
    /// 8-bit matrix products within bfloat16. Brigade has no kernels for them and computes in bfloat16, as with
    /// [`Precision::Bf16`].
    Fp8,
}

impl Precision {
    /// Parses a value of `mixed_precision`: `no`, `fp16`, `bf16` or `fp8`. Returns `None` for other texts.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::No, Self::Fp16, Self::Bf16, Self::Fp8].into_iter().find(|it| it.word() == word)
    }

    /// Returns the value of `mixed_precision` for this precision: `bf16`.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }
}

/// Loss scale: the factor by which the loss is multiplied, so that float16 gradients do not vanish.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossScale {
    /// A scale that stays the same.
    Static(f64),
    /// A scale that is halved after an overflow, and doubled after `growth_interval` steps without one.
    Dynamic {
        /// Initial value of the scale.
        initial: f64,
        /// Number of steps without an overflow after which the scale is doubled.
        growth_interval: u64,
    },
}

impl Settings {
    /// Returns the defaults for a job in which each rank has a copy of the model, arranged as `mesh`.
    fn of_copies(mesh: Mesh, facts: &Facts) -> Self {
        Self {
            sharding: None,
            mesh,
            context_method: ContextMethod::default(),
            sequence_regions: false,
            precision: facts.mixed_precision.unwrap_or_default(),
            loss_scale: None,
            micro_batch_size: None,
            gradient_accumulation_steps: facts.gradient_accumulation_steps,
            pipeline_micro_batches: None,
            train_batch_size: None,
            gradient_clipping: None,
            recompute: false,
            optimizer: None,
            schedule: None,
        }
    }
}

/// Resolves the arguments of `accelerate launch`, from flags, variables or a file, to settings of a Rust program, and
/// notes on keys that are not applied as they are written. `file` is the content of `deepspeed_config_file`, if given.
///
/// DeepSpeed is used if `use_deepspeed` is on or a `file` is given; FSDP if `use_fsdp` is on, or, without `use_fsdp`,
/// if an argument begins with `fsdp_`; Megatron-LM if `use_megatron_lm` is on. Otherwise each rank has the whole model.
///
/// # Errors
/// [`SettingsError`] for unknown keys, invalid values, settings that contradict each other, and features that Brigade
/// does not have.
pub fn resolve(
    given: &[Given],
    file: Option<&DeepSpeedConfig>,
    facts: &Facts,
) -> Result<(Settings, Vec<Note>), SettingsError> {
    let values = Values::new(given);
    let mut facts = facts.clone();
    if facts.mixed_precision.is_none() {
        facts.mixed_precision = values.precision()?;
    }
    let axes = ParallelismConfig::read(given)?;
    if file.is_some() || values.switch("use_deepspeed")? {
        if let Some(fsdp) = values.find("use_fsdp").filter(|it| it.is_true()) {
            return Err(SettingsError::Contradiction {
                first: format!("{} ({})", fsdp.name, fsdp.origin),
                second: "DeepSpeed".to_owned(),
                remedy: "turn one of them off",
            });
        }
        let config = match file {
            Some(file) => file.clone().with_arguments(given)?,
            None => DeepSpeedConfig::from_arguments(given)?,
        };
        let (mut settings, notes) = config.resolve(&facts)?;
        if let Some(axes) = axes {
            settings.mesh = axes.mesh_for_deepspeed(&settings)?;
            settings.context_method = axes.context_method();
        }
        return Ok((settings, notes));
    }
    let is_fsdp = match values.find("use_fsdp") {
        Some(switch) => switch.truth()?,
        None => values.with_prefix("fsdp_").next().is_some(),
    };
    if is_fsdp {
        return FsdpConfig::read(given)?.resolve(axes.as_ref(), &facts);
    }
    if values.switch("use_megatron_lm")? {
        if let Some(axes) = axes {
            return Err(SettingsError::Contradiction {
                first: format!("parallelism_config ({})", axes.origin()),
                second: "Megatron-LM, which has sizes of its own".to_owned(),
                remedy: "leave out one of them",
            });
        }
        return MegatronConfig::read(given)?.resolve(&facts);
    }
    let mesh = match &axes {
        Some(axes) => axes.mesh_of_copies(facts.world_size)?,
        None => parallelism::copies(facts.world_size, "the number of ranks")?,
    };
    let context_method = axes.map(|axes| axes.context_method()).unwrap_or_default();
    Ok((Settings { context_method, ..Settings::of_copies(mesh, &facts) }, Vec::new()))
}
