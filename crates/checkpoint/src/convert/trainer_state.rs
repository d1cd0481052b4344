//! `trainer_state.json` of Hugging Face's Trainer.

use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::error::Error;

/// Progress of a Hugging Face Trainer run, from `trainer_state.json`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct TrainerState {
    /// Number of optimizer steps taken.
    pub global_step: u64,
    /// Number of epochs, including the fraction of the current one.
    pub epoch: Option<f64>,
}

impl TrainerState {
    /// Reads a file `trainer_state.json`.
    ///
    /// # Errors
    /// Fails with [`Error::Io`], or with [`Error::Damaged`] if the file is not the state of a Trainer.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(Error::io("read", path))?;
        Self::parse(&bytes).map_err(|error| Error::Damaged {
            path: path.to_owned(),
            fact: format!("it is not the state of a Trainer: {error}"),
        })
    }

    /// Parses the contents of `trainer_state.json`.
    ///
    /// # Errors
    /// Fails if the bytes are not JSON, or if a field is missing.
    pub fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(&nulls_for_non_finite(bytes))
    }
}

/// Replaces NaN and infinities by `null`: Python writes them into JSON, which does not allow them, for example as a
/// gradient norm in the history.
fn nulls_for_non_finite(bytes: &[u8]) -> Vec<u8> {
    let mut json = Vec::with_capacity(bytes.len());
    let (mut at, mut in_string) = (0, false);
    while let Some(&byte) = bytes.get(at) {
        let words = [&b"-Infinity"[..], b"Infinity", b"NaN"];
        let word = words.into_iter().find(|word| !in_string && bytes[at..].starts_with(word));
        if let Some(word) = word {
            json.extend(b"null");
            at += word.len();
            continue;
        }
        let length = if in_string && byte == b'\\' { 2 } else { 1 };
        in_string ^= byte == b'"';
        json.extend(bytes[at..].iter().take(length));
        at += length;
    }
    json
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_with_nan_is_read() {
        let text = r#"{"epoch": 1.5, "global_step": 12, "best_metric": null,
            "log_history": [{"grad_norm": NaN, "loss": Infinity, "low": -Infinity, "NaN": "Infinity \" NaN"}]}"#;
        let state = TrainerState::parse(text.as_bytes()).unwrap();
        assert_eq!(state, TrainerState { global_step: 12, epoch: Some(1.5) });
        for text in
            ["", "{", "[]", r#"{"epoch": 1}"#, r#"{"global_step": -1}"#, "\"", "\"\\", "NaN"]
        {
            assert!(TrainerState::parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
