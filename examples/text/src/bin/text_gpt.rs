//! Trains a small GPT-2 from random weights on a text file, and generates text with it.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use brigade::models::{
    CausalModel, GenerationOptions, Gpt2LmHead, Gpt2Options, Labelled, StagedModel, TokenLoss,
    Transformer,
};
use brigade::nn::TensorParallelPlan;
use brigade::prelude::*;
use brigade::text::tokens::{
    self, BpeTrainer, HuggingFaceTokenizer, LinesOptions, ParallelOptions, SpecialToken,
    TextSource, TokenCache, TokenIds, TokenList, Tokenizer,
};
use brigade::text::{Blocks, SequenceCollator, SequenceData, Subset};
use brigade_testkit::Reviews;
use clap::Parser;
use text::{Common, Losses, Training, add_loss, counted_once, labels_of, positive, whole};

/// Trains a GPT-2 on the lines of a text file, or on generated reviews, and generates text with it.
#[derive(Debug, Parser)]
#[command(mut_arg("weight_decay", |argument| argument.default_value("0.1")))]
struct Options {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    training: Training,
    /// A text file in UTF-8.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Number of reviews in the generated file, which is read without --data.
    #[arg(long, value_name = "REVIEWS", default_value_t = 2000, value_parser = positive())]
    generate: u64,
    /// Fraction of the lines, at the end of the file, for validation.
    #[arg(long, default_value_t = 0.1, value_name = "SHARE")]
    valid: f64,
    /// Where the vocabulary and the tokens of the file are kept for the next run.
    #[arg(long, value_name = "FOLDER", default_value = "data/gpt")]
    cache: PathBuf,
    /// Size of the vocabulary at most, the 256 bytes included.
    #[arg(long, default_value_t = 1000, value_name = "TOKENS")]
    vocabulary: usize,
    /// Context length, in tokens.
    #[arg(long, default_value_t = 64, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    block_size: u32,
    /// Number of transformer blocks.
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Number of attention heads.
    #[arg(long, default_value_t = 4)]
    heads: u32,
    /// Hidden size.
    #[arg(long, default_value_t = 128)]
    width: u32,
    /// Dropout probability of embeddings, attention and residuals.
    #[arg(long, default_value_t = 0.1)]
    dropout: f64,
    /// The highest learning rate.
    #[arg(long, default_value_t = 2e-3)]
    lr: f64,
    /// Prompt of the text that the model generates at the end.
    #[arg(long, default_value = "The story", value_name = "TEXT")]
    prompt: String,
    /// Number of tokens to generate, at most until the context is full.
    #[arg(long, default_value_t = 40, value_name = "TOKENS")]
    new_tokens: u32,
    /// Sampling temperature: lower values prefer probable tokens.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Samples from this many most probable tokens.
    #[arg(long, default_value_t = 50, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: u32,
}

type Lines = SequenceData<Blocks<Subset<TokenIds>>>;

