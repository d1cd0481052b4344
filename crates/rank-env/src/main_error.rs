//! The error of a program's `main`, and the text of an error with its causes.

use std::error::Error;
use std::fmt;

use crate::text::escaped_answer;

/// Result type of a `main` function whose errors are shown to users: on one line, without a stack, independent of
/// `RUST_BACKTRACE`.
///
/// ```
/// use brigade_rank_env::MainResult;
///
/// fn main() -> MainResult {
///     let steps: u32 = "100".parse()?;
///     println!("{steps} steps");
///     Ok(())
/// }
/// ```
pub type MainResult<T = ()> = Result<T, MainError>;

/// Error at the end of a program. `?` converts every error to it, `anyhow::Error` included.
///
/// `Debug` formats the error's text with its causes, because Rust prints the `Debug` of the error that `main` returns.
///
/// ```
/// let error = std::fs::read("/no/such/file").map_err(brigade_rank_env::MainError::from).unwrap_err();
/// assert_eq!(format!("{error:?}"), "No such file or directory (os error 2)");
/// ```
pub struct MainError(Box<dyn Error + Send + Sync>);

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for MainError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl fmt::Display for MainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&escaped_answer(&with_causes(self.0.as_ref())))
    }
}

impl fmt::Debug for MainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Returns the text of an error and of its causes, without causes whose text is already contained in it.
#[must_use]
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn causes_are_in_one_line() {
        let read = || -> MainResult<Vec<u8>> {
            Ok(std::fs::read("/no/such\x1b/file").context("cannot open data")?)
        };
        let error = read().unwrap_err();
        let expected = "cannot open data: No such file or directory (os error 2)";
        assert_eq!(format!("{error:?}"), expected);
        assert_eq!(format!("{error:#}"), expected);
        let own = MainError::from("a\x1b[2J\nb");
        assert_eq!(own.to_string(), "a\\u001b[2J\nb");
        // Many texts have their cause in them.
        let twice = anyhow::anyhow!("no disk").context("cannot open data: no disk");
        assert_eq!(MainError::from(twice).to_string(), "cannot open data: no disk");
    }
}
