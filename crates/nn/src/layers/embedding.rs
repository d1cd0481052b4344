//! A table of vectors.

use std::borrow::Borrow;

use tch::Tensor;

use crate::layer_context::LayerContext;
use crate::{Init, Module, ParamPath, Result};

/// Row `i` of a table for every index `i`: from integers `[…]` to `[…, width]`.
///
/// Parameter: `weight` `[rows, width]`, normal with mean 0 and deviation 1
/// ([torch.nn.Embedding](https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html)).
///
/// ```no_run
/// use brigade_nn::{Embedding, Model, Tensor};
///
/// let model = Model::new(|p| Embedding::new(p, 100, 16))?;
/// assert_eq!(model.forward(&Tensor::from_slice(&[3i64, 99]))?.size(), [2, 16]);
/// # Ok::<(), brigade_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Embedding {
    weight: Tensor,
    padding: Option<i64>,
    context: LayerContext,
}

/// Options of [`Embedding`].
#[derive(Debug, Clone, Copy, Default)]
pub struct EmbeddingOptions {
    /// The row that stands for padding: it starts as 0 and gets no gradient. None by default.
    pub padding: Option<i64>,
}

impl Embedding {
    /// Registers `weight` at the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, rows: i64, width: i64) -> Self {
        Self::with_options(path, rows, width, EmbeddingOptions::default())
    }

    /// Registers `weight` at the path.
    pub fn with_options<'a>(
        path: impl Borrow<ParamPath<'a>>,
        rows: i64,
        width: i64,
        options: EmbeddingOptions,
    ) -> Self {
        let path = path.borrow();
        let weight = path.parameter("weight", &[rows, width], Init::Normal { mean: 0.0, std: 1.0 });
        if let Some(row) = options.padding {
            let zeroed = (0..rows)
                .contains(&row)
                .then(|| tch::no_grad(|| weight.f_get(row).and_then(|mut row| row.f_zero_())));
            match zeroed {
                Some(Ok(_)) => {}
                Some(Err(error)) => path.reject(error),
                None => path.reject(format_args!("padding row {row} is not among {rows} rows")),
            }
        }
        Self { weight, padding: options.padding, context: path.layer() }
    }

    /// `[rows, width]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Module<&Tensor> for Embedding {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let padding = self.padding.unwrap_or(NO_PADDING);
        let output = Tensor::f_embedding(&self.weight, input, padding, false, false);
        self.context.finish(output, input)
    }
}

/// What libtorch takes for "no row".
const NO_PADDING: i64 = -1;
