//! How a Rust program shards its model.

use brigade_sharding::Sharding;
use serde_json::{Map, Value as Json};

use super::{Raw, Value};

/// A strategy of sharding with its options; `None` is `none`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardingSetting(pub Option<Sharding>);

impl Value for ShardingSetting {
    const EXPECTED: &'static str =
        "none, zero1, zero2, zero3, hybrid=N, or a strategy with its options";

    fn parse(text: &str) -> Option<Self> {
        Sharding::parse_setting(text).ok().map(Self)
    }

    fn fault(text: &str) -> String {
        match Sharding::parse_setting(text) {
            Err(fault) => fault.to_string(),
            Ok(_) => format!("expected {}", Self::EXPECTED),
        }
    }

    /// A table has the keys of the text's JSON.
    fn read(raw: &Raw) -> Option<Self> {
        match raw {
            Raw::Text(text) => Self::parse(text),
            Raw::Table(_) => Self::parse(&json(raw)?.to_string()),
            _ => None,
        }
    }

    fn write(&self) -> toml::Value {
        toml::Value::String(self.text())
    }

    fn text(&self) -> String {
        self.0.as_ref().map_or_else(|| "none".to_owned(), Sharding::to_setting)
    }
}

fn json(raw: &Raw) -> Option<Json> {
    Some(match raw {
        Raw::Text(text) => text.clone().into(),
        Raw::Integer(number) => (*number).into(),
        Raw::Bool(value) => (*value).into(),
        Raw::List(items) => items.iter().map(json).collect::<Option<Vec<_>>>()?.into(),
        Raw::Table(table) => {
            let pair = |(key, value): (&String, &Raw)| Some((key.clone(), json(value)?));
            table.iter().map(pair).collect::<Option<Map<_, _>>>()?.into()
        }
        Raw::Float(_) | Raw::Null | Raw::Other(_) => return None,
    })
}

#[cfg(test)]
mod tests {
    use brigade_sharding::{Offload, Reshard};

    use crate::file;

    #[test]
    fn a_file_has_a_word_or_a_table() {
        let table = [
            ("\"zero2\"", "zero2"),
            ("\"none\"", "none"),
            ("{ strategy = \"hybrid=4\" }", "hybrid=4"),
            (
                "{ strategy = \"zero3\", units = { at_least = 1000 } }",
                r#"{"strategy":"zero3","units":{"at_least":1000}}"#,
            ),
        ];
        for (written, expected) in table {
            let text = format!("version = 1\n[training]\nsharding = {written}\n");
            let layer = file::read("f".as_ref(), &text).unwrap();
            assert_eq!(layer.settings.text("sharding").as_deref(), Some(expected), "{written}");
        }
        let text = "version = 1\n[training.sharding]\nstrategy = \"zero3\"\nreshard_after_forward = \"no\"\n\
                    offload = { cpu = { pin = true } }\n";
        let layer = file::read("f".as_ref(), text).unwrap();
        let sharding = layer.settings.sharding.unwrap().0.unwrap();
        assert_eq!(sharding.reshard_after_forward, Reshard::No);
        assert_eq!(sharding.offload, Offload::Cpu { pin: true });
    }

    #[test]
    fn wrong_words_say_which_there_are() {
        for (written, expected) in [
            (
                "\"zero4\"",
                "f:3: sharding is \"zero4\", `zero4` is not a sharding strategy: write none",
            ),
            ("{ strategy = \"zero4\" }", "f:3: sharding is a table, expected none, zero1, "),
            ("3", "f:3: sharding is 3, expected none, zero1, "),
        ] {
            let text = format!("version = 1\n[training]\nsharding = {written}\n");
            let error = file::read("f".as_ref(), &text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
