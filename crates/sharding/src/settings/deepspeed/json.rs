//! Parser of a configuration's text: JSON, or base64 of it, as Accelerate accepts it.

use std::cell::RefCell;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::settings::SettingsError;

/// Reads a JSON object. A duplicate key is an error.
pub(super) fn read(origin: &str, text: &str) -> Result<Map<String, Value>, SettingsError> {
    let fault = |error: serde_json::Error| SettingsError::Syntax {
        origin: origin.to_owned(),
        message: error.to_string(),
    };
    let decoded = || URL_SAFE.decode(text.trim()).ok().and_then(|it| String::from_utf8(it).ok());
    let value = match parse(text) {
        Err(Fault::Syntax(error)) => match decoded() {
            Some(decoded) => parse(&decoded),
            None => return Err(fault(error)),
        },
        parsed => parsed,
    };
    match value {
        Ok(Value::Object(root)) => Ok(root),
        Ok(_) => Err(SettingsError::Syntax {
            origin: origin.to_owned(),
            message: "expected an object, { \"zero_optimization\": ... }".to_owned(),
        }),
        Err(Fault::Syntax(error)) => Err(fault(error)),
        Err(Fault::Duplicate(key)) => {
            Err(SettingsError::Duplicate { origin: origin.to_owned(), key })
        }
    }
}

enum Fault {
    Syntax(serde_json::Error),
    Duplicate(String),
}

fn parse(text: &str) -> Result<Value, Fault> {
    let duplicate = RefCell::new(None);
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = Unique { duplicate: &duplicate }.deserialize(&mut deserializer);
    let value = value.and_then(|value| deserializer.end().map(|()| value));
    match (value, duplicate.into_inner()) {
        (_, Some(key)) => Err(Fault::Duplicate(key)),
        (value, None) => value.map_err(Fault::Syntax),
    }
}

/// Deserializer of a value that records a duplicate key: `serde_json` would silently take the last value.
#[derive(Clone, Copy)]
struct Unique<'a> {
    duplicate: &'a RefCell<Option<String>>,
}

impl<'de> DeserializeSeed<'de> for Unique<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if map.contains_key(&key) {
                self.duplicate.borrow_mut().get_or_insert_with(|| key.clone());
            }
            map.insert(key, entries.next_value_seed(self)?);
        }
        Ok(map.into())
    }
}
