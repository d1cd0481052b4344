//! A run's settings, in the order in which they were written.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::{Result, TrackError, Value};

/// Settings, nested as they were given. Made from anything that serde can serialise; fields keep their
/// order.
///
/// ```
/// use brigade_track::{Config, Value};
///
/// let config = Config::of(&serde_json::json!({ "optimizer": { "lr": 0.1 }, "widths": [8, 16] }))?;
/// assert_eq!(
///     config.flat(),
///     [("optimizer.lr".to_owned(), Value::from(0.1)), ("widths".to_owned(), Value::from("[8,16]"))]
/// );
/// # Ok::<(), brigade_track::TrackError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Config(Node);

#[derive(Debug, Clone, Default, PartialEq)]
enum Node {
    #[default]
    Null,
    Leaf(Value),
    List(Vec<Self>),
    Map(Vec<(String, Self)>),
}

impl Config {
    /// Anything that serde can serialise: a struct, a map; `&()` is no settings.
    ///
    /// # Errors
    /// [`TrackError::Config`] for what JSON cannot hold, such as maps whose keys are no text.
    pub fn of(settings: &impl Serialize) -> Result<Self> {
        // By way of text: serde_json's own tree forgets the order of fields.
        let text = serde_json::to_string(settings).map_err(|it| refused(&it))?;
        Ok(Self(serde_json::from_str(&text).map_err(|it| refused(&it))?))
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match &self.0 {
            Node::Null => true,
            Node::Map(fields) => fields.is_empty(),
            _ => false,
        }
    }

    /// One level: names of nested settings are joined by dots, lists become JSON text, and what is null
    /// is `null`.
    #[must_use]
    pub fn flat(&self) -> Vec<(String, Value)> {
        let mut flat = Vec::new();
        match &self.0 {
            Node::Null => {}
            Node::Map(fields) => flatten("", fields, &mut flat),
            other => flat.push(("config".to_owned(), other.as_value())),
        }
        flat
    }
}

fn flatten(prefix: &str, fields: &[(String, Node)], flat: &mut Vec<(String, Value)>) {
    for (name, node) in fields {
        let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        match node {
            Node::Map(fields) if !fields.is_empty() => flatten(&name, fields, flat),
            other => flat.push((name, other.as_value())),
        }
    }
}

impl Node {
    fn as_value(&self) -> Value {
        match self {
            Self::Leaf(value) => value.clone(),
            // A tree of text, numbers and lists: serde_json has no reason to refuse it.
            other => Value::Text(serde_json::to_string(other).unwrap_or_default()),
        }
    }
}

fn refused(error: &serde_json::Error) -> TrackError {
    TrackError::Config { reason: error.to_string() }
}

impl Serialize for Config {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl Serialize for Node {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Leaf(value) => value.json().serialize(serializer),
            Self::List(nodes) => nodes.serialize(serializer),
            Self::Map(fields) => {
                let mut map = serializer.serialize_map(Some(fields.len()))?;
                for (name, node) in fields {
                    map.serialize_entry(name, node)?;
                }
                map.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Nodes;

        impl<'de> Visitor<'de> for Nodes {
            type Value = Node;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a setting")
            }

            fn visit_unit<E>(self) -> std::result::Result<Node, E> {
                Ok(Node::Null)
            }

            fn visit_bool<E>(self, value: bool) -> std::result::Result<Node, E> {
                Ok(Node::Leaf(value.into()))
            }

            fn visit_i64<E>(self, value: i64) -> std::result::Result<Node, E> {
                Ok(Node::Leaf(value.into()))
            }

            fn visit_u64<E>(self, value: u64) -> std::result::Result<Node, E> {
                Ok(Node::Leaf(value.into()))
            }

            fn visit_f64<E>(self, value: f64) -> std::result::Result<Node, E> {
                Ok(Node::Leaf(value.into()))
            }

            fn visit_str<E>(self, value: &str) -> std::result::Result<Node, E> {
                Ok(Node::Leaf(value.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut list: A,
            ) -> std::result::Result<Node, A::Error> {
                let mut nodes = Vec::new();
                while let Some(node) = list.next_element()? {
                    nodes.push(node);
                }
                Ok(Node::List(nodes))
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Node, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Node::Map(fields))
            }
        }

        deserializer.deserialize_any(Nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Serialize)]
    struct Settings {
        zeta: f64,
        alpha: Inner,
        name: Option<&'static str>,
    }

    #[derive(serde::Serialize)]
    struct Inner {
        two: u64,
        one: [i32; 2],
    }

    #[test]
    fn fields_keep_their_order() {
        let settings =
            Settings { zeta: 0.5, alpha: Inner { two: u64::MAX, one: [1, 2] }, name: None };
        let config = Config::of(&settings).unwrap();
        let names: Vec<String> = config.flat().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["zeta", "alpha.two", "alpha.one", "name"]);
        assert_eq!(
            serde_json::to_string(&config).unwrap(),
            r#"{"zeta":0.5,"alpha":{"two":1.8446744073709552e+19,"one":[1,2]},"name":null}"#
        );
        assert_eq!(config.flat()[3].1, Value::from("null"));
        assert!(Config::of(&()).unwrap().is_empty() && Config::default().flat().is_empty());
    }

    #[test]
    fn what_json_cannot_hold_is_an_error() {
        let keys = std::collections::BTreeMap::from([((1, 2), 3)]);
        let error = Config::of(&keys).unwrap_err().to_string();
        assert!(error.contains("cannot be written as JSON"), "{error}");
    }
}
