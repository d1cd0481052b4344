//! Data as the Learner takes it: loaders for training and validation, and what their batches mean.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::Arc;

use brigade_data::{Batch, BatchContext, BatchedDataset, DataLoader};
use brigade_torch::{Error, Result, TensorTree};
use brigade_train::{Accelerator, DataLoaderConfiguration, PreparedLoader};
use tch::{Device, Tensor};

use crate::loss::Loss;

/// What a model's forward takes: a tensor, or a tuple of two or three.
pub trait ModelInput: Sized + 'static {
    /// The form in which a forward borrows it.
    type Ref<'a>;

    /// Gives up its tensors, in order.
    fn into_tensors(self) -> Vec<Tensor>;

    /// Borrows it from its tensors; `None` when there are not as many.
    fn borrowed(tensors: &[Tensor]) -> Option<Self::Ref<'_>>;
}

impl ModelInput for Tensor {
    type Ref<'a> = &'a Self;

    fn into_tensors(self) -> Vec<Tensor> {
        vec![self]
    }

    fn borrowed(tensors: &[Tensor]) -> Option<&Self> {
        match tensors {
            [tensor] => Some(tensor),
            _ => None,
        }
    }
}

impl ModelInput for (Tensor, Tensor) {
    type Ref<'a> = (&'a Tensor, &'a Tensor);

    fn into_tensors(self) -> Vec<Tensor> {
        vec![self.0, self.1]
    }

    fn borrowed(tensors: &[Tensor]) -> Option<Self::Ref<'_>> {
        match tensors {
            [first, second] => Some((first, second)),
            _ => None,
        }
    }
}

impl ModelInput for (Tensor, Tensor, Tensor) {
    type Ref<'a> = (&'a Tensor, &'a Tensor, &'a Tensor);

    fn into_tensors(self) -> Vec<Tensor> {
        vec![self.0, self.1, self.2]
    }

    fn borrowed(tensors: &[Tensor]) -> Option<Self::Ref<'_>> {
        match tensors {
            [first, second, third] => Some((first, second, third)),
            _ => None,
        }
    }
}

/// What a batch has besides the model's input: a tensor of targets, or an `Option` of one, which is `None` where a
/// model only predicts.
pub trait Target: Sized + 'static {
    /// Gives up its tensor.
    fn into_target(self) -> Option<Tensor>;
}

impl Target for Tensor {
    fn into_target(self) -> Option<Tensor> {
        Some(self)
    }
}

impl Target for Option<Tensor> {
    fn into_target(self) -> Option<Tensor> {
        self
    }
}

/// A batch whose tensors have no types of their own any more: what callbacks see.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) target: Option<Tensor>,
}

/// Turns a loader's batch, on its device, into input and targets.
type Split<B> = Arc<dyn Fn(B) -> Result<Parts> + Send + Sync>;

/// One item to predict: what [`Learner::predict`](crate::Learner::predict) takes.
#[derive(Debug)]
#[non_exhaustive]
pub enum Item {
    /// A file, such as an image.
    File(PathBuf),
    /// An encoded image or another file's bytes.
    Bytes(Vec<u8>),
    /// A text, where the data are texts.
    Text(String),
    /// The model's input without the dimension of the batch.
    Tensors(Vec<Tensor>),
}

impl From<PathBuf> for Item {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}

impl From<&std::path::Path> for Item {
    fn from(path: &std::path::Path) -> Self {
        Self::File(path.to_owned())
    }
}

impl From<&str> for Item {
    fn from(path: &str) -> Self {
        Self::File(path.into())
    }
}

impl From<Vec<u8>> for Item {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<Tensor> for Item {
    fn from(input: Tensor) -> Self {
        Self::Tensors(vec![input])
    }
}

/// A picture of an item: `width * height` pixels of three bytes, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Pixels in a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Red, green and blue of each pixel.
    pub rgb: Vec<u8>,
}

/// How single items become the model's input and are shown, and how that is written down: the part of the data
/// that a saved Learner needs to predict.
pub trait ItemCodec: Any + fmt::Debug + Send + Sync {
    /// Makes the model's input of one item, with a batch dimension of 1, transformed as in validation.
    ///
    /// # Errors
    /// When the item cannot be read.
    fn encode(&self, item: &Item) -> Result<Vec<Tensor>>;

