//! Colours of the output.

use std::env;
use std::fmt;
use std::io::{self, IsTerminal};
use std::str::FromStr;

use brigade_rank_env::scheduler::MpiKind;
use serde::{Deserialize, Serialize};

use crate::ValueError;

/// Use of colours in the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Color {
    /// Colours on a terminal, unless the environment decides otherwise.
    #[default]
    Auto,
    /// Colours always, also in files and pipes.
    Always,
    /// Output without any colours.
    Never,
}

/// Facts on which [`Color::Auto`] depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ColorFacts {
    /// `true` for stdout and stderr if they are a user's terminal.
    pub terminal: [bool; 2],
    /// `true` if `NO_COLOR` is set (<https://no-color.org>).
    pub no_color: bool,
    /// `true` if `CLICOLOR_FORCE` is set (<https://bixense.com/clicolors>).
    pub forced: bool,
    /// `true` if `TERM` is `dumb`.
    pub dumb: bool,
}

impl ColorFacts {
    /// Examines this process's streams and environment.
    #[must_use]
    pub fn gather() -> Self {
        let var = |name| env::var_os(name).filter(|value| !value.is_empty());
        Self {
            terminal: [is_users_terminal(&io::stdout()), is_users_terminal(&io::stderr())],
            no_color: var("NO_COLOR").is_some(),
            forced: var("CLICOLOR_FORCE").is_some_and(|value| value != "0"),
            dumb: var("TERM").is_some_and(|value| value == "dumb"),
        }
    }
}

/// Returns `true` if a stream of this process is a user's terminal. Open MPI gives its processes a pseudo-terminal as
/// stdout and copies their output to a file as well as to a terminal.
pub(crate) fn is_users_terminal(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && !is_open_mpis(&|name| env::var(name).ok())
}

fn is_open_mpis(vars: &dyn Fn(&str) -> Option<String>) -> bool {
    vars(MpiKind::OpenMpi.names().rank).is_some()
}

impl Color {
    /// Returns for stdout and stderr whether they are coloured.
    ///
    /// ```
    /// use brigade_launch::{Color, ColorFacts};
    /// let facts = ColorFacts { terminal: [true, false], ..ColorFacts::default() };
    /// assert_eq!(Color::Auto.resolve(facts), [true, false]);
    /// assert_eq!(Color::Auto.resolve(ColorFacts { no_color: true, ..facts }), [false, false]);
    /// ```
    #[must_use]
    pub fn resolve(self, facts: ColorFacts) -> [bool; 2] {
        match self {
            Self::Never => [false; 2],
            Self::Always => [true; 2],
            Self::Auto if facts.no_color => [false; 2],
            Self::Auto if facts.forced => [true; 2],
            Self::Auto if facts.dumb => [false; 2],
            Self::Auto => facts.terminal,
        }
    }
}

impl FromStr for Color {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "auto" => Ok(Self::Auto),
            "always" => Ok(Self::Always),
            "never" => Ok(Self::Never),
            _ => Err(ValueError::expected("auto, always or never", text)),
        }
    }
}

impl fmt::Display for Color {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Always => "always",
            Self::Never => "never",
        })
    }
}

/// Returns the prefix in the colour of its rank. The blanks after it are not coloured.
pub(crate) fn paint(prefix: &str, rank: usize) -> String {
    let text = prefix.trim_end();
    let blanks = &prefix[text.len()..];
    if text.is_empty() {
        return prefix.to_owned();
    }
    format!("\x1b[{}m{text}\x1b[0m{blanks}", PALETTE[rank % PALETTE.len()])
}

/// Cyan, yellow, green, magenta, blue, and their bright variants. Red is reserved for errors.
const PALETTE: [u8; 10] = [36, 33, 32, 35, 34, 96, 93, 92, 95, 94];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_decides() {
        let terminal = ColorFacts { terminal: [true, true], ..ColorFacts::default() };
        let pipe = ColorFacts::default();
        let (yes, no) = ([true; 2], [false; 2]);
        let table = [
            (Color::Auto, terminal, yes),
            (Color::Auto, pipe, no),
            (Color::Auto, ColorFacts { dumb: true, ..terminal }, no),
            (Color::Auto, ColorFacts { no_color: true, ..terminal }, no),
            (Color::Auto, ColorFacts { forced: true, ..pipe }, yes),
            (Color::Auto, ColorFacts { forced: true, dumb: true, ..pipe }, yes),
            (Color::Auto, ColorFacts { forced: true, no_color: true, ..pipe }, no),
            (Color::Always, ColorFacts { no_color: true, ..pipe }, yes),
            (Color::Never, ColorFacts { forced: true, ..terminal }, no),
        ];
        for (color, facts, expected) in table {
            assert_eq!(color.resolve(facts), expected, "{color} {facts:?}");
            assert_eq!(color.to_string().parse(), Ok(color));
        }
        let wrong = "yes".parse::<Color>().unwrap_err().to_string();
        assert_eq!(wrong, "expected auto, always or never, found \"yes\"");
    }

    #[test]
    fn the_terminal_of_mpirun_is_no_users() {
        let mpirun = |name: &str| (name == "OMPI_COMM_WORLD_RANK").then(|| "0".to_owned());
        assert!(is_open_mpis(&mpirun));
        assert!(!is_open_mpis(&|_| None));
    }

    #[test]
    fn neighbours_differ() {
        assert_eq!(paint("[0] ", 0), "\x1b[36m[0]\x1b[0m ");
        assert_ne!(PALETTE[0], PALETTE[1]);
        assert_eq!(paint("[10] ", 10), "\x1b[36m[10]\x1b[0m ");
        assert_eq!(paint("  ", 3), "  ");
    }
}
