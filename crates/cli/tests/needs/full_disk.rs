//! Test of `brigade launch --log-dir` on a disk that fills up.

use brigade_test_needs::{needs, with_mounts};

#[needs(Mounts)]
fn a_full_disk_under_the_logs_is_said_once_and_ends_nothing() {
    // A separate disk of 32 KiB.
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "mount -t tmpfs -o size=32k none {0}\n\
         exec {1} launch --nproc 2 --log-dir {0} --redirects 1 sh -c \
         'yes | head -c 200000; echo alive >&2'",
        folder.path().display(),
        env!("CARGO_BIN_EXE_brigade")
    );
    let output = with_mounts(&script).env("BRIGADE_CONFIG", "/dev/null").output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    assert_eq!(stderr.matches("stdout.log: No space left on device").count(), 1, "{stderr}");
    assert_eq!(stderr.matches("] alive\n").count(), 2, "{stderr}");
}
