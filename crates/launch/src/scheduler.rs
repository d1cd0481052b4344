//! Settings from a scheduler's environment about the hosts of a job, so that the launchers of all hosts need no flags.
//!
//! `srun --ntasks-per-node=1 brigade launch --nproc 4 ./train` starts one launcher on every host.
//! Each finds the number of hosts, its own number and the place to meet in its environment.

use brigade_rank_env::scheduler::{self, Mpi, MpiKind, Pods, Step};
use brigade_rank_env::{WorldError, env};

/// Value that was found in a scheduler's environment, and its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerValue<T> {
    /// Value of the setting.
    pub value: T,
    /// Source of the value: the scheduler and its variable, as in `Slurm (SLURM_NODEID)`.
    pub source: String,
}

/// Settings that a scheduler's environment gives a launcher that is one of several of the same job.
///
/// All fields are `None` where the environment has no such settings, or where the job has one host. The fields are
/// named like `torchrun`'s options. The user's flags take precedence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Surroundings {
    /// Value for `--nnodes`: `N` or `MIN:MAX`.
    pub nnodes: Option<SchedulerValue<String>>,
    /// Value for `--node-rank`.
    pub node_rank: Option<SchedulerValue<usize>>,
    /// Value for `--master-addr`.
    pub master_addr: Option<SchedulerValue<String>>,
    /// Value for `--master-port`: the port at which the launchers meet.
    pub master_port: Option<SchedulerValue<u16>>,
    /// Value for `--rdzv-id`: a name that no other job of the scheduler has.
    pub rdzv_id: Option<SchedulerValue<String>>,
    /// Value for `--rdzv-endpoint`, for elastic jobs.
    pub rdzv_endpoint: Option<SchedulerValue<String>>,
    /// Value for `--rdzv-backend`, for elastic jobs.
    pub rdzv_backend: Option<SchedulerValue<String>>,
    /// Value for `--nproc`: a number, `auto`, `cpu` or `gpu`.
    pub nproc: Option<SchedulerValue<String>>,
    /// Value for `--max-restarts`.
    pub max_restarts: Option<SchedulerValue<String>>,
    /// Note for the user about a setting that is not an error.
    pub note: Option<String>,
}

/// Error for launchers that a scheduler started and that cannot form one job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SchedulerError {
    /// The scheduler's variables contradict each other, or are incomplete.
    #[error(transparent)]
    World(#[from] WorldError),
    /// Several launchers run on one host, and each would start all ranks of the host.
    #[error(
        "{starter} started {launchers} launchers on one host, and one starts all ranks of a host: \
         use `{one_per_host} brigade launch --nproc {launchers} PROGRAM`, or start the program by \
         {starter} without `brigade launch`, or add --nnodes 1 to make each launcher a job of its \
         own"
    )]
    SeveralLaunchers {
        /// Command that started the launchers.
        starter: &'static str,
        /// Number of launchers on the host that has the most.
        launchers: usize,
        /// Command that starts one launcher on each host.
        one_per_host: &'static str,
    },
    /// A variable does not have a valid value for the option of this name.
    #[error("{name}={value:?} is not {expected}")]
    NotANumber {
        /// Name of the variable.
        name: &'static str,
        /// Value of the variable.
        value: String,
        /// Expected kind of value.
        expected: &'static str,
    },
}

