//! What goes wrong is a named error on every rank, and nothing was changed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use brigade_checkpoint::Dtype;
use brigade_checkpoint::Value;
use brigade_checkpoint::layout::{Manifest, TensorEntry};
use brigade_nn::{Linear, Model, ParamPath};
use brigade_testkit::{dist_test, step};
use brigade_torch::{Error, Result};
use brigade_train::{Accelerator, LoadOptions, ProjectConfiguration, Stateful, TrainError};
use tch::Tensor;

use crate::resume::{Run, Shared};

/// Changes a checkpoint on rank 0, and expects `load_state` to say so on every rank.
fn refused(
    accelerator: &Accelerator,
    run: &Run,
    path: &Path,
    expected: &str,
    change: impl FnOnce(&Path),
) {
    step!("expect {expected}");
    accelerator
        .processes()
        .on_main_process(|| -> Result<(), Error> {
            change(path);
            Ok(())
        })
        .unwrap();
    let before = run.weights();
    let error = accelerator.load_state(path).unwrap_err();
    assert!(error.to_string().contains(expected), "expected {expected:?}, found: {error}");
    assert_eq!(run.weights(), before, "{expected}");
    accelerator.processes().wait_for_everyone().unwrap();
}

dist_test!(world = 2, seconds = 120, bad_checkpoints_have_names_on_every_rank, |_world| {
    let accelerator = Accelerator::new().unwrap();
    let folder = Shared::new(&accelerator);
    let mut run = Run::new(&accelerator, 1);
    let save = |name: &str| {
        let path = accelerator.save_state(folder.join(name)).unwrap();
        accelerator.checkpoints().wait().unwrap();
        path
    };
    let good = save("good");
    run.go(&accelerator, |_, batches| batches < 2);

    let flip = |file: &'static str| {
        move |path: &Path| {
            let file = path.join(file);
            let mut bytes = fs::read(&file).unwrap();
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            fs::write(file, bytes).unwrap();
        }
    };
    refused(&accelerator, &run, &save("a"), "its checksum is", flip("model.safetensors"));
    refused(&accelerator, &run, &save("b"), "its checksum is", flip("rank_1.json"));
    refused(&accelerator, &run, &save("c"), "it was written with", |path| {
        let file = fs::OpenOptions::new().write(true).open(path.join("model.safetensors")).unwrap();
        file.set_len(100).unwrap();
    });
    refused(&accelerator, &run, &save("d"), "its loader.json is missing", |path| {
        fs::remove_file(path.join("loader.json")).unwrap();
    });
    for (name, version, expected) in [
        ("e", "0", "has no version"),
        ("g", "3", "is a checkpoint of manifest version 3, this program reads versions 1 to 2"),
    ] {
        refused(&accelerator, &run, &save(name), expected, |path| {
            let file = path.join("manifest.json");
            let text = fs::read_to_string(&file).unwrap();
            let version = format!("\"version\": {version}");
            assert!(text.contains("\"version\": 2"));
            fs::write(file, text.replacen("\"version\": 2", &version, 1)).unwrap();
        });
    }
    // Each with its correct checksum.
    for (name, expected, change) in [
        ("h", "leave a gap", (|weight| weight.shape[0] += 1) as fn(&mut TensorEntry)),
        ("i", "out of range", |weight| weight.chunks[0].offset[0] = u64::MAX),
        ("j", "it was written as", |weight| weight.dtype = Dtype::I32),
    ] {
        refused(&accelerator, &run, &save(name), expected, |path| {
            let mut manifest = Manifest::read(path).unwrap();
            let mut models = manifest.objects.iter_mut().filter(|object| object.kind == "model");
            change(models.next().unwrap().tensors.get_mut("hidden.weight").unwrap());
            fs::write(path.join("manifest.json"), manifest.to_json()).unwrap();
        });
    }
    refused(&accelerator, &run, &save("f"), "looks like one of Accelerate's", |path| {
        fs::remove_file(path.join("manifest.json")).unwrap();
        fs::write(path.join("random_states_0.pkl"), "").unwrap();
    });
    refused(&accelerator, &run, &folder.join("nothing"), "is not a checkpoint", |_| {});

    step!("another program");
    let other = Accelerator::builder().sharing(&accelerator).build().unwrap();
    let model = other.prepare(Model::new(|p| Linear::new(p / "hidden", 6, 8)).unwrap()).unwrap();
    let error = other.load_state(&good).unwrap_err();
    assert!(error.to_string().contains("this program has prepared 0"), "{error}");
    drop(model);

    step!("the good one");
    let before = run.weights();
    accelerator.checkpoints().load_with(&good, LoadOptions::default().verify(false)).unwrap();
    assert_ne!(run.weights(), before);
});

