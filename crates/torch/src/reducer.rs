//! The gradient reducer of DistributedDataParallel.
//!
//! One iteration: [`Reducer::before_forward`], the model's forward, [`Reducer::after_forward`] on its
//! outputs, then `backward`, in which libtorch averages the gradients bucket by bucket while it still
//! computes others.
//!
//! # Protocol
//!
//! Ranks that do not use this crate (a Python script with PyTorch's own reducer) can take part. [`Reducer::new`] sends,
//! in this order:
//! 1. an all-gather of two int64: the number of lines of the listing, and the first 8 bytes, big-endian, of
//!    the SHA-256 of the listing in UTF-8. The listing has one line per parameter in the order of
//!    registration, then one per buffer, joined with `\n` (none at the end): the word `parameter` or
//!    `buffer`, the name, the shape as Python prints a list (`[32, 1, 5, 5]`, `[]` for a scalar),
//!    PyTorch's type without `torch.` (`float32`) and, for a parameter whose strides are those of
//!    `torch.channels_last`, `channels_last`, with single spaces between them: buckets are in the order of
//!    memory;
//! 2. if the pairs differ, an all-gather of the listing as an object (a MessagePack list of strings: lengths
//!    as int64 first, then uint8 padded to the longest), and every rank ends with the same error;
//! 3. a broadcast from rank 0 of the parameters, then the buffers, by c10d's `broadcast_coalesced` with
//!    messages of 250 MiB.
//!
//! From then on it is c10d's own reducer: a broadcast of the buffers before each forward (if there are any
//! and the last forward was a synchronised one), the buckets, and once, after the first backward, the
//! broadcast of rank 0's bucket order.

mod join;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::time::Instant;

use cxx::UniquePtr;
use sha2::{Digest, Sha256};
use tch::Tensor;

use crate::autograd::grad_enabled;
use crate::bridge::{borrow_all, ffi, own};
use crate::dtype::type_name;
use crate::error::{Error, Fault, Thrown, TorchError};
use crate::group::{ProcessGroup, Started};
use crate::memory::elements;
use crate::memory_format::is_channels_last;
use crate::tensor_tree::TensorTree;
use join::Join;

pub use join::{JoinOptions, Shadowed};

/// Maximum size in bytes of a message when a model or its buffers are broadcast, as in PyTorch's
/// DistributedDataParallel: a rank in Python must send messages of the same sizes.
pub const BROADCAST_BYTES: usize = 250 << 20;

/// Options of a gradient reducer.
#[derive(Debug, Clone)]
pub struct ReducerOptions {
    /// Minimum size of a full bucket in bytes. Defaults to 25 MiB.
    pub bucket_bytes: usize,
    /// Minimum size of the first bucket in bytes, which should start early. Defaults to 1 MiB.
    pub first_bucket_bytes: usize,
    /// `true` if the graph is searched in every iteration for parameters that were not used. Defaults to `false`.
    pub find_unused_parameters: bool,
    /// `true` if gradients are views into the buckets, which saves a copy and memory of the model's size. Defaults to
    /// `true`.
    pub gradient_as_bucket_view: bool,
    /// `true` if the graph is the same in every iteration, so that unused parameters are detected only in the first.
    /// Defaults to `false`.
    pub static_graph: bool,
    /// `true` if the buffers are replaced by rank 0's before each forward. Defaults to `true`.
    pub broadcast_buffers: bool,
}

impl Default for ReducerOptions {
    /// PyTorch's defaults, except that gradients are views.
    fn default() -> Self {
        Self {
            bucket_bytes: 25 << 20,
            first_bucket_bytes: 1 << 20,
            find_unused_parameters: false,
            gradient_as_bucket_view: true,
            static_graph: false,
            broadcast_buffers: true,
        }
    }
}

/// Averages the gradients of one model over the ranks of a group, during `backward`.
///
/// ```
/// # use brigade_torch::{Backend, ProcessGroup, Store};
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// use brigade_torch::{Reducer, ReducerOptions, gradient};
/// use tch::{Kind, Tensor};
///
/// let weight = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
/// let parameters = [("weight".to_owned(), weight)];
/// let reducer = Reducer::new(group, &parameters, &[], ReducerOptions::default())?;
///
/// reducer.before_forward(true)?;
/// let output = &parameters[0].1 * (group.rank() as f64); // the model, on this rank's part of a batch
/// let output = reducer.after_forward(output, true)?;
/// let loss = output.sum(Kind::Double);
/// group.backward(&loss)?;
///
/// let mean = gradient(&parameters[0].1)?.expect("backward has reached it");
/// assert_eq!(mean.double_value(&[0]), (group.size() - 1) as f64 / 2.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct Reducer {
    handle: Handle,
    group: ProcessGroup,
    /// Names of the parameters, by their numbers in libtorch.
    names: Vec<String>,
    buffers: Vec<Tensor>,
    options: ReducerOptions,
    /// `false` after a forward whose gradients are not reduced. The buffers are not broadcast then.
    forward_sync: Cell<bool>,
    reduction_delayed: Cell<bool>,
    /// The parameters, without their history.
    parameters: Vec<Tensor>,
    join: RefCell<Option<Join>>,
}

