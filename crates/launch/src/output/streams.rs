//! Selections of ranks' output streams: the values of `--redirects`, `--tee` and the filters.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use brigade_rendezvous::Stream;
use serde::{Deserialize, Serialize};

use crate::ValueError;

/// Selection of a process's output streams, written as torchrun does: 0 none, 1 stdout, 2 stderr, 3 both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamMode {
    /// `true` if standard output is selected.
    pub stdout: bool,
    /// `true` if standard error is selected.
    pub stderr: bool,
}

impl StreamMode {
    /// Selection of no stream.
    pub const NONE: Self = Self { stdout: false, stderr: false };
    /// Selection of both streams.
    pub const BOTH: Self = Self { stdout: true, stderr: true };

    /// Returns `true` if `stream` is selected.
    #[must_use]
    pub fn has(self, stream: Stream) -> bool {
        match stream {
            Stream::Stdout => self.stdout,
            Stream::Stderr => self.stderr,
        }
    }
}

impl FromStr for StreamMode {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "0" => Ok(Self::NONE),
            "1" => Ok(Self { stdout: true, stderr: false }),
            "2" => Ok(Self { stdout: false, stderr: true }),
            "3" => Ok(Self::BOTH),
            _ => Err(ValueError::expected("0 (none), 1 (stdout), 2 (stderr) or 3 (both)", text)),
        }
    }
}

impl fmt::Display for StreamMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", u8::from(self.stdout) + 2 * u8::from(self.stderr))
    }
}

/// Selection of output streams for all ranks of a host, or for some.
///
/// ```
/// use brigade_launch::StreamModes;
/// let modes: StreamModes = "0:3,12:1".parse()?;
/// assert!(modes.of(0).stderr && modes.of(12).stdout && !modes.of(12).stderr);
/// assert!(!modes.of(1).stdout);
/// assert_eq!(modes.to_string(), "0:3,12:1");
/// # Ok::<(), brigade_launch::ValueError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StreamModes {
    /// The same selection for every rank.
    All(StreamMode),
    /// Selections for these local ranks. No stream of the others is selected.
    ByRank(BTreeMap<usize, StreamMode>),
}

impl StreamModes {
    /// Selection of no stream of any rank.
    pub const NONE: Self = Self::All(StreamMode::NONE);

    /// Returns the selected streams of one local rank.
    #[must_use]
    pub fn of(&self, local_rank: usize) -> StreamMode {
        match self {
            Self::All(mode) => *mode,
            Self::ByRank(modes) => modes.get(&local_rank).copied().unwrap_or_default(),
        }
    }

    pub(crate) fn is_none(&self) -> bool {
        match self {
            Self::All(mode) => *mode == StreamMode::NONE,
            Self::ByRank(modes) => modes.values().all(|mode| *mode == StreamMode::NONE),
        }
    }

    /// Returns the lowest local rank with a selection of its own.
    pub(crate) fn first(&self) -> Option<usize> {
        match self {
            Self::All(_) => None,
            Self::ByRank(modes) => modes.keys().next().copied(),
        }
    }
}

impl FromStr for StreamModes {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        if !text.contains(':') {
            return text.parse().map(Self::All).map_err(|_| ValueError::expected(MODES, text));
        }
        let mut modes = BTreeMap::new();
        for pair in text.split(',') {
            let Some((rank, mode)) = pair.split_once(':') else {
                return Err(ValueError::expected(PAIR, pair));
            };
            let rank = local_rank(rank).map_err(|_| ValueError::expected(PAIR, pair))?;
            if modes.insert(rank, mode.parse()?).is_some() {
                return Err(ValueError::twice("local rank", rank.to_string()));
            }
        }
        Ok(Self::ByRank(modes))
    }
}

impl fmt::Display for StreamModes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All(mode) => mode.fmt(f),
            Self::ByRank(modes) => {
                let pairs: Vec<_> =
                    modes.iter().map(|(rank, mode)| format!("{rank}:{mode}")).collect();
                f.write_str(&pairs.join(","))
            }
        }
    }
}

