//! Loaders of texts from folders, tables and files of lines.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use brigade_data::{BatchedDataset, DataLoader};
use brigade_learn::Loaders;
use brigade_learn::loss::{BceWithLogits, CrossEntropy};
use brigade_metrics::{ClassesLast, Mse};
use brigade_tokens::{
    CsvOptions, FastaiTokenizer, FolderOptions, LinesOptions, TextSource, TokenCache, Tokenizer,
    Vocabulary, VocabularyOptions,
};
use brigade_torch::Result;
use brigade_train::Accelerator;
use tch::Tensor;

use crate::Categories;
use crate::codec::TextCodec;

mod found;
mod make;

/// Target of a text.
#[derive(Clone, Debug)]
pub enum TextTarget {
    /// A single class per text, `i64 [rows]`: fastai's `CategoryBlock`. The classes are the given ones, or the sorted
    /// labels of the training texts.
    Category(Option<Categories>),
    /// Any number of classes, `f32 [rows, classes]` of 0 and 1: fastai's `MultiCategoryBlock`.
    MultiCategory {
        /// Classes in their order. Defaults to the sorted classes of the training texts.
        classes: Option<Categories>,
        /// Separator between the classes of a label.
        separator: String,
    },
    /// A regression target per text, `f32 [rows]`: fastai's `RegressionBlock`.
    Number,
}

/// Builder of loaders of texts for a language model or a classifier, by the rules of fastai's `TextDataLoaders`.
///
/// Texts are tokenized on all cores. Their tokens are counted, including those of validation texts, as in fastai, and
/// converted to ids by a vocabulary of the most common ones. Batches for a classifier are sorted by length and padded
/// in front in chunks ([`SortedSampler`](crate::SortedSampler), [`Padding::chunks`](crate::Padding::chunks)); batches
/// for a language model are parts of streams ([`LanguageModelData`](crate::LanguageModelData)). The loaders also
/// contain the loss for the targets and the names of the classes.
///
/// All ranks call [`loaders`](Self::loaders) and get the same data; if one rank fails, all return an error. With a
/// [`cache`](Self::cache), one process of each host tokenizes the texts and the others read its file; without a cache,
/// every rank tokenizes all texts.
///
/// ```
/// use brigade_text::TextLoaders;
/// use brigade_train::Accelerator;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path();
/// # for (file, text) in [("train/pos/0.txt", "What a film!"), ("train/neg/1.txt", "A bad film."),
/// #     ("valid/pos/2.txt", "A fine film."), ("valid/neg/3.txt", "What a bad film.")] {
/// #     std::fs::create_dir_all(path.join(file).parent().unwrap())?;
/// #     std::fs::write(path.join(file), text)?;
/// # }
/// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
/// let data = TextLoaders::from_folder(path).min_freq(2).loaders(&accelerator, 2)?;
/// assert_eq!(data.loaders.class_names(), Some(&["neg".to_owned(), "pos".to_owned()][..]));
/// let (ids, target) = data.loaders.one_batch(2)?;
/// assert_eq!((ids[0].size()[0], target.map(|it| it.size())), (2, Some(vec![2])));
/// // The same texts for a language model, with the classifier's vocabulary.
/// let data = TextLoaders::from_folder(path)
///     .language_model()
///     .seq_len(4)
///     .vocabulary(data.vocabulary)
///     .loaders(&accelerator, 2)?;
/// assert_eq!(data.loaders.one_batch(2)?.0[0].size(), [2, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct TextLoaders {
    origin: Origin,
    options: Options,
}

/// Dataset whose batches are token ids and targets: `(i64 [rows, tokens], …)`.
pub type TextBatches = Arc<dyn BatchedDataset<Batch = (Tensor, Tensor)>>;

/// Loaders of texts for a user-defined loop, with the vocabulary, tokenizer and classes that they were made with.
///
/// ```
/// use brigade_text::TextLoaders;
/// use brigade_train::Accelerator;
///
/// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
/// let texts = [("a fine film", "pos"), ("a bad film", "neg"), ("a film", "pos")];
/// let data = TextLoaders::from_texts(texts)
///     .min_freq(1)
///     .valid_indices([2])
///     .data_loaders(&accelerator, 2)?;
/// let train = accelerator.prepare(data.train)?;
/// for batch in &train {
///     let (ids, labels) = batch?.into_data();
///     assert_eq!(ids.size()[0], labels.size()[0]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TextDataLoaders {
    /// Training loader of the texts.
    pub train: DataLoader<TextBatches>,
    /// Validation loader. `None` if there are no validation texts. A classifier's texts are sorted by length.
    pub valid: Option<DataLoader<TextBatches>>,
    /// Vocabulary of the texts.
    pub vocabulary: Arc<Vocabulary>,
    /// Tokenizer of the texts.
    pub tokenizer: Arc<dyn Tokenizer>,
    /// Names of the classes, if there are classes.
    pub classes: Option<Categories>,
    /// Conversion of single texts to a model's input.
    pub codec: TextCodec,
}

