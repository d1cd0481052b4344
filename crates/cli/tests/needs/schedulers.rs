//! Tests of programs and launchers under real schedulers: Slurm and Open MPI, on two hosts in namespaces.

use std::fs;
use std::io::Write;
use std::path::Path;

use brigade_rank_env::World;
use brigade_rank_env::scheduler::expand_hosts;
use brigade_test_needs::needs;

use crate::cluster::{Cluster, Run};

/// Prints the rank's environment: the program that schedulers start is this test program.
fn place() -> [String; 3] {
    let program = std::env::current_exe().unwrap().to_str().unwrap().to_owned();
    [program, "--part".to_owned(), "schedulers::prints_its_place".to_owned()]
}

#[brigade_test_needs::part]
fn prints_its_place() {
    let line = match World::from_env() {
        Err(error) => format!("\nplace: error: {error}\n"),
        Ok(world) if world.is_alone() => "\nplace: alone\n".to_owned(),
        Ok(world) => format!(
            "\nplace: {world}, {} of {} on host {} of {}, {}, {}\n",
            world.local_rank,
            world.local_world_size,
            world.node_rank,
            world.num_nodes,
            world.store.addr,
            if world.store.port == 29_500 { "torchrun's port" } else { "its own port" },
        ),
    };
    // One write: the tasks share a pipe.
    std::io::stdout().write_all(line.as_bytes()).unwrap();
}

/// Runs `words PROGRAM` in the cluster, and returns the output of the tasks, sorted.
fn places(cluster: &Cluster, words: &str) -> Vec<String> {
    let program = place();
    let words: Vec<&str> =
        words.split_whitespace().chain(program.iter().map(String::as_str)).collect();
    let run = cluster.run(&words);
    assert_eq!(run.code, 0, "{words:?}: {}{}", run.stdout, run.stderr);
    placed(&run)
}

fn placed(run: &Run) -> Vec<String> {
    run.lines().iter().filter_map(|line| line.strip_prefix("place: ")).map(str::to_owned).collect()
}

#[needs(Slurm)]
fn programs_under_slurm() {
    let cluster = Cluster::slurm();
    let across = [
        "rank 0 of 3, 0 of 2 on host 0 of 2, node1, its own port",
        "rank 1 of 3, 1 of 2 on host 0 of 2, node1, its own port",
        "rank 2 of 3, 0 of 1 on host 1 of 2, node1, its own port",
    ];
    assert_eq!(places(&cluster, "srun -N2 -n3"), across);
    assert_eq!(places(&cluster, "srun -N2 -n3 --mpi=pmi2"), across);
    assert_eq!(places(&cluster, "salloc -N2 -n4 srun -n3 -m plane=2"), across);
    assert_eq!(
        places(&cluster, "srun -N1 -n2"),
        [
            "rank 0 of 2, 0 of 2 on host 0 of 1, 127.0.0.1, its own port",
            "rank 1 of 2, 1 of 2 on host 0 of 1, 127.0.0.1, its own port",
        ]
    );
    // In a job, but not as a task of a step.
    assert_eq!(places(&cluster, "srun -N1 -n1"), ["alone"]);
    assert_eq!(places(&cluster, "salloc -N2 -n3"), ["alone"]);
    let script = format!("#!/bin/sh\n{}\n", place().join(" "));
    let (code, output) = cluster.batch(&script, "-N2 -n3");
    assert_eq!(code, 0, "{output}");
    assert!(output.contains("\nplace: alone\n"), "{output}");

    // Short form of host lists, as Slurm itself expands it.
    for list in ["n1", "node[01-03,07],gpu-1", "a[8-11],b[098-101]", "r[1-2]n[0,5]", "x[3,1-2]"] {
        let run = cluster.run(&["scontrol", "show", "hostnames", list]);
        let expected: Vec<&str> = run.stdout.lines().collect();
        assert_eq!(expand_hosts(list).unwrap(), expected, "{list}");
    }
}

