//! States as trees of values, as in Python's dictionaries, lists and numbers.

use serde_json::{Map, Number, json};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;

/// A tree of plain values with tensors of type `T` as leaves: the state of an optimizer, of a schedule, or of a user's
/// own object.
///
/// `T` depends on the source of the values: a place in a file ([`crate::pth::StoredTensor`]), or a tensor of libtorch.
///
/// ```
/// use brigade_checkpoint::Value;
///
/// let state: Value<()> = Value::dict([("lr", Value::Float(0.1)), ("steps", Value::Int(3))]);
/// assert_eq!(state.get("lr"), Some(&Value::Float(0.1)));
/// ```
#[derive(Debug, Clone, PartialEq)]
pub enum Value<T> {
    /// The value `None` of Python.
    None,
    /// A boolean, Python's `bool`.
    Bool(bool),
    /// An integer, Python's `int`.
    Int(i64),
    /// A floating-point number, Python's `float`.
    Float(f64),
    /// A string, Python's `str`.
    Str(String),
    /// A byte string, Python's `bytes`.
    Bytes(Vec<u8>),
    /// A list of values.
    List(Vec<Self>),
    /// A tuple of values.
    Tuple(Vec<Self>),
    /// A dictionary with ordered entries. Keys may be of any kind. The last of equal keys counts.
    Dict(Vec<(Self, Self)>),
    /// A tensor as a leaf.
    Tensor(T),
    /// A Python object that was not read: its class or function as `module.name`.
    Foreign(String),
}

impl<T> Value<T> {
    /// Creates a dictionary with strings as keys.
    pub fn dict<K: Into<String>>(entries: impl IntoIterator<Item = (K, Self)>) -> Self {
        Self::Dict(entries.into_iter().map(|(key, value)| (Self::Str(key.into()), value)).collect())
    }

    /// Returns a dictionary's value for a string key. `None` if it is missing, or for another type of value.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Self> {
        let entries = self.as_dict()?;
        entries.iter().rev().find(|(k, _)| matches!(k, Self::Str(k) if k == key)).map(|(_, v)| v)
    }

    /// Returns the entries of a dictionary, or `None` for another type of value.
    #[must_use]
    pub fn as_dict(&self) -> Option<&[(Self, Self)]> {
        match self {
            Self::Dict(entries) => Some(entries),
            _ => None,
        }
    }

    /// Returns the items of a list or tuple, or `None` for another type of value.
    #[must_use]
    pub fn as_items(&self) -> Option<&[Self]> {
        match self {
            Self::List(items) | Self::Tuple(items) => Some(items),
            _ => None,
        }
    }

    /// Returns the string, or `None` for another type of value.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the integer, or `None` for another type of value.
    #[must_use]
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Self::Int(number) => Some(*number),
            _ => None,
        }
    }

    /// Returns the float, or an integer as a float. `None` for another type of value.
    #[must_use]
    pub fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(number) => Some(*number),
            Self::Int(number) => Some(*number as f64),
            _ => None,
        }
    }

    /// Returns the Boolean, or `None` for another type of value.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(truth) => Some(*truth),
            _ => None,
        }
    }

    /// Returns the tensor, or `None` for another type of value.
    #[must_use]
    pub fn as_tensor(&self) -> Option<&T> {
        match self {
            Self::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }

    /// Returns `true` unless the value is a tensor or a container.
    fn is_plain(&self) -> bool {
        !matches!(self, Self::Tensor(_) | Self::List(_) | Self::Tuple(_) | Self::Dict(_))
    }

    /// Returns a noun for the type of value, for messages: `a dictionary`, `an integer`, ….
    #[must_use]
    pub fn describe(&self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool(_) => "a bool",
            Self::Int(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Str(_) => "a string",
            Self::Bytes(_) => "bytes",
            Self::List(_) => "a list",
            Self::Tuple(_) => "a tuple",
            Self::Dict(_) => "a dictionary",
            Self::Tensor(_) => "a tensor",
            Self::Foreign(_) => "an object of Python",
        }
    }

    /// Returns a copy of the tree with references to its tensors.
    ///
    /// ```
    /// use brigade_checkpoint::Value;
    ///
    /// let state = Value::dict([("mean", Value::Tensor([1.0, 2.0]))]);
    /// let lengths = state.as_ref().try_map(&mut |_, tensor| Ok::<_, ()>(tensor.len())).unwrap();
    /// assert_eq!(lengths.get("mean"), Some(&Value::Tensor(2)));
    /// ```
    #[must_use]
    pub fn as_ref(&self) -> Value<&T> {
        match self {
            Self::None => Value::None,
            Self::Bool(truth) => Value::Bool(*truth),
            Self::Int(number) => Value::Int(*number),
            Self::Float(number) => Value::Float(*number),
            Self::Str(text) => Value::Str(text.clone()),
            Self::Bytes(bytes) => Value::Bytes(bytes.clone()),
            Self::Foreign(name) => Value::Foreign(name.clone()),
            Self::List(list) => Value::List(list.iter().map(Self::as_ref).collect()),
            Self::Tuple(tuple) => Value::Tuple(tuple.iter().map(Self::as_ref).collect()),
            Self::Tensor(tensor) => Value::Tensor(tensor),
            Self::Dict(entries) => {
                Value::Dict(entries.iter().map(|(k, v)| (k.as_ref(), v.as_ref())).collect())
            }
        }
    }

    /// Returns the tree with each tensor replaced by the result of `f`, which gets the tensor and its place in the
    /// tree: its keys joined by dots.
    ///
    /// # Errors
    /// Returns the first error of `f`.
    pub fn try_map<U, E>(self, f: &mut dyn FnMut(&str, T) -> Result<U, E>) -> Result<Value<U>, E> {
        self.map_under("", f)
    }

    fn map_under<U, E>(
        self,
        place: &str,
        f: &mut dyn FnMut(&str, T) -> Result<U, E>,
    ) -> Result<Value<U>, E> {
        let below = |key: String| match place {
            "" => key,
            place => format!("{place}.{key}"),
        };
        // No place is formed for plain values: there may be many of them at a long place.
        let place_of = |value: &Self, key: &dyn Fn() -> String| {
            if value.is_plain() { String::new() } else { below(key()) }
        };
        let mut items = |items: Vec<Self>| -> Result<Vec<Value<U>>, E> {
            let items = items.into_iter().enumerate();
            items
                .map(|(i, item)| {
                    let place = place_of(&item, &|| i.to_string());
                    item.map_under(&place, f)
                })
                .collect()
        };
        Ok(match self {
            Self::None => Value::None,
            Self::Bool(truth) => Value::Bool(truth),
            Self::Int(number) => Value::Int(number),
            Self::Float(number) => Value::Float(number),
            Self::Str(text) => Value::Str(text),
            Self::Bytes(bytes) => Value::Bytes(bytes),
            Self::Foreign(name) => Value::Foreign(name),
            Self::List(list) => Value::List(items(list)?),
            Self::Tuple(tuple) => Value::Tuple(items(tuple)?),
            Self::Tensor(tensor) => Value::Tensor(f(place, tensor)?),
            Self::Dict(entries) => {
                let mut mapped = Vec::with_capacity(entries.len());
                for (position, (key, value)) in entries.into_iter().enumerate() {
                    let place = place_of(&value, &|| match &key {
                        Self::Str(name) => name.clone(),
                        Self::Int(number) => number.to_string(),
                        _ => position.to_string(),
                    });
                    let key_place = place_of(&key, &|| format!("key-{position}"));
                    let key = key.map_under(&key_place, f)?;
                    mapped.push((key, value.map_under(&place, f)?));
                }
                Value::Dict(mapped)
            }
        })
    }
}

