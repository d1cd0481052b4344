//! The device by its name, moves to it and from it, and errors.

use brigade_nn::{Linear, Model};
use brigade_test_needs::needs;
use brigade_torch::{DEVICE_KINDS, DeviceExt, TPU, set_data};
use brigade_train::Accelerator;
use tch::{Device, Kind, Tensor};

use crate::training::builder;

#[needs(Tpu)]
fn a_tpu_is_found_and_shows_its_name() {
    let accelerator = Accelerator::builder().quiet(true).build().unwrap();
    let device = accelerator.device();
    assert_eq!((device, device.label()), (TPU, "tpu:0".to_owned()));
    let (kind, index) = device.device_kind().unwrap();
    assert_eq!((kind.name(), index), ("tpu", 0));
    assert!(kind.hardware(0).unwrap().contains("PJRT 0."), "{:?}", kind.hardware(0));
    assert!(DEVICE_KINDS.iter().any(|kind| kind.name() == "tpu"));
    let ones = Tensor::ones([2], (Kind::Float, device));
    assert_eq!(ones.device(), TPU);
    assert_eq!(Vec::<f32>::try_from(ones).unwrap(), [1.0, 1.0]);
}

#[needs(Tpu)]
fn a_model_moves_there_and_back_with_its_gradients() {
    let mut model = Model::new(|path| Linear::new(path, 3, 2)).unwrap();
    let input = Tensor::ones([1, 3], (Kind::Float, Device::Cpu));
    model.forward(&input).unwrap().sum(Kind::Float).backward();
    let gradient = model.parameters()[0].tensor.grad().copy();
    let weight = model.parameters()[0].tensor.shallow_clone();
    let first = weight.detach().copy();
    model.to_device(TPU).unwrap();
    assert_eq!((weight.device(), weight.grad().device()), (TPU, TPU));
    // It is still a leaf that gets gradients there.
    model.forward(&input.to_device(TPU)).unwrap().sum(Kind::Float).backward();
    assert_eq!(weight.grad().to_device(Device::Cpu), &gradient + &gradient);
    model.to_device(Device::Cpu).unwrap();
    assert_eq!(model.parameters()[0].tensor.device(), Device::Cpu);
    assert_eq!(weight.detach(), first);
}

#[needs(Tpu)]
fn a_model_is_built_there_with_the_values_of_the_cpu() {
    let build = |device, deferred: bool| {
        tch::manual_seed(3);
        let builder = Model::builder().device(device);
        let builder = if deferred { builder.deferred() } else { builder };
        let mut model = builder.build(|path| Linear::new(path, 5, 4)).unwrap();
        model.materialize().unwrap();
        let weight = model.parameters()[0].tensor.detach();
        assert_eq!(weight.device(), device);
        weight.to_device(Device::Cpu)
    };
    let expected = build(Device::Cpu, false);
    assert_eq!(build(TPU, false), expected);
    assert_eq!(build(TPU, true), expected);
}

#[needs(Tpu)]
fn memory_of_another_layout_is_refused() {
    TPU.load().unwrap();
    let sparse = Tensor::eye(3, (Kind::Float, Device::Cpu)).to_sparse(None, None::<i64>, None);
    let error = set_data(&Tensor::ones([3], (Kind::Float, TPU)), &sparse).unwrap_err().to_string();
    assert!(error.contains("tpu:0") && error.contains("not an ordinary dense tensor"), "{error}");
}

#[needs(Tpu)]
fn an_operation_that_the_backend_lacks_is_named() {
    TPU.load().unwrap();
    let text = Tensor::ones([3, 3], (Kind::Float, TPU)).f_linalg_eig().unwrap_err().to_string();
    assert!(text.contains("linalg_eig"), "{text}");
}

#[needs(Tpu)]
fn random_numbers_go_on_from_a_state() {
    let state = brigade_torch::rng_state(TPU).unwrap();
    let draw = || Tensor::rand([5], (Kind::Float, TPU)).to_device(Device::Cpu);
    let first = draw();
    assert_ne!(first, draw());
    brigade_torch::set_rng_state(TPU, &state).unwrap();
    assert_eq!(first, draw());
}

#[needs(Tpu)]
fn random_numbers_follow_the_seed() {
    TPU.load().unwrap();
    let draw = |seed| {
        tch::manual_seed(seed);
        Tensor::rand([5], (Kind::Float, TPU)).to_device(Device::Cpu)
    };
    let first = draw(4);
    assert_ne!(first, draw(5));
    assert_eq!(first, draw(4));
}

#[needs(Tpu)]
fn a_seed_from_before_it_is_loaded_is_kept() {
    tch::manual_seed(11);
    TPU.load().unwrap();
    let draw = || Tensor::rand([5], (Kind::Float, TPU)).to_device(Device::Cpu);
    let first = draw();
    tch::manual_seed(11);
    assert_eq!(first, draw());
}

#[needs(Tpu)]
fn the_option_cpu_contradicts_it() {
    let error = builder(TPU).cpu(true).build().unwrap_err().to_string();
    assert!(error.contains("`device(tpu:0)`"), "{error}");
}
