//! Callbacks for training recurrent networks: hidden state, AR and TAR.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use brigade_checkpoint::Dtype;
use brigade_learn::LearnerState;
use brigade_learn::callback::{Callback, Phases, Step};
use brigade_models::RecurrentState;
use brigade_nn::LstmState;
use brigade_rank_env::text::counted;
use brigade_torch::{Error, ErrorKind, Result, bytes, dtype_of, tensor_from_bytes};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Device, Tensor};

/// Resets the hidden state of a recurrent model before training, before validation and after the fit, and keeps it
/// in checkpoints in the middle of an epoch (fastai's `ModelResetter`).
///
/// A checkpoint contains the states of all ranks' rows, in the order of the ranks. A run that continues with another
/// number of ranks, but the same number of rows in total, distributes them again.
#[derive(Debug)]
pub struct ModelResetter {
    state: RecurrentState,
    in_training: bool,
}

/// Adds activation regularisation (AR, `alpha` times the mean square of the outputs) and temporal activation
/// regularisation (TAR, `beta` times that of their changes) to the loss that backward takes; the logged loss stays as
/// it is (fastai's `RNNRegularizer`).
#[derive(Debug)]
pub struct RnnRegularizer {
    state: RecurrentState,
    alpha: f64,
    beta: f64,
}

impl ModelResetter {
    /// Creates a callback that resets a recurrent state.
    #[must_use]
    pub fn new(state: &RecurrentState) -> Self {
        Self { state: state.clone(), in_training: false }
    }
}

impl RnnRegularizer {
    /// Creates a callback that regularises the outputs in a recurrent state. fastai's `alpha` is 2 and its `beta` is 1.
    #[must_use]
    pub fn new(state: &RecurrentState, alpha: f64, beta: f64) -> Self {
        Self { state: state.clone(), alpha, beta }
    }
}

impl Callback for ModelResetter {
    fn before_train(&mut self, _learner: &mut LearnerState) -> Step {
        self.in_training = true;
        self.state.reset();
        Ok(())
    }

    fn after_train(&mut self, _learner: &mut LearnerState) -> Step {
        self.in_training = false;
        Ok(())
    }

    fn before_validate(&mut self, _learner: &mut LearnerState) -> Step {
        self.state.reset();
        Ok(())
    }

    fn after_fit(&mut self, _learner: &mut LearnerState) -> Step {
        self.state.reset();
        Ok(())
    }

    fn ended(&mut self, _learner: &mut LearnerState) {
        self.in_training = false;
    }

    fn state(&mut self, learner: &mut LearnerState) -> Result<Option<Value>> {
        let layers = if self.in_training {
            self.state.hidden_state()
        } else {
            // The next epoch begins with zeros.
            Vec::new()
        };
        let mine = layers.iter().map(SavedLayer::of).collect::<Result<Vec<_>>>()?;
        let ranks: Vec<Vec<SavedLayer>> =
            learner.accelerator().data_processes().gather_object(mine)?;
        if ranks.iter().all(Vec::is_empty) {
            return Ok(None);
        }
        serde_json::to_value(ranks).map(Some).map_err(Error::custom)
    }

    fn load_state(&mut self, learner: &mut LearnerState, state: &Value) -> Result<()> {
        let ranks: Vec<Vec<SavedLayer>> = Deserialize::deserialize(state).map_err(|error| {
            Error::invalid_argument(format!(
                "the hidden state of the checkpoint cannot be read: {error}"
            ))
        })?;
        let accelerator = learner.accelerator();
        let (rank, world) = (
            accelerator.data_processes().process_index() as i64,
            accelerator.data_processes().num_processes() as i64,
        );
        let depth = ranks.first().map_or(0, Vec::len);
        if ranks.iter().any(|layers| layers.len() != depth) {
            return Err(Error::invalid_argument(
                "the checkpoint's hidden states of the ranks have different numbers of layers",
            ));
        }
        let part = |which: fn(&SavedLayer) -> Result<Tensor>, layer: usize| -> Result<Tensor> {
            let rows =
                ranks.iter().map(|layers| which(&layers[layer])).collect::<Result<Vec<_>>>()?;
            let all = Tensor::f_cat(&rows, 1)?;
            let count = all.size().get(1).copied().unwrap_or(0);
            if count % world != 0 {
                return Err(Error::invalid_argument(format!(
                    "the checkpoint has the hidden states of {}, which {world} ranks cannot share \
                     evenly; go on with a number of ranks that divides them",
                    counted(count, "row")
                )));
            }
            let mine = count / world;
            Ok(all.f_narrow(1, rank * mine, mine)?.f_contiguous()?.f_to_device(learner.device())?)
        };
        let layers = (0..depth)
            .map(|layer| {
                let (hidden, cell) =
                    (part(SavedLayer::hidden, layer)?, part(SavedLayer::cell, layer)?);
                Ok(LstmState { hidden, cell })
            })
            .collect::<Result<Vec<_>>>()?;
        self.state.set_hidden_state(layers)
    }
}

impl Callback for RnnRegularizer {
    fn order(&self) -> i32 {
        1
    }

    fn phases(&self) -> Phases {
        Phases::Train
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        let is_on = self.alpha != 0.0 || self.beta != 0.0;
        self.state.keep_outputs(is_on && !learner.is_evaluation());
        Ok(())
    }

    fn after_loss(&mut self, learner: &mut LearnerState) -> Step {
        let Some(outputs) = self.state.take_outputs() else { return Ok(()) };
        if !learner.is_training() {
            return Ok(());
        }
        let Some(loss) = learner.loss_for_backward() else { return Ok(()) };
        let penalty = outputs.regularization(self.alpha, self.beta)?;
        let loss = loss.f_add(&penalty)?;
        learner.set_loss_for_backward(loss);
        Ok(())
    }

    fn ended(&mut self, learner: &mut LearnerState) {
        if !learner.is_evaluation() {
            self.state.keep_outputs(false);
        }
    }
}

/// State of a layer in a checkpoint.
#[derive(Serialize, Deserialize)]
struct SavedLayer {
    dtype: Dtype,
    shape: Vec<i64>,
    hidden: String,
    cell: String,
}

impl SavedLayer {
    fn of(layer: &LstmState) -> Result<Self> {
        let encoded = |tensor: &Tensor| -> Result<String> {
            let tensor = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_contiguous()?;
            let bytes = bytes(&tensor)?.to_vec();
            Ok(BASE64_STANDARD.encode(bytes))
        };
        let kind = layer.hidden.kind();
        let dtype = dtype_of(kind).ok_or_else(|| {
            Error::invalid_argument(format!("a hidden state of {kind:?} cannot be saved"))
        })?;
        let (hidden, cell) = (encoded(&layer.hidden)?, encoded(&layer.cell)?);
        Ok(Self { dtype, shape: layer.hidden.size(), hidden, cell })
    }

    fn decoded(&self, text: &str) -> Result<Tensor> {
        let mut bytes = BASE64_STANDARD
            .decode(text)
            .map_err(|error| Error::new(ErrorKind::Checkpoint, error))?;
        Ok(tensor_from_bytes(&mut bytes, &self.shape, self.dtype)?)
    }

    fn hidden(&self) -> Result<Tensor> {
        self.decoded(&self.hidden)
    }

    fn cell(&self) -> Result<Tensor> {
        self.decoded(&self.cell)
    }
}
