//! Tests of downloads from canned servers.

use std::fs;
use std::path::PathBuf;

use super::*;
use crate::loopback::{
    Server, answer, has_small_files, ok, options, passes_with_small_files, status,
};

const BODY: &[u8] = b"four and twenty blackbirds";
const SHA256: &str = "590a5f6ba472edb53193656a2b731bfb71ebafddd561c9117294b4da0eb4c620";
/// A file with a validator, by which the server can identify it again.
const TAGGED: &str = "content-length: 26\r\netag: \"pie-1\"\r\naccept-ranges: bytes\r\n";

fn file() -> RemoteFile<'static> {
    RemoteFile::new("pie.gz", BODY.len() as u64, SHA256)
}

/// The same file without a published checksum, like that of a user's own address.
fn unknown() -> RemoteFile<'static> {
    RemoteFile { name: "pie.gz", bytes: None, sha256: None, md5_of_start: None }
}

/// Returns an answer with the rest of the file from `first` on, up to `last`.
fn rest(first: usize, last: usize, headers: &str) -> Vec<u8> {
    let headers = format!(
        "content-length: {}\r\ncontent-range: bytes {first}-25/26\r\n{headers}",
        BODY.len() - first
    );
    answer("206 Partial Content", &headers, &BODY[first..last])
}

/// Runs one download against a server with these answers, and returns the content of the folder afterwards.
fn run(answers: Vec<Vec<u8>>) -> (Result<(), String>, Vec<String>, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::new(answers);
    let result = options(&[&server.url])
        .fetch_all(&[file()], &["http://unused.invalid/"], folder.path())
        .map_err(|error| error.to_string());
    let names = names(folder.path());
    if result.is_ok() {
        assert_eq!(fs::read(folder.path().join(file().name)).unwrap(), BODY);
    }
    (result, names, server.requests())
}

/// Downloads `file` into `folder` with a single attempt.
fn fetch(folder: &Path, url: &str, file: &RemoteFile<'_>) -> Result<Fetched, String> {
    let once = Download { attempts: 1, ..options(&[]) };
    let fetched = once.fetch(file, &[joined(url, file.name)], folder, false);
    fetched.map_err(|error| error.to_string())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// Creates a folder with the first nine bytes, as a killed process leaves them.
fn begun(url: &str, validator: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(".pie.gz.part"), &BODY[..9]).unwrap();
    let source = format!("{}\n{validator}\n26\n", joined(url, "pie.gz"));
    fs::write(folder.path().join(".pie.gz.part.source"), source).unwrap();
    let target = folder.path().join("pie.gz");
    (folder, target)
}

#[test]
fn a_good_file_arrives_and_is_not_fetched_twice() {
    let folder = tempfile::tempdir().unwrap();
    let deep = folder.path().join("MNIST/raw");
    let server = Server::new(vec![ok(BODY.len(), BODY)]);
    let options = options(&[&server.url]);
    options.fetch_all(&[file()], &[], &deep).unwrap();
    let requests = server.requests();
    assert!(requests[0].starts_with("GET /data/pie.gz HTTP/1.1"), "{requests:?}");
    assert!(!requests[0].to_lowercase().contains("range"), "{requests:?}");
    assert_eq!(fs::read(deep.join("pie.gz")).unwrap(), BODY);
    assert_eq!(names(&deep), ["pie.gz"]);
    // The server has ended: this would fail if it sent a request.
    options.fetch_all(&[file()], &[], &deep).unwrap();
}

#[test]
fn a_file_of_the_right_size_with_other_bytes_is_fetched_again() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("pie.gz");
    let mut wrong = BODY.to_vec();
    wrong[3] ^= 1;
    fs::write(&target, &wrong).unwrap();
    let offline = options(&["http://127.0.0.1:1"]);
    let error = offline.fetch_all(&[file()], &[], folder.path()).unwrap_err().to_string();
    for part in [
        "pie.gz has 26 bytes with sha256 ",
        ", the published file 26 bytes with sha256 590a5f6b",
        "refused",
    ] {
        assert!(error.contains(part), "{error}");
    }
    let server = Server::new(vec![ok(BODY.len(), BODY)]);
    options(&[&server.url]).fetch_all(&[file()], &[], folder.path()).unwrap();
    assert_eq!((fs::read(&target).unwrap(), server.requests().len()), (BODY.to_vec(), 1));
}

