//! Our side of tensor and context parallelism, equivalent to PyTorch's DTensor in `peers/tensor_parallel.py`, and to
//! one process in `peers/attention.py`.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use brigade::models::{Llama, LlamaOptions};
use brigade::nn::{ContextParallel, ContextRegion};
use brigade::prelude::*;
use brigade::sharding::ContextMethod;
use brigade::torch::regions::{copy_to_region, gather_from_region};
use brigade::torch::{
    AttentionOptions, CrossEntropyOptions, VocabularyPart, backward, clear_gradient, cross_entropy,
    linear_vocabulary_parallel_cross_entropy,
};

use super::training::status;

const WARM_UP: usize = 2;
const STEPS: usize = 5;
const TOKENS: i64 = 1024;
const WIDTH: i64 = 512;
const VOCABULARY: i64 = 32_000;
const INNER: i64 = 1376;
const SEQUENCE: i64 = 4096;

/// Runs `layer`, `loss divided`, `loss gathered`, or `attention` with a method of context parallelism.
pub(crate) fn run(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    match words {
        ["layer"] => layer(),
        ["loss", "divided"] => loss(false),
        ["loss", "gathered"] => loss(true),
        ["attention", method] => context(method.parse().map_err(anyhow::Error::msg)?),
        other => bail!("there is no measurement of tensor parallelism {other:?}"),
    }
}

/// Measures the seconds of the forward and backward of a Llama with one layer, whose projections are divided among the
/// ranks.
fn layer() -> Result<Vec<Vec<f64>>> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).tensor_parallel(2).build()?;
    tch::manual_seed(1);
    let options = LlamaOptions {
        vocab_size: 64,
        hidden_size: WIDTH,
        intermediate_size: INNER,
        num_hidden_layers: 1,
        num_attention_heads: 8,
        ..LlamaOptions::default()
    };
    let model = accelerator.parallel().model(|path| Llama::new(path, &options))?;
    let model = accelerator.prepare(model)?;
    let ids = Tensor::randint(64, [4, 256], tch::kind::INT64_CPU);
    accelerator.processes().wait_for_everyone()?;
    let mut seconds = Vec::new();
    for number in 0..WARM_UP + STEPS {
        let start = Instant::now();
        let output = model.forward(&ids)?;
        accelerator.backward(&output.f_mean(Kind::Float)?)?;
        for parameter in model.local_parameters() {
            clear_gradient(&parameter.tensor)?;
        }
        if number >= WARM_UP {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(if accelerator.is_main_process() { vec![seconds] } else { Vec::new() })
}

/// Measures the seconds of the forward and backward of causal attention to 4,096 tokens, of which each rank has a part.
fn context(method: ContextMethod) -> Result<Vec<Vec<f64>>> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let group = accelerator.processes().group().context("the ranks are several")?;
    let region = ContextRegion::new(&ContextParallel { group: Some(group.clone()), method });
    let part = region.part(SEQUENCE, true);
    tch::manual_seed(1);
    let whole = || Tensor::randn([1, 8, SEQUENCE, 64], tch::kind::FLOAT_CPU);
    let own = |whole: &Tensor| Ok::<_, Error>(part.take(whole, 2)?.set_requires_grad(true));
    let inputs = [own(&whole())?, own(&whole())?, own(&whole())?];
    let target = part.take(&whole(), 2)?;
    let options = AttentionOptions { causal: true, ..AttentionOptions::default() };
    group.barrier()?;
    let mut seconds = Vec::new();
    for number in 0..WARM_UP + STEPS {
        let start = Instant::now();
        let [queries, keys, values] = &inputs;
        let attended = part.attention(queries, keys, values, None, &options)?;
        backward(&attended.f_mul(&target)?.f_sum(Kind::Float)?)?;
        inputs.iter().try_for_each(clear_gradient)?;
        if number >= WARM_UP {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(if accelerator.is_main_process() { vec![seconds] } else { Vec::new() })
}

/// Measures the seconds of the head's forward and backward with the loss, and the peak memory above the initial one in
/// bytes.
fn loss(gathers: bool) -> Result<Vec<Vec<f64>>> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let group = accelerator.processes().group().context("the loss is one of several ranks")?;
    let part = VocabularyPart::even(VOCABULARY, group.rank(), group.size())?;
    tch::manual_seed(1);
    let hidden = Tensor::randn([TOKENS, WIDTH], tch::kind::FLOAT_CPU).set_requires_grad(true);
    let targets = Tensor::randint(VOCABULARY, [TOKENS], tch::kind::INT64_CPU);
    let weight = Tensor::randn([part.size, WIDTH], tch::kind::FLOAT_CPU) * 0.02;
    let weight = weight.set_requires_grad(true);
    let options = CrossEntropyOptions::default();
    group.barrier()?;
    let before = status("VmRSS")?;
    fs::write("/proc/self/clear_refs", "5").context("cannot reset the highest memory")?;
    let mut seconds = Vec::new();
    for number in 0..WARM_UP + STEPS {
        let start = Instant::now();
        let copied = copy_to_region(&group, &hidden)?;
        let found = if gathers {
            let logits = copied.f_linear(&weight, None::<&Tensor>)?;
            cross_entropy(&gather_from_region(&group, &logits, -1)?, &targets, &options)?
        } else {
            linear_vocabulary_parallel_cross_entropy(
                &group, &copied, &weight, None, &targets, part, &options,
            )?
        };
        backward(&found.loss)?;
        clear_gradient(&hidden)?;
        clear_gradient(&weight)?;
        if number >= WARM_UP {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    let peak = status("VmHWM")? - before;
    let lists = vec![seconds, vec![peak]];
    Ok(if accelerator.is_main_process() { lists } else { Vec::new() })
}
