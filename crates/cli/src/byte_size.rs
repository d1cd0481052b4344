//! Numbers of bytes on the command line.

/// Reads a number of bytes: `80G`, `80GiB` (of 1024), `80GB` (of 1000), `85899345920`.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
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
