//! Mixed precision: the type of autocast, and the loss scale with fp16.

pub(crate) mod memory_format;
pub(crate) mod scaler;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use brigade_checkpoint::Dtype;
use brigade_sharding::Sharding;
use brigade_torch::{Autocast, DeviceExt, Error, GpuMath, Result, TensorTree, dtype_of, kind_of};
use tch::{Device, Kind};

use crate::job::Job;
use crate::precision::scaler::{GradScaler, GradScalerOptions};

/// The floating-point type in which autocast computes. Weights, gradients and the optimizer stay in 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Precision {
    /// The model's own types, without autocast.
    #[default]
    No,
    /// Half precision (fp16): 16 bits with 5 for the exponent. Small gradients would underflow, so [`GradScaler`]
    /// scales the loss.
    Fp16,
    /// bfloat16: 16 bits with the exponent range of float32. Needs no loss scaling.
    Bf16,
}

impl Precision {
    pub(crate) fn kind(self) -> Kind {
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

    /// Parses the values of Accelerate's `mixed_precision`.
    ///
    /// ```
    /// use brigade_train::Precision;
    /// assert_eq!("bf16".parse::<Precision>()?, Precision::Bf16);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    fn from_str(text: &str) -> Result<Self> {
        match text.to_ascii_lowercase().as_str() {
            "no" => Ok(Self::No),
            "fp16" => Ok(Self::Fp16),
            "bf16" => Ok(Self::Bf16),
            "fp8" => Err(Error::invalid_argument(
                "mixed precision fp8 needs kernels that Brigade does not have; use bf16",
            )),
            other => Err(Error::invalid_argument(format!(
                "mixed precision is {other:?}, expected no, fp16 or bf16"
            ))),
        }
    }
}

/// Options of a scope of autocast, for [`crate::AutocastOptions::run`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AutocastOptions {
    /// Floating-point type of the scope. [`Precision::No`] turns autocast off within the scope.
    pub precision: Precision,
    /// `true` if a weight that several operations of the scope use is cast only once. Must be `false` if weights change
    /// within the scope.
    pub cache: bool,
}

impl AutocastOptions {
    /// Runs the body in a scope of autocast on a device: for programs without an Accelerator.
    ///
    /// ```
    /// use brigade_train::{AutocastOptions, Precision};
    /// use tch::{Device, Kind, Tensor};
    /// let weight = Tensor::ones([4, 4], (Kind::Float, Device::Cpu));
    /// let bf16 = AutocastOptions { precision: Precision::Bf16, cache: true };
    /// assert_eq!(bf16.run(Device::Cpu, || weight.matmul(&weight))?.kind(), Kind::BFloat16);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Tensor`] when the device has no autocast.
    pub fn run<R>(self, device: Device, body: impl FnOnce() -> R) -> Result<R> {
        let _scope = Autocast::enter(device, self.precision.kind(), self.cache)?;
        Ok(body())
    }
}

/// The Accelerator's settings of precision. Shared by everything that was prepared.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Numerics {
    pub(crate) autocast: AutocastOptions,
    pub(crate) float32_outputs: bool,
    /// Type of the outputs, if the sharding sets one.
    pub(crate) output: Option<Kind>,
    /// `true` if convolutional models are converted to channels last. `None` chooses the faster format.
    pub(crate) channels_last: Option<bool>,
    /// `true` if GPUs compute products of float32 tensors in TF32.
    pub(crate) tf32: bool,
}

/// Options of [`Numerics`] set by the builder.
#[derive(Debug, Clone)]
pub(crate) struct NumericsOptions {
    pub(crate) precision: Option<Precision>,
    pub(crate) cache: bool,
    pub(crate) float32_outputs: bool,
    pub(crate) output: Option<Kind>,
    pub(crate) channels_last: Option<bool>,
    pub(crate) scaler: GradScalerOptions,
    pub(crate) math: MathOptions,
}

/// Settings of the whole process. `None` leaves a setting unchanged.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MathOptions {
    pub(crate) tf32: Option<bool>,
    pub(crate) benchmark: Option<bool>,
    pub(crate) deterministic: Option<bool>,
}