fn main() -> MainResult {
    let options = Options::parse();
    let (common, training) = (&options.common, &options.training);
    let accelerator = training.accelerator(common)?;
    let (tokenizer, train, valid) = options.data(&accelerator)?;
    let loader = |data: Lines| {
        let loader = DataLoader::new(data).batch_size(training.batch_size as usize);
        loader.seed(common.seed.into()).threads(common.threads)
    };
    let (train, valid) = accelerator.prepare((loader(train).shuffle(true), loader(valid)))?;

    let model = accelerator
        .parallel()
        .model_builder(Gpt2LmHead::tensor_plan())
        .deferred()
        .build(|path| Gpt2LmHead::new(path, &options.model(&tokenizer)))?;
    let optimizer = AdamW::default()
        .lr(options.lr)
        .betas(0.9, 0.95)
        .weight_decay(training.weight_decay)
        .no_decay_on_norms_and_biases(true)
        .build(&model)?;
    let steps = training.steps(train.len());
    let cosine = |steps| Ok(Schedule::cosine(options.lr, options.lr / 10.0, steps)?);
    let scheduler = Scheduler::new(&optimizer, training.warmed_up(steps, cosine)?);
    let (mut model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler))?;
    let losses = Losses::new(&accelerator);
    training.begin(common, &accelerator)?;

    let mut meter = accelerator.data_processes().meter(20);
    for epoch in train.epoch()..training.epochs {
        model.train();
        // The loss of the batches that become one step.
        let mut window = MetricState::new(Mean);
        let bar = accelerator.progress(&train).label(format!("epoch {}", epoch + 1));
        let shown = bar.values();
        for batch in bar {
            let batch = batch?;
            let texts = counted_once(&batch, accelerator.parallel().micro_batches())?;
            accelerator.accumulate(&model, &batch, || {
                let loss = accelerator.forward_backward(&model, &texts, |model, texts| {
                    let labelled = Labelled::new(&texts.input_ids, labels_of(texts)?);
                    let loss = model.forward(labelled)?;
                    Ok((loss.sum, loss.count))
                })?;
                accelerator.clip_grad_norm(&model, training.clip)?;
                optimizer.step()?;
                scheduler.step()?;
                optimizer.zero_grad()?;
                if loss.weight() > 0.0 {
                    window.add(loss.value(), loss.weight())?;
                }
                Ok(())
            })?;
            meter.step_with_tokens(batch.valid(), batch.valid() * options.block_size as usize);
            if accelerator.sync_gradients() {
                let loss = accelerator.compute_metric(&std::mem::take(&mut window))?;
                let step = optimizer.steps()?;
                losses.push(loss);
                shown.set("loss", loss);
                if common.log.is_some() {
                    accelerator.log([("loss", loss), ("lr", scheduler.lr()?)], step)?;
                }
                if common.checkpoint_every.is_some_and(|every| step.is_multiple_of(every)) {
                    accelerator.checkpoints().save_numbered()?;
                }
            }
        }

        model.eval();
        let mut mean = MetricState::new(Mean);
        for batch in &valid {
            let batch = batch?;
            let texts = counted_once(&batch, 1)?;
            let losses =
                accelerator.parallel().forward_stages(&model, &texts, |model, texts| {
                    let labelled = Labelled::new(&texts.input_ids, labels_of(texts)?);
                    let loss = model.forward(labelled)?;
                    Ok((loss.sum, loss.count))
                })?;
            for (sum, count) in losses {
                add_loss(&mut mean, &TokenLoss { sum, count })?;
            }
        }
        let loss = accelerator.compute_metric(&mean)?;
        losses.push_valid(optimizer.steps()?, loss);
        let perplexity = loss.exp();
        accelerator.println(format!(
            "epoch {}/{}, validation loss = {loss:.4}, perplexity = {perplexity:.2}",
            epoch + 1,
            training.epochs
        ));
        if common.log.is_some() {
            let values = [("valid_loss", loss), ("perplexity", perplexity)];
            accelerator.log(values, optimizer.steps()?)?;
            accelerator.log(meter.values(), optimizer.steps()?)?;
        }
        if common.checkpoint.is_some() {
            accelerator.checkpoints().save_numbered()?;
        }
        meter.pause_ended();
    }
    accelerator.checkpoints().wait()?;
    losses.finish(&accelerator, common, training)?;

    model.eval();
    // On every rank: all take part in gathering the weights of a sharded model, and in computing divided layers and stages.
    let end = model.inner().module().options().eos_token_id.clone();
    let text = if accelerator.parallel().micro_batches() > 1 {
        let stages = StagedModel::new(|batch, next| {
            let parallel = accelerator.parallel();
            parallel.forward_stages(&model, batch, |model, micro| next(model.inner(), micro))
        });
        options.write(&stages, end, accelerator.device(), &tokenizer)?
    } else {
        model.gathered(|model| {
            let text = options.write(model, end, accelerator.device(), &tokenizer);
            text.map_err(Error::custom)
        })?
    };
    accelerator.println(text);
    if let Some(folder) = &training.save {
        accelerator.checkpoints().save_model_in_parts(&model, folder, u64::MAX)?;
        if accelerator.is_main_process() {
            Gpt2LmHead::save_config(model.inner(), folder)?;
            tokenizer.save(folder)?;
        }
    }
    Ok(accelerator.trackers().finish()?)
}

