//! How fast batches of 28x28 images come out of memory, beside memcpy.
//!
//! `cargo run --release -p brigade-datasets --example loader_speed`
//!
//! On one thread, in turns: memcpy of the same images, held as f32, in order, into memory as fresh
//! as that of a batch; and the batch itself (bytes gathered in shuffled order, scaled to f32, with
//! labels, handed to libtorch). Then the loader in the calling thread, and with a thread of its
//! own, which adds the hand-over. Prints bytes per second, best of the rounds, and the ratio to
//! memcpy.
#![allow(clippy::print_stdout)]

use std::hint::black_box;
use std::time::Instant;

use brigade_data::{BatchContext, BatchedDataset, DataLoader};
use brigade_datasets::LabelledImages;
use brigade_sampling::{Sampler, Shuffle};
use brigade_torch::Result;

fn main() -> Result<()> {
    let pixels = (0..COUNT * AREA).map(|place| (place * 31 % 251) as u8).collect();
    let labels = (0..COUNT).map(|place| (place % 10) as u8).collect();
    let images = LabelledImages::new(pixels, labels, 28, 28)?;
    let order = Shuffle::new(COUNT, 1).order(0);
    let floats = vec![1f32; COUNT * AREA];
    let here = DataLoader::new(images.clone()).batch_size(BATCH).shuffle(true);
    let thread = DataLoader::new(images.clone()).batch_size(BATCH).shuffle(true).threads(1);

    let mut best = [0f64; 4];
    for _ in 0..ROUNDS {
        let copy = rate(|| {
            for images in floats.chunks_exact(BATCH * AREA) {
                let mut fresh = Vec::with_capacity(BATCH * AREA);
                fresh.extend_from_slice(black_box(images));
                black_box(&fresh);
            }
            Ok(())
        })?;
        let batches = rate(|| {
            for indices in order.chunks_exact(BATCH) {
                let _ = black_box(images.batch(indices, &BatchContext::default())?);
            }
            Ok(())
        })?;
        let rates = [copy, batches, rate(|| consume(&here))?, rate(|| consume(&thread))?];
        for (best, rate) in best.iter_mut().zip(rates) {
            *best = best.max(rate);
        }
    }
    let names = ["memcpy", "batches", "loader, no thread", "loader, one thread"];
    for (name, rate) in names.into_iter().zip(best) {
        println!("{name:20}{:6.2} GB/s  {:.2} of memcpy", rate / 1e9, rate / best[0]);
    }
    Ok(())
}

fn consume(loader: &DataLoader<LabelledImages>) -> Result<()> {
    for batch in loader {
        black_box(batch?);
    }
    Ok(())
}

/// Bytes of pixels, as f32, per second.
fn rate(epoch: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    epoch()?;
    Ok((COUNT / BATCH * BATCH * AREA * 4) as f64 / start.elapsed().as_secs_f64())
}

const AREA: usize = 28 * 28;
const BATCH: usize = 64;
const COUNT: usize = 60_000;
const ROUNDS: usize = 15;
