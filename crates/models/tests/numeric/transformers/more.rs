//! Options, losses and first values beside the shared golden numbers.

use brigade_models::{
    BertForMaskedLm, BertForSequenceClassification, BertForTokenClassification, BertOptions,
    Gpt2LmHead, Gpt2Options, IGNORED_LABEL, LlamaForCausalLm, LlamaOptions, ProblemType, TokenLoss,
    Tokens, TransformerOptions, causal_lm_loss, no_decay_parameters, sequence_loss, token_loss,
};
use brigade_nn::{Model, Module};
use brigade_test_device::{numeric_device, on_device};
use brigade_torch::Autocast;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::common::{
    Inputs, TOLERANCE, attended, close, filled, flat, gradients_match, more, numbers,
};

#[track_caller]
fn same_loss(case: &Value, loss: &Tensor) {
    close("loss", &[loss.double_value(&[])], &[case["loss"].as_f64().unwrap()], 2e-6);
}

/// The rows that are attended, of golden logits `[3, 9, width]`.
fn expected_rows(case: &Value, inputs: &Inputs) -> Vec<f64> {
    let all = on_device(&Tensor::from_slice(&numbers(&case["logits"]))).view([3, 9, -1]);
    flat(&attended(&all, &inputs.right))
}

#[test]
fn stretched_rotations_biases_and_tied_heads_are_transformers() {
    let (golden, inputs) = (more(), Inputs::new());
    let case = &golden["cases"]["llama3"];
    let model = filled(case, Kind::Float, |path, options| LlamaForCausalLm::new(path, options));
    let logits = model.forward(inputs.right()).unwrap();
    let rows = flat(&attended(&logits, &inputs.right));
    close("logits", &rows, &expected_rows(case, &inputs), TOLERANCE);
    let loss = model.module().loss(inputs.right(), &inputs.causal_labels(), 0.0).unwrap();
    let loss = loss.mean().unwrap();
    same_loss(case, &loss);
    loss.backward();
    gradients_match(&model, &case["grad_abs_sums"]);
}

#[test]
fn scaled_scores_and_narrow_perceptrons_are_transformers() {
    let (golden, inputs) = (more(), Inputs::new());
    let case = &golden["cases"]["gpt2_scaled"];
    let model = filled(case, Kind::Float, |path, options| Gpt2LmHead::new(path, options));
    let logits = model.forward(inputs.right()).unwrap();
    let rows = flat(&attended(&logits, &inputs.right));
    close("logits", &rows, &expected_rows(case, &inputs), TOLERANCE);
    let loss = causal_lm_loss(&logits, &inputs.causal_labels(), 0.0).unwrap().mean().unwrap();
    same_loss(case, &loss);
    loss.backward();
    gradients_match(&model, &case["grad_abs_sums"]);
}

#[test]
fn classifiers_of_tokens_are_transformers() {
    let (golden, inputs) = (more(), Inputs::new());
    let case = &golden["cases"]["bert_tokens"];
    let model =
        filled(case, Kind::Float, |path, options| BertForTokenClassification::new(path, options));
    let logits = model.forward(inputs.pair()).unwrap();
    let rows = flat(&attended(&logits, &inputs.right));
    close("logits", &rows, &expected_rows(case, &inputs), TOLERANCE);
    let labels: Vec<i64> = numbers(&case["labels"]).iter().map(|&label| label as i64).collect();
    let labels = on_device(&Tensor::from_slice(&labels)).view([3, 9]);
    let loss = model.module().loss(&logits, &labels, 0.0).unwrap();
    assert_eq!(loss.count.int64_value(&[]), 19);
    let loss = loss.mean().unwrap();
    same_loss(case, &loss);
    loss.backward();
    gradients_match(&model, &case["grad_abs_sums"]);
}

#[test]
fn numbers_and_several_classes_are_learned_as_by_transformers() {
    let (golden, inputs) = (more(), Inputs::new());
    for (name, shape) in [("bert_regression", vec![3]), ("bert_several", vec![3, 3])] {
        let case = &golden["cases"][name];
        let model = filled(case, Kind::Float, |path, options| {
            BertForSequenceClassification::new(path, options)
        });
        let logits = model.forward(inputs.pair()).unwrap();
        close(name, &flat(&logits), &numbers(&case["logits"]), TOLERANCE);
        let labels = on_device(&Tensor::from_slice(&numbers(&case["labels"])));
        let labels = labels.view(shape.as_slice());
        let loss = model.module().loss(&logits, &labels, 0.0).unwrap();
        assert_eq!(loss.count.int64_value(&[]) as usize, logits.numel());
        let loss = loss.mean().unwrap();
        same_loss(case, &loss);
        loss.backward();
        gradients_match(&model, &case["grad_abs_sums"]);
    }
}

