//! Checkpoints written by DeepSpeed. `fixtures/deepspeed/make.py` has made them, with the values that DeepSpeed's own
//! script reads.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use brigade_checkpoint::convert::{
    StateKind, Target, WeightsOptions, convert, convert_like, convert_with,
};
use brigade_checkpoint::layout::Checkpoint;
use brigade_checkpoint::pth::{TensorData, write};
use brigade_checkpoint::{
    DeepSpeedFolder, Dtype, Error, Region, Safetensors, TensorInfo, Value, WeightsReader,
    deepspeed_folder,
};
use serde_json::json;

use crate::saved;

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

/// Makes the universal checkpoint that DeepSpeed converts a step of this stage to, with the model's states that it
/// copies.
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

/// Returns the moments under the names that the script gives them.
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
                // With stage 1, DeepSpeed's script lacks the frozen parameters that the model's states contain.
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

/// Reads files without a stage: DeepSpeed's BF16_Optimizer does not write it, so its own script refuses them.
#[test]
fn weights_of_the_optimizer_of_bfloat16_are_those_that_its_model_rounds() {
    let folder = tempfile::tempdir().unwrap();
    let (wide, rounded) =
        (folder.path().join("wide.safetensors"), folder.path().join("rounded.safetensors"));
    let dtype = Some(Dtype::BF16);
    let options = WeightsOptions { dtype, ..WeightsOptions::default() };
    let report = convert_with(&fixture("1-bfloat16"), &wide, TARGET, &options).unwrap();
    let line = "a checkpoint of DeepSpeed: stage 1, 2 ranks, step 2, 10 tensors";
    assert_eq!(report.read[0], line);
    let options = WeightsOptions { dtype, key: Some("module".into()), ..WeightsOptions::default() };
    let model = fixture("1-bfloat16/global_step2/mp_rank_00_model_states.pt");
    convert_with(&model, &rounded, TARGET, &options).unwrap();
    assert_eq!(values(&wide), values(&rounded));
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
            // DeepSpeed's own conversion writes no steps there.
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

    // One state of all parameters, in one file.
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

/// Returns the error of opening a changed copy of a step.
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

/// A tensor of numbers, for files in DeepSpeed's form.
#[derive(Clone)]
struct Numbers(Vec<f32>);

impl TensorData for Numbers {
    fn info(&self) -> TensorInfo {
        TensorInfo { dtype: Dtype::F32, shape: vec![self.0.len() as u64] }
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        self.0.iter().try_for_each(|number| out.write_all(&number.to_le_bytes()))
    }
}

type Tree = Value<Numbers>;

fn numbers(range: std::ops::Range<i32>) -> Tree {
    Value::Tensor(Numbers(range.map(|number| number as f32).collect()))
}

fn ints(numbers: &[i64]) -> Tree {
    Value::Tuple(numbers.iter().copied().map(Value::Int).collect())
}

/// Returns names and sizes of a group's parameters.
fn shapes(parameters: &[(&str, &[i64])]) -> Tree {
    Value::dict(parameters.iter().map(|(name, size)| (*name, ints(size))))
}

fn save(path: &Path, value: &Tree) {
    let mut bytes = io::Cursor::new(Vec::new());
    write(&mut bytes, value).unwrap();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes.into_inner()).unwrap();
}

fn with(value: Tree, changes: Vec<(&str, Tree)>) -> Tree {
    let Value::Dict(mut entries) = value else { panic!("not a dictionary") };
    for (key, change) in changes {
        entries.retain(|(known, _)| known.as_str() != Some(key));
        entries.push((Value::Str(key.into()), change));
    }
    Value::Dict(entries)
}

fn model(groups: Vec<Tree>) -> Tree {
    Value::dict([
        ("module", Value::dict::<&str>([])),
        ("param_shapes", Value::List(groups)),
        ("global_steps", Value::Int(5)),
    ])
}

