//! Settings against what Accelerate 1.15 and DeepSpeed 0.19 make of them: `tests/settings/made.py` wrote the table.

use brigade_checkpoint::Dtype;
use brigade_sharding::settings::{
    DeepSpeedConfig, Facts, FsdpConfig, Given, LossScale, ParallelismConfig, Precision,
    ProgramOptimizer, ProgramSchedule, Settings, SettingsError, describe, resolve,
};
use brigade_sharding::{Axis, Offload, ReduceGradients, Reshard, Strategy, Units};
use proptest::prelude::{any, prop_oneof, proptest};
use proptest::strategy::Strategy as _;
use serde_json::{Map, Value, json};

fn table(name: &str) -> Vec<Value> {
    let table: Value =
        serde_json::from_str(include_str!("../settings/accelerate-1.15.0.json")).unwrap();
    let rows = table[name].as_array().unwrap().clone();
    assert!(!rows.is_empty(), "{name}");
    rows
}

fn given(row: &Value) -> Vec<Given> {
    let given = row.as_object().unwrap().iter();
    given.map(|(name, value)| Given::new(name, value.as_str().unwrap(), "a.yaml")).collect()
}

fn count(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn optional_count(value: &Value) -> Option<u64> {
    value.as_u64()
}

fn dtype(value: &Value) -> Option<Dtype> {
    value.as_str().map(|name| match name {
        "bfloat16" => Dtype::BF16,
        "float16" => Dtype::F16,
        "float32" => Dtype::F32,
        name => panic!("{name}"),
    })
}

#[test]
fn fsdp_keys_are_resolved_as_accelerate_does() {
    for row in table("fsdp") {
        let facts = Facts {
            local_world_size: 2,
            mixed_precision: Precision::parse(row["precision"].as_str().unwrap()),
            ..Facts::new(4)
        };
        let resolved =
            FsdpConfig::read(&given(&row["given"])).and_then(|config| config.resolve(None, &facts));
        let Some(answer) = row.get("answer") else {
            assert!(resolved.is_err(), "{row}: {resolved:?}");
            continue;
        };
        let (settings, _) = resolved.unwrap_or_else(|error| panic!("{row}: {error}"));
        assert_eq!(Some(settings.recompute), answer["recompute"].as_bool(), "{row}");
        let expected = match answer["strategy"].as_str() {
            None => Some((Strategy::Zero3, answer["reshard"].as_bool().unwrap())),
            Some("FULL_SHARD") => Some((Strategy::Zero3, true)),
            Some("SHARD_GRAD_OP") => Some((Strategy::Zero3, false)),
            Some("HYBRID_SHARD") => Some((Strategy::Hybrid(2), true)),
            Some("_HYBRID_SHARD_ZERO2") => Some((Strategy::Hybrid(2), false)),
            Some("NO_SHARD") => None,
            Some(name) => panic!("{name}"),
        };
        let found = settings.sharding.as_ref().map(|it| (it.strategy, it.reshard_after_forward));
        let reshard = |reshards| if reshards { Reshard::Yes } else { Reshard::No };
        assert_eq!(found, expected.map(|(strategy, it)| (strategy, reshard(it))), "{row}");
        let Some(sharding) = settings.sharding else { continue };
        assert_eq!(
            Some(sharding.offload == Offload::Cpu { pin: true }),
            answer["offload"].as_bool(),
            "{row}"
        );
        let mixed = [sharding.mixed.param, sharding.mixed.reduce, sharding.mixed.output];
        assert_eq!(mixed, ["param", "reduce", "output"].map(|key| dtype(&answer[key])), "{row}");
        let units = match (answer["wrap"].as_str(), answer["min_num_params"].as_u64()) {
            (Some("transformer_auto_wrap_policy"), _) => Units::Blocks,
            (Some(_), Some(parameters)) if parameters > 0 => Units::AtLeast(parameters),
            // Blocks instead of one unit where none was asked for.
            (None, _) if row["given"].get("fsdp_auto_wrap_policy").is_none() => Units::Blocks,
            _ => Units::AtLeast(u64::MAX),
        };
        assert_eq!(sharding.units, units, "{row}");
    }
}

#[test]
fn the_data_axes_are_those_of_accelerates_mesh() {
    for row in table("axes") {
        let world_size = count(&row["world"]);
        let mut given = given(&row["given"]);
        given.push(Given::new("fsdp_version", "2", "a.yaml"));
        let resolved = resolve(&given, None, &Facts::new(world_size));
        let axes = row.get("answer").and_then(Value::as_array);
        let Some(axes) = axes else {
            assert!(resolved.is_err(), "{row}: {resolved:?}");
            continue;
        };
        let (settings, _) = resolved.unwrap_or_else(|error| panic!("{row}: {error}"));
        let found: Vec<Value> = Axis::GRID
            .into_iter()
            .map(|axis| (axis.name(), settings.mesh.size(axis)))
            .filter(|(_, size)| *size > 1)
            .map(|(name, size)| json!([name, size]))
            .collect();
        assert_eq!(&found, axes, "{row}");
    }
}

#[test]
fn parts_of_sequences() {
    let resolved = |given: &[(&str, &str)]| {
        let given: Vec<Given> =
            given.iter().map(|&(name, value)| Given::new(name, value, "a.yaml")).collect();
        let (settings, _) = resolve(&given, None, &Facts::new(8)).unwrap();
        let sharding = settings.sharding.map(|it| it.strategy.to_string()).unwrap_or_default();
        (settings.mesh.to_string(), settings.context_method.name(), sharding)
    };
    let expected = |mesh: &str, method: &'static str, sharding: &str| {
        (mesh.to_owned(), method, sharding.to_owned())
    };
    let fsdp = ("fsdp_version", "2");
    let (context, sequence) =
        (("parallelism_config_cp_size", "2"), ("parallelism_config_sp_size", "2"));
    let shard = ("parallelism_config_dp_shard_size", "4");
    let passed = ("parallelism_config_cp_comm_strategy", "alltoall");
    assert_eq!(resolved(&[fsdp, context, shard]), expected("dp_shard 4 x cp 2", "gather", "zero3"));
    assert_eq!(
        resolved(&[fsdp, context, shard, passed]),
        expected("dp_shard 4 x cp 2", "ring", "zero3")
    );
    assert_eq!(
        resolved(&[fsdp, ("parallelism_config_cp_size", "8")]),
        expected("cp 8", "gather", "zero3")
    );
    assert_eq!(
        resolved(&[
            ("use_deepspeed", "true"),
            ("zero_stage", "3"),
            sequence,
            ("parallelism_config_dp_replicate_size", "4")
        ]),
        expected("dp_shard 4 x sp 2", "ulysses", "zero3")
    );
    assert_eq!(resolved(&[context, ("parallelism_config_tp_size", "4")]).0, "cp 2 x tp 4");
}

