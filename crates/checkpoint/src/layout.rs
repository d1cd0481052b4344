//! A checkpoint on disk: a folder that appears complete or not at all.
//!
//! ```text
//! checkpoint_3/
//!   manifest.json                       what is here, with sizes and checksums; written last
//!   model.safetensors                   or model-00001-of-00002.safetensors … and their index
//!   optimizer.json                      the tree of an object's state; its tensors beside it
//!   optimizer.safetensors
//!   scheduler.json  loader.json  …
//!   rank_0.json  rank_1.json            what each rank has for itself: random states
//! ```
//!
//! The manifest describes the arrangement of the ranks, and for each tensor its type, its global shape, how the ranks
//! held it and where its chunks are stored ([`TensorEntry`]). [`Checkpoint`] checks that against itself and against the
//! headers of the files before a tensor is read.
//!
//! A checkpoint is written under another name in the same folder ([`Staging`]), every file flushed, and renamed when it
//! is complete. Folders left by a killed run are removed by the next save.
//!
//! The manifest (`layout/manifest.rs`, version 2) has the mesh of ranks, and for each tensor its type, global shape,
//! placements (as in DTensor: replicated, or sharded along a dimension) and stored chunks, each with its file and
//! offset (`layout/sharding.rs`). Chunks must cover a tensor exactly once. Byte ranges are only in the headers of the
//! files, so nothing is stored twice. Version 1 has only the files of each object: opening one takes the tensors from
//! the headers. `crates/train/tests/it/checkpoint_versions.rs` continues from a checkpoint that a program of that
//! version has written.

mod direct;
mod file;
mod manifest;
mod names;
mod open;
mod sharding;
mod staging;
mod sweep;
mod verify;

pub use file::{ChecksumWriter, FileFacts, files};
pub use manifest::{FORMAT, MANIFEST, Manifest, Object, VERSION};
pub use names::{latest, numbered, numbered_path};
pub use open::{Checkpoint, StoredTensor, TensorLocation};
pub use sharding::{Chunk, MeshAxis, Placement, TensorEntry};
pub use staging::{Replaced, Staging, staging_path};
pub use sweep::{keep_newest, sweep};
pub use verify::verify_file;
