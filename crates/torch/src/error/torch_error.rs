//! Errors of libtorch and of calls into it.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use super::ErrorKind;
use crate::store::StoreServer;

/// Errors of libtorch and of calls into it: the detail of an [`Error`](super::Error).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchError {
    /// A collective, a point-to-point operation or the construction of a group failed.
    #[error("{0}")]
    Collective(Box<CollectiveError>),
    /// A key-value store failed or timed out.
    #[error("store {operation} of {key:?} failed ({fault}): {detail}")]
    Store {
        /// Operation of the store: `get`, `wait`, ...
        operation: &'static str,
        /// Key or keys, or the address for `connect`.
        key: String,
        /// Kind of the failure.
        fault: Fault,
        /// Error message of libtorch.
        detail: String,
    },
    /// Another function of libtorch failed.
    #[error("{operation} failed ({fault}): {detail}")]
    Libtorch {
        /// Name of the operation.
        operation: &'static str,
        /// Kind of the failure.
        fault: Fault,
        /// Error message of libtorch.
        detail: String,
    },
    /// A tensor operation of tch failed.
    // Not as its source: that would be printed with libtorch's backtrace, of dozens of lines.
    #[error("tensor operation failed: {}", reason(.0))]
    Tensor(tch::TchError),
    /// The arguments of a call are invalid.
    #[error("{0}")]
    InvalidArgument(String),
    /// An invariant of Brigade does not hold: a bug of the library, not of the program.
    #[error("internal error: {0}; this is a defect in Brigade: please report it with this line")]
    Internal(String),
    /// The model of this rank differs from that of rank 0.
    #[error(
        "the models of rank 0 and rank {rank} differ: rank 0 has {expected}, rank {rank} has \
         {found}; build the same model on every rank"
    )]
    ModelsDiffer {
        /// First rank that differs.
        rank: usize,
        /// First parameter that differs, on rank 0.
        expected: String,
        /// Parameter in its place on the rank that differs.
        found: String,
    },
    /// A rank ran out of data in a join with
    /// [`JoinOptions::throw_on_early_termination`](crate::JoinOptions::throw_on_early_termination).
    #[error("rank {rank} has no more data, which ends the join (throw_on_early_termination)")]
    EarlyTermination {
        /// First rank without data.
        rank: usize,
    },
    /// The ranks' next operations differ, found in debug mode.
    #[error("{0}")]
    Desync(Box<crate::check::Desync>),
    /// A file is shorter than expected, or than when it was opened.
    #[error(
        "{} was cut short while it was read: expected {expected} bytes, found {found}; make sure that no \
         other process writes it, and copy it again",
        path.display()
    )]
    CutShort {
        /// Path of the file.
        path: PathBuf,
        /// Expected size in bytes, or the end of the range to be read.
        expected: u64,
        /// Current size in bytes.
        found: u64,
    },
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// An object could not be serialised or deserialised.
    #[error("{operation}: the object cannot be sent between ranks: {detail}")]
    Object {
        /// Name of the collective.
        operation: &'static str,
        /// Error message of serde.
        detail: String,
    },
}

/// A failed collective, with its group and the reason.
#[derive(Debug)]
#[non_exhaustive]
pub struct CollectiveError {
    /// Name of the operation in c10d.
    pub operation: &'static str,
    /// Name of the group.
    pub group: String,
    /// Rank in the group that reports the failure.
    pub rank: usize,
    /// Number of ranks in the group.
    pub size: usize,
    /// Kind of the failure.
    pub fault: Fault,
    /// Error message of libtorch.
    pub detail: String,
    /// Ranks of the group that had not arrived at this operation, if that could be found out.
    pub missing: Vec<usize>,
    /// Server of the group's store, if the connection to it was lost: its process has ended.
    pub lost_store: Option<StoreServer>,
}

