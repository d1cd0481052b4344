//! Which programs run on a GPU.

/// Packages with tests that compare numbers: cargo's name, the folder, and the test programs.
///
/// Without those of `brigade-gpukit`: its GPUs made of host memory have no place in a program that is linked with CUDA.
pub(super) const TESTS: &[(&str, &str, &[&str])] = &[
    ("brigade-torch", "crates/torch", &["dist", "dropped", "nccl", "threads"]),
    ("brigade-optim", "crates/optim", &["optimizers"]),
    (
        "brigade-nn",
        "crates/nn",
        &["layers", "lstm", "model", "own_models", "weights", "seed", "layer_groups"],
    ),
    (
        "brigade-train",
        "crates/train",
        &[
            "numerics",
            "accumulate",
            "checkpoint",
            "checkpoint_worlds",
            "comm_hooks",
            "data_on_gpu",
            "extending",
            "from_accelerate",
            "gpu",
            "metrics",
            "own_models",
            "prepare",
            "reproducible",
            "scopes",
            "struct_batches",
            "sync_batch_norm",
            "trainable",
            "uneven",
            "without_gpu",
        ],
    ),
    (
        "brigade-models",
        "crates/models",
        &[
            "awd_lstm",
            "cnn",
            "golden",
            "resnet",
            "seed",
            "transfer",
            "transformers",
            "transformers_seed",
        ],
    ),
    ("brigade-vision", "crates/vision", &["augment", "dataset", "device", "segmentation"]),
    ("brigade-data", "crates/data", &["loader"]),
    ("brigade-learn", "crates/learn", &["device", "golden", "learner", "losses", "metrics"]),
    ("brigade-text", "crates/text", &["collate", "learners"]),
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
    "crates/learn/tests/golden",
    "crates/models/tests/fixtures",
    "crates/models/tests/golden",
    "crates/nn/tests/fixtures",
    "crates/optim/tests/golden",
    "crates/text/tests/golden",
    "crates/torch/tests/golden",
    "crates/train/tests/fixtures",
    "crates/train/tests/golden",
    "crates/vision/tests/golden",
];