struct Handle(UniquePtr<ffi::Reducer>);

// SAFETY: a counted pointer to a c10d::Reducer, which locks its own mutex: autograd calls it from other
// threads as well.
unsafe impl Send for Handle {}

impl Reducer {
    /// Creates a reducer: compares the models of all ranks, copies rank 0's parameters and buffers, and installs hooks
    /// on the parameters' gradients. Every rank of the group calls it.
    ///
    /// `parameters` are all parameters that are trained, each once, in the order of registration, by name; `buffers`
    /// are the tensors that are not trained.
    ///
    /// # Errors
    /// [`crate::TorchError::ModelsDiffer`] on every rank, with the first parameter or buffer that differs;
    /// [`crate::ErrorKind::InvalidArgument`] if there are no parameters; [`crate::TorchError::Collective`] if the
    /// communication fails.
    #[track_caller]
    pub fn new(
        group: &ProcessGroup,
        parameters: &[(String, Tensor)],
        buffers: &[(String, Tensor)],
        options: ReducerOptions,
    ) -> Result<Self, Error> {
        if parameters.is_empty() {
            return Err(Error::invalid_argument(
                "a reducer needs a parameter that is trained; a model without one needs no reducer",
            ));
        }
        same_model(group, parameters, buffers)?;
        let state: Vec<&Tensor> =
            parameters.iter().chain(buffers).map(|(_, tensor)| tensor).collect();
        let detached =
            state.iter().map(|tensor| tensor.f_detach()).collect::<Result<Vec<_>, _>>()?;
        group.broadcast_coalesced(&detached.iter().collect::<Vec<_>>(), BROADCAST_BYTES, 0)?;

        let names: Vec<String> = parameters.iter().map(|(name, _)| name.clone()).collect();
        let tensors: Vec<&Tensor> = parameters.iter().map(|(_, tensor)| tensor).collect();
        let ReducerOptions {
            bucket_bytes,
            first_bucket_bytes,
            find_unused_parameters,
            gradient_as_bucket_view,
            static_graph,
            ..
        } = options;
        let raw = ffi::ReducerOptions {
            bucket_bytes,
            first_bucket_bytes,
            find_unused_parameters,
            gradient_as_bucket_view,
            static_graph,
        };
        let handle = ffi::new_reducer(group.raw(), &borrow_all(&tensors), &names, &raw)
            .map_err(|error| Error::libtorch("making the reducer", &error))?;
        Ok(Self {
            handle: Handle(handle),
            group: group.clone(),
            names,
            buffers: buffers.iter().map(|(_, tensor)| tensor.shallow_clone()).collect(),
            options,
            forward_sync: Cell::new(true),
            reduction_delayed: Cell::new(false),
            parameters: detached.into_iter().take(parameters.len()).collect(),
            join: RefCell::new(None),
        })
    }

    /// Prepares an iteration, before the model's forward. `sync` sets whether its gradients are reduced: `false` is
    /// PyTorch's `no_sync`, and must be the same for the forward and its backward.
    ///
    /// # Errors
    /// [`crate::TorchError::Collective`] if a peer was lost; [`crate::TorchError::Libtorch`] with PyTorch's explanation
    /// when the last backward did not reach every parameter.
    #[track_caller]
    pub fn before_forward(&self, sync: bool) -> Result<(), Error> {
        let begun = Instant::now();
        let failed = |error: cxx::Exception| {
            let thrown = Thrown::read(&error);
            match thrown.fault() {
                Fault::Invalid => self.unfinished(thrown.detail),
                _ => {
                    self.group.failure(Started::unnumbered("before_forward"), begun, &error).into()
                }
            }
        };
        let mut authority = 0;
        if self.is_joining() {
            // Ranks without data do not take part in this rank's evaluations.
            if !grad_enabled() {
                return Ok(());
            }
            authority = self.answer_roll(sync)?;
        } else if sync && grad_enabled() {
            self.group.check_forward()?;
        }
        if grad_enabled() {
            if sync {
                ffi::reducer_prepare_for_forward(&self.handle.0).map_err(failed)?;
            }
            // Done once, after the first backward with a reduction: buckets are rebuilt in the order in which gradients
            // were computed. Rank 0's order is sent to all ranks, so this is a collective, in the same place as
            // PyTorch's.
            ffi::reducer_rebuild_buckets(&self.handle.0).map_err(failed)?;
        }
        self.send_buffers(authority)
    }

