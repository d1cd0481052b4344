//! Downloads into the cache of Hugging Face's tools, in its layout: `blobs/ETAG`, `snapshots/COMMIT/NAME` as
//! a link to it, and `refs/REVISION`, which holds the commit.

use std::env;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use brigade_checkpoint::hub_cache;
use brigade_rank_env::text::counted;
use brigade_torch::{Error, ErrorKind};
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::{Agent, Body};

use super::{WEIGHTS, cached};

/// Client of the Hugging Face hub: downloads files of models, each once, into the cache of Hugging Face's own tools.
///
/// A file is renamed to its name when it is complete and its SHA-256 equals that of the hub. If the hub cannot be
/// reached, the file of the last download is used. Several processes may download at the same time; let one process of
/// each host go first, for example by `Processes::local_main_process_first`.
///
/// ```no_run
/// use brigade_models::{Hub, Pretrained, ResNet};
/// use brigade_nn::Model;
///
/// let mut model = Model::new(|path| ResNet::resnet50d(path, 37))?;
/// let weights = Hub::from_env()?.weights("timm/resnet50d.ra2_in1k")?;
/// Pretrained::new().load(&mut model, weights)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Hub {
    endpoint: String,
    token: Option<String>,
    cache: PathBuf,
    revision: String,
    offline: bool,
}

/// Error of a download from the hub.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The hub has no such model, or the user has no access to it.
    #[error(
        "the hub has no model {repository}, or this user has no access to it; check the name, and for a \
         private model set HF_TOKEN"
    )]
    NoRepository {
        /// Name of the model's repository.
        repository: String,
    },
    /// The model is restricted to users who have accepted its terms.
    #[error(
        "the model {repository} is gated: accept its terms on its page, and set HF_TOKEN to a token of \
         that user"
    )]
    Gated {
        /// Name of the model's repository.
        repository: String,
    },
    /// The model has no such file or revision.
    #[error("the model {repository} has no file {file} at the revision {revision}")]
    NoFile {
        /// Name of the model's repository.
        repository: String,
        /// Name of the missing file.
        file: String,
        /// Branch, tag or commit that was requested.
        revision: String,
    },
    /// The hub cannot be reached, or its response is not the requested file.
    #[error("cannot download {url}: {reason}")]
    Download {
        /// URL of the request.
        url: String,
        /// Description of the failure.
        reason: String,
    },
    /// The file is not in the cache, and `HF_HUB_OFFLINE` forbids requests to the hub.
    #[error(
        "{file} of {repository} is not in {}, and HF_HUB_OFFLINE is set; unset it to download the file",
        cache.display()
    )]
    Offline {
        /// Name of the model's repository.
        repository: String,
        /// Name of the missing file.
        file: String,
        /// Path of the cache folder.
        cache: PathBuf,
    },
    /// The cache cannot be written.
    #[error("cannot write {}: {cause}", path.display())]
    Write {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
    /// A name, an environment variable or a revision is invalid.
    #[error("{0}")]
    InvalidArgument(String),
}

impl From<HubError> for Error {
    fn from(error: HubError) -> Self {
        let kind = match error {
            HubError::InvalidArgument(_) => ErrorKind::InvalidArgument,
            HubError::NoRepository { .. }
            | HubError::Gated { .. }
            | HubError::NoFile { .. }
            | HubError::Download { .. }
            | HubError::Offline { .. }
            | HubError::Write { .. } => ErrorKind::Io,
        };
        Self::new(kind, error)
    }
}

type Result<T> = std::result::Result<T, HubError>;

/// Metadata of a file from the hub's response, before its content is read.
#[derive(Debug)]
struct Head {
    commit: String,
    etag: String,
    bytes: Option<u64>,
}

