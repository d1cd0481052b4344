//! Client for the part of etcd's v3 interface that an election needs, in JSON over HTTP.

use std::io;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use brigade_rank_env::text::printable;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use ureq::Agent;

use super::access::{EtcdAccess, EtcdError};

/// Client of an etcd cluster with one or several members, any of which may answer.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    http: Agent,
    /// Endpoint URLs, such as `http://etcd1:2379`.
    endpoints: Vec<String>,
    /// Index of the endpoint that has answered last.
    current: usize,
    user: Option<String>,
    password: Option<String>,
    /// Authentication token of the user, which expires after some minutes without use.
    token: Option<String>,
}

/// ID of a lease, as etcd writes it.
pub(crate) type Lease = String;

/// Result of an attempt to create a key.
#[derive(Debug)]
pub(crate) enum Created {
    Now,
    /// The keys exist: their values.
    Not([Option<Vec<u8>>; 2]),
}

/// Reason why etcd did not do what it was asked for.
#[derive(Debug)]
pub(crate) enum ClientError {
    /// A temporary failure: a later request may succeed.
    Away(String),
    /// Permanent failure.
    Unusable(EtcdError),
}

type Result<T> = std::result::Result<T, ClientError>;

impl Client {
    /// Creates a client of endpoints such as "etcd1:2379,etcd2:2379". Fails with the part that is not an address, or
    /// with a file that cannot be used.
    pub(crate) fn new(
        endpoints: &str,
        access: &EtcdAccess,
    ) -> std::result::Result<Self, EtcdError> {
        let part = |text: &str| {
            let text = text.trim();
            let (scheme, plain) = match text.split_once("://") {
                Some((scheme @ ("http" | "https"), plain)) => (scheme, plain),
                Some(_) => return Err(text.to_owned()),
                None => ("http", text),
            };
            let scheme = if access.tls { "https" } else { scheme };
            let plain = plain.trim_end_matches('/');
            let named = plain.rsplit_once(':').is_some_and(|(host, port)| {
                !host.is_empty() && port.parse::<u16>().is_ok() && !plain.contains(['/', '@'])
            });
            if named { Ok(format!("{scheme}://{plain}")) } else { Err(text.to_owned()) }
        };
        let bad = |part| EtcdError::BadEndpoint { part, endpoints: endpoints.into() };
        let endpoints =
            endpoints.split(',').map(part).collect::<std::result::Result<_, _>>().map_err(bad)?;
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            // etcd is inside the cluster, which a proxy for the internet could not reach.
            .proxy(None)
            .timeout_global(Some(PATIENCE));
        if let Some(tls) = access.tls_config()? {
            config = config.tls_config(tls);
        }
        Ok(Self {
            http: config.build().new_agent(),
            endpoints,
            current: 0,
            user: access.user.clone(),
            password: access.password.clone(),
            token: None,
        })
    }

    /// Returns the host name of the current member, to determine which local address is used to reach it.
    pub(crate) fn host(&self) -> &str {
        let endpoint = &self.endpoints[self.current];
        endpoint.split_once("://").map_or(endpoint, |(_, host)| host)
    }

    /// Requests a lease that ends after this time unless it is kept alive.
    pub(crate) fn grant(&mut self, time: Duration) -> Result<Lease> {
        let granted: GrantAnswer = self.call("lease/grant", &json!({ "TTL": time.as_secs() }))?;
        Ok(granted.id)
    }

    /// Returns `false` when the lease has ended.
    pub(crate) fn keep_alive(&mut self, lease: &str) -> Result<bool> {
        let kept: KeepAliveAnswer = self.call("lease/keepalive", &json!({ "ID": lease }))?;
        Ok(kept.result.ttl.is_some_and(|left| left != "0"))
    }

    /// Ends a lease, which deletes the keys that are attached to it.
    pub(crate) fn revoke(&mut self, lease: &str) -> Result<()> {
        self.call::<Value>("lease/revoke", &json!({ "ID": lease })).map(drop)
    }

