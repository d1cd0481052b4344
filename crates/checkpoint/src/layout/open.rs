//! Checkpoints that are there: what they hold, and whether it is what was written.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::manifest::{Manifest, Object};
use super::verify::{checksum_fact, verify_files};
use crate::dtype::TensorInfo;
use crate::error::Error;
use crate::safetensors::Header;
use crate::value::Value;

/// An open checkpoint: its manifest, read and checked. Files are opened when they are asked for.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
}

/// Where a tensor's bytes lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// The first byte in it.
    pub offset: u64,
    /// What the tensor is.
    pub info: TensorInfo,
}

impl Checkpoint {
    /// Reads the manifest, and compares the sizes of all files with it.
    ///
    /// # Errors
    /// Those of [`Manifest::read`]; [`Error::Damaged`] for a file that is missing or cut short.
    pub fn open(folder: impl Into<PathBuf>) -> Result<Self, Error> {
        let folder = folder.into();
        let manifest = Manifest::read(&folder)?;
        for (name, facts) in &manifest.files {
            let path = folder.join(name);
            let damaged = |fact: String| Error::Damaged { path: folder.clone(), fact };
            match path.metadata() {
                Ok(found) if found.len() == facts.bytes => {}
                Ok(found) => {
                    return Err(damaged(format!(
                        "its {name} has {} bytes, it was written with {}",
                        found.len(),
                        facts.bytes
                    )));
                }
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    return Err(damaged(format!("its {name} is missing")));
                }
                Err(error) => return Err(Error::io("read", &path)(error)),
            }
        }
        Ok(Self { folder, manifest })
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What it holds.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Compares the checksums of all files, on several threads. Gives the faults, one for each file.
    #[must_use]
    pub fn verify(&self) -> Vec<Error> {
        self.verify_part(0, 1)
    }

    /// As [`Checkpoint::verify`], for every `parts`-th file from `part` on: the share of a rank.
    #[must_use]
    pub fn verify_part(&self, part: usize, parts: usize) -> Vec<Error> {
        let mut files: Vec<_> = self.manifest.files.iter().collect();
        // The largest first: then the shares are about equal.
        files.sort_by_key(|(_, facts)| std::cmp::Reverse(facts.bytes));
        let share = files.into_iter().skip(part).step_by(parts.max(1));
        let share: Vec<_> = share.map(|(name, facts)| (self.folder.join(name), facts)).collect();
        verify_files(&share)
    }

    /// An object's tree, with the names of its tensors; `None` for a model.
    ///
    /// # Errors
    /// [`Error::Damaged`] when the file is not what was written.
    pub fn state(&self, object: &Object) -> Result<Option<Value<String>>, Error> {
        let Some(name) = &object.state else { return Ok(None) };
        let path = self.folder.join(name);
        let text = std::fs::read(&path).map_err(Error::io("read", &path))?;
        let damaged = |fact: String| Error::Damaged { path: path.clone(), fact };
        if let Some(facts) = self.manifest.files.get(name) {
            let found = format!("{:08x}", crc32fast::hash(&text));
            if found != facts.crc32 {
                return Err(damaged(checksum_fact(&found, &facts.crc32)));
            }
        }
        let json = serde_json::from_slice(&text)
            .map_err(|error| damaged(format!("it is no state: {error}")))?;
        Value::from_json(&json).map(Some).map_err(damaged)
    }

    /// The places of an object's tensors by name.
    ///
    /// # Errors
    /// [`Error::Damaged`] and the others of [`Header::read`].
    pub fn tensors(&self, object: &Object) -> Result<HashMap<String, Place>, Error> {
        let mut places = HashMap::new();
        for name in object.tensors.iter().filter(|name| name.ends_with(".safetensors")) {
            let path = self.folder.join(name);
            let file = File::open(&path).map_err(Error::io("read", &path))?;
            for entry in Header::read(&path, &file)?.tensors {
                let place =
                    Place { path: path.clone(), offset: entry.range.start, info: entry.info };
                places.insert(entry.name, place);
            }
        }
        Ok(places)
    }
}
