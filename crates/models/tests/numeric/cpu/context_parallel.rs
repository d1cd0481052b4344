//! Transformers of which each rank has a part of every text compute what one rank computes.

use std::sync::Mutex;

use brigade_models::{
    BertForMaskedLm, BertForSequenceClassification, CausalLm, GenerationOptions, Gpt2LmHead,
    Gpt2Options, Labelled, LlamaForCausalLm, MixtralForCausalLm, MixtralOptions, TokenLoss, Tokens,
};
use brigade_nn::{ContextParallel, Model, Module, ParamPath};
use brigade_sharding::ContextMethod;
use brigade_testkit::{assert_close, dist_test};
use brigade_torch::{ProcessGroup, ReduceOp, Result, backward, gradient};
use tch::{Device, Kind, Tensor};

use super::tensor_parallel::edges::joined;
use super::tensor_parallel::{DRAWS, bert, gpt2, ids, llama, mean, mixtral, on_ranks, values};

fn built<M>(
    context: Option<(&ProcessGroup, ContextMethod)>,
    new: &impl Fn(&ParamPath<'_>) -> M,
) -> Model<M> {
    let _one_by_one = DRAWS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    tch::manual_seed(7);
    let builder = Model::builder().kind(Kind::Double);
    let builder = match context {
        Some((group, method)) => {
            builder.context_parallel(ContextParallel { group: Some(group.clone()), method })
        }
        None => builder,
    };
    builder.build(new).unwrap()
}

/// Compares outputs, of which the last is a loss, and the mean of the ranks' gradients.
fn check<M>(
    (ranks, method): (usize, ContextMethod),
    new: impl Fn(&ParamPath<'_>) -> M + Sync,
    outputs: impl Fn(&Model<M>) -> Vec<Tensor> + Sync,
) {
    let run = |model: &Model<M>| -> Vec<Vec<f64>> {
        let found = outputs(model);
        backward(found.last().unwrap()).unwrap();
        found.iter().map(values).collect()
    };
    let whole = built(None, &new);
    let expected = run(&whole);
    let gradients = whole.parameters().into_iter();
    let gradients: Vec<_> =
        gradients.map(|it| (it.name, gradient(&it.tensor).unwrap().as_ref().map(values))).collect();
    on_ranks(ranks, |group| {
        let model = built(Some((&group, method)), &new);
        assert!(model.divides_sequences());
        let found = run(&model);
        for (found, expected) in found.iter().zip(&expected) {
            assert_close(found, expected, 1e-12, 1e-13);
        }
        for (it, (name, expected)) in model.parameters().into_iter().zip(&gradients) {
            assert_eq!(&it.name, name);
            let own = gradient(&it.tensor).unwrap();
            assert_eq!(own.is_some(), expected.is_some(), "{name}");
            let (Some(own), Some(expected)) = (own, expected) else { continue };
            let mut sum = own.copy();
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_close(&values(&(sum / ranks as f64)), expected, 1e-12, 1e-13);
        }
    });
}

const GATHER: ContextMethod = ContextMethod::Gather;
const RING: ContextMethod = ContextMethod::Ring;
const ULYSSES: ContextMethod = ContextMethod::Ulysses;

/// Text lengths of which no number of ranks divides all.
fn causal<B>(model: &Model<CausalLm<B>>, length: i64, mask: Option<&Tensor>) -> Vec<Tensor>
where
    CausalLm<B>: for<'a> Module<Labelled<'a>, Output = TokenLoss>
        + for<'a> Module<Tokens<'a>, Output = Tensor>,
{
    let ids = ids(41, 2, length);
    let tokens = || Tokens { attention_mask: mask, ..Tokens::from(&ids) };
    let labels = match mask.filter(|mask| mask.dim() == 2) {
        Some(mask) => ids.masked_fill(&mask.eq(0), -100),
        None => ids.shallow_clone(),
    };
    let labelled = Labelled { smoothing: 0.1, ..Labelled::new(tokens(), &labels) };
    let loss = mean(model.forward(labelled));
    // Each use of the output on its own: its gradient is that of the loss.
    let logits = model.forward(tokens()).unwrap();
    let seen = match mask {
        Some(mask) if mask.dim() == 2 => logits * mask.unsqueeze(-1),
        _ => logits,
    };
    let total = loss.shallow_clone() + (seen.square() * 0.01).mean(Kind::Double);
    vec![seen, loss, total]
}

fn padded(left: bool, length: i64) -> Tensor {
    let mask = Tensor::ones([2, length], (Kind::Int64, Device::Cpu));
    let _ = if left { mask.get(1).narrow(0, 0, 3) } else { mask.get(1).narrow(0, length - 3, 3) }
        .fill_(0);
    mask
}

/// Two texts in each row, of which the tokens see their own.
fn packed(length: i64) -> Tensor {
    let first = length / 3;
    let places = Tensor::arange(length, (Kind::Int64, Device::Cpu));
    let text = places.ge(first).to_kind(Kind::Int64);
    let same = text.unsqueeze(0).eq_tensor(&text.unsqueeze(1));
    let causal = places.unsqueeze(0).le_tensor(&places.unsqueeze(1));
    same.logical_and(&causal).expand([2, 1, length, length], false).contiguous()
}

#[test]
fn gpt2_by_every_method() {
    for (ranks, method) in [
        (2, GATHER),
        (3, GATHER),
        (4, GATHER),
        (2, RING),
        (3, RING),
        (4, RING),
        (2, ULYSSES),
        (4, ULYSSES),
    ] {
        for length in [13, 16] {
            let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(53));
            check((ranks, method), new, |model| causal(model, length, None));
        }
    }
    let recomputed = Gpt2Options { recompute: true, ..gpt2(53) };
    check((2, RING), |path| Gpt2LmHead::new(path, &recomputed), |model| causal(model, 11, None));
}

#[test]
fn llama_with_shared_keys() {
    for (ranks, method) in [(2, GATHER), (2, RING), (3, RING), (2, ULYSSES), (4, ULYSSES)] {
        for key_heads in [12, 2, 1] {
            let new = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &llama(key_heads));
            check((ranks, method), new, |model| causal(model, 11, None));
        }
    }
}

