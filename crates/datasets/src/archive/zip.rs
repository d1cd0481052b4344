//! Unpacking of zip archives.

use std::fs::File;
use std::io::{self, BufReader, Read};

use brigade_rank_env::text::counted;
use flate2::bufread::DeflateDecoder;
use rawzip::{CompressionMethod, ErrorKind, MAX_CENTRAL_DIRECTORY_RECORD_SIZE, ZipArchive};

use super::tree::Tree;
use crate::DatasetError;

/// Unpacks all entries, and compares each file with its checksum.
pub(super) fn unpack(file: File, tree: &mut Tree<'_>) -> Result<(), DatasetError> {
    let mut buffer = vec![0; MAX_CENTRAL_DIRECTORY_RECORD_SIZE];
    let archive = ZipArchive::from_file(file, &mut buffer);
    let archive = archive.map_err(|error| damaged(tree, error))?;
    let expected = archive.entries_hint();
    let mut entries = archive.entries(&mut buffer);
    let mut found = 0;
    while let Some(entry) = entries.next_entry().map_err(|error| damaged(tree, error))? {
        found += 1;
        tree.entry()?;
        let path = entry.file_path();
        let name = path.as_bytes();
        if entry.flags().is_encrypted() {
            return Err(tree.refused(name, "it is encrypted"));
        }
        let data = archive.get_entry(entry.wayfinder()).map_err(|error| damaged(tree, error))?;
        let method = entry.compression_method();
        let content: Box<dyn Read> = if method == CompressionMethod::STORE {
            Box::new(data.verifying_reader(data.reader()))
        } else if method == CompressionMethod::DEFLATE {
            let packed = BufReader::new(data.reader());
            Box::new(data.verifying_reader(DeflateDecoder::new(packed)))
        } else {
            let method = method.as_u16();
            return Err(tree.refused(name, format!("it is compressed by the method {method}")));
        };
        let mode = entry.mode();
        match mode.value() & FILE_TYPE {
            _ if entry.is_dir() => tree.directory(name)?,
            0 | REGULAR => tree.file(name, mode.permissions() & 0o111 != 0, content)?,
            LINK => {
                let mut target = Vec::new();
                let read = content.take(MAX_LINK_BYTES).read_to_end(&mut target);
                read.map_err(|cause| tree.damaged(cause))?;
                tree.symlink(name, &target)?;
            }
            _ => return Err(tree.refused(name, "it is a device, a pipe or a socket")),
        }
    }
    if found != expected {
        let reason = format!("its directory has {found} of {}", counted(expected, "entry"));
        return Err(tree.damaged(io::Error::other(reason)));
    }
    Ok(())
}

fn damaged(tree: &Tree<'_>, error: rawzip::Error) -> DatasetError {
    tree.damaged(match error.into_kind() {
        ErrorKind::IO(error) => error,
        kind => io::Error::other(kind.to_string()),
    })
}

/// Bits of a Unix mode that encode the type of the file.
const FILE_TYPE: u32 = 0o170_000;
const REGULAR: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
/// Maximum length of a link's target: `PATH_MAX`.
const MAX_LINK_BYTES: u64 = 4096;
