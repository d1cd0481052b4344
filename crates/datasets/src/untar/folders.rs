//! Locations of fastai's folders.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::DatasetError;

/// Folders of archives, data and models.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Folders {
    pub(super) archives: PathBuf,
    pub(super) data: PathBuf,
    pub(super) models: PathBuf,
}

impl Folders {
    /// Returns the folders below `base`, or below the value of the variable `FASTAI_HOME`, or below `~/.fastai`, as
    /// absolute paths. Reads `config.ini` in that folder, if it exists.
    pub(super) fn find(
        base: Option<&Path>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, DatasetError> {
        let value = |name| variable(name).filter(|value| !value.is_empty());
        let home = value("HOME").map(PathBuf::from).or_else(std::env::home_dir);
        let base = match base.map(Path::to_owned).or_else(|| value("FASTAI_HOME").map(Into::into)) {
            Some(base) => base,
            None => Path::new("~").join(".fastai"),
        };
        let base = match base.strip_prefix("~") {
            Ok(below) => home.ok_or(DatasetError::NoHome)?.join(below),
            Err(_) => base,
        };
        let base = std::path::absolute(&base)
            .map_err(|cause| DatasetError::Read { path: base.clone(), cause })?;
        let path = base.join("config.ini");
        let config = match fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            read => read.map_err(|cause| DatasetError::Read { path, cause })?,
        };
        let folder = |key, default| base.join(setting(&config, key).unwrap_or(default));
        Ok(Self {
            archives: folder("archive", "archive"),
            data: folder("data", "data"),
            models: folder("model", "models"),
        })
    }
}

/// Returns the value of a key in the section `DEFAULT`, by the rules of Python's `configparser`.
fn setting<'a>(config: &'a str, key: &str) -> Option<&'a str> {
    let mut is_default = false;
    let mut found = None;
    for line in config.lines().map(str::trim) {
        if line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(section) = line.strip_prefix('[').and_then(|it| it.strip_suffix(']')) {
            is_default = section == "DEFAULT";
        } else if is_default
            && let Some((name, value)) = line.split_once(['=', ':'])
            && name.trim_end().eq_ignore_ascii_case(key)
        {
            found = Some(value.trim_start());
        }
    }
    found.filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_those_of_fastai() {
        let home = tempfile::tempdir().unwrap();
        let find = |base: Option<&Path>, fastai_home: &str| {
            let variable = |name: &str| match name {
                "HOME" => Some(home.path().into()),
                "FASTAI_HOME" => Some(fastai_home.into()),
                _ => None,
            };
            Folders::find(base, variable).unwrap()
        };
        let below = |base: PathBuf| Folders {
            archives: base.join("archive"),
            data: base.join("data"),
            models: base.join("models"),
        };
        assert_eq!(find(None, ""), below(home.path().join(".fastai")));
        assert_eq!(find(None, "/big/fastai"), below("/big/fastai".into()));
        assert_eq!(find(None, "~/f"), below(home.path().join("f")));
        assert_eq!(find(Some(Path::new("/own")), "/big/fastai"), below("/own".into()));
        assert_eq!(find(None, "rel"), below(std::env::current_dir().unwrap().join("rel")));

        let base = home.path().join("b");
        fs::create_dir(&base).unwrap();
        let config = "# made by hand\n[DEFAULT]\nData = /scratch/sets\narchive: packed/a b\nmodel = \n\n\
                      [other]\ndata = /no\n";
        fs::write(base.join("config.ini"), config).unwrap();
        let found = find(Some(&base), "");
        assert_eq!(found.data, Path::new("/scratch/sets"));
        assert_eq!(found.archives, base.join("packed/a b"));
        assert_eq!(found.models, base.join("models"));
        // The format in which fastai writes it.
        fs::write(
            base.join("config.ini"),
            "[DEFAULT]\ndata = data\narchive = archive\nstorage = tmp\nmodel = models\n\n",
        )
        .unwrap();
        assert_eq!(find(Some(&base), ""), below(base.clone()));

        fs::write(base.join("config.ini"), [0xff]).unwrap();
        let error = Folders::find(Some(&base), |_| None).unwrap_err().to_string();
        assert!(error.contains("b/config.ini"), "{error}");
    }
}