impl Options {
    /// The vocabulary, and the file's lines as blocks of tokens: those to train with, and those to validate with. One
    /// process of a host makes what is not there yet.
    fn data(
        &self,
        accelerator: &Accelerator,
    ) -> anyhow::Result<(HuggingFaceTokenizer, Lines, Lines)> {
        let file = match &self.data {
            Some(file) => file.clone(),
            None => {
                let file = PathBuf::from(format!("data/reviews-{}.txt", self.generate));
                let write = || write_reviews(&file, self.generate).map_err(Error::custom);
                accelerator.processes().local_main_process_first(write)?;
                file
            }
        };
        let texts = LinesOptions::new().keep_blank(true).open(&file)?;
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        let vocabulary = self.cache.join(format!("{name}-{}", self.vocabulary));
        let train = || self.train_vocabulary(&vocabulary, &texts).map_err(Error::custom);
        accelerator.processes().local_main_process_first(train)?;
        let tokenizer = HuggingFaceTokenizer::load(&vocabulary)?;
        let splitter = WholeLines(&tokenizer);
        let corpus =
            TokenCache::new(&self.cache).corpus(&splitter, &texts, ParallelOptions::new())?;
        let ids = corpus.ids(&tokenizer.vocabulary()?)?;

        anyhow::ensure!(
            (0.0..1.0).contains(&self.valid),
            "--valid {} is not in [0, 1)",
            self.valid
        );
        let lines = ids.len();
        let cut = lines - (lines as f64 * self.valid).ceil() as usize;
        let blocks = |lines: std::ops::Range<usize>, what: &str| {
            let part = Subset::new(ids.clone(), lines.collect())?;
            let blocks = Blocks::new(part, self.block_size as usize)
                .with_context(|| format!("{}: too little text to {what} with", file.display()))?;
            // Blocks are of one length: nothing is padded.
            anyhow::Ok(SequenceData::new(blocks, SequenceCollator::new(0).causal()))
        };
        let (train, valid) = (blocks(0..cut, "train")?, blocks(cut..lines, "validate")?);
        Ok((tokenizer, train, valid))
    }

    fn train_vocabulary(&self, folder: &Path, texts: &TextSource) -> anyhow::Result<()> {
        whole(folder, |folder| {
            let trainer = BpeTrainer::new(self.vocabulary).special_tokens([END]);
            Ok(trainer.train(texts)?.save(folder)?)
        })
    }

    fn model(&self, tokenizer: &HuggingFaceTokenizer) -> Gpt2Options {
        let end = tokenizer.special_id(SpecialToken::End).map(i64::from);
        Gpt2Options {
            vocab_size: tokenizer.vocab_size() as i64,
            n_positions: self.block_size.into(),
            n_embd: self.width.into(),
            n_layer: self.layers,
            n_head: self.heads.into(),
            resid_pdrop: self.dropout,
            embd_pdrop: self.dropout,
            attn_pdrop: self.dropout,
            bos_token_id: end,
            eos_token_id: end.into_iter().collect(),
            ..Gpt2Options::default()
        }
    }

    /// The prompt and what the model writes after it.
    fn write(
        &self,
        model: &impl CausalModel,
        end: Vec<i64>,
        device: Device,
        tokenizer: &HuggingFaceTokenizer,
    ) -> anyhow::Result<String> {
        let prompt: Vec<i64> = tokenizer.ids(&self.prompt)?.into_iter().map(i64::from).collect();
        let sampled = GenerationOptions {
            do_sample: true,
            temperature: self.temperature,
            top_k: Some(self.top_k.into()),
            max_new_tokens: self.new_tokens.into(),
            max_length: Some(self.block_size.into()),
            eos_token_id: end,
            seed: Some(self.common.seed.into()),
            ..GenerationOptions::default()
        };
        let prompt = Tensor::f_from_slice(&prompt)?.f_unsqueeze(0)?.f_to_device(device)?;
        let written = sampled.generate(model, &prompt, None)?.f_squeeze_dim(0)?;
        let ids: Vec<i64> = Vec::try_from(written.f_to_device(Device::Cpu)?)?;
        let ids = ids.into_iter().map(u32::try_from).collect::<Result<Vec<u32>, _>>()?;
        Ok(tokenizer.decode(&ids, true)?)
    }
}

/// The token between texts, as GPT-2 has it.
const END: &str = "<|endoftext|>";

/// Splits lines with their ends, which the source leaves out.
#[derive(Debug)]
struct WholeLines<'a>(&'a HuggingFaceTokenizer);

impl Tokenizer for WholeLines<'_> {
    fn tokenize(&self, text: &str, tokens: &mut TokenList) -> tokens::Result<()> {
        self.0.tokenize(&format!("{text}\n"), tokens)
    }

    fn describe(&self) -> serde_json::Value {
        serde_json::json!({ "lines": self.0.describe() })
    }
}

/// Writes generated reviews, one a line.
fn write_reviews(file: &Path, count: u64) -> anyhow::Result<()> {
    whole(file, |file| {
        let mut file = BufWriter::new(fs::File::create(file)?);
        let reviews = Reviews::new(count as usize);
        for index in 0..count as usize {
            writeln!(file, "{}", reviews.review(index % 2 == 0, index))?;
        }
        Ok(file.flush()?)
    })
}
