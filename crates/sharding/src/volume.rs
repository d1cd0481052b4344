//! Communication volume of a step.

use std::ops::AddAssign;

use crate::{Message, Operation, ShardingPlan};

/// Communication volume: the traffic that one rank sends in one optimizer step, with ring algorithms.
///
/// ```
/// use brigade_checkpoint::Dtype;
/// use brigade_sharding::{Parameter, Sharding, ShardingPlan, Volume};
///
/// let parameters = [
///     Parameter::new("h.0.weight", &[64, 10], Dtype::F32).in_unit("h.0"),
///     Parameter::new("h.1.weight", &[64, 10], Dtype::F32).in_unit("h.1"),
/// ];
/// let mesh = Sharding::zero2().mesh(4)?;
/// let zero2 = ShardingPlan::new(&parameters, &Sharding::zero2(), &mesh)?;
/// assert_eq!(zero2.volume(1).elements(), 2 * 1280 * 3 / 4);
/// assert_eq!(zero2.volume(4).elements(), 5 * 1280 * 3 / 4); // a reduction for each batch
/// assert_eq!(Volume::replicated(1280, 4, 4).elements(), 2 * 1280 * 3 / 4);
/// # Ok::<(), brigade_sharding::ShardingError>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Volume {
    /// Traffic sent in all-gathers.
    pub gathered: Traffic,
    /// Traffic sent in reduce-scatters.
    pub scattered: Traffic,
    /// Traffic sent in all-reduces.
    pub reduced: Traffic,
}

/// Amount of data that is sent, in elements and in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Traffic {
    /// Number of elements that are sent.
    pub elements: u64,
    /// Number of bytes that are sent.
    pub bytes: u64,
}

impl Volume {
    /// Returns the volume of a step without sharding (DDP): the gradients of `elements` trained elements are
    /// all-reduced once.
    #[must_use]
    pub fn replicated(elements: u64, element_bytes: u64, ranks: u64) -> Self {
        let elements =
            2 * (ranks.saturating_sub(1)).saturating_mul(elements.div_ceil(ranks.max(1)));
        let bytes = elements.saturating_mul(element_bytes);
        Self { reduced: Traffic { elements, bytes }, ..Self::default() }
    }

    /// Returns the number of elements of all messages.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.kinds().fold(0, |sum, traffic| sum.saturating_add(traffic.elements))
    }

    /// Returns the number of bytes of all messages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.kinds().fold(0, |sum, traffic| sum.saturating_add(traffic.bytes))
    }

    /// Returns the time of all messages in seconds, for a bandwidth in bytes per second, if nothing else takes time.
    #[must_use]
    pub fn seconds(&self, bytes_per_second: f64) -> f64 {
        self.bytes() as f64 / bytes_per_second
    }

    fn kinds(&self) -> impl Iterator<Item = Traffic> {
        [self.gathered, self.scattered, self.reduced].into_iter()
    }

    fn add(&mut self, messages: &[Message], times: u64) {
        for message in messages {
            let sum = match message.operation {
                Operation::AllGather => &mut self.gathered,
                Operation::ReduceScatter => &mut self.scattered,
                Operation::AllReduce => &mut self.reduced,
            };
            *sum += Traffic {
                elements: message.sent_elements().saturating_mul(times),
                bytes: message.sent_bytes().saturating_mul(times),
            };
        }
    }
}

impl ShardingPlan {
    /// Returns the communication volume of one rank in one optimizer step with `micro_batches` batches.
    #[must_use]
    pub fn volume(&self, micro_batches: u64) -> Volume {
        let mut volume = Volume::default();
        if let Some(others) = micro_batches.checked_sub(1) {
            volume.add(&self.batch(false), others);
            volume.add(&self.batch(true), 1);
        }
        volume.add(&self.after_step(), 1);
        volume
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.elements = self.elements.saturating_add(other.elements);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}
