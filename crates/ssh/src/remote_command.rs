//! The one line of the shell that starts an agent on another host.
//!
//! The login shell there may be any: sh, zsh, csh, fish. So the line becomes a call of `sh` with its
//! script in single quotes, which all of them understand, and without the characters that some of
//! them treat in a way of their own even there (`'`, `!`, a backslash before a quote, an end of
//! line). Everything else about a job goes through the session, not over a command line.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Makes the shell command line that starts `brigade` in a role: the file at the same path as on this host, unless
/// other users can change it, else the one in `PATH`. The role's name consists of letters and `_`.
#[must_use]
pub fn start(brigade: &Path, role: &str) -> String {
    let (same, in_path) = (SAME.replace(AGENT, role), IN_PATH.replace(AGENT, role));
    format!("exec sh -c '{DECODE} {CHECK} {same} {in_path} {MISSING}' sh {}", encode(brigade))
}

/// Makes the shell command line that starts an agent of exactly that digest and size, and requests its file if the host
/// does not have it.
#[must_use]
pub fn start_exactly(brigade: &Path, digest: &str, size: u64) -> String {
    format!(
        "exec sh -c '{DECODE} {STORED} {SAME_DIGEST} {RECEIVE}' sh {} {digest} {size}",
        encode(brigade)
    )
}

/// The path for `printf`, every byte that a shell could take for more than itself as `\NNN`.
fn encode(path: &Path) -> String {
    let mut encoded = String::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'_' | b'-' | b'+' => {
                encoded.push(char::from(*byte));
            }
            _ => encoded.push_str(&format!("\\{byte:03o}")),
        }
    }
    format!("'{encoded}'")
}

// The x keeps an end of line at the end of a path from being cut off.
const DECODE: &str = r#"p=$(printf "$1x"); p=${p%x};"#;
// Whether other users can put another file in its place: `unsafe` prints what they can change of the
// file and the folders above it, or what could not be checked. As sshd looks at authorized_keys, each
// must belong to this user or to root and be writable by no other; but what is in a folder that only
// this user may enter is out of their reach, and in one with the sticky bit each file is its owner's.
const CHECK: &str = r#"unsafe() { set -f; q=$1; u=$(id -u); s=; while :; do set -- $(ls -ldLn "$q" 2>/dev/null); case $1 in d????????[tT]*) ;; ?????w*|????????w*) s="other users can change $q" ;; esac; case $3 in "") s="ls cannot read the permissions of $q" ;; 0|$u) ;; *) s="other users can change $q" ;; esac; case $1,$3 in d???------*,$u) s= ;; esac; case $q in /) break ;; esac; q=${q%/*}; q=${q:-/}; done; printf "%s" "$s"; };"#;
const SAME: &str = r#"if [ -f "$p" ] && [ -x "$p" ]; then s=$(unsafe "$p") || s="the check of its permissions was killed"; if [ -n "$s" ]; then printf "\nbrigade-unsafe\n"; printf "%s\n" "$s" >&2; exit 126; fi; exec "$p" __agent; fi;"#;
const IN_PATH: &str = r#"if command -v brigade >/dev/null 2>&1; then exec brigade __agent; fi;"#;
const MISSING: &str = r#"printf "\nbrigade-missing\n"; exit 127"#;

// The size as well: after a power cut a file may be there and empty, which a shell runs as a script.
const STORED: &str = r#"d=${XDG_CACHE_HOME:-$HOME/.cache}/brigade/sync/$2; f=$d/brigade; if [ -x "$f" ] && [ "$(wc -c <"$f")" -eq "$3" ]; then touch "$f"; exec "$f" __agent; fi;"#;
const SAME_DIGEST: &str = r#"if [ -f "$p" ] && [ -x "$p" ] && [ "$(sha256sum <"$p" | cut -c1-64)" = "$2" ]; then exec "$p" __agent; fi;"#;
// Under another name first: a file of that name is whole. `head` may read more than it writes, but
// nothing more comes before the agent has answered. The rights in a part of its own: the ranks must
// not inherit the mask.
const RECEIVE: &str = r#"t=$d/brigade.$$; (umask 077; mkdir -p "$d" && printf "\nbrigade-wanted\n" && head -c "$3" >"$t" && chmod 700 "$t" && [ "$(sha256sum <"$t" | cut -c1-64)" = "$2" ] && { sync "$t" || :; } && mv "$t" "$f") && exec "$f" __agent; rm -f "$t"; exit 126"#;

