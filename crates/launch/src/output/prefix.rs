//! Prefix of a rank's lines on the console.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Template of a line prefix, in the syntax of Python's `string.Template` like torchrun's: `${rank}` or `$rank` is
/// replaced, `$$` is a dollar sign, and other text stays as it is.
///
/// ```
/// use brigade_launch::{Prefix, PrefixFacts};
/// let facts = PrefixFacts { rank: 5, local_rank: 1, host: "node2", ..PrefixFacts::default() };
/// assert_eq!(Prefix::default().of(&facts), "[5] ");
/// assert_eq!(Prefix::with_host(12).of(&facts), "[node2:5]   ");
/// let own: Prefix = "$role_name/${local_rank} of $$5: ".parse().unwrap();
/// assert_eq!(own.of(&facts), "default/1 of $5: ");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefix {
    template: String,
    /// Minimum width of the prefix: shorter ones are padded with blanks.
    width: usize,
}

/// Values for the placeholders of a prefix template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixFacts<'a> {
    /// Role name: the value of `${role_name}`.
    pub role: &'a str,
    /// Rank in the job: the value of `${rank}`.
    pub rank: usize,
    /// Local rank: the value of `${local_rank}`.
    pub local_rank: usize,
    /// Node rank, torchrun's group rank: the value of `${group_rank}`.
    pub node_rank: usize,
    /// Number of restarts so far: the value of `${restart_count}`.
    pub restart_count: u32,
    /// Name of the host: the value of `${host}`.
    pub host: &'a str,
}

impl Default for PrefixFacts<'_> {
    fn default() -> Self {
        Self { role: "default", rank: 0, local_rank: 0, node_rank: 0, restart_count: 0, host: "" }
    }
}

impl Prefix {
    /// Returns the template `[host:rank] `, padded to `width` characters so that lines of all hosts are aligned.
    #[must_use]
    pub fn with_host(width: usize) -> Self {
        Self { template: "[${host}:${rank}] ".to_owned(), width }
    }

    /// Returns the prefix of one rank.
    #[must_use]
    pub fn of(&self, facts: &PrefixFacts<'_>) -> String {
        let mut prefix = String::new();
        let mut rest = self.template.as_str();
        while let Some(dollar) = rest.find('$') {
            prefix.push_str(&rest[..dollar]);
            let after = &rest[dollar + 1..];
            let (text, left) = match variable(after) {
                Some((name, left)) => (value(name, facts), left),
                None => {
                    (after.starts_with('$').then(|| "$".to_owned()), after.get(1..).unwrap_or(""))
                }
            };
            if let Some(text) = text {
                prefix.push_str(&text);
                rest = left;
            } else {
                prefix.push('$');
                rest = after;
            }
        }
        prefix.push_str(rest);
        format!("{prefix:<0$}", self.width)
    }
}

/// The default prefix is `[rank] `.
impl Default for Prefix {
    fn default() -> Self {
        Self { template: "[${rank}] ".to_owned(), width: 0 }
    }
}

impl FromStr for Prefix {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self { template: text.to_owned(), width: 0 })
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.template)
    }
}

/// Splits the text after a dollar sign into the name of the variable at its start and the rest.
fn variable(after: &str) -> Option<(&str, &str)> {
    if let Some(braced) = after.strip_prefix('{') {
        return braced.split_once('}');
    }
    let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
    (end > 0).then(|| after.split_at(end))
}

fn value(name: &str, facts: &PrefixFacts<'_>) -> Option<String> {
    Some(match name {
        "role_name" => facts.role.to_owned(),
        "rank" => facts.rank.to_string(),
        "local_rank" => facts.local_rank.to_string(),
        "group_rank" => facts.node_rank.to_string(),
        "restart_count" => facts.restart_count.to_string(),
        "host" => facts.host.to_owned(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates() {
        let facts = PrefixFacts {
            role: "trainer",
            rank: 12,
            local_rank: 4,
            node_rank: 1,
            restart_count: 2,
            host: "gpu-7",
        };
        let table = [
            ("", ""),
            ("plain ", "plain "),
            ("[${role_name}${rank}]:", "[trainer12]:"),
            ("$rank/$local_rank ", "12/4 "),
            ("$rank-$group_rank-$restart_count@$host ", "12-1-2@gpu-7 "),
            ("${unknown} $other ${rank", "${unknown} $other ${rank"),
            ("$$rank $", "$rank $"),
            ("$$$rank", "$12"),
            ("é$é${rank}é", "é$é12é"),
        ];
        for (template, expected) in table {
            assert_eq!(template.parse::<Prefix>().unwrap().of(&facts), expected, "{template}");
        }
        assert_eq!(Prefix::with_host(0).of(&facts), "[gpu-7:12] ");
    }
}
