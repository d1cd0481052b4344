//! Tests of the number of ranks that `brigade launch` starts, and of the processors and GPUs that they get.

use std::collections::BTreeSet;
use std::fs;
use std::thread;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use crate::job::{Job, Run, brigade};

/// Devices that are accepted on every host, as no host can verify them.
const TWO_DEVICES: (&str, &str) = ("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b");
const NO_DEVICES: (&str, &str) = ("CUDA_VISIBLE_DEVICES", "");

fn run(vars: &[(&str, &str)], flags: &[&str], script: &str) -> Run {
    let mut command = brigade();
    command.arg("launch").args(flags).envs(vars.iter().copied());
    Job::of(command).sh(script).run()
}

/// Returns the processors that this test may use, and one of each core.
fn processors() -> (BTreeSet<usize>, BTreeSet<String>) {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let cpus = numbers(list);
    let siblings = |cpu: &usize| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string())
    };
    let cores = cpus.iter().map(siblings).collect();
    (cpus, cores)
}

fn numbers(list: &str) -> BTreeSet<usize> {
    list.trim()
        .split(',')
        .flat_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            first.parse().unwrap()..=last.parse::<usize>().unwrap()
        })
        .collect()
}

/// Prints the processors that the rank may use, and its number of threads.
const WHERE: &str = "grep Cpus_allowed_list /proc/self/status; echo threads $OMP_NUM_THREADS";

fn sets(run: &Run, nproc: usize) -> Vec<(BTreeSet<usize>, usize)> {
    let of = |rank| {
        let lines = run.lines_of(rank);
        let list = lines[0].strip_prefix("Cpus_allowed_list:").unwrap();
        (numbers(list), lines[1].strip_prefix("threads ").unwrap().parse().unwrap())
    };
    (0..nproc).map(of).collect()
}

#[test]
fn numbers_of_ranks() {
    let cores = thread::available_parallelism().unwrap().get();
    let ranks = |vars: &[(&str, &str)], flag: &str| {
        let run = run(vars, &[flag], "echo $RANK of $WORLD_SIZE");
        assert_eq!(run.code, 0, "{}", run.stderr);
        run.stdout.lines().count()
    };
    assert_eq!(ranks(&[TWO_DEVICES], "--nproc=gpu"), 2);
    assert_eq!(ranks(&[TWO_DEVICES], "--nproc=auto"), 2);
    assert_eq!(ranks(&[NO_DEVICES], "--nproc=auto"), cores);
    assert_eq!(ranks(&[TWO_DEVICES], "--nproc=cpu"), cores);
    assert_eq!(ranks(&[TWO_DEVICES], "--devices=MIG-b"), 1);
    assert_eq!(ranks(&[TWO_DEVICES], "--devices=all"), 2);

    let run = run(&[NO_DEVICES], &["--nproc=gpu"], "echo started");
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    assert!(run.stderr.starts_with("brigade: --nproc gpu: "), "{}", run.stderr);
}

#[test]
fn devices() {
    let script = "echo $LOCAL_RANK $CUDA_VISIBLE_DEVICES";
    let shown = |flags: &[&str]| {
        let run = run(&[TWO_DEVICES], flags, script);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let mut lines: Vec<_> = run.stdout.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    assert_eq!(shown(&["--nproc=2"]), ["[0] 0 MIG-a,MIG-b", "[1] 1 MIG-a,MIG-b"]);
    assert_eq!(shown(&["--devices=MIG-b,MIG-a"]), ["[0] 0 MIG-b,MIG-a", "[1] 1 MIG-b,MIG-a"]);
    assert_eq!(shown(&["--nproc=1", "--devices=MIG-b"]), ["[0] 0 MIG-b"]);
    let virtually = ["--nproc=2", "--virtual-local-rank"];
    assert_eq!(shown(&virtually), ["[0] 0 MIG-a", "[1] 0 MIG-b"]);

    let refused: [(&[&str], &str); 5] = [
        (&["--devices=MIG-c"], "device MIG-c is not among CUDA_VISIBLE_DEVICES=MIG-a,MIG-b"),
        (&["--devices=0"], "device 0 is not among CUDA_VISIBLE_DEVICES=MIG-a,MIG-b"),
        (&["--devices=1,1"], "device 1 is given twice"),
        (
            &["--devices=one"],
            "expected all, or numbers or UUIDs of GPUs such as 0,2, found \"one\"",
        ),
        (&["--nproc=3", "--virtual-local-rank"], "3 ranks need 3, but there are 2"),
    ];
    for (flags, message) in refused {
        let run = run(&[TWO_DEVICES], flags, "echo started");
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{flags:?}: {}", run.stderr);
        assert!(run.stderr.contains(message), "{flags:?}: {}", run.stderr);
    }
}

/// Makes a host with four TPUs.
fn tpu_host() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    for chip in 0..4 {
        let folder = format!("sys/bus/pci/devices/0000:00:0{}.0", chip + 4);
        write(&format!("{folder}/vendor"), "0x1ae0\n");
        write(&format!("{folder}/device"), "0x005e\n");
        write(&format!("dev/accel{chip}"), "");
    }
    root
}

