//! Slurm: the step that `srun` started this process in.

use super::{
    Names, Place, SLURM_DISTRIBUTION, SLURM_GTIDS, SLURM_JOB_ID, SLURM_LOCALID, SLURM_NNODES,
    SLURM_NODEID, SLURM_NTASKS, SLURM_PROCID, SLURM_PTY_PORT, SLURM_STEP_ID, SLURM_STEP_NODELIST,
    SLURM_STEP_NUM_NODES, SLURM_STEP_NUM_TASKS, SLURM_STEP_TASKS_PER_NODE, SLURM_TASK_PID,
    SLURMD_NODENAME, expand_hosts, expand_tasks,
};
use crate::WorldError;
use crate::vars::{Vars, below};

/// Step of a Slurm job, and this process's task in it.
///
/// Not every process with `SLURM_` variables is a task of a step. These are not, and run alone:
///
/// - a batch script and what it starts without `srun`: it has `SLURM_PROCID=0` and perhaps
///   `SLURM_NTASKS=8`, but no `SLURM_STEP_ID`;
/// - the shell of `salloc`: it has no `SLURM_PROCID`, or, where the cluster runs the shell on the
///   first host, a step number above the normal ones;
/// - a batch script that was submitted from inside a step and inherited its variables: the step's
///   (`SLURM_STEP_NUM_TASKS`, `SLURM_STEP_NUM_NODES`, `SLURM_STEP_NODELIST`) disagree with the job's own
///   (`SLURM_NTASKS`, `SLURM_NNODES`, `SLURM_GTIDS`, `SLURMD_NODENAME`). The two cannot be distinguished only if both
///   have one task on each host, the same number of hosts and the same first host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Step {
    /// Number of the job.
    pub job_id: u64,
    /// Number of the step in the job.
    pub step_id: u64,
    /// Number of this task in the step.
    pub task: usize,
    /// Number of this task on its host.
    pub local_task: usize,
    /// Number of this host in the step.
    pub node: usize,
    /// Host names of the step: at least one.
    pub hosts: Vec<String>,
    /// Number of tasks on each of the hosts.
    pub tasks_per_host: Vec<usize>,
    /// `true` if tasks are spread by the user's own list (`--distribution=arbitrary`), so that task 0 may be on any
    /// host.
    pub arbitrary: bool,
}

impl Step {
    /// Returns the step that this process is a task of, or `None`. `pid` is its process number, which distinguishes a
    /// task from a program that a user started in the terminal of a task.
    ///
    /// # Errors
    /// Variables of a step contradict each other, or the program was started in the terminal of `srun --pty` with
    /// several tasks, of which the others have no terminal.
    pub fn find(
        vars: &dyn Fn(&str) -> Option<String>,
        pid: Option<u32>,
    ) -> Result<Option<Self>, WorldError> {
        Self::read(Vars(vars), pid)
    }

    pub(super) fn read(vars: Vars<'_>, pid: Option<u32>) -> Result<Option<Self>, WorldError> {
        let number = |name| vars.text(name).and_then(|text| text.trim().parse::<u64>().ok());
        let (Some(job_id), Some(step_id)) = (number(SLURM_JOB_ID), number(SLURM_STEP_ID)) else {
            return Ok(None);
        };
        if step_id > LAST_NORMAL_STEP || vars.text(SLURM_PROCID).is_none() {
            return Ok(None);
        }
        let (tasks, nodes) = (number(SLURM_STEP_NUM_TASKS), number(SLURM_STEP_NUM_NODES));
        let inherited =
            |job: Option<u64>, step: Option<u64>| job.is_some() && step.is_some() && job != step;
        if inherited(number(SLURM_NTASKS), tasks) || inherited(number(SLURM_NNODES), nodes) {
            return Ok(None);
        }

        let hosts = expand_hosts(&vars.text(SLURM_STEP_NODELIST).unwrap_or_default())
            .map_err(|problem| vars.unusable(SLURM_STEP_NODELIST, problem))?;
        let here = vars.text(SLURMD_NODENAME);
        if here.is_some_and(|here| !hosts.contains(&here)) {
            return Ok(None);
        }
        let tasks_per_host =
            expand_tasks(&vars.text(SLURM_STEP_TASKS_PER_NODE).unwrap_or_default())
                .map_err(|problem| vars.unusable(SLURM_STEP_TASKS_PER_NODE, problem))?;
        let step = Self {
            job_id,
            step_id,
            task: vars.needed(SLURM_PROCID, SLURM_STEP_ID, UNSET)?,
            local_task: vars.needed(SLURM_LOCALID, SLURM_STEP_ID, UNSET)?,
            node: vars.needed(SLURM_NODEID, SLURM_STEP_ID, UNSET)?,
            arbitrary: vars
                .text(SLURM_DISTRIBUTION)
                .is_some_and(|how| how.starts_with("arbitrary")),
            hosts,
            tasks_per_host,
        };
        step.check(vars)?;
        // A batch script has the number of one task here, whatever the step that it was submitted
        // from had on its first host.
        let own = vars.text(SLURM_GTIDS).map(|tasks| tasks.split(',').count());
        if own.is_some_and(|own| own != step.local_tasks()) {
            return Ok(None);
        }
        let direct = pid.is_none_or(|pid| number(SLURM_TASK_PID) == Some(u64::from(pid)));
        if step.tasks() > 1 && !direct && vars.text(SLURM_PTY_PORT).is_some() {
            return Err(vars.unusable(
                SLURM_PTY_PORT,
                format!(
                    "is set for the terminal of `srun --pty` with {} tasks, of which the others do not \
                     run this program: use `srun --pty --ntasks=1` for a terminal, \
                     unset SLURM_STEP_ID to run alone, or unset SLURM_PTY_PORT if srun started \
                     this program on all tasks",
                    step.tasks()
                ),
            ));
        }
        Ok(Some(step))
    }