impl Hub {
    /// Creates a client from the environment variables of Hugging Face's tools: `HF_ENDPOINT`, `HF_TOKEN`,
    /// `HF_HUB_OFFLINE`, and `HF_HUB_CACHE` or `HF_HOME` for the cache.
    ///
    /// # Errors
    /// Fails if there is no folder for the cache.
    pub fn from_env() -> Result<Self> {
        let variable = |name| env::var(name).ok().filter(|value| !value.is_empty());
        let cache = hub_cache::folder().ok_or_else(|| {
            HubError::InvalidArgument(
                "there is no home folder for the hub's cache: set HOME or HF_HOME".into(),
            )
        })?;
        let stored = || {
            let home = cache.parent()?;
            Some(fs::read_to_string(home.join("token")).ok()?.trim().to_owned())
        };
        let is_set = |value: String| !matches!(value.to_lowercase().as_str(), "0" | "false" | "no");
        Ok(Self {
            endpoint: variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()),
            token: variable("HF_TOKEN").or_else(stored).filter(|token| !token.is_empty()),
            revision: "main".into(),
            offline: variable("HF_HUB_OFFLINE").is_some_and(is_set),
            cache,
        })
    }

    /// Sets the address of the hub, or of a mirror. Defaults to the value of `HF_ENDPOINT`, else
    /// `https://huggingface.co`.
    #[must_use]
    pub fn endpoint(mut self, url: impl Into<String>) -> Self {
        self.endpoint = url.into();
        self
    }

    /// Sets the folder of the cache. Defaults to the folder that `HF_HUB_CACHE` or `HF_HOME` sets, else that of Hugging
    /// Face's tools.
    #[must_use]
    pub fn cache(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache = folder.into();
        self
    }

    /// Sets the branch, tag or commit. Defaults to `main`. With a commit the weights never change.
    #[must_use]
    pub fn revision(mut self, revision: impl Into<String>) -> Self {
        self.revision = revision.into();
        self
    }

    /// Sets the user's access token, which is sent only to the hub. Defaults to the value of `HF_TOKEN`, else the token
    /// that Hugging Face's tools have stored.
    #[must_use]
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Returns the path of a model's weights, `model.safetensors` or `pytorch_model.bin`, and downloads them if they
    /// are not in the cache.
    ///
    /// # Errors
    /// Returns the same errors as [`file`](Self::file).
    pub fn weights(&self, repository: &str) -> Result<PathBuf> {
        let [first, second] = WEIGHTS;
        match self.file(repository, first) {
            Err(HubError::NoFile { .. }) => self.file(repository, second),
            found => found,
        }
    }

    /// Returns the path of a file of a model, and downloads it if it is not in the cache.
    ///
    /// # Errors
    /// Fails if the hub does not have the file or cannot be reached, the response has another checksum, or the cache
    /// cannot be written.
    pub fn file(&self, repository: &str, file: &str) -> Result<PathBuf> {
        check_path("the name of a model", repository)?;
        check_path("the name of a file", file)?;
        check_path("the revision", &self.revision)?;
        let folder = hub_cache::repository(&self.cache, repository);
        let known = cached(&folder, &self.revision, file);
        // The content of a commit does not change.
        let is_commit = self.revision.len() == 40 && self.revision.bytes().all(is_hexadecimal);
        match known {
            Some(path) if is_commit || self.offline => return Ok(path),
            None if self.offline => {
                let (repository, cache) = (repository.to_owned(), self.cache.clone());
                return Err(HubError::Offline { repository, file: file.to_owned(), cache });
            }
            _ => {}
        }
        let found = self
            .ask(repository, file)
            .and_then(|head| self.fetch(&folder, repository, file, &head));
        match (found, known) {
            (Err(HubError::Download { url, reason }), Some(path)) => {
                tracing::warn!(url, reason, path = %path.display(), "the hub does not answer; its file of the last download is used");
                Ok(path)
            }
            (found, _) => found,
        }
    }

    fn url(&self, repository: &str, file: &str) -> String {
        let endpoint = self.endpoint.trim_end_matches('/');
        format!("{endpoint}/{repository}/resolve/{}/{file}", self.revision)
    }

    /// Requests a file's commit, etag and size.
    fn ask(&self, repository: &str, file: &str) -> Result<Head> {
        let url = self.url(repository, file);
        // Only the hub's own response has these headers, not that of the storage to which it redirects.
        let request = agent(0).head(&url).header("Accept-Encoding", "identity");
        let answer = self.authorized(request).call();
        let answer = answer.map_err(|error| failed(&url, &error))?;
        self.accept(&answer, repository, file, &url)?;
        let headers = answer.headers();
        let missing = |name: &str| failed(&url, &format!("its answer has no {name}"));
        let etag = text(headers, "x-linked-etag").or_else(|| text(headers, "etag"));
        let etag = etag.map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned());
        // Both become file names.
        let plain = |name: &String| {
            !name.is_empty()
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        };
        let size = text(headers, "x-linked-size").or_else(|| text(headers, "content-length"));
        Ok(Head {
            commit: text(headers, "x-repo-commit")
                .filter(plain)
                .ok_or_else(|| missing("commit"))?,
            etag: etag.filter(plain).ok_or_else(|| missing("etag"))?,
            bytes: size.and_then(|size| size.parse().ok()),
        })
    }

    /// Downloads the file into the cache, unless its content is there under another commit.
    fn fetch(&self, folder: &Path, repository: &str, file: &str, head: &Head) -> Result<PathBuf> {
        let blob = folder.join("blobs").join(&head.etag);
        let pointer = folder.join("snapshots").join(&head.commit).join(file);
        if !blob.is_file() {
            self.download(repository, file, head, &blob)?;
        }
        if !pointer.is_file() {
            let depth = 2 + file.matches('/').count();
            let target = PathBuf::from("../".repeat(depth)).join("blobs").join(&head.etag);
            make_folder(&pointer)?;
            // Another process may have created the link first; a broken link is replaced.
            let linked = symlink(&target, &pointer).or_else(|error| {
                if pointer.is_file() {
                    return Ok(());
                }
                fs::remove_file(&pointer).map_err(|_| error)?;
                symlink(&target, &pointer)
            });
            linked.map_err(|cause| HubError::Write { path: pointer.clone(), cause })?;
        }
        if self.revision != head.commit {
            let reference = folder.join("refs").join(&self.revision);
            write_whole(&reference, |part| part.write_all(head.commit.as_bytes()))?;
        }
        Ok(pointer)
    }

    fn download(&self, repository: &str, file: &str, head: &Head, blob: &Path) -> Result<()> {
        let url = self.url(repository, file);
        tracing::info!(url, bytes = head.bytes, "downloading");
        let request = agent(10).get(&url).header("Accept-Encoding", "identity");
        let mut answer = self.authorized(request).call().map_err(|error| failed(&url, &error))?;
        self.accept(&answer, repository, file, &url)?;
        let mut from = answer.body_mut().as_reader();
        let mut broken = None;
        write_whole(blob, |part| match copy(&mut from, part, head) {
            Ok(()) => Ok(()),
            Err(Copied::Write(error)) => Err(error),
            Err(Copied::Read(reason)) => {
                broken = Some(reason);
                Err(io::ErrorKind::InvalidData.into())
            }
        })
        .map_err(|error| match broken {
            Some(reason) => failed(&url, &reason),
            None => error,
        })
    }

    fn authorized<B>(&self, request: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match &self.token {
            Some(token) => request.header("Authorization", format!("Bearer {token}")),
            None => request,
        }
    }

    /// Converts an unsuccessful response to an error with the likely cause.
    fn accept(
        &self,
        answer: &Response<Body>,
        repository: &str,
        file: &str,
        url: &str,
    ) -> Result<()> {
        let status = answer.status();
        if status.is_success() || status.is_redirection() {
            return Ok(());
        }
        let (repository, file) = (repository.to_owned(), file.to_owned());
        let code = text(answer.headers(), "x-error-code").unwrap_or_default();
        Err(match (status, code.as_str()) {
            (_, "GatedRepo") => HubError::Gated { repository },
            (_, "EntryNotFound" | "RevisionNotFound") => {
                HubError::NoFile { repository, file, revision: self.revision.clone() }
            }
            // The hub does not reveal whether a model is private or does not exist.
            (StatusCode::UNAUTHORIZED | StatusCode::NOT_FOUND, _) => {
                HubError::NoRepository { repository }
            }
            (StatusCode::FORBIDDEN, _) => HubError::Gated { repository },
            _ => failed(url, &format!("the server answered {status}")),
        })
    }
}

