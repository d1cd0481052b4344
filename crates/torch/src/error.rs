//! What can go wrong at the border, by kind.

use std::fmt;
use std::path::PathBuf;

/// An error of the border with libtorch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A collective, a point-to-point operation or the making of a group failed.
    #[error("{0}")]
    Collective(Box<CollectiveError>),
    /// A key-value store failed or timed out.
    #[error("store {operation} of {key:?} failed ({fault}): {detail}")]
    Store {
        /// What was asked: `get`, `wait`, ...
        operation: &'static str,
        /// The key or keys, or the address for `connect`.
        key: String,
        /// The kind of failure.
        fault: Fault,
        /// libtorch's own words.
        detail: String,
    },
    /// Another function of libtorch failed.
    #[error("{operation} failed ({fault}): {detail}")]
    Libtorch {
        /// What was asked.
        operation: &'static str,
        /// The kind of failure.
        fault: Fault,
        /// libtorch's own words.
        detail: String,
    },
    /// A tensor operation of tch failed.
    // Not as its source: that would be printed with libtorch's backtrace, of dozens of lines.
    #[error("tensor operation failed: {}", user_text(&.0.to_string()))]
    Tensor(tch::TchError),
    /// The caller asked for something that cannot be.
    #[error("{0}")]
    Misuse(String),
    /// The model of this rank is not the model of rank 0.
    #[error(
        "the models of rank 0 and rank {rank} differ: rank 0 has {expected}, rank {rank} has \
         {found}; build the same model on every rank"
    )]
    ModelsDiffer {
        /// The first rank that differs.
        rank: usize,
        /// The first parameter that differs, on rank 0.
        expected: String,
        /// What stands in its place on that rank.
        found: String,
    },
    /// A rank ran out of data in a join that was to end then.
    #[error(
        "rank {rank} has no more data, and the join was to end there (throw_on_early_termination)"
    )]
    EarlyTermination {
        /// The first rank without data.
        rank: usize,
    },
    /// In debug mode: the ranks do not do the same.
    #[error("{0}")]
    Desync(Box<crate::check::Desync>),
    /// A file has fewer bytes than it had, or than it was to have.
    #[error(
        "{} was cut short while it was read: expected {expected} bytes, found {found}; let nothing \
         else write it meanwhile, and take another copy of it",
        path.display()
    )]
    CutShort {
        /// The file.
        path: PathBuf,
        /// Its bytes, or the end of what was to be read.
        expected: u64,
        /// The bytes it has now.
        found: u64,
    },
    /// The system could not read a file.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// An object could not be turned into bytes or back.
    #[error("{operation}: the object cannot be carried between ranks: {detail}")]
    Object {
        /// The collective.
        operation: &'static str,
        /// serde's own words.
        detail: String,
    },
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Tensor(error)
    }
}

/// Which collective failed, where, and why.
#[derive(Debug)]
#[non_exhaustive]
pub struct CollectiveError {
    /// The operation, by its c10d name.
    pub operation: &'static str,
    /// The group's name.
    pub group: String,
    /// The rank in the group that reports.
    pub rank: usize,
    /// The number of ranks in the group.
    pub size: usize,
    /// The kind of failure.
    pub fault: Fault,
    /// libtorch's own words.
    pub detail: String,
    /// Ranks of the group that had not arrived at this operation, where that could be found out.
    pub missing: Vec<usize>,
}

impl fmt::Display for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, group, rank, size, fault, detail, missing } = self;
        write!(f, "{operation} on group {group:?} failed on rank {rank} of {size} ({fault})")?;
        match missing.as_slice() {
            [] => {}
            [one] => write!(f, "; rank {one} had not arrived")?,
            many => {
                let list: Vec<String> = many.iter().map(ToString::to_string).collect();
                write!(f, "; ranks {} had not arrived", list.join(", "))?;
            }
        }
        write!(f, ": {detail}")
    }
}

impl std::error::Error for CollectiveError {}

/// The kind of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The time limit passed.
    Timeout,
    /// A peer closed its connection: it ended or was killed.
    PeerLost,
    /// A host or address could not be reached or resolved, or a port is taken.
    Network,
    /// The store answered with an error.
    Store,
    /// The communication library (Gloo, NCCL) failed.
    Backend,
    /// The operation was aborted on this rank.
    Aborted,
    /// The backend has no such operation, or this program was built without it.
    Unsupported,
    /// Memory ran out on the host or the device.
    OutOfMemory,
    /// The arguments do not fit the operation.
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

