//! Learners of texts, like those of fastai's `language_model_learner` and `text_classifier_learner`.

mod loss;
mod recurrent;
mod text_learner;

use std::path::PathBuf;

use brigade_learn::Learner;
use brigade_models::{
    AwdLstmModel, LanguageModel, LanguageModelOptions, PretrainedLanguageModel, RecurrentState,
    TextClassifier, TextClassifierOptions,
};
use brigade_nn::{LayerGroups, Model};
use brigade_tokens::Vocabulary;
use brigade_torch::{Error, Result};
use brigade_train::Accelerator;
use tch::{Kind, Tensor};

use crate::error::TextError;
use crate::{TextCodec, TextData};

pub use self::recurrent::{ModelResetter, RnnRegularizer};
pub use self::text_learner::{Generate, TextLearner};

use self::loss::HeadLoss;

/// Files of a pretrained language model of fastai: the weights, and the vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PretrainedText {
    /// Weights file: a `.pth` file of fastai or Brigade, or safetensors.
    pub weights: PathBuf,
    /// Vocabulary file: fastai's `.pkl` file, which is read without executing pickle code, or JSON.
    pub vocabulary: PathBuf,
}

impl PretrainedText {
    /// Creates the pair of a weights file and a vocabulary file.
    pub fn new(weights: impl Into<PathBuf>, vocabulary: impl Into<PathBuf>) -> Self {
        Self { weights: weights.into(), vocabulary: vocabulary.into() }
    }
}

/// Options of [`language_model_learner`].
#[derive(Clone, Debug, PartialEq)]
pub struct LanguageLearnerOptions {
    /// Options of the model. Defaults to fastai's AWD-LSTM.
    pub model: LanguageModelOptions,
    /// Factor of the model's dropout probabilities. Defaults to 1.
    pub drop_mult: f64,
    /// Weight of activation regularisation (AR). Defaults to 2.
    pub alpha: f64,
    /// Weight of temporal activation regularisation (TAR). Defaults to 1.
    pub beta: f64,
    /// Label smoothing: the share of each target that is spread over all tokens. Defaults to 0.
    pub label_smoothing: f64,
    /// Kind (dtype) of the parameters. Defaults to float32.
    pub kind: Kind,
    /// Pre-trained weights. Everything but the embeddings is then frozen. Defaults to `None`: random initial values.
    pub pretrained: Option<PretrainedText>,
}

impl Default for LanguageLearnerOptions {
    fn default() -> Self {
        Self {
            model: LanguageModelOptions::default(),
            drop_mult: 1.0,
            alpha: 2.0,
            beta: 1.0,
            label_smoothing: 0.0,
            kind: Kind::Float,
            pretrained: None,
        }
    }
}

/// Options of [`text_classifier_learner`].
#[derive(Clone, Debug, PartialEq)]
pub struct TextLearnerOptions {
    /// Options of the model. Defaults to fastai's AWD-LSTM.
    pub model: TextClassifierOptions,
    /// Factor of the encoder's dropout probabilities. Defaults to 0.5.
    pub drop_mult: f64,
    /// Weight of activation regularisation (AR). Defaults to 2.
    pub alpha: f64,
    /// Weight of temporal activation regularisation (TAR). Defaults to 1.
    pub beta: f64,
    /// Number of the model's outputs, for data without classes. Defaults to 1 for numbers.
    pub outputs: Option<i64>,
    /// Kind (dtype) of the parameters. Defaults to float32.
    pub kind: Kind,
    /// Pre-trained language model whose encoder is used. Everything but the head is then frozen. Defaults to `None`:
    /// random initial values.
    pub pretrained: Option<PretrainedText>,
}

impl Default for TextLearnerOptions {
    fn default() -> Self {
        Self {
            model: TextClassifierOptions::default(),
            drop_mult: 0.5,
            alpha: 2.0,
            beta: 1.0,
            outputs: None,
            kind: Kind::Float,
            pretrained: None,
        }
    }
}

/// fastai's momenta for texts.
const MOMENTA: [f64; 3] = [0.8, 0.7, 0.8];

/// Creates a Learner of an AWD-LSTM language model, with fastai's parameter groups, momenta of cycles, and AR and TAR.
/// The hidden state is kept from batch to batch and is part of checkpoints.
///
/// In training the loss is computed in parts, without the logits of the whole batch, so that the predictions in
/// [`Learner::state`] are the decoder's input, unless metrics of training batches are on ([`Learner::train_metrics`]).
/// Metrics get logits with the vocabulary in the last dimension: use [`ClassesLast`](brigade_metrics::ClassesLast).
///
/// ```
/// use brigade_metrics::{Accuracy, ClassesLast, Perplexity};
/// use brigade_text::{Generate, LanguageLearnerOptions, TextLearner, TextLoaders, language_model_learner};
/// use brigade_train::Accelerator;
///
/// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
/// let texts = (0..40).map(|number| (format!("film {} is a good film", number % 5), "none"));
/// let data = TextLoaders::from_texts(texts).language_model().seq_len(8).loaders(&accelerator, 4)?;
/// let mut options = LanguageLearnerOptions::default();
/// (options.model.encoder.embedding, options.model.encoder.hidden) = (16, 24);
/// let mut learner = language_model_learner(&accelerator, data, options)?
///     .metrics((ClassesLast(Accuracy), ClassesLast(Perplexity)))
///     .quiet(true);
/// learner.fit_one_cycle(1, 1e-2, ())?;
/// let text = learner.generate("film 1 is", 3, &Generate::default())?;
/// assert!(text.starts_with("film 1 is"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails if the pretrained files cannot be read, or do not match the model or each other.
pub fn language_model_learner(
    accelerator: &Accelerator,
    data: TextData,
    options: LanguageLearnerOptions,
) -> Result<Learner> {
    let LanguageLearnerOptions {
        mut model,
        drop_mult,
        alpha,
        beta,
        label_smoothing,
        kind,
        pretrained,
    } = options;
    if let Some(padding) = padding(&data) {
        model.encoder.padding = padding;
    }
    let (words, model) = (data.vocabulary.len() as i64, model.drop_mult(drop_mult));
    let builder = Model::builder().kind(kind);
    let mut model = builder.build(|path| LanguageModel::new(path, words, &model))?;
    let is_pretrained = load_pretrained(&mut model, pretrained, &data.vocabulary)?;
    let (state, head) = (model.module().state().clone(), model.module().head().clone());
    let (loss, fuse) = HeadLoss::new(&head, label_smoothing);
    let learner = made(accelerator, data, model, &state, [alpha, beta], is_pretrained)?;
    Ok(learner.loss(loss).with(fuse))
}

