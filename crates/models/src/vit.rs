//! timm's vision transformers (ViT).

use std::borrow::Borrow;

use brigade_nn::{
    Branch, Conv2d, Conv2dOptions, Dropout, Init, LayerNorm, LayerNormOptions, Linear, Module,
    ParamPath, Stages, Unit,
};
use brigade_rank_env::text::counted;
use brigade_torch::{Activation, ResidualNorm, Result};
use tch::{Device, Kind, Tensor};

use crate::ImageClassifier;
use crate::drop_path::DropPath;
use crate::init::{Redraw, redraw};
use crate::residual::Residual;

/// A vision transformer (Dosovitskiy et al., 2020): from images `[n, channels, size, size]` to logits
/// `[n, classes]`.
///
/// Names and initial values (for a seed) are those of
/// [timm's](https://huggingface.co/docs/timm/models/vision-transformer) `vit_…_patch16_224`.
///
/// ```
/// use brigade_models::VisionTransformer;
/// use brigade_nn::Model;
///
/// let model = Model::new(|path| VisionTransformer::tiny(path, 1000))?;
/// assert_eq!(model.num_parameters(), 5_717_416);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct VisionTransformer {
    body: VisionTransformerBody,
    head: Linear,
}

/// A [`VisionTransformer`] without its classifier: from images to the normalised embedding of the class token, `[n,
/// width]`, as in timm with `num_classes=0`.
#[derive(Debug)]
pub(crate) struct VisionTransformerBody {
    cls_token: Tensor,
    pos_embed: Tensor,
    patches: Conv2d,
    pos_drop: Dropout,
    blocks: Vec<Block>,
    /// The blocks, at which a pipeline cuts the transformer.
    row: Stages,
    norm: LayerNorm,
}

/// Options of a [`VisionTransformer`], under timm's names.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VisionTransformerOptions {
    /// Height and width of the images in pixels, a multiple of the patch size. Defaults to 224.
    pub image_size: i64,
    /// Height and width of a patch in pixels. Defaults to 16.
    pub patch_size: i64,
    /// Number of channels of the images. Defaults to 3.
    pub in_channels: i64,
    /// Embedding size of each patch (`embed_dim`).
    pub width: i64,
    /// Number of transformer blocks. Defaults to 12.
    pub depth: usize,
    /// Number of attention heads, a divisor of the width.
    pub heads: i64,
    /// Dropout probability after the position embeddings and after each linear layer. Defaults to 0.
    pub dropout: f64,
    /// Probability that training skips the residual branches of the last block for an image, decreasing for earlier
    /// blocks: stochastic depth (`drop_path_rate`). Defaults to 0.
    pub stochastic_depth: f64,
}

impl VisionTransformerOptions {
    /// Returns the options of 12 blocks on images of 224 x 224 in patches of 16 x 16.
    #[must_use]
    pub fn new(width: i64, heads: i64) -> Self {
        Self {
            image_size: 224,
            patch_size: 16,
            in_channels: 3,
            width,
            depth: 12,
            heads,
            dropout: 0.0,
            stochastic_depth: 0.0,
        }
    }
}

impl VisionTransformer {
    /// Registers all layers below the path.
    pub fn new<'a>(
        path: impl Borrow<ParamPath<'a>>,
        classes: i64,
        options: VisionTransformerOptions,
    ) -> Self {
        let path = path.borrow();
        let body = VisionTransformerBody::undrawn(path, options);
        let head = Linear::new(path / "head", options.width, classes);
        // The layers have been initialised by their defaults before.
        body.redraw(path);
        draw(path, &head);
        Self { body, head }
    }
}

impl VisionTransformerBody {
    pub(crate) fn new(path: &ParamPath<'_>, options: VisionTransformerOptions) -> Self {
        let body = Self::undrawn(path, options);
        body.redraw(path);
        body
    }