    /// Reads the values of two keys in one transaction.
    pub(crate) fn look(&mut self, keys: [&str; 2]) -> Result<[Option<Vec<u8>>; 2]> {
        let look: Vec<Value> = keys.iter().map(|key| range(key)).collect();
        let done: Done = self.call("kv/txn", &json!({ "success": look }))?;
        done.values().map_err(away)
    }

    /// Creates a key with a lease if neither it nor the other key exists.
    pub(crate) fn create(
        &mut self,
        [key, other]: [&str; 2],
        value: &[u8],
        lease: &str,
    ) -> Result<Created> {
        let absent = |key| json!({ "key": coded(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0" });
        let request = json!({
            "compare": [absent(key), absent(other)],
            "success": [put(key, value, lease)],
            "failure": [range(key), range(other)],
        });
        let done: Done = self.call("kv/txn", &request)?;
        if done.succeeded {
            Ok(Created::Now)
        } else {
            Ok(Created::Not(done.values().map_err(away)?))
        }
    }

    /// Writes one key and deletes another in one transaction, if the other one has this lease.
    pub(crate) fn replace(
        &mut self,
        old: (&str, &str),
        new: &str,
        value: &[u8],
        lease: &str,
    ) -> Result<()> {
        let (key, held) = old;
        let request = json!({
            "compare": [{ "key": coded(key), "target": "LEASE", "result": "EQUAL", "lease": held }],
            "success": [
                put(new, value, lease),
                { "request_delete_range": { "key": coded(key) } },
            ],
        });
        self.call::<Done>("kv/txn", &request).map(drop)
    }

    /// Sends a request to one member after the other, beginning with the one that answered last.
    fn call<T: DeserializeOwned>(&mut self, what: &str, request: &Value) -> Result<T> {
        let mut last = away("no endpoint");
        for _ in 0..self.endpoints.len() {
            match self.ask_as_user(what, request) {
                Ok(answer) => {
                    let endpoint = &self.endpoints[self.current];
                    return serde_json::from_str(&answer).map_err(|error| {
                        away(format!("{endpoint} does not answer as etcd: {error}"))
                    });
                }
                Err(error @ ClientError::Away(_)) => last = error,
                Err(unusable) => return Err(unusable),
            }
            self.current = (self.current + 1) % self.endpoints.len();
        }
        Err(last)
    }

    /// Sends a request to the current member, with a token if there is a user. A token that has expired, or was issued
    /// before the users of this etcd changed, is replaced once.
    fn ask_as_user(&mut self, what: &str, request: &Value) -> Result<String> {
        for is_last in [false, true] {
            if let (Some(user), None) = (&self.user, &self.token) {
                let name_and_password =
                    json!({ "name": user, "password": self.password.as_deref().unwrap_or("") });
                let answer = self.ask("auth/authenticate", &name_and_password)?;
                let refusal = match answer {
                    Ok(answer) => serde_json::from_str::<Authenticated>(&answer)
                        .map_err(|error| away(printable(&error.to_string())))?,
                    Err(refusal) => return Err(self.refused(refusal, true)),
                };
                self.token = Some(refusal.token);
            }
            match self.ask(what, request)? {
                Ok(answer) => return Ok(answer),
                Err(refusal) if refusal.is_about_the_token() && !is_last && self.user.is_some() => {
                    self.token = None;
                }
                Err(refusal) => return Err(self.refused(refusal, false)),
            }
        }
        Err(away("etcd rejects the token that it issued"))
    }

    /// Sends a request to the current member. Returns the body of the response, or the refusal.
    fn ask(&self, what: &str, request: &Value) -> Result<std::result::Result<String, Refusal>> {
        let endpoint = &self.endpoints[self.current];
        let failed = |error: ureq::Error| failure(endpoint, error);
        let mut post = self.http.post(format!("{endpoint}/v3/{what}"));
        if let Some(token) = &self.token {
            post = post.header("Authorization", token);
        }
        let response = post.send(&request.to_string()).map_err(failed)?;
        let status = response.status();
        let body = response
            .into_body()
            .into_with_config()
            .limit(MAX_ANSWER_LEN)
            .read_to_string()
            .map_err(failed)?;
        if status.is_success() {
            return Ok(Ok(body));
        }
        match serde_json::from_str::<Refusal>(&body) {
            Ok(refusal) => Ok(Err(Refusal { message: printable(&refusal.message), ..refusal })),
            // The gateway's message for a connection without TLS.
            Err(_) if status == 400 && body.contains("HTTPS") => {
                let (endpoint, reason) = (endpoint.clone(), "it accepts only TLS".to_owned());
                Err(ClientError::Unusable(EtcdError::NotTls { endpoint, reason }))
            }
            Err(_) if status == 400 && body.starts_with(COMMON_NAME) => {
                let (endpoint, reason) = (endpoint.clone(), NO_COMMON_NAME.to_owned());
                Err(ClientError::Unusable(EtcdError::ClientCertificate { endpoint, reason }))
            }
            Err(_) => {
                let body = printable(body.trim());
                Err(away(format!("etcd at {endpoint}: HTTP status {status}: {body}")))
            }
        }
    }

    /// Returns the error for a refusal, which may be about the user.
    fn refused(&self, refusal: Refusal, authenticating: bool) -> ClientError {
        let endpoint = self.endpoints[self.current].clone();
        let Refusal { code, message: reason } = refusal;
        let user = self.user.clone();
        let unusable = match code {
            INVALID_ARGUMENT | FAILED_PRECONDITION if authenticating => {
                EtcdError::Denied { endpoint, user, reason }
            }
            // etcd's message for a request without a token when authentication is enabled.
            INVALID_ARGUMENT if reason.contains("user name is empty") => {
                EtcdError::Denied { endpoint, user, reason }
            }
            UNAUTHENTICATED => EtcdError::Denied { endpoint, user, reason },
            PERMISSION_DENIED => EtcdError::Forbidden { endpoint, user, reason },
            _ => return away(format!("etcd at {endpoint}: {reason}")),
        };
        ClientError::Unusable(unusable)
    }
}

fn away(text: impl Into<String>) -> ClientError {
    ClientError::Away(text.into())
}

/// Returns the error for a request without an answer. Errors of TLS are permanent, and recognized by their kind, not by
/// their text.
fn failure(endpoint: &str, error: ureq::Error) -> ClientError {
    use rustls::{AlertDescription as Alert, Error as Tls};

    let endpoint = endpoint.to_owned();
    let is_end = matches!(&error, ureq::Error::Io(error) if ENDS.contains(&error.kind()));
    let (tls, text) = match error {
        ureq::Error::Rustls(tls) => (Some(tls), String::new()),
        ureq::Error::Io(error) => {
            let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<Tls>()).cloned();
            (tls, crate::plain_text(&error))
        }
        error => (None, error.to_string()),
    };
    let Some(tls) = tls else {
        // A connection in which only one side uses TLS ends in this way; but also one with a member that is just
        // starting.
        let hint = match (is_end, endpoint.starts_with("https:")) {
            (true, true) => "; does it use TLS?",
            (true, false) => "; does it accept only TLS (--rdzv-conf protocol=https)?",
            (false, _) => "",
        };
        return away(format!("etcd at {endpoint}: {}{hint}", printable(&text)));
    };
    let reason = printable(&tls.to_string());
    ClientError::Unusable(match tls {
        Tls::InvalidCertificate(_) | Tls::NoCertificatesPresented => {
            EtcdError::Untrusted { endpoint, reason }
        }
        Tls::AlertReceived(
            Alert::CertificateRequired
            | Alert::BadCertificate
            | Alert::UnknownCA
            | Alert::CertificateUnknown
            | Alert::CertificateExpired
            | Alert::CertificateRevoked
            | Alert::UnsupportedCertificate
            | Alert::AccessDenied
            | Alert::DecryptError,
        )
        | Tls::InconsistentKeys(_) => EtcdError::ClientCertificate { endpoint, reason },
        _ => EtcdError::NotTls { endpoint, reason },
    })
}

/// etcd's words if it has users and its HTTP gateway gets a certificate that could name one.
const COMMON_NAME: &str = "CommonName of client";
const NO_COMMON_NAME: &str =
    "with users, etcd's HTTP gateway rejects certificates with a CommonName: leave it out";
const ENDS: [io::ErrorKind; 2] = [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset];

fn coded(text: impl AsRef<[u8]>) -> String {
    STANDARD.encode(text)
}

fn range(key: &str) -> Value {
    json!({ "request_range": { "key": coded(key) } })
}

fn put(key: &str, value: &[u8], lease: &str) -> Value {
    json!({ "request_put": { "key": coded(key), "value": coded(value), "lease": lease } })
}

#[derive(Deserialize)]
struct GrantAnswer {
    #[serde(rename = "ID")]
    id: Lease,
}

#[derive(Deserialize)]
struct KeepAliveAnswer {
    result: LeaseTtl,
}

#[derive(Deserialize)]
struct LeaseTtl {
    #[serde(rename = "TTL")]
    ttl: Option<String>,
}

#[derive(Deserialize)]
struct Authenticated {
    token: String,
}

#[derive(Debug, Deserialize)]
struct Refusal {
    /// Status code of gRPC.
    #[serde(default)]
    code: u32,
    message: String,
}

impl Refusal {
    /// Returns `true` if another token may be accepted. JSON Web Tokens are bound to a revision of the users and roles;
    /// etcd reports a changed revision with a code that has other meanings as well.
    fn is_about_the_token(&self) -> bool {
        self.code == UNAUTHENTICATED
            || (self.code == INVALID_ARGUMENT && self.message.contains(OLD_REVISION))
    }
}

/// Error message of etcd for an outdated authentication.
const OLD_REVISION: &str = "revision of auth store is old";
const INVALID_ARGUMENT: u32 = 3;
const PERMISSION_DENIED: u32 = 7;
const FAILED_PRECONDITION: u32 = 9;
const UNAUTHENTICATED: u32 = 16;

/// Response to a transaction. etcd omits fields that are empty or false.
#[derive(Deserialize)]
struct Done {
    #[serde(default)]
    succeeded: bool,
    #[serde(default)]
    responses: Vec<Response>,
}

#[derive(Deserialize)]
struct Response {
    #[serde(alias = "responseRange")]
    response_range: Option<Range>,
}

#[derive(Deserialize)]
struct Range {
    #[serde(default)]
    kvs: Vec<Pair>,
}

#[derive(Deserialize)]
struct Pair {
    #[serde(default)]
    value: String,
}

impl Done {
    fn values(self) -> std::result::Result<[Option<Vec<u8>>; 2], String> {
        let mut ranges = self.responses.into_iter().filter_map(|response| response.response_range);
        let mut value =
            || match ranges.next().ok_or("etcd left out a part of its answer")?.kvs.pop() {
                None => Ok(None),
                Some(Pair { value }) => STANDARD
                    .decode(value)
                    .map(Some)
                    .map_err(|_| "etcd sent a value that is not base64"),
            };
        Ok([value()?, value()?])
    }
}

/// Time limit for a response: a running etcd responds within milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);
const MAX_ANSWER_LEN: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use brigade_test_hosts::Etcd;
    use brigade_test_needs::{Need, is_missed};

    use super::*;

    #[test]
    fn endpoints() {
        let client =
            |text: &str, tls| Client::new(text, &EtcdAccess { tls, ..EtcdAccess::default() });
        let good = client("etcd1:2379, http://10.0.0.2:2379/,[::1]:1,https://a:2", false).unwrap();
        let expected =
            ["http://etcd1:2379", "http://10.0.0.2:2379", "http://[::1]:1", "https://a:2"];
        assert_eq!(good.endpoints, expected);
        assert_eq!(good.host(), "etcd1:2379");
        let safe = client("etcd1:2379,http://a:1", true).unwrap();
        assert_eq!(safe.endpoints, ["https://etcd1:2379", "https://a:1"]);
        assert_eq!(safe.host(), "etcd1:2379");
        for bad in ["", "etcd1", "etcd1:", ":2379", "etcd1:2379,", "unix://a:1", "a:1/b", "u@a:1"] {
            assert!(matches!(client(bad, false), Err(EtcdError::BadEndpoint { .. })), "{bad}");
        }
    }

    /// An etcd with the user root, started with these flags; `None` if there is no etcd.
    fn with_root(test: &str, flags: &[String]) -> Option<(Etcd, Client)> {
        // These tests need private items, so they are tests of libtest in this file.
        if is_missed(Need::Etcd, "brigade-rendezvous", &format!("etcd::client::tests::{test}")) {
            return None;
        }
        let etcd = Etcd::start_with(flags);
        let client = |access| Client::new(etcd.endpoint(), &access).unwrap();
        let admin = client(EtcdAccess::default());
        for (what, request) in [
            ("user/add", json!({ "name": "root", "password": "right" })),
            ("role/add", json!({ "name": "root" })),
            ("user/grant", json!({ "user": "root", "role": "root" })),
            ("enable", json!({})),
        ] {
            admin.ask(&format!("auth/{what}"), &request).unwrap().unwrap();
        }
        let user = Some("root".to_owned());
        let root =
            client(EtcdAccess { user, password: Some("right".into()), ..EtcdAccess::default() });
        Some((etcd, root))
    }

    #[test]
    fn a_token_that_is_not_accepted_is_replaced() {
        let Some((_etcd, mut root)) = with_root("a_token_that_is_not_accepted_is_replaced", &[])
        else {
            return;
        };
        root.look(["a", "b"]).unwrap();
        let first = root.token.clone().expect("a token");
        root.look(["a", "b"]).unwrap();
        assert_eq!(root.token.as_ref(), Some(&first), "it is used again");
        // An expired token, or one that etcd has issued before it was restarted.
        root.token = Some("DXbIoRBqPtlxgGlI.7".into());
        assert_eq!(root.look(["a", "b"]).unwrap(), [None, None]);
        let lease = root.grant(Duration::from_secs(60)).unwrap();
        root.token = Some("DXbIoRBqPtlxgGlI.7".into());
        assert!(matches!(root.create(["a", "b"], b"1", &lease).unwrap(), Created::Now));
    }

    #[test]
    fn a_token_from_before_the_users_changed_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let key = folder.path().join("key");
        std::fs::write(&key, "known to this etcd alone").unwrap();
        let key = format!("jwt,priv-key={},sign-method=HS256,ttl=10m", key.display());
        let (test, flags) =
            ("a_token_from_before_the_users_changed_is_replaced", ["--auth-token".into(), key]);
        let Some((_etcd, mut root)) = with_root(test, &flags) else { return };
        root.look(["a", "b"]).unwrap();
        let first = root.token.clone().expect("a token");
        let user = json!({ "name": "another", "password": "right" });
        root.ask("auth/user/add", &user).unwrap().unwrap();
        let refusal = root.ask("kv/range", &json!({ "key": "YQ==" })).unwrap().unwrap_err();
        assert_eq!((refusal.code, refusal.is_about_the_token()), (INVALID_ARGUMENT, true));
        assert_eq!(root.look(["a", "b"]).unwrap(), [None, None]);
        assert_ne!(root.token, Some(first));
    }

    #[test]
    fn answers() {
        // Responses of etcd 3.4.
        let absent = r#"{"header":{},"responses":[{"response_range":{"header":{},"kvs":[{"key":"Zm9v","value":"YmFy"}],"count":"1"}},{"response_range":{"header":{}}}]}"#;
        let done: Done = serde_json::from_str(absent).unwrap();
        assert!(!done.succeeded);
        assert_eq!(done.values().unwrap(), [Some(b"bar".to_vec()), None]);
        let put = r#"{"succeeded":true,"responses":[{"response_put":{"header":{}}}]}"#;
        let done: Done = serde_json::from_str(put).unwrap();
        assert!(done.succeeded && done.values().is_err());
        let alive: KeepAliveAnswer =
            serde_json::from_str(r#"{"result":{"ID":"7","TTL":"3"}}"#).unwrap();
        let ended: KeepAliveAnswer = serde_json::from_str(r#"{"result":{"ID":"7"}}"#).unwrap();
        assert!(alive.result.ttl.is_some() && ended.result.ttl.is_none());
    }
}
