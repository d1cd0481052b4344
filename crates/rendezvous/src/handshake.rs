//! How an agent and the coordinator prove to each other over TCP that they belong together.
//!
//! The agent proves first: a stranger who only knocks gets nothing to guess the secret from.

use std::io;

use serde::{Deserialize, Serialize};

use crate::secret::{Nonce, Nonces, Secret, Side, nonce};
use crate::{Join, PROTOCOL};

/// What the agent says before it joins.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromGuest {
    Hello {
        protocol: u32,
        version: String,
        run_id: String,
        host: String,
        nonce: Nonce,
    },
    Proof {
        #[serde(with = "serde_bytes")]
        proof: Vec<u8>,
    },
}

/// What the coordinator says before the agent has joined.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromDoor {
    Challenge {
        protocol: u32,
        version: String,
        nonce: Nonce,
    },
    Proof {
        #[serde(with = "serde_bytes")]
        proof: Vec<u8>,
    },
    Denied {
        reason: String,
    },
}

/// No message of the handshake is longer.
pub(crate) const LONGEST: usize = 4 << 10;

/// The coordinator's side of one connection.
#[derive(Debug)]
pub(crate) struct Door {
    nonces: Nonces,
    guest: Option<(String, String)>,
}

/// What follows from a guest's message.
#[derive(Debug)]
pub(crate) enum Step {
    /// Say this and wait for more.
    Answer(FromDoor),
    /// Say this; the agent may join.
    Open(FromDoor),
    /// Say this and close; the text is for the user here.
    Shut(FromDoor, String),
}

impl Door {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { nonces: Nonces { coordinator: nonce()?, ..Nonces::default() }, guest: None })
    }

    pub(crate) fn hear(&mut self, message: FromGuest, secret: &Secret, run_id: &str) -> Step {
        match (message, self.guest.take()) {
            (FromGuest::Hello { protocol, version, run_id, host, nonce }, None) => {
                if protocol != PROTOCOL {
                    let own = env!("CARGO_PKG_VERSION");
                    return shut(format!(
                        "{host} has brigade {version} (protocol {protocol}), the coordinator has \
                         {own} (protocol {PROTOCOL}): install the same version on all hosts"
                    ));
                }
                self.nonces.agent = nonce;
                self.guest = Some((host, run_id));
                Step::Answer(FromDoor::Challenge {
                    protocol: PROTOCOL,
                    version: env!("CARGO_PKG_VERSION").into(),
                    nonce: self.nonces.coordinator,
                })
            }
            (FromGuest::Proof { proof }, Some((host, theirs))) => {
                if secret.is_proved(&proof, Side::Agent, &self.nonces) {
                    let proof = secret.proof(Side::Coordinator, &self.nonces);
                    return Step::Open(FromDoor::Proof { proof });
                }
                shut(format!(
                    "{host} (job `{theirs}`) does not know the secret of the job `{run_id}`: give \
                     all hosts the same --rdzv-id, and the same BRIGADE_RDZV_SECRET if any"
                ))
            }
            (FromGuest::Hello { .. }, Some(_)) | (FromGuest::Proof { .. }, None) => {
                shut("an agent spoke out of turn".into())
            }
        }
    }
}

fn shut(reason: String) -> Step {
    Step::Shut(FromDoor::Denied { reason: reason.clone() }, reason)
}

/// The agent's side.
#[derive(Debug)]
pub(crate) struct Guest<'a> {
    secret: &'a Secret,
    nonces: Nonces,
    proved: bool,
}

/// What follows from the coordinator's message.
#[derive(Debug)]
pub(crate) enum Reply {
    Say(FromGuest),
    /// It knows the secret, too.
    Welcome,
    Denied(String),
    /// It does not know the secret.
    Impostor,
}

impl<'a> Guest<'a> {
    pub(crate) fn new(secret: &'a Secret) -> io::Result<Self> {
        let nonces = Nonces { agent: nonce()?, ..Nonces::default() };
        Ok(Self { secret, nonces, proved: false })
    }

    pub(crate) fn hello(&self, run_id: &str, host: &str) -> FromGuest {
        let Join { protocol, version, .. } = Join::new(host);
        let (run_id, host, nonce) = (run_id.into(), host.into(), self.nonces.agent);
        FromGuest::Hello { protocol, version, run_id, host, nonce }
    }

