//! Files of a model's weights: where and how they are written.

use std::path::{Path, PathBuf};

use brigade_checkpoint::TensorInfo;
use brigade_checkpoint::safetensors::layout;
use brigade_nn::weights::{PartsWriter, WeightsWriter};
use brigade_torch::Result;
use tch::Tensor;

use crate::error::TrainError;

/// Name of the file in a folder, the same as Hugging Face's.
const MODEL_FILE: &str = "model.safetensors";

pub(crate) fn make_folder_of(file: &Path) -> Result<()> {
    let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
        return Ok(());
    };
    let failed =
        |source| TrainError::File { action: "cannot make folder", path: folder.to_owned(), source };
    Ok(std::fs::create_dir_all(folder).map_err(failed)?)
}

/// Returns the weights file of a path: the path itself if it ends in `.safetensors`, else the file in that folder.
pub(crate) fn file_in(path: &Path) -> PathBuf {
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        path.to_owned()
    } else {
        path.join(MODEL_FILE)
    }
}

/// Destination of weights: a file, or a folder with files of limited size.
#[derive(Debug, Clone)]
pub(crate) enum WeightsTarget {
    File(PathBuf),
    Parts(PathBuf, u64),
}

/// Writer of tensors to a [`WeightsTarget`].
#[derive(Debug)]
pub(crate) enum TargetWriter {
    File(WeightsWriter),
    Parts(PartsWriter),
}

impl WeightsTarget {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::File(path) | Self::Parts(path, _) => path,
        }
    }

    /// Returns the order in which the tensors of a list are written.
    pub(crate) fn order(&self, tensors: &[(&str, TensorInfo)]) -> Result<Vec<usize>> {
        Ok(match self {
            Self::File(file) => layout(file, tensors)?.order,
            Self::Parts(_, max_bytes) => PartsWriter::order(tensors, *max_bytes)?,
        })
    }

    pub(crate) fn create(&self, tensors: &[(&str, TensorInfo)]) -> Result<TargetWriter> {
        Ok(match self {
            Self::File(file) => {
                make_folder_of(file)?;
                TargetWriter::File(WeightsWriter::create(file, tensors)?)
            }
            Self::Parts(folder, max_bytes) => {
                TargetWriter::Parts(PartsWriter::create(folder, tensors, *max_bytes)?)
            }
        })
    }
}

impl TargetWriter {
    /// Writes the next tensor of the order.
    pub(crate) fn write(&mut self, tensor: &Tensor) -> Result<()> {
        match self {
            Self::File(writer) => writer.write(tensor),
            Self::Parts(writer) => writer.write(tensor),
        }
    }

    pub(crate) fn finish(self) -> Result<()> {
        match self {
            Self::File(writer) => writer.finish(),
            Self::Parts(writer) => writer.finish(),
        }
    }
}
