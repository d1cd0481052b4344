//! Single host: its namespaces, its files, and programs in it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use brigade_test_needs::SYSTEM_PATH;

use crate::commands::{ip, must, read_line};
use crate::keys;
use crate::process::{Process, inner_process, processes_of};

/// Host of a [`Network`](crate::Network).
#[derive(Debug)]
pub struct Host {
    name: String,
    address: String,
    folder: PathBuf,
    wiring: Wiring,
    /// Process of `unshare`, which waits for the host's first process.
    process: Child,
    /// Process ID of the host's first process, outside of the host.
    init: i32,
}

/// Connection of the host's cable.
#[derive(Debug)]
pub(crate) struct Wiring {
    /// Process in the switch's network namespace.
    pub(crate) switch: i32,
    /// Name of the switch's end of the cable.
    pub(crate) port: String,
}

impl Host {
    pub(crate) fn start(
        folder: &Path,
        name: &str,
        address: &str,
        table: &str,
        user_key: &Path,
        wiring: Wiring,
    ) -> Self {
        let home = folder.join("home");
        write_files(folder, &home, table).expect("write the host's files");
        keys::make(&folder.join("host_key"), name);
        fs::write(folder.join("sshd_config"), keys::sshd_config(folder, user_key))
            .expect("write sshd_config");

        let mut command = Command::new("unshare");
        command.args(["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]);
        command.args(["sh", "-c", include_str!("host.sh"), "host.sh"]);
        command.arg(folder).arg(name).arg(format!("{address}/24"));
        command.env_clear().env("PATH", SYSTEM_PATH).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("start the host");
        assert_eq!(read_line(stdout_of(&mut process)), "ready", "{name} did not start");
        let init = inner_process(process.id().cast_signed()).expect("the host's first process");
        let (name, address, folder) = (name.to_owned(), address.to_owned(), folder.to_owned());
        Self { name, address, folder, wiring, process, init }
    }

    pub(crate) fn plug_in(&mut self) {
        let Wiring { switch, port } = &self.wiring;
        ip(
            *switch,
            &format!(
                "link add {port} type veth peer name eth0 netns {}\n\
                 link set {port} master br0 up",
                self.init
            ),
        );
        let stdin = self.process.stdin.as_mut().expect("its stdin");
        stdin.write_all(b"plugged in\n").expect("tell the host");
    }

    pub(crate) fn wait_until_up(&mut self) {
        assert_eq!(read_line(stdout_of(&mut self.process)), "up", "{} has no sshd", self.name);
    }

    pub(crate) fn host_key(&self) -> PathBuf {
        self.folder.join("host_key.pub")
    }

    pub(crate) fn wiring(&self) -> &Wiring {
        &self.wiring
    }

    pub(crate) fn init(&self) -> i32 {
        self.init
    }

    /// Returns the host name, `node1`, `node2`, …, which all hosts of the network can resolve.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the address of the host on the network.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the home folder of root on the host, which no other host has.
    #[must_use]
    pub fn home(&self) -> PathBuf {
        self.folder.join("home")
    }

    /// Opens the network namespace of the host. While the file is open, no other namespace gets its inode number, even
    /// after the host was switched off.
    ///
    /// # Panics
    /// Panics if the namespace cannot be opened.
    #[must_use]
    pub fn network_namespace(&self) -> File {
        File::open(format!("/proc/{}/ns/net", self.init)).expect("open a network namespace")
    }

    /// Returns a command that runs a program on this host, in the folder `/` and with this process's environment,
    /// except for `HOME` and variables of ssh.
    ///
    /// The process that it starts is `nsenter`: it ends when the program ends, but does not pass signals on.
    /// [`inner_process`] finds the program itself.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        self.command_in("/", program)
    }

    /// Returns a [`Host::command`] in another folder, which is resolved on this host.
    #[must_use]
    pub fn command_in(&self, folder: impl AsRef<Path>, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--uts", "--ipc", "--mount", "--pid", "-t"]);
        command.arg(self.init.to_string()).arg("--").args(["env", "-C"]);
        command.arg(folder.as_ref()).arg(program);
        command.env("HOME", self.home());
        for name in ["SSH_AUTH_SOCK", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY"] {
            command.env_remove(name);
        }
        command
    }

    /// Runs a shell command on this host and returns its output.
    ///
    /// # Panics
    /// Panics if the command fails.
    #[track_caller]
    #[expect(clippy::must_use_candidate, reason = "mostly called for what it does")]
    pub fn sh(&self, script: &str) -> String {
        let mut command = self.command("sh");
        command.args(["-ec", script]).env("PATH", SYSTEM_PATH);
        must(&mut command)
    }

    /// Returns every process on this host, except its first one and the sshd that listens. Processes that have ended
    /// and were not waited for are left out.
    #[must_use]
    pub fn processes(&self) -> Vec<Process> {
        let own = |process: &Process| {
            let parent_is_init = process.parent == self.init;
            let kit = parent_is_init && process.command == ["cat"];
            let listener = parent_is_init
                && process.command.first().is_some_and(|it| it.contains("[listener]"));
            process.pid == self.init || kit || listener
        };
        processes_of(self.init).into_iter().filter(|it| !own(it)).collect()
    }

    /// Makes a folder or file look empty on this host. Other hosts still see its content.
    ///
    /// # Panics
    /// Panics if the path does not exist.
    #[track_caller]
    pub fn hide(&self, path: impl AsRef<Path>) {
        let path = path.as_ref();
        let mut command = self.command("mount");
        if path.is_dir() {
            command.args(["-t", "tmpfs", "tmpfs"]).arg(path);
        } else {
            let empty = self.folder.join("empty");
            fs::write(&empty, "").expect("write an empty file");
            command.arg("--bind").arg(empty).arg(path);
        }
        must(&mut command);
    }

    /// Mounts a new file system of this size (`64k`, `1m`) over a folder of this host.
    ///
    /// # Panics
    /// Panics if the folder does not exist.
    #[track_caller]
    pub fn mount_small(&self, path: impl AsRef<Path>, size: &str) {
        let mut command = self.command("mount");
        command.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(path.as_ref());
        must(&mut command);
    }

    /// Replaces this host's `/etc/hosts`.
    ///
    /// # Panics
    /// Panics if the file cannot be written.
    pub fn set_hosts_file(&self, text: &str) {
        // Overwritten in place: a new file would not be the one that is mounted.
        fs::write(self.folder.join("etc/hosts"), text).expect("write the hosts file");
    }

    /// Returns the content of this host's `/etc/hosts`.
    ///
    /// # Panics
    /// Panics if the file cannot be read.
    #[must_use]
    pub fn hosts_file(&self) -> String {
        fs::read_to_string(self.folder.join("etc/hosts")).expect("read the hosts file")
    }

    /// Sets a variable for ssh sessions that log in from now on.
    ///
    /// # Panics
    /// Panics if the file cannot be written.
    pub fn set_login_variable(&self, name: &str, value: &str) {
        let file = self.home().join(".ssh/environment");
        let mut text = fs::read_to_string(&file).unwrap_or_default();
        text.push_str(&format!("{name}={value}\n"));
        fs::write(file, text).expect("write the login environment");
    }

    /// Returns the log of sshd so far.
    #[must_use]
    pub fn sshd_log(&self) -> String {
        fs::read_to_string(self.folder.join("sshd.log")).unwrap_or_default()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The end of its input switches the host off.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

fn write_files(folder: &Path, home: &Path, table: &str) -> io::Result<()> {
    let etc = folder.join("etc");
    fs::create_dir_all(&etc)?;
    fs::create_dir_all(home.join(".ssh"))?;
    fs::write(etc.join("hosts"), table)?;
    // Files only: a lookup of an unknown name must not wait for a server that does not exist.
    fs::write(
        etc.join("nsswitch.conf"),
        "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
    )?;
    let mut passwd = String::new();
    let mut shadow = String::new();
    for line in fs::read_to_string("/etc/passwd")?.lines() {
        let mut fields: Vec<&str> = line.split(':').collect();
        let home = home.display().to_string();
        if let [name, _, "0", _, _, folder, shell] = fields.as_mut_slice() {
            (*folder, *shell) = (&home, "/bin/sh");
            // Locked accounts may not log in, not even with a key.
            shadow.push_str(&format!("{name}:*:20000:0:99999:7:::\n"));
        }
        passwd.push_str(&fields.join(":"));
        passwd.push('\n');
    }
    fs::write(etc.join("passwd"), passwd)?;
    fs::write(etc.join("shadow"), shadow)
}

fn stdout_of(process: &mut Child) -> &mut impl Read {
    process.stdout.as_mut().expect("a piped stdout")
}
