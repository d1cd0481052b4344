//! Collectives that reduce the values of all ranks.

use tch::{Kind, Tensor};

use super::{copies, copy, dense, fill_all, rows, unshared};
use crate::bridge::{borrow, borrow_all, ffi};
use crate::check::{describe, describe_all};
use crate::error::Error;
use crate::group::ProcessGroup;
use crate::work::Work;

/// Operation by which the values of several ranks are reduced to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum of the values.
    Sum,
    /// The sum divided by the number of ranks. Floating-point tensors only.
    Mean,
    /// Product of the values.
    Product,
    /// Minimum of the values.
    Min,
    /// Maximum of the values.
    Max,
    /// Bitwise and, of integers.
    BitAnd,
    /// Bitwise or, of integers.
    BitOr,
    /// Bitwise exclusive or, of integers.
    BitXor,
}

impl ProcessGroup {
    /// Replaces the tensor by its reduction over all ranks, the same bits on every rank.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`], with [`crate::Fault::Invalid`] for a mean of integers or a bitwise
    /// operation on anything else.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use brigade_torch::ReduceOp;
    /// use tch::Tensor;
    /// let mut one = Tensor::from(1.0);
    /// group.all_reduce(&mut one, ReduceOp::Sum)?;
    /// assert_eq!(one.double_value(&[]), group.size() as f64);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[track_caller]
    pub fn all_reduce(&self, tensor: &mut Tensor, op: ReduceOp) -> Result<(), Error> {
        self.begin_all_reduce(tensor.shallow_clone(), op)?.wait().map(drop)
    }

    /// Starts [`ProcessGroup::all_reduce`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_reduce`].
    #[track_caller]
    pub fn start_all_reduce(&self, tensor: Tensor, op: ReduceOp) -> Result<Work<Tensor>, Error> {
        self.begin_all_reduce(unshared(tensor)?, op)
    }

    #[track_caller]
    fn begin_all_reduce(&self, tensor: Tensor, op: ReduceOp) -> Result<Work<Tensor>, Error> {
        let (raw, divisor) = self.reduction("all_reduce", op, &tensor)?;
        let work = self.in_place("all_reduce", &op, tensor, |group, tensor, limit| {
            ffi::all_reduce(group, borrow(tensor), raw, limit)
        })?;
        Ok(divided(work, divisor))
    }

