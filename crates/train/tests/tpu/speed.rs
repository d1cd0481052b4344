//! Time and memory of steps of ResNet-18.

use std::time::Instant;

use brigade_models::ResNet;
use brigade_nn::Model;
use brigade_optim::{Scheduler, Sgd};
use brigade_schedule::Schedule;
use brigade_test_needs::needs;
use brigade_torch::TPU;
use tch::Device;

use crate::training::{builder, images};

const SIDE: i64 = 128;

/// Seconds of each step. The learning rate differs from step to step, as with most schedules: where a number of the
/// host were compiled into an operation, each step would compile it anew.
fn seconds(device: Device, side: i64, steps: usize, mut after: impl FnMut(usize)) -> Vec<f64> {
    let accelerator = builder(device).build().unwrap();
    let model = Model::new(|path| ResNet::resnet18(path, 10)).unwrap();
    let optimizer = Sgd::new(0.01).momentum(0.9).build(&model).unwrap();
    let scheduler = Scheduler::new(&optimizer, Schedule::cosine(0.01, 0.0, steps as u64).unwrap());
    let (model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler)).unwrap();
    let (images, labels) = images([8, 3, side, side], 10, device);
    (0..steps)
        .map(|step| {
            let began = Instant::now();
            let loss = model.forward(&images).unwrap().cross_entropy_for_logits(&labels);
            accelerator.backward(&loss).unwrap();
            optimizer.step().unwrap();
            scheduler.step().unwrap();
            optimizer.zero_grad().unwrap();
            assert!(loss.double_value(&[]).is_finite());
            let taken = began.elapsed().as_secs_f64();
            after(step);
            taken
        })
        .collect()
}

/// Returns the seconds of the fastest of the later steps.
fn fastest(all: &[f64]) -> f64 {
    all[2..].iter().copied().fold(f64::INFINITY, f64::min)
}

/// Prints the time of a step beside that of the CPU. No test depends on it: other work of the machine makes steps longer.
fn print_times() {
    let on_cpu = fastest(&seconds(Device::Cpu, SIDE, 8, |_| ()));
    let all = seconds(TPU, SIDE, 8, |_| ());
    let (first, second, later) = (all[0], all[1], fastest(&all));
    println!("first step {first:.2} s, second {second:.2} s, later {later:.3} s");
    println!("CPU {on_cpu:.3} s, ratio {:.2}", later / on_cpu);
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

#[needs(Tpu, limit = 600)]
fn memory_does_not_grow_over_200_steps() {
    print_times();
    let mut kept = Vec::new();
    seconds(TPU, 32, 200, |step| {
        if step % 20 == 19 {
            kept.push(resident_bytes());
        }
    });
    let megabytes: Vec<u64> = kept.iter().map(|bytes| bytes >> 20).collect();
    println!("resident MB after each 20 steps: {megabytes:?}");
    // From when all is allocated and compiled. A sample may have what is about to be freed; of memory that grows, all have
    // more.
    let (early, last) = (kept[2], *kept[7..].iter().min().unwrap());
    assert!(last < early + (32 << 20), "{megabytes:?}");
}
