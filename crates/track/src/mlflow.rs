//! Tracker that sends a run to an MLflow server.

mod batch;
mod client;
mod sender;

use std::fmt;
#[cfg(feature = "https")]
use std::path::Path;
use std::time::{Duration, Instant};

use crate::opened::Opened;
use crate::{Config, Image, Outcome, Result, Run, Stamp, Table, TrackError, Tracker, Value};
use batch::{Entity, key};
use client::{Client, RunInfo};
use sender::Sender;

/// Sends a run to an MLflow server over its HTTP interface (`/api/2.0/mlflow`).
///
/// The project is the experiment, which is created if it does not exist; settings become parameters, numbers metrics,
/// texts tags. A thread of its own sends the logged values, many at a time, so a slow server does not delay training.
/// While the server is unreachable the thread tries again until the run ends; beyond 64 MiB of unsent data the oldest
/// values are dropped. At the start of a run, a server that does not answer is an error.
///
/// A loss is logged as a warning and does not end training, unless [`Mlflow::strict`] is set. MLflow allows letters,
/// digits and `_-. :/` in names; every other character becomes `_`.
///
/// ```no_run
/// use brigade_track::Mlflow;
///
/// let tracker = Mlflow::new("http://localhost:5000")?.run_name("first try");
/// # Ok::<(), brigade_track::TrackError>(())
/// ```
pub struct Mlflow {
    client: Client,
    run_name: Option<String>,
    resumed: Option<String>,
    strict: bool,
    finish_timeout: Duration,
    open: Opened<Open>,
}

/// Credentials for an MLflow server.
#[derive(Clone)]
pub enum Credentials {
    /// HTTP basic authentication: a user name and a password.
    Basic {
        /// Name of the user.
        user: String,
        /// Password of the user.
        password: String,
    },
    /// Token for HTTP bearer authentication.
    Bearer(String),
}

struct Open {
    run: RunInfo,
    sender: Sender,
}

impl Mlflow {
    /// Creates a tracker for the server at this address, like `http://host:5000`. `https` needs the feature `https`. A
    /// user name and password in the address become the credentials, and do not appear in error messages.
    ///
    /// [`TrackError::Address`] if `url` is not such an address.
    pub fn new(url: &str) -> Result<Self> {
        Ok(Self {
            client: Client::new(url)?,
            run_name: None,
            resumed: None,
            strict: false,
            finish_timeout: Duration::from_secs(10),
            open: Opened::none(NAME),
        })
    }

