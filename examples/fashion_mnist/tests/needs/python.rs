//! A Rust rank and a Python rank in one group, under the real torchrun and under `brigade launch`: the
//! weights they train are those of two Rust ranks.
//!
//! The Python is that in BRIGADE_PEER_PYTHON, or that of `cargo xtask install pytorch`.

use std::path::Path;
use std::process::Command;

use brigade::data::{BatchedDataset, DataLoader};
use brigade::datasets::{Digits, LabelledImages};
use brigade::nn::weights;
use brigade::sampling::ShardOptions;
use brigade::tch::{Kind, Tensor};
use brigade_test_needs::{Need, needs};
use serde_json::json;

use crate::programs::{EXAMPLE, accuracies, brigade, succeed};

const SEED: u64 = 42;
const BATCH_SIZE: usize = 64;
const EPOCHS: u64 = 2;

#[needs(Pytorch)]
fn dist_rust_and_python_ranks_train_one_model() {
    let python = brigade_test_needs::python(Need::Pytorch).unwrap();
    let folder = tempfile::tempdir().unwrap();
    write_rank_1s_batches(folder.path());
    let file = |name: &str| folder.path().join(name).with_extension("safetensors");
    let epochs = EPOCHS.to_string();
    let options = |name: &str| {
        let save = file(name).to_string_lossy().into_owned();
        // In channels_last, ours has an operation that PyTorch lacks: equal to rounding only.
        ["--nchw", "--epochs", &epochs, "--save", &save].map(str::to_owned)
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mixed.py");
    let common = |command: &mut Command| {
        command
            .env("OMP_NUM_THREADS", "1")
            // Brigade asks MKL for sums that do not depend on where operands lie in memory; PyTorch does not.
            .env("MKL_CBWR", "COMPATIBLE")
            .env("BRIGADE_EXAMPLE", EXAMPLE)
            .env("BRIGADE_BATCHES", folder.path());
    };

    let mut command = Command::new(brigade());
    common(command.args(["launch", "--nproc", "2", EXAMPLE]).args(options("rust")));
    let rust = accuracies(&succeed(&mut command));

    let mut command = Command::new(&python);
    command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]);
    common(command.arg(&script).args(options("torchrun")));
    let torchrun = accuracies(&succeed(&mut command));

    let mut command = Command::new(brigade());
    command.args(["launch", "--nproc", "2", "--"]).arg(&python).arg(&script);
    common(command.args(options("launched")));
    let launched = accuracies(&succeed(&mut command));

    // Both of PyTorch's ranks compute the same. Its fused Adam rounds other elements than ours, so that these differ from
    // the run without it as two runs of another rounding do.
    assert_eq!(torchrun, launched);
    for (found, expected) in torchrun.iter().zip(&rust) {
        assert!((found - expected).abs() <= 2.0, "{torchrun:?} {rust:?}");
    }
    let expected = weights::load(file("rust")).unwrap();
    for mixed in ["torchrun", "launched"] {
        let found = weights::load(file(mixed)).unwrap();
        // Batch norm takes the bias of a convolution away: its gradient is rounding alone, which Adam makes steps of.
        let is_noise = |name: &str| name.ends_with(".0.bias") || name.ends_with("running_mean");
        for (name, tensor) in expected.iter().filter(|(name, _)| !is_noise(name)) {
            let other = found.get(name).unwrap();
            let norm = |tensor: &Tensor| tensor.to_kind(Kind::Double).norm().double_value(&[]);
            let distance = norm(&(tensor - other)) / norm(tensor).max(1e-12);
            assert!(distance <= 0.005, "{mixed}: {name} differs by {distance} of its norm");
        }
    }
}

/// `accelerate launch --cpu` starts several processes through mpirun only.
#[needs(OpenMpi, Pytorch)]
fn dist_accelerate_launch_starts_the_example() {
    let python = brigade_test_needs::python(Need::Pytorch).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let hostfile = folder.path().join("hosts");
    std::fs::write(&hostfile, "localhost slots=2\n").unwrap();
    let program = [EXAMPLE, "--epochs", "1", "--log-losses"];
    let mut command = Command::new(brigade());
    let expected =
        succeed(command.args(["launch", "--nproc", "2"]).args(program).env("OMP_NUM_THREADS", "1"));

    let mut command = Command::new(python);
    command.args(["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]);
    command.args(["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]);
    command.arg("--mpirun_hostfile").arg(&hostfile).arg("--no_python").args(program);
    // Open MPI does not run for root unless it is told so twice.
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let found = succeed(command.env("OMP_NUM_THREADS", "1"));
    assert_eq!(accuracies(&found), accuracies(&expected));
    assert_eq!(found.lines().filter(|it| it.contains("loss =")).count(), 2, "{found}");
}

/// Rank 1's images and labels, batch by batch, as the Python rank will train on them.
fn write_rank_1s_batches(folder: &Path) {
    let (train, test) = (
        Digits::train().unwrap().resize(28, 28).unwrap(),
        Digits::test().unwrap().resize(28, 28).unwrap(),
    );
    for (name, images, shuffle) in [("train", train, true), ("test", test, false)] {
        let all: Vec<usize> = (0..images.len()).collect();
        let batch = images.batch(&all, &Default::default()).unwrap();
        let (pixels, labels): (Tensor, Tensor) = batch;
        write(
            folder,
            &format!("{name}.images"),
            &brigade::torch::elements::<f32>(&pixels).unwrap().to_vec(),
        );
        write(
            folder,
            &format!("{name}.labels"),
            &brigade::torch::elements::<i64>(&labels).unwrap().to_vec(),
        );
        let epochs: Vec<Vec<(Vec<usize>, usize)>> =
            (0..EPOCHS).map(|epoch| batches(images_again(name), shuffle, epoch)).collect();
        std::fs::write(folder.join(format!("{name}.json")), json!(epochs).to_string()).unwrap();
    }
}

fn images_again(name: &str) -> LabelledImages {
    if name == "train" { Digits::train().unwrap() } else { Digits::test().unwrap() }
}

/// Returns the samples of each batch of rank 1, and how many of them do not only complete the batch.
fn batches(images: LabelledImages, shuffle: bool, epoch: u64) -> Vec<(Vec<usize>, usize)> {
    let loader = DataLoader::new(images)
        .batch_size(BATCH_SIZE)
        .shuffle(shuffle)
        .seed(SEED)
        .shard(1, 2, ShardOptions::default())
        .unwrap();
    loader.plan(epoch).unwrap().rank(1).map(|batch| (batch.indices, batch.valid)).collect()
}

trait Number: Copy {
    fn bytes(self) -> Vec<u8>;
}

impl Number for f32 {
    fn bytes(self) -> Vec<u8> {
        self.to_le_bytes().to_vec()
    }
}

impl Number for i64 {
    fn bytes(self) -> Vec<u8> {
        self.to_le_bytes().to_vec()
    }
}

fn write(folder: &Path, name: &str, numbers: &[impl Number]) {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.bytes()).collect();
    std::fs::write(folder.join(name), bytes).unwrap();
}