#[needs(Slurm)]
fn launchers_under_slurm() {
    let cluster = Cluster::slurm();
    let shell = ["sh", "-c", "echo $RANK of $WORLD_SIZE"];
    let launch = |words: &str| {
        let words: Vec<&str> = words.split_whitespace().chain(shell).collect();
        cluster.run(&words)
    };
    let run = launch("srun -N1 --ntasks-per-node=1 brigade launch --nproc 2");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(run.lines(), ["[0] 0 of 2", "[1] 1 of 2"]);

    let run = launch("srun -N1 -n2 brigade launch --nproc 2");
    assert_eq!(run.code, 2, "{}", run.stderr);
    assert!(run.stderr.contains("srun started 2 launchers on one host"), "{}", run.stderr);
    assert!(
        run.stderr.contains("srun --ntasks-per-node=1 brigade launch --nproc 2 PROGRAM"),
        "{}",
        run.stderr
    );

    // One launcher on each of two hosts, without a flag about either.
    let two = "srun -N2 --ntasks-per-node=1 --kill-on-bad-exit=1 brigade launch --nproc 2";
    let run = launch(two);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(run.lines(), ["[0] 0 of 4", "[1] 1 of 4", "[2] 2 of 4", "[3] 3 of 4"]);
    // Slurm's variables are known to other users, and the home folder is not on a network.
    assert_eq!(run.stderr.matches("warning: this job has no secret").count(), 1, "{}", run.stderr);
    // The job fails with the exit code of the rank that failed.
    let failing = ["sh", "-c", "[ $RANK = 3 ] && exit 7; sleep 1000"];
    let words: Vec<&str> = two.split_whitespace().chain(failing).collect();
    let run = cluster.run(&words);
    assert_eq!(run.code, 7, "{}", run.stderr);
    assert!(run.stderr.contains("rank 3"), "{}", run.stderr);

    // All hosts of the job exist, but nothing uses them.
    let run = launch("salloc -N2 brigade launch --nproc 1");
    assert_eq!((run.code, run.lines()), (0, vec!["[0] 0 of 1"]), "{}", run.stderr);
    assert!(run.stderr.contains("note: this Slurm job has 2 hosts"), "{}", run.stderr);
}

#[needs(Slurm)]
fn the_emitted_script_runs() {
    let mut cluster = Cluster::slurm();
    let emit = "brigade emit slurm --nproc 2 --nnodes 1 --cpus-per-node 2 --time-limit 90m \
                --job-name hard --env NOTE=it's";
    let program = ["sh", "-c", "echo \"$RANK of $WORLD_SIZE: $1 $NOTE\"", "sh", "a 'b' $c"];
    let words: Vec<&str> = emit.split_whitespace().chain(program).collect();
    let run = cluster.run(&words);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let (code, output) = cluster.batch(&run.stdout, "");
    assert_eq!(code, 0, "{output}");
    let mut lines: Vec<&str> = output.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] 0 of 2: a 'b' $c it's", "[1] 1 of 2: a 'b' $c it's"]);
    let job = cluster.run(&["scontrol", "show", "jobs", "--oneliner"]);
    for fact in ["JobName=hard", "TimeLimit=01:30:00", "CPUs/Task=2", "ExitCode=0:0"] {
        assert!(job.stdout.contains(fact), "{fact}: {}", job.stdout);
    }

    // On two hosts.
    let emit = "brigade emit slurm --nproc 2 --nnodes 2";
    let words: Vec<&str> =
        emit.split_whitespace().chain(["sh", "-c", "echo $RANK$BRIGADE_RDZV_SECRET"]).collect();
    let script = cluster.run(&words).stdout;
    assert!(script.contains("BRIGADE_RDZV_SECRET=$(openssl rand -hex 32) || exit 1\n"), "{script}");
    let (code, output) = cluster.batch(&script, "");
    assert_eq!(code, 0, "{output}");
    assert!(!output.contains("has no secret"), "{output}");
    // The other lines are messages of the launchers about each other.
    let mut lines: Vec<&str> = output.lines().filter(|it| !it.starts_with("brigade: ")).collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] 0", "[1] 1", "[2] 2", "[3] 3"]);

    // What Slurm sends before the time limit (`#SBATCH --signal`) reaches the launcher, the ranks stop,
    // and the script waits for them and for their last lines. slurmstepd sends it to every process
    // of the step, one after the other: `sleep` may end before its shell has been told, the shell
    // may be told twice, by the launcher, too, and before the launcher, which says nothing when all
    // ranks have ended by then. So they end when it has spoken.
    let stopped = "trap 'until [ -e told ]; do sleep 0.05; done; echo $RANK stops; exit 0' TERM; \
                   touch ready.$RANK; while :; do sleep 1000 & wait; done";
    let emit = "brigade emit slurm --nproc 2 sh -c";
    let words: Vec<&str> = emit.split_whitespace().chain([stopped]).collect();
    let job = cluster.submit(&cluster.run(&words).stdout, "");
    cluster.wait_until("both ranks are ready", |cluster| {
        (0..2).all(|rank| cluster.folder().join(format!("ready.{rank}")).exists())
    });
    assert_eq!(cluster.run(&["scancel", "--signal=TERM", &job]).code, 0);
    let spoken = "brigade: SIGTERM: waiting up to 30 s";
    cluster.wait_until(spoken, |cluster| {
        let output = fs::read_to_string(cluster.folder().join(format!("batch.{job}")));
        output.unwrap_or_default().contains(spoken)
    });
    fs::write(cluster.folder().join("told"), "").unwrap();
    let (code, output) = cluster.outcome(&job);
    assert_eq!(code, 0, "{output}");
    for line in ["[0] 0 stops\n", "[1] 1 stops\n"] {
        assert!(output.contains(line), "{line}: {output}");
    }

    // The job's exit code is that of the failing rank.
    let failing = "brigade emit slurm --nproc 2 sh -c";
    let words: Vec<&str> = failing.split_whitespace().chain(["exit $((RANK * 7))"]).collect();
    let (code, output) = cluster.batch(&cluster.run(&words).stdout, "");
    assert_eq!(code, 7, "{output}");
}

