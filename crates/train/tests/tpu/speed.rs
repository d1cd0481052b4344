//! Time and memory of steps of ResNet-18. The tests print what they measure.

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

/// The fastest of the later steps: other work of the machine makes steps longer.
fn fastest(all: &[f64]) -> f64 {
    all[2..].iter().copied().fold(f64::INFINITY, f64::min)
}

#[needs(Tpu)]
fn a_step_takes_at_most_three_times_that_of_the_cpu() {
    let on_cpu = fastest(&seconds(Device::Cpu, SIDE, 8, |_| ()));
    let all = seconds(TPU, SIDE, 8, |_| ());
    let later = fastest(&all);
    println!(
        "first step {:.2} s, second {:.2} s, later {later:.3} s, CPU {on_cpu:.3} s",
        all[0], all[1]
    );
    println!("ratio {:.2}", later / on_cpu);
    assert!(all[0] < 60.0, "the first step takes {} s", all[0]);
    assert!(later <= 3.0 * on_cpu, "{later} s, and {on_cpu} s on the CPU");
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

#[needs(Tpu, limit = 600)]
fn memory_does_not_grow_over_200_steps() {
    let mut kept = Vec::new();
    seconds(TPU, 32, 200, |step| {
        if step % 20 == 19 {
            kept.push(resident_bytes());
        }
    });
    let megabytes: Vec<u64> = kept.iter().map(|bytes| bytes >> 20).collect();
    println!("resident MB after each 20 steps: {megabytes:?}");
    // From when all is allocated and compiled; an allocator may still take some pages.
    let (early, last) = (kept[2], kept[9]);
    assert!(last < early + (32 << 20), "{megabytes:?}");
}
