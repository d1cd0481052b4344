//! Loading and saving of encoders and pretrained language models in fastai's format.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use brigade_nn::{LoadReport, Model, StateDict, weights};
use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result};
use tch::Tensor;

use super::AwdLstm;
use crate::pretrained::read_state_dict;

/// A model that contains an AWD-LSTM encoder, which can be loaded from the file of another model.
pub trait AwdLstmModel {
    /// Returns the model's encoder.
    fn encoder(&self) -> &AwdLstm;

    /// Returns the full name of the decoder, which has a row for each token. `None` if there is no decoder.
    fn decoder(&self) -> Option<String>;
}

impl AwdLstmModel for AwdLstm {
    fn encoder(&self) -> &AwdLstm {
        self
    }

    fn decoder(&self) -> Option<String> {
        None
    }
}

/// Writes the weights of the encoder of a language model or of a classifier, like fastai's `save_encoder`: to a `.pth`
/// file for `learn.load_encoder`, or to safetensors if the file has that extension.
///
/// ```
/// use brigade_models::{
///     AwdLstmOptions, LanguageModel, LanguageModelOptions, TextClassifier, TextClassifierOptions,
///     load_encoder, save_encoder,
/// };
/// use brigade_nn::Model;
///
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
/// let small = AwdLstmOptions { embedding: 8, hidden: 12, ..AwdLstmOptions::language_model() };
/// let options = LanguageModelOptions { encoder: small, ..Default::default() };
/// let language_model = Model::new(|path| LanguageModel::new(path, 26, &options))?;
/// save_encoder(&language_model, "encoder.pth")?;
///
/// let options = TextClassifierOptions { encoder: small, ..Default::default() };
/// let mut classifier = Model::new(|path| TextClassifier::new(path, 26, 3, &options))?;
/// assert_eq!(load_encoder(&mut classifier, "encoder.pth")?, 14);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns the errors of [`weights::save`].
pub fn save_encoder<M: AwdLstmModel>(model: &Model<M>, file: impl AsRef<Path>) -> Result<()> {
    write_encoder(&encoder_state(&model.state_dict(), model.module().encoder().name())?, file)
}

/// Writes an encoder's state dictionary, from [`encoder_state`], to a file, like [`save_encoder`].
///
/// # Errors
/// Returns the errors of [`weights::save`].
pub fn write_encoder(state: &StateDict, file: impl AsRef<Path>) -> Result<()> {
    let file = file.as_ref();
    if file.extension().is_some_and(|extension| extension == "safetensors") {
        weights::save(state, file)
    } else {
        weights::save_pth(state, file)
    }
}

/// Loads an encoder that [`save_encoder`] or fastai's `save_encoder` wrote into the model; the other layers stay
/// unchanged. Returns the number of names that were loaded. It does not freeze the encoder, unlike fastai's method; the
/// Learner does that.
///
/// # Errors
/// Returns the errors of [`weights::load`], and [`brigade_nn::ModelError::Mismatch`] if the encoder differs in a name
/// or a shape, with nothing changed.
pub fn load_encoder<M: AwdLstmModel>(
    model: &mut Model<M>,
    file: impl AsRef<Path>,
) -> Result<usize> {
    let state = read_encoder(file)?;
    let loaded = without_copies(&state).len();
    let whole = with_encoder(&model.state_dict(), model.module().encoder().name(), &state)?;
    model.load_state_dict(&whole)?;
    Ok(loaded)
}

/// Reads an encoder's state dictionary from a file, for [`with_encoder`].
///
/// # Errors
/// Returns the errors of [`weights::load`].
pub fn read_encoder(file: impl AsRef<Path>) -> Result<StateDict> {
    read_state_dict(file.as_ref())
}

/// Returns the state dictionary of the encoder with the full name `encoder`, from that of the whole model.
///
/// # Errors
/// [`brigade_torch::ErrorKind::InvalidArgument`] if there is nothing of that name.
pub fn encoder_state(whole: &StateDict, encoder: &str) -> Result<StateDict> {
    let mut state = StateDict::new();
    for (name, tensor) in whole.iter() {
        if let Some(name) = below(encoder, name) {
            state.insert(name, tensor.shallow_clone())?;
        }
    }
    if state.is_empty() {
        Err(Error::invalid_argument(format!("the model has no encoder at `{encoder}`")))
    } else {
        Ok(state)
    }
}

