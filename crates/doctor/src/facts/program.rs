//! Facts about the job's program on one host.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::unistd::{AccessFlags, access};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::elf::{Elf, hexadecimal};
use super::{Libtorch, Missing, libraries, libtorch};
use brigade_hardware::{Sources, within};

/// Program of a job with its libraries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Path or name as requested.
    pub asked: PathBuf,
    /// Absolute path, if the program was found.
    pub path: Option<PathBuf>,
    /// State of the program's file.
    pub state: ProgramState,
    /// Size of the file in bytes.
    #[serde(default)]
    pub bytes: u64,
    /// SHA-256 digest in hexadecimal.
    #[serde(default)]
    pub sha256: Option<String>,
    /// Build ID of the linker.
    #[serde(default)]
    pub build_id: Option<String>,
    /// Libraries and symbol versions that the loader would not find.
    #[serde(default)]
    pub missing: Vec<Missing>,
    /// Installation of libtorch that the program loads.
    #[serde(default)]
    pub libtorch: Option<Libtorch>,
}

/// State of a program's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgramState {
    /// The file does not exist.
    Missing,
    /// The path is a folder, or something else that is not a regular file.
    NotAFile,
    /// The user may not execute the file.
    NotExecutable,
    /// The file system did not answer in time.
    Silent,
    /// The file cannot be read. Contains the message of the operating system.
    Unreadable(String),
    /// The program is for another processor architecture.
    OtherMachine,
    /// A script. Contains the interpreter that its first line names.
    Script(String),
    /// A file that is neither a script nor a program of this system.
    Strange,
    /// A program of this system.
    Binary,
}

/// Program that is being examined.
pub(super) struct Pending {
    asked: PathBuf,
    thread: JoinHandle<Option<Program>>,
}

pub(super) fn start(sources: &Arc<Sources>, asked: &Path, folder: &Path) -> Pending {
    let (sources, folder) = (Arc::clone(sources), folder.to_owned());
    let wanted = asked.to_owned();
    let look = move || look(&sources, &wanted, &folder);
    Pending { asked: asked.to_owned(), thread: std::thread::spawn(move || within(TIMEOUT, look)) }
}

impl Pending {
    pub(super) fn wait(self) -> Program {
        let silent = Program::new(&self.asked, None, ProgramState::Silent);
        self.thread.join().ok().flatten().unwrap_or(silent)
    }
}

impl Program {
    fn new(asked: &Path, path: Option<PathBuf>, state: ProgramState) -> Self {
        Self {
            asked: asked.to_owned(),
            path,
            state,
            bytes: 0,
            sha256: None,
            build_id: None,
            missing: Vec::new(),
            libtorch: None,
        }
    }
}

fn look(sources: &Sources, asked: &Path, folder: &Path) -> Program {
    let Some(path) = find(sources, asked, folder) else {
        return Program::new(asked, None, ProgramState::Missing);
    };
    let place = sources.path(&path);
    let mut program = Program::new(asked, Some(path), ProgramState::Strange);
    match std::fs::metadata(&place) {
        Ok(found) if found.is_file() => program.bytes = found.len(),
        Ok(_) => program.state = ProgramState::NotAFile,
        Err(error) => program.state = ProgramState::Unreadable(error.to_string()),
    }
    if program.state != ProgramState::Strange {
        return program;
    }
    let mut start = Vec::new();
    let opened = File::open(&place).and_then(|it| it.take(FIRST_LINE).read_to_end(&mut start));
    if let Err(error) = opened {
        program.state = ProgramState::Unreadable(error.to_string());
        return program;
    }
    program.sha256 = digest(&place).ok();
    if let Some(line) = start.strip_prefix(b"#!") {
        let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
        program.state = ProgramState::Script(String::from_utf8_lossy(line).trim().to_owned());
    } else if let Ok(elf) = Elf::read(&place) {
        program.build_id.clone_from(&elf.build_id);
        program.state = if elf.fits_this_machine() {
            // `$ORIGIN` is the folder of the file that a symbolic link leads to.
            let real = std::fs::canonicalize(&place).unwrap_or_else(|_| place.clone());
            let libraries = libraries::of(sources, &sources.on_host(&real), &elf);
            program.libtorch = libtorch::among(sources, &libraries.found);
            program.missing = libraries.missing;
            ProgramState::Binary
        } else {
            ProgramState::OtherMachine
        };
    }
    let python = place.extension().is_some_and(|it| it == "py");
    if access(&place, AccessFlags::X_OK).is_err() && !python {
        program.state = ProgramState::NotExecutable;
    } else if python && program.state == ProgramState::Strange {
        // The launcher starts such a file with Python, whatever its content.
        program.state = ProgramState::Script("python3".to_owned());
    }
    if matches!(&program.state, ProgramState::Script(by) if by.contains("python")) {
        program.libtorch = libtorch::of_python(sources);
    }
    program
}

