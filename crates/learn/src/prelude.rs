//! What a program of a Learner uses, for `use brigade::learn::prelude::*`.

pub use brigade_datasets::{Urls, untar_data};
pub use brigade_models::zoo::*;
pub use brigade_models::{Architecture, HeadOptions};
pub use brigade_optim::{AdamW, Sgd};
pub use brigade_plot::Plot;
pub use brigade_schedule::Annealing;
pub use brigade_train::Precision::{Bf16, Fp16};
pub use brigade_train::{Accelerator, Precision};
pub use tch::{Device, Kind, Tensor};

pub use crate::callbacks::*;
pub use crate::data::*;
pub use crate::interpretation::{ClassInterpretation, Interpretation};
pub use crate::loss::{
    BceWithLogits, CrossEntropy, Focal, L1, LabelSmoothingCrossEntropy, Loss, loss_from,
};
pub use crate::metrics::*;
pub use crate::{
    Callback, FineTune, FlatCos, Hyper, Item, Learner, LearnerState, Loaders, LrFind, OneCycle,
    Predictor, Rates, Result, Sgdr, Suggestion, VisionOptions, unet_learner, vision_learner,
};
