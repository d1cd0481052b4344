//! Norms of gradients of which ranks have parts.

use std::collections::HashSet;

use brigade_sharding::Axis;
use brigade_torch::{ProcessGroup, Result, TensorId, gradient, gradients};
use tch::{Device, Kind, Tensor};

use crate::model_parallel::ModelParallelRanks;
use crate::pipeline::PipelineRanks;
use crate::sharding::ShardedModels;

/// Returns the norm of the parameters' gradients, the same on all ranks, which take part. This rank may have only a
/// part of a parameter: rows of a sharded one, a part of one that tensor ranks divide, or rows of such a part. Each
/// whole gradient is counted once. Takes one message for shards, one for tensor parts, two for shards of such parts, and
/// one for experts, two for shards of them.
pub(super) fn norm(
    sharded: Option<&ShardedModels>,
    tensor: Option<&ModelParallelRanks>,
    pipeline: Option<&PipelineRanks>,
    parameters: &[Tensor],
    norm_type: f64,
) -> Result<Tensor> {
    let device = parameters.first().map_or(Device::Cpu, Tensor::device);
    let kind = parameters.first().map_or(Ok(Kind::Float), Tensor::f_kind)?;
    let power = Power { norm_type, device };
    let models = sharded.map(ShardedModels::models).unwrap_or_default();
    let has_all_rows = models.first().is_none_or(|it| it.sharder().groups().gather.size() == 1);
    let is_on_one_device = parameters.iter().all(|it| it.device() == device);
    if has_all_rows && is_on_one_device && tensor.is_none() && pipeline.is_none() {
        // Without a power and its root: the bits of a model that is not sharded.
        let found = whole(parameters)?;
        return Ok(gradients::norm(&found.iter().collect::<Vec<_>>(), norm_type)?.f_to_kind(kind)?);
    }
    let mut rows: HashSet<TensorId> = HashSet::new();
    for model in &models {
        model.with_parameters(|parameters| {
            let parts = parameters.iter().filter(|it| it.part.is_some() && !it.is_expert);
            rows.extend(parts.map(|it| TensorId::of(&it.shard)));
        });
    }
    // The shards of an offloaded model are in the host's memory, while its group sends from the device.
    let of_rows = models.first().map(|it| (&it.sharder().groups().gather, it.device()));
    // All experts of sharded models have rows, where several ranks have the same ones.
    let of_expert_rows = of_rows.and_then(|(_, device)| Some((tensor?.expert_rows()?, device)));
    let of_parts = |axis: Option<Axis>| {
        let tensor = tensor?;
        let group = match axis? {
            Axis::Expert => tensor.experts()?,
            _ => tensor.layers()?,
        };
        Some((group, tensor.everyone().device()))
    };
    let (layers, experts) = (Some(Axis::Tensor), Some(Axis::Expert));
    let mut sum: Option<Tensor> = None;
    for (over_rows, axis) in
        [(true, None), (false, None), (true, layers), (false, layers), (false, experts)]
    {
        let mut groups: Vec<(&ProcessGroup, Device)> =
            of_rows.filter(|_| over_rows).into_iter().chain(of_parts(axis)).collect();
        if groups.len() != usize::from(over_rows) + usize::from(axis.is_some()) {
            continue;
        }
        if axis == experts {
            groups.splice(..0, of_expert_rows);
        }
        let belongs = |parameter: &&Tensor| {
            let id = TensorId::of(parameter);
            let divided = tensor.and_then(|tensor| tensor.divided_along(id));
            // A parameter of several stages is counted by the first rank that has it.
            let is_own = pipeline.is_none_or(|it| !it.is_counted_before(parameter));
            is_own && (rows.contains(&id), divided) == (over_rows, axis)
        };
        let chosen: Vec<Tensor> =
            parameters.iter().filter(belongs).map(Tensor::shallow_clone).collect();
        let found = if groups.is_empty() {
            let found = whole(&chosen)?;
            if found.is_empty() {
                continue;
            }
            power.of(&gradients::norm(&found.iter().collect::<Vec<_>>(), norm_type)?)?
        } else {
            power.over_ranks(&groups, &chosen)?
        };
        sum = Some(match sum {
            Some(sum) => power.add(&sum, &found)?,
            None => found,
        });
    }
    if let Some(pipeline) = pipeline {
        let own = match sum {
            Some(sum) => sum.f_to_kind(Kind::Double)?,
            None => Tensor::f_zeros([0i64; 0], (Kind::Double, device))?,
        };
        sum = Some(power.over_stages(pipeline, &own)?);
    }
    match sum {
        Some(sum) => Ok(power.root(&sum)?.f_to_kind(kind)?),
        None => gradients::norm(&[], norm_type),
    }
}

/// Sum of powers, whose root is a norm; for the norm of infinity, the largest absolute value.
struct Power {
    norm_type: f64,
    device: Device,
}

impl Power {
    /// Returns the power sum over the gradients of all ranks of the groups, from these parts, in double precision.
    fn over_ranks(&self, groups: &[(&ProcessGroup, Device)], shards: &[Tensor]) -> Result<Tensor> {
        // The norm of order 0 counts the parameters with a non-zero gradient on any rank; all others count elements.
        let mut found = if self.norm_type == 0.0 {
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
        for (group, device) in groups {
            let ranks = group.all_gather(&found.f_to_device(*device)?)?;
            let ranks = Tensor::f_stack(&ranks, 0)?.f_to_device(self.device)?;
            found = if self.norm_type == 0.0 || self.norm_type.is_infinite() {
                ranks.f_amax([0i64], false)?
            } else {
                // In the order of the ranks, so that all of them get the same bits.
                ranks.f_sum_dim_intlist([0i64].as_slice(), false, Kind::Double)?
            };
        }
        Ok(found.f_sum(Kind::Double)?)
    }

    /// Returns the power sum over all stages of a pipeline, in double precision.
    fn over_stages(&self, pipeline: &PipelineRanks, own: &Tensor) -> Result<Tensor> {
        let group = pipeline.group();
        let own = own.f_to_device(pipeline.everyone().device())?.f_reshape([1])?;
        let ranks = Tensor::f_cat(&group.all_gather(&own)?, 0)?.f_to_device(self.device)?;
        Ok(if self.norm_type.is_infinite() {
            ranks.f_amax([0i64], false)?
        } else {
            ranks.f_sum_dim_intlist([0i64].as_slice(), false, Kind::Double)?
        })
    }

    /// Returns the power sum of a norm.
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

/// Returns the gradients of the parameters that have one.
fn whole(parameters: &[Tensor]) -> Result<Vec<Tensor>> {
    let found = parameters.iter().filter_map(|parameter| gradient(parameter).transpose());
    // A rank without rows has a gradient without elements, which has no maximum.
    found.filter(|gradient| gradient.as_ref().map_or(true, |it| it.numel() > 0)).collect()
}
