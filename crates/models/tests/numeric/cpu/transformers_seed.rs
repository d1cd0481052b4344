//! What a seed of libtorch's gives transformers: first values, dropouts, samples.

use brigade_models::{
    Bert, BertForMaskedLm, BertForSequenceClassification, BertForTokenClassification, BertOptions,
    GenerationOptions, Gpt2LmHead, Gpt2Options, LlamaForCausalLm, LlamaOptions,
};
use brigade_nn::{Model, ParamPath};
use tch::{Kind, Tensor};

use crate::transformers::common::{Inputs, close, fill_all, filled, golden, more, options};

fn first_values<M>(name: &str, build: impl FnOnce(&ParamPath<'_>) -> M) {
    let golden = more();
    tch::manual_seed(17);
    let model = Model::new(build).unwrap();
    let expected = golden["first_values_of_seed_17"][name].as_array().unwrap();
    let parameters = model.parameters();
    assert_eq!(parameters.len(), expected.len(), "{name}");
    for (parameter, expected) in parameters.iter().zip(expected) {
        assert_eq!(parameter.name, expected[0], "{name}");
        let values = parameter.tensor.to_kind(Kind::Double);
        let sums = [&values, &values.abs()].map(|it| it.sum(Kind::Double).double_value(&[]));
        let sums_of_theirs = [1, 2].map(|place| expected[place].as_f64().unwrap());
        close(&parameter.name, &sums, &sums_of_theirs, 1e-9);
    }
}

#[test]
fn a_seed_gives_the_first_values_of_transformers() {
    let golden = golden();
    let models = &golden["models"];
    let gpt2: Gpt2Options = options(&models["gpt2"]);
    first_values("gpt2", |path| Gpt2LmHead::new(path, &gpt2));
    let llama = LlamaOptions { pad_token_id: None, ..options(&models["llama"]) };
    first_values("llama", |path| LlamaForCausalLm::new(path, &llama));
    let bert: BertOptions = options(&models["bert_classifier"]);
    first_values("bert", |path| Bert::new(path, &bert));
    first_values("bert_classifier", |path| BertForSequenceClassification::new(path, &bert));
    first_values("bert_tokens", |path| BertForTokenClassification::new(path, &bert));
    first_values("bert_masked_lm", |path| BertForMaskedLm::new(path, &bert));
}

#[test]
fn recomputed_blocks_have_the_same_gradients_and_dropouts() {
    let (golden, inputs) = (golden(), Inputs::new());
    let plain: Gpt2Options = options(&golden["models"]["gpt2"]);
    let plain = Gpt2Options { resid_pdrop: 0.2, attn_pdrop: 0.1, ..plain };
    let outcome = |recompute| {
        let options = Gpt2Options { recompute, ..plain.clone() };
        let model = Model::new(|path| Gpt2LmHead::new(path, &options)).unwrap();
        fill_all(&model);
        tch::manual_seed(5);
        let loss = model.module().loss(inputs.left(), &inputs.ids, 0.0).unwrap();
        loss.sum.backward();
        let gradients: Vec<Tensor> =
            model.parameters().into_iter().map(|it| it.tensor.grad()).collect();
        (loss.sum, gradients)
    };
    assert_eq!(outcome(false), outcome(true));
}

#[test]
fn samples_without_a_seed_are_those_of_libtorchs_generator() {
    let (golden, inputs) = (golden(), Inputs::new());
    let case = &golden["models"]["gpt2"];
    let model = filled(case, Kind::Float, |path, options| Gpt2LmHead::new(path, options));
    let options =
        GenerationOptions { do_sample: true, max_new_tokens: 12, ..GenerationOptions::default() };
    let written = |seed| {
        tch::manual_seed(seed);
        options.generate(&model, &inputs.ids, None).unwrap()
    };
    assert_eq!(written(4), written(4));
    assert_ne!(written(4), written(5));
}