/// Replaces the encoder with the full name `encoder` in a whole model's state dictionary, for
/// [`Model::load_state_dict`], which checks that names and shapes match.
///
/// # Errors
/// [`brigade_nn::ModelError::DuplicateName`] for a name that occurs twice, which is not possible with dictionaries of
/// models and files.
pub fn with_encoder(whole: &StateDict, encoder: &str, values: &StateDict) -> Result<StateDict> {
    let mut placed = StateDict::new();
    for (name, tensor) in without_copies(values) {
        let name = if encoder.is_empty() { name.to_owned() } else { format!("{encoder}.{name}") };
        placed.insert(name, tensor.shallow_clone())?;
    }
    replaced(whole, placed, |name| below(encoder, name).is_some())
}

/// A pretrained language model's weights with their vocabulary: fastai's `.pth` file with the tokens of the `.pkl` file
/// beside it.
///
/// ```
/// use brigade_models::{AwdLstmOptions, LanguageModel, LanguageModelOptions, PretrainedLanguageModel};
/// use brigade_nn::Model;
///
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
/// let small = AwdLstmOptions { embedding: 8, hidden: 12, ..AwdLstmOptions::language_model() };
/// let options = LanguageModelOptions { encoder: small, ..Default::default() };
/// let words = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
/// let old = Model::new(|path| LanguageModel::new(path, 3, &options))?;
/// old.save_weights("wt103.safetensors")?;
///
/// let vocabulary = words(&["xxunk", "the", "film"]);
/// let pretrained = PretrainedLanguageModel::load("wt103.safetensors", vocabulary)?;
/// let mut model = Model::new(|path| LanguageModel::new(path, 4, &options))?;
/// let report = pretrained.load_into(&mut model, &words(&["xxunk", "xxpad", "film", "the"]))?;
/// assert_eq!(report.unknown, ["xxpad"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PretrainedLanguageModel {
    state: StateDict,
    vocabulary: Vec<String>,
}

/// Report of [`PretrainedLanguageModel::load_into`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EmbeddingReport {
    /// Number of names that were loaded from the file.
    pub loaded: usize,
    /// Number of tokens of the new vocabulary that the old one has.
    pub known: usize,
    /// Tokens that the old vocabulary does not contain. Their embedding is the mean of all rows.
    pub unknown: Vec<String>,
    /// Names of the file that the model does not have, such as those of the decoder if the model is a classifier.
    pub unused: Vec<String>,
}

/// Names in fastai's files of language models.
const WORDS: &str = "0.encoder.weight";
const WORDS_AGAIN: &str = "0.encoder_dp.emb.weight";
const DECODER_WEIGHT: &str = "1.decoder.weight";
const DECODER_BIAS: &str = "1.decoder.bias";

impl PretrainedLanguageModel {
    /// Creates a pretrained model from a language model's state dictionary, and the token of each row of its embedding.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if the numbers of rows and tokens differ, or the embedding is
    /// missing.
    pub fn new(state: StateDict, vocabulary: Vec<String>) -> Result<Self> {
        let rows = |name: &str| state.get(name).and_then(|tensor| tensor.size().first().copied());
        if state.get(WORDS).is_none_or(|table| table.dim() != 2) {
            return Err(Error::invalid_argument(format!(
                "the weights have no table of words `{WORDS}`: they are not a language model of AWD-LSTM, which \
                 has {}",
                state.names().take(5).collect::<Vec<_>>().join(", ")
            )));
        }
        for name in [WORDS, DECODER_BIAS] {
            match rows(name) {
                Some(rows) if rows != vocabulary.len() as i64 => {
                    return Err(Error::invalid_argument(format!(
                        "a vocabulary of {} does not fit the weights, whose `{name}` has {}: take the vocabulary \
                         that they were trained with",
                        counted(vocabulary.len(), "word"),
                        counted(rows, "row")
                    )));
                }
                _ => {}
            }
        }
        Ok(Self { state, vocabulary })
    }

    /// Reads the weights from a `.pth` file of fastai, which may also contain an optimizer, or from safetensors.
    ///
    /// # Errors
    /// Returns the errors of [`weights::load`] and of [`PretrainedLanguageModel::new`].
    pub fn load(file: impl AsRef<Path>, vocabulary: Vec<String>) -> Result<Self> {
        Self::new(read_state_dict(file.as_ref())?, vocabulary)
    }