/// Loaders of texts for a Learner, with the vocabulary, tokenizer and classes that they were made with.
#[derive(Debug)]
pub struct TextData {
    /// Loaders of the texts, for a Learner.
    pub loaders: Loaders<Tensor>,
    /// Vocabulary of the texts.
    pub vocabulary: Arc<Vocabulary>,
    /// Tokenizer of the texts.
    pub tokenizer: Arc<dyn Tokenizer>,
    /// Names of the classes, if there are classes.
    pub classes: Option<Categories>,
}

/// Function that opens a source, at a point where a failure can be reported to all ranks.
type Open = Box<dyn FnOnce() -> brigade_tokens::Result<TextSource>>;

/// Source of the texts.
enum Origin {
    Folder { path: PathBuf, train: String, valid: String },
    Source(Open),
}

/// Selection of the validation texts.
#[derive(Clone, Debug)]
enum Part {
    /// The validation texts that the source marks, or a random share if it marks none.
    Source,
    Share(f64),
    Indices(Vec<usize>),
    None,
}

struct Options {
    language_model: bool,
    target: TextTarget,
    part: Part,
    tokenizer: Arc<dyn Tokenizer>,
    vocabulary: Option<Arc<Vocabulary>>,
    counting: VocabularyOptions,
    pad_token: String,
    seq_len: usize,
    backwards: bool,
    shuffle: bool,
    drop_last: bool,
    every_token: bool,
    threads: usize,
    seed: Option<u64>,
    cache: Option<TokenCache>,
}

/// Loss that belongs to the targets.
enum TargetLoss {
    NextTokens,
    Classes,
    Several,
    Numbers,
}

impl Options {
    fn loss(&self) -> TargetLoss {
        match &self.target {
            _ if self.language_model => TargetLoss::NextTokens,
            TextTarget::Category(_) => TargetLoss::Classes,
            TextTarget::MultiCategory { .. } => TargetLoss::Several,
            TextTarget::Number => TargetLoss::Numbers,
        }
    }
}

impl TextLoaders {
    /// Reads the files `train/CLASS/FILE.txt` and `valid/CLASS/FILE.txt` below a folder. If validation texts are chosen
    /// in another way, reads all text files below the folder.
    pub fn from_folder(path: impl Into<PathBuf>) -> Self {
        let (train, valid) = ("train".to_owned(), "valid".to_owned());
        Self::new(Origin::Folder { path: path.into(), train, valid })
    }

    /// Reads the rows of a CSV file: its column `text`, and its columns `label` and `is_valid` if it has them.
    pub fn from_csv(path: impl Into<PathBuf>) -> Self {
        Self::from_csv_with(path, CsvOptions::new())
    }

    /// Reads the rows of a CSV file with options for its columns and format.
    pub fn from_csv_with(path: impl Into<PathBuf>, options: CsvOptions) -> Self {
        let path = path.into();
        Self::from_source(move || options.open(path))
    }

    /// Reads the lines of a file, each of which is a text, or a JSON object that contains one.
    pub fn from_lines(path: impl Into<PathBuf>, options: LinesOptions) -> Self {
        let path = path.into();
        Self::from_source(move || options.open(path))
    }

    /// Reads the rows of Parquet files, one file after the other, with options for their columns.
    #[cfg(feature = "parquet")]
    pub fn from_parquet<P: Into<PathBuf>>(
        paths: impl IntoIterator<Item = P>,
        options: brigade_tokens::ParquetOptions,
    ) -> Self {
        let paths: Vec<PathBuf> = paths.into_iter().map(Into::into).collect();
        Self::from_source(move || options.open(paths))
    }

