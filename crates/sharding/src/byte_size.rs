//! Parser and formatter of numbers of bytes.

/// Reads a number of bytes: `80G`, `80GiB` (of 1024), `80GB` (of 1000), `85899345920`.
///
/// ```
/// use brigade_sharding::byte_size::parse;
///
/// assert_eq!(parse("1.5K"), Ok(1536));
/// assert_eq!(parse("2MB"), Ok(2_000_000));
/// assert!(parse("plenty").is_err());
/// ```
///
/// # Errors
/// Returns a message with the valid forms for any other text, for numbers below 1, and for numbers of 1e19 or more.
pub fn parse(text: &str) -> Result<u64, String> {
    let number_ends = text.find(|it: char| !it.is_ascii_digit() && it != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(number_ends);
    let unit = unit.trim().to_ascii_uppercase();
    let power = unit.chars().next().map_or(Some(0), |letter| {
        ['B', 'K', 'M', 'G', 'T'].iter().position(|unit| *unit == letter)
    });
    let base: f64 = match unit.get(1..).unwrap_or("") {
        "" | "IB" => 1024.0,
        "B" => 1000.0,
        _ => 0.0,
    };
    let value = number
        .parse::<f64>()
        .ok()
        .zip(power)
        .map(|(number, power)| number * base.powi(power as i32));
    match value {
        Some(value) if base > 0.0 && (1.0..1e19).contains(&value) => Ok(value.round() as u64),
        _ => Err("not a number of bytes such as 80G, 80GiB or 80GB".to_owned()),
    }
}

/// Formats a number of bytes with a binary unit (a power of 1024): `475 MiB`, `1.5 GiB`.
///
/// ```
/// use brigade_sharding::byte_size::in_bytes;
///
/// assert_eq!(in_bytes(497_759_232), "475 MiB");
/// assert_eq!(in_bytes(900), "900 B");
/// ```
#[must_use]
pub fn in_bytes(bytes: u64) -> String {
    let units = [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) => {
            let value = bytes as f64 / unit as f64;
            if value >= 100.0 { format!("{value:.0} {name}") } else { format!("{value:.1} {name}") }
        }
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts() {
        assert_eq!(in_bytes(497_759_232), "475 MiB");
        assert_eq!(in_bytes(1 << 30), "1.0 GiB");
        assert_eq!(in_bytes(900), "900 B");
    }
}
