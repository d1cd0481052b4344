//! Models that others wrote: variables of `tch::nn`, files of TorchScript; and what a forward can be asked for.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use brigade_nn::{
    BatchNorm2d, Conv2d, Conv2dOptions, Dropout, Linear, Model, ModelError, Module, ParamPath,
    Recompute, Relu, Sequential, TorchScript,
};
use brigade_test_device::numeric_device;
use brigade_torch::{Autocast, GpuMath, ScriptValue, TorchError, backward, gradient, recomputed};
use parking_lot::Mutex;
use tch::nn::{self, ModuleT};
use tch::{Device, Kind, Tensor};

use crate::device::{build, float};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_kind(Kind::Float).reshape([-1])).unwrap()
}

fn sequential(variables: &nn::VarStore) -> nn::SequentialT {
    let root = variables.root();
    nn::seq_t()
        .add(nn::linear(&root / "layer10", 4, 6, nn::LinearConfig::default()))
        .add(nn::batch_norm1d(&root / "norm", 6, nn::BatchNormConfig::default()))
        .add_fn_t(|x, train| x.dropout(0.5, train))
        .add(nn::linear(&root / "layer2", 6, 2, nn::LinearConfig::default()))
}

#[test]
fn variables_of_tch_are_parameters_and_buffers_under_their_names() {
    let mut variables = nn::VarStore::new(numeric_device());
    let net = sequential(&variables);
    variables.freeze();
    let mut model = Model::from_var_store(variables, net).unwrap();
    let names = |tensors: Vec<brigade_torch::NamedTensor>| -> Vec<String> {
        tensors.into_iter().map(|tensor| tensor.name).collect()
    };
    // In the order in which they were made, not in a hash map's.
    // As tch makes them: a linear layer's bias first.
    let expected = [
        "layer10.bias",
        "layer10.weight",
        "norm.weight",
        "norm.bias",
        "layer2.bias",
        "layer2.weight",
    ];
    assert_eq!(names(model.parameters()), expected);
    assert_eq!(names(model.buffers()), ["norm.running_mean", "norm.running_var"]);
    assert!(model.trainable_parameters().is_empty(), "frozen before");
    model.requires_grad_under("layer2", true).unwrap();
    assert_eq!(model.trainable_parameters().len(), 2);

    let input = Tensor::randn([8, 4], float());
    let mean = model.buffers().remove(0).tensor;
    let before = mean.copy();
    let _ = model.forward(&input).unwrap();
    assert_ne!(before, mean, "training moves the running statistics");
    model.eval();
    assert_eq!(model.forward(&input).unwrap(), model.forward(&input).unwrap(), "no dropout");
    let before = mean.copy();
    let _ = model.forward(&input).unwrap();
    assert_eq!(before, mean);

    // The module computes with the model's tensors, on any device.
    model.to_kind(Kind::Double).unwrap();
    let output = model.module().inner().forward_t(&input.to_kind(Kind::Double), false);
    assert_eq!(output.kind(), Kind::Double);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    model.save_weights(&path).unwrap();
    let other = nn::VarStore::new(numeric_device());
    let net = sequential(&other);
    let mut other = Model::from_var_store(other, net).unwrap();
    let report = other.load_weights(&path).unwrap();
    assert_eq!(report.loaded, 8);
    other.eval();
    let difference = (other.forward(&input).unwrap() - output.to_kind(Kind::Float)).abs().max();
    assert!(difference.double_value(&[]) < 1e-5);
}

/// Same losses and weights as PyTorch's own training of the file.
#[test]
fn a_scripted_module_trains_as_in_python() {
    let expected: serde_json::Value =
        serde_json::from_slice(&std::fs::read(fixture("torchscript.json")).unwrap()).unwrap();
    type Output = BTreeMap<String, Tensor>;
    let path = fixture("torchscript_script.pt");
    let mut model = Model::<TorchScript<Output>>::from_torchscript(path).unwrap();
    model.to_device(numeric_device()).unwrap();
    let names: Vec<String> = model.state_dict().into_iter().map(|(name, _)| name).collect();
    let state = expected["state"].as_object().unwrap();
    assert_eq!(names.len(), state.len(), "{names:?}");
    assert_eq!(model.parameters().len(), 5, "the tied weight is one parameter");
    assert_eq!(model.buffers().len(), 4);

    let line = |from: f64, to: f64| Tensor::linspace(from, to, 20, float()).reshape([5, 4]);
    let (left, right) = (line(-1.0, 1.0), line(1.0, -2.0));
    let dropped = model.forward((&left, &right)).unwrap();
    assert_ne!(
        dropped["hidden"],
        model.forward((&left, &right)).unwrap()["hidden"],
        "dropout in training"
    );
    // The running statistics have changed; reset them.
    let path = fixture("torchscript_script.pt");
    let mut model = Model::<TorchScript<Output>>::from_torchscript(path).unwrap();
    model.to_device(numeric_device()).unwrap();
    model.eval();
    for wanted in expected["losses"].as_array().unwrap() {
        let output = model.forward([("left", &left), ("right", &right)]).unwrap();
        let loss = output["sum"].square().mean(Kind::Float);
        assert!((loss.double_value(&[]) - wanted.as_f64().unwrap()).abs() < 1e-6);
        model.zero_grad().unwrap();
        backward(&loss).unwrap();
        for parameter in model.parameters() {
            let mut tensor = parameter.tensor;
            let gradient = gradient(&tensor).unwrap().unwrap();
            let _ = tch::no_grad(|| tensor.f_sub_(&(gradient * 0.1)).unwrap());
        }
    }
    for (name, tensor) in model.state_dict() {
        let wanted = state[&name].as_array().unwrap();
        for (found, wanted) in floats(&tensor).into_iter().zip(wanted) {
            assert!((f64::from(found) - wanted.as_f64().unwrap()).abs() < 1e-6, "{name}");
        }
    }
}