/// Set of local ranks of a host.
///
/// ```
/// let ranks: brigade_launch::LocalRanks = "0,10".parse()?;
/// assert!(ranks.contains(10) && !ranks.contains(1));
/// # Ok::<(), brigade_launch::ValueError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalRanks(pub BTreeSet<usize>);

impl LocalRanks {
    /// Returns `true` if the set contains this local rank.
    #[must_use]
    pub fn contains(&self, local_rank: usize) -> bool {
        self.0.contains(&local_rank)
    }
}

impl FromStr for LocalRanks {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        text.split(',').map(local_rank).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for LocalRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&ranks.join(","))
    }
}

/// Filter of lines: a line matches if it contains one of these words.
///
/// ```
/// let filter: brigade_launch::LineFilter = "loss,error".parse()?;
/// assert!(filter.matches(b"epoch 3: loss 0.25\n") && !filter.matches(b"epoch 3\n"));
/// # Ok::<(), brigade_launch::ValueError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineFilter(pub Vec<String>);

impl LineFilter {
    /// Returns `true` if the line contains one of the words.
    #[must_use]
    pub fn matches(&self, line: &[u8]) -> bool {
        self.0.iter().any(|word| {
            let word = word.as_bytes();
            word.is_empty() || line.windows(word.len()).any(|part| part == word)
        })
    }
}

impl FromStr for LineFilter {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let words: Vec<_> = text.split(',').map(str::to_owned).collect();
        if words.iter().any(String::is_empty) {
            return Err(ValueError::expected("words with commas between them", text));
        }
        Ok(Self(words))
    }
}

impl fmt::Display for LineFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(","))
    }
}

fn local_rank(text: &str) -> Result<usize, ValueError> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = if is_number { text.parse().ok() } else { None };
    number.ok_or_else(|| ValueError::expected("a local rank, a number from 0", text))
}

const MODES: &str = "a mode from 0 to 3, or RANK:MODE pairs such as 0:3,1:2";
const PAIR: &str = "RANK:MODE, such as 0:3";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_come_back_as_they_were_written() {
        for text in ["0", "1", "2", "3", "0:3", "0:1,1:2,2:0", "3:3,117:1"] {
            assert_eq!(text.parse::<StreamModes>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_mode_is_said() {
        let table = [
            ("", "expected a mode from 0 to 3, or RANK:MODE pairs such as 0:3,1:2, found \"\""),
            ("4", "expected a mode from 0 to 3, or RANK:MODE pairs such as 0:3,1:2, found \"4\""),
            (
                "all",
                "expected a mode from 0 to 3, or RANK:MODE pairs such as 0:3,1:2, found \"all\"",
            ),
            ("0:4", "expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), found \"4\""),
            ("0:1,", "expected RANK:MODE, such as 0:3, found \"\""),
            ("0:1,2", "expected RANK:MODE, such as 0:3, found \"2\""),
            ("-1:2", "expected RANK:MODE, such as 0:3, found \"-1:2\""),
            ("+1:2", "expected RANK:MODE, such as 0:3, found \"+1:2\""),
            (":2", "expected RANK:MODE, such as 0:3, found \":2\""),
            (
                "99999999999999999999:2",
                "expected RANK:MODE, such as 0:3, found \"99999999999999999999:2\"",
            ),
            ("1:2,1:2", "local rank 1 is given twice"),
        ];
        for (text, message) in table {
            assert_eq!(text.parse::<StreamModes>().unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn ranks_and_words() {
        assert_eq!("2,0,2".parse::<LocalRanks>().unwrap().to_string(), "0,2");
        for wrong in ["", "0,", "a", "0-3", "-1"] {
            assert!(wrong.parse::<LocalRanks>().is_err(), "{wrong:?}");
        }
        assert_eq!("a b,c".parse::<LineFilter>().unwrap().0, ["a b", "c"]);
        for wrong in ["", ",", "a,", ",a"] {
            assert!(wrong.parse::<LineFilter>().is_err(), "{wrong:?}");
        }
        assert!(!LineFilter(vec!["longer".to_owned()]).matches(b"short"));
    }
}
