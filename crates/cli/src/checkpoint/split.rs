//! `brigade checkpoint split`: writes weights to files of limited size.

use std::path::PathBuf;

use anyhow::Result;
use brigade_checkpoint::convert::{Target, WeightsOptions, convert_with};
use brigade_sharding::byte_size;
use clap::Args;

/// Cut weights into files of a largest size, with their index
///
/// TO becomes a folder with model-00001-of-00002.safetensors, ... and model.safetensors.index.json, as Hugging Face's
/// libraries write and read them; with model.safetensors alone where all fits into it.
///
/// Tensors are copied a piece at a time, so that memory does not grow with the model. A tensor that is larger has a
/// file of its own. The folder appears whole or not at all, and must not be there yet.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SplitArgs {
    /// Weights file: safetensors, or of torch.save, torch.jit.save or torch.export.save
    ///
    /// An index of several, a folder with one, and a checkpoint are taken, too
    from: PathBuf,

    /// The folder to make
    to: PathBuf,

    /// Largest size of a file, such as 500MB
    #[arg(long, value_name = "BYTES", value_parser = byte_size::parse, default_value = "5GB")]
    max_shard_size: u64,

    /// State dictionary of FROM, where it has several
    ///
    /// Keys of nested dictionaries with dots between them; of a checkpoint, the name of the model
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
