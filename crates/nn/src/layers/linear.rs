//! Linear layer.

use std::borrow::Borrow;

use brigade_sharding::TensorStyle;
use brigade_torch::{
    Activation, Biased, GatedPair, LinearParameters, Result, activation_adds_bias,
    activation_linear, feed_forward, gated_activation, gated_linear, linear,
    norm_residual_adds_bias,
};
use tch::{Device, Tensor};

use super::branch::Branch;
use super::dropout::Dropout;
use crate::layer_context::{LayerContext, on};
use crate::{Divided, Init, Module, ParamPath, QuantizedSlot, TensorRegion};

/// Linear layer: `y = x Wᵀ + b`, from `[…, in]` to `[…, out]`.
///
/// Parameters: `weight` `[out, in]` and `bias` `[out]`, both uniform in `±1/√in`
/// ([torch.nn.Linear](https://docs.pytorch.org/docs/stable/generated/torch.nn.Linear.html)).
///
/// ```
/// use brigade_nn::{Linear, Model};
/// use tch::{Kind, Tensor};
///
/// let model = Model::new(|p| Linear::new(p, 3, 2))?;
/// let input = Tensor::ones([5, 3], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&input)?.size(), [5, 2]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// With tensor parallelism ([`crate::ModelBuilder::tensor_parallel`]) the weight may be divided: by output features
/// (column, heads, vocabulary), where a rank has `[part of out, in]` and computes its part of the outputs; or by input
/// features (row), where a rank has `[out, part of in]`, gets its part of the input, and the outputs of all ranks are
/// summed. The bias is added once.
#[derive(Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    context: LayerContext,
    divided: Option<Divided>,
    region: TensorRegion,
    quantized: QuantizedSlot,
}

/// Options of [`Linear`].
#[derive(Debug, Clone, Copy)]
pub struct LinearOptions {
    /// Adds the bias `b`. Defaults to `true`.
    pub bias: bool,
}

impl Default for LinearOptions {
    fn default() -> Self {
        Self { bias: true }
    }
}

/// Output of a linear layer in front of an activation, with the layer's bias if that is still to be added. Created by
/// [`Linear::forward_pre_activation`], or by [`PreActivation::new`] without a bias.
///
/// ```
/// use brigade_nn::PreActivation;
/// use brigade_torch::Activation;
/// use tch::Tensor;
///
/// let values = Tensor::from_slice2(&[[-2f32, 1.0]]);
/// let input = PreActivation { bias: Some(Tensor::from_slice(&[1f32, 2.0])), values };
/// assert_eq!(input.sum()?, Tensor::from_slice2(&[[-1f32, 3.0]]));
/// assert_eq!(input.activate(Activation::ReluSquared)?, Tensor::from_slice2(&[[0f32, 9.0]]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct PreActivation {
    /// Values `[…, width]`.
    pub values: Tensor,
    /// Bias `[width]` that is to be added to the values.
    pub bias: Option<Tensor>,
}

impl PreActivation {
    /// Creates the input of an activation without a bias.
    #[must_use]
    pub fn new(values: Tensor) -> Self {
        Self { values, bias: None }
    }

    /// Returns the values with the bias.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if shapes do not match.
    pub fn sum(&self) -> Result<Tensor> {
        Ok(match &self.bias {
            Some(bias) => self.values.f_add(&bias.f_to_kind(self.values.f_kind()?)?)?,
            None => self.values.shallow_clone(),
        })
    }

    /// Computes the activation of the values with the bias ([`brigade_torch::activation()`]).
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] if shapes do not match.
    pub fn activate(&self, activation: Activation) -> Result<Tensor> {
        brigade_torch::activation(self.biased(), activation)
    }

    fn biased(&self) -> Biased<'_> {
        Biased { values: &self.values, bias: self.bias.as_ref() }
    }

    /// Returns the bias on a device: a device map may put neighbouring layers on different ones.
    fn bias_on(&self, device: Device) -> Result<Option<Tensor>> {
        self.bias.as_ref().map(|bias| on(bias, device)).transpose()
    }
}

