//! Texts of unequal lengths on ranks that share each forward.

use std::sync::atomic::{AtomicUsize, Ordering};

use brigade_models::{CausalModel, GenerationOptions, Tokens};
use brigade_torch::{ProcessGroup, ReduceOp, Result};
use tch::{Kind, Tensor};

use super::tensor_parallel::on_ranks;

/// Counts upwards, modulo 10. Each forward waits for all ranks, as one that gathers weights does.
struct Shared<'a> {
    group: &'a ProcessGroup,
    forwards: &'a AtomicUsize,
}

impl CausalModel for Shared<'_> {
    type State = ();

    fn start(&self, _tokens: i64) {}

    fn next_logits(&self, tokens: Tokens<'_>, _state: &mut ()) -> Result<Tensor> {
        self.forwards.fetch_add(1, Ordering::SeqCst);
        let mut weight = Tensor::from_slice(&[0.5f32]);
        self.group.all_reduce(&mut weight, ReduceOp::Sum)?;
        let next = tokens.ids.f_select(1, -1)?.f_add_scalar(1)?.f_remainder(10)?;
        Ok(next.f_one_hot(10)?.f_to_kind(Kind::Float)?.f_mul(&weight)?)
    }

    fn select_rows(&self, _state: &mut (), _rows: &Tensor) -> Result<()> {
        Ok(())
    }
}

#[test]
fn ranks_compute_as_many_forwards_as_the_longest_text() {
    for num_beams in [1, 2] {
        let forwards = [const { AtomicUsize::new(0) }; 3];
        on_ranks(3, |group| {
            let rank = group.rank();
            let model = Shared { group: &group, forwards: &forwards[rank] };
            // Three, seven or no tokens, and prompts in one or two pieces.
            let options = GenerationOptions {
                max_new_tokens: [3, 7, 0][rank],
                prefill_chunk: [None, Some(1), None][rank],
                num_beams,
                ..GenerationOptions::default()
            };
            let any_rank = |needed| {
                let mut needed = Tensor::from_slice(&[i64::from(needed)]);
                group.all_reduce(&mut needed, ReduceOp::Max)?;
                Ok(needed.f_int64_value(&[0])? > 0)
            };
            let ids = Tensor::from_slice(&[1i64, 2]).view([1, 2]);
            let written = if num_beams > 1 {
                let search = options.beam_search(&model, &ids, None).unwrap();
                search.synchronized(any_rank).run().unwrap().ids
            } else {
                options.stream(&model, &ids, None).unwrap().synchronized(any_rank).finish().unwrap()
            };
            let expected: Vec<i64> = (1..=2 + options.max_new_tokens).collect();
            assert_eq!(Vec::<i64>::try_from(written.view([-1])).unwrap(), expected);
        });
        let forwards = forwards.map(AtomicUsize::into_inner);
        assert_eq!(forwards, [8, 8, 8], "seven tokens, and one piece more of the prompt");
    }
}

/// Counts upwards, modulo 10, also when tokens are drawn.
struct Counter;

impl CausalModel for Counter {
    type State = ();

    fn start(&self, _tokens: i64) {}

    fn next_logits(&self, tokens: Tokens<'_>, _state: &mut ()) -> Result<Tensor> {
        let next = tokens.ids.f_select(1, -1)?.f_add_scalar(1)?.f_remainder(10)?;
        Ok(next.f_one_hot(10)?.f_to_kind(Kind::Float)?.f_mul_scalar(1000.0)?)
    }

    fn select_rows(&self, _state: &mut (), _rows: &Tensor) -> Result<()> {
        Ok(())
    }
}

#[test]
fn each_text_of_a_batch_is_streamed_until_its_own_stop_string() {
    let digits = |ids: &[i64]| Ok(ids.iter().map(ToString::to_string).collect::<String>());
    let ids = Tensor::from_slice(&[1i64, 2, 5, 6]).view([2, 2]);
    let options = GenerationOptions {
        max_new_tokens: 12,
        do_sample: true,
        num_return_sequences: 2,
        pad_token_id: Some(0),
        stop_strings: vec!["01".to_owned()],
        ..GenerationOptions::default()
    };
    let stream = options.stream(&Counter, &ids, None).unwrap().decoded_by(digits);
    // The first text ends at its own string, the second one at the string of all.
    let mut text = stream.stopped_by([vec!["34", "56"], vec!["23"]]).unwrap().text();
    let mut texts = vec![String::new(); 4];
    let mut ends = Vec::new();
    while let Some(pieces) = text.next() {
        for (text, piece) in texts.iter_mut().zip(pieces.unwrap()) {
            text.push_str(&piece);
        }
        ends.push(text.tokens().ended().to_vec());
    }
    assert_eq!(texts, ["34", "34", "78901", "78901"]);
    assert_eq!(ends[0], [false; 4]);
    assert_eq!(ends[1], [true, true, false, false]);
    assert_eq!((ends.len(), &ends[4]), (5, &vec![true; 4]));
    // A text that reaches the maximum length has not ended.
    let short = GenerationOptions { max_new_tokens: 1, ..options.clone() };
    let mut stream = short.stream(&Counter, &ids, None).unwrap().decoded_by(digits);
    stream.next().unwrap().unwrap();
    assert!(stream.next().is_none());
    assert_eq!(stream.ended(), [false; 4]);
}

#[test]
fn stop_strings_that_fit_no_text_are_errors() {
    let digits = |ids: &[i64]| Ok(ids.iter().map(ToString::to_string).collect::<String>());
    let ids = Tensor::from_slice(&[1i64, 2]).view([2, 1]);
    let options = GenerationOptions::default();
    let stream = || options.stream(&Counter, &ids, None).unwrap();
    let refused = |lists: &[&[&str]]| {
        let lists = lists.iter().map(|list| list.iter().copied());
        stream().decoded_by(digits).stopped_by(lists).unwrap_err().to_string()
    };
    let error = refused(&[&["1"]]);
    assert!(error.contains("expected stop strings for 2 texts, found 1"), "{error}");
    let error = refused(&[&["1"], &[""]]);
    assert!(error.contains("an empty stop string ends every text"), "{error}");
    let mut stream = stream().stopped_by([["1"], ["2"]]).unwrap();
    let error = stream.next().unwrap().unwrap_err().to_string();
    assert!(error.contains("`decoded_by`"), "{error}");
}
