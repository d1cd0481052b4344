//! Products of fp8 weights by libtorch's kernel with a scale for each row, on a GPU.

use brigade_checkpoint::QuantizedFormat;
use brigade_test_device::{fake, numeric_device};
use brigade_torch::QuantizedWeight;
use tch::{Device, Kind, Tensor};

/// Returns a GPU: that of the tests, or one made of host memory.
fn gpu() -> Option<Device> {
    match numeric_device() {
        Device::Cpu => fake::install(1).is_ok().then_some(Device::Cuda(0)),
        device => Some(device),
    }
}

/// Returns the same numbers regardless of other random draws, of different sizes in each row.
fn numbers(rows: i64, columns: i64) -> Tensor {
    let places = Tensor::arange(rows * columns, (Kind::Double, Device::Cpu));
    let values = ((&places * 12.9898).sin() + (places * 0.37).cos()).view([rows, columns]);
    values * (Tensor::arange(rows, (Kind::Double, Device::Cpu)) + 1.0).unsqueeze(1)
}

#[test]
fn fp8_weights_and_rows_are_multiplied_by_the_kernel_of_a_gpu_in_16_bits() {
    let Some(device) = gpu() else { return };
    for (rows, columns) in [(64, 128), (48, 64), (33, 64), (32, 40)] {
        let weight = numbers(rows, columns).to_kind(Kind::Float).to_device(device);
        let quantized = QuantizedWeight::new(&weight, QuantizedFormat::Fp8, false).unwrap();
        let stored = quantized.dequantize(Kind::Float).unwrap().to_kind(Kind::Double);
        let bias = numbers(1, rows).view([rows]).to_kind(Kind::BFloat16).to_device(device);
        let is_whole = rows % 16 == 0 && columns % 16 == 0;
        match quantized.kernel(Kind::BFloat16) {
            Ok(kernel) => assert_eq!((kernel, is_whole), ("_scaled_mm", true)),
            Err(reason) if is_whole => assert!(reason.contains("`_scaled_mm`"), "{reason}"),
            Err(reason) => assert!(reason.contains("multiples of 16"), "{reason}"),
        }
        let is_scaled = quantized.kernel(Kind::BFloat16).is_ok();
        for inputs in [1, 7, 100] {
            let input = numbers(inputs, columns).to_kind(Kind::BFloat16).to_device(device);
            let output = quantized.linear(&input, Some(&bias)).unwrap().to_kind(Kind::Double);
            let input = input.to_kind(Kind::Double);
            let exact = input.matmul(&stored.tr()) + bias.to_kind(Kind::Double);
            let error = (output - &exact).abs();
            // A sixteenth of each value of the input, or a step of the smallest numbers; bfloat16's rounding of the
            // weight's product and of the sum with the bias.
            let share = if is_scaled { 1.0 / 16.0 + 1.0 / 128.0 } else { 1.0 / 64.0 };
            let step = input.abs().amax([-1], true) / 448.0 / 1024.0;
            let sums = input.abs().matmul(&stored.abs().tr());
            let allowed = sums * share
                + step * stored.abs().sum_dim_intlist(1, false, Kind::Double)
                + (exact.abs() + bias.to_kind(Kind::Double).abs()) / 128.0;
            let is_within = error.le_tensor(&allowed).all().int64_value(&[]) != 0;
            assert!(is_within, "{rows} x {columns}, {inputs} rows: {:?}", (error - allowed).max());
        }
        // The rounded input shows that the kernel has run; in float32 it does not.
        let input = numbers(3, columns).to_device(device);
        let difference = |kind| {
            let found = quantized.linear(&input.to_kind(kind), None).unwrap();
            let stored = quantized.dequantize(kind).unwrap();
            let expected = brigade_torch::linear(&input.to_kind(kind), &stored, None).unwrap();
            (found - expected).abs().max().double_value(&[])
        };
        assert_eq!(difference(Kind::Float), 0.0);
        assert_eq!(difference(Kind::BFloat16) > 0.0, is_scaled);
    }
    // A row of zeros, and numbers of any size.
    let weight = numbers(32, 32).to_kind(Kind::Float).to_device(device);
    let quantized = QuantizedWeight::new(&weight, QuantizedFormat::Fp8, false).unwrap();
    let sizes = Tensor::from_slice(&[0.0, 1e-30, 1e30]).to_device(device);
    let input = (Tensor::ones([3, 32], (Kind::Double, device)) * sizes.unsqueeze(1))
        .to_kind(Kind::BFloat16);
    let output = quantized.linear(&input, None).unwrap();
    assert_eq!(output.isfinite().all().int64_value(&[]), 1);
    assert_eq!(output.get(0).abs().max().double_value(&[]), 0.0);
}
