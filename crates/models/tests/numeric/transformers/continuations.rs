//! Rules on tokens, stop strings, and several continuations of a text, against transformers' `generate`.

use std::sync::Mutex;

use brigade_models::{CausalModel, GenerationOptions, Tokens};
use brigade_nn::Model;
use brigade_test_device::numeric_device;
use brigade_torch::Result;
use serde_json::Value;
use tch::Tensor;

use super::common::Inputs;
use super::generation::{gpt2, ids, llama, rows};

const PAD: i64 = 3;

fn golden() -> Value {
    serde_json::from_str(include_str!("../../golden/generation.json")).unwrap()
}

fn plain() -> GenerationOptions {
    GenerationOptions { max_new_tokens: 8, pad_token_id: Some(PAD), ..GenerationOptions::default() }
}

fn rules(case: &str) -> GenerationOptions {
    let base = plain();
    match case {
        "no_repeat_ngram" => GenerationOptions { no_repeat_ngram_size: 2, ..base },
        "bad_words" => GenerationOptions {
            bad_words_ids: [
                &[22][..],
                &[17],
                &[40, 22],
                &[38, 40, 22],
                &[5, 17],
                &[39, 28],
                &[28, 28],
            ]
            .map(<[i64]>::to_vec)
            .to_vec(),
            ..base
        },
        "suppress" => GenerationOptions {
            suppress_tokens: vec![1, 5, 22, 28, 30],
            begin_suppress_tokens: vec![40, 17],
            ..base
        },
        "min_new_tokens" => {
            GenerationOptions { eos_token_id: vec![9, 44, 17, 30], min_new_tokens: 4, ..base }
        }
        "forced_end" => {
            GenerationOptions { eos_token_id: vec![11], forced_eos_token_id: vec![11], ..base }
        }
        "together" => GenerationOptions {
            eos_token_id: vec![9, 44],
            min_new_tokens: 3,
            repetition_penalty: 1.4,
            no_repeat_ngram_size: 3,
            bad_words_ids: vec![vec![9], vec![21], vec![5, 17]],
            suppress_tokens: vec![13],
            ..base
        },
        other => panic!("{other}"),
    }
}

#[test]
fn rules_on_tokens_are_transformers() {
    let (golden, inputs) = (golden(), Inputs::new());
    fn check<M: CausalModel>(name: &str, model: &M, golden: &Value, inputs: &Inputs) {
        for (case, expected) in golden[name]["rules"].as_object().unwrap() {
            let found = rules(case).generate(model, &inputs.ids, Some(&inputs.left)).unwrap();
            assert_eq!(rows(&found), rows(&ids(&expected["ids"])), "{name} {case}");
        }
    }
    check("gpt2", &gpt2(), &golden, &inputs);
    check("llama", &llama(), &golden, &inputs);
}

/// The text of tokens, as the golden file's tokenizer has it.
fn decoder(golden: &Value) -> impl Fn(&[i64]) -> Result<String> + '_ {
    |ids| Ok(ids.iter().map(|&id| golden["pieces"][id as usize].as_str().unwrap()).collect())
}

fn stopped(case: &Value) -> GenerationOptions {
    let strings = case["strings"].as_array().unwrap();
    let stop_strings = strings.iter().map(|it| it.as_str().unwrap().to_owned()).collect();
    GenerationOptions { eos_token_id: vec![1], stop_strings, ..plain() }
}

#[test]
fn stop_strings_are_transformers() {
    let (golden, inputs) = (golden(), Inputs::new());
    fn check<M: CausalModel>(name: &str, model: &M, golden: &Value, inputs: &Inputs) {
        let case = &golden[name]["stops"];
        let stream = stopped(case).stream(model, &inputs.ids, Some(&inputs.left)).unwrap();
        let found = stream.decoded_by(decoder(golden)).finish().unwrap();
        let expected = ids(&case["greedy"]["ids"]);
        assert_eq!(rows(&found), rows(&expected), "{name}");
        // The text that is streamed is that of the tokens until the padding.
        let stream = stopped(case).stream(model, &inputs.ids, Some(&inputs.left)).unwrap();
        let mut texts = vec![String::new(); 3];
        for pieces in stream.decoded_by(decoder(golden)).text() {
            for (text, piece) in texts.iter_mut().zip(pieces.unwrap()) {
                *text += &piece;
            }
        }
        let written = rows(&expected).into_iter().map(|row| {
            let mut row = row[9..].to_vec();
            while row.last() == Some(&PAD) {
                row.pop();
            }
            decoder(golden)(&row).unwrap()
        });
        assert_eq!(texts, written.collect::<Vec<_>>(), "{name}");
    }
    check("gpt2", &gpt2(), &golden, &inputs);
    check("llama", &llama(), &golden, &inputs);
    let without = stopped(&golden["gpt2"]["stops"]).generate(&gpt2(), &inputs.ids, None);
    let message = without.unwrap_err().to_string();
    assert!(message.contains("decoded_by"), "{message}");
}

