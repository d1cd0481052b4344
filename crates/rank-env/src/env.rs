//! The environment contract, as one table. No other file names these variables.

/// An environment variable that a launcher sets for each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variable {
    /// Name of the environment variable.
    pub name: &'static str,
    /// Meaning of the variable's value.
    pub meaning: &'static str,
    /// Launchers that set the variable.
    pub set_by: SetBy,
}

/// Launchers that set an environment variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetBy {
    /// Set by torchrun and `brigade launch`, for every rank.
    Everyone,
    /// Set by torchrun only. Brigade reads it or leaves it to PyTorch.
    Torchrun,
    /// Set by `brigade launch` only.
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

/// Template of the prefix that a launcher puts before every output line of a rank. The user sets it. It does not
/// describe a rank's place in the job, so it is not part of the table, and nested launchers inherit it.
pub const TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE: &str = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";

/// Compute type of mixed precision: `no`, `fp16` or `bf16`. The name is Accelerate's; `brigade launch
/// --mixed-precision` sets it. It is a setting of the user and does not describe a rank's place, so it is not part of
/// the table.
pub const ACCELERATE_MIXED_PRECISION: &str = "ACCELERATE_MIXED_PRECISION";

/// Number of batches whose gradients are accumulated for one optimizer step. The name is Accelerate's.
pub const ACCELERATE_GRADIENT_ACCUMULATION_STEPS: &str = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS";

/// Switch that keeps a program on the CPU although the host has a GPU. The name is Accelerate's; `brigade launch --cpu`
/// sets it.
pub const ACCELERATE_USE_CPU: &str = "ACCELERATE_USE_CPU";

/// Sharding of the model: a strategy (`zero3`), its options in JSON, or `none`. Users set it with `brigade launch
/// --sharding`, or with settings of FSDP and DeepSpeed.
pub const BRIGADE_SHARDING: &str = "BRIGADE_SHARDING";

/// Tensor-parallel size: the number of ranks that divide each layer between them. Users set it with `brigade launch
/// --tensor`.
pub const BRIGADE_TENSOR: &str = "BRIGADE_TENSOR";

/// Switch of sequence parallelism: between divided layers, each tensor-parallel rank has a part of the sequence. Users
/// set it with `brigade launch --sequence-parallel`.
pub const BRIGADE_SEQUENCE_PARALLEL: &str = "BRIGADE_SEQUENCE_PARALLEL";

/// Pipeline-parallel size: the number of ranks among which the stages of each model are divided. Users set it with
/// `brigade launch --pipeline`.
pub const BRIGADE_PIPELINE: &str = "BRIGADE_PIPELINE";

/// Number of micro-batches into which a pipeline cuts each batch. Users set it with `brigade launch --micro-batches`.
pub const BRIGADE_MICRO_BATCHES: &str = "BRIGADE_MICRO_BATCHES";

/// Pipeline schedule, the order of forward and backward passes: `gpipe`, `1f1b`, `interleaved`, `looped-bfs`, `zb-h1`
/// or `zbv`. Users set it with `brigade launch --pipeline-schedule`.
pub const BRIGADE_PIPELINE_SCHEDULE: &str = "BRIGADE_PIPELINE_SCHEDULE";

/// Number of pipeline stages per rank (virtual stages). Users set it with `brigade launch --pipeline-chunks`.
pub const BRIGADE_PIPELINE_CHUNKS: &str = "BRIGADE_PIPELINE_CHUNKS";

/// Context-parallel size: the number of ranks among which each sequence is divided. Users set it with `brigade launch
/// --context`.
pub const BRIGADE_CONTEXT: &str = "BRIGADE_CONTEXT";

/// Expert-parallel size: the number of ranks among which the experts of each mixture are divided. Users set it with
/// `brigade launch --expert`.
pub const BRIGADE_EXPERT: &str = "BRIGADE_EXPERT";

/// Method by which attention gets the keys of tokens that other ranks have: `gather`, `ring` or `ulysses`. Users set it
/// with `brigade launch --context-method`.
pub const BRIGADE_CONTEXT_METHOD: &str = "BRIGADE_CONTEXT_METHOD";

/// Shared secret of a job on several hosts: its launchers prove to each other that they have it. `brigade launch` reads
/// the variable and does not pass it to the ranks.
pub const BRIGADE_RDZV_SECRET: &str = "BRIGADE_RDZV_SECRET";

/// Password of the etcd user, for a rendezvous over an etcd with authentication. `brigade launch` reads the variable
/// and does not pass it to the ranks.
pub const BRIGADE_ETCD_PASSWORD: &str = "BRIGADE_ETCD_PASSWORD";

/// Folder that replaces `/` where the launcher looks for devices, network cards and the kernel's log: for a container
/// that has the host's files elsewhere, and for tests.
pub const BRIGADE_HOST_ROOT: &str = "BRIGADE_HOST_ROOT";

/// Names of variables that a launcher reads and passes to no other process: neither to ranks nor to other hosts.
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