impl Surroundings {
    /// Finds the settings of a scheduler in environment variables. `pid` is this process's number, if it is known.
    ///
    /// Must not be called when the user's flags select the hosts (`--nnodes`, `--node-rank`, `--hosts`, `--hostfile`,
    /// `--rdzv-endpoint`, `--standalone`): its errors do not matter then.
    ///
    /// - A launcher that is itself started by a rank of a launcher has a job of its own.
    /// - MPI comes before Slurm, as in [`brigade_rank_env::scheduler`].
    /// - `MASTER_ADDR` and `MASTER_PORT` win over what is computed.
    ///
    /// # Errors
    /// Several launchers run on one host, variables contradict each other, or no variable has the address of the first
    /// host.
    ///
    /// ```
    /// use brigade_launch::Surroundings;
    /// let task = [
    ///     ("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "1"),
    ///     ("SLURM_LOCALID", "0"), ("SLURM_NODEID", "1"), ("SLURM_STEP_NUM_TASKS", "2"),
    ///     ("SLURM_STEP_NODELIST", "gpu[07-08]"), ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
    /// ];
    /// let vars = |name: &str| Some(task.iter().find(|v| v.0 == name)?.1.to_owned());
    /// let found = Surroundings::find(&vars, None)?;
    /// assert_eq!(found.node_rank.unwrap().value, 1);
    /// let addr = found.master_addr.unwrap();
    /// assert_eq!((addr.value.as_str(), addr.source.as_str()), ("gpu07", "Slurm (SLURM_STEP_NODELIST)"));
    /// # Ok::<(), brigade_launch::SchedulerError>(())
    /// ```
    pub fn find(
        vars: &dyn Fn(&str) -> Option<String>,
        pid: Option<u32>,
    ) -> Result<Self, SchedulerError> {
        let set = |name| vars(name).is_some();
        if set(env::RANK) && set(env::LOCAL_RANK) && set(env::TORCHELASTIC_RUN_ID) {
            return Ok(Self::default());
        }
        if let Some(mpi) = Mpi::find(vars)? {
            return Self::of_mpi(&mpi, vars);
        }
        if let Some(step) = Step::find(vars, pid)? {
            return Self::of_step(&step, vars);
        }
        match Pods::find(vars) {
            Some(pods) => Self::of_pods(pods),
            None => Ok(Self { note: unused_hosts(vars), ..Self::default() }),
        }
    }

    /// Finds the settings of a scheduler in this process's environment.
    ///
    /// # Errors
    /// Returns the same errors as [`Surroundings::find`].
    pub fn here() -> Result<Self, SchedulerError> {
        let vars = |name: &str| Some(std::env::var_os(name)?.to_string_lossy().into_owned());
        Self::find(&vars, Some(std::process::id()))
    }

