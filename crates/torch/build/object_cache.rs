//! Cache of compiled C++: a folder of the user's that all projects share.
//!
//! The border takes a minute of processor time, and its objects depend on nothing of a project: on texts, flags, the
//! compiler and libtorch's headers. A hash of these ([`Inputs`]) is the name of a file in [`ObjectCache`].
//!
//! The packages of a release carry such a file for machines with other compilers. Its name has a hash without the
//! compiler, and its [`Label`] says which toolchains can link it. `brigade setup` puts it into the same folder.

use std::cmp::Reverse;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

/// Number of archives that the cache keeps, the most recently used ones: release and debug, for CPUs and CUDA, of two
/// versions. One takes 6 to 25 MB.
const KEPT: usize = 8;
/// Number of archives from releases that the cache keeps beside those, the most recently used ones.
const KEPT_SHIPPED: usize = 2;
/// Beginning of the names of archives from releases. `brigade-libtorch-setup` and `cargo xtask package` have the same.
const SHIPPED: &str = "brigade-torch-";
/// Extension of the cached archives.
const EXTENSION: &str = "objects";
/// Extension of archives that are being written.
const UNFINISHED: &str = "unfinished";
/// Age at which an unfinished archive was left by a process that no longer writes it.
const ABANDONED: Duration = Duration::from_secs(3600);
/// First bytes of a cached archive. A new format needs another number.
const MAGIC: &[u8] = b"brigade objects 2\nsha256 ";
/// Length of a SHA-256 in hexadecimal digits.
const DIGEST: usize = 64;

/// Hash of everything that the compiled objects depend on.
#[derive(Clone, Debug)]
pub(crate) struct Inputs(Sha256);

impl Inputs {
    /// Returns the hash of nothing.
    pub(crate) fn new() -> Self {
        Self(Sha256::new())
    }

    /// Adds a named input. Lengths are hashed, too, so that no two lists of inputs are the same bytes.
    pub(crate) fn add(&mut self, name: &str, bytes: &[u8]) {
        for part in [name.as_bytes(), bytes] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
    }

    /// Adds the names and contents of the files in a folder and its subfolders that `is_input` accepts.
    ///
    /// # Errors
    /// Fails if the folder or a file cannot be read.
    pub(crate) fn add_contents(
        &mut self,
        folder: &Path,
        is_input: impl Fn(&Path) -> bool,
    ) -> io::Result<()> {
        for path in files(folder)?.into_iter().filter(|path| is_input(path)) {
            self.add(&relative(&path, folder), &fs::read(&path)?);
        }
        Ok(())
    }

    /// Adds the names and sizes of all files in a folder and its subfolders: ten thousand headers are not read.
    ///
    /// # Errors
    /// Fails if the folder cannot be read.
    pub(crate) fn add_sizes(&mut self, folder: &Path) -> io::Result<()> {
        for path in files(folder)? {
            let size = fs::metadata(&path)?.len();
            self.add(&relative(&path, folder), &size.to_le_bytes());
        }
        Ok(())
    }

    /// Returns the hash as 64 hexadecimal digits: the key of the objects.
    pub(crate) fn key(self) -> String {
        hexadecimal(&self.0.finalize())
    }
}

/// Versions of what links the objects: these refer to symbols of the libraries that they were compiled with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Toolchain {
    /// Major version of g++, whose libgcc has helpers of its code.
    gcc: u32,
    /// Major version of g++ that libstdc++ is from.
    libstdcxx: u32,
    /// Version of glibc.
    glibc: (u32, u32),
}

impl Toolchain {
    /// C++ that a compiler preprocesses to a line that [`parse`](Self::parse) reads.
    pub(crate) const QUESTION: &str = "\
#include <cstdlib>
#ifndef __clang__
toolchain __GNUC__ _GLIBCXX_RELEASE __GLIBC__ __GLIBC_MINOR__
#endif
";

    /// Reads the line `toolchain`, with four numbers. `None` for a text without, such as that of Clang, or of a
    /// compiler with other libraries, which leaves the names of the macros.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let line = text.lines().find_map(|line| line.strip_prefix("toolchain "))?;
        let numbers: Option<Vec<u32>> = line.split_whitespace().map(|it| it.parse().ok()).collect();
        let [gcc, libstdcxx, major, minor] = numbers?[..] else { return None };
        Some(Self { gcc, libstdcxx, glibc: (major, minor) })
    }

    /// Returns `true` if objects of the other toolchain can be linked: no part of it is newer.
    pub(crate) fn links(&self, objects: &Self) -> bool {
        self.gcc >= objects.gcc
            && self.libstdcxx >= objects.libstdcxx
            && self.glibc >= objects.glibc
    }
}

