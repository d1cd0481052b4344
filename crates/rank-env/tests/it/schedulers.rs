//! Places from schedulers. The files in `environments/` are what real ones set (Slurm 22.05, Open
//! MPI 4.1, MPICH 4.0, two hosts), of each task the variables that matter or could mislead.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use brigade_rank_env::scheduler::{Mpi, PORTS, Pods, Step};
use brigade_rank_env::{World, WorldError};

type Vars = HashMap<String, String>;

/// The variables of each task.
fn environment(name: &str) -> Vec<Vars> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/environments").join(name);
    let text = fs::read_to_string(file.with_extension("env")).unwrap();
    let tasks = text.split("# task ").skip(1);
    tasks.map(|task| task.lines().filter_map(pair).collect()).collect()
}

fn pair(line: &str) -> Option<(String, String)> {
    line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))
}

/// `A=1 B=2` on top.
fn with(vars: &Vars, more: &str) -> Vars {
    let mut vars = vars.clone();
    vars.extend(more.split_whitespace().filter_map(pair));
    vars
}

fn read(vars: &Vars) -> Result<World, WorldError> {
    World::from_vars(|name| vars.get(name).cloned())
}

/// `rank/size local/local size node/nodes address:port`
fn place(vars: &Vars) -> String {
    match read(vars) {
        Ok(world) if world == World::alone() => "alone".to_owned(),
        Ok(world) => format!(
            "{}/{} {}/{} {}/{} {}:{}",
            world.rank,
            world.world_size,
            world.local_rank,
            world.local_world_size,
            world.node_rank,
            world.num_nodes,
            world.store.addr,
            world.store.port
        ),
        Err(error) => error.to_string(),
    }
}

fn places(name: &str) -> Vec<String> {
    environment(name).iter().map(place).collect()
}

#[test]
fn tasks_of_a_step() {
    let table: [(&str, &[&str]); 6] = [
        // -N2 -n3, job 13
        (
            "srun",
            &["0/3 0/2 0/2 node1:21261", "1/3 1/2 0/2 node1:21261", "2/3 0/1 1/2 node1:21261"],
        ),
        (
            "srun-pmi2",
            &["0/3 0/2 0/2 node1:21358", "1/3 1/2 0/2 node1:21358", "2/3 0/1 1/2 node1:21358"],
        ),
        // -m cyclic -n4 on hosts that had room for 3 and 1
        (
            "cyclic",
            &[
                "0/4 0/3 0/2 node1:21649",
                "1/4 0/1 1/2 node1:21649",
                "2/4 1/3 0/2 node1:21649",
                "3/4 2/3 0/2 node1:21649",
            ],
        ),
        // a heterogeneous job: -n1 on node1, -n2 on node2
        ("het", &["0/3 0/1 0/2 node1:20970", "1/3 0/2 1/2 node1:20970", "2/3 1/2 1/2 node1:20970"]),
        // a step of one task in an allocation of two hosts
        ("substep", &["alone"]),
        // srun inside the terminal of a task: step 1
        ("nested-pty", &["0/2 0/1 0/2 node1:22135", "1/2 0/1 1/2 node1:22135"]),
    ];
    for (name, expected) in table {
        assert_eq!(places(name), expected, "{name}");
    }
}

/// The trap: Slurm's variables are there, but the other ranks were never started.
#[test]
fn not_a_task() {
    for name in [
        "batch",       // a batch script of a job with 3 tasks
        "interactive", // the shell of salloc, on the first host of a job with 3 tasks
        "chained",     // a batch script that was submitted by a task of another job
    ] {
        assert_eq!(places(name), ["alone"], "{name}");
    }
    // salloc's shell where it runs on the host that it was called on
    let mut salloc = environment("batch").remove(0);
    for name in ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID"] {
        salloc.remove(name).unwrap();
    }
    assert_eq!(place(&salloc), "alone");
    // a batch script of a job with as many tasks and hosts as the step that submitted it had
    let mut chained = environment("chained").remove(0);
    assert_eq!(place(&with(&chained, "SLURM_NTASKS=3")), "alone");
    chained.remove("SLURM_GTIDS");
    assert!(place(&with(&chained, "SLURM_NTASKS=3")).starts_with("0/3 0/2 0/2 node1:"));
    // the same in the shell of a step with one task
    let one = with(&environment("substep")[0], "SLURM_NTASKS=3 SLURM_NNODES=2");
    assert_eq!(place(&one), "alone");
}

