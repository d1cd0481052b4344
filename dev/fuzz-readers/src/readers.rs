//! Parsers, one file for each kind: a row that describes the target, and the function that parses.

mod data;
mod launch;
mod text;
mod weights;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::LazyLock;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::Target;

/// All targets, in the order of their files.
pub(crate) static TARGETS: LazyLock<Vec<Target>> =
    LazyLock::new(|| [weights::TARGETS, data::TARGETS, text::TARGETS, launch::TARGETS].concat());

/// Memory factor for values of one or two bytes each.
const TREE: usize = 512;
/// Memory for buffers, folders and messages.
const FREE: usize = 4 << 20;

/// Returns a file in memory with these bytes, positioned at its beginning.
fn file(bytes: &[u8]) -> File {
    let mut file = memfd_create("input", MemfdFlags::CLOEXEC).map(File::from).expect("memory");
    file.write_all(bytes).expect("memory");
    io::Seek::rewind(&mut file).expect("it has a beginning");
    file
}

/// Returns a path under which such a file can be opened again.
fn path_of(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}
