//! Generates text with a folder of Hugging Face's: GPT-2, Llama or Mixtral.

use std::fs;
use std::io::{Write, stdout};
use std::mem;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use brigade::models::{
    CausalModel, GenerationOptions, Gpt2LmHead, Labelled, LlamaForCausalLm, MixtralForCausalLm,
    TokenLoss, Transformer, TransformerOptions,
};
use brigade::nn::{Module, Weights};
use brigade::prelude::*;
use brigade::sharding::device_map::{DeviceMap, Reserve};
use brigade::text::tokens::{HuggingFaceTokenizer, SpecialToken};
use clap::{Parser, ValueEnum};
use serde_json::Value;

/// Generates text that goes on from prompts, with a model from a folder: config.json, weights and tokenizer.json.
#[derive(Debug, Parser)]
struct Options {
    /// Folder of the model, such as one that text_gpt --save writes.
    folder: PathBuf,
    /// Text to go on from; several are computed as one batch.
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["prompts", "perplexity"])]
    prompt: Vec<String>,
    /// File with a prompt on each line.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Prints the mean loss of the tokens of a text file, and its perplexity, instead of text.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompts"])]
    perplexity: Option<PathBuf>,
    /// Number of tokens that are computed together for --perplexity. Unless given, as many as the model has positions, or
    /// 1024.
    #[arg(long, value_name = "TOKENS", requires = "perplexity", value_parser = clap::value_parser!(u32).range(2..))]
    context: Option<u32>,
    /// Number of tokens to write at most.
    #[arg(long, default_value_t = 100, value_name = "TOKENS")]
    max_new_tokens: u32,
    /// Length of a text at most, in tokens of the longest prompt and what is written.
    #[arg(long, value_name = "TOKENS")]
    max_length: Option<u32>,
    /// Number of tokens to write at least.
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    min_new_tokens: u32,
    /// Type of the weights. Unless given, bf16 on a GPU and fp32 on a CPU; with --max-memory that of the files.
    #[arg(long)]
    dtype: Option<Dtype>,
    /// Format of the weights of linear layers: int8, int4, int4:GROUP or fp8.
    #[arg(long, value_name = "FORMAT")]
    weights: Option<Weights>,
    /// Bytes of weights on each device, such as cuda:0=20G,cpu=60G. What does not fit stays in the files and is read for each
    /// token. A limit that is left empty is what is free.
    #[arg(long, value_name = "DEVICE=BYTES,…", value_parser = limits)]
    max_memory: Option<Limits>,
    /// Rule by which layers are given to devices.
    #[arg(long, value_enum, default_value_t = Rule::Auto, requires = "max_memory")]
    rule: Rule,
    /// Keeps the key-value caches of layers whose weights come to a GPU in the host's memory, too.
    #[arg(long, requires = "max_memory")]
    offload_cache: bool,
    /// Records the step of one token as a graph on a GPU, and replays it for each token.
    #[arg(long)]
    capture: bool,
    /// Computes on the CPU where there is a GPU, too.
    #[arg(long)]
    cpu: bool,
    /// Number of beams of a beam search.
    #[arg(long, default_value_t = 1, value_name = "BEAMS", value_parser = clap::value_parser!(u32).range(1..))]
    beams: u32,
    /// Number of texts to print for each prompt: the best of the beams, or as many samples.
    #[arg(long, default_value_t = 1, value_name = "TEXTS", value_parser = clap::value_parser!(u32).range(1..))]
    texts: u32,
    /// Power of the length by which scores of beams are divided: above 0 long texts are preferred.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true, value_name = "POWER")]
    length_penalty: f64,
    /// Draws tokens by their probabilities.
    #[arg(long)]
    sample: bool,
    /// Sampling temperature: lower values prefer probable tokens.
    #[arg(long, default_value_t = 1.0, requires = "sample")]
    temperature: f64,
    /// Samples from this many most probable tokens.
    #[arg(long, value_name = "TOKENS", requires = "sample")]
    top_k: Option<u32>,
    /// Samples from the fewest tokens that have this probability together.
    #[arg(long, default_value_t = 1.0, value_name = "SHARE", requires = "sample")]
    top_p: f64,
    /// Seed of the samples; by default the same in each run.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Divides the scores of tokens that the text has.
    #[arg(long, default_value_t = 1.0, value_name = "DIVISOR")]
    repetition_penalty: f64,
    /// Ends a text behind this string; can be given several times.
    #[arg(long, value_name = "STRING")]
    stop: Vec<String>,
    /// Number of tokens of the prompts that are computed at once.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    prefill_chunk: Option<u32>,
}