    /// With the initial values that the layers draw by themselves.
    fn undrawn(path: &ParamPath<'_>, options: VisionTransformerOptions) -> Self {
        let VisionTransformerOptions { image_size, patch_size, width, depth, heads, .. } = options;
        if patch_size < 1 || image_size < patch_size || image_size % patch_size != 0 {
            path.reject(format_args!(
                "images of {image_size} pixels are not whole patches of {patch_size}"
            ));
        }
        if heads < 1 || width % heads != 0 {
            path.reject(format_args!(
                "the width {width} cannot be divided among {}",
                counted(heads, "head")
            ));
        }
        let grid = image_size / patch_size.max(1);
        let kernel = [patch_size; 2];
        let strides = Conv2dOptions { stride: kernel, ..Conv2dOptions::default() };
        let blocks = path / "blocks";
        Self {
            cls_token: path.parameter("cls_token", &[1, 1, width], Init::Zeros),
            pos_embed: path.parameter("pos_embed", &[1, grid * grid + 1, width], Init::Zeros),
            patches: Conv2d::new(
                path / "patch_embed" / "proj",
                options.in_channels,
                width,
                kernel,
                strides,
            ),
            pos_drop: Dropout::new(path / "pos_drop", options.dropout),
            blocks: (0..depth)
                .map(|index| {
                    let last = depth.saturating_sub(1).max(1) as f64;
                    let drop = options.stochastic_depth * index as f64 / last;
                    Block::new(&(&blocks / index), options, drop)
                })
                .collect(),
            row: blocks.stages(0..depth),
            norm: norm(path / "norm", width),
        }
    }

    fn redraw(&self, path: &ParamPath<'_>) {
        redraw(path, &self.pos_embed, Redraw::TruncatedNormal(0.02));
        redraw(path, &self.cls_token, Redraw::Normal(1e-6));
        for layer in self.blocks.iter().flat_map(Block::linear) {
            draw(path, layer);
        }
    }
}

fn draw(path: &ParamPath<'_>, layer: &Linear) {
    redraw(path, layer.weight(), Redraw::TruncatedNormal(0.02));
    if let Some(bias) = layer.bias() {
        redraw(path, bias, Redraw::Constant(0.0));
    }
}

impl ImageClassifier for VisionTransformer {
    fn classifier(&self) -> String {
        "head".to_owned()
    }

    fn first_convolution(&self) -> String {
        "patch_embed.proj".to_owned()
    }

    fn renamed(&self, name: &str) -> Option<String> {
        renamed(name)
    }

    fn adapted(&self, name: &str, values: &Tensor, shape: &[i64]) -> Result<Option<Tensor>> {
        if name == "pos_embed" { resized_positions(values, shape) } else { Ok(None) }
    }
}

/// Converts torchvision's name of a parameter.
pub(crate) fn renamed(name: &str) -> Option<String> {
    const BLOCK: [(&str, &str); 8] = [
        ("ln_1.", "norm1."),
        ("self_attention.in_proj_", "attn.qkv."),
        ("self_attention.out_proj.", "attn.proj."),
        ("ln_2.", "norm2."),
        ("mlp.linear_1.", "mlp.fc1."),
        ("mlp.0.", "mlp.fc1."),
        ("mlp.linear_2.", "mlp.fc2."),
        ("mlp.3.", "mlp.fc2."),
    ];
    const OTHERS: [(&str, &str); 5] = [
        ("class_token", "cls_token"),
        ("conv_proj.", "patch_embed.proj."),
        ("encoder.pos_embedding", "pos_embed"),
        ("encoder.ln.", "norm."),
        ("heads.head.", "head."),
    ];
    let replaced = |name: &str, table: &[(&str, &str)]| {
        table.iter().find_map(|(theirs, own)| Some(format!("{own}{}", name.strip_prefix(theirs)?)))
    };
    match name.strip_prefix("encoder.layers.encoder_layer_") {
        Some(rest) => {
            let (block, layer) = rest.split_once('.')?;
            Some(format!("blocks.{block}.{}", replaced(layer, &BLOCK)?))
        }
        None => replaced(name, &OTHERS),
    }
}

/// Interpolates the position embeddings for another image size by timm's rule: bicubic, antialiased.
pub(crate) fn resized_positions(values: &Tensor, shape: &[i64]) -> Result<Option<Tensor>> {
    let (&[1, theirs, width], &[1, wanted, own_width]) = (values.size().as_slice(), shape) else {
        return Ok(None);
    };
    let [side, own_side] =
        [theirs, wanted].map(|length| ((length - 1).max(0) as f64).sqrt() as i64);
    let squares = side * side + 1 == theirs && own_side * own_side + 1 == wanted;
    if width != own_width || !squares {
        return Ok(None);
    }
    // On the CPU, since TorchTPU lacks the interpolation.
    let values = values.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?;
    let token = values.f_narrow(1, 0, 1)?;
    let grid = values.f_narrow(1, 1, theirs - 1)?.f_view([1, side, side, width])?;
    let grid = grid.f_permute([0, 3, 1, 2])?.f_internal_upsample_bicubic2d_aa(
        [own_side; 2],
        false,
        None,
        None,
    )?;
    let grid = grid.f_permute([0, 2, 3, 1])?.f_reshape([1, wanted - 1, width])?;
    Ok(Some(Tensor::f_cat(&[token, grid], 1)?))
}

