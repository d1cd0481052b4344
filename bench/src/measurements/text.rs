//! Our side of the text comparisons: `peers/tokenize_texts.py`, `peers/awd_lstm.py` and `peers/language.py`.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use brigade::data::DataLoader;
use brigade::learn::callback::{Callback, Step};
use brigade::learn::{Learner, LearnerState, Loaders};
use brigade::models::{
    BertForSequenceClassification, BertOptions, Gpt2LmHead, Gpt2Options, Labelled,
};
use brigade::prelude::*;
use brigade::text::tokens::{
    FastaiTokenizer, FolderOptions, ParallelOptions, TextSource, Vocabulary, tokenize_all,
};
use brigade::text::{LanguageLearnerOptions, LanguageModelData, TextData, language_model_learner};
use parking_lot::Mutex;

use super::training::status;

const WARM_UP: usize = 2;
const VOCABULARY: usize = 60_008;
const ROWS: usize = 64;
const LENGTH: usize = 72;

/// Runs `text tokenize FOLDER THREADS`, `text awd-lstm` or `text gpt2|bert`, with settings.
pub(crate) fn run(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    match words {
        ["tokenize", folder, threads] => tokenize(Path::new(folder), threads.parse()?),
        ["awd-lstm", settings @ ..] => awd_lstm(Settings::of(settings, 5)?),
        ["gpt2", settings @ ..] => gpt2(Settings::of(settings, 6)?),
        ["bert", settings @ ..] => bert(Settings::of(settings, 6)?),
        other => bail!("there is no measurement of texts {other:?}"),
    }
}

#[derive(Clone, Copy)]
struct Settings {
    bf16: bool,
    memory: bool,
    steps: usize,
}

impl Settings {
    fn of(words: &[&str], steps: usize) -> Result<Self> {
        let mut settings = Self { bf16: false, memory: false, steps };
        for word in words {
            match *word {
                "bf16" => settings.bf16 = true,
                "memory" => settings.memory = true,
                other => bail!("there is no setting {other:?}"),
            }
        }
        Ok(settings)
    }

    fn accelerator(self) -> Result<Accelerator> {
        let precision = if self.bf16 { Precision::Bf16 } else { Precision::No };
        Ok(Accelerator::builder().cpu(true).quiet(true).mixed_precision(precision).build()?)
    }

    /// Returns the seconds of the steps, or the resident and peak memory.
    fn found(self, mut seconds: Vec<f64>) -> Result<Vec<Vec<f64>>> {
        if self.memory {
            return Ok(vec![vec![status("VmRSS")?], vec![status("VmHWM")?]]);
        }
        ensure!(seconds.len() == WARM_UP + self.steps, "{} steps", seconds.len());
        seconds.drain(..WARM_UP);
        Ok(vec![seconds])
    }
}

/// Measures the seconds for all texts of a folder, which are in memory, with fastai's rules and spaCy's tokenizer.
fn tokenize(folder: &Path, threads: usize) -> Result<Vec<Vec<f64>>> {
    let files = FolderOptions::new().open(folder)?;
    let texts = files.texts()?.collect::<Result<Vec<_>, _>>()?;
    let source = TextSource::memory(texts)?;
    let tokenizer = FastaiTokenizer::new();
    let start = Instant::now();
    let mut count = 0;
    tokenize_all(&tokenizer, &source, ParallelOptions::new().threads(threads), |_, tokens| {
        count += tokens.len();
        Ok(())
    })?;
    let seconds = start.elapsed().as_secs_f64();
    ensure!(count > source.len(), "{count} tokens");
    Ok(vec![vec![seconds]])
}

/// Seconds from the start of a batch to the end of its step.
#[derive(Debug)]
struct Timed {
    start: Instant,
    seconds: Arc<Mutex<Vec<f64>>>,
}

impl Callback for Timed {
    fn order(&self) -> i32 {
        -100
    }

    fn before_batch(&mut self, _learner: &mut LearnerState) -> Step {
        self.start = Instant::now();
        Ok(())
    }

    fn after_batch(&mut self, _learner: &mut LearnerState) -> Step {
        self.seconds.lock().push(self.start.elapsed().as_secs_f64());
        Ok(())
    }
}

