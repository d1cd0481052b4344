//! Certificates for tests: an authority, a server of this host, and clients.

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair,
};
use tempfile::TempDir;

/// Certificate authority and the certificates that it has signed, as PEM files that are deleted on drop: `ca.pem`;
/// `server.pem` and `server-key.pem`, for localhost and 127.0.0.1; `client.pem` and `client-key.pem`, without a
/// CommonName; `named.pem` and `named-key.pem`, a client with one.
#[derive(Debug)]
pub struct Authority {
    folder: TempDir,
}

impl Authority {
    /// Creates an authority and its certificates.
    ///
    /// # Panics
    /// Panics if the temporary folder cannot be written.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each one is another")]
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let write = |name: &str, text: String| {
            std::fs::write(folder.path().join(name), text).expect("a file of the test");
        };
        let params = |names: Vec<String>| {
            let mut params = CertificateParams::new(names).expect("names of hosts");
            params.distinguished_name = DistinguishedName::new();
            params
        };
        let key = || KeyPair::generate().expect("random numbers");
        let mut authority = params(Vec::new());
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.distinguished_name.push(DnType::CommonName, "authority of a test");
        let root_key = key();
        let root = authority.self_signed(&root_key).expect("a certificate");
        write("ca.pem", root.pem());
        let issuer = Issuer::new(authority, root_key);
        let server = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let client = || vec!["brigade".to_owned()];
        for (name, names) in [("server", server), ("client", client()), ("named", client())] {
            let mut params = params(names);
            if name == "named" {
                params.distinguished_name.push(DnType::CommonName, "trainer");
            }
            let key = key();
            let certificate = params.signed_by(&key, &issuer).expect("a certificate");
            write(&format!("{name}.pem"), certificate.pem());
            write(&format!("{name}-key.pem"), key.serialize_pem());
        }
        Self { folder }
    }

    /// Returns the path of one of the files.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the folder of all files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}
