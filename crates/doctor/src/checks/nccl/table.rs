//! Table of the variables of NCCL and of PyTorch's NCCL backend.
//!
//! Names: NCCL's documentation of its variables and what its source reads, both of version 2.30.7, with
//! those that the library of version 2.29.7 has besides; PyTorch 2.13, `ProcessGroupNCCL.hpp` and the
//! names in its libraries. Values: the same documentation, where it gives a closed list or a range.

/// Valid values of a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Values {
    /// The documentation has no list of values.
    Any,
    /// A flag, 0 or 1.
    Flag,
    /// A Boolean in one of the forms that PyTorch accepts.
    Switch,
    /// A whole number within these bounds.
    Range(i64, i64),
    /// A word of this list, in any case.
    Words(&'static [&'static str]),
    /// A comma-separated list of these words, in any case. A leading `^` excludes them instead.
    List(&'static [&'static str]),
}

use Values::{Any, Flag, List, Range, Switch, Words};

impl Values {
    /// Returns a description of valid values if `value` is not valid.
    pub(super) fn expected(self, value: &str) -> Option<String> {
        let is_one = |word: &str, of: &[&str]| of.iter().any(|it| it.eq_ignore_ascii_case(word));
        let value = value.trim();
        let (is_right, expected) = match self {
            Any => return None,
            Flag => (matches!(value, "0" | "1"), "0 or 1".to_owned()),
            Switch => (is_one(value, SWITCH), "1 or 0".to_owned()),
            Range(first, last) => {
                let number = value.parse::<i64>();
                let is_right = number.is_ok_and(|it| (first..=last).contains(&it));
                let expected = match last {
                    i64::MAX => format!("a whole number from {first}"),
                    _ => format!("a whole number from {first} to {last}"),
                };
                (is_right, expected)
            }
            Words(words) => (is_one(value, words), words.join(", ")),
            List(words) => {
                let list = value.strip_prefix('^').unwrap_or(value);
                let is_right = list.split(',').all(|it| is_one(it.trim(), words));
                (is_right, format!("a list of {}", words.join(", ")))
            }
        };
        (!is_right).then_some(expected)
    }
}

/// Returns the valid values of a variable; `None` for an unknown name.
pub(super) fn values_of(name: &str) -> Option<Values> {
    let checked = CHECKED.iter().find(|it| it.0 == name).map(|it| it.1);
    checked.or_else(|| OTHERS.contains(&name).then_some(Any))
}

/// Returns all known names.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    CHECKED.iter().map(|it| it.0).chain(OTHERS.iter().copied())
}

/// Deprecated or removed name of a variable.
#[derive(Debug)]
pub(super) struct Old {
    pub(super) name: &'static str,
    /// Current name, if the variable still exists.
    pub(super) new: Option<&'static str>,
    /// `true` if the name has no effect any more.
    pub(super) is_removed: bool,
    /// Version since which the name is deprecated.
    pub(super) since: &'static str,
}

const fn old(name: &'static str, new: &'static str, since: &'static str) -> Old {
    Old { name, new: Some(new), is_removed: false, since }
}

const fn removed(name: &'static str, new: Option<&'static str>, since: &'static str) -> Old {
    Old { name, new, is_removed: true, since }
}

pub(super) const OLD: &[Old] = &[
    old("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PyTorch 2.2"),
    old("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT", "PyTorch 2.2"),
    removed("NCCL_CHECKS_DISABLE", Some("NCCL_CHECK_MODE"), "NCCL 2.2.12"),
    old("NCCL_CHECK_POINTERS", "NCCL_CHECK_MODE", "NCCL 2.29.7"),
    old("NCCL_DESYNC_DEBUG", "TORCH_NCCL_DESYNC_DEBUG", "PyTorch 2.2"),
    old("NCCL_ENABLE_TIMING", "TORCH_NCCL_ENABLE_TIMING", "PyTorch 2.2"),
    removed("NCCL_IB_CUDA_SUPPORT", Some("NCCL_NET_GDR_LEVEL"), "NCCL 2.4"),
    old("NCCL_IB_GDR_LEVEL", "NCCL_NET_GDR_LEVEL", "NCCL 2.4"),
    removed("NCCL_LL_THRESHOLD", None, "NCCL 2.5"),
    old("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", "NCCL 2.17"),
    old("NCCL_MAX_NRINGS", "NCCL_MAX_CTAS", "NCCL 2.5"),
    old("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL 2.17"),
    old("NCCL_MIN_NRINGS", "NCCL_MIN_CTAS", "NCCL 2.5"),
    removed("NCCL_SINGLE_RING_THRESHOLD", None, "NCCL 2.3"),
    removed("NCCL_TREE_THRESHOLD", None, "NCCL 2.5"),
    old(
        "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
        "PyTorch 2.2",
    ),
];

