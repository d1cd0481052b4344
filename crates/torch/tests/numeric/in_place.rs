//! Changes in place of what operations return. PyTorch allows them where no backward reads the output, which that of
//! attention, ReLU and normalisations does.

use brigade_test_device::{fake, gpu, kernels, numeric_device};
use brigade_torch::{
    Activation, Autocast, EmbeddingRows, GatedPair, LinearParameters, activation, channels_last,
    convolution2d, dropout, embedding_sum, feed_forward, gated_activation, gated_linear,
    gelu_linear, linear, max_pool2d, rotary, rotary_pair, tied_embedding,
};
use tch::{Device, Kind, Tensor};

type Outputs = Vec<(&'static str, Tensor)>;

/// Returns the outputs of operations on leaves in a type.
fn outputs(device: Device, kind: Kind) -> Outputs {
    let leaf = |size: &[i64]| {
        Tensor::randn(size, (Kind::Float, device)).to_kind(kind).set_requires_grad(true)
    };
    let float = |size: &[i64]| Tensor::randn(size, (Kind::Float, device)).set_requires_grad(true);
    let (x, up, weight, bias) =
        (leaf(&[2, 8, 16]), leaf(&[2, 8, 16]), float(&[16, 16]), float(&[16]));
    let heads = || leaf(&[2, 4, 8, 16]);
    let images = channels_last(&leaf(&[2, 8, 6, 6]).detach()).unwrap().set_requires_grad(true);
    let ids = Tensor::from_slice(&[1i64, 3]).to_device(device);
    let [cos, sin] = [0, 1].map(|_| Tensor::randn([8, 16], (Kind::Float, device)));
    let pair = || GatedPair::Two { gate: (&x).into(), up: (&up).into() };
    let parameters = LinearParameters { weight: &weight, bias: Some(&bias) };
    let rotated = rotary_pair(&heads(), &heads(), &cos, &sin).unwrap();
    let pixel = float(&[8, 8, 1, 1]);
    vec![
        ("linear", linear(&x, &weight, Some(&bias)).unwrap()),
        ("gelu_linear", gelu_linear(&x, "tanh", &weight, Some(&bias)).unwrap()),
        ("gated_linear", gated_linear(pair(), Activation::Silu, &weight, None).unwrap()),
        ("feed_forward", feed_forward(&x, parameters, Activation::GeluTanh, parameters).unwrap()),
        ("activation", activation(&x, Activation::Gelu).unwrap()),
        ("gated_activation", gated_activation(pair(), Activation::Silu).unwrap()),
        ("dropout", dropout(&x, 0.5, None).unwrap()),
        ("tied_embedding", tied_embedding(&weight, &ids, None).unwrap().0),
        ("embedding_sum", embedding_sum(EmbeddingRows::new(&weight, &ids), &[], 0.1).unwrap().0),
        ("rotary", rotary(&heads(), &cos, &sin).unwrap()),
        ("rotary_pair's queries", rotated.0),
        ("rotary_pair's keys", rotated.1),
        ("convolution2d", convolution2d(&images, &pixel, None, [1; 2], [0; 2], [1; 2], 1).unwrap()),
        ("max_pool2d", max_pool2d(&images, [2; 2], [2; 2], [0; 2]).unwrap()),
    ]
}

fn check(outputs: Outputs, about: &str) {
    let refused: Vec<String> = outputs
        .into_iter()
        .filter_map(|(name, mut output)| {
            let changed =
                output.f_mul_(&Tensor::from(2.0)).and_then(|it| it.sum(Kind::Float).f_backward());
            changed
                .err()
                .map(|error| format!("{name}: {}", error.to_string().lines().next().unwrap()))
        })
        .collect();
    assert!(refused.is_empty(), "{about}: {refused:#?}");
}

#[test]
fn outputs_can_be_changed_in_place() {
    let device = numeric_device();
    tch::manual_seed(1);
    check(outputs(device, Kind::Float), "float32");
}

#[test]
fn outputs_can_be_changed_in_place_under_autocast() {
    let device = numeric_device();
    tch::manual_seed(1);
    let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
    check(outputs(device, Kind::BFloat16), "bfloat16");
}

#[test]
fn outputs_of_kernels_can_be_changed_in_place_under_autocast() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    tch::manual_seed(1);
    let times = kernels::ProductTimes { algorithms: &[0.0], launch: 1e6, ..Default::default() };
    kernels::with_products(times, || {
        let found = kernels::emulated(|| {
            let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
            outputs(device, Kind::BFloat16)
        });
        kernels::emulated(|| check(found, "kernels"));
    });
}
