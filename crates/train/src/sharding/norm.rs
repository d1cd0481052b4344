//! Norms of gradients that are spread over ranks.

use std::collections::HashSet;

use brigade_torch::{ProcessGroup, Result, TensorId, gradient, gradients};
use tch::{Device, Kind, Tensor};

use super::ShardedModels;

impl ShardedModels {
    /// Returns the norm of the parameters' gradients, of which some are shards: that of the whole gradients, the same on
    /// all ranks. All ranks take part, with one message.
    pub(crate) fn norm(&self, parameters: &[Tensor], norm_type: f64) -> Result<Tensor> {
        let models = self.models();
        let Some(first) = models.first() else {
            return gradients::norm(&whole(parameters)?.iter().collect::<Vec<_>>(), norm_type);
        };
        let mut spread: HashSet<TensorId> = HashSet::new();
        for model in &models {
            model.with_parameters(|parameters| {
                let parts = parameters.iter().filter(|it| it.part.is_some());
                spread.extend(parts.map(|it| TensorId::of(&it.shard)));
            });
        }
        let (shards, others): (Vec<Tensor>, Vec<Tensor>) = parameters
            .iter()
            .map(Tensor::shallow_clone)
            .partition(|parameter| spread.contains(&TensorId::of(parameter)));
        let device = parameters.first().map_or(Device::Cpu, Tensor::device);
        let kind = parameters.first().map_or(Ok(Kind::Float), Tensor::f_kind)?;
        let group = (&first.sharder().groups().gather, first.device());
        let others = whole(&others)?;
        let power = Power { norm_type, device };
        let mut sum = power.over_ranks(group, &shards)?;
        if !others.is_empty() {
            let others = gradients::norm(&others.iter().collect::<Vec<_>>(), norm_type)?;
            sum = power.add(&sum, &power.of(&others)?)?;
        }
        Ok(power.root(&sum)?.f_to_kind(kind)?)
    }
}

/// Sums of powers, whose root is a norm; the largest value for the norm of infinity.
struct Power {
    norm_type: f64,
    device: Device,
}

impl Power {
    /// Of the gradients that all ranks have of these shards, in double precision.
    fn over_ranks(
        &self,
        (group, group_device): (&ProcessGroup, Device),
        shards: &[Tensor],
    ) -> Result<Tensor> {
        // The norm of order 0 counts parameters, of which each rank has rows; all others count elements.
        let of_rank = if self.norm_type == 0.0 {
            let counts = shards.iter().map(|shard| match gradient(shard)? {
                Some(gradient) => Ok(gradient.f_ne(0.0)?.f_any()?.f_to_kind(Kind::Double)?),
                None => Ok(Tensor::f_zeros([0i64; 0], (Kind::Double, self.device))?),
            });
            let counts = counts.collect::<Result<Vec<_>>>()?;
            if counts.is_empty() {
                Tensor::f_zeros([1], (Kind::Double, self.device))?
            } else {
                Tensor::f_stack(&counts, 0)?
            }
        } else {
            let found = whole(shards)?;
            let sum = if found.is_empty() {
                Tensor::f_zeros([0i64; 0], (Kind::Double, self.device))?
            } else {
                self.of(&gradients::norm(&found.iter().collect::<Vec<_>>(), self.norm_type)?)?
            };
            sum.f_reshape([1])?
        };
        let ranks = group.all_gather(&of_rank.f_to_device(group_device)?)?;
        let ranks = Tensor::f_stack(&ranks, 0)?.f_to_device(self.device)?;
        Ok(if self.norm_type == 0.0 {
            ranks.f_amax([0i64], false)?.f_sum(Kind::Double)?
        } else if self.norm_type.is_infinite() {
            ranks.f_amax([0i64, 1], false)?
        } else {
            // In the order of the ranks, so that all of them have the same bits.
            ranks.f_sum(Kind::Double)?
        })
    }

    /// Of a norm.
    fn of(&self, norm: &Tensor) -> Result<Tensor> {
        let norm = norm.f_to_kind(Kind::Double)?;
        if self.norm_type == 0.0 || self.norm_type.is_infinite() {
            return Ok(norm);
        }
        Ok(norm.f_pow(&Tensor::from(self.norm_type).f_to_device(self.device)?)?)
    }

    fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        Ok(if self.norm_type.is_infinite() { a.f_maximum(b)? } else { a.f_add(b)? })
    }

    fn root(&self, sum: &Tensor) -> Result<Tensor> {
        if self.norm_type == 0.0 || self.norm_type.is_infinite() {
            return Ok(sum.shallow_clone());
        }
        Ok(sum.f_pow(&Tensor::from(1.0 / self.norm_type).f_to_device(self.device)?)?)
    }
}

/// The gradients of those that have one.
fn whole(parameters: &[Tensor]) -> Result<Vec<Tensor>> {
    let found = parameters.iter().filter_map(|parameter| gradient(parameter).transpose());
    // A rank without rows has a gradient without elements, which has no largest one.
    found.filter(|gradient| gradient.as_ref().map_or(true, |it| it.numel() > 0)).collect()
}