impl Error {
    /// The kind of failure, where the error has one.
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        match self {
            Self::Collective(error) => Some(error.fault),
            Self::Store { fault, .. } | Self::Libtorch { fault, .. } => Some(*fault),
            Self::Tensor(error) => {
                says_out_of_memory(&error.to_string()).then_some(Fault::OutOfMemory)
            }
            _ => None,
        }
    }

    pub(crate) fn libtorch(operation: &'static str, error: &cxx::Exception) -> Self {
        let (fault, detail) = read_exception(error);
        Self::Libtorch { operation, fault, detail }
    }
}

/// Splits what `cpp/errors.h` wrote into the kind and the user's line.
pub(crate) fn read_exception(error: &cxx::Exception) -> (Fault, String) {
    let what = error.what();
    let mut letters = what.chars();
    let kind = letters.next().unwrap_or(' ');
    let detail = user_text(letters.as_str()).to_owned();
    (fault_of(kind, &detail), detail)
}

/// What concerns the user: without the place in libtorch's sources that comes first in Gloo's texts, and
/// without the backtrace that comes last in others'.
pub(crate) fn user_text(text: &str) -> &str {
    let text = text.split("\nException raised from").next().unwrap_or(text);
    let text = match text.strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
        Some((place, rest)) if place.contains(".cc:") || place.contains(".cpp:") => rest,
        _ => text,
    };
    text.trim()
}

/// Whether an error's text is that of an allocator without memory. The CPU's has no exception type of its
/// own, and what crosses tch has lost its type.
///
/// ```
/// use brigade_torch::says_out_of_memory;
/// assert!(says_out_of_memory("CUDA out of memory. Tried to allocate 2.00 GiB"));
/// assert!(says_out_of_memory("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"));
/// assert!(!says_out_of_memory("size mismatch"));
/// ```
#[must_use]
pub fn says_out_of_memory(text: &str) -> bool {
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

/// The kind by exception type first; Gloo's and libuv's texts decide what the type leaves open.
pub(crate) fn fault_of(kind: char, detail: &str) -> Fault {
    let lower = detail.to_ascii_lowercase();
    let says = |words: &[&str]| words.iter().any(|word| lower.contains(word));
    if says(&["timed out", "timeout", "time out"]) {
        return Fault::Timeout;
    }
    match kind {
        'M' => Fault::OutOfMemory,
        _ if says_out_of_memory(detail) => Fault::OutOfMemory,
        'U' => Fault::Unsupported,
        'N' => Fault::Network,
        'S' => Fault::Store,
        _ if says(&["connection closed", "connection reset", "broken pipe", "socket closed"]) => {
            Fault::PeerLost
        }
        _ if says(&["abort"]) => Fault::Aborted,
        _ if says(&["does not support", "not supported", "not implemented"]) => Fault::Unsupported,
        'B' | 'D' | 'R' => Fault::Backend,
        _ => Fault::Invalid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gloo_texts_have_their_kind() {
        let cases = [
            ('R', "Timed out waiting 1000ms for recv operation to complete", Fault::Timeout),
            ('R', "Connection closed by peer [127.0.0.1]:4123", Fault::PeerLost),
            ('R', "Read error [127.0.0.1]:4123: Connection reset by peer", Fault::PeerLost),
            ('S', "wait timeout after 300ms, keys: /x", Fault::Timeout),
            ('N', "The client socket has failed to connect", Fault::Network),
            ('U', "this program was built without the feature cuda", Fault::Unsupported),
            ('T', "Tensors must be contiguous", Fault::Invalid),
            ('T', "DefaultCPUAllocator: can't allocate memory", Fault::OutOfMemory),
            ('R', "std::bad_alloc", Fault::OutOfMemory),
        ];
        for (kind, text, expected) in cases {
            assert_eq!(fault_of(kind, text), expected, "{text}");
        }
    }

    #[test]
    fn places_in_the_sources_are_left_out() {
        let gloo = "[/third_party/gloo/unbound_buffer.cc:78] Timed out waiting 9ms";
        assert_eq!(user_text(gloo), "Timed out waiting 9ms");
        assert_eq!(user_text("[Rank 0]: Rank 1 failed"), "[Rank 0]: Rank 1 failed");
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
        };
        assert_eq!(
            error.to_string(),
            "all_reduce on group \"world\" failed on rank 0 of 4 (timed out); \
             ranks 1, 3 had not arrived: Timed out"
        );
    }
}
