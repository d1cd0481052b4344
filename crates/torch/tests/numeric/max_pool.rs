//! Pooling through loops of our own, against libtorch's.

use brigade_test_device::numeric_device;
use brigade_torch::{channels_last, max_pool2d};
use tch::{Kind, Tensor};

type Pair = [i64; 2];

/// Kernel, stride and padding.
const WINDOWS: [[Pair; 3]; 5] = [
    [[2, 2], [2, 2], [0, 0]],
    [[3, 3], [2, 2], [1, 1]],
    // Each value is in up to fifteen windows.
    [[3, 5], [1, 1], [1, 2]],
    // Values between the windows are in none.
    [[1, 2], [3, 4], [0, 1]],
    [[2, 3], [1, 2], [1, 0]],
];

fn images(channels: i64) -> Tensor {
    tch::manual_seed(7);
    // Few different values: many windows have several largest ones.
    let random = Tensor::randint(9, [2, channels, 7, 10], (Kind::Float, numeric_device())) - 4.0;
    channels_last(&random).unwrap()
}

fn by_libtorch(input: &Tensor, [kernel, stride, padding]: [Pair; 3]) -> Tensor {
    input.max_pool2d(kernel, stride, padding, [1, 1], false)
}

fn by_us(input: &Tensor, [kernel, stride, padding]: [Pair; 3]) -> Tensor {
    max_pool2d(input, kernel, stride, padding).unwrap()
}

/// Output and the input's gradient.
fn run(input: &Tensor, pool: impl Fn(&Tensor) -> Tensor) -> [Tensor; 2] {
    let input = input.detach().set_requires_grad(true);
    let output = pool(&input);
    let numbers = Tensor::arange(output.numel() as i64, (Kind::Float, numeric_device())).fmod(8.0);
    let upstream = numbers.view_(output.size()).to_kind(output.kind());
    (&output * upstream).sum(Kind::Float).backward();
    [output.detach(), input.grad()]
}

#[test]
fn it_gives_the_bits_of_libtorch() {
    // A tile of channels, a part of one, several.
    for channels in [16, 64, 150] {
        let input = images(channels);
        for windows in WINDOWS {
            // Small whole numbers: sums of gradients are exact in bfloat16, too.
            for kind in [Kind::Float, Kind::BFloat16] {
                let input = input.to_kind(kind);
                let ours = run(&input, |input| by_us(input, windows));
                let theirs = run(&input, |input| by_libtorch(input, windows));
                for (ours, theirs) in ours.iter().zip(&theirs) {
                    assert!(ours.equal(theirs), "{channels} channels, {windows:?}, {kind:?}");
                    assert_eq!(ours.stride(), theirs.stride());
                }
            }
        }
    }
}

#[test]
fn a_gradient_in_the_usual_layout_is_the_same() {
    let input = images(32);
    let flat = |pool: &dyn Fn(&Tensor, [Pair; 3]) -> Tensor| {
        run(&input, |input| pool(input, WINDOWS[0]).reshape([2, -1]))
    };
    let (ours, theirs) = (flat(&by_us), flat(&by_libtorch));
    assert!(ours[1].equal(&theirs[1]) && ours[0].equal(&theirs[0]));
}

#[test]
fn nan_and_infinity_are_treated_as_libtorch_does() {
    let input = images(16);
    let values = [f64::NAN, f64::NEG_INFINITY, f64::INFINITY];
    for (at, value) in (0..).zip(values) {
        let _ = input.get(0).get(at).fill_(value);
        let _ = input.get(1).get(at + 3).get(2).get(3).fill_(value);
        let _ = input.get(1).get(at + 3).get(3).get(3).fill_(value);
    }
    for windows in WINDOWS {
        let ours = run(&input, |input| by_us(input, windows));
        let theirs = run(&input, |input| by_libtorch(input, windows));
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert!(ours.allclose(theirs, 0.0, 0.0, true), "{windows:?}");
        }
    }
}

#[test]
fn other_layouts_and_types_use_libtorchs_kernel() {
    let input = images(16);
    for other in [
        input.contiguous(),
        input.to_kind(Kind::Double),
        input.narrow(1, 0, 3),
        input.get(0),
        images(3),
    ] {
        assert!(by_us(&other, WINDOWS[1]).equal(&by_libtorch(&other, WINDOWS[1])));
    }
    let empty = input.narrow(0, 0, 0);
    assert_eq!(by_us(&empty, WINDOWS[0]).size(), [0, 16, 3, 5]);
}

#[test]
fn windows_that_do_not_fit_are_errors() {
    let input = images(16);
    for ([kernel, stride, padding], why) in [
        ([[2, 2], [2, 2], [2, 0]], "pad should be at most half of effective kernel size"),
        ([[8, 2], [1, 1], [0, 0]], "Output size is too small"),
        ([[0, 2], [1, 1], [0, 0]], "greater than zero"),
        ([[2, 2], [0, 1], [0, 0]], "stride should not be zero"),
        ([[2, 2], [1, 1], [-1, 0]], "non-negative"),
        ([[i64::MAX, 2], [1, 1], [0, 0]], ""),
        ([[2, 2], [1, 1], [i64::MAX, 0]], ""),
    ] {
        let error = max_pool2d(&input, kernel, stride, padding).unwrap_err().to_string();
        assert!(error.contains(why), "{kernel:?}, {stride:?}, {padding:?}: {error}");
    }
}

#[test]
fn a_gradient_has_a_gradient() {
    let input = images(16);
    let second = |pool: &dyn Fn(&Tensor, [Pair; 3]) -> Tensor| {
        let input = input.detach().set_requires_grad(true);
        let squares = pool(&input, WINDOWS[1]).square().sum(Kind::Float);
        let gradient = Tensor::run_backward(&[squares], &[&input], true, true);
        gradient[0].square().sum(Kind::Float).backward();
        input.grad()
    };
    assert!(second(&by_us).equal(&second(&by_libtorch)));
}

#[test]
fn without_gradients_the_output_is_the_same() {
    let input = images(16);
    let output = tch::no_grad(|| by_us(&input, WINDOWS[1]));
    assert!(output.equal(&by_libtorch(&input, WINDOWS[1])) && !output.requires_grad());
}