/// Creates an HTTP agent that follows at most `redirections` redirections, and sends the user's token to none of them.
fn agent(redirections: u32) -> Agent {
    let limit = Some(Duration::from_secs(30));
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(redirections)
        .max_redirects_will_error(false)
        .timeout_connect(limit)
        .timeout_recv_response(limit)
        .timeout_per_read(limit)
        .user_agent(concat!("brigade/", env!("CARGO_PKG_VERSION")));
    config.build().new_agent()
}

fn failed(url: &str, reason: &dyn ToString) -> HubError {
    HubError::Download { url: url.to_owned(), reason: reason.to_string() }
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.trim().to_owned())
}

/// The side of a copy that failed: reading or writing.
enum Copied {
    Read(String),
    Write(io::Error),
}

/// Copies a body and checks its size and, if the etag is one, its SHA-256.
fn copy(from: &mut impl Read, to: &mut impl Write, head: &Head) -> std::result::Result<(), Copied> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 64 << 10];
    let mut bytes = 0;
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                return Err(Copied::Read(format!(
                    "broke off after {}: {error}",
                    counted(bytes, "byte")
                )));
            }
        };
        let part = buffer.get(..count).unwrap_or_default();
        bytes += part.len() as u64;
        if let Some(expected) = head.bytes.filter(|expected| bytes > *expected) {
            return Err(Copied::Read(format!(
                "it has more than the {} announced by the hub",
                counted(expected, "byte")
            )));
        }
        hash.update(part);
        to.write_all(part).map_err(Copied::Write)?;
    }
    if let Some(expected) = head.bytes.filter(|expected| bytes < *expected) {
        return Err(Copied::Read(format!(
            "it ended after {bytes} of {}",
            counted(expected, "byte")
        )));
    }
    // For a small file that is in the repository itself, the etag is Git's SHA-1.
    if head.etag.len() == 64 && head.etag.bytes().all(is_hexadecimal) {
        let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if !found.eq_ignore_ascii_case(&head.etag) {
            return Err(Copied::Read(format!(
                "its sha256 is {found}, the hub has {} for it",
                head.etag
            )));
        }
    }
    Ok(())
}