fn facts(row: &Value) -> Facts {
    let optimizer = &row["optimizer"];
    let optimizer = match (optimizer.get("own"), optimizer.get("lr")) {
        (Some(lr), _) => ProgramOptimizer::Own { lr: lr.as_f64().unwrap() },
        (None, Some(lr)) => ProgramOptimizer::FromSettings {
            lr: lr.as_f64().unwrap(),
            weight_decay: optimizer["weight_decay"].as_f64().unwrap(),
        },
        (None, None) => ProgramOptimizer::Unknown,
    };
    let schedule = match &row["schedule"] {
        Value::Null => ProgramSchedule::Unknown,
        Value::String(_) => ProgramSchedule::Own,
        schedule => ProgramSchedule::FromSettings {
            warmup_steps: schedule["warmup"].as_u64().unwrap(),
            total_steps: optional_count(&schedule["total"]),
        },
    };
    let sizes = row["batch_sizes"].as_array().unwrap();
    let hidden = row["hidden_sizes"].as_array().unwrap();
    Facts {
        mixed_precision: Precision::parse(row["mixed_precision"].as_str().unwrap()),
        batch_sizes: Some(sizes.iter().map(optional_count).collect()),
        split_batches: row["split_batches"].as_bool().unwrap(),
        takes_largest_batch: row["takes_largest_batch"].as_bool().unwrap(),
        gradient_accumulation_steps: row["gradient_accumulation_steps"].as_u64().unwrap(),
        hidden_sizes: Some(hidden.iter().filter_map(Value::as_u64).collect()),
        optimizer,
        schedule,
        ..Facts::new(count(&row["world_size"]))
    }
}