#[test]
fn mixtral_with_and_without_the_loss_of_its_routers() {
    let balanced =
        MixtralOptions { output_router_logits: true, router_aux_loss_coef: 0.5, ..mixtral() };
    for (ranks, method) in [(2, GATHER), (3, RING), (2, ULYSSES)] {
        for options in [&mixtral(), &balanced] {
            let new = |path: &ParamPath<'_>| MixtralForCausalLm::new(path, options);
            check((ranks, method), new, |model| causal(model, 11, None));
        }
    }
    let padding = Mutex::new(padded(false, 11));
    check(
        (2, GATHER),
        |path: &ParamPath<'_>| MixtralForCausalLm::new(path, &balanced),
        |model| {
            let mask = padding.lock().unwrap().copy();
            causal(model, 11, Some(&mask))
        },
    );
    let new = |options: MixtralOptions| {
        move |path: &ParamPath<'_>| MixtralForCausalLm::new(path, &options)
    };
    let run = |model: &Model<MixtralForCausalLm>| {
        let ids = ids(41, 2, 11);
        model.module().loss(&ids, &ids, 0.0)?.mean()
    };
    let routed = |model: &Model<MixtralForCausalLm>| {
        Ok(model.module().body().forward_routed(&ids(41, 2, 11))?.0)
    };
    for error in refusals(2, GATHER, new(balanced), routed) {
        assert!(error.contains("each rank of the context group has a part"), "{error}");
        assert!(error.contains("loss with output_router_logits instead"), "{error}");
    }
    let window = MixtralOptions { sliding_window: Some(10), ..mixtral() };
    for error in refusals(2, GATHER, new(window), run) {
        assert!(error.contains("a sliding window of 10 tokens is not computed for 11"), "{error}");
    }
}

#[test]
fn padding_and_packed_texts() {
    let (right, left, packed) = (padded(false, 11), padded(true, 11), packed(11));
    for (ranks, method) in [(2, GATHER), (3, GATHER), (2, ULYSSES), (3, ULYSSES)] {
        for mask in [&right, &left, &packed] {
            let mask = Mutex::new(mask.shallow_clone());
            let own = || mask.lock().unwrap().copy();
            let new = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &llama(6));
            check((ranks, method), new, |model| causal(model, 11, Some(&own())));
        }
    }
    // Causality hides padding on the right, so a ring can be used.
    let right = Mutex::new(right);
    let new = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &llama(2));
    check((2, RING), new, |model| {
        let mask = right.lock().unwrap().copy();
        causal(model, 11, Some(&mask))
    });
}

#[test]
fn bert_with_its_heads() {
    for (ranks, method) in [(2, GATHER), (3, GATHER), (2, RING), (2, ULYSSES), (4, ULYSSES)] {
        for is_padded in [false, true] {
            // A ring supports no mask, so the ranks have to divide the text.
            let length = if method == RING { 12 } else { 11 };
            if is_padded && method == RING {
                continue;
            }
            check(
                (ranks, method),
                |path| BertForMaskedLm::new(path, &bert()),
                |model| {
                    let tokens = ids(41, 2, length);
                    let labels = tokens.masked_fill(&tokens.remainder(3).ne(0), -100);
                    let mask = padded(false, length);
                    let read = Tokens {
                        attention_mask: is_padded.then_some(&mask),
                        ..Tokens::from(&tokens)
                    };
                    vec![mean(model.forward(Labelled::new(read, &labels)))]
                },
            );
        }
    }
    let classes = bert().with_classes(3);
    check(
        (2, GATHER),
        |path| BertForSequenceClassification::new(path, &classes),
        |model| {
            let tokens = ids(41, 2, 11);
            let logits = model.forward(&tokens).unwrap();
            let labels = Tensor::from_slice(&[2i64, 0]);
            let loss = mean(model.module().loss(&logits, &labels, 0.0));
            vec![logits, loss]
        },
    );
}