    /// Uses texts in memory with a label each. For texts without labels see [`from_source`](Self::from_source).
    pub fn from_texts<T: Into<String>, L: Into<String>>(
        texts: impl IntoIterator<Item = (T, L)>,
    ) -> Self {
        let (texts, labels): (Vec<String>, Vec<String>) =
            texts.into_iter().map(|(text, label)| (text.into(), label.into())).unzip();
        Self::from_source(|| TextSource::memory(texts)?.with_labels(labels))
    }

    /// Uses the texts of any source. The source is opened by a function, so that a failure on one rank becomes an error
    /// on all ranks.
    ///
    /// ```
    /// use brigade_text::TextLoaders;
    /// use brigade_tokens::TextSource;
    ///
    /// let texts = TextLoaders::from_source(|| TextSource::lines("corpus.txt")).language_model();
    /// ```
    pub fn from_source(
        open: impl FnOnce() -> brigade_tokens::Result<TextSource> + 'static,
    ) -> Self {
        Self::new(Origin::Source(Box::new(open)))
    }

    fn new(origin: Origin) -> Self {
        let options = Options {
            language_model: false,
            target: TextTarget::Category(None),
            part: Part::Source,
            tokenizer: Arc::new(FastaiTokenizer::new()),
            vocabulary: None,
            counting: VocabularyOptions::new(),
            pad_token: "xxpad".to_owned(),
            seq_len: 72,
            backwards: false,
            shuffle: true,
            drop_last: true,
            every_token: false,
            threads: 2,
            seed: None,
            cache: None,
        };
        Self { origin, options }
    }

    /// Sets the names of the folders of training and of validation texts. Has no effect if texts do not come from a
    /// folder. Defaults to `train` and `valid`.
    #[must_use]
    pub fn folders(mut self, train: impl Into<String>, valid: impl Into<String>) -> Self {
        if let Origin::Folder { train: of_train, valid: of_valid, .. } = &mut self.origin {
            (*of_train, *of_valid) = (train.into(), valid.into());
        }
        self
    }

    /// Creates loaders for a language model, whose targets are the next tokens: fastai's `is_lm=True`.
    #[must_use]
    pub fn language_model(mut self) -> Self {
        self.options.language_model = true;
        self
    }

    /// Sets the kind of target of a text. Defaults to a single class.
    #[must_use]
    pub fn target(mut self, target: TextTarget) -> Self {
        self.options.target = target;
        self
    }

    /// Sets the share of the texts, drawn at random by the seed, that are validation texts. Defaults to 0.2, unless the
    /// source marks its validation texts.
    #[must_use]
    pub fn valid_share(mut self, share: f64) -> Self {
        self.options.part = Part::Share(share);
        self
    }

    /// Sets the indices of the validation texts in the source, in place of a random share
    /// ([`valid_share`](Self::valid_share)).
    #[must_use]
    pub fn valid_indices(mut self, indices: impl IntoIterator<Item = usize>) -> Self {
        self.options.part = Part::Indices(indices.into_iter().collect());
        self
    }

    /// Uses all texts for training and none for validation.
    #[must_use]
    pub fn without_validation(mut self) -> Self {
        self.options.part = Part::None;
        self
    }

    /// Sets the tokenizer. Defaults to fastai's rules and spaCy's English tokenizer.
    #[must_use]
    pub fn tokenizer(mut self, tokenizer: impl Tokenizer + 'static) -> Self {
        self.options.tokenizer = Arc::new(tokenizer);
        self
    }

    /// Sets the vocabulary, such as that of a language model. By default it is built from the texts' tokens.
    #[must_use]
    pub fn vocabulary(mut self, vocabulary: impl Into<Arc<Vocabulary>>) -> Self {
        self.options.vocabulary = Some(vocabulary.into());
        self
    }

    /// Sets the minimum number of occurrences of a token in the vocabulary. Defaults to 3.
    #[must_use]
    pub fn min_freq(mut self, times: u64) -> Self {
        self.options.counting = self.options.counting.min_freq(times);
        self
    }

    /// Sets the maximum size of the vocabulary. Defaults to 60,000.
    #[must_use]
    pub fn max_vocab(mut self, tokens: usize) -> Self {
        self.options.counting = self.options.counting.max_size(tokens);
        self
    }

    /// Sets the padding token, which the vocabulary must contain for a classifier. Defaults to `xxpad`.
    #[must_use]
    pub fn pad_token(mut self, token: impl Into<String>) -> Self {
        self.options.pad_token = token.into();
        self
    }

