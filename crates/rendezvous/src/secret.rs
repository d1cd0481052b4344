//! The secret that the agents of a job share, and the key that is derived from it.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;
use sha2::{Digest, Sha256};

/// Secret that all agents of a job share: the pre-shared key of their rendezvous over TCP.
///
/// An agent and the coordinator each prove to the other that they have it, without sending it or anything that depends
/// on it alone. A host that reaches the port and does not have the secret can neither join the job, nor pose as its
/// coordinator, nor read or change messages.
///
/// It is not stretched: an attacker that records a handshake can try guesses at the speed of a hash function. So
/// it must be random and long, as [`Secret::generate`] or `openssl rand -hex 32` make it; a text of
/// fewer than [`Secret::MIN_LEN`] bytes is refused.
///
/// ```
/// use brigade_rendezvous::Secret;
/// let secret = Secret::new("8e1f2b7c90aa5d43\n")?;
/// assert_eq!(secret, Secret::new("8e1f2b7c90aa5d43")?);
/// assert_eq!(format!("{secret:?}"), "Secret(..)");
/// assert!(Secret::new("too short").is_err());
/// # Ok::<(), brigade_rendezvous::SecretError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    bytes: Vec<u8>,
}

/// Error for a text or a file that cannot be the secret of a job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// The secret is empty, or too short to withstand guesses.
    #[error(
        "the secret of the job has {length} bytes, at least {} are needed: `openssl rand -hex 32` \
         makes a good one",
        Secret::MIN_LEN
    )]
    TooShort {
        /// Length in bytes, without surrounding white space.
        length: usize,
    },
    /// The text is longer than any secret, so it is probably the wrong file.
    #[error(
        "the secret of the job has more than {} bytes: is this the right file?",
        Secret::MAX_LEN
    )]
    TooLong,
    /// The file cannot be read.
    #[error("cannot read the secret in {}: {source}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The file belongs to this user, and other users may read or change it.
    #[error(
        "the file {} holds a secret, and its mode {mode:03o} lets other users read or change it: run \
         `chmod 600 {}`",
        path.display(), path.display()
    )]
    TooOpen {
        /// Path of the file.
        path: PathBuf,
        /// Permission bits of the file.
        mode: u32,
    },
    /// The operating system has no source of random numbers.
    #[error("cannot get random numbers from the system for the secret of the job: {0}")]
    NoRandom(io::Error),
}

impl Secret {
    /// Minimum length of a secret in bytes.
    pub const MIN_LEN: usize = 16;
    /// Maximum length of a secret in bytes.
    pub const MAX_LEN: usize = 4096;

    /// Creates a secret from a text, without surrounding white space.
    ///
    /// # Errors
    /// What is left has fewer than [`Secret::MIN_LEN`] or more than [`Secret::MAX_LEN`] bytes.
    pub fn new(text: impl AsRef<[u8]>) -> Result<Self, SecretError> {
        let bytes = text.as_ref().trim_ascii();
        match bytes.len() {
            length if length < Self::MIN_LEN => Err(SecretError::TooShort { length }),
            length if length > Self::MAX_LEN => Err(SecretError::TooLong),
            _ => Ok(Self { bytes: bytes.to_vec() }),
        }
    }

    /// Generates a secret of 256 random bits, written as 64 hexadecimal digits.
    ///
    /// # Errors
    /// The system has no source of random numbers.
    pub fn generate() -> Result<Self, SecretError> {
        let mut random = [0; 32];
        getrandom::fill(&mut random)
            .map_err(|error| SecretError::NoRandom(io::Error::other(error)))?;
        Ok(Self { bytes: hex(&random).into_bytes() })
    }

    /// Reads a secret from a file, without surrounding white space.
    ///
    /// Its mode is checked as ssh checks that of a private key: a regular file that belongs to this
    /// user must not be accessible to its group or to others.
    ///
    /// # Errors
    /// The file cannot be read, others may read it, or its length is not that of a secret.
    pub fn from_file(path: &Path) -> Result<Self, SecretError> {
        Self::new(read_private(path)?)
    }

    /// Returns the bytes of the secret, for an encrypted channel or a file that only this user can read.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.bytes
    }

    /// Derives the pre-shared key of the handshake.
    pub(crate) fn key(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(KEY_DOMAIN);
        hash.update(&self.bytes);
        hash.finalize().into()
    }
}

