//! The Learner on a TPU, or on what TorchTPU's plug-in has instead: columns of categories and of numbers.

#![allow(clippy::print_stdout, reason = "what was measured")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use brigade_data::{DataLoader, TensorDataset};
use brigade_learn::{Learner, Loaders};
use brigade_metrics::Accuracy;
use brigade_nn::{BatchNorm1d, Embedding, Linear, Model, Module, ParamPath};
use brigade_test_needs::needs;
use brigade_torch::{Result, TPU};
use brigade_train::{Accelerator, Precision};
use tch::{Device, Kind, Tensor};

const ROWS: i64 = 96;
const CATEGORIES: i64 = 7;

struct Tabular {
    embedding: Embedding,
    norm: BatchNorm1d,
    hidden: Linear,
    head: Linear,
}

impl Tabular {
    fn new(path: &ParamPath<'_>) -> Self {
        Self {
            embedding: Embedding::new(path / "embedding", CATEGORIES, 4),
            norm: BatchNorm1d::new(path / "norm", 3),
            hidden: Linear::new(path / "hidden", 7, 16),
            head: Linear::new(path / "head", 16, 2),
        }
    }
}

impl Module<(&Tensor, &Tensor)> for Tabular {
    type Output = Tensor;

    fn forward(&self, (categories, numbers): (&Tensor, &Tensor)) -> Result<Tensor> {
        let parts = [self.embedding.forward(categories)?, self.norm.forward(numbers)?];
        self.head.forward(&self.hidden.forward(&Tensor::f_cat(&parts, 1)?)?.f_relu()?)
    }
}

/// Returns the loss and the accuracy of a validation after three epochs, and all predictions.
fn fitted(device: Device, precision: Precision) -> (f64, f64, Tensor) {
    tch::manual_seed(2);
    let accelerator = Accelerator::builder().device(device).quiet(true);
    let accelerator = accelerator.mixed_precision(precision).build().unwrap();
    let numbers = (Tensor::arange(ROWS * 3, (Kind::Float, Device::Cpu)) * 0.7).sin();
    let numbers = numbers.reshape([ROWS, 3]);
    let categories = Tensor::arange(ROWS, (Kind::Int64, Device::Cpu)).remainder(CATEGORIES);
    let labels = numbers.select(1, 0).gt(0.0).logical_or(&categories.eq(3)).to_kind(Kind::Int64);
    let loader = || {
        let rows = ((categories.shallow_clone(), numbers.shallow_clone()), labels.shallow_clone());
        DataLoader::new(TensorDataset::new(rows).unwrap()).batch_size(16).seed(4)
    };
    let loaders = Loaders::<(Tensor, Tensor)>::new(loader().shuffle(true), loader()).unwrap();
    let model = Model::new(Tabular::new).unwrap();
    let learner = Learner::new(&accelerator, loaders, model).unwrap();
    let mut learner = learner.metrics((Accuracy,)).quiet(true);
    learner.fit_one_cycle(3, 1e-2, ()).unwrap();
    let validation = learner.validate().unwrap();
    let accuracy = validation.metric("accuracy").unwrap();
    let predictions = learner.predictions().unwrap().predictions.to_device(Device::Cpu);
    (validation.loss, accuracy, predictions)
}

fn on_both(precision: Precision, allowed: f64) {
    let (loss, accuracy, predictions) = fitted(Device::Cpu, precision);
    assert!(accuracy > 0.7, "the training has taught nothing: {accuracy}");
    let found = fitted(TPU, precision);
    let apart = (&found.2 - &predictions).abs().max().double_value(&[]);
    println!("losses {} and {loss}, predictions {apart:.1e} apart", found.0);
    assert!((found.0 - loss).abs() < allowed * loss, "loss {}, {loss} on the CPU", found.0);
    assert!((found.1 - accuracy).abs() <= 0.05, "accuracy {}, {accuracy} on the CPU", found.1);
    assert!(apart < 10.0 * allowed, "{apart} apart");
}

#[needs(Tpu)]
fn a_learner_of_tables_learns_as_on_the_cpu() {
    on_both(Precision::No, 1e-3);
}

#[needs(Tpu)]
fn a_learner_of_tables_learns_in_bf16_as_on_the_cpu() {
    on_both(Precision::Bf16, 0.03);
}

brigade_test_needs::main!();
