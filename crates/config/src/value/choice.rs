//! Values that are one of a few words.

use std::fmt;
use std::str::FromStr;

/// An enum of words. Case does not count: Accelerate writes some of them in capitals.
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
            /// Every word, in order.
            pub const WORDS: &[&str] = &[$($word,)*];

            /// The word for it.
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
    /// How the hosts of a job find each other.
    Backend, "builtin, static or etcd" {
        /// A rendezvous server built into the launcher; what torchrun's `c10d` is for.
        Builtin = "builtin" | "c10d",
        /// Ranks of hosts given by hand, the first one's address known to all.
        Static = "static",
        /// An etcd cluster decides.
        Etcd = "etcd" | "etcd-v2",
    }

    /// In which type a model is computed.
    Precision, "no, fp16, bf16 or fp8" {
        /// In that of its parameters.
        No = "no",
        /// IEEE half precision, with a gradient scaler.
        Fp16 = "fp16",
        /// The first 16 bits of a float.
        Bf16 = "bf16",
        /// Eight bits: Accelerate has it, Brigade does not.
        Fp8 = "fp8",
    }

    /// Accelerate's names of the compilers behind `torch.compile`.
    DynamoBackend, "no, or a backend of torch.compile such as inductor" {
        /// Do not compile.
        No = "no",
        /// Traces, and runs the traces as they are.
        Eager = "eager",
        /// The same with autograd.
        AotEager = "aot_eager",
        /// PyTorch's own compiler.
        Inductor = "inductor",
        /// nvFuser with AOT autograd and TorchScript.
        AotTsNvfuser = "aot_ts_nvfuser",
        /// nvFuser by way of PrimTorch.
        NvprimsNvfuser = "nvprims_nvfuser",
        /// CUDA graphs.
        Cudagraphs = "cudagraphs",
        /// TorchScript's `optimize_for_inference`.
        Ofi = "ofi",
        /// TensorRT, by way of FX.
        Fx2trt = "fx2trt",
        /// ONNX Runtime.
        Onnxrt = "onnxrt",
        /// TensorRT, by way of ONNX.
        Tensorrt = "tensorrt",
        /// Torch/XLA with AOT autograd. The misspelt word is what Accelerate's questionnaire wrote.
        AotTorchxlaTraceOnce = "aot_torchxla_trace_once",
        /// Torch/XLA.
        TorchxlaTraceOnce = "torchxla_trace_once" | "torhchxla_trace_once",
        /// Apache TVM.
        Tvm = "tvm",
        /// Intel Gaudi.
        HpuBackend = "hpu_backend",
        /// AWS Neuron.
        Neuron = "neuron",
    }

    /// How hard `torch.compile` tries.
    DynamoMode, "default, reduce-overhead or max-autotune" {
        /// Compiles quickly, without extra memory.
        Default = "default",
        /// CUDA graphs for small batches.
        ReduceOverhead = "reduce-overhead",
        /// Measures which kernels are fastest.
        MaxAutotune = "max-autotune",
    }
}
