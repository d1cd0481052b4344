//! Doc comments of public items stand alone: they are read from a search, not from the line above.

use super::Findings;

/// First words that begin a fragment or a question instead of naming the item or what it does.
const OPENERS: [&str; 12] = [
    "As", "Between", "How", "Of", "That", "There", "These", "Those", "What", "Where", "Whether",
    "Which",
];

/// Fewer words than this name no more than the item's own name does.
const WORDS: usize = 3;

/// Names each public item of a published crate whose doc comment is shorter than [`WORDS`], begins with one of
/// [`OPENERS`], or ends with a default behind a semicolon.
pub(super) fn check(path: &str, contents: &str, findings: &mut Findings) {
    let is_published = path.starts_with("crates/") && path.contains("/src/");
    if !is_published || path.ends_with("/tests.rs") || path.contains("/tests/") {
        return;
    }
    for (line, text) in public_docs(contents) {
        // A macro may give the first paragraph, as an attribute above.
        let words = text.split_whitespace().count();
        let fault = if (1..WORDS).contains(&words) {
            "has fewer than three words; say what it is or does in the field's terms".to_owned()
        } else if let Some(opener) = opener(&text) {
            format!("begins with \"{opener}\"; begin with a verb (\"Returns …\") or a noun")
        } else if let Some(value) = value_behind_semicolon(&text) {
            format!("ends with \"; {value}\"; write \"Defaults to …\" as a sentence")
        } else {
            continue;
        };
        findings.violations.push(format!("{path}:{line}: the doc comment {fault}"));
    }
}

fn opener(text: &str) -> Option<&'static str> {
    let word = text.split(|it: char| !it.is_alphanumeric()).next()?;
    OPENERS.into_iter().find(|it| *it == word)
}

/// Returns the one or two words at the end of a sentence that has said something else. References are allowed.
fn value_behind_semicolon(text: &str) -> Option<&str> {
    let (_, value) = text.rsplit_once("; ")?;
    let words = value.split_whitespace().count();
    let is_reference = value.starts_with("see ") || value.ends_with(").");
    (value.ends_with('.') && words <= 2 && !is_reference).then_some(value)
}

/// The first paragraph of the doc comment of each public item, field, variant and trait method, with its line. Reads
/// lines as rustfmt leaves them: a block ends with a brace at the indentation at which it begins.
fn public_docs(contents: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    // The indentation of each enum or trait around the line, and whether it is public.
    let mut around: Vec<(usize, bool)> = Vec::new();
    let mut lines = contents.lines().enumerate().peekable();
    while let Some((at, line)) = lines.next() {
        let text = line.trim_start();
        let indentation = line.len() - text.len();
        if text.starts_with('}') {
            around.retain(|it| it.0 < indentation);
        }
        if let Some(is_public) = opens_members(text) {
            around.push((indentation, is_public));
        }
        let Some(first) = doc(text) else { continue };
        let mut paragraphs = vec![first];
        while let Some((_, next)) = lines.next_if(|(_, it)| doc(it.trim_start()).is_some()) {
            paragraphs.extend(doc(next.trim_start()));
        }
        while lines.next_if(|(_, it)| is_attribute(it, indentation)).is_some() {}
        let Some((_, item)) = lines.peek() else { continue };
        let item = item.trim_start();
        let is_member = around.last().is_some_and(|it| it.1 && it.0 + 4 == indentation);
        if item.starts_with("pub ") || (is_member && !item.starts_with("pub(")) {
            let first = paragraphs.split(|it| it.is_empty()).next().unwrap_or_default();
            found.push((at + 1, first.join(" ")));
        }
    }
    found
}

/// The text of a doc comment's line.
fn doc(line: &str) -> Option<&str> {
    line.strip_prefix("///").map(str::trim)
}

/// A line of an attribute, which may take several, or of a comment between documentation and item.
fn is_attribute(line: &str, indentation: usize) -> bool {
    let text = line.trim_start();
    let deeper = line.len() - text.len() > indentation;
    text.starts_with("#[") || text.starts_with("//") || deeper || text.starts_with(")]")
}

/// `true` for a public enum or trait that opens here, `false` for a block of another kind, which ends its members.
fn opens_members(text: &str) -> Option<bool> {
    if !text.ends_with('{') {
        return None;
    }
    let item = text.strip_prefix("pub ").unwrap_or(text);
    let item = item.strip_prefix("unsafe ").unwrap_or(item);
    let has_members = item.starts_with("enum ") || item.starts_with("trait ");
    let is_block = has_members || item.starts_with("impl") || item.starts_with("mod ");
    is_block.then_some(has_members && text.starts_with("pub "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(contents: &str) -> Vec<String> {
        let mut findings = Findings::default();
        check("crates/x/src/lib.rs", contents, &mut findings);
        findings.violations
    }

    #[test]
    fn fragments_questions_and_glued_defaults_are_found() {
        for doc in ["Of one layer of it.", "Its size.", "Whether it is so.", "Hidden size; 768."] {
            let violations = found(&format!("/// {doc}\n#[must_use]\npub fn x() {{}}\n"));
            assert_eq!(violations.len(), 1, "{doc}");
            assert!(violations[0].starts_with("crates/x/src/lib.rs:1: "), "{violations:?}");
        }
        for doc in [
            "Hidden size. Defaults to 768.",
            "Returns the sum; an empty list has none at all.",
            "Fits a model; see [`fit`].",
        ] {
            assert!(found(&format!("/// {doc}\npub fn x() {{}}\n")).is_empty(), "{doc}");
        }
    }

    #[test]
    fn members_of_public_enums_and_traits_count_and_private_items_do_not() {
        let members =
            "enum Kind {\n    /// Short.\n    One,\n    #[x(\n        y\n    )]\n    Two,\n}\n";
        assert_eq!(found(&format!("pub {members}")).len(), 1);
        assert!(found(members).is_empty());
        assert_eq!(found("pub trait T {\n    /// Short.\n    fn x(&self);\n}\n").len(), 1);
        assert!(found("impl T for X {\n    /// Short.\n    fn x(&self) {}\n}\n").is_empty());
        assert!(found("/// Short.\npub(crate) fn x() {}\n/// Short.\nfn y() {}\n").is_empty());
        let field =
            "pub struct X {\n    /// Short.\n    pub x: u8,\n    /// Short.\n    y: u8,\n}\n";
        assert_eq!(found(field).len(), 1);
    }

    #[test]
    fn tests_and_unpublished_crates_are_free() {
        let mut findings = Findings::default();
        for path in ["crates/x/tests/it.rs", "dev/x/src/lib.rs", "crates/x/src/tests.rs"] {
            check(path, "/// Short.\npub fn x() {}\n", &mut findings);
        }
        assert!(findings.violations.is_empty());
    }
}
