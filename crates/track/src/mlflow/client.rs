//! Requests to MLflow's REST interface.

#[cfg(feature = "https")]
use std::fs;
use std::io;
#[cfg(feature = "https")]
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use percent_encoding::{
    AsciiSet, NON_ALPHANUMERIC, PercentEncode, percent_decode_str, utf8_percent_encode,
};
use serde_json::{Value as Json, json};
use ureq::Agent;
use ureq::config::ConfigBuilder;
use ureq::http::Method;
use ureq::typestate::AgentScope;

use super::Credentials;
use super::batch::{Batch, milliseconds};
use crate::{Outcome, Result, Stamp, TrackError};

/// Connection settings of a server.
#[derive(Clone)]
pub(super) struct Client {
    http: Agent,
    /// Address like `http://host:5000`.
    url: String,
    authorization: Option<String>,
}

/// Identifiers of a run on the server.
#[derive(Debug, Clone)]
pub(super) struct RunInfo {
    pub(super) run_id: String,
    artifact_uri: String,
}

impl RunInfo {
    /// Returns the path under which the server itself stores artifacts; `None` without an artifact proxy.
    pub(super) fn artifacts(&self) -> Option<&str> {
        let path = self.artifact_uri.strip_prefix("mlflow-artifacts:")?;
        match path.strip_prefix("//") {
            // The URI has a host part.
            Some(rest) => Some(rest.split_once('/')?.1),
            None => Some(path.trim_start_matches('/')),
        }
    }
}

impl Client {
    /// Creates a client. A user name and password in the address (`http://user:password@host`) become the credentials,
    /// and do not appear in errors.
    pub(super) fn new(url: &str) -> Result<Self> {
        let (plain, user_info) = without_user_info(url.trim().trim_end_matches('/'));
        let wrong =
            |reason: &str| TrackError::Address { url: plain.clone(), reason: reason.into() };
        let rest = match plain.split_once("://") {
            Some(("http", rest)) => rest,
            Some(("https", rest)) if cfg!(feature = "https") => rest,
            Some(("https", _)) => {
                return Err(wrong("this program was built without the feature `https`"));
            }
            _ => return Err(wrong("it does not begin with http://")),
        };
        if rest.is_empty() || rest.starts_with([':', '/']) || rest.contains(char::is_whitespace) {
            return Err(wrong("it names no host"));
        }
        let mut client =
            Self { http: settings().build().new_agent(), url: plain, authorization: None };
        if let Some((user, password)) = user_info {
            client.authorize(&Credentials::Basic { user, password });
        }
        Ok(client)
    }

    /// Trusts the certificates in this file and no others.
    #[cfg(feature = "https")]
    pub(super) fn trust(&mut self, path: &Path) -> Result<()> {
        use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

        let text = fs::read(path).map_err(TrackError::file("cannot read", path))?;
        let mut certificates = Vec::new();
        for item in parse_pem(&text) {
            match item {
                Ok(PemItem::Certificate(certificate)) => certificates.push(certificate),
                Ok(_) => {}
                Err(error) => return Err(no_certificate(path, &error.to_string())),
            }
        }
        if certificates.is_empty() {
            return Err(no_certificate(path, "there is none in it"));
        }
        let roots = RootCerts::from(certificates);
        let tls = TlsConfig::builder().root_certs(roots).build();
        self.http = settings().tls_config(tls).build().new_agent();
        Ok(())
    }

    pub(super) fn authorize(&mut self, credentials: &Credentials) {
        self.authorization = Some(match credentials {
            Credentials::Bearer(token) => format!("Bearer {token}"),
            Credentials::Basic { user, password } => {
                format!("Basic {}", STANDARD.encode(format!("{user}:{password}")))
            }
        });
    }

