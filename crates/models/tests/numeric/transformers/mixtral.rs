//! Mixtral against transformers: names, outputs, losses, gradients, first values and greedy texts; and its files.

use brigade_models::{
    CausalModel, GenerationOptions, Mixtral, MixtralForCausalLm, MixtralOptions, Tokens,
    Transformer, TransformerOptions,
};
use brigade_nn::{ExpertParallel, Model, load_balancing_loss, weights};
use brigade_test_device::numeric_device;
use brigade_torch::{Backend, GroupOptions, ProcessGroup, Store, backward};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::common::{
    Inputs, LENGTHS, TOLERANCE, builder, close, filled, flat, gradients_match, numbers, options,
};

fn golden() -> Value {
    serde_json::from_str(include_str!("../../golden/mixtral.json")).unwrap()
}

fn cases() -> Vec<(String, Value)> {
    golden()["cases"].as_object().unwrap().clone().into_iter().collect()
}

fn model(case: &Value) -> Model<MixtralForCausalLm> {
    filled(case, Kind::Float, |path, options| MixtralForCausalLm::new(path, options))
}

/// The logits of tokens that are not padding.
fn attended(logits: &[f64]) -> Vec<f64> {
    let rows = logits.chunks(50).zip(0..);
    let is_token = |place: i64| place % 9 < LENGTHS[(place / 9) as usize];
    rows.filter(|&(_, place)| is_token(place)).flat_map(|(row, _)| row.to_vec()).collect()
}

#[test]
fn outputs_losses_and_gradients_are_those_of_transformers() {
    let inputs = Inputs::new();
    for (name, case) in cases() {
        let model = model(&case);
        let names = model.parameters().into_iter().map(|it| (it.name, it.tensor.size()));
        assert_eq!(serde_json::json!(names.collect::<Vec<_>>()), case["named_parameters"]);

        let logits = flat(&tch::no_grad(|| model.forward(inputs.right())).unwrap());
        close(&name, &attended(&logits), &attended(&numbers(&case["logits"])), TOLERANCE);
        let whole = tch::no_grad(|| model.forward(&inputs.ids)).unwrap();
        close(&name, &flat(&whole), &numbers(&case["unmasked_logits"]), TOLERANCE);

        let body = model.module().body();
        let chosen = body.options().num_experts_per_tok;
        let balance = |tokens: Tokens<'_>, mask: Option<&Tensor>| {
            let (_, routers) = tch::no_grad(|| body.forward_routed(tokens)).unwrap();
            let logits: Vec<&Tensor> = routers.iter().collect();
            let loss = load_balancing_loss(&logits, chosen, mask).unwrap();
            (routers, loss.double_value(&[]))
        };
        let (routers, found) = balance((&inputs.ids).into(), None);
        close(&name, &[found], &numbers(&case["unmasked_aux_loss"]), TOLERANCE);
        assert_eq!(routers[0].size(), [27, 5]);
        let (_, found) = balance(inputs.right(), Some(&inputs.right));
        close(&name, &[found], &numbers(&case["aux_loss"]), TOLERANCE);
        let loads = body.expert_loads();
        assert_eq!(loads.len(), 2);
        assert!(loads.iter().all(|load| load.tokens.iter().sum::<i64>() == 27 * chosen));

        let loss = model.module().loss(inputs.right(), &inputs.causal_labels(), 0.0).unwrap();
        let loss = loss.mean().unwrap();
        close(&name, &[loss.double_value(&[])], &numbers(&case["loss"]), TOLERANCE);
        backward(&loss).unwrap();
        gradients_match(&model, &case["grad_abs_sums"]);
    }
}

#[test]
fn layers_that_are_computed_again_have_the_same_gradients() {
    let inputs = Inputs::new();
    let case = &golden()["cases"]["balanced"];
    let mut options = options::<MixtralOptions>(case);
    options.recompute = true;
    let model = builder().build(|path| MixtralForCausalLm::new(path, &options)).unwrap();
    super::common::fill_all(&model);
    let loss = model.module().loss(inputs.right(), &inputs.causal_labels(), 0.0).unwrap();
    backward(&loss.mean().unwrap()).unwrap();
    gradients_match(&model, &case["grad_abs_sums"]);
}

#[test]
fn greedy_texts_are_those_of_transformers() {
    let inputs = Inputs::new();
    for (name, case) in cases() {
        let model = model(&case);
        let options = GenerationOptions {
            max_new_tokens: 8,
            eos_token_id: vec![0],
            pad_token_id: Some(0),
            ..GenerationOptions::default()
        };
        let found = options.generate(&model, &inputs.ids, Some(&inputs.left)).unwrap();
        assert_eq!(flat(&found), numbers(&case["greedy_left"]), "{name}");
        // Tokens one by one, from the cache, see the same window.
        let mut state = model.module().start(9);
        let mut logits = Vec::new();
        for place in 0..9 {
            let ids = inputs.ids.narrow(1, place, 1).contiguous();
            let next = tch::no_grad(|| model.module().next_logits((&ids).into(), &mut state));
            logits.push(next.unwrap());
        }
        let logits = Tensor::stack(&logits, 1);
        close(&name, &flat(&logits), &numbers(&case["unmasked_logits"]), TOLERANCE);
    }
}