impl fmt::Display for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, group, rank, size, fault, detail, missing, lost_store } = self;
        write!(f, "{operation} on group {group:?} failed on rank {rank} of {size} ({fault})")?;
        match missing.as_slice() {
            [] => {}
            [one] => write!(f, "; rank {one} had not arrived")?,
            many => {
                let list: Vec<String> = many.iter().map(ToString::to_string).collect();
                write!(f, "; ranks {} had not arrived", list.join(", "))?;
            }
        }
        match lost_store {
            Some(StoreServer { address, rank: Some(rank) }) => write!(
                f,
                "; the store at {address}, which rank {rank} hosts, is gone, so rank {rank} has ended"
            )?,
            Some(StoreServer { address, rank: None }) => {
                write!(
                    f,
                    "; the store at {address} is gone, so the process that hosts it has ended"
                )?;
            }
            None => {}
        }
        write!(f, ": {detail}")
    }
}

impl std::error::Error for CollectiveError {}

/// The kind of a failure, by its cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The time limit passed.
    Timeout,
    /// A peer closed its connection: it ended or was killed.
    PeerLost,
    /// A host or address could not be reached or resolved, or a port is taken.
    Network,
    /// The store returned an error.
    Store,
    /// The communication library (Gloo, NCCL) failed.
    Backend,
    /// The operation was aborted on this rank.
    Aborted,
    /// The backend does not support the operation, or this program was built without it.
    Unsupported,
    /// Memory ran out on the host or the device.
    OutOfMemory,
    /// The arguments are invalid for the operation.
    Invalid,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timeout => "timed out",
            Self::PeerLost => "a peer is gone",
            Self::Network => "network",
            Self::Store => "store",
            Self::Backend => "communication library",
            Self::Aborted => "aborted",
            Self::Unsupported => "not supported",
            Self::OutOfMemory => "out of memory",
            Self::Invalid => "invalid arguments",
        })
    }
}

impl TorchError {
    /// Returns the kind of failure, if the error has one.
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        match self {
            Self::Collective(error) => Some(error.fault),
            Self::Store { fault, .. } | Self::Libtorch { fault, .. } => Some(*fault),
            Self::Tensor(error) => {
                is_out_of_memory_message(&error.to_string()).then_some(Fault::OutOfMemory)
            }
            _ => None,
        }
    }

    /// Returns the kind of the error, by which a program can react.
    pub(super) fn kind(&self) -> ErrorKind {
        match self {
            _ if self.fault() == Some(Fault::OutOfMemory) => ErrorKind::OutOfMemory,
            Self::Collective(_) | Self::Store { .. } => match self.fault() {
                Some(Fault::Invalid) => ErrorKind::InvalidArgument,
                _ => ErrorKind::Communication,
            },
            Self::Libtorch { fault, .. } => match fault {
                Fault::Timeout
                | Fault::PeerLost
                | Fault::Network
                | Fault::Store
                | Fault::Aborted => ErrorKind::Communication,
                Fault::Backend | Fault::Unsupported | Fault::OutOfMemory | Fault::Invalid => {
                    ErrorKind::Tensor
                }
            },
            Self::Tensor(_) => ErrorKind::Tensor,
            Self::InvalidArgument(_) | Self::Object { .. } => ErrorKind::InvalidArgument,
            Self::Internal(_) => ErrorKind::Internal,
            Self::ModelsDiffer { .. } | Self::EarlyTermination { .. } | Self::Desync(_) => {
                ErrorKind::RanksDiffer
            }
            Self::CutShort { .. } | Self::Read { .. } => ErrorKind::Io,
        }
    }
}

/// Exception that C++ has thrown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Thrown {
    kind: ThrownKind,
    /// Part of the message that concerns the user.
    pub(crate) detail: String,
}

