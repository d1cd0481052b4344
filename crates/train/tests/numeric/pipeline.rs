//! Pipelines train as one process does that accumulates the gradients of the same micro-batches.

mod accelerator;
mod checkpoints;
mod faults;
mod generate;
mod images;

use std::sync::{Mutex, PoisonError};
use std::thread;

use brigade_models::{
    BertForMaskedLm, BertOptions, CausalLm, Gpt2LmHead, Gpt2Options, Labelled, LlamaForCausalLm,
    LlamaOptions, TokenLoss,
};
use brigade_nn::{Model, Module, ParamPath, StageCut};
use brigade_optim::AdamW;
use brigade_sharding::pipeline::Schedule;
use brigade_testkit::assert_close;
use brigade_torch::{Backend, GroupOptions, ProcessGroup, Result, Store, backward, gradient};
use brigade_train::{Pipeline, PipelineOptions};
use tch::{Device, Kind, Tensor};

const STEPS: usize = 5;

/// Ranks are threads, which share libtorch's generator.
static DRAWS: Mutex<()> = Mutex::new(());

pub(crate) fn on_ranks<R: Send>(
    ranks: usize,
    options: &GroupOptions,
    body: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    tch::set_num_threads(1);
    let store = Store::hash().unwrap();
    thread::scope(|scope| {
        let started: Vec<_> = (0..ranks)
            .map(|rank| {
                let (store, body, options) = (store.clone(), &body, options.clone());
                scope.spawn(move || {
                    let gloo = Backend::Gloo(Default::default());
                    body(ProcessGroup::new(&store, rank, ranks, gloo, options).unwrap())
                })
            })
            .collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

pub(crate) fn built<M>(
    pipeline: Option<&Pipeline>,
    new: &impl Fn(&ParamPath<'_>) -> M,
) -> Model<M> {
    let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
    tch::manual_seed(7);
    let mut builder = Model::builder().kind(Kind::Double);
    if let Some(pipeline) = pipeline {
        builder = builder.pipeline(pipeline.parallel());
    }
    builder.build(new).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
}

/// What a step leaves: the loss, gradients, and weights after it.
#[derive(Debug, Default, Clone)]
struct Record {
    loss: f64,
    gradients: Vec<(String, Vec<f64>)>,
    weights: Vec<(String, Vec<f64>)>,
}

fn record<M>(model: &Model<M>, loss: f64) -> Record {
    let gradients = model.trainable_parameters().into_iter();
    let gradients = gradients.map(|it| {
        let found = gradient(&it.tensor).unwrap();
        (it.name, found.map(|it| values(&it)).unwrap_or_default())
    });
    Record { loss, gradients: gradients.collect(), weights: Vec::new() }
}

/// Ids of one step.
fn ids(step: usize, rows: usize) -> Tensor {
    let (start, count) = ((step * rows * 6) as i64, (rows * 6) as i64);
    let places = Tensor::arange_start(start, start + count, (Kind::Int64, Device::Cpu));
    (&places * 7 + places.floor_divide_scalar(6) * 3).remainder(19).view([-1, 6])
}

/// The rows of each micro-batch.
fn sizes(rows: usize, micro_batches: usize) -> Vec<i64> {
    let (each, more) = (rows / micro_batches, rows % micro_batches);
    (0..micro_batches).map(|micro| (each + usize::from(micro < more)) as i64).collect()
}

type Loss<M> = fn(&Model<M>, &Tensor) -> Result<Tensor>;

fn alone<M>(
    new: &impl Fn(&ParamPath<'_>) -> M,
    loss: Loss<M>,
    rows: usize,
    micro_batches: usize,
    steps: usize,
) -> Vec<Record> {
    let mut model = built(None, new);
    let mut optimizer = AdamW::default().lr(0.01).eps(1e-3).build(&model).unwrap();
    let step = |step| {
        model.zero_grad().unwrap();
        let mut total = 0.0;
        for micro in ids(step, rows).split_with_sizes(sizes(rows, micro_batches), 0) {
            let own = loss(&model, &micro).unwrap() * micro.size()[0] as f64 / rows as f64;
            backward(&own).unwrap();
            total += own.double_value(&[]);
        }
        let mut found = record(&model, total);
        optimizer.step().unwrap();
        let state = model.state_dict().into_iter();
        found.weights = state.map(|(name, tensor)| (name, values(&tensor))).collect();
        found
    };
    (0..steps).map(step).collect()
}

fn compare(found: &[(String, Vec<f64>)], expected: &[(String, Vec<f64>)]) {
    for (name, found) in found {
        let (_, expected) = expected.iter().find(|(known, _)| known == name).unwrap();
        assert_close(found, expected, 1e-12, 1e-13);
    }
}

/// Trains on so many ranks, and compares each step with that of one process.
fn check<M>(
    ranks: usize,
    options: &PipelineOptions,
    rows: usize,
    new: impl Fn(&ParamPath<'_>) -> M + Sync,
    loss: Loss<M>,
    expected: &[Record],
) {
    on_ranks(ranks, &GroupOptions::default(), |group| {
        let pipeline = Pipeline::new(group, options.clone()).unwrap();
        let mut model = built(Some(&pipeline), &new);
        let mut optimizer = AdamW::default().lr(0.01).eps(1e-3).build(&model).unwrap();
        for (step, expected) in expected.iter().enumerate() {
            model.zero_grad().unwrap();
            let found = pipeline
                .forward_backward(&model, &ids(step, rows), |micro| loss(&model, micro))
                .unwrap();
            assert_close(&[found.value()], &[expected.loss], 1e-12, 1e-13);
            assert_eq!(found.weight(), rows as f64);
            compare(&record(&model, 0.0).gradients, &expected.gradients);
            optimizer.step().unwrap();
            let state = model.state_dict().into_iter();
            let state: Vec<_> = state.map(|(name, tensor)| (name, values(&tensor))).collect();
            compare(&state, &expected.weights);
        }
    });
}

pub(crate) fn gpt2(blocks: usize) -> Gpt2Options {
    Gpt2Options {
        vocab_size: 19,
        n_positions: 6,
        n_embd: 8,
        n_layer: blocks,
        n_head: 2,
        n_inner: Some(12),
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        ..Default::default()
    }
}

pub(crate) fn causal<B>(model: &Model<CausalLm<B>>, ids: &Tensor) -> Result<Tensor>
where
    CausalLm<B>: for<'a> Module<Labelled<'a>, Output = TokenLoss>,
{
    model.forward(Labelled::new(ids, ids))?.mean()
}

/// All numbers of micro-batches that the schedule has.
fn check_schedule(schedule: Schedule, ranks: usize, blocks: usize, micro_batches: &[usize]) {
    let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(blocks));
    let mut tried = 0;
    for &count in micro_batches {
        let options = PipelineOptions::new(count).schedule(schedule);
        // Micro-batches of two sizes.
        let rows = count + count / 2;
        let numbers = brigade_sharding::pipeline::PipelineTable::new(
            schedule,
            ranks,
            count,
            schedule.least_chunks(),
        );
        if numbers.is_ok() {
            // Another number of micro-batches is another table of actions; later steps repeat the second.
            let steps = if tried == 0 { STEPS } else { 2 };
            let expected = alone(&new, causal, rows, count, steps);
            check(ranks, &options, rows, new, causal, &expected);
            tried += 1;
        }
    }
    assert!(tried > 0, "{schedule} {ranks}");
}

#[test]
fn every_schedule_on_two_ranks() {
    for schedule in Schedule::ALL {
        check_schedule(schedule, 2, 5, &[1, 2, 3, 4, 5, 6, 7, 8]);
    }
}

#[test]
fn every_schedule_on_three_ranks() {
    for schedule in Schedule::ALL {
        check_schedule(schedule, 3, 6, &[3, 4, 6, 7, 8]);
    }
}

#[test]
fn every_schedule_on_four_ranks() {
    for schedule in Schedule::ALL {
        check_schedule(schedule, 4, 9, &[1, 4, 5, 8]);
    }
}

#[test]
fn one_rank_and_eight() {
    check_schedule(Schedule::OneForwardOneBackward, 1, 2, &[1, 3]);
    check_schedule(Schedule::ZeroBubbleV, 1, 2, &[3]);
    check_schedule(Schedule::OneForwardOneBackward, 8, 8, &[8]);
}

#[test]
fn llama_and_bert_and_recomputed_blocks() {
    let llama = LlamaOptions {
        vocab_size: 19,
        hidden_size: 8,
        intermediate_size: 12,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        ..Default::default()
    };
    let bert = BertOptions {
        vocab_size: 19,
        hidden_size: 8,
        intermediate_size: 12,
        num_hidden_layers: 4,
        num_attention_heads: 2,
        max_position_embeddings: 6,
        hidden_dropout_prob: 0.0,
        attention_probs_dropout_prob: 0.0,
        ..Default::default()
    };
    let masked: Loss<BertForMaskedLm> = |model, ids| model.forward(Labelled::new(ids, ids))?.mean();
    for schedule in [Schedule::OneForwardOneBackward, Schedule::ZeroBubbleV] {
        let options = PipelineOptions::new(4).schedule(schedule);
        let new = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &llama);
        check(2, &options, 6, new, causal, &alone(&new, causal, 6, 4, STEPS));
        let new = |path: &ParamPath<'_>| BertForMaskedLm::new(path, &bert);
        check(2, &options, 6, new, masked, &alone(&new, masked, 6, 4, STEPS));
        let recompute = Gpt2Options { recompute: true, ..gpt2(4) };
        let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &recompute);
        check(2, &options, 6, new, causal, &alone(&new, causal, 6, 4, STEPS));
    }
}

#[test]
fn cuts_by_cost_and_by_name_and_three_chunks() {
    let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(7));
    let expected = alone(&new, causal, 5, 4, STEPS);
    let base = PipelineOptions::new(4);
    let names = ["transformer.h.1", "transformer.h.5"].map(str::to_owned).to_vec();
    for cut in [StageCut::Costs(vec![5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.0]), StageCut::At(names)] {
        check(3, &base.clone().cut(cut), 5, new, causal, &expected);
    }
    for schedule in [Schedule::Interleaved, Schedule::LoopedBfs] {
        let options = base.clone().schedule(schedule).chunks(3);
        check(2, &options, 5, new, causal, &expected);
    }
}

#[test]
fn sums_with_weights_and_earlier_gradients() {
    let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(4));
    // The first micro-batch has no labels at all, and rows have unequal numbers of them.
    let labels = |ids: &Tensor| {
        let first = ids.narrow(1, 0, 1);
        ids.where_self(&ids.ge_tensor(&first), &Tensor::from(brigade_models::IGNORED_LABEL))
    };
    let batch = |step| {
        let labels = labels(&ids(step, 7));
        let _ = labels.narrow(0, 0, 2).fill_(brigade_models::IGNORED_LABEL);
        (ids(step, 7), labels)
    };
    let loss = |model: &Model<Gpt2LmHead>, (ids, labels): &(Tensor, Tensor)| {
        model.forward(Labelled::new(ids, labels))
    };
    let whole = built(None, &new);
    let mut expected_losses = Vec::new();
    for step in 0..2 {
        let found = loss(&whole, &batch(step)).unwrap().mean().unwrap();
        backward(&found).unwrap();
        expected_losses.push(found.double_value(&[]));
    }
    let expected = record(&whole, 0.0).gradients;
    for schedule in Schedule::ALL {
        on_ranks(2, &GroupOptions::default(), |group| {
            let options = PipelineOptions::new(4).schedule(schedule);
            let pipeline = Pipeline::new(group, options).unwrap();
            let model = built(Some(&pipeline), &new);
            for (step, expected) in expected_losses.iter().enumerate() {
                let found = pipeline.forward_backward(&model, &batch(step), |micro| {
                    let found = loss(&model, micro)?;
                    let count = found.count.shallow_clone();
                    Ok((found.sum, count))
                });
                assert_close(&[found.unwrap().value()], &[*expected], 1e-12, 1e-13);
            }
            // Gradients of the second step are added to those of the first.
            compare(&record(&model, 0.0).gradients, &expected);
        });
    }
}

#[test]
fn evaluation_is_known_on_all_ranks() {
    let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(6));
    let whole = built(None, &new);
    let rows = [5, 2, 1, 8];
    let expected: Vec<Vec<f64>> = (rows.iter().enumerate())
        .map(|(step, &rows)| tch::no_grad(|| values(&whole.forward(&ids(step, rows)).unwrap())))
        .collect();
    for schedule in Schedule::ALL {
        on_ranks(3, &GroupOptions::default(), |group| {
            let options = PipelineOptions::new(6).schedule(schedule);
            let pipeline = Pipeline::new(group, options).unwrap();
            let model = built(Some(&pipeline), &new);
            for (step, &rows) in rows.iter().enumerate() {
                let batch = ids(step, rows);
                let logits = pipeline.forward(&model, &batch, |micro| model.forward(micro));
                let logits = Tensor::cat(&logits.unwrap(), 0);
                assert!(!logits.requires_grad());
                assert_close(&values(&logits), &expected[step], 1e-12, 1e-13);
            }
            // Between steps of training, also after shapes that were seen before.
            let batch = ids(0, 6);
            pipeline.forward_backward(&model, &batch, |micro| causal(&model, micro)).unwrap();
            let losses = pipeline.forward(&model, &batch, |micro| causal(&model, micro)).unwrap();
            assert_eq!(losses.len(), 6);
        });
    }
}
