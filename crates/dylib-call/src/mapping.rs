//! Parser of `/proc/self/maps`: the files in a process's memory, with their addresses.

use std::ffi::OsString;
use std::ops::Range;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Line of the memory map.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: Range<u64>,
    pub(crate) is_readable: bool,
    /// File of the mapping; `None` for anonymous memory, and for files that were deleted.
    pub(crate) file: Option<PathBuf>,
}

/// Parses `/proc/PID/maps`. A line of another format is skipped.
pub(crate) fn parse(text: &[u8]) -> Vec<Mapping> {
    text.split(|byte| *byte == b'\n').filter_map(line).collect()
}

/// Parses `start-end rwxp offset device inode   path`, as in proc_pid_maps(5).
fn line(line: &[u8]) -> Option<Mapping> {
    let mut rest = line;
    let mut field = || {
        let begin = rest.iter().position(|byte| *byte != b' ')?;
        let end =
            rest[begin..].iter().position(|byte| *byte == b' ').map_or(rest.len(), |it| begin + it);
        let (field, after) = (&rest[begin..end], &rest[end..]);
        rest = after;
        Some(field)
    };
    let addresses = std::str::from_utf8(field()?).ok()?;
    let permissions = field()?;
    for _ in ["offset", "device", "inode"] {
        field()?;
    }
    let (start, end) = addresses.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(Mapping {
        range: number(start)?..number(end)?,
        is_readable: permissions.first() == Some(&b'r'),
        file: file(rest.trim_ascii_start()),
    })
}

/// Decodes a path: the kernel writes a line break in a name as `\012`.
fn file(path: &[u8]) -> Option<PathBuf> {
    if !path.starts_with(b"/") || path.ends_with(b" (deleted)") {
        return None;
    }
    let mut name = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((byte, after)) = rest.split_first() {
        rest = match rest.strip_prefix(b"\\012") {
            Some(after) => {
                name.push(b'\n');
                after
            }
            None => {
                name.push(*byte);
                after
            }
        };
    }
    Some(PathBuf::from(OsString::from_vec(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_and_without_files() {
        let text = b"7f00-7f10 r--p 00000000 08:01 42                         /a b/lib\\012x.so\n\
                     7f10-7f20 -w-p 00000000 08:01 42 /gone.so (deleted)\n\
                     7f20-7f30 rw-p 00000000 00:00 0\n\
                     nonsense\n\
                     7f30-7f40 rw-p 00000000 00:00 0 [heap]\n";
        let found = parse(text);
        let files: Vec<_> =
            found.iter().map(|it| it.file.as_deref().map(|it| it.to_string_lossy())).collect();
        assert_eq!(files, [Some("/a b/lib\nx.so".into()), None, None, None]);
        assert_eq!(found[0].range, 0x7f00..0x7f10);
        assert_eq!(
            found.iter().map(|it| it.is_readable).collect::<Vec<_>>(),
            [true, false, true, true]
        );
    }
}
