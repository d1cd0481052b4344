//! Handshake by which an agent and the coordinator authenticate each other over TCP: Noise, with the job's secret as
//! pre-shared key.
//!
//! With a secret the pattern is `NNpsk0`, without one `NN`. Each side sends one message; after them
//! the stream is encrypted and authenticated ([`Channel`]).
//!
//! - `psk0` and not `psk2`: the agent's first message proves that it has the secret, so the coordinator answers a host
//!   that does not with one byte, computes nothing for it, and gives it nothing to try guesses on. (`psk2` would send
//!   every host that connects a proof of the secret. The price of `psk0` is that a listener on the network can try
//!   guesses on the first message, which is why short secrets are refused.)
//! - Both send ephemeral keys (`ee`): an attacker that obtains the secret later cannot decrypt recorded connections.
//! - There are no static keys, and both handshake messages are empty. Names of hosts and of the job
//!   go over the finished channel alone, and the latter only as a tag ([`Channel::job_tag`]).
//! - The first message can be recorded and sent again. That leads nowhere: without the secret no
//!   further message can be made, and a peer joins by a message on the channel.
//! - Without a secret the channel only prevents eavesdropping: neither side authenticates its peer. A secret on one
//!   side only is refused by both.
//!
//! Only the version and the pattern are sent in the clear, so that the error for another version can be specific. The
//! handshake authenticates them: a change in transit makes it fail.

use std::fmt;

use brigade_rank_env::text::printable;
use snow::HandshakeState;

use crate::PROTOCOL;
use crate::channel::Channel;
use crate::secret::Secret;

/// Body of a handshake record, from either side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    /// Kind of the record, with the side that sends it.
    pub(crate) kind: Kind,
    /// Protocol version of the sender.
    pub(crate) protocol: u32,
    /// Brigade version of the sender, for messages. Escaped for display.
    pub(crate) version: String,
    /// Noise message of the handshake.
    pub(crate) noise: Vec<u8>,
}

/// Kind of a [`Greeting`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The agent has no secret.
    Open,
    /// The agent has a secret.
    Guarded,
    /// The coordinator's Noise message follows.
    Accepted,
    /// The coordinator has a different protocol version.
    OtherProtocol,
    /// The coordinator has a secret and the agent has none.
    SecretNeeded,
    /// The agent has a secret and the coordinator has none.
    NoSecretHere,
    /// The agent has another secret.
    WrongSecret,
}

/// Error for a connection whose first bytes are not those of Brigade's protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it does not use Brigade's protocol")]
pub struct NotBrigade;

impl Greeting {
    fn new(kind: Kind, noise: Vec<u8>) -> Self {
        Self { kind, protocol: PROTOCOL, version: env!("CARGO_PKG_VERSION").into(), noise }
    }

    /// Parses the body of a record. Accepts any bytes; later versions may append to the Noise message.
    ///
    /// # Errors
    /// The bytes are not a greeting.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, NotBrigade> {
        let rest = bytes.strip_prefix(MAGIC).ok_or(NotBrigade)?;
        let ([kind], rest) = rest.split_first_chunk().ok_or(NotBrigade)?;
        let (protocol, rest) = rest.split_first_chunk().ok_or(NotBrigade)?;
        let ([length], rest) = rest.split_first_chunk().ok_or(NotBrigade)?;
        let (version, noise) = rest.split_at_checked(usize::from(*length)).ok_or(NotBrigade)?;
        Ok(Self {
            kind: KINDS.iter().find(|known| known.0 == *kind).ok_or(NotBrigade)?.1,
            protocol: u32::from_be_bytes(*protocol),
            version: printable(&String::from_utf8_lossy(&version[..version.len().min(32)])),
            noise: noise.to_vec(),
        })
    }

    /// Returns the body of a record.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.header();
        bytes.extend_from_slice(&self.noise);
        bytes
    }

    /// Returns the bytes before the Noise message, which authenticates them.
    fn header(&self) -> Vec<u8> {
        let kind = KINDS.iter().find(|known| known.1 == self.kind).map_or(u8::MAX, |it| it.0);
        let version = &self.version.as_bytes()[..self.version.len().min(32)];
        let length = u8::try_from(version.len()).unwrap_or(0);
        [MAGIC, &[kind], &self.protocol.to_be_bytes(), &[length], version].concat()
    }
}

/// Agent's side of the handshake, which sends the first record.
pub(crate) struct ClientHandshake {
    noise: HandshakeState,
}

