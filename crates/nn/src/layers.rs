//! Layers with PyTorch's formulas, names and initial values.

mod activation;
mod batch_norm;
mod branch;
mod conv;
mod dropout;
mod embedding;
mod experts;
mod flatten;
mod layer_norm;
mod linear;
mod lstm;
mod pooling;
mod rms_norm;
mod swiglu;

pub use activation::Relu;
pub use batch_norm::{BatchNorm1d, BatchNorm2d, BatchNormOptions};
pub use branch::Branch;
pub use conv::{Conv2d, Conv2dOptions};
pub use dropout::Dropout;
pub use embedding::{Embedding, EmbeddingOptions};
pub use experts::{
    ExpertLoad, Experts, ExpertsOptions, Routing, load_balancing_loss, load_balancing_loss_of,
    load_balancing_sums, router_z_loss,
};
pub use flatten::Flatten;
pub use layer_norm::{LayerNorm, LayerNormOptions};
pub use linear::{Linear, LinearOptions, PreActivation};
pub use lstm::{Lstm, LstmOptions, LstmState};
pub use pooling::MaxPool2d;
pub use rms_norm::RmsNorm;
pub use swiglu::{SwiGlu, SwiGluOptions};
