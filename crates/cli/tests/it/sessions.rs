//! Sessions at the command line, as documents: commands with their output. `[..]` stands for text that differs from
//! machine to machine, `[CWD]` for the folder.
//!
//! After an intended change, `TRYCMD=overwrite cargo nextest run -p brigade-cli sessions::` rewrites the output; then
//! check the places of `[..]`.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use trycmd::schema::Bin;

#[test]
fn sessions() {
    // Without the caller's environment, and with a home folder in the session's own folder.
    let folder = tempfile::tempdir().unwrap();
    let brigade = folder.path().join("brigade");
    let script = format!(
        "#!/bin/sh\nexec env -i PATH=/usr/bin:/bin HOME=\"$PWD/user\" COLUMNS=100 '{}' \"$@\"\n",
        env!("CARGO_BIN_EXE_brigade")
    );
    fs::write(&brigade, script).unwrap();
    fs::set_permissions(&brigade, fs::Permissions::from_mode(0o755)).unwrap();
    trycmd::TestCases::new()
        .register_bin("brigade", Bin::Path(brigade))
        .case("tests/sessions/*.md")
        .run();
}
