//! Long short-term memory (LSTM).

use std::borrow::Borrow;

use brigade_torch::{Autocast, Result, WarningFilter, emulated_kind};
use tch::{Device, Kind, TchError, Tensor};

use crate::layer_context::LayerContext;
use crate::{Init, Module, ParamPath, Training};

/// Long short-term memory (LSTM), with gates in the order input, forget, cell, output
/// ([torch.nn.LSTM](https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html)): from `[time, n, inputs]` to
/// `[time, n, directions · hidden]`, or with [`LstmOptions::batch_first`] from `[n, time, inputs]`.
///
/// Parameters of layer `l`: `weight_ih_l{l}` `[4 · hidden, inputs]`, `weight_hh_l{l}` `[4 · hidden, hidden]`,
/// `bias_ih_l{l}` and `bias_hh_l{l}` `[4 · hidden]`, and the same with the suffix `_reverse` for the backward
/// direction, all initialised uniformly in `±1/√hidden`.
///
/// The forward takes an input, and begins with a state of zeros, or an input and a state.
///
/// ```
/// use brigade_nn::{Lstm, LstmOptions, Model, Module};
/// use tch::{Kind, Tensor};
///
/// let options = LstmOptions { batch_first: true, ..LstmOptions::default() };
/// let model = Model::new(|p| Lstm::with_options(p, 8, 16, options))?;
/// let words = Tensor::ones([4, 10, 8], (Kind::Float, model.device()));
/// let (output, state) = model.forward(&words)?;
/// assert_eq!(output.size(), [4, 10, 16]);
/// let (_, state) = model.forward((&words, &state))?; // goes on where it was
/// assert_eq!(state.hidden.size(), [1, 4, 16]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct Lstm {
    weights: Vec<Tensor>,
    hidden: i64,
    options: LstmOptions,
    training: Training,
    context: LayerContext,
}

/// Options of [`Lstm`], with PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LstmOptions {
    /// Number of stacked layers. Defaults to 1.
    pub layers: usize,
    /// `true` if the layers have biases. Defaults to `true`.
    pub bias: bool,
    /// `true` if the first dimension of input and output is the batch and the second is time. Does not affect the
    /// states. Defaults to `false`.
    pub batch_first: bool,
    /// Dropout probability after each layer but the last. Defaults to 0.
    pub dropout: f64,
    /// `true` to run over the input in both directions and concatenate the outputs. Defaults to `false`.
    pub bidirectional: bool,
}

impl Default for LstmOptions {
    fn default() -> Self {
        Self { layers: 1, bias: true, batch_first: false, dropout: 0.0, bidirectional: false }
    }
}

impl LstmOptions {
    /// Returns the number of directions: 1, or 2 for a bidirectional LSTM.
    #[must_use]
    pub fn directions(&self) -> usize {
        if self.bidirectional { 2 } else { 1 }
    }
}

/// State of an LSTM after a sequence: hidden and cell state of every layer and direction.
#[derive(Debug)]
pub struct LstmState {
    /// Last outputs (`h_n`), `[layers · directions, n, hidden]`.
    pub hidden: Tensor,
    /// Last cell states (`c_n`), `[layers · directions, n, hidden]`.
    pub cell: Tensor,
}

impl LstmState {
    /// Returns a state of zeros for `rows` samples, of the kind and on the device of `like`.
    ///
    /// # Errors
    /// Returns an error of libtorch if memory runs out.
    pub fn zeros(layers: usize, rows: i64, hidden: i64, like: &Tensor) -> Result<Self> {
        let zeros = || Tensor::f_zeros([layers as i64, rows, hidden], (like.kind(), like.device()));
        Ok(Self { hidden: zeros()?, cell: zeros()? })
    }
}

impl Clone for LstmState {
    /// Clones the handles: the clone shares the memory.
    fn clone(&self) -> Self {
        Self { hidden: self.hidden.shallow_clone(), cell: self.cell.shallow_clone() }
    }
}

impl Lstm {
    /// Registers an LSTM of one layer at the path, with default options: `inputs` features per step, and a hidden state
    /// of `hidden`.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, inputs: i64, hidden: i64) -> Self {
        Self::with_options(path, inputs, hidden, LstmOptions::default())
    }

    /// Registers an LSTM at the path, with `inputs` features per step and a hidden state of `hidden`. The model fails
    /// to build for a dropout probability outside `[0, 1]`, 0 layers, or a size below 1.
    pub fn with_options<'a>(
        path: impl Borrow<ParamPath<'a>>,
        inputs: i64,
        hidden: i64,
        options: LstmOptions,
    ) -> Self {
        let path = path.borrow();
        if options.layers == 0 || inputs < 1 || hidden < 1 {
            path.reject(format_args!(
                "an LSTM of {} layers from {inputs} to {hidden} numbers: each has to be at least 1",
                options.layers
            ));
        }
        if !(0.0..=1.0).contains(&options.dropout) {
            path.reject(format_args!(
                "the dropout probability {} is not in [0, 1]",
                options.dropout
            ));
        }
        let bound = 1.0 / (hidden.max(1) as f64).sqrt();
        let init = Init::Uniform { low: -bound, high: bound };
        let mut weights = Vec::new();
        for layer in 0..options.layers {
            let width = if layer == 0 { inputs } else { hidden * options.directions() as i64 };
            for suffix in &["", "_reverse"][..options.directions()] {
                let mut add = |name: &str, shape: &[i64]| {
                    weights.push(path.parameter(&format!("{name}_l{layer}{suffix}"), shape, init));
                };
                add("weight_ih", &[4 * hidden, width]);
                add("weight_hh", &[4 * hidden, hidden]);
                if options.bias {
                    add("bias_ih", &[4 * hidden]);
                    add("bias_hh", &[4 * hidden]);
                }
            }
        }
        Self { weights, hidden, options, training: path.training(), context: path.layer() }
    }

    /// Returns the parameters in PyTorch's order (`all_weights`, flat).
    pub fn weights(&self) -> &[Tensor] {
        &self.weights
    }

    fn run(&self, input: &Tensor, state: &LstmState) -> Result<(Tensor, LstmState)> {
        self.context.weights.run(input, |input| {
            let found = self.options.apply(input, state, &self.weights, self.training.is_on());
            let (output, state) = self.context.check(found, input)?;
            Ok((self.context.output(output), state))
        })
    }
}