fn config(row: &Value) -> Result<DeepSpeedConfig, SettingsError> {
    let arguments = given(&row["arguments"]);
    match &row["config"] {
        Value::Null => DeepSpeedConfig::from_arguments(&arguments),
        file => {
            DeepSpeedConfig::from_json("ds.json", &file.to_string())?.with_arguments(&arguments)
        }
    }
}

#[test]
fn auto_has_the_values_that_accelerate_gives_it() {
    for row in table("deepspeed_configs") {
        let facts = facts(&row["facts"]);
        let filled = config(&row).and_then(|config| config.filled(&facts));
        match row.get("filled") {
            Some(expected) => {
                let mut filled = filled.unwrap_or_else(|error| panic!("{row}: {error}"));
                // Accelerate makes it infinite, which JSON does not have.
                filled.remove("steps_per_print");
                assert_eq!(&Value::Object(filled), expected, "{row}");
            }
            None => assert!(filled.is_err(), "{row}: {filled:?}"),
        }
    }
}

#[test]
fn a_configuration_means_what_deepspeed_makes_of_it() {
    for row in table("deepspeed_configs") {
        let facts = facts(&row["facts"]);
        let resolved = config(&row).and_then(|config| config.resolve(&facts));
        let Some(answer) = row.get("answer") else {
            let error = resolved.expect_err(&row.to_string());
            assert!(error.to_string().contains("ds.json"), "{error}");
            continue;
        };
        let (settings, notes) = resolved.unwrap_or_else(|error| panic!("{row}: {error}"));
        assert!(!describe(&settings, &notes).is_empty());
        let strategy = settings.sharding.as_ref().map(|it| it.strategy);
        let stages = [None, Some(Strategy::Zero1), Some(Strategy::Zero2), Some(Strategy::Zero3)];
        assert_eq!(strategy, stages[count(&answer["stage"])], "{row}");
        assert_eq!(settings.train_batch_size, optional_count(&answer["train_batch_size"]), "{row}");
        assert_eq!(settings.micro_batch_size, optional_count(&answer["micro_batch_size"]), "{row}");
        let steps = optional_count(&answer["gradient_accumulation_steps"]);
        assert_eq!(Some(settings.gradient_accumulation_steps), steps, "{row}");
        let norm = answer["gradient_clipping"].as_f64().filter(|norm| *norm > 0.0);
        assert_eq!(settings.gradient_clipping, norm, "{row}");
        let precision = match (answer["fp16"].as_bool(), answer["bf16"].as_bool()) {
            (Some(true), _) => Precision::Fp16,
            (_, Some(true)) => Precision::Bf16,
            _ => Precision::No,
        };
        assert_eq!(settings.precision, precision, "{row}");
        let initial = settings.loss_scale.map(|it| match it {
            LossScale::Static(scale) => scale,
            LossScale::Dynamic { initial, .. } => initial,
        });
        assert_eq!(initial, answer["initial_scale"].as_f64(), "{row}");
        if let (Some(sums), Some(sharding)) = (dtype(&answer["sums"]), &settings.sharding) {
            assert_eq!(sharding.mixed.reduce, Some(sums), "{row}");
        }
    }
}