/// Reason why an agent has no channel to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Denial {
    /// The coordinator refuses this host. Contains the reason.
    Refused(String),
    /// The peer does not have the secret, or the handshake was changed in transit.
    Unproved,
    /// The peer is not a Brigade process.
    NotBrigade,
}

impl ClientHandshake {
    /// Begins the handshake. Also returns the body of the first record.
    ///
    /// # Errors
    /// The system has no source of random numbers.
    pub(crate) fn start(secret: Option<&Secret>) -> Result<(Self, Vec<u8>), snow::Error> {
        let kind = if secret.is_some() { Kind::Guarded } else { Kind::Open };
        let mut greeting = Greeting::new(kind, Vec::new());
        let mut noise = state(secret, &greeting, Side::Agent)?;
        greeting.noise = written(&mut noise)?;
        Ok((Self { noise }, greeting.encode()))
    }

    /// Handles the coordinator's record.
    pub(crate) fn finish(mut self, record: &[u8]) -> Result<Channel, Denial> {
        let answer = Greeting::decode(record).map_err(|_| Denial::NotBrigade)?;
        let refused = |text: &str| Err(Denial::Refused(text.to_owned()));
        match answer.kind {
            Kind::Accepted => {}
            Kind::OtherProtocol => return Err(Denial::Refused(other_protocol(&answer))),
            Kind::SecretNeeded => {
                return refused(
                    "its job has a secret, and this host was given none: set the same \
                                BRIGADE_RDZV_SECRET or --rdzv-secret-file on all hosts",
                );
            }
            Kind::NoSecretHere => {
                return refused(
                    "this host was given a secret, and its job has none: set the same \
                                BRIGADE_RDZV_SECRET or --rdzv-secret-file on all hosts",
                );
            }
            Kind::WrongSecret => {
                return refused(
                    "its job has another secret: set the same BRIGADE_RDZV_SECRET or \
                                --rdzv-secret-file on all hosts",
                );
            }
            Kind::Open | Kind::Guarded => return Err(Denial::NotBrigade),
        }
        self.noise.read_message(&answer.noise, &mut []).map_err(|_| Denial::Unproved)?;
        Channel::new(self.noise).map_err(|_| Denial::Unproved)
    }
}

impl fmt::Debug for ClientHandshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientHandshake").finish_non_exhaustive()
    }
}

/// Answer of the coordinator to a first record.
#[derive(Debug)]
pub(crate) enum Answer {
    /// Sends this record, after which the channel is established. The peer is authenticated by its first message on it.
    Accept(Vec<u8>, Box<Channel>),
    /// Sends this record and closes the connection. The reason is for the user of this host.
    Refuse(Vec<u8>, String),
    /// Closes the connection without an answer: the peer is not a Brigade process.
    Ignore,
}

/// Returns the coordinator's answer to the agent's record. No state is kept for refused agents.
pub(crate) fn answer(record: &[u8], secret: Option<&Secret>) -> Answer {
    let Ok(hello) = Greeting::decode(record) else { return Answer::Ignore };
    let refuse =
        |kind, reason: String| Answer::Refuse(Greeting::new(kind, Vec::new()).encode(), reason);
    if !matches!(hello.kind, Kind::Open | Kind::Guarded) {
        return Answer::Ignore;
    }
    if hello.protocol != PROTOCOL {
        return refuse(Kind::OtherProtocol, other_protocol(&hello));
    }
    match (hello.kind, secret) {
        (Kind::Open, Some(_)) => {
            let reason = "it was given no secret, and this job has one: set the same \
                          BRIGADE_RDZV_SECRET or --rdzv-secret-file on all hosts";
            return refuse(Kind::SecretNeeded, reason.to_owned());
        }
        (Kind::Guarded, None) => {
            let reason = "it was given a secret, and this job has none: set the same \
                          BRIGADE_RDZV_SECRET or --rdzv-secret-file on all hosts";
            return refuse(Kind::NoSecretHere, reason.to_owned());
        }
        _ => {}
    }
    // Fails if the system has no random numbers; then no host can be answered.
    let Ok(mut noise) = state(secret, &hello, Side::Coordinator) else { return Answer::Ignore };
    if noise.read_message(&hello.noise, &mut []).is_err() {
        return match secret {
            Some(_) => refuse(Kind::WrongSecret, "it does not have the secret of this job".into()),
            None => Answer::Ignore,
        };
    }
    let Ok(message) = written(&mut noise) else { return Answer::Ignore };
    match Channel::new(noise) {
        Ok(channel) => {
            let record = Greeting::new(Kind::Accepted, message).encode();
            Answer::Accept(record, Box::new(channel))
        }
        Err(_) => Answer::Ignore,
    }
}

