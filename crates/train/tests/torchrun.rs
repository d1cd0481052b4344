//! Brigade's ranks under the real torchrun: attempts after failures, and ranks of Python's in the same
//! group.

#![allow(clippy::unwrap_used)] // also in what the tests share

use std::net::TcpListener;
use std::process::{Command, Output};
use std::time::Duration;

use brigade_suite::Need;
use brigade_torch::{ReduceOp, Tensor};
use brigade_train::Accelerator;

brigade_suite::suite! {
    part rank;
    needs Pytorch:
        the_static_rendezvous_restarts_ranks_that_failed,
        the_c10d_rendezvous_restarts_ranks_that_failed,
        ranks_of_pythons_and_ours_are_one_group;
}

/// How many attempts fail before one succeeds.
const FAILURES: u32 = 3;

/// A rank of a job of two: adds up, fails as rank 1 in the first attempts, and adds up once more.
fn rank() {
    let attempt: u32 = variable("TORCHELASTIC_RESTART_COUNT").parse().unwrap();
    let failures: u32 = variable("FAILURES").parse().unwrap();
    let accelerator =
        Accelerator::builder().cpu(true).timeout(Duration::from_secs(60)).build().unwrap();
    let rank = accelerator.process_index();
    let mut sum = Tensor::from_slice(&[rank as f32 + 1.0]);
    let group = accelerator.group().unwrap();
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum.double_value(&[0]), 3.0);
    if rank == 1 && attempt < failures {
        std::process::exit(3);
    }
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    say(&format!("rank {rank}, attempt {attempt}: {}", sum.double_value(&[0])));
}

/// In one piece: the ranks have the same output.
fn say(line: &str) {
    use std::io::Write;
    std::io::stdout().write_all(format!("{line}\n").as_bytes()).unwrap();
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap()
}

/// The same as a rank of Python's.
const PYTHON: &str = "\
import os, torch, torch.distributed as dist
dist.init_process_group('gloo')
sum = torch.ones(1) + dist.get_rank()
dist.all_reduce(sum)
assert sum.item() == 3
dist.all_reduce(sum)
print(f'rank {dist.get_rank()}, attempt 0: {sum.item():g}', flush=True)
dist.destroy_process_group()
";

/// Starts two ranks with these words of torchrun's, each by a line of `sh` that has this test program as
/// `$0` and Python as `$1`.
fn torchrun(words: &[&str], failures: u32, line: &str) -> Output {
    let python = brigade_suite::python(Need::Pytorch).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(&python);
    command.args(["-m", "torch.distributed.run", "--nproc-per-node=2", "--monitor-interval=0.1"]);
    command.args(words).args(["--no-python", "sh", "-c", line]);
    command.arg(std::env::current_exe().unwrap()).arg(&python);
    command.env("FAILURES", failures.to_string()).env("OMP_NUM_THREADS", "1");
    command.env("CUDA_VISIBLE_DEVICES", "").env("PYTHON_RANK", PYTHON).env("TMPDIR", folder.path());
    command.output().unwrap()
}

const OURS: &str = "exec \"$0\" --part rank";

fn succeeds(output: &Output, attempt: u32) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}: {stdout}{stderr}", output.status);
    let mut lines: Vec<&str> = stdout.lines().filter(|it| it.starts_with("rank ")).collect();
    lines.sort_unstable();
    let expected = [0, 1].map(|rank| format!("rank {rank}, attempt {attempt}: 6"));
    assert_eq!(lines, expected, "{stderr}");
}

/// A port that was free a moment ago, and that no program is given that asks for any.
fn static_rendezvous() -> String {
    let port = loop {
        let port = brigade_suite::random().u16(20_000..30_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            break port;
        }
    };
    format!("--master-port={port}")
}

fn the_static_rendezvous_restarts_ranks_that_failed() {
    let restarts = format!("--max-restarts={FAILURES}");
    succeeds(&torchrun(&[&static_rendezvous(), &restarts], FAILURES, OURS), FAILURES);
}

fn the_c10d_rendezvous_restarts_ranks_that_failed() {
    let restarts = format!("--max-restarts={FAILURES}");
    succeeds(&torchrun(&["--standalone", &restarts], FAILURES, OURS), FAILURES);
}

fn ranks_of_pythons_and_ours_are_one_group() {
    for pythons in ["0", "1"] {
        let python = format!("[ $RANK = {pythons} ] && exec \"$1\" -c \"$PYTHON_RANK\"; {OURS}");
        succeeds(&torchrun(&[&static_rendezvous()], 0, &python), 0);
        succeeds(&torchrun(&["--standalone"], 0, &python), 0);
    }
}
