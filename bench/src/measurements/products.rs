//! Measurements of matrix products alone: the peak rate of the processor.

use std::time::Instant;

use anyhow::{Context, Result};
use brigade::prelude::*;

const SIZES: [i64; 3] = [1024, 1536, 2048];
const TRIALS: usize = 4;

/// Product of two square matrices by one of libtorch's libraries.
pub(crate) struct Product {
    multiply: fn(&Tensor, &Tensor) -> Result<Tensor, tch::TchError>,
    left: Tensor,
    right: Tensor,
    size: i64,
}

impl Product {
    /// Tries sizes and libraries on all threads of this process, and returns the product with the highest rate.
    pub(crate) fn fastest(kind: Kind) -> Result<Self> {
        let mut fastest: Option<(f64, Self)> = None;
        for size in SIZES {
            let matrix = || Tensor::rand([size, size], tch::kind::FLOAT_CPU).to_kind(kind);
            let (left, right) = (matrix(), matrix());
            let blocked = left.f_to_mkldnn(kind)?;
            let candidates = [
                // MKL for float32, oneDNN for bfloat16, with the operands in the layout of a linear layer's forward
                // pass and input gradient.
                Self {
                    multiply: |a, b| a.f_mm(&b.f_transpose(0, 1)?),
                    left: left.shallow_clone(),
                    right: right.shallow_clone(),
                    size,
                },
                Self { multiply: Tensor::f_mm, left, right: right.shallow_clone(), size },
                // oneDNN for both data types.
                Self {
                    multiply: |a, b| a.f_mkldnn_linear(b, None::<Tensor>),
                    left: blocked,
                    right,
                    size,
                },
            ];
            for candidate in candidates {
                candidate.rate()?;
                let mut best = 0f64;
                for _ in 0..TRIALS {
                    best = best.max(candidate.rate()?);
                }
                if fastest.as_ref().is_none_or(|(rate, _)| best > *rate) {
                    fastest = Some((best, candidate));
                }
            }
        }
        Ok(fastest.context("there are no sizes")?.1)
    }

    /// Multiplies once. Returns the floating-point operations per second.
    pub(crate) fn rate(&self) -> Result<f64> {
        let start = Instant::now();
        let product = (self.multiply)(&self.left, &self.right)?;
        let seconds = start.elapsed().as_secs_f64();
        drop(product);
        Ok(2.0 * (self.size as f64).powi(3) / seconds)
    }
}