#[test]
fn first_values_are_those_of_the_seed() {
    let golden = golden();
    let mut options = options::<MixtralOptions>(&golden["cases"]["balanced"]);
    options.output_router_logits = false;
    tch::manual_seed(17);
    let model = Model::new(|path| MixtralForCausalLm::new(path, &options)).unwrap();
    let expected = golden["first_values_of_seed_17"].as_array().unwrap();
    assert_eq!(model.parameters().len(), expected.len());
    for (parameter, expected) in model.parameters().iter().zip(expected) {
        assert_eq!(*parameter.name, expected[0]);
        let values = parameter.tensor.detach().to_kind(Kind::Double);
        let found = [&values, &values.abs()].map(|it| it.sum(Kind::Double).double_value(&[]));
        let expected = [1, 2].map(|place| expected[place].as_f64().unwrap());
        let largest = expected[1].max(1e-9);
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6 * largest, "{}", parameter.name);
        }
    }
}

#[test]
fn configs_go_there_and_back() {
    for (name, case) in cases() {
        let options = options::<MixtralOptions>(&case);
        let again = MixtralOptions::from_config(options.to_config()).unwrap();
        assert_eq!(options, again, "{name}");
        let written = options.to_config();
        for (key, value) in case["config"].as_object().unwrap() {
            let is_anew = ["architectures", "dtype", "transformers_version", "_name_or_path"];
            if !is_anew.contains(&key.as_str()) {
                let found = written.get(key).unwrap_or(&Value::Null);
                let same =
                    found == value || found.as_f64().is_some_and(|it| value.as_f64() == Some(it));
                assert!(same || key == "rope_parameters", "{name} {key}: {found} and {value}");
            }
        }
    }
    // As published ones have it.
    let old =
        serde_json::json!({"model_type": "mixtral", "rope_theta": 5e5, "sliding_window": null});
    let options = MixtralOptions::from_config(old.as_object().unwrap().clone()).unwrap();
    assert_eq!((options.rope_theta, options.sliding_window), (5e5, None));
    let none = serde_json::json!({"sliding_window": 0});
    let options = MixtralOptions::from_config(none.as_object().unwrap().clone()).unwrap();
    let built = Model::deferred(|path| Mixtral::new(path, &options));
    let error = built.map(drop).unwrap_err().to_string();
    assert!(error.contains("expected a sliding_window of at least 1, found 0"), "{error}");
}

#[test]
fn files_have_published_names_and_are_read_whole_and_by_parts() {
    let folder = tempfile::tempdir().unwrap();
    let case = &golden()["cases"]["balanced"];
    let mut options = options::<MixtralOptions>(case);
    options.num_local_experts = 4;
    let new = |path: &brigade_nn::ParamPath<'_>| MixtralForCausalLm::new(path, &options);
    let model = builder().build(new).unwrap();
    let (one, several) = (folder.path().join("one"), folder.path().join("several"));
    MixtralForCausalLm::save_pretrained(&model, &one).unwrap();
    MixtralForCausalLm::save_pretrained_in_parts(&model, &several, 10_000).unwrap();
    let state = weights::load(&one).unwrap();
    let name = "model.layers.1.block_sparse_moe.experts.3.w3.weight";
    assert_eq!(state.get(name).unwrap().size(), [24, 32]);
    let gate = "model.layers.0.block_sparse_moe.gate.weight";
    assert_eq!(state.get(gate).unwrap().size(), [4, 32]);
    assert!(state.names().all(|name| !name.contains(".mlp.")));

    let same = |found: &Model<MixtralForCausalLm>| {
        for (name, expected) in model.state_dict() {
            assert_eq!(*found.state_dict().get(&name).unwrap(), expected, "{name}");
        }
    };
    // Also with the names of version 5, which a model's own state has.
    let newer = folder.path().join("newer");
    MixtralForCausalLm::save_config(&model, &newer).unwrap();
    model.save_weights(newer.join("model.safetensors")).unwrap();
    for place in [&one, &several, &newer] {
        let device = numeric_device();
        same(
            &MixtralForCausalLm::from_pretrained_as(place, Model::builder().device(device))
                .unwrap(),
        );
        let deferred = builder().deferred();
        let mut deferred = MixtralForCausalLm::from_pretrained_as(place, deferred).unwrap();
        deferred.materialize().unwrap();
        same(&deferred);
        for rank in 0..2 {
            let backend = Backend::Fake;
            let store = Store::hash().unwrap();
            let group =
                ProcessGroup::new(&store, rank, 2, backend, GroupOptions::default()).unwrap();
            let parts = builder().expert_parallel(ExpertParallel { group: Some(group) });
            let own = MixtralForCausalLm::from_pretrained_as(place, parts).unwrap();
            let name = "model.layers.0.mlp.experts.gate_up_proj";
            let expected = model.tensor(name).unwrap().narrow(0, 2 * rank as i64, 2);
            assert_eq!(own.tensor(name).unwrap(), expected);
        }
    }

    // A missing expert, and a missing part of one.
    for missing in ["experts.1.w2.weight", "experts.3.w3.weight"] {
        let broken = folder.path().join("broken.safetensors");
        let mut rest = brigade_nn::StateDict::new();
        for (name, tensor) in state.iter() {
            if !name.ends_with(missing) {
                rest.insert(name, tensor.shallow_clone()).unwrap();
            }
        }
        weights::save(&rest, &broken).unwrap();
        let mut model = builder().build(new).unwrap();
        let error = MixtralForCausalLm::load_pretrained(&mut model, &broken).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(missing) && text.contains("is missing"), "{text}");
    }
    // An error for other numbers of experts contains both shapes.
    let fewer = MixtralOptions { num_local_experts: 3, ..options };
    let mut model = builder().build(|path| MixtralForCausalLm::new(path, &fewer)).unwrap();
    let error = MixtralForCausalLm::load_pretrained(&mut model, &one).unwrap_err().to_string();
    assert!(error.contains("[3, 48, 32]") && error.contains("[4, 48, 32]"), "{error}");
}