    /// Replaces each tensor by its reduction over all ranks: with NCCL in one kernel, with Gloo in one message for each
    /// type, which is faster than one after another. The results are those of [`ProcessGroup::all_reduce`].
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_reduce`], and [`crate::Fault::Invalid`] when the tensors are not
    /// on one device.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use brigade_torch::ReduceOp;
    /// use tch::Tensor;
    /// let mut sums = [Tensor::from(1.0), Tensor::from_slice(&[2i64, 3])];
    /// group.all_reduce_coalesced(&mut sums, ReduceOp::Sum)?;
    /// assert_eq!(sums[0].double_value(&[]), group.size() as f64);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[track_caller]
    pub fn all_reduce_coalesced(&self, tensors: &mut [Tensor], op: ReduceOp) -> Result<(), Error> {
        let handles = tensors.iter().map(Tensor::shallow_clone).collect();
        self.begin_all_reduce_coalesced(handles, op)?.wait().map(drop)
    }

    /// Starts [`ProcessGroup::all_reduce_coalesced`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_reduce_coalesced`].
    #[track_caller]
    pub fn start_all_reduce_coalesced(
        &self,
        tensors: Vec<Tensor>,
        op: ReduceOp,
    ) -> Result<Work<Vec<Tensor>>, Error> {
        let tensors = tensors.into_iter().map(unshared).collect::<Result<_, _>>()?;
        self.begin_all_reduce_coalesced(tensors, op)
    }

    #[track_caller]
    fn begin_all_reduce_coalesced(
        &self,
        tensors: Vec<Tensor>,
        op: ReduceOp,
    ) -> Result<Work<Vec<Tensor>>, Error> {
        const OPERATION: &str = "all_reduce_coalesced";
        let (raw, divisor) = self.reduction_of_all(OPERATION, op, &tensors)?;
        let targets = tensors.iter().map(dense).collect::<Result<Vec<_>, _>>()?;
        let what = || format!("{op:?} {}", describe_all(&targets));
        let pending = self.collective(OPERATION, what, |group, limit| {
            ffi::all_reduce_coalesced(group, &borrow_all(&targets), raw, limit)
        })?;
        Ok(all_divided(fill_all(pending, tensors, targets), divisor))
    }

    /// Replaces rank `root`'s tensor by the reduction over all ranks. The contents of the other ranks' tensors are
    /// undefined afterwards.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_reduce`], and [`crate::Fault::Invalid`] when there is no such
    /// rank.
    #[track_caller]
    pub fn reduce(&self, tensor: &mut Tensor, op: ReduceOp, root: usize) -> Result<(), Error> {
        self.begin_reduce(tensor.shallow_clone(), op, root)?.wait().map(drop)
    }

    /// Starts [`ProcessGroup::reduce`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::reduce`].
    #[track_caller]
    pub fn start_reduce(
        &self,
        tensor: Tensor,
        op: ReduceOp,
        root: usize,
    ) -> Result<Work<Tensor>, Error> {
        self.begin_reduce(unshared(tensor)?, op, root)
    }

    #[track_caller]
    fn begin_reduce(
        &self,
        tensor: Tensor,
        op: ReduceOp,
        root: usize,
    ) -> Result<Work<Tensor>, Error> {
        let (raw, divisor) = self.reduction("reduce", op, &tensor)?;
        let root = self.rank_number("reduce", root)?;
        let work = self.in_place("reduce", &(op, root), tensor, |group, tensor, limit| {
            ffi::reduce(group, borrow(tensor), root.into(), raw, limit)
        })?;
        Ok(divided(work, divisor))
    }

    /// Reduces tensor `i` of every rank's list onto rank `i`.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_reduce`], and [`crate::Fault::Invalid`] when the list is not one
    /// tensor per rank, all of one shape and type.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use brigade_torch::ReduceOp;
    /// use tch::Tensor;
    /// let parts: Vec<Tensor> = (0..group.size()).map(|i| Tensor::from(i as f64)).collect();
    /// let mine = group.reduce_scatter(&parts, ReduceOp::Sum)?;
    /// assert_eq!(mine.double_value(&[]), (group.size() * group.rank()) as f64);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[track_caller]
    pub fn reduce_scatter(&self, inputs: &[Tensor], op: ReduceOp) -> Result<Tensor, Error> {
        self.begin_reduce_scatter(inputs, op)?.wait()
    }

    /// Starts [`ProcessGroup::reduce_scatter`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::reduce_scatter`].
    #[track_caller]
    pub fn start_reduce_scatter(
        &self,
        inputs: &[Tensor],
        op: ReduceOp,
    ) -> Result<Work<Tensor>, Error> {
        self.begin_reduce_scatter(&copies(inputs)?, op)
    }

    #[track_caller]
    fn begin_reduce_scatter(&self, inputs: &[Tensor], op: ReduceOp) -> Result<Work<Tensor>, Error> {
        let inputs = self.one_per_rank("reduce_scatter", inputs)?;
        for input in &inputs {
            self.same_shape("reduce_scatter", input, &inputs[0])?;
        }
        let (raw, divisor) = self.reduction("reduce_scatter", op, &inputs[0])?;
        let output = inputs[self.rank()].f_empty_like()?;
        let what = || format!("{op:?} {}", describe(&output));
        let pending = self.collective("reduce_scatter", what, |group, limit| {
            ffi::reduce_scatter(group, borrow(&output), &borrow_all(&inputs), raw, limit)
        })?;
        Ok(divided(pending.giving(output).reading(inputs), divisor))
    }

    /// Reduces `[size * n, …]` over all ranks and returns rows `rank * n .. (rank + 1) * n`.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_reduce`], and [`crate::Fault::Invalid`] if the number of rows is
    /// not divisible by the number of ranks.
    #[track_caller]
    pub fn reduce_scatter_flat(&self, input: &Tensor, op: ReduceOp) -> Result<Tensor, Error> {
        self.begin_reduce_scatter_flat(input, op)?.wait()
    }

    /// Starts [`ProcessGroup::reduce_scatter_flat`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::reduce_scatter_flat`].
    #[track_caller]
    pub fn start_reduce_scatter_flat(
        &self,
        input: &Tensor,
        op: ReduceOp,
    ) -> Result<Work<Tensor>, Error> {
        self.begin_reduce_scatter_flat(&copy(input)?, op)
    }

    #[track_caller]
    fn begin_reduce_scatter_flat(
        &self,
        input: &Tensor,
        op: ReduceOp,
    ) -> Result<Work<Tensor>, Error> {
        let (raw, divisor) = self.reduction("reduce_scatter_flat", op, input)?;
        let input = dense(input)?;
        let mut shape = self.rows_for_all("reduce_scatter_flat", &input)?;
        shape[0] /= self.size() as i64;
        let output = Tensor::f_empty(&shape, (input.f_kind()?, input.device()))?;
        let what = || format!("{op:?} {}", describe(&input));
        let pending = self.collective("reduce_scatter_flat", what, |group, limit| {
            ffi::reduce_scatter_flat(group, borrow(&output), borrow(&input), raw, limit)
        })?;
        Ok(divided(pending.giving(output).reading([input]), divisor))
    }

    /// Reduces each tensor like [`ProcessGroup::reduce_scatter_flat`], in one operation, or in several concurrent ones
    /// with Gloo if some ranks are not Brigade's, or for types and operations that only Gloo supports.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::reduce_scatter_flat`], and [`crate::Fault::Invalid`] when the tensors
    /// are not on one device.
    #[track_caller]
    pub fn reduce_scatter_flat_coalesced(
        &self,
        inputs: &[Tensor],
        op: ReduceOp,
    ) -> Result<Vec<Tensor>, Error> {
        self.begin_reduce_scatter_flat_coalesced(inputs, op)?.wait()
    }

    /// Starts [`ProcessGroup::reduce_scatter_flat_coalesced`] without waiting for it, and returns a handle of the
    /// operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::reduce_scatter_flat_coalesced`].
    #[track_caller]
    pub fn start_reduce_scatter_flat_coalesced(
        &self,
        inputs: &[Tensor],
        op: ReduceOp,
    ) -> Result<Work<Vec<Tensor>>, Error> {
        self.begin_reduce_scatter_flat_coalesced(&copies(inputs)?, op)
    }

    #[track_caller]
    fn begin_reduce_scatter_flat_coalesced(
        &self,
        inputs: &[Tensor],
        op: ReduceOp,
    ) -> Result<Work<Vec<Tensor>>, Error> {
        const OPERATION: &str = "reduce_scatter_flat_coalesced";
        self.on_one_device(OPERATION, inputs)?;
        let inputs = inputs.iter().map(dense).collect::<Result<Vec<_>, _>>()?;
        let output = |input: &Tensor| -> Result<Tensor, Error> {
            let mut shape = self.rows_for_all(OPERATION, input)?;
            shape[0] /= self.size() as i64;
            Ok(Tensor::f_empty(&shape, (input.f_kind()?, input.device()))?)
        };
        let outputs = inputs.iter().map(output).collect::<Result<Vec<_>, _>>()?;
        self.reduce_scatter_list(OPERATION, outputs, inputs, op)
    }

    /// Reduces each of `inputs` as [`ProcessGroup::reduce_scatter_flat`] does, into `outputs`, in one operation. An
    /// output may be the rows of its input that stay on this rank; other tensors must not share memory.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_reduce`], and [`crate::Fault::Invalid`] when an input is not
    /// `size` times its output's shape, or the tensors are not on one device.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use brigade_torch::ReduceOp;
    /// use tch::{Device, Kind, Tensor};
    /// let gradients = Tensor::ones([2 * group.size() as i64, 3], (Kind::Float, Device::Cpu));
    /// let mine = gradients.narrow(0, 2 * group.rank() as i64, 2);
    /// group.reduce_scatter_into(&mut [mine.shallow_clone()], &[gradients], ReduceOp::Sum)?;
    /// assert_eq!(mine.double_value(&[0, 0]), group.size() as f64);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[track_caller]
    pub fn reduce_scatter_into(
        &self,
        outputs: &mut [Tensor],
        inputs: &[Tensor],
        op: ReduceOp,
    ) -> Result<(), Error> {
        const OPERATION: &str = "reduce_scatter_into";
        self.parts_fit(OPERATION, inputs, outputs)?;
        let outputs = outputs.iter().map(Tensor::shallow_clone).collect();
        let inputs = inputs.iter().map(dense).collect::<Result<_, _>>()?;
        self.reduce_scatter_list(OPERATION, outputs, inputs, op)?.wait().map(drop)
    }

    #[track_caller]
    fn reduce_scatter_list(
        &self,
        operation: &'static str,
        outputs: Vec<Tensor>,
        inputs: Vec<Tensor>,
        op: ReduceOp,
    ) -> Result<Work<Vec<Tensor>>, Error> {
        let (raw, divisor) = self.reduction_of_all(operation, op, &inputs)?;
        let targets = outputs.iter().map(rows).collect::<Result<Vec<_>, _>>()?;
        let what = || format!("{op:?} {}", describe_all(&inputs));
        let pending = self.collective(operation, what, |group, limit| {
            let (targets, inputs) = (borrow_all(&targets), borrow_all(&inputs));
            ffi::reduce_scatter_flat_coalesced(group, &targets, &inputs, raw, limit)
        })?;
        Ok(all_divided(fill_all(pending, outputs, targets).reading(inputs), divisor))
    }

    /// Returns the result of [`ProcessGroup::reduction`] for several tensors, and checks that they are on one device.
    fn reduction_of_all(
        &self,
        operation: &'static str,
        op: ReduceOp,
        tensors: &[Tensor],
    ) -> Result<(ffi::Reduction, Option<f64>), Error> {
        self.on_one_device(operation, tensors)?;
        let mut found = (ffi::Reduction::Sum, None);
        for tensor in tensors {
            found = self.reduction(operation, op, tensor)?;
        }
        Ok(found)
    }

    /// Returns the operation for c10d and the divisor of its result.
    fn reduction(
        &self,
        operation: &'static str,
        op: ReduceOp,
        tensor: &Tensor,
    ) -> Result<(ffi::Reduction, Option<f64>), Error> {
        let kind = tensor.f_kind()?;
        let integer = matches!(
            kind,
            Kind::Bool | Kind::Uint8 | Kind::Int8 | Kind::Int16 | Kind::Int | Kind::Int64
        );
        match op {
            ReduceOp::Mean if integer => {
                return Err(self.invalid_argument(
                    operation,
                    format!("the mean of {kind:?} is not an integer; convert it or use Sum"),
                ));
            }
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor if !integer => {
                return Err(self.invalid_argument(
                    operation,
                    format!("{op:?} works on integers, and these are {kind:?}"),
                ));
            }
            _ => {}
        }
        Ok(match op {
            ReduceOp::Sum => (ffi::Reduction::Sum, None),
            ReduceOp::Product => (ffi::Reduction::Product, None),
            ReduceOp::Min => (ffi::Reduction::Min, None),
            ReduceOp::Max => (ffi::Reduction::Max, None),
            ReduceOp::BitAnd => (ffi::Reduction::BitAnd, None),
            ReduceOp::BitOr => (ffi::Reduction::BitOr, None),
            ReduceOp::BitXor => (ffi::Reduction::BitXor, None),
            ReduceOp::Mean if !self.backend().has_mean(tensor.device()) => {
                (ffi::Reduction::Sum, Some(self.size() as f64))
            }
            ReduceOp::Mean => (ffi::Reduction::Mean, None),
        })
    }
}

fn divided(work: Work<Tensor>, divisor: Option<f64>) -> Work<Tensor> {
    match divisor {
        None => work,
        Some(divisor) => work.then(move |tensor| divide(tensor, divisor)),
    }
}

fn all_divided(work: Work<Vec<Tensor>>, divisor: Option<f64>) -> Work<Vec<Tensor>> {
    match divisor {
        None => work,
        Some(divisor) => {
            work.then(move |tensors| tensors.iter_mut().try_for_each(|it| divide(it, divisor)))
        }
    }
}

fn divide(tensor: &mut Tensor, divisor: f64) -> Result<(), Error> {
    tch::no_grad(|| tensor.f_div_scalar_(divisor)).map(drop)?;
    Ok(())
}
