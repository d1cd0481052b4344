//! Memory of a rank during training.

use serde::Serialize;

use crate::plan::UnitParameter;
use crate::{
    Axis, MixedPrecision, Offload, Parameter, ReduceGradients, Reshard, ShardingPlan, Strategy,
    Unit,
};

/// Memory by kind, in bytes, on the device of the rank that needs the most.
///
/// With `N` parameters in float32, Adam, and `W` ranks: `16 N` replicated, `8 N + 8 N / W` with ZeRO-1, `4 N + 12 N /
/// W` with ZeRO-2, and `16 N / W` plus the gathered units with ZeRO-3.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Memory {
    /// Parameters between steps: shards, or whole parameters plus the shards that the optimizer updates.
    pub parameters: u64,
    /// Gradients that are kept after a backward pass.
    pub gradients: u64,
    /// Optimizer states of the parameters.
    pub optimizer: u64,
    /// Whole parameters during a batch: two units, plus those that are not freed after the forward pass.
    pub gathered: u64,
    /// Whole gradients during a backward pass: of the unit that it computes, of the unit that is summed, with this
    /// rank's rows of the sum, and of the root. With offload also the rows that are copied to the host's memory, and
    /// with replicas all rows, which wait on the device until the replicas have summed them.
    pub reduce: u64,
    /// Buffers of the model.
    pub buffers: u64,
    /// Activations that a forward pass keeps for its backward pass.
    pub activations: u64,
    /// Outputs of the model for its loss, and their gradient.
    pub logits: u64,
    /// Bytes in the host's memory: offloaded shards of parameters, gradients and optimizer states.
    pub offloaded: u64,
}

/// Quantities beside the plan that determine memory: optimizer states, buffers, activations and outputs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Workload {
    /// Number of values that the optimizer keeps for each element of a parameter: 2 for Adam, 1 for SGD with momentum.
    pub states: u64,
    /// Bytes of the model's buffers.
    pub buffers: u64,
    /// Bytes of the activations that a forward pass keeps for its backward pass.
    pub activations: u64,
    /// Bytes of the model's outputs, and of their gradient.
    pub logits: u64,
}

/// Bytes of a unit's gradients on the way to their shards, besides those that are kept.
#[derive(Debug, Clone, Copy, Default)]
struct GradientBytes {
    /// Gradients as autograd makes them.
    made: u64,
    /// Copies of them for the reduction, with padding and in its type.
    copied: u64,
    /// This rank's rows of the sum.
    rows: u64,
    /// What is there until the reduction is done: its input and `rows`.
    in_flight: u64,
    /// Rows in the type of the shards, until they are in the host's memory.
    leaving: u64,
    /// The part of `leaving` that is a copy of `rows`, in another type.
    cast: u64,
}

impl Memory {
    /// Returns the memory of a rank without sharding (DDP). With a type for computation, parameters are cast under
    /// autocast, which keeps the copies until the forward pass is done.
    #[must_use]
    pub fn replicated(parameters: &[Parameter], mixed: MixedPrecision, workload: Workload) -> Self {
        let mut memory = Self::of_workload(workload);
        for parameter in parameters {
            let sizes = parameter.shape.iter();
            let elements = sizes.fold(1, |all: u64, size| all.saturating_mul(*size));
            let bytes = |bytes: u64| elements.saturating_mul(bytes);
            let (own, compute) = (parameter.dtype, parameter.compute_dtype(&mixed));
            let add = |sum: &mut u64, bytes| *sum = sum.saturating_add(bytes);
            add(&mut memory.parameters, bytes(own.bytes()));
            if compute != own {
                add(&mut memory.gathered, bytes(compute.bytes()));
            }
            if parameter.trained {
                add(&mut memory.gradients, bytes(own.bytes()));
                add(&mut memory.optimizer, bytes(own.bytes()).saturating_mul(workload.states));
            }
        }
        memory
    }

    /// Returns the total bytes on the device, without `offloaded`.
    #[must_use]
    pub fn total(&self) -> u64 {
        let kinds = [
            self.parameters,
            self.gradients,
            self.optimizer,
            self.gathered,
            self.reduce,
            self.buffers,
            self.activations,
            self.logits,
        ];
        kinds.into_iter().fold(0, u64::saturating_add)
    }

    fn of_workload(workload: Workload) -> Self {
        let Workload { buffers, activations, logits, .. } = workload;
        Self { buffers, activations, logits, ..Self::default() }
    }
}

