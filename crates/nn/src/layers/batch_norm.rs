//! Batch normalisation.

use std::borrow::Borrow;

use brigade_torch::{
    BatchNormState, ProcessGroup, Result, batch_norm, batch_norm_relu, batch_norm_relu_max_pool,
    is_recomputing, sync_batch_norm,
};
use tch::{Device, Kind, TchError, Tensor};

use crate::error::first_line;
use crate::layer_context::LayerContext;
use crate::shared_statistics::SharedStatistics;
use crate::{Init, MaxPool2d, Module, ParamPath, Training};

/// Options of [`BatchNorm1d`] and [`BatchNorm2d`].
#[derive(Debug, Clone, Copy)]
pub struct BatchNormOptions {
    /// Value added to the variance, for numerical stability. Defaults to 1e-5.
    pub eps: f64,
    /// Weight of the newest batch in the running statistics. Defaults to 0.1. `None` stands for the average of all
    /// batches, which waits for the device at every step to read the counter.
    pub momentum: Option<f64>,
    /// `true` if the layer has `weight` and `bias`. Defaults to `true`.
    pub affine: bool,
}

impl Default for BatchNormOptions {
    fn default() -> Self {
        Self { eps: 1e-5, momentum: Some(0.1), affine: true }
    }
}

macro_rules! batch_norm {
    ($(#[$doc:meta])* $name:ident, $accepts:expr, $shapes:literal) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(BatchNorm);

        impl $name {
            /// Registers parameters and buffers at the path.
            pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, features: i64) -> Self {
                Self::with_options(path, features, BatchNormOptions::default())
            }

            /// Registers parameters and buffers at the path.
            pub fn with_options<'a>(
                path: impl Borrow<ParamPath<'a>>,
                features: i64,
                options: BatchNormOptions,
            ) -> Self {
                Self(BatchNorm::new(path.borrow(), features, options))
            }

            /// Returns the scale `[features]`, if the layer has one.
            #[must_use]
            pub fn weight(&self) -> Option<&Tensor> {
                self.0.weight.as_ref()
            }

            /// Returns the bias `[features]`, if the layer has one.
            #[must_use]
            pub fn bias(&self) -> Option<&Tensor> {
                self.0.bias.as_ref()
            }

            /// Returns the running mean over the batches so far, `[features]`. Training changes it in place.
            pub fn running_mean(&self) -> &Tensor {
                &self.0.running_mean
            }

            /// Returns the running unbiased variance over the batches so far, `[features]`. The layer changes it in
            /// place.
            pub fn running_var(&self) -> &Tensor {
                &self.0.running_var
            }
        }

        impl Module<&Tensor> for $name {
            type Output = Tensor;

            /// Normalises the input. Fails if it has a wrong number of dimensions, or, in training, if a channel has a
            /// single value, which has no variance; see [`Module`].
            fn forward(&self, input: &Tensor) -> Result<Tensor> {
                let accepts: fn(usize) -> bool = $accepts;
                if !accepts(input.dim()) {
                    let expected = concat!(stringify!($name), " takes ", $shapes);
                    return Err(self.0.context.refuse(input, expected));
                }
                self.0.forward(input)
            }
        }
    };
}

impl BatchNorm2d {
    /// Computes `relu(forward(input) + shortcut)`, in one fused operation if it is available, which saves half of the
    /// passes over memory: in training with channels-last tensors, in float32 or bfloat16 on the CPU, in bfloat16 or
    /// float16 on a GPU. Otherwise, and with the statistics of several ranks, the three operations run one after the
    /// other.
    ///
    /// `input` and `shortcut` are `[n, features, h, w]`.
    ///
    /// ```
    /// use brigade_nn::{BatchNorm2d, Model, Module};
    /// use tch::{Kind, Tensor};
    /// use brigade_torch::Result;
    ///
    /// struct Block(BatchNorm2d);
    /// impl Module<&Tensor> for Block {
    ///     type Output = Tensor;
    ///     fn forward(&self, maps: &Tensor) -> Result<Tensor> {
    ///         self.0.forward_relu(maps, Some(maps))
    ///     }
    /// }
    /// let model = Model::new(|p| Block(BatchNorm2d::new(p, 32)))?;
    /// let maps = Tensor::randn([8, 32, 14, 14], (Kind::Float, model.device()));
    /// assert_eq!(model.forward(&maps)?.size(), [8, 32, 14, 14]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`forward`](crate::Module::forward).
    pub fn forward_relu(&self, input: &Tensor, shortcut: Option<&Tensor>) -> Result<Tensor> {
        if input.dim() != 4 {
            let expected = "BatchNorm2d takes [n, features, height, width]";
            return Err(self.0.context.refuse(input, expected));
        }
        self.0.forward_relu(input, shortcut)
    }

