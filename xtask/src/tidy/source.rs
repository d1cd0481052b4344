//! Rules about Rust files.

use std::collections::HashSet;

use super::Findings;

/// Checks that documentation comes first, `unsafe` is only in three crates, the environment contract is in one file,
/// and files are not too long.
pub(super) fn check(path: &str, contents: &str, findings: &mut Findings) {
    if !contents.starts_with("//!") {
        findings.violations.push(format!("{path}: must begin with `//!`, saying what it is for"));
    }
    let lines = contents.lines().count();
    if lines > LONG_FILE_LINES {
        findings.notes.push(format!("{path}: has {lines} lines; split it by trade"));
    }
    let tokens = Tokens::of(contents);
    if !UNSAFE_CRATES.iter().any(|it| path.starts_with(it)) {
        for line in &tokens.unsafe_lines {
            let allowed = UNSAFE_CRATES.join(", ");
            findings.violations.push(format!("{path}:{line}: `unsafe` outside of {allowed}"));
        }
    }
    let outside = if is_shipped(path) { included_from_outside(path, contents) } else { Vec::new() };
    for (line, file) in outside {
        findings.violations.push(format!(
            "{path}:{line}: includes {file}, which is outside of the package and not in the published crate"
        ));
    }
    if is_shipped(path) && !path.starts_with(CONTRACT_FILE) {
        let end = tests_begin(contents).unwrap_or(usize::MAX);
        let contract: HashSet<&str> = CONTRACT.split(' ').collect();
        for (line, literal) in &tokens.literals {
            let named = contract.contains(literal.as_str()) || literal.starts_with(ELASTIC);
            if *line < end && named {
                findings.violations.push(format!(
                    "{path}:{line}: names the variable {literal}, which is for {CONTRACT_FILE}.rs \
                     alone to do"
                ));
            }
        }
    }
}

/// Returns the files that a crate's source includes from outside of its package, with their lines.
fn included_from_outside<'a>(path: &str, contents: &'a str) -> Vec<(usize, &'a str)> {
    // Only for published crates: cargo packs nothing from outside of a package's folder.
    let Some((_, inside)) = path.strip_prefix("crates/").and_then(|it| it.split_once('/')) else {
        return Vec::new();
    };
    let depth = inside.matches('/').count();
    let mut found = Vec::new();
    for (at, line) in contents.lines().enumerate() {
        for call in ["include_str!(\"", "include_bytes!(\""] {
            let file = line.split_once(call).and_then(|it| it.1.split('"').next());
            if let Some(file) = file.filter(|it| it.matches("../").count() > depth) {
                found.push((at + 1, file));
            }
        }
    }
    found
}

/// Returns `true` unless the file is a test: tests may set and read the variables that they check.
fn is_shipped(path: &str) -> bool {
    !path.split('/').any(|part| matches!(part, "tests" | "tests.rs" | "benches"))
}

