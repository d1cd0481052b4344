//! The hidden state of a recurrent network between batches.
//!
//! It is a handle that a callback shares with the model. It is not part of a state dictionary, because each rank has
//! states of its own rows. `ModelResetter` gathers the rows of all ranks into the checkpoint's JSON, in the order of
//! the ranks, so that they can be distributed to another number of ranks.

use std::sync::Arc;

use brigade_nn::LstmState;
use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result};
use parking_lot::Mutex;
use tch::{Kind, Tensor};

/// Handle of the hidden state of an [`AwdLstm`](crate::AwdLstm), which is not part of state dictionaries. Clones share
/// the state, so that a callback of a Learner can have one while the Learner owns the model.
///
/// A batch with fewer rows than the one before continues with the states of the first rows; rows that are added later
/// begin with zeros. Rows of a batch are streams, so that on several ranks each rank has its own state.
///
/// ```
/// use brigade_models::{LanguageModel, LanguageModelOptions};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let mut options = LanguageModelOptions::default();
/// (options.encoder.embedding, options.encoder.hidden) = (8, 12);
/// let model = Model::new(|path| LanguageModel::new(path, 26, &options))?;
/// let state = model.module().state().clone();
/// let words = Tensor::from_slice(&[2i64, 3, 4, 5]).view([2, 2]);
/// model.forward(&words)?;
/// let saved = state.hidden_state(); // for a checkpoint
/// assert_eq!(saved[0].hidden.size(), [1, 2, 12]);
/// state.reset(); // before training, before validation
/// state.set_hidden_state(saved)?; // resumed
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RecurrentState(Arc<Mutex<Held>>);

#[derive(Debug)]
struct Held {
    /// For each layer: number of directions, and hidden size.
    shapes: Vec<(usize, i64)>,
    /// States by layer. Empty for zeros.
    layers: Vec<LstmState>,
    keeps_outputs: bool,
    outputs: Option<RnnOutputs>,
}

/// Outputs of a recurrent network in a training step, for [`RnnOutputs::regularization`].
#[derive(Debug)]
pub struct RnnOutputs {
    /// Output of the last layer, `[n, time, width]`.
    pub raw: Tensor,
    /// Output of the last layer after its dropout, which is the decoder's input. In classifiers it is `raw`.
    pub dropped: Tensor,
}

impl RecurrentState {
    pub(super) fn new(shapes: Vec<(usize, i64)>) -> Self {
        let held = Held { shapes, layers: Vec::new(), keeps_outputs: false, outputs: None };
        Self(Arc::new(Mutex::new(held)))
    }

    /// Resets the hidden state to zeros, and drops kept outputs.
    pub fn reset(&self) {
        let mut held = self.0.lock();
        held.layers = Vec::new();
        held.outputs = None;
    }

    /// Returns the state of each layer, detached from the graph. Empty after [`RecurrentState::reset`] and in a new
    /// model. The model never changes these tensors in place.
    #[must_use]
    pub fn hidden_state(&self) -> Vec<LstmState> {
        self.0.lock().layers.clone()
    }

    /// Sets the hidden state from which the next batch continues. An empty list stands for zeros.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if the number of layers or the shapes differ from the model's.
    pub fn set_hidden_state(&self, layers: Vec<LstmState>) -> Result<()> {
        let mut held = self.0.lock();
        if !layers.is_empty() && layers.len() != held.shapes.len() {
            return Err(Error::invalid_argument(format!(
                "a hidden state of {} for a model of {}",
                counted(layers.len(), "layer"),
                held.shapes.len()
            )));
        }
        let rows =
            layers.first().and_then(|layer| layer.hidden.size().get(1).copied()).unwrap_or(0);
        for (number, (layer, &(directions, width))) in layers.iter().zip(&held.shapes).enumerate() {
            let expected = [directions as i64, rows, width];
            let found = [layer.hidden.size(), layer.cell.size()];
            if found.iter().any(|size| *size != expected) {
                return Err(Error::invalid_argument(format!(
                    "the hidden state of layer {number}: expected two tensors of {expected:?}, found {:?} and {:?}",
                    found[0], found[1]
                )));
            }
        }
        held.layers = layers;
        Ok(())
    }

