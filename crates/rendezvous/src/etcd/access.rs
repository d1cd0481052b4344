//! How an etcd is spoken to: over TLS, with which certificates, and as which user.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use ureq::tls::{Certificate, ClientCert, PemItem, RootCerts, TlsConfig, parse_pem};

/// How an etcd is spoken to.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct EtcdAccess {
    /// Over TLS, also where an endpoint does not begin with `https://`.
    pub tls: bool,
    /// File with the certificates (PEM) of the authorities that etcd's own may be signed by. Default:
    /// Mozilla's list of public authorities.
    pub ca_file: Option<PathBuf>,
    /// File with this client's certificate and those in between (PEM), where etcd asks for one.
    pub cert_file: Option<PathBuf>,
    /// File with the private key of that certificate (PEM). Default: it is in `cert_file`, too.
    pub key_file: Option<PathBuf>,
    /// Name of the user, where etcd has users.
    pub user: Option<String>,
    /// The user's password.
    pub password: Option<String>,
}

/// Why an etcd cannot be used. None of these goes away by waiting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EtcdError {
    /// It cannot be the address of an etcd.
    #[error("`{part}` in `{endpoints}` is not the address of an etcd: write it as HOST:PORT")]
    BadEndpoint {
        /// The part that is wrong.
        part: String,
        /// All of it.
        endpoints: String,
    },
    /// A file of certificates or keys cannot be read.
    #[error("cannot read {what} from {}: {source}", path.display())]
    Unreadable {
        /// What should be in it.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file does not hold what it should.
    #[error("{} holds no {what} in PEM form{reason}", path.display())]
    NotPem {
        /// What should be in it.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong, or nothing.
        reason: String,
    },
    /// A key without a certificate.
    #[error("a key for etcd was given ({}) and no certificate: give cert=FILE, too", path.display())]
    KeyAlone {
        /// The file of the key.
        path: PathBuf,
    },
    /// etcd's certificate is not signed by an authority that is trusted, or is another host's.
    #[error(
        "the certificate of etcd at {endpoint} is not trusted ({reason}): give the file of its \
         authority with --rdzv-conf cacert=FILE, and name it as its certificate does"
    )]
    Untrusted {
        /// Which member.
        endpoint: String,
        /// What TLS says.
        reason: String,
    },
    /// etcd wants a certificate of this client, or another one.
    #[error(
        "etcd at {endpoint} does not accept this client's certificate ({reason}): give one that its \
         authority has signed with --rdzv-conf cert=FILE,key=FILE"
    )]
    ClientCertificate {
        /// Which member.
        endpoint: String,
        /// What TLS says.
        reason: String,
    },
    /// One side speaks TLS and the other does not, or not the same version.
    #[error(
        "etcd at {endpoint} and this host do not agree on TLS ({reason}): with https:// or \
         --rdzv-conf protocol=https it is used, else not"
    )]
    NotTls {
        /// Which member.
        endpoint: String,
        /// What was seen.
        reason: String,
    },
    /// etcd has users, and none was given, or the password is not the user's.
    #[error(
        "etcd at {endpoint} refuses {}: {reason}; give --rdzv-conf user=NAME and the password in \
         BRIGADE_ETCD_PASSWORD or --rdzv-conf password-file=FILE",
        named(user.as_deref())
    )]
    Denied {
        /// Which member.
        endpoint: String,
        /// The user's name.
        user: Option<String>,
        /// etcd's words.
        reason: String,
    },
    /// The user may not use the job's keys.
    #[error(
        "etcd at {endpoint} does not let {} write keys that begin with /brigade/: {reason}",
        named(user.as_deref())
    )]
    Forbidden {
        /// Which member.
        endpoint: String,
        /// The user's name.
        user: Option<String>,
        /// etcd's words.
        reason: String,
    },
}

fn named(user: Option<&str>) -> String {
    user.map_or_else(|| "a client without a user".to_owned(), |user| format!("user `{user}`"))
}

impl EtcdAccess {
    /// Reads the files. `None`: nothing was said of TLS but, perhaps, that it is used.
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

/// Without the password.
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