/// Devices and their limits, as they were written.
type Limits = Vec<(String, String)>;

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Rule {
    Auto,
    BalancedLow0,
    Sequential,
    Fill,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Dtype {
    Fp32,
    Bf16,
    Fp16,
}

fn main() -> MainResult {
    let options = Options::parse();
    let folder = &options.folder;
    let config = json(&folder.join("config.json"))?;
    match config["model_type"].as_str() {
        Some("gpt2") => options.run::<Gpt2LmHead>(&config)?,
        Some("llama") => options.run::<LlamaForCausalLm>(&config)?,
        Some("mixtral") => options.run::<MixtralForCausalLm>(&config)?,
        other => Err(anyhow::anyhow!(
            "{}: model_type {} is not a language model that this program has: take gpt2, llama or mixtral",
            folder.display(),
            other.unwrap_or("missing")
        ))?,
    }
    Ok(())
}

impl Options {
    fn run<M>(&self, config: &Value) -> anyhow::Result<()>
    where
        M: Transformer + CausalModel + for<'t> Module<Labelled<'t>, Output = TokenLoss>,
    {
        let tokenizer = HuggingFaceTokenizer::load(&self.folder)?;
        if let Some(file) = &self.perplexity {
            return self.print_perplexity(&self.model::<M>(&[])?, &tokenizer, file);
        }
        let options = self.generation(config, &tokenizer)?;
        let prompts = self.texts_to_go_on_from(&tokenizer)?;
        let model = self.model::<M>(&prompts)?;
        let device = model.device();
        let (ids, mask) = options.padded(&prompts, device)?;
        let decode = |ids: &[i64]| -> Result<String> {
            let ids = ids.iter().map(|&id| u32::try_from(id)).collect::<Result<Vec<_>, _>>();
            tokenizer.decode(&ids.map_err(Error::custom)?, true).map_err(Error::custom)
        };
        let known: usize = prompts.iter().map(Vec::len).sum::<usize>() * self.texts as usize;
        let begin = Instant::now();
        let mut out = stdout().lock();
        let written = if self.beams > 1 {
            let search = options.beam_search(&model, &ids, Some(&mask))?.decoded_by(decode);
            let beams = search.run()?;
            let rows = Vec::<Vec<i64>>::try_from(beams.ids.f_to_device(Device::Cpu)?)?;
            let scores = Vec::<f32>::try_from(beams.scores.f_to_device(Device::Cpu)?)?;
            let mut written = 0;
            for (place, (row, score)) in rows.iter().zip(scores).enumerate() {
                let prompt = &prompts[place / self.texts as usize];
                let mut new = &row[ids.size()[1] as usize..];
                while let [rest @ .., last] = new
                    && *last == options.pad_token_id.unwrap_or(-1)
                {
                    new = rest;
                }
                written += new.len();
                writeln!(out, "[{score:.4}] {}", decode(&[prompt, new].concat())?)?;
            }
            written
        } else {
            let stream = options.stream(&model, &ids, Some(&mask))?.decoded_by(decode);
            let mut text = stream.text();
            // What is not yet printed of each text: they are printed one after the other, the first unfinished one as
            // it comes.
            let mut waiting = Vec::new();
            for prompt in &prompts {
                waiting.extend(vec![decode(prompt)?; self.texts as usize]);
            }
            let mut current = 0;
            loop {
                write!(out, "{}", mem::take(&mut waiting[current]))?;
                let has_next = current + 1 < waiting.len();
                if has_next && text.tokens().ended()[current] {
                    writeln!(out)?;
                    current += 1;
                    continue;
                }
                out.flush()?;
                let Some(pieces) = text.next() else { break };
                for (waiting, piece) in waiting.iter_mut().zip(pieces?) {
                    waiting.push_str(&piece);
                }
            }
            writeln!(out)?;
            for text in waiting.split_off(current + 1) {
                writeln!(out, "{text}")?;
            }
            if let (true, Err(reason)) = (self.capture, text.tokens().records()) {
                eprintln!("steps are not recorded: {reason}");
            }
            text.tokens().texts().iter().map(Vec::len).sum::<usize>() - known
        };
        let seconds = begin.elapsed().as_secs_f64();
        let rate = written as f64 / seconds.max(f64::MIN_POSITIVE);
        writeln!(out, "{written} tokens in {seconds:.2} s: {rate:.1} tokens/s")?;
        if let Some(map) = model.device_map() {
            write!(out, "{map}")?;
        }
        Ok(())
    }

    /// Prints the mean loss of a file's tokens, each predicted from those before it in its window.
    fn print_perplexity<M>(
        &self,
        model: &Model<M>,
        tokenizer: &HuggingFaceTokenizer,
        file: &Path,
    ) -> anyhow::Result<()>
    where
        M: CausalModel + for<'t> Module<Labelled<'t>, Output = TokenLoss>,
    {
        /// Number of windows that are computed at once.
        const BATCH: usize = 8;
        let text =
            fs::read_to_string(file).with_context(|| format!("--perplexity {}", file.display()))?;
        let ids: Vec<i64> = tokenizer.ids(&text)?.into_iter().map(i64::from).collect();
        let context = self.context.map(i64::from).or_else(|| model.max_tokens()).unwrap_or(1024);
        let context = usize::try_from(context)?;
        let (whole, rest) = ids.split_at(ids.len() / context * context);
        let batches = whole.chunks(BATCH * context).map(|batch| (batch, context));
        let last = (rest.len() > 1).then_some((rest, rest.len()));
        let (mut sum, mut count) = (0.0, 0);
        for (batch, length) in batches.chain(last) {
            let ids = Tensor::f_from_slice(batch)?.f_view([-1, length as i64])?;
            let ids = ids.f_to_device(model.device())?;
            let loss = no_grad(|| model.forward(Labelled::new(&ids, &ids)))?;
            sum += loss.sum.f_double_value(&[])?;
            count += loss.count.f_int64_value(&[])?;
        }
        if count == 0 {
            bail!("--perplexity {}: two tokens at least are needed", file.display());
        }
        let loss = sum / count as f64;
        let perplexity = loss.exp();
        writeln!(stdout(), "{count} tokens: loss = {loss:.4}, perplexity = {perplexity:.3}")?;
        Ok(())
    }

    /// The cache and the logits of continuations of these prompts.
    fn reserve<M: Transformer>(&self, prompts: &[Vec<i64>], kind: Kind) -> Result<Reserve> {
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) as u64;
        let tokens = longest + u64::from(self.max_new_tokens);
        let tokens = self.max_length.map_or(tokens, |most| tokens.min(most.into()));
        let texts = prompts.len() as u64 * u64::from(self.texts.max(self.beams));
        let inference = M::Options::from_folder(&self.folder)?.inference(texts, tokens, kind);
        Ok(inference.map(|it| it.reserve()).unwrap_or_default())
    }

    fn model<M: Transformer>(&self, prompts: &[Vec<i64>]) -> Result<Model<M>> {
        let given = self.dtype.map(|dtype| match dtype {
            Dtype::Fp32 => Kind::Float,
            Dtype::Bf16 => Kind::BFloat16,
            Dtype::Fp16 => Kind::Half,
        });
        let weights = self.weights.clone().unwrap_or_default();
        let model = if let Some(limits) = &self.max_memory {
            let map = match self.rule {
                Rule::Auto => DeviceMap::auto(),
                Rule::BalancedLow0 => DeviceMap::balanced_low_0(),
                Rule::Sequential => DeviceMap::sequential(),
                Rule::Fill => DeviceMap::fill(),
            };
            // In the type of the files a cache takes at most as much.
            let reserve = self.reserve::<M>(prompts, given.unwrap_or(Kind::Float))?;
            let map = map.max_memory(limits.clone()).reserve(reserve);
            let map = map.offload_caches(self.offload_cache);
            let weights = match (given, &self.weights) {
                (Some(kind), None) => Weights::float(kind),
                _ => weights,
            };
            M::from_pretrained_on(&self.folder, &map, &weights)?
        } else {
            let device = if self.cpu { Device::Cpu } else { Device::cuda_if_available() };
            // The kernels of quantised weights take bfloat16.
            let default = if device == Device::Cpu && self.weights.is_none() {
                Kind::Float
            } else {
                Kind::BFloat16
            };
            let builder = Model::builder().device(device).kind(given.unwrap_or(default));
            let (mut model, _) = M::from_pretrained_quantized(&self.folder, builder, &weights)?;
            model.eval();
            model
        };
        if model.is_quantized() {
            eprintln!("{}", model.quantize_report());
        }
        Ok(model)
    }

    fn generation(
        &self,
        config: &Value,
        tokenizer: &HuggingFaceTokenizer,
    ) -> anyhow::Result<GenerationOptions> {
        // Settings of generation stand in their own file where a model has one.
        let file = self.folder.join("generation_config.json");
        let own = if file.exists() { json(&file)? } else { Value::Null };
        let eos = own
            .get("eos_token_id")
            .filter(|id| !id.is_null())
            .unwrap_or_else(|| &config["eos_token_id"]);
        let eos_token_id: Vec<i64> = match eos {
            Value::Array(ids) => ids.iter().filter_map(Value::as_i64).collect(),
            id => id.as_i64().into_iter().collect(),
        };
        let pad = tokenizer.special_id(SpecialToken::Padding).map(i64::from);
        Ok(GenerationOptions {
            max_new_tokens: self.max_new_tokens.into(),
            max_length: self.max_length.map(i64::from),
            min_new_tokens: self.min_new_tokens.into(),
            do_sample: self.sample,
            temperature: self.temperature,
            top_k: self.top_k.map(i64::from),
            top_p: self.top_p,
            seed: Some(self.seed),
            repetition_penalty: self.repetition_penalty,
            pad_token_id: pad.or_else(|| eos_token_id.first().copied()),
            eos_token_id,
            stop_strings: self.stop.clone(),
            num_beams: self.beams.into(),
            num_return_sequences: self.texts.into(),
            length_penalty: self.length_penalty,
            prefill_chunk: self.prefill_chunk.map(i64::from),
            capture: self.capture,
            ..GenerationOptions::default()
        })
    }

    /// The tokens of all prompts.
    fn texts_to_go_on_from(
        &self,
        tokenizer: &HuggingFaceTokenizer,
    ) -> anyhow::Result<Vec<Vec<i64>>> {
        let mut prompts = self.prompt.clone();
        if let Some(file) = &self.prompts {
            let lines = fs::read_to_string(file)
                .with_context(|| format!("--prompts {}", file.display()))?;
            prompts.extend(lines.lines().filter(|line| !line.is_empty()).map(str::to_owned));
            if prompts.is_empty() {
                bail!("--prompts {} has no line with a prompt", file.display());
            }
        }
        let ids = |prompt: &String| {
            let ids: Vec<i64> = tokenizer.ids(prompt)?.into_iter().map(i64::from).collect();
            if ids.is_empty() {
                bail!("prompt {prompt:?} has no tokens to continue from: give a text");
            }
            Ok(ids)
        };
        prompts.iter().map(ids).collect()
    }
}

/// Reads `cuda:0=20G,cpu=60G,disk=`.
fn limits(text: &str) -> Result<Limits, String> {
    let pairs = text.split(',').map(|pair| match pair.split_once('=') {
        Some((device, bytes)) => Ok((device.to_owned(), bytes.to_owned())),
        None => Err(format!("{pair:?} is not DEVICE=BYTES, such as cpu=2G")),
    });
    pairs.collect()
}

fn json(file: &Path) -> anyhow::Result<Value> {
    let text = fs::read(file).with_context(|| file.display().to_string())?;
    serde_json::from_slice(&text).with_context(|| file.display().to_string())
}
