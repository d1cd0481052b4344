//! Errors about memory of a GPU: where, how much, and what helps.

use std::fmt;

use brigade_torch::{DeviceMemory, MemoryInfo};

/// How memory stood when a GPU had none left.
#[derive(Debug, Clone)]
pub struct OutOfMemory {
    /// The rank.
    pub rank: usize,
    /// The device, such as `cuda:1`.
    pub device: String,
    /// What was being done, such as `the backward pass`.
    pub during: &'static str,
    /// The first line of libtorch's words: of which layer or parameter, and how much was asked for.
    pub detail: String,
    /// Free and total memory of the device as the driver counts it, where it says so.
    pub driver: Option<MemoryInfo>,
    /// What this process's tensors have.
    pub allocator: Option<DeviceMemory>,
    /// What the plan of a sharded model says; `None` without sharding.
    pub plan: Option<MemoryPlan>,
}

/// What the plan of a sharded model says of a rank's memory, with two states of the optimizer and without activations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The strategy, such as `zero2`.
    pub strategy: String,
    /// Bytes on the device.
    pub bytes: u64,
    /// The smallest change that needs less there, and its bytes.
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

/// What [`OutOfMemory::during`] says where no batch is in memory yet.
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
