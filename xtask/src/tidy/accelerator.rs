//! Rule about the size of `Accelerator`: it has what a training loop calls; everything else belongs to the value that it
//! is about (`parallel()`, `checkpoints()`, `processes()`).

use super::Findings;

/// Public methods that `Accelerator` may have.
const METHODS: usize = 45;

/// Counts the documented public methods of `Accelerator` in all files of `brigade-train`.
pub(super) fn check(sources: &[(String, String)], findings: &mut Findings) {
    let methods: Vec<String> = sources
        .iter()
        .filter(|(path, _)| path.starts_with("crates/train/src/"))
        .flat_map(|(_, contents)| public_methods(contents))
        .collect();
    if methods.len() > METHODS {
        findings.violations.push(format!(
            "crates/train: Accelerator has {} public methods, {METHODS} are allowed: put the new one on the value that \
             it is about, such as `parallel()` or `checkpoints()` ({})",
            methods.len(),
            methods.join(", ")
        ));
    }
}

/// Returns the names of the documented public methods in blocks `impl Accelerator`.
fn public_methods(contents: &str) -> Vec<String> {
    let mut names = Vec::new();
    let (mut inside, mut hidden) = (false, false);
    for line in contents.lines() {
        match line {
            "impl Accelerator {" => inside = true,
            "}" => inside = false,
            "    #[doc(hidden)]" => hidden = true,
            _ if !inside => (),
            _ => {
                let Some(name) = method_name(line) else { continue };
                if !hidden {
                    names.push(name.to_owned());
                }
                hidden = false;
            }
        }
    }
    names
}

/// Returns the name if the line declares a public method, by the indentation of rustfmt.
fn method_name(line: &str) -> Option<&str> {
    let declaration = line.strip_prefix("    pub ")?;
    let (_, rest) = declaration.split_once("fn ")?;
    rest.split(['(', '<']).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with so many public methods, beside those that do not count.
    fn file(methods: usize) -> (String, String) {
        let mut text = "impl Accelerator {\n    #[doc(hidden)]\n    #[must_use]\n    pub fn hidden(&self) {}\n    pub(crate) \
                        fn inner(&self) {}\n    fn private(&self) {}\n"
            .to_owned();
        for index in 0..methods {
            text.push_str(&format!("    pub fn method_{index}<T>(&self) {{\n        0\n    }}\n"));
        }
        text.push_str("}\nimpl Builder {\n    pub fn other(&self) {}\n}\n");
        ("crates/train/src/accelerator.rs".to_owned(), text)
    }

    #[test]
    fn one_public_method_too_many_is_named() {
        let mut findings = Findings::default();
        check(&[file(METHODS)], &mut findings);
        assert_eq!(findings.violations, Vec::<String>::new());
        check(&[file(METHODS + 1)], &mut findings);
        let [violation] = findings.violations.as_slice() else { panic!("{findings:?}") };
        assert!(violation.contains("has 46 public methods, 45 are allowed"), "{violation}");
        assert!(violation.contains("method_0, method_1"), "{violation}");
    }
}
