//! Operators of GPUs made of host memory give what the CPU gives, bit for bit, and on the right device.

use brigade_gpukit::fake;
use tch::{Device, Kind, Tensor};

fn gpu() -> Device {
    fake::install(2).unwrap();
    Device::Cuda(0)
}

/// Runs the function on both devices, with the same inputs: the results must have the same bits.
fn same(inputs: &[Tensor], function: impl Fn(&[Tensor]) -> Vec<Tensor>) {
    let gpu = gpu();
    let there: Vec<Tensor> = inputs.iter().map(|it| it.to_device(gpu)).collect();
    let expected = function(inputs);
    let found = function(&there);
    assert_eq!(expected.len(), found.len());
    for (at, (expected, found)) in expected.iter().zip(&found).enumerate() {
        assert_eq!(found.device(), gpu, "result {at}");
        assert_eq!(found.size(), expected.size(), "result {at}");
        assert_eq!(found.kind(), expected.kind(), "result {at}");
        assert_eq!(found.stride(), expected.stride(), "result {at}");
        let found = found.to_device(Device::Cpu);
        let equal = found.equal(expected) || (expected.isnan().any().int64_value(&[]) == 1
            && found.isnan().equal(&expected.isnan()));
        assert!(equal, "result {at}: {found} is not {expected}");
    }
}

fn random(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Float, Device::Cpu))
}

/// Gradients of the sum of squares of the results, by the inputs that are floats.
fn with_gradients(inputs: &[Tensor], function: impl Fn(&[Tensor]) -> Tensor) -> Vec<Tensor> {
    let inputs: Vec<Tensor> = inputs
        .iter()
        .map(|it| if it.is_floating_point() { it.detach().set_requires_grad(true) } else { it.shallow_clone() })
        .collect();
    let result = function(&inputs);
    result.square().sum(Kind::Float).backward();
    let mut all = vec![result.detach()];
    all.extend(inputs.iter().filter(|it| it.requires_grad()).map(Tensor::grad));
    all
}

#[test]
fn linear_layers_and_their_gradients() {
    same(&[random(&[4, 6]), random(&[3, 6]), random(&[3])], |x| {
        with_gradients(x, |x| x[0].linear(&x[1], Some(&x[2])).relu())
    });
    same(&[random(&[2, 4, 6]), random(&[3, 6]), random(&[3])], |x| {
        with_gradients(x, |x| x[0].linear(&x[1], Some(&x[2])).gelu("none"))
    });
}