#[test]
fn every_key_of_deepspeed_is_known() {
    for key in table("deepspeed_keys") {
        let key = key.as_str().unwrap();
        let mut root =
            json!({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}});
        let place = key.split('.').fold(&mut root, |section, name| {
            if section.is_null() {
                *section = Value::Object(Map::new());
            }
            &mut section[name]
        });
        if place.is_null() {
            *place = Value::Null;
        }
        let config = DeepSpeedConfig::from_json("ds.json", &root.to_string()).unwrap();
        let resolved = config.resolve(&Facts::new(1));
        assert!(!matches!(resolved, Err(SettingsError::UnknownKey { .. })), "{key}: {resolved:?}");
    }
}

#[test]
fn schedules_have_deepspeeds_rates_to_the_last_bit() {
    for row in table("schedules") {
        let text = json!({
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 0},
            "scheduler": {"type": row["type"], "params": row["params"]},
        });
        let config = DeepSpeedConfig::from_json("ds.json", &text.to_string()).unwrap();
        let (settings, _) = config.resolve(&Facts::new(1)).unwrap();
        let schedule = settings.schedule.unwrap();
        let own = row["lr"].as_f64().unwrap();
        for (step, expected) in (0..).zip(row["rates"].as_array().unwrap()) {
            assert_eq!(Some(schedule.lr(step, own)), expected.as_f64(), "step {step} of {row}");
        }
    }
}

/// A stage with more keys, on 4 ranks.
fn with(more: Value) -> Result<(Settings, Vec<String>), String> {
    let mut root = json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3},
    });
    merge(&mut root, more);
    let config = DeepSpeedConfig::from_json("ds.json", &root.to_string());
    let resolved = config.and_then(|config| config.resolve(&Facts::new(4)));
    let resolved = resolved.map_err(|error| error.to_string())?;
    Ok((resolved.0, resolved.1.iter().map(ToString::to_string).collect()))
}

fn merge(root: &mut Value, more: Value) {
    match (root, more) {
        (Value::Object(root), Value::Object(more)) => {
            more.into_iter()
                .for_each(|(key, value)| merge(root.entry(key).or_insert(Value::Null), value));
        }
        (root, more) => *root = more,
    }
}

/// As [`with`], in `zero_optimization`.
#[expect(clippy::needless_pass_by_value, reason = "`json!` where it is called")]
fn zero(more: Value) -> Result<(Settings, Vec<String>), String> {
    with(json!({ "zero_optimization": more }))
}

#[test]
fn keys_of_zero_become_options_of_the_strategy() {
    let sharding = |more| zero(more).unwrap().0.sharding.unwrap();
    assert_eq!(
        sharding(json!({"zero_hpz_partition_size": 2})).reshard_after_forward,
        Reshard::To(2)
    );
    assert_eq!(sharding(json!({"mics_shard_size": 2})).strategy, Strategy::Hybrid(2));
    assert_eq!(sharding(json!({"mics_shard_size": -1})).strategy, Strategy::Zero3);
    assert_eq!(sharding(json!({"stage": 1})).reduce, ReduceGradients::Window);
    assert_eq!(sharding(json!({"stage": 2})).reduce, ReduceGradients::EachBatch);
    let offload = |pin| json!({"offload_optimizer": {"device": "cpu", "pin_memory": pin}});
    assert_eq!(sharding(offload(true)).offload, Offload::Cpu { pin: true });
    assert_eq!(sharding(offload(false)).offload, Offload::Cpu { pin: false });
    assert_eq!(sharding(json!({"cpu_offload": true})).offload, Offload::Cpu { pin: true });
    assert_eq!(sharding(json!({"offload_param": {"device": "none"}})).offload, Offload::None);
    assert_eq!(sharding(json!({"stage": 2, "cpu_offload_param": true})).offload, Offload::None);

    let limits = r#"{"train_micro_batch_size_per_gpu": 1, "zero_optimization":
        {"stage": 3, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}}"#;
    let config = DeepSpeedConfig::from_json("ds.json", limits).unwrap();
    for (parameters, expected) in [(124_000_000, Reshard::No), (700_000_000, Reshard::Yes)] {
        let facts = Facts { parameters: Some(parameters), ..Facts::new(2) };
        let sharding = config.resolve(&facts).unwrap().0.sharding.unwrap();
        assert_eq!(sharding.reshard_after_forward, expected, "{parameters}");
    }
}