/// Description of objects that other machines can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Label {
    /// Hash of everything that the objects depend on, but for the compiler and its optimisation.
    pub(crate) key: String,
    /// Toolchain that has compiled the objects, or is to link them.
    pub(crate) toolchain: Toolchain,
}

impl Label {
    fn text(&self) -> String {
        let Toolchain { gcc, libstdcxx, glibc: (major, minor) } = self.toolchain;
        format!("portable {}\ntoolchain {gcc} {libstdcxx} {major} {minor}\n", self.key)
    }

    fn parse(text: &str) -> Option<Self> {
        let key = text.lines().find_map(|line| line.strip_prefix("portable "))?.to_owned();
        Some(Self { key, toolchain: Toolchain::parse(text)? })
    }
}

/// Flags of a compiler without what differs between projects.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Flags {
    /// Flags on which what the objects do depends.
    pub(crate) meaning: Vec<String>,
    /// Flags on which their speed depends (`-O3`).
    pub(crate) optimisation: Vec<String>,
}

impl Flags {
    /// Sorts the arguments of a compiler, and replaces folders in them by numbers. `None` if objects depend on the
    /// processor of this host (`-march=native`).
    pub(crate) fn of<'a>(
        arguments: impl IntoIterator<Item = &'a OsStr>,
        folders: &[String],
    ) -> Option<Self> {
        let mut flags = Self { meaning: Vec::new(), optimisation: Vec::new() };
        // Inner ones first: in the checkout the folder of the kernels is in that of the package, and elsewhere it is not.
        let mut numbered: Vec<_> = folders.iter().enumerate().collect();
        numbered.sort_by_key(|(_, folder)| Reverse(folder.len()));
        for argument in arguments {
            let mut argument = argument.to_string_lossy().into_owned();
            if argument.ends_with("=native") {
                return None;
            }
            if argument.starts_with("-O") {
                flags.optimisation.push(argument);
                continue;
            }
            for (index, folder) in &numbered {
                argument = argument.replace(folder.as_str(), &format!("<{index}>"));
            }
            flags.meaning.push(argument);
        }
        Some(flags)
    }
}

/// Returns `true` if a variable that crate `cc` reads names flags for compilers: whoever sets them wants objects that
/// were compiled with them. `variable` returns the value of a variable of the environment.
pub(crate) fn has_own_flags(target: &str, variable: impl Fn(&str) -> Option<String>) -> bool {
    let has_flags = |value: &str| value.split_whitespace().any(|word| word.starts_with('-'));
    flag_variables(target).iter().any(|name| variable(name).is_some_and(|it| has_flags(&it)))
}

/// Returns the names of variables in which crate `cc` looks for flags, and for the compiler, which may have flags, too.
pub(crate) fn flag_variables(target: &str) -> Vec<String> {
    let underscored = target.replace(['-', '.'], "_");
    let forms = |base: &str| {
        [
            base.to_owned(),
            format!("HOST_{base}"),
            format!("TARGET_{base}"),
            format!("{base}_{target}"),
            format!("{base}_{underscored}"),
        ]
    };
    ["CFLAGS", "CXXFLAGS", "CXX"].into_iter().flat_map(forms).collect()
}

/// Folder of compiled archives, each with its checksum.
#[derive(Debug)]
pub(crate) struct ObjectCache {
    folder: PathBuf,
}

