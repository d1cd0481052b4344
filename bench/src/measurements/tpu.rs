//! Steps of ResNet-18 on a TPU, or on what TorchTPU's plug-in has instead, and on the CPU.

use std::time::Instant;

use anyhow::{Result, bail};
use brigade::models::ResNet;
use brigade::prelude::*;
use brigade::schedule::Schedule;
use brigade::torch::TPU;

use super::training::status;

const BATCH: i64 = 8;
const SIDE: i64 = 128;
/// Steps until everything is compiled.
const WARM_UP: usize = 3;
const PAIRS: usize = 20;
/// Steps whose memory is compared, and those from which on it must not grow.
const STEPS: usize = 200;
const EARLY: usize = 60;

/// Runs a measurement by its words.
pub(super) fn run(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    match words {
        // Seconds of steps on the TPU and on the CPU, which take turns, and of the first step on the TPU.
        ["resnet18"] => steps(),
        // Resident bytes after some steps, and the smallest of the last ones.
        ["memory"] => memory(),
        other => bail!("there is no measurement \"tpu {}\"", other.join(" ")),
    }
}

/// Returns a training step. The learning rate differs from step to step: where a number of the host were compiled into
/// an operation, each step would compile it anew.
fn step(device: Device, side: i64) -> Result<impl FnMut() -> Result<()>> {
    let accelerator = Accelerator::builder().device(device).quiet(true).build()?;
    tch::manual_seed(1);
    let model = Model::new(|path| ResNet::resnet18(path, 10))?;
    let optimizer = Sgd::new(0.01).momentum(0.9).build(&model)?;
    let schedule = Schedule::cosine(0.01, 0.0, STEPS as u64)?;
    let scheduler = Scheduler::new(&optimizer, schedule);
    let (model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler))?;
    let images = Tensor::rand([BATCH, 3, side, side], tch::kind::FLOAT_CPU).to_device(device);
    let labels = Tensor::randint(10, [BATCH], tch::kind::INT64_CPU).to_device(device);
    Ok(move || {
        let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
        accelerator.backward(&loss)?;
        optimizer.step()?;
        scheduler.step()?;
        optimizer.zero_grad()?;
        anyhow::ensure!(loss.double_value(&[]).is_finite(), "the loss is not finite");
        Ok(())
    })
}

fn seconds(step: &mut impl FnMut() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    step()?;
    Ok(start.elapsed().as_secs_f64())
}

fn steps() -> Result<Vec<Vec<f64>>> {
    let (mut on_tpu, mut on_cpu) = (step(TPU, SIDE)?, step(Device::Cpu, SIDE)?);
    let first = seconds(&mut on_tpu)?;
    for _ in 0..WARM_UP {
        on_tpu()?;
        on_cpu()?;
    }
    let (mut tpu, mut cpu) = (Vec::new(), Vec::new());
    for _ in 0..PAIRS {
        tpu.push(seconds(&mut on_tpu)?);
        cpu.push(seconds(&mut on_cpu)?);
    }
    Ok(vec![tpu, cpu, vec![first]])
}

fn memory() -> Result<Vec<Vec<f64>>> {
    // Small images: the number of operations decides, not their size.
    let mut on_tpu = step(TPU, 32)?;
    let mut bytes = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        on_tpu()?;
        bytes.push(status("VmRSS")?);
    }
    // One sample may have what is about to be freed. Of memory that grows, all have more.
    let last = bytes[STEPS - EARLY..].iter().copied().fold(f64::INFINITY, f64::min);
    Ok(vec![vec![bytes[EARLY]], vec![last]])
}
