//! Checkpoints that DeepSpeed has written: `fixtures/deepspeed/make.py` has made them, with what its own script reads.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use brigade_checkpoint::convert::{Target, WeightsOptions, convert, convert_with};
use brigade_checkpoint::pth::TensorData;
use brigade_checkpoint::{
    DeepSpeedFolder, Error, Region, Safetensors, WeightsReader, deepspeed_folder,
};

const TARGET: Target = Target::Weights(&Safetensors);
const STEPS: [&str; 3] = ["1-float32", "2-bfloat16", "3-bfloat16"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/deepspeed").join(name)
}

fn copied(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            copied(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// The universal checkpoint that DeepSpeed has made of the step of a stage, with the model's states that it copies.
fn universal(stage: u64, to: &Path) {
    copied(&fixture(&format!("universal-{stage}")), to);
    let step = fixture(&format!("{stage}-bfloat16/global_step2"));
    for entry in fs::read_dir(step).unwrap().flatten() {
        if entry.file_name().to_string_lossy().ends_with("_model_states.pt") {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

type Values = BTreeMap<String, (String, Vec<u8>)>;

fn values(file: &Path) -> Values {
    let weights = WeightsReader::open(file).unwrap();
    let read = |tensor: brigade_checkpoint::TensorReader<'_>| {
        let mut bytes = vec![0; tensor.info().bytes().unwrap() as usize];
        tensor.read(&Region::whole(&tensor.info().shape), &mut bytes).unwrap();
        (tensor.name().to_owned(), (tensor.info().to_string(), bytes))
    };
    weights.tensors().map(read).collect()
}

fn read(tensor: &impl TensorData) -> (String, Vec<u8>) {
    let mut bytes = Vec::new();
    tensor.write_to(&mut bytes).unwrap();
    (tensor.info().to_string(), bytes)
}

/// The moments under the names that the script gives them.
fn moments(run: &DeepSpeedFolder) -> Values {
    let mut all = Values::new();
    for (name, slots) in run.moments().unwrap() {
        for (slot, tensor) in slots {
            all.insert(format!("{name}/{slot}"), read(&tensor));
        }
    }
    all
}

#[test]
fn weights_are_those_of_zero_to_fp32() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (step, (ranks, tensors)) in STEPS.iter().zip([(2, 10), (2, 10), (3, 10)]) {
        for from in [fixture(step), fixture(step).join("global_step2")] {
            let to = folder.join("made.safetensors");
            let report = convert(&from, &to, TARGET).unwrap();
            let mut found = values(&to);
            let expected = values(&fixture(&format!("{step}.safetensors")));
            if step.starts_with('1') {
                // With stage 1 its script has no frozen parameters, which the model's states hold.
                assert!(
                    report.read[1].starts_with("`frozen.weight`, `frozen.bias` from the model's")
                );
                for name in ["frozen.weight", "frozen.bias"] {
                    assert!(!expected.contains_key(name) && found.remove(name).is_some());
                }
            }
            assert_eq!(found, expected, "{step}");
            let stage = &step[..1];
            let line = format!(
                "a checkpoint of DeepSpeed: stage {stage}, {ranks} ranks, step 2, {tensors} tensors"
            );
            assert_eq!(report.read[0], line);
            fs::remove_file(&to).unwrap();
        }
    }
}

#[test]
fn universal_checkpoints_have_the_weights_and_moments_of_their_steps() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for stage in [2, 3] {
        let from = folder.join(format!("universal-{stage}"));
        universal(stage, &from);
        fs::write(folder.join("latest_universal"), format!("universal-{stage}")).unwrap();
        let to = folder.join("made.safetensors");
        let report = convert(folder, &to, TARGET).unwrap();
        assert_eq!(values(&to), values(&fixture(&format!("{stage}-bfloat16.safetensors"))));
        assert!(
            report.read[0].starts_with("a universal checkpoint of DeepSpeed: stage "),
            "{report:?}"
        );
        fs::remove_file(&to).unwrap();

        let step = fixture(&format!("{stage}-bfloat16/global_step2"));
        let (universal, step) =
            (DeepSpeedFolder::open(&from).unwrap(), DeepSpeedFolder::open(&step).unwrap());
        assert_eq!((universal.ranks(), universal.step()), (step.ranks(), step.step()));
        let mut of_step = moments(&step);
        if stage == 3 {
            // DeepSpeed's own conversion has no steps there.
            of_step.retain(|name, _| !name.ends_with("/step"));
        }
        assert_eq!(moments(&universal), of_step);
    }
}

#[test]
fn moments_have_the_names_and_shapes_of_their_parameters() {
    let run = DeepSpeedFolder::open(&fixture("3-bfloat16/global_step2")).unwrap();
    let mut found = moments(&run);
    assert_eq!(found.remove("middle.weight/step").unwrap().1, 2f32.to_le_bytes());
    found.retain(|name, _| !name.ends_with("/step"));
    assert_eq!(found, values(&fixture("3-bfloat16.moments.safetensors")));

    // One state of all parameters as a file.
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("exp_avg.safetensors");
    let options = WeightsOptions { key: Some("exp_avg".into()), ..WeightsOptions::default() };
    convert_with(&fixture("3-bfloat16"), &to, TARGET, &options).unwrap();
    assert_eq!(values(&to)["back.weight"], found["back.weight/exp_avg"]);
    let options = WeightsOptions { key: Some("momentum".into()), ..WeightsOptions::default() };
    let error = convert_with(&fixture("3-bfloat16"), &folder.path().join("no"), TARGET, &options)
        .unwrap_err();
    assert!(
        matches!(&error, Error::NoSuchKey { keys, .. } if *keys == ["exp_avg", "exp_avg_sq", "step"]),
        "{error}"
    );
}

/// What opening a changed copy of a step says.
fn refused(step: &str, change: impl FnOnce(&Path)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("global_step2");
    copied(&fixture(step).join("global_step2"), &folder);
    change(&folder);
    let to = folder.join("out.safetensors");
    let error = convert(&folder, &to, TARGET).unwrap_err();
    assert!(!to.exists());
    error.to_string()
}

#[test]
fn what_is_missing_or_not_read_is_named() {
    let check = |step: &str, expected: &str, change: &dyn Fn(&Path)| {
        let found = refused(step, change);
        assert!(found.contains(expected), "{expected}: {found}");
    };
    let remove =
        |name: &'static str| move |folder: &Path| fs::remove_file(folder.join(name)).unwrap();
    let add = |name: &'static str| move |folder: &Path| fs::write(folder.join(name), "").unwrap();
    let rename = |from: &'static str, to: &'static str| {
        move |folder: &Path| fs::rename(folder.join(from), folder.join(to)).unwrap()
    };
    let optimizer = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt";
    check(
        "2-bfloat16",
        &format!("{optimizer} is missing: the run had 2 ranks"),
        &remove(optimizer),
    );
    check(
        "3-bfloat16",
        &format!("{optimizer} is missing: the run had 3 ranks"),
        &remove(optimizer),
    );
    check(
        "2-bfloat16",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt is missing",
        &remove("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    );
    let model = "zero_pp_rank_2_mp_rank_00_model_states.pt";
    check("3-bfloat16", &format!("{model} is missing"), &remove(model));
    check(
        "2-bfloat16",
        "mp_rank_00_model_states.pt is missing",
        &remove("mp_rank_00_model_states.pt"),
    );
    check("2-bfloat16", "the optimizer's states of every rank", &|folder| {
        for rank in 0..2 {
            let name = format!("bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
            fs::remove_file(folder.join(name)).unwrap();
        }
    });
    check("2-bfloat16", "is of rank 7, but the run had 2 ranks", &|folder| {
        let to = folder.join(optimizer.replace("rank_1", "rank_7"));
        fs::copy(folder.join(optimizer), to).unwrap();
    });
    check("2-bfloat16", "is of the same rank", &|folder| {
        fs::copy(folder.join(optimizer), folder.join(&optimizer[5..])).unwrap();
    });
    check("2-bfloat16", "tensor or pipeline parallelism", &add("mp_rank_01_model_states.pt"));
    check("2-bfloat16", "DeepSpeed's PipelineModule", &add("layer_00-model_00-model_states.pt"));
    check(
        "2-bfloat16",
        "experts of a mixture",
        &add("layer_0_expert_0_mp_rank_00_model_states.pt"),
    );
    check("2-bfloat16", "experts of a mixture", &add("expp_rank_0_mp_rank_00_optim_states.pt"));
    check("2-bfloat16", "is not one that DeepSpeed's ZeRO", &add("other_model_states.pt"));
    check(
        "1-float32",
        "is missing: the run had",
        &rename(
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "zero_pp_rank_2_mp_rank_00_optim_states.pt",
        ),
    );
    // Files of another stage, and of another number of ranks.
    let other = fixture("3-bfloat16/global_step2").join(optimizer);
    check(
        "2-bfloat16",
        "it is of stage 3 with 3 ranks, the first rank's of stage 2 with 2",
        &|folder| {
            fs::copy(&other, folder.join(optimizer)).unwrap();
        },
    );
}

#[test]
fn the_folder_of_a_step_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    assert_eq!(deepspeed_folder(folder).unwrap(), None);
    fs::write(folder.join("latest"), "checkpoint_7").unwrap();
    assert_eq!(deepspeed_folder(folder).unwrap(), None, "another program's");
    fs::write(folder.join("latest"), "global_step9\n").unwrap();
    let error = deepspeed_folder(folder).unwrap_err().to_string();
    assert!(error.contains("names the folder `global_step9`"), "{error}");
    for step in ["global_step2", "global_step9"] {
        copied(&fixture("2-bfloat16/global_step2"), &folder.join(step));
    }
    assert_eq!(deepspeed_folder(folder).unwrap(), Some(folder.join("global_step9")));
    fs::remove_file(folder.join("latest")).unwrap();
    let error = deepspeed_folder(folder).unwrap_err().to_string();
    assert!(error.contains("global_step2") && error.contains("no file `latest`"), "{error}");
    fs::remove_dir_all(folder.join("global_step2")).unwrap();
    assert_eq!(deepspeed_folder(folder).unwrap(), Some(folder.join("global_step9")));
    fs::remove_dir_all(folder.join("global_step9")).unwrap();
    fs::write(folder.join("zero_to_fp32.py"), "").unwrap();
    assert!(deepspeed_folder(folder).is_err());
    fs::write(folder.join("latest"), "../2-bfloat16").unwrap();
    let error = deepspeed_folder(folder).unwrap_err().to_string();
    assert!(error.contains("not a file name"), "{error}");
}

#[test]
fn cut_and_changed_files_are_errors_or_other_weights() {
    let folder = tempfile::tempdir().unwrap();
    for step in ["2-bfloat16", "3-bfloat16"] {
        let folder = folder.path().join(step);
        copied(&fixture(step).join("global_step2"), &folder);
        let files: Vec<PathBuf> =
            fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        for file in files.iter().filter(|file| file.to_string_lossy().contains("rank_0")) {
            let bytes = fs::read(file).unwrap();
            for length in (0..bytes.len()).step_by(397) {
                fs::write(file, &bytes[..length]).unwrap();
                assert!(
                    DeepSpeedFolder::open(&folder).is_err(),
                    "{} cut at {length}",
                    file.display()
                );
            }
            for at in (0..bytes.len()).step_by(61) {
                let mut changed = bytes.clone();
                changed[at] = changed[at].wrapping_add(1 + (at % 5) as u8);
                fs::write(file, &changed).unwrap();
                // Must not panic.
                let _ = DeepSpeedFolder::open(&folder).and_then(|run| run.optimizer_state());
            }
            fs::write(file, &bytes).unwrap();
        }
        assert!(DeepSpeedFolder::open(&folder).is_ok());
    }
}