#[test]
fn what_is_not_honoured_is_named_once() {
    for (more, key) in [
        (json!({"overlap_comm": false}), "zero_optimization.overlap_comm = false"),
        (json!({"reduce_bucket_size": 5e8}), "zero_optimization.reduce_bucket_size = 500000000.0"),
        (json!({"prefetch_bucket_size": 7}), "zero_optimization.stage3_prefetch_bucket_size = 7"),
        (json!({"leaf_module": {"classes": ["A"]}}), "zero_optimization.leaf_module = {classes}"),
        (
            json!({"offload_param": {"device": "cpu"}}),
            "zero_optimization.offload_param.device = \"cpu\"",
        ),
    ] {
        let (_, notes) = zero(more).unwrap();
        let named =
            notes.iter().filter(|note| note.starts_with(&format!("ds.json: {key}: "))).count();
        assert_eq!((named, notes.len()), (1, 1), "{key}: {notes:?}");
    }
    let (_, notes) = zero(json!({"overlap_comm": true, "reduce_scatter": true})).unwrap();
    assert_eq!(notes, [""; 0]);
    let off = json!({"fp16": {"enabled": false, "hysteresis": 2}, "wandb": {"enabled": false}});
    assert_eq!(with(off).unwrap().1, [""; 0]);
    let (_, notes) =
        with(json!({"fp16": {"enabled": true, "hysteresis": 2}, "wandb": {"enabled": true}}))
            .unwrap();
    assert!(
        notes.iter().any(|note| note.starts_with("ds.json: fp16.hysteresis = 2: the scale")),
        "{notes:?}"
    );
    assert!(
        notes.iter().any(|note| note.starts_with("ds.json: wandb = {enabled}: DeepSpeed")),
        "{notes:?}"
    );
    // Values that `auto` has were not chosen.
    let (_, notes) = zero(json!({"stage3_gather_16bit_weights_on_model_save": "auto"})).unwrap();
    assert_eq!(notes, [""; 0]);
}

