//! The engine of sharded training: ZeRO's stages and PyTorch's FSDP2.
//!
//! The C++ part is `cpp/sharder.cpp` with `sharder_gather.cpp` and `sharder_reduce.cpp`.
//!
//! All whole parameters of a unit are views of one storage, in which the rows of the ranks follow each other, so that a
//! gather writes directly into place, and one call frees the unit. The layers' own tensors have no memory between uses.
//! Reading one then is an error with the names of the unit and its parameters, by a flag of libtorch's storage
//! (`cpp/storage.cpp`).
//!
//! A unit is gathered at the beginning of its forward (`Unit::run`), and again when the gradient of one of its outputs
//! has been computed. At the same time the next unit, in the order of the last forward or of the backward, is gathered,
//! so that two units are whole at once in addition to the root. In the backward a unit is freed when an output of the
//! preceding unit has its gradient: autograd runs the nodes of a device from the latest to the earliest, so that all
//! nodes of the unit are done then, including those of frozen parameters.
//!
//! Reductions begin when all gradients of a unit have been counted, in one order on all ranks, from the last unit to
//! the first. Gradients of parameters that a backward does not reach count as zeros. Sums are computed in the order of
//! the ranks and divided once, so that ZeRO-1, -2 and -3 have the bits of the reducer if its division is exact, which
//! holds if the number of ranks is a power of two.
//!
//! Experts of a mixture, which the ranks of `ep` divide, have rows over the ranks with the same experts, and messages
//! of their own in the same unit. Their rows may be along the second dimension: each rank has a range of the outputs of
//! every expert then, and the storage has this dimension first (`Parameter::by_rows`).

use std::collections::HashMap;
use std::fmt;

use brigade_checkpoint::Dtype;
use brigade_rank_env::text::counted;
use brigade_sharding::{Axis, Offload, Reshard, ShardingPlan, Unit, UnitParameter};
use cxx::UniquePtr;
use tch::Tensor;

use crate::bridge::{borrow, borrow_all, ffi, own};
use crate::dtype::{dtype_of, kind_of};
use crate::error::Error;
use crate::group::ProcessGroup;
use crate::parameters::NamedTensor;
use crate::tensor_tree::TensorTree;

/// The process groups of a sharded model.
#[derive(Debug, Clone)]
pub struct ShardingGroups {
    /// Ranks over which each parameter's rows are sharded. The group's messages are parameters.
    pub gather: ProcessGroup,
    /// Ranks of `gather` as a second group, whose messages are gradients, so that they can be sent concurrently with
    /// those of parameters.
    pub reduce: ProcessGroup,
    /// Ranks that have the same rows, if parameters are sharded within hosts and replicated between them.
    pub replicas: Option<ProcessGroup>,
    /// Neighbouring ranks of `gather` that together keep whole parameters from forward to backward, as many as
    /// [`Reshard::To`] sets.
    pub parts: Option<ProcessGroup>,
    /// Ranks that have the same experts of a mixture, with expert parallelism.
    pub experts: Option<ExpertGroups>,
}

/// The process groups of the ranks that have the same experts of a mixture.
#[derive(Debug, Clone)]
pub struct ExpertGroups {
    /// All ranks with the same experts: the axis [`Axis::ExpertData`].
    pub same: ProcessGroup,
    /// Ranks over which the rows of the experts are sharded, if there are several: the axis [`Axis::ExpertShard`].
    pub shards: Option<ExpertShardGroups>,
}

/// The process groups of the ranks that share one copy of the same experts.
#[derive(Debug, Clone)]
pub struct ExpertShardGroups {
    /// Ranks over which the experts' rows are sharded. The group's messages are parameters.
    pub gather: ProcessGroup,
    /// Ranks of `gather` as a second group, whose messages are gradients.
    pub reduce: ProcessGroup,
}