    /// Creates a tracker from MLflow's environment variables: the address from `MLFLOW_TRACKING_URI`, the credentials
    /// from `MLFLOW_TRACKING_TOKEN`, or from `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`. With the
    /// feature `https` also `MLFLOW_TRACKING_SERVER_CERT_PATH`, as `Mlflow::certificate`.
    ///
    /// # Errors
    /// [`TrackError::Address`] if the first variable is not set or is not the address of a server, and the errors of
    /// `Mlflow::certificate`.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let Some(url) = variable("MLFLOW_TRACKING_URI") else {
            return Err(TrackError::Address {
                url: String::new(),
                reason: "MLFLOW_TRACKING_URI is not set".to_owned(),
            });
        };
        let tracker = Self::new(&url)?;
        #[cfg(feature = "https")]
        let tracker = match variable("MLFLOW_TRACKING_SERVER_CERT_PATH") {
            Some(path) => tracker.certificate(path)?,
            None => tracker,
        };
        let name = variable("MLFLOW_TRACKING_USERNAME");
        let password = variable("MLFLOW_TRACKING_PASSWORD");
        Ok(match (variable("MLFLOW_TRACKING_TOKEN"), name, password) {
            (Some(token), ..) => tracker.credentials(&Credentials::Bearer(token)),
            (None, Some(user), Some(password)) => {
                tracker.credentials(&Credentials::Basic { user, password })
            }
            _ => tracker,
        })
    }

    /// Trusts only servers whose certificate was signed by one of the certificates in this PEM file. By default the
    /// certificate authorities that Mozilla trusts are used.
    ///
    /// # Errors
    /// [`TrackError::File`] when the file cannot be read, [`TrackError::Certificate`] when it contains no certificate.
    #[cfg(feature = "https")]
    pub fn certificate(mut self, path: impl AsRef<Path>) -> Result<Self> {
        self.client.trust(path.as_ref())?;
        Ok(self)
    }

    /// Sets the name that MLflow shows for the run. Defaults to a name that the server generates.
    #[must_use]
    pub fn run_name(mut self, name: impl Into<String>) -> Self {
        self.run_name = Some(name.into());
        self
    }

    /// Continues the existing run with this ID instead of creating a new one.
    #[must_use]
    pub fn resume(mut self, run_id: impl Into<String>) -> Self {
        self.resumed = Some(run_id.into());
        self
    }

    /// Sets the credentials for the server.
    #[must_use]
    pub fn credentials(mut self, credentials: &Credentials) -> Self {
        self.client.authorize(credentials);
        self
    }

    /// Makes values that could not be sent an error of the next call. Defaults to `false`: they are a warning in the
    /// log.
    #[must_use]
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Sets the time limit for the end of the run, in `finish` and when the tracker is dropped: for sending the
    /// remaining values and the run's final status together. Defaults to 10 s.
    #[must_use]
    pub fn finish_timeout(mut self, finish_timeout: Duration) -> Self {
        self.finish_timeout = finish_timeout;
        self
    }

    /// Returns the run's ID on the server, as [`Mlflow::resume`] takes it; `None` before the run has begun.
    #[must_use]
    pub fn run_id(&self) -> Option<&str> {
        self.open.running().map(|open| open.run.run_id.as_str())
    }

    fn parameters(&self, run: &RunInfo, config: &Config) -> Result<()> {
        let parameters =
            config.flat().into_iter().map(|(name, value)| Entity::parameter(&name, &value));
        for batch in batch::cut(&mut parameters.collect()) {
            match self.client.log_batch(&run.run_id, &batch, None) {
                // A resumed run has its parameters already, and MLflow does not change parameters.
                Err(TrackError::Refused { status: 400, reason, .. }) if self.resumed.is_some() => {
                    tracing::warn!(
                        "the run's settings differ from those of the run it continues: {reason}"
                    );
                }
                answer => answer?,
            }
        }
        Ok(())
    }

    fn push(&mut self, entity: Entity) -> Result<()> {
        let strict = self.strict;
        let open = self.open.get()?;
        open.sender.push(entity);
        match open.sender.failure() {
            Some(failure) if strict => Err(failure),
            _ => Ok(()),
        }
    }

    fn artifact(&mut self, what: &'static str, path: &str, bytes: Vec<u8>) -> Result<()> {
        let Some(folder) = self.open.get()?.run.artifacts() else {
            // Without an artifact proxy, clients write to the artifact store themselves, which may be of any kind.
            return Err(TrackError::Unsupported { tracker: NAME.to_owned(), what });
        };
        let path = format!("{folder}/{}", path.replace(['%', '?', '#', ' '], "_"));
        self.push(Entity::Artifact { path, bytes })
    }

    fn end(&mut self, outcome: Outcome) -> Result<()> {
        let mut open = self.open.take()?;
        let until = Instant::now() + self.finish_timeout;
        // A quarter of the time is reserved for the last request.
        let failure = open.sender.close(until - self.finish_timeout / 4);
        let ended = self.client.set_terminated(&open.run.run_id, outcome, Stamp::now(), until);
        match failure.or_else(|| ended.err()) {
            Some(failure) if self.strict => Err(failure),
            Some(failure) => {
                tracing::warn!("{failure}");
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Tracker for Mlflow {
    fn name(&self) -> &str {
        NAME
    }

    fn start(&mut self, run: &Run) -> Result<()> {
        let info = match &self.resumed {
            Some(run_id) => self.client.resume_run(run_id)?,
            None => {
                let experiment = self.client.experiment(&run.project)?;
                let began = Stamp { step: None, time: run.began };
                self.client.create_run(&experiment, self.run_name.as_deref(), began)?
            }
        };
        self.parameters(&info, &run.config)?;
        let sender = Sender::spawn(self.client.clone(), info.run_id.clone())?;
        self.open.set(Open { run: info, sender });
        Ok(())
    }

    fn log(&mut self, values: &[(String, Value)], at: Stamp) -> Result<()> {
        for (name, value) in values {
            self.push(match value.number() {
                Some(number) => Entity::metric(name, number, at),
                None => Entity::tag(name, &value.text()),
            })?;
        }
        Ok(())
    }

    fn log_text(&mut self, name: &str, text: &str, at: Stamp) -> Result<()> {
        self.artifact("text", &place(name, at, "txt"), text.as_bytes().to_vec())
    }

    fn log_image(&mut self, name: &str, image: &Image, at: Stamp) -> Result<()> {
        self.artifact("images", &format!("images/{}", place(name, at, "png")), image.png()?)
    }

    fn log_table(&mut self, name: &str, table: &Table, at: Stamp) -> Result<()> {
        self.artifact("tables", &place(name, at, "json"), table.json().to_string().into_bytes())
    }

    fn finish(&mut self, outcome: Outcome) -> Result<()> {
        self.end(outcome)
    }
}

/// A run that is dropped before `finish` is marked as failed.
impl Drop for Mlflow {
    fn drop(&mut self) {
        if self.open.running().is_some() {
            let _ = self.end(Outcome::Failed);
        }
    }
}

impl fmt::Debug for Mlflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mlflow")
            .field("url", &self.client.url())
            .field("run_id", &self.run_id())
            .finish_non_exhaustive()
    }
}

/// Leaves out the password and the token.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Basic { user, .. } => {
                f.debug_struct("Basic").field("user", user).finish_non_exhaustive()
            }
            Self::Bearer(_) => f.debug_tuple("Bearer").finish_non_exhaustive(),
        }
    }
}

