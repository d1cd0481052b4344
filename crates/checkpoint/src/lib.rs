//! Weights and checkpoint files, without libtorch.
//!
//! - [`WeightsReader`]: tensors of one file or many, read one at a time, whole or in part.
//! - [`pth`]: the files of `torch.save`, in and out; nothing in them is ever executed.
//! - [`safetensors`]: headers, in and out. [`shards`]: several files of a maximal size and their
//!   index, in Hugging Face's layout.
//! - [`layout`]: a checkpoint as a folder that is there whole or not at all.
//! - [`hub_cache`]: what Hugging Face's tools have downloaded.
//! - [`dcp_folder`]: folders of `torch.distributed.checkpoint`, which [`convert`] reads and writes.
//! - [`DeepSpeedFolder`]: what DeepSpeed's engine has saved, which [`convert`] reads.
//! - [`convert`]: to and from the layouts of PyTorch, Accelerate, Hugging Face's Trainer and Lightning.
//! - [`torch_optimizer`]: the state of an optimizer in PyTorch's form, in and out.
//! - [`Value`]: the states of optimizers and schedules as trees of plain values.

pub mod convert;
mod dcp;
mod deepspeed;
mod dtype;
mod error;
mod fault;
mod file_name;
mod file_tensor;
mod format;
pub mod hub_cache;
pub mod layout;
mod offload_folder;
mod other_format;
mod pattern;
mod plain;
pub mod pth;
mod quantized;
mod reader;
mod region;
pub mod safetensors;
pub mod shards;
pub mod torch_optimizer;
mod value;
mod weights_files;
mod wrapper_prefix;

pub use dcp::dcp_folder;
pub use deepspeed::{DeepSpeedFolder, Moments, deepspeed_folder};
pub use dtype::{Dtype, TensorInfo};
pub use error::Error;
pub use file_name::{FileName, InvalidFileName};
pub use format::{
    FORMATS, OpenWeights, Safetensors, Torch, WeightsFormat, format_named, format_of,
};
pub use pattern::matches_pattern;
pub use quantized::{
    DEFAULT_GROUP, PackedPart, PackedWeight, QuantizeError, QuantizedDescription, QuantizedFormat,
    is_head_layer,
};
pub use reader::{FileStamp, Stack, TensorReader, WeightsReader, check_quantization_method};
pub use region::{Region, RegionCopy, Run};
pub use value::Value;
pub use weights_files::{WeightsFile, open_weights, weights_file};
pub use wrapper_prefix::{prefix_candidates, wrapper_prefix};
