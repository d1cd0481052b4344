//! The environment contract, as one table. No other file names these variables.

/// One variable of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Its name in the environment.
    pub name: &'static str,
    /// What its value says.
    pub meaning: &'static str,
    /// Which launchers set it.
    pub set_by: SetBy,
}

/// Which launchers set a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetBy {
    /// torchrun and `brigade launch`, for every rank.
    Everyone,
    /// torchrun only; Brigade reads it or leaves it to PyTorch.
    Torchrun,
    /// `brigade launch` only.
    Brigade,
}

/// One row of the contract becomes a constant, a row of [`TABLE`] and a row of its documentation.
macro_rules! contract {
    ($($name:ident, $set_by:ident, $meaning:literal;)*) => {
        $(
            #[doc = concat!($meaning, ".")]
            pub const $name: &str = stringify!($name);
        )*

        /// Every variable of the contract.
        ///
        /// | Variable | Set by | Meaning |
        /// |---|---|---|
        $(#[doc = concat!("| `", stringify!($name), "` | ", stringify!($set_by), " | ", $meaning, " |")])*
        pub const TABLE: &[Variable] = &[
            $(Variable { name: $name, meaning: $meaning, set_by: SetBy::$set_by },)*
        ];
    };
}

/// Template of what a launcher puts before every line of a rank. The user sets it; it says nothing
/// about a rank's place, so it is not part of the table and passes on to launchers within ranks.
pub const TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE: &str = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";

/// The type in which models compute: `no`, `fp16` or `bf16`. Accelerate's name; `brigade launch
/// --mixed-precision` sets it. Like the one above it is a wish of the user and not part of the table.
pub const ACCELERATE_MIXED_PRECISION: &str = "ACCELERATE_MIXED_PRECISION";

/// Batches whose gradients make one optimizer step. Accelerate's name.
pub const ACCELERATE_GRADIENT_ACCUMULATION_STEPS: &str = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS";

/// Stay on the CPU where there is a GPU. Accelerate's name; `brigade launch --cpu` sets it.
pub const ACCELERATE_USE_CPU: &str = "ACCELERATE_USE_CPU";

/// How the program shards its model: a strategy (`zero3`), its options in JSON, or `none`. A wish of the user; `brigade
/// launch --sharding` sets it, and so do settings of FSDP and DeepSpeed.
pub const BRIGADE_SHARDING: &str = "BRIGADE_SHARDING";

/// How many ranks divide each layer between them (tensor parallelism). A wish of the user; `brigade launch --tensor` sets
/// it.
pub const BRIGADE_TENSOR: &str = "BRIGADE_TENSOR";

/// Whether tensor ranks have parts of the sequence between divided layers. A wish of the user; `brigade launch
/// --sequence-parallel` sets it.
pub const BRIGADE_SEQUENCE_PARALLEL: &str = "BRIGADE_SEQUENCE_PARALLEL";

/// How many ranks have the stages of each model (pipeline parallelism). A wish of the user; `brigade launch --pipeline`
/// sets it.
pub const BRIGADE_PIPELINE: &str = "BRIGADE_PIPELINE";

/// How many ranks have parts of each sequence (context parallelism). A wish of the user; `brigade launch --context` sets it.
pub const BRIGADE_CONTEXT: &str = "BRIGADE_CONTEXT";

/// How many ranks have the experts of each mixture between them (expert parallelism). A wish of the user; `brigade launch
/// --expert` sets it.
pub const BRIGADE_EXPERT: &str = "BRIGADE_EXPERT";

/// How attention gets the keys of tokens that other ranks have: `gather`, `ring` or `ulysses`. A wish of the user; `brigade
/// launch --context-method` sets it.
pub const BRIGADE_CONTEXT_METHOD: &str = "BRIGADE_CONTEXT_METHOD";

/// The secret of a job on several hosts: its launchers prove to each other that they know it. Read by
/// `brigade launch`, and kept from the ranks.
pub const BRIGADE_RDZV_SECRET: &str = "BRIGADE_RDZV_SECRET";

/// Password of the user of etcd, where a job's hosts meet by one that has users. Read by `brigade
/// launch`, and kept from the ranks.
pub const BRIGADE_ETCD_PASSWORD: &str = "BRIGADE_ETCD_PASSWORD";

/// Folder in place of `/` where the launcher looks for devices, network cards and the kernel's log: for a
/// container that has the host's files elsewhere, and for tests.
pub const BRIGADE_HOST_ROOT: &str = "BRIGADE_HOST_ROOT";

/// Variables that a launcher reads and hands on to no other process: neither to ranks nor to other
/// hosts.
pub const LAUNCHERS_OWN: [&str; 2] = [BRIGADE_RDZV_SECRET, BRIGADE_ETCD_PASSWORD];

contract! {
    RANK, Everyone, "number of this process in the job, from 0";
    WORLD_SIZE, Everyone, "number of processes in the job";
    LOCAL_RANK, Everyone, "number of this process on its host, from 0";
    LOCAL_WORLD_SIZE, Everyone, "number of processes of the job on this host";
    GROUP_RANK, Everyone, "number of this host in the job, from 0";
    GROUP_WORLD_SIZE, Everyone, "number of hosts in the job";
    ROLE_NAME, Everyone, "name of the part that this process plays; `default` where there is one part";
    ROLE_RANK, Everyone, "number of this process among those of its role";
    ROLE_WORLD_SIZE, Everyone, "number of processes of its role";
    MASTER_ADDR, Everyone, "host name or address of the store";
    MASTER_PORT, Everyone, "TCP port of the store";
    TORCHELASTIC_RESTART_COUNT, Everyone, "how many times the job has been restarted";
    TORCHELASTIC_MAX_RESTARTS, Everyone, "how many restarts are allowed";
    TORCHELASTIC_RUN_ID, Everyone, "name of the job, the same for all ranks and restarts";
    TORCHELASTIC_USE_AGENT_STORE, Everyone, "`True`: the launcher serves the store and every rank is a client; else rank 0 serves it";
    TORCHELASTIC_ERROR_FILE, Everyone, "file in which a failing rank leaves its error for the launcher";
    BRIGADE_AGENT, Brigade, "names the launcher that started this process, which finds by it what a rank has left behind";
    BRIGADE_STORE_FD, Brigade, "rank 0 only: number of an inherited socket, bound to MASTER_PORT and not listening yet, on which to serve the store";
    BRIGADE_PROGRESS_FD, Brigade, "number of an inherited pipe, into which this process may write how far it is for the launcher to show";
}
