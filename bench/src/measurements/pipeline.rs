//! Our side of pipelines, equivalent to PyTorch's `torch.distributed.pipelining` in `peers/pipeline.py`, and the
//! executor beside accumulation by hand.

use std::time::Instant;

use anyhow::{Result, bail};
use brigade::models::{Gpt2LmHead, Labelled};
use brigade::prelude::*;
use brigade::sharding::pipeline::Schedule;
use brigade::torch::{Backend, ProcessGroup, Store, backward, clear_gradient};
use brigade::train::{Pipeline, PipelineOptions};

use super::sharding::small_gpt2;

const WARM_UP: usize = 3;
const STEPS: usize = 15;
const PAIRS: usize = 12;
const MICRO_BATCHES: usize = 8;
const TOKENS: i64 = 128;

/// Runs `step SCHEDULE` or `executor`.
pub(crate) fn run(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    match words {
        ["step", schedule] => step(schedule.parse()?),
        ["executor"] => executor(),
        other => bail!("there is no measurement of pipelines {other:?}"),
    }
}

/// Returns batches with a text for each micro-batch.
fn batches() -> Vec<Tensor> {
    tch::manual_seed(1);
    let batch = || {
        Tensor::randint(
            small_gpt2().vocab_size,
            [MICRO_BATCHES as i64, TOKENS],
            tch::kind::INT64_CPU,
        )
    };
    (0..4).map(|_| batch()).collect()
}

fn loss_of(model: &Model<Gpt2LmHead>, ids: &Tensor) -> brigade::Result<Tensor> {
    model.forward(Labelled::new(ids, ids))?.mean()
}

/// Measures the seconds of a step of training, whose stages are on two ranks.
fn step(schedule: Schedule) -> Result<Vec<Vec<f64>>> {
    let accelerator = Accelerator::builder()
        .cpu(true)
        .quiet(true)
        .pipeline_parallel(2)
        .pipeline_options(PipelineOptions::new(MICRO_BATCHES).schedule(schedule))
        .build()?;
    accelerator.set_seed(1);
    let options = small_gpt2();
    let model = accelerator.parallel().model(|path| Gpt2LmHead::new(path, &options))?;
    let optimizer = AdamW::default().lr(1e-4).weight_decay(0.01).build(&model)?;
    let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    model.train();
    let batches = batches();
    let mut seconds = Vec::new();
    for number in 0..WARM_UP + STEPS {
        let ids = &batches[number % batches.len()];
        let start = Instant::now();
        accelerator.forward_backward(&model, ids, |model, ids| {
            model.forward(Labelled::new(ids, ids))?.mean()
        })?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        if number >= WARM_UP {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(if accelerator.is_main_process() { vec![seconds] } else { Vec::new() })
}

/// Measures in turns a pipeline of one stage and a loop over the same micro-batches, without an optimizer.
fn executor() -> Result<Vec<Vec<f64>>> {
    let gloo = Backend::Gloo(Default::default());
    let group = ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    let pipeline = Pipeline::new(group, PipelineOptions::new(MICRO_BATCHES))?;
    let options = small_gpt2();
    tch::manual_seed(1);
    let staged = Model::builder()
        .pipeline(pipeline.parallel())
        .build(|path: &ParamPath<'_>| Gpt2LmHead::new(path, &options))?;
    let plain = Model::new(|path: &ParamPath<'_>| Gpt2LmHead::new(path, &options))?;
    let batches = batches();
    let mut seconds = vec![Vec::new(), Vec::new()];
    for number in 0..WARM_UP + PAIRS {
        let ids = &batches[number % batches.len()];
        for turn in 0..2 {
            let side = (number + turn) % 2;
            let model = if side == 0 { &staged } else { &plain };
            let start = Instant::now();
            if side == 0 {
                pipeline.forward_backward(model, ids, |ids| loss_of(model, ids))?;
            } else {
                for ids in ids.f_chunk(MICRO_BATCHES as i64, 0)? {
                    backward(&loss_of(model, &ids)?.f_div_scalar(MICRO_BATCHES as f64)?)?;
                }
            }
            if number >= WARM_UP {
                seconds[side].push(start.elapsed().as_secs_f64());
            }
            for parameter in model.parameters() {
                clear_gradient(&parameter.tensor)?;
            }
        }
    }
    Ok(seconds)
}
