//! Mixed precision: the type of autocast, and the loss scale with fp16.

pub(crate) mod memory_format;
pub(crate) mod scaler;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use brigade_torch::{Autocast, Device, DeviceExt, GpuMath, Kind, TensorTree};

use crate::accelerator::{Accelerator, AcceleratorBuilder, Job};
use crate::error::{Error, Result};
use crate::gradients::loss_check::{LossCheck, LossCheckOptions};
use crate::precision::scaler::{GradScaler, GradScalerOptions};

/// The type in which autocast computes. Weights, gradients and the optimizer stay in 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Precision {
    /// That of the model: no autocast.
    #[default]
    No,
    /// 16 bits with 5 for the exponent. Small gradients would vanish, so the loss is scaled; see
    /// [`GradScaler`].
    Fp16,
    /// 16 bits with the exponent of 32: needs no scaling.
    Bf16,
}

impl Precision {
    fn kind(self) -> Kind {
        match self {
            Self::No => Kind::Float,
            Self::Fp16 => Kind::Half,
            Self::Bf16 => Kind::BFloat16,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::No => "no",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
        })
    }
}

impl FromStr for Precision {
    type Err = Error;

    /// Parses Accelerate's values.
    ///
    /// ```
    /// use brigade_train::Precision;
    /// assert_eq!("bf16".parse::<Precision>()?, Precision::Bf16);
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    fn from_str(text: &str) -> Result<Self> {
        match text.to_ascii_lowercase().as_str() {
            "no" => Ok(Self::No),
            "fp16" => Ok(Self::Fp16),
            "bf16" => Ok(Self::Bf16),
            "fp8" => Err(Error::InvalidArgument(
                "mixed precision fp8 needs kernels that Brigade does not have; use bf16".into(),
            )),
            other => Err(Error::InvalidArgument(format!(
                "mixed precision is {other:?}, expected no, fp16 or bf16"
            ))),
        }
    }
}

/// A scope of autocast, for [`Accelerator::autocast_with`] or alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AutocastOptions {
    /// The type; [`Precision::No`] turns autocast off inside.
    pub precision: Precision,
    /// Cast a weight once where several operations of the scope use it. Turn it off where weights
    /// change inside.
    pub cache: bool,
}

