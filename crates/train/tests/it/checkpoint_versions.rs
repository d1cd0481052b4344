//! Checkpoints of older manifest versions stay loadable, bit for bit.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use brigade_checkpoint::layout::{Checkpoint, MANIFEST, files};
use brigade_testkit::{dist_test, step};
use brigade_train::{Accelerator, CommHook, GradScalerOptions, PowerSgd, Precision};

use crate::resume::{Run, Shared};

/// The batches that the fixture's run had trained on, on each of two ranks: one epoch, in three optimizer
/// steps.
const BATCHES: usize = 5;

/// A checkpoint that a program of an earlier time has written.
fn fixture_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A checkpoint that the last program with manifest version 1 has written.
fn fixture() -> PathBuf {
    fixture_of("checkpoint_version_1")
}

fn prepare(first: &Accelerator, seed: i64) -> (Accelerator, Run, Arc<Mutex<f64>>) {
    let hook = PowerSgd { start_iteration: 3, ..PowerSgd::default() };
    let accelerator = Accelerator::builder()
        .sharing(first)
        .gradient_accumulation_steps(2)
        .comm_hook(CommHook::PowerSgd(hook))
        .build()
        .unwrap();
    let run = Run::new(&accelerator, seed);
    let best = Arc::new(Mutex::new(0.0));
    accelerator.checkpoints().register_value(&best);
    (accelerator, run, best)
}

/// A file's content: of a rank's state without what it says of this machine's arithmetic, of a schedule's without what
/// it says to other libraries, which version 1 left out.
fn content(path: &Path) -> Vec<u8> {
    let bytes = fs::read(path).unwrap();
    let name = path.file_name().unwrap().to_str().unwrap();
    let left_out = match name {
        "scheduler.json" => "definition",
        name if name.starts_with("rank_") && name.ends_with(".json") => "arithmetic",
        _ => return bytes,
    };
    let mut state: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    state.as_object_mut().unwrap().remove(left_out);
    serde_json::to_vec(&state).unwrap()
}

dist_test!(world = 2, seconds = 120, version_1_resumes_bit_for_bit, |_world| {
    let first = Accelerator::new().unwrap();
    let folder = Shared::new(&first);
    step!("load version 1 and save it as it is");
    assert_eq!(Checkpoint::open(fixture()).unwrap().manifest().version, 1);
    let (accelerator, mut run, best) = prepare(&first, 2);
    let loaded = accelerator.load_state(fixture()).unwrap();
    assert_eq!((loaded.world_size, loaded.step, loaded.samples), (2, 3, 29));
    assert_eq!(*best.lock().unwrap(), 0.1 + 0.2);
    accelerator.save_state(folder.join("now")).unwrap();
    accelerator.checkpoints().wait().unwrap();
    let (then, now) = (Checkpoint::open(fixture()).unwrap(), Checkpoint::open(folder.join("now")));
    let now = now.unwrap();
    assert_eq!(now.manifest().version, 2);
    assert!(now.verify().is_empty(), "{:?}", now.verify());
    // Facts that version 1 leaves to the headers are in version 2 itself.
    assert_eq!(then.manifest().objects, now.manifest().objects);
    assert_eq!(files(then.folder()).unwrap(), files(now.folder()).unwrap());
    for name in files(then.folder()).unwrap().iter().filter(|name| name.as_str() != MANIFEST) {
        let (then, now) = (content(&then.folder().join(name)), content(&now.folder().join(name)));
        assert!(then == now, "{name} differs");
    }
    step!("train on from both");
    run.batches = BATCHES;
    let losses = run.go(&accelerator, |_, _| true);
    let weights = run.parameters();
    drop((run, best));
    let (accelerator, mut run, _best) = prepare(&first, 3);
    accelerator.load_state(folder.join("now")).unwrap();
    run.batches = BATCHES;
    assert_eq!(run.go(&accelerator, |_, _| true), losses);
    assert_eq!(run.parameters(), weights);
    step!("the run that was not stopped");
    drop(run);
    let (accelerator, mut run, _best) = prepare(&first, 1);
    let whole = run.go(&accelerator, |_, _| true);
    // The fixture's machine may have added in another order.
    for (loss, whole) in losses.iter().zip(&whole[BATCHES..]) {
        let (loss, whole) = (f64::from_bits(*loss), f64::from_bits(*whole));
        assert!((loss - whole).abs() < 1e-3, "{loss} and {whole}");
    }
    assert_eq!(losses.len(), whole.len() - BATCHES);
});

