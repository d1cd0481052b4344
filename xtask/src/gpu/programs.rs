//! Which programs run on a GPU.

/// Packages with tests that take their tensors' device from `brigade-gpukit`, or are of GPUs alone: cargo's name, the
/// folder, and the test programs. In this order they run, those first whose results no CPU has shown.
///
/// Without those of `brigade-gpukit`: its GPUs made of host memory have no place in a program that is linked with CUDA.
pub(super) const TESTS: &[(&str, &str, &[&str])] = &[
    (
        "brigade-train",
        "crates/train",
        &[
            "gpu",
            "data_on_gpu",
            "torch_losses",
            "numerics",
            "accumulate",
            "checkpoint",
            "sync_batch_norm",
            "comm_hooks",
            "metrics",
            "own_models",
            "uneven",
            "without_gpu",
        ],
    ),
    ("brigade-vision", "crates/vision", &["device"]),
    ("brigade-learn", "crates/learn", &["device"]),
    ("brigade-optim", "crates/optim", &["optimizers"]),
    (
        "brigade-nn",
        "crates/nn",
        &["layers", "lstm", "model", "own_models", "weights", "seed", "layer_groups"],
    ),
    (
        "brigade-models",
        "crates/models",
        &["awd_lstm", "cnn", "golden", "resnet", "seed", "transfer", "transformers"],
    ),
    ("brigade-torch", "crates/torch", &["nccl", "dropped", "dist"]),
];

/// Those that also run where there is no GPU, by their names in the report: seconds, on one processor.
pub(super) const SHORT: &[&str] = &["nn::layers", "optim::optimizers", "torch::dropped"];

/// Programs besides tests: cargo's name of the package, the folder and the program.
pub(super) const PROGRAMS: &[(&str, &str, &str)] = &[
    ("brigade-selftest", "crates/selftest", "brigade-selftest"),
    ("brigade-bench", "bench", "brigade-bench"),
    ("brigade-cli", "crates/cli", "brigade"),
];

/// The runner, which is one for all builds.
pub(super) const RUNNER: (&str, &str) = ("brigade-gpu", "brigade-gpu");

/// What tests and benchmarks read, from the root of the checkout. Programs run in the root of the folder.
pub(super) const FILES: &[&str] = &[
    "bench/peers",
    "crates/checkpoint/tests/fixtures",
    "crates/models/tests/fixtures",
    "crates/models/tests/golden",
    "crates/nn/tests/fixtures",
    "crates/optim/tests/golden",
    "crates/torch/tests/golden",
    "crates/train/tests/fixtures",
    "crates/train/tests/golden",
];
