//! Outputs, hidden numbers, losses and gradients.

use brigade_models::{
    BertForMaskedLm, BertForSequenceClassification, CausalModel, Gpt2LmHead, KeyValueCache,
    LlamaForCausalLm, Tokens, causal_lm_loss, token_loss,
};
use brigade_nn::{Model, Module};
use brigade_test_device::on_device;
use brigade_torch::Result;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::common::{
    Inputs, LENGTHS, TOLERANCE, attended, close, filled, flat, golden, gradients_match,
    matches_digest, names_match, numbers,
};

/// What GPT-2 and Llama have in common.
trait Causal: CausalModel<State = KeyValueCache> + for<'a> Module<Tokens<'a>, Output = Tensor> {
    fn hidden_states(&self, tokens: Tokens<'_>) -> Result<Vec<Tensor>>;
    fn cached(&self, tokens: Tokens<'_>, cache: &mut KeyValueCache) -> Result<Tensor>;
    fn mean_loss(&self, tokens: Tokens<'_>, labels: &Tensor) -> Result<Tensor>;
}

impl Causal for Gpt2LmHead {
    fn hidden_states(&self, tokens: Tokens<'_>) -> Result<Vec<Tensor>> {
        self.body().hidden_states(tokens)
    }

    fn cached(&self, tokens: Tokens<'_>, cache: &mut KeyValueCache) -> Result<Tensor> {
        self.forward_cached(tokens, cache)
    }

    fn mean_loss(&self, tokens: Tokens<'_>, labels: &Tensor) -> Result<Tensor> {
        self.loss(tokens, labels, 0.0)?.mean()
    }
}

impl Causal for LlamaForCausalLm {
    fn hidden_states(&self, tokens: Tokens<'_>) -> Result<Vec<Tensor>> {
        self.body().hidden_states(tokens)
    }

    fn cached(&self, tokens: Tokens<'_>, cache: &mut KeyValueCache) -> Result<Tensor> {
        self.forward_cached(tokens, cache)
    }

    fn mean_loss(&self, tokens: Tokens<'_>, labels: &Tensor) -> Result<Tensor> {
        self.loss(tokens, labels, 0.0)?.mean()
    }
}

/// The last attended row of each text.
fn last_rows(logits: &Tensor, places: [i64; 3]) -> Vec<f64> {
    let row = |(text, place): (i64, i64)| logits.get(text).get(place);
    let rows: Vec<Tensor> = (0..).zip(places).map(row).collect();
    flat(&Tensor::stack(&rows, 0))
}

fn agrees<M: Causal>(case: &Value, model: &mut Model<M>) {
    let inputs = Inputs::new();
    names_match(model, case);
    let module = model.module();
    let logits = model.forward(Tokens::from(&inputs.ids)).unwrap();
    close("logits", &flat(&logits), &numbers(&case["logits"]), TOLERANCE);
    let states = module.hidden_states(Tokens::from(&inputs.ids)).unwrap();
    for (index, digest) in case["hidden_states"].as_array().unwrap().iter().enumerate() {
        matches_digest(&format!("hidden {index}"), &states[index], digest);
    }
    assert_eq!(states.len(), 3);

    let right = model.forward(inputs.right()).unwrap();
    let digest = &case["right_padded_logits"];
    matches_digest("right", &attended(&right, &inputs.right), digest);
    let expected = numbers(&case["right_padded_last_logits"]);
    close("right", &last_rows(&right, LENGTHS.map(|n| n - 1)), &expected, TOLERANCE);
    let left = model.forward(inputs.left()).unwrap();
    matches_digest("left", &attended(&left, &inputs.left), &case["left_padded_logits"]);
    let expected = numbers(&case["left_padded_last_logits"]);
    close("left", &last_rows(&left, [8; 3]), &expected, TOLERANCE);

    // In two parts through a cache, and with padding.
    let mut cache = KeyValueCache::new();
    let first = inputs.ids.narrow(1, 0, 5);
    let start = module.cached(Tokens::from(&first), &mut cache).unwrap();
    let second = module.cached(Tokens::from(&inputs.ids.narrow(1, 5, 4)), &mut cache).unwrap();
    close("cached", &flat(&Tensor::cat(&[&start, &second], 1)), &flat(&logits), TOLERANCE);
    assert_eq!(cache.len(), 9);
    if let Some(digest) = case.get("cached_second_part_logits") {
        matches_digest("second part", &second, digest);
    }
    cache.clear();
    let mut parts = Vec::new();
    for (begin, length) in [(0, 5), (5, 1), (6, 3)] {
        let (ids, mask) =
            (inputs.ids.narrow(1, begin, length), inputs.left.narrow(1, 0, begin + length));
        parts.push(module.cached((&ids, &mask).into(), &mut cache).unwrap());
    }
    let parts = attended(&Tensor::cat(&parts, 1), &inputs.left);
    close("cached left", &flat(&parts), &flat(&attended(&left, &inputs.left)), TOLERANCE);

    let labels = inputs.causal_labels();
    let expected = case["loss"].as_f64().unwrap();
    model.train(); // all dropouts are 0
    let loss = model.module().mean_loss(inputs.right(), &labels).unwrap();
    close("loss", &[loss.double_value(&[])], &[expected], 1e-6);
    loss.backward();
    gradients_match(model, &case["grad_abs_sums"]);
    let whole = causal_lm_loss(&right, &labels, 0.0).unwrap();
    assert_eq!(whole.count.int64_value(&[]), 19 - 3);
    close("loss", &[whole.mean().unwrap().double_value(&[])], &[expected], 1e-6);
}

#[test]
fn gpt2_is_transformers() {
    let golden = golden();
    let case = &golden["models"]["gpt2"];
    agrees(case, &mut filled(case, Kind::Float, |path, options| Gpt2LmHead::new(path, options)));
}

#[test]
fn llama_is_transformers() {
    let golden = golden();
    let case = &golden["models"]["llama"];
    agrees(
        case,
        &mut filled(case, Kind::Float, |path, options| LlamaForCausalLm::new(path, options)),
    );
}

#[test]
fn all_models_compute_in_double_precision() {
    let (golden, inputs) = (golden(), Inputs::new());
    let models = &golden["models"];
    let check = |name: &str, logits: Tensor, loss: Tensor, expected: &[f64]| {
        assert_eq!((logits.kind(), loss.kind()), (Kind::Double, Kind::Double), "{name}");
        loss.backward();
        close(name, &flat(&logits), expected, TOLERANCE);
    };
    let gpt2 =
        filled(&models["gpt2"], Kind::Double, |path, options| Gpt2LmHead::new(path, options));
    let loss = gpt2.module().mean_loss(inputs.right(), &inputs.causal_labels()).unwrap();
    let logits = gpt2.forward(&inputs.ids).unwrap();
    check("gpt2", logits, loss, &numbers(&models["gpt2"]["logits"]));
    let case = &models["llama"];
    let llama = filled(case, Kind::Double, |path, options| LlamaForCausalLm::new(path, options));
    let loss = llama.module().mean_loss(inputs.right(), &inputs.causal_labels()).unwrap();
    let logits = llama.forward(&inputs.ids).unwrap();
    check("llama", logits, loss, &numbers(&case["logits"]));
    let case = &models["bert_classifier"];
    let bert = filled(case, Kind::Double, |path, options| {
        BertForSequenceClassification::new(path, options)
    });
    let logits = bert.forward(inputs.pair()).unwrap();
    let labels = on_device(&Tensor::from_slice(&[0i64, 1, 2]));
    let loss = bert.module().loss(&logits, &labels, 0.0).unwrap().mean().unwrap();
    close("bert", &[loss.double_value(&[])], &[case["loss"].as_f64().unwrap()], 1e-6);
    assert_eq!(loss.kind(), Kind::Double);
}

#[test]
fn bert_classifier_is_transformers() {
    let (golden, inputs) = (golden(), Inputs::new());
    let case = &golden["models"]["bert_classifier"];
    let mut model = filled(case, Kind::Float, |path, options| {
        BertForSequenceClassification::new(path, options)
    });
    names_match(&model, case);
    let everything = inputs.right.ones_like();
    let whole: Tokens<'_> = (&inputs.ids, &everything, &inputs.types).into();
    let logits = model.forward(whole).unwrap();
    close("logits", &flat(&logits), &numbers(&case["logits"]), TOLERANCE);
    let states = model.module().body().hidden_states(whole).unwrap();
    for (index, digest) in case["hidden_states"].as_array().unwrap().iter().enumerate() {
        matches_digest(&format!("hidden {index}"), &states[index], digest);
    }
    let padded = &case["right_padded_without_types"];
    let logits = model.forward(inputs.right()).unwrap();
    close("padded", &flat(&logits), &numbers(&padded["logits"]), TOLERANCE);
    let states = model.module().body().hidden_states(inputs.right()).unwrap();
    for (index, digest) in padded["hidden_states"].as_array().unwrap().iter().enumerate() {
        matches_digest("padded hidden", &attended(&states[index], &inputs.right), digest);
    }
    let pooled = model.module().body().pooled(&states[2]).unwrap();
    close("pooler", &flat(&pooled), &numbers(&padded["pooler"]), TOLERANCE);

    model.train();
    let logits = model.forward(inputs.pair()).unwrap();
    let labels = on_device(&Tensor::from_slice(&[0i64, 1, 2]));
    let loss = model.module().loss(&logits, &labels, 0.0).unwrap();
    assert_eq!(loss.count.int64_value(&[]), 3);
    let loss = loss.mean().unwrap();
    close("loss", &[loss.double_value(&[])], &[case["loss"].as_f64().unwrap()], 1e-6);
    loss.backward();
    gradients_match(&model, &case["grad_abs_sums"]);
}

#[test]
fn bert_masked_lm_is_transformers() {
    let (golden, inputs) = (golden(), Inputs::new());
    let case = &golden["models"]["bert_masked_lm"];
    let mut model = filled(case, Kind::Float, |path, options| BertForMaskedLm::new(path, options));
    names_match(&model, case);
    let logits = model.forward(inputs.right()).unwrap();
    let rows = attended(&logits, &inputs.right);
    matches_digest("logits", &rows, &case["right_padded_logits"]);
    let expected = numbers(&case["first_row_logits"]);
    close("first row", &flat(&logits.get(0)), &expected, TOLERANCE);

    // Labels at odd positions, padding included.
    let even = Tensor::arange(9, (Kind::Int64, inputs.ids.device())).remainder(2).eq(0);
    let labels = inputs.ids.masked_fill(&even.unsqueeze(0), -100);
    model.train();
    let loss = model.module().loss(inputs.right(), &labels, 0.0).unwrap();
    assert_eq!(loss.count.int64_value(&[]), 3 * 4);
    let mean = loss.mean().unwrap();
    close("loss", &[mean.double_value(&[])], &[case["loss"].as_f64().unwrap()], 1e-6);
    mean.backward();
    gradients_match(&model, &case["grad_abs_sums"]);
    let whole = token_loss(&logits, &labels, 0.0).unwrap();
    close("loss", &[whole.sum.double_value(&[])], &[loss.sum.double_value(&[])], 1e-6);
}
