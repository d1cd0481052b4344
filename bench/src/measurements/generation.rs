//! Our side of text generation, equivalent to that of `peers/generation.py`.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};
use brigade::models::{
    GenerationOptions, Gpt2LmHead, Gpt2Options, LlamaForCausalLm, LlamaOptions, Transformer,
};
use brigade::nn::{Model, Weights};
use brigade::tch::{self, Device, Kind, Tensor};

use super::gpu_training::small;
use super::training::status;

/// Number of prompt tokens.
const PROMPT: i64 = 16;
const PASSES: usize = 3;

/// Returns a model of 1.1 billion parameters with the sizes of TinyLlama, or a small one.
fn llama() -> LlamaOptions {
    let whole = LlamaOptions {
        vocab_size: 32_000,
        hidden_size: 2048,
        intermediate_size: 5632,
        num_hidden_layers: 22,
        num_attention_heads: 32,
        num_key_value_heads: Some(4),
        ..Default::default()
    };
    if !small() {
        return whole;
    }
    LlamaOptions {
        vocab_size: 500,
        hidden_size: 128,
        intermediate_size: 256,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        ..whole
    }
}

fn gpt2() -> Gpt2Options {
    let whole = Gpt2Options::default();
    if small() {
        Gpt2Options { n_embd: 64, n_layer: 2, n_head: 2, vocab_size: 500, ..whole }
    } else {
        whole
    }
}

/// Runs `write-llama FOLDER FORMAT`, `write-gpt2 FOLDER`, `llama FOLDER BATCH TOKENS` or `gpt2 FOLDER BATCH TOKENS`.
pub(super) fn run(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    tch::set_num_threads(2);
    match words {
        ["write-llama", folder, format] => write_llama(Path::new(folder), format),
        ["write-gpt2", folder] => {
            let model = Model::new(|path| Gpt2LmHead::new(path, &gpt2()))?;
            Gpt2LmHead::save_pretrained(&model, folder)?;
            Ok(vec![vec![model.num_parameters() as f64]])
        }
        ["llama", folder, batch, tokens] => {
            let builder = Model::builder().kind(Kind::BFloat16);
            let load = || LlamaForCausalLm::from_pretrained_as(folder, builder);
            generate(load, batch.parse()?, tokens.parse()?)
        }
        ["gpt2", folder, batch, tokens] => {
            let load = || Gpt2LmHead::from_pretrained(folder);
            generate(load, batch.parse()?, tokens.parse()?)
        }
        _ => bail!("no measurement of generation {words:?}"),
    }
}

/// Writes the model in bfloat16, or quantised from the same values. Returns its number of parameters.
fn write_llama(folder: &Path, format: &str) -> Result<Vec<Vec<f64>>> {
    tch::manual_seed(1);
    let builder = Model::builder().kind(Kind::BFloat16);
    let mut model = builder.build(|path| LlamaForCausalLm::new(path, &llama()))?;
    let parameters = model.num_parameters();
    if format == "bf16" {
        LlamaForCausalLm::save_pretrained(&model, folder)?;
    } else {
        model.quantize(&format.parse::<Weights>()?)?;
        LlamaForCausalLm::save_quantized(&model, folder)?;
    }
    Ok(vec![vec![parameters as f64]])
}

/// Returns the seconds of a token in each pass, and the highest memory of the model with its generation.
fn generate<M>(
    load: impl FnOnce() -> brigade::Result<Model<M>>,
    batch: i64,
    tokens: i64,
) -> Result<Vec<Vec<f64>>>
where
    Model<M>: brigade::models::CausalModel,
{
    fs::write("/proc/self/clear_refs", "5")?;
    let before = status("VmRSS")?;
    let mut model = load()?;
    model.eval();
    let ids = Tensor::arange(batch * PROMPT, (Kind::Int64, Device::Cpu)).remainder(500);
    let ids = ids.view([batch, PROMPT]);
    let greedy = GenerationOptions { max_new_tokens: tokens, ..Default::default() };
    let mut seconds = Vec::new();
    for pass in 0..1 + PASSES {
        let start = Instant::now();
        let _ = greedy.generate(&model, &ids, None)?;
        if pass >= 1 {
            seconds.push(start.elapsed().as_secs_f64() / tokens as f64);
        }
    }
    Ok(vec![seconds, vec![status("VmHWM")? - before]])
}
