//! The architectures against torchvision, fastai and timm: names, values and gradients.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use brigade_models::{ResNet, XResNet};
use brigade_nn::{Kind, Layer, Model, ParamPath, Tensor};
use serde_json::Value;

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
fn filled<M>(model: &Model<M>) {
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
    fn of<M: Layer>(model: &mut Model<M>, images: &Tensor) -> Self {
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

/// Compares with the libraries' results in float32 by way of float64, where rounding leaves nothing to see:
/// so their distance is its own rounding and the same on every processor, and ours, which differs
/// from processor to processor, is held against it.
fn agrees<M: Layer>(name: &str, build: fn(&ParamPath<'_>) -> M) {
    let golden: Value = serde_json::from_str(include_str!("golden/models.json")).unwrap();
    let golden = &golden["models"][name];
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
    let theirs = Outcome::read(golden).errors(&exact);
    let ours = Outcome::of(&mut model, &images).errors(&exact);
    eprintln!("{name}: their rounding {theirs:?}, ours {ours:?}");
    let what = ["logits in training", "loss", "gradients", "logits in evaluation"];
    // float32 has 1.2e-7; 50 layers of sums, and batch statistics of few values, make more of it.
    let limits = [2e-4, 2e-4, 1e-2, 5e-4];
    for (((what, limit), theirs), ours) in what.iter().zip(limits).zip(theirs).zip(ours) {
        assert!(theirs < limit, "{what}: they are {theirs} away");
        // The same sums in another order: an error of the same size.
        assert!(ours < 16.0 * theirs, "{what}: {ours} away, they {theirs}");
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

#[test]
fn xresnet18_is_fastais() {
    agrees("xresnet18", |path| XResNet::xresnet18(path, 10));
}

#[test]
fn xresnet34_is_fastais() {
    agrees("xresnet34", |path| XResNet::xresnet34(path, 10));
}

#[test]
fn xresnet50_is_fastais() {
    agrees("xresnet50", |path| XResNet::xresnet50(path, 10));
}

#[test]
fn resnet50d_is_timms() {
    agrees("resnet50d", |path| ResNet::resnet50d(path, 10));
}