    #[cfg(test)]
    pub(super) fn authorization(&self) -> Option<&str> {
        self.authorization.as_deref()
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Returns the ID of the experiment of that name, which is created if it does not exist.
    pub(super) fn experiment(&self, name: &str) -> Result<String> {
        let what = "the experiment";
        let query = format!("experiments/get-by-name?experiment_name={}", escaped(name));
        let answer = match self.with_retries(Method::GET, &query, what, None, None) {
            // Another process may create it between the two calls; then the second query finds it.
            Err(TrackError::Refused { status: 404, .. }) => {
                let made = self.with_retries(
                    Method::POST,
                    "experiments/create",
                    what,
                    Some(&json!({ "name": name })),
                    None,
                );
                match made {
                    Err(TrackError::Refused { .. }) => {
                        self.with_retries(Method::GET, &query, what, None, None)?
                    }
                    made => return self.text(&made?, &["experiment_id"], what),
                }
            }
            answer => answer?,
        };
        self.text(&answer, &["experiment", "experiment_id"], what)
    }

    pub(super) fn create_run(
        &self,
        experiment: &str,
        name: Option<&str>,
        began: Stamp,
    ) -> Result<RunInfo> {
        let mut request = json!({ "experiment_id": experiment, "start_time": milliseconds(began) });
        if let Some(name) = name {
            request["run_name"] = name.into();
        }
        let what = "a new run";
        let answer = self.with_retries(Method::POST, "runs/create", what, Some(&request), None)?;
        self.run_info(&answer, what)
    }

    /// Sets the status of an existing run to running and returns its identifiers.
    pub(super) fn resume_run(&self, run_id: &str) -> Result<RunInfo> {
        let what = "the run to continue";
        let query = format!("runs/get?run_id={}", escaped(run_id));
        let answer = self.with_retries(Method::GET, &query, what, None, None)?;
        let request = json!({ "run_id": run_id, "status": "RUNNING" });
        self.with_retries(Method::POST, "runs/update", what, Some(&request), None)?;
        self.run_info(&answer, what)
    }

    /// Sends a batch once: the sender thread decides about retries.
    pub(super) fn log_batch(
        &self,
        run_id: &str,
        batch: &Batch,
        until: Option<Instant>,
    ) -> Result<()> {
        let request = json!({
            "run_id": run_id,
            "metrics": batch.metrics,
            "params": batch.params,
            "tags": batch.tags,
        });
        self.ask(Method::POST, "runs/log-batch", "values", Some(&request), until).map(drop)
    }

    /// Uploads a file, without retries.
    pub(super) fn put(&self, path: &str, bytes: &[u8], until: Option<Instant>) -> Result<()> {
        let url = format!("{}/api/2.0/mlflow-artifacts/artifacts/{path}", self.url);
        let limit = Some(time_left(until));
        let mut request = self.http.put(&url).config().timeout_global(limit).build();
        if let Some(authorization) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        self.answer(request.send(bytes), "a file").map(drop)
    }

    pub(super) fn set_terminated(
        &self,
        run_id: &str,
        outcome: Outcome,
        at: Stamp,
        until: Instant,
    ) -> Result<()> {
        let status = match outcome {
            Outcome::Finished => "FINISHED",
            Outcome::Failed => "FAILED",
        };
        let request = json!({ "run_id": run_id, "status": status, "end_time": milliseconds(at) });
        let what = "the run's end";
        self.with_retries(Method::POST, "runs/update", what, Some(&request), Some(until)).map(drop)
    }

    /// Sends a request with a few attempts, the last of which begins before `until`: a server may be starting, or be
    /// temporarily unavailable.
    fn with_retries(
        &self,
        method: Method,
        path: &str,
        what: &'static str,
        body: Option<&Json>,
        until: Option<Instant>,
    ) -> Result<Json> {
        let mut pause = PAUSE;
        for _ in 1..ATTEMPTS {
            match self.ask(method.clone(), path, what, body, until) {
                Err(error) if passes(&error) => {
                    if until.is_some_and(|until| Instant::now() + pause >= until) {
                        return Err(error);
                    }
                    thread::sleep(pause);
                    pause *= 2;
                }
                answer => return answer,
            }
        }
        self.ask(method, path, what, body, until)
    }

    /// Sends a request once. The answer must arrive by `until`.
    fn ask(
        &self,
        method: Method,
        path: &str,
        what: &'static str,
        body: Option<&Json>,
        until: Option<Instant>,
    ) -> Result<Json> {
        let mut request = ureq::http::Request::builder()
            .method(method)
            .uri(format!("{}/api/2.0/mlflow/{path}", self.url))
            .header("Content-Type", "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header("Authorization", authorization);
        }
        let wrong = |error: ureq::http::Error| TrackError::Address {
            url: self.url.clone(),
            reason: error.to_string(),
        };
        let answer = match body {
            Some(body) => self.run(request.body(body.to_string()).map_err(wrong)?, until),
            None => self.run(request.body(()).map_err(wrong)?, until),
        };
        let text = self.answer(answer, what)?;
        serde_json::from_str(&text).map_err(|error| self.not_mlflow(what, &error.to_string()))
    }

    fn run(
        &self,
        request: ureq::http::Request<impl ureq::AsSendBody>,
        until: Option<Instant>,
    ) -> std::result::Result<ureq::http::Response<ureq::Body>, ureq::Error> {
        let limited = self.http.configure_request(request).timeout_global(Some(time_left(until)));
        self.http.run(limited.build())
    }

    fn answer(
        &self,
        answer: std::result::Result<ureq::http::Response<ureq::Body>, ureq::Error>,
        what: &'static str,
    ) -> Result<String> {
        let away = |error: ureq::Error| {
            let (url, reason) = (self.url.clone(), error.to_string());
            if is_about_tls(&error) {
                TrackError::Untrusted { url, reason }
            } else {
                TrackError::Unreachable { url, reason }
            }
        };
        let answer = answer.map_err(away)?;
        let status = answer.status();
        let body = answer.into_body().into_with_config().limit(MAX_ANSWER_BYTES).read_to_string();
        if status.is_success() {
            return body.map_err(away);
        }
        let body = body.unwrap_or_default();
        let reason = match serde_json::from_str::<Json>(&body) {
            Ok(json) => json["message"].as_str().unwrap_or("it does not say why").to_owned(),
            Err(_) => status.canonical_reason().unwrap_or("it does not say why").to_owned(),
        };
        let (url, status) = (self.url.clone(), status.as_u16());
        Err(match status {
            401 | 403 => TrackError::Unauthorized { url, what, status, reason },
            _ => TrackError::Refused { url, what, status, reason },
        })
    }

    fn run_info(&self, answer: &Json, what: &'static str) -> Result<RunInfo> {
        Ok(RunInfo {
            run_id: self.text(answer, &["run", "info", "run_id"], what)?,
            artifact_uri: self.text(answer, &["run", "info", "artifact_uri"], what)?,
        })
    }

    fn text(&self, answer: &Json, path: &[&str], what: &'static str) -> Result<String> {
        let found = path.iter().try_fold(answer, |json, name| json.get(name));
        match found.and_then(Json::as_str) {
            Some(text) => Ok(text.to_owned()),
            None => Err(self.not_mlflow(what, &format!("it has no {}", path.join(".")))),
        }
    }

    fn not_mlflow(&self, what: &'static str, reason: &str) -> TrackError {
        TrackError::NotMlflow { url: self.url.clone(), what, reason: reason.to_owned() }
    }
}

/// Returns `true` if another attempt may succeed.
pub(super) fn passes(error: &TrackError) -> bool {
    match error {
        TrackError::Unreachable { .. } => true,
        TrackError::Refused { status, .. } => matches!(status, 408 | 429 | 500 | 502..=504),
        _ => false,
    }
}

/// Returns `true` if no encrypted connection was possible: a certificate that is not trusted, or a server without TLS.
/// Another attempt would fail in the same way.
fn is_about_tls(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::Tls(_) => true,
        #[cfg(feature = "https")]
        ureq::Error::Rustls(_) => true,
        // rustls reports its errors through the socket's reader in this form.
        ureq::Error::Io(error) => error.kind() == io::ErrorKind::InvalidData,
        _ => false,
    }
}