    /// Draws a row of a batch, with what was done to make it a model's input undone (normalisation); `None`
    /// where it is no picture.
    ///
    /// # Errors
    /// When the tensors are not such a batch.
    fn picture(&self, inputs: &[Tensor], row: i64) -> Result<Option<Picture>>;

    /// Draws a row of a batch with its target, or with a prediction in the form of one: a mask is laid over the
    /// picture; of all else the text tells it, as names of `classes` where it is one of classes. `None` where it
    /// is no picture.
    ///
    /// # Errors
    /// When the tensors are not such a batch.
    fn show(
        &self,
        inputs: &[Tensor],
        target: Option<&Tensor>,
        row: i64,
        classes: Option<&[String]>,
    ) -> Result<Option<(Picture, String)>> {
        let Some(picture) = self.picture(inputs, row)? else { return Ok(None) };
        let class = target.map(|target| target.f_select(0, row)).transpose()?;
        let class = class.and_then(|class| i64::try_from(&class).ok());
        let name = class.and_then(|class| classes?.get(usize::try_from(class).ok()?));
        Ok(Some((picture, name.cloned().unwrap_or_default())))
    }

    /// Writes a row of a batch as a text; `None` where it is none, which is so unless implemented.
    ///
    /// # Errors
    /// When the tensors are not such a batch.
    fn text(&self, _inputs: &[Tensor], _row: i64) -> Result<Option<String>> {
        Ok(None)
    }

    /// Returns the codec's kind, and its settings as JSON, from which it can be made again.
    ///
    /// # Errors
    /// When a part of it, such as a function, cannot be written down: an error that names it.
    fn describe(&self) -> Result<(&'static str, serde_json::Value)>;
}

/// Loaders for training and validation, whose batches are `(X, target)`.
///
/// ```
/// use brigade_data::{DataLoader, TensorDataset};
/// use brigade_learn::Loaders;
/// use tch::{Device, Kind, Tensor};
///
/// let data = |rows: i64| {
///     let inputs = Tensor::rand([rows, 4], (Kind::Float, Device::Cpu));
///     let labels = inputs.argmax(-1, false);
///     TensorDataset::new((inputs, labels))
/// };
/// let train = DataLoader::new(data(100)?).batch_size(10).shuffle(true);
/// let valid = DataLoader::new(data(30)?).batch_size(10);
/// let data = Loaders::new(train, valid)?.classes(["a", "b", "c", "d"]);
/// assert_eq!(data.train_batches(), 10);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Loaders<X = Tensor> {
    pub(crate) train: Box<dyn BatchSource>,
    pub(crate) valid: Option<Box<dyn BatchSource>>,
    /// The validation items with the transforms of training, drawn anew in each pass: for test-time augmentation.
    pub(crate) augmented_valid: Option<Box<dyn BatchSource>>,
    pub(crate) classes: Option<Arc<[String]>>,
    pub(crate) loss: Option<Arc<dyn Loss>>,
    pub(crate) codec: Option<Arc<dyn ItemCodec>>,
    input: PhantomData<fn(X)>,
}

impl<X: ModelInput> Loaders<X> {
    /// Takes loaders whose batches are `(X, target)`.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a loader without a sample.
    pub fn new<D, E, Y, Z>(train: DataLoader<D>, valid: DataLoader<E>) -> Result<Self>
    where
        D: BatchedDataset<Batch = (X, Y)> + 'static,
        E: BatchedDataset<Batch = (X, Z)> + 'static,
        (X, Y): TensorTree<Owned = (X, Y)>,
        (X, Z): TensorTree<Owned = (X, Z)>,
        Y: Target,
        Z: Target,
    {
        Self::with(train, Ok, valid, Ok)
    }