dist_test!(world = 2, seconds = 120, files_that_change_after_they_were_verified, |_world| {
    let accelerator = Accelerator::new().unwrap();
    let folder = Shared::new(&accelerator);
    let mut run = Run::new(&accelerator, 1);
    let path = accelerator.save_state(folder.join("one")).unwrap();
    accelerator.checkpoints().wait().unwrap();
    run.go(&accelerator, |_, batches| batches < 2);
    let before = run.weights();
    // The hook is called when everything has been validated and nothing changed.
    let cut = |name: &'static str| {
        let main = accelerator.is_main_process();
        accelerator.checkpoints().register_load_hook(move |path| {
            if main {
                fs::OpenOptions::new().write(true).open(path.join(name))?.set_len(300)?;
            }
            Ok(())
        })
    };
    let hook = cut("optimizer.safetensors");
    let error = accelerator.load_state(&path).unwrap_err();
    assert!(!matches!(error.downcast_ref(), Some(TrainError::LoadInterrupted { .. })), "{error}");
    assert_eq!(run.weights(), before);
    hook.remove();

    step!("the model's file, before anything was changed");
    let path = accelerator.save_state(folder.join("two")).unwrap();
    accelerator.checkpoints().wait().unwrap();
    let hook = cut("model.safetensors");
    let error = accelerator.load_state(&path).unwrap_err();
    assert!(error.to_string().contains("was cut short while it was read: expected"), "{error}");
    assert!(!matches!(error.downcast_ref(), Some(TrainError::LoadInterrupted { .. })), "{error}");
    assert_eq!(run.weights(), before);
    hook.remove();

    step!("the model's file, when others have been opened and the first objects have their states");
    let cutter = Arc::new(Cutter { path: Mutex::new(None), accelerator: accelerator.clone() });
    accelerator.checkpoints().register(&cutter);
    let path = accelerator.save_state(folder.join("three")).unwrap();
    accelerator.checkpoints().wait().unwrap();
    *cutter.path.lock().unwrap() = Some(path.join("model.safetensors"));
    let error = accelerator.load_state(&path).unwrap_err();
    assert!(error.to_string().contains("partly changed"), "{error}");
    assert!(error.to_string().contains("was cut short while it was read"), "{error}");
    step!("another one is loaded");
    *cutter.path.lock().unwrap() = None;
    let path = accelerator.save_state(folder.join("four")).unwrap();
    accelerator.checkpoints().wait().unwrap();
    accelerator.load_state(&path).unwrap();
});

/// Cuts a file short when it gets its state: in the middle of a load.
struct Cutter {
    path: Mutex<Option<PathBuf>>,
    accelerator: Accelerator,
}

impl Stateful for Cutter {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        Ok(Value::None)
    }

    fn load_state_dict(&self, _: &Value<Tensor>) -> Result<()> {
        if let Some(path) = &*self.path.lock().unwrap() {
            // The other rank has opened its files, too.
            self.accelerator.processes().wait_for_everyone()?;
            fs::OpenOptions::new().write(true).open(path)?.set_len(300)?;
        }
        Ok(())
    }
}

struct Stubborn(AtomicI64);

impl Stateful for Stubborn {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        let number = self.0.load(Ordering::Relaxed);
        if number == 13 {
            return Err(Error::custom("13 is not saved"));
        }
        let tensor = Value::Tensor(Tensor::from_slice(&[number]));
        Ok(Value::dict([("number", tensor)]))
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        let number = state
            .get("number")
            .and_then(Value::as_tensor)
            .ok_or_else(|| Error::custom("no number"))?;
        match number.int64_value(&[0]) {
            7 => Err(Error::custom("7 is not taken")),
            number => {
                self.0.store(number, Ordering::Relaxed);
                Ok(())
            }
        }
    }
}

