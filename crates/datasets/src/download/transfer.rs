//! One HTTP request, whose answer is appended to the received part of a file.

use ureq::http::header::{CONTENT_RANGE, ETAG};
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body};

use super::Failure;
use super::checks::RemoteFile;
use super::part::{Part, Source};
use crate::progress::Progress;

impl Part {
    /// Requests the missing bytes from `url`, and returns whether they were appended to bytes that existed before. If
    /// those belong to another file, or the server does not support ranges, the whole file is received again.
    pub(super) fn receive(
        &mut self,
        agent: &Agent,
        url: &str,
        file: &RemoteFile<'_>,
    ) -> Result<Received, Failure> {
        if let Some(reason) = unreachable(url, cfg!(feature = "https")) {
            return Err(Failure::Lasting(reason.to_owned()));
        }
        let present = self.len()?;
        let mut source = self.source(url, file).filter(|_| present > 0);
        loop {
            // A process was killed after it had received the whole file, but before it had renamed it.
            if source.as_ref().is_some_and(|source| source.bytes == Some(present)) {
                return Ok(Received::Rest);
            }
            let mut request = agent.get(url).header("Accept-Encoding", "identity");
            if let Some(source) = &source {
                request = request.header("Range", format!("bytes={present}-"));
                if let Some(validator) = &source.validator {
                    request = request.header("If-Range", validator);
                }
            }
            let mut response = request.call().map_err(|error| match error {
                ureq::Error::BadUri(_)
                | ureq::Error::Http(_)
                | ureq::Error::RequireHttpsOnly(_) => Failure::Lasting(error.to_string()),
                error => Failure::Passing(error.to_string()),
            })?;
            match (response.status(), &source) {
                (StatusCode::OK, _) => {
                    let found = Source::of(url, response.headers());
                    let bytes = found.bytes;
                    if let Some(difference) = bytes.and_then(|it| file.difference_in_size(it)) {
                        let (expected, found) = (difference.expected, difference.found);
                        return Err(Failure::Mismatch(format!(
                            "expected a file of {expected}, the server has one of {found}"
                        )));
                    }
                    self.begin(&found)?;
                    let total = file.bytes.or(bytes);
                    let mut progress = Progress::new(format!("downloading {url}"), 0, total);
                    self.append(response.body_mut().as_reader(), total, &mut progress)?;
                    return Ok(Received::All);
                }
                (StatusCode::PARTIAL_CONTENT, Some(before))
                    if continues(&response, present, before, file) =>
                {
                    let total = file.bytes.or(before.bytes);
                    tracing::info!(url, from = present, bytes = total, "the download continues");
                    let mut progress = Progress::new(format!("downloading {url}"), present, total);
                    self.append(response.body_mut().as_reader(), total, &mut progress)?;
                    return Ok(Received::Rest);
                }
                // The server sent other bytes than requested, or its file ends before them.
                (StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE, Some(_)) => {
                    source = None;
                }
                (status, _)
                    if status.is_server_error()
                        || status == StatusCode::TOO_MANY_REQUESTS
                        || status == StatusCode::REQUEST_TIMEOUT =>
                {
                    return Err(Failure::Passing(format!("the server answered {status}")));
                }
                (status, _) => {
                    return Err(Failure::Lasting(format!("the server answered {status}")));
                }
            }
        }
    }
}

/// Extent of the bytes that a request has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// The request has received the whole file.
    All,
    /// The missing rest of a file whose beginning existed before.
    Rest,
}

/// Returns `true` if an answer 206 continues the same file after its first `present` bytes.
fn continues(
    response: &Response<Body>,
    present: u64,
    source: &Source,
    file: &RemoteFile<'_>,
) -> bool {
    let text = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
    let Some((first, total)) = text(CONTENT_RANGE).and_then(range) else { return false };
    let expected = file.bytes.or(source.bytes);
    let same_size = match (expected, total) {
        (Some(expected), Some(total)) => expected == total,
        _ => true,
    };
    let same_etag = match (text(ETAG), source.validator.as_deref()) {
        (Some(now), Some(before)) if before.starts_with('"') => now == before,
        _ => true,
    };
    first == present && same_size && same_etag
}

/// Parses `bytes FIRST-LAST/SIZE`, where the size may be `*`, into the first byte and the size of the whole file.
fn range(text: &str) -> Option<(u64, Option<u64>)> {
    let (bytes, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, _) = bytes.split_once('-')?;
    Some((first.trim().parse().ok()?, total.trim().parse().ok()))
}

/// Returns the reason why this program cannot connect to that server, if there is one.
fn unreachable(url: &str, has_tls: bool) -> Option<&'static str> {
    let needs_tls = url.get(..6).is_some_and(|it| it.eq_ignore_ascii_case("https:"));
    (needs_tls && !has_tls)
        .then_some("this program was built without the feature `https` of the crate brigade")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tls_needs_the_feature() {
        assert!(unreachable("HTTPS://host/", false).is_some_and(|it| it.contains("`https`")));
        assert_eq!(unreachable("https://host/", true), None);
        assert_eq!(unreachable("http://host/https:", false), None);
    }

    #[test]
    fn ranges_are_read() {
        assert_eq!(range("bytes 9-25/26"), Some((9, Some(26))));
        assert_eq!(range("bytes 9-25/*"), Some((9, None)));
        for text in ["", "bytes */26", "items 9-25/26", "bytes 9/26", "bytes -1-25/26"] {
            assert_eq!(range(text), None, "{text}");
        }
    }
}
