//! Reader of configuration values by their paths, such as `zero_optimization.stage`.

use serde_json::{Map, Value};

use super::given::{closest, truth};
use super::{Note, SettingsError};

/// DeepSpeed's word for a value that the program decides.
pub(super) const AUTO: &str = "auto";

/// Returns the value at a path. `None` if a part of the path is missing.
pub(super) fn at<'a>(root: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    match path.split_once('.') {
        None => root.get(path),
        Some((section, rest)) => at(root.get(section)?.as_object()?, rest),
    }
}

/// Returns the value at a path, to be changed.
pub(super) fn at_mut<'a>(root: &'a mut Map<String, Value>, path: &str) -> Option<&'a mut Value> {
    match path.split_once('.') {
        None => root.get_mut(path),
        Some((section, rest)) => at_mut(root.get_mut(section)?.as_object_mut()?, rest),
    }
}

/// A configuration that is being read, with its source for messages.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) origin: &'a str,
    pub(super) root: &'a Map<String, Value>,
}

impl<'a> Reader<'a> {
    /// Returns the value at a path. `None` if it is missing, null or still `auto`.
    pub(super) fn find(self, path: &str) -> Option<&'a Value> {
        at(self.root, path).filter(|value| !value.is_null() && *value != AUTO)
    }

    pub(super) fn is_auto(self, path: &str) -> bool {
        at(self.root, path).is_some_and(|value| value == AUTO)
    }

    pub(super) fn truth(self, path: &str) -> Result<Option<bool>, SettingsError> {
        self.read(path, "true or false", as_truth)
    }

    /// Reads a Boolean. Defaults to `false`.
    pub(super) fn is_on(self, path: &str) -> Result<bool, SettingsError> {
        self.truth(path).map(Option::unwrap_or_default)
    }

    pub(super) fn count(self, path: &str) -> Result<Option<u64>, SettingsError> {
        self.read(path, "a whole number", as_count)
    }

    pub(super) fn number(self, path: &str) -> Result<Option<f64>, SettingsError> {
        self.read(path, "a number", as_number)
    }

    pub(super) fn text(self, path: &str) -> Result<Option<&'a str>, SettingsError> {
        self.read(path, "a text", Value::as_str)
    }

    /// Reads two numbers in a list.
    pub(super) fn pair(self, path: &str) -> Result<Option<(f64, f64)>, SettingsError> {
        self.read(path, "two numbers, [0.9, 0.999]", |value| match value.as_array()?.as_slice() {
            [first, second] => Some((as_number(first)?, as_number(second)?)),
            _ => None,
        })
    }

    /// Checks that an object has no other keys than these.
    pub(super) fn only(self, path: &str, keys: &[&'static str]) -> Result<(), SettingsError> {
        let Some(value) = self.find(path) else { return Ok(()) };
        let section = value.as_object().ok_or_else(|| self.wrong(path, "an object, { ... }"))?;
        match section.keys().find(|key| !keys.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => Err(SettingsError::UnknownKey {
                origin: self.origin.to_owned(),
                key: format!("{path}.{key}"),
                hint: closest(key, keys.iter().copied()),
            }),
        }
    }

    fn read<T>(
        self,
        path: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, SettingsError> {
        let Some(value) = self.find(path) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong(path, expected))
    }

    pub(super) fn wrong(self, path: &str, expected: &str) -> SettingsError {
        SettingsError::Value {
            origin: self.origin.to_owned(),
            key: path.to_owned(),
            value: shown(at(self.root, path)),
            expected: expected.to_owned(),
        }
    }

    pub(super) fn unsupported(self, path: &str, reason: &str) -> SettingsError {
        SettingsError::Unsupported {
            origin: self.origin.to_owned(),
            key: path.to_owned(),
            value: shown(at(self.root, path)),
            reason: reason.to_owned(),
        }
    }

    pub(super) fn note(self, path: &str, text: &str) -> Note {
        Note {
            key: path.to_owned(),
            value: shown(at(self.root, path)),
            origin: self.origin.to_owned(),
            text: text.to_owned(),
        }
    }
}

/// Converts a Boolean, one of Python's words for it, or 0 or 1.
pub(super) fn as_truth(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(value) => Some(*value),
        Value::String(word) => truth(word),
        Value::Number(number) => match number.as_u64()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        },
        _ => None,
    }
}

/// Converts a whole number, also in the form `5e8`.
pub(super) fn as_count(value: &Value) -> Option<u64> {
    if let Some(count) = value.as_u64() {
        return Some(count);
    }
    let number = value.as_f64()?;
    // Larger numbers are not exact, but stand for "no limit" anyway.
    let is_whole = number >= 0.0 && number.fract() == 0.0;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "whole, and saturates"
    )]
    is_whole.then_some(number as u64)
}

pub(super) fn as_number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok().filter(|it: &f64| it.is_finite()),
        _ => None,
    }
}

/// Formats a value on one line, shortened.
fn shown(value: Option<&Value>) -> String {
    let text = match value {
        None => return String::new(),
        Some(Value::Object(map)) => {
            let keys: Vec<&str> = map.keys().map(String::as_str).collect();
            format!("{{{}}}", keys.join(", "))
        }
        Some(value) => value.to_string(),
    };
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

const MAX_SHOWN: usize = 60;
