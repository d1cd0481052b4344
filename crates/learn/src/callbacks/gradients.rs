//! Gradients: accumulated over batches, clipped, and checked for non-finite losses.

use brigade_train::ClipNorm;

use tch::Tensor;

use crate::callback::{Callback, Level, Phases, Step};
use crate::state::LearnerState;

/// Accumulates gradients over a number of samples before each step (fastai's `GradientAccumulation`): the gradient of
/// the mean over these samples, as if they were one batch.
///
/// Samples of all ranks are counted, so a fit makes the same steps on any number of ranks; fastai counts those of each
/// rank. Gradients are averaged over the ranks only in the last batch before a step. Gradients left at the end of an
/// epoch are continued in the next one.
#[derive(Clone, Debug)]
pub struct GradientAccumulation {
    samples: usize,
    count: usize,
}

impl GradientAccumulation {
    /// Makes a callback that steps after `samples` samples. A batch that exceeds this number ends the window.
    #[must_use]
    pub fn new(samples: usize) -> Self {
        Self { samples: samples.max(1), count: 0 }
    }
}

impl Callback for GradientAccumulation {
    fn order(&self) -> i32 {
        6
    }

    fn phases(&self) -> Phases {
        Phases::Train
    }

    fn before_fit(&mut self, _learner: &mut LearnerState) -> Step {
        self.count = 0;
        Ok(())
    }

    fn before_batch(&mut self, learner: &mut LearnerState) -> Step {
        let steps = self.count + learner.global_batch_rows() >= self.samples;
        learner.model.set_sync(steps);
        Ok(())
    }

    fn after_loss(&mut self, learner: &mut LearnerState) -> Step {
        let Some(loss) = learner.loss_for_backward() else { return Ok(()) };
        let ranks = learner.accelerator().data_processes().num_processes();
        let share = (learner.batch_rows() * ranks) as f64 / self.samples as f64;
        let loss = loss.f_mul_scalar(share)?;
        learner.set_loss_for_backward(loss);
        Ok(())
    }

    fn before_step(&mut self, learner: &mut LearnerState) -> Step {
        self.count += learner.global_batch_rows();
        learner.window_open = self.count < self.samples;
        if learner.window_open {
            return Level::Batch.cancel();
        }
        self.count = 0;
        Ok(())
    }

    fn ended(&mut self, learner: &mut LearnerState) {
        learner.model.set_sync(true);
        learner.window_open = false;
    }
}

/// Scales the gradients of all parameters together before each step, so that their norm is at most `max_norm`
/// (fastai's `GradientClip`). With fp16 they are divided by the loss scale first.
#[derive(Clone, Copy, Debug)]
pub struct GradientClip(ClipNorm);

impl GradientClip {
    /// Clips gradients by their 2-norm.
    #[must_use]
    pub fn new(max_norm: f64) -> Self {
        Self(ClipNorm { max_norm, ..ClipNorm::default() })
    }

    /// Sets the exponent p of the p-norm. Infinity means the largest absolute value. Defaults to 2.
    #[must_use]
    pub fn norm_type(mut self, norm_type: f64) -> Self {
        self.0.norm_type = norm_type;
        self
    }
}

impl Callback for GradientClip {
    fn order(&self) -> i32 {
        11
    }

    fn phases(&self) -> Phases {
        Phases::Train
    }

    fn before_step(&mut self, learner: &mut LearnerState) -> Step {
        if let Some(optimizer) = learner.optimizer()? {
            learner.accelerator().clip_grad_norm(&optimizer, self.0)?;
        }
        Ok(())
    }
}

/// Ends the fit when a loss is infinite or NaN, on all ranks when it is on one (fastai's `TerminateOnNaNCallback`).
/// Weights and BatchNorm's statistics are then those before that batch, or with [`GradientAccumulation`] those before
/// its window; fastai has made the step by then. Without this callback such a loss is an error.
#[derive(Debug, Default)]
pub struct TerminateOnNan {
    /// Values of the buffers before the batch, whose forward pass may put NaN into them.
    before: Vec<Tensor>,
}

impl TerminateOnNan {
    /// Makes the callback, which has no options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl Callback for TerminateOnNan {
    fn order(&self) -> i32 {
        -9
    }

    fn phases(&self) -> Phases {
        Phases::Train
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        learner.ends_on_nan = true;
        Ok(())
    }

    fn before_batch(&mut self, learner: &mut LearnerState) -> Step {
        // With several ranks, a NaN in any batch of a window is detected at its end.
        if !learner.window_open {
            self.before = buffers(learner).iter().map(Tensor::copy).collect();
        }
        Ok(())
    }

    fn after_cancel_fit(&mut self, learner: &mut LearnerState) -> Step {
        if learner.ended_on_nan {
            for (mut buffer, before) in buffers(learner).into_iter().zip(&self.before) {
                buffer.f_copy_(before)?;
            }
        }
        Ok(())
    }

    fn ended(&mut self, learner: &mut LearnerState) {
        learner.ends_on_nan = false;
        self.before.clear();
    }
}

fn buffers(learner: &LearnerState) -> Vec<Tensor> {
    learner.buffers().into_iter().map(|it| it.tensor.detach()).collect()
}