/// Creates a Learner of an AWD-LSTM text classifier, with fastai's parameter groups, momenta of cycles, and AR and TAR.
///
/// ```
/// use brigade_metrics::Accuracy;
/// use brigade_learn::Item;
/// use brigade_text::{TextLearnerOptions, TextLoaders, text_classifier_learner};
/// use brigade_train::Accelerator;
///
/// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
/// let review = |number: usize| match number % 2 {
///     0 => (format!("a good film, number {number}"), "pos"),
///     _ => (format!("a bad film, number {number}"), "neg"),
/// };
/// let data = TextLoaders::from_texts((0..40).map(review)).loaders(&accelerator, 4)?;
/// let mut options = TextLearnerOptions::default();
/// (options.model.encoder.embedding, options.model.encoder.hidden) = (16, 24);
/// let mut learner = text_classifier_learner(&accelerator, data, options)?.metrics(Accuracy).quiet(true);
/// learner.fit_one_cycle(1, 1e-2, ())?;
/// let opinion = learner.predict(Item::Text("what a good film".to_owned()))?;
/// assert!(["pos", "neg"].contains(&opinion.class.unwrap_or_default().as_str()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns the same errors as [`language_model_learner`], and [`brigade_torch::ErrorKind::InvalidArgument`] if the
/// number of outputs is not known.
pub fn text_classifier_learner(
    accelerator: &Accelerator,
    data: TextData,
    options: TextLearnerOptions,
) -> Result<Learner> {
    let TextLearnerOptions { mut model, drop_mult, alpha, beta, outputs, kind, pretrained } =
        options;
    let classes = data.loaders.class_names().map(|names| names.len() as i64);
    let outputs = outputs.or(classes).ok_or_else(|| {
        Error::invalid_argument(
            "text_classifier_learner: the number of the model's outputs is unknown, because the data \
             have no classes; set `outputs`, to 1 for numbers",
        )
    })?;
    if let Some(padding) = padding(&data) {
        model.encoder.padding = padding;
    }
    let (words, model) = (data.vocabulary.len() as i64, model.drop_mult(drop_mult));
    let builder = Model::builder().kind(kind);
    let mut model = builder.build(|path| TextClassifier::new(path, words, outputs, &model))?;
    let is_pretrained = load_pretrained(&mut model, pretrained, &data.vocabulary)?;
    let state = model.module().state().clone();
    made(accelerator, data, model, &state, [alpha, beta], is_pretrained)
}

/// Creates the Learner with the parts that both kinds share.
fn made<M>(
    accelerator: &Accelerator,
    data: TextData,
    model: Model<M>,
    state: &RecurrentState,
    [alpha, beta]: [f64; 2],
    is_pretrained: bool,
) -> Result<Learner>
where
    M: LayerGroups + for<'a> brigade_nn::Module<&'a Tensor, Output = Tensor> + 'static,
{
    let groups = model.param_groups()?;
    let mut learner = Learner::new(accelerator, data.loaders, model)?
        .momenta(MOMENTA)
        .split_parameters(groups)?
        .with((ModelResetter::new(state), RnnRegularizer::new(state, alpha, beta)));
    if is_pretrained {
        learner.freeze()?;
    }
    Ok(learner)
}

/// Returns the id of the data's padding token.
fn padding(data: &TextData) -> Option<i64> {
    TextCodec::of(&data.loaders)?.padding()
}

/// Loads pretrained weights, if there are any, with rows matched by their tokens.
fn load_pretrained<M: AwdLstmModel>(
    model: &mut Model<M>,
    pretrained: Option<PretrainedText>,
    vocabulary: &Vocabulary,
) -> Result<bool> {
    let Some(PretrainedText { weights, vocabulary: file }) = pretrained else { return Ok(false) };
    let owned =
        |vocabulary: &Vocabulary| vocabulary.tokens().map(str::to_owned).collect::<Vec<_>>();
    let old = Vocabulary::load(file).map_err(TextError::from)?;
    let report = PretrainedLanguageModel::load(weights, owned(&old))?
        .load_into(model, &owned(vocabulary))?;
    tracing::info!(
        known = report.known,
        unknown = report.unknown.len(),
        "pretrained weights matched by token; unknown tokens begin as the mean of all rows"
    );
    Ok(true)
}