    /// Returns the settings as `(setting, text, source)`, with the names of the flags, in their order of importance.
    ///
    /// ```
    /// let here = brigade_launch::Surroundings::default();
    /// assert_eq!(here.settings().count(), 0);
    /// ```
    pub fn settings(&self) -> impl Iterator<Item = (&'static str, String, &str)> {
        fn row<'a, T: ToString>(
            name: &'static str,
            found: Option<&'a SchedulerValue<T>>,
        ) -> Option<(&'static str, String, &'a str)> {
            let found = found?;
            Some((name, found.value.to_string(), &found.source))
        }
        [
            row("nnodes", self.nnodes.as_ref()),
            row("node-rank", self.node_rank.as_ref()),
            row("master-addr", self.master_addr.as_ref()),
            row("master-port", self.master_port.as_ref()),
            row("rdzv-id", self.rdzv_id.as_ref()),
            row("rdzv-endpoint", self.rdzv_endpoint.as_ref()),
            row("rdzv-backend", self.rdzv_backend.as_ref()),
            row("nproc", self.nproc.as_ref()),
            row("max-restarts", self.max_restarts.as_ref()),
        ]
        .into_iter()
        .flatten()
    }

    fn of_step(step: &Step, vars: &dyn Fn(&str) -> Option<String>) -> Result<Self, SchedulerError> {
        let launchers = step.tasks_per_host.iter().copied().max().unwrap_or(1);
        if launchers > 1 {
            return Err(SchedulerError::SeveralLaunchers {
                starter: "srun",
                launchers,
                one_per_host: "srun --ntasks-per-node=1",
            });
        }
        let hosts = step.hosts.len();
        if hosts == 1 {
            return Ok(Self::default());
        }
        let slurm = |variable| format!("Slurm ({variable})");
        let (master_addr, master_port) = master_address(
            vars,
            // Host 0 of the step, which need not be the host of task 0.
            || Ok((step.hosts[0].clone(), slurm(scheduler::SLURM_STEP_NODELIST))),
            || (step.port(), slurm(scheduler::SLURM_JOB_ID)),
        )?;
        Ok(Self {
            nnodes: found(hosts.to_string(), slurm(scheduler::SLURM_STEP_NODELIST)),
            node_rank: found(step.node, slurm(scheduler::SLURM_NODEID)),
            rdzv_id: found(step.run_id(), slurm(scheduler::SLURM_JOB_ID)),
            master_addr,
            master_port,
            ..Self::default()
        })
    }

    fn of_mpi(mpi: &Mpi, vars: &dyn Fn(&str) -> Option<String>) -> Result<Self, SchedulerError> {
        if mpi.local_size > 1 {
            let (starter, one_per_host) = match mpi.kind {
                MpiKind::OpenMpi => ("mpirun", "mpirun --map-by ppr:1:node"),
                MpiKind::Mvapich => ("mpirun_rsh", "mpirun_rsh -np HOSTS -hostfile EACH_HOST_ONCE"),
                MpiKind::Pmi => ("mpiexec", "mpiexec -ppn 1"),
            };
            let launchers = mpi.local_size;
            return Err(SchedulerError::SeveralLaunchers { starter, launchers, one_per_host });
        }
        if mpi.size == 1 {
            return Ok(Self::default());
        }
        let names = mpi.kind.names();
        let from = |what: &str| format!("{} ({what})", mpi.kind.name());
        let (master_addr, master_port) = master_address(
            vars,
            || Ok((mpi.address(vars)?, from("host of rank 0"))),
            || (mpi.port(vars), from("name of the job")),
        )?;
        Ok(Self {
            nnodes: found(mpi.size.to_string(), from(names.size)),
            node_rank: found(mpi.rank, from(names.rank)),
            master_addr,
            master_port,
            ..Self::default()
        })
    }

    fn of_pods(pods: Pods) -> Result<Self, SchedulerError> {
        type Text = Option<(String, &'static str)>;
        fn named(text: Text) -> Option<SchedulerValue<String>> {
            let (value, name) = text?;
            Some(SchedulerValue { value, source: format!("Kubeflow ({name})") })
        }
        fn number<T: std::str::FromStr>(
            text: Text,
            expected: &'static str,
        ) -> Result<Option<SchedulerValue<T>>, SchedulerError> {
            let Some((text, name)) = text else { return Ok(None) };
            match text.trim().parse() {
                Ok(value) => {
                    Ok(Some(SchedulerValue { value, source: format!("Kubeflow ({name})") }))
                }
                Err(_) => Err(SchedulerError::NotANumber { name, value: text, expected }),
            }
        }
        let (nproc, max_restarts) = (named(pods.nproc), named(pods.max_restarts));
        if pods.nnodes.as_ref().is_some_and(|(nnodes, _)| nnodes == "1") {
            return Ok(Self { nproc, max_restarts, ..Self::default() });
        }
        Ok(Self {
            nnodes: named(pods.nnodes),
            node_rank: number(pods.node_rank, "a whole number from 0")?,
            master_addr: named(pods.master_addr),
            master_port: number(pods.master_port, "a port between 1 and 65535")?,
            rdzv_id: named(pods.rdzv_id),
            rdzv_endpoint: named(pods.rdzv_endpoint),
            rdzv_backend: named(pods.rdzv_backend),
            nproc,
            max_restarts,
            note: None,
        })
    }
}

#[expect(clippy::unnecessary_wraps, reason = "every field of the result is optional")]
fn found<T>(value: T, source: String) -> Option<SchedulerValue<T>> {
    Some(SchedulerValue { value, source })
}

type MasterAddress = (Option<SchedulerValue<String>>, Option<SchedulerValue<u16>>);

fn master_address(
    vars: &dyn Fn(&str) -> Option<String>,
    addr: impl FnOnce() -> Result<(String, String), WorldError>,
    port: impl FnOnce() -> (u16, String),
) -> Result<MasterAddress, SchedulerError> {
    let (addr, addr_from) = match scheduler::chosen_address(vars, true)? {
        Some(addr) => (addr, env::MASTER_ADDR.to_owned()),
        None => addr()?,
    };
    let (port, port_from) = match scheduler::chosen_port(vars)? {
        Some(port) => (port, env::MASTER_PORT.to_owned()),
        None => port(),
    };
    Ok((found(addr, addr_from), found(port, port_from)))
}

/// A batch script or the shell of `salloc` has the whole job, but what it starts runs on one host.
fn unused_hosts(vars: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    vars(scheduler::SLURM_JOB_ID)?;
    let hosts: usize = vars(scheduler::SLURM_NNODES)?.trim().parse().ok()?;
    (hosts > 1).then(|| {
        format!(
            "this Slurm job has {hosts} hosts, and only this one is used: put `srun \
             --ntasks-per-node=1` before `brigade launch` to use them all"
        )
    })
}
