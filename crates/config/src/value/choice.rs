//! Values that are one of a few words.

use std::fmt;
use std::str::FromStr;

/// Defines enums of words. The case is ignored: Accelerate writes some words in capitals.
macro_rules! choices {
    ($(
        $(#[$doc:meta])*
        $name:ident, $expected:literal {
            $($(#[$of:meta])* $variant:ident = $word:literal $(| $also:literal)*,)*
        }
    )*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$of])* $variant,)*
        }

        impl $name {
            /// All words, in order.
            pub const WORDS: &[&str] = &[$($word,)*];

            /// Returns the word of this variant.
            #[must_use]
            pub fn word(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }
        }

        impl FromStr for $name {
            type Err = ();

            fn from_str(text: &str) -> Result<Self, ()> {
                match text.to_ascii_lowercase().as_str() {
                    $($word $(| $also)* => Ok(Self::$variant),)*
                    _ => Err(()),
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.word())
            }
        }

        super::words! {
            $name: $expected, Self::WORDS;
        }
    )*};
}

choices! {
    /// Backend of the rendezvous, by which the hosts of a job find each other.
    Backend, "builtin, static or etcd" {
        /// Rendezvous server built into the launcher, for the purpose of torchrun's `c10d`.
        Builtin = "builtin" | "c10d",
        /// Hosts with fixed ranks, and an address of the first host that all of them have.
        Static = "static",
        /// Rendezvous through an etcd cluster.
        Etcd = "etcd" | "etcd-v2",
    }

    /// Data type of a model's computations.
    Precision, "no, fp16, bf16 or fp8" {
        /// Type of the model's parameters.
        No = "no",
        /// IEEE half precision, with a gradient scaler.
        Fp16 = "fp16",
        /// Brain floating point: the upper 16 bits of a 32-bit float.
        Bf16 = "bf16",
        /// 8-bit floating point, in Python programs that use Accelerate. Brigade has no kernels for it.
        Fp8 = "fp8",
    }

    /// Backend of `torch.compile`, by Accelerate's names.
    DynamoBackend, "no, or a backend of torch.compile such as inductor" {
        /// No compilation.
        No = "no",
        /// Traced graph, executed without a compiler.
        Eager = "eager",
        /// Traced graph with AOT autograd, executed without a compiler.
        AotEager = "aot_eager",
        /// PyTorch's own compiler.
        Inductor = "inductor",
        /// nvFuser with AOT autograd and TorchScript.
        AotTsNvfuser = "aot_ts_nvfuser",
        /// nvFuser by way of PrimTorch.
        NvprimsNvfuser = "nvprims_nvfuser",
        /// CUDA graphs with AOT autograd.
        Cudagraphs = "cudagraphs",
        /// TorchScript's `optimize_for_inference`.
        Ofi = "ofi",
        /// TensorRT, by way of FX.
        Fx2trt = "fx2trt",
        /// ONNX Runtime, for inference.
        Onnxrt = "onnxrt",
        /// TensorRT, by way of ONNX.
        Tensorrt = "tensorrt",
        /// Torch/XLA with AOT autograd. The misspelled word is the one that Accelerate's questionnaire wrote.
        AotTorchxlaTraceOnce = "aot_torchxla_trace_once",
        /// Torch/XLA without AOT autograd.
        TorchxlaTraceOnce = "torchxla_trace_once" | "torhchxla_trace_once",
        /// Apache TVM, for inference.
        Tvm = "tvm",
        /// Intel Gaudi accelerators.
        HpuBackend = "hpu_backend",
        /// AWS Neuron accelerators.
        Neuron = "neuron",
    }

    /// Optimisation mode of `torch.compile`.
    DynamoMode, "default, reduce-overhead or max-autotune" {
        /// Short compilation, without additional memory.
        Default = "default",
        /// CUDA graphs, for small batches.
        ReduceOverhead = "reduce-overhead",
        /// Benchmarks of kernels, of which the fastest are used.
        MaxAutotune = "max-autotune",
    }
}
