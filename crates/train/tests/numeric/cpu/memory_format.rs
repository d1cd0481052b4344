//! Channels last: chosen where it is faster, equal to rounding, invisible in files.

use std::collections::BTreeMap;

use brigade_models::Cnn;
use brigade_nn::{Conv2d, Conv2dOptions, Linear, Model, weights};
use brigade_optim::Adam;
use brigade_testkit::{World, assert_close, dist_test};
use brigade_torch::{Result, has_onednn, is_channels_last};
use brigade_train::{Accelerator, PreparedModel};
use tch::{Kind, Tensor};

use crate::net;

fn images() -> (Tensor, Tensor) {
    let images = Tensor::arange(8 * 28 * 28, (Kind::Float, tch::Device::Cpu)).sin();
    let labels: Vec<i64> = (0..8).map(|index| (3 * index) % 10).collect();
    (images.view([8, 1, 28, 28]), Tensor::from_slice(&labels))
}

fn cnn(kind: Kind) -> Model<Cnn> {
    let model = Model::builder().kind(kind).build(Cnn::new).unwrap();
    net::fill(&model);
    for parameter in model.parameters() {
        let _ = tch::no_grad(|| parameter.tensor.shallow_clone().g_mul_scalar_(0.1));
    }
    model
}

fn formats<M>(model: &PreparedModel<M>) -> BTreeMap<String, bool> {
    let four = |tensor: &Tensor| tensor.dim() == 4;
    model
        .inner()
        .parameters()
        .into_iter()
        .filter(|parameter| four(&parameter.tensor))
        .map(|parameter| (parameter.name, is_channels_last(&parameter.tensor).unwrap()))
        .collect()
}

/// Three steps of Adam; the losses and the weights.
fn train(accelerator: &Accelerator) -> Result<(Vec<f64>, PreparedModel<Cnn>)> {
    let model = cnn(Kind::Float);
    let optimizer = Adam::default().lr(1e-4).build(&model)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let (images, labels) = images();
    let mut losses = Vec::new();
    for _ in 0..3 {
        let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
        optimizer.zero_grad()?;
        accelerator.backward(&loss)?;
        for parameter in model.inner().parameters() {
            let gradient = parameter.tensor.grad();
            assert_eq!(gradient.stride(), parameter.tensor.stride(), "{}", parameter.name);
        }
        optimizer.step()?;
        losses.push(loss.double_value(&[]));
    }
    Ok((losses, model))
}

fn built(channels_last: Option<bool>) -> Accelerator {
    let builder = Accelerator::builder().cpu(true).quiet(true);
    let builder = match channels_last {
        Some(on) => builder.channels_last(on),
        None => builder,
    };
    builder.build().unwrap()
}

#[test]
fn a_convolutional_model_is_put_into_the_faster_format() {
    let prepared = built(None).prepare(cnn(Kind::Float)).unwrap();
    assert!(formats(&prepared).values().all(|&last| last == has_onednn()), "{prepared:?}");
    for (accelerator, kind) in [(built(Some(false)), Kind::Float), (built(None), Kind::Double)] {
        let prepared = accelerator.prepare(cnn(kind)).unwrap();
        assert!(formats(&prepared).values().all(|&last| !last), "{prepared:?}");
    }
    let prepared = built(Some(true)).prepare(cnn(Kind::Double)).unwrap();
    assert_eq!(formats(&prepared).len(), 2);
    assert!(formats(&prepared).values().all(|&last| last), "asked for by name");
    // A model without convolutions does not benefit.
    let linear = Model::new(|path| Linear::new(path, 3, 2)).unwrap();
    let linear = built(Some(true)).prepare(linear).unwrap();
    assert!(linear.inner().parameters()[0].tensor.is_contiguous());
}

#[test]
fn inputs_follow_and_results_are_equal_to_rounding() {
    let (plain, contiguous) = train(&built(Some(false))).unwrap();
    let (last, converted) = train(&built(Some(true))).unwrap();
    assert_close(&last, &plain, 1e-4, 0.0);
    for (a, b) in contiguous.inner().parameters().iter().zip(converted.inner().parameters()) {
        let difference = (&a.tensor - &b.tensor).abs().max().double_value(&[]);
        assert!(difference < 2e-4, "{}: {difference}", b.name);
    }
    let options = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() };
    let model = Model::new(|path| Conv2d::new(path, 3, 4, [3, 3], options)).unwrap();
    let model = built(Some(true)).prepare(model).unwrap();
    let images = Tensor::ones([2, 3, 8, 8], tch::kind::FLOAT_CPU);
    assert!(is_channels_last(&model.forward(&images).unwrap()).unwrap());
}

#[test]
fn files_are_the_same_and_load_into_either() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    for on in [false, true] {
        let accelerator = built(Some(on));
        let model = accelerator.prepare(cnn(Kind::Float)).unwrap();
        let file = folder.path().join(format!("{on}.safetensors"));
        accelerator.save_model(&model, &file).unwrap();
        files.push(std::fs::read(&file).unwrap());
    }
    assert!(files[0] == files[1], "the order of memory got into the file");
    let accelerator = built(Some(true));
    let mut model = accelerator.prepare(Model::new(Cnn::new).unwrap()).unwrap();
    let file = folder.path().join("false.safetensors");
    accelerator.load_model(&mut model, &file).unwrap();
    assert!(formats(&model).values().all(|&last| last));
    let loaded = weights::load(&file).unwrap();
    for parameter in model.inner().parameters() {
        assert_eq!(&parameter.tensor.detach(), loaded.get(&parameter.name).unwrap());
    }
}

dist_test!(world = 2, dist_buckets_keep_the_order_of_memory, |world: World| -> Result<()> {
    // One after the other in one job: the second shares the first's connections.
    let first = Accelerator::builder().cpu(true).quiet(true).channels_last(false).build()?;
    let (plain, _) = train(&first)?;
    let second = Accelerator::builder().sharing(&first).quiet(true).channels_last(true).build()?;
    let (last, model) = train(&second)?;
    assert_close(&last, &plain, 1e-4, 0.0);
    assert!(formats(&model).values().all(|&last| last));
    // Ranks whose buckets would have different orders return an error.
    let mixed = Accelerator::builder()
        .sharing(&first)
        .quiet(true)
        .channels_last(world.rank.as_usize() == 0)
        .build()?;
    let error = mixed.prepare(cnn(Kind::Float)).unwrap_err().to_string();
    assert!(error.contains("channels_last"), "{error}");
    Ok(())
});
