//! Scalar values to log.

/// A scalar: float, integer, boolean or string.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A 64-bit floating-point number. NaN and the infinities are kept as far as the tracker's format can represent
    /// them.
    Float(f64),
    /// A 64-bit signed integer.
    Int(i64),
    /// A Boolean, `true` or `false`.
    Bool(bool),
    /// A text of any length.
    Text(String),
}

/// Values by name, in the order in which they were given.
pub type Values = Vec<(String, Value)>;

impl Value {
    /// Returns the value as a number, with `true` as 1 and `false` as 0. Returns `None` for a text.
    #[must_use]
    pub fn number(&self) -> Option<f64> {
        match *self {
            Self::Float(value) => Some(value),
            Self::Int(value) => Some(value as f64),
            Self::Bool(value) => Some(f64::from(u8::from(value))),
            Self::Text(_) => None,
        }
    }

    /// Returns the value as text. NaN is `NaN`, the infinities are `inf` and `-inf`: the forms that Python and Rust
    /// parse.
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            // The plain form of 1e300 has 301 digits.
            Self::Float(value)
                if value.is_finite() && !(1e-5..1e16).contains(&value.abs()) && *value != 0.0 =>
            {
                format!("{value:e}")
            }
            Self::Float(value) => value.to_string(),
            Self::Int(value) => value.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::Text(value) => value.clone(),
        }
    }

    /// Returns the value as JSON. NaN and the infinities, which JSON lacks, become the strings `NaN`, `Infinity` and
    /// `-Infinity`, which the number parsers of Python and JavaScript accept.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        match self {
            Self::Float(value) => float_as_json(*value),
            Self::Int(value) => (*value).into(),
            Self::Bool(value) => (*value).into(),
            Self::Text(value) => value.as_str().into(),
        }
    }
}

pub(crate) fn float_as_json(value: f64) -> serde_json::Value {
    if value.is_nan() {
        "NaN".into()
    } else if value.is_infinite() {
        if value > 0.0 { "Infinity".into() } else { "-Infinity".into() }
    } else {
        value.into()
    }
}

macro_rules! from {
    ($($of:ty => $variant:ident as $to:ty),+ $(,)?) => {
        $(impl From<$of> for Value {
            fn from(value: $of) -> Self {
                Self::$variant(<$to>::from(value))
            }
        })+
    };
}

from! {
    f64 => Float as f64,
    f32 => Float as f64,
    i64 => Int as i64,
    i32 => Int as i64,
    u32 => Int as i64,
    u16 => Int as i64,
    u8 => Int as i64,
    bool => Bool as bool,
    String => Text as String,
    &str => Text as String,
}

/// A count that is too large for an `i64` becomes the nearest float.
impl From<u64> for Value {
    fn from(value: u64) -> Self {
        i64::try_from(value).map_or(Self::Float(value as f64), Self::Int)
    }
}

impl From<usize> for Value {
    fn from(value: usize) -> Self {
        Self::from(value as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_marks_what_is_not_finite() {
        for (value, text, json) in [
            (f64::NAN, "NaN", "\"NaN\""),
            (f64::INFINITY, "inf", "\"Infinity\""),
            (f64::NEG_INFINITY, "-inf", "\"-Infinity\""),
            (0.1, "0.1", "0.1"),
            (1e300, "1e300", "1e+300"),
            (-2.5e-7, "-2.5e-7", "-2.5e-7"),
            (0.0, "0", "0.0"),
        ] {
            let value = Value::from(value);
            assert_eq!((value.text().as_str(), value.json().to_string().as_str()), (text, json));
        }
        assert_eq!(Value::from(u64::MAX), Value::Float(u64::MAX as f64));
        assert_eq!(Value::from(true).number(), Some(1.0));
        assert_eq!(Value::from("x").number(), None);
    }
}