/// Returns a rank's partition of a group: weights, and moments that are 100 and 200 greater.
fn optimizer(stage: i64, ranks: i64, group: std::ops::Range<i32>) -> Tree {
    let moment = |more: i32| numbers(group.start + more..group.end + more);
    let slots = Value::dict([
        ("step", Value::Int(5)),
        ("exp_avg", moment(100)),
        ("exp_avg_sq", moment(200)),
    ]);
    let rates = [("lr", Value::Float(0.5)), ("params", Value::List(vec![Value::Int(0)]))];
    let state = Value::Dict(vec![(Value::Int(0), slots)]);
    let states = [("state", state), ("param_groups", Value::List(vec![Value::dict(rates)]))];
    let (weights, states_key) = if stage == 3 {
        ("fp32_flat_groups", "optimizer_state_dict")
    } else {
        ("single_partition_of_fp32_groups", "base_optimizer_state")
    };
    Value::dict([
        ("zero_stage", Value::Int(stage)),
        ("partition_count", Value::Int(ranks)),
        (weights, Value::List(vec![numbers(group)])),
        (states_key, Value::dict(states)),
    ])
}

fn save_optimizer(folder: &Path, rank: usize, state: Tree) {
    let name = format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
    save(&folder.join(name), &Value::dict([("optimizer_state_dict", state)]));
}

fn floats(tensor: &impl TensorData) -> Vec<f32> {
    let (_, bytes) = read(tensor);
    bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn parameters_with_elements_between_them_are_cut_out() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let paddings = Value::List(vec![Value::List(vec![Value::Int(1), Value::Int(0)])]);
    // Elastic checkpoints have a list, without padding at the end.
    let elastic = Value::List(vec![Value::dict([("step", Value::Int(5)), ("m", numbers(0..4))])]);
    let changes =
        |base| vec![("param_alignment_paddings", paddings.clone()), ("base_optimizer_state", base)];
    save_optimizer(folder, 0, with(optimizer(2, 2, 0..4), changes(elastic.clone())));
    save_optimizer(folder, 1, with(optimizer(2, 2, 4..7), changes(elastic)));
    let groups = vec![shapes(&[("a", &[3]), ("b", &[3, 1])])];
    save(&folder.join("mp_rank_00_model_states.pt"), &model(groups));
    let run = DeepSpeedFolder::open(folder).unwrap();
    let weights: BTreeMap<_, _> = run.weights().iter().cloned().collect();
    assert_eq!(floats(&weights["a"]), [0.0, 1.0, 2.0]);
    assert_eq!(floats(&weights["b"]), [4.0, 5.0, 6.0]);
    assert_eq!(weights["b"].info().shape, [3, 1]);
    let moments = run.moments().unwrap();
    assert_eq!(floats(&moments["b"]["m"]), [0.0, 1.0, 2.0]);
    assert_eq!(floats(&moments["a"]["step"]), [5.0]);
    let error = run.optimizer_state().unwrap_err().to_string();
    assert!(error.contains("no parameter groups in PyTorch's form"), "{error}");
}

#[test]
fn ranks_without_a_part_of_a_small_parameter_are_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    // Five elements over four ranks: 2, 2, 1, and none. Then one element, and none.
    let groups = vec![shapes(&[("five", &[5]), ("one", &[]), ("none", &[0, 3])])];
    for rank in 0..4i32 {
        save_optimizer(folder, rank as usize, optimizer(3, 4, rank * 10..rank * 10 + 3));
        let name = format!("zero_pp_rank_{rank}_mp_rank_00_model_states.pt");
        save(&folder.join(name), &model(groups.clone()));
    }
    let run = DeepSpeedFolder::open(folder).unwrap();
    let found: Vec<_> = run
        .weights()
        .iter()
        .map(|(name, it)| (name.as_str(), it.info().shape, floats(it)))
        .collect();
    let expected = [
        ("five", vec![5], vec![0.0, 1.0, 10.0, 11.0, 20.0]),
        ("one", vec![], vec![2.0]),
        ("none", vec![0, 3], vec![]),
    ];
    assert_eq!(found, expected);
    let moments = run.moments().unwrap();
    assert_eq!(floats(&moments["five"]["exp_avg_sq"]), [200.0, 201.0, 210.0, 211.0, 220.0]);
    let state = run.optimizer_state().unwrap();
    let group = &state.get("param_groups").unwrap().as_items().unwrap()[0];
    let names: Vec<_> = group.get("param_names").unwrap().as_items().unwrap().iter().collect();
    assert_eq!(
        names.iter().filter_map(|name| name.as_str()).collect::<Vec<_>>(),
        ["five", "one", "none"]
    );
    assert_eq!(group.get("lr").unwrap().as_float(), Some(0.5));
    assert_eq!(state.get("state").unwrap().as_dict().unwrap().len(), 2);
}