dist_test!(world = 2, seconds = 120, own_objects_and_hooks_take_part, |_world| {
    let accelerator = Accelerator::new().unwrap();
    let rank = accelerator.processes().process_index();
    let folder = Shared::new(&accelerator);
    let run = Run::new(&accelerator, 1);
    let best = Arc::new(Mutex::new((0.1f64 + 0.2, f64::INFINITY, "epoch".to_owned())));
    accelerator.checkpoints().register_value(&best);
    let own = Arc::new(Stubborn(AtomicI64::new(5)));
    accelerator.checkpoints().register(&own);
    let called = Arc::new(Mutex::new(Vec::new()));
    let saving = accelerator.checkpoints().register_save_hook(move |path| {
        Ok(fs::write(path.join(format!("note_{rank}.txt")), format!("rank {rank}"))?)
    });
    let log = Arc::clone(&called);
    let loading = accelerator.checkpoints().register_load_hook(move |path| {
        log.lock().unwrap().push(fs::read_to_string(path.join(format!("note_{rank}.txt")))?);
        Ok(())
    });
    let path = accelerator.save_state(folder.join("one")).unwrap();
    accelerator.checkpoints().wait().unwrap();

    *best.lock().unwrap() = (0.0, 0.0, String::new());
    own.0.store(6, Ordering::Relaxed);
    accelerator.load_state(&path).unwrap();
    assert_eq!(*best.lock().unwrap(), (0.1 + 0.2, f64::INFINITY, "epoch".to_owned()));
    assert_eq!(own.0.load(Ordering::Relaxed), 5);
    assert_eq!(*called.lock().unwrap(), [format!("rank {rank}")]);

    step!("an object refuses");
    loading.remove();
    saving.remove();
    own.0.store(7, Ordering::Relaxed);
    let path = accelerator.save_state(folder.join("two")).unwrap();
    accelerator.checkpoints().wait().unwrap();
    assert!(!path.join("note_0.txt").exists());
    own.0.store(8, Ordering::Relaxed);
    best.lock().unwrap().0 = 4.0;
    let before = run.weights();
    let error = accelerator.load_state(&path).unwrap_err();
    assert!(error.to_string().contains("7 is not taken"), "{error}");
    assert_eq!((own.0.load(Ordering::Relaxed), best.lock().unwrap().0), (8, 4.0));
    assert_eq!(run.weights(), before);

    step!("rank 1 alone cannot save");
    own.0.store(if rank == 1 { 13 } else { 9 }, Ordering::Relaxed);
    let error = accelerator.save_state(folder.join("three")).unwrap_err();
    assert!(error.to_string().contains("13 is not saved"), "{error}");
    assert_eq!(matches!(error.downcast_ref(), Some(TrainError::Leader { rank: 1, .. })), rank == 0);
    assert!(!folder.join("three").exists());
});

dist_test!(world = 2, seconds = 120, numbered_ones_are_limited_and_the_latest_is_found, |_world| {
    let first = Accelerator::new().unwrap();
    let folder = Shared::new(&first);
    let project = ProjectConfiguration::new(folder.join("run")).total_limit(2).iteration(3);
    let accelerator = Accelerator::builder().sharing(&first).project(project).build().unwrap();
    assert!(first.checkpoints().save_numbered().is_err());
    let mut run = Run::new(&accelerator, 1);
    assert_eq!(accelerator.checkpoints().latest().unwrap(), None);
    assert!(accelerator.checkpoints().load_latest().is_err());
    let mut weights = Vec::new();
    run.go(&accelerator, |run, _| {
        accelerator.checkpoints().save_numbered().unwrap();
        weights = run.parameters();
        run.batches < 4
    });
    accelerator.checkpoints().wait().unwrap();
    let checkpoints = folder.join("run/checkpoints");
    let mut names: Vec<_> =
        fs::read_dir(&checkpoints).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["checkpoint_5", "checkpoint_6"]);
    assert_eq!(accelerator.checkpoints().latest().unwrap(), Some(checkpoints.join("checkpoint_6")));
    run.go(&accelerator, |_, batches| batches < 6);
    assert_ne!(run.parameters(), weights);
    let loaded = accelerator.checkpoints().load_latest().unwrap();
    assert_eq!(run.parameters(), weights);
    assert_eq!(loaded.samples, 4 * 2 * 3);
});

