//! Brigade's ranks under the real torchrun: attempts after failures, and ranks of Python's in the same
//! group.

use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use brigade_test_needs::{Need, needs, part};
use brigade_torch::{ProcessGroup, ReduceOp};
use brigade_train::{Accelerator, ConnectOptions, Processes};
use tch::Tensor;

/// How many attempts fail before one succeeds.
const FAILURES: u32 = 3;

/// A rank of a job of two: adds up, fails in the first attempts where it is the last rank of its host,
/// and adds up once more.
#[allow(clippy::exit)] // as a rank that a fault ends: nothing is closed in order
#[part]
fn rank() {
    let attempt: u32 = variable("TORCHELASTIC_RESTART_COUNT").parse().unwrap();
    let failures: u32 = variable("FAILURES").parse().unwrap();
    let local: u32 = variable("LOCAL_RANK").parse().unwrap();
    let is_last = local + 1 == variable("LOCAL_WORLD_SIZE").parse::<u32>().unwrap();
    let accelerator =
        Accelerator::builder().cpu(true).timeout(Duration::from_secs(60)).build().unwrap();
    let rank = accelerator.processes().process_index();
    let mut sum = Tensor::from_slice(&[rank as f32 + 1.0]);
    let group = accelerator.processes().group().unwrap();
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum.double_value(&[0]), 3.0);
    if is_last && attempt < failures {
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

/// torchrun with these words; each rank is started by a line of `sh` that has this test program as `$0` and
/// Python as `$1`.
fn torchrun(words: &[&str], failures: u32, line: &str) -> Command {
    let python = brigade_test_needs::python(Need::Pytorch).unwrap();
    let mut command = Command::new(&python);
    command.args(["-m", "torch.distributed.run", "--monitor-interval=0.1"]);
    command.args(words).args(["--no-python", "sh", "-c", line]);
    command.arg(std::env::current_exe().unwrap()).arg(&python);
    command.env("FAILURES", failures.to_string()).env("OMP_NUM_THREADS", "1");
    command.env("CUDA_VISIBLE_DEVICES", "").env("PYTHON_RANK", PYTHON);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The output of all of them, which run at once.
fn outputs<const N: usize>(commands: [Command; N]) -> [Output; N] {
    let folder = tempfile::tempdir().unwrap();
    let started = commands.map(|mut it| it.env("TMPDIR", folder.path()).spawn().unwrap());
    let reading = started.map(|it| thread::spawn(|| it.wait_with_output().unwrap()));
    reading.map(|it| it.join().unwrap())
}

const OURS: &str = "exec \"$0\" --part torchrun::rank";

/// The lines of the ranks, in order.
fn lines(output: &Output) -> Vec<String> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}: {stdout}{stderr}", output.status);
    let ranks = stdout.lines().filter(|it| it.starts_with("rank ")).map(str::to_owned);
    let mut lines: Vec<String> = ranks.collect();
    lines.sort_unstable();
    lines
}

/// Two ranks of one host.
fn succeeds(words: &[&str], failures: u32, line: &str) {
    let words = [&["--nproc-per-node=2"], words].concat();
    let [output] = outputs([torchrun(&words, failures, line)]);
    assert_eq!(lines(&output), [0, 1].map(|rank| format!("rank {rank}, attempt {failures}: 6")));
}

/// The losses of two ranks of one host, each of which a line of `sh` starts; `python` is the script of one of Python's.
pub(crate) fn losses_of(python: &str, line: &str) -> [Vec<f64>; 2] {
    let mut command = torchrun(&["--nproc-per-node=2", "--standalone"], 0, line);
    command.env("PYTHON_RANK", python);
    let [output] = outputs([command]);
    let losses = |line: String| -> Vec<f64> {
        let numbers = line.split_once(": ").unwrap().1.split(' ');
        numbers.map(|it| it.parse().unwrap()).collect()
    };
    let ranks: Vec<_> = lines(&output).into_iter().map(losses).collect();
    ranks.try_into().unwrap()
}

/// Joins a job, and writes the losses that this rank finds in its group.
pub(crate) fn say_losses(losses: impl FnOnce(ProcessGroup) -> Vec<f64>) {
    let options = ConnectOptions { cpu: true, ..ConnectOptions::default() };
    let processes = Processes::join(options).unwrap();
    let found = losses(processes.group().unwrap());
    let found: Vec<String> = found.iter().map(|it| format!("{it:e}")).collect();
    say(&format!("rank {}: {}", processes.process_index(), found.join(" ")));
}

/// A port that was free a moment ago, and that no program is given that asks for any.
fn port() -> u16 {
    loop {
        let port = brigade_test_needs::random().u16(20_000..30_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            break port;
        }
    }
}

fn static_rendezvous() -> String {
    format!("--master-port={}", port())
}

#[needs(Pytorch)]
fn the_static_rendezvous_restarts_ranks_that_failed() {
    let restarts = format!("--max-restarts={FAILURES}");
    succeeds(&[&static_rendezvous(), &restarts], FAILURES, OURS);
}

#[needs(Pytorch)]
fn the_c10d_rendezvous_restarts_ranks_that_failed() {
    let restarts = format!("--max-restarts={FAILURES}");
    succeeds(&["--standalone", &restarts], FAILURES, OURS);
}

/// Two agents with a rank each: the one starts its rank again because that failed, the other because the
/// first asks for it, which it does not count.
#[needs(Pytorch)]
fn hosts_that_count_their_own_failures_meet_again() {
    let endpoint = format!("--rdzv-endpoint=127.0.0.1:{}", port());
    let words = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=hosts"];
    let words = [&words[..], &[&endpoint, "--max-restarts=4", "--local-addr=127.0.0.1"]].concat();
    let agents = [0, 2].map(|failures| torchrun(&words, failures, OURS));
    let mut found: Vec<String> = outputs(agents).iter().flat_map(lines).collect();
    found.sort_unstable();
    let ranks: Vec<&str> = found.iter().filter_map(|it| it.split(',').next()).collect();
    assert_eq!(ranks, ["rank 0", "rank 1"], "{found:?}");
    assert!(found.iter().any(|it| it.ends_with("attempt 2: 6")), "{found:?}");
}

#[needs(Pytorch)]
fn ranks_of_pythons_and_ours_are_one_group() {
    for (pythons, rendezvous) in [(0, static_rendezvous()), (1, "--standalone".to_owned())] {
        let line = format!("[ $RANK = {pythons} ] && exec \"$1\" -c \"$PYTHON_RANK\"; {OURS}");
        succeeds(&[&rendezvous], 0, &line);
    }
}
