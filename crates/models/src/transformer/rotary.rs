//! Rotary position embeddings.

use std::f64::consts::PI;

use brigade_torch::{Result, copy_to_device, rotary_pair};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

/// Scaling of a rotary embedding's frequencies for texts longer than those of the original training (`rope_type`
/// `llama3`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Llama3Scaling {
    /// Divisor of the low frequencies. Llama 3.1 has 8.
    pub factor: f64,
    /// Low-frequency threshold: frequencies whose wavelength is longer than the original length divided by this are
    /// divided by `factor`. Defaults to 1.
    pub low_freq_factor: f64,
    /// High-frequency threshold: frequencies whose wavelength is shorter than the original length divided by this are
    /// unchanged. Defaults to 4.
    pub high_freq_factor: f64,
    /// Maximum sequence length of the original training, in tokens. Defaults to 8192.
    pub original_max_position_embeddings: i64,
}

/// Rotary embedding: the frequencies, one for each pair of features of a head.
#[derive(Debug)]
pub(super) struct Rotary {
    frequencies: Vec<f64>,
    /// Copies on the requested devices and in the requested types. A copy in each forward could not be recorded in a
    /// CUDA graph.
    copies: Mutex<Vec<Tensor>>,
}

impl Rotary {
    pub(super) fn new(width: i64, theta: f64, scaling: Option<&Llama3Scaling>) -> Self {
        let plain = (0..width / 2).map(|pair| theta.powf(-2.0 * pair as f64 / width as f64));
        let scaled = |frequency: f64| scaling.map_or(frequency, |it| it.scaled(frequency));
        Self { frequencies: plain.map(scaled).collect(), copies: Mutex::default() }
    }

    /// Returns the rotations at positions `[batch or 1, tokens]`, for heads of this type. The angles are computed in
    /// float32, as in transformers, or in float64 for float64 heads.
    pub(super) fn at(&self, positions: &Tensor, kind: Kind) -> Result<Rotation> {
        let exact = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let frequencies = self.on(positions.device(), exact)?;
        let angles = positions.f_to_kind(exact)?.f_unsqueeze(-1)?.f_mul(&frequencies)?;
        // The same for all heads, and for both halves of a head.
        let angles = Tensor::f_cat(&[&angles, &angles], -1)?.f_unsqueeze(1)?;
        Ok(Rotation {
            cos: angles.f_cos()?.f_to_kind(kind)?,
            sin: angles.f_sin()?.f_to_kind(kind)?,
        })
    }

    fn on(&self, device: Device, kind: Kind) -> Result<Tensor> {
        let mut copies = self.copies.lock();
        if let Some(copy) = copies.iter().find(|it| (it.device(), it.kind()) == (device, kind)) {
            return Ok(copy.shallow_clone());
        }
        // Rounded on the host, so that the values are the same on every device.
        let copy = Tensor::f_from_slice(&self.frequencies)?.f_to_kind(kind)?;
        let copy = copy_to_device(&copy, device)?;
        copies.push(copy.shallow_clone());
        Ok(copy)
    }
}

impl Llama3Scaling {
    fn scaled(&self, frequency: f64) -> f64 {
        let wavelength = 2.0 * PI / frequency;
        let original = self.original_max_position_embeddings as f64;
        if wavelength > original / self.low_freq_factor {
            frequency / self.factor
        } else if wavelength < original / self.high_freq_factor {
            frequency
        } else {
            let smooth = (original / wavelength - self.low_freq_factor)
                / (self.high_freq_factor - self.low_freq_factor);
            (1.0 - smooth) * frequency / self.factor + smooth * frequency
        }
    }
}

/// Cosines and sines `[batch or 1, 1, tokens, width]`.
#[derive(Debug)]
pub(super) struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

impl Rotation {
    pub(super) fn move_to(&mut self, device: Device) -> Result<()> {
        for table in [&mut self.cos, &mut self.sin] {
            if table.device() != device {
                *table = table.f_to_device(device)?;
            }
        }
        Ok(())
    }

    /// Rotates queries and keys `[batch, heads, tokens, width]`.
    pub(super) fn apply(&self, queries: &Tensor, keys: &Tensor) -> Result<(Tensor, Tensor)> {
        rotary_pair(queries, keys, &self.cos, &self.sin)
    }

    pub(super) fn shallow_clone(&self) -> Self {
        Self { cos: self.cos.shallow_clone(), sin: self.sin.shallow_clone() }
    }
}
