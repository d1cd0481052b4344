//! Memory of generation with a transformer beside its weights, and its maximum speed with weights that are elsewhere.

use brigade_checkpoint::Dtype;

use crate::device_map::Reserve;

/// Shape of a transformer that generates text, and of its batch.
///
/// ```
/// use brigade_checkpoint::Dtype;
/// use brigade_sharding::Inference;
///
/// // Llama 7B.
/// let shape = Inference { layers: 32, key_width: 4096, vocabulary: 32_000, samples: 4, tokens: 4096, dtype: Dtype::BF16 };
/// assert_eq!(shape.cache_per_token(), 2 * 32 * 4096 * 2);
/// assert_eq!(shape.cache(), 4 * 4096 * 524_288);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inference {
    /// Number of transformer blocks.
    pub layers: u64,
    /// Width of the keys of all heads: the hidden size, or less with grouped-query attention.
    pub key_width: u64,
    /// Vocabulary size: the number of logits per token.
    pub vocabulary: u64,
    /// Batch size: the number of sequences.
    pub samples: u64,
    /// Sequence length in tokens, including the prompt.
    pub tokens: u64,
    /// Type of the key-value cache.
    pub dtype: Dtype,
}

impl Inference {
    /// Returns the bytes of keys and values of one token in all blocks.
    #[must_use]
    pub fn cache_per_token(&self) -> u64 {
        product(&[2, self.layers, self.key_width, self.dtype.bytes()])
    }

    /// Returns the bytes of the key-value cache of the batch in one block.
    #[must_use]
    pub fn cache_of_layer(&self) -> u64 {
        product(&[2, self.key_width, self.dtype.bytes(), self.samples, self.tokens])
    }

    /// Returns the bytes of the key-value cache of the batch.
    #[must_use]
    pub fn cache(&self) -> u64 {
        product(&[self.cache_of_layer(), self.layers])
    }

    /// Returns the bytes of the logits of the last token of each sequence, in 32 bits.
    #[must_use]
    pub fn logits(&self) -> u64 {
        product(&[self.samples, self.vocabulary, 4])
    }

    /// Returns the memory that a device map has to keep beside the weights ([`DeviceMap::reserve`]): the cache of each
    /// block, and the logits.
    ///
    /// [`DeviceMap::reserve`]: crate::device_map::DeviceMap::reserve
    #[must_use]
    pub fn reserve(&self) -> Reserve {
        Reserve { device: self.logits(), unit: self.cache_of_layer() }
    }
}

/// Weights that are copied for each forward pass, and the bandwidths of these transfers.
///
/// ```
/// use brigade_sharding::WeightTransfer;
///
/// let transfer = WeightTransfer { host: 10 << 30, disk: 3 << 30, link: 26 << 30, read: 3 << 30 };
/// // The disk needs a second for 3 GiB, while 13 GiB go over the link in half of it.
/// assert_eq!(transfer.forwards_per_second(), Some(1.0));
/// assert_eq!(WeightTransfer { host: 0, disk: 0, ..transfer }.forwards_per_second(), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightTransfer {
    /// Bytes that are copied from the host's memory to a GPU.
    pub host: u64,
    /// Bytes that are read from files. With a GPU they are also copied over the link.
    pub disk: u64,
    /// Bandwidth from the host's memory to a GPU, in bytes per second. 0 if there is no GPU.
    pub link: u64,
    /// Bandwidth of reading files, in bytes per second.
    pub read: u64,
}

impl WeightTransfer {
    /// Returns the upper bound on forward passes per second, if reads and copies overlap and computation takes no time.
    /// `None` if no weights are moved or the rates are 0, so that transfers do not limit the speed.
    #[must_use]
    pub fn forwards_per_second(&self) -> Option<f64> {
        let seconds =
            |bytes: u64, rate: u64| if rate == 0 { 0.0 } else { bytes as f64 / rate as f64 };
        let copied = seconds(self.host.saturating_add(self.disk), self.link);
        let slowest = copied.max(seconds(self.disk, self.read));
        (slowest > 0.0).then(|| 1.0 / slowest)
    }
}

