//! Weights of linear layers in 8 or 4 bits.
//!
//! The arithmetic is in `brigade_checkpoint::quantized` (`PackedWeight`, rows of numbers with scales), without
//! libtorch, so that `brigade checkpoint convert --weights` and this module have the same results, bit for bit.
//! `QuantizedWeight` computes products, with libtorch's kernels where they exist and are faster.

use std::ops::Range;
use std::sync::OnceLock;

use brigade_checkpoint::{PackedWeight, QuantizedFormat};
use tch::{Device, Kind, Tensor};

use crate::autograd::grad_enabled;
use crate::dtype::type_name;
use crate::error::Error;
use crate::linear::linear;
use crate::memory::bytes;

/// The weight `[out, in]` of a linear layer in 8 or 4 bits, or a stack of such weights, for inference.
///
/// Products of few rows in bfloat16 on a CPU are computed by libtorch's kernels for packed weights, which read the
/// quantised weight once (`_weight_int8pack_mm`, `_weight_int4pack_mm_for_cpu`). Products of an fp8 weight in bfloat16 on
/// a GPU whose libtorch has `_scaled_mm` with a scale for each row (compute capability 8.9 or newer) are computed by it:
/// each row of the input is rounded to fp8, too, with a scale of its own, at most by a sixteenth of each value. All
/// others dequantise the weight to the input's type for the product: those of many rows on a CPU, in float32 and
/// float16, on other devices, and those for which [`QuantizedWeight::kernel`] returns a reason. On two cores with AVX-512 and a weight of 2048 x 2048 in int8 and int4
/// one row took 0.07 and 0.06 ms (0.17 ms with the weight in bfloat16), and the kernels were slower than the
/// dequantised product from 64 rows on; in float32 they were slower at every size. The fastest of 60 calls of
/// `_scaled_mm` on a CPU without fp8 instructions took 71 ms for one row, and that of a dequantised product 14 ms, on a
/// machine that was busy, so that it is not used there.
///
/// ```
/// use brigade_checkpoint::QuantizedFormat;
/// use brigade_torch::QuantizedWeight;
/// use tch::{Device, Kind, Tensor};
///
/// let weight = Tensor::randn([64, 128], (Kind::Float, Device::Cpu));
/// let quantized = QuantizedWeight::new(&weight, QuantizedFormat::Int8, false)?;
/// assert_eq!(quantized.bytes(), 64 * 128 + 64 * 2);
/// let input = Tensor::randn([3, 128], (Kind::Float, Device::Cpu));
/// let error = quantized.linear(&input, None)? - input.matmul(&weight.tr());
/// assert!(error.abs().max().double_value(&[]) < 0.5);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct QuantizedWeight {
    format: QuantizedFormat,
    /// Number of weights in a stack, whose rows follow each other. 1 for a single weight.
    matrices: i64,
    /// Number of rows of all matrices.
    rows: i64,
    columns: i64,
    /// Number of rows of a block in the layout of libtorch's kernel for 4 bits, or `None` for contiguous rows.
    block: Option<i64>,
    /// Packed weights as bytes, which are signed for int8.
    packed: Tensor,
    /// Scales `[out]`. For int4, scales and zeros `[in / group, out, 2]`, in the kernel's layout; those of a stack's
    /// matrices follow each other in the first dimension.
    scales: Tensor,
    /// The scales in bfloat16, unless `scales` are.
    short_scales: Option<Tensor>,
    /// Input feature of each column, if columns are sorted.
    order: Option<Tensor>,
}

/// Maximum number of rows of the input for which libtorch's kernels for packed weights are used: up to here they are
/// faster than a product with the dequantised weight, on two cores with AVX-512. At 32 rows 0.75 ms against 0.93 (int8)
/// and 1.22 (int4), at 64 rows 1.5 against 1.2 and 1.5.
const KERNEL_ROWS: i64 = 32;

/// Maximum number of values of a weight that are quantised or packed at a time, in whole rows: each is in memory as
/// numbers of 32 bits, up to twice, beside the whole weight.
const PART_VALUES: i64 = 1 << 20;

impl QuantizedWeight {
    /// Quantises a weight `[out, in]`, or a stack of weights `[matrices, out, in]`, of any floating-point type, on its
    /// device, as [`PackedWeight::quantize`] describes. Uses 16 MB of memory besides the result.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] for a tensor with another number of dimensions, whose number of input
    /// features is not divisible by the group size, or that has values that are infinite or NaN; an error of libtorch
    /// if memory runs out.
    pub fn new(
        weight: &Tensor,
        format: QuantizedFormat,
        is_calibrated: bool,
    ) -> Result<Self, Error> {
        let (matrices, rows, columns) = match *weight.size().as_slice() {
            [rows, columns] => (1, rows, columns),
            [matrices, rows, columns] => (matrices, matrices * rows, columns),
            _ => {
                return Err(Error::invalid_argument(format!(
                    "a weight that is quantised has two dimensions, and a stack of them three, found {:?}",
                    weight.size()
                )));
            }
        };
        let weight = weight.detach().f_reshape([rows, columns])?;
        let mut whole = empty(format, columns)?;
        // Room for all: a vector that grows would be in memory twice.
        whole.packed.reserve_exact(rows as usize * format.row_bytes(columns as usize));
        let step = (PART_VALUES / columns.max(1)).max(1);
        for first in (0..rows).step_by(step as usize) {
            let part = weight.f_narrow(0, first, step.min(rows - first))?;
            let part = part.f_to_kind(Kind::Float)?.f_to_device(Device::Cpu)?.f_contiguous()?;
            let values = floats(&part)?;
            let packed = PackedWeight::quantize(&values, columns as usize, format, is_calibrated);
            let PackedWeight { rows, packed, scales, zeros, .. } = packed?;
            whole.rows += rows;
            whole.packed.extend(packed);
            whole.scales.extend(scales);
            whole.zeros.extend(zeros);
        }
        Self::from_packed_stack(&whole, matrices, weight.device())
    }