    pub(crate) fn hear(&mut self, message: FromDoor) -> Reply {
        match message {
            FromDoor::Challenge { nonce, .. } if !self.proved => {
                self.proved = true;
                self.nonces.coordinator = nonce;
                let proof = self.secret.proof(Side::Agent, &self.nonces);
                Reply::Say(FromGuest::Proof { proof })
            }
            FromDoor::Proof { proof } if self.proved => {
                if self.secret.is_proved(&proof, Side::Coordinator, &self.nonces) {
                    Reply::Welcome
                } else {
                    Reply::Impostor
                }
            }
            FromDoor::Denied { reason } => Reply::Denied(reason),
            FromDoor::Challenge { .. } | FromDoor::Proof { .. } => Reply::Impostor,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets both sides talk until one of them is done.
    fn meet(guest: &Secret, door: &Secret) -> Result<(), String> {
        let mut inside = Door::new().unwrap();
        let mut outside = Guest::new(guest).unwrap();
        let mut said = outside.hello("theirs", "node2");
        loop {
            let answer = match inside.hear(said, door, "ours") {
                Step::Answer(answer) | Step::Open(answer) | Step::Shut(answer, _) => answer,
            };
            match outside.hear(answer) {
                Reply::Say(next) => said = next,
                Reply::Welcome => return Ok(()),
                Reply::Denied(reason) => return Err(reason),
                Reply::Impostor => return Err("impostor".into()),
            }
        }
    }

    #[test]
    fn who_knows_the_secret_comes_in() {
        let secret = |text: &str| Secret::new(text).unwrap();
        meet(&secret("a"), &secret("a")).unwrap();
        let reason = meet(&secret("a"), &secret("b")).unwrap_err();
        assert_eq!(
            reason,
            "node2 (job `theirs`) does not know the secret of the job `ours`: give all hosts the \
             same --rdzv-id, and the same BRIGADE_RDZV_SECRET if any"
        );
        assert!(meet(&Secret::of_run_id("a"), &Secret::of_run_id("b")).is_err());
    }

    #[test]
    fn a_coordinator_that_does_not_know_it_is_found_out() {
        let secret = Secret::new("a").unwrap();
        let mut guest = Guest::new(&secret).unwrap();
        let early = guest.hear(FromDoor::Proof { proof: vec![0; 32] });
        assert!(matches!(early, Reply::Impostor), "it has not asked");
        let nonce = guest.nonces.agent;
        let challenge = |nonce| FromDoor::Challenge { protocol: 1, version: String::new(), nonce };
        let Reply::Say(FromGuest::Proof { proof }) = guest.hear(challenge(nonce)) else { panic!() };
        // It sends back what it got.
        assert!(matches!(guest.hear(FromDoor::Proof { proof }), Reply::Impostor));
        assert!(matches!(guest.hear(challenge([0; 32])), Reply::Impostor));
    }

    #[test]
    fn agents_keep_the_order() {
        let secret = Secret::new("a").unwrap();
        let mut door = Door::new().unwrap();
        let proof = FromGuest::Proof { proof: Vec::new() };
        assert!(matches!(door.hear(proof, &secret, "ours"), Step::Shut(..)));
        let guest = Guest::new(&secret).unwrap();
        let mut door = Door::new().unwrap();
        let first = door.hear(guest.hello("ours", "n"), &secret, "ours");
        assert!(matches!(first, Step::Answer(_)));
        let again = door.hear(guest.hello("ours", "n"), &secret, "ours");
        assert!(matches!(again, Step::Shut(..)));
    }

    #[test]
    fn another_protocol_is_named() {
        let secret = Secret::new("a").unwrap();
        let hello = FromGuest::Hello {
            protocol: 9,
            version: "9.1".into(),
            run_id: "ours".into(),
            host: "node2".into(),
            nonce: [0; 32],
        };
        let Step::Shut(_, reason) = Door::new().unwrap().hear(hello, &secret, "ours") else {
            panic!("it was let in")
        };
        assert!(reason.starts_with("node2 has brigade 9.1 (protocol 9), the coordinator has "));
    }
}