#[test]
fn contradictions_are_refused() {
    // A single rank with eight elements.
    let good = || optimizer(2, 1, 0..8);
    let shapes_of = |parameters: &[(&str, &[i64])]| model(vec![shapes(parameters)]);
    let fits = || shapes_of(&[("a", &[4, 2])]);
    let list = |value: Tree| Value::List(vec![value]);
    let cases: Vec<(Tree, Tree, &str)> = vec![
        (good(), shapes_of(&[("a", &[9])]), "has 9 elements from 0 on, of 8"),
        (good(), shapes_of(&[("a", &[2])]), "have 2 elements, the ranks 8"),
        (good(), shapes_of(&[("a", &[i64::MAX, i64::MAX])]), "has no size for `a`"),
        (good(), shapes_of(&[("a", &[i64::MAX, 2])]), "elements from 0 on, of 8"),
        (good(), shapes_of(&[("a", &[i64::MAX, 2]), ("b", &[8])]), "elements from 0 on, of 8"),
        (good(), shapes_of(&[("a", &[-8])]), "has no size for `a`"),
        (good(), shapes_of(&[("a", &[1; 40])]), "has no size for `a`"),
        (good(), model(vec![]), "has 0 groups, the optimizer's states 1"),
        (good(), model(vec![shapes(&[("a", &[4])]), shapes(&[("a", &[4])])]), "2 groups"),
        (good(), with(fits(), vec![("param_shapes", Value::Int(1))]), "has no `param_shapes`"),
        (good(), with(fits(), vec![("param_shapes", list(Value::Int(1)))]), "of names and sizes"),
        (good(), with(fits(), vec![("mp_world_size", Value::Int(2))]), "tensor or pipeline"),
        (
            good(),
            with(
                fits(),
                vec![(
                    "checkpoint_parallel_dimensions",
                    Value::dict([("tp_degree", Value::Int(2))]),
                )],
            ),
            "tensor or pipeline",
        ),
        (good(), with(fits(), vec![("ds_autoep_layers", list(Value::None))]), "expert parallelism"),
        (with(good(), vec![("zero_stage", Value::Int(7))]), fits(), "its `zero_stage` is 7"),
        (with(good(), vec![("zero_stage", Value::Int(3))]), fits(), "its `zero_stage` is 3"),
        (with(good(), vec![("partition_count", Value::None)]), fits(), "no `partition_count`"),
        (with(good(), vec![("partition_count", Value::Int(0))]), fits(), "no `partition_count`"),
        (with(good(), vec![("partition_count", ints(&[1, -1]))]), fits(), ""),
        (
            with(good(), vec![("partition_count", ints(&[1, i64::MAX]))]),
            fits(),
            "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing",
        ),
        (
            with(good(), vec![("single_partition_of_fp32_groups", list(Value::Int(1)))]),
            fits(),
            "is an integer, not a tensor",
        ),
        (
            with(good(), vec![("single_partition_of_fp32_groups", Value::None)]),
            fits(),
            "not of ZeRO's stages",
        ),
        (
            with(good(), vec![("param_alignment_paddings", list(list(Value::Int(i64::MAX))))]),
            fits(),
            "elements, the ranks 8",
        ),
        (
            with(good(), vec![("param_alignment_paddings", list(list(Value::Int(-1))))]),
            fits(),
            "a list of numbers",
        ),
        (
            with(good(), vec![("param_alignment_paddings", list(Value::List(vec![])))]),
            fits(),
            "one number for each of 1 parameters",
        ),
        (
            with(good(), vec![("ds_zero_partition_groups", list(Value::None))]),
            fits(),
            "expert parallelism",
        ),
        (
            with(good(), vec![("base_optimizer_state", Value::List(vec![Value::None; 2]))]),
            fits(),
            "a state of group 1",
        ),
        (Value::Int(1), fits(), "no `optimizer_state_dict`"),
        (good(), fits(), ""),
    ];
    for (optimizer, model, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        save_optimizer(folder, 0, optimizer);
        save(&folder.join("mp_rank_00_model_states.pt"), &model);
        match DeepSpeedFolder::open(folder) {
            Ok(_) => assert!(expected.is_empty(), "{expected}"),
            Err(error) => {
                let error = error.to_string();
                assert!(!expected.is_empty() && error.contains(expected), "{expected}: {error}");
            }
        }
    }
}

