//! Sharded models: models whose parameters are divided over ranks.

use std::sync::Arc;

use brigade_sharding::{Parameter, ShardingPlan};
use brigade_torch::{Error, NamedTensor, Result, Sharder, ShardingGroups, dtype_of, kind_of};
use tch::Tensor;

use super::{Model, is_under};
use crate::param_path::is_floating_point;
use crate::param_registry::Role;

/// Returns the name of the module of a tensor.
fn module_of(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(module, _)| module)
}

impl<M> Model<M> {
    /// Returns descriptions of the parameters, in the order of registration, for a sharding plan: names, shapes, types,
    /// whether they are trained, the innermost unit that contains them, and whether their module has floating-point
    /// buffers, whose type they then keep.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] for a tensor that has no type.
    pub fn sharding_parameters(&self) -> Result<Vec<Parameter>> {
        // The module computes with its buffers: a parameter of another type could not be combined with them.
        let has_float_buffer = |module: &str| {
            let mut buffers =
                self.entries.iter().filter(|it| matches!(it.role, Role::Buffer { .. }));
            buffers.any(|it| module_of(&it.name) == module && is_floating_point(it.tensor.kind()))
        };
        let parameters =
            self.entries.iter().enumerate().filter(|(_, it)| it.role == Role::Parameter);
        let described = parameters.map(|(index, entry)| {
            let shape: Vec<u64> =
                entry.tensor.size().iter().map(|size| size.unsigned_abs()).collect();
            let kind = entry.tensor.f_kind()?;
            let dtype = dtype_of(kind).ok_or_else(|| {
                Error::invalid_argument(format!("a parameter cannot be {kind:?}"))
            })?;
            let mut parameter = Parameter::new(&entry.name, &shape, dtype);
            let others = self.entries.iter().filter(|other| other.role == Role::SameAs(index));
            parameter.names.extend(others.map(|other| other.name.clone()));
            parameter.trained = entry.tensor.requires_grad();
            parameter.keeps_dtype = has_float_buffer(module_of(&entry.name));
            parameter.is_expert = self.expert_parameters.contains(&entry.name);
            // Prefixes of one name: the longest is the innermost.
            let units = self.units.iter().map(|(unit, _)| unit);
            let around = units.filter(|unit| is_under(&entry.name, unit));
            parameter.unit = around.max_by_key(|unit| unit.len()).cloned();
            Ok(parameter)
        });
        described.collect()
    }

    /// Shards the parameters over the ranks of process groups according to a plan, and returns the sharder and this
    /// rank's shards, for an optimizer. From then on the model's own parameters are whole only while their units run,
    /// and the forward runs in [`Sharder::run_root`]. All ranks must have the same values before.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use brigade_nn::{Linear, Model};
    /// use brigade_sharding::{Sharding, ShardingPlan};
    /// use brigade_torch::{ShardingGroups, backward};
    /// use tch::{Kind, Tensor};
    ///
    /// let mut model = Model::new(|path| Linear::new(path, 4, 2))?;
    /// let sharding = Sharding::zero3();
    /// let parameters = model.sharding_parameters()?;
    /// let plan = ShardingPlan::new(&parameters, &sharding, &sharding.mesh(group.size())?)?;
    /// let groups = ShardingGroups { gather: group.clone(), reduce: group.clone(), replicas: None, parts: None, experts: None };
    /// let (sharder, shards) = model.shard(groups, plan)?;
    /// let input = Tensor::ones([1, 4], (Kind::Float, model.device()));
    /// let output = sharder.run_root(|| model.forward(&input))?;
    /// backward(&output.sum(Kind::Float))?;
    /// assert_eq!(shards[0].tensor.grad().size(), [2, 4]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Sharder::new`].
    pub fn shard(
        &mut self,
        groups: ShardingGroups,
        plan: ShardingPlan,
    ) -> Result<(Arc<Sharder>, Vec<NamedTensor>)> {
        let parameters = self.entries.iter().filter(|entry| entry.role == Role::Parameter);
        let parameters: Vec<Tensor> =
            parameters.map(|entry| entry.tensor.shallow_clone()).collect();
        let (sharder, shards) = Sharder::new(groups, plan, &parameters)?;
        let sharder = Arc::new(sharder);
        self.is_sharded = true;
        for (module, unit) in &self.units {
            // A module without parameters of its own, or one that the plan has put into the root.
            unit.set_place(&sharder, sharder.unit(module));
        }
        if let Some(kind) = sharder.plan().sharding().mixed.param.and_then(kind_of) {
            self.kind = kind;
        }
        Ok((sharder, shards))
    }
}
