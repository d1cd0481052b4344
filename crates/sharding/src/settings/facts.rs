//! Facts of a job and a program, with which settings are resolved.

use super::Precision;

/// Facts of a job and its program, with which settings are resolved: `auto` takes its values from here. A fact that is
/// not known yet is `None` (a launcher has no model), and the settings that depend on it stay undecided.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// World size: the number of ranks of the job.
    pub world_size: usize,
    /// Number of ranks per host, among which `HYBRID_SHARD` shards. Defaults to all ranks.
    pub local_world_size: usize,
    /// Precision chosen by the launch or the program. Defaults to that of the settings.
    pub mixed_precision: Option<Precision>,
    /// Batch sizes of the loaders that are given to `prepare`, with `None` for a loader without a batch size.
    pub batch_sizes: Option<Vec<Option<u64>>>,
    /// `true` if a loader's batch is divided among all ranks, `false` if each rank has a batch of that size. Defaults
    /// to `false`.
    pub split_batches: bool,
    /// `true` to take the largest batch size of several loaders, `false` to take the smallest. Defaults to `false`.
    pub takes_largest_batch: bool,
    /// Number of batches per optimizer step that the program sets. Defaults to 1.
    pub gradient_accumulation_steps: u64,
    /// Hidden sizes of the model. Empty for a model without any.
    pub hidden_sizes: Option<Vec<u64>>,
    /// Number of the model's parameters, by elements.
    pub parameters: Option<u64>,
    /// Source of the optimizer, with its values.
    pub optimizer: ProgramOptimizer,
    /// Source of the learning rate schedule, with its values.
    pub schedule: ProgramSchedule,
}

/// Source of the optimizer: the program or the settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ProgramOptimizer {
    /// The source is not known yet.
    Unknown,
    /// The program creates the optimizer.
    Own {
        /// Learning rate of the program's optimizer.
        lr: f64,
    },
    /// The optimizer is created from the settings (Accelerate's `DummyOptim`). The values given here replace `auto`.
    FromSettings {
        /// Learning rate that replaces `auto`.
        lr: f64,
        /// Weight decay that replaces `auto`.
        weight_decay: f64,
    },
}

/// Source of the learning rate schedule: the program or the settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramSchedule {
    /// The source is not known yet, or there is no schedule.
    Unknown,
    /// The program creates the schedule.
    Own,
    /// The schedule is created from the settings (Accelerate's `DummyScheduler`). The values given here replace `auto`.
    FromSettings {
        /// Number of warm-up steps that replaces `auto`.
        warmup_steps: u64,
        /// Total number of steps that replaces `auto`: that of all ranks together, unless batches are split.
        total_steps: Option<u64>,
    },
}

impl Facts {
    /// Creates the facts that a launcher has: the world size, with all ranks on one host. The others are unknown or
    /// have their defaults.
    #[must_use]
    pub fn new(world_size: usize) -> Self {
        Self {
            world_size,
            local_world_size: world_size,
            mixed_precision: None,
            batch_sizes: None,
            split_batches: false,
            takes_largest_batch: false,
            gradient_accumulation_steps: 1,
            hidden_sizes: None,
            parameters: None,
            optimizer: ProgramOptimizer::Unknown,
            schedule: ProgramSchedule::Unknown,
        }
    }
}
