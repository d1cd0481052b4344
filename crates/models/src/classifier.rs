//! The trait of image classifiers: the head, which depends on the number of classes, the first convolution, which
//! depends on the number of channels, and the names of weights in other libraries.

use brigade_torch::Result;
use tch::Tensor;

use crate::InputChannels;

/// An image classifier: a network from images to logits whose last layer and first convolution have known names, like
/// timm's `get_classifier` and `first_conv`.
///
/// ```
/// use brigade_models::{ImageClassifier, ResNet};
/// use brigade_nn::Model;
///
/// let mut model = Model::new(|path| ResNet::resnet18(path, 37))?;
/// model.requires_grad(false)?;
/// let head = model.module().classifier();
/// model.requires_grad_under(&head, true)?;
/// assert_eq!(model.trainable_parameters().len(), 2);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub trait ImageClassifier {
    /// Returns the name of the last layer, or of the layers after the body. All parameters that depend on the number of
    /// classes are below it.
    fn classifier(&self) -> String;

    /// Returns the name of the first convolution, whose input are the images.
    fn first_convolution(&self) -> String;

    /// Returns `true` if a parameter may keep its initial values when a file has no values of its shape for it.
    /// Defaults to the parameters of the [classifier](Self::classifier).
    fn in_head(&self, name: &str) -> bool {
        is_below(&self.classifier(), name)
    }

    /// Returns the default rule by which the weights of the first convolution are computed for another number of
    /// channels: that of the library that the architecture follows. [`crate::Pretrained::channels`] overrides it.
    fn input_channels(&self) -> InputChannels {
        InputChannels::Repeat
    }

    /// Returns this model's name for the parameter that has the name `name` in another library or in an older version.
    /// `None` for an unknown name, which may be one of this model's own.
    fn renamed(&self, name: &str) -> Option<String> {
        let _ = name;
        None
    }

    /// Computes the values of a weight whose shape in the file differs, or returns `None` if that is not possible. It
    /// is not called for the head and the first convolution.
    ///
    /// # Errors
    /// Returns an error of libtorch, for example if memory runs out.
    fn adapted(&self, name: &str, values: &Tensor, shape: &[i64]) -> Result<Option<Tensor>> {
        let _ = (name, values, shape);
        Ok(None)
    }
}

/// Returns `true` if a parameter lies below a module.
pub(crate) fn is_below(module: &str, name: &str) -> bool {
    name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}
