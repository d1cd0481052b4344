//! Texts by the golden file's formula, and Learners with its weights.

use std::sync::Arc;

use brigade_data::DataLoader;
use brigade_learn::loss::CrossEntropy;
use brigade_learn::{Learner, Loaders};
use brigade_metrics::{Accuracy, ClassesLast, Perplexity};
use brigade_models::{AwdLstmOptions, LanguageModelOptions, TextClassifierOptions};
use brigade_testkit::World;
use brigade_text::{
    LabelledTexts, LanguageLearnerOptions, LanguageModelData, Padding, SortedSampler, TextCodec,
    TextData, TextLearnerOptions, language_model_learner, text_classifier_learner,
};
use brigade_tokens::{FastaiTokenizer, SPECIAL_TOKENS, Vocabulary};
use brigade_train::Accelerator;
use tch::{Kind, Tensor};

use crate::fill::uniform_tensor;

pub(crate) const WORDS: usize = 26;

/// A process without others, whatever the environment says.
pub(crate) fn alone() -> Accelerator {
    Accelerator::builder().world(World::alone()).cpu(true).quiet(true).build().unwrap()
}

/// This rank of the group that the environment describes.
pub(crate) fn joined() -> Accelerator {
    Accelerator::builder().cpu(true).quiet(true).build().unwrap()
}

/// Texts of these lengths, the first one with this number.
pub(crate) fn texts(first: usize, lengths: &[usize]) -> Vec<Vec<i64>> {
    let token = |text: usize, at: usize| 2 + ((5 * text + 3 * at + at / 4) % (WORDS - 2)) as i64;
    let text = |(text, length): (usize, &usize)| (0..*length).map(|at| token(text, at)).collect();
    (first..).zip(lengths).map(text).collect()
}

fn data(loaders: Loaders) -> TextData {
    let others = (SPECIAL_TOKENS.len()..WORDS).map(|number| format!("w{number}"));
    let tokens = SPECIAL_TOKENS.iter().map(|token| (*token).to_owned()).chain(others);
    let vocabulary = Arc::new(Vocabulary::new(tokens).unwrap());
    let tokenizer = Arc::new(FastaiTokenizer::new());
    let codec = TextCodec::new(tokenizer.clone(), Arc::clone(&vocabulary)).pad_id(Some(1));
    TextData { loaders: loaders.codec(codec), vocabulary, tokenizer, classes: None }
}

/// Streams of the texts, in `rows` rows of all ranks together.
pub(crate) fn language_data(
    accelerator: &Accelerator,
    train: &[usize],
    valid: &[usize],
    rows: usize,
    seq_len: usize,
) -> TextData {
    let loader = |texts| {
        let batch = rows / accelerator.processes().num_processes();
        let data = LanguageModelData::new(texts, rows, seq_len).unwrap();
        DataLoader::new(data).batch_size(batch).threads(0)
    };
    let (train, valid) = (loader(texts(0, train)), loader(texts(100, valid)));
    data(Loaders::new(train, valid).unwrap().loss(ClassesLast(CrossEntropy::default())))
}

/// Texts with a class each, the longest first.
pub(crate) fn labelled_data(
    accelerator: &Accelerator,
    train: &[usize],
    valid: &[usize],
    batch: usize,
    seq_len: usize,
    classes: usize,
) -> TextData {
    let loader = |first, lengths: &[usize], batch| {
        let label = |(index, length): (usize, &usize)| ((index * index + length) % classes) as i64;
        let labels: Vec<i64> = lengths.iter().enumerate().map(label).collect();
        let padding = Padding::chunks(seq_len).id(1);
        let data = LabelledTexts::new(texts(first, lengths), labels, padding).unwrap();
        let sampler = SortedSampler::longest_first(data.lengths());
        DataLoader::new(data).batch_size(batch).sampler(sampler).threads(0)
    };
    let train = loader(0, train, batch / accelerator.processes().num_processes()).drop_last(true);
    let loaders = Loaders::new(train, loader(100, valid, batch)).unwrap();
    data(loaders.classes((0..classes).map(|class| class.to_string())))
}

/// The sizes of the golden file's models, without dropout.
fn sizes(of: AwdLstmOptions) -> AwdLstmOptions {
    AwdLstmOptions { embedding: 8, hidden: 12, ..of }.drop_mult(0.0)
}

pub(crate) fn language_options() -> LanguageLearnerOptions {
    let encoder = sizes(AwdLstmOptions::language_model());
    let model = LanguageModelOptions { encoder, ..Default::default() };
    LanguageLearnerOptions { model, ..Default::default() }
}

pub(crate) fn classifier_options(seq_len: usize) -> TextLearnerOptions {
    let model = TextClassifierOptions {
        encoder: sizes(AwdLstmOptions::classifier()),
        hidden: vec![6],
        dropout: Some(vec![0.0]),
        seq_len: seq_len as i64,
        fastai_last: true,
        ..Default::default()
    };
    TextLearnerOptions { model, ..Default::default() }
}

/// Fills the parameters by the golden file's recipe, with streams greater by `offset`.
pub(crate) fn fill(learner: &Learner, offset: u64) {
    let _without_autograd = tch::no_grad_guard();
    for (stream, it) in learner.parameters().into_iter().enumerate() {
        let size = it.tensor.size();
        let (low, high) = match size.len() {
            1 if it.name.ends_with("weight") => (0.8, 1.2),
            1 => (-0.1, 0.1),
            _ => {
                let row: i64 = size[1..].iter().product();
                let limit = (9.0 / row as f64).sqrt();
                (-limit, limit)
            }
        };
        let values = uniform_tensor(&size, low, high, stream as u64 + offset);
        it.tensor.shallow_clone().copy_(&values);
    }
}

pub(crate) fn language_learner(
    accelerator: &Accelerator,
    data: TextData,
    options: LanguageLearnerOptions,
) -> Learner {
    let learner = language_model_learner(accelerator, data, options).unwrap();
    fill(&learner, 0);
    learner.metrics((ClassesLast(Accuracy), ClassesLast(Perplexity))).quiet(true)
}

pub(crate) fn classifier_learner(
    accelerator: &Accelerator,
    data: TextData,
    options: TextLearnerOptions,
) -> Learner {
    let learner = text_classifier_learner(accelerator, data, options).unwrap();
    fill(&learner, 0);
    learner.metrics(Accuracy).quiet(true)
}

/// The sum and the sum of absolute values.
pub(crate) fn sums(tensor: &Tensor) -> [f64; 2] {
    let values = tensor.to_kind(Kind::Double);
    [values.sum(Kind::Double), values.abs().sum(Kind::Double)].map(|it| it.double_value(&[]))
}
