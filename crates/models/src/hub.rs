//! Weights files of the Hugging Face hub: from the local cache, and with the feature `hub` downloaded into it.
//!
//! Downloads are implemented with ureq, because the official crate depends on 284 packages and an async runtime for two
//! requests.

#[cfg(feature = "hub")]
mod download;
#[cfg(feature = "hub")]
mod transformer;

use std::path::{Path, PathBuf};

use brigade_checkpoint::hub_cache;

#[cfg(feature = "hub")]
pub use self::download::{Hub, HubError};

/// Names of files with a model's weights. The preferred one comes first.
const WEIGHTS: [&str; 2] = ["model.safetensors", "pytorch_model.bin"];

/// Returns the path of a model's weights in the local cache of the Hugging Face hub, or `None` if they are not cached:
/// `model.safetensors` or `pytorch_model.bin` of the newest snapshot of `huggingface_hub`, below `HF_HUB_CACHE`,
/// `HF_HOME` or `~/.cache/huggingface`.
///
/// ```
/// use brigade_models::cached_hub_file;
///
/// // Nothing was downloaded under this name.
/// assert_eq!(cached_hub_file("example/no-such-model"), None);
/// ```
#[must_use]
pub fn cached_hub_file(repository: &str) -> Option<PathBuf> {
    let folder = hub_cache::repository(&hub_cache::folder()?, repository);
    WEIGHTS.iter().find_map(|name| cached(&folder, "main", name))
}

/// Returns the path of a file in the snapshot of a branch or a commit, if the file exists.
fn cached(folder: &Path, revision: &str, name: &str) -> Option<PathBuf> {
    let file = hub_cache::snapshot(folder, revision).join(name);
    file.is_file().then_some(file)
}
