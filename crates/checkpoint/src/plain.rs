//! Conversion between values of the program's own types and trees.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::value::Value;

impl<T> Value<T> {
    /// Converts a serializable value into a tree. `None` if it has no JSON form, or is nested more deeply than a
    /// checkpoint's file may be.
    pub fn from_plain(plain: &impl Serialize) -> Option<Self> {
        let json = serde_json::to_value(plain).ok()?;
        let tree = Value::from_json(&json).ok().filter(|_| depth(&json) <= MAX_DEPTH)?;
        tree.try_map(&mut |_, _| Err(())).ok()
    }

    /// Converts the tree into a value of type `P`. `None` if the tree does not match the type.
    pub fn to_plain<P: DeserializeOwned>(&self) -> Option<P> {
        serde_json::from_value(self.json()?).ok()
    }

    /// Converts to JSON with plain numbers, without the marks of [`Value::to_json`].
    fn json(&self) -> Option<serde_json::Value> {
        Some(match self {
            Self::None => serde_json::Value::Null,
            Self::Bool(truth) => (*truth).into(),
            Self::Int(number) => (*number).into(),
            Self::Float(number) => serde_json::Number::from_f64(*number)?.into(),
            Self::Str(text) => text.as_str().into(),
            Self::List(items) | Self::Tuple(items) => {
                serde_json::Value::Array(items.iter().map(Self::json).collect::<Option<_>>()?)
            }
            Self::Dict(entries) => {
                let entries = entries.iter();
                let entries =
                    entries.map(|(key, value)| Some((key.as_str()?.to_owned(), value.json()?)));
                serde_json::Value::Object(entries.collect::<Option<_>>()?)
            }
            Self::Bytes(_) | Self::Tensor(_) | Self::Foreign(_) => return None,
        })
    }
}

fn depth(json: &serde_json::Value) -> usize {
    1 + match json {
        serde_json::Value::Array(items) => items.iter().map(depth).max().unwrap_or_default(),
        serde_json::Value::Object(entries) => entries.values().map(depth).max().unwrap_or_default(),
        _ => 0,
    }
}

/// Maximum nesting depth, well below the limit of JSON parsers, 128.
const MAX_DEPTH: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_to_the_bit() {
        // JSON's fast parser is off by a bit for this number, which is marked in files.
        let plain =
            (0.1 + 0.2, 7.205_759_403_792_794e16, i64::MAX, "text".to_owned(), [Some(1), None]);
        let value: Value<()> = Value::from_plain(&plain).unwrap();
        let text = value.try_map(&mut |_, ()| Err(())).unwrap().to_json().to_string();
        let read = Value::from_json(&serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(read.to_plain(), Some(plain));
    }

    #[test]
    fn what_files_could_not_be_read_with_is_left_out() {
        let nested =
            |depth| (0..depth).fold(serde_json::json!(1), |inner, _| serde_json::json!([inner]));
        assert!(Value::<()>::from_plain(&nested(60)).is_some());
        assert!(Value::<()>::from_plain(&nested(70)).is_none());
        assert_eq!(Value::<()>::Bytes(vec![1]).to_plain::<Vec<u8>>(), None);
    }
}