impl AutocastOptions {
    /// Runs the body in a scope of autocast on a device: for programs without an Accelerator.
    ///
    /// ```
    /// use brigade_train::{AutocastOptions, Device, Kind, Precision, Tensor};
    /// let weight = Tensor::ones([4, 4], (Kind::Float, Device::Cpu));
    /// let bf16 = AutocastOptions { precision: Precision::Bf16, cache: true };
    /// assert_eq!(bf16.run(Device::Cpu, || weight.matmul(&weight))?.kind(), Kind::BFloat16);
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Torch`] when the device has no autocast.
    pub fn run<R>(self, device: Device, body: impl FnOnce() -> R) -> Result<R> {
        let _scope = Autocast::enter(device, self.precision.kind(), self.cache)?;
        Ok(body())
    }
}

/// The Accelerator's settings of precision. Shared by everything that was prepared.
#[derive(Debug)]
pub(crate) struct Numerics {
    pub(crate) autocast: AutocastOptions,
    pub(crate) float32_outputs: bool,
    /// Whether convolutional models are put into channels last; `None` where that is faster.
    pub(crate) channels_last: Option<bool>,
    /// Whether GPUs compute products of float32 tensors in TF32.
    pub(crate) tf32: bool,
    /// With fp16 only.
    pub(crate) scaler: Option<GradScaler>,
}

/// What the builder collects for [`Numerics`].
#[derive(Debug, Clone)]
pub(crate) struct NumericsOptions {
    pub(crate) precision: Option<Precision>,
    pub(crate) cache: bool,
    pub(crate) float32_outputs: bool,
    pub(crate) channels_last: Option<bool>,
    pub(crate) scaler: GradScalerOptions,
    pub(crate) math: MathOptions,
}

/// Settings of the whole process; `None` leaves one as it is.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MathOptions {
    tf32: Option<bool>,
    benchmark: Option<bool>,
    deterministic: Option<bool>,
}

impl MathOptions {
    /// Applies the settings, for the first Accelerator of a job or a further one, and returns whether GPUs compute in
    /// TF32 then.
    pub(crate) fn apply(self, first: bool, device: Device) -> Result<bool> {
        let Self { tf32, benchmark, deterministic } = self;
        let before = GpuMath::current()?;
        if device.device_kind().is_none() {
            // libtorch may round products of some CPUs to TF32, too: here it is not turned on.
            if let Some(deterministic) = deterministic {
                GpuMath { deterministic, ..before }.apply();
            }
            return Ok(before.tf32);
        }
        let unless_set = if first {
            GpuMath { tf32: true, benchmark: false, deterministic: false }
        } else {
            before
        };
        let math = GpuMath {
            tf32: tf32.unwrap_or(unless_set.tf32),
            benchmark: benchmark.unwrap_or(unless_set.benchmark),
            deterministic: deterministic.unwrap_or(unless_set.deterministic),
        };
        math.apply();
        Ok(math.tf32)
    }
}

impl Default for NumericsOptions {
    fn default() -> Self {
        Self {
            precision: None,
            cache: true,
            float32_outputs: true,
            channels_last: None,
            scaler: GradScalerOptions::default(),
            math: MathOptions::default(),
        }
    }
}

impl NumericsOptions {
    pub(crate) fn decide(&self, job: &Arc<Job>, tf32: bool) -> Result<Numerics> {
        let precision = match self.precision {
            Some(precision) => precision,
            None => from_env()?.unwrap_or_default(),
        };
        let scaler = match precision {
            Precision::Fp16 => Some(GradScaler::for_ranks(self.scaler, Some(Arc::clone(job)))?),
            _ => None,
        };
        Ok(Numerics {
            autocast: AutocastOptions { precision, cache: self.cache },
            float32_outputs: self.float32_outputs,
            channels_last: self.channels_last,
            tf32,
            scaler,
        })
    }
}

fn from_env() -> Result<Option<Precision>> {
    use brigade_rank_env::env::ACCELERATE_MIXED_PRECISION as NAME;
    match std::env::var(NAME) {
        Ok(text) if !text.is_empty() => {
            let with_name = |error| Error::InvalidArgument(format!("{NAME}: {error}"));
            text.parse().map(Some).map_err(with_name)
        }
        _ => Ok(None),
    }
}

impl AcceleratorBuilder {
    /// The type in which prepared models compute. Unless set it is what the environment says
    /// (`ACCELERATE_MIXED_PRECISION`, which `brigade launch --mixed-precision` sets), else `no`.
    pub fn mixed_precision(mut self, precision: Precision) -> Self {
        self.numerics.precision = Some(precision);
        self
    }

    /// Whether a forward casts a weight once only, however many operations use it. On unless set.
    pub fn autocast_cache(mut self, cache: bool) -> Self {
        self.numerics.cache = cache;
        self
    }

    /// Whether a prepared model's outputs of 16 bits are converted to 32, so that losses are computed
    /// in 32. On unless set.
    pub fn float32_outputs(mut self, convert: bool) -> Self {
        self.numerics.float32_outputs = convert;
        self
    }

    /// How the loss is scaled with fp16.
    pub fn grad_scaler(mut self, options: GradScalerOptions) -> Self {
        self.numerics.scaler = options;
        self
    }

    /// Whether convolutional models, and the images they get, have their channels last in memory.
    /// Unless set, where that is faster: on a CPU with oneDNN, on a GPU with 16 bits. Results are equal
    /// to rounding.
    pub fn channels_last(mut self, on: bool) -> Self {
        self.numerics.channels_last = Some(on);
        self
    }
}

/// Settings of the whole process, which libtorch and cuBLAS have once: the last Accelerator's count. One that shares
/// another's place changes those that it names.
impl AcceleratorBuilder {
    /// Whether GPUs round the operands of float32 products and convolutions to TF32, whose 10 bits are those of
    /// fp16 and whose range is that of float32: several times faster from Ampere on. On unless set; PyTorch has
    /// it on for convolutions and off for products. Other types are not changed.
    pub fn tf32(mut self, on: bool) -> Self {
        self.numerics.math.tf32 = Some(on);
        self
    }

    /// Whether cuDNN tries its kernels at the first convolution of each shape and keeps the fastest
    /// (`torch.backends.cudnn.benchmark`): for inputs whose shapes repeat. Runs may differ in last digits then.
    /// Off unless set.
    pub fn benchmark_kernels(mut self, on: bool) -> Self {
        self.numerics.math.benchmark = Some(on);
        self
    }

    /// Whether only kernels are used that give the same bits in every run
    /// (`torch.use_deterministic_algorithms`). An operation without such a kernel is an error that names it. On a
    /// GPU a resumed run has the bits of one that was not stopped only with this. Off unless set.
    ///
    /// ```
    /// use brigade_train::Accelerator;
    /// let accelerator = Accelerator::builder().cpu(true).deterministic(true).tf32(false).build()?;
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    pub fn deterministic(mut self, on: bool) -> Self {
        self.numerics.math.deterministic = Some(on);
        self
    }
}