    /// Computes [`MaxPool2d::STEM`] of `relu(forward(input))`.
    ///
    /// In training with channels-last tensors of bfloat16 or float16 on a GPU, it is one fused operation if it is
    /// available, which does not write the values before pooling. Otherwise, with the statistics of several ranks, and
    /// if the model's layers have hooks, it is [`forward_relu`](Self::forward_relu) followed by the pooling. A hook of
    /// this layer is given the values before pooling.
    ///
    /// `input` is `[n, features, h, w]`, the output `[n, features, ⌊(h + 1) / 2⌋, ⌊(w + 1) / 2⌋]`.
    ///
    /// ```
    /// use brigade_nn::{BatchNorm2d, Conv2d, Conv2dOptions, Model, Module};
    /// use tch::{Kind, Tensor};
    /// use brigade_torch::Result;
    ///
    /// struct Stem(Conv2d, BatchNorm2d);
    /// impl Module<&Tensor> for Stem {
    ///     type Output = Tensor;
    ///     fn forward(&self, images: &Tensor) -> Result<Tensor> {
    ///         self.1.forward_relu_max_pool(&self.0.forward(images)?)
    ///     }
    /// }
    /// let model = Model::new(|p| {
    ///     let options = Conv2dOptions { stride: [2; 2], padding: [3; 2], bias: false, ..Default::default() };
    ///     Stem(Conv2d::new(p / "conv", 3, 64, [7; 2], options), BatchNorm2d::new(p / "norm", 64))
    /// })?;
    /// let images = Tensor::randn([8, 3, 32, 32], (Kind::Float, model.device()));
    /// assert_eq!(model.forward(&images)?.size(), [8, 64, 8, 8]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`forward`](crate::Module::forward).
    pub fn forward_relu_max_pool(&self, input: &Tensor) -> Result<Tensor> {
        if input.dim() != 4 {
            let expected = "BatchNorm2d takes [n, features, height, width]";
            return Err(self.0.context.refuse(input, expected));
        }
        self.0.forward_relu_max_pool(input)
    }
}

batch_norm! {
    /// `y = (x − mean) / √(var + eps) · weight + bias` for each channel of `[n, features, h, w]`.
    ///
    /// In training mean and (biased) variance are those of the batch, and the running statistics
    /// move by `momentum` towards its mean and unbiased variance; in evaluation the running ones
    /// are used. Parameters: `weight` (1) and `bias` (0). Buffers: `running_mean` (0),
    /// `running_var` (1), `num_batches_tracked` (0, 64-bit integer)
    /// ([torch.nn.BatchNorm2d](https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm2d.html)).
    ///
    /// ```
    /// use brigade_nn::{BatchNorm2d, Model};
    /// use tch::{Kind, Tensor};
    ///
    /// let model = Model::new(|p| BatchNorm2d::new(p, 32))?;
    /// assert_eq!((model.parameters().len(), model.buffers().len()), (2, 3));
    /// let images = Tensor::randn([8, 32, 14, 14], (Kind::Float, model.device()));
    /// assert_eq!(model.forward(&images)?.size(), [8, 32, 14, 14]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    BatchNorm2d, |dimensions| dimensions == 4, "[n, features, height, width]"
}

batch_norm! {
    /// [`BatchNorm2d`] for vectors `[n, features]` and sequences `[n, features, length]`
    /// ([torch.nn.BatchNorm1d](https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html)).
    ///
    /// ```
    /// use brigade_nn::{BatchNorm1d, Model};
    /// use tch::{Kind, Tensor};
    ///
    /// let mut model = Model::new(|p| BatchNorm1d::new(p, 3))?;
    /// model.eval();
    /// let ones = Tensor::ones([4, 3], (Kind::Float, model.device()));
    /// // (1 - 0) / sqrt(1 + 1e-5), with the statistics of a new layer.
    /// assert!((model.forward(&ones)?.double_value(&[0, 0]) - 0.999995).abs() < 1e-6);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    BatchNorm1d, |dimensions| matches!(dimensions, 2 | 3), "[n, features] or [n, features, length]"
}

/// Shared implementation: libtorch's kernel accepts any shape whose second dimension is the channel.
#[derive(Debug)]
struct BatchNorm {
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor,
    training: Training,
    statistics: SharedStatistics,
    context: LayerContext,
    options: BatchNormOptions,
}

/// State of one forward.
struct Step {
    training: bool,
    /// Weight of this batch in the running statistics.
    newest: f64,
    /// Group whose batches are normalised together, or `None` for only this rank's.
    group: Option<ProcessGroup>,
}

