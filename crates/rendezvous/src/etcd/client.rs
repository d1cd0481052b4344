//! The little of etcd's v3 interface that an election needs, in JSON over HTTP.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use ureq::Agent;

/// One or several members of an etcd; any of them will do.
#[derive(Clone, Debug)]
pub(super) struct Client {
    http: Agent,
    /// Like `http://etcd1:2379`.
    endpoints: Vec<String>,
    /// The one that answered last.
    current: usize,
}

/// A lease's number, as etcd writes it.
pub(super) type Lease = String;

/// What an attempt to create a key found.
#[derive(Debug)]
pub(super) enum Created {
    Now,
    /// The values of the keys, those that are there.
    Not([Option<Vec<u8>>; 2]),
}

impl Client {
    /// Of "etcd1:2379,etcd2:2379"; fails with the part that is no address.
    pub(super) fn new(endpoints: &str) -> Result<Self, String> {
        let part = |text: &str| {
            let text = text.trim();
            let plain = text.strip_prefix("http://").unwrap_or(text).trim_end_matches('/');
            let named = plain.rsplit_once(':').is_some_and(|(host, port)| {
                !host.is_empty() && port.parse::<u16>().is_ok() && !plain.contains('/')
            });
            if named { Ok(format!("http://{plain}")) } else { Err(text.to_owned()) }
        };
        let endpoints = endpoints.split(',').map(part).collect::<Result<_, _>>()?;
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            // It is in the cluster; a proxy for the world outside would not find it.
            .proxy(None)
            .timeout_global(Some(PATIENCE))
            .build();
        Ok(Self { http: config.new_agent(), endpoints, current: 0 })
    }

    /// The host of a member, to find out by which of our addresses it is reached.
    pub(super) fn host(&self) -> &str {
        self.endpoints[self.current].trim_start_matches("http://")
    }

    /// A lease that ends after this time unless it is kept alive.
    pub(super) fn grant(&mut self, time: Duration) -> Result<Lease, String> {
        let granted: Granted = self.call("lease/grant", &json!({ "TTL": time.as_secs() }))?;
        Ok(granted.id)
    }

    /// False when the lease has ended.
    pub(super) fn keep_alive(&mut self, lease: &str) -> Result<bool, String> {
        let kept: Kept = self.call("lease/keepalive", &json!({ "ID": lease }))?;
        Ok(kept.result.ttl.is_some_and(|left| left != "0"))
    }

    /// Ends a lease, and with it the keys that hang on it.
    pub(super) fn revoke(&mut self, lease: &str) -> Result<(), String> {
        self.call::<Value>("lease/revoke", &json!({ "ID": lease })).map(drop)
    }

    /// The values of two keys at one moment.
    pub(super) fn look(&mut self, keys: [&str; 2]) -> Result<[Option<Vec<u8>>; 2], String> {
        let look: Vec<Value> = keys.iter().map(|key| range(key)).collect();
        let done: Done = self.call("kv/txn", &json!({ "success": look }))?;
        done.values()
    }

    /// Creates a key under a lease if neither it nor the other one is there.
    pub(super) fn create(
        &mut self,
        [key, other]: [&str; 2],
        value: &[u8],
        lease: &str,
    ) -> Result<Created, String> {
        let absent = |key| json!({ "key": coded(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0" });
        let request = json!({
            "compare": [absent(key), absent(other)],
            "success": [put(key, value, lease)],
            "failure": [range(key), range(other)],
        });
        let done: Done = self.call("kv/txn", &request)?;
        if done.succeeded { Ok(Created::Now) } else { Ok(Created::Not(done.values()?)) }
    }

    /// Writes one key and deletes another at one moment, if the other one hangs on this lease.
    pub(super) fn replace(
        &mut self,
        old: (&str, &str),
        new: &str,
        value: &[u8],
        lease: &str,
    ) -> Result<(), String> {
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

    /// Asks one member after the other, beginning with the one that answered last.
    fn call<T: DeserializeOwned>(&mut self, what: &str, request: &Value) -> Result<T, String> {
        let mut last = String::new();
        for _ in 0..self.endpoints.len() {
            let endpoint = &self.endpoints[self.current];
            match self.ask(&format!("{endpoint}/v3/{what}"), request) {
                Ok(answer) => {
                    return serde_json::from_str(&answer)
                        .map_err(|error| format!("{endpoint} does not answer as etcd: {error}"));
                }
                Err(error) => last = format!("etcd at {endpoint}: {error}"),
            }
            self.current = (self.current + 1) % self.endpoints.len();
        }
        Err(last)
    }

    fn ask(&self, url: &str, request: &Value) -> Result<String, String> {
        let text = |error: ureq::Error| match error {
            ureq::Error::Io(error) => crate::plain_text(&error),
            error => error.to_string(),
        };
        let response = self.http.post(url).send(&request.to_string()).map_err(text)?;
        let status = response.status();
        let body = response
            .into_body()
            .into_with_config()
            .limit(LONGEST_ANSWER)
            .read_to_string()
            .map_err(text)?;
        if status.is_success() {
            return Ok(body);
        }
        let refusal: Result<Refusal, _> = serde_json::from_str(&body);
        Err(refusal.map_or_else(|_| format!("HTTP status {status}"), |refusal| refusal.message))
    }
}

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
struct Granted {
    #[serde(rename = "ID")]
    id: Lease,
}

#[derive(Deserialize)]
struct Kept {
    result: Left,
}

#[derive(Deserialize)]
struct Left {
    #[serde(rename = "TTL")]
    ttl: Option<String>,
}

#[derive(Deserialize)]
struct Refusal {
    message: String,
}

/// What a transaction has done. What is empty or false is left out by etcd.
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
    fn values(self) -> Result<[Option<Vec<u8>>; 2], String> {
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

/// An etcd that lives answers in milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);
const LONGEST_ANSWER: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints() {
        let good = Client::new("etcd1:2379, http://10.0.0.2:2379/,[::1]:1").unwrap();
        let expected = ["http://etcd1:2379", "http://10.0.0.2:2379", "http://[::1]:1"];
        assert_eq!(good.endpoints, expected);
        assert_eq!(good.host(), "etcd1:2379");
        for bad in ["", "etcd1", "etcd1:", ":2379", "etcd1:2379,", "https://etcd1:2379", "a:1/b"] {
            assert!(Client::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn answers() {
        // As etcd 3.4 sends them.
        let absent = r#"{"header":{},"responses":[{"response_range":{"header":{},"kvs":[{"key":"Zm9v","value":"YmFy"}],"count":"1"}},{"response_range":{"header":{}}}]}"#;
        let done: Done = serde_json::from_str(absent).unwrap();
        assert!(!done.succeeded);
        assert_eq!(done.values().unwrap(), [Some(b"bar".to_vec()), None]);
        let put = r#"{"succeeded":true,"responses":[{"response_put":{"header":{}}}]}"#;
        let done: Done = serde_json::from_str(put).unwrap();
        assert!(done.succeeded && done.values().is_err());
        let alive: Kept = serde_json::from_str(r#"{"result":{"ID":"7","TTL":"3"}}"#).unwrap();
        let ended: Kept = serde_json::from_str(r#"{"result":{"ID":"7"}}"#).unwrap();
        assert!(alive.result.ttl.is_some() && ended.result.ttl.is_none());
    }
}
