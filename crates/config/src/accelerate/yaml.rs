//! Parser of a file into its keys with their line numbers.

use std::fmt;
use std::path::Path;

use indexmap::IndexMap;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{DuplicateKeyPolicy, MessageFormatter, Spanned, UserMessageFormatter};

use super::Entry;
use crate::error::ConfigError;
use crate::value::Raw;

/// Returns the keys of the file, in order.
pub(super) fn read(path: &Path, text: &str) -> Result<Vec<Entry>, ConfigError> {
    let fault =
        |line: usize, format, message: &str| ConfigError::syntax(path, text, line, format, message);
    // JSON is a subset of YAML, but errors of a JSON file should mention JSON.
    if path.extension().is_some_and(|it| it.eq_ignore_ascii_case("json"))
        && let Err(error) = serde_json::from_str::<IgnoredAny>(text)
    {
        let message = error.to_string();
        // The message already contains the line number.
        let message = message.split(" at line ").next().unwrap_or_default();
        return Err(fault(error.line(), "JSON", message));
    }
    // As in PyYAML, a key may occur twice, and the last one counts.
    let options = serde_saphyr::options! { duplicate_keys: DuplicateKeyPolicy::PassThrough };
    let document = serde_saphyr::from_str_with_options(text, options);
    let document: Document = document.map_err(|error| {
        let line = error.location().and_then(|it| usize::try_from(it.line()).ok()).unwrap_or(1);
        fault(line, "YAML", &UserMessageFormatter.format_message(error.without_snippet()))
    })?;
    Ok(document.0)
}

struct Document(Vec<Entry>);

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(DocumentVisitor)
    }
}

struct DocumentVisitor;

impl<'de> Visitor<'de> for DocumentVisitor {
    type Value = Document;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("keys and values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Document, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            let line = usize::try_from(key.referenced.line()).unwrap_or(0);
            entries.push(Entry { key: key.value, line, value: map.next_value()? });
        }
        Ok(Document(entries))
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Raw, E> {
        Ok(Raw::Bool(value))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Raw, E> {
        Ok(Raw::Integer(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Raw, E> {
        Ok(i64::try_from(number).map_or_else(|_| Raw::Other(number.to_string()), Raw::Integer))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Raw, E> {
        Ok(Raw::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Raw, E> {
        Ok(Raw::Text(text.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Null)
    }

    fn visit_none<E>(self) -> Result<Raw, E> {
        Ok(Raw::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Raw, D::Error> {
        Raw::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Raw, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Raw::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
        let mut table = IndexMap::new();
        while let Some((key, value)) = map.next_entry()? {
            table.insert(key, value);
        }
        Ok(Raw::Table(table))
    }
}
