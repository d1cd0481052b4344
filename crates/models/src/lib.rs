//! Architectures with PyTorch's names, first values and weights files, built from the layers of
//! [`brigade_nn`].
//!
//! ```
//! use brigade_models::{ResNet, ResNetOptions};
//! use brigade_nn::Model;
//!
//! let small = ResNetOptions::basic([1, 1, 1, 1]);
//! let model = Model::new(|path| ResNet::new(path, 10, small))?;
//! assert_eq!(model.state_dict().names().next(), Some("conv1.weight"));
//! # Ok::<(), brigade_nn::Error>(())
//! ```

mod cnn;
mod resnet;

pub use cnn::Cnn;
pub use resnet::{ResNet, ResNetOptions};
