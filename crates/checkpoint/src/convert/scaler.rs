//! The state of a gradient scaler, converted between Brigade's and PyTorch's names.

use super::FileTensor;
use crate::value::Value;

/// Pairs of Brigade's and PyTorch's names.
const NUMBERS: [(&str, &str); 3] =
    [("scale", "scale"), ("growth_factor", "growth_factor"), ("backoff_factor", "backoff_factor")];
const COUNTS: [(&str, &str); 2] =
    [("growth_interval", "growth_interval"), ("growth_tracker", "_growth_tracker")];

pub(super) fn to_torch(state: &Value<FileTensor>) -> Option<Value<FileTensor>> {
    renamed(state, |(ours, theirs)| (ours, theirs))
}

pub(super) fn from_torch(state: &Value<FileTensor>) -> Option<Value<FileTensor>> {
    renamed(state, |(ours, theirs)| (theirs, ours))
}

fn renamed(
    state: &Value<FileTensor>,
    way: impl Fn((&'static str, &'static str)) -> (&'static str, &'static str),
) -> Option<Value<FileTensor>> {
    let mut entries = Vec::new();
    for (from, to) in NUMBERS.map(&way) {
        entries.push((to, Value::Float(state.get(from)?.as_float()?)));
    }
    for (from, to) in COUNTS.map(&way) {
        entries.push((to, Value::Int(state.get(from)?.as_int()?)));
    }
    Some(Value::dict(entries))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::convert::foreign;

    #[test]
    fn accelerates_scaler_comes_in_and_goes_out() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/accelerate");
        let theirs = foreign::read(&folder).unwrap().scaler.unwrap();
        assert_eq!(theirs.name, "scaler.pt");
        let ours = from_torch(&theirs.value).unwrap();
        let number = |key: &str| ours.get(key).and_then(Value::as_float);
        assert_eq!(number("scale"), Some(4096.0));
        assert_eq!(number("growth_interval"), Some(7.0));
        assert_eq!(number("growth_tracker"), Some(3.0));
        let back = to_torch(&ours).unwrap();
        assert_eq!(back.get("_growth_tracker").and_then(Value::as_int), Some(3));
        assert!(from_torch(&back).is_some() && from_torch(&ours).is_none());
    }
}