/// JSON of trees whose tensors are names, as in a checkpoint's JSON files. The tensors themselves are in safetensors
/// files.
///
/// JSON has no tuples, no bytes, only strings as keys, and no infinities. Each of these is an object with one key that
/// begins with `$`: `{"$tensor": "state.0.exp_avg"}`, `{"$tuple": […]}`, `{"$bytes": "base64"}`, `{"$float": "inf"}`,
/// `{"$dict": [[key, value], …]}`.
impl Value<String> {
    /// Converts the tree to JSON.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let items = |items: &[Self]| items.iter().map(Self::to_json).collect::<Vec<_>>();
        match self {
            Self::None => serde_json::Value::Null,
            Self::Bool(truth) => json!(truth),
            Self::Int(number) => json!(number),
            Self::Float(number) => float(*number),
            Self::Str(text) => json!(text),
            Self::Bytes(bytes) => json!({ "$bytes": BASE64.encode(bytes) }),
            Self::List(list) => json!(items(list)),
            Self::Tuple(tuple) => json!({ "$tuple": items(tuple) }),
            Self::Tensor(name) => json!({ "$tensor": name }),
            Self::Foreign(name) => json!({ "$foreign": name }),
            Self::Dict(entries) => {
                let mut object = Map::new();
                for (key, value) in entries {
                    if let Self::Str(key) = key
                        && !key.starts_with('$')
                    {
                        object.insert(key.clone(), value.to_json());
                    }
                }
                if object.len() == entries.len() {
                    return serde_json::Value::Object(object);
                }
                let pairs =
                    entries.iter().map(|(key, value)| json!([key.to_json(), value.to_json()]));
                json!({ "$dict": pairs.collect::<Vec<_>>() })
            }
        }
    }

    /// Converts JSON into a tree.
    ///
    /// # Errors
    /// Returns a message for an object whose key begins with `$` and is unknown, and for a number that fits no type.
    pub fn from_json(json: &serde_json::Value) -> Result<Self, String> {
        let items = |items: &[serde_json::Value]| -> Result<Vec<Self>, String> {
            items.iter().map(Self::from_json).collect()
        };
        Ok(match json {
            serde_json::Value::Null => Self::None,
            serde_json::Value::Bool(truth) => Self::Bool(*truth),
            serde_json::Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(number), _) => Self::Int(number),
                (None, Some(number)) => Self::Float(number),
                (None, None) => return Err(format!("the number {number} fits no type")),
            },
            serde_json::Value::String(text) => Self::Str(text.clone()),
            serde_json::Value::Array(list) => Self::List(items(list)?),
            serde_json::Value::Object(object) => {
                let marked = match object.iter().next() {
                    Some((key, value)) if object.len() == 1 && key.starts_with('$') => {
                        Some((key.as_str(), value))
                    }
                    _ => None,
                };
                let Some(marked) = marked else {
                    let entry = |(key, value): (&String, &serde_json::Value)| {
                        Ok((Self::Str(key.clone()), Self::from_json(value)?))
                    };
                    return Ok(Self::Dict(
                        object.iter().map(entry).collect::<Result<_, String>>()?,
                    ));
                };
                let unknown =
                    || format!("{json} is not a value that this version of Brigade supports");
                match marked {
                    ("$tensor", serde_json::Value::String(name)) => Self::Tensor(name.clone()),
                    ("$foreign", serde_json::Value::String(name)) => Self::Foreign(name.clone()),
                    ("$tuple", serde_json::Value::Array(tuple)) => Self::Tuple(items(tuple)?),
                    ("$float", serde_json::Value::String(number)) => {
                        Self::Float(number.parse().map_err(|_| unknown())?)
                    }
                    ("$bytes", serde_json::Value::String(bytes)) => {
                        Self::Bytes(BASE64.decode(bytes).map_err(|_| unknown())?)
                    }
                    ("$dict", serde_json::Value::Array(pairs)) => {
                        let pair =
                            |pair: &serde_json::Value| match pair.as_array().map(Vec::as_slice) {
                                Some([key, value]) => {
                                    Ok((Self::from_json(key)?, Self::from_json(value)?))
                                }
                                _ => Err(unknown()),
                            };
                        Self::Dict(pairs.iter().map(pair).collect::<Result<_, String>>()?)
                    }
                    _ => return Err(unknown()),
                }
            }
        })
    }
}