/// Type of an exception, as `cpp/errors.h` writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ThrownKind {
    /// Exception of type `c10::DistStoreError`.
    Store,
    /// Exception of type `c10::DistNetworkError`.
    Network,
    /// Exception of type `c10::DistBackendError` or `c10::DistError`.
    Backend,
    /// Exception of type `c10::NotImplementedError`.
    NotImplemented,
    /// Exception of type `c10::OutOfMemoryError` or `std::bad_alloc`.
    OutOfMemory,
    /// Any other exception of type `c10::Error`.
    Libtorch,
    /// A time limit of this crate's own collectives.
    TimeLimit,
    PeerLost,
    Aborted,
    /// Exception of type `gloo::IoException`: a lost connection, or a time limit.
    GlooIo,
    /// An exception of any other type.
    Other,
}

impl Thrown {
    pub(crate) fn read(error: &cxx::Exception) -> Self {
        let mut letters = error.what().chars();
        let kind = match letters.next() {
            Some('S') => ThrownKind::Store,
            Some('N') => ThrownKind::Network,
            Some('B' | 'D') => ThrownKind::Backend,
            Some('U') => ThrownKind::NotImplemented,
            Some('M') => ThrownKind::OutOfMemory,
            Some('T') => ThrownKind::Libtorch,
            Some('L') => ThrownKind::TimeLimit,
            Some('P') => ThrownKind::PeerLost,
            Some('A') => ThrownKind::Aborted,
            Some('G') => ThrownKind::GlooIo,
            _ => ThrownKind::Other,
        };
        Self { kind, detail: user_text(letters.as_str()).to_owned() }
    }

    /// Returns the kind of failure by the exception's type.
    pub(crate) fn fault(&self) -> Fault {
        match self.kind {
            ThrownKind::Store => Fault::Store,
            ThrownKind::Network => Fault::Network,
            ThrownKind::NotImplemented => Fault::Unsupported,
            ThrownKind::OutOfMemory => Fault::OutOfMemory,
            ThrownKind::TimeLimit => Fault::Timeout,
            ThrownKind::PeerLost | ThrownKind::GlooIo => Fault::PeerLost,
            ThrownKind::Aborted => Fault::Aborted,
            // libtorch's CPU allocator throws an exception without a specific type.
            ThrownKind::Libtorch if is_out_of_memory_message(&self.detail) => Fault::OutOfMemory,
            // Gloo does the same if a rank leaves the group while others still connect to it.
            ThrownKind::Libtorch if says_connection_lost(&self.detail) => Fault::PeerLost,
            ThrownKind::Libtorch => Fault::Invalid,
            ThrownKind::Backend => nccl_fault(&self.detail).unwrap_or(Fault::Backend),
            ThrownKind::Other => Fault::Backend,
        }
    }

    /// Returns `true` if the exception is about communication between ranks.
    pub(crate) fn is_of_a_group(&self) -> bool {
        !matches!(
            self.kind,
            ThrownKind::Libtorch
                | ThrownKind::OutOfMemory
                | ThrownKind::NotImplemented
                | ThrownKind::Other
        )
    }

    /// Does the same as [`Self::fault`] for an operation with a time limit. libtorch and Gloo throw one type for an
    /// expired limit and for other failures: an operation that took as long as its limit has timed out.
    pub(crate) fn fault_after(&self, waited: Duration, limit: Duration) -> Fault {
        let may_wait = matches!(
            self.kind,
            ThrownKind::Store
                | ThrownKind::Network
                | ThrownKind::Backend
                | ThrownKind::Libtorch
                | ThrownKind::GlooIo
                | ThrownKind::Other
        );
        if may_wait && waited >= limit { Fault::Timeout } else { self.fault() }
    }
}