    fn check(&self, vars: Vars<'_>) -> Result<(), WorldError> {
        let numbers_agree = |name, value, other, other_value, rule| {
            if value == other_value {
                return Ok(());
            }
            Err(WorldError::Contradiction { name, value, other, other_value, rule })
        };
        let hosts = (SLURM_STEP_NODELIST, self.hosts.len());
        numbers_agree(
            SLURM_STEP_TASKS_PER_NODE,
            self.tasks_per_host.len(),
            hosts.0,
            hosts.1,
            "both list all hosts of the step",
        )?;
        if let Some(tasks) = vars.number(SLURM_STEP_NUM_TASKS)? {
            numbers_agree(
                SLURM_STEP_TASKS_PER_NODE,
                self.tasks(),
                SLURM_STEP_NUM_TASKS,
                tasks,
                "both count the tasks of the step",
            )?;
        }
        below((SLURM_NODEID, self.node), hosts)?;
        below((SLURM_PROCID, self.task), (SLURM_STEP_NUM_TASKS, self.tasks()))?;
        below((SLURM_LOCALID, self.local_task), (SLURM_STEP_TASKS_PER_NODE, self.local_tasks()))
    }

    /// Returns the number of tasks of the step.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.tasks_per_host.iter().sum()
    }

    /// Returns the number of tasks of the step on this host.
    #[must_use]
    pub fn local_tasks(&self) -> usize {
        self.tasks_per_host.get(self.node).copied().unwrap_or_default()
    }

    /// Returns a name for the job that no other step of the cluster has at the same time.
    #[must_use]
    pub fn run_id(&self) -> String {
        format!("slurm-{}.{}", self.job_id, self.step_id)
    }

    /// Returns the port on which the tasks meet: `20000 + (97 × job + step) mod 9000`. Steps of one job that run side
    /// by side have different ports, and so have jobs with close numbers.
    #[must_use]
    pub fn port(&self) -> u16 {
        job_port(self.job_id, self.step_id)
    }

    pub(super) fn place(&self, vars: Vars<'_>) -> Result<Place, WorldError> {
        let nodes = self.hosts.len();
        let first = &self.hosts[0];
        let addr = super::address(vars, nodes == 1, || {
            if self.arbitrary {
                return Err(vars.unusable(
                    SLURM_DISTRIBUTION,
                    "lets rank 0 be on any host: set MASTER_ADDR to the host of rank 0",
                ));
            }
            if self.task == 0 {
                let here = vars.text(SLURMD_NODENAME);
                super::must_be_here(here, first, SLURM_STEP_NODELIST, vars)?;
            }
            Ok(first.clone())
        })?;
        Ok(Place {
            names: NAMES,
            rank: self.task,
            size: self.tasks(),
            local_rank: self.local_task,
            local_size: self.local_tasks(),
            node: self.node,
            nodes,
            addr,
            port: super::chosen_port(vars.0)?.unwrap_or_else(|| self.port()),
            run_id: Some(self.run_id()),
        })
    }
}

/// Returns the port of [`Step::port`] for a job and a step.
pub(super) fn job_port(job: u64, step: u64) -> u16 {
    super::port_of(job.wrapping_mul(97).wrapping_add(step))
}

const NAMES: Names = Names {
    rank: SLURM_PROCID,
    size: SLURM_STEP_NUM_TASKS,
    local_rank: SLURM_LOCALID,
    local_size: SLURM_STEP_TASKS_PER_NODE,
};
/// Largest number of an ordinary step. Larger numbers are those of the batch script, the shell of `salloc` and the
/// like.
const LAST_NORMAL_STEP: u64 = 0xffff_fff0;
const UNSET: &str = "start the program with srun, or unset the first to run it alone";
