//! Accumulation, clipping, and losses that are not finite.

use std::cell::RefCell;
use std::rc::Rc;

use brigade_learn::callbacks::{GradientAccumulation, GradientClip, TerminateOnNan};
use brigade_learn::{Event, Learner, LearnerState, Loaders};
use brigade_nn::{BatchNorm1d, Linear, ParamPath, Sequential};
use brigade_optim::Sgd;
use brigade_testkit::{World, dist_test, step};
use brigade_torch::NamedTensor;
use brigade_train::Accelerator;
use tch::Kind;

use crate::setup::*;

fn gradients(learner: &LearnerState) -> Vec<f64> {
    let all = learner.parameters().into_iter().flat_map(|it| {
        let gradient = it.tensor.grad().to_kind(Kind::Double).contiguous().view([-1]);
        Vec::<f64>::try_from(&gradient).unwrap()
    });
    all.collect()
}

type Steps = Rc<RefCell<Vec<usize>>>;

/// Notes after how many batches a step was made.
fn steps() -> (Steps, At) {
    let steps = Steps::default();
    let note = Rc::clone(&steps);
    let noting = At::new([Event::AfterStep], move |_, learner| {
        note.borrow_mut().push(learner.train_iter() + 1);
        Ok(())
    });
    (steps, noting)
}

fn accumulates(accelerator: &Accelerator) {
    step!("as one large batch");
    let batch = |samples: usize| {
        learner_of(accelerator, loaders(samples / accelerator.processes().num_processes()))
            .optimizer(Sgd::new(0.1))
    };
    let (noted, noting) = steps();
    let mut small = batch(8);
    small.fit(2, 0.1, (GradientAccumulation::new(24), noting)).unwrap();
    assert_eq!(*noted.borrow(), [3, 6, 9, 12], "a step after 24 samples, on any number of ranks");
    ranks_agree(&small);
    let mut large = batch(24);
    large.fit(2, 0.1, ()).unwrap();
    assert!(apart(&small.state_dict(), &large.state_dict()) < 1e-12);

    step!("gradients are local within a window");
    let seen: Rc<RefCell<Vec<Vec<f64>>>> = Rc::default();
    let keep = Rc::clone(&seen);
    let looking = At::new([Event::AfterBackward], move |_, learner| {
        keep.borrow_mut().push(gradients(learner));
        Ok(())
    });
    let mut learner = batch(8);
    learner.fit(1, 0.1, (GradientAccumulation::new(24), looking)).unwrap();
    for (batch, mine) in seen.borrow().iter().enumerate() {
        let all = accelerator.processes().gather_object(mine.clone()).unwrap();
        let equal = all.iter().all(|it| it == mine);
        assert_eq!(
            equal,
            accelerator.processes().num_processes() == 1 || (batch + 1) % 3 == 0,
            "batch {batch}"
        );
    }

    step!("what is left at the end of an epoch goes on in the next, and in no other fit");
    let (noted, noting) = steps();
    let mut learner = batch(8);
    learner.fit(2, 0.1, (GradientAccumulation::new(40), noting)).unwrap();
    assert_eq!(*noted.borrow(), [5, 10]);
    let looking_at = |batch: usize| {
        let seen: Rc<RefCell<Vec<f64>>> = Rc::default();
        let keep = Rc::clone(&seen);
        let looking = At::new([Event::BeforeStep], move |_, learner| {
            if learner.train_iter() == batch {
                *keep.borrow_mut() = gradients(learner);
            }
            Ok(())
        });
        (seen, looking)
    };
    // Gradients of the 48 samples of a fit that makes no step are not part of the next fit.
    let mut learner = batch(8);
    learner.fit(1, 0.1, GradientAccumulation::new(400)).unwrap();
    let (after, looking) = looking_at(0);
    learner.fit(1, 0.1, looking).unwrap();
    // The rate 0 does not change the weights: the seventh batch is the first of the second epoch.
    let (expected, looking) = looking_at(6);
    batch(8).fit(2, 0.0, looking).unwrap();
    close(&after.borrow(), &expected.borrow(), 1e-12);
}

