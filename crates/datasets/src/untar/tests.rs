//! Tests of archives from canned servers, by one process and by several.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::Urls;
use crate::loopback::{Server, answer, ok, options, status};

/// Returns an archive with one file below one folder.
fn archive(folder: &str, body: &[u8]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(body.len() as u64);
    header.set_mode(0o644);
    tar.append_data(&mut header, format!("{folder}/file"), body).unwrap();
    tar.into_inner().unwrap()
}

fn served(bytes: &[u8]) -> Vec<u8> {
    ok(bytes.len(), bytes)
}

fn untar(url: impl Into<String>, base: &Path) -> UntarData {
    UntarData::new(url).base(base).download(options(&[]))
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn an_archive_arrives_in_fastais_folders_and_is_not_fetched_twice() {
    let home = tempfile::tempdir().unwrap();
    let base = home.path().join(".fastai");
    let server =
        Server::new(vec![served(&archive("pets-v1", b"one")), served(&archive("pets-v2", b"two"))]);
    let url = format!("{}pets.tar.gz?version=3#top", server.url);
    let pets = untar(&url, &base);
    let path = pets.extract().unwrap();
    assert_eq!(path, base.join("data/pets"));
    assert_eq!(fs::read(path.join("file")).unwrap(), b"one");
    assert_eq!(
        (names_in(&base), names_in(&base.join("data"))),
        (vec!["archive".into(), "data".into()], vec!["pets".into()])
    );
    assert_eq!(names_in(&base.join("archive")), ["pets.tar.gz"]);
    // First from the folder, and when that is deleted, from the archive: one answer is left.
    assert_eq!(pets.extract().unwrap(), path);
    fs::remove_dir_all(&path).unwrap();
    assert_eq!(pets.extract().unwrap(), path);
    assert_eq!(fs::read(path.join("file")).unwrap(), b"one");

    assert_eq!(pets.force_download(true).extract().unwrap(), path);
    assert_eq!(fs::read(path.join("file")).unwrap(), b"two");
    assert_eq!(names_in(&base.join("data")), ["pets"]);
    let requests = server.requests();
    assert!(requests[0].starts_with("GET /data/pets.tar.gz?version=3 "), "{requests:?}");
}

#[test]
fn other_folders_can_be_named() {
    let home = tempfile::tempdir().unwrap();
    let bytes = archive("a", b"");
    let server = Server::new(vec![served(&bytes), served(&bytes)]);
    let path = untar(format!("{}a.tar", server.url), home.path())
        .data_folder(home.path().join("sets"))
        .archive_folder(home.path().join("packed"))
        .extract()
        .unwrap();
    assert_eq!(path, home.path().join("sets/a"));
    assert_eq!(names_in(home.path()), ["packed", "sets"]);
    let path = untar(format!("{}b.tar", server.url), home.path()).model(true).extract().unwrap();
    assert_eq!(path, home.path().join("models/b"));
    server.requests();
    // fastai's models are unpacked into their own folder; if it exists, no network is needed.
    let model = home.path().join("models/wt103-fwd");
    fs::create_dir(&model).unwrap();
    assert_eq!(untar(Urls::WT103_FWD, home.path()).extract().unwrap(), model);
}

#[test]
fn fastais_checksums_are_compared() {
    let home = tempfile::tempdir().unwrap();
    // The row of the table has 342,207 bytes, of which the first MiB has the md5 56143e8f….
    let size = Server::new(vec![served(b"short"), served(b"short")]);
    let sum = Server::new(vec![served(&[0; 342_207]), served(&[0; 342_207])]);
    let mirrors = options(&[&size.url, &sum.url]);
    let error =
        untar(Urls::MNIST_TINY, home.path()).download(mirrors).extract().unwrap_err().to_string();
    for part in [
        &*format!(
            "{}mnist_tiny.tgz: expected a file of 342207 bytes, the server has one of 5 bytes",
            size.url
        ),
        &*format!("{}mnist_tiny.tgz: checksum mismatch for ", sum.url),
        "expected 342207 bytes, of which the first MiB has md5 56143e8f24db90d925d82a5a74141875",
        // Computed with md5sum.
        "found 342207 bytes, of which the first MiB has md5 ",
        "(downloaded twice)",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!((size.requests().len(), sum.requests().len()), (2, 2));
    assert_eq!(names_in(home.path()), ["archive"]);
    assert_eq!(names_in(&home.path().join("archive")), [""; 0]);
}

#[test]
fn a_users_own_checksum_is_compared() {
    let home = tempfile::tempdir().unwrap();
    let bytes = archive("a", b"");
    let mut damaged = bytes.clone();
    damaged[0] ^= 1;
    let sha256: String = {
        use sha2::Digest;
        sha2::Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02X}")).collect()
    };
    // An archive that was damaged in transit is downloaded once more.
    let server = Server::new(vec![served(&damaged), served(&bytes)]);
    let url = format!("{}a.tar", server.url);
    untar(&url, home.path()).sha256(&sha256).extract().unwrap();
    assert_eq!(server.requests().len(), 2);

    let server = Server::new(vec![served(&damaged), served(&damaged)]);
    let url = format!("{}b.tar", server.url);
    let error = untar(&url, home.path()).sha256(&sha256).extract().unwrap_err().to_string();
    assert!(error.contains(&url) && error.contains(&sha256), "{error}");
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn an_archive_of_an_earlier_call_that_is_damaged_comes_again() {
    let home = tempfile::tempdir().unwrap();
    let archives = home.path().join("archive");
    fs::create_dir(&archives).unwrap();
    let bytes = archive("a", b"good");
    for (name, damaged) in [("a.tar", &bytes[..600]), ("b.tar", b"<html>")] {
        fs::write(archives.join(name), damaged).unwrap();
        let server = Server::new(vec![served(&bytes)]);
        let path = untar(format!("{}{name}", server.url), home.path()).extract().unwrap();
        assert_eq!(fs::read(path.join("file")).unwrap(), b"good");
        assert_eq!(server.requests().len(), 1);
    }
    // An archive that the server has in this state is not requested again.
    let server = Server::new(vec![served(b"<html>")]);
    let error = untar(format!("{}c.tgz", server.url), home.path()).extract().unwrap_err();
    assert!(matches!(error, DatasetError::NotAnArchive { .. }), "{error}");
    assert_eq!(server.requests().len(), 1);
    assert_eq!(names_in(&home.path().join("data")), ["a", "b"]);
}

#[test]
fn limits_are_passed_on() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::new(vec![served(&archive("a", &[0; 100]))]);
    let url = format!("{}a.tar", server.url);
    let error = untar(&url, home.path()).max_bytes(99).extract().unwrap_err();
    assert!(error.to_string().contains("allow more by `max_bytes`"), "{error}");
    let error = untar(&url, home.path()).max_files(1).extract().unwrap_err();
    assert!(error.to_string().contains("allow more by `max_files`"), "{error}");
    untar(&url, home.path()).max_bytes(100).max_files(2).extract().unwrap();
    server.requests();
}

#[test]
fn addresses_without_a_name_are_refused() {
    for (url, name, stem) in [
        (Urls::IMAGEWOOF_320, "imagewoof2-320.tgz", "imagewoof2-320"),
        (Urls::ML_100K, "ml-100k.zip", "ml-100k"),
        ("http://host/a.b/c-1.2.tar.gz?x=/y.zip", "c-1.2.tar.gz", "c-1.2"),
        ("http://host/plain", "plain", "plain"),
    ] {
        assert_eq!(names(url).unwrap(), (name, stem));
    }
    for url in [
        "",
        "a.tgz",
        "/data/a.tgz",
        "http://host",
        "http://host/",
        "http://host/..",
        "http://host/.tgz",
        "http://host/..tgz",
        "http://host/?a.tgz",
        "http://host/a/",
        "http://host/a\0.tgz",
    ] {
        let error = untar(url, Path::new("/none")).extract().unwrap_err();
        assert!(matches!(error, DatasetError::InvalidUrl { .. }), "{url:?}: {error}");
    }
    let error = names("a.tgz").unwrap_err().to_string();
    assert_eq!(
        error,
        "cannot download \"a.tgz\": it is not an address that begins with https:// or http://"
    );
}

#[cfg(not(feature = "https"))]
#[test]
fn without_tls_the_error_names_the_feature() {
    let home = tempfile::tempdir().unwrap();
    let error = untar(Urls::MNIST_TINY, home.path()).extract().unwrap_err().to_string();
    assert!(error.contains("without the feature `https`"), "{error}");
}

/// Variable that makes this test's program run as the second process, with the arguments of that process.
const CHILD: &str = "BRIGADE_TEST_UNTAR";

fn child(test: &str, url: &str, base: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("untar::tests::{test}")])
        .env(CHILD, format!("{url} {}", base.display()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// In the second process, unpacks the archive and returns `true`.
fn is_child() -> bool {
    let Ok(arguments) = std::env::var(CHILD) else { return false };
    let (url, base) = arguments.split_once(' ').unwrap();
    let path = untar(url, Path::new(base)).extract().unwrap();
    assert_eq!(fs::read(path.join("file")).unwrap(), b"shared");
    true
}

#[test]
fn several_processes_at_once_download_and_unpack_once() {
    if is_child() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    // One answer: another request would be refused.
    let server = Server::new(vec![served(&archive("a", b"shared"))]);
    let url = format!("{}a.tar", server.url);
    let test = "several_processes_at_once_download_and_unpack_once";
    let children: Vec<Child> = (0..4).map(|_| child(test, &url, home.path())).collect();
    for child in children {
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    }
    assert_eq!(server.requests().len(), 1);
    assert_eq!(names_in(&home.path().join("data")), ["a"]);
    assert_eq!(names_in(&home.path().join("archive")), ["a.tar"]);
}

#[test]
fn a_killed_process_is_taken_over_from() {
    if is_child() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let bytes = archive("a", b"shared");
    let headers = format!("content-length: {}\r\netag: \"a-1\"\r\n", bytes.len());
    // A server that stops in the middle of its answer until the client has closed the connection.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let first = answer("200 OK", &headers, &bytes[..700]);
    let rest = answer(
        "206 Partial Content",
        &format!(
            "content-length: {}\r\ncontent-range: bytes 700-{}/{}\r\n",
            bytes.len() - 700,
            bytes.len() - 1,
            bytes.len()
        ),
        &bytes[700..],
    );
    let server = thread::spawn(move || {
        use std::io::{BufRead, BufReader, Read, Write};
        let mut heads = Vec::new();
        for answer in [first, rest] {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let lines = reader.by_ref().lines().map(|line| line.unwrap());
            heads.push(lines.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join("\n"));
            stream.write_all(&answer).unwrap();
            let _ = reader.read(&mut [0]);
        }
        heads
    });
    let url = format!("http://{address}/a.tar");
    let mut killed = child("a_killed_process_is_taken_over_from", &url, home.path());
    let part = home.path().join("archive/.a.tar.part");
    let begun = Instant::now();
    while !fs::metadata(&part).is_ok_and(|found| found.len() == 700) {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing arrives");
        assert!(killed.try_wait().unwrap().is_none(), "the process has ended");
        thread::sleep(Duration::from_millis(5));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    let path = untar(&url, home.path()).extract().unwrap();
    assert_eq!(fs::read(path.join("file")).unwrap(), b"shared");
    let heads = server.join().unwrap();
    assert!(heads[1].to_lowercase().contains("\nrange: bytes=700-"), "{heads:?}");
    assert_eq!(names_in(&home.path().join("archive")), ["a.tar"]);
}

#[test]
fn a_missing_archive_is_said_to_be_missing() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::new(vec![status("404 Not Found")]);
    let error =
        untar(format!("{}a.tgz", server.url), home.path()).extract().unwrap_err().to_string();
    assert!(error.contains("/data/a.tgz: the server answered 404 Not Found"), "{error}");
    server.requests();
    assert_eq!(names_in(home.path()), ["archive"]);
}
