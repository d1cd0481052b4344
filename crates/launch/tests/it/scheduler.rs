//! What launchers find in the environments of real schedulers (recorded in the tests of `brigade-rank-env`).

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use brigade_launch::{SchedulerError, Surroundings};

type Vars = HashMap<String, String>;

fn environment(name: &str) -> Vec<Vars> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../rank-env/tests/environments");
    let text = fs::read_to_string(folder.join(name).with_extension("env")).unwrap();
    let tasks = text.split("# task ").skip(1);
    tasks.map(|task| task.lines().filter_map(pair).collect()).collect()
}

fn pair(line: &str) -> Option<(String, String)> {
    line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))
}

fn with(vars: &Vars, more: &str) -> Vars {
    let mut vars = vars.clone();
    vars.extend(more.split_whitespace().filter_map(pair));
    vars
}

fn find(vars: &Vars) -> Result<Surroundings, SchedulerError> {
    Surroundings::find(&|name| vars.get(name).cloned(), None)
}

/// `nnodes=2 [Slurm (X)]` and so on, a line each
fn show(vars: &Vars) -> String {
    let found = match find(vars) {
        Err(error) => return error.to_string(),
        Ok(found) => found,
    };
    let settings = found.settings().map(|(name, text, source)| format!("{name}={text} [{source}]"));
    settings.chain(found.note.clone()).collect::<Vec<_>>().join("\n")
}

/// A step with one task on each of its two hosts.
fn one_per_host(node: usize) -> Vars {
    let counts = "SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)";
    with(&environment("srun")[2], &format!("{counts} SLURM_NODEID={node} SLURM_PROCID={node}"))
}

#[test]
fn slurm() {
    for node in 0..2 {
        assert_eq!(
            show(&one_per_host(node)),
            format!(
                "nnodes=2 [Slurm (SLURM_STEP_NODELIST)]\n\
                 node-rank={node} [Slurm (SLURM_NODEID)]\n\
                 master-addr=node1 [Slurm (SLURM_STEP_NODELIST)]\n\
                 master-port=21261 [Slurm (SLURM_JOB_ID)]\n\
                 rdzv-id=slurm-13.0 [Slurm (SLURM_JOB_ID)]"
            )
        );
    }
    let chosen = with(&one_per_host(1), "MASTER_ADDR=ib1 MASTER_PORT=77");
    let shown = show(&chosen);
    assert!(
        shown.contains("\nmaster-addr=ib1 [MASTER_ADDR]\nmaster-port=77 [MASTER_PORT]\n"),
        "{shown}"
    );
    let error = show(&with(&one_per_host(1), "MASTER_ADDR=127.0.0.1"));
    assert!(error.starts_with("MASTER_ADDR=\"127.0.0.1\" means each host itself"), "{error}");

    // Task 0 is on the second host; launchers are numbered by host.
    let arbitrary = environment("arbitrary");
    assert!(
        show(&arbitrary[0]).contains("\nnode-rank=1 [Slurm (SLURM_NODEID)]\nmaster-addr=node1 ")
    );
    assert!(
        show(&arbitrary[1]).contains("\nnode-rank=0 [Slurm (SLURM_NODEID)]\nmaster-addr=node1 ")
    );

    for vars in environment("srun") {
        assert_eq!(
            show(&vars),
            "srun started 2 launchers on one host, but one launcher starts all ranks of a host: use `srun \
             --ntasks-per-node=1 brigade launch --nproc 2 PROGRAM`, or start the program by srun \
             without `brigade launch`, or add --nnodes 1 to make each launcher a separate job"
        );
    }
}

#[test]
fn one_host_needs_nothing() {
    assert_eq!(find(&Vars::new()), Ok(Surroundings::default()));
    assert_eq!(show(&environment("substep")[0]), "");
    let single = with(&Vars::new(), "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1");
    assert_eq!(show(&single), "");
    // A rank of a launcher in a step that starts a launcher: a separate job.
    let rank = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 TORCHELASTIC_RUN_ID=slurm-13.0";
    assert_eq!(show(&with(&one_per_host(1), rank)), "");
}

#[test]
fn hosts_that_are_not_used_are_noted() {
    let note = "this Slurm job has 2 hosts, and only this one is used: put `srun \
                --ntasks-per-node=1` before `brigade launch` to use them all";
    for name in ["batch", "interactive", "chained"] {
        assert_eq!(show(&environment(name)[0]), note, "{name}");
    }
    assert_eq!(show(&with(&environment("batch")[0], "SLURM_NNODES=1")), "");
}

