//! Our loops run on libtorch's threads.

use brigade_torch::{BatchNormState, batch_norm_relu};
use tch::Tensor;

#[test]
fn our_loops_run_on_several_threads() {
    assert!(
        brigade_torch::flat::loops_are_parallel(),
        "this libtorch brings no OpenMP library of GNU's, on whose threads our loops run"
    );
    tch::set_num_threads(1);
    let (rows, channels) = (4096, 64);
    let values: Vec<f32> = (0..rows * channels).map(|i| (i % 97) as f32).collect();
    let input = Tensor::from_slice(&values).view([1, 64, 64, channels]).permute([0, 3, 1, 2]);
    let weight = Tensor::from_slice(&[1f32; 64]);
    let (bias, mean, variance) = (weight.copy(), weight.copy(), weight.copy());
    let state = BatchNormState {
        weight: Some(&weight),
        bias: Some(&bias),
        running_mean: Some(&mean),
        running_var: Some(&variance),
    };
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    // Nothing but the loop is large enough for a third one.
    tch::set_num_threads(3);
    let output = tch::no_grad(|| batch_norm_relu(&input, None, state, true, 0.1, 1e-5)).unwrap();
    assert_eq!(output.size(), input.size());
    assert!(threads() > before, "the loop has run on one thread");
}
