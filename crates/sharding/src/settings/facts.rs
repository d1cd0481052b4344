//! What settings are resolved with.

use super::Precision;

/// What the job and the program decide: `auto` takes its values from here. What is not known yet (a launcher has no
/// model) is `None`, and the settings that depend on it stay open.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Ranks of the job.
    pub world_size: usize,
    /// Ranks of one host: `HYBRID_SHARD` shards among these. Defaults to all ranks.
    pub local_world_size: usize,
    /// The launch's or the program's precision. Defaults to that of the settings.
    pub mixed_precision: Option<Precision>,
    /// Batch sizes of the loaders given to `prepare`, `None` for a loader without one.
    pub batch_sizes: Option<Vec<Option<u64>>>,
    /// Whether a loader's batch is that of all ranks together. Defaults to `false`.
    pub split_batches: bool,
    /// Whether the largest batch size of several loaders counts, not the smallest. Defaults to `false`.
    pub takes_largest_batch: bool,
    /// Batches in one step, as the program says. Defaults to 1.
    pub gradient_accumulation_steps: u64,
    /// The model's hidden sizes; empty for a model without any.
    pub hidden_sizes: Option<Vec<u64>>,
    /// The model's parameters.
    pub parameters: Option<u64>,
    /// The program's optimizer.
    pub optimizer: ProgramOptimizer,
    /// The program's schedule.
    pub schedule: ProgramSchedule,
}

/// Where the optimizer comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ProgramOptimizer {
    /// Not known yet.
    Unknown,
    /// The program makes it.
    Own {
        /// Its learning rate.
        lr: f64,
    },
    /// The settings make it (Accelerate's `DummyOptim`), with these values where they say `auto`.
    FromSettings {
        /// Learning rate.
        lr: f64,
        /// Weight decay.
        weight_decay: f64,
    },
}

/// Where the learning rate's schedule comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramSchedule {
    /// Not known yet, or there is none.
    Unknown,
    /// The program makes it.
    Own,
    /// The settings make it (Accelerate's `DummyScheduler`), with these values where they say `auto`.
    FromSettings {
        /// Steps of the warm-up.
        warmup_steps: u64,
        /// Steps of all ranks together, unless batches are split.
        total_steps: Option<u64>,
    },
}

impl Facts {
    /// Returns what a launcher knows: the number of ranks, all on one host.
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