impl BatchNorm {
    fn new(path: &ParamPath<'_>, features: i64, options: BatchNormOptions) -> Self {
        let size = features.max(0);
        if features < 0 {
            path.reject(format_args!("{features} features cannot be normalised"));
        }
        let float = (Kind::Float, Device::Cpu);
        let BatchNormOptions { affine, .. } = options;
        // A failure means that there is not enough memory; building the model reports it.
        let made = |values: Result<Tensor, TchError>| {
            values.unwrap_or_else(|error| {
                path.reject(first_line(error));
                Tensor::from_slice::<f32>(&[])
            })
        };
        Self {
            weight: affine.then(|| path.parameter("weight", &[size], Init::Ones)),
            bias: affine.then(|| path.parameter("bias", &[size], Init::Zeros)),
            running_mean: path.buffer("running_mean", &made(Tensor::f_zeros(size, float))),
            running_var: path.buffer("running_var", &made(Tensor::f_ones(size, float))),
            num_batches_tracked: path.buffer("num_batches_tracked", &Tensor::from(0i64)),
            training: path.training(),
            statistics: path.shared_statistics().for_a_layer(),
            context: path.norm_layer(),
            options,
        }
    }

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.context.weights.run(input, |input| self.normalise(input))
    }

    fn forward_relu(&self, input: &Tensor, shortcut: Option<&Tensor>) -> Result<Tensor> {
        self.context.weights.run(input, |input| self.normalise_relu(input, shortcut))
    }

    fn forward_relu_max_pool(&self, input: &Tensor) -> Result<Tensor> {
        let over_ranks = self.training.is_on() && self.statistics.group().is_some();
        if over_ranks || !self.context.hooks.is_empty() {
            return MaxPool2d::STEM.forward(&self.forward_relu(input, None)?);
        }
        self.context.weights.run(input, |input| self.normalise_relu_max_pool(input))
    }

    fn normalise(&self, input: &Tensor) -> Result<Tensor> {
        let Step { training, newest, group } = self.begin(input)?;
        if let Some(group) = group {
            return Ok(self.context.output(self.over_ranks(&group, input, newest)?));
        }
        let running = self.running();
        let output = batch_norm(input, self.state(&running), training, newest, self.options.eps);
        self.context.finish(output.map_err(|error| TchError::Torch(error.to_string())), input)
    }

    fn normalise_relu(&self, input: &Tensor, shortcut: Option<&Tensor>) -> Result<Tensor> {
        let Step { training, newest, group } = self.begin(input)?;
        if let Some(group) = group {
            // In place: nothing else holds the normalisation's output, and its backward does not use it.
            let mut output = self.over_ranks(&group, input, newest)?;
            if let Some(shortcut) = shortcut {
                let _ = self.context.check(output.f_add_(shortcut), input)?;
            }
            return self.context.finish(output.f_relu_(), input);
        }
        let running = self.running();
        let output = batch_norm_relu(
            input,
            shortcut,
            self.state(&running),
            training,
            newest,
            self.options.eps,
        );
        self.context.finish(output.map_err(|error| TchError::Torch(error.to_string())), input)
    }

    fn normalise_relu_max_pool(&self, input: &Tensor) -> Result<Tensor> {
        let Step { training, newest, .. } = self.begin(input)?;
        let running = self.running();
        let state = self.state(&running);
        let output = batch_norm_relu_max_pool(input, state, training, newest, self.options.eps);
        self.context.finish_border(output, input)
    }

    /// Checks the input, counts the batch, and selects the group of the statistics.
    fn begin(&self, input: &Tensor) -> Result<Step> {
        let training = self.training.is_on();
        let mut newest = self.options.momentum.unwrap_or(0.0);
        let group = if training { self.statistics.group() } else { None };
        if training && group.is_none() {
            let size = input.size();
            let per_channel: i64 = size.iter().take(1).chain(size.iter().skip(2)).product();
            if per_channel <= 1 {
                return Err(self.context.refuse(
                    input,
                    "a batch normalisation in training needs more than one value per channel \
                     (a larger batch, or a loader that drops the last one)",
                ));
            }
        }
        if training && !is_recomputing() {
            // A handle of its own: tch requires `&mut` for operations in place.
            let mut batches = self.num_batches_tracked.shallow_clone();
            let _ = self.context.check(batches.f_add_scalar_(1), input)?;
            if self.options.momentum.is_none() {
                let batches = self.context.check(batches.f_int64_value(&[]), input)?; // host-device sync
                newest = 1.0 / batches as f64;
            }
        }
        Ok(Step { training, newest, group })
    }

    fn over_ranks(&self, group: &ProcessGroup, input: &Tensor, newest: f64) -> Result<Tensor> {
        let running = self.running();
        sync_batch_norm(group, input, self.state(&running), newest, self.options.eps)
    }

    /// Returns the running statistics, or copies of them if the forward is computed again: they contain this batch
    /// already.
    fn running(&self) -> (Tensor, Tensor) {
        if is_recomputing() {
            (self.running_mean.copy(), self.running_var.copy())
        } else {
            (self.running_mean.shallow_clone(), self.running_var.shallow_clone())
        }
    }

    fn state<'a>(&'a self, (mean, var): &'a (Tensor, Tensor)) -> BatchNormState<'a> {
        BatchNormState {
            weight: self.weight.as_ref(),
            bias: self.bias.as_ref(),
            running_mean: Some(mean),
            running_var: Some(var),
        }
    }
}