impl ObjectCache {
    /// Returns the user's cache: `$XDG_CACHE_HOME/brigade/objects`, by default in `~/.cache`, or the folder that
    /// `BRIGADE_OBJECT_CACHE` names. `None` if that variable is empty, or the user has no home folder.
    pub(crate) fn of_user() -> Option<Self> {
        if let Some(folder) = env::var_os("BRIGADE_OBJECT_CACHE") {
            return (!folder.is_empty()).then(|| Self::at(PathBuf::from(folder)));
        }
        // A relative path in the variable is ignored (XDG base directory specification).
        let cache = env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|it| it.is_absolute());
        let cache = cache.or_else(|| Some(env::home_dir()?.join(".cache")))?;
        Some(Self::at(cache.join("brigade").join("objects")))
    }

    /// Returns a cache in this folder, which need not exist.
    pub(crate) fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Copies the archive of a key to `to`. Returns `false`, and writes nothing, if the cache does not contain it, or
    /// contains a damaged one.
    ///
    /// # Errors
    /// Fails if `to` cannot be written.
    pub(crate) fn load(&self, key: &str, to: &Path) -> io::Result<bool> {
        self.copy(key, to, |_| true)
    }

    /// Copies the archive of a release that this machine's toolchain can link to `to`. Returns `false`, and writes
    /// nothing, if the cache does not contain one, or contains a damaged one.
    ///
    /// # Errors
    /// Fails if `to` cannot be written.
    pub(crate) fn load_shipped(&self, wanted: &Label, to: &Path) -> io::Result<bool> {
        let fits = |label: Option<Label>| {
            label.is_some_and(|found| {
                found.key == wanted.key && wanted.toolchain.links(&found.toolchain)
            })
        };
        let is_loaded = self.copy(&format!("{SHIPPED}{}", wanted.key), to, fits)?;
        if is_loaded {
            // Where releases have all archives, nothing is ever stored.
            self.prune();
        }
        Ok(is_loaded)
    }

    fn copy(
        &self,
        name: &str,
        to: &Path,
        fits: impl Fn(Option<Label>) -> bool,
    ) -> io::Result<bool> {
        let path = self.path(name);
        let Ok(bytes) = fs::read(&path) else { return Ok(false) };
        let Some((label, archive)) = checked(&bytes) else { return Ok(false) };
        if !fits(label) {
            return Ok(false);
        }
        fs::write(to, archive)?;
        // The most recently used ones are kept. A cache that cannot be written is read all the same.
        let _ = fs::File::options()
            .append(true)
            .open(&path)
            .and_then(|file| file.set_modified(SystemTime::now()));
        Ok(true)
    }

    /// Stores an archive under its key, whole or not at all, and removes the least recently used ones. With a label
    /// the file can also be used on other machines, as that of a release.
    ///
    /// # Errors
    /// Fails if the archive cannot be read, or the folder cannot be written.
    pub(crate) fn store(&self, key: &str, label: Option<&Label>, archive: &Path) -> io::Result<()> {
        let bytes = contents(label, &fs::read(archive)?);
        fs::create_dir_all(&self.folder)?;
        let name = format!("{key}.{}.{UNFINISHED}", std::process::id());
        let unfinished = self.folder.join(name);
        let written = fs::File::create(&unfinished)
            .and_then(|mut file| {
                file.write_all(&bytes)?;
                // Else a power failure after the rename leaves a file without its content.
                file.sync_all()
            })
            .and_then(|()| fs::rename(&unfinished, self.path(key)));
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        self.prune();
        written
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name).with_extension(EXTENSION)
    }

    /// Removes the least recently used archives, and what interrupted builds have left. Another process may do the
    /// same at the same time: files that are already gone are not an error.
    fn prune(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        let (mut compiled, mut shipped) = (Vec::new(), Vec::new());
        for entry in entries.flatten() {
            let path = entry.path();
            let Ok(used) = entry.metadata().and_then(|it| it.modified()) else { continue };
            match path.extension().and_then(|it| it.to_str()) {
                Some(EXTENSION) => {
                    let is_shipped = entry.file_name().to_string_lossy().starts_with(SHIPPED);
                    let archives = if is_shipped { &mut shipped } else { &mut compiled };
                    archives.push((used, path));
                }
                Some(UNFINISHED) if used.elapsed().is_ok_and(|age| age > ABANDONED) => {
                    let _ = fs::remove_file(path);
                }
                _ => {}
            }
        }
        for (mut archives, kept) in [(compiled, KEPT), (shipped, KEPT_SHIPPED)] {
            archives.sort();
            let surplus = archives.len().saturating_sub(kept);
            for (_, path) in archives.drain(..surplus) {
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// Returns the bytes of a cached file: lines with the checksum of what follows it and the label, an empty line, and the
/// archive.
fn contents(label: Option<&Label>, archive: &[u8]) -> Vec<u8> {
    let label = label.map(Label::text).unwrap_or_default();
    let rest = [b"\n", label.as_bytes(), b"\n", archive].concat();
    [MAGIC, hexadecimal(&Sha256::digest(&rest)).as_bytes(), &rest].concat()
}

/// Returns the label and the archive in the bytes of a cached file, if its checksum is right.
fn checked(bytes: &[u8]) -> Option<(Option<Label>, &[u8])> {
    let (digest, rest) = bytes.strip_prefix(MAGIC)?.split_at_checked(DIGEST)?;
    if hexadecimal(&Sha256::digest(rest)).as_bytes() != digest {
        return None;
    }
    let end = rest.windows(2).position(|pair| pair == b"\n\n")?;
    Some((Label::parse(std::str::from_utf8(&rest[..end]).ok()?), &rest[end + 2..]))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the paths of all files in a folder and its subfolders, sorted.
fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            // Links to folders are not followed: they could lead back.
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else if entry.path().is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}

fn relative(path: &Path, folder: &Path) -> String {
    path.strip_prefix(folder).unwrap_or(path).to_string_lossy().into_owned()
}
