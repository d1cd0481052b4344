//! Conversion into a model: of a model, or of a constructor.

use brigade_torch::Result;

use crate::{Model, ParamPath};

/// A [`Model`], or a constructor that [`Model::new`] takes, for functions that accept both.
///
/// ```
/// use brigade_nn::{IntoModel, Linear, Model, ParamPath};
/// use brigade_torch::Result;
///
/// fn size(model: impl IntoModel) -> Result<usize> {
///     Ok(model.into_model()?.num_parameters())
/// }
///
/// fn classifier(path: &ParamPath) -> Linear {
///     Linear::new(path, 784, 10)
/// }
///
/// assert_eq!(size(classifier)?, 7850);
/// assert_eq!(size(|path: &ParamPath| Linear::new(path, 784, 10))?, 7850);
/// assert_eq!(size(Model::new(classifier)?)?, 7850);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// The type of a closure's parameter must be written, because Rust infers it only for functions whose argument is
/// bounded by a closure trait.
pub trait IntoModel {
    /// Type of the model's module.
    type Module;

    /// Returns the model itself, or builds it in 32-bit floats on the CPU.
    ///
    /// # Errors
    /// Returns the errors of [`Model::new`], for a constructor.
    fn into_model(self) -> Result<Model<Self::Module>>;
}

impl<M> IntoModel for Model<M> {
    type Module = M;

    fn into_model(self) -> Result<Self> {
        Ok(self)
    }
}

impl<F, M> IntoModel for F
where
    F: FnOnce(&ParamPath<'_>) -> M,
{
    type Module = M;

    fn into_model(self) -> Result<Model<M>> {
        Model::new(self)
    }
}
