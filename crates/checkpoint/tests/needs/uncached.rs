//! Files on a file system that cannot bypass the system's cache.

use std::fs;
use std::path::PathBuf;

use brigade_checkpoint::layout::ChecksumWriter;
use brigade_test_needs::{needs, with_mounts};

const FOLDER: &str = "BRIGADE_TEST_UNCACHED";

#[needs(Mounts)]
fn without_direct_io_the_bytes_are_the_same() {
    let folder = tempfile::tempdir().unwrap();
    // Every Linux has such a file system: tmpfs, which needs no root, could not bypass the cache until 6.6, and ramfs,
    // which only root may mount, cannot.
    let script = "mount -t ramfs none \"$1\" 2>/dev/null || mount -t tmpfs none \"$1\"\n\
                  exec \"$2\" --part uncached::write";
    let mut command = with_mounts(script);
    command.arg(folder.path()).arg(std::env::current_exe().unwrap());
    let output = command.env(FOLDER, folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[brigade_test_needs::part]
fn write() {
    let folder = std::env::var_os(FOLDER).map(PathBuf::from).unwrap();
    let content: Vec<u8> = (0..17 << 20).map(|i: u32| (i % 253) as u8).collect();
    let path = folder.join("file");
    let mut out = ChecksumWriter::create_sized(&path, content.len() as u64, true).unwrap();
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let place = format!(" {} ramfs ", folder.display());
    if mounts.contains(&place) {
        assert!(!out.is_direct(), "a ramfs has no way past the cache");
    }
    out.put(&content).unwrap();
    let facts = out.finish(true).unwrap();
    assert!(fs::read(&path).unwrap() == content);
    assert_eq!(facts.crc32, format!("{:08x}", crc32fast::hash(&content)));
}
