//! Client of fork servers: test programs that have loaded libtorch once and start each of their tests by a fork
//! (`preload.c`).
//!
//! Every test has a process of its own, whose libtorch has been loaded before: registering its operators takes 0.1 s of a
//! processor, longer than many a test. A server belongs to one program and ends when no test has come for some seconds,
//! or with cargo-nextest. Where none can be started, for programs without libtorch, tests are started as any program.
//!
//! A request is four numbers of 32 bits in the order of the machine (process group, numbers of arguments and variables,
//! bytes that follow), sent with the descriptors of the standard streams and of the working directory, and the arguments
//! and variables as strings that end with a zero. The new process answers "1"; when it has ended, the server answers "2"
//! and three numbers of 64 bits: the status of wait(2), and microseconds of processor time in user and system mode.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt, parent_id};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::getpgrp;

/// Variable with the folder of the servers' sockets.
const FOLDER: &str = "XTASK_FORKS";

/// Variable of a server: the socket that it listens at.
const SERVER: &str = "XTASK_FORK_SERVER";

/// Variable of a server: the process with which it ends.
const PARENT: &str = "XTASK_FORK_PARENT";

/// Variable of a server: the library without which it is of no use.
const LIBRARY: &str = "XTASK_FORK_LIBRARY";

/// Variable with which all tests start as any program, for comparing.
const OFF: &str = "XTASK_NO_FORKS";

/// The library whose start takes long.
const LIBTORCH: &str = "libtorch_cpu.so";

/// Has tests start by fork servers, whose sockets are in the folder.
pub(super) fn enable(runner: &mut Command, folder: &Path) -> io::Result<()> {
    if env::var_os(OFF).is_none() {
        fs::create_dir_all(folder)?;
        runner.env(FOLDER, folder);
    }
    Ok(())
}

/// Result of a process that a server has started.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) status: ExitStatus,
    /// Processor time of the process and its descendants, except those that were not waited for.
    pub(super) processor: Duration,
}

/// Runs a command that has the preloaded library by a fork of its program. Returns `None` if that is not possible; the
/// program has not run then.
pub(super) fn run(command: &Command) -> Option<Outcome> {
    let folder = PathBuf::from(env::var_os(FOLDER)?);
    let servers = Servers { folder, library: LIBTORCH.into(), parent: parent_id() };
    servers.run(command)
}

/// Removes the variable of the servers from a test's environment.
pub(super) fn hide(test: &mut Command) {
    test.env_remove(FOLDER);
}

struct Servers {
    folder: PathBuf,
    library: OsString,
    parent: u32,
}

impl Servers {
    fn run(&self, command: &Command) -> Option<Outcome> {
        let request = Request::new(command);
        // The second attempt is for a server that ended when it was asked.
        (0..2).find_map(|_| request.send(self.connect(command)?).ok().flatten())
    }

    /// Connects with the program's server, which is started if there is none.
    fn connect(&self, command: &Command) -> Option<UnixStream> {
        let mut hasher = DefaultHasher::new();
        command.get_program().hash(&mut hasher);
        let socket = self.folder.join(format!("{:016x}", hasher.finish()));
        let useless = socket.with_extension("none");
        if useless.exists() {
            return None;
        }
        if let Ok(stream) = UnixStream::connect(&socket) {
            return Some(stream);
        }
        let lock = File::create(socket.with_extension("lock")).ok()?;
        lock.lock().ok()?;
        if useless.exists() {
            return None;
        }
        if let Ok(stream) = UnixStream::connect(&socket) {
            return Some(stream);
        }
        if !self.start(command, &socket) {
            let _ = fs::write(useless, "");
            return None;
        }
        UnixStream::connect(&socket).ok()
    }

    /// Starts a server. Returns `false` if the program cannot be one.
    fn start(&self, command: &Command, socket: &Path) -> bool {
        let _ = fs::remove_file(socket);
        let mut server = Command::new(command.get_program());
        // Without the preloaded library, the program would run this test, which there is not.
        server.args(["--exact", "xtask-fork-server"]);
        server.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        server.env(SERVER, socket).env(LIBRARY, &self.library).env(PARENT, self.parent.to_string());
        hide(&mut server);
        server.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        // The forks join the process groups of their tests, which must be of the same session.
        server.process_group(0);
        let Ok(mut server) = server.spawn() else { return false };
        let mut ready = [0];
        let answer = server.stdout.take().map(|mut it| it.read_exact(&mut ready));
        let listens = matches!(answer, Some(Ok(()))) && ready == *b"1";
        if !listens {
            let _ = server.kill();
            let _ = server.wait();
        }
        listens
    }
}

