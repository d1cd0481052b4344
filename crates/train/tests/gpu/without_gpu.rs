//! On a machine without a GPU, or without a driver: a program trains on the CPU, and one that was built for
//! GPUs says why.

use std::process::Command;

use brigade_nn::{Linear, Model};
use brigade_optim::Sgd;
use brigade_testkit::{World, dist_test};
use brigade_torch::{CudaUnavailable, Result, cuda_devices};
use brigade_train::Accelerator;
use tch::{Device, Kind, Tensor};

fn trains_on_the_cpu() -> Result<()> {
    let accelerator = Accelerator::new()?;
    assert_eq!(accelerator.device(), Device::Cpu);
    let model = Model::new(|path| Linear::new(path, 3, 1))?;
    let optimizer = Sgd::new(0.1).build(&model)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let inputs = Tensor::ones([4, 3], (Kind::Float, accelerator.device()));
    let mut losses = Vec::new();
    for _ in 0..5 {
        let loss = (model.forward(&inputs)? - 2.0).square().mean(Kind::Float);
        optimizer.zero_grad()?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        losses.push(loss.double_value(&[]));
    }
    assert!(losses[4] < losses[0], "{losses:?}");
    Ok(())
}

dist_test!(world = 2, dist_ranks_train_on_the_cpu, |_world: World| -> Result<()> {
    if cuda_devices().is_ok() { Ok(()) } else { trains_on_the_cpu() }
});

#[test]
#[ignore = "is what the test below starts"]
fn child() {
    trains_on_the_cpu().unwrap();
}

#[test]
fn the_start_line_says_why_the_cpu_is_used() {
    let reason = match cuda_devices() {
        // Hidden from the process below.
        Ok(_) => "(CUDA_VISIBLE_DEVICES= leaves no GPU)".to_owned(),
        Err(CudaUnavailable::NotCompiled) => String::new(),
        Err(CudaUnavailable::NoDevice) => "(CUDA_VISIBLE_DEVICES= leaves no GPU)".to_owned(),
        Err(reason) => format!("({reason})"),
    };
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["without_gpu::child", "--exact", "--ignored", "--nocapture"])
        .env("CUDA_VISIBLE_DEVICES", "")
        .env("OMP_NUM_THREADS", "1")
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}{}", String::from_utf8_lossy(&output.stdout));
    let start = error.lines().find(|line| line.starts_with("brigade: ")).unwrap_or_default();
    let device = if reason.is_empty() { String::new() } else { format!(" {reason}") };
    let expected =
        format!("brigade: 1 process, cpu with 1 thread{device}, no mixed precision, contiguous");
    assert_eq!(start, expected, "{error}");
    // libtorch's own warning about a missing driver would be a second message.
    assert!(!error.contains("Warning"), "{error}");
}