/// Time that is left for an answer.
fn time_left(until: Option<Instant>) -> Duration {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    // A limit of zero would mean no limit to some of ureq's timeouts.
    left.map_or(ANSWER, |left| left.min(ANSWER)).max(Duration::from_millis(1))
}

/// Splits an address into the address without user name and password, and these two.
fn without_user_info(url: &str) -> (String, Option<(String, String)>) {
    let begin = url.find("://").map_or(0, |at| at + 3);
    let end = url[begin..].find(['/', '?', '#']).map_or(url.len(), |at| begin + at);
    // A password may contain an unescaped `@`; a host name cannot.
    let Some(at) = url[begin..end].rfind('@') else { return (url.to_owned(), None) };
    let (user_info, rest) = (&url[begin..begin + at], &url[begin + at + 1..]);
    let (user, password) = user_info.split_once(':').unwrap_or((user_info, ""));
    let plain = |text| percent_decode_str(text).decode_utf8_lossy().into_owned();
    (format!("{}{rest}", &url[..begin]), Some((plain(user), plain(password))))
}

fn settings() -> ConfigBuilder<AgentScope> {
    Agent::config_builder()
        .http_status_as_error(false)
        .timeout_connect(Some(CONNECT))
        .timeout_global(Some(ANSWER))
}

