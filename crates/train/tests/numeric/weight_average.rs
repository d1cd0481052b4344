//! Moving averages of weights, on one process. Those of models that ranks divide are in `products` and in
//! `pipeline::checkpoints`.

use std::sync::Arc;

use brigade_nn::{BatchNorm2d, Conv2d, Conv2dOptions, Model, Module, ParamPath};
use brigade_optim::Sgd;
use brigade_testkit::assert_close;
use brigade_torch::{NamedTensor, Result};
use brigade_train::{Accelerator, PreparedModel, WeightAverage};
use tch::{Device, Kind, Tensor};

#[derive(Debug)]
struct Net {
    conv: Conv2d,
    norm: BatchNorm2d,
}

impl Net {
    fn new(path: &ParamPath<'_>, width: i64) -> Self {
        Self {
            conv: Conv2d::new(path / "conv", 3, width, [3, 3], Conv2dOptions::default()),
            norm: BatchNorm2d::new(path / "norm", width),
        }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.norm.forward(&self.conv.forward(input)?)
    }
}

fn prepared(accelerator: &Accelerator, width: i64) -> PreparedModel<Net> {
    let model = Model::builder().kind(Kind::Double).build(|path| Net::new(path, width)).unwrap();
    accelerator.prepare(model).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_device(Device::Cpu).reshape([-1])).unwrap()
}

/// Parameters and floating-point buffers.
fn weights(model: &PreparedModel<Net>) -> Vec<(String, Vec<f64>)> {
    let buffers = model.inner().buffers().into_iter();
    let buffers = buffers.filter(|buffer| buffer.tensor.is_floating_point());
    let all = model.local_parameters().into_iter().chain(buffers);
    all.map(|NamedTensor { name, tensor }| (name, values(&tensor))).collect()
}

#[test]
fn averages_follow_their_formulas() {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).sharding(None).build().unwrap();
    let model = prepared(&accelerator, 4);
    let optimizer = Sgd::new(0.1).build(&model.local_parameters()).unwrap();
    let mut optimizer = accelerator.prepare(optimizer).unwrap();
    let exponential = WeightAverage::new(&model).unwrap();
    let mean = WeightAverage::of_model(model.inner()).unwrap();
    let mut all = vec![weights(&model)];
    for step in 0..4 {
        let input =
            Tensor::arange(2 * 3 * 25, (Kind::Double, Device::Cpu)).sin() * f64::from(step + 1);
        let loss = model.forward(&input.view([2, 3, 5, 5])).unwrap().square().mean(Kind::Double);
        accelerator.backward(&loss).unwrap();
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
        exponential.update(0.75).unwrap();
        mean.update_mean().unwrap();
        all.push(weights(&model));
    }
    let names: Vec<&str> = all[0].iter().map(|(name, _)| name.as_str()).collect();
    assert!(names.contains(&"norm.running_mean") && !names.contains(&"norm.num_batches_tracked"));
    let last = weights(&model);
    for (average, expected) in [
        (&exponential, [0.31640625, 0.10546875, 0.140625, 0.1875, 0.25]),
        (&mean, [0.0, 0.25, 0.25, 0.25, 0.25]),
    ] {
        assert_eq!(average.updates(), 4);
        average.swap().unwrap();
        for (place, (name, found)) in weights(&model).into_iter().enumerate() {
            let mut sum = vec![0.0; found.len()];
            for (weights, share) in all.iter().zip(expected) {
                sum.iter_mut()
                    .zip(&weights[place].1)
                    .for_each(|(sum, value)| *sum += share * value);
            }
            assert_close(&found, &sum, 1e-13, 1e-13);
            assert_eq!(values(&average.averages()[place].tensor), last[place].1, "{name}");
        }
        average.swap().unwrap();
        assert_eq!(weights(&model), last);
    }
    let error = exponential.update(1.5).unwrap_err().to_string();
    assert!(error.contains("decay of the average is 1.5"), "{error}");
    assert_eq!(exponential.updates(), 4);
}

#[test]
fn a_state_that_does_not_fit_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved");
    let with_average = |width: i64, of: i64| {
        let accelerator =
            Accelerator::builder().cpu(true).quiet(true).sharding(None).build().unwrap();
        let (model, averaged) = (prepared(&accelerator, width), prepared(&accelerator, of));
        let average = Arc::new(WeightAverage::new(&averaged).unwrap());
        drop(averaged);
        accelerator.checkpoints().register(&average);
        (accelerator, model, average)
    };
    let (accelerator, _model, _) = with_average(4, 4);
    accelerator.save_state(&path).unwrap();
    accelerator.checkpoints().wait().unwrap();

    let (accelerator, model, average) = with_average(4, 5);
    let found = || {
        (
            weights(&model),
            average.averages().iter().map(|it| values(&it.tensor)).collect::<Vec<_>>(),
        )
    };
    let before = found();
    let error = accelerator.load_state(&path).unwrap_err().to_string();
    assert!(error.contains("custom: `conv.weight` is"), "{error}");
    assert_eq!(found(), before);
}
