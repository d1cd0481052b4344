//! fastai's classification head.

use std::borrow::Borrow;
use std::mem;

use brigade_nn::{
    BatchNorm1d, BatchNormOptions, Dropout, Flatten, Layer, Linear, LinearOptions, Module,
    ParamPath, Relu, Sequential,
};
use brigade_rank_env::text::counted;
use brigade_torch::Result;
use tch::Tensor;

use crate::init::{Redraw, redraw, redraw_norm};

/// fastai's head ([`create_head`](https://docs.fast.ai/vision.learner.html#create_head)): from the feature maps `[n,
/// features, h, w]` of a body to `[n, classes]`.
///
/// It consists of pooling and, for each linear layer, a normalisation, a dropout, the layer and a ReLU, except that the
/// last layer has no ReLU. State-dict names are fastai's, and initial values have its distributions: linear weights
/// normal by their fan-in (`kaiming_normal_`), biases of the normalisations 0.001.
///
/// ```
/// use brigade_models::{Head, HeadOptions};
/// use brigade_nn::Model;
/// use tch::{Kind, Tensor};
///
/// let mut model = Model::new(|path| Head::new(path, 512, &HeadOptions::new(37)))?;
/// assert_eq!(model.parameters()[2].name, "4.weight");
/// assert_eq!(model.parameters()[2].tensor.size(), [512, 1024]); // the largest values and the means
/// let maps = Tensor::zeros([8, 512, 7, 7], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&maps)?.size(), [8, 37]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct Head {
    layers: Sequential,
}

/// Options of a [`Head`], with fastai's defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadOptions {
    /// Number of outputs (`n_out`).
    pub classes: i64,
    /// Widths of the hidden linear layers (`lin_ftrs`). Defaults to one of 512.
    pub hidden: Vec<i64>,
    /// Dropout probabilities of the linear layers (`ps`): one for each, or a single one for the last layer; the other
    /// layers then have half of it. Defaults to 0.5. A layer whose probability is 0 has no dropout, and the layers
    /// after it have lower indices in their names.
    pub dropout: Vec<f64>,
    /// `true` if the input consists of feature maps, which are pooled (`pool`); `false` if it is `[n, features]`.
    /// Defaults to `true`.
    pub pool: bool,
    /// Concatenates max pooling and average pooling, so that the first layer has twice as many inputs, instead of
    /// average pooling alone (`concat_pool`). Defaults to `true`.
    pub concat_pool: bool,
    /// Normalises the input of the first linear layer (`first_bn`). Defaults to `true`. A linear layer with a
    /// normalisation has no bias.
    pub first_bn: bool,
    /// Normalises the output, with a momentum of 0.01 (`bn_final`). Defaults to `false`.
    pub bn_final: bool,
    /// Puts each linear layer before its normalisation and dropout (`lin_first`). Defaults to `false`.
    pub lin_first: bool,
    /// Range `[low, high]` to which a sigmoid scales the output (`y_range`), for regression. Defaults to none.
    pub y_range: Option<[f64; 2]>,
}

impl HeadOptions {
    /// Returns fastai's default options for a number of classes.
    #[must_use]
    pub fn new(classes: i64) -> Self {
        Self {
            classes,
            hidden: vec![512],
            dropout: vec![0.5],
            pool: true,
            concat_pool: true,
            first_bn: true,
            bn_final: false,
            lin_first: false,
            y_range: None,
        }
    }
}

impl Head {
    /// Registers all layers below the path, for feature maps of `features` channels.
    ///
    /// The model fails to build if there are several dropout probabilities but not one for each linear layer; fastai
    /// leaves out layers then.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, features: i64, options: &HeadOptions) -> Self {
        let path = path.borrow();
        let HeadOptions { classes, pool, concat_pool, lin_first, .. } = *options;
        let inputs = if pool && concat_pool { features * 2 } else { features };
        let sizes: Vec<i64> =
            [inputs].into_iter().chain(options.hidden.iter().copied()).chain([classes]).collect();
        let linear = sizes.len() - 1;
        let dropout = match options.dropout.as_slice() {
            &[last] => [vec![last / 2.0; linear - 1], vec![last]].concat(),
            all => all.to_vec(),
        };
        if dropout.len() != linear {
            path.reject(format_args!(
                "{} of dropout for {}: give one, or {linear}",
                counted(dropout.len(), "probability"),
                counted(linear, "linear layer")
            ));
        }

