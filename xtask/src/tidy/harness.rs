//! Rules about test programs with `harness = false`.

use super::Findings;

/// Checks that no test of such a program has `#[test]`, which compiles to nothing there: the test would be lost without
/// a message.
///
/// `files` are the Rust files of the checkout, each with its path and contents.
pub(super) fn check(
    manifest_path: &str,
    manifest: &str,
    files: &[(String, String)],
    findings: &mut Findings,
) {
    let folder = manifest_path.strip_suffix("Cargo.toml").unwrap_or_default();
    for name in without_harness(manifest) {
        let (file, modules) =
            (format!("{folder}tests/{name}.rs"), format!("{folder}tests/{name}/"));
        let own = files.iter().filter(|(path, _)| *path == file || path.starts_with(&modules));
        for (path, contents) in own {
            for (number, line) in (1..).zip(contents.lines()) {
                if ["#[test]", "dist_test!"].iter().any(|it| line.trim_start().starts_with(it)) {
                    findings.violations.push(format!(
                        "{path}:{number}: has no effect here, because {manifest_path} has `harness = \
                         false`: mark the function with `brigade_test_needs::needs`"
                    ));
                }
            }
        }
    }
}

/// Returns the names of test programs without libtest's harness.
fn without_harness(manifest: &str) -> Vec<&str> {
    let tables = manifest.split("[[test]]").skip(1);
    let tables = tables.map(|it| it.split("\n[").next().unwrap_or(it));
    tables
        .filter(|table| table.lines().any(|line| line.trim() == "harness = false"))
        .filter_map(|table| {
            let name = table.lines().find_map(|line| line.trim().strip_prefix("name = "))?;
            Some(name.trim_matches('"'))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = "[package]\nname = \"a\"\n\n[[test]]\nname = \"hosts\"\nharness = false\n\n\
                            [[test]]\nname = \"plain\"\n\n[[bench]]\nname = \"b\"\nharness = false\n";

    fn violations(files: &[(&str, &str)]) -> Vec<String> {
        let mut findings = Findings::default();
        let files: Vec<_> =
            files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
        check("crates/a/Cargo.toml", MANIFEST, &files, &mut findings);
        findings.violations
    }

    #[test]
    fn lost_tests_are_found() {
        let suite = "//! x\n#[needs()]\nfn x() {}\nbrigade_test_needs::main!();\n";
        // So that no line of this file begins like that.
        let marked = |mark: &str| format!("    {mark}\n    fn y() {{}}\n");
        let test = marked("#[test]");
        assert_eq!(violations(&[("crates/a/tests/hosts.rs", suite)]), [""; 0]);
        let main = ("crates/a/tests/hosts/main.rs", suite);
        let lost = violations(&[main, ("crates/a/tests/hosts/more.rs", &test)]);
        assert_eq!(lost.len(), 1);
        assert!(
            lost[0].starts_with("crates/a/tests/hosts/more.rs:1: has no effect here"),
            "{lost:?}"
        );
        let dist = marked(concat!("dist_", "test!(world = 2, y, |_| {});"));
        assert_eq!(violations(&[main, ("crates/a/tests/hosts/more.rs", &dist)]).len(), 1);
        // Programs with libtest's harness, and those of other packages.
        let others = [("crates/a/tests/plain.rs", &*test), ("crates/b/tests/hosts.rs", &*test)];
        assert_eq!(violations(&[main, others[0], others[1]]), [""; 0]);
    }
}