impl Accelerator {
    /// The type in which prepared models compute.
    #[must_use]
    pub fn mixed_precision(&self) -> Precision {
        self.numerics.autocast.precision
    }

    /// Returns the same Accelerator with another precision for what it prepares from now on. Ranks, trackers,
    /// checkpoints and all other options are shared. A loss scale of fp16 begins anew.
    ///
    /// ```
    /// use brigade_train::{Accelerator, Precision};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).build()?;
    /// let sixteen = accelerator.with_mixed_precision(Precision::Bf16)?;
    /// assert_eq!(sixteen.mixed_precision(), Precision::Bf16);
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the loss scale's options are out of range.
    pub fn with_mixed_precision(&self, precision: Precision) -> Result<Self> {
        let before = &*self.numerics;
        let options = NumericsOptions {
            precision: Some(precision),
            cache: before.autocast.cache,
            float32_outputs: before.float32_outputs,
            channels_last: before.channels_last,
            math: MathOptions::default(),
            scaler: before.scaler.as_ref().map(GradScaler::options).unwrap_or_default(),
        };
        let job = &self.processes.job;
        let numerics = Arc::new(options.decide(job, before.tf32)?);
        let loss_check = match (&numerics.scaler, before.scaler.is_some()) {
            (Some(scaler), _) => {
                self.checkpoints.register(scaler);
                None
            }
            (None, true) => Some(Arc::new(LossCheck::new(job, LossCheckOptions::default()))),
            (None, false) => self.loss_check.clone(),
        };
        Ok(Self { numerics, loss_check, ..self.clone() })
    }

    /// Returns the same Accelerator with another memory format for the convolutional models that it prepares from
    /// now on, see [`AcceleratorBuilder::channels_last`].
    #[must_use]
    pub fn with_channels_last(&self, on: bool) -> Self {
        let Numerics { autocast, float32_outputs, tf32, ref scaler, .. } = *self.numerics;
        let scaler = scaler.clone();
        let channels_last = Some(on);
        let numerics = Numerics { autocast, float32_outputs, channels_last, tf32, scaler };
        Self { numerics: Arc::new(numerics), ..self.clone() }
    }

    /// Runs the body with this Accelerator's autocast: for parts of a loss that are not a prepared model's
    /// forward, which has it anyway.
    ///
    /// ```
    /// use brigade_train::{Accelerator, Kind, Precision, Tensor};
    ///
    /// let accelerator = Accelerator::builder().cpu(true).mixed_precision(Precision::Bf16).build()?;
    /// let a = Tensor::ones([4, 4], (Kind::Float, accelerator.device()));
    /// let product = accelerator.autocast(|| a.matmul(&a))?;
    /// assert_eq!(product.kind(), Kind::BFloat16);
    /// # Ok::<(), brigade_train::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Torch`] when the device has no autocast.
    pub fn autocast<R>(&self, body: impl FnOnce() -> R) -> Result<R> {
        self.autocast_with(self.numerics.autocast, body)
    }

    /// As [`Accelerator::autocast`] with another type, or none: [`Precision::No`] computes in 32 bits
    /// inside a scope of 16.
    ///
    /// # Errors
    /// As there.
    pub fn autocast_with<R>(
        &self,
        options: AutocastOptions,
        body: impl FnOnce() -> R,
    ) -> Result<R> {
        options.run(self.device(), body)
    }

