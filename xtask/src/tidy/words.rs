//! Rule about words: one term per concept. The glossary of ARCHITECTURE.md lists the terms, and the words that they
//! replace.

use anyhow::{Result, ensure};

use super::Findings;

/// File with the glossary, and the heading above its table.
pub(super) const GLOSSARY: &str = "ARCHITECTURE.md";
const HEADING: &str = "## Words";

/// Words that the sources do not use, each with its replacement.
pub(super) struct Words(Vec<(String, String)>);

impl Words {
    /// Reads the table: the term in the first column, the words that it replaces in backticks in the last one.
    ///
    /// # Errors
    /// Fails if the glossary is missing, or replaces no word.
    pub(super) fn of(architecture: &str) -> Result<Self> {
        let mut words = Vec::new();
        for row in section(architecture).filter(|row| row.starts_with('|')) {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            let [term, .., replaced] = cells[..] else { continue };
            for word in replaced.split('`').skip(1).step_by(2) {
                words.push((plain(word), term.replace('`', "")));
            }
        }
        ensure!(!words.is_empty(), "{GLOSSARY} has no table with replaced words below `{HEADING}`");
        Ok(Self(words))
    }

    /// Lists each line of a source, a page or a manifest with a replaced word. Identifiers are split into their parts:
    /// `world_size` and `WorldSize` are "world size".
    pub(super) fn check(&self, path: &str, contents: &str, findings: &mut Findings) {
        if !READ.iter().any(|end| path.ends_with(end)) {
            return;
        }
        let glossary = if path == GLOSSARY { section(contents).count() + 1 } else { 0 };
        let begins = contents.lines().position(|line| line == HEADING).unwrap_or(usize::MAX);
        for (index, line) in contents.lines().enumerate() {
            if glossary > 0 && (begins..begins + glossary).contains(&index) {
                continue;
            }
            let text = plain(line);
            for (word, term) in &self.0 {
                if text.contains(word.as_str()) {
                    let (word, number) = (word.trim(), index + 1);
                    findings.violations.push(format!(
                        "{path}:{number}: \"{word}\" is not in the glossary of {GLOSSARY}: write {term}"
                    ));
                }
            }
        }
    }
}

const READ: [&str; 6] = [".rs", ".md", ".toml", ".cpp", ".cu", ".h"];

/// Returns the lines from the glossary's heading to the next one.
fn section(architecture: &str) -> impl Iterator<Item = &str> {
    let after = architecture.lines().skip_while(|line| *line != HEADING).skip(1);
    after.take_while(|line| !line.starts_with("## "))
}

/// Returns the words of a text in lower case between single spaces, with identifiers split into their parts.
fn plain(text: &str) -> String {
    let mut words = String::from(" ");
    let mut before = ' ';
    for letter in text.chars() {
        if letter.is_uppercase() && before.is_lowercase() {
            words.push(' ');
        }
        if letter.is_alphanumeric() {
            words.extend(letter.to_lowercase());
        } else if !words.ends_with(' ') {
            words.push(' ');
        }
        before = letter;
    }
    if !words.ends_with(' ') {
        words.push(' ');
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# Page\nzorp\n## Words\n\n| Term | Meaning | Not |\n|---|---|---|\n\
                        | rank | a process | `zorp`, `two zorps` |\n## Next\na Zorp\n";

    fn found(path: &str, contents: &str) -> Vec<String> {
        let mut findings = Findings::default();
        Words::of(PAGE).unwrap().check(path, contents, &mut findings);
        findings.violations
    }

    #[test]
    fn words_are_found_in_prose_and_in_identifiers() {
        for line in ["a zorp.", "fn zorp_of()", "struct MyZorp;", "TWO_ZORPS", "Two\tzorps"] {
            assert_eq!(found("a.rs", line).len(), 1, "{line}");
        }
        for line in ["zorpy", "two of the zorps", ""] {
            assert!(found("a.rs", line).is_empty(), "{line}");
        }
        assert_eq!(
            found("b.md", "\na zorp"),
            ["b.md:2: \"zorp\" is not in the glossary of ARCHITECTURE.md: write rank"]
        );
        assert!(found("a.json", "zorp").is_empty());
    }

    #[test]
    fn the_glossary_itself_may_name_them() {
        let lines: Vec<String> = found(GLOSSARY, PAGE);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains(":2:") && lines[1].contains(":9:"), "{lines:?}");
    }

    #[test]
    fn a_page_without_a_glossary_is_an_error() {
        assert!(Words::of("# Page").is_err());
    }
}