fn product(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |product, factor| product.saturating_mul(*factor))
}

#[cfg(test)]
mod tests {
    use brigade_checkpoint::QuantizedFormat;

    use super::*;
    use crate::WeightFormat;

    /// Bytes of matrices, vectors of units and the tensors outside of units.
    fn weights(format: impl Into<WeightFormat>, tensors: &[(&[u64], bool, u64)]) -> u64 {
        let format = format.into();
        let bytes = |(shape, is_in_unit, count): &(&[u64], bool, u64)| {
            count * format.tensor_bytes(shape, Dtype::F32, *is_in_unit).unwrap()
        };
        tensors.iter().map(bytes).sum()
    }

    #[test]
    fn llama_7b() {
        let tensors: [(&[u64], bool, u64); 6] = [
            (&[4096, 4096], true, 32 * 4),
            (&[11_008, 4096], true, 32 * 2),
            (&[4096, 11_008], true, 32),
            (&[4096], true, 32 * 2),
            (&[32_000, 4096], false, 2),
            (&[4096], false, 1),
        ];
        // 6,738,415,616 parameters, of which 202,375,168 are in the matrices of each block, in 42,496 rows.
        assert_eq!(weights(WeightFormat::Fp32, &tensors), 26_953_662_464);
        assert_eq!(weights(WeightFormat::Bf16, &tensors), 13_476_831_232);
        assert_eq!(weights(QuantizedFormat::Int8, &tensors), 7_003_545_600);
        assert_eq!(weights(QuantizedFormat::Int4 { group: 128 }, &tensors), 3_965_198_336);
        // 4 bits and a scale of 32 bits for 64 weights: 202,375,168 x 9 / 16.
        let block = 113_836_032 + 2 * 8192;
        assert_eq!(weights(WeightFormat::Nf4, &tensors), 32 * block + 524_288_000 + 8192);
        let block = 202_375_168 + 2 * 42_496 + 2 * 8192;
        assert_eq!(weights(QuantizedFormat::Fp8, &tensors), 32 * block + 524_288_000 + 8192);
        let shape = Inference {
            layers: 32,
            key_width: 4096,
            vocabulary: 32_000,
            samples: 4,
            tokens: 4096,
            dtype: Dtype::BF16,
        };
        assert_eq!(shape.cache_per_token(), 524_288);
        assert_eq!(shape.cache(), 8 << 30);
        assert_eq!(shape.cache_of_layer(), 256 << 20);
        assert_eq!(shape.logits(), 512_000);
    }

    #[test]
    fn gpt2() {
        let tensors: [(&[u64], bool, u64); 10] = [
            (&[50_257, 768], false, 1),
            (&[1024, 768], false, 1),
            (&[768, 2304], true, 12),
            (&[768, 768], true, 12),
            (&[768, 3072], true, 12),
            (&[3072, 768], true, 12),
            (&[2304], true, 12),
            (&[3072], true, 12),
            (&[768], true, 12 * 6),
            (&[768], false, 2),
        ];
        assert_eq!(weights(WeightFormat::Fp16, &tensors), 2 * 124_439_808);
        assert_eq!(weights(QuantizedFormat::Int8, &tensors), 164_073_984);
        let shape = Inference {
            layers: 12,
            key_width: 768,
            vocabulary: 50_257,
            samples: 1,
            tokens: 1024,
            dtype: Dtype::F16,
        };
        assert_eq!(shape.cache_per_token(), 36_864);
        assert_eq!(shape.cache(), 36 << 20);
    }

    #[test]
    fn formats_are_read_as_they_are_written() {
        let texts = ["fp32", "fp16", "bf16", "fp8", "int8", "int4", "int4:64", "nf4"];
        for text in texts {
            assert_eq!(text.parse::<WeightFormat>().map(|it| it.to_string()), Ok(text.to_owned()));
        }
        for text in ["int4:100", "int4:", "int2", ""] {
            let error = text.parse::<WeightFormat>().unwrap_err();
            assert!(error.starts_with("not a weights format: write bf16"), "{error}");
        }
    }
}