fn awd_lstm(settings: Settings) -> Result<Vec<Vec<f64>>> {
    let accelerator = settings.accelerator()?;
    accelerator.set_seed(1);
    let count = (WARM_UP + settings.steps) * ROWS * LENGTH + ROWS;
    let drawn = Tensor::rand([count as i64], (Kind::Double, Device::Cpu));
    let ids = (drawn.pow_tensor_scalar(4) * VOCABULARY as f64).to_kind(Kind::Int64);
    let ids = Vec::<i64>::try_from(&ids)?;
    let documents: Vec<Vec<i64>> = ids.chunks(300).map(<[i64]>::to_vec).collect();
    let data = LanguageModelData::new(documents, ROWS, LENGTH)?;
    let loaders = Loaders::train_only(DataLoader::new(data).batch_size(ROWS))?;
    let vocabulary = Arc::new(Vocabulary::new((0..VOCABULARY).map(|word| word.to_string()))?);
    let tokenizer = Arc::new(FastaiTokenizer::new());
    let data = TextData { loaders, vocabulary, tokenizer, classes: None };
    let mut learner: Learner =
        language_model_learner(&accelerator, data, LanguageLearnerOptions::default())?.quiet(true);
    let seconds = Arc::default();
    let timed = Timed { start: Instant::now(), seconds: Arc::clone(&seconds) };
    learner.fit(1, 1e-3, timed)?;
    let seconds = seconds.lock().clone();
    settings.found(seconds)
}

fn steps(settings: Settings, mut step: impl FnMut(usize) -> Result<()>) -> Result<Vec<Vec<f64>>> {
    let mut seconds = Vec::new();
    for number in 0..WARM_UP + settings.steps {
        let start = Instant::now();
        step(number % 4)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    settings.found(seconds)
}

fn gpt2(settings: Settings) -> Result<Vec<Vec<f64>>> {
    let accelerator = settings.accelerator()?;
    accelerator.set_seed(1);
    let model = Model::new(|path| Gpt2LmHead::new(path, &Gpt2Options::default()))?;
    let optimizer = AdamW::default().lr(2e-5).weight_decay(0.01).build(&model)?;
    let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    model.train();
    let batches: Vec<Tensor> =
        (0..4).map(|_| Tensor::randint(50_257, [4, 256], tch::kind::INT64_CPU)).collect();
    steps(settings, |number| {
        let ids = &batches[number];
        let loss = model.forward(Labelled::new(ids, ids))?.mean()?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        Ok(optimizer.zero_grad()?)
    })
}

fn bert(settings: Settings) -> Result<Vec<Vec<f64>>> {
    let accelerator = settings.accelerator()?;
    accelerator.set_seed(1);
    let options = BertOptions::default();
    let model = Model::new(|path| BertForSequenceClassification::new(path, &options))?;
    let optimizer = AdamW::default().lr(2e-5).weight_decay(0.01).build(&model)?;
    let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    model.train();
    let lengths = Tensor::from_slice(&[128i64, 120, 112, 104, 96, 88, 80, 72]).unsqueeze(1);
    let positions = Tensor::arange(128, tch::kind::INT64_CPU).unsqueeze(0);
    let mask = positions.lt_tensor(&lengths).to_kind(Kind::Int64);
    let types =
        positions.ge_tensor(&lengths.divide_scalar_mode(2, "floor")).to_kind(Kind::Int64) * &mask;
    let batches: Vec<(Tensor, Tensor)> = (0..4)
        .map(|_| {
            let ids = Tensor::randint_low(1000, 30_522, [8, 128], tch::kind::INT64_CPU) * &mask;
            (ids, Tensor::randint(2, [8], tch::kind::INT64_CPU))
        })
        .collect();
    steps(settings, |number| {
        let (ids, labels) = &batches[number];
        let logits = model.forward((ids, &mask, &types))?;
        let loss = logits.cross_entropy_for_logits(labels);
        accelerator.backward(&loss)?;
        optimizer.step()?;
        Ok(optimizer.zero_grad()?)
    })
}
