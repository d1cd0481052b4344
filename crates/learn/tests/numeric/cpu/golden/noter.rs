//! Callbacks that note what happens in a fit, as the golden file's own did.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use brigade_learn::callback::{Callback, Phases, Step};
use brigade_learn::{GroupHypers, LearnerState};
use tch::{Kind, Tensor};

/// What was noted of a fit.
#[derive(Debug, Default)]
pub(crate) struct FitNotes {
    /// Of every parameter group at each training batch.
    pub(crate) hypers: Vec<Vec<GroupHypers>>,
    pub(crate) loss: Vec<f64>,
    pub(crate) backward_loss: Vec<f64>,
    pub(crate) stepped: Vec<usize>,
    pub(crate) valid_batch_loss: Vec<f64>,
    pub(crate) trainable: Vec<String>,
    pub(crate) changed: Vec<Vec<String>>,
    pub(crate) norm_before: Vec<f64>,
    pub(crate) norm_after: Vec<f64>,
    pub(crate) recorder: brigade_learn::Recorder,
}

impl FitNotes {
    pub(crate) fn loss(&self) -> &[f64] {
        &self.loss
    }

    pub(crate) fn valid_batch_loss(&self) -> &[f64] {
        &self.valid_batch_loss
    }
}

pub(crate) type Notes = Rc<RefCell<Vec<FitNotes>>>;

/// Notes everything but the gradients' norms. Comes before all callbacks that change something.
#[derive(Debug)]
pub(crate) struct Noter {
    pub(crate) notes: Notes,
    /// Told the number of each epoch.
    pub(crate) epoch: Arc<AtomicUsize>,
    before: Vec<(String, Tensor)>,
}

impl Noter {
    pub(crate) fn new(notes: &Notes, epoch: &Arc<AtomicUsize>) -> Self {
        Self { notes: Rc::clone(notes), epoch: Arc::clone(epoch), before: Vec::new() }
    }

    fn note(&self, body: impl FnOnce(&mut FitNotes)) {
        body(self.notes.borrow_mut().last_mut().unwrap());
    }
}

/// Copies of all parameters and floating-point buffers.
fn values(learner: &LearnerState) -> Vec<(String, Tensor)> {
    let all = learner.parameters().into_iter().chain(learner.buffers());
    let floating = all.filter(|it| it.tensor.kind() == Kind::Float);
    floating.map(|it| (it.name, it.tensor.detach().copy())).collect()
}

impl Callback for Noter {
    fn order(&self) -> i32 {
        -1000
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        let parameters = learner.parameters().into_iter();
        let trainable =
            parameters.filter(|it| it.tensor.requires_grad()).map(|it| it.name).collect();
        self.notes.borrow_mut().push(FitNotes { trainable, ..FitNotes::default() });
        Ok(())
    }

    fn before_epoch(&mut self, learner: &mut LearnerState) -> Step {
        self.epoch.store(learner.epoch(), Ordering::Relaxed);
        self.before = values(learner);
        Ok(())
    }

    fn after_loss(&mut self, learner: &mut LearnerState) -> Step {
        let Some(loss) = learner.batch_loss().map(|loss| loss.double_value(&[])) else {
            return Ok(());
        };
        if learner.is_training() {
            self.note(|notes| {
                notes.loss.push(loss);
                notes.hypers.push(learner.hypers().to_vec());
            });
        } else if !learner.is_evaluation() {
            self.note(|notes| notes.valid_batch_loss.push(loss));
        }
        Ok(())
    }

    fn before_backward(&mut self, learner: &mut LearnerState) -> Step {
        let loss = learner.loss_for_backward().unwrap().double_value(&[]);
        self.note(|notes| notes.backward_loss.push(loss));
        Ok(())
    }

    fn after_step(&mut self, learner: &mut LearnerState) -> Step {
        self.note(|notes| notes.stepped.push(learner.train_iter()));
        Ok(())
    }

    fn after_epoch(&mut self, learner: &mut LearnerState) -> Step {
        let after = values(learner);
        let changed = self.before.iter().zip(after).filter(|(old, new)| old.1 != new.1);
        let changed = changed.map(|(old, _)| old.0.clone()).collect();
        self.note(|notes| notes.changed.push(changed));
        Ok(())
    }

    fn after_fit(&mut self, learner: &mut LearnerState) -> Step {
        self.note(|notes| notes.recorder = learner.recorder().clone());
        Ok(())
    }
}

/// Notes the norm of all gradients before or after those of `order` 11 clip them.
#[derive(Debug)]
pub(crate) struct Norm {
    pub(crate) notes: Notes,
    pub(crate) order: i32,
}

impl Callback for Norm {
    fn order(&self) -> i32 {
        self.order
    }

    fn phases(&self) -> Phases {
        Phases::Train
    }

    fn before_step(&mut self, learner: &mut LearnerState) -> Step {
        let squares: f64 = learner
            .parameters()
            .iter()
            .filter(|parameter| parameter.tensor.grad().defined())
            .map(|parameter| {
                parameter.tensor.grad().to_kind(Kind::Double).square().sum(None).double_value(&[])
            })
            .sum();
        let mut notes = self.notes.borrow_mut();
        let notes = notes.last_mut().unwrap();
        let norms = if self.order < 11 { &mut notes.norm_before } else { &mut notes.norm_after };
        norms.push(squares.sqrt());
        Ok(())
    }
}
