//! The training step: backward, accumulation, clipping, and ranks with unequal work.

use brigade_data::Batch;
use brigade_torch::{BackwardOptions, Result};
use tch::Tensor;

use super::Accelerator;
use crate::gradients::accumulate::GradientAccumulator;
use crate::gradients::backward::Gradients;
use crate::gradients::clip::ClipNorm;
use crate::gradients::join::JoinInputs;
use crate::gradients::local_sgd::LocalSgd;
use crate::gradients::models::{NoSyncGuard, PreparedModels};
use crate::loss_weight::LossWeight;
use crate::parameters::Parameters;

impl Accelerator {
    /// Returns the gradient accumulator, for code that needs nothing else of the Accelerator.
    #[must_use]
    pub fn gradient_accumulator(&self) -> &GradientAccumulator {
        &self.gradients.accumulator
    }

    /// Returns `true` if the current batch ends its accumulation window: its backward reduces gradients, and prepared
    /// optimizers and schedulers step.
    #[must_use]
    pub fn sync_gradients(&self) -> bool {
        self.gradients.accumulator.sync_gradients()
    }

    /// Computes the gradients of `loss`, and adds them to the existing gradients. If the current batch ends its
    /// accumulation window, they are averaged over the ranks.
    ///
    /// The loss is divided by the number of batches in the window, which is smaller for a window that the end of the
    /// data cuts short. The sum of the gradients is then the gradient of the mean over the window.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone; [`brigade_torch::ErrorKind::Tensor`] when the
    /// loss has no graph or more than one value; [`crate::TrainError::LossNotFinite`] on every rank when the loss of
    /// one is infinite or NaN ([`crate::AcceleratorBuilder::check_loss`]).
    #[track_caller]
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        self.backward_with(loss, BackwardOptions::default())
    }

    /// Computes gradients as [`Accelerator::backward`] does, with options: `retain_graph` for a further backward
    /// through the same forward, `create_graph` for gradients of gradients. [`brigade_torch::grad`] computes gradients
    /// of chosen tensors, such as a critic's input under WGAN-GP.
    ///
    /// A second backward through a graph that was kept adds to the gradients, and is averaged over the ranks like the
    /// first. It is an error with `find_unused_parameters` or `static_graph`, and in
    /// [`Accelerator::join_uneven_inputs`], where the reducer does not support it.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    /// use brigade_torch::{BackwardOptions, GradOptions, grad};
    /// use brigade_train::Accelerator;
    /// use tch::{Kind, Tensor};
    ///
    /// let accelerator = Accelerator::new()?;
    /// let critic = accelerator.prepare(Model::new(|p| Linear::new(p, 4, 1))?)?;
    /// let mixed = Tensor::ones([8, 4], (Kind::Float, accelerator.device())).set_requires_grad(true);
    /// let score = critic.forward(&mixed)?.sum(Kind::Float);
    /// let backward = BackwardOptions { create_graph: true, ..Default::default() };
    /// let slopes = grad(&[&score], &[&mixed], GradOptions { backward, ..Default::default() })?;
    /// let norm = slopes[0].as_ref().unwrap().square().sum_dim_intlist(1, false, None).sqrt();
    /// accelerator.backward(&(norm - 1.0).square().mean(Kind::Float))?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`Accelerator::backward`].
    #[track_caller]
    pub fn backward_with(&self, loss: &Tensor, options: BackwardOptions) -> Result<()> {
        self.gradients.backward(loss, options)
    }

    /// Returns `true` if the last step of a prepared optimizer was skipped, because gradients of 16 bits had overflowed
    /// or a loss was not finite. Schedules do not advance then.
    #[must_use]
    pub fn optimizer_step_was_skipped(&self) -> bool {
        self.gradients.accumulator.skipped()
    }

    /// Runs the body for one batch of an accumulation window. The model's forward, the backward, the optimizer's and
    /// scheduler's `step` and `zero_grad` all go inside; this call decides which of them take effect.
    ///
    /// The last batch of the data ends the window, however short it is.
    ///
    /// ```
    /// # use brigade_data::DataLoader;
    /// # use brigade_datasets::Digits;
    /// # use brigade_nn::{Linear, Model};
    /// # use brigade_optim::Sgd;
    /// # use brigade_train::Accelerator;
    /// let accelerator = Accelerator::builder().gradient_accumulation_steps(4).build()?;
    /// # let model = Model::new(|p| Linear::new(p, 64, 10))?;
    /// # let optimizer = Sgd::new(0.1).build(&model)?;
    /// # let train = DataLoader::new(Digits::test()?).batch_size(64);
    /// let (model, mut optimizer, train) = accelerator.prepare((model, optimizer, train))?;
    /// for batch in &train {
    ///     let batch = batch?;
    ///     let (images, labels) = &*batch;
    ///     accelerator.accumulate(&model, &batch, || {
    ///         let loss = model.forward(&images.flatten(1, -1))?.cross_entropy_for_logits(labels);
    ///         accelerator.backward(&loss)?;
    ///         optimizer.step()?;
    ///         optimizer.zero_grad()
    ///     })?;
    /// }
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the error of the body.
    pub fn accumulate<B, R>(
        &self,
        models: &(impl PreparedModels + ?Sized),
        batch: &Batch<B>,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        self.gradients.accumulator.accumulate(models, batch, body)
    }

    /// Runs the body without averaging gradients over the ranks: forward and backward must both be
    /// inside. Gradients add up on each rank until a backward outside.
    ///
    /// # Errors
    /// Returns the error of the body.
    pub fn no_sync<R>(
        &self,
        models: &(impl PreparedModels + ?Sized),
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let _switched = NoSyncGuard::off(models);
        body()
    }

    /// Runs the backward of a loss that is a sum over `weight` tokens (or samples, or pixels). The gradient is that of
    /// the mean over all tokens of the window on all ranks, however unevenly they are spread. [`Accelerator::backward`]
    /// computes the mean of the batches' means, which differs if the batches have different numbers of tokens.
    ///
    /// The weight is a number, or a tensor of one element. The host does not wait for the value of a tensor on a GPU,
    /// so that the step can be recorded ([`Accelerator::capture`]).
    ///
    /// Call it once for each batch, with all of the models that the loss comes from. It sends one number for each
    /// window, so all ranks must have the same number of windows.
    ///
    /// ```
    /// # use brigade_nn::{Linear, Model};
    /// # use brigade_train::Accelerator;
    /// # use tch::Tensor;
    /// # let accelerator = Accelerator::builder().cpu(true).build()?;
    /// # let model = accelerator.prepare(Model::new(|p| Linear::new(p, 16, 10))?)?;
    /// # let inputs = Tensor::ones([4, 16], (tch::Kind::Float, tch::Device::Cpu));
    /// let labels = Tensor::from_slice(&[7_i64, 1, 4, -100]);
    /// // -100 marks padding: cross entropy leaves it out of its sum.
    /// let logits = model.forward(&inputs)?;
    /// let loss = logits.cross_entropy_loss::<Tensor>(&labels, None, tch::Reduction::Sum, -100, 0.0);
    /// let tokens = labels.not_equal(-100).sum(tch::Kind::Int64);
    /// assert_eq!(tokens, Tensor::from(3i64));
    /// accelerator.backward_weighted(&model, &loss, &tokens)?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// A window without a token has gradients of 0.
    ///
    /// # Errors
    /// Returns the same errors as [`Accelerator::backward`], and [`brigade_torch::ErrorKind::InvalidArgument`], on
    /// every rank at the end of the window, when a weight is negative, NaN, or a tensor of several elements. If the
    /// weight is a tensor on a GPU, the loss becomes NaN instead.
    pub fn backward_weighted(
        &self,
        models: &(impl PreparedModels + ?Sized),
        loss: &Tensor,
        weight: impl Into<LossWeight>,
    ) -> Result<()> {
        self.gradients.backward_weighted(models, loss, &weight.into())
    }

    /// Scales the gradients of all parameters together so that their norm is at most `clip`, and returns the norm
    /// before, a scalar on their device. A number is the limit of the 2-norm; [`ClipNorm`] has any p-norm, and an
    /// error for gradients that are not finite. The values are those of `torch.nn.utils.clip_grad_norm_`.
    ///
    /// While gradients are still being accumulated it does nothing and returns `None`. With fp16 the gradients are
    /// divided by the scale first.
    ///
    /// ```
    /// # use brigade_nn::{Linear, Model};
    /// # use brigade_train::Accelerator;
    /// # use tch::Tensor;
    /// # let accelerator = Accelerator::builder().cpu(true).build()?;
    /// # let model = accelerator.prepare(Model::new(|p| Linear::new(p, 4, 2))?)?;
    /// # let loss = model.forward(&Tensor::ones([1, 4], (tch::Kind::Float, tch::Device::Cpu)))?.sum(None);
    /// accelerator.backward(&loss)?;
    /// if let Some(norm) = accelerator.clip_grad_norm(&model, 1.0)? {
    ///     // What it was: each of 8 weights and 2 biases has a gradient of 1.
    ///     assert!((norm.double_value(&[]) - 10_f64.sqrt()).abs() < 1e-6);
    /// }
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a limit that is negative or NaN;
    /// [`crate::TrainError::GradientNorm`], on every rank, if [`ClipNorm::error_if_nonfinite`] is set.
    pub fn clip_grad_norm(
        &self,
        parameters: &(impl Parameters + ?Sized),
        clip: impl Into<ClipNorm>,
    ) -> Result<Option<Tensor>> {
        self.gradients.clip_norm(parameters, clip.into())
    }

    /// Clamps every value of the gradients to `[-limit, limit]`. Does nothing while gradients are still being
    /// accumulated; with fp16 the gradients are divided by the scale first.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] when `limit` is negative or NaN.
    pub fn clip_grad_value(
        &self,
        parameters: &(impl Parameters + ?Sized),
        limit: f64,
    ) -> Result<()> {
        self.gradients.clip_value(parameters, limit)
    }

    /// Divides the gradients by the loss scale, to read or change them before the step; without fp16 they are left
    /// unchanged. Clipping does it by itself. Returns `true` if the gradients overflowed, so that the step will be
    /// skipped. On a GPU it waits for that result, which clipping does not.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    pub fn unscale_gradients(&self, parameters: &(impl Parameters + ?Sized)) -> Result<bool> {
        self.gradients.unscale(parameters)
    }

    /// Runs a training loop in which ranks may have unequal numbers of batches, as PyTorch's `Join` does. A rank
    /// without more data takes part in the other ranks' collectives with zeros until all have ended; then all ranks
    /// receive the weights of a rank that had data to the end. Optimizer states are not sent.
    ///
    /// A rank without more data takes part only in the reducer's collectives. Any other collective inside of the loop,
    /// such as a gather or a SyncBatchNorm, waits for it until the time limit, and fails. Forwards without gradients
    /// send nothing. With several models, each iteration must run the forward and backward of one model after the
    /// other, in the order in which they are given.
    ///
    /// ```
    /// # use brigade_optim::Adam;
    /// # use brigade_train::{Accelerator, JoinInputs};
    /// # use brigade_data::DataLoader;
    /// # use brigade_datasets::Digits;
    /// # use brigade_models::Cnn;
    /// # use brigade_nn::Model;
    /// # let accelerator = Accelerator::builder().cpu(true).build()?;
    /// # let model = Model::new(Cnn::new)?;
    /// # let optimizer = Adam::default().build(&model)?;
    /// # let train = DataLoader::new(Digits::test()?.resize(28, 28)?).batch_size(64);
    /// # let (model, mut optimizer, train) = accelerator.prepare((model, optimizer, train))?;
    /// accelerator.join_uneven_inputs(&model, JoinInputs::default(), || {
    ///     for batch in &train {
    ///         let (images, labels) = batch?.into_data();
    ///         let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
    ///         optimizer.zero_grad()?;
    ///         accelerator.backward(&loss)?;
    ///         optimizer.step()?;
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the error of the body; [`brigade_torch::ErrorKind::Communication`] when a peer is gone, or, with
    /// `throw_on_early_termination`, when a rank has no more data.
    pub fn join_uneven_inputs<R>(
        &self,
        models: &(impl PreparedModels + ?Sized),
        options: JoinInputs,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        self.gradients.join_uneven_inputs(models, options, &self.even_batches, body)
    }

    /// Starts [`LocalSgd`]: gradients stay local, and parameters are averaged in every `steps`-th step. With `enabled`
    /// false it has no effect, so that one loop serves both cases.
    ///
    /// ```
    /// # use brigade_optim::Adam;
    /// # use brigade_train::Accelerator;
    /// # use brigade_data::DataLoader;
    /// # use brigade_datasets::Digits;
    /// # use brigade_models::Cnn;
    /// # use brigade_nn::Model;
    /// # let accelerator = Accelerator::builder().cpu(true).build()?;
    /// # let model = Model::new(Cnn::new)?;
    /// # let optimizer = Adam::default().build(&model)?;
    /// # let train = DataLoader::new(Digits::test()?.resize(28, 28)?).batch_size(64);
    /// # let (model, mut optimizer, train) = accelerator.prepare((model, optimizer, train))?;
    /// let mut local = accelerator.local_sgd(&model, 8, true)?;
    /// for batch in &train {
    ///     let (images, labels) = batch?.into_data();
    ///     let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
    ///     optimizer.zero_grad()?;
    ///     accelerator.backward(&loss)?;
    ///     optimizer.step()?;
    ///     local.step()?;
    /// }
    /// local.finish()?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for zero steps.
    pub fn local_sgd<'a, P: PreparedModels + ?Sized>(
        &self,
        models: &'a P,
        steps: usize,
        enabled: bool,
    ) -> Result<LocalSgd<'a, P>> {
        let Gradients { processes, accumulator, sharded, tensor, .. } = &self.gradients;
        let experts = tensor.as_ref().filter(|it| enabled && it.divides_experts());
        if let Some(experts) = experts {
            return Err(experts.refuse(
                "local_sgd",
                "no rank has all parameters, but each rank would have to train all of them; average \
                gradients in each step",
            ));
        }
        if let Some(sharded) = sharded.as_ref().filter(|_| enabled) {
            return Err(sharded.refuse(
                "local_sgd",
                "no rank has all parameters, but each rank would have to train all of them",
            ));
        }
        LocalSgd::begin(processes, accumulator, models, steps, enabled)
    }
}