#[test]
fn terminals() {
    let find = |vars: &Vars, pid: u32| Step::find(&|name| vars.get(name).cloned(), Some(pid));
    let tasks = environment("pty");
    let pid = |vars: &Vars| vars["SLURM_TASK_PID"].parse::<u32>().unwrap();
    for vars in &tasks {
        // srun --pty -n3 PROGRAM
        assert_eq!(find(vars, pid(vars)).unwrap().unwrap().tasks(), 3);
        // srun --pty -n3 bash, and the program from there
        let error = find(vars, pid(vars) + 1).unwrap_err().to_string();
        assert!(error.starts_with("SLURM_PTY_PORT=\"40407\" is set for the terminal of"));
        assert!(error.contains("unset SLURM_STEP_ID to run alone"), "{error}");
        let mut alone = vars.clone();
        alone.remove("SLURM_STEP_ID");
        assert_eq!(find(&alone, pid(vars) + 1), Ok(None));
    }
    // srun --pty bash: one task
    let one = with(&tasks[0], "SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=1 SLURM_STEP_NUM_NODES=1");
    let one = with(
        &one,
        "SLURM_NNODES=1 SLURM_STEP_NODELIST=node1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_GTIDS=0",
    );
    assert_eq!(find(&one, 1).unwrap().unwrap().tasks(), 1);
    assert_eq!(place(&one), "alone");
}

#[test]
fn mpi() {
    let table: [(&str, &[&str]); 5] = [
        ("ompi-one", &["0/2 0/2 0/1 127.0.0.1:25740", "1/2 1/2 0/1 127.0.0.1:25740"]),
        (
            "ompi-two",
            &[
                "0/3 0/2 0/2 10.77.0.1:22718",
                "1/3 1/2 0/2 10.77.0.1:22718",
                "2/3 0/1 1/2 10.77.0.1:22718",
            ],
        ),
        // Its third process is a child of a Slurm task that says it is task 0 of 1.
        (
            "ompi-salloc",
            &["0/3 0/2 0/2 node1:23762", "1/3 1/2 0/2 node1:23762", "2/3 0/1 1/2 node1:23762"],
        ),
        ("ompi-elsewhere", &["0/2 0/2 0/1 127.0.0.1:21415", "1/2 1/2 0/1 127.0.0.1:21415"]),
        ("hydra-one", &["0/2 0/2 0/1 127.0.0.1:29500", "1/2 1/2 0/1 127.0.0.1:29500"]),
    ];
    for (name, expected) in table {
        assert_eq!(places(name), expected, "{name}");
    }
}

/// MPICH tells nothing of other hosts.
#[test]
fn mpi_without_an_address() {
    for (vars, rank) in environment("hydra-two").iter().zip(0..) {
        let error = place(vars);
        assert_eq!(
            error,
            "MPICH or Intel MPI started 3 ranks on several hosts without the address of rank 0: add `-genv MASTER_ADDR HOST` to mpiexec"
        );
        let expected = match rank {
            // Hosts of different sizes: which host is this?
            0 | 1 => {
                "MPICH or Intel MPI started 3 ranks, 2 of them on this host, without the number of this host"
            }
            _ => "2/3 0/1 2/3 n:29500",
        };
        let found = place(&with(vars, "MASTER_ADDR=n"));
        assert!(found.starts_with(expected), "{found}");
    }
    // the same number on each host
    let table = [("0", "0", "0/4 0/2 0/2 n:7"), ("2", "0", "2/4 0/2 1/2 n:7")];
    for (rank, local, expected) in table {
        let vars = format!("PMI_RANK={rank} PMI_SIZE=4 MPI_LOCALRANKID={local} MPI_LOCALNRANKS=2");
        let vars = with(&Vars::new(), &format!("{vars} MASTER_ADDR=n MASTER_PORT=7"));
        assert_eq!(place(&vars), expected);
    }
    // inside a Slurm job, whose hosts are known
    let spread = environment("hydra-salloc");
    assert!(place(&spread[0]).starts_with("MPICH or Intel MPI started 3 ranks, 2 of them on this"));
    let even = with(&spread[2], "PMI_RANK=1 PMI_SIZE=2");
    assert_eq!(place(&even), "1/2 0/1 1/2 node1:22037");
    let moved = with(&spread[0], "PMI_SIZE=2 MPI_LOCALNRANKS=1 SLURM_JOB_NODELIST=node[0-1]");
    assert_eq!(
        place(&moved),
        "SLURM_JOB_NODELIST=\"node[0-1]\" begins with node0, but rank 0 is on node1: set \
         MASTER_ADDR=node1 for all ranks"
    );
}

