//! Reading and verification of checkpoints.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

use super::manifest::{Manifest, Object};
use super::sharding::{Placement, TensorEntry};
use super::verify::{checksum_fact, verify_files};
use crate::dtype::TensorInfo;
use crate::error::Error;
use crate::file_name::FileName;
use crate::region::Region;
use crate::safetensors::Header;
use crate::value::Value;

/// An open checkpoint, with its manifest read and checked. Other files are opened on demand.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
}

/// Location of a tensor's bytes: contiguous, in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorLocation {
    /// Path of the file.
    pub path: PathBuf,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Data type and shape of the tensor.
    pub info: TensorInfo,
}

/// A stored tensor: whole, or in chunks that cover it exactly once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// Data type and global shape.
    pub info: TensorInfo,
    /// Chunks: the region of the tensor, and its location.
    pub chunks: Vec<(Region, TensorLocation)>,
}

impl Checkpoint {
    /// Opens a checkpoint: reads its manifest and compares the sizes of all files with it.
    ///
    /// # Errors
    /// Returns the errors of [`Manifest::read`], and [`Error::Damaged`] for a file that is missing or truncated. A
    /// manifest of version 1, which does not name the tensors, can also give those of [`Header::read`].
    pub fn open(folder: impl Into<PathBuf>) -> Result<Self, Error> {
        let folder = folder.into();
        let mut manifest = Manifest::read(&folder)?;
        for (name, facts) in &manifest.files {
            let path = folder.join(name);
            let damaged = |fact: String| Error::Damaged { path: folder.clone(), fact };
            match path.metadata() {
                Ok(found) if found.len() == facts.bytes => {}
                Ok(found) => {
                    return Err(damaged(format!(
                        "its {name} has {} bytes, but it was written with {}",
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
        if manifest.version == 1 {
            for object in &mut manifest.objects {
                tensors_of_version_1(&folder, object)?;
            }
        }
        Ok(Self { folder, manifest })
    }

    /// Returns the checkpoint's folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the checkpoint's manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Verifies the checksums of all files, on several threads, and then compares the tensors in the manifest with the
    /// headers of the files. Returns one error per damaged file, or else one per inconsistent object.
    #[must_use]
    pub fn verify(&self) -> Vec<Error> {
        let faults = self.verify_part(0, 1);
        if !faults.is_empty() {
            return faults;
        }
        self.manifest.objects.iter().filter_map(|object| self.chunks(object).err()).collect()
    }

    /// Verifies the checksums of a rank's share of the files: of every `parts`-th file from `part` on, in descending
    /// order of size.
    #[must_use]
    pub fn verify_part(&self, part: usize, parts: usize) -> Vec<Error> {
        let mut files: Vec<_> = self.manifest.files.iter().collect();
        // Descending sizes give about equal shares.
        files.sort_by_key(|(_, facts)| std::cmp::Reverse(facts.bytes));
        let share = files.into_iter().skip(part).step_by(parts.max(1));
        let share: Vec<_> = share.map(|(name, facts)| (self.folder.join(name), facts)).collect();
        verify_files(&share)
    }

    /// Returns the state tree of an object, with tensor names as leaves. `None` for a model.
    ///
    /// # Errors
    /// Fails with [`Error::Damaged`] if the file does not match its checksum or is not a saved state, or with
    /// [`Error::Io`].
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
            .map_err(|error| damaged(format!("it is not a saved state: {error}")))?;
        Value::from_json(&json).map(Some).map_err(damaged)
    }

    /// Returns the locations of the chunks of an object's tensors: by name, in the order of [`TensorEntry::chunks`].
    ///
    /// # Errors
    /// Fails with [`Error::Damaged`] if the manifest contradicts the files: a chunk is missing from its file or has
    /// another type or shape there, or a file has a tensor that the manifest does not name. Returns the errors of
    /// [`Header::read`].
    pub fn chunks(&self, object: &Object) -> Result<BTreeMap<String, Vec<TensorLocation>>, Error> {
        let mut headers: HashMap<&FileName, HashMap<String, TensorLocation>> = HashMap::new();
        for name in object.tensor_files.iter().filter(|name| is_safetensors(name)) {
            let entries = header(&self.folder, name)?.into_iter();
            headers.insert(name, entries.collect());
        }
        let damaged = |file: &FileName, fact: String| Error::Damaged {
            path: self.folder.join(file),
            fact: format!("{fact} ({} in the manifest)", object.name),
        };
        let mut chunks = BTreeMap::new();
        for (name, tensor) in &object.tensors {
            let places = tensor.chunks.iter().map(|chunk| {
                let key = chunk.key(name);
                let place = headers.get_mut(&chunk.file).and_then(|header| header.remove(key));
                let place =
                    place.ok_or_else(|| damaged(&chunk.file, format!("it lacks `{key}`")))?;
                let recorded = TensorInfo { dtype: tensor.dtype, shape: chunk.shape.clone() };
                if place.info == recorded {
                    Ok(place)
                } else {
                    Err(damaged(
                        &chunk.file,
                        format!("its `{key}` is {}, but it was written as {recorded}", place.info),
                    ))
                }
            });
            chunks.insert(name.clone(), places.collect::<Result<_, _>>()?);
        }
        let left = headers.iter().flat_map(|(file, left)| left.keys().map(move |key| (*file, key)));
        match left.min() {
            Some((file, key)) => {
                Err(damaged(file, format!("it has `{key}`, which is not a chunk")))
            }
            None => Ok(chunks),
        }
    }

    /// Returns an object's tensors as they are stored, by name.
    ///
    /// # Errors
    /// Returns the errors of [`Checkpoint::chunks`].
    pub fn stored(&self, object: &Object) -> Result<HashMap<String, StoredTensor>, Error> {
        let stored = self.chunks(object)?.into_iter().filter_map(|(name, places)| {
            let entry = object.tensors.get(&name)?;
            let regions = entry
                .chunks
                .iter()
                .map(|chunk| Region { offset: chunk.offset.clone(), shape: chunk.shape.clone() });
            let chunks = regions.zip(places).collect();
            Some((name, StoredTensor { info: entry.info(), chunks }))
        });
        Ok(stored.collect())
    }
}

fn is_safetensors(name: &str) -> bool {
    name.ends_with(".safetensors")
}

/// Returns the names and locations of the tensors in a file.
fn header(folder: &Path, name: &FileName) -> Result<Vec<(String, TensorLocation)>, Error> {
    let path = folder.join(name);
    let file = File::open(&path).map_err(Error::io("read", &path))?;
    let entries = Header::read(&path, &file)?.tensors.into_iter();
    let places = entries.map(|entry| {
        (
            entry.name,
            TensorLocation { path: path.clone(), offset: entry.range.start, info: entry.info },
        )
    });
    Ok(places.collect())
}

/// Fills in the tensors of an object from the headers, for a manifest of version 1.
fn tensors_of_version_1(folder: &Path, object: &mut Object) -> Result<(), Error> {
    // Only the state of a rank was not replicated.
    let placements = match object.kind.as_str() {
        "rank" => Vec::new(),
        _ => vec![Placement::Replicate],
    };
    for file in object.tensor_files.iter().filter(|name| is_safetensors(name)) {
        for (name, place) in header(folder, file)? {
            let entry = TensorEntry::whole(place.info, file.clone(), placements.clone());
            if object.tensors.insert(name.clone(), entry).is_some() {
                return Err(Error::Damaged {
                    path: folder.join(file),
                    fact: format!("`{name}` of {} is in another file, too", object.name),
                });
            }
        }
    }
    Ok(())
}