impl LstmOptions {
    /// Computes output and last state with these weights, in the order of [`Lstm::weights`], for modules that compute
    /// an LSTM's weights at each step.
    ///
    /// The state is converted to the input's kind, and so are the weights if that has 16 bits, because under autocast
    /// the kinds of input, state and weights may differ. On a processor that emulates 16-bit products, the computation
    /// is in float32, which is several times faster, and only the output has 16 bits.
    ///
    /// # Errors
    /// Returns an error of libtorch for shapes that do not match.
    pub fn apply(
        &self,
        input: &Tensor,
        state: &LstmState,
        weights: &[Tensor],
        training: bool,
    ) -> Result<(Tensor, LstmState), TchError> {
        self.check(input, state, weights)?;
        let refused = |error: brigade_torch::Error| TchError::Torch(error.to_string());
        let emulated = emulated_kind(input).map_err(refused)?;
        let (kind, _exact) = match emulated {
            Some(_) => {
                let scope = Autocast::enter(input.device(), Kind::Float, true);
                (Kind::Float, Some(scope.map_err(refused)?))
            }
            None if input.device() == Device::Cpu => (input.f_kind()?, None),
            None => {
                // cuDNN's LSTM supports only float16 under autocast, whichever type was requested.
                let scope = Autocast::enter(input.device(), Kind::Float, true).map_err(refused)?;
                let kind = match (scope.outer_kind(), input.f_kind()?) {
                    (_, Kind::Double) | (None, _) => input.f_kind()?,
                    (Some(kind), _) => kind,
                };
                (kind, Some(scope))
            }
        };
        let as_input = |tensor: &Tensor| tensor.f_to_kind(kind);
        // Does what autocast does for matrix products: it does not cover all LSTM kernels.
        let short = matches!(kind, Kind::Half | Kind::BFloat16) || emulated.is_some();
        let weight_as_input =
            |weight: &Tensor| if short { as_input(weight) } else { Ok(weight.shallow_clone()) };
        // cuDNN needs the weights in one contiguous piece, and libtorch copies them into one: they are separate tensors
        // so that AWD-LSTM's can be computed anew in each step. The copies are small beside the products, but the
        // warnings are not.
        let _filter = match input.device() {
            Device::Cpu => None,
            _ => Some(WarningFilter::enter("single contiguous chunk of memory").map_err(refused)?),
        };
        let weights = weights.iter().map(weight_as_input).collect::<Result<Vec<_>, TchError>>()?;
        let (output, hidden, cell) = as_input(input)?.f_lstm(
            &[as_input(&state.hidden)?, as_input(&state.cell)?],
            &weights,
            self.bias,
            self.layers as i64,
            self.dropout,
            training,
            self.bidirectional,
            self.batch_first,
        )?;
        let output = emulated.map_or(Ok(output.shallow_clone()), |kind| output.f_to_kind(kind))?;
        Ok((output, LstmState { hidden, cell }))
    }

    /// Checks the shapes. libtorch's operator leaves this to PyTorch's Python code, and would read out of bounds.
    fn check(&self, input: &Tensor, state: &LstmState, weights: &[Tensor]) -> Result<(), TchError> {
        let shape = |tensor: &Tensor, expected: &[i64], what: &str| {
            let found = tensor.size();
            if found == expected {
                Ok(())
            } else {
                Err(TchError::Shape(format!("expected {what} of {expected:?}, found {found:?}")))
            }
        };
        let (first, second, _) = input.size3()?;
        let [of_input, of_hidden, ..] = weights else {
            return Err(TchError::Shape(format!("{} weights do not make an LSTM", weights.len())));
        };
        let ((_, inputs), (_, hidden)) = (of_input.size2()?, of_hidden.size2()?);
        shape(input, &[first, second, inputs], "an input")?;
        let rows = if self.batch_first { first } else { second };
        let expected = [(self.layers * self.directions()) as i64, rows, hidden];
        shape(&state.hidden, &expected, "a hidden state")?;
        shape(&state.cell, &expected, "cells")
    }
}

impl Module<&Tensor> for Lstm {
    type Output = (Tensor, LstmState);

    /// Computes the output from a state of zeros.
    fn forward(&self, input: &Tensor) -> Result<(Tensor, LstmState)> {
        let &[first, second, _] = input.size().as_slice() else {
            return Err(self.context.refuse(input, "an LSTM takes an input of three dimensions"));
        };
        let rows = if self.options.batch_first { first } else { second };
        let layers = self.options.layers * self.options.directions();
        self.run(input, &LstmState::zeros(layers, rows, self.hidden, input)?)
    }
}

impl Module<(&Tensor, &LstmState)> for Lstm {
    type Output = (Tensor, LstmState);

    fn forward(&self, (input, state): (&Tensor, &LstmState)) -> Result<(Tensor, LstmState)> {
        self.run(input, state)
    }
}