/// Splits the parameters of a model into shards, one for each rank, and gathers them unit by unit while the model
/// computes (ZeRO, [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)).
///
/// A unit is a part of the model whose parameters are whole at the same time, such as a transformer's block. Each
/// parameter is split along its first dimension, in `ceil(rows / ranks)` rows for each rank; the last ranks may have
/// fewer rows or none. The model's own tensors have no memory between uses; reading one then is an error with the
/// unit's name. The optimizer has the shards, to whose gradients each backward adds the mean over the ranks.
///
/// With [`Offload::Cpu`] the shards and their gradients are in the host's memory. A unit's rows are copied to the
/// device while the unit before computes, and its gradients back while the next one does.
///
/// Every rank runs the same units in the same order, inside of [`Sharder::run_root`].
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_checkpoint::Dtype;
/// use brigade_sharding::{Mesh, Parameter, Sharding, ShardingPlan};
/// use brigade_torch::{Sharder, ShardingGroups, backward, gradient};
/// use tch::{Kind, Tensor};
///
/// let weight = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
/// let parameters = [Parameter::new("weight", &[2], Dtype::F64)];
/// let plan = ShardingPlan::new(&parameters, &Sharding::zero3(), &Mesh::builder().build(1)?)?;
/// let groups = ShardingGroups { gather: group.clone(), reduce: group.clone(), replicas: None, parts: None, experts: None };
/// let (sharder, shards) = Sharder::new(groups, plan, &[weight.shallow_clone()])?;
///
/// let square = || Ok::<_, brigade_torch::Error>((&weight * &weight).sum(Kind::Double));
/// let loss = sharder.run_root(square)?;
/// backward(&loss)?;
/// assert_eq!(gradient(&shards[0].tensor)?.unwrap(), Tensor::from_slice(&[2.0, 4.0]));
/// assert!(weight.f_sum(Kind::Double).is_err(), "it is whole in its unit alone");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Sharder {
    handle: Handle,
    groups: ShardingGroups,
    plan: ShardingPlan,
    /// Number of each module's unit.
    modules: HashMap<String, usize>,
}

struct Handle(UniquePtr<ffi::Sharder>);

// SAFETY: a counted pointer (atomic count) to an engine that locks its own mutex in each of its functions: autograd
// calls it from other threads as well.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// Memory and counters of a [`Sharder`] since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharderMeter {
    /// Current number of bytes of whole parameters, besides the shards: on one rank these may be the whole parameters.
    pub gathered_bytes: u64,
    /// Maximum number of bytes of whole parameters at once, besides the shards.
    pub peak_gathered_bytes: u64,
    /// Maximum number of bytes at once of whole gradients of one backward, of their reductions, and of rows that are
    /// copied to the host's memory. Gradients of earlier batches that were not reduced are not included.
    pub peak_reduced_bytes: u64,
    /// Maximum number of units that were whole at once, including the root.
    pub peak_whole_units: u64,
    /// Number of times that a unit was gathered.
    pub gathers: u64,
    /// Number of times that a unit's gradients were reduced.
    pub reductions: u64,
}

impl Sharder {
    /// Shards the parameters that a plan was made for, in the plan's order, and returns this rank's shards in the same
    /// order: under the parameters' names, of their types, with fewer rows. All ranks must have the same values before.
    /// A parameter without dimensions is whole on each rank.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if parameters or groups differ from the plan's;
    /// [`crate::TorchError::Libtorch`], in particular if memory runs out.
    pub fn new(
        groups: ShardingGroups,
        plan: ShardingPlan,
        parameters: &[Tensor],
    ) -> Result<(Self, Vec<NamedTensor>), Error> {
        check(&groups, &plan, parameters)?;
        let raw_group = |group| ffi::GroupRef { group: ProcessGroup::raw(group) };
        let replicated: Vec<_> = groups.replicas.iter().map(raw_group).collect();
        let parts: Vec<_> = groups.parts.iter().map(raw_group).collect();
        let experts = groups.experts.as_ref();
        let same: Vec<_> = experts.iter().map(|it| raw_group(&it.same)).collect();
        let shards = experts.and_then(|it| it.shards.as_ref()).into_iter();
        let shards: Vec<_> =
            shards.flat_map(|it| [raw_group(&it.gather), raw_group(&it.reduce)]).collect();
        let raw = ffi::SharderOptions {
            whole_at_rest: plan.sharding().strategy.keeps_parameters_whole(),
            offload: plan.sharding().offload != Offload::None,
            pin: plan.sharding().offload == Offload::Cpu { pin: true },
            divisor: plan.divisor() as i64,
            expert_divisor: plan.expert_divisor() as i64,
        };
        let (gather, reduce) = (groups.gather.raw(), groups.reduce.raw());
        let handle = ffi::new_sharder(gather, reduce, &replicated, &parts, &same, &shards, &raw)
            .map_err(|error| Error::libtorch("Sharder::new", &error))?;
        let mut modules = HashMap::new();
        let mut shards = Vec::new();
        let has_root = has_root(&plan);
        if !has_root {
            shards.extend(add_unit(&handle, None, parameters)?);
        }
        for (place, unit) in plan.units().iter().enumerate() {
            shards.extend(add_unit(&handle, Some(unit), parameters)?);
            let number = place + usize::from(!has_root);
            modules.extend(unit.modules.iter().map(|module| (module.clone(), number)));
        }
        shards.sort_by_key(|(index, _)| *index);
        let shards = shards.into_iter().map(|(_, shard)| shard).collect();
        Ok((Self { handle: Handle(handle), groups, plan, modules }, shards))
    }

