//! What the programs of this example share: their options, and data where none are on disk.

mod people;
mod photographs;
mod shapes;
mod tabular;

use std::path::{Path, PathBuf};

use anyhow::Context;
use brigade::learn::callback::Step;
use brigade::learn::prelude::*;
use clap::Args;

pub use people::write_people;
pub use photographs::{named_photographs, photographs};
pub use shapes::{SHAPES, write_shapes};
pub use tabular::{Table, TabularModel};

/// Options of all programs.
#[derive(Debug, Args)]
pub struct Common {
    /// Passes over the training data.
    #[arg(long, default_value_t = 2, value_parser = positive())]
    pub epochs: u64,
    /// Samples in a batch of one process.
    #[arg(long, default_value_t = 64, value_parser = positive())]
    pub batch_size: u64,
    /// Threads that read and transform.
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Seed of the weights, of the order of the samples and of all that is random in them.
    #[arg(long, default_value_t = 42)]
    pub seed: u32,
    /// Normalise batches by the statistics of all processes: BatchNorm then sees what one process with the
    /// whole batch would.
    #[arg(long)]
    pub sync_batch_norm: bool,
    /// Save checkpoints here after each epoch, and go on from the one that is there.
    #[arg(long, value_name = "FOLDER")]
    pub checkpoint: Option<PathBuf>,
    /// Save checkpoints after every so many batches as well.
    #[arg(long, value_name = "BATCHES", requires = "checkpoint", value_parser = positive())]
    pub checkpoint_every: Option<u64>,
    /// Log steps and epochs as runs of this project below `runs/`, for `brigade watch` and `brigade report`.
    #[arg(long, value_name = "PROJECT")]
    pub log: Option<String>,
    /// Save pictures of the training and of what the model sees into this folder.
    #[arg(long, value_name = "FOLDER")]
    pub plots: Option<PathBuf>,
    /// Print the loss of every batch with all its digits, after each fit.
    #[arg(long)]
    pub log_losses: bool,
}

fn positive() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..)
}

impl Common {
    /// Makes the Accelerator of these options, with the seed set.
    ///
    /// # Errors
    /// When the launcher's variables contradict each other, or a rank is gone.
    pub fn accelerator(&self) -> anyhow::Result<Accelerator> {
        let accelerator = Accelerator::builder().sync_batch_norm(self.sync_batch_norm).build()?;
        accelerator.set_seed(self.seed.into());
        Ok(accelerator)
    }

    /// Returns the samples in a batch of one process.
    #[must_use]
    pub fn batch_size(&self) -> usize {
        self.batch_size as usize
    }

    /// Returns the passes over the training data.
    #[must_use]
    pub fn epochs(&self) -> usize {
        self.epochs as usize
    }

    /// Adds the callbacks that these options ask for, and the seed.
    #[must_use]
    pub fn with_callbacks(&self, learner: Learner) -> Learner {
        let mut learner = learner.seed(self.seed.into());
        if let Some(folder) = &self.checkpoint {
            let checkpoint = Checkpoint::new(folder);
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
        learner
    }

    /// Saves the curves of the last fit, and gives the folder of pictures, on the process that writes them; nothing
    /// elsewhere, and where no pictures were asked for.
    ///
    /// # Errors
    /// When a picture cannot be written.
    pub fn plot_training(&self, learner: &Learner) -> anyhow::Result<Option<&Path>> {
        let Some(folder) = &self.plots else { return Ok(None) };
        if !learner.accelerator().is_main_process() {
            return Ok(None);
        }
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make the folder {}", folder.display()))?;
        let recorder = learner.recorder();
        recorder.plot_loss(0).save(folder.join("loss.png"))?;
        recorder.plot_schedule().save(folder.join("schedule.png"))?;
        recorder.plot_metrics().save(folder.join("metrics.png"))?;
        Ok(Some(folder))
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
pub(crate) fn whole(
    path: &Path,
    write: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
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