#[needs(OpenMpi)]
fn programs_under_open_mpi() {
    let cluster = Cluster::bare();
    assert_eq!(
        places(&cluster, "mpirun -np 2 --oversubscribe"),
        [
            "rank 0 of 2, 0 of 2 on host 0 of 1, 127.0.0.1, its own port",
            "rank 1 of 2, 1 of 2 on host 0 of 1, 127.0.0.1, its own port",
        ]
    );
    assert_eq!(places(&cluster, "mpirun -np 1"), ["alone"]);
    let ssh = cluster.folder().join("ssh");
    let across = |hosts: &str| {
        format!("mpirun --mca plm_rsh_agent {} -x FOLDER --host {hosts}", ssh.display())
    };
    assert_eq!(
        places(&cluster, &format!("{} -np 3", across("node1:2,node2:1"))),
        [
            "rank 0 of 3, 0 of 2 on host 0 of 2, 10.77.0.1, its own port",
            "rank 1 of 3, 1 of 2 on host 0 of 2, 10.77.0.1, its own port",
            "rank 2 of 3, 0 of 1 on host 1 of 2, 10.77.0.1, its own port",
        ]
    );
    // Ranks are distributed round-robin over the hosts.
    assert_eq!(
        places(&cluster, &format!("{} -np 4 --map-by node", across("node1:2,node2:2"))),
        [
            "rank 0 of 4, 0 of 2 on host 0 of 2, 10.77.0.1, its own port",
            "rank 1 of 4, 0 of 2 on host 1 of 2, 10.77.0.1, its own port",
            "rank 2 of 4, 1 of 2 on host 0 of 2, 10.77.0.1, its own port",
            "rank 3 of 4, 1 of 2 on host 1 of 2, 10.77.0.1, its own port",
        ]
    );
    // One launcher on each host. Its stdout is a pseudo-terminal of mpirun's, which must not cause colours in a file.
    let words = across("node1:1,node2:1") + " --map-by ppr:1:node brigade launch --nproc 2";
    let words: Vec<&str> = words.split_whitespace().chain(["sh", "-c", "echo $RANK"]).collect();
    let run = cluster.run(&words);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(run.lines(), ["[0] 0", "[1] 1", "[2] 2", "[3] 3"]);
    // mpirun generates a key for each job.
    assert!(!run.stderr.contains("has no secret"), "{}", run.stderr);

    let launch = "--nproc 2 sh -c true";
    let run = format!("mpirun -np 2 --oversubscribe brigade launch {launch}");
    let run = cluster.run(&run.split_whitespace().collect::<Vec<_>>());
    assert!(run.stderr.contains("mpirun started 2 launchers on one host"), "{}", run.stderr);
    assert_eq!(run.code, 2);
}

#[needs(Slurm, OpenMpi)]
fn open_mpi_inside_slurm() {
    let cluster = Cluster::slurm();
    // mpirun starts its helper on node2 as the only task of a step.
    assert_eq!(
        places(&cluster, "salloc -N2 -n3 mpirun"),
        [
            "rank 0 of 3, 0 of 2 on host 0 of 2, node1, its own port",
            "rank 1 of 3, 1 of 2 on host 0 of 2, node1, its own port",
            "rank 2 of 3, 0 of 1 on host 1 of 2, node1, its own port",
        ]
    );
}

/// Nothing of a cluster is left, even if its test is killed.
#[needs(Slurm)]
fn clusters_end_with_their_test() {
    let folder = {
        let cluster = Cluster::bare();
        let run = cluster.run(&["sh", "-c", "cat /etc/hosts; ip -brief addr show br0"]);
        assert!(run.stdout.contains("10.77.0.2 node2") && run.stdout.contains("10.77.0.1/24"));
        cluster.folder().to_owned()
    };
    assert!(!folder.exists());
    let mark = format!("FOLDER={}", folder.display());
    for process in fs::read_dir("/proc").unwrap().map(Result::unwrap) {
        let environ = fs::read(process.path().join("environ")).unwrap_or_default();
        let marked = environ.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes());
        assert!(!marked, "{} is left", process.path().display());
    }
    assert!(!fs::read_to_string("/etc/hosts").unwrap().contains("10.77.0.2 node2"));
    assert!(!Path::new("/sys/class/net/veth2").exists());
}
