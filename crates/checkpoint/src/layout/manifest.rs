//! The manifest: what a checkpoint holds.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::file::FileFacts;
use crate::error::Error;
use crate::file_name::FileName;

/// The manifest's name in its folder.
pub const MANIFEST: &str = "manifest.json";
/// What the manifest says it is.
pub const FORMAT: &str = "brigade-checkpoint";
/// The layout that is written. Every older one stays readable.
pub const VERSION: u32 = 1;

/// What a checkpoint holds, and the checksums of its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: String,
    /// The layout's version.
    pub version: u32,
    /// The program that wrote it.
    pub made_by: String,
    /// Ranks of the run.
    pub world_size: usize,
    /// Optimizer steps taken.
    pub step: u64,
    /// Samples trained on by all ranks together.
    pub samples: u64,
    /// The objects, in the order in which the program prepared them.
    pub objects: Vec<Object>,
    /// Every file but this one.
    pub files: BTreeMap<FileName, FileFacts>,
    /// Of everything above.
    #[serde(default)]
    pub crc32: String,
}

/// One object: a model, an optimizer, …
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    /// `model`, `optimizer`, `scheduler`, `scaler`, `loader`, `custom`, `run` or `rank`.
    pub kind: String,
    /// Its name and the stem of its files: `model`, `model_1`, `rank_0`.
    pub name: FileName,
    /// The file of its state's tree. A model has none: it is tensors and no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<FileName>,
    /// The files of its tensors.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tensors: Vec<FileName>,
}

/// The fields that tell a manifest's version, before the others are looked at.
#[derive(Deserialize)]
struct Head {
    format: Option<String>,
    version: Option<u32>,
}

impl Manifest {
    /// The text of the file, with its own checksum.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut whole = self.clone();
        whole.crc32 = self.own_checksum();
        // Strings and numbers: nothing in it can fail to be JSON.
        let mut text = serde_json::to_string_pretty(&whole).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Reads the manifest of a checkpoint's folder.
    ///
    /// # Errors
    /// [`Error::NotACheckpoint`], [`Error::Version`], [`Error::Damaged`], [`Error::Io`].
    pub fn read(folder: &Path) -> Result<Self, Error> {
        let path = folder.join(MANIFEST);
        let not = |fact: String| Error::NotACheckpoint { path: folder.to_owned(), fact };
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(not(match fs::metadata(folder) {
                    Ok(folder) if folder.is_dir() => foreign(&path),
                    Ok(_) => "it is a file, not a folder".into(),
                    Err(error) => error.to_string(),
                }));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => {
                return Err(not("it is a file, not a folder".into()));
            }
            Err(error) => return Err(Error::io("read", &path)(error)),
        };
        let damaged = |fact: String| Error::Damaged { path: path.clone(), fact };
        let head: Head = serde_json::from_slice(&text)
            .map_err(|error| damaged(format!("it is no manifest: {error}")))?;
        if head.format.as_deref() != Some(FORMAT) {
            return Err(not(format!(
                "its {MANIFEST} is of format {:?}, not {FORMAT:?}",
                head.format.unwrap_or_default()
            )));
        }
        match head.version {
            Some(VERSION) => {}
            found => {
                return Err(Error::Version {
                    path: folder.to_owned(),
                    found: found.unwrap_or_default(),
                    known: VERSION,
                });
            }
        }
        let manifest: Self = serde_json::from_slice(&text)
            .map_err(|error| damaged(format!("it is no manifest: {error}")))?;
        let expected = manifest.own_checksum();
        if manifest.crc32 != expected {
            return Err(damaged(format!(
                "its own checksum is {expected}, but it says {}",
                manifest.crc32
            )));
        }
        manifest.check().map_err(damaged)?;
        Ok(manifest)
    }

    /// The objects of a kind, in order.
    pub fn of_kind(&self, kind: &str) -> impl Iterator<Item = &Object> {
        self.objects.iter().filter(move |object| object.kind == kind)
    }

    /// The size of all files together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.files.values().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// Whether what it names fits together.
    fn check(&self) -> Result<(), String> {
        let lost = |name: &&FileName| !self.files.contains_key(*name);
        if let Some(name) = self.objects.iter().flat_map(Object::files).find(lost) {
            return Err(format!("an object is in {name}, which is not among its files"));
        }
        if self.files.contains_key(MANIFEST) {
            return Err("it names itself among its files".into());
        }
        let mut names = BTreeSet::new();
        match self.objects.iter().find(|object| !names.insert(&object.name)) {
            Some(object) => Err(format!("it has two objects `{}`", object.name)),
            None => Ok(()),
        }
    }

    fn own_checksum(&self) -> String {
        let mut plain = self.clone();
        plain.crc32.clear();
        let text = serde_json::to_vec(&plain).unwrap_or_default();
        format!("{:08x}", crc32fast::hash(&text))
    }
}

impl Object {
    /// Returns all its files.
    pub fn files(&self) -> impl Iterator<Item = &FileName> {
        self.state.iter().chain(&self.tensors)
    }
}

/// What a folder without a manifest seems to be.
fn foreign(manifest: &Path) -> String {
    let Some(folder) = manifest.parent() else { return "it has no manifest".into() };
    let has = |name: &str| folder.join(name).exists();
    if has("random_states_0.pkl") || has("optimizer.bin") || has("pytorch_model.bin") {
        return format!(
            "it has no {MANIFEST} and looks like one of Accelerate's: bring it in with \
             `brigade checkpoint convert --like`"
        );
    }
    if has("model.safetensors") {
        return format!("it has no {MANIFEST}: only weights, which `load_model` reads");
    }
    format!("it has no {MANIFEST}")
}