    /// Copies a quantised weight to a device.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if the size of a part does not match format and shape, and for a device
    /// that does not support the format's numbers; an error of libtorch if memory runs out.
    pub fn from_packed(weight: &PackedWeight, device: Device) -> Result<Self, Error> {
        Self::from_packed_stack(weight, 1, device)
    }

    /// Copies a stack of quantised weights to a device. Their rows follow each other in `weight`.
    ///
    /// # Errors
    /// Returns the errors of [`QuantizedWeight::from_packed`]; [`crate::ErrorKind::InvalidArgument`] if the number of
    /// matrices does not divide the rows.
    pub fn from_packed_stack(
        weight: &PackedWeight,
        matrices: i64,
        device: Device,
    ) -> Result<Self, Error> {
        weight.check()?;
        let PackedWeight { format, rows, columns, .. } = *weight;
        if matrices < 1 || !(rows as i64).unsigned_abs().is_multiple_of(matrices.unsigned_abs()) {
            return Err(Error::invalid_argument(format!(
                "{rows} rows cannot be those of a stack of {matrices} weights"
            )));
        }
        let (rows, columns) = (rows as i64, columns as i64);
        let width = format.row_bytes(weight.columns) as i64;
        let kind = if format == QuantizedFormat::Int8 { Kind::Int8 } else { Kind::Uint8 };
        let mut packed = Tensor::f_from_data_size(&weight.packed, &[rows, width], kind)?;
        let mut block = None;
        if let QuantizedFormat::Int4 { group } = format
            && device == Device::Cpu
            && KERNEL_GROUPS.contains(&group)
        {
            block = int4_block().filter(|block| rows > 0 && (rows / matrices) % block == 0);
            if let Some(block) = block {
                packed = packed_by_blocks(&packed, block, columns)?;
            }
        }
        let scales = scales_of(weight, matrices)?;
        let (scales, short_scales) = if weight.has_short_scales() {
            (scales.f_to_kind(Kind::BFloat16)?, None)
        } else {
            let short = scales.f_to_kind(Kind::BFloat16)?.f_to_device(device)?;
            (scales, Some(short))
        };
        let order = weight.order.as_ref().map(|order| {
            let order: Vec<i64> = order.iter().map(|&column| i64::from(column)).collect();
            Tensor::f_from_slice(&order)?.f_to_device(device)
        });
        let made = Self {
            format,
            matrices,
            rows,
            columns,
            block,
            packed: packed.f_to_device(device)?,
            scales: scales.f_to_device(device)?,
            short_scales,
            order: order.transpose()?,
        };
        if format == QuantizedFormat::Fp8 && made.rows > 0 {
            made.numbers(0..1, Kind::Float).map(drop).map_err(|error| {
                Error::invalid_argument(format!(
                    "{device:?} does not have fp8 numbers, use int8: {error}"
                ))
            })?;
        }
        Ok(made)
    }

    /// Returns the weight in the layout of files, in memory of the CPU.
    ///
    /// # Errors
    /// Returns an error of libtorch if memory runs out.
    pub fn to_packed(&self) -> Result<PackedWeight, Error> {
        let plain = match self.block {
            Some(block) => {
                let values = unpacked(&self.packed, block, self.columns)?;
                let pairs = values.f_view([self.rows, self.columns / 2, 2])?;
                let high = pairs.f_select(2, 1)?.f_bitwise_left_shift_tensor_scalar(4)?;
                pairs.f_select(2, 0)?.f_bitwise_or_tensor(&high)?
            }
            None => self.packed.shallow_clone(),
        };
        let plain = plain.f_to_device(Device::Cpu)?.f_contiguous()?;
        let scales = self.scales.f_to_kind(Kind::Float)?.f_to_device(Device::Cpu)?;
        let part = |index| match self.format {
            // From `[matrices · in / group, out, 2]` to rows of groups.
            QuantizedFormat::Int4 { .. } => {
                let [matrices, rows] = [self.matrices, self.rows / self.matrices];
                let of_groups = scales.f_select(2, index)?.f_reshape([matrices, -1, rows])?;
                floats(&of_groups.f_transpose(1, 2)?.f_contiguous()?)
            }
            _ => floats(&scales.f_contiguous()?),
        };
        let order = self.order.as_ref().map(|order| -> Result<Vec<u32>, Error> {
            let order = Vec::<i64>::try_from(&order.f_to_device(Device::Cpu)?)?;
            Ok(order.into_iter().map(|column| column as u32).collect())
        });
        Ok(PackedWeight {
            format: self.format,
            rows: self.rows as usize,
            columns: self.columns as usize,
            packed: bytes(&plain)?.to_vec(),
            scales: part(0)?,
            zeros: if self.format.has_zeros() { part(1)? } else { Vec::new() },
            order: order.transpose()?,
        })
    }

