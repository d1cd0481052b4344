//! A fit that is interrupted and started again ends as one that was not, bit for bit.

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::rc::Rc;

use brigade_learn::callback::Level;
use brigade_learn::callbacks::{
    Checkpoint, CsvLog, EarlyStopping, Ema, GradientAccumulation, MixUp, ReduceLrOnPlateau,
    SaveModel, Swa, TrackerLog,
};
use brigade_learn::{Event, FineTuneOptions, Learner};
use brigade_nn::{Dropout, Linear, ParamPath, Relu, Sequential};
use brigade_optim::AdamW;
use brigade_sharding::Sharding;
use brigade_testkit::{World, dist_test, step};
use brigade_torch::{Error, Result};
use brigade_train::Accelerator;
use tch::Kind;

use crate::setup::*;

fn with_dropout(path: &ParamPath<'_>) -> Sequential {
    Sequential::new()
        .add(Linear::new(path / 0, FEATURES, 16))
        .add(Relu)
        .add(Dropout::new(path / 2, 0.3))
        .add(Linear::new(path / 3, 16, CLASSES))
}

/// One kind of program: what a Learner is given, and its fits.
struct Recipe {
    name: &'static str,
    every: Option<usize>,
    add: fn(&mut Learner, &Path),
    fits: fn(&mut Learner) -> Result<()>,
    /// Batches of all fits after which it is interrupted.
    breaks: &'static [usize],
}

const EPOCHS: usize = 4;

fn cycle(learner: &mut Learner) -> Result<()> {
    learner.fit_one_cycle(EPOCHS, 0.02, ())
}

const RECIPES: [Recipe; 8] = [
    // Six batches in an epoch: in its middle, at its last batch, and before the first checkpoint.
    Recipe { name: "dropout", every: Some(4), add: |_, _| {}, fits: cycle, breaks: &[9, 12, 2] },
    Recipe { name: "epochs alone", every: None, add: |_, _| {}, fits: cycle, breaks: &[15] },
    Recipe {
        name: "MixUp and EMA",
        every: Some(5),
        add: |learner, _| learner.add((MixUp::new(0.4), Ema::new(0.8))),
        fits: cycle,
        breaks: &[8, 13],
    },
    Recipe {
        name: "EMA that is dropped, SWA",
        every: Some(50),
        add: |learner, _| learner.add((Ema::new(0.8).keep(false), Swa::new(1))),
        fits: cycle,
        breaks: &[14],
    },
    Recipe {
        name: "trackers",
        every: Some(4),
        add: |learner, folder| {
            let save = SaveModel::new(folder.join("best.pth"));
            learner.add((ReduceLrOnPlateau::new(2), save, EarlyStopping::new(5)));
        },
        fits: |learner| learner.fit(20, 0.5, ()),
        breaks: &[10, 25],
    },
    Recipe {
        name: "accumulation",
        every: Some(1),
        add: |learner, _| learner.add(GradientAccumulation::new(32)),
        fits: cycle,
        breaks: &[7, 14],
    },
    Recipe {
        name: "second fit of fine_tune",
        every: Some(3),
        add: |_, _| {},
        fits: |learner| {
            learner.fine_tune_with(FineTuneOptions::new(2).base_lr(0.02), MixUp::new(0.4))
        },
        breaks: &[4, 11],
    },
    Recipe {
        name: "logs",
        every: Some(4),
        add: |learner, folder| {
            learner.add((CsvLog::new(folder.join("log.csv")), TrackerLog::new("run").every(2)));
        },
        fits: cycle,
        breaks: &[9],
    },
];

/// Stops the program after so many batches, once.
fn interrupts(after: usize) -> At {
    let mut batches = 0;
    // After the checkpoint, so that one at this very batch exists.
    At::new([Event::AfterBatch], move |_, learner| {
        batches += usize::from(learner.is_training());
        if batches == after && learner.is_training() {
            Err(Error::custom("interrupted").into())
        } else {
            Ok(())
        }
    })
    .order(200)
}

