//! What a plan has to know of a model.

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
    /// Its names. A tied parameter has several; the first is the one under which it is stored.
    pub names: Vec<String>,
    /// Its shape.
    pub shape: Vec<u64>,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Whether it is trained, and not frozen.
    pub trained: bool,
    /// The module that the model names as a unit and that has the parameter under its first name: `h.0`. `None`
    /// for parameters of no unit.
    pub unit: Option<String>,
    /// Whether it is gathered and computed in its own type whatever [`MixedPrecision::param`](crate::MixedPrecision::param)
    /// says, as a batch normalisation is, whose running statistics have 32 bits.
    pub keeps_dtype: bool,
    /// Whether the ranks of the mesh's axis `ep` have it between them, some experts of a mixture each. The shape is that of
    /// this rank's.
    pub is_expert: bool,
}

impl Parameter {
    /// Returns a trained parameter of no unit.
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

    /// Sets the unit that has it.
    #[must_use]
    pub fn in_unit(self, unit: impl Into<String>) -> Self {
        Self { unit: Some(unit.into()), ..self }
    }

    /// Sets the unit that its first name tells: the modules up to the first number, as in `h.0`,
    /// `model.layers.12`, `encoder.block.3` or `layer1.0`. For weights files, of which the model is not known.
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

    /// Adds a name under which the model uses it, too.
    #[must_use]
    pub fn tied(mut self, name: impl Into<String>) -> Self {
        self.names.push(name.into());
        self
    }

    /// Makes it a parameter that is not trained.
    #[must_use]
    pub fn frozen(self) -> Self {
        Self { trained: false, ..self }
    }

    /// Makes it a parameter that is computed in its own type.
    #[must_use]
    pub fn keeping_dtype(self) -> Self {
        Self { keeps_dtype: true, ..self }
    }

    /// Makes it some experts of a mixture, which the ranks of the mesh's axis `ep` have between them.
    #[must_use]
    pub fn of_experts(self) -> Self {
        Self { is_expert: true, ..self }
    }

    /// Returns the type in which it is gathered and computed.
    #[must_use]
    pub fn compute_dtype(&self, mixed: &MixedPrecision) -> Dtype {
        if self.keeps_dtype { self.dtype } else { mixed.param_dtype(self.dtype) }
    }

    /// Returns its first name.
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

    /// Elements of a row, if they can be counted.
    pub(crate) fn row_elements(&self) -> Result<u64, ShardingError> {
        let others = self.shape.get(1..).unwrap_or(&[]);
        let product = others.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        product.ok_or_else(|| ShardingError::TooLarge { name: self.name().to_owned() })
    }
}