    /// Copies the weight to another device.
    ///
    /// # Errors
    /// Returns the errors of [`QuantizedWeight::from_packed`].
    pub fn to_device(&self, device: Device) -> Result<Self, Error> {
        Self::from_packed_stack(&self.to_packed()?, self.matrices, device)
    }

    /// Returns another handle of the same memory.
    #[must_use]
    pub fn shallow_clone(&self) -> Self {
        let Self { format, matrices, rows, columns, block, .. } = *self;
        let optional = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::shallow_clone);
        Self {
            format,
            matrices,
            rows,
            columns,
            block,
            packed: self.packed.shallow_clone(),
            scales: self.scales.shallow_clone(),
            short_scales: optional(&self.short_scales),
            order: optional(&self.order),
        }
    }

    /// Returns the format in which the weight is stored.
    #[must_use]
    pub fn format(&self) -> QuantizedFormat {
        self.format
    }

    /// Returns the shape `[out, in]`, of a stack `[matrices · out, in]`.
    #[must_use]
    pub fn size(&self) -> [i64; 2] {
        [self.rows, self.columns]
    }

    /// Returns the number of weights in the stack. 1 for a single weight.
    #[must_use]
    pub fn num_matrices(&self) -> i64 {
        self.matrices
    }

    /// Returns one weight of a stack, which shares its memory.
    ///
    /// ```
    /// use brigade_checkpoint::QuantizedFormat;
    /// use brigade_torch::QuantizedWeight;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let experts = Tensor::randn([4, 8, 32], (Kind::Float, Device::Cpu));
    /// let quantized = QuantizedWeight::new(&experts, QuantizedFormat::Int8, false)?;
    /// let third = QuantizedWeight::new(&experts.get(2), QuantizedFormat::Int8, false)?;
    /// assert_eq!(quantized.matrix(2)?.to_packed()?, third.to_packed()?);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error of libtorch for an index outside of the stack.
    pub fn matrix(&self, index: i64) -> Result<Self, Error> {
        let of_stack = |tensor: &Tensor| {
            let size = tensor.size()[0] / self.matrices;
            tensor.f_narrow(0, index * size, size)
        };
        Ok(Self {
            matrices: 1,
            rows: self.rows / self.matrices,
            packed: of_stack(&self.packed)?,
            scales: of_stack(&self.scales)?,
            short_scales: self.short_scales.as_ref().map(of_stack).transpose()?,
            ..self.shallow_clone()
        })
    }

    /// Returns the device of the weight.
    #[must_use]
    pub fn device(&self) -> Device {
        self.packed.device()
    }

    /// Returns the size of its tensors in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        self.tensors().into_iter().map(|(_, tensor)| bytes(tensor)).sum()
    }

    /// Returns the tensors that the weight consists of, with their names.
    #[must_use]
    pub fn tensors(&self) -> Vec<(&'static str, &Tensor)> {
        let optional = [("short_scales", &self.short_scales), ("order", &self.order)];
        let optional = optional.into_iter().filter_map(|(name, it)| Some((name, it.as_ref()?)));
        [("packed", &self.packed), ("scales", &self.scales)].into_iter().chain(optional).collect()
    }

    /// Returns the name of the kernel that multiplies few rows of this type, or on a GPU any number of them, or `Err`
    /// with the reason if there is none, so that each product dequantises the weight first.
    ///
    /// # Errors
    /// Returns the reason as a text.
    pub fn kernel(&self, input: Kind) -> Result<&'static str, String> {
        let kernel = self.short_kernel()?;
        if input != Kind::BFloat16 {
            return Err(format!("`{kernel}` takes inputs in bfloat16, found {}", type_name(input)));
        }
        Ok(kernel)
    }

    /// Returns the name of the kernel that multiplies inputs in bfloat16, or the reason why there is none.
    fn short_kernel(&self) -> Result<&'static str, String> {
        if self.device() != Device::Cpu && self.format == QuantizedFormat::Fp8 {
            let rows = self.rows / self.matrices;
            if let Some(odd) = [rows, self.columns].into_iter().find(|it| it % SCALED_TILE != 0) {
                return Err(format!("`_scaled_mm` needs multiples of {SCALED_TILE}, found {odd}"));
            }
            return scaled_rows_on(self.device()).map(|()| SCALED);
        }
        if self.device() != Device::Cpu {
            return Err(format!("no kernel for packed weights is used on {:?}", self.device()));
        }
        match self.format {
            // The kernel reads 32 columns at a time, also beyond the end of a row.
            QuantizedFormat::Int8 if self.columns % INT8_COLUMNS != 0 => {
                Err(format!("{} columns are not a multiple of {INT8_COLUMNS}", self.columns))
            }
            QuantizedFormat::Int8 if !has_int8() => {
                Err("this libtorch has no kernel for int8 on the CPU".to_owned())
            }
            QuantizedFormat::Int8 => Ok("_weight_int8pack_mm"),
            QuantizedFormat::Int4 { .. } if self.block.is_some() => {
                Ok("_weight_int4pack_mm_for_cpu")
            }
            QuantizedFormat::Int4 { group } if !KERNEL_GROUPS.contains(&group) => {
                Err(format!("the kernel for int4 has no groups of {group}"))
            }
            QuantizedFormat::Int4 { .. } => match int4_block() {
                Some(block) => {
                    let rows = self.rows / self.matrices;
                    Err(format!("{rows} rows are not a multiple of {block}"))
                }
                None => Err("this libtorch has no kernel for int4 on the CPU".to_owned()),
            },
            QuantizedFormat::Fp8 => {
                Err("`_scaled_mm` on a CPU is slower, and rounds the input to fp8".to_owned())
            }
        }
    }

    /// Computes `input · weightᵀ + bias`, in the input's type, as [`crate::linear`] does: `input` `[…, in]`, `bias`
    /// `[out]`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] for an input that requires a gradient. Also returns the errors of
    /// [`crate::linear`].
    pub fn linear(&self, input: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, Error> {
        if grad_enabled() && input.requires_grad() {
            return Err(Error::invalid_argument(
                "a quantised weight is for inference, and the input needs a gradient: run the model in `no_grad`, or \
                 train it before it is quantised",
            ));
        }
        let size = input.size();
        if size.last() != Some(&self.columns) {
            return Err(Error::invalid_argument(format!(
                "the last dimension has to be {} (input features), found an input of {size:?}",
                self.columns
            )));
        }
        let input = match &self.order {
            Some(order) => input.f_index_select(-1, order)?,
            None => input.shallow_clone(),
        };
        let rows: i64 = size.iter().rev().skip(1).product();
        let is_few = rows <= KERNEL_ROWS || self.device() != Device::Cpu;
        let is_packed = rows >= 1
            && is_few
            && input.device() == self.device()
            && self.rows > 0
            && self.kernel(input.f_kind()?).is_ok();
        if !is_packed {
            return linear(&input, &self.sorted(input.f_kind()?)?, bias);
        }
        let flat = input.f_reshape([rows, self.columns])?.f_contiguous()?;
        let scales = self.short_scales.as_ref().unwrap_or(&self.scales);
        let output = match self.format {
            QuantizedFormat::Int4 { group } => {
                flat.f_internal_weight_int4pack_mm_for_cpu(&self.packed, group as i64, scales)?
            }
            QuantizedFormat::Fp8 => {
                let weight = self.packed.f_view_dtype(Kind::Float8e4m3fn)?;
                scaled_product(&flat, &weight, &self.scales)?
            }
            QuantizedFormat::Int8 => flat.f_internal_weight_int8pack_mm(&self.packed, scales)?,
        };
        let mut shape = size;
        if let Some(last) = shape.last_mut() {
            *last = self.rows;
        }
        let output = output.f_view(shape.as_slice())?;
        Ok(match bias {
            Some(bias) => output.f_add(bias)?,
            None => output,
        })
    }

    /// Returns the weight `[out, in]` in a floating-point type. It is computed in bfloat16 for bfloat16, otherwise in
    /// float32 and rounded.
    ///
    /// # Errors
    /// Returns an error of libtorch if memory runs out.
    pub fn dequantize(&self, kind: Kind) -> Result<Tensor, Error> {
        let sorted = self.sorted(kind)?;
        let Some(order) = &self.order else { return Ok(sorted) };
        Ok(sorted.f_empty_like()?.f_index_copy_(1, order, &sorted)?)
    }

    /// Returns the dequantised weight with columns in the order of their groups.
    fn sorted(&self, kind: Kind) -> Result<Tensor, Error> {
        let is_short = kind == Kind::BFloat16 && self.short_scales.is_none();
        let computed = if is_short { kind } else { Kind::Float };
        tch::no_grad(|| {
            let values = self.numbers(0..self.rows, computed)?;
            let scales = self.scales.f_to_kind(computed)?;
            let values = match self.format {
                QuantizedFormat::Int4 { group } => {
                    let groups = self.columns / group as i64;
                    let of_groups = [self.matrices, groups, self.rows / self.matrices];
                    let [scale, zero] = [0, 1].map(|part| {
                        let rows =
                            scales.f_select(2, part)?.f_reshape(of_groups)?.f_transpose(1, 2)?;
                        rows.f_reshape([self.rows, groups, 1])
                    });
                    let grouped = values.f_view([self.rows, groups, group as i64])?;
                    let grouped = grouped.f_sub_scalar(8)?.f_mul_(&scale?)?.f_add_(&zero?)?;
                    grouped.f_view([self.rows, self.columns])?
                }
                _ => values.shallow_clone().f_mul_(&scales.f_unsqueeze(1)?)?,
            };
            Ok(values.f_to_kind(kind)?)
        })
    }

    /// Returns the stored numbers of rows, those of 4 bits from 0 to 15. The range has to be all rows for the kernel's
    /// layout.
    fn numbers(&self, rows: Range<i64>, kind: Kind) -> Result<Tensor, Error> {
        let plain = || self.packed.f_narrow(0, rows.start, rows.end - rows.start);
        let numbers = match (self.format, self.block) {
            (QuantizedFormat::Int8, _) => plain()?,
            (QuantizedFormat::Fp8, _) => plain()?.f_view_dtype(Kind::Float8e4m3fn)?,
            (QuantizedFormat::Int4 { .. }, None) => nibbles(&plain()?)?,
            (QuantizedFormat::Int4 { .. }, Some(block)) => {
                unpacked(&self.packed, block, self.columns)?
            }
        };
        Ok(numbers.f_to_kind(kind)?)
    }
}