#[test]
fn ranks_that_contradict_each_other_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, second: Tree, expected: &str, shape: &[i64]| {
        let folder = folder.path().join(name);
        save_optimizer(&folder, 0, optimizer(3, 2, 0..4));
        save_optimizer(&folder, 1, second);
        for rank in 0..2 {
            let name = format!("zero_pp_rank_{rank}_mp_rank_00_model_states.pt");
            save(&folder.join(name), &model(vec![shapes(&[("a", shape)])]));
        }
        let opened = DeepSpeedFolder::open(&folder).and_then(|run| run.moments().map(drop));
        let error = opened.unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    };
    let good = || optimizer(3, 2, 0..4);
    refused("more", optimizer(3, 2, 0..5), "the groups of the first rank have [4] elements", &[8]);
    refused("others", good(), "have 3 elements in each rank, its groups 4", &[6]);
    refused("fewer", good(), "has 5 elements in each rank from 0 on, of 4", &[10]);
    let slots = Value::dict([("step", Value::Int(5)), ("exp_avg", numbers(0..3))]);
    let short = Value::dict([("state", Value::Dict(vec![(Value::Int(0), slots)]))]);
    let changed = |state| with(good(), vec![("optimizer_state_dict", state)]);
    refused("short", changed(short), "rank 1 has 3 elements, but 4 from 0 on belong to it", &[8]);
    let none = Value::dict([("state", Value::Dict(vec![]))]);
    refused("none", changed(none), "rank 1 has no `exp_avg` of it", &[8]);
    refused(
        "groups",
        with(good(), vec![("fp32_flat_groups", Value::List(vec![numbers(0..2); 2]))]),
        "it has 2 groups, the first rank's 1",
        &[8],
    );
    refused("stage", optimizer(2, 2, 0..4), "it is of stage 2 with 2 ranks", &[8]);
}

#[test]
fn a_tied_parameter_that_was_not_saved_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    save_optimizer(folder, 0, optimizer(2, 1, 0..8));
    let text = |text: &str| Value::Str(text.into());
    let tied = Value::dict([("b", text("c")), ("d", text("a")), ("frozen", text("c"))]);
    let module = Value::dict([("a", numbers(0..8)), ("frozen", numbers(0..3))]);
    let changes = vec![("shared_params", tied), ("module", module)];
    let states = with(model(vec![shapes(&[("a", &[4, 2])])]), changes);
    save(&folder.join("mp_rank_00_model_states.pt"), &states);
    let to = folder.join("made.safetensors");
    let report = convert(folder, &to, TARGET).unwrap();
    let missing = "`b`: it is `c`, which the checkpoint does not have";
    assert_eq!(report.left_out[1..], [missing]);
    let found = values(&to);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["a", "d", "frozen"]);
    assert_eq!(found["a"], found["d"]);
}

/// Writes the checkpoint of a program with two parameters, right after `prepare`.
fn program(folder: &Path) {
    let numbers = json!({
        "lr": 0.02, "initial_lr": 0.02, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": 0.0
    });
    let optimizer = json!({
        "kind": "Adam", "steps": 0, "initial_lr": 0.02, "lr": 0.02,
        "groups": [{ "numbers": numbers, "parameters": ["a", "b"] }],
        "parameters": ["a", "b"], "state": {},
    });
    let entries = [
        ("model", "model", None, vec![("a", vec![3, 2]), ("b", vec![2])]),
        ("optimizer", "optimizer", Some(optimizer), Vec::new()),
    ];
    saved::write(folder, 2, 0, &entries);
}

