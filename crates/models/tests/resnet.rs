//! Residual networks against torchvision: names, values, gradients and first values.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::sync::Mutex;

use brigade_models::{ResNet, ResNetOptions};
use brigade_nn::{Error, Kind, Model, ParamPath, StateDict, Tensor};
use serde_json::Value;

/// libtorch has one generator per process.
static GENERATOR: Mutex<()> = Mutex::new(());

/// The golden file's own random numbers: splitmix64 of the index and a stream, uniform in [0, 1).
fn fill(shape: &[i64], stream: u64, low: f64, high: f64) -> Tensor {
    let value = |index: u64| {
        let mut z = (index + 1 + (stream << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let unit = ((z ^ (z >> 31)) >> 11) as f64 * 2f64.powi(-53);
        (low + (high - low) * unit) as f32
    };
    let length = shape.iter().product::<i64>().unsigned_abs();
    Tensor::from_slice(&(0..length).map(value).collect::<Vec<_>>()).view(shape)
}

/// Gives every parameter the golden file's values.
fn filled(model: &Model<ResNet>) {
    for (stream, parameter) in (0..).zip(model.parameters()) {
        let shape = parameter.tensor.size();
        let (low, high) = match shape.as_slice() {
            [_] if parameter.name.ends_with("weight") => (0.8, 1.2),
            [_] => (-0.1, 0.1),
            [_, row @ ..] => {
                let bound = (6.0 / row.iter().product::<i64>() as f64).sqrt();
                (-bound, bound)
            }
            [] => unreachable!("no parameter is a scalar"),
        };
        let values = fill(&shape, stream, low, high);
        tch::no_grad(|| parameter.tensor.shallow_clone().copy_(&values));
    }
}

/// What a network makes of the golden file's images, in double precision.
struct Outcome {
    train_logits: Tensor,
    train_loss: f64,
    /// Of each parameter's gradient: the sum of its absolute values.
    gradients: Vec<(String, f64)>,
    eval_logits: Tensor,
}

impl Outcome {
    fn of(model: &mut Model<ResNet>, images: &Tensor) -> Self {
        let images = images.to_kind(model.kind());
        model.train();
        let logits = model.forward(&images).unwrap();
        let loss = logits.cross_entropy_for_logits(&Tensor::from_slice(&[3i64, 7]));
        loss.backward();
        let gradients = model.parameters().into_iter().map(|parameter| {
            (parameter.name, parameter.tensor.grad().abs().sum(Kind::Double).double_value(&[]))
        });
        let gradients = gradients.collect();
        model.eval();
        Self {
            train_logits: logits.detach().to_kind(Kind::Double),
            train_loss: loss.double_value(&[]),
            gradients,
            eval_logits: tch::no_grad(|| model.forward(&images).unwrap()).to_kind(Kind::Double),
        }
    }

    fn read(golden: &Value) -> Self {
        let matrix = |value: &Value| {
            let rows: Vec<Vec<f32>> = serde_json::from_value(value.clone()).unwrap();
            Tensor::from_slice(&rows.concat()).view([rows.len() as i64, -1]).to_kind(Kind::Double)
        };
        let gradients = golden["grad_abs_sums"].as_object().unwrap();
        Self {
            train_logits: matrix(&golden["train_logits"]),
            train_loss: golden["train_loss"].as_f64().unwrap(),
            gradients: gradients
                .iter()
                .map(|(name, sum)| (name.clone(), sum.as_f64().unwrap()))
                .collect(),
            eval_logits: matrix(&golden["eval_logits_after_one_train_forward"]),
        }
    }

    /// The differences to `exact`: of logits and gradients the largest, relative to the largest logit and
    /// to each gradient.
    fn errors(&self, exact: &Self) -> [f64; 4] {
        let of_logits = |found: &Tensor, exact: &Tensor| {
            (found - exact).abs().max().double_value(&[]) / exact.abs().max().double_value(&[])
        };
        let gradients = self.gradients.iter().map(|(name, sum)| {
            let (_, exact) = exact.gradients.iter().find(|(exact, _)| exact == name).unwrap();
            (sum - exact).abs() / exact
        });
        [
            of_logits(&self.train_logits, &exact.train_logits),
            (self.train_loss - exact.train_loss).abs() / exact.train_loss,
            gradients.fold(0.0, f64::max),
            of_logits(&self.eval_logits, &exact.eval_logits),
        ]
    }
}

/// Compares with torchvision's results in float32 by way of float64, where rounding leaves nothing to see:
/// so torchvision's distance is its own rounding and the same on every processor, and ours, which differs
/// from processor to processor, is held against it.
fn agrees(name: &str, build: fn(&ParamPath<'_>) -> ResNet) {
    let golden: Value = serde_json::from_str(include_str!("golden/resnets.json")).unwrap();
    let golden = &golden["models"][name];
    let _alone = GENERATOR.lock().unwrap();
    let mut model = Model::new(build).unwrap();
    assert_eq!(model.num_parameters() as u64, golden["parameters"].as_u64().unwrap());
    let found: Vec<(String, Vec<i64>)> =
        model.state_dict().into_iter().map(|(name, tensor)| (name, tensor.size())).collect();
    let expected: Vec<(String, Vec<i64>)> =
        serde_json::from_value(golden["state_dict"].clone()).unwrap();
    assert_eq!(found, expected);

    filled(&model);
    let shape: Vec<i64> = serde_json::from_value(golden["input"].clone()).unwrap();
    let images = fill(&shape, 900, -1.0, 1.0);
    let mut exact = Model::builder().kind(Kind::Double).build(build).unwrap();
    filled(&exact);
    let exact = Outcome::of(&mut exact, &images);
    let torchvision = Outcome::read(golden).errors(&exact);
    let ours = Outcome::of(&mut model, &images).errors(&exact);
    eprintln!("{name}: torchvision's rounding {torchvision:?}, ours {ours:?}");
    let what = ["logits in training", "loss", "gradients", "logits in evaluation"];
    // float32 has 1.2e-7; 50 layers of sums, and batch statistics of few values, make more of it.
    let limits = [2e-4, 2e-4, 1e-2, 5e-4];
    for (((what, limit), torchvision), ours) in what.iter().zip(limits).zip(torchvision).zip(ours) {
        assert!(torchvision < limit, "{what}: torchvision is {torchvision} away");
        // The same sums in another order: an error of the same size.
        assert!(ours < 16.0 * torchvision, "{what}: {ours} away, torchvision {torchvision}");
    }
}

#[test]
fn resnet18_is_torchvisions() {
    agrees("resnet18", |path| ResNet::resnet18(path, 10));
}

#[test]
fn resnet34_is_torchvisions() {
    agrees("resnet34", |path| ResNet::resnet34(path, 10));
}

#[test]
fn resnet50_is_torchvisions() {
    agrees("resnet50", |path| ResNet::resnet50(path, 10));
}

/// A size: its name in torchvision and its constructor.
type Size = (&'static str, fn(&ParamPath<'_>) -> ResNet);

#[test]
fn a_seed_gives_torchvisions_first_values_and_all_sizes_are_its() {
    let golden: Value = serde_json::from_str(include_str!("fixtures/resnet_seed.json")).unwrap();
    let next =
        ResNetOptions { groups: 32, width_per_group: 4, ..ResNetOptions::bottleneck([3, 4, 6, 3]) };
    let wide = ResNetOptions { groups: 1, width_per_group: 128, ..next };
    let networks: [Size; 5] = [
        ("resnet18", |path| ResNet::resnet18(path, 10)),
        ("resnet34", |path| ResNet::resnet34(path, 10)),
        ("resnet50", |path| ResNet::resnet50(path, 10)),
        ("resnet101", |path| ResNet::resnet101(path, 10)),
        ("resnet152", |path| ResNet::resnet152(path, 10)),
    ];
    let _alone = GENERATOR.lock().unwrap();
    let compare = |name: &str, model: &Model<ResNet>| {
        let golden = &golden["models"][name];
        assert_eq!(model.num_parameters() as u64, golden["parameters"].as_u64().unwrap(), "{name}");
        assert_eq!(model.state_dict().len() as u64, golden["tensors"].as_u64().unwrap(), "{name}");
        let state: StateDict = model.state_dict();
        for expected in golden["weights"].as_array().into_iter().flatten() {
            let name = expected["name"].as_str().unwrap();
            let found = state.get(name).unwrap();
            let first: Vec<f32> = serde_json::from_value(expected["first"].clone()).unwrap();
            let begin = Vec::<f32>::try_from(found.flatten(0, -1).narrow(0, 0, 3)).unwrap();
            let close = begin.iter().zip(&first).all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs());
            assert!(close, "{name}: {begin:?}, torchvision has {first:?}");
            let sum = found.sum(Kind::Double).double_value(&[]);
            let expected = expected["sum"].as_f64().unwrap();
            assert!((sum - expected).abs() < 1e-5, "{name}: {sum}, torchvision has {expected}");
        }
    };
    for (name, build) in networks {
        tch::manual_seed(golden["seed"].as_i64().unwrap());
        compare(name, &Model::new(build).unwrap());
    }
    compare("resnext50_32x4d", &Model::new(|path| ResNet::new(path, 10, next)).unwrap());
    compare("wide_resnet50_2", &Model::new(|path| ResNet::new(path, 10, wide)).unwrap());
}

#[test]
fn residual_branches_can_start_at_zero_and_wrong_shapes_are_refused() {
    let _alone = GENERATOR.lock().unwrap();
    let zero = ResNetOptions { zero_init_residual: true, ..ResNetOptions::basic([1, 1, 1, 1]) };
    let model = Model::new(|path| ResNet::new(path, 2, zero)).unwrap();
    for parameter in model.parameters().iter().filter(|p| p.name.contains(".bn")) {
        let largest = parameter.tensor.abs().max().double_value(&[]);
        let expected = if parameter.name.ends_with("bn1.weight") { 1.0 } else { 0.0 };
        assert_eq!(largest, expected, "{}", parameter.name);
    }
    let grouped = ResNetOptions { groups: 2, ..ResNetOptions::basic([1, 1, 1, 1]) };
    let error = Model::new(|path| ResNet::new(path, 2, grouped)).unwrap_err();
    assert!(error.to_string().contains("bottleneck"), "{error}");
}

#[test]
fn impossible_widths_are_refused() {
    let _alone = GENERATOR.lock().unwrap();
    for width_per_group in [-64, i64::MAX] {
        let options = ResNetOptions { width_per_group, ..ResNetOptions::bottleneck([1, 1, 1, 1]) };
        let error = Model::new(|p| ResNet::new(p, 10, options)).unwrap_err();
        assert!(matches!(error, Error::Build { .. }), "{error}");
    }
}
