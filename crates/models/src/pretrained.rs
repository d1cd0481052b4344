//! Loading of weights files of torchvision, timm and fastai.

use std::collections::HashSet;
use std::path::Path;

use brigade_checkpoint::{
    Error as FileError, TensorReader, WeightsReader, prefix_candidates, wrapper_prefix,
};
use brigade_nn::{LoadReport, Model, ModelError, StateDict, weights};
use brigade_torch::{Result, TensorRead, loaded_kind};
use tch::{Device, Tensor};

use crate::classifier::is_below;
use crate::{ImageClassifier, InputChannels};

/// Loader of weights files of other libraries into an image classifier whose number of classes or channels may differ.
///
/// - A head for another number of classes keeps its initial values.
/// - A first convolution for another number of channels is computed: [`InputChannels`].
/// - Names that other libraries or older versions use are mapped: [`ImageClassifier::renamed`].
/// - Position embeddings of a vision transformer for another image size are interpolated.
/// - Prefixes of wrappers that all names have (`module.`, `_orig_mod.`) are removed. If only some names have such a
///   prefix, or that of an enclosing module (`model.`, `backbone.`), it is removed if these names then match the whole
///   model; the other names are unused.
/// - Counters of batches (`num_batches_tracked`), which are missing in old files, stay 0.
///
/// Everything else must match. Otherwise the model is not changed.
///
/// ```
/// use brigade_models::{Pretrained, ResNet, ResNetOptions};
/// use brigade_nn::Model;
///
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
/// # let thousand = Model::new(|path| ResNet::new(path, 1000, ResNetOptions::basic([1, 1, 1, 1])))?;
/// # thousand.save_weights("imagenet.safetensors")?;
/// let options = ResNetOptions::basic([1, 1, 1, 1]);
/// let mut model = Model::new(|path| ResNet::new(path, 37, options))?;
/// let report = Pretrained::new().load(&mut model, "imagenet.safetensors")?;
/// assert_eq!(report.head, ["fc.weight", "fc.bias"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Pretrained {
    channels: Option<InputChannels>,
    entry: Option<String>,
}

/// Report of [`Pretrained::load`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PretrainedReport {
    /// Number of tensors that were loaded from the file.
    pub loaded: usize,
    /// Parameters of the head that kept their values, because the file has another number of classes or no head.
    pub head: Vec<String>,
    /// Tensors that were computed from the file's, for another number of channels or another image size.
    pub adapted: Vec<String>,
    /// Number of names that were mapped.
    pub renamed: usize,
    /// Names of the file that were not used: those of a head that the model lacks, and those without `prefix`.
    pub unused: Vec<String>,
    /// Key of the state dictionary in its file. Empty if it was the whole content of the file.
    pub key: String,
    /// Prefix that was removed from the file's names, such as `module.` or `backbone.`.
    pub prefix: String,
}

/// Values of one tensor, in memory or in a file.
#[derive(Clone, Copy)]
enum Values<'s> {
    Memory(&'s Tensor),
    File(TensorReader<'s>),
}

impl Values<'_> {
    fn size(self) -> Vec<i64> {
        match self {
            Self::Memory(tensor) => tensor.size(),
            Self::File(tensor) => tensor.info().shape.iter().map(|it| it.cast_signed()).collect(),
        }
    }

    fn read(self) -> Result<Tensor> {
        match self {
            Self::Memory(tensor) => Ok(tensor.shallow_clone()),
            Self::File(tensor) => {
                let kind = loaded_kind(tensor.name(), tensor.info().dtype).map_err(|fact| {
                    FileError::Unsupported { path: tensor.path().to_owned(), fact }
                })?;
                let values = Tensor::f_empty(self.size(), (kind, Device::Cpu))?;
                TensorRead::whole(tensor, values.shallow_clone()).read()?;
                Ok(values)
            }
        }
    }
}

/// Assignment of tensors to a model.
struct Fit<'s> {
    /// Tensors of files that are read without change.
    reads: Vec<TensorRead<'s>>,
    /// Values in memory, under the model's names.
    values: StateDict,
    report: PretrainedReport,
    problems: LoadReport,
}

