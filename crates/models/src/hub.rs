//! Weights files of the Hugging Face hub: those in the local cache, and with the feature `hub` those that
//! are still to be downloaded into it.

#[cfg(feature = "hub")]
mod download;
#[cfg(feature = "hub")]
mod transformer;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

#[cfg(feature = "hub")]
pub use self::download::{Hub, HubError};

/// Names of files with a model's weights, the preferred one first.
const WEIGHTS: [&str; 2] = ["model.safetensors", "pytorch_model.bin"];

/// The file of a model on the Hugging Face hub that lies in the local cache: `model.safetensors` or
/// `pytorch_model.bin` of the newest snapshot that `huggingface_hub` has made, below `HF_HUB_CACHE`,
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
    let folder = repository_folder(&cache_folder()?, repository);
    WEIGHTS.iter().find_map(|name| cached(&folder, "main", name))
}

/// The cache that Hugging Face's tools use.
fn cache_folder() -> Option<PathBuf> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("HF_HUB_CACHE")
        .or_else(|| variable("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(variable("HF_HOME")?.join("hub")))
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(variable("HOME")?.join(".cache/huggingface/hub")))
}

fn repository_folder(cache: &Path, repository: &str) -> PathBuf {
    cache.join(format!("models--{}", repository.replace('/', "--")))
}

/// A file of the snapshot that a branch or a commit stands for, if it is there.
fn cached(folder: &Path, revision: &str, name: &str) -> Option<PathBuf> {
    let commit = fs::read_to_string(folder.join("refs").join(revision));
    let commit = commit.as_deref().map_or(revision, str::trim);
    let file = folder.join("snapshots").join(commit).join(name);
    file.is_file().then_some(file)
}
