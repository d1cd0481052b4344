//! What the agents of a job know and nobody else does.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// A secret that all agents of a job share.
///
/// An agent and the coordinator each prove to the other that they know it, without sending it. So a
/// stranger who can reach the port can neither join the job nor pose as its coordinator. It does
/// not encrypt: who can read or change what goes over the network is not kept out.
///
/// Where no secret is given, the name of the job stands in for it. That keeps two jobs apart which
/// meet at one port by mistake, and keeps nobody out who knows or guesses the name.
///
/// ```
/// use brigade_rendezvous::Secret;
/// let secret = Secret::new("8e1f-2b7c-90aa")?;
/// assert_eq!(format!("{secret:?}"), "Secret(given)");
/// assert!(Secret::new("  \n").is_err());
/// # Ok::<(), brigade_rendezvous::SecretError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    bytes: Vec<u8>,
    given: bool,
}

/// A secret that is none.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// Nothing in it.
    #[error("the secret is empty: write something long and random into it")]
    Empty,
    /// The file cannot be read.
    #[error("the secret cannot be read from {path}: {source}")]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Secret {
    /// This text, without white space around it.
    ///
    /// # Errors
    /// Nothing is left of it.
    pub fn new(text: impl AsRef<[u8]>) -> Result<Self, SecretError> {
        let bytes = text.as_ref().trim_ascii();
        if bytes.is_empty() {
            return Err(SecretError::Empty);
        }
        Ok(Self { bytes: bytes.to_vec(), given: true })
    }

    /// What stands in this file, without white space around it.
    ///
    /// # Errors
    /// The file cannot be read or is empty.
    pub fn from_file(path: &Path) -> Result<Self, SecretError> {
        let unreadable = |source| SecretError::Unreadable { path: path.into(), source };
        Self::new(fs::read(path).map_err(unreadable)?)
    }

    /// The name of the job, where there is no secret.
    #[must_use]
    pub fn of_run_id(run_id: &str) -> Self {
        Self { bytes: run_id.into(), given: false }
    }

    /// A proof of this secret that is good for one connection and one side of it.
    pub(crate) fn proof(&self, side: Side, nonces: &Nonces) -> Vec<u8> {
        self.mac(side, nonces).finalize().into_bytes().to_vec()
    }

    /// Takes the same time for every wrong proof.
    pub(crate) fn is_proved(&self, proof: &[u8], side: Side, nonces: &Nonces) -> bool {
        self.mac(side, nonces).verify_slice(proof).is_ok()
    }

    fn mac(&self, side: Side, nonces: &Nonces) -> Hmac<Sha256> {
        let mac = Hmac::<Sha256>::new_from_slice(&self.bytes);
        let mut mac = mac.expect("HMAC takes keys of any length");
        let side: &[u8] = match side {
            Side::Agent => b"brigade agent\0",
            Side::Coordinator => b"brigade coordinator\0",
        };
        for part in [side, &[u8::from(self.given)], &nonces.agent, &nonces.coordinator] {
            mac.update(part);
        }
        mac
    }
}

/// Not what it is.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({})", if self.given { "given" } else { "the run id" })
    }
}

/// Who proves; else one side could send back what the other has sent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    Agent,
    Coordinator,
}

/// Random numbers of both sides, so that no proof is good twice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Nonces {
    pub(crate) agent: Nonce,
    pub(crate) coordinator: Nonce,
}

pub(crate) type Nonce = [u8; 32];

/// A number that nobody can foresee. Fails where the system has no source of them.
pub(crate) fn nonce() -> io::Result<Nonce> {
    let mut nonce = Nonce::default();
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_good_once_for_one_side() {
        let secret = Secret::new("known to us\n").unwrap();
        let nonces = Nonces { agent: [1; 32], coordinator: [2; 32] };
        let proof = secret.proof(Side::Agent, &nonces);
        assert!(secret.is_proved(&proof, Side::Agent, &nonces));
        assert!(Secret::new("known to us").unwrap().is_proved(&proof, Side::Agent, &nonces));
        assert!(!secret.is_proved(&proof, Side::Coordinator, &nonces));
        assert!(!secret.is_proved(&proof[..31], Side::Agent, &nonces));
        assert!(!secret.is_proved(&[], Side::Agent, &nonces));
        let other = Nonces { coordinator: [3; 32], ..nonces };
        assert!(!secret.is_proved(&proof, Side::Agent, &other));
        assert!(!Secret::new("guessed").unwrap().is_proved(&proof, Side::Agent, &nonces));
        // A secret that happens to be the name of the job.
        assert!(!Secret::of_run_id("known to us").is_proved(&proof, Side::Agent, &nonces));
    }

    #[test]
    fn the_proof_is_hmac_sha256() {
        let nonces = Nonces { agent: [0x61; 32], coordinator: [0x62; 32] };
        let proof = Secret::new("key").unwrap().proof(Side::Agent, &nonces);
        let hex: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, GOLDEN);
    }

    /// Of Python's hmac.new(b"key", b"brigade agent\0\x01" + b"a"*32 + b"b"*32, "sha256").
    const GOLDEN: &str = "f6dcd9da9b4e0a1bfb99756bf3fc6bd384abae691f82e641ada3ff5988b7f253";

    #[test]
    fn files_are_read() {
        let error = Secret::from_file(Path::new("/no/such/file")).unwrap_err();
        assert!(error.to_string().starts_with("the secret cannot be read from /no/such/file: "));
        assert!(matches!(Secret::from_file(Path::new("/dev/null")), Err(SecretError::Empty)));
    }

    #[test]
    fn nonces_differ() {
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }
}
