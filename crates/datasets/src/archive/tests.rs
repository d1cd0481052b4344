//! Tests of valid archives, and of untrusted ones.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ::tar::{Builder, EntryType, Header};
use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder};
use rawzip::{CompressionMethod, ZipArchiveWriter};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;
use crate::loopback::{has_small_files, passes_with_small_files};

/// Returns an entry with any name, which `Header::set_path` would refuse.
fn entry(tar: &mut Builder<Vec<u8>>, kind: EntryType, name: &str, link: &str, body: &[u8]) {
    let mut header = Header::new_gnu();
    let fields = header.as_gnu_mut().unwrap();
    fields.name[..name.len()].copy_from_slice(name.as_bytes());
    fields.linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(kind);
    header.set_size(body.len() as u64);
    header.set_mode(if body.starts_with(b"#!") { 0o6755 } else { 0o644 });
    header.set_cksum();
    tar.append(&header, body).unwrap();
}

fn tar(entries: &[(EntryType, &str, &str, &[u8])]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    entries.iter().for_each(|(kind, name, link, body)| entry(&mut tar, *kind, name, link, body));
    tar.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Returns a zip archive of files with their modes; every other one is stored without compression.
fn zip(entries: &[(&str, u32, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut zip = ZipArchiveWriter::new(&mut bytes);
    for (number, (name, mode, body)) in entries.iter().enumerate() {
        if name.ends_with('/') {
            zip.new_dir(*name).create().unwrap();
            continue;
        }
        let name = rawzip::path::EntryPath::verbatim(name.as_bytes());
        let file = zip.new_file(name).unix_permissions(*mode);
        if number % 2 == 0 {
            let (mut entry, config) =
                file.compression_method(CompressionMethod::DEFLATE).start().unwrap();
            let mut writer = config.wrap(DeflateEncoder::new(&mut entry, Compression::default()));
            writer.write_all(body).unwrap();
            let (encoder, descriptor) = writer.finish().unwrap();
            encoder.finish().unwrap();
            entry.finish(descriptor).unwrap();
        } else {
            let (mut entry, config) =
                file.compression_method(CompressionMethod::STORE).start().unwrap();
            let mut writer = config.wrap(&mut entry);
            writer.write_all(body).unwrap();
            let (_, descriptor) = writer.finish().unwrap();
            entry.finish(descriptor).unwrap();
        }
    }
    zip.finish().unwrap();
    bytes
}

/// An archive that was unpacked into a new folder, and the result.
struct Unpacked {
    home: tempfile::TempDir,
    result: Result<(), DatasetError>,
}

impl Unpacked {
    fn new(bytes: &[u8]) -> Self {
        Self::with(bytes, &Extraction::new())
    }

    fn with(bytes: &[u8], extraction: &Extraction) -> Self {
        let home = tempfile::tempdir().unwrap();
        let archive = home.path().join("archive");
        fs::write(&archive, bytes).unwrap();
        let result = extraction.extract(archive, home.path().join("data/set"));
        Self { home, result }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join("data/set").join(name)
    }

    fn text(&self, name: &str) -> String {
        let path = self.path(name);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Returns the error's message. Fails if there was no error, or something was left behind.
    fn error(&self, name: &str) -> String {
        let Err(error) = &self.result else { panic!("{name} was unpacked") };
        assert_eq!(names(&self.home.path().join("data")), [""; 0], "{name}");
        error.to_string()
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

use EntryType::{Directory, Link, Regular, Symlink};

#[test]
fn every_kind_of_archive_is_unpacked() {
    let plain = tar(&[
        (Directory, "top/", "", b""),
        (Regular, "top/a.txt", "", b"a"),
        (Regular, "./top/deep/er/b.sh", "", b"#!b"),
        (Regular, "top/a.txt", "", b"a, the later one"),
    ]);
    let zipped = zip(&[
        ("top/", 0, b""),
        ("top/a.txt", 0o644, b"a, the later one"),
        ("top/deep/er/b.sh", 0o6755, b"#!b"),
    ]);
    let mut old = Builder::new(Vec::new());
    for (name, mode, body) in
        [("top/a.txt", 0o644, &b"a, the later one"[..]), ("top/deep/er/b.sh", 0o6755, b"#!b")]
    {
        let mut header = Header::new_old();
        header.set_size(body.len() as u64);
        header.set_mode(mode);
        old.append_data(&mut header, name, body).unwrap();
    }
    let (first, second) = plain.split_at(700);
    let members = [gzip(first), gzip(second), vec![0; 512]].concat();
    for (kind, bytes) in [
        ("old", old.into_inner().unwrap()),
        ("tar", plain.clone()),
        ("gzip", gzip(&plain)),
        ("members", members),
        ("zip", zipped),
    ] {
        let unpacked = Unpacked::new(&bytes);
        unpacked.result.as_ref().unwrap_or_else(|error| panic!("{kind}: {error}"));
        assert_eq!(names(&unpacked.home.path().join("data")), ["set"], "{kind}");
        assert_eq!(names(&unpacked.path("")), ["a.txt", "deep"], "{kind}");
        assert_eq!(unpacked.text("a.txt"), "a, the later one", "{kind}");
        assert_eq!(unpacked.text("deep/er/b.sh"), "#!b", "{kind}");
        let mode = |name| fs::metadata(unpacked.path(name)).unwrap().permissions().mode() & 0o7777;
        // Executable, without the bits that let it run as its owner.
        assert_eq!(mode("deep/er/b.sh") & 0o7500, 0o500, "{kind}");
        assert_eq!(mode("a.txt") & 0o7111, 0, "{kind}");
    }
}

#[test]
fn only_one_folder_at_the_top_is_renamed() {
    let several = Unpacked::new(&tar(&[(Regular, "a/1", "", b"1"), (Regular, "b/2", "", b"2")]));
    several.result.as_ref().unwrap();
    assert_eq!(names(&several.path("")), ["a", "b"]);
    let file = Unpacked::new(&tar(&[(Regular, "names.csv", "", b"1")]));
    file.result.as_ref().unwrap();
    assert_eq!(names(&file.path("")), ["names.csv"]);
    let linked = Unpacked::new(&tar(&[(Regular, "a/1", "", b"1"), (Symlink, "b", "a", b"")]));
    linked.result.as_ref().unwrap();
    assert_eq!(linked.text("b/1"), "1");
}

#[test]
fn links_inside_are_kept() {
    let unpacked = Unpacked::new(&tar(&[
        (Regular, "top/a.txt", "", b"a"),
        (Link, "top/hard", "top/a.txt", b""),
        (Symlink, "top/deep/soft", "../a.txt", b""),
        // Made before its target.
        (Symlink, "top/early", "deep", b""),
    ]));
    unpacked.result.as_ref().unwrap();
    assert_eq!((unpacked.text("deep/soft"), unpacked.text("early/soft")), ("a".into(), "a".into()));
    let inode = |name| fs::metadata(unpacked.path(name)).unwrap().ino();
    assert_eq!(inode("hard"), inode("a.txt"));

    let zipped = Unpacked::new(&zip(&[("a.txt", 0o644, b"a"), ("soft", 0o120_777, b"./a.txt")]));
    zipped.result.as_ref().unwrap();
    assert_eq!(zipped.text("soft"), "a");
}

#[test]
fn what_could_do_harm_is_refused_and_nothing_is_left() {
    let tar = |kind, name, link| tar(&[(Regular, "top/a", "", b"a"), (kind, name, link, b"")]);
    let mut encrypted = zip(&[("a", 0o644, b"a")]);
    // The flags in the central directory.
    let directory = encrypted.windows(4).position(|it| it == b"PK\x01\x02").unwrap();
    encrypted[directory + 8] |= 1;
    let table = [
        ("absolute", tar(Regular, "/var/x", ""), "\"/var/x\" is refused: its name is absolute"),
        ("up", tar(Regular, "top/../../x", ""), "a name with .. may lead out"),
        ("up, a folder", tar(Directory, "../x/", ""), "a name with .. may lead out"),
        ("no name", tar(Regular, "./", ""), ""),
        (
            "link, absolute",
            tar(Symlink, "top/x", "/etc"),
            "it is a link to \"/etc\", which may lead out",
        ),
        ("link, out of the one folder", tar(Symlink, "top/x", "../other"), "may lead out"),
        ("link, through another", tar(Symlink, "top/deep/x", "y/.."), "may lead out"),
        ("hard link, out", tar(Link, "top/x", "../../archive"), "a name with .. may lead out"),
        ("hard link, absolute", tar(Link, "top/x", "/etc/passwd"), "its name is absolute"),
        (
            "hard link to nothing",
            tar(Link, "top/x", "top/b"),
            "a link to \"top/b\", which is not an earlier file",
        ),
        ("hard link to a folder", tar(Link, "top/x", "top"), "which is not an earlier file"),
        ("device", tar(EntryType::Char, "top/x", ""), "it is a device"),
        ("disk", tar(EntryType::Block, "top/x", ""), "it is a device"),
        ("pipe", tar(EntryType::Fifo, "top/x", ""), "it is a pipe"),
        ("unknown", tar(EntryType::new(b'Q'), "top/x", ""), "of the unknown type 'Q'"),
        ("a file as a folder", tar(Regular, "top/a/x", ""), "another entry is a file"),
        ("zip, up", zip(&[("../x", 0o644, b"x")]), "a name with .. may lead out"),
        ("zip, absolute", zip(&[("/x", 0o644, b"x")]), "its name is absolute"),
        ("zip, link", zip(&[("x", 0o120_777, b"../../x")]), "may lead out"),
        ("zip, pipe", zip(&[("x", 0o010_644, b"")]), "it is a device, a pipe"),
        ("zip, encrypted", encrypted, "it is encrypted"),
    ];
    for (name, bytes, expected) in table {
        if expected.is_empty() {
            // A folder of the old kind: the root itself.
            Unpacked::new(&bytes).result.unwrap();
            continue;
        }
        let unpacked = Unpacked::new(&bytes);
        let error = unpacked.error(name);
        assert!(
            error.contains(expected) && error.contains("nothing was unpacked"),
            "{name}: {error}"
        );
        assert_eq!(names(unpacked.home.path()), ["archive", "data"], "{name}");
    }
}

/// A link, and an entry that would be written through it.
#[test]
fn nothing_is_written_through_a_link() {
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().to_str().unwrap();
    for (first, second) in [("top/l", "top/l/x"), ("l", "l/x")] {
        for link in [target, "inside"] {
            let bytes = tar(&[(Symlink, first, link, b""), (Regular, second, "", b"x")]);
            Unpacked::new(&bytes).error(first);
            assert_eq!(names(outside.path()), [""; 0]);
        }
        // The other way round, and a link with the name of a file.
        for second in [second, first] {
            let bytes = tar(&[(Regular, second, "", b"x"), (Symlink, first, "inside", b"")]);
            Unpacked::new(&bytes).error(first);
        }
    }
    // The path of the folder itself.
    let home = tempfile::tempdir().unwrap();
    let archive = home.path().join("archive");
    fs::write(&archive, tar(&[(Regular, "top/a", "", b"a")])).unwrap();
    symlink(outside.path(), home.path().join("set")).unwrap();
    Extraction::new().replace(true).extract(&archive, home.path().join("set")).unwrap();
    assert_eq!(names(outside.path()), [""; 0]);
    assert_eq!(names(&home.path().join("set")), ["a"]);
}

#[test]
fn bombs_are_stopped() {
    let zeros = vec![0; 4 << 20];
    let large = tar(&[(Regular, "zeros", "", &zeros)]);
    let many: Vec<String> = (0..50).map(|number| format!("{number}/a")).collect();
    let many: Vec<(EntryType, &str, &str, &[u8])> =
        many.iter().map(|name| (Regular, &**name, "", &b""[..])).collect();
    let same = vec![(Directory, "a/", "", &b""[..]); 60];
    let unwanted: (EntryType, &str, &str, &[u8]) = (EntryType::XGlobalHeader, "g", "", &zeros);
    // Bytes after the end of the archive, in the same stream.
    let after = [tar(&[(Regular, "a", "", b"a")]), zeros.clone()].concat();
    let small = Extraction::new().max_bytes(1 << 20).max_files(50);
    let table = [
        ("gzip", gzip(&large), "holds more than 1048576 bytes"),
        ("zip", zip(&[("zeros", 0o644, &zeros)]), "holds more than 1048576 bytes"),
        (
            "unwanted",
            gzip(&tar(&[unwanted, (Regular, "a", "", b"a")])),
            "holds more than 1048576 bytes",
        ),
        ("after the end", gzip(&after), "holds more than 1048576 bytes"),
        ("folders", tar(&many), "holds more than 50 files"),
        ("the same", tar(&same), "holds more than 50 files"),
    ];
    for (name, bytes, expected) in table {
        let error = Unpacked::with(&bytes, &small).error(name);
        assert!(error.contains(expected), "{name}: {error}");
        assert!(error.contains("allow more by `max_"), "{name}: {error}");
        Unpacked::new(&bytes).result.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    // A name that the reader of tar archives would read into memory.
    let long =
        tar(&[(EntryType::GNULongName, "././@LongLink", "", &zeros), (Regular, "a", "", b"")]);
    let error = Unpacked::new(&gzip(&long)).error("long name");
    assert!(error.contains("a header has more than 131072 bytes"), "{error}");
    let limits = Extraction::new().limits(320);
    assert_eq!(limits, Limits { bytes: 32_000 + (1 << 30), files: 100_010 });
    assert_eq!(Extraction::new().limits(u64::MAX).bytes, u64::MAX);
}

#[test]
fn long_names_are_read() {
    let name = format!("top/{}/{}", "d".repeat(120), "e".repeat(120));
    let mut tar = Builder::new(Vec::new());
    let mut header = Header::new_gnu();
    header.set_size(1);
    header.set_mode(0o644);
    tar.append_data(&mut header, &name, &b"a"[..]).unwrap();
    let unpacked = Unpacked::new(&tar.into_inner().unwrap());
    unpacked.result.as_ref().unwrap();
    assert_eq!(unpacked.text(&name[4..]), "a");
    let unpacked = Unpacked::new(&zip(&[("a/b", 0o644, b""), (&"c".repeat(5000), 0o644, b"")]));
    assert!(unpacked.error("too long").contains("it is not the name of a file"));
}

#[test]
fn damage_is_found_and_nothing_is_left() {
    let plain = tar(&[(Regular, "top/a", "", &[7; 3000]), (Regular, "top/b", "", b"b")]);
    let zipped = gzip(&plain);
    let mut checksum = zipped.clone();
    let at = checksum.len() - 8;
    checksum[at] ^= 1;
    let mut header = plain.clone();
    let second = header.windows(6).position(|it| it == b"top/b\0").unwrap();
    header[second] ^= 1;
    let packed = zip(&[("a", 0o644, &[7; 3000]), ("b", 0o644, b"body of b")]);
    let mut body = packed.clone();
    let at = body.windows(9).position(|it| it == b"body of b").unwrap();
    body[at] ^= 1;
    let table = [
        ("gzip, cut", zipped[..zipped.len() / 2].to_vec(), "is a damaged archive: "),
        (
            "gzip, without its checksum",
            zipped[..zipped.len() - 8].to_vec(),
            "is a damaged archive: ",
        ),
        ("gzip, another checksum", checksum, "after 2 good entries; fetch it again"),
        ("tar, cut", plain[..2000].to_vec(), "is a damaged archive: "),
        ("tar, a header", header, "after 1 good entry;"),
        ("zip, cut", packed[..packed.len() / 2].to_vec(), "Missing end of central directory"),
        ("zip, a body", body, "is a damaged archive: "),
        (
            "a page",
            b"<!DOCTYPE html><title>Moved</title>".to_vec(),
            "found 35 bytes that begin with \"<!DOCTYPE",
        ),
        ("a packed page", gzip(b"<html>"), "is a damaged archive: "),
        ("empty", Vec::new(), "is not a tar, tar.gz or zip archive: found 0 bytes"),
        ("empty archive", gzip(&tar(&[])), "found an archive without files"),
    ];
    for (name, bytes, expected) in table {
        let error = Unpacked::new(&bytes).error(name);
        assert!(error.contains(expected) && error.contains("fetch it again"), "{name}: {error}");
    }
}

#[test]
fn a_folder_is_replaced_only_when_asked_for_and_remains_of_others_go() {
    let home = tempfile::tempdir().unwrap();
    let archive = home.path().join("archive");
    fs::write(&archive, tar(&[(Regular, "top/new", "", b"")])).unwrap();
    let (data, folder) = (home.path().join("data"), home.path().join("data/set"));
    fs::create_dir_all(folder.join("old")).unwrap();
    fs::create_dir_all(data.join(".set.extracting/content/half")).unwrap();
    Extraction::new().extract(&archive, &folder).unwrap();
    assert_eq!(names(&folder), ["old"]);
    // An archive that fails leaves the folder as it is.
    let broken = home.path().join("broken");
    fs::write(&broken, gzip(b"")).unwrap();
    Extraction::new().replace(true).extract(&broken, &folder).unwrap_err();
    assert_eq!((names(&folder), names(&data)), (vec!["old".into()], vec!["set".into()]));
    fs::create_dir_all(data.join(".set.extracting/content/half")).unwrap();
    Extraction::new().replace(true).extract(&archive, &folder).unwrap();
    assert_eq!((names(&folder), names(&data)), (vec!["new".into()], vec!["set".into()]));
    let error = Extraction::new().extract(home.path().join("none"), &folder).unwrap_err();
    assert!(error.to_string().starts_with("cannot read "), "{error}");
}

#[test]
fn a_disk_that_is_full_is_named_and_nothing_is_left() {
    if !has_small_files() {
        let test = "archive::tests::a_disk_that_is_full_is_named_and_nothing_is_left";
        return passes_with_small_files(test);
    }
    let unpacked = Unpacked::new(&gzip(&tar(&[
        (Regular, "top/small", "", b"fits"),
        (Regular, "top/large", "", &[7; 64 << 10]),
    ])));
    let error = unpacked.error("full");
    assert!(error.starts_with("cannot write /"), "{error}");
    assert!(error.contains("/data/.set.extracting/content/top/large: "), "{error}");
}

#[test]
fn what_a_killed_process_leaves_is_removed() {
    const INSIDE: &str = "BRIGADE_TEST_KILLED";
    if let Some(home) = std::env::var_os(INSIDE) {
        let home = Path::new(&home);
        Extraction::new().extract(home.join("pipe"), home.join("data/set")).unwrap();
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let (pipe, data) = (home.path().join("pipe"), home.path().join("data"));
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    // For reading and writing, so that it opens at once.
    let mut writer = File::options().read(true).write(true).open(&pipe).unwrap();
    let bytes = tar(&[(Regular, "top/a", "", &[7; 512]), (Regular, "top/b", "", b"b")]);
    writer.write_all(&bytes[..1024]).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "archive::tests::what_a_killed_process_leaves_is_removed"])
        .env(INSIDE, home.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let half = data.join(".set.extracting/content/top/a");
    let begun = Instant::now();
    while !fs::metadata(&half).is_ok_and(|found| found.len() == 512) {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing is unpacked");
        assert!(child.try_wait().unwrap().is_none(), "the process has ended");
        thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(names(&data), [".set.extracting", ".set.extracting.lock"]);
    let archive = home.path().join("archive");
    fs::write(&archive, &bytes).unwrap();
    Extraction::new().extract(&archive, data.join("set")).unwrap();
    assert_eq!(
        (names(&data), names(&data.join("set"))),
        (vec!["set".into()], vec!["a".into(), "b".into()])
    );
}
