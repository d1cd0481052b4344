//! The README and the workflows: what a person sees first stays short, and what a hosting site runs exists here.

use std::fs;

use anyhow::{Context, Result};
use clap::Parser;

use super::Findings;
use crate::Arguments;
use crate::checkout::Checkout;

/// Lines that the README may have.
const LINES: usize = 110;

/// Projects in the README's table of features, Brigade among them.
const PROJECTS: usize = 6;

pub(super) fn check(checkout: &Checkout, findings: &mut Findings) -> Result<()> {
    let read = |path: &str| {
        fs::read_to_string(checkout.root().join(path))
            .with_context(|| format!("cannot read {path}"))
    };
    let (readme, comparison) = (read("README.md")?, read("docs/comparison.md")?);
    findings.violations.extend(check_readme(&readme, &comparison));
    let workflows = checkout.root().join(".github/workflows");
    for entry in fs::read_dir(&workflows).context("cannot read .github/workflows")? {
        let path = entry?.path();
        let text = fs::read_to_string(&path)?;
        let name = checkout.relative(&path).display().to_string();
        findings.violations.extend(check_workflow(&name, &text, |program| {
            checkout.root().join(program).is_file()
        }));
    }
    Ok(())
}

/// Checks the length, the cells of the table of features, and that each row has its sources.
fn check_readme(readme: &str, comparison: &str) -> Vec<String> {
    let mut violations = Vec::new();
    let lines = readme.lines().count();
    if lines > LINES {
        violations
            .push(format!("README.md: {lines} lines, {LINES} are allowed: move details to docs/"));
    }
    let is_heading = |line: &&str| line.starts_with("| | Brigade |");
    let rows = readme.lines().skip_while(|line| !is_heading(line)).skip(2);
    let rows: Vec<&str> = rows.take_while(|line| line.starts_with('|')).collect();
    if rows.is_empty() {
        violations.push("README.md: there is no table that begins `| | Brigade |`".to_owned());
    }
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [feature, answers @ ..] = cells.as_slice() else { continue };
        if answers.len() != PROJECTS {
            violations
                .push(format!("README.md: {feature}: {} cells, not {PROJECTS}", answers.len()));
        }
        let is_answer = |cell: &&str| {
            matches!(cell.split([':', ',']).next(), Some("yes" | "no"))
                || cell.strip_prefix("partly: ").is_some_and(|it| !it.is_empty())
        };
        if let Some(wrong) = answers.iter().find(|cell| !is_answer(cell)) {
            violations.push(format!(
                "README.md: {feature}: `{wrong}` is not `yes`, `no` or `partly: ...`"
            ));
        }
        if !comparison.lines().any(|line| line.strip_prefix("## ") == Some(feature)) {
            violations
                .push(format!("docs/comparison.md: no section `## {feature}`, with its sources"));
        }
    }
    violations
}

/// Checks that commands of `cargo xtask` are understood, and that scripts of this checkout exist.
fn check_workflow(name: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut violations = Vec::new();
    let lines = text.lines().enumerate();
    for (index, line) in lines.filter(|(_, line)| !line.trim_start().starts_with('#')) {
        let number = index + 1;
        let line = line.trim().trim_start_matches("- ");
        let command = line.strip_prefix("run: ").unwrap_or(line);
        if command.starts_with("cargo xtask ") {
            // The only variable of the shell in a command is the version of a release.
            let filled = |word| if str::starts_with(word, "\"$") { "1.0.0" } else { word };
            let words = command.split_whitespace().skip(1).map(filled);
            if let Err(error) = Arguments::try_parse_from(words) {
                let error = error.to_string();
                let reason = error.lines().next().unwrap_or_default();
                violations.push(format!("{name}:{number}: {command}: {reason}"));
            }
        }
        let program = command.split_whitespace().next().unwrap_or_default();
        if program.starts_with(".ci/") && !exists(program) {
            violations.push(format!("{name}:{number}: there is no {program}"));
        }
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "| | Brigade | A | B | C | D | E |\n|---|---|---|---|---|---|---|\n";

    #[test]
    fn a_table_has_six_answers_and_a_source_in_each_row() {
        let good =
            format!("{HEAD}| Speed | yes | no | yes, as any | partly: slow | no | no |\n\ntext\n");
        assert_eq!(check_readme(&good, "## Speed\n"), Vec::<String>::new());
        let found = |row: &str| check_readme(&format!("{HEAD}{row}\n"), "## Speed\n").join("\n");
        assert!(found("| Speed | yes | no |").contains("2 cells, not 6"));
        assert!(found("| Speed | yes | no | no | no | no | maybe |").contains("`maybe`"));
        assert!(found("| Speed | yes | no | no | no | no | partly |").contains("`partly`"));
        assert!(found("| Size | yes | no | no | no | no | no |").contains("no section `## Size`"));
        assert!(check_readme("text\n", "").join("\n").contains("no table"));
        assert!(check_readme(&"line\n".repeat(111), "").join("\n").contains("111 lines"));
    }

    #[test]
    fn commands_of_workflows_exist() {
        let found = |text: &str| check_workflow("ci.yml", text, |it| it == ".ci/run").join("\n");
        assert_eq!(found("      - run: cargo xtask check\n      - run: .ci/run\n"), "");
        assert_eq!(found("        run: |\n          cargo xtask install hosts etcd\n"), "");
        assert_eq!(found("  # cargo xtask polish"), "");
        assert_eq!(found("- run: cargo xtask release \"${REF#v}\" --dry-run"), "");
        assert!(found("\n- run: cargo xtask polish").starts_with("ci.yml:2: cargo xtask polish: "));
        assert!(found("- run: .ci/walk --fast").contains("there is no .ci/walk"));
    }
}