    /// Returns the number of the unit that contains a module, by the module's name in the plan. `None` for a name that
    /// is not in the plan, whose parameters belong to the root.
    #[must_use]
    pub fn unit(&self, module: &str) -> Option<usize> {
        self.modules.get(module).copied()
    }

    /// Runs the whole forward, with the root's parameters whole. Units run inside of it.
    ///
    /// # Errors
    /// Returns the same errors as [`Sharder::run`].
    pub fn run_root<T, E>(&self, forward: impl FnOnce() -> Result<T, E>) -> Result<T, E>
    where
        T: TensorTree,
        E: From<Error>,
    {
        self.run(0, forward)
    }

    /// Runs a unit's part of the forward, with its parameters whole. Call it inside of [`Sharder::run_root`] or
    /// [`Sharder::gathered`].
    ///
    /// # Errors
    /// Returns the errors of `forward`; [`crate::TorchError::Libtorch`] with the unit's name if a gather fails because
    /// a peer was lost or memory runs out. After an error, and after a panic, the next forward starts again.
    pub fn run<T, E>(&self, unit: usize, forward: impl FnOnce() -> Result<T, E>) -> Result<T, E>
    where
        T: TensorTree,
        E: From<Error>,
    {
        let failed = |error: cxx::Exception| Error::libtorch("forward of a sharded unit", &error);
        ffi::sharder_enter(&self.handle.0, unit).map_err(failed)?;
        let unfinished = Unfinished(self);
        let output = forward()?;
        let mut outputs = Vec::new();
        output.visit(&mut |tensor| outputs.push(tensor));
        ffi::sharder_leave(&self.handle.0, unit, &borrow_all(&outputs)).map_err(failed)?;
        std::mem::forget(unfinished);
        Ok(output)
    }

    /// Sets whether the next backwards reduce gradients. Otherwise whole gradients accumulate on each rank, and the
    /// next backward that reduces includes their sum (PyTorch's `set_requires_gradient_sync`). Defaults to `true`.
    ///
    /// If parameters are replicated between groups, `window_ends` sets whether the next backward also sums over the
    /// groups (PyTorch's `set_is_last_backward`); otherwise a group's sums accumulate on its ranks. Defaults to `true`.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if libtorch fails.
    pub fn set_sync(&self, sync: bool, window_ends: bool) -> Result<(), Error> {
        ffi::sharder_set_sync(&self.handle.0, sync, window_ends)
            .map_err(|error| Error::libtorch("Sharder::set_sync", &error))
    }

    /// Multiplies the gradients that have accumulated on this rank without being reduced by a number, which is on the
    /// host or on their device. Reduced gradients, which are those of the shards, are not changed.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if libtorch fails.
    pub fn scale_unreduced(&self, factor: &Tensor) -> Result<(), Error> {
        ffi::sharder_scale_unreduced(&self.handle.0, borrow(factor))
            .map_err(|error| Error::libtorch("Sharder::scale_unreduced", &error))
    }

    /// Reduces the gradients that have accumulated on this rank, and adds their mean over the ranks to the gradients of
    /// the shards: a single reduction after several backwards without one ([`Sharder::set_sync`]). All ranks call it.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] with the unit's name if a peer was lost.
    pub fn reduce_unreduced(&self) -> Result<(), Error> {
        ffi::sharder_reduce_unreduced(&self.handle.0)
            .map_err(|error| Error::libtorch("reducing the gradients of a sharded model", &error))
    }

    /// Discards the gradients that have accumulated on this rank without being reduced, like an optimizer's `zero_grad`
    /// for those of the shards.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if libtorch fails.
    pub fn clear_unreduced(&self) -> Result<(), Error> {
        ffi::sharder_clear_unreduced(&self.handle.0)
            .map_err(|error| Error::libtorch("Sharder::clear_unreduced", &error))
    }

    /// Updates whole parameters after a change of the shards. Must be called after an optimizer step, and after weights
    /// were loaded into the shards. Parameters that stay whole are gathered again; the next forward waits for that unit
    /// by unit.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when a gather cannot be started.
    pub fn shards_changed(&self) -> Result<(), Error> {
        ffi::sharder_shards_changed(&self.handle.0)
            .map_err(|error| Error::libtorch("Sharder::shards_changed", &error))
    }

