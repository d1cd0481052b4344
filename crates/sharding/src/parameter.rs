//! Parameters of a model, without their values.

use brigade_checkpoint::Dtype;

use crate::strategy::is_float;
use crate::{MixedPrecision, ShardingError};

/// A parameter of a model, without its values.
///
/// ```
/// use brigade_checkpoint::Dtype;
/// use brigade_sharding::Parameter;
///
/// let weight = Parameter::new("h.0.mlp.weight", &[768, 3072], Dtype::F32).in_unit("h.0");
/// assert_eq!(weight.name(), "h.0.mlp.weight");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Parameter {
    /// Names of the parameter. A tied parameter has several, and is stored under the first.
    pub names: Vec<String>,
    /// Shape of the parameter.
    pub shape: Vec<u64>,
    /// Data type of the elements.
    pub dtype: Dtype,
    /// `true` if the parameter is trained, `false` if it is frozen.
    pub trained: bool,
    /// Name of the unit that has the parameter under its first name, such as `h.0`. `None` for a parameter outside of
    /// all units.
    pub unit: Option<String>,
    /// `true` if the parameter is gathered and computed in its own type, whatever
    /// [`MixedPrecision::param`](crate::MixedPrecision::param) is. Batch normalization needs it: its running statistics
    /// have 32 bits.
    pub keeps_dtype: bool,
    /// `true` for experts of a mixture, which are divided among the ranks of the mesh's axis `ep`. The shape is then
    /// that of this rank's experts.
    pub is_expert: bool,
}

impl Parameter {
    /// Creates a trained parameter that is outside of all units.
    #[must_use]
    pub fn new(name: impl Into<String>, shape: &[u64], dtype: Dtype) -> Self {
        let names = vec![name.into()];
        let shape = shape.to_vec();
        Self {
            names,
            shape,
            dtype,
            trained: true,
            unit: None,
            keeps_dtype: false,
            is_expert: false,
        }
    }

    /// Sets the unit that has the parameter.
    #[must_use]
    pub fn in_unit(self, unit: impl Into<String>) -> Self {
        Self { unit: Some(unit.into()), ..self }
    }

    /// Sets the unit by the first name: the modules up to the first number, as in `h.0`, `model.layers.12`,
    /// `encoder.block.3` or `layer1.0`. Use it for weights files whose model is not known.
    ///
    /// ```
    /// use brigade_checkpoint::Dtype;
    /// use brigade_sharding::Parameter;
    ///
    /// let unit = |name| Parameter::new(name, &[8], Dtype::F32).in_block_of_name().unit;
    /// assert_eq!(unit("model.layers.12.mlp.experts.3.weight").as_deref(), Some("model.layers.12"));
    /// assert_eq!(unit("wte.weight"), None);
    /// ```
    #[must_use]
    pub fn in_block_of_name(self) -> Self {
        let mut end = 0;
        let mut unit = None;
        for component in self.name().split('.') {
            end += component.len();
            if !component.is_empty() && component.bytes().all(|byte| byte.is_ascii_digit()) {
                unit = Some(self.name()[..end].to_owned());
                break;
            }
            end += 1;
        }
        Self { unit, ..self }
    }

    /// Adds a name under which the model also uses the parameter.
    #[must_use]
    pub fn tied(mut self, name: impl Into<String>) -> Self {
        self.names.push(name.into());
        self
    }

    /// Marks the parameter as frozen: it is not trained.
    #[must_use]
    pub fn frozen(self) -> Self {
        Self { trained: false, ..self }
    }

    /// Marks the parameter as one that is gathered and computed in its own type.
    #[must_use]
    pub fn keeping_dtype(self) -> Self {
        Self { keeps_dtype: true, ..self }
    }

    /// Marks the parameter as experts of a mixture, which are divided among the ranks of the mesh's axis `ep`.
    #[must_use]
    pub fn of_experts(self) -> Self {
        Self { is_expert: true, ..self }
    }

    /// Returns the data type in which the parameter is gathered and computed.
    #[must_use]
    pub fn compute_dtype(&self, mixed: &MixedPrecision) -> Dtype {
        if self.keeps_dtype { self.dtype } else { mixed.param_dtype(self.dtype) }
    }

    /// Returns the first name of the parameter. Empty if it has none.
    #[must_use]
    pub fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }

    pub(crate) fn check(&self) -> Result<(), ShardingError> {
        if self.names.is_empty() {
            return Err(ShardingError::Nameless { shape: self.shape.clone() });
        }
        if self.trained && !is_float(self.dtype) {
            return Err(ShardingError::NotTrainable {
                name: self.name().to_owned(),
                dtype: self.dtype,
            });
        }
        Ok(())
    }

    /// Returns the number of elements of a row along a dimension, or an error if it overflows.
    pub(crate) fn row_elements(&self, dim: usize) -> Result<u64, ShardingError> {
        let mut others = self.shape.iter().enumerate().filter(|(other, _)| *other != dim);
        let product = others.try_fold(1u64, |product, (_, size)| product.checked_mul(*size));
        product.ok_or_else(|| ShardingError::TooLarge { name: self.name().to_owned() })
    }
}
