//! Messages between the launcher and an agent on another host before the job starts.
//!
//! From the start of the job on, the same streams carry the messages of `brigade-rendezvous`. All hosts send
//! [`FromHost::Ready`] before any of them is sent [`ToHost::Go`].

use std::ffi::OsString;

use brigade_rendezvous::Decoder;
use serde::{Deserialize, Serialize};

use crate::LaunchOptions;

/// Version of this protocol; both sides must have the same.
pub(crate) const PROTOCOL: u32 = 2;

/// Message from the launcher to an agent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToHost {
    /// Requests the places of these files.
    Look {
        files: Vec<FileMark>,
        /// `true` if the files are useful only together: all at their own paths, or all copied.
        together: bool,
    },
    /// Announces a file that is missing on the host. Its contents follow in pieces.
    Store { file: FileMark },
    /// Next part of the announced file.
    Piece {
        #[serde(with = "serde_bytes")]
        bytes: Vec<u8>,
    },
    /// Sets the working folder and the variables.
    Enter {
        folder: OsString,
        variables: Vec<(OsString, OsString)>,
        /// Folders in which libraries are searched before all others.
        library_folders: Vec<OsString>,
    },
    /// Starts the job on this host.
    Job(Box<HostJob>),
    /// Sign of life while the launcher waits for other hosts.
    Wait,
    /// All hosts are ready: the next bytes are the coordinator's messages.
    Go,
}

/// Message from an agent to the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromHost {
    /// First message: version and address of the agent.
    Hello(Hello),
    /// Place of each requested file, if the host has it.
    Found { places: Vec<Option<OsString>> },
    /// A file was received completely and stored at this path.
    Stored { place: OsString },
    /// The agent has changed to the requested working folder.
    Entered,
    /// The agent is ready to start its ranks.
    Ready,
    /// The host cannot take part.
    Refused { reason: String, code: u8 },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// [`PROTOCOL`] of the agent.
    pub(crate) protocol: u32,
    /// Brigade version of the agent, for the message when the protocols differ.
    pub(crate) version: String,
    /// Path of the agent's executable.
    pub(crate) executable: String,
    /// sshd's `SSH_CONNECTION`: address and port of the client, address and port of the server.
    pub(crate) ssh_connection: Option<String>,
}

/// A file of the launcher's host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileMark {
    /// Absolute path of the file on the launcher's host.
    pub(crate) path: OsString,
    /// Required name of the file: without a folder, or below the folder named by `bundle_digest`.
    pub(crate) name: OsString,
    /// SHA-256 of the file's contents.
    pub(crate) digest: String,
    pub(crate) size: u64,
    /// Digest over all files of the bundle, which are copied into one folder. For a single file, its own digest.
    pub(crate) bundle_digest: String,
}

/// Part of one host in a job.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct HostJob {
    /// Name of the host in the list of hosts.
    pub(crate) host: String,
    pub(crate) options: LaunchOptions,
    /// Secret of the job. It is not sent as a part of `options`, whose command line or environment would expose it:
    /// this session is encrypted.
    #[serde(with = "serde_bytes")]
    pub(crate) secret: Option<Vec<u8>>,
    /// `log_dir` of `options.output`, which need not be UTF-8.
    pub(crate) log_dir: Option<OsString>,
}

/// Decodes bytes as messages of either side, for fuzzers.
#[doc(hidden)]
pub fn read_messages(bytes: &[u8]) {
    let (mut ours, mut theirs) = (Decoder::default(), Decoder::default());
    ours.push(bytes);
    theirs.push(bytes);
    while let Ok(Some(_)) = ours.next::<FromHost>() {}
    while let Ok(Some(_)) = theirs.next::<ToHost>() {}
}
