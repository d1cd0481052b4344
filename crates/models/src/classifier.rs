//! What all image classifiers have in common: a head that depends on the classes, a first convolution
//! that depends on the channels, and the names that other libraries give their weights.

use brigade_torch::Result;
use tch::Tensor;

use crate::InputChannels;

/// A network from images to logits whose last layer and first convolution have known names, as timm's
/// `get_classifier` and `first_conv` give them.
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
    /// The name of the last layer, or of the layers after the body: all that depends on the number of classes
    /// is below it.
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

    /// The name here of what another library, or an older version, calls `name`; `None` for a name that it
    /// does not know, which may be one of its own.
    fn renamed(&self, name: &str) -> Option<String> {
        let _ = name;
        None
    }

    /// The values of a weight that lies in the file with another shape, where they can be computed; the
    /// head and the first convolution are not asked for.
    ///
    /// # Errors
    /// libtorch's, as out of memory.
    fn adapted(&self, name: &str, values: &Tensor, shape: &[i64]) -> Result<Option<Tensor>> {
        let _ = (name, values, shape);
        Ok(None)
    }
}

/// Returns `true` if a parameter lies below a module.
pub(crate) fn is_below(module: &str, name: &str) -> bool {
    name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}
