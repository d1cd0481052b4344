//! What all image classifiers have in common: a head that depends on the classes, a first convolution
//! that depends on the channels, and the names that other libraries give their weights.

use brigade_nn::{Result, Tensor};

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
/// # Ok::<(), brigade_nn::Error>(())
/// ```
pub trait ImageClassifier {
    /// The name of the last layer, below which all parameters depend on the number of classes.
    fn classifier(&self) -> String;

    /// The name of the convolution that takes the images' channels.
    fn first_convolution(&self) -> String;

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
