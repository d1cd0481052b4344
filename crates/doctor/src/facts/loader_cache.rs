//! Reader of `/etc/ld.so.cache`, the dynamic loader's index of libraries.

use std::collections::HashMap;
use std::path::PathBuf;

use brigade_hardware::Sources;

/// Returns paths by the name of the library, in the loader's order. Empty without a valid cache.
pub(super) fn read(sources: &Sources) -> HashMap<String, Vec<PathBuf>> {
    let bytes = std::fs::read(sources.path("/etc/ld.so.cache")).unwrap_or_default();
    parse(&bytes).unwrap_or_default()
}

/// Parses the cache: a header, entries of fixed size, and the strings that they point to, with offsets from the header.
/// Some systems put a list in an older format before it.
fn parse(bytes: &[u8]) -> Option<HashMap<String, Vec<PathBuf>>> {
    let start = bytes.windows(MAGIC.len()).position(|window| window == MAGIC)?;
    let table = &bytes[start..];
    let number = |at: usize| {
        let bytes = table.get(at..at + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?) as usize)
    };
    let text = |at: usize| {
        let rest = table.get(at..)?;
        let end = rest.iter().position(|byte| *byte == 0)?;
        std::str::from_utf8(&rest[..end]).ok()
    };
    let mut files: HashMap<String, Vec<PathBuf>> = HashMap::new();
    for index in 0..number(MAGIC.len())? {
        let entry = HEADER + index * ENTRY;
        let (name, path) = (text(number(entry + 4)?)?, text(number(entry + 8)?)?);
        files.entry(name.to_owned()).or_default().push(path.into());
    }
    Some(files)
}

const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const HEADER: usize = 48;
const ENTRY: usize = 24;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_by_name() {
        let mut bytes = b"ld.so-1.7.0 and what belongs to it".to_vec();
        let texts = b"libc.so.6\0/lib/libc.so.6\0";
        let (name, path) = (HEADER + ENTRY, HEADER + ENTRY + 10);
        let mut table = MAGIC.to_vec();
        table.extend_from_slice(&1u32.to_ne_bytes());
        table.resize(HEADER, 0);
        for number in [3, name as u32, path as u32, 0, 0, 0] {
            table.extend_from_slice(&number.to_ne_bytes());
        }
        table.extend_from_slice(texts);
        bytes.extend_from_slice(&table);
        let found = parse(&bytes).unwrap();
        assert_eq!(found["libc.so.6"], [PathBuf::from("/lib/libc.so.6")]);
        // Cut off anywhere, it is not taken for a cache, and nothing breaks.
        for length in 0..bytes.len() {
            assert!(parse(&bytes[..length]).is_none_or(|found| found.len() <= 1));
        }
    }

    #[test]
    fn that_of_this_host_has_the_c_library() {
        let found = read(&Sources::system());
        // Alpine and the like have no cache.
        assert!(found.is_empty() || found.keys().any(|name| name.starts_with("libc.so")));
    }
}