#[test]
fn smoothed_losses_are_pytorchs_and_add_up() {
    let logits = crate::fill::fill(&[2, 4, 6], 3, -2.0, 2.0);
    let labels = on_device(&Tensor::from_slice(&[1i64, -100, 5, 0, 2, 2, -100, -100])).view([2, 4]);
    let loss = token_loss(&logits, &labels, 0.1).unwrap();
    let reference = logits.view([8, 6]).cross_entropy_loss::<Tensor>(
        &labels.view([8]),
        None,
        tch::Reduction::Mean,
        -100,
        0.1,
    );
    let mean = loss.mean().unwrap().double_value(&[]);
    close("smoothed", &[mean], &[reference.double_value(&[])], 1e-6);
    // Unequal parts add up.
    let parts = [0, 1].map(|row| token_loss(&logits.get(row), &labels.get(row), 0.1).unwrap());
    let sum: f64 = parts.iter().map(|part| part.sum.double_value(&[])).sum();
    let count: i64 = parts.iter().map(|part| part.count.int64_value(&[])).sum();
    assert_eq!(count, loss.count.int64_value(&[]));
    close("parts", &[sum], &[loss.sum.double_value(&[])], 1e-6);
    assert_eq!(ProblemType::of(1, Kind::Int64), ProblemType::Regression);
    assert_eq!(ProblemType::of(2, Kind::Int64), ProblemType::SingleLabelClassification);
    let wrong = sequence_loss(&logits, &labels, ProblemType::Regression, 0.0).unwrap_err();
    assert!(wrong.to_string().contains("found labels [2, 4]"), "{wrong}");
}

#[test]
fn groups_go_from_the_embeddings_to_the_head() {
    let golden = super::common::golden();
    let models = &golden["models"];
    let gpt2 = filled(&models["gpt2"], Kind::Float, |path, options| Gpt2LmHead::new(path, options));
    let groups = gpt2.param_groups().unwrap();
    assert_eq!(groups.len(), 4);
    assert_eq!(groups[0], ["transformer.wte.weight", "transformer.wpe.weight"]);
    assert_eq!(groups[3], ["transformer.ln_f.weight", "transformer.ln_f.bias"]);
    let case = &models["llama"];
    let llama = filled(case, Kind::Float, |path, options| LlamaForCausalLm::new(path, options));
    assert_eq!(llama.param_groups().unwrap()[3], ["model.norm.weight", "lm_head.weight"]);
    let case = &models["bert_classifier"];
    let bert = filled(case, Kind::Float, |path, options| {
        BertForSequenceClassification::new(path, options)
    });
    let last = &bert.param_groups().unwrap()[3];
    assert_eq!(
        *last,
        [
            "bert.pooler.dense.weight",
            "bert.pooler.dense.bias",
            "classifier.weight",
            "classifier.bias"
        ]
    );
    let case = &models["bert_masked_lm"];
    let bert = filled(case, Kind::Float, |path, options| BertForMaskedLm::new(path, options));
    assert_eq!(bert.param_groups().unwrap()[3].len(), 5);

    let spared = no_decay_parameters(&llama);
    assert!(spared.contains(&"model.layers.0.input_layernorm.weight".to_owned()));
    assert!(spared.contains(&"model.norm.weight".to_owned()));
    assert_eq!(spared.len(), 5);
    let spared = no_decay_parameters(&bert);
    assert!(spared.contains(&"bert.embeddings.LayerNorm.weight".to_owned()));
    assert!(!spared.contains(&"bert.embeddings.word_embeddings.weight".to_owned()));
}

#[test]
fn packed_texts_do_not_see_each_other() {
    let (golden, inputs) = (super::common::golden(), Inputs::new());
    let models = &golden["models"];
    let gpt2 = filled(&models["gpt2"], Kind::Float, |path, options| Gpt2LmHead::new(path, options));
    let case = &models["llama"];
    let llama = filled(case, Kind::Float, |path, options| LlamaForCausalLm::new(path, options));
    // The first row's 9 tokens and the second row's first 6, as one row.
    let parts = [inputs.ids.narrow(0, 0, 1), inputs.ids.narrow(0, 1, 1).narrow(1, 0, 6)];
    let ids = Tensor::cat(&parts, 1);
    let positions: Vec<i64> = (0..9).chain(0..6).collect();
    let positions = on_device(&Tensor::from_slice(&positions)).view([1, 15]);
    let texts = [vec![1i64; 9], vec![2i64; 6]].concat();
    let texts = on_device(&Tensor::from_slice(&texts));
    let pairs = texts.unsqueeze(1).eq_tensor(&texts).tril(0).view([1, 1, 15, 15]);
    let packed = Tokens {
        attention_mask: Some(&pairs),
        position_ids: Some(&positions),
        ..Tokens::from(&ids)
    };
    let rows = |found: &Tensor| [found.narrow(1, 0, 9), found.narrow(1, 9, 6)];
    for (found, alone) in [
        (gpt2.forward(packed).unwrap(), parts.each_ref().map(|part| gpt2.forward(part).unwrap())),
        (llama.forward(packed).unwrap(), parts.each_ref().map(|part| llama.forward(part).unwrap())),
    ] {
        for (found, alone) in rows(&found).iter().zip(&alone) {
            close("packed", &flat(found), &flat(alone), TOLERANCE);
        }
    }
    let numbers = pairs.to_kind(Kind::Float);
    let wrong = Tokens { attention_mask: Some(&numbers), ..packed };
    let found = gpt2.forward(wrong).unwrap_err().to_string();
    assert!(found.contains("is of bool, found Float"), "{found}");
}

