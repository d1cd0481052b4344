//! Data of the Learner: loaders for training and validation, and the meaning of their batches.

mod input;
mod item;
mod source;

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use brigade_data::{BatchedDataset, DataLoader};
use brigade_torch::{Error, Result, TensorTree};
use tch::Tensor;

pub(crate) use self::input::Parts;
pub use self::input::{ModelInput, Target};
pub(crate) use self::item::encoded;
pub use self::item::{Item, ItemCodec, Picture};
pub(crate) use self::source::{BatchSource, PreparedSource, source};
use crate::loss::Loss;

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
    /// Validation items with the transforms of training, drawn anew in each pass, for test-time augmentation.
    pub(crate) augmented_valid: Option<Box<dyn BatchSource>>,
    pub(crate) classes: Option<Arc<[String]>>,
    pub(crate) loss: Option<Arc<dyn Loss>>,
    pub(crate) codec: Option<Arc<dyn ItemCodec>>,
    input: PhantomData<fn(X)>,
}

impl<X: ModelInput> Loaders<X> {
    /// Makes the loaders of batches that are `(X, target)`.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if a loader has no samples.
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

    /// Makes the loaders with a function each that makes `(X, target)` of a batch, on the batch's device: for
    /// transforms of batches, such as those of `brigade_vision::augment`.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if a loader has no samples.
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

    /// Makes a loader for training and none for validation: epochs then have no validation.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if a loader has no samples.
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
    /// Makes loaders from batch sources.
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

    /// Sets the names of the classes, by class number (fastai's vocabulary).
    #[must_use]
    pub fn classes<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.classes = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Sets the default loss for the targets. The Learner's own setting takes precedence.
    #[must_use]
    pub fn loss(mut self, loss: impl Loss + 'static) -> Self {
        self.loss = Some(Arc::new(loss));
        self
    }

    /// Sets the codec that reads and shows single items.
    #[must_use]
    pub fn codec(mut self, codec: impl ItemCodec + 'static) -> Self {
        self.codec = Some(Arc::new(codec));
        self
    }

    /// Returns the codec that reads and shows single items. `None` if the data have none.
    #[must_use]
    pub fn item_codec(&self) -> Option<&Arc<dyn ItemCodec>> {
        self.codec.as_ref()
    }

    /// Returns up to `rows` samples of the next training batch on the CPU, transformed: the model's inputs and the
    /// target. The training's own position does not move.
    ///
    /// # Errors
    /// Fails when the batch cannot be made.
    pub fn one_batch(&self, rows: usize) -> Result<(Vec<Tensor>, Option<Tensor>)> {
        let Parts { inputs, target } = self.train.sample(rows)?;
        Ok((inputs, target))
    }

    /// Returns up to `rows` samples of the first validation batch on the CPU, as [`one_batch`](Self::one_batch) does
    /// for training.
    ///
    /// # Errors
    /// Fails when the batch cannot be made, or there is no validation.
    pub fn one_valid_batch(&self, rows: usize) -> Result<(Vec<Tensor>, Option<Tensor>)> {
        let Some(valid) = &self.valid else {
            return Err(Error::invalid_argument("these loaders have no validation"));
        };
        let Parts { inputs, target } = valid.sample(rows)?;
        Ok((inputs, target))
    }

    /// Draws up to `rows` samples of the next training batch, transformed, with their targets as text: fastai's
    /// `show_batch`. Masks are laid over their images. The training's own position does not move.
    ///
    /// # Errors
    /// Fails when the batch cannot be made, or the data have no [`codec`](Self::codec) that draws pictures.
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

    /// Returns up to `rows` samples of the next training batch as texts, with their targets: the name of the class, or
    /// the number. The training's own position does not move.
    ///
    /// # Errors
    /// Fails when the batch cannot be made, or the data have no [`codec`](Self::codec) that gives texts.
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

    /// Returns the names of the classes. `None` if targets are not classes.
    #[must_use]
    pub fn class_names(&self) -> Option<&[String]> {
        self.classes.as_deref()
    }

    /// Returns the number of training batches in an epoch: of this process, or of all processes before the Learner has
    /// distributed them.
    #[must_use]
    pub fn train_batches(&self) -> usize {
        self.train.batches()
    }

    /// Returns the number of validation batches. 0 without validation.
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
