//! Messages of a sharding plan: the collectives of a training step.

use std::fmt;

use crate::{Axis, ReduceGradients, Reshard, ShardingPlan, Strategy, Unit, UnitParameter};

/// Collective operation of one unit in a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Message {
    /// Part of the step in which the message is sent.
    pub phase: Phase,
    /// Kind of the collective operation.
    pub operation: Operation,
    /// Index of the unit in [`ShardingPlan::units`].
    pub unit: usize,
    /// Group of the ranks that take part.
    pub peers: Peers,
    /// Number of ranks that take part.
    pub ranks: u64,
    /// Number of elements of the whole, with padding: the output of an all-gather, the input of a reduce-scatter or an
    /// all-reduce.
    pub elements: u64,
    /// Bytes of the whole, with padding.
    pub bytes: u64,
}

/// Part of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The forward pass of a batch.
    Forward,
    /// The backward pass of a batch.
    Backward,
    /// After the optimizer's step: parameters that are whole between steps are gathered.
    Step,
}

/// Kind of a collective operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Each rank gets the parts of all ranks.
    AllGather,
    /// Each rank gets its part of the sum over all ranks.
    ReduceScatter,
    /// Each rank gets the whole sum over all ranks.
    AllReduce,
}

/// Group of ranks that take part in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Peers {
    /// All ranks of a group along this axis of the mesh.
    Axis(Axis),
    /// This number of neighbouring ranks among those that share one copy of the parameters, as in
    /// [`Mesh::parts`](crate::Mesh::parts).
    Part(usize),
}

impl Message {
    /// Returns the number of elements that a rank sends in a ring of `n` ranks: `n - 1` parts for an all-gather or a
    /// reduce-scatter, and twice as many for an all-reduce.
    #[must_use]
    pub fn sent_elements(&self) -> u64 {
        self.sent(self.elements)
    }

    /// Returns the number of bytes that a rank sends in a ring.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.sent(self.bytes)
    }

    fn sent(&self, whole: u64) -> u64 {
        let once = (self.ranks - 1) * whole.div_ceil(self.ranks);
        if self.operation == Operation::AllReduce { 2 * once } else { once }
    }
}

