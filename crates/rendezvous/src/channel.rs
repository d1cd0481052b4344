//! The encrypted stream between an agent and the coordinator over TCP: Noise messages as records.
//!
//! A record is a length in two bytes, big-endian, followed by as many bytes. The records of the handshake come first;
//! afterwards each contains one Noise transport message, whose plaintext is a piece of the stream of frames that other
//! connections carry unencrypted.

use std::fmt;

use sha2::{Digest, Sha256};
use snow::{HandshakeState, TransportState};

use crate::secret::hex;

/// Error for a record whose announced length exceeds the maximum at this point of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordTooLong {
    pub(crate) length: usize,
    pub(crate) longest: usize,
}

/// Splitter of a stream of bytes into records.
#[derive(Debug, Default)]
pub(crate) struct Records {
    pending: Vec<u8>,
    /// Offset in `pending` of the next record.
    start: usize,
}

impl Records {
    /// Appends bytes that were read.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.pending.drain(..self.start);
        self.start = 0;
        self.pending.extend_from_slice(bytes);
    }

    /// Returns `true` if a record has begun and is incomplete.
    pub(crate) fn has_partial(&self) -> bool {
        self.start < self.pending.len()
    }

    /// Returns the next complete record, of at most this many bytes.
    pub(crate) fn next(&mut self, longest: usize) -> Result<Option<&[u8]>, RecordTooLong> {
        let Some((prefix, rest)) = self.pending[self.start..].split_first_chunk::<PREFIX>() else {
            return Ok(None);
        };
        let length = usize::from(u16::from_be_bytes(*prefix));
        if length > longest {
            return Err(RecordTooLong { length, longest });
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        self.start += PREFIX + length;
        Ok(Some(body))
    }
}

/// Encodes a record with this body, which must not be too long.
pub(crate) fn record(body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(body.len()).unwrap_or(u16::MAX);
    let mut record = length.to_be_bytes().to_vec();
    record.extend_from_slice(&body[..usize::from(length)]);
    record
}

/// Error for a record that does not belong to this connection or position in it: it was forged, changed, repeated, left
/// out or moved in transit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Forged;

/// Both directions of an encrypted stream, after the handshake.
pub(crate) struct Channel {
    noise: TransportState,
    /// Numbers of records sent and received since the last change of keys.
    sent: u64,
    received: u64,
    /// Hash of the handshake. Differs for each connection, and neither side can choose it.
    handshake_hash: Vec<u8>,
}

impl Channel {
    /// Creates the channel of a finished handshake. Fails for an unfinished one.
    pub(crate) fn new(handshake: HandshakeState) -> Result<Self, snow::Error> {
        let handshake_hash = handshake.get_handshake_hash().to_vec();
        let noise = handshake.into_transport_mode()?;
        Ok(Self { noise, sent: 0, received: 0, handshake_hash })
    }

    /// Appends a piece of the stream as records.
    pub(crate) fn seal(&mut self, plain: &[u8], out: &mut Vec<u8>) {
        for piece in plain.chunks(MAX_PLAIN) {
            let start = out.len();
            out.resize(start + PREFIX + piece.len() + TAG, 0);
            let body = &mut out[start + PREFIX..];
            // Fails for a piece that is too long, which cannot happen here, and when all nonces are used: at a million
            // records a second that takes 500,000 years. The other side would report a forged record.
            let length = self.noise.write_message(piece, body).unwrap_or(0);
            let prefix = u16::try_from(length).unwrap_or(0).to_be_bytes();
            out[start..start + PREFIX].copy_from_slice(&prefix);
            self.sent += 1;
            if self.sent == REKEY_AFTER {
                self.sent = 0;
                self.noise.rekey_outgoing();
            }
        }
    }

    /// Decrypts the piece of the stream in a record.
    pub(crate) fn open(&mut self, record: &[u8]) -> Result<Vec<u8>, Forged> {
        let mut plain = vec![0; record.len()];
        let length = self.noise.read_message(record, &mut plain).map_err(|_| Forged)?;
        plain.truncate(length);
        self.received += 1;
        if self.received == REKEY_AFTER {
            self.received = 0;
            self.noise.rekey_incoming();
        }
        Ok(plain)
    }

    /// Returns the value that represents the name of a job on this connection. The other side can check a name against
    /// it, and cannot use it on another connection.
    pub(crate) fn job_tag(&self, run_id: &str) -> String {
        let mut hash = Sha256::new();
        for part in [b"brigade job\0", self.handshake_hash.as_slice(), run_id.as_bytes()] {
            hash.update(part);
        }
        hex(&hash.finalize())
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("sent", &self.sent).finish_non_exhaustive()
    }
}

