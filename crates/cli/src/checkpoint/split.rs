//! `brigade checkpoint split`: writes weights to files of limited size.

use std::path::PathBuf;

use anyhow::Result;
use brigade_checkpoint::convert::{Target, WeightsOptions, convert_with};
use brigade_sharding::byte_size;
use clap::Args;

/// Split weights into files of limited size, with an index
///
/// TO becomes a folder with model-00001-of-00002.safetensors, ... and model.safetensors.index.json, as Hugging Face's
/// libraries write and read them; or only model.safetensors, if all weights fit into it.
///
/// Tensors are copied in pieces, so that the memory does not grow with the model. A tensor above the limit has its own
/// file. The folder is created atomically, and must not exist.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SplitArgs {
    /// Weights file: safetensors, or of torch.save, torch.jit.save or torch.export.save
    ///
    /// An index of several files, a folder with either, and a checkpoint are accepted, too
    from: PathBuf,

    /// Folder to create
    to: PathBuf,

    /// Maximum size of a file, such as 500MB
    #[arg(long, value_name = "BYTES", value_parser = byte_size::parse, default_value = "5GB")]
    max_shard_size: u64,

    /// State dictionary of FROM, if it has several
    ///
    /// Keys of nested dictionaries are separated by dots. For a checkpoint, the name of the model
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  brigade checkpoint split model.safetensors weights
  brigade checkpoint split pytorch_model.bin weights --max-shard-size 500MB";

impl SplitArgs {
    pub(super) fn split(&self) -> Result<String> {
        let options = WeightsOptions { key: self.key.clone(), ..WeightsOptions::default() };
        let target = Target::Parts(self.max_shard_size);
        let report = convert_with(&self.from, &self.to, target, &options)?;
        Ok(super::report_lines(report))
    }
}
