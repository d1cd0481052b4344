//! Cache of Hugging Face's tools: `models--OWNER--NAME/refs/BRANCH` contains a commit, and
//! `models--OWNER--NAME/snapshots/COMMIT/FILE` the files.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the folder of a model's newest snapshot in the cache. `None` if it was not downloaded, or if `name` is not a
/// valid model name.
///
/// ```
/// // Nothing was downloaded under this name.
/// assert_eq!(brigade_checkpoint::hub_cache::model("example/no-such-model"), None);
/// ```
#[must_use]
pub fn model(name: &str) -> Option<PathBuf> {
    // Characters that the hub allows. Anything else is a path.
    let plain = |part: &str| {
        let mut bytes = part.bytes();
        bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
            && !part.is_empty()
            && !part.starts_with('.')
    };
    if name.split('/').count() > 2 || !name.split('/').all(plain) {
        return None;
    }
    let snapshot = snapshot(&repository(&folder()?, name), "main");
    snapshot.is_dir().then_some(snapshot)
}

/// Returns the folder of the cache: `HF_HUB_CACHE`, or `hub` below `HF_HOME`. Defaults to `~/.cache/huggingface/hub`.
/// `None` without a home folder.
#[must_use]
pub fn folder() -> Option<PathBuf> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("HF_HUB_CACHE")
        .or_else(|| variable("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(variable("HF_HOME")?.join("hub")))
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(variable("HOME")?.join(".cache/huggingface/hub")))
}

/// Returns the folder of a model (`gpt2`, `google-bert/bert-base-uncased`) in a cache.
///
/// ```
/// use std::path::Path;
///
/// let folder = brigade_checkpoint::hub_cache::repository(Path::new("hub"), "timm/resnet50d.ra2_in1k");
/// assert_eq!(folder, Path::new("hub/models--timm--resnet50d.ra2_in1k"));
/// ```
#[must_use]
pub fn repository(cache: &Path, name: &str) -> PathBuf {
    cache.join(format!("models--{}", name.replace('/', "--")))
}

/// Returns the folder of the snapshot for a branch or a commit. It need not exist.
#[must_use]
pub fn snapshot(repository: &Path, revision: &str) -> PathBuf {
    let commit = fs::read_to_string(repository.join("refs").join(revision));
    let commit = commit.as_deref().map_or(revision, str::trim);
    repository.join("snapshots").join(commit)
}
