//! Values whose syntax is defined in the launcher.

use brigade_launch::events::EventsTarget;
use brigade_launch::{
    BindMode, Color, DeviceList, LineFilter, LocalRanks, NodeRange, NprocSpec, PortRange, Prefix,
    StreamModes,
};
use brigade_ssh::{HostListError, HostSpec};

use super::{List, Value};

/// Number of ranks, at least 1.
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

/// List of hosts as written: `node1:4`, `user@node2`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostList(pub List);

impl Value for HostList {
    const EXPECTED: &'static str = "hosts with their numbers of ranks, such as node1:4,node2:4";
    const IS_LIST: bool = true;

    fn parse(text: &str) -> Option<Self> {
        HostSpec::parse_list(text).ok().and_then(|_| List::parse(text)).map(Self)
    }

    fn fault(text: &str) -> String {
        match HostSpec::parse_list(text) {
            Err(HostListError::Malformed { found, expected, .. }) if found != text => {
                format!("{expected}, found {found:?}")
            }
            Err(HostListError::Malformed { expected, .. }) => expected,
            _ => format!("expected {}", Self::EXPECTED),
        }
    }

    fn write(&self) -> toml::Value {
        self.0.write()
    }

    fn text(&self) -> String {
        self.0.text()
    }
}

macro_rules! values {
    ($($type:ty: $is_list:literal $expected:literal $([$($word:literal)*])?;)*) => {$(
        impl Value for $type {
            const EXPECTED: &'static str = $expected;
            $(const WORDS: &'static [&'static str] = &[$($word,)*];)?
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
    BindMode: false "none, cores, numa, socket or core-complex"
        ["none" "cores" "numa" "socket" "core-complex"];
    Color: false "auto, always or never" ["auto" "always" "never"];
    DeviceList: true "all, or numbers or UUIDs such as 0,2";
    EventsTarget: false "a file, or fd:N with the number of a descriptor";
    LineFilter: true "words with commas between them";
    LocalRanks: true "local ranks such as 0,1";
    PortRange: false "a port from 1 to 65535, or FIRST-LAST";
    Prefix: false "a template such as `[${rank}] `";
    StreamModes: false "0, 1, 2 or 3, or LOCAL_RANK:MODE,...";
}
