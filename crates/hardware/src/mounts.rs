//! Mounted file systems, from `/proc/self/mountinfo`.

use std::path::{Path, PathBuf};

use crate::Sources;

/// A mounted file system: one line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Folder within the file system that is mounted.
    pub root: PathBuf,
    /// Path of the mount point.
    pub point: PathBuf,
    /// Type of the file system, such as `ext4` or `nfs4`.
    pub kind: String,
    /// Source of the file system: the device, or the server and its folder.
    pub source: String,
    /// Options of the file system itself. For a control group, its controllers.
    pub options: String,
}

/// Returns all mounts in the mount namespace of this process.
#[must_use]
pub fn all(sources: &Sources) -> Vec<Mount> {
    let text = sources.read("/proc/self/mountinfo").unwrap_or_default();
    text.lines().filter_map(parse).collect()
}

/// Returns the mount that contains a path. Of several at one mount point, returns the last, which hides the others.
#[must_use]
pub fn of<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let depth = |mount: &Mount| mount.point.components().count();
    mounts.iter().filter(|mount| path.starts_with(&mount.point)).max_by_key(|mount| depth(mount))
}

fn parse(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let mut right = right.split(' ');
    Some(Mount {
        root: PathBuf::from(unescape(left.next()?)),
        point: PathBuf::from(unescape(left.next()?)),
        kind: right.next()?.to_owned(),
        source: unescape(right.next()?),
        options: right.next().unwrap_or_default().to_owned(),
    })
}

/// Decodes the kernel's escapes: spaces and the like are written as three octal digits.
fn unescape(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                plain.push(code.into());
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let line =
            "36 35 98:0 /sub /mnt/my\\040data rw,noatime shared:1 - nfs4 box:/data rw,vers=4";
        let mount = parse(line).unwrap();
        assert_eq!(mount.root, Path::new("/sub"));
        assert_eq!(mount.point, Path::new("/mnt/my data"));
        assert_eq!((mount.kind.as_str(), mount.source.as_str()), ("nfs4", "box:/data"));
    }

    #[test]
    fn the_innermost_and_newest_mount_counts() {
        let mounts: Vec<Mount> = [
            "1 0 8:1 / / rw - ext4 /dev/a rw",
            "2 1 0:9 / /srv rw - nfs4 box:/srv rw",
            "3 2 0:9 / /srv rw - tmpfs none rw",
        ]
        .into_iter()
        .filter_map(parse)
        .collect();
        assert_eq!(of(&mounts, Path::new("/srv/ada/x")).unwrap().kind, "tmpfs");
        assert_eq!(of(&mounts, Path::new("/srvs")).unwrap().kind, "ext4");
    }
}