/// Group sizes that libtorch's kernel for 4 bits supports.
const KERNEL_GROUPS: [usize; 4] = [32, 64, 128, 256];
/// Number of columns that libtorch's kernel for 8 bits reads at a time.
const INT8_COLUMNS: i64 = 32;
/// The kernel for CPUs has one layout for any value.
const INNER_TILES: i64 = 1;

/// Kernel for products of two fp8 matrices with a scale for each row of both.
const SCALED: &str = "_scaled_mm";
/// Factor of the sizes of weights that the kernel takes.
const SCALED_TILE: i64 = 16;
/// Largest number of `float8_e4m3fn`.
const LARGEST_FP8: f64 = 448.0;

/// Computes `input · (scales · weight)ᵀ` in bfloat16 with the rows of the input in fp8: `input` `[rows, in]`, fp8
/// `weight` `[out, in]`, `scales` `[out]`.
fn scaled_product(input: &Tensor, weight: &Tensor, scales: &Tensor) -> Result<Tensor, Error> {
    let input = input.f_to_kind(Kind::Float)?;
    // The lower bound gives a row of zeros a scale, too.
    let scale = input.f_abs()?.f_amax([-1], true)?.f_clamp_min(f64::from(f32::MIN_POSITIVE))?;
    let scale = scale.f_div_scalar(LARGEST_FP8)?.f_clamp_min(f64::from(f32::MIN_POSITIVE))?;
    let rounded = input.f_div(&scale)?.f_clamp(-LARGEST_FP8, LARGEST_FP8)?;
    let rounded = rounded.f_to_kind(Kind::Float8e4m3fn)?;
    let of_weight = scales.f_to_kind(Kind::Float)?.f_view([1, -1])?.f_contiguous()?;
    let output = rounded.f_internal_scaled_mm(
        &weight.f_tr()?,
        &scale,
        &of_weight,
        None::<Tensor>,
        None::<Tensor>,
        Kind::BFloat16,
        false,
    );
    Ok(output?)
}

