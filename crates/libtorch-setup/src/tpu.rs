//! Files of TorchTPU, by which libtorch computes on TPUs: the backend, and a plug-in that drives the chips.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cache;
use crate::fetch;
use crate::install::{self, State};
use crate::pins::{Contents, Pin, Pins};

/// Plug-in that TorchTPU loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TpuPlugin {
    /// Google's libtpu, for TPUs.
    Tpu,
    /// XLA's client for CPUs, to try programs on machines without a TPU.
    Cpu,
}

impl TpuPlugin {
    /// Returns the name of its folder, and of its value for `brigade setup --tpu`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tpu => "tpu",
            Self::Cpu => "cpu",
        }
    }

    /// Returns the library in the folder of the unpacked wheel.
    fn library(self) -> &'static str {
        match self {
            Self::Tpu => "libtpu/libtpu.so",
            Self::Cpu => "lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so",
        }
    }
}

/// Files of TorchTPU in the user's cache: `$XDG_CACHE_HOME/brigade/tpu/VERSION`, by default in `~/.cache`.
///
/// The folder contains the wheel `torch-tpu` as `torch_tpu/`, and the wheels of plug-ins in `plugin/tpu/` and
/// `plugin/cpu/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TpuFiles {
    folder: PathBuf,
    version: String,
}

impl TpuFiles {
    /// Returns the files in the user's cache. `None` if they are not there, or not complete: `brigade setup --tpu`
    /// fetches them.
    #[must_use]
    pub fn find() -> Option<Self> {
        Self::find_in(&cache::of_brigade()?)
    }

    /// Returns the files below the folder of all of Brigade's caches of a user, by default `~/.cache/brigade`.
    #[must_use]
    pub fn find_in(caches: &Path) -> Option<Self> {
        Self::pinned(caches, &Pins::embedded().ok()?)
    }

    fn pinned(caches: &Path, pins: &Pins) -> Option<Self> {
        let contents = pins.torch_tpu()?;
        let files = Self::place(caches, pins)?;
        let is_ready = matches!(install::state(&files.folder, &contents), Ok(State::Ready));
        is_ready.then_some(files)
    }

    fn place(caches: &Path, pins: &Pins) -> Option<Self> {
        let version = pins.tpu.as_ref()?.backend.version.clone();
        Some(Self { folder: caches.join("tpu").join(&version), version })
    }

    /// Returns the files in the user's cache with this plug-in, and fetches what is missing. If nothing is missing, this
    /// takes microseconds.
    ///
    /// # Errors
    /// Fails if TorchTPU does not exist for this host or for this version of libtorch; or if Python with pip, the network
    /// or disk space is missing, or a checksum is wrong.
    pub fn find_or_fetch(plugin: TpuPlugin, libtorch: &str, pins: &Pins) -> Result<Self> {
        let caches = cache::of_brigade().context(
            "there is no folder for TorchTPU: this user has no home folder; set XDG_CACHE_HOME to an absolute path",
        )?;
        let known = pins.torch_tpu().zip(pins.plugin(plugin)).zip(Self::place(&caches, pins));
        let Some(((backend, wheel), files)) = known.filter(|_| env::consts::OS == "linux") else {
            bail!(
                "TorchTPU is fetched for Linux on x86_64 only, and this is {} on {}",
                env::consts::OS,
                env::consts::ARCH
            );
        };
        pins.check_libtorch(libtorch)?;
        let root = caches.join("tpu");
        for (place, contents) in
            [(files.folder.clone(), backend), (files.plugin_folder(plugin), wheel)]
        {
            if install::state(&place, &contents)? != State::Ready {
                fetch::fetch(&root, &place, &contents)?;
            }
        }
        Ok(files)
    }

    /// Returns the version of TorchTPU.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Returns the folder that contains `torch_tpu/` and `plugin/`.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the library with the kernels for a version of libtorch, such as `2.13.0`. `None` if TorchTPU has none for
    /// that version.
    #[must_use]
    pub fn glue(&self, libtorch: &str) -> Option<PathBuf> {
        let folder = self.folder.join(COMMON);
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let made_for: Vec<String> =
            names.filter_map(|name| Some(name.strip_prefix("glue_")?.replace('_', "."))).collect();
        let release = glue_for(libtorch, &made_for)?.replace('.', "_");
        let library = folder.join(format!("glue_{release}/libpywrap_{release}_common.so"));
        library.is_file().then_some(library)
    }

    /// Returns the library that is the same for all versions of libtorch. A glue loads it.
    #[must_use]
    pub fn base(&self) -> PathBuf {
        self.folder.join(COMMON).join("libxla_base.so")
    }

    /// Returns the plug-in to load: the library that `TPU_LIBRARY_PATH` names, or else libtpu, or else the plug-in for
    /// CPUs. `None` if there is none.
    #[must_use]
    pub fn plugin(&self) -> Option<PathBuf> {
        let named = env::var_os("TPU_LIBRARY_PATH").filter(|it| !it.is_empty());
        named.map(PathBuf::from).or_else(|| self.fetched_plugin())
    }

    fn fetched_plugin(&self) -> Option<PathBuf> {
        let plugin = [TpuPlugin::Tpu, TpuPlugin::Cpu].into_iter().find(|it| self.has(*it))?;
        Some(self.plugin_folder(plugin).join(plugin.library()))
    }

    /// Returns `true` if this plug-in has been fetched.
    #[must_use]
    pub fn has(&self, plugin: TpuPlugin) -> bool {
        self.plugin_folder(plugin).join(plugin.library()).is_file()
    }