struct Request {
    header: [u8; 16],
    strings: Vec<u8>,
}

impl Request {
    fn new(command: &Command) -> Self {
        let arguments: Vec<&OsStr> =
            [command.get_program()].into_iter().chain(command.get_args()).collect();
        let mut variables: BTreeMap<OsString, OsString> = env::vars_os().collect();
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => variables.insert(name.to_owned(), value.to_owned()),
                None => variables.remove(name),
            };
        }
        // What the program would unset in its first line.
        variables.remove(OsStr::new(super::preload::PRELOAD));
        let mut strings = Vec::new();
        for argument in &arguments {
            strings.extend([argument.as_bytes(), b"\0"].concat());
        }
        for (name, value) in &variables {
            strings.extend([name.as_bytes(), b"=", value.as_bytes(), b"\0"].concat());
        }
        let group = u32::try_from(getpgrp().as_raw()).unwrap_or(0);
        let counts = [arguments.len(), variables.len(), strings.len()];
        let counts = counts.map(|it| u32::try_from(it).unwrap_or(u32::MAX));
        let mut header = [0; 16];
        for (place, number) in
            header.chunks_exact_mut(4).zip([group, counts[0], counts[1], counts[2]])
        {
            place.copy_from_slice(&number.to_ne_bytes());
        }
        Self { header, strings }
    }

    /// Returns `None` if the server has started no process.
    fn send(&self, mut server: UnixStream) -> io::Result<Option<Outcome>> {
        let folder = File::open(".")?;
        let streams: [RawFd; 4] = [0, 1, 2, folder.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&streams)];
        let header = [IoSlice::new(&self.header)];
        sendmsg::<()>(server.as_raw_fd(), &header, &rights, MsgFlags::MSG_NOSIGNAL, None)?;
        server.write_all(&self.strings)?;
        let mut answer = [0];
        if server.read(&mut answer)? == 0 || answer != *b"1" {
            return Ok(None);
        }
        let mut answer = [0; 25];
        // A server that ends before its forks says nothing of how they ended.
        let answered = server.read_exact(&mut answer);
        let number = |place: usize| {
            let bytes = answer[1 + 8 * place..9 + 8 * place].try_into();
            bytes.map_or(0, i64::from_ne_bytes)
        };
        let status = match answered {
            Ok(()) => i32::try_from(number(0)).unwrap_or(LOST),
            Err(_) => LOST,
        };
        let micros = u64::try_from(number(1) + number(2)).unwrap_or(0);
        Ok(Some(Outcome {
            status: ExitStatus::from_raw(status),
            processor: Duration::from_micros(micros),
        }))
    }
}

/// Status of wait(2) of a test whose server has ended: exit code 101.
const LOST: i32 = 101 << 8;

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::super::preload::Preload;
    use super::*;

    /// Runs a shell's script by a fork of the shell, which has the C library alone. Returns the outcome, or `None` if
    /// there is no server.
    fn shell(folder: &TempDir, library: &str, script: &str) -> Option<Outcome> {
        let preload = Preload::compile(folder.path());
        let servers = Servers {
            folder: folder.path().to_owned(),
            library: library.into(),
            parent: std::process::id(),
        };
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).env("FROM_THE_TEST", "a value");
        preload.of_a_program(&mut command);
        servers.run(&command)
    }

    #[test]
    fn a_fork_has_the_arguments_variables_and_folder_of_its_test() {
        let folder = tempfile::tempdir().unwrap();
        let place = env::current_dir().unwrap();
        let file = folder.path().join("said");
        let script = format!(
            "echo \"$FROM_THE_TEST,$XTASK_FORK_SERVER,$LD_PRELOAD,$PWD\" > {0}; exit 7",
            file.display()
        );
        for _ in 0..2 {
            let outcome = shell(&folder, "libc.so.6", &script).unwrap();
            assert_eq!(outcome.status.code(), Some(7));
            let said = fs::read_to_string(&file).unwrap();
            assert_eq!(said, format!("a value,,,{}\n", place.display()));
        }
    }

    #[test]
    fn a_fork_is_in_the_process_group_of_its_test_and_its_signal_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let group = getpgrp();
        let script = format!("test $(cut -d' ' -f5 /proc/$$/stat) = {group} && kill -SEGV $$");
        let outcome = shell(&folder, "libc.so.6", &script).unwrap();
        assert_eq!(outcome.status.signal(), Some(11), "{outcome:?}");
    }

    #[test]
    fn a_program_without_the_library_is_no_server() {
        let folder = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            assert!(shell(&folder, "libnosuch.so.1", "exit 1").is_none());
        }
    }
}
