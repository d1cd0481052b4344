//! Models written with `tch::nn`.

use std::fmt;

use brigade_torch::Result;
use tch::Tensor;
use tch::nn::{ModuleT, VarStore};

use crate::{Model, Module, ParamPath, Training};

/// A module of `tch::nn` in a [`Model`]: its `forward_t` gets the model's training mode. A `tch::nn::Module` can be
/// used, too.
pub struct TchModule<M> {
    module: M,
    training: Training,
}

impl<M> TchModule<M> {
    /// Returns the wrapped module.
    #[must_use]
    pub fn inner(&self) -> &M {
        &self.module
    }
}

impl<M: ModuleT> Module<&Tensor> for TchModule<M> {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(self.module.forward_t(input, self.training.is_on()))
    }
}

impl<M> fmt::Debug for TchModule<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TchModule").field("module", &std::any::type_name::<M>()).finish()
    }
}

impl<M> Model<TchModule<M>> {
    /// Creates a model from a module of `tch::nn` and the variables that it was built with. The module is a
    /// `Sequential`, a `SequentialT`, a function in `nn::func_t`, or a user-defined type that implements `nn::Module`
    /// or `nn::ModuleT`.
    ///
    /// The variables keep their names, values, kind and device; frozen ones stay frozen, and those that are not
    /// trainable (running statistics) are buffers. They are the module's own tensors, so that moving, training and
    /// loading the model changes the tensors that the module uses. A module with another forward (several inputs,
    /// several outputs) must implement [`Module`] and register its variables with [`ParamPath::adopt_variables`].
    ///
    /// ```
    /// use brigade_nn::Model;
    /// use tch::{Device, Kind, Tensor};
    /// use tch::nn;
    ///
    /// let variables = nn::VarStore::new(Device::Cpu);
    /// let root = variables.root();
    /// let net = nn::seq_t()
    ///     .add(nn::linear(&root / "hidden", 8, 16, Default::default()))
    ///     .add(nn::batch_norm1d(&root / "norm", 16, Default::default()))
    ///     .add_fn_t(|x, train| x.relu().dropout(0.1, train))
    ///     .add(nn::linear(&root / "head", 16, 2, Default::default()));
    /// let mut model = Model::from_var_store(variables, net)?;
    /// assert_eq!(model.parameters()[0].name, "hidden.bias"); // tch makes it first
    /// assert_eq!(model.buffers().len(), 2); // the running statistics of `norm`
    /// model.eval();
    /// assert_eq!(model.forward(&Tensor::ones([4, 8], (Kind::Float, Device::Cpu)))?.size(), [4, 2]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ModelError::Build`] for a trainable variable of integers; [`crate::ModelError::NotFloatingPoint`] if
    /// the store's kind has no gradients.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the model moves the variables, and the store would not know where they lie"
    )]
    pub fn from_var_store(variables: VarStore, module: M) -> Result<Self> {
        Model::builder().device(variables.device()).kind(variables.kind()).build(
            |path: &ParamPath<'_>| {
                path.adopt_variables(&variables);
                TchModule { module, training: path.training() }
            },
        )
    }
}
