//! Steps that are recorded once and replayed.

use brigade_torch::{Result, TensorTree};

use super::Accelerator;
use crate::capture::CapturedStep;

impl Accelerator {
    /// Records a whole training step as a CUDA graph (forward, backward, reduction, clipping, optimizer and loss
    /// scale), and replays it for each further batch with one call of the GPU's driver. Use it for small networks,
    /// whose kernels take less time than their launches.
    ///
    /// The first three batches run as they are, then the step is recorded, and from the fourth on it is replayed; a
    /// batch of other shapes runs once and is recorded, too. The losses equal, bit for bit, those of a step that is not
    /// recorded. What changes from step to step lies on the device: the batch, which is copied into the tensors that
    /// were recorded, learning rates, the loss scale with its overflows, counts of steps, and random numbers, so that
    /// dropout differs between replays.
    ///
    /// The body gets a batch and returns tensors, such as the loss; [`CapturedStep::run`] returns copies of them. The
    /// body is called for the first batches only, so its work on the host is not repeated in a replay: reading values
    /// of tensors, branches, counters and messages belong after `run`. Schedules may step in the body or after it. The
    /// training mode of the models must not change after the recording; call [`CapturedStep::forget`] to record again.
    /// A changed momentum or weight decay causes one new recording: from then on the optimizer is called between two
    /// recordings in each step, because its kernels receive those numbers by value. The same holds for optimizers of
    /// float64 parameters, and for custom rules that do not read their numbers from the device.
    ///
    /// A step that cannot be recorded runs normally: on a CPU, with Gloo between several ranks, with accumulation over
    /// several batches, with custom communication hooks, with sharded models, in debug mode, and after an operation
    /// that waits for the device, which a line on standard error reports once.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use brigade_optim::Adam;
    /// use brigade_train::Accelerator;
    /// use tch::{Kind, Tensor};
    ///
    /// let accelerator = Accelerator::new()?;
    /// let model = Model::new(|p| Linear::new(p, 4, 2))?;
    /// let optimizer = Adam::default().build(&model)?;
    /// let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    /// let mut step = accelerator.capture(|(inputs, labels): &(Tensor, Tensor)| {
    ///     let loss = model.forward(inputs)?.cross_entropy_for_logits(labels);
    ///     optimizer.zero_grad()?;
    ///     accelerator.backward(&loss)?;
    ///     optimizer.step()?;
    ///     Ok(loss)
    /// });
    /// let inputs = Tensor::ones([8, 4], (Kind::Float, accelerator.device()));
    /// let labels = Tensor::zeros([8], (Kind::Int64, accelerator.device()));
    /// let first = step.run(&(inputs.shallow_clone(), labels.shallow_clone()))?;
    /// let second = step.run(&(inputs, labels))?;
    /// assert!(second.double_value(&[]) < first.double_value(&[]));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn capture<'a, B, R>(
        &self,
        body: impl FnMut(&B) -> Result<R> + 'a,
    ) -> CapturedStep<'a, B, R>
    where
        B: TensorTree<Owned = B>,
        R: TensorTree<Owned = R>,
    {
        let (quiet, hook) = (self.options.quiet, &self.options.models.comm_hook);
        CapturedStep::new(&self.gradients, hook, quiet, Box::new(body))
    }
}
