//! A trained model in one file: weights, classes, and how an item becomes its input; and what predicts from it.

use std::path::Path;
use std::sync::Arc;

use brigade_checkpoint::Value;
use brigade_nn::{IntoModel, Module};
use brigade_torch::{Error, Result};
use brigade_train::Accelerator;
use tch::{Device, Kind, Tensor};

use crate::data::codec_from;
use crate::error::LearnError;
use crate::learner::{Learner, Prediction, predicted, state_dict};
use crate::loaders::{Item, ItemCodec, ModelInput, encoded};
use crate::loss::{Loss, Outputs, loss_named};
use crate::main_process::on_main;
use crate::model::{AnyModel, Slot};
use crate::saved;

/// Format name in the file.
const FORMAT: &str = "brigade-learner";
/// Version of the file format.
const VERSION: i64 = 1;

impl Learner {
    /// Writes the model with its classes, the data's codec and the name of the loss to one file, from rank 0, for which
    /// the other ranks wait. [`Predictor::load`] reads it in any program, without the data. The file is a dictionary
    /// that PyTorch reads as well, with the weights under `model`.
    ///
    /// # Errors
    /// Fails on every rank when rank 0 cannot write; [`brigade_torch::ErrorKind::InvalidArgument`] when the codec or
    /// the loss cannot be serialized, such as one with a function of the program.
    pub fn export(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let weights = self.state.full_state_dict()?;
        on_main(&self.state.accelerator, || {
            let weights = weights.unwrap_or_default();
            let weights =
                weights.iter().map(|(name, it)| (name, Value::Tensor(it.shallow_clone())));
            let mut entries = vec![
                ("format", Value::Str(FORMAT.to_owned())),
                ("version", Value::Int(VERSION)),
                ("loss", Value::Str(loss_described(&*self.state.loss)?)),
                ("model", Value::dict(weights)),
            ];
            if let Outputs::Labels { threshold } = self.state.loss.outputs() {
                entries.push(("threshold", Value::Float(threshold)));
            }
            if let Some(classes) = self.state.class_names() {
                let names = classes.iter().map(|name| Value::Str(name.clone())).collect();
                entries.push(("classes", Value::List(names)));
            }
            if let Some(codec) = &self.state.codec {
                let (kind, settings) = codec.describe()?;
                let codec = [
                    ("kind", Value::Str(kind.to_owned())),
                    ("settings", Value::Str(settings.to_string())),
                ];
                entries.push(("codec", Value::dict(codec)));
            }
            saved::write(path, Value::dict(entries))
        })
    }
}

fn loss_described(loss: &dyn Loss) -> Result<String> {
    let name = loss.name();
    match loss_named(name, None) {
        Some(_) => Ok(name.to_owned()),
        None => Err(Error::invalid_argument(format!(
            "the loss `{name}` is defined by the program and cannot be exported; its activation and decision are \
             needed for predictions: export with one of `brigade_learn::loss`"
        ))),
    }
}

/// A model from a file of [`Learner::export`] for predictions of single items (fastai's `load_learner`). It needs no
/// data, no optimizer and no other ranks.
pub struct Predictor {
    model: Box<dyn AnyModel>,
    loss: Arc<dyn Loss>,
    classes: Option<Vec<String>>,
    codec: Option<Arc<dyn ItemCodec>>,
    device: Device,
}

impl std::fmt::Debug for Predictor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Predictor")
            .field("loss", &self.loss)
            .field("classes", &self.classes)
            .field("codec", &self.codec)
            .finish_non_exhaustive()
    }
}

impl Predictor {
    /// Loads a file of [`Learner::export`], for a model of the same architecture, onto the Accelerator's device. `X` is
    /// the argument of the model's forward: `Tensor` for images.
    ///
    /// ```no_run
    /// use brigade_learn::Predictor;
    /// use brigade_models::xresnet50;
    /// use brigade_train::Accelerator;
    /// use tch::Tensor;
    ///
    /// let accelerator = Accelerator::new()?;
    /// let mut predictor = Predictor::load::<Tensor, _>(&accelerator, "woof.pth", xresnet50(10))?;
    /// println!("{:?}", predictor.predict("dog.jpg")?.class);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::LearnError::Format`] for a file that is not such an export, of a later version, or of another
    /// architecture.
    pub fn load<X, C>(accelerator: &Accelerator, path: impl AsRef<Path>, model: C) -> Result<Self>
    where
        X: ModelInput,
        C: IntoModel,
        C::Module: for<'a> Module<X::Ref<'a>, Output = Tensor> + 'static,
    {
        Self::load_with::<X, C>(accelerator, path, model, codec_from)
    }

