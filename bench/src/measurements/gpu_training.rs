//! Training steps on a GPU that are taken on request, and their sizes.

use std::env;
use std::io::{self, Write};
use std::time::Instant;

use anyhow::{Context, Result};
use brigade::prelude::*;
use brigade::torch::{DeviceExt, DeviceMemory};
use brigade::train::CapturedStep;

/// Variable that makes GPU measurements small if it is 1. The peers read it, too.
pub(crate) const SMALL: &str = "BRIGADE_BENCH_SMALL";

/// Returns `true` if GPU measurements are to be small.
pub(crate) fn small() -> bool {
    env::var_os(SMALL).is_some_and(|value| !value.is_empty() && value != "0")
}

/// Returns the size for a GPU, or that of small runs.
pub(super) fn size<T>(full: T, small_one: T) -> T {
    if small() { small_one } else { full }
}

pub(super) fn accelerator(precision: Precision) -> Result<Accelerator> {
    let builder = Accelerator::builder().quiet(true).mixed_precision(precision);
    Ok(builder.benchmark_kernels(true).build()?)
}

pub(super) type Body<'a, B> = Box<dyn FnMut(&B) -> brigade::Result<Tensor> + 'a>;

/// Training step with the loss as its result, eager or recorded.
pub(super) enum Training<'a, B> {
    Plain(Body<'a, B>),
    Captured(CapturedStep<'a, B, Tensor>),
}

impl<'a, B: TensorTree<Owned = B>> Training<'a, B> {
    pub(super) fn new(
        accelerator: &Accelerator,
        captured: bool,
        body: impl FnMut(&B) -> brigade::Result<Tensor> + 'a,
    ) -> Self {
        if captured {
            Self::Captured(accelerator.capture(body))
        } else {
            Self::Plain(Box::new(body))
        }
    }

    /// Takes a step. As in the peers' loops, the loss is not read.
    pub(super) fn step(&mut self, batch: &B) -> Result<()> {
        match self {
            Self::Plain(body) => body(batch).map(drop)?,
            Self::Captured(step) => step.run(batch).map(drop)?,
        }
        Ok(())
    }

    /// Fails if a step on a GPU should be recorded and is eager: its figure would belong to another line.
    pub(super) fn is_as_asked(&self, device: Device) -> Result<()> {
        match self {
            Self::Captured(step) if device != Device::Cpu => {
                step.records().map_err(|reason| anyhow::anyhow!("it was not recorded: {reason}"))
            }
            _ => Ok(()),
        }
    }

    /// Takes `steps` steps for each line of standard input, and answers with one line: their mean duration in seconds,
    /// and the peak device memory of tensors until then, in bytes (0 on a CPU). The steps of the first line are the
    /// warm-up. The device is synchronised before the first and after the last step of a block, and not in between.
    pub(super) fn serve(
        mut self,
        device: Device,
        steps: usize,
        mut batch: impl FnMut() -> Result<B>,
    ) -> Result<Vec<Vec<f64>>> {
        for line in io::stdin().lines() {
            line.context("cannot read when to step")?;
            device.synchronize()?;
            let start = Instant::now();
            for _ in 0..steps {
                self.step(&batch()?)?;
            }
            device.synchronize()?;
            let seconds = start.elapsed().as_secs_f64() / steps as f64;
            self.is_as_asked(device)?;
            let peak = DeviceMemory::of(device)?.map_or(0, |memory| memory.peak);
            let mut out = io::stdout();
            writeln!(out, "[{seconds}, {peak}]")?;
            out.flush()?;
        }
        Ok(Vec::new())
    }
}
