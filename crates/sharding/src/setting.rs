//! The text form of all settings of sharding, by which a launcher hands them to the ranks.

use brigade_rank_env::env::BRIGADE_SHARDING;

use crate::{Sharding, ShardingError, Strategy};

impl Sharding {
    /// Parses a setting: `none`, which returns `None`, the name of a strategy with its default options, or a JSON object
    /// with the fields of this type.
    ///
    /// ```
    /// use brigade_sharding::{ReduceGradients, Sharding};
    ///
    /// assert_eq!(Sharding::parse_setting("none")?, None);
    /// assert_eq!(Sharding::parse_setting("hybrid=8")?, Some(Sharding::hybrid(8)));
    /// let window = Sharding::parse_setting(r#"{"strategy": "zero2", "reduce": "window"}"#)?;
    /// assert_eq!(window, Some(Sharding::zero2().reduce(ReduceGradients::Window)));
    /// # Ok::<(), brigade_sharding::ShardingError>(())
    /// ```
    ///
    /// # Errors
    /// An unknown strategy; JSON with unknown or missing fields.
    pub fn parse_setting(text: &str) -> Result<Option<Self>, ShardingError> {
        let text = text.trim();
        if !text.starts_with('{') {
            return Ok(Strategy::parse_setting(text)?.map(Self::from));
        }
        serde_json::from_str(text)
            .map(Some)
            .map_err(|error| ShardingError::Setting { fault: error.to_string() })
    }

    /// Returns the text that [`Sharding::parse_setting`] parses: the strategy's name where all else is the default.
    #[must_use]
    pub fn to_setting(&self) -> String {
        if *self == Self::from(self.strategy) {
            return self.strategy.to_string();
        }
        // Names, numbers and texts: nothing in it can fail to be JSON.
        serde_json::to_string(self).unwrap_or_else(|_| self.strategy.to_string())
    }

    /// Reads the variable `BRIGADE_SHARDING`, which `brigade launch` sets; `None` where it is not set, empty or `none`.
    ///
    /// # Errors
    /// As [`Sharding::parse_setting`], with the variable's name.
    pub fn from_env() -> Result<Option<Self>, ShardingError> {
        match std::env::var(BRIGADE_SHARDING) {
            Ok(text) if !text.trim().is_empty() => Self::parse_setting(&text).map_err(|source| {
                ShardingError::Variable { name: BRIGADE_SHARDING, source: Box::new(source) }
            }),
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_named() {
        let fault = |text: &str| Sharding::parse_setting(text).unwrap_err().to_string();
        assert!(fault("zero4").contains("none, zero1, zero2, zero3 or hybrid=N"));
        assert!(fault(r#"{"strategy": "zero4"}"#).contains("zero4"));
        assert!(fault(r#"{"reduce": "window"}"#).contains("strategy"));
        assert!(fault(r#"{"strategy": "zero2", "stage": 2}"#).contains("stage"));
        assert!(fault("{").contains("JSON"));
    }
}
