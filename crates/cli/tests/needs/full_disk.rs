//! Tests of commands that write to a disk that fills up.

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

/// Commands that write weights leave nothing on a disk that fills up, and name the file.
#[needs(Mounts)]
fn a_full_disk_under_converted_weights_is_an_error_with_the_file_and_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let (weights, full) = (folder.path().join("weights.safetensors"), folder.path().join("full"));
    write_weights(&weights);
    std::fs::create_dir(&full).unwrap();
    for (arguments, named) in [
        ("convert weights.safetensors full/w.safetensors", "full/w.safetensors"),
        ("convert weights.safetensors full/w.pth", "full/w.pth"),
        ("convert weights.safetensors full/w --to dcp", "full/w/__0_0.distcp"),
        ("convert weights.safetensors full/w --weights int8", "full/w/model.safetensors"),
        ("split weights.safetensors full/w --max-shard-size 100KB", "full/w/model-0000"),
    ] {
        let script = format!(
            "mount -t tmpfs -o size=150k none full; code=0; {} checkpoint {arguments} || code=$?; \
             echo $code $(ls -A full | wc -l)",
            env!("CARGO_BIN_EXE_brigade")
        );
        let output = with_mounts(&script).current_dir(folder.path()).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "1 0\n", "{arguments}: {stderr}");
        let said = format!("brigade: cannot write {named}");
        assert!(stderr.starts_with(&said), "{arguments}: {stderr}");
        assert!(stderr.contains("No space left on device"), "{arguments}: {stderr}");
    }
}

/// Writes a safetensors file of eight matrices, 1 MiB in all, which one byte per value does not make small enough.
fn write_weights(path: &std::path::Path) {
    let size = 512 * 64 * 4;
    let entries = (0..8).map(|layer| {
        let (start, end) = (layer * size, (layer + 1) * size);
        format!(
            r#""layers.{layer}.weight":{{"dtype":"F32","shape":[512,64],"data_offsets":[{start},{end}]}}"#
        )
    });
    let header = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0, 0, 128, 63].repeat(8 * size / 4));
    std::fs::write(path, bytes).unwrap();
}