#[test]
fn temporary_failures_are_retried() {
    let busy = status("503 Service Unavailable");
    let (result, names, asked) = run(vec![busy, ok(BODY.len(), &BODY[..9]), ok(BODY.len(), BODY)]);
    assert_eq!(result, Ok(()));
    assert_eq!((names.len(), asked.len()), (1, 3));
}

#[test]
fn a_connection_that_breaks_off_goes_on_where_it_ended() {
    let table = [TAGGED, "content-length: 26\r\nlast-modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n"];
    for (headers, validator) in
        table.into_iter().zip(["\"pie-1\"", "Wed, 21 Oct 2015 07:28:00 GMT"])
    {
        let first = answer("200 OK", headers, &BODY[..9]);
        // One more attempt than allowed in a row, but each extends the file.
        let (result, names, asked) =
            run(vec![first, rest(9, 10, ""), rest(10, 11, ""), rest(11, 26, "")]);
        assert_eq!((result, names), (Ok(()), vec!["pie.gz".to_owned()]));
        for (request, from) in asked[1..].iter().zip([9, 10, 11]) {
            let request = request.to_lowercase();
            assert!(request.contains(&format!("\nrange: bytes={from}-")), "{request}");
            let condition = format!("\nif-range: {}", validator.to_lowercase());
            assert!(request.contains(&condition), "{request}");
        }
    }
}

#[test]
fn a_killed_process_is_taken_over_from() {
    let server = Server::new(vec![rest(9, 26, "etag: \"pie-1\"\r\n")]);
    let (folder, target) = begun(&server.url, "\"pie-1\"");
    assert_eq!(fetch(folder.path(), &server.url, &unknown()), Ok(Fetched::Before));
    assert_eq!(fs::read(target).unwrap(), BODY);
    assert_eq!(names(folder.path()), ["pie.gz"]);
    assert!(server.requests()[0].to_lowercase().contains("\nif-range: \"pie-1\""));

    // Killed between the last byte and the rename: no request is needed.
    let (folder, target) = begun("http://127.0.0.1:1", "\"pie-1\"");
    fs::write(folder.path().join(".pie.gz.part"), BODY).unwrap();
    assert_eq!(fetch(folder.path(), "http://127.0.0.1:1", &unknown()), Ok(Fetched::Before));
    assert_eq!(fs::read(target).unwrap(), BODY);
}

#[test]
fn what_does_not_fit_comes_again_from_the_beginning() {
    let whole = || ok(26, BODY);
    let changed = "content-length: 17\r\ncontent-range: bytes 9-25/26\r\netag: \"pie-2\"\r\n";
    let grown = "content-length: 18\r\ncontent-range: bytes 9-26/27\r\n";
    let elsewhere = "content-length: 26\r\ncontent-range: bytes 0-25/26\r\n";
    let several = "content-length: 26\r\ncontent-type: multipart/byteranges; boundary=a\r\n";
    let partial = |headers| answer("206 Partial Content", headers, BODY);
    let table = [
        ("a server without ranges, or a changed file under If-Range", vec![whole()]),
        (
            "a range that the server does not have",
            vec![status("416 Range Not Satisfiable"), whole()],
        ),
        ("another etag", vec![partial(changed), whole()]),
        ("another size", vec![partial(grown), whole()]),
        ("another range", vec![partial(elsewhere), whole()]),
        ("several ranges", vec![partial(several), whole()]),
    ];
    for (name, answers) in table {
        let count = answers.len();
        let server = Server::new(answers);
        let (folder, target) = begun(&server.url, "\"pie-1\"");
        assert_eq!(fetch(folder.path(), &server.url, &unknown()), Ok(Fetched::Now), "{name}");
        assert_eq!(fs::read(target).unwrap(), BODY, "{name}");
        let requests = server.requests();
        assert_eq!(requests.len(), count, "{name}");
        assert!(requests[0].contains("bytes=9-"), "{name}: {requests:?}");
        assert!(count == 1 || !requests[1].contains("bytes="), "{name}: {requests:?}");
    }
    // These answers are only possible for a request with a range.
    for line in ["416 Range Not Satisfiable", "206 Partial Content"] {
        let (result, _, asked) = run(vec![status(line)]);
        assert!(result.unwrap_err().contains(line));
        assert_eq!(asked.len(), 1);
    }
}

