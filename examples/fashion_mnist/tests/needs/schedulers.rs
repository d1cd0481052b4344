//! The example under real schedulers, on two hosts in namespaces: Slurm's `srun` and Open MPI's
//! `mpirun` start it with no word about ranks, and it trains the model that `brigade launch` trains.

use std::fs;
use std::path::Path;
use std::process::Command;

use brigade_test_needs::needs;

use crate::cluster::Cluster;
use crate::programs::{EXAMPLE, accuracies, brigade, succeed};

/// One epoch is enough to see that both ranks train one model.
const SHORT: [&str; 4] = ["--epochs", "1", "--log-losses", "--save"];

/// What two ranks that `brigade launch` starts reach, and the weights that they write.
fn launched(folder: &Path) -> (Vec<f64>, Vec<u8>) {
    let file = folder.join("launched.safetensors");
    let mut command = Command::new(brigade());
    command.args(["launch", "--nproc", "2", EXAMPLE]).args(SHORT).arg(&file);
    let text = succeed(command.env("OMP_NUM_THREADS", "1"));
    (accuracies(&text), fs::read(file).unwrap())
}

/// The same from two ranks that these words start in the cluster, one on each host.
fn train(cluster: &Cluster, words: &str) -> (Vec<f64>, Vec<u8>) {
    let file = cluster.folder().join("weights.safetensors");
    let start = ["env", "OMP_NUM_THREADS=1"].into_iter().chain(words.split_whitespace());
    let program = [EXAMPLE].into_iter().chain(SHORT).chain([file.to_str().unwrap()]);
    let run = cluster.run(&start.chain(program).collect::<Vec<_>>());
    assert_eq!(run.code, 0, "{words}: {}{}", run.stdout, run.stderr);
    let losses = run.stdout.lines().filter(|line| line.contains("loss ="));
    assert_eq!(losses.count(), 2, "every rank logs its own loss:\n{}", run.stdout);
    (accuracies(&run.stdout), fs::read(file).unwrap())
}

/// The first rank of each host prints the accuracy of all.
fn both(expected: &[f64]) -> [f64; 2] {
    assert_eq!(expected.len(), 1, "one epoch on one host");
    [expected[0]; 2]
}

#[needs(Slurm)]
fn dist_srun_starts_the_example() {
    let cluster = Cluster::slurm();
    let (expected, weights) = launched(cluster.folder());
    let (accuracy, found) = train(&cluster, "srun -N2 -n2");
    assert_eq!(accuracy, both(&expected));
    assert!(found == weights, "the same ranks give the same weights, bit for bit");
}

#[needs(OpenMpi)]
fn dist_mpirun_starts_the_example() {
    let cluster = Cluster::bare();
    let (expected, weights) = launched(cluster.folder());
    let ssh = cluster.folder().join("ssh");
    let words = format!(
        "mpirun --mca plm_rsh_agent {} -x FOLDER -x OMP_NUM_THREADS --host node1:1,node2:1 -np 2",
        ssh.display()
    );
    let (accuracy, found) = train(&cluster, &words);
    assert_eq!(accuracy, both(&expected));
    assert!(found == weights, "the same ranks give the same weights, bit for bit");
}