        let mut row = Row { path, layers: Sequential::new() };
        if pool {
            row.push(Pool { concat: concat_pool });
            row.push(Flatten);
        }
        for (number, (pair, &probability)) in sizes.windows(2).zip(&dropout).enumerate() {
            let (inputs, outputs, is_last) = (pair[0], pair[1], number + 1 == linear);
            let norm = number > 0 || options.first_bn;
            if lin_first {
                // The dropout of the layer before comes after that layer's normalisation.
                row.dropout(probability, number == 0);
                row.linear(inputs, outputs, is_last || !norm);
                if !is_last {
                    row.push(Relu);
                    row.norm(outputs, norm);
                }
            } else {
                row.norm(inputs, norm);
                row.dropout(probability, false);
                row.linear(inputs, outputs, !norm);
                if !is_last {
                    row.push(Relu);
                }
            }
        }
        if options.bn_final {
            let slow = BatchNormOptions { momentum: Some(0.01), ..BatchNormOptions::default() };
            row.push(BatchNorm1d::with_options(row.next(), classes, slow));
        }
        if let Some([low, high]) = options.y_range {
            row.push(SigmoidRange { low, high });
        }
        Self { layers: row.layers }
    }
}

impl Module<&Tensor> for Head {
    type Output = Tensor;

    fn forward(&self, maps: &Tensor) -> Result<Tensor> {
        self.layers.forward(maps)
    }
}

/// Layers that are numbered in the order in which they are added.
struct Row<'a, 'b> {
    path: &'a ParamPath<'b>,
    layers: Sequential,
}

impl<'b> Row<'_, 'b> {
    fn next(&self) -> ParamPath<'b> {
        self.path / self.layers.len()
    }

    fn push(&mut self, layer: impl Layer + 'static) {
        self.layers = mem::take(&mut self.layers).add(layer);
    }

    fn norm(&mut self, features: i64, wanted: bool) {
        if wanted {
            let norm = BatchNorm1d::new(self.next(), features);
            redraw_norm(self.path, norm.bias());
            self.push(norm);
        }
    }

    fn dropout(&mut self, probability: f64, always: bool) {
        if always || probability != 0.0 {
            self.push(Dropout::new(self.next(), probability));
        }
    }

    fn linear(&mut self, inputs: i64, outputs: i64, bias: bool) {
        let layer = Linear::with_options(self.next(), inputs, outputs, LinearOptions { bias });
        redraw(self.path, layer.weight(), Redraw::KaimingFanIn);
        if let Some(bias) = layer.bias() {
            redraw(self.path, bias, Redraw::Constant(0.0));
        }
        self.push(layer);
    }
}

/// Pooling: the mean of each channel's pixels, or the largest values of all channels followed by their means.
#[derive(Debug)]
struct Pool {
    concat: bool,
}

impl Module<&Tensor> for Pool {
    type Output = Tensor;

    fn forward(&self, maps: &Tensor) -> Result<Tensor> {
        let means = maps.f_adaptive_avg_pool2d([1, 1])?;
        if !self.concat {
            return Ok(means);
        }
        // Equal to adaptive_max_pool2d, whose backward on a GPU is not deterministic.
        let (largest, _) = maps.f_flatten(2, -1)?.f_max_dim(-1, false)?;
        let largest = largest.f_view_as(&means)?;
        Ok(Tensor::f_cat(&[largest, means], 1)?)
    }
}

/// Scaled sigmoid: `sigmoid(x) · (high − low) + low`.
#[derive(Debug)]
pub(crate) struct SigmoidRange {
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Module<&Tensor> for SigmoidRange {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let unit = input.f_sigmoid()?;
        Ok(unit.f_mul_scalar(self.high - self.low)?.f_add_scalar(self.low)?)
    }
}
