//! Image models in stages. Batch normalisations have the statistics of a micro-batch of all data ranks.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use brigade_models::{
    ConvNeXt, ConvNeXtOptions, ResNet, ResNetBody, ResNetOptions, VisionTransformer,
    VisionTransformerOptions, XResNet, XResNetOptions,
};
use brigade_nn::{Model, Module, ParamPath};
use brigade_optim::Sgd;
use brigade_sharding::pipeline::Schedule;
use brigade_sharding::{Axis, Mesh, TensorPlan};
use brigade_testkit::assert_close;
use brigade_torch::{Result, backward};
use brigade_train::{Accelerator, PipelineOptions};
use tch::{Device, Kind, Tensor};

use super::{DRAWS, values};
use crate::sharding::on_ranks;

const STEPS: i64 = 2;
const MICROS: usize = 2;
const ROWS: i64 = 4;
/// Width and height, of which the last maps have 2 x 2 pixels: variances of few values make gradients ill-conditioned.
const SIZE: i64 = 48;

/// Images and labels of a data rank's batch.
fn batch(step: i64, data: i64) -> (Tensor, Tensor) {
    let count = ROWS * 3 * SIZE * SIZE;
    let first = (step * 2 + data) * count;
    let places = Tensor::arange_start(first, first + count, (Kind::Double, Device::Cpu));
    let images = (places * 0.37).sin().view([ROWS, 3, SIZE, SIZE]);
    let labels = Tensor::arange_start(step + data, step + data + ROWS, (Kind::Int64, Device::Cpu));
    (images, labels.remainder(5))
}

fn loss(logits: &Tensor, labels: &Tensor) -> Tensor {
    // `cross_entropy_for_logits` computes in float32.
    logits.log_softmax(-1, Kind::Double).nll_loss(labels)
}

const CLASSES: i64 = 5;

fn resnet(path: &ParamPath<'_>) -> ResNet {
    ResNet::new(path, CLASSES, ResNetOptions::basic([1, 1, 1, 1]))
}

fn xresnet(path: &ParamPath<'_>) -> XResNet {
    let options = XResNetOptions { widen: 0.25, ..XResNetOptions::basic([1, 2, 1, 1]) };
    XResNet::new(path, CLASSES, options)
}

fn convnext(path: &ParamPath<'_>) -> ConvNeXt {
    let options = ConvNeXtOptions {
        channels: [8, 8, 16, 16],
        blocks: [1, 1, 2, 1],
        in_channels: 3,
        stochastic_depth: 0.0,
        layer_scale: 0.5,
    };
    ConvNeXt::new(path, CLASSES, options)
}

fn vit(path: &ParamPath<'_>) -> VisionTransformer {
    let options = VisionTransformerOptions {
        image_size: SIZE,
        depth: 5,
        ..VisionTransformerOptions::new(16, 2)
    };
    VisionTransformer::new(path, CLASSES, options)
}

fn build<M>(accelerator: &Accelerator, new: &impl Fn(&ParamPath<'_>) -> M) -> Model<M> {
    let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
    tch::manual_seed(7);
    let builder = accelerator.parallel().model_builder(TensorPlan::new()).kind(Kind::Double);
    builder.build(new).unwrap()
}

/// Losses of the steps, and the state after them, of one process that reads the micro-batches of all data ranks, with
/// images that are multiplied by a number.
fn alone<M>(
    new: &impl Fn(&ParamPath<'_>) -> M,
    data: i64,
    factor: f64,
) -> (Vec<f64>, BTreeMap<String, Vec<f64>>)
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
    let accelerator = Accelerator::builder().cpu(true).quiet(true).sharding(None).build().unwrap();
    let mut model = build(&accelerator, new);
    let mut optimizer = Sgd::new(0.01).build(&model).unwrap();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let parts: Vec<_> = (0..data).map(|data| batch(step, data)).collect();
        let mut total = 0.0;
        for micro in 0..MICROS as i64 {
            let rows = ROWS / MICROS as i64;
            let part = |tensor: &Tensor| tensor.narrow(0, micro * rows, rows);
            let images: Vec<_> = parts.iter().map(|(images, _)| part(images) * factor).collect();
            let labels: Vec<_> = parts.iter().map(|(_, labels)| part(labels)).collect();
            let logits = model.forward(&Tensor::cat(&images, 0)).unwrap();
            let own = loss(&logits, &Tensor::cat(&labels, 0)) / MICROS as f64;
            backward(&own).unwrap();
            total += own.double_value(&[]);
        }
        losses.push(total);
        optimizer.step().unwrap();
        model.zero_grad().unwrap();
    }
    let state = model.state_dict().into_iter();
    (losses, state.map(|(name, tensor)| (name, values(&tensor))).collect())
}

fn assert_near(found: &[f64], expected: &[f64], allowed: f64, about: &str) {
    assert_eq!(found.len(), expected.len(), "{about}");
    let pairs = found.iter().zip(expected);
    let most = pairs.fold(0.0f64, |most, (one, other)| most.max((one - other).abs()));
    assert!(most <= allowed, "{about}: off by {most}, allowed {allowed}");
}

