//! Analysis of pip's output: the reason of a failure and its remedy, in one line.

use crate::pins::Pin;

/// Returns the reason, from all of pip's output. pip's exit code is 1 for every failure. `instead` is what the user can do
/// instead, as the end of the message.
pub(crate) fn explain(log: &str, pin: &Pin, instead: &str) -> String {
    let requirement = pin.requirement();
    let has = |needles: &[&str]| needles.iter().any(|needle| log.contains(needle));
    if has(DISK_FULL) {
        return disk_full(&requirement);
    }
    if has(OTHER_HASH) {
        return format!(
            "{requirement}: the sha256 of the wheel that pip got is not the one that this version of \
             Brigade expects: an index or proxy altered it; check `python3 -m pip config list`"
        );
    }
    // Before "not found": without network, pip's last message is that one, too.
    if has(NO_NETWORK) {
        return format!(
            "{requirement}: pip cannot reach the package index: check the network and the proxy \
             (`python3 -m pip config list`) and run this again{instead}"
        );
    }
    if has(NOT_FOUND) {
        return format!(
            "{requirement}: the package index that pip uses does not have it for {}: see \
             `python3 -m pip config list`{instead}",
            pin.platform
        );
    }
    let line = log.lines().rfind(|line| line.contains("ERROR"));
    let line = line.or_else(|| log.lines().rfind(|line| !line.trim().is_empty()));
    format!("{requirement}: pip failed: {}", line.unwrap_or("no output").trim())
}

pub(crate) fn disk_full(what: &str) -> String {
    format!("{what}: the disk is full: make room and run this again")
}

const DISK_FULL: &[&str] = &["No space left on device", "[Errno 28]", "Disk quota exceeded"];
const OTHER_HASH: &[&str] = &["DO NOT MATCH THE HASHES"];
const NO_NETWORK: &[&str] = &[
    "NewConnectionError",
    "Connection refused",
    "Connection reset",
    "ConnectTimeout",
    "Max retries exceeded",
    "Name or service not known",
    "NameResolutionError",
    "Network is unreachable",
    "ProxyError",
    "ReadTimeout",
    "Temporary failure in name resolution",
    "connection broken by",
    "problem confirming the ssl certificate",
    "timed out",
];
const NOT_FOUND: &[&str] = &["No matching distribution found"];

#[cfg(test)]
mod tests {
    use super::*;

    /// pip's own words, versions 20 to 25.
    #[test]
    fn reasons() {
        let pin: Pin = serde_json::from_str(
            r#"{"package": "torch", "version": "2.13.0", "platform": "manylinux_2_28_x86_64",
                "sha256": "", "download_bytes": 1, "installed_bytes": 1, "keep": []}"#,
        )
        .unwrap();
        let table = [
            (
                "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
                "disk is full",
            ),
            (
                "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
                "the sha256 of the wheel",
            ),
            (
                "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\n\
                 ERROR: No matching distribution found for torch==2.13.0",
                "cannot reach the package index",
            ),
            (
                "ERROR: No matching distribution found for torch==2.13.0",
                "does not have it for manylinux_2_28",
            ),
            ("WARNING: x\nERROR: something new\n", "pip failed: ERROR: something new"),
            ("", "no output"),
        ];
        for (log, expected) in table {
            let line = explain(log, &pin, ", or build it");
            assert!(line.contains(expected), "{line}");
            assert_eq!(line.ends_with(", or build it"), line.contains("package index"), "{line}");
            assert!(line.starts_with("torch==2.13.0: ") && !line.contains('\n'), "{line}");
        }
    }
}
