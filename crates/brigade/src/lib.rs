//! Write the training loop once; run it on one CPU, one GPU, many GPUs or many machines.
//!
//! This crate only gathers the others: [`train`] (the Accelerator), [`nn`] (layers, weights files),
//! [`models`] (architectures; feature `models`, on by default), [`optim`], [`schedule`],
//! [`data`], [`datasets`], `vision` (images; feature `vision`), `text` (feature `text`), `learn` (the Learner; feature
//! `learn`), `notebook` (Jupyter; feature `notebook`), [`torch`] (the border with libtorch),
//! [`sampling`] and [`rank_env`]. Most programs need no more than the [`prelude`].
//!
//! ```
//! use brigade::prelude::*;
//!
//! fn main() -> Result<()> {
//!     # let folder = std::env::temp_dir().join(format!("brigade-loop-{}", std::process::id()));
//!     # std::fs::create_dir_all(&folder).and_then(|()| std::env::set_current_dir(&folder)).unwrap();
//!     let accelerator = Accelerator::new()?;
//!     let model = Model::new(Cnn::new)?;
//!     let optimizer = Adam::default().lr(5e-3).build(&model)?;
//!     let train = DataLoader::new(Digits::train()?.resize(28, 28)?).batch_size(64).shuffle(true);
//!     let test = DataLoader::new(Digits::test()?.resize(28, 28)?).batch_size(64);
//!     let (mut model, mut optimizer, train, test) =
//!         accelerator.prepare((model, optimizer, train, test))?;
//!
//!     for epoch in 0..4 {
//!         model.train();
//!         for batch in accelerator.progress(&train) {
//!             let (images, labels) = batch?.into_data();
//!             let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
//!             optimizer.zero_grad()?;
//!             accelerator.backward(&loss)?;
//!             optimizer.step()?;
//!         }
//!         model.eval();
//!         let mut accuracy = Accuracy::default();
//!         for batch in &test {
//!             let batch = batch?;
//!             let (images, labels) = &*batch;
//!             let predicted = no_grad(|| model.forward(images))?.argmax(-1, false);
//!             let (predicted, labels) =
//!                 accelerator.gather_for_metrics(&batch, &(&predicted, labels))?;
//!             accuracy.update(&predicted, &labels)?;
//!         }
//!         let percent = 100.0 * accuracy.value();
//!         accelerator.println(format!("epoch {}/4, accuracy = {percent:.2}", epoch + 1));
//!     }
//!     accelerator.save_model(&model, "model.safetensors")?;
//!     # std::fs::remove_dir_all(&folder).unwrap();
//!     Ok(())
//! }
//! ```

pub use brigade_checkpoint as checkpoint;
pub use brigade_data as data;
#[doc(hidden)]
pub use brigade_data::__derive;
pub use brigade_datasets as datasets;
#[cfg(feature = "learn")]
pub use brigade_learn as learn;
#[cfg(feature = "models")]
pub use brigade_models as models;
pub use brigade_nn as nn;
#[cfg(feature = "notebook")]
pub use brigade_notebook as notebook;
pub use brigade_optim as optim;
pub use brigade_rank_env as rank_env;
pub use brigade_rank_env::{MainError, MainResult};
pub use brigade_sampling as sampling;
pub use brigade_schedule as schedule;
#[cfg(feature = "text")]
pub use brigade_text as text;
pub use brigade_torch as torch;
pub use brigade_track as track;
pub use brigade_train as train;
#[cfg(feature = "vision")]
pub use brigade_vision as vision;
pub use tch;

/// What a training loop uses. A model's own forward returns `nn::Result`.
pub mod prelude {
    pub use crate::data::{Batch, BatchedDataset, DataLoader, Dataset, StreamLoader, TensorTree};
    pub use crate::datasets::{Digits, FashionMnist, IdxFolder, LabelledImages, Mnist};
    #[cfg(feature = "models")]
    pub use crate::models::{Cnn, ResNet};
    pub use crate::nn::{
        self, BatchNorm2d, Conv2d, Linear, Model, Module, ParamPath, Sequential, StateDict,
    };
    pub use crate::optim::rules::*;
    pub use crate::rank_env::MainResult;
    pub use crate::schedule::{FitOneCycle, LrSchedule, OneCycle, Plateau, Schedule};
    pub use crate::train::{
        Accelerator, AcceleratorBuilder, Accuracy, BackwardOptions, ClipNorm, CommHook, Error,
        FBeta, GradientAccumulation, Group, JoinInputs, LocalSgd, Lookahead, Mean, Metric,
        Optimizer, Precision, PreparedLoader, PreparedModel, PreparedOptimizer, PreparedScheduler,
        Processes, ProfileOptions, ProfileSchedule, ProjectConfiguration, ReduceOp, Result,
        Scheduler, TopK,
    };
    pub use tch::{Device, Kind, Tensor, no_grad};
}