impl Pretrained {
    /// Returns the defaults: the architecture's rule for channels ([`ImageClassifier::input_channels`]), and the state
    /// dictionary of a `.pth` file that [`Pretrained::entry`] documents.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how the weights of the first convolution are computed if the model has another number of input channels
    /// than the weights file. Defaults to the architecture's rule ([`ImageClassifier::input_channels`]).
    #[must_use]
    pub fn channels(self, rule: InputChannels) -> Self {
        Self { channels: Some(rule), ..self }
    }

    /// Sets the key of the state dictionary in a `.pth` file. Defaults to the only one; if there are several, to the
    /// first that exists of `model`, `state_dict`, `model_ema` and `state_dict_ema`.
    #[must_use]
    pub fn entry(self, key: impl Into<String>) -> Self {
        Self { entry: Some(key.into()), ..self }
    }

    /// Loads a safetensors or `.pth` file into the model, one tensor after the other; see [`weights::read`]. Adapted
    /// tensors take additional memory.
    ///
    /// # Errors
    /// Returns the errors of [`weights::load`], and [`brigade_nn::ModelError::Mismatch`] with the report if more than
    /// the head differs, with nothing changed. [`brigade_nn::ModelError::Interrupted`] if reading fails after the
    /// checks.
    pub fn load<M: ImageClassifier>(
        &self,
        model: &mut Model<M>,
        file: impl AsRef<Path>,
    ) -> Result<PretrainedReport> {
        let file = file.as_ref();
        let weights = match &self.entry {
            Some(key) => WeightsReader::open_entry(file, Some(key))?,
            None => only_or_usual(|key| Ok(WeightsReader::open_entry(file, key)?))?,
        };
        let values: Vec<_> =
            weights.tensors().map(|tensor| (tensor.name(), Values::File(tensor))).collect();
        let mut fit = self.best_fit(model, &values)?;
        weights::read(&weights, std::mem::take(&mut fit.reads))?;
        weights.key().clone_into(&mut fit.report.key);
        fit.copy(model)
    }

    /// Loads a state dictionary into the model.
    ///
    /// # Errors
    /// [`brigade_nn::ModelError::Mismatch`] with the report if more than the head differs, with nothing changed.
    pub fn load_state_dict<M: ImageClassifier>(
        &self,
        model: &mut Model<M>,
        state: &StateDict,
    ) -> Result<PretrainedReport> {
        let values: Vec<_> =
            state.iter().map(|(name, tensor)| (name, Values::Memory(tensor))).collect();
        let mut fit = self.best_fit(model, &values)?;
        state.key().clone_into(&mut fit.report.key);
        fit.copy(model)
    }