#[test]
fn what_cannot_be_honoured_is_refused_by_name() {
    let nvme = json!({"offload_optimizer": {"device": "nvme", "nvme_path": "/local"}});
    for (found, expected) in [
        (
            zero(nvme),
            "ds.json: zero_optimization.offload_optimizer.device = \"nvme\" is not supported: parameters or states",
        ),
        (
            zero(json!({"zero_quantized_weights": true})),
            "ds.json: zero_optimization.zero_quantized_weights = true is not supported: parameters or gradients",
        ),
        (
            zero(json!({"overlap_com": true})),
            "ds.json: unknown key `zero_optimization.overlap_com`: did you mean `zero_optimization.overlap_comm`?",
        ),
        (zero(json!({"stage": 4})), "ds.json: zero_optimization.stage is 4, expected 0 to 3"),
        (
            zero(json!({"zero_hpz_partition_size": 3})),
            "ds.json: units cannot be resharded to 3 after forward",
        ),
        (
            zero(json!({"mics_shard_size": 3})),
            "ds.json: hybrid=3 does not divide the 4 ranks: take one of 1, 2, 4",
        ),
        (
            with(json!({"elasticity": {"enabled": true}})),
            "ds.json: elasticity = {enabled} is not supported: DeepSpeed would choose batch sizes",
        ),
        (
            with(json!({"train_batch_size": 6})),
            "ds.json: train_batch_size 6 is not train_micro_batch_size_per_gpu 1 x gradient_accumulation_steps 1 x 4 \
             ranks, which is 4: change one of them",
        ),
        (
            with(json!({"fp16": {"enabled": true}, "bf16": {"enabled": true}})),
            "fp16.enabled (ds.json) and bf16.enabled exclude each other: set one of them to false",
        ),
        (
            with(json!({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}})),
            "ds.json: optimizer.type = \"OneBitAdam\" is not supported: Brigade's are Adam, AdamW",
        ),
        (
            with(json!({"optimizer": {"type": "AdamW", "params": {"beta": 0.1}}})),
            "ds.json: unknown key `optimizer.params.beta`: did you mean `betas`?",
        ),
        (
            with(json!({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}})),
            "ds.json: scheduler.params.warmup_num_steps is 0, expected a whole number from 1",
        ),
        (
            with(json!({"tensor_parallel": {"autotp_size": 2}})),
            "ds.json: tensor_parallel = {autotp_size} is not supported: layers would be cut",
        ),
    ] {
        let error = found.expect_err(expected);
        assert!(error.starts_with(expected), "{error}\nis not\n{expected}");
    }
    for accepted in [
        json!({"elasticity": {"enabled": false}}),
        json!({"tensor_parallel": {"autotp_size": 1}}),
        json!({"amp": {"enabled": false}, "sparse_gradients": false}),
    ] {
        with(accepted).unwrap();
    }
}

#[test]
fn a_key_that_is_there_twice_is_refused() {
    let text = r#"{"zero_optimization": {"stage": 1, "stage": 2}}"#;
    let error = DeepSpeedConfig::from_json("ds.json", text).unwrap_err();
    assert_eq!(error.to_string(), "ds.json: duplicate key `stage`");
    let error = DeepSpeedConfig::from_json("ds.json", "{").unwrap_err().to_string();
    assert!(
        error.starts_with("ds.json: not a DeepSpeed configuration: EOF while parsing"),
        "{error}"
    );
}

#[test]
fn base64_of_json_is_read_as_accelerate_does() {
    // {"zero_optimization": {"stage": 1}, "train_batch_size": 2}
    let text = "eyJ6ZXJvX29wdGltaXphdGlvbiI6IHsic3RhZ2UiOiAxfSwgInRyYWluX2JhdGNoX3NpemUiOiAyfQ==";
    let (settings, _) =
        DeepSpeedConfig::from_json("variable", text).unwrap().resolve(&Facts::new(2)).unwrap();
    assert_eq!(settings.sharding.unwrap().strategy, Strategy::Zero1);
}

#[test]
fn what_a_launcher_does_not_know_stays_open() {
    let text = r#"{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.8, 0.9]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}"#;
    let config = DeepSpeedConfig::from_json("ds.json", text).unwrap();
    let (settings, _) = config.resolve(&Facts::new(2)).unwrap();
    assert_eq!((settings.micro_batch_size, settings.train_batch_size), (None, None));
    assert_eq!(settings.schedule, None);
    let optimizer = settings.optimizer.unwrap();
    assert_eq!((optimizer.kind.name(), optimizer.lr), ("AdamW", None));
    assert_eq!(optimizer.betas, Some((0.8, 0.9)));
}

#[test]
fn arguments_alone_are_a_configuration_without_notes_of_its_own() {
    let given = [("use_deepspeed", "true"), ("zero_stage", "1"), ("gradient_clipping", "0.5")]
        .map(|(name, value)| Given::new(name, value, "a.yaml"));
    let (settings, notes) = resolve(&given, None, &Facts::new(2)).unwrap();
    assert_eq!(settings.sharding.unwrap().strategy, Strategy::Zero1);
    assert_eq!((settings.gradient_clipping, notes), (Some(0.5), Vec::new()));
}