    fn plugin_folder(&self, plugin: TpuPlugin) -> PathBuf {
        self.folder.join("plugin").join(plugin.name())
    }
}

impl Pins {
    /// Returns the contents of TorchTPU without a plug-in. `None` if it is not pinned for this host.
    fn torch_tpu(&self) -> Option<Contents<'_>> {
        Some(self.of_tpu(&self.tpu.as_ref()?.backend))
    }

    /// Returns the contents of a plug-in. `None` if it is not pinned for this host.
    fn plugin(&self, plugin: TpuPlugin) -> Option<Contents<'_>> {
        let pins = self.tpu.as_ref()?;
        Some(self.of_tpu(match plugin {
            TpuPlugin::Tpu => &pins.plugin_tpu,
            TpuPlugin::Cpu => &pins.plugin_cpu,
        }))
    }

    fn of_tpu<'a>(&'a self, pin: &'a Pin) -> Contents<'a> {
        Contents {
            product: "TorchTPU",
            name: format!("{} {}", pin.package, pin.version),
            instead: "",
            python: &self.python,
            wheels: vec![pin],
        }
    }

    /// Fails if TorchTPU has no kernels for this version of libtorch.
    fn check_libtorch(&self, libtorch: &str) -> Result<()> {
        let Some(pins) = &self.tpu else { return Ok(()) };
        if glue_for(libtorch, &pins.libtorch).is_none() {
            bail!(
                "TorchTPU {} is not made for libtorch {libtorch}, but for {}: choose one of these with \
                 --libtorch or --pytorch",
                pins.backend.version,
                pins.libtorch.join(", ")
            );
        }
        Ok(())
    }
}

/// Returns the version of the glue for a libtorch: the newest of its minor version that is not newer. Later patches of a
/// minor version keep its binary interface.
fn glue_for<'a>(libtorch: &str, made_for: &'a [String]) -> Option<&'a str> {
    let wanted = numbers(libtorch)?;
    let known = made_for.iter().filter_map(|version| Some((numbers(version)?, version)));
    let usable = known.filter(|(it, _)| it[..2] == wanted[..2] && it[2] <= wanted[2]);
    usable.max().map(|(_, version)| version.as_str())
}

/// Parses a version such as `2.13.0+cpu`.
fn numbers(version: &str) -> Option<[u32; 3]> {
    let release = version.split('+').next()?;
    let parts: Option<Vec<u32>> = release.split('.').map(|part| part.parse().ok()).collect();
    parts?.try_into().ok()
}

const COMMON: &str = "torch_tpu/csrc/common";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_glue_serves_the_patches_of_its_version() {
        let made_for = ["2.11.0", "2.12.0", "2.12.2", "2.13.0"].map(str::to_owned);
        for (libtorch, expected) in [
            ("2.13.0", Some("2.13.0")),
            ("2.13.0+cpu", Some("2.13.0")),
            ("2.12.1", Some("2.12.0")),
            ("2.12.3", Some("2.12.2")),
            ("2.14.0", None),
            ("2.10.1", None),
            ("2.13.0a0", None),
            ("2.13", None),
            ("", None),
        ] {
            assert_eq!(glue_for(libtorch, &made_for), expected, "{libtorch}");
        }
    }

    #[test]
    fn files_are_found_when_all_are_there() {
        let caches = tempfile::tempdir().unwrap();
        let pins = Pins::for_architecture("x86_64").unwrap();
        let find = || TpuFiles::pinned(caches.path(), &pins);
        assert_eq!(find(), None);
        let files = TpuFiles::place(caches.path(), &pins).unwrap();
        let write = |path: &str, text: &str| {
            let path = files.folder().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("torch_tpu/csrc/common/libxla_base.so", "base");
        let glue = "torch_tpu/csrc/common/glue_2_13_0/libpywrap_2_13_0_common.so";
        write(glue, "glue");
        assert_eq!(find(), None, "there is no stamp");
        install::write_stamp(files.folder(), &pins.torch_tpu().unwrap()).unwrap();
        let found = find().unwrap();
        assert!(found.base().is_file());
        assert_eq!(found.glue("2.13.0+cpu"), Some(files.folder().join(glue)));
        assert_eq!(found.glue("2.11.0"), None);

        let (cpu, tpu) = ("lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so", "libtpu/libtpu.so");
        assert!(!found.has(TpuPlugin::Cpu) && !found.has(TpuPlugin::Tpu));
        write(&format!("plugin/cpu/{cpu}"), "");
        assert_eq!(found.fetched_plugin(), Some(files.folder().join("plugin/cpu").join(cpu)));
        write(&format!("plugin/tpu/{tpu}"), "");
        assert_eq!(found.fetched_plugin(), Some(files.folder().join("plugin/tpu").join(tpu)));

        write(glue, "damaged");
        assert_eq!(find(), None);
    }

    #[test]
    fn pins_are_those_of_supported_versions() {
        let pins = Pins::for_architecture("x86_64").unwrap();
        let tpu = pins.tpu.as_ref().unwrap();
        for pin in [&tpu.backend, &tpu.plugin_tpu, &tpu.plugin_cpu] {
            assert!(pin.sha256.len() == 64 && pin.download_bytes > 0 && pin.installed_bytes > 0);
            assert!(pin.glibc().is_some_and(|it| it >= (2, 27)), "{}", pin.platform);
        }
        assert!(pins.check_libtorch(pins.libtorch_version()).is_ok());
        let error = pins.check_libtorch("2.14.0").unwrap_err().to_string();
        assert!(
            error.contains("is not made for libtorch 2.14.0, but for 2.11.0, 2.12.0, "),
            "{error}"
        );
    }
}
