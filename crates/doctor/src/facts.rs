//! What is so on one host. No opinion about it: that is for the checks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use brigade_hardware::{Memory, Sources};

mod cpu;
mod devices;
mod elf;
mod folders;
mod host;
mod kernel_log;
mod libraries;
mod libtorch;
mod limits;
mod loader_cache;
mod names;
mod network;
mod program;
mod project;
mod variables;

pub use cpu::{Cpu, Vectors};
pub use devices::{Devices, Gpu};
pub use folders::{Folder, FolderState, FolderUse, Space};
pub use host::{Build, Host};
pub use kernel_log::{DeviceMessage, KernelLog, Kill};
pub use libraries::Missing;
pub use libtorch::Libtorch;
pub use limits::{Limit, Limits};
pub use names::{Resolution, resolve};
pub use network::{Interface, InterfaceAddress, Network};
pub use program::{Program, ProgramState};
pub use project::Project;

/// What to look at, besides the host itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Question {
    /// The program of the job: a path, or a name that is looked up in PATH.
    pub program: Option<PathBuf>,
    /// The folder that the job starts in; else the folder that we are in.
    pub working_folder: Option<PathBuf>,
    /// The folder for the ranks' output.
    pub log_folder: Option<PathBuf>,
    /// Names of the job's hosts, to be resolved.
    pub names: Vec<String>,
    /// Variables that the launcher would hand on: they hold on the hosts besides their own.
    pub variables: BTreeMap<String, String>,
}

/// Everything known about one host.
///
/// Unknown fields are passed over and missing ones are empty, so that hosts with different
/// versions still understand each other.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    /// [`FACTS_VERSION`] of the host that gathered them.
    pub version: u32,
    /// The system and our own program.
    pub host: Host,
    /// Processors.
    pub cpu: Cpu,
    /// Memory, and what of it may be used.
    pub memory: Memory,
    /// Limits of a process.
    pub limits: Limits,
    /// The folders that a job writes to.
    pub folders: Vec<Folder>,
    /// Network interfaces.
    pub network: Network,
    /// What names mean here: the host's own first.
    pub names: Vec<Resolution>,
    /// The variables that libraries and launchers listen to.
    pub variables: BTreeMap<String, String>,
    /// Accelerators and their driver.
    pub devices: Devices,
    /// The program of the job.
    pub program: Option<Program>,
    /// The libtorch that programs find without help of their own.
    pub libtorch: Option<Libtorch>,
    /// The Cargo project of the working folder.
    pub project: Option<Project>,
    /// What the kernel complains about.
    pub kernel_log: KernelLog,
}

impl Facts {
    /// Looks at this host. Takes some milliseconds, and at most about 20 s where file servers or
    /// name servers are silent.
    ///
    /// ```
    /// use brigade_doctor::{Facts, Question};
    /// use brigade_hardware::Sources;
    ///
    /// let facts = Facts::gather(&Sources::system(), &Question::default());
    /// assert!(facts.memory.total_bytes > 0);
    /// ```
    #[must_use]
    pub fn gather(sources: &Sources, question: &Question) -> Self {
        let variables = question.variables.iter();
        let sources = &variables
            .fold(sources.clone(), |sources, (name, value)| sources.with_variable(name, value));
        let shared = Arc::new(sources.clone());
        let host = Host::gather(sources);
        let working_folder = question
            .working_folder
            .clone()
            .or_else(|| std::env::current_dir().ok())
            .unwrap_or_else(|| PathBuf::from("/"));
        // All that may have to wait for a server waits at the same time.
        let folders = folders::start(&shared, &working_folder, question.log_folder.as_deref());
        let names = names::start(&shared, &host.name, &question.names);
        let program =
            question.program.as_ref().map(|it| program::start(&shared, it, &working_folder));
        let libtorch = libtorch::start(&shared, &working_folder);
        let kernel_log = KernelLog::gather(sources);
        let (folders, names) = (folders.wait(), names.wait());
        let program = program.map(program::Pending::wait);
        let (project, libtorch) = libtorch.wait();
        Self {
            version: FACTS_VERSION,
            cpu: Cpu::gather(sources),
            memory: Memory::gather(sources),
            limits: Limits::gather(sources),
            network: Network::gather(sources),
            variables: variables::gather(sources),
            devices: Devices::gather(sources),
            kernel_log,
            host,
            folders,
            names,
            program,
            libtorch,
            project,
        }
    }

    /// The folder that the job starts in, if it is there.
    #[must_use]
    pub fn working_folder(&self) -> Option<&Path> {
        let folder = self.folders.iter().find(|it| it.used_for == FolderUse::Working)?;
        matches!(folder.state, FolderState::There(_)).then_some(&folder.path)
    }
}

/// Changes when a field changes its meaning.
pub const FACTS_VERSION: u32 = 2;
