//! Frames: a length in four bytes, big-endian, then one message as MessagePack.
//!
//! Fields are sent with their names, so that a newer version can read the messages of an older one.

use brigade_rank_env::text::printable;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Error in a stream of frames: the peer is not a Brigade process, or it is broken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The announced length exceeds the maximum length of a message: the sender has a different protocol.
    #[error(
        "a message of {length} bytes was announced, at most {longest} are allowed: \
             the other side does not use Brigade's protocol"
    )]
    TooLong {
        /// Announced length in bytes.
        length: usize,
        /// Maximum length in bytes on this connection.
        longest: usize,
    },
    /// The bytes of a frame are not a valid message.
    #[error("a message cannot be read: {0}; do both sides run the same version of brigade?")]
    Malformed(String),
}

/// Encodes one message as a frame.
///
/// ```
/// use brigade_rendezvous::{Decoder, ToAgent, encode};
/// let mut decoder = Decoder::default();
/// decoder.push(&encode(&ToAgent::Beat));
/// assert_eq!(decoder.next::<ToAgent>()?, Some(ToAgent::Beat));
/// # Ok::<(), brigade_rendezvous::FrameError>(())
/// ```
#[must_use]
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    let mut frame = vec![0; PREFIX];
    // Serialization of plain data into memory cannot fail. If it did, the receiver would report the empty frame as an
    // error.
    let _ = message.serialize(&mut rmp_serde::Serializer::new(&mut frame).with_struct_map());
    let length = u32::try_from(frame.len() - PREFIX).unwrap_or(u32::MAX);
    frame[..PREFIX].copy_from_slice(&length.to_be_bytes());
    frame
}

/// Decoder that splits a stream of bytes into messages.
#[derive(Debug)]
pub struct Decoder {
    pending: Vec<u8>,
    /// Offset in `pending` of the next message.
    start: usize,
    longest: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self::limited(MAX_FRAME_LEN)
    }
}

impl Decoder {
    /// Creates a decoder with a maximum message length in bytes, for peers that are not trusted yet.
    #[must_use]
    pub fn limited(longest: usize) -> Self {
        Self { pending: Vec::new(), start: 0, longest }
    }

    /// Raises the maximum message length to [`MAX_FRAME_LEN`].
    pub fn lift_limit(&mut self) {
        self.longest = MAX_FRAME_LEN;
    }

    /// Appends received bytes to the decoder's buffer.
    pub fn push(&mut self, bytes: &[u8]) {
        self.pending.drain(..self.start);
        self.start = 0;
        self.pending.extend_from_slice(bytes);
    }

    /// Returns `true` if the buffer holds the beginning of an incomplete message.
    #[must_use]
    pub fn has_partial(&self) -> bool {
        self.start < self.pending.len()
    }

    /// Returns the next complete message, if there is one.
    ///
    /// # Errors
    /// The stream is not one of Brigade's protocol. Nothing more can be read from it.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator has one item type and no errors"
    )]
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let Some((prefix, rest)) = self.pending[self.start..].split_first_chunk::<PREFIX>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes(*prefix) as usize;
        if length > self.longest {
            return Err(FrameError::TooLong { length, longest: self.longest });
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let message = rmp_serde::from_slice(body)
            .map_err(|error| FrameError::Malformed(printable(&error.to_string())))?;
        self.start += PREFIX + length;
        Ok(Some(message))
    }
}

const PREFIX: usize = 4;
/// Maximum length of a message in bytes. A piece of output is the longest message.
pub const MAX_FRAME_LEN: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FromAgent, Stream, ToAgent};

    #[test]
    fn cuts_do_not_matter() {
        let messages = [
            FromAgent::Beat { sent: 7 },
            FromAgent::Output { stream: Stream::Stderr, bytes: vec![0xff; 300] },
            FromAgent::Finished { attempt: 2 },
        ];
        let bytes: Vec<u8> = messages.iter().flat_map(encode).collect();
        for size in 1..bytes.len() {
            let mut decoder = Decoder::default();
            let mut read = Vec::new();
            for piece in bytes.chunks(size) {
                decoder.push(piece);
                while let Some(message) = decoder.next::<FromAgent>().unwrap() {
                    read.push(message);
                }
            }
            assert_eq!(read, messages, "in pieces of {size}");
        }
    }

    #[test]
    fn strangers_are_refused() {
        let mut decoder = Decoder::default();
        decoder.push(b"GET / HTTP/1.1\r\n\r\n");
        assert!(matches!(decoder.next::<ToAgent>(), Err(FrameError::TooLong { .. })));
        let mut decoder = Decoder::default();
        decoder.push(&[0, 0, 0, 2, 0xc1, 0xc1]);
        assert!(matches!(decoder.next::<ToAgent>(), Err(FrameError::Malformed(_))));
        let mut decoder = Decoder::limited(8);
        decoder.push(&encode(&ToAgent::Refused { reason: "long".repeat(9) }));
        assert!(matches!(decoder.next::<ToAgent>(), Err(FrameError::TooLong { longest: 8, .. })));
        decoder.lift_limit();
        assert!(decoder.next::<ToAgent>().unwrap().is_some());
    }
}
