//! Folders into which Accelerate offloads weights: one file per tensor, and an index.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use indexmap::IndexMap;
use serde::Deserialize;

use crate::dtype::{Dtype, TensorInfo};
use crate::error::Error;
use crate::file_handle::{FileHandle, open_regular};
use crate::file_name::FileName;
use crate::format::OpenWeights;
use crate::pth::shown;
use crate::safetensors::{Entry, Header};

/// File name of the index.
pub(crate) const INDEX: &str = "index.json";

/// A tensor of the index: in a file of its own, or in a safetensors file.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Offloaded {
    Inside {
        safetensors_file: PathBuf,
        /// Name of the tensor in the file. Defaults to its own.
        weight_name: Option<String>,
    },
    Alone {
        /// NumPy's name of the type, or PyTorch's for types that NumPy lacks.
        dtype: String,
        shape: Vec<u64>,
    },
}

/// Opens the files of an index and returns them with their paths. `NAME.dat` contains only a tensor's elements in
/// row-major order, so its size shows whether it is complete. These files are closed again and opened for each read, since
/// a process may have fewer files open than a large model has tensors.
pub(crate) fn open(path: &Path) -> Result<Vec<(PathBuf, OpenWeights)>, Error> {
    let text = fs::read(path).map_err(Error::io("read", path))?;
    let index: BTreeMap<String, Offloaded> = serde_json::from_slice(&text).map_err(|error| {
        let fact =
            format!("it is neither an index of shards nor one of offloaded weights: {error}");
        Error::Damaged { path: path.to_owned(), fact }
    })?;
    let mut files = Vec::new();
    let mut inside: IndexMap<PathBuf, HashMap<String, String>> = IndexMap::new();
    for (name, offloaded) in index {
        match offloaded {
            Offloaded::Alone { dtype, shape } => files.push(open_alone(path, name, &dtype, shape)?),
            Offloaded::Inside { safetensors_file, weight_name } => {
                // Relative to the index's folder, unless absolute.
                let file = path.with_file_name("").join(safetensors_file);
                let there = weight_name.unwrap_or_else(|| name.clone());
                inside.entry(file).or_default().insert(there, name);
            }
        }
    }
    for (file, names) in inside {
        files.push(open_inside(path, file, names)?);
    }
    Ok(files)
}

fn open_alone(
    index: &Path,
    name: String,
    dtype: &str,
    shape: Vec<u64>,
) -> Result<(PathBuf, OpenWeights), Error> {
    let damaged = |path: &Path, fact: String| Error::Damaged { path: path.to_owned(), fact };
    let known = Dtype::from_torch_name(dtype).ok_or_else(|| Error::Unsupported {
        path: index.to_owned(),
        fact: format!("`{}` has the dtype {}, which is not supported", shown(&name), shown(dtype)),
    })?;
    let file_name =
        FileName::new(format!("{name}.dat")).map_err(|error| damaged(index, error.to_string()))?;
    let path = index.with_file_name(file_name.as_ref() as &Path);
    let info = TensorInfo { dtype: known, shape };
    let file = open_regular(&path).map_err(Error::io("read", &path))?;
    let found = file.metadata().map_err(Error::io("look at", &path))?.len();
    match info.bytes() {
        Some(bytes) if bytes == found => {
            let entry = Entry { name, info, range: 0..bytes };
            let handle = FileHandle::closed(&path, &file).map_err(Error::io("look at", &path))?;
            Ok((path, OpenWeights::Ranges(handle, vec![entry])))
        }
        expected => {
            let expected =
                expected.map_or_else(|| "more than 2^64".to_owned(), |it| it.to_string());
            Err(damaged(
                &path,
                format!("a tensor {info} has {expected} bytes, and the file has {found}"),
            ))
        }
    }
}

fn open_inside(
    index: &Path,
    path: PathBuf,
    mut names: HashMap<String, String>,
) -> Result<(PathBuf, OpenWeights), Error> {
    let file = open_regular(&path).map_err(Error::io("read", &path))?;
    let header = Header::read(&path, &file)?;
    let entries = header.tensors.into_iter().filter_map(|entry| {
        let name = names.remove(&entry.name)?;
        Some(Entry { name, ..entry })
    });
    let entries: Vec<Entry> = entries.collect();
    match names.keys().min() {
        Some(missing) => {
            let fact =
                format!("`{}` is not in {}, where it is to be", shown(missing), path.display());
            Err(Error::Damaged { path: index.to_owned(), fact })
        }
        None => Ok((path, OpenWeights::Ranges(file.into(), entries))),
    }
}
