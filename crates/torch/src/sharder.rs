//! The engine of sharded training: ZeRO's stages and PyTorch's FSDP2.

use std::fmt;

use cxx::UniquePtr;
use tch::{Kind, Tensor};

use crate::bridge::{borrow_all, ffi, own};
use crate::error::Error;
use crate::group::ProcessGroup;
use crate::parameters::NamedTensor;
use crate::tensor_tree::TensorTree;

/// How a [`Sharder`] keeps parameters and adds up gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SharderOptions {
    /// The type of whole parameters, in which the model computes. Defaults to that of the parameters.
    pub kind: Option<Kind>,
    /// The type in which gradients are sent and added up. Defaults to that of the whole parameters.
    pub reduce_kind: Option<Kind>,
    /// Keeps whole parameters between steps, so that only gradients and optimizer states are sharded (ZeRO-1 and -2).
    /// Defaults to false: whole parameters are there while their unit computes (ZeRO-3).
    pub whole_at_rest: bool,
}

/// The groups whose ranks share a model.
#[derive(Debug, Clone)]
pub struct ShardingGroups {
    /// Ranks among which each parameter's rows are spread; its messages are parameters.
    pub gather: ProcessGroup,
    /// The same ranks; its messages are gradients. A group of its own lets them go beside the parameters'.
    pub reduce: ProcessGroup,
    /// Ranks that have the same rows, where parameters are sharded within hosts and replicated between them.
    pub replicas: Option<ProcessGroup>,
}

/// Splits the parameters of a model into shards, one for each rank, and gathers them unit by unit while the model
/// computes (ZeRO, [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)).
///
/// A unit is a part of the model whose parameters are whole at the same time, such as a transformer's block. Each
/// parameter is split along its first dimension, in `ceil(rows / ranks)` rows for each rank; the last ranks may have
/// fewer rows or none. The model's own tensors stay and lose their memory between uses, where a read is an error that
/// names the unit. The optimizer has the shards, into whose gradients each backward adds the mean over the ranks.
///
/// The first unit is the root, whose part of the forward is the whole forward; the others run inside of it. Every rank
/// runs the same units in the same order.
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_torch::{NamedTensor, Sharder, SharderOptions, ShardingGroups, backward, gradient};
/// use tch::{Kind, Tensor};
///
/// let weight = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
/// let groups = ShardingGroups { gather: group.clone(), reduce: group.clone(), replicas: None };
/// let mut sharder = Sharder::new(groups, SharderOptions::default())?;
/// let parameters = [NamedTensor { name: "weight".to_owned(), tensor: weight.shallow_clone() }];
/// let shards = sharder.add_unit("", true, &parameters)?;
///
/// let loss = sharder.run(0, || Ok::<_, brigade_torch::Error>((&weight * &weight).sum(Kind::Double)))?;
/// backward(&loss)?;
/// assert_eq!(gradient(&shards[0].tensor)?.unwrap(), Tensor::from_slice(&[2.0, 4.0]));
/// assert!(weight.f_sum(Kind::Double).is_err(), "it is whole in its unit alone");
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct Sharder {
    handle: Handle,
    groups: ShardingGroups,
    options: SharderOptions,
    units: Vec<String>,
}

struct Handle(UniquePtr<ffi::Sharder>);

// SAFETY: a counted pointer (atomic count) to an engine that locks its own mutex in each of its functions: autograd
// calls it from other threads as well.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// What a [`Sharder`] holds and has done since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharderMeter {
    /// Bytes of whole parameters now.
    pub gathered_bytes: u64,
    /// The most bytes of whole parameters at once.
    pub peak_gathered_bytes: u64,
    /// The most bytes of gradients in reductions at once.
    pub peak_reduced_bytes: u64,
    /// The most units that were whole at once, the root among them.
    pub peak_whole_units: u64,
    /// Gathers of a unit.
    pub gathers: u64,
    /// Reductions of a unit's gradients.
    pub reductions: u64,
}

impl Sharder {
    /// Makes a sharder without units.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] when `gather` and `reduce` have other ranks.
    pub fn new(groups: ShardingGroups, options: SharderOptions) -> Result<Self, Error> {
        let ShardingGroups { gather, reduce, replicas } = &groups;
        if gather.global_ranks() != reduce.global_ranks() {
            return Err(Error::invalid_argument(format!(
                "parameters are gathered by ranks {:?} and gradients reduced by ranks {:?}: give two groups of the \
                 same ranks",
                gather.global_ranks(),
                reduce.global_ranks()
            )));
        }
        let replicated: Vec<_> =
            replicas.iter().map(|group| ffi::GroupRef { group: group.raw() }).collect();
        let ranks = gather.size() * replicas.as_ref().map_or(1, ProcessGroup::size);
        let raw = ffi::SharderOptions {
            kind: options.kind.map_or(-1, |kind| kind as i8),
            reduce_kind: options.reduce_kind.map_or(-1, |kind| kind as i8),
            whole_at_rest: options.whole_at_rest,
            divisor: ranks as i64,
        };
        let handle = ffi::new_sharder(gather.raw(), reduce.raw(), &replicated, &raw)
            .map_err(|error| Error::libtorch("Sharder::new", &error))?;
        Ok(Self { handle: Handle(handle), groups, options, units: Vec::new() })
    }