/// Returns the line of the module of tests, which is at the end by the project's style.
fn tests_begin(contents: &str) -> Option<usize> {
    let lines: Vec<&str> = contents.lines().map(str::trim).collect();
    let at = lines
        .windows(2)
        .position(|pair| pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod "))?;
    Some(at + 1)
}

/// Content of a Rust file outside of comments.
#[derive(Debug, Default)]
struct Tokens {
    /// String literals with their lines, escapes as written.
    literals: Vec<(usize, String)>,
    /// Lines that contain the keyword.
    unsafe_lines: Vec<usize>,
}

impl Tokens {
    /// Splits the file with a lexer for comments, strings and characters, lifetimes and words. A full parser would take
    /// longer to build than the rest of xtask.
    fn of(contents: &str) -> Self {
        let mut tokens = Self::default();
        let mut rest = contents;
        let line_of =
            |rest: &str| 1 + contents[..contents.len() - rest.len()].matches('\n').count();
        while let Some(first) = rest.chars().next() {
            let length = if rest.starts_with("//") {
                rest.find('\n').unwrap_or(rest.len())
            } else if rest.starts_with("/*") {
                block_comment_length(rest)
            } else if first == '"' {
                let length = string_length(rest);
                tokens
                    .literals
                    .push((line_of(rest), rest.get(1..length - 1).unwrap_or_default().to_owned()));
                length
            } else if first == '\'' {
                character_length(rest)
            } else if first.is_alphabetic() || first == '_' {
                let word = &rest[..word_length(rest)];
                if let Some((length, text)) = raw_string(word, rest) {
                    tokens.literals.push((line_of(rest), text.to_owned()));
                    length
                } else {
                    if word == KEYWORD {
                        tokens.unsafe_lines.push(line_of(rest));
                    }
                    word.len()
                }
            } else {
                first.len_utf8()
            };
            rest = &rest[length..];
        }
        tokens
    }
}

fn word_length(text: &str) -> usize {
    text.find(|it: char| !it.is_alphanumeric() && it != '_').unwrap_or(text.len())
}

/// Returns the length of a block comment; they nest.
fn block_comment_length(text: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

fn string_length(text: &str) -> usize {
    let mut escaped = false;
    for (at, character) in text.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Returns the length and the content of `r"…"`, `br#"…"#` and similar literals.
fn raw_string<'a>(word: &str, text: &'a str) -> Option<(usize, &'a str)> {
    if !matches!(word, "r" | "br" | "cr") {
        return None;
    }
    let after = &text[word.len()..];
    let hashes = after.len() - after.trim_start_matches('#').len();
    let body = after[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let length = body.find(&end).unwrap_or(body.len());
    let start = word.len() + hashes + 1;
    Some(((start + length + end.len()).min(text.len()), &body[..length]))
}

/// Returns the length of a character such as `'"'` or `'\''`; for a lifetime, that of the quote.
fn character_length(text: &str) -> usize {
    let mut characters = text.char_indices().skip(1);
    match (characters.next(), characters.next()) {
        (Some((_, '\\')), Some((at, escaped))) => {
            let after = at + escaped.len_utf8();
            text[after..].find('\'').map_or(text.len(), |it| after + it + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 1,
    }
}

const UNSAFE_CRATES: [&str; 3] = ["crates/torch/", "crates/dylib-call/", "dev/test-device/"];
/// File env.rs, or the folder env/ should it be split.
const CONTRACT_FILE: &str = "crates/rank-env/src/env";
/// One string, so that this file does not contain the literals that are searched for.
const CONTRACT: &str = "RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE \
                        GROUP_WORLD_SIZE ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT";
const ELASTIC: &str = concat!("TORCH", "ELASTIC_");
const KEYWORD: &str = "unsafe";
const LONG_FILE_LINES: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    fn violations(path: &str, contents: &str) -> Vec<String> {
        let mut findings = Findings::default();
        check(path, contents, &mut findings);
        findings.violations
    }

    #[test]
    fn comments_strings_and_characters_are_told_apart() {
        let source = "//! a \"b\" unsafe\n/* \" /* unsafe */ ' */ let q = '\"'; let e = '\\'';\n\
                      fn f<'a>(x: &'a str) { g(\"one \\\" two\", r#\"th\"ree\"#, b\"four\") }\n\
                      unsafe { h() } // unsafe\n#![deny(unsafe_code)]\n";
        let tokens = Tokens::of(source);
        let literals: Vec<&str> = tokens.literals.iter().map(|it| it.1.as_str()).collect();
        assert_eq!(literals, ["one \\\" two", "th\"ree", "four"]);
        assert_eq!(tokens.literals[0].0, 3);
        assert_eq!(tokens.unsafe_lines, [4]);
    }

    #[test]
    fn each_rule_fires() {
        assert!(violations("crates/sampling/src/a.rs", "//! x\nfn f() {}\n").is_empty());
        assert_eq!(violations("crates/sampling/src/a.rs", "fn f() {}\n").len(), 1);
        let block = "//! x\nfn f() { unsafe { g() } }\n";
        assert_eq!(violations("crates/sampling/src/a.rs", block).len(), 1);
        assert!(violations("crates/torch/src/a.rs", block).is_empty());
        assert!(violations("dev/test-device/src/a.rs", block).is_empty());
        let reads = "//! x\nfn f() { var(\"WORLD_SIZE\"); var(\"OMP_NUM_THREADS\") }\n";
        let found = violations("crates/train/src/a.rs", reads);
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("crates/train/src/a.rs:2: "), "{found:?}");
        assert!(violations("crates/rank-env/src/env.rs", reads).is_empty());
        assert!(violations("crates/train/tests/a.rs", reads).is_empty());
        let tested = "//! x\n\n#[cfg(test)]\nmod tests {\n    const A: &str = \"RANK\";\n}\n";
        assert!(violations("crates/train/src/a.rs", tested).is_empty());
    }

    #[test]
    fn a_file_outside_of_the_package_is_found() {
        let includes = "//! x\nconst A: &str = include_str!(\"../../a.txt\");\n";
        assert_eq!(violations("crates/sampling/src/a.rs", includes).len(), 1);
        assert!(violations("crates/sampling/src/a/b.rs", includes).is_empty());
        assert!(violations("docs/lib.rs", includes).is_empty());
    }

    #[test]
    fn long_files_are_noted() {
        let mut findings = Findings::default();
        check("a.rs", &format!("//! x\n{}", "\n".repeat(LONG_FILE_LINES)), &mut findings);
        assert_eq!(findings.notes.len(), 1);
        assert!(findings.violations.is_empty());
    }
}
