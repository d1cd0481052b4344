//! Parameters, layers and models under PyTorch's names, and their weights files.
//!
//! A constructor takes a [`ParamPath`] and registers its parameters and buffers under the names that PyTorch would give
//! them; [`Model::new`] runs the constructor and owns the parameters. Results, initial values (for a seed) and names
//! are those of PyTorch, so that weights can be exchanged in both directions: [`weights`] reads and writes safetensors,
//! and reads the state dictionaries of `torch.save` without executing anything.
//!
//! ```
//! use brigade_nn::{Linear, Model, Module, ParamPath};
//! use tch::Tensor;
//! use brigade_torch::Result;
//!
//! struct Mlp {
//!     hidden: Linear,
//!     head: Linear,
//! }
//!
//! impl Mlp {
//!     fn new(path: &ParamPath) -> Self {
//!         Self {
//!             hidden: Linear::new(path / "hidden", 784, 64),
//!             head: Linear::new(path / "head", 64, 10),
//!         }
//!     }
//! }
//!
//! impl Module<&Tensor> for Mlp {
//!     type Output = Tensor;
//!
//!     fn forward(&self, input: &Tensor) -> Result<Tensor> {
//!         self.head.forward(&self.hidden.forward(input)?.relu())
//!     }
//! }
//!
//! let mut model = Model::new(Mlp::new)?;
//! # let folder = tempfile::tempdir()?;
//! # std::env::set_current_dir(&folder)?;
//! model.save_weights("mlp.safetensors")?; // PyTorch reads it
//! model.load_weights("mlp.safetensors")?; // or a .pth file that PyTorch wrote
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Published architectures are in `brigade-models`.

mod context_parallel;
mod deferred;
mod error;
mod expert_parallel;
mod hooks;
mod init;
mod into_model;
mod layer_context;
mod layer_groups;
mod layer_weights;
mod layers;
mod model;
mod module;
mod named;
mod param_path;
mod param_registry;
mod pipeline;
mod placed;
mod quantized;
mod recompute;
mod script;
mod sequential;
mod shared_statistics;
mod state_dict;
mod tensor_parallel;
mod training;
mod unit;
mod var_store;
pub mod weights;

pub use context_parallel::{ContextParallel, ContextPart, ContextRegion};
pub use deferred::{DeferredValue, DeferredValues};
pub use error::ModelError;
pub use expert_parallel::ExpertParallel;
pub use hooks::ForwardHook;
pub use init::Init;
pub use into_model::IntoModel;
pub use layer_groups::LayerGroups;
pub use layer_weights::LayerWeights;
pub use layers::{
    BatchNorm1d, BatchNorm2d, BatchNormOptions, Branch, Conv2d, Conv2dOptions, Dropout, Embedding,
    EmbeddingOptions, ExpertLoad, Experts, ExpertsOptions, Flatten, LayerNorm, LayerNormOptions,
    Linear, LinearOptions, Lstm, LstmOptions, LstmState, MaxPool2d, PreActivation, Relu, RmsNorm,
    Routing, SwiGlu, SwiGluOptions, load_balancing_loss, load_balancing_loss_of,
    load_balancing_sums, router_z_loss,
};
pub use model::{DividedParameter, Model, ModelBuilder, NamedGroup};
pub use module::{Layer, Module};
pub use named::Named;
pub use param_path::ParamPath;
pub use pipeline::{
    PipelineParallel, PipelineStages, SharedParameter, StageCut, StageOutput, Stages,
};
pub use quantized::{QuantizeReport, QuantizedSlot, Weights};
pub use recompute::Recompute;
pub use script::{TorchScript, TorchScriptInputs, TorchScriptOutput};
pub use sequential::Sequential;
pub use state_dict::{LoadReport, ShapeMismatch, StateDict};
pub use tensor_parallel::{
    Divided, TensorParallel, TensorParallelPlan, TensorRegion, part_reads, take_part,
};
pub use training::Training;
pub use unit::Unit;
pub use var_store::TchModule;
