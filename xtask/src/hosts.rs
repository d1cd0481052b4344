//! `cargo xtask hosts`: the programs with which tests make hosts, from Debian's packages.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};

/// Installs what is missing. Without root it says what is, and is content: those tests are skipped.
pub(crate) fn run() -> Result<ExitCode> {
    let missing: Vec<&Package> = PACKAGES.iter().filter(|it| !is_installed(it)).collect();
    if missing.is_empty() {
        eprintln!("nothing to install: sshd, nft, ip, tc, faketime and etcd are here");
        return Ok(ExitCode::SUCCESS);
    }
    let names: Vec<&str> = missing.iter().map(|it| it.name).collect();
    let list = names.join(" ");
    if !is_root() {
        eprintln!(
            "missing: {list}; tests that need them are skipped (run this as root to install)"
        );
        return Ok(ExitCode::SUCCESS);
    }
    if !is_installed(&Package { name: "apt", program: "apt-get" }) {
        eprintln!("missing: {list}; there is no apt-get here, so tests that need them are skipped");
        return Ok(ExitCode::SUCCESS);
    }
    // Lists of packages are often removed from images, and then nothing can be found.
    apt_get(&["update", "-qq"])?;
    let _quiet = NoServices::forbid()?;
    let mut arguments = vec!["install", "-qq", "-y", "--no-install-recommends"];
    arguments.extend(&names);
    apt_get(&arguments)?;
    eprintln!("installed: {list}");
    Ok(ExitCode::SUCCESS)
}

struct Package {
    name: &'static str,
    /// A file that only this package has.
    program: &'static str,
}

fn is_installed(package: &Package) -> bool {
    ["/usr/sbin", "/usr/bin", "/sbin", "/bin"]
        .iter()
        .any(|folder| Path::new(folder).join(package.program).exists())
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

fn apt_get(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
    let output = command.output().context("cannot start apt-get")?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!("apt-get {}: {}", arguments.join(" "), reason.trim());
    }
    Ok(())
}

/// Keeps packages from starting their services while it lives: Debian asks this file.
struct NoServices {
    /// One that was there already is left as it is.
    ours: bool,
}

impl NoServices {
    fn forbid() -> Result<Self> {
        use std::os::unix::fs::PermissionsExt;

        let policy = Path::new(POLICY);
        if policy.exists() {
            return Ok(Self { ours: false });
        }
        std::fs::write(policy, "#!/bin/sh\nexit 101\n").context("cannot write policy-rc.d")?;
        let this = Self { ours: true };
        std::fs::set_permissions(policy, std::fs::Permissions::from_mode(0o755))
            .context("cannot make policy-rc.d executable")?;
        Ok(this)
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if self.ours {
            let _ = std::fs::remove_file(POLICY);
        }
        // What is enabled would start with the machine. There may be no systemd here.
        for service in ["ssh", "etcd", "nftables"] {
            let mut command = Command::new("systemctl");
            let _ = command.args(["disable", "--quiet", service]).stdin(Stdio::null()).output();
        }
    }
}

const PACKAGES: [Package; 6] = [
    Package { name: "openssh-server", program: "sshd" },
    Package { name: "openssh-client", program: "ssh" },
    Package { name: "nftables", program: "nft" },
    Package { name: "iproute2", program: "ip" },
    Package { name: "etcd-server", program: "etcd" },
    Package { name: "faketime", program: "faketime" },
];
const POLICY: &str = "/usr/sbin/policy-rc.d";
