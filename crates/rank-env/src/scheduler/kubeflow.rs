//! Kubeflow: the variables that a PyTorchJob or a TrainJob gives to each pod.

use super::{
    JOB_COMPLETION_INDEX, KUBERNETES_SERVICE_HOST, Names, PET_MASTER_ADDR, PET_MASTER_PORT,
    PET_MAX_RESTARTS, PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_RDZV_BACKEND,
    PET_RDZV_ENDPOINT, PET_RDZV_ID, Place,
};
use crate::vars::Vars;
use crate::{WorldError, env};

/// Settings of a Kubeflow job in a pod's environment. They are not checked: a launcher parses them like its own
/// options, which have the same meaning.
///
/// - A PyTorchJob sets `PET_` variables and, for one process per pod, torchrun's own. An elastic
///   one sets no rank: its pods meet at `PET_RDZV_ENDPOINT`.
/// - A TrainJob sets `PET_` variables alone.
/// - A plain Indexed Job, and so a JobSet, only numbers its pods.
/// - Older operators and other platforms set only torchrun's variables, meant for one process in
///   each pod; `RANK` is the pod's number then.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pods {
    /// Number of pods, or `MIN:MAX`, and the variable that it was read from.
    pub nnodes: Option<(String, &'static str)>,
    /// Number of this pod.
    pub node_rank: Option<(String, &'static str)>,
    /// Name of the first pod.
    pub master_addr: Option<(String, &'static str)>,
    /// Port of the first pod.
    pub master_port: Option<(String, &'static str)>,
    /// Processes in each pod: a number, `auto`, `cpu` or `gpu`.
    pub nproc: Option<(String, &'static str)>,
    /// Rendezvous endpoint of an elastic job.
    pub rdzv_endpoint: Option<(String, &'static str)>,
    /// Rendezvous backend of an elastic job.
    pub rdzv_backend: Option<(String, &'static str)>,
    /// Name of the job.
    pub rdzv_id: Option<(String, &'static str)>,
    /// Maximum number of restarts of the processes.
    pub max_restarts: Option<(String, &'static str)>,
}

impl Pods {
    /// Returns the settings of the Kubeflow job of this pod, or `None` outside of such a job.
    #[must_use]
    pub fn find(vars: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        let found = |name: &'static str| Some((vars(name).filter(|v| !v.is_empty())?, name));
        let one_per_pod =
            found(KUBERNETES_SERVICE_HOST).is_some() && found(env::LOCAL_RANK).is_none();
        let torchrun = |name| found(name).filter(|_| one_per_pod);
        let pods = Self {
            nnodes: found(PET_NNODES).or_else(|| torchrun(env::WORLD_SIZE)),
            node_rank: found(PET_NODE_RANK)
                .or_else(|| found(JOB_COMPLETION_INDEX))
                .or_else(|| torchrun(env::RANK)),
            master_addr: found(PET_MASTER_ADDR).or_else(|| torchrun(env::MASTER_ADDR)),
            master_port: found(PET_MASTER_PORT).or_else(|| torchrun(env::MASTER_PORT)),
            nproc: found(PET_NPROC_PER_NODE),
            rdzv_endpoint: found(PET_RDZV_ENDPOINT),
            rdzv_backend: found(PET_RDZV_BACKEND),
            rdzv_id: found(PET_RDZV_ID),
            max_restarts: found(PET_MAX_RESTARTS),
        };
        // A number without a count is an Indexed Job whose pods have nothing to do with each other.
        pods.nnodes.is_some().then_some(pods)
    }
}

/// The place of a program that is the only process of its pod.
pub(super) fn place(vars: Vars<'_>) -> Result<Option<Place>, WorldError> {
    let pods = vars.text(PET_NNODES).filter(|pods| pods != "1");
    let (Some(pods), Some(_)) = (pods, vars.text(KUBERNETES_SERVICE_HOST)) else {
        return Ok(None);
    };
    if pods.contains(':') || vars.text(PET_NODE_RANK).is_none() {
        return Err(vars.unusable(PET_NNODES, LAUNCH));
    }
    let nproc = vars.text(PET_NPROC_PER_NODE).unwrap_or_else(|| "1".to_owned());
    if nproc != "1" {
        return Err(vars.unusable(PET_NPROC_PER_NODE, LAUNCH));
    }
    let addr = vars.text(PET_MASTER_ADDR).or_else(|| vars.text(env::MASTER_ADDR));
    let port = match vars.port(PET_MASTER_PORT)? {
        Some(port) => Some(port),
        None => vars.port(env::MASTER_PORT)?,
    };
    let pods = vars.needed(PET_NNODES, PET_NODE_RANK, LAUNCH)?;
    let node = vars.needed(PET_NODE_RANK, PET_NNODES, LAUNCH)?;
    Ok(Some(Place {
        names: Names {
            rank: PET_NODE_RANK,
            size: PET_NNODES,
            local_rank: PET_NODE_RANK,
            local_size: PET_NPROC_PER_NODE,
        },
        rank: node,
        size: pods,
        local_rank: 0,
        local_size: 1,
        node,
        nodes: pods,
        addr: addr.ok_or_else(|| vars.missing(PET_NNODES, PET_MASTER_ADDR, LAUNCH))?,
        port: port.ok_or_else(|| vars.missing(PET_NNODES, PET_MASTER_PORT, LAUNCH))?,
        run_id: None,
    }))
}

/// A PyTorchJob with `nprocPerNode: "4"` counts four ranks per pod, and starts one process.
pub(super) fn several_processes_per_pod(vars: Vars<'_>) -> Result<(), WorldError> {
    let nproc = vars.text(PET_NPROC_PER_NODE).and_then(|text| text.parse::<usize>().ok());
    let same_rank = vars.text(env::RANK) == vars.text(PET_NODE_RANK);
    if nproc.is_some_and(|nproc| nproc > 1) && same_rank {
        return Err(vars.unusable(PET_NPROC_PER_NODE, LAUNCH));
    }
    Ok(())
}

const LAUNCH: &str = "is for a launcher, which starts the processes of a pod: put `brigade launch` \
                      or torchrun before the program";
