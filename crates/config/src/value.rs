//! Types of settings' values, and their parsing from a file, a variable or a flag.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use indexmap::IndexMap;
use serde_json::{Map, Value as Json};

pub use choice::{Backend, DynamoBackend, DynamoMode, Precision};
pub use foreign::HostList;
pub use sharding::ShardingSetting;

mod choice;
mod foreign;
mod sharding;

/// Type of a setting's value.
///
/// One definition serves the settings file, the environment and the flags, so that all of them accept the same values.
pub trait Value: Clone + PartialEq + Sized {
    /// Description of a valid value, for errors and help: "a whole number".
    const EXPECTED: &'static str;

    /// `true` if the flag needs no value.
    const IS_SWITCH: bool = false;

    /// Words of which the value is one. Empty if it is not one of a few words.
    const WORDS: &'static [&'static str] = &[];

    /// `true` if a file may contain a list in brackets.
    const IS_LIST: bool = false;

    /// `true` if a file may contain a table. [`parse`](Self::parse) takes it as JSON.
    const TAKES_TABLE: bool = false;

    /// Parses the text of a variable or flag; `None` if it is not [`EXPECTED`](Self::EXPECTED).
    fn parse(text: &str) -> Option<Self>;

    /// Returns what is wrong with a text that [`parse`](Self::parse) does not accept.
    #[must_use]
    fn fault(_text: &str) -> String {
        format!("expected {}", Self::EXPECTED)
    }

    /// Converts a value of a settings file; `None` if it is not valid. By default a text is parsed, and a whole number
    /// as the text of it, so that `nproc = 4` and `nproc = "auto"` are both valid.
    #[must_use]
    fn read(raw: &Raw) -> Option<Self> {
        Self::parse(&raw.words(Self::IS_LIST)?)
    }

    /// Returns the value in the form of a settings file.
    fn write(&self) -> toml::Value {
        let text = self.text();
        text.parse().map_or(toml::Value::String(text), toml::Value::Integer)
    }

    /// Returns the value in the form of a variable or flag.
    fn text(&self) -> String;
}

/// Value of a settings file before its setting's type is known.
#[derive(Clone, Debug, PartialEq)]
pub enum Raw {
    /// A text in quotation marks.
    Text(String),
    /// A whole number.
    Integer(i64),
    /// Any other number.
    Float(f64),
    /// A Boolean, `true` or `false`.
    Bool(bool),
    /// A list of values in brackets.
    List(Vec<Self>),
    /// Keys and values, for an Accelerate file in the order of the file.
    Table(IndexMap<String, Self>),
    /// Null in YAML or JSON.
    Null,
    /// A value that no setting accepts, such as a date or a number that is out of range.
    Other(String),
}

impl Raw {
    /// Returns the value in short form, for an error message.
    #[must_use]
    pub fn shown(&self) -> String {
        match self {
            Self::Text(text) => format!("{text:?}"),
            Self::Integer(number) => number.to_string(),
            Self::Float(number) => number.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::List(_) => "a list".to_owned(),
            Self::Table(_) => "a table".to_owned(),
            Self::Null => "null".to_owned(),
            Self::Other(text) => text.clone(),
        }
    }

    /// Converts the value to JSON. Returns `None` if it contains a type that settings do not allow inside a table: a
    /// date, a fraction or null.
    pub(crate) fn json(&self) -> Option<Json> {
        Some(match self {
            Self::Text(text) => text.clone().into(),
            Self::Integer(number) => (*number).into(),
            Self::Bool(value) => (*value).into(),
            Self::List(items) => items.iter().map(Self::json).collect::<Option<Vec<_>>>()?.into(),
            Self::Table(table) => {
                let pair = |(key, value): (&String, &Self)| Some((key.clone(), value.json()?));
                table.iter().map(pair).collect::<Option<Map<_, _>>>()?.into()
            }
            Self::Float(_) | Self::Null | Self::Other(_) => return None,
        })
    }

    fn scalar(&self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text.clone()),
            Self::Integer(number) => Some(number.to_string()),
            _ => None,
        }
    }

    /// Returns the value in the form of a command line.
    fn words(&self, is_list: bool) -> Option<String> {
        let Self::List(items) = self else { return self.scalar() };
        let words: Vec<String> = items.iter().map(Self::scalar).collect::<Option<_>>()?;
        let whole = words.iter().all(|word| !word.contains(','));
        (is_list && whole && !words.is_empty()).then(|| words.join(","))
    }
}

impl Value for bool {
    const EXPECTED: &'static str = "true or false";
    const IS_SWITCH: Self = true;