/// Returns the reason why libtorch has no [`SCALED`] for a GPU. A small product is computed once for each device.
fn scaled_rows_on(device: Device) -> Result<(), String> {
    // libtorch numbers its devices in 7 bits.
    static FOUND: [OnceLock<Result<(), String>>; 128] = [const { OnceLock::new() }; 128];
    let found = if let Device::Cuda(index) = device { FOUND.get(index) } else { None };
    let Some(found) = found else { return Err(format!("{device:?} has no `_scaled_mm`")) };
    let try_it = || -> Result<bool, Error> {
        // Whole numbers up to 15 are exact in fp8, and so are their products with 1 and the scales.
        let size = 2 * SCALED_TILE;
        let numbers = Tensor::f_arange(size * size, (Kind::Float, device))?.f_remainder(16)?;
        let numbers = numbers.f_view([size, size])?;
        let scales =
            Tensor::f_arange(size, (Kind::Float, device))?.f_remainder(2)?.f_add_scalar(1)?;
        let input = Tensor::f_eye(size, (Kind::BFloat16, device))?;
        let weight = numbers.f_to_kind(Kind::Float8e4m3fn)?;
        let product = scaled_product(&input, &weight, &scales)?;
        let expected = numbers.f_mul(&scales.f_unsqueeze(1)?)?.f_tr()?;
        // The scale of the input is a 448th, which is no power of two.
        let difference = product.f_to_kind(Kind::Float)?.f_sub(&expected)?.f_abs()?.f_max()?;
        Ok(difference.f_double_value(&[])? <= 0.125)
    };
    let found = found.get_or_init(|| match tch::no_grad(try_it) {
        Ok(true) => Ok(()),
        Ok(false) => Err(format!("`_scaled_mm` on {device:?} has wrong products")),
        Err(error) => Err(format!("{device:?} has no `_scaled_mm` with scales of rows: {error}")),
    });
    found.clone()
}

fn empty(format: QuantizedFormat, columns: i64) -> Result<PackedWeight, Error> {
    format.check(columns as usize)?;
    Ok(PackedWeight {
        format,
        rows: 0,
        columns: columns as usize,
        packed: Vec::new(),
        scales: Vec::new(),
        zeros: Vec::new(),
        order: None,
    })
}