/// Returns a JSON number, or a marked string unless JSON parsers return exactly this number: serde_json's fast path is
/// off by the last bit for some, and a resumed run must not differ in one bit.
fn float(number: f64) -> serde_json::Value {
    let exact = Number::from_f64(number).filter(|json| {
        let read = serde_json::from_str::<f64>(&json.to_string());
        read.is_ok_and(|read| read.to_bits() == number.to_bits())
    });
    match exact {
        Some(exact) => serde_json::Value::Number(exact),
        None => json!({ "$float": number.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn values() -> impl Strategy<Value = Value<String>> {
        let leaf = prop_oneof![
            Just(Value::None),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(Value::Int),
            prop_oneof![any::<f64>(), Just(f64::INFINITY), Just(f64::NEG_INFINITY)]
                .prop_filter("NaN is not equal to itself", |x| !x.is_nan())
                .prop_map(Value::Float),
            "\\$?[a-z]{0,4}".prop_map(Value::Str),
            proptest::collection::vec(any::<u8>(), 0..9).prop_map(Value::Bytes),
            "[a-z.]{1,4}".prop_map(Value::Tensor),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::List),
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::Tuple),
                proptest::collection::vec((inner.clone(), inner), 0..4).prop_map(Value::Dict),
            ]
        })
    }

    /// Sorts dictionaries and removes duplicate keys, like JSON objects.
    fn plain(value: &Value<String>) -> Value<String> {
        match value {
            Value::List(list) => Value::List(list.iter().map(plain).collect()),
            Value::Tuple(list) => Value::Tuple(list.iter().map(plain).collect()),
            Value::Dict(entries) => {
                let mut entries: Vec<_> =
                    entries.iter().map(|(k, v)| (plain(k), plain(v))).collect();
                let plain_keys =
                    |key: &Value<String>| key.as_str().is_some_and(|k| !k.starts_with('$'));
                if entries.iter().all(|(key, _)| plain_keys(key)) {
                    entries.sort_by(|(a, _), (b, _)| a.as_str().cmp(&b.as_str()));
                }
                Value::Dict(entries)
            }
            other => other.clone(),
        }
    }

    proptest! {
        #[test]
        fn json_keeps_every_value(value in values()) {
            let text = value.to_json().to_string();
            let back = Value::from_json(&serde_json::from_str(&text).unwrap()).unwrap();
            prop_assert_eq!(plain(&back), plain(&value));
        }
    }

    #[test]
    fn places_join_the_keys() {
        let state = Value::dict([("state", Value::Dict(vec![(Value::Int(3), Value::Tensor(7))]))]);
        let mut seen = Vec::new();
        let _ = state.try_map(&mut |place, tensor| {
            seen.push((place.to_owned(), tensor));
            Ok::<_, ()>(())
        });
        assert_eq!(seen, [("state.3".to_owned(), 7)]);
    }
}