/// A new process: its own random numbers, and nothing but the folder.
fn program(
    accelerator: &Accelerator,
    recipe: &Recipe,
    folder: &Path,
    seed: i64,
    stop: Option<usize>,
    sharding: Option<Sharding>,
) -> (Learner, Result<()>) {
    let log = folder.join("log");
    let accelerator =
        Accelerator::builder().sharing(accelerator).quiet(true).logging_dir(log).build().unwrap();
    accelerator.processes().set_seed_per_process(seed);
    let data = loaders(8 / accelerator.processes().num_processes());
    let mut learner = Learner::new(&accelerator, data, model(with_dropout))
        .unwrap()
        .split_by_prefix(&[&["0"], &["3"]])
        .unwrap()
        .optimizer(AdamW::fastai())
        .sharding(sharding)
        .unwrap()
        .quiet(true);
    (recipe.add)(&mut learner, folder);
    let checkpoint = Checkpoint::new(folder.join("last"));
    learner.add(match recipe.every {
        Some(every) => checkpoint.every(every),
        None => checkpoint,
    });
    if let Some(stop) = stop {
        learner.add(interrupts(stop));
    }
    let outcome = (recipe.fits)(&mut learner);
    accelerator.trackers().finish().unwrap();
    (learner, outcome)
}

fn all() -> Vec<&'static Recipe> {
    RECIPES.iter().collect()
}

fn goes_on(accelerator: &Accelerator, recipes: &[&Recipe], sharding: Option<&Sharding>) {
    let program = |recipe: &Recipe, path: &Path, seed: i64, stop: Option<usize>| {
        program(accelerator, recipe, path, seed, stop, sharding.cloned())
    };
    for recipe in recipes {
        let shared = |name: &str| {
            // All ranks use one folder.
            let folder = tempfile::Builder::new().prefix(name).tempdir().unwrap();
            let path =
                accelerator.processes().broadcast_object(folder.path().to_owned(), 0).unwrap();
            (folder, path)
        };
        step!("{}: without an interruption", recipe.name);
        let (_kept, path) = shared("whole");
        let (whole, outcome) = program(recipe, &path, 1, None);
        outcome.unwrap();
        let expected = weights(&whole);
        for &stop in recipe.breaks {
            step!("{}: interrupted after {stop}", recipe.name);
            let (_kept, path) = shared("broken");
            let (_, outcome) = program(recipe, &path, 1, Some(stop));
            assert!(outcome.unwrap_err().to_string().contains("interrupted"), "{}", recipe.name);
            let (learner, outcome) = program(recipe, &path, 2, None);
            outcome.unwrap();
            if stop < recipe.every.unwrap_or(6).min(6) {
                // No checkpoint existed yet: the run started again, with its own random numbers.
                assert_ne!(weights(&learner), expected, "{}", recipe.name);
                continue;
            }
            assert_eq!(weights(&learner), expected, "{} after {stop}", recipe.name);
            assert_eq!(learner.recorder().losses(), whole.recorder().losses(), "{}", recipe.name);
            assert_eq!(learner.recorder().lrs(), whole.recorder().lrs(), "{}", recipe.name);
            assert_eq!(learner.recorder().rows().len(), whole.recorder().rows().len());
            ranks_agree(&learner);
            if recipe.name == "logs" && accelerator.is_main_process() {
                let text = fs::read_to_string(path.join("log.csv")).unwrap();
                assert_eq!(text.lines().count(), 1 + EPOCHS, "{text}");
            }
            step!("{}: finished, and started again", recipe.name);
            let (again, outcome) = program(recipe, &path, 3, Some(1));
            // A batch more would be an error.
            outcome.unwrap();
            assert_eq!(weights(&again), expected, "{} again", recipe.name);
            assert_eq!(again.recorder().losses(), whole.recorder().losses());
        }
    }
}

#[test]
fn fits_go_on_alone() {
    goes_on(&alone(), &all(), None);
}

dist_test!(world = 2, seconds = 120, dist_fits_go_on, |_world: World| {
    goes_on(&joined(), &all(), None);
});