/// Returns the scales, for int4 with zeros, in the kernels' layout.
fn scales_of(weight: &PackedWeight, matrices: i64) -> Result<Tensor, Error> {
    let scales = Tensor::f_from_slice(&weight.scales)?;
    if !weight.format.has_zeros() {
        return Ok(scales);
    }
    let groups = weight.format.scales_per_row(weight.columns) as i64;
    let both = Tensor::f_stack(&[scales, Tensor::f_from_slice(&weight.zeros)?], 1)?;
    let rows = weight.rows as i64 / matrices;
    let of_rows = both.f_view([matrices, rows, groups, 2])?;
    let of_groups = of_rows.f_transpose(1, 2)?.f_contiguous()?;
    Ok(of_groups.f_view([matrices * groups, rows, 2])?)
}

fn floats(tensor: &Tensor) -> Result<Vec<f32>, Error> {
    Ok(Vec::<f32>::try_from(tensor.f_flatten(0, -1)?)?)
}

/// Unpacks 4-bit numbers from contiguous rows.
fn nibbles(packed: &Tensor) -> Result<Tensor, Error> {
    let low = packed.f_bitwise_and(15)?;
    let high = packed.f_bitwise_right_shift_tensor_scalar(4)?;
    Ok(Tensor::f_stack(&[low, high], -1)?.f_flatten(-2, -1)?)
}

/// Packs 4-bit numbers, two in a byte, into the layout of libtorch's kernel, some blocks of rows at a time: the kernel
/// takes them as numbers of 32 bits.
fn packed_by_blocks(plain: &Tensor, block: i64, columns: i64) -> Result<Tensor, Error> {
    let rows = plain.size2()?.0;
    let step = (PART_VALUES / columns.max(1) / block).max(1) * block;
    let packed = plain.f_empty_like()?;
    for first in (0..rows).step_by(step as usize) {
        let count = step.min(rows - first);
        let part = nibbles(&plain.f_narrow(0, first, count)?)?
            .f_to_kind(Kind::Int)?
            .f_internal_convert_weight_to_int4pack_for_cpu(INNER_TILES)?;
        packed.f_narrow(0, first, count)?.f_copy_(&part)?;
    }
    Ok(packed)
}

/// Unpacks 4-bit numbers from the layout of libtorch's kernel: blocks of 64 rows (AVX-512) or 32 (AVX2). A block is
/// stored column after column, with the first half of its rows in the low bits and the second half in the high bits.
fn unpacked(packed: &Tensor, block: i64, columns: i64) -> Result<Tensor, Error> {
    let halves = packed.f_view([-1, columns, block / 2])?;
    let low = halves.f_bitwise_and(15)?;
    let high = halves.f_bitwise_right_shift_tensor_scalar(4)?;
    let values = Tensor::f_cat(&[low, high], 2)?;
    Ok(values.f_transpose(1, 2)?.f_reshape([-1, columns])?)
}

/// Returns the number of rows in a block of libtorch's kernel for 4 bits, or `None` if there is no kernel, or if its
/// layout differs. Depends on the processor, so a small weight is packed and examined.
fn int4_block() -> Option<i64> {
    static BLOCK: OnceLock<Option<i64>> = OnceLock::new();
    let find = || -> Result<Option<i64>, Error> {
        let (rows, columns, group) = (64, 64, 32);
        let numbers = Tensor::f_arange(rows * columns, (Kind::Int, Device::Cpu))?;
        // Each row must differ from the rows with which a layout could confuse it.
        let numbers = numbers.f_mul_scalar(7)?.f_add(&numbers.f_floor_divide_scalar(columns)?)?;
        let numbers = numbers.f_remainder(16)?.f_view([rows, columns])?;
        let packed = numbers.f_internal_convert_weight_to_int4pack_for_cpu(INNER_TILES)?;
        let numbers = numbers.f_to_kind(Kind::Uint8)?;
        for block in [64, 32] {
            if unpacked(&packed, block, columns)?.f_equal(&numbers)? {
                let input = Tensor::f_eye(columns, (Kind::BFloat16, Device::Cpu))?;
                let scales =
                    Tensor::f_ones([columns / group, rows, 2], (Kind::BFloat16, Device::Cpu))?;
                let product =
                    input.f_internal_weight_int4pack_mm_for_cpu(&packed, group, &scales)?;
                let expected = numbers.f_to_kind(Kind::BFloat16)?.f_sub_scalar(7)?.f_tr()?;
                return Ok(product.f_equal(&expected)?.then_some(block));
            }
        }
        Ok(None)
    };
    *BLOCK.get_or_init(|| tch::no_grad(|| find().ok().flatten()))
}

