//! Single items: how they are read and shown.

use std::any::Any;
use std::fmt;
use std::path::{Path, PathBuf};

use tch::Tensor;

use brigade_torch::{Error, Result};

/// A single item to predict: the argument of [`Learner::predict`](crate::Learner::predict).
#[derive(Debug)]
#[non_exhaustive]
pub enum Item {
    /// Path of a file, such as an image.
    File(PathBuf),
    /// Bytes of an encoded image or of another file.
    Bytes(Vec<u8>),
    /// A text, for text data.
    Text(String),
    /// The model's inputs without the batch dimension.
    Tensors(Vec<Tensor>),
}

impl From<PathBuf> for Item {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}

impl From<&Path> for Item {
    fn from(path: &Path) -> Self {
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

/// An RGB image of an item: `width * height` pixels of three bytes, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
    /// Red, green and blue of each pixel, one byte each.
    pub rgb: Vec<u8>,
}

/// A codec of single items: it converts them to the model's input, shows them, and can be saved. It is the part of the
/// data that a saved Learner needs to predict.
pub trait ItemCodec: Any + fmt::Debug + Send + Sync {
    /// Converts one item to the model's inputs, with a batch dimension of 1, transformed as in validation.
    ///
    /// # Errors
    /// Fails when the item cannot be read.
    fn encode(&self, item: &Item) -> Result<Vec<Tensor>>;

    /// Draws a row of a batch, with the normalisation and other preparation undone. `None` if the data are not images.
    ///
    /// # Errors
    /// Fails if the tensors do not have the form of such a batch.
    fn picture(&self, inputs: &[Tensor], row: i64) -> Result<Option<Picture>>;

    /// Draws a row of a batch with its target, or with a prediction of the same form: a mask is drawn over the picture;
    /// other targets are the returned text, with names from `classes` for class numbers. `None` if the data are not
    /// images.
    ///
    /// # Errors
    /// Fails if the tensors do not have the form of such a batch.
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

    /// Returns a row of a batch as a text. `None`, which is the default, if the data are not texts.
    ///
    /// # Errors
    /// Fails if the tensors do not have the form of such a batch.
    fn text(&self, _inputs: &[Tensor], _row: i64) -> Result<Option<String>> {
        Ok(None)
    }

    /// Returns the codec's kind, and its settings as JSON, from which it can be made again.
    ///
    /// # Errors
    /// Fails if a part of it, such as a function, cannot be serialized; the error names the part.
    fn describe(&self) -> Result<(&'static str, serde_json::Value)>;
}

/// Returns the model's input for one item, with a batch dimension of 1.
pub(crate) fn encoded(item: &Item, codec: Option<&dyn ItemCodec>) -> Result<Vec<Tensor>> {
    match (item, codec) {
        (Item::Tensors(tensors), _) => {
            Ok(tensors.iter().map(|it| it.f_unsqueeze(0)).collect::<Result<_, _>>()?)
        }
        (_, Some(codec)) => codec.encode(item),
        (_, None) => Err(Error::invalid_argument(
            "the data do not define how an item is read; predict a tensor, or give the Loaders a codec",
        )),
    }
}