#[test]
fn tensor_ranks_are_an_axis_of_the_mesh() {
    let given = [
        ("fsdp_version", "2"),
        ("parallelism_config_dp_shard_size", "2"),
        ("parallelism_config_tp_size", "2"),
    ];
    let settings = |given: &[(&str, &str)]| {
        let given: Vec<Given> =
            given.iter().map(|(name, value)| Given::new(name, *value, "flag")).collect();
        resolve(&given, None, &Facts::new(4)).unwrap().0
    };
    let both = settings(&given);
    assert_eq!(both.mesh.to_string(), "dp_shard 2 x tp 2");
    assert_eq!(both.sharding.unwrap().strategy, Strategy::Zero3);
    let settings = settings(&[("parallelism_config_tp_size", "4")]);
    assert_eq!((settings.mesh.to_string(), settings.sharding), ("tp 4".to_owned(), None));
}

#[test]
fn errors_of_arguments_name_their_place() {
    let resolved = |given: &[(&str, &str)], world_size| {
        let given: Vec<Given> =
            given.iter().map(|(name, value)| Given::new(name, *value, "flag")).collect();
        resolve(&given, None, &Facts::new(world_size)).map_err(|error| error.to_string())
    };
    for (given, expected) in [
        (
            &[("fsdp-version", "2"), ("fsdp-forward-prefetch", "true")][..],
            "flag: fsdp_forward_prefetch = true is not supported: FSDP version 2 has no forward_prefetch",
        ),
        (
            &[("fsdp_version", "2"), ("fsdp_reshard_after_forward", "FULL_SHARD")],
            "flag: fsdp_reshard_after_forward is FULL_SHARD, expected true or false in version 2",
        ),
        (&[("fsdp_shard", "1")], "flag: unknown key `fsdp_shard`"),
        (
            &[("fsdp_version", "2"), ("parallelism_config_cp_size", "2")],
            "flag: the mesh cp 2 has 2 ranks and the job has 4",
        ),
        (
            &[("fsdp_version", "2"), ("parallelism_config_tp_size", "2")],
            "flag: the mesh tp 2 has 2 ranks and the job has 4",
        ),
        (
            &[("use_deepspeed", "true"), ("parallelism_config_tp_size", "2")],
            "flag: parallelism_config_tp_size = 2 is not supported: it is not combined with DeepSpeed",
        ),
        (
            &[("parallelism_config_dp_shard_size", "4"), ("use_fsdp", "true")],
            "parallelism_config (flag) and FSDP version 1 (flag) exclude each other",
        ),
        (
            &[("parallelism_config_dp_shard_size", "4")],
            "flag: parallelism_config_dp_shard_size = 4 is not supported: it needs FSDP",
        ),
        (
            &[
                ("use_deepspeed", "true"),
                ("parallelism_config_dp_shard_size", "2"),
                ("parallelism_config_dp_replicate_size", "2"),
            ],
            "parallelism_config dp_replicate 2 x dp_shard 2 (flag) and DeepSpeed on dp_shard 4 exclude each other",
        ),
        (
            &[("parallelism_config_tp_size", "2"), ("parallelism_config_dp_replicate_size", "2")],
            "parallelism_config_tp_size 2 (flag) and parallelism_config_dp_replicate_size 2 (flag) exclude",
        ),
        (
            &[("use_deepspeed", "true"), ("zero_stage", "5")],
            "flag: zero_stage is 5, expected 0 to 3",
        ),
        (
            &[("use_deepspeed", "true"), ("offload_param_device", "nvme")],
            "flag: offload_param_device = nvme is not supported: parameters or states",
        ),
        (
            &[("use_deepspeed", "true"), ("use_fsdp", "true")],
            "use_fsdp (flag) and DeepSpeed exclude each other",
        ),
        (
            &[("mixed_precision", "fp4")],
            "flag: mixed_precision is fp4, expected no, fp16, bf16 or fp8",
        ),
    ] {
        let error = resolved(given, 4).expect_err(expected);
        assert!(error.starts_with(expected), "{error}\nis not\n{expected}");
    }
    let hybrid = &[("fsdp_sharding_strategy", "HYBRID_SHARD")];
    let given = hybrid.map(|(name, value)| Given::new(name, value, "flag"));
    let facts = Facts { local_world_size: 4, ..Facts::new(6) };
    let error = resolve(&given, None, &facts).unwrap_err().to_string();
    assert_eq!(error, "flag: hybrid=4 does not divide the 6 ranks: take one of 1, 2, 3, 6");
}

