//! Formatting of quantities with units.

/// Formats bytes: `1536` is `1.5 KiB`.
pub(crate) fn bytes(count: u64) -> String {
    scaled(count as f64, 1024.0, &["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// Formats a bandwidth: `9.4e9` is `9.4 Gbit/s`.
pub(crate) fn bandwidth(bits_per_second: f64) -> String {
    scaled(bits_per_second, 1000.0, &["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"])
}

/// Formats a duration: `0.00042` is `0.42 ms`.
pub(crate) fn duration(seconds: f64) -> String {
    if seconds < 0.001 {
        format!("{:.2} ms", seconds * 1e3)
    } else if seconds < 1.0 {
        format!("{} ms", digits(seconds * 1e3))
    } else if seconds < 120.0 {
        format!("{} s", digits(seconds))
    } else if seconds < 7200.0 {
        format!("{:.0} minutes", seconds / 60.0)
    } else if seconds < 172_800.0 {
        format!("{:.0} hours", seconds / 3600.0)
    } else {
        format!("{:.0} days", seconds / 86400.0)
    }
}

/// Formats a number of things: `3 hosts`, `1 host`.
pub(crate) fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut units = units.iter();
    let mut unit = units.next().copied().unwrap_or_default();
    if value < step {
        return format!("{value:.0} {unit}");
    }
    for next in units {
        // A value that would be rounded up to the next unit is shown in it.
        if value < step - 0.5 {
            break;
        }
        value /= step;
        unit = next;
    }
    format!("{} {unit}", digits(value))
}

/// Formats a number with two significant digits.
fn digits(value: f64) -> String {
    if value < 9.95 { format!("{value:.1}") } else { format!("{value:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts() {
        for (count, expected) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1536, "1.5 KiB"),
            (64 << 30, "64 GiB"),
            ((1 << 30) - 4096, "1.0 GiB"),
        ] {
            assert_eq!(bytes(count), expected);
        }
        for (rate, expected) in [(9.41e9, "9.4 Gbit/s"), (250e6, "250 Mbit/s"), (12.0, "12 bit/s")]
        {
            assert_eq!(bandwidth(rate), expected);
        }
        for (seconds, expected) in [
            (0.00042, "0.42 ms"),
            (0.012, "12 ms"),
            (2.04, "2.0 s"),
            (45.0, "45 s"),
            (600.0, "10 minutes"),
            (90_000.0, "25 hours"),
            (1e6, "12 days"),
        ] {
            assert_eq!(duration(seconds), expected);
        }
    }
}
