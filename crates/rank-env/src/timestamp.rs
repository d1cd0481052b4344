//! Times as logs and events have them.

use std::time::{SystemTime, UNIX_EPOCH};

/// Formats a time as RFC 3339, in UTC, to the millisecond. A time outside of the years 1970 to 9999, which the format
/// cannot express, becomes one in 1970.
///
/// ```
/// use std::time::{Duration, UNIX_EPOCH};
///
/// let time = UNIX_EPOCH + Duration::from_millis(1_763_757_346_500);
/// assert_eq!(brigade_rank_env::timestamp(time), "2025-11-21T20:35:46.500Z");
/// ```
#[must_use]
pub fn timestamp(time: SystemTime) -> String {
    let can_be_said = time.duration_since(UNIX_EPOCH).is_ok_and(|it| it.as_secs() < YEAR_10_000);
    let time = if can_be_said { time } else { UNIX_EPOCH };
    humantime::format_rfc3339_millis(time).to_string()
}

/// Start of the year 10000, in seconds since 1970.
const YEAR_10_000: u64 = 253_402_300_800;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn timestamps_are_those_of_rfc_3339() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_763_757_346, "2025-11-21T20:35:46.000Z"),
            (4_107_542_399, "2100-02-28T23:59:59.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
            (YEAR_10_000, "1970-01-01T00:00:00.000Z"),
        ] {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
        let early = UNIX_EPOCH - Duration::from_secs(1);
        assert_eq!(timestamp(early), "1970-01-01T00:00:00.000Z");
    }
}