impl ShardingPlan {
    /// Returns the memory of the first rank, which needs the most.
    ///
    /// ```
    /// use brigade_checkpoint::Dtype;
    /// use brigade_sharding::{Parameter, Sharding, ShardingPlan, Workload};
    ///
    /// let parameters = [
    ///     Parameter::new("h.0.weight", &[64, 10], Dtype::F32).in_unit("h.0"),
    ///     Parameter::new("h.1.weight", &[64, 10], Dtype::F32).in_unit("h.1"),
    /// ];
    /// let plan = ShardingPlan::new(&parameters, &Sharding::zero3(), &Sharding::zero3().mesh(4)?)?;
    /// let memory = plan.memory(Workload { states: 2, ..Workload::default() });
    /// assert_eq!(memory.parameters + memory.gradients + memory.optimizer, 16 * 1280 / 4);
    /// assert_eq!(memory.gathered, 4 * 1280);
    /// # Ok::<(), brigade_sharding::ShardingError>(())
    /// ```
    #[must_use]
    pub fn memory(&self, workload: Workload) -> Memory {
        let is_whole = self.sharding().strategy.keeps_parameters_whole();
        let storages = || self.units().iter().map(Unit::storage_bytes);
        let shards = self.sum(|it| own_bytes(it) * chunk(it));
        // A rank's rows of a whole parameter are its shard, unless the optimizer updates another type.
        let other_type = |it: &UnitParameter| it.compute_dtype != it.parameter.dtype;
        let masters = self.sum(|it| if other_type(it) { own_bytes(it) * chunk(it) } else { 0 });
        // Experts with memory of their own take no place in the storage.
        let kept = |it: &UnitParameter| it.slot.keeps_memory;
        let experts = self.sum(|it| if kept(it) { own_bytes(it) * chunk(it) } else { 0 });
        let optimizer = self.sum_trained(|it| own_bytes(it) * chunk(it)) * workload.states;
        let whole = if is_whole { storages().sum() } else { 0 };
        // Offloaded shards always have memory of their own.
        let is_on_device = self.sharding().offload == Offload::None;
        let shards = if is_whole && is_on_device { masters + experts } else { shards };
        let (whole_gradients, gradients) = self.gradients();
        let memory = Memory {
            parameters: whole,
            gradients: whole_gradients,
            gathered: if is_whole { 0 } else { self.gathered() },
            reduce: self.whole_gradients() + self.waiting_gradients(),
            ..Memory::of_workload(workload)
        };
        match self.sharding().offload {
            Offload::Cpu { .. } => Memory { offloaded: shards + gradients + optimizer, ..memory },
            Offload::None => Memory {
                parameters: whole + shards,
                gradients: whole_gradients + gradients,
                optimizer,
                ..memory
            },
        }
    }

    /// Returns the bytes of gradients that are kept: whole ones, and a rank's own rows.
    fn gradients(&self) -> (u64, u64) {
        let own = |it: &UnitParameter| own_bytes(it) * chunk(it);
        if !self.keeps_whole_gradients() {
            return (0, self.sum_trained(own));
        }
        // ZeRO-1 reduces a rank's rows in place, if they have the type that the optimizer updates.
        let in_place = |it: &UnitParameter| {
            self.sharding().strategy == Strategy::Zero1 && it.reduce_dtype == it.parameter.dtype
        };
        let whole = self.sum_trained(|it| it.reduce_dtype.bytes() * it.slot.elements());
        (whole, self.sum_trained(|it| if in_place(it) { 0 } else { own(it) }))
    }

    /// Returns the bytes of whole parameters during a batch.
    fn gathered(&self) -> u64 {
        let mut freed = [0; 2];
        let mut kept = 0;
        for (place, unit) in self.units().iter().enumerate() {
            let bytes = unit.storage_bytes();
            // The unit that runs last stays whole for its backward pass, before which the others are freed.
            let is_last = place + 1 == self.units().len() && !unit.is_root();
            let reshard = match self.sharding().reshard_after_forward {
                Reshard::Yes | Reshard::To(_) if is_last => Reshard::Yes,
                _ => unit.reshard,
            };
            match reshard {
                Reshard::No => kept += bytes,
                // Experts are not kept in parts.
                Reshard::To(size) => {
                    let shared = unit.parameters.iter().filter(|it| !it.parameter.is_expert);
                    kept += shared.map(|it| it.slot.bytes()).sum::<u64>() / size as u64;
                }
                Reshard::Yes => {}
            }
            if reshard != Reshard::No {
                freed = if bytes > freed[0] {
                    [bytes, freed[0]]
                } else {
                    [freed[0], freed[1].max(bytes)]
                };
            }
        }
        kept + freed[0] + freed[1]
    }