/// Returns the artifact path of a value that was logged at a step.
fn place(name: &str, at: Stamp, ending: &str) -> String {
    match at.step {
        Some(step) => format!("{}-{step}.{ending}", key(name)),
        None => format!("{}.{ending}", key(name)),
    }
}

const NAME: &str = "mlflow";

#[cfg(test)]
mod tests {
    use super::*;

    fn made(variables: &'static [(&str, &str)]) -> Result<Mlflow> {
        Mlflow::from_variables(|name| {
            variables.iter().find(|it| it.0 == name).map(|it| it.1.to_owned())
        })
    }

    #[test]
    fn mlflows_own_variables_set_server_and_credentials() {
        let made =
            |variables| made(variables).map(|it| it.client.authorization().map(str::to_owned));
        assert_eq!(made(&[("MLFLOW_TRACKING_URI", "http://a:5000/")]).unwrap(), None);
        let bearer = made(&[
            ("MLFLOW_TRACKING_URI", "http://a"),
            ("MLFLOW_TRACKING_TOKEN", "t"),
            ("MLFLOW_TRACKING_USERNAME", "me"),
        ]);
        assert_eq!(bearer.unwrap().as_deref(), Some("Bearer t"));
        let basic = made(&[
            ("MLFLOW_TRACKING_URI", "http://a"),
            ("MLFLOW_TRACKING_USERNAME", "me"),
            ("MLFLOW_TRACKING_PASSWORD", "secret"),
        ]);
        assert_eq!(basic.unwrap().as_deref(), Some("Basic bWU6c2VjcmV0"));
        let error = made(&[]).unwrap_err().to_string();
        assert!(error.contains("MLFLOW_TRACKING_URI is not set"), "{error}");
        // MLflow's own client accepts a folder, too; there is no server to send requests to.
        let folder = made(&[("MLFLOW_TRACKING_URI", "file:///tmp/runs")]);
        assert!(matches!(folder, Err(TrackError::Address { .. })));
    }
}
