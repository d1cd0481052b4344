//! Reads and checks single variables.

use crate::WorldError;

/// Any source of variables.
#[derive(Clone, Copy)]
pub(crate) struct Vars<'a>(pub(crate) &'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    pub(crate) fn text(self, name: &'static str) -> Option<String> {
        (self.0)(name)
    }

    /// A number from 0.
    pub(crate) fn number(self, name: &'static str) -> Result<Option<usize>, WorldError> {
        self.parse(name, "a whole number from 0")
    }

    pub(crate) fn count(self, name: &'static str) -> Result<u32, WorldError> {
        Ok(self.parse(name, "a whole number from 0")?.unwrap_or(0))
    }

    /// A TCP port that can be connected to.
    pub(crate) fn port(self, name: &'static str) -> Result<Option<u16>, WorldError> {
        const EXPECTED: &str = "a port between 1 and 65535";
        match self.parse::<u16>(name, EXPECTED)? {
            Some(0) => Err(self.not_a_number(name, EXPECTED)),
            port => Ok(port),
        }
    }

    pub(crate) fn flag(self, name: &'static str) -> Result<bool, WorldError> {
        match self.text(name).as_deref() {
            Some("True" | "true" | "1") => Ok(true),
            None | Some("False" | "false" | "0" | "") => Ok(false),
            Some(_) => Err(self.not_a_number(name, "True or False")),
        }
    }

    pub(crate) fn parse<T: std::str::FromStr>(
        self,
        name: &'static str,
        expected: &'static str,
    ) -> Result<Option<T>, WorldError> {
        match self.text(name).map(|text| text.trim().parse()) {
            None => Ok(None),
            Some(Ok(value)) => Ok(Some(value)),
            Some(Err(_)) => Err(self.not_a_number(name, expected)),
        }
    }

    /// Reads a number that must be set because `present` is set.
    pub(crate) fn needed(
        self,
        name: &'static str,
        present: &'static str,
        help: &'static str,
    ) -> Result<usize, WorldError> {
        self.number(name)?.ok_or_else(|| self.missing(present, name, help))
    }

    pub(crate) fn not_a_number(self, name: &'static str, expected: &'static str) -> WorldError {
        WorldError::NotANumber { name, value: self.text(name).unwrap_or_default(), expected }
    }

    pub(crate) fn missing(
        self,
        present: &'static str,
        missing: &'static str,
        help: &'static str,
    ) -> WorldError {
        let value = self.text(present).unwrap_or_default();
        WorldError::Missing { present, value, missing, help }
    }

    pub(crate) fn unusable(self, name: &'static str, problem: impl Into<String>) -> WorldError {
        let value = self.text(name).unwrap_or_default();
        WorldError::Unusable { name, value, problem: problem.into() }
    }
}

/// A place counts from 0 and stays below its number.
pub(crate) fn below(
    place: (&'static str, usize),
    number: (&'static str, usize),
) -> Result<(), WorldError> {
    if place.1 < number.1 {
        return Ok(());
    }
    Err(WorldError::Contradiction {
        name: place.0,
        value: place.1,
        other: number.0,
        other_value: number.1,
        rule: "the first counts from 0 and stays below the second",
    })
}
