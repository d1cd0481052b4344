//! Why this machine cannot have such a network.

use std::path::Path;
use std::process::Command;

/// A test prints this as `skipped: …` and passes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// Namespaces are for root.
    #[error("hosts in namespaces need root")]
    NotRoot,
    /// A program that makes or runs hosts is missing.
    #[error(
        "{program} is not installed (Debian's package {package}; `cargo xtask hosts` installs it)"
    )]
    NoProgram {
        /// Which.
        program: &'static str,
        /// In which package it is.
        package: &'static str,
    },
    /// Root, but of a container that may not make namespaces.
    #[error("this machine does not allow new namespaces: {reason}")]
    NoNamespaces {
        /// What `unshare` says.
        reason: String,
    },
    /// The kernel cannot do what a fault needs.
    #[error("this kernel has no {feature}: {reason}")]
    NoFeature {
        /// What is missing.
        feature: &'static str,
        /// What the tool says.
        reason: String,
    },
}

/// Looks whether hosts can be made here.
pub(crate) fn check() -> Result<(), Unavailable> {
    if !nix::unistd::geteuid().is_root() {
        return Err(Unavailable::NotRoot);
    }
    for (program, package) in PROGRAMS {
        let found = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"]
            .iter()
            .any(|folder| Path::new(folder).join(program).exists());
        if !found {
            return Err(Unavailable::NoProgram { program, package });
        }
    }
    let mut unshare = Command::new("unshare");
    let refused = |reason: String| Unavailable::NoNamespaces { reason };
    let output = unshare
        .args(["--net", "--uts", "--mount", "--pid", "--fork", "mount", "-t", "proc", "proc"])
        .arg("/proc")
        .output()
        .map_err(|error| refused(error.to_string()))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(refused(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
    }
}

const PROGRAMS: [(&str, &str); 7] = [
    ("sshd", "openssh-server"),
    ("ssh", "openssh-client"),
    ("ssh-keygen", "openssh-client"),
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("unshare", "util-linux"),
    ("nsenter", "util-linux"),
];