#[test]
fn mpi() {
    let spread = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=1";
    let two = environment("ompi-two");
    assert_eq!(
        show(&with(&two[2], spread)),
        "nnodes=2 [Open MPI (OMPI_COMM_WORLD_SIZE)]\n\
         node-rank=1 [Open MPI (OMPI_COMM_WORLD_RANK)]\n\
         master-addr=10.77.0.1 [Open MPI (host of rank 0)]\n\
         master-port=22718 [Open MPI (name of the job)]"
    );
    let error = show(&two[0]);
    assert!(error.starts_with("mpirun started 2 launchers on one host"), "{error}");
    assert!(error.contains("use `mpirun --map-by ppr:1:node brigade launch --nproc 2 PROGRAM`"));
    let pmi = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1";
    let error = show(&with(&Vars::new(), pmi));
    assert!(error.ends_with("add `-genv MASTER_ADDR HOST` to mpiexec"), "{error}");
    let shown = show(&with(&Vars::new(), &format!("{pmi} MASTER_ADDR=a")));
    assert!(
        shown.contains("addr=a [MASTER_ADDR]\nmaster-port=29500 [MPICH or Intel MPI"),
        "{shown}"
    );
}

#[test]
fn kubeflow() {
    let fixed = "KUBERNETES_SERVICE_HOST=10.96.0.1 MASTER_ADDR=mnist-master-0 MASTER_PORT=23456 \
                 PET_MASTER_PORT=23456 PET_MASTER_ADDR=mnist-master-0 RANK=1 WORLD_SIZE=8 \
                 PET_NODE_RANK=1 PET_NNODES=2 PET_NPROC_PER_NODE=4";
    let fixed = with(&Vars::new(), fixed);
    assert_eq!(
        show(&fixed),
        "nnodes=2 [Kubeflow (PET_NNODES)]\n\
         node-rank=1 [Kubeflow (PET_NODE_RANK)]\n\
         master-addr=mnist-master-0 [Kubeflow (PET_MASTER_ADDR)]\n\
         master-port=23456 [Kubeflow (PET_MASTER_PORT)]\n\
         nproc=4 [Kubeflow (PET_NPROC_PER_NODE)]"
    );
    let one = with(&fixed, "PET_NNODES=1 PET_NODE_RANK=0");
    assert_eq!(show(&one), "nproc=4 [Kubeflow (PET_NPROC_PER_NODE)]");
    let error = show(&with(&fixed, "PET_MASTER_PORT=http"));
    assert_eq!(error, "PET_MASTER_PORT=\"http\" is not a port between 1 and 65535");

    let elastic = "KUBERNETES_SERVICE_HOST=10.96.0.1 PET_RDZV_ENDPOINT=e-worker-0:23456 \
                   PET_RDZV_BACKEND=c10d PET_NNODES=1:4 PET_MAX_RESTARTS=3 PET_RDZV_ID=e \
                   PET_NPROC_PER_NODE=auto";
    assert_eq!(
        show(&with(&Vars::new(), elastic)),
        "nnodes=1:4 [Kubeflow (PET_NNODES)]\n\
         rdzv-id=e [Kubeflow (PET_RDZV_ID)]\n\
         rdzv-endpoint=e-worker-0:23456 [Kubeflow (PET_RDZV_ENDPOINT)]\n\
         rdzv-backend=c10d [Kubeflow (PET_RDZV_BACKEND)]\n\
         nproc=auto [Kubeflow (PET_NPROC_PER_NODE)]\n\
         max-restarts=3 [Kubeflow (PET_MAX_RESTARTS)]"
    );

    // A JobSet that numbers its pods and gives the rest in the manifest
    let jobset = "JOB_COMPLETION_INDEX=2 PET_NNODES=3 PET_MASTER_ADDR=s-workers-0-0.s \
                  PET_MASTER_PORT=29500";
    assert!(
        show(&with(&Vars::new(), jobset)).contains("node-rank=2 [Kubeflow (JOB_COMPLETION_INDEX)]")
    );

    // torchrun's variables alone, meant for one process in each pod
    let plain = "KUBERNETES_SERVICE_HOST=10.96.0.1 RANK=1 WORLD_SIZE=2 MASTER_ADDR=m MASTER_PORT=5";
    let plain = with(&Vars::new(), plain);
    assert!(show(&plain).starts_with("nnodes=2 [Kubeflow (WORLD_SIZE)]\nnode-rank=1 "));
    // elsewhere they belong to a launcher, whose ranks may start any program
    let mut elsewhere = plain;
    elsewhere.remove("KUBERNETES_SERVICE_HOST");
    assert_eq!(show(&elsewhere), "");
}
