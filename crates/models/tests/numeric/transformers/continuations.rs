//! Rules on tokens, stop strings, and several continuations of a text, against transformers' `generate`.

use std::sync::Mutex;

use brigade_models::{
    Beams, CacheKind, CausalModel, EarlyStopping, GenerationOptions, KeyValueCache, Tokens,
    UncachedModel,
};
use brigade_nn::Model;
use brigade_test_device::numeric_device;
use brigade_torch::Result;
use serde_json::Value;
use tch::Tensor;

use super::common::{Inputs, TOLERANCE, close, flat, numbers};
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

fn beams(case: &str) -> GenerationOptions {
    let base = |num_beams, num_return_sequences| GenerationOptions {
        num_beams,
        num_return_sequences,
        ..plain()
    };
    let ending = |num_beams, num_return_sequences| GenerationOptions {
        eos_token_id: vec![9, 44, 17, 30],
        ..base(num_beams, num_return_sequences)
    };
    match case {
        "three" => base(3, 1),
        "n_best" => base(4, 3),
        "ends" => ending(3, 3),
        "longer" => GenerationOptions { length_penalty: 2.0, ..ending(3, 2) },
        "shorter" => GenerationOptions { length_penalty: -1.0, ..ending(3, 2) },
        "early" => GenerationOptions { early_stopping: EarlyStopping::Full, ..ending(4, 4) },
        "never" => GenerationOptions {
            early_stopping: EarlyStopping::Never,
            length_penalty: 0.5,
            ..ending(4, 2)
        },
        "rules" => GenerationOptions {
            eos_token_id: vec![9, 44],
            min_new_tokens: 5,
            repetition_penalty: 1.3,
            no_repeat_ngram_size: 2,
            ..base(3, 2)
        },
        other => panic!("{other}"),
    }
}

#[test]
fn beams_are_transformers() {
    let (golden, inputs) = (golden(), Inputs::new());
    fn check<M: CausalModel>(name: &str, model: &M, golden: &Value, inputs: &Inputs) {
        let same = |case: &str, found: Beams, expected: &Value| {
            assert_eq!(rows(&found.ids), rows(&ids(&expected["ids"])), "{name} {case}");
            close(case, &flat(&found.scores), &numbers(&expected["scores"]), TOLERANCE);
        };
        for (case, expected) in golden[name]["beams"].as_object().unwrap() {
            let search = beams(case).beam_search(model, &inputs.ids, Some(&inputs.left)).unwrap();
            same(case, search.run().unwrap(), expected);
        }
        let case = &golden[name]["stops"];
        let options = GenerationOptions { num_beams: 3, ..stopped(case) };
        let search = options.beam_search(model, &inputs.ids, Some(&inputs.left)).unwrap();
        same("stops", search.decoded_by(decoder(golden)).run().unwrap(), &case["beams"]);
    }
    check("gpt2", &gpt2(), &golden, &inputs);
    check("llama", &llama(), &golden, &inputs);
}

#[test]
fn beams_compute_a_text_once_and_are_the_same_without_a_cache() {
    let inputs = Inputs::new();
    let noted = Noted::new(llama());
    let options = beams("three");
    let found = options.beam_search(&noted, &inputs.ids, None).unwrap().run().unwrap();
    let steps = noted.seen.lock().unwrap().clone();
    assert_eq!(steps[0], [3, 9]);
    assert!(steps[1..].iter().all(|step| *step == [9, 1]), "{steps:?}");
    let uncached = UncachedModel::new(|tokens| Ok(noted.model.forward(tokens)?.f_select(1, -1)?));
    let again = options.beam_search(&uncached, &inputs.ids, None).unwrap().run().unwrap();
    assert_eq!(rows(&found.ids), rows(&again.ids));
    assert_eq!(rows(&found.ids), rows(&options.generate(&noted, &inputs.ids, None).unwrap()));
}

#[test]
fn groups_of_beams_keep_apart() {
    let inputs = Inputs::new();
    let model = llama();
    let start = inputs.ids.narrow(0, 0, 2);
    let found = |groups, penalty| {
        let options = GenerationOptions {
            num_beam_groups: groups,
            diversity_penalty: penalty,
            num_beams: 4,
            num_return_sequences: 4,
            ..plain()
        };
        let beams = options.beam_search(&model, &start, None).unwrap().run().unwrap();
        (rows(&beams.ids.narrow(1, 9, 8)), flat(&beams.scores))
    };
    // Without a penalty each group finds what its number of beams finds alone.
    let alone = GenerationOptions { num_beams: 2, num_return_sequences: 2, ..plain() };
    let alone = alone.beam_search(&model, &start, None).unwrap().run().unwrap();
    let alone = rows(&alone.ids.narrow(1, 9, 8));
    let (equal, _) = found(2, 0.0);
    for text in 0..2 {
        let expected: Vec<_> =
            alone[2 * text..2 * text + 2].iter().flat_map(|row| [row, row]).collect();
        assert_eq!(equal[4 * text..4 * text + 4].iter().collect::<Vec<_>>(), expected);
    }
    // With a large one no group takes a token that another one takes in the same step.
    let (apart, scores) = found(4, 1e4);
    for text in 0..2 {
        let rows = &apart[4 * text..4 * text + 4];
        for step in 0..8 {
            let mut tokens: Vec<i64> = rows.iter().map(|row| row[step]).collect();
            tokens.sort_unstable();
            tokens.dedup();
            assert_eq!(tokens.len(), 4, "{rows:?}");
        }
        assert!(scores[4 * text..4 * text + 4].is_sorted_by(|one, other| one >= other));
    }
    // The first group is the greedy text.
    let greedy = rows(&plain().generate(&model, &start, None).unwrap().narrow(1, 9, 8));
    for text in 0..2 {
        assert!(apart[4 * text..4 * text + 4].contains(&greedy[text]));
    }
}