/// Returns the kind of a failure of NCCL, which has one type of exception for all: by the names of its results, and by
/// the messages of c10d's watchdog. Returns `None` for texts of other backends.
fn nccl_fault(text: &str) -> Option<Fault> {
    const KINDS: [(&str, Fault); 8] = [
        // First, since a watchdog that has aborted a communicator reports its reason.
        ("collective operation timeout", Fault::Timeout),
        ("ncclRemoteError", Fault::PeerLost),
        ("ncclSystemError", Fault::Network),
        ("ncclInvalidArgument", Fault::Invalid),
        ("ncclInvalidUsage", Fault::Invalid),
        ("out of memory", Fault::OutOfMemory),
        ("communicator was aborted", Fault::Aborted),
        ("ncclUnhandledCudaError", Fault::Backend),
    ];
    KINDS.iter().find(|(word, _)| text.contains(word)).map(|(_, fault)| *fault)
}

/// Returns the part of a message that concerns the user: without the position in libtorch's sources at the beginning of
/// Gloo's messages, and without the backtrace at the end of others.
pub(crate) fn user_text(text: &str) -> &str {
    let text = text.split("\nException raised from").next().unwrap_or(text);
    let text = text.strip_prefix("Gloo connectFullMesh failed with ").unwrap_or(text);
    let text = text.split(" This is typically caused by").next().unwrap_or(text);
    let text = match text.strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
        Some((place, rest)) if place.contains(".cc:") || place.contains(".cpp:") => rest,
        _ => text,
    };
    text.trim()
}

/// Returns `true` for Gloo's message for a connection that its other end has closed.
fn says_connection_lost(text: &str) -> bool {
    ["Connection closed by peer", "Connection reset by peer"]
        .iter()
        .any(|words| text.contains(words))
}

/// Returns libtorch's reason, without tch's prefix "Internal torch error".
fn reason(error: &tch::TchError) -> String {
    match error {
        tch::TchError::Torch(text) => user_text(text).to_owned(),
        other => other.to_string(),
    }
}

