//! The kernels of brigade-torch, compiled for the CPU, against libtorch's operations in float64.

#![allow(clippy::unwrap_used)] // also in what the tests share

use brigade_gpukit::kernels::NormRelu;
use tch::{Device, Kind, Tensor};

const EPS: f64 = 1e-5;
const MOMENTUM: f64 = 0.1;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    Plain,
    Relu,
    Shortcut,
}

struct Case {
    input: Tensor,
    shortcut: Option<Tensor>,
    upstream: Tensor,
    channels: i64,
    relu: bool,
}

impl Case {
    fn new(shape: [i64; 4], mode: Mode, kind: Kind) -> Self {
        tch::manual_seed(7);
        let random = || Tensor::randn(shape, (Kind::Float, Device::Cpu));
        // Values that the 16 bits have.
        let short = |tensor: &Tensor| channels_last(&tensor.to_kind(kind));
        Self {
            // A mean far from zero: sums of squares would lose half of their digits.
            input: short(&(random() * 2.0 + 5.0)),
            shortcut: (mode == Mode::Shortcut).then(|| short(&random())),
            upstream: short(&random()),
            channels: shape[1],
            relu: mode != Mode::Plain,
        }
    }

    fn vector(&self, from: f64, kind: Kind) -> Tensor {
        Tensor::linspace(from, from + 1.0, self.channels, (Kind::Double, Device::Cpu)).to_kind(kind)
    }

    /// Output, gradients and running statistics of the kernels.
    fn run(&self) -> Vec<Tensor> {
        let (running_mean, running_var) =
            (self.vector(0.0, Kind::Float), self.vector(1.0, Kind::Float));
        let mut results = NormRelu {
            input: &self.input,
            shortcut: self.shortcut.as_ref(),
            weight: &self.vector(0.5, Kind::Float),
            bias: &self.vector(-0.5, Kind::Float),
            running_mean: &running_mean,
            running_var: &running_var,
            upstream: &self.upstream,
            momentum: MOMENTUM,
            eps: EPS,
            relu: self.relu,
        }
        .run()
        .unwrap();
        results.extend([running_mean, running_var]);
        results
    }

    /// The same from libtorch's operations; parameters are float64 where the kind is, else float32.
    fn reference(&self, kind: Kind) -> Vec<Tensor> {
        let of_parameters = if kind == Kind::Double { kind } else { Kind::Float };
        let leaf = |tensor: &Tensor| tensor.to_kind(kind).detach().copy().set_requires_grad(true);
        let (input, shortcut) = (leaf(&self.input), self.shortcut.as_ref().map(leaf));
        let [weight, bias] =
            [0.5, -0.5].map(|from| self.vector(from, of_parameters).set_requires_grad(true));
        let [mean, var] = [0.0, 1.0].map(|from| self.vector(from, of_parameters));
        let mut output = input.batch_norm(
            Some(&weight),
            Some(&bias),
            Some(&mean),
            Some(&var),
            true,
            MOMENTUM,
            EPS,
            false,
        );
        if let Some(shortcut) = &shortcut {
            output = &output + shortcut;
        }
        if self.relu {
            output = output.relu();
        }
        (&output * self.upstream.to_kind(kind)).sum(of_parameters).backward();
        let mut results = vec![output.detach()];
        results.extend([&input, &weight, &bias].map(Tensor::grad));
        results.extend(shortcut.as_ref().map(Tensor::grad));
        results.extend([mean, var]);
        results
    }
}

fn channels_last(tensor: &Tensor) -> Tensor {
    tensor.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
}

/// The largest difference, over the largest value.
fn apart(one: &Tensor, other: &Tensor) -> f64 {
    let (one, other) = (one.to_kind(Kind::Double), other.to_kind(Kind::Double));
    let size = other.abs().max().double_value(&[]);
    (one - other).abs().max().double_value(&[]) / size
}

#[test]
fn they_are_as_close_to_float64_as_the_operations_are() {
    // Two rows, rows that no number of threads divides, more channels than a block has threads for, a number of channels
    // that fills no warp.
    let shapes = [
        [1, 2048, 1, 2],
        [2, 16, 3, 3],
        [8, 64, 23, 17],
        [4, 512, 5, 3],
        [3, 24, 9, 7],
        [2, 296, 6, 5],
    ];
    for (kind, shapes) in [(Kind::BFloat16, &shapes[..]), (Kind::Half, &shapes[3..])] {
        for &shape in shapes {
            for mode in [Mode::Plain, Mode::Relu, Mode::Shortcut] {
                let case = Case::new(shape, mode, kind);
                let (found, exact, plain) =
                    (case.run(), case.reference(Kind::Double), case.reference(kind));
                assert_eq!(found.len(), exact.len());
                assert_eq!(found[0].stride(), case.input.stride());
                for (at, (found, exact)) in found.iter().zip(&exact).enumerate() {
                    let distance = apart(found, exact);
                    // Half of the type's last digit; of float32, what few values decide.
                    let least = match found.kind() {
                        Kind::BFloat16 => 2_f64.powi(-8),
                        Kind::Half => 2_f64.powi(-11),
                        _ => 2e-6,
                    };
                    let allowed = least.max(1.1 * apart(&plain[at], exact));
                    let what = format!("{kind:?}, {shape:?}, {mode:?}, {at}");
                    assert!(distance <= allowed, "{what}: {distance}, allowed {allowed}");
                }
            }
        }
    }
}

#[test]
fn nan_stays_nan_in_its_channel() {
    // The value that distances are measured from, and another one.
    for image in [0, 7] {
        let case = Case::new([8, 16, 12, 12], Mode::Relu, Kind::BFloat16);
        let _ = case.input.get(image).get(3).get(0).get(0).fill_(f64::NAN);
        for (at, (found, expected)) in
            case.run().iter().zip(case.reference(Kind::Float)).enumerate()
        {
            assert!(found.isnan().equal(&expected.isnan()), "{image}, {at}");
        }
        assert!(case.run()[0].isnan().any().int64_value(&[]) == 1);
    }
}

#[test]
fn runs_have_the_same_bits() {
    let case = Case::new([8, 64, 23, 17], Mode::Shortcut, Kind::BFloat16);
    for (one, other) in case.run().iter().zip(case.run()) {
        assert!(one.equal(&other));
    }
}
