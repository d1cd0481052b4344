//! Weights and checkpoint files, without libtorch.
//!
//! - [`WeightsReader`]: tensors of one file or many, read one at a time, whole or in part.
//! - [`pth`]: reads and writes the files of `torch.save`; nothing in them is ever executed.
//! - [`safetensors`]: reads and writes headers. [`shards`]: several files of limited size and their index, in Hugging
//!   Face's layout.
//! - [`layout`]: a checkpoint as a folder that appears whole or not at all.
//! - [`hub_cache`]: models in the cache of Hugging Face's tools.
//! - [`dcp_folder`]: folders of `torch.distributed.checkpoint`, which [`convert`] reads and writes.
//! - [`DeepSpeedFolder`]: folders saved by DeepSpeed's engine, which [`convert`] reads.
//! - [`convert`]: converts to and from the layouts of PyTorch, Accelerate, Hugging Face's Trainer and Lightning.
//! - [`torch_optimizer`]: converts the state of an optimizer from and to PyTorch's form.
//! - [`Value`]: the states of optimizers and schedules as trees of plain values.
//!
//! ```
//! use brigade_checkpoint::{Region, WeightsReader};
//!
//! let weights = WeightsReader::open("tests/fixtures/weights/kinds_protocol_4.pth")?;
//! let matrix = weights.get("base").expect("the file has it");
//! assert_eq!(matrix.info().to_string(), "[3, 4] of F32");
//! // The last two rows, as a rank reads its shard.
//! let rows = Region::whole(&matrix.info().shape).narrow(0, 1, 2);
//! let mut bytes = vec![0; 2 * 4 * 4];
//! matrix.read(&rows, &mut bytes)?;
//! assert_eq!(bytes[..4], 5f32.to_le_bytes());
//! # Ok::<(), brigade_checkpoint::Error>(())
//! ```
//!
//! # How weights are read
//!
//! One function opens weights (`open_weights`, `weights_files.rs`): a file, the parts of an index, or a folder. A
//! [`WeightsReader`] keeps them open. Each tensor is a place in a file with strides, in every format, and a
//! [`Region`] of it is read by `pread` into memory of the caller: in one range for rows, through a window of 4 MB for
//! columns and transposed views. `TensorRead` of `brigade-torch` reads into a tensor of any type, device and order.
//! `weights::read` of `brigade-nn` checks a list of reads and the checksums before it changes the first tensor;
//! everything that loads weights into a model uses it, whole tensors and shards alike. Only `weights::load`, which
//! returns a state dictionary, reads `.pth` files by whole storages, so that views share them.
//!
//! A file of `torch.save` is a tree of values ([`pth`]): the zip archives of PyTorch since 1.6 and the streams before
//! it, pickles in protocols 2 to 5. No function in a pickle is called; objects other than tensors and plain values are
//! reduced to their names. `PthFile::state_dict` has the only rule that finds the weights in such a tree; conversions,
//! `Model::load_weights`, `Pretrained` and the command line all use it.
//!
//! Weights in 8 or 4 bits are several tensors in a file. The reader presents one tensor in their place
//! (`reader/quantized.rs`: Brigade's own layout, GPTQ, AWQ, bitsandbytes), read as float32 or as `PackedWeight`.
//!
//! # Untrusted input
//!
//! Files are untrusted input. A reader rejects what it does not support, and uses memory in proportion to its input:
//! sizes that a file declares are compared with the file before anything is allocated, and anything that a few bytes
//! can request again and again (the memo of a pickle, views of one storage, a gzip stream) has a limit. A name in a
//! file that becomes a path is a `FileName`, which is one part of a path, as soon as it is read.

pub mod convert;
mod dcp;
mod deepspeed;
mod dtype;
mod error;
mod fault;
mod file_handle;
mod file_name;
mod file_tensor;
mod format;
pub mod hub_cache;
pub mod layout;
mod offload_folder;
mod other_format;
mod pattern;
mod place;
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
pub use file_handle::FileHandle;
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
