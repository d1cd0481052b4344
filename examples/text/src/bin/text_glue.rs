//! Trains BERT to detect paraphrases, as Accelerate's first example does.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use brigade::metrics::Average;
use brigade::models::{
    BertForSequenceClassification, BertOptions, Hub, Tokens, Transformer, TransformerOptions,
};
use brigade::nn::TensorParallelPlan;
use brigade::prelude::*;
use brigade::text::tokens::{BpeTrainer, HuggingFaceTokenizer, SpecialToken, Truncation};
use brigade::text::{SequenceBatch, SequenceCollator, SequenceData};
use clap::Parser;
use text::{
    Common, Losses, Pairs, Training, add_loss, counted_once, labels_of, positive, whole,
    write_pairs,
};

/// Trains a BERT on pairs of sentences with a class each: the Microsoft Research Paraphrase Corpus (MRPC) of GLUE,
/// tables of one's own, or generated pairs.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    training: Training,
    /// A folder with MRPC's `train.tsv` and `dev.tsv`, or with `train` and `validation` as CSV or Parquet files whose
    /// columns are sentence1, sentence2 and label.
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Number of pairs in the generated set, which is read without --data; a quarter as many validate.
    #[arg(long, value_name = "PAIRS", default_value_t = 2000, value_parser = positive())]
    generate: u64,
    /// Folder of a pretrained BERT: Hugging Face's config.json, weights and tokenizer.json.
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// Pretrained BERT of the Hugging Face hub, such as google-bert/bert-base-cased.
    #[arg(long, value_name = "REPOSITORY", conflicts_with = "model")]
    hub: Option<String>,
    /// Maximum length of a pair, in tokens; longer ones are truncated.
    #[arg(long, default_value_t = 128, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(4..))]
    max_length: u32,
    /// Highest learning rate; by default 2e-5 for a pretrained model, 1e-3 for a new one.
    #[arg(long)]
    lr: Option<f64>,
    /// Dropout probability; by default that of the pretrained model's config, or 0.1.
    #[arg(long)]
    dropout: Option<f64>,
    /// Of a new model: folder in which its vocabulary is cached.
    #[arg(long, value_name = "FOLDER", default_value = "data/glue")]
    cache: PathBuf,
    /// Of a new model: size of the vocabulary at most, the 256 bytes included.
    #[arg(long, default_value_t = 600, value_name = "TOKENS")]
    vocabulary: usize,
    /// Of a new model: number of layers.
    #[arg(long, default_value_t = 2)]
    layers: usize,
    /// Of a new model: number of attention heads.
    #[arg(long, default_value_t = 4)]
    heads: u32,
    /// Of a new model: hidden size.
    #[arg(long, default_value_t = 64)]
    width: u32,
}

