//! Account of a training step on a GPU: its kernels and, for GPT-2, the work that the step needs and the rates of the
//! device for it.

use std::io::{self, Write};
use std::time::Instant;

use anyhow::Result;
use brigade::models::Gpt2Options;
use brigade::prelude::*;
use brigade::torch::DeviceExt;
use brigade::train::ProfileOptions;
use serde_json::json;

use super::gpu_training::{Training, size};

/// Steps before the recorded one.
const WARM_UP: usize = 5;

/// Records a step and prints one line of JSON: `kernels` with the seconds and calls of each name, `needs` with the
/// bytes and floating-point operations of each kind in the order of `KernelKind::ALL`, `copied` with the bytes per
/// second of a copy, and `products` and `rate` with the seconds of the step's products alone and their operations per
/// second. Without a `step` nothing is needed. On a CPU the operations are in the place of the kernels.
pub(super) fn run<B: TensorTree<Owned = B>>(
    accelerator: &Accelerator,
    mut training: Training<'_, B>,
    mut batch: impl FnMut() -> Result<B>,
    step: Option<&Gpt2Step<'_>>,
) -> Result<Vec<Vec<f64>>> {
    let device = accelerator.device();
    for _ in 0..WARM_UP {
        training.step(&batch()?)?;
    }
    let mut record = || -> Result<_> {
        let batch = batch()?;
        let recorded = accelerator.profile(ProfileOptions::default(), |_| {
            training.step(&batch).map_err(Error::custom)?;
            device.synchronize()
        });
        Ok(recorded?.1)
    };
    // The first recording starts CUPTI.
    record()?;
    let on_device = device != Device::Cpu;
    let operations = record()?.operations();
    let kernels: Vec<_> = operations
        .iter()
        .filter(|it| it.on_device == on_device && !it.name.starts_with("ProfilerStep#"))
        .map(|it| json!([it.name, 1e-9 * it.self_ns as f64, it.calls]))
        .collect();
    drop(training);
    let products = step.map(Gpt2Step::products).unwrap_or_default();
    let mut seconds = 0.0;
    for &[m, k, n] in &products {
        seconds += seconds_of_product(device, [m, k, n])?;
    }
    // Not finite without products, which nothing reads then; JSON has `null` for it.
    let rate = products.iter().map(flop).sum::<f64>() / seconds;
    let line = json!({
        "kernels": kernels,
        "needs": step.map(Gpt2Step::needs).unwrap_or_default(),
        "copied": copied_bytes_per_second(device)?,
        "products": seconds,
        "rate": rate,
    });
    let mut out = io::stdout();
    writeln!(out, "{line}")?;
    out.flush()?;
    Ok(Vec::new())
}

/// Sizes of a step of GPT-2 with tied embeddings.
pub(super) struct Gpt2Step<'a> {
    pub(super) options: &'a Gpt2Options,
    pub(super) rows: i64,
    pub(super) tokens: i64,
}

impl Gpt2Step<'_> {
    /// Returns rows, inner size and columns of all products of a forward and backward pass. The vocabulary is rounded
    /// up to a multiple of 64: libraries have no fast kernel for an odd one.
    fn products(&self) -> Vec<[i64; 3]> {
        let (m, c) = (self.rows * self.tokens, self.options.n_embd);
        let layer = [[c, 3 * c], [c, c], [c, 4 * c], [4 * c, c]];
        let mut layers = vec![[c, (self.options.vocab_size + 63) / 64 * 64]];
        layers.extend(layer.repeat(self.options.n_layer));
        layers.iter().flat_map(|&[k, n]| [[m, k, n], [m, n, k], [k, m, n]]).collect()
    }

    /// Returns the bytes and floating-point operations that each kind of kernels needs at least, in the order of
    /// `KernelKind::ALL`. 0 for kinds that a step with all operations fused does not have.
    ///
    /// Values between layers have 2 bytes, those of the residual stream, parameters and the optimizer's states 4.
    fn needs(&self) -> [[f64; 2]; 8] {
        let (layers, width) = (self.options.n_layer as f64, self.options.n_embd as f64);
        let (words, tokens) = (self.options.vocab_size as f64, self.tokens as f64);
        let m = self.rows as f64 * tokens;
        // Scores and sums, of which a causal mask leaves a half; the backward computes the scores again and has four
        // more products.
        let attention = 3.5 * 2.0 * 2.0 * m * tokens * width / 2.0 * layers;
        // Forward: the branch and the stream are read, the stream and the normalised values written. Backward: two
        // gradients and the stream are read, two gradients written.
        let norms = (2.0 * layers + 1.0)
            * m
            * width
            * ((2.0 + 4.0 + 4.0 + 2.0) + (2.0 + 4.0 + 4.0 + 4.0 + 2.0));
        let loss = 4.0 * m * words;
        let parameters = width * (words + self.options.n_positions as f64)
            + layers * (12.0 * width * width + 13.0 * width)
            + 2.0 * width;
        let products = self.products().iter().map(flop).sum();
        [
            [0.0, products],
            [0.0, attention],
            [0.0, 0.0],
            [norms, 0.0],
            [loss, 0.0],
            // Parameter, gradient and two averages are read, three of them written.
            [28.0 * parameters, 0.0],
            [0.0, 0.0],
            [0.0, 0.0],
        ]
    }
}

fn flop([m, k, n]: &[i64; 3]) -> f64 {
    2.0 * *m as f64 * *k as f64 * *n as f64
}

/// Runs of each measurement of a rate.
const RUNS: usize = 10;

fn seconds_of(device: Device, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    run()?;
    device.synchronize()?;
    let start = Instant::now();
    for _ in 0..RUNS {
        run()?;
    }
    device.synchronize()?;
    Ok(start.elapsed().as_secs_f64() / RUNS as f64)
}

fn seconds_of_product(device: Device, [m, k, n]: [i64; 3]) -> Result<f64> {
    let matrix = |rows, columns| Tensor::randn([rows, columns], (Kind::Float, device));
    let (left, right) =
        (matrix(m, k).to_kind(Kind::BFloat16), matrix(k, n).to_kind(Kind::BFloat16));
    let out = Tensor::empty([m, n], (Kind::BFloat16, device));
    seconds_of(device, || {
        let _ = left.f_mm_out(&out, &right)?;
        Ok(())
    })
}

fn copied_bytes_per_second(device: Device) -> Result<f64> {
    let bytes = size(1i64 << 30, 1 << 20);
    let source = Tensor::zeros([bytes], (Kind::Uint8, device));
    let mut copy = source.zeros_like();
    let seconds = seconds_of(device, || Ok(copy.f_copy_(&source)?))?;
    // Each is read and written.
    Ok(2.0 * bytes as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_of_gpt2_needs_what_its_sizes_say() {
        let options = Gpt2Options::default();
        let step = Gpt2Step { options: &options, rows: 8, tokens: 1024 };
        let needs = step.needs();
        // 6 operations a weight and token; the vocabulary has 47 more columns than words.
        let weights = 12.0 * 12.0 * 768.0 * 768.0 + 768.0 * 50_304.0;
        assert!((needs[0][1] / (6.0 * 8192.0 * weights) - 1.0).abs() < 1e-9);
        // 124,439,808 parameters.
        assert!((needs[5][0] - 28.0 * 124_439_808.0).abs() < 1.0);
        assert!((needs[4][0] - 4.0 * 8192.0 * 50_257.0).abs() < 1.0);
    }
}