#[test]
fn lists_of_texts_are_padded_as_by_hand() {
    let inputs = Inputs::new();
    let texts: Vec<Vec<i64>> = rows(&inputs.ids)
        .iter()
        .zip(super::common::LENGTHS)
        .map(|(row, length)| row[9 - length as usize..].to_vec())
        .collect();
    let (padded, mask) = plain().padded(&texts, numeric_device()).unwrap();
    let model = llama();
    let found = plain().generate(&model, &padded, Some(&mask)).unwrap();
    let expected = plain().generate(&model, &inputs.ids, Some(&inputs.left)).unwrap();
    assert_eq!(found.narrow(1, 9, 8), expected.narrow(1, 9, 8));
    let message = plain().padded(&[vec![1], vec![]], numeric_device()).unwrap_err().to_string();
    assert!(message.contains("text 1 has no token"), "{message}");
}

/// A model that notes the shape of the tokens of each forward.
struct Noted<M> {
    model: Model<M>,
    seen: Mutex<Vec<Vec<i64>>>,
}

impl<M> Noted<M> {
    fn new(model: Model<M>) -> Self {
        Self { model, seen: Mutex::new(Vec::new()) }
    }
}

impl<M: CausalModel> CausalModel for Noted<M> {
    type State = M::State;

    fn start(&self, tokens: i64) -> M::State {
        self.model.start(tokens)
    }

    fn next_logits(&self, tokens: Tokens<'_>, state: &mut M::State) -> Result<Tensor> {
        self.seen.lock().unwrap().push(tokens.ids.size());
        self.model.next_logits(tokens, state)
    }

    fn select_rows(&self, state: &mut M::State, rows: &Tensor) -> Result<()> {
        self.model.select_rows(state, rows)
    }
}

#[test]
fn continuations_of_a_text_compute_it_once() {
    let inputs = Inputs::new();
    let model = Noted::new(llama());
    let sampled = GenerationOptions {
        do_sample: true,
        seed: Some(5),
        num_return_sequences: 2,
        max_new_tokens: 3,
        ..plain()
    };
    let found = sampled.generate(&model, &inputs.ids, Some(&inputs.left)).unwrap();
    assert_eq!(*model.seen.lock().unwrap(), [[3, 9], [6, 1], [6, 1]]);
    // The same texts, given twice.
    let twice = |tensor: &Tensor| tensor.repeat_interleave_self_int(2, 0, None);
    let alone = GenerationOptions { num_return_sequences: 1, ..sampled.clone() };
    let expected =
        alone.generate(&model.model, &twice(&inputs.ids), Some(&twice(&inputs.left))).unwrap();
    assert_eq!(rows(&found), rows(&expected));
    let greedy = GenerationOptions { do_sample: false, ..sampled };
    let message = greedy.generate(&model, &inputs.ids, None).unwrap_err().to_string();
    assert!(message.contains("num_return_sequences 2"), "{message}");
}

#[test]
fn a_text_can_be_read_in_chunks() {
    let inputs = Inputs::new();
    let chunked = GenerationOptions { prefill_chunk: Some(4), ..plain() };
    fn check<M: CausalModel>(model: Model<M>, chunked: &GenerationOptions, inputs: &Inputs) {
        let model = Noted::new(model);
        let expected = plain().generate(&model.model, &inputs.ids, Some(&inputs.left)).unwrap();
        let found = chunked.generate(&model, &inputs.ids, Some(&inputs.left)).unwrap();
        assert_eq!(model.seen.lock().unwrap()[..3], [[3, 4], [3, 4], [3, 1]]);
        assert_eq!(rows(&found), rows(&expected));
        let found = chunked.generate(&model, &inputs.ids, None).unwrap();
        let expected = plain().generate(&model.model, &inputs.ids, None).unwrap();
        assert_eq!(rows(&found), rows(&expected));
    }
    check(gpt2(), &chunked, &inputs);
    check(llama(), &chunked, &inputs);
}
