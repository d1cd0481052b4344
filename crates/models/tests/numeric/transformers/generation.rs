//! What models write, against transformers' `generate`.

use brigade_models::{CausalModel, GenerationOptions, Gpt2LmHead, LlamaForCausalLm, Tokens};
use brigade_nn::{Model, Module};
use brigade_test_device::on_device;
use brigade_torch::Result;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::common::{Inputs, close, filled, golden, more, numbers};
use crate::fill::fill;

pub(super) fn gpt2() -> Model<Gpt2LmHead> {
    let golden = golden();
    filled(&golden["models"]["gpt2"], Kind::Float, |path, options| Gpt2LmHead::new(path, options))
}

pub(super) fn llama() -> Model<LlamaForCausalLm> {
    let golden = golden();
    let case = &golden["models"]["llama"];
    filled(case, Kind::Float, |path, options| LlamaForCausalLm::new(path, options))
}

pub(super) fn rows(ids: &Tensor) -> Vec<Vec<i64>> {
    Vec::try_from(ids).unwrap()
}

pub(super) fn ids(value: &Value) -> Tensor {
    let rows = value.as_array().unwrap().len() as i64;
    let all: Vec<i64> = numbers(value).into_iter().map(|id| id as i64).collect();
    on_device(&Tensor::from_slice(&all)).view([rows, -1])
}

#[test]
fn greedy_texts_are_transformers() {
    let (golden, inputs) = (golden(), Inputs::new());
    let start = inputs.ids.narrow(1, 0, 4);
    let greedy = GenerationOptions { max_new_tokens: 6, ..GenerationOptions::default() };
    let expected = |name: &str| ids(&golden["models"][name]["greedy"]["ids"]);
    assert_eq!(greedy.generate(&gpt2(), &start, None).unwrap(), expected("gpt2"));
    assert_eq!(greedy.generate(&llama(), &start, None).unwrap(), expected("llama"));
    let shorter = GenerationOptions { max_length: Some(7), ..greedy };
    let found = shorter.generate(&llama(), &start, None).unwrap();
    assert_eq!(found, expected("llama").narrow(1, 0, 7));
}

#[test]
fn texts_of_unequal_lengths_are_transformers() {
    let (golden, inputs) = (more(), Inputs::new());
    let greedy = GenerationOptions { max_new_tokens: 8, ..GenerationOptions::default() };
    let same = |name: &str, found: Result<Tensor>| {
        let (found, expected) = (found.unwrap(), ids(&golden["generation"][name]));
        assert_eq!(rows(&found), rows(&expected), "{name}");
    };
    same("gpt2_left", greedy.generate(&gpt2(), &inputs.ids, Some(&inputs.left)));
    same("llama_left", greedy.generate(&llama(), &inputs.ids, Some(&inputs.left)));
    let penalty = GenerationOptions { repetition_penalty: 1.7, ..greedy.clone() };
    same("llama_penalty", penalty.generate(&llama(), &inputs.ids, Some(&inputs.left)));
    let ending =
        GenerationOptions { eos_token_id: vec![9, 44], pad_token_id: Some(0), ..greedy.clone() };
    same("gpt2_eos", ending.generate(&gpt2(), &inputs.ids, Some(&inputs.left)));
    // Each alone, without padding.
    let all = greedy.generate(&llama(), &inputs.ids, Some(&inputs.left)).unwrap();
    for (row, length) in (0..).zip(super::common::LENGTHS) {
        let alone = inputs.ids.narrow(0, row, 1).narrow(1, 9 - length, length);
        let alone = greedy.generate(&llama(), &alone, None).unwrap();
        assert_eq!(alone.narrow(1, length, 8), all.narrow(0, row, 1).narrow(1, 9, 8));
    }
}

/// GPT-2 without a cache.
struct Uncached(Model<Gpt2LmHead>);

impl CausalModel for Uncached {
    type State = Option<Tensor>;

    fn start(&self, _tokens: i64) -> Self::State {
        None
    }

    fn next_logits(&self, tokens: Tokens<'_>, state: &mut Self::State) -> Result<Tensor> {
        let all = match state.take() {
            Some(before) => Tensor::f_cat(&[&before, tokens.ids], 1)?,
            None => tokens.ids.shallow_clone(),
        };
        let logits = self.0.module().forward(&all)?.f_select(1, -1)?;
        *state = Some(all);
        Ok(logits)
    }
}

