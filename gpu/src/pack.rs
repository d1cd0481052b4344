//! `pack.json`: what is in the folder.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The list of contents at the root of the folder.
pub const FILE: &str = "pack.json";

/// The Python program at the root of the folder that finds libtorch and starts the runner.
pub const SCRIPT: &str = include_str!("run.py");

/// The Python program at the root of the folder that prints PyTorch's facts.
pub const FACTS_SCRIPT: &str = include_str!("facts.py");

/// What the folder holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pack {
    /// The commit that the programs were built from, with `+` where files differed from it.
    pub commit: String,
    /// The same programs, built for different libtorchs.
    pub builds: Vec<Build>,
    /// The test programs, in the order in which they are run.
    pub programs: Vec<Program>,
}

/// Programs that were built for one libtorch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Build {
    /// Its version, such as `2.13.0`.
    pub libtorch: String,
    /// Where they lie, from the root of the folder.
    pub folder: String,
    /// Whether they were built with the feature `cuda`.
    pub cuda: bool,
}

/// A test program.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Program {
    /// The package's folder and the target, such as `crates/torch` and `dist`.
    pub package: String,
    /// The name of the target.
    pub target: String,
    /// Whether it is among those that run on a machine without a GPU, where time is short.
    pub short: bool,
}

impl Program {
    /// How reports call it: `torch::dist`.
    #[must_use]
    pub fn name(&self) -> String {
        let package = self.package.rsplit('/').next().unwrap_or(&self.package);
        format!("{package}::{}", self.target)
    }
}

/// The name of a test program's file in the folder `tests` of a build.
#[must_use]
pub fn file_name(program: &Program) -> String {
    program.name().replace("::", "-")
}

impl Pack {
    /// Reads the list of a folder.
    ///
    /// # Errors
    /// There is none, or it is not what this version writes.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} is malformed", path.display()))
    }

    /// The builds for a libtorch of this version, the best first: the same minor version, then those nearest to it.
    pub(crate) fn builds_for(&self, version: &str) -> Vec<&Build> {
        let wanted = minor(version);
        let mut builds: Vec<&Build> = self.builds.iter().collect();
        builds.sort_by_key(|build| {
            let found = minor(&build.libtorch);
            // Where two are as near, the older one: libraries keep old symbols.
            (wanted.abs_diff(found), found)
        });
        builds
    }
}

/// 2011 for `2.11.0`.
fn minor(version: &str) -> u32 {
    let mut parts = version.split('.').map_while(|it| it.parse::<u32>().ok());
    let (major, minor) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    1000 * major + minor
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_build_comes_first() {
        let build = |version: &str| Build {
            libtorch: version.to_owned(),
            folder: version.to_owned(),
            cuda: true,
        };
        let pack = Pack {
            commit: String::new(),
            builds: vec![build("2.13.0"), build("2.11.0")],
            programs: Vec::new(),
        };
        let order = |version: &str| -> Vec<String> {
            pack.builds_for(version).iter().map(|it| it.libtorch.clone()).collect()
        };
        assert_eq!(order("2.11.0+cu130"), ["2.11.0", "2.13.0"]);
        assert_eq!(order("2.12.1"), ["2.11.0", "2.13.0"]);
        assert_eq!(order("2.13.1"), ["2.13.0", "2.11.0"]);
        assert_eq!(order("2.14.0"), ["2.13.0", "2.11.0"]);
    }

    #[test]
    fn programs_of_two_packages_do_not_share_a_file() {
        let program = |package: &str| Program {
            package: package.to_owned(),
            target: "example".to_owned(),
            short: false,
        };
        assert_eq!(file_name(&program("crates/nn")), "nn-example");
        assert_ne!(file_name(&program("crates/nn")), file_name(&program("examples/text")));
        assert_eq!(program("crates/torch").name(), "torch::example");
    }
}
