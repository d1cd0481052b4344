//! `brigade checkpoint merge`: writes the weights of a sharded run to one file.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use brigade_checkpoint::convert::{Target, WeightsOptions, convert_with};
use brigade_checkpoint::layout::{Checkpoint, Manifest};
use brigade_checkpoint::{FORMATS, dcp_folder, deepspeed_folder, format_named};
use brigade_rank_env::text::{counted, escaped};
use brigade_sharding::byte_size;
use clap::Args;

/// Join the weights of a sharded run's ranks into one file
///
/// Reads checkpoints of Brigade, of torch.distributed.checkpoint (also those that Accelerate saves with FSDP's
/// SHARDED_STATE_DICT), and of DeepSpeed with ZeRO stages 1 to 3 (also universal ones; the folder with the file
/// `latest`, or that of a step).
///
/// Tensors are joined in pieces, so that the memory does not grow with the model. The file is created atomically, and
/// must not exist. Checkpoints of unsharded runs are accepted, too.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct MergeArgs {
    /// Folder of the checkpoint, or of a project, for its newest checkpoint
    from: PathBuf,

    /// File to create, whose extension determines the format; a folder with --max-shard-size
    to: PathBuf,

    /// Maximum size of a file, such as 5GB
    ///
    /// TO becomes a folder with model-00001-of-00002.safetensors, ... and their index, as Hugging Face's libraries
    /// read it.
    #[arg(long, value_name = "BYTES", value_parser = byte_size::parse)]
    max_shard_size: Option<u64>,

    /// Name of the model, if the checkpoint has several
    ///
    /// For torch.distributed.checkpoint: key of a state dictionary. Defaults to model, or to the only one. For
    /// DeepSpeed: a state of the optimizer, such as exp_avg, to read in place of the weights.
    ///
    /// For Brigade: model, model_1, ... in the order in which the program prepared them. Defaults to the only one
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  brigade checkpoint merge runs/checkpoints/checkpoint_3 model.safetensors
  brigade checkpoint merge runs model.pth
  brigade checkpoint merge runs weights --max-shard-size 5GB
  brigade checkpoint merge deepspeed/global_step100 model.safetensors";

impl MergeArgs {
    pub(super) fn merge(&self) -> Result<String> {
        let folder = self.folder()?;
        let target = self.target()?;
        let is_foreign = dcp_folder(&folder)?.is_some() || deepspeed_folder(&folder)?.is_some();
        let (mut text, key) = if is_foreign {
            (String::new(), self.model.clone())
        } else {
            let checkpoint = Checkpoint::open(&folder)?;
            let model = self.chosen(checkpoint.manifest(), &folder)?;
            (format!("read {}\n", found(&checkpoint, &model)), Some(model))
        };
        let options = WeightsOptions { key, ..WeightsOptions::default() };
        let report = convert_with(&folder, &self.to, target, &options)?;
        for line in report.read {
            text.push_str(&format!("read {}\n", escaped(line)));
        }
        for file in report.written {
            text.push_str(&format!("wrote {}\n", escaped(file.display())));
        }
        for line in report.left_out {
            text.push_str(&format!("left out {}\n", escaped(line)));
        }
        Ok(text)
    }

    fn target(&self) -> Result<Target> {
        if let Some(max_bytes) = self.max_shard_size {
            return Ok(Target::Parts(max_bytes));
        }
        let format = self.to.extension().and_then(format_named).with_context(|| {
            let endings: Vec<_> = FORMATS.iter().flat_map(|it| it.extensions()).copied().collect();
            format!(
                "the ending of {} is not that of a weights format: use one of .{}, or write a folder \
                with --max-shard-size",
                escaped(self.to.display()),
                endings.join(", .")
            )
        })?;
        Ok(Target::Weights(format))
    }

    /// Returns the checkpoint's folder: the newest one if `from` is a project's folder.
    fn folder(&self) -> Result<PathBuf> {
        let checkpoints = self.from.join("checkpoints");
        if !checkpoints.is_dir() {
            return Ok(self.from.clone());
        }
        Ok(brigade_checkpoint::layout::latest(&checkpoints)?)
    }

    fn chosen(&self, manifest: &Manifest, folder: &Path) -> Result<String> {
        let names: Vec<String> =
            manifest.of_kind("model").map(|object| object.name.to_string()).collect();
        let list = names.join(", ");
        match (&self.model, &names[..]) {
            (_, []) => bail!(
                "{} holds no model: merge a checkpoint of a program that prepares one",
                escaped(folder.display())
            ),
            (Some(name), _) if names.contains(name) => Ok(name.clone()),
            (Some(name), _) => {
                bail!("{} has no model {}: it has {list}", escaped(folder.display()), escaped(name))
            }
            (None, [name]) => Ok(name.clone()),
            (None, _) => bail!(
                "{} holds several models: give --model with one of {list}",
                escaped(folder.display())
            ),
        }
    }
}

/// Describes the checkpoint and the sharding of its model, in one line.
fn found(checkpoint: &Checkpoint, model: &str) -> String {
    let manifest = checkpoint.manifest();
    let mesh: Vec<String> =
        manifest.mesh.iter().map(|axis| format!("{} {}", escaped(&axis.name), axis.size)).collect();
    let chosen = manifest.of_kind("model").filter(|object| *object.name == *model);
    let tensors = chosen.flat_map(|object| object.tensors.values());
    let (count, chunks) =
        tensors.fold((0, 0), |(count, chunks), it| (count + 1, chunks + it.chunks.len()));
    let mesh = if mesh.is_empty() { String::new() } else { format!(" as {}", mesh.join(" x ")) };
    format!(
        "a checkpoint of {}: step {}, {}{mesh}, {} in {}",
        escaped(&manifest.made_by),
        manifest.step,
        counted(manifest.world_size, "rank"),
        counted(count, "tensor"),
        counted(chunks, "chunk")
    )
}