#[test]
fn a_traced_module_gives_nested_tuples() {
    type Output = (Tensor, (Tensor, Tensor));
    let model = Model::<TorchScript<Output>>::from_torchscript(fixture("torchscript_trace.pt"));
    let mut model = model.unwrap();
    model.to_device(numeric_device()).unwrap();
    let (input, factor) = (Tensor::ones([2, 3], float()), Tensor::from(3f32));
    let (plain, (scaled, same)) = model.forward((&input, &factor)).unwrap();
    assert_eq!(plain * 3.0, scaled);
    assert_eq!(same, factor);
    // Weights that do not fit are an error, not a panic.
    let mut model =
        Model::<TorchScript>::from_torchscript(fixture("torchscript_trace.pt")).unwrap();
    model.to_device(numeric_device()).unwrap();
    let error = model.forward((&input, &factor)).unwrap_err();
    assert_eq!(error.to_string(), "the TorchScript module gave a tuple, expected a tensor");
    let error = model.forward(&Tensor::ones([2, 5], float())).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(TorchError::Libtorch { .. })), "{error}");
    let any = Model::<TorchScript<ScriptValue>>::from_torchscript(fixture("torchscript_trace.pt"));
    let mut any = any.unwrap();
    any.to_device(numeric_device()).unwrap();
    let value = any.forward((&input, &factor)).unwrap();
    assert!(matches!(value, ScriptValue::Tuple(values) if values.len() == 2));
    for name in ["missing.pt", "small.pth", "layers.json"] {
        let error = Model::<TorchScript>::from_torchscript(fixture(name)).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(ModelError::Script { .. })), "{name}: {error}");
    }
}

struct Net {
    blocks: Sequential,
    head: Linear,
}

impl Net {
    fn new(p: &ParamPath<'_>, recompute: bool) -> Self {
        let block = |p: ParamPath<'_>| {
            Sequential::new()
                .add(Conv2d::new(
                    &p / 0,
                    3,
                    3,
                    [3, 3],
                    Conv2dOptions { padding: [1, 1], ..Default::default() },
                ))
                .add(BatchNorm2d::new(&p / 1, 3))
                .add(Relu)
                .add(Dropout::new(&p / 2, 0.3))
        };
        let pair = Sequential::new();
        let pair = if recompute {
            // Nested: the second block once more within the part.
            pair.add(Recompute::new(
                Sequential::new().add(block(p / 0)).add(Recompute::new(block(p / 1))),
            ))
        } else {
            pair.add(block(p / 0)).add(block(p / 1))
        };
        Self { blocks: pair, head: Linear::new(p / "head", 3, 2) }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> brigade_torch::Result<Tensor> {
        let maps = self.blocks.forward(input)?;
        self.head.forward(&maps.mean_dim([2, 3].as_slice(), false, None))
    }
}

