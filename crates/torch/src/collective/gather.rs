//! Collectives that copy data: from one rank to all, from all ranks to one, from all to all.

use std::time::Instant;

use tch::Tensor;

use super::{copies, copy, dense, fill_all, rows, unshared};
use crate::bridge::{borrow, borrow_all, ffi};
use crate::check::{describe, describe_all};
use crate::error::Error;
use crate::group::ProcessGroup;
use crate::work::Work;

impl ProcessGroup {
    /// Replaces the tensor by that of rank `root`.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`], with [`crate::Fault::Invalid`] when there is no such rank.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use tch::Tensor;
    /// let mut number = Tensor::from(group.rank() as f64);
    /// group.broadcast(&mut number, 0)?;
    /// assert_eq!(number.double_value(&[]), 0.0);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[track_caller]
    pub fn broadcast(&self, tensor: &mut Tensor, root: usize) -> Result<(), Error> {
        self.begin_broadcast(tensor.shallow_clone(), root)?.wait().map(drop)
    }

    /// Starts [`ProcessGroup::broadcast`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::broadcast`].
    #[track_caller]
    pub fn start_broadcast(&self, tensor: Tensor, root: usize) -> Result<Work<Tensor>, Error> {
        self.begin_broadcast(unshared(tensor)?, root)
    }

    #[track_caller]
    fn begin_broadcast(&self, tensor: Tensor, root: usize) -> Result<Work<Tensor>, Error> {
        let root = self.rank_number("broadcast", root)?;
        self.in_place("broadcast", &root, tensor, |group, tensor, limit| {
            ffi::broadcast(group, borrow(tensor), root.into(), limit)
        })
    }

