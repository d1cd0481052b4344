//! Settings of the access to etcd: TLS, certificates and user.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use ureq::tls::{Certificate, ClientCert, PemItem, RootCerts, TlsConfig, parse_pem};

/// Settings of the access to etcd: TLS, certificates and user.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct EtcdAccess {
    /// `true` to use TLS also for endpoints that do not begin with `https://`.
    pub tls: bool,
    /// File with the certificates (PEM) of the authorities that sign etcd's certificate. Defaults to Mozilla's list of
    /// public authorities.
    pub ca_file: Option<PathBuf>,
    /// File with this client's certificate and intermediate certificates (PEM), if etcd requires one.
    pub cert_file: Option<PathBuf>,
    /// File with the private key of the client's certificate (PEM). Defaults to `cert_file`, which then contains it,
    /// too.
    pub key_file: Option<PathBuf>,
    /// Name of the etcd user, where etcd has users.
    pub user: Option<String>,
    /// Password of the etcd user.
    pub password: Option<String>,
}

/// Error for an etcd that cannot be used. None of these errors goes away by waiting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EtcdError {
    /// The endpoints are not valid addresses of an etcd.
    #[error("`{part}` in `{endpoints}` is not the address of an etcd: write it as HOST:PORT")]
    BadEndpoint {
        /// Part of the text that is wrong.
        part: String,
        /// Whole text of the endpoints.
        endpoints: String,
    },
    /// A file of certificates or keys cannot be read.
    #[error("cannot read {what} from {}: {source}", path.display())]
    Unreadable {
        /// Expected content of the file.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file does not contain the expected certificates or key.
    #[error("{} holds no {what} in PEM form{reason}", path.display())]
    NotPem {
        /// Expected content of the file.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem. May be empty.
        reason: String,
    },
    /// A private key was given without a certificate.
    #[error("a key for etcd was given ({}) without a certificate: add cert=FILE", path.display())]
    KeyAlone {
        /// Path of the private key's file.
        path: PathBuf,
    },
    /// etcd's certificate is not signed by a trusted authority, or belongs to another host.
    #[error(
        "the certificate of etcd at {endpoint} is not trusted ({reason}): give the certificate of its \
         authority with --rdzv-conf cacert=FILE, and use a host name that its certificate contains"
    )]
    Untrusted {
        /// Endpoint of the etcd member.
        endpoint: String,
        /// Error of the TLS library.
        reason: String,
    },
    /// etcd requires a client certificate, or a different one.
    #[error(
        "etcd at {endpoint} does not accept this client's certificate ({reason}): give one that its \
         authority has signed with --rdzv-conf cert=FILE,key=FILE"
    )]
    ClientCertificate {
        /// Endpoint of the etcd member.
        endpoint: String,
        /// Error of the TLS library.
        reason: String,
    },
    /// Only one side uses TLS, or the TLS versions differ.
    #[error(
        "etcd at {endpoint} and this host do not agree on TLS ({reason}): use https:// or --rdzv-conf \
         protocol=https for TLS, and http:// without TLS"
    )]
    NotTls {
        /// Endpoint of the etcd member.
        endpoint: String,
        /// Description of the failure.
        reason: String,
    },
    /// etcd requires a user and none was given, or the password is wrong.
    #[error(
        "etcd at {endpoint} refuses {}: {reason}; give --rdzv-conf user=NAME and the password in \
         BRIGADE_ETCD_PASSWORD or --rdzv-conf password-file=FILE",
        named(user.as_deref())
    )]
    Denied {
        /// Endpoint of the etcd member.
        endpoint: String,
        /// Name of the etcd user, if one was given.
        user: Option<String>,
        /// Reason that etcd gives.
        reason: String,
    },
    /// The user has no permission for the job's keys.
    #[error(
        "etcd at {endpoint} does not let {} write keys that begin with /brigade/: {reason}",
        named(user.as_deref())
    )]
    Forbidden {
        /// Endpoint of the etcd member.
        endpoint: String,
        /// Name of the etcd user, if one was given.
        user: Option<String>,
        /// Reason that etcd gives.
        reason: String,
    },
}

fn named(user: Option<&str>) -> String {
    user.map_or_else(|| "a client without a user".to_owned(), |user| format!("user `{user}`"))
}

impl EtcdAccess {
    /// Reads the files. Returns `None` if no setting of TLS is given, except that TLS is used.
    pub(super) fn tls_config(&self) -> Result<Option<TlsConfig>, EtcdError> {
        if let (Some(path), None) = (&self.key_file, &self.cert_file) {
            return Err(EtcdError::KeyAlone { path: path.clone() });
        }
        if self.ca_file.is_none() && self.cert_file.is_none() {
            return Ok(None);
        }
        let mut tls = TlsConfig::builder();
        if let Some(path) = &self.ca_file {
            tls = tls.root_certs(RootCerts::from(certificates("certificate", path)?));
        }
        if let Some(path) = &self.cert_file {
            let chain = certificates("certificate", path)?;
            let path = self.key_file.as_ref().unwrap_or(path);
            let mut keys = items("private key", path)?.into_iter().filter_map(|item| match item {
                PemItem::PrivateKey(key) => Some(key),
                _ => None,
            });
            let key = keys.next().ok_or_else(|| EtcdError::NotPem {
                what: "private key",
                path: path.clone(),
                reason: String::new(),
            })?;
            tls = tls.client_cert(Some(ClientCert::new_with_certs(&chain, key)));
        }
        Ok(Some(tls.build()))
    }
}

fn certificates(what: &'static str, path: &Path) -> Result<Vec<Certificate<'static>>, EtcdError> {
    let certificates: Vec<_> = items(what, path)?
        .into_iter()
        .filter_map(|item| match item {
            PemItem::Certificate(certificate) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        return Err(EtcdError::NotPem { what, path: path.into(), reason: String::new() });
    }
    Ok(certificates)
}

fn items(what: &'static str, path: &Path) -> Result<Vec<PemItem<'static>>, EtcdError> {
    let text = fs::read(path).map_err(|source| EtcdError::Unreadable {
        what,
        path: path.into(),
        source,
    })?;
    parse_pem(&text).collect::<Result<_, _>>().map_err(|error| EtcdError::NotPem {
        what,
        path: path.into(),
        reason: format!(": {error}"),
    })
}

/// Formats the settings without the password.
impl fmt::Debug for EtcdAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdAccess")
            .field("tls", &self.tls)
            .field("ca_file", &self.ca_file)
            .field("cert_file", &self.cert_file)
            .field("key_file", &self.key_file)
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}
