//! Setting of how a Rust program shards its model.

use brigade_sharding::pipeline::Schedule;
use brigade_sharding::{ContextMethod, Sharding};

use super::{Raw, Value};

/// Sharding strategy with its options. `None` is written `none`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardingSetting(pub Option<Sharding>);

impl Value for ShardingSetting {
    const EXPECTED: &'static str =
        "none, zero1, zero2, zero3, hybrid=N, or a strategy with its options";
    const TAKES_TABLE: bool = true;

    fn parse(text: &str) -> Option<Self> {
        Sharding::parse_setting(text).ok().map(Self)
    }

    fn fault(text: &str) -> String {
        match Sharding::parse_setting(text) {
            Err(fault) => fault.to_string(),
            Ok(_) => format!("expected {}", Self::EXPECTED),
        }
    }

    /// Converts a table to JSON with the same keys, and parses that.
    fn read(raw: &Raw) -> Option<Self> {
        match raw {
            Raw::Text(text) => Self::parse(text),
            Raw::Table(_) => Self::parse(&raw.json()?.to_string()),
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

impl Value for ContextMethod {
    const EXPECTED: &'static str = "gather, ring or ulysses";
    const WORDS: &'static [&'static str] = &["gather", "ring", "ulysses"];

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn text(&self) -> String {
        self.name().to_owned()
    }
}

impl Value for Schedule {
    const EXPECTED: &'static str = "gpipe, 1f1b, interleaved, looped-bfs, zb-h1 or zbv";
    const WORDS: &'static [&'static str] =
        &["gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zbv"];

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn text(&self) -> String {
        self.name().to_owned()
    }
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
            (
                "{ strategy = \"zero4\" }",
                "f:3: sharding is a table, not the options of a sharding strategy in JSON: `zero4` is not a",
            ),
            (
                "{ strategy = \"zero3\", resard = \"no\" }",
                "f:3: sharding is a table, not the options of a sharding strategy in JSON: unknown field `resard`",
            ),
            ("{ strategy = \"zero3\", units = 1.5 }", "f:3: sharding is a table, expected none"),
            ("3", "f:3: sharding is 3, `3` is not a sharding strategy: write none"),
        ] {
            let text = format!("version = 1\n[training]\nsharding = {written}\n");
            let error = file::read("f".as_ref(), &text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
