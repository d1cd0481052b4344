//! Rule about container files: base images have a version, users have no rights of root, and both files are one but for
//! CUDA.

use std::fs;

use anyhow::{Context, Result};

use super::Findings;
use crate::checkout::Checkout;

pub(super) fn check(checkout: &Checkout, findings: &mut Findings) -> Result<()> {
    let read = |path: &str| {
        fs::read_to_string(checkout.root().join(path))
            .with_context(|| format!("cannot read {path}"))
    };
    let (cpu, cuda) = (read(CPU)?, read(CUDA)?);
    let manifest: toml_edit::DocumentMut = read("Cargo.toml")?.parse()?;
    let rust = manifest["workspace"]["package"]["rust-version"].as_str().unwrap_or_default();
    findings.violations.extend(check_file(CPU, &cpu, rust));
    if without_cuda(&cuda) != without_cuda(&cpu) {
        findings
            .violations
            .push(format!("{CUDA}: it differs from {CPU} in more than lines that name CUDA"));
    }
    if read(&format!("{CPU}.dockerignore"))? != read(&format!("{CUDA}.dockerignore"))? {
        findings.violations.push(format!("{CUDA}.dockerignore: it differs from that of {CPU}"));
    }
    Ok(())
}

/// Checks the versions of the base images, of which Rust's is that of `Cargo.toml`, the user and the entry point.
fn check_file(path: &str, text: &str, rust: &str) -> Vec<String> {
    let mut violations = Vec::new();
    let has = |start: &str| text.lines().any(|line| line.starts_with(start));
    for (start, what) in [
        (format!("ARG RUST=docker.io/library/rust:{rust}.0-slim-"), "the image of Rust"),
        ("ARG DEBIAN=docker.io/library/debian:12.".to_owned(), "the image of Debian"),
        ("USER 1000:1000".to_owned(), "a user by number"),
        ("ENTRYPOINT [\"brigade\"]".to_owned(), "the entry point"),
    ] {
        if !has(&start) {
            violations.push(format!("{path}: {what} is missing: no line begins `{start}`"));
        }
    }
    violations
}

/// Returns the lines that both files share, and those that differ as the one for CPUs has them.
fn without_cuda(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| !line.starts_with("# ") || !line.contains("CUDA"));
    let lines = lines.filter(|line| !line.starts_with("# Image of") && !line.contains("NVIDIA"));
    let lines = lines.map(|line| line.replace(" --cuda", "").replace(" --features cuda", ""));
    lines.map(|line| line.replace("id=brigade-cuda", "id=brigade-cpu")).collect()
}

const CPU: &str = "containers/Dockerfile.cpu";
const CUDA: &str = "containers/Dockerfile.cuda";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_container_must_have_is_named() {
        let good = "ARG RUST=docker.io/library/rust:1.95.0-slim-bookworm\nARG \
                    DEBIAN=docker.io/library/debian:12.11-slim\nUSER 1000:1000\nENTRYPOINT [\"brigade\"]\n";
        assert_eq!(check_file("a", good, "1.95"), Vec::<String>::new());
        let bad = good.replace("rust:1.95.0-slim", "rust:latest").replace("USER 1000:1000\n", "");
        let found = check_file("a", &bad, "1.95");
        assert!(found.len() == 2 && found[0].starts_with("a: the image of Rust"), "{found:?}");
    }

    #[test]
    fn files_for_cpus_and_cuda_are_one_but_for_cuda() {
        let cpu = "# Image of a project, for CPUs\nRUN brigade setup \\\n  && x\nUSER 1\n";
        let cuda = "# Image of a project, for CUDA\nRUN brigade setup --cuda \\\n  && x\n# CUDA's.\nENV NVIDIA_A=b\nUSER 1\n";
        assert_eq!(without_cuda(cuda), without_cuda(cpu));
        assert_ne!(without_cuda(&cuda.replace("&& x", "&& y")), without_cuda(cpu));
    }
}
