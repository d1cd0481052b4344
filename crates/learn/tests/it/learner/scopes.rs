//! Scopes in which ranks work together, errors within them, and the learning-rate finder, which leaves no trace.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use brigade_learn::callbacks::{GradientClip, ParamScheduler, SaveModel, TerminateOnNan};
use brigade_learn::{Event, Hyper, Learner, LrFindOptions, Suggestion};
use brigade_nn::{Linear, ParamPath};
use brigade_optim::AdamW;
use brigade_schedule::Annealing;
use brigade_testkit::{World, dist_test, step};
use brigade_torch::Error;
use brigade_train::Accelerator;

use crate::setup::*;

fn split(accelerator: &Accelerator) -> Learner {
    learner(accelerator).split_by_prefix(&[&["0", "1"], &["3"]]).unwrap()
}

fn failing() -> At {
    At::new([Event::AfterBackward], |_, learner| match learner.train_iter() {
        1 => Err(Error::custom("on purpose").into()),
        _ => Ok(()),
    })
}

fn scopes(accelerator: &Accelerator) {
    step!("fits within and without a scope");
    let passes = |learner: &mut Learner| {
        learner.fit(1, 0.1, ())?;
        learner.freeze()?;
        let before = learner.validate()?.loss;
        learner.fit(1, 0.1, ())?;
        learner.unfreeze()?;
        learner.fit_one_cycle(1, 1e-2..0.1, ())?;
        Ok((before.to_bits(), bits(&learner.predictions()?.predictions)))
    };
    let mut apart = split(accelerator);
    let expected = passes(&mut apart).unwrap();
    assert!(!apart.is_distributed());
    let mut together = split(accelerator);
    let found = together.distributed(|learner| {
        assert!(learner.is_distributed());
        let found = learner.distributed(passes)?;
        assert!(learner.is_distributed(), "the outer scope goes on");
        Ok(found)
    });
    assert_eq!(found.unwrap(), expected);
    assert!(!together.is_distributed());
    assert_eq!(weights(&together), weights(&apart));
    ranks_agree(&together);

    step!("errors within a scope");
    let mut learner = split(accelerator);
    let error = learner.distributed(|learner| {
        learner.fit(1, 0.1, ())?;
        learner.distributed(|_| Err::<(), _>(Error::custom("on purpose")))
    });
    assert_eq!(error.unwrap_err().to_string(), "on purpose");
    assert!(!learner.is_distributed());
    let error = learner.fit(2, 0.1, failing()).unwrap_err().to_string();
    assert_eq!(error, "At failed at after_backward: on purpose");
    assert!(!learner.is_distributed());
    // No step of the next fit contains gradients of the failed one: the result is as if only its one step had been
    // made.
    let begun = learner.state_dict().deep_clone().unwrap();
    learner.fit(1, 0.1, ()).unwrap();
    let mut other = split(accelerator);
    other.state_mut().load_state_dict(&begun).unwrap();
    // The same order of the data: the third epoch that its loader begins.
    (0..2).for_each(|_| other.fit(1, 0.0, ()).unwrap());
    other.fit(1, 0.1, ()).unwrap();
    assert_eq!(weights(&learner), weights(&other));
    ranks_agree(&learner);

    step!("a panic");
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        learner.distributed(|learner| {
            learner.fit(1, 0.1, At::new([Event::AfterEpoch], |_, _| panic!("on purpose")))
        })
    }));
    assert!(panicked.is_err());
    learner.detach();
    assert!(!learner.is_distributed());
    learner.fit(1, 0.1, ()).unwrap();
    ranks_agree(&learner);
}

/// Everything that the finder may not change.
fn state(learner: &Learner) -> (Vec<(String, Vec<u64>)>, String, String, String) {
    let optimizer = learner.state().optimizer().unwrap().map(|it| {
        let state = it.state_dict().unwrap().to_value();
        let state = state.try_map(&mut |_, tensor| Ok::<_, Error>(format!("{:?}", bits(&tensor))));
        state.unwrap().to_json().to_string()
    });
    let hypers = format!("{:?} {}", learner.hypers(), learner.frozen_groups());
    let recorder = format!("{:?}", learner.recorder());
    (weights(learner), optimizer.unwrap_or_default(), hypers, recorder)
}