impl ShardingPlan {
    /// Returns the messages of one optimizer step with `micro_batches` batches, in the order in which all ranks start
    /// them. Each unit is assumed to run once in a forward pass: one that runs several times is gathered each time.
    ///
    /// ```
    /// use brigade_checkpoint::Dtype;
    /// use brigade_sharding::{Parameter, Sharding, ShardingPlan};
    ///
    /// let parameters = [
    ///     Parameter::new("h.0.weight", &[8, 8], Dtype::F32).in_unit("h.0"),
    ///     Parameter::new("h.1.weight", &[8, 8], Dtype::F32).in_unit("h.1"),
    /// ];
    /// let plan = ShardingPlan::new(&parameters, &Sharding::zero3(), &Sharding::zero3().mesh(2)?)?;
    /// let messages: Vec<_> =
    ///     plan.messages(1).map(|message| (message.operation.name(), message.unit)).collect();
    /// assert_eq!(messages, [
    ///     ("all_gather", 0), ("all_gather", 1), // forward; the last unit stays whole
    ///     ("all_gather", 0), ("reduce_scatter", 1), ("reduce_scatter", 0), // backward
    /// ]);
    /// # Ok::<(), brigade_sharding::ShardingError>(())
    /// ```
    pub fn messages(&self, micro_batches: u64) -> impl Iterator<Item = Message> + '_ {
        let batches =
            (0..micro_batches).flat_map(move |batch| self.batch(batch + 1 == micro_batches));
        batches.chain(self.after_step())
    }

    /// Returns the messages of one batch.
    pub(crate) fn batch(&self, is_last: bool) -> Vec<Message> {
        let whole = self.sharding().strategy.keeps_parameters_whole();
        let mut messages = Vec::new();
        let units = self.units().len();
        if !whole {
            messages.extend((0..units).flat_map(|unit| self.gather(Phase::Forward, unit)));
        }
        // The backward pass ends at the first unit with trained parameters.
        let first_trained = self.units().iter().position(|unit| unit.trained().next().is_some());
        let reached: Vec<usize> = (first_trained.unwrap_or(units)..units).rev().collect();
        // The next gather of the backward pass starts before the reduction of a unit's gradients.
        let gather =
            |unit: &usize| if whole { Vec::new() } else { self.gather(Phase::Backward, *unit) };
        messages.extend(reached.first().into_iter().flat_map(gather));
        for (place, unit) in reached.iter().enumerate() {
            messages.extend(reached.get(place + 1).into_iter().flat_map(gather));
            messages.extend(self.reduce(*unit, is_last));
        }
        messages
    }

    /// Returns the messages that follow the optimizer's step.
    pub(crate) fn after_step(&self) -> Vec<Message> {
        if !self.sharding().strategy.keeps_parameters_whole() {
            return Vec::new();
        }
        let gather = |(place, unit): (usize, &Unit)| {
            self.rows(
                Phase::Step,
                Operation::AllGather,
                place,
                Payload::of(unit.trained(), compute_bytes),
            )
        };
        self.units().iter().enumerate().flat_map(gather).collect()
    }

    /// Returns the messages with the rows of a unit's parameters: those of experts have other ranks.
    fn rows(
        &self,
        phase: Phase,
        operation: Operation,
        place: usize,
        payload: Payload,
    ) -> Vec<Message> {
        let of = |axis, rows| self.message(phase, operation, place, axis, rows);
        let shared = of(Axis::ShardContext, payload.padded);
        shared.into_iter().chain(of(Axis::ExpertShard, payload.padded_experts)).collect()
    }

    fn gather(&self, phase: Phase, place: usize) -> Vec<Message> {
        let unit = &self.units()[place];
        let whole = Payload::of(unit.parameters.iter(), compute_bytes);
        let mut messages = self.rows(phase, Operation::AllGather, place, whole);
        match (phase, unit.reshard) {
            (Phase::Backward, Reshard::No) => messages.clear(),
            // The unit that ran last stays whole, because the backward pass begins with it.
            (Phase::Backward, _) if place + 1 == self.units().len() => messages.clear(),
            // Neighbouring ranks have other experts, which are gathered as in the forward pass.
            (Phase::Backward, Reshard::To(size)) => {
                let shared = Peers::Axis(Axis::ShardContext);
                for message in messages.iter_mut().filter(|message| message.peers == shared) {
                    (message.peers, message.ranks) = (Peers::Part(size), size as u64);
                }
            }
            _ => {}
        }
        messages
    }

    /// Returns the reductions of a unit's gradients in one backward pass.
    fn reduce(&self, place: usize, is_last: bool) -> Vec<Message> {
        let once = self.sharding().strategy == Strategy::Zero1
            || self.sharding().reduce == ReduceGradients::Window;
        let gradients = Payload::of(self.units()[place].trained(), |it| it.reduce_dtype.bytes());
        let shard_ranks = self.shard_ranks() as u64;
        let expert_ranks = self.mesh().size(Axis::ExpertShard) as u64;
        let mut messages = Vec::new();
        if is_last || !once {
            messages.extend(self.rows(Phase::Backward, Operation::ReduceScatter, place, gradients));
            let (operation, axis) = (Operation::AllReduce, Axis::ExpertData);
            let experts = gradients.experts;
            messages.extend(self.message(Phase::Backward, operation, place, axis, experts));
        }
        if is_last {
            let [elements, bytes] = gradients.padded.map(|whole| whole / shard_ranks);
            let of_experts = gradients.padded_experts.map(|whole| whole / expert_ranks);
            let part = [elements + of_experts[0], bytes + of_experts[1]];
            let reduce =
                |axis, of| self.message(Phase::Backward, Operation::AllReduce, place, axis, of);
            messages.extend(reduce(Axis::Replicate, part));
            messages.extend(reduce(Axis::DataContext, gradients.scalars));
        }
        messages
    }

    /// Returns a message. `None` if it has no elements, or no other rank takes part.
    fn message(
        &self,
        phase: Phase,
        operation: Operation,
        unit: usize,
        axis: Axis,
        [elements, bytes]: [u64; 2],
    ) -> Option<Message> {
        let ranks = self.mesh().size(axis) as u64;
        let message =
            Message { phase, operation, unit, peers: Peers::Axis(axis), ranks, elements, bytes };
        (ranks > 1 && elements > 0).then_some(message)
    }
}

/// Elements and bytes of a unit's parameters, by the way in which they are sent.
#[derive(Clone, Copy)]
struct Payload {
    /// Parameters that are sharded, with padding.
    padded: [u64; 2],
    /// Parameters without dimensions, which each rank has whole.
    scalars: [u64; 2],
    /// Experts that are sharded, with padding.
    padded_experts: [u64; 2],
    /// Experts that this rank has whole.
    experts: [u64; 2],
}

impl Payload {
    fn of<'a>(
        parameters: impl Iterator<Item = &'a UnitParameter>,
        element_bytes: impl Fn(&UnitParameter) -> u64,
    ) -> Self {
        let none = [0; 2];
        let mut payload = Self { padded: none, scalars: none, padded_experts: none, experts: none };
        for parameter in parameters {
            let sums = match (parameter.parameter.is_expert, parameter.slot.is_whole) {
                (true, true) => &mut payload.experts,
                (true, false) => &mut payload.padded_experts,
                (false, true) => &mut payload.scalars,
                (false, false) => &mut payload.padded,
            };
            let elements = parameter.slot.padded_elements();
            sums[0] += elements;
            sums[1] += elements * element_bytes(parameter);
        }
        payload
    }
}

fn compute_bytes(parameter: &UnitParameter) -> u64 {
    parameter.compute_dtype.bytes()
}

impl Phase {
    /// Returns the name of the phase: `forward`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Step => "step",
        }
    }
}

impl Operation {
    /// Returns the name of the operation: `all_gather`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllReduce => "all_reduce",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Display for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Axis(axis) => axis.fmt(f),
            Self::Part(size) => f.pad(&format!("{size} of {}", Axis::ShardContext)),
        }
    }
}
