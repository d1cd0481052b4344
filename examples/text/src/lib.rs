//! What the programs of this example share: their options, and texts where none are on disk.

mod awd_lstm;
mod pairs;
mod reviews;
mod training;

use std::path::{Path, PathBuf};

use anyhow::Context;
use brigade::learn::callback::Step;
use brigade::learn::prelude::*;
use brigade::train::AcceleratorBuilder;
use clap::Args;

pub use awd_lstm::AwdLstmArgs;
pub use pairs::{Pairs, write_pairs};
pub use reviews::reviews;
pub use training::{Losses, ShardingChoice, Training, add_loss, counted_once, labels_of};

/// Options of all programs.
#[derive(Debug, Args)]
pub struct Common {
    /// Threads that make batches.
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Seed of the weights, of dropout, and of the order of the texts.
    #[arg(long, default_value_t = 42)]
    pub seed: u32,
    /// The precision of the forward pass: no, bf16 or fp16. Unless given, bf16 on a GPU and no on a CPU, of which
    /// few compute in it.
    #[arg(long)]
    pub precision: Option<Precision>,
    /// Save checkpoints here after each epoch, and go on from the one that is there.
    #[arg(long, value_name = "FOLDER")]
    pub checkpoint: Option<PathBuf>,
    /// Save checkpoints after every so many batches as well; after every so many steps where a step has several.
    #[arg(long, value_name = "BATCHES", requires = "checkpoint", value_parser = positive())]
    pub checkpoint_every: Option<u64>,
    /// Log steps and epochs as runs of this project below `runs/`, for `brigade watch` and `brigade report`.
    #[arg(long, value_name = "PROJECT")]
    pub log: Option<String>,
    /// Print the loss of every batch with all its digits, after each fit.
    #[arg(long)]
    pub log_losses: bool,
}

/// Parses a number that is 1 at least.
#[must_use]
pub fn positive() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..)
}

impl Common {
    /// Makes the Accelerator of these options, with the seed set: every process draws its own dropout.
    ///
    /// # Errors
    /// When the launcher's variables contradict each other, or a rank is gone.
    pub fn accelerator(&self, builder: AcceleratorBuilder) -> anyhow::Result<Accelerator> {
        let accelerator = builder.build()?;
        accelerator.set_seed(self.seed.into());
        Ok(accelerator)
    }

    /// Returns the precision to train in.
    #[must_use]
    pub fn precision(&self, accelerator: &Accelerator) -> Precision {
        match (self.precision, accelerator.device()) {
            (Some(precision), _) => precision,
            (None, Device::Cpu) => Precision::No,
            (None, _) => Bf16,
        }
    }

    /// Adds what these options ask for: the precision, the seed and callbacks. `part` names the training among several
    /// of one program, each of which has its own checkpoint.
    ///
    /// # Errors
    /// When the device cannot compute in the precision.
    pub fn with_callbacks(&self, learner: Learner, part: &str) -> anyhow::Result<Learner> {
        let precision = self.precision(learner.accelerator());
        let mut learner = learner.mixed_precision(precision)?.seed(self.seed.into());
        if let Some(folder) = &self.checkpoint {
            let checkpoint = Checkpoint::new(folder.join(part));
            learner.add(match self.checkpoint_every {
                Some(batches) => checkpoint.every(batches as usize),
                None => checkpoint,
            });
        }
        if let Some(project) = &self.log {
            learner.add(TrackerLog::new(project));
        }
        if self.log_losses {
            learner.add(PrintLosses);
        }
        Ok(learner)
    }
}

/// Prints the losses of a fit, with all their digits.
#[derive(Debug)]
struct PrintLosses;

impl Callback for PrintLosses {
    fn order(&self) -> i32 {
        70 // after the recorder
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn after_fit(&mut self, learner: &mut LearnerState) -> Step {
        learner.accelerator().println(format!("losses {:?}", learner.recorder().losses()));
        Ok(())
    }
}

/// Writes a folder or a file whole or not at all; one that is there stays.
///
/// # Errors
/// When `write` fails, or the folder above cannot be made.
pub fn whole(path: &Path, write: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
    if path.exists() {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)
            .with_context(|| format!("cannot make the folder {}", parent.display()))?;
    }
    let unfinished = path.with_extension("unfinished");
    write(&unfinished)?;
    std::fs::rename(&unfinished, path)
        .with_context(|| format!("cannot rename {}", unfinished.display()))
}
