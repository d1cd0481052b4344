//! Settings that people already have, read into a [`Sharding`] and a [`Mesh`]: Accelerate's `fsdp_config`, DeepSpeed's JSON,
//! `megatron_lm_config`, and the axes of `parallelism_config`.
//!
//! Pure functions: the caller reads files and variables, and passes them on as [`Given`]s with the place of each. Each
//! key is honoured, or named in one [`Note`] with what it would have meant, or refused by name.
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

/// What settings of Accelerate's or DeepSpeed's mean for a Rust program.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// How the model is sharded; `None` where each rank has a whole model.
    pub sharding: Option<Sharding>,
    /// How the ranks are arranged.
    pub mesh: Mesh,
    /// How attention gets the keys of tokens that other ranks have, where ranks have parts of each sequence.
    pub context_method: ContextMethod,
    /// Whether tensor ranks have parts of the sequence between divided layers.
    pub sequence_regions: bool,
    /// Precision of the computation.
    pub precision: Precision,
    /// Scale of the loss with [`Precision::Fp16`]; `None` for the program's own.
    pub loss_scale: Option<LossScale>,
    /// Samples of one rank in one forward; `None` where the program's loaders decide.
    pub micro_batch_size: Option<u64>,
    /// Batches in one step of the optimizer.
    pub gradient_accumulation_steps: u64,
    /// Samples of all ranks in one step of the optimizer; `None` where the program's loaders decide.
    pub train_batch_size: Option<u64>,
    /// Largest norm of the gradients; `None` where they are not clipped, or the program does.
    pub gradient_clipping: Option<f64>,
    /// Whether activations of each unit are computed again in backward.
    pub recompute: bool,
    /// The optimizer; `None` where the program makes it.
    pub optimizer: Option<OptimizerSettings>,
    /// The learning rate's schedule; `None` where the program makes it.
    pub schedule: Option<ScheduleSettings>,
}

/// A key that is not honoured as it stands, with what it would have meant and what happens instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// The key: `zero_optimization.overlap_comm`.
    pub key: String,
    /// Its value; empty where the key is missing.
    pub value: String,
    /// Where it was set: a file, a variable, a flag.
    pub origin: String,
    /// What it would have meant.
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

/// Precision of the computation: the words of `mixed_precision`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Precision {
    /// That of the parameters.
    #[default]
    No,
    /// float16, with a scaled loss.
    Fp16,
    /// bfloat16.
    Bf16,
    /// Products in 8 bits within bfloat16. Brigade has no kernels for it: computed as [`Precision::Bf16`].
    Fp8,
}

impl Precision {
    /// Returns the precision of a word: `no`, `fp16`, `bf16` or `fp8`.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::No, Self::Fp16, Self::Bf16, Self::Fp8].into_iter().find(|it| it.word() == word)
    }

    /// Returns its word in settings.
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

/// By what a loss is multiplied, so that gradients of float16 do not vanish.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossScale {
    /// Always the same.
    Static(f64),
    /// Halved after an overflow, doubled after so many steps without one.
    Dynamic {
        /// The first scale.
        initial: f64,
        /// Steps without overflow until it is doubled.
        growth_interval: u64,
    },
}

impl Settings {
    /// What holds where nothing is said: copies of the whole model, arranged as `mesh`.
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
            train_batch_size: None,
            gradient_clipping: None,
            recompute: false,
            optimizer: None,
            schedule: None,
        }
    }
}

/// Resolves the arguments of `accelerate launch` (from flags, variables or a file) for a Rust program. `file` is the
/// content of `deepspeed_config_file`, where one is given.
///
/// DeepSpeed is on where `use_deepspeed` is, or with a `file`; FSDP where `use_fsdp` is, or, where that is not given,
/// with any argument that begins with `fsdp_`; Megatron-LM where `use_megatron_lm` is. With none each rank has the whole model.
///
/// # Errors
/// Unknown or wrong values, contradictions, and keys that ask for what Brigade does not do.
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