#[test]
fn variables_of_the_launcher_bring_no_notes_of_their_own() {
    // All that `accelerate launch --use_fsdp --fsdp_version 2` sets.
    let given = Given::from_variables([
        ("ACCELERATE_USE_FSDP", "true"),
        ("FSDP_VERSION", "2"),
        ("FSDP_SHARDING_STRATEGY", "FULL_SHARD"),
        ("FSDP_RESHARD_AFTER_FORWARD", "true"),
        ("FSDP_OFFLOAD_PARAMS", "false"),
        ("FSDP_MIN_NUM_PARAMS", "100000000"),
        ("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"),
        ("FSDP_FORWARD_PREFETCH", "false"),
        ("FSDP_USE_ORIG_PARAMS", "true"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
        ("FSDP_SYNC_MODULE_STATES", "true"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "false"),
        ("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "false"),
        ("HOME", "/root"),
    ]);
    let (settings, notes) = resolve(&given, None, &Facts::new(2)).unwrap();
    assert_eq!(settings.sharding.unwrap().strategy, Strategy::Zero3);
    assert_eq!(notes, []);
}

#[test]
fn without_fsdp_and_deepspeed_each_rank_has_a_whole_model() {
    let given = [("use_fsdp", "false"), ("fsdp_version", "2"), ("mixed_precision", "bf16")]
        .map(|(name, value)| Given::new(name, value, "a.yaml"));
    let (settings, notes) = resolve(&given, None, &Facts::new(3)).unwrap();
    assert_eq!((settings.sharding, notes.len()), (None, 0));
    assert_eq!((settings.mesh.size(Axis::Replicate), settings.precision), (3, Precision::Bf16));
}

#[test]
fn axes_are_off_with_their_switch() {
    let given = [("use_parallelism_config", "false"), ("parallelism_config_dp_shard_size", "3")]
        .map(|(name, value)| Given::new(name, value, "a.yaml"));
    assert_eq!(ParallelismConfig::read(&given), Ok(None));
}

fn scalar() -> impl proptest::strategy::Strategy<Value = Value> {
    prop_oneof![
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "auto|true|cpu|nvme|fp16|[a-z]{0,6}".prop_map(Value::from),
        proptest::strategy::Just(Value::Null),
        proptest::strategy::Just(json!({"enabled": true})),
        proptest::collection::vec(any::<u8>(), 0..3).prop_map(Value::from),
    ]
}

proptest! {
    /// Nothing that a file may say panics, and whatever is refused names its key.
    #[test]
    fn any_value_of_any_key_is_answered(place in any::<proptest::sample::Index>(), value in scalar(), ranks in 0..9_usize) {
        let keys = table("deepspeed_keys");
        let key = keys[place.index(keys.len())].as_str().unwrap();
        let mut root = json!({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}});
        let place = key.split('.').fold(&mut root, |section, name| {
            if !section.is_object() {
                *section = Value::Object(Map::new());
            }
            &mut section[name]
        });
        *place = value;
        if let Ok(config) = DeepSpeedConfig::from_json("ds.json", &root.to_string()) {
            match config.resolve(&Facts::new(ranks)) {
                Ok((settings, notes)) => {
                    assert!(describe(&settings, &notes).starts_with("strategy"));
                    let schedule = settings.schedule.map(|it| it.lr(3, 0.1));
                    assert_eq!(schedule, None);
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
    }
}