#[test]
fn open_mpi_on_several_hosts() {
    // mpirun ran on node1, all ranks on node2 and node3
    let elsewhere = environment("ompi-elsewhere");
    let spread = "OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 \
                  OMPI_MCA_orte_num_nodes=2";
    let error = place(&with(&elsewhere[0], spread));
    assert!(error.ends_with("add `-x MASTER_ADDR=HOST` with the host of rank 0"), "{error}");
    let daemon_2 = "OMPI_MCA_orte_local_daemon_uri=1.2;tcp://10.77.0.3:1 MASTER_ADDR=node2";
    let last = with(&with(&elsewhere[1], spread), daemon_2);
    assert_eq!(place(&last), "1/2 0/1 1/2 node2:21415");

    // mpirun --map-by node: ranks go round
    let round = "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2";
    let two = environment("ompi-two");
    for (rank, local, from, expected) in [
        (0, 0, &two[0], "0/4 0/2 0/2 10.77.0.1:22718"),
        (1, 0, &two[2], "1/4 0/2 1/2 10.77.0.1:22718"),
        (2, 1, &two[0], "2/4 1/2 0/2 10.77.0.1:22718"),
        (3, 1, &two[2], "3/4 1/2 1/2 10.77.0.1:22718"),
    ] {
        let place_of =
            format!("{round} OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_LOCAL_RANK={local}");
        assert_eq!(place(&with(from, &place_of)), expected);
    }

    // Of mpirun's addresses: not the bridge that every host has, and in this host's network.
    let uris = "OMPI_MCA_orte_hnp_uri=5.0;tcp://172.17.0.1,192.168.7.1,10.77.0.1:9;tcp6://[::1]:9 \
                OMPI_MCA_orte_local_daemon_uri=5.1;tcp://172.17.0.1,10.77.0.2:8";
    assert_eq!(place(&with(&two[2], uris)), "2/3 0/1 1/2 10.77.0.1:22718");

    // Open MPI 5 does not say where mpirun is.
    let mut five = two[2].clone();
    five.retain(|name, _| !name.starts_with("OMPI_MCA"));
    let error = place(&with(&five, "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1"));
    assert!(
        error.ends_with("without the address of rank 0: add `-x MASTER_ADDR=HOST` to mpirun"),
        "{error}"
    );
}

#[test]
fn mvapich() {
    let vars = "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1 \
                MV2_COMM_WORLD_LOCAL_SIZE=2";
    let vars = with(&Vars::new(), vars);
    assert_eq!(place(&vars), "1/2 1/2 0/1 127.0.0.1:29500");
    let far = with(&vars, "MV2_COMM_WORLD_LOCAL_SIZE=1 MV2_COMM_WORLD_LOCAL_RANK=0");
    assert!(place(&far).starts_with("MVAPICH2 started 2 ranks on several hosts"));
    assert_eq!(place(&with(&far, "MASTER_ADDR=n")), "1/2 0/1 1/2 n:29500");
}

#[test]
fn the_user_may_say_where_to_meet() {
    let task = &environment("srun")[2];
    for (more, expected) in [
        ("MASTER_ADDR=node1-ib", "2/3 0/1 1/2 node1-ib:21261"),
        ("MASTER_PORT=1234", "2/3 0/1 1/2 node1:1234"),
        ("MASTER_ADDR=10.0.0.7 MASTER_PORT=1234", "2/3 0/1 1/2 10.0.0.7:1234"),
        ("MASTER_PORT=0", "MASTER_PORT=\"0\" is not a port between 1 and 65535"),
        (
            "MASTER_ADDR=localhost",
            "MASTER_ADDR=\"localhost\" means each host itself, but the ranks are on several hosts: \
             unset it, or set it to the host of rank 0",
        ),
        // torchrun's variables are complete
        ("RANK=0 WORLD_SIZE=1", "alone"),
        (
            "RANK=5 WORLD_SIZE=6 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n MASTER_PORT=1",
            "5/6 1/2 2/3 n:1",
        ),
        ("RANK=2 WORLD_SIZE=3 MASTER_ADDR=n MASTER_PORT=1", "2/3 0/1 2/3 n:1"),
        // incomplete, but of the same opinion
        ("WORLD_SIZE=3 LOCAL_RANK=0", "2/3 0/1 1/2 node1:21261"),
    ] {
        assert_eq!(place(&with(task, more)), expected, "{more}");
    }
}