/// Prefixes of names that other programs read: plugins, and builds against NCCL.
pub(super) const OF_OTHERS: &[&str] = &[
    "NCCL_DIR",
    "NCCL_FASTRAK_",
    "NCCL_GPUDIRECTTCPX_",
    "NCCL_HOME",
    "NCCL_INCLUDE_DIR",
    "NCCL_LIB",
    "NCCL_PATH",
    "NCCL_PLUGIN_",
    "NCCL_ROOT",
    "NCCL_SHIMNET_",
    "NCCL_TUNER_CONFIG_PATH",
    "NCCL_VERSION",
];

/// Booleans that PyTorch accepts (`getCvarBool`).
const SWITCH: &[&str] = &["y", "yes", "1", "t", "true", "n", "no", "0", "f", "false"];
/// Maximum distance of devices. The numbers are the older form.
const PATHS: &[&str] = &[
    "LOC", "NVL", "PIX", "PXB", "PHB", "PXN", "P2C", "NODE", "SYS", "0", "1", "2", "3", "4", "5",
    "6", "7", "8", "9",
];

/// Names whose values are checked.
const CHECKED: &[(&str, Values)] = &[
    ("NCCL_BUFFSIZE", Range(1, i64::MAX)),
    ("NCCL_CHECK_MODE", Words(&["DEFAULT", "DEBUG_LOCAL", "DEBUG_GLOBAL"])),
    ("NCCL_COLLNET_ENABLE", Flag),
    ("NCCL_CROSS_NIC", Range(0, 2)),
    ("NCCL_CUMEM_ENABLE", Flag),
    ("NCCL_DEBUG", Words(&["VERSION", "WARN", "INFO", "TRACE", "ABORT"])),
    ("NCCL_DMABUF_ENABLE", Flag),
    ("NCCL_IB_ADDR_FAMILY", Words(&["AF_INET", "AF_INET6"])),
    ("NCCL_IB_DISABLE", Flag),
    ("NCCL_IB_GID_INDEX", Range(-1, 65535)),
    ("NCCL_IB_MERGE_NICS", Flag),
    ("NCCL_IB_PCI_RELAXED_ORDERING", Range(0, 2)),
    ("NCCL_IB_QPS_PER_CONNECTION", Range(1, 128)),
    ("NCCL_IB_RETRY_CNT", Range(0, 7)),
    ("NCCL_IB_SL", Range(-1, 15)),
    ("NCCL_IB_TC", Range(-1, 255)),
    ("NCCL_IB_TIMEOUT", Range(0, 31)),
    ("NCCL_IGNORE_CPU_AFFINITY", Flag),
    ("NCCL_LAUNCH_MODE", Words(&["PARALLEL", "GROUP"])),
    ("NCCL_MAX_CTAS", Range(1, 64)),
    ("NCCL_MIN_CTAS", Range(1, 64)),
    ("NCCL_NET_GDR_LEVEL", Words(PATHS)),
    ("NCCL_NSOCKS_PERTHREAD", Range(1, 64)),
    ("NCCL_NTHREADS", Words(&["64", "128", "256", "512"])),
    ("NCCL_NVLS_ENABLE", Range(0, 2)),
    ("NCCL_P2P_DIRECT_DISABLE", Flag),
    ("NCCL_P2P_DISABLE", Flag),
    ("NCCL_P2P_LEVEL", Words(PATHS)),
    ("NCCL_PROTO", List(&["LL", "LL128", "Simple"])),
    ("NCCL_PXN_DISABLE", Flag),
    ("NCCL_RAS_ENABLE", Flag),
    ("NCCL_SHM_DISABLE", Flag),
    ("NCCL_SOCKET_FAMILY", Words(&["AF_INET", "AF_INET6"])),
    ("NCCL_SOCKET_NTHREADS", Range(1, 16)),
    ("TORCH_FR_BUFFER_SIZE", Range(0, i64::MAX)),
    ("TORCH_FR_CPP_STACK", Switch),
    ("TORCH_FR_DUMP_DYNAMIC_FILE_NAME", Any),
    ("TORCH_FR_DUMP_TEMP_FILE", Any),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", Range(0, 3)),
    ("TORCH_NCCL_AVOID_RECORD_STREAMS", Switch),
    ("TORCH_NCCL_BCAST_UNIQUEID", Switch),
    ("TORCH_NCCL_BLOCKING_WAIT", Switch),
    ("TORCH_NCCL_COORD_CHECK_MILSEC", Range(1, i64::MAX)),
    ("TORCH_NCCL_CUDA_EVENT_CACHE", Switch),
    ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", Any),
    ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", Any),
    ("TORCH_NCCL_DESYNC_DEBUG", Switch),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", Switch),
    ("TORCH_NCCL_ENABLE_MONITORING", Switch),
    ("TORCH_NCCL_ENABLE_TIMING", Switch),
    ("TORCH_NCCL_EXTRA_DUMP_ON_EXEC", Switch),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", Range(1, i64::MAX)),
    ("TORCH_NCCL_HIGH_PRIORITY", Switch),
    ("TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN", Switch),
    ("TORCH_NCCL_NAN_CHECK", Switch),
    ("TORCH_NCCL_NONBLOCKING_TIMEOUT", Any),
    ("TORCH_NCCL_PROPAGATE_ERROR", Switch),
    ("TORCH_NCCL_RANKS_PER_ROOT", Range(1, i64::MAX)),
    ("TORCH_NCCL_RETHROW_CUDA_ERRORS", Switch),
    ("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", Switch),
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", Range(0, i64::MAX)),
    ("TORCH_NCCL_TRACE_CPP_STACK", Switch),
    ("TORCH_NCCL_USE_COMM_NONBLOCKING", Switch),
    ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", Switch),
    ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", Range(0, i64::MAX)),
];