    /// Accepts Accelerate's words. A flag without a value is handled elsewhere.
    fn parse(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "true" | "t" | "yes" | "y" | "on" | "1" => Some(true),
            "false" | "f" | "no" | "n" | "off" | "0" => Some(false),
            _ => None,
        }
    }

    fn read(raw: &Raw) -> Option<Self> {
        if let Raw::Bool(value) = raw { Some(*value) } else { None }
    }

    fn write(&self) -> toml::Value {
        toml::Value::Boolean(*self)
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

macro_rules! whole_numbers {
    ($($number:ty => $expected:literal,)+) => { $(
        impl Value for $number {
            const EXPECTED: &'static str = $expected;

            fn parse(text: &str) -> Option<Self> {
                text.parse().ok()
            }

            fn read(raw: &Raw) -> Option<Self> {
                if let Raw::Integer(number) = raw { Self::try_from(*number).ok() } else { None }
            }

            fn text(&self) -> String {
                self.to_string()
            }
        }
    )+ };
}

whole_numbers! {
    usize => "a whole number",
    u32 => "a whole number",
    u16 => "a port, from 0 to 65535",
}

impl Value for NonZeroUsize {
    const EXPECTED: &'static str = "a whole number, at least 1";

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn read(raw: &Raw) -> Option<Self> {
        if let Raw::Integer(number) = raw {
            usize::try_from(*number).ok()?.try_into().ok()
        } else {
            None
        }
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

impl Value for String {
    const EXPECTED: &'static str = "a text that is not empty";

    fn parse(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| text.to_owned())
    }

    fn write(&self) -> toml::Value {
        toml::Value::String(self.clone())
    }

    fn text(&self) -> String {
        self.clone()
    }
}

impl Value for PathBuf {
    const EXPECTED: &'static str = "a path";

    fn parse(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| text.into())
    }

    fn read(raw: &Raw) -> Option<Self> {
        if let Raw::Text(text) = raw { Self::parse(text) } else { None }
    }

    fn write(&self) -> toml::Value {
        toml::Value::String(self.text())
    }

    fn text(&self) -> String {
        self.display().to_string()
    }
}

/// A duration. A number without a unit is in seconds.
impl Value for Duration {
    const EXPECTED: &'static str = "a number of seconds";

    fn parse(text: &str) -> Option<Self> {
        Self::try_from_secs_f64(text.parse().ok()?).ok()
    }

    fn read(raw: &Raw) -> Option<Self> {
        match raw {
            Raw::Integer(seconds) => u64::try_from(*seconds).ok().map(Self::from_secs),
            Raw::Float(seconds) => Self::try_from_secs_f64(*seconds).ok(),
            _ => None,
        }
    }

    fn write(&self) -> toml::Value {
        if self.subsec_nanos() == 0 && i64::try_from(self.as_secs()).is_ok() {
            toml::Value::Integer(self.as_secs().cast_signed())
        } else {
            toml::Value::Float(self.as_secs_f64())
        }
    }

    fn text(&self) -> String {
        self.as_secs_f64().to_string()
    }
}

/// List of words, none of them empty: `a,b` on a command line, `["a", "b"]` in a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List(pub Vec<String>);

impl Value for List {
    const EXPECTED: &'static str = "a list of words, separated by commas";
    const IS_LIST: bool = true;

    fn parse(text: &str) -> Option<Self> {
        let words: Vec<String> = text.split(',').map(|word| word.trim().to_owned()).collect();
        words.iter().all(|word| !word.is_empty()).then_some(Self(words))
    }

    fn write(&self) -> toml::Value {
        toml::Value::Array(self.0.iter().cloned().map(toml::Value::String).collect())
    }

    fn text(&self) -> String {
        self.0.join(",")
    }
}

/// Pairs of names and values: `a=1,b=2` on a command line, `{ a = 1, b = 2 }` or that text in a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pairs(pub BTreeMap<String, String>);

impl Value for Pairs {
    const EXPECTED: &'static str = "name=value pairs, separated by commas";

    fn parse(text: &str) -> Option<Self> {
        let mut pairs = BTreeMap::new();
        for pair in text.split(',') {
            let (name, value) = pair.split_once('=')?;
            let (name, value) = (name.trim(), value.trim());
            if name.is_empty() || pairs.insert(name.to_owned(), value.to_owned()).is_some() {
                return None;
            }
        }
        Some(Self(pairs))
    }

    fn read(raw: &Raw) -> Option<Self> {
        let Raw::Table(table) = raw else { return raw.scalar().and_then(|it| Self::parse(&it)) };
        let pair = |(name, value): (&String, &Raw)| {
            let value = match value {
                Raw::Text(text) if !text.contains(',') => text.clone(),
                Raw::Integer(_) | Raw::Float(_) | Raw::Bool(_) => value.shown(),
                _ => return None,
            };
            Some((name.clone(), value))
        };
        table.iter().map(pair).collect::<Option<_>>().map(Self)
    }

    fn write(&self) -> toml::Value {
        toml::Value::String(self.text())
    }

    fn text(&self) -> String {
        let pairs: Vec<String> =
            self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        pairs.join(",")
    }
}

/// Implements `Value` for types with a single text form.
macro_rules! words {
    ($($type:ty: $expected:literal $(, $words:expr)?;)*) => {$(
        impl $crate::value::Value for $type {
            const EXPECTED: &'static str = $expected;
            $(const WORDS: &'static [&'static str] = $words;)?

            fn parse(text: &str) -> Option<Self> {
                text.parse().ok()
            }

            fn text(&self) -> String {
                self.to_string()
            }
        }
    )*};
}

use words;