#[test]
fn contradictions_name_both() {
    let tasks = environment("srun");
    for (more, expected) in [
        ("WORLD_SIZE=8", "WORLD_SIZE=8 and SLURM_STEP_NUM_TASKS=3 contradict each other"),
        ("RANK=0", "RANK=0 and SLURM_PROCID=2 contradict each other: both mean the same"),
        ("LOCAL_RANK=3", "LOCAL_RANK=3 and SLURM_LOCALID=0 contradict each other"),
        ("LOCAL_WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2 and SLURM_STEP_TASKS_PER_NODE=1 contradict"),
        // export RANK=$SLURM_PROCID in the batch script
        (
            "RANK=0 WORLD_SIZE=3 MASTER_ADDR=n MASTER_PORT=1",
            "RANK=0 and SLURM_PROCID=2 contradict each other: srun started one task for each rank",
        ),
        ("SLURM_PROCID=3", "SLURM_PROCID=3 and SLURM_STEP_NUM_TASKS=3 contradict each other"),
        ("SLURM_NODEID=2", "SLURM_NODEID=2 and SLURM_STEP_NODELIST=2 contradict each other"),
        ("SLURM_LOCALID=1", "SLURM_LOCALID=1 and SLURM_STEP_TASKS_PER_NODE=1 contradict"),
        (
            "SLURM_STEP_TASKS_PER_NODE=3",
            "SLURM_STEP_TASKS_PER_NODE=1 and SLURM_STEP_NODELIST=2 contradict each other",
        ),
        (
            "SLURM_STEP_TASKS_PER_NODE=1(x2)",
            "SLURM_STEP_TASKS_PER_NODE=2 and SLURM_STEP_NUM_TASKS=3 contradict each other",
        ),
        ("SLURM_PROCID=x", "SLURM_PROCID=\"x\" is not a whole number from 0"),
        (
            "SLURM_STEP_NODELIST=node[1-",
            "SLURM_STEP_NODELIST=\"node[1-\" has a bracket without its",
        ),
        (
            "SLURM_STEP_TASKS_PER_NODE=2,",
            "SLURM_STEP_TASKS_PER_NODE=\"2,\" has a part \"\", which is",
        ),
    ] {
        let found = place(&with(&tasks[2], more));
        assert!(found.starts_with(expected), "{more}\n  gave     {found}\n  expected {expected}");
    }
    let mut lost = tasks[2].clone();
    lost.remove("SLURM_LOCALID");
    assert!(place(&lost).starts_with("SLURM_STEP_ID=\"0\" is set but SLURM_LOCALID is not"));

    // rank 0 on another host than the list begins with
    let first = with(&tasks[0], "SLURMD_NODENAME=node2");
    assert_eq!(
        place(&first),
        "SLURM_STEP_NODELIST=\"node[1-2]\" begins with node1, but rank 0 is on node2: set \
         MASTER_ADDR=node2 for all ranks"
    );
    for vars in environment("arbitrary") {
        assert_eq!(
            place(&vars),
            "SLURM_DISTRIBUTION=\"arbitrary\" lets rank 0 be on any host: set MASTER_ADDR to the \
             host of rank 0"
        );
        assert!(place(&with(&vars, "MASTER_ADDR=node2")).ends_with("node2:21164"));
    }

    let mut mpi = environment("ompi-one").remove(1);
    mpi.remove("OMPI_COMM_WORLD_LOCAL_RANK");
    assert!(
        place(&mpi).starts_with("OMPI_COMM_WORLD_RANK=\"1\" is set but OMPI_COMM_WORLD_LOCAL_")
    );
}