dist_test!(world = 2, seconds = 120, dist_sharded_fits_go_on, |_world: World| {
    let accelerator = joined();
    let named = |names: &[&str]| -> Vec<&Recipe> {
        RECIPES.iter().filter(|recipe| names.contains(&recipe.name)).collect()
    };
    let averages = ["MixUp and EMA", "EMA that is dropped, SWA", "second fit of fine_tune"];
    goes_on(&accelerator, &named(&averages), Some(&Sharding::zero3()));
    goes_on(&accelerator, &named(&["accumulation", "MixUp and EMA"]), Some(&Sharding::zero2()));
    goes_on(&accelerator, &named(&["trackers"]), Some(&Sharding::zero1()));
});

// A fit that was begun on two ranks continues on one, and vice versa, for any sharding.
dist_test!(world = 2, dist_a_fit_goes_on_with_other_ranks, |_world: World| {
    let (one, two) = (alone(), joined());
    let shared = |name: &str| {
        let folder = tempfile::Builder::new().prefix(name).tempdir().unwrap();
        let path = two.processes().broadcast_object(folder.path().to_owned(), 0).unwrap();
        (folder, path)
    };
    let fit = |accelerator: &Accelerator, path: &Path, sharding, stop: Option<usize>| {
        // Checkpoints of its own, without what another fit has registered.
        let accelerator = &Accelerator::builder().sharing(accelerator).quiet(true).build().unwrap();
        let mut learner =
            learner(accelerator).optimizer(AdamW::fastai()).sharding(sharding).unwrap();
        learner.add((Ema::new(0.8), Checkpoint::new(path).every(4)));
        if let Some(stop) = stop {
            learner.add(interrupts(stop));
        }
        let outcome = learner.fit_one_cycle(EPOCHS, 0.02, ());
        assert_eq!(outcome.is_err(), stop.is_some(), "{outcome:?}");
        learner
    };
    let (_kept, path) = shared("whole");
    let expected = fit(&two, &path, None, None);
    let expected =
        (expected.state_dict().deep_clone().unwrap(), expected.recorder().losses().to_vec());
    let agrees = |learner: &Learner| {
        close(learner.recorder().losses(), &expected.1, 1e-11);
        let state = learner.full_state_dict().unwrap();
        assert!(state.is_none_or(|state| apart(&expected.0, &state) < 1e-11));
    };
    for sharding in [Some(Sharding::zero3()), Some(Sharding::zero1()), None] {
        step!("two ranks, then one, {sharding:?}");
        let (_kept, path) = shared("fewer");
        drop(fit(&two, &path, Some(Sharding::zero3()), Some(13)));
        if two.is_main_process() {
            agrees(&fit(&one, &path, sharding.clone(), None));
        }
        step!("one rank, then two, {sharding:?}");
        let (_kept, path) = shared("more");
        if two.is_main_process() {
            drop(fit(&one, &path, sharding.clone(), Some(9)));
        }
        two.processes().wait_for_everyone().unwrap();
        agrees(&fit(&two, &path, Some(Sharding::zero2()), None));
    }
});

fn simple(folder: &Path) -> Learner {
    let mut learner = learner(&alone());
    learner.add(Checkpoint::new(folder));
    learner
}

