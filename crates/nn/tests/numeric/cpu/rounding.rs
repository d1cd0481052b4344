//! What is guaranteed of the last digits of products on the CPU, whatever kernels the processor has.
//!
//! The same batch gives the same bits wherever it lies in memory. A sample's result may have other last digits among
//! other samples (their number, its place), with other threads and with other instruction sets, since MKL and oneDNN
//! choose other kernels then; it stays within the bound that holds for a sum in any order. With `u` the unit roundoff
//! and `γ = (n + 2) u` for sums of `n` products, that is `γ (|x| |w| + |b|)`
//! (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).

use std::process::Command;

use brigade_torch::{
    AttentionOptions, attention, linear, make_products_reproducible, shift_allocations,
};
use parking_lot::Mutex;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tch::{Device, Kind, Tensor, no_grad};

/// The allocator and the number of threads belong to the process.
static PROCESS: Mutex<()> = Mutex::new(());

/// Bytes behind a multiple of 64.
const SHIFTS: [usize; 5] = [0, 4, 8, 16, 32];

/// The unit roundoff of `bf16`, which has 8 significant bits.
const BF16: f64 = 1.0 / 256.0;

#[derive(Clone, Copy, Debug)]
enum Operation {
    /// Of `[rows, inputs]` to `[rows, outputs]`.
    Linear { inputs: i64, outputs: i64 },
    /// A 3 × 3 convolution with padding of `[rows, inputs, size, size]`.
    Convolution { inputs: i64, outputs: i64, size: i64 },
    /// Of `[rows, heads, length, width]`, with itself as queries, keys and values.
    Attention { heads: i64, length: i64, width: i64 },
}

use Operation::{Attention, Convolution, Linear};

impl Operation {
    fn sample(self) -> Vec<i64> {
        match self {
            Linear { inputs, .. } => vec![inputs],
            Convolution { inputs, size, .. } => vec![inputs, size, size],
            Attention { heads, length, width } => vec![heads, length, width],
        }
    }

    /// The weight and the bias.
    fn parameters(self, kind: Kind) -> [Tensor; 2] {
        let random = |shape: &[i64]| Tensor::randn(shape, (kind, Device::Cpu));
        match self {
            Linear { inputs, outputs } => [random(&[outputs, inputs]), random(&[outputs])],
            Convolution { inputs, outputs, .. } => {
                [random(&[outputs, inputs, 3, 3]), random(&[outputs])]
            }
            Attention { .. } => [random(&[0]), random(&[0])],
        }
    }

    fn compute(self, input: &Tensor, [weight, bias]: &[Tensor; 2]) -> Tensor {
        no_grad(|| match self {
            Linear { .. } => linear(input, weight, Some(bias)).unwrap(),
            Convolution { .. } => input.conv2d(weight, Some(bias), 1, 1, 1, 1),
            Attention { .. } => {
                attention(input, input, input, None, &AttentionOptions::default()).unwrap()
            }
        })
    }

    /// The result in `f64`, and how far one of another kind may be from it.
    fn reference(self, input: &Tensor, parameters: &[Tensor; 2]) -> (Tensor, Tensor) {
        let kind = input.kind();
        let double = |tensor: &Tensor| tensor.to_kind(Kind::Double);
        let (x, [weight, bias]) = (double(input), parameters.each_ref().map(double));
        let exact = self.compute(&x, &[weight.copy(), bias.copy()]);
        // The reference is rounded, too.
        let unit = if kind == Kind::Double { f64::EPSILON } else { f64::from(f32::EPSILON) / 2.0 };
        let of_result = if kind == Kind::BFloat16 { BF16 } else { 0.0 };
        let allowed = match self {
            Linear { inputs: terms, .. } | Convolution { inputs: terms, .. } => {
                let terms = if matches!(self, Convolution { .. }) { 9 * terms } else { terms };
                let sizes = self.compute(&x.abs(), &[weight.abs(), bias.abs()]);
                let shape: &[i64] = if x.dim() == 4 { &[-1, 1, 1] } else { &[-1] };
                // Kernels may round before they add the bias, and after it.
                let rounded: Tensor = (exact.abs() * 2.0 + bias.abs().view(shape)) * of_result;
                sizes * ((terms + 2) as f64 * unit) + rounded
            }
            Attention { length, width, .. } => {
                let scale = 1.0 / (width as f64).sqrt();
                let sizes = x.abs().matmul(&x.abs().transpose(-2, -1)) * scale;
                // Of a score, then of its exponential, whose approximations are off by up to 20 units in the last place,
                // then of the sum of all, and of the products with the values.
                let score = sizes.amax([-1], true) * ((width + 4) as f64 * unit);
                let weight: Tensor =
                    score * 2.0 + ((2 * length + 64) as f64 * unit + 2.0 * of_result);
                weight * 2.0 * x.abs().amax([-2], true) + exact.abs() * of_result
            }
        };
        (exact, allowed)
    }
}