#[test]
fn samples_are_the_same_with_and_without_a_cache() {
    let inputs = Inputs::new();
    let sampled = GenerationOptions {
        do_sample: true,
        temperature: 1.2,
        top_k: Some(30),
        top_p: 0.95,
        seed: Some(11),
        max_new_tokens: 12,
        ..GenerationOptions::default()
    };
    let start = inputs.ids.narrow(1, 0, 3);
    let cached = sampled.generate(&gpt2(), &start, None).unwrap();
    assert_eq!(cached, sampled.generate(&Uncached(gpt2()), &start, None).unwrap());
    let other = GenerationOptions { seed: Some(12), ..sampled.clone() };
    assert_ne!(cached, other.generate(&gpt2(), &start, None).unwrap());
    let model = gpt2();
    let mut stream = sampled.stream(&model, &start, None).unwrap();
    let mut rows = vec![Vec::new(); 3];
    for tokens in &mut stream {
        for (row, token) in rows.iter_mut().zip(tokens.unwrap()) {
            row.push(token);
        }
    }
    assert_eq!(*stream.ids(), cached);
    let streamed = on_device(&Tensor::from_slice(&rows.concat())).view([3, 12]);
    assert_eq!(streamed, cached.narrow(1, 3, 12));
}

/// Gives the golden file's scores.
struct Scores(Tensor);

impl CausalModel for Scores {
    type State = ();

    fn start(&self, _tokens: i64) {}

    fn next_logits(&self, _tokens: Tokens<'_>, _state: &mut ()) -> Result<Tensor> {
        Ok(self.0.shallow_clone())
    }
}

#[test]
fn draws_have_the_probabilities_of_transformers() {
    let (golden, inputs) = (more(), Inputs::new());
    let scores = fill(&[3, 50], golden["scores_stream"].as_u64().unwrap(), -4.0, 4.0);
    let base =
        GenerationOptions { do_sample: true, max_new_tokens: 1, ..GenerationOptions::default() };
    let cases = [
        (
            "temperature_top_k",
            GenerationOptions { temperature: 0.7, top_k: Some(5), ..base.clone() },
        ),
        ("top_p", GenerationOptions { top_p: 0.8, ..base.clone() }),
        ("min_p", GenerationOptions { temperature: 1.5, min_p: Some(0.2), ..base.clone() }),
        (
            "all",
            GenerationOptions {
                repetition_penalty: 1.3,
                temperature: 0.9,
                top_k: Some(20),
                top_p: 0.9,
                min_p: Some(0.05),
                ..base
            },
        ),
    ];
    const DRAWS: i64 = 3000;
    for (name, options) in cases {
        let options = GenerationOptions { seed: Some(1), ..options };
        // Each row of scores for many texts that begin alike.
        let model = Scores(scores.repeat_interleave_self_int(DRAWS, 0, None));
        let starts = inputs.ids.repeat_interleave_self_int(DRAWS, 0, None);
        let written = options.generate(&model, &starts, None).unwrap().select(1, -1);
        let found: Vec<f64> = (0..3)
            .flat_map(|row| {
                let drawn = written.narrow(0, row * DRAWS, DRAWS);
                let counts = drawn.bincount::<Tensor>(None, 50).to_kind(Kind::Double);
                Vec::<f64>::try_from(counts / DRAWS as f64).unwrap()
            })
            .collect();
        let expected = numbers(&golden["warped_probabilities"][name]);
        for (place, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let deviation = (expected * (1.0 - expected) / DRAWS as f64).sqrt();
            assert!(
                (found - expected).abs() <= 5.0 * deviation,
                "{name} {place}: {found} {expected}"
            );
            assert!(*expected > 0.0 || *found == 0.0, "{name} {place}");
        }
        close(name, &[found.iter().sum()], &[3.0], 1e-9);
    }
}

#[test]
fn wrong_options_and_padding_are_named() {
    let inputs = Inputs::new();
    let refused = |options: GenerationOptions, mask: Option<&Tensor>| {
        options.generate(&gpt2(), &inputs.ids, mask).unwrap_err().to_string()
    };
    let plain = GenerationOptions::default();
    let found = refused(plain.clone(), Some(&inputs.right));
    assert!(found.contains("padded on the left"), "{found}");
    let cold = GenerationOptions { do_sample: true, temperature: 0.0, ..plain.clone() };
    assert!(refused(cold, None).contains("temperature 0 is not positive"));
    let far = GenerationOptions { max_new_tokens: 40, ..plain };
    assert!(refused(far, None).contains("40 positions, found 41 tokens"));
}
