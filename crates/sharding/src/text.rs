//! The text form of a [`Sharding`], for variables, flags and settings files.

use std::env;
use std::ffi::OsStr;

use brigade_rank_env::env::BRIGADE_SHARDING;
use serde_json::Value;

use crate::{Sharding, ShardingError, Strategy};

impl Sharding {
    /// Parses a setting: `none`, which returns `None`; a strategy (`zero1`, `zero2`, `zero3`, `hybrid=8`) with the
    /// default options; or an object in JSON with the strategy and its options. White space around it is skipped.
    ///
    /// ```
    /// use brigade_sharding::{MixedPrecision, Offload, Sharding};
    ///
    /// assert_eq!(Sharding::parse_setting("none"), Ok(None));
    /// assert_eq!(Sharding::parse_setting("hybrid=8"), Ok(Some(Sharding::hybrid(8))));
    /// let text = r#"{"strategy": "zero3", "offload": {"cpu": {"pin": true}}, "mixed": {"param": "BF16"}}"#;
    /// let sharding =
    ///     Sharding::zero3().offload(Offload::Cpu { pin: true }).mixed(MixedPrecision::bf16());
    /// assert_eq!(Sharding::parse_setting(text), Ok(Some(sharding)));
    /// ```
    ///
    /// # Errors
    /// [`ShardingError::UnknownStrategy`] for an unknown word, [`ShardingError::Json`] for an object with an
    /// unknown or duplicate key, a wrong value or no strategy, and [`ShardingError::NotAFloat`] for a type of mixed
    /// precision that is not a float.
    pub fn parse_setting(text: &str) -> Result<Option<Self>, ShardingError> {
        let text = text.trim();
        if !text.starts_with('{') {
            return Ok(Strategy::parse_setting(text)?.map(Self::from));
        }
        let sharding: Self = serde_json::from_str(text)
            .map_err(|fault| ShardingError::Json { message: fault.to_string() })?;
        sharding.mixed.check()?;
        Ok(Some(sharding))
    }

    /// Returns the text that [`Sharding::parse_setting`] reads as these settings: the strategy's name, or JSON with the
    /// strategy and the options that differ from their defaults.
    ///
    /// ```
    /// use brigade_sharding::{Reshard, Sharding};
    ///
    /// assert_eq!(Sharding::zero2().to_setting(), "zero2");
    /// let text = Sharding::zero3().reshard_after_forward(Reshard::No).to_setting();
    /// assert_eq!(text, r#"{"reshard_after_forward":"no","strategy":"zero3"}"#);
    /// ```
    #[must_use]
    pub fn to_setting(&self) -> String {
        let defaults = Self::from(self.strategy);
        if *self == defaults {
            return self.strategy.to_string();
        }
        let mut options = as_json(self);
        remove_defaults(&mut options, &as_json(&defaults));
        options["strategy"] = self.strategy.to_string().into();
        options.to_string()
    }

    /// Reads the sharding from the environment variable `BRIGADE_SHARDING`, which `brigade launch` sets. `None` if the
    /// variable is not set, is empty, or is `none`.
    ///
    /// # Errors
    /// Returns the errors of [`Sharding::parse_setting`], as [`ShardingError::Variable`].
    pub fn from_env() -> Result<Option<Self>, ShardingError> {
        of_variable(env::var_os(BRIGADE_SHARDING).as_deref())
    }
}

fn of_variable(value: Option<&OsStr>) -> Result<Option<Sharding>, ShardingError> {
    let text = value.unwrap_or_default().to_string_lossy();
    if text.trim().is_empty() {
        return Ok(None);
    }
    Sharding::parse_setting(&text).map_err(|source| ShardingError::Variable {
        name: BRIGADE_SHARDING,
        source: Box::new(source),
    })
}

fn as_json(sharding: &Sharding) -> Value {
    let Ok(value) = serde_json::to_value(sharding) else {
        unreachable!("its keys are text, and its values numbers, truths and texts")
    };
    value
}

/// Removes values that are equal to those in `defaults`, also in nested objects.
fn remove_defaults(value: &mut Value, defaults: &Value) {
    let (Value::Object(value), Value::Object(defaults)) = (value, defaults) else { return };
    value.retain(|key, value| Some(&*value) != defaults.get(key));
    for (key, value) in value {
        remove_defaults(value, &defaults[key]);
    }
}