/// Finds the file as a shell does: a name without a slash is looked up in PATH.
fn find(sources: &Sources, asked: &Path, folder: &Path) -> Option<PathBuf> {
    if asked.as_os_str().to_string_lossy().contains('/') {
        let path = folder.join(asked);
        return sources.path(&path).exists().then_some(path);
    }
    let list = sources.variables().get("PATH").cloned().unwrap_or_default();
    let mut places = std::env::split_paths(&list).map(|it| folder.join(it).join(asked));
    places.find(|it| sources.path(it).is_file())
}

fn digest(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hexadecimal(&hash.finalize())),
            length => hash.update(&buffer[..length]),
        }
    }
}

const FIRST_LINE: u64 = 256;
/// Time limit: long enough for a program of some hundred megabytes on a file server.
const TIMEOUT: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn states() {
        let root = tempfile::tempdir().unwrap();
        let bin = root.path().join("srv/bin");
        std::fs::create_dir_all(&bin).unwrap();
        let write = |name: &str, bytes: &[u8], mode: u32| {
            std::fs::write(bin.join(name), bytes).unwrap();
            std::fs::set_permissions(bin.join(name), PermissionsExt::from_mode(mode)).unwrap();
        };
        write("script", b"#!/usr/bin/env python3\nprint()\n", 0o755);
        write("plain", b"#!/bin/sh\n", 0o644);
        write("train.py", b"print()\n", 0o644);
        write("zip", b"PK\x03\x04", 0o755);
        let mut foreign = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        foreign[18..20].copy_from_slice(&[0x16, 0]); // a mainframe
        write("foreign", &foreign, 0o755);
        let sources = Arc::new(Sources::under(root.path()).with_variable("PATH", "/none:/srv/bin"));
        let state = |asked: &str| start(&sources, asked.as_ref(), "/srv".as_ref()).wait().state;
        assert_eq!(state("./bin/script"), ProgramState::Script("/usr/bin/env python3".to_owned()));
        assert_eq!(state("bin/train.py"), ProgramState::Script("python3".to_owned()));
        assert_eq!(state("zip"), ProgramState::Strange);
        assert_eq!(state("bin"), ProgramState::Missing);
        assert_eq!(state("./bin"), ProgramState::NotAFile);
        assert_eq!(state("/srv/bin/plain"), ProgramState::NotExecutable);
        assert_eq!(state("foreign"), ProgramState::OtherMachine);
    }

    #[test]
    fn a_program_of_this_system() {
        let sources = Arc::new(Sources::system());
        let path = std::env::current_exe().unwrap();
        let program = start(&sources, &path, Path::new("/")).wait();
        assert_eq!(program.state, ProgramState::Binary);
        assert_eq!(program.sha256.unwrap().len(), 64);
        assert_eq!((program.missing, program.libtorch), (Vec::new(), None));
    }
}
