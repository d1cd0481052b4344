//! The variables of schedulers that Brigade reads, as one table.

#![allow(non_upper_case_globals)] // Open MPI's own spelling

/// A variable that a scheduler sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerVariable {
    /// Name of the environment variable.
    pub name: &'static str,
    /// Scheduler or launcher that sets the variable.
    pub set_by: &'static str,
    /// Meaning of the variable's value.
    pub meaning: &'static str,
}

/// One row becomes a constant, a row of [`TABLE`] and a row of its documentation.
macro_rules! scheduler_variables {
    ($($name:ident, $set_by:literal, $meaning:literal;)*) => {
        $(
            #[doc = concat!($set_by, ": ", $meaning, ".")]
            pub const $name: &str = stringify!($name);
        )*

        /// Every variable of a scheduler that Brigade reads.
        ///
        /// | Variable | Set by | Meaning |
        /// |---|---|---|
        $(#[doc = concat!("| `", stringify!($name), "` | ", $set_by, " | ", $meaning, " |")])*
        pub const TABLE: &[SchedulerVariable] = &[
            $(SchedulerVariable { name: $name, set_by: $set_by, meaning: $meaning },)*
        ];
    };
}

scheduler_variables! {
    SLURM_JOB_ID, "Slurm", "number of the job";
    SLURM_JOB_NODELIST, "Slurm", "hosts of the job";
    SLURM_NNODES, "Slurm", "hosts of the job; in a step, of the step";
    SLURM_NTASKS, "Slurm", "tasks that were asked for; in a step, its tasks";
    SLURM_STEP_ID, "srun", "number of the step in its job";
    SLURM_STEP_NUM_TASKS, "srun", "tasks of the step";
    SLURM_STEP_NUM_NODES, "srun", "hosts of the step";
    SLURM_STEP_NODELIST, "srun", "hosts of the step";
    SLURM_STEP_TASKS_PER_NODE, "srun", "tasks on each host of the step, as in `2(x3),1`";
    SLURM_PROCID, "Slurm", "number of this task in the step; 0 in a batch script";
    SLURM_LOCALID, "Slurm", "number of this task on its host";
    SLURM_GTIDS, "Slurm", "numbers of the tasks on this host; 0 in a batch script";
    SLURM_NODEID, "Slurm", "number of this host in the step";
    SLURM_DISTRIBUTION, "srun", "how tasks are spread over the hosts";
    SLURM_TASK_PID, "Slurm", "process number of the task, or of the batch script";
    SLURM_PTY_PORT, "srun --pty", "the task with number 0 has a terminal; also set in what that starts";
    SLURMD_NODENAME, "Slurm", "name of this host";
    OMPI_COMM_WORLD_RANK, "Open MPI", "number of this process";
    OMPI_COMM_WORLD_SIZE, "Open MPI", "number of processes";
    OMPI_COMM_WORLD_LOCAL_RANK, "Open MPI", "number of this process on its host";
    OMPI_COMM_WORLD_LOCAL_SIZE, "Open MPI", "number of processes on this host";
    OMPI_MCA_orte_num_nodes, "Open MPI 4", "number of hosts with processes";
    OMPI_MCA_orte_hnp_uri, "Open MPI 4", "where mpirun listens";
    OMPI_MCA_orte_local_daemon_uri, "Open MPI 4", "where this host's daemon listens; mpirun itself is daemon 0";
    PMIX_NAMESPACE, "Open MPI", "name of the job";
    PMIX_HOSTNAME, "Open MPI", "name of this host";
    MV2_COMM_WORLD_RANK, "MVAPICH2", "number of this process";
    MV2_COMM_WORLD_SIZE, "MVAPICH2", "number of processes";
    MV2_COMM_WORLD_LOCAL_RANK, "MVAPICH2", "number of this process on its host";
    MV2_COMM_WORLD_LOCAL_SIZE, "MVAPICH2", "number of processes on this host";
    PMI_RANK, "MPICH, Intel MPI, srun --mpi=pmi2", "number of this process";
    PMI_SIZE, "MPICH, Intel MPI, srun --mpi=pmi2", "number of processes";
    MPI_LOCALRANKID, "MPICH, Intel MPI", "number of this process on its host";
    MPI_LOCALNRANKS, "MPICH, Intel MPI", "number of processes on this host";
    MPIR_CVAR_CH3_INTERFACE_HOSTNAME, "MPICH", "name of this host";
    KUBERNETES_SERVICE_HOST, "Kubernetes", "set in every pod";
    JOB_COMPLETION_INDEX, "Kubernetes, Indexed Job", "number of this pod in its job";
    PET_NNODES, "Kubeflow", "number of pods, or MIN:MAX when the job is elastic";
    PET_NODE_RANK, "Kubeflow", "number of this pod";
    PET_NPROC_PER_NODE, "Kubeflow", "processes in each pod: a number, auto, cpu or gpu";
    PET_MASTER_ADDR, "Kubeflow", "name of the first pod";
    PET_MASTER_PORT, "Kubeflow", "port of the first pod";
    PET_RDZV_ENDPOINT, "Kubeflow, elastic", "where the pods meet";
    PET_RDZV_BACKEND, "Kubeflow, elastic", "how the pods meet: c10d or etcd";
    PET_RDZV_ID, "Kubeflow, elastic", "name of the job";
    PET_MAX_RESTARTS, "Kubeflow, elastic", "how often the processes may be started again";
}