    /// Replaces the buffers by those of another rank, if that is due.
    #[track_caller]
    pub(crate) fn send_buffers(&self, from: usize) -> Result<(), Error> {
        if self.forward_sync.get() && self.options.broadcast_buffers && !self.buffers.is_empty() {
            let buffers: Vec<&Tensor> = self.buffers.iter().collect();
            let group = if self.is_joining() { &self.group.unchecked() } else { &self.group };
            group.broadcast_coalesced(&buffers, BROADCAST_BYTES, from)?;
        }
        Ok(())
    }

    /// Replaces parameters and buffers by those of another rank.
    pub(crate) fn broadcast_state(&self, from: usize) -> Result<(), Error> {
        let state: Vec<&Tensor> = self.parameters.iter().chain(&self.buffers).collect();
        self.group.unchecked().broadcast_coalesced(&state, BROADCAST_BYTES, from)
    }

    /// Prepares the backward, after the model's forward, with its outputs. Returns the outputs to continue with.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if libtorch fails.
    pub fn after_forward<T>(&self, outputs: T, sync: bool) -> Result<T, Error>
    where
        T: TensorTree<Owned = T>,
    {
        if self.is_joining() && !grad_enabled() {
            return Ok(outputs);
        }
        // A forward without gradients counts as one without synchronisation, as in PyTorch.
        let sync = sync && grad_enabled();
        self.forward_sync.set(sync);
        if !sync {
            return Ok(outputs);
        }
        let failed = |error: cxx::Exception| Error::libtorch("prepare_for_backward", &error);
        let ReducerOptions { find_unused_parameters, static_graph, .. } = self.options;
        let search = find_unused_parameters && !static_graph;
        let delay = static_graph && !self.reduction_delayed.get();
        let mut leaves = Vec::new();
        if search {
            outputs.visit(&mut |tensor| leaves.push(tensor));
        }
        ffi::reducer_prepare_for_backward(&self.handle.0, &borrow_all(&leaves)).map_err(failed)?;
        let refuse = find_unused_parameters || static_graph || self.is_joining();
        let watch = |outputs: &T| {
            let mut watched = Vec::new();
            outputs.visit(&mut |tensor| {
                if tensor.requires_grad() {
                    watched.push(tensor);
                }
            });
            ffi::reducer_watch(&self.handle.0, &borrow_all(&watched), refuse).map_err(failed)
        };
        if !(search || delay) {
            watch(&outputs)?;
            return Ok(outputs);
        }
        self.reduction_delayed.set(true);
        let mut differentiable = Vec::new();
        outputs.visit(&mut |tensor| {
            if tensor.requires_grad() {
                differentiable.push(tensor);
            }
        });
        let sunk = ffi::reducer_sink(&self.handle.0, &borrow_all(&differentiable), delay)
            .map_err(failed)?;
        let mut sunk = sunk.iter().map(|sunk| own(ffi::copy_handle(sunk)));
        let outputs = outputs.try_map(&mut |tensor| {
            if tensor.requires_grad() {
                sunk.next().ok_or_else(|| Error::invalid_argument("TensorTree::try_map visited more tensors than TensorTree::visit of the same outputs"))
            } else {
                Ok(tensor.shallow_clone())
            }
        })?;
        watch(&outputs)?;
        Ok(outputs)
    }

    /// Returns the size of each bucket in bytes, in the order in which they are reduced.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if libtorch fails.
    pub fn bucket_bytes(&self) -> Result<Vec<usize>, Error> {
        ffi::reducer_bucket_bytes(&self.handle.0)
            .map_err(|error| Error::libtorch("bucket_bytes", &error))
    }