const PREFIX: usize = 2;
/// Number of bytes that encryption adds to a piece.
const TAG: usize = 16;
/// Maximum length of a Noise message, and of a record.
pub(crate) const MAX_RECORD: usize = 65_535;
const MAX_PLAIN: usize = MAX_RECORD - TAG;
/// Number of records after which each direction changes its key, so that a leaked key of a long connection does not
/// decrypt earlier messages.
const REKEY_AFTER: u64 = 1 << 16;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns both ends of a connection.
    pub(crate) fn pair() -> (Channel, Channel) {
        let params = || "Noise_NN_25519_ChaChaPoly_BLAKE2s".parse().unwrap();
        let mut near = snow::Builder::new(params()).build_initiator().unwrap();
        let mut far = snow::Builder::new(params()).build_responder().unwrap();
        let mut message = [0; 200];
        let length = near.write_message(&[], &mut message).unwrap();
        far.read_message(&message[..length], &mut []).unwrap();
        let length = far.write_message(&[], &mut message).unwrap();
        near.read_message(&message[..length], &mut []).unwrap();
        (Channel::new(near).unwrap(), Channel::new(far).unwrap())
    }

    /// Returns what the other end decodes from these bytes.
    fn read(far: &mut Channel, bytes: &[u8], size: usize) -> Result<Vec<u8>, Forged> {
        let mut records = Records::default();
        let mut plain = Vec::new();
        for piece in bytes.chunks(size) {
            records.push(piece);
            while let Some(record) = records.next(MAX_RECORD).unwrap() {
                plain.extend(far.open(record)?);
            }
        }
        assert!(!records.has_partial());
        Ok(plain)
    }

    #[test]
    fn a_stream_comes_out_as_it_went_in() {
        let (mut near, mut far) = pair();
        let text: Vec<u8> = (0..300_000_u32).map(|i| (i % 251) as u8).collect();
        let mut sealed = Vec::new();
        near.seal(&text[..5], &mut sealed);
        near.seal(&text[5..], &mut sealed);
        assert_eq!(read(&mut far, &sealed, 1000).unwrap(), text);
        assert!(!sealed.windows(8).any(|piece| piece == &text[100..108]), "it is encrypted");
        assert_eq!(near.job_tag("night"), far.job_tag("night"));
        assert_ne!(near.job_tag("night"), pair().0.job_tag("night"));
    }

    #[test]
    fn what_is_changed_repeated_left_out_or_moved_is_noticed() {
        let seal = |near: &mut Channel, text: &[u8]| {
            let mut sealed = Vec::new();
            near.seal(text, &mut sealed);
            sealed
        };
        for at in 0..22 {
            let (mut near, mut far) = pair();
            let mut sealed = seal(&mut near, b"1234");
            // A wrong length is another error.
            if at >= PREFIX {
                sealed[at] ^= 1;
                assert_eq!(read(&mut far, &sealed, 99), Err(Forged), "byte {at}");
            }
        }
        let (mut near, mut far) = pair();
        let (one, two) = (seal(&mut near, b"one"), seal(&mut near, b"two"));
        assert_eq!(read(&mut far, &one, 99).unwrap(), b"one");
        assert_eq!(read(&mut far, &one, 99), Err(Forged), "repeated");
        let three = seal(&mut near, b"three");
        assert_eq!(read(&mut far, &three, 99), Err(Forged), "one was left out");
        assert_eq!(read(&mut far, &two, 99).unwrap(), b"two");
        // Sent back to its sender, or to another connection.
        assert_eq!(read(&mut near, &three, 99), Err(Forged));
        assert_eq!(read(&mut pair().1, &one, 99), Err(Forged));
    }

    #[test]
    fn keys_change_on_both_sides_at_once() {
        let (mut near, mut far) = pair();
        let mut sealed = Vec::new();
        for number in 0..2 * REKEY_AFTER + 3 {
            sealed.clear();
            near.seal(&number.to_be_bytes(), &mut sealed);
            let plain = far.open(&sealed[PREFIX..]).unwrap();
            assert_eq!(plain, number.to_be_bytes());
        }
        assert_eq!((near.sent, far.received), (3, 3));
    }

    #[test]
    fn a_giant_record_is_refused_when_it_is_announced() {
        let mut records = Records::default();
        records.push(&[0xff, 0xff]);
        let error = RecordTooLong { length: 65_535, longest: 512 };
        assert_eq!(records.next(512), Err(error));
        assert_eq!(records.next(MAX_RECORD), Ok(None));
    }
}