    /// Replaces all tensors by those of rank `root`, in few messages of up to `bytes` each. The time limit of each
    /// message is the group's, not that of [`ProcessGroup::within`].
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`], with [`crate::Fault::Invalid`] when there is no such rank.
    #[track_caller]
    pub fn broadcast_coalesced(
        &self,
        tensors: &[&Tensor],
        bytes: usize,
        root: usize,
    ) -> Result<(), Error> {
        let root = self.rank_number("broadcast_coalesced", root)?;
        self.check("broadcast_coalesced", || format!("from {root} {}", describe_all(tensors)))?;
        let since = Instant::now();
        // c10d uses each tensor directly and copies into it under no_grad.
        let (started, done) = self.exclusively(|group| {
            let started = self.next_collective("broadcast_coalesced");
            (started, ffi::broadcast_coalesced(group, &borrow_all(tensors), bytes, root))
        });
        Ok(done.map_err(|error| self.failure(started, since, &error))?)
    }

    /// Gathers the tensors of all ranks on every rank, in the order of ranks.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`] if the communication fails.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use tch::Tensor;
    /// let all = group.all_gather(&Tensor::from(group.rank() as f64))?;
    /// assert_eq!(all.last().unwrap().double_value(&[]), (group.size() - 1) as f64);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[track_caller]
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Vec<Tensor>, Error> {
        self.begin_all_gather(tensor)?.wait()
    }

    /// Starts [`ProcessGroup::all_gather`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_gather`].
    #[track_caller]
    pub fn start_all_gather(&self, tensor: &Tensor) -> Result<Work<Vec<Tensor>>, Error> {
        self.begin_all_gather(&copy(tensor)?)
    }

    #[track_caller]
    fn begin_all_gather(&self, tensor: &Tensor) -> Result<Work<Vec<Tensor>>, Error> {
        let input = dense(tensor)?;
        let outputs = self.empty_per_rank(&input)?;
        let pending = self.collective(
            "all_gather",
            || describe(&input),
            |group, limit| ffi::all_gather(group, &borrow_all(&outputs), borrow(&input), limit),
        )?;
        Ok(pending.giving(outputs).reading([input]))
    }

    /// Gathers the tensors of all ranks, concatenated along the first dimension: `[n, …]` becomes `[size * n, …]`, a
    /// scalar becomes `[size]`.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`] if the communication fails.
    #[track_caller]
    pub fn all_gather_flat(&self, tensor: &Tensor) -> Result<Tensor, Error> {
        self.begin_all_gather_flat(tensor)?.wait()
    }

    /// Starts [`ProcessGroup::all_gather_flat`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_gather_flat`].
    #[track_caller]
    pub fn start_all_gather_flat(&self, tensor: &Tensor) -> Result<Work<Tensor>, Error> {
        self.begin_all_gather_flat(&copy(tensor)?)
    }

    #[track_caller]
    fn begin_all_gather_flat(&self, tensor: &Tensor) -> Result<Work<Tensor>, Error> {
        let (input, output) = self.flat_input_and_output(tensor)?;
        let pending = self.collective(
            "all_gather_flat",
            || describe(&input),
            |group, limit| ffi::all_gather_flat(group, borrow(&output), borrow(&input), limit),
        )?;
        Ok(pending.giving(output).reading([input]))
    }

    fn flat_input_and_output(&self, tensor: &Tensor) -> Result<(Tensor, Tensor), Error> {
        let input = rows(tensor)?;
        let shape = self.shape_of_all(&input);
        let output = Tensor::f_empty(&shape, (input.f_kind()?, input.device()))?;
        Ok((input, output))
    }

    /// Gathers each tensor as [`ProcessGroup::all_gather_flat`] does, in one operation, or in several concurrent ones
    /// with Gloo if some ranks are not Brigade's.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_gather_flat`], and [`crate::Fault::Invalid`] when the tensors are
    /// not on one device.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use tch::Tensor;
    /// let all = group.all_gather_flat_coalesced(&[Tensor::from(1.0), Tensor::from_slice(&[2i64, 3])])?;
    /// assert_eq!(all[1].size(), [2 * group.size() as i64]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[track_caller]
    pub fn all_gather_flat_coalesced(&self, tensors: &[Tensor]) -> Result<Vec<Tensor>, Error> {
        self.begin_all_gather_flat_coalesced(tensors)?.wait()
    }

    /// Starts [`ProcessGroup::all_gather_flat_coalesced`] without waiting for it, and returns a handle of the
    /// operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::all_gather_flat_coalesced`].
    #[track_caller]
    pub fn start_all_gather_flat_coalesced(
        &self,
        tensors: &[Tensor],
    ) -> Result<Work<Vec<Tensor>>, Error> {
        self.begin_all_gather_flat_coalesced(&copies(tensors)?)
    }

    #[track_caller]
    fn begin_all_gather_flat_coalesced(
        &self,
        tensors: &[Tensor],
    ) -> Result<Work<Vec<Tensor>>, Error> {
        const OPERATION: &str = "all_gather_flat_coalesced";
        self.on_one_device(OPERATION, tensors)?;
        let pairs = tensors.iter().map(|tensor| self.flat_input_and_output(tensor));
        let (inputs, outputs): (Vec<_>, Vec<_>) =
            pairs.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        self.all_gather_list(OPERATION, outputs, inputs)
    }

    /// Gathers each of `inputs` as [`ProcessGroup::all_gather_flat`] does, into `outputs`, in one operation. An input
    /// may be this rank's own rows of its output, which are not copied then; other tensors must not share memory.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`], with [`crate::Fault::Invalid`] when an output is not `size` times its input's
    /// shape, or the tensors are not on one device.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use tch::{Device, Kind, Tensor};
    /// let weight = Tensor::zeros([2 * group.size() as i64, 3], (Kind::Float, Device::Cpu));
    /// let shard = weight.narrow(0, 2 * group.rank() as i64, 2).fill_(1.0);
    /// group.all_gather_into(&mut [weight.shallow_clone()], &[shard])?;
    /// assert_eq!(weight.mean(Kind::Float).double_value(&[]), 1.0);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[track_caller]
    pub fn all_gather_into(&self, outputs: &mut [Tensor], inputs: &[Tensor]) -> Result<(), Error> {
        const OPERATION: &str = "all_gather_into";
        self.parts_fit(OPERATION, outputs, inputs)?;
        let outputs = outputs.iter().map(Tensor::shallow_clone).collect();
        let inputs = inputs.iter().map(rows).collect::<Result<_, _>>()?;
        self.all_gather_list(OPERATION, outputs, inputs)?.wait().map(drop)
    }

    #[track_caller]
    fn all_gather_list(
        &self,
        operation: &'static str,
        outputs: Vec<Tensor>,
        inputs: Vec<Tensor>,
    ) -> Result<Work<Vec<Tensor>>, Error> {
        let targets = outputs.iter().map(dense).collect::<Result<Vec<_>, _>>()?;
        let what = || describe_all(&inputs);
        let pending = self.collective(operation, what, |group, limit| {
            let (targets, inputs) = (borrow_all(&targets), borrow_all(&inputs));
            ffi::all_gather_flat_coalesced(group, &targets, &inputs, limit)
        })?;
        Ok(fill_all(pending, outputs, targets).reading(inputs))
    }

    /// Gathers the tensors of all ranks on rank `root`, in the order of ranks. `None` on other ranks.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`], with [`crate::Fault::Invalid`] when there is no such rank.
    #[track_caller]
    pub fn gather(&self, tensor: &Tensor, root: usize) -> Result<Option<Vec<Tensor>>, Error> {
        self.begin_gather(tensor, root)?.wait()
    }

    /// Starts [`ProcessGroup::gather`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::gather`].
    #[track_caller]
    pub fn start_gather(
        &self,
        tensor: &Tensor,
        root: usize,
    ) -> Result<Work<Option<Vec<Tensor>>>, Error> {
        self.begin_gather(&copy(tensor)?, root)
    }

    #[track_caller]
    fn begin_gather(
        &self,
        tensor: &Tensor,
        root: usize,
    ) -> Result<Work<Option<Vec<Tensor>>>, Error> {
        let number = self.rank_number("gather", root)?;
        let input = dense(tensor)?;
        let outputs = if root == self.rank() { Some(self.empty_per_rank(&input)?) } else { None };
        let what = || format!("to {root} {}", describe(&input));
        let pending = self.collective("gather", what, |group, limit| {
            let outputs = borrow_all(outputs.as_deref().unwrap_or_default());
            ffi::gather(group, &outputs, borrow(&input), number.into(), limit)
        })?;
        Ok(pending.giving(outputs).reading([input]))
    }

    /// Fills `output` with this rank's tensor of rank `root`'s list, which only that rank passes.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`], with [`crate::Fault::Invalid`] when there is no such rank, when the root's
    /// list is not one tensor per rank of `output`'s shape and type, or when another rank gives a list.
    #[track_caller]
    pub fn scatter(
        &self,
        output: &mut Tensor,
        inputs: Option<&[Tensor]>,
        root: usize,
    ) -> Result<(), Error> {
        self.begin_scatter(output.shallow_clone(), inputs, root)?.wait().map(drop)
    }

    /// Starts [`ProcessGroup::scatter`] without waiting for it, and returns a handle of the operation.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::scatter`].
    #[track_caller]
    pub fn start_scatter(
        &self,
        output: Tensor,
        inputs: Option<&[Tensor]>,
        root: usize,
    ) -> Result<Work<Tensor>, Error> {
        let inputs = inputs.map(copies).transpose()?;
        self.begin_scatter(unshared(output)?, inputs.as_deref(), root)
    }

    #[track_caller]
    fn begin_scatter(
        &self,
        output: Tensor,
        inputs: Option<&[Tensor]>,
        root: usize,
    ) -> Result<Work<Tensor>, Error> {
        let number = self.rank_number("scatter", root)?;
        let inputs = match inputs {
            Some(list) if root == self.rank() => self.one_per_rank("scatter", list)?,
            None if root != self.rank() => Vec::new(),
            Some(_) => {
                return Err(self.invalid_argument(
                    "scatter",
                    format!("only rank {root}, the root, gives a list of tensors"),
                ));
            }
            None => {
                return Err(self
                    .invalid_argument("scatter", "the root must give one tensor per rank".into()));
            }
        };
        for input in &inputs {
            self.same_shape("scatter", input, &output)?;
        }
        let work = self.in_place("scatter", &number, output, |group, output, limit| {
            ffi::scatter(group, borrow(output), &borrow_all(&inputs), number.into(), limit)
        })?;
        Ok(work.reading(inputs))
    }
}