    /// The scaler of the loss: with fp16 only.
    #[must_use]
    pub fn grad_scaler(&self) -> Option<&GradScaler> {
        self.numerics.scaler.as_ref()
    }
}

impl Numerics {
    /// Autocast around a forward, when there is any to do.
    pub(crate) fn scope(&self, device: Device) -> Result<Option<Autocast>> {
        match self.autocast {
            AutocastOptions { precision: Precision::No, .. } => Ok(None),
            AutocastOptions { precision, cache } => {
                Ok(Some(Autocast::enter(device, precision.kind(), cache)?))
            }
        }
    }

    /// A forward's outputs for the loss.
    pub(crate) fn outputs<T: TensorTree<Owned = T>>(&self, outputs: T) -> Result<T> {
        if self.autocast.precision == Precision::No || !self.float32_outputs {
            return Ok(outputs);
        }
        outputs.try_map(&mut |tensor| {
            Ok(match tensor.f_kind()? {
                Kind::Half | Kind::BFloat16 => tensor.f_to_kind(Kind::Float)?,
                _ => tensor.shallow_clone(),
            })
        })
    }
}

/// Returns a warning about this precision on this device.
pub(crate) fn caveat(precision: Precision, device: Device) -> Option<String> {
    if device == Device::Cpu {
        let cpu = std::fs::read_to_string("/proc/cpuinfo").ok()?;
        return cpu_caveat(precision, &cpu).map(str::to_owned);
    }
    let (kind, index) = device.device_kind()?;
    let slow = precision == Precision::Bf16 && matches!(kind.has_bf16(index), Ok(false));
    slow.then(|| {
        "this GPU computes bf16 without its matrix units, slower than fp16; use fp16".into()
    })
}

/// From the text of Linux's `/proc/cpuinfo`. `None` for a CPU whose flags it does not list.
fn cpu_caveat(precision: Precision, cpuinfo: &str) -> Option<&'static str> {
    let flags = cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| matches!(key.trim(), "flags" | "Features"))
        .map(|(_, flags)| flags)?;
    let has = |wanted: &[&str]| flags.split_whitespace().any(|flag| wanted.contains(&flag));
    match precision {
        Precision::Bf16 if !has(&["avx512_bf16", "amx_bf16", "bf16"]) => Some(
            "this CPU has no instructions for bf16 (AVX512_BF16, AMX), so bf16 is slower than 32 bits",
        ),
        Precision::Fp16 if !has(&["avx512_fp16", "amx_fp16", "fphp"]) => Some(
            "this CPU has no instructions for fp16 (AVX512_FP16, AMX), so fp16 is slower than 32 bits; \
             use bf16, or fp16 to try things out",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_accelerates() {
        for precision in [Precision::No, Precision::Fp16, Precision::Bf16] {
            assert_eq!(precision.to_string().parse::<Precision>().unwrap(), precision);
        }
        let error = "fp61".parse::<Precision>().unwrap_err().to_string();
        assert!(error.contains("fp61") && error.contains("no, fp16 or bf16"), "{error}");
        assert!("fp8".parse::<Precision>().unwrap_err().to_string().contains("use bf16"));
    }

    #[test]
    fn a_cpu_without_the_instructions_gets_a_warning() {
        let zen5 = "model name\t: AMD EPYC\nflags\t\t: fpu avx512f avx512_bf16 sse\n";
        let sapphire = "flags\t: fpu amx_bf16 avx512_bf16 avx512_fp16\n";
        let old = "flags\t: fpu avx2\n";
        let arm = "Features\t: fp asimd fphp bf16\n";
        assert_eq!(cpu_caveat(Precision::Bf16, zen5), None);
        assert_eq!(cpu_caveat(Precision::Bf16, arm), None);
        assert_eq!(cpu_caveat(Precision::Fp16, sapphire), None);
        assert_eq!(cpu_caveat(Precision::No, old), None);
        assert!(cpu_caveat(Precision::Bf16, old).unwrap().contains("AVX512_BF16"));
        assert!(cpu_caveat(Precision::Fp16, zen5).unwrap().contains("AVX512_FP16"));
        assert_eq!(cpu_caveat(Precision::Bf16, "no flags here"), None);
    }
}
