//! Fresh systems of Debian's, each in a folder, with nothing but the packages that are named.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_test_needs::SYSTEM_PATH;
use tempfile::TempDir;

use super::text_of;

/// Fresh system in a folder. Commands run in it without a network, as a user without rights unless they install.
pub(super) struct System {
    folder: TempDir,
}

impl System {
    /// Downloads Debian 12 with the packages that each system has, with apt, and with these.
    pub(super) fn new(packages: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut bootstrap = Command::new("mmdebstrap");
        bootstrap.args(["--quiet", "--mode=root", "--variant=minbase"]);
        if !packages.is_empty() {
            bootstrap.arg(format!("--include={}", packages.join(",")));
        }
        // A folder would stay behind if the test is killed while file systems are mounted there.
        let archive = folder.path().join("system.tar");
        text_of(bootstrap.arg("bookworm").arg(&archive));
        let system = Self { folder };
        fs::create_dir(system.root()).unwrap();
        text_of(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(system.root()));
        // Its user's folder.
        system.run_as_root("mkdir --mode=777 /work");
        system
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("system")
    }

    /// Copies a file into the system's folder `/packages`, and returns its path there.
    pub(super) fn take(&self, file: &Path) -> String {
        let name = file.file_name().unwrap().to_str().unwrap();
        fs::create_dir_all(self.root().join("packages")).unwrap();
        fs::copy(file, self.root().join("packages").join(name)).unwrap();
        format!("/packages/{name}")
    }

    /// Runs a script of the shell as a user without rights, in the folder `/work`, and returns what it prints.
    pub(super) fn run(&self, script: &str) -> String {
        self.chroot("1000:1000", script)
    }

    pub(super) fn run_as_root(&self, script: &str) -> String {
        self.chroot("0:0", script)
    }

    /// Mounts and processes end with the command, also if the test is killed: both are in namespaces.
    fn chroot(&self, user: &str, script: &str) -> String {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--net", "--fork", "--kill-child", "sh", "-ec", ENTER]);
        command.arg("sh").arg(self.root()).args([user, script]);
        command.env_clear().env("PATH", SYSTEM_PATH).env("HOME", "/work").env("LC_ALL", "C");
        text_of(command.env("DEBIAN_FRONTEND", "noninteractive"))
    }

    /// Returns the paths of all files and folders, without the logs and lists of the package manager that do not name
    /// Brigade.
    pub(super) fn files(&self) -> BTreeSet<PathBuf> {
        let root = self.root();
        let mut files = BTreeSet::new();
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.symlink_metadata().unwrap().is_dir() {
                    folders.push(path.clone());
                }
                files.insert(path.strip_prefix(&root).unwrap().to_owned());
            }
        }
        let is_of_dpkg =
            |path: &Path| path.starts_with("var/lib/dpkg") || path.starts_with("var/log");
        let names_it = |path: &Path| path.to_string_lossy().contains("brigade");
        files.retain(|path| !path.starts_with("packages") && (names_it(path) || !is_of_dpkg(path)));
        files
    }
}

/// Script with the arguments ROOT, USER and SCRIPT.
const ENTER: &str = "\
mount --bind \"$1\" \"$1\"
mount -t proc proc \"$1/proc\"
mount -t tmpfs -o mode=1777 tmpfs \"$1/tmp\"
mount -t tmpfs tmpfs \"$1/dev\"
for device in null zero full random urandom; do
    : >\"$1/dev/$device\"
    mount --bind /dev/$device \"$1/dev/$device\"
done
mkdir -m 1777 \"$1/dev/shm\"
mount -t tmpfs -o mode=1777 tmpfs \"$1/dev/shm\"
ln -s /proc/self/fd \"$1/dev/fd\"
ip link set lo up
exec chroot --userspec=\"$2\" \"$1\" sh -ec 'cd /work 2>/dev/null || cd /; eval \"$1\"' sh \"$3\"";