#[test]
fn hidden_states_and_caches_are_those_of_all_tokens() {
    let new = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &llama(2));
    let tokens = ids(41, 2, 9);
    let of = |model: &Model<LlamaForCausalLm>, tokens: &Tensor| -> Vec<Vec<f64>> {
        let states = model.module().body().hidden_states(tokens).unwrap();
        states.iter().map(values).collect()
    };
    let mut whole = built(None, &new);
    whole.eval();
    let expected = of(&whole, &tokens);
    let generated = greedy(&whole, &tokens);
    let shared = Mutex::new(tokens);
    on_ranks(3, |group| {
        let mut model = built(Some((&group, RING)), &new);
        model.eval();
        let tokens = shared.lock().unwrap().copy();
        for (found, expected) in of(&model, &tokens).iter().zip(&expected) {
            assert_close(found, expected, 1e-12, 1e-13);
        }
        assert_eq!(greedy(&model, &tokens), generated);
    });
}

fn greedy(model: &Model<LlamaForCausalLm>, tokens: &Tensor) -> Vec<f64> {
    let options = GenerationOptions { max_new_tokens: 4, seed: Some(3), ..Default::default() };
    values(&options.generate(model, tokens, None).unwrap())
}

/// The errors of all ranks.
fn refusals<M>(
    ranks: usize,
    method: ContextMethod,
    new: impl Fn(&ParamPath<'_>) -> M + Sync,
    run: impl Fn(&Model<M>) -> Result<Tensor> + Sync,
) -> Vec<String> {
    let errors = Mutex::new(Vec::new());
    on_ranks(ranks, |group| {
        let model = built(Some((&group, method)), &new);
        // Not while the others wait for the lock: the run may send messages.
        let error = run(&model).unwrap_err().to_string();
        errors.lock().unwrap().push(error);
    });
    errors.into_inner().unwrap()
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let tokens = Mutex::new((ids(41, 2, 11), padded(true, 11)));
    let run = |model: &Model<LlamaForCausalLm>| {
        let tokens = tokens.lock().unwrap();
        let (ids, mask) = (tokens.0.copy(), tokens.1.copy());
        drop(tokens);
        model.forward((&ids, &mask))
    };
    let new = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &llama(2));
    for error in refusals(2, RING, new, run) {
        assert!(error.contains("ring attention") && error.contains("there is a mask"), "{error}");
    }
    let five = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &llama(12));
    for error in refusals(5, ULYSSES, five, run) {
        assert!(
            error.contains("5 ranks of Ulysses do not divide 12 heads: take 10 or 15"),
            "{error}"
        );
    }
    let three = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &llama(2));
    for error in refusals(3, ULYSSES, three, run) {
        assert!(error.contains("do not divide 2 heads of keys and values: take 3"), "{error}");
    }
    let dropped = Gpt2Options { attn_pdrop: 0.1, ..gpt2(53) };
    let run = |model: &Model<Gpt2LmHead>| model.forward(&ids(41, 2, 11));
    for error in refusals(2, RING, |path| Gpt2LmHead::new(path, &dropped), run) {
        assert!(error.contains("there is dropout of scores"), "{error}");
    }
}

// Ranks are processes: dropout draws from libtorch's generator, which threads share.
dist_test!(world = 2, dist_dropout_of_parts_of_a_text, |world| {
    let group = joined(&world);
    let dropped = Gpt2Options { attn_pdrop: 0.2, resid_pdrop: 0.2, embd_pdrop: 0.2, ..gpt2(53) };
    for (method, recompute) in [(GATHER, false), (GATHER, true), (ULYSSES, false)] {
        let options = Gpt2Options { recompute, ..dropped.clone() };
        let model =
            built(Some((&group, method)), &|path: &ParamPath<'_>| Gpt2LmHead::new(path, &options));
        let ids = ids(41, 2, 11);
        let run = |seed: i64| {
            tch::manual_seed(seed);
            let loss = mean(model.forward(Labelled::new(&ids, &ids)));
            backward(&loss).unwrap();
            let first = model.parameters().swap_remove(0).tensor;
            let own = values(&gradient(&first).unwrap().unwrap());
            brigade_torch::clear_gradient(&first).unwrap();
            // What is drawn afterwards is equal on all ranks.
            (
                loss.double_value(&[]),
                own,
                Tensor::randn([1], (Kind::Double, Device::Cpu)).double_value(&[0]),
            )
        };
        let (first, again, other) = (run(3), run(3), run(4));
        assert_eq!(first, again);
        assert_ne!(first.0, other.0);
        let all: Vec<(f64, f64)> = group.all_gather_object(&(first.0, first.2)).unwrap();
        assert_eq!(all[0], all[1]);
        let drawn: Vec<Vec<f64>> = group.all_gather_object(&first.1).unwrap();
        assert_ne!(drawn[0], drawn[1]);
    }
});