impl Module<&Tensor> for VisionTransformerBody {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let embedded = || {
            let patches = self.patches.forward(images)?.f_flatten(2, -1)?.f_transpose(1, 2)?;
            let (samples, width) = (patches.size()[0], patches.size()[2]);
            let token = self.cls_token.f_expand([samples, 1, width], false)?;
            // The class token has the parameters' type; autocast may have changed that of the patches.
            let token = token.f_to_kind(patches.kind())?;
            let sequence = Tensor::f_cat(&[token, patches], 1)?.f_add(&self.pos_embed)?;
            self.pos_drop.forward(&sequence)
        };
        let mut branch = None;
        let stream = self.row.run_blocks(embedded, |blocks, stream| {
            let mut hidden = Residual::new(stream);
            for block in &self.blocks[blocks] {
                hidden = block.run(&hidden)?;
            }
            if !self.row.is_cut() {
                // The normalisation behind the blocks adds it.
                branch = hidden.branch.take();
            }
            hidden.join()
        })?;
        let hidden = Residual { branch, ..Residual::new(stream) };
        Ok(hidden.layer_norm(&self.norm)?.normed.f_select(1, 0)?)
    }
}

impl Module<&Tensor> for VisionTransformer {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.body.forward(images)?)
    }
}

/// Attention and two linear layers, each after a normalisation and with a residual connection.
#[derive(Debug)]
struct Block {
    unit: Unit,
    norm1: LayerNorm,
    qkv: Linear,
    proj: Linear,
    norm2: LayerNorm,
    fc1: Linear,
    fc2: Linear,
    dropout: Dropout,
    drop_path: DropPath,
    heads: i64,
}

impl Block {
    fn new(path: &ParamPath<'_>, options: VisionTransformerOptions, drop: f64) -> Self {
        let VisionTransformerOptions { width, heads, .. } = options;
        let (attention, mlp) = (path / "attn", path / "mlp");
        Self {
            unit: path.unit(),
            norm1: norm(path / "norm1", width),
            qkv: Linear::new(&attention / "qkv", width, 3 * width),
            proj: Linear::new(&attention / "proj", width, width),
            norm2: norm(path / "norm2", width),
            fc1: Linear::new(&mlp / "fc1", width, 4 * width),
            fc2: Linear::new(&mlp / "fc2", 4 * width, width),
            dropout: Dropout::new(path / "drop", options.dropout),
            drop_path: DropPath::new(path, drop),
            heads: heads.max(1),
        }
    }

    fn linear(&self) -> [&Linear; 4] {
        [&self.qkv, &self.proj, &self.fc1, &self.fc2]
    }

    fn run(&self, hidden: &Residual) -> Result<Residual> {
        let (stream, values) = self.unit.run_on(&hidden.stream, |stream| {
            let branch = hidden.branch.as_ref();
            let ResidualNorm { stream, normed } = self.norm1.forward_residual(stream, branch)?;
            let attended = self.branch(&self.attend(&normed)?)?;
            let ResidualNorm { stream, normed } =
                self.norm2.forward_residual(&stream, Some(&attended))?;
            let mlp = self.fc1.forward_pre_activation(&normed)?.activate(Activation::Gelu)?;
            let mlp = self.fc2.forward(&self.dropout.forward(&mlp)?)?;
            Ok((stream, self.branch(&mlp)?.values))
        })?;
        Ok(Residual::with_branch(stream, Branch::new(values)))
    }

    /// Returns a branch after its dropout, which draws PyTorch's numbers and so is not left to the normalisation.
    fn branch(&self, values: &Tensor) -> Result<Branch> {
        Ok(Branch::new(self.drop_path.apply(&self.dropout.forward(values)?)?))
    }

    fn attend(&self, input: &Tensor) -> Result<Tensor> {
        let (samples, length, width) = input.size3()?;
        let qkv = self.qkv.forward(input)?;
        let qkv = qkv.f_view([samples, length, 3, self.heads, width / self.heads])?;
        let qkv = qkv.f_permute([2, 0, 3, 1, 4])?;
        let part = |index| qkv.f_select(0, index);
        let attended = Tensor::f_scaled_dot_product_attention(
            &part(0)?,
            &part(1)?,
            &part(2)?,
            None::<Tensor>,
            0.0,
            false,
            None,
            false,
        )?;
        self.proj.forward(&attended.f_transpose(1, 2)?.f_reshape([samples, length, width])?)
    }
}

fn norm<'a>(path: impl Borrow<ParamPath<'a>>, width: i64) -> LayerNorm {
    let options = LayerNormOptions { eps: 1e-6, ..LayerNormOptions::default() };
    LayerNorm::with_options(path, &[width], options)
}
