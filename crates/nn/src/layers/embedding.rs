//! Embedding.

use std::borrow::Borrow;

use brigade_sharding::TensorStyle;
use brigade_torch::{
    EmbeddingRows, Error, Result, embedding_sum, tied_embedding, vocabulary_parallel_embedding,
};
use tch::{Device, Kind, TchError, Tensor};

use super::dropout::Dropout;
use crate::error::ModelError;
use crate::layer_context::LayerContext;
use crate::{Divided, Init, Module, ParamPath};

/// Table of embeddings, which returns row `i` for every index `i`: from integers `[…]` to `[…, width]`.
///
/// An index without a row is the error [`crate::ModelError::OutsideTable`] on the CPU, where libtorch checks each
/// index. On a GPU the kernel fails and the device becomes unusable ("device-side assert triggered"); a check would
/// make the host wait in every step. Check ids on the host, where they are made.
///
/// Parameter: `weight` `[rows, width]`, normal with mean 0 and deviation 1
/// ([torch.nn.Embedding](https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html)).
///
/// ```
/// use brigade_nn::{Embedding, Model};
/// use tch::Tensor;
///
/// let model = Model::new(|p| Embedding::new(p, 100, 16))?;
/// assert_eq!(model.forward(&Tensor::from_slice(&[3i64, 99]))?.size(), [2, 16]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// With tensor parallelism ([`crate::ModelBuilder::tensor_parallel`]) the rows may be divided: a rank has `[part of
/// rows, width]`, and the vectors of all ranks are summed, because each id has its row on one of them.
#[derive(Debug)]
pub struct Embedding {
    weight: Tensor,
    rows: i64,
    padding: Option<i64>,
    context: LayerContext,
    divided: Option<Divided>,
}

/// Options of [`Embedding`].
#[derive(Debug, Clone, Copy, Default)]
pub struct EmbeddingOptions {
    /// Index of the padding row, which starts as 0 and gets no gradient. Defaults to none.
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
        let padding = options.padding;
        if let Some(row) = padding
            && !(0..rows).contains(&row)
        {
            path.reject(format_args!("padding row {row} is not among {rows} rows"));
        }
        let first_values = move |values: &mut Tensor| {
            Init::Normal { mean: 0.0, std: 1.0 }.fill(values)?;
            match padding.filter(|row| (0..rows).contains(row)) {
                Some(row) => values.f_get(row)?.f_zero_().map(drop),
                None => Ok(()),
            }
        };
        let shape = [rows, width];
        let (weight, divided) = path.divided_parameter_with("weight", &shape, [0, 1], first_values);
        if let Some(Divided { style, .. }) = &divided
            && *style != TensorStyle::Vocabulary
        {
            path.reject(format_args!(
                "an embedding is divided by its vocabulary, but the tensor plan has {style}"
            ));
        }
        Self { weight, rows, padding, context: path.layer(), divided }
    }

    /// Returns the table of embeddings `[rows, width]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Computes the forward, and also returns the weight for a head that is tied to the embedding. With this weight the
    /// backward adds the gradients of both uses in one operation ([`brigade_torch::tied_embedding`]); with
    /// [`Embedding::weight`] it makes and adds a second dense gradient. If the weight is divided over ranks or placed by a
    /// device map, or records no gradient, it is the weight itself.
    ///
    /// # Errors
    /// Returns the errors of the forward.
    ///
    /// ```
    /// use brigade_nn::{Embedding, Model};
    /// use tch::Tensor;
    ///
    /// let model = Model::new(|p| Embedding::new(p, 100, 16))?;
    /// let (words, weight) = model.module().forward_tied(&Tensor::from_slice(&[3i64, 99]))?;
    /// let logits = brigade_torch::linear(&words, &weight, None)?;
    /// assert_eq!(logits.size(), [2, 100]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn forward_tied(&self, input: &Tensor) -> Result<(Tensor, Tensor)> {
        if !self.is_whole() {
            return Ok((self.forward(input)?, self.weight.shallow_clone()));
        }
        let result = tied_embedding(&self.weight, input, self.padding);
        if result.is_err()
            && let Ok(Some(error)) = self.outside(input)
        {
            return Err(error);
        }
        let (output, weight) = self.context.check_border(result, input)?;
        Ok((self.context.output(output), weight))
    }

    /// Computes the forward, adds that of other layers, such as the embedding of positions, and applies a dropout
    /// layer to the sum. Also returns the weight for a tied head, as [`Embedding::forward_tied`] does. The ids of
    /// `others` are broadcast to `input`.
    ///
    /// On a GPU it is one kernel ([`brigade_torch::embedding_sum`]) if no weight is divided over ranks or placed by a
    /// device map, the layers have no hooks, and the dropout layer is [maskless](Dropout::maskless).
    ///
    /// # Errors
    /// Returns the errors of the layers.
    ///
    /// ```
    /// use brigade_nn::{Dropout, Embedding, Model, Module, ParamPath};
    /// use brigade_torch::Result;
    /// use tch::{Kind, Tensor};
    ///
    /// struct Tokens { words: Embedding, positions: Embedding, dropout: Dropout }
    /// impl Tokens {
    ///     fn new(path: &ParamPath<'_>) -> Self {
    ///         Self {
    ///             words: Embedding::new(path / "words", 100, 16),
    ///             positions: Embedding::new(path / "positions", 8, 16),
    ///             dropout: Dropout::maskless(path / "dropout", 0.1),
    ///         }
    ///     }
    /// }
    /// impl Module<&Tensor> for Tokens {
    ///     type Output = Tensor;
    ///     fn forward(&self, ids: &Tensor) -> Result<Tensor> {
    ///         let places = Tensor::f_arange(ids.size()[1], (Kind::Int64, ids.device()))?;
    ///         let others = [(&self.positions, &places)];
    ///         Ok(self.words.forward_sum(ids, &others, Some(&self.dropout))?.0)
    ///     }
    /// }
    /// let model = Model::new(|path| Tokens::new(path))?;
    /// let ids = Tensor::from_slice(&[3i64, 99]).view([1, 2]);
    /// assert_eq!(model.forward(&ids)?.size(), [1, 2, 16]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub fn forward_sum(
        &self,
        input: &Tensor,
        others: &[(&Self, &Tensor)],
        dropout: Option<&Dropout>,
    ) -> Result<(Tensor, Tensor)> {
        let is_plain = |it: &Self| it.is_whole() && it.context.hooks.is_empty();
        let probability = dropout.map_or(Some(0.0), Dropout::fused_probability);
        if let Some(probability) = probability
            && is_plain(self)
            && others.iter().all(|(other, _)| is_plain(other))
        {
            let tables: Vec<_> = others.iter().map(|(other, ids)| other.rows_of(ids)).collect();
            let result = embedding_sum(self.rows_of(input), &tables, probability);
            if result.is_err() {
                for (layer, ids) in [(self, input)].iter().chain(others) {
                    if let Ok(Some(error)) = layer.outside(ids) {
                        return Err(error);
                    }
                }
            }
            return self.context.check_border(result, input);
        }
        let (mut sum, weight) = self.forward_tied(input)?;
        let mut rows =
            others.iter().map(|(other, ids)| other.forward(ids)).collect::<Result<Vec<_>>>()?;
        // As in `embedding_sum`, so that the bits are the same.
        while let [.., before, last] = rows.as_slice()
            && others[rows.len() - 1].1.numel() == 1
        {
            let both = before.f_add(last)?;
            rows.truncate(rows.len() - 2);
            rows.push(both);
        }
        for other in rows {
            sum = sum.f_add(&other)?;
        }
        let sum = dropout.map_or_else(|| Ok(sum.shallow_clone()), |it| it.forward(&sum))?;
        Ok((sum, weight))
    }

    fn rows_of<'a>(&'a self, ids: &'a Tensor) -> EmbeddingRows<'a> {
        EmbeddingRows { padding: self.padding, ..EmbeddingRows::new(&self.weight, ids) }
    }

    /// Returns `true` if the whole weight is where it is used: not divided over ranks, nor placed by a device map.
    fn is_whole(&self) -> bool {
        let group = self.divided.as_ref().and_then(|divided| divided.region.group());
        group.is_none() && !self.context.weights.is_placed()
    }

    /// Returns the division of the weight over the ranks of a tensor group. `None` if every rank has the whole weight.
    #[must_use]
    pub fn divided(&self) -> Option<&Divided> {
        self.divided.as_ref()
    }
}

