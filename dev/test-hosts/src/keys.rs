//! Keys and settings of ssh: one user, who may log in to every host of the network.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::commands::must;

/// Creates a key without a passphrase at this path, and `.pub` beside it.
pub(crate) fn make(path: &Path, comment: &str) {
    let mut command = Command::new("ssh-keygen");
    command.args(["-q", "-t", "ed25519", "-N", "", "-C", comment, "-f"]).arg(path);
    must(command.stdin(Stdio::null()));
}

/// Returns the configuration of sshd. The folder's key files belong to this user, but `/tmp` above them is writable for
/// everyone, which `StrictModes` would refuse.
pub(crate) fn sshd_config(folder: &Path, authorized_keys: &Path) -> String {
    format!(
        "ListenAddress 0.0.0.0\n\
         Port 22\n\
         HostKey {}\n\
         AuthorizedKeysFile {}\n\
         PidFile none\n\
         StrictModes no\n\
         UsePAM no\n\
         PermitRootLogin yes\n\
         PasswordAuthentication no\n\
         KbdInteractiveAuthentication no\n\
         PermitUserEnvironment yes\n\
         UseDNS no\n\
         PrintMotd no\n\
         MaxStartups 100\n\
         Subsystem sftp internal-sftp\n",
        folder.join("host_key").display(),
        authorized_keys.display(),
    )
}

/// Writes lines for `known_hosts` and the client's settings, with every host of the network.
pub(crate) fn write_client_files(folder: &Path, hosts: &[(String, String, PathBuf)]) -> PathBuf {
    let mut known = String::new();
    for (name, address, key) in hosts {
        let key = fs::read_to_string(key).expect("the host's key, which has just been made");
        let _ = writeln!(known, "{name},{address} {}", key.trim());
    }
    let known_hosts = folder.join("known_hosts");
    fs::write(&known_hosts, known).expect("write known_hosts");

    let config = folder.join("ssh_config");
    let text = format!(
        "Host *\n\
         \x20   User root\n\
         \x20   IdentityFile {}\n\
         \x20   IdentitiesOnly yes\n\
         \x20   IdentityAgent none\n\
         \x20   UserKnownHostsFile {}\n\
         \x20   GlobalKnownHostsFile /dev/null\n\
         \x20   StrictHostKeyChecking yes\n\
         \x20   UpdateHostKeys no\n",
        folder.join("user_key").display(),
        known_hosts.display(),
    );
    fs::write(&config, text).expect("write ssh_config");
    config
}