    /// Splits the parameters of one more unit, and returns this rank's shards under the same names: of a type and
    /// layout like the parameters, with fewer rows. A parameter without dimensions is whole on each rank.
    ///
    /// With `reshards` the parameters are given back after the unit's forward and gathered again in the backward; without,
    /// they stay in between. Each parameter is in one unit, and all are on one device.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`], above all when memory runs out.
    pub fn add_unit(
        &mut self,
        name: &str,
        reshards: bool,
        parameters: &[NamedTensor],
    ) -> Result<Vec<NamedTensor>, Error> {
        let names: Vec<String> = parameters.iter().map(|named| named.name.clone()).collect();
        let tensors: Vec<&Tensor> = parameters.iter().map(|named| &named.tensor).collect();
        let (regions, bytes) = self.lay_out(&tensors)?;
        let shards = ffi::sharder_add_unit(
            &self.handle.0,
            name,
            reshards,
            &borrow_all(&tensors),
            &names,
            &regions,
            bytes,
        )
        .map_err(|error| Error::libtorch("Sharder::add_unit", &error))?;
        self.units.push(name.to_owned());
        let shards = shards.iter().map(|shard| own(ffi::copy_handle(shard)));
        Ok(names
            .into_iter()
            .zip(shards)
            .map(|(name, tensor)| NamedTensor { name, tensor })
            .collect())
    }

    /// Places parameters one behind the other in the memory of their unit, each with room for all ranks' rows.
    fn lay_out(&self, parameters: &[&Tensor]) -> Result<(Vec<ffi::ShardedRegion>, usize), Error> {
        /// As libtorch aligns memory of its own, for vector instructions.
        const ALIGNMENT: usize = 64;
        let ranks = self.groups.gather.size();
        let mut bytes = 0;
        let mut regions = Vec::with_capacity(parameters.len());
        for parameter in parameters {
            let kind = parameter.f_kind()?;
            let kind = self.options.kind.filter(|_| is_float(kind)).unwrap_or(kind);
            let size = parameter.size();
            let (count, rows) = match size.first() {
                Some(&first) if first > 0 => {
                    let rows = first.unsigned_abs().div_ceil(ranks as u64) as usize;
                    (parameter.numel() / first as usize * rows * ranks, rows)
                }
                _ => (parameter.numel(), 0),
            };
            let width = kind.elt_size_in_bytes();
            regions.push(ffi::ShardedRegion { offset: (bytes / width) as i64, rows: rows as i64 });
            bytes = (bytes + count * width).next_multiple_of(ALIGNMENT);
        }
        Ok((regions, bytes))
    }

    /// Runs a unit's part of the forward, with its parameters whole. Units run inside of the root.
    ///
    /// # Errors
    /// Those of `forward`; [`crate::TorchError::Libtorch`] with the unit's name when a gather fails: a peer is gone, or
    /// memory runs out. After an error, and after a panic, the next forward begins anew.
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

    /// Tells whether the next backwards reduce gradients. Without, whole gradients add up on each rank, and the next
    /// backward that reduces brings their sum (PyTorch's `set_requires_gradient_sync`). Defaults to true.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`].
    pub fn set_sync(&self, sync: bool) -> Result<(), Error> {
        ffi::sharder_set_sync(&self.handle.0, sync)
            .map_err(|error| Error::libtorch("Sharder::set_sync", &error))
    }

    /// Tells that the shards have changed: the optimizer has stepped, or weights were loaded into them. Parameters that are
    /// whole at rest are gathered anew, which the next forward waits for unit by unit.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when a gather cannot be started.
    pub fn shards_changed(&self) -> Result<(), Error> {
        ffi::sharder_shards_changed(&self.handle.0)
            .map_err(|error| Error::libtorch("Sharder::shards_changed", &error))
    }

    /// Looks anew at which parameters require a gradient.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] for a parameter that can have no gradient.
    pub fn update_trained(&self) -> Result<(), Error> {
        ffi::sharder_update_trained(&self.handle.0)
            .map_err(|error| Error::libtorch("Sharder::update_trained", &error))
    }

    /// Runs `read` with all parameters whole, on every rank.
    ///
    /// # Errors
    /// Those of `read`; [`crate::ErrorKind::InvalidArgument`] inside of another scope; [`crate::TorchError::Libtorch`]
    /// when a gather fails.
    pub fn gathered<T, E: From<Error>>(&self, read: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.with_whole(false, read)
    }

    /// Runs `write` with all parameters whole, on every rank, and takes this rank's rows over into its shards.
    ///
    /// # Errors
    /// As [`Sharder::gathered`]; after an error of `write` the shards are as before.
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
        ffi::sharder_hold_all(&self.handle.0)
            .map_err(|error| Error::libtorch("gathering the parameters", &error))?;
        let mut held = Held { sharder: self, write: false };
        let value = body()?;
        held.write = write;
        drop(held);
        Ok(value)
    }

    /// Returns what is whole now, and what was done so far.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`].
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

    /// Returns the names of the units, in the order in which they were added.
    #[must_use]
    pub fn units(&self) -> &[String] {
        &self.units
    }

    /// Returns the groups that it was made with.
    #[must_use]
    pub fn groups(&self) -> &ShardingGroups {
        &self.groups
    }
}

/// A forward that has not come to its end.
struct Unfinished<'a>(&'a Sharder);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        ffi::sharder_reset(&self.0.handle.0);
    }
}

/// The scope in which all parameters are whole.
struct Held<'a> {
    sharder: &'a Sharder,
    write: bool,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // It copies within memory and gives memory back.
        let _ = ffi::sharder_release_all(&self.sharder.handle.0, self.write);
    }
}

fn is_float(kind: Kind) -> bool {
    matches!(kind, Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16)
}

impl fmt::Debug for Sharder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sharder")
            .field("groups", &self.groups)
            .field("options", &self.options)
            .field("units", &self.units)
            .finish_non_exhaustive()
    }
}