/// Trains on two stages, with a number of data ranks and a schedule, against one process.
fn check<M>(new: impl Fn(&ParamPath<'_>) -> M + Sync, runs: &[(usize, Schedule)])
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
    // Errors of rounding grow as a change of the images in their last bits does.
    let expected = [1, 2].map(|data| {
        let (exact, near) = (alone(&new, data, 1.0), alone(&new, data, 1.0 + 4.0 * f64::EPSILON));
        let change = |name: &String| {
            let pairs = exact.1[name].iter().zip(&near.1[name]);
            pairs.fold(0.0f64, |most, (one, other)| most.max((one - other).abs()))
        };
        let allowed: BTreeMap<String, f64> =
            exact.1.keys().map(|name| (name.clone(), 20.0 * change(name) + 1e-13)).collect();
        let worst = allowed.values().fold(0.0, |most: f64, one| most.max(*one));
        assert!(worst < 1e-8, "{worst}");
        (exact.0, exact.1, allowed)
    });
    let expected = Mutex::new(expected);
    let mesh = |data| Mesh::builder().pipeline(2).replicate(data).build(2 * data).unwrap();
    for &(data, schedule) in runs {
        let mesh = mesh(data);
        let found = on_ranks(mesh.world_size(), |builder, rank| {
            tch::set_num_threads(1);
            let options = PipelineOptions::new(MICROS).schedule(schedule);
            let builder = builder.sharding(None).mesh(mesh.clone()).pipeline_options(options);
            let accelerator = builder.sync_batch_norm(true).build().unwrap();
            let model = build(&accelerator, &new);
            let optimizer = Sgd::new(0.01).build(&model).unwrap();
            let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
            let own = mesh.coordinate(rank, Axis::Replicate).unwrap() as i64;
            let (losses, state, allowed) = expected.lock().unwrap()[data - 1].clone();
            for (step, expected) in losses.iter().enumerate() {
                let step_loss = accelerator
                    .forward_backward(
                        &model,
                        &batch(step as i64, own),
                        |model, (images, labels)| Ok(loss(&model.forward(images)?, labels)),
                    )
                    .unwrap();
                let all = Tensor::from(step_loss.value());
                let all = accelerator.processes().reduce(&all, brigade_torch::ReduceOp::Sum);
                let found = all.unwrap().double_value(&[]) / mesh.world_size() as f64;
                assert_close(&[found], &[*expected], 1e-10, 1e-12);
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
            }
            let found = model.inner().state_dict();
            for (name, tensor) in found.iter() {
                let about = format!("{name} of {schedule} on {mesh}");
                assert_near(&values(tensor), &state[name], allowed[name], &about);
            }
            (found.names().map(str::to_owned).collect::<Vec<_>>(), state.len())
        });
        for ranks in found.chunks(data).collect::<Vec<_>>().windows(2) {
            // Each stage has a part of the tensors, and both together have all.
            let (first, last) = (&ranks[0][0], &ranks[1][0]);
            assert!(!first.0.is_empty() && !last.0.is_empty());
            assert_eq!(first.0.len() + last.0.len(), first.1);
        }
    }
}

#[test]
fn residual_networks_in_stages_are_those_of_one_process() {
    check(
        resnet,
        &[
            (1, Schedule::OneForwardOneBackward),
            (1, Schedule::Interleaved),
            (2, Schedule::OneForwardOneBackward),
            (2, Schedule::ZeroBubble),
        ],
    );
    check(xresnet, &[(1, Schedule::Interleaved), (2, Schedule::OneForwardOneBackward)]);
}

#[test]
fn vision_transformers_and_convnext_in_stages_are_those_of_one_process() {
    let runs = [(1, Schedule::Interleaved), (2, Schedule::OneForwardOneBackward)];
    check(vit, &runs);
    check(convnext, &runs);
}

/// The error of a step.
fn refusal<M>(accelerator: &Accelerator, new: &impl Fn(&ParamPath<'_>) -> M) -> String
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
    let model = accelerator.prepare(build(accelerator, new)).unwrap();
    let outcome = accelerator.forward_backward(&model, &batch(0, 0), |model, (images, labels)| {
        Ok(loss(&model.forward(images)?, labels))
    });
    outcome.unwrap_err().to_string()
}

#[test]
fn statistics_of_one_rank_and_maps_of_other_ranks_are_refused_by_name() {
    on_ranks(2, |builder, _| {
        let mesh = Mesh::builder().pipeline(2).build(2).unwrap();
        let builder = builder.sharding(None).mesh(mesh);
        let builder = builder.pipeline_options(PipelineOptions::new(MICROS));
        let accelerator = builder.build().unwrap();
        let residual = refusal(&accelerator, &resnet);
        assert!(residual.contains("the batch normalisation `bn1`"), "{residual}");
        let extended = refusal(&accelerator, &xresnet);
        assert!(extended.contains("the batch normalisation `0.1`"), "{extended}");
        for error in [residual, extended] {
            assert!(error.contains("`AcceleratorBuilder::sync_batch_norm`"), "{error}");
        }

        let features = |path: &ParamPath<'_>| ResNetBody::new(path, ResNetOptions::basic([1; 4]));
        let body = {
            let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
            accelerator.parallel().model_builder(TensorPlan::new()).build(features).unwrap()
        };
        let images = Tensor::zeros([1, 3, 32, 32], (Kind::Float, Device::Cpu));
        let found: Result<[Tensor; 5]> = body.module().features(&images);
        let error = found.unwrap_err().to_string();
        assert!(error.contains("are on several ranks of the pipeline"), "{error}");
    });
}