#[test]
fn sixteen_bits_and_batches_without_labels_train() {
    let (golden, inputs) = (super::common::golden(), Inputs::new());
    let models = &golden["models"];
    let none = inputs.ids.full_like(IGNORED_LABEL);
    fn trains<M>(
        name: &str,
        mut model: Model<M>,
        loss: impl Fn(&M, &Tensor) -> TokenLoss,
        labels: [&Tensor; 2],
    ) {
        let [labels, none] = labels;
        let exact = loss(model.module(), labels).sum.double_value(&[]);
        let scope = Autocast::enter(numeric_device(), Kind::BFloat16, true).unwrap();
        let found = loss(model.module(), labels);
        drop(scope);
        assert_eq!(found.sum.kind(), Kind::Float, "{name}");
        close(name, &[found.sum.double_value(&[])], &[exact], 0.01);
        found.sum.backward();
        assert!(model.parameters().iter().all(|it| it.tensor.grad().defined()), "{name}");

        model.zero_grad().unwrap();
        let found = loss(model.module(), none);
        assert_eq!((found.count.int64_value(&[]), found.sum.double_value(&[])), (0, 0.0), "{name}");
        found.sum.backward();
        for parameter in model.parameters() {
            let largest = parameter.tensor.grad().abs().max().double_value(&[]);
            assert_eq!(largest, 0.0, "{name}: {}", parameter.name);
        }
        model.zero_grad().unwrap();
        model.to_kind(Kind::BFloat16).unwrap();
        let found = loss(model.module(), labels);
        close(name, &[found.sum.double_value(&[])], &[exact], 0.02);
        found.sum.backward();
    }
    let labels = inputs.causal_labels();
    let labels = [&labels, &none];
    let gpt2 = filled(&models["gpt2"], Kind::Float, |path, options| Gpt2LmHead::new(path, options));
    let loss =
        |model: &Gpt2LmHead, labels: &Tensor| model.loss(inputs.left(), labels, 0.1).unwrap();
    trains("gpt2", gpt2, loss, labels);
    let case = &models["llama"];
    let llama = filled(case, Kind::Float, |path, options| LlamaForCausalLm::new(path, options));
    let loss =
        |model: &LlamaForCausalLm, labels: &Tensor| model.loss(inputs.left(), labels, 0.0).unwrap();
    trains("llama", llama, loss, labels);
    let case = &models["bert_masked_lm"];
    let bert = filled(case, Kind::Float, |path, options| BertForMaskedLm::new(path, options));
    let loss =
        |model: &BertForMaskedLm, labels: &Tensor| model.loss(inputs.pair(), labels, 0.0).unwrap();
    trains("bert", bert, loss, labels);
}

