//! MPI launchers: Open MPI, MVAPICH2, and those with the PMI protocol (MPICH, Intel MPI).

use std::net::Ipv4Addr;

use super::{
    MPI_LOCALNRANKS, MPI_LOCALRANKID, MPIR_CVAR_CH3_INTERFACE_HOSTNAME, MV2_COMM_WORLD_LOCAL_RANK,
    MV2_COMM_WORLD_LOCAL_SIZE, MV2_COMM_WORLD_RANK, MV2_COMM_WORLD_SIZE,
    OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE, OMPI_COMM_WORLD_RANK,
    OMPI_COMM_WORLD_SIZE, OMPI_MCA_orte_hnp_uri, OMPI_MCA_orte_local_daemon_uri,
    OMPI_MCA_orte_num_nodes, PMI_RANK, PMI_SIZE, PMIX_HOSTNAME, PMIX_NAMESPACE, SLURM_JOB_ID,
    SLURM_JOB_NODELIST, SLURMD_NODENAME, Step, expand_hosts, slurm,
};
use super::{Names, Place};
use crate::WorldError;
use crate::vars::Vars;

/// Place of a process in an MPI job.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mpi {
    /// Launcher that started the process.
    pub kind: MpiKind,
    /// Rank of this process in the job.
    pub rank: usize,
    /// Number of processes in the job.
    pub size: usize,
    /// Number of this process on its host.
    pub local_rank: usize,
    /// Number of processes of the job on this host.
    pub local_size: usize,
}

/// Launcher of an MPI job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MpiKind {
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpirun_rsh` of MVAPICH2, a launcher over ssh.
    Mvapich,
    /// `mpiexec` of MPICH or Intel MPI, or another launcher with the PMI protocol.
    Pmi,
}

impl MpiKind {
    /// Returns the launcher's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenMpi => "Open MPI",
            Self::Mvapich => "MVAPICH2",
            Self::Pmi => "MPICH or Intel MPI",
        }
    }

    /// Returns the names of the variables that the launcher sets.
    #[must_use]
    pub fn names(self) -> Names {
        match self {
            Self::OpenMpi => Names {
                rank: OMPI_COMM_WORLD_RANK,
                size: OMPI_COMM_WORLD_SIZE,
                local_rank: OMPI_COMM_WORLD_LOCAL_RANK,
                local_size: OMPI_COMM_WORLD_LOCAL_SIZE,
            },
            Self::Mvapich => Names {
                rank: MV2_COMM_WORLD_RANK,
                size: MV2_COMM_WORLD_SIZE,
                local_rank: MV2_COMM_WORLD_LOCAL_RANK,
                local_size: MV2_COMM_WORLD_LOCAL_SIZE,
            },
            Self::Pmi => Names {
                rank: PMI_RANK,
                size: PMI_SIZE,
                local_rank: MPI_LOCALRANKID,
                local_size: MPI_LOCALNRANKS,
            },
        }
    }
}

impl Mpi {
    /// Returns the place that an MPI launcher gave this process, if one did. Returns `None` for a task that `srun
    /// --mpi=pmi2` started: it belongs to Slurm, whose [`Step`] has more details.
    ///
    /// # Errors
    /// Some of the launcher's variables are not set, or are not numbers.
    pub fn find(vars: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, WorldError> {
        Self::read(Vars(vars))
    }

    pub(super) fn read(vars: Vars<'_>) -> Result<Option<Self>, WorldError> {
        for kind in [MpiKind::OpenMpi, MpiKind::Mvapich, MpiKind::Pmi] {
            let names = kind.names();
            let Some(rank) = vars.number(names.rank)? else { continue };
            let size = vars.needed(names.size, names.rank, RESTART)?;
            if kind == MpiKind::Pmi
                && let Ok(Some(step)) = Step::read(vars, None)
                && (step.task, step.tasks()) == (rank, size)
            {
                continue;
            }
            if size == 1 {
                return Ok(Some(Self { kind, rank, size, local_rank: 0, local_size: 1 }));
            }
            let local_rank = vars.needed(names.local_rank, names.rank, RESTART)?;
            let local_size = vars.needed(names.local_size, names.rank, RESTART)?;
            return Ok(Some(Self { kind, rank, size, local_rank, local_size }));
        }
        Ok(None)
    }

    /// Returns the port on which the processes meet.
    ///
    /// - Open MPI: `20000 + FNV-1a(PMIX_NAMESPACE) mod 9000`, different for every `mpirun`.
    /// - Others inside a Slurm job: as the job's step 0, so the same for two that run side by side in
    ///   one job.
    /// - Others: 29500, torchrun's, because their variables have no value that is equal in all processes of one job and
    ///   differs between jobs.
    #[must_use]
    pub fn port(&self, vars: &dyn Fn(&str) -> Option<String>) -> u16 {
        match (vars(PMIX_NAMESPACE), vars(SLURM_JOB_ID).and_then(|id| id.trim().parse().ok())) {
            (Some(name), _) if self.kind == MpiKind::OpenMpi => super::port_of(fnv1a(&name)),
            (_, Some(job)) => slurm::job_port(job, 0),
            (_, None) => 29_500,
        }
    }

    /// Returns the address of rank 0 as seen from this host: `MASTER_ADDR`, else the loopback address when all
    /// processes are on this host, else the first host of the Slurm job, else the host where Open MPI 4's `mpirun`
    /// runs.
    ///
    /// # Errors
    /// No variable gives the address, or Open MPI's `mpirun` does not run on the host of rank 0.
    pub fn address(&self, vars: &dyn Fn(&str) -> Option<String>) -> Result<String, WorldError> {
        self.master(Vars(vars))
    }

    fn master(&self, vars: Vars<'_>) -> Result<String, WorldError> {
        super::address(vars, self.local_size >= self.size, || {
            if let Some(list) = vars.text(SLURM_JOB_NODELIST) {
                return self.first_of_job(vars, &list);
            }
            match (self.kind, mpirun(vars)) {
                (MpiKind::OpenMpi, Some(mpirun)) if self.rank > 0 || mpirun.is_here => {
                    Ok(mpirun.address.to_string())
                }
                (MpiKind::OpenMpi, Some(_)) => Err(vars.unusable(
                    OMPI_MCA_orte_hnp_uri,
                    "is not on the host of rank 0: start mpirun on the first host of the job, or \
                     add `-x MASTER_ADDR=HOST` with the host of rank 0",
                )),
                _ => Err(WorldError::NoAddress {
                    launcher: self.kind.name(),
                    size: self.size,
                    help: match self.kind {
                        MpiKind::OpenMpi => "add `-x MASTER_ADDR=HOST` to mpirun",
                        MpiKind::Mvapich => "add `MASTER_ADDR=HOST` before the program",
                        MpiKind::Pmi => "add `-genv MASTER_ADDR HOST` to mpiexec",
                    },
                }),
            }
        })
    }

    fn first_of_job(&self, vars: Vars<'_>, list: &str) -> Result<String, WorldError> {
        let hosts =
            expand_hosts(list).map_err(|problem| vars.unusable(SLURM_JOB_NODELIST, problem))?;
        let first = hosts.into_iter().next().unwrap_or_default();
        if self.rank == 0 {
            let here = [PMIX_HOSTNAME, MPIR_CVAR_CH3_INTERFACE_HOSTNAME, SLURMD_NODENAME];
            let here = here.into_iter().find_map(|name| vars.text(name));
            super::must_be_here(here, &first, SLURM_JOB_NODELIST, vars)?;
        }
        Ok(first)
    }

    pub(super) fn place(&self, vars: Vars<'_>) -> Result<Place, WorldError> {
        let addr = self.master(vars)?;
        let (node, nodes) = self.host(vars)?;
        Ok(Place {
            names: self.kind.names(),
            rank: self.rank,
            size: self.size,
            local_rank: self.local_rank,
            local_size: self.local_size,
            node,
            nodes,
            addr,
            port: super::chosen_port(vars.0)?.unwrap_or_else(|| self.port(vars.0)),
            run_id: None,
        })
    }

    /// Returns the number of this host and the number of hosts. No launcher provides the first. If ranks fill hosts of
    /// one size in order, it follows from the rank; Open MPI 4's daemons are numbered by host, with `mpirun` as 0.
    fn host(&self, vars: Vars<'_>) -> Result<(usize, usize), WorldError> {
        let (size, local_size) = (self.size, self.local_size.clamp(1, self.size));
        let hosts = match vars.number(OMPI_MCA_orte_num_nodes)? {
            Some(hosts) if self.kind == MpiKind::OpenMpi => hosts.max(1),
            _ => size.div_ceil(local_size),
        };
        let daemon = (self.kind == MpiKind::OpenMpi)
            .then(|| daemon_number(&vars.text(OMPI_MCA_orte_local_daemon_uri)?))
            .flatten();
        let in_order = self.rank / local_size;
        let fits = size == local_size * hosts
            && self.rank % local_size == self.local_rank
            && daemon.is_none_or(|daemon| daemon == in_order || daemon == in_order + 1);
        match daemon {
            _ if hosts == 1 => Ok((0, 1)),
            _ if fits => Ok((in_order, hosts)),
            Some(daemon) if daemon < hosts => Ok((daemon, hosts)),
            _ => Err(WorldError::UnevenHosts { launcher: self.kind.name(), size, local_size }),
        }
    }
}