/// Returns `true` if an error's text is that of a failed allocation: for errors whose type does not show it. libtorch's
/// CPU allocator throws a plain `c10::Error`, and errors of tch are texts.
///
/// ```
/// use brigade_torch::is_out_of_memory_message;
/// assert!(is_out_of_memory_message("CUDA out of memory. Tried to allocate 2.00 GiB"));
/// assert!(is_out_of_memory_message("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"));
/// assert!(!is_out_of_memory_message("size mismatch"));
/// ```
#[must_use]
pub fn is_out_of_memory_message(text: &str) -> bool {
    const WORDS: [&str; 5] = [
        "out of memory",
        "can't allocate memory",
        "not enough memory",
        // oneDNN could not allocate its scratch space.
        "std::bad_alloc",
        "could not allocate",
    ];
    let lower = text.to_ascii_lowercase();
    WORDS.iter().any(|word| lower.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_come_from_types_and_from_time() {
        let thrown = |kind, detail: &str| Thrown { kind, detail: detail.to_owned() };
        let (short, limit) = (Duration::from_millis(1), Duration::from_secs(1));
        for (kind, at_once, at_the_limit) in [
            (ThrownKind::GlooIo, Fault::PeerLost, Fault::Timeout),
            (ThrownKind::Store, Fault::Store, Fault::Timeout),
            (ThrownKind::Network, Fault::Network, Fault::Timeout),
            (ThrownKind::Libtorch, Fault::Invalid, Fault::Timeout),
            (ThrownKind::PeerLost, Fault::PeerLost, Fault::PeerLost),
            (ThrownKind::Aborted, Fault::Aborted, Fault::Aborted),
            (ThrownKind::NotImplemented, Fault::Unsupported, Fault::Unsupported),
            (ThrownKind::OutOfMemory, Fault::OutOfMemory, Fault::OutOfMemory),
        ] {
            // Names and messages of users are not interpreted.
            let thrown = thrown(kind, "layer `timeout_abort` is not supported");
            assert_eq!(thrown.fault_after(short, limit), at_once, "{kind:?}");
            assert_eq!(thrown.fault_after(limit, limit), at_the_limit, "{kind:?}");
        }
        let memory = thrown(ThrownKind::Libtorch, "DefaultCPUAllocator: can't allocate memory");
        assert_eq!(memory.fault(), Fault::OutOfMemory);
        let lost = thrown(ThrownKind::Libtorch, "Connection closed by peer [127.0.0.1]:17581.");
        assert_eq!(lost.fault(), Fault::PeerLost);
    }

    #[test]
    fn places_in_the_sources_are_left_out() {
        let gloo = "[/third_party/gloo/unbound_buffer.cc:78] Timed out waiting 9ms";
        assert_eq!(user_text(gloo), "Timed out waiting 9ms");
        assert_eq!(user_text("[Rank 0]: Rank 1 failed"), "[Rank 0]: Rank 1 failed");
        let mesh = "Gloo connectFullMesh failed with [/third_party/gloo/pair.cc:553] Connection closed by peer \
                    [127.0.0.1]:17581. This is typically caused by a remote worker crashing. Check the logs. GLHF!";
        assert_eq!(user_text(mesh), "Connection closed by peer [127.0.0.1]:17581.");
        let aten = "size mismatch\nException raised from at (f.cpp:1)\nframe #0: x";
        assert_eq!(user_text(aten), "size mismatch");
    }

    #[test]
    fn the_missing_ranks_are_named() {
        let error = CollectiveError {
            operation: "all_reduce",
            group: "world".into(),
            rank: 0,
            size: 4,
            fault: Fault::Timeout,
            detail: "Timed out".into(),
            missing: vec![1, 3],
            lost_store: None,
        };
        assert_eq!(
            error.to_string(),
            "all_reduce on group \"world\" failed on rank 0 of 4 (timed out); \
             ranks 1, 3 had not arrived: Timed out"
        );
    }

    #[test]
    fn the_rank_that_hosted_a_lost_store_is_named() {
        let error = |rank| CollectiveError {
            operation: "recv",
            group: "world".into(),
            rank: 2,
            size: 3,
            fault: Fault::PeerLost,
            detail: "Connection closed".into(),
            missing: Vec::new(),
            lost_store: Some(StoreServer { address: "node-1:29500".into(), rank }),
        };
        assert_eq!(
            error(Some(0)).to_string(),
            "recv on group \"world\" failed on rank 2 of 3 (a peer is gone); the store at node-1:29500, which rank 0 \
             hosts, is gone, so rank 0 has ended: Connection closed"
        );
        assert_eq!(
            error(None).to_string(),
            "recv on group \"world\" failed on rank 2 of 3 (a peer is gone); the store at node-1:29500 is gone, so the \
             process that hosts it has ended: Connection closed"
        );
    }

    #[test]
    fn failures_of_nccl_are_told_apart() {
        let fault = |text| Thrown { kind: ThrownKind::Backend, detail: text }.fault();
        for (text, expected) in [
            (
                "NCCL communicator was aborted on rank 0. Original reason for failure was: [Rank 0] Watchdog caught \
                 collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=10000) ran for 10006 \
                 milliseconds before timing out.",
                Fault::Timeout,
            ),
            (
                "NCCL error in: ..., remote process exited or there was a network error\nncclRemoteError: A call failed \
              possibly due to a network error or a remote process exiting prematurely.",
                Fault::PeerLost,
            ),
            (
                "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
                Fault::Network,
            ),
            (
                "ncclInvalidUsage: This usually reflects invalid usage of NCCL library. Duplicate GPU detected",
                Fault::Invalid,
            ),
            (
                "ncclUnhandledCudaError: Call to CUDA function failed. Cuda failure 2 'out of memory'",
                Fault::OutOfMemory,
            ),
            ("NCCL communicator was aborted on rank 1.", Fault::Aborted),
            ("something else", Fault::Backend),
        ] {
            assert_eq!(fault(text.to_owned()), expected, "{text}");
        }
    }
}