fn other_protocol(other: &Greeting) -> String {
    format!(
        "it has brigade {} (protocol {}), this host has {} (protocol {PROTOCOL}): install the same \
         version on all hosts",
        other.version,
        other.protocol,
        env!("CARGO_PKG_VERSION"),
    )
}

#[derive(Clone, Copy, Debug)]
enum Side {
    Agent,
    Coordinator,
}

/// Creates the state of a handshake that authenticates the agent's plain-text fields.
fn state(
    secret: Option<&Secret>,
    hello: &Greeting,
    side: Side,
) -> Result<HandshakeState, snow::Error> {
    let key = secret.map(Secret::key);
    let pattern = if key.is_some() { GUARDED } else { OPEN };
    let header = hello.header();
    let mut builder = snow::Builder::new(pattern.parse()?).prologue(&header)?;
    if let Some(key) = &key {
        builder = builder.psk(0, key)?;
    }
    match side {
        Side::Agent => builder.build_initiator(),
        Side::Coordinator => builder.build_responder(),
    }
}

fn written(noise: &mut HandshakeState) -> Result<Vec<u8>, snow::Error> {
    let mut message = vec![0; MAX_GREETING];
    let length = noise.write_message(&[], &mut message)?;
    message.truncate(length);
    Ok(message)
}