fn finds(accelerator: &Accelerator) {
    step!("the learning-rate finder");
    let folder = tempfile::tempdir().unwrap();
    let make = || {
        let mut learner = split(accelerator).optimizer(AdamW::fastai());
        learner.add((
            GradientClip::new(1.0),
            SaveModel::new(folder.path().join("model.pth")),
            TerminateOnNan::new(),
        ));
        learner
    };
    let after = |learner: &mut Learner| {
        learner.fit(1, 0.01, ()).unwrap();
        weights(learner)
    };
    // Before the first fit, after one, and after one that was followed by freezing.
    let prepare: [fn(&mut Learner); 3] = [
        |_| {},
        |learner| learner.fit(1, 0.01, ()).unwrap(),
        |learner| {
            let schedule = ParamScheduler::new(Hyper::WeightDecay, Annealing::Constant(0.3));
            learner.fit(1, 0.01, schedule).unwrap();
            learner.freeze().unwrap();
        },
    ];
    for (case, prepare) in prepare.into_iter().enumerate() {
        step!("finder, case {case}");
        let mut learner = make();
        prepare(&mut learner);
        let before = state(&learner);
        let found =
            learner.lr_find_with(LrFindOptions { steps: 40, ..LrFindOptions::default() }).unwrap();
        assert_eq!(state(&learner), before);
        assert!(
            learner.callback::<SaveModel>().is_some()
                && learner.callback::<GradientClip>().is_some()
        );
        assert!(found.lrs().len() > 20 && found.lrs().len() == found.losses().len());
        assert!(found.lrs().windows(2).all(|pair| pair[0] < pair[1]));
        let found: Vec<u64> = found.losses().iter().map(|loss| loss.to_bits()).collect();
        same_on_all(accelerator, found);
        let mut untouched = make();
        prepare(&mut untouched);
        assert_eq!(after(&mut learner), after(&mut untouched), "case {case}");
    }
    let mut learner = make();
    let suggested = learner.lr_find().unwrap().suggest(Suggestion::Minimum).unwrap();
    assert!(suggested > 0.0);
    same_on_all(accelerator, suggested);
    for (start_lr, end_lr) in [(0.0, 1.0), (1.0, 0.1), (f64::NAN, 1.0), (0.1, f64::INFINITY)] {
        let error =
            learner.lr_find_with(LrFindOptions { start_lr, end_lr, ..LrFindOptions::default() });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("give rates that rise from above 0"), "{error}");
    }
    // An error within the scope leaves no state behind either.
    learner.add(failing());
    let before = state(&learner);
    let error = learner.lr_find().unwrap_err().to_string();
    assert!(error.contains("on purpose"), "{error}");
    assert_eq!(state(&learner), before);
    assert_eq!(learner.remove::<At>(), 1);
    learner.fit(1, 0.01, ()).unwrap();
}

#[test]
fn scopes_and_finder_alone() {
    scopes(&alone());
    finds(&alone());
}

dist_test!(world = 2, dist_scopes_and_finder, |_world: World| {
    let accelerator = joined();
    scopes(&accelerator);
    finds(&accelerator);
});

dist_test!(world = 2, dist_a_model_that_differs_is_an_error_on_both_and_lost, |world: World| {
    let accelerator = joined();
    let outputs = CLASSES + world.rank.as_usize() as i64;
    let data = loaders(4);
    let build = |path: &ParamPath<'_>| Linear::new(path, FEATURES, outputs);
    let mut learner = Learner::new(&accelerator, data, model(build)).unwrap().quiet(true);
    let error = learner.fit(1, 0.1, ()).unwrap_err().to_string();
    assert!(error.contains("differ") || error.contains("another"), "{error}");
    let error = learner.fit(1, 0.1, ()).unwrap_err().to_string();
    assert!(error.contains("the model is missing"), "{error}");
    assert!(error.contains("create the Learner again"), "{error}");
    // Another Learner of the same group works.
    let mut other = crate::setup::learner(&accelerator);
    other.fit(1, 0.1, ()).unwrap();
    ranks_agree(&other);
});

#[test]
fn a_panic_of_a_callback_leaves_the_others_callbacks() {
    let calls: Rc<RefCell<usize>> = Rc::default();
    let count = Rc::clone(&calls);
    let mut learner = learner(&alone());
    learner.add(At::new([Event::BeforeFit], move |_, _| {
        *count.borrow_mut() += 1;
        Ok(())
    }));
    let panics = || At::new([Event::AfterEpoch], |_, _| panic!("on purpose"));
    let panicked = catch_unwind(AssertUnwindSafe(|| learner.fit(1, 0.1, panics())));
    assert!(panicked.is_err());
    learner.fit(1, 0.1, ()).unwrap();
    assert_eq!(*calls.borrow(), 2);
}