impl MathOptions {
    /// Applies the settings, for the first Accelerator of a job or a further one, and returns `true` if GPUs then
    /// compute in TF32.
    pub(crate) fn apply(self, first: bool, device: Device) -> Result<bool> {
        let Self { tf32, benchmark, deterministic } = self;
        let before = GpuMath::current()?;
        if !device.has_streams() {
            // libtorch may round products to TF32 on some CPUs, too. That is not enabled here.
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
            output: None,
            channels_last: None,
            scaler: GradScalerOptions::default(),
            math: MathOptions::default(),
        }
    }
}

impl NumericsOptions {
    /// Makes the type of autocast and that of sharded parameters agree: if only one of them is set, the other follows
    /// it. Inputs and losses are of 32 bits, so operations of 16-bit parameters run under autocast.
    pub(crate) fn with_sharding(&mut self, mut sharding: Sharding) -> Result<Sharding> {
        let precision = match self.precision {
            Some(precision) => precision,
            None => from_env()?.unwrap_or_default(),
        };
        let of_parameters = match sharding.mixed.param {
            Some(Dtype::BF16) => Precision::Bf16,
            Some(Dtype::F16) => Precision::Fp16,
            Some(_) | None => Precision::No,
        };
        match (precision, sharding.mixed.param) {
            (Precision::No, _) => self.precision = Some(of_parameters),
            (precision, None) => sharding.mixed.param = dtype_of(precision.kind()),
            (precision, Some(_)) if precision == of_parameters => {}
            (precision, Some(dtype)) => {
                return Err(Error::invalid_argument(format!(
                    "mixed precision is {precision}, but sharding gathers parameters in {dtype}: name one type, in \
                     `mixed_precision` or in `Sharding::mixed`"
                )));
            }
        }
        self.output = sharding.mixed.output.and_then(kind_of);
        Ok(sharding)
    }

    /// Returns the settings, and with fp16 the loss scaler.
    pub(crate) fn decide(
        &self,
        job: &Arc<Job>,
        tf32: bool,
    ) -> Result<(Numerics, Option<GradScaler>)> {
        let precision = match self.precision {
            Some(precision) => precision,
            None => from_env()?.unwrap_or_default(),
        };
        let scaler = match precision {
            Precision::Fp16 => Some(GradScaler::for_ranks(self.scaler, Some(Arc::clone(job)))?),
            _ => None,
        };
        let numerics = Numerics {
            autocast: AutocastOptions { precision, cache: self.cache },
            float32_outputs: self.float32_outputs,
            output: self.output,
            channels_last: self.channels_last,
            tf32,
        };
        Ok((numerics, scaler))
    }
}

fn is_floating_point(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double)
}

fn from_env() -> Result<Option<Precision>> {
    use brigade_rank_env::env::ACCELERATE_MIXED_PRECISION as NAME;
    match std::env::var(NAME) {
        Ok(text) if !text.is_empty() => {
            let with_name = |error| Error::invalid_argument(format!("{NAME}: {error}"));
            text.parse().map(Some).map_err(with_name)
        }
        _ => Ok(None),
    }
}

impl Numerics {
    /// Enables autocast for a forward, if it changes anything. With `keeps_casts` a weight that several operations use is
    /// cast once, where the options allow it, and the cast weight takes memory until the end of the scope.
    pub(crate) fn scope(&self, device: Device, keeps_casts: bool) -> Result<Option<Autocast>> {
        match self.autocast {
            AutocastOptions { precision: Precision::No, .. } => Ok(None),
            AutocastOptions { precision, cache } => {
                Ok(Some(Autocast::enter(device, precision.kind(), cache && keeps_casts)?))
            }
        }
    }

    /// Converts a forward's outputs to the type that the loss gets.
    pub(crate) fn outputs<T: TensorTree<Owned = T>>(&self, outputs: T) -> Result<T> {
        let converts = self.autocast.precision != Precision::No && self.float32_outputs;
        if !converts && self.output.is_none() {
            return Ok(outputs);
        }
        outputs.try_map(&mut |tensor| {
            Ok(match (tensor.f_kind()?, self.output) {
                (kind, Some(output)) if is_floating_point(kind) => tensor.f_to_kind(output)?,
                (_, Some(_)) => tensor.shallow_clone(),
                (Kind::Half | Kind::BFloat16, None) => tensor.f_to_kind(Kind::Float)?,
                (_, None) => tensor.shallow_clone(),
            })
        })
    }
}

/// Returns a warning if this device is slow in this precision.
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

/// Returns a warning about a CPU without native instructions for the precision, from the text of Linux's
/// `/proc/cpuinfo`. `None` if they exist, or if the file lists no flags.
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
