//! Weights files: safetensors and PyTorch's `.pth`, out and in.
//!
//! The format is told from the first bytes, not from the file's name. Nothing in a file is ever
//! executed, and no file, however made, costs memory out of proportion to its size.

mod pth;
mod safetensors;

use std::fs::File;
use std::path::Path;

#[cfg(doc)]
use brigade_checkpoint::pth::PthFile;
use brigade_checkpoint::{Error as FileError, OpenWeights, format_of};
use brigade_torch::Error;

use crate::{LoadReport, Model, StateDict};

/// Reads a safetensors file, or a `.pth`, `.pt`, `.bin` or `.ckpt` file of `torch.save` that holds one state
/// dictionary, alone or in a dictionary ([`PthFile::state_dict`] has the rule); also the state dictionary of an archive
/// of TorchScript or of `torch.export.save`.
///
/// Tensors come to the CPU in the kind and shape they were saved in. Names are as in the file;
/// [`Model::load_state_dict`] takes the prefixes of wrappers off.
///
/// ```
/// use brigade_nn::weights;
/// # use brigade_nn::{Linear, Model};
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
/// # let model = Model::new(|p| Linear::new(p, 784, 10))?;
/// # weights::save(&model.state_dict(), "linear.safetensors")?;
///
/// let state = weights::load("linear.safetensors")?;
/// assert_eq!(state.get("weight").map(|weight| weight.size()), Some(vec![10, 784]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`brigade_checkpoint::Error`] with what is wrong with it: unreadable, of an unknown format, damaged, with types of
/// elements that tensors of a model cannot have (floats of 8 bits, quantized integers and others), without a state
/// dictionary, or with several of which [`load_entry`] chooses one.
pub fn load(path: impl AsRef<Path>) -> Result<StateDict, Error> {
    read(path.as_ref(), None)
}

/// Reads the state dictionary at one key of a `.pth` file, such as `model_ema` in
/// `{"model": {…}, "model_ema": {…}, "epoch": 3}`. Keys of nested dictionaries have dots between them. The other
/// tensors of the file are not read.
///
/// ```no_run
/// let state = brigade_nn::weights::load_entry("checkpoint.pth", "model_ema")?;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// Those of [`load`], also where nothing lies under the key.
pub fn load_entry(path: impl AsRef<Path>, entry: &str) -> Result<StateDict, Error> {
    read(path.as_ref(), Some(entry))
}

/// Writes a safetensors file that PyTorch, Brigade and others read.
///
/// The file appears whole or not at all: it is written under a temporary name in the same folder,
/// flushed to the disk, and renamed. A tensor that has two names is written under both, so that
/// a reader which knows nothing of sharing finds it; it takes its space twice.
///
/// ```
/// use brigade_nn::{Linear, Model, weights};
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
/// let model = Model::new(|p| Linear::new(p, 784, 10))?;
/// weights::save(&model.state_dict(), "linear.safetensors")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`brigade_checkpoint::Error`] when the system refuses, or for a kind that safetensors lacks;
/// [`crate::ModelError::Torch`] when a tensor cannot be copied from its device. An older file of that name is still
/// there then.
pub fn save(state: &StateDict, path: impl AsRef<Path>) -> Result<(), Error> {
    safetensors::save(state, path.as_ref())
}

/// Writes a `.pth` file: what `torch.save` would write of the dictionary, for programs that know no
/// safetensors, such as fastai. `torch.load` reads it, also with `weights_only`, and so does [`load`].
///
/// The file appears whole or not at all, as with [`save`]. A tensor that has two names is written twice.
///
/// ```
/// use brigade_nn::{Linear, Model, weights};
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
/// let model = Model::new(|p| Linear::new(p, 784, 10))?;
/// weights::save_pth(&model.state_dict(), "linear.pth")?;
/// assert_eq!(weights::load("linear.pth")?.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`brigade_checkpoint::Error`] when the system refuses, or for a kind that the format lacks. An older file of that
/// name is still there then.
pub fn save_pth(state: &StateDict, path: impl AsRef<Path>) -> Result<(), Error> {
    pth::save(state, path.as_ref())
}

impl<M> Model<M> {
    /// Reads a weights file into the model, when it fits in every name and shape.
    ///
    /// As [`Model::load_state_dict`] of what [`load`] gives, but tensors are read straight into the
    /// model's. That takes no memory beside it; for a tensor of another kind, on a device or channels
    /// last at most 16 MB of the file at a time, of a `.pth` file its largest storage.
    ///
    /// # Errors
    /// Those of [`load`] and of [`Model::load_state_dict`]; nothing was changed then.
    /// [`crate::ModelError::Interrupted`] when the disk fails after all was looked at.
    pub fn load_weights(&mut self, path: impl AsRef<Path>) -> Result<LoadReport, Error> {
        self.load_file(path.as_ref(), None)
    }

    /// As [`Model::load_weights`], of the state dictionary at one key of a `.pth` file, see
    /// [`load_entry`].
    ///
    /// ```no_run
    /// # use brigade_nn::{Linear, Model};
    /// # let mut model = Model::new(|p| Linear::new(p, 784, 10))?;
    /// let report = model.load_entry("checkpoint.pth", "model_ema")?;
    /// println!("{report}");
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`load_entry`] and of [`Model::load_weights`].
    pub fn load_entry(&mut self, path: impl AsRef<Path>, key: &str) -> Result<LoadReport, Error> {
        self.load_file(path.as_ref(), Some(key))
    }

    fn load_file(&mut self, path: &Path, key: Option<&str>) -> Result<LoadReport, Error> {
        match open(path, key)? {
            OpenWeights::Ranges(file, entries) => {
                safetensors::load_into(self, path, file, &entries)
            }
            OpenWeights::Storages(file, found) => pth::load_into(self, path, *file, found),
        }
    }

    /// Writes parameters and saved buffers to a safetensors file, see [`save`].
    ///
    /// # Errors
    /// Those of [`save`].
    pub fn save_weights(&self, path: impl AsRef<Path>) -> Result<(), Error> {
        save(&self.state_dict(), path)
    }
}

fn read(path: &Path, entry: Option<&str>) -> Result<StateDict, Error> {
    match open(path, entry)? {
        OpenWeights::Ranges(file, entries) => safetensors::load(path, file, entries),
        OpenWeights::Storages(file, found) => pth::load(path, *file, found),
    }
}

fn open(path: &Path, key: Option<&str>) -> Result<OpenWeights, Error> {
    let file = File::open(path).map_err(|source| io("read", path, source))?;
    Ok(format_of(path, &file)?.open(path, file, key)?)
}

fn io(doing: &'static str, path: &Path, source: std::io::Error) -> Error {
    FileError::Io { doing, path: path.to_owned(), source }.into()
}

fn unsupported(path: &Path, fact: String) -> Error {
    FileError::Unsupported { path: path.to_owned(), fact }.into()
}

fn damaged(path: &Path, fact: String) -> Error {
    FileError::Damaged { path: path.to_owned(), fact }.into()
}
