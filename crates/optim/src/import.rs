//! Loading of an optimizer's state that PyTorch has saved: `torch.save(optimizer.state_dict())`, and Accelerate's
//! `optimizer.bin`.

use std::path::Path;

use brigade_checkpoint::pth::PthFile;
use brigade_checkpoint::torch_optimizer::{StateTensor, TorchStateError, from_torch};
use brigade_torch::{Result, tensor_from_bytes};
use tch::Tensor;

use crate::optimizer::Optimizer;
use crate::state::{OptimizerState, StateMismatch};

impl Optimizer {
    /// Loads the state of an optimizer that PyTorch has saved for the same model: `torch.save(optimizer.state_dict(),
    /// path)`, or `optimizer.bin` of Accelerate. Nothing in the file is executed.
    ///
    /// The optimizer must be built like the one in Python: the same kind and hyperparameters, and the parameters in as
    /// many groups in the same order. Parameters are matched by name if the file contains names (`param_names`, since
    /// PyTorch 2.6), otherwise by their order.
    ///
    /// ```
    /// use brigade_optim::Adam;
    /// # use tch::nn::{Init, VarStore};
    /// # let vs = VarStore::new(tch::Device::Cpu);
    /// # for (name, shape) in [("p0", vec![4, 3]), ("p1", vec![7]), ("p2", vec![2, 3, 3, 3])] {
    /// #     let _ = vs.root().var(name, &shape, Init::Const(0.0));
    /// # }
    /// // After 3 steps of `torch.optim.Adam(…, lr=0.01, betas=(0.8, 0.9), amsgrad=True)`.
    /// let mut optimizer = Adam::default().lr(0.01).betas(0.8, 0.9).amsgrad(true).build(&vs)?;
    /// optimizer.load_pytorch("tests/golden/optimizer_adam.pt")?;
    /// assert_eq!(optimizer.steps(), 3);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_checkpoint::Error`] when the file cannot be read; [`crate::StateMismatch`] with the first difference.
    /// Nothing is changed then.
    pub fn load_pytorch(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let mut file = PthFile::open(path)?;
        let tree = file.value()?.try_map(&mut |_, stored| -> Result<Handle> {
            let mut bytes = file.read_tensor(&stored)?;
            Ok(Handle(tensor_from_bytes(&mut bytes, &stored.size, stored.storage.dtype)?))
        })?;
        let mut inner = self.lock();
        let like = inner
            .state_dict()?
            .to_value()
            .try_map(&mut |_, it| Ok::<_, StateMismatch>(Handle(it)))?;
        let (state, _) = from_torch(&tree, &like).map_err(StateMismatch::from)?;
        let state = OptimizerState::from_value(&state, |tensor| tensor.0.shallow_clone()).map_err(
            |found| StateMismatch::Layout { expected: "an optimizer's state".into(), found },
        )?;
        inner.load_state_dict(&state, false)
    }
}

/// Tensor whose clones share its memory.
struct Handle(Tensor);

impl Clone for Handle {
    fn clone(&self) -> Self {
        Self(self.0.shallow_clone())
    }
}

impl StateTensor for Handle {
    fn scalar(&self) -> Option<f64> {
        if self.0.numel() == 1 { self.0.f_double_value(&[]).ok() } else { None }
    }

    fn from_scalar(number: f64) -> Self {
        Self(Tensor::from(number))
    }
}

impl From<TorchStateError> for StateMismatch {
    fn from(error: TorchStateError) -> Self {
        match error {
            TorchStateError::Layout { expected, found } => Self::Layout { expected, found },
            TorchStateError::Groups { expected, found } => Self::Groups { expected, found },
            TorchStateError::Sizes { group, expected, found } => {
                Self::Sizes { group, expected, found }
            }
            TorchStateError::Parameter { group, index, expected, found } => Self::Parameter {
                of: format!("group {group}"),
                index,
                expected: format!("`{expected}`"),
                found: format!("`{found}`"),
            },
            TorchStateError::Missing { group, name } => Self::Missing { group, name },
            error => Self::Layout {
                expected: "an optimizer's state of PyTorch".to_owned(),
                found: error.to_string(),
            },
        }
    }
}