#[test]
fn kubeflow() {
    let pod = with(&Vars::new(), "KUBERNETES_SERVICE_HOST=10.96.0.1");
    // As the training operator 1.9 sets them for a job with a master and a worker.
    let pytorch_job = "MASTER_ADDR=mnist-master-0 MASTER_PORT=23456 PET_MASTER_PORT=23456 \
                       PET_MASTER_ADDR=mnist-master-0 PET_NODE_RANK=1 PET_NNODES=2";
    // As Kubeflow's trainer 2 does.
    let train_job = "PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=job-node-0-0.job \
                     PET_MASTER_PORT=29500";
    let launch = "is for a launcher, which starts the processes of a pod: put `brigade launch` or \
                  torchrun before the program";
    for (vars, expected) in [
        (
            format!("{pytorch_job} RANK=1 WORLD_SIZE=2 PET_NPROC_PER_NODE=auto"),
            "1/2 0/1 1/2 mnist-master-0:23456".to_owned(),
        ),
        (
            format!("{pytorch_job} RANK=1 WORLD_SIZE=8 PET_NPROC_PER_NODE=4"),
            format!("PET_NPROC_PER_NODE=\"4\" {launch}"),
        ),
        (
            format!(
                "{pytorch_job} RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 \
                 PET_NPROC_PER_NODE=4"
            ),
            "5/8 1/4 1/2 mnist-master-0:23456".to_owned(),
        ),
        (
            format!("{train_job} PET_NPROC_PER_NODE=1"),
            "1/2 0/1 1/2 job-node-0-0.job:29500".to_owned(),
        ),
        (
            format!("{train_job} PET_NPROC_PER_NODE=auto"),
            format!("PET_NPROC_PER_NODE=\"auto\" {launch}"),
        ),
        ("PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=auto".to_owned(), "alone".to_owned()),
        (
            "PET_NNODES=1:4 PET_RDZV_ENDPOINT=mnist-worker-0:23456 PET_RDZV_BACKEND=c10d"
                .to_owned(),
            format!("PET_NNODES=\"1:4\" {launch}"),
        ),
        ("JOB_COMPLETION_INDEX=3".to_owned(), "alone".to_owned()),
        (
            "PET_NNODES=2 PET_NODE_RANK=2 PET_MASTER_ADDR=a PET_MASTER_PORT=1".to_owned(),
            "PET_NODE_RANK=2 and PET_NNODES=2 contradict each other: the first counts from 0 and \
             stays below the second"
                .to_owned(),
        ),
    ] {
        assert_eq!(place(&with(&pod, &vars)), expected, "{vars}");
    }
    // A user's defaults for torchrun
    let defaults = with(&Vars::new(), "PET_NNODES=2 PET_NPROC_PER_NODE=gpu");
    assert_eq!(place(&defaults), "alone");
    assert!(Pods::find(&|name| defaults.get(name).cloned()).is_some());
    let index = with(&pod, "JOB_COMPLETION_INDEX=3");
    assert_eq!(Pods::find(&|name| index.get(name).cloned()), None);
}

#[test]
fn ports() {
    // Steps side by side, and jobs with near numbers, do not meet.
    let vars = environment("srun").remove(0);
    let port = |job: u64, step: u64| {
        let vars = with(&vars, &format!("SLURM_JOB_ID={job} SLURM_STEP_ID={step}"));
        Step::find(&|name| vars.get(name).cloned(), None).unwrap().unwrap().port()
    };
    assert_eq!(port(0, 0), 20_000);
    assert_eq!(port(1, 2), 20_099);
    assert_eq!(port(123_456, 3), 20_000 + u16::try_from((97 * 123_456 + 3) % 9000).unwrap());
    let mut ports: Vec<u16> =
        (4_000_000..4_000_050).flat_map(|job| (0..90).map(move |step| port(job, step))).collect();
    assert!(ports.iter().all(|port| PORTS.contains(port)));
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), 50 * 90);
    assert!(PORTS.contains(&port(u64::MAX, 7)));

    // Open MPI's name of the job, whatever it looks like
    let mpi = with(&environment("ompi-one")[0], "PMIX_NAMESPACE=prterun-node1-4242@1");
    let vars = |name: &str| mpi.get(name).cloned();
    assert!(PORTS.contains(&Mpi::find(&vars).unwrap().unwrap().port(&vars)));
}