#[test]
fn a_step_becomes_a_checkpoint_with_weights_and_moments() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    program(&folder.join("like"));
    for stage in [2, 3] {
        // As from Accelerate's save_state: one folder of DeepSpeed's, with the parameters in another order.
        let from = folder.join(format!("from-{stage}"));
        fs::create_dir_all(&from).unwrap();
        fs::write(from.join("latest"), "pytorch_model").unwrap();
        let random = Value::dict([("torch_manual_seed", numbers(0..2))]);
        for rank in 0..2i32 {
            let step = from.join("pytorch_model");
            let groups = vec![shapes(&[("b", &[2]), ("a", &[3, 2])])];
            let names = match stage {
                3 => format!("zero_pp_rank_{rank}_mp_rank_00_model_states.pt"),
                _ => "mp_rank_00_model_states.pt".to_owned(),
            };
            save(&step.join(names), &model(groups));
            let state = optimizer(stage, 2, rank * 4..rank * 4 + 4);
            let rates = Value::dict([
                ("lr", Value::Float(0.5)),
                ("betas", Value::Tuple(vec![Value::Float(0.7), Value::Float(0.8)])),
                ("eps", Value::Float(1e-6)),
                ("weight_decay", Value::Float(0.0)),
                ("params", Value::List(vec![Value::Int(0)])),
            ]);
            let key = if stage == 3 { "optimizer_state_dict" } else { "base_optimizer_state" };
            let base = with(
                state.get(key).unwrap().clone(),
                vec![("param_groups", Value::List(vec![rates]))],
            );
            save_optimizer(&step, rank as usize, with(state, vec![(key, base)]));
            save(&from.join(format!("random_states_{rank}.pkl")), &random);
        }
        let to = folder.join(format!("made-{stage}"));
        let report = convert_like(&from, &to, &folder.join("like"), &[]).unwrap();
        assert!(report.kept.is_empty() && report.left_out.is_empty(), "{report:?}");
        let checkpoint = Checkpoint::open(&to).unwrap();
        assert_eq!(checkpoint.verify().len(), 0);
        assert_eq!(checkpoint.manifest().step, 5);
        // Stage 2 stores the parameters one after the other, stage 3 each in two halves.
        let (a, b) = match stage {
            3 => ([1.0, 2.0, 3.0, 5.0, 6.0, 7.0], [0.0, 4.0]),
            _ => ([2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [0.0, 1.0]),
        };
        let bytes = |numbers: &[f32], more: f32| -> Vec<u8> {
            numbers.iter().flat_map(|number| (number + more).to_le_bytes()).collect()
        };
        let found = values(&to.join("model.safetensors"));
        assert_eq!((&found["a"].1, &found["b"].1), (&bytes(&a, 0.0), &bytes(&b, 0.0)));
        let found = values(&to.join("optimizer.safetensors"));
        let of = |name: &str, slot: &str| {
            let found = found.iter().find(|(key, _)| key.contains(name) && key.ends_with(slot));
            found.map(|(_, (_, bytes))| bytes.clone()).unwrap_or_default()
        };
        assert_eq!(of(".a.", "exp_avg"), bytes(&a, 100.0), "{:?}", found.keys());
        assert_eq!(of(".b.", "exp_avg_sq"), bytes(&b, 200.0));
        assert_eq!(of(".a.", "step"), 5f32.to_le_bytes());
        let objects = &checkpoint.manifest().objects;
        let object = objects.iter().find(|object| object.kind == "optimizer").unwrap();
        let state = checkpoint.state(object).unwrap().unwrap();
        let numbers = state.get("groups").unwrap().as_items().unwrap()[0].get("numbers").unwrap();
        assert_eq!(numbers.get("beta1").and_then(Value::as_float), Some(0.7));
    }
}

