//! Facts about a Cargo project: where cargo looks for libtorch.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use brigade_hardware::Sources;

/// Cargo project of a folder, with its settings for libtorch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Project {
    /// Folder of the project's `Cargo.toml`.
    pub root: PathBuf,
    /// `true` if the manifest names Brigade as a dependency.
    pub uses_brigade: bool,
    /// File in which `brigade setup` has written the location of libtorch, in this folder or a parent.
    pub file: Option<PathBuf>,
    /// Folder with `lib/` and `include/` that the file names.
    pub libtorch: Option<PathBuf>,
}

/// Searches the folder and its parents, as cargo does.
pub(super) fn gather(sources: &Sources, folder: &Path) -> Option<Project> {
    let manifest = |folder: &&Path| sources.path(folder.join("Cargo.toml")).is_file();
    let root = folder.ancestors().find(manifest)?;
    let files = root.ancestors().map(|it| it.join(FILE));
    let mut files = files.filter_map(|file| Some((sources.read(&file)?, file)));
    let (text, file) = files.next().map_or((None, None), |(text, file)| (Some(text), Some(file)));
    Some(Project {
        root: root.to_owned(),
        uses_brigade: sources.read(root.join("Cargo.toml")).is_some_and(|it| names_brigade(&it)),
        libtorch: text.and_then(|text| brigade_libtorch_setup::configured(&text).ok().flatten()),
        file,
    })
}

/// Returns `true` if a manifest has a line such as `brigade = "0.1"` or `brigade = { path = "..." }`, or a table of
/// that name, in any of its lists of dependencies.
fn names_brigade(manifest: &str) -> bool {
    manifest.lines().any(|line| {
        let line = line.trim();
        let key = line.split(['=', '.']).next().unwrap_or_default().trim();
        key == "brigade" && line.len() > key.len() || line.ends_with("dependencies.brigade]")
    })
}

const FILE: &str = ".cargo/libtorch.toml";

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_cargo_would_read() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let sources = Sources::under(folder.path());
        let gather = |from: &str| gather(&sources, Path::new(from));
        write("code/app/src/main.rs", "");
        assert_eq!(gather("/code/app/src"), None);
        write("code/app/Cargo.toml", "[dependencies]\nbrigade = { path = \"/b\" }\n");
        let mut expected =
            Project { root: "/code/app".into(), uses_brigade: true, ..Project::default() };
        assert_eq!(gather("/code/app/src"), Some(expected.clone()));
        write("code/.cargo/libtorch.toml", "[env]\nLIBTORCH = \"/opt/libtorch\"\n");
        expected.file = Some("/code/.cargo/libtorch.toml".into());
        expected.libtorch = Some("/opt/libtorch".into());
        assert_eq!(gather("/code/app"), Some(expected));
    }

    #[test]
    fn manifests_that_name_it() {
        for manifest in [
            "brigade = \"0.1\"",
            "brigade.workspace = true",
            "  brigade={git = \"x\"}",
            "[dependencies.brigade]",
            "[target.'cfg(unix)'.dependencies.brigade]",
        ] {
            assert!(names_brigade(manifest), "{manifest}");
        }
        for manifest in ["name = \"brigade\"", "# brigade = 1", "brigade-torch = \"1\"", "brigade"]
        {
            assert!(!names_brigade(manifest), "{manifest}");
        }
    }
}
