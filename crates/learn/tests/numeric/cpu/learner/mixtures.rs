//! Mixtures of samples, precisions and memory formats, on one rank and on two.

use std::cell::RefCell;
use std::rc::Rc;

use brigade_data::DataLoader;
use brigade_learn::callbacks::{CutMix, MixDraw, MixSource, MixUp};
use brigade_learn::loss::{CrossEntropy, LabelSmoothingCrossEntropy, Loss};
use brigade_learn::{Event, Learner, Loaders};
use brigade_metrics::Accuracy;
use brigade_nn::{
    BatchNorm2d, Conv2d, Conv2dOptions, Flatten, Linear, ParamPath, Relu, Sequential,
};
use brigade_testkit::{World, dist_test, step};
use brigade_train::{Accelerator, Precision};
use tch::{Kind, Tensor};

use crate::fill::uniform_tensor;
use crate::setup::*;

/// Each sample's partner is the next one, in shares that the test knows.
#[derive(Debug)]
struct Next(f64);

impl MixSource for Next {
    fn draw(&mut self, _batch: usize, rows: usize, lambdas: usize, _alpha: f64) -> MixDraw {
        let partners = (0..rows).map(|row| ((row + 1) % rows) as i64).collect();
        MixDraw { lambda: vec![self.0; lambdas], partners, center: [0.5, 0.5] }
    }
}

fn conv(path: &ParamPath<'_>) -> Sequential {
    let options = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() };
    Sequential::new()
        .add(Conv2d::new(path / 0, 3, 8, [3, 3], options))
        .add(BatchNorm2d::new(path / 1, 8))
        .add(Relu)
        .add_fn(|maps| maps.adaptive_avg_pool2d([2, 2]))
        .add(Flatten)
        .add(Linear::new(path / 5, 32, CLASSES))
}

/// Images of 8 x 8 pixels whose classes show in their channels.
fn images(rows: i64, stream: u64) -> (Tensor, Tensor) {
    let (_, classes) = data(rows, stream);
    let noise = uniform_tensor(&[rows, 3, 8, 8], -1.0, 1.0, stream + 2).to_kind(Kind::Double);
    (noise + classes.one_hot(3).view([rows, 3, 1, 1]).to_kind(Kind::Double), classes)
}

fn image_learner(accelerator: &Accelerator) -> Learner {
    let batch = 8 / accelerator.processes().num_processes();
    let data = Loaders::new(loader(images(32, 30), batch), loader(images(8, 40), 4)).unwrap();
    Learner::new(accelerator, data, model(conv)).unwrap().quiet(true).metrics(Accuracy)
}

/// Inputs and loss of the first training batch as the model and backward got them.
fn seen(
    learner: &mut Learner,
    callbacks: impl brigade_learn::callback::Callback,
) -> (Tensor, Tensor, f64) {
    let kept = Rc::new(RefCell::new(None));
    let keep = Rc::clone(&kept);
    let look = At::new([Event::AfterLoss], move |_, learner| {
        if learner.is_training() && learner.train_iter() == 0 {
            let loss = learner.batch_loss().unwrap().double_value(&[]);
            let output = learner.predictions().unwrap().detach();
            *keep.borrow_mut() = Some((learner.inputs()[0].copy(), output, loss));
        }
        Ok(())
    });
    learner.fit(1, 0.01, (callbacks, look)).unwrap();
    kept.take().unwrap()
}

/// The first batch of this rank.
fn first(accelerator: &Accelerator, images: &(Tensor, Tensor)) -> (Tensor, Tensor) {
    let rows = 8 / accelerator.processes().num_processes() as i64;
    let begin = rows * accelerator.processes().process_index() as i64;
    (images.0.narrow(0, begin, rows), images.1.narrow(0, begin, rows))
}