/// Gradients, buffers and loss of one step, as bits; and that the next random number is the same.
fn step(recompute: bool, kind: Kind) -> Vec<Vec<f32>> {
    // First, so that the device's generator is there to be seeded.
    let device = numeric_device();
    tch::manual_seed(3);
    let model = build(|p: &ParamPath<'_>| Net::new(p, recompute)).unwrap();
    let input = Tensor::randn([4, 3, 12, 12], float());
    let scope = Autocast::enter(device, kind, true).unwrap();
    let output = model.forward(&input).unwrap();
    drop(scope);
    let loss = output.to_kind(Kind::Float).square().sum(Kind::Float);
    let next = Tensor::rand([2], float());
    if device != Device::Cpu {
        // cuDNN's fastest gradients of weights have other last digits in every run.
        GpuMath { tf32: false, benchmark: false, deterministic: true }.apply();
    }
    backward(&loss).unwrap();
    let mut found = vec![floats(&loss), floats(&next), floats(&Tensor::rand([2], float()))];
    found.extend(model.parameters().iter().map(|p| floats(&gradient(&p.tensor).unwrap().unwrap())));
    found.extend(model.buffers().iter().map(|b| floats(&b.tensor)));
    found
}

#[test]
fn recomputed_parts_give_the_same_bits_in_32_and_16_bits() {
    for kind in [Kind::Float, Kind::BFloat16] {
        assert_eq!(step(false, kind), step(true, kind), "{kind:?}");
    }
}

#[test]
fn a_part_is_computed_again_once_and_frees_what_it_saved() {
    let count = Arc::new(Mutex::new(0));
    let weight = Tensor::ones([64], float()).set_requires_grad(true);
    let (times, own) = (Arc::clone(&count), weight.shallow_clone());
    let output = recomputed(&[&weight], move |inputs| {
        *times.lock() += 1;
        (&inputs[0] * &own).exp().sin() * &own
    })
    .unwrap();
    let loss = output.sum(Kind::Float);
    let slope = brigade_torch::grad(
        &[&loss],
        &[&weight],
        brigade_torch::GradOptions {
            backward: brigade_torch::BackwardOptions { create_graph: true, ..Default::default() },
            ..Default::default()
        },
    )
    .unwrap()
    .remove(0)
    .unwrap();
    let e = std::f64::consts::E;
    // d/dw of w sin(exp(w²)) at 1.
    assert!((slope.double_value(&[0]) - (e.sin() + 2.0 * e * e.cos())).abs() < 1e-4);
    assert!(*count.lock() >= 2);
    // Second derivatives go through the recomputed values, too.
    backward(&slope.sum(Kind::Float)).unwrap();
    let second = 2.0 * e * e.cos() + 4.0 * e * e.cos() + 4.0 * e * e.cos() - 4.0 * e * e * e.sin();
    let found = gradient(&weight).unwrap().unwrap().double_value(&[0]);
    assert!((found - second).abs() < 1e-3, "{found} {second}");
}

#[test]
fn a_part_that_fails_or_differs_the_second_time_is_an_error() {
    let weight = Tensor::ones([8], float()).set_requires_grad(true);
    let times = Arc::new(Mutex::new(0));
    let first = Arc::clone(&times);
    let output = recomputed(&[&weight], move |inputs| {
        *first.lock() += 1;
        if *first.lock() == 1 { inputs[0].exp() } else { inputs[0].exp().sin() }
    });
    let error = backward(&output.unwrap().sum(Kind::Float)).unwrap_err().to_string();
    assert!(error.contains("something else than in the forward"), "{error}");
    let input = Tensor::ones([8], float());
    let mut changed = input.shallow_clone();
    let own = weight.shallow_clone();
    let output = recomputed(&[&input], move |inputs| (&inputs[0] * &own).exp()).unwrap();
    let _ = changed.f_add_scalar_(1).unwrap();
    let error = backward(&output.sum(Kind::Float)).unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

#[test]
fn hooks_read_and_change_activations_until_they_are_dropped() {
    let mut model = build(|p: &ParamPath<'_>| Net::new(p, false)).unwrap();
    assert_eq!(model.layers(), ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2", "head"]);
    assert_eq!(model.children(""), ["0", "1", "head"]);
    let input = Tensor::ones([2, 3, 8, 8], float());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let read = model.forward_hook("1.0", move |name, output| {
        log.lock().push((name.to_owned(), output.size()));
        None
    });
    let change = model.forward_hook("head", |_, output| Some(output.zeros_like())).unwrap();
    assert_eq!(floats(&model.forward(&input).unwrap()), [0.0; 4]);
    assert_eq!(*seen.lock(), [("1.0".to_owned(), vec![2, 3, 8, 8])]);
    drop(change);
    assert_ne!(floats(&model.forward(&input).unwrap()), [0.0; 4]);
    drop(read);
    let _ = model.forward(&input).unwrap();
    assert_eq!(seen.lock().len(), 2);
    let error = model.forward_hook("1.9", |_, _| None).unwrap_err().to_string();
    assert!(
        error.starts_with("no layer is called `1.9`; those that take hooks are 0.0,"),
        "{error}"
    );
    let error = model.parameter_groups(&[("body", &["0"])]).unwrap_err().to_string();
    assert!(error.starts_with("parameter `1.0.weight` is in no group"), "{error}");
}