fn operations() -> impl Strategy<Value = Operation> {
    prop_oneof![
        (1..140_i64, 1..70_i64).prop_map(|(inputs, outputs)| Linear { inputs, outputs }),
        (1..20_i64, 1..20_i64, 1..9_i64).prop_map(|(inputs, outputs, size)| Convolution {
            inputs,
            outputs,
            size
        }),
        (1..4_i64, 1..24_i64, 1..40_i64).prop_map(|(heads, length, width)| Attention {
            heads,
            length,
            width
        }),
    ]
}

fn bits(tensor: &Tensor) -> Tensor {
    let kind = match tensor.kind() {
        Kind::Double => Kind::Int64,
        Kind::Float => Kind::Int,
        _ => Kind::Int16,
    };
    tensor.contiguous().view_dtype(kind)
}

fn within(found: &Tensor, (exact, allowed): &(Tensor, Tensor), what: &str) {
    let apart = (found.to_kind(Kind::Double) - exact).abs();
    let excess = (apart - allowed).max().double_value(&[]);
    assert!(excess <= 0.0, "{what}: {excess:e} beyond what rounding can change");
}

fn rows(tensor: &Tensor, first: i64, count: i64) -> Tensor {
    tensor.narrow(0, first, count).copy()
}

/// Holds all that is guaranteed of one operation on some samples.
fn check(operation: Operation, kind: Kind, samples: i64, seed: i64) {
    tch::manual_seed(seed);
    let shape = [vec![samples], operation.sample()].concat();
    let input = Tensor::randn(&shape, (kind, Device::Cpu));
    let parameters = operation.parameters(kind);
    let reference = operation.reference(&input, &parameters);
    let part = |first, count| (rows(&reference.0, first, count), rows(&reference.1, first, count));

    let mut first: Option<Tensor> = None;
    for shift in SHIFTS {
        shift_allocations(shift).unwrap();
        let output = operation.compute(&input.copy(), &parameters.each_ref().map(Tensor::copy));
        within(&output, &reference, "all samples");
        match &first {
            None => first = Some(output),
            Some(first) => {
                assert_eq!(bits(first), bits(&output), "moved by {shift} bytes, other bits");
            }
        }
    }
    shift_allocations(0).unwrap();

    for count in [1, 2, 3, samples / 2] {
        if (1..samples).contains(&count) {
            let place = samples - count;
            let output = operation.compute(&rows(&input, place, count), &parameters);
            within(&output, &part(place, count), "the last samples alone");
        }
    }
    let backwards = operation.compute(&input.flip([0]), &parameters).flip([0]);
    within(&backwards, &reference, "the samples in the other order");
    let threads = tch::get_num_threads();
    for count in [1, 2, 3] {
        tch::set_num_threads(count);
        within(&operation.compute(&input, &parameters), &reference, "other threads");
    }
    tch::set_num_threads(threads);
}

#[test]
fn the_same_batch_has_the_same_bits_in_64_32_and_16_bits_and_a_sample_the_same_value() {
    let _alone = PROCESS.lock();
    assert_eq!(make_products_reproducible().caveat(), None);
    let kinds = prop_oneof![Just(Kind::Double), Just(Kind::Float), Just(Kind::BFloat16)];
    let cases = (operations(), kinds, 1..40_i64, any::<i64>());
    let config = Config { cases: 40, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&cases, |(operation, kind, samples, seed)| {
            check(operation, kind, samples, seed);
            Ok(())
        })
        .unwrap();
}

/// The same on kernels of other processors, which libtorch, oneDNN and MKL take where variables say so.
#[test]
fn other_instruction_sets_keep_the_guarantees() {
    let sets: [&[(&str, &str)]; 4] = [
        &[
            ("ATEN_CPU_CAPABILITY", "default"),
            ("ONEDNN_MAX_CPU_ISA", "SSE41"),
            ("MKL_CBWR", "COMPATIBLE"),
        ],
        &[("ATEN_CPU_CAPABILITY", "avx2"), ("ONEDNN_MAX_CPU_ISA", "AVX2")],
        &[("MKL_ENABLE_INSTRUCTIONS", "AVX2")],
        &[("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")],
    ];
    for set in sets {
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "cpu::rounding::the_same_batch_has_the_same_bits_in_64_32_and_16_bits_and_a_sample_the_same_value",
            ])
            .envs(set.iter().copied())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{set:?}: {text}");
    }
}
