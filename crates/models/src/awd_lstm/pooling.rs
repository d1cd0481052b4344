//! Pooling of the outputs of a whole text, and the layers after it.

use brigade_nn::{BatchNorm1d, Dropout, Linear, LinearOptions, ParamPath, Relu, Sequential};
use brigade_rank_env::text::counted;
use brigade_torch::Result;
use tch::{Kind, Tensor};

use crate::head::SigmoidRange;
use crate::init::redraw_norm;

/// Pools the outputs `[n, time, width]` of texts to `[n, 3 · width]`: the output at the last token, the maximum, and
/// the mean, all without the positions where `padding` `[n, time]` is `true` (fastai's `masked_concat_pool`).
///
/// fastai uses another position instead of the last token's: as many positions before the end as there is padding among
/// the last `seq_len` positions. For a short text, which begins among these after padding, that is a position of
/// padding. If `fastai_last` is `seq_len`, this position is used, for weights that were trained that way.
///
/// ```
/// use brigade_models::masked_concat_pool;
/// use tch::Tensor;
///
/// let outputs = Tensor::from_slice(&[1f32, 5.0, 3.0, 9.0]).view([1, 4, 1]);
/// let padding = Tensor::from_slice(&[false, false, false, true]).view([1, 4]);
/// let pooled = masked_concat_pool(&outputs, &padding, None)?;
/// assert_eq!(pooled, Tensor::from_slice(&[3f32, 5.0, 3.0]).view([1, 3]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// Returns an error of libtorch for shapes that do not match.
pub fn masked_concat_pool(
    outputs: &Tensor,
    padding: &Tensor,
    fastai_last: Option<i64>,
) -> Result<Tensor> {
    let (rows, time, width) = outputs.size3()?;
    let count = |mask: &Tensor| mask.f_sum_dim_intlist([1].as_slice(), true, Kind::Int64);
    let words = count(&padding.f_logical_not()?)?.f_to_kind(outputs.kind())?;
    let last = match fastai_last {
        Some(seq_len) => {
            let tail = seq_len.clamp(0, time);
            let after = count(&padding.f_narrow(1, time - tail, tail)?)?;
            after.f_neg()?.f_add_scalar(time - 1)?
        }
        None => {
            let places = Tensor::f_arange(time, (Kind::Int64, padding.device()))?;
            let of_words = places.f_unsqueeze(0)?.f_masked_fill(padding, 0)?;
            of_words.f_amax([1].as_slice(), true)?
        }
    };
    let last = last.f_unsqueeze(2)?.f_expand([rows, 1, width], false)?;
    let last = outputs.f_gather(1, &last, false)?.f_squeeze_dim(1)?;

    let hidden = padding.f_unsqueeze(2)?;
    let sum = outputs.f_masked_fill(&hidden, 0.0)?;
    let mean = sum.f_sum_dim_intlist([1].as_slice(), false, outputs.kind())?.f_div(&words)?;
    let (largest, _) = outputs.f_masked_fill(&hidden, f64::NEG_INFINITY)?.f_max_dim(1, false)?;
    Ok(Tensor::f_cat(&[last, largest, mean], 1)?)
}

/// Creates the layers of fastai's `PoolingLinearClassifier` after its pooling: for each linear layer a normalisation, a
/// dropout, the layer without bias, and a ReLU except after the last one. Names are below `layers`.
pub(super) fn linear_layers(
    path: &ParamPath<'_>,
    sizes: &[i64],
    dropout: &[f64],
    y_range: Option<[f64; 2]>,
) -> Sequential {
    let path = path / "layers";
    let mut row = Sequential::new();
    let layers = sizes.len().saturating_sub(1);
    if dropout.len() != layers {
        path.reject(format_args!(
            "{} of dropout for {}: the first is the encoder's output dropout, give {} beside it",
            counted(dropout.len(), "probability"),
            counted(layers, "linear layer"),
            layers.saturating_sub(1)
        ));
    }
    for (number, (pair, &probability)) in sizes.windows(2).zip(dropout).enumerate() {
        let path = &path / number;
        let norm = BatchNorm1d::new(&path / 0, pair[0]);
        redraw_norm(&path, norm.bias());
        let mut block = Sequential::new().add(norm);
        // A layer whose probability is 0 has no dropout, and the layers after it have lower numbers.
        if probability != 0.0 {
            block = block.add(Dropout::maskless(&path / 1, probability));
        }
        let linear = &path / block.len();
        block = block.add(Linear::with_options(
            linear,
            pair[0],
            pair[1],
            LinearOptions { bias: false },
        ));
        row = row.add(if number + 1 < layers { block.add(Relu) } else { block });
    }
    match y_range {
        Some([low, high]) => row.add(SigmoidRange { low, high }),
        None => row,
    }
}