    /// Sets the sequence length in tokens: the length of a language model's batches, and of the chunks by which a
    /// classifier's texts are padded. Defaults to 72.
    #[must_use]
    pub fn seq_len(mut self, tokens: usize) -> Self {
        self.options.seq_len = tokens;
        self
    }

    /// Sets whether texts are read backwards, from their last token to their first. Defaults to `false`.
    #[must_use]
    pub fn backwards(mut self, backwards: bool) -> Self {
        self.options.backwards = backwards;
        self
    }

    /// Sets whether training visits texts in an order that is new in each epoch. Without that, a language model reads
    /// them in their own order, and a classifier the longest first. Defaults to `true`.
    #[must_use]
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.options.shuffle = shuffle;
        self
    }

    /// Sets whether a smaller last batch is left out in a classifier's training. Defaults to `true`, as in fastai.
    #[must_use]
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.options.drop_last = drop_last;
        self
    }

    /// Sets whether a language model is also validated on the tokens that do not fill all rows. Defaults to `false`.
    /// See [`LanguageModelData::every_token`](crate::LanguageModelData::every_token).
    #[must_use]
    pub fn every_token(mut self, every: bool) -> Self {
        self.options.every_token = every;
        self
    }

    /// Sets the number of threads that make batches for each loader. Defaults to 2.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.options.threads = threads;
        self
    }

    /// Sets the seed of a random split and of the order of training. All ranks use the seed of rank 0. Defaults to a
    /// seed that rank 0 draws.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.options.seed = Some(seed);
        self
    }

    /// Sets a folder in which the tokens are cached for later runs. Defaults to no cache.
    #[must_use]
    pub fn cache(mut self, folder: impl Into<PathBuf>) -> Self {
        self.options.cache = Some(TokenCache::new(folder));
        self
    }

    /// Creates the loaders. `batch_size` is the number of texts, or of a language model's rows, in a batch of one rank.
    /// All ranks must call it, and if one fails, all fail.
    ///
    /// # Errors
    /// Fails if texts cannot be read or tokenized, there are too few, labels do not match the target, or the ranks have
    /// different texts.
    pub fn loaders(self, accelerator: &Accelerator, batch_size: usize) -> Result<TextData> {
        let loss = self.options.loss();
        let data = self.data_loaders(accelerator, batch_size)?;
        let loaders = match data.valid {
            Some(valid) => Loaders::new(data.train, valid)?,
            None => Loaders::train_only(data.train)?,
        };
        let mut loaders = match loss {
            TargetLoss::NextTokens => loaders.loss(ClassesLast(CrossEntropy::default())),
            TargetLoss::Classes => loaders.loss(CrossEntropy::default()),
            TargetLoss::Several => loaders.loss(BceWithLogits::default()),
            TargetLoss::Numbers => loaders.loss(Mse),
        };
        if let Some(classes) = &data.classes {
            loaders = loaders.classes(classes.names());
        }
        let TextDataLoaders { vocabulary, tokenizer, classes, codec, .. } = data;
        Ok(TextData { loaders: loaders.codec(codec), vocabulary, tokenizer, classes })
    }

    /// Creates loaders for a user-defined loop, like [`loaders`](Self::loaders) for a Learner. `train` and `valid` are
    /// not sharded yet: pass them to `Accelerator::prepare`. Under an Accelerator with `split_batches`, the validation
    /// loader of a language model must be sharded without `split_batches`, as the Learner does it.
    ///
    /// # Errors
    /// Returns the same errors as [`loaders`](Self::loaders).
    pub fn data_loaders(
        self,
        accelerator: &Accelerator,
        batch_size: usize,
    ) -> Result<TextDataLoaders> {
        let Self { origin, options } = self;
        make::loaders(origin, options, accelerator, batch_size)
    }
}

impl Origin {
    fn open(self, part: &Part) -> brigade_tokens::Result<TextSource> {
        match (self, part) {
            (Self::Source(open), _) => open(),
            (Self::Folder { path, train, valid }, Part::Source) => FolderOptions::new()
                .folders([&train, &valid].map(String::as_str))
                .split_by_folder(train, valid)
                .open(path),
            (Self::Folder { path, .. }, _) => FolderOptions::new().open(path),
        }
    }
}

impl fmt::Debug for TextLoaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TextLoaders")
            .field("language_model", &self.options.language_model)
            .field("target", &self.options.target)
            .field("tokenizer", &self.options.tokenizer)
            .field("cache", &self.options.cache)
            .finish_non_exhaustive()
    }
}
