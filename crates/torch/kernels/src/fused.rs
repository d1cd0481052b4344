//! The variable `BRIGADE_FUSED`: which kernels a program uses.

use std::env;

use crate::file::FILES;

/// Name of the environment variable that turns kernels off.
pub const FUSED_VARIABLE: &str = "BRIGADE_FUSED";

/// Name in the variable of the epilogues of products, which are not kernels of a file.
pub const EPILOGUES: &str = "epilogues";

/// Kernels that a program may use, and epilogues of products.
///
/// ```
/// use brigade_kernels::Fused;
///
/// let fused = Fused::parse("-norm_relu")?;
/// assert!(!fused.contains("norm_relu"));
/// assert!(Fused::parse("")?.contains("norm_relu"));
/// assert!(!Fused::parse("0")?.contains("norm_relu"));
/// assert!(Fused::parse("-norm").is_err());
/// # Ok::<(), brigade_kernels::FusedError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fused {
    all_off: bool,
    off: Vec<&'static str>,
}

/// Error of the variable `BRIGADE_FUSED`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{FUSED_VARIABLE}={value}: `{part}` is not 0, 1, or the name of kernels behind a minus sign; the names are {}",
    names()
)]
pub struct FusedError {
    /// Value of the variable.
    pub value: String,
    /// Part of the value that is wrong.
    pub part: String,
}

fn all() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|file| file.name).chain([EPILOGUES])
}

fn names() -> String {
    all().collect::<Vec<_>>().join(", ")
}

impl Fused {
    /// Reads the variable.
    ///
    /// # Errors
    /// Returns an error for a value that is not a selection.
    pub fn from_env() -> Result<Self, FusedError> {
        env::var_os(FUSED_VARIABLE)
            .map_or_else(|| Ok(Self::default()), |value| Self::parse(&value.to_string_lossy()))
    }

    /// Parses a selection: nothing or `1` for all kernels, `0` for none, or names with a minus sign, separated by
    /// commas, for all but these.
    ///
    /// # Errors
    /// Returns an error for an unknown name and for a name without a minus sign.
    pub fn parse(value: &str) -> Result<Self, FusedError> {
        match value.trim().to_ascii_lowercase().as_str() {
            "" | "1" | "true" | "on" | "yes" => return Ok(Self::default()),
            "0" | "false" | "off" | "no" => return Ok(Self { all_off: true, off: Vec::new() }),
            _ => {}
        }
        let mut off = Vec::new();
        for part in value.split(',').map(str::trim) {
            let name = part.strip_prefix('-').and_then(|part| all().find(|name| *name == part));
            let wrong = || FusedError { value: value.to_owned(), part: part.to_owned() };
            off.push(name.ok_or_else(wrong)?);
        }
        Ok(Self { all_off: false, off })
    }

    /// Returns `true` if the kernels of a file, or [`EPILOGUES`], may be used.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        !self.all_off && !self.off.contains(&name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_select_all_none_or_all_but_some() {
        let first = FILES[0].name;
        for (value, expected) in [("", true), ("1", true), ("0", false), (" Off ", false)] {
            assert_eq!(Fused::parse(value).unwrap().contains(first), expected, "{value}");
        }
        let but_one = Fused::parse(&format!(" -{first} ")).unwrap();
        for name in all() {
            assert_eq!(but_one.contains(name), name != first, "{name}");
        }
        let without = Fused::parse("-epilogues").unwrap();
        assert!(!without.contains(EPILOGUES) && without.contains(first));
    }

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_names() {
        for value in ["norm_relu", "-norm_relu,-nothing", "-", "-norm_relu,", "2"] {
            let error = Fused::parse(value).unwrap_err().to_string();
            for name in all() {
                assert!(error.contains(name), "{error}");
            }
        }
    }
}