/// Names that accept any value.
#[rustfmt::skip]
const OTHERS: &[&str] = &[
    "NCCL_ALGO", "NCCL_ALLGATHERV_ENABLE", "NCCL_ALLOC_P2P_NET_LL_BUFFERS", "NCCL_CGA_CLUSTER_SIZE",
    "NCCL_CHUNK_SIZE", "NCCL_COLLNET_NODE_THRESHOLD", "NCCL_COMM_BLOCKING", "NCCL_COMM_ID",
    "NCCL_COMM_SHRINK_SHARE_RESOURCES", "NCCL_COMM_SPLIT_SHARE_RESOURCES", "NCCL_CONF_FILE",
    "NCCL_CONNECT_ROUND_MAX_PEERS", "NCCL_CTA_POLICY", "NCCL_CUMEM_HOST_ENABLE", "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_TIMESTAMP_FORMAT", "NCCL_DEBUG_TIMESTAMP_LEVELS",
    "NCCL_DEV_API_JIT", "NCCL_DISABLE_MEM_MANAGER", "NCCL_ELASTIC_BUFFER_REGISTER",
    "NCCL_ENABLE_VERSION_CHECK", "NCCL_ENV_PLUGIN", "NCCL_GDAKI_USE_RELIABLE_DB",
    "NCCL_GDRCOPY_ENABLE", "NCCL_GDRCOPY_FIFO_ENABLE", "NCCL_GDRCOPY_FLUSH_ENABLE",
    "NCCL_GDRCOPY_SYNC_ENABLE", "NCCL_GDR_FLUSH_DISABLE", "NCCL_GIN_COUNTER_POOL_SIZE",
    "NCCL_GIN_ENABLE", "NCCL_GIN_ERROR_QUERY_SEC", "NCCL_GIN_GDAKI_MAX_DEST_RD_ATOMIC",
    "NCCL_GIN_GDAKI_MAX_QP_RD_ATOMIC", "NCCL_GIN_GDAKI_NIC_HANDLER", "NCCL_GIN_GDAKI_QP_DEPTH",
    "NCCL_GIN_IB_TC", "NCCL_GIN_NCONNECTIONS", "NCCL_GIN_NCONTEXTS", "NCCL_GIN_PLUGIN",
    "NCCL_GIN_PLUGIN_REF_COUNT", "NCCL_GIN_PROXY_QUEUE_SIZE", "NCCL_GIN_SIGNAL_POOL_SIZE",
    "NCCL_GIN_TYPE", "NCCL_GRAPH_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE_RANK", "NCCL_GRAPH_FILE",
    "NCCL_GRAPH_HELPER_DISABLE", "NCCL_GRAPH_MIXING_SUPPORT", "NCCL_GRAPH_REGISTER",
    "NCCL_GRAPH_STREAM_ORDERING", "NCCL_GROUP_CUDA_STREAM", "NCCL_HOSTID", "NCCL_IBVERBS_LIB",
    "NCCL_IB_ADAPTIVE_ROUTING", "NCCL_IB_ADDR_RANGE", "NCCL_IB_AR_THRESHOLD", "NCCL_IB_DATA_DIRECT",
    "NCCL_IB_DEVICE_PCI_ORDER", "NCCL_IB_ECE_ENABLE", "NCCL_IB_FIFO_TC", "NCCL_IB_HCA",
    "NCCL_IB_MERGE_VFS", "NCCL_IB_MQP_RETRY_ALL", "NCCL_IB_MQP_RETRY_CNT",
    "NCCL_IB_MQP_RETRY_SLEEP_MSEC", "NCCL_IB_OOO_RQ", "NCCL_IB_PKEY",
    "NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS", "NCCL_IB_QUERY_PORT_SPEED",
    "NCCL_IB_RECEIVER_SIDE_MATCHING_SCHEME", "NCCL_IB_RESILIENCY_PORT_FAILOVER",
    "NCCL_IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS", "NCCL_IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY",
    "NCCL_IB_RESILIENCY_PORT_RECOVERY", "NCCL_IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT",
    "NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL",
    "NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE",
    "NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE",
    "NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT",
    "NCCL_IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX", "NCCL_IB_RESILIENCY_PORT_RECOVERY_START_DELAY",
    "NCCL_IB_RETURN_ASYNC_EVENTS", "NCCL_IB_ROCE_VERSION_NUM", "NCCL_IB_ROUTABLE_FLID_GID_INDEX",
    "NCCL_IB_SPLIT_DATA_ON_QPS", "NCCL_IB_SUBNET_AWARE_ROUTING", "NCCL_IB_SUBNET_PREFIX_LEN",
    "NCCL_IB_USE_INLINE", "NCCL_IB_WARN_RAIL_LOCAL", "NCCL_IGNORE_COLLNET_MISMATCH",
    "NCCL_IGNORE_DISABLED_P2P", "NCCL_IGNORE_NET_MISMATCH", "NCCL_IPC_USE_ABSTRACT_SOCKET",
    "NCCL_L1_SHARED_MEMORY_CARVEOUT", "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_LAUNCH_RACE_FATAL",
    "NCCL_LEGACY_CUDA_REGISTER", "NCCL_LL128_BUFFSIZE", "NCCL_LL128_C2C", "NCCL_LL128_NTHREADS",
    "NCCL_LL_BUFFSIZE", "NCCL_LOCAL_REGISTER", "NCCL_LSA_TEAM_SIZE", "NCCL_MAX_P2P_NCHANNELS",
    "NCCL_MEM_SYNC_DOMAIN", "NCCL_MIN_P2P_NCHANNELS", "NCCL_MLOPART_RDMA_ENABLE",
    "NCCL_MNNVL_CLIQUE_ID", "NCCL_MNNVL_CROSS_CLIQUE", "NCCL_MNNVL_ENABLE",
    "NCCL_MNNVL_RAIL_PER_HOST", "NCCL_MNNVL_SCATTER_NETS_ENABLE", "NCCL_MNNVL_UUID",
    "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MULTI_SEGMENT_REGISTER", "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_NET", "NCCL_NETDEVS_POLICY", "NCCL_NET_DISABLE_INTRA", "NCCL_NET_FORCE_FLUSH",
    "NCCL_NET_FORCE_MERGE", "NCCL_NET_GDR_C2C", "NCCL_NET_GDR_MLOPART", "NCCL_NET_GDR_READ",
    "NCCL_NET_MERGE_LEVEL", "NCCL_NET_MERGE_POLICY", "NCCL_NET_OPTIONAL_RECV_COMPLETION",
    "NCCL_NET_OVERHEAD", "NCCL_NET_PLUGIN", "NCCL_NET_PLUGIN_REF_COUNT", "NCCL_NET_SHARED_BUFFERS",
    "NCCL_NET_SHARED_COMMS", "NCCL_NO_CACHE", "NCCL_NUM_RMA_CTX", "NCCL_NVB_DISABLE",
    "NCCL_NVB_PRECONNECT", "NCCL_NVLINK_UTIL_CENTRIC_SCHED_ENABLE", "NCCL_NVLSTREE_MAX_CHUNKSIZE",
    "NCCL_NVLS_CHUNKSIZE", "NCCL_NVLS_NCHANNELS", "NCCL_NVTX_DISABLE", "NCCL_OOB_NET_ENABLE",
    "NCCL_OOB_NET_IFNAME", "NCCL_P2P_EPOCH_ENABLE", "NCCL_P2P_LL_THRESHOLD", "NCCL_P2P_MAX_PEERS",
    "NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_NVL_CHUNKSIZE", "NCCL_P2P_PCI_CHUNKSIZE",
    "NCCL_P2P_PER_CHANNEL_NET_BW", "NCCL_P2P_PXN_LEVEL", "NCCL_P2P_READ_ENABLE",
    "NCCL_P2P_SCHEDULE_GROUP_SIZE", "NCCL_P2P_USE_CUDA_MEMCPY", "NCCL_PAT_ENABLE",
    "NCCL_PROFILER_PLUGIN", "NCCL_PROGRESS_APPENDOP_FREQ", "NCCL_PROXY_APPEND_BATCH_SIZE",
    "NCCL_PROXY_CPUSET", "NCCL_PROXY_DUMP_SIGNAL", "NCCL_PXN_C2C", "NCCL_RAS_ADDR",
    "NCCL_RAS_TIMEOUT_FACTOR", "NCCL_REPORT_CONNECT_PROGRESS", "NCCL_RMA_DISABLE",
    "NCCL_RMA_PLUGIN", "NCCL_RMA_PLUGIN_REF_COUNT", "NCCL_RMA_PROXY_DUMP_SIGNAL",
    "NCCL_RMA_PROXY_QUEUE_SIZE", "NCCL_RUNTIME_CONNECT", "NCCL_SET_CPU_STACK_SIZE",
    "NCCL_SET_STACK_SIZE", "NCCL_SET_THREAD_NAME", "NCCL_SHADOW_MEMPOOL_MAX_SIZE",
    "NCCL_SHM_LOCALITY", "NCCL_SHM_MEMCPY_MODE", "NCCL_SHM_USE_CUDA_MEMCPY",
    "NCCL_SINGLE_PROC_MEM_REG_ENABLE", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_INLINE",
    "NCCL_SOCKET_MAGIC", "NCCL_SOCKET_MIN_TASKSIZE", "NCCL_SOCKET_POLL_TIMEOUT_MSEC",
    "NCCL_SOCKET_RCVBUF", "NCCL_SOCKET_RETRY_CNT", "NCCL_SOCKET_RETRY_SLEEP_MSEC",
    "NCCL_SOCKET_SNDBUF", "NCCL_SYM_CE_THRESHOLD", "NCCL_SYM_CTAS", "NCCL_SYM_GIN_KERNELS_ENABLE",
    "NCCL_SYM_KERNEL", "NCCL_SYM_NOWIN_ENABLE", "NCCL_SYM_REUSE_SYSMEM_HANDLES",
    "NCCL_SYM_RS_GIN_CHUNK_SIZE", "NCCL_SYM_TMA_ENABLE", "NCCL_THREAD_THRESHOLDS",
    "NCCL_TOPO_DUMP_FILE", "NCCL_TOPO_DUMP_FILE_RANK", "NCCL_TOPO_FILE", "NCCL_TOPO_SPLIT_MLOPART",
    "NCCL_TUNER_PLUGIN", "NCCL_UID_STAGGER_RATE", "NCCL_UID_STAGGER_THRESHOLD",
    "NCCL_UNPACK_DOUBLE_NCHANNELS", "NCCL_WARN_ENABLE_DEBUG_INFO", "NCCL_WIN_ENABLE",
    "NCCL_WIN_STRIDE", "NCCL_WORK_ARGS_BYTES", "NCCL_WORK_FIFO_BYTES",
];
