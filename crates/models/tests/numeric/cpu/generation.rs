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