/// Shows that there is one, and nothing of it.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Reads a password from a file, without surrounding white space. The file's mode is checked like that of a secret's
/// file ([`Secret::from_file`]).
///
/// # Errors
/// The file cannot be read, others may read it, or it is not text.
pub fn private_text(path: &Path) -> Result<String, SecretError> {
    let text = String::from_utf8(read_private(path)?).map_err(|_| SecretError::Unreadable {
        path: path.into(),
        source: io::Error::other("it is not text in UTF-8"),
    })?;
    Ok(text.trim().to_owned())
}

/// The first bytes of a file that only its owner may read, if that is this user.
fn read_private(path: &Path) -> Result<Vec<u8>, SecretError> {
    let unreadable = |source| SecretError::Unreadable { path: path.into(), source };
    // The mode is read from the open file, because its name may belong to another file by then.
    let file = File::open(path).map_err(unreadable)?;
    let about = file.metadata().map_err(unreadable)?;
    let mode = about.mode() & 0o7777;
    if about.is_file() && about.uid() == geteuid().as_raw() && mode & 0o077 != 0 {
        return Err(SecretError::TooOpen { path: path.into(), mode });
    }
    let mut text = Vec::new();
    // Reads more than the maximum length, because white space around the secret does not count.
    file.take(2 * Secret::MAX_LEN as u64).read_to_end(&mut text).map_err(unreadable)?;
    Ok(text)
}

/// Returns a random name that no other process has chosen: the prefix, `-` and 64 random bits in hexadecimal digits.
///
/// # Errors
/// The system has no source of random numbers.
///
/// ```
/// let name = brigade_rendezvous::random_name("job")?;
/// assert_eq!((name.len(), &name[..4]), (20, "job-"));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn random_name(prefix: &str) -> io::Result<String> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    Ok(format!("{prefix}-{}", hex(&random)))
}

/// Formats bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Prefix for the derivation of the key, so that no other program derives the same key from the same secret.
const KEY_DOMAIN: &[u8] = b"brigade rendezvous 3\0";

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn keys_differ_as_secrets_do() {
        let key = |text: &str| Secret::new(text).unwrap().key();
        assert_eq!(key("known to all of us"), key(" known to all of us\n"));
        assert_ne!(key("known to all of us"), key("known to all of them"));
        // Computed with Python: hashlib.sha256(b"brigade rendezvous 3\0" + b"0123456789abcdef").
        assert_eq!(hex(&key("0123456789abcdef")), GOLDEN);
    }

    const GOLDEN: &str = "251ebfda866113d3a5195f466da8987dd1fec233d13cdf44bf46461bfd9cfc78";

    #[test]
    fn generated_secrets_differ_and_are_text() {
        let (one, other) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        assert_ne!(one, other);
        assert_eq!(one.expose().len(), 64);
        assert_eq!(Secret::new(one.expose()).unwrap(), one);
        assert_ne!(random_name("a").unwrap(), random_name("a").unwrap());
    }

    #[test]
    fn lengths() {
        assert!(matches!(Secret::new(" \n"), Err(SecretError::TooShort { length: 0 })));
        assert!(matches!(Secret::new([b'x'; 15]), Err(SecretError::TooShort { length: 15 })));
        assert!(Secret::new([b'x'; 16]).is_ok() && Secret::new([b'x'; 4096]).is_ok());
        assert!(matches!(Secret::new([b'x'; 4097]), Err(SecretError::TooLong)));
    }

    #[test]
    fn files_are_read() {
        let error = Secret::from_file(Path::new("/no/such/file")).unwrap_err();
        let expected = "cannot read the secret in /no/such/file: ";
        assert!(error.to_string().starts_with(expected), "{error}");
        // A device is not a file of this user, whatever its mode.
        let empty = Secret::from_file(Path::new("/dev/null"));
        assert!(matches!(empty, Err(SecretError::TooShort { length: 0 })), "{empty:?}");
        let endless = Secret::from_file(Path::new("/dev/zero"));
        assert!(matches!(endless, Err(SecretError::TooLong)), "{endless:?}");
    }

    #[test]
    fn a_file_that_others_may_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        for (mode, is_good) in
            [(0o600, true), (0o400, true), (0o640, false), (0o604, false), (0o620, false)]
        {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            match Secret::from_file(&path) {
                Ok(secret) => {
                    assert!(is_good, "{mode:o}");
                    assert_eq!(secret.expose(), b"0123456789abcdef");
                }
                Err(error) => {
                    assert!(!is_good, "{mode:o}: {error}");
                    let text = error.to_string();
                    let mode = format!("its mode {mode:o} lets other users read or change it");
                    assert!(text.contains(&mode) && text.contains("`chmod 600 "), "{text}");
                }
            }
        }
    }
}
