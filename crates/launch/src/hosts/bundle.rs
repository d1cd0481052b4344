//! Files of a built program that `--sync` copies: its executable and the libraries that it is linked to.
//!
//! The system's own libraries are left out: each host's own ones match its loader.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use super::digest;
use super::error::HostsError;
use super::message::FileMark;

/// Files with their digests. The program or script comes first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bundle {
    pub(crate) files: Vec<FileMark>,
    pub(crate) contents: Contents,
}

/// Kind of the files, which determines how they are started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    /// A program, followed by its libraries.
    Program,
    /// A Python script, followed by the modules that it may import.
    Script,
    /// A Python package or module, with the name of the module to run.
    Module(OsString),
}

impl Bundle {
    /// Collects a program and its libraries, which are searched in these folders, too. Reads all of them, which takes
    /// half a second for libtorch.
    ///
    /// # Errors
    /// One of them does not exist or cannot be read.
    pub(crate) fn of_program(program: &Path, folders: &[PathBuf]) -> Result<Self, HostsError> {
        let program = std::path::absolute(program).map_err(wrong(program))?;
        let mut paths = vec![(program.clone(), name_of(&program))];
        paths.extend(libraries_of(&program, folders)?);
        let marks: Vec<Result<FileMark, HostsError>> = thread::scope(|scope| {
            let threads: Vec<_> =
                paths.iter().map(|(path, name)| scope.spawn(move || mark(path, name))).collect();
            let joined = threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|_| {
                    Err(wrong(&program)(std::io::Error::other("a thread has failed")))
                })
            });
            joined.collect()
        });
        let files = marks.into_iter().collect::<Result<_, _>>()?;
        Ok(Self { files, contents: Contents::Program })
    }
}

/// Describes a file: its digest, size and path, and the name that its copy must have.
///
/// # Errors
/// It cannot be read.
pub(crate) fn mark(path: &Path, name: &OsStr) -> Result<FileMark, HostsError> {
    let size = path.metadata().map_err(wrong(path))?.len();
    let digest = digest::of_file(path).map_err(wrong(path))?;
    Ok(FileMark {
        path: path.into(),
        name: name.to_owned(),
        bundle_digest: digest.clone(),
        digest,
        size,
    })
}

pub(super) fn wrong(path: &Path) -> impl FnOnce(std::io::Error) -> HostsError {
    let what = path.display().to_string();
    move |error| HostsError::Sync { what, reason: error.to_string() }
}

/// Lists the libraries that the dynamic loader would load. Runs nothing of the program.
fn libraries_of(
    program: &Path,
    folders: &[PathBuf],
) -> Result<Vec<(PathBuf, OsString)>, HostsError> {
    let mut command = Command::new("ldd");
    let inherited = std::env::var_os(LIBRARY_PATH).unwrap_or_default();
    let inherited = std::env::split_paths(&inherited).filter(|it| !it.as_os_str().is_empty());
    // A folder with a colon in its name cannot be part of such a list.
    if let Ok(paths) = std::env::join_paths(folders.iter().cloned().chain(inherited)) {
        command.env(LIBRARY_PATH, paths);
    }
    let output = command.arg(program).stdin(Stdio::null()).output();
    let output = output.map_err(|error| HostsError::Sync {
        what: "ldd, which finds the program's libraries".to_owned(),
        reason: error.to_string(),
    })?;
    // Fails for a script and for a program without libraries.
    if !output.status.success() {
        return Ok(Vec::new());
    }
    read_ldd(&String::from_utf8_lossy(&output.stdout)).map_err(|library| HostsError::Sync {
        what: program.display().to_string(),
        reason: format!("its library {library} is not found here either"),
    })
}

/// Parses the output of ldd: paths of libraries that are not the system's, with the names under which they are looked
/// up. The error is the name of a library that is missing.
fn read_ldd(text: &str) -> Result<Vec<(PathBuf, OsString)>, String> {
    let mut libraries = Vec::new();
    for line in text.lines() {
        let Some((name, found)) = line.trim().split_once(" => ") else { continue };
        if found.starts_with("not found") {
            return Err(name.to_owned());
        }
        // Without the address at the end: "/opt/lib/libx.so (0x00007f…)"
        let path = found.rsplit_once(" (").map_or(found, |it| it.0);
        if path.starts_with('/') && !SYSTEM.iter().any(|it| path.starts_with(it)) {
            libraries.push((PathBuf::from(path), OsString::from(name)));
        }
    }
    Ok(libraries)
}

pub(super) fn name_of(path: &Path) -> OsString {
    path.file_name().unwrap_or_default().to_owned()
}

const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";
const SYSTEM: [&str; 4] = ["/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_list() {
        let text = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                    \tlibtorch_cpu.so => /opt/my torch/lib/libtorch_cpu.so (0x00007f11)\n\
                    \tlibgomp-a1.so.1 => /opt/my torch/lib/../libs/libgomp-a1.so.1 (0x00007f12)\n\
                    \tlibstdc++.so.6 => /usr/lib/x86_64-linux-gnu/libstdc++.so.6 (0x00007f13)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f14)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f15)\n";
        let expected = [
            ("/opt/my torch/lib/libtorch_cpu.so", "libtorch_cpu.so"),
            ("/opt/my torch/lib/../libs/libgomp-a1.so.1", "libgomp-a1.so.1"),
        ];
        let expected: Vec<_> = expected.iter().map(|(p, n)| (p.into(), n.into())).collect();
        assert_eq!(read_ldd(text), Ok(expected));
        let missing = "\tlibc10.so => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x1)\n";
        assert_eq!(read_ldd(missing), Err("libc10.so".to_owned()));
        assert_eq!(read_ldd("\tstatically linked\n"), Ok(Vec::new()));
    }

    #[test]
    fn scripts_are_copied_alone() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("train.sh");
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        let bundle = Bundle::of_program(&script, &[]).unwrap();
        let [file] = bundle.files.as_slice() else { panic!("{bundle:?}") };
        assert_eq!((file.name.to_str(), file.size), (Some("train.sh"), 10));
        // As computed by sha256sum.
        let expected = "a8076d3d28d21e02012b20eaf7dbf75409a6277134439025f282e368e3305abf";
        assert_eq!(file.digest, expected);
        let error = Bundle::of_program(&folder.path().join("none"), &[]).unwrap_err().to_string();
        assert!(error.starts_with("--sync: ") && error.contains("none: No such file"), "{error}");
    }
}
