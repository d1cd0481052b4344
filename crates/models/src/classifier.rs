//! Image classifiers: a head that depends on the classes, a first convolution that depends on the channels, and other
//! libraries' names of the weights.

use brigade_torch::Result;
use tch::Tensor;

use crate::InputChannels;

/// A network from images to logits whose last layer and first convolution have known names, like timm's
/// `get_classifier` and `first_conv`.
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
    /// Returns the name of the last layer, or of the layers after the body, below which are all parameters that depend
    /// on the number of classes.
    fn classifier(&self) -> String;

    /// Returns the name of the convolution that takes the images' channels.
    fn first_convolution(&self) -> String;

    /// Returns `true` if a parameter may keep its initial values where a file has no values of its shape for it.
    /// Defaults to the parameters of the [classifier](Self::classifier).
    fn in_head(&self, name: &str) -> bool {
        is_below(&self.classifier(), name)
    }

    /// Returns the rule by which the first convolution is computed for another number of channels, where
    /// [`crate::Pretrained`] sets none: that of the library that the architecture follows.
    fn input_channels(&self) -> InputChannels {
        InputChannels::Repeat
    }

    /// Converts the name of a parameter in another library, or an older version, to this model's. Returns `None` for an
    /// unknown name, which may be one of the model's own.
    fn renamed(&self, name: &str) -> Option<String> {
        let _ = name;
        None
    }

    /// Computes the values of a weight that has another shape in the file, or returns `None` if that is impossible. Not
    /// called for the head and the first convolution.
    ///
    /// # Errors
    /// Returns libtorch's errors, such as out of memory.
    fn adapted(&self, name: &str, values: &Tensor, shape: &[i64]) -> Result<Option<Tensor>> {
        let _ = (name, values, shape);
        Ok(None)
    }
}

/// Returns `true` if a parameter lies below a module.
pub(crate) fn is_below(module: &str, name: &str) -> bool {
    name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}
