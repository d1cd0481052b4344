//! Errors about memory of a GPU: where, how much, and what helps.

use std::fmt;

use brigade_torch::{DeviceMemory, MemoryInfo};

/// State of the memory of a GPU when an allocation failed.
#[derive(Debug, Clone)]
pub struct OutOfMemory {
    /// Rank that ran out of memory.
    pub rank: usize,
    /// The device, such as `cuda:1`.
    pub device: String,
    /// Operation that failed, such as `the backward pass`.
    pub during: &'static str,
    /// First line of libtorch's message: the layer or parameter, and the size of the allocation.
    pub detail: String,
    /// Free and total memory of the device as the driver reports them, if it does.
    pub driver: Option<MemoryInfo>,
    /// Memory of this process's tensors, as the allocator counts it.
    pub allocator: Option<DeviceMemory>,
    /// Plan of the sharded models. `None` without sharding.
    pub plan: Option<MemoryPlan>,
}

/// Planned memory of a rank for sharded models, with two optimizer states and without activations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Sharding strategy, such as `zero2`.
    pub strategy: String,
    /// Planned bytes on the device.
    pub bytes: u64,
    /// Smallest change of the sharding that needs less memory on the device, and its planned bytes.
    pub smaller: Option<(String, u64)>,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, device, during, detail, driver, allocator, plan } = self;
        write!(f, "rank {rank} ran out of memory on {device} in {during}: {detail}")?;
        if let Some(MemoryInfo { free, total }) = driver {
            write!(f, "; {} of {} are free", gibibytes(*free), gibibytes(*total))?;
        }
        if let Some(DeviceMemory { allocated, peak, reserved }) = allocator {
            write!(
                f,
                "; tensors of this process have {} (at most {} so far), and {} are kept for reuse",
                gibibytes(*allocated),
                gibibytes(*peak),
                gibibytes(reserved.saturating_sub(*allocated))
            )?;
        }
        if let Some(MemoryPlan { strategy, bytes, smaller }) = plan {
            write!(
                f,
                "; {strategy} plans {} for parameters, gradients and states",
                gibibytes(*bytes)
            )?;
            if let Some((change, bytes)) = smaller {
                write!(f, ", and {change} would plan {}", gibibytes(*bytes))?;
            }
        }
        f.write_str(match *during {
            MOVE_OF_MODEL => "; prepare it in 16 bits, or use a GPU with more memory",
            _ => {
                "; use a smaller batch (find_executable_batch_size finds one), 16 bits, or gradient checkpointing"
            }
        })
    }
}

/// Value of [`OutOfMemory::during`] before any batch is in memory.
pub(crate) const MOVE_OF_MODEL: &str = "the move of the model to the GPU";

fn gibibytes(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_place_numbers_and_advice() {
        let error = OutOfMemory {
            rank: 3,
            device: "cuda:1".into(),
            during: "the forward pass",
            detail: "encoder.layer.11.output.dense: CUDA out of memory. Tried to allocate 2.00 GiB"
                .into(),
            driver: Some(MemoryInfo { free: 1 << 29, total: 80 << 30 }),
            allocator: Some(DeviceMemory {
                allocated: 70 << 30,
                peak: 75 << 30,
                reserved: 78 << 30,
            }),
            plan: Some(MemoryPlan {
                strategy: "zero2".into(),
                bytes: 40 << 30,
                smaller: Some(("zero3".into(), 20 << 30)),
            }),
        };
        assert_eq!(
            error.to_string(),
            "rank 3 ran out of memory on cuda:1 in the forward pass: encoder.layer.11.output.dense: CUDA out of \
             memory. Tried to allocate 2.00 GiB; 0.50 GiB of 80.00 GiB are free; tensors of this process have \
             70.00 GiB (at most 75.00 GiB so far), and 8.00 GiB are kept for reuse; zero2 plans 40.00 GiB for \
             parameters, gradients and states, and zero3 would plan 20.00 GiB; use a smaller batch \
             (find_executable_batch_size finds one), 16 bits, or gradient checkpointing"
        );
    }
}
