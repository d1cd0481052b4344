//! Ranks with unequal numbers of batches.

use std::sync::atomic::{AtomicU8, Ordering};

use brigade_torch::{Result, Shadowed};

use crate::gradients::backward::Gradients;
use crate::gradients::loss_check::LossCheck;
use crate::gradients::models::{Joining, PreparedModels};
use crate::precision::scaler::GradScaler;

/// Options for ranks with unequal numbers of batches, see [`crate::Accelerator::join_uneven_inputs`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JoinInputs {
    /// Overrides `even_batches` of prepared loaders of data sets inside the join. Defaults to `Some(false)`, which lets
    /// each rank have its own number of batches. Streams keep their setting.
    pub even_batches: Option<bool>,
    /// `true` if gradients are divided by the world size even after some ranks have run out of data, so that each
    /// sample keeps its weight; `false` if they are divided by the number of ranks that still have data. Defaults to
    /// `true`.
    pub divide_by_initial_world_size: bool,
    /// `true` if the join ends with an error on every rank when the first rank has no more data. Defaults to `false`.
    pub throw_on_early_termination: bool,
}

impl Default for JoinInputs {
    fn default() -> Self {
        Self {
            even_batches: Some(false),
            divide_by_initial_world_size: true,
            throw_on_early_termination: false,
        }
    }
}

/// The `even_batches` override of the current join.
#[derive(Debug, Default)]
pub(crate) struct EvenBatches(AtomicU8);

impl EvenBatches {
    fn replace(&self, even: Option<bool>) -> u8 {
        self.0.swap(even.map_or(0, |even| 1 + u8::from(even)), Ordering::Relaxed)
    }

    pub(crate) fn get(&self) -> Option<bool> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            even => Some(even == 2),
        }
    }
}

impl Gradients {
    /// Runs a loop in which ranks may have unequal numbers of batches.
    pub(crate) fn join_uneven_inputs<R>(
        &self,
        models: &(impl PreparedModels + ?Sized),
        options: JoinInputs,
        even_batches: &EvenBatches,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        if let Some(sharded) = &self.sharded {
            return Err(sharded.refuse(
                "join_uneven_inputs",
                "a rank without a batch cannot take part in the gathers of a forward",
            ));
        }
        if let Some(tensor) = self.tensor.as_ref().filter(|it| it.divides_experts()) {
            return Err(tensor.refuse(
                "join_uneven_inputs",
                "a rank without a batch cannot take part in the exchange of tokens; give all ranks as many batches",
            ));
        }
        let _even = EvenBatchesGuard::new(even_batches, options.even_batches);
        let mut joining = Vec::new();
        models.each_joining(&mut |model| joining.push(model));
        let joined = JoinGuard::begin(&joining, options);
        let alone = self.scaler.as_ref().map(GradScaler::alone);
        let result = body()?;
        if !joining.is_empty() {
            while self.shadow(&joining)? {}
        }
        joined.end()?;
        drop(alone);
        if let Some(scaler) = &self.scaler {
            scaler.agree()?;
        }
        Ok(result)
    }

    /// Shadows one iteration of the other ranks, for all models. Returns false when no rank has data.
    fn shadow(&self, models: &[Joining<'_>]) -> Result<bool> {
        let check = self.loss_check.as_deref();
        for model in models {
            // The next round determines whether the other ranks skip a batch or stop.
            let shadowed = model
                .reducer
                .shadow()
                .map_err(|error| check.and_then(LossCheck::found_in_shadow).unwrap_or(error))?;
            match shadowed {
                Shadowed::Ended => return Ok(false),
                Shadowed::WithoutReduction => {}
                // Each is one reduction on the ranks that have data, too.
                Shadowed::Reduced { finite } => {
                    if let Some(check) = check {
                        check.shadowed(model.checked, finite);
                    }
                }
            }
        }
        Ok(true)
    }
}

/// Models in a join. Abandons the join if it is dropped early: after an error or a panic.
struct JoinGuard<'a> {
    models: &'a [Joining<'a>],
    ended: bool,
}

impl<'a> JoinGuard<'a> {
    fn begin(models: &'a [Joining<'a>], options: JoinInputs) -> Self {
        let JoinInputs { divide_by_initial_world_size, throw_on_early_termination, .. } = options;
        for model in models {
            model.reducer.begin_join(brigade_torch::JoinOptions {
                divide_by_initial_world_size,
                throw_on_early_termination,
            });
        }
        Self { models, ended: false }
    }

    fn end(mut self) -> Result<()> {
        self.ended = true;
        for model in self.models {
            model.reducer.end_join()?;
        }
        Ok(())
    }
}

impl Drop for JoinGuard<'_> {
    fn drop(&mut self) {
        if !self.ended {
            for model in self.models {
                model.reducer.abandon_join();
            }
        }
    }
}

/// Restores the loaders' previous rule when it is dropped.
struct EvenBatchesGuard<'a> {
    rule: &'a EvenBatches,
    before: Option<bool>,
}

impl<'a> EvenBatchesGuard<'a> {
    fn new(rule: &'a EvenBatches, even: Option<bool>) -> Self {
        let before = rule.get();
        if even.is_some() {
            rule.replace(even);
        }
        Self { rule, before }
    }
}

impl Drop for EvenBatchesGuard<'_> {
    fn drop(&mut self) {
        self.rule.replace(self.before);
    }
}