    /// Takes loaders with a function each that makes `(X, target)` of a batch, on the batch's device: where
    /// transforms of batches run, such as those of `brigade_vision::augment`.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a loader without a sample.
    pub fn with<D, E, Y, Z>(
        train: DataLoader<D>,
        split_train: impl Fn(D::Batch) -> Result<(X, Y)> + Send + Sync + 'static,
        valid: DataLoader<E>,
        split_valid: impl Fn(E::Batch) -> Result<(X, Z)> + Send + Sync + 'static,
    ) -> Result<Self>
    where
        D: BatchedDataset + 'static,
        E: BatchedDataset + 'static,
        D::Batch: TensorTree<Owned = D::Batch>,
        E::Batch: TensorTree<Owned = E::Batch>,
        Y: Target,
        Z: Target,
    {
        Ok(Self {
            train: source("training", train, split_train)?,
            valid: Some(source("validation", valid, split_valid)?),
            augmented_valid: None,
            classes: None,
            loss: None,
            codec: None,
            input: PhantomData,
        })
    }

    /// Takes a loader for training and none for validation: epochs then have no validation.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a loader without a sample.
    pub fn train_only<D, Y>(train: DataLoader<D>) -> Result<Self>
    where
        D: BatchedDataset<Batch = (X, Y)> + 'static,
        (X, Y): TensorTree<Owned = (X, Y)>,
        Y: Target,
    {
        Ok(Self {
            train: source("training", train, Ok)?,
            valid: None,
            augmented_valid: None,
            classes: None,
            loss: None,
            codec: None,
            input: PhantomData,
        })
    }
}

impl<X> Loaders<X> {
    /// Takes sources that were made of loaders.
    pub(crate) fn of_sources(
        train: Box<dyn BatchSource>,
        valid: Option<Box<dyn BatchSource>>,
        augmented_valid: Option<Box<dyn BatchSource>>,
    ) -> Self {
        Self {
            train,
            valid,
            augmented_valid,
            classes: None,
            loss: None,
            codec: None,
            input: PhantomData,
        }
    }

    /// Names the classes that targets are numbers of (fastai's vocabulary).
    #[must_use]
    pub fn classes<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.classes = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Sets the loss that belongs to the targets; the Learner's own setting wins.
    #[must_use]
    pub fn loss(mut self, loss: impl Loss + 'static) -> Self {
        self.loss = Some(Arc::new(loss));
        self
    }

    /// Sets how single items are read and shown.
    #[must_use]
    pub fn codec(mut self, codec: impl ItemCodec + 'static) -> Self {
        self.codec = Some(Arc::new(codec));
        self
    }

    /// Returns how single items are read and shown, where the data have told it.
    #[must_use]
    pub fn item_codec(&self) -> Option<&Arc<dyn ItemCodec>> {
        self.codec.as_ref()
    }

    /// Makes up to `rows` samples of the next training batch on the CPU, transformed: the model's inputs and the
    /// target. The training's own position does not move.
    ///
    /// # Errors
    /// When the batch cannot be made.
    pub fn one_batch(&self, rows: usize) -> Result<(Vec<Tensor>, Option<Tensor>)> {
        let Parts { inputs, target } = self.train.sample(rows)?;
        Ok((inputs, target))
    }

    /// Makes up to `rows` samples of the first validation batch, as [`one_batch`](Self::one_batch).
    ///
    /// # Errors
    /// When the batch cannot be made, or there is no validation.
    pub fn one_valid_batch(&self, rows: usize) -> Result<(Vec<Tensor>, Option<Tensor>)> {
        let Some(valid) = &self.valid else {
            return Err(Error::invalid_argument("these loaders have no validation"));
        };
        let Parts { inputs, target } = valid.sample(rows)?;
        Ok((inputs, target))
    }

    /// Draws up to `rows` samples of the next training batch, transformed, with their targets in words: fastai's
    /// `show_batch`. Masks are laid over their images. The training's own position does not move.
    ///
    /// # Errors
    /// When the batch cannot be made, or the data have no [`codec`](Self::codec) that draws pictures.
    pub fn show_batch(&self, rows: usize) -> Result<Vec<(Picture, String)>> {
        let Some(codec) = &self.codec else {
            return Err(Error::invalid_argument(
                "these loaders cannot draw their batches: set a codec, or make them by a DataBlock",
            ));
        };
        let Parts { inputs, target } = self.train.sample(rows)?;
        let rows = inputs.first().and_then(|input| input.size().first().copied()).unwrap_or(0);
        let mut shown = Vec::new();
        for row in 0..rows {
            let picture = codec.show(&inputs, target.as_ref(), row, self.class_names())?;
            shown.push(picture.ok_or_else(|| {
                Error::invalid_argument("the codec of these loaders draws no pictures")
            })?);
        }
        Ok(shown)
    }

