//! Facts about one host, without any judgement: the checks are separate.

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
mod installed;
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
pub use installed::{Installed, InstalledAs};
pub use kernel_log::{DeviceMessage, KernelLog, Kill};
pub use libraries::Missing;
pub use libtorch::Libtorch;
pub use limits::{Limit, Limits};
pub use names::{Resolution, resolve};
pub use network::{Interface, InterfaceAddress, Network};
pub use program::{Program, ProgramState};
pub use project::Project;

/// Subjects of an examination besides the host itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Question {
    /// Program of the job: a path, or a name that is looked up in PATH.
    pub program: Option<PathBuf>,
    /// Working folder of the job. Defaults to the current folder.
    pub working_folder: Option<PathBuf>,
    /// Folder for the ranks' output.
    pub log_folder: Option<PathBuf>,
    /// Names of the job's hosts, to be resolved.
    pub names: Vec<String>,
    /// Environment variables that the launcher would pass to the hosts, in addition to their own.
    pub variables: BTreeMap<String, String>,
}

/// All facts about one host.
///
/// Unknown fields are ignored and missing ones are empty, so that hosts with different versions are compatible.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    /// Value of [`FACTS_VERSION`] in the program that gathered the facts.
    pub version: u32,
    /// Operating system, and the brigade program itself.
    pub host: Host,
    /// Processors of the host.
    pub cpu: Cpu,
    /// Memory of the host, and the limit for this process.
    pub memory: Memory,
    /// Limits of a process.
    pub limits: Limits,
    /// Folders that a job writes to.
    pub folders: Vec<Folder>,
    /// Network interfaces and addresses.
    pub network: Network,
    /// Resolved host names, the host's own first.
    pub names: Vec<Resolution>,
    /// Environment variables that libraries and launchers read.
    pub variables: BTreeMap<String, String>,
    /// Accelerators and their driver.
    pub devices: Devices,
    /// Program of the job, if one was requested.
    pub program: Option<Program>,
    /// Installation of libtorch that programs without a run path find.
    pub libtorch: Option<Libtorch>,
    /// Cargo project of the working folder.
    pub project: Option<Project>,
    /// Faults in the kernel's log.
    pub kernel_log: KernelLog,
    /// Other installations of Brigade, and the version in the working folder's project.
    pub installed: Vec<Installed>,
}

impl Facts {
    /// Gathers the facts about this host. Takes some milliseconds, and at most about 20 s if file servers or name
    /// servers do not answer.
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
        // Everything that may wait for a server waits at the same time.
        let folders = folders::start(&shared, &working_folder, question.log_folder.as_deref());
        let names = names::start(&shared, &host.name, &question.names);
        let program =
            question.program.as_ref().map(|it| program::start(&shared, it, &working_folder));
        let libtorch = libtorch::start(&shared, &working_folder);
        let installed = installed::start(&shared, &working_folder);
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
            installed: installed.wait(),
            host,
            folders,
            names,
            program,
            libtorch,
            project,
        }
    }

    /// Returns the working folder of the job, if it exists.
    #[must_use]
    pub fn working_folder(&self) -> Option<&Path> {
        let folder = self.folders.iter().find(|it| it.used_for == FolderUse::Working)?;
        matches!(folder.state, FolderState::Present(_)).then_some(&folder.path)
    }
}

/// Version of the facts' meaning. It changes when a field changes its meaning.
pub const FACTS_VERSION: u32 = 2;