#[test]
fn a_part_without_a_proof_of_its_source_is_not_gone_on_with() {
    let cases: [(&str, RemoteFile<'_>, bool); 4] = [
        ("", unknown(), false),
        ("", file(), true),
        ("elsewhere", unknown(), false),
        ("elsewhere", file(), true),
    ];
    for (what, file, resumes) in cases {
        let server = Server::new(vec![if resumes { rest(9, 26, "") } else { ok(26, BODY) }]);
        let (url, validator) = match what {
            "elsewhere" => ("http://other.invalid/", "\"pie-1\""),
            _ => (&*server.url, ""),
        };
        let (folder, target) = begun(url, validator);
        fetch(folder.path(), &server.url, &file).unwrap();
        assert_eq!(fs::read(target).unwrap(), BODY);
        let requests = server.requests();
        assert_eq!(requests[0].contains("bytes=9-"), resumes, "{requests:?}");
        assert!(!requests[0].to_lowercase().contains("if-range"), "{requests:?}");
    }
}

#[test]
fn a_part_of_another_file_is_found_by_the_checksum() {
    let server = Server::new(vec![rest(9, 26, ""), ok(26, BODY)]);
    let (folder, target) = begun(&server.url, "\"pie-1\"");
    fs::write(folder.path().join(".pie.gz.part"), b"five and ").unwrap();
    assert_eq!(fetch(folder.path(), &server.url, &file()), Ok(Fetched::Now));
    assert_eq!((fs::read(target).unwrap(), server.requests().len()), (BODY.to_vec(), 2));
}

#[test]
fn a_failed_download_says_why_and_leaves_what_can_be_gone_on_with() {
    let mut wrong = BODY.to_vec();
    wrong[3] ^= 1;
    let part: &[&str] = &[".pie.gz.part", ".pie.gz.part.source"];
    let chunked = |body: &[u8]| {
        let body = [format!("{:x}\r\n", body.len()).as_bytes(), body, b"\r\n0\r\n\r\n"].concat();
        answer("200 OK", "transfer-encoding: chunked\r\n", &body)
    };
    type Row<'a> = (&'static str, Vec<Vec<u8>>, Vec<&'static str>, &'a [&'a str]);
    let table: Vec<Row<'_>> = vec![
        ("missing", vec![status("404 Not Found")], vec!["the server answered 404 Not Found"], &[]),
        (
            "another size",
            vec![ok(9, &BODY[..9]); 2],
            vec!["expected a file of 26 bytes, the server has one of 9 bytes (downloaded twice)"],
            &[],
        ),
        (
            "cut short without a size",
            vec![chunked(&BODY[..9]); 3],
            vec!["the file ended after 9 of 26 bytes (tried 3 times)"],
            part,
        ),
        (
            "dropped in the middle",
            vec![ok(26, &BODY[..9]); 3],
            vec!["after 9 of 26 bytes", "(tried 3 times)"],
            part,
        ),
        ("dropped at once", vec![vec![]; 3], vec!["pie.gz: ", "(tried 3 times)"], &[]),
        ("not HTTP", vec![b"220 smtp ready\r\n\r\n".to_vec(); 3], vec!["(tried 3 times)"], &[]),
        (
            "other bytes",
            vec![ok(26, &wrong); 2],
            vec![
                "checksum mismatch for ",
                "/pie.gz: expected 26 bytes with sha256 590a5f6b",
                "found 26 bytes with sha256 ",
                "(downloaded twice)",
            ],
            &[],
        ),
        (
            "too many bytes",
            vec![chunked(&[BODY, b"!"].concat()); 2],
            vec!["checksum mismatch", "expected 26 bytes, found 27 bytes"],
            &[],
        ),
    ];
    for (name, answers, expected, left) in table {
        let count = answers.len();
        let (result, names, asked) = run(answers);
        let error = result.expect_err(name);
        assert!(error.starts_with("cannot download pie.gz: http://127.0.0.1:"), "{error}");
        for part in expected {
            assert!(error.contains(part), "{name}: {error}");
        }
        assert_eq!(
            (names, asked.len()),
            (left.iter().map(|it| (*it).to_owned()).collect(), count),
            "{name}"
        );
    }
}

#[test]
fn the_checksum_error_shows_both_sums() {
    let (result, ..) = run(vec![ok(26, &[b'x'; 26]); 2]);
    let error = result.unwrap_err();
    // Computed with sha256sum.
    let found = "18d2a9c4fd84ab056bc0b93ce3e7c3809d3e66d3f089e066c2c0c4e29edfeca7";
    assert!(error.contains(SHA256) && error.contains(found), "{error}");
}

#[test]
fn the_next_mirror_is_asked_and_every_failure_is_told() {
    let folder = tempfile::tempdir().unwrap();
    // Nothing listens on port 1, and only root could.
    let closed = "http://127.0.0.1:1";
    let (missing, good) =
        (Server::new(vec![status("404 Not Found")]), Server::new(vec![ok(BODY.len(), BODY)]));
    options(&[closed, &missing.url, &good.url]).fetch_all(&[file()], &[], folder.path()).unwrap();
    assert_eq!((missing.requests().len(), good.requests().len()), (1, 1));

    let missing = Server::new(vec![status("404 Not Found")]);
    let empty = tempfile::tempdir().unwrap();
    let error = options(&[closed, &missing.url])
        .fetch_all(&[file()], &[], empty.path())
        .unwrap_err()
        .to_string();
    assert!(error.contains(closed) && error.contains(&missing.url), "{error}");
    assert!(error.contains("refused") && error.contains("404"), "{error}");
    missing.requests();
}

#[test]
fn two_at_once_download_one_file() {
    let folder = tempfile::tempdir().unwrap();
    // One answer: a second request would be refused.
    let server = Server::new(vec![ok(26, BODY)]);
    thread::scope(|scope| {
        let work = || fetch(folder.path(), &server.url, &unknown());
        let both = [scope.spawn(work), scope.spawn(work)].map(|it| it.join().unwrap().unwrap());
        assert!(both.contains(&Fetched::Now) && both.contains(&Fetched::Before), "{both:?}");
    });
    assert_eq!(names(folder.path()), ["pie.gz"]);
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let blocked = folder.path().join("file");
    fs::write(&blocked, b"in the way").unwrap();
    let error = options(&["http://127.0.0.1:1/"])
        .fetch_all(&[file()], &[], &blocked.join("raw"))
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("cannot write ") && error.contains("file/raw"), "{error}");
}

#[test]
fn a_full_disk_ends_the_download_with_the_path() {
    if !has_small_files() {
        return passes_with_small_files(
            "download::tests::a_full_disk_ends_the_download_with_the_path",
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let server = Server::new(vec![ok(64 << 10, &[7; 64 << 10])]);
    let error = fetch(folder.path(), &server.url, &unknown()).unwrap_err();
    let path = folder.path().join("pie.gz");
    assert!(error.starts_with(&format!("cannot write {}: ", path.display())), "{error}");
    assert!(error.ends_with("; 65536 bytes are needed there"), "{error}");
    // The received bytes are kept for the next call.
    assert_eq!(names(folder.path()), [".pie.gz.part", ".pie.gz.part.source"]);
    server.requests();
}
