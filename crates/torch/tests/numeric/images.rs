//! Images of bytes as normalised values: the kernel of a GPU, emulated without one, and the operations.

use brigade_test_device::{assert_same, fake, gpu, kernels, numeric_device};
use brigade_torch::{is_channels_last, normalized_images};
use tch::{Device, Kind, Tensor};

const MEAN: [f32; 4] = [0.485, 0.456, 0.406, 0.5];
const STD: [f32; 4] = [0.229, 0.224, 0.225, 0.25];

fn constants(values: &[f32], kind: Kind, device: Device) -> Tensor {
    Tensor::from_slice(values).to_kind(kind).view([1, -1, 1, 1]).to_device(device)
}

fn operations(images: &Tensor, kind: Kind) -> Tensor {
    let channels = images.size()[1] as usize;
    let [mean, std] =
        [MEAN, STD].map(|values| constants(&values[..channels], kind, images.device()));
    (images.to_kind(kind) / 255 - mean) / std
}

fn normalized(images: &Tensor, kind: Kind) -> Tensor {
    let channels = images.size()[1] as usize;
    normalized_images(images, &MEAN[..channels], &STD[..channels], kind).unwrap()
}

fn bytes(shape: [i64; 4], device: Device) -> Tensor {
    tch::manual_seed(5);
    Tensor::randint(256, shape, (Kind::Uint8, Device::Cpu)).to_device(device)
}

#[test]
fn the_kernel_gives_float64_rounded_once_more_in_16_bits() {
    let (device, _alone) = gpu();
    // One value, one channel, vectors that end within a pixel, an image or a row; more values than threads.
    for shape in
        [[1, 1, 1, 1], [2, 1, 3, 5], [3, 3, 5, 7], [5, 2, 1, 3], [2, 4, 9, 2], [2, 3, 61, 67]]
    {
        for last in [false, true] {
            let mut images = bytes(shape, device);
            if last {
                images = images.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
            }
            let exact = operations(&images, Kind::Double);
            for (kind, digit) in [(Kind::Float, -24), (Kind::Half, -11), (Kind::BFloat16, -8)] {
                let run = || normalized(&images, kind);
                let found = if fake::is_installed() { kernels::emulated(run) } else { run() };
                assert_eq!((found.kind(), found.size()), (kind, shape.to_vec()));
                assert!(is_channels_last(&found).unwrap() || shape[1] == 1);
                // Three roundings of float32, of which the last division enlarges those of values of up to 1 by
                // 1 / std, below 5, and that of the result's kind.
                let float = 2f64.powi(-24) * 3.0 * 5.0;
                let allowed = exact.abs() * 2f64.powi(digit) + float;
                let apart = (found.to_kind(Kind::Double) - &exact).abs();
                let is_close = bool::try_from(apart.le_tensor(&allowed).all()).unwrap();
                assert!(is_close, "{shape:?}, {kind:?}, channels last: {last}");
            }
        }
    }
}

#[test]
fn it_is_one_kernel() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let images = bytes([2, 3, 4, 5], device);
    let account = kernels::counted(|| fake::account(|| drop(normalized(&images, Kind::BFloat16))));
    assert_eq!((account.calls(), account.bytes()), (1, 120 * 3), "{account}");
}

#[test]
fn without_the_kernel_it_is_the_operations() {
    let device = numeric_device();
    for shape in [[2, 3, 5, 4], [2, 1, 3, 3], [0, 3, 4, 4]] {
        let images = bytes(shape, device);
        for kind in [Kind::Float, Kind::BFloat16] {
            let found = normalized(&images, kind);
            assert_same(&found, &operations(&images, Kind::Float).to_kind(kind), "normalised");
        }
    }
    // A view with gaps.
    let images = bytes([2, 3, 5, 8], device);
    let images = images.narrow(3, 1, 4);
    assert_same(&normalized(&images, Kind::Float), &operations(&images, Kind::Float), "a view");
}

#[test]
fn wrong_images_are_errors() {
    let images = bytes([2, 3, 4, 5], Device::Cpu);
    let refused = |images: &Tensor, mean: &[f32], kind: Kind, why: &str| {
        let error = normalized_images(images, mean, &STD[..3], kind).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(&images.to_kind(Kind::Float), &MEAN[..3], Kind::Float, "expected [n, c, h, w]");
    refused(&images.get(0), &MEAN[..3], Kind::Float, "expected [n, c, h, w]");
    refused(&images, &MEAN[..2], Kind::Float, "2 means and 3 standard deviations for 3 channels");
    refused(&images, &MEAN[..3], Kind::Int64, "floating-point");
}