fn is_hexadecimal(byte: u8) -> bool {
    byte.is_ascii_hexdigit()
}

/// Writes a file under a temporary name and renames it when it is complete.
fn write_whole(
    path: &Path,
    write: impl FnOnce(&mut NamedTempFile) -> io::Result<()>,
) -> Result<()> {
    let failed = |cause| HubError::Write { path: path.into(), cause };
    let folder = make_folder(path)?;
    let mut part = tempfile::Builder::new();
    part.prefix(".").suffix(".incomplete");
    part.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut part = part.tempfile_in(folder).map_err(failed)?;
    write(&mut part).map_err(failed)?;
    part.as_file().sync_all().map_err(failed)?;
    part.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}

/// Creates the folder of a file.
fn make_folder(path: &Path) -> Result<&Path> {
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(folder).map_err(|cause| HubError::Write { path: folder.into(), cause })?;
    Ok(folder)
}

/// Refuses names that would lead out of the cache's folder, or change the URL.
fn check_path(what: &str, name: &str) -> Result<()> {
    let sound = |part: &str| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+".contains(&byte);
        !part.is_empty() && part != "." && part != ".." && part.bytes().all(known)
    };
    if name.split('/').all(sound) {
        return Ok(());
    }
    Err(HubError::InvalidArgument(format!(
        "{what} cannot be {name:?}: its parts have letters, digits, dots, dashes and underscores"
    )))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;
    use std::thread::{self, JoinHandle};

    use super::*;

    const BODY: &[u8] = b"four and twenty blackbirds";
    const SHA256: &str = "590a5f6ba472edb53193656a2b731bfb71ebafddd561c9117294b4da0eb4c620";
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    /// Starts a server that sends these responses in turn. Returns the received requests, without their bodies.
    fn serve(answers: Vec<String>) -> (String, JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = thread::spawn(move || {
            answers
                .into_iter()
                .map(|answer| {
                    let (mut stream, _) = listener.accept().unwrap();
                    let lines = BufReader::new(stream.try_clone().unwrap()).lines();
                    let head = lines.map(|line| line.unwrap()).take_while(|line| !line.is_empty());
                    let request = head.collect::<Vec<_>>().join("\n");
                    stream.write_all(answer.as_bytes()).unwrap();
                    request
                })
                .collect()
        });
        (url, server)
    }

    fn head(etag: &str) -> String {
        format!(
            "HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nX-Repo-Commit: {COMMIT}\r\n\
             X-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: 26\r\nContent-Length: 0\r\n\
             Connection: close\r\n\r\n"
        )
    }

    fn body(bytes: &[u8]) -> String {
        let text = std::str::from_utf8(bytes).unwrap();
        format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
            bytes.len()
        )
    }

    fn refusal(status: &str, code: &str) -> String {
        format!(
            "HTTP/1.1 {status}\r\nX-Error-Code: {code}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
    }

    fn hub(url: &str, cache: &Path) -> Hub {
        Hub {
            endpoint: url.to_owned(),
            token: None,
            cache: cache.to_owned(),
            revision: "main".into(),
            offline: false,
        }
    }

    #[test]
    fn a_file_is_downloaded_once_into_the_layout_of_hugging_face() {
        let cache = tempfile::tempdir().unwrap();
        let redirected = "HTTP/1.1 302 Found\r\nLocation: /storage\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_owned();
        let (url, server) = serve(vec![head(SHA256), redirected, body(BODY), head(SHA256)]);
        let hub = hub(&url, cache.path()).token("secret");
        let path = hub.weights("example/pie").unwrap();
        let folder = cache.path().join("models--example--pie");
        assert_eq!(path, folder.join(format!("snapshots/{COMMIT}/model.safetensors")));
        assert_eq!(fs::read(&path).unwrap(), BODY);
        assert_eq!(
            fs::canonicalize(&path).unwrap(),
            fs::canonicalize(folder.join("blobs").join(SHA256)).unwrap()
        );
        assert_eq!(fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
        // The second time, only the hub's headers are read.
        assert_eq!(hub.weights("example/pie").unwrap(), path);
        let requests = server.join().unwrap();
        assert!(requests[0].starts_with("HEAD /example/pie/resolve/main/model.safetensors "));
        assert!(
            requests[1].contains("Bearer secret") && !requests[2].contains("Bearer"),
            "{requests:?}"
        );
        assert!(requests[2].starts_with("GET /storage "), "{requests:?}");

        // The server has stopped: a known commit needs no response, and a branch gets a warning.
        assert_eq!(hub.clone().revision(COMMIT).weights("example/pie").unwrap(), path);
        assert_eq!(hub.weights("example/pie").unwrap(), path);
        assert_eq!(cached(&folder, "main", "model.safetensors"), Some(path));
    }

    #[test]
    fn the_other_name_is_tried() {
        let cache = tempfile::tempdir().unwrap();
        let missing = refusal("404 Not Found", "EntryNotFound");
        let (url, server) = serve(vec![missing, head(SHA256), body(BODY)]);
        let path = hub(&url, cache.path()).weights("pie").unwrap();
        assert!(path.ends_with("pytorch_model.bin"), "{}", path.display());
        assert_eq!(server.join().unwrap().len(), 3);
    }

    #[test]
    fn what_is_not_the_file_is_refused_and_leaves_nothing() {
        let other: Vec<u8> = BODY.iter().rev().copied().collect();
        for (answers, expected) in [
            (vec![head(SHA256), body(&other)], "its sha256 is "),
            (vec![head(SHA256), body(&BODY[..9])], "it ended after 9 of 26 bytes"),
            (vec![head(SHA256), body(&[BODY, b"!"].concat())], "more than the 26 bytes"),
            (vec![head("../../escape"), String::new()], "its answer has no etag"),
            (vec![body(BODY)], "its answer has no commit"),
            (vec![refusal("503 Service Unavailable", "")], "the server answered 503"),
            (
                vec![refusal("401 Unauthorized", "RepoNotFound")],
                "no model example/pie, or this user",
            ),
            (vec![refusal("403 Forbidden", "GatedRepo")], "accept its terms"),
            (
                vec![refusal("404 Not Found", "RevisionNotFound")],
                "no file a.bin at the revision main",
            ),
        ] {
            let cache = tempfile::tempdir().unwrap();
            let (url, _server) = serve(answers);
            let error =
                hub(&url, cache.path()).file("example/pie", "a.bin").unwrap_err().to_string();
            assert!(error.contains(expected), "{expected}: {error}");
            let blobs = cache.path().join("models--example--pie/blobs");
            let left = fs::read_dir(blobs).map_or(0, Iterator::count);
            assert_eq!(left, 0, "{expected}");
        }
    }

    #[test]
    fn names_stay_in_the_cache_and_offline_asks_nothing() {
        let cache = tempfile::tempdir().unwrap();
        let hub = hub("http://127.0.0.1:1", cache.path());
        for (repository, file) in
            [("../pie", "a"), ("pie", "../a"), ("pie", "a?b"), ("", "a"), ("a//b", "a")]
        {
            let error = hub.file(repository, file).unwrap_err();
            assert!(matches!(error, HubError::InvalidArgument(_)), "{error}");
        }
        let error = hub.file("pie", "a").unwrap_err().to_string();
        assert!(
            error.starts_with("cannot download http://127.0.0.1:1/pie/resolve/main/a: "),
            "{error}"
        );
        let offline = Hub { offline: true, ..hub };
        let error = offline.file("pie", "a").unwrap_err().to_string();
        assert!(
            error.contains("a of pie is not in ") && error.contains("HF_HUB_OFFLINE"),
            "{error}"
        );
    }
}