    /// Loads a file as [`Predictor::load`] does, with a function that makes the codec from its kind and settings, as
    /// [`ItemCodec::describe`] returns them: for codecs outside of this crate.
    ///
    /// # Errors
    /// Returns the same errors as [`Predictor::load`], and the error of `codec`.
    pub fn load_with<X, C>(
        accelerator: &Accelerator,
        path: impl AsRef<Path>,
        model: C,
        codec: impl FnOnce(&str, &serde_json::Value) -> Result<Arc<dyn ItemCodec>>,
    ) -> Result<Self>
    where
        X: ModelInput,
        C: IntoModel,
        C::Module: for<'a> Module<X::Ref<'a>, Output = Tensor> + 'static,
    {
        let make_codec = codec;
        let path = path.as_ref();
        let refused = |reason: String| LearnError::Format { path: path.to_owned(), reason };
        let value = saved::read(path)?;
        let text = |key: &str| value.get(key).and_then(Value::as_str);
        if text("format") != Some(FORMAT) {
            return Err(refused(
                "it is not an export of a Learner; load weights alone by `Learner::load`".into(),
            )
            .into());
        }
        match value.get("version").and_then(Value::as_int) {
            Some(VERSION) => {}
            version => {
                let found = version.map_or_else(|| "none".to_owned(), |it| it.to_string());
                return Err(refused(format!(
                    "its version is {found}, and this program reads version {VERSION}"
                ))
                .into());
            }
        }
        let name = text("loss").ok_or_else(|| refused("it has no loss".into()))?;
        let threshold = value.get("threshold").and_then(Value::as_float);
        let loss = loss_named(name, threshold).ok_or_else(|| {
            refused(format!("it has the loss {name:?}, which this program does not have"))
        })?;
        let weights = value.get("model").ok_or_else(|| refused("it has no model".into()))?;
        let mut model = model.into_model()?;
        model
            .load_state_dict(&state_dict(path, weights)?)
            .map_err(|error| refused(error.to_string()))?;
        model.to_device(accelerator.device())?;
        let classes = value.get("classes").and_then(Value::as_items).map(|names| {
            names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect()
        });
        let codec = match value.get("codec") {
            None => None,
            Some(codec) => {
                let text = |key: &str| {
                    codec
                        .get(key)
                        .and_then(Value::as_str)
                        .ok_or_else(|| refused(format!("its codec has no text `{key}`")))
                };
                let settings = serde_json::from_str(text("settings")?)
                    .map_err(|error| refused(error.to_string()))?;
                Some(make_codec(text("kind")?, &settings)?)
            }
        };
        let mut model: Box<dyn AnyModel> = Box::new(Slot::<C::Module, X>::new(model));
        model.set_training(false);
        Ok(Self { model, loss, classes, codec, device: accelerator.device() })
    }

    /// Returns the names of the classes. `None` if targets are not classes.
    #[must_use]
    pub fn class_names(&self) -> Option<&[String]> {
        self.classes.as_deref()
    }

    /// Predicts one item, such as an image file.
    ///
    /// # Errors
    /// Fails when the item cannot be read or does not fit.
    pub fn predict(&mut self, item: impl Into<Item>) -> Result<Prediction> {
        let item = item.into();
        let inputs = encoded(&item, self.codec.as_deref())?;
        let _without_autograd = tch::no_grad_guard();
        let inputs: Vec<Tensor> = inputs
            .iter()
            .map(|input| input.f_to_device(self.device))
            .collect::<std::result::Result<_, _>>()?;
        let output = self.model.forward(&inputs)?.f_to_kind(Kind::Float)?;
        predicted(&*self.loss, &output, self.classes.as_deref())
    }
}
