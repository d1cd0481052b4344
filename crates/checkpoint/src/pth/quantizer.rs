//! What the integers of quantized tensors stand for.

/// The scale and the zero point of a quantized tensor: an element is `(integer - zero point) * scale`.
#[derive(Debug, Clone, PartialEq)]
pub enum Quantizer<T> {
    /// One for the whole tensor.
    PerTensor {
        /// Scale of the tensor.
        scale: f64,
        /// The integer of 0.
        zero_point: i64,
    },
    /// One for each place along a dimension.
    PerChannel {
        /// A vector of scales.
        scales: T,
        /// A vector of zero points.
        zero_points: T,
        /// The dimension.
        axis: i64,
    },
}

impl<T> Quantizer<T> {
    /// Maps the tensors of scales and zero points.
    ///
    /// # Errors
    /// The first of `map`.
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