#[test]
fn configs_that_cannot_be_built_are_named() {
    let refused = |text: &str| {
        let config = serde_json::from_str(text).unwrap();
        LlamaOptions::from_config(config).unwrap_err().to_string()
    };
    let found = refused(r#"{"hidden_act": "laplace"}"#);
    assert!(
        found.contains("unknown activation function `laplace`") && found.contains("gelu_new"),
        "{found}"
    );
    let found = refused(r#"{"model_type": "mamba"}"#);
    assert_eq!(found, "the config is of a model of the type `mamba`, expected `llama`");
    let found = refused(r#"{"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}"#);
    assert!(found.contains("`yarn` are not supported"), "{found}");
    let found = refused(r#"{"hidden_size": "large"}"#);
    assert!(found.contains("invalid type"), "{found}");
    let bert = |text: &str| {
        let config = serde_json::from_str(text).unwrap();
        BertOptions::from_config(config).unwrap_err().to_string()
    };
    let found = bert(r#"{"position_embedding_type": "relative_key"}"#);
    assert!(found.contains("relative_key"), "{found}");
    assert!(bert(r#"{"is_decoder": true}"#).contains("`is_decoder: true`"));
    let found = bert(r#"{"id2label": {"1": "a", "2": "b"}}"#);
    assert!(found.contains("0 to 1"), "{found}");

    let heads = Gpt2Options { n_embd: 30, n_head: 4, n_layer: 1, ..Gpt2Options::default() };
    let found = Model::new(|path| Gpt2LmHead::new(path, &heads)).unwrap_err().to_string();
    assert!(found.contains("n_head 4 does not divide n_embd 30"), "{found}");
    let grouped = LlamaOptions {
        hidden_size: 32,
        num_attention_heads: 4,
        num_key_value_heads: Some(3),
        num_hidden_layers: 1,
        vocab_size: 10,
        intermediate_size: 8,
        ..LlamaOptions::default()
    };
    let found = Model::new(|path| LlamaForCausalLm::new(path, &grouped)).unwrap_err().to_string();
    assert!(found.contains("num_key_value_heads 3 does not divide"), "{found}");
}

#[test]
fn inputs_that_do_not_fit_are_named() {
    let (golden, inputs) = (super::common::golden(), Inputs::new());
    let models = &golden["models"];
    let gpt2 = filled(&models["gpt2"], Kind::Float, |path, options| Gpt2LmHead::new(path, options));
    let found = gpt2.forward(&inputs.ids.get(0)).unwrap_err().to_string();
    assert!(found.contains("takes ids [batch, tokens], found [9]"), "{found}");
    let found = gpt2.forward((&inputs.ids, &inputs.right.narrow(1, 0, 8))).unwrap_err().to_string();
    assert!(found.contains("attention mask is [3, 9], found [3, 8]"), "{found}");
    let found = gpt2.forward(&inputs.ids.repeat([1, 5])).unwrap_err().to_string();
    assert!(found.contains("40 positions, found 45 tokens"), "{found}");
    // A row of padding has finite values, and does not affect the gradients of other rows.
    let case = &models["bert_classifier"];
    let bert = filled(case, Kind::Float, |path, options| {
        BertForSequenceClassification::new(path, options)
    });
    let mut mask = inputs.right.copy();
    let _ = mask.get(2).fill_(0);
    for mask in [&mask, &inputs.left] {
        let logits = bert.forward((&inputs.ids, mask)).unwrap();
        assert_eq!(logits.narrow(0, 0, 2).isfinite().all().int64_value(&[]), 1);
        logits.narrow(0, 0, 2).sum(Kind::Float).backward();
        for parameter in bert.parameters() {
            let finite = parameter.tensor.grad().isfinite().all().int64_value(&[]);
            assert_eq!(finite, 1, "{}", parameter.name);
        }
    }
    mask = inputs.left.copy();
    let _ = mask.get(2).fill_(0);
    gpt2.forward((&inputs.ids, &mask)).unwrap().narrow(0, 0, 2).sum(Kind::Float).backward();
    let gradient = gpt2.parameters()[0].tensor.grad();
    assert_eq!(gradient.isfinite().all().int64_value(&[]), 1);
}

#[test]
fn tokens_beyond_the_vocabulary_are_named() {
    // On a GPU they would end the tests.
    fn refused<M>(model: &Model<M>, layer: &str)
    where
        M: for<'t> Module<Tokens<'t>, Output = Tensor>,
    {
        let ids = Tensor::from_slice(&[7i64, 8, 9, 49, 50, 3]).view([2, 3]);
        let error = model.forward(Tokens::from(&ids)).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{layer}: id 50 at [1, 1] is beyond its table, which has the ids 0 to 49 (of tokens, vocab_size is \
                 50); take the tokenizer that belongs to the model, or a model of a larger vocabulary"
            )
        );
    }

    let cpu = || Model::builder().device(Device::Cpu);
    let options =
        Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 1, ..Default::default() };
    let gpt2 = cpu().build(|path| Gpt2LmHead::new(path, &options)).unwrap();
    refused(&gpt2, "transformer.wte");
    let options = BertOptions {
        vocab_size: 50,
        hidden_size: 32,
        num_attention_heads: 4,
        num_hidden_layers: 1,
        ..Default::default()
    };
    let bert = cpu().build(|path| BertForMaskedLm::new(path, &options)).unwrap();
    refused(&bert, "bert.embeddings.word_embeddings");
    let options = LlamaOptions {
        vocab_size: 50,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 1,
        num_attention_heads: 4,
        ..Default::default()
    };
    let llama = cpu().build(|path| LlamaForCausalLm::new(path, &options)).unwrap();
    refused(&llama, "model.embed_tokens");
}
