//! Write the training loop once; run it on one CPU, one GPU, many GPUs or many machines.
//!
//! This crate re-exports the other crates of Brigade. Most programs need only the [`prelude`].
//!
//! | I want to … | look at … |
//! |---|---|
//! | train on one process or many, with my own loop | [`train::Accelerator`] |
//! | have the loop written for me, with callbacks and schedules | `learn::Learner` (feature `learn`) |
//! | build a model of layers, or take one from `tch` or TorchScript | [`nn`] |
//! | take a published model, with its weights | [`models`] (feature `models`, on by default) |
//! | train a model that does not fit one device | [`sharding`], [`train::AcceleratorBuilder::sharding`] |
//! | choose an optimizer, or write one | [`optim`] |
//! | change the learning rate during a run | [`schedule`] |
//! | read samples on threads, sharded over the ranks | [`data`], and [`sampling`] for the arithmetic |
//! | load a known dataset | [`datasets`] |
//! | read, augment and batch images | `vision` (feature `vision`) |
//! | tokenize, pad and batch texts | `text` (feature `text`) |
//! | save, resume and convert checkpoints | [`train::Accelerator::save_state`], [`checkpoint`] |
//! | count accuracy, F1, BLEU and others over all ranks | [`metrics`] |
//! | log a run to a file, TensorBoard or MLflow | [`track`] |
//! | train on several processes from a notebook | `notebook` (feature `notebook`) |
//! | call a collective, a process group or a store myself | [`torch`] |
//! | read the variables that a launcher sets for a rank | [`rank_env`] |
//!
//! Models, data sets, optimizers, metrics and loops return one [`Result`], whose [`Error`] has an [`ErrorKind`] to
//! match.
//!
//! Programs on several processes or hosts are started by the program `brigade` (`cargo install brigade-cli`).
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
//!         let mut accuracy = MetricState::new(Accuracy);
//!         for batch in &test {
//!             let batch = batch?;
//!             let (images, labels) = &*batch;
//!             let scores = no_grad(|| model.forward(images))?;
//!             accelerator.update_metric(&mut accuracy, &batch, &scores, labels)?;
//!         }
//!         let percent = 100.0 * accelerator.compute_metric(&accuracy)?;
//!         accelerator.println(format!("epoch {}/4, accuracy = {percent:.2}", epoch + 1));
//!     }
//!     accelerator.save_model(&model, "model.safetensors")?;
//!     # std::fs::remove_dir_all(&folder).unwrap();
//!     Ok(())
//! }
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

#[doc(inline)]
pub use brigade_checkpoint as checkpoint;
#[doc(inline)]
pub use brigade_data as data;
#[doc(hidden)]
pub use brigade_data::__derive;
#[doc(inline)]
pub use brigade_datasets as datasets;
#[cfg(feature = "learn")]
#[doc(inline)]
pub use brigade_learn as learn;
#[doc(inline)]
pub use brigade_metrics as metrics;
#[cfg(feature = "models")]
#[doc(inline)]
pub use brigade_models as models;
#[doc(inline)]
pub use brigade_nn as nn;
#[cfg(feature = "notebook")]
#[doc(inline)]
pub use brigade_notebook as notebook;
#[doc(inline)]
pub use brigade_optim as optim;
#[doc(inline)]
pub use brigade_rank_env as rank_env;
pub use brigade_rank_env::{MainError, MainResult};
#[doc(inline)]
pub use brigade_sampling as sampling;
#[doc(inline)]
pub use brigade_schedule as schedule;
#[doc(inline)]
pub use brigade_sharding as sharding;
#[cfg(feature = "text")]
#[doc(inline)]
pub use brigade_text as text;
#[doc(inline)]
pub use brigade_torch as torch;
#[doc(inline)]
pub use brigade_torch::{Error, ErrorKind, Result};
#[doc(inline)]
pub use brigade_track as track;
#[doc(inline)]
pub use brigade_train as train;
#[cfg(feature = "vision")]
#[doc(inline)]
pub use brigade_vision as vision;
pub use tch;

/// Names that a training loop uses.
///
/// Can be imported together with `learn::prelude`: a name has the same meaning in both.
/// [`Precision`](prelude::Precision) is the data type of computations; the metric of that name is
/// [`metrics::Precision`].
pub mod prelude {
    pub use crate::data::{Batch, BatchedDataset, DataLoader, Dataset, StreamLoader};
    pub use crate::datasets::{Digits, FashionMnist, IdxFolder, LabelledImages, Mnist};
    pub use crate::metrics::{self, Accuracy, F1, FBeta, Mean, Metric, MetricState, TopK};
    #[cfg(feature = "models")]
    pub use crate::models::{Cnn, ResNet};
    pub use crate::nn::{
        self, BatchNorm2d, Conv2d, Linear, Model, Module, ParamPath, Sequential, StateDict,
    };
    pub use crate::optim::rules::*;
    pub use crate::optim::{Group, Lookahead, Optimizer, Scheduler};
    pub use crate::rank_env::MainResult;
    pub use crate::schedule::{FitOneCycle, LrSchedule, OneCycle, Plateau, Schedule};
    pub use crate::sharding::Sharding;
    pub use crate::torch::{BackwardOptions, ReduceOp, TensorTree};
    pub use crate::train::{
        Accelerator, AcceleratorBuilder, ClipNorm, CommHook, GradientAccumulationOptions,
        JoinInputs, LocalSgd, Precision, PreparedLoader, PreparedModel, PreparedOptimizer,
        PreparedScheduler, Processes, ProfileOptions, ProfileSchedule, ProjectConfiguration,
    };
    pub use crate::{Error, ErrorKind, Result};
    pub use tch::{Device, Kind, Tensor, no_grad};
}