/// Address of the host of Open MPI 4's `mpirun`, as seen from this host.
struct Mpirun {
    address: Ipv4Addr,
    is_here: bool,
}

fn mpirun(vars: Vars<'_>) -> Option<Mpirun> {
    let (far, near) =
        (vars.text(OMPI_MCA_orte_hnp_uri)?, vars.text(OMPI_MCA_orte_local_daemon_uri)?);
    let is_here = daemon_number(&near)? == 0;
    let far = addresses(&far);
    if is_here {
        return Some(Mpirun { address: *far.first()?, is_here });
    }
    // An address that both hosts have is a bridge of each, not a way between them. Of the others,
    // one in a network of this host's is the best guess: the longest common prefix.
    let near = addresses(&near);
    let closeness = |address: &Ipv4Addr| {
        let common = |own: &Ipv4Addr| (own.to_bits() ^ address.to_bits()).leading_zeros();
        near.iter().map(common).max().unwrap_or_default()
    };
    let candidates = far.into_iter().filter(|address| !near.contains(address));
    // The first of equals: `max_by_key` would take the last.
    let address = candidates.rev().max_by_key(closeness)?;
    Some(Mpirun { address, is_here })
}

/// `1214251008.1;tcp://10.77.0.2:51467` is daemon 1.
fn daemon_number(uri: &str) -> Option<usize> {
    uri.split(';').next()?.split_once('.')?.1.parse().ok()
}

/// `1214251008.0;tcp://10.77.0.1,192.168.0.1:48725;tcp6://[fe80::1]:48726` has two.
fn addresses(uri: &str) -> Vec<Ipv4Addr> {
    let transport = uri.split(';').find_map(|part| part.strip_prefix("tcp://"));
    let hosts = transport.and_then(|tcp| tcp.rsplit_once(':')).map(|(hosts, _)| hosts);
    hosts.unwrap_or_default().split(',').filter_map(|host| host.parse().ok()).collect()
}

/// A hash that is the same on all hosts and in all versions.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

const RESTART: &str = "start the program with mpirun, or unset the first to run it alone";