    /// Sets whether the outputs of each training step are kept until they are [taken](Self::take_outputs). They keep
    /// the step's graph in memory. Defaults to `false`.
    pub fn keep_outputs(&self, on: bool) {
        let mut held = self.0.lock();
        held.keeps_outputs = on;
        held.outputs = None;
    }

    /// Takes the outputs of the last forward in training, if they are kept ([`Self::keep_outputs`]). They can be taken
    /// once, so that the graph is freed with the step.
    #[must_use]
    pub fn take_outputs(&self) -> Option<RnnOutputs> {
        self.0.lock().outputs.take()
    }

    pub(super) fn keeps_outputs(&self) -> bool {
        self.0.lock().keeps_outputs
    }

    pub(super) fn put_outputs(&self, outputs: RnnOutputs) {
        self.0.lock().outputs = Some(outputs);
    }

    /// Returns the states of the first `rows` rows, on the device of `like`.
    pub(super) fn of_rows(&self, rows: i64, like: &Tensor) -> Result<Vec<LstmState>> {
        let held = self.0.lock();
        let of_layer = |(number, &(directions, width)): (usize, &(usize, i64))| {
            let Some(known) = held.layers.get(number) else {
                return LstmState::zeros(directions, rows, width, like);
            };
            let fit = |tensor: &Tensor| -> Result<Tensor> {
                let had = tensor.size3()?.1;
                let fitting = if had > rows {
                    tensor.f_narrow(1, 0, rows)?.f_contiguous()?
                } else if had < rows {
                    tensor.f_constant_pad_nd([0, 0, 0, rows - had])?
                } else {
                    tensor.shallow_clone()
                };
                Ok(fitting.f_to_device(like.device())?)
            };
            Ok(LstmState { hidden: fit(&known.hidden)?, cell: fit(&known.cell)? })
        };
        held.shapes.iter().enumerate().map(of_layer).collect()
    }

    pub(super) fn put(&self, layers: Vec<LstmState>) {
        self.0.lock().layers = layers;
    }
}

impl RnnOutputs {
    /// Computes the terms that fastai's `RNNRegularizer` adds to the loss: `alpha` times the mean square of the outputs
    /// (activation regularisation, AR), and `beta` times the mean square of their change from one time step to the next
    /// (temporal activation regularisation, TAR).
    ///
    /// TAR is left out for a batch of a single row, as in fastai, and for a single time step, where fastai's is NaN.
    ///
    /// ```
    /// use brigade_models::RnnOutputs;
    /// use tch::Tensor;
    ///
    /// let values = Tensor::from_slice(&[1f32, 3.0, 2.0, 2.0]).view([2, 2, 1]);
    /// let outputs = RnnOutputs { raw: values.shallow_clone(), dropped: values };
    /// let penalty = outputs.regularization(2.0, 1.0)?;
    /// assert_eq!(penalty.double_value(&[]), 2.0 * 18.0 / 4.0 + 4.0 / 2.0);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error of libtorch for outputs that do not have three dimensions.
    pub fn regularization(&self, alpha: f64, beta: f64) -> Result<Tensor> {
        let kind = match self.dropped.kind() {
            Kind::Double => Kind::Double,
            _ => Kind::Float,
        };
        let mean_square = |values: &Tensor| values.f_to_kind(kind)?.f_square()?.f_mean(kind);
        let mut penalty = Tensor::f_zeros([0i64; 0], (kind, self.dropped.device()))?;
        if alpha != 0.0 {
            penalty = penalty.f_add(&mean_square(&self.dropped)?.f_mul_scalar(alpha)?)?;
        }
        let (rows, time, _) = self.raw.size3()?;
        if beta != 0.0 && rows > 1 && time > 1 {
            let later = self.raw.f_narrow(1, 1, time - 1)?;
            let change = later.f_sub(&self.raw.f_narrow(1, 0, time - 1)?)?;
            penalty = penalty.f_add(&mean_square(&change)?.f_mul_scalar(beta)?)?;
        }
        Ok(penalty)
    }
}