fn main() -> MainResult {
    let options = Options::parse();
    let (common, training) = (&options.common, &options.training);
    let accelerator = training.accelerator(common)?;
    let pretrained = options.pretrained(&accelerator)?;
    let mut pairs = options.pairs(&accelerator)?;
    let tokenizer = match &pretrained {
        Some(folder) => HuggingFaceTokenizer::load(folder)?,
        None => options.own_tokenizer(&accelerator, &pairs)?,
    };
    let bert = options.bert(pretrained.as_deref(), &tokenizer, &mut pairs)?;
    let mut model = accelerator
        .parallel()
        .model_builder(BertForSequenceClassification::tensor_plan())
        .build(|path| BertForSequenceClassification::new(path, &bert))?;
    if let Some(folder) = &pretrained {
        let report = BertForSequenceClassification::load_pretrained(&mut model, folder)?;
        if !report.head.is_empty() {
            accelerator.println(format!("Newly drawn: {}", report.head.join(", ")));
        }
    }

    let longest = i64::from(options.max_length).min(bert.max_position_embeddings);
    let tokenizer = tokenizer.with_truncation(Truncation::new(longest as usize))?;
    let pad = tokenizer.special_id(SpecialToken::Padding).context("the tokenizer cannot pad")?;
    // Tensor cores take 16-bit numbers in eights.
    let multiple = if accelerator.mixed_precision() == Precision::No { 1 } else { 8 };
    let collator = SequenceCollator::new(pad.into()).multiple_of(multiple);
    let loader = |sequences| {
        let data = SequenceData::new(sequences, collator.clone());
        let loader = DataLoader::new(data).batch_size(training.batch_size as usize);
        loader.seed(common.seed.into()).threads(common.threads)
    };
    let (train, valid) =
        (pairs.encode(&pairs.train, &tokenizer)?, pairs.encode(&pairs.valid, &tokenizer)?);
    let (train, valid) = accelerator.prepare((loader(train).shuffle(true), loader(valid)))?;

    let lr = options.lr.unwrap_or_else(|| if pretrained.is_some() { 2e-5 } else { 1e-3 });
    let optimizer = AdamW::default()
        .lr(lr)
        .weight_decay(training.weight_decay)
        .no_decay_on_norms_and_biases(true)
        .build(&model)?;
    let linear = |steps| Ok(Schedule::linear(lr, 0.0, steps)?);
    let schedule = training.warmed_up(training.steps(train.len()), linear)?;
    let scheduler = Scheduler::new(&optimizer, schedule);
    let (mut model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler))?;
    let losses = Losses::new(&accelerator);
    training.begin(common, &accelerator)?;

    for epoch in train.epoch()..training.epochs {
        model.train();
        // The loss of the batches that become one step.
        let mut window = MetricState::new(Mean);
        let bar = accelerator.progress(&train).label(format!("epoch {}", epoch + 1));
        let shown = bar.values();
        for batch in bar {
            let batch = batch?;
            let pairs = counted_once(&batch, accelerator.parallel().micro_batches())?;
            accelerator.accumulate(&model, &batch, || {
                let loss = accelerator.forward_backward(&model, &pairs, |model, pairs| {
                    let logits = model.forward(tokens(pairs))?;
                    let loss = model.inner().module().loss(&logits, labels_of(pairs)?, 0.0)?;
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
        let (mut mean, mut accuracy) = (MetricState::new(Mean), MetricState::new(Accuracy));
        // Of two classes the second is the one that is looked for.
        let average = if pairs.classes.len() == 2 { Average::Binary } else { Average::Macro };
        let mut f1 = MetricState::new(F1::new().average(average));
        for batch in &valid {
            let batch = batch?;
            let pairs = counted_once(&batch, 1)?;
            let logits =
                accelerator
                    .parallel()
                    .forward_stages(&model, &pairs, |model, pairs| model.forward(tokens(pairs)))?;
            let (logits, labels) = (Tensor::f_cat(&logits, 0)?, labels_of(&pairs)?);
            add_loss(&mut mean, &model.inner().module().loss(&logits, labels, 0.0)?)?;
            accelerator.update_metric(&mut accuracy, &batch, &logits, labels)?;
            accelerator.update_metric(&mut f1, &batch, &logits, labels)?;
        }
        let loss = accelerator.compute_metric(&mean)?;
        losses.push_valid(optimizer.steps()?, loss);
        let f1 = accelerator.compute_metric(&f1)?;
        let (percent, step) = (100.0 * accelerator.compute_metric(&accuracy)?, optimizer.steps()?);
        accelerator.println(format!(
            "epoch {}/{}, validation loss = {loss:.4}, accuracy = {percent:.2}, F1 = {f1:.4}",
            epoch + 1,
            training.epochs
        ));
        if common.log.is_some() {
            accelerator.log([("valid_loss", loss), ("accuracy", percent), ("f1", f1)], step)?;
        }
        if common.checkpoint.is_some() {
            accelerator.checkpoints().save_numbered()?;
        }
    }
    accelerator.checkpoints().wait()?;
    losses.finish(&accelerator, common, training)?;
    if let Some(folder) = &training.save {
        model.eval();
        // On every rank: all take part in making each tensor whole.
        accelerator.checkpoints().save_model_in_parts(&model, folder, u64::MAX)?;
        if accelerator.is_main_process() {
            BertForSequenceClassification::save_config(model.inner(), folder)?;
            tokenizer.save(folder)?;
        }
    }
    Ok(accelerator.trackers().finish()?)
}

/// What the model reads of a batch.
fn tokens(batch: &SequenceBatch) -> Tokens<'_> {
    Tokens {
        token_type_ids: batch.token_type_ids.as_ref(),
        ..Tokens::from((&batch.input_ids, &batch.attention_mask))
    }
}

impl Options {
    /// The folder of the model to begin with, where one was given. One process of a host downloads it.
    fn pretrained(&self, accelerator: &Accelerator) -> anyhow::Result<Option<PathBuf>> {
        let Some(repository) = &self.hub else { return Ok(self.model.clone()) };
        let download = || Hub::from_env()?.transformer(repository);
        let folder = accelerator.processes().local_main_process_first(download);
        Ok(Some(folder?))
    }

    /// The pairs on disk, which one process of a host generates where none were given.
    fn pairs(&self, accelerator: &Accelerator) -> anyhow::Result<Pairs> {
        let folder = match &self.data {
            Some(folder) => folder.clone(),
            None => {
                let folder = PathBuf::from(format!("data/pairs-{}", self.generate));
                let write = || write_pairs(&folder, self.generate).map_err(Error::custom);
                accelerator.processes().local_main_process_first(write)?;
                folder
            }
        };
        Pairs::open(&folder)
    }

    /// A vocabulary of the pairs to train with, made by one process of a host where it is not there yet.
    fn own_tokenizer(
        &self,
        accelerator: &Accelerator,
        pairs: &Pairs,
    ) -> anyhow::Result<HuggingFaceTokenizer> {
        let folder = self.cache.join(format!("{}-{}", pairs.name, self.vocabulary));
        let make = || {
            whole(&folder, |folder| {
                let trainer = BpeTrainer::new(self.vocabulary).special_tokens(SPECIAL);
                trainer.train(&pairs.train)?.save(folder)?;
                frame_pairs(&folder.join("tokenizer.json"))
            })
        };
        accelerator.processes().local_main_process_first(|| make().map_err(Error::custom))?;
        Ok(HuggingFaceTokenizer::load(&folder)?)
    }

    /// The sizes of the model. Where it knows the names of the data's classes, theirs is its order.
    fn bert(
        &self,
        pretrained: Option<&Path>,
        tokenizer: &HuggingFaceTokenizer,
        pairs: &mut Pairs,
    ) -> anyhow::Result<BertOptions> {
        let words = tokenizer.vocab_size() as i64;
        let mut bert = match pretrained {
            Some(folder) => BertOptions::from_folder(folder)?,
            None => BertOptions {
                vocab_size: words,
                hidden_size: self.width.into(),
                num_hidden_layers: self.layers,
                num_attention_heads: self.heads.into(),
                intermediate_size: 4 * i64::from(self.width),
                max_position_embeddings: self.max_length.into(),
                ..BertOptions::default()
            },
        };
        anyhow::ensure!(
            words <= bert.vocab_size,
            "the tokenizer has {words} tokens, and the model knows {}",
            bert.vocab_size
        );
        let known = |name| bert.labels.contains(name);
        if bert.labels.len() == pairs.classes.len() && pairs.classes.iter().all(known) {
            pairs.classes.clone_from(&bert.labels);
        } else {
            bert.labels.clone_from(&pairs.classes);
        }
        if let Some(dropout) = self.dropout {
            bert.hidden_dropout_prob = dropout;
            bert.attention_probs_dropout_prob = dropout;
            bert.classifier_dropout = None;
        }
        Ok(bert)
    }
}

/// BERT's special tokens, under its numbers for padding and the like.
const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// Lets a tokenizer put `[CLS]` and `[SEP]` around pairs, and tell the sentences apart by types, as BERT's does.
fn frame_pairs(file: &Path) -> anyhow::Result<()> {
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(file)?)?;
    json["post_processor"] = serde_json::json!({
        "type": "BertProcessing", "cls": [SPECIAL[2], 2], "sep": [SPECIAL[3], 3],
    });
    Ok(fs::write(file, serde_json::to_vec_pretty(&json)?)?)
}
