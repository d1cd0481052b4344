//! Several ranks, whose messages go by Gloo through the host.

use std::time::Duration;

use brigade_data::{DataLoader, TensorDataset};
use brigade_models::Cnn;
use brigade_nn::Model;
use brigade_optim::Sgd;
use brigade_test_needs::needs;
use brigade_testkit::{DistTest, World};
use brigade_torch::{DeviceExt, Result, TPU};
use brigade_train::Accelerator;
use tch::{Device, Kind, Tensor};

use crate::training::{builder, images};

const SAMPLES: i64 = 16;
const LIMIT: Duration = Duration::from_secs(200);

/// Trains an epoch without shuffling; returns all parameters.
fn trained(accelerator: &Accelerator, batch_size: usize) -> Result<Vec<Tensor>> {
    tch::manual_seed(5);
    let model = Model::new(Cnn::new)?;
    // Statistics are those of a rank's own rows.
    let optimizer = Sgd::new(0.05).momentum(0.9).build(&model)?;
    let (pictures, labels) = images([SAMPLES, 1, 28, 28], 10, Device::Cpu);
    let loader = DataLoader::new(TensorDataset::new((pictures, labels))?).batch_size(batch_size);
    let (mut model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader))?;
    model.inner_mut().eval();
    for batch in &loader {
        let batch = batch?;
        let (pictures, labels) = &*batch;
        assert_eq!(pictures.device(), accelerator.device());
        let loss = model.forward(pictures)?.cross_entropy_for_logits(labels);
        accelerator.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    let parameters = model.inner().parameters();
    Ok(parameters.iter().map(|it| it.tensor.detach().to_device(Device::Cpu)).collect())
}

fn two_equal_one() -> Result<()> {
    let accelerator = builder(TPU).build()?;
    assert_eq!(accelerator.device().label(), "tpu:0");
    let found = trained(&accelerator, 4)?;
    let alone = builder(Device::Cpu).world(World::alone()).build()?;
    let expected = trained(&alone, 8)?;
    for (place, (one, other)) in found.iter().zip(&expected).enumerate() {
        let size = other.abs().max().double_value(&[]);
        let apart = (one - other).abs().max().double_value(&[]) / size;
        assert!(apart < 1e-4, "parameter {place}: {apart} apart");
    }
    Ok(())
}

#[needs(Tpu)]
fn two_ranks_equal_one() {
    let name = concat!(module_path!(), "::two_ranks_equal_one");
    DistTest::new(name, 2).time_limit(LIMIT).run_or_panic(|_| two_equal_one());
}

fn gathered_once() -> Result<()> {
    let accelerator = builder(TPU).build()?;
    for samples in [1, 5, 8] {
        let numbers = TensorDataset::new(Tensor::arange(samples, (Kind::Int64, Device::Cpu)))?;
        let loader = accelerator.prepare(DataLoader::new(numbers).batch_size(2))?;
        let mut seen: Vec<i64> = Vec::new();
        for batch in &loader {
            let batch = batch?;
            assert_eq!(batch.device(), TPU);
            let all = accelerator.gather_for_metrics(&batch, &*batch)?;
            seen.extend(Vec::<i64>::try_from(&all)?);
        }
        assert_eq!(seen, (0..samples).collect::<Vec<i64>>());
    }
    Ok(())
}

#[needs(Tpu)]
fn each_sample_is_gathered_once() {
    let name = concat!(module_path!(), "::each_sample_is_gathered_once");
    DistTest::new(name, 2).time_limit(LIMIT).run_or_panic(|_| gathered_once());
}
