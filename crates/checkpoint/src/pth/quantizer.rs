//! Scales and zero points of quantized tensors.

/// Scale and zero point of a quantized tensor: an element is `(integer - zero point) * scale`.
#[derive(Debug, Clone, PartialEq)]
pub enum Quantizer<T> {
    /// One scale for the whole tensor.
    PerTensor {
        /// Scale of the tensor.
        scale: f64,
        /// Integer that represents 0.
        zero_point: i64,
    },
    /// One scale per index along a dimension.
    PerChannel {
        /// Vector of scales, one per index.
        scales: T,
        /// Vector of zero points, one per index.
        zero_points: T,
        /// Dimension along which the scales vary.
        axis: i64,
    },
}

impl<T> Quantizer<T> {
    /// Maps the tensors of scales and zero points to another type.
    ///
    /// # Errors
    /// Returns the first error of `map`.
    pub fn try_map<U, E>(self, mut map: impl FnMut(T) -> Result<U, E>) -> Result<Quantizer<U>, E> {
        Ok(match self {
            Self::PerTensor { scale, zero_point } => Quantizer::PerTensor { scale, zero_point },
            Self::PerChannel { scales, zero_points, axis } => {
                let (scales, zero_points) = (map(scales)?, map(zero_points)?);
                Quantizer::PerChannel { scales, zero_points, axis }
            }
        })
    }
}