const GUARDED: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const OPEN: &str = "Noise_NN_25519_ChaChaPoly_BLAKE2s";
const MAGIC: &[u8] = b"brigade\0";
const KINDS: [(u8, Kind); 7] = [
    (0, Kind::Open),
    (1, Kind::Guarded),
    (16, Kind::Accepted),
    (17, Kind::OtherProtocol),
    (18, Kind::SecretNeeded),
    (19, Kind::NoSecretHere),
    (20, Kind::WrongSecret),
];
/// Maximum length of a handshake record.
pub(crate) const MAX_GREETING: usize = 256;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn secret(text: &str) -> Option<Secret> {
        Some(Secret::new(text).unwrap())
    }

    /// Runs both sides of a handshake. `relay` may change every record.
    fn meet(
        agent: Option<&Secret>,
        coordinator: Option<&Secret>,
        mut relay: impl FnMut(&mut Vec<u8>),
    ) -> Result<(Channel, Channel), Denial> {
        let (client, mut hello) = ClientHandshake::start(agent).unwrap();
        relay(&mut hello);
        let (mut record, channel) = match answer(&hello, coordinator) {
            Answer::Accept(record, channel) => (record, Some(*channel)),
            Answer::Refuse(record, _) => (record, None),
            Answer::Ignore => return Err(Denial::NotBrigade),
        };
        relay(&mut record);
        Ok((client.finish(&record)?, channel.unwrap()))
    }

    #[test]
    fn both_sides_have_one_channel() {
        for secret in [None, secret("0123456789abcdef")] {
            let secret = secret.as_ref();
            let (mut near, mut far) = meet(secret, secret, |_| ()).unwrap();
            let mut sealed = Vec::new();
            near.seal(b"hello", &mut sealed);
            assert_eq!(far.open(&sealed[2..]).unwrap(), b"hello");
            assert_eq!(near.job_tag("j"), far.job_tag("j"));
        }
    }

    #[test]
    fn secrets_that_differ_are_told() {
        let (one, other) = (secret("the secret of one job"), secret("the secret of another"));
        let refused = |agent: &Option<Secret>, coordinator: &Option<Secret>| match meet(
            agent.as_ref(),
            coordinator.as_ref(),
            |_| (),
        ) {
            Err(Denial::Refused(reason)) => reason,
            other => panic!("{other:?}"),
        };
        assert!(refused(&one, &other).starts_with("its job has another secret: set the same "));
        assert!(refused(&None, &one).starts_with("its job has a secret, and this host was given"));
        assert!(refused(&one, &None).starts_with("this host was given a secret, and its job has"));
    }

    #[test]
    fn a_coordinator_that_does_not_know_the_secret_is_found_out() {
        let right = secret("the secret of the job");
        // The coordinator is impersonated: it accepts everything, with a message of its own or the agent's.
        for own in [true, false] {
            let (client, hello) = ClientHandshake::start(right.as_ref()).unwrap();
            let heard = Greeting::decode(&hello).unwrap();
            let wrong = secret("a guess at that secret");
            let mut noise = state(wrong.as_ref(), &heard, Side::Coordinator).unwrap();
            assert!(noise.read_message(&heard.noise, &mut []).is_err());
            let message = if own { vec![7; 48] } else { heard.noise };
            let answer = Greeting::new(Kind::Accepted, message).encode();
            assert_eq!(client.finish(&answer).unwrap_err(), Denial::Unproved);
        }
    }

    #[test]
    fn every_byte_of_the_handshake_counts() {
        let secret = secret("the secret of the job");
        for record in 0..2 {
            let mut lengths = Vec::new();
            for at in 0.. {
                let mut number = 0;
                let met = meet(secret.as_ref(), secret.as_ref(), |bytes| {
                    if number == record {
                        lengths.push(bytes.len());
                        if let Some(byte) = bytes.get_mut(at) {
                            *byte ^= 1;
                        }
                    }
                    number += 1;
                });
                if at == lengths[0] {
                    assert!(met.is_ok(), "nothing was changed");
                    break;
                }
                // A change of the version in the answer's header need not make the handshake fail.
                let words = MAGIC.len() + 1..MAGIC.len() + 6 + env!("CARGO_PKG_VERSION").len();
                if record == 0 || !words.contains(&at) {
                    assert!(met.is_err(), "byte {at} of record {record}");
                }
            }
        }
    }

    #[test]
    fn a_first_message_sent_again_leads_nowhere() {
        let secret = secret("the secret of the job");
        let (_, hello) = ClientHandshake::start(secret.as_ref()).unwrap();
        let channels = [(); 2].map(|()| match answer(&hello, secret.as_ref()) {
            Answer::Accept(_, channel) => *channel,
            other => panic!("{other:?}"),
        });
        let [mut one, mut two] = channels;
        let mut sealed = Vec::new();
        one.seal(b"said on the first", &mut sealed);
        assert!(two.open(&sealed[2..]).is_err(), "another channel, with other keys");
        assert_ne!(one.job_tag("j"), two.job_tag("j"));
    }

    #[test]
    fn other_versions_are_named() {
        let (_, hello) = ClientHandshake::start(None).unwrap();
        let newer = Greeting {
            protocol: 9,
            version: "9.1\x1b[2J".into(),
            ..Greeting::decode(&hello).unwrap()
        };
        let Answer::Refuse(record, reason) = answer(&newer.encode(), None) else { panic!() };
        let own = env!("CARGO_PKG_VERSION");
        let expected = format!(
            r"it has brigade 9.1\u{{1b}}[2J (protocol 9), this host has {own} (protocol {PROTOCOL}): install the same version on all hosts"
        );
        assert_eq!(reason, expected);
        let older =
            Greeting { protocol: 1, version: "0.0.1".into(), ..Greeting::decode(&record).unwrap() };
        let (client, _) = ClientHandshake::start(None).unwrap();
        let Err(Denial::Refused(reason)) = client.finish(&older.encode()) else { panic!() };
        assert!(
            reason.starts_with("it has brigade 0.0.1 (protocol 1), this host has "),
            "{reason}"
        );
    }

    #[test]
    fn the_first_record_says_nothing_about_the_job() {
        let secret = secret("the secret of the job");
        let (_, hello) = ClientHandshake::start(secret.as_ref()).unwrap();
        let greeting = Greeting::decode(&hello).unwrap();
        // An ephemeral key and a tag.
        assert_eq!((greeting.kind, greeting.noise.len()), (Kind::Guarded, 48));
        assert!(hello.len() < MAX_GREETING);
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered_or_not(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut ours = MAGIC.to_vec();
            ours.extend(&bytes);
            for bytes in [bytes, ours] {
                if let Ok(greeting) = Greeting::decode(&bytes) {
                    let again = Greeting::decode(&greeting.encode()).unwrap();
                    prop_assert_eq!(again.kind, greeting.kind);
                }
                prop_assert!(!matches!(answer(&bytes, Some(&Secret::new([b'x'; 16]).unwrap())), Answer::Accept(..)));
                let (client, _) = ClientHandshake::start(None).unwrap();
                prop_assert!(client.finish(&bytes).is_err());
            }
        }
    }
}
