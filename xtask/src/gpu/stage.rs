//! Folder with the layout of the archive.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use brigade_gpu::{FACTS_SCRIPT, Pack, Program, SCRIPT};

use super::build::{Build, Built};
use super::programs::{FILES, PROGRAMS, RUNNER, TestProgram};
use crate::checkout::Checkout;

/// Folder with the layout of the archive.
#[derive(Debug)]
pub(super) struct Stage {
    folder: PathBuf,
    /// Compiled files in it.
    programs: Vec<PathBuf>,
}

impl Stage {
    /// Creates the folder anew. It belongs to this command alone.
    pub(super) fn make(
        checkout: &Checkout,
        parent: &Path,
        tests: &[TestProgram],
        built: &[(&Build<'_>, Vec<Built>)],
    ) -> Result<Self> {
        let cuda = built.iter().any(|it| it.0.cuda);
        // The suite's folder must not replace one that is in use.
        let folder = parent.join(if cuda { "brigade-gpu" } else { "brigade-gpu-of-the-suite" });
        if folder.exists() {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        let mut stage = Self { folder, programs: Vec::new() };
        for (build, programs) in built {
            let place = stage.folder.join("builds").join(build.libtorch.version());
            let find = |is_test: bool, package: &str, target: &str| {
                programs.iter().find(|program| {
                    program.is_test == is_test
                        && program.package == package
                        && program.target == target
                })
            };
            for program in tests.iter().map(in_archive) {
                if let Some(found) = find(true, &program.package, &program.target) {
                    let name = brigade_gpu::file_name(&program);
                    stage.link(&found.path, &place.join("tests").join(name))?;
                }
            }
            for (_, folder, name) in PROGRAMS {
                let found =
                    find(false, folder, name).with_context(|| format!("no program {name}"))?;
                stage.link(&found.path, &place.join(name))?;
            }
        }
        let (_, programs) = built.first().context("nothing was built")?;
        let runner = programs.iter().find(|program| !program.is_test && program.target == RUNNER.1);
        let runner = runner.with_context(|| format!("cargo has built no {}", RUNNER.1))?;
        stage.link(&runner.path, &stage.folder.join("bin").join(RUNNER.1))?;
        for path in FILES {
            copy(&checkout.root().join(path), &stage.folder.join(path))?;
        }
        let pack = Pack {
            commit: commit(checkout),
            builds: built
                .iter()
                .map(|(build, _)| brigade_gpu::Build {
                    libtorch: build.libtorch.version().to_owned(),
                    folder: format!("builds/{}", build.libtorch.version()),
                    cuda: build.cuda,
                })
                .collect(),
            programs: tests.iter().map(in_archive).filter(|test| cuda || test.short).collect(),
        };
        let list = serde_json::to_string_pretty(&pack).context("cannot write the list")?;
        let texts =
            [(brigade_gpu::FILE, list.as_str()), ("run.py", SCRIPT), ("facts.py", FACTS_SCRIPT)];
        for (name, text) in texts {
            let path = stage.folder.join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(stage)
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// A hard link where the file system allows it.
    fn link(&mut self, from: &Path, to: &Path) -> Result<()> {
        make_parent(to)?;
        if fs::hard_link(from, to).is_err() {
            fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
        self.programs.push(to.to_path_buf());
        Ok(())
    }

    /// Fails if a program contains a path of this machine.
    pub(super) fn holds_no_path_of(&self, builds: &[Build<'_>]) -> Result<()> {
        let mut own = Vec::new();
        for build in builds {
            own.extend(build.own_paths()?);
        }
        for program in &self.programs {
            let bytes =
                fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
            for path in &own {
                ensure!(
                    !holds(&bytes, path.as_bytes()),
                    "{} names {path}, which is a folder of this machine",
                    program.display()
                );
            }
        }
        Ok(())
    }
}

fn holds(bytes: &[u8], text: &[u8]) -> bool {
    let Some(first) = text.first() else { return false };
    let mut rest = bytes;
    while let Some(at) = rest.iter().position(|it| it == first) {
        if rest[at..].starts_with(text) {
            return true;
        }
        rest = &rest[at + 1..];
    }
    false
}

/// Returns the runner's entry of a test program.
fn in_archive(test: &TestProgram) -> Program {
    Program { package: test.folder.clone(), target: test.name.clone(), short: test.is_short }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if !from.is_dir() {
        make_parent(to)?;
        fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
        return Ok(());
    }
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry.with_context(|| format!("cannot read {}", from.display()))?;
        // Caches of Python are left out.
        if entry.file_name() != "__pycache__" {
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().context("a file has a folder")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))
}

/// Returns the commit, with `+` if files differ from it; `unknown` outside of a repository.
fn commit(checkout: &Checkout) -> String {
    let git = |arguments: &[&str]| -> Option<String> {
        let output =
            Command::new("git").args(arguments).current_dir(checkout.root()).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success().then_some(text)
    };
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else {
        return "unknown".to_owned();
    };
    let changed = git(&["status", "--porcelain"]).is_none_or(|it| !it.is_empty());
    format!("{commit}{}", if changed { "+" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_found_anywhere_in_a_file() {
        assert!(holds(b"ab/a/bc", b"/a/b"));
        assert!(holds(b"//a/b", b"/a/b"));
        assert!(!holds(b"/a/c/a", b"/a/b"));
    }

    #[test]
    fn the_programs_for_gpus_are_named_by_their_packages() {
        let tests = super::super::programs::test_programs(&Checkout::find().unwrap()).unwrap();
        let first = tests.iter().position(|it| it.name == "numeric").unwrap();
        assert!(first > 0 && tests[first..].iter().all(|it| it.name == "numeric"), "{tests:?}");
        assert!(tests.iter().any(|it| it.is_short) && !tests.iter().all(|it| it.is_short));
    }
}