    /// Updates whole parameters of one unit after a change of its shards, given its index in
    /// [`ShardingPlan::units`], while those of other units are still changed: an optimizer that steps one unit after the
    /// other. Parameters that stay whole are gathered again. All ranks call it for the same units in the same order.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when a gather cannot be started.
    pub fn unit_changed(&self, unit: usize) -> Result<(), Error> {
        let number = unit + usize::from(!has_root(&self.plan));
        ffi::sharder_unit_changed(&self.handle.0, number)
            .map_err(|error| Error::libtorch("Sharder::unit_changed", &error))
    }

    /// Updates which parameters require a gradient.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] for a parameter that cannot have a gradient.
    pub fn update_trained(&self) -> Result<(), Error> {
        ffi::sharder_update_trained(&self.handle.0)
            .map_err(|error| Error::libtorch("Sharder::update_trained", &error))
    }

    /// Runs `read` with all parameters whole, on every rank.
    ///
    /// # Errors
    /// Returns the errors of `read`; [`crate::ErrorKind::InvalidArgument`] if it is called inside of another `gathered`
    /// or `gathered_mut`; [`crate::TorchError::Libtorch`] if a gather fails.
    pub fn gathered<T, E: From<Error>>(&self, read: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.with_whole(false, read)
    }

    /// Runs `write` with all parameters whole, on every rank, and copies this rank's rows into its shards.
    ///
    /// # Errors
    /// Returns the same errors as [`Sharder::gathered`]; after an error of `write` the shards are as before.
    pub fn gathered_mut<T, E: From<Error>>(
        &self,
        write: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.with_whole(true, write)
    }

    fn with_whole<T, E: From<Error>>(
        &self,
        write: bool,
        body: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        ffi::sharder_hold_all(&self.handle.0, write)
            .map_err(|error| Error::libtorch("gathering the parameters", &error))?;
        let mut held = Held { sharder: self, write: false };
        let value = body()?;
        held.write = write;
        drop(held);
        Ok(value)
    }

    /// Returns the current memory and the counters so far.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if libtorch fails.
    pub fn meter(&self) -> Result<SharderMeter, Error> {
        let meter = ffi::sharder_meter(&self.handle.0)
            .map_err(|error| Error::libtorch("Sharder::meter", &error))?;
        Ok(SharderMeter {
            gathered_bytes: meter.gathered,
            peak_gathered_bytes: meter.most_gathered,
            peak_reduced_bytes: meter.most_reduced,
            peak_whole_units: meter.most_whole,
            gathers: meter.gathers,
            reductions: meter.reductions,
        })
    }

    /// Returns the plan of the sharder.
    #[must_use]
    pub fn plan(&self) -> &ShardingPlan {
        &self.plan
    }

    /// Returns the process groups of the sharder.
    #[must_use]
    pub fn groups(&self) -> &ShardingGroups {
        &self.groups
    }
}

/// Returns `true` if the first unit of a plan is the root. The engine always has one, because that is where a forward
/// begins and ends.
fn has_root(plan: &ShardingPlan) -> bool {
    plan.units().first().is_some_and(Unit::is_root)
}

/// Forward that has not ended yet.
struct Unfinished<'a>(&'a Sharder);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        ffi::sharder_reset(&self.0.handle.0);
    }
}

/// Scope in which all parameters are whole.
struct Held<'a> {
    sharder: &'a Sharder,
    write: bool,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // Cannot fail: it only copies within memory and releases memory.
        let _ = ffi::sharder_release_all(&self.sharder.handle.0, self.write);
    }
}

/// Adds a unit to the engine: `None` adds a root without parameters. Returns shards with their places in the plan's
/// list.
fn add_unit(
    sharder: &ffi::Sharder,
    unit: Option<&Unit>,
    parameters: &[Tensor],
) -> Result<Vec<(usize, NamedTensor)>, Error> {
    let planned = unit.map_or(&[][..], |unit| &unit.parameters);
    let names: Vec<String> =
        planned.iter().map(|planned| planned.parameter.name().to_owned()).collect();
    let tensors: Vec<&Tensor> = planned.iter().map(|planned| &parameters[planned.index]).collect();
    let slots = planned.iter().map(slot).collect::<Result<Vec<_>, _>>()?;
    let shards = ffi::sharder_add_unit(
        sharder,
        unit.map_or("the root", Unit::title),
        unit.is_some_and(|unit| unit.reshard != Reshard::No),
        unit.is_some_and(|unit| matches!(unit.reshard, Reshard::To(_))),
        &borrow_all(&tensors),
        &names,
        &slots,
        unit.map_or(0, |unit| unit.storage_bytes() as usize),
    )
    .map_err(|error| Error::libtorch("Sharder::new", &error))?;
    let shards = shards.iter().map(|shard| own(ffi::copy_handle(shard)));
    let named = names.into_iter().zip(shards).map(|(name, tensor)| NamedTensor { name, tensor });
    Ok(planned.iter().map(|planned| planned.index).zip(named).collect())
}