#[cfg(test)]
mod tests {
    use brigade_checkpoint::Dtype;
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::{Just, any, prop_assert_eq, prop_oneof, proptest};
    use proptest::strategy::Strategy as Generator;

    use super::*;
    use crate::{MixedPrecision, Offload, ReduceGradients, Reshard, Units};

    fn strategy() -> impl Generator<Value = Strategy> {
        prop_oneof![
            Just(Strategy::Zero1),
            Just(Strategy::Zero2),
            Just(Strategy::Zero3),
            (1..=usize::MAX).prop_map(Strategy::Hybrid),
        ]
    }

    fn float() -> impl Generator<Value = Option<Dtype>> {
        option::of(prop_oneof![
            Just(Dtype::F64),
            Just(Dtype::F32),
            Just(Dtype::F16),
            Just(Dtype::BF16)
        ])
    }

    fn reshard() -> impl Generator<Value = Reshard> {
        prop_oneof![Just(Reshard::Yes), Just(Reshard::No), any::<usize>().prop_map(Reshard::To)]
    }

    fn offload() -> impl Generator<Value = Offload> {
        prop_oneof![Just(Offload::None), any::<bool>().prop_map(|pin| Offload::Cpu { pin })]
    }

    fn units() -> impl Generator<Value = Units> {
        prop_oneof![
            Just(Units::Blocks),
            vec(any::<String>(), 0..3).prop_map(Units::Matching),
            any::<u64>().prop_map(Units::AtLeast),
        ]
    }

    fn reduce() -> impl Generator<Value = ReduceGradients> {
        prop_oneof![Just(ReduceGradients::EachBatch), Just(ReduceGradients::Window)]
    }

    proptest! {
        #[test]
        fn a_setting_is_read_as_it_was_written(
            strategy in strategy(),
            reshard in reshard(),
            (param, sum, output) in (float(), float(), float()),
            offload in offload(),
            units in units(),
            reduce in reduce(),
        ) {
            let sharding = Sharding::from(strategy)
                .reshard_after_forward(reshard)
                .mixed(MixedPrecision { param, reduce: sum, output })
                .offload(offload)
                .units(units)
                .reduce(reduce);
            let text = sharding.to_setting();
            prop_assert_eq!(Sharding::parse_setting(&text), Ok(Some(sharding)), "{}", text);
        }

        #[test]
        fn any_text_is_read_or_refused(text in any::<String>(), rest in ".*") {
            let _ = Sharding::parse_setting(&text);
            let _ = Sharding::parse_setting(&format!("{{{rest}"));
        }
    }

    #[test]
    fn wrong_settings_are_refused_by_name() {
        let faults = [
            (
                "zero4",
                "`zero4` is not a sharding strategy: write none, zero1, zero2, zero3 or hybrid=N",
            ),
            ("", "`` is not a sharding strategy: write none, zero1, zero2, zero3 or hybrid=N"),
            (r#"{"strategy": "zero4"}"#, "`zero4` is not a sharding strategy"),
            (r#"{"offload": "none"}"#, "missing field `strategy`"),
            (r#"{"strategy": "zero1", "strategy": "zero2"}"#, "duplicate field `strategy`"),
            (r#"{"strategy": "zero3", "resard": "no"}"#, "unknown field `resard`"),
            (
                r#"{"strategy": "zero3", "mixed": {"param": "I64"}}"#,
                "the type of the computation is",
            ),
            (r#"{"strategy": "zero3""#, "not the options of a sharding strategy in JSON: EOF"),
        ];
        for (text, expected) in faults {
            let fault = Sharding::parse_setting(text).unwrap_err().to_string();
            assert!(fault.contains(expected), "{text}: {fault}");
        }
    }

    #[test]
    fn a_wrong_variable_is_named() {
        for unset in [None, Some(""), Some(" "), Some("none")] {
            assert_eq!(of_variable(unset.map(OsStr::new)), Ok(None), "{unset:?}");
        }
        assert_eq!(of_variable(Some(OsStr::new("zero3"))), Ok(Some(Sharding::zero3())));
        let fault = of_variable(Some(OsStr::new("fsdp"))).unwrap_err().to_string();
        assert!(
            fault.starts_with("BRIGADE_SHARDING: `fsdp` is not a sharding strategy"),
            "{fault}"
        );
    }
}