    /// Returns the weights with the embedding's rows rearranged for another vocabulary. A token that the old vocabulary
    /// does not contain gets the mean of all rows (fastai's `match_embeds`), and is listed in the report.
    ///
    /// # Errors
    /// Returns an error of libtorch if memory runs out.
    pub fn matched(&self, vocabulary: &[String]) -> Result<(StateDict, EmbeddingReport)> {
        // For a token that occurs twice, as padding does, the last row is used, as in fastai.
        let old: HashMap<&str, i64> =
            (0..).zip(&self.vocabulary).map(|(row, word)| (word.as_str(), row)).collect();
        let mean_row = self.vocabulary.len() as i64;
        let mut report = EmbeddingReport::default();
        let mut rows = Vec::with_capacity(vocabulary.len());
        for word in vocabulary {
            match old.get(word.as_str()) {
                Some(&row) => {
                    report.known += 1;
                    rows.push(row);
                }
                None => {
                    report.unknown.push(word.clone());
                    rows.push(mean_row);
                }
            }
        }
        let rows = Tensor::from_slice(&rows);
        let of_rows = |values: &Tensor| -> Result<Tensor> {
            let mean = values.f_mean_dim([0i64].as_slice(), true, values.kind())?;
            let extended = Tensor::f_cat(&[values, &mean], 0)?;
            Ok(extended.f_index_select(0, &rows.f_to_device(values.device())?)?)
        };
        let mut state = StateDict::new();
        for (name, tensor) in self.state.iter() {
            let tensor = match name {
                WORDS | WORDS_AGAIN | DECODER_WEIGHT | DECODER_BIAS => of_rows(tensor)?,
                _ => tensor.shallow_clone(),
            };
            state.insert(name, tensor)?;
        }
        Ok((state, report))
    }

    /// Loads the weights into a model with this vocabulary: all of them into a language model, those of the encoder
    /// into a classifier. Names have to match; fastai copies by position, whatever the names are.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if the vocabulary does not have the model's size, and
    /// [`brigade_nn::ModelError::Mismatch`] if weights do not match, with nothing changed.
    pub fn load_into<M: AwdLstmModel>(
        &self,
        model: &mut Model<M>,
        vocabulary: &[String],
    ) -> Result<EmbeddingReport> {
        let encoder = model.module().encoder().name().to_owned();
        let decoder = model.module().decoder();
        let rows = model.module().encoder().embedding().size().first().copied().unwrap_or(0);
        if rows != vocabulary.len() as i64 {
            return Err(Error::invalid_argument(format!(
                "a vocabulary of {} does not fit the model, which has {rows}",
                counted(vocabulary.len(), "word")
            )));
        }
        let (state, mut report) = self.matched(vocabulary)?;
        let mut placed = StateDict::new();
        for (name, tensor) in without_copies(&state) {
            let place = match (name.strip_prefix("0."), name.strip_prefix("1.decoder."), &decoder) {
                (Some(rest), ..) if encoder.is_empty() => rest.to_owned(),
                (Some(rest), ..) => format!("{encoder}.{rest}"),
                (_, Some(rest), Some(decoder)) => format!("{decoder}.{rest}"),
                (_, Some(_), None) => {
                    report.unused.push(name.to_owned());
                    continue;
                }
                // Not a name of an AWD-LSTM language model: loading refuses it by this name.
                _ => name.to_owned(),
            };
            placed.insert(place, tensor.shallow_clone())?;
        }
        report.loaded = placed.len();
        let is_replaced = |name: &str| {
            below(&encoder, name).is_some()
                || decoder.as_ref().is_some_and(|decoder| below(decoder, name).is_some())
        };
        let _: LoadReport =
            model.load_state_dict(&replaced(&model.state_dict(), placed, is_replaced)?)?;
        Ok(report)
    }
}

/// Returns a whole model's values with some replaced.
fn replaced(
    whole: &StateDict,
    mut values: StateDict,
    chosen: impl Fn(&str) -> bool,
) -> Result<StateDict> {
    // Other names of replaced tensors, such as that of a decoder tied to the embedding.
    let old: HashSet<_> = whole
        .iter()
        .filter(|(name, _)| chosen(name))
        .map(|(_, tensor)| tensor.data_ptr())
        .collect();
    for (name, tensor) in whole.iter() {
        if !chosen(name) && !old.contains(&tensor.data_ptr()) {
            values.insert(name, tensor.shallow_clone())?;
        }
    }
    Ok(values)
}

/// Returns names and values without the weights that old versions of fastai saved in addition to the raw ones from
/// which they are computed (fastai's `clean_raw_keys`): `rnns.0.module.weight_hh_l0` beside `rnns.0.weight_hh_l0_raw`.
fn without_copies(state: &StateDict) -> Vec<(&str, &Tensor)> {
    let is_copy = |name: &str| {
        let parts: Vec<&str> = name.split('.').collect();
        parts.iter().rposition(|part| *part == "module").is_some_and(|module| {
            let raw = [&parts[..module], &parts[module + 1..]].concat().join(".");
            state.get(&format!("{raw}_raw")).is_some()
        })
    };
    state.iter().filter(|(name, _)| !is_copy(name)).collect()
}

/// Returns the name relative to a module; all names are below the root.
fn below<'n>(module: &str, name: &'n str) -> Option<&'n str> {
    if module.is_empty() { Some(name) } else { name.strip_prefix(module)?.strip_prefix('.') }
}