#[test]
fn each_rank_has_a_tpu() {
    let root = tpu_host();
    let root = ("BRIGADE_HOST_ROOT", root.path().to_str().unwrap());
    let script = "echo $LOCAL_RANK $PJRT_DEVICE chip $TPU_VISIBLE_CHIPS slice $TPU_PROCESS_BOUNDS \
                  task $CLOUD_TPU_TASK_ID port $TPU_PROCESS_PORT";
    let shown = |vars: &[(&str, &str)], flags: &[&str]| {
        let run = run(&[&[root], vars].concat(), flags, script);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let mut lines: Vec<_> = run.stdout.lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    let all = shown(&[], &["--nproc=gpu"]);
    assert_eq!(all.len(), 4, "{all:?}");
    assert_eq!(all[3], "[3] 3 TPU chip 3 slice 2,2,1 task 3 port 8479");
    // Without a number of ranks, one for each chip.
    assert_eq!(shown(&[], &[]), all);
    assert_eq!(
        shown(&[], &["--devices=3,1"]),
        [
            "[0] 0 TPU chip 3 slice 1,1,1 task 0 port 8476",
            "[1] 1 TPU chip 1 slice 1,1,1 task 0 port 8477"
        ]
    );
    assert_eq!(
        shown(&[("TPU_VISIBLE_CHIPS", "2")], &["--nproc=auto"]),
        ["[0] 0 TPU chip 2 slice 1,1,1 task 0 port 8476"]
    );
    assert_eq!(
        shown(&[("TPU_PROCESS_BOUNDS", "2,2,1")], &["--nproc=1"]),
        ["[0] 0 TPU chip slice 2,2,1 task port"]
    );
    assert_eq!(shown(&[], &["--cpu", "--nproc=1"]), ["[0] 0 chip slice task port"]);

    let refused = run(&[root], &["--nproc=5"], "echo started");
    assert_eq!((refused.code, refused.stdout.as_str()), (2, ""));
    assert!(
        refused
            .stderr
            .contains("5 ranks for 4 TPUs, and only one process can use a TPU: use --nproc 4"),
        "{}",
        refused.stderr
    );
}

#[test]
fn a_virtual_local_rank_is_for_the_program_only() {
    let logs = tempfile::tempdir().unwrap();
    let mut command = brigade();
    command.args(["launch", "--nproc=2", "--virtual-local-rank", "--log-dir"]).arg(logs.path());
    command
        .env(TWO_DEVICES.0, TWO_DEVICES.1)
        .env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "$local_rank>");
    let run = Job::of(command).words(["sh", "-c", "echo $0 $LOCAL_RANK", "${local_rank}"]).run();
    let mut lines: Vec<_> = run.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["0>0 0", "1>1 0"]);
    let attempt =
        fs::read_dir(logs.path()).unwrap().next().unwrap().unwrap().path().join("attempt_0");
    assert_eq!(fs::read_to_string(attempt.join("1/stdout.log")).unwrap(), "1 0\n");
}

#[test]
fn every_rank_has_cores_of_its_own() {
    let (cpus, cores) = processors();
    for nproc in 1..=cores.len().min(8) {
        let flag = format!("--nproc={nproc}");
        let run = run(&[NO_DEVICES], &[&flag, "--bind=cores"], WHERE);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let mut together = BTreeSet::new();
        for (set, threads) in sets(&run, nproc) {
            assert!(set.is_subset(&cpus) && !set.is_empty());
            assert!((1..=set.len()).contains(&threads), "{threads} threads on {set:?}");
            assert!(set.iter().all(|cpu| together.insert(*cpu)), "{set:?} twice");
        }
    }
    let flag = format!("--nproc={}", cores.len() + 1);
    let run = run(&[NO_DEVICES], &[&flag, "--bind=exclusive"], "echo started");
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    let numbers = format!(
        "{0} ranks need {0} cores, but this process may use {1}",
        cores.len() + 1,
        cores.len()
    );
    assert!(run.stderr.contains(&numbers), "{}", run.stderr);
}

#[test]
fn other_ways_to_bind() {
    let (cpus, _) = processors();
    for mode in ["numa", "node", "socket", "core-complex"] {
        let run = run(&[NO_DEVICES], &["--nproc=3", &format!("--bind={mode}")], WHERE);
        assert_eq!(run.code, 0, "{}", run.stderr);
        for (set, threads) in sets(&run, 3) {
            assert!(set.is_subset(&cpus) && !set.is_empty() && threads >= 1, "{mode}: {set:?}");
        }
    }
    let run = run(&[NO_DEVICES], &["--nproc=1"], WHERE);
    assert_eq!(sets(&run, 1)[0].0, cpus, "nothing is bound unless it is asked for");
}

#[test]
fn the_launchers_own_mask_holds() {
    let (cpus, _) = processors();
    let last = *cpus.last().unwrap();
    // A process inherits the affinity mask of the thread that starts it.
    let run = thread::scope(|scope| {
        let start = scope.spawn(|| {
            let mut mask = CpuSet::new();
            mask.set(last).unwrap();
            sched_setaffinity(Pid::from_raw(0), &mask).unwrap();
            run(&[], &["--nproc=1", "--bind=numa"], WHERE)
        });
        start.join().unwrap()
    });
    assert_eq!(sets(&run, 1), [(BTreeSet::from([last]), 1)], "{}", run.stderr);
}

#[test]
fn a_number_of_threads_that_the_user_has_chosen_stays() {
    let run_with = |vars: &[(&str, &str)], flags: &[&str]| {
        let flags: Vec<_> = ["--nproc=1", "--bind=numa"].iter().chain(flags).copied().collect();
        run(vars, &flags, "echo $OMP_NUM_THREADS").stdout
    };
    assert_eq!(run_with(&[("OMP_NUM_THREADS", "77")], &[]), "[0] 77\n");
    assert_eq!(run_with(&[], &["--threads-per-rank=5"]), "[0] 5\n");
}

#[test]
fn unknown_bindings_are_refused() {
    let run = run(&[], &["--nproc=1", "--bind=tight"], "echo started");
    assert_eq!(run.code, 2);
    let message = "expected none, cores, numa, socket or core-complex, found \"tight\"";
    assert!(run.stderr.contains(message), "{}", run.stderr);
}