/// Returns `true` if libtorch has a kernel for 8 bits on the CPU.
fn has_int8() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    let find = || -> Result<bool, Error> {
        let numbers = Tensor::f_arange(64 * INT8_COLUMNS, (Kind::Int, Device::Cpu))?;
        let numbers = numbers.f_remainder(127)?.f_to_kind(Kind::Int8)?;
        let numbers = numbers.f_view([64, INT8_COLUMNS])?;
        let input = Tensor::f_eye(INT8_COLUMNS, (Kind::BFloat16, Device::Cpu))?;
        let scales = Tensor::f_ones([64], (Kind::BFloat16, Device::Cpu))?;
        let product = input.f_internal_weight_int8pack_mm(&numbers, &scales)?;
        Ok(product.f_equal(&numbers.f_to_kind(Kind::BFloat16)?.f_tr()?)?)
    };
    *HAS.get_or_init(|| tch::no_grad(|| find().unwrap_or(false)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [QuantizedFormat; 5] = [
        QuantizedFormat::Int8,
        QuantizedFormat::Int4 { group: 32 },
        QuantizedFormat::Int4 { group: 64 },
        QuantizedFormat::Int4 { group: 128 },
        QuantizedFormat::Fp8,
    ];

    /// Returns the same weight regardless of other random draws.
    fn weight(rows: i64, columns: i64) -> Tensor {
        let places = Tensor::arange(rows * columns, (Kind::Double, Device::Cpu));
        ((&places * 12.9898).sin() + (places * 0.37).cos())
            .view([rows, columns])
            .to_kind(Kind::Float)
    }

    fn largest(tensor: &Tensor) -> f64 {
        tensor.abs().max().to_kind(Kind::Double).double_value(&[])
    }

    #[test]
    fn products_are_those_of_the_weight_that_is_stored() {
        for (rows, columns) in [(128, 256), (48, 128), (33, 128), (64, 384)] {
            let values = weight(rows, columns);
            let bias = weight(1, rows).view([rows]);
            for format in FORMATS {
                let quantized = QuantizedWeight::new(&values, format, false).unwrap();
                let stored = quantized.dequantize(Kind::Float).unwrap().to_kind(Kind::Double);
                for (inputs, kind, allowed) in [
                    (1, Kind::BFloat16, 0.02),
                    (7, Kind::BFloat16, 0.02),
                    (40, Kind::BFloat16, 0.02),
                    (3, Kind::Float, 1e-5),
                    (3, Kind::Half, 3e-3),
                ] {
                    let input = weight(inputs, columns).to_kind(kind);
                    let bias = bias.to_kind(kind);
                    let output = quantized.linear(&input, Some(&bias)).unwrap();
                    assert_eq!((output.kind(), output.size()), (kind, vec![inputs, rows]));
                    let exact = input.to_kind(Kind::Double).matmul(&stored.tr())
                        + bias.to_kind(Kind::Double);
                    let error = largest(&(output.to_kind(Kind::Double) - &exact));
                    let scale = largest(&input.abs().matmul(&stored.abs().to_kind(kind).tr()));
                    assert!(
                        error <= allowed * scale,
                        "{format} {kind:?} {inputs}: {error} {scale}"
                    );
                }
            }
        }
    }

    #[test]
    fn weights_are_within_their_formats_error() {
        let values = weight(64, 256);
        for (format, allowed) in FORMATS.into_iter().zip([0.0075, 0.068, 0.068, 0.068, 0.036]) {
            let quantized = QuantizedWeight::new(&values, format, false).unwrap();
            let error = largest(&(quantized.dequantize(Kind::Float).unwrap() - &values));
            assert!(error <= allowed * largest(&values), "{format}: {error}");
            let stored = quantized.to_packed().unwrap();
            let mut plain = vec![0f32; 64 * 256];
            stored.dequantize(0..64, &mut plain).unwrap();
            assert_eq!(
                Tensor::from_slice(&plain).view([64, 256]),
                quantized.dequantize(Kind::Float).unwrap(),
                "{format}"
            );
        }
    }

    #[test]
    fn a_stack_has_the_numbers_of_its_matrices() {
        // The rows of a matrix are a multiple of the kernel's block, or those of all matrices alone are.
        for rows in [64, 16] {
            let values = weight(4 * rows, 128).view([4, rows, 128]);
            for format in FORMATS {
                let stack = QuantizedWeight::new(&values, format, false).unwrap();
                assert_eq!((stack.num_matrices(), stack.size()), (4, [4 * rows, 128]));
                let whole = stack.dequantize(Kind::Float).unwrap().view([4, rows, 128]);
                let again = stack.to_packed().unwrap();
                let again = QuantizedWeight::from_packed_stack(&again, 4, Device::Cpu).unwrap();
                for index in 0..4 {
                    let alone = QuantizedWeight::new(&values.get(index), format, false).unwrap();
                    let expected = alone.dequantize(Kind::Float).unwrap();
                    assert_eq!(whole.get(index), expected, "{format} {rows}");
                    let one = again.matrix(index).unwrap();
                    assert_eq!(one.kernel(Kind::BFloat16), alone.kernel(Kind::BFloat16));
                    assert_eq!(one.to_packed().unwrap(), alone.to_packed().unwrap());
                    for (inputs, kind) in
                        [(3, Kind::BFloat16), (40, Kind::BFloat16), (3, Kind::Float)]
                    {
                        let input = weight(inputs, 128).to_kind(kind);
                        let expected = alone.linear(&input, None).unwrap();
                        assert_eq!(one.linear(&input, None).unwrap(), expected, "{format} {rows}");
                    }
                }
            }
        }
        let packed = QuantizedWeight::new(&weight(6, 32), QuantizedFormat::Int8, false).unwrap();
        let packed = packed.to_packed().unwrap();
        let error = QuantizedWeight::from_packed_stack(&packed, 4, Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("6 rows cannot be those of a stack of 4"), "{error}");
    }

    #[test]
    fn numbers_come_back_from_the_layout_of_kernels() {
        for (rows, columns) in [(64, 128), (192, 64), (16, 64), (5, 32)] {
            let values = Vec::<f32>::try_from(weight(rows, columns).flatten(0, -1)).unwrap();
            for format in
                [QuantizedFormat::Int8, QuantizedFormat::Int4 { group: 32 }, QuantizedFormat::Fp8]
            {
                let plain =
                    PackedWeight::quantize(&values, columns as usize, format, true).unwrap();
                let quantized = QuantizedWeight::from_packed(&plain, Device::Cpu).unwrap();
                assert_eq!(quantized.to_packed().unwrap(), plain, "{format} {rows} x {columns}");
                assert_eq!(quantized.bytes(), plain.bytes());
            }
        }
    }

    #[test]
    fn columns_in_the_order_of_groups_meet_their_inputs() {
        let values = weight(64, 96);
        let order: Vec<u32> = (0..96).map(|column| (column * 35 + 4) % 96).collect();
        let places: Vec<i64> = order.iter().map(|&column| i64::from(column)).collect();
        let sorted = values.index_select(1, &Tensor::from_slice(&places));
        let mut packed = QuantizedWeight::new(&sorted, QuantizedFormat::Int4 { group: 32 }, false)
            .and_then(|sorted| sorted.to_packed())
            .unwrap();
        packed.order = Some(order);
        // Scales that bfloat16 cannot represent, as in files of other programs.
        packed.scales.iter_mut().for_each(|scale| *scale *= 1.001);
        let quantized = QuantizedWeight::from_packed(&packed, Device::Cpu).unwrap();
        let whole = quantized.dequantize(Kind::Float).unwrap();
        assert!(largest(&(&whole - &values)) < 0.2);
        let mut plain = vec![0f32; 64 * 96];
        packed.dequantize(0..64, &mut plain).unwrap();
        assert_eq!(Tensor::from_slice(&plain).view([64, 96]), whole);
        for (kind, allowed) in [(Kind::Float, 1e-5), (Kind::BFloat16, 0.02)] {
            let input = weight(2, 96).to_kind(kind);
            let exact = input.to_kind(Kind::Double).matmul(&whole.to_kind(Kind::Double).tr());
            let output = quantized.linear(&input, None).unwrap().to_kind(Kind::Double);
            let error = largest(&(output - &exact));
            let scale = largest(&input.to_kind(Kind::Float).abs().matmul(&whole.abs().tr()));
            assert!(error <= allowed * scale, "{kind:?}: {error} {scale}");
        }
        assert_eq!(quantized.to_packed().unwrap(), packed);
    }

    #[test]
    fn this_processor_uses_the_kernels() {
        if !has_int8() || int4_block().is_none() {
            return;
        }
        let values = weight(64, 128);
        let in_kind =
            |format, kind| QuantizedWeight::new(&values, format, false).unwrap().kernel(kind);
        let named = |format| in_kind(format, Kind::BFloat16);
        assert_eq!(named(QuantizedFormat::Int8), Ok("_weight_int8pack_mm"));
        assert_eq!(named(QuantizedFormat::Int4 { group: 64 }), Ok("_weight_int4pack_mm_for_cpu"));
        let reason = named(QuantizedFormat::Int4 { group: 16 }).unwrap_err();
        assert!(reason.contains("no groups of 16"), "{reason}");
        let reason = in_kind(QuantizedFormat::Int8, Kind::Float).unwrap_err();
        assert_eq!(reason, "`_weight_int8pack_mm` takes inputs in bfloat16, found float32");
    }

    #[test]
    fn bad_input_is_an_error() {
        let quantized = QuantizedWeight::new(&weight(4, 32), QuantizedFormat::Int8, false).unwrap();
        let input = weight(2, 32).set_requires_grad(true);
        let error = quantized.linear(&input, None).unwrap_err().to_string();
        assert!(error.contains("for inference"), "{error}");
        assert!(tch::no_grad(|| quantized.linear(&input, None)).is_ok());
        let error = quantized.linear(&weight(2, 31), None).unwrap_err().to_string();
        assert!(error.contains("has to be 32"), "{error}");
        let scalar = Tensor::from(1f32);
        assert!(quantized.linear(&scalar, None).is_err());
        assert_eq!(quantized.linear(&weight(2, 32).narrow(0, 0, 0), None).unwrap().size(), [0, 4]);
        let format = QuantizedFormat::Int4 { group: 64 };
        let error = QuantizedWeight::new(&weight(4, 32), format, false).unwrap_err().to_string();
        assert!(error.starts_with("groups of 64 columns do not divide 32 columns"), "{error}");
        assert!(QuantizedWeight::new(&scalar, format, false).is_err());
        let mut packed = quantized.to_packed().unwrap();
        packed.packed.pop();
        assert!(QuantizedWeight::from_packed(&packed, Device::Cpu).is_err());
    }
}