    /// Writes up to `rows` samples of the next training batch as texts, with their targets: the name of the class,
    /// or the number. The training's own position does not move.
    ///
    /// # Errors
    /// When the batch cannot be made, or the data have no [`codec`](Self::codec) that gives texts.
    pub fn show_texts(&self, rows: usize) -> Result<Vec<(String, String)>> {
        let Parts { inputs, target } = self.train.sample(rows)?;
        let count = inputs.first().and_then(|input| input.size().first().copied()).unwrap_or(0);
        let mut shown = Vec::new();
        for row in 0..count {
            let text = match &self.codec {
                Some(codec) => codec.text(&inputs, row)?,
                None => None,
            };
            let text = text.ok_or_else(|| {
                Error::invalid_argument(
                    "these loaders cannot write their batches as texts: their codec gives none",
                )
            })?;
            let target = match &target {
                Some(target) if target.dim() == 1 => {
                    let value = target.f_double_value(&[row])?;
                    let name = self.class_names().and_then(|names| names.get(value as usize));
                    name.cloned().unwrap_or_else(|| value.to_string())
                }
                _ => String::new(),
            };
            shown.push((text, target));
        }
        Ok(shown)
    }

    /// Returns the names of the classes.
    #[must_use]
    pub fn class_names(&self) -> Option<&[String]> {
        self.classes.as_deref()
    }

    /// Returns the number of training batches of this process in an epoch; of all of them before the Learner has
    /// shared them out.
    #[must_use]
    pub fn train_batches(&self) -> usize {
        self.train.batches()
    }

    /// Returns the number of validation batches; 0 without validation.
    #[must_use]
    pub fn valid_batches(&self) -> usize {
        self.valid.as_ref().map_or(0, |valid| valid.batches())
    }
}

impl<X> fmt::Debug for Loaders<X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loaders")
            .field("train_batches", &self.train_batches())
            .field("valid_batches", &self.valid_batches())
            .field("augmented_valid", &self.augmented_valid.is_some())
            .field("classes", &self.classes)
            .field("codec", &self.codec)
            .finish_non_exhaustive()
    }
}

/// A loader whose batches have lost their type.
pub(crate) trait BatchSource {
    /// Shares it out among the ranks: for training by the Accelerator's rules, and into its checkpoints; for
    /// validation batch by batch, without duplicates.
    fn prepare(&self, accelerator: &Accelerator, training: bool)
    -> Result<Box<dyn PreparedSource>>;
    fn batches(&self) -> usize;
    /// The number of the epoch that begins next.
    fn epoch(&self) -> u64;
    fn set_epoch(&self, epoch: u64);
    /// A handle that gives every sample once: in the order of the data, or in its sampler's.
    fn in_order(&self) -> Box<dyn BatchSource>;
    /// Where the samples of the next epoch stand in its order, sample by sample, where a sampler gives each of them
    /// once in another order than the data's.
    fn places(&self) -> Result<Option<Vec<i64>>>;
    /// Makes a batch of these samples on the CPU, and moves no position.
    fn rows(&self, indices: &[usize]) -> Result<Parts>;
    /// Makes the first rows of the next epoch on the CPU, and moves no position.
    fn sample(&self, rows: usize) -> Result<Parts>;
}

/// A loader that was shared out.
pub(crate) trait PreparedSource {
    fn begin(&self) -> Box<dyn Iterator<Item = Result<Batch<Parts>>>>;
    fn batches(&self) -> usize;
}

struct Source<D: BatchedDataset> {
    loader: DataLoader<D>,
    split: Split<D::Batch>,
}

struct Prepared<D: BatchedDataset> {
    loader: PreparedLoader<DataLoader<D>>,
    split: Split<D::Batch>,
}

