//! Loss of a language model, computed together with its head.

use std::sync::Arc;

use brigade_learn::LearnerState;
use brigade_learn::callback::{Callback, Step};
use brigade_learn::loss::{LabelSmoothingCrossEntropy, Loss, Outputs};
use brigade_metrics::ClassesLast;
use brigade_models::LanguageModelHead;
use brigade_torch::{CrossEntropyOptions, Result};
use brigade_train::{AutocastOptions, Precision};
use parking_lot::Mutex;
use tch::{Device, Reduction, Tensor};

/// Cross-entropy of a language model. In training, only a part of the scores is in memory at a time.
#[derive(Debug)]
pub(super) struct HeadLoss {
    head: LanguageModelHead,
    /// Loss of full scores, for a head that computes all of them.
    scores: ClassesLast<LabelSmoothingCrossEntropy>,
    smoothing: f64,
    precision: Arc<Mutex<Precision>>,
}

/// Fuses the loss with the head during a fit, if nothing uses the scores.
#[derive(Debug)]
pub(super) struct FuseLoss {
    head: LanguageModelHead,
    precision: Arc<Mutex<Precision>>,
}

impl HeadLoss {
    pub(super) fn new(head: &LanguageModelHead, smoothing: f64) -> (Self, FuseLoss) {
        let precision = Arc::new(Mutex::new(Precision::No));
        let fuse = FuseLoss { head: head.clone(), precision: Arc::clone(&precision) };
        let scores = ClassesLast(LabelSmoothingCrossEntropy::new(smoothing));
        (Self { head: head.clone(), scores, smoothing, precision }, fuse)
    }

    /// Runs `body` in the fit's precision: the model's output is computed outside of it.
    fn autocast<R>(&self, device: Device, body: impl FnOnce() -> R) -> Result<R> {
        let precision = *self.precision.lock();
        AutocastOptions { precision, cache: false }.run(device, body)
    }

    /// Returns the scores of a model's output.
    fn scored(&self, output: &Tensor) -> Result<Tensor> {
        if self.head.is_fused() {
            self.autocast(output.device(), || self.head.scores(output))?
        } else {
            Ok(output.shallow_clone())
        }
    }
}

impl Loss for HeadLoss {
    fn name(&self) -> &str {
        self.scores.name()
    }

    fn reduced(&self, predictions: &Tensor, targets: &Tensor, reduce: Reduction) -> Result<Tensor> {
        if reduce != Reduction::Mean {
            return self.scores.reduced(&self.scored(predictions)?, targets, reduce);
        }
        let options = CrossEntropyOptions {
            label_smoothing: self.smoothing,
            ..CrossEntropyOptions::default()
        };
        let loss =
            self.autocast(predictions.device(), || self.head.loss(predictions, targets, &options))?;
        Ok(loss?.loss)
    }

    fn outputs(&self) -> Outputs {
        self.scores.outputs()
    }

    fn activation(&self, predictions: &Tensor) -> Result<Tensor> {
        self.scores.activation(&self.scored(predictions)?)
    }

    fn decode(&self, predictions: &Tensor) -> Result<Tensor> {
        self.scores.decode(&self.scored(predictions)?)
    }
}

impl Callback for FuseLoss {
    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        if !learner.is_evaluation() {
            *self.precision.lock() = learner.accelerator().mixed_precision();
            // Metrics of training batches need the scores.
            self.head.fuse_loss(!learner.has_train_metrics());
        }
        Ok(())
    }

    fn ended(&mut self, learner: &mut LearnerState) {
        if !learner.is_evaluation() {
            self.head.fuse_loss(false);
        }
    }
}
