//! Checks of the arguments of a schedule's constructors.

use crate::ScheduleError;

pub(super) fn rate(what: &'static str, value: f64) -> Result<(), ScheduleError> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    Err(bad(what, value, "finite and at least 0"))
}

pub(super) fn count(what: &'static str, steps: u64) -> Result<(), ScheduleError> {
    if steps > 0 {
        return Ok(());
    }
    Err(ScheduleError::Zero { what })
}

/// Numbers of which each must be above the one before.
pub(super) fn rising(what: &'static str, numbers: &[u64]) -> Result<(), ScheduleError> {
    match numbers.windows(2).find(|pair| pair[0] >= pair[1]) {
        None => Ok(()),
        Some(pair) => Err(ScheduleError::NotRising { what, before: pair[0], after: pair[1] }),
    }
}

pub(super) fn bad(what: &'static str, value: f64, must: &'static str) -> ScheduleError {
    ScheduleError::OutOfRange { what, value, must }
}
