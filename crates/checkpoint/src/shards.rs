//! Weights in several files of a maximum size, with an index, in Hugging Face's layout.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::file_name::FileName;

/// Divides tensors, given by size and in order, into parts of at most `max_bytes` each. Returns the indices of each
/// part. A larger tensor gets a part of its own, at the end. Follows `split_torch_state_dict_into_shards` of
/// huggingface_hub.
///
/// ```
/// use brigade_checkpoint::shards::cut;
///
/// assert_eq!(cut(&[4, 4, 4, 9, 1], 8), [vec![0, 1], vec![2, 4], vec![3]]);
/// ```
#[must_use]
pub fn cut(sizes: &[u64], max_bytes: u64) -> Vec<Vec<usize>> {
    let (mut shards, mut large) = (Vec::new(), Vec::new());
    let (mut open, mut open_bytes) = (Vec::new(), 0u64);
    for (place, &bytes) in sizes.iter().enumerate() {
        if bytes > max_bytes {
            large.push(vec![place]);
            continue;
        }
        if open_bytes.saturating_add(bytes) > max_bytes && !open.is_empty() {
            shards.push(std::mem::take(&mut open));
            open_bytes = 0;
        }
        open.push(place);
        open_bytes += bytes;
    }
    if !open.is_empty() {
        shards.push(open);
    }
    shards.append(&mut large);
    shards
}

/// Returns the name of a part: `model.safetensors`, or `model-00002-of-00003.safetensors`. `part` counts from 0.
#[must_use]
pub fn file_name(stem: &FileName, part: usize, parts: usize) -> FileName {
    match parts {
        0 | 1 => stem.with_ending(format_args!(".safetensors")),
        _ => stem.with_ending(format_args!("-{:05}-of-{parts:05}.safetensors", part + 1)),
    }
}

/// Returns the name of the file with one rank's rows of sharded tensors: `model-rows-00001-of-00002.safetensors`.
/// `place` counts from 0.
#[must_use]
pub fn rows_name(stem: &FileName, place: usize, ranks: usize) -> FileName {
    stem.with_ending(format_args!("-rows-{:05}-of-{ranks:05}.safetensors", place + 1))
}

/// Returns the name of the index of several parts: `model.safetensors.index.json`.
#[must_use]
pub fn index_name(stem: &FileName) -> FileName {
    stem.with_ending(format_args!(".safetensors.index.json"))
}

/// Index of several weights files: the file of each tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// Total size, as in Hugging Face's layout.
    #[serde(default)]
    pub metadata: IndexMetadata,
    /// File of each tensor, by the tensor's name.
    pub weight_map: BTreeMap<String, FileName>,
}

/// Metadata of an [`Index`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexMetadata {
    /// Total size of all tensors in bytes.
    #[serde(default)]
    pub total_size: u64,
}

impl Index {
    /// Returns the contents of the index file.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Cannot fail: strings and numbers are always valid JSON.
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Reads and checks an index file.
    ///
    /// # Errors
    /// Fails with [`Error::Io`], or with [`Error::Damaged`] if the file is not an index or names files outside its
    /// folder.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text = fs::read(path).map_err(Error::io("read", path))?;
        serde_json::from_slice(&text).map_err(|error| Error::Damaged {
            path: path.to_owned(),
            fact: format!("it is not an index of shards: {error}"),
        })
    }

    /// Returns the names of the files, without duplicates, sorted.
    #[must_use]
    pub fn files(&self) -> Vec<&FileName> {
        let files: BTreeSet<&FileName> = self.weight_map.values().collect();
        files.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_hold_everything_once_and_keep_the_limit(
            sizes in proptest::collection::vec(0u64..50, 0..40), max in 1u64..60
        ) {
            let parts = cut(&sizes, max);
            let mut all: Vec<usize> = parts.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..sizes.len()).collect::<Vec<_>>());
            for part in parts {
                let bytes: u64 = part.iter().map(|&place| sizes[place]).sum();
                prop_assert!(bytes <= max || part.len() == 1);
            }
        }
    }

    #[test]
    fn names_are_hugging_faces() {
        let model = FileName::new("model").unwrap();
        assert_eq!(&*file_name(&model, 0, 1), "model.safetensors");
        assert_eq!(&*file_name(&model, 1, 3), "model-00002-of-00003.safetensors");
        assert_eq!(&*index_name(&model), "model.safetensors.index.json");
    }
}