#[test]
fn a_folder_that_is_no_checkpoint_of_this_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("last");
    simple(&path).fit(2, 0.1, ()).unwrap();
    let refused = |epochs: usize| simple(&path).fit(epochs, 0.1, ()).unwrap_err().to_string();
    let error = refused(3);
    assert!(
        error.contains("is of a fit of 2 epochs, and this one has 3; remove the folder"),
        "{error}"
    );
    // Another model.
    let build = |path: &ParamPath<'_>| Linear::new(path, FEATURES, CLASSES);
    let mut other = Learner::new(&alone(), loaders(8), model(build)).unwrap().quiet(true);
    other.add(Checkpoint::new(&path));
    let before = weights(&other);
    assert!(other.fit(2, 0.1, ()).is_err());
    assert_eq!(weights(&other), before);
    // Damaged: each file with a byte changed, or cut short.
    for entry in fs::read_dir(&path).unwrap() {
        let file = entry.unwrap().path();
        let whole = fs::read(&file).unwrap();
        let mut changed = whole.clone();
        let middle = changed.len() / 2;
        changed[middle] ^= 0x55;
        for bytes in [changed, whole[..middle].to_vec()] {
            fs::write(&file, bytes).unwrap();
            assert!(simple(&path).fit(2, 0.1, ()).is_err(), "{}", file.display());
        }
        fs::write(&file, whole).unwrap();
    }
    simple(&path).fit(2, 0.1, ()).unwrap();
    // Another program's folder, which must not be changed.
    let foreign = folder.path().join("photos");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("dog.jpg"), b"dog").unwrap();
    let error = simple(&foreign).fit(2, 0.1, ()).unwrap_err().to_string();
    assert!(
        error.contains("not a Learner checkpoint: learner.msgpack is missing; pass another folder"),
        "{error}"
    );
    assert_eq!(fs::read(foreign.join("dog.jpg")).unwrap(), b"dog");
    // Without resuming, the fit starts again, and the checkpoint is replaced.
    let mut anew = learner(&alone());
    anew.add(Checkpoint::new(&path).resume(false));
    anew.fit(3, 0.1, ()).unwrap();
    assert_eq!(anew.recorder().rows().len(), 3);
    assert_eq!(simple(&path).fit(3, 0.1, ()).map_err(|error| error.to_string()), Ok(()));
}

#[test]
fn a_fit_that_a_callback_has_cancelled_is_finished() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("last");
    // Two fits, the first of which is cancelled in its second epoch: weights after each, and batches that were trained.
    let run = |fits: usize| {
        let trained: Rc<RefCell<usize>> = Rc::default();
        let count = Rc::clone(&trained);
        let mut learner = simple(&path);
        let stop = At::new([Event::AfterBatch], move |_, learner| {
            *count.borrow_mut() += usize::from(learner.is_training());
            if learner.train_iter() == 8 { Level::Fit.cancel() } else { Ok(()) }
        });
        learner.fit(3, 0.1, stop).unwrap();
        let first = weights(&learner);
        if fits == 2 {
            learner.fit(1, 0.1, ()).unwrap();
        }
        (first, weights(&learner), trained.take())
    };
    let (first, second, trained) = run(2);
    assert_eq!(trained, 8);
    let (_, again, trained) = run(2);
    assert_eq!((again, trained), (second.clone(), 0));
    fs::remove_dir_all(&path).unwrap();
    run(1);
    // Killed between the fits: the first is not repeated, and the second begins with the next epoch of the data.
    assert_eq!(run(2), (first, second, 0));
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_of_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), b"").unwrap();
    let error = simple(&folder.path().join("file/last")).fit(1, 0.1, ()).unwrap_err().to_string();
    assert!(error.contains("file/last") || error.contains("file"), "{error}");
}

dist_test!(
    world = 2,
    dist_a_folder_that_cannot_be_written_is_an_error_of_every_rank,
    |_world: World| {
        let accelerator = joined();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        for callback in [true, false] {
            let mut learner = learner(&accelerator);
            if callback {
                learner.add(Checkpoint::new(file.join("last")));
            } else {
                learner.add(SaveModel::new(file.join("best.pth")));
            }
            let error = learner.fit(1, 0.1, ()).unwrap_err().to_string();
            assert!(error.contains("file"), "{error}");
            // Both can be resumed.
            assert_eq!(learner.remove::<Checkpoint>() + learner.remove::<SaveModel>(), 1);
            learner.fit(1, 0.1, ()).unwrap();
            ranks_agree(&learner);
            for error in [
                learner.save(file.join("a.pth"), false).unwrap_err(),
                learner.export(file.join("b.pth")).unwrap_err(),
            ] {
                assert!(error.to_string().contains("file"), "{error}");
            }
            assert!(learner.load(folder.path().join("none.pth"), false).is_err());
        }
        assert!(
            learner(&accelerator).parameters().iter().all(|it| it.tensor.kind() == Kind::Double)
        );
    }
);