    /// Returns the assignment with the prefix removed under which everything matches.
    fn best_fit<'s, M: ImageClassifier>(
        &self,
        model: &Model<M>,
        values: &[(&'s str, Values<'s>)],
    ) -> Result<Fit<'s>> {
        let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
        let own = model.state_dict();
        let usual = wrapper_prefix(&names, &own.names().collect::<Vec<_>>());
        let mut fit = self.fit(model.module(), &own, values, &usual)?;
        if !fit.problems.is_complete() {
            for prefix in prefix_candidates(&names) {
                let other = self.fit(model.module(), &own, values, &prefix)?;
                if other.problems.is_complete() {
                    fit = other;
                    break;
                }
            }
        }
        if fit.problems.is_complete() {
            return Ok(fit);
        }
        fit.problems.loaded = fit.report.loaded;
        Err(ModelError::Mismatch(Box::new(fit.problems)).into())
    }

    /// Compares the names that begin with `prefix`, after removing it. The others are unused, as those of a head are.
    fn fit<'s, M: ImageClassifier>(
        &self,
        module: &M,
        own: &StateDict,
        values: &[(&'s str, Values<'s>)],
        prefix: &str,
    ) -> Result<Fit<'s>> {
        let mut report =
            PretrainedReport { prefix: prefix.to_owned(), ..PretrainedReport::default() };
        let first = module.first_convolution();
        let channels = self.channels.unwrap_or_else(|| module.input_channels());
        let (mut reads, mut in_memory) = (Vec::new(), StateDict::new());
        let mut placed = HashSet::new();
        let mut problems = LoadReport::default();
        for &(full, values) in values {
            let Some(mut name) = full.strip_prefix(prefix).map(str::to_owned) else {
                report.unused.push(full.to_owned());
                continue;
            };
            if own.get(&name).is_none()
                && let Some(mapped) = module.renamed(&name)
            {
                report.renamed += 1;
                name = mapped;
            }
            let Some(into) = own.get(&name) else {
                if module.in_head(&name) {
                    report.unused.push(name);
                } else {
                    problems.unexpected.push(name);
                }
                continue;
            };
            let (wanted, found) = (into.size(), values.size());
            let fits = found == wanted;
            if !fits && module.in_head(&name) {
                continue;
            }
            match values {
                Values::File(tensor) if fits => {
                    reads.push(TensorRead::whole(tensor, into.shallow_clone()));
                }
                Values::Memory(tensor) if fits => {
                    in_memory.insert(name.as_str(), tensor.shallow_clone())?;
                }
                _ => {
                    let adapted = if same_but_for_ones(&found, &wanted) {
                        Some(values.read()?.f_reshape(&wanted)?)
                    } else if is_below(&first, &name) {
                        channels.adapted(&values.read()?, &wanted)?
                    } else {
                        module.adapted(&name, &values.read()?, &wanted)?
                    };
                    let Some(adapted) = adapted else {
                        problems.mismatched.push(brigade_nn::ShapeMismatch {
                            name,
                            in_model: wanted,
                            in_weights: found,
                        });
                        continue;
                    };
                    report.adapted.push(name.clone());
                    in_memory.insert(name.as_str(), adapted)?;
                }
            }
            if !placed.insert(name.clone()) {
                return Err(ModelError::DuplicateName { name }.into());
            }
        }
        let absent: Vec<&str> = own.names().filter(|name| !placed.contains(*name)).collect();
        for name in absent {
            if module.in_head(name) {
                report.head.push(name.to_owned());
            } else if !name.ends_with(".num_batches_tracked")
                && !problems.mismatched.iter().any(|it| it.name == name)
            {
                problems.missing.push(name.to_owned());
            }
        }
        report.loaded = placed.len();
        Ok(Fit { reads, values: in_memory, report, problems })
    }
}

impl Fit<'_> {
    /// Copies the values in memory into the model.
    fn copy<M>(self, model: &mut Model<M>) -> Result<PretrainedReport> {
        model.load_matching(&self.values)?;
        Ok(self.report)
    }
}

/// Reads a file's only state dictionary, or if there are several, the first under a key that libraries use.
pub(crate) fn read_state_dict(path: &Path) -> Result<StateDict> {
    only_or_usual(|key| match key {
        Some(key) => weights::load_entry(path, key),
        None => weights::load(path),
    })
}

/// Opens the only state dictionary of a file, or if there are several, the first under a key that libraries use.
fn only_or_usual<T>(open: impl Fn(Option<&str>) -> Result<T>) -> Result<T> {
    const USUAL: [&str; 4] = ["model", "state_dict", "model_ema", "state_dict_ema"];
    open(None).or_else(|error| {
        let usual = match error.downcast_ref() {
            Some(FileError::SeveralStateDicts { keys, .. }) => {
                USUAL.iter().find(|usual| keys.iter().any(|key| key == *usual))
            }
            _ => None,
        };
        usual.map_or(Err(error), |key| open(Some(key)))
    })
}

/// Returns `true` if the shapes differ only in dimensions of size 1.
fn same_but_for_ones(left: &[i64], right: &[i64]) -> bool {
    let real =
        |shape: &[i64]| -> Vec<i64> { shape.iter().copied().filter(|&size| size != 1).collect() };
    real(left) == real(right)
}
