//! Where a model's weights are written.

use std::path::{Path, PathBuf};

use brigade_torch::Result;

use crate::error::TrainError;

/// The file's name in a folder, as Hugging Face's.
const MODEL_FILE: &str = "model.safetensors";

pub(crate) fn make_folder_of(file: &Path) -> Result<()> {
    let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
        return Ok(());
    };
    let failed =
        |source| TrainError::File { action: "cannot make folder", path: folder.to_owned(), source };
    Ok(std::fs::create_dir_all(folder).map_err(failed)?)
}

/// Returns the file of a path that is one, or a folder.
pub(crate) fn file_in(path: &Path) -> PathBuf {
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        path.to_owned()
    } else {
        path.join(MODEL_FILE)
    }
}