#[cfg(feature = "https")]
fn no_certificate(path: &Path, reason: &str) -> TrackError {
    TrackError::Certificate { path: path.to_owned(), reason: reason.to_owned() }
}

/// Escapes text as a value in the query of an address.
fn escaped(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, UNRESERVED)
}

/// All characters except the unreserved ones of RFC 3986.
const UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
const CONNECT: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_secs(30);
const ATTEMPTS: u32 = 4;
/// Pause before the second attempt; doubled before each further one.
const PAUSE: Duration = Duration::from_millis(200);
const MAX_ANSWER_BYTES: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked() {
        assert_eq!(Client::new(" http://a:5000/ ").map(|it| it.url).unwrap(), "http://a:5000");
        for wrong in ["a:5000", "ftp://a", "http://", "http://:5000", "http://a b"] {
            assert!(matches!(Client::new(wrong), Err(TrackError::Address { .. })), "{wrong}");
        }
        assert_eq!(escaped("a b/ä~").to_string(), "a%20b%2F%C3%A4~");
    }

    #[test]
    fn a_password_in_the_address_becomes_credentials() {
        for (url, plain, authorization) in [
            ("http://me:secret@a:5000/x/", "http://a:5000/x", Some("me:secret")),
            ("http://me:s%40c%zz@a", "http://a", Some("me:s@c%zz")),
            ("http://me:s@cret@a", "http://a", Some("me:s@cret")),
            ("http://me@a", "http://a", Some("me:")),
            ("http://a/b@c", "http://a/b@c", None),
        ] {
            let client = Client::new(url).unwrap();
            assert_eq!(client.url(), plain);
            let expected = authorization.map(|it| format!("Basic {}", STANDARD.encode(it)));
            assert_eq!(client.authorization(), expected.as_deref());
        }
        for wrong in
            ["ftp://me:secret@a", "me:secret@a:5000", "http://me:secret@", "://u:secret@b c"]
        {
            let Err(error) = Client::new(wrong) else { panic!("{wrong} is taken") };
            let text = format!("{error} {error:?}");
            assert!(!text.contains("secret"), "{text}");
        }
    }

    #[test]
    fn where_the_server_takes_files() {
        let at = |uri: &str| {
            let run = RunInfo { run_id: String::new(), artifact_uri: uri.to_owned() };
            run.artifacts().map(str::to_owned)
        };
        assert_eq!(at("mlflow-artifacts:/0/ab/artifacts").as_deref(), Some("0/ab/artifacts"));
        assert_eq!(at("mlflow-artifacts://h:1/0/ab").as_deref(), Some("0/ab"));
        assert_eq!(at("s3://bucket/0/ab"), None);
    }
}
