//! The state of a gradient scaler, converted between Brigade's and PyTorch's names, and from DeepSpeed's loss scaler.

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

/// DeepSpeed's loss scaler in the terms of PyTorch's.
#[derive(Debug)]
pub(super) enum FromDeepSpeed {
    /// The state under PyTorch's names, and a description of attributes that PyTorch's scaler does not have.
    Dynamic(Value<FileTensor>, Option<String>),
    /// A scale that does not change.
    Constant(f64),
}

/// Converts the attributes of a loss scaler of DeepSpeed. `None` if some are missing.
///
/// DeepSpeed's scale grows after `scale_window + 1` steps that did not overflow, and after each `scale_window` from then
/// on. The count of steps without overflow is chosen so that PyTorch's scale grows at the same step, or one step earlier
/// if the last step has overflowed.
pub(super) fn from_deepspeed(attributes: &Value<FileTensor>) -> Option<FromDeepSpeed> {
    let number = |key: &str| attributes.get(key).and_then(Value::as_float);
    let count = |key: &str| attributes.get(key).and_then(Value::as_int);
    let scale = number("cur_scale")?;
    if !matches!(attributes.get("dynamic"), Some(Value::Bool(true))) {
        return Some(FromDeepSpeed::Constant(scale));
    }
    let factor = number("scale_factor").filter(|factor| *factor > 1.0)?;
    let window = count("scale_window").filter(|window| *window > 0)?;
    // The steps since the last overflow, of which the first does not count.
    let stable = count("cur_iter")?.checked_sub(count("last_overflow_iter")?)?.checked_sub(2)?;
    let state = Value::dict([
        ("scale", Value::Float(scale)),
        ("growth_factor", Value::Float(factor)),
        ("backoff_factor", Value::Float(1.0 / factor)),
        ("growth_interval", Value::Int(window)),
        ("_growth_tracker", Value::Int(stable.max(0) % window)),
    ]);
    let (shift, min) = (count("delayed_shift").unwrap_or(1), number("min_scale").unwrap_or(1.0));
    let others = (shift > 1 || min > 1.0).then(|| {
        format!(
            "`delayed_shift` {shift} (hysteresis) and `min_scale` {min}, which a gradient scaler does not have"
        )
    });
    Some(FromDeepSpeed::Dynamic(state, others))
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

    #[test]
    fn deepspeeds_scaler_grows_at_the_same_steps() {
        // The rule of DeepSpeed's `DynamicLossScaler.update_scale` with a hysteresis of 1.
        for window in [1, 2, 5] {
            let (mut scale, mut iter, mut last) = (1024.0, 0i64, -1i64);
            for step in 0..40 {
                let state = Value::dict([
                    ("cur_scale", Value::Float(scale)),
                    ("dynamic", Value::Bool(true)),
                    ("cur_iter", Value::Int(iter)),
                    ("last_overflow_iter", Value::Int(last)),
                    ("scale_factor", Value::Float(2.0)),
                    ("scale_window", Value::Int(window)),
                ]);
                let Some(FromDeepSpeed::Dynamic(theirs, None)) = from_deepspeed(&state) else {
                    panic!("{state:?}")
                };
                let tracker = theirs.get("_growth_tracker").and_then(Value::as_int).unwrap();
                let overflows = [3, 11, 12, 30].contains(&step);
                let grows = !overflows && tracker + 1 == window;
                if overflows {
                    (scale, last) = (scale / 2.0, iter);
                } else {
                    let stable = iter - last - 1;
                    let theirs_grows = stable > 0 && stable % window == 0;
                    if theirs_grows {
                        scale *= 2.0;
                    }
                    // After an overflow, and at the start, the first step does not count.
                    let is_first = stable == 0;
                    assert!(grows == theirs_grows || is_first, "step {step} of {window}");
                }
                iter += 1;
            }
        }
        let constant =
            Value::dict([("cur_scale", Value::Float(128.0)), ("dynamic", Value::Bool(false))]);
        let found = from_deepspeed(&constant);
        assert!(matches!(found, Some(FromDeepSpeed::Constant(128.0))), "{found:?}");
        assert!(from_deepspeed(&Value::dict([("cur_scale", Value::None)])).is_none());
    }
}