fn slot(planned: &UnitParameter) -> Result<ffi::ShardedSlot, Error> {
    let number = |dtype: Dtype| match kind_of(dtype) {
        Some(kind) => Ok(kind as i8),
        None => Err(Error::invalid_argument(format!(
            "parameter {:?} cannot be {dtype}: no tensor of a program can",
            planned.parameter.name()
        ))),
    };
    let slot = &planned.slot;
    Ok(ffi::ShardedSlot {
        offset: (slot.offset / slot.element_bytes.max(1)) as i64,
        rows: if slot.is_whole { 0 } else { slot.chunk() as i64 },
        dim: slot.dim as i64,
        kind: number(planned.compute_dtype)?,
        reduce_kind: number(planned.reduce_dtype)?,
        is_expert: planned.parameter.is_expert,
        keeps_memory: slot.keeps_memory,
    })
}

/// Compares a plan with the groups and parameters that it is applied to.
fn check(groups: &ShardingGroups, plan: &ShardingPlan, parameters: &[Tensor]) -> Result<(), Error> {
    let ShardingGroups { gather, reduce, replicas, parts, experts } = groups;
    let refuse = |text: String| Err(Error::invalid_argument(text));
    if gather.global_ranks() != reduce.global_ranks() {
        return refuse(format!(
            "parameters are gathered by ranks {:?} and gradients reduced by ranks {:?}: give two groups of the same \
             ranks",
            gather.global_ranks(),
            reduce.global_ranks()
        ));
    }
    let copies = replicas.as_ref().map_or(1, ProcessGroup::size);
    if gather.size() != plan.shard_ranks() || gather.size() * copies != plan.divisor() {
        return refuse(format!(
            "the plan is for mesh {}, but {} ranks share a copy of the model and {copies} have the same rows: make the \
             groups of the plan's mesh",
            plan.mesh(),
            gather.size()
        ));
    }
    let has_experts = plan.parameters().any(|planned| planned.parameter.is_expert);
    let same = experts.as_ref().map_or(1, |it| it.same.size());
    let shards = experts.as_ref().and_then(|it| it.shards.as_ref());
    for (found, axis) in [
        (same, Axis::ExpertData),
        (shards.map_or(1, |it| it.gather.size()), Axis::ExpertShard),
        (shards.map_or(1, |it| it.reduce.size()), Axis::ExpertShard),
    ] {
        let planned = plan.mesh().size(axis);
        if has_experts && found != planned {
            return refuse(format!(
                "a group of the same experts has {found} ranks, and {planned} on the plan's mesh {}: make the group of \
                 its axis {axis}",
                plan.mesh(),
            ));
        }
    }
    let sharding = plan.sharding();
    if let (Reshard::To(size), false) =
        (sharding.reshard_after_forward, sharding.strategy.keeps_parameters_whole())
        && parts.as_ref().map(ProcessGroup::size) != Some(size)
    {
        return refuse(format!(
            "reshard_after_forward to {size} ranks needs a group of {size} neighbouring ranks, and {} were given",
            parts.as_ref().map_or(0, ProcessGroup::size)
        ));
    }
    let planned: HashMap<usize, &UnitParameter> =
        plan.parameters().map(|planned| (planned.index, planned)).collect();
    if planned.len() != parameters.len() {
        return refuse(format!(
            "the plan has {}, the model {}",
            counted(planned.len(), "parameter"),
            counted(parameters.len(), "parameter")
        ));
    }
    for (index, tensor) in parameters.iter().enumerate() {
        let Some(planned) = planned.get(&index) else { continue };
        let expected = &planned.parameter;
        let shape: Vec<u64> = tensor.size().iter().map(|size| size.unsigned_abs()).collect();
        let dtype = dtype_of(tensor.f_kind()?);
        if shape != expected.shape || dtype != Some(expected.dtype) {
            let found = dtype.map_or_else(|| "another type".into(), |dtype| dtype.to_string());
            return refuse(format!(
                "parameter {:?} is {found} {shape:?}, and {} {:?} in the plan: make the plan of the model as it is",
                expected.name(),
                expected.dtype,
                expected.shape
            ));
        }
    }
    Ok(())
}

impl fmt::Debug for Sharder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sharder")
            .field("groups", &self.groups)
            .field("plan", &self.plan.to_string())
            .finish_non_exhaustive()
    }
}