    /// Returns the bytes of whole gradients that a backward pass has at once, besides those that are kept.
    fn whole_gradients(&self) -> u64 {
        let bytes: Vec<_> = self.units().iter().map(|unit| self.gradient_bytes(unit)).collect();
        // The root's layers run before the other units and after them.
        let root = self.units().first().filter(|unit| unit.is_root()).map_or(0, |_| bytes[0].made);
        let later = |place: usize| bytes.get(place).copied().unwrap_or_default();
        let at_once = |(place, unit): (usize, &GradientBytes)| {
            let (next, last) = (later(place + 1), later(place + 2));
            let root = if self.units()[place].is_root() { 0 } else { root };
            let computed = next.in_flight + next.cast + last.leaving;
            let copied = unit.copied + unit.rows + next.leaving;
            root + unit.made + computed.max(copied)
        };
        bytes.iter().enumerate().map(at_once).max().unwrap_or(0)
    }

    /// Returns the bytes of the rows that wait for the sum over the replicas at the end of an accumulation window,
    /// without those of the gradients that they become on the same device.
    fn waiting_gradients(&self) -> u64 {
        if !self.has_replicas() {
            return 0;
        }
        let is_on_device = self.sharding().offload == Offload::None;
        self.sum_trained(|it| {
            // Experts that a rank has whole are summed over all replicas at once.
            if it.parameter.is_expert && it.slot.is_whole {
                return 0;
            }
            let gradient = if is_on_device { own_bytes(it) } else { 0 };
            it.reduce_dtype.bytes().saturating_sub(gradient) * chunk(it)
        })
    }

    fn has_replicas(&self) -> bool {
        self.mesh().size(Axis::Replicate) > 1
    }

    fn gradient_bytes(&self, unit: &Unit) -> GradientBytes {
        let accumulated = self.keeps_whole_gradients();
        // With replicas, rows leave after the backward pass.
        let leaves = self.sharding().offload != Offload::None && !self.has_replicas();
        let mut bytes = GradientBytes::default();
        for it in unit.trained() {
            let is_cast = it.reduce_dtype != it.compute_dtype;
            let is_uneven = it.slot.padded_elements() != it.slot.elements();
            let made = it.compute_dtype.bytes() * it.slot.elements();
            let made = if accumulated && !is_cast { 0 } else { made };
            let is_copied = is_uneven || (is_cast && !accumulated);
            let input = it.reduce_dtype.bytes() * it.slot.padded_elements();
            let copied = if is_copied { input } else { 0 };
            let rows = it.reduce_dtype.bytes() * chunk(it);
            // A single rank's rows, and what each rank has whole, are summed in place.
            let rows = if it.slot.ranks == 1 || it.slot.is_whole { 0 } else { rows };
            bytes.made += made;
            bytes.copied += copied;
            bytes.rows += rows;
            bytes.in_flight += rows
                + if is_copied {
                    input
                } else if accumulated {
                    0
                } else {
                    made
                };
            if leaves {
                let own = own_bytes(it) * chunk(it);
                bytes.leaving += own;
                bytes.cast += if it.reduce_dtype == it.parameter.dtype { 0 } else { own };
            }
        }
        bytes
    }

    /// Returns `true` if whole gradients are kept until the accumulation window ends.
    fn keeps_whole_gradients(&self) -> bool {
        self.sharding().strategy == Strategy::Zero1
            || self.sharding().reduce == ReduceGradients::Window
    }

    fn sum(&self, bytes: impl Fn(&UnitParameter) -> u64) -> u64 {
        self.parameters().map(bytes).sum()
    }

    fn sum_trained(&self, bytes: impl Fn(&UnitParameter) -> u64) -> u64 {
        self.sum(|it| if it.parameter.trained { bytes(it) } else { 0 })
    }
}

fn own_bytes(parameter: &UnitParameter) -> u64 {
    parameter.parameter.dtype.bytes()
}

fn chunk(parameter: &UnitParameter) -> u64 {
    parameter.slot.chunk_elements()
}