/// Name of the role in which the launcher starts this program on a host.
pub const AGENT: &str = "__agent";
/// Marker line on stdout before an agent's first message. It may be preceded by output of the user's login shell.
pub const GREETING: &str = "\nbrigade-agent\n";
/// Marker line on stdout in place of the greeting: `brigade` was not found.
pub const IS_MISSING: &str = "\nbrigade-missing\n";
/// Marker line on stdout in place of the greeting: other users can replace the file of `brigade`. The paths that they
/// can change are on stderr.
pub const IS_UNSAFE: &str = "\nbrigade-unsafe\n";
/// Marker line on stdout before the greeting: the executable itself must be sent, with the announced number of bytes.
pub const IS_WANTED: &str = "\nbrigade-wanted\n";

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs::{self, Permissions};
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn lines() {
        let line = start(Path::new("/opt/my tools/brigade"), AGENT);
        assert!(
            line.starts_with(r#"exec sh -c 'p=$(printf "$1x"); p=${p%x}; unsafe() { "#),
            "{line}"
        );
        assert!(
            line.ends_with(
                r#"printf "\nbrigade-missing\n"; exit 127' sh '/opt/my\040tools/brigade'"#
            )
        );
        for line in
            [start(Path::new("/a'b!\n%"), AGENT), start_exactly(Path::new("/a'b!\n%"), "00", 5)]
        {
            assert_eq!(line.matches('\'').count(), 4, "{line}");
            assert!(!line.contains(['!', '\n']), "{line}");
            assert!(line.contains(r"/a\047b\041\012\045"), "{line}");
        }
    }

    /// Every shell that is installed here runs the line as it should, for a path that is a trap.
    #[test]
    fn every_shell_understands_them() {
        let folder = tempfile::tempdir().unwrap();
        let nasty = folder.path().join("a 'b' \"$c\" \\ !d %s\n");
        fs::create_dir(&nasty).unwrap();
        let agent = nasty.join("brigade\n");
        fs::write(&agent, "#!/bin/sh\necho agent \"$1\"\n").unwrap();
        fs::set_permissions(&agent, Permissions::from_mode(0o755)).unwrap();
        let empty = folder.path().join("none");
        let mut tried = 0;
        for shell in ["sh", "dash", "bash", "zsh", "ksh", "mksh", "csh", "tcsh", "fish"] {
            let run = |line: &str| {
                let mut command = Command::new(shell);
                command.args(["-c", line]).env("PATH", "/usr/bin:/bin").stderr(Stdio::inherit());
                command.output().ok()
            };
            let Some(there) = run(&start(&agent, AGENT)) else { continue };
            assert_eq!(there.stdout, b"agent __agent\n", "{shell}");
            let nowhere = run(&start(&empty, AGENT)).unwrap();
            assert_eq!(nowhere.stdout, IS_MISSING.as_bytes(), "{shell}");
            assert_eq!(nowhere.status.code(), Some(127), "{shell}");
            tried += 1;
        }
        assert!(tried >= 1);
    }

    #[test]
    fn a_file_that_others_can_change_is_not_run() {
        use std::os::unix::fs::chown;

        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("shared/tools of all");
        fs::create_dir_all(&deep).unwrap();
        let agent = deep.join("brigade");
        fs::write(&agent, "#!/bin/sh\necho agent\n").unwrap();
        let mode =
            |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        let shared = folder.path().join("shared");
        // Above it are only the temporary folder, with its sticky bit, and this folder, which is for this user alone.
        mode(folder.path(), 0o755);
        let run = || {
            let mut command = Command::new("sh");
            command.args(["-c", &start(&agent, AGENT)]).env("PATH", "/usr/bin:/bin");
            let output = command.output().unwrap();
            let text = |bytes| String::from_utf8(bytes).unwrap();
            (text(output.stdout), text(output.stderr), output.status.code())
        };
        let good = || ("agent\n".to_owned(), String::new(), Some(0));
        let bad = |path: &Path| {
            let words = format!("other users can change {}\n", path.display());
            (IS_UNSAFE.to_owned(), words, Some(126))
        };
        for (file, parent, top, changed) in [
            (0o755, 0o755, 0o755, None),
            (0o775, 0o755, 0o755, Some(&agent)),
            (0o757, 0o755, 0o755, Some(&agent)),
            (0o755, 0o775, 0o755, Some(&deep)),
            (0o755, 0o755, 0o757, Some(&shared)),
            (0o755, 0o755, 0o1777, None),
            (0o755, 0o777, 0o1777, Some(&deep)),
            // No other process comes this far.
            (0o777, 0o777, 0o700, None),
        ] {
            mode(&agent, file);
            mode(&deep, parent);
            mode(&shared, top);
            let expected = changed.map_or_else(good, |path| bad(path));
            assert_eq!(run(), expected, "{file:o} {parent:o} {top:o}");
        }
        mode(&shared, 0o755);
        for path in [&agent, &deep] {
            mode(&agent, 0o755);
            mode(&deep, 0o755);
            // Only root can give a file away.
            if chown(path, Some(4242), None).is_ok() {
                assert_eq!(run(), bad(path));
                chown(path, Some(0), None).unwrap();
            }
        }
    }

    /// The check fails closed: an `ls` that ends without a word, or that is killed, vouches for no file.
    #[test]
    fn a_file_whose_permissions_are_unknown_is_not_run() {
        let folder = tempfile::tempdir().unwrap();
        let agent = folder.path().join("brigade");
        let ls = folder.path().join("ls");
        let write = |path: &Path, text: &str| {
            fs::write(path, text).unwrap();
            fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
        };
        write(&agent, "#!/bin/sh\necho agent\n");
        for (text, words) in [
            ("exit 2", "ls cannot read the permissions of /\n"),
            // Its parent is the shell that checks.
            ("kill -KILL $PPID", "the check of its permissions was killed\n"),
        ] {
            write(&ls, &format!("#!/bin/sh\n{text}\n"));
            let mut command = Command::new("sh");
            command.args(["-c", &start(&agent, AGENT)]);
            command.env("PATH", format!("{}:/usr/bin:/bin", folder.path().display()));
            let output = command.output().unwrap();
            assert_eq!(output.stdout, IS_UNSAFE.as_bytes(), "{text}");
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(said.ends_with(words), "{text}: {said}");
            assert_eq!(output.status.code(), Some(126), "{text}");
        }
    }

    #[test]
    fn an_empty_copy_is_not_run() {
        let home = tempfile::tempdir().unwrap();
        let body = "#!/bin/sh\necho agent\n";
        let digest = {
            use sha2::{Digest, Sha256};
            Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        let stored = home.path().join(".cache/brigade/sync").join(&digest);
        fs::create_dir_all(&stored).unwrap();
        let copy = stored.join("brigade");
        let line = start_exactly(Path::new("/nowhere/brigade"), &digest, body.len() as u64);
        for (text, expected) in [("", IS_WANTED), (body, "agent\n")] {
            fs::write(&copy, text).unwrap();
            fs::set_permissions(&copy, Permissions::from_mode(0o700)).unwrap();
            let mut command = Command::new("sh");
            command.args(["-c", &line]).env("HOME", home.path()).env_remove("XDG_CACHE_HOME");
            let output = command.stdin(Stdio::null()).output().unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), expected, "{text:?}");
        }
    }

    #[test]
    fn brigade_is_received_once() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("home of its own");
        fs::create_dir(&home).unwrap();
        let body = b"#!/bin/sh\numask\necho received \"$1\"\n";
        let digest = {
            use sha2::{Digest, Sha256};
            Sha256::digest(body).iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        let nowhere = Path::new("/nowhere/brigade");
        let run = |line: &str, input: &[u8]| {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("umask 022; {line}")]);
            command.env("HOME", &home).env_remove("XDG_CACHE_HOME");
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            // Fails if the child does not read, which the test detects by its answer.
            let _ = child.stdin.take().unwrap().write_all(input);
            let output = child.wait_with_output().unwrap();
            (String::from_utf8(output.stdout).unwrap(), output.status.code())
        };
        let line = start_exactly(nowhere, &digest, body.len() as u64);
        let stored = home.join(".cache/brigade/sync").join(&digest);

        let broken = run(&line, b"#!/bin/sh\nsomething else ...\n....");
        assert_eq!(broken, (IS_WANTED.to_owned(), Some(126)));
        assert_eq!(fs::read_dir(&stored).unwrap().count(), 0);
        let first = run(&line, body);
        assert_eq!(first, (format!("{IS_WANTED}0022\nreceived __agent\n"), Some(0)));
        let second = run(&line, b"");
        assert_eq!(second, ("0022\nreceived __agent\n".to_owned(), Some(0)));
        assert_eq!(
            fs::read_dir(&stored).unwrap().next().unwrap().unwrap().file_name(),
            OsStr::new("brigade")
        );

        // The same file at the same path is equivalent.
        fs::remove_dir_all(&stored).unwrap();
        let same = folder.path().join("brigade");
        fs::write(&same, body).unwrap();
        fs::set_permissions(&same, Permissions::from_mode(0o755)).unwrap();
        let there = run(&start_exactly(&same, &digest, body.len() as u64), b"");
        assert_eq!(there, ("0022\nreceived __agent\n".to_owned(), Some(0)));
        assert!(!stored.exists());
    }
}