/// The fixture was made by `fixtures/deepspeed/make_accelerate.py`.
#[test]
fn a_folder_of_accelerate_with_deepspeed_becomes_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let names = ["0.weight", "0.bias", "1.weight", "1.bias"];
    let shapes = [vec![7, 4], vec![7], vec![3, 7], vec![3]];
    let numbers = json!({
        "lr": 0.02, "initial_lr": 0.02, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": 0.0
    });
    let optimizer = json!({
        "kind": "AdamW", "steps": 0, "initial_lr": 0.02, "lr": 0.02,
        "groups": [{ "numbers": numbers, "parameters": names }],
        "parameters": names, "state": {},
    });
    let definition = json!({ "all": { "function": { "momentum": false } } });
    let scheduler = json!({ "position": 0, "lr": 0.0, "plateau": null, "definition": definition });
    let entries = [
        ("model", "model", None, names.into_iter().zip(shapes).collect()),
        ("optimizer", "optimizer", Some(optimizer), Vec::new()),
        ("scheduler", "scheduler", Some(scheduler), Vec::new()),
    ];
    let like = folder.join("like");
    saved::write(&like, 2, 0, &entries);
    let to = folder.join("made");
    let report = convert_like(&fixture("accelerate"), &to, &like, &[StateKind::Random]).unwrap();
    let expected = values(&fixture("accelerate.safetensors"));
    assert_eq!(values(&to.join("model.safetensors")), expected);
    let found = values(&to.join("optimizer.safetensors"));
    for (name, moment) in values(&fixture("accelerate.moments.safetensors")) {
        let (parameter, slot) = name.split_once('/').unwrap();
        let of = |key: &String| key.ends_with(&format!("{parameter}.{slot}"));
        let own: Vec<_> = found.iter().filter(|(key, _)| of(key)).map(|(_, value)| value).collect();
        assert_eq!(own, [&moment], "{name} of {:?}", found.keys());
    }
    let checkpoint = Checkpoint::open(&to).unwrap();
    assert_eq!(checkpoint.manifest().step, 3);
    let state = |kind: &str| {
        let object = checkpoint.manifest().of_kind(kind).next().unwrap().clone();
        checkpoint.state(&object).unwrap().unwrap()
    };
    let optimizer = state("optimizer");
    let numbers = optimizer.get("groups").unwrap().as_items().unwrap()[0].get("numbers").unwrap();
    assert_eq!(numbers.get("beta1").and_then(Value::as_float), Some(0.8));
    assert_eq!(state("scheduler").get("position").and_then(Value::as_int), Some(3));
    assert!(!report.left_out.iter().any(|line| line.contains("pytorch_model")), "{report:?}");
}