/// Two of each kind of object, with a loss scale.
struct Pair {
    accelerator: Accelerator,
    first: Run,
    second: Run,
    best: Arc<Mutex<f64>>,
}

impl Pair {
    fn new(all: &Accelerator, seed: i64) -> Self {
        let scale =
            GradScalerOptions { init_scale: 1024.0, growth_interval: 2, ..Default::default() };
        let accelerator = Accelerator::builder()
            .sharing(all)
            .gradient_accumulation_steps(2)
            .mixed_precision(Precision::Fp16)
            .grad_scaler(scale)
            .build()
            .unwrap();
        let best = Arc::new(Mutex::new(0.0));
        accelerator.checkpoints().register_value(&best);
        let first = Run::new(&accelerator, seed);
        let second = Run::new(&accelerator, seed + 10);
        Self { accelerator, first, second, best }
    }

    /// Trains one window of the first model and one and a half of the second, and saves there.
    fn save_within_an_epoch(&mut self, path: &Path) {
        *self.best.lock().unwrap() = 0.1 + 0.2;
        self.first.go(&self.accelerator, |_, batches| batches < 2);
        self.second.go(&self.accelerator, |run, batches| {
            if batches == 3 {
                run.save(&self.accelerator, path);
            }
            batches < 3
        });
        self.accelerator.checkpoints().wait().unwrap();
    }

    /// Goes on from a checkpoint to the end of both; the bits of all losses and weights.
    fn go_on(mut self, path: &Path) -> (Vec<u64>, Vec<(String, Vec<u64>)>) {
        let loaded = self.accelerator.load_state(path).unwrap();
        assert_eq!((loaded.world_size, loaded.step), (2, 1));
        assert_eq!(*self.best.lock().unwrap(), 0.1 + 0.2);
        self.second.batches = 3;
        let mut losses = self.second.go(&self.accelerator, |_, _| true);
        losses.extend(self.first.go(&self.accelerator, |_, _| true));
        (losses, [self.first.weights(), self.second.weights()].concat())
    }
}

dist_test!(
    world = 2,
    seconds = 120,
    version_2_goes_on_with_two_of_each_kind_in_their_order,
    |_world| {
        let all = Accelerator::new().unwrap();
        let folder = Shared::new(&all);
        let fixture = fixture_of("checkpoint_version_2");
        step!("a program of today writes the same files");
        Pair::new(&all, 1).save_within_an_epoch(&folder.join("today"));
        let (then, today) =
            (Checkpoint::open(&fixture).unwrap(), Checkpoint::open(folder.join("today")));
        assert_eq!(then.manifest().objects, today.unwrap().manifest().objects);
        assert_eq!(files(&fixture).unwrap(), files(&folder.join("today")).unwrap());
        step!("load the fixture and save it as it is");
        let pair = Pair::new(&all, 2);
        pair.accelerator.load_state(&fixture).unwrap();
        pair.accelerator.save_state(folder.join("copy")).unwrap();
        pair.accelerator.checkpoints().wait().unwrap();
        for name in files(&fixture).unwrap().iter().filter(|name| name.as_str() != MANIFEST) {
            let (then, copy) =
                (content(&fixture.join(name)), content(&folder.join("copy").join(name)));
            assert!(then == copy, "{name} differs");
        }
        drop(pair);
        step!("train on from both");
        let expected = Pair::new(&all, 3).go_on(&fixture);
        assert_eq!(Pair::new(&all, 4).go_on(&folder.join("copy")), expected);
    }
);
