//! Rules about any text file.

use super::Findings;

/// Checks that no file contains a folder of a user's machine.
pub(super) fn check(path: &str, contents: &str, findings: &mut Findings) {
    for (index, line) in contents.lines().enumerate() {
        if let Some(found) = machine_folder(line) {
            let number = index + 1;
            findings.violations.push(format!(
                "{path}:{number}: {found}... is a folder of one machine: name it relative to the \
                 checkout, or make a temporary one"
            ));
        }
    }
}

/// Returns the start of an absolute path into a home, a work folder or the temporary folder. The same words inside a
/// longer path or a URL are allowed.
fn machine_folder(line: &str) -> Option<String> {
    for folder in FOLDERS.split(' ') {
        let wanted = format!("/{folder}/");
        for (at, _) in line.match_indices(&wanted) {
            let before = line[..at].chars().next_back();
            let in_longer_path = before.is_some_and(|letter| {
                letter.is_alphanumeric()
                    || matches!(letter, '.' | '_' | '-' | '/' | '>' | '}' | '~' | '*' | ')' | '$')
            });
            let goes_on = line[at + wanted.len()..]
                .starts_with(|it: char| it.is_alphanumeric() || matches!(it, '.' | '_' | '-'));
            if !in_longer_path && goes_on {
                return Some(wanted);
            }
        }
    }
    None
}

/// One string, so that this file does not contain what is searched for.
const FOLDERS: &str = "home root work tmp Users";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_machine_folders_from_parts_of_longer_paths() {
        let with = |prefix: &str, folder: &str, suffix: &str| {
            machine_folder(&format!("{prefix}/{folder}/{suffix}")).is_some()
        };
        assert!(with("see \"", "home", "ann/x"));
        assert!(with("", "tmp", "x"));
        assert!(with("path=", "work", "main"));
        assert!(!with("a", "tmp", "x"));
        assert!(!with("https://example.org", "home", "page"));
        assert!(!with("$TMPDIR", "work", "x"));
        assert!(!with("the folder ", "tmp", ""));
        assert!(!with("the folder ", "tmp", "<name>"));
    }
}