fn clips(accelerator: &Accelerator) {
    step!("clipping");
    let norms: Rc<RefCell<Vec<(f64, f64)>>> = Rc::default();
    let at = |order: i32, put: fn(&mut Vec<(f64, f64)>, f64)| {
        let norms = Rc::clone(&norms);
        At::new([Event::BeforeStep], move |_, learner| {
            let norm = gradients(learner).iter().map(|it| it * it).sum::<f64>().sqrt();
            put(&mut norms.borrow_mut(), norm);
            Ok(())
        })
        .order(order)
    };
    let before = at(10, |norms, norm| norms.push((norm, 0.0)));
    let after = at(12, |norms, norm| norms.last_mut().unwrap().1 = norm);
    let mut learner = learner(accelerator);
    learner.fit(1, 0.1, (GradientClip::new(0.05), before, after)).unwrap();
    for (before, after) in norms.borrow().iter() {
        assert!(*before > 0.05, "nothing to clip: {before}");
        assert!((after - 0.05).abs() < 1e-5, "{after}");
    }
    ranks_agree(&learner);
}

/// One NaN among the samples of the last rank's third batch.
fn with_nan(accelerator: &Accelerator, accumulate: bool) {
    let batch = 8 / accelerator.processes().num_processes();
    let (inputs, classes) = data(48, 10);
    let _ = inputs.get(23).get(0).fill_(f64::NAN);
    // The statistics have included the NaN, and are restored.
    let normalised = |path: &ParamPath<'_>| {
        Sequential::new()
            .add(Linear::new(path / 0, FEATURES, 8))
            .add(BatchNorm1d::new(path / 1, 8))
            .add(Linear::new(path / 2, 8, CLASSES))
    };
    let broken = || {
        let train = loader((inputs.copy(), classes.copy()), batch);
        let data = Loaders::new(train, loader(data(13, 20), 3)).unwrap();
        let learner = Learner::new(accelerator, data, model(normalised)).unwrap();
        learner.optimizer(Sgd::new(0.1)).quiet(true)
    };
    let mut learner = broken();
    learner.add(TerminateOnNan::new());
    if accumulate {
        learner.add(GradientAccumulation::new(16));
    }
    learner.fit(3, 0.1, ()).unwrap();
    // As if the fit had ended before the batch with it.
    let mut sound = broken();
    let stop = At::new([Event::BeforeBatch], |_, learner| match learner.train_iter() {
        2 => brigade_learn::callback::Level::Fit.cancel(),
        _ => Ok(()),
    });
    if accumulate {
        sound.add(GradientAccumulation::new(16));
    }
    sound.fit(3, 0.1, stop).unwrap();
    // Statistics differ between ranks until something is computed with them.
    let loss = learner.validate().unwrap().loss;
    assert_eq!(sound.validate().unwrap().loss, loss);
    assert!(loss.is_finite());
    assert_eq!(weights(&learner), weights(&sound));
    ranks_agree(&learner);
    let is_finite = |it: &NamedTensor| bool::try_from(it.tensor.isfinite().all()).unwrap();
    assert!(learner.parameters().iter().chain(&learner.buffers()).all(is_finite));
    // Without it, all ranks return the same error, and the Learner can be used afterwards.
    let mut learner = broken();
    let error = learner.fit(1, 0.1, ()).unwrap_err().to_string();
    assert!(error.contains("loss") && error.contains("finite"), "{error}");
    // The weights are those before the batch, and the ranks can continue together.
    assert!(learner.parameters().iter().all(is_finite));
    learner.predictions().unwrap();
}

#[test]
fn gradients_alone() {
    accumulates(&alone());
    clips(&alone());
    with_nan(&alone(), false);
    with_nan(&alone(), true);
}

dist_test!(world = 2, dist_gradients, |_world: World| {
    let accelerator = joined();
    accumulates(&accelerator);
    clips(&accelerator);
    step!("one rank's NaN");
    with_nan(&accelerator, false);
    step!("one rank's NaN within a window");
    with_nan(&accelerator, true);
});