impl Linear {
    /// Registers `weight` and `bias` at the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, inputs: i64, outputs: i64) -> Self {
        Self::with_options(path, inputs, outputs, LinearOptions::default())
    }

    /// Registers the parameters at the path: `weight` `[outputs, inputs]` and, if the options enable it, `bias`
    /// `[outputs]`.
    pub fn with_options<'a>(
        path: impl Borrow<ParamPath<'a>>,
        inputs: i64,
        outputs: i64,
        options: LinearOptions,
    ) -> Self {
        let path = path.borrow();
        let shape = [outputs, inputs];
        let (weight, divided) =
            path.divided_parameter("weight", &shape, [0, 1], Init::KaimingUniform);
        let bias = options.bias.then(|| {
            path.divided_bias("bias", outputs, divided.as_ref(), Init::fan_in_bias(inputs))
        });
        Self {
            weight,
            bias,
            context: path.layer(),
            divided,
            region: path.tensor_region(),
            quantized: path.quantizable("weight", false),
        }
    }

    /// Returns the weight `[out, in]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Applies the layer to `gelu(input)`, as [`Linear::forward_activated`] does. `approximate` is `none` or `tanh`.
    ///
    /// # Errors
    /// Returns the same errors as the forward, and fails for any other value of `approximate`.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, Module};
    /// use tch::{Kind, Tensor};
    ///
    /// let model = Model::new(|p| Linear::new(p, 3, 2))?;
    /// let input = Tensor::randn([5, 3], (Kind::Float, model.device()));
    /// let fused = model.module().forward_gelu(&input, "none")?;
    /// assert!(fused.allclose(&model.forward(&input.gelu("none"))?, 1e-5, 1e-6, false));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn forward_gelu(&self, input: &Tensor, approximate: &str) -> Result<Tensor> {
        let input = PreActivation::new(input.shallow_clone());
        self.forward_activated(&input, Activation::gelu(approximate)?)
    }

    /// Applies the layer to the activation of the input: the second half of a feed-forward layer, whose first half is
    /// [`Linear::forward_pre_activation`].
    ///
    /// On GPUs with Brigade's kernels, the activation, the bias before it and their gradients are one kernel in each
    /// direction ([`brigade_torch::activation_linear`]), and the backward computes the activation again, so that only its
    /// input is kept: half of the memory that two separate operations need. GELU is computed again on every device.
    ///
    /// # Errors
    /// Returns the same errors as the forward.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, Module, ParamPath};
    /// use brigade_torch::{Activation, Result};
    /// use tch::{Kind, Tensor};
    ///
    /// struct FeedForward { first: Linear, second: Linear }
    ///
    /// impl FeedForward {
    ///     fn new(path: &ParamPath<'_>) -> Self {
    ///         Self {
    ///             first: Linear::new(path / "first", 8, 32),
    ///             second: Linear::new(path / "second", 32, 8),
    ///         }
    ///     }
    /// }
    ///
    /// impl Module<&Tensor> for FeedForward {
    ///     type Output = Tensor;
    ///     fn forward(&self, input: &Tensor) -> Result<Tensor> {
    ///         let hidden = self.first.forward_pre_activation(input)?;
    ///         self.second.forward_activated(&hidden, Activation::ReluSquared)
    ///     }
    /// }
    ///
    /// let model = Model::new(|path| FeedForward::new(path))?;
    /// let input = Tensor::randn([5, 8], (Kind::Float, model.device()));
    /// let FeedForward { first, second } = model.module();
    /// let expected = second.forward(&first.forward(&input)?.relu().square())?;
    /// assert!(model.forward(&input)?.allclose(&expected, 1e-5, 1e-6, false));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn forward_activated(
        &self,
        input: &PreActivation,
        activation: Activation,
    ) -> Result<Tensor> {
        if self.quantized.is_set() {
            return self.forward(&input.activate(activation)?);
        }
        self.compute(&input.values, true, |values, weight, own_bias| {
            let bias = input.bias_on(values.device())?;
            let input = Biased { values, bias: bias.as_ref() };
            activation_linear(input, activation, weight, own_bias)
        })
    }

    /// Applies the layer to `activation(gate) · up`: the second half of a gated feed-forward layer such as
    /// [`SwiGlu`](crate::SwiGlu).
    ///
    /// On a CPU, and on GPUs with Brigade's kernels, the activation and its product are one pass
    /// ([`brigade_torch::gated_linear`]), and only `gate` and `up` are kept.
    ///
    /// # Errors
    /// Returns the same errors as the forward, and an error for a gate of another shape than `up`.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, Module, PreActivation};
    /// use brigade_torch::Activation;
    /// use tch::{Kind, Tensor};
    ///
    /// let model = Model::new(|p| Linear::new(p, 3, 2))?;
    /// let [gate, up] = [(); 2].map(|()| Tensor::randn([5, 3], (Kind::Float, model.device())));
    /// let expected = model.forward(&(gate.silu() * &up))?;
    /// let (gate, up) = (PreActivation::new(gate), PreActivation::new(up));
    /// let output = model.module().forward_gated(&gate, &up, Activation::Silu)?;
    /// assert!(output.allclose(&expected, 1e-5, 1e-6, false));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn forward_gated(
        &self,
        gate: &PreActivation,
        up: &PreActivation,
        activation: Activation,
    ) -> Result<Tensor> {
        if self.quantized.is_set() {
            let pair = GatedPair::Two { gate: gate.biased(), up: up.biased() };
            return self.forward(&gated_activation(pair, activation)?);
        }
        // As `enters` would have the gate alone go through the region.
        let [gate_values, up_values] = match &self.divided {
            Some(Divided { style: TensorStyle::Row, .. }) | None => {
                [&gate.values, &up.values].map(Tensor::shallow_clone)
            }
            Some(divided) => {
                [divided.region.enter(&gate.values)?, divided.region.enter(&up.values)?]
            }
        };
        self.compute(&gate_values, false, |values, weight, own_bias| {
            let device = values.device();
            let (bias, up_bias) = (gate.bias_on(device)?, up.bias_on(device)?);
            let up = on(&up_values, device)?;
            let pair = GatedPair::Two {
                gate: Biased { values, bias: bias.as_ref() },
                up: Biased { values: &up, bias: up_bias.as_ref() },
            };
            gated_linear(pair, activation, weight, own_bias)
        })
    }

    /// Applies the layer, and leaves its bias to the activation behind it where that adds it in the same pass:
    /// [`Linear::forward_activated`] and [`Linear::forward_gated`]. Elsewhere, and if the model's layers have hooks, which
    /// see outputs, the bias is added.
    ///
    /// # Errors
    /// Returns the same errors as the forward.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, Module};
    /// use tch::{Kind, Tensor};
    ///
    /// let model = Model::new(|p| Linear::new(p, 3, 2))?;
    /// let input = Tensor::randn([5, 3], (Kind::Float, model.device()));
    /// let output = model.module().forward_pre_activation(&input)?;
    /// assert!(output.sum()?.allclose(&model.forward(&input)?, 1e-5, 1e-6, false));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn forward_pre_activation(&self, input: &Tensor) -> Result<PreActivation> {
        self.pre_activation(input, true)
    }

    /// Does the same as [`Linear::forward_pre_activation`] for an input that was passed through
    /// [`crate::TensorRegion::enter`], as [`Linear::forward_entered`] does.
    ///
    /// # Errors
    /// Returns the same errors as the forward.
    pub fn forward_entered_pre_activation(&self, input: &Tensor) -> Result<PreActivation> {
        self.pre_activation(input, false)
    }

    /// Applies the layer to a residual branch, with a dropout layer behind it. The bias is left to the normalisation
    /// that adds the branch to its stream ([`LayerNorm::forward_residual`](crate::LayerNorm::forward_residual) and the
    /// like) where that adds it in the same pass: on GPUs with Brigade's kernels under autocast. Elsewhere, if the
    /// weight is divided over ranks, and if the model's layers have hooks, which see outputs, the bias is added.
    ///
    /// # Errors
    /// Returns the same errors as the forward.
    ///
    /// ```
    /// use brigade_nn::{Dropout, LayerNorm, Linear, Model, Module, ParamPath};
    /// use brigade_torch::Result;
    /// use tch::{Kind, Tensor};
    ///
    /// struct Block { linear: Linear, dropout: Dropout, norm: LayerNorm }
    /// impl Block {
    ///     fn new(path: &ParamPath<'_>) -> Self {
    ///         let linear = Linear::new(path / "linear", 8, 8);
    ///         let dropout = Dropout::maskless(path / "dropout", 0.1);
    ///         Self { linear, dropout, norm: LayerNorm::new(path / "norm", &[8]) }
    ///     }
    /// }
    /// impl Module<&Tensor> for Block {
    ///     type Output = Tensor;
    ///     fn forward(&self, stream: &Tensor) -> Result<Tensor> {
    ///         let branch = self.linear.forward_branch(stream, &self.dropout)?;
    ///         Ok(self.norm.forward_residual(stream, Some(&branch))?.normed)
    ///     }
    /// }
    /// let model = Model::new(|path| Block::new(path))?;
    /// let stream = Tensor::randn([2, 8], (Kind::Float, model.device()));
    /// assert_eq!(model.forward(&stream)?.size(), [2, 8]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn forward_branch(&self, input: &Tensor, dropout: &Dropout) -> Result<Branch> {
        let Some(bias) = self.bias_of_branch(input)? else {
            return dropout.branch(self.forward(input)?);
        };
        let values = self.compute(input, true, |input, weight, _| linear(input, weight, None))?;
        dropout.biased_branch(values, Some(bias))
    }

    /// Does the same as [`Linear::forward_branch`] for the activation of the input, as [`Linear::forward_activated`].
    ///
    /// # Errors
    /// Returns the same errors as the forward.
    ///
    /// ```
    /// use brigade_nn::{Dropout, Linear, Model, Module, ParamPath, PreActivation};
    /// use brigade_torch::{Activation, Result};
    /// use tch::{Kind, Tensor};
    ///
    /// struct Layer(Linear, Dropout);
    /// impl Module<&Tensor> for Layer {
    ///     type Output = Tensor;
    ///     fn forward(&self, stream: &Tensor) -> Result<Tensor> {
    ///         let input = PreActivation::new(stream.shallow_clone());
    ///         self.0.forward_activated_branch(&input, Activation::Relu, &self.1)?.add_to(stream)
    ///     }
    /// }
    /// let model = Model::new(|path: &ParamPath<'_>| {
    ///     Layer(Linear::new(path / "linear", 8, 8), Dropout::maskless(path / "dropout", 0.0))
    /// })?;
    /// let stream = Tensor::randn([2, 8], (Kind::Float, model.device()));
    /// let expected = model.module().0.forward(&stream.relu())? + &stream;
    /// assert!(model.forward(&stream)?.allclose(&expected, 1e-5, 1e-6, false));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn forward_activated_branch(
        &self,
        input: &PreActivation,
        activation: Activation,
        dropout: &Dropout,
    ) -> Result<Branch> {
        let Some(own_bias) = self.bias_of_branch(&input.values)? else {
            return dropout.branch(self.forward_activated(input, activation)?);
        };
        let values = self.compute(&input.values, true, |values, weight, _| {
            let bias = input.bias_on(values.device())?;
            activation_linear(Biased { values, bias: bias.as_ref() }, activation, weight, None)
        })?;
        dropout.biased_branch(values, Some(own_bias))
    }

    /// Computes a feed-forward layer of which this is the first linear layer: [`Linear::forward_activated`] of the second
    /// one for [`Linear::forward_pre_activation`] of this one.
    ///
    /// On GPUs under autocast in 16 bits, with [`Activation::GeluTanh`], the activation, its gradient and that of the
    /// first bias can be computed in the epilogues of products ([`brigade_torch::feed_forward`]). Elsewhere, with weights
    /// that are divided, quantized or elsewhere, and if the model's layers have hooks, it is both methods.
    ///
    /// # Errors
    /// Returns the same errors as the forward.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, Module, ParamPath};
    /// use brigade_torch::Activation;
    /// use tch::{Kind, Tensor};
    ///
    /// struct Layers { first: Linear, second: Linear }
    ///
    /// let model = Model::new(|path: &ParamPath<'_>| Layers {
    ///     first: Linear::new(path / "first", 8, 32),
    ///     second: Linear::new(path / "second", 32, 8),
    /// })?;
    /// let input = Tensor::randn([5, 8], (Kind::Float, model.device()));
    /// let Layers { first, second } = model.module();
    /// let output = first.forward_feed_forward(&input, Activation::GeluTanh, second)?;
    /// let expected = second.forward(&first.forward(&input)?.gelu("tanh"))?;
    /// assert!(output.allclose(&expected, 1e-5, 1e-6, false));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn forward_feed_forward(
        &self,
        input: &Tensor,
        activation: Activation,
        second: &Self,
    ) -> Result<Tensor> {
        match self.both(input, activation, second, second.bias.as_ref())? {
            Some(output) => Ok(output),
            None => second.forward_activated(&self.forward_pre_activation(input)?, activation),
        }
    }

    /// Does the same as [`Linear::forward_feed_forward`] for a residual branch, as [`Linear::forward_activated_branch`].
    ///
    /// # Errors
    /// Returns the same errors as the forward.
    ///
    /// ```
    /// use brigade_nn::{Dropout, Linear, Model, Module, ParamPath};
    /// use brigade_torch::Activation;
    /// use tch::{Kind, Tensor};
    ///
    /// struct Layers(Linear, Linear, Dropout);
    ///
    /// let model = Model::new(|path: &ParamPath<'_>| {
    ///     let dropout = Dropout::maskless(path / "dropout", 0.0);
    ///     Layers(Linear::new(path / "first", 8, 32), Linear::new(path / "second", 32, 8), dropout)
    /// })?;
    /// let stream = Tensor::randn([5, 8], (Kind::Float, model.device()));
    /// let Layers(first, second, dropout) = model.module();
    /// let branch = first.forward_feed_forward_branch(&stream, Activation::Relu, second, dropout)?;
    /// let expected = second.forward(&first.forward(&stream)?.relu())? + &stream;
    /// assert!(branch.add_to(&stream)?.allclose(&expected, 1e-5, 1e-6, false));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn forward_feed_forward_branch(
        &self,
        input: &Tensor,
        activation: Activation,
        second: &Self,
        dropout: &Dropout,
    ) -> Result<Branch> {
        let Some(own_bias) = second.bias_of_branch(input)? else {
            return dropout.branch(self.forward_feed_forward(input, activation, second)?);
        };
        match self.both(input, activation, second, None)? {
            Some(output) => dropout.biased_branch(output, Some(own_bias)),
            None => {
                let hidden = self.forward_pre_activation(input)?;
                second.forward_activated_branch(&hidden, activation, dropout)
            }
        }
    }

    /// Computes both layers of a feed-forward layer as one operation, with this bias of the second one. Returns `None`
    /// for layers that one operation cannot compute.
    fn both(
        &self,
        input: &Tensor,
        activation: Activation,
        second: &Self,
        second_bias: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let is_plain = |layer: &Self| layer.leaves_bias() && layer.divided.is_none();
        if !is_plain(self) || !is_plain(second) {
            return Ok(None);
        }
        let entered = |layer: &Self, tensor| layer.region.enter_parameter(tensor);
        let (weight, second_weight) =
            (entered(self, &self.weight)?, entered(second, &second.weight)?);
        let bias = self.bias.as_ref().map(|bias| entered(self, bias)).transpose()?;
        let second_bias = second_bias.map(|bias| entered(second, bias)).transpose()?;
        let first = LinearParameters { weight: &weight, bias: bias.as_ref() };
        let last = LinearParameters { weight: &second_weight, bias: second_bias.as_ref() };
        let output = feed_forward(input, first, activation, last);
        self.context.check_border(output, input).map(Some)
    }

    /// Returns the bias if the normalisation behind the layer is to add it.
    fn bias_of_branch(&self, input: &Tensor) -> Result<Option<Tensor>> {
        match &self.bias {
            Some(bias) if self.leaves_bias() && self.divided.is_none() => {
                let adds = norm_residual_adds_bias(input, bias)?;
                adds.then(|| self.region.enter_parameter(bias)).transpose()
            }
            _ => Ok(None),
        }
    }

    /// Returns `true` if what is behind the layer may add its bias: a bias that a device map keeps elsewhere is not
    /// there any more.
    fn leaves_bias(&self) -> bool {
        self.context.hooks.is_empty()
            && !self.context.weights.is_placed()
            && !self.quantized.is_set()
    }

    fn pre_activation(&self, input: &Tensor, enters: bool) -> Result<PreActivation> {
        let is_row = matches!(&self.divided, Some(Divided { style: TensorStyle::Row, .. }));
        if let Some(bias) = &self.bias
            && self.leaves_bias()
            && !is_row
            && activation_adds_bias(input)?
        {
            let values =
                self.compute(input, enters, |input, weight, _| linear(input, weight, None))?;
            let bias = match self.divided {
                Some(_) => bias.shallow_clone(),
                None => self.region.enter_parameter(bias)?,
            };
            return Ok(PreActivation { values, bias: Some(bias) });
        }
        Ok(PreActivation::new(self.compute(input, enters, linear)?))
    }

    /// Computes the layer for an input that was passed through [`crate::TensorRegion::enter`], so that layers with the
    /// same input, such as the projections of attention, send only one message for its gradient. Equals the forward if
    /// the weight is not divided by output features.
    ///
    /// # Errors
    /// Returns the errors of the forward.
    pub fn forward_entered(&self, input: &Tensor) -> Result<Tensor> {
        self.compute(input, false, linear)
    }

    /// Returns the bias `[out]`, if the layer has one.
    #[must_use]
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns the division of the weight over the ranks of a tensor group. `None` if every rank has the whole weight.
    #[must_use]
    pub fn divided(&self) -> Option<&Divided> {
        self.divided.as_ref()
    }

    fn compute(
        &self,
        input: &Tensor,
        enters: bool,
        product: impl FnOnce(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.context.weights.run(input, |input| self.compute_here(input, enters, product))
    }

    fn compute_here(
        &self,
        input: &Tensor,
        enters: bool,
        product: impl FnOnce(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (weight, bias) = (&self.weight, self.bias.as_ref());
        if let Some(quantized) = self.quantized.get() {
            return self.context.finish_border(quantized.linear(input, bias), input);
        }
        match &self.divided {
            Some(Divided { style: TensorStyle::Row, region, .. }) => {
                let summand = self.context.check_border(product(input, weight, None), input)?;
                let mut output = region.leave(&summand)?;
                if let Some(bias) = bias {
                    let bias = region.enter_parameter(bias)?;
                    output = self.context.check(output.f_add(&bias), input)?;
                }
                Ok(self.context.output(output))
            }
            Some(divided) => {
                let entered =
                    if enters { divided.region.enter(input)? } else { input.shallow_clone() };
                self.context.finish_border(product(&entered, weight, bias), input)
            }
            None => {
                let weight = self.region.enter_parameter(weight)?;
                let bias = bias.map(|bias| self.region.enter_parameter(bias)).transpose()?;
                self.context.finish_border(product(input, &weight, bias.as_ref()), input)
            }
        }
    }
}

impl Module<&Tensor> for Linear {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.compute(input, true, linear)
    }
}