/// Takes a loader whose batches a function splits into input and targets.
pub(crate) fn source<D, X, Y>(
    what: &str,
    loader: DataLoader<D>,
    split: impl Fn(D::Batch) -> Result<(X, Y)> + Send + Sync + 'static,
) -> Result<Box<dyn BatchSource>>
where
    D: BatchedDataset + 'static,
    D::Batch: TensorTree<Owned = D::Batch>,
    X: ModelInput,
    Y: Target,
{
    if loader.dataset().num_samples() == 0 {
        return Err(Error::invalid_argument(format!(
            "the {what} loader has no sample; look at the folder, the filters and the split"
        )));
    }
    let split: Split<D::Batch> = Arc::new(move |batch| {
        let (input, target) = split(batch)?;
        Ok(Parts { inputs: input.into_tensors(), target: target.into_target() })
    });
    Ok(Box::new(Source { loader, split }))
}

impl<D> BatchSource for Source<D>
where
    D: BatchedDataset + 'static,
    D::Batch: TensorTree<Owned = D::Batch>,
{
    fn prepare(
        &self,
        accelerator: &Accelerator,
        training: bool,
    ) -> Result<Box<dyn PreparedSource>> {
        // A handle of the same loader: its epoch goes on from fit to fit.
        let handle = self.loader.clone();
        let loader = if training {
            accelerator.prepare(handle)?
        } else {
            let whole = DataLoaderConfiguration { even_batches: false, ..Default::default() };
            PreparedLoader::new(handle, accelerator.processes(), whole)?
        };
        Ok(Box::new(Prepared { loader, split: Arc::clone(&self.split) }))
    }

    fn batches(&self) -> usize {
        self.loader.len()
    }

    fn epoch(&self) -> u64 {
        self.loader.epoch()
    }

    fn set_epoch(&self, epoch: u64) {
        self.loader.set_epoch(epoch);
    }

    fn in_order(&self) -> Box<dyn BatchSource> {
        let loader = self.loader.clone().shuffle(false).drop_last(false).overlap_epochs(false);
        Box::new(Self { loader, split: Arc::clone(&self.split) })
    }

    fn places(&self) -> Result<Option<Vec<i64>>> {
        let plan = self.loader.plan(self.loader.epoch())?;
        let order: Vec<usize> = plan.rank(0).flat_map(|batch| batch.indices).collect();
        if order.iter().enumerate().all(|(place, index)| place == *index) {
            return Ok(None);
        }
        let mut places = vec![-1; order.len()];
        for (place, index) in order.into_iter().enumerate() {
            match places.get_mut(index) {
                Some(slot @ -1) => *slot = place as i64,
                // Samples that are left out or come twice have no order of their own.
                _ => return Ok(None),
            }
        }
        Ok(Some(places))
    }

    fn sample(&self, rows: usize) -> Result<Parts> {
        let epoch = self.loader.epoch();
        let first = self.loader.plan(epoch)?.batch(0, 0);
        let mut indices = first.map(|batch| batch.indices).unwrap_or_default();
        indices.truncate(rows);
        self.rows(&indices)
    }

    fn rows(&self, indices: &[usize]) -> Result<Parts> {
        let (seed, epoch) = (self.loader.current_seed(), self.loader.epoch());
        let context = BatchContext { seed, epoch, batch: 0, rank: 0 };
        // Of a data set that lies on a GPU, too.
        let batch = self.loader.dataset().batch(indices, &context)?;
        (self.split)(batch.to_device(Device::Cpu)?)
    }
}

impl<D> PreparedSource for Prepared<D>
where
    D: BatchedDataset + 'static,
    D::Batch: TensorTree<Owned = D::Batch>,
{
    fn begin(&self) -> Box<dyn Iterator<Item = Result<Batch<Parts>>>> {
        let split = Arc::clone(&self.split);
        Box::new(self.loader.iter().map(move |batch| batch?.try_map(|data| split(data))))
    }

    fn batches(&self) -> usize {
        self.loader.len()
    }
}

/// The model's input of one item, with a batch dimension of 1.
pub(crate) fn encoded(item: &Item, codec: Option<&dyn ItemCodec>) -> Result<Vec<Tensor>> {
    match (item, codec) {
        (Item::Tensors(tensors), _) => {
            Ok(tensors.iter().map(|it| it.f_unsqueeze(0)).collect::<std::result::Result<_, _>>()?)
        }
        (_, Some(codec)) => codec.encode(item),
        (_, None) => Err(Error::invalid_argument(
            "the data say nothing of how an item is read; predict a tensor, or give the Loaders a codec",
        )),
    }
}
