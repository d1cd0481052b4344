//! Layers with PyTorch's formulas, names and first values.

mod batch_norm;
mod conv;
mod dropout;
mod embedding;
mod layer_norm;
mod linear;
mod plain;

pub(crate) use batch_norm::SharedStatistics;
pub use batch_norm::{BatchNorm1d, BatchNorm2d, BatchNormOptions};
pub use conv::{Conv2d, Conv2dOptions};
pub use dropout::Dropout;
pub use embedding::{Embedding, EmbeddingOptions};
pub use layer_norm::{LayerNorm, LayerNormOptions};
pub use linear::{Linear, LinearOptions};
pub use plain::{Flatten, MaxPool2d, Relu};