/// Writes the checkpoint of a program in fp16 with these groups of parameters, right after `prepare`.
fn program_in_fp16(
    folder: &Path,
    groups: &[&[&str]],
    parameters: &[(&'static str, Vec<u64>)],
    has_scaler: bool,
) {
    let group = |names: &&[&str]| {
        let numbers = json!({
            "lr": 0.01, "initial_lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01,
            "amsgrad": 0.0
        });
        json!({ "numbers": numbers, "parameters": names })
    };
    let optimizer = json!({
        "kind": "AdamW", "steps": 0, "initial_lr": 0.01, "lr": 0.01,
        "groups": groups.iter().map(group).collect::<Vec<_>>(),
        "parameters": groups.concat(), "state": {},
    });
    let definition = json!({ "all": { "function": { "momentum": false } } });
    let scheduler = json!({ "position": 0, "lr": 0.0, "plateau": null, "definition": definition });
    let scaler = json!({
        "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "growth_tracker": 0
    });
    let entries = [
        ("model", "model", None, parameters.to_vec()),
        ("optimizer", "optimizer", Some(optimizer), Vec::new()),
        ("scheduler", "scheduler", Some(scheduler), Vec::new()),
        ("scaler", "scaler", Some(scaler), Vec::new()),
    ];
    saved::write(folder, 2, 0, &entries[..if has_scaler { 4 } else { 3 }]);
}

/// Compares a checkpoint that was converted from a fixture, whose optimizer has counted this many steps, with the steps
/// that DeepSpeed made after it.
fn goes_on(checkpoint: &Path, step: &str, counted: u64) {
    let found = fs::read(fixture(&format!("{step}.json"))).unwrap();
    let found: serde_json::Value = serde_json::from_slice(&found).unwrap();
    let list = |key: &str| found[key].as_array().unwrap().clone();
    let saved_at = found["saved"].as_u64().unwrap() as usize;
    let skipped: Vec<bool> = list("skipped").iter().map(|it| it.as_bool().unwrap()).collect();
    let scales: Vec<f64> = list("scales").iter().map(|it| it.as_f64().unwrap()).collect();
    let stepped = skipped[..saved_at].iter().filter(|skipped| !**skipped).count();
    assert_eq!((saved_at, stepped), (7, 5));
    let checkpoint = Checkpoint::open(checkpoint).unwrap();
    assert_eq!(checkpoint.manifest().step, counted);
    let state = |kind: &str| {
        let object = checkpoint.manifest().of_kind(kind).next().unwrap().clone();
        checkpoint.state(&object).unwrap().unwrap()
    };
    let scheduler = state("scheduler");
    assert_eq!(scheduler.get("position").and_then(Value::as_int), Some(stepped as i64));
    let lr = list("lr")[saved_at].as_f64();
    assert_eq!(scheduler.get("lr").and_then(Value::as_float), lr);
    // PyTorch's rule from the converted state.
    let scaler = state("scaler");
    let number = |key: &str| scaler.get(key).and_then(Value::as_float).unwrap();
    let (mut scale, mut tracker) = (number("scale"), number("growth_tracker"));
    for step in saved_at..scales.len() {
        assert_eq!(scale, scales[step], "step {step}");
        tracker += 1.0;
        if skipped[step] {
            (scale, tracker) = (scale * number("backoff_factor"), 0.0);
        } else if tracker == number("growth_interval") {
            (scale, tracker) = (scale * number("growth_factor"), 0.0);
        }
    }
}

/// The fixtures were made by `fixtures/deepspeed/make_fp16.py`, which went on after the checkpoint.
#[test]
fn a_run_in_fp16_continues_with_its_scale_and_its_place_in_the_schedule() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let names = ["0.weight", "0.bias", "1.weight", "1.bias"];
    let shapes = [vec![3, 4], vec![3], vec![2, 3], vec![2]];
    let parameters: Vec<_> = names.into_iter().zip(shapes).collect();
    let like = folder.join("like");
    program_in_fp16(&like, &[&names], &parameters, true);
    for stage in [2, 3] {
        let step = format!("{stage}-float16");
        let universal = folder.join(format!("universal-{step}"));
        copied(&fixture(&format!("universal-{step}")), &universal);
        for entry in fs::read_dir(fixture(&step).join("global_step7")).unwrap().flatten() {
            if entry.file_name().to_string_lossy().ends_with("_model_states.pt") {
                fs::copy(entry.path(), universal.join(entry.file_name())).unwrap();
            }
        }
        for from in [fixture(&step), universal] {
            let run = DeepSpeedFolder::open(&deepspeed_folder(&from).unwrap().unwrap()).unwrap();
            assert_eq!((run.step(), run.skipped_steps()), (Some(7), Some(2)));
            let to = folder.join("made");
            let report = convert_like(&from, &to, &like, &[StateKind::Random]).unwrap();
            assert_eq!(report.left_out, Vec::<String>::new(), "{}", from.display());
            let expected = values(&fixture(&format!("{step}.safetensors")));
            assert_eq!(values(&to.join("model.safetensors")), expected);
            goes_on(&to, &step, 5);
            fs::remove_dir_all(&to).unwrap();
        }
    }

    // A program without a scaler.
    let like = folder.join("without");
    program_in_fp16(&like, &[&names], &parameters, false);
    let to = folder.join("made");
    let report = convert_like(&fixture("2-float16"), &to, &like, &[StateKind::Random]).unwrap();
    let line = "`loss_scaler` of global_step7: ";
    assert!(report.left_out.iter().any(|it| it.starts_with(line)), "{report:?}");
}

/// The fixtures were made by `fixtures/deepspeed/make_whole.py`, which went on after the checkpoint.
#[test]
fn a_run_in_fp16_without_zero_has_the_weights_and_states_of_its_optimizer() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let groups: [&[&str]; 2] =
        [&["embedding.weight", "middle.weight", "back.weight"], &["middle.bias", "back.bias"]];
    let parameters = [
        ("embedding.weight", vec![7, 5]),
        ("middle.weight", vec![3, 5]),
        ("back.weight", vec![5, 3]),
        ("middle.bias", vec![3]),
        ("back.bias", vec![5]),
        ("head.weight", vec![7, 5]),
        ("frozen.weight", vec![5, 5]),
        ("frozen.bias", vec![5]),
        ("scale", vec![5]),
    ];
    let like = folder.join("like");
    program_in_fp16(&like, &groups, &parameters, true);
    for name in ["0-float16", "0-float16-fused"] {
        let to = folder.join("made.safetensors");
        let report = convert(&fixture(name), &to, TARGET).unwrap();
        let line = "a checkpoint of DeepSpeed: stage 0, 1 rank, step 7, 9 tensors";
        assert_eq!(report.read[0], line, "{name}");
        assert!(report.read[1].starts_with("`frozen.weight`, `frozen.bias` from the model's"));
        assert_eq!(values(&to), values(&fixture(&format!("{name}.safetensors"))), "{name}");
        fs::remove_file(&to).unwrap();

        let run = DeepSpeedFolder::open(&fixture(name).join("global_step7")).unwrap();
        assert_eq!((run.stage(), run.ranks(), run.skipped_steps()), (0, 1, Some(2)));
        let mut found = moments(&run);
        // DeepSpeed makes one step without gradients at the start, for the memory of the states.
        assert_eq!(found["back.bias/step"].1, 6f32.to_le_bytes());
        found.retain(|name, _| !name.ends_with("/step"));
        assert_eq!(found, values(&fixture(&format!("{name}.moments.safetensors"))), "{name}");
        let state = run.optimizer_state().unwrap();
        let saved = state.get("param_groups").unwrap().as_items().unwrap();
        for (group, (names, decay)) in saved.iter().zip(groups.iter().zip([0.1, 0.0])) {
            let found = group.get("param_names").unwrap().as_items().unwrap();
            assert!(found.iter().filter_map(Value::as_str).eq(names.iter().copied()), "{found:?}");
            assert_eq!(group.get("weight_decay").and_then(Value::as_float), Some(decay));
        }

        let to = folder.join("made");
        let report = convert_like(&fixture(name), &to, &like, &[StateKind::Random]).unwrap();
        let line = "5 steps, where the optimizer has counted 6";
        assert!(report.left_out.iter().any(|it| it.contains(line)), "{report:?}");
        goes_on(&to, name, 6);
        let found = values(&to.join("optimizer.safetensors"));
        for (name, moment) in values(&fixture(&format!("{name}.moments.safetensors"))) {
            let (parameter, slot) = name.split_once('/').unwrap();
            let of = |key: &String| key.ends_with(&format!("{parameter}.{slot}"));
            let own: Vec<_> = found.iter().filter(|(key, _)| of(key)).map(|(_, it)| it).collect();
            assert_eq!(own, [&moment], "{name} of {:?}", found.keys());
        }
        fs::remove_dir_all(&to).unwrap();
    }
}

