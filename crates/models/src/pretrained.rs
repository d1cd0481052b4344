//! Weights files of torchvision, timm and fastai as people have them on disk.

use std::path::Path;

use brigade_checkpoint::{Error as FileError, prefix_candidates, wrapper_prefix};
use brigade_nn::{LoadReport, Model, ModelError, StateDict, weights};
use brigade_torch::Result;
use tch::Tensor;

use crate::classifier::is_below;
use crate::{ImageClassifier, InputChannels};

/// How to load a weights file of another library into an image classifier whose number of classes or
/// channels may be another one.
///
/// - A head for another number of classes is left as it was drawn.
/// - A first convolution for another number of channels is computed: [`InputChannels`].
/// - Names that other libraries or older versions use are mapped: [`ImageClassifier::renamed`].
/// - Positions of a vision transformer for another size of image are interpolated.
/// - What wrappers have put before all names (`module.`, `_orig_mod.`) is taken off. They and those of
///   other modules (`model.`, `backbone.`) are taken off, too, where the whole model fits the names that have them; the
///   other names are unused then.
/// - Counters of batches (`num_batches_tracked`), which old files lack, stay 0.
///
/// Everything else has to fit, or nothing is changed.
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

/// What [`Pretrained::load`] has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PretrainedReport {
    /// The number of tensors that have the file's values.
    pub loaded: usize,
    /// Parameters of the head that were left as they were, since the file has another number of classes or
    /// no head.
    pub head: Vec<String>,
    /// Tensors that were computed from the file's, for another number of channels or size of image.
    pub adapted: Vec<String>,
    /// The number of names that were mapped.
    pub renamed: usize,
    /// Names of the file that are a head's which the model lacks, and those without `prefix`.
    pub unused: Vec<String>,
    /// The key of the state dictionary in its file; empty where it was all of the file.
    pub key: String,
    /// What was taken off the file's names, such as `module.` or `backbone.`.
    pub prefix: String,
}

/// A file's values under the model's names.
struct Fit {
    values: StateDict,
    report: PretrainedReport,
    problems: LoadReport,
}

impl Pretrained {
    /// Returns the defaults: the architecture's rule for channels ([`ImageClassifier::input_channels`]), and of a
    /// `.pth` file the state dictionary that [`Pretrained::entry`] says.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the rule for another number of channels.
    #[must_use]
    pub fn channels(self, rule: InputChannels) -> Self {
        Self { channels: Some(rule), ..self }
    }

    /// Takes the state dictionary at this key of a `.pth` file. Defaults to the only one; of several to the first of
    /// `model`, `state_dict`, `model_ema` and `state_dict_ema` that is there.
    #[must_use]
    pub fn entry(self, key: impl Into<String>) -> Self {
        Self { entry: Some(key.into()), ..self }
    }

    /// Reads a safetensors or `.pth` file into the model.
    ///
    /// # Errors
    /// Those of [`weights::load`], and [`brigade_nn::ModelError::Mismatch`] with the report where more differs than the
    /// head: nothing was changed.
    pub fn load<M: ImageClassifier>(
        &self,
        model: &mut Model<M>,
        file: impl AsRef<Path>,
    ) -> Result<PretrainedReport> {
        let state = self.read(file.as_ref())?;
        self.load_state_dict(model, &state)
    }

    /// Loads a state dictionary into the model.
    ///
    /// # Errors
    /// [`brigade_nn::ModelError::Mismatch`] with the report where more differs than the head: nothing was changed.
    pub fn load_state_dict<M: ImageClassifier>(
        &self,
        model: &mut Model<M>,
        state: &StateDict,
    ) -> Result<PretrainedReport> {
        let names: Vec<&str> = state.names().collect();
        let own = model.state_dict();
        let usual = wrapper_prefix(&names, &own.names().collect::<Vec<_>>());
        let mut fit = self.fit(model.module(), &own, state, &usual)?;
        if !fit.problems.is_complete() {
            for prefix in prefix_candidates(&names) {
                let other = self.fit(model.module(), &own, state, &prefix)?;
                if other.problems.is_complete() {
                    fit = other;
                    break;
                }
            }
        }
        if !fit.problems.is_complete() {
            fit.problems.loaded = fit.values.len();
            return Err(ModelError::Mismatch(Box::new(fit.problems)).into());
        }
        fit.report.loaded = model.load_matching(&fit.values)?.loaded;
        state.key().clone_into(&mut fit.report.key);
        Ok(fit.report)
    }

    /// Compares the names that begin with `prefix`, without it. The others are unused, as a head is.
    fn fit<M: ImageClassifier>(
        &self,
        module: &M,
        own: &StateDict,
        state: &StateDict,
        prefix: &str,
    ) -> Result<Fit> {
        let mut report =
            PretrainedReport { prefix: prefix.to_owned(), ..PretrainedReport::default() };
        let first = module.first_convolution();
        let channels = self.channels.unwrap_or_else(|| module.input_channels());
        let mut fitting = StateDict::new();
        let mut problems = LoadReport::default();
        for (full, values) in state.iter() {
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
            let Some(wanted) = own.get(&name).map(Tensor::size) else {
                if module.in_head(&name) {
                    report.unused.push(name);
                } else {
                    problems.unexpected.push(name);
                }
                continue;
            };
            let values = if values.size() == wanted {
                values.shallow_clone()
            } else if module.in_head(&name) {
                continue;
            } else {
                let is_first = is_below(&first, &name);
                let adapted = if same_but_for_ones(&values.size(), &wanted) {
                    Some(values.f_reshape(&wanted)?)
                } else if is_first {
                    channels.adapted(values, &wanted)?
                } else {
                    module.adapted(&name, values, &wanted)?
                };
                let Some(adapted) = adapted else {
                    problems.mismatched.push(brigade_nn::ShapeMismatch {
                        name,
                        in_model: wanted,
                        in_weights: values.size(),
                    });
                    continue;
                };
                report.adapted.push(name.clone());
                adapted
            };
            fitting.insert(name, values)?;
        }
        let absent: Vec<&str> = own.names().filter(|name| fitting.get(name).is_none()).collect();
        for name in absent {
            if module.in_head(name) {
                report.head.push(name.to_owned());
            } else if !name.ends_with(".num_batches_tracked")
                && !problems.mismatched.iter().any(|it| it.name == name)
            {
                problems.missing.push(name.to_owned());
            }
        }
        Ok(Fit { values: fitting, report, problems })
    }

    fn read(&self, path: &Path) -> Result<StateDict> {
        match &self.entry {
            Some(entry) => weights::load_entry(path, entry),
            None => read_state_dict(path),
        }
    }
}

/// Reads a file's only state dictionary; of several the first under a key that libraries use.
pub(crate) fn read_state_dict(path: &Path) -> Result<StateDict> {
    const USUAL: [&str; 4] = ["model", "state_dict", "model_ema", "state_dict_ema"];
    weights::load(path).or_else(|error| {
        let usual = match error.downcast_ref() {
            Some(FileError::SeveralStateDicts { keys, .. }) => {
                USUAL.iter().find(|usual| keys.iter().any(|key| key == *usual))
            }
            _ => None,
        };
        usual.map_or(Err(error), |key| weights::load_entry(path, key))
    })
}

/// Shapes that differ in dimensions of one element only.
fn same_but_for_ones(left: &[i64], right: &[i64]) -> bool {
    let real =
        |shape: &[i64]| -> Vec<i64> { shape.iter().copied().filter(|&size| size != 1).collect() };
    real(left) == real(right)
}