    /// Converts libtorch's error that the last backward did not reach every parameter. It contains only numbers of
    /// parameters, and advice for Python; this one contains their names.
    fn unfinished(&self, detail: String) -> Error {
        let numbers = detail
            .split_once("did not receive grad for rank")
            .and_then(|(_, rest)| rest.split_once(':'))
            .map_or("", |(_, rest)| rest.lines().next().unwrap_or(""));
        let unused: Vec<&str> = numbers
            .split_whitespace()
            .filter_map(|number| number.parse::<usize>().ok())
            .filter_map(|number| self.names.get(number).map(String::as_str))
            .collect();
        let detail = if unused.is_empty() {
            detail
        } else {
            format!(
                "the last backward pass reached no gradient of {} on rank {}; use every parameter in \
                 the loss, or set find_unused_parameters; message of libtorch: {detail}",
                unused.join(", "),
                self.group.rank(),
            )
        };
        TorchError::Libtorch { operation: "before_forward", fault: Fault::Invalid, detail }.into()
    }

    pub(crate) fn raw(&self) -> &ffi::Reducer {
        &self.handle.0
    }

    /// Returns the group over whose ranks gradients are averaged.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the options of the reducer.
    #[must_use]
    pub fn options(&self) -> &ReducerOptions {
        &self.options
    }
}

impl fmt::Debug for Reducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reducer")
            .field("group", &self.group)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// Compares names, shapes and types across ranks: first their fingerprints, in one small message, and only if those
/// differ, the lists themselves, to find the first difference.
#[track_caller]
fn same_model(
    group: &ProcessGroup,
    parameters: &[(String, Tensor)],
    buffers: &[(String, Tensor)],
) -> Result<(), Error> {
    let listing = listing(parameters, buffers)?;
    let mine = Tensor::from_slice(&fingerprint(&listing)).f_to_device(group.device())?;
    let all = group.all_gather(&mine)?;
    let mut different = false;
    for other in &all {
        let other = other.f_to_device(tch::Device::Cpu)?;
        let mine = mine.f_to_device(tch::Device::Cpu)?;
        different |= elements::<i64>(&other)?.to_vec() != elements::<i64>(&mine)?.to_vec();
    }
    // Each rank compares all fingerprints, so all ranks get the same result, also when only one rank differs.
    if !different {
        return Ok(());
    }
    let lists: Vec<Vec<String>> = group.all_gather_object(&listing)?;
    let first = &lists[0];
    for (rank, list) in lists.iter().enumerate().skip(1) {
        let lines = first.len().max(list.len());
        if let Some(line) = (0..lines).find(|&line| first.get(line) != list.get(line)) {
            let describe = |list: &[String]| {
                list.get(line).cloned().unwrap_or_else(|| format!("only {line} tensors"))
            };
            return Err(TorchError::ModelsDiffer {
                rank,
                expected: describe(first),
                found: describe(list),
            }
            .into());
        }
    }
    Ok(())
}

/// Lists the tensors, one line each: `parameter module1.0.weight [32, 1, 5, 5] float32`, `buffer steps [] int64`.
fn listing(
    parameters: &[(String, Tensor)],
    buffers: &[(String, Tensor)],
) -> Result<Vec<String>, Error> {
    let line = |what: &str, (name, tensor): &(String, Tensor)| -> Result<String, Error> {
        let format = if is_channels_last(tensor)? { " channels_last" } else { "" };
        Ok(format!("{what} {name} {:?} {}{format}", tensor.size(), type_name(tensor.f_kind()?)))
    };
    parameters
        .iter()
        .map(|p| line("parameter", p))
        .chain(buffers.iter().map(|b| line("buffer", b)))
        .collect()
}

/// Returns the number of tensors and a hash of the listing.
fn fingerprint(listing: &[String]) -> [i64; 2] {
    let digest = Sha256::digest(listing.join("\n"));
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    [listing.len() as i64, i64::from_be_bytes(first)]
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn a_program_in_another_language_gets_the_same_fingerprint() {
        let named = |name: &str, shape: &[i64], kind| {
            (name.to_owned(), Tensor::zeros(shape, (kind, Device::Cpu)))
        };
        let lines = listing(
            &[named("module1.0.weight", &[32, 1, 5, 5], Kind::Float)],
            &[named("module1.1.num_batches_tracked", &[], Kind::Int64)],
        )
        .unwrap();
        assert_eq!(
            lines.join("\n"),
            "parameter module1.0.weight [32, 1, 5, 5] float32\n\
             buffer module1.1.num_batches_tracked [] int64"
        );
        // Computed with Python: int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        assert_eq!(fingerprint(&lines), [2, 1_784_536_537_014_502_568]);
    }
}
