//! Gradients that a step finds, and those of parameters that several ranks have.

use std::collections::HashMap;

use brigade_nn::PipelineStages;
use brigade_torch::{
    NamedTensor, ProcessGroup, Result, Sharder, clear_gradient, gradient, set_gradient,
};
use tch::Tensor;

use super::wire::Wire;

/// Tensors to which a step adds gradients: the trained parameters, or their shards.
pub(crate) struct Stepped<'a> {
    pub(crate) tensors: Vec<NamedTensor>,
    /// Sharder of a sharded model.
    pub(crate) sharder: Option<&'a Sharder>,
    /// Ranks with other samples, among which experts are divided: their gradients come from the losses of all of these
    /// ranks, and are multiplied by the same factor on each.
    pub(crate) common: Option<ProcessGroup>,
}

/// Factors of gradients at the end of a step, for losses that are sums.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shares {
    /// Factor of the gradients of this step's losses, which are sums or complete means.
    pub(crate) own: f64,
    /// Factor of the gradients that existed before.
    pub(crate) earlier: f64,
}

/// Returns the shares of a batch, given its weight.
pub(crate) type ShareOf<'a> = &'a dyn Fn(f64) -> Result<Shares>;

/// Gradients of earlier steps, set aside if those of this step are multiplied at its end.
pub(super) struct Kept {
    earlier: HashMap<String, Tensor>,
}

impl Kept {
    /// Sets aside the gradients of parameters that several ranks have, or all gradients if losses are sums.
    pub(super) fn take(
        stepped: &Stepped<'_>,
        stages: &PipelineStages,
        is_sum: bool,
    ) -> Result<Self> {
        let mut earlier = HashMap::new();
        for parameter in &stepped.tensors {
            let is_shared = stages.shared().iter().any(|it| it.name == parameter.name);
            if !is_sum && !is_shared {
                continue;
            }
            if let Some(found) = gradient(&parameter.tensor)? {
                clear_gradient(&parameter.tensor)?;
                earlier.insert(parameter.name.clone(), found);
            }
        }
        Ok(Self { earlier })
    }

    /// Multiplies the step's gradients, sums those of shared parameters over their ranks, and adds the earlier ones.
    pub(super) fn finish(
        &mut self,
        stepped: &Stepped<'_>,
        stages: &PipelineStages,
        wire: &mut Wire<'_>,
        shares: Shares,
    ) -> Result<()> {
        let parameters = &stepped.tensors;
        // Gradients of shards were multiplied before their reduction.
        if shares.own != 1.0 && stepped.sharder.is_none() {
            for parameter in parameters {
                if let Some(mut found) = gradient(&parameter.tensor)? {
                    tch::no_grad(|| found.f_mul_scalar_(shares.own).map(drop))?;
                }
            }
        }
        for shared in stages.shared() {
            let own = parameters.iter().find(|it| it.name == shared.name);
            let Some(own) = own.filter(|_| shared.ranks.contains(&stages.rank())) else { continue };
            let found = match gradient(&own.tensor)? {
                Some(found) => found,
                None => own.tensor.f_detach()?.f_zeros_like()?,
            };
            let all = wire.exchange(&found, &shared.ranks)?;
            // In the order of the ranks, so that all of them get the same bits.
            let Some(mut sum) = all.first().map(Tensor::f_zeros_like).transpose()? else {
                continue;
            };
            all.iter().try_for_each(|other| sum.f_add_(other).map(drop))?;
            set_gradient(&own.tensor, &sum.f_to_device(own.tensor.device())?)?;
        }
        for parameter in parameters {
            let Some(mut earlier) = self.earlier.remove(&parameter.name) else { continue };
            if shares.earlier != 1.0 {
                tch::no_grad(|| earlier.f_mul_scalar_(shares.earlier).map(drop))?;
            }
            if let Some(found) = gradient(&parameter.tensor)? {
                let mut sum = earlier.shallow_clone();
                tch::no_grad(|| sum.f_add_(&found).map(drop))?;
            }
            set_gradient(&parameter.tensor, &earlier)?;
        }
        Ok(())
    }
}
