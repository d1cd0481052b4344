//! A run's settings, in the order in which they were written.

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};
use serde_json::Number;

use crate::{Result, TrackError, Value};

/// Settings of a run, nested as they were given. Made from any value that serde can serialise; fields keep their order.
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
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Config(Node);

/// JSON tree whose objects keep the order of their fields. The feature `preserve_order` of serde_json would give that
/// too, but for the whole program.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Node {
    #[default]
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    List(Vec<Self>),
    Map(Fields),
}

type Fields = IndexMap<String, Node>;

impl Config {
    /// Serialises `settings`: a struct or a map. `&()` stands for no settings.
    ///
    /// # Errors
    /// [`TrackError::Config`] for what JSON cannot hold, such as maps whose keys are not text.
    pub fn of(settings: &impl Serialize) -> Result<Self> {
        let refused = |error: serde_json::Error| TrackError::Config { reason: error.to_string() };
        // Through text: serde_json's own tree does not keep the order of fields, and has 0.10000000149011612 for an f32
        // of 0.1.
        let text = serde_json::to_string(settings).map_err(refused)?;
        Ok(Self(serde_json::from_str(&text).map_err(refused)?))
    }

    /// Returns `true` if the run has no settings.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match &self.0 {
            Node::Null => true,
            Node::Map(fields) => fields.is_empty(),
            _ => false,
        }
    }

    /// Returns the settings on one level: names of nested settings are joined by dots, lists become JSON text, and null
    /// becomes the text `null`.
    #[must_use]
    pub fn flat(&self) -> Vec<(String, Value)> {
        let mut flat = Vec::new();
        match &self.0 {
            Node::Null => {}
            Node::Map(fields) => flatten("", fields, &mut flat),
            other => flat.push(("config".to_owned(), value(other))),
        }
        flat
    }
}

fn flatten(prefix: &str, fields: &Fields, flat: &mut Vec<(String, Value)>) {
    for (name, field) in fields {
        let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        match field {
            Node::Map(fields) if !fields.is_empty() => flatten(&name, fields, flat),
            other => flat.push((name, value(other))),
        }
    }
}

fn value(node: &Node) -> Value {
    match node {
        Node::Bool(truth) => Value::Bool(*truth),
        Node::Text(text) => Value::Text(text.clone()),
        Node::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(number), _) => Value::Int(number),
            (None, Some(number)) => Value::Float(number),
            (None, None) => Value::Text(number.to_string()),
        },
        // Cannot fail: the tree holds only text, numbers and lists.
        other => Value::Text(serde_json::to_string(other).unwrap_or_default()),
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
        rate: f32,
    }

    #[derive(serde::Serialize)]
    struct Inner {
        two: u64,
        one: [i32; 2],
    }

    #[test]
    fn fields_keep_their_order() {
        let settings = Settings {
            zeta: 0.5,
            alpha: Inner { two: u64::MAX, one: [1, 2] },
            name: None,
            rate: 0.1,
        };
        let config = Config::of(&settings).unwrap();
        let names: Vec<String> = config.flat().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["zeta", "alpha.two", "alpha.one", "name", "rate"]);
        assert_eq!(
            serde_json::to_string(&config).unwrap(),
            r#"{"zeta":0.5,"alpha":{"two":18446744073709551615,"one":[1,2]},"name":null,"rate":0.1}"#
        );
        assert_eq!(config.flat()[3].1, Value::from("null"));
        assert_eq!(config.flat()[1].1, Value::from(u64::MAX));
        assert_eq!(config.flat()[4].1, Value::from(0.1));
        assert!(Config::of(&()).unwrap().is_empty() && Config::default().flat().is_empty());
    }

    #[test]
    fn values_outside_json_are_an_error() {
        let keys = std::collections::BTreeMap::from([((1, 2), 3)]);
        let error = Config::of(&keys).unwrap_err().to_string();
        assert!(error.contains("cannot be written as JSON"), "{error}");
    }
}