/// Returns the file of a run without ZeRO, whose module and optimizer have the numbers of these half-open ranges.
fn without_zero(module: &[(&str, (i32, i32))], groups: &[&[(i32, i32)]]) -> Tree {
    let group = |group: &&[(i32, i32)]| {
        Value::List(group.iter().map(|&(first, end)| numbers(first..end)).collect())
    };
    let optimizer = Value::dict([
        ("fp32_groups", Value::List(groups.iter().map(group).collect())),
        ("cur_scale", Value::Float(128.0)),
    ]);
    let module = module.iter().map(|&(name, (first, end))| (name, numbers(first..end)));
    Value::dict([("module", Value::dict(module)), ("optimizer", optimizer)])
}

#[test]
fn weights_without_names_are_found_by_their_values_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let path = folder.join("mp_rank_00_model_states.pt");
    let module = [("frozen", (5, 8)), ("a", (0, 3)), ("b", (7, 9)), ("c", (1, 4)), ("d", (2, 4))];
    // The frozen parameter has the shape of one that is trained.
    save(&path, &without_zero(&module, &[&[(1, 4)], &[(0, 3), (7, 9), (2, 4)]]));
    let run = DeepSpeedFolder::open(folder).unwrap();
    let names: Vec<_> = run.weights().iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c", "d", "frozen"]);
    let error = |groups: &[&[(i32, i32)]]| {
        save(&path, &without_zero(&module, groups));
        DeepSpeedFolder::open(folder).unwrap_err().to_string()
    };
    // In another order than that of the module, with values of another step, and of another optimizer.
    let found = error(&[&[(7, 9), (0, 3)]]);
    assert!(found.contains("of group 0 after `b` are not the next"), "{found}");
    let found = error(&[&[(0, 3)], &[(8, 10)]]);
    assert!(found.contains("of group 1 are not the next") && found.contains("`module`"), "{found}");
    let plain = Value::dict([("state", Value::dict::<&str>([]))]);
    save(&path, &with(without_zero(&module, &[]), vec![("optimizer", plain)]));
    let found = DeepSpeedFolder::open(folder).unwrap_err().to_string();
    assert!(found.contains("not one of DeepSpeed's for fp16"), "{found}");
}