dist_test!(
    world = 2,
    seconds = 120,
    a_disk_that_cannot_be_written_is_an_error_on_every_rank,
    |_world| {
        let first = Accelerator::new().unwrap();
        let folder = Shared::new(&first);
        for background in [true, false] {
            let project = ProjectConfiguration::default().background(background);
            let accelerator =
                Accelerator::builder().sharing(&first).project(project).build().unwrap();
            let large = Model::new(|p| Linear::new(p / "large", 2048, 2048)).unwrap();
            let _large = accelerator.prepare(large).unwrap();
            let saved = |path: &Path| {
                accelerator.save_state(path).and_then(|_| accelerator.checkpoints().wait())
            };
            step!("where nothing may write");
            let error = saved(Path::new("/proc/brigade/checkpoint")).unwrap_err();
            assert!(error.to_string().contains("/proc/brigade"), "{error}");
            step!("below a file");
            if accelerator.is_main_process() {
                fs::write(folder.join("file"), "").unwrap();
            }
            accelerator.processes().wait_for_everyone().unwrap();
            let error = saved(&folder.join("file/checkpoint")).unwrap_err();
            assert!(error.to_string().contains("file"), "{error}");

            // The next save works.
            saved(&folder.join(format!("after-{background}"))).unwrap();
        }
    }
);

dist_test!(world = 2, seconds = 120, a_shard_that_is_cut_short_is_named_on_every_rank, |_world| {
    let first = Accelerator::new().unwrap();
    let folder = Shared::new(&first);
    let project = ProjectConfiguration::default().max_shard_bytes(20 << 20);
    let accelerator = Accelerator::builder().sharing(&first).project(project).build().unwrap();
    // Three shards of 16 MB each.
    let layers = |path: &ParamPath<'_>| -> Vec<Linear> {
        (0..3).map(|layer| Linear::new(path / layer, 2048, 2048)).collect()
    };
    let large = accelerator.prepare(Model::new(layers).unwrap()).unwrap();
    let weights = || -> Vec<Tensor> {
        large.inner().parameters().iter().map(|parameter| parameter.tensor.copy()).collect()
    };
    let path = accelerator.save_state(folder.join("large")).unwrap();
    accelerator.checkpoints().wait().unwrap();
    tch::no_grad(|| {
        for parameter in large.inner().parameters() {
            let _ = parameter.tensor.shallow_clone().fill_(7.0);
        }
    });
    let before = weights();
    let shard = path.join("model-00002-of-00003.safetensors");
    let whole = fs::metadata(&shard).unwrap().len();
    for (bytes, expected, verified) in [
        (whole - 1, "it was written with", &[true, false][..]),
        // The same size as before, with a zero at its end: only the checksums differ.
        (whole, "its checksum is", &[true]),
        (100, "it was written with", &[true, false]),
    ] {
        step!("of {whole} bytes {bytes} are left");
        accelerator.processes().wait_for_everyone().unwrap();
        if accelerator.is_main_process() {
            fs::OpenOptions::new().write(true).open(&shard).unwrap().set_len(bytes).unwrap();
        }
        accelerator.processes().wait_for_everyone().unwrap();
        for &verify in verified {
            let options = LoadOptions::default().verify(verify);
            let error =
                accelerator.checkpoints().load_with(&path, options).unwrap_err().to_string();
            assert!(error.contains("00002-of-00003") && error.contains(expected), "{error}");
            assert!(weights() == before, "{error}");
        }
    }
    step!("another one");
    let path = accelerator.save_state(folder.join("good")).unwrap();
    accelerator.checkpoints().wait().unwrap();
    tch::no_grad(|| {
        for parameter in large.inner().parameters() {
            let _ = parameter.tensor.shallow_clone().fill_(8.0);
        }
    });
    accelerator.load_state(&path).unwrap();
    assert!(weights() == before);
});

const LOADED: &str = "BRIGADE_TEST_LOADED_CHECKPOINT";

#[test]
#[ignore = "is what the test below starts"]
fn child() {
    assert!(std::thread::Builder::new().spawn(|| {}).is_err(), "a thread has started");
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
    let run = Run::new(&accelerator, 2);
    accelerator.load_state(std::env::var_os(LOADED).unwrap()).unwrap();
    println!("the weights are {:?}", run.weights());
}

#[test]
fn a_checkpoint_is_loaded_where_no_thread_can_start() {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
    let run = Run::new(&accelerator, 1);
    let path = accelerator.save_state(folder.path().join("saved")).unwrap();
    accelerator.checkpoints().wait().unwrap();
    // Stacks that do not fit into any address space.
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "checkpoint_faults::child", "--include-ignored", "--nocapture"])
        .env("RUST_MIN_STACK", (1u64 << 50).to_string())
        .env(LOADED, path)
        .output()
        .unwrap();
    let [out, error] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    let expected = format!("the weights are {:?}", run.weights());
    assert!(output.status.success() && out.contains(&expected), "{out}\n{error}");
}