#[test]
fn drawn_beams_are_drawn_without_replacement() {
    let inputs = Inputs::new();
    let model = gpt2();
    // Many equal texts: the frequencies of the best of two drawn continuations of one token.
    let starts = inputs.ids.narrow(0, 0, 1).repeat([3000, 1]);
    let options = GenerationOptions {
        do_sample: true,
        top_k: Some(3),
        num_beams: 2,
        num_return_sequences: 2,
        max_new_tokens: 1,
        seed: Some(4),
        ..plain()
    };
    let beams = options.beam_search(&model, &starts, None).unwrap().run().unwrap();
    let tokens = rows(&beams.ids.narrow(1, 9, 1));
    let logits = model.forward(&inputs.ids.narrow(0, 0, 1)).unwrap().select(1, -1);
    let (best, order) = logits.view([-1]).topk(3, -1, true, true);
    let (best, order) = (flat(&best.softmax(-1, tch::Kind::Double)), flat(&order));
    for (one, other) in [(0, 1), (0, 2), (1, 2)] {
        let pair = |first: usize, second: usize| best[first] * best[second] / (1.0 - best[first]);
        let expected = pair(one, other) + pair(other, one);
        let is_pair = |texts: &&[Vec<i64>]| {
            texts[0][0] == order[one] as i64 && texts[1][0] == order[other] as i64
        };
        let found = tokens.chunks(2).filter(is_pair).count() as f64 / 3000.0;
        let deviation = (expected * (1.0 - expected) / 3000.0).sqrt();
        assert!((found - expected).abs() < 5.0 * deviation, "{one} {other}: {found} {expected}");
    }
}

#[test]
fn wrong_beams_are_named() {
    let inputs = Inputs::new();
    let refused = |options: GenerationOptions| {
        options.generate(&gpt2(), &inputs.ids, None).unwrap_err().to_string()
    };
    let three = beams("three");
    let found = refused(GenerationOptions { num_return_sequences: 4, ..three.clone() });
    assert!(found.contains("num_return_sequences 4 is more than the 3 beams"), "{found}");
    let found = refused(GenerationOptions { num_beam_groups: 2, ..three.clone() });
    assert!(found.contains("num_beam_groups 2 does not divide num_beams 3"), "{found}");
    let found = three.stream(&gpt2(), &inputs.ids, None).unwrap_err().to_string();
    assert!(found.contains("3 beams"), "{found}");
    let far = GenerationOptions { suppress_tokens: vec![50], ..plain() };
    assert!(refused(far).contains("token 50, and the model has 50"));
    let (long, mask) = plain().padded(&[vec![7; 41], vec![7]], numeric_device()).unwrap();
    let found = plain().generate(&gpt2(), &long, Some(&mask)).unwrap_err().to_string();
    assert!(found.contains("40 positions, found 41 tokens"), "{found}");
}

/// The logits of each of the last four tokens, one after the other, behind a cache of the first five.
fn cached_logits(kind: CacheKind) -> (Tensor, Tensor) {
    let (inputs, model) = (Inputs::new(), llama());
    let mut cache = KeyValueCache::fixed(9).kind(kind);
    let mut steps = Vec::new();
    for (at, count) in [(0, 5), (5, 1), (6, 1), (7, 1), (8, 1)] {
        let ids = inputs.ids.narrow(1, at, count);
        steps.push(model.module().forward_cached((&ids).into(), &mut cache).unwrap());
    }
    (Tensor::cat(&steps, 1), model.forward(&inputs.ids).unwrap())
}

#[test]
fn a_cache_of_fewer_bits_has_the_logits_within_its_precision() {
    let error = |kind| {
        let (found, expected) = cached_logits(kind);
        let scale = expected.abs().max().double_value(&[]);
        (found - expected).abs().max().double_value(&[]) / scale
    };
    // A relative step of 2^-8 and 1/254 of each value; the logits are linear in values and smooth in keys.
    let (exact, bf16, int8) =
        (error(CacheKind::Computed), error(CacheKind::Bf16), error(CacheKind::Int8));
    assert!(exact < 1e-5, "{exact}");
    assert!(exact < bf16 && bf16 < 0.02, "{bf16}");
    assert!(exact < int8 && int8 < 0.02, "{int8}");
}

#[test]
fn caches_of_fewer_bits_write_and_reorder_texts() {
    let (inputs, model) = (Inputs::new(), llama());
    for kind in [CacheKind::Bf16, CacheKind::Int8] {
        // Beams, which reorder the cache, in agreement with continuations that are read anew.
        let options = GenerationOptions { cache_kind: kind, max_new_tokens: 4, ..beams("three") };
        let exact = GenerationOptions { cache_kind: CacheKind::Computed, ..options.clone() };
        let run = |options: &GenerationOptions| {
            options.beam_search(&model, &inputs.ids, Some(&inputs.left)).unwrap().run().unwrap()
        };
        let (found, expected) = (run(&options), run(&exact));
        assert_eq!(rows(&found.ids), rows(&expected.ids), "{kind:?}");
        close("scores", &flat(&found.scores), &flat(&expected.scores), 0.02);
        assert_ne!(flat(&found.scores), flat(&expected.scores), "{kind:?}");
    }
    let uncached = UncachedModel::new(|tokens| Ok(model.forward(tokens)?.f_select(1, -1)?));
    let options = GenerationOptions { cache_kind: CacheKind::Int8, ..plain() };
    let message = options.generate(&uncached, &inputs.ids, None).unwrap_err().to_string();
    assert!(message.contains("cache of kind Int8"), "{message}");
}