fn mixes(accelerator: &Accelerator) {
    let (inputs, classes) = first(accelerator, &images(32, 30));
    let (other, others) = (inputs.roll([-1], [0]), classes.roll([-1], [0]));
    let mixed_loss = |output: &Tensor, loss: &dyn Loss, share: f64| {
        let of = |targets: &Tensor| loss.forward(output, targets).unwrap().double_value(&[]);
        share * of(&classes) + (1.0 - share) * of(&others)
    };

    step!("MixUp");
    let mut learner = image_learner(accelerator);
    let (mixed, output, loss) = seen(&mut learner, MixUp::new(0.4).source(Next(0.2)));
    // The larger share is the sample's own. Shares are numbers of 32 bits.
    let expected = &inputs * 0.8 + &other * 0.2;
    assert!((mixed - expected).abs().max().double_value(&[]) < 1e-6);
    let expected = mixed_loss(&output, &CrossEntropy::default(), 0.8);
    close(&[loss], &[expected], 1e-6);
    assert_eq!(learner.recorder().last("valid_loss"), Some(learner.validate().unwrap().loss));
    ranks_agree(&learner);

    step!("MixUp with label smoothing");
    let smooth = || LabelSmoothingCrossEntropy::new(0.2);
    let mut learner = image_learner(accelerator).loss(smooth());
    let (_, output, loss) = seen(&mut learner, MixUp::new(0.4).source(Next(0.7)));
    close(&[loss], &[mixed_loss(&output, &smooth(), 0.7)], 1e-6);

    step!("CutMix");
    let mut learner = image_learner(accelerator);
    let (mixed, output, loss) = seen(&mut learner, CutMix::new(1.0).source(Next(0.75)));
    // A quarter of the area, around the centre.
    let expected = inputs.copy();
    expected.narrow(2, 2, 4).narrow(3, 2, 4).copy_(&other.narrow(2, 2, 4).narrow(3, 2, 4));
    assert_eq!(bits(&mixed), bits(&expected));
    close(&[loss], &[mixed_loss(&output, &CrossEntropy::default(), 0.75)], 1e-6);
    ranks_agree(&learner);

    step!("drawn shares");
    let drawn = |learner: &mut Learner| {
        let (mixed, ..) = seen(learner, MixUp::new(0.4));
        learner.fit(1, 0.01, CutMix::new(1.0)).unwrap();
        ranks_agree(learner);
        bits(&mixed)
    };
    let one = drawn(&mut image_learner(accelerator).seed(3));
    assert_eq!(drawn(&mut image_learner(accelerator).seed(3)), one);
    let other = drawn(&mut image_learner(accelerator).seed(4));
    assert_ne!(other, one);

    step!("nothing to mix");
    let (mixed, ..) = seen(&mut image_learner(accelerator), MixUp::new(0.0).source(Next(1.0)));
    assert_eq!(bits(&mixed), bits(&inputs));
}

fn precisions(accelerator: &Accelerator) {
    step!("bf16");
    let halved = || {
        let batch = 8 / accelerator.processes().num_processes();
        let floats = |(inputs, classes): (Tensor, Tensor)| (inputs.to_kind(Kind::Float), classes);
        let loader =
            |rows, stream, batch| -> DataLoader<_> { loader(floats(images(rows, stream)), batch) };
        let data = Loaders::new(loader(32, 30, batch), loader(8, 40, 4)).unwrap();
        let mut first = model(conv);
        first.to_kind(Kind::Float).unwrap();
        Learner::new(accelerator, data, first).unwrap().quiet(true)
    };
    let run = |mut learner: Learner| {
        learner.fit(2, 0.01, ()).unwrap();
        ranks_agree(&learner);
        learner
    };
    let (full, half) = (run(halved()), run(halved().mixed_precision(Precision::Bf16).unwrap()));
    assert!(half.parameters().iter().all(|it| it.tensor.kind() == Kind::Float));
    let distance = apart(&full.state_dict(), &half.state_dict());
    assert!(distance > 0.0 && distance < 0.1, "{distance}");
    close(half.recorder().losses(), full.recorder().losses(), 0.05);

    step!("channels last");
    let run = |on: bool| {
        let mut learner = image_learner(accelerator).channels_last(on).unwrap();
        learner.fit(2, 0.01, ()).unwrap();
        ranks_agree(&learner);
        learner.recorder().losses().to_vec()
    };
    close(&run(true), &run(false), 1e-9);
}

#[test]
fn mixtures_and_precisions_alone() {
    mixes(&alone());
    precisions(&alone());
}

dist_test!(world = 2, dist_mixtures_and_precisions, |_world: World| {
    let accelerator = joined();
    mixes(&accelerator);
    precisions(&accelerator);
});
