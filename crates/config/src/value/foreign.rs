//! Values whose syntax is the launcher's.

use brigade_launch::{
    BindMode, Color, DeviceList, LineFilter, LocalRanks, NodeRange, NprocSpec, Prefix, StreamModes,
};

use super::Value;

/// A count of ranks, which no job has none of.
impl Value for NprocSpec {
    const EXPECTED: &'static str = "a whole number from 1, or auto, gpu or cpu";

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|it| *it != Self::Count(0))
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

impl Value for NodeRange {
    const EXPECTED: &'static str = "a number of hosts from 1, or MIN:MAX";

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// A template: every text is one, so none is wrong.
impl Value for Prefix {
    const EXPECTED: &'static str = "a template such as `[${rank}] `";

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok()
    }

    fn write(&self) -> toml::Value {
        toml::Value::String(self.text())
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

macro_rules! values {
    ($($type:ty: $is_list:literal $expected:literal;)*) => {$(
        impl Value for $type {
            const EXPECTED: &'static str = $expected;
            const IS_LIST: bool = $is_list;

            fn parse(text: &str) -> Option<Self> {
                text.parse().ok()
            }

            fn fault(text: &str) -> String {
                match text.parse::<Self>() {
                    Err(error) => error.to_string(),
                    Ok(_) => format!("expected {}", Self::EXPECTED),
                }
            }

            fn text(&self) -> String {
                self.to_string()
            }
        }
    )*};
}

values! {
    BindMode: false "none, cores, numa, socket or core-complex";
    Color: false "auto, always or never";
    DeviceList: true "all, or numbers or UUIDs such as 0,2";
    LineFilter: true "words with commas between them";
    LocalRanks: true "local ranks such as 0,1";
    StreamModes: false "0, 1, 2 or 3, or LOCAL_RANK:MODE,...";
}
