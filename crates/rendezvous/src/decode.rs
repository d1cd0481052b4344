//! Decoders of bytes from a peer as pure functions, for fuzz targets and property tests.
//!
//! Connections use the same code; these functions only avoid the sockets. None of them panics or takes memory out of
//! proportion to its input, whatever the bytes are.

use crate::handshake::{self, Greeting, NotBrigade};
use crate::{Decoder, FrameError, FromAgent, Secret, ToAgent, discovery};

/// Decodes the body of the first record from either side.
///
/// # Errors
/// The record is not one of Brigade's protocol.
pub fn greeting(bytes: &[u8]) -> Result<(), NotBrigade> {
    Greeting::decode(bytes).map(drop)
}

/// Returns a coordinator's answer to a first record, or `None` if it sends none.
#[must_use]
pub fn answer(bytes: &[u8], secret: Option<&Secret>) -> Option<Vec<u8>> {
    match handshake::answer(bytes, secret) {
        handshake::Answer::Accept(record, _) | handshake::Answer::Refuse(record, _) => Some(record),
        handshake::Answer::Ignore => None,
    }
}

/// Decodes the messages in a stream from an agent, as the coordinator does.
///
/// # Errors
/// The bytes are not a stream of messages from an agent.
pub fn from_agent(bytes: &[u8]) -> Result<Vec<FromAgent>, FrameError> {
    let mut decoder = Decoder::default();
    decoder.push(bytes);
    let mut messages = Vec::new();
    while let Some(message) = decoder.next::<FromAgent>()? {
        messages.push(message.printable());
    }
    Ok(messages)
}

/// Decodes the messages in a stream from the coordinator, as an agent does.
///
/// # Errors
/// The bytes are not a stream of messages from the coordinator.
pub fn to_agent(bytes: &[u8]) -> Result<Vec<ToAgent>, FrameError> {
    let mut decoder = Decoder::default();
    decoder.push(bytes);
    let mut messages = Vec::new();
    while let Some(message) = decoder.next::<ToAgent>()? {
        messages.push(message.printable());
    }
    Ok(messages)
}

/// Decodes the coordinator's record in etcd: its address and port. Returns `None` if the record is malformed.
#[must_use]
pub fn coordinator_record(bytes: &[u8]) -> Option<(String, u16)> {
    discovery::coordinator_record(bytes)
}

#[cfg(test)]
mod tests {
    use brigade_hardware::DeviceFault;
    use proptest::prelude::*;

    use super::*;
    use crate::{Join, encode};

    #[test]
    fn text_of_peers_is_fit_to_be_shown() {
        let evil = "node1\nbrigade: job finished\x1b]52;c;cm0=\x07".to_owned() + &"x".repeat(1000);
        let is_fit = |text: &str| {
            text.starts_with(r"node1\nbrigade: job finished\u{1b}]52;c;cm0=\u{7}xxx")
                && text.chars().count() == 201
        };
        let join = Join { version: evil.clone(), address: Some(evil.clone()), ..Join::new(&evil) };
        let failure = crate::RankFailure {
            attempt: 0,
            rank: 0,
            local_rank: 0,
            host: evil.clone(),
            pid: 1,
            exit_status: crate::ExitStatus::Code(1),
            at: 0,
            last_lines: Vec::new(),
            stream: crate::Stream::Stderr,
            error: Some("a\n\x1b[2Jb".into()),
            hint: Some(evil.clone()),
            device_faults: vec![
                DeviceFault { remedy: evil.clone(), ..DeviceFault::default() };
                100
            ],
        };
        let bytes = [
            encode(&FromAgent::Join(join)),
            encode(&FromAgent::Unable { reason: evil.clone() }),
            encode(&FromAgent::Say { text: evil.clone() }),
            encode(&FromAgent::Failed(failure)),
        ];
        let messages = from_agent(&bytes.concat()).unwrap();
        let [
            FromAgent::Join(join),
            FromAgent::Unable { reason },
            FromAgent::Say { text },
            FromAgent::Failed(failure),
        ] = &messages[..]
        else {
            panic!("{messages:?}")
        };
        let address = join.address.as_ref().unwrap();
        let hint = failure.hint.as_ref().unwrap();
        assert_eq!(failure.device_faults.len(), crate::message::MAX_FAULTS);
        let remedy = &failure.device_faults[0].remedy;
        for text in [remedy, &join.host, &join.version, address, reason, text, &failure.host, hint]
        {
            assert!(is_fit(text), "{text}");
        }
        assert_eq!(failure.error.as_deref(), Some("a\n\\u{1b}[2Jb"));
        let cause = crate::Cause::HostLost { host: evil.clone(), how: evil.clone() };
        let bytes = [
            encode(&ToAgent::Refused { reason: evil.clone() }),
            encode(&ToAgent::Stop { attempt: 0, signal: 15, reason: evil }),
            encode(&ToAgent::End(crate::JobResult { code: 1, cause: Some(cause) })),
        ];
        let messages = to_agent(&bytes.concat()).unwrap();
        let [
            ToAgent::Refused { reason },
            ToAgent::Stop { reason: stop, .. },
            ToAgent::End(job_result),
        ] = &messages[..]
        else {
            panic!("{messages:?}")
        };
        let Some(crate::Cause::HostLost { host, how }) = &job_result.cause else { panic!() };
        for text in [reason, stop, host, how] {
            assert!(is_fit(text), "{text}");
        }
    }

    /// A message with some changed bytes, which gets past more checks than random bytes.
    fn damaged() -> impl Strategy<Value = Vec<u8>> {
        let whole = [
            encode(&FromAgent::Join(Join::new("node1"))),
            encode(&FromAgent::Beat { sent: 7 }),
            encode(&ToAgent::Refused { reason: "no".into() }),
            encode(&ToAgent::Beat),
        ];
        let change = (any::<prop::sample::Index>(), any::<u8>());
        (prop::sample::select(whole.to_vec()), prop::collection::vec(change, 0..6)).prop_map(
            |(mut bytes, changes)| {
                for (at, byte) in changes {
                    let at = at.index(bytes.len());
                    bytes[at] = byte;
                }
                bytes
            },
        )
    }

    proptest! {
        #[test]
        fn any_bytes_are_messages_or_an_error(
            noise in prop::collection::vec(any::<u8>(), 0..200),
            damaged in damaged(),
        ) {
            for bytes in [noise, damaged] {
                let _ = from_agent(&bytes);
                let _ = to_agent(&bytes);
                let _ = greeting(&bytes);
                let _ = coordinator_record(&bytes);
                prop_assert!(answer(&bytes, None).is_none());
            }
        }
    }
}
