//! The architectures against torchvision, fastai and timm: names, values and gradients.

use std::cell::LazyCell;

use brigade_models::{ResNet, ResNetOptions, UNet, UNetOptions, XResNet, XResNetOptions};
use brigade_nn::{Layer, Model, ParamPath};
use brigade_test_device::{numeric_device, on_device, perturb};
use brigade_torch::Activation;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::fill::{fill, filled};

/// Which golden file: they differ in the loss and in what of the output they hold.
#[derive(Clone, Copy)]
pub(crate) enum Table {
    /// `models.json`: the cross-entropy, and all logits.
    Classifiers,
    /// `fastai.json`: the mean of squares, and some 200 of the numbers.
    Fastai,
}

impl Table {
    fn read(self) -> Value {
        let text = match self {
            Self::Classifiers => include_str!("../golden/models.json"),
            Self::Fastai => include_str!("../golden/fastai.json"),
        };
        serde_json::from_str(text).unwrap()
    }

    fn fields(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Classifiers => {
                ("train_logits", "eval_logits_after_one_train_forward", "train_loss")
            }
            Self::Fastai => ("train_output", "eval_output_after_one_train_forward", "loss"),
        }
    }

    fn sample(self, output: &Tensor) -> Tensor {
        let flat = output.flatten(0, -1);
        match self {
            Self::Classifiers => flat,
            Self::Fastai => flat.slice(0, None, None, (flat.numel() as i64 / 200).max(1)),
        }
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
    fn of<M: Layer>(model: &mut Model<M>, images: &Tensor, table: Table) -> Self {
        let images = images.to_kind(model.kind());
        model.train();
        let logits = model.forward(&images).unwrap();
        let loss = match table {
            Table::Classifiers => {
                logits.cross_entropy_for_logits(&on_device(&Tensor::from_slice(&[3i64, 7])))
            }
            Table::Fastai => logits.square().mean(model.kind()),
        };
        loss.backward();
        let gradients = model.parameters().into_iter().map(|parameter| {
            (parameter.name, parameter.tensor.grad().abs().sum(Kind::Double).double_value(&[]))
        });
        let gradients = gradients.collect();
        model.eval();
        Self {
            train_logits: table.sample(&logits.detach().to_kind(Kind::Double)),
            train_loss: loss.double_value(&[]),
            gradients,
            eval_logits: table
                .sample(&tch::no_grad(|| model.forward(&images).unwrap()).to_kind(Kind::Double)),
        }
    }

    fn read(golden: &Value, table: Table) -> Self {
        let numbers = |value: &Value| match table {
            Table::Classifiers => {
                let rows: Vec<Vec<f32>> = serde_json::from_value(value.clone()).unwrap();
                let numbers = rows.concat();
                on_device(&Tensor::from_slice(&numbers).to_kind(Kind::Double))
            }
            Table::Fastai => {
                let numbers: Vec<f32> = serde_json::from_value(value.clone()).unwrap();
                on_device(&Tensor::from_slice(&numbers).to_kind(Kind::Double))
            }
        };
        let gradients = golden["grad_abs_sums"].as_object().unwrap();
        Self {
            train_logits: numbers(&golden[table.fields().0]),
            train_loss: golden[table.fields().2].as_f64().unwrap(),
            gradients: gradients
                .iter()
                .map(|(name, sum)| (name.clone(), sum.as_f64().unwrap()))
                .collect(),
            eval_logits: numbers(&golden[table.fields().1]),
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
pub(crate) fn agrees<M: Layer>(table: Table, name: &str, build: fn(&ParamPath<'_>) -> M) {
    let golden = table.read();
    let golden = &golden["models"][name];
    let mut model = Model::builder().device(numeric_device()).build(build).unwrap();
    assert_eq!(model.num_parameters() as u64, golden["parameters"].as_u64().unwrap());
    let found: Vec<(String, Vec<i64>)> =
        model.state_dict().into_iter().map(|(name, tensor)| (name, tensor.size())).collect();
    let expected: Vec<(String, Vec<i64>)> =
        serde_json::from_value(golden["state_dict"].clone()).unwrap();
    assert_eq!(found, expected);

    filled(&model);
    let shape: Vec<i64> = serde_json::from_value(golden["input"].clone()).unwrap();
    let images = fill(&shape, 900, -1.0, 1.0);
    let mut exact =
        Model::builder().device(numeric_device()).kind(Kind::Double).build(build).unwrap();
    filled(&exact);
    let exact = Outcome::of(&mut exact, &images, table);
    let theirs = Outcome::read(golden, table).errors(&exact);
    let ours = Outcome::of(&mut model, &images, table).errors(&exact);
    eprintln!("{name}: their rounding {theirs:?}, ours {ours:?}");
    // The effect of rounding on each figure is computed here: the reference figures come from one processor, and their
    // agreement may be chance.
    let perturbed = LazyCell::new(|| {
        let of_seed = |seed| {
            let mut model = Model::builder().device(numeric_device()).build(build).unwrap();
            filled(&model);
            perturb(model.parameters().into_iter().map(|it| it.tensor), seed);
            Outcome::of(&mut model, &images, table).errors(&exact)
        };
        let [one, other] = [1, 2].map(of_seed);
        eprintln!("{name}: perturbed weights {one:?}, {other:?}");
        [0, 1, 2, 3].map(|place| one[place].max(other[place]))
    });
    let what = ["logits in training", "loss", "gradients", "logits in evaluation"];
    // float32 has 1.2e-7; 50 layers of sums, and batch statistics of few values, make more of it.
    let limits = match table {
        Table::Classifiers => [2e-4, 2e-4, 1e-2, 5e-4],
        // Six stages leave two values per channel, whose variance loses digits.
        Table::Fastai => [1e-3, 1e-3, 3e-2, 5e-4],
    };
    for (place, what) in what.into_iter().enumerate() {
        let (limit, theirs, ours) = (limits[place], theirs[place], ours[place]);
        assert!(theirs < limit, "{what}: they are {theirs} away");
        // The same sums in another order: an error of the same size. A GPU may take Winograd's convolutions, whose error
        // is several times that.
        let most = if numeric_device() == Device::Cpu { 16.0 } else { 128.0 };
        let fits = ours < most * theirs || ours < most * perturbed[place];
        assert!(
            fits,
            "{what}: {ours} away, they {theirs}, with perturbed weights {}",
            perturbed[place]
        );
    }
}

#[test]
fn resnet18_is_torchvisions() {
    agrees(Table::Classifiers, "resnet18", |path| ResNet::resnet18(path, 10));
}

#[test]
fn xresnet18_is_fastais() {
    agrees(Table::Classifiers, "xresnet18", |path| XResNet::xresnet18(path, 10));
}

fn unet(path: &ParamPath<'_>, options: UNetOptions) -> UNet {
    UNet::new(path, ResNetOptions::basic([2, 2, 2, 2]), options)
}

#[test]
fn the_unet_is_fastais() {
    agrees(Table::Fastai, "unet", |path| unet(path, UNetOptions::new(5)));
    agrees(Table::Fastai, "unet_blur", |path| {
        unet(path, UNetOptions { blur: true, ..UNetOptions::new(5) })
    });
    agrees(Table::Fastai, "unet_without_cross", |path| {
        unet(path, UNetOptions { last_cross: false, ..UNetOptions::new(5) })
    });
}

#[test]
fn xresnets_options_are_fastais() {
    agrees(Table::Fastai, "xresnet18_mish_widen_channels", |path| {
        let options = XResNetOptions {
            activation: Activation::Mish,
            widen: 0.5,
            in_channels: 1,
            stem: [16, 24, 64],
            ..XResNetOptions::basic([2, 2, 2, 2])
        };
        XResNet::new(path, 10, &options)
    });
    agrees(Table::Fastai, "xresnet18_attention", |path| {
        let options =
            XResNetOptions { self_attention: true, ..XResNetOptions::basic([2, 2, 2, 2]) };
        XResNet::new(path, 10, &options)
    });
    agrees(Table::Fastai, "xresnet18_deep", |path| {
        XResNet::new(path, 10, XResNetOptions::basic([2, 2, 2, 2, 1, 1]))
    });
    agrees(Table::Fastai, "xse_resnext18", |path| {
        let options = XResNetOptions::basic([2, 2, 2, 2]).grouped();
        XResNet::new(path, 10, XResNetOptions { reduction: Some(16), ..options })
    });
}