impl Module<&Tensor> for Embedding {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.context.weights.run(input, |input| self.look_up(input))
    }
}

impl Embedding {
    fn look_up(&self, input: &Tensor) -> Result<Tensor> {
        if let Some(divided) = &self.divided
            && let Some(group) = divided.region.group()
        {
            let (weight, part) = (&self.weight, divided.vocabulary());
            let output = vocabulary_parallel_embedding(group, input, weight, part, self.padding);
            if output.is_err()
                && let Ok(Some(error)) = self.outside(input)
            {
                return Err(error);
            }
            return Ok(self.context.output(output?));
        }
        let padding = self.padding.unwrap_or(NO_PADDING);
        let output = Tensor::f_embedding(&self.weight, input, padding, false, false);
        if output.is_err()
            && let Ok(Some(error)) = self.outside(input)
        {
            return Err(error);
        }
        self.context.finish(output, input)
    }

    /// Returns the error for the first index without a row, after libtorch has refused them. A stopped GPU cannot be
    /// queried.
    fn outside(&self, input: &Tensor) -> Result<Option<Error>, TchError> {
        let rows = self.rows;
        let is_whole = matches!(input.f_kind()?, Kind::Int64 | Kind::Int);
        if input.device() != Device::Cpu || !is_whole {
            return Ok(None);
        }
        let outside = input.f_lt(0)?.f_logical_or(&input.f_ge(rows)?)?.f_nonzero()?;
        if outside.size().first() == Some(&0) {
            return Ok(None);
        }
        let position = Vec::<i64>::try_from(&outside.f_get(0)?)?;
        let id = input.f_int64_value(&position)?;
        let layer = self.context.shown_name();
        Ok(Some(ModelError::OutsideTable { layer, id, position, rows }.into()))
    }
}

/// libtorch's padding index for "no row".
const NO_PADDING: i64 = -1;
